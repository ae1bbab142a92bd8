//! What an engine keeps in fewer bits than its `dtype`: the matrices, and the cache.

use strobe_kernels_cpu::{KvType, Tier};
use strobe_model::program::{MatrixType, Operands};
use strobe_model::{DType, ModelConfig};

use crate::engine_config::BuildConfig;
use crate::error::EngineError;

const NEEDS_GPU: &str = "needs a GPU: run it with --device cuda, or build without it";

/// How the layers' projections (and on a CPU the head) are stored and multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quantization {
    /// In the engine's `dtype`.
    #[default]
    None,
    /// Weights and their inputs in e4m3 with a scale per row (GPUs only).
    Fp8,
    /// Weights and their inputs in 8-bit integers with a scale per row and 256 inputs (CPUs only).
    Int8,
    /// Weights in 4 bits with a scale per row and 32 inputs, the head as with `Int8`; products of 8-bit integers (CPUs
    /// only).
    Int4,
}

impl Quantization {
    /// All of them.
    pub const ALL: [Quantization; 4] = [Quantization::None, Quantization::Fp8, Quantization::Int8, Quantization::Int4];

    /// As `--quantization` names it.
    pub fn name(self) -> &'static str {
        match self {
            Quantization::None => "none",
            Quantization::Fp8 => "fp8",
            Quantization::Int8 => "int8",
            Quantization::Int4 => "int4",
        }
    }

    /// As `quant_algo` names it. TensorRT-LLM knows `FP8` and `INT8`; its names for 4-bit weights all say 16-bit inputs or a
    /// method that is not used here.
    pub fn algorithm(self) -> Option<&'static str> {
        match self {
            Quantization::None => None,
            Quantization::Fp8 => Some("FP8"),
            Quantization::Int8 => Some("INT8"),
            Quantization::Int4 => Some("W4A8"),
        }
    }

    /// Whether matrices are multiplied as integers.
    pub fn is_integer(self) -> bool {
        matches!(self, Quantization::Int8 | Quantization::Int4)
    }
}

/// Type of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvCacheType {
    /// What suits the engine's `dtype` on the device that runs it.
    #[default]
    Auto,
    /// This one.
    Float(DType),
    /// 8-bit integers with a scale per token and head (CPUs only).
    Int8,
    /// e4m3 (GPUs only).
    Fp8,
}

impl KvCacheType {
    /// Those that have a name of their own.
    pub const ALL: [KvCacheType; 6] = [
        KvCacheType::Auto,
        KvCacheType::Float(DType::F32),
        KvCacheType::Float(DType::F16),
        KvCacheType::Float(DType::Bf16),
        KvCacheType::Int8,
        KvCacheType::Fp8,
    ];

    /// As `--kv-cache-dtype` names it.
    pub fn name(self) -> &'static str {
        match self {
            KvCacheType::Auto => "auto",
            KvCacheType::Float(dtype) => dtype.name(),
            KvCacheType::Int8 => "int8",
            KvCacheType::Fp8 => "fp8",
        }
    }

    /// As `kv_cache_quant_algo` names it.
    pub fn algorithm(self) -> Option<&'static str> {
        match self {
            KvCacheType::Auto | KvCacheType::Float(_) => None,
            KvCacheType::Int8 => Some("INT8"),
            KvCacheType::Fp8 => Some("FP8"),
        }
    }
}

impl BuildConfig {
    /// Refuse types that no device has kernels for, alone or together.
    pub(crate) fn check_types(&self, model: &ModelConfig) -> Result<(), EngineError> {
        // CPUs have no e4m3 at all, so what GPUs lack here nobody has.
        let (matrices, cache) = (self.quantization == Quantization::Fp8, self.kv_cache == KvCacheType::Fp8);
        if matrices && model.moe.is_some() {
            let problem = "has no kernels for experts; use --quantization none";
            return Err(EngineError::option("--quantization fp8", problem));
        }
        if matrices && model.latent.is_some() {
            let problem = "has no kernels for latent attention; use --quantization none";
            return Err(EngineError::option("--quantization fp8", problem));
        }
        if cache && model.latent.is_some() {
            let problem = "has no kernels for latent attention; use --kv-cache-dtype auto";
            return Err(EngineError::option("--kv-cache-dtype fp8", problem));
        }
        if self.check_cpu().is_err() && self.check_gpu().is_err() {
            let option = format!("--kv-cache-dtype {}", self.kv_cache.name());
            let problem = format!(
                "runs on no device together with --quantization {} in an engine of {}: one of them is for GPUs only, the other for CPUs; use --kv-cache-dtype auto",
                self.quantization.name(),
                self.dtype
            );
            return Err(EngineError::option(option, problem));
        }
        Ok(())
    }

    /// Refuse what only a GPU can run.
    pub fn check_cpu(&self) -> Result<(), EngineError> {
        if self.quantization == Quantization::Fp8 {
            return Err(EngineError::option("--quantization fp8", NEEDS_GPU));
        }
        self.cpu_kv_type(Tier::Scalar).map(|_| ())
    }

    /// Type of the cache on a CPU of that tier.
    pub fn cpu_kv_type(&self, tier: Tier) -> Result<KvType, EngineError> {
        let dtype = match self.kv_cache {
            KvCacheType::Auto => self.auto_kv_dtype(tier),
            KvCacheType::Float(dtype) => dtype,
            KvCacheType::Int8 => return Ok(KvType::Int8),
            KvCacheType::Fp8 => return Err(EngineError::option("--kv-cache-dtype fp8", NEEDS_GPU)),
        };
        Ok(match dtype {
            DType::F32 => KvType::F32,
            DType::F16 => KvType::F16,
            DType::Bf16 => KvType::Bf16,
        })
    }

    /// A bfloat16 engine keeps float16: the same bytes with eight times the resolution, and keys and values stay far inside
    /// its range (the kernels saturate, should one not). An engine of integers, which rounds the inputs of its products to
    /// 8 bits, keeps bfloat16 on a CPU that multiplies pairs of them: attention is nearly twice as fast then.
    fn auto_kv_dtype(&self, tier: Tier) -> DType {
        match self.dtype {
            DType::F32 => DType::F32,
            _ if self.quantization.is_integer() && tier.multiplies_pairs() => DType::Bf16,
            DType::F16 | DType::Bf16 => DType::F16,
        }
    }

    /// Refuse what only a CPU can run.
    pub fn check_gpu(&self) -> Result<(), EngineError> {
        if self.quantization.is_integer() {
            let option = format!("--quantization {}", self.quantization.name());
            return Err(EngineError::option(option, "runs on CPUs only: use --device cpu, or fp8 on a GPU"));
        }
        let own = matches!(self.kv_cache, KvCacheType::Float(dtype) if dtype == self.dtype);
        if own || matches!(self.kv_cache, KvCacheType::Auto | KvCacheType::Fp8) {
            return Ok(());
        }
        let option = format!("--kv-cache-dtype {}", self.kv_cache.name());
        let problem = format!("is for CPUs in an engine of {}: use auto or fp8 on a GPU", self.dtype);
        Err(EngineError::option(option, problem))
    }

    /// The types of the weights, for reports.
    pub fn describe_weights(&self) -> String {
        let quantized = match self.quantization {
            Quantization::None => "",
            Quantization::Fp8 => ", projections in e4m3",
            Quantization::Int8 => ", matrices in int8",
            Quantization::Int4 => ", projections in int4, head in int8",
        };
        format!("{}{quantized}", self.dtype)
    }

    /// Type of the cache on a CPU, by name.
    pub fn cpu_kv_cache_name(&self, tier: Tier) -> &'static str {
        match self.kv_cache {
            KvCacheType::Auto => self.auto_kv_dtype(tier).name(),
            other => other.name(),
        }
    }

    /// Type of the cache on a GPU, by name.
    pub fn gpu_kv_cache_name(&self) -> &'static str {
        match self.kv_cache {
            KvCacheType::Auto => self.dtype.name(),
            other => other.name(),
        }
    }

    /// What a step reads and writes on a CPU.
    pub fn cpu_operands(&self) -> Operands {
        let kv = self.cpu_kv_type(Tier::Scalar).unwrap_or(KvType::F32); // all tiers keep as many bytes
        let plain =
            Operands { kv_scale: kv.scale_bytes() as u64, ..Operands::plain(self.dtype.bytes(), kv.bytes(), 4) };
        let integers = |layers| Operands { layers, head: MatrixType::Int8, codes: MatrixType::Int8Rows, ..plain };
        match self.quantization {
            Quantization::None | Quantization::Fp8 => plain,
            Quantization::Int8 => integers(MatrixType::Int8),
            Quantization::Int4 => integers(MatrixType::Int4),
        }
    }

    /// What a step reads and writes on a GPU.
    pub fn gpu_operands(&self, model: &ModelConfig) -> Operands {
        let element = self.dtype.bytes();
        let kv = if self.kv_cache == KvCacheType::Fp8 { 1 } else { element };
        let kv_parts = if model.latent.is_some() { 1 } else { 2 };
        let plain = Operands { kv_parts, ..Operands::plain(element, kv, element) };
        match self.quantization {
            // Head and table stay as they are, see `cuda::weights::is_fp8`.
            Quantization::Fp8 => Operands { layers: MatrixType::Fp8, codes: MatrixType::Fp8, ..plain },
            Quantization::None | Quantization::Int8 | Quantization::Int4 => plain,
        }
    }

    /// Bytes that the keys and values of one token take over all layers of a model.
    pub fn kv_bytes_per_token(&self, model: &ModelConfig, on_gpu: bool) -> u64 {
        let on_gpu = on_gpu || self.check_cpu().is_err();
        let operands = if on_gpu { self.gpu_operands(model) } else { self.cpu_operands() };
        let head = model.head_dim as u64 * operands.kv + operands.kv_scale;
        operands.kv_parts * (model.num_hidden_layers * model.num_key_value_heads) as u64 * head
    }
}
