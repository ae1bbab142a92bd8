//! Synthetic GPU traces, random ones too, and the way to the real files.
#![allow(dead_code)] // Every test file uses its own part.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use strobe_trace::{CallKind, CallRow, Device, OpKind, OpRow, Process, RangeRow, Thread, Trace};

/// A trace of one process, one thread and one device, to be filled.
pub(crate) fn empty() -> Trace {
    Trace {
        threads: vec![Thread::default()],
        processes: vec![Process::default()],
        devices: vec![Device::default()],
        ..Trace::default()
    }
}

/// Adds an op and returns its index.
pub(crate) fn op(trace: &mut Trace, name: &str, span: (i64, i64), correlation: i64) -> usize {
    let kind = match name {
        "memcpy" => OpKind::Memcpy,
        "memset" => OpKind::Memset,
        "[CUDA graph]" => OpKind::Graph,
        _ => OpKind::Kernel,
    };
    let name = trace.strings.intern(name);
    trace.ops.push(OpRow { stream: 7, correlation, ..OpRow::new(kind, name, span.0, span.1) });
    trace.ops.len() - 1
}

/// Adds a call.
pub(crate) fn call(trace: &mut Trace, name: &str, span: (i64, i64), correlation: i64) {
    let name = trace.strings.intern(name);
    let (start, end) = span;
    trace.calls.push(CallRow { start, end, name, thread: 0, correlation, kind: CallKind::Gpu, result: 0 });
}

/// Adds a range.
pub(crate) fn range(trace: &mut Trace, name: &str, span: (i64, i64)) {
    let name = trace.strings.intern(name);
    trace.ranges.push(RangeRow::new(name, 0, span.0, span.1));
}

/// A random trace: ops of several classes on two devices, some without launch, calls of several kinds, iterations.
pub(crate) fn random_trace() -> impl Strategy<Value = Trace> {
    let ops = prop::collection::vec((0i64..2000, 0i64..60, 0usize..5, 0u32..2, 0i64..40), 0..60);
    let calls = prop::collection::vec((0i64..2000, 0i64..50, 0usize..3), 0..40);
    let ranges = prop::collection::vec((0i64..2000, 1i64..500), 0..6);
    (ops, calls, ranges).prop_map(|(ops, calls, ranges)| {
        let mut trace = empty();
        trace.devices.push(Device { ordinal: 1, ..Device::default() });
        for (start, length, name, device, correlation) in ops {
            let name = ["nvjet_a", "ncclDevKernel_AllReduce", "memcpy", "flash_fwd_kernel", "[CUDA graph]"][name];
            let index = op(&mut trace, name, (start, start + length), correlation);
            trace.ops.device[index] = device;
        }
        for (correlation, (start, length, name)) in calls.into_iter().enumerate() {
            let name = ["cudaLaunchKernel", "cudaStreamSynchronize", "cudaMemcpyAsync"][name];
            call(&mut trace, name, (start, start + length), correlation as i64);
        }
        for (number, (start, length)) in ranges.into_iter().enumerate() {
            range(&mut trace, &format!("iteration {number}"), (start, start + length));
        }
        trace.finish();
        trace
    })
}

/// The folder with real traces, if there is one.
pub(crate) fn traces() -> Option<PathBuf> {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        println!("skipped: STROBE_TEST_DATA is not set");
        return None;
    };
    Some(PathBuf::from(data).join("traces"))
}

/// Reads one real trace.
pub(crate) fn read(path: &Path) -> Trace {
    strobe_trace::import::read_files(&[path.to_owned()], &mut |_| ()).unwrap()
}

/// The rows of a CSV file without quotes inside fields, as maps from column to text.
pub(crate) fn csv(path: &Path) -> Vec<std::collections::HashMap<String, String>> {
    let text = std::fs::read_to_string(path).unwrap();
    let fields = |line: &str| -> Vec<String> {
        let mut fields = vec![String::new()];
        let mut quoted = false;
        for c in line.chars() {
            match c {
                '"' => quoted = !quoted,
                ',' if !quoted => fields.push(String::new()),
                _ => fields.last_mut().unwrap().push(c),
            }
        }
        fields
    };
    let mut lines = text.lines();
    let header = fields(lines.next().unwrap());
    lines.map(|line| header.iter().cloned().zip(fields(line)).collect()).collect()
}
