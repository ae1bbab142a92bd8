//! What the engine records, as rows: on its way out, replaced by the columns of [`crate::Trace`].

use std::collections::BTreeMap;

use crate::{Interner, Iteration, IterationKind, Peaks, RangeKind, StrId, TraceError, Window};

pub mod chrome;
pub mod nesting;
pub mod nsys_sqlite;

/// One recording. All times are nanoseconds on one clock, relative to [`Meta::session_start_utc_ns`];
/// they may be negative.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Every string that events refer to.
    pub strings: Interner,
    /// What computed: one entry per executed op, in no promised order.
    pub ops: Vec<Op>,
    /// Named spans of host time, in no promised order.
    pub ranges: Vec<Range>,
    /// The forward steps that were recorded.
    pub iterations: Vec<Iteration>,
    /// The threads that events refer to.
    pub threads: Vec<Thread>,
    /// The process that was recorded.
    pub process: Process,
    /// What is known about the recording as a whole.
    pub meta: Meta,
}

/// One execution of one op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// What it does in the model, e.g. `qkv_proj`.
    pub name: StrId,
    /// The family it is summed under: gemm, attention, norm, rope, activation, sampling, embedding, ...
    pub category: StrId,
    /// The implementation that ran, e.g. `gemm_packed_f32_avx512`.
    pub kernel: StrId,
    /// The transformer layer it belongs to, if it belongs to one.
    pub layer: Option<u32>,
    /// The iteration it ran for.
    pub iteration: u64,
    /// The thread (tid) it ran on, or was dispatched from.
    pub thread: u32,
    /// When it began.
    pub start: i64,
    /// When it ended.
    pub end: i64,
    /// m, n, k; 0 where it does not apply.
    pub shape: [u64; 3],
    /// Bytes it has to move at least; 0 = not known.
    pub bytes: u64,
    /// Floating-point operations; 0 = none or not known.
    pub flops: u64,
}

impl Op {
    /// Its duration in nanoseconds, never negative.
    pub fn duration(&self) -> i64 {
        self.end.saturating_sub(self.start).max(0)
    }
}

/// A named span of host time on one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// What it is called, e.g. `[Executor] _forward_step 7: 1 ctx reqs, 3 gen reqs`.
    pub name: StrId,
    /// The thread (tid) it was opened and closed on.
    pub thread: u32,
    /// When it began.
    pub start: i64,
    /// When it ended.
    pub end: i64,
    /// What it stands for.
    pub kind: RangeKind,
    /// The iteration it belongs to, if it belongs to one.
    pub iteration: Option<u64>,
}

/// A thread of the recorded process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    /// The thread id that events carry.
    pub tid: u32,
    /// What the thread is called.
    pub name: String,
}

/// The recorded process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Its process id.
    pub pid: u32,
    /// Its name, e.g. `strobe`. Never a command line: those hold secrets.
    pub name: String,
}

/// What is known about a recording as a whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Meta {
    /// Time 0 of the trace, in nanoseconds since 1970-01-01 UTC.
    pub session_start_utc_ns: i64,
    /// Who recorded it, e.g. `strobe 0.1.0`.
    pub producer: String,
    /// Whether the run was cut short.
    pub partial: bool,
    /// The profile windows that were asked for.
    pub windows: Vec<Window>,
    /// What the hardware could do at most, where it was measured.
    pub peaks: Option<Peaks>,
    /// Anything else worth keeping, e.g. the model's name.
    pub extra: BTreeMap<String, String>,
}

/// The largest process or thread id that fits Nsight Systems' global ids.
pub(crate) const MAX_ID: u32 = 0xFF_FFFF;

impl Trace {
    /// The kind of every iteration, by number.
    pub fn iteration_kinds(&self) -> std::collections::HashMap<u64, IterationKind> {
        self.iterations.iter().map(|i| (i.iter, i.kind())).collect()
    }

    /// Checks what every writer relies on: strings exist, nothing ends before it starts, ids fit.
    pub fn validate(&self) -> Result<(), TraceError> {
        for (i, op) in self.ops.iter().enumerate() {
            for (field, id) in [("name", op.name), ("category", op.category), ("kernel", op.kernel)] {
                self.check_string(id, || format!("ops[{i}].{field}"))?;
            }
            check_span(op.start, op.end, || format!("ops[{i}]"))?;
            check_id(op.thread, || format!("ops[{i}].thread"))?;
        }
        for (i, range) in self.ranges.iter().enumerate() {
            self.check_string(range.name, || format!("ranges[{i}].name"))?;
            check_span(range.start, range.end, || format!("ranges[{i}]"))?;
            check_id(range.thread, || format!("ranges[{i}].thread"))?;
        }
        for (i, iteration) in self.iterations.iter().enumerate() {
            check_span(iteration.start, iteration.end, || format!("iterations[{i}]"))?;
        }
        for (i, thread) in self.threads.iter().enumerate() {
            check_id(thread.tid, || format!("threads[{i}].tid"))?;
        }
        check_id(self.process.pid, || "process.pid".to_owned())
    }

    fn check_string(&self, id: StrId, place: impl Fn() -> String) -> Result<(), TraceError> {
        if (id.0 as usize) < self.strings.len() {
            return Ok(());
        }
        Err(TraceError::Invalid {
            place: place(),
            problem: format!("string {} does not exist, the trace holds {} strings", id.0, self.strings.len()),
        })
    }
}

fn check_span(start: i64, end: i64, place: impl Fn() -> String) -> Result<(), TraceError> {
    if start <= end {
        return Ok(());
    }
    Err(TraceError::Invalid { place: place(), problem: format!("it ends at {end} ns, before its start at {start} ns") })
}

fn check_id(id: u32, place: impl Fn() -> String) -> Result<(), TraceError> {
    if id <= MAX_ID {
        return Ok(());
    }
    Err(TraceError::Invalid {
        place: place(),
        problem: format!("{id} is more than the {MAX_ID} that trace files can hold"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validation_names_the_event() {
        let mut trace = Trace::default();
        trace.ranges.push(Range {
            name: StrId(4),
            thread: 1,
            start: 0,
            end: 1,
            kind: RangeKind::Other,
            iteration: None,
        });
        let text = trace.validate().unwrap_err().to_string();
        assert!(text.contains("ranges[0].name") && text.contains("string 4"), "{text}");
        trace.ranges[0].name = trace.strings.intern("x");
        trace.ranges[0].start = 2;
        let text = trace.validate().unwrap_err().to_string();
        assert!(text.contains("ranges[0]: it ends at 1 ns"), "{text}");
        trace.ranges[0].start = 0;
        trace.ranges[0].thread = 1 << 24;
        assert!(trace.validate().unwrap_err().to_string().contains("ranges[0].thread"));
    }
}
