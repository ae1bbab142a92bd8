//! The run as a self-contained HTML file.

use std::collections::HashMap;

use serde_json::Value;
use strobe_analyze::budget::{IterationBudget, budget_by_kind, budgets};
use strobe_analyze::top_ops::top_ops;
use strobe_report::html::{Card, Link, Page};
use strobe_report::human;
use strobe_report::svg::{self, CdfChart, CdfSeries, IterationStrip, StackedChart, StackedRow, StripCell, Unit};
use strobe_trace::{IterationKind, Trace};
use strobe_workload::RequestRecord;

use super::experts::{self, ExpertReport};
use super::host;
use super::outcome::Outcome;
use super::text;
use super::utilization::{Utilization, kind_of};
use crate::{recording, run_dir};

/// The page of one run. `trace_page` says whether a page of its trace lies beside it.
pub(crate) fn page(outcome: &Outcome, report: &Value, trace_page: bool) -> String {
    let config = &outcome.config;
    let mut page =
        Page::new(format!("strobe: {}", config.model_name)).subtitle(subtitle(outcome)).verdict(headline(outcome));
    if trace_page {
        page = page.link(Link::new("Trace: timeline, iterations, kernels", run_dir::TRACE_HTML));
    }
    page = page.section("Where the time goes").svg(&iteration_strip(outcome));
    if let Some(trace) = &outcome.trace {
        page = budget_plots(page, trace);
    }
    page = cards(page, outcome);
    page = latency_cdfs(&[("", &outcome.run.records)]).iter().fold(page.section("Latency"), Page::svg);
    if let Some(report) = ExpertReport::of(outcome) {
        page = report.page(page);
    }
    if let Some(trace) = &outcome.trace {
        page = page.section("Ops").table(&text::ops_table(&top_ops(&recording::context(trace)), 40));
    }
    page = page.section("Report").details("Text report", &text::report(outcome, 110));
    page.details("report.json", &format!("{report:#}")).finish()
}

/// What the run found, in a line: how fast it was, what held it back, and what its figures are worth.
fn headline(outcome: &Outcome) -> String {
    let mut parts = Vec::new();
    if outcome.run.partial {
        parts.push("Partial run: interrupted before all requests had ended.".to_owned());
    }
    parts.push(answer(outcome));
    if outcome.info.perfect_router.is_some() {
        parts.push(format!("{}.", experts::WRONG));
    }
    parts.extend(outcome.run.host.as_ref().and_then(host::warning).map(|warning| format!("{warning}.")));
    parts.join(" ")
}

/// How fast the run was, and what held it back.
pub(crate) fn answer(outcome: &Outcome) -> String {
    let figures = match &outcome.metrics {
        Ok(m) => format!(
            "{} output tok/s, {} per request (median), {} to the first token.",
            human::number(m.output_throughput_tok_s),
            ms(m.e2e_ms.p50),
            ms(m.ttft_ms.p50)
        ),
        Err(error) => format!("No figures: {error:#}."),
    };
    [figures].into_iter().chain(nearest_limit(&outcome.utilization)).collect::<Vec<_>>().join(" ")
}

/// The kind of iteration that takes most of the time, and the limit of the hardware that it comes nearest.
fn nearest_limit(rows: &[Utilization]) -> Option<String> {
    let kinds = rows.iter().filter(|row| row.kind != "all");
    let row = kinds.max_by(|a, b| a.share_of_time.total_cmp(&b.share_of_time))?;
    let (limit, share, formula) = match row.mbu >= row.mfu {
        true => ("memory bandwidth", row.mbu, "MBU"),
        false => ("FLOP/s", row.mfu, "MFU"),
    };
    let kind = human::capitalized(row.kind);
    let begin = format!("{kind} iterations take {} of the time", human::percent(row.share_of_time));
    let share = human::percent(share);
    Some(match row.mbu.max(row.mfu) >= NEAR {
        true => format!("{begin}, limited by {limit}: {share} of the measured peak ({formula})."),
        false => format!("{begin} at {share} of the measured peak {limit} ({formula}), the nearest limit."),
    })
}

/// From this share of a peak on, the peak is what limits.
const NEAR: f64 = 0.5;

fn ms(milliseconds: f64) -> String {
    human::ns(milliseconds * 1e6)
}

fn cards(mut page: Page, outcome: &Outcome) -> Page {
    if let Ok(m) = &outcome.metrics {
        page = page
            .card(
                Card::new("Output throughput", human::number(m.output_throughput_tok_s))
                    .unit("tok/s")
                    .note("output tokens / total latency"),
            )
            .card(
                Card::new("Request throughput", human::number(m.request_throughput_req_s))
                    .unit("req/s")
                    .note(format!("{} requests", m.num_requests)),
            )
            .card(time_card("Request latency, p50", m.e2e_ms.p50, m.e2e_ms.p99))
            .card(time_card("Time to first token, p50", m.ttft_ms.p50, m.ttft_ms.p99));
        if let Some(itl) = &m.itl_ms {
            page = page.card(time_card("Inter-token gap, p50", itl.p50, itl.p99));
        }
    }
    for row in outcome.utilization.iter().filter(|row| row.kind != "all") {
        let mut note = format!(
            "of the measured FLOP/s (MFU); {} of the bandwidth (MBU), {} of the time",
            human::percent(row.mbu),
            human::percent(row.share_of_time)
        );
        if row.mfu > 1.0 {
            note.push_str("; above the measured peak, which `strobe doctor` measures again");
        }
        page = page.card(Card::new(format!("MFU, {}", row.kind), human::percent(row.mfu)).note(note));
    }
    page
}

fn time_card(label: &str, p50_ms: f64, p99_ms: f64) -> Card {
    Card::new(label, ms(p50_ms)).note(format!("p99 {}", ms(p99_ms)))
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

/// Latency distributions of one or more runs: the first token and the whole request each on its own scale, a color per run.
pub(crate) fn latency_cdfs(runs: &[(&str, &[RequestRecord])]) -> [svg::Svg; 2] {
    let plot = |title: &str, unnamed: &str, end: &dyn Fn(&RequestRecord) -> Option<u64>| {
        let series = runs.iter().map(|(name, records)| {
            let done = records.iter().filter(|r| r.finish_reason != "aborted");
            let times = done.filter_map(|r| Some(end(r)?.saturating_sub(r.arrival_ns) as f64));
            CdfSeries::new(if name.is_empty() { unnamed } else { name }, times)
        });
        svg::cdf(&CdfChart {
            title: title.into(),
            x_label: "time since arrival".into(),
            unit: Unit::Time,
            series: series.collect(),
        })
    };
    [
        plot("Share of requests with their first token within a time", "first token", &|r| r.first_token_ns()),
        plot("Share of requests done within a time", "whole request", &|r| r.last_token_ns()),
    ]
}

fn iteration_strip(outcome: &Outcome) -> svg::Svg {
    let cell = |i: &strobe_engine::IterationRecord| StripCell {
        iter: i.iter,
        value: i.wall_ns() as f64,
        kind: kind_of(i).as_str().into(),
        note: format!(
            "{} prefill and {} decode requests, {} prefill tokens",
            i.context_requests, i.generation_requests, i.context_tokens
        ),
    };
    svg::strip(&IterationStrip {
        title: "Wall time of every iteration".into(),
        unit: Unit::Time,
        cells: outcome.run.iterations.iter().map(cell).collect(),
    })
}

/// Bars of single iterations that are shown; the others are folded away.
const SHOWN: usize = 12;
/// More bars than this make a page slow; the trace's page has all.
const MOST_FOLDED: usize = 200;

fn budget_plots(page: Page, trace: &Trace) -> Page {
    let context = recording::context(trace);
    let budgets = budgets(&context);
    let kinds = budget_by_kind(&budgets);
    let rows = kinds.iter().map(|kind| {
        let parts = kind.parts.iter().map(|p| (p.part.to_string(), p.mean_ns)).collect::<Vec<_>>();
        let name = text::kind_name(kind.kind);
        StackedRow::new(format!("{name} ({})", kind.iterations), parts).group(name)
    });
    let page = page
        .prose(
            "Where the wall time of the recorded iterations went. The parts of an iteration add up to its wall time.",
        )
        .svg(&stacked("Mean recorded iteration", rows.collect()));
    let (first, others) = some_of_each(&budgets, SHOWN);
    let page = page.svg(&stacked("Recorded iterations", first.into_iter().map(budget_row).collect()));
    if others.is_empty() {
        return page;
    }
    let drawn = &others[..others.len().min(MOST_FOLDED)];
    let left_out = match others.len() - drawn.len() {
        0 => String::new(),
        more => format!(" (the last {} are on the trace's page only)", human::count(more as u64)),
    };
    let rows = drawn.iter().map(|budget| budget_row(budget)).collect();
    let summary = format!("{} more recorded iterations{left_out}", human::count(others.len() as u64));
    page.folded_svg(&summary, &stacked("More recorded iterations", rows))
}

fn stacked(title: &str, rows: Vec<StackedRow>) -> svg::Svg {
    svg::stacked(&StackedChart { title: title.into(), unit: Unit::Time, rows, normalize: false })
}

fn budget_row(budget: &IterationBudget) -> StackedRow {
    let parts = budget.parts.iter().map(|(part, ns)| (part.to_string(), *ns as f64)).collect::<Vec<_>>();
    let kind = text::kind_name(budget.kind);
    StackedRow::new(format!("{} {kind}", budget.iter), parts).group(kind)
}

/// At most so many, the first of each kind, and the others.
fn some_of_each(budgets: &[IterationBudget], most: usize) -> (Vec<&IterationBudget>, Vec<&IterationBudget>) {
    if budgets.len() <= most {
        return (budgets.iter().collect(), Vec::new());
    }
    let mut counts: HashMap<Option<IterationKind>, usize> = HashMap::new();
    budgets.iter().for_each(|budget| *counts.entry(budget.kind).or_default() += 1);
    let each = most / counts.len().max(1);
    counts.clear();
    budgets.iter().partition(|budget| {
        let seen = counts.entry(budget.kind).or_default();
        *seen += 1;
        *seen <= each
    })
}
