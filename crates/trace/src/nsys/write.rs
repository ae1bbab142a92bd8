//! From a [`Trace`] to the file.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;

use rusqlite::types::Value;
use rusqlite::{Connection, Statement, params};

use super::ids::{GLOBAL_VID, MAX_ID, Numbers, global_pid};
use super::part::{GRAPH_TRACE, KERNEL, MEMCPY, MEMSET, OVERHEAD, RUNTIME};
use super::schema::{self, key};
use super::system::state_of;
use crate::atomic::write_whole;
use crate::{
    Allocation, CallKind, Flow, Interner, KernelDetail, NONE, OnCpu, OpDetail, OpKind, OpRow, PageFault, RangeKind,
    RangeRow, RangeSource, StrId, Trace, TraceError, range_flags, utc,
};

/// Writes the trace to `path` as an SQLite file with Nsight Systems' tables, replacing what is there. The file appears
/// whole or not at all. What the tables cannot hold stands in tables of strobe's own, so that [`read`](super::read())
/// gives every number back.
pub fn write(trace: &Trace, path: &Path) -> Result<(), TraceError> {
    check(trace)?;
    write_whole(path, |temporary| {
        let failed = |source| TraceError::Sqlite { action: "write".to_owned(), path: path.to_owned(), source };
        let mut database = Connection::open(temporary).map_err(failed)?;
        // The file is new and hidden until complete: nobody needs a rollback journal for it.
        database.execute_batch("PRAGMA page_size = 4096; PRAGMA journal_mode = OFF;").map_err(failed)?;
        let transaction = database.transaction().map_err(failed)?;
        Writer::new(trace, &transaction).fill().map_err(failed)?;
        transaction.commit().map_err(failed)?;
        database.close().map_err(|(_, source)| failed(source))
    })
}

/// Every index must lead somewhere: a reader would stumble later and further away.
fn check(trace: &Trace) -> Result<(), TraceError> {
    let invalid = |place: String, problem: &str| Err(TraceError::Invalid { place, problem: problem.to_owned() });
    let (threads, processes, devices) = (trace.threads.len(), trace.processes.len(), trace.devices.len());
    for (index, op) in trace.ops.iter().enumerate() {
        if op.process as usize >= processes || op.device as usize >= devices {
            return invalid(format!("ops[{index}]"), "its process or device is not in the trace");
        }
        if op.kind == OpKind::CpuOp && op.stream as usize >= threads {
            return invalid(format!("ops[{index}].stream"), "it is not a thread of the trace");
        }
    }
    let of_thread = |name: &str, column: &[u32]| match column.iter().position(|&t| t as usize >= threads) {
        Some(index) => invalid(format!("{name}[{index}].thread"), "it is not in the trace"),
        None => Ok(()),
    };
    of_thread("calls", &trace.calls.thread)?;
    of_thread("ranges", &trace.ranges.thread)?;
    of_thread("graph_nodes", &trace.graph_nodes.iter().map(|node| node.thread).collect::<Vec<_>>())?;
    if let Some(index) = trace.threads.iter().position(|t| t.process as usize >= processes) {
        return invalid(format!("threads[{index}].process"), "it is not in the trace");
    }
    let is_device = |device: Option<u32>| device.is_none_or(|device| (device as usize) < devices);
    let fits = |a: &Allocation| (a.process as usize) < processes && is_device(a.device);
    if let Some(index) = trace.allocations.iter().position(|a| !fits(a)) {
        return invalid(format!("allocations[{index}]"), "its process or device is not in the trace");
    }
    let known: Vec<u32> = trace.on_cpu.iter().map(|on| on.thread).filter(|&thread| thread != NONE).collect();
    of_thread("on_cpu", &known)?;
    of_thread("cpu_samples", &trace.cpu_samples.iter().map(|sample| sample.thread).collect::<Vec<_>>())?;
    let threads_of = |flow: &Flow| [flow.from, flow.to];
    of_thread("flows", &trace.flows.iter().flat_map(threads_of).collect::<Vec<_>>())?;
    let fits = |fault: &PageFault| (fault.process as usize) < processes && is_device(fault.device);
    if let Some(index) = trace.page_faults.iter().position(|fault| !fits(fault)) {
        return invalid(format!("page_faults[{index}]"), "its process or device is not in the trace");
    }
    for (index, counter) in trace.counters.iter().enumerate() {
        if !is_device(counter.device) || counter.times.len() != counter.values.len() {
            return invalid(format!("counters[{index}]"), "its device is not in the trace, or it lacks times");
        }
        if counter.values.iter().any(|value| value.is_nan()) {
            return invalid(format!("counters[{index}]"), "SQLite has no number for `not a number`");
        }
    }
    Ok(())
}

struct Writer<'a> {
    trace: &'a Trace,
    database: &'a Connection,
    /// The trace's strings keep their numbers; what only the file needs follows after them.
    strings: Interner,
    made: HashSet<&'static str>,
    /// The numbers that events have in the file, by index.
    processes: Vec<i64>,
    threads: Vec<i64>,
    devices: Vec<i64>,
}

/// A row being built for a table: columns that are not given stay NULL.
struct Inserter<'a> {
    statement: Statement<'a>,
    rows: i64,
}

impl Inserter<'_> {
    /// Adds a row and returns its number.
    fn add(&mut self, values: impl rusqlite::Params) -> rusqlite::Result<i64> {
        self.statement.execute(values)?;
        self.rows += 1;
        Ok(self.rows)
    }
}

type Done = rusqlite::Result<()>;

impl<'a> Writer<'a> {
    fn new(trace: &'a Trace, database: &'a Connection) -> Self {
        let mut taken = Numbers::default();
        let processes: Vec<i64> = trace.processes.iter().map(|process| global_pid(taken.free(process.pid))).collect();
        let mut taken: HashMap<u32, Numbers> = HashMap::new();
        let threads = trace.threads.iter().map(|thread| {
            processes[thread.process as usize] | taken.entry(thread.process).or_default().free(thread.tid)
        });
        let threads = threads.collect();
        // CPUs have negative numbers, so that a GPU keeps its own.
        let (mut taken, mut cpus) = (Numbers::default(), 0);
        let devices = trace.devices.iter().map(|device| {
            if device.is_cpu {
                cpus += 1;
                return -cpus;
            }
            taken.free(i64::from(device.ordinal))
        });
        let devices = devices.collect();
        Self { trace, database, strings: trace.strings.clone(), made: HashSet::new(), processes, threads, devices }
    }

    fn fill(mut self) -> Done {
        self.gpu_ops()?;
        self.calls()?;
        let ranges = self.ranges()?;
        self.cpu_ops(ranges)?;
        self.counters()?;
        self.allocations()?;
        self.graph_nodes()?;
        self.on_cpu()?;
        self.cpu_samples()?;
        self.page_faults()?;
        self.flows()?;
        self.lists()?;
        self.engine_loop()?;
        self.about()?;
        for (table, rows) in schema::ENUM_TABLES {
            self.database.execute_batch(&format!(
                "CREATE TABLE {table} (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT)"
            ))?;
            let mut row = self.database.prepare(&format!("INSERT INTO {table} VALUES (?, ?, ?)"))?;
            rows.iter().try_for_each(|entry| row.execute(*entry).map(drop))?;
        }
        let mut string = self.insert("StringIds", &["id", "value"])?;
        self.strings.iter().try_for_each(|(id, text)| string.add(params![id.0, text]).map(drop))
    }

    /// A statement that adds rows to a table, which is made if this is the first.
    fn insert(&mut self, table: &'static str, columns: &[&str]) -> rusqlite::Result<Inserter<'a>> {
        if self.made.insert(table) {
            let tables = schema::NSYS_TABLES.iter().chain(&schema::STROBE_TABLES);
            let body = tables.filter(|(name, _)| *name == table).map(|(_, body)| *body).next().unwrap_or_default();
            self.database.execute_batch(&format!("CREATE TABLE {table} ({body})"))?;
        }
        let places = vec!["?"; columns.len()].join(", ");
        let statement =
            self.database.prepare(&format!("INSERT INTO {table} ({}) VALUES ({places})", columns.join(", ")))?;
        Ok(Inserter { statement, rows: 0 })
    }

    /// The same for a table of strobe's own, with values for all its columns.
    fn insert_own(&mut self, table: &'static str) -> rusqlite::Result<Inserter<'a>> {
        self.insert(table, &schema::columns(table))
    }

    /// The number of a string in the file; columns of names may not be NULL.
    fn name(&mut self, id: StrId) -> u32 {
        if id.is_some() { id.0 } else { self.strings.intern("").0 }
    }

    /// Kernels, copies, fills and graphs.
    fn gpu_ops(&mut self) -> Done {
        for kind in [OpKind::Kernel, OpKind::Memcpy, OpKind::Memset, OpKind::Graph] {
            let of_kind: Vec<usize> = (0..self.trace.ops.len()).filter(|&i| self.trace.ops.kind[i] == kind).collect();
            if of_kind.is_empty() {
                continue;
            }
            let (table, more): (_, &[&str]) = match kind {
                OpKind::Kernel => (KERNEL, KERNEL_COLUMNS),
                OpKind::Memcpy => {
                    const COLUMNS: [&str; 8] = [
                        "graphNodeId",
                        "bytes",
                        "copyKind",
                        "srcKind",
                        "dstKind",
                        "srcDeviceId",
                        "dstDeviceId",
                        "migrationCause",
                    ];
                    (MEMCPY, &COLUMNS)
                }
                OpKind::Memset => (MEMSET, &["graphNodeId", "bytes", "value", "memKind"]),
                _ => (GRAPH_TRACE, &["graphId", "graphExecId"]),
            };
            let head = ["start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid"];
            let mut rows = self.insert(table, &[&head[..], more].concat())?;
            let mut extras = Vec::new();
            for index in of_kind {
                let op = self.trace.ops.get(index);
                let mut values: Vec<Value> = vec![
                    op.start.into(),
                    op.end.into(),
                    self.devices[op.device as usize].into(),
                    op.context.into(),
                    op.stream.into(),
                    op.correlation.into(),
                    self.processes[op.process as usize].into(),
                ];
                let written = self.detail_values(&op, &mut values);
                let event = rows.add(rusqlite::params_from_iter(values))?;
                let replaced =
                    (op.kind != OpKind::Kernel && written.name != self.trace.text(op.name)).then_some(op.name);
                if replaced.is_some() || written.lacks.is_some() || op.work != NONE || op.iteration != NONE {
                    extras.push((event, op, replaced, written.lacks));
                }
            }
            self.op_extras(kind, &extras)?;
        }
        Ok(())
    }

    /// Adds the values of the columns that only this kind of op has.
    fn detail_values(&mut self, op: &OpRow, values: &mut Vec<Value>) -> Written {
        let detail = self.trace.details.get(op.detail as usize).copied();
        let node = || if op.graph_node == 0 { Value::Null } else { Value::Integer(op.graph_node as i64) };
        let kind_of_memory = |kind: u8| if kind == u8::MAX { Value::Null } else { kind.into() };
        match op.kind {
            OpKind::Kernel => {
                let (kernel, lacks) = match detail {
                    Some(OpDetail::Kernel(kernel)) if kernel.short_name.is_some() => (kernel, None),
                    Some(OpDetail::Kernel(kernel)) => (kernel, Some(schema::NO_SHORT_NAME)),
                    _ => (KernelDetail::default(), Some(schema::NO_DETAIL)),
                };
                let full = self.name(op.name);
                let short = if kernel.short_name.is_some() { kernel.short_name.0 } else { full };
                values.push(node());
                values.extend([full, short].map(Value::from));
                values.extend(kernel.grid.map(Value::from));
                values.extend(kernel.block.map(Value::from));
                values.extend([kernel.registers, kernel.static_shared, kernel.dynamic_shared].map(Value::from));
                const REGULAR_LAUNCH: i64 = 1;
                values.extend([REGULAR_LAUNCH, 0, 0, 0].map(Value::from));
                Written { name: String::new(), lacks }
            }
            OpKind::Memcpy => {
                let (values_of, lacks) = match detail {
                    Some(OpDetail::Memcpy { copy_kind, src_kind, dst_kind, src_device, dst_device, cause }) => {
                        ((copy_kind, src_kind, dst_kind, src_device, dst_device, cause), None)
                    }
                    _ => {
                        let label = |kind: &u8| copy_name(*kind) == self.trace.text(op.name);
                        let kind = (0..schema::COPY_LABELS.len() as u8).find(label).unwrap_or(0);
                        ((kind, u8::MAX, u8::MAX, None, None, 0), Some(schema::NO_DETAIL))
                    }
                };
                let (copy_kind, src_kind, dst_kind, src_device, dst_device, cause) = values_of;
                values.extend([node(), (op.bytes as i64).into(), copy_kind.into()]);
                values.extend([kind_of_memory(src_kind), kind_of_memory(dst_kind)]);
                values.extend([src_device, dst_device].map(Value::from));
                values.push(if cause == 0 { Value::Null } else { cause.into() });
                Written { name: copy_name(copy_kind), lacks }
            }
            OpKind::Memset => {
                let (value, mem_kind, lacks) = match detail {
                    Some(OpDetail::Memset { value, mem_kind }) => (value, mem_kind, None),
                    _ => (0, u8::MAX, Some(schema::NO_DETAIL)),
                };
                values.extend([node(), (op.bytes as i64).into(), value.into(), kind_of_memory(mem_kind)]);
                Written { name: "[CUDA memset]".to_owned(), lacks }
            }
            _ => {
                let (graph, exec, lacks) = match detail {
                    Some(OpDetail::Graph { graph, exec }) => (graph, exec, None),
                    _ => (0, 0, Some(schema::NO_DETAIL)),
                };
                values.extend([graph, exec].map(Value::from));
                Written { name: "[CUDA graph]".to_owned(), lacks }
            }
        }
    }

    fn op_extras(&mut self, kind: OpKind, extras: &[(i64, OpRow, Option<StrId>, Option<i64>)]) -> Done {
        if extras.is_empty() {
            return Ok(());
        }
        let mut rows = self.insert_own("STROBE_GPU_OP")?;
        for (event, op, replaced, lacks) in extras {
            let name = replaced.map(|name| self.name(name));
            let mut values: Vec<Value> = vec![schema::op_kind_name(kind).to_owned().into(), (*event).into()];
            values.extend([Value::from(name), Value::from(*lacks), iteration_value(op.iteration)]);
            self.work_values(op.work, &mut values);
            rows.add(rusqlite::params_from_iter(values))?;
        }
        Ok(())
    }

    /// What an op means; all NULL where nothing is known.
    fn work_values(&mut self, work: u32, values: &mut Vec<Value>) {
        let Some(work) = self.trace.works.get(work as usize) else {
            values.extend(std::iter::repeat_n(Value::Null, WORK_COLUMNS));
            return;
        };
        let (op, category) = (self.name(work.op), self.name(work.category));
        let [m, n, k] = work.shape;
        values.extend([Value::from(op), Value::from(category), Value::from(work.layer)]);
        values.extend([m, n, k, work.bytes, work.flops].map(|number| Value::from(number as i64)));
    }

    fn calls(&mut self) -> Done {
        let mut extras = Vec::new();
        for kind in [CallKind::Gpu, CallKind::OsRuntime, CallKind::Profiler] {
            let of_kind: Vec<_> = self.trace.calls.iter().filter(|call| call.kind == kind).collect();
            // The newer table of overheads has a correlation, the older one a result.
            let (newer, usual): (Vec<_>, Vec<_>) = of_kind
                .into_iter()
                .partition(|call| kind == CallKind::Profiler && call.correlation != 0 && call.result == 0);
            if !usual.is_empty() {
                let (table, more): (_, &[&str]) = match kind {
                    CallKind::Gpu => (RUNTIME, &["eventClass", "correlationId"]),
                    CallKind::OsRuntime => ("OSRT_API", &["eventClass", "callchainId"]),
                    CallKind::Profiler => ("PROFILER_OVERHEAD", &[]),
                };
                let head = ["start", "end", "globalTid", "nameId", "returnValue"];
                let mut rows = self.insert(table, &[&head[..], more].concat())?;
                for call in usual {
                    let (name, thread) = (self.name(call.name), self.threads[call.thread as usize]);
                    let (start, end, result) = (call.start, call.end, call.result);
                    let event = match kind {
                        CallKind::Gpu => {
                            let class = event_class(self.trace.text(call.name));
                            rows.add(params![start, end, thread, name, result, class, call.correlation])?
                        }
                        CallKind::OsRuntime => rows.add(params![start, end, thread, name, result, OSRT_CLASS, 0])?,
                        CallKind::Profiler => rows.add(params![start, end, thread, name, result])?,
                    };
                    if kind != CallKind::Gpu && call.correlation != 0 {
                        extras.push((event, call));
                    }
                }
            }
            if !newer.is_empty() {
                let columns = ["start", "end", "eventClass", "globalTid", "correlationId", "nameId", "overheadType"];
                let mut rows = self.insert(OVERHEAD, &columns)?;
                for call in newer {
                    let (name, thread) = (self.name(call.name), self.threads[call.thread as usize]);
                    const OVERHEAD_CLASS: i64 = 103;
                    rows.add(params![call.start, call.end, OVERHEAD_CLASS, thread, call.correlation, name, 0])?;
                }
            }
        }
        if !extras.is_empty() {
            let mut rows = self.insert_own("STROBE_CALL")?;
            for (event, call) in extras {
                rows.add(params![schema::call_kind_name(call.kind), event, call.correlation, call.result])?;
            }
        }
        Ok(())
    }

    /// Writes the ranges and returns how many rows `NVTX_EVENTS` has then.
    fn ranges(&mut self) -> rusqlite::Result<i64> {
        if self.trace.ranges.is_empty() {
            return Ok(0);
        }
        let columns =
            ["start", "end", "eventType", "rangeId", "text", "globalTid", "endGlobalTid", "textId", "domainId"];
        let mut rows = self.insert("NVTX_EVENTS", &columns)?;
        let mut domains: BTreeMap<StrId, i64> = BTreeMap::new();
        for &domain in self.trace.ranges.domain.iter().filter(|domain| domain.is_some()) {
            let next = domains.len() as i64 + 1;
            domains.entry(domain).or_insert(next);
        }
        // A domain belongs to a process: each that uses it says what its number stands for.
        let mut told = BTreeSet::new();
        for (&domain, &thread) in self.trace.ranges.domain.iter().zip(&self.trace.ranges.thread) {
            let thread = self.threads[thread as usize];
            if domain.is_some() && told.insert((super::ids::process_of(thread), domain)) {
                let (none, text) = (None::<i64>, self.trace.text(domain));
                rows.add(params![0, none, DOMAIN_CREATE, none, text, thread, none, none, domains[&domain]])?;
            }
        }
        let mut extras = Vec::new();
        for range in self.trace.ranges.iter() {
            let is = |flag: u8| range.flags & flag != 0;
            let event_type = match range.source {
                _ if is(range_flags::MARK) => MARK,
                RangeSource::StartEnd | RangeSource::GpuAnnotation | RangeSource::Other => START_END,
                _ => PUSH_POP,
            };
            let end = (!is(range_flags::MARK) && !is(range_flags::UNCLOSED)).then_some(range.end);
            let thread = self.threads[range.thread as usize];
            // Which thread closed it is not known: any other will do.
            let closed_by = is(range_flags::CROSS_THREAD).then_some(thread ^ 1);
            let range_id = (event_type == START_END).then_some(rows.rows + 1);
            let domain = domains.get(&range.domain).copied().unwrap_or(0);
            let name = self.name(range.name);
            let none = None::<String>;
            let event =
                rows.add(params![range.start, end, event_type, range_id, none, thread, closed_by, name, domain])?;
            if needs_extra(&range, event_type) {
                extras.push((event, range));
            }
        }
        if !extras.is_empty() {
            let mut side = self.insert_own("STROBE_RANGE")?;
            for (event, range) in extras {
                side.add(params![
                    event,
                    range.kind.as_str(),
                    iteration_value(range.iteration),
                    schema::range_source_name(range.source),
                    range.flags,
                    range.end,
                    optional(range.dims),
                    optional(range.types),
                    optional(range.values),
                    optional(range.strides),
                ])?;
            }
        }
        Ok(rows.rows)
    }

    /// Ops of a CPU engine are NVTX ranges for other tools; what they are stands in a table of their own.
    fn cpu_ops(&mut self, events_before: i64) -> Done {
        let ops: Vec<usize> = (0..self.trace.ops.len()).filter(|&i| self.trace.ops.kind[i] == OpKind::CpuOp).collect();
        if ops.is_empty() {
            return Ok(());
        }
        let crossing = self.crossing_ops(&ops);
        let columns = ["start", "end", "eventType", "rangeId", "globalTid", "textId", "domainId"];
        let mut events = self.insert("NVTX_EVENTS", &columns)?;
        events.rows = events_before;
        let mut rows = self.insert_own("STROBE_OP")?;
        for index in ops {
            let op = self.trace.ops.get(index);
            let thread = self.threads[op.stream as usize];
            let kernel = self.name(op.name);
            let shown = self.trace.work_of(index).map_or(op.name, |work| work.op);
            let shown = self.name(shown);
            let (event_type, range_id) = match crossing.contains(&index) {
                true => (START_END, Some(events.rows + 1)),
                false => (PUSH_POP, None),
            };
            let event = events.add(params![op.start, op.end, event_type, range_id, thread, shown, 0])?;
            let mut values: Vec<Value> = [event, op.start, op.end, thread].map(Value::from).into();
            values.extend([kernel.into(), self.devices[op.device as usize].into(), iteration_value(op.iteration)]);
            self.work_values(op.work, &mut values);
            rows.add(rusqlite::params_from_iter(values))?;
        }
        Ok(())
    }

    /// Ops that do not nest with the push/pop ranges and the other ops of their thread: as push/pop ranges they would
    /// break the stack that readers of such ranges rely on.
    fn crossing_ops(&self, ops: &[usize]) -> HashSet<usize> {
        let (ranges, table) = (&self.trace.ranges, &self.trace.ops);
        let pushed = (0..ranges.len()).filter(|&i| ranges.source[i] == RangeSource::PushPop);
        let mut events: Vec<(u32, i64, std::cmp::Reverse<i64>, Option<usize>)> =
            pushed.map(|i| (ranges.thread[i], ranges.start[i], std::cmp::Reverse(ranges.end[i]), None)).collect();
        let of_op = |&i: &usize| (table.stream[i], table.start[i], std::cmp::Reverse(table.end[i]), Some(i));
        events.extend(ops.iter().map(of_op));
        events.sort_unstable();
        let mut crossing = HashSet::new();
        let mut open: Vec<(u32, i64)> = Vec::new();
        for (thread, start, std::cmp::Reverse(end), op) in events {
            while open.last().is_some_and(|&(other, until)| other != thread || until <= start) {
                open.pop();
            }
            let nests = open.last().is_none_or(|&(_, until)| end <= until);
            match op {
                Some(index) if !nests => drop(crossing.insert(index)),
                _ => open.push((thread, end)),
            }
        }
        crossing
    }

    fn counters(&mut self) -> Done {
        if self.trace.counters.is_empty() {
            return Ok(());
        }
        let mut names =
            self.insert("TARGET_INFO_GPU_METRICS", &["typeId", "sourceId", "typeName", "metricId", "metricName"])?;
        let mut devices = self.insert_own("STROBE_COUNTER")?;
        let columns = ["rawTimestamp", "timestamp", "typeId", "metricId", "value"];
        let mut samples = self.insert("GPU_METRICS", &columns)?;
        for (metric, counter) in (0_i64..).zip(&self.trace.counters) {
            const GPU_METRICS_SOURCE: i64 = GLOBAL_VID | 1 << 32;
            let device = counter.device.map(|device| self.devices[device as usize]);
            let kind = GPU_METRICS_SOURCE | (device.unwrap_or(0xFF) & 0xFF);
            names.add(params![kind, GPU_METRICS_SOURCE, "", metric, counter.name])?;
            devices.add(params![kind, metric, device])?;
            for (&time, &value) in counter.times.iter().zip(&counter.values) {
                samples.add(params![time, time, kind, metric, value])?;
            }
        }
        Ok(())
    }

    fn allocations(&mut self) -> Done {
        if self.trace.allocations.is_empty() {
            return Ok(());
        }
        let columns = [
            "start",
            "globalPid",
            "deviceId",
            "contextId",
            "address",
            "pc",
            "bytes",
            "memKind",
            "memoryOperationType",
            "name",
        ];
        let mut rows = self.insert("CUDA_GPU_MEMORY_USAGE_EVENTS", &columns)?;
        let mut extras = Vec::new();
        for allocation in &self.trace.allocations {
            const UNKNOWN_KIND: u8 = 7;
            let a = allocation;
            let device = a.device.map(|device| self.devices[device as usize]);
            let kind = if a.mem_kind == u8::MAX { UNKNOWN_KIND } else { a.mem_kind };
            let event = rows.add(params![
                a.time,
                self.processes[a.process as usize],
                device.unwrap_or(0),
                0,
                a.address as i64,
                0,
                a.bytes.saturating_abs(),
                kind,
                i64::from(a.bytes < 0),
                a.name.is_some().then(|| self.trace.text(a.name)),
            ])?;
            let on_host = matches!(a.mem_kind, 0 | 1);
            if on_host != device.is_none()
                || a.mem_kind == u8::MAX
                || a.total_allocated.is_some()
                || a.total_reserved.is_some()
            {
                extras.push((event, device, a));
            }
        }
        if !extras.is_empty() {
            let mut rows = self.insert_own("STROBE_ALLOCATION")?;
            for (event, device, a) in extras {
                let total = |bytes: Option<u64>| bytes.map(|bytes| bytes as i64);
                rows.add(params![event, device, a.mem_kind, total(a.total_allocated), total(a.total_reserved)])?;
            }
        }
        Ok(())
    }

    fn graph_nodes(&mut self) -> Done {
        if self.trace.graph_nodes.is_empty() {
            return Ok(());
        }
        let name = self.strings.intern("Graph Node Creation").0;
        let columns = ["start", "end", "eventClass", "globalTid", "nameId", "graphNodeId", "originalGraphNodeId"];
        let mut rows = self.insert("CUDA_GRAPH_NODE_EVENTS", &columns)?;
        for node in &self.trace.graph_nodes {
            const NODE_CREATION: i64 = 77;
            let original = (node.original != 0).then_some(node.original as i64);
            let thread = self.threads[node.thread as usize];
            rows.add(params![node.start, node.end, NODE_CREATION, thread, name, node.node as i64, original])?;
        }
        Ok(())
    }

    fn on_cpu(&mut self) -> Done {
        if self.trace.on_cpu.is_empty() {
            return Ok(());
        }
        // Threads of other programs have no number: one for each CPU, of a process that nothing else refers to.
        let mut taken = Numbers::default();
        for process in &self.trace.processes {
            taken.free(process.pid);
        }
        let others = global_pid(taken.free(0));
        let mut switches: Vec<(i64, bool, &OnCpu)> = Vec::with_capacity(2 * self.trace.on_cpu.len());
        for on in &self.trace.on_cpu {
            switches.extend([(on.start, true, on), (on.end, false, on)]);
        }
        // Stable: a time without length begins before it ends.
        switches.sort_by_key(|(time, ..)| *time);
        let columns = ["start", "cpu", "isSchedIn", "globalTid", "threadState"];
        let mut rows = self.insert("SCHED_EVENTS", &columns)?;
        for (time, got, on) in switches {
            let thread = self.threads.get(on.thread as usize).copied();
            let thread = thread.unwrap_or_else(|| others | i64::from(on.cpu) & MAX_ID);
            let state = if got { 0 } else { state_of(on.left) };
            rows.add(params![time, on.cpu, got, thread, state])?;
        }
        Ok(())
    }

    fn cpu_samples(&mut self) -> Done {
        if self.trace.cpu_samples.is_empty() {
            return Ok(());
        }
        let columns = ["id", "start", "globalTid", "cpuCycles"];
        let mut samples = self.insert("COMPOSITE_EVENTS", &columns)?;
        let columns = ["id", "symbol", "module", "unresolved", "stackDepth"];
        let mut frames = self.insert("SAMPLING_CALLCHAINS", &columns)?;
        for (id, sample) in (1_i64..).zip(&self.trace.cpu_samples) {
            samples.add(params![id, sample.time, self.threads[sample.thread as usize], 0])?;
            let unresolved = !sample.function.is_some();
            let (function, module) = (self.name(sample.function), self.name(sample.module));
            if sample.function.is_some() || sample.module.is_some() {
                frames.add(params![id, function, module, unresolved, 0])?;
            }
        }
        Ok(())
    }

    fn page_faults(&mut self) -> Done {
        let (of_gpu, of_cpu): (Vec<&PageFault>, Vec<&PageFault>) =
            self.trace.page_faults.iter().partition(|fault| fault.device.is_some());
        if !of_cpu.is_empty() {
            let columns = ["start", "globalPid", "address", "CpuInstruction", "module"];
            let mut rows = self.insert("CUDA_UM_CPU_PAGE_FAULT_EVENTS", &columns)?;
            for fault in of_cpu {
                let process = self.processes[fault.process as usize];
                let (function, module) = (self.name(fault.function), self.name(StrId::NONE));
                rows.add(params![fault.start, process, fault.address as i64, function, module])?;
            }
        }
        if !of_gpu.is_empty() {
            let columns = ["start", "end", "globalPid", "deviceId", "address", "numberOfPageFaults", "faultAccessType"];
            let mut rows = self.insert("CUDA_UM_GPU_PAGE_FAULT_EVENTS", &columns)?;
            for fault in of_gpu {
                let process = self.processes[fault.process as usize];
                let device = fault.device.map(|device| self.devices[device as usize]);
                let address = fault.address as i64;
                rows.add(params![fault.start, fault.end, process, device, address, fault.count, fault.access])?;
            }
        }
        Ok(())
    }

    /// Work for other threads, which nsys does not record.
    fn flows(&mut self) -> Done {
        if self.trace.flows.is_empty() {
            return Ok(());
        }
        let mut rows = self.insert_own("STROBE_FLOW")?;
        for flow in &self.trace.flows {
            let [from, to] = [flow.from, flow.to].map(|thread| self.threads[thread as usize]);
            rows.add(params![flow.start, flow.end, from, to])?;
        }
        Ok(())
    }

    /// Processes, threads, devices and files.
    fn lists(&mut self) -> Done {
        let mut rows = self.insert("PROCESSES", &["globalPid", "pid", "name"])?;
        let mut own = self.insert_own("STROBE_PROCESS")?;
        for (process, &id) in self.trace.processes.iter().zip(&self.processes) {
            rows.add(params![id, process.pid, process.name])?;
            own.add(params![id, process.pid, process.name, process.rank, process.source])?;
        }
        let mut rows = self.insert("ThreadNames", &["nameId", "globalTid"])?;
        let mut own = self.insert_own("STROBE_THREAD")?;
        for (index, thread) in self.trace.threads.iter().enumerate() {
            let id = self.threads[index];
            if !thread.name.is_empty() {
                rows.add(params![self.strings.intern(&thread.name).0, id])?;
            }
            own.add(params![id, thread.tid, thread.name])?;
        }
        let columns = [
            "vmId",
            "id",
            "name",
            "totalMemory",
            "memoryBandwidth",
            "clockRate",
            "smCount",
            "cuDevice",
            "computeMajor",
            "computeMinor",
        ];
        let mut rows = self.insert("TARGET_INFO_GPU", &columns)?;
        let mut own = self.insert_own("STROBE_DEVICE")?;
        for (device, &id) in self.trace.devices.iter().zip(&self.devices) {
            let memory = device.memory_bytes.map(|bytes| bytes as i64);
            let (major, minor) = device.compute_capability.unzip();
            if !device.is_cpu {
                let whole = |rate: Option<f64>| rate.map(|rate| rate as i64);
                let (bandwidth, clock) = (whole(device.bytes_per_s), whole(device.clock_hz));
                let processors = device.multiprocessors;
                rows.add(params![GLOBAL_VID, id, device.name, memory, bandwidth, clock, processors, id, major, minor])?;
            }
            own.add(params![
                id,
                device.ordinal,
                device.source,
                device.name,
                device.is_cpu,
                memory,
                device.bytes_per_s,
                device.multiprocessors,
                device.clock_hz,
                major,
                minor
            ])?;
        }
        let used = self.trace.ops.iter().filter(|op| op.kind != OpKind::CpuOp).map(|op| (op.process, op.device));
        let used: BTreeSet<(u32, u32)> = used.collect();
        let mut rows = self.insert("TARGET_INFO_CUDA_DEVICE", &["gpuId", "cudaId", "pid"])?;
        for (process, device) in used {
            let id = self.devices[device as usize];
            rows.add(params![id, id, super::ids::pid_of(self.processes[process as usize])])?;
        }
        let mut rows = self.insert_own("STROBE_SOURCE")?;
        for source in &self.trace.meta.sources {
            let [bytes, events, lost] = [source.bytes, source.events, source.lost].map(|n| n as i64);
            rows.add(params![source.format, bytes, events, lost, source.rank])?;
        }
        Ok(())
    }

    fn engine_loop(&mut self) -> Done {
        if !self.trace.iterations.is_empty() {
            let mut rows = self.insert_own("STROBE_ITERATION")?;
            for it in &self.trace.iterations {
                rows.add(params![
                    it.iter as i64,
                    it.kind().as_str(),
                    it.start,
                    it.end,
                    it.context_requests,
                    it.generation_requests,
                    it.context_tokens,
                    it.generation_tokens,
                    it.window,
                    it.cpu_wait,
                ])?;
            }
        }
        if !self.trace.expert_loads.is_empty() {
            let mut rows = self.insert_own("STROBE_EXPERT_LOAD")?;
            for load in &self.trace.expert_loads {
                rows.add(params![load.iter as i64, load.layer, load.expert, load.tokens])?;
            }
        }
        let mut rows = self.insert_own("STROBE_WINDOW")?;
        for window in &self.trace.meta.windows {
            rows.add(params![window.index, window.first as i64, window.last as i64, window.complete])?;
        }
        Ok(())
    }

    /// Session, capture, export and strobe's own facts.
    fn about(&mut self) -> Done {
        let (trace, meta) = (self.trace, &self.trace.meta);
        if let Some(begin) = meta.session_start_utc_ns {
            let mut row = self.insert("TARGET_INFO_SESSION_START_TIME", &["utcEpochNs", "utcTime"])?;
            row.add(params![begin, utc::to_text(begin)])?;
        }
        let (first, last) = trace.extent().unwrap_or((0, 0));
        let mut row = self.insert("ANALYSIS_DETAILS", &["globalVid", "duration", "startTime", "stopTime"])?;
        row.add(params![GLOBAL_VID, last.saturating_sub(first), first, last])?;

        let mut row = self.insert("META_DATA_CAPTURE", &["name", "value"])?;
        let recorded = [
            ("Cuda", trace.ops.kind.iter().any(|kind| *kind != OpKind::CpuOp)),
            ("NvtxEvents", self.made.contains("NVTX_EVENTS")),
            ("OSRuntime", self.made.contains("OSRT_API")),
        ];
        for (name, _) in recorded.iter().filter(|(_, is)| *is) {
            row.add(params!["CAPTURE_EVENT_TYPE", name])?;
        }
        if let Some(mode) = meta.graph_mode {
            let mode = match mode {
                crate::GraphMode::Graph => "Graph",
                crate::GraphMode::Node => "Node",
            };
            row.add(params!["CUDA_GRAPH_TRACE_OPTIONS:MODE", mode])?;
        }
        let mut row = self.insert("META_DATA_EXPORT", &["name", "value"])?;
        for (name, value) in [
            ("EXPORT_PRODUCT_NAME", "strobe"),
            ("EXPORT_PRODUCT_VERSION", env!("CARGO_PKG_VERSION")),
            ("EXPORT_SCHEMA_VERSION", "3.20.3"),
            ("EXPORT_SCHEMA_VERSION_MAJOR", "3"),
            ("EXPORT_SCHEMA_VERSION_MINOR", "20"),
            ("EXPORT_SCHEMA_VERSION_MICRO", "3"),
        ] {
            row.add(params![name, value])?;
        }
        let mut facts: Vec<(String, String)> = [
            (key::FORMAT_VERSION, schema::FORMAT_VERSION.to_owned()),
            (key::PRODUCER, meta.producer.clone()),
            (key::PARTIAL, u8::from(meta.partial).to_string()),
            (key::OPS, trace.ops.len().to_string()),
            (key::CALLS, trace.calls.len().to_string()),
            (key::RANGES, trace.ranges.len().to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        if let Some(peaks) = &meta.peaks {
            // `{}` of a float prints the shortest text that reads back as the same number.
            facts.push((key::PEAK_FLOPS.to_owned(), peaks.flops_per_s.to_string()));
            facts.extend(peaks.int8_ops_per_s.map(|ops| (key::PEAK_INT8.to_owned(), ops.to_string())));
            facts.extend(peaks.bf16_flops_per_s.map(|flops| (key::PEAK_BF16.to_owned(), flops.to_string())));
            facts.push((key::PEAK_BYTES.to_owned(), peaks.bytes_per_s.to_string()));
            facts.push((key::PEAK_NOTE.to_owned(), peaks.note.clone()));
        }
        facts.extend(meta.extra.iter().map(|(name, value)| (format!("{}{name}", key::EXTRA), value.clone())));
        // Facts are read back in the order of their names.
        let notices = meta.notices.iter().enumerate();
        facts.extend(notices.map(|(index, notice)| (format!("{}{index:06}", key::NOTICE), notice.clone())));
        let mut row = self.insert_own("STROBE_META")?;
        facts.iter().try_for_each(|(name, value)| row.add(params![name, value]).map(drop))
    }
}

/// What a row of nsys' tables says of an op: the name that a reader will give it, and what only looks recorded.
struct Written {
    name: String,
    lacks: Option<i64>,
}

const KERNEL_COLUMNS: &[&str] = &[
    "graphNodeId",
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
    "dynamicSharedMemory",
    "launchType",
    "localMemoryPerThread",
    "localMemoryTotal",
    "gridId",
];

/// Columns of what an op means.
const WORK_COLUMNS: usize = 8;

const MARK: i64 = 34;
const PUSH_POP: i64 = 59;
const START_END: i64 = 60;
const DOMAIN_CREATE: i64 = 75;
const OSRT_CLASS: i64 = 27;

/// What a copy is called by its kind, e.g. `[CUDA memcpy Host-to-Device]`. Kinds are CUPTI's numbers.
pub fn copy_name(kind: u8) -> String {
    format!("[CUDA memcpy {}]", schema::COPY_LABELS.get(usize::from(kind)).unwrap_or(&"Unknown"))
}

/// Runtime or driver, by the function's name: `cudaMalloc` against `cuMemAlloc`.
fn event_class(name: &str) -> i64 {
    i64::from(name.starts_with("cu") && !name.starts_with("cuda"))
}

fn iteration_value(iteration: u32) -> Value {
    if iteration == NONE { Value::Null } else { iteration.into() }
}

fn optional(id: StrId) -> Option<u32> {
    id.is_some().then_some(id.0)
}

/// Whether a row of `NVTX_EVENTS` of this type says less of the range than is known.
fn needs_extra(range: &RangeRow, event_type: i64) -> bool {
    let source = if event_type == START_END { RangeSource::StartEnd } else { RangeSource::PushPop };
    let ends_at_start = event_type == MARK && range.end == range.start;
    let closed = range.flags & range_flags::UNCLOSED == 0;
    range.kind != RangeKind::Other
        || range.iteration != NONE
        || range.source != source
        || range.dims.is_some()
        || range.types.is_some()
        || range.values.is_some()
        || range.strides.is_some()
        || !closed
        || (event_type == MARK && !ends_at_start)
}
