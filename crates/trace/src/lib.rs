//! The one event model, with importers and exporters.
//!
//! A [`Trace`] is plain data in columns: whoever records or imports fills it, whoever analyses reads it. Formats live in
//! modules of their own and know nothing of each other.

mod atomic;
mod columns;
mod error;
pub mod export;
pub mod import;
mod intern;
mod iteration;
pub mod kineto;
mod model;
pub mod nsys;
mod parquet;
mod ranks;
mod system;
pub mod utc;

pub use error::TraceError;
pub use intern::{Interner, StrId};
pub use iteration::{ExpertLoad, Iteration, IterationKind, Peaks, RangeKind, Window};
pub use model::{
    Allocation, CallKind, CallRow, Calls, Counter, Device, Distinct, GraphMode, GraphNode, KernelDetail, Meta, NONE,
    OpDetail, OpKind, OpRow, Ops, Process, RangeRow, RangeSource, Ranges, Source, Thread, Trace, Work, range_flags,
};
pub use system::{CpuSample, Flow, Left, OnCpu, PageFault};
