//! The roofline as tables.

use super::{Beyond, Bound, DataType, DevicePeaks};
use crate::Context;
use crate::host_compute::is_host_only;
use crate::sheet::{Column, Report, Sheet, Unit, Value};

/// Rows that each table shows at most.
const ROWS: usize = 60;

/// The roofline as tables: what is known, and the longest of what is not.
pub fn report(context: &Context) -> Report {
    const TITLE: &str = "Roofline: % of the hardware's limit per op";
    let result = context.roofline();
    if result.total_ns == 0 {
        return Report::absent("roofline", TITLE, "the trace holds no kernel and no operator");
    }
    if result.rows.is_empty() {
        let why = "no op has recorded amounts, an operator with dimensions around its launch, or dimensions in its \
                   name; record shapes (PyTorch: profile(record_shapes=True)); kernels of a replayed graph have none";
        return Report::absent("roofline", TITLE, why);
    }
    let host_only = is_host_only(context.trace);
    let share = |ns: i64| Value::from(ns as f64 / result.total_ns as f64);
    let columns = [
        Column::new("Op", Unit::Text),
        Column::new("Shape", Unit::Text),
        Column::new("Type", Unit::Text),
        Column::new("Category", Unit::Text),
        Column::new("Calls", Unit::Count),
        Column::new("Time", Unit::Ns),
        Column::new("Share of op time", Unit::Share),
        Column::new("Share of roofline", Unit::Share),
        Column::new("Bound", Unit::Text),
        Column::new("FLOP/s", Unit::FlopsPerS),
        Column::new("B/s", Unit::BytesPerS),
        Column::new("FLOP/B", Unit::Number),
        Column::new("FLOP", Unit::Number),
        Column::new("Bytes", Unit::Bytes),
        Column::new("From", Unit::Text),
        Column::new("Note", Unit::Text),
        Column::new("Kernel", Unit::Text),
    ];
    let mut known = Sheet::new("known", columns);
    for row in result.rows.iter().take(ROWS) {
        known.push([
            row.op.as_str().into(),
            row.shape.to_string().into(),
            row.data_type.map(DataType::as_str).into(),
            row.category.as_str().into(),
            row.calls.into(),
            row.time_ns.into(),
            share(row.time_ns),
            row.share().into(),
            row.bound.map(Bound::as_str).into(),
            row.flops_per_s().into(),
            row.bytes_per_s().into(),
            row.intensity().into(),
            row.flops.into(),
            row.bytes.into(),
            row.source.as_str().into(),
            row.beyond.map(Beyond::as_str).into(),
            row.kernel.as_str().into(),
        ]);
    }
    let mut report = Report::new("roofline", TITLE).sheet(known);
    if !result.unknown.is_empty() {
        let columns = [
            Column::new("Calls", Unit::Count),
            Column::new("Time", Unit::Ns),
            Column::new("Share of op time", Unit::Share),
            Column::new(if host_only { "Operator" } else { "Kernel" }, Unit::Text),
        ];
        let mut unknown = Sheet::new("unknown", columns).title("Longest of what is not known");
        for (name, calls, ns) in result.unknown.iter().take(20) {
            unknown.push([(*calls).into(), (*ns).into(), share(*ns), name.as_str().into()]);
        }
        report = report.sheet(unknown);
    }
    let not_known = result.unknown.iter().map(|(_, _, ns)| *ns).fold(0, i64::saturating_add);
    let of = match host_only {
        true => "the time of operators on the host",
        false => "the time of ops other than copies, fills and communication (durations, summed)",
    };
    report = report.note(format!(
        "amounts are known for {:.1} % of {of}",
        100.0 * (1.0 - not_known as f64 / result.total_ns as f64)
    ));
    let wrong = result.rows.iter().filter(|row| row.beyond == Some(Beyond::Wrong)).count();
    if wrong > 0 {
        let rows = if wrong == 1 { "1 row is".to_owned() } else { format!("{wrong} rows are") };
        report = report.note(format!(
            "{rows} over the roof and no cache explains it: their amounts or the peaks are wrong, so trust neither"
        ));
    }
    let mut devices: Vec<String> = result.peaks.iter().map(peaks_sentence).collect();
    devices.dedup();
    for device in devices {
        report = report.note(device);
    }
    report.notes.extend(context.own_time_note());
    if result.mask_not_known {
        report = report.note(
            "attention without a recorded mask counts the whole square of scores: with a causal mask it does half of that",
        );
    }
    if result.rows.len() > ROWS {
        report = report.note(format!("{} more rows take less time each", result.rows.len() - ROWS));
    }
    report
}

fn peaks_sentence(peaks: &DevicePeaks) -> String {
    let device = if peaks.device.is_empty() { "a device without a name" } else { &peaks.device };
    let Some(bytes_per_s) = peaks.bytes_per_s else {
        return format!("{device}: its ceilings are not known, so neither is the share of the roofline");
    };
    let mut text = format!("{device}: {:.0} GB/s ({})", bytes_per_s / 1e9, peaks.bandwidth_from);
    match peaks.measured {
        Some(flops) if flops >= 1e13 => text += &format!(", {:.1} TFLOP/s (measured)", flops / 1e12),
        Some(flops) => text += &format!(", {:.1} GFLOP/s (measured)", flops / 1e9),
        None => {
            for (data_type, flops) in &peaks.by_type {
                text += &format!(", {} {:.1} TFLOP/s", data_type.as_str(), flops / 1e12);
            }
        }
    }
    if let Some(ops) = peaks.measured_int8 {
        text += &format!(", int8 {:.1} GOP/s (measured)", ops / 1e9);
    }
    text
}
