//! strobe's own trace file: an SQLite database in Nsight Systems' export schema.
//!
//! What the schema can hold is where its readers look for it: ranges and ops are `NVTX_EVENTS`, so
//! `nsys stats --report nvtx_sum` and tools written for nsys exports work on the file. What it cannot hold
//! stands in tables of strobe's own (`STROBE_*`), which refer to the events by row number.
//!
//! Environment variables, command lines, host and user names are never written.

mod ids;
mod read;
mod schema;
mod write;

pub use read::read;
pub use write::write;
