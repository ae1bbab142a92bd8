//! Traces for tests: one written by hand, and generated ones.

use std::path::PathBuf;

use proptest::prelude::*;
use strobe_trace::recorded::{Meta, Op, Process, Range, Thread, Trace};
use strobe_trace::{Interner, Iteration, Peaks, RangeKind, StrId, Window};

/// A path of its own in the build's scratch directory.
pub fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// One decode step with a forward range, two ops inside it and a host range before it.
#[allow(dead_code)] // not every test binary needs it
pub fn small() -> Trace {
    let mut trace = Trace::default();
    let mut id = |text: &str| trace.strings.intern(text);
    let (qkv, gemm, kernel) = (id("qkv_proj"), id("gemm"), id("gemm_packed_f32_avx512"));
    let (norm, norm_kernel) = (id("norm"), id("rms_norm_f32"));
    let forward = id("[Executor] _forward_step 7: 0 ctx reqs, 3 gen reqs");
    let schedule = id("_schedule");
    let op = |name, category, kernel, start, end, flops| Op {
        name,
        category,
        kernel,
        layer: Some(2),
        iteration: 7,
        thread: 11,
        start,
        end,
        shape: [3, 96, 0],
        bytes: 4000,
        flops,
    };
    trace.ops = vec![op(qkv, gemm, kernel, 2_000, 4_000, 60_000), op(norm, norm, norm_kernel, 1_500, 2_000, 0)];
    let range = |name, kind, start, end| Range { name, thread: 11, start, end, kind, iteration: Some(7) };
    trace.ranges =
        vec![range(schedule, RangeKind::Schedule, -500, 900), range(forward, RangeKind::ForwardStep, 1_000, 5_001)];
    trace.iterations = vec![Iteration {
        iter: 7,
        start: -500,
        end: 5_500,
        context_requests: 0,
        generation_requests: 3,
        context_tokens: 0,
        generation_tokens: 3,
        window: 0,
    }];
    trace.threads = vec![Thread { tid: 11, name: "engine \"loop\"".to_owned() }];
    trace.process = Process { pid: 10, name: "strobe".to_owned() };
    trace.meta = Meta {
        session_start_utc_ns: 1_794_711_319_973_357_605,
        producer: "strobe 0.1.0".to_owned(),
        partial: true,
        windows: vec![Window { index: 0, first: 7, last: 9, complete: false }],
        peaks: Some(Peaks { flops_per_s: 1.5e11, bytes_per_s: 2e10 / 3.0, note: "measured".to_owned() }),
        extra: [("model".to_owned(), "micro".to_owned())].into(),
    };
    trace
}

const COUNT: std::ops::Range<u64> = 0..1 << 62;

fn span() -> impl Strategy<Value = (i64, i64)> {
    (-1_000_000_000_000i64..1_000_000_000_000, 0i64..1_000_000).prop_map(|(s, d)| (s, s + d))
}

fn op(strings: u32) -> impl Strategy<Value = Op> {
    let names = (0..strings, 0..strings, 0..strings);
    let sizes = (COUNT, COUNT, COUNT, COUNT, COUNT);
    let place = (any::<Option<u32>>(), COUNT, 0u32..0x100_0000);
    (names, sizes, place, span()).prop_map(
        |((name, category, kernel), (m, n, k, bytes, flops), place, (start, end))| Op {
            name: StrId(name),
            category: StrId(category),
            kernel: StrId(kernel),
            layer: place.0,
            iteration: place.1,
            thread: place.2,
            start,
            end,
            shape: [m, n, k],
            bytes,
            flops,
        },
    )
}

fn range(strings: u32) -> impl Strategy<Value = Range> {
    let kind = prop::sample::select(RangeKind::ALL.to_vec());
    let iteration = prop::option::of(COUNT);
    (0..strings, 0u32..40, span(), kind, iteration).prop_map(|(name, thread, (start, end), kind, iteration)| Range {
        name: StrId(name),
        thread,
        start,
        end,
        kind,
        iteration,
    })
}

fn iteration() -> impl Strategy<Value = Iteration> {
    (COUNT, span(), any::<[u32; 5]>()).prop_map(|(iter, (start, end), n)| Iteration {
        iter,
        start,
        end,
        context_requests: n[0],
        generation_requests: n[1],
        context_tokens: n[2],
        generation_tokens: n[3],
        window: n[4],
    })
}

fn meta() -> impl Strategy<Value = Meta> {
    let window = (any::<u32>(), COUNT, COUNT, any::<bool>()).prop_map(|(index, first, last, complete)| Window {
        index,
        first,
        last,
        complete,
    });
    let peaks = (1e-3f64..1e18, 1e-3f64..1e18, ".*").prop_map(|(flops_per_s, bytes_per_s, note)| Peaks {
        flops_per_s,
        bytes_per_s,
        note,
    });
    (
        any::<i64>(),
        ".*",
        any::<bool>(),
        prop::collection::vec(window, 0..4),
        prop::option::of(peaks),
        prop::collection::btree_map(".*", ".*", 0..4),
    )
        .prop_map(|(session_start_utc_ns, producer, partial, windows, peaks, extra)| Meta {
            session_start_utc_ns,
            producer,
            partial,
            windows,
            peaks,
            extra,
        })
}

/// Any trace that may be written, overlapping and unsorted events included.
pub fn any_trace() -> impl Strategy<Value = Trace> {
    prop::collection::btree_set(".*", 1..12).prop_flat_map(|texts| {
        let count = texts.len() as u32;
        let thread = (0u32..0x100_0000, ".*").prop_map(|(tid, name)| Thread { tid, name });
        let process = (0u32..0x100_0000, ".*").prop_map(|(pid, name)| Process { pid, name });
        let mut strings = Interner::new();
        for text in &texts {
            strings.intern(text);
        }
        (
            Just(strings),
            prop::collection::vec(op(count), 0..30),
            prop::collection::vec(range(count), 0..20),
            prop::collection::vec(iteration(), 0..6),
            prop::collection::vec(thread, 0..4),
            process,
            meta(),
        )
            .prop_map(|(strings, ops, ranges, iterations, threads, process, meta)| Trace {
                strings,
                ops,
                ranges,
                iterations,
                threads,
                process,
                meta,
            })
    })
}
