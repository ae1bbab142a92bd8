//! What several rules look at, computed once.

use std::collections::HashMap;

use strobe_trace::{NONE, OpKind, Trace};

use crate::Context;
use crate::attribution::Attribution;
use crate::budget::{IterationBudget, Part, budgets};
use crate::critical_path::{Path, process_paths};
use crate::intervals::{Span, SpanSet};
use crate::launch::Launch;
use crate::overlap::{DeviceOverlap, seen_overlaps};
use crate::roofline::Roofline;
use crate::sheet::{Column, Sheet, Unit};

pub(super) struct Facts<'c, 't> {
    pub context: &'c Context<'t>,
    pub trace: &'t Trace,
    /// Where the wall time of every iteration went.
    pub budgets: Vec<IterationBudget>,
    /// The critical path of every process that uses a GPU.
    pub paths: Vec<Path>,
    /// Per process when any of its ops ran, or nobody looked.
    busy: HashMap<u32, SpanSet>,
    /// Per process when its kernels and graphs began, in order.
    kernel_starts: HashMap<u32, Vec<i64>>,
    /// How every GPU spent its time.
    pub devices: Vec<DeviceOverlap>,
    pub launches: &'c [Launch],
    pub roofline: &'c Roofline,
    pub attribution: &'c Attribution,
    /// Per category of the context: time (durations, summed) and ops, on GPUs or CPUs.
    pub categories: Vec<(i64, usize)>,
    /// Whether PyTorch ran in it.
    pub uses_torch: bool,
    /// Whether it calls HIP, not CUDA.
    pub calls_hip: bool,
}

impl<'c, 't> Facts<'c, 't> {
    pub(super) fn of(context: &'c Context<'t>) -> Self {
        let trace = context.trace;
        let is_gpu = |device: u32| trace.devices.get(device as usize).is_none_or(|d| !d.is_cpu);
        let mut spans: HashMap<u32, Vec<Span>> = HashMap::new();
        let mut kernel_starts: HashMap<u32, Vec<i64>> = HashMap::new();
        for op in (0..trace.ops.len()).filter(|&op| is_gpu(trace.ops.device[op])) {
            let span = Span::new(trace.ops.start[op], trace.ops.end[op]);
            spans.entry(trace.ops.process[op]).or_default().push(span);
            if !trace.ops.kind[op].is_memory() {
                kernel_starts.entry(trace.ops.process[op]).or_default().push(span.start);
            }
        }
        // Between two recorded windows the devices worked unseen: they did not idle.
        let unseen = context.unseen().spans();
        let union = |spans: Vec<Span>| SpanSet::union_of(spans.into_iter().chain(unseen.iter().copied()));
        let busy: HashMap<u32, SpanSet> = spans.into_iter().map(|(p, spans)| (p, union(spans))).collect();
        let mut categories = vec![(0i64, 0); context.categories.list.len()];
        for (op, &category) in context.categories.of_op.iter().enumerate() {
            let (ns, ops) = &mut categories[category as usize];
            (*ns, *ops) = (ns.saturating_add(context.own_ns(op)), *ops + 1);
        }
        Self {
            context,
            trace,
            budgets: budgets(context),
            paths: process_paths(context).into_iter().filter(|path| busy.contains_key(&path.process)).collect(),
            busy,
            kernel_starts,
            devices: seen_overlaps(context, |op| {
                is_gpu(trace.ops.device[op]).then(|| context.categories.of_op(op).class)
            }),
            launches: context.launches(),
            roofline: context.roofline(),
            attribution: context.attribution(),
            categories,
            uses_torch: trace.strings.iter().any(|(_, text)| is_torchs(text)),
            calls_hip: trace.strings.iter().any(|(_, text)| is_hips(text)),
        }
    }

    /// How much of a span passes without any op of a process on a GPU, as far as it was recorded.
    pub(super) fn idle_ns(&self, process: u32, span: Span) -> i64 {
        span.length().saturating_sub(self.busy.get(&process).map_or(0, |busy| busy.covered(span)))
    }

    /// What of a span was recorded.
    pub(super) fn seen_ns(&self, span: Span) -> i64 {
        span.length().saturating_sub(self.context.unseen().covered(span))
    }

    /// Whether the ops are those of an engine on the CPU.
    pub(super) fn on_cpu(&self) -> bool {
        self.devices.is_empty()
    }

    /// How long threads waited for a CPU in the recorded iterations, and how long those took.
    pub(super) fn waited_ns(&self) -> (i64, i64) {
        let parts = self.budgets.iter().flat_map(|budget| &budget.parts);
        let waited = parts.filter(|(part, _)| *part == Part::CpuWait).map(|(_, ns)| *ns);
        let whole = self.budgets.iter().map(|budget| budget.wall_ns);
        (waited.fold(0, i64::saturating_add), whole.fold(0, i64::saturating_add))
    }

    /// When the next kernel of a process begins after a moment. Copies on the way do not count: they are what the next
    /// step is fed with.
    pub(super) fn next_kernel(&self, process: u32, moment: i64) -> Option<i64> {
        let starts = self.kernel_starts.get(&process)?;
        starts.get(starts.partition_point(|&start| start < moment)).copied()
    }

    /// The length of all critical paths together.
    pub(super) fn path_ns(&self) -> i64 {
        self.paths.iter().map(|p| self.seen_ns(p.span)).fold(0, i64::saturating_add)
    }

    /// What [`Facts::path_ns`] is, for a sentence.
    pub(super) fn path_words(&self) -> String {
        let processes = self.paths.len();
        let of = if processes > 1 { format!(", {processes} processes together") } else { String::new() };
        format!("from the first launch to the last end{of}")
    }

    /// From first op to last end, of all GPUs together.
    pub(super) fn span_ns(&self) -> i64 {
        self.devices.iter().map(|d| d.span).fold(0, i64::saturating_add)
    }

    /// What [`Facts::span_ns`] is, for a sentence.
    pub(super) fn span_words(&self) -> String {
        match self.devices.len() {
            0 | 1 => "span of the GPU".to_owned(),
            n => format!("span of {n} GPUs together"),
        }
    }

    /// The time of ops (durations, summed), copies and communication included.
    pub(super) fn op_ns(&self) -> i64 {
        self.categories.iter().map(|c| c.0).fold(0, i64::saturating_add)
    }

    /// Time and ops of the categories with these names.
    pub(super) fn category(&self, names: &[&str]) -> (i64, usize) {
        let list = self.context.categories.list.iter().zip(&self.categories);
        let chosen = list.filter(|(category, _)| names.contains(&category.name.as_str()));
        chosen.fold((0, 0), |(ns, ops), (_, c)| (ns.saturating_add(c.0), ops + c.1))
    }

    /// Whether an op was launched as a part of a CUDA graph, or is one.
    pub(super) fn in_graph(&self, op: usize) -> bool {
        let launch = self.trace.ops.launch[op];
        self.trace.ops.kind[op] == OpKind::Graph
            || self.trace.ops.graph_node[op] != 0
            || (launch != NONE && self.trace.text(self.trace.calls.name[launch as usize]).contains("GraphLaunch"))
    }
}

/// Whether it is a function of HIP, e.g. `hipLaunchKernel`.
fn is_hips(text: &str) -> bool {
    text.strip_prefix("hip").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
}

/// Whether only PyTorch gives such names to kernels, operators and ranges.
fn is_torchs(text: &str) -> bool {
    ["aten::", "ProfilerStep#", "nn.Module: ", "autograd::"].iter().any(|start| text.starts_with(start))
        || ["at::native::", "torch/", "torch::"].iter().any(|part| text.contains(part))
}

/// A table of evidence.
pub(super) fn evidence(rule: &super::Rule, columns: &[(&str, Unit)]) -> Sheet {
    let columns = columns.iter().map(|&(name, unit)| Column::new(name, unit));
    Sheet::new(rule.id.clone(), columns).title(rule.title.clone())
}
