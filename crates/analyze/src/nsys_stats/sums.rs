//! Sums of what ran on devices and of calls, by name.

use strobe_trace::{CallKind, OpKind, StrId, Trace};

use super::spread::{Spread, summarize};
use crate::intervals::{Span, SpanSet};
use crate::sheet::{Column, Report, Role, SPREAD, Sheet, Unit, Value};

/// Kernels by name (`cuda_gpu_kern_sum`); for an engine on the CPU its ops by implementation.
pub(super) fn kernels(trace: &Trace) -> Report {
    let (name, title) = ("kern-sum", "Kernels by name");
    let mut sums = sum_ops(trace, is_kernel);
    if sums.is_empty() {
        return Report::absent(name, title, no_device_work(trace, "kernels"));
    }
    // In this summary alone, fewer instances come first where totals are equal; names decide after that.
    sums.sort_by_key(|(_, spread)| (std::cmp::Reverse(spread.total), spread.count));
    time_report(name, title, &["Instances", "Name"], sums.into_iter().map(|(key, s)| (vec![key.into()], s)))
        .with_hidden_graphs(trace)
}

/// Copies and fills by kind, their time (`cuda_gpu_mem_time_sum`).
pub(super) fn memory_time(trace: &Trace) -> Report {
    let (name, title) = ("mem-time-sum", "Copies and fills of memory, by time");
    let sums = sum_ops(trace, OpKind::is_memory);
    if sums.is_empty() {
        return Report::absent(name, title, no_device_work(trace, "copies or fills of memory"));
    }
    time_report(name, title, &["Count", "Operation"], sums.into_iter().map(|(key, s)| (vec![key.into()], s)))
}

/// Copies and fills by kind, their size (`cuda_gpu_mem_size_sum`).
pub(super) fn memory_size(trace: &Trace) -> Report {
    let (name, title) = ("mem-size-sum", "Copies and fills of memory, by size");
    let ops = &trace.ops;
    let row = |i: usize| {
        let bytes = i64::try_from(ops.bytes[i]).unwrap_or(i64::MAX);
        ops.kind[i].is_memory().then(|| (slot(trace, ops.name[i]), bytes))
    };
    let sums = summarize(ops.len(), slots(trace), row, |slot| trace.text(StrId(slot as u32)).to_owned());
    if sums.is_empty() {
        return Report::absent(name, title, no_device_work(trace, "copies or fills of memory"));
    }
    let mut columns = vec![Column::in_megabytes("Total"), Column::new("Count", Unit::Count)];
    columns.extend(SPREAD.map(|(name, role)| Column::in_megabytes(name).role(role)));
    columns.push(Column::new("Operation", Unit::Text));
    let mut sheet = Sheet::new(name, columns);
    for (operation, spread) in sums {
        let head = [spread.total.into(), spread.count.into()];
        sheet.push(head.into_iter().chain(spread.cells()).chain([operation.into()]));
    }
    Report::new(name, title).sheet(sheet)
}

/// Kernels, copies and fills in one table (`cuda_gpu_sum`).
pub(super) fn device(trace: &Trace) -> Report {
    let (name, title) = ("gpu-sum", "Kernels, copies and fills by name");
    let ops = &trace.ops;
    let category = |kind: OpKind| match kind {
        OpKind::Kernel => Some(0),
        OpKind::Memcpy | OpKind::Memset => Some(1),
        OpKind::CpuOp => Some(2),
        OpKind::Graph => None,
    };
    let row = |i: usize| Some((slot(trace, ops.name[i]) * 3 + category(ops.kind[i])?, ops.duration(i)));
    // Sorted by name before category where totals are equal.
    let key = |slot: usize| {
        let category = ["CUDA_KERNEL", "MEMORY_OPER", "CPU_OP"][slot % 3];
        (trace.text(StrId((slot / 3) as u32)).to_owned(), category)
    };
    let sums = summarize(ops.len(), slots(trace) * 3, row, key);
    if sums.is_empty() {
        return Report::absent(name, title, no_device_work(trace, "kernels, copies or fills"));
    }
    let rows = sums.into_iter().map(|((op, category), s)| (vec![category.into(), op.into()], s));
    time_report(name, title, &["Instances", "Category", "Operation"], rows).with_hidden_graphs(trace)
}

/// Calls of the CUDA or HIP interface by name (`cuda_api_sum`).
pub(super) fn calls(trace: &Trace) -> Report {
    let (name, title) = ("api-sum", "Calls of the CUDA or HIP interface by name");
    let sums = sum_calls(trace, CallKind::Gpu);
    if sums.is_empty() {
        let how = "`nsys profile -t cuda` or ProfilerActivity.CPU and ProfilerActivity.CUDA in the PyTorch profiler";
        let why = not_recorded(trace, "calls of the CUDA or HIP interface", how);
        return Report::absent(name, title, why);
    }
    time_report(name, title, &["Num Calls", "Name"], sums.into_iter().map(|(key, s)| (vec![key.into()], s)))
}

/// Calls of the operating system by name (`osrt_sum`).
pub(super) fn os_runtime(trace: &Trace) -> Report {
    let (name, title) = ("osrt-sum", "Calls of the operating system by name");
    let sums = sum_calls(trace, CallKind::OsRuntime);
    if sums.is_empty() {
        let why = not_recorded(trace, "calls of the operating system", "`nsys profile -t osrt`");
        return Report::absent(name, title, why);
    }
    time_report(name, title, &["Num Calls", "Name"], sums.into_iter().map(|(key, s)| (vec![key.into()], s)))
}

pub(super) fn is_kernel(kind: OpKind) -> bool {
    matches!(kind, OpKind::Kernel | OpKind::CpuOp)
}

fn sum_ops(trace: &Trace, keep: impl Fn(OpKind) -> bool) -> Vec<(String, Spread)> {
    let ops = &trace.ops;
    let row = |i: usize| keep(ops.kind[i]).then(|| (slot(trace, ops.name[i]), ops.duration(i)));
    summarize(ops.len(), slots(trace), row, |slot| trace.text(StrId(slot as u32)).to_owned())
}

fn sum_calls(trace: &Trace, kind: CallKind) -> Vec<(String, Spread)> {
    let calls = &trace.calls;
    let row = |i: usize| (calls.kind[i] == kind).then(|| (slot(trace, calls.name[i]), calls.duration(i)));
    let key = |slot: usize| without_version(trace.text(StrId(slot as u32))).to_owned();
    summarize(calls.len(), slots(trace), row, key)
}

/// The slot of a name: its number, and one more for names that are missing.
pub(super) fn slot(trace: &Trace, name: StrId) -> usize {
    (name.0 as usize).min(trace.strings.len())
}

/// How many slots names have.
pub(super) fn slots(trace: &Trace) -> usize {
    trace.strings.len() + 1
}

/// The name of a call without its version, which nsys drops only when it has four digits:
/// `cudaLaunchKernel_v7000` becomes `cudaLaunchKernel`, `cudaGraphLaunch_v10000` stays.
pub(crate) fn without_version(name: &str) -> &str {
    let Some((head, version)) = name.len().checked_sub(6).and_then(|at| name.split_at_checked(at)) else { return name };
    let digits = version.strip_prefix("_v");
    if digits.is_some_and(|d| d.bytes().all(|b| b.is_ascii_digit())) { head } else { name }
}

/// The column of how a range was made.
pub(super) const STYLE: &str = "Style";

/// A table of times: share of the listed time, total, count, spread, and the words that `last` names.
pub(super) fn time_report(
    name: &'static str,
    title: &str,
    count_and_last: &[&str],
    rows: impl IntoIterator<Item = (Vec<Value>, Spread)>,
) -> Report {
    let (count, last) = count_and_last.split_first().map_or(("Count", &[][..]), |(c, l)| (*c, l));
    let total = Column::in_ns("Total Time");
    let mut columns = vec![Column::in_percent("Time (%)"), total, Column::new(count, Unit::Count)];
    columns.extend(SPREAD.map(|(name, role)| Column::in_ns(name).role(role)));
    columns.extend(last.iter().map(|&name| match name {
        STYLE => Column::new(name, Unit::Text).role(Role::Style),
        _ => Column::new(name, Unit::Text),
    }));
    let mut sheet = Sheet::new(name, columns);
    let rows: Vec<(Vec<Value>, Spread)> = rows.into_iter().collect();
    let listed = rows.iter().map(|(_, s)| i128::from(s.total)).sum::<i128>() as f64;
    for (words, spread) in rows {
        let share = if listed > 0.0 { spread.total as f64 / listed } else { 0.0 };
        let head = [share.into(), spread.total.into(), spread.count.into()];
        sheet.push(head.into_iter().chain(spread.cells()).chain(words));
    }
    Report::new(name, title).sheet(sheet).note("Time (%) is the share of the time listed here, not of the wall time.")
}

/// Why a trace has none of something, and `how` profilers record it. strobe records what it has: in a window.
pub(super) fn not_recorded(trace: &Trace, what: &str, how: &str) -> String {
    match (trace.meta.is_own(), trace.ops.is_empty()) {
        (true, true) => format!("the run has no {what}: record a window with --profile A-B"),
        (true, false) => format!("the run has no {what}"),
        (false, _) => format!("the trace has no {what}: record them with {how}"),
    }
}

fn no_device_work(trace: &Trace, what: &str) -> String {
    let graphs = trace.ops.kind.iter().filter(|&&kind| kind == OpKind::Graph).count();
    if graphs > 0 {
        return format!(
            "the trace has no {what}: all of them are inside {graphs} launches of CUDA graphs, which were recorded as a \
             whole; record them with `nsys profile --cuda-graph-trace=node`"
        );
    }
    not_recorded(trace, what, "`nsys profile -t cuda` or ProfilerActivity.CUDA in the PyTorch profiler")
}

/// Adds what graph rows hide to a report.
pub(super) trait WithHiddenGraphs {
    /// A note that names the share of busy time whose kernels are hidden, when there is one.
    fn with_hidden_graphs(self, trace: &Trace) -> Self;
}

impl WithHiddenGraphs for Report {
    fn with_hidden_graphs(self, trace: &Trace) -> Self {
        let ops = &trace.ops;
        if !ops.kind.contains(&OpKind::Graph) {
            return self;
        }
        let union = |device: usize, keep: &dyn Fn(OpKind) -> bool| {
            let chosen = (0..ops.len()).filter(|&i| ops.device[i] as usize == device && keep(ops.kind[i]));
            SpanSet::union_of(chosen.map(|i| Span::new(ops.start[i], ops.end[i]))).length()
        };
        let devices = 0..ops.device.iter().max().map_or(0, |&last| last as usize + 1);
        let (mut graph, mut busy) = (0, 0);
        for device in devices {
            graph += union(device, &|kind| kind == OpKind::Graph);
            busy += union(device, &|_| true);
        }
        let launches = ops.kind.iter().filter(|&&kind| kind == OpKind::Graph).count();
        let share = if busy > 0 { 100.0 * graph as f64 / busy as f64 } else { 0.0 };
        self.note(format!(
            "{launches} launches of CUDA graphs were recorded as a whole: their kernels are hidden and not listed here. \
             They take {share:.1} % of the device's busy time. Record with `nsys profile --cuda-graph-trace=node` to see them."
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_versions_of_four_digits_go() {
        for (name, short) in [
            ("cudaLaunchKernel_v7000", "cudaLaunchKernel"),
            ("cudaGraphLaunch_v10000", "cudaGraphLaunch_v10000"),
            ("cuMemAlloc_v2", "cuMemAlloc_v2"),
            ("cudaLaunchKernel_ptsz_v7000", "cudaLaunchKernel_ptsz"),
            ("foo_v12a4", "foo_v12a4"),
            ("_v3020", ""),
            ("é_v3020", "é"),
            ("ab\u{20ac}cd", "ab\u{20ac}cd"),
            ("poll", "poll"),
        ] {
            assert_eq!(without_version(name), short);
        }
    }
}
