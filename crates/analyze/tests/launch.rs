//! Launches and queues, against Holistic Trace Analysis and by hand.

mod synthetic;

use std::path::Path;

use strobe_analyze::Summary;
use strobe_analyze::launch::{QueueDepth, launches, queue_depths, report};
use strobe_analyze::sheet::Value;
use strobe_trace::{NONE, OpKind, Trace};
use synthetic::{Builder, context, read, real_data};

/// The depth after every change, as `queue_length.csv` sums it up: count, mean, sample deviation, min, quartiles, max.
fn figures(depths: &[i32]) -> [f64; 8] {
    let summary = Summary::of(depths.iter().map(|&d| f64::from(d))).unwrap();
    let n = summary.count as f64;
    let squares: f64 = depths.iter().map(|&d| (f64::from(d) - summary.mean).powi(2)).sum();
    let deviation = (squares / (n - 1.0)).sqrt();
    [n, summary.mean, deviation, summary.min, summary.p25, summary.median, summary.p75, summary.max]
}

/// The depths on a clock of this grain, with launches before starts of the same moment or after them.
fn depths(queue: &QueueDepth, grain: i64, launch_first: bool) -> Vec<i32> {
    let steps = queue.depths.iter().scan(0, |before, &depth| Some(depth - std::mem::replace(before, depth)));
    let rounded = queue.times.iter().map(|time| (time + grain / 2).div_euclid(grain));
    let mut changes: Vec<(i64, i32)> = rounded.zip(steps).collect();
    changes.sort_unstable_by_key(|&(time, step)| (time, if launch_first { -step } else { step }));
    let running = changes.into_iter().scan(0, |depth, (_, step)| {
        *depth += step;
        Some(*depth)
    });
    running.collect()
}

/// HTA counts only these calls.
fn counted_by_hta(trace: &Trace, call: u32) -> bool {
    let name = trace.text(trace.calls.name[call as usize]);
    let counted = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync"];
    counted.contains(&name)
}

fn compare_queues(trace: &Trace, golden: &Path, rank: &str, grain: i64) {
    let counted: Vec<_> = launches(trace).into_iter().filter(|l| counted_by_hta(trace, l.call)).collect();
    let queues = queue_depths(trace, &counted);
    let text = std::fs::read_to_string(golden).unwrap();
    let rows: Vec<Vec<&str>> = text.lines().skip(3).map(|l| l.split(',').collect()).collect();
    let mut compared = 0;
    for row in rows.iter().filter(|row| row[0] == rank) {
        let stream: u32 = row[1].parse().unwrap();
        let queue = queues.iter().find(|q| q.stream == stream).unwrap();
        let theirs: Vec<f64> = row[2..].iter().map(|field| field.parse().unwrap()).collect();
        let [launch_first, start_first] = [true, false].map(|first| figures(&depths(queue, grain, first)));
        for (figure, theirs) in theirs.into_iter().enumerate() {
            // In traces of whole microseconds a launch and a start may bear the same time; in which order HTA takes
            // them is chance. Where times are finer both orders give the same.
            let (a, b) = (launch_first[figure], start_first[figure]);
            let between = a.min(b) - 1e-6 <= theirs && theirs <= a.max(b) + 1e-6;
            assert!(between, "{} stream {stream} figure {figure}: {theirs} not in {a}..{b}", golden.display());
        }
        compared += 1;
    }
    assert_eq!(compared, queues.len(), "{}", golden.display());
}

#[test]
fn queues_equal_those_of_hta() {
    let Some(data) = real_data() else { return };
    let kineto = data.join("kineto");
    for (file, golden, rank) in [
        ("h200/kineto_graph.json.gz", "h200/hta_golden/queue_length.csv", "0"),
        ("hta/trace_diff_control.json.gz", "hta/golden/control_queue_length.csv", "3"),
        ("hta/trace_diff_test.json.gz", "hta/golden/test_queue_length.csv", "1"),
        ("hta/ns_resolution_rank-0.json.gz", "hta/golden/ns_resolution_queue_length.csv", "0"),
        ("hta/sampled_rank-0.json.gz", "hta/golden/trace_filter_queue_length.csv", "0"),
        ("hta/sampled_rank-1.json.gz", "hta/golden/trace_filter_queue_length.csv", "1"),
        (
            "tracelens/h100_qwen/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
            "tracelens/h100_qwen/hta_golden/queue_length.csv",
            "0",
        ),
    ] {
        // HTA holds the absolute times of that file in f64 microseconds, which are a quarter of one apart.
        let grain = if file.contains("ns_resolution") { 250 } else { 1 };
        compare_queues(&read(&[kineto.join(file)]), &kineto.join(golden), rank, grain);
    }
}

#[test]
fn a_graph_is_one_launch() {
    let Some(data) = real_data() else { return };
    let trace = read(&[data.join("nsys/h200/node.sqlite")]);
    let launches = launches(&trace);
    let graphs: Vec<_> = launches.iter().filter(|l| l.ops > 1).collect();
    assert_eq!((graphs.len(), graphs[0].ops), (8, 311));
    assert_eq!(launches.iter().map(|l| l.ops as usize).sum::<usize>(), trace.ops.len());
    for launch in &launches {
        let mine = |op: &usize| trace.ops.launch[*op] == launch.call;
        let first = (0..trace.ops.len()).find(mine).unwrap();
        assert_eq!(launch.first_op as usize, first);
        assert_eq!(launch.delay_ns, trace.ops.start[first] - trace.calls.end[launch.call as usize]);
    }
    let report = report(&context(&trace));
    let by_call = &report.sheets[0];
    let row = by_call.rows.iter().find(|r| r[0] == Value::from("cudaGraphLaunch_v10000")).unwrap();
    assert_eq!(row[1..3], [Value::Int(8), Value::Int(8 * 311)]);
    // The median of the call is the one that nsys prints in its summary of calls.
    assert_eq!(row[3], Value::Float(457743.5));
}

#[test]
fn delays_and_queue_by_hand() {
    let mut builder = Builder::new();
    // The second kernel waits for the first; the third starts before its call returns.
    builder.launch("k", (0, 10), (20, 120)).launch("k", (10, 20), (120, 125)).launch("k", (200, 260), (230, 240));
    builder.op(OpKind::Kernel, "lost", 7, 300, 310, 77);
    let trace = builder.build();
    let launches = launches(&trace);
    assert_eq!(launches.iter().map(|l| l.delay_ns).collect::<Vec<_>>(), [10, 100, -30]);
    let queues = queue_depths(&trace, &launches);
    assert_eq!(queues.len(), 1);
    assert_eq!(queues[0].times, [0, 10, 20, 120, 200, 230]);
    assert_eq!(queues[0].depths, [1, 2, 1, 0, 1, 0]);
    assert_eq!(queues[0].time_at_depth(&Default::default()), [80, 10 + 100 + 30, 10]);
    let report = report(&context(&trace));
    let row = &report.sheets[0].rows[0];
    assert_eq!(row[12..], [Value::Int(1), Value::Int(2), Value::Float(2.0 / 3.0)]);
    assert!(report.notes.iter().any(|note| note == "1 of 4 ops on devices have no launching call in the trace."));
}

#[test]
fn a_full_queue_is_measured() {
    let mut builder = Builder::new();
    for i in 0..1200 {
        builder.launch("k", (i, i + 1), (10_000 + 10 * i, 10_010 + 10 * i));
    }
    let trace = builder.build();
    let full = &report(&context(&trace)).sheets[2].rows[0][7];
    // From the launch that makes it 1,000 at time 999 until the 201st start leaves 999.
    assert_eq!(*full, Value::Int(10_000 + 10 * 200 - 999));
}

#[test]
fn nothing_to_launch_is_said() {
    let mut builder = Builder::new();
    builder.op(OpKind::CpuOp, "gemm", 0, 0, 10, 0);
    let trace = builder.build();
    assert_eq!(trace.ops.launch, [NONE]);
    assert!(report(&context(&trace)).not_applicable.unwrap().contains("on the CPU"));
    let trace = Builder::new().kernel("k", 0, 1, 9).build();
    assert!(report(&context(&trace)).not_applicable.unwrap().contains("none of the 1 ops"));
}

#[test]
fn every_real_file_has_its_reports_or_a_reason() {
    let Some(data) = real_data() else { return };
    for path in synthetic::all_traces(&data) {
        let trace = read(std::slice::from_ref(&path));
        let context = strobe_analyze::Context::new(&trace, &strobe_analyze::Options::default());
        for report in [
            report(&context),
            strobe_analyze::overlap::report(&context),
            strobe_analyze::memory::report(&context),
            strobe_analyze::metrics::report(&context),
        ] {
            let has_rows = report.sheets.iter().any(|sheet| !sheet.rows.is_empty());
            assert_eq!(report.not_applicable.is_none(), has_rows, "{} of {}", report.name, path.display());
        }
    }
}
