//! What recording costs: recorded iterations against those around them that were not.

use serde::Serialize;
use strobe_engine::IterationRecord;
use strobe_stats::{Interval, bootstrap_interval, median};

/// Recorded iterations against unrecorded neighbours with the same batch.
#[derive(Clone, Debug, Serialize)]
pub struct Overhead {
    /// Blocks of recorded iterations that were compared.
    pub pairs: usize,
    /// Iterations of the longest of them.
    pub block: usize,
    /// Median over blocks of the median step time with the recorder off and on.
    pub off_ms: f64,
    pub on_ms: f64,
    /// Median over blocks of `on / off - 1`.
    pub relative: f64,
    /// 95 % bootstrap interval of that median; absent below ten blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
}

/// Unrecorded iterations on each side of a window that may be compared with it, where the window itself is shorter.
const LEAST_REACH: usize = 32;

/// A run in which alternate blocks of iterations were recorded for this comparison. Each is compared with the mean of its
/// neighbours on both sides, so that a drift (growing contexts, a busy machine) cancels.
pub fn of_probe(iterations: &[IterationRecord]) -> Option<Overhead> {
    measure(iterations, |_| usize::MAX, true)
}

/// A run with profile windows. A window may lie at the end of the run, so one side is enough.
pub fn of_windows(iterations: &[IterationRecord]) -> Option<Overhead> {
    measure(iterations, |block| block.max(LEAST_REACH), false)
}

/// What a step worked on; only like is compared with like.
fn batch(record: &IterationRecord) -> (u32, u32) {
    (record.context_tokens, record.generation_requests)
}

fn measure(iterations: &[IterationRecord], reach: impl Fn(usize) -> usize, both: bool) -> Option<Overhead> {
    let blocks: Vec<&[IterationRecord]> = iterations.chunk_by(|a, b| a.profiled == b.profiled).collect();
    let (mut on, mut off, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let mut longest = 0;
    for (place, block) in blocks.iter().enumerate().filter(|(_, block)| block.first().is_some_and(|i| i.profiled)) {
        let Some(common) = most_common(block) else { continue };
        // A block must mostly be of the batch that stands for it, on each side that is compared.
        let step = |part: &[IterationRecord]| -> Option<f64> {
            let alike: Vec<f64> =
                part.iter().filter(|i| batch(i) == common && !i.lead_in).map(|i| i.wall_ns() as f64 / 1e6).collect();
            (alike.len() >= block.len().div_ceil(4)).then(|| median(&alike)).flatten()
        };
        let near = reach(block.len());
        let before = place.checked_sub(1).and_then(|place| blocks.get(place));
        let before = before.and_then(|part| step(&part[part.len().saturating_sub(near)..]));
        let after = blocks.get(place + 1).and_then(|part| step(&part[..part.len().min(near)]));
        let around = match (before, after) {
            (Some(before), Some(after)) => (before + after) / 2.0,
            (Some(one), None) | (None, Some(one)) if !both => one,
            _ => continue,
        };
        if let Some(here) = step(block).filter(|_| around > 0.0) {
            longest = longest.max(block.len());
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
        interval: (ratios.len() >= 10).then(|| bootstrap_interval(&ratios, median, 2000, 0.95, 1)).flatten(),
    })
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
        Ok(())
    }
}
