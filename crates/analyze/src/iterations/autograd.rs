//! Passes of autograd: what a forward pass computed, its backward pass comes back to. A step holds whole passes, one or
//! (where gradients are gathered over several batches) some.

use strobe_trace::{Flow, Trace};

use crate::intervals::{Span, SpanSet};

/// Fewest operators with a backward pass that make a pass of a model.
const FEWEST: usize = 8;

/// Per process of the trace its passes on the clock of the host, from the first operator of a forward pass to the last one
/// that is seen of its backward pass. Empty where forward and backward passes interleave: such passes tell nothing of
/// steps.
pub(super) fn passes(trace: &Trace) -> Vec<Vec<Span>> {
    let mut of_process: Vec<Vec<Flow>> = vec![Vec::new(); trace.processes.len()];
    // What is computed again during a backward pass has a pass of its own, on the thread of that backward pass.
    let between_threads = trace.flows.iter().any(|flow| flow.from != flow.to);
    for flow in trace.flows.iter().filter(|flow| !between_threads || flow.from != flow.to) {
        let process = trace.threads.get(flow.from as usize).map(|thread| thread.process as usize);
        if let Some(own) = process.and_then(|process| of_process.get_mut(process)) {
            own.push(*flow);
        }
    }
    of_process.into_iter().map(|flows| of_flows(&flows)).collect()
}

/// The passes of one process; `flows` are in order.
fn of_flows(flows: &[Flow]) -> Vec<Span> {
    let whole = SpanSet::union_of(flows.iter().map(|flow| Span::new(flow.start, flow.end)));
    let mut next = 0;
    let mut passes = Vec::new();
    for &pass in whole.spans() {
        let count = flows[next..].iter().take_while(|flow| flow.start < pass.end).count();
        let own = &flows[next..next + count];
        next += count;
        let last_forward = own.iter().map(|flow| flow.start).max();
        let first_backward = own.iter().map(|flow| flow.end).min();
        if last_forward > first_backward {
            return Vec::new();
        }
        if count >= FEWEST {
            passes.push(pass);
        }
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forward pass of some operators from a moment on, each of which takes 1, and its backward pass.
    fn pass(at: i64, operators: i64) -> impl Iterator<Item = Flow> {
        (0..operators).map(move |i| Flow { start: at + i, end: at + 3 * operators - 2 * i, from: 0, to: 1 })
    }

    #[test]
    fn each_backward_pass_closes_its_forward_pass() {
        let two: Vec<Flow> = pass(0, 10).chain(pass(100, 10)).collect();
        assert_eq!(of_flows(&two), [Span::new(0, 30), Span::new(100, 130)]);
        let with_a_piece: Vec<Flow> = pass(0, 10).chain(pass(50, 3)).collect();
        assert_eq!(of_flows(&with_a_piece), [Span::new(0, 30)], "a few operators are no pass of a model");
        let mut interleaved: Vec<Flow> = pass(0, 10).chain(pass(15, 10)).collect();
        interleaved.sort();
        assert_eq!(of_flows(&interleaved), []);
        assert_eq!(of_flows(&[]), []);
    }
}
