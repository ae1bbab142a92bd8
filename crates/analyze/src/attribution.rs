//! Which host ranges lie around the launch of every op.
//!
//! An op belongs to a range if the call that launched it lies wholly inside it on the same thread. An op of a CUDA graph
//! belongs to the ranges that were open when its node was captured, where the trace recorded that.

use std::collections::HashMap;

use strobe_trace::{NONE, RangeSource, Trace, range_flags};

/// The ranges around calls and ops, and around each other.
#[derive(Clone, Debug, Default)]
pub struct Attribution {
    /// Per op the innermost range around its launch (or capture), as an index into the trace's ranges, or [`NONE`].
    pub innermost: Vec<u32>,
    /// Per call the innermost range around it, or [`NONE`].
    pub of_call: Vec<u32>,
    /// Per range the tightest range of its thread around it, or [`NONE`]. A parent stands before its children.
    pub parent: Vec<u32>,
}

impl Attribution {
    /// The ranges around an op, innermost first.
    pub fn chain(&self, op: usize) -> impl Iterator<Item = usize> + '_ {
        self.outward(self.innermost.get(op).copied().unwrap_or(NONE))
    }

    /// A range and those around it, innermost first.
    pub fn outward(&self, range: u32) -> impl Iterator<Item = usize> + '_ {
        let known = move |r: u32| (r != NONE).then_some(r as usize);
        std::iter::successors(known(range), move |&r| known(self.parent[r]))
    }
}

/// Finds the ranges around every call, op and range in one pass over time.
pub fn innermost_ranges(trace: &Trace) -> Attribution {
    let calls = (0..trace.calls.len()).map(|c| (trace.calls.start[c], trace.calls.end[c], trace.calls.thread[c]));
    let mut parent = vec![NONE; trace.ranges.len()];
    let of_call = sweep(trace, calls, Some(&mut parent));
    let mut innermost: Vec<u32> =
        trace.ops.launch.iter().map(|&call| of_call.get(call as usize).copied().unwrap_or(NONE)).collect();
    if !trace.graph_nodes.is_empty() {
        let captured = ranges_of_nodes(trace);
        for (op, &node) in trace.ops.graph_node.iter().enumerate().filter(|&(_, &node)| node != 0) {
            if let Some(&range) = captured.get(&node) {
                innermost[op] = range;
            }
        }
    }
    Attribution { innermost, of_call, parent }
}

/// Whether a range is host time that can be around something.
fn encloses(trace: &Trace, range: usize) -> bool {
    let without = range_flags::MARK | range_flags::CROSS_THREAD;
    trace.ranges.flags[range] & without == 0 && trace.ranges.source[range] != RangeSource::GpuAnnotation
}

/// The innermost range around each span, which come by start. Ranges are taken in the trace's order (outer first).
fn sweep(trace: &Trace, spans: impl Iterator<Item = (i64, i64, u32)>, mut parent: Option<&mut Vec<u32>>) -> Vec<u32> {
    let ranges = &trace.ranges;
    let mut open: Vec<Vec<u32>> = vec![Vec::new(); trace.threads.len()];
    let mut next = 0;
    let mut enter = |open: &mut Vec<Vec<u32>>, until: i64| {
        while next < ranges.len() && ranges.start[next] <= until {
            let range = next;
            next += 1;
            let Some(stack) = open.get_mut(ranges.thread[range] as usize) else { continue };
            if !encloses(trace, range) {
                continue;
            }
            if let Some(parent) = parent.as_deref_mut() {
                parent[range] = innermost_open(stack, &ranges.end, ranges.start[range], ranges.end[range]);
            } else {
                drop_ended(stack, &ranges.end, ranges.start[range]);
            }
            open_range(stack, &ranges.end, range as u32);
        }
    };
    let found = spans
        .map(|(start, end, thread)| {
            enter(&mut open, start);
            open.get_mut(thread as usize).map_or(NONE, |stack| innermost_open(stack, &ranges.end, start, end))
        })
        .collect();
    enter(&mut open, i64::MAX);
    found
}

fn drop_ended(stack: &mut Vec<u32>, ends: &[i64], now: i64) {
    while stack.last().is_some_and(|&top| ends[top as usize] < now) {
        stack.pop();
    }
}

/// Opens a range. One opened before that ends no later is never again the innermost around anything: without these the
/// ranges that are open end one before the other, the last one first.
fn open_range(stack: &mut Vec<u32>, ends: &[i64], range: u32) {
    while stack.last().is_some_and(|&top| ends[top as usize] <= ends[range as usize]) {
        stack.pop();
    }
    stack.push(range);
}

/// The range opened last that lasts until `end`.
fn innermost_open(stack: &mut Vec<u32>, ends: &[i64], start: i64, end: i64) -> u32 {
    drop_ended(stack, ends, start);
    match stack.last() {
        Some(&top) if ends[top as usize] >= end => top,
        _ => {
            let lasting = stack.partition_point(|&range| ends[range as usize] >= end);
            lasting.checked_sub(1).map_or(NONE, |place| stack[place])
        }
    }
}

/// Per graph node the innermost range around its capture: that of the node it was cloned from, else its own.
fn ranges_of_nodes(trace: &Trace) -> HashMap<u64, u32> {
    let mut order: Vec<usize> = (0..trace.graph_nodes.len()).collect();
    order.sort_by_key(|&n| trace.graph_nodes[n].start);
    let nodes = order.iter().map(|&n| &trace.graph_nodes[n]);
    let found = sweep(trace, nodes.clone().map(|n| (n.start, n.end, n.thread)), None);
    let mut made: HashMap<u64, u32> = HashMap::new();
    let mut originals: HashMap<u64, u64> = HashMap::new();
    for (node, range) in nodes.zip(found) {
        if node.original == 0 {
            made.entry(node.node).or_insert(range);
        } else {
            originals.entry(node.node).or_insert(node.original);
        }
    }
    let captured = |mut node: u64| {
        // A clone of a clone leads on; the bound ends circles that only a broken file has.
        for _ in 0..16 {
            match originals.get(&node) {
                Some(&original) => node = original,
                None => break,
            }
        }
        made.get(&node).copied().filter(|&range| range != NONE)
    };
    let all = trace.graph_nodes.iter().map(|n| n.node);
    all.filter_map(|node| Some((node, captured(node)?))).collect()
}
