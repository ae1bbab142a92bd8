//! The kernel timeline: what was launched is on it, in order, with its op and iteration, alone and inside graphs.

use strobe_kernels_cuda::{ActivityKind, CapturedGraph, CudaError, KernelTimeline, PinnedBuffer, Precision, Profiler};
use strobe_kernels_cuda::{DeviceBuffer, NvtxChoice, RowOps};

use super::{Outcome, Rig};
use crate::clock::Clock;

const ROWS: usize = 64;
const INTER: usize = 1024;
/// How far a device time may lie outside of the host's times around it: two clocks meet here.
const CLOCK_TOLERANCE_NS: f64 = 10_000.0;

/// Name, op and iteration of each activity.
type Seen = (String, Option<u32>, Option<u32>);

pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let gpu = rig.gpu;
    let mut profiler = Profiler::open(true, NvtxChoice::Disable);
    let mut outcomes = Vec::new();
    if !profiler.records() {
        // Not a fault of the engine: another tool holds the interface, or the library is not there.
        let skipped = format!("skipped: {}", profiler.notes().join("; "));
        outcomes.push(Outcome::exact::<u32>(("timeline", "-"), skipped, &[], &[]));
        return Ok(outcomes);
    }
    let clock = Clock::start();
    let now = || clock.now();
    let ops = RowOps::new(gpu, Precision::F32)?;
    let values = rig.random.normals(2 * ROWS * INTER, 1.0);
    let input = rig.upload(&values)?;
    let output = DeviceBuffer::new(ROWS * INTER * 4, "a selftest's output")?;
    let mut host = PinnedBuffer::<f32>::new(ROWS * INTER)?;
    let kernel = |tag: u32| {
        gpu.set_tag(tag);
        // SAFETY: input and output have so many rows, and live until the window has ended.
        unsafe { ops.silu_mul(gpu, input.ptr(), output.ptr(), ROWS, INTER) }
    };
    let first = CapturedGraph::capture(gpu, || [7, 8, 8].into_iter().try_for_each(kernel))?;
    let second = CapturedGraph::capture(gpu, || kernel(9))?;
    let seen = |tag: u32, iteration: u32| -> Seen { ("silu_mul".into(), Some(tag), Some(iteration)) };
    // CUPTI has been wrong from the second window on. The last two have a lead-in, which must leave no trace although the
    // GPU is still busy with it when they open.
    for window in 0..4 {
        let number = 100 * (window + 1);
        if window >= 2 {
            profiler.lead_in(gpu, number - 1, &now)?;
            [6; 50].into_iter().try_for_each(kernel)?;
            // SAFETY: input and output have so many rows, and live until the window has ended.
            unsafe { first.launch(gpu) }?;
            profiler.graph_launched(&first.nodes);
        }
        let begun = clock.now();
        profiler.begin_window(gpu, &now)?;
        profiler.begin_iteration(number);
        [3, 4, 4].into_iter().try_for_each(kernel)?;
        gpu.set_tag(u32::MAX);
        // SAFETY: both are as long, and nobody looks at `host`.
        unsafe { gpu.copy_to_host(&mut host, output.ptr())? };
        for (iteration, graph) in [(number + 1, &first), (number + 2, &first), (number + 3, &second)] {
            profiler.begin_iteration(iteration);
            // SAFETY: input and output have so many rows, and live until the window has ended.
            unsafe { graph.launch(gpu) }?;
            profiler.graph_launched(&graph.nodes);
        }
        kernel(5)?;
        gpu.set_tag(u32::MAX);
        let timeline = profiler.end_window(gpu, &now)?;
        let ended = clock.now();
        let case = format!("window {}", window + 1);
        let Some(timeline) = timeline else {
            let outcome = Outcome::exact::<u32>(("timeline", "-"), case, &[], &[]);
            outcomes.push(Outcome { problem: Some(profiler.notes().join("; ")), ..outcome });
            continue;
        };
        let number = number as u32;
        let mut expected = vec![seen(3, number), seen(4, number), seen(4, number), ("copy".into(), None, Some(number))];
        expected.extend([1, 2].iter().flat_map(|next| [7, 8, 8].map(|tag| seen(tag, number + next))));
        expected.extend([seen(9, number + 3), seen(5, number + 3)]);
        outcomes.push(Outcome::exact(("timeline ops", "-"), &case, &activities(&timeline), &expected));
        let calls: Vec<u32> = timeline.calls.iter().map(|call| call.correlation).collect();
        let launched = timeline.activities.iter().map(|a| calls.contains(&a.correlation)).collect::<Vec<_>>();
        outcomes.push(Outcome::exact(("timeline launches", "-"), &case, &launched, &vec![true; expected.len()]));
        let lost = [timeline.dropped, timeline.untimed, timeline.unmapped];
        outcomes.push(Outcome::exact(("timeline losses", "-"), format!("{case}: {}", timeline.cost), &lost, &[0; 3]));
        let outside = |a: &strobe_kernels_cuda::Activity| {
            (begun as i64 - a.start).max(a.end - ended as i64).max(a.start - a.end).max(0) as f64
        };
        outcomes.push(Outcome {
            op: "timeline clock".into(),
            case,
            dtype: "ns".into(),
            error: timeline.activities.iter().map(outside).fold(0.0, f64::max),
            tolerance: CLOCK_TOLERANCE_NS,
            problem: None,
        });
    }
    Ok(outcomes)
}

fn activities(timeline: &KernelTimeline) -> Vec<Seen> {
    let name = |what: ActivityKind| match what {
        ActivityKind::Kernel { name, .. } => {
            let full = timeline.names.get(name as usize).map_or("", String::as_str);
            if full.starts_with("silu_mul") { "silu_mul".to_owned() } else { full.to_owned() }
        }
        ActivityKind::Copy { .. } => "copy".to_owned(),
        ActivityKind::Fill { .. } => "fill".to_owned(),
    };
    timeline.activities.iter().map(|a| (name(a.what), a.node, a.iteration)).collect()
}
