//! One side of a comparison: its iterations with their times, from every trace it consists of.

use std::collections::{BTreeMap, HashMap};

use strobe_trace::{OpKind, StrId, Trace};

use super::align::{Size, Slot};
use super::kernels::OpKey;
use super::split::{Owners, Split, splits, whole_window};
use crate::Context;
use crate::budget::Part;
use crate::categories::{Category, Class};
use crate::iterations::{Found, Method, without_numbers};

/// What a part of the time is, for tables that add up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PartKey {
    pub name: String,
    pub is_op: bool,
}

/// One iteration, per device: what several devices (or ranks) did in it is averaged.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub slot: Slot,
    pub wall_ns: f64,
    pub kernels: f64,
    pub launches: f64,
    /// The wall time, split. Adds up to `wall_ns`.
    pub parts: BTreeMap<PartKey, f64>,
    /// By index into [`Side::keys`].
    pub ops: BTreeMap<u32, OpTime>,
}

impl Sample {
    /// Brings everything in it to a part of its work.
    pub(super) fn divide(&mut self, by: f64) {
        for value in [&mut self.wall_ns, &mut self.kernels, &mut self.launches] {
            *value /= by;
        }
        self.parts.values_mut().for_each(|ns| *ns /= by);
        for time in self.ops.values_mut() {
            *time = OpTime { count: time.count / by, ns: time.ns / by, own_ns: time.own_ns / by };
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OpTime {
    pub count: f64,
    /// Sum of durations.
    pub ns: f64,
    /// The part of the wall time that is this op's alone: overlapped moments count once.
    pub own_ns: f64,
}

/// All iterations of one side.
#[derive(Clone, Debug, Default)]
pub(super) struct Side {
    pub keys: Vec<OpKey>,
    pub samples: Vec<Sample>,
    /// How the iterations of each trace were found.
    pub methods: Vec<Option<Method>>,
}

impl Side {
    /// The iterations of these traces.
    pub(super) fn of_iterations(contexts: &[Context]) -> Self {
        Self::collect(contexts, |context, repeat, side, keys| side.add_iterations(context, repeat, keys))
    }

    /// Each trace as one single iteration.
    pub(super) fn of_windows(contexts: &[Context]) -> Self {
        Self::collect(contexts, |context, repeat, side, keys| side.add_window(context, repeat, keys))
    }

    fn collect(contexts: &[Context], add: impl Fn(&Context, usize, &mut Side, &mut Keys)) -> Self {
        let mut side = Self::default();
        let mut numbers: HashMap<OpKey, u32> = HashMap::new();
        for (repeat, context) in contexts.iter().enumerate() {
            let mut keys = Keys { numbers: &mut numbers, seen: HashMap::new() };
            add(context, repeat, &mut side, &mut keys);
            side.methods.push(context.iterations.method.clone());
        }
        let mut keys: Vec<(OpKey, u32)> = numbers.into_iter().collect();
        keys.sort_unstable_by_key(|&(_, number)| number);
        side.keys = keys.into_iter().map(|(key, _)| key).collect();
        side
    }

    /// Whether the numbers of iterations are the program's own, in every trace.
    pub(super) fn is_numbered(&self) -> bool {
        self.methods.iter().all(|m| matches!(m, Some(Method::Recorded | Method::Markers(_))))
    }

    fn add_iterations(&mut self, context: &Context, repeat: usize, keys: &mut Keys) {
        let list = &context.iterations.list;
        let mut times_seen: HashMap<(u32, u64), usize> = HashMap::new();
        let occurrence: Vec<usize> = list
            .iter()
            .map(|found| {
                let seen = times_seen.entry((found.process, found.number)).or_default();
                *seen += 1;
                *seen - 1
            })
            .collect();
        // Ranks that work on the same iteration share its number and size.
        let mut shared: BTreeMap<_, (Vec<usize>, Vec<Split>)> = BTreeMap::new();
        let mut by_iteration: Vec<Vec<Split>> = vec![Vec::new(); list.len()];
        for split in splits(context) {
            if let Some(own) = by_iteration.get_mut(split.iteration) {
                own.push(split);
            }
        }
        for (index, (found, splits)) in list.iter().zip(by_iteration).enumerate() {
            let entry = shared.entry((occurrence[index], found.number, found.kind, size_of(found))).or_default();
            entry.0.push(index);
            entry.1.extend(splits);
        }
        let owners = Owners::of(context);
        let mut ops_of = vec![Vec::new(); list.len()];
        for (op, &iteration) in context.iterations.of_op.iter().enumerate() {
            if let Some(ops) = ops_of.get_mut(iteration as usize) {
                ops.push(op);
            }
        }
        let mut samples: Vec<(usize, Sample)> = Vec::new();
        for (_, (indices, splits)) in shared {
            let Some(found) = indices.first().and_then(|&index| list.get(index)) else { continue };
            let slot = Slot {
                repeat,
                number: found.number,
                kind: found.kind,
                size: size_of(found),
                label: found.label.clone(),
                family: without_numbers(&found.label),
                ops: indices.iter().map(|&index| ops_of[index].len() as u64).sum::<u64>() / indices.len().max(1) as u64,
            };
            let ops = indices.iter().flat_map(|&index| ops_of[index].iter().copied());
            if let Some(sample) = sample(context, slot, &splits, ops, &owners, keys) {
                samples.push((indices[0], sample));
            }
        }
        samples.sort_by_key(|&(index, _)| index);
        self.samples.extend(samples.into_iter().map(|(_, sample)| sample));
    }

    fn add_window(&mut self, context: &Context, repeat: usize, keys: &mut Keys) {
        let name = WHOLE_WINDOW.to_owned();
        let slot =
            Slot { repeat, number: 0, kind: None, size: Size::default(), label: name.clone(), family: name, ops: 0 };
        let owners = Owners::of(context);
        let splits = whole_window(context);
        let ops = 0..context.trace.ops.len();
        self.samples.extend(sample(context, slot, &splits, ops, &owners, keys));
    }
}

/// What a comparison without iterations compares.
pub(super) const WHOLE_WINDOW: &str = "whole window";

/// Numbers op keys across the traces of a side; each distinct op of a trace is looked at once.
struct Keys<'s> {
    numbers: &'s mut HashMap<OpKey, u32>,
    seen: HashMap<(StrId, u32, u16), u32>,
}

impl Keys<'_> {
    fn number(&mut self, context: &Context, op: usize) -> u32 {
        let trace = context.trace;
        let category = context.categories.of_op.get(op).copied().unwrap_or_default();
        let seen = (trace.ops.name[op], trace.ops.work[op], category);
        if let Some(&number) = self.seen.get(&seen) {
            return number;
        }
        let Category { name, class, .. } = context.categories.of_op(op);
        let part = match class {
            Class::Compute => Part::Category(name.clone()),
            Class::Communication => Part::ExposedCommunication,
            Class::Memory => Part::ExposedCopies,
        };
        let key = OpKey {
            op: trace.work_of(op).map(|work| trace.text(work.op).to_owned()).unwrap_or_default(),
            name: trace.op_name(op).to_owned(),
            category: name.clone(),
            part: part.to_string(),
        };
        let next = self.numbers.len() as u32;
        let number = *self.numbers.entry(key).or_insert(next);
        self.seen.insert(seen, number);
        number
    }
}

fn size_of(found: &Found) -> Size {
    Size {
        context_requests: found.context_requests,
        generation_requests: found.generation_requests,
        context_tokens: found.context_tokens,
        generation_tokens: found.generation_tokens,
    }
}

fn sample(
    context: &Context,
    slot: Slot,
    splits: &[Split],
    ops: impl Iterator<Item = usize>,
    owners: &Owners,
    keys: &mut Keys,
) -> Option<Sample> {
    if splits.is_empty() {
        return None;
    }
    let share = 1.0 / splits.len() as f64;
    let trace: &Trace = context.trace;
    let mut sample =
        Sample { slot, wall_ns: 0.0, kernels: 0.0, launches: 0.0, parts: BTreeMap::new(), ops: BTreeMap::new() };
    let mut launches = std::collections::HashSet::new();
    for op in ops {
        let time = sample.ops.entry(keys.number(context, op)).or_default();
        time.count += share;
        time.ns += share * trace.ops.duration(op) as f64;
        if matches!(trace.ops.kind[op], OpKind::Kernel | OpKind::CpuOp) {
            sample.kernels += share;
        }
        let launched = trace.ops.correlation[op] != 0;
        if launched && launches.insert((trace.ops.process[op], trace.ops.correlation[op])) {
            sample.launches += share;
        }
    }
    for split in splits {
        sample.wall_ns += share * split.window.length() as f64;
        for (part, ns) in &split.parts {
            let is_op = matches!(part, Part::Category(_) | Part::ExposedCommunication | Part::ExposedCopies);
            let key = PartKey { name: part.to_string(), is_op };
            *sample.parts.entry(key).or_default() += share * *ns as f64;
        }
        for (op, ns) in owners.within(split) {
            sample.ops.entry(keys.number(context, op)).or_default().own_ns += share * ns as f64;
        }
    }
    Some(sample)
}
