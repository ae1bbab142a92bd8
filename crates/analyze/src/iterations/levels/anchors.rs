//! What comes back in a process: kernels and graphs, copies, waits and ranges of the host.

use std::collections::{BTreeMap, HashMap};

use strobe_trace::{CallKind, NONE, OpDetail, OpKind, RangeSource, StrId, Trace, range_flags};

use super::super::autograd;
use super::super::patterns::{DEVICE_TO_HOST, copy_direction};
use super::super::roles::{At, Role, of_kernel, of_range, without_numbers};
use super::work::{Work, calls_by_name};

/// Occurrences above which something is no candidate for a step.
const MOST: usize = 50_000;
/// Share of a process' time that a range without a role must cover to count.
const LEAST_OF_TIME: f64 = 0.01;
/// Share of exceptions that an alternation may have.
const EXCEPTIONS: usize = 50;

/// Something that comes back.
pub(super) struct Anchor {
    pub kind: Kind,
    /// The kernel, operator or range, numbers in it as `N`.
    pub name: String,
    pub role: Option<&'static Role>,
    /// Per occurrence the unit that it is, or the first one launched after it.
    pub places: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Kernel,
    Graph,
    ReadBack,
    Input,
    Sync,
    /// A range that somebody wrote: NVTX, an annotation.
    Range,
    /// An operator or a Python function.
    Operator,
    /// The first of several layers that follow each other.
    Layers,
    /// A forward pass to which a backward pass belongs.
    Pass,
}

impl Anchor {
    /// What it is worth as a place where steps begin or end.
    pub(super) fn weight(&self) -> f64 {
        let role = self.role.map_or(0.0, |role| role.weight);
        role + match self.kind {
            Kind::Graph => 3.0,
            Kind::Range => 2.0,
            Kind::ReadBack | Kind::Sync => 2.0,
            Kind::Input => 1.0,
            Kind::Kernel | Kind::Layers => 1.0,
            Kind::Pass => 2.5,
            Kind::Operator => 0.5,
        }
    }

    pub(super) fn starts_or_ends(&self) -> Option<At> {
        match (self.role, self.kind) {
            (Some(role), _) if role.weight > 0.0 => Some(role.at),
            (_, Kind::ReadBack | Kind::Sync) => Some(At::End),
            // A pass begins behind the inputs and what needs no gradient: it tells steps, not where they begin.
            (_, Kind::Pass) => None,
            (_, Kind::Input) => Some(At::Start),
            _ => None,
        }
    }

    /// Whether it is a reason to take what holds it once for a step.
    pub(super) fn is_reason(&self) -> bool {
        self.role.is_some_and(|role| role.weight >= 2.0)
            || (self.kind == Kind::Layers && self.places.len() > 1)
            || self.kind == Kind::Pass
    }
}

/// Whether two things take turns, each once, with few exceptions. Of one there may be one more.
pub(super) fn alternate(a: &[u32], b: &[u32]) -> bool {
    let (few, many) = if a.len() <= b.len() { (a, b) } else { (b, a) };
    let n = few.len();
    let between = |first: &[u32], second: &[u32]| {
        let fits = |i: usize| first[i] <= second[i] && first.get(i + 1).is_none_or(|&next| second[i] <= next);
        (0..n).filter(|&i| !fits(i)).count() <= n / EXCEPTIONS
    };
    match many.len() - n {
        0 => between(few, many) || between(many, few),
        1 => between(many, few),
        _ => false,
    }
}

/// Whether something comes more than once between most two of another, the end counted as one.
pub(super) fn several_in_each(reference: &[u32], other: &[u32]) -> bool {
    let until = |place: u32| other.partition_point(|&other| other < place);
    let ends = reference.iter().skip(1).map(|&place| until(place)).chain([other.len()]);
    let counts = reference.iter().map(|&place| until(place)).zip(ends).map(|(begin, end)| end - begin);
    2 * counts.filter(|&count| count > 1).count() > reference.len()
}

/// Whether something comes at most once between two of another.
pub(super) fn once_at_most(reference: &[u32], other: &[u32]) -> bool {
    let mut segments: Vec<usize> = other.iter().map(|&place| reference.partition_point(|&r| r <= place)).collect();
    segments.dedup();
    segments.len() + other.len() / EXCEPTIONS >= other.len()
}

/// Kernels by name, those of one name also by the shape of their launch; graphs by what is in them.
pub(super) fn kernel_anchors(trace: &Trace, work: &Work) -> Vec<Anchor> {
    let ops = &trace.ops;
    let mut by_name: HashMap<StrId, Vec<u32>> = HashMap::new();
    let mut by_shape: HashMap<(StrId, u32), Vec<u32>> = HashMap::new();
    for &(op, unit) in &work.kernels {
        let op = op as usize;
        if ops.kind[op] == OpKind::Graph {
            continue;
        }
        by_name.entry(ops.name[op]).or_default().push(unit);
        if ops.detail[op] != NONE {
            by_shape.entry((ops.name[op], ops.detail[op])).or_default().push(unit);
        }
    }
    let mut graphs: HashMap<(u32, u64, u32), Vec<u32>> = HashMap::new();
    for (place, unit) in work.units.iter().enumerate().filter(|(_, unit)| unit.graph) {
        let op = unit.op as usize;
        let exec = match trace.detail_of(op) {
            Some(&OpDetail::Graph { exec, .. }) => exec,
            _ => 0,
        };
        graphs.entry((unit.kernels, unit.what, exec)).or_default().push(place as u32);
    }
    let mut anchors: Vec<Anchor> = Vec::new();
    let whole: HashMap<StrId, usize> = by_name.iter().map(|(&name, places)| (name, places.len())).collect();
    let by_shape = by_shape.into_iter().filter(|((name, _), places)| whole.get(name) != Some(&places.len()));
    let kernels = by_name.into_iter().chain(by_shape.map(|((name, _), places)| (name, places)));
    for (name, places) in kernels.filter(|(_, places)| places.len() <= MOST) {
        let text = trace.text(name);
        anchors.push(Anchor { kind: Kind::Kernel, name: text.to_owned(), role: of_kernel(text), places });
    }
    for ((kernels, _, _), places) in graphs.into_iter().filter(|(_, places)| places.len() <= MOST) {
        anchors.push(Anchor { kind: Kind::Graph, name: format!("graph of {kernels} kernels"), role: None, places });
    }
    // Maps have no order: levels must not depend on it.
    anchors
        .sort_by(|a, b| (a.places.first(), &a.name, a.places.len()).cmp(&(b.places.first(), &b.name, b.places.len())));
    anchors
}

/// What the host does besides launching kernels: copies, waits, ranges.
pub(super) fn marks(trace: &Trace, graph_call: &[bool], work: &[Work]) -> Vec<Vec<Anchor>> {
    let mut marks: Vec<Vec<Anchor>> = work.iter().map(|_| Vec::new()).collect();
    let place = |process: usize, at: i64| work[process].units.partition_point(|unit| unit.at < at) as u32;
    let mut add = |process: usize, kind: Kind, name: String, role, times: Vec<i64>| {
        if !work[process].units.is_empty() && !times.is_empty() && times.len() <= MOST {
            let places = times.into_iter().map(|at| place(process, at)).collect();
            marks[process].push(Anchor { kind, name, role, places });
        }
    };
    let ops = &trace.ops;
    let mut copies: BTreeMap<(usize, u8), Vec<i64>> = BTreeMap::new();
    for op in (0..ops.len()).filter(|&op| ops.kind[op] == OpKind::Memcpy) {
        let (process, call) = (ops.process[op] as usize, ops.launch[op]);
        let in_graph = graph_call.get(call as usize).copied().unwrap_or(false);
        let kind = copy_direction(trace, op).filter(|_| !in_graph && process < work.len());
        let Some(kind) = kind else { continue };
        let at = if work[process].launched && call != NONE { trace.calls.start[call as usize] } else { ops.start[op] };
        copies.entry((process, kind)).or_default().push(at);
    }
    for ((process, kind), mut times) in copies {
        times.sort_unstable();
        let units = &work[process].units;
        // Several copies with no kernel between them are one.
        times.dedup_by_key(|at| units.partition_point(|unit| unit.at < *at));
        let kind = if kind == DEVICE_TO_HOST { Kind::ReadBack } else { Kind::Input };
        add(process, kind, String::new(), None, times);
    }
    let syncs = calls_by_name(trace, |name| name.contains("Synchronize"));
    let mut by_call: BTreeMap<(usize, StrId), Vec<i64>> = BTreeMap::new();
    for call in (0..trace.calls.len()).filter(|&call| syncs[call] && trace.calls.kind[call] == CallKind::Gpu) {
        let Some(thread) = trace.threads.get(trace.calls.thread[call] as usize) else { continue };
        let process = thread.process as usize;
        if process < work.len() && work[process].launched {
            by_call.entry((process, trace.calls.name[call])).or_default().push(trace.calls.end[call]);
        }
    }
    for ((process, name), mut times) in by_call {
        times.sort_unstable();
        let units = &work[process].units;
        times.dedup_by_key(|at| units.partition_point(|unit| unit.at < *at));
        add(process, Kind::Sync, trace.text(name).to_owned(), None, times);
    }
    for (process, passes) in autograd::passes(trace).into_iter().enumerate().take(work.len()) {
        let within = passes.iter().map(|pass| place(process, pass.end) - place(process, pass.start));
        // Where most of the work is of no pass, other things make up the steps.
        if work[process].launched && 2 * within.sum::<u32>() as usize >= work[process].units.len() {
            let name = "autograd's forward and backward pass".to_owned();
            add(process, Kind::Pass, name, None, passes.iter().map(|pass| pass.start).collect());
        }
    }
    for ((process, kind, name), times) in ranges(trace, work) {
        let role = of_range(&name);
        add(process, kind, name, role, times);
    }
    marks
}

/// The starts of ranges by process and name, the outermost where a name nests in itself. Those that neither have a role
/// nor take much of the time are left out.
fn ranges(trace: &Trace, work: &[Work]) -> BTreeMap<(usize, Kind, String), Vec<i64>> {
    let ranges = &trace.ranges;
    let is_host_time = |range: usize| {
        ranges.flags[range] & range_flags::MARK == 0 && ranges.source[range] != RangeSource::GpuAnnotation
    };
    let process_of = |range: usize| trace.threads.get(ranges.thread[range] as usize).map(|t| t.process as usize);
    let launched = |process: usize| work.get(process).is_some_and(|work| !work.units.is_empty());
    // How often each name occurs and how long in all: most names are too frequent or too short to be looked at.
    let mut sums: Vec<(usize, i64)> = vec![(0, 0); trace.strings.len()];
    for range in (0..ranges.len()).filter(|&range| is_host_time(range)) {
        if let Some(sum) = sums.get_mut(ranges.name[range].0 as usize) {
            *sum = (sum.0 + 1, sum.1.saturating_add(ranges.end[range].saturating_sub(ranges.start[range])));
        }
    }
    // Names that differ in numbers only are one.
    let mut groups: Vec<(String, usize, i64)> = Vec::new();
    let mut places: HashMap<String, u32> = HashMap::new();
    let mut of_name: Vec<u32> = vec![NONE; sums.len()];
    for (name, &(count, time)) in sums.iter().enumerate().filter(|(_, sum)| (1..=MOST).contains(&sum.0)) {
        let text = without_numbers(trace.text(StrId(name as u32)));
        let place = *places.entry(text).or_insert_with_key(|text| {
            groups.push((text.clone(), 0, 0));
            groups.len() as u32 - 1
        });
        of_name[name] = place;
        let group = &mut groups[place as usize];
        (group.1, group.2) = (group.1 + count, group.2.saturating_add(time));
    }
    let whole = trace.extent().map_or(0, |(start, end)| end.saturating_sub(start));
    let matters = |(text, count, time): &(String, usize, i64)| {
        *count <= MOST && (*time as f64 >= LEAST_OF_TIME * whole as f64 || of_range(text).is_some())
    };
    let matter: Vec<bool> = groups.iter().map(matters).collect();
    // `torch.autograd.profiler.emit_nvtx` writes its operators as NVTX ranges.
    let is_operator: Vec<bool> = groups.iter().map(|(text, ..)| text.contains(", op_id = ")).collect();
    let mut found: BTreeMap<(usize, Kind, u32), Vec<i64>> = BTreeMap::new();
    let mut open_until: HashMap<(u32, u32), i64> = HashMap::new();
    for range in (0..ranges.len()).filter(|&range| is_host_time(range)) {
        let group = of_name.get(ranges.name[range].0 as usize).copied().unwrap_or(NONE);
        if matter.get(group as usize) != Some(&true) {
            continue;
        }
        let Some(process) = process_of(range) else { continue };
        let open = open_until.entry((ranges.thread[range], group)).or_insert(i64::MIN);
        if !launched(process) || ranges.start[range] < *open {
            continue;
        }
        *open = ranges.end[range];
        let kind = match ranges.source[range] {
            RangeSource::CpuOp | RangeSource::Python => Kind::Operator,
            _ if is_operator[group as usize] => Kind::Operator,
            _ => Kind::Range,
        };
        found.entry((process, kind, group)).or_default().push(ranges.start[range]);
    }
    let named = |((process, kind, group), times): ((usize, Kind, u32), Vec<i64>)| {
        ((process, kind, groups[group as usize].0.clone()), times)
    };
    found.into_iter().map(named).collect()
}
