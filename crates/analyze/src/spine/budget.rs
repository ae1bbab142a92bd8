//! The iteration budget: where the wall clock of each iteration went.

use std::collections::HashMap;

use serde::{Serialize, Serializer};
use strobe_trace::recorded::Trace;
use strobe_trace::{IterationKind, RangeKind};

use super::attribute::{Owner, attribute};
use crate::stats::Summary;

/// Something an iteration spends its time on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Choosing what runs.
    Schedule,
    /// Making the step's inputs.
    Prepare,
    /// Running ops of this category.
    Category(String),
    /// Turning logits into tokens, outside of ops.
    Sample,
    /// Handing results back.
    Respond,
    /// Inside the forward step while no op runs: op dispatch, barriers.
    Idle,
    /// Covered by nothing that was recorded.
    Unknown,
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Part::Schedule => "schedule",
            Part::Prepare => "prepare",
            Part::Category(name) => name,
            Part::Sample => "sample",
            Part::Respond => "respond",
            Part::Idle => "idle",
            Part::Unknown => "unknown",
        })
    }
}

impl Serialize for Part {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Part {
    pub(crate) fn of(owner: Owner, trace: &Trace) -> Self {
        match owner {
            Owner::Unknown => Part::Unknown,
            Owner::Idle => Part::Idle,
            Owner::Host(RangeKind::Schedule) => Part::Schedule,
            Owner::Host(RangeKind::Prepare) => Part::Prepare,
            Owner::Host(RangeKind::Sample) => Part::Sample,
            Owner::Host(RangeKind::Respond) => Part::Respond,
            Owner::Host(RangeKind::ForwardStep | RangeKind::Layer | RangeKind::Other) => Part::Idle,
            Owner::Op(index) => Part::Category(trace.strings.get(trace.ops[index].category).to_owned()),
        }
    }
}

/// One iteration's wall time, split.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IterationBudget {
    /// The iteration's number.
    pub iter: u64,
    /// What it worked on.
    pub kind: IterationKind,
    /// Its wall time.
    pub wall_ns: i64,
    /// Its parts, each positive and named once. They add up to `wall_ns` exactly. Ordered as the loop runs:
    /// schedule, prepare, categories by name, sample, respond, idle, unknown.
    pub parts: Vec<(Part, i64)>,
}

/// The budget of every iteration, in the trace's order.
///
/// A moment goes to exactly one part: to the category of the op running, else to the host phase that is open,
/// else to [`Part::Idle`] inside the forward step, else to [`Part::Unknown`]. Of several ops (or phases) at once
/// the one that started last counts.
pub fn budgets(trace: &Trace) -> Vec<IterationBudget> {
    attribute(trace)
        .into_iter()
        .zip(&trace.iterations)
        .map(|(owned, iteration)| {
            let mut sums: HashMap<Part, i64> = HashMap::new();
            for &(owner, ns) in &owned {
                *sums.entry(Part::of(owner, trace)).or_default() += ns;
            }
            let mut parts: Vec<(Part, i64)> = sums.into_iter().collect();
            parts.sort_unstable();
            IterationBudget { iter: iteration.iter, kind: iteration.kind(), wall_ns: iteration.wall_ns(), parts }
        })
        .collect()
}

/// The budget of all iterations of one kind.
///
/// The **means** add up to the mean wall time and are the column to show as a split; medians do not add up and
/// say what a typical iteration spends on that part alone.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KindBudget {
    /// The kind.
    pub kind: IterationKind,
    /// How many iterations.
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
    /// Mean over the iterations. The means of all parts add up to the mean wall time.
    pub mean_ns: f64,
    /// Sum of the part over sum of wall times. The shares of all parts add up to 1.
    pub share_of_wall: f64,
}

/// The budgets of each kind that occurs: prefill, mixed, decode.
pub fn budget_by_kind(budgets: &[IterationBudget]) -> Vec<KindBudget> {
    IterationKind::ALL.into_iter().filter_map(|kind| kind_budget(kind, budgets)).collect()
}

fn kind_budget(kind: IterationKind, budgets: &[IterationBudget]) -> Option<KindBudget> {
    let of_kind: Vec<&IterationBudget> = budgets.iter().filter(|b| b.kind == kind).collect();
    let wall_ns = Summary::of(of_kind.iter().map(|b| b.wall_ns as f64))?;
    let total: f64 = of_kind.iter().map(|b| b.wall_ns as f64).sum();

    let mut times: HashMap<&Part, Vec<f64>> = HashMap::new();
    for (part, ns) in of_kind.iter().flat_map(|b| &b.parts) {
        times.entry(part).or_default().push(*ns as f64);
    }
    let mut parts: Vec<PartSummary> = times
        .into_iter()
        .filter_map(|(part, mut values)| {
            let sum: f64 = values.iter().sum();
            values.resize(of_kind.len(), 0.0);
            let spread = Summary::of(values)?;
            Some(PartSummary {
                part: part.clone(),
                median_ns: spread.median,
                mean_ns: spread.mean,
                share_of_wall: sum / total,
            })
        })
        .collect();
    parts.sort_unstable_by(|a, b| a.part.cmp(&b.part));
    Some(KindBudget { kind, iterations: of_kind.len(), wall_ns, parts })
}
