//! Autograd's flow: which operator of the forward pass an operator of the backward pass belongs to, by arrows (`fwdbwd`)
//! or by the sequence numbers that both carry.

use std::collections::HashMap;

use super::super::event::Event;
use super::super::number::{integer, micros_to_nanos};
use super::Builder;
use crate::Flow;
use crate::intern::FastHash;

/// What was read of one root.
#[derive(Default)]
pub(super) struct Autograd {
    /// Sequence number, start and thread of operators of forward passes.
    forward: Vec<(i64, i64, u32)>,
    /// The same of backward passes.
    backward: Vec<(i64, i64, u32)>,
    /// Where arrows begin: time and thread by their id.
    begins: HashMap<i64, (i64, u32), FastHash>,
    /// Where they end: id, time and thread.
    ends: Vec<(i64, i64, u32)>,
}

/// Whether an arrow leads from a forward to a backward pass; all others lead from calls to what they launched.
pub(super) fn is_autograd(category: &[u8]) -> bool {
    matches!(category, b"fwdbwd" | b"forward_backward")
}

impl Builder {
    /// Takes over an end of an arrow.
    pub(super) fn arrow(&mut self, event: &Event, begins: bool) {
        let (Some(id), Some(time)) = (integer(event.id), micros_to_nanos(event.ts)) else { return };
        let thread = self.thread(event.pid, event.tid);
        let autograd = &mut self.root.autograd;
        match begins {
            true => drop(autograd.begins.insert(id, (time, thread))),
            false => autograd.ends.push((id, time, thread)),
        }
    }

    /// Takes over the sequence number of an operator.
    pub(super) fn sequence(&mut self, event: &Event, start: i64, thread: u32) {
        let Some(number) = integer(event.known.sequence).filter(|&number| number >= 0) else { return };
        let is_backward = integer(event.known.forward_thread).is_some_and(|thread| thread != 0);
        let autograd = &mut self.root.autograd;
        if is_backward { &mut autograd.backward } else { &mut autograd.forward }.push((number, start, thread));
    }
}

impl Autograd {
    /// Each backward pass of an operator once. What fits no operator, or operators of several threads, is left out.
    pub(super) fn flows(self) -> Vec<Flow> {
        if !self.ends.is_empty() {
            let flow = |(id, end, to)| {
                let &(start, from) = self.begins.get(&id)?;
                (start <= end).then_some(Flow { start, end, from, to })
            };
            return self.ends.into_iter().filter_map(flow).collect();
        }
        let (mut forward, mut backward) = (self.forward, self.backward);
        forward.sort_unstable();
        backward.sort_unstable();
        let mut flows: Vec<Flow> = Vec::with_capacity(backward.len());
        for of_number in backward.chunk_by(|a, b| a.0 == b.0) {
            let number = of_number[0].0;
            let first = forward.partition_point(|&(other, ..)| other < number);
            let after = forward.partition_point(|&(other, ..)| other <= number);
            let own = &forward[first..after];
            // Every thread counts for itself: where two have the number, nothing tells whose it is.
            let Some(&(.., from)) = own.first().filter(|first| own.iter().all(|other| other.2 == first.2)) else {
                continue;
            };
            for &(_, end, to) in of_number {
                let before = own.partition_point(|&(_, start, _)| start <= end);
                let Some(&(_, start, _)) = own[..before].last() else { continue };
                // Operators inside each other have one number, and begin one after the other.
                if flows.last().is_none_or(|last| (last.start, last.from, last.to) != (start, from, to)) {
                    flows.push(Flow { start, end, from, to });
                }
            }
        }
        flows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_join_what_arrows_join() {
        let flow = |start, end| Flow { start, end, from: 0, to: 1 };
        let by_number = Autograd {
            forward: vec![(7, 10, 0), (8, 20, 0), (8, 21, 0), (9, 30, 0), (9, 31, 2)],
            // The node and what runs in it have one number; what was computed before the recording has no partner.
            backward: vec![(9, 40, 1), (8, 50, 1), (8, 51, 1), (7, 60, 1), (5, 70, 1)],
            ..Autograd::default()
        };
        assert_eq!(by_number.flows(), [flow(10, 60), flow(21, 50)], "9 may be of either thread");
        let twice = Autograd {
            forward: vec![(7, 10, 0), (7, 110, 0)],
            backward: vec![(7, 60, 1), (7, 61, 1), (7, 160, 1)],
            ..Autograd::default()
        };
        assert_eq!(twice.flows(), [flow(10, 60), flow(110, 160)], "a step that was recorded once and copied");
        let by_arrow = Autograd {
            begins: [(1, (10, 0)), (2, (20, 0)), (3, (90, 0))].into_iter().collect(),
            ends: vec![(2, 50, 1), (1, 60, 1), (3, 70, 1), (4, 80, 1)],
            forward: vec![(7, 10, 0)],
            backward: vec![(7, 60, 1)],
        };
        assert_eq!(by_arrow.flows(), [flow(20, 50), flow(10, 60)]);
    }
}
