//! Whose every moment of an iteration is: which op's, or what kept the device idle.

use crate::Context;
use crate::budget::{Part, budgets, device_budgets};
use crate::intervals::Span;
use crate::timeline::{Piece, ops_by_device, walk};

/// The time of one iteration on one device.
#[derive(Clone, Debug)]
pub(super) struct Split {
    /// Index into the iterations of the trace.
    pub iteration: usize,
    pub device: u32,
    pub window: Span,
    /// Adds up to the length of the window.
    pub parts: Vec<(Part, i64)>,
}

/// The time of every iteration, per device on which it has ops.
pub(super) fn splits(context: &Context) -> Vec<Split> {
    let budgets = budgets(context).into_iter();
    budgets.map(|b| Split { iteration: b.iteration, device: b.device, window: b.window, parts: b.parts }).collect()
}

/// Each device's time from its first op to its last.
pub(super) fn whole_window(context: &Context) -> Vec<Split> {
    let budgets = device_budgets(context).into_iter();
    budgets.map(|b| Split { iteration: 0, device: b.device, window: b.window, parts: b.parts }).collect()
}

/// For each device the moments of its ops: disjoint, in order of time.
pub(super) struct Owners(Vec<Vec<(Span, u32)>>);

impl Owners {
    pub(super) fn of(context: &Context) -> Self {
        let of_device = |ops: Vec<u32>| {
            let mut moments = Vec::with_capacity(ops.len());
            walk(context, &ops, |span, piece| {
                if let Piece::Op(op) = piece {
                    moments.push((span, op));
                }
            });
            moments
        };
        Self(ops_by_device(context.trace).into_iter().map(of_device).collect())
    }

    /// The ops that own moments of a window, and how much each owns.
    pub(super) fn within(&self, split: &Split) -> impl Iterator<Item = (usize, i64)> + '_ {
        let window = split.window;
        let moments = self.0.get(split.device as usize).map(Vec::as_slice).unwrap_or_default();
        let first = moments.partition_point(|(span, _)| span.end <= window.start);
        let inside = moments[first..].iter().take_while(move |(span, _)| span.start < window.end);
        inside.filter_map(move |&(span, op)| Some((op as usize, span.overlap(window)?.length())))
    }
}
