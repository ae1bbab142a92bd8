//! The report of iterations.

use strobe_trace::{NONE, OpKind, Trace};

use super::steps::{choose_range, repeating_ranges};
use super::{Candidate, Confidence, Detected, Method};
use crate::context::Context;
use crate::intervals::{Span, SpanSet};
use crate::sheet::{Column, Report, Role, Sheet, Unit, Value};
use serde::Serialize;

impl Detected {
    /// How they were found and how sure that is, with the next best.
    pub fn how(&self) -> String {
        let Some(method) = &self.method else { return String::new() };
        if self.confidence != Confidence::Likely {
            return method.to_string();
        }
        let mut text = format!("{method} (likely: {}", self.evidence);
        if let Some(second) = self.runner_up() {
            text += &format!("; else {} by {}: {}", second.count, second.evidence, second.choose);
        }
        text + ")"
    }

    /// How many there are, how they were found and how sure that is; or why there are none.
    pub fn sentence(&self) -> String {
        if !self.list.is_empty() {
            return format!("{}, found {}.", self.counted(), self.how());
        }
        let why = self.why_none();
        let mut letters = why.chars();
        let first = letters.next().map(|first| first.to_ascii_uppercase());
        first.into_iter().chain(letters).chain(['.']).collect()
    }

    /// How many there are, in words.
    pub fn counted(&self) -> String {
        format!("{} {}", self.list.len(), if self.list.len() == 1 { "iteration" } else { "iterations" })
    }
}

/// The iterations of a trace in a few words, for programs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How many there are.
    pub count: usize,
    /// How they were found.
    pub evidence: String,
    /// How sure that is.
    pub confidence: Confidence,
    /// What else they may be.
    pub runner_up: Option<Candidate>,
}

impl Detected {
    /// Count, evidence, confidence and the next best.
    pub fn summary(&self) -> Summary {
        let evidence = if self.list.is_empty() { self.why_none() } else { self.evidence.clone() };
        Summary { count: self.list.len(), evidence, confidence: self.confidence, runner_up: self.runner_up().cloned() }
    }
}

/// Rows of names that `--list-iterations` shows.
const NAMES: usize = 40;

/// What the iterations of a trace may be, and what to type to choose.
pub fn candidates_report(context: &Context) -> Report {
    const TITLE: &str = "What may be an iteration";
    let (trace, detected) = (context.trace, &context.iterations);
    let columns = [
        Column::new("count", Unit::Count),
        Column::new("what repeats", Unit::Text),
        Column::new("to choose it", Unit::Text),
    ];
    let mut sheet = Sheet::new("candidates", columns);
    for candidate in &detected.candidates {
        sheet.push([candidate.count.into(), candidate.evidence.as_str().into(), candidate.choose.as_str().into()]);
    }
    let columns = [
        Column::new("count", Unit::Count),
        Column::new("time", Unit::Ns),
        Column::new("range", Unit::Text),
        Column::new("to choose it", Unit::Text),
    ];
    let mut ranges = Sheet::new("ranges", columns).title("Ranges, numbers in their names as N");
    for (name, count, time) in repeating_ranges(trace).into_iter().take(NAMES) {
        let choose = choose_range(&name);
        ranges.push([count.into(), time.into(), name.into(), choose.into()]);
    }
    if sheet.rows.is_empty() && ranges.rows.is_empty() {
        return Report::absent("list-iterations", TITLE, detected.why_none());
    }
    let mut report = Report::new("list-iterations", TITLE).note(detected.sentence());
    for sheet in [sheet, ranges].into_iter().filter(|sheet| !sheet.rows.is_empty()) {
        report = report.sheet(sheet);
    }
    report
}

/// What the devices did for one iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IterationFigures {
    /// Distinct calls that launched its ops. Ops that no recorded call launched are not counted.
    pub launches: usize,
    /// Ops of any kind.
    pub ops: usize,
    /// Kernels among them.
    pub kernels: usize,
    /// Sum of the lengths of its ops.
    pub sum_ns: i64,
    /// Time in which at least one of its ops ran, summed over its devices.
    pub busy_ns: i64,
    /// Time between its first and last op in which none ran, summed over its devices.
    pub idle_ns: i64,
}

/// The figures of every iteration, in one pass over the ops.
pub fn figures(trace: &Trace, detected: &Detected) -> Vec<IterationFigures> {
    let mut figures = vec![IterationFigures::default(); detected.list.len()];
    let mut counts = vec![0u32; detected.list.len() + 1];
    for &iteration in &detected.of_op {
        if let Some(count) = counts.get_mut(iteration as usize) {
            *count += 1;
        }
    }
    let mut ops_of: Vec<Vec<u32>> = counts.iter().map(|&n| Vec::with_capacity(n as usize)).collect();
    for (op, &iteration) in detected.of_op.iter().enumerate() {
        if let Some(ops) = ops_of.get_mut(iteration as usize).filter(|_| iteration != NONE) {
            ops.push(op as u32);
        }
    }
    for (figure, mut ops) in figures.iter_mut().zip(ops_of) {
        figure.ops = ops.len();
        let mut launches: Vec<u32> =
            ops.iter().map(|&op| trace.ops.launch[op as usize]).filter(|&l| l != NONE).collect();
        launches.sort_unstable();
        launches.dedup();
        figure.launches = launches.len();
        figure.kernels = ops.iter().filter(|&&op| trace.ops.kind[op as usize] == OpKind::Kernel).count();
        figure.sum_ns = ops.iter().fold(0, |sum, &op| sum.saturating_add(trace.ops.duration(op as usize)));
        ops.sort_by_key(|&op| trace.ops.device[op as usize]); // stable: by start within a device
        for of_device in ops.chunk_by(|&a, &b| trace.ops.device[a as usize] == trace.ops.device[b as usize]) {
            let span = |&op: &u32| Span::new(trace.ops.start[op as usize], trace.ops.end[op as usize]);
            let busy = SpanSet::union_of(of_device.iter().map(span)).length();
            let first = of_device.iter().map(|op| span(op).start).min().unwrap_or(0);
            let last = of_device.iter().map(|op| span(op).end).max().unwrap_or(0);
            figure.busy_ns += busy;
            figure.idle_ns += last.saturating_sub(first) - busy;
        }
    }
    figures
}

/// One row per iteration.
pub fn report(context: &Context) -> Report {
    const TITLE: &str = "Iterations";
    let (trace, detected) = (context.trace, &context.iterations);
    let Some(method) = detected.method.as_ref().filter(|_| !detected.list.is_empty()) else {
        return Report::absent("iterations", TITLE, detected.why_none());
    };
    let columns = [
        Column::new("number", Unit::Id),
        Column::new("label", Unit::Text),
        Column::new("kind", Unit::Text),
        Column::new("ctx requests", Unit::Count),
        Column::new("gen requests", Unit::Count),
        Column::new("ctx tokens", Unit::Count),
        Column::new("gen tokens", Unit::Count),
        Column::new("process", Unit::Id).role(Role::Process),
        Column::new("wall", Unit::Ns),
        Column::new("device busy", Unit::Ns),
        Column::new("device idle", Unit::Ns),
        Column::new("op time", Unit::Ns),
        Column::new("ops", Unit::Count),
        Column::new("kernels", Unit::Count).may_hide(),
        Column::new("launches", Unit::Count).may_hide(),
        Column::new("device start", Unit::Moment).role(Role::Start),
        Column::new("device end", Unit::Moment).role(Role::End),
    ];
    let mut sheet = Sheet::new("iterations", columns);
    let all = figures(trace, detected);
    for (found, figure) in detected.list.iter().zip(&all) {
        let process = trace.processes.get(found.process as usize);
        let mut row: Vec<Value> = vec![
            found.number.into(),
            found.label.as_str().into(),
            found.kind.map(|k| k.to_string()).into(),
            found.context_requests.into(),
            found.generation_requests.into(),
            found.context_tokens.into(),
            found.generation_tokens.into(),
            process.map(|p| p.pid).into(),
            found.host.length().into(),
        ];
        let has_ops = figure.ops > 0;
        let known = |value: i64| if has_ops { Value::Int(value) } else { Value::Unknown };
        row.extend([known(figure.busy_ns), known(figure.idle_ns), known(figure.sum_ns), figure.ops.into()]);
        row.extend([figure.kernels.into(), figure.launches.into()]);
        row.extend([found.device.map(|d| d.start).into(), found.device.map(|d| d.end).into()]);
        sheet.push(row);
    }
    let outside = detected.of_op.iter().filter(|&&i| i == NONE).count();
    let mut report = Report::new("iterations", TITLE)
        .sheet(sheet)
        .note(detected.sentence())
        .note("Idle is the time between the first and the last op of an iteration in which none of its ops ran.");
    if outside > 0 {
        report = report.note(format!("{outside} of {} ops belong to no iteration.", trace.ops.len()));
    }
    let by_time = trace.ops.launch.iter().zip(&detected.of_op).filter(|&(&l, &i)| l == NONE && i != NONE).count();
    if by_time > 0 && *method != Method::Recorded {
        report = report.note(match by_time {
            1 => "1 op without a launch call was placed by its time.".to_owned(),
            n => format!("{n} ops without a launch call were placed by their time."),
        });
    }
    if trace.ops.kind.contains(&OpKind::Graph) {
        report = report.note("Kernels inside CUDA graphs were not recorded and are not counted.");
    }
    report
}
