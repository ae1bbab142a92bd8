//! Perfetto's protobuf: begin and end of every slice on named tracks, strings stored once, counters, and arrows from a
//! call to what it launched. Opens in ui.perfetto.dev where JSON of the same trace is too large.
//!
//! Threads stand under their process, streams under their device; spans that overlap on one of them go to child tracks.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Write;

use super::lanes::Lanes;
use super::tables::memory_label;
use super::thrift::push_varint;
use super::tracks::{self, Event, Numbers, Place, Track};
use crate::{CallKind, NONE, OpDetail, OpKind, RangeSource, StrId, Trace, TraceError};

/// Writes the trace and returns the number of events in it: slices, instants and samples of counters.
pub(crate) fn write<W: Write>(trace: &Trace, out: W) -> Result<(W, u64), TraceError> {
    let tracks = tracks::tracks(trace);
    let mut writer = Writer {
        trace,
        out,
        buffer: Vec::with_capacity(FLUSH_AT + (1 << 12)),
        packet: Vec::new(),
        offset: earliest(trace).map_or(0, |earliest| earliest.min(0).saturating_neg()),
        last_launched: tracks::last_launched(trace),
        details: trace.details.iter().map(detail_annotations).collect(),
        works: trace.works.iter().map(work_annotations).collect(),
        tracks_made: 0,
        events: 0,
    };
    writer.clocks()?;
    writer.strings()?;
    let places = writer.descriptions(&tracks)?;
    for track in &tracks {
        writer.track(track, &places)?;
    }
    writer.iterations()?;
    writer.counters(&places)?;
    writer.memory(&places)?;
    writer.out.write_all(&writer.buffer)?;
    writer.out.flush()?;
    Ok((writer.out, writer.events))
}

const FLUSH_AT: usize = 1 << 18;
/// All packets belong to one sequence, within which strings have numbers.
const SEQUENCE: u64 = 1;
const BOOTTIME: u64 = 6;
const REALTIME: u64 = 1;

const SLICE_BEGIN: u64 = 1;
const SLICE_END: u64 = 2;
const INSTANT: u64 = 3;
const COUNTER: u64 = 4;

/// Names of annotations, by their numbers from 1.
const KEYS: [&str; 30] = [
    "correlation",
    "context",
    "bytes",
    "grid x",
    "grid y",
    "grid z",
    "block x",
    "block y",
    "block z",
    "registers",
    "static shared bytes",
    "dynamic shared bytes",
    "graph node",
    "graph",
    "graph exec",
    "source memory",
    "destination memory",
    "domain",
    "input dims",
    "input types",
    "concrete inputs",
    "input strides",
    "iteration",
    "kernel",
    "layer",
    "m",
    "n",
    "k",
    "work bytes",
    "flops",
];

/// Categories, by their numbers from 1.
const CATEGORIES: [&str; 14] = [
    "kernel",
    "memcpy",
    "memset",
    "graph",
    "cpu_op",
    "gpu_api",
    "os_runtime",
    "profiler",
    "annotation",
    "gpu_annotation",
    "operator",
    "python",
    "other",
    "iteration",
];

fn number_of(names: &[&str], name: &str) -> u64 {
    names.iter().position(|&found| found == name).map_or(0, |index| index as u64 + 1)
}

fn push_uint(message: &mut Vec<u8>, field: u64, value: u64) {
    push_varint(message, field << 3);
    push_varint(message, value);
}

fn push_fixed(message: &mut Vec<u8>, field: u64, value: u64) {
    push_varint(message, field << 3 | 1);
    message.extend_from_slice(&value.to_le_bytes());
}

fn push_bytes(message: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    push_varint(message, field << 3 | 2);
    push_varint(message, bytes.len() as u64);
    message.extend_from_slice(bytes);
}

/// Adds an annotation to a track event.
fn annotate(event: &mut Vec<u8>, key: &str, value: Value) {
    push_varint(event, 4 << 3 | 2);
    event.push(0);
    let start = event.len();
    push_uint(event, 1, number_of(&KEYS, key));
    match value {
        Value::Uint(value) => push_uint(event, 3, value),
        Value::Int(value) => push_uint(event, 4, value as u64),
        Value::Interned(id) => push_uint(event, 17, u64::from(id.0) + 1),
        Value::Label(text) => push_bytes(event, 6, text.as_bytes()),
    }
    let length = event.len() - start;
    debug_assert!(length < 0x80, "numbers and labels are short: their length is one byte");
    event[start - 1] = length as u8;
}

enum Value {
    Uint(u64),
    Int(i64),
    Interned(StrId),
    Label(&'static str),
}

fn detail_annotations(detail: &OpDetail) -> Vec<u8> {
    let mut event = Vec::new();
    match *detail {
        OpDetail::Kernel(kernel) => {
            let sizes = ["grid x", "grid y", "grid z", "block x", "block y", "block z", "registers"];
            let values = kernel.grid.into_iter().chain(kernel.block).chain([kernel.registers]);
            for (key, value) in sizes.into_iter().zip(values).filter(|(_, value)| *value > 0) {
                annotate(&mut event, key, Value::Uint(value.into()));
            }
            annotate(&mut event, "static shared bytes", Value::Uint(kernel.static_shared.into()));
            annotate(&mut event, "dynamic shared bytes", Value::Uint(kernel.dynamic_shared.into()));
        }
        OpDetail::Memcpy { src_kind, dst_kind, .. } => {
            for (key, kind) in [("source memory", src_kind), ("destination memory", dst_kind)] {
                if let Some(label) = memory_label(kind) {
                    annotate(&mut event, key, Value::Label(label));
                }
            }
        }
        OpDetail::Memset { mem_kind, .. } => {
            if let Some(label) = memory_label(mem_kind) {
                annotate(&mut event, "destination memory", Value::Label(label));
            }
        }
        OpDetail::Graph { graph, exec } => {
            annotate(&mut event, "graph", Value::Uint(graph.into()));
            annotate(&mut event, "graph exec", Value::Uint(exec.into()));
        }
    }
    event
}

fn work_annotations(work: &crate::Work) -> Vec<u8> {
    let mut event = Vec::new();
    if let Some(layer) = work.layer {
        annotate(&mut event, "layer", Value::Uint(layer.into()));
    }
    let [m, n, k] = work.shape;
    for (key, value) in [("m", m), ("n", n), ("k", k), ("work bytes", work.bytes), ("flops", work.flops)] {
        if value > 0 {
            annotate(&mut event, key, Value::Uint(value));
        }
    }
    event
}

/// The first moment of anything in the trace.
fn earliest(trace: &Trace) -> Option<i64> {
    let tables = [&trace.ops.start, &trace.calls.start, &trace.ranges.start];
    let rows = tables.into_iter().filter_map(|starts| starts.iter().min()).copied();
    let samples = trace.counters.iter().filter_map(|counter| counter.times.iter().min()).copied();
    let others = trace.iterations.iter().map(|i| i.start).chain(trace.allocations.iter().map(|a| a.time));
    rows.chain(samples).chain(others).min()
}

/// The tracks by what they stand for.
struct Places {
    lanes: BTreeMap<(Place, u32), u64>,
    processes: Vec<u64>,
    devices: Vec<u64>,
}

struct Writer<'a, W: Write> {
    trace: &'a Trace,
    out: W,
    buffer: Vec<u8>,
    packet: Vec<u8>,
    /// What makes the earliest time of the trace not negative: the format has no negative ones.
    offset: i64,
    last_launched: Vec<u32>,
    /// Annotations of the distinct details and works, made once.
    details: Vec<Vec<u8>>,
    works: Vec<Vec<u8>>,
    tracks_made: u64,
    events: u64,
}

impl<W: Write> Writer<'_, W> {
    /// Hands on the packet that was made.
    fn send(&mut self) -> Result<(), TraceError> {
        push_bytes(&mut self.buffer, 1, &self.packet);
        self.packet.clear();
        if self.buffer.len() >= FLUSH_AT {
            self.out.write_all(&self.buffer)?;
            self.buffer.clear();
        }
        Ok(())
    }

    fn time(&self, at: i64) -> u64 {
        at.saturating_add(self.offset).max(0) as u64
    }

    /// Ties the trace's clock to the calendar.
    fn clocks(&mut self) -> Result<(), TraceError> {
        let Some(start) = self.trace.meta.session_start_utc_ns.and_then(|start| u64::try_from(start).ok()) else {
            return Ok(());
        };
        let mut snapshot = Vec::new();
        for (clock, time) in [(BOOTTIME, self.time(0)), (REALTIME, start)] {
            let mut message = Vec::new();
            push_uint(&mut message, 1, clock);
            push_uint(&mut message, 2, time);
            push_bytes(&mut snapshot, 1, &message);
        }
        push_uint(&mut self.packet, 10, SEQUENCE);
        push_bytes(&mut self.packet, 6, &snapshot);
        self.send()
    }

    /// Numbers for all strings that events refer to.
    fn strings(&mut self) -> Result<(), TraceError> {
        let trace = self.trace;
        let (mut names, mut values) = (vec![false; trace.strings.len()], vec![false; trace.strings.len()]);
        let mark = |used: &mut Vec<bool>, id: StrId| {
            if let Some(used) = used.get_mut(id.0 as usize) {
                *used = true;
            }
        };
        let all_names = trace.ops.name.iter().chain(&trace.calls.name).chain(&trace.ranges.name);
        all_names.for_each(|&id| mark(&mut names, id));
        trace.works.iter().for_each(|work| mark(&mut names, work.op));
        let ranges = &trace.ranges;
        let texts = [&ranges.domain, &ranges.dims, &ranges.types, &ranges.values, &ranges.strides];
        texts.into_iter().flatten().for_each(|&id| mark(&mut values, id));
        let cpu_ops = trace.ops.name.iter().zip(&trace.ops.kind).filter(|(_, kind)| **kind == OpKind::CpuOp);
        cpu_ops.for_each(|(&id, _)| mark(&mut values, id));

        let mut interned = Vec::new();
        let mut entry = Vec::new();
        let mut add = |field: u64, number: u64, text: &str| {
            entry.clear();
            push_uint(&mut entry, 1, number);
            push_bytes(&mut entry, 2, text.as_bytes());
            push_bytes(&mut interned, field, &entry);
        };
        (1..).zip(CATEGORIES).for_each(|(number, name)| add(1, number, name));
        (1..).zip(KEYS).for_each(|(number, name)| add(3, number, name));
        for (id, text) in trace.strings.iter() {
            let number = u64::from(id.0) + 1;
            if names[id.0 as usize] {
                add(2, number, text);
            }
            if values[id.0 as usize] {
                add(29, number, text);
            }
        }
        push_uint(&mut self.packet, 10, SEQUENCE);
        push_uint(&mut self.packet, 13, 1); // from here on numbers mean these strings
        push_bytes(&mut self.packet, 12, &interned);
        self.send()
    }

    /// Describes a track and gives its number.
    fn describe(&mut self, parent: u64, fields: impl FnOnce(&mut Vec<u8>)) -> Result<u64, TraceError> {
        self.tracks_made += 1;
        let mut descriptor = Vec::new();
        push_uint(&mut descriptor, 1, self.tracks_made);
        if parent != 0 {
            push_uint(&mut descriptor, 5, parent);
        }
        fields(&mut descriptor);
        // Siblings in the order in which they were described.
        push_uint(&mut descriptor, 11, 3);
        push_uint(&mut descriptor, 12, self.tracks_made);
        push_uint(&mut self.packet, 10, SEQUENCE);
        push_bytes(&mut self.packet, 60, &descriptor);
        self.send()?;
        Ok(self.tracks_made)
    }

    fn named(&mut self, parent: u64, name: &str) -> Result<u64, TraceError> {
        self.describe(parent, |descriptor| push_bytes(descriptor, 2, name.as_bytes()))
    }

    fn counter_track(&mut self, parent: u64, name: &str) -> Result<u64, TraceError> {
        self.describe(parent, |descriptor| {
            push_bytes(descriptor, 2, name.as_bytes());
            push_bytes(descriptor, 8, &[]);
        })
    }

    fn descriptions(&mut self, tracks: &[Track]) -> Result<Places, TraceError> {
        let trace = self.trace;
        let fits = || Numbers::within(1..=i64::from(i32::MAX));
        let (mut pids, mut places) = (fits(), Places { lanes: BTreeMap::new(), processes: vec![], devices: vec![] });
        let mut of_process = Vec::new();
        for (index, process) in trace.processes.iter().enumerate() {
            let pid = pids.take(process.pid);
            let mut message = Vec::new();
            push_uint(&mut message, 1, pid as u64);
            push_bytes(&mut message, 6, tracks::process_label(trace, index).as_bytes());
            places.processes.push(self.describe(0, |descriptor| push_bytes(descriptor, 3, &message))?);
            of_process.push((pid, fits()));
        }
        let numbers = tracks::device_numbers(trace);
        let shown = tracks::devices_with_streams(tracks);
        for index in 0..trace.devices.len() {
            let is_shown = !trace.devices[index].is_cpu || shown.contains(&(index as u32));
            let label = tracks::device_label(trace, index, numbers[index]);
            places.devices.push(if is_shown { self.named(0, &label)? } else { 0 });
        }
        for track in tracks {
            let parent = match track.place {
                Place::Stream { device, .. } => places.devices.get(device as usize).copied().unwrap_or(0),
                Place::Unordered(thread) => places.lanes.get(&(Place::Thread(thread), 0)).copied().unwrap_or(0),
                Place::Thread(_) => 0,
            };
            let label = tracks::track_label(trace, track.place, 0);
            let thread = match track.place {
                Place::Thread(index) => trace.threads.get(index as usize),
                _ => None,
            };
            let process = thread.and_then(|thread| of_process.get_mut(thread.process as usize));
            let first = if let Some((thread, (pid, tids))) = thread.zip(process) {
                let mut message = Vec::new();
                push_uint(&mut message, 1, *pid as u64);
                push_uint(&mut message, 2, tids.take(thread.tid) as u64);
                push_bytes(&mut message, 5, label.as_bytes());
                self.describe(0, |descriptor| push_bytes(descriptor, 4, &message))?
            } else {
                self.named(parent, &label)?
            };
            places.lanes.insert((track.place, 0), first);
            for lane in 1..track.lanes {
                let track_of_lane = self.named(first, &tracks::track_label(trace, track.place, lane))?;
                places.lanes.insert((track.place, lane), track_of_lane);
            }
        }
        Ok(places)
    }

    /// Sends a track event whose fields beyond kind and track are given.
    fn event(&mut self, kind: u64, track: u64, at: i64, fields: &[u8]) -> Result<(), TraceError> {
        let time = self.time(at);
        push_uint(&mut self.packet, 8, time);
        push_uint(&mut self.packet, 10, SEQUENCE);
        push_uint(&mut self.packet, 13, 2); // needs the strings sent before
        let mut head = Vec::with_capacity(16);
        push_uint(&mut head, 9, kind);
        push_uint(&mut head, 11, track);
        push_varint(&mut self.packet, 11 << 3 | 2);
        push_varint(&mut self.packet, (head.len() + fields.len()) as u64);
        self.packet.extend_from_slice(&head);
        self.packet.extend_from_slice(fields);
        self.send()
    }

    fn track(&mut self, track: &Track, places: &Places) -> Result<(), TraceError> {
        let of_lane = |lane| places.lanes.get(&(track.place, lane)).copied().unwrap_or(0);
        let lanes: Vec<u64> = (0..track.lanes).map(of_lane).collect();
        let mut open: Vec<Vec<i64>> = vec![Vec::new(); lanes.len()];
        let mut fields = Vec::new();
        for (event, lane) in track.events(self.trace) {
            let (start, end) = tracks::span(self.trace, event);
            let (lane, on) = (lane as usize, lanes[lane as usize]);
            while let Some(closed) = open[lane].pop_if(|end| *end <= start) {
                self.event(SLICE_END, on, closed, &[])?;
            }
            fields.clear();
            let kind = match event {
                Event::Range(index) => self.range(index, &mut fields),
                Event::Call(index) => self.call(index, &mut fields),
                Event::Op(index) => self.op(index, &mut fields),
            };
            self.events += 1;
            self.event(kind, on, start, &fields)?;
            if kind == SLICE_BEGIN {
                open[lane].push(end);
            }
        }
        for (lane, mut ends) in open.into_iter().enumerate() {
            while let Some(end) = ends.pop() {
                self.event(SLICE_END, lanes[lane], end, &[])?;
            }
        }
        Ok(())
    }

    fn name(fields: &mut Vec<u8>, category: &str, name: StrId) {
        push_uint(fields, 3, number_of(&CATEGORIES, category));
        push_uint(fields, 10, u64::from(name.0) + 1);
    }

    fn range(&self, index: usize, fields: &mut Vec<u8>) -> u64 {
        let range = self.trace.ranges.get(index);
        let category = match range.source {
            RangeSource::PushPop | RangeSource::StartEnd | RangeSource::Annotation => "annotation",
            RangeSource::GpuAnnotation => "gpu_annotation",
            RangeSource::CpuOp => "operator",
            RangeSource::Python => "python",
            RangeSource::Other => "other",
        };
        Self::name(fields, category, range.name);
        let texts = [
            ("domain", range.domain),
            ("input dims", range.dims),
            ("input types", range.types),
            ("concrete inputs", range.values),
            ("input strides", range.strides),
        ];
        for (key, id) in texts {
            if id.is_some() {
                annotate(fields, key, Value::Interned(id));
            }
        }
        if range.iteration != NONE {
            annotate(fields, "iteration", Value::Uint(range.iteration.into()));
        }
        if tracks::is_mark(self.trace, index) { INSTANT } else { SLICE_BEGIN }
    }

    fn call(&self, index: usize, fields: &mut Vec<u8>) -> u64 {
        let call = self.trace.calls.get(index);
        let category = match call.kind {
            CallKind::Gpu => "gpu_api",
            CallKind::OsRuntime => "os_runtime",
            CallKind::Profiler => "profiler",
        };
        Self::name(fields, category, call.name);
        if call.correlation != 0 {
            annotate(fields, "correlation", Value::Int(call.correlation));
        }
        if self.last_launched[index] != NONE {
            push_fixed(fields, 47, index as u64 + 1);
        }
        SLICE_BEGIN
    }

    fn op(&self, index: usize, fields: &mut Vec<u8>) -> u64 {
        let op = self.trace.ops.get(index);
        let (category, name) = match op.kind {
            OpKind::Kernel => ("kernel", op.name),
            OpKind::Memcpy => ("memcpy", op.name),
            OpKind::Memset => ("memset", op.name),
            OpKind::Graph => ("graph", op.name),
            OpKind::CpuOp => ("cpu_op", self.trace.work_of(index).map_or(op.name, |work| work.op)),
        };
        Self::name(fields, category, name);
        if op.kind == OpKind::CpuOp {
            annotate(fields, "kernel", Value::Interned(op.name));
        } else {
            annotate(fields, "context", Value::Uint(op.context.into()));
        }
        if op.correlation != 0 {
            annotate(fields, "correlation", Value::Int(op.correlation));
        }
        if op.kind.is_memory() {
            annotate(fields, "bytes", Value::Uint(op.bytes));
        }
        if op.graph_node != 0 {
            annotate(fields, "graph node", Value::Uint(op.graph_node));
        }
        if op.iteration != NONE {
            annotate(fields, "iteration", Value::Uint(op.iteration.into()));
        }
        for made in [self.details.get(op.detail as usize), self.works.get(op.work as usize)].into_iter().flatten() {
            fields.extend_from_slice(made);
        }
        if op.launch != NONE {
            let is_last = self.last_launched.get(op.launch as usize) == Some(&(index as u32));
            push_fixed(fields, if is_last { 48 } else { 47 }, u64::from(op.launch) + 1);
        }
        SLICE_BEGIN
    }

    fn iterations(&mut self) -> Result<(), TraceError> {
        if self.trace.iterations.is_empty() {
            return Ok(());
        }
        let track = self.named(0, "iterations")?;
        let tokens = [
            self.counter_track(track, "context tokens per iteration")?,
            self.counter_track(track, "generation tokens per iteration")?,
        ];
        // Iterations of one engine follow each other; of merged ranks they overlap.
        let mut lanes = Lanes::default();
        let mut tracks_of_lanes = vec![track];
        for (n, it) in self.trace.iterations.iter().enumerate() {
            let lane = lanes.place(it.start, it.end) as usize;
            if lane == tracks_of_lanes.len() {
                tracks_of_lanes.push(self.named(track, &format!("iterations (overlap {lane})"))?);
            }
            let mut fields = Vec::new();
            push_uint(&mut fields, 3, number_of(&CATEGORIES, "iteration"));
            push_bytes(&mut fields, 23, format!("iteration {} ({})", it.iter, it.kind()).as_bytes());
            annotate(&mut fields, "iteration", Value::Uint(it.iter));
            self.events += 1;
            self.event(SLICE_BEGIN, tracks_of_lanes[lane], it.start, &fields)?;
            self.event(SLICE_END, tracks_of_lanes[lane], it.end, &[])?;
            let values = [it.context_tokens, it.generation_tokens];
            for (counter, value) in tokens.into_iter().zip(values) {
                self.sample(counter, it.start, value.into())?;
                // Between two windows nothing was recorded: the counter must not seem to go on.
                if self.trace.iterations.get(n + 1).is_none_or(|next| next.window != it.window) {
                    self.sample(counter, it.end, 0.0)?;
                }
            }
        }
        Ok(())
    }

    fn sample(&mut self, track: u64, at: i64, value: f64) -> Result<(), TraceError> {
        let mut fields = Vec::with_capacity(16);
        push_fixed(&mut fields, 44, value.to_bits());
        self.events += 1;
        self.event(COUNTER, track, at, &fields)
    }

    fn counters(&mut self, places: &Places) -> Result<(), TraceError> {
        for counter in &self.trace.counters {
            let device = counter.device.and_then(|device| places.devices.get(device as usize));
            let parent = device.or(places.processes.first()).copied().unwrap_or(0);
            let track = self.counter_track(parent, &counter.name)?;
            let known = counter.times.iter().zip(&counter.values).filter(|(_, value)| value.is_finite());
            for (&time, &value) in known {
                self.sample(track, time, value)?;
            }
        }
        Ok(())
    }

    /// Memory in use by device: what the allocator said where it did, else the sum of what was recorded.
    fn memory(&mut self, places: &Places) -> Result<(), TraceError> {
        let mut of_device: BTreeMap<(Option<u32>, bool), (u64, i64)> = BTreeMap::new();
        for allocation in &self.trace.allocations {
            let (track, sum) = match of_device.entry((allocation.device, allocation.total_allocated.is_some())) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let device = allocation.device.and_then(|device| places.devices.get(device as usize));
                    let parent = device.or(places.processes.first()).copied().unwrap_or(0);
                    let &(of_device, said) = new.key();
                    let what = if of_device.is_some() { "device memory" } else { "host memory" };
                    let whose = if said { "allocated" } else { "allocated less freed since the trace began" };
                    new.insert((self.counter_track(parent, &format!("{what} {whose} (bytes)"))?, 0))
                }
            };
            *sum = sum.saturating_add(allocation.bytes);
            let value = allocation.total_allocated.map_or(*sum as f64, |total| total as f64);
            let track = *track;
            self.sample(track, allocation.time, value)?;
        }
        Ok(())
    }
}
