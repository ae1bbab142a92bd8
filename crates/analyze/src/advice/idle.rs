//! Rules about what the host does while a device waits: the causes of `causes.toml`, by what they explain.

use super::facts::{Facts, evidence};
use super::{Draft, Gain, Rule, count, ns_text, percent};
use crate::gaps::thread_text;
use crate::host::{Class, Evidence, IdleCause};
use crate::sheet::{Unit, Value};

/// Rows of evidence at most.
const ROWS: usize = 10;

/// Whether a cause is something that the host did, not what passes around every launch.
pub(super) fn is_named(cause: &IdleCause) -> bool {
    let around_launches = [
        Class::LAUNCH_LATENCY,
        Class::QUEUED,
        Class::UNKNOWN,
        Class::BETWEEN_CALLS,
        Class::HOST_CODE,
        Class::OTHER_CALL,
        Class::PROFILER,
    ];
    !around_launches.contains(&cause.class) && !matches!(cause.class.as_str(), "launch call" | "copy call")
}

/// The idle time in causes that no launch brings with it.
pub(super) fn named_ns(causes: &[IdleCause]) -> i64 {
    let of = |cause: &IdleCause| if is_named(cause) { cause.time_ns } else { unlaunched_ns(cause) };
    causes.iter().map(of).fold(0, i64::saturating_add)
}

/// Long stretches of one range or call are no matter of many launches, whatever they are.
fn unlaunched_ns(cause: &IdleCause) -> i64 {
    if cause.name.is_some() && cause.class != Class::UNKNOWN { cause.long_ns } else { 0 }
}

/// The idle time in the causes that a rule is about.
pub(super) fn idle_in(facts: &Facts, rule: &Rule) -> Option<Draft> {
    if facts.on_cpu() {
        return None;
    }
    let counted = |cause: &&IdleCause| {
        let is_in = |list: &[String]| list.iter().any(|class| class == cause.class.as_str());
        match (is_in(&rule.causes), is_in(&rule.long_causes)) {
            (true, _) => Some((cause.time_ns, cause.gaps)),
            (_, true) => Some((cause.long_ns, cause.long_waits)),
            _ => None,
        }
    };
    let causes = facts.context.idle_causes();
    let all: i64 = causes.iter().map(|cause| cause.time_ns).fold(0, i64::saturating_add);
    let mut rows: Vec<(&IdleCause, i64, usize)> =
        causes.iter().filter_map(|cause| counted(&cause).map(|(ns, times)| (cause, ns, times))).collect();
    rows.retain(|row| row.1 > 0);
    rows.sort_by_key(|row| std::cmp::Reverse(row.1));
    let sum = rows.iter().map(|row| row.1).fold(0, i64::saturating_add);
    let whole = facts.span_ns();
    let &(largest, most, times) = rows.first()?;
    if (sum as f64) < rule.limit("min_share") * whole as f64 {
        return None;
    }
    let columns = [
        ("Cause", Unit::Text),
        ("Thread", Unit::Text),
        ("Times", Unit::Count),
        ("Time", Unit::Ns),
        ("Longest", Unit::Ns),
        ("Share", Unit::Share),
        ("Evidence", Unit::Text),
        ("Range or call", Unit::Text),
    ];
    let mut table = evidence(rule, &columns);
    for &(cause, ns, times) in rows.iter().take(ROWS) {
        let name = cause.name.as_deref().unwrap_or("(nothing recorded)");
        table.push([
            cause.class.as_str().into(),
            cause.thread.map_or(Value::Unknown, |thread| thread_text(facts.trace, thread).into()),
            times.into(),
            ns.into(),
            cause.longest_ns.into(),
            (ns as f64 / whole as f64).into(),
            cause.evidence.as_str().into(),
            name.into(),
        ]);
    }
    let (words, share) = (facts.span_words(), format!("{} of its idle time", percent(sum, all)));
    let of_whole = format!("{} of the {} {words}", percent(sum, whole), ns_text(whole));
    let mut what = match (&largest.name, largest.class) {
        (Some(name), Class::UNKNOWN) => format!("for something not recorded inside `{name}`"),
        (Some(name), Class::HOST_CODE) => format!("for `{name}`"),
        (Some(name), Class::WAITS_FOR_CPU) => {
            format!("in `{name}`, while the launching thread is ready and has no CPU")
        }
        (Some(name), Class::SWITCHED_OUT) => format!("in `{name}`, while the launching thread has no CPU"),
        (Some(_), Class::UNIFIED_MEMORY) => "while the host works on unified memory".to_owned(),
        (Some(name), class) => format!("for `{name}` ({})", class.as_str()),
        (None, Class::HOST_CODE) => "for work of the launching thread, which records nothing of it".to_owned(),
        (None, Class::WAITS_FOR_CPU) => "while the launching thread is ready and has no CPU".to_owned(),
        (None, Class::SWITCHED_OUT) => "while the launching thread has no CPU".to_owned(),
        (None, _) => "while the launching thread records nothing".to_owned(),
    };
    if matches!(largest.evidence, Evidence::OtherThread | Evidence::Flow)
        && let Some(thread) = largest.thread
    {
        what.push_str(&format!(
            " of thread {}, which is busy while the launching thread sleeps",
            thread_text(facts.trace, thread)
        ));
    }
    let rest = match rows.len() {
        1 => format!(", {} time{}", count(times), if times == 1 { "" } else { "s" }),
        _ => format!("; {} of it {what}", ns_text(most)),
    };
    let subject = match rows.len() {
        1 => what,
        _ => format!("for {}", rule.about.as_deref().unwrap_or("the host")),
    };
    let sentence = format!("the device waits {} ({share}, {of_whole}) {subject}{rest}", ns_text(sum));
    Some(Draft { sentence, gain: Some(Gain::new(sum, whole, words)), evidence: table })
}
