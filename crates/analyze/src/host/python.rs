//! Python's interpreter lock and garbage collector, where ranges of them were recorded.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;
use strobe_trace::Trace;

use super::{Class, Event, Explainer, Stretch, plain};
use crate::context::Context;
use crate::gaps::thread_text;
use crate::intervals::{Span, SpanSet};
use crate::sheet::{Column, Role, Sheet, Unit, Value};

#[derive(Clone, Copy, Default)]
struct Sum {
    times: usize,
    time: i64,
    longest: i64,
    idle: i64,
}

impl Sum {
    fn add(&mut self, span: Span, idle: i64) {
        self.times += 1;
        self.time = self.time.saturating_add(span.length());
        self.longest = self.longest.max(span.length());
        self.idle = self.idle.saturating_add(idle);
    }

    fn cells(&self, iterations: usize) -> [Value; 5] {
        let each = (iterations > 0).then(|| self.time / iterations as i64);
        [self.times.into(), self.time.into(), each.into(), self.longest.into(), self.idle.into()]
    }
}

/// Whether any string of a trace might name Python's interpreter lock or collector: a quick look before a long one.
pub(crate) fn may_be_recorded(trace: &Trace) -> bool {
    static NAMES: LazyLock<Regex> =
        LazyLock::new(|| Regex::new("GIL|gil|GC|gc|[gG]arbage|PyEval").expect("the pattern is part of the program"));
    trace.strings.iter().any(|(_, text)| NAMES.is_match(text))
}

/// The time in which no device works, from the first op to the last.
fn idle(context: &Context) -> SpanSet {
    let ops = &context.trace.ops;
    let busy = SpanSet::union_of((0..ops.len()).map(|op| Span::new(ops.start[op], ops.end[op])));
    busy.extent().map_or_else(SpanSet::default, |whole| busy.gaps(whole).subtract(context.unseen()))
}

fn ranges_of<'c>(context: &'c Context, class: Class) -> impl Iterator<Item = (u32, &'c Stretch)> {
    let stretches = &context.host().stretches;
    let threads = stretches.iter().enumerate().map(|(thread, list)| (thread as u32, list));
    threads.flat_map(move |(thread, list)| {
        list.iter().filter(move |stretch| stretch.class == class).map(move |stretch| (thread, stretch))
    })
}

/// Who waited for the interpreter lock, who held it meanwhile, and what the holder did; `None` where it was not recorded.
pub(crate) fn gil_sheet(context: &Context) -> Option<Sheet> {
    let (trace, host) = (context.trace, context.host());
    if !host.has(Class::gil_wait()) {
        return None;
    }
    let idle = idle(context);
    let mut explainer = Explainer::new(context);
    let mut sums: BTreeMap<(u32, Option<u32>, Option<String>), Sum> = BTreeMap::new();
    for (thread, stretch) in ranges_of(context, Class::gil_wait()) {
        let process = trace.threads.get(thread as usize).map_or(0, |thread| thread.process as usize);
        let holders = host.gil_holders.get(process).map_or(&[][..], Vec::as_slice);
        let mut at = stretch.span.start;
        let mut add = |span: Span, holder: Option<u32>, what: Option<String>| {
            if span.start < span.end {
                sums.entry((thread, holder, what)).or_default().add(span, idle.covered(span));
            }
        };
        // One thread holds it at a time: what a range of an earlier start leaves belongs to the next.
        let first = holders.partition_point(|(span, _)| span.start <= stretch.span.start).saturating_sub(1);
        for &(held, holder) in holders[first..].iter().take_while(|(span, _)| span.start < stretch.span.end) {
            let Some(inside) = held.overlap(Span::new(at, stretch.span.end)).filter(|_| holder != thread) else {
                continue;
            };
            add(Span::new(at, inside.start), None, None);
            let mut did: BTreeMap<Option<String>, i64> = BTreeMap::new();
            explainer.thread(holder, inside, &mut |span, doing| {
                let own = doing.is_named() && doing.thread == holder;
                let name = own.then(|| plain(trace.text(doing.event.name(trace))).into_owned());
                *did.entry(name).or_default() += span.length();
            });
            let most = did.into_iter().max_by_key(|(name, ns)| (*ns, name.is_some())).and_then(|(name, _)| name);
            add(inside, Some(holder), most);
            at = inside.end;
        }
        add(Span::new(at, stretch.span.end), None, None);
    }
    let columns = [
        Column::new("waiting thread", Unit::Text),
        Column::new("held by", Unit::Text).role(Role::How),
        Column::new("times", Unit::Count),
        Column::new("waited", Unit::Ns),
        Column::new("per iteration", Unit::Ns),
        Column::new("longest", Unit::Ns),
        Column::new("while devices idle", Unit::Ns),
        Column::new("holder was in", Unit::Text),
    ];
    let mut sheet = Sheet::new("gil", columns).title("Waiting for Python's global interpreter lock (GIL)");
    let mut rows: Vec<_> = sums.into_iter().collect();
    rows.sort_by_key(|(_, sum)| std::cmp::Reverse(sum.time));
    let text = |thread: u32| Value::from(thread_text(trace, thread));
    for ((thread, holder, what), sum) in rows {
        let head = [text(thread), holder.map_or(Value::Unknown, text)];
        let cells = sum.cells(context.iterations.list.len());
        sheet.push(head.into_iter().chain(cells).chain([what.into()]));
    }
    Some(sheet)
}

/// Collections of garbage by thread and name, which says the generation where the recorder wrote it; `None` where none was
/// recorded.
pub(crate) fn gc_sheet(context: &Context) -> Option<Sheet> {
    let trace = context.trace;
    if !context.host().has(Class::garbage_collection()) {
        return None;
    }
    let idle = idle(context);
    let mut sums: BTreeMap<(u32, String), (Sum, Option<Event>)> = BTreeMap::new();
    for (thread, stretch) in ranges_of(context, Class::garbage_collection()) {
        let name = plain(trace.text(stretch.event.name(trace))).into_owned();
        let (sum, last) = sums.entry((thread, name)).or_default();
        sum.add(stretch.span, idle.covered(stretch.span));
        if *last == Some(stretch.event) {
            sum.times -= 1; // of one collection that was interrupted
        }
        *last = Some(stretch.event);
    }
    let columns = [
        Column::new("thread", Unit::Text),
        Column::new("generation", Unit::Id),
        Column::new("pauses", Unit::Count),
        Column::new("time", Unit::Ns),
        Column::new("per iteration", Unit::Ns),
        Column::new("longest", Unit::Ns),
        Column::new("while devices idle", Unit::Ns),
        Column::new("range", Unit::Text),
    ];
    let mut sheet = Sheet::new("gc", columns).title("Python's garbage collector");
    let mut rows: Vec<_> = sums.into_iter().collect();
    rows.sort_by_key(|(_, (sum, _))| std::cmp::Reverse(sum.time));
    for ((thread, name), (sum, _)) in rows {
        let head = [thread_text(trace, thread).into(), generation(&name).into()];
        let cells = sum.cells(context.iterations.list.len());
        sheet.push(head.into_iter().chain(cells).chain([name.into()]));
    }
    Some(sheet)
}

/// The generation that the name of a collection says: the only number of one digit in it.
fn generation(name: &str) -> Option<u32> {
    let mut numbers = name.split(|c: char| !c.is_ascii_digit()).filter(|number| !number.is_empty());
    let only = numbers.next().filter(|number| number.len() == 1)?;
    numbers.next().is_none().then(|| only.parse().ok()).flatten()
}
