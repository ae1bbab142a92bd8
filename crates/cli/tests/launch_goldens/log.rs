//! The log of the recording driver (`hollow_gpu/recorder.c`): one line an event. Addresses in it are places in buffers, and
//! everything else of a line is its form.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

/// A buffer of the device (`b`) or of the host (`h`), an event (`e`) or a graph (`g`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id {
    pub kind: u8,
    pub number: u32,
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.kind as char, self.number)
    }
}

impl Id {
    pub(crate) fn parse(word: &str) -> Option<Id> {
        let kind = *word.as_bytes().first().filter(|kind| b"bheg".contains(kind))?;
        let digits = &word[1..];
        let plain = digits.bytes().all(|digit| digit.is_ascii_digit()) && !digits.is_empty();
        Some(Id { kind, number: plain.then(|| digits.parse().ok())?? })
    }
}

/// An address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub id: Id,
    pub offset: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.offset {
            0 => write!(f, "{}", self.id),
            offset => write!(f, "{}+{offset}", self.id),
        }
    }
}

impl Place {
    pub(crate) fn parse(word: &str) -> Option<Place> {
        match word.split_once('+') {
            None => Some(Place { id: Id::parse(word)?, offset: 0 }),
            Some((id, offset)) => Some(Place { id: Id::parse(id)?, offset: offset.parse().ok()? }),
        }
    }
}

/// An event: the number of its form, and its places.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub form: usize,
    pub places: Range<usize>,
}

/// A log as it was read.
#[derive(Default)]
pub(crate) struct Log {
    /// Lines with `$` for every place.
    pub forms: Vec<String>,
    pub events: Vec<Event>,
    places: Vec<Place>,
    /// What an id must have in common with the one that stands for it in another log: its bytes, its nodes, or that it has a
    /// time.
    pub sizes: HashMap<Id, String>,
}

impl Log {
    pub(crate) fn read(text: &str) -> Log {
        let mut log = Log::default();
        let mut known: HashMap<String, usize> = HashMap::new();
        let mut form = String::new();
        for line in text.lines() {
            let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
            if let ("alloc" | "event" | "captured", Some((id, size))) = (verb, rest.split_once(' ')) {
                let id = Id::parse(id).unwrap_or_else(|| panic!("no id: {line}"));
                log.sizes.insert(id, size.to_string());
            }
            // When memory is taken and given back is free.
            if matches!(verb, "alloc" | "event" | "free") {
                continue;
            }
            let begin = log.places.len();
            form.clear();
            for word in line.split_ascii_whitespace() {
                if !form.is_empty() {
                    form.push(' ');
                }
                match Place::parse(word) {
                    Some(place) => {
                        log.places.push(place);
                        form.push('$');
                    }
                    None => form.push_str(word),
                }
            }
            let number = match known.get(&form) {
                Some(number) => *number,
                None => {
                    known.insert(form.clone(), log.forms.len());
                    log.forms.push(form.clone());
                    log.forms.len() - 1
                }
            };
            log.events.push(Event { form: number, places: begin..log.places.len() });
        }
        log
    }

    pub(crate) fn places(&self, event: &Event) -> &[Place] {
        &self.places[event.places.clone()]
    }

    /// What an id is, in words of the log.
    pub(crate) fn size(&self, id: Id) -> &str {
        self.sizes.get(&id).map_or("unknown", String::as_str)
    }

    fn starts(&self, event: &Event, words: &str) -> bool {
        self.forms[event.form].starts_with(words)
    }

    /// The log's parts in order, with names. `steps` are the names of steps.
    pub(crate) fn sections(&self, steps: &[String]) -> Vec<(String, Range<usize>)> {
        let timed = |event: &Event| {
            let place = self.places(event).first().filter(|place| place.id.kind == b'e');
            place.is_some_and(|place| self.size(place.id) == "timed")
        };
        let mut found: Vec<(String, Range<usize>)> = Vec::new();
        let mut push = |name: String, range: Range<usize>| {
            if !range.is_empty() {
                found.push((name, range));
            }
        };
        // From the first time that is taken to the last, GEMMs are chosen.
        let first = self.events.iter().position(&timed).unwrap_or(0);
        let last = self.events.iter().rposition(timed).map_or(first, |last| last + 1);
        push("load".into(), 0..first);
        for (number, begin) in (first..last).step_by(MOST_EVENTS).enumerate() {
            push(format!("choice of GEMMs, part {}", number + 1), begin..last.min(begin + MOST_EVENTS));
        }
        let (mut begin, mut graph, mut step) = (last, 0, 0);
        for (index, event) in self.events.iter().enumerate().skip(last) {
            if self.starts(event, "capture") && !self.starts(event, "captured") {
                push(format!("before graph {}", graph + 1), begin..index);
                begin = index;
            } else if self.starts(event, "captured") {
                graph += 1;
                push(format!("graph {graph}"), begin..index + 1);
                begin = index + 1;
            } else if step == 0 && self.starts(event, "launch copy_inputs") {
                push("before step 0".into(), begin..index);
                begin = index;
                step = 1;
            } else if step > 0 && self.starts(event, "record") {
                let name = steps.get(step - 1).cloned().unwrap_or_else(|| format!("step {}", step - 1));
                push(name, begin..index + 1);
                begin = index + 1;
                step += 1;
            }
        }
        push("end".into(), begin..self.events.len());
        found
    }
}

/// Events of a part of the choice of GEMMs.
const MOST_EVENTS: usize = 2048;
