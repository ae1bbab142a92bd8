//! Percentiles, by a rule that has a name.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// How a percentile is taken from sorted values. The two differ visibly on small samples: the p90
/// of 1..10 is 9.1 by the first and 10 by the second.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PercentileRule {
    /// Linear interpolation between the neighbours (Hyndman and Fan's type 7, NumPy's default).
    Linear,
    /// trtllm-bench's way: the value at index `trunc(n*q)`, no interpolation.
    Nearest,
}

impl fmt::Display for PercentileRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PercentileRule::Linear => "linear interpolation (Hyndman-Fan type 7)",
            PercentileRule::Nearest => "nearest rank, sorted[trunc(n*q)], as trtllm-bench",
        })
    }
}

impl FromStr for PercentileRule {
    type Err = String;

    fn from_str(name: &str) -> Result<PercentileRule, String> {
        match name {
            "linear" => Ok(PercentileRule::Linear),
            "nearest" => Ok(PercentileRule::Nearest),
            _ => Err(format!("unknown percentile rule {name:?}; use linear or nearest")),
        }
    }
}

/// The value at index `trunc((n - 1) * q)` of values in ascending order, no interpolation: what calibrated costs and the
/// simulator's selftest are defined by. None of no values or of another `q`.
#[must_use]
pub fn lower_percentile(sorted: &[f64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    (0.0..=1.0).contains(&q).then(|| sorted[(last as f64 * q) as usize])
}

/// The percentile `q` (0 to 1) of values in ascending order; none of no values or of another `q`.
#[must_use]
pub fn percentile(sorted: &[f64], q: f64, rule: PercentileRule) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    if !(0.0..=1.0).contains(&q) {
        return None;
    }
    match rule {
        PercentileRule::Linear => {
            let place = last as f64 * q;
            let below = (place.floor() as usize).min(last);
            let (low, high) = (sorted[below], sorted[(below + 1).min(last)]);
            // Equal neighbours need no arithmetic, which keeps infinities and rounding out.
            let between = if low == high { low } else { low + (place - below as f64) * (high - low) };
            Some(between)
        }
        PercentileRule::Nearest => {
            let index = (sorted.len() as f64 * q) as usize;
            Some(sorted[index.min(last)])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_differ_on_small_samples() {
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!(percentile(&values, 0.9, PercentileRule::Linear), Some(9.1));
        assert_eq!(percentile(&values, 0.9, PercentileRule::Nearest), Some(10.0));
        assert_eq!(lower_percentile(&values, 0.9), Some(9.0));
        // The upper of the middle two, as timings are summed up.
        assert_eq!(percentile(&values, 0.5, PercentileRule::Nearest), Some(6.0));
        assert_eq!((lower_percentile(&values, 1.0), lower_percentile(&values, 1.1)), (Some(10.0), None));
        assert_eq!(lower_percentile(&[], 0.5), None);
    }
}
