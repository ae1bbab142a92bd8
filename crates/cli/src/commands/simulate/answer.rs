//! The answer as text and JSON.

use serde_json::{Value, json};
use strobe_report::table::Table;
use strobe_sim::collector::{Answer, Intervals, LimitValue, Summary};
use strobe_sim::{Load, Outcome, Scenario};

use super::heading;
use super::scenario::Built;

/// The report for machines.
pub(super) fn report(built: &Built, outcome: &Outcome, intervals: Option<&Intervals>) -> Value {
    let mut report = json!({"simulation": heading(built)});
    let answer = serde_json::to_value(&outcome.answer).unwrap_or_default();
    if let (Some(report), Value::Object(answer)) = (report.as_object_mut(), answer) {
        report.extend(answer);
        report.insert("slo".into(), json!(built.scenario.slos));
        if outcome.partial {
            report.insert("partial".into(), json!(true));
        }
        report.insert("servers".into(), servers(&built.scenario, outcome));
        if let Some(intervals) = intervals {
            report.insert("prediction_intervals".into(), json!(intervals));
        }
    }
    report
}

fn servers(scenario: &Scenario, outcome: &Outcome) -> Value {
    json!({
        "count": scenario.speeds.len(),
        "most_at_once": outcome.cluster.most_servers,
        "server_seconds": outcome.cluster.server_ns / 1e9,
        "restarted_requests": outcome.cluster.restarted,
    })
}

/// The report for people.
pub(super) fn text(built: &Built, outcome: &Outcome, intervals: Option<&Intervals>, width: usize) -> String {
    let answer = &outcome.answer;
    let mut text = format!("workload  {}\nserver    {}\ncost      {}\n\n", built.workload, built.server, built.cost);
    let mut table = Table::new(["ms", "mean", "p50", "p90", "p95", "p99", "max"]).left(0);
    let rows = [
        ("queue     d - q", answer.queue_ms),
        ("TTFT      t1 - a", answer.ttft_ms),
        ("TPOT      (tn - t1)/(n-1)", answer.tpot_ms),
        ("ITL       gaps, pooled", answer.itl_ms),
        ("E2E       tn - a", answer.e2e_ms),
    ];
    for (name, summary) in rows {
        let cells = |s: Summary| [s.mean, s.p50, s.p90, s.p95, s.p99, s.max].map(|v| format!("{v:.3}"));
        match summary {
            Some(summary) => table.push(std::iter::once(name.to_string()).chain(cells(summary))),
            None => table.push(std::iter::once(name.to_string()).chain(std::iter::repeat_n("-".to_string(), 6))),
        }
    }
    text.push_str(&table.render(width));
    if let Some(intervals) = intervals {
        let of = |name: &str, at: &str| {
            let (low, high) = intervals.latencies.get(name)?.get(at)?;
            Some(format!("{low:.3} to {high:.3}"))
        };
        let said: Vec<String> = [("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2e_ms")]
            .iter()
            .filter_map(|(name, key)| Some(format!("{name} mean {}, p99 {}", of(key, "mean")?, of(key, "p99")?)))
            .collect();
        text.push_str(&format!(
            "another such run would see, with 95 % confidence by {} replications: {} ms\n",
            intervals.replications,
            said.join("; ")
        ));
    }
    text.push('\n');
    for (name, value) in facts(built, outcome) {
        text.push_str(&format!("{name:<12}{value}\n"));
    }
    text
}

fn facts(built: &Built, outcome: &Outcome) -> Vec<(&'static str, String)> {
    let (answer, cluster) = (&outcome.answer, &outcome.cluster);
    let t = &answer.throughput;
    let b = &answer.batch;
    let mut facts = vec![(
        "requests",
        format!(
            "{} completed, {} refused, {:.3} s of virtual time, {:.3} in the system on average",
            answer.num_requests, answer.num_refused, answer.duration_s, answer.mean_in_system
        ),
    )];
    let offered = answer.offered_rate_req_s.map_or(String::new(), |rate| format!(" ({rate:.3} offered)"));
    facts.push((
        "throughput",
        format!(
            "{:.3} requests/s{offered}, {:.1} output tokens/s, {:.1} tokens/s",
            t.requests_per_s, t.output_tokens_per_s, t.total_tokens_per_s
        ),
    ));
    if outcome.partial {
        let all = built.scenario.num_requests;
        facts.push(("PARTIAL RUN", format!("stopped when {} of {all} requests had ended", answer.num_offered)));
    }
    let goodput = &answer.goodput;
    if !built.scenario.slos.is_empty() {
        let said = |limit: &LimitValue| {
            let value = limit.value_ms.map_or("no request has one".to_owned(), |value| format!("{value:.3} ms"));
            let verdict = if limit.met { "met" } else { "missed" };
            format!("{} {value} of {} ms: {verdict}", limit.slo.name(), limit.slo.limit_ms)
        };
        facts.push(("limits", answer.limits.iter().map(said).collect::<Vec<_>>().join("; ")));
        facts.push((
            "goodput",
            format!(
                "{:.3} requests/s meet every limit, {:.2} % of those offered",
                goodput.requests_per_s,
                goodput.attainment * 100.0
            ),
        ));
    }
    facts.push((
        "batch",
        format!(
            "{} iterations, {:.2} requests each ({:.2} by time, most {}), {:.1} tokens each, {:.1} % busy",
            b.iterations,
            b.mean_requests,
            b.time_mean_requests,
            b.max_requests,
            b.mean_tokens,
            b.utilization * 100.0
        ),
    ));
    if let Some(kv) = &answer.kv {
        facts.push((
            "KV cache",
            format!(
                "{:.1} % of {} blocks in use by time, most {} blocks, {} preemptions, {} prompt tokens reused",
                kv.mean_used_share * 100.0,
                kv.blocks,
                kv.peak_used_blocks,
                kv.preemptions,
                kv.reused_tokens
            ),
        ));
    }
    if built.scenario.speeds.len() > 1 {
        facts.push((
            "servers",
            format!(
                "most {} at once, {:.1} server seconds, {} requests started again",
                cluster.most_servers,
                cluster.server_ns / 1e9,
                cluster.restarted
            ),
        ));
    }
    if built.scenario.is_open() && answer.stable.is_none() && !outcome.partial {
        let why = "the run is too short to tell whether the queue is bounded; raise --num-requests".to_owned();
        facts.push(("stability", why));
    }
    if let Some(outside) = &answer.outside {
        facts.push((
            "warning",
            format!(
                "{:.1} % of the iterations leave what the cost was measured on; {} by a factor of {:.2}",
                outside.share * 100.0,
                outside.quantity,
                outside.times
            ),
        ));
    }
    facts.push(("percentiles", answer.percentiles.to_string()));
    facts
}

/// Why a queue that grows has no latency to report; nothing where none grows.
pub(super) fn unstable(built: &Built, answer: &Answer) -> Option<String> {
    let growth = answer.queue_growth_per_s?;
    let offered = answer.offered_rate_req_s.unwrap_or(0.0);
    let served = answer.served_rate_req_s.unwrap_or(0.0);
    let lower = if matches!(built.scenario.load, Load::Replay(_)) { "--rate-scale" } else { "--rate" };
    let judged = answer.judged_on_requests.map_or(String::new(), |n| format!(" (seen in a run of {n} requests)"));
    Some(format!(
        "unstable: the queue grows without bound, by {growth:.3} requests each second{judged}, so the latencies above only say how \
         long the run was; {served:.3} of {offered:.3} requests/s are served. Lower {lower}, add --replicas, or give \
         --allow-unstable"
    ))
}
