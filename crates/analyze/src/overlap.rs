//! Communication against compute: how much of the time spent talking to other devices is hidden behind arithmetic.

use std::collections::BTreeMap;

use strobe_trace::{OpKind, Trace};

use crate::categories::Class;
use crate::context::Context;
use crate::intervals::{Span, SpanSet};
use crate::launch::device_name;
use crate::sheet::{Column, Report, Sheet, Unit, Value};

/// How a device spent the time from its first op to the end of its last. Every figure is the length of a union: moments
/// at which several ops ran count once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceOverlap {
    /// Index of the device.
    pub device: u32,
    /// Time with compute.
    pub compute: i64,
    /// Time with communication.
    pub communication: i64,
    /// Time with copies or fills.
    pub memory: i64,
    /// Time with compute and communication at once.
    pub overlapped: i64,
    /// Time with communication and no compute.
    pub exposed: i64,
    /// Time with anything.
    pub busy: i64,
    /// From the first start to the last end, without what lies between two recorded windows.
    pub span: i64,
}

impl DeviceOverlap {
    /// Time without any op.
    pub fn idle(&self) -> i64 {
        self.span.saturating_sub(self.busy)
    }

    /// Time with communication or memory work and no compute.
    pub fn non_compute(&self) -> i64 {
        self.busy.saturating_sub(self.compute)
    }

    /// The share of the communication that ran beside compute; `None` without communication.
    pub fn overlapped_share(&self) -> Option<f64> {
        (self.communication > 0).then(|| self.overlapped as f64 / self.communication as f64)
    }
}

/// The times of one device by class.
#[derive(Default)]
struct ByClass {
    compute: SpanSet,
    communication: SpanSet,
    memory: SpanSet,
}

/// How every device that has ops spent its time. `class` says what an op counts as; `None` leaves it out.
pub fn overlaps(trace: &Trace, class: impl Fn(usize) -> Option<Class>) -> Vec<DeviceOverlap> {
    by_device(trace, class).into_iter().map(|(device, times)| measure(device, &times, &SpanSet::EMPTY)).collect()
}

/// The same without what lies between two recorded windows.
pub(crate) fn seen_overlaps(context: &Context, class: impl Fn(usize) -> Option<Class>) -> Vec<DeviceOverlap> {
    let devices = by_device(context.trace, class).into_iter();
    devices.map(|(device, times)| measure(device, &times, context.unseen_on(device))).collect()
}

fn by_device(trace: &Trace, class: impl Fn(usize) -> Option<Class>) -> BTreeMap<u32, ByClass> {
    let ops = &trace.ops;
    let mut spans: BTreeMap<u32, [Vec<Span>; 3]> = BTreeMap::new();
    for op in 0..ops.len() {
        let Some(class) = class(op) else { continue };
        spans.entry(ops.device[op]).or_default()[class as usize].push(Span::new(ops.start[op], ops.end[op]));
    }
    let unions = |mut spans: [Vec<Span>; 3]| {
        let mut union = |class: Class| SpanSet::union_of(std::mem::take(&mut spans[class as usize]));
        ByClass {
            compute: union(Class::Compute),
            communication: union(Class::Communication),
            memory: union(Class::Memory),
        }
    };
    spans.into_iter().map(|(device, spans)| (device, unions(spans))).collect()
}

fn measure(device: u32, times: &ByClass, unseen: &SpanSet) -> DeviceOverlap {
    let busy = times.compute.union(&times.communication).union(&times.memory);
    let overlapped = times.compute.intersect(&times.communication).length();
    let communication = times.communication.length();
    DeviceOverlap {
        device,
        compute: times.compute.length(),
        communication,
        memory: times.memory.length(),
        overlapped,
        exposed: communication - overlapped,
        busy: busy.length(),
        span: busy.extent().map_or(0, |extent| extent.length() - unseen.clip(extent).subtract(&busy).length()),
    }
}

/// The report `overlap`.
pub fn report(context: &Context) -> Report {
    let (name, title) = ("overlap", "Communication against compute");
    let trace = context.trace;
    let class = |op: usize| Some(context.categories.of_op(op).class);
    let devices = by_device(trace, class);
    if devices.values().all(|times| times.communication.is_empty()) {
        let why = if trace.ops.is_empty() {
            "nothing in the trace ran on a device"
        } else {
            "no op of the trace is communication (NCCL, RCCL, all-reduce and the like; see the report `categories`)"
        };
        return Report::absent(name, title, why);
    }

    let time = |name: &str| Column::new(name, Unit::Ns);
    let mut columns = vec![Column::new("Device", Unit::Text)];
    columns.extend(["Communication", "Overlapped", "Exposed"].map(time));
    columns.push(Column::in_percent("Overlapped (% of communication)"));
    columns.extend(["Compute", "Other Busy", "Idle", "Span"].map(time));
    columns.push(Column::in_percent("Exposed (% of span)"));
    let mut sheet = Sheet::new("devices", columns);
    for (&device, times) in &devices {
        let measured = measure(device, times, context.unseen_on(device));
        let exposed_share = (measured.span > 0).then(|| measured.exposed as f64 / measured.span as f64);
        sheet.push([
            device_name(trace, device).into(),
            measured.communication.into(),
            measured.overlapped.into(),
            measured.exposed.into(),
            measured.overlapped_share().into(),
            measured.compute.into(),
            (measured.non_compute() - measured.exposed).into(),
            measured.idle().into(),
            measured.span.into(),
            exposed_share.into(),
        ]);
    }
    let report = Report::new(name, title).sheet(sheet).sheet(by_name(context, &devices)).note(
        "Times of a device are lengths of unions: compute + exposed communication + other busy (copies and fills alone) + \
         idle = span.",
    );
    if trace.ops.kind.contains(&OpKind::Graph) {
        return report.note("CUDA graphs recorded as a whole count as compute: communication inside them is not seen.");
    }
    report
}

/// The communication ops by name, the largest exposed time first.
fn by_name(context: &Context, devices: &BTreeMap<u32, ByClass>) -> Sheet {
    let ops = &context.trace.ops;
    let mut names: BTreeMap<&str, (usize, i64, i64)> = BTreeMap::new();
    for op in (0..ops.len()).filter(|&op| context.categories.of_op(op).class == Class::Communication) {
        let Some(times) = devices.get(&ops.device[op]) else { continue };
        let hidden = times.compute.clip(Span::new(ops.start[op], ops.end[op])).length();
        let sums = names.entry(context.trace.op_name(op)).or_default();
        sums.0 += 1;
        sums.1 = sums.1.saturating_add(ops.duration(op));
        sums.2 = sums.2.saturating_add(ops.duration(op) - hidden);
    }
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_by_key(|(_, (_, _, exposed))| std::cmp::Reverse(*exposed));
    let columns = [
        Column::new("Count", Unit::Count),
        Column::new("Total", Unit::Ns),
        Column::new("Exposed", Unit::Ns),
        Column::in_percent("Exposed (% of total)"),
        Column::new("Name", Unit::Text),
    ];
    let mut sheet = Sheet::new("communication", columns).title("Communication by name: sums over all devices");
    for (name, (count, total, exposed)) in names {
        let share = (total > 0).then(|| exposed as f64 / total as f64);
        sheet.push([count.into(), total.into(), exposed.into(), Value::from(share), name.into()]);
    }
    sheet
}
