//! The one event model: what a trace holds, whoever recorded it.
//!
//! Events stand in tables by column ([`Ops`], [`Calls`], [`Ranges`]); what repeats (names, launch shapes, what an op
//! means in the model) is stored once and named by a small number. An importer pushes rows in any order and calls
//! [`Trace::finish`], which sorts and links; analyses rely on the order it makes.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use serde::Serialize;

use crate::columns::{columns, order_by};
use crate::{CpuSample, ExpertLoad, Flow, Interner, Iteration, OnCpu, PageFault, Peaks, RangeKind, StrId, Window};

/// The value of an index column where there is nothing to point to.
pub const NONE: u32 = u32::MAX;

/// One trace, or several of one run put together. All times are nanoseconds on one clock, relative to
/// [`Meta::session_start_utc_ns`]; they may be negative.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Every string that events refer to.
    pub strings: Interner,
    /// What ran on a device: kernels, copies, graphs; ops of a CPU engine too. By start after [`Trace::finish`].
    pub ops: Ops,
    /// Calls of the host: CUDA/HIP runtime and driver, operating system. By start after [`Trace::finish`].
    pub calls: Calls,
    /// Named spans of host time: NVTX, annotations, operators. By start, outer before inner, after [`Trace::finish`].
    pub ranges: Ranges,
    /// Distinct launch shapes and the like, see [`OpRow::detail`].
    pub details: Vec<OpDetail>,
    /// Distinct meanings of ops, see [`OpRow::work`].
    pub works: Vec<Work>,
    /// Series of measured values: GPU metrics, memory in use.
    pub counters: Vec<Counter>,
    /// Device memory taken and given back, in order of time.
    pub allocations: Vec<Allocation>,
    /// Nodes of CUDA graphs, as they were made.
    pub graph_nodes: Vec<GraphNode>,
    /// When threads had a CPU, where context switches were recorded: by thread, then by time; those of one are disjoint.
    pub on_cpu: Vec<OnCpu>,
    /// Samples of threads that had a CPU, in order of time.
    pub cpu_samples: Vec<CpuSample>,
    /// Faults on pages of unified memory, in order of time.
    pub page_faults: Vec<PageFault>,
    /// Work that one thread does for another, in order of time.
    pub flows: Vec<Flow>,
    /// The forward steps that the engine itself recorded. Empty for other tools' traces: there they are detected.
    pub iterations: Vec<Iteration>,
    /// Where tokens went in the layers that have experts, by iteration, layer and expert.
    pub expert_loads: Vec<ExpertLoad>,
    /// The devices that ops refer to.
    pub devices: Vec<Device>,
    /// The processes that events refer to.
    pub processes: Vec<Process>,
    /// The threads that calls and ranges refer to.
    pub threads: Vec<Thread>,
    /// What is known about the trace as a whole.
    pub meta: Meta,
}

columns! {
    /// What ran on devices.
    table Ops;
    /// One thing that ran on a device.
    row OpRow {
        /// When it began.
        start: i64,
        /// When it ended; not before `start` after [`Trace::finish`].
        end: i64,
        /// The kernel's full (demangled) name, e.g. `void foo<float>(float*)`; for copies e.g. `[CUDA memcpy Host-to-Device]`
        /// as `nsys stats` labels them; for a graph launch `[CUDA graph]`; for an op of a CPU engine its implementation.
        name: StrId,
        /// What it is.
        kind: OpKind,
        /// Index into [`Trace::devices`].
        device: u32,
        /// The stream (queue) it ran on, as the file numbers it; for a CPU engine the index of the thread.
        stream: u32,
        /// The context it ran in, as the file numbers it; 0 where the file does not say.
        context: u32,
        /// Index into [`Trace::processes`].
        process: u32,
        /// What joins it to the call that launched it, within its process; 0 = none.
        correlation: i64,
        /// Index into [`Trace::calls`] of the call that launched it, or [`NONE`]. Set by [`Trace::finish`].
        launch: u32,
        /// The node of a CUDA graph that it executed; 0 = none.
        graph_node: u64,
        /// Bytes copied or set; 0 for kernels.
        bytes: u64,
        /// Index into [`Trace::details`], or [`NONE`].
        detail: u32,
        /// Index into [`Trace::works`], or [`NONE`].
        work: u32,
        /// The number of the iteration it ran for where the recorder knew it, or [`NONE`].
        iteration: u32,
    }
}

columns! {
    /// Calls of the host.
    table Calls;
    /// One call of the host into CUDA, HIP or the operating system.
    row CallRow {
        /// When it began.
        start: i64,
        /// When it returned.
        end: i64,
        /// The function as the file writes it, e.g. `cudaLaunchKernel_v7000` or `cudaLaunchKernel`.
        name: StrId,
        /// Index into [`Trace::threads`].
        thread: u32,
        /// What joins it to the ops it launched, within its process; 0 = none.
        correlation: i64,
        /// Which interface.
        kind: CallKind,
        /// What it returned; 0 = success or not known.
        result: i32,
    }
}

columns! {
    /// Named spans of host time.
    table Ranges;
    /// A named span of time on one thread.
    row RangeRow {
        /// When it began.
        start: i64,
        /// When it ended. A range that was never closed ends where its importer says and is marked in `flags`.
        end: i64,
        /// What it is called, without the domain.
        name: StrId,
        /// Index into [`Trace::threads`] of the thread that opened it.
        thread: u32,
        /// The NVTX domain; `StrId::NONE` = the default one.
        domain: StrId,
        /// Who wrote it.
        source: RangeSource,
        /// What it stands for in the engine's loop, where known.
        kind: RangeKind,
        /// See [`range_flags`].
        flags: u8,
        /// The number of the iteration it belongs to where the recorder knew it, or [`NONE`].
        iteration: u32,
        /// For an operator: the dimensions of its inputs as JSON text, e.g. `[[8, 2048], [2048, 2048]]`, or `StrId::NONE`.
        dims: StrId,
        /// For an operator: the types of its inputs as JSON text, or `StrId::NONE`.
        types: StrId,
        /// For an operator: the values of inputs that are no tensors, as JSON text (PyTorch's `Concrete Inputs`), or
        /// `StrId::NONE`, also where no input has one.
        values: StrId,
        /// For an operator: the strides of its inputs as JSON text, or `StrId::NONE`, also where no stride is 0: then every
        /// element has a place of its own.
        strides: StrId,
    }
}

impl OpRow {
    /// An op of which nothing else is known, on the first device and stream of the first process.
    pub fn new(kind: OpKind, name: StrId, start: i64, end: i64) -> Self {
        Self {
            start,
            end,
            name,
            kind,
            device: 0,
            stream: 0,
            context: 0,
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
}

impl RangeRow {
    /// A range that nests on its thread, in the default domain.
    pub fn new(name: StrId, thread: u32, start: i64, end: i64) -> Self {
        Self {
            start,
            end,
            name,
            thread,
            domain: StrId::NONE,
            source: RangeSource::PushPop,
            kind: RangeKind::Other,
            flags: 0,
            iteration: NONE,
            dims: StrId::NONE,
            types: StrId::NONE,
            values: StrId::NONE,
            strides: StrId::NONE,
        }
    }
}

/// Bits of [`RangeRow::flags`].
pub mod range_flags {
    /// The file has no end for it.
    pub const UNCLOSED: u8 = 1;
    /// It was closed by another thread.
    pub const CROSS_THREAD: u8 = 2;
    /// An instant, not a span.
    pub const MARK: u8 = 4;
}

/// What an op is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OpKind {
    /// A GPU kernel.
    #[default]
    Kernel,
    /// A copy.
    Memcpy,
    /// Filling of memory.
    Memset,
    /// A whole CUDA graph of which the single kernels were not recorded.
    Graph,
    /// An op of an engine that computes on the CPU.
    CpuOp,
}

impl OpKind {
    /// Copies and fills.
    pub fn is_memory(self) -> bool {
        matches!(self, OpKind::Memcpy | OpKind::Memset)
    }
}

/// Which interface a call belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CallKind {
    /// CUDA or HIP, runtime or driver.
    #[default]
    Gpu,
    /// The operating system's (nsys' OS runtime).
    OsRuntime,
    /// What the profiler itself took.
    Profiler,
}

/// Who wrote a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RangeSource {
    /// NVTX push and pop: nests on its thread.
    #[default]
    PushPop,
    /// NVTX start and end: may overlap others of its thread.
    StartEnd,
    /// A user annotation of the PyTorch profiler, e.g. `ProfilerStep#3`.
    Annotation,
    /// The same projected onto the device by the profiler: its thread is the stream, its times are device times.
    GpuAnnotation,
    /// A PyTorch operator.
    CpuOp,
    /// A Python function.
    Python,
    /// Anything else of a Chrome trace that has a duration.
    Other,
}

/// What else is known of an op, shared by all that have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpDetail {
    /// How a kernel was launched.
    Kernel(KernelDetail),
    /// What a copy copied. Kinds are CUPTI's numbers.
    Memcpy {
        /// 1 host to device, 2 device to host, 8 device to device, 10 peer to peer, ...
        copy_kind: u8,
        /// Kind of the source memory: 0 pageable, 1 pinned, 2 device, 4 managed, 7 unknown, 255 not recorded.
        src_kind: u8,
        /// Kind of the destination memory.
        dst_kind: u8,
        /// The devices by the file's numbers, where recorded.
        src_device: Option<u32>,
        /// See `src_device`.
        dst_device: Option<u32>,
        /// Of a migration of unified memory CUPTI's cause: 1 asked for, 2 page fault, 3 speculation, 4 eviction, 5 access
        /// counters; 0 for any other copy and where it was not recorded.
        cause: u8,
    },
    /// What a fill set.
    Memset {
        /// The value.
        value: u32,
        /// Kind of the memory.
        mem_kind: u8,
    },
    /// Which graph was launched.
    Graph {
        /// The graph.
        graph: u32,
        /// Its executable form.
        exec: u32,
    },
}

/// How a kernel was launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct KernelDetail {
    /// Short name (without template arguments and parameters), or `StrId::NONE`.
    pub short_name: StrId,
    /// Blocks in x, y, z; 0 = not recorded.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z; 0 = not recorded.
    pub block: [u32; 3],
    /// Registers of a thread; 0 = not recorded.
    pub registers: u32,
    /// Bytes of static shared memory of a block.
    pub static_shared: u32,
    /// Bytes of dynamic shared memory of a block.
    pub dynamic_shared: u32,
}

/// What an op means in the model, as strobe's engine records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Work {
    /// What it does in the model, e.g. `qkv_proj`.
    pub op: StrId,
    /// The family it is summed under: gemm, attention, norm, rope, activation, sampling, embedding, ...
    pub category: StrId,
    /// The transformer layer it belongs to, if it belongs to one.
    pub layer: Option<u32>,
    /// m, n, k; 0 where it does not apply.
    pub shape: [u64; 3],
    /// Bytes it has to move at least; 0 = not known.
    pub bytes: u64,
    /// Floating-point operations; 0 = none or not known.
    pub flops: u64,
}

/// A series of measured values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counter {
    /// What was measured, e.g. `SM Active [Throughput %]`.
    pub name: String,
    /// Index into [`Trace::devices`], if it belongs to one.
    pub device: Option<u32>,
    /// When, in order.
    pub times: Vec<i64>,
    /// What was read, as the file holds it.
    pub values: Vec<f64>,
}

/// Memory taken or given back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allocation {
    /// When.
    pub time: i64,
    /// Index into [`Trace::devices`], or `None` for host memory.
    pub device: Option<u32>,
    /// Index into [`Trace::processes`].
    pub process: u32,
    /// Where.
    pub address: u64,
    /// How much: positive when taken, negative when given back.
    pub bytes: i64,
    /// CUPTI's kind of memory: 1 pinned, 2 device, 4 managed, 5 device static, ...; 255 not recorded.
    pub mem_kind: u8,
    /// Whose it is, e.g. the symbol of a static variable, or `StrId::NONE`.
    pub name: StrId,
    /// Bytes that the framework's allocator had handed out after this, where recorded.
    pub total_allocated: Option<u64>,
    /// Bytes that the framework's allocator held after this, where recorded.
    pub total_reserved: Option<u64>,
}

/// A node of a CUDA graph when it was made (captured or cloned).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphNode {
    /// Its id; the upper 32 bits are the graph's.
    pub node: u64,
    /// The node it is a clone of; 0 = none.
    pub original: u64,
    /// When it was made.
    pub start: i64,
    /// When making it ended.
    pub end: i64,
    /// Index into [`Trace::threads`].
    pub thread: u32,
}

/// What ops run on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Device {
    /// Its number in its file.
    pub ordinal: u32,
    /// Index into [`Meta::sources`].
    pub source: u16,
    /// What it is called, e.g. `NVIDIA H200`; empty when not recorded.
    pub name: String,
    /// Whether it is the host's CPU.
    pub is_cpu: bool,
    /// Bytes of memory, where recorded.
    pub memory_bytes: Option<u64>,
    /// Memory bandwidth in bytes per second, where recorded.
    pub bytes_per_s: Option<f64>,
    /// Multiprocessors, where recorded.
    pub multiprocessors: Option<u32>,
    /// Clock in Hz, where recorded.
    pub clock_hz: Option<f64>,
    /// Compute capability, where recorded.
    pub compute_capability: Option<(u32, u32)>,
}

/// A process that was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Its process id, as the file writes it.
    pub pid: i64,
    /// Its name, e.g. `python3`. Never a command line: those hold secrets.
    pub name: String,
    /// Its rank in a distributed run, where recorded.
    pub rank: Option<u32>,
    /// Index into [`Meta::sources`].
    pub source: u16,
}

/// A thread that was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thread {
    /// Index into [`Trace::processes`].
    pub process: u32,
    /// Its thread id, as the file writes it.
    pub tid: i64,
    /// What it is called; empty when not recorded.
    pub name: String,
}

/// What is known about a trace as a whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Meta {
    /// Time 0 of the trace, in nanoseconds since 1970-01-01 UTC; `None` when the file does not say.
    pub session_start_utc_ns: Option<i64>,
    /// Who recorded it, e.g. `strobe 0.1.0`, `Nsight Systems 2025.3.2`, `PyTorch profiler`.
    pub producer: String,
    /// The files it was read from, in order. Empty for a trace made in memory.
    pub sources: Vec<Source>,
    /// How CUDA graphs were recorded, where that can be told.
    pub graph_mode: Option<GraphMode>,
    /// Whether its end is missing: the run was interrupted (strobe's own traces), or the file is cut (others).
    pub partial: bool,
    /// The profile windows that were asked for.
    pub windows: Vec<Window>,
    /// What the hardware could do at most, where it was measured.
    pub peaks: Option<Peaks>,
    /// Things a reader of any report should know, e.g. `1,810 of 3,442 kernels have no launch row`.
    pub notices: Vec<String>,
    /// Anything else worth keeping, e.g. the model's name.
    pub extra: BTreeMap<String, String>,
}

impl Meta {
    /// Whether strobe recorded it, or a part of it.
    pub fn is_own(&self) -> bool {
        self.producer.split(", ").any(|producer| producer.starts_with("strobe"))
    }
}

/// A file that a trace was read from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Source {
    /// Where it is.
    pub path: PathBuf,
    /// Its format, e.g. `Nsight Systems SQLite, schema 3.20.3`.
    pub format: String,
    /// Bytes read, decompressed.
    pub bytes: u64,
    /// Events read.
    pub events: u64,
    /// Events that the file has but could not be read.
    pub lost: u64,
    /// Its rank in a distributed run, where recorded.
    pub rank: Option<u32>,
}

/// How CUDA graphs were recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GraphMode {
    /// One row per launched graph: its kernels are hidden.
    Graph,
    /// One row per node.
    Node,
}

impl Trace {
    /// The text of a string.
    pub fn text(&self, id: StrId) -> &str {
        self.strings.get(id)
    }

    /// The name of op `index`.
    pub fn op_name(&self, index: usize) -> &str {
        self.strings.get(self.ops.name[index])
    }

    /// The call that launched op `index`, if the trace has it.
    pub fn launch_of(&self, index: usize) -> Option<CallRow> {
        let call = self.ops.launch[index];
        (call != NONE).then(|| self.calls.get(call as usize))
    }

    /// What op `index` means in the model, if recorded.
    pub fn work_of(&self, index: usize) -> Option<&Work> {
        self.works.get(self.ops.work[index] as usize)
    }

    /// How op `index` was launched, if recorded.
    pub fn detail_of(&self, index: usize) -> Option<&OpDetail> {
        self.details.get(self.ops.detail[index] as usize)
    }

    /// First and last moment of ops, calls and ranges (marks and counters aside); `None` for an empty trace.
    pub fn extent(&self) -> Option<(i64, i64)> {
        let of = |starts: &[i64], ends: &[i64]| Some((*starts.iter().min()?, *ends.iter().max()?));
        let all = [
            of(&self.ops.start, &self.ops.end),
            of(&self.calls.start, &self.calls.end),
            of(&self.ranges.start, &self.ranges.end),
        ];
        all.into_iter().flatten().reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    }

    /// Ops that no call in the trace launched, though their kind is launched by calls.
    pub fn ops_without_launch(&self) -> usize {
        let launched = self.ops.kind.iter().zip(&self.ops.launch);
        launched.filter(|&(&kind, &launch)| kind != OpKind::CpuOp && launch == NONE).count()
    }

    /// Sorts every table by time and joins ops to the calls that launched them, by correlation within the process.
    /// Every importer ends with it; calling it again changes nothing.
    pub fn finish(&mut self) {
        self.finish_counting();
    }

    /// The same; gives the number of calls that have the correlation of an earlier one of their process.
    pub(crate) fn finish_counting(&mut self) -> usize {
        let ends = self.ops.end.iter_mut().zip(&self.ops.start);
        ends.for_each(|(end, &start)| *end = (*end).max(start));
        let ends = self.calls.end.iter_mut().zip(&self.calls.start);
        ends.for_each(|(end, &start)| *end = (*end).max(start));
        let ends = self.ranges.end.iter_mut().zip(&self.ranges.start);
        ends.for_each(|(end, &start)| *end = (*end).max(start));
        if let Some(order) = order_by(self.ops.len(), |i| self.ops.start[i]) {
            self.ops.reorder(&order);
        }
        if let Some(order) = order_by(self.calls.len(), |i| self.calls.start[i]) {
            self.calls.reorder(&order);
        }
        let outer_first = |i: usize| (self.ranges.start[i], std::cmp::Reverse(self.ranges.end[i]));
        if let Some(order) = order_by(self.ranges.len(), outer_first) {
            self.ranges.reorder(&order);
        }
        self.allocations.sort_by_key(|a| a.time);
        self.on_cpu.sort_by_key(|on| (on.thread, on.start));
        self.cpu_samples.sort_by_key(|sample| sample.time);
        self.page_faults.sort_by_key(|fault| fault.start);
        self.flows.sort_unstable();
        self.iterations.sort_by_key(|i| (i.start, i.iter));
        self.link_launches()
    }

    fn link_launches(&mut self) -> usize {
        type ByCorrelation<T> = HashMap<(u32, i64), T, crate::intern::FastHash>;
        let mut launches: ByCorrelation<u32> = HashMap::default();
        launches.reserve(self.calls.len());
        // Calls that have the correlation of one that had returned: an id was given twice.
        let mut repeated: ByCorrelation<Vec<u32>> = HashMap::default();
        let mut count = 0;
        let rows = self.calls.thread.iter().zip(&self.calls.correlation).zip(&self.calls.kind);
        for (index, ((&thread, &correlation), &kind)) in rows.enumerate() {
            let process = self.threads.get(thread as usize).map(|t| t.process);
            let Some(process) = process.filter(|_| correlation != 0 && kind == CallKind::Gpu) else { continue };
            // A runtime call may contain a driver call with the same correlation: the outer one, which starts first, counts.
            let first = *launches.entry((process, correlation)).or_insert(index as u32);
            if first != index as u32 {
                let others = repeated.get(&(process, correlation)).and_then(|others| others.last());
                let last = others.copied().unwrap_or(first) as usize;
                let inside =
                    self.calls.start[index] < self.calls.end[last] || self.calls.start[index] == self.calls.start[last];
                if !inside {
                    count += 1;
                    repeated.entry((process, correlation)).or_default().push(index as u32);
                }
            }
        }
        let starts = &self.calls.start;
        // Of several calls the last one that an op can be of.
        let launch = |key: (u32, i64), start: i64| {
            let first = launches.get(&key).copied()?;
            let Some(others) = repeated.get(&key) else { return Some(first) };
            let before = others.partition_point(|&call| starts[call as usize] <= start);
            Some(before.checked_sub(1).map_or(first, |place| others[place]))
        };
        let rows = self.ops.process.iter().zip(&self.ops.correlation).zip(&self.ops.start);
        self.ops.launch = rows.map(|((&p, &c), &start)| launch((p, c), start).unwrap_or(NONE)).collect();
        count
    }
}

/// What to say of calls that have the correlation of an earlier one of their process.
pub(crate) fn repeated_calls(count: usize) -> Option<String> {
    let calls = match count {
        0 => return None,
        1 => "1 call has the correlation id of an earlier call of its process".to_owned(),
        n => format!("{n} calls have the correlation id of an earlier call of their process"),
    };
    Some(format!("{calls}: what they launched is told by time"))
}

/// Collects distinct values and numbers them in order of first appearance: for [`Trace::details`] and [`Trace::works`].
#[derive(Clone, Debug)]
pub struct Distinct<T> {
    numbers: HashMap<T, u32, crate::intern::FastHash>,
    values: Vec<T>,
}

impl<T> Default for Distinct<T> {
    fn default() -> Self {
        Self { numbers: HashMap::default(), values: Vec::new() }
    }
}

impl<T: Copy + Eq + std::hash::Hash> Distinct<T> {
    /// The number of `value`, which is stored if it is new.
    pub fn number(&mut self, value: T) -> u32 {
        if let Some(&number) = self.numbers.get(&value) {
            return number;
        }
        let number = self.values.len() as u32;
        self.values.push(value);
        self.numbers.insert(value, number);
        number
    }

    /// The values by number.
    pub fn into_values(self) -> Vec<T> {
        self.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(start: i64, process: u32, correlation: i64) -> OpRow {
        OpRow { process, correlation, ..OpRow::new(OpKind::Kernel, StrId(0), start, start + 5) }
    }

    fn call(start: i64, thread: u32, correlation: i64) -> CallRow {
        CallRow { start, end: start + 1, name: StrId(0), thread, correlation, kind: CallKind::Gpu, result: 0 }
    }

    #[test]
    fn finish_sorts_and_joins_within_the_process() {
        let thread = |process| Thread { process, ..Thread::default() };
        let mut trace = Trace { threads: vec![thread(0), thread(1)], ..Trace::default() };
        trace.calls.push(call(3, 1, 9)); // another process with the same correlation
        trace.calls.push(call(2, 0, 9));
        trace.calls.push(call(1, 0, 0));
        trace.ops.push(op(20, 0, 9));
        trace.ops.push(op(10, 1, 9));
        trace.ops.push(op(5, 0, 4));
        trace.finish();
        assert_eq!(trace.calls.start, [1, 2, 3]);
        assert_eq!(trace.ops.start, [5, 10, 20]);
        assert_eq!(trace.ops.launch, [NONE, 2, 1]);
        assert_eq!(trace.ops_without_launch(), 1);
        assert_eq!(trace.extent(), Some((1, 25)));
        let before = trace.clone();
        trace.finish();
        assert_eq!(trace, before);
    }
}
