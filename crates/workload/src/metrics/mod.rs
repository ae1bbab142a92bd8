//! The metrics of a run, each defined once, from the request records alone.
//!
//! Stamps per request: `a` intended arrival, `s` sent, `q` queued, `d` first scheduled, `t1..tn`
//! token times. Latencies count from `a`, so that a slow client cannot hide its own queue; the
//! values counted from `s` stand beside them.
//!
//! Only completed requests enter latencies and throughputs. Failed and aborted ones are counted.

mod concurrency;
mod latency;
mod phases;

use serde::Serialize;
use thiserror::Error;

use crate::record::{Outcome, RequestRecord};
use strobe_stats::{Distribution, Interval, PercentileRule};

use concurrency::StepFunction;
use latency::Latencies;
pub use phases::{Phase, Phases, SteadyWindow};

pub(crate) const NS_PER_MS: f64 = 1e6;
pub(crate) const NS_PER_S: f64 = 1e9;

/// Above this share of the median time to first token, the client's lag distorts the run.
const LAG_LIMIT: f64 = 0.05;

/// What the metrics need to know beside the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricOptions {
    /// How percentiles are taken.
    pub rule: PercentileRule,
    /// Devices (or ranks) that shared the work; at least 1.
    pub world_size: usize,
    /// Whether tokens were streamed: trtllm-bench's report shows TTFT and TPOT only then.
    pub streaming: bool,
}

/// Records from which no metrics follow.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MetricError {
    /// There are no records.
    #[error("no request records: nothing was run")]
    NoRecords,
    /// No request was completed.
    #[error(
        "none of {offered} requests completed ({failed} failed, {aborted} aborted, {without_tokens} ended without a token); first error: {first_error}"
    )]
    NoneCompleted {
        /// Requests offered.
        offered: usize,
        /// Requests that failed.
        failed: usize,
        /// Requests that were aborted.
        aborted: usize,
        /// Requests that ended without a token.
        without_tokens: usize,
        /// The first failed request's error, or a dash.
        first_error: String,
    },
    /// A record contradicts itself.
    #[error("request record {id} contradicts itself: {problem}; its clock or its writer is broken")]
    Contradiction {
        /// The request's number.
        id: u64,
        /// What is wrong.
        problem: String,
    },
    /// The run took no time at all.
    #[error("all requests arrive and end at the same instant: no rate can be computed")]
    ZeroDuration,
    /// There is no device to divide by.
    #[error("world_size: expected at least 1, found 0")]
    ZeroWorldSize,
}

/// How late the client sent, `s - a`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClientLag {
    /// Median lag.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Largest lag.
    pub max_ms: f64,
    /// `p99_ms` over the median time to first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_share_of_ttft_p50: Option<f64>,
    /// Set when that share exceeds 5 %: the client, not the engine, shaped this run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// Little's law over the same window: mean concurrency = rate x mean latency.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LittleCheck {
    /// Time average of the requests in the system, by integration over the records' intervals.
    pub mean_concurrency: f64,
    /// Completion rate times mean latency.
    pub rate_times_latency: f64,
    /// Their difference over the first.
    pub relative_difference: f64,
}

impl LittleCheck {
    fn new(mean_concurrency: f64, rate_times_latency: f64) -> Option<LittleCheck> {
        (mean_concurrency > 0.0).then(|| LittleCheck {
            mean_concurrency,
            rate_times_latency,
            relative_difference: (rate_times_latency - mean_concurrency) / mean_concurrency,
        })
    }
}

/// Everything computed from a run's records. What is not known is absent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Metrics {
    /// How percentiles were taken.
    pub percentile_rule: PercentileRule,
    /// Whether tokens were streamed.
    pub streaming: bool,
    /// Devices (or ranks) that shared the work.
    pub world_size: usize,

    /// Requests offered: all records.
    pub num_offered: usize,
    /// Requests completed, N: the ones every row below is about.
    pub num_requests: usize,
    /// Requests that failed.
    pub num_failed: usize,
    /// Requests that were aborted.
    pub num_aborted: usize,
    /// Requests that ended without a token, which have no end stamp.
    pub num_without_tokens: usize,
    /// Completed requests with a single token: they have no TPOT and no gap.
    pub num_single_token: usize,
    /// The first error of a failed request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,

    /// Prompt tokens of completed requests.
    pub total_input_tokens: u64,
    /// Output tokens of completed requests.
    pub total_output_tokens: u64,
    /// Output tokens of requests that did not complete: work done, counted nowhere else.
    pub uncompleted_output_tokens: u64,
    /// How often requests were paused and recomputed, over all records.
    pub total_preemptions: u64,
    /// Prompt tokens taken from the prefix cache, over completed requests.
    pub total_reused_tokens: u64,

    /// T = max(tn) - min(a).
    pub total_latency_ms: f64,
    /// N/T.
    pub request_throughput_req_s: f64,
    /// Output tokens / T, first tokens included.
    pub output_throughput_tok_s: f64,
    /// (Prompt + output tokens) / T.
    pub total_throughput_tok_s: f64,
    /// Mean over requests of n/E2E.
    pub output_throughput_per_user_tok_s: f64,
    /// Output throughput / world size.
    pub output_throughput_per_gpu_tok_s: f64,
    /// sum(E2E)/T.
    pub avg_concurrent_requests: f64,
    /// Rate of the intended arrivals, (N-1)/(max a - min a) over all records; absent when all
    /// arrive at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offered_rate_req_s: Option<f64>,
    /// Rate at which requests were really sent, (N-1)/(max s - min s) over all records; absent
    /// when all were sent at one instant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub issue_rate_req_s: Option<f64>,

    /// E2E = tn - a.
    pub e2e_ms: Distribution,
    /// tn - s.
    pub e2e_from_send_ms: Distribution,
    /// TTFT = t1 - a.
    pub ttft_ms: Distribution,
    /// t1 - s.
    pub ttft_from_send_ms: Distribution,
    /// TPOT = (tn - t1)/(n-1), one value per request with n >= 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<Distribution>,
    /// NTPOT = (tn - a)/n.
    pub ntpot_ms: Distribution,
    /// ITL = t(i+1) - t(i), every gap of every request pooled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub itl_ms: Option<Distribution>,
    /// The largest gap of each request: stalls that pooling hides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_gap_ms: Option<Distribution>,
    /// GTPS = (n-1)/(tn - t1), per request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gtps_tok_s: Option<Distribution>,
    /// d - q; absent when no request has a `d`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_wait_ms: Option<Distribution>,
    /// t1 - d; absent when no request has a `d`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_ms: Option<Distribution>,
    /// 95 % interval of the median E2E, by order statistics; absent for too few requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub e2e_p50_interval_ms: Option<Interval>,
    /// 95 % interval of the p99 E2E, by order statistics; absent for too few requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub e2e_p99_interval_ms: Option<Interval>,
    /// How many independent requests these are worth, from the lag-1 autocorrelation of E2E in
    /// order of arrival: the intervals above hold for independent ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effective_num_requests: Option<f64>,

    /// The client's lag over all records.
    pub client_lag: ClientLag,
    /// Little's law over the whole run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub little: Option<LittleCheck>,
    /// Ramp-up, steady state and drain; absent when the run was too short to have them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phases: Option<Phases>,
    /// Why there are no phases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_steady_state_because: Option<String>,

    /// Prompt lengths of completed requests, in tokens.
    pub isl_tokens: Distribution,
    /// Output lengths of completed requests, in tokens.
    pub osl_tokens: Distribution,
    /// Prompt + output lengths of completed requests, in tokens.
    pub seq_len_tokens: Distribution,
}

/// Computes the metrics of a run.
pub fn metrics(records: &[RequestRecord], o: &MetricOptions) -> Result<Metrics, MetricError> {
    if o.world_size == 0 {
        return Err(MetricError::ZeroWorldSize);
    }
    if let Some((id, problem)) = records.iter().find_map(|r| Some((r.id, r.contradiction()?))) {
        return Err(MetricError::Contradiction { id, problem });
    }
    let counts = Counts::of(records);
    let completed: Vec<&RequestRecord> = records.iter().filter(|r| r.outcome() == Outcome::Completed).collect();
    let Some(span) = Span::of(&completed) else {
        return Err(counts.none_completed());
    };
    let total_s = span.length_ns() as f64 / NS_PER_S;
    if total_s == 0.0 {
        return Err(MetricError::ZeroDuration);
    }
    let n = completed.len();
    let latencies = Latencies::of(&completed);
    let summary = |values: &[f64]| Distribution::of(values, o.rule);
    // A completed request has one value of each of these, so the summaries exist.
    let whole = |values: &[f64]| summary(values).ok_or_else(|| counts.none_completed());
    let e2e_ms = whole(&latencies.e2e_ms)?;
    let ttft_ms = whole(&latencies.ttft_ms)?;

    let total_input_tokens: u64 = sum(&completed, |r| u64::from(r.num_input_tokens));
    let total_output_tokens: u64 = sum(&completed, |r| r.num_output_tokens() as u64);
    let all_output_tokens: u64 = records.iter().map(|r| r.num_output_tokens() as u64).sum();
    let request_throughput_req_s = n as f64 / total_s;
    let output_throughput_tok_s = total_output_tokens as f64 / total_s;

    let in_system = StepFunction::of(completed.iter().filter_map(|r| {
        let end = r.last_token_ns()?;
        Some((r.arrival_ns, end))
    }));
    let little = LittleCheck::new(
        in_system.mean_over(span.start_ns, span.end_ns),
        request_throughput_req_s * e2e_ms.average / 1e3,
    );
    let phases = phases::phases(&completed, &span);

    Ok(Metrics {
        percentile_rule: o.rule,
        streaming: o.streaming,
        world_size: o.world_size,
        num_offered: records.len(),
        num_requests: n,
        num_failed: counts.failed,
        num_aborted: counts.aborted,
        num_without_tokens: counts.without_tokens,
        num_single_token: completed.iter().filter(|r| r.num_output_tokens() < 2).count(),
        total_input_tokens,
        total_output_tokens,
        uncompleted_output_tokens: all_output_tokens - total_output_tokens,
        total_preemptions: records.iter().map(|r| u64::from(r.preemptions)).sum(),
        total_reused_tokens: sum(&completed, |r| u64::from(r.reused_tokens)),
        total_latency_ms: span.length_ns() as f64 / NS_PER_MS,
        request_throughput_req_s,
        output_throughput_tok_s,
        total_throughput_tok_s: (total_input_tokens + total_output_tokens) as f64 / total_s,
        output_throughput_per_user_tok_s: latencies.mean_output_rate_tok_s().ok_or(MetricError::ZeroDuration)?,
        output_throughput_per_gpu_tok_s: output_throughput_tok_s / o.world_size as f64,
        avg_concurrent_requests: latencies.e2e_ms.iter().sum::<f64>() / (total_s * 1e3),
        offered_rate_req_s: rate_req_s(records.iter().map(|r| r.arrival_ns)),
        issue_rate_req_s: rate_req_s(records.iter().map(|r| r.sent_ns)),
        e2e_from_send_ms: whole(&latencies.e2e_from_send_ms)?,
        ttft_from_send_ms: whole(&latencies.ttft_from_send_ms)?,
        tpot_ms: summary(&latencies.tpot_ms),
        ntpot_ms: whole(&latencies.ntpot_ms)?,
        itl_ms: summary(&latencies.itl_ms),
        largest_gap_ms: summary(&latencies.largest_gap_ms),
        gtps_tok_s: summary(&latencies.gtps_tok_s),
        queue_wait_ms: summary(&latencies.queue_wait_ms),
        prefill_ms: summary(&latencies.prefill_ms),
        e2e_p50_interval_ms: latencies.e2e_interval_ms(0.50),
        e2e_p99_interval_ms: latencies.e2e_interval_ms(0.99),
        effective_num_requests: latencies.effective_num_requests(&completed),
        client_lag: client_lag(records, o.rule, ttft_ms.p50).ok_or(MetricError::NoRecords)?,
        little,
        no_steady_state_because: phases.as_ref().err().cloned(),
        phases: phases.ok(),
        isl_tokens: whole(&values(&completed, |r| f64::from(r.num_input_tokens)))?,
        osl_tokens: whole(&values(&completed, |r| r.num_output_tokens() as f64))?,
        seq_len_tokens: whole(&values(&completed, |r| f64::from(r.num_input_tokens) + r.num_output_tokens() as f64))?,
        first_error: counts.first_error,
        e2e_ms,
        ttft_ms,
    })
}

fn sum(records: &[&RequestRecord], of: impl Fn(&RequestRecord) -> u64) -> u64 {
    records.iter().map(|r| of(r)).sum()
}

fn values(records: &[&RequestRecord], of: impl Fn(&RequestRecord) -> f64) -> Vec<f64> {
    records.iter().map(|r| of(r)).collect()
}

/// N events have N - 1 gaps: their rate is (N-1)/(last - first).
fn rate_req_s(times_ns: impl Iterator<Item = u64> + Clone) -> Option<f64> {
    let (first, last) = (times_ns.clone().min()?, times_ns.clone().max()?);
    let gaps = times_ns.count() - 1;
    (last > first).then(|| gaps as f64 / ((last - first) as f64 / NS_PER_S))
}

fn client_lag(records: &[RequestRecord], rule: PercentileRule, ttft_p50_ms: f64) -> Option<ClientLag> {
    let lags: Vec<f64> = records.iter().map(|r| (r.sent_ns as f64 - r.arrival_ns as f64) / NS_PER_MS).collect();
    let lag = Distribution::of(&lags, rule)?;
    let share = (ttft_p50_ms > 0.0).then(|| lag.p99 / ttft_p50_ms);
    let warning = share.filter(|&share| share > LAG_LIMIT).map(|share| {
        format!(
            "the client sent late: lag p99 {:.4} ms is {:.1} % of the median TTFT (limit 5 %); latencies show the client's queue, not only the engine",
            lag.p99,
            share * 100.0
        )
    });
    Some(ClientLag { p50_ms: lag.p50, p99_ms: lag.p99, max_ms: lag.maximum, p99_share_of_ttft_p50: share, warning })
}

/// From the first arrival to the last token of the completed requests.
pub(crate) struct Span {
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
}

impl Span {
    fn of(completed: &[&RequestRecord]) -> Option<Span> {
        Some(Span {
            start_ns: completed.iter().map(|r| r.arrival_ns).min()?,
            end_ns: completed.iter().filter_map(|r| r.last_token_ns()).max()?,
        })
    }

    pub(crate) fn length_ns(&self) -> u64 {
        self.end_ns - self.start_ns
    }
}

/// How many requests ended in which way.
struct Counts {
    offered: usize,
    failed: usize,
    aborted: usize,
    without_tokens: usize,
    first_error: Option<String>,
}

impl Counts {
    fn of(records: &[RequestRecord]) -> Counts {
        let count = |outcome| records.iter().filter(|r| r.outcome() == outcome).count();
        let first_failed = records.iter().find(|r| r.outcome() == Outcome::Failed);
        Counts {
            offered: records.len(),
            failed: count(Outcome::Failed),
            aborted: count(Outcome::Aborted),
            without_tokens: count(Outcome::WithoutTokens),
            first_error: first_failed
                .map(|r| r.error.clone().unwrap_or_else(|| format!("finish_reason {:?}", r.finish_reason))),
        }
    }

    fn none_completed(&self) -> MetricError {
        if self.offered == 0 {
            return MetricError::NoRecords;
        }
        MetricError::NoneCompleted {
            offered: self.offered,
            failed: self.failed,
            aborted: self.aborted,
            without_tokens: self.without_tokens,
            first_error: self.first_error.clone().unwrap_or_else(|| "-".to_string()),
        }
    }
}
