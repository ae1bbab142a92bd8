//! What most reports need, computed once: the category of every op, the iterations of the trace, and what is only made
//! when the first report asks for it.

use std::sync::OnceLock;

use strobe_trace::{IterationKind, NONE, Trace};

use crate::attribution::{Attribution, innermost_ranges};
use crate::categories::{Categories, Rules};
use crate::critical_path;
use crate::host::{Host, IdleCause, idle_causes, may_be_recorded};
use crate::intervals::{Span, SpanSet};
use crate::iterations::{Detected, Method, detect, detect_by_count};
use crate::launch::{Launch, launches};
use crate::own_time::own_times;
use crate::roofline::{Roofline, roofline};
use crate::summary::Ranks;

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
    host: OnceLock<Host>,
    idle_causes: OnceLock<Vec<IdleCause>>,
    names_python: OnceLock<bool>,
    own_times: OnceLock<Option<Vec<i64>>>,
    unseen: OnceLock<Unseen>,
    ranks: OnceLock<Ranks>,
}

/// Time between two recorded windows: the engine went on, and nobody looked.
#[derive(Debug, Default)]
struct Unseen {
    /// In which no iteration was recorded and no op ran.
    anywhere: SpanSet,
    /// Per device from the last op of a window to the first op of the next.
    devices: Vec<SpanSet>,
}

/// How a trace is to be looked at.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How ops are put into categories.
    pub rules: Rules,
    /// A regular expression for the names of ranges that are iterations.
    pub iteration_range: Option<regex::Regex>,
    /// How often what repeats once per iteration does; [`Self::iteration_range`] goes first.
    pub iterations: Option<usize>,
}

impl<'t> Context<'t> {
    /// Classifies the ops and finds the iterations.
    pub fn new(trace: &'t Trace, options: &Options) -> Self {
        let categories = Categories::of(trace, &options.rules);
        let iterations = match (&options.iteration_range, options.iterations) {
            (None, Some(count)) => detect_by_count(trace, count),
            (range, _) => detect(trace, range.as_ref()),
        };
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
            host: OnceLock::new(),
            idle_causes: OnceLock::new(),
            names_python: OnceLock::new(),
            own_times: OnceLock::new(),
            unseen: OnceLock::new(),
            ranks: OnceLock::new(),
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

    /// What every thread of the host does.
    pub(crate) fn host(&self) -> &Host {
        self.host.get_or_init(|| Host::of(self.trace))
    }

    /// What the host did while devices were idle, see [`idle_causes`].
    pub fn idle_causes(&self) -> &[IdleCause] {
        self.idle_causes.get_or_init(|| idle_causes(self))
    }

    /// Whether any name may be one of Python's interpreter lock or collector.
    pub(crate) fn names_python(&self) -> bool {
        *self.names_python.get_or_init(|| may_be_recorded(self.trace))
    }

    pub(crate) fn ranks(&self) -> &Ranks {
        self.ranks.get_or_init(|| Ranks::of(self.trace))
    }

    fn own_times(&self) -> Option<&[i64]> {
        self.own_times.get_or_init(|| own_times(self.trace)).as_deref()
    }

    /// Time between two recorded windows, which is nobody's: neither an iteration nor an op of any device was recorded in it.
    pub fn unseen(&self) -> &SpanSet {
        &self.unseen.get_or_init(|| Unseen::of(self)).anywhere
    }

    /// The same for one device: from its last op in a window to its first op in the next.
    pub fn unseen_on(&self, device: u32) -> &SpanSet {
        static NONE: SpanSet = SpanSet::EMPTY;
        let unseen = self.unseen.get_or_init(|| Unseen::of(self));
        unseen.devices.get(device as usize).unwrap_or(&NONE)
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

    /// Whether operators of PyTorch ran on the host and nothing ran on a device.
    pub fn computes_on_host(&self) -> bool {
        crate::host_compute::is_host_only(self.trace)
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
    pub fn busy(&self, device: u32) -> SpanSet {
        self.union(device, |_| true)
    }

    /// The union of those ops of a device for which `keep` holds.
    pub fn union(&self, device: u32, keep: impl Fn(usize) -> bool) -> SpanSet {
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

impl Unseen {
    fn of(context: &Context) -> Self {
        let (trace, found) = (context.trace, &context.iterations);
        if found.method != Some(Method::Recorded) {
            return Self::default();
        }
        // Windows are runs of numbers: those of several processes may leave out different iterations.
        let mut numbers: Vec<u64> = found.list.iter().map(|iteration| iteration.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let runs: Vec<u64> = numbers.chunk_by(|a, b| *b == a + 1).map(|run| run[0]).collect();
        if runs.len() < 2 {
            return Self::default();
        }
        let run_of = |iteration: usize| runs.partition_point(|first| *first <= found.list[iteration].number) - 1;
        let grow = |extent: &mut Option<Span>, span: Span| {
            *extent = Some(extent.map_or(span, |e| Span { start: e.start.min(span.start), end: e.end.max(span.end) }));
        };
        let devices = trace.ops.device.iter().max().map_or(0, |&device| device as usize + 1);
        let mut extents = vec![vec![None; runs.len()]; devices];
        let mut anywhere = vec![None; runs.len()];
        for (iteration, recorded) in found.list.iter().enumerate() {
            grow(&mut anywhere[run_of(iteration)], recorded.host);
        }
        for op in 0..trace.ops.len() {
            let iteration = found.of_op.get(op).map_or(usize::MAX, |&iteration| iteration as usize);
            if iteration < found.list.len() {
                let (run, span) = (run_of(iteration), Span::new(trace.ops.start[op], trace.ops.end[op]));
                grow(&mut extents[trace.ops.device[op] as usize][run], span);
                grow(&mut anywhere[run], span);
            }
        }
        let between = |extents: Vec<Option<Span>>| {
            // A run may lie before another in time and still have a higher number, in traces put together of several.
            let seen = SpanSet::union_of(extents.into_iter().flatten());
            seen.extent().map_or_else(SpanSet::default, |whole| SpanSet::union_of([whole]).subtract(&seen))
        };
        Self { anywhere: between(anywhere), devices: extents.into_iter().map(between).collect() }
    }
}
