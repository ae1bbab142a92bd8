//! Which iterations of one side are compared with which of the other.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use strobe_trace::IterationKind;

use strobe_stats::FEWEST;

/// What an iteration worked on, as far as the trace says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Size {
    /// Requests in their context phase.
    pub context_requests: Option<u32>,
    /// Requests in their generation phase.
    pub generation_requests: Option<u32>,
    /// Tokens of the context requests.
    pub context_tokens: Option<u32>,
    /// Tokens of the generation requests.
    pub generation_tokens: Option<u32>,
}

impl Size {
    fn fields(&self) -> [Option<u32>; 4] {
        [self.context_requests, self.generation_requests, self.context_tokens, self.generation_tokens]
    }

    /// The same with every number rounded down to its three leading binary digits: steps of an eighth to a quarter.
    fn coarse(&self) -> Self {
        let coarse = |value: Option<u32>| value.map(|v| (v >> digits(v)) << digits(v));
        fn digits(value: u32) -> u32 {
            (32 - value.leading_zeros()).saturating_sub(3)
        }
        Self {
            context_requests: coarse(self.context_requests),
            generation_requests: coarse(self.generation_requests),
            context_tokens: coarse(self.context_tokens),
            generation_tokens: coarse(self.generation_tokens),
        }
    }

    /// How far apart two sizes are, as the largest relative difference of a number that both know.
    fn distance(&self, other: &Self) -> f64 {
        let pairs = self.fields().into_iter().zip(other.fields());
        let apart = pairs.filter_map(|(x, y)| Some((f64::from(x?), f64::from(y?))));
        apart.map(|(x, y)| (x - y).abs() / x.max(y).max(1.0)).fold(0.0, f64::max)
    }
}

/// Sizes that differ by no more than this are compared with each other.
const SLIGHTLY: f64 = 0.125;

/// The widest step between neighbouring sizes of [`Size::coarse`].
const ONE_STEP: f64 = 0.2;

/// Above this many different sizes of a kind on one side they are compared in steps of size.
const MANY_SIZES: usize = 8;

/// An iteration to be aligned.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Slot {
    /// Which of the side's traces it is from.
    pub repeat: usize,
    /// Its number.
    pub number: u64,
    /// What it worked on, where known.
    pub kind: Option<IterationKind>,
    /// How much of it.
    pub size: Size,
    /// What it is called.
    pub label: String,
    /// What iterations like it are called, numbers aside; stands in for an unknown kind.
    pub family: String,
    /// How many ops it has; stands in for an unknown size.
    pub ops: u64,
}

/// Iterations that are compared with each other: indices into the two lists.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Group {
    /// What they are, e.g. `decode, 8 requests`.
    pub name: String,
    /// Their kind, where known.
    pub kind: Option<IterationKind>,
    /// Those of A, in order of repeat and number.
    pub a: Vec<usize>,
    /// Those of B.
    pub b: Vec<usize>,
    /// Whether the first of A belongs to the first of B and so on: the same numbers of one run each.
    pub paired: bool,
    /// Whether the sizes of the two sides differ slightly.
    pub sizes_differ: bool,
}

/// Iterations that have no counterpart.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOut {
    /// `A` or `B`.
    pub side: char,
    /// What they are.
    pub name: String,
    /// How many.
    pub iterations: usize,
}

/// The result of [`align`].
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Alignment {
    /// What is compared, in order of kind and size.
    pub groups: Vec<Group>,
    /// What is not.
    pub left_out: Vec<LeftOut>,
    /// What a reader should know about it.
    pub notes: Vec<String>,
    single: Vec<Single>,
}

/// Iterations that only one side has, so far.
#[derive(Clone, Debug, PartialEq)]
struct Single {
    side: usize,
    name: String,
    kind: Option<IterationKind>,
    indices: Vec<usize>,
    /// Whether it may stand for something that the other side calls differently.
    may_match: bool,
}

type Indices = [Vec<usize>; 2];

/// How much two lists of iterations, by their indices, have in common: from 0 to 1.
pub(super) type Alike<'f> = &'f dyn Fn(&[usize], &[usize]) -> f64;

/// What iterations that are called differently must have in common to be compared.
const SAME_WORK: f64 = 0.5;

/// Aligns iterations by kind and size; those of unknown kind by their family, and by number where `numbered` says that
/// numbers mean something (markers of the program, not a count of what was found). What one side calls differently is
/// recognised by its work (`alike`).
pub(super) fn align(a: &[Slot], b: &[Slot], numbered: bool, alike: Alike) -> Alignment {
    let sides = [a, b];
    let mut families: BTreeMap<(Option<IterationKind>, &str), Indices> = BTreeMap::new();
    for (side, slots) in sides.iter().enumerate() {
        for (index, slot) in slots.iter().enumerate() {
            let family = if slot.kind.is_some() { "" } else { slot.family.as_str() };
            families.entry((slot.kind, family)).or_default()[side].push(index);
        }
    }
    let mut result = Alignment::default();
    for ((kind, _), indices) in families {
        match kind {
            Some(kind) => by_size(&mut result, kind, indices, sides),
            None if numbered => by_number(&mut result, indices, sides),
            None => by_amount(&mut result, indices, sides),
        }
    }
    by_work(&mut result, sides, alike);
    by_family(&mut result, sides);
    let left_out =
        |single: Single| LeftOut { side: SIDES[single.side], name: single.name, iterations: single.indices.len() };
    result.left_out = std::mem::take(&mut result.single).into_iter().map(left_out).collect();
    result
}

/// Compares what is called differently and does the same, most alike first. Two kinds that are both known are different things
/// whatever they do.
fn by_work(result: &mut Alignment, sides: [&[Slot]; 2], alike: Alike) {
    loop {
        let single = &result.single;
        let of = |side: usize| (0..single.len()).filter(move |&i| single[i].side == side && single[i].may_match);
        let pairs = of(0).flat_map(|x| of(1).map(move |y| (x, y)));
        let unlike = |&(x, y): &(usize, usize)| single[x].kind.is_none() || single[y].kind.is_none();
        let scored = pairs.filter(unlike).map(|(x, y)| (alike(&single[x].indices, &single[y].indices), x, y));
        let Some((score, x, y)) = scored.max_by(|p, q| p.0.total_cmp(&q.0)) else { break };
        let only_two = single.len() == 2 && result.groups.is_empty();
        if score < SAME_WORK && !only_two {
            break;
        }
        let by = if score < SAME_WORK { "as there is nothing else" } else { "matched by their kernels" };
        let (later, earlier) = (result.single.remove(x.max(y)), result.single.remove(x.min(y)));
        let (in_a, in_b) = if later.side == 0 { (later, earlier) } else { (earlier, later) };
        result.notes.push(format!("'{}' of A and '{}' of B are compared, {by}", in_a.name, in_b.name));
        let name = if in_a.kind.is_some() { in_a.name } else { in_b.name };
        push_group(result, name, in_a.kind.or(in_b.kind), [in_a.indices, in_b.indices], sides, false, false);
    }
}

/// Compares what has the same family and is alone in it on both sides, however much its size has changed: the graph of one engine and the
/// graph of another.
fn by_family(result: &mut Alignment, sides: [&[Slot]; 2]) {
    let mut families: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (place, single) in result.single.iter().enumerate().filter(|(_, s)| s.may_match && s.kind.is_none()) {
        let family = single.indices.first().map_or("", |&i| sides[single.side][i].family.as_str());
        families.entry(family).or_default().push(place);
    }
    let alone = |places: &Vec<usize>| match places[..] {
        [x, y] if result.single[x].side != result.single[y].side => Some([x, y]),
        _ => None,
    };
    let pairs: Vec<[usize; 2]> = families.values().filter_map(alone).collect();
    for &[x, y] in &pairs {
        let (in_a, in_b) = if result.single[x].side == 0 { (x, y) } else { (y, x) };
        let [in_a, in_b] = [in_a, in_b].map(|place| result.single[place].clone());
        result
            .notes
            .push(format!("'{}' of A and '{}' of B are compared: the only ones of their family", in_a.name, in_b.name));
        let name = format!("{} / {}", in_a.name, in_b.name);
        push_group(result, name, None, [in_a.indices, in_b.indices], sides, false, false);
    }
    let taken: BTreeSet<usize> = pairs.into_iter().flatten().collect();
    let mut place = 0;
    result.single.retain(|_| {
        place += 1;
        !taken.contains(&(place - 1))
    });
}

/// What the sides are called.
pub(super) const SIDES: [char; 2] = ['A', 'B'];

/// What iterations of unknown kind are called: their label if they share it, else their family where numbers only count
/// them, else the labels of the smallest and the largest.
fn common_name(indices: &Indices, sides: [&[Slot]; 2], numbered: bool) -> String {
    let slots = || indices.iter().zip(sides).flat_map(|(list, slots)| list.iter().map(|&i| &slots[i]));
    let by_amount = |slot: &&Slot| (slot.ops, slot.label.clone());
    let (Some(least), Some(most)) = (slots().min_by_key(by_amount), slots().max_by_key(by_amount)) else {
        return String::new();
    };
    match () {
        _ if least.label.is_empty() => "iteration".to_owned(),
        _ if slots().all(|slot| slot.label == least.label) => least.label.clone(),
        _ if numbered || least.ops == most.ops => least.family.clone(),
        _ => format!("{} to {}", least.label, most.label),
    }
}

fn by_size(result: &mut Alignment, kind: IterationKind, indices: Indices, sides: [&[Slot]; 2]) {
    let sizes = |side: usize| indices[side].iter().map(|&i| sides[side][i].size).collect::<BTreeSet<_>>();
    let many = [0, 1].iter().any(|&side| sizes(side).len() > MANY_SIZES);
    let mut buckets: BTreeMap<Size, Indices> = BTreeMap::new();
    for (side, list) in indices.iter().enumerate() {
        for &index in list {
            let size = sides[side][index].size;
            buckets.entry(if many { size.coarse() } else { size }).or_default()[side].push(index);
        }
    }
    let (both, single): (Vec<_>, Vec<_>) =
        buckets.into_iter().partition(|(_, [in_a, in_b])| !in_a.is_empty() && !in_b.is_empty());
    let mut matched: Vec<(Size, Indices)> = both;
    let (mut of_a, mut of_b): (Vec<_>, Vec<_>) = single.into_iter().partition(|(_, [in_a, _])| !in_a.is_empty());
    loop {
        let pairs = of_a
            .iter()
            .enumerate()
            .flat_map(|(i, (x, _))| of_b.iter().enumerate().map(move |(j, (y, _))| (x.distance(y), i, j)));
        let nearest = pairs.filter(|p| p.0 <= SLIGHTLY).min_by(|x, y| x.0.total_cmp(&y.0));
        let Some((_, i, j)) = nearest else { break };
        let ((size, [in_a, _]), (_, [_, in_b])) = (of_a.remove(i), of_b.remove(j));
        matched.push((size, [in_a, in_b]));
    }
    if many {
        // A step that only one side has, next to one that both have, is the edge of the latter.
        for (side, rest) in [&mut of_a, &mut of_b].into_iter().enumerate() {
            rest.retain_mut(|(size, indices)| {
                let near = matched.iter_mut().filter(|(other, _)| size.distance(other) <= ONE_STEP);
                match near.min_by(|x, y| size.distance(&x.0).total_cmp(&size.distance(&y.0))) {
                    Some((_, home)) => home[side].append(&mut indices[side]),
                    None => return true,
                }
                false
            });
        }
    }
    matched.sort_by_key(|(size, _)| *size);
    let matched = pool_small(matched);
    for (_, [in_a, in_b]) in matched {
        let members = || in_a.iter().map(|&i| &sides[0][i]).chain(in_b.iter().map(|&i| &sides[1][i]));
        let name = size_name(kind, &members().map(|slot| slot.size).collect::<Vec<_>>());
        let only = |list: &[usize], side: usize| list.iter().map(|&i| sides[side][i].size).collect::<BTreeSet<_>>();
        let sizes_differ = only(&in_a, 0) != only(&in_b, 1);
        push_group(result, name, Some(kind), [in_a, in_b], sides, true, sizes_differ);
    }
    for (side, rest) in [of_a, of_b].into_iter().enumerate() {
        for (_, indices) in rest {
            let own: Vec<Size> = indices[side].iter().map(|&i| sides[side][i].size).collect();
            let name = size_name(kind, &own);
            result.single.push(Single {
                side,
                name,
                kind: Some(kind),
                indices: indices[side].clone(),
                may_match: true,
            });
        }
    }
}

/// Puts sizes with too few iterations for an interval together, as long as both sides have the same number of each: the
/// mix is the same on both sides then, and no size is given a verdict that rests on one or two iterations.
fn pool_small(matched: Vec<(Size, Indices)>) -> Vec<(Size, Indices)> {
    let small = |(_, [a, b]): &(Size, Indices)| a.len() < FEWEST && a.len() == b.len();
    let (few, mut groups): (Vec<_>, Vec<_>) = matched.into_iter().partition(small);
    let pooled = few.iter().cloned().reduce(|mut pool, (_, [mut a, mut b])| {
        pool.1[0].append(&mut a);
        pool.1[1].append(&mut b);
        pool
    });
    match pooled {
        Some(pool) if few.len() > 1 => groups.push(pool),
        _ => groups.extend(few),
    }
    groups.sort_by_key(|(size, _)| *size);
    groups
}

/// Adds what both sides have as a group, what one has as a single.
fn push(result: &mut Alignment, indices: Indices, sides: [&[Slot]; 2], may_pair: bool) {
    let name = common_name(&indices, sides, may_pair);
    match indices.each_ref().map(Vec::is_empty) {
        [true, true] => {}
        [false, false] => push_group(result, name, None, indices, sides, may_pair, false),
        [in_a_none, _] => {
            let side = usize::from(in_a_none);
            let indices = indices[side].clone();
            result.single.push(Single { side, name, kind: None, indices, may_match: true });
        }
    }
}

fn by_number(result: &mut Alignment, mut indices: Indices, sides: [&[Slot]; 2]) {
    let one_run = [0, 1].iter().all(|&side| sides[side].iter().all(|slot| slot.repeat == 0));
    let numbers = |side: usize| indices[side].iter().map(|&i| sides[side][i].number).collect::<BTreeSet<_>>();
    let shared: BTreeSet<u64> = numbers(0).intersection(&numbers(1)).copied().collect();
    if one_run && !shared.is_empty() {
        for (side, list) in indices.iter_mut().enumerate() {
            let (kept, rest): (Vec<usize>, Vec<usize>) =
                list.iter().partition(|&&i| shared.contains(&sides[side][i].number));
            *list = kept;
            if let Some(first) = rest.first() {
                let name = format!("{} with numbers that the other side does not have", sides[side][*first].family);
                result.single.push(Single { side, name, kind: None, indices: rest, may_match: false });
            }
        }
    }
    push(result, indices, sides, true);
}

/// Iterations that differ much in the number of their ops are different things: a small graph and a large one.
fn by_amount(result: &mut Alignment, indices: Indices, sides: [&[Slot]; 2]) {
    let mut all: Vec<(u64, usize, usize)> = Vec::new();
    for (side, list) in indices.iter().enumerate() {
        all.extend(list.iter().map(|&i| (sides[side][i].ops, side, i)));
    }
    all.sort_unstable();
    let mut clusters: Vec<Indices> = vec![Indices::default()];
    let mut before = None;
    for (ops, side, index) in all {
        let far = before.is_some_and(|before| ops as f64 > (1.0 + SLIGHTLY) * before as f64 && ops > before + 2);
        if far {
            clusters.push(Indices::default());
        }
        before = Some(ops);
        if let Some(cluster) = clusters.last_mut() {
            cluster[side].push(index);
        }
    }
    for cluster in clusters {
        push(result, cluster, sides, false);
    }
}

fn push_group(
    result: &mut Alignment,
    name: String,
    kind: Option<IterationKind>,
    mut indices: Indices,
    sides: [&[Slot]; 2],
    may_pair: bool,
    sizes_differ: bool,
) {
    for (side, list) in indices.iter_mut().enumerate() {
        list.sort_by_key(|&i| (sides[side][i].repeat, sides[side][i].number, i));
    }
    let keys =
        |side: usize| indices[side].iter().map(|&i| (sides[side][i].repeat, sides[side][i].number)).collect::<Vec<_>>();
    let (of_a, of_b) = (keys(0), keys(1));
    let unique = of_a.windows(2).all(|w| w[0] < w[1]);
    let paired = may_pair && unique && of_a == of_b && of_a.iter().all(|&(repeat, _)| repeat == 0);
    let [a, b] = indices;
    result.groups.push(Group { name, kind, a, b, paired, sizes_differ });
}

/// e.g. `decode, 8 requests` or `mixed, 1-2 context and 12-14 generation requests, 130-260 tokens`.
fn size_name(kind: IterationKind, sizes: &[Size]) -> String {
    let range = |field: fn(&Size) -> Option<u32>| {
        let known = || sizes.iter().filter_map(field);
        let (low, high) = (known().min()?, known().max()?);
        (high > 0).then(|| if low == high { low.to_string() } else { format!("{low}-{high}") })
    };
    let of = |count: String, what: &str| format!("{count} {what}{}", if count == "1" { "" } else { "s" });
    let context = range(|s| s.context_requests);
    let generation = range(|s| s.generation_requests);
    let requests = match (kind, context, generation) {
        (IterationKind::Mixed, Some(c), Some(g)) => Some(format!("{c} context and {}", of(g, "generation request"))),
        (_, Some(count), None) | (_, None, Some(count)) => Some(of(count, "request")),
        (_, Some(c), Some(g)) => Some(format!("{c} context and {}", of(g, "generation request"))),
        (_, None, None) => None,
    };
    let tokens = match kind {
        IterationKind::Decode => None,
        _ => range(|s| s.context_tokens).map(|count| of(count, "token")),
    };
    let words: Vec<String> = [Some(kind.to_string()), requests, tokens].into_iter().flatten().collect();
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing_alike(_: &[usize], _: &[usize]) -> f64 {
        0.0
    }

    fn slot(number: u64, kind: Option<IterationKind>, requests: u32, tokens: u32) -> Slot {
        let context = kind == Some(IterationKind::Prefill);
        let size = match kind {
            None => Size::default(),
            Some(_) => Size {
                context_requests: Some(if context { requests } else { 0 }),
                generation_requests: Some(if context { 0 } else { requests }),
                context_tokens: Some(if context { tokens } else { 0 }),
                generation_tokens: Some(if context { 0 } else { tokens }),
            },
        };
        let label = format!("step {number}");
        Slot { repeat: 0, number, kind, size, label, family: "step N".into(), ops: 100 }
    }

    const DECODE: Option<IterationKind> = Some(IterationKind::Decode);
    const PREFILL: Option<IterationKind> = Some(IterationKind::Prefill);

    #[test]
    fn kinds_and_sizes_meet_their_like() {
        let a = [slot(0, PREFILL, 1, 128), slot(1, DECODE, 8, 8), slot(2, DECODE, 8, 8), slot(3, DECODE, 64, 64)];
        let b = [slot(0, PREFILL, 1, 120), slot(1, DECODE, 8, 8), slot(2, DECODE, 8, 8), slot(3, DECODE, 200, 200)];
        let aligned = align(&a, &b, true, &nothing_alike);
        let names: Vec<_> = aligned.groups.iter().map(|g| (g.name.as_str(), g.paired, g.sizes_differ)).collect();
        assert_eq!(names, [("prefill, 1 request, 120-128 tokens", true, true), ("decode, 8 requests", true, false)]);
        assert_eq!(
            (aligned.groups[1].a.as_slice(), aligned.groups[1].b.as_slice()),
            ([1, 2].as_slice(), [1, 2].as_slice())
        );
        let left: Vec<_> = aligned.left_out.iter().map(|l| (l.side, l.name.as_str(), l.iterations)).collect();
        assert_eq!(left, [('A', "decode, 64 requests", 1), ('B', "decode, 200 requests", 1)]);
    }

    #[test]
    fn many_sizes_are_compared_in_steps() {
        let side =
            |offset: u32| (0..40).map(|i| slot(u64::from(i), DECODE, 100 + i + offset, 100 + i)).collect::<Vec<_>>();
        let aligned = align(&side(0), &side(1), true, &nothing_alike);
        assert!(aligned.groups.len() <= 4, "{:?}", aligned.groups.iter().map(|g| &g.name).collect::<Vec<_>>());
        let compared: usize = aligned.groups.iter().map(|g| g.a.len()).sum();
        assert_eq!((compared, aligned.left_out.len()), (40, 0));
    }

    #[test]
    fn unknown_kinds_meet_by_number() {
        let side = |from: u64| (from..from + 6).map(|n| slot(n, None, 0, 0)).collect::<Vec<_>>();
        let aligned = align(&side(10), &side(12), true, &nothing_alike);
        let group = &aligned.groups[0];
        assert_eq!((group.a.len(), group.b.len(), group.paired), (4, 4, true));
        assert_eq!(aligned.left_out.len(), 2);
        // Numbers that only count what was found say nothing about which belongs to which.
        let counted = align(&side(0), &side(0)[..4], false, &nothing_alike);
        assert_eq!((counted.groups[0].a.len(), counted.groups[0].b.len(), counted.groups[0].paired), (6, 4, false));
    }

    #[test]
    fn what_is_called_differently_is_told_by_its_work() {
        let named =
            |family: &str, ops: u64| Slot { label: family.into(), family: family.into(), ops, ..slot(0, None, 0, 0) };
        let aligned = align(&[named("ProfilerStep", 9)], &[named("train_step", 8)], true, &nothing_alike);
        assert_eq!((aligned.groups.len(), aligned.left_out.len(), aligned.notes.len()), (1, 0, 1));
        // One side knows kinds, the other only that there are graphs.
        let a = [slot(0, PREFILL, 8, 128), slot(1, DECODE, 8, 8), slot(2, DECODE, 8, 8)];
        let b = [named("eager", 300), named("graph", 311), named("graph", 311)];
        let by_order = |x: &[usize], y: &[usize]| if x.len() == y.len() { 0.9 } else { 0.1 };
        let aligned = align(&a, &b, false, &by_order);
        let names: Vec<_> = aligned.groups.iter().map(|g| (g.name.as_str(), g.a.len(), g.b.len())).collect();
        assert_eq!(names, [("decode, 8 requests", 2, 2), ("prefill, 8 requests, 128 tokens", 1, 1)]);
    }

    #[test]
    fn graphs_of_other_sizes_are_other_things() {
        let graph =
            |ops: u64| Slot { family: "graph".into(), label: format!("graph {ops}"), ops, ..slot(0, None, 0, 0) };
        let aligned = align(&[graph(311), graph(311), graph(30)], &[graph(289), graph(289)], false, &nothing_alike);
        assert_eq!((aligned.groups.len(), aligned.groups[0].a.len(), aligned.groups[0].b.len()), (1, 2, 2));
        assert_eq!(aligned.groups[0].name, "graph 289 to graph 311");
        assert_eq!(aligned.left_out.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), ["graph 30"]);
        // Alone in their family they are the same thing, grown or shrunk.
        let aligned =
            align(&[graph(311), slot(0, DECODE, 1, 1)], &[graph(200), slot(0, DECODE, 1, 1)], false, &nothing_alike);
        let names: Vec<_> = aligned.groups.iter().map(|g| g.name.as_str()).collect();
        assert_eq!(names, ["decode, 1 request", "graph 311 / graph 200"]);
    }
}
