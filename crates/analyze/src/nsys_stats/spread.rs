//! The figures that `nsys stats` gives for a group of values.

use std::collections::HashMap;
use std::hash::Hash;

use crate::sheet::Value;

/// Sum, mean, median, extremes and sample deviation of a group of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    pub total: i64,
    pub count: usize,
    pub mean: f64,
    pub median: f64,
    pub min: i64,
    pub max: i64,
    /// Sample standard deviation (n - 1); 0 for a single value.
    pub deviation: f64,
}

impl Spread {
    /// The figures of these values, whose order is lost; `None` when there are none.
    pub(super) fn of(values: &mut [i64]) -> Option<Self> {
        let (count, middle) = (values.len(), values.len() / 2);
        let (&min, &max) = (values.iter().min()?, values.iter().max()?);
        let total: i128 = values.iter().map(|&v| i128::from(v)).sum();
        let mean = total as f64 / count as f64;
        let squares: f64 = values.iter().map(|&v| (v as f64 - mean).powi(2)).sum();
        let deviation = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 };
        let (below, &mut upper, _) = values.select_nth_unstable(middle);
        let median = match below.iter().max() {
            Some(&lower) if count.is_multiple_of(2) => (lower as f64 + upper as f64) / 2.0,
            _ => upper as f64,
        };
        let total = total.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64;
        Some(Self { total, count, mean, median, min, max, deviation })
    }

    /// Mean, median, minimum, maximum and deviation as the cells of a row.
    pub(super) fn cells(&self) -> [Value; 5] {
        [self.mean.into(), self.median.into(), self.min.into(), self.max.into(), self.deviation.into()]
    }
}

/// Groups rows and gives the figures of every group, the largest total first, then by key.
///
/// `row` names the slot (a small number, below `slots`) and the value of a row, or `None` for rows left out; it is asked
/// twice, which is cheaper than to remember the answers of millions of rows. `key` says what a slot is called: slots
/// of the same key are one group.
pub(super) fn summarize<K: Ord + Hash + Clone>(
    rows: usize,
    slots: usize,
    row: impl Fn(usize) -> Option<(usize, i64)>,
    key: impl Fn(usize) -> K,
) -> Vec<(K, Spread)> {
    let mut counts = vec![0usize; slots];
    (0..rows).filter_map(&row).for_each(|(slot, _)| counts[slot] += 1);

    let mut groups: HashMap<K, usize> = HashMap::new();
    let mut group_of = vec![0u32; slots];
    let mut group_sizes: Vec<usize> = Vec::new();
    for (slot, &count) in counts.iter().enumerate().filter(|&(_, &count)| count > 0) {
        let group = *groups.entry(key(slot)).or_insert(group_sizes.len());
        if group == group_sizes.len() {
            group_sizes.push(0);
        }
        group_sizes[group] += count;
        group_of[slot] = group as u32;
    }

    let mut next: Vec<usize> = Vec::with_capacity(group_sizes.len());
    let mut total = 0;
    for size in &group_sizes {
        next.push(total);
        total += size;
    }
    let mut values = vec![0i64; total];
    for (slot, value) in (0..rows).filter_map(&row) {
        let place = &mut next[group_of[slot] as usize];
        values[*place] = value;
        *place += 1;
    }

    let mut rest = values.as_mut_slice();
    let mut spreads = Vec::with_capacity(group_sizes.len());
    for size in group_sizes {
        let (group, others) = rest.split_at_mut(size);
        spreads.push(Spread::of(group));
        rest = others;
    }
    let mut summary: Vec<(K, Spread)> =
        groups.into_iter().filter_map(|(key, group)| Some((key, spreads[group]?))).collect();
    summary.sort_by(|a, b| b.1.total.cmp(&a.1.total).then_with(|| a.0.cmp(&b.0)));
    summary
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_value_has_no_deviation() {
        let one = Spread::of(&mut [7]).unwrap();
        assert_eq!((one.total, one.mean, one.median, one.min, one.max, one.deviation), (7, 7.0, 7.0, 7, 7, 0.0));
        assert_eq!(Spread::of(&mut []), None);
    }

    proptest! {
        #[test]
        fn agrees_with_sorting(values in prop::collection::vec(-1000i64..1000, 1..40)) {
            let spread = Spread::of(&mut values.clone()).unwrap();
            let mut sorted = values.clone();
            sorted.sort_unstable();
            let n = sorted.len();
            prop_assert_eq!(spread.median, (sorted[(n - 1) / 2] + sorted[n / 2]) as f64 / 2.0);
            prop_assert_eq!((spread.min, spread.max), (sorted[0], sorted[n - 1]));
            prop_assert_eq!(spread.total, values.iter().sum::<i64>());
        }

        #[test]
        fn groups_hold_every_row_once(rows in prop::collection::vec((0usize..6, 0i64..9), 0..60)) {
            let summary = summarize(rows.len(), 6, |i| (rows[i].0 != 5).then_some(rows[i]), |slot| slot / 2);
            for (key, spread) in &summary {
                let mine = rows.iter().filter(|(slot, _)| *slot != 5 && slot / 2 == *key);
                prop_assert_eq!(spread.total, mine.clone().map(|(_, v)| v).sum::<i64>());
                prop_assert_eq!(spread.count, mine.count());
            }
            prop_assert!(summary.windows(2).all(|w| w[0].1.total > w[1].1.total
                || (w[0].1.total == w[1].1.total && w[0].0 < w[1].0)));
        }
    }
}
