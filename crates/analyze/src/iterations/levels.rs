//! Steps of programs that mark none, found by what happens once in each.
//!
//! A trace repeats on several levels: kernels, layers, steps, sometimes rounds of steps. Everything that comes back (a
//! kernel, a graph, a copy of results to the host, an operator, a range) is an [`Anchor`]; anchors that take turns, each
//! once, make a [`Level`]. A level is the level of steps by what it holds: an embedding, sampling, a loss, an optimizer, a
//! copy back or a wait of the host, a range that says so, other levels inside it. A layer comes back as regularly, but
//! holds none of these.

mod anchors;
mod cuts;
mod score;
mod work;

use std::collections::BTreeMap;

use strobe_trace::Trace;

use super::rhythm;
use anchors::{Anchor, Kind, alternate, kernel_anchors, marks, once_at_most, several_in_each};
use work::{Unit, Work, calls_by_name};

pub(super) use work::mixed;

/// Something that a process does again and again.
pub(super) struct Level {
    /// How often.
    pub count: usize,
    /// What it is worth as the level of steps.
    pub score: f64,
    /// What it rests on, in words.
    pub evidence: String,
    /// The range that marks it, as the user would name it.
    pub range: Option<String>,
    /// Whether graph launches are its steps.
    pub graphs: bool,
    /// Whether it is a part of a coarser level that is known to be one of steps.
    pub inside: bool,
    /// Kernels that come exactly as often.
    kernels: usize,
    /// Its anchors.
    members: Vec<usize>,
    /// The one that the others take turns with.
    reference: usize,
}

/// The work of one process in the order of its launches, and what repeats in it.
pub(super) struct Repeats {
    pub units: Vec<Unit>,
    /// Whether units stand at their launches.
    pub launched: bool,
    anchors: Vec<Anchor>,
    /// Levels, the most likely level of steps first.
    pub levels: Vec<Level>,
}

/// From this score on a level is taken for the steps.
pub(super) const ENOUGH: f64 = 5.0;
/// And by so much it must be ahead of the next one with another count.
pub(super) const AHEAD: f64 = 2.0;

/// Share of a process' kernels that are in the layers of its only pass.
const MOST_OF_PASS: f64 = 0.6;
/// Fewest kernels around the layers of a pass that come once.
const FEWEST_AROUND: usize = 2;
/// How many times as many kernels a coarser level must have once as a finer one, so that the finer one is a part of it.
const MANY_MORE: usize = 2;
/// And how many at least.
const FEWEST_OF_MANY: usize = 8;
/// Fewest repeats of an inner level in each step that make it a level of layers.
const FEWEST_LAYERS: usize = 4;
/// What it is worth that a level has layers.
const LAYERS_WORTH: f64 = 2.0;
/// How a level with layers says so.
const LAYERS: &str = " repeats inside";

impl Repeats {
    /// What repeats in each process, in the order of the trace's processes.
    pub(super) fn of(trace: &Trace) -> Vec<Self> {
        let graph_call = calls_by_name(trace, |name| name.contains("GraphLaunch"));
        let work = Work::by_process(trace, &graph_call);
        let mut marks = marks(trace, &graph_call, &work);
        work.into_iter()
            .enumerate()
            .map(|(process, work)| {
                let mut anchors = kernel_anchors(trace, &work);
                anchors.extend(std::mem::take(&mut marks[process]));
                let mut repeats = Self { units: work.units, launched: work.launched, anchors, levels: Vec::new() };
                repeats.find_levels();
                repeats
            })
            .collect()
    }

    /// How many kernels the process ran.
    pub(super) fn kernels(&self) -> usize {
        self.units.iter().map(|unit| unit.kernels as usize).sum()
    }

    /// Whether the first level is clearly the one of steps.
    pub(super) fn is_decided(&self) -> bool {
        let Some(first) = self.levels.first() else { return false };
        let rival =
            self.levels.iter().skip(1).filter(|other| !other.inside).map(|other| other.score).fold(0.0, f64::max);
        !first.inside && first.score >= ENOUGH && first.score >= rival + AHEAD
    }

    fn find_levels(&mut self) {
        let kernels = self.anchors.iter().filter(|anchor| anchor.kind == Kind::Kernel);
        let mut single_run = None;
        if let Some(runs) = rhythm::runs(kernels.map(|anchor| anchor.places.as_slice())) {
            let name = format!("a run of {} layers", runs.layers);
            let begin = runs.places.first().copied().unwrap_or(0);
            single_run = (runs.places.len() == 1).then_some((begin, runs.last));
            self.anchors.push(Anchor { kind: Kind::Layers, name, role: None, places: runs.places });
        }
        let mut by_count: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, anchor) in self.anchors.iter().enumerate() {
            by_count.entry(anchor.places.len()).or_default().push(index);
        }
        let mut levels: Vec<Level> = Vec::new();
        for (&count, anchors) in &by_count {
            let mut order = anchors.clone();
            order.sort_by(|&a, &b| self.anchors[b].weight().total_cmp(&self.anchors[a].weight()));
            let Some(&reference) = order.iter().find(|&&anchor| self.is_regular(&self.anchors[anchor])) else {
                continue;
            };
            let neighbors = [count.wrapping_sub(1), count, count + 1];
            let near = neighbors.iter().filter_map(|count| by_count.get(count)).flatten();
            let takes_turns = |other: &usize| {
                alternate(&self.anchors[reference].places, &self.anchors[*other].places)
                    && (count > 2 || self.anchors[*other].places.len() == count)
            };
            let mut members: Vec<usize> = near.copied().filter(takes_turns).collect();
            // Of what not every step has, graphs count: a prefill is launched op by op, decode steps are graphs.
            let some = |&index: &usize| {
                let anchor = &self.anchors[index];
                anchor.kind == Kind::Graph
                    && 2 * anchor.places.len() >= count
                    && anchor.places.len() + 1 < count
                    && once_at_most(&self.anchors[reference].places, &anchor.places)
            };
            members.extend((0..self.anchors.len()).filter(some));
            members.sort_unstable();
            members.dedup();
            levels.push(self.level(count, reference, members));
        }
        self.relate(&mut levels);
        if let Some(passes) = self.anchors.iter().find(|anchor| anchor.kind == Kind::Pass) {
            // A step holds whole passes: what comes several times in most of them is a part of a step.
            let several = |level: &Level| several_in_each(&passes.places, &self.anchors[level.reference].places);
            levels.iter_mut().filter(|level| several(level)).for_each(|level| level.inside = true);
        }
        let several =
            |level: &Level| level.count > 1 && level.score >= ENOUGH && !level.inside && self.has_reason(level);
        if single_run.is_some_and(|(first, last)| self.is_single_pass(first, last)) {
            // What repeats are its layers, whatever they are called.
            levels.iter_mut().for_each(|level| match level.count {
                1 => level.score = level.score.max(ENOUGH + AHEAD),
                _ => level.inside = true,
            });
        } else if levels.iter().any(several) {
            // What comes once may belong to one step of several that do not look alike: a prefill among decode steps.
            levels.iter_mut().filter(|level| level.count == 1).for_each(|level| level.score = level.score.min(1.0));
        }
        levels.retain(|level| level.score > 0.0);
        levels
            .sort_by(|a, b| (a.inside, b.score).partial_cmp(&(b.inside, a.score)).unwrap_or(std::cmp::Ordering::Equal));
        // Counts that differ by one tell the same steps, of which the first or the last is cut off.
        let mut kept: Vec<Level> = Vec::new();
        for level in levels {
            let same = |other: &Level| {
                level.count > 1
                    && other.count.abs_diff(level.count) == 1
                    && alternate(&self.anchors[other.reference].places, &self.anchors[level.reference].places)
            };
            if !kept.iter().any(same) {
                kept.push(level);
            }
        }
        self.levels = kept;
    }

    /// Whether a run of layers between these units is the one forward pass of the process: it holds most of the kernels,
    /// and what stands around it, a reason among it, comes once.
    fn is_single_pass(&self, first: u32, last: u32) -> bool {
        let inside = self.kernels_in(first as usize..last as usize + 1);
        let around = |anchor: &&Anchor| match anchor.places[..] {
            [place] => place < first || place > last,
            _ => false,
        };
        // A graph beside the layers may be a step of its own.
        let beside = |&(place, unit): &(usize, &Unit)| {
            unit.graph
                && (place < first as usize || place > last as usize)
                && (unit.hidden || 4 * unit.kernels as usize > inside)
        };
        if self.units.iter().enumerate().any(|unit| beside(&unit)) {
            return false;
        }
        let own = || self.anchors.iter().filter(around);
        let kernels = own().filter(|anchor| anchor.kind == Kind::Kernel).count();
        let reason = own().any(|anchor| anchor.is_reason());
        inside as f64 >= MOST_OF_PASS * self.kernels() as f64 && kernels >= FEWEST_AROUND && reason
    }

    /// Whether something in it is a reason to take it for the level of steps.
    fn has_reason(&self, level: &Level) -> bool {
        level.members.iter().any(|&member| self.anchors[member].is_reason())
    }

    /// Whether something comes back at similar distances, over most of the process' work.
    fn is_regular(&self, anchor: &Anchor) -> bool {
        let places = &anchor.places;
        let (Some(&first), Some(&last)) = (places.first(), places.last()) else { return false };
        if places.len() < 2 {
            return true;
        }
        let distances = || places.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        let mut sorted: Vec<usize> = distances().collect();
        sorted.sort_unstable();
        let usual = sorted[sorted.len() / 2];
        // Of two or three, what is around them tells whether they are at similar distances at all.
        let around = first as usize + self.units.len().saturating_sub(last as usize);
        if places.len() <= 3 && (2 * around < usual || around > 2 * usual) {
            return false;
        }
        let similar = distances().filter(|&d| 2 * d >= usual && d <= 2 * usual).count();
        let covered = (last - first) as usize + usual;
        usual > 0 && 10 * similar >= 6 * (places.len() - 1) && 2 * covered >= self.units.len()
    }

    /// Finds which levels lie inside others. A coarser one that holds others in equal numbers is a step with its layers,
    /// if it has a reason of its own to be one.
    fn relate(&self, levels: &mut [Level]) {
        let mut held: Vec<(usize, usize)> = Vec::new();
        for outer in 0..levels.len() {
            for inner in outer + 1..levels.len() {
                let (coarse, fine) = (&levels[outer], &levels[inner]);
                if coarse.score <= 0.0 {
                    break;
                }
                let Some(each) = self.holds(coarse, fine) else { continue };
                let of_kind = |kinds: &[Kind]| fine.members.iter().any(|&m| kinds.contains(&self.anchors[m].kind));
                let is_step = fine.graphs && of_kind(&[Kind::ReadBack, Kind::Sync, Kind::Input]);
                if is_step || (coarse.count == 1 && self.has_reason(fine)) {
                    continue;
                }
                held.push((outer, inner));
                if each >= FEWEST_LAYERS && !coarse.evidence.ends_with(LAYERS) {
                    levels[outer].score += LAYERS_WORTH;
                    levels[outer].evidence += &format!(", {each}{LAYERS}");
                }
            }
        }
        for (outer, inner) in held {
            let (coarse, fine) = (&levels[outer], &levels[inner]);
            let many = coarse.count > 1 && coarse.kernels >= FEWEST_OF_MANY.max(MANY_MORE * fine.kernels);
            levels[inner].inside |= coarse.score >= ENOUGH && (self.has_reason(coarse) || many);
        }
    }

    /// How often a finer level comes in each segment of a coarser one, where that is nearly always the same number, and
    /// the finer one lies between what begins and what ends the coarser one.
    fn holds(&self, coarse: &Level, fine: &Level) -> Option<usize> {
        if fine.count < 2 * coarse.count {
            return None;
        }
        let (outer, inner) = (&self.anchors[coarse.reference].places, &self.anchors[fine.reference].places);
        if coarse.count == 1 {
            let (&first, &last) = (inner.first()?, inner.last()?);
            let own = || {
                coarse
                    .members
                    .iter()
                    .map(|&member| &self.anchors[member])
                    .filter_map(|anchor| Some((anchor, *anchor.places.first()?)))
            };
            let begins = own().any(|(anchor, place)| anchor.is_reason() && place <= first);
            let ends = own().any(|(anchor, place)| anchor.kind == Kind::Kernel && place > last);
            return (begins && ends).then_some(inner.len());
        }
        let mut counts: Vec<usize> = outer
            .windows(2)
            .map(|pair| {
                let of = |place: u32| inner.partition_point(|&inner| inner < place);
                of(pair[1]) - of(pair[0])
            })
            .collect();
        counts.sort_unstable();
        let usual = counts[counts.len() / 2];
        let same = counts.iter().filter(|&&count| count == usual).count();
        // What lies before the first and behind the last counts too: as many as in a segment at most.
        let all = inner.len();
        let whole = all >= usual * counts.len() && all <= usual * (counts.len() + 2);
        (usual >= 2 && whole && 10 * same >= 8 * counts.len()).then_some(usual)
    }
}
