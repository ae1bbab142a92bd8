//! A simulated run as one page, like a benchmark's.

use serde_json::Value;
use strobe_report::html::{Card, Page};
use strobe_report::svg::{self, CdfChart, CdfSeries, IterationStrip, StripCell, Unit};
use strobe_sim::collector::{Intervals, Summary};
use strobe_sim::{Collector, Outcome, SloMetric, StepRecord};

use super::answer;
use super::scenario::Built;

/// Quantiles that a distribution is drawn from.
const QUANTILES: usize = 400;

/// The page. `steps` are iterations of the first server.
pub fn page(
    built: &Built,
    outcome: &Outcome,
    intervals: Option<&Intervals>,
    collector: &Collector<'_>,
    steps: &[StepRecord],
    report: &Value,
) -> String {
    let found = &outcome.answer;
    let subtitle = format!("simulated: {}; {}; {}", built.workload, built.server, built.cost);
    let mut page = Page::new("strobe simulate").subtitle(subtitle);
    if let Some(unstable) = answer::unstable(built, found) {
        page = page.verdict(unstable);
    }
    let throughput = &found.throughput;
    page =
        page.card(Card::new("Output throughput", format!("{:.1}", throughput.output_tokens_per_s)).unit("tok/s")).card(
            Card::new("Request throughput", format!("{:.3}", throughput.requests_per_s))
                .unit("req/s")
                .note(format!("{} requests", found.num_requests)),
        );
    if !built.scenario.slos.is_empty() {
        let goodput = &found.goodput;
        let note = format!("{:.2} % of those offered", goodput.attainment * 100.0);
        page = page.card(Card::new("Goodput", format!("{:.3}", goodput.requests_per_s)).unit("req/s").note(note));
    }
    let latencies: [(&str, &str, Option<Summary>); 4] = [
        ("Request latency, p50", "e2e_ms", found.e2e_ms),
        ("Time to first token, p50", "ttft_ms", found.ttft_ms),
        ("Time per output token, p50", "tpot_ms", found.tpot_ms),
        ("Queue, p50", "queue_ms", found.queue_ms),
    ];
    for (label, key, summary) in latencies {
        let Some(summary) = summary else { continue };
        let bounds = intervals.and_then(|i| i.latencies.get(key)?.get("p99"));
        let bounds = bounds.map_or(String::new(), |(low, high)| format!(" ({low:.1} to {high:.1})"));
        let note = format!("p99 {:.1} ms{bounds}", summary.p99);
        page = page.card(Card::new(label, format!("{:.2}", summary.p50)).unit("ms").note(note));
    }
    page = page.section("Latency").svg(&latency_cdf(collector)).section("Iterations").svg(&strip(steps));
    page.section("Report")
        .details("Text report", &answer::text(built, outcome, intervals, 110))
        .details("report.json", &format!("{report:#}"))
        .finish()
}

fn latency_cdf(collector: &Collector<'_>) -> svg::Svg {
    let series = [("first token", SloMetric::Ttft), ("whole request", SloMetric::E2e)];
    svg::cdf(&CdfChart {
        title: "Share of requests done within a time since arrival".into(),
        x_label: "time since arrival".into(),
        unit: Unit::Time,
        series: series
            .map(|(name, metric)| {
                CdfSeries::new(name, collector.quantiles_ms(metric, QUANTILES).into_iter().map(|ms| ms * 1e6))
            })
            .into(),
    })
}

fn strip(steps: &[StepRecord]) -> svg::Svg {
    let cell = |step: &StepRecord| {
        let (context, decode) = (step.load.context_requests, step.load.decode_requests);
        StripCell {
            iter: step.iter,
            value: (step.end_ns - step.start_ns) as f64,
            kind: match (context, decode) {
                (0, _) => "decode",
                (_, 0) => "prefill",
                _ => "mixed",
            }
            .into(),
            note: format!("{context} ctx, {decode} gen requests, {} ctx tokens", step.load.context_tokens),
        }
    };
    svg::strip(&IterationStrip {
        title: "Time of every iteration".into(),
        unit: Unit::Time,
        cells: steps.iter().map(cell).collect(),
    })
}
