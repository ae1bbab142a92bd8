//! The per-request latencies, in milliseconds.

use crate::record::RequestRecord;
use strobe_stats::{Interval, effective_sample_size, mean, percentile_interval, sorted};

use super::{NS_PER_MS, NS_PER_S};

const CONFIDENCE: f64 = 0.95;

/// One vector per metric; those with one value per completed request keep the records' order.
#[derive(Default)]
pub(super) struct Latencies {
    pub(super) e2e_ms: Vec<f64>,
    pub(super) e2e_from_send_ms: Vec<f64>,
    pub(super) ttft_ms: Vec<f64>,
    pub(super) ttft_from_send_ms: Vec<f64>,
    pub(super) tpot_ms: Vec<f64>,
    pub(super) ntpot_ms: Vec<f64>,
    pub(super) itl_ms: Vec<f64>,
    pub(super) largest_gap_ms: Vec<f64>,
    pub(super) gtps_tok_s: Vec<f64>,
    pub(super) queue_wait_ms: Vec<f64>,
    pub(super) prefill_ms: Vec<f64>,
    output_rate_tok_s: Vec<f64>,
}

impl Latencies {
    /// The latencies of completed requests, whose stamps are known to be in order.
    pub(super) fn of(completed: &[&RequestRecord]) -> Latencies {
        let mut all = Latencies::default();
        for record in completed {
            if let (Some(first), Some(last)) = (record.first_token_ns(), record.last_token_ns()) {
                all.add(record, first, last);
            }
        }
        all
    }

    fn add(&mut self, record: &RequestRecord, first: u64, last: u64) {
        let n = record.num_output_tokens() as f64;
        let e2e_ms = ms(record.arrival_ns, last);
        self.e2e_ms.push(e2e_ms);
        self.e2e_from_send_ms.push(ms(record.sent_ns, last));
        self.ttft_ms.push(ms(record.arrival_ns, first));
        self.ttft_from_send_ms.push(ms(record.sent_ns, first));
        self.ntpot_ms.push(e2e_ms / n);
        // A virtual clock may finish a request in no time: it has no rate.
        if last > record.arrival_ns {
            let e2e_s = (last - record.arrival_ns) as f64 / NS_PER_S;
            self.output_rate_tok_s.push(n / e2e_s);
        }
        if n >= 2.0 {
            self.tpot_ms.push(ms(first, last) / (n - 1.0));
            let gaps = record.token_times_ns.windows(2).map(|w| ms(w[0], w[1]));
            self.itl_ms.extend(gaps.clone());
            self.largest_gap_ms.push(gaps.fold(0.0, f64::max));
            if last > first {
                let generation_s = (last - first) as f64 / NS_PER_S;
                self.gtps_tok_s.push((n - 1.0) / generation_s);
            }
        }
        if let Some(scheduled) = record.first_scheduled_ns {
            self.queue_wait_ms.push(ms(record.queued_ns, scheduled));
            self.prefill_ms.push(ms(scheduled, first));
        }
    }

    /// Mean of each request's own rate, n/E2E; not the ratio of sums.
    pub(super) fn mean_output_rate_tok_s(&self) -> Option<f64> {
        mean(&self.output_rate_tok_s)
    }

    pub(super) fn e2e_interval_ms(&self, q: f64) -> Option<Interval> {
        percentile_interval(&sorted(&self.e2e_ms), q, CONFIDENCE)
    }

    pub(super) fn effective_num_requests(&self, completed: &[&RequestRecord]) -> Option<f64> {
        let mut by_arrival: Vec<(u64, u64, f64)> =
            completed.iter().zip(&self.e2e_ms).map(|(r, &e2e)| (r.arrival_ns, r.id, e2e)).collect();
        by_arrival.sort_unstable_by_key(|&(arrival, id, _)| (arrival, id));
        let series: Vec<f64> = by_arrival.into_iter().map(|(_, _, e2e)| e2e).collect();
        effective_sample_size(&series)
    }
}

fn ms(from_ns: u64, to_ns: u64) -> f64 {
    (to_ns as f64 - from_ns as f64) / NS_PER_MS
}
