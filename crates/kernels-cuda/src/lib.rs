//! Every op on an NVIDIA GPU.
//!
//! Kernels are `.cu` files compiled at run time by NVRTC for the device that is there, and kept in a cache on disk. No
//! CUDA toolkit is needed to build this crate, and no CUDA library to run what does not touch a GPU: every library is
//! opened when it is first wanted.
//!
//! What launches is unsafe: kernels follow addresses, sizes and indices wherever they lead, and no type can check what lies in a
//! GPU's memory. [`Gpu::launch`] says what a caller promises; every op asks for the same. Everything else is safe: buffers,
//! events and graphs keep their GPU's context, only plain data is copied to and from it, and what a file names (kernels,
//! algorithms of cuBLASLt) is looked up before it runs.

mod attention;
mod code_cache;
mod compile;
mod context;
mod cupti;
mod driver;
mod dtype;
mod error;
mod gemm;
mod gpu;
mod graph;
mod latent;
pub mod library;
mod linear;
mod lt;
pub mod measure;
mod memory;
mod module;
mod moe;
mod nvml;
mod nvtx;
mod profiler;
mod rows;
mod sample;
mod skinny;
mod tensor_map;
mod timeline;
mod tune;
mod unfused;
mod weights;

pub use attention::{Attention, AttentionConfig, DecodeArgs, PrefillArgs, RopeAngles, Spent};
pub use compile::{
    Arch, CacheReport, Origin, SUPPORTED_ARCHS, compile_cubin, cubin, kernel_cache_dir, kernels_at_hand, nvrtc_version,
};
pub use cupti::Recorder;
pub use dtype::{KvDtype, Precision};
pub use error::CudaError;
pub use gemm::{GemmArgs, GemmCluster, GemmEpilogue, GemmInput, GemmVariant, OwnGemm, Scales};
#[doc(hidden)]
pub use gpu::pointer_to_argument;
pub use gpu::{DeviceInfo, Event, Gpu, Launch, devices};
pub use graph::{CapturedGraph, GraphNode};
pub use latent::{LatentConfig, LatentKeysArgs, LatentOps};
pub use linear::{
    Candidate, Epilogue, GemmPlugin, Linear, LinearArgs, LinearInput, LinearShape, Route, SecondPass, Weights,
};
pub use lt::{Lt, LtAlgo, LtArgs, LtInput, LtShape};
pub use memory::{DeviceBuffer, DevicePtr, PinnedBuffer};
pub use module::{Function, KernelSource, SOURCES};
pub use moe::{
    Chosen, ExpertActivation, ExpertArgs, ExpertProduct, ExpertRouting, ExpertTiles, MoeOps, MoeShape, RouteArgs,
};
pub use nvml::{GpuLimits, GpuSamples, GpuSeries, GpuSummary, NvmlSampler, SeriesSummary, Throttling};
pub use nvtx::Nvtx;
pub use profiler::{NvtxChoice, Profiler, attached_profiler};
pub use rows::{EmbedArgs, NormArgs, RopeArgs, RowOps};
pub use sample::{Draw, LARGEST_VOCAB, Maxima, SampleArgs, SampleOps};
pub use skinny::{Skinny, SkinnyArgs, SkinnyInput, SkinnyOutput, SkinnyTuning};
pub use timeline::{Activity, ActivityKind, ApiCall, KernelTimeline, RecorderCost};
pub use tune::{
    BUCKETS, CHOICES_FILE, GemmChoice, GemmChoices, LinearSite, Timing, Tuned, TunedFor, bucket_index, tune,
};
pub use unfused::{UnfusedArgs, UnfusedAttention, UnfusedConfig, score_elements};
pub use weights::WeightOps;
