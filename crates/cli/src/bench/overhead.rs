//! What recording costs, from one run in which every second iteration is recorded.

use serde::Serialize;
use strobe_engine::IterationRecord;
use strobe_workload::{Interval, bootstrap_interval, median};

/// Result of the interleaved comparison over decode steps.
#[derive(Clone, Debug, Serialize)]
pub struct Overhead {
    /// Pairs of neighbouring iterations compared.
    pub pairs: usize,
    /// Median step time with the recorder off and on.
    pub off_ms: f64,
    pub on_ms: f64,
    /// Median over pairs of `on / off - 1`.
    pub relative: f64,
    /// 95 % bootstrap interval of that median; absent below ten pairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
}

/// Compare each recorded iteration with the mean of its unrecorded neighbours, so that a drift (growing contexts, a
/// busy machine) cancels. Only iterations with the same batch as both neighbours count.
pub fn measure(iterations: &[IterationRecord]) -> Option<Overhead> {
    let same = |a: &IterationRecord, b: &IterationRecord| {
        (a.context_tokens, a.generation_requests) == (b.context_tokens, b.generation_requests)
    };
    let mut ratios = Vec::new();
    let (mut on, mut off) = (Vec::new(), Vec::new());
    for triple in iterations.windows(3) {
        let [before, here, after] = triple else { continue };
        if here.profiled && !before.profiled && !after.profiled && same(before, here) && same(here, after) {
            let neighbours = (before.wall_ns() + after.wall_ns()) as f64 / 2.0;
            if neighbours > 0.0 {
                ratios.push(here.wall_ns() as f64 / neighbours - 1.0);
                on.push(here.wall_ns() as f64 / 1e6);
                off.push(neighbours / 1e6);
            }
        }
    }
    Some(Overhead {
        pairs: ratios.len(),
        off_ms: median(&off)?,
        on_ms: median(&on)?,
        relative: median(&ratios)?,
        // A handful of pairs has no interval worth printing.
        interval: (ratios.len() >= 10).then(|| bootstrap_interval(&ratios, median, 2000, 0.95, 1)).flatten(),
    })
}
