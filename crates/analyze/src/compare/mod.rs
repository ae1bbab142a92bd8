//! Two sides, each one trace or several repeats of a run: what is different, and what it cost.
//!
//! The verdict is decided once (`verdict.rs`): from whole runs where they are known (`runs.rs`), else from iterations, of
//! which one run says nothing about the next, so that a share between runs is assumed. Iterations are compared with their
//! like (same kind and size, or same number), never window with window. Times are means per iteration and device, because
//! means of parts add up to the mean of the whole; iterations that took more than three times the median of their like
//! (warm-up, a stall) are set aside and listed.

mod align;
mod comparable;
mod kernels;
pub mod names;
mod normalize;
mod report;
pub mod runs;
mod samples;
mod split;
mod verdict;
mod window;
mod work;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use strobe_trace::IterationKind;

pub use align::{LeftOut, Size};
pub use kernels::{KernelChange, MatchedBy};
pub use normalize::{base_name, specialisation_free};
pub use runs::{Runs, WholeRuns};
pub use strobe_stats::{FEWEST, Range as Interval};
pub use verdict::{BETWEEN_RUNS, Gate, MARGIN, Outcome, Verdict};
pub use window::{Burst, Window};
pub use work::Work;

use crate::{Context, Summary};
use align::{Group, SIDES, align};
use kernels::{Series, Used, match_kernels};
use samples::{PartKey, Sample, Side};
use strobe_stats::{Plan, block_length, seed_of};

/// How to compare.
#[derive(Clone, Debug)]
pub struct CompareOptions {
    /// What to call the two sides, e.g. the names of their files.
    pub names: [String; 2],
    /// Rows of a table in the report; the comparison itself holds all.
    pub rows: usize,
    /// What is known of whole runs, beside their traces.
    pub runs: Option<Runs>,
    /// How much two runs of the same thing are thought to differ, as a share, where one trace a side is all there is.
    pub between_runs: f64,
    /// The difference that matters, as a share: sides that surely differ by less do not differ.
    pub margin: f64,
    /// What the caller knows that a reader should keep in mind.
    pub warnings: Vec<String>,
}

impl Default for CompareOptions {
    fn default() -> Self {
        Self {
            names: SIDES.map(String::from),
            rows: 12,
            runs: None,
            between_runs: BETWEEN_RUNS,
            margin: MARGIN,
            warnings: Vec::new(),
        }
    }
}

/// Two sides, compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// What the two sides are called.
    pub names: [String; 2],
    /// The answer.
    pub verdict: Verdict,
    /// What stands between the two sides and a fair comparison.
    pub warnings: Vec<String>,
    /// Whole runs, where the sides are runs of which more is known than their traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runs: Option<WholeRuns>,
    /// What was compared with what.
    pub basis: Basis,
    /// Mean wall time of an iteration of A, groups weighted alike on both sides.
    pub a_wall_ns: f64,
    /// The same for B.
    pub b_wall_ns: f64,
    /// Each kind and size of iteration that both sides have.
    pub groups: Vec<GroupComparison>,
    /// Iterations without a counterpart.
    pub left_out: Vec<LeftOut>,
    /// The parts of the wall time, all groups together as weighted: `delta_ns` add up to `b_wall_ns - a_wall_ns`.
    pub by_category: Vec<Delta>,
    /// The same with one row per op (kernel) in place of its category.
    pub by_op: Vec<Delta>,
    /// How much work the sides hold, where whole windows are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
    /// The whole windows, for what they are worth.
    pub windows: Option<[Window; 2]>,
    /// Work between long pauses, first with first, where the traces have no markers.
    pub bursts: Vec<BurstPair>,
    /// Sentences to read with the tables.
    pub notes: Vec<String>,
    #[serde(skip)]
    rows: usize,
}

/// What was compared with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Iteration with iteration.
    Iterations,
    /// Everything with everything, because there are no iterations to align.
    WholeWindow,
}

/// Iterations of one kind and size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupComparison {
    /// What they are, e.g. `decode, 8 requests`.
    pub name: String,
    /// Their kind, where known.
    pub kind: Option<IterationKind>,
    /// Its weight among the groups, by iterations of both sides; the weights add up to 1.
    pub weight: f64,
    /// Iterations of A that count.
    pub a_iterations: usize,
    /// Iterations of B that count.
    pub b_iterations: usize,
    /// Whether iterations were compared number by number.
    pub paired: bool,
    /// Repeats (runs) of the two sides.
    pub repeats: [usize; 2],
    /// Mean wall time in A.
    pub a_wall_ns: f64,
    /// Mean wall time in B.
    pub b_wall_ns: f64,
    /// Median wall time in A.
    pub a_median_ns: f64,
    /// Median wall time in B.
    pub b_median_ns: f64,
    /// B minus A.
    pub delta_ns: f64,
    /// `delta_ns` as a share of `a_wall_ns`; absent when that is 0.
    pub change: Option<f64>,
    /// 95 % interval of `delta_ns`.
    pub interval_ns: Option<Interval>,
    /// Why there is no interval.
    pub no_interval: Option<String>,
    /// Faster, slower or neither.
    pub outcome: Outcome,
    /// Kernels per iteration and device in A.
    pub a_kernels: f64,
    /// Kernels per iteration and device in B.
    pub b_kernels: f64,
    /// Launches per iteration and device in A: a graph counts once.
    pub a_launches: f64,
    /// Launches per iteration and device in B.
    pub b_launches: f64,
    /// Parts of the wall time, largest absolute change first. Their `delta_ns` add up to the group's.
    pub parts: Vec<PartChange>,
    /// Kernels, copies and fills, largest absolute change first.
    pub kernels: Vec<KernelChange>,
    /// The iterations one by one: by number where paired, else by position.
    pub pairs: Vec<IterationPair>,
}

impl GroupComparison {
    /// Kernels that only A has.
    pub fn only_a(&self) -> impl Iterator<Item = &KernelChange> {
        self.kernels.iter().filter(|k| k.b.is_empty())
    }

    /// Kernels that only B has.
    pub fn only_b(&self) -> impl Iterator<Item = &KernelChange> {
        self.kernels.iter().filter(|k| k.a.is_empty())
    }

    /// Kernels that stand in for others.
    pub fn replaced(&self) -> impl Iterator<Item = &KernelChange> {
        self.kernels.iter().filter(|k| k.is_replacement())
    }
}

/// The change of one part of the wall time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartChange {
    /// A category of ops, exposed communication or copies, a cause of idle time, a phase of the host.
    pub part: String,
    /// Mean per iteration in A.
    pub a_ns: f64,
    /// Mean per iteration in B.
    pub b_ns: f64,
    /// B minus A.
    pub delta_ns: f64,
    /// 95 % interval of `delta_ns`.
    pub interval_ns: Option<Interval>,
}

/// The change of one op, or of one part outside ops, per iteration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Delta {
    /// The op or the part.
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

/// One iteration of A beside one of B.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IterationPair {
    /// Number of the iteration of A.
    pub a_number: Option<u64>,
    /// Number of the iteration of B.
    pub b_number: Option<u64>,
    /// What they are called.
    pub label: String,
    /// Wall time in A.
    pub a_wall_ns: Option<f64>,
    /// Wall time in B.
    pub b_wall_ns: Option<f64>,
    /// Why one of the two does not count in the means.
    pub set_aside: Option<String>,
}

/// A burst of A beside one of B.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BurstPair {
    /// Of A.
    pub a: Burst,
    /// Of B.
    pub b: Burst,
}

impl BurstPair {
    /// The change of its wall time as a share of A's.
    pub fn change(&self) -> Option<f64> {
        (self.a.wall_ns > 0).then(|| (self.b.wall_ns - self.a.wall_ns) as f64 / self.a.wall_ns as f64)
    }
}

/// The category of time that is not an op's.
const HOST: &str = "host";

/// Compares two sides, each one trace or several repeats.
pub fn compare(a: &[Context], b: &[Context], options: &CompareOptions) -> Comparison {
    let mut judged = comparable::judge(a, b);
    let mut sides = [Side::of_iterations(a), Side::of_iterations(b)];
    let slots = |side: &Side| side.samples.iter().map(|sample| sample.slot.clone()).collect::<Vec<_>>();
    let numbered = sides.iter().all(Side::is_numbered);
    let alike = |of_a: &[usize], of_b: &[usize]| same_work(&sides, [of_a, of_b]);
    let mut aligned = align(&slots(&sides[0]), &slots(&sides[1]), numbered, &alike);
    let mut notes = std::mem::take(&mut aligned.notes);
    let left_out = std::mem::take(&mut aligned.left_out);
    let basis = if aligned.groups.is_empty() { Basis::WholeWindow } else { Basis::Iterations };
    let mut work = None;
    if basis == Basis::WholeWindow {
        judged.windows_only([a, b], &sides, &left_out, &mut notes);
        sides = [Side::of_windows(a), Side::of_windows(b)];
        work = Some(matched_work([a, b], &mut sides));
        aligned = align(&slots(&sides[0]), &slots(&sides[1]), false, &|_, _| 1.0);
    }
    let total: usize = aligned.groups.iter().map(|g| g.a.len() + g.b.len()).sum();
    let members: Vec<Members> = aligned.groups.iter().map(|group| Members::of(group, &sides)).collect();
    let mut groups: Vec<GroupComparison> = aligned
        .groups
        .iter()
        .zip(&members)
        .map(|(group, members)| {
            let weight = (group.a.len() + group.b.len()) as f64 / total.max(1) as f64;
            compare_group(group, members, &sides, weight, [a.len(), b.len()])
        })
        .collect();
    let whole = options.runs.as_ref().map(|runs| runs.judge(options.margin));
    let repeats = Repeats::of(&members, &groups);
    for group in groups.iter_mut().filter(|group| group.interval_ns.is_none() && group.is_identical()) {
        // However few they are: the same iterations do not differ.
        group.interval_ns = Some(Interval { low: 0.0, high: 0.0 });
    }
    let within: Vec<Option<Interval>> = groups.iter().map(|group| group.interval_ns).collect();
    let margin = options.margin.max(if repeats.is_some() { 0.0 } else { options.between_runs });
    for (index, group) in groups.iter_mut().enumerate() {
        let between = match (&whole, &repeats) {
            (Some(whole), _) => between_of(whole, group),
            (None, Some(repeats)) => repeats.between(index),
            (None, None) => Some(options.between_runs),
        };
        group.judge(basis, between, margin);
    }
    if aligned.groups.iter().any(|g| g.sizes_differ) {
        notes.push("sizes within a group differ slightly between the sides; see its name".to_owned());
    }
    let marked = [a, b].iter().any(|side| side.iter().any(comparable::has_markers));
    let bursts = match (a, b) {
        ([a], [b]) if !marked => {
            let pairs = window::bursts(a).into_iter().zip(window::bursts(b));
            pairs.map(|(a, b)| BurstPair { a, b }).collect()
        }
        _ => Vec::new(),
    };
    let weighted = |of: fn(&GroupComparison) -> f64| groups.iter().map(|g| g.weight * of(g)).sum();
    let mut comparison = Comparison {
        names: options.names.clone(),
        verdict: Verdict::default(),
        warnings: Vec::new(),
        runs: None,
        basis,
        a_wall_ns: weighted(|g| g.a_wall_ns),
        b_wall_ns: weighted(|g| g.b_wall_ns),
        by_category: deltas(&members, &groups, &sides, true),
        by_op: deltas(&members, &groups, &sides, false),
        groups,
        left_out,
        work: work.filter(|work| work.kernels.iter().any(|kernels| *kernels > 0.0)),
        windows: window::window(a).zip(window::window(b)).map(|(a, b)| [a, b]),
        bursts,
        notes,
        rows: options.rows,
    };
    let bare = |context: &Context| context.trace.ops.is_empty() && context.iterations.list.is_empty();
    if whole.is_some() && a.iter().chain(b).all(bare) {
        // Figures are all there is: nothing stands in the way of comparing them.
        judged = comparable::Judged::default();
        comparison.notes.clear();
    }
    judged.warnings.extend(options.warnings.iter().cloned());
    let explained = comparison.explanation();
    comparison.verdict = match whole {
        Some(whole) => {
            // What stands in the way of comparing recorded ops is no reason not to compare whole runs.
            judged.warnings.extend(judged.blockers.iter().map(|text| format!("ops are not compared: {text}")));
            let shown = if comparison.shows(whole.outcome) { explained } else { comparison.not_shown() };
            let mut verdict = verdict::of_runs(&whole, &comparison.names, shown.filter(|_| judged.blockers.is_empty()));
            if whole.outcome.is_difference() && comparison.groups.iter().all(|group| group.kernels.is_empty()) {
                let how = match a.is_empty() && b.is_empty() {
                    // Results of other benchmarks.
                    true => "`strobe profile --windows A-B -- COMMAND` of each side and `strobe compare` show",
                    false => "--profile A-B on both sides shows",
                };
                verdict.evidence.push(format!("No ops were recorded: {how} what accounts for it."));
            }
            comparison.runs = Some(whole);
            verdict
        }
        None => {
            let total = match &repeats {
                Some(repeats) => repeats.total(&comparison),
                None if basis == Basis::WholeWindow => {
                    // A window is one single iteration: within it nothing varies.
                    let exact = |g: &GroupComparison| Some(Interval { low: g.delta_ns, high: g.delta_ns });
                    let within: Vec<Option<Interval>> = comparison.groups.iter().map(exact).collect();
                    verdict::total(&comparison.groups, &within, options.between_runs)
                }
                None => verdict::total(&comparison.groups, &within, options.between_runs),
            };
            let evidence = evidence_of_traces(&total, repeats.as_ref(), options.between_runs, margin);
            verdict::of_groups(&comparison, &total, margin, evidence, &judged.blockers, explained)
        }
    };
    if comparison.verdict.outcome == Outcome::NotComparable {
        comparison.groups.iter_mut().for_each(|group| group.outcome = Outcome::NotComparable);
    }
    comparison.warnings = judged.warnings;
    comparison
}

/// The work of whole windows. Where one side holds the same work more often its times are brought to those of the other.
fn matched_work([a, b]: [&[Context]; 2], sides: &mut [Side; 2]) -> Work {
    let mut work = Work::of(a, b);
    let total = |side: &Side| mean(&side.samples.iter().map(|sample| sample.wall_ns).collect::<Vec<_>>());
    let [of_a, of_b] = sides.each_ref().map(total);
    work.total_change = if of_a > 0.0 { (of_b - of_a) / of_a } else { 0.0 };
    if let Some(ratio) = work.ratio {
        let (longer, times) = if ratio > 1.0 { (1, ratio) } else { (0, 1.0 / ratio) };
        sides[longer].samples.iter_mut().for_each(|sample| sample.divide(times));
    }
    work
}

/// How much equal runs differ in a kind of iteration, as the half width of an interval; absent where it is not known.
fn between_of(whole: &WholeRuns, group: &GroupComparison) -> Option<f64> {
    let kind = whole.kinds.iter().find(|kind| group.kind.is_some_and(|own| own.as_str() == kind.name));
    // A kind that takes little time has no estimate of its own; whole runs say what it is at least.
    let quantity = kind.or(whole.figures.first())?;
    Some(quantity.estimate?.half_width(quantity.confidence))
}

fn evidence_of_traces(total: &verdict::Total, repeats: Option<&Repeats>, between: f64, margin: f64) -> Vec<String> {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let mut lines = vec![match repeats {
        Some(repeats) => {
            let [a, b] = repeats.counts;
            let spread = repeats
                .spread()
                .map_or(String::new(), |sd| format!("; equal runs differ by {} (standard deviation)", percent(sd)));
            format!("Spread: from {a} and {b} traces{spread}.")
        }
        None => format!(
            "Spread: one trace a side. Two runs of the same thing are taken to differ by up to {} (--between-run), beside what iterations of one run show.",
            percent(between)
        ),
    }];
    if let Some(interval) = total.interval {
        // 80 % power: 0.84 standard errors beyond an interval of 1.96.
        let visible = (interval.high - interval.low) / 2.0 * (1.0 + 0.8416 / 1.96);
        lines.push(format!(
            "Smallest difference that this comparison sees in 4 of 5 cases (80 % power): {}.",
            percent(visible)
        ));
        if interval.low <= 0.0 && interval.high >= 0.0 && interval.low.abs().max(interval.high.abs()) > margin {
            lines.push("More traces a side (quoted patterns such as 'base-*') narrow the interval.".to_owned());
        }
    }
    lines
}

/// Several traces a side: what differs between them.
struct Repeats {
    counts: [usize; 2],
    /// Of every group, the mean wall time in each trace of the two sides.
    groups: Vec<[Vec<f64>; 2]>,
    /// The same of all groups together, as weighted.
    totals: [Vec<f64>; 2],
}

impl Repeats {
    /// None where a side has a single trace, or a trace lacks a group.
    fn of(members: &[Members], groups: &[GroupComparison]) -> Option<Self> {
        let means = |samples: &[&Sample]| {
            let mut walls: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
            samples.iter().for_each(|sample| walls.entry(sample.slot.repeat).or_default().push(sample.wall_ns));
            walls.into_values().map(|walls| mean(&walls)).collect::<Vec<f64>>()
        };
        let by_group: Vec<[Vec<f64>; 2]> =
            members.iter().map(|m| [means(&m.counted[0]), means(&m.counted[1])]).collect();
        let counts = [0, 1].map(|side| by_group.iter().map(|group| group[side].len()).min().unwrap_or(0));
        let complete = |side: usize| by_group.iter().all(|group| group[side].len() == counts[side]);
        if counts.iter().any(|&count| count < 2) || !complete(0) || !complete(1) {
            return None;
        }
        let total = |side: usize, repeat: usize| -> f64 {
            groups.iter().zip(&by_group).map(|(group, walls)| group.weight * walls[side][repeat]).sum()
        };
        let totals = [0, 1].map(|side| (0..counts[side]).map(|repeat| total(side, repeat)).collect());
        Some(Self { counts, groups: by_group, totals })
    }

    fn estimate(sides: &[Vec<f64>; 2]) -> Option<strobe_stats::Estimate> {
        strobe_stats::unpaired(&sides[0], &sides[1], None)
    }

    /// The half width of the interval of a group, as a share.
    fn between(&self, group: usize) -> Option<f64> {
        Some(Self::estimate(self.groups.get(group)?)?.half_width(0.95))
    }

    fn spread(&self) -> Option<f64> {
        strobe_stats::pooled_spread(&[&self.totals[0], &self.totals[1]]).map(|spread| spread.sd)
    }

    fn total(&self, comparison: &Comparison) -> verdict::Total {
        let (a, b) = (comparison.a_wall_ns, comparison.b_wall_ns);
        let change = (a > 0.0).then(|| (b - a) / a);
        let half = Self::estimate(&self.totals).map(|e| e.half_width(0.95) * (a + b) / 2.0);
        let interval =
            half.zip(change).map(|(half, change)| Interval { low: change - half / a, high: change + half / a });
        verdict::Total { change, interval, unjudged: 0.0 }
    }
}

/// The interval of a difference with what it does not hold, `reach`, added to both ends.
fn widened(within: Interval, delta: f64, reach: f64) -> Interval {
    Interval { low: delta - (delta - within.low).hypot(reach), high: delta + (within.high - delta).hypot(reach) }
}

impl GroupComparison {
    /// Whether both sides are the same to the nanosecond, part by part and kernel by kernel.
    fn is_identical(&self) -> bool {
        self.delta_ns == 0.0
            && self.a_iterations == self.b_iterations
            && self.parts.iter().all(|part| part.delta_ns == 0.0)
            && self.kernels.iter().all(|kernel| kernel.delta_ns == 0.0 && !kernel.count_changed())
    }

    /// Widens the interval by what differs between runs (`between`, as a share; absent where it is not known), and says what
    /// follows.
    fn judge(&mut self, basis: Basis, between: Option<f64>, margin: f64) {
        let within = match basis {
            Basis::Iterations => self.interval_ns,
            // A window is one single iteration: it has no interval of its own.
            Basis::WholeWindow => Some(Interval { low: self.delta_ns, high: self.delta_ns }),
        };
        self.interval_ns = within
            .zip(between)
            .map(|(within, between)| widened(within, self.delta_ns, between * (self.a_wall_ns + self.b_wall_ns) / 2.0));
        // Parts and kernels vary between runs as their iterations do.
        let widen = |interval: &mut Option<Interval>, delta: f64, time: f64| {
            *interval = interval.zip(between).map(|(within, between)| widened(within, delta, between * time));
        };
        for part in &mut self.parts {
            widen(&mut part.interval_ns, part.delta_ns, (part.a_ns + part.b_ns) / 2.0);
        }
        for kernel in &mut self.kernels {
            widen(&mut kernel.interval_ns, kernel.delta_ns, (kernel.a_ns + kernel.b_ns) / 2.0);
        }
        if self.interval_ns.is_some() {
            self.no_interval = None;
        } else if between.is_none() {
            self.no_interval = Some("no interval: how much equal runs differ is not known".to_owned());
        }
        let scale = self.a_wall_ns;
        let share =
            self.interval_ns.filter(|_| scale > 0.0).map(|i| Interval { low: i.low / scale, high: i.high / scale });
        self.outcome = runs::outcome_of(share, margin, 0.0);
    }
}

impl Comparison {
    /// What accounts for the difference of an iteration. Without a recorded op nobody knows.
    fn explanation(&self) -> Option<String> {
        if self.groups.iter().all(|group| group.kernels.is_empty()) {
            return None;
        }
        let per = match self.basis {
            Basis::Iterations => "iteration",
            Basis::WholeWindow => "window",
        };
        verdict::explanation(self, per)
    }

    /// Whether the compared iterations differ in the direction of an outcome.
    fn shows(&self, outcome: Outcome) -> bool {
        match outcome {
            Outcome::Slower => self.b_wall_ns > self.a_wall_ns,
            Outcome::Faster => self.b_wall_ns < self.a_wall_ns,
            _ => false,
        }
    }

    fn not_shown(&self) -> Option<String> {
        let recorded = self.groups.iter().any(|group| !group.kernels.is_empty());
        recorded.then(|| {
            "The compared iterations do not show it: the difference comes from elsewhere in the run.".to_owned()
        })
    }
}

/// How much of the kernels per iteration two lists of iterations have in common, by bare name: from 0 to 1.
fn same_work(sides: &[Side; 2], indices: [&[usize]; 2]) -> f64 {
    let mut runs: BTreeMap<String, [f64; 2]> = BTreeMap::new();
    for (side, list) in indices.iter().enumerate() {
        let mut by_key: BTreeMap<u32, f64> = BTreeMap::new();
        for sample in list.iter().filter_map(|&i| sides[side].samples.get(i)) {
            sample
                .ops
                .iter()
                .for_each(|(&key, time)| *by_key.entry(key).or_default() += time.count / list.len() as f64);
        }
        for (key, count) in by_key {
            let name = sides[side].keys.get(key as usize).map(|key| base_name(&key.name)).unwrap_or_default();
            runs.entry(name).or_default()[side] += count;
        }
    }
    let sum = |of: fn(f64, f64) -> f64| runs.values().map(|&[a, b]| of(a, b)).sum::<f64>();
    let either = sum(f64::max);
    if either > 0.0 { sum(f64::min) / either } else { 0.0 }
}

/// An iteration this many times as long as the median of its like does not count in the means.
const STALLED: f64 = 3.0;

/// From this many iterations on, single ones may be set aside: what is left must be enough for an interval.
const ENOUGH_TO_SET_ASIDE: usize = FEWEST + 1;

/// Why each of these wall times does not count, if it does not: far above the median, unless that is common.
fn set_aside(walls: &[f64]) -> Vec<Option<String>> {
    let none = vec![None; walls.len()];
    let Some(summary) = Summary::of(walls.iter().copied()) else { return none };
    let limit = STALLED * summary.median;
    let stalled = walls.iter().filter(|&&wall| wall > limit).count();
    if walls.len() < ENOUGH_TO_SET_ASIDE || stalled > (walls.len() / 10).max(1) {
        return none;
    }
    let reason = |wall: f64| format!("{:.1} times the median of its like", wall / summary.median);
    walls.iter().map(|&wall| (wall > limit).then(|| reason(wall))).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The iterations of a group.
struct Members<'s> {
    /// All, per side.
    all: [Vec<&'s Sample>; 2],
    /// Why each does not count, if it does not.
    aside: [Vec<Option<String>>; 2],
    /// Those that count.
    counted: [Vec<&'s Sample>; 2],
}

impl<'s> Members<'s> {
    fn of(group: &Group, sides: &'s [Side; 2]) -> Self {
        let all = [(&group.a, 0), (&group.b, 1)]
            .map(|(indices, side)| indices.iter().map(|&i| &sides[side].samples[i]).collect::<Vec<&Sample>>());
        let aside = all.each_ref().map(|samples| set_aside(&samples.iter().map(|s| s.wall_ns).collect::<Vec<_>>()));
        // Of a pair neither counts, but only the one that stands out is the reason.
        let counts = |side: usize, place: usize| {
            aside[side][place].is_none() && !(group.paired && aside[1 - side].get(place).is_some_and(Option::is_some))
        };
        let counted = [0, 1].map(|side| {
            let kept = all[side].iter().enumerate().filter(|(place, _)| counts(side, *place));
            kept.map(|(_, sample)| *sample).collect::<Vec<&Sample>>()
        });
        Self { all, aside, counted }
    }
}

fn compare_group(
    group: &Group,
    members: &Members,
    sides: &[Side; 2],
    weight: f64,
    repeats: [usize; 2],
) -> GroupComparison {
    let counted = &members.counted;
    let walls = counted.each_ref().map(|samples| samples.iter().map(|s| s.wall_ns).collect::<Vec<f64>>());
    let plan = plan(group.paired, counted, &walls);
    let no_interval = plan.is_none().then(|| {
        format!("no interval: {} and {} iterations, {FEWEST} of each are needed", walls[0].len(), walls[1].len())
    });
    let interval = |a: &[f64], b: &[f64]| plan.as_ref().map(|plan| plan.interval(a, b));
    let (a_wall_ns, b_wall_ns) = (mean(&walls[0]), mean(&walls[1]));
    let delta_ns = b_wall_ns - a_wall_ns;
    let change = (a_wall_ns > 0.0).then(|| delta_ns / a_wall_ns);
    let interval_ns = interval(&walls[0], &walls[1]);
    let of = |side: usize, value: fn(&Sample) -> f64| mean(&counted[side].iter().map(|s| value(s)).collect::<Vec<_>>());
    let median = |side: usize| Summary::of(walls[side].iter().copied()).map_or(0.0, |s| s.median);

    let keys: BTreeSet<&PartKey> = counted.iter().flatten().flat_map(|sample| sample.parts.keys()).collect();
    let series = |side: usize, key: &PartKey| {
        counted[side].iter().map(|s| s.parts.get(key).copied().unwrap_or(0.0)).collect::<Vec<f64>>()
    };
    let mut parts: Vec<PartChange> = keys
        .into_iter()
        .map(|key| {
            let (a, b) = (series(0, key), series(1, key));
            let (a_ns, b_ns) = (mean(&a), mean(&b));
            PartChange { part: key.name.clone(), a_ns, b_ns, delta_ns: b_ns - a_ns, interval_ns: interval(&a, &b) }
        })
        .collect();
    parts.sort_by(|x, y| y.delta_ns.abs().total_cmp(&x.delta_ns.abs()).then_with(|| x.part.cmp(&y.part)));

    let used = [0, 1].map(|side| used(&counted[side], &sides[side]));
    GroupComparison {
        name: group.name.clone(),
        kind: group.kind,
        weight,
        a_iterations: walls[0].len(),
        b_iterations: walls[1].len(),
        paired: group.paired,
        repeats,
        a_wall_ns,
        b_wall_ns,
        a_median_ns: median(0),
        b_median_ns: median(1),
        delta_ns,
        change,
        interval_ns,
        no_interval,
        outcome: Outcome::CannotTell,
        a_kernels: of(0, |s| s.kernels),
        b_kernels: of(1, |s| s.kernels),
        a_launches: of(0, |s| s.launches),
        b_launches: of(1, |s| s.launches),
        parts,
        kernels: match_kernels(&used[0], &used[1], plan.as_ref()),
        pairs: pairs(&members.all, &members.aside),
    }
}

fn plan(paired: bool, counted: &[Vec<&Sample>; 2], walls: &[Vec<f64>; 2]) -> Option<Plan> {
    if paired {
        let changes: Vec<f64> = walls[0].iter().zip(&walls[1]).map(|(a, b)| b - a).collect();
        return Plan::paired(walls[0].len(), block_length(&changes));
    }
    let repeats = counted.each_ref().map(|samples| {
        let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
        samples.iter().for_each(|sample| *counts.entry(sample.slot.repeat).or_default() += 1);
        counts.into_values().collect::<Vec<usize>>()
    });
    let lengths = walls.each_ref().map(|walls| block_length(walls));
    Plan::independent([&repeats[0], &repeats[1]], lengths, walls.each_ref().map(|walls| seed_of(walls)))
}

fn used(samples: &[&Sample], side: &Side) -> Used {
    let mut used = Used::new();
    for (place, sample) in samples.iter().enumerate() {
        for (&key, time) in &sample.ops {
            let Some(key) = side.keys.get(key as usize).filter(|_| time.count > 0.0) else { continue };
            let empty = || Series { count: vec![0.0; samples.len()], ns: vec![0.0; samples.len()] };
            let series = used.entry(key.clone()).or_insert_with(empty);
            series.count[place] = time.count;
            series.ns[place] = time.ns;
        }
    }
    used
}

fn pairs(all: &[Vec<&Sample>; 2], aside: &[Vec<Option<String>>; 2]) -> Vec<IterationPair> {
    let count = all[0].len().max(all[1].len());
    let pair = |place: usize| {
        let [a, b] = all.each_ref().map(|samples| samples.get(place));
        let reason = |side: usize| {
            let reason = aside[side].get(place).cloned().flatten();
            reason.map(|reason| format!("{}: {reason}", SIDES[side]))
        };
        IterationPair {
            a_number: a.map(|s| s.slot.number),
            b_number: b.map(|s| s.slot.number),
            label: a.or(b).map(|s| s.slot.label.clone()).unwrap_or_default(),
            a_wall_ns: a.map(|s| s.wall_ns),
            b_wall_ns: b.map(|s| s.wall_ns),
            set_aside: match (reason(0), reason(1)) {
                (Some(a), Some(b)) => Some(format!("{a}; {b}")),
                (a, b) => a.or(b),
            },
        }
    };
    (0..count).map(pair).collect()
}

/// Differences per op or per category, groups weighted, largest absolute change first.
fn deltas(members: &[Members], groups: &[GroupComparison], sides: &[Side; 2], by_category: bool) -> Vec<Delta> {
    let mut sums: BTreeMap<(String, String), [f64; 2]> = BTreeMap::new();
    for (members, compared) in members.iter().zip(groups) {
        for (side, samples) in members.counted.iter().enumerate() {
            let share = compared.weight / samples.len().max(1) as f64;
            for sample in samples {
                for (part, ns) in sample.parts.iter().filter(|(part, _)| by_category || !part.is_op) {
                    let category = if part.is_op { part.name.clone() } else { HOST.to_owned() };
                    sums.entry((part.name.clone(), category)).or_default()[side] += share * ns;
                }
                for (&key, time) in sample.ops.iter().filter(|_| !by_category) {
                    let Some(key) = sides[side].keys.get(key as usize) else { continue };
                    let name = if key.op.is_empty() { &key.name } else { &key.op };
                    sums.entry((name.clone(), key.category.clone())).or_default()[side] += share * time.own_ns;
                }
            }
        }
    }
    let delta = |((name, category), [a, b]): ((String, String), [f64; 2])| Delta {
        name,
        category,
        a_ns_per_iter: a,
        b_ns_per_iter: b,
        delta_ns: b - a,
    };
    let mut rows: Vec<Delta> = sums.into_iter().map(delta).collect();
    rows.sort_by(|x, y| y.delta_ns.abs().total_cmp(&x.delta_ns.abs()));
    rows
}
