//! Runs of rows that share a weight: all rows of an ordinary product, or those of each expert or head. The tasks of all runs are one
//! region of the pool, so that no worker waits at the end of an expert.

use std::ops::Range;

use crate::experts::ExpertPairs;

/// Which rows are multiplied with which weight: run `i` with weight `i` of those that lie one after the other.
#[derive(Clone, Copy)]
pub(crate) enum Runs<'a> {
    /// So many rows, one weight.
    One(usize),
    /// So many runs of as many rows each.
    Even { runs: usize, rows: usize },
    /// The pairs of each expert.
    Experts(&'a ExpertPairs),
}

impl Runs<'_> {
    /// Runs there are, empty ones included.
    pub(crate) fn count(&self) -> usize {
        match self {
            Runs::One(_) => 1,
            Runs::Even { runs, .. } => *runs,
            Runs::Experts(pairs) => pairs.experts(),
        }
    }

    /// Rows of all runs.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Runs::One(rows) => *rows,
            Runs::Even { runs, rows } => runs * rows,
            Runs::Experts(pairs) => pairs.len(),
        }
    }

    /// The rows of a run that lie within `block`, which is part of all rows.
    pub(crate) fn within(&self, run: usize, block: &Range<usize>) -> Range<usize> {
        let rows = match self {
            Runs::One(rows) => 0..*rows,
            Runs::Even { rows, .. } => run * rows..(run + 1) * rows,
            Runs::Experts(pairs) => pairs.of_expert(run),
        };
        let start = rows.start.clamp(block.start, block.end);
        start..rows.end.clamp(start, block.end)
    }
}

/// The tasks of all runs, one run after the other.
#[derive(Default)]
pub(crate) struct RunTasks {
    /// Where the tasks of each run end.
    ends: Vec<usize>,
}

impl RunTasks {
    pub(crate) fn new() -> RunTasks {
        // More experts than nearly any model has, so that growing is rare.
        RunTasks { ends: Vec::with_capacity(512) }
    }

    pub(crate) fn fill(&mut self, runs: usize, tasks_of: impl Fn(usize) -> usize) {
        let mut end = 0;
        self.ends.clear();
        self.ends.extend((0..runs).map(|run| {
            end += tasks_of(run);
            end
        }));
    }

    pub(crate) fn total(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The run of a task, and which of its tasks it is.
    pub(crate) fn locate(&self, task: usize) -> (usize, usize) {
        let run = self.ends.partition_point(|&end| end <= task);
        (run, task - run.checked_sub(1).map_or(0, |before| self.ends[before]))
    }
}

/// Threads to cut a run for: twice its part of the rows, so that one that has most of them keeps all threads busy, and
/// small ones are not cut finer than they must.
pub(crate) fn threads_for(rows: usize, all_rows: usize, threads: usize) -> usize {
    (2 * threads * rows).div_ceil(all_rows.max(1)).clamp(1, threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_belongs_to_one_run() {
        let counts = [0, 3, 0, 0, 1, 2, 0];
        let mut tasks = RunTasks::new();
        tasks.fill(counts.len(), |run| counts[run]);
        assert_eq!(tasks.total(), 6);
        let located: Vec<_> = (0..6).map(|task| tasks.locate(task)).collect();
        assert_eq!(located, [(1, 0), (1, 1), (1, 2), (4, 0), (5, 0), (5, 1)]);
        tasks.fill(0, |_| 1);
        assert_eq!(tasks.total(), 0);
    }
}
