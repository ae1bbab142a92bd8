//! Files that appear whole or not at all, and the names inside a run directory.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

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

/// Find out before a long run whether a file can be written.
pub fn check_writable(path: &Path) -> Result<()> {
    let name = path.file_name().with_context(|| format!("`{}` does not name a file", path.display()))?;
    if path.is_dir() {
        anyhow::bail!("cannot write {}: it is a directory", path.display());
    }
    let beside = path.with_file_name(format!(".{}.probe-{}", name.to_string_lossy(), std::process::id()));
    fs::write(&beside, b"").with_context(|| format!("cannot write {}", path.display()))?;
    let _ = fs::remove_file(&beside);
    Ok(())
}
