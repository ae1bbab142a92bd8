//! Faster, slower, no difference, or not to be told; and the sentence that says why.

use std::collections::BTreeMap;

use serde::Serialize;
use strobe_stats::Range;
use strobe_trace::IterationKind;

use super::names::{short, short_pair, unlike};
use super::runs::{BETWEEN_PROCESSES, DecidedBy, Evidence, Quantity, WholeRuns, largest, outcome_of, says_something};
use super::{Basis, Comparison, GroupComparison, KernelChange, PartChange};

/// How much two runs of the same thing are thought to differ where nothing is known of it: traces of other tools, one a side.
pub const BETWEEN_RUNS: f64 = 0.03;

/// A difference that matters, where nobody says.
pub const MARGIN: f64 = 0.05;

/// Groups without an interval that take more than this share of the time leave the whole open.
const MOST_UNJUDGED: f64 = 0.5;

/// Steps whose numbers of kernels differ by more than this share do not do the same work, and the sentence says so.
const OTHER_WORK: f64 = 0.05;

/// A group with less than this share of the compared time is not named for disagreeing.
const SMALL_GROUP: f64 = 0.05;

/// The answer of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// B takes less time.
    Faster,
    /// B takes more time.
    Slower,
    /// No difference as large as one that matters.
    NoDifference,
    /// What was measured does not tell.
    #[default]
    CannotTell,
    /// The sides are different things.
    NotComparable,
}

impl Outcome {
    /// In words.
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Faster => "faster",
            Outcome::Slower => "slower",
            Outcome::NoDifference => "no difference",
            Outcome::CannotTell => "cannot tell",
            Outcome::NotComparable => "not comparable",
        }
    }

    /// Whether it names a direction.
    pub fn is_difference(self) -> bool {
        matches!(self, Outcome::Faster | Outcome::Slower)
    }
}

/// The answer with its reasons. Made once; every sentence, page and exit code follows from it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verdict {
    /// The answer.
    pub outcome: Outcome,
    /// The headline: how much, how sure, what explains it.
    pub sentence: String,
    /// Which ops account for a difference, where they were recorded; also the end of the headline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explanation: Option<String>,
    /// On what it rests: the spread between runs, the smallest difference that could have been seen, what would settle it.
    pub evidence: Vec<String>,
    /// How much longer B takes as a whole, as a share; below 0 it is faster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_change: Option<f64>,
    /// The interval of `time_change`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<Range>,
    /// The confidence of that interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confidence: Option<f64>,
    /// How much longer the whole of B is, as a share, where steps are not known and times are per matched work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_change: Option<f64>,
    /// Why the sides cannot be compared, or nothing can be told.
    pub reasons: Vec<String>,
}

/// What a gate says of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// No regression beyond the limit.
    Passed,
    /// A proven regression beyond the limit.
    Failed,
    /// Neither is shown.
    CannotTell,
    /// The sides are different things.
    NotComparable,
}

impl Verdict {
    /// Whether B takes longer than A by more than `limit`: proven where the whole interval lies beyond it.
    pub fn gate(&self, limit: f64) -> Gate {
        match (self.outcome, self.interval) {
            (Outcome::NotComparable, _) => Gate::NotComparable,
            // Without steps a longer whole may be a regression however its parts compare.
            (outcome, _) if outcome != Outcome::Slower && self.total_change.is_some_and(|total| total > limit) => {
                Gate::CannotTell
            }
            (Outcome::Faster | Outcome::NoDifference, _) => Gate::Passed,
            (Outcome::Slower, Some(interval)) if interval.low > limit => Gate::Failed,
            (_, Some(interval)) if interval.high <= limit => Gate::Passed,
            _ => Gate::CannotTell,
        }
    }
}

/// How much faster or slower: `1.47x faster`, `4.8 % slower`. Both are the ratio of the times, so exchanging the sides gives
/// the same number.
pub(super) fn speed(time_change: f64) -> String {
    let ratio = if time_change > 0.0 { 1.0 + time_change } else { 1.0 / (1.0 + time_change) };
    format!("{} {}", size(ratio), if time_change > 0.0 { "slower" } else { "faster" })
}

/// Ratios from here on are said as `1.47x`.
const AS_RATIO: f64 = 1.1;

fn size(ratio: f64) -> String {
    if ratio >= AS_RATIO { format!("{ratio:.2}x") } else { format!("{:.1} %", 100.0 * (ratio - 1.0)) }
}

/// An interval of the change of time, in the words of [`speed`].
fn speed_interval(time_change: f64, interval: Range) -> String {
    let ratio = |change: f64| if time_change > 0.0 { 1.0 + change } else { 1.0 / (1.0 + change) };
    let (low, high) = (ratio(interval.low), ratio(interval.high));
    let (low, high) = (low.min(high), low.max(high));
    let whole = if time_change > 0.0 { 1.0 + time_change } else { 1.0 / (1.0 + time_change) };
    match whole >= AS_RATIO {
        true => format!("{low:.2}x to {high:.2}x"),
        false => format!("{:.1} to {:.1} %", 100.0 * (low - 1.0), 100.0 * (high - 1.0)),
    }
}

fn signed(share: f64) -> String {
    format!("{:+.1} %", 100.0 * share)
}

/// A size that nothing is larger than, rounded up.
fn at_most(share: f64) -> String {
    format!("{:.1} %", (1e3 * share - 1e-6).ceil() / 10.0)
}

fn confidence_text(confidence: f64) -> String {
    let percent = 100.0 * confidence;
    if (percent - percent.round()).abs() < 1e-6 { format!("{percent:.0} % CI") } else { format!("{percent:.1} % CI") }
}

/// Three significant digits, thousands set apart.
fn number(value: f64) -> String {
    if value.abs() >= 999.5 {
        let digits = format!("{:.0}", value.abs());
        let groups: Vec<&str> =
            digits.as_bytes().rchunks(3).rev().filter_map(|g| std::str::from_utf8(g).ok()).collect();
        return format!("{}{}", if value < 0.0 { "-" } else { "" }, groups.join(","));
    }
    let decimals = if value == 0.0 { 2 } else { (2.0 - value.abs().log10().floor()).clamp(0.0, 6.0) as usize };
    format!("{value:.decimals$}")
}

/// A whole number, thousands set apart.
pub(super) fn whole(value: f64) -> String {
    if value.abs() >= 999.5 { number(value) } else { format!("{value:.0}") }
}

/// A value of B and one of A with as many digits as it takes to tell them apart.
fn two_numbers(b: f64, a: f64) -> String {
    let (text_b, text_a) = (number(b), number(a));
    if text_a != text_b || a == b {
        return format!("{text_b} vs {text_a}");
    }
    for decimals in 1..8 {
        let (text_b, text_a) = (format!("{b:.decimals$}"), format!("{a:.decimals$}"));
        if text_a != text_b {
            return format!("{text_b} vs {text_a}");
        }
    }
    format!("{text_b} vs {text_a}")
}

/// `B (run-b)`, or `B` alone where it has no name of its own.
fn subject(names: &[String; 2]) -> String {
    let [_, b] = names;
    if b == "B" || b.is_empty() { "B".to_owned() } else { format!("B ({b})") }
}

/// An interval with its confidence in the words of [`speed`], to follow a figure; what to say where there are too few runs.
fn sure(quantity: &Quantity, evidence: Evidence) -> String {
    match quantity.interval {
        Some(i) if says_something(&i) => {
            format!(", {} {}", confidence_text(quantity.confidence), speed_interval(quantity.time_change, i))
        }
        Some(_) if quantity.runs == [1, 1] => ", interval not known".to_owned(),
        Some(_) => format!(", interval {}", not_known(quantity.runs, evidence)),
        None => String::new(),
    }
}

/// The same as signed changes of time.
fn sure_signed(quantity: &Quantity, evidence: Evidence) -> String {
    match quantity.interval {
        Some(i) if says_something(&i) => {
            format!(", {} {} to {}", confidence_text(quantity.confidence), signed(i.low), signed(i.high))
        }
        Some(_) if quantity.runs == [1, 1] => ", interval not known".to_owned(),
        Some(_) => format!(", interval {}", not_known(quantity.runs, evidence)),
        None => String::new(),
    }
}

/// Of an interval so wide that its ends say nothing: what it takes to know more.
fn not_known([a, b]: [usize; 2], evidence: Evidence) -> String {
    match evidence {
        Evidence::Pairs => format!("not known with n={a} pairs"),
        _ if [a, b] == [1, 1] => "not known with one run a side".to_owned(),
        _ if a == b => format!("not known with n={a} runs a side"),
        _ => format!("not known with {a} and {b} runs"),
    }
}

fn runs_text(quantity: &Quantity, evidence: Evidence) -> String {
    match (evidence, quantity.runs) {
        (Evidence::Pairs, [n, _]) => format!("means of {n} interleaved pairs"),
        (_, [1, 1]) => "one run a side".to_owned(),
        (_, [a, b]) if a == b => format!("means of {a} runs a side"),
        (_, [a, b]) => format!("means of {a} and {b} runs"),
    }
}

fn values_text(quantity: &Quantity) -> String {
    format!("{} {}", two_numbers(quantity.b, quantity.a), quantity.unit)
}

/// A kind of iteration with its share and its change, to stand within a sentence.
fn kind_text(kind: &Quantity, evidence: Evidence) -> String {
    let (of, interval) = (kind_name(kind), sure(kind, evidence));
    format!("{of} are {}: {}{interval}", speed(kind.time_change), values_text(kind))
}

fn kind_name(kind: &Quantity) -> String {
    let share = kind.share.map_or(String::new(), |share| format!(" ({:.0} % of the time)", 100.0 * share));
    format!("{} iterations{share}", kind.name)
}

/// The verdict of whole runs; `explained` says which ops account for a difference.
pub(super) fn of_runs(runs: &WholeRuns, names: &[String; 2], explained: Option<String>) -> Verdict {
    let subject = subject(names);
    let mut verdict = Verdict { outcome: runs.outcome, evidence: evidence_of_runs(runs), ..Verdict::default() };
    let whole = runs.figures.first();
    verdict.interval = runs.interval();
    verdict.confidence = verdict.interval.map(|_| runs.evidence.confidence());
    verdict.time_change = runs.change();
    if runs.outcome == Outcome::NotComparable {
        verdict.reasons.clone_from(&runs.reasons);
        verdict.sentence = format!("Not comparable: {}.", runs.reasons.join("; and "));
        return verdict;
    }
    let mut sentence = match (runs.outcome, runs.decided_by, whole) {
        (Outcome::Faster | Outcome::Slower, DecidedBy::WholeRuns, Some(figure)) => {
            format!(
                "{subject} is {}: {} ({}{})",
                speed(figure.time_change),
                values_text(figure),
                runs_text(figure, runs.evidence),
                sure(figure, runs.evidence)
            )
        }
        (Outcome::Faster | Outcome::Slower, ..) => {
            let kinds: Vec<String> = runs.deciding().into_iter().map(|kind| kind_text(kind, runs.evidence)).collect();
            let change = runs.change().unwrap_or(0.0);
            let sure = verdict.interval.map_or(String::new(), |i| {
                format!(" ({} {})", confidence_text(runs.evidence.confidence()), speed_interval(change, i))
            });
            let not_told: Vec<String> = runs
                .open()
                .into_iter()
                .map(|kind| {
                    format!("{} {}{}", kind_name(kind), signed(kind.time_change), sure_signed(kind, runs.evidence))
                })
                .collect();
            let not_told = match not_told.as_slice() {
                [] => String::new(),
                kinds => format!("; not told of {}", kinds.join(", and ")),
            };
            let open = match whole {
                Some(figure) if figure.interval.is_some() => format!(
                    "; whole runs alone do not tell ({} time{})",
                    signed(figure.time_change),
                    sure_signed(figure, runs.evidence)
                ),
                _ => String::new(),
            };
            format!(
                "{subject} is {}, its kinds of iteration added up{sure}: {}{not_told}{open}",
                speed(change),
                kinds.join(", and ")
            )
        }
        (Outcome::NoDifference, _, Some(figure)) => {
            let largest = figure.interval.map_or(runs.margin, largest).max(runs.resolution);
            format!("No difference larger than {}: {}", at_most(largest), values_and_change(figure, runs.evidence))
        }
        (_, _, Some(figure)) => format!("Cannot tell: {}", values_and_change(figure, runs.evidence)),
        (_, _, None) => {
            let kinds: Vec<String> = runs
                .kinds
                .iter()
                .map(|kind| {
                    format!("{} per {} iteration {}", two_numbers(kind.b, kind.a), kind.name, signed(kind.time_change))
                })
                .collect();
            format!("Cannot tell: {}", kinds.join(", "))
        }
    };
    let disagreeing = runs.disagreeing();
    if !disagreeing.is_empty() {
        let kinds: Vec<String> = disagreeing.into_iter().map(|kind| kind_text(kind, runs.evidence)).collect();
        sentence.push_str(&format!("; but {}", kinds.join(", and ")));
    }
    if let Some(why) = runs.why_not.as_ref().filter(|_| runs.outcome == Outcome::CannotTell) {
        sentence.push_str(&format!("; {why}"));
        verdict.reasons.push(why.clone());
    }
    sentence.push('.');
    verdict.explanation = explained.filter(|_| runs.outcome.is_difference());
    if let Some(explanation) = &verdict.explanation {
        sentence.push_str(&format!(" {explanation}"));
    }
    verdict.sentence = sentence;
    verdict
}

fn values_and_change(figure: &Quantity, evidence: Evidence) -> String {
    let interval = sure_signed(figure, evidence);
    format!("{} ({} time{interval}, {})", values_text(figure), signed(figure.time_change), runs_text(figure, evidence))
}

fn evidence_of_runs(runs: &WholeRuns) -> Vec<String> {
    let mut lines = Vec::new();
    let spread = runs.spread.map_or(String::new(), |spread| format!("{:.1} %", 100.0 * spread));
    let stored = |runs: &WholeRuns| {
        runs.stored.as_ref().map_or(String::new(), |stored| {
            format!(
                "{} A/A runs of this model and length on this machine, {} (strobe doctor --noise)",
                stored.runs, stored.age
            )
        })
    };
    match runs.evidence {
        Evidence::Pairs => lines.push(format!(
            "Spread: ratios of neighbouring runs differ by {spread} (standard deviation, n={}).",
            runs.counts[0]
        )),
        Evidence::Repeats => lines.push(format!(
            "Spread: equal runs differ by {spread} (standard deviation, {} and {} runs).",
            runs.counts[0], runs.counts[1]
        )),
        Evidence::RepeatsAndStored => lines.push(format!(
            "Spread: equal runs differ by {spread} (standard deviation; {} and {} runs, backed by {}).",
            runs.counts[0],
            runs.counts[1],
            stored(runs)
        )),
        Evidence::Stored => {
            lines.push(format!("Spread: equal runs differ by {spread} (standard deviation of {}).", stored(runs)))
        }
        Evidence::Assumed | Evidence::Nothing => {}
    }
    if runs.one_process {
        lines.push(format!(
            "The repeats of a side ran in one process: processes are taken to differ by up to {:.0} % beside that. `strobe ab` starts each run anew.",
            100.0 * BETWEEN_PROCESSES
        ));
    }
    if let Some(smallest) = runs.smallest_visible {
        let size = match says_something(&Range { low: 0.0, high: smallest }) {
            true => at_most(smallest),
            false => not_known(runs.counts, runs.evidence),
        };
        lines.push(format!("Smallest difference that this comparison sees in 4 of 5 cases (80 % power): {size}."));
    }
    if let Some(needed) = runs.runs_needed.filter(|_| runs.outcome == Outcome::CannotTell && runs.why_not.is_none()) {
        let have = runs.counts[0].min(runs.counts[1]);
        let what = if runs.evidence == Evidence::Pairs { "pairs" } else { "runs a side" };
        lines.push(format!(
            "About {} more {what} would narrow the interval to ±{:.1} % and settle it.",
            needed.saturating_sub(have).max(1),
            50.0 * runs.margin
        ));
    }
    lines.extend(runs.set_aside.iter().map(|text| format!("Excluded: {text}.")));
    lines.extend(runs.notes.iter().map(|text| format!("Note: {text}.")));
    lines
}

/// What groups of iterations say as a whole, where nothing is known of whole runs.
pub(super) struct Total {
    /// The change of the time of an iteration, groups weighted alike on both sides.
    pub change: Option<f64>,
    /// Its interval.
    pub interval: Option<Range>,
    /// The share of the time in groups without an interval.
    pub unjudged: f64,
}

/// Adds up groups: the sum of their changes, with an interval that holds what differs within runs and, as a share of the
/// whole, between them.
pub(super) fn total(groups: &[GroupComparison], within: &[Option<Range>], between: f64) -> Total {
    let time = |g: &GroupComparison| g.weight * (g.a_wall_ns + g.b_wall_ns);
    let all: f64 = groups.iter().map(time).sum();
    let (mut a, mut delta, mut below, mut above, mut unjudged) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (group, within) in groups.iter().zip(within) {
        a += group.weight * group.a_wall_ns;
        delta += group.weight * group.delta_ns;
        match within {
            Some(range) => {
                below += (group.weight * (group.delta_ns - range.low)).powi(2);
                above += (group.weight * (range.high - group.delta_ns)).powi(2);
            }
            None => unjudged += time(group),
        }
    }
    let unjudged = if all > 0.0 { unjudged / all } else { 1.0 };
    if a <= 0.0 {
        return Total { change: None, interval: None, unjudged };
    }
    let between = between * (a + delta / 2.0);
    let reach = |squares: f64| (squares + between * between).sqrt();
    let interval = Range { low: (delta - reach(below)) / a, high: (delta + reach(above)) / a };
    Total { change: Some(delta / a), interval: (unjudged <= MOST_UNJUDGED).then_some(interval), unjudged }
}

/// The verdict of groups of iterations, for traces of which nothing else is known.
pub(super) fn of_groups(
    comparison: &Comparison,
    total: &Total,
    margin: f64,
    evidence: Vec<String>,
    blockers: &[String],
    explained: Option<String>,
) -> Verdict {
    if !blockers.is_empty() || comparison.groups.is_empty() {
        let mut reasons = blockers.to_vec();
        if reasons.is_empty() {
            reasons.push("the sides have nothing in common".to_owned());
        }
        let sentence = format!("Not comparable: {}.", reasons.join("; and "));
        return Verdict { outcome: Outcome::NotComparable, sentence, reasons, ..Verdict::default() };
    }
    let outcome = outcome_of(total.interval, margin, 0.0);
    let subject = subject(&comparison.names);
    let (a, b) = (comparison.a_wall_ns, comparison.b_wall_ns);
    let unit = Scale::of(a.max(b));
    let per = match comparison.basis {
        Basis::Iterations => "per iteration",
        Basis::WholeWindow => "for the whole window",
    };
    let walls = format!("{} vs {} {per}", unit.number(b), unit.with_unit(a));
    let counts = |of: fn(&GroupComparison) -> usize| comparison.groups.iter().map(of).sum::<usize>();
    let n = match comparison.basis {
        Basis::Iterations => {
            format!(", {} and {} iterations", counts(|g| g.b_iterations), counts(|g| g.a_iterations))
        }
        Basis::WholeWindow => String::new(),
    };
    let change = total.change.unwrap_or(0.0);
    let ci = confidence_text(Evidence::Assumed.confidence());
    let signed_interval =
        total.interval.map_or(String::new(), |i| format!(", {ci} {} to {}", signed(i.low), signed(i.high)));
    let mut sentence = match (outcome, total.interval) {
        (Outcome::Faster | Outcome::Slower, Some(interval)) => {
            format!("{subject} is {}: {walls} ({ci} {}{n})", speed(change), speed_interval(change, interval))
        }
        (Outcome::NoDifference, Some(interval)) => {
            format!(
                "No difference larger than {}: {walls} ({}{signed_interval}{n})",
                at_most(largest(interval)),
                signed(change)
            )
        }
        _ => format!("Cannot tell: {walls} ({}{signed_interval}{n})", signed(change)),
    };
    let mut reasons = Vec::new();
    let per_step = [|g: &GroupComparison| g.weight * g.a_kernels, |g: &GroupComparison| g.weight * g.b_kernels];
    let [in_a, in_b] = per_step.map(|of| comparison.groups.iter().map(of).sum::<f64>());
    if comparison.basis == Basis::Iterations && (in_a - in_b).abs() > OTHER_WORK * in_a.max(in_b) {
        sentence.push_str(&format!("; B runs {} kernels per step, A {}", whole(in_b), whole(in_a)));
    }
    if let Some(work) = &comparison.work {
        sentence.push_str(&format!("; it is not known what a step is, so {}", work.sentence()));
    }
    if outcome == Outcome::CannotTell && total.interval.is_none() {
        let why = comparison.groups.iter().find_map(|g| g.no_interval.clone()).unwrap_or_default();
        sentence.push_str(&format!("; {why}"));
        reasons.push(why);
    }
    // Parts that disagree belong into the same sentence.
    let time = |g: &GroupComparison| g.weight * (g.a_wall_ns + g.b_wall_ns);
    let all: f64 = comparison.groups.iter().map(time).sum();
    let against: Vec<String> = comparison
        .groups
        .iter()
        .filter(|g| g.outcome.is_difference() && g.outcome != outcome && time(g) >= SMALL_GROUP * all)
        .map(|g| {
            let unit = Scale::of(g.a_wall_ns.max(g.b_wall_ns));
            let (share, speed) = (100.0 * time(g) / all, speed(g.change.unwrap_or(0.0)));
            format!(
                "{} ({share:.0} % of the time) is {speed}: {} vs {}",
                g.name,
                unit.number(g.b_wall_ns),
                unit.with_unit(g.a_wall_ns)
            )
        })
        .collect();
    if !against.is_empty() {
        sentence.push_str(&format!("; but {}", against.join(", and ")));
    }
    if total.unjudged > 0.0 && total.interval.is_some() {
        sentence.push_str(&format!("; {:.0} % of the time is in iterations too few to judge", 100.0 * total.unjudged));
    }
    sentence.push('.');
    let explanation = explained.filter(|_| outcome.is_difference());
    if let Some(explanation) = &explanation {
        sentence.push_str(&format!(" {explanation}"));
    }
    Verdict {
        outcome,
        sentence,
        explanation,
        evidence,
        time_change: total.change,
        interval: total.interval,
        confidence: total.interval.map(|_| Evidence::Assumed.confidence()),
        total_change: comparison.work.as_ref().filter(|work| work.ratio.is_some()).map(|work| work.total_change),
        reasons,
    }
}

/// Which parts account for the difference of an iteration: `Attention saves 3.23 ms per iteration, the rest adds 1.07 ms.`
pub(super) fn explanation(comparison: &Comparison, where_from: &str) -> Option<String> {
    let delta = comparison.b_wall_ns - comparison.a_wall_ns;
    let unit = Scale::of(comparison.a_wall_ns.max(comparison.b_wall_ns));
    let moved = |ns: f64| {
        let verb = if ns < 0.0 { "saves" } else { "adds" };
        format!("{verb} {}", unit.short(ns.abs()))
    };
    // What goes the way of the whole explains it; the largest such part is the cause.
    let main = comparison
        .by_category
        .iter()
        .filter(|part| part.delta_ns * delta > 0.0)
        .max_by(|x, y| x.delta_ns.abs().total_cmp(&y.delta_ns.abs()))?;
    let rest = delta - main.delta_ns;
    let group = comparison.groups.iter().max_by(|x, y| (x.weight * x.a_wall_ns).total_cmp(&(y.weight * y.a_wall_ns)));
    let why = group.and_then(|group| {
        let part = group.parts.iter().find(|part| part.part == main.name && part.delta_ns * main.delta_ns > 0.0)?;
        cause(group, part)
    });
    let why = why.map_or(String::new(), |why| format!(" ({why})"));
    let place = where_alone(&comparison.groups, &main.name)
        .map_or(String::new(), |kind| format!(", in {kind} iterations only"));
    let mut text = format!("{} {} per {where_from}{place}{why}", capitalised(&main.name), moved(main.delta_ns));
    if rest.abs() > 0.02 * delta.abs() {
        text.push_str(&format!(", the rest {}", moved(rest)));
    }
    text.push('.');
    Some(text)
}

/// A kind of iteration that accounts for at least this much of a change has it alone.
const ALONE: f64 = 0.9;

/// The one kind of iteration in which a part changed, where others take time too.
fn where_alone(groups: &[GroupComparison], part: &str) -> Option<IterationKind> {
    let mut kinds: BTreeMap<IterationKind, [f64; 2]> = BTreeMap::new();
    for group in groups {
        let change = group.parts.iter().find(|p| p.part == part).map_or(0.0, |p| p.delta_ns);
        let [time, moved] = kinds.entry(group.kind?).or_default();
        *time += group.weight * (group.a_wall_ns + group.b_wall_ns);
        *moved += group.weight * change;
    }
    let sum = |of: fn(&[f64; 2]) -> f64| kinds.values().map(of).sum::<f64>();
    let (time, moved) = (sum(|kind| kind[0]), sum(|kind| kind[1].abs()));
    let (kind, [_, most]) = kinds.iter().max_by(|x, y| x.1[1].abs().total_cmp(&y.1[1].abs()))?;
    let others_matter = kinds.iter().any(|(other, [own, _])| other != kind && *own >= SMALL_GROUP * time);
    (others_matter && most.abs() >= ALONE * moved).then_some(*kind)
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// e.g. `decode, 8 requests: B 12.0 % slower, 7.50 vs 6.70 ms (95 % CI +0.70 to +0.90 ms, 20 and 20 iterations). Parts: ...`
pub(super) fn group_sentence(group: &GroupComparison, basis: Basis) -> String {
    let unit = Scale::of(group.a_wall_ns.max(group.b_wall_ns));
    let head = match (group.outcome, group.change) {
        (Outcome::Faster | Outcome::Slower, Some(change)) => format!("{}: B {}", group.name, speed(change)),
        (outcome, _) => format!("{}: {}", group.name, outcome.as_str()),
    };
    let walls = format!("{} vs {}", unit.number(group.b_wall_ns), unit.with_unit(group.a_wall_ns));
    let sure = match (group.interval_ns, &group.no_interval) {
        (Some(i), _) => {
            let (low, high) = (unit.signed(i.low), unit.with_sign_and_unit(i.high));
            format!("95 % CI {low} to {high}, {} and {} iterations", group.b_iterations, group.a_iterations)
        }
        (None, Some(why)) => why.clone(),
        (None, None) => String::new(),
    };
    let mut sentence = format!("{head}, {walls} ({sure}).");
    let because = moved_parts(group);
    if !because.is_empty() {
        sentence.push_str(&format!(" Parts: {}.", because.join(", ")));
    }
    if group.a_kernels + group.b_kernels == 0.0 {
        return sentence;
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

/// The parts that moved most, with the kernels behind them. Parts whose interval holds 0 have not been shown to move.
fn moved_parts(group: &GroupComparison) -> Vec<String> {
    let moved: f64 = group.parts.iter().map(|p| p.delta_ns.abs()).sum();
    let worth_saying = |part: &&PartChange| {
        part.delta_ns.abs() > 0.1 * moved
            && part.delta_ns.abs() > 0.002 * group.a_wall_ns.max(group.b_wall_ns)
            && part.interval_ns.is_none_or(|interval| interval.excludes_zero())
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
    let number = |count: f64| (count * 10.0).round() / 10.0;
    let calls = |count: f64| format!("{} call{} of", number(count), if number(count) == 1.0 { "" } else { "s" });
    let [a, b] = unlike(&kernel.a, &kernel.b);
    Some(match (a, b) {
        (Some(a), Some(b)) if kernel.is_replacement() => {
            let (a, b) = short_pair(a, b);
            format!("{} {a} replaced by {} of {b}", calls(kernel.a_count), number(kernel.b_count))
        }
        (Some(_), Some(_)) if kernel.count_changed() => {
            format!("{}: {} -> {} calls", short(kernel.label()), number(kernel.a_count), number(kernel.b_count))
        }
        (Some(_), Some(_)) => format!("{} {}", calls(kernel.b_count), short(kernel.label())),
        (Some(a), None) => format!("{} {} in A, none in B", calls(kernel.a_count), short(a)),
        (None, Some(b)) => format!("{} {} in B, none in A", calls(kernel.b_count), short(b)),
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
    pub(super) fn of(ns: f64) -> Self {
        let scales = [(1e9, "s"), (1e6, "ms"), (1e3, "us")];
        let fits = scales.into_iter().find(|(scale, _)| ns.abs() >= *scale).unwrap_or((1.0, "ns"));
        Self { ns: fits.0, unit: fits.1 }
    }

    pub(super) fn number(self, ns: f64) -> String {
        format!("{:.*}", self.decimals(), self.rounded(ns))
    }

    /// With three significant digits.
    pub(super) fn short(self, ns: f64) -> String {
        format!("{} {}", number(ns / self.ns), self.unit)
    }

    pub(super) fn signed(self, ns: f64) -> String {
        format!("{:+.*}", self.decimals(), self.rounded(ns))
    }

    pub(super) fn with_unit(self, ns: f64) -> String {
        format!("{} {}", self.number(ns), self.unit)
    }

    pub(super) fn with_sign_and_unit(self, ns: f64) -> String {
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
