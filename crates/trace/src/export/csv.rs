//! Comma-separated values: a header line, then a line per row. Null is an empty field, empty text a pair of quotes.

use std::io::Write;

use super::json::push_unsigned;
use super::tables::{Table, Values};
use crate::TraceError;

const FLUSH_AT: usize = 1 << 18;

/// Writes one table.
pub(crate) fn write(table: &Table, mut out: impl Write) -> Result<(), TraceError> {
    let mut line = Vec::with_capacity(FLUSH_AT + (1 << 12));
    let names: Vec<&str> = table.columns.iter().map(|column| column.name).collect();
    line.extend_from_slice(names.join(",").as_bytes());
    line.push(b'\n');
    for row in 0..table.rows {
        for (index, column) in table.columns.iter().enumerate() {
            if index > 0 {
                line.push(b',');
            }
            push_value(&mut line, &column.values, row);
        }
        line.push(b'\n');
        if line.len() >= FLUSH_AT {
            out.write_all(&line)?;
            line.clear();
        }
    }
    out.write_all(&line)?;
    Ok(())
}

fn push_value(line: &mut Vec<u8>, values: &Values, row: usize) {
    match values {
        Values::Int(get) => {
            let Some(value) = get(row) else { return };
            if value < 0 {
                line.push(b'-');
            }
            push_unsigned(line, value.unsigned_abs());
        }
        Values::Unsigned(get) => {
            let Some(value) = get(row) else { return };
            push_unsigned(line, value);
        }
        Values::Float(get) => {
            let Some(value) = get(row) else { return };
            let _ = write!(line, "{value}"); // into memory: cannot fail
        }
        Values::Flag(get) => {
            let Some(value) = get(row) else { return };
            line.extend_from_slice(if value { b"true" } else { b"false" });
        }
        Values::Text(get) => {
            let Some(value) = get(row) else { return };
            push_text(line, value);
        }
    }
}

fn push_text(line: &mut Vec<u8>, text: &str) {
    let is_plain = |b: &u8| !matches!(b, b',' | b'"' | b'\n' | b'\r');
    let edges_are_plain = text.trim() == text && !text.is_empty();
    if edges_are_plain && text.as_bytes().iter().all(is_plain) {
        line.extend_from_slice(text.as_bytes());
        return;
    }
    line.push(b'"');
    for &byte in text.as_bytes() {
        if byte == b'"' {
            line.push(b'"');
        }
        line.push(byte);
    }
    line.push(b'"');
}
