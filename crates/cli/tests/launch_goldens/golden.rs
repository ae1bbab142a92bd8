//! What is kept of a log: the text of some sections, of the others a hash and the ids that they use.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use super::log::{Id, Log, Place};

/// What was launched, of one case.
#[derive(Default)]
pub(crate) struct Golden {
    /// The call and its variables.
    pub call: String,
    /// Which kernel was chosen for which product.
    pub choices: Vec<String>,
    /// How often each kernel was launched or captured.
    pub kernels: BTreeMap<String, usize>,
    pub sizes: BTreeMap<Id, String>,
    /// Lines with `$` for every place.
    pub forms: Vec<String>,
    pub sections: Vec<Section>,
}

/// Some events in a row.
pub(crate) struct Section {
    pub name: String,
    pub events: usize,
    /// Of the events, with ids numbered as they come in this section.
    pub hash: u64,
    /// Ids in the order in which they come.
    pub ids: Vec<Id>,
    /// The events, where they are kept.
    pub text: Option<Vec<Line>>,
}

/// An event of a section.
#[derive(Clone)]
pub(crate) struct Line {
    pub form: usize,
    pub places: Vec<Place>,
}

impl Golden {
    /// From a log; `keep` says of which sections the text is wanted. Ids get numbers in the order of their use.
    pub(crate) fn of(
        log: &Log,
        call: &str,
        choices: Vec<String>,
        steps: &[String],
        keep: impl Fn(&str) -> bool,
    ) -> Golden {
        let mut golden = Golden { call: call.into(), choices, ..Golden::default() };
        let (mut numbers, mut next) = (HashMap::new(), HashMap::new());
        let mut forms = HashMap::new();
        for (name, range) in log.sections(steps) {
            let (text, passing) = (keep(&name), name.starts_with("choice"));
            let mut section =
                Section { name, events: range.len(), hash: 0, ids: Vec::new(), text: text.then(Vec::new) };
            let mut local: HashMap<Id, u64> = HashMap::new();
            for event in &log.events[range] {
                let form = &log.forms[event.form];
                section.hash = hash(section.hash, form.as_bytes());
                let mut line = Line { form: 0, places: Vec::new() };
                for place in log.places(event) {
                    let count = local.len() as u64;
                    let mut id = place.id;
                    // Events and graphs of measurements are used there only.
                    let passing = passing && matches!(id.kind, b'e' | b'g');
                    if !passing {
                        id.number = *numbers.entry(place.id).or_insert_with(|| {
                            let number = next.entry(place.id.kind).or_insert(0);
                            *number += 1;
                            *number
                        });
                    }
                    let seen = *local.entry(place.id).or_insert_with(|| {
                        section.hash = hash(section.hash, log.size(place.id).as_bytes());
                        if !passing {
                            section.ids.push(id);
                            golden.sizes.insert(id, log.size(place.id).into());
                        }
                        count
                    });
                    section.hash = hash(section.hash, &[seen.to_le_bytes(), place.offset.to_le_bytes()].concat());
                    line.places.push(Place { id, ..*place });
                }
                if let Some(kernel) = form.strip_prefix("launch ").and_then(|rest| rest.split(' ').next()) {
                    *golden.kernels.entry(kernel.into()).or_default() += 1;
                }
                if let Some(lines) = &mut section.text {
                    line.form = *forms.entry(event.form).or_insert_with(|| {
                        golden.forms.push(form.clone());
                        golden.forms.len() - 1
                    });
                    lines.push(line);
                }
            }
            golden.sections.push(section);
        }
        golden
    }

    /// A line as the driver wrote it, but for the numbers of ids.
    pub(crate) fn words(&self, line: &Line) -> String {
        words(&self.forms[line.form], &line.places)
    }

    pub(crate) fn write(&self, command: &str) -> String {
        let mut text = format!(
            "# What strobe asks of a GPU's driver in one case, see docs/design/launch-goldens.md. Written by\n# {command}\n"
        );
        writeln!(text, "call {}", self.call).unwrap();
        for choice in &self.choices {
            writeln!(text, "choice {choice}").unwrap();
        }
        for (kernel, count) in &self.kernels {
            writeln!(text, "kernel {kernel} {count}").unwrap();
        }
        let mut by_size: BTreeMap<(u8, &str), Vec<Id>> = BTreeMap::new();
        for (id, size) in &self.sizes {
            by_size.entry((id.kind, size.as_str())).or_default().push(*id);
        }
        for ((_, size), ids) in by_size {
            writeln!(text, "size {size}:{}", runs(&ids)).unwrap();
        }
        for (number, form) in self.forms.iter().enumerate() {
            writeln!(text, "form {number} {form}").unwrap();
        }
        let mut lists: Vec<&[Id]> = Vec::new();
        for section in &self.sections {
            let Section { name, events, hash, ids, text: lines } = section;
            if let Some(lines) = lines {
                writeln!(text, "text {name}").unwrap();
                for line in lines {
                    let places: String = line.places.iter().map(|place| format!(" {place}")).collect();
                    writeln!(text, " {}{places}", line.form).unwrap();
                }
                continue;
            }
            let list = lists.iter().position(|list| *list == ids.as_slice()).unwrap_or_else(|| {
                writeln!(text, "list {}{}", lists.len(), runs(ids)).unwrap();
                lists.push(ids);
                lists.len() - 1
            });
            writeln!(text, "hash {hash:016x} of {events} with list {list}: {name}").unwrap();
        }
        text
    }

    pub(crate) fn read(text: &str) -> Option<Golden> {
        let mut golden = Golden::default();
        let mut lists: Vec<Vec<Id>> = Vec::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (verb, rest) = line.split_once(' ')?;
            match verb {
                "call" => golden.call = rest.into(),
                "choice" => golden.choices.push(rest.into()),
                "kernel" => {
                    let (kernel, count) = rest.split_once(' ')?;
                    golden.kernels.insert(kernel.into(), count.parse().ok()?);
                }
                "size" => {
                    let (size, ids) = rest.split_once(':')?;
                    golden.sizes.extend(unroll(ids)?.into_iter().map(|id| (id, size.to_string())));
                }
                "form" => golden.forms.push(rest.split_once(' ')?.1.into()),
                "list" => lists.push(unroll(rest.split_once(' ').map_or("", |(_, ids)| ids))?),
                "text" => {
                    let name = rest.into();
                    let section = Section { name, events: 0, hash: 0, ids: Vec::new(), text: Some(Vec::new()) };
                    golden.sections.push(section);
                }
                "hash" => {
                    let (figures, name) = rest.split_once(": ")?;
                    let figures: Vec<&str> = figures.split(' ').collect();
                    let [hash, _, events, _, _, list] = figures[..] else { return None };
                    golden.sections.push(Section {
                        name: name.into(),
                        events: events.parse().ok()?,
                        hash: u64::from_str_radix(hash, 16).ok()?,
                        ids: lists.get(list.parse::<usize>().ok()?)?.clone(),
                        text: None,
                    });
                }
                "" => {
                    let mut words = rest.split(' ');
                    let form = words.next()?.parse().ok()?;
                    let places = words.map(Place::parse).collect::<Option<_>>()?;
                    let section = golden.sections.last_mut()?;
                    section.text.as_mut()?.push(Line { form, places });
                    section.events += 1;
                }
                _ => return None,
            }
        }
        Some(golden)
    }
}

/// A form with its places.
pub(crate) fn words(form: &str, places: &[Place]) -> String {
    let mut places = places.iter();
    let mut text = String::new();
    for part in form.split_inclusive('$') {
        match (part.strip_suffix('$'), places.next()) {
            (Some(before), Some(place)) => write!(text, "{before}{place}").unwrap(),
            _ => text.push_str(part),
        }
    }
    text
}

/// FNV-1a, eight bytes at a time.
fn hash(hash: u64, bytes: &[u8]) -> u64 {
    let mut hash = hash ^ bytes.len() as u64;
    for part in bytes.chunks(8) {
        let word = part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^= hash >> 29;
    }
    hash
}

/// Ids with a space before each; several in a row as `b3..b9`.
fn runs(ids: &[Id]) -> String {
    let mut text = String::new();
    let mut at = 0;
    while let Some(first) = ids.get(at) {
        let follows =
            |length: &usize| ids.get(at + length) == Some(&Id { number: first.number + *length as u32, ..*first });
        let length = (1..).take_while(follows).count();
        match length {
            0 => write!(text, " {first}").unwrap(),
            _ => write!(text, " {first}..{}", ids[at + length]).unwrap(),
        }
        at += length + 1;
    }
    text
}

fn unroll(text: &str) -> Option<Vec<Id>> {
    let mut ids = Vec::new();
    for word in text.split_ascii_whitespace() {
        let (first, last) = word.split_once("..").unwrap_or((word, word));
        let (first, last) = (Id::parse(first)?, Id::parse(last)?);
        ids.extend((first.number..=last.number).map(|number| Id { number, ..first }));
    }
    Some(ids)
}
