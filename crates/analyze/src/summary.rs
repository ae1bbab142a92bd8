//! What a trace holds, how busy its devices were, and how much of that can be explained.

use strobe_trace::{CallKind, Device, GraphMode, NONE, OpKind, Trace};

use crate::categories::Class;
use crate::context::Context;
use crate::host_compute::is_operator;
use crate::intervals::{Span, SpanSet};
use crate::sheet::{Column, Report, Sheet, Unit, Value};

/// How the time of one device divides, from its first op to the end of its last, without what lies between two recorded
/// windows. The parts add up to the span.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct DeviceTime {
    /// Index into the trace's devices.
    pub device: u32,
    /// Number of kernels, copies, fills, graph launches, ops of a CPU engine.
    pub counts: [u64; 5],
    /// First start and last end.
    #[serde(skip)]
    pub extent: Span,
    /// From the first start to the last end, without what lies between two recorded windows.
    pub span_ns: i64,
    /// The union of ops that compute.
    pub compute_ns: i64,
    /// What communication adds to that union.
    pub exposed_comm_ns: i64,
    /// What copies and fills add to that.
    pub exposed_memory_ns: i64,
    /// The rest.
    pub idle_ns: i64,
}

impl DeviceTime {
    /// The union of all ops.
    pub fn busy_ns(&self) -> i64 {
        self.span_ns - self.idle_ns
    }
}

/// The time of every device that ran something.
pub fn device_times(context: &Context) -> Vec<DeviceTime> {
    let ops = &context.trace.ops;
    let devices = context.trace.devices.len().max(ops.device.iter().map(|&d| d as usize + 1).max().unwrap_or(0));
    let mut spans: Vec<[Vec<Span>; 3]> = vec![Default::default(); devices];
    let mut counts = vec![[0_u64; 5]; devices];
    for index in 0..ops.len() {
        let device = ops.device[index] as usize;
        let class = match context.categories.of_op(index).class {
            Class::Compute => 0,
            Class::Communication => 1,
            Class::Memory => 2,
        };
        let kind = match ops.kind[index] {
            OpKind::Kernel => 0,
            OpKind::Memcpy => 1,
            OpKind::Memset => 2,
            OpKind::Graph => 3,
            OpKind::CpuOp => 4,
        };
        counts[device][kind] += 1;
        spans[device][class].push(Span::new(ops.start[index], ops.end[index]));
    }
    let mut times = Vec::new();
    for (device, (by_class, counts)) in spans.into_iter().zip(counts).enumerate() {
        let bounds = by_class.iter().flatten().fold(None, |bounds: Option<Span>, span| match bounds {
            None => Some(*span),
            Some(all) => Some(Span { start: all.start.min(span.start), end: all.end.max(span.end) }),
        });
        let Some(extent) = bounds else { continue };
        let [compute, communication, memory] = by_class.map(SpanSet::union_of);
        let with_communication = compute.union(&communication);
        let busy = with_communication.union(&memory);
        let unseen = context.unseen_on(device as u32).subtract(&busy).length();
        let span_ns = extent.length() - unseen;
        times.push(DeviceTime {
            device: device as u32,
            counts,
            extent,
            span_ns,
            compute_ns: compute.length(),
            exposed_comm_ns: with_communication.length() - compute.length(),
            exposed_memory_ns: busy.length() - with_communication.length(),
            idle_ns: span_ns - busy.length(),
        });
    }
    times
}

/// Report `summary`.
pub fn summary(context: &Context) -> Report {
    let trace = context.trace;
    let mut report = Report::new("summary", "Summary");
    if !trace.meta.sources.is_empty() {
        report = report.sheet(sources(context));
    }
    let times = device_times(context);
    if !times.is_empty() {
        report = report.sheet(devices(context, &times));
        report = report.note(
            "compute = union of computing ops; exposed = what communication, then copies and fills add to it; shares are of the span, first start to last end of the device.",
        );
    }
    if let Some(host) = host_sheet(context) {
        report = report.sheet(host).note(
            "The host computes: in operators = the union of PyTorch's operators on all threads, from the first to the last.",
        );
    }
    for note in notes(context) {
        report = report.note(note);
    }
    report
}

fn sources(context: &Context) -> Sheet {
    let columns = [
        ("file", Unit::Text),
        ("format", Unit::Text),
        ("rank", Unit::Id),
        ("size", Unit::Bytes),
        ("events", Unit::Count),
        ("lost", Unit::Count),
    ];
    let mut sheet = Sheet::new("sources", columns.map(|(name, unit)| Column::new(name, unit)));
    for source in &context.trace.meta.sources {
        let name = source.path.file_name().unwrap_or(source.path.as_os_str()).to_string_lossy().into_owned();
        sheet.push([
            name.into(),
            source.format.as_str().into(),
            source.rank.into(),
            source.bytes.into(),
            source.events.into(),
            source.lost.into(),
        ]);
    }
    sheet
}

/// The ranks of a trace, looked up once for all devices.
#[derive(Debug, Default)]
pub(crate) struct Ranks {
    /// Per device the rank that it belongs to: that of its file or, where one file holds several, of the process that
    /// used it first.
    of_device: Vec<Option<u32>>,
    /// Whether there are several.
    several: bool,
}

impl Ranks {
    pub(crate) fn of(trace: &Trace) -> Self {
        let of_source = |device: &Device| trace.meta.sources.get(usize::from(device.source))?.rank;
        let mut of_device: Vec<Option<u32>> = trace.devices.iter().map(of_source).collect();
        let mut met = vec![false; of_device.len()];
        for (&device, &process) in trace.ops.device.iter().zip(&trace.ops.process) {
            let Some(met) = met.get_mut(device as usize).filter(|met| !**met) else { continue };
            *met = true;
            let rank = trace.processes.get(process as usize).and_then(|process| process.rank);
            of_device[device as usize] = of_device[device as usize].or(rank);
        }
        let first = trace.processes.iter().find_map(|process| process.rank);
        let several = trace.processes.iter().any(|process| process.rank.is_some() && process.rank != first);
        Self { of_device, several }
    }

    /// The rank of a device, where that is known.
    pub(crate) fn of_device(&self, device: u32) -> Option<u32> {
        self.of_device.get(device as usize).copied().flatten()
    }
}

/// What a device is called in every table: its number, its name where recorded, its rank where there are several.
pub fn device_name(context: &Context, device: u32) -> String {
    let trace = context.trace;
    let Some(found) = trace.devices.get(device as usize) else { return format!("device {device}") };
    let kind = if found.is_cpu { "CPU".to_owned() } else { format!("GPU {}", found.ordinal) };
    let name = if found.name.is_empty() { kind } else { format!("{kind} {}", found.name) };
    let ranks = context.ranks();
    match ranks.of_device(device) {
        Some(rank) if ranks.several || trace.meta.sources.len() > 1 => format!("rank {rank}, {name}"),
        _ => name,
    }
}

fn devices(context: &Context, times: &[DeviceTime]) -> Sheet {
    let columns = [
        ("device", Unit::Text),
        ("kernels", Unit::Count),
        ("copies", Unit::Count),
        ("fills", Unit::Count),
        ("graphs", Unit::Count),
        ("ops", Unit::Count),
        ("span", Unit::Ns),
        ("busy", Unit::Ns),
        ("compute", Unit::Share),
        ("exposed comm", Unit::Share),
        ("exposed copies", Unit::Share),
        ("idle", Unit::Share),
    ];
    // Kinds of op that do not occur only take room.
    let column = |(name, unit)| match unit {
        Unit::Count => Column::new(name, unit).may_hide(),
        _ => Column::new(name, unit),
    };
    let mut sheet = Sheet::new("devices", columns.map(column));
    for time in times {
        let share = |part: i64| (time.span_ns > 0).then(|| part as f64 / time.span_ns as f64);
        let mut row: Vec<Value> = vec![device_name(context, time.device).into()];
        row.extend(time.counts.map(Value::from));
        row.extend([time.span_ns.into(), time.busy_ns().into()]);
        let parts = [time.compute_ns, time.exposed_comm_ns, time.exposed_memory_ns, time.idle_ns];
        row.extend(parts.map(|part| Value::from(share(part))));
        sheet.push(row);
    }
    sheet
}

/// The operators of each process, where the host computes.
fn host_sheet(context: &Context) -> Option<Sheet> {
    let trace = context.trace;
    if !context.computes_on_host() {
        return None;
    }
    let columns = [
        ("host", Unit::Text),
        ("threads", Unit::Count),
        ("operators", Unit::Count),
        ("span", Unit::Ns),
        ("in operators", Unit::Ns),
        ("no operator", Unit::Share),
    ];
    let mut sheet = Sheet::new("host", columns.map(|(name, unit)| Column::new(name, unit)));
    let mut spans: Vec<Vec<Span>> = vec![Vec::new(); trace.processes.len()];
    let mut used = vec![false; trace.threads.len()];
    let mut threads = vec![0_u64; trace.processes.len()];
    for range in (0..trace.ranges.len()).filter(|&range| is_operator(trace, range)) {
        let thread = trace.ranges.thread[range] as usize;
        let Some(process) = trace.threads.get(thread).map(|thread| thread.process as usize) else { continue };
        let Some(spans) = spans.get_mut(process) else { continue };
        spans.push(Span::new(trace.ranges.start[range], trace.ranges.end[range]));
        if !std::mem::replace(&mut used[thread], true) {
            threads[process] += 1;
        }
    }
    for ((process, spans), threads) in trace.processes.iter().zip(spans).zip(threads) {
        let operators = spans.len();
        let busy = SpanSet::union_of(spans);
        let Some(extent) = busy.extent() else { continue };
        let (span, busy) = (extent.length(), busy.length());
        let idle = (span > 0).then(|| (span - busy) as f64 / span as f64);
        let name = format!("{} {}", if process.name.is_empty() { "process" } else { &process.name }, process.pid);
        sheet.push([name.into(), threads.into(), operators.into(), span.into(), busy.into(), idle.into()]);
    }
    Some(sheet)
}

fn notes(context: &Context) -> Vec<String> {
    let (trace, ops) = (context.trace, &context.trace.ops);
    let mut notes = Vec::new();
    notes.push(context.iterations.sentence());
    let unseen = context.unseen().length();
    if unseen > 0 {
        notes.push(format!(
            "{:.1} ms lie between recorded windows: the engine went on there unseen, and that time counts nowhere.",
            unseen as f64 / 1e6
        ));
    }
    let total: i64 = (0..ops.len()).map(|i| ops.duration(i)).sum();
    if total > 0 {
        let share = |keep: &dyn Fn(usize) -> bool| {
            let time: i64 = (0..ops.len()).filter(|&i| keep(i)).map(|i| ops.duration(i)).sum();
            format!("{:.1} %", 100.0 * time as f64 / total as f64)
        };
        let in_iterations = share(&|i| context.iterations.of_op.get(i).is_some_and(|&found| found != NONE));
        let classified = share(&|i| context.categories.of_op(i).name != "unclassified");
        notes.push(format!(
            "Of the time of all ops (sum of durations), {in_iterations} lies in iterations and {classified} in known categories."
        ));
    }
    let gpu_ops = ops.kind.iter().filter(|k| **k != OpKind::CpuOp).count();
    let without = trace.ops_without_launch();
    if without > 0 {
        notes.push(format!(
            "{without} of {gpu_ops} GPU ops have no launch call in the trace; they count everywhere but in attribution to host ranges."
        ));
    }
    if gpu_ops > 0 && trace.processes.len() > 1 {
        let mut silent = vec![false; trace.processes.len()];
        for (&thread, _) in trace.calls.thread.iter().zip(&trace.calls.kind).filter(|(_, kind)| **kind == CallKind::Gpu)
        {
            let process = trace.threads.get(thread as usize).map(|thread| thread.process as usize);
            if let Some(silent) = process.and_then(|process| silent.get_mut(process)) {
                *silent = true;
            }
        }
        for &process in &ops.process {
            if let Some(silent) = silent.get_mut(process as usize) {
                *silent = false;
            }
        }
        let silent = silent.into_iter().filter(|silent| *silent).count();
        if silent > 0 {
            notes.push(format!("{silent} of {} processes made GPU calls but have no GPU rows.", trace.processes.len()));
        }
    }
    match trace.meta.graph_mode.filter(|_| launches_graphs(trace)) {
        Some(GraphMode::Graph) => notes.push(
            "CUDA graphs were captured in graph mode: their kernels are hidden behind one row per launch. Capture with `nsys profile --cuda-graph-trace=node` to see them; that mode slows replays down."
                .to_owned(),
        ),
        Some(GraphMode::Node) => notes.push(
            "CUDA graphs were captured in node mode: every kernel is there, and replays were slower than without.".to_owned(),
        ),
        None => {}
    }
    if trace.meta.partial {
        // Only strobe records that a run was interrupted; of other traces it is the file that is cut.
        let cause = if trace.meta.is_own() { "The run was interrupted" } else { "The file is cut or damaged" };
        notes.push(format!("{cause}: the trace is partial."));
    }
    notes
}

/// Whether any CUDA graph was launched: a mode of capture says nothing where there was nothing to capture.
fn launches_graphs(trace: &Trace) -> bool {
    let by_op = trace.ops.kind.contains(&OpKind::Graph) || trace.ops.graph_node.iter().any(|&node| node != 0);
    let mut known: std::collections::HashMap<strobe_trace::StrId, bool> = Default::default();
    let mut launches = |name| *known.entry(name).or_insert_with(|| trace.text(name).contains("GraphLaunch"));
    by_op || trace.calls.name.iter().any(|&name| launches(name))
}
