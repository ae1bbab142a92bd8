//! Model configurations, checkpoints, tokenizers, and each architecture as a short list of ops.
//!
//! This crate knows shapes, names and order. It knows nothing of batching, paging, threads or devices:
//! an engine asks it *what* a model is ([`ModelConfig`], [`weight_list`], [`program`]) and *which numbers* it holds
//! ([`WeightSource`]), and decides everything else itself.

pub mod checkpoint;
pub mod checksum;
pub mod config;
mod config_json;
mod config_moe;
mod cost;
pub mod error;
mod gguf;
mod gguf_blocks;
mod gguf_model;
mod gguf_tokenizer;
pub mod latent;
pub mod moe;
pub mod perfect_router;
pub mod presets;
pub mod program;
pub mod random;
mod rope;
pub mod router_skew;
pub mod routing;
pub mod safetensors;
mod safetensors_header;
mod safetensors_writer;
mod source;
mod stacked;
pub mod tokenizer;
pub mod weights;

pub use checkpoint::Checkpoint;
pub use config::{DType, ModelConfig, RopeScaling};
pub use error::ModelError;
pub use gguf::Gguf;
pub use gguf_model::GgufModel;
pub use latent::LatentAttention;
pub use moe::{MoeConfig, SwigluClamp};
pub use perfect_router::{Balance, PerfectRouter, PerfectRouterError};
pub use presets::{Preset, preset, presets, unknown_model};
pub use router_skew::RouterSkew;
pub use routing::RoutingMethod;
pub use safetensors::{SafeTensors, SafeTensorsWriter, TensorSpec, TensorType, TensorView};
pub use tokenizer::Tokenizer;
pub use weights::{LayerWeight, RandomInit, WeightId, WeightInfo, WeightSource, embedding_table, weight_list};
