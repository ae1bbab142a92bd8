//! The metrics: a hand-computed run, a run with a known steady state, and identities that hold for
//! every run.

mod common;

use common::{MS, record, three_requests};
use proptest::prelude::*;
use strobe_stats::percentile;
use strobe_workload::{Distribution, MetricError, MetricOptions, Metrics, PercentileRule, RequestRecord, metrics};

const OPTIONS: MetricOptions = MetricOptions { rule: PercentileRule::Linear, world_size: 2, streaming: true };

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= 1e-9 * expected.abs().max(1.0)
}

fn of(records: &[RequestRecord]) -> Metrics {
    metrics(records, &OPTIONS).unwrap()
}

#[test]
fn three_requests_by_hand() {
    let m = of(&three_requests());
    assert!(close(m.total_latency_ms, 50.0));
    assert!(close(m.request_throughput_req_s, 60.0));
    assert!(close(m.output_throughput_tok_s, 180.0));
    assert!(close(m.total_throughput_tok_s, 420.0));
    assert!(close(m.output_throughput_per_user_tok_s, 250.0 / 3.0));
    assert!(close(m.output_throughput_per_gpu_tok_s, 90.0));
    assert!(close(m.avg_concurrent_requests, 2.2));
    assert!(close(m.issue_rate_req_s.unwrap(), 200.0));
    assert!(close(m.e2e_ms.average, 110.0 / 3.0));
    assert!(close(m.ttft_ms.average, 50.0 / 3.0));
    assert!(close(m.tpot_ms.as_ref().unwrap().average, 110.0 / 9.0));
    assert!(close(m.gtps_tok_s.as_ref().unwrap().average, 100.0));
    // NTPOT: 30/3, 40/2, 40/4.
    assert!(close(m.ntpot_ms.average, 40.0 / 3.0));
    // Gaps: 10 10, 20, 5 5 10; largest of each: 10, 20, 10.
    let itl = m.itl_ms.as_ref().unwrap();
    assert_eq!((itl.count, itl.p50, itl.minimum), (6, 10.0, 5.0));
    assert!(close(m.largest_gap_ms.as_ref().unwrap().average, 40.0 / 3.0));
    // Queue: 0, 10, 10. Prefill: 10, 10, 10.
    assert!(close(m.queue_wait_ms.as_ref().unwrap().average, 20.0 / 3.0));
    assert_eq!(m.prefill_ms.as_ref().unwrap().maximum, 10.0);
    assert!(m.phases.is_none() && m.no_steady_state_because.is_some());
}

#[test]
fn single_tokens_have_no_tpot_and_are_counted() {
    let m = of(&[record(0, 1, 0, 0, &[5]), record(1, 1, 0, 0, &[5, 9])]);
    assert_eq!((m.num_requests, m.num_single_token), (2, 1));
    assert_eq!(m.tpot_ms.as_ref().unwrap().count, 1);
    let alone = of(&[record(0, 1, 0, 0, &[5])]);
    assert!(alone.tpot_ms.is_none() && alone.itl_ms.is_none() && alone.gtps_tok_s.is_none());
    assert!(alone.issue_rate_req_s.is_none());
}

#[test]
fn failed_requests_are_counted_but_not_timed() {
    let mut records = three_requests();
    let mut failed = record(3, 9, 0, 5, &[900]);
    failed.finish_reason = "error".to_string();
    failed.error = Some("out of blocks".to_string());
    let mut aborted = record(4, 9, 0, 5, &[900, 901]);
    aborted.finish_reason = "aborted".to_string();
    let mut empty = record(5, 9, 0, 5, &[]);
    empty.finish_reason = "stop".to_string();
    records.extend([failed, aborted, empty]);
    let (with, without) = (of(&records), of(&three_requests()));
    assert_eq!((with.num_offered, with.num_requests), (6, 3));
    assert_eq!((with.num_failed, with.num_aborted, with.num_without_tokens), (1, 1, 1));
    assert_eq!(with.first_error.as_deref(), Some("out of blocks"));
    assert_eq!(with.uncompleted_output_tokens, 3);
    assert_eq!(with.e2e_ms, without.e2e_ms);
    assert_eq!(with.total_latency_ms, without.total_latency_ms);
    assert_eq!(with.output_throughput_tok_s, without.output_throughput_tok_s);
}

#[test]
fn a_slow_client_shows_in_the_latency_and_is_warned_about() {
    let mut records = three_requests();
    let prompt = of(&records);
    assert_eq!(prompt.e2e_ms, prompt.e2e_from_send_ms);
    assert_eq!(prompt.client_lag.warning, None);
    // Sent 4 ms after it was due: latency from the arrival stays, from the send it shrinks.
    records[1].sent_ns += 4 * MS;
    let late = of(&records);
    assert_eq!(late.e2e_ms, prompt.e2e_ms);
    assert!(close(late.e2e_from_send_ms.average, (110.0 - 4.0) / 3.0));
    assert!(close(late.ttft_from_send_ms.average, (50.0 - 4.0) / 3.0));
    assert_eq!(late.client_lag.max_ms, 4.0);
    assert!(late.client_lag.warning.unwrap().contains("limit 5 %"));
}

#[test]
fn records_that_cannot_be_are_refused() {
    assert_eq!(metrics(&[], &OPTIONS), Err(MetricError::NoRecords));
    let mut failed = record(0, 1, 0, 0, &[1]);
    failed.error = Some("no room".to_string());
    let error = metrics(&[failed], &OPTIONS).unwrap_err().to_string();
    assert!(error.contains("none of 1 requests completed") && error.contains("no room"));
    let backwards = metrics(&[record(8, 1, 0, 0, &[5, 4])], &OPTIONS).unwrap_err();
    assert!(backwards.to_string().starts_with("request record 8"), "{backwards}");
    let instant = metrics(&[record(0, 1, 5, 5, &[5])], &OPTIONS);
    assert_eq!(instant, Err(MetricError::ZeroDuration));
    let nobody = MetricOptions { world_size: 0, ..OPTIONS };
    assert_eq!(metrics(&three_requests(), &nobody), Err(MetricError::ZeroWorldSize));
}

/// Four slots that start 1 ms apart, each running ten requests back to back, a token every ms.
fn four_slots() -> Vec<RequestRecord> {
    (0..40)
        .map(|id| {
            let (slot, turn) = (id % 4, id / 4);
            let start = slot + 10 * turn;
            let tokens: Vec<u64> = (1..=10).map(|i| start + i).collect();
            record(id, 8, 0, start, &tokens)
        })
        .collect()
}

#[test]
fn the_steady_window_leaves_out_ramp_and_drain() {
    let m = of(&four_slots());
    let phases = m.phases.unwrap();
    assert_eq!(phases.level_requests, 4);
    assert_eq!((phases.ramp_up.duration_ms, phases.ramp_up.output_tokens), (3.0, 6));
    assert_eq!((phases.drain.duration_ms, phases.drain.output_tokens), (3.0, 6));
    let steady = phases.steady;
    assert_eq!((steady.start_ms, steady.duration_ms), (3.0, 97.0));
    // Four slots at one token per ms: exactly 4000 tokens a second, against 3883 over the run.
    assert!(close(steady.output_throughput_tok_s, 4000.0));
    assert!(close(m.output_throughput_tok_s, 400.0 / 0.103));
    assert!(close(steady.share_of_total_latency, 97.0 / 103.0));
    assert_eq!(steady.little.unwrap().mean_concurrency, 4.0);
}

#[test]
fn one_wave_is_no_steady_state() {
    let wave: Vec<RequestRecord> = (0..8).map(|id| record(id, 4, 0, 0, &[5, 6, 7])).collect();
    let m = of(&wave);
    assert!(m.phases.is_none());
    assert!(m.no_steady_state_because.unwrap().starts_with("too short"));
    // One request after another is a steady state, of level 1.
    let chain: Vec<RequestRecord> = (0..8).map(|i| record(i, 4, 10 * i, 10 * i, &[10 * i + 5, 10 * i + 10])).collect();
    let phases = of(&chain).phases.unwrap();
    assert_eq!((phases.level_requests, phases.steady.duration_ms), (1, 80.0));
}

/// Any request: arrival, lag, queueing and prefill times, gaps between tokens, prompt length.
fn any_record() -> impl Strategy<Value = RequestRecord> {
    let gaps = prop::collection::vec(0u64..5000, 0..12);
    (0u64..50_000, 0u64..300, 0u64..3000, 1u64..3000, gaps, 1u32..500).prop_map(
        |(arrival, lag, wait, prefill, gaps, inputs)| {
            let (sent, queued) = (arrival + lag, arrival + lag + 1);
            let scheduled = queued + wait;
            let mut now = scheduled + prefill;
            let mut tokens = vec![now];
            for gap in gaps {
                now += gap;
                tokens.push(now);
            }
            RequestRecord {
                sent_ns: sent,
                queued_ns: queued,
                first_scheduled_ns: Some(scheduled),
                arrival_ns: arrival,
                output_ids: vec![],
                token_times_ns: tokens,
                ..record(0, inputs, 0, 0, &[])
            }
        },
    )
}

fn total(d: Option<&Distribution>) -> f64 {
    d.map_or(0.0, |d| d.average * d.count as f64)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn identities_hold_for_every_run(records in prop::collection::vec(any_record(), 1..60)) {
        let m = of(&records);
        let seconds = m.total_latency_ms / 1e3;
        let n = m.num_requests as f64;

        // Throughputs give back their counts.
        prop_assert!(close(m.request_throughput_req_s * seconds, n));
        prop_assert!(close(m.output_throughput_tok_s * seconds, m.total_output_tokens as f64));
        let tokens = (m.total_input_tokens + m.total_output_tokens) as f64;
        prop_assert!(close(m.total_throughput_tok_s * seconds, tokens));
        prop_assert!(close(m.seq_len_tokens.average, m.isl_tokens.average + m.osl_tokens.average));

        // Parts add up to their whole: E2E = TTFT + gaps; TTFT = lag + hand-over + wait + prefill.
        let e2e = total(Some(&m.e2e_ms));
        prop_assert!(close(e2e, total(Some(&m.ttft_ms)) + total(m.itl_ms.as_ref())));
        let lag: u64 = records.iter().map(|r| r.queued_ns - r.arrival_ns).sum();
        let parts = total(m.queue_wait_ms.as_ref()) + total(m.prefill_ms.as_ref());
        prop_assert!(close(total(Some(&m.ttft_ms)), lag as f64 / 1e6 + parts));

        // One gap fewer than tokens in each request.
        let gaps = m.itl_ms.as_ref().map_or(0, |d| d.count as u64);
        prop_assert_eq!(gaps, m.total_output_tokens - m.num_requests as u64);

        // Little's law, by integration against by averages.
        let little = m.little.unwrap();
        prop_assert!(little.relative_difference.abs() < 1e-9);
        prop_assert!(close(little.mean_concurrency, m.avg_concurrent_requests));

        // The three phases are the whole run.
        if let Some(p) = m.phases {
            let (a, b, c) = (p.ramp_up, p.steady, p.drain);
            prop_assert!(close(a.duration_ms + b.duration_ms + c.duration_ms, m.total_latency_ms));
            prop_assert_eq!(a.output_tokens + b.output_tokens + c.output_tokens, m.total_output_tokens);
            let ended = a.completed_requests + b.completed_requests + c.completed_requests;
            prop_assert_eq!(ended, m.num_requests);
        }
    }

    #[test]
    fn percentiles_agree_with_their_definitions(
        values in prop::collection::vec(-1e6f64..1e6, 1..200),
        q in 0.0f64..=1.0,
    ) {
        let mut sorted = values.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len() - 1;

        let linear = percentile(&sorted, q, PercentileRule::Linear).unwrap();
        let h = last as f64 * q;
        let share = h.fract();
        let naive = (1.0 - share) * sorted[h as usize] + share * sorted[(h as usize + 1).min(last)];
        prop_assert!((linear - naive).abs() <= 1e-6);

        let nearest = percentile(&sorted, q, PercentileRule::Nearest).unwrap();
        let index = ((sorted.len() as f64 * q).trunc() as usize).min(last);
        prop_assert_eq!(nearest, sorted[index]);

        for rule in [PercentileRule::Linear, PercentileRule::Nearest] {
            let d = Distribution::of(&values, rule).unwrap();
            let ascending = [d.minimum, d.p50, d.p90, d.p95, d.p99, d.maximum];
            prop_assert!(ascending.windows(2).all(|w| w[0] <= w[1]));
            prop_assert!(d.minimum <= d.average + 1e-6 && d.average <= d.maximum + 1e-6);
        }
    }
}

#[test]
fn the_rules_differ_as_published() {
    let ten: Vec<f64> = (1..=10).map(f64::from).collect();
    let p90 = |rule| percentile(&ten, 0.9, rule).unwrap();
    assert!(close(p90(PercentileRule::Linear), 9.1));
    assert_eq!(p90(PercentileRule::Nearest), 10.0);
    // by trtllm-bench's rule P50 of an even count is the upper median, and P99 is the maximum up to
    // 100 values.
    assert_eq!(percentile(&ten, 0.5, PercentileRule::Nearest), Some(6.0));
    let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
    assert_eq!(percentile(&hundred, 0.99, PercentileRule::Nearest), Some(100.0));
    for q in [-0.1, 1.1, f64::NAN] {
        assert_eq!(percentile(&ten, q, PercentileRule::Linear), None);
    }
    assert_eq!(percentile(&[], 0.5, PercentileRule::Linear), None);
    assert_eq!(Distribution::of(&[], PercentileRule::Linear), None);
    assert_eq!(Distribution::of(&ten, PercentileRule::Linear).unwrap().p99_9, None);
}
