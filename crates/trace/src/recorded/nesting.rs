//! Which events of a thread nest, and where those go that do not.
//!
//! Viewers draw the events of a thread as a flame: each must lie wholly inside the one above it. Recordings
//! nearly always do; where two events overlap in part, the later one is moved to another lane.

use super::Trace;

/// A range or an op of a trace, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Index into [`Trace::ranges`].
    Range(usize),
    /// Index into [`Trace::ops`].
    Op(usize),
}

/// An event with its place on the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The event.
    pub event: Event,
    /// Its thread (tid).
    pub thread: u32,
    /// When it begins.
    pub start: i64,
    /// When it ends.
    pub end: i64,
    /// 0 for an event that nests with the others of its thread. Inside every lane all events nest.
    pub lane: u32,
}

/// All ranges and ops by thread and start, parents before children, with their lanes.
pub fn place(trace: &Trace) -> Vec<Placed> {
    let ranges = trace.ranges.iter().enumerate().map(|(i, r)| Placed {
        event: Event::Range(i),
        thread: r.thread,
        start: r.start,
        end: r.end,
        lane: 0,
    });
    let ops = trace.ops.iter().enumerate().map(|(i, o)| Placed {
        event: Event::Op(i),
        thread: o.thread,
        start: o.start,
        end: o.end,
        lane: 0,
    });
    let mut placed: Vec<Placed> = ranges.chain(ops).collect();
    // The sort is stable: of equal spans a range comes before an op, an earlier record before a later one.
    placed.sort_by_key(|p| (p.thread, p.start, std::cmp::Reverse(p.end)));

    let mut thread = None;
    let mut lanes: Vec<Vec<i64>> = Vec::new(); // per lane the ends of the open events, outermost first
    for event in &mut placed {
        if thread != Some(event.thread) {
            thread = Some(event.thread);
            lanes.clear();
        }
        let free = lanes.iter_mut().position(|open| {
            while open.last().is_some_and(|&end| end <= event.start) {
                open.pop();
            }
            open.last().is_none_or(|&end| event.end <= end)
        });
        let lane = free.unwrap_or_else(|| {
            lanes.push(Vec::new());
            lanes.len() - 1
        });
        lanes[lane].push(event.end);
        event.lane = lane as u32;
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RangeKind;
    use crate::recorded::Range;
    use proptest::prelude::*;

    fn trace_of(spans: &[(u32, i64, i64)]) -> Trace {
        let mut trace = Trace::default();
        let name = trace.strings.intern("r");
        trace.ranges = spans
            .iter()
            .map(|&(thread, start, length)| Range {
                name,
                thread,
                start,
                end: start + length,
                kind: RangeKind::Other,
                iteration: None,
            })
            .collect();
        trace
    }

    #[test]
    fn nested_and_touching_events_share_a_lane_and_overlaps_do_not() {
        let placed = place(&trace_of(&[(1, 0, 10), (1, 2, 3), (1, 5, 5), (1, 8, 4), (2, 8, 4)]));
        let lanes: Vec<u32> = placed.iter().map(|p| p.lane).collect();
        assert_eq!(lanes, [0, 0, 0, 1, 0]);
    }

    proptest! {
        #[test]
        fn every_lane_nests(spans in prop::collection::vec((0u32..3, 0i64..50, 0i64..30), 0..60)) {
            let placed = place(&trace_of(&spans));
            prop_assert_eq!(placed.len(), spans.len());
            for (i, a) in placed.iter().enumerate() {
                for b in placed.iter().skip(i + 1).filter(|b| (b.thread, b.lane) == (a.thread, a.lane)) {
                    let apart = b.start >= a.end || a.start >= b.end;
                    let inside = a.start <= b.start && b.end <= a.end;
                    prop_assert!(apart || inside, "{:?} and {:?}", a, b);
                }
            }
        }
    }
}
