//! The iteration budget: where the wall time of each iteration went.
//!
//! **On a GPU** the time that is split is the device's: from the first op of an iteration on a device to the first op of
//! the next iteration there, and for the last one to the end of its own last op. The host runs ahead of the device, so
//! that the host's own marker may hold hardly any of the work it launches; the device's time has no holes, and iterations
//! tile it. Every moment belongs to one part: the category of the compute op that runs, else communication, else a copy
//! or fill (these two are *exposed*: nothing computes meanwhile), else a cause of idleness (see [`Cause`]).
//!
//! **In an engine that computes on the CPU** it is the recorded wall time of the iteration. A moment goes to the category
//! of the op running, else to the host phase that is open, else to [`Part::Idle`] inside the forward step, else to
//! [`Part::Unknown`]; of several ops (or phases) at once the one that started last counts.
//!
//! **Waiting for a CPU** is a part of its own where the trace says how long one of the iteration's threads waited
//! ([`strobe_trace::Iteration::cpu_wait`]). It is not known in which op that was, so an engine on the CPU has it taken from
//! all other parts, each by its share. A kernel on a GPU does not wait for the host's CPU: there it is taken from the time in
//! which the device waited for the host, and from no more than that.
//!
//! Parts always add up to the wall time exactly.

use std::collections::{BTreeMap, BinaryHeap, HashMap};

use serde::{Serialize, Serializer};
use strobe_trace::{IterationKind, NONE, OpKind, RangeKind};

use crate::categories::Class;
use crate::context::Context;
use crate::host_compute::{self, is_host_only};
use crate::intervals::{Span, SpanSet};
use crate::iterations::Method;
use crate::sheet::{Column, Report, Role, Sheet, Unit, Value};
use crate::timeline::{Cause, Causes, Piece, ops_by_device, walk};
use strobe_stats::Summary;

/// Something an iteration spends its time on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Choosing what runs.
    Schedule,
    /// Making the step's inputs.
    Prepare,
    /// Running ops of this category.
    Category(String),
    /// Communication while nothing computes.
    ExposedCommunication,
    /// Copies and fills while nothing computes or communicates.
    ExposedCopies,
    /// Turning logits into tokens, outside of ops.
    Sample,
    /// Handing results back.
    Respond,
    /// A device waits for an op that is on its way: its launch call runs or has just returned.
    LaunchBound,
    /// A device waits although the next op was called before: the time it needs between two ops, or an event.
    Queued,
    /// A device waits for an op that the host has not called yet.
    HostBound,
    /// The same between the last op of an iteration and the first one of the next.
    BetweenIterations,
    /// A device waits while the host is inside a call that waits for the device.
    SyncWait,
    /// A device waits while the launching thread waits for Python's global interpreter lock.
    Gil,
    /// A device waits while the launching thread collects garbage.
    Gc,
    /// Inside the forward step of a CPU engine while no op runs: op dispatch, barriers.
    Idle,
    /// A thread of the engine was ready to run and waited for a CPU.
    CpuWait,
    /// Covered by nothing that was recorded.
    Unknown,
}

impl Part {
    /// Whether it is time in which a device does nothing.
    pub fn is_idle(&self) -> bool {
        match self {
            Part::LaunchBound | Part::Queued | Part::HostBound | Part::BetweenIterations | Part::SyncWait => true,
            Part::Gil | Part::Gc | Part::Idle | Part::CpuWait | Part::Unknown => true,
            Part::Schedule | Part::Prepare | Part::Sample | Part::Respond => false,
            Part::Category(_) | Part::ExposedCommunication | Part::ExposedCopies => false,
        }
    }

    /// Whether a device waits for the host in it.
    fn is_late_host(&self) -> bool {
        matches!(self, Part::HostBound | Part::BetweenIterations | Part::LaunchBound | Part::Unknown)
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Part::Schedule => "schedule",
            Part::Prepare => "prepare",
            Part::Category(name) => name,
            Part::ExposedCommunication => "exposed communication",
            Part::ExposedCopies => "exposed memory copies",
            Part::Sample => "sample",
            Part::Respond => "respond",
            Part::LaunchBound => "launch-bound idle",
            Part::Queued => "queued idle",
            Part::HostBound => "host-bound idle",
            Part::BetweenIterations => "between iterations",
            Part::SyncWait => "sync wait",
            Part::Gil => "waiting for the GIL",
            Part::Gc => "garbage collection",
            Part::Idle => "idle",
            Part::CpuWait => "waited for a CPU",
            Part::Unknown => "unknown",
        })
    }
}

impl Serialize for Part {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl From<Cause> for Part {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Launch => Part::LaunchBound,
            Cause::Queued => Part::Queued,
            Cause::HostLate => Part::HostBound,
            Cause::BetweenIterations => Part::BetweenIterations,
            Cause::Sync | Cause::Copy => Part::SyncWait,
            Cause::Gil => Part::Gil,
            Cause::Gc => Part::Gc,
            Cause::Unknown => Part::Unknown,
        }
    }
}

/// One iteration's wall time on one device, split.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IterationBudget {
    /// The iteration, as an index into [`crate::iterations::Detected::list`].
    pub iteration: usize,
    /// Its number in the trace.
    pub iter: u64,
    /// What it worked on, where known.
    pub kind: Option<IterationKind>,
    /// Index into the trace's devices.
    pub device: u32,
    /// The time that is split.
    #[serde(skip)]
    pub window: Span,
    /// Its length.
    pub wall_ns: i64,
    /// Its parts, each positive and named once, in the order of [`Part`]. They add up to `wall_ns` exactly.
    pub parts: Vec<(Part, i64)>,
}

/// The time of a device from its first op to the end of its last one, without what lies between two recorded windows, split.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceBudget {
    /// Index into the trace's devices.
    pub device: u32,
    /// From the first op to the end of the last one.
    #[serde(skip)]
    pub window: Span,
    /// Its length, without what lies between two recorded windows.
    pub wall_ns: i64,
    /// Its parts, as in [`IterationBudget::parts`].
    pub parts: Vec<(Part, i64)>,
}

/// The budget of every iteration on every device it used, in order of time per device. Empty without iterations.
pub fn budgets(context: &Context) -> Vec<IterationBudget> {
    if context.iterations.list.is_empty() {
        return Vec::new();
    }
    if is_host_only(context.trace) {
        return host_compute::budgets(context);
    }
    if computes_on_cpu(context) {
        return cpu_budgets(context);
    }
    let causes = Causes::new(context);
    let by_device = ops_by_device(context.trace);
    let each = by_device.iter().enumerate().flat_map(|(device, ops)| {
        let windows = windows(context, ops);
        let spans: Vec<Span> = windows.iter().map(|w| w.1).collect();
        let parts = split(context, &causes, ops, &spans);
        windows.into_iter().zip(parts).map(move |((iteration, window), parts)| (device, iteration, window, parts))
    });
    let waits = CpuWaits::of(context);
    each.map(|(device, iteration, window, parts)| {
        let found = &context.iterations.list[iteration];
        let parts = waits.set_apart(found.number, parts, Part::is_late_host);
        IterationBudget {
            iteration,
            iter: found.number,
            kind: found.kind,
            device: device as u32,
            window,
            wall_ns: window.length(),
            parts,
        }
    })
    .collect()
}

/// How long threads of recorded iterations waited for a CPU.
struct CpuWaits(HashMap<u64, i64>);

impl CpuWaits {
    fn of(context: &Context) -> Self {
        if context.iterations.method != Some(Method::Recorded) {
            return Self(HashMap::new());
        }
        let waits = context.trace.iterations.iter().filter_map(|it| Some((it.iter, it.cpu_wait?)));
        Self(waits.filter(|(_, wait)| *wait > 0).collect())
    }

    /// Takes the wait of an iteration from those parts that may hold it, each by its share, and makes a part of it.
    fn set_apart(&self, number: u64, parts: Vec<(Part, i64)>, holds: impl Fn(&Part) -> bool) -> Vec<(Part, i64)> {
        let total = parts.iter().filter(|(part, _)| holds(part)).fold(0i64, |sum, (_, ns)| sum.saturating_add(*ns));
        let wait = self.0.get(&number).map_or(0, |wait| total.min(*wait));
        if wait <= 0 {
            return parts;
        }
        // Rounding by running sums: each part loses its share to the nanosecond, and all together exactly the wait.
        let (mut before, mut taken) = (0i128, 0i128);
        let mut left: Vec<(Part, i64)> = Vec::with_capacity(parts.len() + 1);
        for (part, ns) in parts {
            let mut rest = ns;
            if holds(&part) {
                before += i128::from(ns);
                let due = before * i128::from(wait) / i128::from(total);
                rest -= (due - taken) as i64;
                taken = due;
            }
            if rest > 0 {
                left.push((part, rest));
            }
        }
        left.push((Part::CpuWait, wait));
        left.sort_by(|a, b| a.0.cmp(&b.0));
        left
    }
}

/// Whether the ops are those of an engine on the CPU, which records its iterations (and may have recorded no op in them).
fn computes_on_cpu(context: &Context) -> bool {
    let trace = context.trace;
    trace.ops.kind.contains(&OpKind::CpuOp) || (trace.ops.is_empty() && !trace.iterations.is_empty())
}

/// The whole time of every device that has ops, split. In an engine on the CPU only ops and idleness are told apart.
pub fn device_budgets(context: &Context) -> Vec<DeviceBudget> {
    let causes = Causes::new(context);
    let by_device = ops_by_device(context.trace);
    let each = by_device.iter().enumerate().filter_map(|(device, ops)| {
        let start = context.trace.ops.start[*ops.first()? as usize];
        let end = ops.iter().map(|&op| context.trace.ops.end[op as usize]).max()?;
        let window = Span::new(start, end);
        let seen = SpanSet::union_of([window]).subtract(context.unseen_on(device as u32));
        let mut parts: BTreeMap<Part, i64> = BTreeMap::new();
        for (part, ns) in split(context, &causes, ops, seen.spans()).into_iter().flatten() {
            *parts.entry(part).or_default() += ns;
        }
        let parts = parts.into_iter().collect();
        Some(DeviceBudget { device: device as u32, window, wall_ns: seen.length(), parts })
    });
    each.collect()
}

/// The iterations of a device with the time that is theirs: from first op to first op.
fn windows(context: &Context, ops: &[u32]) -> Vec<(usize, Span)> {
    let columns = &context.trace.ops;
    let mut extents: BTreeMap<u32, Span> = BTreeMap::new();
    let mut last = (NONE, Span { start: 0, end: 0 });
    for &op in ops {
        let iteration = context.iterations.of_op[op as usize];
        if iteration == NONE {
            continue;
        }
        let (start, end) = (columns.start[op as usize], columns.end[op as usize]);
        // Ops of one iteration stand together as a rule.
        if last.0 != iteration {
            if last.0 != NONE {
                extents.insert(last.0, last.1);
            }
            last = (iteration, extents.get(&iteration).copied().unwrap_or(Span { start, end }));
        }
        last.1.end = last.1.end.max(end);
    }
    if last.0 != NONE {
        extents.insert(last.0, last.1);
    }
    let mut windows: Vec<(usize, Span)> = extents.into_iter().map(|(i, span)| (i as usize, span)).collect();
    windows.sort_by_key(|&(iteration, span)| (span.start, iteration));
    // Between two recorded windows the device worked unseen: that time is nobody's.
    let recorded = context.iterations.method == Some(Method::Recorded);
    let number = |place: usize| context.iterations.list[place].number;
    for index in 1..windows.len() {
        let (before, next) = (windows[index - 1].0, windows[index].0);
        if !recorded || number(next) <= number(before) + 1 {
            windows[index - 1].1.end = windows[index].1.start;
        }
    }
    windows
}

/// Splits disjoint windows, given in order, of a device's time.
fn split(context: &Context, causes: &Causes, ops: &[u32], windows: &[Span]) -> Vec<Vec<(Part, i64)>> {
    // Categories have small numbers; exposed communication, copies and the causes follow them.
    let categories = context.categories.list.len();
    let (communication, copies, first_cause) = (categories, categories + 1, categories + 2);
    let mut sums: Vec<Vec<i64>> = vec![vec![0; first_cause + Cause::ALL.len()]; windows.len()];
    let mut place = 0;
    walk(context, ops, |span, piece| {
        while windows.get(place).is_some_and(|w| w.end <= span.start) {
            place += 1;
        }
        let touched = windows[place..].iter().zip(&mut sums[place..]).take_while(|(w, _)| w.start < span.end);
        for (window, sums) in touched {
            let Some(inside) = window.overlap(span) else { continue };
            match piece {
                Piece::Op(op) => {
                    let category = context.categories.of_op[op as usize] as usize;
                    let slot = match context.categories.list[category].class {
                        Class::Compute => category,
                        Class::Communication => communication,
                        Class::Memory => copies,
                    };
                    sums[slot] = sums[slot].saturating_add(inside.length());
                }
                Piece::Gap { before, next } => {
                    causes.split(inside, before, next, |cause, time| {
                        let slot = first_cause + cause as usize;
                        sums[slot] = sums[slot].saturating_add(time);
                    });
                }
            }
        }
    });
    let part = |slot: usize| match slot {
        _ if slot < categories => Part::Category(context.categories.list[slot].name.clone()),
        _ if slot == communication => Part::ExposedCommunication,
        _ if slot == copies => Part::ExposedCopies,
        _ => Cause::ALL[slot - first_cause].into(),
    };
    sums.into_iter()
        .map(|sums| {
            let mut parts: BTreeMap<Part, i64> = BTreeMap::new();
            for (slot, time) in sums.into_iter().enumerate().filter(|&(_, time)| time > 0) {
                *parts.entry(part(slot)).or_default() += time;
            }
            parts.into_iter().collect()
        })
        .collect()
}

/// A span of an iteration that something claims. The greatest open claim owns a moment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Claim {
    /// Idle 0, host phase 1, op 2.
    pub(crate) rank: u8,
    pub(crate) start: i64,
    /// Of equal starts the shorter one is the inner one.
    pub(crate) end: std::cmp::Reverse<i64>,
    pub(crate) owner: Owner,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    Idle,
    Host(RangeKind),
    Op(u16),
}

fn cpu_budgets(context: &Context) -> Vec<IterationBudget> {
    let (trace, list) = (context.trace, &context.iterations.list);
    let mut claims: Vec<Vec<Claim>> = vec![Vec::new(); list.len()];
    let mut devices = vec![0u32; list.len()];
    let mut add = |index: usize, rank: u8, start: i64, end: i64, owner: Owner| {
        let (start, end) = (start.max(list[index].host.start), end.min(list[index].host.end));
        if start < end {
            claims[index].push(Claim { rank, start, end: std::cmp::Reverse(end), owner });
        }
    };
    for op in 0..trace.ops.len() {
        let iteration = context.iterations.of_op[op] as usize;
        if iteration < list.len() {
            devices[iteration] = trace.ops.device[op];
            add(iteration, 2, trace.ops.start[op], trace.ops.end[op], Owner::Op(context.categories.of_op[op]));
        }
    }
    let mut by_number: HashMap<u64, Vec<usize>> = HashMap::new();
    list.iter().enumerate().for_each(|(index, found)| by_number.entry(found.number).or_default().push(index));
    let in_time = InTime::new(list.iter().map(|found| found.host));
    for range in 0..trace.ranges.len() {
        let (rank, owner) = match trace.ranges.kind[range] {
            kind @ (RangeKind::Schedule | RangeKind::Prepare | RangeKind::Sample | RangeKind::Respond) => {
                (1, Owner::Host(kind))
            }
            RangeKind::ForwardStep | RangeKind::Layer => (0, Owner::Idle),
            RangeKind::Other => continue,
        };
        let (start, end) = (trace.ranges.start[range], trace.ranges.end[range]);
        match trace.ranges.iteration[range] {
            NONE => in_time.overlapping(start, end).for_each(|index| add(index, rank, start, end, owner)),
            number => {
                let numbered = by_number.get(&u64::from(number)).into_iter().flatten();
                numbered.for_each(|&index| add(index, rank, start, end, owner));
            }
        }
    }
    let part = |owner: Option<Owner>| match owner {
        None => Part::Unknown,
        Some(Owner::Idle) => Part::Idle,
        Some(Owner::Host(RangeKind::Schedule)) => Part::Schedule,
        Some(Owner::Host(RangeKind::Prepare)) => Part::Prepare,
        Some(Owner::Host(RangeKind::Sample)) => Part::Sample,
        Some(Owner::Host(RangeKind::Respond)) => Part::Respond,
        Some(Owner::Host(RangeKind::ForwardStep | RangeKind::Layer | RangeKind::Other)) => Part::Idle,
        Some(Owner::Op(category)) => Part::Category(context.categories.list[category as usize].name.clone()),
    };
    let waits = CpuWaits::of(context);
    let each = claims.into_iter().zip(list).zip(devices).enumerate();
    each.map(|(iteration, ((claims, found), device))| {
        let mut parts: BTreeMap<Part, i64> = BTreeMap::new();
        for (owner, time) in sweep(claims, found.host) {
            *parts.entry(part(owner)).or_default() += time;
        }
        IterationBudget {
            iteration,
            iter: found.number,
            kind: found.kind,
            device,
            window: found.host,
            wall_ns: found.host.length(),
            parts: waits.set_apart(found.number, parts.into_iter().collect(), |_| true),
        }
    })
    .collect()
}

/// Finds the iterations that a span of time touches.
pub(crate) struct InTime {
    /// Start and index, by start.
    starts: Vec<(i64, usize)>,
    /// For each place in `starts` the latest end up to there.
    latest_end: Vec<i64>,
}

impl InTime {
    pub(crate) fn new(spans: impl Iterator<Item = Span> + Clone) -> Self {
        let mut starts: Vec<(i64, usize, i64)> = spans.enumerate().map(|(i, s)| (s.start, i, s.end)).collect();
        starts.sort_unstable();
        let ends = starts.iter().scan(i64::MIN, |latest, &(_, _, end)| {
            *latest = (*latest).max(end);
            Some(*latest)
        });
        let latest_end = ends.collect();
        Self { starts: starts.into_iter().map(|(start, index, _)| (start, index)).collect(), latest_end }
    }

    /// Those that begin before `end`, back to where all have ended by `start`. Some may not touch the span.
    pub(crate) fn overlapping(&self, start: i64, end: i64) -> impl Iterator<Item = usize> + '_ {
        let first_after = self.starts.partition_point(|&(begin, _)| begin < end);
        (0..first_after).rev().take_while(move |&p| self.latest_end[p] > start).map(|p| self.starts[p].1)
    }
}

/// Walks from one boundary to the next; the greatest claim that is open owns what lies between.
pub(crate) fn sweep(mut claims: Vec<Claim>, window: Span) -> Vec<(Option<Owner>, i64)> {
    // Spans too long for an i64 of nanoseconds end where their length does.
    let end = window.start.saturating_add(window.length());
    let mut boundaries: Vec<i64> = claims.iter().flat_map(|c| [c.start, c.end.0.min(end)]).collect();
    boundaries.extend([window.start, end]);
    boundaries.sort_unstable();
    boundaries.dedup();
    claims.sort_by_key(|c| c.start);
    let mut upcoming = claims.into_iter().peekable();
    let mut open: BinaryHeap<Claim> = BinaryHeap::new();
    let mut owned = Vec::new();
    for between in boundaries.windows(2) {
        let &[from, to] = between else { continue };
        while let Some(claim) = upcoming.next_if(|c| c.start <= from) {
            open.push(claim);
        }
        while open.peek().is_some_and(|c| c.end.0 <= from) {
            open.pop();
        }
        owned.push((open.peek().map(|c| c.owner), to - from));
    }
    owned
}

/// The budget of all iterations of one kind.
///
/// The **means** add up to the mean wall time and are the column to show as a split; medians do not add up and say what
/// a typical iteration spends on that part alone.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KindBudget {
    /// The kind; `None` for iterations whose kind is not known.
    pub kind: Option<IterationKind>,
    /// How many iterations (each counted once per device it ran on).
    pub iterations: usize,
    /// Their wall times.
    pub wall_ns: Summary,
    /// Every part that occurs in any of them, in the order of [`IterationBudget::parts`].
    pub parts: Vec<PartSummary>,
}

/// One part over all iterations of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartSummary {
    /// The part.
    pub part: Part,
    /// Median over the iterations; one without the part counts as 0.
    pub median_ns: f64,
    /// A quarter of the iterations spend less.
    pub p25_ns: f64,
    /// A quarter of the iterations spend more.
    pub p75_ns: f64,
    /// Mean over the iterations. The means of all parts add up to the mean wall time.
    pub mean_ns: f64,
    /// Sum of the part over sum of wall times. The shares of all parts add up to 1.
    pub share_of_wall: f64,
}

/// The budgets of each kind that occurs: prefill, mixed, decode, then those of unknown kind.
pub fn budget_by_kind(budgets: &[IterationBudget]) -> Vec<KindBudget> {
    let kinds = IterationKind::ALL.into_iter().map(Some).chain([None]);
    kinds.filter_map(|kind| kind_budget(kind, budgets)).collect()
}

fn kind_budget(kind: Option<IterationKind>, budgets: &[IterationBudget]) -> Option<KindBudget> {
    let of_kind: Vec<&IterationBudget> = budgets.iter().filter(|b| b.kind == kind).collect();
    let wall_ns = Summary::of(of_kind.iter().map(|b| b.wall_ns as f64))?;
    let total: f64 = of_kind.iter().map(|b| b.wall_ns as f64).sum();
    let mut times: BTreeMap<&Part, Vec<f64>> = BTreeMap::new();
    for (part, ns) in of_kind.iter().flat_map(|b| &b.parts) {
        times.entry(part).or_default().push(*ns as f64);
    }
    let parts = times.into_iter().filter_map(|(part, mut values)| {
        let sum: f64 = values.iter().sum();
        values.resize(of_kind.len(), 0.0);
        let spread = Summary::of(values)?;
        Some(PartSummary {
            part: part.clone(),
            median_ns: spread.median,
            p25_ns: spread.p25,
            p75_ns: spread.p75,
            mean_ns: spread.mean,
            share_of_wall: sum / total,
        })
    });
    let parts = parts.collect();
    Some(KindBudget { kind, iterations: of_kind.len(), wall_ns, parts })
}

/// How many of the worst iterations are named.
const WORST_SHOWN: usize = 5;

/// An iteration that took longer than its kind does.
#[derive(Clone, Debug, PartialEq)]
pub struct Worst {
    /// The index of its budget.
    pub budget: usize,
    /// How much longer than the median of its kind.
    pub excess_ns: f64,
    /// The part that is most beyond its own median, and by how much.
    pub most: Option<(Part, f64)>,
}

/// The iterations that are furthest beyond the median wall time of their kind, worst first.
pub fn worst(budgets: &[IterationBudget], kinds: &[KindBudget]) -> Vec<Worst> {
    let mut all: Vec<Worst> = Vec::new();
    for (index, budget) in budgets.iter().enumerate() {
        let Some(kind) = kinds.iter().find(|k| k.kind == budget.kind) else { continue };
        let excess_ns = budget.wall_ns as f64 - kind.wall_ns.median;
        if excess_ns <= 0.0 {
            continue;
        }
        let beyond = budget.parts.iter().filter_map(|(part, ns)| {
            let usual = kind.parts.iter().find(|p| p.part == *part)?.median_ns;
            Some((part.clone(), *ns as f64 - usual))
        });
        let most = beyond.max_by(|a, b| a.1.total_cmp(&b.1));
        all.push(Worst { budget: index, excess_ns, most });
    }
    all.sort_by(|a, b| b.excess_ns.total_cmp(&a.excess_ns).then(a.budget.cmp(&b.budget)));
    all.truncate(WORST_SHOWN);
    all
}

fn device_name(context: &Context, device: u32) -> String {
    if is_host_only(context.trace) {
        return "host".to_owned();
    }
    let Some(known) = context.trace.devices.get(device as usize) else { return device.to_string() };
    match (known.is_cpu, known.name.is_empty()) {
        (true, true) => "CPU".to_owned(),
        (false, true) => format!("GPU {}", known.ordinal),
        (true, false) => known.name.clone(),
        (false, false) => format!("GPU {} {}", known.ordinal, known.name),
    }
}

fn kind_name(kind: Option<IterationKind>) -> Value {
    kind.map(|k| k.to_string()).into()
}

/// Where the time of iterations and of devices went.
pub fn report(context: &Context) -> Report {
    const TITLE: &str = "Where the wall time of an iteration went";
    let host_only = is_host_only(context.trace);
    let on_cpu = host_only || computes_on_cpu(context);
    if context.trace.ops.is_empty() && !on_cpu {
        return Report::absent("budget", TITLE, "the trace has no device ops");
    }
    let budgets = budgets(context);
    let kinds = budget_by_kind(&budgets);
    let mut report = Report::new("budget", TITLE);
    match &context.iterations.method {
        Some(_) if !budgets.is_empty() => {
            let of = if host_only {
                "the time of its marker"
            } else if on_cpu {
                "its recorded wall time"
            } else {
                "the time of a device from its first op to the first op of the next iteration"
            };
            report = report
                .sheet(side_by_side(&kinds))
                .sheet(kinds_sheet(&kinds))
                .sheet(worst_sheet(context, &budgets, &kinds))
                .note(format!("Iterations were found {}; what is split is {of}.", context.iterations.how()))
                .note("Means add up to the mean wall time and shares to 100 % of it; medians do not add up.");
        }
        _ if host_only => report = report.note(context.iterations.sentence()).note("Only the whole trace is split."),
        _ => report = report.note(context.iterations.sentence()).note("Only whole devices are split."),
    }
    if budgets.iter().flat_map(|b| &b.parts).any(|(part, _)| *part == Part::CpuWait) {
        report = report.note(match on_cpu {
            true => "waited for a CPU: the longest wait of one thread in the iteration. Which op it delayed is not recorded, so it is taken from all other parts in proportion to their time.",
            false => "waited for a CPU: the wait of the engine's thread, taken from the time in which the device waited for the host.",
        });
    }
    if host_only {
        if let Some(whole) = host_compute::whole(context) {
            let mut sheet = device_columns("Whole trace", ["host", "share of time"]);
            push_device(&mut sheet, "host", &whole);
            report = report.sheet(sheet);
        }
        report = report.note(
            "The host computes: a moment counts as the family of the innermost operator, data loading and the optimizer as \
             a whole, else as Python where the profiler recorded its functions; unknown is covered by neither.",
        );
    } else if !on_cpu || budgets.is_empty() {
        report = report
            .sheet(devices_sheet(context))
            .note("The time of a device reaches from its first op to the end of its last one; what lies between two recorded windows is left out.");
    }
    let without = context.trace.ops_without_launch();
    if without > 0 {
        report = report.note(format!(
            "{without} of {} ops have no recorded launch: idle time before them is unknown.",
            context.trace.ops.len()
        ));
    }
    report
}

/// One row per part, the kinds beside each other: what fits a screen. The means of a kind add up.
fn side_by_side(kinds: &[KindBudget]) -> Sheet {
    let mut columns = vec![Column::new("part", Unit::Text)];
    for kind in kinds {
        let name = kind.kind.map_or("iteration".to_owned(), |kind| kind.to_string());
        columns.push(Column::new(format!("{name} mean"), Unit::Ns));
        columns.push(Column::new(format!("{name} share"), Unit::Share));
    }
    let counts = kinds.iter().map(|k| match k.kind {
        Some(kind) => format!("{} {kind}", k.iterations),
        None => k.iterations.to_string(),
    });
    let title = format!("Mean iteration ({} iterations)", counts.collect::<Vec<_>>().join(", "));
    let mut sheet = Sheet::new("side_by_side", columns).title(title);
    let of = |kind: &KindBudget, part: &Part| {
        let found = kind.parts.iter().find(|p| p.part == *part);
        found.map_or((0.0, 0.0), |p| (p.mean_ns, p.share_of_wall))
    };
    let mut parts: Vec<&Part> = kinds.iter().flat_map(|kind| &kind.parts).map(|p| &p.part).collect();
    parts.sort_unstable();
    parts.dedup();
    let largest = |part: &Part| kinds.iter().map(|kind| of(kind, part).1).fold(0.0, f64::max);
    parts.sort_by(|a, b| largest(b).total_cmp(&largest(a)));
    for part in parts {
        let figures = kinds.iter().flat_map(|kind| [of(kind, part).0.into(), of(kind, part).1.into()]);
        sheet.push(std::iter::once(Value::from(part.to_string())).chain(figures));
    }
    let walls = kinds.iter().flat_map(|kind| [kind.wall_ns.mean.into(), 1.0.into()]);
    sheet.total = Some(std::iter::once(Value::from("wall")).chain(walls).collect());
    sheet
}

fn kinds_sheet(kinds: &[KindBudget]) -> Sheet {
    let columns = [
        Column::new("kind", Unit::Text),
        Column::new("part", Unit::Text),
        Column::new("median", Unit::Ns),
        Column::new("p25", Unit::Ns).role(Role::LowerQuartile),
        Column::new("p75", Unit::Ns).role(Role::UpperQuartile),
        Column::new("mean", Unit::Ns),
        Column::new("share of wall", Unit::Share),
        Column::new("iterations", Unit::Count),
    ];
    let mut sheet = Sheet::new("kinds", columns).title("Iterations by kind, with their spread");
    for kind in kinds {
        let spread = |median: f64, p25: f64, p75: f64, mean: f64| [median, p25, p75, mean].map(Value::from);
        let mut row = |part: Value, figures: [Value; 4], share: f64| {
            let head = [kind_name(kind.kind), part];
            sheet.push(head.into_iter().chain(figures).chain([share.into(), kind.iterations.into()]));
        };
        let wall = &kind.wall_ns;
        row("wall".into(), spread(wall.median, wall.p25, wall.p75, wall.mean), 1.0);
        let mut parts: Vec<&PartSummary> = kind.parts.iter().collect();
        parts.sort_by(|a, b| b.mean_ns.total_cmp(&a.mean_ns));
        for part in parts {
            let figures = spread(part.median_ns, part.p25_ns, part.p75_ns, part.mean_ns);
            row(part.part.to_string().into(), figures, part.share_of_wall);
        }
    }
    sheet
}

fn worst_sheet(context: &Context, budgets: &[IterationBudget], kinds: &[KindBudget]) -> Sheet {
    let columns = [
        Column::new("iteration", Unit::Id),
        Column::new("label", Unit::Text),
        Column::new("kind", Unit::Text),
        Column::new("device", Unit::Text),
        Column::new("wall", Unit::Ns),
        Column::new("over median", Unit::NsChange),
        Column::new("most of it", Unit::Text),
        Column::new("part over its median", Unit::NsChange),
    ];
    let mut sheet = Sheet::new("worst", columns).title("Worst iterations");
    for worst in worst(budgets, kinds) {
        let budget = &budgets[worst.budget];
        let found = &context.iterations.list[budget.iteration];
        let (part, over) =
            worst.most.map_or((Value::Unknown, Value::Unknown), |(p, ns)| (p.to_string().into(), ns.into()));
        sheet.push([
            budget.iter.into(),
            found.label.as_str().into(),
            kind_name(budget.kind),
            device_name(context, budget.device).into(),
            budget.wall_ns.into(),
            worst.excess_ns.into(),
            part,
            over,
        ]);
    }
    sheet
}

fn device_columns(title: &str, [of, share]: [&str; 2]) -> Sheet {
    let columns = [
        Column::new(of, Unit::Text),
        Column::new("part", Unit::Text),
        Column::new("time", Unit::Ns),
        Column::new(share, Unit::Share),
    ];
    Sheet::new("devices", columns).title(title)
}

fn push_device(sheet: &mut Sheet, name: &str, budget: &DeviceBudget) {
    let share = |ns: i64| Value::from(ns as f64 / budget.wall_ns as f64);
    sheet.push([name.into(), "all".into(), budget.wall_ns.into(), share(budget.wall_ns)]);
    let mut parts = budget.parts.clone();
    parts.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
    for (part, ns) in parts {
        sheet.push([name.into(), part.to_string().into(), ns.into(), share(ns)]);
    }
}

fn devices_sheet(context: &Context) -> Sheet {
    let mut sheet = device_columns("Whole devices", ["device", "share of device time"]);
    for budget in device_budgets(context) {
        push_device(&mut sheet, &device_name(context, budget.device), &budget);
    }
    sheet
}
