//! What the words of an event mean.

use super::super::event::Event;
use super::super::json::{Cursor, unescape, unquoted};
use super::super::number::integer;
use crate::{Interner, OpDetail, RangeSource, StrId};

pub(super) fn intern(strings: &mut Interner, scratch: &mut String, raw: &[u8]) -> StrId {
    match std::str::from_utf8(raw) {
        Ok(text) if !raw.contains(&b'\\') => strings.intern(text),
        _ => {
            unescape(raw, scratch);
            strings.intern(scratch)
        }
    }
}

pub(super) fn text(raw: &[u8]) -> String {
    let mut out = String::new();
    unescape(raw, &mut out);
    out
}

/// A program's name without the options behind it: those may hold secrets.
pub(super) fn without_arguments(mut name: String) -> String {
    if let Some(options) = name.find(" -") {
        name.truncate(options);
    }
    name
}

pub(super) fn for_each_argument<'a>(args: &'a [u8], mut each: impl FnMut(&'a [u8], &'a [u8])) {
    let mut cursor = Cursor::new(args);
    // Arguments that were only skipped so far may turn out to be broken: then the first of them count.
    let _ = cursor.object(|cursor, key| {
        each(key, unquoted(cursor.value()?));
        Ok(())
    });
}

/// The label in front of a process id, where there is one, and the id itself.
pub(super) fn split_label(pid: &[u8]) -> (&[u8], &[u8]) {
    if let Some(rest) = pid.strip_prefix(b"[")
        && let Some(end) = rest.iter().position(|&b| b == b']')
    {
        return (&rest[..end], rest[end + 1..].trim_ascii());
    }
    (b"", pid)
}

pub(super) fn small(text: &[u8]) -> Option<u32> {
    integer(text).and_then(|number| u32::try_from(number).ok())
}

/// How a range was made that strobe wrote as an annotation.
pub(super) fn annotation_source(recorded: &[u8]) -> RangeSource {
    match recorded {
        b"push_pop" => RangeSource::PushPop,
        b"start_end" => RangeSource::StartEnd,
        _ => RangeSource::Annotation,
    }
}

/// The kind of memory in a name like `Memset (Device)`.
pub(super) fn memset_memory(name: &[u8]) -> u8 {
    let inner = name.strip_prefix(b"Memset (").and_then(|rest| rest.strip_suffix(b")"));
    inner.and_then(|kind| std::str::from_utf8(kind).ok()).map_or(255, memory_kind)
}

/// The number at the end of e.g. `stream 7`.
pub(super) fn trailing_number(text: &[u8]) -> Option<u32> {
    let text = text.trim_ascii_end();
    let digits = text.iter().rev().take_while(|b| b.is_ascii_digit()).count();
    small(&text[text.len() - digits..])
}

/// Whether a list of texts has one that is not empty.
pub(super) fn has_value(list: &[u8]) -> bool {
    list.iter().any(|byte| !matches!(byte, b'[' | b']' | b'"' | b',' | b' ' | b'\n' | b'\r' | b'\t'))
}

/// Whether lists of numbers have a 0.
pub(super) fn has_zero(lists: &[u8]) -> bool {
    let zero = |at: usize| {
        let digit = |at: Option<usize>| at.and_then(|at| lists.get(at)).is_some_and(u8::is_ascii_digit);
        lists[at] == b'0' && !digit(at.checked_sub(1)) && !digit(Some(at + 1))
    };
    (0..lists.len()).any(zero)
}

/// The numbers of `[x, y, z]`; what is missing is 0.
pub(super) fn triple(array: &[u8]) -> [u32; 3] {
    let mut numbers = [0; 3];
    let inner = array.strip_prefix(b"[").and_then(|rest| rest.strip_suffix(b"]")).unwrap_or(b"");
    for (slot, number) in numbers.iter_mut().zip(inner.split(|&b| b == b',')) {
        *slot = small(number.trim_ascii()).unwrap_or(0);
    }
    numbers
}

/// The number of a kind of memory.
pub(super) fn memory_kind(name: &str) -> u8 {
    match name {
        "Pageable" => 0,
        "Pinned" => 1,
        "Device" => 2,
        "Array" => 3,
        "Managed" => 4,
        "Device Static" => 5,
        "Managed Static" => 6,
        "Unknown" => 7,
        _ => 255,
    }
}

/// What the name of a copy tells, e.g. `Memcpy HtoD (Pageable -> Device)`.
pub(super) fn copy_detail(event: &Event) -> OpDetail {
    let name = event.name.strip_prefix(b"Memcpy ").unwrap_or(event.name);
    // Older AMD traces write it in words.
    let in_words = match name {
        b"CopyHostToDevice" => Some(1),
        b"CopyDeviceToHost" => Some(2),
        b"CopyDeviceToDevice" => Some(8),
        _ => None,
    };
    let direction = |text: &[u8]| match text.get(..4) {
        Some(b"HtoD") => Some(1),
        Some(b"DtoH") => Some(2),
        Some(b"HtoA") => Some(3),
        Some(b"AtoH") => Some(4),
        Some(b"AtoA") => Some(5),
        Some(b"AtoD") => Some(6),
        Some(b"DtoA") => Some(7),
        Some(b"DtoD") => Some(8),
        Some(b"HtoH") => Some(9),
        Some(b"PtoP") => Some(10),
        _ => None,
    };
    let in_brackets = || {
        let open = name.iter().position(|&b| b == b'(')?;
        let inner = std::str::from_utf8(name.get(open + 1..)?.strip_suffix(b")")?).ok()?;
        inner.split_once(" -> ")
    };
    let (src_kind, dst_kind) = in_brackets().map_or((255, 255), |(from, to)| (memory_kind(from), memory_kind(to)));
    OpDetail::Memcpy {
        copy_kind: direction(name).or_else(|| direction(event.known.kind)).or(in_words).unwrap_or(0),
        src_kind,
        dst_kind,
        src_device: small(event.known.from_device),
        dst_device: small(event.known.to_device),
        cause: 0,
    }
}

/// A number with separators: `4,812`.
pub(in super::super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
