//! Rules about the host: launches, waits, copies it starts, and its work between steps.

use std::collections::{BTreeMap, HashMap, HashSet};

use strobe_trace::{IterationKind, NONE, OpDetail, StrId};

use super::facts::{Facts, evidence};
use super::idle::{is_named, named_ns};
use super::{Draft, Gain, Rule, count, ns_text, percent};
use crate::Summary;
use crate::budget::{Part, device_budgets};
use crate::critical_path::Kind;
use crate::intervals::{Span, SpanSet};
use crate::launch::{FULL_QUEUE, queue_depths};
use crate::sheet::{Unit, Value};
use crate::timeline::{Cause, Causes, Piece, ops_by_device, walk};

/// Rows of evidence at most.
const ROWS: usize = 10;

/// The time of an iteration on a device (or of a device, where no iterations are known) and how much of it the device
/// waits for the host. The parts are those of the budget.
struct Waits {
    kind: Option<IterationKind>,
    device: u32,
    window: Span,
    wall: i64,
    /// The next op was on its way.
    launch: i64,
    /// The next op had not been called.
    host: i64,
    /// What of both are stretches so long that they are no matter of many launches.
    long: i64,
}

impl Waits {
    fn behind_launches(&self) -> i64 {
        self.launch.saturating_add(self.host).saturating_sub(self.long)
    }
}

fn waits(facts: &Facts, long: i64) -> Vec<Waits> {
    let part = |parts: &[(Part, i64)], wanted: Part| parts.iter().find(|p| p.0 == wanted).map_or(0, |p| p.1);
    let row = |kind, device, window, wall, parts: &[(Part, i64)]| Waits {
        kind,
        device,
        window,
        wall,
        launch: part(parts, Part::LaunchBound),
        host: part(parts, Part::HostBound),
        long: 0,
    };
    let mut rows: Vec<Waits> =
        facts.budgets.iter().map(|b| row(b.kind, b.device, b.window, b.wall_ns, &b.parts)).collect();
    if rows.is_empty() {
        let devices = device_budgets(facts.context);
        rows = devices.iter().map(|d| row(None, d.device, d.window, d.wall_ns, &d.parts)).collect();
    }
    if rows.iter().all(|row| row.host.max(row.launch) < long) {
        return rows;
    }
    let causes = Causes::new(facts.context);
    for (device, ops) in ops_by_device(facts.trace).iter().enumerate() {
        // Rows of a device stand together, in order of time.
        let first = rows.partition_point(|row| (row.device as usize) < device);
        let until = rows.partition_point(|row| (row.device as usize) <= device);
        let own = &mut rows[first..until];
        walk(facts.context, ops, |gap, piece| {
            let Piece::Gap { before, next } = piece else { return };
            let place = own.partition_point(|row| row.window.start <= gap.start);
            let Some(row) = own[..place].last_mut() else { return };
            let Some(inside) = row.window.overlap(gap) else { return };
            causes.split(inside, before, next, |cause, time| {
                if matches!(cause, Cause::HostLate | Cause::Launch) && time >= long {
                    row.long = row.long.saturating_add(time);
                }
            });
        });
    }
    rows
}

pub(super) fn launch_bound(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let all = waits(facts, rule.limit_us("long_us"));
    let mut kinds: Vec<Option<IterationKind>> = all.iter().map(|row| row.kind).collect();
    kinds.sort();
    kinds.dedup();
    let drafts = kinds.into_iter().filter_map(|kind| {
        let rows: Vec<&Waits> = all.iter().filter(|row| row.kind == kind).collect();
        let in_scope = |op: usize| facts.context.kind_of_op(op) == kind;
        let ops = (0..facts.trace.ops.len()).filter(|&op| in_scope(op));
        let (ops, in_graphs) =
            ops.fold((0usize, 0usize), |(ops, graph), op| (ops + 1, graph + usize::from(facts.in_graph(op))));
        let calls = facts.launches.iter().filter(|l| in_scope(l.first_op as usize)).map(|l| l.call_ns as f64);
        let call = Summary::of(calls)?;
        let enough = (in_graphs as f64) < rule.limit("max_graph_share") * ops as f64
            && call.count as f64 >= rule.limit("min_launches");
        let total: i64 = rows.iter().map(|row| row.behind_launches()).fold(0, i64::saturating_add);
        let draft = launch_bound_draft(facts, rule, kind, &rows, call.median as i64)?;
        enough.then_some((total, draft))
    });
    let (behind_launches, draft) = drafts.max_by_key(|(total, _)| *total)?;
    // Fewer launches are no help to a process that waits for something else.
    (named_ns(facts.context.idle_causes()) <= behind_launches).then_some(draft)
}

/// Says how long devices wait behind launches: in a typical iteration, or in all where no iterations are known.
fn launch_bound_draft(
    facts: &Facts,
    rule: &Rule,
    kind: Option<IterationKind>,
    rows: &[&Waits],
    call: i64,
) -> Option<Draft> {
    let iterations = !facts.budgets.is_empty();
    let typical = |of: fn(&Waits) -> i64| {
        let values = rows.iter().map(|row| of(row));
        match iterations {
            true => Summary::of(values.map(|v| v as f64)).map_or(0, |s| s.median as i64),
            false => values.fold(0, i64::saturating_add),
        }
    };
    let (idle, wall) = (typical(Waits::behind_launches), typical(|row| row.wall));
    if idle <= 0 || (idle as f64) < rule.limit("min_share") * wall as f64 {
        return None;
    }
    let (subject, of, whole) = if iterations {
        let kind = kind.map_or("", IterationKind::as_str);
        let subject = if kind.is_empty() { "a step" } else { kind };
        let each = format!("per iteration (median of {} {kind}", count(rows.len()));
        (subject, "wall".to_owned(), format!("{})", each.trim_end()))
    } else {
        ("the run", facts.span_words(), facts.span_words())
    };
    let per_iteration = if iterations && rows.len() > 1 { format!(" {whole}") } else { String::new() };
    let sentence = format!(
        "{subject} is host-bound: {} of the {of} is idle behind launches of {}; CUDA graphs would remove up to {} of \
         {}{per_iteration}",
        percent(idle, wall),
        ns_text(call),
        ns_text(idle),
        ns_text(wall),
    );
    let time = if iterations { "Median per iteration" } else { "Time" };
    let mut table = evidence(rule, &[("Part", Unit::Text), (time, Unit::Ns), ("Share of wall", Unit::Share)]);
    let long = format!("of both in stretches of {} or more, not counted here", ns_text(rule.limit_us("long_us")));
    let parts = [
        (Part::LaunchBound.to_string(), typical(|row| row.launch)),
        (Part::HostBound.to_string(), typical(|row| row.host)),
        (long, typical(|row| row.long)),
        ("wall".to_owned(), wall),
    ];
    for (name, ns) in parts {
        table.push([name.into(), ns.into(), (ns as f64 / wall as f64).into()]);
    }
    Some(Draft { sentence, gain: Some(Gain::new(idle, wall, whole)), evidence: table })
}

/// Segments of one kind that last at least `long`, by name: the time in which the device idles, and its sum.
fn long_segments(facts: &Facts, kind: Kind, long: i64) -> (i64, Vec<(StrId, usize, i64, i64)>) {
    let mut by_name: HashMap<StrId, (usize, i64, i64)> = HashMap::new();
    for path in &facts.paths {
        for segment in path.segments.iter().filter(|s| s.kind == kind && facts.seen_ns(s.span) >= long) {
            let row = by_name.entry(segment.name).or_default();
            let ns = facts.idle_ns(path.process, segment.span);
            *row = (row.0 + 1, row.1.saturating_add(ns), row.2.max(ns));
        }
    }
    let mut rows: Vec<_> = by_name.into_iter().map(|(name, (n, ns, max))| (name, n, ns, max)).collect();
    rows.sort_by_key(|&(name, _, ns, _)| (std::cmp::Reverse(ns), name));
    (rows.iter().map(|r| r.2).fold(0, i64::saturating_add), rows)
}

fn long_draft(
    facts: &Facts,
    rule: &Rule,
    kind: Kind,
    column: &str,
    sentence: impl Fn(&str, &str, &str) -> String,
) -> Option<Draft> {
    let (sum, rows) = long_segments(facts, kind, rule.limit_us("long_us"));
    let whole = facts.path_ns();
    if sum == 0 || (sum as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let name = |id: StrId| if id == StrId::NONE { "(no range)" } else { facts.trace.text(id) };
    let columns = [
        (column, Unit::Text),
        ("Times", Unit::Count),
        ("Time", Unit::Ns),
        ("Longest", Unit::Ns),
        ("Share", Unit::Share),
    ];
    let mut table = evidence(rule, &columns);
    for &(id, times, ns, longest) in rows.iter().take(ROWS) {
        table.push([name(id).into(), times.into(), ns.into(), longest.into(), (ns as f64 / whole as f64).into()]);
    }
    let most = rows.first().map(|&(id, _, ns, _)| format!("{} of it in `{}`", ns_text(ns), name(id)))?;
    let of_whole = format!("{} of {} {}", percent(sum, whole), ns_text(whole), facts.path_words());
    let sentence = sentence(&ns_text(sum), &of_whole, &most);
    Some(Draft { sentence, gain: Some(Gain::new(sum, whole, facts.path_words())), evidence: table })
}

pub(super) fn late_start(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let long = ns_text(rule.limit_us("long_us"));
    let mut draft = long_draft(facts, rule, Kind::LaunchLatency, "Op that starts late", |sum, of_whole, most| {
        format!(
            "ops start {long} or more after their launch has returned though nothing ran before them on their stream: \
             {sum} ({of_whole}), {most}"
        )
    })?;
    // What happens once, as at the start of a recording, is no time that could be gained again and again.
    let (_, rows) = long_segments(facts, Kind::LaunchLatency, rule.limit_us("long_us"));
    let times: usize = rows.iter().map(|row| row.1).sum();
    draft.gain = draft.gain.filter(|_| times as f64 >= rule.limit("min_times"));
    Some(draft)
}

pub(super) fn sync_per_step(facts: &Facts, rule: &Rule) -> Option<Draft> {
    // Per call and range around it: waits, and the time from then until the device works again.
    let mut by_call: BTreeMap<(StrId, StrId), (usize, i64)> = BTreeMap::new();
    let mut idles = Vec::new();
    // The marker of an iteration around a call says nothing of the call.
    let markers: HashSet<&str> = facts.context.iterations.list.iter().map(|i| i.label.as_str()).collect();
    let named = |range: u32| match range {
        NONE => StrId::NONE,
        range => facts.trace.ranges.name[range as usize],
    };
    for path in &facts.paths {
        // Waits with no kernel between them are one: the device waits once.
        let mut counted_until = i64::MIN;
        for segment in path.segments.iter().filter(|s| s.kind == Kind::SyncReturn) {
            let moment = segment.span.start;
            let Some(next) = facts.next_kernel(path.process, moment).filter(|_| moment >= counted_until) else {
                continue;
            };
            counted_until = next;
            let idle = facts.idle_ns(path.process, Span::new(moment, next));
            let range = named(facts.attribution.of_call.get(segment.call as usize).copied().unwrap_or(NONE));
            let range = if markers.contains(facts.trace.text(range)) { StrId::NONE } else { range };
            let row = by_call.entry((segment.name, range)).or_default();
            *row = (row.0 + 1, row.1.saturating_add(idle));
            idles.push(idle as f64);
        }
    }
    let whole = facts.path_ns();
    let sum = by_call.values().map(|r| r.1).fold(0, i64::saturating_add);
    if (idles.len() as f64) < rule.limit("min_waits") || (sum as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let mut rows: Vec<_> = by_call.into_iter().collect();
    rows.sort_by_key(|(_, (_, ns))| std::cmp::Reverse(*ns));
    let columns = [
        ("Call", Unit::Text),
        ("In", Unit::Text),
        ("Waits", Unit::Count),
        ("Idle until the next kernel", Unit::Ns),
        ("Share", Unit::Share),
    ];
    let mut table = evidence(rule, &columns);
    for ((call, range), (waits, ns)) in rows.iter().take(ROWS) {
        let range = if *range == StrId::NONE { Value::Unknown } else { facts.trace.text(*range).into() };
        table.push([
            facts.trace.text(*call).into(),
            range,
            (*waits).into(),
            (*ns).into(),
            (*ns as f64 / whole as f64).into(),
        ]);
    }
    let iterations = facts.context.iterations.list.len();
    let per_iteration = match iterations {
        0 => String::new(),
        n => format!(" ({:.1} per iteration)", idles.len() as f64 / n as f64),
    };
    let waits = idles.len();
    let median = Summary::of(idles).map_or(0.0, |s| s.median) as i64;
    let most = rows.first().map_or("", |((call, _), _)| facts.trace.text(*call));
    let sentence = format!(
        "the host waits for the device {}{per_iteration}, most in `{most}`; each time the device then idles for {} \
         (median) until the host has launched again: {} or {} of {} {}",
        if waits == 1 { "once".to_owned() } else { format!("{} times", count(waits)) },
        ns_text(median),
        ns_text(sum),
        percent(sum, whole),
        ns_text(whole),
        facts.path_words(),
    );
    Some(Draft { sentence, gain: Some(Gain::new(sum, whole, facts.path_words())), evidence: table })
}

pub(super) fn pageable_copies(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let trace = facts.trace;
    const PAGEABLE: u8 = 0;
    let mut rows: BTreeMap<&str, (usize, u64, i64, i64)> = BTreeMap::new();
    let mut blocked = Vec::new();
    for op in 0..trace.ops.len() {
        let Some(&OpDetail::Memcpy { copy_kind: copy_kind @ (1 | 2), src_kind, dst_kind, .. }) = trace.detail_of(op)
        else {
            continue;
        };
        let host_side = if copy_kind == 1 { src_kind } else { dst_kind };
        let Some(call) = trace.launch_of(op) else { continue };
        if host_side != PAGEABLE || !trace.text(call.name).contains("Async") {
            continue;
        }
        let row = rows.entry(if copy_kind == 1 { "host to device" } else { "device to host" }).or_default();
        let length = call.end.saturating_sub(call.start);
        *row = (row.0 + 1, row.1.saturating_add(trace.ops.bytes[op]), row.2.saturating_add(length), row.3.max(length));
        blocked.push(Span::new(call.start, call.end));
    }
    let copies = blocked.len();
    // While kernels run, a blocked host costs nothing.
    let kernels = SpanSet::union_of(
        (0..trace.ops.len())
            .filter(|&op| !trace.ops.kind[op].is_memory())
            .map(|op| Span::new(trace.ops.start[op], trace.ops.end[op])),
    );
    let lost = SpanSet::union_of(blocked.iter().copied()).subtract(&kernels).length();
    let whole = facts.path_ns();
    if (copies as f64) < rule.limit("min_copies") || (lost as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let columns = [
        ("Direction", Unit::Text),
        ("Copies", Unit::Count),
        ("Bytes", Unit::Bytes),
        ("Host inside the calls", Unit::Ns),
        ("Longest call", Unit::Ns),
    ];
    let mut table = evidence(rule, &columns);
    for (direction, (copies, bytes, ns, longest)) in rows {
        table.push([direction.into(), copies.into(), bytes.into(), ns.into(), longest.into()]);
    }
    let inside: i64 = SpanSet::union_of(blocked).length();
    let sentence = format!(
        "{} asynchronous copies from or to pageable memory hold the host for {}, {} of it while no kernel runs: {} of \
         {} {}",
        count(copies),
        ns_text(inside),
        ns_text(lost),
        percent(lost, whole),
        ns_text(whole),
        facts.path_words(),
    );
    Some(Draft { sentence, gain: Some(Gain::new(lost, whole, facts.path_words())), evidence: table })
}

pub(super) fn slow_start(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let list = &facts.context.iterations.list;
    // Only iterations of about as many launches do the same work.
    let mut launches = vec![0f64; list.len()];
    for launch in facts.launches {
        let iteration = facts.context.iterations.of_op.get(launch.first_op as usize).copied().unwrap_or(NONE);
        if let Some(number) = launches.get_mut(iteration as usize) {
            *number += 1.0;
        }
    }
    let mut slow = Vec::new();
    let mut by_process: BTreeMap<u32, Vec<_>> = BTreeMap::new();
    for (iteration, launches) in list.iter().zip(&launches) {
        by_process.entry(iteration.process).or_default().push((iteration, launches));
    }
    for own in by_process.into_values() {
        for (first, number) in own.iter().take(rule.limit("first") as usize) {
            let same_work = |other: f64| (other - **number).abs() <= rule.limit("tolerance") * other.max(**number);
            let alike = own.iter().filter(|(i, other)| i.kind == first.kind && same_work(**other));
            let alike = alike.map(|(i, _)| i.host.length() as f64);
            let Some(usual) = Summary::of(alike) else { continue };
            let wall = first.host.length();
            let enough = usual.count as f64 >= rule.limit("min_iterations");
            if enough && wall as f64 > rule.limit("times") * usual.median {
                slow.push((*first, wall, usual.median as i64));
            }
        }
    }
    let excess: i64 = slow.iter().map(|(_, wall, usual)| wall - usual).sum();
    let whole: i64 = list.iter().map(|i| i.host.length()).fold(0, i64::saturating_add);
    if slow.is_empty() || (excess as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let columns = [("Iteration", Unit::Text), ("Wall", Unit::Ns), ("Median of its kind", Unit::Ns)];
    let mut table = evidence(rule, &columns);
    for (iteration, wall, usual) in &slow {
        let label = if iteration.label.is_empty() { iteration.number.to_string() } else { iteration.label.clone() };
        table.push([label.into(), (*wall).into(), (*usual).into()]);
    }
    let (worst, wall, usual) = slow.iter().max_by_key(|s| s.1)?;
    let whole_words = format!("wall of all {} iterations", count(list.len()));
    let sentence = format!(
        "iteration {} takes {} where {} is usual: loading of modules, compiling or first allocations; {} or {} of the \
         {whole_words} ({})",
        worst.number,
        ns_text(*wall),
        ns_text(*usual),
        ns_text(excess),
        percent(excess, whole),
        ns_text(whole),
    );
    Some(Draft { sentence, gain: Some(Gain::new(excess, whole, whole_words)), evidence: table })
}

pub(super) fn between_iterations(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let budgets = &facts.budgets;
    let between = |parts: &[(Part, i64)]| parts.iter().find(|p| p.0 == Part::BetweenIterations).map(|p| p.1);
    let mut gaps: Vec<_> = budgets.iter().filter_map(|b| Some((between(&b.parts)?, b))).collect();
    let sum = gaps.iter().map(|g| g.0).fold(0, i64::saturating_add);
    let whole = budgets.iter().map(|b| b.wall_ns).fold(0, i64::saturating_add);
    let enough = budgets.len() as f64 >= rule.limit("min_iterations");
    if !enough || sum == 0 || (sum as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let median = Summary::of(gaps.iter().map(|g| g.0 as f64)).map_or(0.0, |s| s.median) as i64;
    gaps.sort_by_key(|g| std::cmp::Reverse(g.0));
    let columns = [("After iteration", Unit::Count), ("Device", Unit::Count), ("Idle", Unit::Ns), ("Wall", Unit::Ns)];
    // What the host did in between has a name: another rule says so.
    let causes = facts.context.idle_causes();
    let all = causes.iter().map(|cause| cause.between_ns).fold(0, i64::saturating_add);
    let named =
        causes.iter().filter(|cause| is_named(cause)).map(|cause| cause.between_ns).fold(0, i64::saturating_add);
    if named > all / 2 {
        return None;
    }
    let mut table = evidence(rule, &columns);
    for &(idle, budget) in gaps.iter().take(ROWS) {
        let device = facts.trace.devices.get(budget.device as usize).map_or(budget.device, |d| d.ordinal);
        table.push([budget.iter.into(), device.into(), idle.into(), budget.wall_ns.into()]);
    }
    let words = format!("wall of all {} iterations", count(budgets.len()));
    let sentence = format!(
        "between iterations the device idles {} times, {} each (median): {} or {} of the {words} ({})",
        count(gaps.len()),
        ns_text(median),
        ns_text(sum),
        percent(sum, whole),
        ns_text(whole),
    );
    Some(Draft { sentence, gain: Some(Gain::new(sum, whole, words)), evidence: table })
}

pub(super) fn queue_full(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let queues = queue_depths(facts.trace, facts.launches);
    let columns = [("Device", Unit::Id), ("Stream", Unit::Id), ("Deepest", Unit::Count), ("Time full", Unit::Ns)];
    let mut table = evidence(rule, &columns);
    let mut longest = 0i64;
    for queue in &queues {
        let at = queue.time_at_depth(facts.context.unseen());
        let full: i64 = at.iter().skip(FULL_QUEUE as usize).sum();
        if full > 0 {
            table.push([queue.device.into(), queue.stream.into(), (at.len() - 1).into(), full.into()]);
            longest = longest.max(full);
        }
    }
    let whole = facts.path_ns();
    if longest == 0 || (longest as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let sentence = format!(
        "for {} ({} of {} {}) {} or more launches were outstanding on a stream, where the host blocks",
        ns_text(longest),
        percent(longest, whole),
        ns_text(whole),
        facts.path_words(),
        count(FULL_QUEUE as usize),
    );
    Some(Draft { sentence, gain: None, evidence: table })
}
