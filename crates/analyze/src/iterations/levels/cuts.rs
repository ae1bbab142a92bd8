//! Where the steps of a level begin and end.

use super::super::roles::At;
use super::anchors::{Anchor, Kind};
use super::{Level, Repeats};

/// Units before what begins a step that may belong to it.
const MOST_BEFORE: usize = 24;

impl Repeats {
    /// The units at which the steps of a level begin, in order, and where the last one ends.
    pub(crate) fn cuts(&self, level: &Level) -> Vec<usize> {
        let end = self.units.len();
        if level.count == 1 {
            return vec![0, end];
        }
        let of = |at: At| {
            let own = level.members.iter().map(|&m| &self.anchors[m]);
            own.filter(move |anchor| anchor.starts_or_ends() == Some(at))
        };
        // Steps begin with the strongest thing that begins one, or after what ends one, or with the kernel that comes first.
        let kernels = || {
            let own = level.members.iter().map(|&m| &self.anchors[m]);
            own.filter(|anchor| anchor.kind == Kind::Kernel && anchor.places.len() == level.count)
        };
        let earlier = |a: &Anchor, b: &Anchor| b.places.first().cmp(&a.places.first());
        // A gather may be that of an embedding, and that of the last tokens: then most of the step comes before it.
        let begins_there = |anchor: &&Anchor| {
            let before = kernels().filter(|kernel| kernel.places.first() < anchor.places.first()).count();
            2 * before <= kernels().count()
        };
        let first = of(At::Start).filter(begins_there);
        let first = first.max_by(|a, b| a.weight().total_cmp(&b.weight()).then_with(|| earlier(a, b)));
        let last = of(At::End).filter(|anchor| anchor.kind != Kind::Sync);
        let last = last.max_by(|a, b| a.weight().total_cmp(&b.weight()));
        let layers = level.members.iter().map(|&m| &self.anchors[m]).find(|anchor| anchor.kind == Kind::Layers);
        let (begin, after) = match (first, last) {
            (Some(first), last) => (first, last),
            (None, Some(last)) => (last, Some(last)),
            (None, None) => {
                let earliest = kernels().min_by(|a, b| earlier(b, a));
                (layers.or(earliest).unwrap_or(&self.anchors[level.reference]), None)
            }
        };
        let mut begins: Vec<usize> = begin.places.iter().map(|&place| place as usize).collect();
        if first.is_none() && last.is_some() {
            // What ends a step is the last of it: the next one begins behind it.
            let kernel = matches!(begin.kind, Kind::Kernel | Kind::Graph);
            let mut behind: Vec<usize> = begins.iter().map(|&place| place + usize::from(kernel)).collect();
            behind.retain(|&place| place < end);
            behind.insert(0, 0);
            behind.dedup();
            begins = behind;
        } else {
            let head = layers.filter(|_| first.is_none()).and_then(|_| self.head_before(&begins));
            let offset = head.unwrap_or_else(|| self.pause_before(&begins, after, level));
            begins.iter_mut().for_each(|place| *place = place.saturating_sub(offset));
            if level.count > 1 && self.is_step_before(&begins) {
                begins.insert(0, 0);
            }
        }
        begins.dedup();
        begins.push(end);
        self.without_partial(begins)
    }

    /// Whether what comes before the first step is one more that begins with other kernels, as a prefill does: it holds
    /// something that begins steps, and its size is like theirs.
    fn is_step_before(&self, begins: &[usize]) -> bool {
        let Some(&first) = begins.first() else { return false };
        let mut lengths: Vec<usize> = begins.windows(2).map(|pair| self.kernels_in(pair[0]..pair[1])).collect();
        lengths.sort_unstable();
        let usual = lengths.get(lengths.len() / 2).copied().unwrap_or(0);
        let begins_there = |anchor: &Anchor| {
            let reason =
                anchor.is_reason() && anchor.starts_or_ends() == Some(At::Start) || anchor.kind == Kind::Layers;
            reason && anchor.places.first().is_some_and(|&place| (place as usize) < first)
        };
        2 * self.kernels_in(0..first) >= usual && self.anchors.iter().any(begins_there)
    }

    pub(super) fn kernels_in(&self, units: std::ops::Range<usize>) -> usize {
        self.units.get(units).unwrap_or_default().iter().map(|unit| unit.kernels as usize).sum()
    }

    /// Units between the beginning of a step and its first layer, where the recording holds whole steps: then what is before
    /// the first run of layers and from the last one on makes up a step.
    fn head_before(&self, begins: &[usize]) -> Option<usize> {
        let (&first, &last) = (begins.first()?, begins.last()?);
        let mut periods: Vec<usize> = begins.windows(2).map(|pair| pair[1] - pair[0]).collect();
        periods.sort_unstable();
        let Some(&period) = periods.get(periods.len() / 2) else { return Some(first) };
        let around = first + self.units.len().saturating_sub(last);
        (first < period && around.abs_diff(period) <= period / 100).then_some(first)
    }

    /// How many units before what begins a step the step really begins: inputs are prepared first, behind a pause of the
    /// host. Within what lies between two steps; 0 where no pause stands out.
    fn pause_before(&self, begins: &[usize], after: Option<&Anchor>, level: &Level) -> usize {
        let inner = self.levels.iter().filter(|other| other.count > level.count && other.inside);
        let inner = inner.max_by(|a, b| a.score.total_cmp(&b.score)).map(|other| &self.anchors[other.reference]);
        let room = |begin: usize| {
            let behind = |anchor: &Anchor| {
                let until = anchor.places.partition_point(|&place| (place as usize) < begin);
                until.checked_sub(1).map(|last| anchor.places[last] as usize)
            };
            let last = [after, inner].into_iter().flatten().filter_map(behind).max();
            begin.saturating_sub(last.map_or(begin.saturating_sub(MOST_BEFORE), |last| last + 1)).min(MOST_BEFORE)
        };
        let inside: Vec<usize> = begins.iter().copied().skip(1).collect();
        let mut rooms: Vec<usize> = inside.iter().map(|&begin| room(begin)).collect();
        if rooms.is_empty() {
            return begins.first().map_or(0, |&first| if first <= MOST_BEFORE { first } else { 0 });
        }
        rooms.sort_unstable();
        let shortest = begins.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap_or(1);
        let room = rooms[rooms.len() / 2].min(shortest.saturating_sub(1));
        let pause = |offset: usize| {
            let gaps = inside.iter().filter_map(|&begin| {
                let place = begin.checked_sub(offset).filter(|&place| place > 0)?;
                Some(self.units.get(place)?.at.saturating_sub(self.units.get(place - 1)?.at))
            });
            let mut gaps: Vec<i64> = gaps.collect();
            gaps.sort_unstable();
            gaps.get(gaps.len() / 2).copied().unwrap_or(0)
        };
        let own = pause(0);
        let longest = (0..=room)
            .map(|offset| (pause(offset), offset))
            .max_by_key(|&(gap, offset)| (gap, std::cmp::Reverse(offset)));
        match longest {
            Some((gap, offset)) if gap > 2 * own.max(1) => offset,
            _ => 0,
        }
    }

    /// Leaves out what is cut off at both ends of the recording: less than half of a usual step.
    fn without_partial(&self, mut cuts: Vec<usize>) -> Vec<usize> {
        if cuts.len() < 4 {
            return cuts;
        }
        let mut lengths: Vec<usize> = cuts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        lengths.sort_unstable();
        let usual = lengths[lengths.len() / 2];
        let last = cuts.len() - 1;
        if 2 * (cuts[last] - cuts[last - 1]) < usual && cuts[last] - cuts[last - 1] > 0 {
            cuts.pop();
        } else if cuts[last] - cuts[last - 1] > usual + usual / 5 {
            // What follows the last step is not a part of it.
            let end = cuts[last - 1] + usual;
            cuts[last] = end;
        }
        cuts
    }
}
