//! Which kernel of one side stands for which of the other.

use std::collections::BTreeMap;

use serde::Serialize;

use super::normalize::{base_name, is_memory_name, specialisation_free};
use strobe_stats::{Plan, Range as Interval};

/// What identifies an op on one side.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct OpKey {
    /// What it does in the model, as strobe records it; empty for other traces.
    pub op: String,
    /// The kernel's name.
    pub name: String,
    /// Its category.
    pub category: String,
    /// The part of the wall time that its time counts under.
    pub part: String,
}

/// How often an op ran and how long it took, per iteration.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Series {
    /// Runs, one value per iteration.
    pub count: Vec<f64>,
    /// Sum of durations in nanoseconds, one value per iteration.
    pub ns: Vec<f64>,
}

/// The ops of one side.
pub(super) type Used = BTreeMap<OpKey, Series>;

/// By what kernels of the two sides were matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MatchedBy {
    /// The op of the model they carry out.
    Op,
    /// The same name.
    Name,
    /// The same name but for template arguments, tile sizes, architecture and the like.
    NormalisedName,
    /// The same category and about as many runs and as much time.
    Category,
    /// Only one side has it.
    Unmatched,
}

impl MatchedBy {
    /// In words, for tables.
    pub fn as_str(self) -> &'static str {
        match self {
            MatchedBy::Op => "op",
            MatchedBy::Name => "name",
            MatchedBy::NormalisedName => "normalised name",
            MatchedBy::Category => "category",
            MatchedBy::Unmatched => "-",
        }
    }
}

/// The change of one kernel, or of one that another replaced, per iteration and device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelChange {
    /// By what the two sides were matched.
    pub matched_by: MatchedBy,
    /// What it does in the model, where recorded.
    pub op: Option<String>,
    /// Its category.
    pub category: String,
    /// The part of the wall time that its time counts under.
    pub part: String,
    /// Its names in A, most time first; empty when only B has it.
    pub a: Vec<String>,
    /// Its names in B; empty when only A has it.
    pub b: Vec<String>,
    /// Runs per iteration in A.
    pub a_count: f64,
    /// Runs per iteration in B.
    pub b_count: f64,
    /// Sum of durations per iteration in A. Kernels that overlap each count in full.
    pub a_ns: f64,
    /// The same in B.
    pub b_ns: f64,
    /// B minus A.
    pub delta_ns: f64,
    /// 95 % interval of `delta_ns`; absent with too few iterations.
    pub interval_ns: Option<Interval>,
}

impl KernelChange {
    /// Whether other kernels do in B what these did in A.
    pub fn is_replacement(&self) -> bool {
        !self.a.is_empty() && !self.b.is_empty() && self.a != self.b && {
            let sorted = |names: &[String]| {
                let mut names = names.to_vec();
                names.sort();
                names
            };
            sorted(&self.a) != sorted(&self.b)
        }
    }

    /// Whether it runs a different number of times per iteration.
    pub fn count_changed(&self) -> bool {
        (self.b_count - self.a_count).abs() > 1e-9
    }

    /// What to call it: its op, else the name it has in B, else in A.
    pub fn label(&self) -> &str {
        let name = || self.b.first().or(self.a.first()).map_or("", String::as_str);
        self.op.as_deref().unwrap_or_else(name)
    }
}

/// Matches the ops of both sides and says how each changed; largest absolute change of time first.
///
/// Matched in turn by op, by exact name, by name without numbers of specialisation, by bare function name, and what is left of a
/// category in A with what is left of it in B: those most alike in runs per iteration, then in time, first.
pub(super) fn match_kernels(a: &Used, b: &Used, plan: Option<&Plan>) -> Vec<KernelChange> {
    let mut open = [a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>()];
    let mut matches: Vec<(MatchedBy, [Vec<&OpKey>; 2])> = Vec::new();
    take_equal(&mut open, &mut matches, MatchedBy::Op, |key| (!key.op.is_empty()).then(|| key.op.clone()));
    take_equal(&mut open, &mut matches, MatchedBy::Name, |key| Some(key.name.clone()));
    let normalised = MatchedBy::NormalisedName;
    take_equal(&mut open, &mut matches, normalised, |key| Some(specialisation_free(&key.name)));
    take_equal(&mut open, &mut matches, normalised, |key| Some(base_name(&key.name)));
    take_alike(&mut open, &mut matches, [a, b]);
    let [only_a, only_b] = open;
    matches.extend(only_a.into_iter().map(|key| (MatchedBy::Unmatched, [vec![key], Vec::new()])));
    matches.extend(only_b.into_iter().map(|key| (MatchedBy::Unmatched, [Vec::new(), vec![key]])));
    let mut changes: Vec<KernelChange> = matches.into_iter().map(|(by, keys)| change(by, keys, [a, b], plan)).collect();
    changes.sort_by(|x, y| {
        let by_change = y.delta_ns.abs().total_cmp(&x.delta_ns.abs());
        by_change.then_with(|| (y.a_ns + y.b_ns).total_cmp(&(x.a_ns + x.b_ns))).then_with(|| x.label().cmp(y.label()))
    });
    changes
}

/// Moves keys that are equal under `text` on both sides from `open` to `matches`.
fn take_equal<'k>(
    open: &mut [Vec<&'k OpKey>; 2],
    matches: &mut Vec<(MatchedBy, [Vec<&'k OpKey>; 2])>,
    by: MatchedBy,
    text: impl Fn(&OpKey) -> Option<String>,
) {
    let mut equal: BTreeMap<String, [Vec<&OpKey>; 2]> = BTreeMap::new();
    for (side, keys) in open.iter_mut().enumerate() {
        keys.retain(|key| match text(key) {
            Some(text) => {
                equal.entry(text).or_default()[side].push(key);
                false
            }
            None => true,
        });
    }
    for [in_a, in_b] in equal.into_values() {
        if in_a.is_empty() || in_b.is_empty() {
            open[0].extend(in_a);
            open[1].extend(in_b);
        } else {
            matches.push((by, [in_a, in_b]));
        }
    }
}

/// The least that two kernels of a category must be alike, from 0 to 1, to be called a replacement.
const ALIKE: f64 = 0.4;

fn take_alike<'k>(
    open: &mut [Vec<&'k OpKey>; 2],
    matches: &mut Vec<(MatchedBy, [Vec<&'k OpKey>; 2])>,
    sides: [&Used; 2],
) {
    let mut candidates: Vec<(f64, &OpKey, &OpKey)> = Vec::new();
    for &key_a in &open[0] {
        // Having no category in common is not an argument; copies and fills replace nothing.
        if key_a.category == "unclassified" || is_memory_name(&key_a.name) {
            continue;
        }
        for &key_b in open[1].iter().filter(|b| b.category == key_a.category && !is_memory_name(&b.name)) {
            let [(count_a, ns_a), (count_b, ns_b)] = [mean(sides[0], key_a), mean(sides[1], key_b)];
            let alike = likeness(count_a, count_b) * (0.5 + 0.5 * likeness(ns_a, ns_b));
            if alike >= ALIKE {
                candidates.push((alike, key_a, key_b));
            }
        }
    }
    candidates.sort_by(|x, y| y.0.total_cmp(&x.0).then_with(|| (x.1, x.2).cmp(&(y.1, y.2))));
    for (_, key_a, key_b) in candidates {
        let places = [(0, key_a), (1, key_b)].map(|(side, key)| open[side].iter().position(|k| *k == key));
        if let [Some(place_a), Some(place_b)] = places {
            open[0].remove(place_a);
            open[1].remove(place_b);
            matches.push((MatchedBy::Category, [vec![key_a], vec![key_b]]));
        }
    }
}

/// 1 for equal positive numbers, towards 0 the more they differ.
fn likeness(x: f64, y: f64) -> f64 {
    if x.max(y) > 0.0 { x.min(y) / x.max(y) } else { 0.0 }
}

fn mean(side: &Used, key: &OpKey) -> (f64, f64) {
    let of = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    side.get(key).map_or((0.0, 0.0), |series| (of(&series.count), of(&series.ns)))
}

fn change(by: MatchedBy, mut keys: [Vec<&OpKey>; 2], sides: [&Used; 2], plan: Option<&Plan>) -> KernelChange {
    for (side, keys) in keys.iter_mut().enumerate() {
        keys.sort_by(|x, y| mean(sides[side], y).1.total_cmp(&mean(sides[side], x).1));
    }
    let lengths = [0, 1].map(|side| sides[side].values().next().map_or(0, |series| series.ns.len()));
    let sum = |side: usize| {
        let mut series = Series { count: vec![0.0; lengths[side]], ns: vec![0.0; lengths[side]] };
        for own in keys[side].iter().filter_map(|key| sides[side].get(*key)) {
            series.count.iter_mut().zip(&own.count).for_each(|(sum, x)| *sum += x);
            series.ns.iter_mut().zip(&own.ns).for_each(|(sum, x)| *sum += x);
        }
        series
    };
    let (a, b) = (sum(0), sum(1));
    let of = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let names = |side: usize| {
        let mut names: Vec<String> = keys[side].iter().map(|key| key.name.clone()).collect();
        let mut seen = std::collections::HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        names
    };
    let any = keys[1].first().or(keys[0].first());
    KernelChange {
        matched_by: by,
        op: any.map(|key| key.op.clone()).filter(|op| !op.is_empty()),
        part: any.map(|key| key.part.clone()).unwrap_or_default(),
        category: any.map(|key| key.category.clone()).unwrap_or_default(),
        a: names(0),
        b: names(1),
        a_count: of(&a.count),
        b_count: of(&b.count),
        a_ns: of(&a.ns),
        b_ns: of(&b.ns),
        delta_ns: of(&b.ns) - of(&a.ns),
        interval_ns: plan.filter(|_| !a.ns.is_empty() && !b.ns.is_empty()).map(|plan| plan.interval(&a.ns, &b.ns)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(rows: &[(&str, &str, &str, f64, f64)]) -> Used {
        let row = |&(op, name, category, count, ns): &(&str, &str, &str, f64, f64)| {
            let key = OpKey { op: op.into(), name: name.into(), category: category.into(), part: category.into() };
            (key, Series { count: vec![count; 4], ns: vec![ns; 4] })
        };
        rows.iter().map(row).collect()
    }

    fn find<'c>(changes: &'c [KernelChange], a: &str, b: &str) -> &'c KernelChange {
        let is = |names: &[String], name: &str| names.first().map_or("", String::as_str) == name;
        let found = changes.iter().find(|c| is(&c.a, a) && is(&c.b, b));
        found.unwrap_or_else(|| panic!("{a} / {b} in {changes:#?}"))
    }

    #[test]
    fn from_exact_to_category() {
        let a = used(&[
            ("", "same", "norm", 44.0, 100.0),
            ("", "nvjet_sm90_tst_128x64_64x9_1x2_h_bz_TNT", "gemm", 22.0, 500.0),
            ("", "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNN", "gemm", 22.0, 300.0),
            ("", "flash_fwd_kernel", "attention", 22.0, 200.0),
            ("", "gone", "copy", 1.0, 5.0),
        ]);
        let b = used(&[
            ("", "same", "norm", 44.0, 110.0),
            ("", "nvjet_sm90_tst_256x64_64x4_2x1_v_bz_TNT", "gemm", 22.0, 450.0),
            ("", "cutlass_80_tensorop_gemm_tn", "gemm", 22.0, 600.0),
            ("", "fmha_v2", "attention", 22.0, 150.0),
            ("", "new", "rope", 22.0, 9.0),
        ]);
        let changes = match_kernels(&a, &b, None);
        assert_eq!(find(&changes, "same", "same").matched_by, MatchedBy::Name);
        let tiles =
            find(&changes, "nvjet_sm90_tst_128x64_64x9_1x2_h_bz_TNT", "nvjet_sm90_tst_256x64_64x4_2x1_v_bz_TNT");
        assert_eq!((tiles.matched_by, tiles.delta_ns), (MatchedBy::NormalisedName, -50.0));
        let gemm = find(&changes, "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNN", "cutlass_80_tensorop_gemm_tn");
        assert_eq!((gemm.matched_by, gemm.delta_ns), (MatchedBy::Category, 300.0));
        assert!(gemm.is_replacement() && !gemm.count_changed());
        assert_eq!(find(&changes, "flash_fwd_kernel", "fmha_v2").matched_by, MatchedBy::Category);
        assert_eq!(find(&changes, "gone", "").matched_by, MatchedBy::Unmatched);
        assert_eq!(find(&changes, "", "new").delta_ns, 9.0);
        assert!(changes.windows(2).all(|w| w[0].delta_ns.abs() >= w[1].delta_ns.abs()));
        let total: f64 = changes.iter().map(|c| c.delta_ns).sum();
        let sum = |used: &Used| used.values().map(|s| s.ns[0]).sum::<f64>();
        assert!((total - (sum(&b) - sum(&a))).abs() < 1e-9);
    }

    #[test]
    fn ops_of_the_model_come_first() {
        let a = used(&[("qkv_proj", "gemm_a", "gemm", 22.0, 90.0), ("o_proj", "gemm_b", "gemm", 22.0, 40.0)]);
        let b = used(&[("qkv_proj", "gemm_b", "gemm", 22.0, 70.0), ("o_proj", "gemm_b", "gemm", 22.0, 45.0)]);
        let changes = match_kernels(&a, &b, None);
        let qkv = find(&changes, "gemm_a", "gemm_b");
        assert_eq!((qkv.matched_by, qkv.op.as_deref(), qkv.delta_ns), (MatchedBy::Op, Some("qkv_proj"), -20.0));
        assert!(qkv.is_replacement());
        assert!(!find(&changes, "gemm_b", "gemm_b").is_replacement());
    }
}
