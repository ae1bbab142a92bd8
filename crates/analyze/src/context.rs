//! What most reports need, computed once: the category of every op, the iterations of the trace, and what is only made
//! when the first report asks for it.

use std::sync::OnceLock;

use strobe_trace::{IterationKind, NONE, Trace};

use crate::attribution::{Attribution, innermost_ranges};
use crate::categories::{Categories, Rules};
use crate::critical_path;
use crate::intervals::{Span, SpanSet};
use crate::iterations::{Detected, Method, detect};
use crate::launch::{Launch, launches};
use crate::own_time::own_times;
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
    own_times: OnceLock<Option<Vec<i64>>>,
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
            own_times: OnceLock::new(),
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

    fn own_times(&self) -> Option<&[i64]> {
        self.own_times.get_or_init(|| own_times(self.trace)).as_deref()
    }

    /// Whether iterations between those of two ops were not recorded: what a device did between the ops is not known.
    pub(crate) fn unseen_between(&self, before: u32, next: u32) -> bool {
        let number = |op: u32| {
            let iteration = *self.iterations.of_op.get(op as usize)?;
            Some(self.iterations.list.get(iteration as usize)?.number)
        };
        let recorded = self.iterations.method == Some(Method::Recorded);
        recorded && number(before).zip(number(next)).is_some_and(|(before, next)| next > before + 1)
    }

    /// Whether any own time differs from the op's length.
    pub fn has_own_times(&self) -> bool {
        self.own_times().is_some()
    }

    /// What an op took: its length, or for a kernel that was launched before the one ahead of it on its stream had ended,
    /// the time after that end.
    pub fn own_ns(&self, op: usize) -> i64 {
        self.own_times().and_then(|own| own.get(op).copied()).unwrap_or_else(|| self.trace.ops.duration(op))
    }

    /// What a reader of own times should know, where they differ from lengths.
    pub(crate) fn own_time_note(&self) -> Option<String> {
        let own = self.own_times()?;
        let early = own.iter().enumerate().filter(|&(op, &ns)| ns != self.trace.ops.duration(op)).count();
        Some(format!(
            "{early} kernels were on the device before the one ahead of them on their stream had ended (programmatic \
             dependent launch): they count from that end, so that times add up; kern-sum has their whole lengths."
        ))
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
