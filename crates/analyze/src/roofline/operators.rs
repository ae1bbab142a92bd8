//! The operators of a trace whose inputs tell what they compute.

use std::collections::HashMap;

use strobe_trace::{NONE, RangeSource, StrId, Trace};

use super::amounts::{self, Amounts, Inputs, Operator, Rank, Sequences};
use crate::Context;
use crate::attribution::Attribution;

/// How many operators behind a convolution are looked at for one that takes its result.
const LOOK_BEHIND: usize = 24;

/// What the profiler wrote of an operator, as far as it matters: traces repeat few of them.
type Key = [StrId; 7];

/// Which operators have amounts of their own.
pub(super) struct Operators<'t> {
    attribution: &'t Attribution,
    /// Per range the place of its amounts in `distinct`, or [`NONE`].
    which: Vec<u32>,
    /// Per range the innermost one with amounts around it (itself included), or [`NONE`].
    nearest: Vec<u32>,
    /// Per range the highest rank of those with amounts inside it, as [`Rank`] + 1; 0 = none.
    inside: Vec<u8>,
    distinct: Vec<(Amounts, Rank)>,
}

impl<'t> Operators<'t> {
    /// Those around the launches of ops.
    pub(super) fn around_ops(context: &'t Context) -> Self {
        let (trace, attribution) = (context.trace, context.attribution());
        let mut used = vec![false; trace.ranges.len()];
        for &range in &attribution.innermost {
            if let Some(used) = used.get_mut(range as usize) {
                *used = true;
            }
        }
        for range in (0..used.len()).rev() {
            if used[range]
                && let Some(parent) = used.get_mut(attribution.parent[range] as usize)
            {
                *parent = true;
            }
        }
        Self::of(trace, attribution, used)
    }

    /// All of them, where the host computes.
    pub(super) fn on_host(context: &'t Context) -> Self {
        let trace = context.trace;
        let used = (0..trace.ranges.len()).map(|range| crate::host_compute::is_operator(trace, range)).collect();
        Self::of(trace, context.attribution(), used)
    }

    fn of(trace: &'t Trace, attribution: &'t Attribution, used: Vec<bool>) -> Self {
        let count = trace.ranges.len();
        let mut reader = Reader {
            trace,
            attribution,
            known: HashMap::new(),
            sequences: HashMap::new(),
            distinct: Vec::new(),
            wants_around: vec![None; trace.strings.len()],
            says_nothing: vec![false; trace.strings.len()],
        };
        let (mut which, mut nearest, mut inside) = (vec![NONE; count], vec![NONE; count], vec![0; count]);
        for range in 0..count {
            if used[range] {
                which[range] = reader.place(range as u32);
            }
            let parent = attribution.parent[range] as usize;
            nearest[range] = match which[range] {
                NONE => nearest.get(parent).copied().unwrap_or(NONE),
                _ => range as u32,
            };
        }
        let distinct = reader.distinct;
        for range in (0..count).filter(|&range| used[range]).rev() {
            let own = distinct.get(which[range] as usize).map_or(0, |(_, rank)| *rank as u8 + 1);
            let found = own.max(inside[range]);
            if let Some(parent) = inside.get_mut(attribution.parent[range] as usize) {
                *parent = found.max(*parent);
            }
        }
        Self { attribution, which, nearest, inside, distinct }
    }

    /// The innermost operator around the launch of an op whose inputs tell what it computes.
    pub(super) fn of_op(&self, op: usize) -> Option<u32> {
        self.nearest(*self.attribution.innermost.get(op)?)
    }

    /// The same around a range, which may be it.
    pub(super) fn nearest(&self, range: u32) -> Option<u32> {
        self.nearest.get(range as usize).copied().filter(|&range| range != NONE)
    }

    /// What an operator computes and moves itself. One inside which another one of its rank did the work has nothing of
    /// its own to count.
    pub(super) fn amounts(&self, range: u32) -> Option<Amounts> {
        let (amounts, rank) = self.distinct.get(*self.which.get(range as usize)? as usize)?;
        (self.inside[range as usize] <= *rank as u8).then_some(*amounts)
    }
}

/// Reads what operators do.
struct Reader<'t> {
    trace: &'t Trace,
    attribution: &'t Attribution,
    known: HashMap<Key, (Option<Operator>, u32)>,
    /// Lengths of sequences by the name of a marker.
    sequences: HashMap<StrId, Option<Sequences>>,
    distinct: Vec<(Amounts, Rank)>,
    /// Whether operators of a name are understood only with the one around them.
    wants_around: Vec<Option<bool>>,
    /// By name whether ranges without inputs are no operator, as most ranges are that are not PyTorch's.
    says_nothing: Vec<bool>,
}

impl Reader<'_> {
    /// The place of the amounts of a range, or [`NONE`].
    fn place(&mut self, range: u32) -> u32 {
        let (trace, r) = (self.trace, range as usize);
        let ranges = &trace.ranges;
        if !matches!(ranges.source[r], RangeSource::CpuOp | RangeSource::PushPop) {
            return NONE;
        }
        let name = ranges.name[r];
        let place = name.0 as usize;
        let inputs = [ranges.dims[r], ranges.types[r], ranges.values[r], ranges.strides[r]];
        let has_inputs = inputs.iter().any(|text| text.is_some());
        if !has_inputs && self.says_nothing.get(place) == Some(&true) {
            return NONE;
        }
        let wants = self
            .wants_around
            .get_mut(place)
            .is_some_and(|wants| *wants.get_or_insert_with(|| amounts::wants_around(trace.text(name))));
        let around = match ranges.dims.get(self.attribution.parent[r] as usize) {
            Some(&dims) if wants => dims,
            _ => StrId::NONE,
        };
        let key = [name, ranges.dims[r], ranges.types[r], ranges.values[r], ranges.strides[r], around, StrId::NONE];
        match self.operator(key) {
            (Some(Operator::Known(..)), place) => place,
            (Some(Operator::NeedsResult), _) => self.with_result(range, key),
            // The marker of the iteration tells how long the sequences are.
            (Some(operator @ Operator::Ragged(ragged)), _) => {
                let markers = self.attribution.outward(range).map(|around| ranges.name[around]);
                let sequences = markers.filter_map(|name| {
                    *self.sequences.entry(name).or_insert_with(|| Sequences::of_marker(trace.text(name)))
                });
                let found = { sequences }.next().and_then(|sequences| sequences.attention(&ragged));
                found.map_or(NONE, |amounts| self.keep(amounts, operator.rank()))
            }
            (None, _) => {
                if let Some(says_nothing) = self.says_nothing.get_mut(place).filter(|_| !has_inputs && !wants) {
                    *says_nothing = true;
                }
                NONE
            }
        }
    }

    fn keep(&mut self, amounts: Amounts, rank: Rank) -> u32 {
        self.distinct.push((amounts, rank));
        self.distinct.len() as u32 - 1
    }

    fn operator(&mut self, key: Key) -> (Option<Operator>, u32) {
        if let Some(&known) = self.known.get(&key) {
            return known;
        }
        let text = |id: StrId| if id == StrId::NONE { "" } else { self.trace.text(id) };
        let [name, dims, types, values, strides, around, behind] = key.map(text);
        let found = amounts::operator(&Inputs { name, dims, types, values, strides, around, behind });
        let place = match found {
            Some(Operator::Known(amounts, rank)) => self.keep(amounts, rank),
            _ => NONE,
        };
        self.known.insert(key, (found, place));
        (found, place)
    }

    /// Looks among the next operators of the thread for one that takes a result of fitting dimensions.
    fn with_result(&mut self, range: u32, key: Key) -> u32 {
        let ranges = &self.trace.ranges;
        let (end, thread) = (ranges.end[range as usize], ranges.thread[range as usize]);
        let behind = (range as usize + 1..ranges.len()).take(8 * LOOK_BEHIND).filter(|&next| {
            let of_thread = ranges.thread[next] == thread && ranges.start[next] >= end;
            of_thread && ranges.source[next] == RangeSource::CpuOp && ranges.dims[next] != StrId::NONE
        });
        let [name, dims, types, values, strides, around, _] = key;
        for next in behind.take(LOOK_BEHIND) {
            let with = [name, dims, types, values, strides, around, ranges.dims[next]];
            if let (Some(Operator::Known(..)), place) = self.operator(with) {
                return place;
            }
        }
        NONE
    }
}
