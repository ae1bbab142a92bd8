//! Traces of the PyTorch profiler (Kineto), and Chrome traces in general.
//!
//! The file is read once, in chunks, and never held in memory. Damage costs the events it hits: the reader goes on at
//! the next one and says how many were lost.

mod builder;
mod event;
mod json;
mod number;

use std::io::Read;
use std::path::Path;

use builder::{Builder, grouped};
use event::Event;
use json::{Cursor, Input, Skip, Stop};

use crate::{Trace, TraceError};

/// No real event is larger. A string without an end would otherwise draw the rest of the file into memory.
const MAX_EVENT: usize = 64 << 20;

/// The largest item of a list of events that is recognised as something else.
const MAX_STRAY: usize = 64 << 10;

/// The largest value of the root object that is looked into.
const MAX_ROOT_VALUE: usize = 4 << 20;

/// Reads a trace. `path` is for messages and [`crate::Source::path`]; `progress` is told the bytes read so far.
pub fn read(mut reader: impl Read, path: &Path, progress: &mut dyn FnMut(u64)) -> Result<Trace, TraceError> {
    let mut file = File {
        input: Input::new(&mut reader),
        builder: Builder::new(),
        progress,
        index: 0,
        lost: 0,
        strays: 0,
        cut: None,
        unclosed: false,
        saw_events: false,
    };
    let outcome = file.all();
    outcome.map_err(|source| TraceError::Io { action: "read", path: path.to_path_buf(), source })?;
    let File { input, builder, lost, strays, cut, unclosed, saw_events, .. } = file;
    if builder.events == 0 {
        let found = match (input.taken, saw_events, lost) {
            (0, ..) => "an empty file".to_string(),
            _ if builder.no_phase > 0 => "JSON in which no event says what it is (`ph`)".to_string(),
            (_, _, 1..) => "JSON in which no event of a trace is whole".to_string(),
            (_, true, _) => "a trace without any event".to_string(),
            _ => "JSON without trace events".to_string(),
        };
        let advice = "expected a PyTorch profiler or Chrome trace: an object with `traceEvents`, or an array of events";
        return Err(TraceError::NotATrace { path: path.to_path_buf(), found, advice: advice.into() });
    }
    let (untimed, absurd, backward, no_phase) = (builder.untimed, builder.absurd, builder.backward, builder.no_phase);
    // The decoder compares checksums when it has all of the data.
    let only_checksum = input.damage.as_ref().is_some_and(|error| error.to_string().contains("checksum"));
    let cut_short = unclosed || cut.is_some() || (input.damage.is_some() && !only_checksum);
    let damage = input.damage.as_ref().map(|error| {
        let bytes = grouped(input.taken);
        if only_checksum {
            let whole = !cut_short && lost == 0;
            let rest = if whole { "all events were read" } else { "what was read may be wrong" };
            return format!("the checksum of the compressed data is wrong; {rest}");
        }
        format!("the compressed data is damaged after {bytes} bytes of JSON ({error}): what follows is lost")
    });
    let mut trace = builder.finish(path, input.taken, lost + strays + untimed + absurd + no_phase);
    let mut notices: Vec<String> = damage.into_iter().collect();
    let event = |count: u64| if count == 1 { "1 event".to_string() } else { format!("{} events", grouped(count)) };
    if let Some(index) = cut {
        notices.push(format!("the file ends in the middle of event {}: 1 event lost", grouped(index)));
    }
    if unclosed && cut.is_none() && input.damage.is_none() {
        notices.push("the file ends before its list of events does: later events are missing".into());
    }
    let broken = lost - u64::from(cut.is_some());
    if broken > 0 {
        notices.push(format!("{} lost: the JSON is invalid there", event(broken)));
    }
    if untimed > 0 {
        notices.push(format!("{} lost: no time that 64 bits of nanoseconds can hold", event(untimed)));
    }
    if no_phase > 0 {
        notices.push(format!("{} left out: without a phase (`ph`) of one letter", event(no_phase)));
    }
    if strays > 0 {
        let items = if strays == 1 { "1 item".to_string() } else { format!("{} items", grouped(strays)) };
        notices.push(format!("{items} of the list of events lost: not an object each"));
    }
    if absurd > 0 {
        notices.push(format!("{} left out: more than 10 years away from the others", event(absurd)));
    }
    if backward > 0 {
        notices.push(format!("{} kept with no length: the end is before the start", event(backward)));
    }
    trace.meta.partial = cut_short;
    notices.append(&mut trace.meta.notices);
    trace.meta.notices = notices;
    Ok(trace)
}

struct File<'r> {
    input: Input<'r>,
    builder: Builder,
    progress: &'r mut dyn FnMut(u64),
    /// Events met so far, in the order of the file.
    index: u64,
    lost: u64,
    /// Items of a list of events that are no objects.
    strays: u64,
    /// The event in the middle of which the file ends.
    cut: Option<u64>,
    /// Whether the file ends before its list of events does.
    unclosed: bool,
    saw_events: bool,
}

/// What a search for the next event found.
enum Found {
    /// An event that is whole, or nothing more of the file.
    EventOrEnd,
    /// The end of the array of events.
    ArrayEnd,
}

impl File<'_> {
    fn fill(&mut self) -> std::io::Result<bool> {
        let more = self.input.fill()?;
        (self.progress)(self.input.taken);
        Ok(more)
    }

    /// Skips white space and looks at the next byte; `None` at the end of the file.
    fn next(&mut self) -> std::io::Result<Option<u8>> {
        loop {
            let bytes = self.input.bytes();
            if let Some(at) = bytes.iter().position(|&b| b > b' ') {
                let byte = bytes[at];
                self.input.consume(at);
                return Ok(Some(byte));
            }
            self.input.consume(bytes.len());
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Whether the file goes on with `text`.
    fn starts_with(&mut self, text: &[u8]) -> std::io::Result<bool> {
        while self.input.bytes().len() < text.len() && self.fill()? {}
        Ok(self.input.bytes().starts_with(text))
    }

    fn all(&mut self) -> std::io::Result<()> {
        if self.starts_with(b"\xef\xbb\xbf")? {
            self.input.consume(3);
        }
        while let Some(byte) = self.next()? {
            match byte {
                b'[' => {
                    self.input.consume(1);
                    self.events()?;
                    self.builder.end_root();
                }
                // One event per line, without an array around them.
                b'{' if self.object_kind()? == Object::Event => self.events()?,
                b'{' => {
                    self.root()?;
                    self.builder.end_root();
                }
                // Between and behind roots: garbage, the closing brackets of what was damaged.
                _ => self.input.consume(1),
            }
        }
        self.builder.end_root();
        Ok(())
    }

    /// What the object that starts here is, by its first key.
    fn object_kind(&mut self) -> std::io::Result<Object> {
        loop {
            let mut cursor = Cursor::new(self.input.bytes());
            match cursor.take(b'{').and_then(|()| cursor.string()).map(Object::with_key) {
                Ok(kind) => return Ok(kind),
                Err(Stop::Incomplete) if self.input.bytes().len() < 4096 && self.fill()? => {}
                Err(_) => return Ok(Object::Other),
            }
        }
    }

    /// Reads a root object. Objects within it are entered, so that the events are found wherever they are.
    fn root(&mut self) -> std::io::Result<()> {
        let mut depth = 0usize;
        let mut object_expected = true;
        loop {
            match self.next()? {
                None => return Ok(()),
                Some(b'{') if object_expected => {
                    object_expected = false;
                    depth += 1;
                    self.input.consume(1);
                }
                Some(b'{') => return Ok(()), // the next root, this one was never closed
                Some(b'}') => {
                    self.input.consume(1);
                    depth -= 1;
                    if depth == 0 {
                        return Ok(());
                    }
                }
                Some(b',') => self.input.consume(1),
                Some(b'"') => {
                    let Some(key) = self.key()? else {
                        if !self.find_events()? {
                            return Ok(());
                        }
                        self.events()?;
                        continue;
                    };
                    match (&key[..], self.next()?) {
                        (b"traceEvents", Some(b'[')) => {
                            self.input.consume(1);
                            self.events()?;
                            self.unclosed |= self.input.ended && self.input.bytes().is_empty();
                        }
                        (b"deviceProperties" | b"distributedInfo" | b"baseTimeNanoseconds" | b"strobe", Some(_)) => {
                            let mut text = Vec::new();
                            self.root_value(Some(&mut text))?;
                            self.builder.root_value(&key, &text);
                        }
                        (_, Some(b'{')) => object_expected = true,
                        (_, Some(_)) => self.root_value(None)?,
                        (_, None) => return Ok(()),
                    }
                }
                Some(_) => {
                    if !self.find_events()? {
                        return Ok(());
                    }
                    self.events()?;
                }
            }
        }
    }

    /// A key of the root object with its colon; `None` where there is no such thing.
    fn key(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        loop {
            let mut cursor = Cursor::new(self.input.bytes());
            let key = cursor.string().and_then(|key| cursor.take(b':').map(|()| key.to_vec()));
            let length = cursor.at;
            match key {
                Ok(key) => {
                    self.input.consume(length);
                    return Ok(Some(key));
                }
                Err(Stop::Incomplete) if self.input.bytes().len() < MAX_ROOT_VALUE && self.fill()? => {}
                Err(_) => return Ok(None),
            }
        }
    }

    /// Skips a value of the root object, keeping its text if that is wanted.
    fn root_value(&mut self, mut keep: Option<&mut Vec<u8>>) -> std::io::Result<()> {
        let Some(first) = self.next()? else { return Ok(()) };
        let is_word = !matches!(first, b'"' | b'{' | b'[');
        let mut skip = Skip::default();
        loop {
            let bytes = self.input.bytes();
            let (length, done) = if is_word {
                let end = bytes.iter().position(|b| matches!(b, b',' | b'}' | b']' | 0..=b' '));
                (end.unwrap_or(bytes.len()), end.is_some())
            } else {
                // Too deep or unbalanced: the keys that follow will make no sense, and the search for events begins.
                let Ok(length) = skip.over(bytes) else {
                    self.input.consume(1);
                    return Ok(());
                };
                (length, skip.done())
            };
            if let Some(kept) = keep.as_mut().filter(|kept| kept.len() < MAX_ROOT_VALUE) {
                kept.extend_from_slice(&bytes[..length]);
            }
            self.input.consume(length);
            if done || !self.fill()? {
                return Ok(());
            }
        }
    }

    /// Goes to the array of events when what stands before it makes no sense.
    fn find_events(&mut self) -> std::io::Result<bool> {
        const KEY: &[u8] = b"\"traceEvents\"";
        loop {
            let bytes = self.input.bytes();
            if let Some(at) = bytes.windows(KEY.len()).position(|window| window == KEY) {
                self.input.consume(at + KEY.len());
                if self.next()? == Some(b':') {
                    self.input.consume(1);
                    if self.next()? == Some(b'[') {
                        self.input.consume(1);
                        return Ok(true);
                    }
                }
                continue;
            }
            self.input.consume(bytes.len().saturating_sub(KEY.len() - 1));
            if !self.fill()? {
                return Ok(false);
            }
        }
    }

    /// Reads events up to the end of their array.
    fn events(&mut self) -> std::io::Result<()> {
        self.saw_events = true;
        loop {
            match self.next()? {
                None => return Ok(()),
                Some(b',') => self.input.consume(1),
                Some(b']') => {
                    self.input.consume(1);
                    return Ok(());
                }
                Some(b'{') => {
                    self.index += 1;
                    if self.event()? {
                        continue;
                    }
                    self.lost += 1;
                    if self.input.ended && self.only_cut() {
                        self.cut = Some(self.index);
                    }
                    self.input.consume(1);
                    if let Found::ArrayEnd = self.next_event()? {
                        return Ok(());
                    }
                }
                Some(_) => {
                    if self.stray()? {
                        continue;
                    }
                    if let Found::ArrayEnd = self.next_event()? {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Skips an item that is no event and holds none. `false`: it is not whole, and nothing was consumed.
    fn stray(&mut self) -> std::io::Result<bool> {
        loop {
            let mut cursor = Cursor::new(self.input.bytes());
            let item = cursor.value().map(|text| (text.contains(&b'{'), cursor.at));
            let item = item.and_then(|item| cursor.next().map(|behind| (item, behind)));
            match item {
                Ok(((false, length), b',' | b']')) => {
                    self.input.consume(length);
                    self.strays += 1;
                    return Ok(true);
                }
                Err(Stop::Incomplete) if self.input.bytes().len() < MAX_STRAY => {
                    if !self.fill()? {
                        return Ok(false);
                    }
                }
                _ => return Ok(false),
            }
        }
    }

    /// Reads the event that starts here. `false`: it is not whole, and nothing was consumed.
    fn event(&mut self) -> std::io::Result<bool> {
        loop {
            let mut cursor = Cursor::new(self.input.bytes());
            match Event::parse(&mut cursor) {
                Ok(event) => {
                    self.builder.add(&event);
                    let length = cursor.at;
                    self.input.consume(length);
                    return Ok(true);
                }
                Err(Stop::Incomplete) if self.input.bytes().len() < MAX_EVENT => {
                    if !self.fill()? {
                        return Ok(false);
                    }
                }
                Err(_) => return Ok(false),
            }
        }
    }

    /// Whether the event that starts here is fine as far as the file goes.
    fn only_cut(&self) -> bool {
        matches!(Event::parse(&mut Cursor::new(self.input.bytes())), Err(Stop::Incomplete))
    }

    /// Goes to the next object that is an element of an array or follows another one, and reads like an event. Objects
    /// that follow a colon are arguments.
    fn next_event(&mut self) -> std::io::Result<Found> {
        let mut before = b' ';
        loop {
            let Some(byte) = self.next()? else { return Ok(Found::EventOrEnd) };
            match byte {
                b'{' => match self.object_kind()? {
                    Object::Root => return Ok(Found::ArrayEnd),
                    Object::Event if matches!(before, b',' | b'[' | b'}') => return Ok(Found::EventOrEnd),
                    _ => {}
                },
                b']' if self.ends_events()? => return Ok(Found::ArrayEnd),
                _ => {}
            }
            before = byte;
            self.input.consume(1);
        }
    }

    /// Whether the bracket here closes the array of events: a key of the root follows.
    fn ends_events(&mut self) -> std::io::Result<bool> {
        while self.input.bytes().len() < 64 && self.fill()? {}
        let mut cursor = Cursor::new(self.input.bytes());
        cursor.at = 1;
        let key = cursor.take(b',').and_then(|()| cursor.string());
        let ends = key.is_ok_and(|key| Object::with_key(key) == Object::Root);
        if ends {
            self.input.consume(1);
        }
        Ok(ends)
    }
}

/// What an object is, by its first key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Object {
    Event,
    /// The root of a trace.
    Root,
    Other,
}

impl Object {
    fn with_key(key: &[u8]) -> Self {
        match key {
            b"ph" | b"cat" | b"name" | b"pid" | b"tid" | b"ts" | b"dur" | b"args" | b"id" | b"s" | b"bp" | b"tts" => {
                Object::Event
            }
            b"traceEvents"
            | b"schemaVersion"
            | b"deviceProperties"
            | b"distributedInfo"
            | b"baseTimeNanoseconds"
            | b"displayTimeUnit"
            | b"traceName" => Object::Root,
            _ => Object::Other,
        }
    }
}
