//! Which rank comes late to collectives, how long the others wait for it, and what it did instead.
//!
//! Collectives of the same name are the same by their order. One begins on a rank when that rank arrives, and ends on all
//! of them when the last one has: the spread of the beginnings is what the others wait. A rank that was late stays late
//! until somebody waits, so a cause is sought where its lateness grows: what its launching thread did more of, since the
//! collective before, than that of the rank which came first.

use std::collections::{BTreeMap, HashMap};

use strobe_trace::{NONE, OpKind, Trace};

use crate::categories::Class;
use crate::compare::base_name;
use crate::context::Context;
use crate::host::{Explainer, folded, plain};
use crate::intervals::Span;
use crate::sheet::{Column, Report, Sheet, Unit};

/// Clocks of two files whose collectives end further apart than this in the median are brought together.
const CLOCKS_APART_NS: i64 = 100_000;
/// Lateness that grows by less has no cause of its own.
const LEAST_GROWTH_NS: i64 = 50_000;
/// The share of the growth that a cause has to explain.
const EXPLAINS: f64 = 0.3;
/// Share of matched collectives that must run at the same time on all ranks.
const MOST_TOGETHER: f64 = 0.8;

/// A collective on all of its ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    /// The name of its kernel, without parameters.
    pub name: String,
    /// Per rank of [`Ranks::processes`] its op, or [`NONE`].
    pub ops: Vec<u32>,
    /// When the first rank arrived, on the clock of the first process.
    pub first_ns: i64,
    /// From the first arrival to the last.
    pub skew_ns: i64,
    /// The rank that arrived last, as an index into [`Ranks::processes`].
    pub late: usize,
    /// Waiting times of all others together.
    pub waited_ns: i64,
    /// What made the late one late, where that is known.
    pub cause: Option<String>,
}

/// The collectives of several ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ranks {
    /// Indices of the processes that take part, by rank.
    pub processes: Vec<usize>,
    /// Their collectives by time.
    pub collectives: Vec<Collective>,
    /// How far the clock of each process was ahead of the first one's, as ends of collectives say.
    pub clocks_ns: Vec<i64>,
    /// Collectives that could not be matched.
    pub unmatched: usize,
}

/// What the ranks of a trace did together; an error says why that is not known.
pub fn ranks(context: &Context) -> Result<Ranks, String> {
    let trace = context.trace;
    let mut of_process: BTreeMap<usize, BTreeMap<String, Vec<u32>>> = BTreeMap::new();
    let mut bare: HashMap<u32, Option<String>> = HashMap::new();
    for op in 0..trace.ops.len() {
        if trace.ops.kind[op] != OpKind::Kernel || context.categories.of_op(op).class != Class::Communication {
            continue;
        }
        let name = bare.entry(trace.ops.name[op].0).or_insert_with(|| collective_name(trace.op_name(op)));
        if let Some(name) = name {
            let own = of_process.entry(trace.ops.process[op] as usize).or_default();
            own.entry(name.clone()).or_default().push(op as u32);
        }
    }
    if of_process.len() < 2 {
        return Err("it takes traces of several ranks with collectives: strobe analyze rank*.json.gz".to_owned());
    }
    let mut processes: Vec<usize> = of_process.keys().copied().collect();
    processes.sort_by_key(|&process| (trace.processes.get(process).and_then(|p| p.rank), process));
    let mut names: Vec<&String> = of_process.values().flat_map(BTreeMap::keys).collect();
    names.sort_unstable();
    names.dedup();
    let mut found = Ranks { processes, ..Ranks::default() };
    let none: Vec<u32> = Vec::new();
    for name in names {
        let own: Vec<&Vec<u32>> =
            found.processes.iter().map(|process| of_process[process].get(name).unwrap_or(&none)).collect();
        let (least, most) = own.iter().fold((usize::MAX, 0), |(l, m), ops| (l.min(ops.len()), m.max(ops.len())));
        if least != most {
            found.unmatched += most;
            continue;
        }
        for place in 0..least {
            let ops = own.iter().map(|ops| ops[place]).collect();
            let name = name.clone();
            found.collectives.push(Collective {
                name,
                ops,
                first_ns: 0,
                skew_ns: 0,
                late: 0,
                waited_ns: 0,
                cause: None,
            });
        }
    }
    if found.collectives.is_empty() {
        return Err("the ranks run different numbers of each collective: they are not matched".to_owned());
    }
    found.clocks_ns = clocks(trace, &found);
    found.arrive(trace);
    if !found.run_together(trace) {
        return Err("matched by their order, collectives do not run at the same time on all ranks".to_owned());
    }
    found.find_causes(context);
    Ok(found)
}

/// The name of a collective's kernel without parameters; none for what is sent from one rank to another.
fn collective_name(kernel: &str) -> Option<String> {
    let name = base_name(kernel);
    let lower = name.to_lowercase();
    (!["sendrecv", "send_", "recv_"].iter().any(|part| lower.contains(part))).then_some(name)
}

/// How far each clock is ahead of the first one's: collectives end at the same time everywhere.
fn clocks(trace: &Trace, found: &Ranks) -> Vec<i64> {
    let source = |index: usize| found.processes.get(index).and_then(|&p| trace.processes.get(p)).map(|p| p.source);
    let ahead = |index: usize| {
        if index == 0 || source(index) == source(0) {
            return 0;
        }
        let end = |op: u32| trace.ops.end[op as usize];
        let mut apart: Vec<i64> =
            found.collectives.iter().map(|c| end(c.ops[index]).saturating_sub(end(c.ops[0]))).collect();
        apart.sort_unstable();
        let median = apart[apart.len() / 2];
        if median.saturating_abs() > CLOCKS_APART_NS { median } else { 0 }
    };
    (0..found.processes.len()).map(ahead).collect()
}

impl Ranks {
    fn start(&self, trace: &Trace, collective: &Collective, rank: usize) -> i64 {
        trace.ops.start[collective.ops[rank] as usize].saturating_sub(self.clocks_ns[rank])
    }

    /// When each rank came to each collective.
    fn arrive(&mut self, trace: &Trace) {
        let mut collectives = std::mem::take(&mut self.collectives);
        for collective in &mut collectives {
            let arrivals: Vec<i64> =
                (0..self.processes.len()).map(|rank| self.start(trace, collective, rank)).collect();
            let (late, &last) =
                arrivals.iter().enumerate().max_by_key(|&(rank, at)| (at, std::cmp::Reverse(rank))).unwrap_or((0, &0));
            collective.first_ns = arrivals.iter().copied().min().unwrap_or(0);
            collective.skew_ns = last.saturating_sub(collective.first_ns);
            collective.late = late;
            collective.waited_ns = arrivals.iter().fold(0, |sum, &at| sum.saturating_add(last.saturating_sub(at)));
        }
        collectives.sort_by_key(|collective| collective.first_ns);
        self.collectives = collectives;
    }

    fn run_together(&self, trace: &Trace) -> bool {
        let together = |collective: &&Collective| {
            let end = |rank: usize| trace.ops.end[collective.ops[rank] as usize].saturating_sub(self.clocks_ns[rank]);
            let first_end = (0..self.processes.len()).map(end).min().unwrap_or(0);
            collective.first_ns.saturating_add(collective.skew_ns) <= first_end
        };
        self.collectives.iter().filter(together).count() as f64 >= MOST_TOGETHER * self.collectives.len() as f64
    }

    /// How much later than another rank one launched a collective.
    fn launched_later(&self, trace: &Trace, collective: &Collective, late: usize, first: usize) -> i64 {
        let at = |rank: usize| launched(trace, collective.ops[rank]).saturating_sub(self.clocks_ns[rank]);
        at(late).saturating_sub(at(first))
    }

    /// Seeks a cause where lateness grows; as long as the host is not later than then, a rank is late for the same reason:
    /// its device may catch up and be late again.
    fn find_causes(&mut self, context: &Context) {
        let trace = context.trace;
        let mut explainers: Vec<Explainer> = self.processes.iter().map(|_| Explainer::new(context)).collect();
        // Per rank the cause, and how late the host was by it.
        let mut known: Vec<Option<(String, i64)>> = vec![None; self.processes.len()];
        let mut collectives = std::mem::take(&mut self.collectives);
        for place in 0..collectives.len() {
            let (before, from) = collectives.split_at_mut(place);
            let (Some(collective), before) = (from.first_mut(), before.last()) else { continue };
            let late = collective.late;
            let ranks = || 0..self.processes.len();
            let Some(first) = ranks().min_by_key(|&rank| self.start(trace, collective, rank)) else { continue };
            let behind = before.map_or(0, |before| {
                self.start(trace, before, late).saturating_sub(self.start(trace, before, first)).max(0)
            });
            if collective.skew_ns.saturating_sub(behind) > LEAST_GROWTH_NS {
                let growth = collective.skew_ns.saturating_sub(behind);
                let did = |rank: usize, explainers: &mut Vec<Explainer>| {
                    let begin = before.map_or(i64::MIN, |before| launched(trace, before.ops[rank]));
                    doings(trace, &mut explainers[rank], begin, collective.ops[rank])
                };
                let (own, others) = (did(late, &mut explainers), did(first, &mut explainers));
                let more = |(name, ns): (&String, &i64)| {
                    (ns.saturating_sub(others.get(name).copied().unwrap_or(0)), name.clone())
                };
                let most = own.iter().map(more).max().filter(|&(ns, _)| ns as f64 >= EXPLAINS * growth as f64);
                let host_late = self.launched_later(trace, collective, late, first);
                known[late] = match most {
                    Some((_, name)) => Some((name, host_late)),
                    None => known[late].take().filter(|(_, was)| host_late <= was.saturating_add(LEAST_GROWTH_NS)),
                };
            }
            match collective.skew_ns > LEAST_GROWTH_NS {
                true => collective.cause = known[late].as_ref().map(|(name, _)| name.clone()),
                false => known.fill(None),
            }
        }
        self.collectives = collectives;
    }
}

/// When an op was launched; when it began where that is not known.
fn launched(trace: &Trace, op: u32) -> i64 {
    trace.launch_of(op as usize).map_or(trace.ops.start[op as usize], |call| call.start)
}

/// What the thread that launched an op did from a moment until then, in words.
fn doings(trace: &Trace, explainer: &mut Explainer, from: i64, op: u32) -> BTreeMap<String, i64> {
    let mut found: BTreeMap<String, i64> = BTreeMap::new();
    let Some(&thread) = trace.calls.thread.get(trace.ops.launch[op as usize] as usize) else { return found };
    let until = launched(trace, op);
    let begin = from.max(trace.extent().map_or(until, |(start, _)| start));
    if begin >= until {
        return found;
    }
    explainer.thread(thread, Span::new(begin, until), &mut |span, doing| {
        if doing.is_named() {
            let name = folded(&plain(trace.text(doing.event.name(trace)))).into_owned();
            let time = found.entry(name).or_default();
            *time = time.saturating_add(span.length());
        }
    });
    found
}

fn rank_text(trace: &Trace, process: usize) -> String {
    match trace.processes.get(process) {
        Some(found) => found.rank.map_or_else(|| format!("process {}", found.pid), |rank| format!("rank {rank}")),
        None => format!("process {process}"),
    }
}

/// Which rank comes late to collectives, and why.
pub fn report(context: &Context) -> Report {
    const TITLE: &str = "Ranks: who comes late to collectives";
    let trace = context.trace;
    let found = match ranks(context) {
        Ok(found) => found,
        Err(why) => return Report::absent("ranks", TITLE, why),
    };
    let name = |rank: usize| rank_text(trace, found.processes.get(rank).copied().unwrap_or(usize::MAX));
    let columns = [
        Column::new("rank", Unit::Text),
        Column::new("late at", Unit::Count),
        Column::new("others wait for it", Unit::Ns),
        Column::new("waits for others", Unit::Ns),
        Column::new("cause", Unit::Text),
    ];
    let mut by_rank = Sheet::new("ranks", columns);
    let mut worst: Option<(i64, usize, usize, Option<String>)> = None;
    for rank in 0..found.processes.len() {
        let late = || found.collectives.iter().filter(|c| c.late == rank && c.skew_ns > LEAST_GROWTH_NS);
        let caused = late().fold(0i64, |sum, c| sum.saturating_add(c.waited_ns));
        let waits = found.collectives.iter().fold(0i64, |sum, c| {
            let last = c.first_ns.saturating_add(c.skew_ns);
            sum.saturating_add(last.saturating_sub(found.start(trace, c, rank)))
        });
        let mut causes: BTreeMap<&str, i64> = BTreeMap::new();
        for collective in late() {
            let time = causes.entry(collective.cause.as_deref().unwrap_or("unknown")).or_default();
            *time = time.saturating_add(collective.waited_ns);
        }
        let cause = causes.into_iter().max_by_key(|&(_, ns)| ns).map(|(cause, _)| cause.to_owned());
        if worst.as_ref().is_none_or(|worst| caused > worst.0) {
            worst = Some((caused, rank, late().count(), cause.clone()));
        }
        by_rank.push([name(rank).into(), late().count().into(), caused.into(), waits.into(), cause.into()]);
    }
    let columns = [
        Column::new("collective", Unit::Id),
        Column::new("name", Unit::Text),
        Column::new("first arrival", Unit::Moment),
        Column::new("arrival skew", Unit::Ns),
        Column::new("late rank", Unit::Text),
        Column::new("waited", Unit::Ns),
        Column::new("iteration", Unit::Id),
        Column::new("cause", Unit::Text),
    ];
    let mut each = Sheet::new("collectives", columns).title("Collectives by time");
    for (number, collective) in found.collectives.iter().enumerate() {
        let op = collective.ops.get(collective.late).copied().unwrap_or(NONE);
        let iteration =
            context.iterations.of_op.get(op as usize).and_then(|&i| context.iterations.list.get(i as usize));
        let late = (collective.skew_ns > LEAST_GROWTH_NS).then(|| name(collective.late));
        each.push([
            number.into(),
            collective.name.as_str().into(),
            collective.first_ns.into(),
            collective.skew_ns.into(),
            late.into(),
            collective.waited_ns.into(),
            iteration.map(|i| i.number).into(),
            collective.cause.clone().into(),
        ]);
    }
    let mut report = Report::new("ranks", TITLE).sheet(by_rank).sheet(each);
    if let Some((caused, rank, times, cause)) = worst.filter(|worst| worst.0 > 0) {
        let why = match cause.as_deref() {
            Some("unknown") | None => "; what it did instead is not recorded".to_owned(),
            Some(cause) => format!("; most of it after `{cause}`"),
        };
        let ms = caused as f64 / 1e6;
        report = report.note(format!(
            "{} is late at {times} of {} collectives; the others wait {ms:.3} ms for it{why}.",
            name(rank),
            found.collectives.len()
        ));
    }
    for (rank, &ahead) in found.clocks_ns.iter().enumerate().filter(|(_, ahead)| **ahead != 0) {
        report = report.note(format!(
            "The clock of {} is taken to be {:.3} ms ahead of the first one's: its collectives end later by that much in the median.",
            name(rank),
            ahead as f64 / 1e6
        ));
    }
    if found.unmatched > 0 {
        report = report.note(format!(
            "{} collectives are left out: their numbers differ between ranks (other groups, or a cut recording).",
            found.unmatched
        ));
    }
    report.note("Collectives are matched by name and order. Arrival is the start of the kernel on a rank; skew is the last arrival minus the first.")
}
