//! Which spans of a track nest, and where those go that do not.
//!
//! Viewers draw a track as a flame: each span must lie wholly inside the one above it. Host ranges nearly always do;
//! kernels overlap even on one stream. Where two spans overlap in part, the later one goes to another lane.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Gives the spans of one track their lanes: the first in which each nests. Spans come by start, outer before inner.
#[derive(Default)]
pub(crate) struct Lanes {
    /// Per lane the ends of the open spans, outermost first.
    open: Vec<Vec<i64>>,
    /// The ends of all open spans, the earliest on top, with their lanes.
    ends: BinaryHeap<Reverse<(i64, u32)>>,
    /// A tree of maxima over the ends of the innermost open spans, a free lane counting as the end of time: it finds
    /// the first lane with room in logarithmic time, however many lanes there are.
    room: Vec<i64>,
}

impl Lanes {
    /// The lane of the next span.
    pub(crate) fn place(&mut self, start: i64, end: i64) -> u32 {
        // Inside a lane inner spans end first, so that the earliest end of all is the innermost of its lane.
        while let Some(&Reverse((earliest, lane))) = self.ends.peek()
            && earliest <= start
        {
            self.ends.pop();
            self.open[lane as usize].pop();
            self.update(lane as usize);
        }
        let lane = self.first_with_room(end).unwrap_or_else(|| self.add_lane());
        self.open[lane].push(end);
        self.ends.push(Reverse((end, lane as u32)));
        self.update(lane);
        lane as u32
    }

    /// How many lanes were needed.
    pub(crate) fn count(&self) -> u32 {
        self.open.len() as u32
    }

    fn leaves(&self) -> usize {
        self.room.len() / 2
    }

    fn add_lane(&mut self) -> usize {
        self.open.push(Vec::new());
        let lane = self.open.len() - 1;
        if lane >= self.leaves() {
            // Leaves beyond the last lane stay at the beginning of time: nothing fits there.
            self.room = vec![i64::MIN; 4 * self.open.len().next_power_of_two()];
            (0..=lane).for_each(|lane| self.update(lane));
        }
        lane
    }

    fn update(&mut self, lane: usize) {
        let mut node = self.leaves() + lane;
        self.room[node] = self.open[lane].last().copied().unwrap_or(i64::MAX);
        while node > 1 {
            node /= 2;
            self.room[node] = self.room[2 * node].max(self.room[2 * node + 1]);
        }
    }

    fn first_with_room(&self, end: i64) -> Option<usize> {
        if *self.room.get(1)? < end {
            return None;
        }
        let mut node = 1;
        while node < self.leaves() {
            node *= 2;
            node += usize::from(self.room[node] < end);
        }
        let lane = node - self.leaves();
        (lane < self.open.len()).then_some(lane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lanes_of(spans: &mut [(i64, i64)]) -> Vec<u32> {
        spans.sort_by_key(|&(start, end)| (start, Reverse(end)));
        let mut lanes = Lanes::default();
        spans.iter().map(|&(start, end)| lanes.place(start, end)).collect()
    }

    #[test]
    fn nested_and_touching_spans_share_a_lane_and_overlaps_do_not() {
        assert_eq!(lanes_of(&mut [(0, 10), (2, 5), (5, 10), (8, 12), (12, 13)]), [0, 0, 0, 1, 0]);
        assert_eq!(lanes_of(&mut [(i64::MIN, i64::MAX), (0, 0), (i64::MAX, i64::MAX)]), [0, 0, 0]);
    }

    #[test]
    fn a_staircase_of_overlaps_takes_a_lane_each() {
        let mut spans: Vec<(i64, i64)> = (0..50_000).map(|i| (i, 100_000 + i)).collect();
        assert_eq!(lanes_of(&mut spans).last(), Some(&49_999));
    }

    proptest! {
        #[test]
        fn every_lane_nests_and_is_the_first_that_does(
            spans in prop::collection::vec((0i64..50, 0i64..30), 0..60)
        ) {
            let mut spans: Vec<_> = spans.into_iter().map(|(start, length)| (start, start + length)).collect();
            let lanes = lanes_of(&mut spans);
            let clash = |a: (i64, i64), b: (i64, i64)| {
                let apart = b.0 >= a.1 || a.0 >= b.1;
                let inside = a.0 <= b.0 && b.1 <= a.1;
                !(apart || inside)
            };
            for (i, &span) in spans.iter().enumerate() {
                let mut earlier = (0..i).filter(|&j| lanes[j] == lanes[i]);
                prop_assert!(earlier.all(|j| !clash(spans[j], span)), "{:?} in lane {}", span, lanes[i]);
                for lower in 0..lanes[i] {
                    prop_assert!((0..i).any(|j| lanes[j] == lower && clash(spans[j], span)));
                }
            }
        }
    }
}
