//! Traces made by hand, and the real ones where they are at hand.
#![allow(dead_code)] // every test file uses its own part of this

use std::path::{Path, PathBuf};

use strobe_analyze::{Context, Options};
use strobe_trace::{
    CallKind, CallRow, Device, OpDetail, OpKind, OpRow, Process, RangeRow, RangeSource, StrId, Thread, Trace,
};

/// A trace of one process with one GPU and one thread, to which events are added.
pub(crate) struct Builder {
    pub trace: Trace,
}

impl Builder {
    pub(crate) fn new() -> Self {
        let mut trace = Trace::default();
        trace.processes.push(Process { pid: 1, ..Process::default() });
        trace.threads.push(Thread { process: 0, tid: 1, ..Thread::default() });
        trace.devices.push(Device { name: "NVIDIA H200".to_owned(), ..Device::default() });
        Self { trace }
    }

    pub(crate) fn name(&mut self, text: &str) -> StrId {
        self.trace.strings.intern(text)
    }

    pub(crate) fn call(&mut self, name: &str, start: i64, end: i64, correlation: i64) -> &mut Self {
        let name = self.name(name);
        self.trace.calls.push(CallRow { start, end, name, thread: 0, correlation, kind: CallKind::Gpu, result: 0 });
        self
    }

    pub(crate) fn kernel(&mut self, name: &str, start: i64, end: i64, correlation: i64) -> &mut Self {
        self.op(OpKind::Kernel, name, 7, start, end, correlation)
    }

    pub(crate) fn op(
        &mut self,
        kind: OpKind,
        name: &str,
        stream: u32,
        start: i64,
        end: i64,
        correlation: i64,
    ) -> &mut Self {
        let name = self.name(name);
        self.trace.ops.push(OpRow { stream, context: 1, correlation, ..OpRow::new(kind, name, start, end) });
        self
    }

    /// A copy between kinds of memory, given by CUPTI's numbers.
    pub(crate) fn copy(&mut self, kinds: [u8; 3], bytes: u64, start: i64, end: i64, correlation: i64) -> &mut Self {
        let [copy_kind, src_kind, dst_kind] = kinds;
        let (src_device, dst_device) = (None, None);
        let detail = OpDetail::Memcpy { copy_kind, src_kind, dst_kind, src_device, dst_device, cause: 0 };
        self.trace.details.push(detail);
        self.op(OpKind::Memcpy, "[CUDA memcpy]", 7, start, end, correlation);
        let last = self.trace.ops.len() - 1;
        self.trace.ops.detail[last] = self.trace.details.len() as u32 - 1;
        self.trace.ops.bytes[last] = bytes;
        self
    }

    pub(crate) fn range(&mut self, source: RangeSource, name: &str, start: i64, end: i64) -> &mut Self {
        self.operator(source, name, start, end, "", "")
    }

    /// A range with the dimensions and types of its inputs as JSON text.
    pub(crate) fn operator(
        &mut self,
        source: RangeSource,
        name: &str,
        start: i64,
        end: i64,
        dims: &str,
        types: &str,
    ) -> &mut Self {
        let name = self.name(name);
        let mut text = |text: &str| if text.is_empty() { StrId::NONE } else { self.trace.strings.intern(text) };
        let (dims, types) = (text(dims), text(types));
        self.trace.ranges.push(RangeRow { source, dims, types, ..RangeRow::new(name, 0, start, end) });
        self
    }

    /// A kernel and the call that launches it.
    pub(crate) fn launch(&mut self, name: &str, call: (i64, i64), kernel: (i64, i64)) -> &mut Self {
        let correlation = 1 + self.trace.calls.len() as i64;
        self.call("cudaLaunchKernel", call.0, call.1, correlation).kernel(name, kernel.0, kernel.1, correlation)
    }

    pub(crate) fn build(&mut self) -> Trace {
        self.trace.finish();
        self.trace.clone()
    }
}

/// A trace with its categories and iterations.
pub(crate) fn context(trace: &Trace) -> Context<'_> {
    Context::new(trace, &Options::default())
}

/// The folder of real traces; says so when it is not given.
pub(crate) fn real_data() -> Option<PathBuf> {
    let folder = std::env::var_os("STROBE_TEST_DATA").map(|data| Path::new(&data).join("traces"));
    if folder.is_none() {
        println!("skipped: STROBE_TEST_DATA is not set");
    }
    folder
}

/// Reads real traces as one run.
pub(crate) fn read(paths: &[PathBuf]) -> Trace {
    strobe_trace::import::read_files(paths, &mut |_| {}).unwrap_or_else(|error| panic!("{paths:?}: {error}"))
}

/// Every trace in the folder of real data.
pub(crate) fn all_traces(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.to_string_lossy();
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".sqlite") || name.ends_with(".json.gz") {
                found.push(path);
            }
        }
    }
    found.sort();
    assert!(!found.is_empty());
    found
}
