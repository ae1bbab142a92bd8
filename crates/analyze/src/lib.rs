//! Pure functions from a trace to tables.
//!
//! A [`Context`] is a trace with the category of every op and its iterations; [`reports::ALL`] lists what can be asked
//! about it. [`compare`] sets two of them against each other. Two rules hold everywhere: parts add up to their whole, and
//! what is not known is absent or called unknown, never zero.

pub mod advice;
pub mod attribution;
pub mod budget;
pub mod categories;
pub mod compare;
pub mod context;
pub mod critical_path;
pub mod experts;
pub mod gaps;
pub mod host;
mod host_compute;
pub mod intervals;
pub mod iterations;
pub mod launch;
pub mod layers;
pub mod memory;
pub mod metrics;
pub mod nsys_stats;
pub mod operators;
pub mod overlap;
mod own_time;
pub mod ranks;
pub mod reports;
pub mod roofline;
pub mod sheet;
pub mod summary;
pub mod timeline;
pub mod top_ops;
mod unified;

pub use context::{Context, Options};
pub use strobe_stats::Summary;
