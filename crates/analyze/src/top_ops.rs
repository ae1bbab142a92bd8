//! Which ops take the time, and how near they come to what the hardware can do.

use std::collections::HashMap;

use serde::Serialize;
use strobe_trace::{IterationKind, Peaks, StrId, Work};

use crate::context::Context;
use crate::roofline::{Bound, DataType, data_type_of_kernel};
use strobe_stats::Summary;

/// All executions of one op with one implementation.
///
/// Times are sums: ops that overlap (on several threads or streams, or one inside another) count each, unlike in the
/// iteration budget. Kernels that wait on their stream count from where that wait ends.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpSummary {
    /// What it does in the model.
    pub name: String,
    /// Its family.
    pub category: String,
    /// The implementation that ran.
    pub kernel: String,
    /// How often it ran.
    pub calls: u64,
    /// Sum of its durations.
    pub total_ns: i64,
    /// Median duration.
    pub median_ns: f64,
    /// Share of the durations of all ops listed. Adds up to 1; absent when all take no time.
    pub share_of_op_time: Option<f64>,
    /// Its time inside recorded iterations over the wall time of those; absent when none was recorded.
    pub share_of_wall: Option<f64>,
    /// Floating-point operations; 0 = none or not known.
    pub flops: u64,
    /// Bytes moved at least; 0 = not known.
    pub bytes: u64,
    /// Floating-point operations per second, where known.
    pub flops_per_s: Option<f64>,
    /// Bytes per second, where known.
    pub bytes_per_s: Option<f64>,
    /// How near it came to the hardware's limit; absent when peaks or amounts are not known.
    pub roofline: Option<Roofline>,
}

/// How near an op came to the hardware's limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Roofline {
    /// The least time its calls could take over the time they took: per call the larger of flops over peak
    /// FLOP/s and bytes over peak bandwidth. Above 1 when data came from cache, or amounts are overstated.
    pub share: f64,
    /// What sets most of that least time.
    pub bound: Bound,
}

/// All ops of the trace by total time, longest first: one row per name, category and implementation. Ops that an engine
/// named go by that name, others by their kernel's.
pub fn top_ops(context: &Context) -> Vec<OpSummary> {
    summarize(context, None)
}

/// The same for the iterations of one kind only.
pub fn top_ops_by_kind(context: &Context, kind: IterationKind) -> Vec<OpSummary> {
    summarize(context, Some(kind))
}

fn summarize(context: &Context, only: Option<IterationKind>) -> Vec<OpSummary> {
    let trace = context.trace;
    let iterations = context.iterations.list.iter().filter(|i| only.is_none() || i.kind == only);
    let wall: f64 = iterations.map(|i| i.host.length() as f64).sum();
    let peaks = trace.meta.peaks.as_ref().filter(|p| usable(p));

    let mut groups: HashMap<(StrId, u16, StrId), Group> = HashMap::new();
    for index in 0..trace.ops.len() {
        let kind = context.kind_of_op(index);
        if only.is_some() && kind != only {
            continue;
        }
        let kernel = trace.ops.name[index];
        let work = trace.work_of(index);
        let key = (work.map_or(kernel, |work| work.op), context.categories.of_op[index], kernel);
        let in_iteration = context.iterations.of_op.get(index).is_some_and(|&i| i != strobe_trace::NONE);
        let ceilings = peaks.map(|peaks| (flops_per_s(peaks, trace.text(kernel)), peaks.bytes_per_s));
        groups.entry(key).or_default().add(context.own_ns(index), work, in_iteration, ceilings);
    }
    let all: f64 = groups.values().map(|g| g.total_ns as f64).sum();
    let mut rows: Vec<OpSummary> = groups
        .into_iter()
        .map(|((name, category, kernel), group)| OpSummary {
            name: trace.text(name).to_owned(),
            category: context.categories.list.get(usize::from(category)).map_or_else(String::new, |c| c.name.clone()),
            kernel: trace.text(kernel).to_owned(),
            share_of_op_time: (all > 0.0).then(|| group.total_ns as f64 / all),
            share_of_wall: (wall > 0.0).then(|| group.in_iterations_ns as f64 / wall),
            ..group.summary()
        })
        .collect();
    rows.sort_by(|a, b| {
        let longest_first = b.total_ns.cmp(&a.total_ns);
        longest_first.then_with(|| (&a.name, &a.kernel).cmp(&(&b.name, &b.kernel)))
    });
    rows
}

/// Operations per second that a kernel can reach at most.
fn flops_per_s(peaks: &Peaks, kernel: &str) -> f64 {
    let apart = match data_type_of_kernel(kernel) {
        Some(DataType::Int8) => peaks.int8_ops_per_s,
        Some(DataType::Bf16) => peaks.bf16_flops_per_s,
        _ => None,
    };
    apart.filter(|ops| ops.is_finite() && *ops > 0.0).unwrap_or(peaks.flops_per_s)
}

fn usable(peaks: &Peaks) -> bool {
    [peaks.flops_per_s, peaks.bytes_per_s].iter().all(|p| p.is_finite() && *p > 0.0)
}

#[derive(Default)]
struct Group {
    durations: Vec<f64>,
    total_ns: i64,
    in_iterations_ns: i64,
    flops: u64,
    bytes: u64,
    /// Least possible seconds of the calls that arithmetic limits, and of those that memory limits.
    compute_s: f64,
    memory_s: f64,
}

impl Group {
    fn add(&mut self, ns: i64, work: Option<&Work>, in_iteration: bool, ceilings: Option<(f64, f64)>) {
        self.durations.push(ns as f64);
        self.total_ns = self.total_ns.saturating_add(ns);
        if in_iteration {
            self.in_iterations_ns = self.in_iterations_ns.saturating_add(ns);
        }
        let Some(work) = work else { return };
        self.flops = self.flops.saturating_add(work.flops);
        self.bytes = self.bytes.saturating_add(work.bytes);
        if let Some((flops_per_s, bytes_per_s)) = ceilings {
            let compute = work.flops as f64 / flops_per_s;
            let memory = work.bytes as f64 / bytes_per_s;
            if compute > memory {
                self.compute_s += compute;
            } else {
                self.memory_s += memory;
            }
        }
    }

    /// Everything but the names and shares.
    fn summary(self) -> OpSummary {
        let seconds = self.total_ns as f64 * 1e-9;
        let rate = |amount: u64| (amount > 0 && seconds > 0.0).then(|| amount as f64 / seconds);
        let least = self.compute_s + self.memory_s;
        let roofline = (least > 0.0 && seconds > 0.0).then(|| Roofline {
            share: least / seconds,
            bound: if self.compute_s > self.memory_s { Bound::Compute } else { Bound::Memory },
        });
        OpSummary {
            name: String::new(),
            category: String::new(),
            kernel: String::new(),
            calls: self.durations.len() as u64,
            total_ns: self.total_ns,
            median_ns: Summary::of(self.durations).map_or(0.0, |s| s.median),
            share_of_op_time: None,
            share_of_wall: None,
            flops: self.flops,
            bytes: self.bytes,
            flops_per_s: rate(self.flops),
            bytes_per_s: rate(self.bytes),
            roofline,
        }
    }
}
