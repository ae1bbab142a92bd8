//! Text that others wrote, such as names in a trace or of files, made fit for a terminal.

use std::borrow::Cow;
use std::fmt::Write;

/// Whether a terminal may take a letter for a command, or show others in another order because of it.
pub(crate) fn is_unfit(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            // Marks, embeddings, overrides and isolates of direction; separators of lines and paragraphs.
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// A piece of text on one line: control characters, escape sequences, line breaks and overrides of direction are shown as
/// `\x1b`, `\n`, `\u202e`.
pub fn escaped(text: &str) -> Cow<'_, str> {
    escape(text, |_| false)
}

/// The same for text that was laid out in lines: these stay.
pub fn escaped_lines(text: &str) -> Cow<'_, str> {
    escape(text, |letter| letter == '\n')
}

fn escape(text: &str, keep: impl Fn(char) -> bool) -> Cow<'_, str> {
    let changes = |letter: char| is_unfit(letter) && !keep(letter);
    if !text.chars().any(changes) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        // Writing to a string does not fail.
        let _ = match letter {
            letter if !changes(letter) => write!(out, "{letter}"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            letter if u32::from(letter) < 0x100 => write!(out, "\\x{:02x}", u32::from(letter)),
            letter => write!(out, "\\u{:04x}", u32::from(letter)),
        };
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_shown() {
        assert_eq!(
            escaped("a\u{1b}[31mred\nnext\u{202e}evil\t\u{9b}2J\r"),
            "a\\x1b[31mred\\nnext\\u202eevil\\t\\x9b2J\\r"
        );
        assert_eq!(escaped("\u{2066}a\u{2069}\u{200f}\u{2028}\u{7f}\0"), "\\u2066a\\u2069\\u200f\\u2028\\x7f\\x00");
        assert_eq!(escaped_lines("one\ntwo\u{7}\n"), "one\ntwo\\x07\n");
    }

    #[test]
    fn other_text_is_not_touched() {
        let plain = "void gemm<float>(T*) µs … — Größe 内核 مرحبا 👩‍💻";
        assert!(matches!(escaped(plain), Cow::Borrowed(same) if same == plain));
    }
}
