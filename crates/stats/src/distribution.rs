//! One metric over many requests, in trtllm-bench's seven numbers.

use serde::Serialize;

use crate::{PercentileRule, mean, percentile, sorted};

/// Under this many values the 99.9th percentile says nothing, and is left out.
const FEWEST_FOR_P99_9: usize = 1000;

/// A distribution in summary. An empty one does not exist: see [`Distribution::of`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distribution {
    /// How many values.
    pub count: usize,
    /// Smallest value.
    pub minimum: f64,
    /// Largest value.
    pub maximum: f64,
    /// Mean.
    pub average: f64,
    /// Median, by the percentile rule.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile; absent below 1000 values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_9: Option<f64>,
}

impl Distribution {
    /// The summary of the values; none of no values.
    #[must_use]
    pub fn of(values: &[f64], rule: PercentileRule) -> Option<Distribution> {
        let sorted = sorted(values);
        let at = |q| percentile(&sorted, q, rule);
        Some(Distribution {
            count: sorted.len(),
            minimum: *sorted.first()?,
            maximum: *sorted.last()?,
            average: mean(values)?,
            p50: at(0.50)?,
            p90: at(0.90)?,
            p95: at(0.95)?,
            p99: at(0.99)?,
            p99_9: at(0.999).filter(|_| sorted.len() >= FEWEST_FOR_P99_9),
        })
    }
}
