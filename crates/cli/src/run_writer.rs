//! Keeps a run on disk while it goes on, so that whatever ends it loses at most a second of records.
//!
//! The directory is made under its final name when the measurement begins. Requests and iterations are appended as they
//! end; everything else follows at the end of the run. A write that fails does not end the run: the writer keeps the
//! reason, and [`RunWriter::finish`] hands out all of them.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use strobe_engine::EngineInfo;
use strobe_engine::staged_dir::LiveDir;

use crate::bench::client::RunData;
use crate::bench::outcome::RepeatFigures;
use crate::bench::write;
use crate::run_dir::{self, Stage};
use crate::{interrupt, output};

/// How often records go to disk. Not oftener, because the client's thread does it, beside an engine that is measured.
const PERIOD: Duration = Duration::from_millis(500);

/// What could not be written, in words; one reason does not stop the others.
#[derive(Debug, Default)]
pub(crate) struct Problems(Vec<String>);

impl Problems {
    /// Keeps the reason of a failure.
    pub(crate) fn keep(&mut self, result: Result<()>) -> bool {
        if let Err(problem) = &result {
            let mut text = String::new();
            for cause in problem.chain().map(ToString::to_string) {
                // Many errors quote their cause in their own words already.
                if text.is_empty() {
                    text = cause;
                } else if !text.contains(&cause) {
                    text = format!("{text}: {cause}");
                }
            }
            self.0.push(text);
        }
        result.is_ok()
    }

    /// Adds those of another part of the work.
    pub(crate) fn extend(&mut self, other: Problems) {
        self.0.extend(other.0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// An error that names all of them.
    pub(crate) fn into_result(self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(anyhow::anyhow!(self.0.join("; "))) }
    }
}

/// A log that grows by lines. The first failure is the last attempt: the file ends with what fitted.
struct Log {
    path: PathBuf,
    file: File,
    /// Records that are in the file, and its bytes.
    written: usize,
    bytes: usize,
    problem: Option<anyhow::Error>,
}

impl Log {
    fn create(path: PathBuf) -> Result<Log> {
        let file = OpenOptions::new().append(true).create(true).open(&path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Log { path, file, written: 0, bytes: 0, problem: None })
    }

    /// Whether every record so far is in the file.
    fn is_whole(&self) -> bool {
        self.problem.is_none()
    }

    /// Begins anew, with an empty file.
    fn restart(&mut self) {
        (self.written, self.bytes) = (0, 0);
        if let (true, Err(problem)) = (self.is_whole(), self.file.set_len(0)) {
            self.problem = Some(anyhow::Error::from(problem).context(format!("cannot empty {}", self.path.display())));
        }
    }

    /// Appends the lines of so many records.
    fn append(&mut self, records: usize, lines: impl FnOnce() -> Result<String>) {
        if records == 0 || !self.is_whole() {
            return;
        }
        let (path, lines) = (self.path.display(), lines());
        let lines = match lines {
            Ok(lines) => lines,
            Err(problem) => {
                self.problem = Some(problem.context(format!("cannot write {path}")));
                return;
            }
        };
        match self.file.write_all(lines.as_bytes()) {
            Ok(()) => {
                self.written += records;
                self.bytes += lines.len();
            }
            Err(problem) => {
                let fitted = self.file.metadata().map_or(0, |found| found.len() as usize).saturating_sub(self.bytes);
                let lines = lines.as_bytes().get(..fitted).unwrap_or_default().iter().filter(|byte| **byte == b'\n');
                let after = format!("{path}: cut off after {} records", self.written + lines.count());
                self.problem = Some(anyhow::Error::from(problem).context(after));
            }
        }
    }

    /// Writes the whole file at once where appending failed; its failure then stands if that fails too.
    fn replace(&mut self, lines: Result<String>) -> Result<()> {
        let written = lines.and_then(|lines| run_dir::write_whole(&self.path, lines.as_bytes()));
        match (written, self.problem.take()) {
            (Ok(()), _) => Ok(()),
            (Err(_), Some(problem)) | (Err(problem), None) => Err(problem),
        }
    }
}

/// The logs of a run that goes on.
struct Stream {
    requests: Log,
    iterations: Log,
    info: EngineInfo,
    /// Expert-parallel ranks that the experts are thought to be divided among.
    ranks: usize,
    last: Instant,
}

impl Stream {
    fn append(&mut self, run: &RunData) {
        let ended = run.ended.get(self.requests.written..).unwrap_or_default();
        let lines = || write::request_lines(ended.iter().filter_map(|id| run.records.get(*id)), &self.info);
        self.requests.append(ended.len(), lines);
        let first = self.iterations.written;
        let lines = || Ok(write::iteration_lines(run, &self.info, self.ranks, first));
        self.iterations.append(run.iterations.len().saturating_sub(first), lines);
        self.last = Instant::now();
    }

    /// Every iteration, and every request in the order in which they were sent, those too that did not end.
    fn complete(&mut self, run: &RunData, problems: &mut Problems) {
        self.append(run);
        if !self.iterations.is_whole() {
            let lines = write::iteration_lines(run, &self.info, self.ranks, 0);
            problems.keep(self.iterations.replace(Ok(lines)));
        }
        let in_order = run.ended.len() == run.records.len() && run.ended.is_sorted();
        if in_order && self.requests.is_whole() {
            return;
        }
        let was_whole = self.requests.is_whole();
        let written = self.requests.replace(write::request_lines(run.records.iter(), &self.info));
        if written.is_ok() || !was_whole {
            problems.keep(written);
            return;
        }
        // No room for a second copy: those that did not end follow those that did.
        let ended: HashSet<usize> = run.ended.iter().copied().collect();
        let unfinished: Vec<_> =
            run.records.iter().enumerate().filter(|(id, _)| !ended.contains(id)).map(|(_, record)| record).collect();
        self.requests.append(unfinished.len(), || write::request_lines(unfinished.iter().copied(), &self.info));
        problems.keep(self.requests.problem.take().map_or(Ok(()), Err));
    }
}

/// A run directory being written.
struct Open {
    dir: LiveDir,
    /// What `run.json` says, without how far the run came.
    about: Value,
    stream: Option<Stream>,
    repeats: Option<Log>,
}

impl Open {
    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write_about(&self, stage: Stage, partial: bool) -> Result<()> {
        let run = run_dir::with_stage(&self.about, stage, partial);
        run_dir::write_whole(&self.file(run_dir::RUN), format!("{run:#}\n").as_bytes())
    }

    fn has_records(&self) -> bool {
        let names = [run_dir::REQUESTS, run_dir::ITERATIONS, run_dir::REPEATS];
        names.iter().any(|name| std::fs::metadata(self.file(name)).is_ok_and(|found| found.len() > 0))
    }
}

/// Writes a run directory, if one is wanted.
#[derive(Default)]
pub(crate) struct RunWriter {
    /// Where, and whether it may replace an existing run.
    target: Option<(PathBuf, bool)>,
    open: Option<Open>,
    problems: Problems,
}

impl RunWriter {
    /// A writer that makes its directory when the measurement begins; without a place it does nothing.
    pub(crate) fn new(target: Option<&Path>, overwrite: bool) -> RunWriter {
        let target = target.map(|path| (path.to_owned(), overwrite));
        RunWriter { target, open: None, problems: Problems::default() }
    }

    /// Makes the directory; `about` goes into `run.json`.
    pub(crate) fn begin(&mut self, about: Value) {
        let Some((path, overwrite)) = self.target.clone() else { return };
        let open = || -> Result<Open> {
            let dir = LiveDir::create(&path, overwrite, run_dir::marks(&path), run_dir::WHAT)?;
            let open = Open { dir, about, stream: None, repeats: None };
            open.write_about(Stage::Running, true)?;
            Ok(open)
        };
        match open().context("the run was not kept") {
            Ok(open) => self.open = Some(open),
            Err(problem) => drop(self.problems.keep(Err(problem))),
        }
    }

    /// Opens the logs of requests and iterations, which [`RunWriter::tick`] appends to.
    pub(crate) fn stream(&mut self, info: &EngineInfo, ranks: usize) {
        let Some(open) = &mut self.open else { return };
        let logs = (Log::create(open.file(run_dir::REQUESTS)), Log::create(open.file(run_dir::ITERATIONS)));
        match logs {
            (Ok(requests), Ok(iterations)) => {
                open.stream = Some(Stream { requests, iterations, info: info.clone(), ranks, last: Instant::now() });
            }
            (requests, iterations) => {
                self.problems.keep(requests.map(drop));
                self.problems.keep(iterations.map(drop));
            }
        }
    }

    fn streaming(&mut self) -> Option<&mut Stream> {
        self.open.as_mut()?.stream.as_mut()
    }

    /// Begins a repeat: the logs are those of the one that runs.
    pub(crate) fn restart(&mut self) {
        if let Some(stream) = self.streaming() {
            stream.requests.restart();
            stream.iterations.restart();
        }
    }

    /// Appends what is new since the last time, at most twice a second.
    pub(crate) fn tick(&mut self, run: &RunData) {
        if let Some(stream) = self.streaming().filter(|stream| stream.last.elapsed() >= PERIOD) {
            stream.append(run);
        }
    }

    /// Keeps the figures of a repeat that ended.
    pub(crate) fn repeat(&mut self, figures: &RepeatFigures) {
        let Some(open) = &mut self.open else { return };
        if open.repeats.is_none() {
            match Log::create(open.file(run_dir::REPEATS)) {
                Ok(log) => open.repeats = Some(log),
                Err(problem) => drop(self.problems.keep(Err(problem))),
            }
        }
        if let Some(log) = &mut open.repeats {
            log.append(1, || Ok(serde_json::to_string(figures)? + "\n"));
        }
    }

    /// Completes both logs.
    pub(crate) fn records(&mut self, run: &RunData) {
        if let Some(stream) = self.open.as_mut().and_then(|open| open.stream.as_mut()) {
            stream.complete(run, &mut self.problems);
        }
    }

    /// Writes what is known at the end with `files`, and says how far the run came. Gives everything that could not be
    /// written, and whether the directory is there.
    pub(crate) fn finish(mut self, partial: bool, files: impl FnOnce(&Path, &mut Problems)) -> (Problems, bool) {
        let mut problems = std::mem::take(&mut self.problems);
        let Some(mut open) = self.open.take() else { return (problems, false) };
        problems.keep(open.repeats.as_mut().and_then(|log| log.problem.take()).map_or(Ok(()), Err));
        files(open.dir.path(), &mut problems);
        if !open.has_records() {
            let dir = open.dir.path().display();
            if interrupt::requested() && problems.is_empty() {
                output::note(&format!("interrupted before an iteration ended: {dir} is not kept"));
            } else {
                problems.keep(Err(anyhow::anyhow!("{dir}: nothing could be kept")));
            }
            return (problems, false);
        }
        let stage = if partial || !problems.is_empty() { Stage::Partial } else { Stage::Complete };
        problems.keep(open.write_about(stage, partial));
        open.dir.keep();
        (problems, true)
    }
}

impl Drop for RunWriter {
    /// The run failed: what it recorded stays, and without any record its directory goes.
    fn drop(&mut self) {
        if let Some(open) = self.open.take()
            && open.has_records()
        {
            let _ = open.write_about(Stage::Partial, true);
            open.dir.keep();
        }
    }
}
