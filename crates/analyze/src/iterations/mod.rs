//! The iterations of a trace: as its engine recorded them, by its markers, or by what comes once in each.

mod autograd;
mod levels;
mod markers;
mod patterns;
mod rhythm;
mod roles;
mod steps;
mod table;

use std::collections::{HashMap, HashSet};

use serde::Serialize;
use strobe_trace::{IterationKind, NONE, OpKind, RangeSource, StrId, Trace, range_flags};

use crate::intervals::Span;
use markers::{FAMILIES, Marker, PROFILER_STEP};

pub(crate) use roles::without_numbers;
pub use table::{IterationFigures, Summary, candidates_report, figures, report};

/// The iterations of a trace and how they were found.
#[derive(Clone, Debug, Default)]
pub struct Detected {
    /// How they were found; `None` when there are none.
    pub method: Option<Method>,
    /// What that rests on, in words.
    pub evidence: String,
    /// How sure it is. Where it is uncertain what the iterations are, `list` is empty.
    pub confidence: Confidence,
    /// What else they may be, the most likely first; where they were found without markers the first is what was chosen.
    pub candidates: Vec<Candidate>,
    /// The iterations in order of time. Those of one process do not overlap on the host.
    pub list: Vec<Found>,
    /// Per op of the trace the index of its iteration in `list`, or [`strobe_trace::NONE`].
    pub of_op: Vec<u32>,
    /// Per call of the trace the index of its iteration in `list`, or [`strobe_trace::NONE`].
    pub of_call: Vec<u32>,
}

/// How sure the iterations are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// The program or the user named them.
    Certain,
    /// What repeats tells them clearly.
    Likely,
    /// It does not.
    #[default]
    Uncertain,
}

impl Confidence {
    /// As in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Confidence::Certain => "certain",
            Confidence::Likely => "likely",
            Confidence::Uncertain => "uncertain",
        }
    }
}

/// What the iterations of a trace may be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// How many there would be.
    pub count: usize,
    /// What speaks for it, in words.
    pub evidence: String,
    /// What to type to have it.
    pub choose: String,
}

impl Detected {
    /// The next best, where iterations were found without markers.
    pub fn runner_up(&self) -> Option<&Candidate> {
        let chosen = usize::from(matches!(self.method, Some(Method::GraphReplays | Method::Repeats)));
        self.candidates.get(chosen)
    }

    /// Why there are no iterations and what to do, for reports that need them.
    pub fn why_none(&self) -> String {
        const CHOOSE: &str = "name the ranges that are iterations with --iteration-range";
        if let Some(pattern) = self.unmatched_range_name() {
            return format!("no range of the trace matches `{pattern}`");
        }
        match &self.candidates[..] {
            [] => format!(
                "no iterations: the trace has no markers of a known engine, no repeated graph launches, and nothing that \
                 repeats as steps do; {CHOOSE}"
            ),
            [first, rest @ ..] => {
                let second =
                    rest.first().map_or(String::new(), |second| format!(", {} by {}", second.count, second.evidence));
                format!(
                    "it is uncertain what an iteration is: {} by {}{second}; choose with {} or see --list-iterations",
                    first.count, first.evidence, first.choose
                )
            }
        }
    }

    /// The user's name for iterations when no range of the trace has it.
    pub fn unmatched_range_name(&self) -> Option<&str> {
        match &self.method {
            Some(Method::RangeName(pattern)) if self.list.is_empty() => Some(pattern),
            _ => None,
        }
    }

    fn none(trace: &Trace, method: Option<Method>) -> Self {
        let (of_op, of_call) = (vec![NONE; trace.ops.len()], vec![NONE; trace.calls.len()]);
        Self { method, of_op, of_call, ..Self::default() }
    }
}

/// How iterations were found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The engine wrote them into the trace.
    Recorded,
    /// By markers of a known engine, e.g. `ProfilerStep#N`.
    Markers(String),
    /// By ranges whose name the user gave.
    RangeName(String),
    /// By launches of CUDA graphs.
    GraphReplays,
    /// By what comes once in each: kernels, copies, ranges.
    Repeats,
    /// What comes as often as the user says.
    Chosen(usize),
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Method::Recorded => f.write_str("as the engine recorded them"),
            Method::Markers(family) => write!(f, "by markers `{family}`"),
            Method::RangeName(pattern) => write!(f, "by ranges that match `{pattern}`"),
            Method::GraphReplays => f.write_str("by launches of CUDA graphs"),
            Method::Repeats => f.write_str("by what repeats"),
            Method::Chosen(count) => write!(f, "as what repeats {count} times"),
        }
    }
}

/// One iteration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Found {
    /// Its number as the trace has it, else counted from 0 within its process.
    pub number: u64,
    /// What it is called in the trace, e.g. the name of its marker.
    pub label: String,
    /// What it worked on, where known.
    pub kind: Option<IterationKind>,
    /// Requests in their context phase, where known.
    pub context_requests: Option<u32>,
    /// Requests in their generation phase, where known.
    pub generation_requests: Option<u32>,
    /// Tokens of the context requests, where known.
    pub context_tokens: Option<u32>,
    /// Tokens of the generation requests, where known.
    pub generation_tokens: Option<u32>,
    /// Index into the trace's processes.
    pub process: u32,
    /// Its wall time: the length of its record or marker. One that was found by graph launches or repetition has no time
    /// of its own on the host: there it reaches from its first op to the first op of the next one.
    #[serde(skip)]
    pub host: Span,
    /// From its first op on a device to the end of its last; `None` without any.
    #[serde(skip)]
    pub device: Option<Span>,
}

impl Found {
    fn new(label: String, marker: Marker, counted: u64, process: u32, host: Span) -> Self {
        Self {
            number: marker.number.unwrap_or(counted),
            label,
            kind: marker.kind,
            context_requests: marker.context_requests,
            generation_requests: marker.generation_requests,
            context_tokens: marker.context_tokens,
            generation_tokens: marker.generation_tokens,
            process,
            host,
            device: None,
        }
    }
}

/// Finds the iterations of a trace: ranges that match `range_name` if one is given, else what the engine recorded, else
/// the markers of known engines (of all families together), else what comes once in each step. When `range_name` matches
/// nothing, nothing else is tried (see [`Detected::unmatched_range_name`]).
///
/// An op belongs to the iteration of its process inside whose host time the call that launched it lies wholly. An op
/// without launch belongs to the iteration inside whose device time it lies.
pub fn detect(trace: &Trace, range_name: Option<&regex::Regex>) -> Detected {
    if let Some(pattern) = range_name {
        let method = Method::RangeName(pattern.as_str().to_owned());
        let named = marked_ranges(trace, |name| {
            let text = trace.text(name);
            pattern.is_match(text).then(|| markers::parse(text).unwrap_or_default())
        });
        return certain(by_host_time(trace, method, numbered(trace, named)));
    }
    if !trace.iterations.is_empty() {
        return certain(recorded(trace));
    }
    match by_markers(trace) {
        Some(marked) => certain(marked),
        None => steps::by_evidence(trace),
    }
}

/// The iterations that come `count` times, by what repeats in the trace; empty where nothing does.
pub fn detect_by_count(trace: &Trace, count: usize) -> Detected {
    let none = || Detected {
        candidates: steps::by_evidence(trace).candidates,
        ..Detected::none(trace, Some(Method::Chosen(count)))
    };
    steps::by_count(trace, count).map_or_else(none, certain)
}

fn certain(detected: Detected) -> Detected {
    let evidence = detected.method.as_ref().map_or(String::new(), |method| method.to_string());
    Detected { evidence, confidence: Confidence::Certain, ..detected }
}

/// Operators and Python functions are too many to be looked at and never markers.
fn can_be_marker(trace: &Trace, range: usize) -> bool {
    let source = trace.ranges.source[range];
    let named = !matches!(source, RangeSource::GpuAnnotation | RangeSource::CpuOp | RangeSource::Python);
    named && trace.ranges.flags[range] & range_flags::MARK == 0
}

/// A range that marks an iteration.
#[derive(Clone)]
struct Marked {
    name: StrId,
    /// Index into [`FAMILIES`].
    family: usize,
    marker: Marker,
    process: u32,
    host: Span,
}

impl Marked {
    /// Takes in a marker of a weaker family that means the same step: the outer time counts, and what only the other
    /// one says is filled in, unless the two disagree.
    fn merge(&mut self, other: &Marked) {
        self.host = Span::new(self.host.start.min(other.host.start), self.host.end.max(other.host.end));
        self.marker.fill_in(&other.marker);
    }
}

/// The iterations of markers of all engine families. Steps of a profiler's schedule count where there are no others, or
/// where the others leave out most of the work inside these steps.
fn by_markers(trace: &Trace) -> Option<Detected> {
    // Each name is read once; most are none of a marker.
    let mut is_read = vec![false; trace.strings.len()];
    let mut of_name: HashMap<StrId, (usize, Marker)> = HashMap::new();
    for range in (0..trace.ranges.len()).filter(|&range| can_be_marker(trace, range)) {
        let name = trace.ranges.name[range];
        let Some(is_read) = is_read.get_mut(name.0 as usize).filter(|is_read| !**is_read) else { continue };
        *is_read = true;
        if let Some(parsed) = markers::parse(trace.text(name)) {
            of_name.insert(name, parsed);
        }
    }
    if of_name.is_empty() {
        return None;
    }
    let all = |family: usize| match of_name.values().any(|found| found.0 == family) {
        true => marked_ranges(trace, |name| of_name.get(&name).filter(|found| found.0 == family).cloned()),
        false => Vec::new(),
    };
    let mut engine: Vec<Marked> = Vec::new();
    for family in 0..PROFILER_STEP {
        let weaker = all(family);
        engine = if engine.is_empty() { weaker } else { with_weaker(engine, weaker) };
    }
    let schedule = all(PROFILER_STEP);
    let [engine, schedule] = [engine, schedule].map(|marked| {
        let mut families: Vec<usize> = marked.iter().map(|m| m.family).collect();
        families.sort_unstable();
        families.dedup();
        let names: Vec<&str> = families.into_iter().map(|family| FAMILIES[family].name).collect();
        let found = || by_host_time(trace, Method::Markers(names.join("`, `")), numbered(trace, marked));
        (!names.is_empty()).then(found)
    });
    let op_time = |detected: &Detected| {
        let inside = detected.of_op.iter().enumerate().filter(|(_, iteration)| **iteration != NONE);
        inside.fold(0i64, |sum, (op, _)| sum.saturating_add(trace.ops.duration(op)))
    };
    match (engine, schedule) {
        (Some(engine), Some(schedule)) if op_time(&engine) < op_time(&schedule) / 2 => Some(schedule),
        (engine, schedule) => engine.or(schedule),
    }
}

/// Adds the markers of a weaker family. One that lies inside a stronger one, or around a single one, means the same step;
/// one that touches none is a step of its own. One around several holds steps and is none, and one that overlaps in part
/// belongs to another thread's view of the same work.
fn with_weaker(mut found: Vec<Marked>, weaker: Vec<Marked>) -> Vec<Marked> {
    found.sort_by_key(|m| (m.process, m.host.start));
    let mut same_step: Vec<Vec<Marked>> = vec![Vec::new(); found.len()];
    let mut alone = Vec::new();
    for marked in weaker {
        let (process, host) = (marked.process, marked.host);
        let first = found.partition_point(|m| (m.process, m.host.end) <= (process, host.start));
        let after = found.partition_point(|m| (m.process, m.host.start) < (process, host.end));
        let contains = |outer: Span, inner: Span| outer.start <= inner.start && inner.end <= outer.end;
        match found.get(first..after).unwrap_or_default() {
            [] => alone.push(marked),
            [one] if contains(one.host, host) || contains(host, one.host) => same_step[first].push(marked),
            _ => {}
        }
    }
    for (marked, same) in found.iter_mut().zip(&same_step) {
        // Several inside one step are its parts, and none of them speaks for all of it.
        if let [same] = &same[..] {
            marked.merge(same);
        }
    }
    found.append(&mut alone);
    found
}

/// The ranges for which `read` returns something, by start. Of markers inside each other in one process the outer one
/// counts; one that begins before the one before it has ended begins where that ends.
fn marked_ranges(trace: &Trace, mut read: impl FnMut(StrId) -> Option<(usize, Marker)>) -> Vec<Marked> {
    let mut last_end: HashMap<u32, i64> = HashMap::new();
    let mut found = Vec::new();
    for range in (0..trace.ranges.len()).filter(|&r| can_be_marker(trace, r)) {
        let name = trace.ranges.name[range];
        let Some((family, marker)) = read(name) else { continue };
        let thread = trace.threads.get(trace.ranges.thread[range] as usize);
        let process = thread.map_or(0, |t| t.process);
        let after = last_end.get(&process).copied().unwrap_or(i64::MIN);
        let (start, end) = (trace.ranges.start[range].max(after), trace.ranges.end[range]);
        if end <= after || end < start {
            continue;
        }
        last_end.insert(process, end);
        found.push(Marked { name, family, marker, process, host: Span::new(start, end) });
    }
    found
}

/// Iterations in order of time. In a process where some have no number of their own all are counted, so that no number
/// stands for two.
fn numbered(trace: &Trace, mut marked: Vec<Marked>) -> Vec<Found> {
    marked.sort_by_key(|m| (m.host.start, m.process));
    let unnumbered: HashSet<u32> = marked.iter().filter(|m| m.marker.number.is_none()).map(|m| m.process).collect();
    let mut counts: HashMap<u32, u64> = HashMap::new();
    let found = marked.into_iter().map(|mut m| {
        let count = counts.entry(m.process).or_default();
        if unnumbered.contains(&m.process) {
            m.marker.number = None;
        }
        *count += 1;
        Found::new(trace.text(m.name).to_owned(), m.marker, *count - 1, m.process, m.host)
    });
    found.collect()
}

/// Per process the iterations in order of time.
struct ByProcess(Vec<Vec<u32>>);

impl ByProcess {
    fn new(list: &[Found]) -> Self {
        let mut of = Vec::new();
        for (index, found) in list.iter().enumerate() {
            let process = found.process as usize;
            if of.len() <= process {
                of.resize(process + 1, Vec::new());
            }
            of[process].push(index as u32);
        }
        Self(of)
    }

    fn of(&self, process: u32) -> &[u32] {
        self.0.get(process as usize).map_or(&[], Vec::as_slice)
    }
}

/// Gives calls and ops to iterations whose host time is known.
fn by_host_time(trace: &Trace, method: Method, list: Vec<Found>) -> Detected {
    let mut detected = Detected { list, ..Detected::none(trace, Some(method)) };
    let by_process = ByProcess::new(&detected.list);
    let mut place = vec![0usize; by_process.0.len()];
    for call in 0..trace.calls.len() {
        let Some(thread) = trace.threads.get(trace.calls.thread[call] as usize) else { continue };
        let mine = by_process.of(thread.process);
        let Some(place) = place.get_mut(thread.process as usize) else { continue };
        let start = trace.calls.start[call];
        while *place + 1 < mine.len() && detected.list[mine[*place + 1] as usize].host.start <= start {
            *place += 1;
        }
        let Some(&iteration) = mine.get(*place) else { continue };
        let host = detected.list[iteration as usize].host;
        if host.start <= start && trace.calls.end[call] <= host.end {
            detected.of_call[call] = iteration;
        }
    }
    for (op, &launch) in trace.ops.launch.iter().enumerate() {
        detected.of_op[op] = detected.of_call.get(launch as usize).copied().unwrap_or(NONE);
    }
    set_device_spans(trace, &mut detected);
    place_unlaunched(trace, &mut detected, &by_process);
    detected
}

/// From the first op to the end of the last one, per iteration.
fn set_device_spans(trace: &Trace, detected: &mut Detected) {
    for (op, &iteration) in detected.of_op.iter().enumerate() {
        let Some(found) = detected.list.get_mut(iteration as usize) else { continue };
        let (start, end) = (trace.ops.start[op], trace.ops.end[op]);
        found.device =
            Some(found.device.map_or(Span { start, end }, |s| Span { start: s.start.min(start), end: s.end.max(end) }));
    }
}

/// Ops without launch go to the iteration inside whose device time they lie. Where a process has no launches at all,
/// the host time of its iterations stands for their device time.
fn place_unlaunched(trace: &Trace, detected: &mut Detected, by_process: &ByProcess) {
    let spans: Vec<Vec<(Span, u32)>> = by_process
        .0
        .iter()
        .map(|mine| {
            let device = mine.iter().filter_map(|&i| Some((detected.list[i as usize].device?, i)));
            let mut spans: Vec<(Span, u32)> = device.collect();
            if spans.is_empty() {
                spans = mine.iter().map(|&i| (detected.list[i as usize].host, i)).collect();
            }
            spans.sort_by_key(|(span, _)| span.start);
            spans
        })
        .collect();
    let mut changed = false;
    for op in 0..trace.ops.len() {
        if trace.ops.launch[op] != NONE || detected.of_op[op] != NONE {
            continue;
        }
        let (start, end) = (trace.ops.start[op], trace.ops.end[op]);
        let Some(mine) = spans.get(trace.ops.process[op] as usize) else { continue };
        let after = mine.partition_point(|(span, _)| span.start <= start);
        // Device times of neighbours may overlap a little; more than two at once do not.
        let near = mine[after.saturating_sub(2)..after].iter().rev();
        if let Some((_, iteration)) = near.into_iter().find(|(span, _)| end <= span.end) {
            detected.of_op[op] = *iteration;
            changed = true;
        }
    }
    if changed {
        set_device_spans(trace, detected);
    }
}

/// The iterations that the engine recorded, with the ops that name them.
fn recorded(trace: &Trace) -> Detected {
    let mut detected = Detected::none(trace, Some(Method::Recorded));
    let mut by_number: HashMap<u64, Vec<u32>> = HashMap::new();
    for (index, iteration) in trace.iterations.iter().enumerate() {
        by_number.entry(iteration.iter).or_default().push(index as u32);
        let marker = Marker {
            number: Some(iteration.iter),
            kind: Some(iteration.kind()),
            context_requests: Some(iteration.context_requests),
            generation_requests: Some(iteration.generation_requests),
            context_tokens: Some(iteration.context_tokens),
            generation_tokens: Some(iteration.generation_tokens),
        };
        let label = format!(
            "iteration {}: {} ctx reqs, {} gen reqs",
            iteration.iter, iteration.context_requests, iteration.generation_requests
        );
        let host = Span::new(iteration.start, iteration.end);
        detected.list.push(Found::new(label, marker, 0, 0, host));
    }
    // A number may come twice when windows of several runs were put together: then time decides.
    let find = |number: u32, start: i64| -> u32 {
        let Some(candidates) = by_number.get(&u64::from(number)) else { return NONE };
        let inside = candidates.iter().find(|&&i| {
            let iteration = &trace.iterations[i as usize];
            iteration.start <= start && start < iteration.end
        });
        inside.or(candidates.first()).copied().unwrap_or(NONE)
    };
    let mut process_known = vec![false; detected.list.len()];
    for op in 0..trace.ops.len() {
        let number = trace.ops.iteration[op];
        if number == NONE {
            continue;
        }
        let iteration = find(number, trace.ops.start[op]);
        detected.of_op[op] = iteration;
        if let Some(known) = process_known.get_mut(iteration as usize).filter(|known| !**known) {
            *known = true;
            detected.list[iteration as usize].process = trace.ops.process[op];
        }
    }
    let starts: Vec<i64> = trace.iterations.iter().map(|i| i.start).collect();
    for call in 0..trace.calls.len() {
        let after = starts.partition_point(|&s| s <= trace.calls.start[call]);
        let inside = after.checked_sub(1).filter(|&i| trace.calls.end[call] <= trace.iterations[i].end);
        detected.of_call[call] = inside.map_or(NONE, |i| i as u32);
    }
    for op in 0..trace.ops.len() {
        let launch = trace.ops.launch[op];
        if detected.of_op[op] == NONE && launch != NONE && trace.ops.kind[op] != OpKind::CpuOp {
            detected.of_op[op] = detected.of_call[launch as usize];
        }
    }
    set_device_spans(trace, &mut detected);
    detected
}
