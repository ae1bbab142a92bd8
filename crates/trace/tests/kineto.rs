//! The importer of PyTorch profiler traces, against real files and their golden numbers, and on small made ones.

use std::path::{Path, PathBuf};

use strobe_trace::{NONE, OpKind, Trace, kineto};

fn test_data() -> Option<PathBuf> {
    let data = std::env::var_os("STROBE_TEST_DATA").map(PathBuf::from);
    if data.is_none() {
        println!("skipped: STROBE_TEST_DATA is not set");
    }
    data
}

fn read_gzip(path: &Path) -> Trace {
    let file = std::fs::File::open(path).unwrap();
    kineto::read(flate2::read::MultiGzDecoder::new(file), path, &mut |_| {}).unwrap()
}

/// The length of the union of spans, by the plainest means.
fn union(mut spans: Vec<(i64, i64)>) -> i64 {
    spans.sort();
    let (mut total, mut reached) = (0, i64::MIN);
    for (start, end) in spans {
        total += (end - start.max(reached)).max(0);
        reached = reached.max(end);
    }
    total
}

#[test]
fn golden_intervals_of_every_real_file() {
    let Some(data) = test_data() else { return };
    let traces = data.join("traces");
    let golden = std::fs::read_to_string(traces.join("golden_intervals.csv")).unwrap();
    let mut checked = 0;
    for line in golden.lines().skip(1).filter(|line| line.starts_with("kineto/")) {
        let fields: Vec<&str> = line.split(',').collect();
        let expected: Vec<i64> = fields[1..].iter().map(|field| field.parse().unwrap()).collect();
        let trace = read_gzip(&traces.join(fields[0]));
        let device = trace.devices.iter().position(|d| i64::from(d.ordinal) == expected[0]).unwrap();
        let ops: Vec<_> = trace.ops.iter().filter(|op| usize::from(op.device) == device).collect();
        let count = |kind| ops.iter().filter(|op| op.kind == kind).count() as i64;
        let first = ops.iter().map(|op| op.start).min().unwrap();
        let last = ops.iter().map(|op| op.end).max().unwrap();
        let kernels = ops.iter().filter(|op| op.kind == OpKind::Kernel);
        let is_comm = |name| trace.text(name).to_lowercase().contains("nccl");
        let spans = |keep: &dyn Fn(&strobe_trace::OpRow) -> bool| {
            union(ops.iter().filter(|op| keep(op)).map(|op| (op.start, op.end)).collect())
        };
        let compute = spans(&|op| op.kind == OpKind::Kernel && !is_comm(op.name));
        let with_comm = spans(&|op| op.kind == OpKind::Kernel);
        let busy = spans(&|_| true);
        let found = vec![
            i64::from(trace.devices[device].ordinal),
            count(OpKind::Kernel),
            count(OpKind::Memcpy),
            count(OpKind::Memset),
            count(OpKind::Graph),
            ops.iter().filter(|op| op.launch == NONE).count() as i64,
            first,
            last,
            last - first,
            kernels.map(|op| op.end - op.start).sum(),
            0,
            compute,
            with_comm - compute,
            busy - with_comm,
            busy,
            last - first - busy,
        ];
        assert_eq!(found, expected, "{}", fields[0]);
        assert_eq!(trace.meta.sources[0].lost, 0, "{}", fields[0]);
        let launched = |op: &strobe_trace::OpRow| {
            let call = trace.calls.get(op.launch as usize);
            trace.threads[call.thread as usize].process == op.process
        };
        assert!(ops.iter().filter(|op| op.launch != NONE).all(launched));
        checked += 1;
    }
    assert_eq!(checked, 12);
}
