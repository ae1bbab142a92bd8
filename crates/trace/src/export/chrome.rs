//! Chrome's trace event JSON in the dialect of the PyTorch profiler (Kineto), which Perfetto, `chrome://tracing`,
//! Holistic Trace Analysis and this crate's own importer read.
//!
//! Host events stand under their process and thread, device events under the device's number and their stream. Where
//! spans of one track overlap, the later goes to a track of its own, and the root's `strobe` says whose it is; where a name
//! is given in Kineto's wording, so that tools that go by names find it, the argument `recorded name` keeps the original.
//! What is not known is left out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;

use super::json::{JsonWriter, QuotedStrings, push_quoted, push_unsigned};
use super::tables::{copy_label, memory_label};
use super::tracks::{self, Event, Numbers, Place, Track};
use crate::{CallKind, Device, NONE, OpDetail, OpKind, RangeKind, RangeSource, StrId, Trace, TraceError, range_flags};

/// Writes the trace as one JSON object and returns the number of events in it, descriptions of tracks and arrows aside.
pub(crate) fn write<W: Write>(trace: &Trace, out: W) -> Result<(W, u64), TraceError> {
    let tracks = tracks::tracks(trace);
    let mut writer = Writer {
        trace,
        json: JsonWriter::new(out),
        names: QuotedStrings::of(trace),
        places: Places::new(trace, &tracks),
        details: trace.details.iter().map(detail_args).collect(),
        works: trace.works.iter().map(|work| work_args(trace, work)).collect(),
        json_text: HashMap::new(),
        last_launched: tracks::last_launched(trace),
        events: 0,
        first: true,
    };
    writer.head();
    writer.descriptions(&tracks);
    for track in &tracks {
        writer.track(track)?;
    }
    writer.iterations()?;
    writer.counters()?;
    writer.allocations()?;
    writer.json.raw("\n]}\n");
    let events = writer.events;
    Ok((writer.json.finish()?, events))
}

/// The process and thread numbers that stand for processes, devices and lanes.
struct Places {
    processes: Vec<i64>,
    /// Per device the number in arguments and the process number it is shown under.
    devices: Vec<(i64, i64)>,
    /// Thread numbers by track and lane.
    lanes: BTreeMap<(Place, u32), i64>,
    /// Process and thread number of the track of iterations.
    iterations: (i64, i64),
}

impl Places {
    fn new(trace: &Trace, tracks: &[Track]) -> Self {
        let mut pids = Numbers::within(0..=i64::MAX);
        let processes: Vec<i64> = trace.processes.iter().map(|p| pids.take(p.pid)).collect();
        let devices: Vec<(i64, i64)> =
            tracks::device_numbers(trace).into_iter().map(|number| (number, pids.take(number))).collect();
        let mut places = Self { processes, devices, lanes: BTreeMap::new(), iterations: (0, 0) };
        let mut tids: HashMap<i64, Numbers> = HashMap::new();
        let mut take = |pid, wanted| tids.entry(pid).or_insert_with(|| Numbers::within(0..=i64::MAX)).take(wanted);
        // Recorded numbers first: what is made up must not take them.
        let lanes = tracks.iter().flat_map(|track| (1..track.lanes).map(move |lane| (track, lane)));
        for (track, lane) in tracks.iter().map(|track| (track, 0)).chain(lanes) {
            let is_own = lane == 0 && !matches!(track.place, Place::Unordered(_));
            let wanted = recorded_number(trace, track.place).filter(|_| is_own).unwrap_or(-1);
            let tid = take(places.pid(trace, track.place), wanted);
            places.lanes.insert((track.place, lane), tid);
        }
        let pid = places.processes.first().copied().unwrap_or(0);
        places.iterations = (pid, take(pid, -1));
        places
    }

    fn pid(&self, trace: &Trace, place: Place) -> i64 {
        let process = |thread: u32| trace.threads.get(thread as usize).map(|t| t.process as usize);
        match place {
            Place::Thread(thread) | Place::Unordered(thread) => {
                process(thread).and_then(|p| self.processes.get(p)).copied().unwrap_or(0)
            }
            Place::Stream { device, .. } => self.device_pid(device),
        }
    }

    fn device_pid(&self, device: u32) -> i64 {
        self.devices.get(device as usize).map_or(i64::from(device), |d| d.1)
    }

    fn device_number(&self, device: u32) -> i64 {
        self.devices.get(device as usize).map_or(i64::from(device), |d| d.0)
    }

    fn tid(&self, place: Place, lane: u32) -> i64 {
        self.lanes.get(&(place, lane)).copied().unwrap_or(0)
    }
}

/// The thread or stream that a track stands for, by its recorded number.
fn recorded_number(trace: &Trace, place: Place) -> Option<i64> {
    match place {
        Place::Thread(index) | Place::Unordered(index) => trace.threads.get(index as usize).map(|t| t.tid),
        Place::Stream { stream, .. } => Some(i64::from(stream)),
    }
}

/// The devices that one process alone used, with that process.
fn users(trace: &Trace) -> Vec<(u32, u32)> {
    let pairs = trace.ops.device.iter().zip(&trace.ops.process).zip(&trace.ops.kind);
    let pairs = pairs.filter(|(_, kind)| **kind != OpKind::CpuOp).map(|((&device, &process), _)| (device, process));
    let pairs: BTreeSet<(u32, u32)> = pairs.collect();
    let is_only = |&(device, _): &(u32, u32)| pairs.range((device, 0)..=(device, u32::MAX)).take(2).count() == 1;
    pairs.iter().copied().filter(is_only).collect()
}

struct Writer<'a, W: Write> {
    trace: &'a Trace,
    json: JsonWriter<W>,
    names: QuotedStrings,
    places: Places,
    /// Arguments of the distinct details and works, made once.
    details: Vec<Vec<u8>>,
    works: Vec<Vec<u8>>,
    /// Whether a string is JSON and may stand in arguments as it is.
    json_text: HashMap<StrId, bool>,
    last_launched: Vec<u32>,
    events: u64,
    first: bool,
}

impl<W: Write> Writer<'_, W> {
    fn head(&mut self) {
        let (trace, json) = (self.trace, &mut self.json);
        json.raw("{\"schemaVersion\":1,\"displayTimeUnit\":\"ns\"");
        if let Some(base) = trace.meta.session_start_utc_ns {
            json.raw(",\"baseTimeNanoseconds\":").int(base);
        }
        let ranks: Vec<u32> = trace.processes.iter().filter_map(|p| p.rank).collect();
        if let [rank] = ranks[..] {
            json.raw(",\"distributedInfo\":{\"rank\":").int(i64::from(rank)).raw("}");
        }
        json.raw(",\"deviceProperties\":[");
        let devices = trace.devices.iter().zip(&self.places.devices).filter(|(device, _)| !device.is_cpu);
        for (n, (device, &(number, _))) in devices.enumerate() {
            json.raw(if n > 0 { ",\n" } else { "\n" });
            device_properties(json, device, number);
        }
        json.raw("],\"strobe\":{\"lanes\":[");
        let lanes = self.places.lanes.iter().filter_map(|(&(place, _), &tid)| {
            let recorded = recorded_number(trace, place).filter(|&recorded| recorded != tid)?;
            Some([self.places.pid(trace, place), tid, recorded])
        });
        for (n, [pid, tid, recorded]) in lanes.enumerate() {
            json.raw(if n > 0 { ",[" } else { "[" }).int(pid).raw(",").int(tid).raw(",").int(recorded).raw("]");
        }
        // Kineto knows the process of a device event only through its launch, which may be missing.
        json.raw("],\"users\":[");
        for (n, (device, process)) in users(trace).into_iter().enumerate() {
            let pid = self.places.processes.get(process as usize).copied().unwrap_or(0);
            let number = self.places.device_number(device);
            json.raw(if n > 0 { ",[" } else { "[" }).int(number).raw(",").int(pid).raw("]");
        }
        json.raw("]},\"otherData\":{\"producer\":").text(&trace.meta.producer);
        json.raw(",\"partial\":").raw(if trace.meta.partial { "true" } else { "false" });
        json.raw(",\"windows\":[");
        for (n, window) in trace.meta.windows.iter().enumerate() {
            json.raw(if n > 0 { ",{\"first\":" } else { "{\"first\":" }).unsigned(window.first);
            json.raw(",\"last\":").unsigned(window.last);
            json.raw(",\"complete\":").raw(if window.complete { "true" } else { "false" }).raw("}");
        }
        json.raw("],\"notices\":[");
        for (n, notice) in trace.meta.notices.iter().enumerate() {
            json.raw(if n > 0 { "," } else { "" }).text(notice);
        }
        json.raw("],\"extra\":{");
        for (n, (key, value)) in trace.meta.extra.iter().enumerate() {
            json.raw(if n > 0 { "," } else { "" }).text(key).raw(":").text(super::without_directories(value));
        }
        json.raw("}},\"traceEvents\":[");
    }

    /// Names and order of processes and tracks.
    fn descriptions(&mut self, tracks: &[Track]) {
        let mut order = 0;
        for index in 0..self.trace.processes.len() {
            let pid = self.places.processes[index];
            let process = &self.trace.processes[index];
            if !process.name.is_empty() {
                self.metadata("process_name", pid, 0, |json| {
                    json.raw("\"name\":").text(&process.name);
                });
            }
            if let Some(rank) = process.rank {
                self.metadata("process_labels", pid, 0, |json| {
                    json.raw("\"labels\":").text(&format!("rank {rank}"));
                });
            }
            self.metadata("process_sort_index", pid, 0, |json| {
                json.raw("\"sort_index\":").int(order);
            });
            order += 1;
        }
        let shown = tracks::devices_with_streams(tracks);
        for index in 0..self.trace.devices.len() {
            let (number, pid) = self.places.devices[index];
            if self.trace.devices[index].is_cpu && !shown.contains(&(index as u32)) {
                continue; // its ops stand on the threads that computed them
            }
            self.metadata("process_name", pid, 0, |json| {
                json.raw("\"name\":").text(&tracks::device_label(self.trace, index, number));
            });
            self.metadata("process_labels", pid, 0, |json| {
                json.raw("\"labels\":").text(&format!("GPU {number}"));
            });
            self.metadata("process_sort_index", pid, 0, |json| {
                json.raw("\"sort_index\":").int(order);
            });
            order += 1;
        }
        if !self.trace.iterations.is_empty() {
            let (pid, tid) = self.places.iterations;
            self.track_name(pid, tid, "iterations", 0);
        }
        let mut order = 1;
        for track in tracks {
            let pid = self.places.pid(self.trace, track.place);
            for lane in 0..track.lanes {
                let tid = self.places.tid(track.place, lane);
                let thread = match track.place {
                    Place::Thread(index) if lane == 0 => self.trace.threads.get(index as usize),
                    _ => None,
                };
                // Viewers call a thread without a name by its number.
                if thread.is_none_or(|thread| !thread.name.is_empty()) {
                    self.track_name(pid, tid, &tracks::track_label(self.trace, track.place, lane), order);
                }
                order += 1;
            }
        }
    }

    fn track_name(&mut self, pid: i64, tid: i64, name: &str, order: i64) {
        self.metadata("thread_name", pid, tid, |json| {
            json.raw("\"name\":").text(name);
        });
        self.metadata("thread_sort_index", pid, tid, |json| {
            json.raw("\"sort_index\":").int(order);
        });
    }

    fn metadata(&mut self, what: &str, pid: i64, tid: i64, args: impl FnOnce(&mut JsonWriter<W>)) {
        self.separate();
        self.json.raw("{\"ph\":\"M\",\"name\":\"").raw(what).raw("\",\"pid\":").int(pid).raw(",\"tid\":").int(tid);
        self.json.raw(",\"ts\":0,\"args\":{");
        args(&mut self.json);
        self.json.raw("}}");
    }

    fn separate(&mut self) {
        self.json.raw(if self.first { "\n" } else { ",\n" });
        self.first = false;
    }

    fn track(&mut self, track: &Track) -> Result<(), TraceError> {
        let pid = self.places.pid(self.trace, track.place);
        let tids: Vec<i64> = (0..track.lanes).map(|lane| self.places.tid(track.place, lane)).collect();
        for (event, lane) in track.events(self.trace) {
            let tid = tids[lane as usize];
            match event {
                Event::Range(index) => self.range(index, track.place, pid, tid),
                Event::Call(index) => self.call(index, pid, tid),
                Event::Op(index) => self.op(index, pid, tid),
            }
            self.json.settle()?;
        }
        Ok(())
    }

    /// Begins a slice up to and without its arguments.
    fn slice(&mut self, category: &str, name: Name, pid: i64, tid: i64, start: i64, end: i64) {
        self.separate();
        self.events += 1;
        self.json.raw("{\"ph\":\"X\",\"cat\":\"").raw(category).raw("\",\"name\":");
        match name {
            Name::Id(id) => self.json.raw(self.names.get(id)),
            Name::Text(text) => self.json.text(text),
        };
        self.json.raw(",\"pid\":").int(pid).raw(",\"tid\":").int(tid).raw(",\"ts\":").microseconds(start);
        self.json.raw(",\"dur\":").microseconds(end.saturating_sub(start)).raw(",\"args\":{");
    }

    fn range(&mut self, index: usize, place: Place, pid: i64, tid: i64) {
        let range = self.trace.ranges.get(index);
        let category = match range.source {
            RangeSource::PushPop | RangeSource::StartEnd | RangeSource::Annotation => "user_annotation",
            RangeSource::GpuAnnotation => "gpu_user_annotation",
            RangeSource::CpuOp => "cpu_op",
            RangeSource::Python => "python_function",
            RangeSource::Other => "other",
        };
        if range.flags & range_flags::MARK != 0 {
            self.separate();
            self.events += 1;
            self.json.raw("{\"ph\":\"i\",\"s\":\"t\",\"cat\":\"").raw(category).raw("\",\"name\":");
            self.json.raw(self.names.get(range.name)).raw(",\"pid\":").int(pid).raw(",\"tid\":").int(tid);
            self.json.raw(",\"ts\":").microseconds(range.start).raw(",\"args\":{");
        } else {
            self.slice(category, Name::Id(range.name), pid, tid, range.start, range.end);
        }
        let mut args = Args { json: &mut self.json, first: true };
        if range.domain.is_some() {
            args.key("domain").raw(self.names.get(range.domain));
        }
        let inputs = [
            ("Input Dims", range.dims),
            ("Input type", range.types),
            ("Concrete Inputs", range.values),
            ("Input Strides", range.strides),
        ];
        for (key, id) in inputs {
            if id.is_some() {
                let text = self.trace.text(id);
                let is_json = || serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok();
                let plain = *self.json_text.entry(id).or_insert_with(is_json);
                args.key(key).raw(if plain { text.as_bytes() } else { self.names.get(id) });
            }
        }
        if range.iteration != NONE {
            args.key("iter").unsigned(range.iteration.into());
        }
        if range.kind != RangeKind::Other {
            args.key("phase").text(range.kind.as_str());
        }
        match range.source {
            RangeSource::PushPop => args.key("recorded source").raw("\"push_pop\""),
            RangeSource::StartEnd => args.key("recorded source").raw("\"start_end\""),
            _ => args.json,
        };
        if range.flags & range_flags::UNCLOSED != 0 {
            args.key("unclosed").raw("true");
        }
        if let Place::Stream { device, stream, .. } = place {
            args.key("device").int(self.places.device_number(device));
            args.key("stream").unsigned(stream.into());
        }
        self.json.raw("}}");
    }

    fn call(&mut self, index: usize, pid: i64, tid: i64) {
        let call = self.trace.calls.get(index);
        let recorded = self.trace.text(call.name);
        let name = if call.kind == CallKind::Gpu { without_version(recorded) } else { recorded };
        let category = match call.kind {
            CallKind::Gpu if name.starts_with("cu") && !name.starts_with("cuda") => "cuda_driver",
            CallKind::Gpu => "cuda_runtime",
            CallKind::OsRuntime => "os_runtime",
            CallKind::Profiler => "overhead",
        };
        let is_kept = name.len() == recorded.len();
        let shown = if is_kept { Name::Id(call.name) } else { Name::Text(name) };
        self.slice(category, shown, pid, tid, call.start, call.end);
        let mut args = Args { json: &mut self.json, first: true };
        if call.correlation != 0 {
            args.key("correlation").int(call.correlation);
        }
        if call.result != 0 {
            args.key("result").int(call.result.into());
        }
        if !is_kept {
            args.key("recorded name").raw(self.names.get(call.name));
        }
        self.json.raw("}}");
        if self.last_launched[index] != NONE {
            self.arrow("s", index, pid, tid, call.start);
        }
    }

    fn op(&mut self, index: usize, pid: i64, tid: i64) {
        let op = self.trace.ops.get(index);
        let work = self.trace.works.get(op.work as usize);
        if op.kind == OpKind::CpuOp {
            let name = work.map_or(op.name, |work| work.op);
            self.slice("cpu_op", Name::Id(name), pid, tid, op.start, op.end);
            let mut args = Args { json: &mut self.json, first: true };
            args.key("kernel").raw(self.names.get(op.name));
            args.fragment(self.works.get(op.work as usize));
            if op.iteration != NONE {
                args.key("iter").unsigned(op.iteration.into());
            }
            for (key, amount) in [("GB/s", work.map_or(0, |w| w.bytes)), ("GFLOP/s", work.map_or(0, |w| w.flops))] {
                if let Some(rate) = giga_per_s(amount, op.start, op.end) {
                    args.key(key).float(rate);
                }
            }
            self.json.raw("}}");
            return;
        }
        let detail = self.trace.details.get(op.detail as usize);
        let recorded = self.trace.text(op.name);
        let kineto_name = if recorded.starts_with('[') { detail.and_then(memory_name) } else { None };
        let category = match op.kind {
            OpKind::Kernel | OpKind::CpuOp => "kernel",
            OpKind::Memcpy => "gpu_memcpy",
            OpKind::Memset => "gpu_memset",
            OpKind::Graph => "gpu_graph",
        };
        let name = kineto_name.as_deref().map_or(Name::Id(op.name), Name::Text);
        self.slice(category, name, pid, tid, op.start, op.end);
        let mut args = Args { json: &mut self.json, first: true };
        args.key("device").int(self.places.device_number(op.device));
        args.key("context").unsigned(op.context.into());
        args.key("stream").unsigned(op.stream.into());
        if op.correlation != 0 {
            args.key("correlation").int(op.correlation);
        }
        if op.kind.is_memory() {
            args.key("bytes").unsigned(op.bytes);
            if let Some(rate) = giga_per_s(op.bytes, op.start, op.end) {
                args.key("memory bandwidth (GB/s)").float(rate);
            }
        }
        args.fragment(self.details.get(op.detail as usize));
        if op.graph_node != 0 {
            args.key("graph node id").unsigned(op.graph_node);
        }
        if !op.kind.is_memory() {
            args.fragment(self.works.get(op.work as usize));
        }
        if op.iteration != NONE {
            args.key("iter").unsigned(op.iteration.into());
        }
        if kineto_name.is_some() {
            args.key("recorded name").raw(self.names.get(op.name));
        }
        self.json.raw("}}");
        if op.launch != NONE {
            let is_last = self.last_launched.get(op.launch as usize) == Some(&(index as u32));
            self.arrow(if is_last { "f" } else { "t" }, op.launch as usize, pid, tid, op.start);
        }
    }

    /// One end or step of the chain from a call to what it launched. It binds to the slice written before it.
    fn arrow(&mut self, phase: &str, call: usize, pid: i64, tid: i64, at: i64) {
        self.separate();
        self.json.raw("{\"ph\":\"").raw(phase).raw("\",\"id\":").unsigned(call as u64 + 1);
        self.json.raw(",\"pid\":").int(pid).raw(",\"tid\":").int(tid).raw(",\"ts\":").microseconds(at);
        self.json.raw(if phase == "s" { ",\"cat\":\"ac2g\"" } else { ",\"bp\":\"e\",\"cat\":\"ac2g\"" });
        self.json.raw(",\"name\":\"ac2g\"}");
    }

    fn iterations(&mut self) -> Result<(), TraceError> {
        let (pid, tid) = self.places.iterations;
        for (n, it) in self.trace.iterations.iter().enumerate() {
            let name = format!("iteration {} ({})", it.iter, it.kind());
            self.slice("strobe_iteration", Name::Text(&name), pid, tid, it.start, it.end);
            let mut args = Args { json: &mut self.json, first: true };
            args.key("iter").unsigned(it.iter);
            args.key("context_requests").unsigned(it.context_requests.into());
            args.key("generation_requests").unsigned(it.generation_requests.into());
            args.key("context_tokens").unsigned(it.context_tokens.into());
            args.key("generation_tokens").unsigned(it.generation_tokens.into());
            args.key("window").unsigned(it.window.into());
            if let Some(ns) = it.cpu_wait.and_then(|ns| u64::try_from(ns).ok()) {
                args.key("cpu_wait_ns").unsigned(ns);
            }
            self.json.raw("}}");
            self.tokens(it.start, it.context_tokens, it.generation_tokens);
            // Between two windows nothing was recorded: the counter must not seem to go on.
            if self.trace.iterations.get(n + 1).is_none_or(|next| next.window != it.window) {
                self.tokens(it.end, 0, 0);
            }
            self.json.settle()?;
        }
        Ok(())
    }

    fn tokens(&mut self, at: i64, context: u32, generation: u32) {
        self.counter("tokens per iteration", self.places.iterations.0, at);
        self.json.raw("\"context\":").unsigned(context.into()).raw(",\"generation\":").unsigned(generation.into());
        self.json.raw("}}");
    }

    /// Begins a sample of a counter up to and without its values.
    fn counter(&mut self, name: &str, pid: i64, at: i64) {
        self.separate();
        self.events += 1;
        self.json.raw("{\"ph\":\"C\",\"name\":").text(name).raw(",\"pid\":").int(pid);
        self.json.raw(",\"ts\":").microseconds(at).raw(",\"args\":{");
    }

    fn counters(&mut self) -> Result<(), TraceError> {
        for counter in &self.trace.counters {
            let process = self.places.processes.first().copied().unwrap_or(0);
            let pid = counter.device.map_or(process, |device| self.places.device_pid(device));
            let known = counter.times.iter().zip(&counter.values).filter(|(_, value)| value.is_finite());
            for (&time, &value) in known {
                self.counter(&counter.name, pid, time);
                self.json.raw("\"value\":").float(value).raw("}}");
                self.json.settle()?;
            }
        }
        Ok(())
    }

    /// Memory taken and given back, as the PyTorch profiler writes it.
    fn allocations(&mut self) -> Result<(), TraceError> {
        for allocation in &self.trace.allocations {
            let pid = self.places.processes.get(allocation.process as usize).copied().unwrap_or(0);
            self.separate();
            self.events += 1;
            self.json
                .raw("{\"ph\":\"i\",\"s\":\"t\",\"cat\":\"cpu_instant_event\",\"name\":\"[memory]\",\"pid\":")
                .int(pid);
            let thread = self.trace.threads.iter().find(|thread| thread.process == allocation.process);
            self.json.raw(",\"tid\":").int(thread.map_or(pid, |thread| thread.tid));
            self.json.raw(",\"ts\":").microseconds(allocation.time).raw(",\"args\":{");
            let mut args = Args { json: &mut self.json, first: true };
            args.key("Device Type").int(i64::from(allocation.device.is_some()));
            args.key("Device Id").int(allocation.device.map_or(-1, |device| self.places.device_number(device)));
            args.key("Addr").unsigned(allocation.address);
            args.key("Bytes").int(allocation.bytes);
            for (key, total) in
                [("Total Allocated", allocation.total_allocated), ("Total Reserved", allocation.total_reserved)]
            {
                if let Some(total) = total {
                    args.key(key).unsigned(total);
                }
            }
            if allocation.mem_kind != u8::MAX {
                args.key("memory kind").unsigned(allocation.mem_kind.into());
            }
            if allocation.name.is_some() {
                args.key("name").raw(self.names.get(allocation.name));
            }
            self.json.raw("}}");
            self.json.settle()?;
        }
        Ok(())
    }
}

/// What a slice is called.
enum Name<'a> {
    Id(StrId),
    Text(&'a str),
}

/// The arguments of an event, separated by commas.
struct Args<'a, W: Write> {
    json: &'a mut JsonWriter<W>,
    first: bool,
}

impl<W: Write> Args<'_, W> {
    /// Writes a key of plain letters; its value comes next.
    fn key(&mut self, key: &str) -> &mut JsonWriter<W> {
        self.json.raw(if self.first { "\"" } else { ",\"" }).raw(key).raw("\":");
        self.first = false;
        self.json
    }

    /// Writes arguments made before.
    fn fragment(&mut self, fragment: Option<&Vec<u8>>) {
        if let Some(fragment) = fragment.filter(|f| !f.is_empty()) {
            self.json.raw(if self.first { "" } else { "," }).raw(fragment);
            self.first = false;
        }
    }
}

fn device_properties<W: Write>(json: &mut JsonWriter<W>, device: &Device, number: i64) {
    json.raw("{\"id\":").int(number).raw(",\"name\":").text(&device.name);
    if let Some(bytes) = device.memory_bytes {
        json.raw(",\"totalGlobalMem\":").unsigned(bytes);
    }
    if let Some((major, minor)) = device.compute_capability {
        json.raw(",\"computeMajor\":").unsigned(major.into()).raw(",\"computeMinor\":").unsigned(minor.into());
    }
    if let Some(count) = device.multiprocessors {
        json.raw(",\"numSms\":").unsigned(count.into());
    }
    for (key, value) in [("memoryBandwidth", device.bytes_per_s), ("clockRate", device.clock_hz)] {
        if let Some(value) = value.filter(|v| v.is_finite()) {
            json.raw(",\"").raw(key).raw("\":").float(value);
        }
    }
    json.raw("}");
}

/// Appends `"key":value` to arguments made in advance.
fn push_pair(args: &mut Vec<u8>, key: &str, value: impl FnOnce(&mut Vec<u8>)) {
    if !args.is_empty() {
        args.push(b',');
    }
    push_quoted(args, key);
    args.push(b':');
    value(args);
}

fn push_number(args: &mut Vec<u8>, key: &str, value: u64) {
    push_pair(args, key, |args| push_unsigned(args, value));
}

fn push_triple(args: &mut Vec<u8>, key: &str, values: [u32; 3]) {
    push_pair(args, key, |args| {
        for (n, value) in values.into_iter().enumerate() {
            args.push(if n == 0 { b'[' } else { b',' });
            push_unsigned(args, value.into());
        }
        args.push(b']');
    });
}

fn detail_args(detail: &OpDetail) -> Vec<u8> {
    let mut args = Vec::new();
    match *detail {
        OpDetail::Kernel(kernel) => {
            if kernel.registers > 0 {
                push_number(&mut args, "registers per thread", kernel.registers.into());
            }
            let shared = u64::from(kernel.static_shared) + u64::from(kernel.dynamic_shared);
            push_number(&mut args, "shared memory", shared);
            if kernel.static_shared > 0 {
                push_number(&mut args, "static shared memory", kernel.static_shared.into());
            }
            if kernel.grid != [0; 3] {
                push_triple(&mut args, "grid", kernel.grid);
            }
            if kernel.block != [0; 3] {
                push_triple(&mut args, "block", kernel.block);
            }
        }
        OpDetail::Memcpy { src_device, dst_device, .. } => {
            for (key, device) in [("fromDevice", src_device), ("toDevice", dst_device)] {
                if let Some(device) = device {
                    push_number(&mut args, key, device.into());
                }
            }
        }
        OpDetail::Memset { value, .. } => push_number(&mut args, "value", value.into()),
        OpDetail::Graph { graph, exec } => {
            push_number(&mut args, "graph id", graph.into());
            push_number(&mut args, "graph exec id", exec.into());
        }
    }
    args
}

fn work_args(trace: &Trace, work: &crate::Work) -> Vec<u8> {
    let mut args = Vec::new();
    for (key, id) in [("op", work.op), ("category", work.category)] {
        if id.is_some() {
            push_pair(&mut args, key, |args| push_quoted(args, trace.text(id)));
        }
    }
    if let Some(layer) = work.layer {
        push_number(&mut args, "layer", layer.into());
    }
    let [m, n, k] = work.shape;
    for (key, value) in [("m", m), ("n", n), ("k", k), ("bytes", work.bytes), ("flops", work.flops)] {
        if value > 0 {
            push_number(&mut args, key, value);
        }
    }
    args
}

/// `amount` per nanosecond, which is giga per second, to three decimals.
fn giga_per_s(amount: u64, start: i64, end: i64) -> Option<f64> {
    let duration = end.saturating_sub(start);
    (amount > 0 && duration > 0).then(|| (amount as f64 / duration as f64 * 1e3).round() / 1e3)
}

/// A function of CUDA as its callers write it: nsys adds the version of its parameters, e.g. `cudaLaunchKernel_v7000`.
fn without_version(name: &str) -> &str {
    let base = name.trim_end_matches(|c: char| c.is_ascii_digit());
    match base.strip_suffix("_v") {
        // `cuMemcpyHtoDAsync_v2` is a function of its own: the versions that nsys adds have four digits or more.
        Some(function) if name.len() - base.len() >= 4 && name.starts_with("cu") => function,
        _ => name,
    }
}

/// A copy or fill in Kineto's wording, by which other tools know it, where its kind was recorded.
fn memory_name(detail: &OpDetail) -> Option<String> {
    let memory = |kind| memory_label(kind).unwrap_or("Unknown");
    match *detail {
        OpDetail::Memcpy { copy_kind, src_kind, dst_kind, .. } => {
            let direction = copy_label(copy_kind)?;
            Some(format!("Memcpy {direction} ({} -> {})", memory(src_kind), memory(dst_kind)))
        }
        OpDetail::Memset { mem_kind, .. } => Some(format!("Memset ({})", memory(mem_kind))),
        OpDetail::Kernel(_) | OpDetail::Graph { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_what_nsys_adds() {
        assert_eq!(without_version("cudaLaunchKernel_v7000"), "cudaLaunchKernel");
        assert_eq!(without_version("cudaGraphLaunch_v10000"), "cudaGraphLaunch");
        assert_eq!(without_version("cuMemcpyHtoDAsync_v2"), "cuMemcpyHtoDAsync_v2");
        assert_eq!(without_version("hipLaunchKernel"), "hipLaunchKernel");
        assert_eq!(without_version("2000"), "2000");
    }
}
