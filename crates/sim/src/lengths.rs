//! How many tokens prompts and answers have.

use std::sync::Arc;

use strobe_workload::Rng;

use crate::error::SimError;

/// No model reads a longer prompt or gives a longer output.
pub const LONGEST: u32 = 1 << 24;

fn mean_of(values: &[u32]) -> f64 {
    values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len().max(1) as f64
}

/// A distribution of lengths in tokens, at least 1.
#[derive(Clone, Debug, PartialEq)]
pub enum LengthDist {
    /// Always the same.
    Fixed(u32),
    /// Normal, rounded up.
    Normal {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        stdev: f64,
    },
    /// Every length from the first to the second is as likely.
    Uniform(u32, u32),
    /// Lognormal, rounded.
    LogNormal {
        /// Mean.
        mean: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
    },
    /// Geometric: every token is the last one with the same chance.
    Geometric {
        /// Mean.
        mean: f64,
    },
    /// One of these, each as likely.
    Empirical(Vec<u32>),
    /// These in their order, and again from the first when they are over.
    Listed(Arc<[u32]>),
}

impl LengthDist {
    /// Reads `128`, `normal:128,32`, `uniform:16,256`, `lognormal:128,0.8` or `geometric:128`.
    pub fn parse(option: &'static str, text: &str) -> Result<LengthDist, SimError> {
        let bad = |problem: String| SimError::Option { option, problem };
        let (kind, numbers) = text.split_once(':').unwrap_or(("fixed", text));
        let numbers: Vec<f64> = numbers
            .split(',')
            .map(|n| n.trim().parse::<f64>().ok().filter(|n| n.is_finite()))
            .collect::<Option<_>>()
            .ok_or_else(|| {
                bad(format!(
                    "`{text}` is not a length; use N, normal:MEAN,STDEV, uniform:MIN,MAX, lognormal:MEAN,SIGMA, geometric:MEAN or empirical:FILE"
                ))
            })?;
        let length = |n: f64| {
            if n >= 1.0 && n <= f64::from(LONGEST) && n.fract() == 0.0 {
                Ok(n as u32)
            } else {
                Err(bad(format!("expected a whole number from 1 to {LONGEST}, found {n}")))
            }
        };
        let mean = |n: f64| {
            if n >= 1.0 && n <= f64::from(LONGEST) {
                Ok(n)
            } else {
                Err(bad(format!("expected a mean from 1 to {LONGEST}, found {n}")))
            }
        };
        let spread =
            |n: f64| if n >= 0.0 { Ok(n) } else { Err(bad(format!("expected a spread of at least 0, found {n}"))) };
        match (kind, numbers.as_slice()) {
            ("fixed", &[n]) => Ok(LengthDist::Fixed(length(n)?)),
            ("normal", &[m, s]) => Ok(LengthDist::Normal { mean: mean(m)?, stdev: spread(s)? }),
            ("uniform", &[low, high]) if low <= high => Ok(LengthDist::Uniform(length(low)?, length(high)?)),
            ("uniform", &[low, high]) => Err(bad(format!("the shortest length {low} is above the longest {high}"))),
            ("lognormal", &[m, s]) => Ok(LengthDist::LogNormal { mean: mean(m)?, sigma: spread(s)? }),
            ("geometric", &[m]) => Ok(LengthDist::Geometric { mean: mean(m)? }),
            _ => Err(bad(format!(
                "`{text}` is not a length; use N, normal:MEAN,STDEV, uniform:MIN,MAX, lognormal:MEAN,SIGMA, geometric:MEAN or empirical:FILE"
            ))),
        }
    }

    /// Its mean, but for rounding.
    pub fn mean(&self) -> f64 {
        match self {
            LengthDist::Fixed(length) => f64::from(*length),
            LengthDist::Normal { mean, .. } | LengthDist::LogNormal { mean, .. } | LengthDist::Geometric { mean } => {
                *mean
            }
            LengthDist::Uniform(low, high) => f64::midpoint(f64::from(*low), f64::from(*high)),
            LengthDist::Empirical(values) => mean_of(values),
            LengthDist::Listed(values) => mean_of(values),
        }
    }

    /// A length that hardly any draw exceeds, for sizing a cache that shall not bind.
    pub fn nearly_longest(&self) -> u32 {
        let longest = match self {
            LengthDist::Fixed(length) => f64::from(*length),
            LengthDist::Normal { mean, stdev } => mean + 6.0 * stdev,
            LengthDist::Uniform(_, high) => f64::from(*high),
            LengthDist::LogNormal { mean, sigma } => mean * (6.0 * sigma).exp(),
            LengthDist::Geometric { mean } => mean * 40.0,
            LengthDist::Empirical(values) => f64::from(values.iter().copied().max().unwrap_or(1)),
            LengthDist::Listed(values) => f64::from(values.iter().copied().max().unwrap_or(1)),
        };
        longest.ceil().clamp(1.0, f64::from(LONGEST)) as u32
    }

    /// Draws the length of request `number`.
    pub fn draw(&self, number: u64, rng: &mut Rng) -> u32 {
        let at_least_one = |value: f64| value.clamp(1.0, f64::from(LONGEST)) as u32;
        match self {
            LengthDist::Fixed(length) => *length,
            LengthDist::Normal { mean, stdev } => at_least_one((mean + stdev * rng.normal()).ceil()),
            LengthDist::Uniform(low, high) => rng.between(u64::from(*low), u64::from(*high)) as u32,
            LengthDist::LogNormal { mean, sigma } => {
                at_least_one((mean * (sigma * rng.normal() - sigma * sigma / 2.0).exp()).round())
            }
            LengthDist::Geometric { mean } if *mean > 1.0 => {
                at_least_one(1.0 + (rng.exponential() / -(1.0 - 1.0 / mean).ln()).floor())
            }
            LengthDist::Geometric { .. } => 1,
            LengthDist::Empirical(values) => {
                values.get(rng.below(values.len() as u64) as usize).copied().unwrap_or(1).max(1)
            }
            LengthDist::Listed(values) => {
                values.get((number % values.len().max(1) as u64) as usize).copied().unwrap_or(1).max(1)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_those_asked_for() {
        let mut rng = Rng::new(1, "test");
        for (text, mean) in [
            ("7", 7.0),
            ("normal:100,20", 100.5),
            ("uniform:10,20", 15.0),
            ("lognormal:200,0.5", 200.0),
            ("geometric:40", 40.0),
        ] {
            let dist = LengthDist::parse("--input-tokens", text).unwrap();
            let found = (0..50_000).map(|i| f64::from(dist.draw(i, &mut rng))).sum::<f64>() / 50_000.0;
            assert!((found / mean - 1.0).abs() < 0.02, "{text}: {found}");
        }
    }

    #[test]
    fn bad_lengths_are_named() {
        for text in [
            "0",
            "-5",
            "1.5",
            "x",
            "",
            "normal:5",
            "uniform:9,3",
            "uniform:0,3",
            "geometric:0.5",
            "normal:10,-1",
            "zipf:3",
        ] {
            let error = LengthDist::parse("--output-tokens", text).unwrap_err().to_string();
            assert!(error.starts_with("--output-tokens: "), "{text}: {error}");
        }
    }
}
