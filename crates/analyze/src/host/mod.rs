//! What every thread of the host does at every moment, as far as it was recorded.
//!
//! Two things are kept per thread: its outermost calls into CUDA or HIP, and stretches in which one range or one call of
//! the system (or of the profiler) speaks for the thread. Of ranges inside each other the innermost speaks, but one that
//! names a cause (`rules/causes.toml`) speaks for all that happens inside it.

mod cpu;
mod idle;
mod names;
mod python;
mod rules;
mod silence;

use std::collections::HashSet;

use strobe_trace::{CallKind, NONE, RangeSource, StrId, Trace, range_flags};

use crate::intervals::Span;
pub(crate) use cpu::{Occupant, Occupants};
pub(crate) use idle::{Doing, Explainer};
pub use idle::{Evidence, IdleCause, idle_causes};
pub(crate) use names::{folded, plain};
pub(crate) use python::{gc_sheet, gil_sheet, may_be_recorded};
pub use rules::Class;
use rules::Classes;

/// A range or a call of a trace, or the name of a function or op where there is neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Event(u32);

impl Event {
    /// The two highest bits say what it is: a call, a name, and with neither a range.
    const CALL: u32 = 1 << 31;
    const NAME: u32 = 1 << 30;
    const INDEX: u32 = Self::NAME - 1;
    /// Nothing that was recorded.
    pub(crate) const NONE: Event = Event(NONE);

    fn range(index: usize) -> Event {
        Event(index as u32 & Self::INDEX)
    }

    pub(crate) fn call(index: usize) -> Event {
        Event(index as u32 & Self::INDEX | Self::CALL)
    }

    fn named(name: StrId) -> Event {
        Event(name.0 & Self::INDEX | Self::NAME)
    }

    /// The range or the call that it is.
    fn place(self) -> Place {
        match self {
            Event::NONE => Place::Nothing,
            Event(call) if call & Self::CALL != 0 => Place::Call((call & Self::INDEX) as usize),
            Event(name) if name & Self::NAME != 0 => Place::Name(StrId(name & Self::INDEX)),
            Event(range) => Place::Range(range as usize),
        }
    }

    fn span(self, trace: &Trace) -> Span {
        match self.place() {
            Place::Range(range) => Span::new(trace.ranges.start[range], trace.ranges.end[range]),
            Place::Call(call) => Span::new(trace.calls.start[call], trace.calls.end[call]),
            Place::Name(_) | Place::Nothing => Span::new(0, 0),
        }
    }

    /// The call into CUDA or HIP that it is, if it is one.
    pub(crate) fn gpu_call(self, trace: &Trace) -> Option<u32> {
        match self.place() {
            Place::Call(call) if trace.calls.kind[call] == CallKind::Gpu => Some(call as u32),
            _ => None,
        }
    }

    /// What it is called.
    pub(crate) fn name(self, trace: &Trace) -> StrId {
        match self.place() {
            Place::Range(range) => trace.ranges.name[range],
            Place::Call(call) => trace.calls.name[call],
            Place::Name(name) => name,
            Place::Nothing => StrId::NONE,
        }
    }
}

enum Place {
    Range(usize),
    Call(usize),
    Name(StrId),
    Nothing,
}

/// A time in which one event speaks for its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub span: Span,
    pub event: Event,
    pub class: Class,
}

/// What every thread does.
pub(crate) struct Host {
    /// Per thread, in order and disjoint.
    pub stretches: Vec<Vec<Stretch>>,
    /// Per thread its outermost calls into CUDA or HIP in order.
    pub calls: Vec<Vec<u32>>,
    /// The class of every call, by its name.
    call_classes: Vec<Class>,
    /// Per process its threads of which anything is known.
    of_process: Vec<Vec<u32>>,
    /// Per thread whether it launched anything that ran on a device.
    launches: Vec<bool>,
    /// Per process when which of its threads held Python's interpreter lock, in order.
    gil_holders: Vec<Vec<(Span, u32)>>,
    /// The classes that any range has.
    seen: HashSet<Class>,
    /// Per range whether its thread calls the device in it.
    calls_device: Vec<bool>,
    /// When threads had a CPU, where that was recorded.
    cpus: Option<cpu::Cpus>,
    /// Per thread when other threads began work for it and which, in order; empty where no trace of that was recorded.
    workers: Vec<Vec<(i64, u32)>>,
}

impl Host {
    /// The threads of a process of which anything is known.
    pub(crate) fn threads_of(&self, process: u32) -> &[u32] {
        self.of_process.get(process as usize).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn of(trace: &Trace) -> Self {
        let mut classes = Classes::new(trace);
        let mut threads: Vec<Open> = Vec::new();
        threads.resize_with(trace.threads.len(), Open::default);
        let mut calls: Vec<Vec<u32>> = vec![Vec::new(); trace.threads.len()];
        let mut call_classes = Vec::with_capacity(trace.strings.len());
        call_classes.resize(trace.strings.len(), Class::OTHER_CALL);
        let processes = trace.threads.iter().map(|thread| thread.process as usize + 1).max().unwrap_or(0);
        let mut gil_holders: Vec<Vec<(Span, u32)>> = vec![Vec::new(); processes];
        let mut seen = HashSet::new();
        let mut calls_device = vec![false; trace.ranges.len()];
        let mut last_seen = Class::NONE;
        let mut range = 0;
        for call in 0..=trace.calls.len() {
            let until = trace.calls.start.get(call).copied().unwrap_or(i64::MAX);
            while range < trace.ranges.len() && trace.ranges.start[range] <= until {
                if is_host_time(trace, range)
                    && let Some(open) = threads.get_mut(trace.ranges.thread[range] as usize)
                {
                    let class = classes.of_range(trace, range);
                    if class != last_seen {
                        seen.insert(class);
                        last_seen = class;
                    }
                    if !class.is_ignored() {
                        open.enter(trace, Event::range(range), class, &mut calls_device);
                    } else if class == Class::gil_held() {
                        let thread = trace.ranges.thread[range];
                        let process = trace.threads[thread as usize].process as usize;
                        gil_holders[process].push((Event::range(range).span(trace), thread));
                    }
                }
                range += 1;
            }
            if call == trace.calls.len() {
                break;
            }
            let thread = trace.calls.thread[call] as usize;
            let (Some(open), Some(list)) = (threads.get_mut(thread), calls.get_mut(thread)) else { continue };
            let class = classes.of_call(trace, call);
            if trace.calls.kind[call] != CallKind::Gpu {
                open.enter(trace, Event::call(call), class, &mut calls_device);
                continue;
            }
            open.calls_device(trace, until, &mut calls_device);
            if let Some(slot) = call_classes.get_mut(trace.calls.name[call].0 as usize) {
                *slot = class;
            }
            if list.last().is_none_or(|&outer| trace.calls.end[outer as usize] <= trace.calls.start[call]) {
                list.push(call as u32);
            }
        }
        let stretches: Vec<Vec<Stretch>> =
            threads.into_iter().map(|open| open.finish(trace, &mut calls_device)).collect();
        let mut of_process = vec![Vec::new(); processes];
        for (thread, known) in trace.threads.iter().enumerate() {
            if !stretches[thread].is_empty() || !calls[thread].is_empty() {
                of_process[known.process as usize].push(thread as u32);
            }
        }
        let mut launches = vec![false; trace.threads.len()];
        for &call in trace.ops.launch.iter().filter(|&&call| call != NONE) {
            if let Some(launches) = launches.get_mut(trace.calls.thread[call as usize] as usize) {
                *launches = true;
            }
        }
        let cpus = cpu::Cpus::of(trace);
        let workers = workers(trace);
        Self { stretches, calls, call_classes, of_process, launches, gil_holders, seen, calls_device, cpus, workers }
    }

    /// Whether any range is of a class.
    pub(crate) fn has(&self, class: Class) -> bool {
        self.seen.contains(&class)
    }

    /// The class of a call into CUDA or HIP.
    fn class_of_call(&self, trace: &Trace, call: u32) -> Class {
        let name = trace.calls.name[call as usize].0 as usize;
        self.call_classes.get(name).copied().unwrap_or(Class::OTHER_CALL)
    }
}

/// Per thread when other threads began work for it, by autograd's flow.
fn workers(trace: &Trace) -> Vec<Vec<(i64, u32)>> {
    if trace.flows.is_empty() {
        return Vec::new();
    }
    let mut workers = vec![Vec::new(); trace.threads.len()];
    for flow in trace.flows.iter().filter(|flow| flow.from != flow.to) {
        if let Some(own) = workers.get_mut(flow.from as usize) {
            own.push((flow.end, flow.to));
        }
    }
    workers.iter_mut().for_each(|own| own.sort_unstable());
    workers
}

/// Whether a range is a span of its thread's time.
fn is_host_time(trace: &Trace, range: usize) -> bool {
    let without = range_flags::MARK | range_flags::CROSS_THREAD;
    trace.ranges.flags[range] & without == 0 && trace.ranges.source[range] != RangeSource::GpuAnnotation
}

/// A thread on the way through its events.
#[derive(Default)]
struct Open {
    stack: Vec<Entered>,
    at: Option<i64>,
    done: Vec<Stretch>,
}

/// An event that has begun, and the one that speaks while it is the innermost.
struct Entered {
    end: i64,
    event: Event,
    class: Class,
    speaker: (Event, Class),
    /// Whether the device was called in it so far.
    calls_device: bool,
}

/// Which of two events speaks: one, and another that began inside it.
fn speaker(outer: Option<(Event, Class)>, inner: (Event, Class)) -> (Event, Class) {
    match outer {
        _ if inner.1.is_over() => inner,
        Some(outer) if outer.1.is_over() || outer.1.speaks() && matches!(outer.0.place(), Place::Range(_)) => outer,
        _ => inner,
    }
}

impl Open {
    fn enter(&mut self, trace: &Trace, event: Event, class: Class, calls_device: &mut [bool]) {
        let span = event.span(trace);
        if span.start >= span.end {
            return;
        }
        self.close_until(trace, span.start, calls_device);
        let outer = self.stack.last().map(|entered| entered.speaker);
        let speaker = speaker(outer, (event, class));
        self.stack.push(Entered { end: span.end, event, class, speaker, calls_device: false });
    }

    /// The device is called.
    fn calls_device(&mut self, trace: &Trace, at: i64, calls_device: &mut [bool]) {
        self.close_until(trace, at, calls_device);
        if let Some(top) = self.stack.last_mut() {
            top.calls_device = true;
        }
    }

    /// The innermost event ends.
    fn pop(&mut self, calls_device: &mut [bool]) {
        let Some(ended) = self.stack.pop().filter(|ended| ended.calls_device) else { return };
        if let Place::Range(range) = ended.event.place() {
            calls_device[range] = true;
        }
        if let Some(top) = self.stack.last_mut() {
            top.calls_device = true;
        }
    }

    /// Gives the time until a moment to those who speak.
    fn close_until(&mut self, trace: &Trace, until: i64, calls_device: &mut [bool]) {
        let mut at = self.at.unwrap_or(i64::MIN);
        while at < until {
            let Some(top) = self.stack.last() else {
                at = until;
                break;
            };
            if top.end <= at {
                self.pop(calls_device);
                continue;
            }
            let (mut event, mut class) = top.speaker;
            let mut end = event.span(trace).end;
            if end <= at {
                // Only ranges that do not nest end before what began inside them.
                let open = self.stack.iter().filter(|entered| entered.end > at);
                let again = open.fold(None, |outer, inner| Some(speaker(outer, (inner.event, inner.class))));
                let Some(again) = again else { break };
                (event, class) = again;
                end = event.span(trace).end;
                if let Some(top) = self.stack.last_mut() {
                    top.speaker = again;
                }
            }
            let top_end = self.stack.last().map_or(until, |top| top.end);
            let span = Span::new(at.max(event.span(trace).start), end.min(top_end).min(until));
            match self.done.last_mut() {
                Some(last) if last.event == event && last.span.end == span.start => last.span.end = span.end,
                _ if span.start < span.end => self.done.push(Stretch { span, event, class }),
                _ => {}
            }
            at = end.min(top_end).min(until);
        }
        self.at = Some(at);
    }

    fn finish(mut self, trace: &Trace, calls_device: &mut [bool]) -> Vec<Stretch> {
        let last = self.stack.iter().map(|entered| entered.end).max().unwrap_or(i64::MIN);
        self.close_until(trace, last, calls_device);
        while !self.stack.is_empty() {
            self.pop(calls_device);
        }
        self.done
    }
}

/// Finds places in sorted lists near the one that was found last: what is looked up mostly moves on a little.
#[derive(Clone, Copy, Default)]
struct Cursor(usize);

impl Cursor {
    /// The first of `length` elements for which `before` does not hold; it holds for all before that one.
    fn seek(&mut self, length: usize, before: impl Fn(usize) -> bool) -> usize {
        let (mut low, mut high) = (self.0.min(length), self.0.min(length));
        let mut step = 1;
        while high < length && before(high) {
            low = high + 1;
            high = (high + step).min(length);
            step *= 2;
        }
        while low > 0 && !before(low - 1) {
            high = low - 1;
            low = high.saturating_sub(step);
            step *= 2;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if before(middle) { low = middle + 1 } else { high = middle }
        }
        self.0 = low;
        low
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use strobe_trace::{RangeRow, Thread};

    use super::*;

    proptest! {
        #[test]
        fn a_cursor_finds_what_a_search_finds(
            list in prop::collection::vec(0i64..100, 0..60), moments in prop::collection::vec(-5i64..105, 1..20)
        ) {
            let mut list = list;
            list.sort_unstable();
            let mut cursor = Cursor::default();
            for moment in moments {
                let expected = list.partition_point(|&at| at < moment);
                prop_assert_eq!(cursor.seek(list.len(), |i| list[i] < moment), expected);
            }
        }

        #[test]
        fn stretches_are_disjoint_and_inside_their_events(
            spans in prop::collection::vec((0i64..200, 0i64..80, 0usize..4), 0..30)
        ) {
            let mut trace = Trace { threads: vec![Thread::default()], ..Trace::default() };
            for (start, length, name) in spans {
                let name = trace.strings.intern(["a", "load_batch", "Python GC", "ProfilerStep#1"][name]);
                trace.ranges.push(RangeRow::new(name, 0, start, start + length));
            }
            trace.finish();
            let host = Host::of(&trace);
            let stretches = &host.stretches[0];
            for stretch in stretches {
                let whole = stretch.event.span(&trace);
                prop_assert!(whole.start <= stretch.span.start && stretch.span.end <= whole.end);
                prop_assert!(stretch.span.start < stretch.span.end);
            }
            prop_assert!(stretches.windows(2).all(|w| w[0].span.end <= w[1].span.start));
            let named = |r: &usize| !trace.text(trace.ranges.name[*r]).starts_with("Profiler");
            let ranges = (0..trace.ranges.len()).filter(named);
            let all = crate::intervals::SpanSet::union_of(ranges.map(|r| Event::range(r).span(&trace)));
            let covered = crate::intervals::SpanSet::union_of(stretches.iter().map(|s| s.span));
            prop_assert_eq!(covered, all);
        }
    }

    fn spoken(ranges: &[(&str, i64, i64)]) -> Vec<(String, i64, i64)> {
        let mut trace = Trace { threads: vec![Thread::default()], ..Trace::default() };
        for &(name, start, end) in ranges {
            let name = trace.strings.intern(name);
            trace.ranges.push(RangeRow::new(name, 0, start, end));
        }
        trace.finish();
        let host = Host::of(&trace);
        let text = |s: &Stretch| (trace.text(s.event.name(&trace)).to_owned(), s.span.start, s.span.end);
        host.stretches[0].iter().map(text).collect()
    }

    #[test]
    fn a_range_that_names_a_cause_speaks_for_what_is_inside() {
        let step = ("ProfilerStep#1", 0, 100);
        let name = |name: &str, start, end| (name.to_owned(), start, end);
        assert_eq!(
            spoken(&[step, ("forward", 0, 50), ("aten::add", 10, 20)]),
            [name("forward", 0, 10), name("aten::add", 10, 20), name("forward", 20, 50)]
        );
        assert_eq!(
            spoken(&[step, ("load_batch", 0, 50), ("aten::stack", 10, 20), ("Python GC", 12, 14)]),
            [name("load_batch", 0, 12), name("Python GC", 12, 14), name("load_batch", 14, 50)]
        );
    }
}
