//! Faster, slower, neither, or not to be said; and the sentence that says why.

use serde::Serialize;

use super::names::{short, short_pair, unlike};
use super::{Basis, Comparison, GroupComparison, KernelChange, PartChange};
use strobe_stats::{FEWEST, Range as Interval};

/// Changes below this are not told from noise when a side is a single run: what varies between runs is not in its
/// interval.
pub const SINGLE_RUN_NOISE: f64 = 0.02;

/// The same when each side has enough repeats for the interval to hold what varies between runs.
const REPEATED_NOISE: f64 = 0.005;

/// A group with less than this share of the compared time has no say in the verdict.
const SMALL_GROUP: f64 = 0.05;

/// Kinds that disagree are outvoted when the others change this many times as much time.
const CLEARLY: f64 = 3.0;

/// The answer of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// B takes less time.
    Faster,
    /// B takes more time.
    Slower,
    /// Faster in some kinds of iteration, slower in others.
    Mixed,
    /// No difference that stands out of the noise.
    #[default]
    NoDifference,
    /// Nothing can be said.
    NotComparable,
}

impl Outcome {
    /// In words.
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Faster => "faster",
            Outcome::Slower => "slower",
            Outcome::Mixed => "faster and slower",
            Outcome::NoDifference => "no difference",
            Outcome::NotComparable => "not comparable",
        }
    }
}

/// The answer with its reasons.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verdict {
    /// The answer.
    pub outcome: Outcome,
    /// One paragraph: how much, since when it is sure, what explains it.
    pub sentence: String,
    /// Why the sides cannot be compared.
    pub reasons: Vec<String>,
}

/// A significant slowdown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Regression {
    /// The group it was found in.
    pub group: String,
    /// The change as a share of A's wall time.
    pub change: f64,
    /// The limit it had to exceed.
    pub limit: f64,
    /// 95 % interval of the change, in the same unit.
    pub interval: Option<Interval>,
}

/// What a change says. It must exceed the noise between runs and, where there is an interval, that must exclude zero.
pub(super) fn outcome(change: Option<f64>, interval: Option<Interval>, repeats: [usize; 2]) -> Outcome {
    let noise = if repeats.iter().all(|&r| r >= FEWEST) { REPEATED_NOISE } else { SINGLE_RUN_NOISE };
    match change {
        Some(change) if change.abs() >= noise && interval.is_none_or(|i| i.excludes_zero()) => {
            if change > 0.0 {
                Outcome::Slower
            } else {
                Outcome::Faster
            }
        }
        _ => Outcome::NoDifference,
    }
}

impl Comparison {
    /// The worst significant slowdown above `threshold` (a share of A's wall time, e.g. 0.05) of any group; `None` when
    /// there is none or the sides cannot be compared.
    ///
    /// Significant means that the 95 % interval excludes zero. A group with too few iterations for an interval cannot show
    /// a significant change; [`Comparison::without_interval`] names such groups.
    pub fn regression(&self, threshold: f64) -> Option<Regression> {
        if self.verdict.outcome == Outcome::NotComparable {
            return None;
        }
        let found = self.groups.iter().filter_map(|group| {
            let change = group.change?;
            let sure = group.interval_ns.is_some_and(|interval| interval.low > 0.0);
            let scale = |interval: Interval| Interval {
                low: interval.low / group.a_wall_ns,
                high: interval.high / group.a_wall_ns,
            };
            (sure && change > threshold).then(|| Regression {
                group: group.name.clone(),
                change,
                limit: threshold,
                interval: group.interval_ns.map(scale),
            })
        });
        found.max_by(|x, y| x.change.total_cmp(&y.change))
    }

    /// The groups whose change exceeds `threshold` but has no interval, so that nothing can be said about its significance.
    pub fn without_interval(&self, threshold: f64) -> Vec<&GroupComparison> {
        let unsure =
            |g: &&GroupComparison| g.interval_ns.is_none() && g.change.is_some_and(|change| change > threshold);
        self.groups.iter().filter(unsure).collect()
    }
}

/// The verdict of a comparison whose groups are filled in.
pub(super) fn verdict(comparison: &Comparison, blockers: &[String]) -> Verdict {
    let mut groups: Vec<&GroupComparison> = comparison.groups.iter().collect();
    let time = |g: &GroupComparison| g.weight * (g.a_wall_ns + g.b_wall_ns);
    groups.sort_by(|x, y| time(y).total_cmp(&time(x)));
    if !blockers.is_empty() || groups.is_empty() {
        let mut reasons = blockers.to_vec();
        if reasons.is_empty() {
            reasons.push("the sides have nothing in common".to_owned());
        }
        let sentence = format!("Not comparable, because {}.", reasons.join("; and "));
        return Verdict { outcome: Outcome::NotComparable, sentence, reasons };
    }
    let total: f64 = groups.iter().map(|g| time(g)).sum();
    let any_interval = groups.iter().any(|g| g.interval_ns.is_some());
    let has_a_say =
        |g: &&&GroupComparison| time(g) >= SMALL_GROUP * total && (g.interval_ns.is_some() || !any_interval);
    let outcomes: Vec<Outcome> = groups.iter().filter(has_a_say).map(|g| g.outcome).collect();
    let change = |outcome: Outcome| -> f64 {
        let said = groups.iter().filter(has_a_say).filter(|g| g.outcome == outcome);
        said.map(|g| g.weight * g.delta_ns.abs()).sum()
    };
    let (gained, lost) = (change(Outcome::Faster), change(Outcome::Slower));
    let outcome = match (outcomes.contains(&Outcome::Faster), outcomes.contains(&Outcome::Slower)) {
        (true, true) if lost > CLEARLY * gained => Outcome::Slower,
        (true, true) if gained > CLEARLY * lost => Outcome::Faster,
        (true, true) => Outcome::Mixed,
        (true, false) => Outcome::Faster,
        (false, true) => Outcome::Slower,
        (false, false) => Outcome::NoDifference,
    };
    let mut sentences: Vec<String> = groups.iter().take(3).map(|g| group_sentence(g, comparison.basis)).collect();
    if groups.len() > 3 {
        sentences.push(format!("{} more kinds of iteration in the table.", groups.len() - 3));
    }
    Verdict { outcome, sentence: sentences.join(" "), reasons: Vec::new() }
}

/// e.g. `B is 12.0 % slower per iteration (decode, 8 requests): 6.70 -> 7.50 ms, 95 % +0.70 to +0.90 ms, ...`.
fn group_sentence(group: &GroupComparison, basis: Basis) -> String {
    let unit = Scale::of(group.a_wall_ns.max(group.b_wall_ns));
    let share = group.change.map_or_else(String::new, |change| format!("{:.1} % ", 100.0 * change.abs()));
    let what = match basis {
        Basis::Iterations => format!("per iteration ({})", group.name),
        Basis::WholeWindow => format!("over the {}", group.name),
    };
    let head = match group.outcome {
        Outcome::Faster => format!("B is {share}faster {what}"),
        Outcome::Slower => format!("B is {share}slower {what}"),
        _ => format!("No difference {what}"),
    };
    let walls = format!("{} -> {}", unit.number(group.a_wall_ns), unit.with_unit(group.b_wall_ns));
    let sure = match (group.interval_ns, &group.no_interval) {
        (Some(i), _) => {
            let (low, high) = (unit.signed(i.low), unit.with_sign_and_unit(i.high));
            format!("95 % {low} to {high}; {} and {} iterations", group.a_iterations, group.b_iterations)
        }
        (None, Some(why)) => why.clone(),
        (None, None) => String::new(),
    };
    let mut sentence = format!("{head}: {walls} ({sure}).");
    let because = explanation(group);
    if !because.is_empty() {
        sentence.push_str(&format!(" Parts: {}.", because.join(", ")));
    }
    let replaced: usize = group.replaced().count();
    let (only_a, only_b) = (group.only_a().count(), group.only_b().count());
    let count = |x: f64| if x.fract().abs() < 1e-6 { format!("{x:.0}") } else { format!("{x:.1}") };
    let per = if basis == Basis::Iterations { " per iteration" } else { "" };
    sentence.push_str(&format!(" Kernels{per}: {} -> {}", count(group.a_kernels), count(group.b_kernels)));
    if replaced + only_a + only_b > 0 {
        let names: [(usize, &str); 3] = [(replaced, "replaced"), (only_a, "only in A"), (only_b, "only in B")];
        let words: Vec<String> =
            names.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} names {what}")).collect();
        sentence.push_str(&format!(" ({})", words.join(", ")));
    }
    sentence.push('.');
    sentence
}

/// The parts that moved most, with the kernels behind them.
fn explanation(group: &GroupComparison) -> Vec<String> {
    let moved: f64 = group.parts.iter().map(|p| p.delta_ns.abs()).sum();
    let worth_saying = |part: &&PartChange| {
        part.delta_ns.abs() > 0.1 * moved && part.delta_ns.abs() > 0.002 * group.a_wall_ns.max(group.b_wall_ns)
    };
    let parts = group.parts.iter().filter(worth_saying).take(4);
    parts
        .map(|part| {
            let unit = Scale::of(group.a_wall_ns.max(group.b_wall_ns));
            let why = cause(group, part).map(|why| format!(" ({why})")).unwrap_or_default();
            format!("{} {}{why}", part.part, unit.with_sign_and_unit(part.delta_ns))
        })
        .collect()
}

/// The kernel that moved a part most, if it accounts for a good deal of it.
fn cause(group: &GroupComparison, part: &PartChange) -> Option<String> {
    let same_way = |k: &&KernelChange| {
        k.part == part.part && k.delta_ns * part.delta_ns > 0.0 && k.delta_ns.abs() >= 0.25 * part.delta_ns.abs()
    };
    let kernel = group.kernels.iter().find(same_way)?;
    let times = |count: f64| format!("{}x", (count * 10.0).round() / 10.0);
    let [a, b] = unlike(&kernel.a, &kernel.b);
    Some(match (a, b) {
        (Some(a), Some(b)) if kernel.is_replacement() => {
            let (count_a, count_b) = (times(kernel.a_count), times(kernel.b_count));
            let (a, b) = short_pair(a, b);
            format!("{count_a} {a} replaced by {count_b} {b}")
        }
        (Some(_), Some(_)) if kernel.count_changed() => {
            format!("{} {} -> {}", short(kernel.label()), times(kernel.a_count), times(kernel.b_count))
        }
        (Some(_), Some(_)) => format!("{} {}", times(kernel.b_count), short(kernel.label())),
        (Some(a), None) => format!("{} {} only in A", times(kernel.a_count), short(a)),
        (None, Some(b)) => format!("{} {} only in B", times(kernel.b_count), short(b)),
        (None, None) => return None,
    })
}

/// A unit of time that fits the largest of several numbers.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    ns: f64,
    unit: &'static str,
}

impl Scale {
    pub fn of(ns: f64) -> Self {
        let scales = [(1e9, "s"), (1e6, "ms"), (1e3, "us")];
        let fits = scales.into_iter().find(|(scale, _)| ns.abs() >= *scale).unwrap_or((1.0, "ns"));
        Self { ns: fits.0, unit: fits.1 }
    }

    pub fn number(self, ns: f64) -> String {
        format!("{:.*}", self.decimals(), self.rounded(ns))
    }

    pub fn signed(self, ns: f64) -> String {
        format!("{:+.*}", self.decimals(), self.rounded(ns))
    }

    pub fn with_unit(self, ns: f64) -> String {
        format!("{} {}", self.number(ns), self.unit)
    }

    pub fn with_sign_and_unit(self, ns: f64) -> String {
        format!("{} {}", self.signed(ns), self.unit)
    }

    fn decimals(self) -> usize {
        if self.unit == "ns" { 0 } else { 3 }
    }

    /// Without a negative zero.
    fn rounded(self, ns: f64) -> f64 {
        let digits = 10f64.powi(self.decimals() as i32);
        let rounded = (ns / self.ns * digits).round() / digits;
        if rounded == 0.0 { 0.0 } else { rounded }
    }
}
