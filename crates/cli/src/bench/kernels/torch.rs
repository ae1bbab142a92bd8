//! PyTorch on the same shapes: a small Python program that answers one case at a time, so that it and strobe take turns.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use serde_json::json;

use super::Times;
use super::cases::Case;
use crate::device::Device;
use crate::interrupt;

const PROGRAM: &str = include_str!("torch.py");

/// A Python with torch, waiting for cases.
pub(super) struct Torch {
    child: Child,
    /// Taken away to tell it that no case follows.
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    pub version: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Torch(String),
    Times(Vec<f64>),
    Skip(String),
    Error(String),
}

impl Torch {
    /// Start it; the error says why there is no torch to compare with.
    pub(super) fn start(python: &Path, device: Device, threads: usize) -> Result<Torch> {
        let mut child = Command::new(python)
            .args(["-c", PROGRAM])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot run `{}`", python.display()))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("`{}` has no standard streams", python.display());
        };
        let mut torch = Torch { child, stdin: Some(stdin), stdout: BufReader::new(stdout), version: String::new() };
        let setup = json!({"device": device.to_string(), "threads": threads});
        match torch.ask(&setup.to_string())? {
            Answer::Torch(version) => torch.version = version,
            Answer::Error(why) => bail!(why),
            _ => bail!("`{}` answered out of turn", python.display()),
        }
        Ok(torch)
    }

    /// Times of a case, or why it has none.
    pub(super) fn time(&mut self, case: &Case, repeats: usize) -> Result<Result<Times, String>> {
        let line = json!({"op": case.op, "dtype": case.dtype, "shape": case.shape, "repeats": repeats});
        match self.ask(&line.to_string())? {
            Answer::Times(seconds) if !seconds.is_empty() => Ok(Ok(Times::new(seconds))),
            Answer::Skip(why) => Ok(Err(why)),
            _ => bail!("the comparison with torch answered out of turn"),
        }
    }

    fn ask(&mut self, line: &str) -> Result<Answer> {
        let ended = || match interrupt::requested() {
            true => anyhow!(interrupt::Interrupted),
            false => anyhow!("the comparison with torch ended early"),
        };
        let stdin = self.stdin.as_mut().ok_or_else(ended)?;
        stdin.write_all(format!("{line}\n").as_bytes()).map_err(|_| ended())?;
        let mut answer = String::new();
        match self.stdout.read_line(&mut answer) {
            Ok(0) | Err(_) => Err(ended()),
            Ok(_) => serde_json::from_str(&answer).with_context(|| format!("torch answered `{}`", answer.trim())),
        }
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let _ = self.child.kill(); // it may have ended by itself
        let _ = self.child.wait();
    }
}
