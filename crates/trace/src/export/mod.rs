//! Writes traces in formats that other tools read.
//!
//! A file appears whole or not at all. Only what the event model holds is written: command lines, environments and host
//! or user names are not in it; of source files the name is written, never the directory.

mod chrome;
mod json;
mod lanes;
mod tracks;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::write::GzEncoder;

use crate::atomic::write_whole;
use crate::{Trace, TraceError};

/// A format that traces are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Chrome's trace event JSON in the dialect of the PyTorch profiler.
    ChromeJson,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 1] = [Format::ChromeJson];

    /// The name by which it is asked for.
    pub fn as_str(self) -> &'static str {
        match self {
            Format::ChromeJson => "chrome",
        }
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.as_str() == name)
    }

    /// The format that the ending of a path asks for.
    pub fn from_path(path: &Path) -> Result<Self, TraceError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let endings = [(Format::ChromeJson, [".json", ".json.gz"])];
        let found = endings.iter().find(|(_, endings)| endings.iter().any(|ending| name.ends_with(ending)));
        found.map(|&(format, _)| format).ok_or_else(|| TraceError::Invalid {
            place: path.display().to_string(),
            problem: "its ending does not say the format; use .json or .json.gz".to_owned(),
        })
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The files.
    pub files: Vec<PathBuf>,
    /// Their sizes together.
    pub bytes: u64,
    /// Events in them.
    pub events: u64,
}

/// Writes the trace to `path`, replacing what is there.
pub fn write(trace: &Trace, format: Format, path: &Path) -> Result<Written, TraceError> {
    match format {
        Format::ChromeJson if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gz")) => {
            write_file(path, |file| {
                // Text of traces shrinks tenfold at any level: the time counts.
                let (encoder, events) = chrome::write(trace, GzEncoder::new(file, flate2::Compression::new(3)))?;
                encoder.finish()?;
                Ok(events)
            })
        }
        Format::ChromeJson => write_file(path, |file| Ok(chrome::write(trace, file)?.1)),
    }
}

/// Fills one file. `fill` returns the number of events.
fn write_file(path: &Path, fill: impl FnOnce(&File) -> Result<u64, TraceError>) -> Result<Written, TraceError> {
    let io = |action| move |source| TraceError::Io { action, path: path.to_owned(), source };
    let mut written = Written { files: vec![path.to_owned()], bytes: 0, events: 0 };
    write_whole(path, |temporary| {
        let mut file = File::create(temporary).map_err(io("create"))?;
        written.events = fill(&file).map_err(|error| match error {
            TraceError::Stream(source) => io("write")(source),
            other => other,
        })?;
        file.flush().map_err(io("write"))?;
        written.bytes = file.metadata().map_err(io("look at"))?.len();
        file.sync_all().map_err(io("write"))
    })?;
    Ok(written)
}

/// The last part of an absolute path; any other text as it is.
fn without_directories(text: &str) -> &str {
    let is_drive = |b: &[u8]| matches!(b, [letter, b':', b'\\' | b'/', ..] if letter.is_ascii_alphabetic());
    if text.starts_with(['/', '~']) || text.starts_with("\\\\") || is_drive(text.as_bytes()) {
        text.trim_end_matches(['/', '\\']).rsplit(['/', '\\']).next().unwrap_or("")
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_not_written() {
        let cases = [
            ("/home/someone/model.gguf", "model.gguf"),
            ("~/models/a", "a"),
            ("C:\\Users\\someone\\x.bin", "x.bin"),
            ("\\\\host\\share\\x", "x"),
            ("meta/llama", "meta/llama"),
            ("", ""),
        ];
        for (text, expected) in cases {
            assert_eq!(without_directories(text), expected);
        }
    }
}
