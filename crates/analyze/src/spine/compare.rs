//! What explains the difference between two recordings.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use strobe_trace::IterationKind;
use strobe_trace::recorded::Trace;

use super::attribute::{Owner, attribute};
use super::budget::Part;

/// Two recordings, iteration against iteration.
///
/// Iterations are compared within their kind, and the kinds are weighted alike on both sides (by how many
/// iterations of the kind both recordings have together), so a recording that merely caught more prefills does not
/// look slower. A kind that only one side has cannot be compared and is left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Mean wall time of an iteration of A, kinds weighted by `kinds`.
    pub a_wall_ns: f64,
    /// The same for B.
    pub b_wall_ns: f64,
    /// The kinds compared. Empty when the recordings have none in common: then nothing can be said.
    pub kinds: Vec<KindWeight>,
    /// Kinds that only one of the two has.
    pub left_out: Vec<IterationKind>,
    /// One row per op name and host part, largest absolute change first. `delta_ns` add up to
    /// `b_wall_ns - a_wall_ns`.
    pub by_op: Vec<OpDelta>,
    /// The same with ops summed by category; here `name` and `category` are equal for ops.
    pub by_category: Vec<OpDelta>,
}

/// One kind of iteration in a [`Comparison`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KindWeight {
    /// The kind.
    pub kind: IterationKind,
    /// Its weight; the weights add up to 1.
    pub weight: f64,
    /// Iterations of it in A.
    pub a_iterations: usize,
    /// Iterations of it in B.
    pub b_iterations: usize,
    /// Mean wall time of those of A.
    pub a_wall_ns: f64,
    /// Mean wall time of those of B.
    pub b_wall_ns: f64,
}

/// The change of one op, or of one host part, per iteration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpDelta {
    /// The op's name; for time outside ops the part's: schedule, prepare, sample, respond, idle, unknown.
    pub name: String,
    /// The op's category; `host` for time outside ops.
    pub category: String,
    /// Time per iteration in A.
    pub a_ns_per_iter: f64,
    /// Time per iteration in B.
    pub b_ns_per_iter: f64,
    /// B minus A: positive where B takes longer.
    pub delta_ns: f64,
}

/// The category of rows that are not ops.
const HOST: &str = "host";

/// The rows of [`compare`] by op.
pub fn compare_ops(a: &Trace, b: &Trace) -> Vec<OpDelta> {
    compare(a, b).by_op
}

/// Compares two recordings.
pub fn compare(a: &Trace, b: &Trace) -> Comparison {
    let sides = [Side::of(a), Side::of(b)];
    let count = |side: &Side, kind| side.kinds.get(&kind).map_or(0, |k| k.iterations);
    let (mut shared, mut left_out) = (Vec::new(), Vec::new());
    for kind in IterationKind::ALL {
        match [count(&sides[0], kind), count(&sides[1], kind)] {
            [0, 0] => {}
            [_, 0] | [0, _] => left_out.push(kind),
            [in_a, in_b] => shared.push((kind, in_a, in_b)),
        }
    }
    let total: usize = shared.iter().map(|&(_, in_a, in_b)| in_a + in_b).sum();
    let kinds: Vec<KindWeight> = shared
        .into_iter()
        .map(|(kind, in_a, in_b)| KindWeight {
            kind,
            weight: (in_a + in_b) as f64 / total as f64,
            a_iterations: in_a,
            b_iterations: in_b,
            a_wall_ns: sides[0].mean_wall(kind),
            b_wall_ns: sides[1].mean_wall(kind),
        })
        .collect();
    Comparison {
        a_wall_ns: kinds.iter().map(|k| k.weight * k.a_wall_ns).sum(),
        b_wall_ns: kinds.iter().map(|k| k.weight * k.b_wall_ns).sum(),
        by_op: deltas(&sides, &kinds, |label| label.clone()),
        by_category: deltas(&sides, &kinds, |label| match label.category.as_str() {
            HOST => label.clone(),
            category => Label { name: category.to_owned(), category: category.to_owned() },
        }),
        kinds,
        left_out,
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Label {
    name: String,
    category: String,
}

/// The times of one recording by kind of iteration.
struct Side {
    kinds: HashMap<IterationKind, KindTimes>,
}

#[derive(Default)]
struct KindTimes {
    iterations: usize,
    wall_ns: f64,
    times: BTreeMap<Label, f64>,
}

impl Side {
    fn of(trace: &Trace) -> Self {
        let mut kinds: HashMap<IterationKind, KindTimes> = HashMap::new();
        for (owned, iteration) in attribute(trace).into_iter().zip(&trace.iterations) {
            let kind = kinds.entry(iteration.kind()).or_default();
            kind.iterations += 1;
            kind.wall_ns += iteration.wall_ns() as f64;
            for (owner, ns) in owned {
                *kind.times.entry(label(owner, trace)).or_default() += ns as f64;
            }
        }
        Self { kinds }
    }

    fn mean_wall(&self, kind: IterationKind) -> f64 {
        self.kinds.get(&kind).map_or(0.0, |k| k.wall_ns / k.iterations as f64)
    }
}

fn label(owner: Owner, trace: &Trace) -> Label {
    let text = |id| trace.strings.get(id).to_owned();
    match owner {
        Owner::Op(index) => Label { name: text(trace.ops[index].name), category: text(trace.ops[index].category) },
        host => Label { name: Part::of(host, trace).to_string(), category: HOST.to_owned() },
    }
}

fn deltas(sides: &[Side; 2], kinds: &[KindWeight], regroup: impl Fn(&Label) -> Label) -> Vec<OpDelta> {
    let mut per_iteration: BTreeMap<Label, [f64; 2]> = BTreeMap::new();
    for weight in kinds {
        for (place, side) in sides.iter().enumerate() {
            let Some(kind) = side.kinds.get(&weight.kind) else {
                continue;
            };
            for (label, ns) in &kind.times {
                per_iteration.entry(regroup(label)).or_default()[place] += weight.weight * ns / kind.iterations as f64;
            }
        }
    }
    let mut rows: Vec<OpDelta> = per_iteration
        .into_iter()
        .map(|(label, [a, b])| OpDelta {
            name: label.name,
            category: label.category,
            a_ns_per_iter: a,
            b_ns_per_iter: b,
            delta_ns: b - a,
        })
        .collect();
    rows.sort_by(|x, y| y.delta_ns.abs().total_cmp(&x.delta_ns.abs()));
    rows
}
