//! How evenly tokens reach the experts of a model: figures of counts, whoever counted.

use std::collections::BTreeMap;

use serde::Serialize;
use strobe_trace::{ExpertLoad, Trace};

use crate::context::Context;
use crate::sheet::{Column, Report, Sheet, Unit, Value};

/// The key of [`strobe_trace::Meta::extra`] that says how many expert-parallel ranks a run assumed.
pub const ASSUMED_RANKS: &str = "assumed expert-parallel ranks";

/// An expert with more than this many times the mean load is called hot.
pub const HOT: f64 = 2.0;

/// Counts of token-expert pairs, `[iterations][layers][experts]`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertCounts<'a> {
    /// The counts; a whole number of iterations.
    pub counts: &'a [u32],
    /// The layers of an iteration that have experts, by their number in the model.
    pub layers: &'a [usize],
    /// Experts of a layer.
    pub experts: usize,
    /// Expert-parallel ranks that the experts are thought to be divided among; 1 for none.
    pub ranks: usize,
}

/// The load of one layer, in one iteration or in many.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerLoad {
    /// The layer's number in the model.
    pub layer: usize,
    /// Token-expert pairs of each expert.
    pub tokens_per_expert: Vec<u64>,
    /// Largest load over mean load, of the sums: 1 is even, the number of experts is all to one.
    pub imbalance: f64,
    /// The same in each iteration, weighted by its pairs. Uneven iterations count here even if they cancel out.
    pub step_imbalance: f64,
    /// Entropy of the load over the entropy of even load: 1 is even, 0 is all to one.
    pub entropy: f64,
    /// Experts that got nothing.
    pub dead: Vec<usize>,
    /// Experts with more than [`HOT`] times the mean.
    pub hot: Vec<usize>,
    /// Pairs of each rank, where ranks are assumed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokens_per_rank: Vec<u64>,
    /// Largest rank over mean rank in each iteration, weighted by its pairs: ranks wait for the fullest one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank_step_imbalance: Option<f64>,
}

impl LayerLoad {
    /// The expert with the largest load.
    pub fn fullest(&self) -> usize {
        let largest = self.tokens_per_expert.iter().copied().max();
        self.tokens_per_expert.iter().position(|load| Some(*load) == largest).unwrap_or(0)
    }
}

impl<'a> ExpertCounts<'a> {
    /// The counts of each layer, one iteration after the other.
    fn of_layer(&self, place: usize) -> impl Iterator<Item = &'a [u32]> {
        let (experts, stride) = (self.experts.max(1), (self.layers.len() * self.experts).max(1));
        self.counts.chunks_exact(stride).map(move |iteration| &iteration[place * experts..(place + 1) * experts])
    }

    /// The counts of one iteration alone.
    pub fn iteration(&self, iteration: usize) -> ExpertCounts<'a> {
        let stride = self.layers.len() * self.experts;
        let counts = self.counts.get(iteration * stride..(iteration + 1) * stride).unwrap_or_default();
        ExpertCounts { counts, ..*self }
    }

    /// Figures of every layer that got any token.
    pub fn layer_loads(&self) -> Vec<LayerLoad> {
        (0..self.layers.len()).filter_map(|place| self.layer_load(place)).collect()
    }

    fn layer_load(&self, place: usize) -> Option<LayerLoad> {
        let ranks = if self.ranks > 1 && self.experts.is_multiple_of(self.ranks) { self.ranks } else { 1 };
        let (mut totals, mut rank_totals) = (vec![0u64; self.experts], vec![0u64; ranks]);
        let (mut largest, mut largest_rank) = (0, 0);
        for counts in self.of_layer(place) {
            totals.iter_mut().zip(counts).for_each(|(total, count)| *total += u64::from(*count));
            largest += u64::from(counts.iter().copied().max().unwrap_or(0));
            let mut fullest = 0;
            for (total, counts) in rank_totals.iter_mut().zip(counts.chunks(self.experts / ranks)) {
                let load = counts.iter().map(|count| u64::from(*count)).sum();
                *total += load;
                fullest = fullest.max(load);
            }
            largest_rank += fullest;
        }
        let pairs: u64 = totals.iter().sum();
        if pairs == 0 {
            return None;
        }
        let mean = pairs as f64 / self.experts as f64;
        let entropy: f64 = totals
            .iter()
            .filter(|total| **total > 0)
            .map(|total| *total as f64 / pairs as f64)
            .map(|p| -p * p.ln())
            .sum();
        let where_load = |wanted: &dyn Fn(f64) -> bool| {
            totals.iter().enumerate().filter(|(_, total)| wanted(**total as f64)).map(|(expert, _)| expert).collect()
        };
        Some(LayerLoad {
            layer: self.layers[place],
            imbalance: totals.iter().copied().max().unwrap_or(0) as f64 / mean,
            step_imbalance: largest as f64 / mean,
            // One expert alone is even.
            entropy: if self.experts > 1 { entropy / (self.experts as f64).ln() } else { 1.0 },
            dead: where_load(&|load| load == 0.0),
            hot: where_load(&|load| load > HOT * mean),
            tokens_per_rank: if ranks > 1 { rank_totals } else { Vec::new() },
            rank_step_imbalance: (ranks > 1).then(|| largest_rank as f64 * ranks as f64 / pairs as f64),
            tokens_per_expert: totals,
        })
    }

    /// The largest load of any rank in each iteration over the mean load, over all layers: by how much the experts' part
    /// of a step would be longer than with even load, if every layer waits for its fullest rank.
    pub fn rank_slowdown(&self) -> Option<f64> {
        let loads = self.layer_loads();
        let pairs: u64 = loads.iter().flat_map(|load| &load.tokens_per_expert).sum();
        let weighted: Option<f64> = loads
            .iter()
            .map(|load| Some(load.rank_step_imbalance? * load.tokens_per_expert.iter().sum::<u64>() as f64))
            .sum();
        weighted.filter(|_| pairs > 0).map(|weighted| weighted / pairs as f64)
    }
}

/// The loads as a table, one row per layer.
pub fn sheet(loads: &[LayerLoad]) -> Sheet {
    let by_rank = loads.iter().any(|load| load.rank_step_imbalance.is_some());
    let mut columns = vec![
        Column::new("Layer", Unit::Id),
        Column::new("Token-expert pairs", Unit::Count),
        Column::new("Max/mean", Unit::Number),
        Column::new("Max/mean per iteration", Unit::Number),
        Column::new("Entropy", Unit::Number),
        Column::new("Fullest expert", Unit::Id),
        Column::new("Its share", Unit::Share),
        Column::new("Hot", Unit::Count),
        Column::new("Dead", Unit::Count),
    ];
    if by_rank {
        columns.push(Column::new("Rank max/mean per iteration", Unit::Number));
        columns.push(Column::new("Pairs of each rank", Unit::Text));
    }
    let mut sheet = Sheet::new("layers", columns);
    for load in loads {
        let pairs: u64 = load.tokens_per_expert.iter().sum();
        let fullest = load.fullest();
        let mut row: Vec<Value> = vec![
            load.layer.into(),
            (pairs as i64).into(),
            load.imbalance.into(),
            load.step_imbalance.into(),
            load.entropy.into(),
            fullest.into(),
            (load.tokens_per_expert.get(fullest).copied().unwrap_or(0) as f64 / pairs as f64).into(),
            load.hot.len().into(),
            load.dead.len().into(),
        ];
        if by_rank {
            let ranks: Vec<String> = load.tokens_per_rank.iter().map(u64::to_string).collect();
            row.push(load.rank_step_imbalance.map_or(Value::Unknown, Value::from));
            row.push(Value::Text(ranks.join(" ")));
        }
        sheet.push(row);
    }
    sheet
}

/// What the columns of [`sheet`] mean.
pub const NOTE: &str = "Max/mean: load of the most loaded expert over the mean; 1 is even. Per iteration: the same within each iteration, \
weighted by its pairs. Entropy: 1 is even, 0 is all to one. Hot: more than twice the mean. Dead: no token at all.";

/// The report `experts`.
pub fn report(context: &Context) -> Report {
    let (name, title) = ("experts", "Expert load");
    let trace = context.trace;
    let ranks = trace.meta.extra.get(ASSUMED_RANKS).and_then(|ranks| ranks.parse().ok()).unwrap_or(1);
    let loads = loads_of(trace, ranks);
    if loads.is_empty() {
        let why = "the trace has no expert choices; strobe records them for MoE models";
        return Report::absent(name, title, why);
    }
    let iterations = trace.expert_loads.iter().map(|load| load.iter).collect::<std::collections::BTreeSet<_>>().len();
    Report::new(name, title).sheet(sheet(&loads)).note(format!("{iterations} recorded iterations. {NOTE}"))
}

/// Figures of every layer over the recorded iterations.
fn loads_of(trace: &Trace, ranks: usize) -> Vec<LayerLoad> {
    let mut rows: BTreeMap<u32, BTreeMap<u64, Vec<&ExpertLoad>>> = BTreeMap::new();
    for load in &trace.expert_loads {
        rows.entry(load.layer).or_default().entry(load.iter).or_default().push(load);
    }
    let loads = rows.into_iter().flat_map(|(layer, iterations)| {
        let experts = iterations.values().map(Vec::len).max().unwrap_or(0);
        let mut counts = vec![0; iterations.len() * experts];
        for (row, loads) in counts.chunks_mut(experts.max(1)).zip(iterations.values()) {
            for load in loads {
                if let Some(count) = row.get_mut(load.expert as usize) {
                    *count += load.tokens;
                }
            }
        }
        ExpertCounts { counts: &counts, layers: &[layer as usize], experts, ranks }.layer_loads()
    });
    loads.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts<'a>(counts: &'a [u32], layers: &'a [usize], experts: usize, ranks: usize) -> ExpertCounts<'a> {
        ExpertCounts { counts, layers, experts, ranks }
    }

    #[test]
    fn even_load_is_one_in_every_figure() {
        let loads = counts(&[3; 16], &[0, 1], 4, 2).layer_loads();
        assert_eq!(loads.len(), 2);
        for load in loads {
            assert_eq!(load.tokens_per_expert, [6; 4]);
            assert_eq!((load.imbalance, load.step_imbalance, load.rank_step_imbalance), (1.0, 1.0, Some(1.0)));
            assert!((load.entropy - 1.0).abs() < 1e-12);
            assert!(load.dead.is_empty() && load.hot.is_empty());
            assert_eq!(load.tokens_per_rank, [12, 12]);
        }
    }

    #[test]
    fn all_to_one_is_the_worst_in_every_figure() {
        let load = &counts(&[0, 8, 0, 0], &[5], 4, 1).layer_loads()[0];
        assert_eq!((load.layer, load.imbalance, load.step_imbalance, load.entropy), (5, 4.0, 4.0, 0.0));
        assert_eq!((&load.dead[..], &load.hot[..]), (&[0, 2, 3][..], &[1][..]));
        assert!(load.tokens_per_rank.is_empty() && load.rank_step_imbalance.is_none());
    }

    #[test]
    fn iterations_that_cancel_out_still_count() {
        let all = counts(&[4, 0, 0, 4], &[0], 2, 2);
        let load = &all.layer_loads()[0];
        assert_eq!((load.imbalance, load.step_imbalance, load.rank_step_imbalance), (1.0, 2.0, Some(2.0)));
        assert_eq!(all.rank_slowdown(), Some(2.0));
        assert_eq!(all.iteration(1).layer_loads()[0].tokens_per_expert, [0, 4]);
    }

    #[test]
    fn nothing_counted_is_nothing_said() {
        assert!(counts(&[], &[0], 4, 1).layer_loads().is_empty());
        assert!(counts(&[0; 4], &[0], 4, 1).layer_loads().is_empty());
        assert!(counts(&[1; 4], &[0], 4, 1).iteration(7).layer_loads().is_empty());
        assert_eq!(counts(&[0; 4], &[0], 4, 2).rank_slowdown(), None);
    }

    #[test]
    fn a_trace_gives_the_same_figures() {
        let mut trace = Trace::default();
        for (iter, counts) in [(3, [4, 0]), (4, [0, 4])] {
            for (expert, tokens) in counts.into_iter().enumerate() {
                trace.expert_loads.push(ExpertLoad { iter, layer: 1, expert: expert as u32, tokens });
            }
        }
        assert_eq!(loads_of(&trace, 2), counts(&[4, 0, 0, 4], &[1], 2, 2).layer_loads());
        trace.meta.extra.insert(ASSUMED_RANKS.into(), "2".into());
        let report = report(&Context::new(&trace, &crate::Options::default()));
        assert_eq!(report.sheets[0].rows[0][9], Value::Float(2.0));
        assert_eq!(report.sheets[0].rows[0][10], Value::Text("4 4".into()));
    }

    #[test]
    fn the_slowdown_weighs_layers_by_their_tokens() {
        // Layer 0: 6 pairs, fullest rank 6 of a mean of 3; layer 1: 2 pairs, even.
        let all = counts(&[6, 0, 1, 1], &[0, 1], 2, 2);
        assert_eq!(all.rank_slowdown(), Some((2.0 * 6.0 + 1.0 * 2.0) / 8.0));
    }
}
