//! Rules about what the device does: copies, communication, and kernels that could be faster or fewer.

use std::collections::{BTreeMap, HashMap};

use strobe_trace::{OpKind, StrId};

use super::facts::{Facts, evidence};
use super::{Draft, Gain, Rule, count, ns_text, percent};
use crate::Summary;
use crate::categories::Class;
use crate::intervals::{Span, SpanSet};
use crate::roofline::{AmountSource, Bound, DataType, Row, Shape};
use crate::sheet::{Sheet, Unit, Value};
use crate::unified::{Migrations, migrations};

/// Rows of evidence at most.
const ROWS: usize = 10;

/// Durations and counts of ops by name, longest first.
fn by_name(facts: &Facts, keep: impl Fn(usize) -> bool) -> Vec<(StrId, usize, i64)> {
    let ops = &facts.trace.ops;
    let mut names: HashMap<StrId, (usize, i64)> = HashMap::new();
    for op in (0..ops.len()).filter(|&op| keep(op)) {
        let row = names.entry(ops.name[op]).or_default();
        *row = (row.0 + 1, row.1.saturating_add(ops.duration(op)));
    }
    let mut rows: Vec<_> = names.into_iter().map(|(name, (ops, ns))| (name, ops, ns)).collect();
    rows.sort_by_key(|&(name, _, ns)| (std::cmp::Reverse(ns), name));
    rows
}

fn names_table(facts: &Facts, rule: &Rule, keep: impl Fn(usize) -> bool) -> Sheet {
    let columns = [("Ops", Unit::Count), ("Time", Unit::Ns), ("Share of op time", Unit::Share), ("Name", Unit::Text)];
    let mut table = evidence(rule, &columns);
    let whole = facts.op_ns() as f64;
    for (name, ops, ns) in by_name(facts, keep).into_iter().take(ROWS) {
        table.push([ops.into(), ns.into(), (ns as f64 / whole).into(), facts.trace.text(name).into()]);
    }
    table
}

pub(super) fn copies_dominate(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let exposed: i64 = facts.devices.iter().map(|d| d.busy - d.compute - d.exposed).sum();
    let whole = facts.span_ns();
    if exposed <= 0 || (exposed as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let ops = &facts.trace.ops;
    let mut kinds: BTreeMap<&str, (usize, u64, i64)> = BTreeMap::new();
    for op in (0..ops.len()).filter(|&op| facts.context.categories.of_op(op).class == Class::Memory) {
        let row = kinds.entry(facts.trace.op_name(op)).or_default();
        *row = (row.0 + 1, row.1.saturating_add(ops.bytes[op]), row.2.saturating_add(ops.duration(op)));
    }
    let mut rows: Vec<_> = kinds.into_iter().collect();
    rows.sort_by_key(|(_, (_, _, ns))| std::cmp::Reverse(*ns));
    let columns = [
        ("Kind", Unit::Text),
        ("Ops", Unit::Count),
        ("Bytes", Unit::Bytes),
        ("Time", Unit::Ns),
        ("Rate", Unit::BytesPerS),
    ];
    let mut table = evidence(rule, &columns);
    for (name, (ops, bytes, ns)) in rows.iter().take(ROWS) {
        let rate = if *ns > 0 { Value::from(*bytes as f64 / (*ns as f64 * 1e-9)) } else { Value::Unknown };
        table.push([(*name).into(), (*ops).into(), (*bytes).into(), (*ns).into(), rate]);
    }
    let (most, (_, bytes, ns)) = rows.first()?;
    let sentence = format!(
        "copies and fills take {} that no kernel hides, {} of the {} {}; most is {most} at {:.1} GB/s",
        ns_text(exposed),
        percent(exposed, whole),
        ns_text(whole),
        facts.span_words(),
        *bytes as f64 / (*ns).max(1) as f64,
    );
    Some(Draft { sentence, gain: Some(Gain::new(exposed, whole, facts.span_words())), evidence: table })
}

/// Pages that move because somebody touches them: prefetches are the remedy, not the problem.
pub(super) fn unified_memory(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let groups: Vec<_> = migrations(facts.context).into_iter().filter(|group| !group.were_asked_for()).collect();
    let mut devices: BTreeMap<u32, Vec<Span>> = BTreeMap::new();
    for group in &groups {
        devices.entry(group.device).or_default().extend_from_slice(group.spans.spans());
    }
    let moving = devices.into_values().map(|spans| SpanSet::union_of(spans).length()).fold(0, i64::saturating_add);
    let whole = facts.span_ns();
    if moving == 0 || (moving as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let columns = [
        ("Direction", Unit::Text),
        ("Cause", Unit::Text),
        ("Migrations", Unit::Count),
        ("Bytes", Unit::Bytes),
        ("Time", Unit::Ns),
        ("Beside kernels", Unit::Ns),
    ];
    let mut table = evidence(rule, &columns);
    for group in groups.iter().take(ROWS) {
        let figures = [group.count.into(), group.bytes.into(), group.time_ns.into(), group.beside_kernels_ns.into()];
        table.push([group.name().into(), group.why().into()].into_iter().chain(figures));
    }
    let sum = |of: fn(&Migrations) -> u64| groups.iter().map(of).fold(0, u64::saturating_add);
    let beside = groups.iter().map(|group| group.beside_kernels_ns).fold(0, i64::saturating_add);
    let sentence = format!(
        "pages of unified memory move {} times because they are touched, {:.1} MB in {} ({} of the {}); {} of it beside \
         kernels, which wait where they need the page",
        count(sum(|group| group.count as u64) as usize),
        sum(|group| group.bytes) as f64 / 1e6,
        ns_text(moving),
        percent(moving, whole),
        facts.span_words(),
        ns_text(beside),
    );
    Some(Draft { sentence, gain: Some(Gain::new(moving, whole, facts.span_words())), evidence: table })
}

pub(super) fn exposed_communication(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let exposed: i64 = facts.devices.iter().map(|d| d.exposed).sum();
    let all: i64 = facts.devices.iter().map(|d| d.communication).sum();
    let whole = facts.span_ns();
    if exposed <= 0 || (exposed as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let communicates = |op: usize| facts.context.categories.of_op(op).class == Class::Communication;
    let sentence = format!(
        "communication takes {}, of which {} run without any compute beside it: {} of the {} {}",
        ns_text(all),
        ns_text(exposed),
        percent(exposed, whole),
        ns_text(whole),
        facts.span_words(),
    );
    let evidence = names_table(facts, rule, communicates);
    Some(Draft { sentence, gain: Some(Gain::new(exposed, whole, facts.span_words())), evidence })
}

pub(super) fn imbalance(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let longest_span = facts.devices.iter().map(|d| d.span).max()?;
    let comparable = |span: i64| span as f64 >= rule.limit("comparable_span") * longest_span as f64;
    let devices: Vec<_> = facts.devices.iter().filter(|d| d.compute > 0 && comparable(d.span)).collect();
    let (least, most) = (devices.iter().map(|d| d.compute).min()?, devices.iter().map(|d| d.compute).max()?);
    let mean = devices.iter().map(|d| d.compute).sum::<i64>() / devices.len() as i64;
    let gain = most - mean;
    let speaks = devices.len() > 1
        && (most - least) as f64 >= rule.limit("min_difference") * most as f64
        && gain as f64 >= rule.limit("min_share") * longest_span as f64;
    if !speaks {
        return None;
    }
    let columns = [
        ("Device", Unit::Text),
        ("Compute", Unit::Ns),
        ("Communication", Unit::Ns),
        ("Idle", Unit::Ns),
        ("Span", Unit::Ns),
    ];
    let mut table = evidence(rule, &columns);
    for device in &devices {
        let known = facts.trace.devices.get(device.device as usize);
        let rank = facts.context.ranks().of_device(device.device);
        let ordinal = known.map_or(device.device, |d| d.ordinal);
        let label = rank.map_or(format!("GPU {ordinal}"), |rank| format!("rank {rank}, GPU {ordinal}"));
        table.push([
            label.into(),
            device.compute.into(),
            device.communication.into(),
            device.idle().into(),
            device.span.into(),
        ]);
    }
    let sentence = format!(
        "of {} devices the busiest computes for {}, the least busy for {}; evenly shared it would be {} each",
        devices.len(),
        ns_text(most),
        ns_text(least),
        ns_text(mean),
    );
    let gain = Gain::new(gain, longest_span, "span of the longest device");
    Some(Draft { sentence, gain: Some(gain), evidence: table })
}

/// Categories whose kernels could be part of others.
const FUSIBLE: [&str; 10] = [
    "elementwise",
    "copy",
    "norm",
    "activation",
    "rope",
    "reduce",
    "softmax",
    "quantize",
    "gather_scatter",
    "embedding",
];

pub(super) fn tiny_kernels(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let ops = &facts.trace.ops;
    let short = rule.limit_us("short_us");
    let kernels: Vec<usize> = (0..ops.len()).filter(|&op| ops.kind[op] == OpKind::Kernel).collect();
    let tiny: Vec<usize> = kernels.iter().copied().filter(|&op| ops.duration(op) < short).collect();
    let fusible = |op: usize| {
        ops.kind[op] == OpKind::Kernel
            && ops.duration(op) < short
            && FUSIBLE.contains(&facts.context.categories.of_op(op).name.as_str())
    };
    let gain: i64 = tiny.iter().filter(|&&op| fusible(op)).map(|&op| facts.context.own_ns(op)).sum();
    let whole = facts.span_ns();
    let speaks = kernels.len() as f64 >= rule.limit("min_kernels")
        && tiny.len() as f64 >= rule.limit("min_share_of_kernels") * kernels.len() as f64
        && gain as f64 >= rule.limit("min_share") * whole as f64;
    if !speaks {
        return None;
    }
    let median = Summary::of(tiny.iter().map(|&op| ops.duration(op) as f64))?.median as i64;
    let sentence = format!(
        "{} of {} kernels run for less than {} ({} median); those that could be part of their neighbours take {} of \
         kernel time, {} of the {} {}",
        count(tiny.len()),
        count(kernels.len()),
        ns_text(short),
        ns_text(median),
        ns_text(gain),
        percent(gain, whole),
        ns_text(whole),
        facts.span_words(),
    );
    let gain = Some(Gain::new(gain, whole, facts.span_words()));
    Some(Draft { sentence, gain, evidence: names_table(facts, rule, fusible) })
}

fn rows_table<'r>(rule: &Rule, rows: impl Iterator<Item = &'r Row>) -> Sheet {
    let columns = [
        ("Op", Unit::Text),
        ("Shape", Unit::Text),
        ("Calls", Unit::Count),
        ("Time", Unit::Ns),
        ("FLOP/s", Unit::FlopsPerS),
        ("Of roofline", Unit::Share),
        ("Kernel", Unit::Text),
    ];
    let mut table = evidence(rule, &columns);
    for row in rows.take(ROWS) {
        table.push([
            row.op.as_str().into(),
            row.shape.to_string().into(),
            row.calls.into(),
            row.time_ns.into(),
            row.flops_per_s().into(),
            row.share().into(),
            row.kernel.as_str().into(),
        ]);
    }
    table
}

/// The time that gains of kernels are a part of: the spans of GPUs, or the time of ops for an engine on the CPU.
fn kernel_whole(facts: &Facts) -> (i64, String) {
    match facts.span_ns() {
        0 => (facts.op_ns(), "op time".to_owned()),
        span => (span, facts.span_words()),
    }
}

/// What an engine recorded has m, n and k for attention too: there the category decides.
fn is_gemm(row: &&Row) -> bool {
    let recorded_otherwise = row.source == AmountSource::Recorded && !row.category.contains("gemm");
    matches!(row.shape, Shape::Gemm { m: 1.., n: 1.., k: 1.., .. }) && !recorded_otherwise
}

/// Whether an op comes so near its limit that this limit is what holds it: far below it something else does.
fn reaches(row: &Row, rule: &Rule) -> bool {
    row.share().is_some_and(|share| share >= rule.limit("least_of_roofline"))
}

pub(super) fn gemm_below_roofline(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let below = |row: &&Row| row.share().is_some_and(|share| share < rule.limit("below"));
    let rows: Vec<&Row> = facts.roofline.rows.iter().filter(is_gemm).filter(below).collect();
    let time: i64 = rows.iter().map(|r| r.time_ns).sum();
    let least: f64 = rows.iter().filter_map(|r| r.least_ns).sum();
    let gain = time - least as i64;
    let (whole, words) = kernel_whole(facts);
    if rows.is_empty() || (gain as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let sentence = format!(
        "GEMMs of {} shapes run below {:.0} % of the roofline: they take {} where the hardware needs {} at least; {} of \
         the {} {words}",
        rows.len(),
        100.0 * rule.limit("below"),
        ns_text(time),
        ns_text(least as i64),
        percent(gain, whole),
        ns_text(whole),
    );
    Some(Draft { sentence, gain: Some(Gain::new(gain, whole, words)), evidence: rows_table(rule, rows.into_iter()) })
}

pub(super) fn few_rows(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let few = |row: &&Row| {
        matches!(row.shape, Shape::Gemm { m, .. } if m as f64 <= rule.limit("max_rows"))
            && row.bound == Some(Bound::Memory)
            && reaches(row, rule)
    };
    let rows: Vec<&Row> = facts.roofline.rows.iter().filter(is_gemm).filter(few).collect();
    let time: i64 = rows.iter().map(|r| r.time_ns).sum();
    let whole = facts.roofline.total_ns;
    if rows.is_empty() || (time as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let least: f64 = rows.iter().filter_map(|r| r.least_ns).sum();
    let sentence = format!(
        "GEMMs with at most {:.0} rows take {} or {} of kernel time and are bound by reading their weights ({:.0} % of \
         what memory allows): more rows per step would take hardly longer",
        rule.limit("max_rows"),
        ns_text(time),
        percent(time, whole),
        100.0 * least / time as f64,
    );
    Some(Draft { sentence, gain: None, evidence: rows_table(rule, rows.into_iter()) })
}

pub(super) fn fp32_gemm(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let peaks = facts.roofline.peaks.iter().find(|p| !p.by_type.is_empty())?;
    let slow = peaks.flops_per_s(Some(DataType::Fp32))?;
    let fast = peaks.flops_per_s(Some(DataType::Tf32)).or(peaks.flops_per_s(Some(DataType::Fp16)))?;
    let fp32 = |row: &&Row| {
        row.data_type == Some(DataType::Fp32)
            && row.bound == Some(Bound::Compute)
            && reaches(row, rule)
            && row.share().is_some_and(|s| s <= 1.0)
    };
    let rows: Vec<&Row> = facts.roofline.rows.iter().filter(is_gemm).filter(fp32).collect();
    let time: i64 = rows.iter().map(|r| r.time_ns).sum();
    let gain = (time as f64 * (1.0 - slow / fast)) as i64;
    let whole = facts.span_ns();
    if rows.is_empty() || fast <= slow || (gain as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let sentence = format!(
        "GEMMs in fp32 take {}, though {} is {:.0} times faster on its tensor cores: {} of the {} {}",
        ns_text(time),
        peaks.device,
        fast / slow,
        percent(gain, whole),
        ns_text(whole),
        facts.span_words(),
    );
    let gain = Some(Gain::new(gain, whole, facts.span_words()));
    Some(Draft { sentence, gain, evidence: rows_table(rule, rows.into_iter()) })
}

pub(super) fn unfused_attention(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let ops = &facts.trace.ops;
    let between = rule.limit("between") as usize;
    // Per stream the ops since the last GEMM, and whether a softmax is among them.
    let mut open: HashMap<(u32, u32, u32), (Vec<usize>, bool)> = HashMap::new();
    let mut chains: Vec<usize> = Vec::new();
    let mut found = 0usize;
    for op in (0..ops.len()).filter(|&op| !ops.kind[op].is_memory()) {
        let stream = (ops.process[op], ops.device[op], ops.stream[op]);
        match facts.context.categories.of_op(op).name.as_str() {
            "gemm" => {
                if let Some((inside, true)) = open.insert(stream, (Vec::new(), false)) {
                    found += 1;
                    chains.extend(inside);
                }
            }
            category => {
                let Some((inside, softmax)) = open.get_mut(&stream) else { continue };
                inside.push(op);
                *softmax |= category == "softmax";
                if inside.len() > between {
                    open.remove(&stream);
                }
            }
        }
    }
    let gain: i64 = chains.iter().map(|&op| facts.context.own_ns(op)).sum();
    let (whole, words) = kernel_whole(facts);
    if (found as f64) < rule.limit("min_chains") || (gain as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let members: std::collections::HashSet<usize> = chains.into_iter().collect();
    let sentence = format!(
        "{} times a softmax stands between two GEMMs with its helpers: attention in pieces, whose scores go through \
         memory; the pieces between the GEMMs take {}, {} of the {} {words}",
        count(found),
        ns_text(gain),
        percent(gain, whole),
        ns_text(whole),
    );
    let evidence = names_table(facts, rule, |op| members.contains(&op));
    Some(Draft { sentence, gain: Some(Gain::new(gain, whole, words)), evidence })
}

pub(super) fn attention_share(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let names = ["attention", "linear_attention"];
    let (time, ops) = facts.category(&names);
    let whole = facts.op_ns();
    if time == 0 || (time as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let sentence = format!(
        "attention takes {} in {} ops: {} of the op time ({})",
        ns_text(time),
        count(ops),
        percent(time, whole),
        ns_text(whole),
    );
    let is_attention = |op: usize| names.contains(&facts.context.categories.of_op(op).name.as_str());
    Some(Draft { sentence, gain: None, evidence: names_table(facts, rule, is_attention) })
}

pub(super) fn elementwise_share(facts: &Facts, rule: &Rule) -> Option<Draft> {
    let names = ["elementwise", "copy"];
    let (time, ops) = facts.category(&names);
    let enough = ops as f64 >= rule.limit("min_ops") && time as f64 >= rule.limit("min_share") * facts.op_ns() as f64;
    if !enough {
        return None;
    }
    let (whole, words) = kernel_whole(facts);
    if (time as f64) < rule.limit("min_gain") * whole as f64 {
        return None;
    }
    let sentence = format!(
        "elementwise kernels and layout copies take {} in {} ops: {} of the op time, {} of the {} {words}",
        ns_text(time),
        count(ops),
        percent(time, facts.op_ns()),
        percent(time, whole),
        ns_text(whole),
    );
    let fusible = |op: usize| names.contains(&facts.context.categories.of_op(op).name.as_str());
    let evidence = names_table(facts, rule, fusible);
    Some(Draft { sentence, gain: Some(Gain::new(time, whole, words)), evidence })
}
