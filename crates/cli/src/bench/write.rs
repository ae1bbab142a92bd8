//! The run directory and the single files a user asked for.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use strobe_engine::staged_dir::StagedDir;
use strobe_model::Tokenizer;
use strobe_trace::export::{self, Format};
use strobe_trace::{Trace, nsys};
use strobe_workload::anchor_requests_with_text;

use super::experts::{self, ExpertReport};
use super::html;
use super::outcome::Outcome;
use crate::{explore, output, recording, run_dir};

/// Files beside or instead of a run directory.
#[derive(Clone, Debug, Default)]
pub struct Files {
    pub report_json: Option<PathBuf>,
    pub request_json: Option<PathBuf>,
    pub iteration_log: Option<PathBuf>,
    pub trace_out: Option<PathBuf>,
}

impl Files {
    /// Find out before the run whether they can be written. They may go into the run directory, which appears first.
    pub fn check(&self, output_dir: Option<&Path>) -> Result<()> {
        let all = [&self.report_json, &self.request_json, &self.iteration_log, &self.trace_out];
        let outside = |path: &&PathBuf| output_dir.is_none() || path.parent() != output_dir;
        all.into_iter().flatten().filter(outside).try_for_each(|path| run_dir::check_writable(path))
    }
}

/// One JSON object per line and iteration.
pub fn iteration_lines(outcome: &Outcome) -> String {
    let mut text = String::new();
    let layers = experts::layers_of(&outcome.info);
    let counts = experts::counts(&outcome.info, &outcome.run, &layers, outcome.assumed_ranks);
    for (index, record) in outcome.run.iterations.iter().enumerate() {
        let decisions = outcome.run.decisions_of(record);
        let mut line = record.to_json(&outcome.info.limits, decisions);
        if let Some(counts) = &counts {
            line["strobe"]["experts"] = experts::iteration_json(counts, index);
        }
        if outcome.info.perfect_router.is_some() {
            line["strobe"]["perfectRouter"] = json!(experts::WRONG);
        }
        text.push_str(&line.to_string());
        text.push('\n');
    }
    text
}

/// Write everything into a staged directory and put it in its place.
pub fn run_directory(outcome: &Outcome, report: &Value, staged: StagedDir) -> Result<()> {
    let file = |name: &str| staged.path().join(name);
    let mut run = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "command": outcome.command,
        "started_utc_ns": outcome.info.clock.utc_ns(),
        "partial": outcome.run.partial,
        "engine": outcome.config.to_json(),
        "engine_dir": outcome.engine_dir.as_ref().map(|dir| dir.display().to_string()),
        "dataset": outcome.dataset,
        "arrival": outcome.arrival,
        "machine": outcome.machine,
        "ranks": 1,
    });
    if let Some(balance) = &outcome.info.perfect_router {
        run["perfect_router"] = experts::plan_json(balance);
    }
    run_dir::write_whole(&file(run_dir::RUN), format!("{run:#}\n").as_bytes())?;
    let mut requests = String::new();
    for record in &outcome.run.records {
        let mut line = serde_json::to_value(record).context("a request record can't be written as JSON")?;
        if outcome.info.perfect_router.is_some() {
            line["perfect_router"] = json!(experts::WRONG);
        }
        requests.push_str(&line.to_string());
        requests.push('\n');
    }
    run_dir::write_whole(&file(run_dir::REQUESTS), requests.as_bytes())?;
    run_dir::write_whole(&file(run_dir::ITERATIONS), iteration_lines(outcome).as_bytes())?;
    if let Some(trace) = &outcome.trace {
        nsys::write(trace, &file(run_dir::TRACE))?;
        let page = explore::trace_page(&recording::context(trace));
        run_dir::write_whole(&file(run_dir::TRACE_HTML), page.as_bytes())?;
    }
    if let Some(report) = ExpertReport::of(outcome) {
        for (ending, content) in report.plots() {
            run_dir::write_whole(&file(&format!("{}.{ending}", experts::HEAT_MAP)), &content)?;
        }
    }
    run_dir::write_whole(&file(run_dir::REPORT_HTML), html::page(outcome, report).as_bytes())?;
    run_dir::write_whole(&file(run_dir::REPORT_JSON), format!("{report:#}\n").as_bytes())?;
    staged.commit()?;
    Ok(())
}

/// Write the single files.
pub fn single_files(outcome: &Outcome, report: &Value, files: &Files, tokenizer: Option<&Tokenizer>) -> Result<()> {
    if let Some(path) = &files.report_json {
        run_dir::write_whole(path, format!("{report:#}\n").as_bytes())?;
    }
    if let Some(path) = &files.request_json {
        let decode = |r: &strobe_workload::RequestRecord| tokenizer.and_then(|t| t.decode(&r.output_ids).ok());
        let mut requests = anchor_requests_with_text(&outcome.run.records, &decode);
        if outcome.info.perfect_router.is_some() {
            let all = requests.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut);
            all.for_each(|request| drop(request.insert("perfect_router".into(), json!(experts::WRONG))));
        }
        run_dir::write_whole(path, format!("{requests:#}\n").as_bytes())?;
    }
    if let Some(path) = &files.iteration_log {
        run_dir::write_whole(path, iteration_lines(outcome).as_bytes())?;
    }
    match (&files.trace_out, &outcome.trace) {
        (Some(path), Some(trace)) => chrome_traces(trace, path)?,
        (Some(path), None) => output::warn(&format!("{} was not written: nothing was recorded", path.display())),
        (None, _) => {}
    }
    Ok(())
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
