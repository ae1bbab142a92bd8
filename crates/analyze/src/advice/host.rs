//! Rules about the host: launches, waits, copies it starts, and its work between steps.

use std::collections::{BTreeMap, HashMap};

use strobe_trace::{NONE, OpDetail, StrId};

use super::facts::{Facts, evidence};
use super::{Draft, Gain, Rule, count, ns_text, percent};
use crate::Summary;
use crate::critical_path::Kind;
use crate::intervals::{Span, SpanSet};
use crate::launch::{FULL_QUEUE, queue_depths};
use crate::sheet::{Unit, Value};

/// Rows of evidence at most.
const ROWS: usize = 10;

pub(super) fn launch_bound(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let drafts = facts.scopes().into_iter().filter_map(|scope| {
        let long = rule.limit_us("long_us");
        let mut parts = [(0i64, 0usize); 3]; // host between calls, inside calls, latency
        let mut total = 0i64;
        for path in &facts.paths {
            for segment in &path.segments {
                let iteration = facts.iteration_of(path.process, segment);
                let kind = iteration.and_then(|i| facts.context.iterations.list[i].kind);
                if scope.is_some() && kind != scope {
                    continue;
                }
                let ns = segment.span.length();
                total = total.saturating_add(ns);
                let part = match segment.kind {
                    Kind::Host if ns < long => 0,
                    Kind::Call if ns < long => 1,
                    Kind::LaunchLatency if ns < long => 2,
                    _ => continue,
                };
                let idle = facts.idle_ns(path.process, segment.span);
                parts[part] = (parts[part].0.saturating_add(idle), parts[part].1 + usize::from(idle > 0));
            }
        }
        let in_scope = |op: usize| scope.is_none() || facts.context.kind_of_op(op) == scope;
        let ops = (0..facts.trace.ops.len()).filter(|&op| in_scope(op));
        let (all, in_graphs) =
            ops.fold((0usize, 0usize), |(all, graph), op| (all + 1, graph + usize::from(facts.in_graph(op))));
        let calls = facts.launches.iter().filter(|l| in_scope(l.first_op as usize)).map(|l| l.call_ns as f64);
        let call = Summary::of(calls)?;
        let idle: i64 = parts.iter().map(|p| p.0).sum();
        let speaks = idle as f64 >= rule.limit("min_share") * total as f64
            && (in_graphs as f64) < rule.limit("max_graph_share") * all as f64
            && call.count as f64 >= rule.limit("min_launches")
            && idle > 0;
        if !speaks {
            return None;
        }
        let iterations = facts.context.iterations.list.iter().filter(|i| scope.is_some() && i.kind == scope).count();
        let (subject, whole) = match scope {
            Some(kind) => {
                (kind.as_str(), format!("on the critical path through {}", iterations_text(iterations, kind.as_str())))
            }
            None => ("the run", facts.path_words()),
        };
        let sentence = format!(
            "{subject} is host-bound: {} of {} {whole} the device is idle behind {} launches of {} (median call); \
             CUDA graphs would remove up to {} of {}",
            percent(idle, total),
            ns_text(total),
            count(call.count),
            ns_text(call.median as i64),
            ns_text(idle),
            ns_text(total),
        );
        let columns = [
            ("The device waits for", Unit::Text),
            ("Stretches", Unit::Count),
            ("Time", Unit::Ns),
            ("Share", Unit::Share),
        ];
        let mut rows = evidence(rule, &columns);
        let names = ["host work between calls", "launch and other calls", "the start after the launch has returned"];
        for (name, (ns, stretches)) in names.into_iter().zip(parts) {
            rows.push([name.into(), stretches.into(), ns.into(), (ns as f64 / total as f64).into()]);
        }
        Some(Draft { sentence, gain: Some(Gain::new(idle, total, whole)), evidence: rows })
    });
    drafts.max_by_key(|draft| draft.gain.as_ref().map_or(0, |g| g.ns))
}

fn iterations_text(number: usize, kind: &str) -> String {
    format!("{} {kind} iteration{}", count(number), if number == 1 { "" } else { "s" })
}

/// Segments of one kind that last at least `long`, by name: the time in which the device idles, and its sum.
fn long_segments(facts: &Facts, kind: Kind, long: i64) -> (i64, Vec<(StrId, usize, i64, i64)>) {
    let mut by_name: HashMap<StrId, (usize, i64, i64)> = HashMap::new();
    for path in &facts.paths {
        for segment in path.segments.iter().filter(|s| s.kind == kind && s.span.length() >= long) {
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

pub(super) fn host_work(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let long = ns_text(rule.limit_us("long_us"));
    long_draft(facts, rule, Kind::Host, "Range", |sum, of_whole, most| {
        format!(
            "the device waits {sum} ({of_whole}) for stretches of host work of {long} or more between calls, {most}"
        )
    })
}

pub(super) fn long_calls(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let long = ns_text(rule.limit_us("long_us"));
    long_draft(facts, rule, Kind::Call, "Call", |sum, of_whole, most| {
        format!("the device waits {sum} ({of_whole}) while the host is inside calls that take {long} or more, {most}")
    })
}

pub(super) fn late_start(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let long = ns_text(rule.limit_us("long_us"));
    long_draft(facts, rule, Kind::LaunchLatency, "Op that starts late", |sum, of_whole, most| {
        format!(
            "ops start {long} or more after their launch has returned though nothing ran before them on their stream: \
             {sum} ({of_whole}), {most}"
        )
    })
}

pub(super) fn sync_per_step(facts: &Facts, rule: &Rule) -> Option<Draft> {
    // Per call and range around it: waits, and the time from then until the device works again.
    let mut by_call: BTreeMap<(StrId, StrId), (usize, i64)> = BTreeMap::new();
    let mut idles = Vec::new();
    for path in &facts.paths {
        for segment in path.segments.iter().filter(|s| s.kind == Kind::SyncReturn) {
            let idle = facts.idle_until_kernel(path.process, segment.span.start);
            let range = facts.attribution.of_call.get(segment.call as usize).copied().unwrap_or(NONE);
            let range = if range == NONE { StrId::NONE } else { facts.trace.ranges.name[range as usize] };
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
    for process in 0..facts.trace.processes.len() as u16 {
        let own: Vec<_> = list.iter().zip(&launches).filter(|(i, _)| i.process == process).collect();
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
    let list = &facts.context.iterations.list;
    let mut gaps = Vec::new();
    let mut whole = 0i64;
    for process in 0..facts.trace.processes.len() as u16 {
        let own: Vec<_> = list.iter().filter(|i| i.process == process && i.device.is_some()).collect();
        let devices: Vec<Span> = own.iter().filter_map(|i| i.device).collect();
        if (devices.len() as f64) < rule.limit("min_iterations") {
            continue;
        }
        let ops = &facts.trace.ops;
        let mine = (0..ops.len()).filter(|&op| ops.process[op] == process);
        let busy = SpanSet::union_of(mine.map(|op| Span::new(ops.start[op], ops.end[op])));
        whole = whole.saturating_add(busy.extent().map_or(0, Span::length));
        let mut end = i64::MIN;
        for (pair, iteration) in devices.windows(2).zip(&own) {
            end = end.max(pair[0].end);
            let idle = busy.gaps(Span::new(end, pair[1].start)).length();
            if idle > 0 {
                gaps.push((idle, iteration.number, end));
            }
        }
    }
    let sum: i64 = gaps.iter().map(|g| g.0).sum();
    if gaps.is_empty() || (sum as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let median = Summary::of(gaps.iter().map(|g| g.0 as f64)).map_or(0.0, |s| s.median) as i64;
    gaps.sort_by_key(|g| std::cmp::Reverse(g.0));
    let mut table = evidence(rule, &[("After iteration", Unit::Count), ("At", Unit::Ns), ("Idle", Unit::Ns)]);
    for &(idle, number, end) in gaps.iter().take(ROWS) {
        table.push([number.into(), end.into(), idle.into()]);
    }
    let words = "from first op to last end of the processes with iterations";
    let sentence = format!(
        "between iterations the device idles {} times, {} each (median): {} or {} of {} {words}",
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
    let columns = [("Device", Unit::Count), ("Stream", Unit::Count), ("Deepest", Unit::Count), ("Time full", Unit::Ns)];
    let mut table = evidence(rule, &columns);
    let mut longest = 0i64;
    for queue in &queues {
        let at = queue.time_at_depth();
        let full: i64 = at.iter().skip(FULL_QUEUE as usize).sum();
        if full > 0 {
            table.push([u32::from(queue.device).into(), queue.stream.into(), (at.len() - 1).into(), full.into()]);
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
