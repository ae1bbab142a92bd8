//! Text that is safe inside HTML and SVG.

use std::borrow::Cow;

/// Escapes what has a meaning in element content or a quoted attribute, and replaces control characters that
/// XML forbids.
pub(crate) fn escape(text: &str) -> Cow<'_, str> {
    let special = |c: char| matches!(c, '&' | '<' | '>' | '"' | '\'') || forbidden(c);
    if !text.contains(special) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c if forbidden(c) => safe.push('\u{FFFD}'),
            c => safe.push(c),
        }
    }
    Cow::Owned(safe)
}

fn forbidden(c: char) -> bool {
    (c.is_control() && !matches!(c, '\n' | '\r' | '\t')) || matches!(c, '\u{FFFE}' | '\u{FFFF}')
}

#[cfg(test)]
mod tests {
    use super::escape;

    #[test]
    fn markup_loses_its_meaning() {
        assert_eq!(escape("plain µs"), "plain µs");
        assert_eq!(escape("<a b='c' d=\"&\">\u{1}"), "&lt;a b=&#39;c&#39; d=&quot;&amp;&quot;&gt;\u{FFFD}");
    }
}
