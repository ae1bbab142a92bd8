//! Reading files and fields with errors that name the place.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::DatasetError;

/// A place in a file: everything an error about it has to name.
pub(super) struct Place<'a> {
    pub(super) path: &'a Path,
    /// `line 3`, or `samples[3]` in a single-document file.
    pub(super) place: String,
}

impl<'a> Place<'a> {
    pub(super) fn line(path: &'a Path, line: usize) -> Place<'a> {
        Place { path, place: format!("line {line}") }
    }

    fn path(&self) -> PathBuf {
        self.path.to_path_buf()
    }

    pub(super) fn json(&self, error: &serde_json::Error) -> DatasetError {
        // A line's own line number is always 1 to the parser: keep its words and the column.
        let words = error.to_string();
        let words = words.split(" at line ").next().unwrap_or(&words);
        DatasetError::Json {
            path: self.path(),
            place: self.place.clone(),
            detail: format!("{words} at column {}", error.column()),
        }
    }

    pub(super) fn field(
        &self,
        field: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> DatasetError {
        DatasetError::Field {
            path: self.path(),
            place: self.place.clone(),
            field: field.into(),
            expected: expected.into(),
            found: found.into(),
        }
    }

    pub(super) fn object<'v>(&self, value: &'v Value) -> Result<&'v Map<String, Value>, DatasetError> {
        value.as_object().ok_or_else(|| DatasetError::NotAnObject {
            path: self.path(),
            place: self.place.clone(),
            found: describe(value),
        })
    }

    /// A required field that holds an integer in the given range.
    pub(super) fn integer(
        &self,
        object: &Map<String, Value>,
        field: &str,
        low: i64,
        high: i64,
        expected: &str,
    ) -> Result<i64, DatasetError> {
        let value = object.get(field).ok_or_else(|| self.field(field, expected, "no such field"))?;
        value.as_i64().filter(|n| (low..=high).contains(n)).ok_or_else(|| self.field(field, expected, describe(value)))
    }

    /// A text that must not be empty.
    pub(super) fn text(&self, value: &Value, field: &str) -> Result<String, DatasetError> {
        const EXPECTED: &str = "a text that is not empty";
        match value {
            Value::String(text) if !text.is_empty() => Ok(text.clone()),
            other => Err(self.field(field, EXPECTED, describe(other))),
        }
    }
}

/// A short description of a value for an error message: its kind, and the value itself if small.
pub(super) fn describe(value: &Value) -> String {
    const LONGEST: usize = 40;
    match value {
        Value::Null => "null".to_string(),
        Value::Bool(b) => format!("{b}"),
        Value::Number(n) => format!("{n}"),
        Value::String(s) if s.is_empty() => "an empty text".to_string(),
        Value::String(s) => {
            let short: String = s.chars().take(LONGEST).collect();
            let dots = if short.len() < s.len() { "..." } else { "" };
            format!("the text {short:?}{dots}")
        }
        Value::Array(items) if items.is_empty() => "an empty list".to_string(),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".to_string(),
    }
}

/// The name under which standard input is read.
pub(super) const STANDARD_INPUT: &str = "-";

/// The file's bytes, without a byte order mark.
pub(super) fn read_bytes(path: &Path) -> Result<Vec<u8>, DatasetError> {
    const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";
    if path.is_dir() {
        return Err(DatasetError::IsDirectory { path: path.to_path_buf() });
    }
    let read = || match path.as_os_str() == STANDARD_INPUT {
        true => {
            let mut bytes = Vec::new();
            io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes)
        }
        false => fs::read(path),
    };
    let mut bytes = read().map_err(|source| DatasetError::Io { path: path.to_path_buf(), source })?;
    if bytes.starts_with(BYTE_ORDER_MARK) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    Ok(bytes)
}

/// The lines that are not blank, each with its number from 1, checked to be UTF-8.
pub(super) fn lines<'a>(
    path: &'a Path,
    bytes: &'a [u8],
) -> impl Iterator<Item = Result<(usize, &'a str), DatasetError>> {
    bytes.split(|&b| b == b'\n').enumerate().filter(|(_, line)| !line.trim_ascii().is_empty()).map(
        move |(index, line)| match std::str::from_utf8(line) {
            Ok(text) => Ok((index + 1, text.trim())),
            Err(error) => Err(DatasetError::NotUtf8 {
                path: path.to_path_buf(),
                place: format!("line {}", index + 1),
                offset: error.valid_up_to(),
            }),
        },
    )
}
