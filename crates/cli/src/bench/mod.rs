//! A benchmark from jobs to outcome; the verbs `bench` and `demo` are built on it.

pub(crate) mod balance;
pub(crate) mod client;
pub(crate) mod experts;
mod facts;
pub(crate) mod host;
pub(crate) mod html;
pub(crate) mod kernels;
pub(crate) mod outcome;
pub(crate) mod overhead;
pub(crate) mod plan;
pub(crate) mod start;
pub(crate) mod text;
pub(crate) mod utilization;
pub(crate) mod write;

use std::path::Path;

use anyhow::{Context, Result, bail};
use strobe_engine::device::{Device, DeviceFacts};
use strobe_engine::engine_dir::LoadedModel;
use strobe_engine::window::Window;
use strobe_engine::{Engine, EngineInfo, EngineOptions};
use strobe_kernels_cpu::Cpu;
use strobe_kernels_cuda::NvmlSampler;
use strobe_model::Tokenizer;
use strobe_workload::{MetricOptions, PercentileRule, Prompt, Sample, check_ids, metrics};

use crate::machine::{self, Machine, MeasuredPeaks, PeakFrame};
use crate::run_writer::RunWriter;
use crate::{interrupt, output, progress, recording};
use client::{Job, Load, RunData};
use outcome::{Outcome, RepeatFigures};
use start::Start;

/// Everything that decides a run, checked and resolved.
pub(crate) struct Spec {
    pub jobs: Vec<Job>,
    pub load: Load,
    pub engine: EngineOptions,
    /// Move mapped weights to memory before the measurement (on a CPU).
    pub move_weights: bool,
    pub warmup: usize,
    pub repeat: usize,
    pub windows: Vec<Window>,
    pub streaming: bool,
    pub rule: PercentileRule,
    pub dataset: Option<String>,
    /// The words that started it, for the record.
    pub command: String,
    /// How requests arrive, in words.
    pub arrival: String,
    /// Expert-parallel ranks that the experts are thought to be divided among.
    pub assumed_ranks: usize,
}

/// Turn samples into jobs: tokenize text, check ids.
pub(crate) fn jobs(
    dataset: &Path,
    samples: Vec<Sample>,
    vocab: usize,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<Job>> {
    check_ids(dataset, &samples, vocab as u32)?;
    let job = |(index, sample): (usize, Sample)| -> Result<Job> {
        let prompt = match sample.prompt {
            Prompt::Ids(ids) => ids,
            Prompt::Text(text) => {
                let Some(tokenizer) = tokenizer else {
                    bail!(
                        "sample {index} of the dataset is text, but the model has no tokenizer.json; give input_ids, or add the tokenizer and rebuild"
                    );
                };
                let ids = tokenizer.encode(&text)?;
                if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
                    bail!(
                        "sample {index} of the dataset: the tokenizer gives id {id}, but the model's vocabulary has {vocab} entries; use the model's own tokenizer"
                    );
                }
                ids
            }
        };
        Ok(Job { task_id: sample.task_id, prompt, output_tokens: sample.output_tokens })
    };
    samples.into_iter().enumerate().map(job).collect()
}

/// The least time a run can take by the cached ceilings: all operations at peak, or the weights read once per step.
fn shortest_seconds(spec: &Spec, model: &LoadedModel, info: &EngineInfo, peaks: &MeasuredPeaks) -> f64 {
    let prompts: usize = spec.jobs.iter().map(|job| job.prompt.len()).sum();
    let outputs: usize = spec.jobs.iter().map(|job| job.output_tokens as usize).sum();
    let flops = 2.0 * model.config.model.active_parameters_per_token() as f64 * (prompts + outputs) as f64;
    let together = spec.jobs.len().min(info.limits.runtime.0).min(spec.load.concurrency).max(1);
    let bytes = info.memory.weights_bytes as f64 * (outputs / together) as f64;
    (flops / peaks.of_products(&model.config.build).0).max(bytes / peaks.read_bytes_per_s)
}

/// Start the engine and check that every request can run.
fn open(device: Device, model: &LoadedModel, spec: &Spec) -> Result<Engine> {
    let engine = match device {
        Device::Cpu(mut cpu) => {
            model.weights.warm(&mut cpu);
            Engine::start(cpu, model, spec.engine.clone())?
        }
        Device::Cuda(gpu) => {
            let bar = progress::bytes("loading the GPU", strobe_engine::cuda::device_bytes(model));
            let mut watch = interrupt::watch(|done| bar.set_position(done));
            let engine = Engine::start_watched(gpu, model, spec.engine.clone(), &mut watch);
            bar.finish_and_clear();
            engine?
        }
    };
    let info = engine.info();
    info.notes.iter().for_each(|note| output::note(&format!("note: {note}")));
    if info.perfect_router.is_some() {
        output::warn(experts::WRONG);
    }
    for (index, job) in spec.jobs.iter().enumerate() {
        let place = || format!("request {index} (task_id {})", job.task_id);
        info.check(job.prompt.len(), job.output_tokens as usize).with_context(place)?;
    }
    Ok(engine)
}

/// Warm up, then bring the weights to memory. Says when the first token was drawn.
fn warm(engine: &Engine, model: &LoadedModel, spec: &Spec) -> Result<Option<u64>> {
    let first_token = client::warm_up(engine, &spec.jobs, spec.warmup, &spec.load.params)?;
    let device = &engine.info().device;
    if let (DeviceFacts::Cpu { tier, threads }, true) = (device, spec.move_weights && model.weights.is_mapped()) {
        let spinner = progress::spinner("moving weights to memory");
        model.weights.move_to_memory(&mut Cpu::new(*tier, *threads))?;
        spinner.finish_and_clear();
    }
    Ok(first_token)
}

/// Run a benchmark: start the engine, check every request, warm up, measure, stop. The ceilings are asked for once the
/// engine is warm: measuring them is no part of its start, which is given where this is the first thing a process does.
/// `keep` gets the records while the run goes on.
pub(crate) fn execute(
    device: Device,
    model: &LoadedModel,
    peaks: impl FnOnce() -> Result<MeasuredPeaks>,
    spec: &Spec,
    mut start: Option<Start>,
    keep: &mut RunWriter,
) -> Result<Outcome> {
    let engine = open(device, model, spec)?;
    let info = engine.info().clone();
    if let Some(start) = &mut start {
        start.engine_ms = start::since_beginning_ms();
    }
    let first_token = warm(&engine, model, spec)?;
    if let Some((start, first_token)) = start.as_mut().zip(first_token) {
        start.first_token_at(&info, first_token);
    }
    let peaks = &peaks()?;

    let options = MetricOptions { rule: spec.rule, world_size: 1, streaming: spec.streaming };
    let build = &model.config.build;
    let products = peaks.products(build);
    // A GPU's memory is its own: nobody else takes from its bandwidth.
    let mut frame = match info.device {
        DeviceFacts::Cpu { tier, threads } => {
            PeakFrame::open(tier, threads, shortest_seconds(spec, model, &info, peaks), products)
        }
        DeviceFacts::Cuda(_) => None,
    };
    let mut samples = None;
    let (mut framed, mut known) = (peaks.clone(), peaks.clone());
    let mut repeats = Vec::new();
    let mut run = RunData::default();
    let machine = Machine::of(&info.device);
    let about = write::About {
        info: &info,
        config: &model.config,
        engine_dir: model.dir.as_deref(),
        machine: &machine,
        dataset: spec.dataset.as_deref(),
        command: &spec.command,
        arrival: &spec.arrival,
    };
    interrupt::hold_to_the_end();
    keep.begin(about.to_json());
    keep.stream(&info, spec.assumed_ranks);
    for repeat in 0..spec.repeat {
        let last = repeat + 1 == spec.repeat;
        // The windows belong to the run that is reported, which is the last one.
        let windows = if last { spec.windows.clone() } else { Vec::new() };
        let sampler = info.device.cuda().map(|facts| {
            let clock = info.clock;
            NvmlSampler::start(&facts.device.pci_bus_id, move || clock.now())
        });
        keep.restart();
        run = client::run(&engine, &spec.jobs, &spec.load, windows, keep)?;
        samples = match sampler {
            Some(Ok(sampler)) => Some(sampler.stop()),
            Some(Err(error)) if last => {
                output::note(&format!("note: no samples of power and clocks: {error}"));
                None
            }
            _ => None,
        };
        let first_token = run.records.iter().filter_map(|r| r.token_times_ns.first()).min();
        if let Some((start, first_token)) = start.as_mut().zip(first_token) {
            start.first_token_at(&info, *first_token);
        }
        let mut bandwidth_around = None;
        if !interrupt::requested() {
            let achieved = utilization::achieved(&run.iterations);
            framed = match (&mut frame, &info.device) {
                (Some(frame), _) => {
                    let closed = frame.close(&known, achieved);
                    bandwidth_around = Some(closed.bandwidth);
                    closed.peaks
                }
                (None, DeviceFacts::Cpu { tier, threads }) if achieved.ops_per_s > framed.of_products(build).0 => {
                    machine::corrected(framed, &mut Cpu::new(*tier, *threads), products, achieved.ops_per_s)
                }
                (None, _) => framed,
            };
            known = known.better_of(&framed);
        }
        let (ops_per_s, _) = framed.of_products(build);
        if !run.partial
            && let Ok(metrics) = metrics(&run.records, &options)
        {
            let utilization = utilization::by_kind(&run.iterations, &framed, ops_per_s);
            let figures = RepeatFigures::of(&metrics, &utilization, &run.iterations);
            let figures = RepeatFigures { host: run.host.clone(), bandwidth_around, ..figures };
            if spec.repeat > 1 {
                keep.repeat(&figures);
            }
            repeats.push(figures);
        }
        // A run that the user did not stop and that is not whole was ended by the engine.
        if interrupt::requested() || run.partial {
            if !last {
                // The run that was to be reported and recorded never came.
                run.partial = true;
                run.unreached.extend_from_slice(&spec.windows);
            }
            break;
        }
    }
    drop(frame);
    let peaks = &framed;
    client::finish(engine, &mut run, &spec.load)?;
    keep.records(&run);
    run.notes.iter().for_each(|note| output::note(&format!("note: {note}")));
    for window in &run.unreached {
        let ran = run.iterations.len();
        let numbers = ran.checked_sub(1).map_or(String::new(), |last| format!(", 0 to {last}"));
        output::warn(&format!("profile window {window} was never reached: the run has {ran} iterations{numbers}"));
    }
    for recording in run.recordings.iter().filter(|r| !r.complete) {
        let ended = recording.steps.last().map_or(recording.window.first, |s| s.iteration);
        output::warn(&format!("profile window {} is incomplete: the run ended at iteration {ended}", recording.window));
    }
    let layers = experts::layers_of(&info);
    let trace = (!run.recordings.is_empty()).then(|| {
        recording::to_trace(
            &run.recordings,
            &recording::TraceContext {
                info: &info,
                unreached: &run.unreached,
                partial: run.partial,
                peaks: Some(peaks),
                model: &model.config.model_name,
                layer_ranges: recording::layer_ranges_wanted(),
                samples: samples.as_ref(),
                experts: experts::counts(&info, &run, &layers, spec.assumed_ranks).map(|c| (c, &run.iterations[..])),
            },
        )
    });
    let metrics = metrics(&run.records, &options);
    Ok(Outcome {
        metrics: metrics.map_err(anyhow::Error::from),
        utilization: utilization::by_kind(&run.iterations, peaks, peaks.of_products(build).0),
        config: model.config.clone(),
        engine_dir: model.dir.clone(),
        mapped: model.weights.is_mapped(),
        start,
        peaks: peaks.clone(),
        samples,
        machine,
        info,
        run,
        repeats,
        trace,
        rule: spec.rule,
        cache: spec.engine.cache,
        dataset: spec.dataset.clone(),
        windows: spec.windows.clone(),
        asked: spec.jobs.len(),
        command: spec.command.clone(),
        arrival: spec.arrival.clone(),
        assumed_ranks: spec.assumed_ranks,
    })
}
