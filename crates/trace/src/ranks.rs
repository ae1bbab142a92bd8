//! Whether several files are ranks of one job.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Trace, TraceError};

/// The key of [`crate::Meta::extra`] under which the number of ranks of the job stands, where the file says it.
pub(crate) const WORLD_SIZE: &str = "world_size";

/// Ranks record the same steps: files further apart than this are of two runs.
const FAR_APART_NS: i64 = 60_000_000_000;

/// Doubts that are said one by one.
const SHOWN: usize = 3;

/// Refuses files that cannot be ranks of one job, and gives what speaks against the others, for people.
pub(crate) fn doubts(traces: &[Trace]) -> Result<Vec<String>, TraceError> {
    let [first, others @ ..] = traces else { return Ok(Vec::new()) };
    let mut seen: BTreeMap<u32, &Trace> = BTreeMap::new();
    for trace in traces {
        for rank in ranks(trace) {
            if let Some(other) = seen.insert(rank, trace) {
                return Err(not_ranks(other, trace, format!("both say that they are rank {rank}")));
            }
        }
    }
    let mut doubts = Vec::new();
    for other in others {
        if let (Some(a), Some(b)) = (first.meta.extra.get(WORLD_SIZE), other.meta.extra.get(WORLD_SIZE))
            && a != b
        {
            return Err(not_ranks(first, other, format!("one is of a job of {a} ranks, the other of {b}")));
        }
        let apart = apart(first, other);
        if let Some(ns) = apart.filter(|&ns| ns > FAR_APART_NS) {
            return Err(not_ranks(first, other, format!("{} lie between them", long(ns))));
        }
        let mut differs = Vec::new();
        if is_copy(first, other) {
            differs.push("they hold the same events".to_owned());
        }
        if let Some(ns) = apart.filter(|&ns| ns > 0) {
            differs.push(format!("they share no moment ({:.3} ms lie between them)", ns as f64 / 1e6));
        }
        if recorder(first) != recorder(other) {
            differs.push("different tools recorded them".to_owned());
        }
        let (a, b) = (gpus(first), gpus(other));
        if !a.is_empty() && !b.is_empty() && a.is_disjoint(&b) {
            differs.push(format!("different GPUs ({} and {})", some(&a), some(&b)));
        }
        let (a, b) = (programs(first), programs(other));
        if !a.is_empty() && !b.is_empty() && without_numbers(&a).is_disjoint(&without_numbers(&b)) {
            differs.push(format!("different programs ({} and {})", some(&a), some(&b)));
        }
        let (a, b) = (steps(first), steps(other));
        if a > 0 && b > 0 && a != b && !first.meta.partial && !other.meta.partial {
            differs.push(format!("{a} and {b} steps of the profiler"));
        }
        if !differs.is_empty() {
            let (a, b) = (name(first), name(other));
            doubts.push(format!(
                "{a} and {b} may not be ranks of one job: {}; to compare them type `strobe compare {a} {b}`",
                differs.join(", ")
            ));
        }
    }
    let more = doubts.len().saturating_sub(SHOWN);
    doubts.truncate(SHOWN);
    if more > 0 {
        doubts.push(format!("{more} more files may not be ranks of the job of {}", name(first)));
    }
    Ok(doubts)
}

fn not_ranks(a: &Trace, b: &Trace, why: String) -> TraceError {
    TraceError::NotRanks { a: path(a), b: path(b), why }
}

/// Where a trace was read, as the user named it.
fn path(trace: &Trace) -> String {
    trace.meta.sources.first().map_or_else(|| "a trace".to_owned(), |source| source.path.display().to_string())
}

fn name(trace: &Trace) -> String {
    let name = trace.meta.sources.first().and_then(|source| source.path.file_name());
    name.map_or_else(|| "a trace".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// The ranks that a file itself names.
fn ranks(trace: &Trace) -> BTreeSet<u32> {
    trace.processes.iter().filter_map(|process| process.rank).collect()
}

/// Whether two files hold the same events.
fn is_copy(a: &Trace, b: &Trace) -> bool {
    let same = a.ops.start == b.ops.start && a.calls.start == b.calls.start && a.ranges.start == b.ranges.start;
    let pids = |trace: &Trace| trace.processes.iter().map(|process| process.pid).collect::<Vec<_>>();
    let events = a.ops.len() + a.calls.len() + a.ranges.len();
    events > 1
        && same
        && a.meta.session_start_utc_ns == b.meta.session_start_utc_ns
        && a.ops.end == b.ops.end
        && a.ranges.end == b.ranges.end
        && ranks(a) == ranks(b)
        && pids(a) == pids(b)
}

/// How long after the end of one trace the other begins, where both say when they were recorded: negative where they
/// overlap.
fn apart(a: &Trace, b: &Trace) -> Option<i64> {
    let absolute = |trace: &Trace| {
        let (zero, (start, end)) = (trace.meta.session_start_utc_ns?, trace.extent()?);
        Some((zero.saturating_add(start), zero.saturating_add(end)))
    };
    let ((start_a, end_a), (start_b, end_b)) = (absolute(a)?, absolute(b)?);
    Some(start_b.saturating_sub(end_a).max(start_a.saturating_sub(end_b)))
}

/// What recorded a trace, without its version.
fn recorder(trace: &Trace) -> &str {
    let format = trace.meta.sources.first().map_or("", |source| source.format.as_str());
    format.split(',').next().unwrap_or("")
}

fn gpus(trace: &Trace) -> BTreeSet<&str> {
    let gpus = trace.devices.iter().filter(|device| !device.is_cpu);
    gpus.map(|device| device.name.as_str()).filter(|name| !name.is_empty()).collect()
}

fn programs(trace: &Trace) -> BTreeSet<&str> {
    trace.processes.iter().map(|process| process.name.as_str()).filter(|name| !name.is_empty()).collect()
}

/// How many steps of its schedule the PyTorch profiler marked.
fn steps(trace: &Trace) -> usize {
    let mut known = vec![None; trace.strings.len()];
    let mut is_step = |name: crate::StrId| {
        let known: &mut Option<bool> = known.get_mut(name.0 as usize)?;
        Some(*known.get_or_insert_with(|| trace.text(name).starts_with("ProfilerStep#")))
    };
    let marked = trace.ranges.name.iter().filter(|&&name| is_step(name) == Some(true));
    marked.collect::<BTreeSet<_>>().len()
}

/// Names of processes may hold their rank.
fn without_numbers(names: &BTreeSet<&str>) -> BTreeSet<String> {
    names.iter().map(|name| name.chars().filter(|letter| !letter.is_ascii_digit()).collect()).collect()
}

fn some(names: &BTreeSet<&str>) -> String {
    let first = names.iter().next().copied().unwrap_or("");
    if names.len() > 1 { format!("{first} and others") } else { first.to_owned() }
}

/// A long time in words.
fn long(ns: i64) -> String {
    let seconds = ns / 1_000_000_000;
    match seconds {
        ..=7_199 => format!("{} minutes", seconds / 60),
        7_200..=172_799 => format!("{} hours", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}
