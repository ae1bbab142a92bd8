//! A trace as flat tables with names in place of numbers, the same for CSV and Parquet.
//!
//! Times are nanoseconds on the trace's clock. `device`, `process` and `thread` are the keys of the tables of those
//! names; `device` is the file's own number where that is unique. A value that is not known is null.

use super::tracks::device_numbers;
use crate::{
    CallKind, GraphMode, KernelDetail, Left, NONE, OpDetail, OpKind, RangeKind, RangeSource, StrId, Trace, range_flags,
};

type Get<'a, T> = Box<dyn Fn(usize) -> Option<T> + 'a>;

/// The values of a column by row.
pub(crate) enum Values<'a> {
    Int(Get<'a, i64>),
    Unsigned(Get<'a, u64>),
    Float(Get<'a, f64>),
    Flag(Get<'a, bool>),
    Text(Get<'a, &'a str>),
}

/// A column of a table.
pub(crate) struct Column<'a> {
    pub name: &'static str,
    /// Whether values may be missing.
    pub nullable: bool,
    pub values: Values<'a>,
}

/// A table.
pub(crate) struct Table<'a> {
    pub name: &'static str,
    pub rows: usize,
    pub columns: Vec<Column<'a>>,
}

fn int<'a>(name: &'static str, get: impl Fn(usize) -> i64 + 'a) -> Column<'a> {
    Column { name, nullable: false, values: Values::Int(Box::new(move |row| Some(get(row)))) }
}

fn maybe_int<'a>(name: &'static str, get: impl Fn(usize) -> Option<i64> + 'a) -> Column<'a> {
    Column { name, nullable: true, values: Values::Int(Box::new(get)) }
}

fn maybe_unsigned<'a>(name: &'static str, get: impl Fn(usize) -> Option<u64> + 'a) -> Column<'a> {
    Column { name, nullable: true, values: Values::Unsigned(Box::new(get)) }
}

fn maybe_float<'a>(name: &'static str, get: impl Fn(usize) -> Option<f64> + 'a) -> Column<'a> {
    Column { name, nullable: true, values: Values::Float(Box::new(move |row| get(row).filter(|v| v.is_finite()))) }
}

fn flag<'a>(name: &'static str, get: impl Fn(usize) -> bool + 'a) -> Column<'a> {
    Column { name, nullable: false, values: Values::Flag(Box::new(move |row| Some(get(row)))) }
}

fn text<'a>(name: &'static str, get: impl Fn(usize) -> &'a str + 'a) -> Column<'a> {
    Column { name, nullable: false, values: Values::Text(Box::new(move |row| Some(get(row)))) }
}

fn maybe_text<'a>(name: &'static str, get: impl Fn(usize) -> Option<&'a str> + 'a) -> Column<'a> {
    Column { name, nullable: true, values: Values::Text(Box::new(get)) }
}

/// A number that counts as not recorded when it is 0.
fn nonzero(value: u64) -> Option<u64> {
    (value != 0).then_some(value)
}

fn index(value: u32) -> Option<i64> {
    (value != NONE).then_some(i64::from(value))
}

/// What is read across tables, made once.
pub(crate) struct Tables<'a> {
    trace: &'a Trace,
    devices: Vec<i64>,
    /// Where the samples of each counter begin in the table of all samples.
    samples_before: Vec<usize>,
    meta: Vec<(String, String)>,
}

impl<'a> Tables<'a> {
    pub(crate) fn of(trace: &'a Trace) -> Self {
        let mut samples = 0;
        let count = |counter: &crate::Counter| {
            let before = samples;
            samples += counter.times.len().min(counter.values.len());
            before
        };
        let mut samples_before: Vec<usize> = trace.counters.iter().map(count).collect();
        samples_before.push(samples);
        Self { trace, devices: device_numbers(trace), samples_before, meta: meta_rows(trace) }
    }

    /// Every table.
    pub(crate) fn all(&self) -> Vec<Table<'_>> {
        let mut tables = self.usual();
        // Few traces have any of these.
        tables.extend(self.rare().into_iter().filter(|table| table.rows > 0));
        tables
    }

    fn usual(&self) -> Vec<Table<'_>> {
        vec![
            self.ops(),
            self.calls(),
            self.ranges(),
            self.iterations(),
            self.expert_loads(),
            self.counters(),
            self.allocations(),
            self.graph_nodes(),
            self.devices(),
            self.processes(),
            self.threads(),
            self.meta(),
        ]
    }

    fn rare(&self) -> Vec<Table<'_>> {
        vec![self.on_cpu(), self.cpu_samples(), self.page_faults(), self.flows()]
    }

    fn string(&self, id: StrId) -> Option<&str> {
        id.is_some().then(|| self.trace.text(id))
    }

    fn device(&self, index: u32) -> i64 {
        self.devices.get(index as usize).copied().unwrap_or(i64::from(index))
    }

    fn pid(&self, process: u32) -> Option<i64> {
        self.trace.processes.get(process as usize).map(|p| p.pid)
    }

    fn process_of(&self, thread: u32) -> Option<u32> {
        self.trace.threads.get(thread as usize).map(|t| t.process)
    }

    fn tid(&self, thread: u32) -> Option<i64> {
        self.trace.threads.get(thread as usize).map(|t| t.tid)
    }

    /// What ran on devices.
    pub(crate) fn ops(&self) -> Table<'_> {
        let (trace, ops) = (self.trace, &self.trace.ops);
        let kernel = move |row: usize| match trace.detail_of(row) {
            Some(OpDetail::Kernel(kernel)) => Some(*kernel),
            _ => None,
        };
        let of_kernel = move |name, field: fn(&KernelDetail) -> u32| {
            maybe_int(name, move |row| kernel(row).map(|k| field(&k)).filter(|&v| v != 0).map(i64::from))
        };
        let shared = move |name, field: fn(&KernelDetail) -> u32| {
            maybe_int(name, move |row| kernel(row).map(|k| i64::from(field(&k))))
        };
        let of_copy = move |name, field: fn(u8, u8, u8) -> Option<&'static str>| {
            maybe_text(name, move |row| match trace.detail_of(row) {
                Some(&OpDetail::Memcpy { copy_kind, src_kind, dst_kind, .. }) => field(copy_kind, src_kind, dst_kind),
                Some(&OpDetail::Memset { mem_kind, .. }) => field(u8::MAX, u8::MAX, mem_kind),
                _ => None,
            })
        };
        let of_detail = move |name, field: fn(&OpDetail) -> Option<u32>| {
            maybe_int(name, move |row| trace.detail_of(row).and_then(field).map(i64::from))
        };
        let of_work = move |name, field: fn(&crate::Work) -> u64| {
            maybe_unsigned(name, move |row| trace.work_of(row).and_then(|work| nonzero(field(work))))
        };
        let columns = vec![
            int("start_ns", |row| ops.start[row]),
            int("end_ns", |row| ops.end[row]),
            int("duration_ns", |row| ops.duration(row)),
            text("kind", |row| op_kind(ops.kind[row])),
            text("name", |row| trace.text(ops.name[row])),
            maybe_text("short_name", move |row| kernel(row).and_then(|k| self.string(k.short_name))),
            int("device", |row| self.device(ops.device[row])),
            int("stream", |row| ops.stream[row].into()),
            int("context", |row| ops.context[row].into()),
            int("process", |row| ops.process[row].into()),
            maybe_int("pid", |row| self.pid(ops.process[row])),
            maybe_int("correlation", |row| Some(ops.correlation[row]).filter(|&c| c != 0)),
            maybe_int("launch_start_ns", move |row| trace.launch_of(row).map(|call| call.start)),
            maybe_int("launch_end_ns", move |row| trace.launch_of(row).map(|call| call.end)),
            maybe_text("launch_name", move |row| trace.launch_of(row).map(|call| trace.text(call.name))),
            maybe_int("launch_thread", move |row| trace.launch_of(row).map(|call| call.thread.into())),
            maybe_unsigned("graph_node", |row| nonzero(ops.graph_node[row])),
            maybe_unsigned("bytes", |row| ops.kind[row].is_memory().then(|| ops.bytes[row])),
            of_kernel("grid_x", |k| k.grid[0]),
            of_kernel("grid_y", |k| k.grid[1]),
            of_kernel("grid_z", |k| k.grid[2]),
            of_kernel("block_x", |k| k.block[0]),
            of_kernel("block_y", |k| k.block[1]),
            of_kernel("block_z", |k| k.block[2]),
            of_kernel("registers", |k| k.registers),
            shared("static_shared_bytes", |k| k.static_shared),
            shared("dynamic_shared_bytes", |k| k.dynamic_shared),
            of_copy("copy_kind", |kind, _, _| copy_label(kind)),
            of_copy("source_memory", |_, source, _| memory_label(source)),
            of_copy("destination_memory", |_, _, destination| memory_label(destination)),
            maybe_text("op", move |row| trace.work_of(row).and_then(|work| self.string(work.op))),
            maybe_text("category", move |row| trace.work_of(row).and_then(|work| self.string(work.category))),
            maybe_int("layer", move |row| trace.work_of(row).and_then(|work| work.layer).map(i64::from)),
            of_work("m", |work| work.shape[0]),
            of_work("n", |work| work.shape[1]),
            of_work("k", |work| work.shape[2]),
            of_work("work_bytes", |work| work.bytes),
            of_work("flops", |work| work.flops),
            maybe_int("iteration", |row| index(ops.iteration[row])),
            of_detail("copy_kind_number", |detail| match *detail {
                OpDetail::Memcpy { copy_kind, .. } => Some(copy_kind.into()),
                _ => None,
            }),
            of_detail("source_device", |detail| match *detail {
                OpDetail::Memcpy { src_device, .. } => src_device,
                _ => None,
            }),
            of_detail("destination_device", |detail| match *detail {
                OpDetail::Memcpy { dst_device, .. } => dst_device,
                _ => None,
            }),
            of_detail("fill_value", |detail| match *detail {
                OpDetail::Memset { value, .. } => Some(value),
                _ => None,
            }),
            of_detail("graph", |detail| match *detail {
                OpDetail::Graph { graph, .. } => Some(graph),
                _ => None,
            }),
            of_detail("graph_exec", |detail| match *detail {
                OpDetail::Graph { exec, .. } => Some(exec),
                _ => None,
            }),
            of_detail("migration_cause", |detail| match *detail {
                OpDetail::Memcpy { cause, .. } if cause != 0 => Some(cause.into()),
                _ => None,
            }),
        ];
        Table { name: "ops", rows: ops.len(), columns }
    }

    fn calls(&self) -> Table<'_> {
        let calls = &self.trace.calls;
        let kind = |kind| match kind {
            CallKind::Gpu => "gpu",
            CallKind::OsRuntime => "os_runtime",
            CallKind::Profiler => "profiler",
        };
        let columns = vec![
            int("start_ns", |row| calls.start[row]),
            int("end_ns", |row| calls.end[row]),
            int("duration_ns", |row| calls.duration(row)),
            text("kind", move |row| kind(calls.kind[row])),
            text("name", |row| self.trace.text(calls.name[row])),
            int("thread", |row| calls.thread[row].into()),
            maybe_int("tid", |row| self.tid(calls.thread[row])),
            maybe_int("process", |row| self.process_of(calls.thread[row]).map(i64::from)),
            maybe_int("pid", |row| self.process_of(calls.thread[row]).and_then(|p| self.pid(p))),
            maybe_int("correlation", |row| Some(calls.correlation[row]).filter(|&c| c != 0)),
            int("result", |row| calls.result[row].into()),
        ];
        Table { name: "calls", rows: calls.len(), columns }
    }

    fn ranges(&self) -> Table<'_> {
        let ranges = &self.trace.ranges;
        let has = move |row: usize, bit: u8| ranges.flags[row] & bit != 0;
        let columns = vec![
            int("start_ns", |row| ranges.start[row]),
            int("end_ns", |row| ranges.end[row]),
            int("duration_ns", |row| ranges.duration(row)),
            text("source", |row| range_source(ranges.source[row])),
            text("name", |row| self.trace.text(ranges.name[row])),
            maybe_text("domain", |row| self.string(ranges.domain[row])),
            maybe_text("phase", |row| {
                Some(ranges.kind[row]).filter(|&kind| kind != RangeKind::Other).map(RangeKind::as_str)
            }),
            int("thread", |row| ranges.thread[row].into()),
            maybe_int("tid", |row| self.tid(ranges.thread[row])),
            maybe_int("process", |row| self.process_of(ranges.thread[row]).map(i64::from)),
            maybe_int("pid", |row| self.process_of(ranges.thread[row]).and_then(|p| self.pid(p))),
            maybe_int("iteration", |row| index(ranges.iteration[row])),
            flag("unclosed", move |row| has(row, range_flags::UNCLOSED)),
            flag("cross_thread", move |row| has(row, range_flags::CROSS_THREAD)),
            flag("mark", move |row| has(row, range_flags::MARK)),
            maybe_text("input_dims", |row| self.string(ranges.dims[row])),
            maybe_text("input_types", |row| self.string(ranges.types[row])),
            maybe_text("concrete_inputs", |row| self.string(ranges.values[row])),
            maybe_text("input_strides", |row| self.string(ranges.strides[row])),
        ];
        Table { name: "ranges", rows: ranges.len(), columns }
    }

    fn expert_loads(&self) -> Table<'_> {
        let loads = &self.trace.expert_loads;
        let columns = vec![
            maybe_unsigned("iteration", |row| Some(loads[row].iter)),
            int("layer", |row| loads[row].layer.into()),
            int("expert", |row| loads[row].expert.into()),
            int("tokens", |row| loads[row].tokens.into()),
        ];
        Table { name: "expert_loads", rows: loads.len(), columns }
    }

    fn iterations(&self) -> Table<'_> {
        let iterations = &self.trace.iterations;
        let columns = vec![
            maybe_unsigned("iteration", |row| Some(iterations[row].iter)),
            int("start_ns", |row| iterations[row].start),
            int("end_ns", |row| iterations[row].end),
            int("duration_ns", |row| iterations[row].wall_ns()),
            text("kind", |row| iterations[row].kind().as_str()),
            int("context_requests", |row| iterations[row].context_requests.into()),
            int("generation_requests", |row| iterations[row].generation_requests.into()),
            int("context_tokens", |row| iterations[row].context_tokens.into()),
            int("generation_tokens", |row| iterations[row].generation_tokens.into()),
            int("window", |row| iterations[row].window.into()),
            maybe_int("cpu_wait_ns", |row| iterations[row].cpu_wait),
        ];
        Table { name: "iterations", rows: iterations.len(), columns }
    }

    fn counters(&self) -> Table<'_> {
        let counters = &self.trace.counters;
        let before = &self.samples_before;
        // The last counter that begins at or before the row: counters without samples share their place with the next.
        let find = move |row: usize| {
            let counter = before.partition_point(|&first| first <= row) - 1;
            (&counters[counter], row - before[counter])
        };
        let columns = vec![
            text("name", move |row| &find(row).0.name),
            maybe_int("device", move |row| find(row).0.device.map(|device| self.device(device))),
            int("time_ns", move |row| {
                let (counter, sample) = find(row);
                counter.times[sample]
            }),
            maybe_float("value", move |row| {
                let (counter, sample) = find(row);
                Some(counter.values[sample])
            }),
        ];
        Table { name: "counters", rows: before.last().copied().unwrap_or(0), columns }
    }

    fn allocations(&self) -> Table<'_> {
        let allocations = &self.trace.allocations;
        let columns = vec![
            int("time_ns", |row| allocations[row].time),
            maybe_int("device", |row| allocations[row].device.map(|device| self.device(device))),
            int("process", |row| allocations[row].process.into()),
            maybe_int("pid", |row| self.pid(allocations[row].process)),
            maybe_unsigned("address", |row| Some(allocations[row].address)),
            int("bytes", |row| allocations[row].bytes),
            maybe_text("memory", |row| memory_label(allocations[row].mem_kind)),
            maybe_text("name", |row| self.string(allocations[row].name)),
            maybe_unsigned("total_allocated", |row| allocations[row].total_allocated),
            maybe_unsigned("total_reserved", |row| allocations[row].total_reserved),
        ];
        Table { name: "allocations", rows: allocations.len(), columns }
    }

    fn graph_nodes(&self) -> Table<'_> {
        let nodes = &self.trace.graph_nodes;
        let columns = vec![
            maybe_unsigned("graph_node", |row| Some(nodes[row].node)),
            maybe_unsigned("original", |row| nonzero(nodes[row].original)),
            int("start_ns", |row| nodes[row].start),
            int("end_ns", |row| nodes[row].end),
            int("thread", |row| nodes[row].thread.into()),
        ];
        Table { name: "graph_nodes", rows: nodes.len(), columns }
    }

    fn on_cpu(&self) -> Table<'_> {
        let times = &self.trace.on_cpu;
        let columns = vec![
            int("start_ns", |row| times[row].start),
            int("end_ns", |row| times[row].end),
            maybe_int("thread", |row| index(times[row].thread)),
            maybe_int("tid", |row| self.tid(times[row].thread)),
            int("cpu", |row| times[row].cpu.into()),
            text("left", |row| left_label(times[row].left)),
        ];
        Table { name: "on_cpu", rows: times.len(), columns }
    }

    fn cpu_samples(&self) -> Table<'_> {
        let samples = &self.trace.cpu_samples;
        let columns = vec![
            int("time_ns", |row| samples[row].time),
            int("thread", |row| samples[row].thread.into()),
            maybe_int("tid", |row| self.tid(samples[row].thread)),
            maybe_text("function", |row| self.string(samples[row].function)),
            maybe_text("module", |row| self.string(samples[row].module)),
        ];
        Table { name: "cpu_samples", rows: samples.len(), columns }
    }

    fn page_faults(&self) -> Table<'_> {
        let faults = &self.trace.page_faults;
        let columns = vec![
            int("start_ns", |row| faults[row].start),
            int("end_ns", |row| faults[row].end),
            int("process", |row| faults[row].process.into()),
            maybe_int("pid", |row| self.pid(faults[row].process)),
            maybe_int("device", |row| faults[row].device.map(|device| self.device(device))),
            maybe_unsigned("address", |row| Some(faults[row].address)),
            int("count", |row| faults[row].count.into()),
            int("access", |row| faults[row].access.into()),
            maybe_text("function", |row| self.string(faults[row].function)),
        ];
        Table { name: "page_faults", rows: faults.len(), columns }
    }

    fn flows(&self) -> Table<'_> {
        let flows = &self.trace.flows;
        let columns = vec![
            int("start_ns", |row| flows[row].start),
            int("end_ns", |row| flows[row].end),
            int("from_thread", |row| flows[row].from.into()),
            int("to_thread", |row| flows[row].to.into()),
        ];
        Table { name: "flows", rows: flows.len(), columns }
    }

    fn devices(&self) -> Table<'_> {
        let devices = &self.trace.devices;
        let columns = vec![
            int("device", |row| self.devices[row]),
            int("ordinal", |row| devices[row].ordinal.into()),
            int("source", |row| devices[row].source.into()),
            maybe_text("name", |row| Some(devices[row].name.as_str()).filter(|name| !name.is_empty())),
            flag("is_cpu", |row| devices[row].is_cpu),
            maybe_unsigned("memory_bytes", |row| devices[row].memory_bytes),
            maybe_float("bytes_per_s", |row| devices[row].bytes_per_s),
            maybe_int("multiprocessors", |row| devices[row].multiprocessors.map(i64::from)),
            maybe_float("clock_hz", |row| devices[row].clock_hz),
            maybe_int("compute_major", |row| devices[row].compute_capability.map(|c| c.0.into())),
            maybe_int("compute_minor", |row| devices[row].compute_capability.map(|c| c.1.into())),
        ];
        Table { name: "devices", rows: devices.len(), columns }
    }

    fn processes(&self) -> Table<'_> {
        let processes = &self.trace.processes;
        let columns = vec![
            int("process", |row| row as i64),
            int("pid", |row| processes[row].pid),
            maybe_text("name", |row| Some(processes[row].name.as_str()).filter(|name| !name.is_empty())),
            maybe_int("rank", |row| processes[row].rank.map(i64::from)),
            int("source", |row| processes[row].source.into()),
        ];
        Table { name: "processes", rows: processes.len(), columns }
    }

    fn threads(&self) -> Table<'_> {
        let threads = &self.trace.threads;
        let columns = vec![
            int("thread", |row| row as i64),
            int("tid", |row| threads[row].tid),
            int("process", |row| threads[row].process.into()),
            maybe_text("name", |row| Some(threads[row].name.as_str()).filter(|name| !name.is_empty())),
        ];
        Table { name: "threads", rows: threads.len(), columns }
    }

    fn meta(&self) -> Table<'_> {
        let columns = vec![text("key", |row| &self.meta[row].0), text("value", |row| &self.meta[row].1)];
        Table { name: "meta", rows: self.meta.len(), columns }
    }
}

/// The names of the tables that every export has, and of those that only some have.
pub(crate) fn names() -> [Vec<&'static str>; 2] {
    let trace = Trace::default();
    let tables = Tables::of(&trace);
    [tables.usual(), tables.rare()].map(|tables| tables.iter().map(|table| table.name).collect())
}

fn meta_rows(trace: &Trace) -> Vec<(String, String)> {
    let meta = &trace.meta;
    let mut rows = vec![("producer".to_owned(), meta.producer.clone())];
    let mut add = |key: &str, value: String| rows.push((key.to_owned(), value));
    if let Some(start) = meta.session_start_utc_ns {
        add("session_start_utc_ns", start.to_string());
    }
    if let Some(mode) = meta.graph_mode {
        add("graph_mode", if mode == GraphMode::Node { "node" } else { "graph" }.to_owned());
    }
    add("partial", meta.partial.to_string());
    for (index, source) in meta.sources.iter().enumerate() {
        let name = source.path.file_name().unwrap_or_default().to_string_lossy();
        add(&format!("source.{index}.file"), name.into_owned());
        add(&format!("source.{index}.format"), source.format.clone());
        add(&format!("source.{index}.bytes"), source.bytes.to_string());
        add(&format!("source.{index}.events"), source.events.to_string());
        add(&format!("source.{index}.lost"), source.lost.to_string());
        if let Some(rank) = source.rank {
            add(&format!("source.{index}.rank"), rank.to_string());
        }
    }
    for window in &meta.windows {
        let state = if window.complete { "complete" } else { "incomplete" };
        add(&format!("window.{}", window.index), format!("{}-{} {state}", window.first, window.last));
    }
    if let Some(peaks) = &meta.peaks {
        add("peaks.flops_per_s", peaks.flops_per_s.to_string());
        if let Some(ops) = peaks.int8_ops_per_s {
            add("peaks.int8_ops_per_s", ops.to_string());
        }
        if let Some(flops) = peaks.bf16_flops_per_s {
            add("peaks.bf16_flops_per_s", flops.to_string());
        }
        add("peaks.bytes_per_s", peaks.bytes_per_s.to_string());
        add("peaks.note", peaks.note.clone());
    }
    for (index, notice) in meta.notices.iter().enumerate() {
        add(&format!("notice.{index}"), notice.clone());
    }
    for (key, value) in &meta.extra {
        add(&format!("extra.{key}"), super::without_directories(value).to_owned());
    }
    rows
}

fn op_kind(kind: OpKind) -> &'static str {
    match kind {
        OpKind::Kernel => "kernel",
        OpKind::Memcpy => "memcpy",
        OpKind::Memset => "memset",
        OpKind::Graph => "graph",
        OpKind::CpuOp => "cpu_op",
    }
}

fn range_source(source: RangeSource) -> &'static str {
    match source {
        RangeSource::PushPop => "push_pop",
        RangeSource::StartEnd => "start_end",
        RangeSource::Annotation => "annotation",
        RangeSource::GpuAnnotation => "gpu_annotation",
        RangeSource::CpuOp => "cpu_op",
        RangeSource::Python => "python",
        RangeSource::Other => "other",
    }
}

fn left_label(left: Left) -> &'static str {
    match left {
        Left::Unknown => "unknown",
        Left::Ready => "ready",
        Left::Waiting => "waiting",
        Left::Ended => "ended",
    }
}

/// Why a thread lost its CPU, by its name.
pub(crate) fn left_of(name: &str) -> Left {
    let all = [Left::Ready, Left::Waiting, Left::Ended];
    all.into_iter().find(|&left| left_label(left) == name).unwrap_or_default()
}

/// The kind of op with this name.
pub(crate) fn op_kind_of(name: &str) -> Option<OpKind> {
    let kinds = [OpKind::Kernel, OpKind::Memcpy, OpKind::Memset, OpKind::Graph, OpKind::CpuOp];
    kinds.into_iter().find(|&kind| op_kind(kind) == name)
}

/// The source of ranges with this name.
pub(crate) fn range_source_of(name: &str) -> Option<RangeSource> {
    let sources = [
        RangeSource::PushPop,
        RangeSource::StartEnd,
        RangeSource::Annotation,
        RangeSource::GpuAnnotation,
        RangeSource::CpuOp,
        RangeSource::Python,
        RangeSource::Other,
    ];
    sources.into_iter().find(|&source| range_source(source) == name)
}

/// CUPTI's number of the direction with this label.
pub(crate) fn copy_kind_of(label: &str) -> Option<u8> {
    (0..=10).find(|&kind| copy_label(kind) == Some(label))
}

/// The number of the kind of memory with this label; 255 where there is none.
pub(crate) fn memory_kind_of(label: &str) -> u8 {
    (0..=6).find(|&kind| memory_label(kind) == Some(label)).unwrap_or(u8::MAX)
}

/// The direction of a copy by CUPTI's number.
pub(crate) fn copy_label(kind: u8) -> Option<&'static str> {
    Some(match kind {
        1 | 11 => "HtoD",
        2 | 12 => "DtoH",
        3 => "HtoA",
        4 => "AtoH",
        5 => "AtoA",
        6 => "AtoD",
        7 => "DtoA",
        8 | 13 => "DtoD",
        9 => "HtoH",
        10 => "PtoP",
        _ => return None,
    })
}

/// A kind of memory by its number.
pub(crate) fn memory_label(kind: u8) -> Option<&'static str> {
    Some(match kind {
        0 => "Pageable",
        1 => "Pinned",
        2 => "Device",
        3 => "Array",
        4 => "Managed",
        5 => "Device Static",
        6 => "Managed Static",
        _ => return None,
    })
}
