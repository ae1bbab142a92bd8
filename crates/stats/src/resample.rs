//! Confidence intervals of differences between means, by resampling.

use serde::Serialize;

use crate::{PercentileRule, Rng, effective_sample_size, normal_quantile, percentile, student_quantile};

/// How many times the data are drawn again.
pub const RESAMPLES: usize = 1000;

/// The fewest values on a side from which an interval is made: from two nothing can be said about their spread.
pub const FEWEST: usize = 3;

/// More values than this are averaged in runs of neighbours before they are resampled: it bounds the work and keeps
/// slow drifts together.
const MOST_BLOCKS: usize = 500;

/// The range that covers a difference with 95 % confidence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Range {
    /// Whether it lies on one side of zero.
    pub fn excludes_zero(&self) -> bool {
        self.low > 0.0 || self.high < 0.0
    }
}

/// How the iterations of a comparison are drawn again. Made once, then applied to every quantity (wall time, each
/// part, each kernel), so that their intervals describe the same draws.
pub struct Plan(Resample);

enum Resample {
    /// Pairs: one difference per pair.
    Paired(Draws),
    /// Two independent sides.
    Independent(Draws, Draws),
}

/// For one side: how many units there are, which values each averages, and the weights of the units in every draw.
struct Draws {
    /// Values of a unit: a run of neighbours, or all iterations of one repeat.
    units: Vec<std::ops::Range<usize>>,
    /// Weight of each unit per draw, row after row. They add up to the number of units.
    weights: Vec<f32>,
    /// What the deviations are multiplied with, because few units understate their own spread.
    widening: f64,
}

impl Plan {
    /// For `pairs` pairs, drawn in runs of `length` neighbours (see [`block_length`]). `None` when they are too few.
    pub fn paired(pairs: usize, length: usize) -> Option<Self> {
        Some(Self(Resample::Paired(Draws::of(blocks(pairs, length), pairs as u64)?)))
    }

    /// For two independent sides: each a list of how many iterations each repeat has. With several repeats on both
    /// sides whole repeats are drawn, since what differs between runs outweighs what differs within one; otherwise
    /// runs of neighbouring iterations are, of these `lengths` (see [`block_length`]), because neighbours resemble each
    /// other. `seeds` belong to the sides, so that exchanging them mirrors the interval. `None` when a side has too few.
    pub fn independent(repeats: [&[usize]; 2], lengths: [usize; 2], seeds: [u64; 2]) -> Option<Self> {
        let by_repeat = repeats.iter().all(|r| r.len() >= FEWEST);
        let units = |side: usize| {
            let counts = repeats[side];
            if !by_repeat {
                return blocks(counts.iter().sum(), lengths[side]);
            }
            let ends = counts.iter().scan(0, |end, &n| {
                *end += n;
                Some(*end - n..*end)
            });
            ends.collect()
        };
        let [a, b] = [0, 1].map(|side| Draws::of(units(side), seeds[side]));
        Some(Self(Resample::Independent(a?, b?)))
    }

    /// The interval of mean(b) - mean(a).
    pub fn interval(&self, a: &[f64], b: &[f64]) -> Range {
        let mut differences = match &self.0 {
            Resample::Paired(draws) => {
                let change: Vec<f64> = a.iter().zip(b).map(|(a, b)| b - a).collect();
                draws.means(&change)
            }
            Resample::Independent(of_a, of_b) => {
                let (a, b) = (of_a.means(a), of_b.means(b));
                a.iter().zip(b).map(|(a, b)| b - a).collect()
            }
        };
        differences.sort_by(f64::total_cmp);
        let at = |share| percentile(&differences, share, PercentileRule::Linear).unwrap_or(0.0);
        Range { low: at(0.025), high: at(0.975) }
    }
}

impl Draws {
    fn of(units: Vec<std::ops::Range<usize>>, seed: u64) -> Option<Self> {
        let count = units.len();
        if count < FEWEST {
            return None;
        }
        let mut random = Rng::new(seed, "resample");
        let mut weights = vec![0.0f32; count * RESAMPLES];
        for row in weights.chunks_exact_mut(count) {
            for _ in 0..count {
                row[random.below(count as u64) as usize] += 1.0;
            }
        }
        let widening = (count as f64 / (count - 1) as f64).sqrt() * student_quantile(0.975, (count - 1) as f64)
            / normal_quantile(0.975);
        Some(Self { units, weights, widening })
    }

    /// The mean of every draw, as far from the mean of the data as a sample of this size warrants.
    fn means(&self, values: &[f64]) -> Vec<f64> {
        let count = values.len().max(1) as f64;
        let centre = values.iter().sum::<f64>() / count;
        let of_unit = |unit: &std::ops::Range<usize>| {
            let inside = values.get(unit.clone()).unwrap_or_default();
            inside.iter().map(|x| x - centre).sum::<f64>() / count
        };
        let deviations: Vec<f64> = self.units.iter().map(of_unit).collect();
        let rows = self.weights.chunks_exact(self.units.len());
        let sums = rows.map(|row| row.iter().zip(&deviations).map(|(&w, x)| f64::from(w) * x).sum::<f64>());
        sums.map(|sum| centre + self.widening * sum).collect()
    }
}

/// Runs of about `length` neighbours, as even as can be, at most [`MOST_BLOCKS`].
fn blocks(values: usize, length: usize) -> Vec<std::ops::Range<usize>> {
    let count = (values / length.max(1)).max(values.min(FEWEST)).min(MOST_BLOCKS);
    (0..count).map(|i| i * values / count..(i + 1) * values / count).collect()
}

/// The fewest blocks into which a series is cut: fewer say too little of how they differ.
const FEWEST_BLOCKS: usize = 6;

/// How many neighbours of a series to draw together, so that blocks are nearly independent: as many values as carry the
/// information of one, by the autocorrelation of neighbours.
#[must_use]
pub fn block_length(series: &[f64]) -> usize {
    let worth = effective_sample_size(series).unwrap_or(series.len() as f64).max(1.0);
    let length = (series.len() as f64 / worth).ceil() as usize;
    length.clamp(1, (series.len() / FEWEST_BLOCKS).max(1))
}

/// A seed that belongs to these values, whatever side they stand on.
pub fn seed_of(values: &[f64]) -> u64 {
    values.iter().fold(0, |seed, value| Rng::new(seed ^ value.to_bits(), "values").next_u64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums of twelve uniform values: normal enough.
    fn noise(random: &mut Rng, centre: f64, spread: f64) -> f64 {
        let sum: f64 = (0..12).map(|_| random.uniform()).sum();
        centre + spread * (sum - 6.0)
    }

    #[test]
    fn intervals_cover_the_true_difference_about_as_often_as_they_say() {
        let mut random = Rng::new(7, "test");
        for count in [3, 5, 30] {
            let rounds = 300;
            let mut covered = 0;
            for _ in 0..rounds {
                let a: Vec<f64> = (0..count).map(|_| noise(&mut random, 100.0, 5.0)).collect();
                let b: Vec<f64> = (0..count).map(|_| noise(&mut random, 103.0, 5.0)).collect();
                let plan = Plan::independent([&[count], &[count]], [1, 1], [seed_of(&a), seed_of(&b)]).unwrap();
                let interval = plan.interval(&a, &b);
                covered += usize::from(interval.low <= 3.0 && 3.0 <= interval.high);
            }
            let share = covered as f64 / rounds as f64;
            assert!((0.90..=1.0).contains(&share), "{count} values: {share}");
        }
    }

    #[test]
    fn neighbours_that_resemble_each_other_are_drawn_together() {
        let mut random = Rng::new(5, "test");
        let white: Vec<f64> = (0..200).map(|_| noise(&mut random, 10.0, 1.0)).collect();
        assert!(block_length(&white) <= 2);
        let mut level = 0.0;
        let drifting: Vec<f64> = white
            .iter()
            .map(|w| {
                level = 0.95 * level + w - 10.0;
                level
            })
            .collect();
        assert!(block_length(&drifting) >= 8, "{}", block_length(&drifting));
        assert_eq!((block_length(&[]), block_length(&[1.0, 2.0])), (1, 1));
        let width = |length| {
            let plan = Plan::independent([&[200], &[200]], [length, length], [1, 2]).unwrap();
            let range = plan.interval(&drifting, &white);
            range.high - range.low
        };
        assert!(width(block_length(&drifting)) > 1.5 * width(1));
    }

    #[test]
    fn pairs_see_through_noise_that_both_sides_share() {
        let mut random = Rng::new(1, "test");
        let shared: Vec<f64> = (0..12).map(|_| noise(&mut random, 1000.0, 100.0)).collect();
        let a: Vec<f64> = shared.iter().map(|x| noise(&mut random, *x, 1.0)).collect();
        let b: Vec<f64> = shared.iter().map(|x| noise(&mut random, *x + 10.0, 1.0)).collect();
        let paired = Plan::paired(12, 1).unwrap().interval(&a, &b);
        assert!(paired.excludes_zero() && paired.low < 10.0 && 10.0 < paired.high, "{paired:?}");
        let independent = Plan::independent([&[12], &[12]], [1, 1], [1, 2]).unwrap().interval(&a, &b);
        assert!(!independent.excludes_zero(), "{independent:?}");
    }

    #[test]
    fn repeats_are_drawn_whole() {
        // Within a run nothing varies, between runs much does: the interval must be as wide as the runs say.
        let a: Vec<f64> = [100.0, 120.0, 110.0].into_iter().flat_map(|x| [x; 50]).collect();
        let b: Vec<f64> = [105.0, 125.0, 112.0].into_iter().flat_map(|x| [x; 50]).collect();
        let by_run = Plan::independent([&[50, 50, 50], &[50, 50, 50]], [1, 1], [1, 2]).unwrap().interval(&a, &b);
        let by_iteration = Plan::independent([&[150], &[150]], [1, 1], [1, 2]).unwrap().interval(&a, &b);
        assert!(!by_run.excludes_zero() && by_iteration.excludes_zero(), "{by_run:?} {by_iteration:?}");
    }

    #[test]
    fn exchanging_the_sides_mirrors_the_interval() {
        let (a, b) = ([3.0, 5.0, 4.0, 9.0], [6.0, 7.0, 5.0, 8.0, 11.0]);
        let seeds = [seed_of(&a), seed_of(&b)];
        let forth = Plan::independent([&[4], &[5]], [1, 1], seeds).unwrap().interval(&a, &b);
        let back = Plan::independent([&[5], &[4]], [1, 1], [seeds[1], seeds[0]]).unwrap().interval(&b, &a);
        assert!((forth.low + back.high).abs() < 1e-9 && (forth.high + back.low).abs() < 1e-9, "{forth:?} {back:?}");
        let same = Plan::independent([&[4], &[4]], [1, 1], [seeds[0]; 2]).unwrap().interval(&a, &a);
        assert_eq!((same.low, same.high), (0.0, 0.0));
        assert!(Plan::paired(2, 1).is_none());
    }
}
