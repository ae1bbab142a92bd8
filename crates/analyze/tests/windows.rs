//! Two recorded windows: what lies between them is nobody's time, in no report.

mod gpu_common;

use gpu_common::{call, empty, op};
use strobe_analyze::budget::device_budgets;
use strobe_analyze::compare::{CompareOptions, compare};
use strobe_analyze::sheet::{Unit, Value};
use strobe_analyze::summary::device_times;
use strobe_analyze::{Context, Options, advice, gaps, reports};
use strobe_trace::{Iteration, OpKind, OpRow, Trace};

const FAR: i64 = 50_000_000;

fn iteration(iter: u64, window: u32, (start, end): (i64, i64)) -> Iteration {
    Iteration {
        iter,
        start,
        end,
        context_requests: 0,
        generation_requests: 1,
        context_tokens: 0,
        generation_tokens: 1,
        window,
        cpu_wait: None,
    }
}

/// Iterations 5 to 7 and 40 to 42, each of a thousand nanoseconds with two ops of 400.
fn places() -> impl Iterator<Item = (u32, u64, i64)> {
    [(0, 5, 0), (1, 40, FAR)]
        .into_iter()
        .flat_map(|(w, first, at)| (0..3).map(move |i| (w, first + i, at + 1000 * i as i64)))
}

fn on_gpu() -> Trace {
    let mut trace = empty();
    for (window, iter, at) in places() {
        trace.iterations.push(iteration(iter, window, (at, at + 1000)));
        for start in [at + 100, at + 600] {
            let correlation = trace.ops.len() as i64 + 1;
            call(&mut trace, "cuLaunchKernelEx", (start - 60, start - 20), correlation);
            op(&mut trace, "nvjet_a", (start, start + 400), correlation);
            let last = trace.ops.len() - 1;
            trace.ops.iteration[last] = iter as u32;
        }
    }
    trace.finish();
    trace
}

fn on_cpu() -> Trace {
    let mut trace = Trace::default();
    let name = trace.strings.intern("gemm_f32");
    for (window, iter, at) in places() {
        trace.iterations.push(iteration(iter, window, (at, at + 1000)));
        for start in [at + 100, at + 600] {
            let row = OpRow::new(OpKind::CpuOp, name, start, start + 400);
            trace.ops.push(OpRow { iteration: iter as u32, ..row });
        }
    }
    trace.finish();
    trace
}

/// From the first op of a window to the end of its last, twice.
const SEEN: i64 = 2 * 2900;
const BUSY: i64 = 12 * 400;

#[test]
fn time_between_windows_is_not_idle_time() {
    for trace in [on_gpu(), on_cpu()] {
        let context = Context::new(&trace, &Options::default());
        let time = &device_times(&context)[0];
        assert_eq!((time.span_ns, time.busy_ns(), time.idle_ns), (SEEN, BUSY, SEEN - BUSY));
        let budget = &device_budgets(&context)[0];
        let parts: i64 = budget.parts.iter().map(|part| part.1).sum();
        assert_eq!((budget.wall_ns, parts), (SEEN, SEEN));
        let idle: i64 = budget.parts.iter().filter(|part| part.0.is_idle()).map(|part| part.1).sum();
        assert_eq!(idle, SEEN - BUSY);
        assert_eq!(context.unseen_on(0).length(), FAR - 2900);
        assert_eq!(context.unseen().length(), FAR - 3000, "iterations reach further than their ops");
        let summary = reports::find("summary").unwrap();
        let notes = summary.run(&context).notes;
        assert!(notes.iter().any(|note| note.contains("50.0 ms lie between recorded windows")), "{notes:?}");
    }
}

#[test]
fn no_table_of_idle_time_holds_it() {
    let trace = on_gpu();
    let context = Context::new(&trace, &Options::default());
    let found = &gaps::gaps(&context, 8)[0];
    assert_eq!((found.span_ns, found.all.time_ns), (SEEN, SEEN - BUSY));
    let streams = gaps::stream_idle(&context);
    let idle: i64 = streams.values().map(|i| i.host_late_ns + i.short_wait_ns + i.long_wait_ns + i.unknown_ns).sum();
    assert_eq!(idle, SEEN - BUSY);
    for entry in reports::ALL {
        let report = entry.run(&context);
        for sheet in report.sheets.iter().filter(|_| !entry.name.ends_with("-sum")) {
            for column in
                sheet.columns.iter().enumerate().filter(|(_, c)| c.unit == Unit::Ns && c.name.to_lowercase() != "start")
            {
                for row in &sheet.rows {
                    let long = match row[column.0] {
                        Value::Int(ns) => ns > FAR / 2,
                        Value::Float(ns) => ns > FAR as f64 / 2.0,
                        Value::Interval(low, high) => low.abs().max(high.abs()) > FAR as f64 / 2.0,
                        Value::Unknown | Value::Text(_) => false,
                    };
                    assert!(!long, "report {}, sheet {}: {row:?}", entry.name, sheet.name);
                }
            }
        }
    }
    for finding in advice::findings(&context) {
        assert!(finding.gain.is_none_or(|gain| gain.of_ns < FAR / 2), "{}", finding.sentence);
    }
}

#[test]
fn a_comparison_leaves_it_out_too() {
    let trace = on_gpu();
    let contexts = [0, 1].map(|_| Context::new(&trace, &Options::default()));
    let [a, b] = contexts;
    let comparison = compare(&[a], &[b], &CompareOptions::default());
    let windows = comparison.windows.unwrap();
    let whole = |w: &strobe_analyze::compare::Window| w.compute_ns + w.exposed_communication_ns + w.idle_ns;
    assert!(windows.iter().all(|w| w.span_ns == SEEN as f64 && whole(w) == w.span_ns), "{windows:?}");
}

#[test]
fn one_window_has_nothing_unseen() {
    let mut trace = on_gpu();
    // The second three follow the first without a number between them.
    trace.iterations.iter_mut().filter(|iteration| iteration.iter >= 40).for_each(|iteration| iteration.iter -= 32);
    trace.ops.iteration.iter_mut().filter(|number| **number >= 40).for_each(|number| *number -= 32);
    let context = Context::new(&trace, &Options::default());
    assert!(context.unseen().is_empty() && context.unseen_on(0).is_empty() && context.unseen_on(9).is_empty());
}
