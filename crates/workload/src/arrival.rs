//! When requests arrive.
//!
//! The first request arrives at 0, and each gap after it is drawn on its own: `n` requests have
//! `n - 1` gaps. The times are never rescaled to end at `n / rate` (that would be another process,
//! conditioned on its length); the report prints the rate that came out.

use thiserror::Error;

use crate::rng::Rng;

/// An arrival process. Rates are in requests per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// Every request arrives at 0.
    AtOnce,
    /// Equal gaps of `1/rate`.
    Constant {
        /// Requests per second.
        rate: f64,
    },
    /// Exponential gaps: a coefficient of variation of 1.
    Poisson {
        /// Requests per second.
        rate: f64,
    },
    /// Gamma gaps of shape `burstiness`: a coefficient of variation of `1/sqrt(burstiness)`.
    /// Below 1 it is burstier than Poisson, above 1 smoother.
    Gamma {
        /// Requests per second.
        rate: f64,
        /// The gamma distribution's shape.
        burstiness: f64,
    },
}

/// An arrival process that cannot be.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ArrivalError {
    /// The name is not one of the processes.
    #[error("--arrival: unknown process {found:?}; use poisson, gamma or constant")]
    UnknownName {
        /// The name given.
        found: String,
    },
    /// The rate is zero, negative or not finite.
    #[error("--request-rate: expected a finite number above 0 (requests per second), found {found}")]
    BadRate {
        /// The rate given.
        found: f64,
    },
    /// The burstiness is zero, negative or not finite.
    #[error("--burstiness: expected a finite number above 0, found {found}")]
    BadBurstiness {
        /// The burstiness given.
        found: f64,
    },
    /// The burstiness was given to a process without one.
    #[error("--burstiness: {process} arrivals have none; use --arrival gamma, or leave it out")]
    BurstinessWithoutGamma {
        /// The process named.
        process: String,
    },
}

impl Arrival {
    /// A process from its name (`poisson`, `gamma` or `constant`), its rate, and for `gamma` its
    /// burstiness (1 when not given).
    pub fn parse(name: &str, rate: f64, burstiness: Option<f64>) -> Result<Arrival, ArrivalError> {
        let arrival = match name {
            "poisson" => Arrival::Poisson { rate },
            "constant" => Arrival::Constant { rate },
            "gamma" => Arrival::Gamma { rate, burstiness: burstiness.unwrap_or(1.0) },
            _ => {
                return Err(ArrivalError::UnknownName { found: name.to_string() });
            }
        };
        if burstiness.is_some() && name != "gamma" {
            return Err(ArrivalError::BurstinessWithoutGamma { process: name.to_string() });
        }
        arrival.validate()?;
        Ok(arrival)
    }

    /// Checks that rate and burstiness are finite and above 0.
    pub fn validate(&self) -> Result<(), ArrivalError> {
        let positive = |x: f64| x > 0.0 && x.is_finite();
        if let Some(found) = self.rate().filter(|&r| !positive(r)) {
            return Err(ArrivalError::BadRate { found });
        }
        match *self {
            Arrival::Gamma { burstiness, .. } if !positive(burstiness) => {
                Err(ArrivalError::BadBurstiness { found: burstiness })
            }
            _ => Ok(()),
        }
    }

    /// The offered rate in requests per second; none when everything arrives at once.
    #[must_use]
    pub fn rate(&self) -> Option<f64> {
        match *self {
            Arrival::AtOnce => None,
            Arrival::Constant { rate } | Arrival::Poisson { rate } | Arrival::Gamma { rate, .. } => Some(rate),
        }
    }
}

/// The intended arrival times of `n` requests, in nanoseconds, ascending; the first is 0.
#[must_use]
pub fn arrival_times_ns(a: &Arrival, n: usize, seed: u64) -> Vec<u64> {
    let mut rng = Rng::new(seed, "arrivals");
    match *a {
        Arrival::AtOnce => vec![0; n],
        // Multiplied, not summed: no rounding error grows along the run.
        Arrival::Constant { rate } => (0..n).map(|i| (i as f64 * 1e9 / rate) as u64).collect(),
        Arrival::Poisson { rate } => cumulate(n, || rng.exponential() * 1e9 / rate),
        Arrival::Gamma { rate, burstiness } => cumulate(n, || rng.gamma(burstiness) * 1e9 / (rate * burstiness)),
    }
}

fn cumulate(n: usize, mut gap_ns: impl FnMut() -> f64) -> Vec<u64> {
    let mut now = 0.0;
    (0..n)
        .map(|i| {
            if i > 0 {
                now += gap_ns();
            }
            now as u64
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(a: &Arrival, n: usize, seed: u64) -> (f64, f64) {
        let times = arrival_times_ns(a, n, seed);
        assert_eq!((times.len(), times[0]), (n, 0));
        let gaps: Vec<f64> = times.windows(2).map(|w| (w[1] - w[0]) as f64 / 1e9).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / (gaps.len() - 1) as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn mean_rate_and_variation_are_those_asked_for() {
        let n = 40_000;
        let rate = 12.5;
        let cases = [
            (Arrival::Constant { rate }, 0.0),
            (Arrival::Poisson { rate }, 1.0),
            (Arrival::Gamma { rate, burstiness: 0.25 }, 2.0),
            (Arrival::Gamma { rate, burstiness: 16.0 }, 0.25),
        ];
        for (arrival, cv_expected) in cases {
            for seed in [1, 2, 3] {
                let (mean, cv) = gaps(&arrival, n, seed);
                // Four standard errors of the mean gap, plus the truncation to nanoseconds.
                let tolerance = 4.0 * cv_expected / (n as f64).sqrt() + 1e-6;
                assert!((mean * rate - 1.0).abs() < tolerance, "{arrival:?}: {mean}");
                assert!((cv - cv_expected).abs() < 0.06 * cv_expected + 1e-6, "{arrival:?}: {cv}");
            }
        }
    }

    #[test]
    fn the_last_arrival_is_not_pinned_to_the_rate() {
        let arrival = Arrival::Poisson { rate: 10.0 };
        let ends: Vec<u64> = (0..20).map(|seed| *arrival_times_ns(&arrival, 50, seed).last().unwrap()).collect();
        assert!(ends.windows(2).all(|w| w[0] != w[1]), "{ends:?}");
    }

    #[test]
    fn constant_at_once_and_tiny_counts() {
        assert_eq!(arrival_times_ns(&Arrival::Constant { rate: 4.0 }, 3, 0), [0, 250_000_000, 500_000_000]);
        assert_eq!(arrival_times_ns(&Arrival::AtOnce, 3, 0), [0, 0, 0]);
        assert!(arrival_times_ns(&Arrival::Poisson { rate: 1.0 }, 0, 0).is_empty());
        assert_eq!(arrival_times_ns(&Arrival::Poisson { rate: 1.0 }, 1, 0), [0]);
    }

    #[test]
    fn names_and_bad_values() {
        assert_eq!(Arrival::parse("gamma", 2.0, Some(0.5)), Ok(Arrival::Gamma { rate: 2.0, burstiness: 0.5 }));
        assert_eq!(Arrival::parse("gamma", 2.0, None), Ok(Arrival::Gamma { rate: 2.0, burstiness: 1.0 }));
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = Arrival::parse("poisson", rate, None).unwrap_err();
            assert!(error.to_string().starts_with("--request-rate"), "{error}");
        }
        for burstiness in [0.0, -1.0, f64::NAN] {
            let error = Arrival::parse("gamma", 1.0, Some(burstiness)).unwrap_err();
            assert!(error.to_string().starts_with("--burstiness"), "{error}");
        }
        let error = Arrival::parse("poisson", 1.0, Some(2.0)).unwrap_err();
        assert!(error.to_string().contains("--arrival gamma"), "{error}");
        let error = Arrival::parse("weibull", 1.0, None).unwrap_err();
        assert!(error.to_string().contains("poisson, gamma or constant"));
    }
}
