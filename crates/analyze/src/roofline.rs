//! How near ops come to what the hardware can do.
//!
//! What an op had to compute and move is taken from what strobe's engine recorded, else from the dimensions of the
//! operator that launched it, else from dimensions in its name. Where none of these tells, it stays unknown.

mod amounts;
mod peaks;

use std::collections::{HashMap, HashSet};

use serde::Serialize;
use strobe_trace::{NONE, OpKind, RangeSource, StrId, Trace};

pub(crate) use amounts::data_type_of_kernel;
pub use amounts::{Amounts, DataType, Shape, of_kernel_name, of_operator};
use amounts::{Operator, Sequences};
pub use peaks::{DevicePeaks, of_device};

use crate::Context;
use crate::attribution::Attribution;
use crate::categories::Class;
use crate::sheet::{Column, Report, Sheet, Unit, Value};

/// How near the ops of a trace come to what the hardware can do.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Roofline {
    /// What is known, longest first.
    pub rows: Vec<Row>,
    /// Sum of the durations of ops whose amounts are known.
    pub known_ns: i64,
    /// Sum of the durations of all ops but copies, fills and communication.
    pub total_ns: i64,
    /// The names of ops whose amounts are not known, with calls and time, longest first.
    pub unknown: Vec<(String, u64, i64)>,
    /// What every device can do, by index; where known.
    pub peaks: Vec<DevicePeaks>,
    /// Whether attention was counted without knowing its mask.
    pub mask_not_known: bool,
}

/// All executions of one operator with the same shape by the same kernel on devices of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The operator, or what strobe's engine calls it.
    pub op: String,
    /// The kernel that took most of its time.
    pub kernel: String,
    /// The category of that kernel.
    pub category: String,
    /// The shape, e.g. `32x4096x4096` (m, n, k).
    #[serde(serialize_with = "as_text")]
    pub shape: Shape,
    /// The type of its inputs, where known.
    pub data_type: Option<DataType>,
    /// Where the amounts were read.
    pub source: AmountSource,
    /// How often the operator ran.
    pub calls: u64,
    /// Kernels per call may be several: their durations, summed.
    pub time_ns: i64,
    /// Floating-point operations of all calls, where known.
    pub flops: Option<f64>,
    /// Bytes of all calls, where known: inputs and outputs, each once.
    pub bytes: Option<f64>,
    /// The least time its calls could take, where both ceilings are known.
    pub least_ns: Option<f64>,
    /// What sets that least time.
    pub bound: Option<Bound>,
}

impl Row {
    /// Floating-point operations per byte.
    pub fn intensity(&self) -> Option<f64> {
        Some(self.flops? / self.bytes.filter(|b| *b > 0.0)?)
    }

    /// Floating-point operations per second.
    pub fn flops_per_s(&self) -> Option<f64> {
        (self.time_ns > 0).then_some(self.flops? / (self.time_ns as f64 * 1e-9))
    }

    /// Bytes per second.
    pub fn bytes_per_s(&self) -> Option<f64> {
        (self.time_ns > 0).then_some(self.bytes? / (self.time_ns as f64 * 1e-9))
    }

    /// The least time over the time taken. Above 1 when data came from a cache, or amounts are overstated.
    pub fn share(&self) -> Option<f64> {
        (self.time_ns > 0).then_some(self.least_ns? / self.time_ns as f64)
    }
}

fn as_text<S: serde::Serializer>(shape: &Shape, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(shape)
}

/// Where amounts were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AmountSource {
    /// The engine recorded them.
    Recorded,
    /// From the dimensions of the operator's inputs.
    Operator,
    /// From the name of the kernel.
    KernelName,
}

impl AmountSource {
    /// Its name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            AmountSource::Recorded => "recorded",
            AmountSource::Operator => "operator",
            AmountSource::KernelName => "kernel name",
        }
    }
}

/// What limits an op at best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Arithmetic.
    Compute,
    /// Memory bandwidth.
    Memory,
}

impl Bound {
    /// Its name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Bound::Compute => "compute",
            Bound::Memory => "memory",
        }
    }
}

/// One execution of an operator: the kernels it launched.
#[derive(Clone, Copy)]
struct Instance {
    amounts: Amounts,
    name: StrId,
    source: AmountSource,
    time_ns: i64,
    /// The op that took longest.
    longest: u32,
    longest_ns: i64,
}

/// Computes it.
pub fn roofline(context: &Context) -> Roofline {
    let trace = context.trace;
    let ops = &trace.ops;
    let mut result =
        Roofline { peaks: trace.devices.iter().map(|d| of_device(trace, d)).collect(), ..Roofline::default() };
    let computes = |op: usize| {
        let kind = ops.kind[op];
        let class = context.categories.of_op(op).class;
        matches!(kind, OpKind::Kernel | OpKind::CpuOp | OpKind::Graph) && class != Class::Communication
    };
    let mut instances: Vec<Instance> = Vec::new();
    let mut unknown: HashMap<StrId, (u64, i64)> = HashMap::new();
    let mut not_known = |op: usize| {
        let row = unknown.entry(ops.name[op]).or_default();
        *row = (row.0 + 1, row.1.saturating_add(context.own_ns(op)));
    };

    let mut operators = Operators::of(context);
    let mut by_name: HashMap<StrId, Option<Amounts>> = HashMap::new();
    let mut claimed: Vec<(usize, u32)> = Vec::new();
    // Kernels that help with an op of the model, whose amounts another one carries.
    let mut recorded: HashMap<(u32, StrId, Option<u32>), usize> = HashMap::new();
    let mut helpers: Vec<usize> = Vec::new();
    for op in 0..ops.len() {
        let computing = computes(op);
        let ns = context.own_ns(op);
        if computing {
            result.total_ns = result.total_ns.saturating_add(ns);
        }
        if let Some(work) = trace.work_of(op) {
            let known = |amount: u64| (amount > 0).then_some(amount as f64);
            let amounts = Amounts {
                flops: known(work.flops),
                bytes: known(work.bytes),
                shape: Shape::Gemm { batch: 1, m: work.shape[0], n: work.shape[1], k: work.shape[2] },
                data_type: None,
                mask_not_known: false,
            };
            if amounts.flops.is_some() || amounts.bytes.is_some() {
                let source = AmountSource::Recorded;
                let (name, longest) = (work.op, op as u32);
                recorded.insert((ops.iteration[op], work.op, work.layer), instances.len());
                instances.push(Instance { amounts, name, source, time_ns: ns, longest, longest_ns: ns });
                continue;
            }
            helpers.push(op);
            continue;
        }
        if let Some(range) = operators.around(op) {
            // A fill that a GEMM launches for itself is part of its time.
            claimed.push((op, range));
            continue;
        }
        if !computing {
            continue;
        }
        let amounts = *by_name.entry(ops.name[op]).or_insert_with(|| of_kernel_name(trace.op_name(op)));
        match amounts {
            Some(amounts) => {
                let (name, source) = (ops.name[op], AmountSource::KernelName);
                instances.push(Instance { amounts, name, source, time_ns: ns, longest: op as u32, longest_ns: ns });
            }
            None => not_known(op),
        }
    }

    for op in helpers {
        let key = trace.work_of(op).map(|work| (ops.iteration[op], work.op, work.layer));
        match key.and_then(|key| recorded.get(&key)).and_then(|&place| instances.get_mut(place)) {
            Some(instance) => instance.time_ns = instance.time_ns.saturating_add(context.own_ns(op)),
            None if computes(op) => not_known(op),
            None => {}
        }
    }

    // An operator inside which another one did the work has nothing of its own to count.
    let leaf = |operators: &mut Operators, range: u32| {
        if operators.outer.contains(&range) { None } else { operators.amounts(range) }
    };
    let mut instance_of: HashMap<u32, usize> = HashMap::new();
    for (op, range) in claimed {
        let Some(amounts) = leaf(&mut operators, range) else {
            if computes(op) {
                not_known(op);
            }
            continue;
        };
        let ns = context.own_ns(op);
        let place = *instance_of.entry(range).or_insert_with(|| {
            let (name, source) = (trace.ranges.name[range as usize], AmountSource::Operator);
            instances.push(Instance { amounts, name, source, time_ns: 0, longest: op as u32, longest_ns: -1 });
            instances.len() - 1
        });
        let instance = &mut instances[place];
        instance.time_ns = instance.time_ns.saturating_add(ns);
        if ns > instance.longest_ns {
            (instance.longest, instance.longest_ns) = (op as u32, ns);
        }
    }
    summarize(context, instances, &mut result);
    let rows = unknown.into_iter().map(|(name, (calls, ns))| (trace.text(name).to_owned(), calls, ns));
    result.unknown = rows.collect();
    result.unknown.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
    result
}

fn summarize(context: &Context, instances: Vec<Instance>, result: &mut Roofline) {
    let trace = context.trace;
    type Key = (StrId, StrId, Shape, Option<DataType>, AmountSource);
    let mut groups: HashMap<Key, (Row, f64, f64)> = HashMap::new();
    for instance in instances {
        let op = instance.longest as usize;
        let mut amounts = instance.amounts;
        let kernel = trace.op_name(op);
        if amounts.mask_not_known {
            match amounts::causal(kernel) {
                Some(true) => amounts.flops = amounts.flops.map(|f| f / 2.0),
                Some(false) => {}
                None => result.mask_not_known = true,
            }
        }
        let data_type = amounts.data_type.or_else(|| amounts::data_type_of_kernel(kernel));
        // fp32 inputs may run on tensor cores as tf32: the kernel's name says so.
        let tf32 = data_type == Some(DataType::Fp32) && amounts::rounds_to_tf32(kernel);
        let data_type = if tf32 { Some(DataType::Tf32) } else { data_type };
        if let (AmountSource::Recorded, Shape::Gemm { n, k: 1.., .. }) = (instance.source, &mut amounts.shape)
            && context.categories.of_op(op).name == "attention"
        {
            *n = 0; // every step has a few keys more: one row for all
        }
        let key = (instance.name, trace.ops.name[op], amounts.shape, data_type, instance.source);
        let (row, compute_ns, memory_ns) = groups.entry(key).or_insert_with(|| {
            let row = Row {
                op: trace.text(instance.name).to_owned(),
                kernel: kernel.to_owned(),
                category: context.categories.of_op(op).name.clone(),
                shape: amounts.shape,
                data_type,
                source: instance.source,
                calls: 0,
                time_ns: 0,
                flops: amounts.flops.map(|_| 0.0),
                bytes: amounts.bytes.map(|_| 0.0),
                least_ns: Some(0.0),
                bound: None,
            };
            (row, 0.0, 0.0)
        });
        row.calls += 1;
        row.time_ns = row.time_ns.saturating_add(instance.time_ns);
        result.known_ns = result.known_ns.saturating_add(instance.time_ns);
        row.flops = row.flops.zip(amounts.flops).map(|(sum, more)| sum + more);
        row.bytes = row.bytes.zip(amounts.bytes).map(|(sum, more)| sum + more);
        let peaks = result.peaks.get(trace.ops.device[op] as usize);
        let least = peaks.and_then(|peaks| {
            let compute = match amounts.flops {
                Some(flops) => flops / peaks.flops_per_s(data_type)? * 1e9,
                None => 0.0,
            };
            Some((compute, amounts.bytes? / peaks.bytes_per_s? * 1e9))
        });
        match least {
            Some((compute, memory)) if compute > memory => *compute_ns += compute,
            Some((_, memory)) => *memory_ns += memory,
            None => row.least_ns = None,
        }
    }
    let rows = groups.into_values().map(|(mut row, compute, memory)| {
        row.least_ns = row.least_ns.map(|_| compute + memory);
        row.bound = row.least_ns.map(|_| if compute > memory { Bound::Compute } else { Bound::Memory });
        row
    });
    result.rows = rows.collect();
    result.rows.sort_by(|a, b| {
        let longest_first = b.time_ns.cmp(&a.time_ns);
        longest_first.then_with(|| (&a.op, a.shape, &a.kernel).cmp(&(&b.op, b.shape, &b.kernel)))
    });
}

/// The operators of a trace whose dimensions tell what they compute.
struct Operators<'t> {
    trace: &'t Trace,
    attribution: &'t Attribution,
    /// What operators do by name, dimensions and types: traces repeat few of them.
    known: HashMap<(StrId, StrId, StrId), Option<Operator>>,
    /// Lengths of sequences by the name of a marker.
    sequences: HashMap<StrId, Option<Sequences>>,
    /// Operators that hold another one that launched something.
    outer: HashSet<u32>,
    /// Per range the innermost operator with known amounts that is it or around it; [`NOT_YET`] until asked.
    nearest: Vec<u32>,
    /// Ranges above which all such operators are in `outer`.
    seen: HashSet<u32>,
    /// Per range the innermost marker of sequences that is it or around it; empty until asked.
    markers: Vec<u32>,
}

/// No range has this number, and [`NONE`] is another one.
const NOT_YET: u32 = NONE - 1;

impl<'t> Operators<'t> {
    fn of(context: &'t Context) -> Self {
        let (trace, attribution) = (context.trace, context.attribution());
        Self {
            trace,
            attribution,
            known: HashMap::new(),
            sequences: HashMap::new(),
            outer: HashSet::new(),
            nearest: vec![NOT_YET; trace.ranges.len()],
            seen: HashSet::new(),
            markers: Vec::new(),
        }
    }

    /// The innermost operator around the launch of an op whose amounts are known.
    fn around(&mut self, op: usize) -> Option<u32> {
        let found = self.nearest(*self.attribution.innermost.get(op)?)?;
        // Each operator is looked at once, however deep operators nest.
        let mut inner = found;
        while self.seen.insert(inner) {
            let Some(outer) = self.nearest(self.attribution.parent[inner as usize]) else { break };
            self.outer.insert(outer);
            inner = outer;
        }
        Some(found)
    }

    /// The innermost operator with known amounts that is this range or around it.
    fn nearest(&mut self, range: u32) -> Option<u32> {
        let (mut at, mut passed) = (range, Vec::new());
        let found = loop {
            match self.nearest.get(at as usize) {
                None => break NONE,
                Some(&known) if known != NOT_YET => break known,
                Some(_) => {}
            }
            passed.push(at);
            if self.amounts(at).is_some() {
                break at;
            }
            at = self.attribution.parent[at as usize];
        };
        passed.into_iter().for_each(|range| self.nearest[range as usize] = found);
        (found != NONE).then_some(found)
    }

    /// The lengths of sequences that the innermost marker around a range tells.
    fn sequences_around(&mut self, range: u32) -> Option<Sequences> {
        let names = &self.trace.ranges.name;
        if self.markers.is_empty() {
            self.markers = vec![NONE; names.len()];
            // Parents stand before their children.
            for (range, &name) in names.iter().enumerate() {
                let sequences =
                    *self.sequences.entry(name).or_insert_with(|| Sequences::of_marker(self.trace.text(name)));
                let around = self.markers.get(self.attribution.parent[range] as usize).copied().unwrap_or(NONE);
                self.markers[range] = if sequences.is_some() { range as u32 } else { around };
            }
        }
        let marker = *self.markers.get(range as usize)?;
        *self.sequences.get(names.get(marker as usize)?)?
    }

    fn amounts(&mut self, range: u32) -> Option<Amounts> {
        let trace = self.trace;
        let ranges = &trace.ranges;
        let r = range as usize;
        if !matches!(ranges.source[r], RangeSource::CpuOp | RangeSource::PushPop) {
            return None;
        }
        let key = (ranges.name[r], ranges.dims[r], ranges.types[r]);
        let operator = *self.known.entry(key).or_insert_with(|| {
            let text = |id: StrId| if id == StrId::NONE { "" } else { trace.text(id) };
            amounts::operator(trace.text(key.0), text(key.1), text(key.2))
        });
        match operator? {
            Operator::Known(amounts) => Some(amounts),
            // The marker of the iteration tells how long the sequences are.
            Operator::Ragged(ragged) => self.sequences_around(range)?.attention(&ragged),
        }
    }
}

/// Rows that each table shows at most.
const ROWS: usize = 60;

/// The roofline as tables: what is known, and the longest of what is not.
pub fn report(context: &Context) -> Report {
    const TITLE: &str = "Roofline: % of the hardware's limit per op";
    let result = context.roofline();
    if result.total_ns == 0 {
        return Report::absent("roofline", TITLE, "the trace holds no kernel and no op");
    }
    if result.rows.is_empty() {
        let why = "no op has recorded amounts, an operator with dimensions around its launch, or dimensions in its \
                   name; record shapes (PyTorch: profile(record_shapes=True)); kernels of a replayed graph have none";
        return Report::absent("roofline", TITLE, why);
    }
    let share = |ns: i64| Value::from(ns as f64 / result.total_ns as f64);
    let columns = [
        Column::new("Op", Unit::Text),
        Column::new("Shape", Unit::Text),
        Column::new("Type", Unit::Text),
        Column::new("Category", Unit::Text),
        Column::new("Calls", Unit::Count),
        Column::new("Time", Unit::Ns),
        Column::new("Share of op time", Unit::Share),
        Column::new("Share of roofline", Unit::Share),
        Column::new("Bound", Unit::Text),
        Column::new("FLOP/s", Unit::FlopsPerS),
        Column::new("B/s", Unit::BytesPerS),
        Column::new("FLOP/B", Unit::Number),
        Column::new("FLOP", Unit::Number),
        Column::new("Bytes", Unit::Bytes),
        Column::new("From", Unit::Text),
        Column::new("Kernel", Unit::Text),
    ];
    let mut known = Sheet::new("known", columns);
    for row in result.rows.iter().take(ROWS) {
        known.push([
            row.op.as_str().into(),
            row.shape.to_string().into(),
            row.data_type.map(DataType::as_str).into(),
            row.category.as_str().into(),
            row.calls.into(),
            row.time_ns.into(),
            share(row.time_ns),
            row.share().into(),
            row.bound.map(Bound::as_str).into(),
            row.flops_per_s().into(),
            row.bytes_per_s().into(),
            row.intensity().into(),
            row.flops.into(),
            row.bytes.into(),
            row.source.as_str().into(),
            row.kernel.as_str().into(),
        ]);
    }
    let mut report = Report::new("roofline", TITLE).sheet(known);
    if !result.unknown.is_empty() {
        let columns = [
            Column::new("Calls", Unit::Count),
            Column::new("Time", Unit::Ns),
            Column::new("Share of op time", Unit::Share),
            Column::new("Kernel", Unit::Text),
        ];
        let mut unknown = Sheet::new("unknown", columns).title("Longest of what is not known");
        for (name, calls, ns) in result.unknown.iter().take(20) {
            unknown.push([(*calls).into(), (*ns).into(), share(*ns), name.as_str().into()]);
        }
        report = report.sheet(unknown);
    }
    let not_known: i64 = result.unknown.iter().map(|(_, _, ns)| ns).sum();
    report = report.note(format!(
        "amounts are known for {:.1} % of the time of ops other than copies, fills and communication (durations, summed)",
        100.0 * (1.0 - not_known as f64 / result.total_ns as f64)
    ));
    let mut devices: Vec<String> = result.peaks.iter().map(peaks_sentence).collect();
    devices.dedup();
    for device in devices {
        report = report.note(device);
    }
    report.notes.extend(context.own_time_note());
    if result.mask_not_known {
        report = report.note(
            "attention without a recorded mask counts the whole square of scores: with a causal mask it does half of that",
        );
    }
    if result.rows.len() > ROWS {
        report = report.note(format!("{} more rows take less time each", result.rows.len() - ROWS));
    }
    report
}

fn peaks_sentence(peaks: &DevicePeaks) -> String {
    let device = if peaks.device.is_empty() { "a device without a name" } else { &peaks.device };
    let Some(bytes_per_s) = peaks.bytes_per_s else {
        return format!("{device}: its ceilings are not known, so neither is the share of the roofline");
    };
    let mut text = format!("{device}: {:.0} GB/s ({})", bytes_per_s / 1e9, peaks.bandwidth_from);
    match peaks.measured {
        Some(flops) if flops >= 1e13 => text += &format!(", {:.1} TFLOP/s (measured)", flops / 1e12),
        Some(flops) => text += &format!(", {:.1} GFLOP/s (measured)", flops / 1e9),
        None => {
            for (data_type, flops) in &peaks.by_type {
                text += &format!(", {} {:.1} TFLOP/s", data_type.as_str(), flops / 1e12);
            }
        }
    }
    if let Some(ops) = peaks.measured_int8 {
        text += &format!(", int8 {:.1} GOP/s (measured)", ops / 1e9);
    }
    text
}
