//! Reading real Nsight Systems exports.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use strobe_trace::{GraphMode, NONE, OpKind, Trace, nsys, range_flags};

/// The folder of real traces, if there is one.
fn traces() -> Option<PathBuf> {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        eprintln!("skipped: STROBE_TEST_DATA is not set");
        return None;
    };
    Some(Path::new(&data).join("traces"))
}

fn read(path: &Path) -> Trace {
    nsys::read(path, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// Total length of the union of intervals.
fn union(mut spans: Vec<(i64, i64)>) -> i64 {
    spans.sort_unstable();
    let (mut total, mut reached) = (0, i64::MIN);
    for (start, end) in spans {
        total += (end - start.max(reached)).max(0);
        reached = reached.max(end);
    }
    total
}

#[test]
fn intervals_equal_the_golden_table() {
    let Some(traces) = traces() else { return };
    let table = std::fs::read_to_string(traces.join("golden_intervals.csv")).unwrap();
    let mut lines = table.lines();
    let header: Vec<&str> = lines.next().unwrap().split(',').collect();
    let mut checked = 0;
    for line in lines.filter(|line| line.starts_with("nsys/")) {
        let golden: HashMap<&str, &str> = header.iter().copied().zip(line.split(',')).collect();
        let number = |name: &str| golden[name].parse::<i64>().unwrap();
        let trace = read(&traces.join(golden["file"]));
        let device = trace.devices.iter().position(|d| i64::from(d.ordinal) == number("device")).unwrap();
        let ops: Vec<usize> = (0..trace.ops.len()).filter(|&i| trace.ops.device[i] as usize == device).collect();
        let count = |kind| ops.iter().filter(|&&i| trace.ops.kind[i] == kind).count() as i64;
        let sum =
            |kind| -> i64 { ops.iter().filter(|&&i| trace.ops.kind[i] == kind).map(|&i| trace.ops.duration(i)).sum() };
        let spans = |keep: &dyn Fn(usize) -> bool| -> Vec<(i64, i64)> {
            ops.iter().filter(|&&i| keep(i)).map(|&i| (trace.ops.start[i], trace.ops.end[i])).collect()
        };
        let is_comm = |i: usize| trace.op_name(i).contains("nccl");
        let compute = union(spans(&|i| !trace.ops.kind[i].is_memory() && !is_comm(i)));
        let with_comm = union(spans(&|i| !trace.ops.kind[i].is_memory()));
        let busy = union(spans(&|_| true));
        let first = ops.iter().map(|&i| trace.ops.start[i]).min().unwrap();
        let last = ops.iter().map(|&i| trace.ops.end[i]).max().unwrap();
        let without_launch = ops.iter().filter(|&&i| trace.ops.launch[i] == NONE).count() as i64;
        for (name, found) in [
            ("kernels", count(OpKind::Kernel)),
            ("memcpys", count(OpKind::Memcpy)),
            ("memsets", count(OpKind::Memset)),
            ("graph_rows", count(OpKind::Graph)),
            ("gpu_ops_without_launch", without_launch),
            ("first_ns", first),
            ("last_ns", last),
            ("span_ns", last - first),
            ("kernel_sum_ns", sum(OpKind::Kernel)),
            ("graph_sum_ns", sum(OpKind::Graph)),
            ("compute_ns", compute),
            ("exposed_comm_ns", with_comm - compute),
            ("exposed_mem_ns", busy - with_comm),
            ("busy_ns", busy),
            ("idle_ns", last - first - busy),
        ] {
            assert_eq!(found, number(name), "{name} of device {} of {}", golden["device"], golden["file"]);
        }
        checked += 1;
    }
    assert!(checked >= 9, "only {checked} rows were there to compare");
}

#[test]
fn replayed_kernels_lead_to_their_capture() {
    let Some(traces) = traces() else { return };
    let trace = read(&traces.join("nsys/h200/node.sqlite"));
    assert_eq!(trace.meta.graph_mode, Some(GraphMode::Node));
    assert_eq!(trace.graph_nodes.len(), 956);
    let original: HashMap<u64, u64> =
        trace.graph_nodes.iter().filter(|n| n.original != 0).map(|n| (n.node, n.original)).collect();
    let made: HashMap<u64, i64> =
        trace.graph_nodes.iter().filter(|n| n.original == 0).map(|n| (n.node, n.start)).collect();
    let replayed =
        (0..trace.ops.len()).filter(|&i| trace.ops.kind[i] == OpKind::Kernel && trace.ops.graph_node[i] != 0);
    let joined = replayed.filter(|&i| original.get(&trace.ops.graph_node[i]).is_some_and(|o| made.contains_key(o)));
    assert_eq!(joined.count(), 2_488);
    assert!(made.values().all(|start| *start < 0), "capture precedes profiling");
}

#[test]
fn registered_strings_are_resolved() {
    let Some(traces) = traces() else { return };
    let trace = read(&traces.join("nsys/nsys-ai/mfu_2gpu_before.sqlite"));
    assert_eq!(trace.ranges.len(), 19_118);
    // PyTorch's own ranges are called `nccl:all_reduce` and so on.
    let is_nccl = |name: &str| name.starts_with("nccl") && !name.starts_with("nccl:");
    assert_eq!(trace.ranges.iter().filter(|r| is_nccl(trace.text(r.name))).count(), 462);
    assert!(trace.ranges.iter().all(|r| !trace.text(r.name).is_empty()));
    assert_eq!(trace.processes.len(), 2);
    assert_eq!(trace.devices.len(), 2);
}

/// Correlations are unique within a process only: a join that ignores it finds launches that are not theirs.
#[test]
fn launches_of_another_process_do_not_match() {
    let Some(traces) = traces() else { return };
    for (file, false_matches) in [("h100_2gpu_1s", 11), ("mfu_2gpu_before", 1), ("mfu_2gpu_after", 2)] {
        let trace = read(&traces.join(format!("nsys/nsys-ai/{file}.sqlite")));
        let calls = trace.calls.iter().filter(|c| c.kind == strobe_trace::CallKind::Gpu && c.correlation != 0);
        let anywhere: std::collections::HashSet<i64> = calls.map(|c| c.correlation).collect();
        let wrong = trace.ops.iter().filter(|op| op.launch == NONE && anywhere.contains(&op.correlation));
        assert_eq!(wrong.filter(|op| op.kind == OpKind::Kernel).count(), false_matches, "{file}");
    }
}

#[test]
fn the_rest_of_a_capture_is_there() {
    let Some(traces) = traces() else { return };
    let node = read(&traces.join("nsys/h200/node.sqlite"));
    assert_eq!(node.allocations.len(), 2_315);
    let device: i64 = node.allocations.iter().filter(|a| a.mem_kind == 2 && a.bytes > 0).map(|a| a.bytes).sum();
    assert_eq!(device / 1_000_000, 2_525);
    assert_eq!(node.allocations.iter().filter(|a| a.bytes < 0).count(), 2);
    assert_eq!(node.allocations.iter().filter(|a| a.device.is_none()).count(), 1);
    let kinds = node.calls.iter().fold(BTreeMap::new(), |mut counts: BTreeMap<_, usize>, call| {
        *counts.entry(call.kind).or_default() += 1;
        counts
    });
    assert_eq!(kinds.into_values().collect::<Vec<_>>(), [814, 1, 3]);
    assert_eq!(node.meta.producer, "Nsight Systems 2025.3.2.0");
    assert_eq!(node.meta.session_start_utc_ns, Some(1_794_711_319_973_357_605));
    assert_eq!(node.meta.sources[0].format, "Nsight Systems SQLite, schema 3.20.3");
    let h200 = &node.devices[0];
    assert_eq!(
        (h200.name.as_str(), h200.bytes_per_s, h200.multiprocessors, h200.clock_hz, h200.compute_capability),
        ("NVIDIA H200", Some(4.814304e12), Some(132), Some(1.98e9), Some((9, 0)))
    );
    assert_eq!(node.meta.notices, Vec::<String>::new());

    let gpum = read(&traces.join("nsys/h200/gpum.sqlite"));
    assert_eq!(gpum.meta.graph_mode, Some(GraphMode::Graph));
    assert_eq!(gpum.counters.len(), 22);
    for counter in &gpum.counters {
        assert_eq!((counter.times.len(), counter.device), (1_504, Some(0)), "{}", counter.name);
        assert!(counter.times.is_sorted());
    }
    assert_eq!(gpum.ranges.len(), 9);
    assert!(gpum.ranges.flags.iter().all(|flags| flags & range_flags::UNCLOSED == 0));
}
