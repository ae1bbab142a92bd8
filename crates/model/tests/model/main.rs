//! One test binary: the crate against real files, hand-made ones, damaged ones and numbers from `transformers`.

mod checkpoint;
mod config;
mod gguf;
mod parity;
mod perfect_router;
mod rope;
mod routing;
mod safetensors;
mod support;
mod tokenizer;
mod weights;
