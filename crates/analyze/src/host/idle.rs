//! What the host did while a device was idle.
//!
//! The thread that launched the next op is asked, moment by moment: a range that names a cause, else a call into CUDA or
//! HIP, else the innermost range or call of the system. Where it slept or recorded nothing, other threads of its process
//! are asked. What nobody tells is unknown.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use strobe_trace::{NONE, OpDetail, StrId, Trace};

use super::silence::Cursors;
use super::{Class, Event, Host, folded, plain};
use crate::context::Context;
use crate::intervals::Span;
use crate::timeline::{Piece, ops_by_device, walk};

/// Shorter silences of a thread are the time it needs between two of its calls.
const SHORT_SILENCE_NS: i64 = 500_000;

/// In shorter silences no other thread is asked: what passes between two calls is shorter than waking a thread.
const ASKED_NS: i64 = 20_000;

/// From this length on a wait is one of its own, not a matter of many launches.
pub(crate) const LONG_NS: i64 = 500_000;

/// How it is known what a device waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// The thread that launched the next op was in it.
    Launcher,
    /// The thread that launched the next op slept or recorded nothing, and another thread of its process was in it.
    OtherThread,
    /// The thread that launched the next op slept or recorded nothing; another thread of its process had this range open
    /// all the while, which says where the program was and not what it did.
    Around,
    /// The same, and autograd's flow says that this thread worked for the launching one.
    Flow,
    /// Switches of threads between CPUs tell whether the thread had one.
    Switches,
    /// Samples of the CPUs tell what the thread was in.
    Samples,
    /// The op that ends the wait moves pages of unified memory that the host asked for.
    Migration,
    /// It follows from the times of op and launch.
    Times,
    /// Nothing tells.
    None,
}

impl Evidence {
    /// Its name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Evidence::Launcher => "launching thread",
            Evidence::OtherThread => "busy while the launching thread slept",
            Evidence::Around => "range open on another thread",
            Evidence::Flow => "autograd's flow",
            Evidence::Switches => "context switches",
            Evidence::Samples => "CPU samples",
            Evidence::Migration => "migration of unified memory",
            Evidence::Times => "times of op and launch",
            Evidence::None => "none",
        }
    }
}

/// What is done at a moment, and by whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Doing {
    pub class: Class,
    pub event: Event,
    /// Index into the trace's threads, or [`NONE`].
    pub thread: u32,
    pub evidence: Evidence,
}

impl Doing {
    fn from_times(class: Class, thread: u32) -> Self {
        let evidence = if class == Class::UNKNOWN { Evidence::None } else { Evidence::Times };
        Self { class, event: Event::NONE, thread, evidence }
    }

    /// Whether it is work or a call with a name, not one of what passes around every launch.
    pub(crate) fn is_named(self) -> bool {
        self.event != Event::NONE
    }
}

/// Asks threads what they did. It remembers where it looked last: to go through time in order is cheap.
pub(crate) struct Explainer<'c> {
    trace: &'c Trace,
    host: &'c Host,
    cursors: Cursors,
    /// Per process, device and stream the only thread that launches on it; `None` where there are several.
    stream_threads: HashMap<(u32, u32, u32), Option<u32>>,
}

impl<'c> Explainer<'c> {
    pub(crate) fn new(context: &'c Context) -> Self {
        let (trace, host) = (context.trace, context.host());
        let mut stream_threads: HashMap<(u32, u32, u32), Option<u32>> = HashMap::new();
        if trace.ops_without_launch() > 0 {
            for op in 0..trace.ops.len() {
                let Some(&thread) = trace.calls.thread.get(trace.ops.launch[op] as usize) else { continue };
                let stream = (trace.ops.process[op], trace.ops.device[op], trace.ops.stream[op]);
                let only = stream_threads.entry(stream).or_insert(Some(thread));
                *only = only.filter(|&only| only == thread);
            }
        }
        Self { trace, host, cursors: Cursors::of(trace.threads.len()), stream_threads }
    }

    /// Says for each moment of a gap, or of a part of it, what the device waited for. The parts come in order.
    pub(crate) fn gap(&mut self, gap: Span, next: u32, mut give: impl FnMut(Span, Doing)) {
        let trace = self.trace;
        let op = next as usize;
        let call = trace.ops.launch[op] as usize;
        let (Some(&called), Some(&returned)) = (trace.calls.start.get(call), trace.calls.end.get(call)) else {
            return self.unlaunched(gap, op, give);
        };
        let thread = trace.calls.thread[call];
        if thread as usize >= trace.threads.len() {
            return give(gap, Doing::from_times(Class::UNKNOWN, NONE));
        }
        if returned <= gap.start {
            return give(gap, Doing::from_times(Class::QUEUED, thread));
        }
        let until = returned.max(called).min(gap.end);
        self.thread(thread, Span::new(gap.start, until), &mut give);
        if until < gap.end {
            give(Span::new(until, gap.end), Doing::from_times(Class::LAUNCH_LATENCY, thread));
        }
    }

    /// What most of a gap passes with.
    pub(crate) fn most(&mut self, gap: Span, next: u32) -> Option<Doing> {
        let trace = self.trace;
        let mut parts: BTreeMap<(Class, StrId, u32), (Doing, i64)> = BTreeMap::new();
        self.gap(gap, next, |span, doing| {
            let part = parts.entry((doing.class, doing.event.name(trace), doing.thread)).or_insert((doing, 0));
            part.1 = part.1.saturating_add(span.length());
        });
        parts.into_values().max_by_key(|(_, time)| *time).map(|(doing, _)| doing)
    }

    /// A gap before an op whose launch is not in the trace. Where one thread launches all that is known of its stream, that
    /// thread may tell; but what passes between two launches is no answer then.
    fn unlaunched(&mut self, gap: Span, op: usize, mut give: impl FnMut(Span, Doing)) {
        let ops = &self.trace.ops;
        let stream = (ops.process[op], ops.device[op], ops.stream[op]);
        let unknown = Doing::from_times(Class::UNKNOWN, NONE);
        if moves_pages_to_host(self.trace, op) {
            let (class, event) = (Class::UNIFIED_MEMORY, Event::named(ops.name[op]));
            return give(gap, Doing { class, event, thread: NONE, evidence: Evidence::Migration });
        }
        let Some(Some(thread)) = self.stream_threads.get(&stream).copied() else { return give(gap, unknown) };
        let launch = |class: Class| class.as_str() == "launch call";
        self.thread(thread, gap, &mut |span, doing: Doing| {
            let tells = doing.is_named() && doing.class != Class::HOST_CODE && !launch(doing.class);
            give(span, if tells { doing } else { unknown });
        });
    }

    /// What a thread does in each moment of a span, or the one it waits for.
    pub(crate) fn thread(&mut self, thread: u32, span: Span, give: &mut impl FnMut(Span, Doing)) {
        let (trace, host) = (self.trace, self.host);
        let Some(cpus) = &host.cpus else { return self.recorded(thread, span, give) };
        self.recorded(thread, span, &mut |piece, doing| cpus.refine(trace, piece, doing, &mut *give));
    }

    /// The same by ranges and calls alone.
    fn recorded(&mut self, thread: u32, span: Span, give: &mut impl FnMut(Span, Doing)) {
        let (trace, host) = (self.trace, self.host);
        let (Some(calls), Some(stretches)) = (host.calls.get(thread as usize), host.stretches.get(thread as usize))
        else {
            return give(span, Doing::from_times(Class::UNKNOWN, NONE));
        };
        let mut c = host.call_from(&mut self.cursors, trace, thread, span.start);
        let mut s = host.stretch_from(&mut self.cursors, thread, span.start);
        let call_span = |place: usize| {
            calls.get(place).map(|&call| Span::new(trace.calls.start[call as usize], trace.calls.end[call as usize]))
        };
        let mut at = span.start;
        while at < span.end {
            while call_span(c).is_some_and(|call| call.end <= at) {
                c += 1;
            }
            while stretches.get(s).is_some_and(|stretch| stretch.span.end <= at) {
                s += 1;
            }
            let (call, stretch) = (call_span(c), stretches.get(s));
            let in_call = call.filter(|call| call.start <= at);
            let in_stretch = stretch.filter(|stretch| stretch.span.start <= at);
            let call_edge = call.map_or(i64::MAX, |call| if call.start <= at { call.end } else { call.start });
            let stretch_edge =
                stretch.map_or(
                    i64::MAX,
                    |stretch| {
                        if stretch.span.start <= at { stretch.span.end } else { stretch.span.start }
                    },
                );
            let until = span.end.min(call_edge).min(stretch_edge);
            let piece = Span::new(at, until);
            at = until;
            let own = |class, event| Doing { class, event, thread, evidence: Evidence::Launcher };
            match (in_stretch, in_call) {
                (Some(stretch), call) if call.is_none() || stretch.class.speaks() || stretch.class.is_over() => {
                    let named = if stretch.class == Class::NONE { Class::HOST_CODE } else { stretch.class };
                    let bracket = host.is_bracket(trace, stretch.event, stretch.class);
                    if !bracket && !stretch.class.waits() {
                        give(piece, own(named, stretch.event));
                        continue;
                    }
                    let before = c.checked_sub(1).and_then(call_span).map_or(i64::MIN, |call| call.end);
                    let after = call_span(c).map_or(i64::MAX, |call| call.start);
                    let silence = Span::new(stretch.span.start.max(before), stretch.span.end.min(after));
                    self.silent(thread, piece, silence, Some(own(named, stretch.event)), give);
                }
                (_, Some(_)) => {
                    let call = calls[c];
                    give(piece, own(host.class_of_call(trace, call), Event::call(call as usize)));
                }
                _ => {
                    let ended = |place: Option<usize>, end: &dyn Fn(usize) -> Option<i64>| place.and_then(end);
                    let last_call = ended(c.checked_sub(1), &|place| call_span(place).map(|call| call.end));
                    let last_stretch = ended(s.checked_sub(1), &|place| stretches.get(place).map(|s| s.span.end));
                    let before = last_call.max(last_stretch).unwrap_or(piece.start);
                    let after = call_edge.min(stretch_edge);
                    let after = if after == i64::MAX { piece.end } else { after };
                    self.silent(thread, piece, Span::new(before, after), None, give);
                }
            }
        }
    }

    /// A piece of a silence of a thread: what it is known to be in there, if anything, is a wait or a mere bracket.
    fn silent(
        &mut self,
        thread: u32,
        piece: Span,
        silence: Span,
        stands_in: Option<Doing>,
        give: &mut impl FnMut(Span, Doing),
    ) {
        let (trace, host) = (self.trace, self.host);
        let nobody = |explainer: &mut Self, piece: Span| {
            if let Some(doing) = stands_in {
                return doing;
            }
            let asked = silence.length() >= ASKED_NS;
            let around = asked.then(|| host.bracket_around(trace, &mut explainer.cursors, thread, piece)).flatten();
            match around {
                Some((other, event)) => {
                    let short = silence.length() < SHORT_SILENCE_NS;
                    let class = if short { Class::HOST_CODE } else { Class::UNKNOWN };
                    Doing { class, event, thread: other, evidence: Evidence::Around }
                }
                None if silence.length() < SHORT_SILENCE_NS => Doing::from_times(Class::BETWEEN_CALLS, thread),
                None => Doing::from_times(Class::UNKNOWN, thread),
            }
        };
        if silence.length() < ASKED_NS {
            let doing = nobody(self, piece);
            return give(piece, doing);
        }
        let mut found = Vec::new();
        let working = host.workers_in(trace, thread, silence);
        let (workers, worked) = working.unwrap_or_else(|| (Vec::new(), Span::new(piece.start, piece.start)));
        // While those work that are known to work for it, nobody else is asked.
        let cut = |at: i64| at.clamp(piece.start, piece.end);
        let edges = [piece.start, cut(worked.start), cut(worked.end), piece.end];
        for (part, asked, evidence) in [
            (Span::new(edges[0], edges[1]), &[][..], Evidence::OtherThread),
            (Span::new(edges[1], edges[2]), &workers[..], Evidence::Flow),
            (Span::new(edges[2], edges[3]), &[][..], Evidence::OtherThread),
        ] {
            if part.start < part.end {
                host.others(trace, &mut self.cursors, (thread, asked), part, silence, |span, other| {
                    found.push((span, other, evidence));
                });
            }
        }
        for (span, other, evidence) in found {
            let doing = match other {
                Some((other, event, class)) => {
                    let class = if class == Class::NONE { Class::HOST_CODE } else { class };
                    Doing { class, event, thread: other, evidence }
                }
                None => nobody(self, span),
            };
            give(span, doing);
        }
    }
}

/// Whether an op that nobody launched moves pages of unified memory to the host, which touched them or was expected to.
fn moves_pages_to_host(trace: &Trace, op: usize) -> bool {
    const UNIFIED_DEVICE_TO_HOST: u8 = 12;
    const ASKED_FOR: u8 = 1;
    const EVICTED: u8 = 4;
    match trace.detail_of(op) {
        Some(&OpDetail::Memcpy { copy_kind, cause, .. }) => {
            copy_kind == UNIFIED_DEVICE_TO_HOST && cause != ASKED_FOR && cause != EVICTED
        }
        _ => false,
    }
}

/// Idle time of a device that has one cause.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IdleCause {
    /// Index into the trace's devices.
    pub device: u32,
    /// What kind of cause it is.
    #[serde(serialize_with = "class_text")]
    pub class: Class,
    /// The range or call; `None` where the kind says all that is known.
    pub name: Option<String>,
    /// Index into the trace's threads of the one that did it, where known.
    pub thread: Option<u32>,
    /// How that is known.
    pub evidence: Evidence,
    /// In how many gaps.
    pub gaps: usize,
    /// The idle time.
    pub time_ns: i64,
    /// What of it is in waits of half a millisecond or more.
    pub long_ns: i64,
    /// The number of those waits.
    pub long_waits: usize,
    /// The longest wait.
    pub longest_ns: i64,
    /// What of it lies between the last op of an iteration and the first one of the next.
    pub between_ns: i64,
}

fn class_text<S: serde::Serializer>(class: &Class, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(class.as_str())
}

#[derive(Clone, Copy, Default)]
struct Sum {
    gaps: usize,
    time: i64,
    long: i64,
    long_waits: usize,
    longest: i64,
    between: i64,
    /// The gap that was counted last, and what has been added up in it without a break.
    gap: usize,
    run: i64,
    run_end: i64,
}

impl Sum {
    fn add(&mut self, gap: usize, span: Span, between: bool) {
        let length = span.length();
        if self.gap != gap {
            self.close();
            (self.gap, self.gaps) = (gap, self.gaps + 1);
        } else if self.run_end != span.start {
            self.close();
        }
        self.time = self.time.saturating_add(length);
        self.run = self.run.saturating_add(length);
        self.run_end = span.end;
        if between {
            self.between = self.between.saturating_add(length);
        }
    }

    /// Ends a wait.
    fn close(&mut self) {
        self.longest = self.longest.max(self.run);
        if self.run >= LONG_NS {
            self.long = self.long.saturating_add(self.run);
            self.long_waits += 1;
        }
        self.run = 0;
    }
}

/// How many causes are kept at hand.
const NEAR: usize = 256;

/// The causes of the idle time of every device, per device the largest first. They add up to its idle time.
pub fn idle_causes(context: &Context) -> Vec<IdleCause> {
    let trace = context.trace;
    let mut explainer = Explainer::new(context);
    let mut all = Vec::new();
    for (device, ops) in ops_by_device(trace).iter().enumerate().filter(|(_, ops)| !ops.is_empty()) {
        // Keyed by the name, so that waits in many events of one name are one cause.
        type Key = (Class, StrId, u32, Evidence);
        let mut places: HashMap<Key, usize> = HashMap::new();
        let mut sums: Vec<(Key, Sum)> = Vec::new();
        // Few causes make up most pieces: they are found without hashing.
        let mut near: Vec<Option<(Key, usize)>> = vec![None; NEAR];
        let mut gaps = 0;
        walk(context, ops, |span, piece| {
            let Piece::Gap { before, next } = piece else { return };
            if context.unseen_between(before, next) {
                return;
            }
            gaps += 1;
            let iteration = |op: u32| context.iterations.of_op.get(op as usize).copied().unwrap_or(NONE);
            let (left, right) = (iteration(before), iteration(next));
            let between = left != right && left != NONE && right != NONE;
            explainer.gap(span, next, |span, doing| {
                let key = (doing.class, doing.event.name(trace), doing.thread, doing.evidence);
                let slot = &mut near[(key.1.0 as usize ^ ((key.2 as usize) << 4)) % NEAR];
                let place = match *slot {
                    Some((known, place)) if known == key => place,
                    _ => *places.entry(key).or_insert_with(|| {
                        sums.push((key, Sum::default()));
                        sums.len() - 1
                    }),
                };
                *slot = Some((key, place));
                sums[place].1.add(gaps, span, between);
            });
        });
        all.extend(named(trace, device as u32, sums));
    }
    all
}

/// Joins what differs in numbers only, and names it.
fn named(trace: &Trace, device: u32, sums: Vec<((Class, StrId, u32, Evidence), Sum)>) -> Vec<IdleCause> {
    type Key = (Class, Option<String>, u32, Evidence);
    let mut joined: HashMap<Key, (Sum, StrId)> = HashMap::new();
    for ((class, name, thread, evidence), mut sum) in sums {
        sum.close();
        // The number in the name of a collection is the generation.
        let keeps_numbers = class == Class::garbage_collection();
        let shown = (name != StrId::NONE).then(|| plain(trace.text(name)));
        let shown = shown.map(|name| if keeps_numbers { name.into_owned() } else { folded(&name).into_owned() });
        let (whole, first) = joined.entry((class, shown, thread, evidence)).or_insert((Sum::default(), name));
        if *first != name {
            *first = StrId::NONE; // of several names the folded one is shown
        }
        whole.gaps += sum.gaps;
        whole.time = whole.time.saturating_add(sum.time);
        whole.long = whole.long.saturating_add(sum.long);
        whole.long_waits += sum.long_waits;
        whole.longest = whole.longest.max(sum.longest);
        whole.between = whole.between.saturating_add(sum.between);
    }
    let cause = |((class, shown, thread, evidence), (sum, only)): (Key, (Sum, StrId))| IdleCause {
        device,
        class,
        name: if only == StrId::NONE { shown } else { Some(plain(trace.text(only)).into_owned()) },
        thread: (thread != NONE).then_some(thread),
        evidence,
        gaps: sum.gaps,
        time_ns: sum.time,
        long_ns: sum.long,
        long_waits: sum.long_waits,
        longest_ns: sum.longest,
        between_ns: sum.between,
    };
    let mut causes: Vec<IdleCause> = joined.into_iter().map(cause).collect();
    causes.sort_by(|a, b| {
        let key = |c: &IdleCause| (std::cmp::Reverse(c.time_ns), c.class, c.thread, c.evidence);
        key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name))
    });
    causes
}
