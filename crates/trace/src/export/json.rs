//! JSON text written piece by piece: a tree of values for millions of events would cost more than the trace.

use std::io::Write;

use crate::{StrId, Trace};

/// A stream of JSON text with the little that an exporter of events needs.
pub(crate) struct JsonWriter<W: Write> {
    out: W,
    buffer: Vec<u8>,
}

const FLUSH_AT: usize = 1 << 18;

impl<W: Write> JsonWriter<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, buffer: Vec::with_capacity(FLUSH_AT + (1 << 12)) }
    }

    /// Text as it is.
    pub(crate) fn raw(&mut self, text: impl AsRef<[u8]>) -> &mut Self {
        self.buffer.extend_from_slice(text.as_ref());
        self
    }

    /// A number.
    pub(crate) fn int(&mut self, value: i64) -> &mut Self {
        if value < 0 {
            self.buffer.push(b'-');
        }
        self.unsigned(value.unsigned_abs())
    }

    /// A number.
    pub(crate) fn unsigned(&mut self, value: u64) -> &mut Self {
        push_unsigned(&mut self.buffer, value);
        self
    }

    /// A number that is finite.
    pub(crate) fn float(&mut self, value: f64) -> &mut Self {
        let _ = write!(self.buffer, "{value}"); // into memory: cannot fail
        self
    }

    /// Nanoseconds as microseconds with all three decimals: a float would lose digits.
    pub(crate) fn microseconds(&mut self, ns: i64) -> &mut Self {
        if ns < 0 {
            self.buffer.push(b'-');
        }
        let ns = ns.unsigned_abs();
        push_unsigned(&mut self.buffer, ns / 1000);
        let digit = |of: u64| b'0' + (of % 10) as u8;
        self.raw([b'.', digit(ns / 100), digit(ns / 10), digit(ns)])
    }

    /// A string in quotes.
    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        push_quoted(&mut self.buffer, text);
        self
    }

    /// Hands text on once there is enough of it.
    pub(crate) fn settle(&mut self) -> std::io::Result<()> {
        if self.buffer.len() >= FLUSH_AT {
            self.out.write_all(&self.buffer)?;
            self.buffer.clear();
        }
        Ok(())
    }

    /// Hands on the rest.
    pub(crate) fn finish(mut self) -> std::io::Result<W> {
        self.out.write_all(&self.buffer)?;
        self.out.flush()?;
        Ok(self.out)
    }
}

/// Appends a decimal number.
pub(crate) fn push_unsigned(buffer: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    buffer.extend_from_slice(&digits[at..]);
}

/// Appends a JSON string in quotes.
pub(crate) fn push_quoted(buffer: &mut Vec<u8>, text: &str) {
    buffer.push(b'"');
    for &byte in text.as_bytes() {
        match byte {
            b'"' | b'\\' => buffer.extend_from_slice(&[b'\\', byte]),
            0..0x20 => {
                let _ = write!(buffer, "\\u{byte:04x}"); // into memory: cannot fail
            }
            _ => buffer.push(byte),
        }
    }
    buffer.push(b'"');
}

/// The strings of a trace in quotes, each made once.
pub(crate) struct QuotedStrings {
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl QuotedStrings {
    pub(crate) fn of(trace: &Trace) -> Self {
        let mut quoted = Self { text: Vec::new(), ends: Vec::with_capacity(trace.strings.len()) };
        for (_, text) in trace.strings.iter() {
            push_quoted(&mut quoted.text, text);
            quoted.ends.push(quoted.text.len());
        }
        quoted
    }

    /// The string in quotes; `""` when there is none.
    pub(crate) fn get(&self, id: StrId) -> &[u8] {
        let index = id.0 as usize;
        let Some(&end) = self.ends.get(index) else { return b"\"\"" };
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.text[start..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_times_and_strings_are_exact() {
        let mut json = JsonWriter::new(Vec::new());
        json.int(i64::MIN).raw(" ").unsigned(u64::MAX).raw(" ").microseconds(-5).raw(" ").microseconds(1_234_567);
        json.raw(" ").text("a\"\\\n\u{7f}é").raw(" ").float(0.1);
        let text = String::from_utf8(json.finish().unwrap()).unwrap();
        let expected = "-9223372036854775808 18446744073709551615 -0.005 1234.567 \"a\\\"\\\\\\u000a\u{7f}é\" 0.1";
        assert_eq!(text, expected);
    }
}
