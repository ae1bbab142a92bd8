//! What a comparison knows of run directories: figures, iterations by batch, and what the machine did meanwhile.

use std::path::Path;

use anyhow::Result;
use serde_json::Value;
use strobe_analyze::compare::runs::{Cell, Disturbance, Metric, RunFacts, RunWork};
use strobe_engine::HostReadings;

use crate::bench::outcome::{OUTPUT_THROUGHPUT, RepeatFigures};
use crate::run_dir::{self, RunDir};

/// The figure that decides where requests arrive at a rate, which fixes throughput.
const REQUEST_LATENCY: &str = "Average request latency (ms)";

/// Figures of a report in the words of a sentence: name, unit, whether more is better. Shares of limits are left out: they
/// follow from times and from what the machine showed around the run.
const METRICS: [(&str, &str, bool); 8] = [
    (OUTPUT_THROUGHPUT, "output tok/s", true),
    ("Request throughput (req/sec)", "req/s", true),
    ("Total latency (ms)", "ms in all", false),
    (REQUEST_LATENCY, "ms average request latency", false),
    ("Average TTFT (ms)", "ms average TTFT", false),
    ("Average TPOT (ms)", "ms average TPOT", false),
    ("Prefill iterations (tokens/sec)", "prefill tok/s", true),
    ("Decode at full batch (tokens/sec)", "decode tok/s at full batch", true),
];

/// The figures of a repeat, by the name of their rows.
fn metrics(figures: &RepeatFigures) -> Vec<Metric> {
    let rows = figures.rows();
    let metric = |&(name, unit, higher_is_better): &(&str, &str, bool)| {
        let (_, value) = rows.iter().find(|(row, _)| *row == name)?;
        Some(Metric { name: name.to_owned(), unit: unit.to_owned(), higher_is_better, value: *value })
    };
    METRICS.iter().filter_map(metric).collect()
}

/// A figure by the name that people write: its row in a report, in any case, or a part that only one row has.
pub(crate) fn metric_named(name: &str) -> Option<&'static str> {
    let plain = |text: &str| text.to_lowercase().replace(['_', '-'], " ");
    let wanted = plain(name.trim());
    let rows = || METRICS.iter().map(|(row, ..)| *row);
    let beginning = || rows().find(|row| plain(row).starts_with(&wanted));
    let only = || {
        let mut found = rows().filter(|row| plain(row).contains(&wanted));
        found.next().filter(|_| found.next().is_none())
    };
    if wanted.is_empty() { None } else { beginning().or_else(only) }
}

/// The names of all figures, for errors.
pub(crate) fn metric_names() -> String {
    METRICS.map(|(row, ..)| row.split(" (").next().unwrap_or(row)).join(", ")
}

/// What the machine did to a run, where it did too much.
fn disturbance(host: &HostReadings) -> Option<Disturbance> {
    let reason = host.disturbance()?;
    let of_wall = |ms: Option<f64>| ms.map(|ms| ms / host.wall_ms);
    let waited = of_wall(host.cpu_wait_max_ms).filter(|_| !host.oversubscribed());
    let shares = [waited, host.steal_share, of_wall(host.throttled_ms)];
    let share = shares.into_iter().flatten().filter(|share| share.is_finite()).fold(0.0, f64::max);
    Some(Disturbance { reason, share })
}

/// A run directory as a comparison sees it.
pub(crate) struct KnownRun {
    /// Its runs: every repeat, and one that ended early.
    pub runs: Vec<RunFacts>,
    /// The figure that decides.
    pub metric: Option<&'static str>,
    /// What ran: `run.json`.
    pub about: Value,
    /// Its duration in seconds, the mean of its repeats.
    pub seconds: Option<f64>,
}

/// Reads a run directory as process `process` of its side.
pub(crate) fn known_run(path: &Path, process: usize) -> Result<KnownRun> {
    let dir = RunDir::open(path)?;
    let name = path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned());
    let about = dir.run.clone();
    let report = dir.report.as_ref();
    let number = |pointer: &str| report.and_then(|report| report.pointer(pointer)).and_then(Value::as_f64);
    let requests = number("/request_info/num_requests");
    let work = requests.map(|requests| RunWork {
        requests: requests as u64,
        input_tokens: requests * number("/request_info/avg_input_length").unwrap_or(0.0),
        output_tokens: requests * number("/request_info/avg_output_length").unwrap_or(0.0),
    });
    let open_loop =
        about.get("arrival").and_then(Value::as_str).is_some_and(|arrival| arrival.starts_with("open loop"));
    // Runs of an earlier version have no iterations by batch in their report, but in their log.
    let logged = || -> Result<Vec<Cell>> {
        if !dir.file(run_dir::ITERATIONS).is_file() {
            return Ok(Vec::new());
        }
        let of = |i: &run_dir::LoggedIteration| {
            let i = &i.iteration;
            (i.context_tokens, i.generation_requests, i.end.saturating_sub(i.start) as f64)
        };
        Ok(Cell::group(dir.iterations()?.iter().map(of)))
    };
    // Only what was measured around this run says in what state the machine was.
    let measured = report.and_then(|report| report.pointer("/strobe/peaks/bandwidth_measured")).and_then(Value::as_str);
    let of_report =
        measured.filter(|how| how.starts_with("right before")).and_then(|_| number("/strobe/peaks/read_bytes_per_s"));
    let of_report: Vec<f64> = of_report.into_iter().collect();
    let several = dir.repeats.len() > 1;
    let mut runs = Vec::new();
    for (repeat, figures) in dir.repeats.iter().enumerate() {
        let is_last = repeat + 1 == dir.repeats.len();
        let cells = if figures.cells.is_empty() && is_last { logged()? } else { figures.cells.clone() };
        runs.push(RunFacts {
            name: if several { format!("{name}, repeat {}", repeat + 1) } else { name.clone() },
            process,
            started_ns: about.get("started_utc_ns").and_then(Value::as_u64),
            metrics: metrics(figures),
            cells,
            work,
            disturbed: figures.host.as_ref().and_then(disturbance),
            bandwidth: figures.bandwidth_around.map_or_else(|| of_report.clone(), Vec::from),
        });
    }
    // Beside finished repeats, iterations of one that ended early say little, and may be those of the last.
    if runs.is_empty() {
        runs.push(RunFacts {
            name: format!("{name}, partial"),
            process,
            started_ns: about.get("started_utc_ns").and_then(Value::as_u64),
            cells: logged()?,
            ..RunFacts::default()
        });
    }
    let seconds: Vec<f64> = dir.repeats.iter().map(|figures| figures.total_latency_ms / 1e3).collect();
    let metric = if open_loop { REQUEST_LATENCY } else { OUTPUT_THROUGHPUT };
    Ok(KnownRun { runs, metric: Some(metric), about, seconds: strobe_stats::mean(&seconds) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_named_as_people_write_them() {
        assert_eq!(metric_named("output throughput"), Some(OUTPUT_THROUGHPUT));
        assert_eq!(metric_named("Average_TTFT"), Some("Average TTFT (ms)"));
        assert_eq!(metric_named("tpot"), Some("Average TPOT (ms)"));
        assert_eq!((metric_named("goodness"), metric_named("throughput"), metric_named("")), (None, None, None));
        assert!(metric_names().contains("Average TPOT"));
    }
}
