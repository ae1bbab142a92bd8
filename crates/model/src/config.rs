//! What a model is: its shapes and constants, independent of where they were read from.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::ModelError;
use crate::latent::LatentAttention;
use crate::moe::MoeConfig;
use crate::weights::{LayerWeight, WeightId, WeightInfo, weight_list};

/// The architectures this crate can describe, by the names `config.json` uses.
pub const SUPPORTED_ARCHITECTURES: [&str; 8] = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
];

/// The floating-point types weights and caches are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DType {
    /// 32-bit IEEE float.
    #[serde(rename = "float32")]
    F32,
    /// 16-bit IEEE float.
    #[serde(rename = "float16")]
    F16,
    /// The upper half of a 32-bit float.
    #[serde(rename = "bfloat16")]
    Bf16,
}

impl DType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }

    /// The name in `config.json`, on command lines and in reports: `float32`, `float16`, `bfloat16`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::F16 => "float16",
            DType::Bf16 => "bfloat16",
        }
    }

    /// The name in a safetensors header: `F32`, `F16`, `BF16`.
    pub fn safetensors_name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::Bf16 => "BF16",
        }
    }

    /// The inverse of [`DType::name`].
    pub fn from_name(name: &str) -> Option<DType> {
        [DType::F32, DType::F16, DType::Bf16].into_iter().find(|d| d.name() == name)
    }

    /// The inverse of [`DType::safetensors_name`].
    pub fn from_safetensors_name(name: &str) -> Option<DType> {
        [DType::F32, DType::F16, DType::Bf16].into_iter().find(|d| d.safetensors_name() == name)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// How the rotary frequencies are stretched for contexts longer than those trained on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Plain rotary embeddings.
    None,
    /// All frequencies divided by one factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1's rule: low frequencies divided, high ones kept, a smooth passage between.
    Llama3 {
        /// The divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context length of the first training.
        original_max_position_embeddings: usize,
    },
    /// YaRN: high frequencies kept, low ones divided, a straight passage between, and all rotations stretched.
    Yarn {
        /// The divisor of the low frequencies.
        factor: f64,
        /// Turns within the original context above which a frequency is kept.
        beta_fast: f64,
        /// Turns below which it is divided.
        beta_slow: f64,
        /// The context length of the first training.
        original_max_position_embeddings: usize,
        /// Whether the passage begins and ends at whole pairs of elements.
        truncate: bool,
        /// What cosines and sines are multiplied by.
        attention_factor: f32,
    },
    /// Every frequency divided by a factor of its own, as GGUF files store whatever rule there was.
    Factors {
        /// The divisors, one per pair of elements of a head.
        factors: Vec<f32>,
    },
}

/// A Llama-like decoder: every number needed to lay out its weights and run it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// The class name in `config.json`, e.g. `LlamaForCausalLM`.
    pub architecture: String,
    /// The family name in `config.json`, e.g. `llama`.
    pub model_type: String,
    /// The dtype the checkpoint's matrices are stored in.
    pub dtype: DType,
    /// Rows of the embedding table and of the output head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward block.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of one head (even). Not always `hidden_size / num_attention_heads`.
    pub head_dim: usize,
    /// The epsilon inside every RMS norm.
    pub rms_norm_eps: f64,
    /// The longest context the model was made for.
    pub max_position_embeddings: usize,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// Their stretching for long contexts.
    pub rope_scaling: RopeScaling,
    /// Whether the q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub o_bias: bool,
    /// Whether gate, up and down projections have biases.
    pub mlp_bias: bool,
    /// Whether each q and k head passes an RMS norm before the rotation (Qwen3).
    pub qk_norm: bool,
    /// Whether each query head has a sink: a score that takes its part of the softmax and gives no value (GPT-OSS).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub attention_sinks: bool,
    /// Latent attention, where the model has it; `head_dim` is then the width of a key in the cache, of which there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<LatentAttention>,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// The attention window of each layer: a query sees itself and the `window - 1` positions before it.
    /// Empty: no layer has one.
    pub sliding_window: Vec<Option<usize>>,
    /// The experts that stand in place of the feed-forward block, if the model has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe: Option<MoeConfig>,
    /// The token a text begins with, if the model has one.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text; possibly none.
    pub eos_token_ids: Vec<u32>,
}

fn is_of_experts(weight: &WeightInfo) -> bool {
    matches!(weight.id, WeightId::Layer(_, LayerWeight::ExpertGateUp | LayerWeight::ExpertDown))
}

impl ModelConfig {
    /// Reads `config.json` of a Hugging Face model directory.
    ///
    /// Where the file does not say which dtype the weights have, the checkpoint beside it is asked.
    pub fn from_dir(dir: &Path) -> Result<ModelConfig, ModelError> {
        crate::config_json::read_dir(dir)
    }

    /// Reads the text of a `config.json`; `origin` is the file named in errors.
    pub fn from_json(text: &str, origin: &Path) -> Result<ModelConfig, ModelError> {
        crate::config_json::parse(text, origin).map(|parsed| parsed.config)
    }

    /// Tables of cosines and sines, each `[positions][head_dim / 2]`, with the rounding of `transformers`
    /// (frequencies and angles in f32).
    pub fn rope_tables(&self, positions: usize) -> (Vec<f32>, Vec<f32>) {
        crate::rope::tables(self, positions)
    }

    /// The attention window of a layer, or `None` where it sees everything before it.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.get(layer).copied().flatten()
    }

    /// The experts of a layer, or `None` where it has a dense feed-forward block.
    pub fn experts(&self, layer: usize) -> Option<&MoeConfig> {
        self.moe.as_ref().filter(|moe| moe.in_layer(layer))
    }

    /// Width of the dense feed-forward block of a layer, or of what its experts share.
    pub fn dense_width(&self, layer: usize) -> usize {
        self.experts(layer).map_or(self.intermediate_size, |moe| moe.shared_intermediate_size)
    }

    /// Width of the input of attention's output projection.
    pub fn attention_width(&self) -> usize {
        self.num_attention_heads * self.latent.map_or(self.head_dim, |latent| latent.v_head_dim)
    }

    /// Number of parameters; a tied table counts once.
    pub fn parameter_count(&self) -> u64 {
        weight_list(self).iter().map(|w| w.elements()).sum()
    }

    /// Parameters of all routed experts.
    pub fn routed_expert_parameters(&self) -> u64 {
        weight_list(self).iter().filter(|w| is_of_experts(w)).map(|w| w.elements()).sum()
    }

    /// Parameters that take part in a matrix product for each token: every projection, those of the experts it is sent
    /// to, and the output head, but not the embedding lookup, norms or biases. Twice this is the floating-point work per
    /// token outside attention.
    pub fn active_parameters_per_token(&self) -> u64 {
        let chosen = self.moe.as_ref().map_or(0, |moe| moe.experts_per_token);
        weight_list(self)
            .iter()
            .filter(|w| !w.vector && w.id != WeightId::Embed)
            .map(|w| if is_of_experts(w) { w.elements() / w.experts as u64 * chosen as u64 } else { w.elements() })
            .sum()
    }

    /// Bytes that the keys and values of one token take over all layers.
    pub fn kv_bytes_per_token(&self, dtype: DType) -> u64 {
        2 * self.num_hidden_layers as u64
            * self.num_key_value_heads as u64
            * self.head_dim as u64
            * dtype.bytes() as u64
    }

    /// Checks every number and every relation between them. A configuration that passes can be laid out without
    /// arithmetic overflow.
    pub fn validate(&self) -> Result<(), ModelError> {
        self.validate_from(Path::new("model configuration"))
    }

    /// [`ModelConfig::validate`] with the file to name in errors.
    pub(crate) fn validate_from(&self, origin: &Path) -> Result<(), ModelError> {
        self.first_problem().map_err(|(field, problem)| ModelError::config(origin, field, problem))
    }

    fn first_problem(&self) -> Result<(), (&'static str, String)> {
        // The bounds are far above any known model; their products stay inside 64 bits.
        let sizes: [(&str, usize, usize); 8] = [
            ("vocab_size", self.vocab_size, 1 << 24),
            ("hidden_size", self.hidden_size, 1 << 18),
            ("intermediate_size", self.intermediate_size, 1 << 20),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 12),
            ("num_attention_heads", self.num_attention_heads, 1 << 12),
            ("num_key_value_heads", self.num_key_value_heads, 1 << 12),
            ("head_dim", self.head_dim, 1 << 12),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 30),
        ];
        for (field, value, most) in sizes {
            if value == 0 || value > most {
                return Err((field, format!("must be between 1 and {most}, found {value}")));
            }
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return Err((
                "num_key_value_heads",
                format!(
                    "must divide num_attention_heads ({}), found {}",
                    self.num_attention_heads, self.num_key_value_heads
                ),
            ));
        }
        if let Some(latent) = &self.latent {
            latent.first_problem()?;
            if (self.head_dim, self.num_key_value_heads) != (latent.key_width(), 1) {
                let problem = format!("must be {} in one head for latent attention", latent.key_width());
                return Err(("head_dim", format!("{problem}, found {}", self.head_dim)));
            }
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(("head_dim", format!("must be even for rotary embeddings, found {}", self.head_dim)));
        }
        in_range("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0)?;
        in_range("rope_theta", self.rope_theta, 0.0, 1e15)?;
        self.rope_problem()?;
        if !self.sliding_window.is_empty() && self.sliding_window.len() != self.num_hidden_layers {
            return Err((
                "sliding_window",
                format!("{} layers have one, but there are {}", self.sliding_window.len(), self.num_hidden_layers),
            ));
        }
        if self.sliding_window.contains(&Some(0)) {
            return Err(("sliding_window", "must be at least 1 or null, found 0".to_string()));
        }
        if let Some(moe) = &self.moe {
            moe.first_problem(self.num_hidden_layers)?;
        }
        if !SUPPORTED_ARCHITECTURES.contains(&self.architecture.as_str()) {
            return Err((
                "architecture",
                format!("`{}` is not supported; supported: {}", self.architecture, SUPPORTED_ARCHITECTURES.join(", ")),
            ));
        }
        Ok(())
    }

    fn rope_problem(&self) -> Result<(), (&'static str, String)> {
        match self.rope_scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Factors { ref factors } => {
                if factors.len() != self.head_dim / 2 {
                    let problem = format!("must be {} numbers, found {}", self.head_dim / 2, factors.len());
                    return Err(("rope_scaling.factors", problem));
                }
                factors.iter().try_for_each(|factor| in_range("rope_scaling.factors", f64::from(*factor), 0.0, 1e9))
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_max_position_embeddings: original,
                attention_factor,
                ..
            } => {
                in_range("rope_scaling.factor", factor, 0.0, 1e9)?;
                in_range("rope_scaling.beta_fast", beta_fast, 0.0, 1e9)?;
                in_range("rope_scaling.beta_slow", beta_slow, 0.0, 1e9)?;
                in_range("rope_scaling.attention_factor", f64::from(attention_factor), 0.0, 1e9)?;
                original_in_range(original)
            }
            RopeScaling::Linear { factor } => in_range("rope_scaling.factor", factor, 0.0, 1e9),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original,
            } => {
                in_range("rope_scaling.factor", factor, 0.0, 1e9)?;
                in_range("rope_scaling.low_freq_factor", low_freq_factor, 0.0, 1e9)?;
                in_range("rope_scaling.high_freq_factor", high_freq_factor, 0.0, 1e9)?;
                if high_freq_factor <= low_freq_factor {
                    return Err((
                        "rope_scaling.high_freq_factor",
                        format!("must be above low_freq_factor ({low_freq_factor}), found {high_freq_factor}"),
                    ));
                }
                original_in_range(original)
            }
        }
    }
}

fn original_in_range(original: usize) -> Result<(), (&'static str, String)> {
    if original == 0 || original > 1 << 30 {
        let problem = format!("must be between 1 and {}, found {original}", 1 << 30);
        return Err(("rope_scaling.original_max_position_embeddings", problem));
    }
    Ok(())
}

/// NaN fails as well: it is not above anything.
fn in_range(field: &'static str, value: f64, above: f64, most: f64) -> Result<(), (&'static str, String)> {
    if value > above && value <= most {
        return Ok(());
    }
    Err((field, format!("must be a number above {above} and at most {most}, found {value}")))
}
