//! Files that appear whole or not at all, and the names inside a run directory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;
use strobe_trace::{Iteration, RangeKind};

/// What was run, on what, by which version.
pub const RUN: &str = "run.json";
/// One line per request.
pub const REQUESTS: &str = "requests.jsonl";
/// One line per iteration.
pub const ITERATIONS: &str = "iterations.jsonl";
/// Recorded windows in Nsight Systems' export schema.
pub const TRACE: &str = "trace.sqlite";
/// The report for machines.
pub const REPORT_JSON: &str = "report.json";
/// The recorded windows as a page: timeline, iterations, tables.
pub const TRACE_HTML: &str = "trace.html";
/// The report for people.
pub const REPORT_HTML: &str = "report.html";

/// Files by which a run directory is known.
pub const MARKS: [&str; 2] = [RUN, REPORT_JSON];

/// Write beside, then rename.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let name = path.file_name().with_context(|| format!("`{}` does not name a file", path.display()))?;
    let beside = path.with_file_name(format!(".{}.partial-{}", name.to_string_lossy(), std::process::id()));
    let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// Find out before a long run whether a file can be written, and that it is none of those that are read.
pub fn check_output(path: &Path, inputs: &[PathBuf]) -> Result<()> {
    check_not_input(path, inputs)?;
    check_writable(path)
}

/// Refuse to replace what is read. Files are told by device and number, so that links and other spellings are found.
pub fn check_not_input(path: &Path, inputs: &[PathBuf]) -> Result<()> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|m| (m.dev(), m.ino()));
    let Some(output) = identity(path) else { return Ok(()) };
    let files_in = |dir: &PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    for input in inputs {
        let own = files_in(input).filter(|file| file.extension().is_some_and(|e| e != "html"));
        if std::iter::once(input.clone()).chain(own).any(|file| identity(&file) == Some(output)) {
            anyhow::bail!(
                "{} is a trace to be read: writing there would replace it; name another file",
                path.display()
            );
        }
    }
    Ok(())
}

/// Find out before a long run whether a file can be written.
pub fn check_writable(path: &Path) -> Result<()> {
    let name = path.file_name().with_context(|| format!("`{}` does not name a file", path.display()))?;
    if path.is_dir() {
        anyhow::bail!("cannot write {}: it is a directory", path.display());
    }
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        anyhow::bail!("cannot write {}: it is a device or pipe, not a file", path.display());
    }
    let beside = path.with_file_name(format!(".{}.probe-{}", name.to_string_lossy(), std::process::id()));
    fs::write(&beside, b"").with_context(|| format!("cannot write {}", path.display()))?;
    let _ = fs::remove_file(&beside);
    Ok(())
}

/// An iteration of `iterations.jsonl`, with the host phases around its forward pass.
pub struct LoggedIteration {
    /// The iteration.
    pub iteration: Iteration,
    /// Start and end of each phase.
    pub phases: Vec<(RangeKind, i64, i64)>,
}

/// Reads one line of `iterations.jsonl`; `None` when it is something else.
pub fn logged_iteration(line: &str) -> Option<LoggedIteration> {
    let record: Value = serde_json::from_str(line).ok()?;
    let strobe = record.get("strobe")?;
    let ns = |value: &Value, key: &str| Some((value.get(key)?.as_f64()? * 1e6).round() as i64);
    let batch = record.get("inflightBatchingStats").or(record.get("staticBatchingStats"))?;
    let count = |key: &str| batch.get(key).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
    let start = strobe.get("startNS")?.as_i64()?;
    let generation_requests = count("numGenRequests").or(count("numGenTokens"))?;
    let mut phases = Vec::new();
    let mut at = start;
    for (key, kind) in [
        ("scheduleMS", RangeKind::Schedule),
        ("prepareMS", RangeKind::Prepare),
        ("forwardMS", RangeKind::Other), // its ops are not known: not idle, but unknown
        ("sampleMS", RangeKind::Sample),
        ("respondMS", RangeKind::Respond),
    ] {
        let end = at + ns(strobe, key)?;
        phases.push((kind, at, end));
        at = end;
    }
    let host = strobe.get("host").filter(|host| host.get("iterations").and_then(Value::as_u64) == Some(1));
    let cpu_wait = host.and_then(|host| ns(host, "cpuWaitMaxMS"));
    let iteration = Iteration {
        iter: record.get("iter")?.as_u64()?,
        start,
        end: at.max(start + ns(&record, "iterLatencyMS")?),
        context_requests: count("numContextRequests")?,
        generation_requests,
        context_tokens: count("numCtxTokens")?,
        generation_tokens: generation_requests,
        window: 0,
        cpu_wait,
    };
    Some(LoggedIteration { iteration, phases })
}
