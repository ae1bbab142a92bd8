//! What a scan of one piece of a table yields: events whose names, threads and devices still have the numbers of the
//! file. [`super::merge`] puts the parts together.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use super::ids::process_of;
use super::pages::Row;
use super::strobe::{OpExtra, Side};
use super::system::Switches;
use crate::intern::FastHash;
use crate::{
    Allocation, CallKind, CallRow, Calls, Distinct, GraphNode, KernelDetail, NONE, OpDetail, OpKind, OpRow, Ops,
    PageFault, RangeKind, RangeRow, RangeSource, Ranges, StrId, range_flags,
};

/// No run lasts this long: a time further away from the start of the session is a fault of the recording.
const TEN_YEARS_NS: i64 = 10 * 366 * 86_400 * 1_000_000_000;

/// Numbers keys in order of first appearance. Neighbouring rows mostly share their thread, device and process.
pub(super) struct Keys<K> {
    last: Option<(K, u32)>,
    numbers: HashMap<K, u32, FastHash>,
    pub(super) keys: Vec<K>,
}

impl<K> Default for Keys<K> {
    fn default() -> Self {
        Self { last: None, numbers: HashMap::default(), keys: Vec::new() }
    }
}

impl<K: Copy + Eq + Hash> Keys<K> {
    pub(super) fn number(&mut self, key: K) -> u32 {
        if let Some((last, number)) = self.last
            && last == key
        {
            return number;
        }
        let next = self.keys.len() as u32;
        let number = *self.numbers.entry(key).or_insert(next);
        if number == next {
            self.keys.push(key);
        }
        self.last = Some((key, number));
        number
    }
}

/// Where a name stands in the file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum NameKey {
    /// In `StringIds`.
    Id(i64),
    /// In the row itself.
    Text(Box<[u8]>),
    /// In `StringIds`, of which only the name of the file counts.
    File(i64),
    /// Made by the importer.
    Fixed(&'static str),
    /// The label of a kind of copy.
    Copy(i64),
}

/// Names that rows refer to, numbered in order of first appearance. A thread keeps them from part to part: looking up the
/// few that are new costs less than looking up all again.
#[derive(Default)]
pub(super) struct Names {
    /// Numbers of small ids, which almost all are: number + 1, or 0.
    small: Vec<u32>,
    large: HashMap<i64, u32, FastHash>,
    texts: HashMap<Box<[u8]>, u32, FastHash>,
    others: Vec<(NameKey, u32)>,
    count: u32,
    /// Those that came since they were last taken away.
    pub(super) new: Vec<NameKey>,
}

impl Names {
    fn add(&mut self, key: NameKey) -> u32 {
        self.new.push(key);
        self.count += 1;
        self.count - 1
    }

    /// The name with this id in `StringIds`.
    pub(super) fn id(&mut self, id: i64) -> StrId {
        const SMALL: i64 = 1 << 22;
        if !(0..SMALL).contains(&id) {
            if let Some(&number) = self.large.get(&id) {
                return StrId(number);
            }
            let number = self.add(NameKey::Id(id));
            self.large.insert(id, number);
            return StrId(number);
        }
        let place = id as usize;
        if self.small.len() <= place {
            self.small.resize((place + 1).next_power_of_two(), 0);
        }
        if self.small[place] == 0 {
            self.small[place] = self.add(NameKey::Id(id)) + 1;
        }
        StrId(self.small[place] - 1)
    }

    pub(super) fn text(&mut self, text: &[u8]) -> StrId {
        if let Some(&number) = self.texts.get(text) {
            return StrId(number);
        }
        let number = self.add(NameKey::Text(text.into()));
        self.texts.insert(text.into(), number);
        StrId(number)
    }

    /// The number of a key of another table of names.
    pub(super) fn number(&mut self, key: NameKey) -> StrId {
        match key {
            NameKey::Id(id) => self.id(id),
            NameKey::Text(text) => self.text(&text),
            other => self.other(other),
        }
    }

    fn other(&mut self, key: NameKey) -> StrId {
        if let Some(&(_, number)) = self.others.iter().find(|(k, _)| *k == key) {
            return StrId(number);
        }
        let number = self.add(key.clone());
        self.others.push((key, number));
        StrId(number)
    }

    pub(super) fn fixed(&mut self, text: &'static str) -> StrId {
        self.other(NameKey::Fixed(text))
    }

    fn copy(&mut self, kind: i64) -> StrId {
        self.other(NameKey::Copy(kind))
    }

    fn id_or_none(&mut self, id: Option<i64>) -> StrId {
        id.map_or(StrId::NONE, |id| self.id(id))
    }
}

/// Rows that are not as they should be.
#[derive(Clone, Copy, Default)]
pub(super) struct Faults {
    /// Left out: more than ten years away from the start of the session.
    pub(super) absurd: u64,
    /// Kept with no length: they end before they start.
    pub(super) backward: u64,
    /// Left out: graph launches without time stamps or started on the host.
    pub(super) untimed_graphs: u64,
    /// Left out: no start, which no version of the schema allows.
    pub(super) no_time: u64,
    /// Left out: rows of `StringIds` whose id stands for another text already.
    pub(super) repeated_names: u64,
    /// Ids that `StringIds` lacks.
    pub(super) unknown_names: u64,
    /// Switches of threads between CPUs of which the other half is missing.
    pub(super) lone_switches: u64,
}

impl Faults {
    pub(super) fn add(&mut self, other: &Self) {
        self.absurd += other.absurd;
        self.backward += other.backward;
        self.untimed_graphs += other.untimed_graphs;
        self.no_time += other.no_time;
        self.repeated_names += other.repeated_names;
        self.unknown_names += other.unknown_names;
        self.lone_switches += other.lone_switches;
    }
}

/// A series of GPU metric samples: the type (which names the GPU) and the metric.
pub(super) type SeriesKey = (i64, i64);

/// Times and values of a series, in the order of the file.
pub(super) type Series = (Vec<i64>, Vec<f64>);

/// A device as rows name it: process and the number it has there.
pub(super) type DeviceKey = (i64, i64);

/// What one piece of a table holds.
#[derive(Default)]
pub(super) struct Part {
    pub(super) ops: Ops,
    pub(super) calls: Calls,
    pub(super) ranges: Ranges,
    pub(super) details: Distinct<OpDetail>,
    pub(super) names: Names,
    pub(super) threads: Keys<i64>,
    pub(super) processes: Keys<i64>,
    pub(super) devices: Keys<DeviceKey>,
    /// Process and domain of ranges.
    pub(super) domains: Keys<(i64, i64)>,
    /// Names that NVTX rows give to domains.
    pub(super) domain_names: Vec<((i64, i64), StrId)>,
    /// Names that NVTX rows give to threads.
    pub(super) thread_names: Vec<(i64, StrId)>,
    pub(super) series: BTreeMap<SeriesKey, Series>,
    pub(super) allocations: Vec<Allocation>,
    pub(super) graph_nodes: Vec<GraphNode>,
    /// What threads did on CPUs.
    pub(super) switches: Switches,
    pub(super) page_faults: Vec<PageFault>,
    pub(super) faults: Faults,
    /// The last moment that an NVTX row names.
    pub(super) last_nvtx: i64,
    /// Whether an op executed a node of a graph.
    pub(super) has_graph_nodes: bool,
    /// Whether whole graphs were recorded.
    pub(super) has_graphs: bool,
    pub(super) rows: u64,
}

/// A table of events: its name, the columns that are read, and what becomes of a row.
pub(super) struct EventTable {
    pub(super) name: &'static str,
    pub(super) columns: &'static [&'static str],
    /// The columns that every version has; any one of several separated by `|`.
    pub(super) needed: &'static [&'static str],
    pub(super) row: fn(&mut Part, &Row, &Side),
}

/// Every table of events that is imported.
pub(super) const EVENT_TABLES: [EventTable; 17] = [
    EventTable {
        name: KERNEL,
        columns: KERNEL_COLUMNS,
        needed: &["start", "end", "deviceId", "streamId", "correlationId", "demangledName|shortName"],
        row: Part::kernel,
    },
    EventTable {
        name: MEMCPY,
        columns: MEMCPY_COLUMNS,
        needed: &["start", "end", "deviceId", "streamId", "correlationId", "bytes", "copyKind"],
        row: Part::memcpy,
    },
    EventTable {
        name: MEMSET,
        columns: MEMSET_COLUMNS,
        needed: &["start", "end", "deviceId", "streamId", "correlationId", "bytes"],
        row: Part::memset,
    },
    EventTable {
        name: GRAPH_TRACE,
        columns: GRAPH_TRACE_COLUMNS,
        needed: &["start", "end", "deviceId", "correlationId", "graphId"],
        row: Part::graph,
    },
    EventTable {
        name: RUNTIME,
        columns: CALL_COLUMNS,
        needed: &["start", "end", "globalTid", "correlationId", "nameId"],
        row: Part::gpu_call,
    },
    EventTable {
        name: "OSRT_API",
        columns: CALL_COLUMNS,
        needed: &["start", "end", "globalTid", "nameId"],
        row: Part::os_call,
    },
    EventTable {
        name: "PROFILER_OVERHEAD",
        columns: CALL_COLUMNS,
        needed: &["start", "end", "globalTid"],
        row: Part::profiler_call,
    },
    EventTable {
        name: OVERHEAD,
        columns: CALL_COLUMNS,
        needed: &["start", "end", "globalTid"],
        row: Part::profiler_overhead,
    },
    EventTable {
        name: "NVTX_EVENTS",
        columns: NVTX_COLUMNS,
        needed: &["start", "end", "eventType", "globalTid", "text|textId"],
        row: Part::nvtx,
    },
    EventTable {
        name: "GPU_METRICS",
        columns: &["timestamp", "typeId", "metricId", "value"],
        needed: &["timestamp", "typeId", "metricId", "value"],
        row: Part::sample,
    },
    EventTable {
        name: "CUDA_GPU_MEMORY_USAGE_EVENTS",
        columns: MEMORY_COLUMNS,
        needed: &["start", "globalPid", "deviceId", "address", "bytes", "memoryOperationType"],
        row: Part::allocation,
    },
    EventTable {
        name: "CUDA_GRAPH_NODE_EVENTS",
        columns: NODE_COLUMNS,
        needed: &["start", "end", "globalTid", "graphNodeId"],
        row: Part::graph_node,
    },
    EventTable {
        name: "SCHED_EVENTS",
        columns: &["start", "cpu", "isSchedIn", "globalTid", "threadState", "threadBlock"],
        needed: &["start", "cpu", "isSchedIn", "globalTid"],
        row: Part::switch,
    },
    EventTable {
        name: "COMPOSITE_EVENTS",
        columns: &["start", "id", "globalTid"],
        needed: &["start", "id", "globalTid"],
        row: Part::cpu_sample,
    },
    EventTable {
        name: "SAMPLING_CALLCHAINS",
        columns: &["id", "stackDepth", "symbol", "module", "unresolved", "specialEntry"],
        needed: &["id", "stackDepth", "symbol", "module"],
        row: Part::frame,
    },
    EventTable {
        name: "CUDA_UM_CPU_PAGE_FAULT_EVENTS",
        columns: &["start", "globalPid", "address", "CpuInstruction"],
        needed: &["start", "globalPid", "address"],
        row: Part::cpu_page_fault,
    },
    EventTable {
        name: "CUDA_UM_GPU_PAGE_FAULT_EVENTS",
        columns: &["start", "end", "deviceId", "globalPid", "address", "numberOfPageFaults", "faultAccessType"],
        needed: &["start", "end", "deviceId", "globalPid", "address"],
        row: Part::gpu_page_fault,
    },
];

pub(super) const KERNEL: &str = "CUPTI_ACTIVITY_KIND_KERNEL";
pub(super) const MEMCPY: &str = "CUPTI_ACTIVITY_KIND_MEMCPY";
pub(super) const MEMSET: &str = "CUPTI_ACTIVITY_KIND_MEMSET";
pub(super) const GRAPH_TRACE: &str = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE";
pub(super) const RUNTIME: &str = "CUPTI_ACTIVITY_KIND_RUNTIME";
pub(super) const OVERHEAD: &str = "CUPTI_ACTIVITY_KIND_OVERHEAD";

/// What every row of a GPU operation begins with.
macro_rules! op_columns {
    ($($more:literal),*) => {
        &[
            "start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "graphNodeId", $($more),*
        ]
    };
}
/// The first cell after those of every GPU operation.
const MORE: usize = 8;

const KERNEL_COLUMNS: &[&str] = op_columns![
    "demangledName",
    "shortName",
    "gridX",
    "gridY",
    "gridZ",
    "blockX",
    "blockY",
    "blockZ",
    "registersPerThread",
    "staticSharedMemory",
    "dynamicSharedMemory"
];
const MEMCPY_COLUMNS: &[&str] =
    op_columns!["bytes", "copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId", "migrationCause"];
const MEMSET_COLUMNS: &[&str] = op_columns!["bytes", "value", "memKind"];
const GRAPH_TRACE_COLUMNS: &[&str] = op_columns!["graphId", "graphExecId"];
const CALL_COLUMNS: &[&str] = &["start", "end", "globalTid", "correlationId", "nameId", "returnValue", "eventClass"];
const NVTX_COLUMNS: &[&str] = &["start", "end", "eventType", "globalTid", "endGlobalTid", "textId", "text", "domainId"];
const MEMORY_COLUMNS: &[&str] =
    &["start", "globalPid", "deviceId", "address", "bytes", "memKind", "memoryOperationType", "name"];
const NODE_COLUMNS: &[&str] = &["start", "end", "globalTid", "graphNodeId", "originalGraphNodeId"];

/// `eventClass` of the row that says when tracing of the operating system's functions began.
const OSRT_START: i64 = 31;

/// Changes the numbers in a column.
pub(super) fn renumber<T: Copy + Into<u64>>(column: &mut [T], numbers: &[T]) {
    column.iter_mut().for_each(|number| *number = numbers[(*number).into() as usize]);
}

impl Part {
    /// Takes over what another part holds: its rows come after those that are here. `names` are the numbers here of the
    /// names that the other's thread has met so far.
    pub(super) fn absorb(&mut self, mut other: Part, names: &mut Vec<StrId>) {
        names.extend(std::mem::take(&mut other.names.new).into_iter().map(|key| self.names.number(key)));
        let name = |local: &mut StrId| *local = names.get(local.0 as usize).copied().unwrap_or(StrId::NONE);
        let threads: Vec<u32> = other.threads.keys.iter().map(|&key| self.threads.number(key)).collect();
        let processes: Vec<u32> = other.processes.keys.iter().map(|&key| self.processes.number(key)).collect();
        let devices: Vec<u32> = other.devices.keys.iter().map(|&key| self.devices.number(key)).collect();
        let domains: Vec<StrId> = other.domains.keys.iter().map(|&key| StrId(self.domains.number(key))).collect();
        let mut details = Vec::new();
        for mut detail in other.details.into_values() {
            if let OpDetail::Kernel(kernel) = &mut detail {
                name(&mut kernel.short_name);
            }
            details.push(self.details.number(detail));
        }
        other.ops.name.iter_mut().for_each(name);
        renumber(&mut other.ops.device, &devices);
        renumber(&mut other.ops.process, &processes);
        let known = other.ops.detail.iter_mut().filter(|detail| **detail != NONE);
        known.for_each(|detail| *detail = details[*detail as usize]);
        other.calls.name.iter_mut().for_each(name);
        renumber(&mut other.calls.thread, &threads);
        let ranges = &mut other.ranges;
        let texts = [&mut ranges.name, &mut ranges.dims, &mut ranges.types, &mut ranges.values, &mut ranges.strides];
        for column in texts {
            column.iter_mut().for_each(name);
        }
        renumber(&mut other.ranges.thread, &threads);
        let named = other.ranges.domain.iter_mut().filter(|domain| domain.is_some());
        named.for_each(|domain| *domain = domains[domain.0 as usize]);
        for allocation in &mut other.allocations {
            allocation.process = processes[allocation.process as usize];
            allocation.device = allocation.device.map(|device| devices[device as usize]);
            name(&mut allocation.name);
        }
        other.graph_nodes.iter_mut().for_each(|node| node.thread = threads[node.thread as usize]);
        for fault in &mut other.page_faults {
            fault.process = processes[fault.process as usize];
            fault.device = fault.device.map(|device| devices[device as usize]);
            name(&mut fault.function);
        }
        other.domain_names.iter_mut().for_each(|(_, text)| name(text));
        other.thread_names.iter_mut().for_each(|(_, text)| name(text));

        self.ops.append(&mut other.ops);
        self.calls.append(&mut other.calls);
        self.ranges.append(&mut other.ranges);
        self.allocations.append(&mut other.allocations);
        self.graph_nodes.append(&mut other.graph_nodes);
        self.switches.absorb(other.switches);
        self.page_faults.append(&mut other.page_faults);
        self.domain_names.append(&mut other.domain_names);
        self.thread_names.append(&mut other.thread_names);
        for (key, (mut times, mut values)) in other.series {
            let all = self.series.entry(key).or_default();
            all.0.append(&mut times);
            all.1.append(&mut values);
        }
        self.faults.add(&other.faults);
        self.last_nvtx = self.last_nvtx.max(other.last_nvtx);
        self.has_graph_nodes |= other.has_graph_nodes;
        self.has_graphs |= other.has_graphs;
        self.rows += other.rows;
    }

    /// Start and end of a row, or `None` if it has to be left out.
    fn span(&mut self, row: &Row, side: &Side) -> Option<(i64, i64)> {
        let Some(start) = row.int(0) else {
            self.faults.no_time += 1;
            return None;
        };
        let end = row.int(1).unwrap_or(start);
        // What strobe converted from a profiler with an absolute clock is far from zero.
        let limit = if side.own { i64::MAX } else { TEN_YEARS_NS };
        if start.saturating_abs() > limit || end.saturating_abs() > limit {
            self.faults.absurd += 1;
            return None;
        }
        if end < start {
            self.faults.backward += 1;
        }
        Some((start, end.max(start)))
    }

    fn op(&mut self, row: &Row, side: &Side, kind: OpKind) -> Option<OpRow> {
        let (start, end) = self.span(row, side)?;
        let process = row.int(6).map_or(0, process_of);
        let graph_node = row.int(7).unwrap_or(0) as u64;
        self.has_graph_nodes |= graph_node != 0;
        Some(OpRow {
            start,
            end,
            name: StrId::NONE,
            kind,
            device: self.devices.number((process, row.int(2).unwrap_or(0))),
            stream: row.int(4).unwrap_or(0) as u32,
            context: row.int(3).unwrap_or(0) as u32,
            process: self.processes.number(process),
            correlation: row.int(5).unwrap_or(0),
            launch: NONE,
            graph_node,
            bytes: 0,
            detail: NONE,
            work: NONE,
            iteration: NONE,
        })
    }

    /// Adds an op with its detail, after what strobe's own tables say of it.
    fn push_op(&mut self, row: &Row, side: &Side, mut op: OpRow, mut detail: Option<OpDetail>) {
        if let Some(extra) = side.ops.get(&(op.kind, row.id)) {
            let OpExtra { name, work, iteration, no_detail, no_short_name } = *extra;
            if let Some(name) = name {
                op.name = self.names.id(name);
            }
            op.work = work;
            op.iteration = iteration;
            if let Some(OpDetail::Kernel(kernel)) = detail.as_mut().filter(|_| no_short_name) {
                kernel.short_name = StrId::NONE;
            }
            detail = detail.filter(|_| !no_detail);
        }
        op.detail = detail.map_or(NONE, |detail| self.details.number(detail));
        self.ops.push(op);
        self.rows += 1;
    }

    fn kernel(&mut self, row: &Row, side: &Side) {
        let Some(mut op) = self.op(row, side, OpKind::Kernel) else { return };
        let (full, short) = (row.int(MORE), row.int(MORE + 1));
        op.name = self.names.id_or_none(full.or(short));
        let number = |cell: usize| row.int(MORE + cell).unwrap_or(0) as u32;
        let detail = KernelDetail {
            short_name: self.names.id_or_none(short),
            grid: [number(2), number(3), number(4)],
            block: [number(5), number(6), number(7)],
            registers: number(8),
            static_shared: number(9),
            dynamic_shared: number(10),
        };
        self.push_op(row, side, op, Some(OpDetail::Kernel(detail)));
    }

    fn memcpy(&mut self, row: &Row, side: &Side) {
        let Some(mut op) = self.op(row, side, OpKind::Memcpy) else { return };
        let copy_kind = row.int(MORE + 1).unwrap_or(0);
        op.name = self.names.copy(copy_kind);
        op.bytes = row.int(MORE).unwrap_or(0) as u64;
        let device = |cell| row.int(cell).and_then(|device| u32::try_from(device).ok());
        let detail = OpDetail::Memcpy {
            copy_kind: copy_kind as u8,
            src_kind: memory_kind(row, MORE + 2),
            dst_kind: memory_kind(row, MORE + 3),
            src_device: device(MORE + 4),
            dst_device: device(MORE + 5),
            cause: if is_migration(copy_kind) { small(row, MORE + 6) } else { 0 },
        };
        self.push_op(row, side, op, Some(detail));
    }

    fn memset(&mut self, row: &Row, side: &Side) {
        let Some(mut op) = self.op(row, side, OpKind::Memset) else { return };
        op.name = self.names.fixed("[CUDA memset]");
        op.bytes = row.int(MORE).unwrap_or(0) as u64;
        let detail =
            OpDetail::Memset { value: row.int(MORE + 1).unwrap_or(0) as u32, mem_kind: memory_kind(row, MORE + 2) };
        self.push_op(row, side, op, Some(detail));
    }

    fn graph(&mut self, row: &Row, side: &Side) {
        let on_host = row.int(2) == Some(i64::from(i32::MAX));
        if !side.own && (on_host || (row.int(0) == Some(0) && row.int(1) == Some(0))) {
            self.faults.untimed_graphs += 1;
            return;
        }
        let Some(mut op) = self.op(row, side, OpKind::Graph) else { return };
        self.has_graphs = true;
        op.name = self.names.fixed("[CUDA graph]");
        let number = |cell| row.int(cell).unwrap_or(0) as u32;
        self.push_op(row, side, op, Some(OpDetail::Graph { graph: number(MORE), exec: number(MORE + 1) }));
    }

    fn read_call(&mut self, row: &Row, side: &Side, kind: CallKind) -> Option<CallRow> {
        let (start, end) = self.span(row, side)?;
        Some(CallRow {
            start,
            end,
            name: self.names.id_or_none(row.int(4)),
            thread: self.threads.number(row.int(2).unwrap_or(0)),
            correlation: row.int(3).unwrap_or(0),
            kind,
            result: row.int(5).unwrap_or(0) as i32,
        })
    }

    fn push_call(&mut self, call: CallRow) {
        self.calls.push(call);
        self.rows += 1;
    }

    fn call(&mut self, row: &Row, side: &Side, kind: CallKind) {
        let Some(mut call) = self.read_call(row, side, kind) else { return };
        if let Some(extra) = side.calls.get(&(kind, row.id)) {
            (call.correlation, call.result) = *extra;
        }
        self.push_call(call);
    }

    fn gpu_call(&mut self, row: &Row, side: &Side) {
        self.call(row, side, CallKind::Gpu);
    }

    fn os_call(&mut self, row: &Row, side: &Side) {
        if row.int(6) != Some(OSRT_START) {
            self.call(row, side, CallKind::OsRuntime);
        }
    }

    fn profiler_call(&mut self, row: &Row, side: &Side) {
        self.call(row, side, CallKind::Profiler);
    }

    /// The newer table of overheads. Its rows are not those of `PROFILER_OVERHEAD`, so they have no extras.
    fn profiler_overhead(&mut self, row: &Row, side: &Side) {
        if let Some(call) = self.read_call(row, side, CallKind::Profiler) {
            self.push_call(call);
        }
    }

    fn nvtx(&mut self, row: &Row, side: &Side) {
        const MARK: i64 = 34;
        const THREAD_NAME: i64 = 39;
        const DOMAIN: i64 = 75;
        let event_type = row.int(2).unwrap_or(0);
        let thread = row.int(3).unwrap_or(0);
        let domain = (process_of(thread), row.int(7).unwrap_or(0));
        let source = match event_type {
            59 | 70 | MARK => RangeSource::PushPop,
            60 | 71 => RangeSource::StartEnd,
            THREAD_NAME | DOMAIN => {
                let name = self.nvtx_name(row);
                if event_type == DOMAIN {
                    self.domain_names.push((domain, name));
                } else {
                    self.thread_names.push((thread, name));
                }
                return;
            }
            _ => return,
        };
        if side.op_events.contains(&row.id) {
            return;
        }
        let Some((start, end)) = self.span(row, side) else { return };
        self.last_nvtx = self.last_nvtx.max(end);
        let mut flags = 0;
        if event_type == MARK {
            flags |= range_flags::MARK;
        } else if row.int(1).is_none() {
            flags |= range_flags::UNCLOSED;
        }
        if row.int(4).is_some_and(|closer| closer != thread) {
            flags |= range_flags::CROSS_THREAD;
        }
        let mut range = RangeRow {
            start,
            end,
            name: self.nvtx_name(row),
            thread: self.threads.number(thread),
            domain: if domain.1 == 0 { StrId::NONE } else { StrId(self.domains.number(domain)) },
            source,
            kind: RangeKind::Other,
            flags,
            iteration: NONE,
            dims: StrId::NONE,
            types: StrId::NONE,
            values: StrId::NONE,
            strides: StrId::NONE,
        };
        if let Some(extra) = side.ranges.get(&row.id) {
            range.kind = extra.kind;
            range.iteration = extra.iteration;
            range.source = extra.source.unwrap_or(range.source);
            range.flags = extra.flags.unwrap_or(range.flags);
            range.end = extra.end.unwrap_or(range.end);
            range.dims = self.names.id_or_none(extra.dims);
            range.types = self.names.id_or_none(extra.types);
            range.values = self.names.id_or_none(extra.values);
            range.strides = self.names.id_or_none(extra.strides);
        }
        self.ranges.push(range);
        self.rows += 1;
    }

    /// Registered strings have their text in `StringIds` only.
    fn nvtx_name(&mut self, row: &Row) -> StrId {
        match row.int(5) {
            Some(id) => self.names.id(id),
            None => self.names.text(row.raw(6).unwrap_or_default()),
        }
    }

    fn sample(&mut self, row: &Row, _side: &Side) {
        let (Some(time), Some(value)) = (row.int(0), row.real(3)) else {
            self.faults.no_time += 1;
            return;
        };
        let key = (row.int(1).unwrap_or(0), row.int(2).unwrap_or(0));
        let (times, values) = self.series.entry(key).or_default();
        times.push(time);
        values.push(value);
        self.rows += 1;
    }

    fn allocation(&mut self, row: &Row, side: &Side) {
        const PAGEABLE: u8 = 0;
        const PINNED: u8 = 1;
        let Some(time) = row.int(0) else {
            self.faults.no_time += 1;
            return;
        };
        let process = row.int(1).map_or(0, process_of);
        let mem_kind = memory_kind(row, 5);
        let extra = side.allocations.get(&row.id);
        let device = match extra {
            Some(extra) => extra.device,
            None => (!matches!(mem_kind, PAGEABLE | PINNED)).then(|| row.int(2).unwrap_or(0)),
        };
        let bytes = row.int(4).unwrap_or(0);
        let mut allocation = Allocation {
            time,
            device: device.map(|device| self.devices.number((process, device))),
            process: self.processes.number(process),
            address: row.int(3).unwrap_or(0) as u64,
            bytes: if row.int(6) == Some(1) { bytes.saturating_neg() } else { bytes },
            mem_kind,
            name: row.raw(7).map_or(StrId::NONE, |name| self.names.text(name)),
            total_allocated: None,
            total_reserved: None,
        };
        if let Some(extra) = extra {
            allocation.mem_kind = extra.mem_kind;
            allocation.total_allocated = extra.total_allocated;
            allocation.total_reserved = extra.total_reserved;
        }
        self.allocations.push(allocation);
        self.rows += 1;
    }

    fn graph_node(&mut self, row: &Row, side: &Side) {
        let Some((start, end)) = self.span(row, side) else { return };
        self.graph_nodes.push(GraphNode {
            node: row.int(3).unwrap_or(0) as u64,
            original: row.int(4).unwrap_or(0) as u64,
            start,
            end,
            thread: self.threads.number(row.int(2).unwrap_or(0)),
        });
        self.rows += 1;
    }

    fn switch(&mut self, row: &Row, _side: &Side) {
        match self.moment(row) {
            Some(time) => self.switches.switch(row, time),
            None => return,
        }
        self.rows += 1;
    }

    fn cpu_sample(&mut self, row: &Row, _side: &Side) {
        match self.moment(row) {
            Some(time) => self.switches.sample(row, time),
            None => return,
        }
        self.rows += 1;
    }

    /// A function that a sample was in: no event by itself.
    fn frame(&mut self, row: &Row, _side: &Side) {
        self.switches.frame(row);
    }

    /// The first cell as a moment.
    fn moment(&mut self, row: &Row) -> Option<i64> {
        self.faults.no_time += u64::from(row.int(0).is_none());
        row.int(0)
    }

    fn cpu_page_fault(&mut self, row: &Row, _side: &Side) {
        let Some(start) = self.moment(row) else { return };
        let fault = PageFault {
            start,
            end: start,
            process: self.processes.number(row.int(1).map_or(0, process_of)),
            device: None,
            address: row.int(2).unwrap_or(0) as u64,
            count: 1,
            access: 0,
            function: self.names.id_or_none(row.int(3)),
        };
        self.page_faults.push(fault);
        self.rows += 1;
    }

    fn gpu_page_fault(&mut self, row: &Row, side: &Side) {
        let Some((start, end)) = self.span(row, side) else { return };
        let process = row.int(3).map_or(0, process_of);
        let fault = PageFault {
            start,
            end,
            process: self.processes.number(process),
            device: Some(self.devices.number((process, row.int(2).unwrap_or(0)))),
            address: row.int(4).unwrap_or(0) as u64,
            count: row.int(5).and_then(|count| u32::try_from(count).ok()).unwrap_or(1),
            access: small(row, 6),
            function: StrId::NONE,
        };
        self.page_faults.push(fault);
        self.rows += 1;
    }
}

/// CUPTI's kind of memory; 255 = not recorded.
fn memory_kind(row: &Row, cell: usize) -> u8 {
    row.int(cell).and_then(|kind| u8::try_from(kind).ok()).unwrap_or(u8::MAX)
}

/// A number of an enumeration; 0 = not recorded.
fn small(row: &Row, cell: usize) -> u8 {
    row.int(cell).and_then(|number| u8::try_from(number).ok()).unwrap_or(0)
}

/// Whether a kind of copy is a migration of unified memory.
fn is_migration(copy_kind: i64) -> bool {
    (11..=13).contains(&copy_kind)
}
