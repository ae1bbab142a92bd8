//! Nsight Systems' SQLite exports, and strobe's own trace file, which has the same schema.
//!
//! What the schema can hold is where its readers look for it, so that `nsys stats` and tools written for exports work on
//! the files written here. What it cannot hold stands in tables of strobe's own (`STROBE_*`), which refer to the events by
//! row number.
//!
//! Environment variables, command lines, captured output, host and user names are neither read nor written.

mod database;
mod ids;
mod merge;
mod pages;
mod part;
mod read;
mod schema;
mod strobe;
mod system;
mod write;

pub use read::read;
pub use write::{copy_name, write};
