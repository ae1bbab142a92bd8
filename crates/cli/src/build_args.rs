//! Options that decide how an engine is built, shared by `build` and by verbs that build in memory.

use anyhow::{Result, anyhow, bail};
use clap::{Args, ValueEnum};
use strobe_engine::{BuildConfig, KvCacheType, ModelRef, Quantization};
use strobe_model::{DType, RouterSkew};

use crate::device::{Device, DeviceArgs, Needs};

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// On
    Enable,
    /// Off
    Disable,
}

impl Switch {
    /// As a boolean.
    pub(crate) fn on(self) -> bool {
        self == Switch::Enable
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum GemmPlugin {
    /// Packed weights and tuned kernels; on a GPU the faster of cuBLASLt and strobe's kernels per shape
    Auto,
    /// Plain blocked GEMM over row-major weights; on a GPU strobe's kernels only
    Disable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DTypeChoice {
    #[value(aliases = ["fp32", "f32", "float"])]
    Float32,
    #[value(aliases = ["fp16", "f16", "half"])]
    Float16,
    #[value(alias = "bf16")]
    Bfloat16,
    /// As in the checkpoint
    Auto,
}

impl DTypeChoice {
    /// The type for a checkpoint of type `own`.
    pub(crate) fn resolve(self, own: DType) -> DType {
        match self {
            DTypeChoice::Float32 => DType::F32,
            DTypeChoice::Float16 => DType::F16,
            DTypeChoice::Bfloat16 => DType::Bf16,
            DTypeChoice::Auto => own,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QuantizationChoice {
    None,
    /// e4m3 projections and activations, a scale per row; GPU only
    Fp8,
    /// 8-bit integer matrices and activations, scales per row and 256 inputs; CPU only
    Int8,
    /// 4-bit projections, scales per row and 32 inputs, computed in int8; the LM head in int8; CPU only
    Int4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvCacheDtype {
    /// As --dtype; on a CPU float16 for 16-bit types (int8 and int4 engines: bfloat16 on avx512bf16)
    Auto,
    #[value(aliases = ["fp32", "f32"])]
    Float32,
    #[value(aliases = ["fp16", "f16", "half"])]
    Float16,
    #[value(alias = "bf16")]
    Bfloat16,
    /// 8-bit integers, a scale per token and head; CPU only
    Int8,
    /// e4m3; GPU only
    Fp8,
}

impl From<QuantizationChoice> for Quantization {
    fn from(choice: QuantizationChoice) -> Quantization {
        match choice {
            QuantizationChoice::None => Quantization::None,
            QuantizationChoice::Fp8 => Quantization::Fp8,
            QuantizationChoice::Int8 => Quantization::Int8,
            QuantizationChoice::Int4 => Quantization::Int4,
        }
    }
}

impl From<KvCacheDtype> for KvCacheType {
    fn from(choice: KvCacheDtype) -> KvCacheType {
        match choice {
            KvCacheDtype::Auto => KvCacheType::Auto,
            KvCacheDtype::Float32 => KvCacheType::Float(DType::F32),
            KvCacheDtype::Float16 => KvCacheType::Float(DType::F16),
            KvCacheDtype::Bfloat16 => KvCacheType::Float(DType::Bf16),
            KvCacheDtype::Int8 => KvCacheType::Int8,
            KvCacheDtype::Fp8 => KvCacheType::Fp8,
        }
    }
}

/// Every option is optional, so that a verb can tell what was asked for.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Build options")]
pub(crate) struct BuildArgs {
    /// Weight type [default: auto]
    #[arg(long, value_enum)]
    pub dtype: Option<DTypeChoice>,
    /// Maximum sequence length, prompt plus output [default: the model's, at most 4096]
    #[arg(long, value_name = "N")]
    pub max_seq_len: Option<usize>,
    /// Tokens per KV cache block, a power of two; context chunks are multiples of it [default: 32]
    #[arg(long, value_name = "N")]
    pub tokens_per_block: Option<usize>,
    /// GEMM implementation [default: auto]
    #[arg(long, value_enum)]
    pub gemm_plugin: Option<GemmPlugin>,
    /// Fused attention in prefill; disable runs scores, softmax and values as separate ops [default: enable]
    #[arg(long, value_enum)]
    pub context_fmha: Option<Switch>,
    /// Paged KV cache; disable keeps one contiguous range per request [default: enable]
    #[arg(long, value_enum)]
    pub paged_kv_cache: Option<Switch>,
    /// Quantize matrices [default: none]
    #[arg(long, value_enum)]
    pub quantization: Option<QuantizationChoice>,
    /// KV cache type [default: auto]
    #[arg(long, value_enum)]
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Seed of a preset's random weights [default: 0]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Skew a preset's random routers: zipf:S, or a JSON file with the wanted expert loads, one list (shuffled per layer) or
    /// one list per layer
    #[arg(long, value_name = "zipf:S|FILE")]
    pub router_skew: Option<String>,
}

/// Most requests and tokens in a step on a GPU when nobody says, as TensorRT-LLM has them.
const GPU_MAX_BATCH_SIZE: usize = 2048;
const GPU_MAX_NUM_TOKENS: usize = 8192;

impl BuildArgs {
    /// The seed of random weights.
    pub(crate) fn seed(&self) -> u64 {
        self.seed.unwrap_or(0)
    }

    /// The configuration for `model`.
    pub(crate) fn config(
        &self,
        model: &ModelRef,
        batch: Option<usize>,
        tokens: Option<usize>,
        on_gpu: bool,
    ) -> BuildConfig {
        let default = BuildConfig::for_model(&model.config);
        let on = |switch: Option<Switch>| switch.is_none_or(Switch::on);
        BuildConfig {
            dtype: self.dtype.unwrap_or(DTypeChoice::Auto).resolve(default.dtype),
            max_batch_size: batch.unwrap_or(if on_gpu { GPU_MAX_BATCH_SIZE } else { default.max_batch_size }),
            max_num_tokens: tokens.unwrap_or(if on_gpu { GPU_MAX_NUM_TOKENS } else { default.max_num_tokens }),
            max_seq_len: self.max_seq_len.unwrap_or(default.max_seq_len),
            tokens_per_block: self.tokens_per_block.unwrap_or(default.tokens_per_block),
            gemm_plugin: self.gemm_plugin.is_none_or(|g| g == GemmPlugin::Auto),
            context_fmha: on(self.context_fmha),
            paged_kv_cache: on(self.paged_kv_cache),
            quantization: self.quantization.map_or(default.quantization, Into::into),
            kv_cache: self.kv_cache_dtype.map_or(default.kv_cache, Into::into),
        }
    }

    /// Whether only a CPU can run it.
    pub(crate) fn needs_cpu(&self) -> bool {
        let integers = self.quantization.is_some_and(|choice| Quantization::from(choice).is_integer());
        integers || self.kv_cache_dtype == Some(KvCacheDtype::Int8)
    }

    /// Where to run: where nobody says, what only a CPU can run goes there even if there is a GPU.
    pub(crate) fn device(&self, asked: &DeviceArgs) -> Result<Device> {
        if self.needs_cpu() && asked.device.is_none() {
            return Ok(Device::Cpu);
        }
        asked.resolve(Needs::Engine { cublaslt: self.gemm_plugin != Some(GemmPlugin::Disable) })
    }

    /// Refuse a seed where there is nothing random.
    pub(crate) fn refuse_seed_of_checkpoint(&self, model: &ModelRef) -> Result<()> {
        if self.seed.is_some() && !model.source.is_random() {
            bail!("--seed is for presets; the weights of {} come from its checkpoint", model.name);
        }
        Ok(())
    }

    /// Skew the routers of a model of random weights.
    pub(crate) fn skew_routers(&self, model: &mut ModelRef) -> Result<()> {
        let Some(asked) = &self.router_skew else { return Ok(()) };
        if !model.source.is_random() {
            bail!("--router-skew is for presets; the routers of {} come from its checkpoint", model.name);
        }
        let (hidden, layers) = (model.config.hidden_size, model.config.num_hidden_layers);
        let Some(moe) = &mut model.config.moe else {
            bail!("--router-skew is for MoE models; {} has no experts", model.name);
        };
        let skew =
            RouterSkew::parse(asked, moe, hidden, layers).map_err(|problem| anyhow!("--router-skew {problem}"))?;
        moe.router_skew = Some(skew);
        Ok(())
    }

    /// Refuse build options where an engine is built already.
    pub(crate) fn refuse_with_engine_dir(&self) -> Result<()> {
        let set = [
            ("--dtype", self.dtype.is_some()),
            ("--max-seq-len", self.max_seq_len.is_some()),
            ("--tokens-per-block", self.tokens_per_block.is_some()),
            ("--gemm-plugin", self.gemm_plugin.is_some()),
            ("--context-fmha", self.context_fmha.is_some()),
            ("--paged-kv-cache", self.paged_kv_cache.is_some()),
            ("--quantization", self.quantization.is_some()),
            ("--kv-cache-dtype", self.kv_cache_dtype.is_some()),
            ("--seed", self.seed.is_some()),
            ("--router-skew", self.router_skew.is_some()),
        ];
        if let Some((name, _)) = set.iter().find(|(_, set)| *set) {
            bail!(
                "{name} is decided when an engine is built; rebuild with `strobe build`, or use --model instead of --engine-dir"
            );
        }
        Ok(())
    }
}
