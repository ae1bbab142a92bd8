//! Launches: how long the call took, how long the device took to begin, how far the host ran ahead.

use std::collections::BTreeMap;

use strobe_trace::{NONE, OpKind, StrId, Trace};

use crate::context::Context;
use crate::intervals::{Span, SpanSet};
use crate::nsys_stats::without_version;
use crate::sheet::{Column, Report, Role, Sheet, Unit, Value};

/// A queue of this depth is taken for full: CUDA lets the host wait at 1,024 launches outstanding.
pub const FULL_QUEUE: i64 = 1000;

/// A call with the ops that it launched. A graph is one launch, however many ops it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Index of the call.
    pub call: u32,
    /// Index of its op that starts first.
    pub first_op: u32,
    /// How many ops it launched.
    pub ops: u32,
    /// How long the call took.
    pub call_ns: i64,
    /// From the return of the call to the start of its first op; negative when the op started before that.
    pub delay_ns: i64,
    /// From the start of its first op to the end of its last.
    pub device_ns: i64,
}

/// The launches of a trace in the order of their calls.
pub fn launches(trace: &Trace) -> Vec<Launch> {
    let (ops, calls) = (&trace.ops, &trace.calls);
    let mut number_of_call = vec![NONE; calls.len()];
    let mut found: Vec<Launch> = Vec::new();
    let mut last_end: Vec<i64> = Vec::new();
    // Ops are in order of start: the first that is met is the first that started.
    for op in 0..ops.len() {
        let Some(number) = number_of_call.get_mut(ops.launch[op] as usize) else { continue };
        let call = ops.launch[op] as usize;
        if *number == NONE {
            *number = found.len() as u32;
            let delay_ns = ops.start[op].saturating_sub(calls.end[call]);
            let call_ns = calls.duration(call);
            found.push(Launch { call: call as u32, first_op: op as u32, ops: 0, call_ns, delay_ns, device_ns: 0 });
            last_end.push(ops.end[op]);
        }
        let launch = &mut found[*number as usize];
        let last_end = &mut last_end[*number as usize];
        *last_end = (*last_end).max(ops.end[op]);
        launch.ops += 1;
        launch.device_ns = last_end.saturating_sub(ops.start[launch.first_op as usize]);
    }
    found.sort_unstable_by_key(|launch| launch.call);
    found
}

/// How many launches of a stream were outstanding: called but not begun on the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueDepth {
    /// Index of the device.
    pub device: u32,
    /// Index of the process.
    pub process: u32,
    /// The stream.
    pub stream: u32,
    /// When the depth changed, in order.
    pub times: Vec<i64>,
    /// The depth from that moment on. Below zero only where the clocks of host and device disagree.
    pub depths: Vec<i32>,
}

/// The queues of all streams over time, by device, process and stream.
pub fn queue_depths(trace: &Trace, launches: &[Launch]) -> Vec<QueueDepth> {
    let ops = &trace.ops;
    let stream_of = |l: &Launch| {
        let op = l.first_op as usize;
        (ops.device[op], ops.process[op], ops.stream[op])
    };
    #[derive(Default)]
    struct Moments {
        called: Vec<i64>,
        started: Vec<i64>,
    }
    let mut streams: BTreeMap<(u32, u32, u32), Moments> = BTreeMap::new();
    for run in launches.chunk_by(|a, b| stream_of(a) == stream_of(b)) {
        let moments = streams.entry(stream_of(&run[0])).or_default();
        moments.called.extend(run.iter().map(|l| trace.calls.start[l.call as usize]));
        moments.started.extend(run.iter().map(|l| ops.start[l.first_op as usize]));
    }
    let queue = |((device, process, stream), moments): ((u32, u32, u32), Moments)| {
        let Moments { mut called, mut started } = moments;
        called.sort_unstable();
        started.sort_unstable();
        let (mut times, mut depths) = (Vec::new(), Vec::new());
        let (mut called, mut started) = (called.into_iter().peekable(), started.into_iter().peekable());
        let mut depth = 0;
        // At the same moment a launch comes before a start, so that an op never seems to start unlaunched.
        while let Some(&start) = started.peek() {
            let call = called.next_if(|&call| call <= start);
            depth += if call.is_some() { 1 } else { -1 };
            times.extend(call.or_else(|| started.next()));
            depths.push(depth);
        }
        for call in called {
            depth += 1;
            times.push(call);
            depths.push(depth);
        }
        QueueDepth { device, process, stream, times, depths }
    };
    streams.into_iter().map(queue).collect()
}

impl QueueDepth {
    /// Time spent at each depth, from 0 up, between the first and the last change.
    /// What lies in `unseen` is left out.
    pub fn time_at_depth(&self, unseen: &SpanSet) -> Vec<i64> {
        let deepest = self.depths.iter().copied().max().unwrap_or(0).max(0) as usize;
        let mut time = vec![0i64; deepest + 1];
        for (moments, &depth) in self.times.windows(2).zip(&self.depths) {
            let at = &mut time[depth.max(0) as usize];
            let span = Span::new(moments[0], moments[1]);
            *at = at.saturating_add(span.length().saturating_sub(unseen.covered(span)));
        }
        time
    }
}

/// The report `launch`.
pub fn report(context: &Context) -> Report {
    let (name, title) = ("launch", "Launches: cost of the call, delay to the start, depth of the queue");
    let trace = context.trace;
    let launches = context.launches();
    if launches.is_empty() {
        return Report::absent(name, title, why_none(trace));
    }
    // Names and categories by number; one more slot for those without.
    let strings = trace.strings.len();
    let call_name = |l: &Launch| (trace.calls.name[l.call as usize].0 as usize).min(strings);
    let call_word = |name: usize| without_version(trace.text(StrId(name as u32))).to_owned();
    let by_call = group(launches, strings + 1, call_name, call_word);
    let categories = &context.categories.list;
    let category = |l: &Launch| match context.categories.of_op.get(l.first_op as usize) {
        Some(&category) if l.ops == 1 => usize::from(category),
        _ => categories.len(),
    };
    let category_word = |category: usize| match categories.get(category) {
        Some(found) => found.name.clone(),
        None => "several ops (graph)".to_owned(),
    };
    let by_category = group(launches, categories.len() + 1, category, category_word);

    let unlaunched = trace.ops_without_launch();
    let mut report = Report::new(name, title)
        .sheet(sheet("by_call", "Call", by_call).title("By call"))
        .sheet(sheet("by_category", "Category", by_category).title("By category of the first op launched"))
        .sheet(queues(context, launches))
        .note(
            "Delay runs from the return of the call to the start of the first op it launched; it is negative when the op \
             started before the call returned. Short: the device took less time than the call. A graph is one launch.",
        )
        .note(format!(
            "Depth counts launches called and not yet begun; median and p90 are over time. The host waits at 1,024: \
             `Time Full` is the time at {FULL_QUEUE} or more, its share is of the time between first launch and last start."
        ));
    if unlaunched > 0 {
        let devices = trace.ops.kind.iter().filter(|&&kind| kind != OpKind::CpuOp).count();
        report = report.note(format!("{unlaunched} of {devices} ops on devices have no launching call in the trace."));
    }
    report
}

fn why_none(trace: &Trace) -> String {
    let device_ops = trace.ops.kind.iter().filter(|&&kind| kind != OpKind::CpuOp).count();
    match (trace.ops.is_empty(), device_ops) {
        (true, _) => "nothing in the trace ran on a device".to_owned(),
        (false, 0) => "the engine computes on the CPU: nothing is launched".to_owned(),
        (false, n) => format!(
            "none of the {n} ops on devices has its launching call in the trace: record the CUDA or HIP calls too, e.g. \
             with `nsys profile -t cuda`"
        ),
    }
}

/// Launches by the word of their slot (a number below `slots`), the group with the most time on the host first.
fn group(
    launches: &[Launch],
    slots: usize,
    slot: impl Fn(&Launch) -> usize,
    word: impl Fn(usize) -> String,
) -> Vec<(String, Vec<&Launch>)> {
    let mut members: Vec<Vec<&Launch>> = vec![Vec::new(); slots];
    for launch in launches {
        members[slot(launch)].push(launch);
    }
    let mut groups: BTreeMap<String, Vec<&Launch>> = BTreeMap::new();
    for (slot, mut members) in members.into_iter().enumerate().filter(|(_, members)| !members.is_empty()) {
        groups.entry(word(slot)).or_default().append(&mut members);
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    let host_time = |group: &[&Launch]| group.iter().fold(0i64, |sum, l| sum.saturating_add(l.call_ns));
    groups.sort_by_cached_key(|(_, group)| std::cmp::Reverse(host_time(group)));
    groups
}

fn sheet(name: &str, first_column: &str, groups: Vec<(String, Vec<&Launch>)>) -> Sheet {
    let mut columns = vec![Column::new(first_column, Unit::Text)];
    columns.extend(["Launches", "Ops"].map(|name| Column::new(name, Unit::Count)));
    for (what, unit) in [("Call", Unit::Ns), ("Delay", Unit::NsChange), ("Device", Unit::Ns)] {
        let figures = [("Med", Role::Main), ("p90", Role::MostBelow), ("Max", Role::Highest)];
        columns.extend(figures.map(|(figure, role)| Column::new(format!("{what} {figure}"), unit).role(role)));
    }
    columns.extend([
        Column::new("Started Before Return", Unit::Count),
        Column::new("Short", Unit::Count),
        Column::in_percent("Short (% of launches)"),
    ]);
    let mut sheet = Sheet::new(name, columns);
    for (word, group) in groups {
        let count = |keep: fn(&Launch) -> bool| group.iter().filter(|l| keep(l)).count();
        let ops: usize = group.iter().map(|l| l.ops as usize).sum();
        let figures = |value: fn(&Launch) -> i64| {
            let mut values: Vec<i64> = group.iter().map(|l| value(l)).collect();
            spread(&mut values).map(Value::from)
        };
        let short = count(|l| l.device_ns < l.call_ns);
        let head = [word.into(), group.len().into(), ops.into()];
        let times = [figures(|l| l.call_ns), figures(|l| l.delay_ns), figures(|l| l.device_ns)];
        let early = count(|l| l.delay_ns < 0);
        let tail = [early.into(), short.into(), (short as f64 / group.len() as f64).into()];
        sheet.push(head.into_iter().chain(times.into_iter().flatten()).chain(tail));
    }
    sheet
}

fn queues(context: &Context, launches: &[Launch]) -> Sheet {
    let columns = [
        Column::new("Device", Unit::Text),
        Column::new("Process", Unit::Id),
        Column::new("Stream", Unit::Id),
        Column::new("Launches", Unit::Count),
        Column::new("Depth Med", Unit::Count),
        Column::new("Depth p90", Unit::Count).role(Role::MostBelow),
        Column::new("Depth Max", Unit::Count).role(Role::Highest),
        Column::new("Time Full", Unit::Ns),
        Column::in_percent("Time Full (%)"),
    ];
    let mut sheet = Sheet::new("queues", columns).title("Outstanding launches by stream");
    let trace = context.trace;
    for queue in queue_depths(trace, launches) {
        let time = queue.time_at_depth(context.unseen());
        let total = time.iter().fold(0i64, |sum, &t| sum.saturating_add(t));
        let full = time.iter().skip(FULL_QUEUE as usize).fold(0i64, |sum, &t| sum.saturating_add(t));
        let share = (total > 0).then(|| full as f64 / total as f64);
        sheet.push([
            device_name(trace, queue.device).into(),
            trace.processes.get(queue.process as usize).map(|p| p.pid).into(),
            queue.stream.into(),
            (queue.times.len() / 2).into(),
            depth_at(&time, total, 0.5).into(),
            depth_at(&time, total, 0.9).into(),
            queue.depths.iter().copied().max().map(i64::from).into(),
            full.into(),
            share.into(),
        ]);
    }
    sheet
}

/// The depth that was not exceeded for `share` of the time; `None` without time.
fn depth_at(time_at_depth: &[i64], total: i64, share: f64) -> Option<usize> {
    let mut passed = 0i64;
    let reached = |&time: &i64| {
        passed = passed.saturating_add(time);
        passed as f64 >= share * total as f64
    };
    (total > 0).then(|| time_at_depth.iter().position(reached)).flatten()
}

/// What a device is called in tables: its number in its file and its name.
pub(crate) fn device_name(trace: &Trace, device: u32) -> String {
    match trace.devices.get(device as usize) {
        Some(found) if found.name.is_empty() => found.ordinal.to_string(),
        Some(found) => format!("{} {}", found.ordinal, found.name),
        None => device.to_string(),
    }
}

/// Median, 90th percentile and maximum, interpolated between the two nearest values; the order of the values is lost.
fn spread(values: &mut [i64]) -> [Option<f64>; 3] {
    let Some(last) = values.len().checked_sub(1) else { return [None; 3] };
    // Above the place of one quantile only larger values stand: the next one is sought among them alone.
    let mut passed = 0;
    [0.5, 0.9, 1.0].map(|share| {
        let place = share * last as f64;
        let (_, &mut below, above) = values[passed..].select_nth_unstable(place.floor() as usize - passed);
        let next = above.iter().copied().min().unwrap_or(below);
        passed = place.floor() as usize;
        Some(below as f64 + (next as f64 - below as f64) * place.fract())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        assert_eq!(spread(&mut [4, 1, 3, 2]), [2.5, 3.7, 4.0].map(Some));
        assert_eq!(spread(&mut [7]), [7.0, 7.0, 7.0].map(Some));
        assert_eq!(spread(&mut [30, 10, 0, 20, 40, 50, 60, 70, 80, 90, 100]), [50.0, 90.0, 100.0].map(Some));
        assert_eq!(spread(&mut []), [None; 3]);
    }

    #[test]
    fn depths_by_time() {
        assert_eq!(depth_at(&[5, 4, 1], 10, 0.5), Some(0));
        assert_eq!(depth_at(&[5, 4, 1], 10, 0.9), Some(1));
        assert_eq!(depth_at(&[5, 4, 1], 10, 0.95), Some(2));
        assert_eq!(depth_at(&[0], 0, 0.5), None);
    }
}
