//! Whose every moment of an iteration is: which op's, or what kept the device idle.

use std::collections::{BTreeMap, BinaryHeap, HashMap};

use crate::Context;
use crate::categories::Class;
use crate::intervals::Span;

/// The time of one iteration on one device.
#[derive(Clone, Debug)]
pub(super) struct Split {
    /// Index into the iterations of the trace.
    pub iteration: usize,
    pub device: u16,
    pub window: Span,
    /// What is not an op's: idle time by cause, phases of the host. Adds up to the window together with the ops.
    pub rest: Vec<(String, i64)>,
}

/// For each device the moments of its ops: disjoint, in order of time.
pub(super) struct Owners(BTreeMap<u16, Vec<(Span, u32)>>);

/// Of several ops at once the one whose class counts first, then the one that began last.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Open {
    rank: u8,
    start: i64,
    op: u32,
    end: i64,
}

impl Owners {
    pub fn of(context: &Context) -> Self {
        let ops = &context.trace.ops;
        let mut by_device: BTreeMap<u16, Vec<u32>> = BTreeMap::new();
        for op in 0..ops.len() {
            by_device.entry(ops.device[op]).or_default().push(op as u32);
        }
        let open = |op: u32| Open {
            rank: match context.categories.of_op(op as usize).class {
                Class::Compute => 2,
                Class::Communication => 1,
                Class::Memory => 0,
            },
            start: ops.start[op as usize],
            op,
            end: ops.end[op as usize],
        };
        Self(by_device.into_iter().map(|(device, list)| (device, sweep(list.into_iter().map(open)))).collect())
    }

    /// The ops that own moments of a window and how much each.
    pub fn within(&self, split: &Split) -> impl Iterator<Item = (usize, i64)> + '_ {
        let window = split.window;
        let moments = self.0.get(&split.device).map(Vec::as_slice).unwrap_or_default();
        let first = moments.partition_point(|(span, _)| span.end <= window.start);
        let inside = moments[first..].iter().take_while(move |(span, _)| span.start < window.end);
        inside.filter_map(move |&(span, op)| Some((op as usize, span.overlap(window)?.length())))
    }
}

/// Walks through ops in order of their start; what is on top of the heap owns the moment.
fn sweep(ops: impl Iterator<Item = Open>) -> Vec<(Span, u32)> {
    let mut moments: Vec<(Span, u32)> = Vec::new();
    let mut open: BinaryHeap<Open> = BinaryHeap::new();
    let mut now = i64::MIN;
    let mut run_until = |open: &mut BinaryHeap<Open>, now: &mut i64, until: i64| {
        while *now < until {
            let Some(top) = open.peek() else { break };
            if top.end <= *now {
                open.pop();
                continue;
            }
            let end = top.end.min(until);
            match moments.last_mut() {
                Some((span, op)) if *op == top.op && span.end == *now => span.end = end,
                _ => moments.push((Span::new(*now, end), top.op)),
            }
            *now = end;
        }
        *now = (*now).max(until);
    };
    for op in ops {
        run_until(&mut open, &mut now, op.start);
        open.push(op);
    }
    run_until(&mut open, &mut now, i64::MAX);
    moments
}

/// The time of every iteration, per device on which it has ops.
pub(super) fn splits(context: &Context) -> Vec<Split> {
    let trace = context.trace;
    let ops = &trace.ops;
    let mut spans: HashMap<(usize, u16), Span> = HashMap::new();
    for (op, &iteration) in context.iterations.of_op.iter().enumerate() {
        let Some(found) = context.iterations.list.get(iteration as usize) else { continue };
        let device = ops.device[op];
        let is_cpu = trace.devices.get(device as usize).is_some_and(|d| d.is_cpu);
        let span = if is_cpu { found.host } else { Span::new(ops.start[op], ops.end[op]) };
        let known = spans.entry((iteration as usize, device)).or_insert(span);
        *known = Span::new(known.start.min(span.start), known.end.max(span.end));
    }
    let mut list: Vec<_> =
        spans.into_iter().map(|((iteration, device), window)| (device, window.start, iteration, window)).collect();
    list.sort_unstable_by_key(|&(device, start, iteration, _)| (device, start, iteration));
    let owners = Owners::of(context);
    let next: Vec<Option<i64>> =
        (0..list.len()).map(|i| list.get(i + 1).filter(|n| n.0 == list[i].0).map(|n| n.1)).collect();
    list.iter()
        .zip(next)
        .map(|(&(device, start, iteration, window), next)| {
            let end = next.map_or(window.end, |next| next);
            with_rest(Split { iteration, device, window: Span::new(start, end), rest: Vec::new() }, &owners)
        })
        .collect()
}

/// Each device's time from its first op to its last.
pub(super) fn whole_window(context: &Context) -> Vec<Split> {
    let owners = Owners::of(context);
    let devices: Vec<(u16, Span)> = owners
        .0
        .iter()
        .filter_map(|(&device, moments)| Some((device, Span::new(moments.first()?.0.start, moments.last()?.0.end))))
        .collect();
    let split = |(device, window)| with_rest(Split { iteration: 0, device, window, rest: Vec::new() }, &owners);
    devices.into_iter().map(split).collect()
}

fn with_rest(mut split: Split, owners: &Owners) -> Split {
    let busy: i64 = owners.within(&split).map(|(_, ns)| ns).sum();
    split.rest = vec![("idle".to_owned(), split.window.length().saturating_sub(busy))];
    split.rest.retain(|&(_, ns)| ns > 0);
    split
}
