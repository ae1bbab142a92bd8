//! From the engine's recordings to a trace.

use std::sync::LazyLock;

use strobe_analyze::{Context, Options};
use strobe_engine::EngineInfo;
use strobe_engine::recorder::Recording;
use strobe_engine::window::Window;
use strobe_trace::{
    Device, Distinct, Iteration, Meta, NONE, OpKind, OpRow, Process, RangeKind, RangeRow, Thread, Trace, Work,
};

use crate::machine::MeasuredPeaks;

/// What else a trace says about its run.
pub struct TraceContext<'a> {
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
    /// Also record a range per layer.
    pub layer_ranges: bool,
}

/// A recorded trace, ready to be analysed.
pub fn context(trace: &Trace) -> Context<'_> {
    static OPTIONS: LazyLock<Options> = LazyLock::new(Options::default);
    Context::new(trace, &OPTIONS)
}

/// Whether `STROBE_NVTX_DEBUG` or its anchor's alias asks for per-layer ranges.
pub fn layer_ranges_wanted() -> bool {
    ["STROBE_NVTX_DEBUG", "TLLM_NVTX_DEBUG", "TLLM_LLMAPI_ENABLE_NVTX"]
        .iter()
        .any(|name| std::env::var(name).is_ok_and(|v| v == "1"))
}

/// Put recordings into one trace. All times are on the engine's clock.
pub fn to_trace(recordings: &[Recording], context: &TraceContext<'_>) -> Trace {
    let info = context.info;
    let mut trace = Trace::default();
    let pid = i64::from(std::process::id());
    let tid = recordings.first().map_or(pid, |recording| i64::from(recording.thread));
    trace.devices = vec![Device { name: crate::machine::cpu_name(), is_cpu: true, ..Device::default() }];
    trace.processes = vec![Process { pid, name: "strobe".into(), ..Process::default() }];
    trace.threads = vec![Thread { process: 0, tid, name: "strobe-engine".into() }];
    let names: Vec<_> = info
        .program
        .iter()
        .zip(info.kernels.iter())
        .map(|(node, kernel)| {
            (trace.strings.intern(node.name), trace.strings.intern(node.category()), trace.strings.intern(kernel))
        })
        .collect();
    let mut works = Distinct::default();
    for recording in recordings {
        for step in &recording.steps {
            let t = &step.times;
            let [start, fetched, planned, scheduled, prepared, forwarded, sampled, end] =
                [t.start, t.fetched, t.planned, t.scheduled, t.prepared, t.forwarded, t.sampled, t.end]
                    .map(|time| time as i64);
            trace.iterations.push(Iteration {
                iter: step.iteration,
                start,
                end,
                context_requests: step.context_requests,
                generation_requests: step.generation_requests,
                context_tokens: step.context_tokens,
                generation_tokens: step.generation_tokens,
                window: recording.index as u32,
            });
            let forward = format!(
                "[Executor] _forward_step {}: {} ctx reqs, {} gen reqs",
                step.iteration, step.context_requests, step.generation_requests
            );
            let phases = [
                ("_fetch_new_requests", RangeKind::Schedule, start, fetched),
                ("_schedule", RangeKind::Schedule, fetched, planned),
                ("prepare_resources", RangeKind::Prepare, planned, scheduled),
                ("_prepare_inputs", RangeKind::Prepare, scheduled, prepared),
                (forward.as_str(), RangeKind::ForwardStep, prepared, forwarded),
                ("_forward_step", RangeKind::Other, prepared, forwarded),
                ("_sample_async", RangeKind::Sample, forwarded, sampled),
                ("_handle_responses", RangeKind::Respond, sampled, end),
            ];
            for (name, kind, start, end) in phases {
                add_range(&mut trace, name, kind, number(step.iteration), start, end);
            }
        }
        for event in &recording.ops {
            let Some((node, &(op, category, kernel))) =
                info.program.get(event.node as usize).zip(names.get(event.node as usize))
            else {
                continue;
            };
            let work = works.number(Work {
                op,
                category,
                layer: node.layer.map(u32::from),
                shape: event.cost.shape,
                bytes: event.cost.bytes,
                flops: event.cost.flops,
            });
            let op = OpRow::new(OpKind::CpuOp, kernel, event.start as i64, event.end as i64);
            trace.ops.push(OpRow { work, iteration: number(event.iteration), ..op });
        }
    }
    trace.works = works.into_values();
    if context.layer_ranges {
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
    trace.meta = Meta {
        session_start_utc_ns: Some(info.clock.utc_ns() as i64),
        producer: format!("strobe {}", env!("CARGO_PKG_VERSION")),
        partial: context.partial,
        windows: recorded.chain(unreached).collect(),
        peaks: context.peaks.map(MeasuredPeaks::for_trace),
        extra: [
            ("model".to_string(), context.model.to_string()),
            ("simd_tier".to_string(), info.tier.name().to_string()),
            ("threads".to_string(), info.threads.to_string()),
        ]
        .into(),
        ..Meta::default()
    };
    trace.finish();
    trace
}

/// The iteration's number as traces hold it.
fn number(iteration: u64) -> u32 {
    u32::try_from(iteration).unwrap_or(NONE)
}

fn add_range(trace: &mut Trace, name: &str, kind: RangeKind, iteration: u32, start: i64, end: i64) {
    let name = trace.strings.intern(name);
    trace.ranges.push(RangeRow { kind, iteration, ..RangeRow::new(name, 0, start, end) });
}

/// A range around the ops of each layer, as the anchor's debug ranges.
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
