//! Memory in use over time, its peak, and whose it was.

use std::collections::{BTreeMap, HashMap};

use strobe_trace::{Allocation, RangeSource, StrId, Trace, range_flags};

use crate::context::Context;
use crate::launch::device_name;
use crate::sheet::{Column, Report, Sheet, Unit, Value};
use crate::unified;

/// What a series of memory counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryKind {
    /// Everything of a device that the trace knows, whatever its kind and process.
    All,
    /// One of CUPTI's kinds of memory: 1 pinned, 2 device, 4 managed, 5 device static, ...
    Cupti(u8),
    /// What a framework's allocator had handed out.
    Allocator,
    /// What a framework's allocator held.
    Reserved,
}

impl std::fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MemoryKind::All => "all",
            MemoryKind::Cupti(0) => "pageable",
            MemoryKind::Cupti(1) => "pinned",
            MemoryKind::Cupti(2) => "device",
            MemoryKind::Cupti(3) => "array",
            MemoryKind::Cupti(4) => "managed",
            MemoryKind::Cupti(5) => "device static",
            MemoryKind::Cupti(6) => "managed static",
            MemoryKind::Cupti(_) => "kind not recorded",
            MemoryKind::Allocator => "allocated by framework",
            MemoryKind::Reserved => "reserved by framework",
        })
    }
}

/// Memory in use over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemorySeries {
    /// Index of the device; `None` for host memory.
    pub device: Option<u32>,
    /// Index of the process; `None` for the sum over all of a device.
    pub process: Option<u32>,
    /// What it counts.
    pub kind: MemoryKind,
    /// Bytes in use before the first change.
    pub before: i64,
    /// When it changed, each moment once, in order.
    pub times: Vec<i64>,
    /// Bytes in use from that moment on.
    pub bytes: Vec<i64>,
    /// More was given back than was seen to be taken: what was in use before is a lower bound.
    pub lower_bound: bool,
}

impl MemorySeries {
    fn new(device: Option<u32>, process: Option<u32>, kind: MemoryKind, before: i64) -> Self {
        Self { device, process, kind, before, times: Vec::new(), bytes: Vec::new(), lower_bound: false }
    }

    fn now(&self) -> i64 {
        self.bytes.last().copied().unwrap_or(self.before)
    }

    /// Several changes at one moment are one: all that was allocated before a capture bears the same time.
    fn set(&mut self, time: i64, bytes: i64) {
        if self.times.last() == Some(&time) {
            self.bytes.pop();
            self.times.pop();
        }
        self.times.push(time);
        self.bytes.push(bytes);
    }

    /// Lifts the series so that it never falls below nothing.
    fn lift(&mut self) {
        let lowest = self.bytes.iter().copied().min().unwrap_or(0).min(self.before);
        if lowest < 0 {
            self.lower_bound = true;
            self.before = self.before.saturating_sub(lowest);
            self.bytes.iter_mut().for_each(|bytes| *bytes = bytes.saturating_sub(lowest));
        }
    }

    /// The most bytes in use, and since when.
    pub fn peak(&self) -> Option<(i64, i64)> {
        let first_largest = |best: (i64, i64), next: (i64, i64)| if next.0 > best.0 { next } else { best };
        self.bytes.iter().copied().zip(self.times.iter().copied()).reduce(first_largest)
    }

    /// Bytes in use at a moment.
    pub fn at(&self, time: i64) -> i64 {
        let changes = self.times.partition_point(|&t| t <= time);
        changes.checked_sub(1).map_or(self.before, |last| self.bytes[last])
    }
}

/// Memory in use over time: per device, process and kind, and per device in all where it has several of these.
pub fn series(trace: &Trace) -> Vec<MemorySeries> {
    let mut parts: BTreeMap<(Option<u32>, u32, MemoryKind), MemorySeries> = BTreeMap::new();
    let mut sums: BTreeMap<Option<u32>, MemorySeries> = BTreeMap::new();
    for a in &trace.allocations {
        let total = a.total_allocated.map(|total| i64::try_from(total).unwrap_or(i64::MAX));
        let kind = kind_of(a);
        let before = total.map_or(0, |total| total.saturating_sub(a.bytes));
        let sum = sums.entry(a.device).or_insert_with(|| MemorySeries::new(a.device, None, MemoryKind::All, 0));
        let part = parts.entry((a.device, a.process, kind)).or_insert_with(|| {
            sum.before = sum.before.saturating_add(before);
            MemorySeries::new(a.device, Some(a.process), kind, before)
        });
        let after = total.unwrap_or_else(|| part.now().saturating_add(a.bytes));
        let all = sum.now().saturating_add(after.saturating_sub(part.now()));
        part.set(a.time, after);
        sum.set(a.time, all);
        if let Some(reserved) = a.total_reserved {
            let reserved = i64::try_from(reserved).unwrap_or(i64::MAX);
            let key = (a.device, a.process, MemoryKind::Reserved);
            let held = || MemorySeries::new(a.device, Some(a.process), MemoryKind::Reserved, reserved);
            parts.entry(key).or_insert_with(held).set(a.time, reserved);
        }
    }
    let mut in_use: HashMap<Option<u32>, usize> = HashMap::new();
    for (device, _, _) in parts.keys().filter(|key| key.2 != MemoryKind::Reserved) {
        *in_use.entry(*device).or_default() += 1;
    }
    sums.retain(|device, _| in_use.get(device).is_some_and(|&count| count > 1));
    let mut all: Vec<MemorySeries> = parts.into_values().chain(sums.into_values()).collect();
    all.iter_mut().for_each(MemorySeries::lift);
    all.sort_by_key(|s| (s.device.is_none(), s.device, s.process, s.kind));
    all
}

fn kind_of(allocation: &Allocation) -> MemoryKind {
    match allocation.total_allocated {
        Some(_) => MemoryKind::Allocator,
        None => MemoryKind::Cupti(allocation.mem_kind),
    }
}

/// The report `memory`.
pub fn report(context: &Context) -> Report {
    let (name, title) = ("memory", "Memory in use");
    let trace = context.trace;
    let unified = unified::sheets(context);
    if trace.allocations.is_empty() && !unified.is_empty() {
        let report = unified.into_iter().fold(Report::new(name, title), Report::sheet);
        return report.note("The trace has no allocations: only what moved is known.");
    }
    if trace.allocations.is_empty() {
        let why = match trace.meta.is_own() {
            true => "strobe reserves its memory before the run; report.json and report.html list it by pool",
            false => {
                "the trace has no allocations: record them with `nsys profile --cuda-memory-usage=true` or with \
                 profile_memory=True in the PyTorch profiler"
            }
        };
        return Report::absent(name, title, why);
    }
    let series = series(trace);
    let began = trace.extent().map_or(trace.allocations[0].time, |extent| extent.0);
    let mut report = Report::new(name, title)
        .sheet(usage(trace, &series, began))
        .sheet(owners(trace, &series))
        .note("Peak At is the time since the first event of the trace. All rows but `reserved` count memory in use.")
        .note("A caching allocator takes memory in large pieces: what it hands out inside these is seen only in its own trace.");
    report = unified.into_iter().fold(report, Report::sheet);
    let early = trace.allocations.iter().filter(|a| a.time <= began).count();
    if early > 0 {
        report = report.note(format!(
            "{early} of {} changes lie before the first event: they are the state at the start of the capture.",
            trace.allocations.len()
        ));
    }
    if series.iter().any(|s| s.lower_bound) {
        report = report.note("More frees than allocations in the trace: memory in use is a lower bound.");
    }
    report
}

fn usage(trace: &Trace, series: &[MemorySeries], began: i64) -> Sheet {
    let bytes = |name: &str| Column::new(name, Unit::Bytes);
    let columns = [
        Column::new("Device", Unit::Text),
        Column::new("Process", Unit::Id),
        Column::new("Kind", Unit::Text),
        bytes("At Start"),
        bytes("Peak"),
        Column::new("Peak At", Unit::Moment),
        bytes("At End"),
        Column::new("Allocations", Unit::Count),
        Column::new("Frees", Unit::Count),
        bytes("Allocated"),
        bytes("Freed"),
    ];
    #[derive(Clone, Copy, Default)]
    struct Changes {
        taken: usize,
        given: usize,
        taken_bytes: i64,
        given_bytes: i64,
    }
    let mut changes: HashMap<(Option<u32>, Option<u32>, MemoryKind), Changes> = HashMap::new();
    for a in &trace.allocations {
        for key in [(a.device, Some(a.process), kind_of(a)), (a.device, None, MemoryKind::All)] {
            let counted = changes.entry(key).or_default();
            if a.bytes >= 0 {
                counted.taken += 1;
                counted.taken_bytes = counted.taken_bytes.saturating_add(a.bytes);
            } else {
                counted.given += 1;
                counted.given_bytes = counted.given_bytes.saturating_sub(a.bytes);
            }
        }
    }
    let mut sheet = Sheet::new("usage", columns);
    for s in series {
        let peak = s.peak();
        let since_start = |(_, time): (i64, i64)| time.saturating_sub(began).max(0);
        let pid = s.process.and_then(|process| trace.processes.get(process as usize)).map(|p| p.pid);
        let head = [place(trace, s.device).into(), pid.into(), s.kind.to_string().into()];
        let use_of = [s.at(began).into(), peak.map(|p| p.0).into(), peak.map(since_start).into(), s.now().into()];
        // What an allocator reserved is a level, not a list of changes.
        let counted = changes.get(&(s.device, s.process, s.kind));
        let tail = [
            Value::from(counted.map(|c| c.taken)),
            counted.map(|c| c.given).into(),
            counted.map(|c| c.taken_bytes).into(),
            counted.map(|c| c.given_bytes).into(),
        ];
        sheet.push(head.into_iter().chain(use_of).chain(tail));
    }
    sheet
}

fn place(trace: &Trace, device: Option<u32>) -> String {
    device.map_or_else(|| "host".to_owned(), |device| device_name(trace, device))
}

/// Rows of the table of owners; the rest is summed up in one row.
const OWNERS: usize = 20;

/// Who took the memory: by symbol, or by the range and the operator at the time.
fn owners(trace: &Trace, series: &[MemorySeries]) -> Sheet {
    let peaks = peak_times(series);
    let ended = ends(trace);
    let ranges = ranges_at(trace);
    #[derive(Clone, Copy, Default)]
    struct Taken {
        count: usize,
        bytes: i64,
        at_peak: i64,
    }
    let mut owners: HashMap<(Option<u32>, Owner), Taken> = HashMap::new();
    for (index, a) in trace.allocations.iter().enumerate().filter(|(_, a)| a.bytes > 0) {
        let owner = if a.name.is_some() { Owner { symbol: a.name, ..Owner::default() } } else { ranges[index] };
        let taken = owners.entry((a.device, owner)).or_default();
        taken.count += 1;
        taken.bytes = taken.bytes.saturating_add(a.bytes);
        let lives = |peak: i64| a.time <= peak && ended[index].is_none_or(|end| end > peak);
        if peaks.get(&a.device).is_some_and(|&peak| lives(peak)) {
            taken.at_peak = taken.at_peak.saturating_add(a.bytes);
        }
    }
    let mut owners: Vec<_> = owners.into_iter().collect();
    let word = |id: StrId| if id.is_some() { trace.text(id) } else { "" };
    owners.sort_by_key(|&((device, owner), taken)| {
        let words = [owner.symbol, owner.range, owner.operator].map(word);
        (std::cmp::Reverse((taken.at_peak, taken.bytes)), device, words)
    });

    let columns = [
        Column::new("Device", Unit::Text),
        Column::new("In Use At Peak", Unit::Bytes),
        Column::new("Allocated", Unit::Bytes),
        Column::new("Allocations", Unit::Count),
        Column::new("Range Or Symbol", Unit::Text),
        Column::new("Operator", Unit::Text),
    ];
    let title = "Who took the memory: the innermost range and the outermost operator at the time";
    let mut sheet = Sheet::new("owners", columns).title(title);
    let rest = owners.split_off(owners.len().min(OWNERS));
    let text = |id: StrId| if id.is_some() { Value::from(trace.text(id)) } else { Value::Unknown };
    for ((device, owner), taken) in owners {
        let word = if owner.symbol.is_some() { owner.symbol } else { owner.range };
        let head = [place(trace, device).into(), taken.at_peak.into(), taken.bytes.into(), taken.count.into()];
        sheet.push(head.into_iter().chain([text(word), text(owner.operator)]));
    }
    if !rest.is_empty() {
        let sum = |value: fn(&Taken) -> i64| rest.iter().fold(0i64, |sum, (_, t)| sum.saturating_add(value(t)));
        let count: usize = rest.iter().map(|(_, t)| t.count).sum();
        let others = format!("{} others", rest.len());
        let head = [Value::Unknown, sum(|t| t.at_peak).into(), sum(|t| t.bytes).into(), count.into()];
        sheet.push(head.into_iter().chain([others.into(), Value::Unknown]));
    }
    sheet
}

/// When each device (or the host) had most memory in use.
fn peak_times(series: &[MemorySeries]) -> HashMap<Option<u32>, i64> {
    let mut peaks = HashMap::new();
    for s in series.iter().filter(|s| s.kind != MemoryKind::Reserved) {
        // The series of a device in all, which has no process, stands before those of its parts.
        let Some((_, time)) = s.peak() else { continue };
        peaks.entry(s.device).or_insert(time);
    }
    peaks
}

/// Per allocation the time when it was given back, if it was. Rows of one moment have no order: allocations come first,
/// and a free goes to the oldest of its address that has its size, else to the oldest.
fn ends(trace: &Trace) -> Vec<Option<i64>> {
    let mut ends = vec![None; trace.allocations.len()];
    let mut order: Vec<usize> = (0..trace.allocations.len()).collect();
    order.sort_by_key(|&index| (trace.allocations[index].time, trace.allocations[index].bytes <= 0));
    let mut live: HashMap<(u32, Option<u32>, u64), Vec<usize>> = HashMap::new();
    for index in order {
        let a = &trace.allocations[index];
        let at_address = live.entry((a.process, a.device, a.address)).or_default();
        if a.bytes > 0 {
            at_address.push(index);
        } else if !at_address.is_empty() {
            let size = a.bytes.saturating_neg();
            let place = at_address.iter().position(|&taken| trace.allocations[taken].bytes == size).unwrap_or(0);
            ends[at_address.remove(place)] = Some(a.time);
        }
    }
    ends
}

/// Whose an allocation is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Owner {
    symbol: StrId,
    range: StrId,
    operator: StrId,
}

/// A range that is open, and what is known of those around it.
#[derive(Clone, Copy)]
struct OpenRange {
    range: usize,
    /// The innermost range of the program that is it or around it.
    program: Option<usize>,
    /// The outermost operator that is it or around it.
    operator: Option<usize>,
}

/// Per allocation what its process was in at the time: of all its threads, the one whose innermost range began last.
fn ranges_at(trace: &Trace) -> Vec<Owner> {
    let ranges = &trace.ranges;
    let mut threads_of: Vec<Vec<usize>> = vec![Vec::new(); trace.processes.len()];
    for (thread, found) in trace.threads.iter().enumerate() {
        if let Some(threads) = threads_of.get_mut(found.process as usize) {
            threads.push(thread);
        }
    }
    let is_operator = |range: usize| ranges.source[range] == RangeSource::CpuOp;
    let is_program = |range: usize| !is_operator(range) && ranges.source[range] != RangeSource::Python;
    let mut open: Vec<Vec<OpenRange>> = vec![Vec::new(); trace.threads.len()];
    let close = |open: &mut Vec<OpenRange>, before: i64| {
        while open.last().is_some_and(|top| ranges.end[top.range] < before) {
            open.pop();
        }
    };
    let mut next = 0;
    let mut owner_at = |a: &Allocation| {
        while next < ranges.len() && ranges.start[next] <= a.time {
            let span = ranges.source[next] != RangeSource::GpuAnnotation && ranges.flags[next] & range_flags::MARK == 0;
            if let Some(open) = open.get_mut(ranges.thread[next] as usize).filter(|_| span) {
                close(open, ranges.start[next]);
                let below = open.last();
                open.push(OpenRange {
                    range: next,
                    program: if is_program(next) { Some(next) } else { below.and_then(|below| below.program) },
                    operator: below.and_then(|below| below.operator).or(is_operator(next).then_some(next)),
                });
            }
            next += 1;
        }
        let threads = threads_of.get(a.process as usize)?;
        threads.iter().for_each(|&thread| close(&mut open[thread], a.time));
        let busiest =
            threads.iter().copied().max_by_key(|&thread| open[thread].last().map(|top| ranges.start[top.range]))?;
        let stack = &open[busiest];
        let lasts = |range: &usize| ranges.end[*range] >= a.time;
        let inside = || stack.iter().map(|open| open.range).filter(lasts);
        let top = stack.last();
        // Only where ranges cross may those that are known have ended: then the others are looked through.
        let known = |of: fn(&OpenRange) -> Option<usize>| top.map(|top| of(top).map(|range| (range, lasts(&range))));
        let program = match known(|top| top.program) {
            Some(Some((range, true))) => Some(range),
            Some(Some((_, false))) => inside().rev().find(|&range| is_program(range)),
            _ => None,
        };
        let operator = match known(|top| top.operator) {
            Some(Some((range, true))) => Some(range),
            Some(Some((_, false))) => inside().find(|&range| is_operator(range)),
            _ => None,
        };
        let named = |range: Option<usize>| range.map_or(StrId::NONE, |range| ranges.name[range]);
        Some(Owner { symbol: StrId::NONE, range: named(program), operator: named(operator) })
    };
    trace.allocations.iter().map(|a| owner_at(a).unwrap_or_default()).collect()
}
