//! Operators of PyTorch by the host time they took.

use std::collections::HashMap;

use strobe_trace::StrId;

use crate::context::Context;
use crate::host_compute::{is_host_only, is_operator, operators_around, own_times};
use crate::roofline::category_of_operator;
use crate::sheet::{Column, Report, Sheet, Unit, Value};

/// Rows that each table holds at most.
const ROWS: usize = 200;

/// All executions of one operator, or of one with inputs of the same dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Operator {
    /// Its name.
    pub name: String,
    /// Its family, where a rule knows it.
    pub category: Option<&'static str>,
    /// The dimensions of its inputs as JSON text; empty where they are not recorded, or where all are together.
    pub shapes: String,
    /// How often it ran.
    pub calls: u64,
    /// Time without the operators inside it.
    pub own_ns: i64,
    /// Time with them; one inside another of the same name counts once.
    pub total_ns: i64,
}

/// All operators, the longest own time first; one row per name, or per name and dimensions.
pub fn operators(context: &Context, by_shape: bool) -> Vec<Operator> {
    let trace = context.trace;
    let own = own_times(context);
    let around = operators_around(trace, context.attribution());
    let mut groups: HashMap<(StrId, StrId), (u64, i64, i64)> = HashMap::new();
    for range in (0..trace.ranges.len()).filter(|&range| is_operator(trace, range)) {
        let name = trace.ranges.name[range];
        let shapes = if by_shape { trace.ranges.dims[range] } else { StrId::NONE };
        let group = groups.entry((name, shapes)).or_default();
        let inside_itself = trace.ranges.name.get(around[range] as usize) == Some(&name);
        let total = if inside_itself { 0 } else { trace.ranges.duration(range) };
        *group = (group.0 + 1, group.1.saturating_add(own[range]), group.2.saturating_add(total));
    }
    let rows = groups.into_iter().map(|((name, shapes), (calls, own_ns, total_ns))| Operator {
        name: trace.text(name).to_owned(),
        category: category_of_operator(trace.text(name)),
        shapes: if shapes == StrId::NONE { String::new() } else { trace.text(shapes).to_owned() },
        calls,
        own_ns,
        total_ns,
    });
    let mut rows: Vec<Operator> = rows.collect();
    rows.sort_by(|a, b| {
        let longest_first = b.own_ns.cmp(&a.own_ns).then(b.total_ns.cmp(&a.total_ns));
        longest_first.then_with(|| (&a.name, &a.shapes).cmp(&(&b.name, &b.shapes)))
    });
    rows
}

/// Report `operators`.
pub fn report(context: &Context) -> Report {
    const TITLE: &str = "Operators of PyTorch by host time";
    let rows = operators(context, false);
    if rows.is_empty() {
        let why = "the trace has no operators of PyTorch: record them with ProfilerActivity.CPU";
        return Report::absent("operators", TITLE, why);
    }
    let all: i64 = rows.iter().map(|row| row.own_ns).fold(0, i64::saturating_add);
    let share = |ns: i64| Value::from(ns as f64 / all as f64);
    let sheet = |name: &str, shapes: bool, rows: &[Operator]| {
        let mut columns = vec![
            Column::new("operator", Unit::Text),
            Column::new("category", Unit::Text),
            Column::new("calls", Unit::Count),
            Column::new("own time", Unit::Ns),
            Column::new("share of own time", Unit::Share),
            Column::new("total time", Unit::Ns),
            Column::new("mean total", Unit::Ns),
        ];
        if shapes {
            columns.insert(1, Column::new("shapes", Unit::Text));
        }
        let mut sheet = Sheet::new(name, columns);
        for row in rows.iter().take(ROWS) {
            let mut cells: Vec<Value> = vec![
                row.name.as_str().into(),
                row.category.into(),
                row.calls.into(),
                row.own_ns.into(),
                share(row.own_ns),
                row.total_ns.into(),
                (row.total_ns as f64 / row.calls.max(1) as f64).into(),
            ];
            if shapes {
                cells.insert(1, row.shapes.as_str().into());
            }
            sheet.push(cells);
        }
        sheet
    };
    let mut report = Report::new("operators", TITLE).sheet(sheet("operators", false, &rows));
    let by_shape = operators(context, true);
    match by_shape.iter().any(|row| !row.shapes.is_empty()) {
        true => report = report.sheet(sheet("shapes", true, &by_shape).title("By the dimensions of their inputs")),
        false => report = report.note("shapes are not recorded: profile(record_shapes=True) records them"),
    }
    report = report
        .note("own time is without the operators inside it; total time of all operators counts nested ones twice");
    if !is_host_only(context.trace) {
        report = report
            .note("this is time of the host: kernels that the operators launched are in `roofline` and `kern-sum`");
    }
    if rows.len() > ROWS {
        report = report.note(format!("{} more operators take less time each", rows.len() - ROWS));
    }
    report
}
