//! What recording costs: recorded iterations against those around them that were not.

use serde::Serialize;
use strobe_engine::IterationRecord;
use strobe_engine::host::disturbed;
use strobe_stats::{Interval, Rng, bootstrap_interval, median};

/// Recorded iterations against unrecorded neighbours with the same batch.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Overhead {
    /// Blocks of recorded iterations that were compared.
    pub pairs: usize,
    /// Iterations of the longest of them.
    pub block: usize,
    /// Median over blocks of the median step time with the recorder off and on.
    pub off_ms: f64,
    pub on_ms: f64,
    /// Median over blocks of `on / off - 1`.
    pub relative: f64,
    /// 95 % bootstrap interval of that median; absent below ten blocks of a probe, always there for windows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
}

/// Unrecorded iterations on each side of a window that may be compared with it, where the window itself is shorter.
const LEAST_REACH: usize = 32;
/// Steps of one batch that a window must have, and as many around it: an interval from fewer is too narrow to be true.
const LEAST_STEPS: usize = 16;
/// An interval wider than this to each side says nothing about a cost of a few percent.
const MOST_HALF_WIDTH: f64 = 0.02;
/// Resamples of the bootstrap.
const RESAMPLES: usize = 2000;

/// A run in which alternate blocks of iterations were recorded for this comparison. Each is compared with the mean of its
/// neighbours on both sides, so that a drift (growing contexts, a busy machine) cancels. Disturbed iterations are left out.
pub(crate) fn of_probe(iterations: &[IterationRecord]) -> Option<Overhead> {
    let (mut on, mut off, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let mut longest = 0;
    for recorded in Recorded::all(iterations, |_| usize::MAX) {
        // A block must mostly be of the batch that stands for it, on each side that is compared.
        let step = |part: &[f64]| (part.len() >= recorded.length.div_ceil(4)).then(|| median(part)).flatten();
        let (Some(here), Some(before), Some(after)) =
            (step(&recorded.on), step(&recorded.before), step(&recorded.after))
        else {
            continue;
        };
        let around = (before + after) / 2.0;
        if around > 0.0 {
            longest = longest.max(recorded.length);
            ratios.push(here / around - 1.0);
            on.push(here);
            off.push(around);
        }
    }
    Some(Overhead {
        pairs: ratios.len(),
        block: longest,
        off_ms: median(&off)?,
        on_ms: median(&on)?,
        relative: median(&ratios)?,
        // A handful of pairs has no interval worth printing.
        interval: (ratios.len() >= 10).then(|| bootstrap_interval(&ratios, median, RESAMPLES, 0.95, 1)).flatten(),
    })
}

/// A run with profile windows; `None` unless the cost is known to two percentage points. A window may lie at the end of the
/// run, so one side is enough. Disturbed iterations are left out. The interval comes from a bootstrap over runs of neighbouring
/// iterations, which are alike: single ones would make it too narrow.
pub(crate) fn of_windows(iterations: &[IterationRecord]) -> Option<Overhead> {
    let enough = |w: &Recorded| w.on.len() >= LEAST_STEPS && w.before.len() + w.after.len() >= LEAST_STEPS;
    let windows: Vec<Recorded> =
        Recorded::all(iterations, |length| length.max(LEAST_REACH)).into_iter().filter(enough).collect();
    let relative = relative(&windows)?;
    let mut rng = Rng::new(1, "recorder cost");
    let mut resample = |_| {
        let again: Vec<Recorded> = windows.iter().map(|window| window.resampled(&mut rng)).collect();
        self::relative(&again)
    };
    let mut estimates: Vec<f64> = (0..RESAMPLES).filter_map(&mut resample).collect();
    estimates.sort_by(f64::total_cmp);
    let tail = estimates.len() / 40;
    let (low, high) = (*estimates.get(tail)?, *estimates.get(estimates.len().checked_sub(1 + tail)?)?);
    if high - low > 2.0 * MOST_HALF_WIDTH {
        return None;
    }
    let of_windows = |step: fn(&Recorded) -> Option<f64>| median(&windows.iter().filter_map(step).collect::<Vec<_>>());
    Some(Overhead {
        pairs: windows.len(),
        block: windows.iter().map(|window| window.length).max()?,
        off_ms: of_windows(Recorded::around)?,
        on_ms: of_windows(|window| median(&window.on))?,
        relative,
        interval: Some(Interval { low, high, confidence: 0.95 }),
    })
}

/// Median over windows of their steps against those around them.
fn relative(windows: &[Recorded]) -> Option<f64> {
    let ratio = |window: &Recorded| Some(median(&window.on)? / window.around().filter(|ms| *ms > 0.0)? - 1.0);
    median(&windows.iter().filter_map(ratio).collect::<Vec<_>>())
}

/// What a step worked on; only like is compared with like.
fn batch(record: &IterationRecord) -> (u32, u32) {
    (record.context_tokens, record.generation_requests)
}

/// A run of recorded iterations and its neighbours: wall times in milliseconds of those of one batch, in order.
struct Recorded {
    on: Vec<f64>,
    before: Vec<f64>,
    after: Vec<f64>,
    /// Recorded iterations of any batch.
    length: usize,
}

impl Recorded {
    /// Every run of recorded iterations, with at most `reach` (of its length) neighbours on each side.
    fn all(iterations: &[IterationRecord], reach: impl Fn(usize) -> usize) -> Vec<Recorded> {
        let disturbed = disturbed(iterations);
        let mut found = Vec::new();
        let mut blocks: Vec<(usize, usize)> = Vec::new();
        let mut start = 0;
        for block in iterations.chunk_by(|a, b| a.profiled == b.profiled) {
            blocks.push((start, start + block.len()));
            start += block.len();
        }
        for (place, &(first, end)) in blocks.iter().enumerate().filter(|(_, (first, _))| iterations[*first].profiled) {
            let Some(common) = most_common(&iterations[first..end]) else { continue };
            let alike = |from: usize, to: usize| -> Vec<f64> {
                let inside = iterations[from..to].iter().zip(&disturbed[from..to]);
                let counts = |i: &IterationRecord, disturbed: Option<bool>| {
                    batch(i) == common && !i.lead_in && disturbed != Some(true)
                };
                inside.filter(|(i, d)| counts(i, **d)).map(|(i, _)| i.wall_ns() as f64 / 1e6).collect()
            };
            let near = reach(end - first);
            let before = place.checked_sub(1).map_or((0, 0), |place| blocks[place]);
            let after = blocks.get(place + 1).copied().unwrap_or((0, 0));
            found.push(Recorded {
                on: alike(first, end),
                before: alike(before.0.max(before.1.saturating_sub(near)), before.1),
                after: alike(after.0, after.1.min(after.0.saturating_add(near))),
                length: end - first,
            });
        }
        found
    }

    /// The usual step around it: the mean of both sides, so that a drift cancels; one side where there is no other.
    fn around(&self) -> Option<f64> {
        match (median(&self.before), median(&self.after)) {
            (Some(before), Some(after)) => Some((before + after) / 2.0),
            (one, other) => one.or(other),
        }
    }

    /// The same made of runs of neighbours, drawn with replacement.
    fn resampled(&self, rng: &mut Rng) -> Recorded {
        let mut draw = |values: &[f64]| -> Vec<f64> {
            let length = (values.len() as f64).sqrt().ceil() as usize;
            let mut drawn = Vec::with_capacity(values.len() + length);
            while drawn.len() < values.len() {
                let start = rng.below((values.len() - length + 1) as u64) as usize;
                drawn.extend_from_slice(&values[start..start + length]);
            }
            drawn.truncate(values.len());
            drawn
        };
        Recorded { on: draw(&self.on), before: draw(&self.before), after: draw(&self.after), length: self.length }
    }
}

/// The batch that most iterations of a block have.
fn most_common(block: &[IterationRecord]) -> Option<(u32, u32)> {
    let count = |wanted: &IterationRecord| block.iter().filter(|i| batch(i) == batch(wanted)).count();
    block.iter().max_by_key(|record| count(record)).map(batch)
}

#[cfg(test)]
mod tests {
    use strobe_engine::recorder::StepTimes;

    use super::*;

    fn iterations(steps: &[(bool, u32, u64)]) -> Vec<IterationRecord> {
        let record = |&(profiled, generation_requests, end): &(bool, u32, u64)| IterationRecord {
            profiled,
            generation_requests,
            times: StepTimes { end, ..StepTimes::default() },
            ..IterationRecord::default()
        };
        steps.iter().map(record).collect()
    }

    #[test]
    fn single_iterations_are_compared_with_both_neighbours() -> Result<(), Box<dyn std::error::Error>> {
        let steps = [(false, 4, 100), (true, 4, 120), (false, 4, 140), (true, 4, 150), (false, 3, 100)];
        let found = of_probe(&iterations(&steps)).ok_or("nothing was compared")?;
        // The second recorded one has a neighbour with another batch.
        assert_eq!((found.pairs, found.block), (1, 1));
        assert!(found.relative.abs() < 1e-9, "a drift cancels: {found:?}");
        assert!(of_probe(&iterations(&steps[..2])).is_none(), "one side is not enough");
        Ok(())
    }

    #[test]
    fn a_block_is_judged_by_its_median() -> Result<(), Box<dyn std::error::Error>> {
        let off = [(false, 8, 100); 16];
        let mut on = [(true, 8, 110); 16];
        on[0].2 = 9000; // the first step of a window, with everything that is done once
        let steps: Vec<_> = off.into_iter().chain(on).chain(off).chain(on).collect();
        let found = of_probe(&iterations(&steps)).ok_or("nothing was compared")?;
        assert_eq!((found.pairs, found.block), (1, 16), "the last block has no second neighbour");
        assert!((found.relative - 0.1).abs() < 1e-9);
        let found = of_windows(&iterations(&steps)).ok_or("nothing was compared")?;
        assert_eq!(found.pairs, 2);
        assert!(found.interval.is_some_and(|i| i.low <= found.relative && found.relative <= i.high), "{found:?}");
        Ok(())
    }

    /// Steps of a machine with neighbours: most take about as long, some runs of them half as long again.
    fn noisy(count: usize, profiled: bool, ns: u64, spread: u64) -> Vec<(bool, u32, u64)> {
        (0..count as u64).map(|i| (profiled, 8, ns + (i * 7919 % 13) * spread / 13)).collect()
    }

    #[test]
    fn a_cost_that_is_not_known_is_not_given() {
        let run = |spread| -> Vec<_> {
            [
                noisy(32, false, 1_000_000, spread),
                noisy(32, true, 1_030_000, spread),
                noisy(32, false, 1_000_000, spread),
            ]
            .concat()
        };
        let known = of_windows(&iterations(&run(10_000)));
        assert!(known.as_ref().is_some_and(|o| (o.relative - 0.03).abs() < 0.01 && o.interval.is_some()), "{known:?}");
        assert!(of_windows(&iterations(&run(900_000))).is_none(), "the interval would be wide");
        let short: Vec<_> = [noisy(32, false, 1_000_000, 0), noisy(8, true, 1_030_000, 0)].concat();
        assert!(of_windows(&iterations(&short)).is_none(), "few steps have no interval");
    }

    #[test]
    fn disturbed_iterations_do_not_count() {
        let mut steps = [noisy(32, false, 1_000_000, 1000), noisy(32, true, 1_010_000, 1000)].concat();
        steps[32..48].iter_mut().for_each(|step| step.2 = 9_000_000);
        let mut run = iterations(&steps);
        assert!(of_windows(&run).is_none(), "half of the window is eight times as long");
        for record in &mut run {
            let waited = if record.wall_ns() > 5_000_000 { 8_000_000 } else { 0 };
            record.host = Some(strobe_engine::HostReading {
                cpu_wait_max_ns: Some(waited),
                covers: 1,
                wall_ns: record.wall_ns(),
                ..Default::default()
            });
        }
        let found = of_windows(&run);
        assert!(found.as_ref().is_some_and(|o| (o.relative - 0.01).abs() < 0.005), "{found:?}");
    }
}
