//! A command in a process of its own.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{interrupt, run_dir};

/// What became of it.
pub(crate) struct Finished {
    status: ExitStatus,
    /// The end of what it said on stderr.
    said: String,
}

/// As much of what a command says is kept.
const KEPT: u64 = 4000;

/// How often a waiting call looks up. The process that is measured runs meanwhile: seldom is better.
const TICK: Duration = Duration::from_millis(20);

/// Runs a command to its end; its output goes to `output` (whole or not at all), or nowhere. An interrupt is handed on.
pub(crate) fn run(command: &mut Command, output: Option<&Path>) -> Result<Finished> {
    let program = command.get_program().to_string_lossy().into_owned();
    let log = std::env::temp_dir().join(format!("strobe-{}-{:?}.log", std::process::id(), std::thread::current().id()));
    let create = |path: &Path| {
        File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)
            .with_context(|| format!("cannot write {}", path.display()))
    };
    let mut said = create(&log)?;
    let _ = std::fs::remove_file(&log); // it lives as long as it is open
    let beside = output.map(|path| path.with_extension("partial"));
    let stdout = match &beside {
        Some(path) => Stdio::from(create(path)?),
        None => Stdio::null(),
    };
    command
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(Stdio::from(said.try_clone().context("cannot share a file with a process")?));
    let mut child = command.spawn().with_context(|| format!("cannot start `{program}`"))?;
    let _hold = interrupt::hold();
    let mut told = false;
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("cannot wait for `{program}`"))? {
            break status;
        }
        if interrupt::requested() && !told {
            told = true;
            if interrupt::is_known_to_children() {
                continue; // a second signal would end it without what it has
            }
            // SAFETY: the process is our own child and has not been waited for.
            unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
        }
        std::thread::sleep(TICK);
    };
    let end = said.seek(SeekFrom::End(0)).unwrap_or(0);
    let mut bytes = Vec::new();
    let _ = said.seek(SeekFrom::Start(end.saturating_sub(KEPT))).and_then(|_| said.read_to_end(&mut bytes));
    if let (Some(beside), Some(output)) = (&beside, output) {
        if status.success() {
            run_dir::write_whole(output, &std::fs::read(beside).unwrap_or_default())?;
        }
        let _ = std::fs::remove_file(beside);
    }
    Ok(Finished { status, said: String::from_utf8_lossy(&bytes).into_owned() })
}

impl Finished {
    /// Why it did not end well.
    pub(crate) fn problem(&self) -> Option<String> {
        if self.status.success() {
            return None;
        }
        let how = match (self.status.code(), self.status.signal()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("killed by signal {signal}"),
            (None, None) => "ended".to_owned(),
        };
        let last = self.said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
        Some(format!("{how}: {}", last.trim()))
    }

    /// An error where it did not end well.
    pub(crate) fn ok_or_error(&self, what: &str) -> Result<()> {
        if interrupt::requested() {
            bail!(interrupt::Interrupted);
        }
        match self.problem() {
            Some(problem) => bail!("{what} failed, {problem}"),
            None => Ok(()),
        }
    }
}
