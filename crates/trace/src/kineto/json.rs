//! The little of JSON that a trace needs, read from chunks of a stream.
//!
//! An event is parsed where it lies in the buffer and parsed again from its start when the buffer ends in the middle of
//! it, so that the parser itself never has to wait. It is lenient on purpose: raw control characters, unknown escapes
//! and bare words such as `NaN` are taken as they come, because real files have them and only the fields that matter
//! have to make sense.

use std::io::Read;

/// Why a value could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The bytes at hand end before the value does.
    Incomplete,
    /// This is not JSON.
    Invalid,
}

/// How deep values may nest. Real traces stay below ten; without a limit a damaged file could make the search for the
/// next event start over at every level.
const MAX_DEPTH: u32 = 256;

/// A place in bytes that hold JSON text.
pub(super) struct Cursor<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Skips white space and looks at the byte behind it.
    #[inline(always)]
    pub(super) fn next(&mut self) -> Result<u8, Stop> {
        loop {
            match self.bytes.get(self.at) {
                Some(&byte) if byte > b' ' => return Ok(byte),
                Some(_) => self.at += 1,
                None => return Err(Stop::Incomplete),
            }
        }
    }

    /// Skips white space and takes `expected`.
    #[inline(always)]
    pub(super) fn take(&mut self, expected: u8) -> Result<(), Stop> {
        if self.next()? != expected {
            return Err(Stop::Invalid);
        }
        self.at += 1;
        Ok(())
    }

    /// Takes a string and gives what stands between its quotes, still escaped.
    #[inline(always)]
    pub(super) fn string(&mut self) -> Result<&'a [u8], Stop> {
        self.take(b'"')?;
        let start = self.at;
        loop {
            self.at += quote_or_backslash(&self.bytes[self.at..]).ok_or(Stop::Incomplete)?;
            if self.bytes[self.at] == b'"' {
                self.at += 1;
                return Ok(&self.bytes[start..self.at - 1]);
            }
            self.at += 2;
            if self.at > self.bytes.len() {
                return Err(Stop::Incomplete);
            }
        }
    }

    /// Takes any value and gives its text, strings with their quotes.
    #[inline(always)]
    pub(super) fn value(&mut self) -> Result<&'a [u8], Stop> {
        let first = self.next()?;
        let start = self.at;
        match first {
            b'"' => drop(self.string()?),
            b'{' | b'[' => self.container()?,
            b',' | b':' | b'}' | b']' => return Err(Stop::Invalid),
            _ => self.word()?,
        }
        Ok(&self.bytes[start..self.at])
    }

    /// Takes a number or another bare word.
    #[inline(always)]
    fn word(&mut self) -> Result<(), Stop> {
        loop {
            match self.bytes.get(self.at) {
                Some(b',' | b'}' | b']' | 0..=b' ') => return Ok(()),
                Some(b'"' | b'{' | b'[' | b':') => return Err(Stop::Invalid),
                Some(_) => self.at += 1,
                None => return Err(Stop::Incomplete),
            }
        }
    }

    /// Skips an array or object that starts here.
    fn container(&mut self) -> Result<(), Stop> {
        let mut skip = Skip::default();
        self.at += skip.over(&self.bytes[self.at..])?;
        if skip.done() { Ok(()) } else { Err(Stop::Incomplete) }
    }

    /// Takes an object; `field` takes the value of each key.
    #[inline(always)]
    pub(super) fn object(
        &mut self,
        mut field: impl FnMut(&mut Self, &'a [u8]) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        self.take(b'{')?;
        if self.next()? == b'}' {
            self.at += 1;
            return Ok(());
        }
        loop {
            let key = self.string()?;
            self.take(b':')?;
            field(self, key)?;
            match self.next()? {
                b',' => self.at += 1,
                b'}' => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err(Stop::Invalid),
            }
        }
    }
}

/// Skips one array or object, also across the ends of buffers.
#[derive(Default)]
pub(super) struct Skip {
    depth: u32,
    in_string: bool,
    escaped: bool,
    begun: bool,
}

impl Skip {
    /// Whether the value has ended.
    pub(super) fn done(&self) -> bool {
        self.begun && self.depth == 0 && !self.in_string
    }

    /// Goes on through `bytes` and gives how many of them belong to the value.
    pub(super) fn over(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
        let mut at = 0;
        while at < bytes.len() {
            if self.in_string {
                if self.escaped {
                    self.escaped = false;
                    at += 1;
                    continue;
                }
                let Some(distance) = quote_or_backslash(&bytes[at..]) else { return Ok(bytes.len()) };
                at += distance;
                self.escaped = bytes[at] == b'\\';
                self.in_string = self.escaped;
                at += 1;
                if self.done() {
                    return Ok(at);
                }
                continue;
            }
            let Some(distance) = structure(&bytes[at..]) else { return Ok(bytes.len()) };
            at += distance;
            let byte = bytes[at];
            at += 1;
            match byte {
                b'"' => (self.in_string, self.begun) = (true, true),
                b'{' | b'[' => {
                    self.depth += 1;
                    self.begun = true;
                    if self.depth > MAX_DEPTH {
                        return Err(Stop::Invalid);
                    }
                }
                b'}' | b']' => {
                    self.depth = self.depth.checked_sub(1).ok_or(Stop::Invalid)?;
                    if self.depth == 0 {
                        return Ok(at);
                    }
                }
                _ => {}
            }
        }
        Ok(at)
    }
}

/// Where the first quote or backslash is.
#[inline(always)]
fn quote_or_backslash(bytes: &[u8]) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        let mut at = 0;
        for block in bytes.as_chunks::<16>().0 {
            // SAFETY: SSE2 belongs to every x86-64 processor, and the load takes exactly the 16 bytes of `block`.
            let hits = unsafe {
                let block = _mm_loadu_si128(block.as_ptr().cast());
                let quotes = _mm_cmpeq_epi8(block, _mm_set1_epi8(b'"' as i8));
                let backslashes = _mm_cmpeq_epi8(block, _mm_set1_epi8(b'\\' as i8));
                _mm_movemask_epi8(_mm_or_si128(quotes, backslashes))
            };
            if hits != 0 {
                return Some(at + hits.trailing_zeros() as usize);
            }
            at += 16;
        }
        bytes[at..].iter().position(|&b| matches!(b, b'"' | b'\\')).map(|rest| at + rest)
    }
    #[cfg(not(target_arch = "x86_64"))]
    bytes.iter().position(|&b| matches!(b, b'"' | b'\\'))
}

/// Where the first quote, bracket or brace is; rarely another byte, which the caller ignores.
#[inline(always)]
fn structure(bytes: &[u8]) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        let mut at = 0;
        for block in bytes.as_chunks::<16>().0 {
            // SAFETY: SSE2 belongs to every x86-64 processor, and the load takes exactly the 16 bytes of `block`.
            let hits = unsafe {
                // Brackets and braces differ only in the bit 0x20.
                let block = _mm_or_si128(_mm_loadu_si128(block.as_ptr().cast()), _mm_set1_epi8(0x20));
                let quotes = _mm_cmpeq_epi8(block, _mm_set1_epi8(b'"' as i8));
                let opening = _mm_cmpeq_epi8(block, _mm_set1_epi8(b'{' as i8));
                let closing = _mm_cmpeq_epi8(block, _mm_set1_epi8(b'}' as i8));
                _mm_movemask_epi8(_mm_or_si128(quotes, _mm_or_si128(opening, closing)))
            };
            if hits != 0 {
                return Some(at + hits.trailing_zeros() as usize);
            }
            at += 16;
        }
        bytes[at..].iter().position(|&b| matches!(b, b'"' | b'{' | b'[' | b'}' | b']')).map(|rest| at + rest)
    }
    #[cfg(not(target_arch = "x86_64"))]
    bytes.iter().position(|&b| matches!(b, b'"' | b'{' | b'[' | b'}' | b']'))
}

/// A value without the quotes of a string; `null` is empty.
pub(super) fn unquoted(value: &[u8]) -> &[u8] {
    match value {
        [b'"', inner @ .., b'"'] => inner,
        b"null" => b"",
        _ => value,
    }
}

/// Puts the text of an escaped string into `out`.
pub(super) fn unescape(raw: &[u8], out: &mut String) {
    out.clear();
    let mut rest = raw;
    while let Some(backslash) = rest.iter().position(|&b| b == b'\\') {
        out.push_str(&String::from_utf8_lossy(&rest[..backslash]));
        let Some(&escape) = rest.get(backslash + 1) else { return };
        rest = &rest[backslash + 2..];
        match escape {
            b'n' => out.push('\n'),
            b't' => out.push('\t'),
            b'r' => out.push('\r'),
            b'b' => out.push('\u{8}'),
            b'f' => out.push('\u{c}'),
            b'u' => {
                let Some(mut code) = hex4(rest) else {
                    out.push(char::REPLACEMENT_CHARACTER);
                    continue;
                };
                rest = &rest[4..];
                if (0xD800..0xDC00).contains(&code)
                    && let Some(low) = rest.strip_prefix(b"\\u").and_then(hex4)
                    && (0xDC00..0xE000).contains(&low)
                {
                    code = 0x1_0000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                    rest = &rest[6..];
                }
                out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            ascii if ascii.is_ascii() => out.push(char::from(ascii)),
            _ => out.push(char::REPLACEMENT_CHARACTER),
        }
    }
    out.push_str(&String::from_utf8_lossy(rest));
}

fn hex4(bytes: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(bytes.get(..4)?).ok()?;
    u32::from_str_radix(digits, 16).ok()
}

/// Bytes of a stream, of which a part lies in a buffer.
pub(super) struct Input<'r> {
    reader: &'r mut dyn Read,
    buffer: Vec<u8>,
    /// Where the unread bytes begin in `buffer`.
    start: usize,
    /// Where they end.
    end: usize,
    /// Whether the stream has no more.
    pub(super) ended: bool,
    /// Bytes taken from the stream so far.
    pub(super) taken: u64,
    /// Why the stream ended early: damaged compression.
    pub(super) damage: Option<std::io::Error>,
}

/// Small enough to stay in a processor's second cache.
const CHUNK: usize = 256 << 10;

impl<'r> Input<'r> {
    pub(super) fn new(reader: &'r mut dyn Read) -> Self {
        Self { reader, buffer: Vec::new(), start: 0, end: 0, ended: false, taken: 0, damage: None }
    }

    /// The bytes at hand.
    #[inline(always)]
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Marks bytes at hand as read.
    #[inline(always)]
    pub(super) fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
    }

    /// Gets more bytes behind those at hand. `false`: there are no more.
    pub(super) fn fill(&mut self) -> std::io::Result<bool> {
        if self.ended {
            return Ok(false);
        }
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let wanted = (self.end + CHUNK / 2).max(2 * self.end).max(CHUNK);
        if self.buffer.len() < wanted {
            self.buffer.resize(wanted, 0);
        }
        loop {
            match self.reader.read(&mut self.buffer[self.end..]) {
                Ok(0) => self.ended = true,
                Ok(count) => {
                    self.end += count;
                    self.taken += count as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) if is_damage(&error) => {
                    self.ended = true;
                    self.damage = Some(error);
                }
                Err(error) => return Err(error),
            }
            return Ok(!self.ended);
        }
    }
}

/// Whether a decoder complains about the data, rather than the system about the file.
fn is_damage(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof) && error.raw_os_error().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_of_every_length_end_at_their_quote() {
        for length in 0..70 {
            for escape in 0..=length {
                let mut text = vec![b'a'; length];
                text.splice(escape..escape, *b"\\\"");
                let json = [b"\"", &text[..], b"\" rest"].concat();
                let mut cursor = Cursor::new(&json);
                assert_eq!(cursor.string(), Ok(&text[..]));
                for cut in 0..text.len() + 2 {
                    assert_eq!(Cursor::new(&json[..cut]).string(), Err(Stop::Incomplete), "{cut}");
                }
            }
        }
    }

    #[test]
    fn values_are_skipped_whole() {
        let json = br#"{"a]": [1, {"b": "}\\"}, []], "c": NaN} tail"#;
        let mut cursor = Cursor::new(json);
        assert_eq!(cursor.value().map(<[u8]>::len), Ok(json.len() - 5));
        for cut in 0..json.len() - 5 {
            assert_eq!(Cursor::new(&json[..cut]).value(), Err(Stop::Incomplete));
        }
        let deep = [b'['; 100_000];
        assert_eq!(Cursor::new(&deep).value(), Err(Stop::Invalid));
    }

    #[test]
    fn escapes() {
        let mut out = String::new();
        unescape(br#"a\n\"\\\/\u00e9\ud83d\ude00\ud83d x\q"#, &mut out);
        assert_eq!(out, "a\n\"\\/\u{e9}\u{1f600}\u{fffd} xq");
        unescape(b"\xff\\u12", &mut out);
        assert_eq!(out, "\u{fffd}\u{fffd}12");
    }
}
