//! From events to the columns of a [`Trace`].

mod finish;
mod flows;
mod processes;
mod roots;
mod tracks;
mod words;

use std::collections::HashMap;

use super::event::{Class, Event};
use super::json::unquoted;
use super::number::{float, integer, micros_to_nanos, unsigned};
use crate::intern::FastHash;
use crate::ranks::WORLD_SIZE;
use crate::{
    Allocation, CallKind, CallRow, Counter, Distinct, Iteration, KernelDetail, NONE, OpDetail, OpKind, OpRow,
    RangeKind, RangeRow, RangeSource, StrId, Trace, range_flags,
};
use words::{
    annotation_source, copy_detail, for_each_argument, has_value, has_zero, intern, memset_memory, small, split_label,
    text, trailing_number, triple, without_arguments,
};

pub(super) use words::grouped;

type ByText<T> = HashMap<Vec<u8>, T, FastHash>;

/// Fills a trace event by event. One file may hold several roots, one behind the other: each is a rank.
pub(super) struct Builder {
    trace: Trace,
    details: Distinct<OpDetail>,
    scratch: String,
    /// The parts of the file within which process ids and correlations are unique.
    groups: Vec<Group>,
    processes: Vec<FoundProcess>,
    /// The group and ordinal of each device.
    devices: HashMap<(u32, u32), u32, FastHash>,
    device_groups: Vec<u32>,
    /// What belongs to the device's side, by thread: its group and device.
    gpu_threads: HashMap<u32, (u32, u32), FastHash>,
    pending_allocations: Vec<(Allocation, u32, u32)>,
    /// The group and process text of each counter.
    counter_owners: Vec<(u32, Vec<u8>)>,
    /// The process of each device where the file tells it.
    users: HashMap<u32, u32, FastHash>,
    root: Root,
    first_base: Option<i64>,
    properties: Vec<(u32, serde_json::Value)>,
    pub(super) events: u64,
    pub(super) untimed: u64,
    /// Left out: years away from the others.
    pub(super) absurd: u64,
    /// Kept with no length: they end before they start.
    pub(super) backward: u64,
    /// Left out: they do not say what they are (`ph`).
    pub(super) no_phase: u64,
    unread: u64,
    roots: u32,
}

/// What holds for one root of the file only.
#[derive(Default)]
struct Root {
    first_group: u32,
    /// How many processes and pending allocations came before it.
    first_process: usize,
    first_pending: usize,
    /// How many flows came before it, and what makes its own.
    first_flow: usize,
    autograd: flows::Autograd,
    rank: Option<u32>,
    base: Option<i64>,
    groups: ByText<u32>,
    processes: ByText<u32>,
    threads: ByText<u32>,
    streams: ByText<u32>,
    last_thread: (Vec<u8>, Vec<u8>, u32),
    process_names: ByText<String>,
    thread_names: ByText<String>,
    /// Tracks that strobe made for spans that overlap: process and track, and the thread they belong to.
    lanes: ByText<Vec<u8>>,
    /// The processes that used a device each, where strobe wrote it: the device's number and the process.
    users: Vec<(u32, Vec<u8>)>,
    open: HashMap<u32, Vec<Row>, FastHash>,
    counters: ByText<usize>,
    /// How many ops, calls, ranges, allocations and counters came before it.
    before: [usize; 5],
    last_time: i64,
}

#[derive(Clone, Debug, Default)]
struct Group {
    label: Vec<u8>,
    rank: Option<u32>,
}

struct FoundProcess {
    group: u32,
    /// Whether the file gives a number for it.
    numbered: bool,
    key: Vec<u8>,
}

enum Row {
    Op(OpRow),
    Call(CallRow),
    Range(RangeRow),
}

impl Builder {
    pub(super) fn new() -> Self {
        Self {
            trace: Trace::default(),
            details: Distinct::default(),
            scratch: String::new(),
            groups: Vec::new(),
            processes: Vec::new(),
            devices: HashMap::default(),
            device_groups: Vec::new(),
            gpu_threads: HashMap::default(),
            pending_allocations: Vec::new(),
            counter_owners: Vec::new(),
            users: HashMap::default(),
            root: Root::default(),
            first_base: None,
            properties: Vec::new(),
            events: 0,
            untimed: 0,
            absurd: 0,
            backward: 0,
            no_phase: 0,
            unread: 0,
            roots: 0,
        }
    }

    /// Takes over one event.
    pub(super) fn add(&mut self, event: &Event) {
        let [phase] = *event.phase else {
            // Writers that end every event with a comma end their list with an empty one.
            let is_filler = [event.name, event.category, event.ts, event.args].iter().all(|field| field.is_empty());
            self.no_phase += u64::from(!is_filler);
            return;
        };
        self.events += 1;
        match phase {
            b'X' | b'B' => {
                let class = Class::of(event.category);
                if class == Class::Ignored {
                    return;
                }
                let start = micros_to_nanos(event.ts);
                let duration = if event.dur.is_empty() { Some(0) } else { micros_to_nanos(event.dur) };
                let (Some(start), Some(duration)) = (start, duration) else {
                    self.untimed += 1;
                    return;
                };
                let Some(end) = start.checked_add(duration) else {
                    self.untimed += 1;
                    return;
                };
                self.root.last_time = self.root.last_time.max(end);
                let Some((row, thread)) = self.row(event, class, start, end) else { return };
                self.backward += u64::from(end < start);
                if phase == b'X' {
                    self.push(row);
                } else {
                    let thread = thread.unwrap_or_else(|| self.thread(event.pid, event.tid));
                    self.root.open.entry(thread).or_default().push(row);
                }
            }
            b'E' => self.close(event),
            b'i' | b'I' | b'R' => self.instant(event),
            b'C' => self.counter(event),
            b'M' => self.metadata(event),
            b's' | b'f' if flows::is_autograd(event.category) => self.arrow(event, phase == b's'),
            b's' | b't' | b'f' => {}
            _ => self.unread += 1,
        }
    }

    fn push(&mut self, row: Row) {
        match row {
            Row::Op(row) => self.trace.ops.push(row),
            Row::Call(row) => self.trace.calls.push(row),
            Row::Range(row) => self.trace.ranges.push(row),
        }
    }

    /// The row of an event with its thread, where it has one.
    fn row(&mut self, event: &Event, class: Class, start: i64, end: i64) -> Option<(Row, Option<u32>)> {
        if class == Class::Sync {
            return None;
        }
        if class == Class::Iteration {
            self.iteration(event, start, end);
            return None;
        }
        let recorded_name = event.known.recorded_name;
        let name = self.intern(if recorded_name.is_empty() { event.name } else { recorded_name });
        if class.is_gpu_op() {
            return Some((Row::Op(self.op(event, class, name, start, end)), None));
        }
        let args = &event.known;
        let source = match class {
            Class::CpuOp if event.name.starts_with(b"ProfilerStep#") => RangeSource::Annotation,
            Class::CpuOp => RangeSource::CpuOp,
            Class::Python => RangeSource::Python,
            Class::Annotation => annotation_source(args.recorded_source),
            Class::GpuAnnotation => RangeSource::GpuAnnotation,
            _ => RangeSource::Other,
        };
        let thread = match class {
            Class::GpuAnnotation => self.stream_thread(event),
            _ => self.thread(event.pid, event.tid),
        };
        let row = match class {
            Class::Call | Class::OsCall | Class::Overhead => Row::Call(CallRow {
                start,
                end,
                name,
                thread,
                correlation: integer(args.correlation).unwrap_or(0),
                kind: match class {
                    Class::Call => CallKind::Gpu,
                    Class::OsCall => CallKind::OsRuntime,
                    _ => CallKind::Profiler,
                },
                result: integer(args.result).and_then(|result| i32::try_from(result).ok()).unwrap_or(0),
            }),
            _ => {
                let mut row = range(start, end, name, thread, source);
                if class == Class::CpuOp {
                    (row.dims, row.types) = (self.intern_json(args.dims), self.intern_json(args.types));
                    // Most operators have no values, and tensors without a stride of 0 need none of their strides.
                    if has_value(args.values) {
                        row.values = self.intern_json(args.values);
                    }
                    if has_zero(args.strides) {
                        row.strides = self.intern_json(args.strides);
                    }
                    if !args.sequence.is_empty() {
                        self.sequence(event, start, thread);
                    }
                }
                Row::Range(self.as_recorded(row, event))
            }
        };
        Some((row, Some(thread)))
    }

    fn op(&mut self, event: &Event, class: Class, name: StrId, start: i64, end: i64) -> OpRow {
        let args = &event.known;
        let (group, pid) = self.group(event.pid);
        let ordinal = small(args.device).or_else(|| small(pid)).unwrap_or(0);
        let device = self.device(group, ordinal);
        let detail = match class {
            Class::Kernel => {
                let launch = KernelDetail {
                    short_name: StrId::NONE,
                    grid: triple(args.grid),
                    block: triple(args.block),
                    registers: small(args.registers).unwrap_or(0),
                    static_shared: small(args.static_shared).unwrap_or(0),
                    dynamic_shared: small(args.shared)
                        .unwrap_or(0)
                        .saturating_sub(small(args.static_shared).unwrap_or(0)),
                };
                if launch == KernelDetail::default() { NONE } else { self.details.number(OpDetail::Kernel(launch)) }
            }
            Class::Memcpy => self.details.number(copy_detail(event)),
            Class::Memset => match small(args.value) {
                Some(value) => self.details.number(OpDetail::Memset { value, mem_kind: memset_memory(event.name) }),
                None => NONE,
            },
            Class::Graph => {
                let (graph, exec) = (small(args.graph).unwrap_or(0), small(args.graph_exec).unwrap_or(0));
                self.details.number(OpDetail::Graph { graph, exec })
            }
            _ => NONE,
        };
        OpRow {
            start,
            end,
            name,
            kind: match class {
                Class::Memcpy => OpKind::Memcpy,
                Class::Memset => OpKind::Memset,
                Class::Graph => OpKind::Graph,
                _ => OpKind::Kernel,
            },
            device,
            stream: small(args.stream).or_else(|| trailing_number(event.tid)).unwrap_or(0),
            context: small(args.context).unwrap_or(0),
            process: group, // becomes the launching process when all calls are known
            correlation: integer(args.correlation).unwrap_or(0),
            launch: NONE,
            graph_node: unsigned(args.graph_node).unwrap_or(0),
            bytes: if class == Class::Kernel { 0 } else { unsigned(args.bytes).unwrap_or(0) },
            detail,
            work: NONE,
            iteration: NONE,
        }
    }

    /// Ends the innermost open event of the thread.
    fn close(&mut self, event: &Event) {
        let Some(time) = micros_to_nanos(event.ts) else {
            self.untimed += 1;
            return;
        };
        self.root.last_time = self.root.last_time.max(time);
        let thread = self.thread(event.pid, event.tid);
        match self.root.open.get_mut(&thread).and_then(Vec::pop) {
            Some(mut row) => {
                self.backward += u64::from(time < row.start());
                *row.end() = time;
                self.push(row);
            }
            None => self.unread += 1,
        }
    }

    fn instant(&mut self, event: &Event) {
        if event.name == b"[memory]" {
            return self.memory(event);
        }
        // The profiler's own marks stand on no real process.
        let (_, pid) = split_label(event.pid);
        let is_strobes = !event.known.recorded_source.is_empty();
        let is_profilers = Class::of(event.category) != Class::Other && !is_strobes;
        if is_profilers || matches!(pid, b"Traces" | b"Spans" | b"") {
            return;
        }
        let Some(time) = micros_to_nanos(event.ts) else {
            self.untimed += 1;
            return;
        };
        let (name, thread) = (self.intern(event.name), self.thread(event.pid, event.tid));
        let source = if is_strobes { annotation_source(event.known.recorded_source) } else { RangeSource::Other };
        let row = self.as_recorded(range(time, time, name, thread, source), event);
        self.push(Row::Range(RangeRow { flags: row.flags | range_flags::MARK, ..row }));
    }

    fn memory(&mut self, event: &Event) {
        let Some(time) = micros_to_nanos(event.ts) else {
            self.untimed += 1;
            return;
        };
        let (mut bytes, mut address, mut ordinal, mut kind) = (0, 0, None, None);
        let (mut total_allocated, mut total_reserved) = (None, None);
        let (mut memory, mut owner) = (None, StrId::NONE);
        for_each_argument(event.args, |key, value| match key {
            b"Bytes" => bytes = integer(value).unwrap_or(0),
            b"Addr" | b"Ptr" => address = unsigned(value).unwrap_or(0),
            b"Device Id" => ordinal = small(value),
            b"Device Type" => kind = small(value),
            b"Total Allocated" => total_allocated = unsigned(value),
            b"Total Reserved" => total_reserved = unsigned(value),
            b"memory kind" => memory = small(value).and_then(|kind| u8::try_from(kind).ok()),
            b"name" => owner = intern(&mut self.trace.strings, &mut self.scratch, value),
            _ => {}
        });
        // PyTorch's device type 0 is the CPU; its device id is then -1 or 0.
        let on_host = kind == Some(0) || ordinal.is_none();
        let thread = self.thread(event.pid, event.tid);
        let process = self.trace.threads.get(thread as usize).map_or(0, |thread| thread.process);
        let (group, _) = self.group(event.pid);
        let allocation = Allocation {
            time,
            device: None,
            process,
            address,
            bytes,
            mem_kind: memory.unwrap_or(if on_host { 0 } else { 2 }),
            name: owner,
            total_allocated,
            total_reserved,
        };
        if on_host {
            self.trace.allocations.push(allocation);
        } else {
            self.pending_allocations.push((allocation, group, ordinal.unwrap_or(0)));
        }
    }

    fn counter(&mut self, event: &Event) {
        let Some(time) = micros_to_nanos(event.ts) else {
            self.untimed += 1;
            return;
        };
        let (group, _) = self.group(event.pid);
        let mut key = [event.pid, b"\0", event.name, b"\0"].concat();
        let prefix = key.len();
        for_each_argument(event.args, |argument, value| {
            let Some(value) = float(value) else { return };
            key.truncate(prefix);
            key.extend_from_slice(argument);
            let index = *self.root.counters.entry(key.clone()).or_insert_with(|| {
                let (name, argument) = (text(event.name), text(argument));
                let name = if name == argument || argument == "value" { name } else { format!("{name} {argument}") };
                self.trace.counters.push(Counter { name, ..Counter::default() });
                self.counter_owners.push((group, event.pid.to_vec()));
                self.trace.counters.len() - 1
            });
            let counter = &mut self.trace.counters[index];
            counter.times.push(time);
            counter.values.push(value);
        });
    }

    fn metadata(&mut self, event: &Event) {
        let mut found = None;
        for_each_argument(event.args, |key, value| {
            if key == b"name" {
                found = Some(text(value));
            }
        });
        let Some(found) = found.filter(|name| !name.is_empty()) else { return };
        match event.name {
            b"process_name" => drop(self.root.process_names.insert(event.pid.to_vec(), without_arguments(found))),
            b"thread_name" => {
                let key = [event.pid, b"\0", event.tid].concat();
                self.root.thread_names.insert(key, found);
            }
            _ => {}
        }
    }

    fn intern(&mut self, raw: &[u8]) -> StrId {
        intern(&mut self.trace.strings, &mut self.scratch, raw)
    }

    /// Keeps an array as one line of text.
    fn intern_json(&mut self, raw: &[u8]) -> StrId {
        if raw.is_empty() {
            return StrId::NONE;
        }
        if !raw.contains(&b'\n') {
            return self.trace.strings.intern(&String::from_utf8_lossy(raw));
        }
        self.scratch.clear();
        let mut in_string = false;
        let mut escaped = false;
        for character in String::from_utf8_lossy(raw).chars() {
            let quote = character == '"' && !escaped;
            in_string ^= quote;
            escaped = character == '\\' && !escaped;
            if in_string || character > ' ' {
                self.scratch.push(character);
                if character == ',' && !in_string {
                    self.scratch.push(' ');
                }
            }
        }
        self.trace.strings.intern(&self.scratch)
    }

    /// Restores what strobe wrote about a range.
    fn as_recorded(&mut self, row: RangeRow, event: &Event) -> RangeRow {
        let args = &event.known;
        let kind = std::str::from_utf8(args.phase).ok().and_then(RangeKind::from_name);
        RangeRow {
            domain: if args.domain.is_empty() { StrId::NONE } else { self.intern(args.domain) },
            kind: kind.unwrap_or(RangeKind::Other),
            iteration: small(args.iteration).unwrap_or(NONE),
            ..row
        }
    }

    fn iteration(&mut self, event: &Event, start: i64, end: i64) {
        let mut row = Iteration {
            iter: 0,
            start,
            end,
            context_requests: 0,
            generation_requests: 0,
            context_tokens: 0,
            generation_tokens: 0,
            window: 0,
            cpu_wait: None,
        };
        for_each_argument(event.args, |key, value| {
            let small = small(value).unwrap_or(0);
            match key {
                b"iter" => row.iter = unsigned(value).unwrap_or(0),
                b"context_requests" => row.context_requests = small,
                b"generation_requests" => row.generation_requests = small,
                b"context_tokens" => row.context_tokens = small,
                b"generation_tokens" => row.generation_tokens = small,
                b"window" => row.window = small,
                b"cpu_wait_ns" => row.cpu_wait = unsigned(value).and_then(|ns| i64::try_from(ns).ok()),
                _ => {}
            }
        });
        self.trace.iterations.push(row);
    }

    /// Takes over a value of the root object.
    pub(super) fn root_value(&mut self, key: &[u8], value: &[u8]) {
        match key {
            b"strobe" => self.strobes_tracks(value),
            b"baseTimeNanoseconds" => self.root.base = integer(unquoted(value)),
            b"distributedInfo" => {
                let info: Option<serde_json::Value> = serde_json::from_slice(value).ok();
                let rank = info.as_ref().and_then(|info| info.get("rank")).and_then(serde_json::Value::as_u64);
                self.root.rank = rank.and_then(|rank| u32::try_from(rank).ok());
                let size = info.as_ref().and_then(|info| info.get("world_size")).and_then(serde_json::Value::as_u64);
                if let Some(size) = size {
                    self.trace.meta.extra.entry(WORLD_SIZE.to_owned()).or_insert_with(|| size.to_string());
                }
            }
            b"deviceProperties" => {
                let list: Option<Vec<serde_json::Value>> = serde_json::from_slice(value).ok();
                let group = self.root.first_group;
                self.properties.extend(list.into_iter().flatten().map(|device| (group, device)));
            }
            _ => {}
        }
    }
}

impl Row {
    fn start(&self) -> i64 {
        match self {
            Row::Op(row) => row.start,
            Row::Call(row) => row.start,
            Row::Range(row) => row.start,
        }
    }

    fn end(&mut self) -> &mut i64 {
        match self {
            Row::Op(row) => &mut row.end,
            Row::Call(row) => &mut row.end,
            Row::Range(row) => &mut row.end,
        }
    }
}

fn range(start: i64, end: i64, name: StrId, thread: u32, source: RangeSource) -> RangeRow {
    RangeRow {
        start,
        end,
        name,
        thread,
        domain: StrId::NONE,
        source,
        kind: RangeKind::Other,
        flags: 0,
        iteration: NONE,
        dims: StrId::NONE,
        types: StrId::NONE,
        values: StrId::NONE,
        strides: StrId::NONE,
    }
}
