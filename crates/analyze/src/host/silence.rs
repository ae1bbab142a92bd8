//! Who was busy while a thread slept or recorded nothing.

use std::collections::BinaryHeap;

use strobe_trace::{RangeSource, Trace};

use super::{Class, Cursor, Event, Host, Place};
use crate::intervals::Span;

/// What one thread waits for has ended when it goes on; clocks of several threads agree about as well as this.
const TOLERANCE_NS: i64 = 50_000;

/// Where the last look into each thread ended.
#[derive(Default)]
pub(super) struct Cursors {
    stretches: Vec<Cursor>,
    calls: Vec<Cursor>,
}

impl Cursors {
    pub(super) fn of(threads: usize) -> Self {
        Self { stretches: vec![Cursor::default(); threads], calls: vec![Cursor::default(); threads] }
    }
}

/// Something that another thread did, and how well it explains a wait.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    /// A range that names a cause, then a call, then any other range.
    rank: u8,
    /// What ended last was waited for last.
    until: i64,
    span_end: i64,
    thread: u32,
    event: Event,
    class: Class,
}

impl Host {
    /// The first stretch of a thread that ends after a moment.
    pub(super) fn stretch_from(&self, cursors: &mut Cursors, thread: u32, moment: i64) -> usize {
        let list = &self.stretches[thread as usize];
        cursors.stretches[thread as usize].seek(list.len(), |i| list[i].span.end <= moment)
    }

    /// The first outermost call of a thread that ends after a moment.
    pub(super) fn call_from(&self, cursors: &mut Cursors, trace: &Trace, thread: u32, moment: i64) -> usize {
        let list = &self.calls[thread as usize];
        cursors.calls[thread as usize].seek(list.len(), |i| trace.calls.end[list[i] as usize] <= moment)
    }

    /// Whether a range is a mere bracket around much of a program: it says that the thread is there, not that it works.
    /// Such are annotations without a known meaning in which the thread itself calls the device.
    pub(super) fn is_bracket(&self, trace: &Trace, event: Event, class: Class) -> bool {
        let Place::Range(range) = event.place() else { return false };
        let annotation = matches!(
            trace.ranges.source[range],
            RangeSource::PushPop | RangeSource::StartEnd | RangeSource::Annotation | RangeSource::Other
        );
        class == Class::NONE && annotation && self.calls_device.get(range).is_some_and(|&calls| calls)
    }

    /// The threads that autograd's flow says to work for a thread in its silence, from when the first of them began until
    /// the last has nothing more to do.
    pub(super) fn workers_in(&self, trace: &Trace, thread: u32, silence: Span) -> Option<(Vec<u32>, Span)> {
        let own = self.workers.get(thread as usize).filter(|own| !own.is_empty())?;
        let first = own.partition_point(|&(time, _)| time < silence.start);
        let inside = own[first..].iter().take_while(|&&(time, _)| time < silence.end);
        let mut workers: Vec<u32> = inside.map(|&(_, worker)| worker).collect();
        let begun = own.get(first).filter(|_| !workers.is_empty())?.0;
        workers.sort_unstable();
        workers.dedup();
        let ended = workers.iter().map(|&worker| {
            let (stretches, calls) = (&self.stretches[worker as usize], &self.calls[worker as usize]);
            let place = stretches.partition_point(|stretch| stretch.span.start < silence.end);
            let stretch = place.checked_sub(1).map(|last| stretches[last].span.end);
            let place = calls.partition_point(|&call| trace.calls.start[call as usize] < silence.end);
            let call = place.checked_sub(1).map(|last| trace.calls.end[calls[last] as usize]);
            stretch.max(call).unwrap_or(begun)
        });
        let ended = ended.max().unwrap_or(begun).clamp(begun, silence.end);
        Some((workers, Span::new(begun, ended)))
    }

    /// What other threads of the process did in a piece of a thread's silence: what had ended by the time the thread
    /// went on may be what it waited for. Where `workers` are known to work for it, nobody else is asked. `give` gets each
    /// moment of the piece once, `None` where nobody was busy.
    pub(super) fn others(
        &self,
        trace: &Trace,
        cursors: &mut Cursors,
        (thread, workers): (u32, &[u32]),
        piece: Span,
        silence: Span,
        mut give: impl FnMut(Span, Option<(u32, Event, Class)>),
    ) {
        let process = trace.threads.get(thread as usize).map_or(0, |thread| thread.process);
        let threads = self.threads_of(process);
        let resumed = silence.end.saturating_add(TOLERANCE_NS);
        let mut claims: Vec<(i64, Claim)> = Vec::new();
        let may_tell = |other: u32| other != thread && (workers.is_empty() || workers.contains(&other));
        for other in threads.iter().copied().filter(|&other| may_tell(other)) {
            let from = self.stretch_from(cursors, other, piece.start);
            for stretch in &self.stretches[other as usize][from..] {
                let Some(inside) = stretch.span.overlap(piece) else { break }; // they are not empty
                let until = stretch.event.span(trace).end;
                let idles = stretch.class.waits() || stretch.class == Class::PROFILER;
                if until > resumed || idles || self.is_bracket(trace, stretch.event, stretch.class) {
                    continue;
                }
                let speaks = stretch.class.speaks() && matches!(stretch.event.place(), Place::Range(_));
                let rank = if speaks { 2 } else { 0 };
                let (event, class) = (stretch.event, stretch.class);
                claims.push((inside.start, Claim { rank, until, span_end: inside.end, thread: other, event, class }));
            }
            let from = self.call_from(cursors, trace, other, piece.start);
            for &call in &self.calls[other as usize][from..] {
                let span = Span::new(trace.calls.start[call as usize], trace.calls.end[call as usize]);
                if span.start >= piece.end {
                    break;
                }
                let Some(inside) = span.overlap(piece) else { continue };
                let class = self.class_of_call(trace, call);
                if span.end > resumed || class.is_device_wait() {
                    continue;
                }
                let event = Event::call(call as usize);
                let claim = Claim { rank: 1, until: span.end, span_end: inside.end, thread: other, event, class };
                claims.push((inside.start, claim));
            }
        }
        if claims.is_empty() {
            return give(piece, None);
        }
        claims.sort_unstable_by_key(|(start, _)| *start);
        let mut open: BinaryHeap<Claim> = BinaryHeap::new();
        let (mut at, mut next) = (piece.start, 0);
        while at < piece.end {
            while let Some(&(_, claim)) = claims.get(next).filter(|(start, _)| *start <= at) {
                open.push(claim);
                next += 1;
            }
            while open.peek().is_some_and(|claim| claim.span_end <= at) {
                open.pop();
            }
            let begins = claims.get(next).map_or(piece.end, |(start, _)| *start);
            let (until, owner) = match open.peek() {
                Some(best) => (best.span_end.min(begins), Some((best.thread, best.event, best.class))),
                None => (begins, None),
            };
            give(Span::new(at, until), owner);
            at = until;
        }
    }

    /// The range in which another thread stands all through a silence, e.g. the one that runs the backward pass for which
    /// this thread works.
    pub(super) fn bracket_around(
        &self,
        trace: &Trace,
        cursors: &mut Cursors,
        thread: u32,
        piece: Span,
    ) -> Option<(u32, Event)> {
        let process = trace.threads.get(thread as usize)?.process;
        let others = self.of_process.get(process as usize)?.iter();
        others.copied().filter(|&other| other != thread).find_map(|other| {
            let place = self.stretch_from(cursors, other, piece.start);
            let stretch = self.stretches[other as usize].get(place)?;
            let around = stretch.span.start <= piece.start && piece.end <= stretch.span.end;
            let class = stretch.class;
            let launches = class == Class::NONE && self.launches[other as usize];
            let waits = launches || class.waits() || self.is_bracket(trace, stretch.event, class);
            let is_range = matches!(stretch.event.place(), Place::Range(_));
            (around && waits && is_range).then_some((other, stretch.event))
        })
    }
}
