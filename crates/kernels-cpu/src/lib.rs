//! The ops of a language model on a CPU: a scalar reference and SIMD tiers chosen at run time.
//!
//! Every op is a method of [`Cpu`], takes plain slices and writes into buffers that the caller owns.
//! Within one [`Tier`] an output row depends only on that row's own inputs, bit for bit: not on how many rows
//! share the call, how many threads run it, how a prompt was cut into chunks, or how large a KV block is.
//!
//! Shapes are contracts between the engine and this crate, not user input: a wrong length panics with the names
//! of both sides.

// Other architectures run the scalar side of each kernel only; the vector side is still type-checked there.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

mod attention;
mod buffer;
mod cores;
mod cpu;
mod experts;
mod gated;
mod gemm;
mod kv;
mod linear;
mod linear_pairs;
mod linear_quant;
mod matrix;
pub mod measure;
mod norm;
mod pool;
mod quant;
mod quant_rows;
mod quant_tile;
mod rope;
mod row_major;
mod rows;
mod runs;
mod simd;
mod tier;

pub use buffer::AlignedBuf;
pub use cores::physical_cores;
pub use cpu::Cpu;
pub use experts::ExpertPairs;
pub use kv::{AttnBatch, KvGeometry, KvLayer, KvType, QkvShape, RopeTable, SeqSpan};
pub use matrix::{Elems, Layout, Matrix, PANEL, pack_panel, pack_panels, packed_len};
pub use quant::{QuantKind, packed_bytes, packed_shape, panel_bytes, quantize_panel};
pub use quant_rows::QuantRows;
pub use rows::Activation;
pub use tier::{Tier, TierError};
