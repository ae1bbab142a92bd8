//! Small traces for tests, built by names.

use proptest::prelude::*;
use strobe_trace::recorded::{Op, Range, Trace};
use strobe_trace::{Iteration, RangeKind};

/// Adds an op named and implemented like its category.
#[allow(dead_code)] // not every test binary needs it
pub fn op(trace: &mut Trace, category: &str, iteration: u64, start: i64, end: i64) {
    named_op(trace, category, category, iteration, start, end);
}

/// Adds an op.
pub fn named_op(trace: &mut Trace, name: &str, category: &str, iteration: u64, start: i64, end: i64) {
    let op = Op {
        name: trace.strings.intern(name),
        category: trace.strings.intern(category),
        kernel: trace.strings.intern("scalar"),
        layer: None,
        iteration,
        thread: 1,
        start,
        end,
        shape: [0; 3],
        bytes: 0,
        flops: 0,
    };
    trace.ops.push(op);
}

/// Adds a range.
pub fn range(trace: &mut Trace, kind: RangeKind, iteration: Option<u64>, start: i64, end: i64) {
    let range = Range { name: trace.strings.intern(kind.as_str()), thread: 1, start, end, kind, iteration };
    trace.ranges.push(range);
}

/// Adds an iteration with these numbers of context and generation requests.
pub fn iteration(trace: &mut Trace, iter: u64, requests: (u32, u32), start: i64, end: i64) {
    trace.iterations.push(Iteration {
        iter,
        start,
        end,
        context_requests: requests.0,
        generation_requests: requests.1,
        context_tokens: requests.0 * 8,
        generation_tokens: requests.1,
        window: 0,
    });
}

/// Any trace within 120 ns: events overlap, leave the iterations, belong to none, end before they start.
#[allow(dead_code)]
pub fn any_trace() -> impl Strategy<Value = Trace> {
    let moment = || -10i64..110;
    let ops = prop::collection::vec((0usize..4, 0u64..5, moment(), moment()), 0..25);
    let kind = prop::sample::select(RangeKind::ALL.to_vec());
    let ranges = prop::collection::vec((kind, prop::option::of(0u64..5), moment(), moment()), 0..15);
    let iterations = prop::collection::vec((0u64..5, (0u32..2, 0u32..3), moment(), 0i64..60), 0..6);
    (ops, ranges, iterations).prop_map(|(ops, ranges, iterations)| {
        let mut trace = Trace::default();
        for (category, number, start, end) in ops {
            let category = ["gemm", "attention", "norm", "rope"][category];
            op(&mut trace, category, number, start, end);
        }
        for (kind, number, start, end) in ranges {
            range(&mut trace, kind, number, start, end);
        }
        for (number, requests, start, length) in iterations {
            iteration(&mut trace, number, requests, start, start + length);
        }
        trace
    })
}
