//! How far the run was from what the hardware can do: MFU and MBU, per kind of iteration and for all.

use serde::Serialize;
use strobe_engine::IterationRecord;
use strobe_trace::IterationKind;

use crate::machine::{Achieved, MeasuredPeaks};

/// Sums over iterations, then ratios: never the mean of ratios.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Utilization {
    /// `prefill`, `mixed`, `decode` or `all`.
    pub kind: &'static str,
    pub iterations: usize,
    /// Sum of iteration wall times.
    pub wall_ms: f64,
    /// Share of all iterations' wall time.
    pub share_of_time: f64,
    /// Tokens computed, prompt and generation.
    pub tokens: u64,
    pub tokens_per_s: f64,
    /// Useful operations; work repeated after a pause is left out.
    pub flops: f64,
    pub bytes: f64,
    /// `flops / (wall * measured peak)`.
    pub mfu: f64,
    /// Bytes per second that the iterations needed at least.
    pub bytes_per_s: f64,
    /// `bytes / (wall * measured bandwidth)`.
    pub mbu: f64,
    /// Tokens computed a second time after a pause: waste.
    pub recomputed_tokens: u64,
}

/// Prompts only, generation only, or both.
pub(crate) fn kind_of(record: &IterationRecord) -> IterationKind {
    match (record.context_requests, record.generation_requests) {
        (0, _) => IterationKind::Decode,
        (_, 0) => IterationKind::Prefill,
        _ => IterationKind::Mixed,
    }
}

/// Generation with every request of the run in the batch: what decoding at this batch size takes, without the steps
/// in which the batch fills or drains.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct FullBatchDecode {
    /// Requests in each of these iterations: the most that any pure generation iteration had.
    pub requests: u32,
    pub iterations: usize,
    /// Mean wall time.
    pub step_ms: f64,
    pub tokens_per_s: f64,
}

impl FullBatchDecode {
    /// Recorded iterations are left out: recording takes time.
    pub(crate) fn of(iterations: &[IterationRecord]) -> Option<FullBatchDecode> {
        let decode = || iterations.iter().filter(|i| kind_of(i) == IterationKind::Decode && i.is_unrecorded());
        let requests = decode().map(|i| i.generation_requests).max()?;
        let walls: Vec<u64> =
            decode().filter(|i| i.generation_requests == requests).map(IterationRecord::wall_ns).collect();
        let total: u64 = walls.iter().sum();
        (total > 0).then(|| FullBatchDecode {
            requests,
            iterations: walls.len(),
            step_ms: total as f64 / walls.len() as f64 / 1e6,
            tokens_per_s: f64::from(requests) * walls.len() as f64 / (total as f64 / 1e9),
        })
    }
}

/// Tokens per second of pure prompt iterations that were not recorded.
pub(crate) fn prefill_tokens_per_s(iterations: &[IterationRecord]) -> Option<f64> {
    let chosen = || iterations.iter().filter(|i| kind_of(i) == IterationKind::Prefill && i.is_unrecorded());
    let wall: u64 = chosen().map(IterationRecord::wall_ns).sum();
    let tokens: u64 = chosen().map(|i| u64::from(i.context_tokens)).sum();
    (wall > 0).then(|| tokens as f64 / (wall as f64 / 1e9))
}

/// Bytes and operations per second, each of the kind of iteration that reached most.
pub(crate) fn achieved(iterations: &[IterationRecord]) -> Achieved {
    let rate = |kind: IterationKind| {
        let chosen = || iterations.iter().filter(move |i| kind_of(i) == kind);
        let ops: f64 = chosen().map(useful_flops).sum();
        ops / chosen().map(|i| i.wall_ns() as f64 / 1e9).sum::<f64>().max(1e-9)
    };
    let ops_per_s = IterationKind::ALL.into_iter().map(rate).fold(0.0, f64::max);
    Achieved { bytes_per_s: bytes_per_s(iterations), ops_per_s }
}

/// Operations of an iteration without those that repeat what was lost in a pause.
fn useful_flops(i: &IterationRecord) -> f64 {
    let tokens = f64::from(i.context_tokens + i.generation_requests);
    i.work.flops as f64 * (tokens - f64::from(i.recomputed_tokens)) / tokens.max(1.0)
}

/// Bytes per second of the kind of iteration that moved most.
fn bytes_per_s(iterations: &[IterationRecord]) -> f64 {
    let rate = |kind: IterationKind| {
        let chosen = || iterations.iter().filter(move |i| kind_of(i) == kind);
        let bytes: f64 = chosen().map(|i| i.work.bytes as f64).sum();
        bytes / chosen().map(|i| i.wall_ns() as f64 / 1e9).sum::<f64>().max(1e-9)
    };
    IterationKind::ALL.into_iter().map(rate).fold(0.0, f64::max)
}

/// One row per kind that occurred, and one for all; `ops_per_s` is what the engine's products reach at best.
pub(crate) fn by_kind(iterations: &[IterationRecord], peaks: &MeasuredPeaks, ops_per_s: f64) -> Vec<Utilization> {
    let total_ns: u64 = iterations.iter().map(IterationRecord::wall_ns).sum();
    let row = |kind: &'static str, wanted: &dyn Fn(&IterationRecord) -> bool| {
        let chosen: Vec<_> = iterations.iter().filter(|i| wanted(i)).collect();
        let wall_ns: u64 = chosen.iter().map(|i| i.wall_ns()).sum();
        if chosen.is_empty() || wall_ns == 0 {
            return None;
        }
        let tokens: u64 = chosen.iter().map(|i| u64::from(i.context_tokens + i.generation_requests)).sum();
        let recomputed_tokens: u64 = chosen.iter().map(|i| u64::from(i.recomputed_tokens)).sum();
        let flops: f64 = chosen.iter().map(|i| useful_flops(i)).sum();
        let bytes: f64 = chosen.iter().map(|i| i.work.bytes as f64).sum();
        let seconds = wall_ns as f64 / 1e9;
        Some(Utilization {
            kind,
            iterations: chosen.len(),
            wall_ms: wall_ns as f64 / 1e6,
            share_of_time: wall_ns as f64 / total_ns as f64,
            tokens,
            tokens_per_s: tokens as f64 / seconds,
            flops,
            bytes,
            mfu: flops / (seconds * ops_per_s),
            bytes_per_s: bytes / seconds,
            mbu: bytes / (seconds * peaks.read_bytes_per_s),
            recomputed_tokens,
        })
    };
    let kinds = IterationKind::ALL.into_iter().filter_map(|kind| row(kind.as_str(), &|i| kind_of(i) == kind));
    let mut rows: Vec<_> = kinds.collect();
    if rows.len() > 1 {
        rows.extend(row("all", &|_| true));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iteration(context: u32, generation: u32, wall_ns: u64, profiled: bool) -> IterationRecord {
        let mut record = IterationRecord {
            context_requests: u32::from(context > 0),
            context_tokens: context,
            generation_requests: generation,
            profiled,
            ..IterationRecord::default()
        };
        record.times.end = wall_ns;
        record
    }

    #[test]
    fn a_full_batch_leaves_out_what_fills_drains_and_records() {
        let run = [
            iteration(512, 0, 2_000_000, false),
            iteration(512, 0, 9_000_000, true),
            iteration(64, 3, 5_000_000, false),
            iteration(0, 4, 1_000_000, false),
            iteration(0, 4, 3_000_000, false),
            IterationRecord { lead_in: true, ..iteration(0, 4, 8_000_000, false) },
            iteration(0, 4, 7_000_000, true),
            iteration(0, 2, 500_000, false),
        ];
        let expected = FullBatchDecode { requests: 4, iterations: 2, step_ms: 2.0, tokens_per_s: 2000.0 };
        assert_eq!(FullBatchDecode::of(&run), Some(expected));
        assert_eq!(prefill_tokens_per_s(&run), Some(256_000.0));
        assert_eq!(FullBatchDecode::of(&run[..3]), None);
        assert_eq!(prefill_tokens_per_s(&run[3..]), None);
    }
}
