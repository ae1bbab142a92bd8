//! What most reports need, computed once: the category of every op, the iterations of the trace, and what is only made
//! when the first report asks for it.

use std::sync::OnceLock;

use strobe_trace::{IterationKind, NONE, Trace};

use crate::attribution::{Attribution, innermost_ranges};
use crate::categories::{Categories, Rules};
use crate::critical_path;
use crate::intervals::{Span, SpanSet};
use crate::iterations::{Detected, detect};
use crate::launch::{Launch, launches};
use crate::roofline::{Roofline, roofline};

/// A trace with its categories and iterations.
pub struct Context<'t> {
    /// The trace.
    pub trace: &'t Trace,
    /// The category of every op.
    pub categories: Categories,
    /// The iterations, as recorded or as found.
    pub iterations: Detected,
    attribution: OnceLock<Attribution>,
    launches: OnceLock<Vec<Launch>>,
    roofline: OnceLock<Roofline>,
    waits: OnceLock<critical_path::Index>,
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
        Self::with(trace, categories, iterations)
    }

    /// A trace with categories and iterations that are known.
    pub fn with(trace: &'t Trace, categories: Categories, iterations: Detected) -> Self {
        Self {
            trace,
            categories,
            iterations,
            attribution: OnceLock::new(),
            launches: OnceLock::new(),
            roofline: OnceLock::new(),
            waits: OnceLock::new(),
        }
    }

    /// The ranges around calls and ops.
    pub fn attribution(&self) -> &Attribution {
        self.attribution.get_or_init(|| innermost_ranges(self.trace))
    }

    /// The launches in the order of their calls.
    pub fn launches(&self) -> &[Launch] {
        self.launches.get_or_init(|| launches(self.trace))
    }

    /// How near ops came to the hardware's limit.
    pub fn roofline(&self) -> &Roofline {
        self.roofline.get_or_init(|| roofline(self))
    }

    /// What walks along critical paths look up.
    pub(crate) fn waits(&self) -> &critical_path::Index {
        self.waits.get_or_init(|| critical_path::Index::of(self.trace))
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
