//! Iterations of traces without markers: by launches of CUDA graphs, or by a sequence of kernels that repeats.

use strobe_trace::{NONE, OpDetail, OpKind, Trace};

use super::markers::Marker;
use super::{ByProcess, Detected, Found, Method, place_unlaunched, set_device_spans};
use crate::intervals::Span;

/// Kernels below which a stretch of eager work between graph launches is not a step of its own.
const FEWEST_KERNELS: u32 = 10;
/// Share of the device time of a process that graphs must have, so that their launches are its steps.
const LEAST_GRAPH_SHARE: f64 = 0.3;
/// Graph launches in one step from which it may be a model captured in pieces.
const FEWEST_PIECES: usize = 4;

/// What one call launched.
#[derive(Clone, Copy, Default)]
struct Launched {
    kernels: u32,
    time: i64,
    graph: bool,
    reads_back: bool,
}

/// Every launch of a CUDA graph is a step, together with the eager work around it; eager work of its own weight (a
/// prefill) is a step too. A copy back to the host ends a step, for that is how an engine learns its tokens.
pub(super) fn by_graph_launches(trace: &Trace) -> Option<Detected> {
    let launches_graph: Vec<bool> = {
        let mut of_name = vec![None; trace.strings.len()];
        let mut is_graph = |name: strobe_trace::StrId| match of_name.get_mut(name.0 as usize) {
            Some(known) => *known.get_or_insert_with(|| trace.text(name).contains("GraphLaunch")),
            None => false,
        };
        trace.calls.name.iter().map(|&name| is_graph(name)).collect()
    };
    if !launches_graph.contains(&true) {
        return None;
    }
    let mut launched = vec![Launched::default(); trace.calls.len()];
    let mut total_time = vec![0i64; trace.processes.len()];
    for op in 0..trace.ops.len() {
        let time = trace.ops.duration(op);
        if let Some(total) = total_time.get_mut(trace.ops.process[op] as usize) {
            *total = total.saturating_add(time);
        }
        let call = trace.ops.launch[op];
        let Some(of_call) = launched.get_mut(call as usize) else { continue };
        of_call.kernels += u32::from(trace.ops.kind[op] == OpKind::Kernel);
        of_call.time = of_call.time.saturating_add(time).max(1);
        of_call.graph |= launches_graph[call as usize];
        of_call.reads_back |= trace.ops.kind[op] == OpKind::Memcpy && is_read_back(trace, op);
    }
    let mut calls_of_process: Vec<Vec<u32>> = vec![Vec::new(); trace.processes.len()];
    for (call, _) in launched.iter().enumerate().filter(|(_, work)| work.time > 0) {
        let thread = trace.threads.get(trace.calls.thread[call] as usize);
        let Some(calls) = thread.and_then(|t| calls_of_process.get_mut(t.process as usize)) else { continue };
        calls.push(call as u32);
    }

    let mut detected = Detected::none(trace, Some(Method::GraphReplays));
    for (process, calls) in calls_of_process.iter().enumerate() {
        let Some(steps) = graph_steps(trace, calls, &launched, total_time[process]) else { continue };
        for (counted, step) in steps.iter().enumerate() {
            let replayed = step.iter().filter(|&&c| launched[c as usize].graph).count();
            let kernels: u32 = step.iter().map(|&c| launched[c as usize].kernels).sum();
            let label = match replayed {
                0 => format!("{kernels} eager kernels"),
                1 if kernels == 0 => "graph".to_owned(),
                1 => format!("graph, {kernels} kernels"),
                n => format!("{n} graphs, {kernels} kernels"),
            };
            let iteration = detected.list.len() as u32;
            step.iter().for_each(|&call| detected.of_call[call as usize] = iteration);
            let host = Span::new(0, 0);
            detected.list.push(Found::new(label, Marker::default(), counted as u64, process as u16, host));
        }
    }
    if detected.list.is_empty() {
        return None;
    }
    for (op, &call) in trace.ops.launch.iter().enumerate() {
        detected.of_op[op] = detected.of_call.get(call as usize).copied().unwrap_or(NONE);
    }
    finish(trace, detected)
}

fn is_read_back(trace: &Trace, op: usize) -> bool {
    match trace.detail_of(op) {
        Some(OpDetail::Memcpy { copy_kind, .. }) => *copy_kind == 2,
        _ => {
            let name = trace.op_name(op);
            name.contains("DtoH") || name.contains("Device-to-Host") || name.contains("Device -> Host")
        }
    }
}

/// The launching calls of a process, split into steps; `None` when its graphs do not make up its work.
fn graph_steps(trace: &Trace, calls: &[u32], launched: &[Launched], total_time: i64) -> Option<Vec<Vec<u32>>> {
    let of = |call: u32| launched[call as usize];
    let mut graph_times: Vec<i64> = calls.iter().filter(|&&c| of(c).graph).map(|&c| of(c).time).collect();
    let graph_time: i64 = graph_times.iter().fold(0, |sum, t| sum.saturating_add(*t));
    if graph_times.len() < 2 || (graph_time as f64) < LEAST_GRAPH_SHARE * total_time as f64 {
        return None;
    }
    graph_times.sort_unstable();
    let typical = graph_times[graph_times.len() / 2];
    let substantial = |calls: &[u32]| {
        let eager = || calls.iter().map(|&c| of(c)).filter(|w| !w.graph);
        eager().map(|w| w.kernels).sum::<u32>() >= FEWEST_KERNELS
            && eager().map(|w| w.time).sum::<i64>() >= typical / 10
    };
    let mut steps: Vec<Vec<u32>> = Vec::new();
    let mut waiting: Vec<u32> = Vec::new();
    let mut from = 0;
    while from < calls.len() {
        let end = calls[from..].iter().position(|&c| of(c).reads_back).map_or(calls.len(), |p| from + p + 1);
        let segment = &calls[from..end];
        from = end;
        let replays: Vec<usize> = (0..segment.len()).filter(|&i| of(segment[i]).graph).collect();
        let Some(&first) = replays.first() else {
            waiting.extend(segment);
            if substantial(&waiting) {
                steps.push(std::mem::take(&mut waiting));
            }
            continue;
        };
        let has_kernels = |from: usize, to: usize| segment[from + 1..to].iter().any(|&c| of(c).kernels > 0);
        let in_pieces = replays.len() >= FEWEST_PIECES && replays.windows(2).all(|w| has_kernels(w[0], w[1]));
        if in_pieces {
            if end == calls.len() && steps.is_empty() {
                return None; // Nothing tells where a step of many graphs begins: let repetition decide.
            }
            waiting.extend(segment);
            steps.push(std::mem::take(&mut waiting));
            continue;
        }
        // Before the first graph: eager work of its own weight up to its last kernel; inputs copied after it belong to
        // the graph.
        let kernels_end = (0..first).rev().find(|&i| of(segment[i]).kernels > 0).map_or(0, |i| i + 1);
        let mut begin = 0;
        if substantial(&[waiting.as_slice(), &segment[..kernels_end]].concat()) {
            waiting.extend(&segment[..kernels_end]);
            steps.push(std::mem::take(&mut waiting));
            begin = kernels_end;
        }
        for pair in replays.windows(2) {
            // Between two graphs without a copy back, the longest pause of the host is where the step ends.
            let pause = |i: usize| trace.calls.start[segment[i + 1] as usize] - trace.calls.end[segment[i] as usize];
            let cut = (pair[0]..pair[1]).max_by_key(|&i| (pause(i), std::cmp::Reverse(i))).map_or(pair[1], |i| i + 1);
            waiting.extend(&segment[begin..cut]);
            steps.push(std::mem::take(&mut waiting));
            begin = cut;
        }
        waiting.extend(&segment[begin..]);
        steps.push(std::mem::take(&mut waiting));
    }
    if let Some(last) = steps.last_mut() {
        last.append(&mut waiting);
    }
    Some(steps)
}

/// Fewest repetitions, and the share of kernels they must cover, to be taken for iterations.
const FEWEST_REPETITIONS: usize = 3;
const LEAST_COVERAGE: f64 = 0.7;
/// Fewest kernels of an iteration.
const SHORTEST_PERIOD: usize = 4;

/// A kernel that comes back regularly.
struct Anchor {
    /// Where it stands in the sequence.
    positions: Vec<u32>,
    /// The median distance between two of them.
    period: usize,
    /// Distances that are far from the median.
    irregular: usize,
    /// Share of the sequence within regular distances.
    coverage: f64,
}

/// The busiest stream of every process is searched for a kernel that comes back at a steady distance; its
/// occurrences divide the stream, at the place of the period where the device usually waits longest.
pub(super) fn by_repetition(trace: &Trace) -> Option<Detected> {
    let mut counts: std::collections::BTreeMap<(u16, u16, u32), usize> = Default::default();
    let kernels = || (0..trace.ops.len()).filter(|&op| trace.ops.kind[op] == OpKind::Kernel);
    let stream_of = |op: usize| (trace.ops.process[op], trace.ops.device[op], trace.ops.stream[op]);
    let mut last = None;
    for op in kernels() {
        // Ops of one stream stand together as a rule.
        let stream = stream_of(op);
        match &mut last {
            Some((known, count)) if *known == stream => *count += 1,
            _ => {
                let before = last.replace((stream, 1));
                before.into_iter().for_each(|(stream, count)| *counts.entry(stream).or_default() += count);
            }
        }
    }
    last.into_iter().for_each(|(stream, count)| *counts.entry(stream).or_default() += count);
    let mut detected = Detected::none(trace, Some(Method::RepeatingKernels));
    let mut boundaries_of: Vec<Vec<(i64, u32)>> = vec![Vec::new(); trace.processes.len()];
    for (process, boundaries) in boundaries_of.iter_mut().enumerate() {
        let mine = counts.iter().filter(|((p, ..), _)| usize::from(*p) == process);
        let Some((&busiest, _)) = mine.max_by_key(|&(stream, count)| (*count, std::cmp::Reverse(*stream))) else {
            continue;
        };
        let sequence: Vec<u32> = kernels().filter(|&op| stream_of(op) == busiest).map(|op| op as u32).collect();
        let Some(cuts) = period_cuts(trace, &sequence) else { continue };
        // The last cut only ends the iteration before it.
        for (counted, pair) in cuts.windows(2).enumerate() {
            let at = sequence.get(pair[0]).map_or(i64::MAX, |&op| trace.ops.start[op as usize]);
            boundaries.push((at, detected.list.len() as u32));
            let label = format!("{} kernels", pair[1] - pair[0]);
            let host = Span::new(0, 0);
            detected.list.push(Found::new(label, Marker::default(), counted as u64, process as u16, host));
        }
        let end = cuts.last().and_then(|&cut| sequence.get(cut)).map_or(i64::MAX, |&op| trace.ops.start[op as usize]);
        boundaries.push((end, NONE));
    }
    if detected.list.is_empty() {
        return None;
    }
    let mut place = vec![0usize; boundaries_of.len()];
    for op in 0..trace.ops.len() {
        let process = trace.ops.process[op] as usize;
        let (Some(place), Some(mine)) = (place.get_mut(process), boundaries_of.get(process)) else { continue };
        while mine.get(*place).is_some_and(|&(at, _)| at <= trace.ops.start[op]) {
            *place += 1;
        }
        detected.of_op[op] = place.checked_sub(1).map_or(NONE, |p| mine[p].1);
    }
    for (op, &call) in trace.ops.launch.iter().enumerate() {
        if let Some(of_call) = detected.of_call.get_mut(call as usize).filter(|of| **of == NONE) {
            *of_call = detected.of_op[op];
        }
    }
    finish(trace, detected)
}

/// Where the iterations of a sequence of kernels begin, and where the last one ends (its length when that is not known
/// to be earlier).
fn period_cuts(trace: &Trace, sequence: &[u32]) -> Option<Vec<usize>> {
    let anchor = find_anchor(trace, sequence)?;
    let (ops, period) = (&trace.ops, anchor.period);
    // Where in the period does the device wait longest? Taken over the distances that are exactly the period.
    let exact: Vec<usize> = anchor
        .positions
        .windows(2)
        .filter(|w| (w[1] - w[0]) as usize == period)
        .map(|w| w[0] as usize)
        .take(64)
        .collect();
    let pause = |place: usize| {
        let (before, at) = (sequence[place - 1] as usize, sequence[place] as usize);
        ops.start[at].saturating_sub(ops.end[before]).max(0)
    };
    let typical_pause = |offset: usize| {
        let mut pauses: Vec<i64> = exact.iter().map(|&at| at + offset).filter(|&p| p > 0).map(pause).collect();
        pauses.sort_unstable();
        pauses.get(pauses.len() / 2).copied().unwrap_or(0)
    };
    let offset = (0..period).max_by_key(|&offset| (typical_pause(offset), std::cmp::Reverse(offset)))?;
    let mut cuts: Vec<usize> = anchor
        .positions
        .windows(2)
        .map(|w| {
            let (from, to) = (w[0] as usize, w[1] as usize);
            // In a distance of another length the place is counted from its nearer end.
            if offset <= period / 2 {
                (from + offset).min(to - 1)
            } else {
                to.saturating_sub(period - offset).max(from)
            }
        })
        .collect();
    let last = *anchor.positions.last()? as usize + offset;
    if last < sequence.len() {
        cuts.push(last);
    } else {
        cuts.push(sequence.len());
    }
    cuts.dedup();
    // What lies before the first and after the last cut is an iteration if it is about as long as one.
    let alike = |length: usize| length.abs_diff(period) <= period / 10 + 1;
    if cuts.first().is_some_and(|&first| first > 0 && alike(first)) {
        cuts.insert(0, 0);
    }
    if cuts.last().is_some_and(|&last| last < sequence.len() && alike(sequence.len() - last)) {
        cuts.push(sequence.len());
    }
    (cuts.len() > FEWEST_REPETITIONS).then_some(cuts)
}

fn find_anchor(trace: &Trace, sequence: &[u32]) -> Option<Anchor> {
    let total = sequence.len();
    let mut by_name: std::collections::HashMap<u32, Vec<u32>> = Default::default();
    for (place, &op) in sequence.iter().enumerate() {
        by_name.entry(trace.ops.name[op as usize].0).or_default().push(place as u32);
    }
    let mut anchors: Vec<Anchor> = by_name
        .into_values()
        .filter(|positions| positions.len() >= FEWEST_REPETITIONS)
        .filter_map(|positions| {
            let distances = || positions.windows(2).map(|w| (w[1] - w[0]) as usize);
            let mut sorted: Vec<usize> = distances().collect();
            let middle = sorted.len() / 2;
            let period = *sorted.select_nth_unstable(middle).1;
            let regular = |d: &usize| d.abs_diff(period) <= (period / 20).max(1);
            let covered: usize = distances().filter(regular).sum();
            let irregular = distances().filter(|d| !regular(d)).count();
            let coverage = covered as f64 / total as f64;
            let fits = period >= SHORTEST_PERIOD && coverage >= LEAST_COVERAGE;
            fits.then_some(Anchor { positions, period, irregular, coverage })
        })
        .collect();
    // A layer comes back as regularly as an iteration: the rarest kernels tell iterations. Of about equally rare ones
    // the one that covers most, the earliest of equals.
    let rarest = anchors.iter().map(|a| a.positions.len()).min()?;
    let better = |a: &Anchor, b: &Anchor| {
        a.coverage.total_cmp(&b.coverage).then_with(|| b.positions.first().cmp(&a.positions.first()))
    };
    let rare = |a: &Anchor| 10 * a.positions.len() <= 13 * rarest;
    let best = anchors.iter().enumerate().filter(|(_, a)| rare(a)).max_by(|(_, a), (_, b)| better(a, b))?.0;
    // Unless a shorter period has no exceptions: a layer has one between every two iterations.
    let (occurrences, coverage) = (anchors[best].positions.len(), anchors[best].coverage);
    let shorter = |a: &Anchor| {
        a.positions.len() >= 2 * occurrences - 1 && 2 * a.irregular < occurrences && a.coverage + 0.02 >= coverage
    };
    let finer = anchors
        .iter()
        .enumerate()
        .filter(|(_, a)| shorter(a))
        .max_by(|(_, a), (_, b)| a.positions.len().cmp(&b.positions.len()).then_with(|| better(a, b)));
    let chosen = finer.map_or(best, |(index, _)| index);
    Some(anchors.swap_remove(chosen))
}

/// Fills what follows from the ops of each iteration: its time on the device, the steps that tile it, and the calls that
/// launch nothing: they belong with the next launch of their thread, which they prepare, else with the last one.
fn finish(trace: &Trace, mut detected: Detected) -> Option<Detected> {
    set_device_spans(trace, &mut detected);
    let by_process = ByProcess::new(&detected.list);
    place_unlaunched(trace, &mut detected, &by_process);
    for mine in &by_process.0 {
        let mut next_start = None;
        for &iteration in mine.iter().rev() {
            let found = &mut detected.list[iteration as usize];
            let Some(device) = found.device else { continue };
            let end: i64 = next_start.unwrap_or(device.end);
            found.host = Span::new(device.start.min(end), end);
            next_start = Some(found.host.start);
        }
    }
    let mut next = vec![NONE; trace.threads.len()];
    for call in (0..trace.calls.len()).rev() {
        let Some(next) = next.get_mut(trace.calls.thread[call] as usize) else { continue };
        match detected.of_call[call] {
            NONE => detected.of_call[call] = *next,
            iteration => *next = iteration,
        }
    }
    let mut last = vec![NONE; trace.threads.len()];
    for call in 0..trace.calls.len() {
        let Some(last) = last.get_mut(trace.calls.thread[call] as usize) else { continue };
        match detected.of_call[call] {
            NONE => detected.of_call[call] = *last,
            iteration => *last = iteration,
        }
    }
    in_order_of_time(&mut detected);
    Some(detected)
}

/// Sorts the iterations of all processes by time; until here those of one process stand together.
fn in_order_of_time(detected: &mut Detected) {
    let mut order: Vec<usize> = (0..detected.list.len()).collect();
    order.sort_by_key(|&i| (detected.list[i].host.start, detected.list[i].process));
    let mut place = vec![NONE; order.len()];
    order.iter().enumerate().for_each(|(new, &old)| place[old] = new as u32);
    detected.list = order.iter().map(|&old| detected.list[old].clone()).collect();
    for index in detected.of_op.iter_mut().chain(&mut detected.of_call).filter(|index| **index != NONE) {
        *index = place[*index as usize];
    }
}
