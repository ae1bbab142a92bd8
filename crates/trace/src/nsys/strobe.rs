//! What strobe's own tables (`STROBE_*`) say beyond Nsight Systems' tables.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::database::Database;
use super::ids::process_of;
use super::pages::Row;
use super::part::{Names, Part};
use super::schema::{self, key};
use crate::intern::FastHash;
use crate::{
    CallKind, Device, Distinct, ExpertLoad, Iteration, NONE, OpKind, OpRow, Peaks, Process, RangeKind, RangeSource,
    Source, StrId, Thread, TraceError, Window, Work,
};

/// The number that ops of a CPU engine have for their device where the file does not give one.
pub(super) const CPU_DEVICE: i64 = -1;

/// What strobe's tables add to events of nsys' tables, by row number, and what only they hold.
#[derive(Default)]
pub(super) struct Side {
    /// Whether strobe wrote the file.
    pub(super) own: bool,
    pub(super) ops: HashMap<(OpKind, i64), OpExtra, FastHash>,
    pub(super) calls: HashMap<(CallKind, i64), (i64, i32), FastHash>,
    pub(super) ranges: HashMap<i64, RangeExtra, FastHash>,
    pub(super) allocations: HashMap<i64, AllocationExtra, FastHash>,
    /// Rows of `NVTX_EVENTS` that stand for ops of a CPU engine.
    pub(super) op_events: HashSet<i64, FastHash>,
}

/// See [`Side::ops`].
pub(super) struct OpExtra {
    pub(super) name: Option<i64>,
    pub(super) work: u32,
    pub(super) iteration: u32,
    pub(super) no_detail: bool,
    pub(super) no_short_name: bool,
}

/// See [`Side::ranges`].
pub(super) struct RangeExtra {
    pub(super) kind: RangeKind,
    pub(super) iteration: u32,
    pub(super) source: Option<RangeSource>,
    pub(super) flags: Option<u8>,
    pub(super) end: Option<i64>,
    pub(super) dims: Option<i64>,
    pub(super) types: Option<i64>,
    pub(super) values: Option<i64>,
    pub(super) strides: Option<i64>,
}

/// See [`Side::allocations`].
pub(super) struct AllocationExtra {
    pub(super) device: Option<i64>,
    pub(super) mem_kind: u8,
    pub(super) total_allocated: Option<u64>,
    pub(super) total_reserved: Option<u64>,
}

/// Everything that strobe's tables hold.
#[derive(Default)]
pub(super) struct Own {
    pub(super) side: Side,
    /// The ops of a CPU engine.
    pub(super) cpu: Part,
    /// Meanings of ops; their names are numbered in `cpu`.
    pub(super) works: Vec<Work>,
    pub(super) iterations: Vec<Iteration>,
    pub(super) expert_loads: Vec<ExpertLoad>,
    pub(super) windows: Vec<Window>,
    pub(super) facts: BTreeMap<String, String>,
    /// In the order of the trace, with the number that events have for them.
    pub(super) processes: Vec<(i64, Process)>,
    pub(super) threads: Vec<(i64, Thread)>,
    pub(super) devices: Vec<(i64, Device)>,
    pub(super) sources: Vec<Source>,
    /// Devices of counters, by type and metric.
    pub(super) counters: HashMap<(i64, i64), Option<i64>>,
    /// Start, end, and the threads from and to which they go, as events name them.
    pub(super) flows: Vec<(i64, i64, i64, i64)>,
}

impl Own {
    /// Empty when the file is not strobe's.
    pub(super) fn read(database: &Database) -> Result<Self, TraceError> {
        let mut own = Self::default();
        own.side.own = database.has("STROBE_META");
        if !own.side.own {
            return Ok(own);
        }
        scan(database, "STROBE_META", |row| {
            let text = |cell| row.text(cell).unwrap_or_default().into_owned();
            own.facts.insert(text(0), text(1));
        })?;
        let version = own.facts.get(key::FORMAT_VERSION).map_or("", String::as_str);
        if !matches!(version, "1" | schema::FORMAT_VERSION) {
            let found = format!("a strobe trace of format version `{version}`");
            return Err(database.not_a_trace(found, "this strobe reads versions 1 and 2: record it again"));
        }
        let mut works = Distinct::default();
        own.read_cpu_ops(database, &mut works)?;
        own.read_extras(database, &mut works)?;
        own.works = works.into_values();
        own.read_loop(database)?;
        own.read_lists(database)?;
        own.read_flows(database)?;
        Ok(own)
    }

    fn read_cpu_ops(&mut self, database: &Database, works: &mut Distinct<Work>) -> Result<(), TraceError> {
        let (cpu, events) = (&mut self.cpu, &mut self.side.op_events);
        scan(database, "STROBE_OP", |row| {
            events.extend(row.int(0));
            let thread = row.int(3).unwrap_or(0);
            let process = process_of(thread);
            let start = row.int(1).unwrap_or(0);
            cpu.ops.push(OpRow {
                start,
                end: row.int(2).unwrap_or(start),
                name: row.int(4).map_or(StrId::NONE, |id| cpu.names.id(id)),
                kind: OpKind::CpuOp,
                device: cpu.devices.number((process, row.int(5).unwrap_or(CPU_DEVICE))),
                stream: cpu.threads.number(thread),
                context: 0,
                process: cpu.processes.number(process),
                correlation: 0,
                launch: NONE,
                graph_node: 0,
                bytes: 0,
                detail: NONE,
                work: work(row, 7, &mut cpu.names, works),
                iteration: number(row, 6),
            });
            cpu.rows += 1;
        })
    }

    fn read_extras(&mut self, database: &Database, works: &mut Distinct<Work>) -> Result<(), TraceError> {
        let names = &mut self.cpu.names;
        let side = &mut self.side;
        scan(database, "STROBE_GPU_OP", |row| {
            let kind = schema::op_kind(&row.text(0).unwrap_or_default());
            let (Some(kind), Some(event)) = (kind, row.int(1)) else { return };
            let detail = row.int(3);
            side.ops.insert(
                (kind, event),
                OpExtra {
                    name: row.int(2),
                    work: work(row, 5, names, works),
                    iteration: number(row, 4),
                    no_detail: detail == Some(schema::NO_DETAIL),
                    no_short_name: detail == Some(schema::NO_SHORT_NAME),
                },
            );
        })?;
        scan(database, "STROBE_RANGE", |row| {
            let Some(event) = row.int(0) else { return };
            side.ranges.insert(
                event,
                RangeExtra {
                    kind: RangeKind::from_name(&row.text(1).unwrap_or_default()).unwrap_or(RangeKind::Other),
                    iteration: number(row, 2),
                    source: row.text(3).and_then(|name| schema::range_source(&name)),
                    flags: row.int(4).map(|flags| flags as u8),
                    end: row.int(5),
                    dims: row.int(6),
                    types: row.int(7),
                    values: row.int(8),
                    strides: row.int(9),
                },
            );
        })?;
        scan(database, "STROBE_CALL", |row| {
            let kind = schema::call_kind(&row.text(0).unwrap_or_default());
            let (Some(kind), Some(event)) = (kind, row.int(1)) else { return };
            side.calls.insert((kind, event), (row.int(2).unwrap_or(0), row.int(3).unwrap_or(0) as i32));
        })?;
        scan(database, "STROBE_ALLOCATION", |row| {
            let Some(event) = row.int(0) else { return };
            side.allocations.insert(
                event,
                AllocationExtra {
                    device: row.int(1),
                    mem_kind: row.int(2).map_or(u8::MAX, |kind| kind as u8),
                    total_allocated: row.int(3).map(|bytes| bytes as u64),
                    total_reserved: row.int(4).map(|bytes| bytes as u64),
                },
            );
        })
    }

    fn read_loop(&mut self, database: &Database) -> Result<(), TraceError> {
        let count = |row: &Row, cell| row.int(cell).unwrap_or(0) as u32;
        scan(database, "STROBE_ITERATION", |row| {
            self.iterations.push(Iteration {
                iter: row.int(0).unwrap_or(0) as u64,
                // The kind in between follows from the counts.
                start: row.int(2).unwrap_or(0),
                end: row.int(3).unwrap_or(0),
                context_requests: count(row, 4),
                generation_requests: count(row, 5),
                context_tokens: count(row, 6),
                generation_tokens: count(row, 7),
                window: count(row, 8),
                // Files of earlier versions lack the column; nothing waits for less than no time.
                cpu_wait: row.int(9).filter(|ns| *ns >= 0),
            });
        })?;
        scan(database, "STROBE_EXPERT_LOAD", |row| {
            self.expert_loads.push(ExpertLoad {
                iter: row.int(0).unwrap_or(0) as u64,
                layer: count(row, 1),
                expert: count(row, 2),
                tokens: count(row, 3),
            });
        })?;
        scan(database, "STROBE_WINDOW", |row| {
            self.windows.push(Window {
                index: count(row, 0),
                first: row.int(1).unwrap_or(0) as u64,
                last: row.int(2).unwrap_or(0) as u64,
                complete: row.int(3) == Some(1),
            });
        })
    }

    fn read_flows(&mut self, database: &Database) -> Result<(), TraceError> {
        scan(database, "STROBE_FLOW", |row| {
            if let [Some(start), Some(end), Some(from), Some(to)] = [0, 1, 2, 3].map(|cell| row.int(cell)) {
                self.flows.push((start, end, from, to));
            }
        })
    }

    fn read_lists(&mut self, database: &Database) -> Result<(), TraceError> {
        let text = |row: &Row, cell| row.text(cell).unwrap_or_default().into_owned();
        scan(database, "STROBE_PROCESS", |row| {
            let process = Process {
                pid: row.int(1).unwrap_or(0),
                name: text(row, 2),
                rank: row.int(3).map(|rank| rank as u32),
                source: row.int(4).unwrap_or(0) as u16,
            };
            self.processes.push((row.int(0).unwrap_or(0), process));
        })?;
        scan(database, "STROBE_THREAD", |row| {
            let thread = Thread { process: 0, tid: row.int(1).unwrap_or(0), name: text(row, 2) };
            self.threads.push((row.int(0).unwrap_or(0), thread));
        })?;
        scan(database, "STROBE_DEVICE", |row| {
            let device = Device {
                ordinal: row.int(1).unwrap_or(0) as u32,
                source: row.int(2).unwrap_or(0) as u16,
                name: text(row, 3),
                is_cpu: row.int(4) == Some(1),
                memory_bytes: row.int(5).map(|bytes| bytes as u64),
                bytes_per_s: row.real(6),
                multiprocessors: row.int(7).map(|count| count as u32),
                clock_hz: row.real(8),
                compute_capability: row.int(9).zip(row.int(10)).map(|(major, minor)| (major as u32, minor as u32)),
            };
            self.devices.push((row.int(0).unwrap_or(0), device));
        })?;
        scan(database, "STROBE_SOURCE", |row| {
            self.sources.push(Source {
                path: Default::default(),
                format: text(row, 0),
                bytes: row.int(1).unwrap_or(0) as u64,
                events: row.int(2).unwrap_or(0) as u64,
                lost: row.int(3).unwrap_or(0) as u64,
                rank: row.int(4).map(|rank| rank as u32),
            });
        })?;
        scan(database, "STROBE_COUNTER", |row| {
            self.counters.insert((row.int(0).unwrap_or(0), row.int(1).unwrap_or(0)), row.int(2));
        })
    }

    /// What was measured of the hardware.
    pub(super) fn peaks(&self) -> Option<Peaks> {
        let number = |name: &str| self.facts.get(name)?.parse().ok();
        Some(Peaks {
            flops_per_s: number(key::PEAK_FLOPS)?,
            int8_ops_per_s: number(key::PEAK_INT8),
            bf16_flops_per_s: number(key::PEAK_BF16),
            bytes_per_s: number(key::PEAK_BYTES)?,
            note: self.facts.get(key::PEAK_NOTE).cloned().unwrap_or_default(),
        })
    }

    /// The facts whose names begin with `prefix`, without it.
    pub(super) fn facts_under<'s>(&'s self, prefix: &'s str) -> impl Iterator<Item = (&'s str, &'s str)> {
        self.facts.iter().filter_map(move |(name, value)| Some((name.strip_prefix(prefix)?, value.as_str())))
    }
}

/// Calls `visit` with every row of one of strobe's tables.
fn scan(database: &Database, table: &str, visit: impl FnMut(&Row)) -> Result<(), TraceError> {
    database.scan(table, &schema::columns(table), visit)
}

/// The meaning of an op: eight cells from `first` on, which says whether there is one.
fn work(row: &Row, first: usize, names: &mut Names, works: &mut Distinct<Work>) -> u32 {
    let Some(op) = row.int(first) else { return NONE };
    let whole = |cell| row.int(first + cell).unwrap_or(0) as u64;
    works.number(Work {
        op: names.id(op),
        category: row.int(first + 1).map_or(StrId::NONE, |id| names.id(id)),
        layer: row.int(first + 2).map(|layer| layer as u32),
        shape: [whole(3), whole(4), whole(5)],
        bytes: whole(6),
        flops: whole(7),
    })
}

/// A number, or [`NONE`].
fn number(row: &Row, cell: usize) -> u32 {
    row.int(cell).and_then(|n| u32::try_from(n).ok()).unwrap_or(NONE)
}
