//! From events to the columns of a [`Trace`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::RangeInclusive;
use std::path::Path;

use super::event::{Class, Event};
use super::json::{Cursor, unescape, unquoted};
use super::number::{float, integer, micros_to_nanos, unsigned};
use crate::intern::FastHash;
use crate::{
    Allocation, CallKind, CallRow, Counter, Device, Distinct, GraphMode, Interner, Iteration, KernelDetail, NONE,
    OpDetail, OpKind, OpRow, Process, RangeKind, RangeRow, RangeSource, Source, StrId, Thread, Trace, range_flags,
};

/// No trace is as long as this: what lies further from the other events has a broken time.
const TEN_YEARS_NS: i64 = 10 * 366 * 86_400 * 1_000_000_000;

type ByText<T> = HashMap<Vec<u8>, T, FastHash>;

/// By group and correlation, the process that made the call; `None`: several did.
type Launchers = HashMap<(u16, i64), Option<u16>, FastHash>;

/// By group and correlation, when calls began and which process made them.
type Clashes = HashMap<(u16, i64), Vec<(i64, u16)>, FastHash>;

/// Fills a trace event by event. One file may hold several roots, one behind the other: each is a rank.
pub(super) struct Builder {
    trace: Trace,
    details: Distinct<OpDetail>,
    scratch: String,
    /// The parts of the file within which process ids and correlations are unique.
    groups: Vec<Group>,
    processes: Vec<FoundProcess>,
    /// The group and ordinal of each device.
    devices: HashMap<(u16, u32), u16, FastHash>,
    device_groups: Vec<u16>,
    /// What belongs to the device's side, by thread: its group and device.
    gpu_threads: HashMap<u32, (u16, u16), FastHash>,
    pending_allocations: Vec<(Allocation, u16, u32)>,
    /// The group and process text of each counter.
    counter_owners: Vec<(u16, Vec<u8>)>,
    /// The process of each device where the file tells it.
    users: HashMap<u16, u16, FastHash>,
    root: Root,
    first_base: Option<i64>,
    properties: Vec<(u16, serde_json::Value)>,
    pub(super) events: u64,
    pub(super) untimed: u64,
    /// Left out: years away from the others.
    pub(super) absurd: u64,
    /// Kept with no length: they end before they start.
    pub(super) backward: u64,
    unread: u64,
    roots: u32,
}

/// What holds for one root of the file only.
#[derive(Default)]
struct Root {
    first_group: u16,
    rank: Option<u32>,
    base: Option<i64>,
    groups: ByText<u16>,
    processes: ByText<u16>,
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
    group: u16,
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
            unread: 0,
            roots: 0,
        }
    }

    /// Takes over one event.
    pub(super) fn add(&mut self, event: &Event) {
        let [phase] = *event.phase else { return };
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
                let (dims, types) = match class {
                    Class::CpuOp => (self.intern_json(args.dims), self.intern_json(args.types)),
                    _ => (StrId::NONE, StrId::NONE),
                };
                let row = RangeRow { dims, types, ..range(start, end, name, thread, source) };
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

    /// The group of a process, and what its id is within the group. Merged files of several ranks write the rank into
    /// the process id: `[TP00-DP01] 251`.
    fn group<'e>(&mut self, pid: &'e [u8]) -> (u16, &'e [u8]) {
        let (label, pid) = split_label(pid);
        if label.is_empty()
            && let Some(&group) = self.root.groups.get(label)
        {
            return (group, pid);
        }
        let group = *self.root.groups.entry(label.to_vec()).or_insert_with(|| {
            self.groups.push(Group { label: label.to_vec(), rank: None });
            (self.groups.len() - 1) as u16
        });
        (group, pid)
    }

    fn device(&mut self, group: u16, ordinal: u32) -> u16 {
        *self.devices.entry((group, ordinal)).or_insert_with(|| {
            self.trace.devices.push(Device { ordinal, ..Device::default() });
            self.device_groups.push(group);
            (self.trace.devices.len() - 1) as u16
        })
    }

    fn process(&mut self, pid: &[u8]) -> u16 {
        if let Some(&process) = self.root.processes.get(pid) {
            return process;
        }
        let (group, number) = self.group(pid);
        let index = self.trace.processes.len();
        let parsed = integer(number);
        let name = if parsed.is_none() { text(number) } else { String::new() };
        // A process that the file only names gets a number that no real one has.
        let pid_number = parsed.unwrap_or(-2 - index as i64);
        self.trace.processes.push(Process { pid: pid_number, name, ..Process::default() });
        self.processes.push(FoundProcess { group, numbered: parsed.is_some(), key: pid.to_vec() });
        self.root.processes.insert(pid.to_vec(), index as u16);
        index as u16
    }

    #[inline]
    fn thread(&mut self, pid: &[u8], tid: &[u8]) -> u32 {
        let (last_pid, last_tid, last) = &self.root.last_thread;
        if last_tid == tid && last_pid == pid && !self.root.threads.is_empty() {
            return *last;
        }
        let key = [pid, b"\0", tid].concat();
        let thread = match self.root.threads.get(&key) {
            Some(&thread) => thread,
            None => {
                let process = self.process(pid);
                let thread = match self.root.lanes.get(&key).cloned() {
                    Some(recorded) if recorded != tid => self.thread(pid, &recorded),
                    _ => self.new_thread(process, tid),
                };
                self.root.threads.insert(key, thread);
                thread
            }
        };
        self.root.last_thread = (pid.to_vec(), tid.to_vec(), thread);
        thread
    }

    fn new_thread(&mut self, process: u16, tid: &[u8]) -> u32 {
        let number = integer(tid);
        let name = if number.is_none() { text(tid) } else { String::new() };
        let tid = number.or(trailing_number(tid).map(i64::from)).unwrap_or(0);
        self.trace.threads.push(Thread { process, tid, name });
        (self.trace.threads.len() - 1) as u32
    }

    /// The stand-in for a stream on which an annotation was projected.
    fn stream_thread(&mut self, event: &Event) -> u32 {
        let mut key = [event.pid, b"\0", event.tid].concat();
        let stream = self.root.lanes.get(&key).cloned().unwrap_or_else(|| event.tid.to_vec());
        key = [event.pid, b"\0", &stream].concat();
        if let Some(&thread) = self.root.streams.get(&key) {
            return thread;
        }
        let (group, pid) = self.group(event.pid);
        let ordinal = small(event.known.device).or_else(|| small(pid)).unwrap_or(0);
        let device = self.device(group, ordinal);
        let thread = self.new_thread(0, &stream);
        self.gpu_threads.insert(thread, (group, device));
        self.root.streams.insert(key, thread);
        thread
    }

    /// Takes over what strobe writes about its own tracks.
    fn strobes_tracks(&mut self, value: &[u8]) {
        #[derive(serde::Deserialize)]
        struct Tracks {
            #[serde(default)]
            lanes: Vec<(i64, i64, i64)>,
            #[serde(default)]
            users: Vec<(u32, i64)>,
        }
        let Ok(tracks) = serde_json::from_slice::<Tracks>(value) else { return };
        for (pid, tid, recorded) in tracks.lanes {
            self.root.lanes.insert(format!("{pid}\0{tid}").into_bytes(), recorded.to_string().into_bytes());
        }
        self.root.users.extend(tracks.users.into_iter().map(|(device, pid)| (device, pid.to_string().into_bytes())));
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
            }
            b"deviceProperties" => {
                let list: Option<Vec<serde_json::Value>> = serde_json::from_slice(value).ok();
                let group = self.root.first_group;
                self.properties.extend(list.into_iter().flatten().map(|device| (group, device)));
            }
            _ => {}
        }
    }

    /// Ends a root: what was read since the last one belongs together.
    pub(super) fn end_root(&mut self) {
        let mut root = std::mem::take(&mut self.root);
        let plausible = self.plausible_times(&root);
        self.leave_out_absurd(&mut root, &plausible);
        for row in std::mem::take(&mut root.open).into_values().flatten() {
            if !plausible.contains(&row.start()) {
                self.absurd += 1;
                continue;
            }
            let row = match row {
                Row::Range(row) => {
                    Row::Range(RangeRow { end: root.last_time, flags: row.flags | range_flags::UNCLOSED, ..row })
                }
                mut other => {
                    *other.end() = root.last_time;
                    other
                }
            };
            self.push(row);
        }
        // Merged ranks are numbered by their labels: `TP01` may occur once per `DP`.
        let groups = &mut self.groups[usize::from(root.first_group)..];
        let mut labels: Vec<Vec<u8>> = groups.iter().map(|group| group.label.clone()).collect();
        labels.retain(|label| !label.is_empty());
        labels.sort();
        for group in groups {
            group.rank = match labels.binary_search(&group.label) {
                Ok(place) => Some(place as u32),
                Err(_) => root.rank,
            };
        }
        for (process, found) in self.trace.processes.iter_mut().zip(&self.processes) {
            if found.group >= root.first_group
                && let Some(name) = root.process_names.get(&found.key)
            {
                process.name = name.clone();
            }
        }
        for (device, process) in &root.users {
            let device = self.devices.get(&(root.first_group, *device));
            if let Some((&device, &process)) = device.zip(root.processes.get(process)) {
                self.users.insert(device, process);
            }
        }
        let recorded = |(key, _): &(&Vec<u8>, &u32)| !root.lanes.contains_key(*key);
        for (key, thread) in root.threads.iter().chain(&root.streams).filter(recorded) {
            if let Some(name) = root.thread_names.get(key) {
                self.trace.threads[*thread as usize].name = name.clone();
            }
        }
        self.roots += u32::from(!root.groups.is_empty());
        match (self.first_base, root.base) {
            (None, base) => self.first_base = base,
            (Some(first), Some(base)) => self.shift(&root, base.saturating_sub(first)),
            _ => {}
        }
        self.root = Root { first_group: self.groups.len() as u16, before: self.counts(), ..Root::default() };
    }

    /// The times within ten years of the root's events: of their median, which a few broken ones do not move.
    fn plausible_times(&self, root: &Root) -> RangeInclusive<i64> {
        const SAMPLES: usize = 1024;
        let [ops, calls, ranges, ..] = root.before;
        let trace = &self.trace;
        let starts = [&trace.ops.start[ops..], &trace.calls.start[calls..], &trace.ranges.start[ranges..]];
        let step = starts.iter().map(|starts| starts.len()).sum::<usize>() / SAMPLES + 1;
        let mut sample: Vec<i64> = starts.into_iter().flatten().copied().step_by(step).collect();
        if sample.is_empty() {
            return i64::MIN..=i64::MAX;
        }
        let middle = sample.len() / 2;
        let median = *sample.select_nth_unstable(middle).1;
        median.saturating_sub(TEN_YEARS_NS)..=median.saturating_add(TEN_YEARS_NS)
    }

    /// Removes the root's events that lie outside of `plausible`.
    fn leave_out_absurd(&mut self, root: &mut Root, plausible: &RangeInclusive<i64>) {
        let [ops, calls, ranges, allocations, counters] = root.before;
        let kept = |before: usize, starts: &[i64], ends: &[i64]| {
            let fits =
                |row: usize| row < before || (plausible.contains(&starts[row]) && plausible.contains(&ends[row]));
            let all_fit = (before..starts.len()).all(fits);
            (!all_fit).then(|| (0..starts.len() as u32).filter(|&row| fits(row as usize)).collect::<Vec<u32>>())
        };
        let trace = &mut self.trace;
        if let Some(kept) = kept(ops, &trace.ops.start, &trace.ops.end) {
            self.absurd += (trace.ops.len() - kept.len()) as u64;
            trace.ops.reorder(&kept);
        }
        if let Some(kept) = kept(calls, &trace.calls.start, &trace.calls.end) {
            self.absurd += (trace.calls.len() - kept.len()) as u64;
            trace.calls.reorder(&kept);
        }
        if let Some(kept) = kept(ranges, &trace.ranges.start, &trace.ranges.end) {
            self.absurd += (trace.ranges.len() - kept.len()) as u64;
            trace.ranges.reorder(&kept);
        }
        let of_root = trace.allocations.split_off(allocations);
        let on_devices = self.pending_allocations.len();
        self.absurd += (of_root.len() + on_devices) as u64;
        trace.allocations.extend(of_root.into_iter().filter(|allocation| plausible.contains(&allocation.time)));
        let first_group = root.first_group;
        self.pending_allocations.retain(|(a, group, _)| *group < first_group || plausible.contains(&a.time));
        self.absurd -= (trace.allocations.len() - allocations + self.pending_allocations.len()) as u64;
        for counter in &mut trace.counters[counters..] {
            if !counter.times.iter().all(|time| plausible.contains(time)) {
                let before = counter.times.len();
                let samples = counter.times.drain(..).zip(counter.values.drain(..));
                (counter.times, counter.values) = samples.filter(|(time, _)| plausible.contains(time)).collect();
                self.absurd += (before - counter.times.len()) as u64;
            }
        }
        if !plausible.contains(&root.last_time) {
            let ends = [&trace.ops.end[ops..], &trace.calls.end[calls..], &trace.ranges.end[ranges..]];
            root.last_time = ends.into_iter().flatten().copied().max().unwrap_or(root.last_time);
        }
    }

    /// Roots one behind the other are ranks: as they say if all of them do, each another one, else by their order.
    fn number_ranks(&mut self) {
        let known: BTreeSet<u32> = self.groups.iter().filter_map(|group| group.rank).collect();
        if self.roots > 1 && known.len() < self.groups.len() {
            (0..).zip(&mut self.groups).for_each(|(place, group)| group.rank = Some(place));
        }
    }

    fn counts(&self) -> [usize; 5] {
        let trace = &self.trace;
        let allocations = trace.allocations.len();
        [trace.ops.len(), trace.calls.len(), trace.ranges.len(), allocations, trace.counters.len()]
    }

    /// Moves what belongs to `root` to the clock of the first one.
    fn shift(&mut self, root: &Root, by: i64) {
        if by == 0 {
            return;
        }
        let [ops, calls, ranges, allocations, counters] = root.before;
        let trace = &mut self.trace;
        let columns = [
            &mut trace.ops.start[ops..],
            &mut trace.ops.end[ops..],
            &mut trace.calls.start[calls..],
            &mut trace.calls.end[calls..],
            &mut trace.ranges.start[ranges..],
            &mut trace.ranges.end[ranges..],
        ];
        columns.into_iter().flatten().for_each(|time| *time = time.saturating_add(by));
        trace.allocations[allocations..].iter_mut().for_each(|a| a.time = a.time.saturating_add(by));
        let times = trace.counters[counters..].iter_mut().flat_map(|counter| &mut counter.times);
        times.for_each(|time| *time = time.saturating_add(by));
        let pending = self.pending_allocations.iter_mut().filter(|(_, group, _)| *group >= root.first_group);
        pending.for_each(|(a, _, _)| a.time = a.time.saturating_add(by));
    }

    /// The finished trace.
    pub(super) fn finish(mut self, path: &Path, bytes: u64, lost: u64) -> Trace {
        self.number_ranks();
        self.place_allocations();
        self.describe_devices();
        let of_old = self.merge_nameless_processes();
        self.assign_processes(&of_old);
        for (counter, (group, pid)) in self.trace.counters.iter_mut().zip(&self.counter_owners) {
            counter.device =
                small(split_label(pid).1).and_then(|ordinal| self.devices.get(&(*group, ordinal)).copied());
            if counter.times.windows(2).any(|pair| pair[0] > pair[1]) {
                let mut samples: Vec<_> = counter.times.drain(..).zip(counter.values.drain(..)).collect();
                samples.sort_by_key(|&(time, _)| time);
                (counter.times, counter.values) = samples.into_iter().unzip();
            }
        }
        let mut trace = self.trace;
        trace.details = self.details.into_values();
        // Without a base the times of the PyTorch profiler are those of the system clock: nothing else is as large.
        let since_1970 = trace.extent().is_some_and(|(earliest, _)| earliest > 1_000_000_000_000_000_000);
        trace.meta.session_start_utc_ns = self.first_base.or(since_1970.then_some(0));
        let is_pytorch = !trace.ops.is_empty()
            || !trace.calls.is_empty()
            || trace.ranges.source.iter().any(|&source| source != RangeSource::Other);
        let format = if is_pytorch { "PyTorch profiler (Kineto) JSON" } else { "Chrome trace JSON" };
        trace.meta.producer = if is_pytorch { "PyTorch profiler".into() } else { String::new() };
        let rank = match &self.groups[..] {
            [only] => only.rank,
            _ => None,
        };
        let source = Source { path: path.to_path_buf(), format: format.into(), bytes, events: self.events, lost, rank };
        trace.meta.sources = vec![source];
        if self.unread > 0 {
            let notice = format!("{} asynchronous or unpaired events were not read", grouped(self.unread));
            trace.meta.notices.push(notice);
        }
        if self.roots > 1 {
            let notice = format!("the file holds {} traces one behind the other, read as ranks of one run", self.roots);
            trace.meta.notices.push(notice);
        }
        trace.finish();
        if trace.ops.is_empty() {
            trace.meta.notices.push("the trace holds no GPU events, only what the host did".into());
        }
        let unlaunched = trace.ops_without_launch();
        if unlaunched > 0 {
            let (unlaunched, all) = (grouped(unlaunched as u64), grouped(trace.ops.len() as u64));
            trace.meta.notices.push(format!("{unlaunched} of {all} GPU ops have no launch call in the file"));
        }
        let replayed = |&launch: &u32| {
            let call = trace.calls.name.get(launch as usize);
            call.is_some_and(|&name| trace.text(name).contains("GraphLaunch"))
        };
        if trace.ops.launch.iter().any(replayed) {
            trace.meta.graph_mode = Some(GraphMode::Node);
        }
        trace.ops.shrink_to_fit();
        trace.calls.shrink_to_fit();
        trace.ranges.shrink_to_fit();
        trace
    }

    /// PyTorch counts devices its own way in memory events: by the number of visible ones, where kernels on AMD carry
    /// that of the agent.
    fn place_allocations(&mut self) {
        for (mut allocation, group, ordinal) in std::mem::take(&mut self.pending_allocations) {
            let known = self.devices.get(&(group, ordinal)).copied().or_else(|| {
                let mut of_group = (0u16..).zip(&self.device_groups).filter(|&(_, &g)| g == group);
                let first = of_group.next().map(|(device, _)| device);
                first.filter(|_| of_group.next().is_none())
            });
            allocation.device = Some(known.unwrap_or_else(|| self.device(group, ordinal)));
            self.trace.allocations.push(allocation);
        }
    }

    fn describe_devices(&mut self) {
        let number = |value: &serde_json::Value, key: &str| value.get(key).and_then(serde_json::Value::as_u64);
        for (index, device) in self.trace.devices.iter_mut().enumerate() {
            // Properties belong to all groups of their root, which is where they were found or a later one.
            let Some(&group) = self.device_groups.get(index) else { continue };
            let nearest = self.properties.iter().map(|(first, _)| *first).filter(|&first| first <= group).max();
            let of_root: Vec<_> = self.properties.iter().filter(|(first, _)| Some(*first) == nearest).collect();
            let exact = of_root.iter().find(|(_, p)| number(p, "id") == Some(u64::from(device.ordinal)));
            let all_alike = |key: &str| of_root.windows(2).all(|pair| pair[0].1.get(key) == pair[1].1.get(key));
            let any =
                of_root.first().filter(|_| all_alike("name") && all_alike("numSms") && all_alike("totalGlobalMem"));
            let Some((_, properties)) = exact.or(any) else { continue };
            device.name = properties.get("name").and_then(serde_json::Value::as_str).unwrap_or("").to_string();
            device.memory_bytes = number(properties, "totalGlobalMem");
            let real = |key: &str| properties.get(key).and_then(serde_json::Value::as_f64);
            (device.bytes_per_s, device.clock_hz) = (real("memoryBandwidth"), real("clockRate"));
            device.multiprocessors = number(properties, "numSms").and_then(|n| u32::try_from(n).ok());
            let (major, minor) = (number(properties, "computeMajor"), number(properties, "computeMinor"));
            device.compute_capability = major.zip(minor).map(|(major, minor)| (major as u32, minor as u32));
        }
    }

    /// The profiler writes some host events to process 0 or -1: they are those of the one real process. Gives the new
    /// index of every process.
    fn merge_nameless_processes(&mut self) -> Vec<u16> {
        let found = &self.processes;
        let real = |index: usize| !found[index].numbered || self.trace.processes[index].pid > 0;
        let target = |index: usize| {
            if real(index) {
                return index;
            }
            let mut others = (0..found.len()).filter(|&i| found[i].group == found[index].group && real(i));
            others.next().filter(|_| others.next().is_none()).unwrap_or(index)
        };
        let targets: Vec<usize> = (0..found.len()).map(target).collect();
        let mut new_index = vec![0u16; found.len()];
        let mut kept = 0;
        for index in 0..found.len() {
            if targets[index] == index {
                new_index[index] = kept;
                kept += 1;
            }
        }
        let renumbered: Vec<u16> = targets.iter().map(|&target| new_index[target]).collect();
        let mut index = 0..;
        self.trace.processes.retain(|_| index.next().is_some_and(|i: usize| targets[i] == i));
        let mut index = 0..;
        self.processes.retain(|_| index.next().is_some_and(|i: usize| targets[i] == i));
        renumbered
    }

    /// Gives every op the process that launched it. A kernel's own process id is that of its device.
    fn assign_processes(&mut self, renumbered: &[u16]) {
        let new = |old: u16| renumbered.get(usize::from(old)).copied().unwrap_or(0);
        self.trace.allocations.iter_mut().for_each(|a| a.process = new(a.process));
        for (index, thread) in self.trace.threads.iter_mut().enumerate() {
            if !self.gpu_threads.contains_key(&(index as u32)) {
                thread.process = new(thread.process);
            }
        }
        let groups = self.groups.len();
        let mut callers: Vec<Vec<u16>> = vec![Vec::new(); groups];
        let mut calls_of = vec![false; self.trace.processes.len()];
        for (&thread, &kind) in self.trace.calls.thread.iter().zip(&self.trace.calls.kind) {
            if kind == CallKind::Gpu {
                calls_of[usize::from(self.trace.threads[thread as usize].process)] = true;
            }
        }
        for (process, found) in (0u16..).zip(&self.processes) {
            if calls_of[usize::from(process)] {
                callers[usize::from(found.group)].push(process);
            }
        }
        // Without calls the host process is still known when there is only one.
        for (group, callers) in callers.iter_mut().enumerate() {
            if callers.is_empty() {
                let members = (0u16..).zip(&self.processes).filter(|(_, found)| usize::from(found.group) == group);
                callers.extend(members.map(|(process, _)| process).take(1));
            }
            if callers.is_empty() {
                self.trace.processes.push(Process::default());
                self.processes.push(FoundProcess { group: group as u16, numbered: true, key: Vec::new() });
                callers.push((self.trace.processes.len() - 1) as u16);
            }
        }
        let launchers = self.launchers(&callers);
        let clashes = self.clashes(&launchers);
        // The processes that surely used each device.
        let mut owners: Vec<Vec<u16>> = vec![Vec::new(); self.trace.devices.len()];
        for (&device, &process) in &self.users {
            owners[usize::from(device)].push(new(process));
        }
        let users = &self.users;
        let launcher = |op: usize, trace: &Trace| {
            if let Some(&process) = users.get(&trace.ops.device[op]) {
                return Some(new(process));
            }
            let (group, correlation) = (trace.ops.process[op], trace.ops.correlation[op]);
            match &callers[usize::from(group)][..] {
                [only] => Some(*only),
                _ => launchers.get(&(group, correlation)).copied().flatten(),
            }
        };
        for op in 0..self.trace.ops.len() {
            let owners = &mut owners[usize::from(self.trace.ops.device[op])];
            if let Some(process) = launcher(op, &self.trace)
                && !owners.contains(&process)
            {
                owners.push(process);
            }
        }
        self.vote_for_owners(&clashes, &mut owners);
        for op in 0..self.trace.ops.len() {
            let ops = &self.trace.ops;
            let (group, start, owners) = (ops.process[op], ops.start[op], &owners[usize::from(ops.device[op])]);
            let process = launcher(op, &self.trace).or_else(|| {
                let calls = clashes.get(&(group, ops.correlation[op]))?;
                let owned = calls.iter().filter(|(_, process)| owners.contains(process));
                last_before(owned, start).or_else(|| last_before(calls, start))
            });
            let process = process.or(owners.first().copied());
            self.trace.ops.process[op] = process.unwrap_or(callers[usize::from(group)][0]);
        }
        for (&thread, &(group, device)) in &self.gpu_threads {
            let process = owners[usize::from(device)].first().copied().unwrap_or(callers[usize::from(group)][0]);
            self.trace.threads[thread as usize].process = process;
        }
        for (process, found) in self.trace.processes.iter_mut().zip(&self.processes) {
            process.rank = self.groups[usize::from(found.group)].rank;
        }
    }

    /// The process of each correlation in groups where several processes made calls; `None` where two used the same.
    fn launchers(&self, callers: &[Vec<u16>]) -> Launchers {
        let mut launchers = Launchers::default();
        if callers.iter().all(|of_group| of_group.len() == 1) {
            return launchers;
        }
        let calls = &self.trace.calls;
        for ((&thread, &correlation), &kind) in calls.thread.iter().zip(&calls.correlation).zip(&calls.kind) {
            if kind != CallKind::Gpu || correlation == 0 {
                continue;
            }
            let process = self.trace.threads[thread as usize].process;
            let group = self.processes[usize::from(process)].group;
            let known = launchers.entry((group, correlation)).or_insert(Some(process));
            *known = known.filter(|&known| known == process);
        }
        launchers
    }

    /// The calls of every correlation that several processes of a group used: when, and by which process.
    fn clashes(&self, launchers: &Launchers) -> Clashes {
        let mut clashes = Clashes::default();
        if launchers.values().all(Option::is_some) {
            return clashes;
        }
        for call in self.trace.calls.iter().filter(|call| call.kind == CallKind::Gpu) {
            let process = self.trace.threads[call.thread as usize].process;
            let key = (self.processes[usize::from(process)].group, call.correlation);
            if launchers.get(&key) == Some(&None) {
                clashes.entry(key).or_default().push((call.start, process));
            }
        }
        clashes
    }

    /// Finds an owner for devices of which every op could be of several processes: the one whose calls most often were
    /// the last before the ops. A process gets a second device only when every process has one.
    fn vote_for_owners(&self, clashes: &Clashes, owners: &mut [Vec<u16>]) {
        let ops = &self.trace.ops;
        let mut votes: BTreeMap<(u16, u16), usize> = BTreeMap::new();
        for op in (0..ops.len()).filter(|_| !clashes.is_empty()) {
            let calls = clashes.get(&(ops.process[op], ops.correlation[op]));
            if owners[usize::from(ops.device[op])].is_empty()
                && let Some(process) = calls.and_then(|calls| last_before(calls, ops.start[op]))
            {
                *votes.entry((ops.device[op], process)).or_default() += 1;
            }
        }
        // The process that is left over for a device may have got no vote.
        let processes: BTreeSet<u16> = clashes.values().flatten().map(|&(_, process)| process).collect();
        let devices: BTreeSet<u16> = votes.keys().map(|&(device, _)| device).collect();
        for (&device, &process) in devices.iter().flat_map(|device| processes.iter().map(move |p| (device, p))) {
            if self.device_groups[usize::from(device)] == self.processes[usize::from(process)].group {
                votes.entry((device, process)).or_default();
            }
        }
        let mut ordered: Vec<_> = votes.into_iter().collect();
        ordered.sort_by_key(|&(pair, count)| (std::cmp::Reverse(count), pair));
        let mut taken: BTreeSet<u16> = owners.iter().flatten().copied().collect();
        for &((device, process), _) in &ordered {
            if owners[usize::from(device)].is_empty() && taken.insert(process) {
                owners[usize::from(device)].push(process);
            }
        }
        for ((device, process), _) in ordered {
            if owners[usize::from(device)].is_empty() {
                owners[usize::from(device)].push(process);
            }
        }
    }
}

/// The process of the call that started last, not after `start`; if all did later, of the first.
fn last_before<'c>(calls: impl IntoIterator<Item = &'c (i64, u16)>, start: i64) -> Option<u16> {
    let key = |&&(call, _): &&(i64, u16)| if call <= start { (true, call) } else { (false, call.saturating_neg()) };
    calls.into_iter().max_by_key(key).map(|&(_, process)| process)
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
    }
}

fn intern(strings: &mut Interner, scratch: &mut String, raw: &[u8]) -> StrId {
    match std::str::from_utf8(raw) {
        Ok(text) if !raw.contains(&b'\\') => strings.intern(text),
        _ => {
            unescape(raw, scratch);
            strings.intern(scratch)
        }
    }
}

fn text(raw: &[u8]) -> String {
    let mut out = String::new();
    unescape(raw, &mut out);
    out
}

/// A program's name without the options behind it: those may hold secrets.
fn without_arguments(mut name: String) -> String {
    if let Some(options) = name.find(" -") {
        name.truncate(options);
    }
    name
}

fn for_each_argument<'a>(args: &'a [u8], mut each: impl FnMut(&'a [u8], &'a [u8])) {
    let mut cursor = Cursor::new(args);
    // Arguments that were only skipped so far may turn out to be broken: then the first of them count.
    let _ = cursor.object(|cursor, key| {
        each(key, unquoted(cursor.value()?));
        Ok(())
    });
}

/// The label in front of a process id, where there is one, and the id itself.
fn split_label(pid: &[u8]) -> (&[u8], &[u8]) {
    if let Some(rest) = pid.strip_prefix(b"[")
        && let Some(end) = rest.iter().position(|&b| b == b']')
    {
        return (&rest[..end], rest[end + 1..].trim_ascii());
    }
    (b"", pid)
}

fn small(text: &[u8]) -> Option<u32> {
    integer(text).and_then(|number| u32::try_from(number).ok())
}

/// How a range was made that strobe wrote as an annotation.
fn annotation_source(recorded: &[u8]) -> RangeSource {
    match recorded {
        b"push_pop" => RangeSource::PushPop,
        b"start_end" => RangeSource::StartEnd,
        _ => RangeSource::Annotation,
    }
}

/// The kind of memory in a name like `Memset (Device)`.
fn memset_memory(name: &[u8]) -> u8 {
    let inner = name.strip_prefix(b"Memset (").and_then(|rest| rest.strip_suffix(b")"));
    inner.and_then(|kind| std::str::from_utf8(kind).ok()).map_or(255, memory_kind)
}

/// The number at the end of e.g. `stream 7`.
fn trailing_number(text: &[u8]) -> Option<u32> {
    let text = text.trim_ascii_end();
    let digits = text.iter().rev().take_while(|b| b.is_ascii_digit()).count();
    small(&text[text.len() - digits..])
}

/// The numbers of `[x, y, z]`; what is missing is 0.
fn triple(array: &[u8]) -> [u32; 3] {
    let mut numbers = [0; 3];
    let inner = array.strip_prefix(b"[").and_then(|rest| rest.strip_suffix(b"]")).unwrap_or(b"");
    for (slot, number) in numbers.iter_mut().zip(inner.split(|&b| b == b',')) {
        *slot = small(number.trim_ascii()).unwrap_or(0);
    }
    numbers
}

/// The number of a kind of memory.
fn memory_kind(name: &str) -> u8 {
    match name {
        "Pageable" => 0,
        "Pinned" => 1,
        "Device" => 2,
        "Array" => 3,
        "Managed" => 4,
        "Device Static" => 5,
        "Managed Static" => 6,
        "Unknown" => 7,
        _ => 255,
    }
}

/// What the name of a copy tells, e.g. `Memcpy HtoD (Pageable -> Device)`.
fn copy_detail(event: &Event) -> OpDetail {
    let name = event.name.strip_prefix(b"Memcpy ").unwrap_or(event.name);
    // Older AMD traces write it in words.
    let in_words = match name {
        b"CopyHostToDevice" => Some(1),
        b"CopyDeviceToHost" => Some(2),
        b"CopyDeviceToDevice" => Some(8),
        _ => None,
    };
    let direction = |text: &[u8]| match text.get(..4) {
        Some(b"HtoD") => Some(1),
        Some(b"DtoH") => Some(2),
        Some(b"HtoA") => Some(3),
        Some(b"AtoH") => Some(4),
        Some(b"AtoA") => Some(5),
        Some(b"AtoD") => Some(6),
        Some(b"DtoA") => Some(7),
        Some(b"DtoD") => Some(8),
        Some(b"HtoH") => Some(9),
        Some(b"PtoP") => Some(10),
        _ => None,
    };
    let in_brackets = || {
        let open = name.iter().position(|&b| b == b'(')?;
        let inner = std::str::from_utf8(name.get(open + 1..)?.strip_suffix(b")")?).ok()?;
        inner.split_once(" -> ")
    };
    let (src_kind, dst_kind) = in_brackets().map_or((255, 255), |(from, to)| (memory_kind(from), memory_kind(to)));
    OpDetail::Memcpy {
        copy_kind: direction(name).or_else(|| direction(event.known.kind)).or(in_words).unwrap_or(0),
        src_kind,
        dst_kind,
        src_device: small(event.known.from_device),
        dst_device: small(event.known.to_device),
    }
}

/// A number with separators: `4,812`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
