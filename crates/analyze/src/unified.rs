//! Unified memory: pages that moved between host and devices, why, and the faults that asked for them.

use std::collections::BTreeMap;

use strobe_trace::{OpDetail, Trace};

use crate::categories::Class;
use crate::context::Context;
use crate::intervals::{Span, SpanSet};
use crate::launch::device_name;
use crate::sheet::{Column, Sheet, Unit, Value};

/// Migrations of one direction and cause on one device.
pub(crate) struct Migrations {
    /// Index into the trace's devices.
    pub device: u32,
    /// CUPTI's number of the cause.
    cause: u8,
    /// What the recorder calls such a copy.
    name: String,
    pub count: usize,
    pub bytes: u64,
    /// The sum of their lengths.
    pub time_ns: i64,
    /// What of it passed while kernels ran on the device.
    pub beside_kernels_ns: i64,
    /// The time in which any of them ran.
    pub spans: SpanSet,
}

impl Migrations {
    /// Whether the program asked for them ahead of their use.
    pub(crate) fn were_asked_for(&self) -> bool {
        const ASKED_FOR: u8 = 1;
        self.cause == ASKED_FOR
    }

    /// Why, in words.
    pub(crate) fn why(&self) -> &'static str {
        match self.cause {
            1 => "asked for (prefetch)",
            2 => "page fault",
            3 => "speculation of the driver",
            4 => "eviction",
            5 => "access counters",
            _ => "not recorded",
        }
    }

    /// Which way, as the recorder says it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// The cause of an op that migrates pages; `None` for all others.
fn cause_of(trace: &Trace, op: usize) -> Option<u8> {
    match trace.detail_of(op) {
        Some(&OpDetail::Memcpy { copy_kind: 11..=13, cause, .. }) => Some(cause),
        _ => None,
    }
}

/// All migrations, most time first.
pub(crate) fn migrations(context: &Context) -> Vec<Migrations> {
    let trace = context.trace;
    if !trace.details.iter().any(|detail| matches!(detail, OpDetail::Memcpy { copy_kind: 11..=13, .. })) {
        return Vec::new();
    }
    let mut groups: BTreeMap<(u32, strobe_trace::StrId, u8), Vec<usize>> = BTreeMap::new();
    for op in 0..trace.ops.len() {
        if let Some(cause) = cause_of(trace, op) {
            groups.entry((trace.ops.device[op], trace.ops.name[op], cause)).or_default().push(op);
        }
    }
    let mut computing: BTreeMap<u32, SpanSet> = BTreeMap::new();
    let mut found: Vec<Migrations> = Vec::new();
    for ((device, name, cause), ops) in groups {
        let is_compute = |op: usize| context.categories.of_op(op).class == Class::Compute;
        let computing = computing.entry(device).or_insert_with(|| context.union(device, is_compute));
        let span = |&op: &usize| Span::new(trace.ops.start[op], trace.ops.end[op]);
        found.push(Migrations {
            device,
            cause,
            name: trace.text(name).to_owned(),
            count: ops.len(),
            bytes: ops.iter().map(|&op| trace.ops.bytes[op]).fold(0, u64::saturating_add),
            time_ns: ops.iter().map(|&op| trace.ops.duration(op)).fold(0, i64::saturating_add),
            beside_kernels_ns: ops.iter().map(|op| computing.covered(span(op))).fold(0, i64::saturating_add),
            spans: SpanSet::union_of(ops.iter().map(span)),
        });
    }
    found.sort_by_key(|group| (std::cmp::Reverse(group.time_ns), group.device, group.cause));
    found
}

/// Tables of migrations and of page faults; none where there are none.
pub(crate) fn sheets(context: &Context) -> Vec<Sheet> {
    [migrations_sheet(context), faults_sheet(context.trace)].into_iter().flatten().collect()
}

fn migrations_sheet(context: &Context) -> Option<Sheet> {
    let columns = [
        Column::new("Device", Unit::Text),
        Column::new("Direction", Unit::Text),
        Column::new("Cause", Unit::Text),
        Column::new("Migrations", Unit::Count),
        Column::new("Bytes", Unit::Bytes),
        Column::new("Time", Unit::Ns),
        Column::new("Beside kernels", Unit::Ns),
    ];
    let mut sheet = Sheet::new("migrations", columns).title("Pages of unified memory that moved");
    for group in migrations(context) {
        let words = [device_name(context.trace, group.device), group.name.clone(), group.why().to_owned()];
        let figures = [group.count.into(), group.bytes.into(), group.time_ns.into(), group.beside_kernels_ns.into()];
        sheet.push(words.map(Value::from).into_iter().chain(figures));
    }
    (!sheet.rows.is_empty()).then_some(sheet)
}

/// Functions that faults are listed for at most.
const FUNCTIONS: usize = 25;

fn faults_sheet(trace: &Trace) -> Option<Sheet> {
    #[derive(Default)]
    struct Sum {
        faults: u64,
        groups: usize,
        time: i64,
    }
    let mut sums: BTreeMap<(Option<u32>, u32, u8, strobe_trace::StrId), Sum> = BTreeMap::new();
    for fault in &trace.page_faults {
        let sum = sums.entry((fault.device, fault.process, fault.access, fault.function)).or_default();
        sum.faults = sum.faults.saturating_add(fault.count.into());
        sum.groups += 1;
        sum.time = sum.time.saturating_add(fault.end.saturating_sub(fault.start).max(0));
    }
    let columns = [
        Column::new("Where", Unit::Text),
        Column::new("Process", Unit::Id),
        Column::new("Access", Unit::Text),
        Column::new("Faults", Unit::Count),
        Column::new("Groups", Unit::Count),
        Column::new("Time", Unit::Ns),
        Column::new("Function", Unit::Text),
    ];
    let mut sheet = Sheet::new("page_faults", columns).title("Faults on pages of unified memory");
    let mut rows: Vec<_> = sums.into_iter().collect();
    rows.sort_by_key(|(key, sum)| (std::cmp::Reverse((sum.faults, sum.time)), *key));
    for ((device, process, access, function), sum) in rows.into_iter().take(FUNCTIONS) {
        let access = match access {
            1 => Value::from("read"),
            2 => "write".into(),
            3 => "atomic".into(),
            4 => "prefetch".into(),
            _ => Value::Unknown,
        };
        sheet.push([
            device.map_or_else(|| "CPU".to_owned(), |device| device_name(trace, device)).into(),
            trace.processes.get(process as usize).map(|process| process.pid).into(),
            access,
            sum.faults.into(),
            sum.groups.into(),
            device.map(|_| sum.time).into(), // those of a CPU have no end
            function.is_some().then(|| trace.text(function).to_owned()).into(),
        ]);
    }
    (!sheet.rows.is_empty()).then_some(sheet)
}
