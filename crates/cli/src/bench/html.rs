//! The run as one page that can be mailed.

use serde_json::Value;
use strobe_analyze::budget::{budget_by_kind, budgets};
use strobe_analyze::top_ops::top_ops;
use strobe_report::html::{Card, Page};
use strobe_report::human;
use strobe_report::svg::{self, CdfChart, CdfSeries, IterationStrip, StackedChart, StackedRow, StripCell, Unit};
use strobe_trace::Trace;

use super::experts::{self, ExpertReport};
use super::host;
use super::outcome::Outcome;
use super::text;
use super::utilization::kind_of;
use crate::recording;

/// The page of one run.
pub fn page(outcome: &Outcome, report: &Value) -> String {
    let config = &outcome.config;
    let mut page = Page::new(format!("strobe: {}", config.model_name)).subtitle(subtitle(outcome));
    // Of several things to know before all others the gravest stands.
    if let Some(warning) = outcome.run.host.as_ref().and_then(host::warning) {
        page = page.verdict(warning);
    }
    if outcome.info.perfect_router.is_some() {
        page = page.verdict(experts::WRONG);
    }
    if outcome.run.partial {
        page = page.verdict("Partial run: interrupted before all requests had ended.");
    }
    if let Ok(m) = &outcome.metrics {
        page = page
            .card(
                Card::new("Output throughput", format!("{:.1}", m.output_throughput_tok_s))
                    .unit("tok/s")
                    .note("output tokens / total latency"),
            )
            .card(
                Card::new("Request throughput", format!("{:.3}", m.request_throughput_req_s))
                    .unit("req/s")
                    .note(format!("{} requests", m.num_requests)),
            )
            .card(
                Card::new("Request latency, p50", format!("{:.1}", m.e2e_ms.p50))
                    .unit("ms")
                    .note(format!("p99 {:.1} ms", m.e2e_ms.p99)),
            )
            .card(
                Card::new("Time to first token, p50", format!("{:.1}", m.ttft_ms.p50))
                    .unit("ms")
                    .note(format!("p99 {:.1} ms", m.ttft_ms.p99)),
            );
        if let Some(itl) = &m.itl_ms {
            page = page.card(
                Card::new("Inter-token gap, p50", format!("{:.2}", itl.p50))
                    .unit("ms")
                    .note(format!("p99 {:.2} ms", itl.p99)),
            );
        }
    }
    for row in &outcome.utilization {
        if row.kind != "all" {
            let mut note =
                format!("MBU {}, {} of the time", human::percent(row.mbu), human::percent(row.share_of_time));
            if row.mfu > 1.0 {
                note.push_str("; above the measured peak, which `strobe doctor` measures again");
            }
            page = page.card(Card::new(format!("MFU, {}", row.kind), human::percent(row.mfu)).note(note));
        }
    }
    page = page.section("Latency").svg(&latency_cdf(&[("", &outcome.run.records)]));
    page = page.section("Iterations").svg(&iteration_strip(outcome));
    if let Some(report) = ExpertReport::of(outcome) {
        page = report.page(page);
    }
    if let Some(trace) = &outcome.trace {
        page = profile(page, trace);
    }
    page = page.section("Report").details("Text report", &text::report(outcome, 110));
    page.details("report.json", &format!("{report:#}")).finish()
}

fn subtitle(outcome: &Outcome) -> String {
    let build = &outcome.config.build;
    format!(
        "{}, weights {}, {} ({}); {}",
        build.dtype,
        outcome.config.describe_origin(),
        outcome.info.device.describe(),
        outcome.machine.cpu,
        outcome.command
    )
}

/// Latency distributions of one or more runs.
pub fn latency_cdf(runs: &[(&str, &[strobe_workload::RequestRecord])]) -> svg::Svg {
    let series = runs.iter().flat_map(|(name, records)| {
        let records: Vec<_> = records.iter().filter(|r| r.finish_reason != "aborted").collect();
        let label = |what: &str| if name.is_empty() { what.to_string() } else { format!("{what}, {name}") };
        let since_arrival = |end: &dyn Fn(&strobe_workload::RequestRecord) -> Option<u64>| -> Vec<f64> {
            records.iter().filter_map(|r| Some(end(r)?.saturating_sub(r.arrival_ns) as f64)).collect()
        };
        [
            CdfSeries::new(label("first token"), since_arrival(&|r| r.first_token_ns())),
            CdfSeries::new(label("whole request"), since_arrival(&|r| r.last_token_ns())),
        ]
    });
    svg::cdf(&CdfChart {
        title: "Share of requests done within a time since arrival".into(),
        x_label: "time since arrival".into(),
        unit: Unit::Time,
        series: series.collect(),
    })
}

fn iteration_strip(outcome: &Outcome) -> svg::Svg {
    let cell = |i: &strobe_engine::IterationRecord| StripCell {
        iter: i.iter,
        value: i.wall_ns() as f64,
        kind: kind_of(i).as_str().into(),
        note: format!(
            "{} ctx, {} gen requests, {} ctx tokens",
            i.context_requests, i.generation_requests, i.context_tokens
        ),
    };
    svg::strip(&IterationStrip {
        title: "Wall time of every iteration".into(),
        unit: Unit::Time,
        cells: outcome.run.iterations.iter().map(cell).collect(),
    })
}

/// Rows of the stacked per-iteration plot.
const MOST_ROWS: usize = 40;

fn profile(page: Page, trace: &Trace) -> Page {
    let context = recording::context(trace);
    let budgets = budgets(&context);
    let kinds = budget_by_kind(&budgets);
    let rows = kinds.iter().map(|kind| {
        let parts = kind.parts.iter().map(|p| (p.part.to_string(), p.mean_ns)).collect::<Vec<_>>();
        StackedRow::new(format!("{} ({})", text::kind_name(kind.kind), kind.iterations), parts)
    });
    let by_kind = StackedChart {
        title: "Mean iteration by kind".into(),
        unit: Unit::Time,
        rows: rows.collect(),
        normalize: false,
    };
    let rows = budgets.iter().take(MOST_ROWS).map(|b| {
        let parts = b.parts.iter().map(|(part, ns)| (part.to_string(), *ns as f64)).collect::<Vec<_>>();
        StackedRow::new(format!("{} {}", b.iter, text::kind_name(b.kind)), parts)
    });
    let each = StackedChart {
        title: "Each recorded iteration".into(),
        unit: Unit::Time,
        rows: rows.collect(),
        normalize: false,
    };
    let mut page = page
        .section("Iteration budget")
        .prose(
            "Where the wall time of the recorded iterations went. The parts of an iteration add up to its wall time.",
        )
        .svg(&svg::stacked(&by_kind))
        .svg(&svg::stacked(&each));
    if budgets.len() > MOST_ROWS {
        page = page.prose(&format!("The first {MOST_ROWS} of {} recorded iterations are drawn.", budgets.len()));
    }
    page.section("Ops").table(&text::ops_table(&top_ops(&context), 40))
}
