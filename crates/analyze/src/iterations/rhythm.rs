//! Runs of layers: a kernel that every layer has once comes at equal distances until the step ends, and what stands between
//! two steps (head, sampling, embedding) makes one distance longer. That tells steps without a name for anything in them.

use std::collections::BTreeMap;

/// Fewest occurrences of a kernel that has a rhythm.
const FEWEST: usize = 6;
/// Fewest layers of a run.
const FEWEST_LAYERS: usize = 4;
/// Share of a kernel's distances that are the usual one, if it comes once a layer.
const USUAL: f64 = 0.6;
/// Share of the runs that have as many layers as the others.
const ALIKE: f64 = 0.8;
/// Share of the launches of kernels with a rhythm that have to agree where its breaks are.
const AGREED: f64 = 0.5;

/// Where runs of layers begin.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Runs {
    /// Layers of a run.
    pub layers: usize,
    /// The place of the first layer of each run, by the kernel that comes first in a layer.
    pub places: Vec<u32>,
    /// The place of the last layer of all.
    pub last: u32,
}

/// The runs of layers that most kernels with a rhythm agree on, given where each kernel comes.
pub(super) fn runs<'p>(kernels: impl Iterator<Item = &'p [u32]>) -> Option<Runs> {
    let mut by_count: BTreeMap<usize, Vec<Runs>> = BTreeMap::new();
    for runs in kernels.filter_map(runs_of) {
        by_count.entry(runs.places.len()).or_default().push(runs);
    }
    // By how often they come: what a step has once has a rhythm too, without breaks.
    let weight = |agreed: &[Runs]| agreed.iter().map(|runs| runs.layers * runs.places.len()).sum::<usize>();
    let all: usize = by_count.values().map(|agreed| weight(agreed)).sum();
    let (_, most) = by_count.into_iter().max_by_key(|(_, agreed)| weight(agreed))?;
    if (weight(&most) as f64) < AGREED * all as f64 {
        return None;
    }
    // One that is also in the head or the tail has a layer too many.
    let mut by_layers: BTreeMap<usize, usize> = BTreeMap::new();
    most.iter().for_each(|runs| *by_layers.entry(runs.layers).or_default() += 1);
    let (layers, _) = by_layers.into_iter().max_by_key(|&(layers, kernels)| (kernels, std::cmp::Reverse(layers)))?;
    most.into_iter().filter(|runs| runs.layers == layers).min_by(|a, b| a.places.cmp(&b.places))
}

/// The runs of one kernel, if it comes at one distance but for breaks that cut it into runs of equal lengths.
fn runs_of(places: &[u32]) -> Option<Runs> {
    if places.len() < FEWEST {
        return None;
    }
    let distances: Vec<u32> = places.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    distances.iter().for_each(|&distance| *counts.entry(distance).or_default() += 1);
    let (&usual, &often) = counts.iter().max_by_key(|&(&distance, &count)| (count, std::cmp::Reverse(distance)))?;
    if usual == 0 || (often as f64) < USUAL * distances.len() as f64 {
        return None;
    }
    let mut begins = vec![0usize];
    begins.extend(distances.iter().enumerate().filter(|(_, distance)| **distance > usual).map(|(i, _)| i + 1));
    let ends = begins.iter().skip(1).copied().chain([places.len()]);
    let mut lengths: Vec<usize> = begins.iter().zip(ends).map(|(begin, end)| end - begin).collect();
    let (cut, whole) = match lengths.len() {
        0..=2 => (lengths.iter().copied().max().unwrap_or(0), &mut lengths[..]),
        // The recording may begin and end in the middle of a step.
        n => (lengths[0].max(lengths[n - 1]), &mut lengths[1..n - 1]),
    };
    whole.sort_unstable();
    let layers = whole[whole.len() / 2];
    let alike = whole.iter().filter(|&&length| length == layers).count();
    if layers < FEWEST_LAYERS || cut > layers || (alike as f64) < ALIKE * whole.len() as f64 {
        return None;
    }
    let last = places.last().copied().unwrap_or(0);
    Some(Runs { layers, last, places: begins.iter().filter_map(|&begin| places.get(begin).copied()).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places of kernels in steps of `layers` layers of kernels `layer`, between a head and a tail.
    fn places(steps: usize, head: &str, layers: usize, layer: &str, tail: &str) -> Vec<Vec<u32>> {
        let step = format!("{head}{}{tail}", layer.repeat(layers));
        let mut of: BTreeMap<char, Vec<u32>> = BTreeMap::new();
        for (place, kernel) in step.repeat(steps).chars().enumerate() {
            of.entry(kernel).or_default().push(place as u32);
        }
        of.into_values().collect()
    }

    fn found(places: &[Vec<u32>]) -> Option<(usize, usize, u32)> {
        runs(places.iter().map(Vec::as_slice)).map(|runs| (runs.places.len(), runs.layers, runs.places[0]))
    }

    #[test]
    fn runs_of_layers_are_steps() {
        assert_eq!(found(&places(4, "e", 12, "nqqqrao", "nlx")), Some((4, 12, 5)));
        assert_eq!(found(&places(10, "e", 4, "abc", "h")), Some((10, 4, 1)));
        // One kernel of a layer is also in the head, another comes several times a layer.
        assert_eq!(found(&places(7, "an", 32, "nabcbdbe", "n")), Some((7, 32, 5)));
        assert_eq!(found(&places(1, "e", 24, "nqkvao", "nl")), Some((1, 24, 2)), "a single pass is one run");
    }

    #[test]
    fn prefill_and_decode_steps_are_no_rounds() {
        let step = |head: &str, tail: &str| format!("{head}{}{tail}", "nqao".repeat(8));
        let rounds = format!("{}{}", step("ppe", "nl"), step("e", "nlx").repeat(5)).repeat(4);
        let mut of: BTreeMap<char, Vec<u32>> = BTreeMap::new();
        rounds.chars().enumerate().for_each(|(place, kernel)| of.entry(kernel).or_default().push(place as u32));
        let all: Vec<Vec<u32>> = of.into_values().collect();
        assert_eq!(found(&all).map(|(steps, layers, _)| (steps, layers)), Some((24, 8)));
    }

    #[test]
    fn a_recording_may_begin_and_end_within_a_step() {
        let whole = places(6, "e", 12, "nqqqrao", "nlx");
        let cut = |from: u32, to: u32| -> Vec<Vec<u32>> {
            whole.iter().map(|of| of.iter().copied().filter(|place| (from..to).contains(place)).collect()).collect()
        };
        let steps = |cut: &[Vec<u32>]| found(cut).map(|(steps, layers, _)| (steps, layers));
        assert_eq!(steps(&cut(40, 500)), Some((6, 12)));
        assert_eq!(steps(&cut(0, 400)), Some((5, 12)));
    }

    #[test]
    fn irregular_work_has_no_runs() {
        assert_eq!(found(&places(40, "", 1, "abc", "")), Some((1, 40, 0)), "equal steps without layers are one run");
        assert_eq!(found(&[vec![0, 3, 9, 10, 31, 33, 40, 77]]), None);
        assert_eq!(found(&[vec![0, 1, 2]]), None);
        assert_eq!(found(&[Vec::new(), vec![5; 9]]), None);
    }
}
