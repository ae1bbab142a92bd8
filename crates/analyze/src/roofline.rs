//! How near ops come to what the hardware can do.
//!
//! What an op had to compute and move is taken from what strobe's engine recorded, else from the inputs of the operator
//! that launched it, else from dimensions in its name. Where none of these tells, it stays unknown. In a trace of PyTorch
//! on a CPU the operators themselves are the ops.

mod amounts;
mod operators;
mod peaks;
mod table;

use std::collections::HashMap;

use serde::Serialize;
use strobe_trace::{OpDetail, OpKind, StrId, Trace};

pub use amounts::{Amounts, DataType, Inputs, Rank, Shape, of_inputs, of_kernel_name, of_operator};
pub(crate) use amounts::{category_of_operator, category_of_range, data_type_of_kernel};
use operators::Operators;
pub use peaks::{DevicePeaks, of_device};
pub use table::report;

use crate::Context;
use crate::categories::{Class, UNCLASSIFIED};

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
    /// The kernel that took most of its time; empty where the host computes.
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
    /// How it can be beyond the roof, where it is.
    pub beyond: Option<Beyond>,
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

    /// The least time over the time taken. Above 1 see [`Self::beyond`].
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

/// Why an op seems to take less time than the least possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Beyond {
    /// All it reads and writes fits in the last cache before memory.
    FitsInCache,
    /// Without as many bytes as that cache holds it would be below the roof.
    PartlyInCache,
    /// Its algorithm needs fewer operations than the direct one, whose operations are counted: Winograd's, say.
    FewerOperations,
    /// The size of the cache is not known.
    CacheNotKnown,
    /// No cache explains it: the amounts or the peaks are wrong.
    Wrong,
}

impl Beyond {
    /// What tables say of it.
    pub fn as_str(self) -> &'static str {
        match self {
            Beyond::FitsInCache => "over the roof: fits in the cache, bytes come from there",
            Beyond::PartlyInCache => "over the roof: the cache can hold part of the bytes",
            Beyond::FewerOperations => "over the roof: its algorithm needs fewer operations than are counted",
            Beyond::CacheNotKnown => "over the roof: from a cache of unknown size, or amounts or peak wrong",
            Beyond::Wrong => "over the roof: amounts or peak wrong",
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
    /// The op that took longest, or the range of an operator that ran on the host.
    longest: u32,
    longest_ns: i64,
    /// Whether one of its kernels needs fewer operations than are counted.
    fewer_operations: bool,
}

impl Instance {
    fn new(amounts: Amounts, name: StrId, source: AmountSource, op: usize, ns: i64) -> Self {
        Self { amounts, name, source, time_ns: ns, longest: op as u32, longest_ns: ns, fewer_operations: false }
    }
}

/// Computes it.
pub fn roofline(context: &Context) -> Roofline {
    if crate::host_compute::is_host_only(context.trace) {
        return of_host(context);
    }
    let trace = context.trace;
    let ops = &trace.ops;
    let mut result =
        Roofline { peaks: trace.devices.iter().map(|d| of_device(trace, d)).collect(), ..Roofline::default() };
    let mut instances: Vec<Instance> = Vec::new();
    let mut unknown: HashMap<StrId, (u64, i64)> = HashMap::new();
    let mut not_known = |op: usize| {
        let row = unknown.entry(ops.name[op]).or_default();
        *row = (row.0 + 1, row.1.saturating_add(context.own_ns(op)));
    };

    let operators = Operators::around_ops(context);
    let mut by_name: HashMap<StrId, Option<Amounts>> = HashMap::new();
    // Kernels that help with an op of the model, whose amounts another one carries.
    let mut recorded: HashMap<(u32, StrId, Option<u32>), usize> = HashMap::new();
    let mut helpers: Vec<usize> = Vec::new();
    let mut fewer: HashMap<StrId, bool> = HashMap::new();
    let mut instance_of: HashMap<u32, usize> = HashMap::new();
    for op in 0..ops.len() {
        let computing = computes(context, op);
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
                untyped_elements: 0.0,
                is_product: true,
            };
            if amounts.flops.is_some() || amounts.bytes.is_some() {
                recorded.insert((ops.iteration[op], work.op, work.layer), instances.len());
                instances.push(Instance::new(amounts, work.op, AmountSource::Recorded, op, ns));
                continue;
            }
            helpers.push(op);
            continue;
        }
        // A fill that a GEMM launches for itself is part of its time.
        if let Some(range) = operators.of_op(op) {
            let Some(amounts) = operators.amounts(range) else {
                if computing {
                    not_known(op);
                }
                continue;
            };
            let place = *instance_of.entry(range).or_insert_with(|| {
                let name = trace.ranges.name[range as usize];
                instances.push(Instance::new(amounts, name, AmountSource::Operator, op, 0));
                instances.len() - 1
            });
            let instance = &mut instances[place];
            instance.fewer_operations |=
                *fewer.entry(ops.name[op]).or_insert_with(|| amounts::needs_fewer_operations(trace.op_name(op)));
            instance.time_ns = instance.time_ns.saturating_add(ns);
            // An op that computes goes before a fill, however short.
            let before = (computes(context, instance.longest as usize), instance.longest_ns);
            if (computing, ns) > before {
                (instance.longest, instance.longest_ns) = (op as u32, ns);
            }
            continue;
        }
        if !computing {
            continue;
        }
        let amounts = *by_name.entry(ops.name[op]).or_insert_with(|| of_kernel_name(trace.op_name(op)));
        match amounts {
            Some(amounts) => {
                instances.push(Instance::new(amounts, ops.name[op], AmountSource::KernelName, op, ns));
            }
            None => not_known(op),
        }
    }

    for op in helpers {
        let key = trace.work_of(op).map(|work| (ops.iteration[op], work.op, work.layer));
        match key.and_then(|key| recorded.get(&key)).and_then(|&place| instances.get_mut(place)) {
            Some(instance) => instance.time_ns = instance.time_ns.saturating_add(context.own_ns(op)),
            None if computes(context, op) => not_known(op),
            None => {}
        }
    }
    summarize(trace, instances, &mut result, |instance| Ran::on_device(context, instance.longest as usize));
    let rows = unknown.into_iter().map(|(name, (calls, ns))| (trace.text(name).to_owned(), calls, ns));
    result.set_unknown(rows);
    result
}

/// Whether an op is one of those whose time is split into known and unknown.
fn computes(context: &Context, op: usize) -> bool {
    let kind = context.trace.ops.kind[op];
    let class = context.categories.of_op(op).class;
    matches!(kind, OpKind::Kernel | OpKind::CpuOp | OpKind::Graph) && class != Class::Communication
}

/// The same where the operators ran on the host: an operator takes the time in which no other one inside it counts.
fn of_host(context: &Context) -> Roofline {
    let trace = context.trace;
    let mut result = Roofline { peaks: vec![DevicePeaks::of_host(trace)], ..Roofline::default() };
    let operators = Operators::on_host(context);
    let own = crate::host_compute::own_times(context);
    let mut times: HashMap<u32, i64> = HashMap::new();
    let mut unknown: HashMap<StrId, (u64, i64)> = HashMap::new();
    for (range, &ns) in own.iter().enumerate().filter(|&(range, _)| crate::host_compute::is_operator(trace, range)) {
        result.total_ns = result.total_ns.saturating_add(ns);
        let known = operators.nearest(range as u32).filter(|&range| operators.amounts(range).is_some());
        match known {
            Some(range) => {
                let time = times.entry(range).or_default();
                *time = time.saturating_add(ns);
            }
            None => {
                let row = unknown.entry(trace.ranges.name[range]).or_default();
                *row = (row.0 + 1, row.1.saturating_add(ns));
            }
        }
    }
    let instances = times.into_iter().filter_map(|(range, ns)| {
        let name = trace.ranges.name[range as usize];
        Some(Instance::new(operators.amounts(range)?, name, AmountSource::Operator, range as usize, ns))
    });
    let instances: Vec<Instance> = instances.collect();
    summarize(trace, instances, &mut result, |instance| Ran {
        kernel: "",
        name: StrId::NONE,
        category: category_of_operator(trace.text(instance.name)).unwrap_or(UNCLASSIFIED),
        device: 0,
        computes: true,
        crosses_a_link: false,
    });
    result.set_unknown(unknown.into_iter().map(|(name, (calls, ns))| (trace.text(name).to_owned(), calls, ns)));
    result
}

/// Where and as what an operator ran.
struct Ran<'t> {
    kernel: &'t str,
    name: StrId,
    category: &'t str,
    device: u32,
    /// Whether its time is part of [`Roofline::total_ns`].
    computes: bool,
    /// A copy between host and device is not limited by the device's memory.
    crosses_a_link: bool,
}

impl<'t> Ran<'t> {
    fn on_device(context: &'t Context, op: usize) -> Self {
        let trace = context.trace;
        let within_device = |kind: u8| kind == 8;
        let crosses_a_link = match trace.detail_of(op) {
            Some(OpDetail::Memcpy { copy_kind, .. }) => !within_device(*copy_kind),
            _ => trace.ops.kind[op] == OpKind::Memcpy,
        };
        Ran {
            kernel: trace.op_name(op),
            name: trace.ops.name[op],
            category: &context.categories.of_op(op).name,
            device: trace.ops.device[op],
            computes: computes(context, op),
            crosses_a_link,
        }
    }
}

/// What becomes a row.
struct Group {
    row: Row,
    /// Least time of the calls that arithmetic limits, and of those that memory limits.
    compute_ns: f64,
    memory_ns: f64,
    device: u32,
    fewer_operations: bool,
}

fn summarize<'t>(
    trace: &'t Trace,
    instances: Vec<Instance>,
    result: &mut Roofline,
    ran: impl Fn(&Instance) -> Ran<'t>,
) {
    type Key = (StrId, StrId, Shape, Option<DataType>, AmountSource);
    let mut groups: HashMap<Key, Group> = HashMap::new();
    for instance in instances {
        let ran = ran(&instance);
        let mut amounts = instance.amounts;
        let kernel = ran.kernel;
        if amounts.mask_not_known {
            match amounts::causal(kernel) {
                Some(true) => amounts.flops = amounts.flops.map(|f| f / 2.0),
                Some(false) => {}
                None => result.mask_not_known = true,
            }
        }
        if amounts.bytes.is_none() && amounts.untyped_elements > 0.0 {
            amounts.bytes = amounts::element_bytes_of_kernel(kernel).map(|size| amounts.untyped_elements * size);
        }
        let data_type = amounts.data_type.or_else(|| amounts::data_type_of_kernel(kernel));
        // fp32 inputs may run on tensor cores as tf32: the kernel's name says so.
        let tf32 = amounts.is_product && data_type == Some(DataType::Fp32) && amounts::rounds_to_tf32(kernel);
        let data_type = if tf32 { Some(DataType::Tf32) } else { data_type };
        if let (AmountSource::Recorded, Shape::Gemm { n, k: 1.., .. }) = (instance.source, &mut amounts.shape)
            && ran.category == "attention"
        {
            *n = 0; // every step has a few keys more: one row for all
        }
        let key = (instance.name, ran.name, amounts.shape, data_type, instance.source);
        let group = groups.entry(key).or_insert_with(|| {
            let row = Row {
                op: trace.text(instance.name).to_owned(),
                kernel: kernel.to_owned(),
                category: ran.category.to_owned(),
                shape: amounts.shape,
                data_type,
                source: instance.source,
                calls: 0,
                time_ns: 0,
                flops: amounts.flops.map(|_| 0.0),
                bytes: amounts.bytes.map(|_| 0.0),
                least_ns: Some(0.0),
                bound: None,
                beyond: None,
            };
            Group { row, compute_ns: 0.0, memory_ns: 0.0, device: ran.device, fewer_operations: false }
        });
        let Group { row, compute_ns, memory_ns, fewer_operations, .. } = group;
        *fewer_operations |= instance.fewer_operations;
        row.calls += 1;
        row.time_ns = row.time_ns.saturating_add(instance.time_ns);
        if ran.computes {
            result.known_ns = result.known_ns.saturating_add(instance.time_ns);
        }
        row.flops = row.flops.zip(amounts.flops).map(|(sum, more)| sum + more);
        row.bytes = row.bytes.zip(amounts.bytes).map(|(sum, more)| sum + more);
        let peaks = result.peaks.get(ran.device as usize).filter(|_| !ran.crosses_a_link);
        let least = peaks.and_then(|peaks| {
            let compute = match amounts.flops {
                Some(flops) if amounts.is_product => flops / peaks.flops_per_s(data_type)? * 1e9,
                // The peaks of other types are those of products.
                Some(flops) => peaks.flops_per_s(Some(DataType::Fp32)).map_or(0.0, |peak| flops / peak * 1e9),
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
    let rows = groups.into_values().map(|group| {
        let Group { mut row, compute_ns, memory_ns, device, fewer_operations } = group;
        row.least_ns = row.least_ns.map(|_| compute_ns + memory_ns);
        row.bound = row.least_ns.map(|_| if compute_ns > memory_ns { Bound::Compute } else { Bound::Memory });
        let peaks = result.peaks.get(device as usize);
        row.beyond = peaks.and_then(|peaks| beyond(&row, peaks, fewer_operations));
        row
    });
    result.rows = rows.collect();
    result.rows.sort_by(|a, b| {
        let longest_first = b.time_ns.cmp(&a.time_ns);
        longest_first.then_with(|| (&a.op, a.shape, &a.kernel).cmp(&(&b.op, b.shape, &b.kernel)))
    });
}

/// Why a row is beyond the roof, where it is.
fn beyond(row: &Row, peaks: &DevicePeaks, fewer_operations: bool) -> Option<Beyond> {
    row.share().filter(|share| *share > 1.0)?;
    if row.bound != Some(Bound::Memory) {
        return Some(if fewer_operations { Beyond::FewerOperations } else { Beyond::Wrong });
    }
    let (Some(bytes), Some(cache)) = (row.bytes, peaks.cache_bytes) else { return Some(Beyond::CacheNotKnown) };
    let calls = row.calls.max(1) as f64;
    let from_memory_ns = (bytes - cache * calls) / peaks.bytes_per_s? * 1e9;
    Some(match bytes / calls {
        each if each <= cache => Beyond::FitsInCache,
        _ if from_memory_ns <= row.time_ns as f64 => Beyond::PartlyInCache,
        _ => Beyond::Wrong,
    })
}

impl Roofline {
    fn set_unknown(&mut self, rows: impl Iterator<Item = (String, u64, i64)>) {
        self.unknown = rows.collect();
        self.unknown.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
    }
}
