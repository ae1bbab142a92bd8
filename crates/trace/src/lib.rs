//! The one event model: ranges, ops and iterations on a timeline, with importers and exporters.
//!
//! A [`Trace`] is plain data: whoever records or imports fills it, whoever analyses reads it. Formats live in
//! modules of their own ([`nsys_sqlite`], [`chrome`]) and know nothing of each other.
//!
//! ```
//! use strobe_trace::{Op, Trace, chrome};
//! let mut trace = Trace::default();
//! let name = trace.strings.intern("qkv_proj");
//! let category = trace.strings.intern("gemm");
//! let kernel = trace.strings.intern("gemm_packed_f32_avx512");
//! trace.ops.push(Op { name, category, kernel, layer: Some(0), iteration: 7, thread: 1, start: 0, end: 1_500,
//!                     shape: [4, 96, 64], bytes: 25_600, flops: 49_152 });
//! let mut json = Vec::new();
//! chrome::write(&trace, &mut json).unwrap();
//! assert!(String::from_utf8(json).unwrap().contains("qkv_proj"));
//! ```

mod atomic;
pub mod chrome;
mod error;
mod intern;
mod model;
pub mod nesting;
pub mod nsys_sqlite;
mod utc;

pub use error::TraceError;
pub use intern::{Interner, StrId};
pub use model::{Iteration, IterationKind, Meta, Op, Peaks, Process, Range, RangeKind, Thread, Trace, Window};
