//! Which of the levels of a trace is the one of steps, and how sure that is.

use std::collections::BTreeMap;

use strobe_trace::{NONE, OpKind, Trace};

use super::levels::{ENOUGH, Level, Repeats};
use super::markers::Marker;
use super::patterns::{self, DEVICE_TO_HOST, GraphStep, copy_direction};
use super::{Candidate, Confidence, Detected, Found, Method};
use crate::intervals::Span;

/// Share of a trace's kernels from which a process must have steps of its own, so that the trace has.
const MATTERS: f64 = 0.1;
/// Candidates that are listed.
const LISTED: usize = 20;

/// The steps of one process.
enum Steps {
    /// Calls that launch, step by step.
    OfGraphs(Vec<GraphStep>),
    /// Units at which steps begin, and where the last one ends.
    Cuts(Vec<usize>),
}

impl Steps {
    fn count(&self) -> usize {
        match self {
            Steps::OfGraphs(steps) => steps.len(),
            Steps::Cuts(cuts) => cuts.len().saturating_sub(1),
        }
    }
}

/// What is known of the steps of one process.
struct Decision {
    steps: Option<Steps>,
    graphs: bool,
    sure: bool,
    evidence: String,
    /// All that may be steps, the chosen first.
    candidates: Vec<Candidate>,
}

/// The steps of a trace without markers. Empty where nothing repeats, and where it is uncertain what the steps are.
pub(super) fn by_evidence(trace: &Trace) -> Detected {
    let repeats = Repeats::of(trace);
    let graphs = patterns::graph_steps_of(trace);
    let decisions: Vec<Decision> =
        repeats.iter().zip(graphs).map(|(repeats, graphs)| decide(repeats, graphs)).collect();
    let kernels: Vec<usize> = repeats.iter().map(|repeats| repeats.kernels()).collect();
    let all: usize = kernels.iter().sum();
    let matters = |process: usize| kernels[process] as f64 >= MATTERS * all as f64 && kernels[process] > 0;
    let weighty: Vec<usize> = (0..decisions.len()).filter(|&process| matters(process)).collect();
    let busiest = weighty.iter().copied().max_by_key(|&process| (kernels[process], std::cmp::Reverse(process)));
    let Some(busiest) = busiest else { return Detected::none(trace, None) };
    let sure = weighty.iter().all(|&process| decisions[process].sure);
    let mut candidates = decisions[busiest].candidates.clone();
    candidates.truncate(LISTED);
    let first = &decisions[busiest];
    let mut detected = Detected::none(trace, None);
    if sure {
        let method = if first.graphs { Method::GraphReplays } else { Method::Repeats };
        detected.method = Some(method);
        let ops = ops_by_process(trace);
        for (process, decision) in decisions.iter().enumerate().filter(|(_, decision)| decision.sure) {
            let Some(steps) = &decision.steps else { continue };
            place(trace, &repeats[process], process as u32, of_process(&ops, process), steps, &mut detected);
        }
        detected = patterns::finish(trace, detected);
        detected.evidence = first.evidence.clone();
        detected.confidence = Confidence::Likely;
    }
    detected.candidates = candidates;
    detected
}

/// The steps of a trace as a user chose them: those that come `count` times. `None` where nothing does.
pub(super) fn by_count(trace: &Trace, count: usize) -> Option<Detected> {
    let repeats = Repeats::of(trace);
    let graphs = patterns::graph_steps_of(trace);
    let mut detected = Detected::none(trace, Some(Method::Chosen(count)));
    let ops = ops_by_process(trace);
    for (process, (repeats, graphs)) in repeats.iter().zip(graphs).enumerate() {
        let of_graphs = graphs.filter(|steps| steps.len() == count).map(Steps::OfGraphs);
        // Candidates are listed by the steps that they make.
        let made = |level: &Level| Some(Steps::Cuts(repeats.cuts(level))).filter(|steps| steps.count() == count);
        let steps = of_graphs.or_else(|| repeats.levels.iter().find_map(made));
        if let Some(steps) = steps {
            place(trace, repeats, process as u32, of_process(&ops, process), &steps, &mut detected);
        }
    }
    (!detected.list.is_empty()).then(|| patterns::finish(trace, detected))
}

fn decide(repeats: &Repeats, graphs: Option<Vec<GraphStep>>) -> Decision {
    let top = repeats.levels.first();
    let mut candidates: Vec<Candidate> = Vec::new();
    for level in &repeats.levels {
        let count = Steps::Cuts(repeats.cuts(level)).count();
        if count > 0 && candidates.iter().all(|other| other.count != count) {
            candidates.push(candidate(level, count));
        }
        if candidates.len() >= LISTED {
            break;
        }
    }
    let near = |a: usize, b: usize| a.abs_diff(b) <= 1;
    if let Some(steps) = graphs {
        let replays = steps.iter().filter(|step| step.graphs > 0).count();
        let eager = steps.len() - replays;
        let mut evidence = format!("{replays} launches of CUDA graphs");
        if steps.iter().any(|step| step.graphs > 1) {
            let all: usize = steps.iter().map(|step| step.graphs).sum();
            evidence = format!("{all} launches of CUDA graphs in {replays} groups");
        }
        if eager > 0 {
            evidence += &format!(" and {eager} stretches of eager kernels");
        }
        let reads_back = steps.iter().filter(|step| step.reads_back).count();
        if 10 * reads_back >= 8 * replays {
            evidence += ", each with a copy to the host";
        }
        // A step may hold several graphs: then something else comes once in it, and has a reason to be a step.
        let coarser = top.filter(|level| {
            level.score >= ENOUGH
                && level.count > 1
                && 3 * level.count <= 2 * steps.len()
                && !near(level.count, steps.len())
                && !level.graphs
        });
        let own = Candidate {
            count: steps.len(),
            evidence: evidence.clone(),
            choose: format!("--iterations {}", steps.len()),
        };
        candidates.retain(|other| other.count != steps.len());
        candidates.insert(0, own);
        return Decision {
            sure: coarser.is_none(),
            steps: Some(Steps::OfGraphs(steps)),
            graphs: true,
            evidence,
            candidates,
        };
    }
    let Some(top) = top else {
        return Decision { steps: None, graphs: false, sure: false, evidence: String::new(), candidates };
    };
    let steps = Steps::Cuts(repeats.cuts(top));
    let sure = repeats.is_decided();
    Decision { steps: Some(steps), graphs: top.graphs, sure, evidence: top.evidence.clone(), candidates }
}

fn candidate(level: &Level, count: usize) -> Candidate {
    let choose = match &level.range {
        Some(range) => choose_range(range),
        None => format!("--iterations {count}"),
    };
    Candidate { count, evidence: level.evidence.clone(), choose }
}

/// What to type to take ranges of a name, numbers in it as `N`, for iterations.
pub(super) fn choose_range(name: &str) -> String {
    format!("--iteration-range {}", quoted(&pattern_of(name)))
}

/// A regular expression for a name in which `N` stands for numbers.
fn pattern_of(name: &str) -> String {
    let mut pattern = String::from("^");
    let mut letters = name.chars().peekable();
    let mut before = ' ';
    while let Some(letter) = letters.next() {
        let alone = letter == 'N' && !before.is_alphabetic() && letters.peek().is_none_or(|next| !next.is_alphabetic());
        match alone {
            true => pattern.push_str(r"[\dN]+"),
            false => pattern.push_str(&regex::escape(&letter.to_string())),
        }
        before = letter;
    }
    pattern + "$"
}

/// Text as one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Per process its ops in order.
fn ops_by_process(trace: &Trace) -> Vec<Vec<u32>> {
    let mut ops: Vec<Vec<u32>> = vec![Vec::new(); trace.processes.len()];
    for (op, &process) in trace.ops.process.iter().enumerate() {
        if let Some(ops) = ops.get_mut(process as usize) {
            ops.push(op as u32);
        }
    }
    ops
}

fn of_process(ops: &[Vec<u32>], process: usize) -> &[u32] {
    ops.get(process).map(Vec::as_slice).unwrap_or_default()
}

/// Adds the steps of a process, whose ops are given.
fn place(trace: &Trace, repeats: &Repeats, process: u32, own: &[u32], steps: &Steps, detected: &mut Detected) {
    match steps {
        Steps::OfGraphs(steps) => {
            for (counted, step) in steps.iter().enumerate() {
                let iteration = detected.list.len() as u32;
                step.calls.iter().for_each(|&call| detected.of_call[call as usize] = iteration);
                push(detected, step.label(), counted, process);
            }
            for op in own.iter().map(|&op| op as usize) {
                if let Some(&iteration) = detected.of_call.get(trace.ops.launch[op] as usize) {
                    detected.of_op[op] = iteration;
                }
            }
        }
        Steps::Cuts(cuts) => place_cuts(trace, repeats, process, own, cuts, detected),
    }
}

fn push(detected: &mut Detected, label: String, counted: usize, process: u32) {
    detected.list.push(Found::new(label, Marker::default(), counted as u64, process, Span::new(0, 0)));
}

fn place_cuts(trace: &Trace, repeats: &Repeats, process: u32, own: &[u32], cuts: &[usize], detected: &mut Detected) {
    let begins = boundaries(trace, repeats, own, cuts);
    let first = detected.list.len() as u32;
    for (counted, pair) in cuts.windows(2).enumerate() {
        let kernels: u32 =
            repeats.units.get(pair[0]..pair[1]).unwrap_or_default().iter().map(|unit| unit.kernels).sum();
        push(detected, format!("{kernels} kernels"), counted, process);
    }
    let last = begins.len().saturating_sub(1);
    let ops = &trace.ops;
    for op in own.iter().map(|&op| op as usize) {
        let call = ops.launch[op];
        let at = match (repeats.launched, call) {
            (true, NONE) => continue, // placed by its time on the device, once the others are
            (true, call) => trace.calls.start.get(call as usize).copied().unwrap_or(ops.start[op]),
            (false, _) => ops.start[op],
        };
        let place = begins.partition_point(|&begin| begin <= at);
        if place == 0 || place > last {
            continue;
        }
        let iteration = first + place as u32 - 1;
        detected.of_op[op] = iteration;
        if let Some(of_call) = detected.of_call.get_mut(call as usize) {
            *of_call = iteration;
        }
    }
}

/// The moments at which the steps begin, and the end of the last one, on the clock of launches where those are known.
/// Copies between two steps: what is read back belongs to the one before, what is copied in to the one behind.
fn boundaries(trace: &Trace, repeats: &Repeats, own: &[u32], cuts: &[usize]) -> Vec<i64> {
    let ops = &trace.ops;
    let mut copies: Vec<(i64, u8)> = own
        .iter()
        .map(|&op| op as usize)
        .filter(|&op| ops.kind[op] == OpKind::Memcpy)
        .filter_map(|op| {
            let call = ops.launch[op];
            let at = match repeats.launched {
                true => trace.calls.start.get(call as usize).copied()?,
                false => ops.start[op],
            };
            Some((at, copy_direction(trace, op)?))
        })
        .collect();
    copies.sort_unstable();
    let begin = |&cut: &usize| {
        let Some(unit) = repeats.units.get(cut) else { return i64::MAX };
        let before = cut.checked_sub(1).and_then(|before| repeats.units.get(before)).map_or(i64::MIN, |unit| unit.at);
        let between = copies.partition_point(|&(at, _)| at <= before)..copies.partition_point(|&(at, _)| at < unit.at);
        let between = copies.get(between).unwrap_or_default();
        let read_back = between.iter().rposition(|&(_, kind)| kind == DEVICE_TO_HOST);
        let behind = between.get(read_back.map_or(0, |place| place + 1)..).unwrap_or_default();
        behind.first().map_or(unit.at, |&(at, _)| at)
    };
    cuts.iter().map(begin).collect()
}

/// Names of ranges, numbers in them as `N`, with how often they come and how long, most time first.
pub(super) fn repeating_ranges(trace: &Trace) -> Vec<(String, usize, i64)> {
    let ranges = &trace.ranges;
    let mut sums: BTreeMap<u32, (usize, i64)> = BTreeMap::new();
    for range in (0..ranges.len()).filter(|&range| super::can_be_marker(trace, range)) {
        let sum = sums.entry(ranges.name[range].0).or_default();
        *sum = (sum.0 + 1, sum.1.saturating_add(ranges.end[range].saturating_sub(ranges.start[range])));
    }
    let mut by_text: BTreeMap<String, (usize, i64)> = BTreeMap::new();
    for (name, (count, time)) in sums {
        let text = super::roles::without_numbers(trace.text(strobe_trace::StrId(name)));
        let sum = by_text.entry(text).or_default();
        *sum = (sum.0 + count, sum.1.saturating_add(time));
    }
    let mut found: Vec<(String, usize, i64)> =
        by_text.into_iter().map(|(name, (count, time))| (name, count, time)).collect();
    found.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
    found
}
