//! Idle intervals of devices: how long, how many, and why.

use std::collections::BTreeMap;

use strobe_trace::{NONE, OpKind, StrId, Trace};

use crate::context::Context;
use crate::host::{Class, Explainer, Occupant, Occupants, gc_sheet, gil_sheet, plain};
use crate::intervals::Span;
use crate::sheet::{Column, Report, Sheet, Unit, Value};
use crate::timeline::{Causes, Piece, ops_by_device, walk};

pub use crate::timeline::Cause;

/// An interval in which a device ran nothing, between two of its ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// Index into the trace's devices.
    pub device: u32,
    /// When.
    pub span: Span,
    /// The cause that most of it has.
    pub cause: Cause,
    /// The op that ended last before it.
    pub before: u32,
    /// The op that ends it.
    pub next: u32,
}

/// The upper bounds of the histogram's classes in nanoseconds; the last class has none.
const BOUNDS: [i64; 5] = [5_000, 10_000, 50_000, 500_000, 5_000_000];

/// The names of the histogram's classes.
pub const CLASSES: [&str; 6] = ["< 5 µs", "5-10 µs", "10-50 µs", "50-500 µs", "0.5-5 ms", ">= 5 ms"];

/// How many gaps, and how long together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// How many.
    pub count: usize,
    /// Sum of their lengths.
    pub time_ns: i64,
}

impl Amount {
    fn add(&mut self, time: i64) {
        self.count += 1;
        self.time_ns = self.time_ns.saturating_add(time);
    }
}

/// The gaps of one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceGaps {
    /// Index into the trace's devices.
    pub device: u32,
    /// From its first op to the end of its last one, without what lies between two recorded windows.
    pub span_ns: i64,
    /// All gaps.
    pub all: Amount,
    /// Gaps by length, in the order of [`CLASSES`].
    pub histogram: [Amount; 6],
    /// Idle time by cause in the order of [`Cause::ALL`]: a gap with several causes counts in each with its part.
    pub causes: [Amount; Cause::ALL.len()],
    /// The longest gaps, longest first.
    pub longest: Vec<Gap>,
}

/// The gaps of every device that has ops, with at most `longest` of them one by one.
pub fn gaps(context: &Context, longest: usize) -> Vec<DeviceGaps> {
    let causes = Causes::new(context);
    let by_device = ops_by_device(context.trace);
    let used = by_device.iter().enumerate().filter(|(_, ops)| !ops.is_empty());
    used.map(|(device, ops)| {
        let mut found = DeviceGaps { device: device as u32, ..DeviceGaps::default() };
        let mut candidates: Vec<(i64, Span, u32, u32)> = Vec::new();
        walk(context, ops, |span, piece| {
            if let Piece::Gap { before, next } = piece
                && context.unseen_between(before, next)
            {
                return; // between two recorded windows
            }
            found.span_ns = found.span_ns.saturating_add(span.length());
            let Piece::Gap { before, next } = piece else { return };
            let length = span.length();
            found.all.add(length);
            found.histogram[BOUNDS.partition_point(|&bound| bound <= length)].add(length);
            causes.split(span, before, next, |cause, time| found.causes[cause as usize].add(time));
            candidates.push((length, span, before, next));
            if candidates.len() >= 4096.max(4 * longest) {
                keep_longest(&mut candidates, longest);
            }
        });
        keep_longest(&mut candidates, longest);
        candidates.sort_by_key(|&(length, span, ..)| (std::cmp::Reverse(length), span.start));
        let gap = |(_, span, before, next): (i64, Span, u32, u32)| Gap {
            device: device as u32,
            span,
            cause: causes.main_cause(span, before, next),
            before,
            next,
        };
        found.longest = candidates.into_iter().map(gap).collect();
        found
    })
    .collect()
}

fn keep_longest(candidates: &mut Vec<(i64, Span, u32, u32)>, longest: usize) {
    if candidates.len() > longest {
        if longest > 0 {
            candidates
                .select_nth_unstable_by_key(longest - 1, |&(length, span, ..)| (std::cmp::Reverse(length), span.start));
        }
        candidates.truncate(longest);
    }
}

/// Idle time of one stream between its ops, by whether the next op had been called when the one before it ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamIdle {
    /// The next op was called only after the one before it had ended.
    pub host_late_ns: i64,
    /// It had been called before, and the gap is shorter than [`SHORT_WAIT_NS`].
    pub short_wait_ns: i64,
    /// It had been called before, and the gap is longer: it waited for something else.
    pub long_wait_ns: i64,
    /// The call of the next op was not recorded.
    pub unknown_ns: i64,
}

/// Below this a gap between two queued ops is what devices need between ops.
pub const SHORT_WAIT_NS: i64 = 30_000;

/// The idle time of every stream, by device and stream.
pub fn stream_idle(context: &Context) -> BTreeMap<(u32, u32), StreamIdle> {
    let trace = context.trace;
    let mut ended: BTreeMap<(u32, u32), (i64, u32)> = BTreeMap::new();
    let mut idle: BTreeMap<(u32, u32), StreamIdle> = BTreeMap::new();
    for op in 0..trace.ops.len() {
        let stream = (trace.ops.device[op], trace.ops.stream[op]);
        let (start, end) = (trace.ops.start[op], trace.ops.end[op]);
        let Some((before, last)) = ended.insert(stream, (end, op as u32)) else { continue };
        let gap = start.saturating_sub(before);
        // Ops of one stream may overlap a little: that is no idle time, and the later end counts.
        if before > end {
            ended.insert(stream, (before, last));
        }
        if gap <= 0 || context.unseen_between(last, op as u32) {
            continue;
        }
        let idle = idle.entry(stream).or_default();
        let slot = match trace.launch_of(op) {
            None => &mut idle.unknown_ns,
            Some(call) if call.start > before => &mut idle.host_late_ns,
            Some(_) if gap < SHORT_WAIT_NS => &mut idle.short_wait_ns,
            Some(_) => &mut idle.long_wait_ns,
        };
        *slot = slot.saturating_add(gap);
    }
    idle
}

/// How many gaps the report lists.
const GAPS_SHOWN: usize = 25;

/// The gaps of every device by cause and length, and the longest of them.
pub fn report(context: &Context) -> Report {
    const TITLE: &str = "Gaps: when a device ran nothing";
    let trace = context.trace;
    if trace.ops.is_empty() {
        return Report::absent("gaps", TITLE, "the trace has no device ops");
    }
    if trace.ops.kind.contains(&OpKind::CpuOp) {
        return Report::absent("gaps", TITLE, "the engine computes on the CPU; its idle time is in the budget");
    }
    let all = gaps(context, GAPS_SHOWN);
    let by_length = |names: [&str; 3]| {
        [
            Column::new("device", Unit::Id),
            Column::new(names[0], Unit::Text),
            Column::new(names[1], Unit::Count),
            Column::new("time", Unit::Ns),
            Column::new(names[2], Unit::Share),
        ]
    };
    let mut causes = Sheet::new("causes", by_length(["cause", "gaps", "share of idle"])).title("Idle time by cause");
    let mut histogram = Sheet::new("lengths", by_length(["length", "gaps", "share of idle"])).title("Gaps by length");
    for device in &all {
        let ordinal = ordinal(context, device.device);
        let idle = device.all.time_ns;
        let share = |ns: i64| if idle > 0 { Value::from(ns as f64 / idle as f64) } else { Value::Unknown };
        let mut by_cause: Vec<(Cause, Amount)> = Cause::ALL.into_iter().zip(device.causes).collect();
        by_cause.sort_by_key(|(_, amount)| std::cmp::Reverse(amount.time_ns));
        for (cause, amount) in by_cause.into_iter().filter(|(_, amount)| amount.count > 0) {
            let (count, time) = (amount.count, amount.time_ns);
            causes.push([ordinal.into(), cause.to_string().into(), count.into(), time.into(), share(time)]);
        }
        for (class, amount) in CLASSES.into_iter().zip(device.histogram) {
            let (count, time) = (amount.count, amount.time_ns);
            histogram.push([ordinal.into(), class.into(), count.into(), time.into(), share(time)]);
        }
    }
    let mut report = Report::new("gaps", TITLE).sheet(longest_sheet(context, &all));
    report = report.sheet(host_sheet(context, &all)).sheet(causes).sheet(histogram);
    report = report.sheet(streams_sheet(context));
    for sheet in [cpu_sheet(context), gil_sheet(context), gc_sheet(context)].into_iter().flatten() {
        report = report.sheet(sheet);
    }
    for device in &all {
        let share = 100.0 * device.all.time_ns as f64 / device.span_ns.max(1) as f64;
        report = report.note(format!(
            "Device {}: {} gaps make up {share:.1} % of its recorded time, from its first op to the end of its last one.",
            ordinal(context, device.device),
            device.all.count
        ));
    }
    report.note("A gap with several causes counts in each with its part; the list names the largest.")
}

/// Every cause of idle time by name and thread. The times of a device add up to its idle time.
fn host_sheet(context: &Context, all: &[DeviceGaps]) -> Sheet {
    let columns = [
        Column::new("device", Unit::Id),
        Column::new("cause", Unit::Text),
        Column::new("thread", Unit::Text),
        Column::new("gaps", Unit::Count),
        Column::new("time", Unit::Ns),
        Column::new("share of idle", Unit::Share),
        Column::new("longest", Unit::Ns),
        Column::new("evidence", Unit::Text),
        Column::new("range or call", Unit::Text),
    ];
    let mut sheet = Sheet::new("host", columns).title("Idle time by what the host did");
    for cause in context.idle_causes() {
        let idle = all.iter().find(|gaps| gaps.device == cause.device).map_or(0, |gaps| gaps.all.time_ns);
        let share = (idle > 0).then(|| cause.time_ns as f64 / idle as f64);
        sheet.push([
            ordinal(context, cause.device).into(),
            cause.class.as_str().into(),
            cause.thread.map(|thread| thread_text(context.trace, thread)).into(),
            cause.gaps.into(),
            cause.time_ns.into(),
            share.into(),
            cause.longest_ns.into(),
            cause.evidence.as_str().into(),
            match (&cause.name, cause.class) {
                (Some(name), _) => name.as_str().into(),
                (None, Class::UNKNOWN | Class::BETWEEN_CALLS | Class::HOST_CODE) => "(nothing recorded)".into(),
                (None, _) => Value::Unknown,
            },
        ]);
    }
    sheet
}

/// Who had the CPU of a launching thread while a device waited for it; `None` where it always had one, or no switches of
/// threads were recorded.
fn cpu_sheet(context: &Context) -> Option<Sheet> {
    let trace = context.trace;
    if trace.on_cpu.is_empty() {
        return None;
    }
    let occupants = Occupants::of(trace);
    let mut explainer = Explainer::new(context);
    let mut sums: BTreeMap<(u32, Class, Occupant), Amount> = BTreeMap::new();
    for ops in &ops_by_device(trace) {
        walk(context, ops, |span, piece| {
            let Piece::Gap { before, next } = piece else { return };
            if context.unseen_between(before, next) {
                return;
            }
            explainer.gap(span, next, |span, doing| {
                if doing.class == Class::WAITS_FOR_CPU || doing.class == Class::SWITCHED_OUT {
                    occupants.instead(trace, doing.thread, span, |who, ns| {
                        sums.entry((doing.thread, doing.class, who)).or_default().add(ns);
                    });
                }
            });
        });
    }
    let columns = [
        Column::new("launching thread", Unit::Text),
        Column::new("it", Unit::Text),
        Column::new("its CPU had", Unit::Text),
        Column::new("times", Unit::Count),
        Column::new("time", Unit::Ns),
    ];
    let mut sheet = Sheet::new("cpu", columns).title("Idle time in which the launching thread had no CPU");
    let mut rows: Vec<_> = sums.into_iter().collect();
    rows.sort_by_key(|(key, amount)| (std::cmp::Reverse(amount.time_ns), *key));
    for ((thread, class, who), Amount { count, time_ns }) in rows {
        let who = match who {
            Occupant::Thread(other) => thread_text(trace, other),
            Occupant::Other => "another program".to_owned(),
            Occupant::Nobody => "nobody that was recorded".to_owned(),
        };
        let words = [thread_text(trace, thread), class.as_str().to_owned(), who].map(Value::from);
        sheet.push(words.into_iter().chain([count.into(), time_ns.into()]));
    }
    (!sheet.rows.is_empty()).then_some(sheet)
}

/// A thread as tables name it: its number, its name where it has one, and its process where there are several.
pub(crate) fn thread_text(trace: &Trace, thread: u32) -> String {
    let Some(found) = trace.threads.get(thread as usize) else { return String::new() };
    let tid = found.tid.to_string();
    let mut text = match found.name.as_str() {
        "" => tid,
        name if name.contains(&tid) => name.to_owned(),
        name => format!("{tid} {name}"),
    };
    if let Some(process) = trace.processes.get(found.process as usize).filter(|_| trace.processes.len() > 1) {
        text = match process.rank {
            Some(rank) => format!("{text} (rank {rank})"),
            None => format!("{text} (process {})", process.pid),
        };
    }
    text
}

fn ordinal(context: &Context, device: u32) -> u32 {
    context.trace.devices.get(device as usize).map_or(device, |d| d.ordinal)
}

fn longest_sheet(context: &Context, all: &[DeviceGaps]) -> Sheet {
    let trace = context.trace;
    let columns = [
        Column::new("device", Unit::Id),
        Column::new("start", Unit::Moment),
        Column::new("length", Unit::Ns),
        Column::new("cause", Unit::Text),
        Column::new("host did", Unit::Text),
        Column::new("launched in", Unit::Text),
        Column::new("iteration", Unit::Id),
        Column::new("next op", Unit::Text),
    ];
    let mut sheet = Sheet::new("gaps", columns).title("Longest gaps");
    let mut longest: Vec<Gap> = all.iter().flat_map(|d| d.longest.iter().copied()).collect();
    longest.sort_by_key(|g| (std::cmp::Reverse(g.span.length()), g.span.start, g.device));
    longest.truncate(GAPS_SHOWN);
    let attribution = context.attribution();
    let mut explainer = Explainer::new(context);
    for gap in longest {
        let most = explainer.most(gap.span, gap.next);
        let did = most.map(|doing| match doing.event.name(trace) {
            StrId::NONE => doing.class.as_str().to_owned(),
            name => plain(trace.text(name)).into_owned(),
        });
        let launch = trace.ops.launch[gap.next as usize] as usize;
        let around = attribution.of_call.get(launch).copied().unwrap_or(NONE);
        let range = attribution.outward(around).next();
        let iteration = context.iterations.list.get(context.iterations.of_op[gap.next as usize] as usize);
        sheet.push([
            ordinal(context, gap.device).into(),
            gap.span.start.into(),
            gap.span.length().into(),
            gap.cause.to_string().into(),
            did.into(),
            range.map(|range| trace.text(trace.ranges.name[range])).map(str::to_owned).into(),
            iteration.map(|i| i.number).into(),
            trace.op_name(gap.next as usize).into(),
        ]);
    }
    sheet
}

fn streams_sheet(context: &Context) -> Sheet {
    let columns = [
        Column::new("device", Unit::Id),
        Column::new("stream", Unit::Id),
        Column::new("host late", Unit::Ns),
        Column::new("queued, gap below 30 µs", Unit::Ns),
        Column::new("queued, longer gap", Unit::Ns),
        Column::new("launch unknown", Unit::Ns),
    ];
    let mut sheet = Sheet::new("streams", columns).title("Idle time between the ops of a stream");
    for ((device, stream), idle) in stream_idle(context) {
        let figures = [idle.host_late_ns, idle.short_wait_ns, idle.long_wait_ns, idle.unknown_ns].map(Value::from);
        let head: [Value; 2] = [ordinal(context, device).into(), stream.into()];
        sheet.push(head.into_iter().chain(figures));
    }
    sheet
}
