//! What most reports need, computed once: the category of every op and the iterations of the trace.

use strobe_trace::{IterationKind, NONE, Trace};

use crate::categories::{Categories, Rules};
use crate::intervals::{Span, SpanSet};
use crate::iterations::{Detected, detect};

/// A trace with its categories and iterations.
pub struct Context<'t> {
    /// The trace.
    pub trace: &'t Trace,
    /// The category of every op.
    pub categories: Categories,
    /// The iterations, as recorded or as found.
    pub iterations: Detected,
}

/// How a trace is to be looked at.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How ops are put into categories.
    pub rules: Rules,
    /// A regular expression for the names of ranges that are iterations.
    pub iteration_range: Option<regex::Regex>,
}

impl<'t> Context<'t> {
    /// Classifies the ops and finds the iterations.
    pub fn new(trace: &'t Trace, options: &Options) -> Self {
        let categories = Categories::of(trace, &options.rules);
        let iterations = detect(trace, options.iteration_range.as_ref());
        Self { trace, categories, iterations }
    }

    /// When device `device` is busy: the union of its ops.
    pub fn busy(&self, device: u16) -> SpanSet {
        self.union(device, |_| true)
    }

    /// The union of those ops of a device for which `keep` holds.
    pub fn union(&self, device: u16, keep: impl Fn(usize) -> bool) -> SpanSet {
        let ops = &self.trace.ops;
        let chosen = (0..ops.len()).filter(|&i| ops.device[i] == device && keep(i));
        SpanSet::union_of(chosen.map(|i| Span::new(ops.start[i], ops.end[i])))
    }

    /// The kind of the iteration that op `index` belongs to.
    pub fn kind_of_op(&self, index: usize) -> Option<IterationKind> {
        let iteration = self.iterations.of_op.get(index).copied().filter(|&i| i != NONE)?;
        self.iterations.list.get(iteration as usize)?.kind
    }
}
