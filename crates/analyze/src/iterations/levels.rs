//! Steps of programs that mark none, found by what happens once in each.
//!
//! A trace repeats on several levels: kernels, layers, steps, sometimes rounds of steps. Everything that comes back (a
//! kernel, a graph, a copy of results to the host, an operator, a range) is an [`Anchor`]; anchors that take turns, each
//! once, make a [`Level`]. A level is the level of steps by what it holds: an embedding, sampling, a loss, an optimizer, a
//! copy back or a wait of the host, a range that says so, other levels inside it. A layer comes back as regularly, but
//! holds none of these.

use std::collections::{BTreeMap, HashMap};

use strobe_trace::{CallKind, NONE, OpDetail, OpKind, RangeSource, StrId, Trace, range_flags};

use super::patterns::{DEVICE_TO_HOST, copy_direction};
use super::rhythm;
use super::roles::{At, Role, of_kernel, of_range, without_numbers};

/// What one call launched: a kernel, or a graph with all of its kernels; or a kernel without a recorded launch.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// When it was launched; when it began where launches are not known.
    pub at: i64,
    /// Its first op.
    pub op: u32,
    /// The call, or [`NONE`].
    pub call: u32,
    /// Kernels in it.
    pub kernels: u32,
    /// Whether it is a graph.
    pub graph: bool,
    /// Whether the kernels in it were not recorded.
    hidden: bool,
    /// The kernels in it as a number that does not depend on their order: those of a graph may run side by side.
    what: u64,
}

/// Something that comes back.
struct Anchor {
    kind: Kind,
    /// The kernel, operator or range, numbers in it as `N`.
    name: String,
    role: Option<&'static Role>,
    /// Per occurrence the unit that it is, or the first one launched after it.
    places: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Kernel,
    Graph,
    ReadBack,
    Input,
    Sync,
    /// A range that somebody wrote: NVTX, an annotation.
    Range,
    /// An operator or a Python function.
    Operator,
    /// The first of several layers that follow each other.
    Layers,
}

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

/// Occurrences above which something is no candidate for a step.
const MOST: usize = 50_000;
/// Share of a process' time that a range without a role must cover to count.
const LEAST_OF_TIME: f64 = 0.01;
/// Share of exceptions that an alternation may have.
const EXCEPTIONS: usize = 50;
/// Fewest kernels that may be a step alone.
const FEWEST_OF_ONE: usize = 30;
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

impl Repeats {
    /// What repeats in each process, in the order of the trace's processes.
    pub fn of(trace: &Trace) -> Vec<Self> {
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
    pub fn kernels(&self) -> usize {
        self.units.iter().map(|unit| unit.kernels as usize).sum()
    }

    /// Whether the first level is clearly the one of steps.
    pub fn is_decided(&self) -> bool {
        let Some(first) = self.levels.first() else { return false };
        let rival =
            self.levels.iter().skip(1).filter(|other| !other.inside).map(|other| other.score).fold(0.0, f64::max);
        !first.inside && first.score >= ENOUGH && first.score >= rival + AHEAD
    }

    /// The units at which the steps of a level begin, in order, and where the last one ends.
    pub fn cuts(&self, level: &Level) -> Vec<usize> {
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

    fn kernels_in(&self, units: std::ops::Range<usize>) -> usize {
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

    fn level(&self, count: usize, reference: usize, members: Vec<usize>) -> Level {
        let own = || members.iter().map(|&member| &self.anchors[member]);
        let of_kind = |kind: Kind| own().filter(move |anchor| anchor.kind == kind);
        let mut said: Vec<String> = Vec::new();
        let mut score = 0.0;
        let mut roles: Vec<&'static Role> = Vec::new();
        for role in own().filter_map(|anchor| anchor.role) {
            if !roles.iter().any(|known| std::ptr::eq(*known, role)) {
                roles.push(role);
            }
        }
        roles.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        // A final norm comes once a step too: what layers have speaks against a step where nothing speaks for one.
        let for_step = roles.iter().any(|role| role.weight >= 2.0);
        for role in &roles {
            score += if for_step { role.weight.max(0.0) } else { role.weight };
            if role.weight > 0.0 {
                said.push(role.name.clone());
            }
        }
        let graphs = of_kind(Kind::Graph).next().is_some();
        if graphs {
            score += 3.0;
            said.push("a CUDA graph".to_owned());
        }
        let (read_back, sync) = (of_kind(Kind::ReadBack).next(), of_kind(Kind::Sync).next());
        if read_back.is_some() || sync.is_some() {
            score += 2.0;
            said.push(match read_back {
                Some(_) => "a copy to the host".to_owned(),
                None => sync.map(|anchor| anchor.name.clone()).unwrap_or_default(),
            });
        }
        if of_kind(Kind::Input).next().is_some() {
            score += 1.0;
            said.push("a copy of inputs".to_owned());
        }
        let range = of_kind(Kind::Range)
            .filter(|anchor| anchor.role.is_none_or(|role| role.weight > 0.0))
            .max_by(|a, b| a.weight().total_cmp(&b.weight()));
        if let Some(range) = range.filter(|range| range.role.is_none()) {
            score += 2.0;
            said.push(format!("range `{}`", range.name));
        }
        if of_kind(Kind::Operator).any(|anchor| anchor.role.is_none()) {
            score += 0.5;
        }
        // A single run of layers may be a piece of something; several have something between them.
        if let Some(layers) = of_kind(Kind::Layers).next() {
            score += if count > 1 { 3.0 } else { 1.0 };
            said.push(layers.name.clone());
        }
        let kernels = of_kind(Kind::Kernel).filter(|anchor| anchor.places.len() == count).count();
        if kernels > 0 {
            score += kernels.min(3) as f64;
            said.push(if kernels == 1 { "a kernel".to_owned() } else { format!("{kernels} kernels") });
        }
        // Waits of the host and a rhythm are no steps without something on the device that comes as often.
        if kernels == 0 && !graphs && range.is_none() && !roles.iter().any(|role| role.weight > 0.0) {
            score = 0.0;
        }
        // Layers have copies, waits and kernels of their own as well: more has to speak for a step.
        let evident = graphs || range.is_some() || read_back.is_some() || own().any(Anchor::is_reason);
        // A run of layers and a graph, once each, may be a prefill and a decode step.
        let two = count == 1 && graphs && of_kind(Kind::Layers).next().is_some();
        if !evident {
            score = score.min(ENOUGH - 1.0 - LAYERS_WORTH);
        }
        // A single pass, or two, need a reason beside what happens to be there once or twice.
        let named = own().any(Anchor::is_reason);
        let reason = named || graphs || (count > 1 && range.is_some());
        if count <= 2 && !reason || two || count == 1 && self.kernels() < FEWEST_OF_ONE {
            score = 0.0;
        }
        let range = range.or_else(|| {
            own().find(|anchor| anchor.role.is_some_and(|role| role.weight > 0.0) && anchor.kind == Kind::Operator)
        });
        Level {
            count,
            score,
            evidence: said.join(", "),
            range: range.map(|anchor| anchor.name.clone()),
            graphs,
            inside: false,
            kernels,
            members,
            reference,
        }
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

/// What it is worth that a level has layers.
const LAYERS_WORTH: f64 = 2.0;
/// How a level with layers says so.
const LAYERS: &str = " repeats inside";

/// Units before what begins a step that may belong to it.
const MOST_BEFORE: usize = 24;

impl Anchor {
    /// What it is worth as a place where steps begin or end.
    fn weight(&self) -> f64 {
        let role = self.role.map_or(0.0, |role| role.weight);
        role + match self.kind {
            Kind::Graph => 3.0,
            Kind::Range => 2.0,
            Kind::ReadBack | Kind::Sync => 2.0,
            Kind::Input => 1.0,
            Kind::Kernel | Kind::Layers => 1.0,
            Kind::Operator => 0.5,
        }
    }

    fn starts_or_ends(&self) -> Option<At> {
        match (self.role, self.kind) {
            (Some(role), _) if role.weight > 0.0 => Some(role.at),
            (_, Kind::ReadBack | Kind::Sync) => Some(At::End),
            (_, Kind::Input) => Some(At::Start),
            _ => None,
        }
    }

    /// Whether it is a reason to take what holds it once for a step.
    fn is_reason(&self) -> bool {
        self.role.is_some_and(|role| role.weight >= 2.0) || (self.kind == Kind::Layers && self.places.len() > 1)
    }
}

/// Whether two things take turns, each once, with few exceptions. Of one there may be one more.
fn alternate(a: &[u32], b: &[u32]) -> bool {
    let (few, many) = if a.len() <= b.len() { (a, b) } else { (b, a) };
    let n = few.len();
    let between = |first: &[u32], second: &[u32]| {
        let fits = |i: usize| first[i] <= second[i] && first.get(i + 1).is_none_or(|&next| second[i] <= next);
        (0..n).filter(|&i| !fits(i)).count() <= n / EXCEPTIONS
    };
    match many.len() - n {
        0 => between(few, many) || between(many, few),
        1 => between(many, few),
        _ => false,
    }
}

/// Whether something comes at most once between two of another.
fn once_at_most(reference: &[u32], other: &[u32]) -> bool {
    let mut segments: Vec<usize> = other.iter().map(|&place| reference.partition_point(|&r| r <= place)).collect();
    segments.dedup();
    segments.len() + other.len() / EXCEPTIONS >= other.len()
}

/// The work of one process.
#[derive(Default)]
struct Work {
    units: Vec<Unit>,
    /// Per kernel its unit, in the order of launches.
    kernels: Vec<(u32, u32)>,
    /// Whether units stand at their launches.
    launched: bool,
}

impl Work {
    fn by_process(trace: &Trace, graph_call: &[bool]) -> Vec<Self> {
        let ops = &trace.ops;
        let mut all: Vec<Vec<(i64, u32, u32)>> = vec![Vec::new(); trace.processes.len()];
        for op in (0..ops.len()).filter(|&op| !ops.kind[op].is_memory()) {
            if let Some(own) = all.get_mut(ops.process[op] as usize) {
                own.push((ops.start[op], ops.launch[op], op as u32));
            }
        }
        all.into_iter()
            .map(|mut own| {
                let launches = own.iter().filter(|(_, call, _)| *call != NONE).count();
                let launched = 2 * launches >= own.len() && launches > 0;
                if launched {
                    own.retain(|(_, call, _)| *call != NONE);
                    own.iter_mut().for_each(|(at, call, _)| *at = trace.calls.start[*call as usize]);
                    own.sort_by_key(|&(at, call, _)| (at, call));
                }
                let mut work = Self { launched, ..Self::default() };
                for (at, call, op) in own {
                    let call = if launched { call } else { NONE };
                    match work.units.last_mut().filter(|unit| call != NONE && unit.call == call) {
                        Some(unit) => {
                            unit.kernels += 1;
                            unit.what = unit.what.wrapping_add(mixed(ops.name[op as usize]));
                        }
                        None => {
                            let replayed = graph_call.get(call as usize).copied().unwrap_or(false);
                            let graph = replayed || ops.kind[op as usize] == OpKind::Graph;
                            let what = mixed(ops.name[op as usize]);
                            let hidden = ops.kind[op as usize] == OpKind::Graph;
                            work.units.push(Unit { at, op, call, kernels: 1, graph, hidden, what });
                        }
                    }
                    work.kernels.push((op, work.units.len() as u32 - 1));
                }
                work
            })
            .collect()
    }
}

/// A name as a number whose sums tell which names are in them.
pub(super) fn mixed(name: StrId) -> u64 {
    let mut mixed = u64::from(name.0).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^= mixed >> 32;
    mixed.wrapping_mul(0xd6e8_feb8_6659_fd93)
}

fn calls_by_name(trace: &Trace, of: impl Fn(&str) -> bool) -> Vec<bool> {
    let mut known: Vec<Option<bool>> = vec![None; trace.strings.len()];
    let names = trace.calls.name.iter();
    names
        .map(|&name| {
            known.get_mut(name.0 as usize).is_some_and(|known| *known.get_or_insert_with(|| of(trace.text(name))))
        })
        .collect()
}

/// Kernels by name, those of one name also by the shape of their launch; graphs by what is in them.
fn kernel_anchors(trace: &Trace, work: &Work) -> Vec<Anchor> {
    let ops = &trace.ops;
    let mut by_name: HashMap<StrId, Vec<u32>> = HashMap::new();
    let mut by_shape: HashMap<(StrId, u32), Vec<u32>> = HashMap::new();
    for &(op, unit) in &work.kernels {
        let op = op as usize;
        if ops.kind[op] == OpKind::Graph {
            continue;
        }
        by_name.entry(ops.name[op]).or_default().push(unit);
        if ops.detail[op] != NONE {
            by_shape.entry((ops.name[op], ops.detail[op])).or_default().push(unit);
        }
    }
    let mut graphs: HashMap<(u32, u64, u32), Vec<u32>> = HashMap::new();
    for (place, unit) in work.units.iter().enumerate().filter(|(_, unit)| unit.graph) {
        let op = unit.op as usize;
        let exec = match trace.detail_of(op) {
            Some(&OpDetail::Graph { exec, .. }) => exec,
            _ => 0,
        };
        graphs.entry((unit.kernels, unit.what, exec)).or_default().push(place as u32);
    }
    let mut anchors: Vec<Anchor> = Vec::new();
    let whole: HashMap<StrId, usize> = by_name.iter().map(|(&name, places)| (name, places.len())).collect();
    let by_shape = by_shape.into_iter().filter(|((name, _), places)| whole.get(name) != Some(&places.len()));
    let kernels = by_name.into_iter().chain(by_shape.map(|((name, _), places)| (name, places)));
    for (name, places) in kernels.filter(|(_, places)| places.len() <= MOST) {
        let text = trace.text(name);
        anchors.push(Anchor { kind: Kind::Kernel, name: text.to_owned(), role: of_kernel(text), places });
    }
    for ((kernels, _, _), places) in graphs.into_iter().filter(|(_, places)| places.len() <= MOST) {
        anchors.push(Anchor { kind: Kind::Graph, name: format!("graph of {kernels} kernels"), role: None, places });
    }
    // Maps have no order: levels must not depend on it.
    anchors
        .sort_by(|a, b| (a.places.first(), &a.name, a.places.len()).cmp(&(b.places.first(), &b.name, b.places.len())));
    anchors
}

/// What the host does besides launching kernels: copies, waits, ranges.
fn marks(trace: &Trace, graph_call: &[bool], work: &[Work]) -> Vec<Vec<Anchor>> {
    let mut marks: Vec<Vec<Anchor>> = work.iter().map(|_| Vec::new()).collect();
    let place = |process: usize, at: i64| work[process].units.partition_point(|unit| unit.at < at) as u32;
    let mut add = |process: usize, kind: Kind, name: String, role, times: Vec<i64>| {
        if !work[process].units.is_empty() && !times.is_empty() && times.len() <= MOST {
            let places = times.into_iter().map(|at| place(process, at)).collect();
            marks[process].push(Anchor { kind, name, role, places });
        }
    };
    let ops = &trace.ops;
    let mut copies: BTreeMap<(usize, u8), Vec<i64>> = BTreeMap::new();
    for op in (0..ops.len()).filter(|&op| ops.kind[op] == OpKind::Memcpy) {
        let (process, call) = (ops.process[op] as usize, ops.launch[op]);
        let in_graph = graph_call.get(call as usize).copied().unwrap_or(false);
        let kind = copy_direction(trace, op).filter(|_| !in_graph && process < work.len());
        let Some(kind) = kind else { continue };
        let at = if work[process].launched && call != NONE { trace.calls.start[call as usize] } else { ops.start[op] };
        copies.entry((process, kind)).or_default().push(at);
    }
    for ((process, kind), mut times) in copies {
        times.sort_unstable();
        let units = &work[process].units;
        // Several copies with no kernel between them are one.
        times.dedup_by_key(|at| units.partition_point(|unit| unit.at < *at));
        let kind = if kind == DEVICE_TO_HOST { Kind::ReadBack } else { Kind::Input };
        add(process, kind, String::new(), None, times);
    }
    let syncs = calls_by_name(trace, |name| name.contains("Synchronize"));
    let mut by_call: BTreeMap<(usize, StrId), Vec<i64>> = BTreeMap::new();
    for call in (0..trace.calls.len()).filter(|&call| syncs[call] && trace.calls.kind[call] == CallKind::Gpu) {
        let Some(thread) = trace.threads.get(trace.calls.thread[call] as usize) else { continue };
        let process = thread.process as usize;
        if process < work.len() && work[process].launched {
            by_call.entry((process, trace.calls.name[call])).or_default().push(trace.calls.end[call]);
        }
    }
    for ((process, name), mut times) in by_call {
        times.sort_unstable();
        let units = &work[process].units;
        times.dedup_by_key(|at| units.partition_point(|unit| unit.at < *at));
        add(process, Kind::Sync, trace.text(name).to_owned(), None, times);
    }
    for ((process, kind, name), times) in ranges(trace, work) {
        let role = of_range(&name);
        add(process, kind, name, role, times);
    }
    marks
}

/// The starts of ranges by process and name, the outermost where a name nests in itself. Those that neither have a role
/// nor take much of the time are left out.
fn ranges(trace: &Trace, work: &[Work]) -> BTreeMap<(usize, Kind, String), Vec<i64>> {
    let ranges = &trace.ranges;
    let kind_of = |range: usize| match ranges.source[range] {
        _ if ranges.flags[range] & range_flags::MARK != 0 => None,
        RangeSource::GpuAnnotation => None,
        RangeSource::CpuOp | RangeSource::Python => Some(Kind::Operator),
        // `torch.autograd.profiler.emit_nvtx` writes its operators as NVTX ranges.
        _ if trace.text(ranges.name[range]).contains(", op_id = ") => Some(Kind::Operator),
        _ => Some(Kind::Range),
    };
    let process_of = |range: usize| trace.threads.get(ranges.thread[range] as usize).map(|t| t.process as usize);
    let launched = |process: usize| work.get(process).is_some_and(|work| !work.units.is_empty());
    // How often each name occurs and how long in all: most names are too frequent or too short to be looked at.
    let mut sums: HashMap<StrId, (usize, i64)> = HashMap::new();
    for range in (0..ranges.len()).filter(|&range| kind_of(range).is_some()) {
        let sum = sums.entry(ranges.name[range]).or_default();
        *sum = (sum.0 + 1, sum.1.saturating_add(ranges.end[range].saturating_sub(ranges.start[range])));
    }
    let whole = trace.extent().map_or(0, |(start, end)| end.saturating_sub(start));
    let mut names: HashMap<StrId, String> = HashMap::new();
    let mut by_text: HashMap<String, (usize, i64)> = HashMap::new();
    for (&name, &(count, time)) in sums.iter().filter(|(_, (count, _))| *count <= MOST) {
        let text = without_numbers(trace.text(name));
        let sum = by_text.entry(text.clone()).or_default();
        *sum = (sum.0 + count, sum.1.saturating_add(time));
        names.insert(name, text);
    }
    let matters = |text: &String| {
        let (count, time) = by_text[text];
        count <= MOST && (time as f64 >= LEAST_OF_TIME * whole as f64 || of_range(text).is_some())
    };
    let matter: HashMap<&String, bool> = by_text.keys().map(|text| (text, matters(text))).collect();
    let mut found: BTreeMap<(usize, Kind, String), Vec<i64>> = BTreeMap::new();
    let mut open_until: HashMap<(u32, &str), i64> = HashMap::new();
    for range in 0..ranges.len() {
        let Some(text) = names.get(&ranges.name[range]).filter(|text| matter.get(text) == Some(&true)) else {
            continue;
        };
        let (Some(kind), Some(process)) = (kind_of(range), process_of(range)) else { continue };
        let open = open_until.entry((ranges.thread[range], text.as_str())).or_insert(i64::MIN);
        if !launched(process) || ranges.start[range] < *open {
            continue;
        }
        *open = ranges.end[range];
        match found.get_mut(&(process, kind, text.clone())) {
            Some(times) => times.push(ranges.start[range]),
            None => drop(found.insert((process, kind, text.clone()), vec![ranges.start[range]])),
        }
    }
    found
}
