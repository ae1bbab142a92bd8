//! One answer from whole runs and from the kinds of iteration in them.

use strobe_stats::{LogSpread, Range, needed_pairs, needed_runs};

use super::super::verdict::Outcome;
use super::{
    AddedUp, DecidedBy, Evidence, Quantity, RunFacts, Runs, TIMES_LOST, WholeRuns, outcome_of, says_something,
};

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
        self.added_up = self.add_up();
        if self.outcome == Outcome::CannotTell
            && let Some(AddedUp { interval, .. }) = self.added_up.filter(|all| self.allows(all.interval))
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

    /// The change of the whole as its parts show it. Each part has the weight of its time in A; ends of intervals add up,
    /// because what disturbs a run disturbs all parts of it. What no part covers is only known as whole runs limit it.
    fn add_up(&self) -> Option<AddedUp> {
        let whole = self.figures.first();
        let unknown = whole.and_then(|figure| figure.interval).filter(says_something).unwrap_or(UNSEEN);
        let known: Vec<(&Quantity, f64, Range)> =
            self.kinds.iter().filter_map(|kind| Some((kind, kind.share?, kind.interval?))).collect();
        let [a, b] = self.counts.map(|count| count as f64);
        // Shares are of the time of both sides; a part that got longer had less of A's.
        let parts = known.iter().map(|(kind, share, interval)| {
            (share * (a + b) / (a + b * (1.0 + kind.time_change)), kind.time_change, *interval)
        });
        let uncovered = (1.0 - known.iter().map(|(_, share, _)| share).sum::<f64>()).max(0.0);
        let rest = whole.map_or(0.0, |figure| figure.time_change).clamp(unknown.low, unknown.high);
        let parts: Vec<(f64, f64, Range)> = parts.chain([(uncovered, rest, unknown)]).collect();
        let weight: f64 = parts.iter().map(|part| part.0).sum();
        let sum = |of: fn(&(f64, f64, Range)) -> f64| parts.iter().map(|part| part.0 * of(part)).sum::<f64>() / weight;
        let found =
            AddedUp { change: sum(|p| p.1), interval: Range { low: sum(|p| p.2.low), high: sum(|p| p.2.high) } };
        (!known.is_empty() && found.change.is_finite()).then_some(found)
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
            DecidedBy::Iterations => self.added_up.map(|all| all.change),
        }
    }

    /// The interval of [`WholeRuns::change`]. Where kinds of iteration decided it reaches as far from zero as whole runs
    /// leave open: what is rare and long is in those alone.
    pub fn interval(&self) -> Option<Range> {
        let whole = self.figures.first().and_then(|figure| figure.interval);
        if self.decided_by == DecidedBy::WholeRuns {
            return whole;
        }
        let Range { low, high } = self.added_up?.interval;
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
