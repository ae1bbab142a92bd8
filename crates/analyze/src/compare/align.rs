//! Which iterations of one side are compared with which of the other.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use strobe_trace::IterationKind;

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
pub struct Slot {
    /// Which of the side's traces it is from.
    pub repeat: usize,
    /// Its number.
    pub number: u64,
    /// What it worked on, where known.
    pub kind: Option<IterationKind>,
    /// How much of it.
    pub size: Size,
    /// What iterations like it are called, numbers aside; stands in for an unknown kind.
    pub family: String,
}

/// Iterations that are compared with each other: indices into the two lists.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
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
pub struct Alignment {
    /// What is compared, in order of kind and size.
    pub groups: Vec<Group>,
    /// What is not.
    pub left_out: Vec<LeftOut>,
    /// What a reader should know about it.
    pub notes: Vec<String>,
}

type Indices = [Vec<usize>; 2];

/// Aligns iterations by kind and size; those of unknown kind by their family, and by number where `numbered` says that
/// numbers mean something (markers of the program, not a count of what was found).
pub fn align(a: &[Slot], b: &[Slot], numbered: bool) -> Alignment {
    let sides = [a, b];
    let mut families: BTreeMap<(Option<IterationKind>, &str), Indices> = BTreeMap::new();
    for (side, slots) in sides.iter().enumerate() {
        for (index, slot) in slots.iter().enumerate() {
            let family = if slot.kind.is_some() { "" } else { slot.family.as_str() };
            families.entry((slot.kind, family)).or_default()[side].push(index);
        }
    }
    let mut result = Alignment::default();
    let mut strangers: [Vec<(&str, Vec<usize>)>; 2] = [Vec::new(), Vec::new()];
    for ((kind, family), indices) in families {
        match (kind, indices.each_ref().map(Vec::is_empty)) {
            (Some(kind), _) => by_size(&mut result, kind, indices, sides),
            (None, [false, false]) => by_number(&mut result, family, indices, sides, numbered),
            (None, [in_a_none, _]) => {
                let side = usize::from(in_a_none);
                let [of_a, of_b] = indices;
                strangers[side].push((family, if side == 0 { of_a } else { of_b }));
            }
        }
    }
    // One family each that the other side does not have: the same thing under another name.
    if let [[(name_a, of_a)], [(name_b, of_b)]] = [strangers[0].as_slice(), strangers[1].as_slice()]
        && result.groups.is_empty()
    {
        result.notes.push(format!(
            "iterations are called '{name_a}' in A and '{name_b}' in B; all of A are compared with all of B"
        ));
        let name = if name_a.is_empty() { name_b } else { name_a };
        by_number(&mut result, name, [of_a.clone(), of_b.clone()], sides, false);
        return result;
    }
    for (side, families) in strangers.into_iter().enumerate() {
        for (family, indices) in families {
            let name = family_name(family);
            result.left_out.push(LeftOut { side: SIDES[side], name, iterations: indices.len() });
        }
    }
    result
}

/// What the sides are called.
pub const SIDES: [char; 2] = ['A', 'B'];

fn family_name(family: &str) -> String {
    if family.is_empty() { "iteration".to_owned() } else { family.to_owned() }
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
            let left = LeftOut { side: SIDES[side], name: size_name(kind, &own), iterations: indices[side].len() };
            result.left_out.push(left);
        }
    }
}

fn by_number(result: &mut Alignment, family: &str, mut indices: Indices, sides: [&[Slot]; 2], numbered: bool) {
    let name = family_name(family);
    let one_run = [0, 1].iter().all(|&side| sides[side].iter().all(|slot| slot.repeat == 0));
    if numbered && one_run {
        let numbers = |side: usize| indices[side].iter().map(|&i| sides[side][i].number).collect::<BTreeSet<_>>();
        let shared: BTreeSet<u64> = numbers(0).intersection(&numbers(1)).copied().collect();
        if !shared.is_empty() {
            for (side, list) in indices.iter_mut().enumerate() {
                let before = list.len();
                list.retain(|&i| shared.contains(&sides[side][i].number));
                let iterations = before - list.len();
                if iterations > 0 {
                    let name = format!("{name} with numbers that the other side does not have");
                    result.left_out.push(LeftOut { side: SIDES[side], name, iterations });
                }
            }
        }
    }
    push_group(result, name, None, indices, sides, numbered, false);
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
        Slot { repeat: 0, number, kind, size, family: "step".into() }
    }

    const DECODE: Option<IterationKind> = Some(IterationKind::Decode);
    const PREFILL: Option<IterationKind> = Some(IterationKind::Prefill);

    #[test]
    fn kinds_and_sizes_meet_their_like() {
        let a = [slot(0, PREFILL, 1, 128), slot(1, DECODE, 8, 8), slot(2, DECODE, 8, 8), slot(3, DECODE, 64, 64)];
        let b = [slot(0, PREFILL, 1, 120), slot(1, DECODE, 8, 8), slot(2, DECODE, 8, 8), slot(3, DECODE, 200, 200)];
        let aligned = align(&a, &b, true);
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
        let aligned = align(&side(0), &side(1), true);
        assert!(aligned.groups.len() <= 4, "{:?}", aligned.groups.iter().map(|g| &g.name).collect::<Vec<_>>());
        let compared: usize = aligned.groups.iter().map(|g| g.a.len()).sum();
        assert_eq!((compared, aligned.left_out.len()), (40, 0));
    }

    #[test]
    fn unknown_kinds_meet_by_number() {
        let side = |from: u64| (from..from + 6).map(|n| slot(n, None, 0, 0)).collect::<Vec<_>>();
        let aligned = align(&side(10), &side(12), true);
        let group = &aligned.groups[0];
        assert_eq!((group.a.len(), group.b.len(), group.paired), (4, 4, true));
        assert_eq!(aligned.left_out.len(), 2);
        // Numbers that only count what was found say nothing about which belongs to which.
        let counted = align(&side(0), &side(0)[..4], false);
        assert_eq!((counted.groups[0].a.len(), counted.groups[0].b.len(), counted.groups[0].paired), (6, 4, false));
    }

    #[test]
    fn one_family_each_is_the_same_thing_under_another_name() {
        let named = |family: &str| Slot { family: family.into(), ..slot(0, None, 0, 0) };
        let aligned = align(&[named("ProfilerStep")], &[named("train_step")], true);
        assert_eq!((aligned.groups.len(), aligned.left_out.len(), aligned.notes.len()), (1, 0, 1));
    }
}
