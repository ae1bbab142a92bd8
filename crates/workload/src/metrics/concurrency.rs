//! How many requests were in flight at each moment.

/// A count that changes at moments: the number of intervals that hold each point of time.
pub(super) struct StepFunction {
    /// Ascending times; each level holds until the next time. The last level is 0.
    steps: Vec<(u64, usize)>,
}

impl StepFunction {
    /// Counts intervals `[start, end)`, in nanoseconds.
    pub(super) fn of(intervals: impl Iterator<Item = (u64, u64)>) -> StepFunction {
        let mut changes: Vec<(u64, bool)> = intervals.flat_map(|(start, end)| [(start, true), (end, false)]).collect();
        // At one moment starts come before ends, so the count never passes below 0.
        changes.sort_unstable_by_key(|&(time, starts)| (time, !starts));
        let mut steps: Vec<(u64, usize)> = Vec::new();
        let mut level = 0usize;
        for (time, starts) in changes {
            level = if starts { level + 1 } else { level - 1 };
            match steps.last_mut() {
                Some(last) if last.0 == time => last.1 = level,
                _ => steps.push((time, level)),
            }
        }
        StepFunction { steps }
    }

    /// Stretches of constant level: start, end, level.
    fn stretches(&self) -> impl DoubleEndedIterator<Item = (u64, u64, usize)> {
        self.steps.windows(2).map(|w| (w[0].0, w[1].0, w[0].1))
    }

    /// The time average over a window.
    pub(super) fn mean_over(&self, start_ns: u64, end_ns: u64) -> f64 {
        let area: f64 = self
            .stretches()
            .map(|(from, to, level)| {
                let overlap = to.min(end_ns).saturating_sub(from.max(start_ns));
                overlap as f64 * level as f64
            })
            .sum();
        area / (end_ns - start_ns).max(1) as f64
    }

    /// The level below which the count stays for the given share of its time.
    pub(super) fn time_weighted_percentile(&self, q: f64) -> Option<usize> {
        let mut by_level: Vec<(usize, u64)> = self.stretches().map(|(from, to, level)| (level, to - from)).collect();
        by_level.sort_unstable();
        let total: u64 = by_level.iter().map(|&(_, length)| length).sum();
        let mut passed = 0;
        by_level.into_iter().find_map(|(level, length)| {
            passed += length;
            (total > 0 && passed as f64 >= q * total as f64).then_some(level)
        })
    }

    /// When the count first reaches the threshold and when it last leaves it.
    pub(super) fn first_and_last_at_least(&self, threshold: f64) -> Option<(u64, u64)> {
        let mut reaching = self.stretches().filter(|&(_, _, level)| level as f64 >= threshold);
        let (first, first_end, _) = reaching.next()?;
        let last = reaching.next_back().map_or(first_end, |(_, end, _)| end);
        Some((first, last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_overlapping_intervals() {
        // Levels: 1 in 0..2, 2 in 2..5, 1 in 5..6, 0 in 6..8, 1 in 8..10.
        let f = StepFunction::of([(0, 5), (2, 6), (8, 10)].into_iter());
        assert_eq!(f.steps, [(0, 1), (2, 2), (5, 1), (6, 0), (8, 1), (10, 0)]);
        assert_eq!(f.mean_over(0, 10), 1.1);
        assert_eq!(f.mean_over(2, 5), 2.0);
        assert_eq!(f.time_weighted_percentile(0.5), Some(1));
        assert_eq!(f.time_weighted_percentile(0.95), Some(2));
        assert_eq!(f.first_and_last_at_least(2.0), Some((2, 5)));
        assert_eq!(f.first_and_last_at_least(1.0), Some((0, 10)));
        assert_eq!(f.first_and_last_at_least(3.0), None);
    }

    #[test]
    fn a_handover_at_one_moment_is_no_dip() {
        let f = StepFunction::of([(0, 5), (5, 9)].into_iter());
        assert_eq!(f.steps, [(0, 1), (5, 1), (9, 0)]);
        assert_eq!(f.mean_over(0, 9), 1.0);
    }

    #[test]
    fn nothing_and_no_length() {
        let none = StepFunction::of(std::iter::empty());
        assert_eq!(none.time_weighted_percentile(0.95), None);
        let instant = StepFunction::of([(3, 3)].into_iter());
        assert_eq!(instant.time_weighted_percentile(0.95), None);
    }
}
