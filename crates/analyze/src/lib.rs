//! Pure functions from a trace to tables.

pub mod advice;
pub mod attribution;
pub mod budget;
pub mod categories;
pub mod compare;
pub mod context;
pub mod critical_path;
pub mod gaps;
pub mod intervals;
pub mod iterations;
pub mod launch;
pub mod memory;
pub mod metrics;
pub mod nsys_stats;
pub mod overlap;
pub mod roofline;
pub mod sheet;
pub mod spine;
mod stats;
pub mod timeline;

pub use context::{Context, Options};
pub use stats::Summary;
