//! What strobe reports beyond trtllm-bench's rows, each number with its formula.

use std::fmt::Write;

use crate::metrics::{LittleCheck, Metrics, Phase, Phases};
use crate::trtllm_text::heading;
use strobe_stats::Distribution;

/// The report's second half: failures, stamp-based latencies, token gaps, client lag, Little's
/// check and the steady state. The caller prints.
#[must_use]
pub fn strobe_text(m: &Metrics) -> String {
    let mut text = Text::default();
    heading(&mut text.0, "REQUESTS AND RATES");
    outcomes(&mut text, m);
    rates(&mut text, m);
    text.0.push('\n');
    heading(&mut text.0, "LATENCY DETAILS (a arrival, s sent, q queued, d scheduled, t token)");
    latencies(&mut text, m);
    text.0.push('\n');
    heading(&mut text.0, "RAMP-UP, STEADY STATE, DRAIN");
    match (&m.phases, &m.no_steady_state_because) {
        (Some(phases), _) => steady_state(&mut text, phases),
        (None, Some(reason)) => text.line(format_args!("No steady state: {reason}.")),
        (None, None) => text.line(format_args!("No steady state.")),
    }
    text.0
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn line(&mut self, content: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.0, "{content}");
    }

    fn row(&mut self, label: &str, value: impl std::fmt::Display) {
        self.line(format_args!("{label:<50}{value}"));
    }

    fn distribution(&mut self, label: &str, formula: &str, d: Option<&Distribution>) {
        let name = format!("{label:<22}{formula:<22}");
        match d {
            Some(d) => self.line(format_args!(
                "{name}{:>8}{:>12.4}{:>12.4}{:>12.4}{:>12.4}",
                d.count, d.average, d.p50, d.p99, d.maximum
            )),
            None => self.line(format_args!("{name}{:>8}", "N/A")),
        }
    }
}

fn outcomes(text: &mut Text, m: &Metrics) {
    text.row("Requests offered:", m.num_offered);
    text.row("Requests completed (rows above are about these):", m.num_requests);
    text.row("Requests failed:", m.num_failed);
    text.row("Requests aborted:", m.num_aborted);
    if m.num_without_tokens > 0 {
        text.row("Requests without any token:", m.num_without_tokens);
    }
    if let Some(error) = &m.first_error {
        text.row("First error:", error);
    }
    if m.total_preemptions > 0 {
        text.row("Preemptions:", m.total_preemptions);
    }
    if m.total_reused_tokens > 0 {
        text.row("Prompt tokens from the prefix cache:", m.total_reused_tokens);
    }
}

fn rates(text: &mut Text, m: &Metrics) {
    let rate = |rate: Option<f64>| rate.map_or("at once".to_string(), |r| format!("{r:.4}"));
    text.row("Offered rate (N-1)/(max a - min a) (req/sec):", rate(m.offered_rate_req_s));
    text.row("Issue rate (N-1)/(max s - min s) (req/sec):", rate(m.issue_rate_req_s));
    text.row("Completed N/T (req/sec):", format!("{:.4}", m.request_throughput_req_s));
    let lag = &m.client_lag;
    text.row(
        "Client lag s - a, p50 / p99 / max (ms):",
        format!("{:.4} / {:.4} / {:.4}", lag.p50_ms, lag.p99_ms, lag.max_ms),
    );
    if let Some(warning) = &lag.warning {
        text.line(format_args!("warning: {warning}"));
    }
    if let Some(check) = &m.little {
        little(text, "Little, whole run: concurrency / N/T x mean E2E:", check);
    }
}

fn little(text: &mut Text, label: &str, check: &LittleCheck) {
    text.row(
        label,
        format!(
            "{:.4} / {:.4} ({:+.2} %)",
            check.mean_concurrency,
            check.rate_times_latency,
            check.relative_difference * 100.0
        ),
    );
}

fn latencies(text: &mut Text, m: &Metrics) {
    text.line(format_args!("{:<44}{:>8}{:>12}{:>12}{:>12}{:>12}", "ms", "N", "average", "p50", "p99", "maximum"));
    text.distribution("E2E", "tn - a", Some(&m.e2e_ms));
    text.distribution("E2E from send", "tn - s", Some(&m.e2e_from_send_ms));
    text.distribution("TTFT", "t1 - a", Some(&m.ttft_ms));
    text.distribution("TTFT from send", "t1 - s", Some(&m.ttft_from_send_ms));
    text.distribution("queue wait", "d - q", m.queue_wait_ms.as_ref());
    text.distribution("prefill", "t1 - d", m.prefill_ms.as_ref());
    text.distribution("TPOT", "(tn - t1)/(n-1)", m.tpot_ms.as_ref());
    text.distribution("ITL, pooled gaps", "t(i+1) - t(i)", m.itl_ms.as_ref());
    text.distribution("largest gap", "max per request", m.largest_gap_ms.as_ref());
    text.distribution("NTPOT", "(tn - a)/n", Some(&m.ntpot_ms));
    if m.num_single_token > 0 {
        text.line(format_args!("{} requests with a single token have no TPOT and no gap.", m.num_single_token));
    }
    for (name, interval) in [("p50", m.e2e_p50_interval_ms), ("p99", m.e2e_p99_interval_ms)] {
        if let Some(i) = interval {
            text.line(format_args!(
                "E2E {name} lies in {:.4} to {:.4} ms with {:.0} % confidence, if requests are independent.",
                i.low,
                i.high,
                i.confidence * 100.0
            ));
        }
    }
    if let Some(size) = m.effective_num_requests {
        text.line(format_args!(
            "Neighbouring requests are correlated: these {} count as about {size:.0} independent.",
            m.num_requests
        ));
    }
}

fn steady_state(text: &mut Text, phases: &Phases) {
    let part = |p: &Phase| {
        format!("{:.4} ms, {} output tokens, {} requests ended", p.duration_ms, p.output_tokens, p.completed_requests)
    };
    let steady = &phases.steady;
    text.row("Ramp-up:", part(&phases.ramp_up));
    text.row(
        &format!("Steady (>= 90 % of {} running):", phases.level_requests),
        format!(
            "{:.4} ms, {} output tokens, {} requests ended, {:.1} % of the total latency",
            steady.duration_ms,
            steady.output_tokens,
            steady.completed_requests,
            steady.share_of_total_latency * 100.0
        ),
    );
    text.row("Drain:", part(&phases.drain));
    text.row("Steady Output Throughput (tokens/sec):", format!("{:.4}", steady.output_throughput_tok_s));
    text.row("Steady Request Throughput (req/sec):", format!("{:.4}", steady.request_throughput_req_s));
    if let Some(check) = &steady.little {
        little(text, "Little, steady: running / rate x time running:", check);
    }
}
