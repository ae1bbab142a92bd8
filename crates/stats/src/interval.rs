//! How far a number can be trusted: intervals that assume no distribution.

use serde::Serialize;

use crate::{PercentileRule, Rng, mean, percentile, sorted};

/// An interval that holds the true value with the stated confidence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// The confidence asked for, e.g. 0.95.
    pub confidence: f64,
}

/// The interval of percentile `q` from order statistics: ranks `l < u` with
/// `P(l <= Binomial(n, q) < u) >= confidence`, the error split evenly between the two ends.
///
/// None when so few values cannot bound that percentile (the p99 of 100 values has no upper end).
/// It takes the values as independent; neighbouring requests under load are not, so check
/// [`effective_sample_size`].
#[must_use]
pub fn percentile_interval(sorted: &[f64], q: f64, confidence: f64) -> Option<Interval> {
    if sorted.is_empty() || !(q > 0.0 && q < 1.0) || !(confidence > 0.0 && confidence < 1.0) {
        return None;
    }
    let tail = (1.0 - confidence) / 2.0;
    let probabilities = binomial(sorted.len(), q);
    // Ranks count from 1. `below` is P(B < rank) as the rank grows.
    let (mut below, mut lower, mut upper) = (0.0, 0, None);
    for (successes, probability) in probabilities.iter().enumerate() {
        if below <= tail {
            lower = successes;
        }
        if upper.is_none() && below >= 1.0 - tail {
            upper = Some(successes);
        }
        below += probability;
    }
    // Rank 0 is below the smallest value: the interval would be open on that side.
    let (low, high) = (lower.checked_sub(1)?, upper?.checked_sub(1)?);
    Some(Interval { low: *sorted.get(low)?, high: *sorted.get(high)?, confidence })
}

/// The probabilities of 0 to n successes. Weights grow from the mode outwards by the ratio of
/// neighbours, so nothing overflows and the far tails fade to 0.
fn binomial(n: usize, p: f64) -> Vec<f64> {
    let mode = (((n + 1) as f64 * p).floor() as usize).min(n);
    let odds = p / (1.0 - p);
    let mut weights = vec![0.0; n + 1];
    weights[mode] = 1.0;
    for k in mode..n {
        weights[k + 1] = weights[k] * odds * (n - k) as f64 / (k + 1) as f64;
    }
    for k in (0..mode).rev() {
        weights[k] = weights[k + 1] * (k + 1) as f64 / (odds * (n - k) as f64);
    }
    let total: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= total);
    weights
}

/// The percentile-bootstrap interval of any statistic; none of no values or no resamples.
#[must_use]
pub fn bootstrap_interval(
    values: &[f64],
    statistic: impl Fn(&[f64]) -> Option<f64>,
    resamples: usize,
    confidence: f64,
    seed: u64,
) -> Option<Interval> {
    if values.is_empty() || !(confidence > 0.0 && confidence < 1.0) {
        return None;
    }
    let mut rng = Rng::new(seed, "bootstrap");
    let mut resample = vec![0.0; values.len()];
    let mut estimates = Vec::with_capacity(resamples);
    for _ in 0..resamples {
        for slot in &mut resample {
            *slot = values[rng.below(values.len() as u64) as usize];
        }
        estimates.extend(statistic(&resample));
    }
    let estimates = sorted(&estimates);
    let tail = (1.0 - confidence) / 2.0;
    Some(Interval {
        low: percentile(&estimates, tail, PercentileRule::Linear)?,
        high: percentile(&estimates, 1.0 - tail, PercentileRule::Linear)?,
        confidence,
    })
}

/// How many independent values a series of neighbours is worth: `n(1-r)/(1+r)`, `r` the lag-1
/// autocorrelation, at most `n`. None of fewer than three values or of a constant series.
#[must_use]
pub fn effective_sample_size(series: &[f64]) -> Option<f64> {
    let mean = mean(series).filter(|_| series.len() >= 3)?;
    let total: f64 = series.iter().map(|v| (v - mean).powi(2)).sum();
    if total <= 0.0 {
        return None;
    }
    let lagged: f64 = series.windows(2).map(|w| (w[0] - mean) * (w[1] - mean)).sum();
    let r = (lagged / total).clamp(0.0, 1.0);
    Some((series.len() as f64 * (1.0 - r) / (1.0 + r)).max(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(n: usize) -> Vec<f64> {
        (1..=n).map(|v| v as f64).collect()
    }

    #[test]
    fn binomial_matches_small_cases_and_sums_to_one() {
        let four = binomial(4, 0.5);
        for (found, expected) in four.iter().zip([1.0, 4.0, 6.0, 4.0, 1.0]) {
            assert!((found * 16.0 - expected).abs() < 1e-12);
        }
        for (n, p) in [(1, 0.3), (100, 0.99), (20_000, 0.5)] {
            let sum: f64 = binomial(n, p).iter().sum();
            assert!((sum - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn the_textbook_interval_of_a_median() {
        // n = 100: ranks 40 and 61, coverage 0.9648.
        let interval = percentile_interval(&ramp(100), 0.5, 0.95).unwrap();
        assert_eq!((interval.low, interval.high), (40.0, 61.0));
    }

    #[test]
    fn ranks_keep_their_promise_for_many_sizes() {
        for n in [10usize, 37, 100, 999] {
            for q in [0.1, 0.5, 0.9, 0.95] {
                let Some(interval) = percentile_interval(&ramp(n), q, 0.95) else {
                    continue;
                };
                let covered: f64 = binomial(n, q)[interval.low as usize..interval.high as usize].iter().sum();
                assert!(covered >= 0.95, "{n} {q}: {covered}");
            }
        }
    }

    #[test]
    fn too_few_values_have_no_interval() {
        assert_eq!(percentile_interval(&ramp(100), 0.99, 0.95), None);
        assert!(percentile_interval(&ramp(2000), 0.99, 0.95).is_some());
        assert_eq!(percentile_interval(&[], 0.5, 0.95), None);
        assert_eq!(percentile_interval(&ramp(9), f64::NAN, 0.95), None);
    }

    #[test]
    fn bootstrap_of_a_mean_is_near_the_normal_interval() {
        let values = ramp(400);
        let interval = bootstrap_interval(&values, mean, 2000, 0.95, 1).unwrap();
        let half = 1.96 * crate::sample_std_dev(&values).unwrap() / 20.0;
        assert!((interval.low - (200.5 - half)).abs() < 1.5, "{interval:?}");
        assert!((interval.high - (200.5 + half)).abs() < 1.5, "{interval:?}");
        assert_eq!(bootstrap_interval(&[], mean, 10, 0.95, 1), None);
        assert_eq!(bootstrap_interval(&values, mean, 0, 0.95, 1), None);
    }

    #[test]
    fn correlated_series_are_worth_less() {
        let mut rng = Rng::new(3, "series");
        let white: Vec<f64> = (0..4000).map(|_| rng.normal()).collect();
        assert!(effective_sample_size(&white).unwrap() > 3700.0);
        let mut level = 0.0;
        let slow: Vec<f64> = white
            .iter()
            .map(|w| {
                level = 0.8 * level + w;
                level
            })
            .collect();
        // (1 - 0.8)/(1 + 0.8) of 4000 is 444.
        let size = effective_sample_size(&slow).unwrap();
        assert!((size - 444.0).abs() < 80.0, "{size}");
        assert_eq!(effective_sample_size(&[1.0, 1.0, 1.0]), None);
    }
}
