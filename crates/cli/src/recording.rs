//! From the engine's recordings to a trace.

mod gpu;

use std::sync::LazyLock;

use strobe_analyze::experts::{ASSUMED_RANKS, ExpertCounts};
use strobe_analyze::{Context, Options};
use strobe_engine::recorder::{Recording, StepEvent};
use strobe_engine::window::Window;
use strobe_engine::{EngineInfo, IterationRecord};
use strobe_kernels_cuda::GpuSamples;
use strobe_model::program::{Cost, Node};
use strobe_trace::{
    Device, Distinct, ExpertLoad, GraphMode, Iteration, Meta, NONE, OpKind, OpRow, Process, RangeKind, RangeRow, StrId,
    Thread, Trace, Work,
};

use crate::bench::experts;
use crate::machine::MeasuredPeaks;

/// What else a trace says about its run.
pub(crate) struct TraceContext<'a> {
    /// Facts about the engine.
    pub info: &'a EngineInfo,
    /// Windows that were asked for but never reached.
    pub unreached: &'a [Window],
    /// Whether the run was cut short.
    pub partial: bool,
    /// Ceilings for the roofline.
    pub peaks: Option<&'a MeasuredPeaks>,
    /// Name of the model.
    pub model: &'a str,
    /// Also record a range per layer. On a GPU the ops themselves say their layer.
    pub layer_ranges: bool,
    /// What the GPU reported of itself during the run.
    pub samples: Option<&'a GpuSamples>,
    /// Where tokens went in a model of experts, with the iterations that were counted.
    pub experts: Option<(ExpertCounts<'a>, &'a [IterationRecord])>,
}

/// A recorded trace, ready to be analysed.
pub(crate) fn context(trace: &Trace) -> Context<'_> {
    static OPTIONS: LazyLock<Options> = LazyLock::new(Options::default);
    Context::new(trace, &OPTIONS)
}

/// Whether `STROBE_NVTX_DEBUG`, or a variable of TensorRT-LLM's for the same, asks for per-layer ranges.
pub(crate) fn layer_ranges_wanted() -> bool {
    ["STROBE_NVTX_DEBUG", "TLLM_NVTX_DEBUG", "TLLM_LLMAPI_ENABLE_NVTX"]
        .iter()
        .any(|name| std::env::var(name).is_ok_and(|v| v == "1"))
}

/// Put recordings into one trace. All times are on the engine's clock.
pub(crate) fn to_trace(recordings: &[Recording], context: &TraceContext<'_>) -> Trace {
    let info = context.info;
    let mut trace = Trace::default();
    let pid = i64::from(std::process::id());
    let tid = recordings.first().map_or(pid, |recording| i64::from(recording.thread));
    let on_gpu = recordings.iter().find_map(|recording| recording.gpu.as_ref());
    trace.devices = vec![match on_gpu {
        Some(recorded) => gpu::device(&recorded.device),
        None => Device { name: crate::machine::cpu_name(), is_cpu: true, ..Device::default() },
    }];
    trace.processes = vec![Process { pid, name: "strobe".into(), ..Process::default() }];
    trace.threads = vec![Thread { process: 0, tid, name: "strobe-engine".into() }];
    let kernels: Vec<_> = info.kernels.iter().map(|kernel| trace.strings.intern(kernel)).collect();
    let mut meanings = Meanings::new(&mut trace, &info.program);
    let mut rows = gpu::Rows::default();
    for recording in recordings {
        let spans = gpu::Spans::of(&recording.steps, recording.gpu.as_ref().map(|gpu| &gpu.timeline));
        for (step, &span) in recording.steps.iter().zip(&spans.steps) {
            add_step(&mut trace, recording.index, step, span, spans.overlap);
        }
        if let Some(recorded) = &recording.gpu {
            rows.add(&mut trace, &mut meanings, recording, &recorded.timeline);
            continue;
        }
        if info.device.cuda().is_some() {
            continue; // when the host issued an op says nothing of when it ran
        }
        for event in &recording.ops {
            let Some(&kernel) = kernels.get(event.node as usize) else { continue };
            let op = OpRow::new(OpKind::CpuOp, kernel, event.start as i64, event.end as i64);
            let work = meanings.work(event.node, &event.cost);
            trace.ops.push(OpRow { work, iteration: number(event.iteration), ..op });
        }
    }
    trace.works = meanings.works.into_values();
    rows.finish(&mut trace);
    if let Some(samples) = context.samples {
        trace.counters = gpu::counters(samples);
    }
    if let Some((counts, iterations)) = &context.experts {
        add_expert_loads(&mut trace, counts, iterations);
    }
    if context.layer_ranges && on_gpu.is_none() {
        add_layer_ranges(&mut trace);
    }
    let window = |index: usize, window: Window, complete| strobe_trace::Window {
        index: index as u32,
        first: window.first,
        last: window.last,
        complete,
    };
    let recorded = recordings.iter().map(|r| window(r.index, r.window, r.complete));
    let unreached = context.unreached.iter().enumerate().map(|(i, w)| window(recordings.len() + i, *w, false));
    let mut extra: std::collections::BTreeMap<String, String> =
        [("model".to_string(), context.model.to_string()), ("device".to_string(), info.device.describe())].into();
    extra.extend(recordings.iter().filter_map(|recording| {
        let cost = recording.gpu.as_ref()?.timeline.cost;
        Some((format!("recorder of window {}", recording.window), cost.to_string()))
    }));
    let notices = recordings.iter().flat_map(|recording| match &recording.gpu {
        Some(recorded) => gpu::notices(&recorded.timeline),
        None if info.device.cuda().is_some() => {
            vec![format!(
                "the kernels of window {} were not recorded; only the host's ranges are here",
                recording.window
            )]
        }
        None => Vec::new(),
    });
    let wrong = info.perfect_router.map(|_| experts::WRONG.to_string());
    if let Some((counts, _)) = context.experts.as_ref().filter(|(counts, _)| counts.ranks > 1) {
        extra.insert(ASSUMED_RANKS.into(), counts.ranks.to_string());
    }
    trace.meta = Meta {
        notices: wrong.into_iter().chain(notices).collect(),
        graph_mode: on_gpu.map(|_| GraphMode::Node),
        session_start_utc_ns: Some(info.clock.utc_ns() as i64),
        producer: format!("strobe {}", env!("CARGO_PKG_VERSION")),
        partial: context.partial,
        windows: recorded.chain(unreached).collect(),
        peaks: context.peaks.map(MeasuredPeaks::for_trace),
        extra,
        ..Meta::default()
    };
    trace.finish();
    trace
}

/// The counts of the recorded iterations.
fn add_expert_loads(trace: &mut Trace, counts: &ExpertCounts<'_>, iterations: &[IterationRecord]) {
    for (index, record) in iterations.iter().enumerate().filter(|(_, record)| record.profiled) {
        for load in counts.iteration(index).layer_loads() {
            let row = |(expert, tokens): (usize, &u64)| ExpertLoad {
                iter: record.iter,
                layer: load.layer as u32,
                expert: expert as u32,
                tokens: *tokens as u32,
            };
            trace.expert_loads.extend(load.tokens_per_expert.iter().enumerate().map(row));
        }
    }
}

/// What ops mean in the model: their names, categories and layers, with what they had to do.
struct Meanings<'a> {
    program: &'a [Node],
    /// Name and category of each op.
    names: Vec<(StrId, StrId)>,
    works: Distinct<Work>,
}

impl<'a> Meanings<'a> {
    fn new(trace: &mut Trace, program: &'a [Node]) -> Meanings<'a> {
        let mut intern = |text: &str| trace.strings.intern(text);
        let names = program.iter().map(|node| (intern(node.name), intern(node.category()))).collect();
        Meanings { program, names, works: Distinct::default() }
    }

    /// The number of what op `node` means when it has to do `cost`.
    fn work(&mut self, node: u32, cost: &Cost) -> u32 {
        let found = self.program.get(node as usize).zip(self.names.get(node as usize));
        let Some((node, &(op, category))) = found else { return NONE };
        let layer = node.layer.map(u32::from);
        self.works.number(Work { op, category, layer, shape: cost.shape, bytes: cost.bytes, flops: cost.flops })
    }
}

/// The iteration and its phases. When steps overlap, the phases in an iteration's time are those of its neighbours too,
/// so they carry no number and time decides.
fn add_step(trace: &mut Trace, window: usize, step: &StepEvent, span: gpu::StepSpan, overlap: bool) {
    trace.iterations.push(Iteration {
        iter: step.iteration,
        start: span.start,
        end: span.end,
        context_requests: step.context_requests,
        generation_requests: step.generation_requests,
        context_tokens: step.context_tokens,
        generation_tokens: step.generation_tokens,
        window: window as u32,
        cpu_wait: step.cpu_wait_ns.and_then(|ns| i64::try_from(ns).ok()),
    });
    let t = &step.times;
    let [start, fetched, planned, scheduled, prepared, forwarded, sampled, end] =
        [t.start, t.fetched, t.planned, t.scheduled, t.prepared, t.forwarded, t.sampled, t.end].map(|time| time as i64);
    let forward = format!(
        "[Executor] _forward_step {}: {} ctx reqs, {} gen reqs",
        step.iteration, step.context_requests, step.generation_requests
    );
    let (launch_start, launch_end) = span.launches.unwrap_or((prepared, forwarded));
    let phases = [
        ("_fetch_new_requests", RangeKind::Schedule, start, fetched),
        ("_schedule", RangeKind::Schedule, fetched, planned),
        ("prepare_resources", RangeKind::Prepare, planned, scheduled),
        ("_prepare_inputs", RangeKind::Prepare, scheduled, prepared),
        (forward.as_str(), RangeKind::ForwardStep, launch_start, launch_end),
        ("_forward_step", RangeKind::Other, launch_start, launch_end),
        ("_sample_async", RangeKind::Sample, forwarded, sampled),
        ("_handle_responses", RangeKind::Respond, sampled, end),
    ];
    let iteration = if overlap { NONE } else { number(step.iteration) };
    for (name, kind, start, end) in phases {
        add_range(trace, name, kind, iteration, start, end);
    }
}

/// The iteration's number as traces hold it.
fn number(iteration: u64) -> u32 {
    u32::try_from(iteration).unwrap_or(NONE)
}

fn add_range(trace: &mut Trace, name: &str, kind: RangeKind, iteration: u32, start: i64, end: i64) {
    let name = trace.strings.intern(name);
    trace.ranges.push(RangeRow { kind, iteration, ..RangeRow::new(name, 0, start, end) });
}

/// A range around the ops of each layer, as TensorRT-LLM's debug ranges.
fn add_layer_ranges(trace: &mut Trace) {
    let mut open: Option<(u32, u32, i64, i64)> = None;
    let mut layers = Vec::new();
    for index in 0..trace.ops.len() {
        let op = trace.ops.get(index);
        let here = trace.work_of(index).and_then(|work| work.layer).map(|layer| (op.iteration, layer));
        match (&mut open, here) {
            (Some((iteration, layer, _, end)), Some(key)) if (*iteration, *layer) == key => *end = op.end,
            (open, here) => {
                layers.extend(open.take());
                *open = here.map(|(iteration, layer)| (iteration, layer, op.start, op.end));
            }
        }
    }
    layers.extend(open);
    for (iteration, layer, start, end) in layers {
        add_range(trace, &format!("layer {layer}"), RangeKind::Layer, iteration, start, end);
    }
}
