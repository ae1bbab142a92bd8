//! Which tokens run next, and where their keys and values are kept.
//!
//! The engine and the simulator both call this crate, so that what is simulated is what runs. It touches no device,
//! clock, tokenizer or file.

pub mod block_pool;
pub mod scheduler;
