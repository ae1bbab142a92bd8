//! The run directory and the single files a user asked for.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use strobe_engine::{EngineConfig, EngineInfo};
use strobe_model::Tokenizer;
use strobe_report::html::Link;
use strobe_trace::export::{self, Format};
use strobe_trace::{Trace, nsys};
use strobe_workload::{RequestRecord, trtllm_requests_with_text};

use super::client::RunData;
use super::experts::{self, ExpertReport};
use super::html;
use super::outcome::Outcome;
use crate::machine::Machine;

use crate::run_writer::Problems;
use crate::{explore, iteration_json, output, recording, run_dir};

/// Files beside or instead of a run directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Files {
    pub report_json: Option<PathBuf>,
    pub request_json: Option<PathBuf>,
    pub iteration_log: Option<PathBuf>,
    pub trace_out: Option<PathBuf>,
}

impl Files {
    /// Find out before the run whether they can be written. They may go into the run directory, which appears first.
    pub(crate) fn check(&self, output_dir: Option<&Path>) -> Result<()> {
        let all = [&self.report_json, &self.request_json, &self.iteration_log, &self.trace_out];
        let outside = |path: &&PathBuf| output_dir.is_none() || path.parent() != output_dir;
        all.into_iter().flatten().filter(outside).try_for_each(|path| run_dir::check_writable(path))
    }
}

/// One JSON object per line and iteration, from the iteration at index `first` on.
pub(crate) fn iteration_lines(run: &RunData, info: &EngineInfo, ranks: usize, first: usize) -> String {
    let mut text = String::new();
    let layers = experts::layers_of(info);
    let counts = experts::counts(info, run, &layers, ranks);
    for (index, record) in run.iterations.iter().enumerate().skip(first) {
        let decisions = run.decisions_of(record);
        let mut line = iteration_json::to_json(record, &info.limits, decisions);
        if let Some(counts) = &counts {
            line["strobe"]["experts"] = experts::iteration_json(counts, index);
        }
        if info.perfect_router.is_some() {
            line["strobe"]["perfectRouter"] = json!(experts::WRONG);
        }
        text.push_str(&line.to_string());
        text.push('\n');
    }
    text
}

/// One JSON object per line and request.
pub(crate) fn request_lines<'a>(
    records: impl IntoIterator<Item = &'a RequestRecord>,
    info: &EngineInfo,
) -> Result<String> {
    let mut text = String::new();
    for record in records {
        let mut line = serde_json::to_value(record).context("a request record can't be written as JSON")?;
        if info.perfect_router.is_some() {
            line["perfect_router"] = json!(experts::WRONG);
        }
        text.push_str(&line.to_string());
        text.push('\n');
    }
    Ok(text)
}

/// What `run.json` says, without how far the run came.
pub(crate) struct About<'a> {
    pub info: &'a EngineInfo,
    pub config: &'a EngineConfig,
    pub engine_dir: Option<&'a Path>,
    pub machine: &'a Machine,
    pub dataset: Option<&'a str>,
    pub command: &'a str,
    pub arrival: &'a str,
}

impl About<'_> {
    pub(crate) fn to_json(&self) -> Value {
        let mut run = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "command": self.command,
            "started_utc_ns": self.info.clock.utc_ns(),
            "engine": self.config.to_json(),
            "engine_dir": self.engine_dir.map(|dir| dir.display().to_string()),
            "dataset": self.dataset,
            "arrival": self.arrival,
            "machine": self.machine,
            "ranks": 1,
        });
        if let Some(balance) = &self.info.perfect_router {
            run["perfect_router"] = experts::plan_json(balance);
        }
        run
    }
}

/// Write into a run directory what is only known at the end: the trace and the reports.
pub(crate) fn results(outcome: &Outcome, report: &Value, dir: &Path, problems: &mut Problems) {
    let file = |name: &str| dir.join(name);
    // The smallest first: it is the likeliest to fit.
    problems.keep(run_dir::write_whole(&file(run_dir::REPORT_JSON), format!("{report:#}\n").as_bytes()));
    let mut trace_page = false;
    if let Some(trace) = &outcome.trace {
        problems.keep(nsys::write(trace, &file(run_dir::TRACE)).map_err(Into::into));
        let links = vec![Link::new("Report of the run", run_dir::REPORT_HTML)];
        let page = explore::trace_page(&recording::context(trace), links);
        trace_page = problems.keep(run_dir::write_whole(&file(run_dir::TRACE_HTML), page.as_bytes()));
    }
    if let Some(report) = ExpertReport::of(outcome) {
        for (ending, content) in report.plots() {
            problems.keep(run_dir::write_whole(&file(&format!("{}.{ending}", experts::HEAT_MAP)), &content));
        }
    }
    problems
        .keep(run_dir::write_whole(&file(run_dir::REPORT_HTML), html::page(outcome, report, trace_page).as_bytes()));
}

/// Write the single files; one that fails does not stop the others.
pub(crate) fn single_files(
    outcome: &Outcome,
    report: &Value,
    files: &Files,
    tokenizer: Option<&Tokenizer>,
    problems: &mut Problems,
) {
    if let Some(path) = &files.report_json {
        problems.keep(run_dir::write_whole(path, format!("{report:#}\n").as_bytes()));
    }
    if let Some(path) = &files.request_json {
        let decode = |r: &RequestRecord| tokenizer.and_then(|t| t.decode(&r.output_ids).ok());
        let mut requests = trtllm_requests_with_text(&outcome.run.records, &decode);
        if outcome.info.perfect_router.is_some() {
            let all = requests.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut);
            all.for_each(|request| drop(request.insert("perfect_router".into(), json!(experts::WRONG))));
        }
        problems.keep(run_dir::write_whole(path, format!("{requests:#}\n").as_bytes()));
    }
    if let Some(path) = &files.iteration_log {
        let lines = iteration_lines(&outcome.run, &outcome.info, outcome.assumed_ranks, 0);
        problems.keep(run_dir::write_whole(path, lines.as_bytes()));
    }
    match (&files.trace_out, &outcome.trace) {
        (Some(path), Some(trace)) => drop(problems.keep(chrome_traces(trace, path))),
        (Some(path), None) => output::warn(&format!("{} was not written: nothing was recorded", path.display())),
        (None, _) => {}
    }
}

/// One Chrome trace per window; a single window gets the name as it was given.
fn chrome_traces(trace: &Trace, path: &Path) -> Result<()> {
    let windows: Vec<u32> = {
        let mut seen: Vec<_> = trace.iterations.iter().map(|i| i.window).collect();
        seen.dedup();
        seen
    };
    if windows.len() <= 1 {
        export::write(trace, Format::ChromeJson, path)?;
        return Ok(());
    }
    for window in windows {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let extension = path.extension().map_or("json".into(), |e| e.to_string_lossy());
        let name = format!("{stem}-window-{window}-rank-0.{extension}");
        export::write(&window_of(trace, window), Format::ChromeJson, &path.with_file_name(name))?;
    }
    Ok(())
}

/// What was recorded in one window.
fn window_of(trace: &Trace, window: u32) -> Trace {
    let mut part = trace.clone();
    part.iterations.retain(|i| i.window == window);
    let inside: std::collections::HashSet<u64> = part.iterations.iter().map(|i| i.iter).collect();
    let kept = |iterations: &[u32]| -> Vec<u32> {
        let rows = iterations.iter().enumerate().filter(|(_, iteration)| inside.contains(&u64::from(**iteration)));
        rows.map(|(row, _)| row as u32).collect()
    };
    part.ops.reorder(&kept(&trace.ops.iteration));
    part.ranges.reorder(&kept(&trace.ranges.iteration));
    part
}
