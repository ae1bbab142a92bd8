//! What a device does at every moment, and why it does nothing when it does nothing.
//!
//! Every moment between the first and the last op of a device goes to exactly one owner: to compute if any compute op
//! runs, else to communication, else to a copy or fill, else to a gap. Of several ops of the same class the one that
//! started last owns the moment; the start of a kernel that waits on the device is the end of that wait.
//!
//! A gap is split by the call that launched the op which ends it:
//! - up to that call the op did not exist: the host is late ([`Cause::HostLate`]; [`Cause::BetweenIterations`] when the
//!   op before the gap belongs to another iteration), or the calling thread was inside a call that waits for the device
//!   ([`Cause::Sync`], or [`Cause::Copy`] when that call is a copy), or it waited for Python's interpreter lock or collected
//!   garbage, where the trace has ranges of those ([`Cause::Gil`], [`Cause::Gc`]);
//! - from the start of that call on, the op was on its way ([`Cause::Launch`]): the call itself and the latency after it;
//! - if the call had returned before the gap began, the op was in the queue all the time ([`Cause::Queued`]): what the
//!   device needs between two kernels (of one graph, too), or an event of another stream that it waited for.
//!
//! Without a recorded call the cause is unknown.

use std::collections::BinaryHeap;

use serde::Serialize;
use strobe_trace::{NONE, OpKind, Trace};

use crate::categories::Class;
use crate::context::Context;
use crate::host::Class as HostClass;
use crate::intervals::{Span, SpanSet};

/// Why a device is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The next op was on its way: its call was running, or had returned after the gap began.
    Launch,
    /// The next op had been called before the gap began: the time that a device needs between two ops, or an event.
    Queued,
    /// The host had not called the next op yet and was busy with something else.
    HostLate,
    /// The same between the last op of an iteration and the first op of the next.
    BetweenIterations,
    /// The host was inside a call that waits for the device.
    Sync,
    /// The host was inside a copy that waits for the device.
    Copy,
    /// The launching thread waited for Python's global interpreter lock.
    Gil,
    /// The launching thread collected garbage.
    Gc,
    /// The call of the next op was not recorded.
    Unknown,
}

impl Cause {
    /// Every cause, in the order tables show them.
    pub const ALL: [Cause; 9] = [
        Cause::Launch,
        Cause::Queued,
        Cause::HostLate,
        Cause::BetweenIterations,
        Cause::Sync,
        Cause::Copy,
        Cause::Gil,
        Cause::Gc,
        Cause::Unknown,
    ];
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Cause::Launch => "launch latency",
            Cause::Queued => "queued",
            Cause::HostLate => "host late",
            Cause::BetweenIterations => "between iterations",
            Cause::Sync => "sync",
            Cause::Copy => "blocking copy",
            Cause::Gil => "waiting for the GIL",
            Cause::Gc => "garbage collection",
            Cause::Unknown => "unknown",
        })
    }
}

/// A piece of a device's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// This op runs and owns the moment.
    Op(u32),
    /// Nothing runs.
    Gap {
        /// The op that ended last before.
        before: u32,
        /// The op that ends the gap.
        next: u32,
    },
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Open {
    rank: u8,
    start: i64,
    op: u32,
    end: i64,
}

/// Walks through the time of a device from its first op to the end of its last one; `visit` gets every piece once, in
/// order, without holes. `ops` are the ops of the device by start.
pub(crate) fn walk(context: &Context, ops: &[u32], mut visit: impl FnMut(Span, Piece)) {
    let columns = &context.trace.ops;
    let rank = |op: u32| match context.categories.of_op(op as usize).class {
        Class::Compute => 2,
        Class::Communication => 1,
        Class::Memory => 0,
    };
    // A kernel that waits on the device for the one ahead of it owns nothing of that wait.
    let start_of = |op: u32| columns.end[op as usize].saturating_sub(context.own_ns(op as usize));
    let mut by_own_start = Vec::new();
    let mut ops = ops;
    if context.has_own_times() {
        by_own_start.extend_from_slice(ops);
        by_own_start.sort_by_key(|&op| start_of(op));
        ops = &by_own_start;
    }
    let mut open: BinaryHeap<Open> = BinaryHeap::new();
    let Some(&first) = ops.first() else { return };
    let mut now = start_of(first);
    let mut last_ended = first;
    for &op in ops {
        let (start, end) = (start_of(op), columns.end[op as usize]);
        now = run(&mut open, now, start, &mut visit);
        if now < start {
            visit(Span { start: now, end: start }, Piece::Gap { before: last_ended, next: op });
            now = start;
        }
        open.push(Open { rank: rank(op), start, op, end });
        if end > columns.end[last_ended as usize] {
            last_ended = op;
        }
    }
    run(&mut open, now, i64::MAX, &mut visit);
}

/// Gives the time from `now` on to the ops that are open, until `until` or until none is; returns how far that is.
fn run(open: &mut BinaryHeap<Open>, mut now: i64, until: i64, visit: &mut impl FnMut(Span, Piece)) -> i64 {
    while let Some(top) = open.peek().filter(|_| now < until) {
        if top.end <= now {
            open.pop();
            continue;
        }
        let end = top.end.min(until);
        visit(Span { start: now, end }, Piece::Op(top.op));
        now = end;
    }
    now
}

/// Per device of the trace its ops by start.
pub(crate) fn ops_by_device(trace: &Trace) -> Vec<Vec<u32>> {
    let devices = trace.ops.device.iter().max().map_or(0, |&d| d as usize + 1);
    let mut counts = vec![0; devices];
    trace.ops.device.iter().for_each(|&d| counts[d as usize] += 1);
    let mut ops: Vec<Vec<u32>> = counts.into_iter().map(Vec::with_capacity).collect();
    trace.ops.device.iter().enumerate().for_each(|(op, &d)| ops[d as usize].push(op as u32));
    ops
}

/// Explains gaps.
pub(crate) struct Causes<'c> {
    context: &'c Context<'c>,
    /// Per thread the times in which it waited for the device inside a call, and whether that call was a copy.
    waits: Vec<Waits>,
}

#[derive(Default)]
struct Waits {
    sync: SpanSet,
    copy: SpanSet,
    gil: SpanSet,
    gc: SpanSet,
}

impl<'c> Causes<'c> {
    pub(crate) fn new(context: &'c Context<'c>) -> Self {
        let trace = context.trace;
        let mut spans: Vec<(Vec<Span>, Vec<Span>)> = vec![Default::default(); trace.threads.len()];
        let span = |call: usize| Span::new(trace.calls.start[call], trace.calls.end[call]);
        let mut waits_by_name: Vec<Option<bool>> = vec![None; trace.strings.len()];
        for (call, &name) in trace.calls.name.iter().enumerate() {
            let Some(known) = waits_by_name.get_mut(name.0 as usize) else { continue };
            if *known.get_or_insert_with(|| is_sync(trace.text(name)))
                && let Some((sync, _)) = spans.get_mut(trace.calls.thread[call] as usize)
            {
                sync.push(span(call));
            }
        }
        for call in blocking_copies(trace) {
            if let Some((_, copy)) = spans.get_mut(trace.calls.thread[call] as usize) {
                copy.push(span(call));
            }
        }
        let host = context.names_python().then(|| context.host());
        let python = |thread: usize, class| {
            let seen = host.filter(|host| host.has(class)).and_then(|host| host.stretches.get(thread));
            let stretches = seen.into_iter().flatten().filter(|stretch| stretch.class == class);
            SpanSet::union_of(stretches.map(|stretch| stretch.span))
        };
        let waits = spans.into_iter().enumerate().map(|(thread, (sync, copy))| Waits {
            sync: SpanSet::union_of(sync),
            copy: SpanSet::union_of(copy),
            gil: python(thread, HostClass::gil_wait()),
            gc: python(thread, HostClass::garbage_collection()),
        });
        let waits = waits.collect();
        Self { context, waits }
    }

    /// Splits a gap into causes; the parts are in no particular order, may repeat a cause and add up to its length.
    pub(crate) fn split(&self, gap: Span, before: u32, next: u32, mut give: impl FnMut(Cause, i64)) {
        let trace = self.context.trace;
        let call = trace.ops.launch[next as usize] as usize;
        let (Some(&call_start), Some(&call_end)) = (trace.calls.start.get(call), trace.calls.end.get(call)) else {
            return give(Cause::Unknown, gap.length());
        };
        if call_end <= gap.start {
            return give(Cause::Queued, gap.length());
        }
        let called = call_start.clamp(gap.start, gap.end);
        if called < gap.end {
            give(Cause::Launch, gap.end - called);
        }
        if called == gap.start {
            return;
        }
        let until_call = Span { start: gap.start, end: called };
        let (mut sync, mut copy, mut gil, mut gc) = (0, 0, 0, 0);
        if let Some(waits) = self.waits.get(trace.calls.thread[call] as usize) {
            copy = overlap(&waits.copy, until_call);
            // A copy may call a function that waits: such a moment is counted as the copy's.
            sync = overlap(&waits.sync, until_call);
            if sync > 0 && copy > 0 {
                sync = waits.sync.clip(until_call).subtract(&waits.copy.clip(until_call)).length();
            }
            if !waits.gil.is_empty() || !waits.gc.is_empty() {
                // They speak for what they stand in, as in the table of causes.
                let collected = waits.gc.clip(until_call);
                let locked = waits.gil.clip(until_call).subtract(&collected);
                let python = locked.union(&collected);
                let copied = waits.copy.clip(until_call).subtract(&python);
                let waited = waits.sync.clip(until_call).subtract(&python).subtract(&copied);
                (gc, gil, copy, sync) = (collected.length(), locked.length(), copied.length(), waited.length());
            }
        }
        let iteration = |op: u32| self.context.iterations.of_op.get(op as usize).copied().unwrap_or(NONE);
        let (left, right) = (iteration(before), iteration(next));
        let late =
            if left != right && left != NONE && right != NONE { Cause::BetweenIterations } else { Cause::HostLate };
        let late_for = until_call.length() - sync - copy - gil - gc;
        let parts = [(Cause::Sync, sync), (Cause::Copy, copy), (Cause::Gil, gil), (Cause::Gc, gc), (late, late_for)];
        for (cause, time) in parts {
            if time > 0 {
                give(cause, time);
            }
        }
    }

    /// The cause with the largest part of a gap.
    pub(crate) fn main_cause(&self, gap: Span, before: u32, next: u32) -> Cause {
        let mut parts = [0i64; Cause::ALL.len()];
        self.split(gap, before, next, |cause, time| parts[cause as usize] += time);
        let largest = Cause::ALL.into_iter().rev().max_by_key(|&cause| parts[cause as usize]);
        largest.unwrap_or(Cause::Unknown)
    }
}

fn overlap(set: &SpanSet, with: Span) -> i64 {
    let spans = set.spans();
    let first = spans.partition_point(|s| s.end <= with.start);
    let inside = spans[first..].iter().take_while(|s| s.start < with.end);
    inside.filter_map(|s| s.overlap(with)).map(Span::length).sum()
}

/// Whether a function returns only when the device has come to some point.
fn is_sync(name: &str) -> bool {
    name.contains("Synchronize")
}

/// Calls that launched a copy and returned only after it had ended: whatever they are called, they waited.
fn blocking_copies(trace: &Trace) -> impl Iterator<Item = usize> + '_ {
    let copies = trace.ops.kind.iter().enumerate().filter(|&(_, &kind)| kind == OpKind::Memcpy);
    copies.map(|(op, _)| (op, trace.ops.launch[op] as usize)).filter_map(|(op, call)| {
        let returned = *trace.calls.end.get(call)?;
        (trace.ops.end[op] <= returned).then_some(call)
    })
}
