//! When threads had a CPU and what they were in, where context switches or samples were recorded.

use std::collections::HashMap;
use std::ops::Range;

use strobe_trace::{Left, NONE, StrId, Trace};

use super::{Class, Doing, Event, Evidence};
use crate::intervals::Span;

/// Shorter times without a CPU are what a switch costs, not a wait.
const SHORT_NS: i64 = 10_000;

/// Share of a silence that samples must stand for where no switches tell that the thread ran.
const MOSTLY: f64 = 0.5;

/// Looks up threads in switches and samples. There is none where a trace has neither.
pub(crate) struct Cpus {
    /// Per thread its rows of [`Trace::on_cpu`].
    times: Vec<Range<usize>>,
    /// Per thread its samples, by time.
    samples: Vec<Vec<u32>>,
    /// The usual distance of two samples of a thread.
    period_ns: i64,
}

impl Cpus {
    pub(super) fn of(trace: &Trace) -> Option<Self> {
        if trace.on_cpu.is_empty() && trace.cpu_samples.is_empty() {
            return None;
        }
        let mut times = vec![0..0; trace.threads.len()];
        let mut first = 0;
        for of_thread in trace.on_cpu.chunk_by(|a, b| a.thread == b.thread) {
            let range = first..first + of_thread.len();
            first = range.end;
            if let Some(slot) = times.get_mut(of_thread[0].thread as usize) {
                *slot = range;
            }
        }
        let mut samples: Vec<Vec<u32>> = vec![Vec::new(); trace.threads.len()];
        for (index, sample) in trace.cpu_samples.iter().enumerate() {
            if let Some(own) = samples.get_mut(sample.thread as usize) {
                own.push(index as u32);
            }
        }
        let time = |&sample: &u32| trace.cpu_samples[sample as usize].time;
        let pairs = samples.iter().flat_map(|own| own.windows(2));
        let mut distances: Vec<i64> = pairs.map(|pair| time(&pair[1]) - time(&pair[0])).collect();
        distances.sort_unstable();
        let period_ns = distances.get(distances.len() / 2).copied().unwrap_or(0);
        Some(Self { times, samples, period_ns })
    }

    /// Says more of what a thread did in a piece of a silence, or of unnamed work: whether it had a CPU, and what it
    /// was in. `give` gets each moment once.
    pub(super) fn refine(&self, trace: &Trace, piece: Span, doing: Doing, mut give: impl FnMut(Span, Doing)) {
        let open = [Class::HOST_CODE, Class::BETWEEN_CALLS, Class::UNKNOWN].contains(&doing.class);
        let own = matches!(doing.evidence, Evidence::Launcher | Evidence::Times | Evidence::None);
        let Some(times) = self.times.get(doing.thread as usize).filter(|_| open && own) else {
            return give(piece, doing);
        };
        let rows = &trace.on_cpu[times.clone()];
        let mut at = piece.start;
        for place in rows.partition_point(|on| on.end <= piece.start)..=rows.len() {
            let (before, next) = (place.checked_sub(1).map(|before| &rows[before]), rows.get(place));
            let begins = next.map_or(i64::MAX, |on| on.start).min(piece.end);
            if at < begins {
                let span = Span::new(at, begins);
                let doing = match (before, next) {
                    (Some(before), Some(next)) if next.start.saturating_sub(before.end) >= SHORT_NS => {
                        without(doing, before.left)
                    }
                    (before, next) => self.running(trace, span, doing, before.is_some() && next.is_some()),
                };
                give(span, doing);
                at = begins;
            }
            let Some(on) = next else { return };
            let span = Span::new(at, on.end.min(piece.end));
            if span.start < span.end {
                give(span, self.running(trace, span, doing, true));
                at = span.end;
            }
            if at >= piece.end {
                return;
            }
        }
    }

    /// What a thread that records nothing is in. `surely`: switches tell that it had a CPU.
    fn running(&self, trace: &Trace, span: Span, doing: Doing, surely: bool) -> Doing {
        if doing.is_named() || doing.class == Class::BETWEEN_CALLS {
            return doing;
        }
        let own = self.samples.get(doing.thread as usize).map_or(&[][..], Vec::as_slice);
        let time = |sample: u32| trace.cpu_samples[sample as usize].time;
        let first = own.partition_point(|&sample| time(sample) < span.start);
        let after = own.partition_point(|&sample| time(sample) < span.end);
        let inside = &own[first..after.max(first)];
        let sampled = inside.len() as f64 * self.period_ns as f64;
        if !surely && sampled < MOSTLY * span.length() as f64 {
            return doing;
        }
        let mut counts: HashMap<StrId, usize> = HashMap::new();
        for &sample in inside {
            let sample = &trace.cpu_samples[sample as usize];
            let name = if sample.function.is_some() { sample.function } else { sample.module };
            *counts.entry(name).or_default() += 1;
        }
        let most = counts.into_iter().filter(|(name, _)| name.is_some());
        let most = most.max_by_key(|&(name, count)| (count, std::cmp::Reverse(name.0)));
        let event = most.map_or(Event::NONE, |(name, _)| Event::named(name));
        let evidence = if event == Event::NONE { Evidence::Switches } else { Evidence::Samples };
        Doing { class: Class::HOST_CODE, event, evidence, ..doing }
    }
}

/// The same without a CPU.
fn without(doing: Doing, left: Left) -> Doing {
    let class = if left == Left::Ready { Class::WAITS_FOR_CPU } else { Class::SWITCHED_OUT };
    Doing { class, evidence: Evidence::Switches, ..doing }
}

/// Who had the CPUs, by CPU.
pub(crate) struct Occupants {
    by_cpu: HashMap<u32, Vec<u32>>,
}

/// Who had a CPU that a thread had lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Occupant {
    /// A thread of the trace.
    Thread(u32),
    /// Another program.
    Other,
    /// Nobody that was recorded.
    Nobody,
}

impl Occupants {
    pub(crate) fn of(trace: &Trace) -> Self {
        let mut by_cpu: HashMap<u32, Vec<u32>> = HashMap::new();
        for (index, on) in trace.on_cpu.iter().enumerate() {
            by_cpu.entry(on.cpu).or_default().push(index as u32);
        }
        for rows in by_cpu.values_mut() {
            rows.sort_by_key(|&row| trace.on_cpu[row as usize].start);
        }
        Self { by_cpu }
    }

    /// Who had the CPU that a thread had last before a moment, for each part of a span after that moment.
    pub(crate) fn instead(&self, trace: &Trace, thread: u32, span: Span, mut give: impl FnMut(Occupant, i64)) {
        let own = trace.on_cpu.partition_point(|on| (on.thread, on.start) <= (thread, span.start));
        let last = own.checked_sub(1).map(|last| &trace.on_cpu[last]).filter(|on| on.thread == thread);
        let Some(rows) = last.and_then(|on| self.by_cpu.get(&on.cpu)) else {
            return give(Occupant::Nobody, span.length());
        };
        let at = |row: &u32| &trace.on_cpu[*row as usize];
        // Those of one CPU are disjoint but for switches that were lost: one before may still run.
        let first = rows.partition_point(|row| at(row).start <= span.start).saturating_sub(1);
        let mut left = span.length();
        for on in rows[first..].iter().map(at).take_while(|on| on.start < span.end) {
            let inside = Span::new(on.start, on.end).overlap(span).map_or(0, Span::length).min(left);
            if inside > 0 && on.thread != thread {
                left -= inside;
                give(if on.thread == NONE { Occupant::Other } else { Occupant::Thread(on.thread) }, inside);
            }
        }
        if left > 0 {
            give(Occupant::Nobody, left);
        }
    }
}
