//! The critical path tiles its span and names what was waited for.

mod synthetic;

use proptest::prelude::*;
use strobe_analyze::critical_path::{Kind, Path, paths, process_paths, report};
use strobe_trace::{OpKind, RangeSource, Thread, Trace};
use synthetic::{Builder, all_traces, context, read, real_data};

fn kinds(path: &Path) -> Vec<(Kind, i64, i64)> {
    path.segments.iter().map(|s| (s.kind, s.span.start, s.span.end)).collect()
}

fn tiles(path: &Path) -> bool {
    let mut at = path.span.start;
    let joined = path.segments.iter().all(|s| {
        let fits = s.span.start == at && s.span.end > s.span.start;
        at = s.span.end;
        fits
    });
    joined && at == path.span.end
}

fn only_path(trace: &Trace) -> Path {
    let mut found = paths(&context(trace));
    assert_eq!(found.len(), 1);
    found.remove(0)
}

#[test]
fn a_late_host_is_on_the_path() {
    let mut builder = Builder::new();
    builder.range(RangeSource::PushPop, "prepare", 12, 28);
    builder.launch("a", (0, 4), (6, 16)).launch("b", (30, 34), (37, 50));
    let trace = builder.build();
    let path = only_path(&trace);
    let expected = [
        (Kind::Call, 0, 4),
        (Kind::Host, 4, 12),
        (Kind::Host, 12, 28),
        (Kind::Host, 28, 30),
        (Kind::Call, 30, 34),
        (Kind::LaunchLatency, 34, 37),
        (Kind::Op, 37, 50),
    ];
    assert_eq!(kinds(&path), expected);
    assert_eq!(trace.text(path.segments[2].name), "prepare");
}

/// The last range or call moves to another thread.
fn on_thread(builder: &mut Builder, thread: u32) {
    while builder.trace.threads.len() <= thread as usize {
        builder.trace.threads.push(Thread { process: 0, tid: 100, ..Thread::default() });
    }
    if let Some(last) = builder.trace.ranges.thread.last_mut() {
        *last = thread;
    }
}

#[test]
fn what_another_thread_did_is_on_the_path_of_one_that_slept() {
    const MS: i64 = 1_000_000;
    let mut builder = Builder::new();
    builder.launch("a", (0, 10), (20, 100)).launch("b", (9 * MS, 9 * MS + 10), (9 * MS + 20, 9 * MS + 50));
    builder.range(RangeSource::PushPop, "tokenize", MS, 9 * MS - 1_000);
    on_thread(&mut builder, 1);
    let whole = |trace: &Trace| process_paths(&context(trace)).remove(0);
    let trace = builder.build();
    let path = whole(&trace);
    assert!(tiles(&path));
    let named = path.segments.iter().find(|s| s.kind == Kind::Host && s.span.length() > MS).unwrap();
    assert_eq!((trace.text(named.name), named.span.start, named.span.end), ("tokenize", MS, 9 * MS - 1_000));
    // Without it nothing tells what the thread waited for.
    let mut silent = Builder::new();
    silent.launch("a", (0, 10), (20, 100)).launch("b", (9 * MS, 9 * MS + 10), (9 * MS + 20, 9 * MS + 50));
    let path = whole(&silent.build());
    assert!(tiles(&path) && path.time(Kind::Host) == 0 && path.time(Kind::Unknown) > 8 * MS, "{path:?}");
}

#[test]
fn a_full_queue_chains_ops_in_stream_order() {
    let mut builder = Builder::new();
    builder.launch("a", (0, 2), (4, 20)).launch("b", (3, 5), (21, 40)).launch("c", (6, 8), (38, 60));
    let trace = builder.build();
    let expected = [
        (Kind::Call, 0, 2),
        (Kind::LaunchLatency, 2, 4),
        (Kind::Op, 4, 20),
        (Kind::QueueGap, 20, 21),
        (Kind::Op, 21, 38), // b and c overlap: c did not wait for the end of b
        (Kind::Op, 38, 60),
    ];
    assert_eq!(kinds(&only_path(&trace)), expected);
}

#[test]
fn a_waiting_call_leads_back_to_the_device() {
    let mut builder = Builder::new();
    builder.launch("a", (0, 2), (5, 50)).call("cudaStreamSynchronize", 3, 55, 90).launch("b", (60, 62), (64, 70));
    let trace = builder.build();
    let expected = [
        (Kind::Call, 0, 2),
        (Kind::LaunchLatency, 2, 5),
        (Kind::Op, 5, 50),
        (Kind::SyncReturn, 50, 55),
        (Kind::Host, 55, 60),
        (Kind::Call, 60, 62),
        (Kind::LaunchLatency, 62, 64),
        (Kind::Op, 64, 70),
    ];
    assert_eq!(kinds(&only_path(&trace)), expected);
}

#[test]
fn a_copy_that_ends_inside_its_call_has_blocked_the_host() {
    let mut builder = Builder::new();
    builder.launch("a", (0, 2), (5, 50));
    builder.call("cudaMemcpyAsync", 3, 60, 77).copy([2, 2, 0], 64, 51, 53, 77).launch("b", (61, 63), (65, 66));
    let trace = builder.build();
    let path = only_path(&trace);
    assert_eq!(path.time(Kind::Op), 45 + 2 + 1);
    assert_eq!(path.time(Kind::SyncReturn), 7);
    assert!(tiles(&path));
}

#[test]
fn a_graph_replay_chains_its_kernels() {
    let mut builder = Builder::new();
    builder.call("cudaGraphLaunch", 0, 10, 5);
    builder.op(OpKind::Kernel, "a", 7, 12, 20, 5).op(OpKind::Kernel, "b", 7, 21, 30, 5);
    builder.op(OpKind::Kernel, "branch", 8, 21, 40, 5).op(OpKind::Kernel, "join", 7, 41, 50, 5);
    let path = only_path(&builder.build());
    let expected = [
        (Kind::Call, 0, 10),
        (Kind::LaunchLatency, 10, 12),
        (Kind::Op, 12, 20),
        (Kind::QueueGap, 20, 21),
        (Kind::Op, 21, 40),
        (Kind::QueueGap, 40, 41),
        (Kind::Op, 41, 50),
    ];
    assert_eq!(kinds(&path), expected);
}

#[test]
fn what_cannot_be_told_is_unknown() {
    let mut builder = Builder::new();
    builder.kernel("a", 0, 10, 0).kernel("b", 15, 20, 0);
    let expected = [(Kind::Op, 0, 10), (Kind::Unknown, 10, 15), (Kind::Op, 15, 20)];
    assert_eq!(kinds(&only_path(&builder.build())), expected);
}

#[test]
fn a_cpu_engine_is_its_ops_and_phases() {
    let mut builder = Builder::new();
    builder.trace.devices[0].is_cpu = true;
    builder.range(RangeSource::PushPop, "schedule", 0, 10).range(RangeSource::PushPop, "forward", 12, 50);
    builder.op(OpKind::CpuOp, "gemm", 0, 14, 40, 0).op(OpKind::CpuOp, "softmax", 0, 40, 48, 0);
    let path = only_path(&builder.build());
    let expected = [
        (Kind::Host, 0, 10),
        (Kind::Unknown, 10, 12),
        (Kind::Host, 12, 14),
        (Kind::Op, 14, 40),
        (Kind::Op, 40, 48),
        (Kind::Host, 48, 50),
    ];
    assert_eq!(kinds(&path), expected);
}

#[test]
fn an_empty_trace_has_no_path() {
    assert!(report(&context(&Trace::default())).not_applicable.is_some());
}

fn random_trace() -> impl Strategy<Value = Trace> {
    let names =
        ["cudaLaunchKernel", "cudaStreamSynchronize", "cudaMemcpyAsync", "cudaGraphLaunch", "cudaStreamWaitEvent"];
    let call = (0usize..names.len(), 0i64..300, 0i64..40, 0u32..2, 0i64..12);
    let op = (0i64..300, 0i64..40, 0u32..3, 0i64..12, any::<bool>());
    let range = (0i64..300, 0i64..80, 0u32..2);
    let lists =
        (prop::collection::vec(call, 0..20), prop::collection::vec(op, 1..25), prop::collection::vec(range, 0..12));
    lists.prop_map(move |(calls, ops, ranges)| {
        let mut builder = Builder::new();
        builder.trace.threads.push(Thread { process: 0, tid: 2, ..Thread::default() });
        for (name, start, length, thread, correlation) in calls {
            builder.call(names[name], start, start + length, correlation);
            *builder.trace.calls.thread.last_mut().unwrap() = thread;
        }
        for (start, length, stream, correlation, copy) in ops {
            let kind = if copy { OpKind::Memcpy } else { OpKind::Kernel };
            builder.op(kind, "op", stream, start, start + length, correlation);
        }
        for (start, length, thread) in ranges {
            builder.range(RangeSource::StartEnd, "range", start, start + length);
            *builder.trace.ranges.thread.last_mut().unwrap() = thread;
        }
        builder.build()
    })
}

proptest! {
    #[test]
    fn segments_tile_the_span_of_any_trace(trace in random_trace()) {
        let context = context(&trace);
        let found = paths(&context);
        for path in &found {
            prop_assert!(tiles(path), "{path:?}");
            let sum: i64 = Kind::ALL.iter().map(|&kind| path.time(kind)).sum();
            prop_assert_eq!(sum, path.span.length());
        }
        prop_assert_eq!(found.is_empty(), trace.ops.is_empty());
    }
}

#[test]
fn segments_tile_the_span_of_every_real_trace() {
    let Some(data) = real_data() else { return };
    for file in all_traces(&data) {
        let trace = read(std::slice::from_ref(&file));
        let context = context(&trace);
        let whole = process_paths(&context);
        for path in paths(&context).iter().chain(&whole) {
            assert!(tiles(path), "{}", file.display());
        }
        let gpu_ops = !trace.ops.is_empty();
        assert_eq!(report(&context).not_applicable.is_none(), gpu_ops, "{}", file.display());
        if std::env::var_os("STROBE_TEST_PRINT").is_some() {
            println!("{}: {} ops, {} iterations", file.display(), trace.ops.len(), context.iterations.list.len());
            for path in &whole {
                let parts = Kind::ALL.map(|kind| format!("{kind} {:.3}", path.time(kind) as f64 * 1e-6));
                println!("    {:.3} ms: {}", path.span.length() as f64 * 1e-6, parts.join(", "));
            }
        }
    }
}
