//! Whole windows side by side: what a trace holds between its first and its last kernel, whatever it worked on.

use serde::Serialize;
use strobe_trace::{NONE, OpKind};

use crate::Context;
use crate::categories::Class;
use crate::intervals::{Span, SpanSet};
use crate::timeline::ops_by_device;

/// The time of a trace, summed over its devices; the mean of the repeats of a side.
///
/// Only kernels and graphs count: `compute_ns + exposed_communication_ns + idle_ns = span_ns`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Window {
    /// Devices with kernels.
    pub devices: f64,
    /// From the first kernel of a device to the end of its last, without the time between recorded windows.
    pub span_ns: f64,
    /// While a kernel other than communication runs.
    pub compute_ns: f64,
    /// While only communication runs.
    pub exposed_communication_ns: f64,
    /// While no kernel runs.
    pub idle_ns: f64,
    /// The part of `idle_ns` in which memory is copied or filled.
    pub idle_copying_ns: f64,
    /// Kernels (a graph whose kernels are hidden counts once).
    pub kernels: f64,
}

/// The windows of a side's traces, averaged; `None` when none has a kernel.
pub(super) fn window(contexts: &[Context]) -> Option<Window> {
    let each: Vec<Window> = contexts.iter().filter_map(of_trace).collect();
    let mean = |of: fn(&Window) -> f64| each.iter().map(of).sum::<f64>() / each.len() as f64;
    (!each.is_empty()).then(|| Window {
        devices: mean(|w| w.devices),
        span_ns: mean(|w| w.span_ns),
        compute_ns: mean(|w| w.compute_ns),
        exposed_communication_ns: mean(|w| w.exposed_communication_ns),
        idle_ns: mean(|w| w.idle_ns),
        idle_copying_ns: mean(|w| w.idle_copying_ns),
        kernels: mean(|w| w.kernels),
    })
}

fn of_trace(context: &Context) -> Option<Window> {
    let ops = &context.trace.ops;
    let mut sum = Window::default();
    for (device, own) in (0..).zip(ops_by_device(context.trace)) {
        let class = |op: usize| context.categories.of_op(op).class;
        let kernel = |op: usize| !ops.kind[op].is_memory();
        let union = |keep: &dyn Fn(usize) -> bool| {
            let chosen = own.iter().map(|&op| op as usize).filter(|&op| keep(op));
            SpanSet::union_of(chosen.map(|op| Span::new(ops.start[op], ops.end[op])))
        };
        let compute = union(&|op| kernel(op) && class(op) != Class::Communication);
        let kernels = union(&kernel);
        let Some(span) = kernels.extent() else { continue };
        let copies = union(&|op| !kernel(op)).clip(span).subtract(&kernels);
        // Time between two recorded windows is nobody's.
        let unseen = context.unseen_on(device).clip(span).subtract(&kernels).length();
        let span_ns = span.length() - unseen;
        sum.devices += 1.0;
        sum.span_ns += span_ns as f64;
        sum.compute_ns += compute.length() as f64;
        sum.exposed_communication_ns += (kernels.length() - compute.length()) as f64;
        sum.idle_ns += (span_ns - kernels.length()) as f64;
        sum.idle_copying_ns += copies.length() as f64;
        sum.kernels += own.iter().filter(|&&op| kernel(op as usize)).count() as f64;
    }
    (sum.devices > 0.0).then_some(sum)
}

/// A pause of a device at which work without markers is cut into bursts.
const PAUSE_NS: i64 = 2_000_000;

/// A stretch of work between two long pauses of a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Burst {
    /// From the start of its first kernel to the end of its last.
    pub wall_ns: i64,
    /// Sum of its kernels' durations.
    pub kernel_ns: i64,
    /// Kernels in it.
    pub kernels: usize,
}

/// The bursts of the first device that has kernels. Kernels launched before the trace began belong to work that it does
/// not hold, and are left out.
pub(super) fn bursts(context: &Context) -> Vec<Burst> {
    let ops = &context.trace.ops;
    let launched = |op: &usize| ops.kind[*op] == OpKind::Kernel && ops.launch[*op] != NONE;
    let first_device = (0..ops.len()).filter(launched).map(|op| ops.device[op]).min();
    let mut found: Vec<Burst> = Vec::new();
    let mut current: Option<(Span, Burst)> = None;
    for op in (0..ops.len()).filter(launched).filter(|&op| Some(ops.device[op]) == first_device) {
        let (start, end, ns) = (ops.start[op], ops.end[op], ops.duration(op));
        match &mut current {
            Some((span, burst)) if start.saturating_sub(span.end) <= PAUSE_NS => {
                span.end = span.end.max(end);
                burst.kernels += 1;
                burst.kernel_ns = burst.kernel_ns.saturating_add(ns);
                burst.wall_ns = span.length();
            }
            _ => {
                found.extend(current.take().map(|(_, burst)| burst));
                current = Some((Span::new(start, end), Burst { wall_ns: ns, kernel_ns: ns, kernels: 1 }));
            }
        }
    }
    found.extend(current.map(|(_, burst)| burst));
    found
}
