//! Ramp-up, steady state and drain.
//!
//! A throughput over a whole run mixes in the time when the batch was still filling and when it
//! was running empty. The steady window is cut by concurrency alone, never by looking at the
//! result: it opens when the number of running requests first reaches 90 % of its level (the 95th
//! percentile of that number, weighted by time) and closes when it last leaves that.

use serde::Serialize;

use crate::record::RequestRecord;

use super::concurrency::StepFunction;
use super::{LittleCheck, NS_PER_MS, NS_PER_S, Span};

const LEVEL_PERCENTILE: f64 = 0.95;
const SHARE_OF_LEVEL: f64 = 0.90;

/// A run in three parts. Durations add up to the total latency, tokens to all output tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Phases {
    /// The level of running requests that counts as full.
    pub level_requests: usize,
    /// Before the level was reached.
    pub ramp_up: Phase,
    /// At the level.
    pub steady: SteadyWindow,
    /// After it was left for good.
    pub drain: Phase,
}

/// A part of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Phase {
    /// How long it took.
    pub duration_ms: f64,
    /// Output tokens made in it.
    pub output_tokens: u64,
    /// Requests that ended in it.
    pub completed_requests: usize,
}

/// The part of a run in which the batch was full.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SteadyWindow {
    /// From the first arrival to the window's opening.
    pub start_ms: f64,
    /// Its length.
    pub duration_ms: f64,
    /// Its length over the total latency.
    pub share_of_total_latency: f64,
    /// Output tokens made in it.
    pub output_tokens: u64,
    /// Requests that ended in it.
    pub completed_requests: usize,
    /// Output tokens made in it over its length.
    pub output_throughput_tok_s: f64,
    /// Requests that ended in it over its length.
    pub request_throughput_req_s: f64,
    /// Little's law for the running requests in this window. Unlike the check over the whole run
    /// it need not hold exactly: the difference says how far the window is from steady.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub little: Option<LittleCheck>,
}

/// The phases of a run, or why it has none.
pub(super) fn phases(completed: &[&RequestRecord], span: &Span) -> Result<Phases, String> {
    let running: Vec<Running> = completed.iter().filter_map(|r| Running::of(r)).collect();
    let count = StepFunction::of(running.iter().map(|r| (r.start_ns, r.end_ns)));
    let level = count
        .time_weighted_percentile(LEVEL_PERCENTILE)
        .filter(|&level| level > 0)
        .ok_or("no request ran for any length of time")?;
    let (start, end) =
        count.first_and_last_at_least(SHARE_OF_LEVEL * level as f64).ok_or("no request ran for any length of time")?;

    // A full batch that ends together never had to be refilled: that is one wave, not a state.
    let ended_before_close = running.iter().filter(|r| start < r.end_ns && r.end_ns < end).count();
    if ended_before_close < level {
        return Err(format!(
            "too short: {ended_before_close} requests ended while {level} were running, and a steady state needs at least that many to be replaced"
        ));
    }

    // Each stamp falls into exactly one part. One at a boundary belongs to the part it closes.
    let part = |from: u64, to: u64, inside: &dyn Fn(u64) -> bool| Phase {
        duration_ms: (to - from) as f64 / NS_PER_MS,
        output_tokens: tokens(completed).filter(|&time| inside(time)).count() as u64,
        completed_requests: running.iter().filter(|r| inside(r.end_ns)).count(),
    };
    let ramp_up = part(span.start_ns, start, &|time| time <= start);
    let steady = part(start, end, &|time| start < time && time <= end);
    let drain = part(end, span.end_ns, &|time| end < time);
    let seconds = (end - start) as f64 / NS_PER_S;
    let request_throughput_req_s = steady.completed_requests as f64 / seconds;
    let in_window = running.iter().filter(|r| start < r.end_ns && r.end_ns <= end);
    let service_ns: u64 = in_window.map(|r| r.end_ns - r.start_ns).sum();
    Ok(Phases {
        level_requests: level,
        steady: SteadyWindow {
            start_ms: (start - span.start_ns) as f64 / NS_PER_MS,
            duration_ms: steady.duration_ms,
            share_of_total_latency: (end - start) as f64 / span.length_ns() as f64,
            output_tokens: steady.output_tokens,
            completed_requests: steady.completed_requests,
            output_throughput_tok_s: steady.output_tokens as f64 / seconds,
            request_throughput_req_s,
            // Rate x mean service time = total service time / window.
            little: LittleCheck::new(count.mean_over(start, end), service_ns as f64 / NS_PER_S / seconds),
        },
        ramp_up,
        drain,
    })
}

/// When a request occupied the engine: from its first scheduling (or, unknown, its sending) on.
struct Running {
    start_ns: u64,
    end_ns: u64,
}

impl Running {
    fn of(record: &RequestRecord) -> Option<Running> {
        Some(Running {
            // Never before the arrival, where the run's span may begin.
            start_ns: record.first_scheduled_ns.unwrap_or(record.sent_ns).max(record.arrival_ns),
            end_ns: record.last_token_ns()?,
        })
    }
}

/// The stamps of all tokens.
fn tokens(completed: &[&RequestRecord]) -> impl Iterator<Item = u64> {
    completed.iter().flat_map(|r| r.token_times_ns.iter().copied())
}
