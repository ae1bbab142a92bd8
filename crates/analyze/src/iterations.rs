//! The iterations of a trace: as its engine recorded them, or found by markers, graph launches or repetition.

use serde::Serialize;
use strobe_trace::{IterationKind, Trace};

use crate::intervals::Span;

/// The iterations of a trace and how they were found.
#[derive(Clone, Debug, Default)]
pub struct Detected {
    /// How they were found; `None` when there are none.
    pub method: Option<Method>,
    /// The iterations in order of time. Those of one rank do not overlap.
    pub list: Vec<Found>,
    /// Per op of the trace the index of its iteration in `list`, or [`strobe_trace::NONE`].
    pub of_op: Vec<u32>,
    /// Per call of the trace the index of its iteration in `list`, or [`strobe_trace::NONE`].
    pub of_call: Vec<u32>,
}

/// How iterations were found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The engine wrote them into the trace.
    Recorded,
    /// By markers of a known engine, e.g. `ProfilerStep#N`.
    Markers(String),
    /// By ranges whose name the user gave.
    RangeName(String),
    /// By launches of CUDA graphs.
    GraphReplays,
    /// By a sequence of kernels that repeats.
    RepeatingKernels,
}

/// One iteration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Found {
    /// Its number as the trace has it, else counted from 0.
    pub number: u64,
    /// What it is called in the trace, e.g. the name of its marker.
    pub label: String,
    /// What it worked on, where known.
    pub kind: Option<IterationKind>,
    /// Requests in their context phase, where known.
    pub context_requests: Option<u32>,
    /// Requests in their generation phase, where known.
    pub generation_requests: Option<u32>,
    /// Tokens of the context requests, where known.
    pub context_tokens: Option<u32>,
    /// Tokens of the generation requests, where known.
    pub generation_tokens: Option<u32>,
    /// Index into the trace's processes.
    pub process: u16,
    /// Its time on the host: from the start of its marker to the start of the next one's of that process, or the end
    /// of its own when it is the last or the next begins much later (see [`detect`]).
    #[serde(skip)]
    pub host: Span,
    /// From its first op on a device to the end of its last; `None` without any.
    #[serde(skip)]
    pub device: Option<Span>,
}

/// Finds the iterations of a trace.
pub fn detect(trace: &Trace, range_name: Option<&regex::Regex>) -> Detected {
    let _ = (trace, range_name);
    todo!("helper I")
}
