//! Whole runs: what each showed, how much equal runs differ, and what follows from both. The unit of evidence is the run:
//! iterations of one run share its luck.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use strobe_stats::{Estimate, LogSpread, PercentileRule, Range, paired, percentile, pooled_spread, sorted, unpaired};
use strobe_trace::IterationKind;

use super::verdict::Outcome;

mod conclude;

/// A number that a run reports as a whole.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Metric {
    /// Its name, as reports have it.
    pub name: String,
    /// What stands behind the number in a sentence, e.g. `output tok/s`.
    pub unit: String,
    /// Whether more is better; times are not.
    pub higher_is_better: bool,
    /// The number.
    pub value: f64,
}

/// Iterations of a run that worked on the same batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Prompt tokens of each.
    pub context_tokens: u32,
    /// Requests that generated in each.
    pub generation_requests: u32,
    /// How many there were.
    pub iterations: u64,
    /// Their wall time in all.
    pub total_ns: f64,
    /// The lower quartile of their wall times; absent in reports of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lower_quartile_ns: Option<f64>,
}

/// What disturbs an iteration makes it longer and never shorter: the lower quartile is that of the undisturbed ones as long as
/// fewer than three in four are disturbed. On a shared machine it varied 20 times less between equal runs than their means.
const LOWER_QUARTILE: f64 = 0.25;

/// Prompt tokens are told apart by this many leading binary digits, so that a long run has few batches.
const DIGITS: u32 = 4;

impl Cell {
    /// Groups iterations, each given by its prompt tokens, generating requests and wall time.
    pub fn group(iterations: impl Iterator<Item = (u32, u32, f64)>) -> Vec<Cell> {
        let coarse = |tokens: u32| {
            let dropped = (u32::BITS - tokens.leading_zeros()).saturating_sub(DIGITS);
            tokens >> dropped << dropped
        };
        let mut walls: BTreeMap<(u32, u32), Vec<f64>> = BTreeMap::new();
        for (context_tokens, generation_requests, wall_ns) in iterations {
            walls.entry((coarse(context_tokens), generation_requests)).or_default().push(wall_ns);
        }
        let cell = |((context_tokens, generation_requests), walls): (_, Vec<f64>)| Cell {
            context_tokens,
            generation_requests,
            iterations: walls.len() as u64,
            total_ns: walls.iter().sum(),
            lower_quartile_ns: percentile(&sorted(&walls), LOWER_QUARTILE, PercentileRule::Linear),
        };
        walls.into_iter().map(cell).collect()
    }

    /// What an iteration typically takes when nothing disturbs it; the mean where a report is older.
    fn typical_ns(&self, quartiles: bool) -> f64 {
        let mean = self.total_ns / self.iterations.max(1) as f64;
        if quartiles { self.lower_quartile_ns.unwrap_or(mean) } else { mean }
    }

    /// Prompts only, generation only, or both.
    pub fn kind(&self) -> IterationKind {
        match (self.context_tokens, self.generation_requests) {
            (0, _) => IterationKind::Decode,
            (_, 0) => IterationKind::Prefill,
            _ => IterationKind::Mixed,
        }
    }
}

/// What a run had to do.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RunWork {
    /// Requests.
    pub requests: u64,
    /// Tokens of all prompts.
    pub input_tokens: f64,
    /// Tokens that were generated.
    pub output_tokens: f64,
}

/// What is known of one run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunFacts {
    /// What to call it.
    pub name: String,
    /// Which process of its side it ran in: repeats within one share what differs between processes.
    pub process: usize,
    /// When it began, nanoseconds since 1970, where known.
    pub started_ns: Option<u64>,
    /// Its figures; empty where it ended early.
    pub metrics: Vec<Metric>,
    /// Its iterations by batch.
    pub cells: Vec<Cell>,
    /// What it had to do.
    pub work: Option<RunWork>,
    /// How the machine disturbed it.
    pub disturbed: Option<Disturbance>,
    /// Readings of the memory bandwidth right before and after it, in bytes per second; empty where none were taken.
    pub bandwidth: Vec<f64>,
}

/// What the machine did to a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Disturbance {
    /// In words.
    pub reason: String,
    /// The share of the run's time that it took at least.
    pub share: f64,
}

/// What equal runs showed before on this machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StoredSpread {
    /// How many runs.
    pub runs: usize,
    /// How long ago, in words.
    pub age: String,
    /// The spread of each figure and, by the name of its kind, of iterations.
    pub spreads: BTreeMap<String, LogSpread>,
}

/// The runs of both sides.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Runs {
    /// Those of A and those of B.
    pub sides: [Vec<RunFacts>; 2],
    /// Whether the first of A ran beside the first of B, and so on.
    pub paired: bool,
    /// What is known of the spread between equal runs of this workload.
    pub stored: Option<StoredSpread>,
    /// The figure that decides; the first one that all runs have where it is not named.
    pub metric: Option<String>,
    /// What to do where the spread between runs is not known.
    pub remedy: String,
    /// The difference that the measurement was made to show, as a share: it stopped when its interval was that narrow, and an
    /// interval that happens to be narrower is no evidence for less. 0 where nothing was planned.
    pub resolution: f64,
    /// What else a reader should keep in mind, e.g. how the runs came about.
    pub notes: Vec<String>,
}

/// From what it is known how much equal runs differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// Pairs of neighbouring runs.
    Pairs,
    /// Repeats on the two sides.
    Repeats,
    /// Repeats and earlier equal runs.
    RepeatsAndStored,
    /// Earlier equal runs alone: a side has a single run.
    Stored,
    /// A stated share, for traces of one run a side.
    Assumed,
    /// It is not known.
    Nothing,
}

impl Evidence {
    /// The confidence of the intervals. A spread that was measured on other runs, and one that says when to stop, have to
    /// carry more: 99 of 100 equal comparisons say nothing.
    pub fn confidence(self) -> f64 {
        match self {
            Evidence::Repeats | Evidence::Assumed | Evidence::Nothing => 0.95,
            Evidence::Pairs | Evidence::RepeatsAndStored | Evidence::Stored => 0.99,
        }
    }
}

/// A figure or a kind of iteration, compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Quantity {
    /// Its name.
    pub name: String,
    /// What stands behind its values.
    pub unit: String,
    /// Whether more is better.
    pub higher_is_better: bool,
    /// Geometric mean over the runs of A.
    pub a: f64,
    /// The same of B.
    pub b: f64,
    /// Runs of the two sides.
    pub runs: [usize; 2],
    /// How much longer B takes, as a share; below 0 it is faster. Rates are taken as the times they stand for.
    pub time_change: f64,
    /// The interval of `time_change`.
    pub interval: Option<Range>,
    /// The confidence of that interval.
    pub confidence: f64,
    /// Its share of the time of all iterations, for a kind of iteration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// What follows for this quantity alone.
    pub outcome: Outcome,
    /// The logarithm of the ratio of times.
    #[serde(skip)]
    pub estimate: Option<Estimate>,
    /// Standard deviation of equal runs (of ratios, for pairs), as a share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<f64>,
}

/// What decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DecidedBy {
    /// The figure of whole runs.
    WholeRuns,
    /// Kinds of iteration, where whole runs could not.
    Iterations,
}

/// What whole runs say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WholeRuns {
    /// Runs of the two sides that count.
    pub counts: [usize; 2],
    /// Faster, slower, neither, or not to be told.
    pub outcome: Outcome,
    /// What decided.
    pub decided_by: DecidedBy,
    /// From what the spread between runs is known.
    pub evidence: Evidence,
    /// The spread of earlier equal runs, where it was used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored: Option<StoredSpread>,
    /// Standard deviation of equal runs, as a share, of the deciding figure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<f64>,
    /// The smallest true difference that would be seen in 4 of 5 such comparisons, as a share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smallest_visible: Option<f64>,
    /// Runs a side (or pairs) in all with which the interval is narrow enough to tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runs_needed: Option<usize>,
    /// The figures that both sides have; the deciding one comes first.
    pub figures: Vec<Quantity>,
    /// Kinds of iteration, most time first.
    pub kinds: Vec<Quantity>,
    /// Runs that do not count, with the reason.
    pub set_aside: Vec<String>,
    /// What a reader should keep in mind.
    pub notes: Vec<String>,
    /// Why the sides cannot be compared as whole runs.
    pub reasons: Vec<String>,
    /// Why nothing can be told, where the reason is not the width of the interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
    /// A difference that matters at all, as a share.
    pub margin: f64,
    /// Whether the repeats of a side ran in one process, so that a share between processes had to be assumed.
    pub one_process: bool,
    /// The largest share of its time that the machine took from a run that counts all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<f64>,
    /// The difference that the measurement was made to show, as a share; smaller ones are not told.
    pub resolution: f64,
    /// The typical time of all iterations of these kinds, added up by their shares of the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub added_up: Option<Quantity>,
}

/// A kind with less than this share of the time of iterations has no say.
const SMALL_KIND: f64 = 0.1;

/// The share of a kind's time that batches must cover which all runs had.
const MOSTLY_COVERED: f64 = 0.5;

/// How much two processes of the same thing are thought to differ where each side has one: repeats within it do not show it.
pub const BETWEEN_PROCESSES: f64 = 0.02;

/// A disturbed run that has to count may have lost this many times the time that is known to be lost: caches and memory are
/// shared as well.
const TIMES_LOST: f64 = 2.0;

/// Runs around which the machine read memory at rates that differ by more than this factor met it in different states (on
/// shared machines it switches, and everything with it): what differs between them may be the machine's.
const SAME_STATE: f64 = 1.4;

/// Sides whose amounts of work differ by more than this did not do the same.
const SAME_WORK: f64 = 0.01;

/// Pairs that must be left before disturbed ones are set aside.
const FEWEST_PAIRS: usize = 3;

impl Quantity {
    /// Compares values of one quantity, one of each run.
    fn of(name: &str, unit: &str, higher_is_better: bool, sides: [&[f64]; 2], how: &How) -> Option<Quantity> {
        let usable = |side: &[f64]| !side.is_empty() && side.iter().all(|v| v.is_finite() && *v > 0.0);
        if !sides.iter().all(|side| usable(side)) {
            return None;
        }
        let centre = |side: &[f64]| (side.iter().map(|v| v.ln()).sum::<f64>() / side.len() as f64).exp();
        let (a, b) = (centre(sides[0]), centre(sides[1]));
        let stored = how.stored.and_then(|stored| stored.spreads.get(name)).copied();
        let estimate = match how.evidence {
            Evidence::Pairs => {
                let pairs: Vec<(f64, f64)> = sides[0].iter().copied().zip(sides[1].iter().copied()).collect();
                paired(&pairs)
            }
            Evidence::Nothing => None,
            _ => unpaired(sides[0], sides[1], stored),
        };
        let spread = estimate.map(|e| match how.evidence {
            Evidence::Pairs => e.standard_error * (sides[0].len() as f64).sqrt(),
            _ => e.standard_error / sides.iter().map(|side| 1.0 / side.len() as f64).sum::<f64>().sqrt(),
        });
        let estimate = estimate.map(|e| if how.between > 0.0 { e.widened_by(how.between) } else { e });
        // As times: a rate of half is twice the time.
        let sign = if higher_is_better { -1.0 } else { 1.0 };
        let estimate = estimate.map(|e| Estimate { log_ratio: sign * e.log_ratio, ..e });
        let time_change = (sign * (b / a).ln()).exp_m1();
        let interval = estimate.map(|e| {
            let Range { low, high } = e.interval(how.confidence);
            Range { low: low.exp_m1(), high: high.exp_m1() }
        });
        Some(Quantity {
            name: name.to_owned(),
            unit: unit.to_owned(),
            higher_is_better,
            a,
            b,
            runs: [sides[0].len(), sides[1].len()],
            time_change,
            interval,
            confidence: how.confidence,
            share: None,
            outcome: outcome_of(interval, how.margin, how.resolution),
            estimate,
            spread,
        })
    }
}

/// What an interval of the change of time says.
pub(super) fn outcome_of(interval: Option<Range>, margin: f64, resolution: f64) -> Outcome {
    match interval {
        Some(interval) if largest(interval) <= resolution => Outcome::NoDifference,
        Some(Range { low, .. }) if low > 0.0 => Outcome::Slower,
        Some(Range { high, .. }) if high < 0.0 => Outcome::Faster,
        Some(interval) if largest(interval) <= margin + 1e-9 => Outcome::NoDifference,
        _ => Outcome::CannotTell,
    }
}

/// An interval whose ends are further apart than this factor says nothing but that there are too few runs.
const WIDEST: f64 = 10.0;

/// Whether an interval of the change of time is worth printing.
pub fn says_something(interval: &Range) -> bool {
    1.0 + interval.high <= WIDEST * (1.0 + interval.low)
}

/// The largest difference that an interval holds.
pub(super) fn largest(interval: Range) -> f64 {
    interval.low.abs().max(interval.high.abs())
}

/// How quantities are compared.
#[derive(Clone, Copy)]
struct How<'s> {
    evidence: Evidence,
    stored: Option<&'s StoredSpread>,
    confidence: f64,
    margin: f64,
    /// What the runs do not show, as a share.
    between: f64,
    /// The difference that the measurement was made to show.
    resolution: f64,
}

impl Runs {
    /// Compares the sides. `margin` is the difference that matters, as a share: below it, sides do not differ.
    pub fn judge(&self, margin: f64) -> WholeRuns {
        let mut found = WholeRuns {
            counts: self.sides.each_ref().map(Vec::len),
            outcome: Outcome::CannotTell,
            decided_by: DecidedBy::WholeRuns,
            evidence: Evidence::Nothing,
            stored: None,
            spread: None,
            smallest_visible: None,
            runs_needed: None,
            figures: Vec::new(),
            kinds: Vec::new(),
            set_aside: Vec::new(),
            notes: self.notes.clone(),
            reasons: Vec::new(),
            why_not: None,
            margin,
            one_process: false,
            lost: None,
            resolution: self.resolution,
            added_up: None,
        };
        found.reasons.extend(self.different_work());
        if !found.reasons.is_empty() {
            found.outcome = Outcome::NotComparable;
        }
        let sides = match self.undisturbed(&mut found) {
            Some(sides) => sides,
            None => self.sides.each_ref().map(|side| side.iter().collect()),
        };
        let (sides, changed) = match self.paired {
            true => (sides, None), // neighbours share the state, and their differences show where they do not
            false => self.in_one_state(sides, &mut found),
        };
        // Runs that ended early have iterations, but no figures.
        let whole =
            sides.each_ref().map(|side| side.iter().copied().filter(|r| !r.metrics.is_empty()).collect::<Vec<_>>());
        for (side, (whole, all)) in ["A", "B"].iter().zip(whole.iter().zip(&sides)) {
            if whole.len() < all.len() {
                found.notes.push(format!(
                    "{} of {} runs of {side} ended early: their iterations count, their totals do not",
                    all.len() - whole.len(),
                    all.len()
                ));
            }
        }
        let evident = if whole.iter().any(Vec::is_empty) { &sides } else { &whole };
        found.evidence = self.evidence(evident.each_ref().map(Vec::len));
        found.stored =
            self.stored.clone().filter(|_| matches!(found.evidence, Evidence::Stored | Evidence::RepeatsAndStored));
        found.counts = sides.each_ref().map(Vec::len);
        found.one_process = matches!(found.evidence, Evidence::Repeats | Evidence::RepeatsAndStored)
            && sides.iter().any(|side| side.len() > 1 && processes(side) == 1);
        if changed.is_some() {
            found.why_not = changed;
            found.evidence = Evidence::Nothing;
        }
        let how = How {
            evidence: found.evidence,
            stored: self.stored.as_ref(),
            confidence: found.evidence.confidence(),
            margin,
            between: (if found.one_process { BETWEEN_PROCESSES } else { 0.0 }) + TIMES_LOST * found.lost.unwrap_or(0.0),
            resolution: self.resolution,
        };
        found.figures = figures(&whole, self.metric.as_deref(), &how);
        (found.kinds, found.added_up) = kinds(&sides, &how);
        if found.outcome != Outcome::NotComparable {
            found.conclude(&whole, self);
        }
        self.caveats(&sides, &mut found);
        found
    }

    /// Why the sides did not do the same work.
    fn different_work(&self) -> Option<String> {
        let amounts = |side: &[RunFacts]| {
            let works: Vec<RunWork> =
                side.iter().filter(|run| !run.metrics.is_empty()).filter_map(|run| run.work).collect();
            let mean = |of: fn(&RunWork) -> f64| strobe_stats::mean(&works.iter().map(of).collect::<Vec<f64>>());
            [
                ("requests", mean(|work| work.requests as f64)),
                ("prompt tokens", mean(|work| work.input_tokens)),
                ("output tokens", mean(|work| work.output_tokens)),
            ]
        };
        let (of_a, of_b) = (amounts(&self.sides[0]), amounts(&self.sides[1]));
        of_a.into_iter().zip(of_b).find_map(|((name, a), (_, b))| {
            let (a, b) = (a?, b?);
            let apart = (a - b).abs() > SAME_WORK * a.max(b);
            apart.then(|| format!("the runs did different work: A {a:.0} {name}, B {b:.0}"))
        })
    }

    /// From what the spread between so many runs of the two sides is known.
    fn evidence(&self, counts: [usize; 2]) -> Evidence {
        match counts {
            [a, b] if self.paired && a == b && a > 1 => Evidence::Pairs,
            [a, b] if a > 1 || b > 1 => {
                if self.stored.is_some() {
                    Evidence::RepeatsAndStored
                } else {
                    Evidence::Repeats
                }
            }
            _ if self.stored.is_some() => Evidence::Stored,
            _ => Evidence::Nothing,
        }
    }

    /// The runs that count. Disturbed ones are set aside where enough are left. Where not, all count: of pairs their own
    /// differences show what disturbed them, and otherwise the interval is widened by what was lost (`lost`).
    fn undisturbed<'s>(&'s self, found: &mut WholeRuns) -> Option<[Vec<&'s RunFacts>; 2]> {
        let disturbed = |run: &RunFacts| run.disturbed.is_some();
        let lost = |run: &RunFacts| run.disturbed.as_ref().map_or(0.0, |d| d.share);
        let any =
            self.sides.iter().flatten().filter(|run| disturbed(run)).max_by(|x, y| lost(x).total_cmp(&lost(y)))?;
        let reason = any.disturbed.as_ref().map_or("", |d| d.reason.as_str());
        let counts = self.sides.each_ref().map(|side| side.iter().filter(|run| disturbed(run)).count());
        let of = format!(
            "{} of {} runs of A and {} of {} of B",
            counts[0],
            self.sides[0].len(),
            counts[1],
            self.sides[1].len()
        );
        if self.paired && self.sides[0].len() == self.sides[1].len() {
            let pairs: Vec<(&RunFacts, &RunFacts)> = self.sides[0].iter().zip(&self.sides[1]).collect();
            let quiet: Vec<_> = pairs.iter().filter(|(a, b)| !disturbed(a) && !disturbed(b)).collect();
            if quiet.len() < FEWEST_PAIRS.max(2 * pairs.len() / 3) {
                found.notes.push(format!(
                    "the machine was busy ({of}, e.g. {}: {reason}): all pairs count, and the interval is as wide as they say",
                    any.name
                ));
                return None;
            }
            found.set_aside.push(format!(
                "{} of {} pairs: the machine was busy (e.g. {}: {reason})",
                pairs.len() - quiet.len(),
                pairs.len(),
                any.name
            ));
            return Some([quiet.iter().map(|pair| pair.0).collect(), quiet.iter().map(|pair| pair.1).collect()]);
        }
        let quiet = self.sides.each_ref().map(|side| side.iter().filter(|run| !disturbed(run)).collect::<Vec<_>>());
        let fewest = if self.stored.is_some() { 1 } else { 2 };
        if quiet.iter().any(|side| side.len() < fewest) {
            found.why_not = Some(format!("the machine was busy ({of}; {}: {reason})", any.name));
            found.lost = Some(lost(any));
            return None;
        }
        found.set_aside.push(format!("{of}: the machine was busy (e.g. {}: {reason})", any.name));
        Some(quiet)
    }

    /// The runs that met the machine in the same state, by the memory bandwidth around them; and where they are too few, why
    /// nothing can be told. Readings before and after one run count alike: between them it met both states.
    fn in_one_state<'s>(
        &self,
        sides: [Vec<&'s RunFacts>; 2],
        found: &mut WholeRuns,
    ) -> ([Vec<&'s RunFacts>; 2], Option<String>) {
        let all = || sides.iter().flatten().copied();
        let Some(Range { low, high }) = readings(all()).filter(|_| all().all(|run| !run.bandwidth.is_empty())) else {
            return (sides, None);
        };
        if high <= SAME_STATE * low {
            return (sides, None);
        }
        // The state with most runs on the side that has fewer of them.
        let state = |lowest: f64| {
            sides.each_ref().map(|side| side.iter().copied().filter(|run| in_state(run, lowest)).collect::<Vec<_>>())
        };
        let size = |state: &[Vec<&RunFacts>; 2]| {
            let [a, b] = state.each_ref().map(Vec::len);
            (a.min(b), a + b)
        };
        let states = all().filter_map(|run| Some(state(readings([run])?.low)));
        let Some(best) = states.max_by_key(size) else { return (sides, None) };
        let fewest = if self.stored.is_some() { 1 } else { 2 };
        let rates = format!("memory bandwidth around them {:.1} to {:.1} GB/s", low / 1e9, high / 1e9);
        if size(&best).0 < fewest {
            let why = format!(
                "the machine changed between the runs ({rates}); run both again, or interleave them with `strobe ab`"
            );
            return (sides, Some(why));
        }
        let left = [0, 1].map(|side| sides[side].len() - best[side].len());
        found.set_aside.push(format!(
            "{} of {} runs of A and {} of {} of B: the machine was in another state ({rates})",
            left[0],
            sides[0].len(),
            left[1],
            sides[1].len()
        ));
        (best, None)
    }

    /// What the interval does not hold.
    fn caveats(&self, sides: &[Vec<&RunFacts>; 2], found: &mut WholeRuns) {
        if !matches!(found.evidence, Evidence::Repeats | Evidence::RepeatsAndStored) || found.one_process {
            return;
        }
        let times = sides.each_ref().map(|side| side.iter().map(|run| run.started_ns).collect::<Option<Vec<u64>>>());
        if let [Some(a), Some(b)] = times {
            let apart = |x: &[u64], y: &[u64]| x.iter().max() < y.iter().min();
            if apart(&a, &b) || apart(&b, &a) {
                found.notes.push(
                    "all runs of one side ran before those of the other: a drift of the machine between them is not in the interval; `strobe ab` interleaves".to_owned(),
                );
            }
        }
    }
}

/// The lowest and the highest reading of the memory bandwidth around runs.
fn readings<'r>(runs: impl IntoIterator<Item = &'r RunFacts>) -> Option<Range> {
    let known = runs.into_iter().flat_map(|run| &run.bandwidth).filter(|rate| rate.is_finite() && **rate > 0.0);
    known.fold(None, |range: Option<Range>, &rate| {
        Some(range.map_or(Range { low: rate, high: rate }, |r| Range { low: r.low.min(rate), high: r.high.max(rate) }))
    })
}

/// Whether no reading around a run is below the lowest of a state or too high for it.
fn in_state(run: &RunFacts, lowest: f64) -> bool {
    readings([run]).is_some_and(|of| of.low >= lowest && of.high <= SAME_STATE * lowest)
}

/// The runs of the state of the machine that most of equal runs met; all where it is not known of all.
pub fn of_one_state(runs: &[RunFacts]) -> Vec<&RunFacts> {
    let lows: Option<Vec<f64>> = runs.iter().map(|run| Some(readings([run])?.low)).collect();
    let states = lows.into_iter().flatten().map(|low| runs.iter().filter(|run| in_state(run, low)).collect::<Vec<_>>());
    states.max_by_key(Vec::len).unwrap_or_else(|| runs.iter().collect())
}

/// In how many processes the runs of a side ran.
fn processes(side: &[&RunFacts]) -> usize {
    side.iter().map(|run| run.process).collect::<BTreeSet<_>>().len()
}

/// The figures that every run has, the deciding one first.
fn figures(sides: &[Vec<&RunFacts>; 2], metric: Option<&str>, how: &How) -> Vec<Quantity> {
    let Some(first) = sides[0].first().filter(|_| !sides[1].is_empty()) else { return Vec::new() };
    let values = |side: &[&RunFacts], name: &str| -> Option<Vec<f64>> {
        side.iter().map(|run| run.metrics.iter().find(|m| m.name == name).map(|m| m.value)).collect()
    };
    let compared = |m: &Metric| {
        let (a, b) = (values(&sides[0], &m.name)?, values(&sides[1], &m.name)?);
        Quantity::of(&m.name, &m.unit, m.higher_is_better, [&a, &b], how)
    };
    let mut figures: Vec<Quantity> = first.metrics.iter().filter_map(compared).collect();
    if let Some(place) = metric.and_then(|name| figures.iter().position(|figure| figure.name == name)) {
        figures[..=place].rotate_right(1);
    }
    figures
}

/// One kind of iteration over several runs.
struct KindSeries {
    kind: IterationKind,
    /// Its share of the time of all iterations.
    share: f64,
    /// What an iteration typically takes in each run, in milliseconds.
    values: Vec<f64>,
}

/// Each kind of iteration that takes a good deal of the time, by the batches that all runs had, weighted alike.
fn kind_series(runs: &[&RunFacts]) -> Vec<KindSeries> {
    let total: f64 = runs.iter().flat_map(|run| &run.cells).map(|cell| cell.total_ns).sum();
    let series = |kind: IterationKind| {
        let of_run = |run: &&RunFacts| -> BTreeMap<(u32, u32), Cell> {
            let cells = run.cells.iter().filter(|cell| cell.kind() == kind && cell.iterations > 0);
            cells.map(|cell| ((cell.context_tokens, cell.generation_requests), *cell)).collect()
        };
        let runs: Vec<_> = runs.iter().map(of_run).collect();
        let time: f64 = runs.iter().flat_map(BTreeMap::values).map(|cell| cell.total_ns).sum();
        let (first, rest) = runs.split_first()?;
        let common: Vec<(u32, u32)> =
            first.keys().filter(|&batch| rest.iter().all(|cells| cells.contains_key(batch))).copied().collect();
        let cells = |batch: &(u32, u32)| runs.iter().filter_map(|cells| cells.get(batch)).collect::<Vec<_>>();
        let covered: f64 = common.iter().flat_map(cells).map(|cell| cell.total_ns).sum();
        if total <= 0.0 || time < SMALL_KIND * total || covered < MOSTLY_COVERED * time {
            return None;
        }
        // Times of a batch as ratios to what they are over all runs; a run's ratio is the lower quartile over the batches,
        // by the time that these take: a burst of the machine that hits one batch does not make a run slow.
        let quartiles = common.iter().flat_map(cells).all(|cell| cell.lower_quartile_ns.is_some());
        let usual = |batch: &(u32, u32)| {
            let of: Vec<f64> = cells(batch).iter().map(|cell| cell.typical_ns(quartiles).max(1.0).ln()).collect();
            (of.iter().sum::<f64>() / of.len() as f64).exp()
        };
        let batches: Vec<((u32, u32), f64, f64)> = common
            .iter()
            .map(|batch| {
                let iterations = cells(batch).iter().map(|cell| cell.iterations).sum::<u64>() as f64;
                (*batch, usual(batch), iterations)
            })
            .collect();
        let mean = batches.iter().map(|(_, usual, n)| usual * n).sum::<f64>()
            / batches.iter().map(|(_, _, n)| n).sum::<f64>()
            / 1e6;
        let ratio = |cells: &BTreeMap<(u32, u32), Cell>| {
            let ratios = batches
                .iter()
                .filter_map(|(batch, usual, n)| Some((cells.get(batch)?.typical_ns(quartiles) / usual, usual * n)));
            if quartiles { lower_quartile_of(ratios.collect()) } else { mean_of(ratios.collect()) }
        };
        Some(KindSeries { kind, share: time / total, values: runs.iter().map(|cells| mean * ratio(cells)).collect() })
    };
    let mut found: Vec<KindSeries> = IterationKind::ALL.into_iter().filter_map(series).collect();
    found.sort_by(|x, y| y.share.total_cmp(&x.share));
    found
}

/// The mean of values with weights.
fn mean_of(values: Vec<(f64, f64)>) -> f64 {
    values.iter().map(|(value, weight)| value * weight).sum::<f64>()
        / values.iter().map(|(_, weight)| weight).sum::<f64>()
}

/// The value below which a quarter of the weight lies.
fn lower_quartile_of(mut values: Vec<(f64, f64)>) -> f64 {
    values.sort_by(|x, y| x.0.total_cmp(&y.0));
    let quarter = LOWER_QUARTILE * values.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut below = 0.0;
    let found = values.iter().find(|(_, weight)| {
        below += weight;
        below >= quarter
    });
    found.map_or(f64::NAN, |(value, _)| *value)
}

/// Kinds of iteration compared, most time first.
fn kinds(sides: &[Vec<&RunFacts>; 2], how: &How) -> (Vec<Quantity>, Option<Quantity>) {
    if sides.iter().any(Vec::is_empty) {
        return Default::default();
    }
    let chosen = kind_series(&sides.concat());
    // Several questions are asked: each answer has to be surer.
    let confidence = 1.0 - (1.0 - how.confidence) / chosen.len().max(1) as f64;
    // Undisturbed iterations hardly vary within a state of the machine, and their spread says nothing of its states.
    let between = match how.evidence {
        Evidence::Pairs => how.between,
        _ => how.between.max(BETWEEN_PROCESSES),
    };
    let each = How { confidence, between, ..*how };
    let compared = |series: &KindSeries| {
        let (a, b) = series.values.split_at_checked(sides[0].len())?;
        let unit = format!("ms per typical {} iteration", series.kind);
        let quantity = Quantity::of(series.kind.as_str(), &unit, false, [a, b], &each)?;
        Some(Quantity { share: Some(series.share), ..quantity })
    };
    let stored = how.stored.map(|stored| with_added_up(stored, &chosen));
    let all = How { stored: stored.as_ref(), between, ..*how };
    let values = added_up(&chosen);
    let sum = values.split_at_checked(sides[0].len()).and_then(|(a, b)| {
        let quantity = Quantity::of(ADDED_UP, "of the typical time of iterations", false, [a, b], &all)?;
        Some(Quantity { share: Some(chosen.iter().map(|series| series.share).sum()), ..quantity })
    });
    (chosen.iter().filter_map(compared).collect(), sum)
}

/// What kinds of iteration added up are called where spreads are stored.
const ADDED_UP: &str = "iterations";

/// The typical time of all iterations in each run, as a share of its mean: kinds added up by their shares of the time. What
/// disturbs all kinds of a run alike, and what does not, is in how these differ.
fn added_up(kinds: &[KindSeries]) -> Vec<f64> {
    let share: f64 = kinds.iter().map(|series| series.share).sum();
    let runs = kinds.iter().map(|series| series.values.len()).min().unwrap_or(0);
    let usual = |series: &KindSeries| {
        (series.values.iter().map(|value| value.ln()).sum::<f64>() / series.values.len() as f64).exp()
    };
    let weights: Vec<f64> = kinds.iter().map(|series| series.share / share / usual(series)).collect();
    (0..runs)
        .map(|run| kinds.iter().zip(&weights).filter_map(|(s, weight)| Some(weight * s.values.get(run)?)).sum())
        .collect()
}

/// Stored spreads with that of all kinds added up, which older ones lack: it is at most the sum of those of the kinds.
fn with_added_up(stored: &StoredSpread, kinds: &[KindSeries]) -> StoredSpread {
    let mut stored = stored.clone();
    let share: f64 = kinds.iter().map(|series| series.share).sum();
    let known: Option<Vec<(f64, LogSpread)>> =
        kinds.iter().map(|series| Some((series.share / share, *stored.spreads.get(series.kind.as_str())?))).collect();
    if let Some(known) = known.filter(|known| !known.is_empty() && !stored.spreads.contains_key(ADDED_UP)) {
        let sd = known.iter().map(|(weight, spread)| weight * spread.sd).sum();
        let freedom = known.iter().map(|(_, spread)| spread.freedom).fold(f64::INFINITY, f64::min);
        stored.spreads.insert(ADDED_UP.to_owned(), LogSpread { sd, freedom });
    }
    stored
}

/// The spreads of equal runs, as they are stored: of every figure and of every kind of iteration.
pub fn spreads_of(runs: &[RunFacts]) -> BTreeMap<String, LogSpread> {
    let metrics = runs.first().map(|run| run.metrics.as_slice()).unwrap_or_default().iter().map(|metric| {
        let of = |run: &RunFacts| run.metrics.iter().find(|m| m.name == metric.name).map(|m| m.value);
        (metric.name.clone(), runs.iter().filter_map(of).collect::<Vec<f64>>())
    });
    let kinds = kind_series(&runs.iter().collect::<Vec<_>>());
    let sum = Some((ADDED_UP.to_owned(), added_up(&kinds))).filter(|(_, values)| !values.is_empty());
    let kinds = kinds.into_iter().map(|series| (series.kind.as_str().to_owned(), series.values));
    metrics.chain(kinds).chain(sum).filter_map(|(name, values)| Some((name, pooled_spread(&[&values])?))).collect()
}
