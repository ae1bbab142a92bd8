//! How viewers show a trace: one track per thread and per stream, with lanes where spans overlap.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::lanes::Lanes;
use crate::{NONE, OpKind, RangeSource, Trace, range_flags};

/// What a track stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// What a thread did: its ranges that nest, its calls, the ops it computed itself.
    Thread(u32),
    /// The ranges of a thread that were opened and closed in any order.
    Unordered(u32),
    /// What ran on a stream of a device, and the annotations that the profiler projected onto it.
    Stream {
        /// Index into [`Trace::devices`].
        device: u32,
        /// Index into [`Trace::processes`].
        process: u32,
        /// The stream's number.
        stream: u32,
    },
}

/// An event by its index in its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Of [`Trace::ranges`].
    Range(usize),
    /// Of [`Trace::calls`].
    Call(usize),
    /// Of [`Trace::ops`].
    Op(usize),
}

/// The events of one thread or stream.
pub(crate) struct Track {
    /// What it stands for.
    pub place: Place,
    /// How many lanes it takes, at least one.
    pub lanes: u32,
    /// Its events by start, outer before inner, each with its lane; numbered through all tables to save room.
    events: Vec<(u32, u32)>,
}

impl Track {
    /// Its events by start, outer before inner, each with its lane.
    pub(crate) fn events<'a>(&'a self, trace: &'a Trace) -> impl Iterator<Item = (Event, u32)> + 'a {
        self.events.iter().map(|&(number, lane)| (event(trace, number), lane))
    }
}

fn event(trace: &Trace, number: u32) -> Event {
    let (number, ranges, calls) = (number as usize, trace.ranges.len(), trace.calls.len());
    if number < ranges {
        Event::Range(number)
    } else if number < ranges + calls {
        Event::Call(number - ranges)
    } else {
        Event::Op(number - ranges - calls)
    }
}

/// When an event began and ended.
pub(crate) fn span(trace: &Trace, event: Event) -> (i64, i64) {
    match event {
        Event::Range(i) => (trace.ranges.start[i], trace.ranges.end[i]),
        Event::Call(i) => (trace.calls.start[i], trace.calls.end[i]),
        Event::Op(i) => (trace.ops.start[i], trace.ops.end[i]),
    }
}

/// Whether a range is an instant, which needs no lane.
pub(crate) fn is_mark(trace: &Trace, range: usize) -> bool {
    trace.ranges.flags[range] & range_flags::MARK != 0
}

/// The places of the annotations that a profiler projected onto the device. Their thread stands for a stream; the
/// device is one on which ops of the same process and stream ran.
fn projected(trace: &Trace) -> HashMap<u32, Place> {
    let gpu_threads = trace.ranges.thread.iter().zip(&trace.ranges.source);
    let gpu_threads: BTreeSet<u32> =
        gpu_threads.filter(|&(_, &source)| source == RangeSource::GpuAnnotation).map(|(&thread, _)| thread).collect();
    if gpu_threads.is_empty() {
        return HashMap::new();
    }
    let streams = trace.ops.process.iter().zip(&trace.ops.stream).zip(&trace.ops.device);
    let streams: BTreeSet<(u32, u32, u32)> = streams.map(|((&p, &s), &d)| (p, s, d)).collect();
    let mut taken: HashMap<(u32, u32), usize> = HashMap::new();
    let mut places = HashMap::new();
    for index in gpu_threads {
        let Some(thread) = trace.threads.get(index as usize) else { continue };
        let (process, Ok(stream)) = (thread.process, u32::try_from(thread.tid)) else { continue };
        let mut devices = streams.range((process, stream, 0)..=(process, stream, u32::MAX));
        // The same stream of several devices has a thread for each, in the order in which the devices were found.
        let nth = taken.entry((process, stream)).or_default();
        if let Some(&(_, _, device)) = devices.nth(*nth) {
            *nth += 1;
            places.insert(index, Place::Stream { device, process, stream });
        }
    }
    places
}

fn place(trace: &Trace, event: Event, projected: &HashMap<u32, Place>) -> Place {
    match event {
        Event::Range(i) => {
            let thread = trace.ranges.thread[i];
            match trace.ranges.source[i] {
                RangeSource::StartEnd => Place::Unordered(thread),
                RangeSource::GpuAnnotation => projected.get(&thread).copied().unwrap_or(Place::Unordered(thread)),
                _ => Place::Thread(thread),
            }
        }
        Event::Call(i) => Place::Thread(trace.calls.thread[i]),
        Event::Op(i) => {
            let (device, process, stream) = (trace.ops.device[i], trace.ops.process[i], trace.ops.stream[i]);
            let computed_by_thread = trace.ops.kind[i] == OpKind::CpuOp && (stream as usize) < trace.threads.len();
            if computed_by_thread { Place::Thread(stream) } else { Place::Stream { device, process, stream } }
        }
    }
}

/// All ranges, calls and ops of a trace on their tracks.
pub(crate) fn tracks(trace: &Trace) -> Vec<Track> {
    let total = trace.ranges.len() + trace.calls.len() + trace.ops.len();
    let projected = projected(trace);
    let mut by_place: BTreeMap<Place, Vec<(u32, u32)>> = BTreeMap::new();
    for number in 0..total as u32 {
        by_place.entry(place(trace, event(trace, number), &projected)).or_default().push((number, 0));
    }
    let lay_out = |(place, mut events): (Place, Vec<(u32, u32)>)| {
        // Ranges, calls and ops each come by start: the sort merges three runs. Of equal spans a range is the outer one.
        events.sort_by_key(|&(number, _)| {
            let (start, end) = span(trace, event(trace, number));
            (start, Reverse(end))
        });
        let mut lanes = Lanes::default();
        for (number, lane) in &mut events {
            let event = event(trace, *number);
            if !matches!(event, Event::Range(i) if is_mark(trace, i)) {
                let (start, end) = span(trace, event);
                *lane = lanes.place(start, end);
            }
        }
        Track { place, lanes: lanes.count().max(1), events }
    };
    by_place.into_iter().map(lay_out).collect()
}

/// The devices that have a track of their own.
pub(crate) fn devices_with_streams(tracks: &[Track]) -> HashSet<u32> {
    let device = |track: &Track| match track.place {
        Place::Stream { device, .. } => Some(device),
        _ => None,
    };
    tracks.iter().filter_map(device).collect()
}

/// For every call the last op that it launched, or [`NONE`]: where the chain of arrows from the call ends.
pub(crate) fn last_launched(trace: &Trace) -> Vec<u32> {
    let mut last = vec![NONE; trace.calls.len()];
    for (op, &call) in trace.ops.launch.iter().enumerate() {
        if let Some(last) = last.get_mut(call as usize) {
            *last = op as u32;
        }
    }
    last
}

/// Distinct numbers for processes, devices and tracks: those recorded where viewers can tell them apart.
pub(crate) struct Numbers {
    allowed: std::ops::RangeInclusive<i64>,
    used: HashSet<i64>,
    next: i64,
}

impl Numbers {
    /// Numbers within these bounds.
    pub(crate) fn within(allowed: std::ops::RangeInclusive<i64>) -> Self {
        // Made-up numbers stand apart from what systems hand out.
        Self { allowed, used: HashSet::new(), next: 1_000_000_000 }
    }

    /// The wanted number if nobody has it, else one that nobody has.
    pub(crate) fn take(&mut self, wanted: i64) -> i64 {
        if self.allowed.contains(&wanted) && self.used.insert(wanted) {
            return wanted;
        }
        while !self.used.insert(self.next) {
            self.next += 1;
        }
        self.next
    }
}

/// What a device is called in a viewer.
pub(crate) fn device_label(trace: &Trace, index: usize, number: i64) -> String {
    let Some(device) = trace.devices.get(index) else { return format!("GPU {number}") };
    let what = if device.is_cpu { "CPU" } else { "GPU" };
    let mut label = format!("{what} {number}");
    if !device.name.is_empty() {
        label = format!("{label}: {}", device.name);
    }
    label
}

/// What a process is called in a viewer.
pub(crate) fn process_label(trace: &Trace, index: usize) -> String {
    let Some(process) = trace.processes.get(index) else { return "process".to_owned() };
    let name = if process.name.is_empty() { "process" } else { &process.name };
    process.rank.map_or_else(|| name.to_owned(), |rank| format!("{name} (rank {rank})"))
}

/// What a lane of a track is called in a viewer.
pub(crate) fn track_label(trace: &Trace, place: Place, lane: u32) -> String {
    let thread = |index: u32| match trace.threads.get(index as usize) {
        Some(thread) if thread.name.is_empty() => format!("thread {}", thread.tid),
        Some(thread) => thread.name.clone(),
        None => "thread".to_owned(),
    };
    let label = match place {
        Place::Thread(index) => thread(index),
        Place::Unordered(index) => format!("{}: start/end ranges", thread(index)),
        Place::Stream { stream, .. } => format!("stream {stream}"),
    };
    if lane == 0 { label } else { format!("{label} (overlap {lane})") }
}

/// The number that a device has in exported files: its ordinal if that tells it from all others, else its place in the
/// list, as when several ranks each call their device 0.
pub(crate) fn device_numbers(trace: &Trace) -> Vec<i64> {
    let mut seen = HashSet::new();
    let distinct = trace.devices.iter().filter(|d| !d.is_cpu).all(|d| seen.insert(d.ordinal));
    let number = |(index, device): (usize, &crate::Device)| {
        if distinct { i64::from(device.ordinal) } else { index as i64 }
    };
    trace.devices.iter().enumerate().map(number).collect()
}
