//! Times of single kernels on the GPU that is there.
//!
//! `microbench [TOPIC...]`: all topics, or those named.

use std::process::ExitCode;

use strobe_kernels_cuda::{CapturedGraph, CudaError, Event, Gpu};

mod attention;
mod gemm;
mod latent;
mod lt;
mod moe;
mod profiler;
mod rows;
mod skinny;

type Topic = (&'static str, fn(&Gpu) -> Result<(), CudaError>);

const TOPICS: &[Topic] = &[
    ("attention", attention::run),
    ("attention_chain", attention::run_chain),
    ("gemm", gemm::run),
    ("latent", latent::run),
    ("lt", lt::run),
    ("moe", moe::run),
    ("profiler", profiler::run),
    ("rows", rows::run),
    ("skinny", skinny::run),
];

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    if let Some(unknown) = wanted.iter().find(|name| TOPICS.iter().all(|(topic, _)| topic != name)) {
        let names: Vec<&str> = TOPICS.iter().map(|(topic, _)| *topic).collect();
        eprintln!("no topic {unknown}; there are {}", names.join(", "));
        return ExitCode::from(2);
    }
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{}", gpu.info().name);
    for (topic, run) in TOPICS.iter().filter(|(topic, _)| wanted.is_empty() || wanted.iter().any(|name| name == topic))
    {
        println!("\n## {topic}");
        if let Err(error) = run(&gpu) {
            eprintln!("{topic}: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Median microseconds of one of `repeats` calls of `body`, replayed as a graph so that launches cost the host nothing.
/// `body` is told which call it is, so that it can take its operands from different places.
pub fn graph_microseconds(
    gpu: &Gpu,
    repeats: usize,
    body: impl Fn(usize) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    body(0)?;
    let graph = CapturedGraph::capture(gpu, || (0..repeats).try_for_each(&body))?;
    // SAFETY: `body` launches nothing but what its buffers are large enough for, which its caller keeps.
    unsafe { graph.launch(gpu) }?;
    let (begin, end) = (Event::new(true)?, Event::new(true)?);
    let mut times = Vec::new();
    for _ in 0..7 {
        begin.record(gpu)?;
        // SAFETY: `body` launches nothing but what its buffers are large enough for, which its caller keeps.
        unsafe { graph.launch(gpu) }?;
        end.record(gpu)?;
        end.wait()?;
        times.push(f64::from(end.since(&begin)?) * 1e3 / repeats as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
