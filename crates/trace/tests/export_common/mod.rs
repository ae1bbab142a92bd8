//! Traces for tests of the exporters: written by hand, generated, and real ones.
#![allow(dead_code)] // not every test binary needs all of it

use std::path::PathBuf;

use proptest::prelude::*;
use strobe_trace::*;

/// A path of its own in the build's scratch directory.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    let _ = std::fs::remove_file(&path);
    path
}

/// The folder of real traces, if this machine has it.
pub(crate) fn real_data() -> Option<PathBuf> {
    let folder = std::env::var_os("STROBE_TEST_DATA").map(|data| PathBuf::from(data).join("traces"));
    if folder.is_none() {
        eprintln!("skipped: STROBE_TEST_DATA is not set");
    }
    folder
}

/// An op with little in it, to be filled in.
pub(crate) fn op(name: StrId, kind: OpKind, start: i64, end: i64) -> OpRow {
    OpRow {
        start,
        end,
        name,
        kind,
        device: 0,
        stream: 7,
        context: 1,
        process: 0,
        correlation: 0,
        launch: NONE,
        graph_node: 0,
        bytes: 0,
        detail: NONE,
        work: NONE,
        iteration: NONE,
    }
}

/// A range with little in it, to be filled in.
pub(crate) fn range(name: StrId, source: RangeSource, start: i64, end: i64) -> RangeRow {
    RangeRow { source, ..RangeRow::new(name, 0, start, end) }
}

/// Two kernels that overlap on a stream, launched by one graph launch, with a copy, ranges, a counter and memory.
pub(crate) fn gpu() -> Trace {
    let mut trace = Trace::default();
    let mut id = |text: &str| trace.strings.intern(text);
    let (gemm, reduce, copy) = (id("void gemm<\"a\\b\">(float*)"), id("reduce"), id("[CUDA memcpy Host-to-Device]"));
    let (launch, copy_call, poll) = (id("cudaGraphLaunch_v10000"), id("cudaMemcpyAsync_v3020"), id("poll"));
    let (step, mark, operator, loading) = (id("step 1\n"), id("now"), id("aten::mm"), id("loading"));
    let (dims, types, domain) = (id("[[8, 2048], []]"), id("not JSON"), id("NCCL"));
    let (values, strides) = (id("[\"\", \"True\"]"), id("[[0, 1], []]"));
    let symbol = id("weights");
    trace.details = vec![
        OpDetail::Kernel(KernelDetail {
            short_name: StrId::NONE,
            grid: [4, 2, 1],
            block: [128, 1, 1],
            registers: 64,
            static_shared: 16,
            dynamic_shared: 1024,
        }),
        OpDetail::Memcpy { copy_kind: 1, src_kind: 0, dst_kind: 2, src_device: None, dst_device: Some(0), cause: 0 },
    ];
    let kernel = |name, start, end| OpRow { correlation: 9, detail: 0, ..op(name, OpKind::Kernel, start, end) };
    trace.ops.push(OpRow { graph_node: 1 << 33, ..kernel(gemm, 5_000, 8_100) });
    trace.ops.push(kernel(reduce, 8_000, 9_001));
    trace.ops.push(OpRow { correlation: 8, bytes: 4096, detail: 1, ..op(copy, OpKind::Memcpy, 1_000, 2_000) });
    let call = |name, start, end, correlation| CallRow {
        start,
        end,
        name,
        thread: 0,
        correlation,
        kind: CallKind::Gpu,
        result: 0,
    };
    trace.calls.push(call(launch, 3_000, 4_000, 9));
    trace.calls.push(call(copy_call, -500, 500, 8));
    trace.calls.push(CallRow { kind: CallKind::OsRuntime, result: -1, ..call(poll, 9_100, 9_200, 0) });
    trace.ranges.push(range(step, RangeSource::PushPop, -1_000, 10_000));
    trace.ranges.push(RangeRow { flags: range_flags::MARK, ..range(mark, RangeSource::PushPop, 100, 100) });
    trace.ranges.push(RangeRow { dims, types, values, strides, ..range(operator, RangeSource::CpuOp, 2_900, 4_100) });
    trace.ranges.push(RangeRow { domain, ..range(loading, RangeSource::StartEnd, 3_500, 12_000) });
    trace.counters = vec![Counter {
        name: "SM Active".to_owned(),
        device: Some(0),
        times: vec![-100, 0, 100],
        values: vec![12.5, f64::NAN, 100.0],
    }];
    trace.allocations = vec![Allocation {
        time: 0,
        device: Some(0),
        process: 0,
        address: u64::MAX - 1,
        bytes: -4096,
        mem_kind: 2,
        name: symbol,
        total_allocated: Some(0),
        total_reserved: None,
    }];
    trace.devices = vec![Device {
        ordinal: 0,
        name: "NVIDIA H200".to_owned(),
        memory_bytes: Some(150_000_000_000),
        bytes_per_s: Some(4.8143e12),
        multiprocessors: Some(132),
        clock_hz: None,
        compute_capability: Some((9, 0)),
        ..Device::default()
    }];
    trace.processes = vec![Process { pid: 4242, name: "python3".to_owned(), rank: Some(3), source: 0 }];
    trace.threads = vec![Thread { process: 0, tid: 4243, name: "worker".to_owned() }];
    trace.meta = Meta {
        session_start_utc_ns: Some(1_794_711_319_973_357_605),
        producer: "test".to_owned(),
        sources: vec![Source { path: "/home/someone/secret/in.sqlite".into(), ..Source::default() }],
        extra: [("model".to_owned(), "/home/someone/secret/micro.gguf".to_owned())].into(),
        ..Meta::default()
    };
    trace.finish();
    trace
}

/// One decode step of an engine on the CPU: a forward range with two ops.
pub(crate) fn cpu() -> Trace {
    let mut trace = Trace::default();
    let mut id = |text: &str| trace.strings.intern(text);
    let (qkv, gemm, gemm_kernel) = (id("qkv_proj"), id("gemm"), id("gemm_packed_f32_avx512"));
    let (norm, norm_kernel, forward) = (id("norm"), id("rms_norm_f32"), id("iteration 7: 0 ctx reqs, 3 gen reqs"));
    let work = |op, category, flops| Work { op, category, layer: Some(2), shape: [3, 96, 0], bytes: 4000, flops };
    trace.works = vec![work(qkv, gemm, 60_000), work(norm, norm, 0)];
    let row = |name, work, start, end| OpRow {
        stream: 0,
        context: 0,
        work,
        iteration: 7,
        ..op(name, OpKind::CpuOp, start, end)
    };
    trace.ops.push(row(gemm_kernel, 0, 2_000, 4_000));
    trace.ops.push(row(norm_kernel, 1, 1_500, 2_000));
    trace.ranges.push(RangeRow {
        kind: RangeKind::ForwardStep,
        iteration: 7,
        ..range(forward, RangeSource::PushPop, 1_000, 5_001)
    });
    trace.iterations = vec![Iteration {
        iter: 7,
        start: -500,
        end: 5_500,
        context_requests: 0,
        generation_requests: 3,
        context_tokens: 0,
        generation_tokens: 3,
        window: 0,
        cpu_wait: Some(40),
    }];
    trace.expert_loads = vec![ExpertLoad { iter: 7, layer: 1, expert: 5, tokens: 3 }];
    trace.devices = vec![Device { is_cpu: true, ..Device::default() }];
    trace.processes = vec![Process { pid: 10, name: "strobe".to_owned(), ..Process::default() }];
    trace.threads = vec![Thread { process: 0, tid: 11, name: "engine \"loop\"".to_owned() }];
    trace.meta.windows = vec![Window { index: 0, first: 7, last: 9, complete: false }];
    trace.finish();
    trace
}

fn span() -> impl Strategy<Value = (i64, i64)> {
    (-10_000i64..10_000, 0i64..3_000).prop_map(|(start, length)| (start, start + length))
}

/// Traces with a few events of every kind on few tracks, overlapping in every way.
pub(crate) fn any_trace() -> impl Strategy<Value = Trace> {
    let kinds =
        prop::sample::select(vec![OpKind::Kernel, OpKind::Memcpy, OpKind::Memset, OpKind::Graph, OpKind::CpuOp]);
    let ops = prop::collection::vec((span(), 0u32..4, kinds, 0u32..2, 0u32..3, 0u32..2, 0i64..6), 0..40);
    let calls = prop::collection::vec((span(), 0u32..4, 0u32..3, 0i64..6), 0..20);
    let sources = prop::sample::select(vec![
        RangeSource::PushPop,
        RangeSource::StartEnd,
        RangeSource::Annotation,
        RangeSource::CpuOp,
        RangeSource::Python,
        RangeSource::Other,
    ]);
    let ranges = prop::collection::vec((span(), 0u32..4, 0u32..3, sources), 0..30);
    let samples = prop::collection::vec((-1_000i64..1_000, -1e9f64..1e9), 0..10);
    let names = prop::collection::vec(any::<String>(), 4);
    (ops, calls, ranges, samples, names).prop_map(|(ops, calls, ranges, mut samples, names)| {
        let mut trace = Trace::default();
        let names: Vec<StrId> = names.iter().map(|name| trace.strings.intern(name)).collect();
        for ((start, end), name, kind, device, stream, process, correlation) in ops {
            let correlation = if kind == OpKind::CpuOp { 0 } else { correlation };
            let bytes = if kind.is_memory() { start.unsigned_abs() } else { 0 };
            let row = op(names[name as usize], kind, start, end);
            trace.ops.push(OpRow { device, stream, process, correlation, bytes, ..row });
        }
        for ((start, end), name, thread, correlation) in calls {
            let (name, kind) = (names[name as usize], CallKind::Gpu);
            trace.calls.push(CallRow { start, end, name, thread, correlation, kind, result: 0 });
        }
        for ((start, end), name, thread, source) in ranges {
            trace.ranges.push(RangeRow { thread, ..range(names[name as usize], source, start, end) });
        }
        samples.sort_by_key(|s| s.0);
        trace.counters = vec![Counter {
            name: "c".to_owned(),
            device: None,
            times: samples.iter().map(|s| s.0).collect(),
            values: samples.iter().map(|s| s.1).collect(),
        }];
        let device = |ordinal| Device { ordinal, ..Device::default() };
        trace.devices = vec![device(0), device(1)];
        let process = |pid| Process { pid, ..Process::default() };
        trace.processes = vec![process(100), process(200)];
        let thread = |process, tid| Thread { process, tid, name: String::new() };
        trace.threads = vec![thread(0, 100), thread(0, 101), thread(1, 100)];
        trace.finish();
        trace
    })
}
