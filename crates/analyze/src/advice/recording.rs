//! Rules about the recording itself: what it hides, what it costs, what it says about the machine.

use std::collections::BTreeMap;

use strobe_trace::{CallKind, GraphMode, OpKind};

use super::facts::{Facts, evidence};
use super::{Draft, Gain, Rule, count, ns_text, percent};
use crate::Summary;
use crate::budget::Part;
use crate::intervals::{Span, SpanSet};
use crate::metrics::metrics;
use crate::sheet::Unit;

pub(super) fn graph_rows_hide_kernels(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let ops = &facts.trace.ops;
    let graphs: Vec<usize> = (0..ops.len()).filter(|&op| ops.kind[op] == OpKind::Graph).collect();
    let hidden: i64 = graphs.iter().map(|&op| ops.duration(op)).fold(0, i64::saturating_add);
    let whole = facts.op_ns();
    if graphs.is_empty() || (hidden as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let columns = [("Graph launches", Unit::Count), ("Time", Unit::Ns), ("Share of op time", Unit::Share)];
    let mut table = evidence(rule, &columns);
    table.push([graphs.len().into(), hidden.into(), (hidden as f64 / whole as f64).into()]);
    let sentence = format!(
        "{} launches of CUDA graphs hold {} of the op time ({} of {}), recorded as one row each: their kernels are in no \
         table of kernels, categories or roofline",
        count(graphs.len()),
        percent(hidden, whole),
        ns_text(hidden),
        ns_text(whole),
    );
    Some(Draft { sentence, gain: None, evidence: table })
}

pub(super) fn node_trace_inflates(facts: &Facts, rule: &Rule) -> Option<Draft> {
    if facts.trace.meta.graph_mode != Some(GraphMode::Node) {
        return None;
    }
    let ops = &facts.trace.ops;
    let nodes: Vec<usize> = (0..ops.len()).filter(|&op| ops.graph_node[op] != 0).collect();
    let inside: i64 = nodes.iter().map(|&op| facts.context.own_ns(op)).fold(0, i64::saturating_add);
    let whole = facts.op_ns();
    if nodes.is_empty() || (inside as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let of_graphs = facts.launches.iter().filter(|l| facts.in_graph(l.first_op as usize) && l.ops > 1);
    let (mut calls, mut spans) = (Vec::new(), Vec::new());
    of_graphs.for_each(|l| (calls.push(l.call_ns as f64), spans.push(l.device_ns as f64)).0);
    let (call, span) = (Summary::of(calls)?, Summary::of(spans)?);
    let columns = [
        ("Replays", Unit::Count),
        ("Ops", Unit::Count),
        ("Launch call (median)", Unit::Ns),
        ("Replay (median)", Unit::Ns),
    ];
    let mut table = evidence(rule, &columns);
    table.push([call.count.into(), nodes.len().into(), call.median.into(), span.median.into()]);
    let sentence = format!(
        "{} ops of {} graph replays were traced one by one ({} of the op time): that lengthens the launch call (median \
         {}) and puts gaps between the nodes, so the replays run faster without it",
        count(nodes.len()),
        count(call.count),
        percent(inside, whole),
        ns_text(call.median as i64),
    );
    Some(Draft { sentence, gain: None, evidence: table })
}

pub(super) fn profiler_overhead(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let trace = facts.trace;
    let mut by_name: BTreeMap<&str, (usize, i64)> = BTreeMap::new();
    let mut spans = Vec::new();
    for call in (0..trace.calls.len()).filter(|&call| trace.calls.kind[call] == CallKind::Profiler) {
        let row = by_name.entry(trace.text(trace.calls.name[call])).or_default();
        *row = (row.0 + 1, row.1.saturating_add(trace.calls.duration(call)));
        spans.push(Span::new(trace.calls.start[call], trace.calls.end[call]));
    }
    let extent = facts.paths.iter().map(|p| p.span).reduce(|a, b| Span::new(a.start.min(b.start), a.end.max(b.end)))?;
    let unseen = facts.context.unseen();
    let spans = SpanSet::union_of(spans).clip(extent).subtract(unseen);
    let taken = spans.length();
    let whole = facts.seen_ns(extent);
    if taken == 0 || (taken as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let mut table =
        evidence(rule, &[("What", Unit::Text), ("Times", Unit::Count), ("Time (threads summed)", Unit::Ns)]);
    for (name, (times, ns)) in by_name {
        table.push([name.into(), times.into(), ns.into()]);
    }
    // What passes while a device works costs nothing.
    let ops = &facts.trace.ops;
    let busy = SpanSet::union_of((0..ops.len()).map(|op| Span::new(ops.start[op], ops.end[op])));
    let idle = spans.subtract(&busy).length();
    let sentence = format!(
        "for {} ({} of the {} between first launch and last end) the profiler was at work on some thread, {} of it while \
         no device was busy",
        ns_text(taken),
        percent(taken, whole),
        ns_text(whole),
        ns_text(idle),
    );
    let gain = Gain::new(idle, whole, "between first launch and last end");
    let gain = Some(gain).filter(|gain| gain.share() >= rule.limit("min_gain"));
    Some(Draft { sentence, gain, evidence: table })
}

pub(super) fn waited_for_cpu(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let (waited, whole) = facts.waited_ns();
    if waited == 0 || (waited as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let wait = |parts: &[(Part, i64)]| parts.iter().find(|p| p.0 == Part::CpuWait).map(|p| p.1);
    let mut rows: Vec<_> = facts.budgets.iter().filter_map(|b| Some((wait(&b.parts)?, b))).collect();
    rows.sort_by_key(|(ns, _)| std::cmp::Reverse(*ns));
    let columns = [("Iteration", Unit::Id), ("Waited for a CPU", Unit::Ns), ("Wall", Unit::Ns), ("Share", Unit::Share)];
    let mut table = evidence(rule, &columns);
    for (ns, budget) in rows.iter().take(10) {
        let share = *ns as f64 / budget.wall_ns.max(1) as f64;
        table.push([budget.iter.into(), (*ns).into(), budget.wall_ns.into(), share.into()]);
    }
    let sentence = format!(
        "in {} of {} recorded iterations a thread was ready and waited for a CPU, {} in all ({} of their wall): advice that \
         rests on the host's times is withheld",
        count(rows.len()),
        count(facts.budgets.len()),
        ns_text(waited),
        percent(waited, whole),
    );
    Some(Draft { sentence, gain: None, evidence: table })
}

pub(super) fn low_clock(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let trace = facts.trace;
    let columns = [
        ("Metric", Unit::Text),
        ("Median (MHz)", Unit::Number),
        ("Device's clock (MHz)", Unit::Number),
        ("Share", Unit::Share),
    ];
    let mut table = evidence(rule, &columns);
    let mut lowest: Option<(f64, f64, f64, i64)> = None;
    for metric in metrics(trace).known {
        let is_clock = metric.name.contains("Clock") && (metric.name.contains("GPC") || metric.name.contains("SM"));
        if !is_clock || !metric.name.contains("MHz") {
            continue;
        }
        let only = if trace.devices.len() == 1 { Some(0) } else { None };
        let Some(device) = metric.device.or(only) else { continue };
        let clock_hz = trace.devices.get(device as usize).and_then(|d| d.clock_hz);
        let Some((clock, median)) = clock_hz.map(|hz| hz / 1e6).zip(Summary::of(metric.values).map(|s| s.median))
        else {
            continue;
        };
        if median <= 0.0 || median >= rule.limit("below") * clock {
            continue;
        }
        table.push([metric.name.into(), median.into(), clock.into(), (median / clock).into()]);
        let busy = facts.devices.iter().find(|d| d.device == device).map_or(0, |d| d.busy);
        if lowest.is_none_or(|(share, ..)| median / clock < share) {
            lowest = Some((median / clock, median, clock, busy));
        }
    }
    let (share, median, clock, busy) = lowest?;
    let gain = (busy as f64 * (1.0 - share)) as i64;
    let sentence = format!(
        "the clock stands at {median:.0} MHz (median) of {clock:.0}: work that arithmetic limits would take up to {} less \
         of {} busy time",
        ns_text(gain),
        ns_text(busy),
    );
    Some(Draft { sentence, gain: Some(Gain::new(gain, busy, "busy time of the GPU")), evidence: table })
}
