//! One answer from whole runs and from the kinds of iteration in them.

use strobe_stats::{LogSpread, Range, needed_pairs, needed_runs};

use super::super::verdict::Outcome;
use super::{DecidedBy, Evidence, Quantity, RunFacts, Runs, TIMES_LOST, WholeRuns, outcome_of, says_something};

/// The power of [`WholeRuns::smallest_visible`].
const POWER: f64 = 0.8;

/// What is not known of a part of the time, where whole runs do not limit it either: it may vanish, or take twice as long.
const UNSEEN: Range = Range { low: -1.0, high: 1.0 };

impl WholeRuns {
    /// Whole runs first; where they cannot tell, kinds of iteration.
    pub(super) fn conclude(&mut self, whole: &[Vec<&RunFacts>; 2], runs: &Runs) {
        let decided = self.figures.first();
        self.outcome = decided.map_or(Outcome::CannotTell, |figure| figure.outcome);
        if let Some(figure) = decided {
            self.spread = figure.spread;
            self.smallest_visible = figure.estimate.map(|e| e.smallest_visible(figure.confidence, POWER));
            let half = (self.margin / 2.0).max(1e-3);
            self.runs_needed = figure.spread.map(|sd| match self.evidence {
                Evidence::Pairs => needed_pairs(sd, half, figure.confidence),
                _ => needed_runs(&LogSpread { sd, freedom: 1.0 }, half, figure.confidence),
            });
        }
        if self.outcome == Outcome::CannotTell
            && let Some((_, interval)) = self.of_kinds().filter(|(_, interval)| self.allows(*interval))
        {
            let outcome = outcome_of(Some(interval), self.margin, self.resolution);
            if outcome.is_difference() && self.kinds.iter().any(|kind| kind.outcome == outcome) {
                (self.outcome, self.decided_by) = (outcome, DecidedBy::Iterations);
            }
        }
        if let Some(busy) = self.why_not.take() {
            // What was lost to the machine is in the interval; where that leaves nothing to say, it is the reason.
            if self.outcome.is_difference() {
                self.notes.push(format!("{busy}; the interval is wider by {TIMES_LOST} times what was lost"));
            } else {
                (self.outcome, self.why_not) = (Outcome::CannotTell, Some(busy));
            }
        }
        if self.outcome == Outcome::CannotTell && self.why_not.is_none() && self.evidence == Evidence::Nothing {
            let ended = whole.iter().any(Vec::is_empty);
            let what = if ended { "a run ended early, and how" } else { "how" };
            self.why_not = Some(format!("{what} much equal runs differ on this machine is not known; {}", runs.remedy));
        }
    }

    /// The change of the whole as its kinds of iteration show it, with its interval. What no kind covers is only known as
    /// whole runs limit it.
    fn of_kinds(&self) -> Option<(f64, Range)> {
        let sum = self.added_up.as_ref()?;
        let (covered, known) = (sum.share?.min(1.0), sum.interval?);
        let whole = self.figures.first();
        let open = whole.and_then(|figure| figure.interval).filter(says_something).unwrap_or(UNSEEN);
        let rest = whole.map_or(0.0, |figure| figure.time_change).clamp(open.low, open.high);
        let all = |known: f64, rest: f64| covered * known + (1.0 - covered) * rest;
        let change = all(sum.time_change, rest);
        let interval = Range { low: all(known.low, open.low), high: all(known.high, open.high) };
        change.is_finite().then_some((change, interval))
    }

    /// Whether whole runs leave room for a change.
    fn allows(&self, change: Range) -> bool {
        let whole = self.figures.first().and_then(|figure| figure.interval);
        whole.is_none_or(|whole| change.low <= whole.high && whole.low <= change.high)
    }

    /// The quantities that decided: the figure of whole runs, or the kinds of iteration.
    pub fn deciding(&self) -> Vec<&Quantity> {
        match self.decided_by {
            DecidedBy::WholeRuns => self.figures.first().into_iter().collect(),
            DecidedBy::Iterations => self.kinds.iter().filter(|kind| kind.outcome == self.outcome).collect(),
        }
    }

    /// How much longer B takes as a whole, as what decided says.
    pub fn change(&self) -> Option<f64> {
        match self.decided_by {
            DecidedBy::WholeRuns => self.figures.first().map(|figure| figure.time_change),
            DecidedBy::Iterations => self.of_kinds().map(|(change, _)| change),
        }
    }

    /// The interval of [`WholeRuns::change`]. Where kinds of iteration decided it reaches as far from zero as whole runs
    /// leave open: what is rare and long is in those alone.
    pub fn interval(&self) -> Option<Range> {
        let whole = self.figures.first().and_then(|figure| figure.interval);
        if self.decided_by == DecidedBy::WholeRuns {
            return whole;
        }
        let (_, Range { low, high }) = self.of_kinds()?;
        let open = whole.filter(says_something).unwrap_or(Range { low, high });
        Some(match self.outcome {
            Outcome::Slower => Range { low, high: high.max(open.high) },
            _ => Range { low: low.min(open.low), high },
        })
    }

    /// Kinds of iteration that differ the other way than the outcome says, or that differ where it says that nothing does.
    pub fn disagreeing(&self) -> Vec<&Quantity> {
        self.kinds.iter().filter(|kind| kind.outcome.is_difference() && kind.outcome != self.outcome).collect()
    }

    /// Kinds of iteration of which nothing can be told, where the others decided.
    pub fn open(&self) -> Vec<&Quantity> {
        let open = |kind: &&Quantity| self.decided_by == DecidedBy::Iterations && kind.outcome == Outcome::CannotTell;
        self.kinds.iter().filter(open).collect()
    }
}
