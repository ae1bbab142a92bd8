//! Centre and spread of plain slices.

use serde::Serialize;

use crate::{PercentileRule, percentile};

/// The arithmetic mean; none of nothing.
#[must_use]
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The sample standard deviation (divided by `n - 1`); none of fewer than two values.
#[must_use]
pub fn sample_std_dev(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|_| values.len() >= 2)?;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt())
}

/// The median: the middle value, or the mean of the middle two.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    percentile(&sorted(values), 0.5, PercentileRule::Linear)
}

/// Standard deviation over mean; none of fewer than two values or around a mean of 0.
#[must_use]
pub fn coefficient_of_variation(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|&m| m != 0.0)?;
    Some(sample_std_dev(values)? / mean.abs())
}

/// How repeated runs differ.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// How many values.
    pub count: usize,
    /// Smallest value; NaN of none.
    pub min: f64,
    /// Median; NaN of none.
    pub median: f64,
    /// Largest value; NaN of none.
    pub max: f64,
    /// Mean; NaN of none.
    pub mean: f64,
    /// Sample standard deviation; absent for fewer than two values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdev: Option<f64>,
    /// Standard deviation over mean; absent for fewer than two values or a mean of 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cv: Option<f64>,
}

/// The spread of one number over repeated runs.
#[must_use]
pub fn spread(values: &[f64]) -> Spread {
    let sorted = sorted(values);
    let or_nan = |value: Option<f64>| value.unwrap_or(f64::NAN);
    Spread {
        count: values.len(),
        min: or_nan(sorted.first().copied()),
        median: or_nan(percentile(&sorted, 0.5, PercentileRule::Linear)),
        max: or_nan(sorted.last().copied()),
        mean: or_nan(mean(values)),
        stdev: sample_std_dev(values),
        cv: coefficient_of_variation(values),
    }
}

/// The values in ascending order.
#[must_use]
pub fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn centre_and_spread_of_a_worked_example() {
        let values = [4.0, 2.0, 9.0, 5.0];
        assert_eq!(mean(&values), Some(5.0));
        assert_eq!(median(&values), Some(4.5));
        // Squares 1 + 9 + 16 + 0 = 26, over 3.
        assert_eq!(sample_std_dev(&values), Some((26.0f64 / 3.0).sqrt()));
        let spread = spread(&values);
        assert_eq!((spread.min, spread.median, spread.max), (2.0, 4.5, 9.0));
        assert_eq!(spread.cv, Some((26.0f64 / 3.0).sqrt() / 5.0));
    }

    #[test]
    fn what_is_not_known_is_absent() {
        assert_eq!(mean(&[]), None);
        assert_eq!(median(&[]), None);
        assert_eq!(sample_std_dev(&[1.0]), None);
        assert_eq!(coefficient_of_variation(&[-1.0, 1.0]), None);
        let one = spread(&[3.0]);
        assert_eq!((one.mean, one.stdev, one.cv), (3.0, None, None));
        assert!(spread(&[]).mean.is_nan());
    }
}
