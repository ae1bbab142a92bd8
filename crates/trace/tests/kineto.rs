//! The importer of PyTorch profiler traces, against real files and their golden numbers, and on small made ones.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use strobe_trace::{
    CallKind, GraphMode, NONE, OpDetail, OpKind, RangeSource, StrId, Trace, TraceError, kineto, range_flags,
};

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

fn read_bytes(json: impl AsRef<[u8]>) -> Result<Trace, TraceError> {
    kineto::read(json.as_ref(), Path::new("made.json"), &mut |_| {})
}

fn read(json: impl AsRef<[u8]>) -> Trace {
    read_bytes(json).unwrap()
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
        let ops: Vec<_> = trace.ops.iter().filter(|op| op.device as usize == device).collect();
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

#[test]
fn details_of_the_graph_trace() {
    let Some(data) = test_data() else { return };
    let trace = read_gzip(&data.join("traces/kineto/h200/kineto_graph.json.gz"));
    assert_eq!(trace.meta.sources[0].events, 8_790);
    assert_eq!(trace.meta.session_start_utc_ns, Some(1_790_857_026_000_000_000));
    assert_eq!(trace.meta.graph_mode, Some(GraphMode::Node));
    assert_eq!(trace.meta.producer, "PyTorch profiler");
    let device = &trace.devices[0];
    assert_eq!((&device.name[..], device.multiprocessors), ("NVIDIA H200", Some(132)));
    assert_eq!((device.memory_bytes, device.compute_capability), (Some(150_109_880_320), Some((9, 0))));
    let processes: Vec<_> = trace.processes.iter().map(|p| (p.pid, &p.name[..])).collect();
    assert_eq!(processes, [(856, "python3")]);
    assert_eq!(trace.calls.kind.iter().filter(|&&kind| kind == CallKind::Gpu).count(), 347 + 111);
    assert_eq!(trace.calls.kind.iter().filter(|&&kind| kind == CallKind::Profiler).count(), 1);
    assert_eq!(trace.ranges.source.iter().filter(|&&source| source == RangeSource::CpuOp).count(), 2_120);
    assert_eq!(trace.text(trace.ranges.dims[0]), "[[32000, 2048], [8, 128], [], [], []]");
    assert!(trace.text(trace.ranges.types[0]).starts_with("[\"c10::BFloat16\", \"long int\""));
    let replays = (0..trace.calls.len()).filter(|&call| trace.text(trace.calls.name[call]) == "cudaGraphLaunch");
    for call in replays {
        assert_eq!(trace.ops.launch.iter().filter(|&&launch| launch as usize == call).count(), 311);
    }
    let Some(OpDetail::Kernel(kernel)) = trace.detail_of(0) else { panic!("the first op is a kernel") };
    assert_eq!((kernel.grid, kernel.block, kernel.registers), ([1024, 1, 1], [256, 1, 1], 32));
}

#[test]
fn pretty_printed_arguments_and_memory() {
    let Some(data) = test_data() else { return };
    let trace = read_gzip(&data.join("traces/kineto/tracelens/h100_qwen/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"));
    let embedding = trace.strings.find("aten::embedding").unwrap();
    let row = trace.ranges.iter().find(|range| range.name == embedding).unwrap();
    assert_eq!(trace.text(row.dims), "[[151936, 1024], [16, 559], [], [], []]");
    // Five Python frames are written to process 0: they belong to the one that there is.
    assert_eq!(trace.processes.iter().map(|p| p.pid).collect::<Vec<_>>(), [25_286]);
    assert_eq!(trace.allocations.len(), 2_450);
    let allocation = trace.allocations[0];
    assert_eq!((allocation.bytes, allocation.total_allocated), (18_317_312, Some(1_003_059_712)));
    assert_eq!((allocation.device, allocation.total_reserved), (Some(0), Some(2_629_828_608)));
    assert!(trace.meta.notices.contains(&"509 of 1,707 GPU ops have no launch call in the file".to_string()));
    let steps = trace.ranges.iter().filter(|range| trace.text(range.name) == "ProfilerStep#6");
    let sources: Vec<_> = steps.map(|range| (range.source, trace.threads[range.thread as usize].tid)).collect();
    assert!(sources.contains(&(RangeSource::Annotation, 25_286)));
    assert!(sources.contains(&(RangeSource::GpuAnnotation, 7)));
}

const SMALL: &str = r#"{"schemaVersion": 1, "traceName": "secret-name", "username": "secret-user",
  "metadata": {"rank": 7, "list": [1, {"ph": 2}]}, "distributedInfo": {"backend": "nccl", "rank": 3},
  "traceEvents": [
  {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 40, "tid": 41, "ts": 10.5, "dur": 2.25,
   "args": {"cbid": 211, "correlation": 5}},
  {"ph": "s", "id": 5, "pid": 40, "tid": 41, "ts": 10.5, "cat": "ac2g", "name": "ac2g"},
  {"ph": "X", "cat": "kernel", "name": "void k<\"q\", \u00e9>(int)", "pid": 2, "tid": 7, "ts": 20.001, "dur": 3.999,
   "args": {"device": 2, "context": 1, "stream": 7, "correlation": 5, "grid": [4, 5, 6], "block": [32, 1, 1],
   "registers per thread": 40, "shared memory": 1024, "graph node id": 8589934593}},
  {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 2, "tid": 20, "ts": 30, "dur": 1,
   "args": {"device": 2, "context": 1, "stream": 20, "correlation": 6, "bytes": 4096}},
  {"ph": "M", "name": "process_name", "pid": 40, "tid": 0, "ts": 0, "args": {"name": "python3 serve.py --key hush"}},
  {"ph": "M", "name": "thread_name", "pid": 40, "tid": 41, "ts": 0, "args": {"name": "main"}}
  ], "baseTimeNanoseconds": 1700000000000000000, "host_name": "secret-host",
  "deviceProperties": [{"id": 2, "name": "GPU X", "numSms": 10}]}"#;

#[test]
fn every_field_of_a_small_trace() {
    let trace = read(SMALL);
    assert_eq!(trace.ops.len(), 2);
    let kernel = trace.ops.get(0);
    assert_eq!((kernel.start, kernel.end, kernel.stream, kernel.context), (20_001, 24_000, 7, 1));
    assert_eq!((kernel.correlation, kernel.launch, kernel.graph_node), (5, 0, 8_589_934_593));
    assert_eq!(trace.op_name(0), "void k<\"q\", \u{e9}>(int)");
    let Some(OpDetail::Kernel(detail)) = trace.detail_of(0) else { panic!("a kernel") };
    assert_eq!((detail.grid, detail.registers, detail.dynamic_shared), ([4, 5, 6], 40, 1024));
    let copy = trace.ops.get(1);
    assert_eq!((copy.kind, copy.bytes, copy.launch), (OpKind::Memcpy, 4096, NONE));
    let (src_device, dst_device) = (None, None);
    let expected = OpDetail::Memcpy { copy_kind: 1, src_kind: 0, dst_kind: 2, src_device, dst_device, cause: 0 };
    assert_eq!(trace.detail_of(1), Some(&expected));
    assert_eq!(trace.calls.get(0).end, 12_750);
    assert_eq!(trace.threads[0].name, "main");
    assert_eq!((trace.processes[0].pid, &trace.processes[0].name[..]), (40, "python3 serve.py"));
    assert_eq!((trace.processes[0].rank, trace.meta.sources[0].rank), (Some(3), Some(3)));
    assert_eq!(trace.meta.session_start_utc_ns, Some(1_700_000_000_000_000_000));
    assert_eq!((&trace.devices[0].name[..], trace.devices[0].ordinal), ("GPU X", 2));
    let everything = format!("{trace:?}");
    assert!(!everything.contains("secret") && !everything.contains("hush"), "{everything}");
}

#[test]
fn chunks_of_any_size_give_the_same_trace() {
    struct Dribble<'a>(&'a [u8], usize);
    impl std::io::Read for Dribble<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let count = self.1.min(self.0.len()).min(buffer.len());
            let (now, later) = self.0.split_at(count);
            buffer[..count].copy_from_slice(now);
            self.0 = later;
            Ok(count)
        }
    }
    let whole = read(SMALL);
    for size in [1, 2, 3, 7, 64] {
        let trace = kineto::read(Dribble(SMALL.as_bytes(), size), Path::new("made.json"), &mut |_| {}).unwrap();
        assert_eq!(trace, whole, "{size}");
    }
}

#[test]
fn a_bare_array_needs_no_end_and_old_categories_are_known() {
    let json = r#"[
      {"ph":"X","cat":"Operator","name":"aten::mm","pid":9,"tid":"9","ts":1,"dur":"5","args":{"Input dims":[[2,3]]}},
      {"ph":"X","cat":"Operator","name":"ProfilerStep#2","pid":9,"tid":"9","ts":0,"dur":9},
      {"ph":"X","cat":"Runtime","name":"cudaLaunchKernel","pid":9,"tid":"9","ts":"2","dur":1,"args":{"correlation":3}},
      {"args":{"correlation":3,"device":0},"ph":"X","cat":"Kernel","name":"k","pid":0,"tid":"stream 7 ","ts":4e0,"dur":2},
      {"ph":"X","cat":"Memset","name":"Memset (Device)","pid":0,"tid":"stream 7","ts":7,"dur":1},"#;
    let trace = read(json);
    assert_eq!(trace.ops.kind, [OpKind::Kernel, OpKind::Memset]);
    assert_eq!((trace.ops.stream[0], trace.ops.launch[0], trace.ops.start[0]), (7, 0, 4_000));
    let sources = [RangeSource::Annotation, RangeSource::CpuOp];
    assert_eq!(trace.ranges.source, sources);
    assert_eq!(trace.text(trace.ranges.dims[1]), "[[2,3]]");
    assert_eq!(trace.meta.sources[0].lost, 0);
}

#[test]
fn values_of_operators_and_strides_of_expanded_tensors_are_kept() {
    let json = r#"[
      {"ph":"X","cat":"cpu_op","name":"aten::softmax","pid":9,"tid":9,"ts":1,"dur":5,"args":{"Input Dims":[[4,8],[]],
        "Input type":["float","Scalar"],"Concrete Inputs":["","-1"],"Input Strides":[[10,1],[]]}},
      {"ph":"X","cat":"cpu_op","name":"aten::copy_","pid":9,"tid":9,"ts":7,"dur":5,"args":{"Input Dims":[[4,8],[4,8]],
        "Input type":["float","float"],"Concrete Inputs":["", ""],"Input Strides":[[8,1],[0,1]]}}]"#;
    let trace = read(json);
    let text = |id: StrId| if id == StrId::NONE { "" } else { trace.text(id) };
    let kept = |row: usize| (text(trace.ranges.values[row]), text(trace.ranges.strides[row]));
    assert_eq!(kept(0), (r#"["","-1"]"#, ""), "no stride is 0: every element has its place");
    assert_eq!(kept(1), ("", "[[8,1],[0,1]]"), "no value is recorded");
}

#[test]
fn accelerators_of_other_makers() {
    for (runtime, kernel) in [("mtia_runtime", "mtia_ccp_events"), ("xpu_runtime", "kernel"), ("hip_driver", "kernel")]
    {
        let json = format!(
            r#"[{{"ph":"X","cat":"{runtime}","name":"launch","pid":9,"tid":9,"ts":1,"dur":1,"args":{{"correlation":3}}}},
                {{"ph":"X","cat":"{kernel}","name":"k","pid":0,"tid":0,"ts":4,"dur":2,"args":{{"correlation":3}}}}]"#
        );
        let trace = read(json);
        assert_eq!((trace.ops.launch[0], trace.calls.kind[0]), (0, CallKind::Gpu), "{runtime}");
    }
}

#[test]
fn begin_and_end_are_paired_by_thread() {
    let json = r#"[
      {"ph":"B","name":"outer","pid":1,"tid":1,"ts":1},
      {"ph":"B","name":"other","pid":1,"tid":2,"ts":2},
      {"ph":"B","name":"inner","pid":1,"tid":1,"ts":3},
      {"ph":"E","pid":1,"tid":1,"ts":4},
      {"ph":"E","pid":1,"tid":1,"ts":5},
      {"ph":"E","pid":1,"tid":1,"ts":6},
      {"ph":"i","name":"mark","pid":1,"tid":1,"ts":7,"s":"t"}]"#;
    let trace = read(json);
    let rows: Vec<_> = trace.ranges.iter().map(|r| (trace.text(r.name), r.start, r.end, r.flags)).collect();
    let expected = [
        ("outer", 1_000, 5_000, 0),
        ("other", 2_000, 6_000, range_flags::UNCLOSED),
        ("inner", 3_000, 4_000, 0),
        ("mark", 7_000, 7_000, range_flags::MARK),
    ];
    assert_eq!(rows, expected);
    assert_eq!(trace.meta.sources[0].format, "Chrome trace JSON");
    assert!(trace.meta.notices.iter().any(|n| n.contains("no GPU events")), "{:?}", trace.meta.notices);
    assert!(trace.meta.notices.iter().any(|n| n.starts_with("1 asynchronous or unpaired")));
}

#[test]
fn counters_and_memory() {
    let json = r#"[
      {"ph":"C","name":"queue","pid":0,"tid":0,"ts":2,"args":{"stream 7": 4, "note": "x"}},
      {"ph":"C","name":"queue","pid":0,"tid":0,"ts":1,"args":{"stream 7": 2.5}},
      {"ph":"C","name":"load","pid":5,"tid":0,"ts":1,"args":{"value": "3"}},
      {"ph":"X","cat":"kernel","name":"k","pid":0,"tid":0,"ts":4,"dur":2,"args":{"correlation":3,"device":9}},
      {"ph":"X","cat":"kernel","name":"k","pid":0,"tid":0,"ts":4,"dur":2,"args":{"correlation":3,"device":0}},
      {"ph":"i","cat":"cpu_instant_event","s":"t","name":"[memory]","pid":8,"tid":8,"ts":3,
       "args":{"Total Reserved":10,"Total Allocated":5,"Bytes":-5,"Addr":18446744073709551615,"Device Id":0,"Device Type":1}},
      {"ph":"i","cat":"cpu_instant_event","s":"t","name":"[memory]","pid":8,"tid":8,"ts":2,
       "args":{"Bytes":64,"Addr":1,"Device Id":-1,"Device Type":0}}]"#;
    let trace = read(json);
    assert_eq!((&trace.counters[0].name[..], &trace.counters[0].times[..]), ("queue stream 7", &[1_000, 2_000][..]));
    assert_eq!((&trace.counters[0].values[..], trace.counters[0].device), (&[2.5, 4.0][..], Some(1)));
    assert_eq!((&trace.counters[1].name[..], trace.counters[1].device), ("load", None));
    assert_eq!((trace.allocations[0].device, trace.allocations[0].bytes), (None, 64));
    let freed = trace.allocations[1];
    assert_eq!((freed.device, freed.bytes, freed.address), (Some(1), -5, u64::MAX));
    assert_eq!((freed.total_allocated, freed.total_reserved), (Some(5), Some(10)));
}

/// A rank with one call and one kernel, on a clock of its own.
fn rank(rank: u32, base: i64, ts: u32) -> String {
    format!(
        r#"{{"schemaVersion": 1, "distributedInfo": {{"rank": {rank}}}, "traceEvents": [
        {{"ph":"X","cat":"cuda_runtime","name":"launch","pid":9,"tid":9,"ts":{ts},"dur":1,"args":{{"correlation":3}}}},
        {{"ph":"X","cat":"kernel","name":"k{rank}","pid":0,"tid":7,"ts":{ts}.5,"dur":1,"args":{{"correlation":3,"device":0}}}}
        ], "baseTimeNanoseconds": {base}}}"#
    )
}

#[test]
fn roots_one_behind_the_other_are_ranks() {
    let two = rank(0, 1_000_000_000, 10) + "\n" + &rank(1, 1_000_005_000, 6);
    let trace = read(&two);
    assert_eq!(trace.ops.start, [10_500, 11_500]);
    assert_eq!(trace.ops.process, [0, 1]);
    assert_eq!(trace.ops.device, [0, 1]);
    assert_eq!(trace.ops_without_launch(), 0);
    assert_eq!(trace.processes.iter().map(|p| p.rank).collect::<Vec<_>>(), [Some(0), Some(1)]);
    assert!(trace.meta.notices[0].contains("2 traces"), "{:?}", trace.meta.notices);
    // Without ranks of their own, or with the same one twice, their order counts.
    for second in [rank(0, 1_000_005_000, 6), rank(1, 1_000_005_000, 6).replace("distributedInfo", "other")] {
        let trace = read(rank(0, 1_000_000_000, 10) + &second);
        assert_eq!(trace.processes.iter().map(|p| p.rank).collect::<Vec<_>>(), [Some(0), Some(1)]);
    }
    // The first was cut where the second begins.
    let first = rank(0, 1_000_000_000, 10);
    let cut = first.find("\"dur\":1,\"args\":{\"correlation\":3,\"device\"").unwrap();
    let trace = read(first[..cut].to_string() + &rank(1, 1_000_005_000, 6));
    assert_eq!((trace.calls.len(), trace.ops.len(), trace.processes.len()), (2, 1, 2));
    assert_eq!((trace.ops.process[0], trace.meta.sources[0].lost), (1, 1));
}

#[test]
fn merged_ranks_are_told_by_their_label() {
    let json = r#"[
      {"ph":"X","cat":"cuda_runtime","name":"a","pid":"[TP00-DP00] 9","tid":9,"ts":1,"dur":1,"args":{"correlation":3}},
      {"ph":"X","cat":"cuda_runtime","name":"b","pid":"[TP01-DP00] 9","tid":9,"ts":2,"dur":1,"args":{"correlation":3}},
      {"ph":"X","cat":"kernel","name":"k1","pid":"[TP01-DP00] 0","tid":7,"ts":5,"dur":1,"args":{"correlation":3}},
      {"ph":"X","cat":"kernel","name":"k0","pid":"[TP00-DP00] 0","tid":7,"ts":6,"dur":1,"args":{"correlation":3}}]"#;
    let trace = read(json);
    assert_eq!(trace.processes.iter().map(|p| (p.pid, p.rank)).collect::<Vec<_>>(), [(9, Some(0)), (9, Some(1))]);
    assert_eq!((&trace.ops.process[..], &trace.ops.launch[..]), (&[1, 0][..], &[1, 0][..]));
    assert_eq!(trace.devices.len(), 2);
    // Ranks that differ only in another part of the label are different ranks, and the profiler's marks no processes.
    let json = json
        .replace("TP01-DP00", "TP00-DP01")
        .replace("}}]", r#"}},{"ph":"i","s":"g","name":"Record Window End","pid":"[TP00-DP00] ","tid":"","ts":9}]"#);
    let ranks = |trace: &Trace| trace.processes.iter().map(|p| p.rank).collect::<Vec<_>>();
    assert_eq!(ranks(&read(json)), [Some(0), Some(1)]);
}

#[test]
fn of_several_processes_the_launching_one_owns_the_op() {
    let call = |pid: u32, correlation: u32| {
        format!(
            r#"{{"ph":"X","cat":"cuda_runtime","name":"l","pid":{pid},"tid":1,"ts":1,"dur":1,"args":{{"correlation":{correlation}}}}},"#
        )
    };
    let kernel = |device: u32, correlation: u32| {
        format!(
            r#"{{"ph":"X","cat":"kernel","name":"k","pid":{device},"tid":7,"ts":{correlation},"dur":1,"args":{{"device":{device},"correlation":{correlation}}}}},"#
        )
    };
    // Both processes used correlation 3; device 1 is otherwise used by process 20 only.
    let json = [
        "[".to_string(),
        call(10, 2),
        call(10, 3),
        call(20, 3),
        call(20, 4),
        kernel(0, 2),
        kernel(1, 3),
        kernel(1, 4),
        "]".to_string(),
    ];
    let trace = read(json.concat());
    let pids: Vec<i64> = trace.ops.process.iter().map(|&p| trace.processes[p as usize].pid).collect();
    assert_eq!(pids, [10, 20, 20]);
    assert_eq!(trace.ops_without_launch(), 0);
}

#[test]
fn processes_with_the_same_correlations_keep_their_devices() {
    let call = |pid: u32, ts: u32, correlation: u32| {
        format!(
            r#"{{"ph":"X","cat":"cuda_runtime","name":"l","pid":{pid},"tid":1,"ts":{ts},"dur":1,"args":{{"correlation":{correlation}}}}},"#
        )
    };
    let kernel = |device: u32, ts: u32, correlation: u32| {
        format!(
            r#"{{"ph":"X","cat":"kernel","name":"k","pid":{device},"tid":7,"ts":{ts},"dur":1,"args":{{"device":{device},"correlation":{correlation}}}}},"#
        )
    };
    let launches = |events: &[String]| {
        let trace = read(format!("[{}]", events.concat()));
        let pid = |op: strobe_trace::OpRow| trace.processes[op.process as usize].pid;
        trace.ops.iter().map(|op| (pid(op), trace.calls.start[op.launch as usize])).collect::<Vec<_>>()
    };
    let apart = [call(100, 1, 1), call(200, 101, 1), kernel(0, 5, 1), kernel(1, 105, 1)];
    assert_eq!(launches(&apart), [(100, 1_000), (200, 101_000)]);
    // Both calls precede both kernels: still no launch starts kernels on two devices.
    let together = [call(100, 1, 1), call(200, 2, 1), kernel(0, 5, 1), kernel(1, 6, 1)];
    let found = launches(&together);
    assert_ne!(found[0], found[1]);
    // One kernel waits so long that the other process has called since: the rest of its device outvotes it.
    let waiting = [
        call(100, 1, 1),
        call(100, 10, 2),
        call(100, 20, 3),
        call(200, 101, 1),
        call(200, 110, 2),
        call(200, 120, 3),
        kernel(0, 5, 1),
        kernel(0, 12, 2),
        kernel(0, 125, 3),
        kernel(1, 126, 1),
        kernel(1, 127, 2),
        kernel(1, 128, 3),
    ];
    let pids: Vec<i64> = launches(&waiting).into_iter().map(|(pid, _)| pid).collect();
    assert_eq!(pids, [100, 100, 100, 200, 200, 200]);
}

#[test]
fn events_years_away_from_the_others_are_left_out() {
    let kernel = |ts: &str, dur: &str| {
        format!(
            r#"{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":{ts},"dur":{dur},"args":{{"device":0}}}},"#
        )
    };
    let left_out = "1 event left out: more than 10 years away from the others".to_string();
    let bulk = |at: i64| (0..5).map(|i| kernel(&format!("{}", at + i * 10), "3")).collect::<String>();
    let now = 1_712_195_495_505_583;
    for (at, absurd) in [
        (now, kernel("0", "3")),
        (100, kernel("9000000000000000", "3")),
        (now, kernel("-9000000000000000", "3")),
        (100, kernel("105", "4000000000000000")),
    ] {
        for json in [format!("[{}{absurd}]", bulk(at)), format!("[{absurd}{}]", bulk(at))] {
            let trace = read(json);
            assert_eq!(trace.ops.len(), 5, "{absurd}");
            assert_eq!(trace.extent(), Some((at * 1_000, (at + 43) * 1_000)));
            assert_eq!(trace.meta.sources[0].lost, 1);
            assert!(trace.meta.notices.contains(&left_out), "{:?}", trace.meta.notices);
            assert_eq!(trace.meta.session_start_utc_ns, (at == now).then_some(0));
        }
    }
    // What was never closed ends with the last plausible event.
    let open = r#"{"ph":"B","name":"open","pid":1,"tid":1,"ts":101},"#;
    let trace = read(format!("[{open}{}{}]", bulk(100), kernel("9000000000000000", "3")));
    assert_eq!((trace.ranges.start[0], trace.ranges.end[0]), (101_000, 143_000));
    // Traces in one file may have clocks of their own, and one event is far from nothing.
    let roots = format!(r#"{{"traceEvents": [{}]}}{{"traceEvents": [{}]}}"#, bulk(100), bulk(now));
    assert_eq!((read(&roots).ops.len(), read(&roots).meta.sources[0].lost), (10, 0));
    assert_eq!(read(format!("[{}]", kernel("0", "1"))).ops.len(), 1);
}

#[test]
fn items_that_are_no_events_and_negative_durations_are_told() {
    let kernel =
        |ts: u32, dur: i32| format!(r#"{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":{ts},"dur":{dur}}}"#);
    let json = format!(
        r#"{{"traceEvents": [{}, 5,"s]}}",null,[1, "]"], {}], "baseTimeNanoseconds": 7}}"#,
        kernel(1, 2),
        kernel(9, -4)
    );
    let trace = read(json);
    assert_eq!((&trace.ops.start[..], &trace.ops.end[..]), (&[1_000, 9_000][..], &[3_000, 9_000][..]));
    assert_eq!((trace.meta.sources[0].lost, trace.meta.session_start_utc_ns), (4, Some(7)));
    let expected = [
        "4 items of the list of events lost: not an object each",
        "1 event kept with no length: the end is before the start",
    ];
    assert_eq!(trace.meta.notices[..2], expected);
    // A list within the list is looked into.
    assert_eq!(read(format!("[[{}, {}]]", kernel(1, 2), kernel(4, 2))).ops.len(), 2);
}

#[test]
fn absolute_times_start_in_1970() {
    let trace = read(r#"[{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":0,"ts":1712195495505582.988,"dur":0.001}]"#);
    assert_eq!((trace.ops.start[0], trace.ops.end[0]), (1_712_195_495_505_582_988, 1_712_195_495_505_582_989));
    assert_eq!(trace.meta.session_start_utc_ns, Some(0));
    let trace = read(r#"[{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":0,"ts":12.5}]"#);
    assert_eq!((trace.ops.start[0], trace.ops.end[0], trace.meta.session_start_utc_ns), (12_500, 12_500, None));
}

#[test]
fn damage_costs_only_the_events_it_hits() {
    let event = |ts: &str| format!(r#"{{"ph":"X","cat":"cpu_op","name":"op","pid":1,"tid":1,"ts":{ts},"dur":1}}"#);
    let broken = [
        r#"{"ph":"X","cat":"cpu_op","name":"unescaped "quote"","pid":1,"tid":1,"ts":2,"dur":1}"#,
        r#"{"ph":"X","cat":"cpu_op","name":"no end,"pid":1,"tid":1,"ts":2,"dur":1}"#,
        r#"{"ph":"X","cat":"cpu_op","name":"no brace","args":{"a":[{"b":1}]},"ts":2,"dur":1"#,
        r#"{"ph":"X","cat":"cpu_op","name":"no value","pid":,"tid":1,"ts":2,"dur":1}"#,
        r#"{"ph":"X","cat":"cpu_op","name":"not a time","pid":1,"tid":1,"ts":NaN,"dur":1}"#,
        r#"{"ph":"X","cat":"cpu_op","name":"endless","pid":1,"tid":1,"ts":1,"dur":1e300}"#,
        r#"{"ph":"X","cat":"cpu_op","name":"beyond","pid":1,"tid":1,"ts":9223372036854775,"dur":9223372036854775}"#,
    ];
    for broken in broken {
        let (one, three) = (event("1"), event("3"));
        let json =
            format!(r#"{{"traceEvents": [{one}, {broken}, {three}], "traceName": "x", "baseTimeNanoseconds": 77}}"#);
        let trace = read(&json);
        assert_eq!(trace.ranges.start, [1_000, 3_000], "{broken}");
        assert_eq!(trace.meta.sources[0].lost, 1, "{broken}");
        assert!(trace.meta.notices[0].contains("1 event lost"), "{:?}", trace.meta.notices);
        assert_eq!(trace.meta.session_start_utc_ns, Some(77), "{broken}");
        let last = read(format!(r#"{{"traceEvents": [{one}, {broken}], "baseTimeNanoseconds": 77}}"#));
        assert_eq!((last.ranges.len(), last.meta.session_start_utc_ns), (1, Some(77)), "{broken}");
    }
    // None of these is damage.
    let odd = [
        "{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"control \u{1}\n\",\"pid\":1,\"tid\":1,\"ts\":2,\"dur\":1}"
            .as_bytes(),
        b"{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"\xff\xfe\",\"pid\":1,\"tid\":1,\"ts\":2,\"dur\":1}",
        br#"{"ph":"X","cat":"cpu_op","name":"args","pid":1,"tid":1,"ts":2,"dur":1,"args":{"x":NaN,"y":Infinity}}"#,
        br#"{"ph":"X","cat":"cpu_op","name":"none","pid":1,"tid":1,"ts":2,"dur":null,"args":null}"#,
    ];
    for odd in odd {
        let json =
            [b"\xef\xbb\xbf[", event("1").as_bytes(), b",", odd, b", null, {},", event("3").as_bytes(), b"] tail }"]
                .concat();
        let trace = read(&json);
        assert_eq!(trace.ranges.start, [1_000, 2_000, 3_000], "{}", String::from_utf8_lossy(odd));
        assert_eq!(trace.meta.sources[0].lost, 1, "the null");
    }
}

#[test]
fn a_file_cut_anywhere_keeps_every_whole_event() {
    let whole = read(SMALL);
    let begin = SMALL.find("\"traceEvents\": [").unwrap() + "\"traceEvents\": [".len();
    let end = SMALL.find("\n  ], \"base").unwrap();
    let ends: Vec<usize> = SMALL[..end]
        .match_indices('}')
        .map(|(at, _)| at + 1)
        .filter(|&at| {
            at > begin && {
                let rest = SMALL[at..].trim_start();
                rest.starts_with(",\n  {") || rest.starts_with("]")
            }
        })
        .collect();
    assert_eq!(ends.len() as u64, whole.meta.sources[0].events);
    for cut in 0..SMALL.len() {
        let expected = ends.iter().filter(|&&end| end <= cut).count() as u64;
        match read_bytes(&SMALL[..cut]) {
            Ok(trace) => {
                let source = &trace.meta.sources[0];
                assert_eq!(source.events, expected, "cut at {cut}");
                let between = expected == ends.len() as u64 || SMALL[..cut].trim_end().ends_with(['}', ',']);
                assert!(source.lost <= 1 && (source.lost == 1 || between), "cut at {cut}");
                if source.lost == 1 {
                    let notice = format!("the file ends in the middle of event {}: 1 event lost", expected + 1);
                    assert!(trace.meta.notices.contains(&notice), "{:?}", trace.meta.notices);
                }
            }
            Err(error) => {
                assert_eq!(expected, 0, "cut at {cut}: {error}");
                assert!(error.to_string().contains("made.json"), "{error}");
            }
        }
    }
}

#[test]
fn what_is_no_trace_is_refused() {
    for json in
        ["", "  ", "{}", "[]", "[1, 2, 3]", r#"{"traceEvents": []}"#, r#"[{"value": 3}]"#, r#"{"traceEvents": [{"ph""#]
    {
        let error = read_bytes(json).unwrap_err().to_string();
        assert!(error.contains("cannot be read as a trace"), "{json}: {error}");
    }
    let deep = "[".repeat(1_000_000);
    assert!(read_bytes(&deep).is_err());
    let deep_argument = format!(r#"[{{"ph":"X","args":{{"a":{deep}"#);
    assert!(read_bytes(deep_argument).is_err());
    let deep_root = r#"{"a":"#.repeat(300_000);
    assert!(read_bytes(deep_root).is_err());
}

#[test]
fn long_roots_and_long_events() {
    let filler = "x".repeat(700_000);
    let json = format!(
        r#"{{"log": ["{filler}", {{"deep": "{filler}"}}], "note": "{filler}", "traceEvents": [
        {{"ph":"X","cat":"kernel","name":"{filler}","pid":0,"tid":0,"ts":1,"dur":1}},
        {{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":0,"ts":2,"dur":1}}], "end": ["{filler}"], "baseTimeNanoseconds": 5}}"#
    );
    let trace = read(json);
    assert_eq!((trace.ops.len(), trace.op_name(0).len()), (2, 700_000));
    assert_eq!(trace.meta.session_start_utc_ns, Some(5));
}

proptest! {
    #[test]
    fn flipped_bytes_never_panic(flips in proptest::collection::vec((0..SMALL.len(), 0u8..=255), 1..6)) {
        let mut bytes = SMALL.as_bytes().to_vec();
        for (at, byte) in flips {
            bytes[at] = byte;
        }
        if let Ok(trace) = read_bytes(&bytes) {
            prop_assert!(trace.meta.sources[0].events <= 12);
        }
    }

    #[test]
    fn pieces_of_json_never_panic(pieces in proptest::collection::vec(
        proptest::sample::select(vec![
            "{", "}", "[", "]", ",", ":", "\"", "\\", "\"ph\":\"X\"", "\"ts\":1", "\"traceEvents\"", "\"args\":{", "{\"ph\":\"X\",\"ts\":1}",
            "\"schemaVersion\":1", "1e9", "\"ph\":\"E\"", "\"ph\":\"C\"", "\"ph\":\"M\"", "\"cat\":\"kernel\"", "\"pid\":\"[TP\"", " ", "\u{0}",
        ]), 0..60)) {
        let _ = read_bytes(pieces.concat());
    }
}

#[test]
fn events_without_a_phase_and_correlations_given_twice_are_said() {
    let call = |at: u32| {
        format!(
            r#"{{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":5,"tid":5,"ts":{at},"dur":1,"args":{{"correlation":9}}}}"#
        )
    };
    let kernel = |at: u32| {
        format!(
            r#"{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":{at},"dur":2,"args":{{"correlation":9,"device":0,"stream":7}}}}"#
        )
    };
    let nameless = r#"{"cat":"kernel","name":"k","pid":0,"tid":7,"ts":50,"dur":2}"#;
    let odd = r#"{"ph":"XX","cat":"kernel","name":"k","pid":0,"tid":7,"ts":50,"dur":2}"#;
    let events = [call(10), kernel(12), call(20), kernel(22), nameless.to_owned(), odd.to_owned()];
    let trace = read(format!(r#"{{"traceEvents": [{}]}}"#, events.join(",")));
    assert_eq!((trace.ops.len(), trace.meta.sources[0].lost), (2, 2));
    // Each kernel goes to the last call of its id that began before it.
    assert_eq!(trace.ops.launch, [0, 1]);
    let notices = trace.meta.notices.join("\n");
    assert!(notices.contains("2 events left out: without a phase"), "{notices}");
    assert!(notices.contains("1 call has the correlation id of an earlier call"), "{notices}");
    let none = read_bytes(format!(r#"{{"traceEvents": [{nameless}]}}"#)).unwrap_err().to_string();
    assert!(none.contains("no event says what it is (`ph`)"), "{none}");
}

#[test]
fn more_processes_than_16_bits_count_stay_apart() {
    const PROCESSES: usize = 70_000;
    let mut events = Vec::new();
    for process in 0..PROCESSES {
        let (pid, at, id) = (1_000 + process, 10 * process, 1 + process);
        events.push(format!(
            r#"{{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":{pid},"tid":{pid},"ts":{at},"dur":1,"args":{{"correlation":{id}}}}},
               {{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":{},"dur":2,"args":{{"correlation":{id},"device":0,"stream":7}}}}"#,
            at + 3
        ));
    }
    let trace = read(format!("[{}]", events.join(",")));
    assert_eq!(trace.processes.len(), PROCESSES);
    assert!(trace.threads.iter().all(|thread| trace.processes[thread.process as usize].pid == thread.tid));
    let pids = trace.ops.process.iter().map(|&process| trace.processes[process as usize].pid);
    assert!(pids.eq((1_000..).take(PROCESSES)));
    assert_eq!(trace.ops_without_launch(), 0);
}
