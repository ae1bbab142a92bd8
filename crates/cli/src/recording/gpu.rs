//! What a GPU did, as rows of a trace.

use std::collections::HashMap;

use strobe_engine::recorder::{Recording, StepEvent};
use strobe_kernels_cuda::{Activity, ActivityKind, DeviceInfo, GpuSamples, KernelTimeline};
use strobe_model::program::Cost;
use strobe_trace::{
    CallKind, CallRow, Counter, Device, Distinct, KernelDetail, NONE, OpDetail, OpKind, OpRow, StrId, Thread, Trace,
};

use super::{Meanings, number};

/// The GPU as traces describe devices.
pub(super) fn device(info: &DeviceInfo) -> Device {
    let (major, minor) = info.compute_capability;
    Device {
        ordinal: info.index,
        name: info.name.clone(),
        memory_bytes: Some(info.memory_bytes),
        multiprocessors: Some(info.multiprocessors),
        clock_hz: Some(f64::from(info.clock_khz) * 1e3),
        compute_capability: u32::try_from(major).ok().zip(u32::try_from(minor).ok()),
        ..Device::default()
    }
}

/// Where an iteration lies in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepSpan {
    pub start: i64,
    pub end: i64,
    /// From its first launch to its last, where they were recorded.
    pub launches: Option<(i64, i64)>,
}

/// Where iterations lie in time, so that they do not overlap.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Spans {
    pub steps: Vec<StepSpan>,
    /// Whether the GPU began on a step before the host was done with the one before.
    pub overlap: bool,
}

impl Spans {
    /// An iteration lasts from the host's first look at it to its answers. When the GPU is already busy with the next one
    /// by then, it lasts until the GPU is done with it: the rest of the host's work hides behind the next iteration.
    pub(super) fn of(steps: &[StepEvent], timeline: Option<&KernelTimeline>) -> Spans {
        let activities = timeline.map_or(&[][..], |timeline| &timeline.activities);
        let calls = timeline.map_or(&[][..], |timeline| &timeline.calls);
        let calls: HashMap<u32, (i64, i64)> = calls.iter().map(|c| (c.correlation, (c.start, c.end))).collect();
        let hull = |old: (i64, i64), new: (i64, i64)| (old.0.min(new.0), old.1.max(new.1));
        let mut on_device: HashMap<u32, (i64, i64)> = HashMap::new();
        let mut launches: HashMap<u32, (i64, i64)> = HashMap::new();
        for activity in activities {
            let Some(iteration) = activity.iteration else { continue };
            let own = (activity.start, activity.end);
            on_device.entry(iteration).and_modify(|known| *known = hull(*known, own)).or_insert(own);
            if let Some(&call) = calls.get(&activity.correlation) {
                launches.entry(iteration).and_modify(|known| *known = hull(*known, call)).or_insert(call);
            }
        }
        let mut spans = Spans { steps: Vec::with_capacity(steps.len()), overlap: false };
        let mut continues = None;
        for (index, step) in steps.iter().enumerate() {
            let mut end = step.times.end as i64;
            // Of a window that was led in, the first step too may have begun before the host was done with the one before.
            let begun = on_device.get(&number(step.iteration)).map_or(i64::MAX, |&(begins, _)| begins);
            let start = continues.take().unwrap_or((step.times.start as i64).min(begun));
            let next = steps.get(index + 1).and_then(|next| on_device.get(&number(next.iteration)));
            if next.is_some_and(|&(begins, _)| begins < end) {
                let done = on_device.get(&number(step.iteration)).map_or(start, |&(_, done)| done);
                end = done.clamp(start, end);
                continues = Some(end);
                spans.overlap = true;
            }
            spans.steps.push(StepSpan { start, end, launches: launches.get(&number(step.iteration)).copied() });
        }
        spans
    }
}

/// Rows of one or more windows.
#[derive(Default)]
pub(super) struct Rows {
    details: Distinct<OpDetail>,
    threads: HashMap<u32, u32>,
}

impl Rows {
    /// Add a window: its ops, tied to the model, and the calls that launched them.
    pub(super) fn add(
        &mut self,
        trace: &mut Trace,
        meanings: &mut Meanings<'_>,
        recording: &Recording,
        timeline: &KernelTimeline,
    ) {
        let names: Vec<StrId> = timeline.names.iter().map(|name| trace.strings.intern(name)).collect();
        let name_of = |name: u32| names.get(name as usize).copied().unwrap_or(StrId::NONE);
        let costs: HashMap<(u32, u32), Cost> =
            recording.ops.iter().map(|event| ((number(event.iteration), event.node), event.cost)).collect();
        let longest = longest(&timeline.activities);
        for (index, activity) in timeline.activities.iter().enumerate() {
            let (kind, name, bytes, detail) = match activity.what {
                ActivityKind::Kernel { name, grid, block, registers, static_shared, dynamic_shared } => {
                    let short_name = StrId::NONE;
                    let detail = KernelDetail { short_name, grid, block, registers, static_shared, dynamic_shared };
                    (OpKind::Kernel, name_of(name), 0, OpDetail::Kernel(detail))
                }
                ActivityKind::Copy { bytes, copy_kind, src_kind, dst_kind } => {
                    let (src_device, dst_device) = (None, None);
                    let detail = OpDetail::Memcpy { copy_kind, src_kind, dst_kind, src_device, dst_device, cause: 0 };
                    let name = trace.strings.intern(&strobe_trace::nsys::copy_name(copy_kind));
                    (OpKind::Memcpy, name, bytes, detail)
                }
                ActivityKind::Fill { bytes, value, mem_kind } => {
                    let name = trace.strings.intern("[CUDA memset]");
                    (OpKind::Memset, name, bytes, OpDetail::Memset { value, mem_kind })
                }
            };
            let iteration = activity.iteration.unwrap_or(NONE);
            let work = activity.node.map_or(NONE, |node| {
                let key = (iteration, node);
                let cost = costs.get(&key).copied().unwrap_or_default();
                // One kernel of an op stands for all it had to do; the others helped.
                let is_longest = longest.get(&key) == Some(&index);
                meanings.work(node, &if is_longest { cost } else { Cost { flops: 0, bytes: 0, ..cost } })
            });
            trace.ops.push(OpRow {
                stream: activity.stream,
                context: activity.context,
                correlation: i64::from(activity.correlation),
                graph_node: activity.graph_node,
                bytes,
                detail: self.details.number(detail),
                work,
                iteration,
                ..OpRow::new(kind, name, activity.start, activity.end)
            });
        }
        self.threads.insert(recording.thread, 0);
        for call in &timeline.calls {
            let thread = *self.threads.entry(call.thread).or_insert_with(|| {
                trace.threads.push(Thread { process: 0, tid: i64::from(call.thread), name: String::new() });
                trace.threads.len() as u32 - 1
            });
            trace.calls.push(CallRow {
                start: call.start,
                end: call.end,
                name: name_of(call.name),
                thread,
                correlation: i64::from(call.correlation),
                kind: if call.recorder { CallKind::Profiler } else { CallKind::Gpu },
                result: call.result,
            });
        }
    }

    /// Everything was added.
    pub(super) fn finish(self, trace: &mut Trace) {
        trace.details = self.details.into_values();
    }
}

/// The longest activity of each op of each iteration.
fn longest(activities: &[Activity]) -> HashMap<(u32, u32), usize> {
    let mut longest: HashMap<(u32, u32), usize> = HashMap::new();
    let length = |index: usize| activities.get(index).map_or(0, |a| a.end - a.start);
    for (index, activity) in activities.iter().enumerate() {
        let Some(node) = activity.node else { continue };
        let known = longest.entry((activity.iteration.unwrap_or(NONE), node)).or_insert(index);
        if length(*known) < length(index) {
            *known = index;
        }
    }
    longest
}

/// What a reader of the window should know.
pub(super) fn notices(timeline: &KernelTimeline) -> Vec<String> {
    let said = |count: u64, text: &str| (count > 0).then(|| format!("{count} {text}"));
    [
        said(timeline.dropped, "activity records were dropped by CUPTI: kernels or calls are missing from this window"),
        said(timeline.untimed, "activities have no times, for lack of GPU memory, and were left out"),
        said(timeline.unmapped, "activities of CUDA graphs could not be tied to an op of the model"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Samples as counters of the one GPU.
pub(super) fn counters(samples: &GpuSamples) -> Vec<Counter> {
    let series = samples.series.iter().map(|series| {
        let rows = samples.times.iter().zip(&series.values).filter(|(_, value)| value.is_finite());
        // Nobody reads eleven digits.
        let (unit, scale) = if series.unit == "bytes" { ("GiB", (1u64 << 30) as f64) } else { (series.unit, 1.0) };
        let (times, values) = rows.map(|(&time, &value)| (time as i64, value / scale)).unzip();
        Counter { name: format!("{} [{unit}]", series.name), device: Some(0), times, values }
    });
    series.collect()
}

#[cfg(test)]
mod tests {
    use strobe_engine::recorder::{OpEvent, StepTimes};
    use strobe_engine::window::Window;
    use strobe_kernels_cuda::ApiCall;
    use strobe_model::program::{ProgramOptions, Ran, program};
    use strobe_trace::{CallKind, nsys};

    use super::*;

    const THREAD: u32 = 77;
    const GRAPH_LAUNCH: u32 = 1;

    fn activity(start: i64, length: i64, node: Option<u32>, iteration: u32, correlation: u32) -> Activity {
        Activity {
            start,
            end: start + length,
            what: ActivityKind::Kernel {
                name: 0,
                grid: [132, 1, 1],
                block: [256, 1, 1],
                registers: 64,
                static_shared: 0,
                dynamic_shared: 4096,
            },
            device: 0,
            context: 1,
            stream: 13,
            correlation,
            graph: 4,
            graph_node: 1000 + start as u64,
            node,
            iteration: Some(iteration),
        }
    }

    fn call(start: i64, end: i64, correlation: u32) -> ApiCall {
        ApiCall { start, end, name: GRAPH_LAUNCH, thread: THREAD, correlation, result: 0, recorder: false }
    }

    fn step(iteration: u64, start: u64, end: u64) -> StepEvent {
        let times = StepTimes::forward_only(start, end);
        StepEvent {
            iteration,
            times,
            context_requests: 0,
            generation_requests: 1,
            context_tokens: 0,
            generation_tokens: 1,
            ..StepEvent::default()
        }
    }

    #[test]
    fn steps_that_overlap_end_where_the_gpu_is_done_with_them() {
        let timeline = KernelTimeline {
            activities: vec![
                activity(200, 400, None, 5, 1),
                activity(650, 300, None, 6, 2),
                activity(1200, 100, None, 7, 3),
            ],
            calls: vec![call(110, 120, 1), call(300, 310, 2), call(1110, 1120, 3)],
            ..KernelTimeline::default()
        };
        // The answers of step 5 were given while the GPU computed step 6; step 7 began after everything.
        let steps = [step(5, 100, 800), step(6, 800, 1100), step(7, 1100, 1400)];
        let spans = Spans::of(&steps, Some(&timeline));
        let found: Vec<_> = spans.steps.iter().map(|s| (s.start, s.end, s.launches)).collect();
        let expected = [(100, 600, Some((110, 120))), (600, 1100, Some((300, 310))), (1100, 1400, Some((1110, 1120)))];
        assert_eq!(found, expected);
        assert!(spans.overlap);
        // Led in: the GPU was at step 5 before the answers of step 4 were out.
        let led_in = Spans::of(&[step(5, 250, 800), step(6, 800, 1100)], Some(&timeline));
        assert_eq!(led_in.steps.iter().map(|s| (s.start, s.end)).collect::<Vec<_>>(), [(200, 600), (600, 1100)]);
        let on_cpu = Spans::of(&steps, None);
        assert!(!on_cpu.overlap);
        assert_eq!(
            on_cpu.steps.iter().map(|s| (s.start, s.end)).collect::<Vec<_>>(),
            [(100, 800), (800, 1100), (1100, 1400)]
        );
    }

    #[test]
    fn a_replayed_graph_shows_its_ops_and_layers() -> Result<(), Box<dyn std::error::Error>> {
        let config = strobe_model::presets::presets().first().ok_or("no presets")?.config();
        let nodes = program(&config, ProgramOptions { context_fmha: true, own_table: false, activated_multiple: None });
        let place = |name: &str| nodes.iter().position(|node| node.name == name).map(|index| index as u32);
        let (qkv, down) = (place("qkv_proj").ok_or("no qkv")?, place("down_proj").ok_or("no down")?);
        let cost = Cost { shape: [1, 2, 3], flops: 600, bytes: 70 };
        let event = |node, cost| OpEvent { node, iteration: 5, start: 0, end: 0, ran: Ran::default(), cost };
        let copy = Activity {
            what: ActivityKind::Copy { bytes: 4, copy_kind: 2, src_kind: 2, dst_kind: 1 },
            graph: 0,
            graph_node: 0,
            ..activity(900, 10, None, 5, 62)
        };
        let timeline = KernelTimeline {
            names: vec!["gemv_bf16".into(), "cuGraphLaunch".into(), "CUPTI: flushing buffers".into()],
            // Two kernels for one op: the longer one carries its work.
            activities: vec![
                activity(200, 10, Some(qkv), 5, 61),
                activity(220, 90, Some(qkv), 5, 61),
                activity(400, 50, Some(down), 5, 61),
                copy,
            ],
            calls: vec![call(110, 120, 61), ApiCall { thread: 99, name: 2, recorder: true, ..call(500, 600, 0) }],
            dropped: 3,
            ..KernelTimeline::default()
        };
        let recording = Recording {
            index: 0,
            window: Window { first: 5, last: 5 },
            complete: true,
            thread: THREAD,
            steps: vec![step(5, 100, 1000)],
            ops: vec![event(qkv, cost), event(down, Cost { flops: 9, ..cost })],
            gpu: None,
        };
        let mut trace = Trace {
            devices: vec![Device { name: "GPU".into(), ..Device::default() }],
            processes: vec![strobe_trace::Process { pid: 1, name: "strobe".into(), ..Default::default() }],
            threads: vec![Thread { process: 0, tid: i64::from(THREAD), name: "strobe-engine".into() }],
            ..Trace::default()
        };
        let mut meanings = Meanings::new(&mut trace, &nodes);
        let mut rows = Rows::default();
        rows.add(&mut trace, &mut meanings, &recording, &timeline);
        trace.works = meanings.works.into_values();
        rows.finish(&mut trace);
        for (step, &span) in recording.steps.iter().zip(&Spans::of(&recording.steps, Some(&timeline)).steps) {
            super::super::add_step(&mut trace, 0, step, span, false);
        }
        trace.finish();

        // What the file keeps is what was recorded.
        let path = std::env::temp_dir().join(format!("strobe-gpu-rows-{}.sqlite", std::process::id()));
        nsys::write(&trace, &path)?;
        let trace = nsys::read(&path, &mut |_, _| {})?;
        std::fs::remove_file(&path)?;

        let works: Vec<_> = (0..trace.ops.len())
            .map(|op| trace.work_of(op).map(|w| (trace.text(w.op), w.layer, w.flops, w.bytes)))
            .collect();
        let expected = [
            Some(("qkv_proj", Some(0), 0, 0)),
            Some(("qkv_proj", Some(0), 600, 70)),
            Some(("down_proj", Some(0), 9, 70)),
            None,
        ];
        assert_eq!(works, expected);
        assert!((0..4).all(|op| trace.ops.iteration[op] == 5));
        assert_eq!(trace.op_name(1), "gemv_bf16");
        assert_eq!(trace.op_name(3), "[CUDA memcpy Device-to-Host]");
        let Some(OpDetail::Kernel(detail)) = trace.detail_of(0) else { return Err("no detail".into()) };
        let facts = (detail.grid, detail.block, detail.registers, detail.dynamic_shared);
        assert_eq!(facts, ([132, 1, 1], [256, 1, 1], 64, 4096));
        assert_eq!(trace.launch_of(1).map(|call| trace.text(call.name).to_owned()).as_deref(), Some("cuGraphLaunch"));
        assert_eq!(trace.calls.kind, [CallKind::Gpu, CallKind::Profiler]);
        assert_eq!(notices(&timeline).len(), 1);

        let context = super::super::context(&trace);
        let ops = strobe_analyze::top_ops::top_ops(&context);
        let found: Vec<_> = ops.iter().map(|op| (op.name.as_str(), op.calls, op.total_ns, op.flops)).collect();
        let expected = [("qkv_proj", 2, 100, 600), ("down_proj", 1, 50, 9), ("[CUDA memcpy Device-to-Host]", 1, 10, 0)];
        assert_eq!(found, expected);
        Ok(())
    }
}
