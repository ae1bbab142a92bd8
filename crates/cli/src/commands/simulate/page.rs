//! A simulated run as one page, like a benchmark's.

use serde_json::Value;
use strobe_report::html::{Card, Page};
use strobe_report::human;
use strobe_report::svg::{self, CdfChart, CdfSeries, IterationStrip, StripCell, Unit};
use strobe_sim::collector::{Answer, Intervals, Summary};
use strobe_sim::{Collector, Outcome, SloMetric, StepRecord};

use super::answer;
use super::scenario::Built;

/// Quantiles that a distribution is drawn from.
const QUANTILES: usize = 400;

/// The page. `steps` are iterations of the first server.
pub(super) fn page(
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
    page = page.verdict(match answer::unstable(built, found) {
        Some(unstable) => human::capitalized(&unstable),
        None => headline(built, found),
    });
    let throughput = &found.throughput;
    page = page.card(Card::new("Output throughput", human::number(throughput.output_tokens_per_s)).unit("tok/s")).card(
        Card::new("Request throughput", human::number(throughput.requests_per_s))
            .unit("req/s")
            .note(format!("{} requests", found.num_requests)),
    );
    if !built.scenario.slos.is_empty() {
        let goodput = &found.goodput;
        let note = format!("{} of those offered", human::percent(goodput.attainment));
        page = page.card(Card::new("Goodput", human::number(goodput.requests_per_s)).unit("req/s").note(note));
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
        let bounds = bounds.map_or(String::new(), |(low, high)| format!(" ({} to {})", ms(*low), ms(*high)));
        let note = format!("p99 {}{bounds}", ms(summary.p99));
        page = page.card(Card::new(label, ms(summary.p50)).note(note));
    }
    page = latency_cdfs(collector).iter().fold(page.section("Latency"), Page::svg);
    page = page.section("Iterations").svg(&strip(steps));
    page.section("Report")
        .details("Text report", &answer::text(built, outcome, intervals, 110))
        .details("report.json", &format!("{report:#}"))
        .finish()
}

/// The answer in a line.
fn headline(built: &Built, found: &Answer) -> String {
    let throughput = &found.throughput;
    let goodput = match built.scenario.slos.is_empty() {
        true => String::new(),
        false => format!(
            ", {} req/s within every limit ({} of those offered)",
            human::number(found.goodput.requests_per_s),
            human::percent(found.goodput.attainment)
        ),
    };
    let latency = found
        .e2e_ms
        .map_or(String::new(), |e2e| format!("; a request takes {} (median), {} at p99", ms(e2e.p50), ms(e2e.p99)));
    format!(
        "Simulated: {} req/s and {} output tok/s{goodput}{latency}.",
        human::number(throughput.requests_per_s),
        human::number(throughput.output_tokens_per_s)
    )
}

fn ms(milliseconds: f64) -> String {
    human::ns(milliseconds * 1e6)
}

/// The first token and the whole request, each on its own scale.
fn latency_cdfs(collector: &Collector<'_>) -> [svg::Svg; 2] {
    let plots = [
        ("Share of requests with their first token within a time", "first token", SloMetric::Ttft),
        ("Share of requests done within a time", "whole request", SloMetric::E2e),
    ];
    plots.map(|(title, name, metric)| {
        let samples = collector.quantiles_ms(metric, QUANTILES).into_iter().map(|ms| ms * 1e6);
        svg::cdf(&CdfChart {
            title: title.into(),
            x_label: "time since arrival".into(),
            unit: Unit::Time,
            series: vec![CdfSeries::new(name, samples)],
        })
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
            note: format!(
                "{context} prefill and {decode} decode requests, {} prefill tokens",
                step.load.context_tokens
            ),
        }
    };
    svg::strip(&IterationStrip {
        title: "Time of every iteration".into(),
        unit: Unit::Time,
        cells: steps.iter().map(cell).collect(),
    })
}
