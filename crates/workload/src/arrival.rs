//! When requests arrive.
//!
//! The first request arrives at 0, and each gap after it is drawn on its own: `n` requests have
//! `n - 1` gaps. The times are never rescaled to end at `n / rate` (that would be another process,
//! conditioned on its length); the report prints the rate that came out.

use thiserror::Error;

use strobe_stats::Rng;

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
    /// Poisson arrivals that come and go: exponential on and off times of the given means, no arrivals in the off
    /// times, and in the on times as many as it takes for `rate` overall.
    OnOff {
        /// Requests per second, over on and off times.
        rate: f64,
        /// Mean length of an on time, in seconds.
        on_s: f64,
        /// Mean length of an off time, in seconds.
        off_s: f64,
    },
    /// Poisson arrivals whose rate swings: `rate * (1 + swing * sin(2 pi t / period))`.
    Drift {
        /// Mean requests per second.
        rate: f64,
        /// From 0 (constant) to 1 (down to no arrivals).
        swing: f64,
        /// Length of one swing, in seconds.
        period_s: f64,
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
    /// A time of an on/off or drifting process is not positive and finite, or a swing is not from 0 to 1.
    #[error("--arrival: {name} is {found}; {expected}")]
    BadParameter {
        /// Which parameter.
        name: &'static str,
        /// Its value.
        found: f64,
        /// What it must be.
        expected: &'static str,
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
            Arrival::OnOff { on_s, off_s, .. } => {
                let expected = "expected a time above 0, such as on=10s";
                let bad = [("on", on_s), ("off", off_s)].into_iter().find(|&(_, s)| !positive(s));
                bad.map_or(Ok(()), |(name, found)| Err(ArrivalError::BadParameter { name, found, expected }))
            }
            Arrival::Drift { swing, .. } if !(0.0..=1.0).contains(&swing) => Err(ArrivalError::BadParameter {
                name: "swing",
                found: swing,
                expected: "expected a number from 0 to 1",
            }),
            Arrival::Drift { period_s, .. } if !positive(period_s) => Err(ArrivalError::BadParameter {
                name: "period",
                found: period_s,
                expected: "expected a time above 0, such as period=60s",
            }),
            _ => Ok(()),
        }
    }

    /// The offered rate in requests per second; none when everything arrives at once.
    #[must_use]
    pub fn rate(&self) -> Option<f64> {
        match *self {
            Arrival::AtOnce => None,
            Arrival::Constant { rate }
            | Arrival::Poisson { rate }
            | Arrival::Gamma { rate, .. }
            | Arrival::OnOff { rate, .. }
            | Arrival::Drift { rate, .. } => Some(rate),
        }
    }
}

/// The intended arrival times of `n` requests, in nanoseconds, ascending; the first is 0.
#[must_use]
pub fn arrival_times_ns(a: &Arrival, n: usize, seed: u64) -> Vec<u64> {
    Arrivals::new(*a, seed).take(n).collect()
}

/// The intended arrival times one by one, in nanoseconds, ascending; the first is 0 (of an on/off or drifting process: the
/// first arrival after 0). Never ends.
#[derive(Clone, Debug)]
pub struct Arrivals {
    process: Arrival,
    rng: Rng,
    count: u64,
    now_ns: f64,
    /// End of the on time that is running, for an on/off process.
    on_until_ns: f64,
}

impl Arrivals {
    /// The arrivals of a process that was found valid.
    #[must_use]
    pub fn new(process: Arrival, seed: u64) -> Arrivals {
        Arrivals { process, rng: Rng::new(seed, "arrivals"), count: 0, now_ns: 0.0, on_until_ns: 0.0 }
    }

    /// An arrival in the on time that is running; when it ends before, after the off time that follows.
    fn next_in_on_time(&mut self, rate: f64, on_s: f64, off_s: f64) {
        let mut gap = self.rng.exponential() * 1e9 / (rate * (on_s + off_s) / on_s);
        while self.now_ns + gap > self.on_until_ns {
            gap -= self.on_until_ns - self.now_ns;
            let off =
                if self.count == 0 && self.on_until_ns == 0.0 { 0.0 } else { self.rng.exponential() * off_s * 1e9 };
            self.now_ns = self.on_until_ns + off;
            self.on_until_ns = self.now_ns + self.rng.exponential() * on_s * 1e9;
        }
        self.now_ns += gap;
    }

    /// By thinning: candidates at the largest rate, kept with the share that the rate has of it.
    fn next_of_drift(&mut self, rate: f64, swing: f64, period_s: f64) {
        loop {
            self.now_ns += self.rng.exponential() * 1e9 / (rate * (1.0 + swing));
            let phase = std::f64::consts::TAU * self.now_ns / (period_s * 1e9);
            if self.rng.uniform() * (1.0 + swing) < 1.0 + swing * phase.sin() {
                return;
            }
        }
    }
}

impl Iterator for Arrivals {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let first = self.count == 0;
        match self.process {
            Arrival::AtOnce => {}
            // Multiplied, not summed: no rounding error grows along the run.
            Arrival::Constant { rate } => self.now_ns = self.count as f64 * 1e9 / rate,
            Arrival::OnOff { rate, on_s, off_s } => self.next_in_on_time(rate, on_s, off_s),
            Arrival::Drift { rate, swing, period_s } => self.next_of_drift(rate, swing, period_s),
            Arrival::Poisson { .. } | Arrival::Gamma { .. } if first => {}
            Arrival::Poisson { rate } => self.now_ns += self.rng.exponential() * 1e9 / rate,
            Arrival::Gamma { rate, burstiness } => {
                self.now_ns += self.rng.gamma(burstiness) * 1e9 / (rate * burstiness);
            }
        }
        self.count += 1;
        Some(self.now_ns as u64)
    }
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
    fn interrupted_and_drifting_rates_keep_their_mean() {
        let rate = 20.0;
        let cases =
            [Arrival::OnOff { rate, on_s: 1.0, off_s: 3.0 }, Arrival::Drift { rate, swing: 0.8, period_s: 10.0 }];
        for arrival in cases {
            let times = arrival_times_ns(&arrival, 200_000, 5);
            assert!(times.is_sorted());
            let achieved = times.len() as f64 / (*times.last().unwrap() as f64 / 1e9);
            assert!((achieved / rate - 1.0).abs() < 0.05, "{arrival:?}: {achieved}");
            // Counts per second vary more than those of a Poisson process, whose index of dispersion is 1.
            let mut counts = vec![0.0; *times.last().unwrap() as usize / 1_000_000_000 + 1];
            times.iter().for_each(|t| counts[*t as usize / 1_000_000_000] += 1.0);
            let mean = counts.iter().sum::<f64>() / counts.len() as f64;
            let variance = counts.iter().map(|c: &f64| (c - mean).powi(2)).sum::<f64>() / counts.len() as f64;
            assert!(variance / mean > 3.0, "{arrival:?}: {}", variance / mean);
        }
        assert!(Arrival::OnOff { rate, on_s: 0.0, off_s: 1.0 }.validate().is_err());
        assert!(Arrival::Drift { rate, swing: 1.5, period_s: 1.0 }.validate().is_err());
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
