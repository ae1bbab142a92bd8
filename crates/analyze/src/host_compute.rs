//! Traces of PyTorch in which the host computes: operators are the ops, and nothing ran on a device.

use std::collections::HashMap;

use strobe_trace::{CallKind, NONE, RangeSource, StrId, Trace, range_flags};

use crate::attribution::Attribution;
use crate::budget::{Claim, DeviceBudget, InTime, IterationBudget, Owner, Part, sweep};
use crate::context::Context;
use crate::intervals::Span;
use crate::roofline::{category_of_operator, category_of_range};

/// Operators whose family no rule knows.
const OTHER_OPERATORS: &str = "other operators";

/// Python functions, where the profiler recorded them, while no operator ran.
const PYTHON: &str = "Python";

/// Whether operators of PyTorch ran and nothing ran on a device or was launched there.
pub(crate) fn is_host_only(trace: &Trace) -> bool {
    trace.ops.is_empty()
        && trace.iterations.is_empty()
        && !trace.calls.kind.contains(&CallKind::Gpu)
        && trace.ranges.source.contains(&RangeSource::CpuOp)
}

/// Whether a range is an operator of PyTorch.
pub(crate) fn is_operator(trace: &Trace, range: usize) -> bool {
    let flags = range_flags::MARK | range_flags::CROSS_THREAD;
    trace.ranges.source[range] == RangeSource::CpuOp && trace.ranges.flags[range] & flags == 0
}

/// Per range the innermost operator around it, or [`NONE`].
pub(crate) fn operators_around(trace: &Trace, attribution: &Attribution) -> Vec<u32> {
    let mut around: Vec<u32> = Vec::with_capacity(trace.ranges.len());
    for &parent in &attribution.parent {
        let found = match parent {
            NONE => NONE,
            parent if is_operator(trace, parent as usize) => parent,
            parent => around.get(parent as usize).copied().unwrap_or(NONE),
        };
        around.push(found);
    }
    around
}

/// Per operator its time without that of operators inside it; 0 for other ranges.
pub(crate) fn own_times(context: &Context) -> Vec<i64> {
    let trace = context.trace;
    let around = operators_around(trace, context.attribution());
    let length = |range: usize| if is_operator(trace, range) { trace.ranges.duration(range) } else { 0 };
    let mut own: Vec<i64> = (0..trace.ranges.len()).map(length).collect();
    for range in (0..own.len()).filter(|&range| is_operator(trace, range)) {
        if let Some(outer) = own.get_mut(around[range] as usize) {
            *outer = outer.saturating_sub(trace.ranges.duration(range)).max(0);
        }
    }
    own
}

/// What each moment of the host counts as.
pub(crate) struct Families {
    pub(crate) names: Vec<&'static str>,
    /// Per range an index into `names`; `None` where it says nothing.
    of_range: Vec<Option<u16>>,
}

impl Families {
    pub(crate) fn of(context: &Context) -> Self {
        let (trace, attribution) = (context.trace, context.attribution());
        let mut names: Vec<&'static str> = Vec::new();
        let mut number = |name: &'static str| -> u16 {
            let place = names.iter().position(|known| *known == name);
            place.unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            }) as u16
        };
        let (other, python) = (number(OTHER_OPERATORS), number(PYTHON));
        // By name: what a range's whole inside counts as, and what the range itself is.
        let mut whole: HashMap<StrId, Option<u16>> = HashMap::new();
        let mut known: HashMap<StrId, Option<u16>> = HashMap::new();
        let mut of_range: Vec<Option<u16>> = Vec::with_capacity(trace.ranges.len());
        let mut is_whole: Vec<bool> = Vec::with_capacity(trace.ranges.len());
        for range in 0..trace.ranges.len() {
            let (name, source) = (trace.ranges.name[range], trace.ranges.source[range]);
            let parent = attribution.parent[range] as usize;
            let outer = of_range.get(parent).copied().flatten();
            if is_whole.get(parent) == Some(&true) {
                of_range.push(outer);
                is_whole.push(true);
                continue;
            }
            let named = match source {
                RangeSource::Python => None,
                _ => *whole.entry(name).or_insert_with(|| category_of_range(trace.text(name)).map(&mut number)),
            };
            is_whole.push(named.is_some());
            of_range.push(named.or(match source {
                RangeSource::CpuOp => {
                    let own =
                        *known.entry(name).or_insert_with(|| category_of_operator(trace.text(name)).map(&mut number));
                    // Views, allocations and the like belong to the operator that needs them.
                    own.or(outer.filter(|&family| family != python)).or(Some(other))
                }
                // Python inside an operator is part of it.
                RangeSource::Python => outer.or(Some(python)),
                _ => outer,
            }));
        }
        Self { names, of_range }
    }

    /// The time of every operator by family.
    pub(crate) fn times(&self, trace: &Trace, own: &[i64]) -> Vec<(&'static str, i64, u64)> {
        let mut times = vec![(0_i64, 0_u64); self.names.len()];
        for (range, &ns) in own.iter().enumerate().filter(|&(range, _)| is_operator(trace, range)) {
            if let Some(time) = self.of_range[range].and_then(|family| times.get_mut(usize::from(family))) {
                *time = (time.0.saturating_add(ns), time.1 + 1);
            }
        }
        let all = self.names.iter().zip(times).filter(|(_, (_, count))| *count > 0);
        let mut all: Vec<(&'static str, i64, u64)> = all.map(|(name, (ns, count))| (*name, ns, count)).collect();
        all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
        all
    }

    /// How windows of time divide. Of several threads the operator that began last counts.
    fn split(&self, context: &Context, windows: &[(Span, Option<u32>)]) -> Vec<Vec<(Part, i64)>> {
        let trace = context.trace;
        let in_time = InTime::new(windows.iter().map(|(window, _)| *window));
        let mut claims: Vec<Vec<Claim>> = vec![Vec::new(); windows.len()];
        for range in 0..trace.ranges.len() {
            let Some(family) = self.of_range[range] else { continue };
            if trace.ranges.flags[range] & (range_flags::MARK | range_flags::CROSS_THREAD) != 0 {
                continue;
            }
            let rank = if self.names[usize::from(family)] == PYTHON { 1 } else { 2 };
            let (start, end) = (trace.ranges.start[range], trace.ranges.end[range]);
            let process = trace.threads.get(trace.ranges.thread[range] as usize).map(|thread| thread.process);
            for index in in_time.overlapping(start, end) {
                let (window, of) = windows[index];
                let (start, end) = (start.max(window.start), end.min(window.end));
                if start < end && (of.is_none() || of == process) {
                    let end = std::cmp::Reverse(end);
                    claims[index].push(Claim { rank, start, end, owner: Owner::Op(family) });
                }
            }
        }
        let part = |owner: Option<Owner>| match owner {
            Some(Owner::Op(family)) => Part::Category(self.names[usize::from(family)].to_owned()),
            _ => Part::Unknown,
        };
        let each = claims.into_iter().zip(windows).map(|(claims, (window, _))| {
            let mut parts: std::collections::BTreeMap<Part, i64> = std::collections::BTreeMap::new();
            for (owner, time) in sweep(claims, *window) {
                *parts.entry(part(owner)).or_default() += time;
            }
            parts.into_iter().collect()
        });
        each.collect()
    }
}

/// The wall time of every iteration, split by what the host did.
pub(crate) fn budgets(context: &Context) -> Vec<IterationBudget> {
    let list = &context.iterations.list;
    let windows: Vec<(Span, Option<u32>)> = list.iter().map(|found| (found.host, Some(found.process))).collect();
    let parts = Families::of(context).split(context, &windows);
    let each = list.iter().zip(parts).enumerate().map(|(iteration, (found, parts))| IterationBudget {
        iteration,
        iter: found.number,
        kind: found.kind,
        device: 0,
        window: found.host,
        wall_ns: found.host.length(),
        parts,
    });
    each.collect()
}

/// The whole trace, from the first operator to the end of the last one, split in the same way.
pub(crate) fn whole(context: &Context) -> Option<DeviceBudget> {
    let window = extent(context.trace)?;
    let parts = Families::of(context).split(context, &[(window, None)]).pop()?;
    Some(DeviceBudget { device: 0, window, wall_ns: window.length(), parts })
}

/// From the first operator to the end of the last one.
pub(crate) fn extent(trace: &Trace) -> Option<Span> {
    let operators = || (0..trace.ranges.len()).filter(|&range| is_operator(trace, range));
    let start = operators().map(|range| trace.ranges.start[range]).min()?;
    let end = operators().map(|range| trace.ranges.end[range]).max()?;
    Some(Span::new(start, end))
}
