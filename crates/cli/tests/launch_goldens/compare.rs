//! Compares what is launched now with a golden. Buffers may be taken in any order: those of one side have to stand for those
//! of the other one by one, with equal sizes.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;

use super::golden::{Golden, Line, Section};
use super::log::{Id, Place};

/// A difference that is there on purpose, until the goldens are recorded again.
#[derive(Debug, PartialEq)]
pub(crate) struct Intended {
    pub case: String,
    pub section: String,
    /// Patterns with `*`; `-` for none. Of a section that is kept as a hash both are `hash`.
    pub old: String,
    pub new: String,
    pub reason: String,
}

impl Intended {
    /// Lines of `case :: section :: old :: new :: reason`.
    pub(crate) fn read(text: &str) -> Result<Vec<Intended>, String> {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
        let fields = |line: &str| line.split(" :: ").map(|field| field.trim().to_string()).collect::<Vec<_>>();
        let read = |line: &str| match <[String; 5]>::try_from(fields(line)) {
            Ok([case, section, old, new, reason]) if !reason.is_empty() => {
                Ok(Intended { case, section, old, new, reason })
            }
            _ => Err(format!("expected `case :: section :: old :: new :: reason`, found `{line}`")),
        };
        lines.map(read).collect()
    }
}

/// Whether a text is what a pattern says, with `*` for anything.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((before, after)) => text.strip_prefix(before).is_some_and(|rest| {
            rest.char_indices().map(|(at, _)| at).chain([rest.len()]).any(|at| matches(after, &rest[at..]))
        }),
    }
}

/// Which id of now stands for which of the golden.
#[derive(Default)]
struct Pairs {
    now: HashMap<Id, Id>,
    old: HashMap<Id, Id>,
}

/// Both sides, and what is known of their ids.
struct Sides<'a> {
    old: &'a Golden,
    now: &'a Golden,
    pairs: Pairs,
    intended: Vec<&'a Intended>,
    /// Which of these were needed.
    used: BTreeSet<usize>,
}

fn size(golden: &Golden, id: Id) -> &str {
    golden.sizes.get(&id).map_or("", String::as_str)
}

fn what(golden: &Golden, id: Id) -> String {
    let unit = match id.kind {
        b'b' => "bytes",
        b'h' => "bytes of the host",
        b'g' => "nodes",
        _ => "event",
    };
    format!("{id} ({} {unit})", size(golden, id))
}

impl Sides<'_> {
    /// Let `now` stand for `old`, or say why it can't.
    fn pair(&mut self, old: Id, now: Id) -> Result<(), String> {
        let (was, is) = (what(self.old, old), what(self.now, now));
        match (self.pairs.now.get(&old), self.pairs.old.get(&now)) {
            (Some(known), _) if *known == now => return Ok(()),
            (None, None) if old.kind == now.kind && size(self.old, old) == size(self.now, now) => {}
            (None, None) => return Err(format!("{was} became {is}: another size")),
            (Some(known), _) => {
                let found = self.pairs.old.get(&now).map_or(format!("{is}, new here"), |other| what(self.old, *other));
                return Err(format!("expected {was}, found {found}; the one that is expected is {known} now"));
            }
            (None, Some(other)) => {
                return Err(format!("expected {was}, new here, found {}", what(self.old, *other)));
            }
        }
        self.pairs.now.insert(old, now);
        self.pairs.old.insert(now, old);
        Ok(())
    }

    /// Why an event of now is not the golden's; `None` where it is.
    fn differs(&mut self, old: &Line, now: &Line) -> Option<String> {
        let (form, new) = (&self.old.forms[old.form], &self.now.forms[now.form]);
        if form != new {
            return Some(words_apart(form, new));
        }
        for (number, (a, b)) in old.places.iter().zip(&now.places).enumerate() {
            let place = format!("address {} of {}", number + 1, old.places.len());
            if let Err(problem) = self.pair(a.id, b.id) {
                return Some(format!("{place}: {problem}"));
            }
            if a.offset != b.offset {
                return Some(format!("{place}: offset {} became {}", a.offset, b.offset));
            }
        }
        None
    }

    /// A line of now, with the golden's numbers where they are known.
    fn in_old_numbers(&self, line: &Line) -> String {
        let known = |place: &Place| {
            let id = self.pairs.old.get(&place.id).copied().unwrap_or(place.id);
            Place { id, ..*place }
        };
        self.now.words(&Line { form: line.form, places: line.places.iter().map(known).collect() })
    }

    /// Whether the list has this difference.
    fn intends(&mut self, section: &str, old: &str, new: &str) -> bool {
        let fits = |one: &&Intended| matches(&one.section, section) && matches(&one.old, old) && matches(&one.new, new);
        let found = self.intended.iter().position(fits);
        self.used.extend(found);
        found.is_some()
    }

    /// What differs in a section, if anything does.
    fn section(&mut self, old: &Section, now: &Section) -> Option<String> {
        let (Some(before), Some(after)) = (&old.text, &now.text) else {
            if (old.events, old.hash) != (now.events, now.hash) {
                if self.intends(&old.name, "hash", "hash") {
                    return None;
                }
                return Some(format!(
                    "{} events with hash {:016x} became {} events with hash {:016x}; the golden has no text of them",
                    old.events, old.hash, now.events, now.hash
                ));
            }
            let problem = old.ids.iter().zip(&now.ids).find_map(|(a, b)| self.pair(*a, *b).err());
            return problem.map(|problem| format!("the same events with another buffer: {problem}"));
        };
        let (mut i, mut j) = (0, 0);
        while i < before.len() || j < after.len() {
            let (a, b) = (before.get(i), after.get(j));
            let problem = match (a, b) {
                (Some(a), Some(b)) => match self.differs(a, b) {
                    None => {
                        (i, j) = (i + 1, j + 1);
                        continue;
                    }
                    Some(problem) => problem,
                },
                (Some(_), None) => "an event that is not there any more".into(),
                _ => "an event that is new".into(),
            };
            let was = a.map_or("-".into(), |line| self.old.words(line));
            let is = b.map_or("-".into(), |line| self.in_old_numbers(line));
            if self.intends(&old.name, &was, &is) {
                (i, j) = (i + usize::from(a.is_some()), j + usize::from(b.is_some()));
            } else if a.is_some() && self.intends(&old.name, &was, "-") {
                i += 1;
            } else if b.is_some() && self.intends(&old.name, "-", &is) {
                j += 1;
            } else {
                let mut report = format!("event {} of {}: {problem}\n", i + 1, before.len());
                if let Some(line) = i.checked_sub(1).and_then(|i| before.get(i)) {
                    writeln!(report, "  after    {}", self.old.words(line)).unwrap();
                }
                writeln!(report, "  expected {was}\n  found    {is}").unwrap();
                report.push_str(&self.shifted(&before[i..], &after[j..]));
                return Some(report);
            }
        }
        None
    }

    /// Whether events were left out or added, by what follows.
    fn shifted(&self, before: &[Line], after: &[Line]) -> String {
        let form = |golden: &Golden, line: &Line| golden.forms[line.form].clone();
        let [Some(a), Some(b)] = [before.first(), after.first()] else { return String::new() };
        let (a, b) = (form(self.old, a), form(self.now, b));
        if a == b {
            return String::new();
        }
        let lost = before.iter().take(FAR).position(|line| form(self.old, line) == b);
        let added = after.iter().take(FAR).position(|line| form(self.now, line) == a);
        match (lost, added) {
            (Some(lost), added) if added.is_none_or(|added| lost <= added) => {
                format!("  what was found is expected {lost} events later: as many are missing before it\n")
            }
            (_, Some(added)) => format!("  what was expected comes {added} events later: as many are new before it\n"),
            _ => String::new(),
        }
    }
}

/// How far an event is looked for.
const FAR: usize = 24;
/// Differences of choices and counts that are named.
const MOST: usize = 6;

/// What is different in two lines, word by word.
fn words_apart(old: &str, new: &str) -> String {
    let words = |text: &str| text.split(' ').map(str::to_string).collect::<Vec<_>>();
    let (old, new) = (words(old), words(new));
    if old.get(..2) != new.get(..2) {
        return "another event".into();
    }
    let head =
        |words: &[String]| words.iter().skip(2).take_while(|word| *word != "|").cloned().collect::<Vec<_>>().join(" ");
    if old.len() != new.len() {
        return format!("`{}` became `{}`, {} words became {}", head(&old), head(&new), old.len(), new.len());
    }
    let bar = old.iter().position(|word| word == "|").unwrap_or(old.len());
    let apart = old.iter().zip(&new).enumerate().filter(|(_, (a, b))| a != b);
    let said = apart.map(|(index, (a, b))| match index.checked_sub(bar + 1) {
        Some(argument) => format!("word {} of the arguments: {a} became {b}", argument + 1),
        None => format!("{a} became {b}"),
    });
    said.take(MOST).collect::<Vec<_>>().join(", ")
}

/// Everything that is different, in words; `None` where nothing is.
pub(crate) fn compare(old: &Golden, now: &Golden, intended: Vec<&Intended>) -> Option<String> {
    let mut report = String::new();
    if old.call != now.call {
        writeln!(report, "the call was `{}` and is `{}`", old.call, now.call).unwrap();
    }
    let mut sides = Sides { old, now, pairs: Pairs::default(), intended, used: BTreeSet::new() };
    let mut apart_sections: Vec<(&str, String)> = Vec::new();
    for section in &old.sections {
        let problem = match now.sections.iter().find(|other| other.name == section.name) {
            Some(other) if section.text.is_some() == other.text.is_some() => sides.section(section, other),
            Some(_) => Some("the text of other sections is kept now".into()),
            None => Some("is not there any more".into()),
        };
        apart_sections.extend(problem.map(|problem| (section.name.as_str(), problem)));
    }
    let known: BTreeSet<&str> = old.sections.iter().map(|section| section.name.as_str()).collect();
    let new = now.sections.iter().filter(|section| !known.contains(section.name.as_str()));
    apart_sections.extend(new.map(|section| (section.name.as_str(), "is new".into())));
    if let Some((name, problem)) = apart_sections.first() {
        writeln!(report, "first difference: {name}, {problem}").unwrap();
        // A hash says little; the next section with a text may say what it is.
        let told = apart_sections.iter().skip(1).find(|(_, problem)| problem.contains('\n'));
        if let Some((name, problem)) = told.filter(|_| !problem.contains('\n')) {
            writeln!(report, "first one with a text: {name}, {problem}").unwrap();
        }
        let others: Vec<_> = apart_sections.iter().skip(1).map(|(name, _)| *name).collect();
        let more = others.len().saturating_sub(MOST);
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        if !others.is_empty() {
            let names = others.get(..MOST).unwrap_or(&others).join("; ");
            writeln!(report, "{} of {} sections are different, too: {names}{rest}", others.len(), old.sections.len())
                .unwrap();
        }
    }
    if !report.is_empty() {
        report.push_str(&apart("GEMM choices", &old.choices, &now.choices));
        let counts =
            |golden: &Golden| golden.kernels.iter().map(|(k, n)| format!("{k}: {n} launches")).collect::<Vec<_>>();
        report.push_str(&apart("kernels", &counts(old), &counts(now)));
    }
    for (index, one) in sides.intended.iter().enumerate() {
        if !sides.used.contains(&index) && one.case != "*" {
            writeln!(report, "intended.txt lists what is not different: {} :: {}", one.section, one.reason).unwrap();
        }
    }
    (!report.is_empty()).then_some(report)
}

/// Lines that only one side has.
fn apart(title: &str, old: &[String], now: &[String]) -> String {
    let (was, is): (BTreeSet<_>, BTreeSet<_>) = (old.iter().collect(), now.iter().collect());
    let lines: Vec<String> = was.difference(&is).map(|line| format!("  - {line}\n")).collect();
    let new: Vec<String> = is.difference(&was).map(|line| format!("  + {line}\n")).collect();
    if lines.is_empty() && new.is_empty() {
        return String::new();
    }
    let some = |lines: &[String]| lines.iter().take(MOST).map(String::as_str).collect::<String>();
    format!("{title}: {} of {} are different\n{}{}", lines.len().max(new.len()), old.len(), some(&lines), some(&new))
}
