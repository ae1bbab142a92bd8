//! What recording costs: eager launches and nodes of a graph, with the recorder off, on, and off again.

use std::time::Instant;

use strobe_kernels_cuda::{CapturedGraph, CudaError, DeviceBuffer, Gpu, NvtxChoice, Precision, Profiler, RowOps};

const LAUNCHES: usize = 1000;
const REPEATS: usize = 7;

pub(crate) fn run(gpu: &Gpu) -> Result<(), CudaError> {
    let mut profiler = Profiler::open(true, NvtxChoice::Disable);
    for note in profiler.notes() {
        println!("{note}");
    }
    if !profiler.records() {
        return Ok(());
    }
    let ops = RowOps::new(gpu, Precision::Bf16)?;
    let (input, output) = (DeviceBuffer::new(4096, "an input")?, DeviceBuffer::new(2048, "an output")?);
    let kernels = || {
        (0..LAUNCHES).try_for_each(|op| {
            gpu.set_tag(op as u32);
            // SAFETY: one row of 1024 gates and ups fits in, and its activation out, which live until the end.
            unsafe { ops.silu_mul(gpu, input.ptr(), output.ptr(), 1, 1024) }
        })
    };
    let graph = CapturedGraph::capture(gpu, kernels)?;
    let origin = Instant::now();
    let now = || origin.elapsed().as_nanos() as u64;
    println!("{:<9} {:>18} {:>18} {:>16}", "recorder", "us to launch one", "us per eager one", "us per node");
    for (name, on) in [("off", false), ("on", true), ("off again", false), ("on again", true)] {
        let (mut launch, mut eager, mut node) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            if on {
                profiler.begin_window(gpu, &now)?;
                profiler.begin_iteration(0);
            }
            gpu.synchronize()?;
            let begun = Instant::now();
            kernels()?;
            launch.push(begun.elapsed());
            gpu.synchronize()?;
            eager.push(begun.elapsed());
            let begun = Instant::now();
            // SAFETY: one row of 1024 gates and ups fits in, and its activation out, which live until the end.
            unsafe { graph.launch(gpu) }?;
            profiler.graph_launched(&graph.nodes);
            gpu.synchronize()?;
            node.push(begun.elapsed());
            if on && let Some(timeline) = profiler.end_window(gpu, &now)? {
                let tied = timeline.activities.iter().filter(|a| a.node.is_some()).count();
                let (all, lost) = (timeline.activities.len(), timeline.dropped + timeline.untimed);
                println!("  {all} activities, {tied} tied, {lost} lost; {}", timeline.cost);
            }
        }
        let median = |times: &mut Vec<std::time::Duration>| {
            times.sort();
            times[REPEATS / 2].as_secs_f64() * 1e6 / LAUNCHES as f64
        };
        println!("{name:<9} {:>18.2} {:>18.2} {:>16.2}", median(&mut launch), median(&mut eager), median(&mut node));
    }
    Ok(())
}
