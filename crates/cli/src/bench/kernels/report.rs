//! The result as a table, CSV, JSON and plots.

use std::path::Path;

use anyhow::Result;
use serde_json::{Value as Json, json};
use strobe_analyze::sheet::{Column, Report, Role, Sheet, Unit, Value};
use strobe_report::svg::{self, BarChart, BarSeries, Svg};

use super::cases::{Kind, Op, Shape};
use super::{Ceiling, Line, Outcome, Times};
use crate::device::Device;
use crate::{run_dir, sheets};

const JSON_FILE: &str = "kernels.json";
const CSV_FILE: &str = "kernels.csv";
const ROOFLINE_FILE: &str = "roofline.svg";
const ATTENTION_FILE: &str = "attention.svg";

/// Files by which a directory of measurements is known.
pub(super) const MARKS: [&str; 2] = [JSON_FILE, CSV_FILE];

/// The shortest time that the machine's ceilings allow, and which of them it is.
struct Floor {
    seconds: f64,
    bound: &'static str,
}

impl Outcome {
    fn floor(&self, line: &Line) -> Floor {
        let bandwidth = match line.measured.ceiling {
            Ceiling::Read => self.ceilings.read_bytes_per_s,
            Ceiling::Copy => self.ceilings.copy_bytes_per_s,
        };
        let memory = line.measured.bytes / bandwidth;
        // On a CPU attention computes in f32 whatever its cache holds, but for bfloat16 where that is multiplied in pairs; the
        // peak of bfloat16 is the one of f32 elsewhere.
        let kind = match (line.case.op, line.case.dtype) {
            (_, None) => Kind::Float32,
            (Op::Attention, Some(kind)) if self.device == Device::Cpu && kind != Kind::Bfloat16 => Kind::Float32,
            (_, Some(kind)) => kind,
        };
        let compute = line.measured.flops.zip(self.ceilings.ops_per_s(kind)).map_or(0.0, |(flops, peak)| flops / peak);
        match compute > memory {
            true => Floor { seconds: compute, bound: "compute" },
            false => Floor { seconds: memory, bound: "memory" },
        }
    }

    fn share(&self, line: &Line) -> f64 {
        self.floor(line).seconds / line.measured.times.median()
    }

    /// Kernels of an op that were measured both ways.
    fn fused_and_naive(&self, op: Op) -> impl Iterator<Item = (&Line, &Times, f64)> {
        self.lines.iter().filter(move |line| line.case.op == op).filter_map(|line| {
            let naive = line.measured.naive.as_ref()?;
            Some((line, naive, naive.median() / line.measured.times.median()))
        })
    }
}

fn dtype(line: &Line) -> Value {
    line.case.dtype.map(|kind| kind.name()).into()
}

fn ns(seconds: f64) -> Value {
    Value::Int((seconds * 1e9).round() as i64)
}

fn sheet(outcome: &Outcome) -> Sheet {
    let columns = [
        Column::new("op", Unit::Text),
        Column::new("kernel", Unit::Text),
        Column::new("shape", Unit::Text),
        Column::new("type", Unit::Text),
        Column::new("time", Unit::Ns),
        Column::new("Min", Unit::Ns).role(Role::Lowest),
        Column::new("Max", Unit::Ns).role(Role::Highest),
        Column::new("FLOP/s", Unit::FlopsPerS),
        Column::new("B/s", Unit::BytesPerS),
        Column::new("bound", Unit::Text),
        Column::new("of roofline", Unit::Share),
        Column::new("error", Unit::Text),
        Column::new("verdict", Unit::Text),
    ];
    let versus = [Column::new("torch", Unit::Ns), Column::new("torch / strobe", Unit::Number)];
    let scaling = [Column::new("one thread", Unit::Ns), Column::new("scaling", Unit::Number)];
    let with_scaling = outcome.lines.iter().any(|line| line.measured.one_thread.is_some());
    let with_torch = outcome.lines.iter().any(|line| line.torch.is_some());
    let columns = columns.into_iter().chain(scaling.into_iter().filter(|_| with_scaling));
    let columns = columns.chain(versus.into_iter().filter(|_| with_torch));
    let mut sheet = Sheet::new("kernels", columns);
    for line in &outcome.lines {
        let measured = &line.measured;
        let (times, median) = (&measured.times, measured.times.median());
        let mut row = vec![
            line.case.op.name().into(),
            line.case.kernel.as_str().into(),
            line.case.shape_text().into(),
            dtype(line),
            ns(median),
            ns(times.min()),
            ns(times.max()),
            measured.flops.map(|flops| flops / median).into(),
            (measured.bytes / median).into(),
            outcome.floor(line).bound.into(),
            outcome.share(line).into(),
            format!("{:.0e}", measured.error).into(),
            if measured.passes() { "pass" } else { "FAILED" }.into(),
        ];
        if with_scaling {
            let alone = measured.one_thread.as_ref().map(Times::median);
            row.extend([alone.map_or(Value::Unknown, ns), measured.scaling().into()]);
        }
        if with_torch {
            let torch = line.torch_times().map(Times::median);
            row.extend([torch.map_or(Value::Unknown, ns), torch.map(|torch| torch / median).into()]);
        }
        sheet.push(row);
    }
    sheet
}

impl Line {
    fn torch_times(&self) -> Option<&Times> {
        self.torch.as_ref()?.as_ref().ok()
    }
}

fn fused_sheet(outcome: &Outcome, op: Op, title: &str) -> Sheet {
    let columns = [
        Column::new("kernel", Unit::Text),
        Column::new("shape", Unit::Text),
        Column::new("type", Unit::Text),
        Column::new("naive", Unit::Ns),
        Column::new("fused", Unit::Ns),
        Column::new("fused is faster by", Unit::Number).role(Role::How),
    ];
    let mut sheet = Sheet::new(op.name(), columns).title(title);
    for (line, naive, gain) in outcome.fused_and_naive(op) {
        sheet.push([
            line.case.kernel.as_str().into(),
            line.case.shape_text().into(),
            dtype(line),
            ns(naive.median()),
            ns(line.measured.times.median()),
            gain.into(),
        ]);
    }
    sheet
}

fn report(outcome: &Outcome) -> Report {
    let machine = &outcome.machine;
    let threads = machine.threads.map(|n| format!(", {n} threads")).unwrap_or_default();
    let tier = machine.simd_tier.as_ref().map(|tier| format!(", {tier}")).unwrap_or_default();
    let name = machine.gpu.as_ref().map_or(&machine.cpu, |gpu| &gpu.name);
    let mut report = Report::new("kernels", format!("Kernels on {name}{tier}{threads}")).sheet(sheet(outcome));
    for (op, title) in [
        (Op::GateUp, "Gate and up projections with their activation: fused vs unfused (GEMM, then an op over memory)"),
        (Op::Attention, "Attention: fused vs unfused (scores, softmax and values as three ops over memory)"),
    ] {
        let fused = fused_sheet(outcome, op, title);
        if !fused.rows.is_empty() {
            report = report.sheet(fused);
        }
    }
    report.notes = outcome.notes.clone();
    report
}

pub(super) fn text(outcome: &Outcome, width: usize) -> String {
    sheets::text(&report(outcome), width, 0)
}

/// The main table alone, so that every line has the same columns.
pub(super) fn csv(outcome: &Outcome) -> String {
    sheets::csv(&[Report::new("kernels", "").sheet(sheet(outcome))])
}

pub(super) fn json(outcome: &Outcome) -> Json {
    let kernels = outcome.lines.iter().map(|line| {
        let (measured, floor) = (&line.measured, outcome.floor(line));
        let median = measured.times.median();
        json!({
            "op": line.case.op,
            "kernel": line.case.kernel,
            "dtype": line.case.dtype,
            "shape": line.case.shape,
            "time_s": spread(&measured.times),
            "flops": measured.flops,
            "bytes": measured.bytes,
            "flops_per_s": measured.flops.map(|flops| flops / median),
            "bytes_per_s": measured.bytes / median,
            "bound_by": floor.bound,
            "roofline_share": floor.seconds / median,
            "error": measured.error,
            "tolerance": measured.tolerance,
            "passes": measured.passes(),
            "naive_time_s": measured.naive.as_ref().map(spread),
            "fused_speedup": measured.naive.as_ref().map(|naive| naive.median() / median),
            "one_thread_time_s": measured.one_thread.as_ref().map(spread),
            "scaling": measured.scaling(),
            "torch_time_s": line.torch_times().map(spread),
            "torch_over_strobe": line.torch_times().map(|torch| torch.median() / median),
        })
    });
    let ops = outcome.ceilings.ops.iter().map(|(kind, ops)| (kind.name().to_string(), json!(ops)));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "command": super::command_line(),
        "device": outcome.device.to_string(),
        "machine": outcome.machine,
        "peaks": {
            "ops_per_s": ops.collect::<serde_json::Map<_, _>>(),
            "read_bytes_per_s": outcome.ceilings.read_bytes_per_s,
            "copy_bytes_per_s": outcome.ceilings.copy_bytes_per_s,
        },
        "kernels": kernels.collect::<Vec<_>>(),
        "passes": outcome.lines.iter().all(|line| line.measured.passes()),
        "notes": outcome.notes,
    })
}

fn spread(times: &Times) -> Json {
    json!({"median": times.median(), "min": times.min(), "max": times.max(), "runs": times.runs()})
}

/// Files of a directory; plots only where there is something to draw.
pub(super) fn write(outcome: &Outcome, dir: &Path) -> Result<()> {
    run_dir::write_whole(&dir.join(JSON_FILE), format!("{:#}\n", json(outcome)).as_bytes())?;
    run_dir::write_whole(&dir.join(CSV_FILE), csv(outcome).as_bytes())?;
    run_dir::write_whole(&dir.join(ROOFLINE_FILE), roofline_plot(outcome).as_str().as_bytes())?;
    if outcome.fused_and_naive(Op::Attention).next().is_some() {
        run_dir::write_whole(&dir.join(ATTENTION_FILE), attention_plot(outcome).as_str().as_bytes())?;
    }
    Ok(())
}

/// Values by group and by series, each in the order in which it first came.
fn grouped(title: &str, unit: svg::Unit, values: impl Iterator<Item = (String, String, f64)>) -> Svg {
    let mut chart = BarChart { title: title.into(), unit, groups: Vec::new(), series: Vec::new() };
    for (group, series, value) in values {
        let at = chart.groups.iter().position(|known| *known == group).unwrap_or_else(|| {
            chart.groups.push(group);
            chart.groups.len() - 1
        });
        let series = match chart.series.iter().position(|known| known.name == series) {
            Some(place) => &mut chart.series[place],
            None => {
                chart.series.push(BarSeries { name: series, ..BarSeries::default() });
                let last = chart.series.len() - 1;
                &mut chart.series[last]
            }
        };
        series.values.resize(series.values.len().max(at + 1), None);
        series.values[at] = Some(value);
    }
    svg::bars(&chart)
}

/// Of every kind of kernel the middle share: one bar per type.
fn roofline_plot(outcome: &Outcome) -> Svg {
    let mut shares: Vec<(String, String, Vec<f64>)> = Vec::new();
    for line in &outcome.lines {
        let rows = match line.case.shape {
            Shape::Product { m, .. } if m > 1 => format!(" m={m}"),
            _ => String::new(),
        };
        let group = match line.case.op {
            Op::Attention => line.case.kernel.clone(),
            op => format!("{}{rows}", op.name()),
        };
        // Ops between the products work on activations, which are float32.
        let series = line.case.dtype.unwrap_or(Kind::Float32).name().to_string();
        let share = outcome.share(line);
        match shares.iter_mut().find(|(g, s, _)| *g == group && *s == series) {
            Some((_, _, known)) => known.push(share),
            None => shares.push((group, series, vec![share])),
        }
    }
    let medians = shares.into_iter().map(|(group, series, shares)| (group, series, Times::new(shares).median()));
    grouped("Share of the roofline, median over the shapes", svg::Unit::Share, medians)
}

fn attention_plot(outcome: &Outcome) -> Svg {
    let bars = outcome.fused_and_naive(Op::Attention).map(|(line, _, gain)| {
        let series = line.case.dtype.unwrap_or(Kind::Float32).name().to_string();
        (format!("{} {}", line.case.kernel, line.case.shape_text()), series, gain)
    });
    grouped("Speed-up of fused over unfused attention, by KV cache type", svg::Unit::Plain("x".into()), bars)
}
