//! The report as text.

use std::fmt::Write;

use strobe_analyze::budget::{IterationBudget, Part, budget_by_kind, budgets};
use strobe_analyze::top_ops::{OpSummary, top_ops};
use strobe_report::human;
use strobe_report::table::{Cell, Table};
use strobe_trace::{IterationKind, Trace};
use strobe_workload::{strobe_text, trtllm_text};

use super::experts::{self, ExpertReport};
use super::facts::Facts;
use super::outcome::{Outcome, RepeatFigures, spreads};
use super::utilization::FullBatchDecode;
use super::{host, html};
use crate::{recording, sheets};

const RULE: &str = "===========================================================";

/// A title between two rules.
pub(crate) fn heading(text: &mut String, title: &str) {
    let _ = writeln!(text, "{RULE}\n= {title}\n{RULE}");
}

/// The whole report.
pub(crate) fn report(outcome: &Outcome, width: usize) -> String {
    let mut text = String::new();
    if outcome.info.perfect_router.is_some() {
        let _ = writeln!(text, "{}\n", experts::WRONG);
    }
    if outcome.run.partial {
        let done = outcome.run.records.iter().filter(|r| r.finish_reason != "aborted").count();
        let why = if outcome.run.failure.is_some() { "the engine failed" } else { "interrupted" };
        let _ = writeln!(
            text,
            "PARTIAL RUN: {why} after {done} of {} requests; figures cover what was done\n",
            outcome.asked
        );
    }
    if let Some(warning) = outcome.run.host.as_ref().and_then(host::warning) {
        let _ = writeln!(text, "{warning}\n");
    }
    match &outcome.metrics {
        Ok(metrics) => {
            text.push_str(&trtllm_text(metrics, &outcome.context(), &outcome.rule.to_string()));
            text.push('\n');
            text.push_str(&strobe_text(metrics));
        }
        Err(error) => {
            let _ = writeln!(text, "no metrics: {error:#}");
        }
    }
    text.push('\n');
    details(&mut text, outcome, width);
    if let Some(report) = ExpertReport::of(outcome) {
        text.push('\n');
        report.text(&mut text, width);
    }
    if let Some(trace) = &outcome.trace {
        text.push('\n');
        profile(&mut text, outcome, trace, width);
    }
    // The last line is the one that is still on the screen.
    if outcome.metrics.is_ok() {
        text.push('\n');
        text.push_str(&sheets::wrap(&html::answer(outcome), width));
    }
    text
}

fn details(text: &mut String, outcome: &Outcome, width: usize) {
    heading(text, "MACHINE, MEMORY AND UTILIZATION");
    for (label, value) in Facts::of(outcome).rows {
        let _ = writeln!(text, "{label:<38}{value}");
    }
    text.push('\n');
    let mut table = Table::new(["iterations", "count", "wall", "share", "tokens", "tokens/s", "MFU", "bytes/s", "MBU"]);
    for row in &outcome.utilization {
        table.push([
            row.kind.to_string(),
            row.iterations.to_string(),
            human::ns(row.wall_ms * 1e6),
            human::percent(row.share_of_time),
            human::count(row.tokens),
            human::number(row.tokens_per_s),
            human::percent(row.mfu),
            human::bytes_per_s(row.bytes_per_s),
            human::percent(row.mbu),
        ]);
    }
    text.push_str(&table.render(width));
    if let Some(full) = FullBatchDecode::of(&outcome.run.iterations) {
        let _ = writeln!(
            text,
            "Decode at full batch: {} requests, {} iterations, {} per step, {} tokens/s",
            full.requests,
            full.iterations,
            human::ns(full.step_ms * 1e6),
            human::number(full.tokens_per_s)
        );
    }
    text.push_str("MFU = model FLOPs / (wall of these iterations x peak); MBU = (weights once per iteration + KV read + KV written) / (wall x bandwidth)\n");
    if outcome.utilization.iter().any(|row| row.mfu > 1.0) {
        text.push_str("MFU above 100 %: this run computed faster than any measured peak, so its MFU says nothing; measure the peak again with `strobe doctor`\n");
    }
    if outcome.utilization.iter().any(|row| row.mbu > 1.0) {
        text.push_str("MBU above 100 %: memory was faster during this run than in any reading, or small weights stayed in a cache\n");
    }
    let recomputed: u64 = outcome.utilization.last().map_or(0, |u| u.recomputed_tokens);
    if recomputed > 0 {
        let _ =
            writeln!(text, "{} tokens were computed again after pauses; MFU leaves them out", human::count(recomputed));
    }
    spread_section(text, &outcome.repeats, width);
    if outcome.probed() && outcome.overhead().is_none() {
        text.push_str("\nProfiler overhead: not measured, recorded iterations and their neighbours never had the same batch; use longer outputs\n");
    }
    if let Some(o) = outcome.overhead() {
        text.push('\n');
        let (what, each) = match o.block {
            1 => ("every second iteration".to_string(), "pairs of neighbouring iterations".to_string()),
            n => (format!("alternate blocks of {n} iterations"), format!("blocks of {n} iterations")),
        };
        heading(text, &format!("PROFILER OVERHEAD ({what} recorded)"));
        let _ = match o.interval {
            Some(i) => writeln!(
                text,
                "{} over {} {each}, 95 % interval {} to {}; median step {} off, {} on",
                human::percent(o.relative),
                o.pairs,
                human::percent(i.low),
                human::percent(i.high),
                human::ns(o.off_ms * 1e6),
                human::ns(o.on_ms * 1e6)
            ),
            None => writeln!(text, "not known: {} {each} are too few for an interval; use longer outputs", o.pairs),
        };
    }
}

/// How the figures differ between repetitions; nothing for a single run.
pub(crate) fn spread_section(text: &mut String, repeats: &[RepeatFigures], width: usize) {
    if repeats.len() < 2 {
        return;
    }
    let spreads = spreads(repeats);
    text.push('\n');
    heading(text, &format!("SPREAD OVER {} RUNS (the report above is the last one)", repeats.len()));
    let mut table = Table::new(["figure", "min", "median", "max", "stdev", "cv"]);
    for (name, s) in spreads {
        let optional = |value: Option<f64>| value.map_or(human::NOT_KNOWN.to_string(), |v| format!("{v:.4}"));
        table.push([
            name.to_string(),
            format!("{:.4}", s.min),
            format!("{:.4}", s.median),
            format!("{:.4}", s.max),
            optional(s.stdev),
            s.cv.map_or(human::NOT_KNOWN.to_string(), human::percent),
        ]);
    }
    text.push_str(&table.render(width));
    let disturbed = repeats.iter().map(|repeat| repeat.host.as_ref()?.disturbance()).enumerate();
    for (index, reason) in disturbed.filter_map(|(index, reason)| Some((index, reason?))) {
        let _ = writeln!(text, "Run {} was disturbed: {reason}", index + 1);
    }
}

/// Rows of the per-iteration table before it is cut in the middle.
const MOST_ITERATIONS: usize = 64;

fn profile(text: &mut String, outcome: &Outcome, trace: &Trace, width: usize) {
    let context = recording::context(trace);
    let budgets = budgets(&context);
    let windows: Vec<_> = outcome
        .window_states()
        .iter()
        .map(|(window, state)| if *state == "complete" { window.to_string() } else { format!("{window} ({state})") })
        .collect();
    heading(text, &format!("ITERATION BUDGET, window {}", windows.join(", ")));
    text.push_str(&budget_table(&budgets).render(width));
    text.push('\n');
    for kind in budget_by_kind(&budgets) {
        let title = format!(
            "{} iterations ({}): median wall {}, {} to {}",
            kind_name(kind.kind),
            kind.iterations,
            human::ns(kind.wall_ns.median),
            human::ns(kind.wall_ns.min),
            human::ns(kind.wall_ns.max)
        );
        let mut table = Table::new(["part", "median", "mean", "share of wall"]).title(title);
        let mut mean_sum = 0.0;
        for part in &kind.parts {
            mean_sum += part.mean_ns;
            table.push([
                part.part.to_string(),
                human::ns(part.median_ns),
                human::ns(part.mean_ns),
                human::percent(part.share_of_wall),
            ]);
        }
        let shares: f64 = kind.parts.iter().map(|p| p.share_of_wall).sum();
        let table = table.total(["sum", "", &human::ns(mean_sum), &human::percent(shares)].map(str::to_string));
        text.push_str(&table.render(width));
        text.push('\n');
    }
    recorder_cost(text, outcome);
    text.push_str("Means add up to the wall time. idle = between ops inside the forward pass; waited for a CPU = longest wait of one thread, taken from the other parts by share; unknown = covered by no range.\n\n");
    heading(text, "TOP OPS");
    text.push_str(&ops_table(&top_ops(&context), 12).render(width));
    if let Some(peaks) = &trace.meta.peaks {
        let (of_products, of_type) = outcome.peaks.of_products(&outcome.config.build);
        let products = match of_products == peaks.flops_per_s {
            true => String::new(),
            false => format!(" ({of_type} GEMM {})", human::flops_per_s(of_products)),
        };
        let _ = writeln!(
            text,
            "roofline = max(FLOPs / {}{products}, bytes / {}) / time; above 100 % an op's data came from a cache",
            human::flops_per_s(peaks.flops_per_s),
            human::bytes_per_s(peaks.bytes_per_s)
        );
    }
}

fn signed_percent(share: f64) -> String {
    format!("{:+.1} %", 100.0 * share)
}

/// What recording the windows cost: in the steps, against those around, and at their edges.
fn recorder_cost(text: &mut String, outcome: &Outcome) {
    if !outcome.recorded() {
        return;
    }
    match outcome.window_overhead() {
        Some(o) => {
            let interval = o.interval.map_or(String::new(), |i| {
                format!(", 95 % CI {} to {}", signed_percent(i.low), signed_percent(i.high))
            });
            let _ = writeln!(
                text,
                "Cost of recording: median step {} in the window, {} around it with the same batch ({}{interval}).",
                human::ns(o.on_ms * 1e6),
                human::ns(o.off_ms * 1e6),
                signed_percent(o.relative)
            );
        }
        None => text.push_str("Cost of recording: not known here, too few undisturbed steps of one batch in and around the window, or too unlike; --measure-profiler-overhead measures it.\n"),
    }
    for (window, cost) in outcome.recorder_costs() {
        let _ = writeln!(text, "Recorder of window {window}: {cost}.");
    }
}

/// Categories below this share of all recorded time are one column in the table of single iterations, so that it fits
/// a terminal; the tables per kind and report.json have every part.
const SMALL_PART: f64 = 0.01;

/// One row per iteration, one column per part, all in one unit.
fn budget_table(budgets: &[IterationBudget]) -> Table {
    const OTHER: &str = "other ops";
    let wall: i64 = budgets.iter().map(|b| b.wall_ns).sum();
    let longest = budgets.iter().map(|b| b.wall_ns).max().unwrap_or(0);
    let (unit, scale) = if longest >= 10_000_000 { ("ms", 1e6) } else { ("µs", 1e3) };
    let all: Vec<&Part> = {
        let mut seen: Vec<&Part> = Vec::new();
        for (part, _) in budgets.iter().flat_map(|b| &b.parts) {
            if !seen.contains(&part) {
                seen.push(part);
            }
        }
        seen
    };
    let total =
        |part: &Part| -> i64 { budgets.iter().flat_map(|b| &b.parts).filter(|p| p.0 == *part).map(|p| p.1).sum() };
    let small = |part: &&Part| matches!(part, Part::Category(_)) && (total(part) as f64) < SMALL_PART * wall as f64;
    let (other, shown): (Vec<&Part>, Vec<&Part>) = all.into_iter().partition(small);
    let headers = ["iter".to_string(), "kind".into(), format!("wall {unit}")];
    let names = shown.iter().map(|part| part.to_string());
    let mut table = Table::new(headers.into_iter().chain(names).chain((!other.is_empty()).then(|| OTHER.to_string())));
    let cut = budgets.len() > MOST_ITERATIONS;
    for (index, budget) in budgets.iter().enumerate() {
        if cut && index == MOST_ITERATIONS / 2 {
            table.push([format!("… {} more, in report.json", budgets.len() - MOST_ITERATIONS)]);
        }
        if cut && (MOST_ITERATIONS / 2..budgets.len() - MOST_ITERATIONS / 2).contains(&index) {
            continue;
        }
        let show = |ns: i64| format!("{:.1}", ns as f64 / scale);
        let value = |parts: &[&Part]| -> String {
            let here: Vec<i64> = budget.parts.iter().filter(|p| parts.contains(&&p.0)).map(|p| p.1).collect();
            if here.is_empty() { String::new() } else { show(here.iter().sum()) }
        };
        let head = [budget.iter.to_string(), kind_name(budget.kind), show(budget.wall_ns)];
        let parts = shown.iter().map(|part| value(&[part]));
        table.push(head.into_iter().chain(parts).chain((!other.is_empty()).then(|| value(&other))));
    }
    table
}

/// Ops by time, with their share of the roofline.
pub(crate) fn ops_table(ops: &[OpSummary], most: usize) -> Table {
    let mut table =
        Table::new(["op", "calls", "total", "median", "of wall", "FLOP/s", "bytes/s", "roofline", "bound by"]);
    // Cells carry their numbers, so that pages sort by value and not by text.
    let number = |value: Option<f64>, show: fn(f64) -> String| {
        value.map_or_else(|| Cell::from(human::NOT_KNOWN), |value| Cell::number(show(value), value))
    };
    for op in ops.iter().take(most) {
        let bound = op.roofline.as_ref().map_or(human::NOT_KNOWN, |r| r.bound.as_str());
        table.push([
            Cell::from(op.name.as_str()),
            Cell::number(op.calls.to_string(), op.calls as f64),
            number(Some(op.total_ns as f64), human::ns),
            number(Some(op.median_ns), human::ns),
            number(op.share_of_wall, human::percent),
            number(op.flops_per_s, human::flops_per_s),
            number(op.bytes_per_s, human::bytes_per_s),
            number(op.roofline.as_ref().map(|r| r.share), human::percent),
            Cell::from(bound),
        ]);
    }
    table
}

/// What an iteration worked on.
pub(crate) fn kind_name(kind: Option<IterationKind>) -> String {
    kind.map_or(human::NOT_KNOWN.into(), |kind| kind.to_string())
}

/// Kinds of iteration that occur in a trace.
pub(crate) fn kinds(trace: &Trace) -> Vec<IterationKind> {
    IterationKind::ALL.into_iter().filter(|kind| trace.iterations.iter().any(|i| i.kind() == *kind)).collect()
}
