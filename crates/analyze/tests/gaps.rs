//! Gaps: lengths, causes, and the agreement with the idle breakdown of Holistic Trace Analysis.

mod gpu_common;

use gpu_common::{call, csv, empty, op, random_trace, range, read, traces};
use proptest::prelude::*;
use strobe_analyze::gaps::{Cause, gaps, report, stream_idle};
use strobe_analyze::sheet::Value;
use strobe_analyze::{Context, Options};

#[test]
fn the_longest_gap_comes_first_with_its_call_and_range() {
    let mut trace = empty();
    range(&mut trace, "sample", (200, 100_000));
    call(&mut trace, "cudaLaunchKernel", (0, 10), 1);
    op(&mut trace, "k", (20, 100), 1);
    call(&mut trace, "cudaMemcpyAsync", (20, 160), 2);
    op(&mut trace, "memcpy", (110, 150), 2); // returns after the copy: it waited
    call(&mut trace, "cudaStreamSynchronize", (300, 60_000), 0);
    call(&mut trace, "cudaLaunchKernel", (60_100, 60_110), 3);
    op(&mut trace, "k", (60_120, 60_200), 3);
    trace.finish();
    let context = Context::new(&trace, &Options::default());
    let found = gaps(&context, 10);
    assert_eq!(found.len(), 1);
    let longest = &found[0].longest;
    assert_eq!(
        longest.iter().map(|g| (g.span.length(), g.cause)).collect::<Vec<_>>(),
        [(59_970, Cause::Sync), (10, Cause::Launch)]
    );
    let of = |cause: Cause| found[0].causes[Cause::ALL.iter().position(|c| *c == cause).unwrap()].time_ns;
    assert_eq!((of(Cause::Sync), of(Cause::Copy), of(Cause::Launch)), (59_700, 10, 10 + 20));
    assert_eq!(of(Cause::HostLate), 59_970 - 59_700 - 10 - 20);
    assert_eq!(found[0].histogram.iter().map(|a| a.count).collect::<Vec<_>>(), [1, 0, 0, 1, 0, 0]);
    let report = report(&context);
    let row = &report.sheets[0].rows[0];
    assert_eq!(row[4], Value::Text("cudaStreamSynchronize".into()));
    assert_eq!(row[5], Value::Text("sample".into()));
}

proptest! {
    #[test]
    fn gaps_and_their_causes_add_up_to_the_idle_time(trace in random_trace(), longest in 0usize..5) {
        let context = Context::new(&trace, &Options::default());
        for device in gaps(&context, longest) {
            let idle = device.span_ns - context.busy(device.device).length();
            prop_assert_eq!(device.all.time_ns, idle);
            prop_assert_eq!(device.causes.iter().map(|a| a.time_ns).sum::<i64>(), idle);
            prop_assert_eq!(device.histogram.iter().map(|a| a.time_ns).sum::<i64>(), idle);
            prop_assert_eq!(device.histogram.iter().map(|a| a.count).sum::<usize>(), device.all.count);
            prop_assert_eq!(device.longest.len(), longest.min(device.all.count));
            prop_assert!(device.longest.is_sorted_by(|a, b| a.span.length() >= b.span.length()));
        }
        report(&context);
    }
}

/// Traces in which every op has a launch (others are cut down before the analysis there) and whose times an f64 of
/// microseconds holds exactly.
#[test]
fn streams_wait_as_holistic_trace_analysis_says() {
    let Some(traces) = traces() else { return };
    let cases = [
        ("kineto/h200/kineto_graph.json.gz", "kineto/h200/hta_golden/idle_breakdown.csv", "0"),
        ("kineto/hta/trace_diff_control.json.gz", "kineto/hta/golden/control_idle_breakdown.csv", "3"),
        ("kineto/hta/sampled_rank-0.json.gz", "kineto/hta/golden/trace_filter_idle_breakdown.csv", "0"),
        ("kineto/hta/sampled_rank-1.json.gz", "kineto/hta/golden/trace_filter_idle_breakdown.csv", "1"),
    ];
    for (file, golden, rank) in cases {
        let trace = read(&traces.join(file));
        let context = Context::new(&trace, &Options::default());
        let idle = stream_idle(&context);
        for row in csv(&traces.join(golden)).iter().filter(|r| r["rank"] == rank) {
            let stream: u32 = row["stream"].parse().unwrap();
            let of_stream = idle.iter().find(|((_, s), _)| *s == stream).map(|(_, idle)| *idle).unwrap_or_default();
            let found = match row["idle_category"].as_str() {
                "host_wait" => of_stream.host_late_ns,
                "kernel_wait" => of_stream.short_wait_ns,
                _ => of_stream.long_wait_ns,
            };
            let expected: f64 = row["idle_time"].parse().unwrap();
            let off = (found as f64 / 1000.0 - expected).abs();
            assert!(off < 0.1, "{file}: stream {stream}, {}: {found} ns, there {expected} us", row["idle_category"]);
        }
    }
}

#[test]
fn the_report_works_on_real_traces() {
    let Some(traces) = traces() else { return };
    for file in ["nsys/h200/node.sqlite", "nsys/h200/rep_sdpa.sqlite", "nsys/nsys-ai/h100_2gpu_1s.sqlite"] {
        let trace = read(&traces.join(file));
        let context = Context::new(&trace, &Options::default());
        let report = report(&context);
        assert_eq!(
            report.sheets.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(),
            ["gaps", "host", "causes", "lengths", "streams"]
        );
        assert!(!report.sheets[0].rows.is_empty(), "{file}");
    }
}
