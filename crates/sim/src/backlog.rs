//! Whether the queue of a run grows without bound, by how long it was over time.
//!
//! The time in which requests arrive is divided into bins. Where fewer requests are served than arrive, the mean queue
//! grows from bin to bin by the same amount and some noise; where it is bounded, increases and decreases cancel, however
//! near the server is to saturation. So the sum of the increments is compared with their own spread: no rate, no service
//! time and no distribution has to be known.

use strobe_stats::sample_std_dev;

/// Bins of a run are between this and twice as many.
const BINS: usize = 64;

/// Fewer bins have no spread to speak of.
const FEWEST_BINS: usize = 8;

/// Growth of so many times what chance gives is growth. Means over bins vary less than the queue itself, so that this
/// stands for 2.9 standard errors.
const SIGNIFICANT: f64 = 3.5;

/// Requests in the queue at least, and as a share of those that arrived: less is no overload that matters.
const LEAST_GROWTH: (f64, f64) = (3.0, 1e-3);

/// A mean wait of this share of the run, and more in short runs, is overload whatever the queue looked like.
const GROSS_WAIT: f64 = 0.1;

/// This share of the run at its beginning is left out: the queue comes from empty.
const SETTLING: f64 = 0.25;

/// Queue lengths and ends over time, in memory that does not grow.
#[derive(Clone, Debug, Default)]
pub struct Backlog {
    width_ns: u64,
    /// Requests in the queue times nanoseconds, of each bin.
    queued_ns: Vec<f64>,
    /// Requests that ended in each bin.
    ends: Vec<u32>,
    /// All of `queued_ns`.
    waited_ns: f64,
}

/// What became of the queue while requests arrived.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trend {
    /// Whether it grew without bound.
    pub grows: bool,
    /// By how many requests per second.
    pub per_s: f64,
    /// Requests that ended per second.
    pub served_per_s: f64,
    /// Share of the time with requests waiting.
    pub waiting_share: f64,
}

impl Backlog {
    fn bin(&mut self, at_ns: u64) -> usize {
        if self.width_ns == 0 {
            self.width_ns = 1 << 10;
        }
        while at_ns / self.width_ns >= 2 * BINS as u64 {
            self.queued_ns = self.queued_ns.chunks(2).map(|pair| pair.iter().sum()).collect();
            self.ends = self.ends.chunks(2).map(|pair| pair.iter().sum()).collect();
            self.width_ns *= 2;
        }
        (at_ns / self.width_ns) as usize
    }

    /// `queued` requests waited from `start_ns` to `end_ns`.
    pub fn wait(&mut self, start_ns: u64, end_ns: u64, queued: u32) {
        if queued == 0 || end_ns <= start_ns {
            return;
        }
        let last = self.bin(end_ns - 1);
        if self.queued_ns.len() <= last {
            self.queued_ns.resize(last + 1, 0.0);
        }
        let (width, mut from) = (self.width_ns, start_ns);
        for bin in (start_ns / width) as usize..=last {
            let until = end_ns.min((bin as u64 + 1).saturating_mul(width));
            if let Some(sum) = self.queued_ns.get_mut(bin) {
                *sum += f64::from(queued) * (until - from) as f64;
            }
            from = until;
        }
        self.waited_ns += f64::from(queued) * (end_ns - start_ns) as f64;
    }

    /// A request ended.
    pub fn end(&mut self, at_ns: u64) {
        let bin = self.bin(at_ns);
        if self.ends.len() <= bin {
            self.ends.resize(bin + 1, 0);
        }
        self.ends[bin] += 1;
    }

    /// What the queue did between the first and the last of `arrivals` arrivals; none where nothing can be said.
    pub fn trend(&self, first_ns: u64, last_ns: u64, arrivals: u64) -> Option<Trend> {
        let span = last_ns.checked_sub(first_ns).filter(|span| *span > 0)? as f64;
        let mean_wait = self.waited_ns / arrivals.max(1) as f64;
        let gross = arrivals >= 20 && mean_wait > (GROSS_WAIT + 1.0 / (arrivals as f64).sqrt()) * span;
        let width = self.width_ns.max(1);
        let from = ((first_ns as f64 + SETTLING * span) / width as f64).ceil() as usize;
        let until = (last_ns / width) as usize;
        let bins = until.saturating_sub(from);
        let at = |values: &[f64], bin: usize| values.get(bin).copied().unwrap_or(0.0) / width as f64;
        let means: Vec<f64> = (from..until).map(|bin| at(&self.queued_ns, bin)).collect();
        let (total, per_s, served_per_s) = if bins > 0 {
            let seconds = bins as f64 * width as f64 / 1e9;
            let ends: u32 = self.ends.iter().take(until).skip(from).sum();
            let total = means.last().copied().unwrap_or(0.0) - means.first().copied().unwrap_or(0.0);
            (total, total / seconds, f64::from(ends) / seconds)
        } else {
            let ends: u32 = self.ends.iter().take(until + 1).sum();
            (0.0, 0.0, f64::from(ends) / (last_ns as f64 / 1e9))
        };
        let steady = || {
            let steps: Vec<f64> = means.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let chance = sample_std_dev(&steps).unwrap_or(0.0) * (steps.len() as f64).sqrt();
            let (least, share) = LEAST_GROWTH;
            bins >= FEWEST_BINS && total >= least.max(share * arrivals as f64) && total > SIGNIFICANT * chance
        };
        let waiting = means.iter().filter(|mean| **mean >= 1.0).count();
        Some(Trend {
            grows: gross || steady(),
            per_s,
            served_per_s,
            waiting_share: if bins > 0 { waiting as f64 / bins as f64 } else { f64::from(u8::from(gross)) },
        })
    }
}

#[cfg(test)]
mod tests {
    use strobe_workload::Rng;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// One server of rate 1, as a Lindley recursion over the queue length at unit times.
    fn random_walk(rate: f64, seconds: u64, seed: u64) -> Option<Trend> {
        let mut rng = Rng::new(seed, "backlog");
        let (mut backlog, mut queue, mut next) = (Backlog::default(), 0u32, rng.exponential() / rate);
        for second in 0..seconds {
            queue = queue.saturating_sub(1);
            while next < (second + 1) as f64 {
                queue += 1;
                next += rng.exponential() / rate;
            }
            backlog.wait(second * SECOND, (second + 1) * SECOND, queue);
            backlog.end(second * SECOND);
        }
        backlog.trend(0, seconds * SECOND, (rate * seconds as f64) as u64)
    }

    #[test]
    fn a_queue_that_grows_is_told_from_one_that_wanders() {
        let grows = |rate, seconds| (0..40).filter(|seed| random_walk(rate, seconds, *seed).unwrap().grows).count();
        assert_eq!(grows(0.5, 2_000), 0);
        assert_eq!(grows(0.9, 20_000), 0);
        assert!(grows(0.99, 200_000) <= 1, "near saturation is not over it");
        assert!(grows(1.01, 400_000) >= 38, "1 % over");
        assert_eq!(grows(1.1, 10_000), 40);
        assert_eq!(grows(2.0, 300), 40);
    }

    #[test]
    fn what_arrives_at_once_or_waits_longer_than_the_run_is_overload() {
        let mut backlog = Backlog::default();
        backlog.wait(0, 100 * SECOND, 50);
        assert!(backlog.trend(0, SECOND, 100).unwrap().grows);
        assert_eq!(backlog.trend(5, 5, 100), None);
        let idle = Backlog::default().trend(0, SECOND, 100).unwrap();
        assert!(!idle.grows && idle.waiting_share == 0.0);
    }

    #[test]
    fn bins_keep_their_sums_when_they_are_merged() {
        let mut backlog = Backlog::default();
        for second in 0..10_000 {
            backlog.wait(second * SECOND, (second + 1) * SECOND, 3);
            backlog.end(second * SECOND);
        }
        let trend = backlog.trend(0, 10_000 * SECOND, 10_000).unwrap();
        assert!((trend.served_per_s - 1.0).abs() < 0.02 && trend.per_s.abs() < 1e-9, "{trend:?}");
        assert_eq!(trend.waiting_share, 1.0);
        assert!(backlog.queued_ns.len() <= 2 * BINS);
    }
}
