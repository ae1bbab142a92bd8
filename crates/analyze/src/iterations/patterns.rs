//! Steps of programs that launch CUDA graphs, and what follows once the ops of every step are known.

use strobe_trace::{NONE, OpDetail, OpKind, Trace};

use super::levels::mixed;
use super::{ByProcess, Detected, place_unlaunched, set_device_spans};
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
    /// Which graph it is: the kernels in it, or its number where those are hidden.
    what: u64,
}

/// A step of a process that launches graphs.
pub(super) struct GraphStep {
    /// The calls that launch its ops.
    pub calls: Vec<u32>,
    /// Graphs among them.
    pub graphs: usize,
    /// Whether it copies back to the host.
    pub reads_back: bool,
    kernels: u32,
}

impl GraphStep {
    fn of(calls: Vec<u32>, launched: &[Launched]) -> Self {
        let of = |call: &u32| launched[*call as usize];
        Self {
            graphs: calls.iter().filter(|call| of(call).graph).count(),
            reads_back: calls.iter().any(|call| of(call).reads_back),
            kernels: calls.iter().map(|call| of(call).kernels).sum(),
            calls,
        }
    }

    /// What is in it, in words.
    pub(super) fn label(&self) -> String {
        let kernels = self.kernels;
        match self.graphs {
            0 => format!("{kernels} eager kernels"),
            1 if kernels == 0 => "graph".to_owned(),
            1 => format!("graph, {kernels} kernels"),
            n => format!("{n} graphs, {kernels} kernels"),
        }
    }
}

/// Per process its steps, where graphs make up its work: every launch of a CUDA graph is a step, together with the eager
/// work around it; eager work of its own weight (a prefill) is a step too. A copy back to the host ends a step, for that
/// is how an engine learns its tokens.
pub(super) fn graph_steps_of(trace: &Trace) -> Vec<Option<Vec<GraphStep>>> {
    let launches_graph: Vec<bool> = {
        let mut of_name = vec![None; trace.strings.len()];
        let mut is_graph = |name: strobe_trace::StrId| match of_name.get_mut(name.0 as usize) {
            Some(known) => *known.get_or_insert_with(|| trace.text(name).contains("GraphLaunch")),
            None => false,
        };
        trace.calls.name.iter().map(|&name| is_graph(name)).collect()
    };
    if !launches_graph.contains(&true) {
        return trace.processes.iter().map(|_| None).collect();
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
        of_call.what = of_call.what.wrapping_add(match trace.detail_of(op) {
            Some(OpDetail::Graph { exec, .. }) => u64::from(*exec),
            _ => mixed(trace.ops.name[op]),
        });
        of_call.reads_back |= copy_direction(trace, op) == Some(DEVICE_TO_HOST);
    }
    let mut calls_of_process: Vec<Vec<u32>> = vec![Vec::new(); trace.processes.len()];
    for (call, _) in launched.iter().enumerate().filter(|(_, work)| work.time > 0) {
        let thread = trace.threads.get(trace.calls.thread[call] as usize);
        let Some(calls) = thread.and_then(|t| calls_of_process.get_mut(t.process as usize)) else { continue };
        calls.push(call as u32);
    }
    let steps = calls_of_process.iter().zip(total_time);
    let steps = steps.map(|(calls, time)| {
        let steps = graph_steps(trace, calls, &launched, time)?;
        Some(steps.into_iter().map(|calls| GraphStep::of(calls, &launched)).collect())
    });
    steps.collect()
}

/// CUPTI's numbers of the directions of copies that steps tell by.
pub(super) const HOST_TO_DEVICE: u8 = 1;
pub(super) const DEVICE_TO_HOST: u8 = 2;

/// Which way an op copies, if it copies from or to the host.
pub(super) fn copy_direction(trace: &Trace, op: usize) -> Option<u8> {
    if trace.ops.kind[op] != OpKind::Memcpy {
        return None;
    }
    let known = match trace.detail_of(op) {
        Some(OpDetail::Memcpy { copy_kind, .. }) => Some(*copy_kind),
        _ => {
            let name = trace.op_name(op);
            let any = |forms: [&str; 3]| forms.iter().any(|form| name.contains(form));
            match () {
                _ if any(["DtoH", "Device-to-Host", "Device -> Host"]) => Some(DEVICE_TO_HOST),
                _ if any(["HtoD", "Host-to-Device", "Host -> Device"]) => Some(HOST_TO_DEVICE),
                _ => None,
            }
        }
    };
    known.filter(|&kind| kind == HOST_TO_DEVICE || kind == DEVICE_TO_HOST)
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
        let is_one = replays.iter().all(|&i| of(segment[i]).what == of(segment[first]).what);
        let in_pieces =
            replays.len() >= FEWEST_PIECES && !is_one && replays.windows(2).all(|w| has_kernels(w[0], w[1]));
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

/// Fills what follows from the ops of each iteration: its time on the device, the steps that tile it, and the calls that
/// launch nothing: they belong with the next launch of their thread, which they prepare, else with the last one.
pub(super) fn finish(trace: &Trace, mut detected: Detected) -> Detected {
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
    detected
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
