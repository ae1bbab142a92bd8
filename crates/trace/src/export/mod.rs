//! Writes traces in formats that other tools read.
//!
//! A file appears whole or not at all. Only what the event model holds is written: command lines, environments and host
//! or user names are not in it; of source files the name is written, never the directory.

mod chrome;
mod csv;
mod json;
mod lanes;
mod parquet;
mod perfetto;
pub(crate) mod tables;
mod thrift;
mod tracks;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::write::GzEncoder;

use self::tables::{Table, Tables};
use crate::atomic::write_whole;
use crate::{Trace, TraceError, nsys};

/// A format that traces are written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Chrome's trace event JSON in the dialect of the PyTorch profiler.
    ChromeJson,
    /// Perfetto's protobuf.
    Perfetto,
    /// Comma-separated values: the ops in one file, or a file per table in a directory.
    Csv,
    /// Parquet: the ops in one file, or a file per table in a directory.
    Parquet,
    /// SQLite with the tables of Nsight Systems, see [`nsys::write`].
    NsysSqlite,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 5] =
        [Format::ChromeJson, Format::Perfetto, Format::Csv, Format::Parquet, Format::NsysSqlite];

    /// The name by which it is asked for.
    pub fn as_str(self) -> &'static str {
        match self {
            Format::ChromeJson => "chrome",
            Format::Perfetto => "perfetto",
            Format::Csv => "csv",
            Format::Parquet => "parquet",
            Format::NsysSqlite => "nsys",
        }
    }

    /// The format with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.as_str() == name)
    }

    /// The endings of its files.
    fn endings(self) -> &'static [&'static str] {
        match self {
            Format::ChromeJson => &[".json", ".json.gz"],
            Format::Perfetto => &[".perfetto-trace", ".pftrace", ".pb"],
            Format::Csv => &[".csv"],
            Format::Parquet => &[".parquet", ".parquetdir"],
            Format::NsysSqlite => &[".sqlite"],
        }
    }

    /// The format that the ending of a path asks for.
    pub fn from_path(path: &Path) -> Result<Self, TraceError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let asks_for = |format: &Format| format.endings().iter().any(|ending| name.ends_with(ending));
        Self::ALL.into_iter().find(asks_for).ok_or_else(|| {
            let endings: Vec<&str> = Self::ALL.iter().flat_map(|format| format.endings()).copied().collect();
            let names: Vec<&str> = Self::ALL.iter().map(|format| format.as_str()).collect();
            let (endings, names) = (endings.join(", "), names.join(", "));
            let problem = format!("its ending does not say the format: use one of {endings}, or name one of {names}");
            TraceError::Invalid { place: path.display().to_string(), problem }
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
        Format::Perfetto => write_file(path, |file| Ok(perfetto::write(trace, file)?.1)),
        Format::Csv => write_tables(trace, path, ".csv", |table, file| csv::write(table, file)),
        Format::Parquet => write_tables(trace, path, ".parquet", |table, file| parquet::write(table, file)),
        Format::NsysSqlite => {
            nsys::write(trace, path)?;
            let look = |source| TraceError::Io { action: "look at", path: path.to_owned(), source };
            let bytes = fs::metadata(path).map_err(look)?.len();
            let tables = Tables::of(trace);
            let events = tables.all().into_iter().filter(|table| EVENT_TABLES.contains(&table.name));
            let events = events.map(|table| table.rows as u64).sum();
            Ok(Written { files: vec![path.to_owned()], bytes, events })
        }
    }
}

/// Writes the table of ops to a path with the format's ending, all tables into a directory at any other.
fn write_tables(
    trace: &Trace,
    path: &Path,
    ending: &str,
    write: impl Fn(&Table, &File) -> Result<(), TraceError>,
) -> Result<Written, TraceError> {
    let tables = Tables::of(trace);
    let text = path.to_string_lossy();
    let is_file = text.to_lowercase().ends_with(ending) && !path.is_dir();
    if is_file {
        let ops = tables.ops();
        return write_file(path, |file| write(&ops, file).map(|()| ops.rows as u64));
    }
    let file_name = |table: &str| format!("{table}{ending}");
    let is_ours = |name: &str| tables::names().iter().flatten().any(|table| file_name(table) == name);
    write_directory(path, is_ours, |directory| {
        let mut written = Written { files: Vec::new(), bytes: 0, events: 0 };
        for table in tables.all() {
            let name = file_name(table.name);
            let one = write_file(&directory.join(&name), |file| write(&table, file).map(|()| table.rows as u64))?;
            written.files.push(path.join(name));
            written.bytes += one.bytes;
            written.events += if EVENT_TABLES.contains(&table.name) { one.events } else { 0 };
        }
        Ok(written)
    })
}

/// The tables whose rows are events.
pub(crate) const EVENT_TABLES: [&str; 9] =
    ["ops", "calls", "ranges", "iterations", "counters", "allocations", "on_cpu", "cpu_samples", "page_faults"];

/// Fills a directory beside `path` and puts it there. What is there already is replaced only if every entry has a name
/// of ours.
fn write_directory(
    path: &Path,
    is_ours: impl Fn(&str) -> bool,
    fill: impl FnOnce(&Path) -> Result<Written, TraceError>,
) -> Result<Written, TraceError> {
    let io = |action| move |source| TraceError::Io { action, path: path.to_owned(), source };
    if path.is_dir() {
        for entry in fs::read_dir(path).map_err(io("look into"))? {
            let name = entry.map_err(io("look into"))?.file_name();
            if !name.to_str().is_some_and(&is_ours) {
                let reason = format!("it holds {}, which is not part of an export", name.to_string_lossy());
                return Err(io("replace")(std::io::Error::other(reason)));
            }
        }
    } else if path.exists() {
        return Err(io("make the directory")(std::io::Error::other("a file is there")));
    }
    let unusable = || io("create")(std::io::Error::other("the path does not name a directory"));
    let name = path.file_name().ok_or_else(unusable)?.to_string_lossy();
    let beside = |what: &str| path.with_file_name(format!(".{name}.{}.{what}", std::process::id()));
    let (new, old) = (TemporaryDirectory(beside("tmp")), TemporaryDirectory(beside("old")));
    fs::create_dir(&new.0).map_err(io("create"))?;
    let written = fill(&new.0)?;
    if path.is_dir() {
        fs::rename(path, &old.0).map_err(io("replace"))?;
    }
    if let Err(source) = fs::rename(&new.0, path) {
        let _ = fs::rename(&old.0, path); // there was none, or it goes back to its place
        return Err(io("put the finished tables at")(source));
    }
    Ok(written)
}

/// Removes its directory when dropped; after a rename there is nothing to remove.
struct TemporaryDirectory(PathBuf);

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        // Usually gone already; a failure to remove leaves litter, not a wrong answer.
        let _ = fs::remove_dir_all(&self.0);
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
