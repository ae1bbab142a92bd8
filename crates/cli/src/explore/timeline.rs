//! The events of a trace as tracks of the explorer.

use std::collections::BTreeMap;

use strobe_analyze::Context;
use strobe_analyze::summary::device_name;
use strobe_report::explorer::{self, Timeline, Track, TrackKind};
use strobe_report::human;
use strobe_trace::{CallKind, NONE, OpDetail, RangeSource, Trace, range_flags};

/// More events than this make a page slow to open; the least telling ones are left out then.
const MOST_EVENTS: usize = 1_500_000;

/// The tracks, and a sentence about what was left out.
pub(super) struct Drawn {
    pub timeline: Timeline,
    pub left_out: Option<String>,
}

/// What is drawn: from the device outwards, so that a trace that is too large keeps what matters most.
struct Choice {
    /// Shortest call and range that is drawn.
    shortest: i64,
    python: bool,
    calls: bool,
    ranges: bool,
    /// Shortest op that is drawn.
    shortest_op: i64,
}

fn range_drawn(trace: &Trace, choice: &Choice, index: usize) -> bool {
    let ranges = &trace.ranges;
    let python = ranges.source[index] == RangeSource::Python;
    let mark = ranges.flags[index] & range_flags::MARK != 0;
    choice.ranges && !mark && (choice.python || !python) && ranges.duration(index) >= choice.shortest
}

fn events(trace: &Trace, choice: &Choice) -> usize {
    let ops = (0..trace.ops.len()).filter(|&i| trace.ops.duration(i) >= choice.shortest_op).count();
    let calls = (0..trace.calls.len()).filter(|&i| choice.calls && trace.calls.duration(i) >= choice.shortest).count();
    let ranges = (0..trace.ranges.len()).filter(|&i| range_drawn(trace, choice, i)).count();
    ops + calls + ranges
}

fn choose(trace: &Trace) -> (Choice, Option<String>) {
    let mut choice = Choice { shortest: 0, python: true, calls: true, ranges: true, shortest_op: 0 };
    let all = events(trace, &choice);
    if all <= MOST_EVENTS {
        return (choice, None);
    }
    choice.python = false;
    let mut what = vec!["Python functions".to_owned()];
    if events(trace, &choice) > MOST_EVENTS {
        choice.shortest = 10_000;
        what.push("calls and ranges below 10 µs".to_owned());
    }
    if events(trace, &choice) > MOST_EVENTS {
        (choice.calls, choice.ranges) = (false, false);
        what = vec!["all calls and ranges".to_owned()];
    }
    if events(trace, &choice) > MOST_EVENTS {
        let mut lengths: Vec<i64> = (0..trace.ops.len()).map(|i| trace.ops.duration(i)).collect();
        let place = lengths.len() - MOST_EVENTS;
        choice.shortest_op = *lengths.select_nth_unstable(place).1 + 1;
        what.push(format!("ops shorter than {}", human::ns(choice.shortest_op as f64)));
    }
    let drawn = events(trace, &choice);
    let text = format!(
        "The timeline draws {} of {} events: {} are left out. Tables and figures cover all.",
        human::count(drawn as u64),
        human::count(all as u64),
        what.join(", ")
    );
    (choice, Some(text))
}

/// Puts every event on the track of its stream or thread.
pub(super) fn draw(context: &Context) -> Drawn {
    let trace = context.trace;
    let (choice, left_out) = choose(trace);
    let mut strings = Strings::default();
    let mut tracks: Vec<(Track, Vec<usize>)> = Vec::new();

    let mut by_stream: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
    for index in (0..trace.ops.len()).filter(|&i| trace.ops.duration(i) >= choice.shortest_op) {
        by_stream.entry((trace.ops.device[index], trace.ops.stream[index])).or_default().push(index);
    }
    for ((device, stream), ops) in by_stream {
        let is_cpu = trace.devices.get(device as usize).is_some_and(|d| d.is_cpu);
        let name = if is_cpu { "ops".to_owned() } else { format!("stream {stream}") };
        let mut track = Track::new(device_name(context, device), name, TrackKind::Ops);
        for &index in &ops {
            track.start.push(trace.ops.start[index]);
            track.duration.push(trace.ops.duration(index));
            track.name_ids.push(strings.of_trace(trace, op_label(trace, index)));
            track.category_ids.push(context.categories.of_op[index]);
            track.detail_ids.push(op_detail(trace, index).map_or(NONE, |text| strings.of_text(text)));
            track.correlations.push(trace.ops.correlation[index]);
        }
        tracks.push((track, ops));
    }
    let first_call_track = tracks.len();

    let mut ranges_of: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for index in (0..trace.ranges.len()).filter(|&i| range_drawn(trace, &choice, i)) {
        ranges_of.entry(trace.ranges.thread[index]).or_default().push(index);
    }
    let mut calls_of: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    if choice.calls {
        for index in (0..trace.calls.len()).filter(|&i| trace.calls.duration(i) >= choice.shortest) {
            calls_of.entry(trace.calls.thread[index]).or_default().push(index);
        }
    }
    let mut flat_of_call: Vec<u32> = vec![NONE; trace.calls.len()];
    let mut flat: usize = tracks.iter().map(|(track, _)| track.start.len()).sum();
    for thread in 0..trace.threads.len() as u32 {
        let (group, name) = thread_name(trace, thread);
        if let Some(ranges) = ranges_of.remove(&thread) {
            let mut track = Track::new(&group, &name, TrackKind::Ranges);
            for index in ranges {
                track.start.push(trace.ranges.start[index]);
                track.duration.push(trace.ranges.duration(index));
                track.name_ids.push(strings.of_trace(trace, trace.ranges.name[index]));
            }
            flat += track.start.len();
            tracks.push((track, Vec::new()));
        }
        if let Some(calls) = calls_of.remove(&thread) {
            let mut track = Track::new(&group, format!("{name} calls"), TrackKind::Calls);
            for index in calls {
                track.start.push(trace.calls.start[index]);
                track.duration.push(trace.calls.duration(index));
                track.name_ids.push(strings.of_trace(trace, trace.calls.name[index]));
                track.correlations.push(trace.calls.correlation[index]);
                if trace.calls.kind[index] == CallKind::Gpu {
                    flat_of_call[index] = flat as u32;
                }
                flat += 1;
            }
            tracks.push((track, Vec::new()));
        }
    }
    for (track, ops) in &mut tracks[..first_call_track] {
        let launch = |&index: &usize| flat_of_call.get(trace.ops.launch[index] as usize).copied().unwrap_or(NONE);
        track.links = ops.iter().map(launch).collect();
    }
    for counter in &trace.counters {
        let group = counter.device.map_or("counters".to_owned(), |device| device_name(context, device));
        let mut track = Track::new(group, &counter.name, TrackKind::Counter);
        track.start = counter.times.clone();
        track.values = counter.values.clone();
        tracks.push((track, Vec::new()));
    }
    let timeline = Timeline {
        tracks: tracks.into_iter().map(|(track, _)| track).collect(),
        strings: strings.list,
        categories: context.categories.list.iter().map(|c| c.name.clone()).collect(),
    };
    Drawn { timeline, left_out }
}

fn thread_name(trace: &Trace, index: u32) -> (String, String) {
    let Some(thread) = trace.threads.get(index as usize) else { return (String::new(), format!("thread {index}")) };
    let group = trace.processes.get(thread.process as usize).map_or(String::new(), |process| {
        let rank = process.rank.map_or(String::new(), |rank| format!("rank {rank}, "));
        let name = if process.name.is_empty() { "process" } else { &process.name };
        format!("{rank}{name} {}", process.pid)
    });
    let name = match thread.name.as_str() {
        "" => format!("thread {}", thread.tid),
        name => format!("{name} ({})", thread.tid),
    };
    (group, name)
}

/// strobe's ops go by what they do in the model, others by their kernel.
fn op_label(trace: &Trace, index: usize) -> strobe_trace::StrId {
    trace.work_of(index).map_or(trace.ops.name[index], |work| work.op)
}

fn op_detail(trace: &Trace, index: usize) -> Option<String> {
    if let Some(work) = trace.work_of(index) {
        let [m, n, k] = work.shape;
        let layer = work.layer.map_or(String::new(), |layer| format!(", layer {layer}"));
        return Some(format!("{}{layer}, m {m} n {n} k {k}", trace.op_name(index)));
    }
    match trace.detail_of(index)? {
        OpDetail::Kernel(kernel) => {
            let [x, y, z] = kernel.grid;
            let [a, b, c] = kernel.block;
            (x > 0).then(|| format!("grid {x}×{y}×{z}, block {a}×{b}×{c}, {} registers", kernel.registers))
        }
        OpDetail::Memcpy { .. } | OpDetail::Memset { .. } => Some(human::bytes(trace.ops.bytes[index])),
        OpDetail::Graph { graph, exec } => Some(format!("graph {graph}, executable {exec}")),
    }
}

/// The texts of the page, each once.
#[derive(Default)]
struct Strings {
    list: Vec<String>,
    from_trace: std::collections::HashMap<strobe_trace::StrId, u32>,
    from_text: std::collections::HashMap<String, u32>,
}

impl Strings {
    fn of_trace(&mut self, trace: &Trace, id: strobe_trace::StrId) -> u32 {
        *self.from_trace.entry(id).or_insert_with(|| {
            self.list.push(trace.text(id).to_owned());
            self.list.len() as u32 - 1
        })
    }

    fn of_text(&mut self, text: String) -> u32 {
        if let Some(&id) = self.from_text.get(&text) {
            return id;
        }
        self.list.push(text.clone());
        let id = self.list.len() as u32 - 1;
        self.from_text.insert(text, id);
        id
    }
}

const _: () = assert!(NONE == explorer::NONE);
