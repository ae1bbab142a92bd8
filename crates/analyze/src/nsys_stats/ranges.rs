//! Sums of host ranges (NVTX, annotations): their own time, their time on devices, the kernels in them.

use std::collections::HashMap;

use strobe_trace::{NONE, OpKind, RangeSource, StrId, Trace, range_flags};

use super::projection::{Launches, Projected, takes_part};
use super::spread::{Spread, summarize};
use super::sums::{STYLE, WithHiddenGraphs, is_kernel, not_recorded, slot, slots, time_report};
use crate::sheet::{Column, Report, Role, SPREAD, Sheet, Unit, Value};

/// Host time of ranges by name (`nvtx_sum`).
pub(super) fn host_time(trace: &Trace) -> Report {
    let (name, title) = ("nvtx-sum", "Ranges of the program by name: time on the host");
    let names = RangeNames::of(trace);
    let ranges = &trace.ranges;
    let row = |i: usize| {
        let listed = names.of_range[i] != LEFT_OUT && ranges.flags[i] & range_flags::MARK == 0;
        listed.then(|| (names.of_range[i] as usize, ranges.duration(i)))
    };
    // strobe's files hold the ops of a CPU engine as ranges too, where nsys finds them.
    let ranges_and_ops = |i: usize| match i.checked_sub(ranges.len()) {
        None => row(i),
        Some(op) => {
            let work = trace.work_of(op).filter(|_| trace.ops.kind[op] == OpKind::CpuOp)?;
            Some((names.keys.len() + slot(trace, work.op), trace.ops.duration(op)))
        }
    };
    let key = |key: usize| match key.checked_sub(names.keys.len()) {
        None => (names.label(trace, key), names.style(key)),
        Some(slot) => (format!(":{}", trace.text(StrId(slot as u32))), "PushPop"),
    };
    let slots = names.keys.len() + slots(trace);
    let sums = summarize(ranges.len() + trace.ops.len(), slots, ranges_and_ops, key);
    if sums.is_empty() {
        return Report::absent(name, title, no_ranges(trace));
    }
    let unclosed =
        (0..ranges.len()).filter(|&i| row(i).is_some() && ranges.flags[i] & range_flags::UNCLOSED != 0).count();
    let rows = sums.into_iter().map(|((label, style), s)| (vec![style.into(), label.into()], s));
    let report = time_report(name, title, &["Instances", STYLE, "Range"], rows);
    match unclosed {
        0 => report,
        1 => report.note("1 range was never closed: it is counted up to the last moment of any range."),
        n => report.note(format!("{n} ranges were never closed: they are counted up to the last moment of any range.")),
    }
}

/// Ranges projected onto devices (`nvtx_gpu_proj_sum`).
pub(super) fn projected(trace: &Trace) -> Report {
    let (name, title) = ("nvtx-gpu-proj-sum", "Ranges of the program by name: time on the device");
    let launches = Launches::of(trace);
    let projected = launches.project(trace);
    if projected.is_empty() {
        return Report::absent(name, title, why_no_projection(trace, &launches));
    }
    let names = RangeNames::of(trace);
    let key_of = |p: &Projected| names.of_range[p.range as usize] as usize;
    let row = |i: usize| Some((key_of(&projected[i]), projected[i].end.saturating_sub(projected[i].start)));
    let spreads =
        summarize(projected.len(), names.keys.len(), row, |key| (names.label(trace, key), names.style(key), key));

    #[derive(Clone, Default)]
    struct Sums {
        host: i64,
        launches: i64,
        levels: i64,
        children: i64,
    }
    let mut sums = vec![Sums::default(); names.keys.len()];
    for p in &projected {
        let sum = &mut sums[key_of(p)];
        sum.host = sum.host.saturating_add(trace.ranges.duration(p.range as usize));
        sum.launches += i64::from(p.launches);
        sum.levels += i64::from(p.level);
        sum.children += i64::from(p.children);
    }

    let style = Column::new(STYLE, Unit::Text).role(Role::Style);
    let mut columns = vec![Column::new("Range", Unit::Text), style];
    columns.extend(["Total Proj Time", "Total Range Time"].map(Column::in_ns));
    columns.push(Column::new("Range Instances", Unit::Count));
    columns.extend(SPREAD.map(|(name, role)| Column::in_ns(&format!("Proj {name}")).role(role)));
    columns.push(Column::new("Total GPU Ops", Unit::Count));
    columns.extend(["Avg GPU Ops", "Avg Range Lvl", "Avg Num Child"].map(|name| Column::new(name, Unit::Number)));
    let mut sheet = Sheet::new(name, columns);
    for ((label, style, key), spread) in spreads {
        let sum = &sums[key];
        let mean = |total: i64| Value::from(total as f64 / spread.count as f64);
        let head = [label.into(), style.into(), spread.total.into(), sum.host.into(), spread.count.into()];
        let tail = [sum.launches.into(), mean(sum.launches), mean(sum.levels), mean(sum.children)];
        sheet.push(head.into_iter().chain(spread.cells()).chain(tail));
    }
    let report = Report::new(name, title).sheet(sheet).note(
        "A range holds the ops whose launching call lies inside it; projected, it lasts from the first start to the last \
         end of these ops. Enclosed ranges count again in those around them. GPU Ops counts launches: a graph counts once.",
    );
    with_unlaunched(report, trace, &launches).with_hidden_graphs(trace)
}

/// Kernels by the ranges that launched them (`nvtx_kern_sum`).
pub(super) fn kernels(trace: &Trace) -> Report {
    let (name, title) = ("nvtx-kern-sum", "Kernels by the range of the program that launched them");
    let launches = Launches::of(trace);
    let projected = launches.project(trace);
    let names = RangeNames::of(trace);

    // Ranges of one name and thread stand together; each such group is summed on its own, so that the durations of
    // only one group are held at a time.
    let mut order: Vec<u32> = (0..projected.len() as u32).collect();
    let group_of = |i: u32| {
        let range = projected[i as usize].range as usize;
        (names.of_range[range], trace.ranges.thread[range])
    };
    order.sort_by_key(|&i| group_of(i));
    let mut rows: Vec<KernelRow> = Vec::new();
    let mut scratch = Scratch::new(slots(trace));
    let groups = order.chunk_by(|&a, &b| group_of(a) == group_of(b));
    let held = |group: &[u32]| group.iter().map(|&i| projected[i as usize].held()).sum::<usize>();
    let most = most_held(groups.clone().map(held).collect(), trace.ops.len() + trace.ranges.len());
    let mut left_out = 0usize;
    for group in groups {
        if held(group) > most {
            left_out += 1;
            continue;
        }
        let (key, thread) = group_of(group[0]);
        let owner = trace.threads.get(thread as usize);
        let process = owner.and_then(|t| trace.processes.get(t.process as usize));
        let head = (names.label(trace, key as usize), names.style(key as usize));
        for (kernel, instances, spread) in scratch.sum(trace, &launches, &projected, group) {
            rows.push(KernelRow {
                range: head.0.clone(),
                style: head.1,
                pid: process.map(|p| p.pid),
                tid: owner.map(|t| t.tid),
                instances,
                spread,
                kernel: trace.text(StrId(kernel as u32)).to_owned(),
            });
        }
    }
    if rows.is_empty() && left_out == 0 {
        return Report::absent(name, title, why_no_projection(trace, &launches));
    }
    let mut outside = vec![true; trace.ops.len()];
    // What an enclosed range holds, the one around it holds too.
    let held = projected.iter().filter(|p| p.level == 0).flat_map(|p| launches.ops_of(trace, p));
    held.for_each(|op| outside[op] = false);
    rows.extend(kernels_outside(trace, &outside));
    rows.sort_by(|a, b| {
        let place = |r: &KernelRow| (r.style, r.pid, r.tid, std::cmp::Reverse(r.spread.total));
        a.range.cmp(&b.range).then_with(|| place(a).cmp(&place(b))).then_with(|| a.kernel.cmp(&b.kernel))
    });

    let style = Column::new(STYLE, Unit::Text).role(Role::Style);
    let mut columns = vec![Column::new("NVTX Range", Unit::Text), style];
    columns.extend(["PID", "TID"].map(|name| Column::new(name, Unit::Number)));
    columns.extend(["NVTX Inst", "Kern Inst"].map(|name| Column::new(name, Unit::Count)));
    columns.push(Column::in_ns("Total Time"));
    columns.extend(SPREAD.map(|(name, role)| Column::in_ns(name).role(role)));
    columns.push(Column::new("Kernel Name", Unit::Text));
    let mut sheet = Sheet::new(name, columns);
    for row in rows {
        let spread = row.spread;
        let head = [row.range.into(), row.style.into(), row.pid.into(), row.tid.into()];
        let counts = [row.instances.into(), spread.count.into(), spread.total.into()];
        sheet.push(head.into_iter().chain(counts).chain(spread.cells()).chain([row.kernel.into()]));
    }
    let mut report =
        Report::new(name, title).sheet(sheet).note("A kernel counts for every range around its launching call.");
    if left_out > 0 {
        report = report.note(format!(
            "Ranges nest so deep that {left_out} names are not listed: those that hold most kernels. nvtx-gpu-proj-sum \
             has the times of all."
        ));
    }
    with_unlaunched(report, trace, &launches).with_hidden_graphs(trace)
}

/// Launches that a group of ranges may hold together, a launch counted in each range around it, so that all groups with
/// no more are summed in time that grows with the trace: in deep nests the sum grows with its square.
fn most_held(mut held: Vec<usize>, events: usize) -> usize {
    const ALWAYS: usize = 1 << 24;
    const PER_EVENT: usize = 16;
    let most = ALWAYS + PER_EVENT * events;
    held.sort_unstable();
    let mut all = 0;
    let within = held.into_iter().take_while(|&held| {
        all += held;
        all <= most
    });
    within.last().unwrap_or(0)
}

/// Kernels that no range holds, by the thread that launched them where that is known: rows without a range.
fn kernels_outside(trace: &Trace, outside: &[bool]) -> Vec<KernelRow> {
    let mut durations: HashMap<(u32, StrId), Vec<i64>> = HashMap::new();
    for op in (0..trace.ops.len()).filter(|&op| outside[op] && is_kernel(trace.ops.kind[op])) {
        let thread = trace.calls.thread.get(trace.ops.launch[op] as usize).copied().unwrap_or(NONE);
        durations.entry((thread, trace.ops.name[op])).or_default().push(trace.ops.duration(op));
    }
    let rows = durations.into_iter().filter_map(|((thread, kernel), mut times)| {
        let owner = trace.threads.get(thread as usize);
        Some(KernelRow {
            range: String::new(),
            style: "",
            pid: owner.and_then(|t| trace.processes.get(t.process as usize)).map(|p| p.pid),
            tid: owner.map(|t| t.tid),
            instances: 0,
            spread: Spread::of(&mut times)?,
            kernel: trace.text(kernel).to_owned(),
        })
    });
    rows.collect()
}

struct KernelRow {
    range: String,
    style: &'static str,
    pid: Option<i64>,
    tid: Option<i64>,
    instances: usize,
    spread: Spread,
    kernel: String,
}

/// Room to sum the kernels of one group of ranges, by kernel name.
struct Scratch {
    counts: Vec<u32>,
    instances: Vec<u32>,
    last_instance: Vec<u32>,
    seen: Vec<u32>,
    durations: Vec<i64>,
}

impl Scratch {
    fn new(slots: usize) -> Self {
        let none = vec![0; slots];
        Self {
            counts: none.clone(),
            instances: none.clone(),
            last_instance: none,
            seen: Vec::new(),
            durations: Vec::new(),
        }
    }

    /// Per kernel name: its slot, how many of the ranges hold it, and its times.
    fn sum(
        &mut self,
        trace: &Trace,
        launches: &Launches,
        projected: &[Projected],
        group: &[u32],
    ) -> Vec<(usize, usize, Spread)> {
        let kernels = |&i: &u32| {
            let ops = launches.ops_of(trace, &projected[i as usize]).filter(|&op| is_kernel(trace.ops.kind[op]));
            ops.map(|op| (slot(trace, trace.ops.name[op]), op))
        };
        for (instance, range) in group.iter().enumerate() {
            for (name, _) in kernels(range) {
                if self.counts[name] == 0 {
                    self.seen.push(name as u32);
                }
                self.counts[name] += 1;
                // Counted from 1: 0 is the state of a name not seen in this group.
                let instance = instance as u32 + 1;
                if self.last_instance[name] != instance {
                    self.last_instance[name] = instance;
                    self.instances[name] += 1;
                }
            }
        }
        // `last_instance` is not needed any more: it takes the place of the next duration of each name.
        let mut total = 0;
        for &name in &self.seen {
            self.last_instance[name as usize] = total;
            total += self.counts[name as usize];
        }
        self.durations.resize(self.durations.len().max(total as usize), 0);
        for (name, op) in group.iter().flat_map(kernels) {
            self.durations[self.last_instance[name] as usize] = trace.ops.duration(op);
            self.last_instance[name] += 1;
        }
        let mut sums = Vec::with_capacity(self.seen.len());
        for name in self.seen.drain(..).map(|name| name as usize) {
            let end = self.last_instance[name] as usize;
            let mine = &mut self.durations[end - self.counts[name] as usize..end];
            sums.extend(Spread::of(mine).map(|spread| (name, self.instances[name] as usize, spread)));
            (self.counts[name], self.instances[name], self.last_instance[name]) = (0, 0, 0);
        }
        sums
    }
}

fn no_ranges(trace: &Trace) -> String {
    let how = "`nsys profile -t nvtx` and NVTX ranges in the program, or record_function in the PyTorch profiler";
    not_recorded(trace, "ranges of the program", how)
}

fn why_no_projection(trace: &Trace, launches: &Launches) -> String {
    if !(0..trace.ranges.len()).any(|range| takes_part(trace, range)) {
        return no_ranges(trace);
    }
    if launches.without_call > 0 {
        return format!(
            "no range holds the launch of a kernel; {} ops on devices have no launching call in the trace",
            launches.without_call
        );
    }
    match trace.meta.is_own() {
        true => "no range holds the launch of a kernel: a CPU runs its ops in the host's thread".to_owned(),
        false => "no range holds the launch of a kernel: record both with `nsys profile -t cuda,nvtx`".to_owned(),
    }
}

fn with_unlaunched(report: Report, trace: &Trace, launches: &Launches) -> Report {
    match launches.without_call {
        0 => report,
        n => report.note(format!(
            "{n} of {} ops on devices have no launching call in the trace and count for no range.",
            trace.ops.len()
        )),
    }
}

/// The value of [`RangeNames::of_range`] for ranges that are no ranges of the program: operators, Python functions.
const LEFT_OUT: u32 = u32::MAX;

/// The distinct names of ranges.
struct RangeNames {
    keys: Vec<(StrId, StrId, RangeSource)>,
    /// Per range its index in `keys`, or [`LEFT_OUT`].
    of_range: Vec<u32>,
}

impl RangeNames {
    fn of(trace: &Trace) -> Self {
        let ranges = &trace.ranges;
        let mut keys: Vec<(StrId, StrId, RangeSource)> = Vec::new();
        let mut numbers: HashMap<(StrId, StrId, RangeSource), u32> = HashMap::new();
        // Nearly every name has one domain and source: the last number of a name is right without hashing.
        let mut last = vec![LEFT_OUT; slots(trace)];
        let number = |i: usize| {
            let key = (ranges.name[i], ranges.domain[i], ranges.source[i]);
            if matches!(key.2, RangeSource::GpuAnnotation | RangeSource::CpuOp | RangeSource::Python) {
                return LEFT_OUT;
            }
            let last = &mut last[slot(trace, key.0)];
            if keys.get(*last as usize) != Some(&key) {
                *last = *numbers.entry(key).or_insert_with(|| {
                    keys.push(key);
                    keys.len() as u32 - 1
                });
            }
            *last
        };
        let of_range = (0..ranges.len()).map(number).collect();
        Self { keys, of_range }
    }

    /// What nsys calls it: NVTX ranges bear their domain, the default one is empty.
    fn label(&self, trace: &Trace, key: usize) -> String {
        let (name, domain, source) = self.keys[key];
        match source {
            RangeSource::PushPop | RangeSource::StartEnd => format!("{}:{}", trace.text(domain), trace.text(name)),
            _ => trace.text(name).to_owned(),
        }
    }

    fn style(&self, key: usize) -> &'static str {
        match self.keys[key].2 {
            RangeSource::PushPop => "PushPop",
            RangeSource::StartEnd => "StartEnd",
            RangeSource::Annotation => "Annotation",
            _ => "Other",
        }
    }
}
