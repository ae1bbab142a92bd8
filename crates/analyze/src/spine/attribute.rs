//! Which event each nanosecond of an iteration belongs to.
//!
//! Every moment of an iteration goes to exactly one owner, chosen in this order:
//! 1. an **op** of that iteration that is running;
//! 2. a **host phase** (schedule, prepare, sample, respond) that is open;
//! 3. the **forward step** (or a layer range), open without an op running: idle;
//! 4. **unknown**.
//!
//! Among several of the same rank the one that started last owns the moment: of nested events the innermost,
//! of ops on several threads the latest. So overlapping things are counted once, and owners add up to the wall time.

use std::collections::{BinaryHeap, HashMap};

use strobe_trace::recorded::{Op, Trace};
use strobe_trace::{Iteration, RangeKind};

/// What a moment belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// Nothing recorded covers it.
    Unknown,
    /// The forward step between ops.
    Idle,
    /// A host phase: the kind of its range.
    Host(RangeKind),
    /// An op, by its index in the trace.
    Op(usize),
}

impl Owner {
    fn rank(self) -> u8 {
        match self {
            Owner::Unknown => 0,
            Owner::Idle => 1,
            Owner::Host(_) => 2,
            Owner::Op(_) => 3,
        }
    }

    fn of_range(kind: RangeKind) -> Option<Self> {
        match kind {
            RangeKind::Schedule | RangeKind::Prepare | RangeKind::Sample | RangeKind::Respond => {
                Some(Owner::Host(kind))
            }
            RangeKind::ForwardStep | RangeKind::Layer => Some(Owner::Idle),
            RangeKind::Other => None,
        }
    }
}

/// A span of time that an owner claims.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Claim {
    start: i64,
    end: i64,
    owner: Owner,
}

impl Ord for Claim {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let key = |c: &Self| (c.owner.rank(), c.start, std::cmp::Reverse(c.end), c.owner);
        key(self).cmp(&key(other))
    }
}

impl PartialOrd for Claim {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Per iteration of the trace, in its order: the time of each owner. The times of an iteration are positive
/// and add up to its wall time exactly; each owner occurs once.
pub(crate) fn attribute(trace: &Trace) -> Vec<Vec<(Owner, i64)>> {
    claims_by_iteration(trace)
        .into_iter()
        .zip(&trace.iterations)
        .map(|(claims, iteration)| sweep(claims, iteration))
        .collect()
}

/// The end of the iteration's wall time, also for spans too long for an `i64` of nanoseconds.
fn clipped_end(iteration: &Iteration) -> i64 {
    let longest = iteration.start.saturating_add(i64::MAX);
    iteration.end.clamp(iteration.start, longest)
}

fn claims_by_iteration(trace: &Trace) -> Vec<Vec<Claim>> {
    let iterations = &trace.iterations;
    let mut claims: Vec<Vec<Claim>> = vec![Vec::new(); iterations.len()];
    let mut by_number: HashMap<u64, Vec<usize>> = HashMap::new();
    for (index, iteration) in iterations.iter().enumerate() {
        by_number.entry(iteration.iter).or_default().push(index);
    }
    let in_time = InTime::new(iterations);

    let mut add = |index: usize, start: i64, end: i64, owner: Owner| {
        let iteration = &iterations[index];
        let start = start.max(iteration.start);
        let end = end.min(clipped_end(iteration));
        if start < end {
            claims[index].push(Claim { start, end, owner });
        }
    };
    for (number, op) in trace.ops.iter().enumerate() {
        let Op { start, end, .. } = *op;
        for &index in by_number.get(&op.iteration).into_iter().flatten() {
            add(index, start, end, Owner::Op(number));
        }
    }
    for range in &trace.ranges {
        let Some(owner) = Owner::of_range(range.kind) else {
            continue;
        };
        match range.iteration {
            Some(number) => {
                for &index in by_number.get(&number).into_iter().flatten() {
                    add(index, range.start, range.end, owner);
                }
            }
            None => {
                for index in in_time.overlapping(range.start, range.end) {
                    add(index, range.start, range.end, owner);
                }
            }
        }
    }
    claims
}

/// Finds the iterations that a span of time touches.
struct InTime {
    /// Start and index, by start.
    starts: Vec<(i64, usize)>,
    /// For each place in `starts` the latest end up to there.
    latest_end: Vec<i64>,
}

impl InTime {
    fn new(iterations: &[Iteration]) -> Self {
        let mut starts: Vec<(i64, usize)> = iterations.iter().enumerate().map(|(i, it)| (it.start, i)).collect();
        starts.sort_unstable();
        let latest_end = starts
            .iter()
            .scan(i64::MIN, |latest, &(_, index)| {
                *latest = (*latest).max(iterations[index].end);
                Some(*latest)
            })
            .collect();
        Self { starts, latest_end }
    }

    /// Indices of the iterations that begin before `end`, back to where all have ended by `start`. Some may
    /// not touch the span; clipping finds that out.
    fn overlapping(&self, start: i64, end: i64) -> impl Iterator<Item = usize> + '_ {
        let first_after = self.starts.partition_point(|&(begin, _)| begin < end);
        (0..first_after)
            .rev()
            .take_while(move |&place| self.latest_end[place] > start)
            .map(|place| self.starts[place].1)
    }
}

/// Walks from one event boundary to the next; the highest claim that is open owns what lies between.
fn sweep(mut claims: Vec<Claim>, iteration: &Iteration) -> Vec<(Owner, i64)> {
    let end = clipped_end(iteration);
    let mut boundaries: Vec<i64> = claims.iter().flat_map(|c| [c.start, c.end]).collect();
    boundaries.extend([iteration.start, end]);
    boundaries.sort_unstable();
    boundaries.dedup();
    claims.sort_by_key(|c| c.start);

    let mut upcoming = claims.into_iter().peekable();
    let mut open = BinaryHeap::new();
    let mut owned: HashMap<Owner, i64> = HashMap::new();
    for between in boundaries.windows(2) {
        let &[from, to] = between else { continue };
        while let Some(claim) = upcoming.next_if(|c| c.start <= from) {
            open.push(claim);
        }
        while open.peek().is_some_and(|c: &Claim| c.end <= from) {
            open.pop();
        }
        let owner = open.peek().map_or(Owner::Unknown, |c| c.owner);
        *owned.entry(owner).or_default() += to - from;
    }
    let mut owned: Vec<(Owner, i64)> = owned.into_iter().collect();
    owned.sort_unstable();
    owned
}
