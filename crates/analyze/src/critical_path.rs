//! The critical path: what was being waited for at each moment, walked backwards from the last event.
//!
//! An op waits for the op before it on its stream, or for the call that launched it, whichever came later. A thread is
//! busy with what it does between calls and inside them; a call that synchronises waits for the op that ended last
//! before it returned. The segments found tile the span exactly. Which stream or event a call waits for is not
//! recorded, so any op of its process that ends inside the call may be the one. Where a thread sleeps or records nothing,
//! the path goes through what another thread of its process did meanwhile, see [`crate::host`].

use std::collections::HashMap;

use serde::Serialize;
use strobe_trace::{CallKind, NONE, OpKind, RangeSource, StrId, Trace, range_flags};

use crate::Context;
use crate::host::{Class, Doing, Explainer, Host};
use crate::intervals::Span;
use crate::sheet::{Column, Report, Sheet, Unit, Value};

/// What a stretch of the critical path was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// An op ran on a device (or, for a CPU engine, on the host).
    Op,
    /// The host computed between calls.
    Host,
    /// The host was inside a call of CUDA or HIP that did not wait for the device.
    Call,
    /// The call had returned, the device had nothing before it, and the op had not started.
    LaunchLatency,
    /// The op was queued behind another that had ended, and had not started.
    QueueGap,
    /// The device had finished and the waiting call had not returned.
    SyncReturn,
    /// The trace does not say.
    Unknown,
}

impl Kind {
    /// Every kind, in the order tables show them.
    pub const ALL: [Kind; 7] =
        [Self::Op, Self::Host, Self::Call, Self::LaunchLatency, Self::QueueGap, Self::SyncReturn, Self::Unknown];

    /// Its name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Op => "op",
            Kind::Host => "host",
            Kind::Call => "call",
            Kind::LaunchLatency => "launch latency",
            Kind::QueueGap => "gap between queued ops",
            Kind::SyncReturn => "return from wait",
            Kind::Unknown => "unknown",
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// A stretch of the critical path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// When.
    pub span: Span,
    /// What it was spent on.
    pub kind: Kind,
    /// The op, call or range, or `StrId::NONE`. For a latency or gap: the op that was waited for.
    pub name: StrId,
    /// The op that ran or was waited for, or [`NONE`].
    pub op: u32,
    /// The call that the host was in, or [`NONE`].
    pub call: u32,
}

/// The critical path of one iteration, or of one process where there are no iterations.
#[derive(Clone, Debug, PartialEq)]
pub struct Path {
    /// Index into the iterations, if it is the path of one.
    pub iteration: Option<usize>,
    /// Index into the trace's processes.
    pub process: u32,
    /// From the first moment to the last.
    pub span: Span,
    /// What it was spent on, in order of time; they tile `span`.
    pub segments: Vec<Segment>,
}

impl Path {
    /// The time spent on a kind of thing.
    pub fn time(&self, kind: Kind) -> i64 {
        self.segments.iter().filter(|s| s.kind == kind).map(|s| s.span.length()).sum()
    }
}

/// The critical path of every process with ops, from its first launch to the end of its last op.
pub fn process_paths(context: &Context) -> Vec<Path> {
    let (index, mut explainer) = (context.waits(), Explainer::new(context));
    (0..index.by_end.len() as u32).filter_map(|process| index.whole_path(context, &mut explainer, process)).collect()
}

/// The critical path of every iteration; of every process with ops where no iterations are known.
pub fn paths(context: &Context) -> Vec<Path> {
    let mut all = Vec::new();
    each_path(context, |path| all.push(path));
    all
}

/// Walks path after path, so that not all of them need room at once.
fn each_path(context: &Context, mut take: impl FnMut(Path)) {
    let trace = context.trace;
    let iterations = &context.iterations;
    if iterations.list.is_empty() {
        return process_paths(context).into_iter().for_each(take);
    }
    let (index, mut explainer) = (context.waits(), Explainer::new(context));
    // The last op and the last call of each iteration.
    let mut last_op = vec![NONE; iterations.list.len()];
    for (op, &iteration) in iterations.of_op.iter().enumerate() {
        if let Some(last) = last_op.get_mut(iteration as usize)
            && (*last == NONE || trace.ops.end[op] >= trace.ops.end[*last as usize])
        {
            *last = op as u32;
        }
    }
    let mut last_call = vec![NONE; iterations.list.len()];
    for (call, &iteration) in iterations.of_call.iter().enumerate() {
        if let Some(last) = last_call.get_mut(iteration as usize) {
            *last = call as u32; // by start
        }
    }
    for (i, found) in iterations.list.iter().enumerate() {
        let device_end = found.device.map_or(found.host.end, |d| d.end);
        let start = found.device.map_or(found.host.start, |d| d.start.min(found.host.start));
        let span = Span::new(start, found.host.end.max(device_end));
        let from = match (last_op[i], last_call[i]) {
            (op, _) if op != NONE && trace.ops.end[op as usize] >= found.host.end => At::Op(op),
            (_, call) if call != NONE => At::Thread(trace.calls.thread[call as usize]),
            (op, _) if op != NONE => At::Op(op),
            _ => At::Nowhere,
        };
        let segments = index.walk(context, &mut explainer, found.process, span, from);
        take(Path { iteration: Some(i), process: found.process, span, segments });
    }
}

/// Where a walk stands.
#[derive(Clone, Copy)]
enum At {
    Op(u32),
    Thread(u32),
    Nowhere,
}

/// A piece of a thread's time and what it did.
#[derive(Clone, Copy)]
struct Piece {
    span: Span,
    name: StrId,
    /// The op of a CPU engine that ran, or [`NONE`].
    op: u32,
}

/// What a backward walk looks up.
pub(crate) struct Index {
    /// Per op the one that ended last among those before it on its stream, or [`NONE`].
    before: Vec<u32>,
    /// Per process its ops by end.
    by_end: Vec<Vec<u32>>,
    /// Per process whether its streams wait for each other's events.
    streams_wait: Vec<bool>,
    /// Per process that computes on the CPU its ops and phases: disjoint pieces in order.
    cpu: HashMap<u32, Vec<Piece>>,
    /// Per call that copies memory the last copy that it launched.
    last_launched: HashMap<u32, u32>,
}

impl Index {
    pub(crate) fn of(trace: &Trace) -> Self {
        let ops = &trace.ops;
        let processes = trace.processes.len().max(ops.process.iter().map(|&p| p as usize + 1).max().unwrap_or(0));
        // The latest op of every stream. Neighbours mostly share the stream, which saves looking it up.
        let mut streams: HashMap<(u32, u32, u32, u32), usize> = HashMap::new();
        let mut last: Vec<u32> = Vec::new();
        let mut current = ((0, 0, 0, 0), usize::MAX);
        let mut before = vec![NONE; ops.len()];
        let mut by_end = vec![Vec::new(); processes];
        let mut last_launched: HashMap<u32, u32> = HashMap::new();
        for op in 0..ops.len() {
            let stream = (ops.process[op], ops.device[op], ops.context[op], ops.stream[op]);
            if current.0 != stream || current.1 == usize::MAX {
                current = (stream, *streams.entry(stream).or_insert(last.len()));
                if current.1 == last.len() {
                    last.push(NONE);
                }
            }
            let latest = &mut last[current.1];
            before[op] = *latest;
            if *latest == NONE || ops.end[op] >= ops.end[*latest as usize] {
                *latest = op as u32;
            }
            by_end[ops.process[op] as usize].push(op as u32);
            if ops.launch[op] != NONE && ops.kind[op] == OpKind::Memcpy {
                last_launched.insert(ops.launch[op], op as u32);
            }
        }
        by_end.iter_mut().for_each(|list| list.sort_by_key(|&op| ops.end[op as usize]));

        let mut streams_wait = vec![false; processes];
        for call in (0..trace.calls.len()).filter(|&call| trace.calls.kind[call] == CallKind::Gpu) {
            let Some(thread) = trace.threads.get(trace.calls.thread[call] as usize) else { continue };
            if trace.text(trace.calls.name[call]).contains("StreamWaitEvent")
                && let Some(waits) = streams_wait.get_mut(thread.process as usize)
            {
                *waits = true;
            }
        }

        let is_cpu = |op: usize| trace.devices.get(ops.device[op] as usize).is_some_and(|d| d.is_cpu);
        let mut cpu: HashMap<u32, Vec<Piece>> = HashMap::new();
        for op in (0..ops.len()).filter(|&op| is_cpu(op)) {
            cpu.entry(ops.process[op]).or_default();
        }
        if !cpu.is_empty() {
            add_labels(trace, &mut cpu);
        }
        for op in (0..ops.len()).filter(|&op| is_cpu(op)) {
            if let Some(all) = cpu.get_mut(&ops.process[op]) {
                let span = Span::new(ops.start[op], ops.end[op]);
                all.push(Piece { span, name: ops.name[op], op: op as u32 });
            }
        }
        let cpu = cpu.into_iter().map(|(process, pieces)| (process, innermost(pieces))).collect();
        Self { before, by_end, streams_wait, cpu, last_launched }
    }

    /// The path through everything that a process did on devices, from its first launch or op.
    fn whole_path(&self, context: &Context, explainer: &mut Explainer, process: u32) -> Option<Path> {
        let trace = context.trace;
        let ops = &trace.ops;
        if let Some(timeline) = self.cpu.get(&process) {
            let span = Span::new(timeline.first()?.span.start, timeline.last()?.span.end);
            return Some(Path {
                iteration: None,
                process,
                span,
                segments: self.walk(context, explainer, process, span, At::Nowhere),
            });
        }
        let list = self.by_end.get(process as usize)?;
        let &last = list.last()?;
        let starts = list.iter().map(|&op| {
            let launch = trace.ops.launch[op as usize];
            let called = if launch == NONE { i64::MAX } else { trace.calls.start[launch as usize] };
            ops.start[op as usize].min(called)
        });
        let mut span = Span::new(starts.min()?, ops.end[last as usize]);
        let mut from = At::Op(last);
        // A call that waits for the last op belongs to the path.
        let host = context.host();
        let ends = host.threads_of(process).iter().filter_map(|&thread| {
            let calls = host.calls.get(thread as usize)?;
            let holds = |&&call: &&u32| {
                let (start, end) = (trace.calls.start[call as usize], trace.calls.end[call as usize]);
                start <= span.end && span.end <= end && waits(trace.text(trace.calls.name[call as usize]))
            };
            calls.iter().rev().find(holds).map(|&call| (trace.calls.end[call as usize], thread))
        });
        if let Some((end, thread)) = ends.max() {
            span.end = end;
            from = At::Thread(thread);
        }
        Some(Path { iteration: None, process, span, segments: self.walk(context, explainer, process, span, from) })
    }

    fn walk(&self, context: &Context, explainer: &mut Explainer, process: u32, span: Span, from: At) -> Vec<Segment> {
        let mut walk = Walk {
            index: self,
            host: context.host(),
            explainer,
            trace: context.trace,
            span,
            at: span.end,
            process,
            place: usize::MAX,
            done: Vec::new(),
            segments: Vec::new(),
        };
        if let Some(timeline) = self.cpu.get(&process) {
            walk.along(timeline, span.start, Kind::Unknown);
        } else {
            walk.back(from);
        }
        walk.segments.reverse();
        walk.segments
    }
}

/// One walk backwards in time. `at` only goes down, and everything above it is covered by segments.
struct Walk<'i, 'e, 'c> {
    index: &'i Index,
    host: &'i Host,
    explainer: &'e mut Explainer<'c>,
    trace: &'i Trace,
    span: Span,
    at: i64,
    process: u32,
    /// Where the last search among the ops by end ended.
    place: usize,
    /// What a thread did in the time that is walked through, in order.
    done: Vec<(Span, Doing)>,
    segments: Vec<Segment>,
}

/// Steps that may pass without getting further back before a walk is given up: only malformed traces need more.
const PATIENCE: u32 = 1_000;

impl Walk<'_, '_, '_> {
    /// Covers the time from `start` to where the walk stands.
    fn push(&mut self, start: i64, kind: Kind, name: StrId, op: u32) {
        let start = start.max(self.span.start);
        if start < self.at {
            self.segments.push(Segment { span: Span::new(start, self.at), kind, name, op, call: NONE });
            self.at = start;
        }
    }

    /// The same for time inside a call.
    fn push_call(&mut self, start: i64, kind: Kind, call: u32) {
        let before = self.segments.len();
        self.push(start, kind, self.trace.calls.name[call as usize], NONE);
        self.segments[before..].iter_mut().for_each(|segment| segment.call = call);
    }

    fn back(&mut self, mut next: At) {
        let mut standing = 0;
        while self.at > self.span.start {
            let was = self.at;
            next = match next {
                At::Op(op) => self.through_op(op),
                At::Thread(thread) => self.through_thread(thread),
                At::Nowhere => {
                    self.push(self.span.start, Kind::Unknown, StrId::NONE, NONE);
                    return;
                }
            };
            standing = if self.at == was { standing + 1 } else { 0 };
            if standing > PATIENCE {
                next = At::Nowhere;
            }
        }
    }

    /// From inside or after an op to what it waited for.
    fn through_op(&mut self, op: u32) -> At {
        let trace = self.trace;
        let ops = &trace.ops;
        let i = op as usize;
        // Between the end of the op and where the walk stands nothing is known.
        self.push(ops.end[i], Kind::Unknown, StrId::NONE, NONE);
        self.push(ops.start[i], Kind::Op, ops.name[i], op);
        let launch = ops.launch[i];
        let before = self.index.before[i];
        let free = if before == NONE { i64::MIN } else { ops.end[before as usize] };
        if launch == NONE {
            if before == NONE {
                return At::Nowhere;
            }
            // It may have been launched late or have waited: that cannot be told apart.
            self.push(free, Kind::Unknown, StrId::NONE, NONE);
            return At::Op(before);
        }
        let called = trace.calls.start[launch as usize];
        let returned = trace.calls.end[launch as usize];
        if let Some(other) = self.other_stream(i, launch, free.max(called)) {
            self.push(ops.end[other as usize], Kind::QueueGap, ops.name[i], op);
            return At::Op(other);
        }
        if free > called {
            self.push(free, Kind::QueueGap, ops.name[i], op);
            return At::Op(before);
        }
        self.push(returned, Kind::LaunchLatency, ops.name[i], op);
        self.push_call(called, Kind::Call, launch);
        At::Thread(trace.calls.thread[launch as usize])
    }

    /// The op of another stream that ended last before this one began and after `bound`, where streams are known to
    /// wait for each other: by events, or as branches of one graph.
    fn other_stream(&mut self, op: usize, launch: u32, bound: i64) -> Option<u32> {
        let ops = &self.trace.ops;
        let index = self.index;
        let list = index.by_end.get(ops.process[op] as usize)?;
        let until = self.ended_until(list, ops.start[op]);
        let &other = list.get(until.checked_sub(1)?)?;
        let o = other as usize;
        let linked = ops.launch[o] == launch || self.index.streams_wait[ops.process[op] as usize];
        let elsewhere =
            (ops.stream[o], ops.context[o], ops.device[o]) != (ops.stream[op], ops.context[op], ops.device[op]);
        (linked && elsewhere && ops.end[o] > bound && ops.start[o] < ops.start[op]).then_some(other)
    }

    /// Back along a thread to the start of the call it is in, or through the time since the last call.
    fn through_thread(&mut self, thread: u32) -> At {
        let (host, trace) = (self.host, self.trace);
        let Some(calls) = host.calls.get(thread as usize) else { return At::Nowhere };
        let place = calls.partition_point(|&call| trace.calls.start[call as usize] < self.at);
        let Some(&call) = place.checked_sub(1).and_then(|p| calls.get(p)) else {
            self.along_thread(thread, self.span.start, Kind::Unknown);
            return At::Nowhere;
        };
        let (start, end) = (trace.calls.start[call as usize], trace.calls.end[call as usize]);
        self.along_thread(thread, end, Kind::Host);
        if self.at <= self.span.start {
            return At::Nowhere;
        }
        if let Some(op) = self.waited_for(call, start) {
            self.push_call(trace.ops.end[op as usize], Kind::SyncReturn, call);
            return At::Op(op);
        }
        self.push_call(start, Kind::Call, call);
        At::Thread(thread)
    }

    /// The op that a call waited for: one that ended while the call ran.
    fn waited_for(&mut self, call: u32, start: i64) -> Option<u32> {
        let trace = self.trace;
        let ops = &trace.ops;
        let within = |op: u32| ops.end[op as usize] > start && ops.end[op as usize] <= self.at;
        let text = trace.text(trace.calls.name[call as usize]);
        // A copy that has ended before its call returns has kept the host waiting, whatever the call is named.
        if let Some(&own) = self.index.last_launched.get(&call) {
            return Some(own).filter(|&own| within(own));
        }
        if !waits(text) {
            return None;
        }
        let index = self.index;
        let list = index.by_end.get(self.process as usize)?;
        let until = self.ended_until(list, self.at);
        let within = |op: u32| ops.end[op as usize] > start && ops.end[op as usize] <= self.at;
        let candidates = list[..until].iter().rev().take_while(|&&op| within(op));
        // What was launched after the call began cannot be what it waits for.
        let launched = |op: u32| {
            let launch = ops.launch[op as usize];
            launch == NONE || trace.calls.start[launch as usize] < start
        };
        candidates.copied().find(|&op| launched(op))
    }

    /// How many ops of a list by end have ended at a moment. Moments only go back during a walk, by a little as a rule:
    /// the search widens from where the last one ended.
    fn ended_until(&mut self, list: &[u32], moment: i64) -> usize {
        let ends = &self.trace.ops.end;
        let ended = |place: usize| ends[list[place] as usize] <= moment;
        let mut high = self.place.min(list.len());
        if high < list.len() && ended(high) {
            high = list.len();
        }
        let mut step = 1;
        let mut low = high;
        while low > 0 && !ended(low - 1) {
            high = low - 1;
            low = high.saturating_sub(step);
            step *= 2;
        }
        self.place = low + list[low..high].partition_point(|&op| ends[op as usize] <= moment);
        self.place
    }

    /// Covers the time down to `until`, in which a thread is in no call, with what it did or with what another thread did
    /// for which it waited. Where nothing short is recorded it becomes `otherwise`.
    fn along_thread(&mut self, thread: u32, until: i64, otherwise: Kind) {
        let until = until.max(self.span.start);
        if until >= self.at {
            return;
        }
        let mut done = std::mem::take(&mut self.done);
        self.explainer.thread(thread, Span::new(until, self.at), &mut |span, doing| done.push((span, doing)));
        while let Some((span, doing)) = done.pop() {
            let name = doing.event.name(self.trace);
            match (doing.class, doing.event.gpu_call(self.trace)) {
                (_, Some(call)) => self.push_call(span.start, Kind::Call, call),
                (Class::UNKNOWN, _) => self.push(span.start, Kind::Unknown, StrId::NONE, NONE),
                (Class::BETWEEN_CALLS, _) => self.push(span.start, otherwise, StrId::NONE, NONE),
                _ => self.push(span.start, Kind::Host, name, NONE),
            }
        }
        self.done = done;
        self.push(until, otherwise, StrId::NONE, NONE);
    }

    /// Covers the time down to `until` with the pieces of a timeline; what lies between them becomes `otherwise`.
    fn along(&mut self, timeline: &[Piece], until: i64, otherwise: Kind) {
        let until = until.max(self.span.start);
        let mut place = timeline.partition_point(|piece| piece.span.start < self.at);
        while self.at > until && place > 0 {
            place -= 1;
            let Piece { span, name, op } = timeline[place];
            if span.end <= until {
                break;
            }
            self.push(span.end.max(until), otherwise, StrId::NONE, NONE);
            let kind = if op == NONE { Kind::Host } else { Kind::Op };
            self.push(span.start.max(until), kind, name, op);
        }
        self.push(until, otherwise, StrId::NONE, NONE);
    }
}

/// Whether a call waits for the device by its nature. Freeing memory does too, in the old interface.
fn waits(call: &str) -> bool {
    let frees = (call.starts_with("cudaFree") || call.starts_with("hipFree") || call.starts_with("cuMemFree"))
        && !call.contains("Async")
        && !call.contains("Host");
    frees || call.contains("Synchronize") || (call.contains("emcpy") && !call.contains("Async"))
}

/// Adds ranges and calls of the system to the timelines of processes that compute on the CPU.
fn add_labels(trace: &Trace, cpu: &mut HashMap<u32, Vec<Piece>>) {
    let mut add = |thread: u32, start: i64, end: i64, name: StrId| {
        let process = trace.threads.get(thread as usize).map(|thread| thread.process);
        if let Some(all) = process.and_then(|process| cpu.get_mut(&process)) {
            all.push(Piece { span: Span::new(start, end), name, op: NONE });
        }
    };
    let calls = &trace.calls;
    for call in (0..calls.len()).filter(|&call| calls.kind[call] != CallKind::Gpu) {
        add(calls.thread[call], calls.start[call], calls.end[call], calls.name[call]);
    }
    let ranges = &trace.ranges;
    for range in 0..ranges.len() {
        let on_device = ranges.source[range] == RangeSource::GpuAnnotation;
        if !on_device && ranges.flags[range] & range_flags::MARK == 0 {
            add(ranges.thread[range], ranges.start[range], ranges.end[range], ranges.name[range]);
        }
    }
}

/// Turns pieces that may lie inside each other into disjoint ones: each moment belongs to the one that began last.
fn innermost(mut pieces: Vec<Piece>) -> Vec<Piece> {
    pieces.sort_by_key(|p| (p.span.start, std::cmp::Reverse(p.span.end))); // stable: what comes later lies inside
    let mut disjoint = Vec::with_capacity(pieces.len());
    let mut open: Vec<Piece> = Vec::new();
    let mut at = i64::MIN;
    let mut close_until = |open: &mut Vec<Piece>, until: i64| {
        while at < until {
            let Some(&top) = open.last() else {
                at = until;
                return;
            };
            if top.span.end <= at {
                open.pop();
                continue;
            }
            let end = top.span.end.min(until);
            disjoint.push(Piece { span: Span::new(at.max(top.span.start), end), ..top });
            at = end;
        }
    };
    for piece in pieces {
        close_until(&mut open, piece.span.start);
        open.push(piece);
    }
    let last = open.iter().map(|p| p.span.end).max().unwrap_or(i64::MIN);
    close_until(&mut open, last);
    disjoint
}

/// Rows that the tables of names and of segments show at most.
const ROWS: usize = 40;

/// The critical path as tables: by kind, by name, per iteration, and the longest segments.
pub fn report(context: &Context) -> Report {
    const TITLE: &str = "Critical path: what was being waited for at each moment";
    let trace = context.trace;
    if crate::host_compute::is_host_only(trace) {
        let why = "nothing ran on a device: the host's own time is in `budget` and `operators`";
        return Report::absent("critical-path", TITLE, why);
    }
    let tally = Tally::of(context);
    let Tally { paths, kinds, names, longest } = &tally;
    let length: i64 = paths.iter().map(|p| p.span.length()).fold(0, i64::saturating_add);
    if length == 0 {
        return Report::absent("critical-path", TITLE, "the trace holds nothing that ran on a device");
    }
    let share = |ns: i64| Value::from(ns as f64 / length as f64);
    let name = |segment: &Segment| match (segment.kind, segment.name) {
        (Kind::Unknown, _) => "",
        (_, StrId::NONE) => "(no range)",
        (_, name) => trace.text(name),
    };
    let category = |segment: &Segment| match segment.op {
        op if op != NONE => context.categories.of_op(op as usize).name.as_str(),
        _ => "",
    };

    let time = |name| Column::new(name, Unit::Ns);
    let text = |name| Column::new(name, Unit::Text);
    let count = |name| Column::new(name, Unit::Count);
    let of_path = || Column::new("Share of path", Unit::Share);
    let mut by_kind =
        Sheet::new("kinds", [text("Kind"), count("Segments"), time("Time"), of_path()]).title("By kind of segment");
    for (kind, &(segments, ns)) in Kind::ALL.into_iter().zip(kinds).filter(|(_, (segments, _))| *segments > 0) {
        by_kind.push([kind.as_str().into(), segments.into(), ns.into(), share(ns)]);
    }
    let segments: usize = kinds.iter().map(|kind| kind.0).sum();
    by_kind.total = Some(vec!["total".into(), segments.into(), length.into(), share(length)]);

    let columns = [text("Kind"), text("Category"), count("Segments"), time("Time"), of_path(), text("Name")];
    let mut by_name = Sheet::new("names", columns).title("By what it was spent on");
    let mut rows: Vec<_> = names.iter().collect();
    rows.sort_by_key(|(_, ns, s)| (std::cmp::Reverse(*ns), s.kind, s.name));
    let left_out = rows.len().saturating_sub(ROWS);
    for (segments, ns, segment) in rows.iter().take(ROWS) {
        let words = [segment.kind.as_str().into(), category(segment).into()];
        by_name.push(words.into_iter().chain([(*segments).into(), (*ns).into(), share(*ns), name(segment).into()]));
    }

    let mut columns = vec![text("Path"), time("Length")];
    columns.extend(Kind::ALL.map(|kind| time(kind.as_str())));
    let mut per_path = Sheet::new("paths", columns).title("Per iteration");
    for path in paths {
        let row = [path_label(context, path.iteration, path.process).into(), path.span.length().into()];
        per_path.push(row.into_iter().chain(path.times.map(Value::from)));
    }

    let columns = [text("Path"), time("Start"), time("Time"), text("Kind"), text("Category"), text("Name")];
    let mut segments = Sheet::new("segments", columns).title("Longest segments");
    for (p, segment) in longest {
        let label = path_label(context, paths[*p].iteration, paths[*p].process);
        let place = [label.into(), segment.span.start.into(), segment.span.length().into()];
        let words = [segment.kind.as_str().into(), category(segment).into(), name(segment).into()];
        segments.push(place.into_iter().chain(words));
    }

    let mut report = Report::new("critical-path", TITLE).sheet(by_kind).sheet(by_name).sheet(per_path).sheet(segments);
    let what = if context.iterations.list.is_empty() { "one path per process" } else { "one path per iteration" };
    report = report.note(format!(
        "{what}, from its first moment on host or device to its last; shares are of the length of all paths together"
    ));
    let overlap = paths.windows(2).any(|p| p[0].process == p[1].process && p[0].span.overlap(p[1].span).is_some());
    if overlap {
        report = report.note("paths of neighbouring iterations overlap, since the host runs ahead of the device");
    }
    if left_out > 0 {
        report = report.note(format!("{left_out} more names take less time each"));
    }
    report
}

/// What the tables show of all paths, added up path by path.
#[derive(Default)]
struct Tally {
    paths: Vec<PathTimes>,
    /// Segments and time by [`Kind::ALL`].
    kinds: [(usize, i64); Kind::ALL.len()],
    /// Segments, time and an example by kind and name.
    names: Vec<(usize, i64, Segment)>,
    /// The longest segments with the number of their path.
    longest: Vec<(usize, Segment)>,
}

/// A path without its segments.
struct PathTimes {
    iteration: Option<usize>,
    process: u32,
    span: Span,
    times: [i64; Kind::ALL.len()],
}

impl Tally {
    fn of(context: &Context) -> Self {
        let mut tally = Self::default();
        // The place in `names` by kind and name; the last slot of a kind is for segments without name.
        let strings = context.trace.strings.len();
        let mut places = vec![NONE; (strings + 1) * Kind::ALL.len()];
        let by_length = |&(p, s): &(usize, Segment)| (std::cmp::Reverse(s.span.length()), s.span.start, p);
        each_path(context, |path| {
            let number = tally.paths.len();
            let mut times = [0i64; Kind::ALL.len()];
            for &segment in &path.segments {
                let (ns, kind) = (segment.span.length(), segment.kind as usize);
                times[kind] = times[kind].saturating_add(ns);
                let all = &mut tally.kinds[kind];
                *all = (all.0 + 1, all.1.saturating_add(ns));
                let place = &mut places[kind * (strings + 1) + (segment.name.0 as usize).min(strings)];
                if *place == NONE {
                    *place = tally.names.len() as u32;
                    tally.names.push((0, 0, segment));
                }
                let row = &mut tally.names[*place as usize];
                (row.0, row.1) = (row.0 + 1, row.1.saturating_add(ns));
                tally.longest.push((number, segment));
                if tally.longest.len() >= 100 * ROWS {
                    tally.longest.select_nth_unstable_by_key(ROWS, by_length);
                    tally.longest.truncate(ROWS);
                }
            }
            let Path { iteration, process, span, .. } = path;
            tally.paths.push(PathTimes { iteration, process, span, times });
        });
        tally.longest.sort_by_key(by_length);
        tally.longest.truncate(ROWS);
        tally
    }
}

fn path_label(context: &Context, iteration: Option<usize>, process: u32) -> String {
    match iteration.and_then(|i| context.iterations.list.get(i)) {
        Some(found) if found.label.is_empty() => format!("iteration {}", found.number),
        Some(found) => found.label.clone(),
        None => match context.trace.processes.get(process as usize) {
            Some(process) => format!("process {}", process.pid),
            None => "whole trace".to_owned(),
        },
    }
}
