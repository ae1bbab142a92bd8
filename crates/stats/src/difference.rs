//! How much one side differs from the other, and how well that is known.
//!
//! Times and rates are compared as ratios: everything here is about logarithms, in which `B takes 1.2 times as long` and
//! `A takes 1.2 times as long` are the same distance. The unit of evidence is a run.

use serde::{Deserialize, Serialize};

use crate::{Range, effective_sample_size, mean, sample_std_dev, student_quantile};

/// How much equal runs differ: the standard deviation of the logarithm of a quantity, and how well it is known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Standard deviation of the logarithm: 0.023 is 2.3 %.
    pub sd: f64,
    /// Degrees of freedom behind it.
    pub freedom: f64,
}

impl Spread {
    /// Both together, each with the weight of its degrees of freedom.
    #[must_use]
    pub fn pooled_with(&self, other: &Spread) -> Spread {
        let freedom = self.freedom + other.freedom;
        let squares = self.freedom * self.sd.powi(2) + other.freedom * other.sd.powi(2);
        Spread { sd: (squares / freedom).sqrt(), freedom }
    }
}

/// The spread within groups of equal runs, pooled; none where no group has two.
#[must_use]
pub fn pooled_spread(groups: &[&[f64]]) -> Option<Spread> {
    let of = |group: &&[f64]| {
        let logs: Vec<f64> = group.iter().map(|value| value.ln()).collect();
        sample_std_dev(&logs).filter(|sd| sd.is_finite()).map(|sd| Spread { sd, freedom: (logs.len() - 1) as f64 })
    };
    groups.iter().filter_map(of).reduce(|all, group| all.pooled_with(&group))
}

/// A difference as an estimate: the logarithm of the ratio B / A.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// ln(B / A).
    pub log_ratio: f64,
    /// Its standard error.
    pub standard_error: f64,
    /// Degrees of freedom behind the standard error.
    pub freedom: f64,
}

impl Estimate {
    /// B / A.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.log_ratio.exp()
    }

    fn quantile(&self, confidence: f64) -> f64 {
        student_quantile(f64::midpoint(1.0, confidence), self.freedom)
    }

    /// Half the width of the interval with this confidence, as a difference of logarithms.
    #[must_use]
    pub fn half_width(&self, confidence: f64) -> f64 {
        // No spread at all needs no multiple of it, however few degrees of freedom there are.
        if self.standard_error > 0.0 { self.quantile(confidence) * self.standard_error } else { 0.0 }
    }

    /// The interval of ln(B / A).
    #[must_use]
    pub fn interval(&self, confidence: f64) -> Range {
        let half = self.half_width(confidence);
        Range { low: self.log_ratio - half, high: self.log_ratio + half }
    }

    /// The interval of B / A.
    #[must_use]
    pub fn ratio_interval(&self, confidence: f64) -> Range {
        let Range { low, high } = self.interval(confidence);
        Range { low: low.exp(), high: high.exp() }
    }

    /// The smallest true difference, as a share, that such a measurement tells from none with this `power`.
    #[must_use]
    pub fn smallest_visible(&self, confidence: f64, power: f64) -> f64 {
        let beyond = student_quantile(power, self.freedom) * self.standard_error;
        if self.standard_error > 0.0 { (self.half_width(confidence) + beyond).exp_m1() } else { 0.0 }
    }

    /// The same difference with `half` added to either end of its 95 % interval: what is not in the data.
    #[must_use]
    pub fn widened_by(&self, half: f64) -> Estimate {
        let own = self.half_width(0.95);
        let whole = (own.powi(2) + half.powi(2)).sqrt();
        // What is assumed has no degrees of freedom of its own; it counts as well known.
        let freedom = if own > half { self.freedom } else { f64::from(u32::MAX) };
        Estimate { log_ratio: self.log_ratio, standard_error: whole / student_quantile(0.975, freedom), freedom }
    }
}

/// Degrees of freedom that the spread of earlier runs counts for at most beside repeats of now: how much equal runs differ
/// changes from hour to hour on a shared machine, however many runs an hour had.
const STORED_FREEDOM: f64 = 8.0;

/// Repeats that differ more than this many times as much as earlier runs did say that the machine is another one today (a
/// variance ratio of 4 is beyond what three runs a side show by chance in 95 of 100 cases).
const ANOTHER_SPREAD: f64 = 2.0;

/// Compares independent runs. `stored` is what equal runs showed before: it stands in where a side has a single run, and
/// backs up few repeats, which alone say little about their own spread. Repeats that differ much more than it are taken by
/// themselves. None without any spread, of no runs, or of values that have no logarithm.
#[must_use]
pub fn unpaired(a: &[f64], b: &[f64], stored: Option<Spread>) -> Option<Estimate> {
    let centre =
        |side: &[f64]| mean(&side.iter().map(|value| value.ln()).collect::<Vec<_>>()).filter(|x| x.is_finite());
    let log_ratio = centre(b)? - centre(a)?;
    let spread = match (pooled_spread(&[a, b]), stored) {
        (Some(own), Some(stored)) if own.sd <= ANOTHER_SPREAD * stored.sd => {
            own.pooled_with(&Spread { freedom: stored.freedom.min(STORED_FREEDOM), ..stored })
        }
        (Some(own), _) => own,
        (None, stored) => stored?,
    };
    let runs = 1.0 / a.len() as f64 + 1.0 / b.len() as f64;
    Some(Estimate { log_ratio, standard_error: spread.sd * runs.sqrt(), freedom: spread.freedom })
}

/// Fewer pairs than this say too little about the correlation of neighbours.
const ENOUGH_FOR_CORRELATION: usize = 8;

/// Compares pairs of neighbouring runs, `(a, b)` each: what both of a pair share cancels. Where neighbouring pairs resemble
/// each other (a drift), they count as the fewer that they are worth. None of fewer than two pairs.
#[must_use]
pub fn paired(pairs: &[(f64, f64)]) -> Option<Estimate> {
    let logs: Vec<f64> = pairs.iter().map(|(a, b)| (b / a).ln()).collect();
    let (log_ratio, sd) = (mean(&logs)?, sample_std_dev(&logs)?);
    if !log_ratio.is_finite() {
        return None;
    }
    let count = logs.len() as f64;
    let worth = match effective_sample_size(&logs) {
        // What white noise shows by chance is no correlation: 1.64 standard deviations of it.
        Some(worth) if logs.len() >= ENOUGH_FOR_CORRELATION => {
            let r = (count - worth) / (count + worth);
            if r > 1.64 / count.sqrt() { worth.max(2.0) } else { count }
        }
        _ => count,
    };
    Some(Estimate { log_ratio, standard_error: sd / worth.sqrt(), freedom: (worth - 1.0).max(1.0) })
}

/// No more runs than this are ever asked for.
const MOST_RUNS: usize = 100_000;

/// Runs a side (of two independent sides) with which the half width of the interval is at most `half`.
#[must_use]
pub fn needed_runs(spread: &Spread, half: f64, confidence: f64) -> usize {
    needed(std::f64::consts::SQRT_2 * spread.sd, half, confidence, |n| 2.0 * (n - 1.0))
}

/// Pairs with which the half width of the interval is at most `half`, where ratios within pairs have this spread.
#[must_use]
pub fn needed_pairs(sd: f64, half: f64, confidence: f64) -> usize {
    needed(sd, half, confidence, |n| n - 1.0)
}

fn needed(sd: f64, half: f64, confidence: f64, freedom: impl Fn(f64) -> f64) -> usize {
    let wide = |n: usize| {
        let quantile = student_quantile(f64::midpoint(1.0, confidence), freedom(n as f64));
        quantile * sd / (n as f64).sqrt() > half
    };
    // The width falls with n: find the end by doubling, then halve.
    let mut high = 2;
    while wide(high) && high < MOST_RUNS {
        high *= 2;
    }
    let mut low = 2;
    while low < high {
        let middle = low.midpoint(high);
        if wide(middle) { low = middle + 1 } else { high = middle }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rng;

    fn runs(rng: &mut Rng, count: usize, centre: f64, sd: f64) -> Vec<f64> {
        (0..count).map(|_| centre * (sd * rng.normal()).exp()).collect()
    }

    /// The share of trials in which the interval of B / A holds `truth`.
    fn coverage(truth: f64, confidence: f64, mut trial: impl FnMut(&mut Rng) -> Estimate) -> f64 {
        let mut rng = Rng::new(11, "coverage");
        let held = (0..2000).filter(|_| {
            let Range { low, high } = trial(&mut rng).ratio_interval(confidence);
            low <= truth && truth <= high
        });
        held.count() as f64 / 2000.0
    }

    #[test]
    fn intervals_hold_the_truth_as_often_as_they_say() {
        for (n, confidence) in [(2, 0.95), (3, 0.95), (3, 0.99), (10, 0.95)] {
            let share = coverage(1.1, confidence, |rng| {
                let (a, b) = (runs(rng, n, 100.0, 0.04), runs(rng, n, 110.0, 0.04));
                unpaired(&a, &b, None).unwrap()
            });
            assert!((share - confidence).abs() < 0.02, "{n} runs a side: {share}");
        }
        let share = coverage(1.1, 0.95, |rng| {
            let drift: Vec<f64> = (0..6).map(|i| 1.0 + 0.1 * f64::from(i)).collect();
            let pair = |d: &f64| (d * runs(rng, 1, 100.0, 0.02)[0], d * runs(rng, 1, 110.0, 0.02)[0]);
            paired(&drift.iter().map(pair).collect::<Vec<_>>()).unwrap()
        });
        assert!((share - 0.95).abs() < 0.02, "pairs: {share}");
    }

    #[test]
    fn one_run_a_side_stands_on_what_equal_runs_showed() {
        let mut stored_rng = Rng::new(3, "stored");
        let share = coverage(1.0, 0.99, |rng| {
            let before = runs(&mut stored_rng, 10, 100.0, 0.04);
            let stored = pooled_spread(&[&before]);
            unpaired(&runs(rng, 1, 100.0, 0.04), &runs(rng, 1, 100.0, 0.04), stored).unwrap()
        });
        assert!((share - 0.99).abs() < 0.01, "{share}");
        assert_eq!(unpaired(&[1.0], &[2.0], None), None, "without any spread nothing can be told");
        assert_eq!(unpaired(&[], &[2.0], Some(Spread { sd: 0.1, freedom: 9.0 })), None);
        assert_eq!(unpaired(&[0.0], &[2.0], Some(Spread { sd: 0.1, freedom: 9.0 })), None);
    }

    #[test]
    fn repeats_that_differ_much_more_than_what_is_stored_are_taken_by_themselves() {
        let stored = Some(Spread { sd: 0.001, freedom: 9.0 });
        let noisy = unpaired(&[100.0, 110.0, 120.0], &[101.0, 111.0, 121.0], stored).unwrap();
        assert_eq!(noisy.freedom, 4.0);
        let quiet = unpaired(&[100.0, 100.01, 100.02], &[101.0, 101.01, 101.02], stored).unwrap();
        assert_eq!(quiet.freedom, 12.0);
    }

    #[test]
    fn few_repeats_lean_on_what_is_stored_and_false_alarms_stay_rare_on_a_noisier_day() {
        let mut stored_rng = Rng::new(5, "stored");
        let mut misses = |today: f64| {
            1.0 - coverage(1.0, 0.99, |rng| {
                let before = runs(&mut stored_rng, 20, 100.0, 0.02);
                let stored = pooled_spread(&[&before]);
                unpaired(&runs(rng, 3, 100.0, today), &runs(rng, 3, 100.0, today), stored).unwrap()
            })
        };
        let (same, noisier, twice) = (misses(0.02), misses(0.03), misses(0.04));
        // On a day twice as noisy as the stored one, 99 % becomes about 95 %.
        assert!(same < 0.012 && noisier < 0.045 && twice < 0.06, "{same} {noisier} {twice}");
        // Three runs alone would hardly ever show 10 % at a spread of 2 %; with what is stored they nearly always do.
        let stored = Some(Spread { sd: 0.02, freedom: 19.0 });
        let half = |stored| unpaired(&[98.0, 100.0, 102.0], &[98.0, 100.0, 102.0], stored).unwrap().half_width(0.99);
        assert!(half(stored) < 0.055 && half(None) > 0.07, "{} {}", half(stored), half(None));
    }

    #[test]
    fn exchanging_the_sides_mirrors_everything() {
        let (a, b) = ([3.0, 5.0, 4.0], [6.0, 7.0, 5.0, 8.0]);
        let (forth, back) = (unpaired(&a, &b, None).unwrap(), unpaired(&b, &a, None).unwrap());
        assert!((forth.log_ratio + back.log_ratio).abs() < 1e-12);
        assert!((forth.standard_error - back.standard_error).abs() < 1e-12);
    }

    #[test]
    fn pairs_that_drift_together_count_as_fewer() {
        let drifting: Vec<(f64, f64)> = (0..20).map(|i| (100.0, 100.0 + f64::from(i))).collect();
        let jumping: Vec<(f64, f64)> = (0..20).map(|i| (100.0, 100.0 + f64::from(i * 7 % 20))).collect();
        let (slow, white) = (paired(&drifting).unwrap(), paired(&jumping).unwrap());
        assert!(slow.standard_error > 2.0 * white.standard_error, "{slow:?} {white:?}");
        assert_eq!(paired(&[(1.0, 2.0)]), None);
    }

    #[test]
    fn the_smallest_visible_difference_is_seen_as_often_as_said() {
        let spread = Spread { sd: 0.03, freedom: 1e6 };
        let visible = unpaired(&[1.0], &[1.0], Some(spread)).unwrap().smallest_visible(0.95, 0.8);
        let mut rng = Rng::new(5, "power");
        let seen = (0..4000).filter(|_| {
            let (a, b) = (runs(&mut rng, 1, 1.0, 0.03), runs(&mut rng, 1, 1.0 + visible, 0.03));
            unpaired(&a, &b, Some(spread)).unwrap().interval(0.95).low > 0.0
        });
        let share = seen.count() as f64 / 4000.0;
        assert!((share - 0.8).abs() < 0.03, "{share}");
    }

    #[test]
    fn as_many_runs_as_the_width_needs() {
        let spread = Spread { sd: 0.04, freedom: 9.0 };
        let runs = needed_runs(&spread, 0.025, 0.95);
        let half = |n: usize| {
            let se = 0.04 * (2.0 / n as f64).sqrt();
            Estimate { log_ratio: 0.0, standard_error: se, freedom: 2.0 * (n as f64 - 1.0) }.half_width(0.95)
        };
        assert!(half(runs) <= 0.025 && half(runs - 1) > 0.025, "{runs}");
        assert_eq!(needed_pairs(0.0, 0.01, 0.95), 2);
        assert_eq!(needed_pairs(f64::INFINITY, 0.01, 0.95), needed_pairs(1e9, 0.01, 0.95));
    }

    #[test]
    fn what_is_assumed_widens_the_interval() {
        let exact = Estimate { log_ratio: 0.01, standard_error: 0.0, freedom: 1.0 };
        let wide = exact.widened_by(0.03);
        assert!((wide.half_width(0.95) - 0.03).abs() < 1e-6);
        let measured = Estimate { log_ratio: 0.01, standard_error: 0.02, freedom: 30.0 };
        let both = measured.widened_by(0.03).half_width(0.95);
        assert!((both - measured.half_width(0.95).hypot(0.03)).abs() < 1e-6);
    }
}
