//! A run directory as its readers see it, the names inside it, and files that appear whole or not at all.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use strobe_engine::staged_dir::{self, Held};
use strobe_trace::{Iteration, RangeKind};
use strobe_workload::{JsonLines, Outcome, RequestRecord, json_lines};

use crate::bench::outcome::RepeatFigures;
use crate::output;

/// What was run, on what, by which version.
pub(crate) const RUN: &str = "run.json";
/// One line per request.
pub(crate) const REQUESTS: &str = "requests.jsonl";
/// One line per iteration.
pub(crate) const ITERATIONS: &str = "iterations.jsonl";
/// One line per finished repeat: its figures.
pub(crate) const REPEATS: &str = "repeats.jsonl";
/// Recorded windows in Nsight Systems' export schema.
pub(crate) const TRACE: &str = "trace.sqlite";
/// The report for machines.
pub(crate) const REPORT_JSON: &str = "report.json";
/// The recorded windows as a page: timeline, iterations, tables.
pub(crate) const TRACE_HTML: &str = "trace.html";
/// The report for people.
pub(crate) const REPORT_HTML: &str = "report.html";

/// Files by which a run directory is known.
pub(crate) const MARKS: [&str; 2] = [RUN, REPORT_JSON];

/// Files by which a run that did not end well is known: its report may be missing.
const MARKS_OF_PARTIAL: [&str; 1] = [RUN];

/// The files by which the directory of a run at `dir` is known, if it is one.
pub(crate) fn marks(dir: &Path) -> &'static [&'static str] {
    let text = fs::read(dir.join(RUN)).unwrap_or_default();
    let run: Value = serde_json::from_slice(&text).unwrap_or_default();
    let said = run.get("state").and_then(Value::as_str).and_then(Stage::named);
    if matches!(said, Some(Stage::Running | Stage::Partial)) { &MARKS_OF_PARTIAL } else { &MARKS }
}

/// Refuses a place for a run directory before any work is done: one that must not be replaced, that another process
/// writes now, or where nothing can be created.
pub(crate) fn check_target(dir: &Path, overwrite: bool) -> Result<()> {
    staged_dir::check_target(dir, overwrite, marks(dir), WHAT)?;
    if staged_dir::held(dir) == Held::Yes {
        bail!("--output-dir: `{}` is being written by another run; wait for its end, or name another", dir.display());
    }
    staged_dir::check_parent(dir)?;
    Ok(())
}

/// What a run directory is called in errors.
pub(crate) const WHAT: &str = "run directory";

/// How far a run came, as `run.json` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It goes on, or was killed.
    Running,
    /// It ended early, or not everything could be written.
    Partial,
    /// It is whole.
    Complete,
}

impl Stage {
    /// As in `run.json`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Stage::Running => "running",
            Stage::Partial => "partial",
            Stage::Complete => "complete",
        }
    }

    fn named(name: &str) -> Option<Stage> {
        [Stage::Running, Stage::Partial, Stage::Complete].into_iter().find(|stage| stage.name() == name)
    }
}

/// What `run.json` says of a run that came so far. `partial` is what readers of before there was a state know.
pub(crate) fn with_stage(about: &Value, stage: Stage, partial: bool) -> Value {
    let mut run = serde_json::Map::new();
    for (key, value) in about.as_object().into_iter().flatten() {
        run.insert(key.clone(), value.clone());
        if key == "version" {
            run.insert("state".into(), stage.name().into());
            run.insert("partial".into(), partial.into());
        }
    }
    Value::Object(run)
}

/// What became of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunState {
    /// A process is still writing it.
    Running,
    /// It was still running when its process died.
    Killed,
    /// It ended early, or not everything could be written.
    Partial,
    /// It is whole.
    Complete,
}

/// A run directory: of a benchmark or a simulation, whole, partial or killed.
pub(crate) struct RunDir {
    /// Where it is.
    pub path: PathBuf,
    /// What became of the run.
    pub state: RunState,
    /// `run.json`; null where there is none.
    #[allow(dead_code)] // part of what a reader may ask for
    pub run: Value,
    /// `report.json`, which a killed run does not have.
    pub report: Option<Value>,
    /// Figures of every finished repeat: from the report, or kept while the run went on.
    pub repeats: Vec<RepeatFigures>,
}

impl RunDir {
    /// Whether `path` is a run directory.
    pub(crate) fn is_at(path: &Path) -> bool {
        path.is_dir() && [RUN, REPORT_JSON, ITERATIONS].iter().any(|name| path.join(name).is_file())
    }

    /// Reads everything but the records of iterations and requests.
    pub(crate) fn open(path: &Path) -> Result<RunDir> {
        if !RunDir::is_at(path) {
            bail!(
                "{}: no run directory (no {RUN} in it); name one that `strobe bench --output-dir` wrote",
                path.display()
            );
        }
        let run = read_json(&path.join(RUN))?.unwrap_or_default();
        let report = read_json(&path.join(REPORT_JSON))?;
        let stage = run.get("state").and_then(Value::as_str).and_then(Stage::named);
        let partial = run.get("partial").and_then(Value::as_bool).unwrap_or(false);
        let state = match stage {
            Some(Stage::Running) if staged_dir::held(path) == Held::Yes => RunState::Running,
            Some(Stage::Running) => RunState::Killed,
            Some(Stage::Partial) => RunState::Partial,
            // Runs of before there was a state.
            None if partial => RunState::Partial,
            Some(Stage::Complete) | None => RunState::Complete,
        };
        let repeats = match report.as_ref().and_then(|report| report.pointer("/strobe/repeats")) {
            Some(repeats) => serde_json::from_value(repeats.clone())
                .with_context(|| format!("{}: its repeats are not strobe's", path.join(REPORT_JSON).display()))?,
            None => read_lines(&path.join(REPEATS), |line| serde_json::from_str(line).map_err(anyhow::Error::from))?
                .map_or(Vec::new(), |lines| lines.records),
        };
        Ok(RunDir { path: path.to_owned(), state, run, report, repeats })
    }

    /// The path of one of its files.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Whether it holds recorded windows.
    pub(crate) fn has_trace(&self) -> bool {
        self.file(TRACE).is_file()
    }

    /// Whether the run did not come to its end.
    pub(crate) fn is_partial(&self) -> bool {
        self.state != RunState::Complete
    }

    /// Every whole line of `iterations.jsonl`.
    pub(crate) fn iterations(&self) -> Result<Vec<LoggedIteration>> {
        let read = |line: &str| logged_iteration(line).ok_or_else(|| anyhow!("not an iteration record of strobe"));
        Ok(self.lines(ITERATIONS, read)?.records)
    }

    /// Every whole line of `requests.jsonl`, in the order in which requests were sent.
    pub(crate) fn requests(&self) -> Result<Vec<RequestRecord>> {
        let mut records = self.lines(REQUESTS, read_request)?.records;
        records.sort_by_key(|record| record.id);
        Ok(records)
    }

    /// Every whole line of one of its logs; a missing file is an error.
    pub(crate) fn lines<T>(&self, name: &str, read: impl FnMut(&str) -> Result<T>) -> Result<JsonLines<T>> {
        let path = self.file(name);
        let found = read_lines(&path, read)?;
        found.with_context(|| format!("cannot read {}; give the directory of a run", path.display()))
    }

    /// What every reader says of a run whose records are not all there, before it uses them.
    pub(crate) fn notices(&self) -> Result<Vec<String>> {
        let name = self.path.display();
        let mut notices = Vec::new();
        if self.is_partial() {
            let iterations = read_lines(&self.file(ITERATIONS), is_json)?.map_or(0, |lines| lines.records.len());
            let requests = read_lines(&self.file(REQUESTS), read_request)?;
            let finished = |record: &&RequestRecord| record.outcome() != Outcome::Aborted;
            let finished = requests.map_or(0, |lines| lines.records.iter().filter(finished).count());
            let state = match self.state {
                RunState::Running => "state running, process alive",
                RunState::Killed => "state running, process gone",
                RunState::Partial | RunState::Complete => "state partial",
            };
            let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
            let (iterations, finished) = (counted(iterations, "iteration"), counted(finished, "finished request"));
            notices.push(format!("{name}: partial run ({state}): {iterations}, {finished}"));
        }
        for file in [ITERATIONS, REQUESTS] {
            if is_cut(&self.file(file))? {
                notices.push(format!("{}: last line cut off; the line is dropped", self.file(file).display()));
            }
        }
        Ok(notices)
    }
}

fn is_json(line: &str) -> Result<()> {
    serde_json::from_str::<serde::de::IgnoredAny>(line)?;
    Ok(())
}

/// Whether the last line of a log has neither an end nor a value.
fn is_cut(path: &Path) -> Result<bool> {
    let ends = |file: &mut fs::File| -> std::io::Result<bool> {
        let mut last = [b'\n'];
        if file.metadata()?.len() > 0 {
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
        }
        Ok(last == [b'\n'])
    };
    match fs::File::open(path).and_then(|mut file| ends(&mut file)) {
        Ok(false) => Ok(read_lines(path, is_json)?.is_some_and(|lines| lines.cut)),
        Ok(true) | Err(_) => Ok(false), // a file that cannot be read is an error for whoever reads it
    }
}

/// The iterations of a run for the simulator's calibration, after it was said that the run is partial.
pub(crate) fn read_calibration(path: &Path) -> Result<strobe_sim::calibrate::Run> {
    let run = strobe_sim::calibrate::read_run(path)?;
    RunDir::open(path)?.notices()?.iter().for_each(|notice| output::warn(notice));
    Ok(run)
}

fn read_request(line: &str) -> Result<RequestRecord> {
    serde_json::from_str(line).map_err(|problem| anyhow!("not a request record of strobe: {problem}"))
}

/// A JSON document; `None` where there is no such file.
fn read_json(path: &Path) -> Result<Option<Value>> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(problem) if problem.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(problem) => return Err(problem).with_context(|| format!("cannot read {}", path.display())),
    };
    serde_json::from_slice(&text).map(Some).with_context(|| format!("{} is damaged", path.display()))
}

/// The whole lines of a log; `None` where there is no such file. A malformed line is an error with its number, unless it is
/// the last one and cut.
fn read_lines<T>(path: &Path, read: impl FnMut(&str) -> Result<T>) -> Result<Option<JsonLines<T>>> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(problem) if problem.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(problem) => return Err(problem).with_context(|| format!("cannot read {}", path.display())),
    };
    match json_lines(&text, read) {
        Ok(lines) => Ok(Some(lines)),
        Err((line, problem)) => Err(anyhow!("{}, line {line}: {problem:#}", path.display())),
    }
}

/// Writes beside, then renames. What a killed process left beside goes.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    staged_dir::write_whole(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Find out before a long run whether a file can be written, and that it is none of those that are read.
pub(crate) fn check_output(path: &Path, inputs: &[PathBuf]) -> Result<()> {
    check_not_input(path, inputs)?;
    check_writable(path)
}

/// Refuse to replace what is read. Files are told by device and number, so that links and other spellings are found.
pub(crate) fn check_not_input(path: &Path, inputs: &[PathBuf]) -> Result<()> {
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
pub(crate) fn check_writable(path: &Path) -> Result<()> {
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
pub(crate) struct LoggedIteration {
    /// The iteration.
    pub iteration: Iteration,
    /// Start and end of each phase.
    pub phases: Vec<(RangeKind, i64, i64)>,
}

/// Reads one line of `iterations.jsonl`; `None` when it is something else.
pub(crate) fn logged_iteration(line: &str) -> Option<LoggedIteration> {
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
