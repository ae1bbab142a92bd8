//! The inference engine: block pool, scheduler, step loop, sampling, profile windows and iteration statistics.
//!
//! The way of a token: [`Engine::submit`] → [`scheduler::Scheduler::plan`] → [`step::StepInputs`] →
//! [`backend::Backend::launch`], which runs the ops of `strobe_model::program` and [`sampling`] → [`Outbox`].
//!
//! The scheduler never touches a device, a clock or a file. The loop owns an OS thread and allocates nothing once it
//! is warm. With profiling off an op costs nothing extra: no clock is read and nothing is stored.

pub mod backend;
pub mod clock;
pub mod cpu;
mod cpu_sizes;
pub mod cuda;
pub mod device;
mod engine;
pub mod engine_config;
pub mod engine_dir;
pub mod error;
pub mod eval;
#[cfg(feature = "handicap")]
pub mod handicap;
pub mod host;
pub mod iteration;
mod latent;
pub mod memory;
pub mod perplexity;
pub mod quantization;
pub mod recorder;
pub mod sampling;
pub mod selftest;
mod sequence;
pub mod staged_dir;
pub mod step;
pub mod weights;
pub mod window;

pub use engine::{
    CacheSize, Engine, EngineInfo, EngineOptions, FinishEvent, FinishReason, GPU_PROBE_BLOCK, Outbox,
    PerfectRouterOptions, Request, TokenEvent,
};
pub use engine_config::{BuildConfig, EngineConfig, WeightsOrigin};
pub use engine_dir::{LoadedModel, ModelRef};
pub use error::EngineError;
pub use host::{HostReading, HostReadings};
pub use iteration::{IterationLimits, IterationRecord, KeysRead};
pub use quantization::{KvCacheType, Quantization};
pub use sampling::SamplingParams;
pub use scheduler::{Policy, RequestId};
pub use strobe_scheduler::{block_pool, scheduler};
