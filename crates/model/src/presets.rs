//! Models by name: true shapes, to be filled with random weights.

use crate::config::{DType, ModelConfig, RopeScaling};
use crate::latent::LatentAttention;
use crate::moe::{MoeConfig, SwigluClamp};
use crate::routing::RoutingMethod;
use crate::tokenizer::Tokenizer;

/// A model that can be built without any file.
#[derive(Clone, Debug)]
pub struct Preset {
    /// The name on the command line.
    pub name: &'static str,
    /// One line on what it is.
    pub summary: &'static str,
    shape: Shape,
}

/// What differs between architectures besides numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Llama,
    Qwen3,
    /// Experts in every layer: how many, and how many of them each token is sent to.
    Mixtral {
        experts: usize,
        chosen: usize,
    },
    /// The same with biases, sinks, and a window in every other layer.
    GptOss {
        experts: usize,
        chosen: usize,
        window: usize,
    },
    /// Latent attention, dense layers first, experts in groups and one that all tokens share.
    DeepSeek {
        experts: usize,
        chosen: usize,
        width: usize,
        groups: usize,
        dense: usize,
        q_lora: usize,
        kv_lora: usize,
        nope: usize,
        rotated: usize,
    },
}

/// The numbers in which presets differ.
#[derive(Clone, Debug)]
struct Shape {
    family: Family,
    dtype: DType,
    vocab: usize,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
    positions: usize,
    theta: f64,
    scaling: RopeScaling,
    bos: u32,
    eos: &'static [u32],
}

/// What most Llama-like models share; each preset overrides the rest.
const LLAMA: Shape = Shape {
    family: Family::Llama,
    dtype: DType::F32,
    vocab: 32_000,
    hidden: 0,
    intermediate: 0,
    layers: 0,
    heads: 0,
    kv_heads: 0,
    head_dim: 64,
    eps: 1e-5,
    positions: 2048,
    theta: 10_000.0,
    scaling: RopeScaling::None,
    bos: 1,
    eos: &[2],
};

/// What GPT-OSS models share.
const GPT_OSS: Shape = Shape {
    dtype: DType::Bf16,
    vocab: 201_088,
    hidden: 2880,
    intermediate: 2880,
    heads: 64,
    kv_heads: 8,
    positions: 131_072,
    theta: 150_000.0,
    scaling: RopeScaling::Yarn {
        factor: 32.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 4096,
        truncate: false,
        // 0.1 ln(32) + 1
        attention_factor: 1.346_573_6,
    },
    bos: 199_998,
    eos: &[200_002],
    ..LLAMA
};

/// What DeepSeek-V3's shapes share.
const DEEPSEEK: Shape = Shape {
    kv_heads: 1,
    eps: 1e-6,
    scaling: RopeScaling::Yarn {
        factor: 40.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 4096,
        truncate: true,
        attention_factor: 1.0,
    },
    bos: 0,
    eos: &[1],
    ..LLAMA
};

static PRESETS: [Preset; 14] = [
    Preset {
        name: "micro",
        summary: "4 small layers for demos and tests: runs in seconds on any CPU",
        // More heads than the width asks for: attention then has a visible share of a short prompt's time.
        shape: Shape {
            vocab: 512,
            hidden: 128,
            intermediate: 320,
            layers: 4,
            heads: 8,
            kv_heads: 4,
            head_dim: 32,
            ..LLAMA
        },
    },
    Preset {
        name: "moe-tiny",
        summary: "4 small layers of 8 experts, 2 per token: runs in seconds on any CPU",
        shape: Shape {
            family: Family::Mixtral { experts: 8, chosen: 2 },
            vocab: 512,
            hidden: 128,
            intermediate: 192,
            layers: 4,
            heads: 8,
            kv_heads: 4,
            head_dim: 32,
            ..LLAMA
        },
    },
    Preset {
        name: "gpt-oss-tiny",
        summary: "4 small layers as in GPT-OSS: sinks, a window in every other layer, 2 of 8 experts, clamped SwiGLU",
        shape: Shape {
            family: Family::GptOss { experts: 8, chosen: 2, window: 64 },
            dtype: DType::F32,
            vocab: 512,
            hidden: 128,
            intermediate: 128,
            layers: 4,
            heads: 8,
            kv_heads: 2,
            head_dim: 32,
            positions: 4096,
            bos: 1,
            eos: &[2],
            ..GPT_OSS
        },
    },
    Preset {
        name: "deepseek-tiny",
        summary: "4 small layers as in DeepSeek-V3: latent attention, 3 of 16 experts in groups and a shared one",
        shape: Shape {
            family: Family::DeepSeek {
                experts: 16,
                chosen: 3,
                width: 64,
                groups: 4,
                dense: 1,
                q_lora: 64,
                kv_lora: 64,
                nope: 32,
                rotated: 16,
            },
            vocab: 512,
            hidden: 128,
            intermediate: 256,
            layers: 4,
            heads: 8,
            head_dim: 80,
            positions: 4096,
            ..DEEPSEEK
        },
    },
    Preset {
        name: "llama-110m",
        summary: "a 12-layer Llama the size of GPT-2, with grouped-query attention",
        shape: Shape { hidden: 768, intermediate: 2048, layers: 12, heads: 12, kv_heads: 4, ..LLAMA },
    },
    Preset {
        name: "mixtral-small",
        summary: "a Mixtral of 140 M parameters, 64 M of them active: 8 layers of 8 experts, 2 per token",
        shape: Shape {
            family: Family::Mixtral { experts: 8, chosen: 2 },
            hidden: 512,
            intermediate: 1024,
            layers: 8,
            heads: 8,
            kv_heads: 4,
            positions: 4096,
            ..LLAMA
        },
    },
    Preset {
        name: "tinyllama-1.1b",
        summary: "TinyLlama 1.1B",
        shape: Shape {
            dtype: DType::Bf16,
            hidden: 2048,
            intermediate: 5632,
            layers: 22,
            heads: 32,
            kv_heads: 4,
            ..LLAMA
        },
    },
    Preset {
        name: "llama-2-7b",
        summary: "Llama 2 7B",
        shape: Shape {
            dtype: DType::F16,
            hidden: 4096,
            intermediate: 11_008,
            layers: 32,
            heads: 32,
            kv_heads: 32,
            head_dim: 128,
            positions: 4096,
            ..LLAMA
        },
    },
    Preset {
        name: "llama-3.1-8b",
        summary: "Llama 3.1 8B, with its rotary scaling for long contexts",
        shape: Shape {
            dtype: DType::Bf16,
            vocab: 128_256,
            hidden: 4096,
            intermediate: 14_336,
            layers: 32,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            positions: 131_072,
            theta: 500_000.0,
            scaling: RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            },
            bos: 128_000,
            eos: &[128_001, 128_008, 128_009],
            ..LLAMA
        },
    },
    Preset {
        name: "qwen3-0.6b",
        summary: "Qwen3 0.6B: q/k norm, tied head, large vocabulary",
        shape: Shape {
            family: Family::Qwen3,
            dtype: DType::Bf16,
            vocab: 151_936,
            hidden: 1024,
            intermediate: 3072,
            layers: 28,
            heads: 16,
            kv_heads: 8,
            head_dim: 128,
            eps: 1e-6,
            positions: 40_960,
            theta: 1_000_000.0,
            bos: 151_643,
            eos: &[151_645],
            ..LLAMA
        },
    },
    Preset {
        name: "gpt-oss-20b",
        summary: "GPT-OSS 20B: 21 B parameters, 3.6 B of them active, weights as floats",
        shape: Shape { family: Family::GptOss { experts: 32, chosen: 4, window: 128 }, layers: 24, ..GPT_OSS },
    },
    Preset {
        name: "gpt-oss-120b",
        summary: "GPT-OSS 120B: 117 B parameters, 5.1 B of them active, weights as floats",
        shape: Shape { family: Family::GptOss { experts: 128, chosen: 4, window: 128 }, layers: 36, ..GPT_OSS },
    },
    Preset {
        name: "deepseek-v3",
        summary: "DeepSeek-V3: 671 B parameters, 37 B of them active",
        shape: Shape {
            family: Family::DeepSeek {
                experts: 256,
                chosen: 8,
                width: 2048,
                groups: 8,
                dense: 3,
                q_lora: 1536,
                kv_lora: 512,
                nope: 128,
                rotated: 64,
            },
            dtype: DType::Bf16,
            vocab: 129_280,
            hidden: 7168,
            intermediate: 18_432,
            layers: 61,
            heads: 128,
            head_dim: 576,
            positions: 163_840,
            ..DEEPSEEK
        },
    },
    Preset {
        name: "mixtral-8x7b",
        summary: "Mixtral 8x7B: 47 B parameters, 13 B of them active",
        shape: Shape {
            family: Family::Mixtral { experts: 8, chosen: 2 },
            dtype: DType::Bf16,
            hidden: 4096,
            intermediate: 14_336,
            layers: 32,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            positions: 32_768,
            theta: 1_000_000.0,
            ..LLAMA
        },
    },
];

/// All presets.
pub fn presets() -> &'static [Preset] {
    &PRESETS
}

/// A preset by name.
pub fn preset(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}

/// What to say of the name of a model that is neither a preset nor on this disk: the nearest preset, or how to get the
/// model of a hub.
pub fn unknown_model(name: &str) -> String {
    let own = name.rsplit('/').next().unwrap_or(name).to_lowercase().replace('_', "-");
    let nearest = PRESETS
        .iter()
        .filter(|preset| own.starts_with(preset.name) || edits(&own, preset.name) <= preset.name.len() / 4)
        .min_by_key(|preset| edits(&own, preset.name));
    let on_hub =
        name.split('/').count() == 2 && name.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    match (on_hub, nearest) {
        (true, nearest) => {
            let preset = nearest.map_or(String::new(), |preset| {
                format!(", or use the preset `{}`, which has random weights of the true shapes", preset.name)
            });
            format!(
                "`{name}` is no directory here, and strobe downloads nothing: run `hf download {name} --local-dir {own}` and pass that directory{preset}"
            )
        }
        (false, Some(preset)) => {
            format!("`{name}` is neither a directory, a GGUF file nor a preset; did you mean `{}`?", preset.name)
        }
        (false, None) => {
            let names: Vec<_> = PRESETS.iter().map(|preset| preset.name).collect();
            format!("`{name}` is neither a directory, a GGUF file nor a preset; presets: {}", names.join(", "))
        }
    }
}

/// How many letters have to be put in, left out or replaced to get from one word to the other.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.chars().enumerate() {
        let mut next = vec![i + 1];
        for (j, (other, pair)) in b.iter().zip(row.windows(2)).enumerate() {
            let &[diagonal, above] = pair else { continue };
            let left = next.get(j).copied().unwrap_or(usize::MAX - 1);
            next.push((diagonal + usize::from(letter != *other)).min(above + 1).min(left + 1));
        }
        row = next;
    }
    row.last().copied().unwrap_or(0)
}

impl Preset {
    /// Its configuration, as a checkpoint of this model would give it.
    pub fn config(&self) -> ModelConfig {
        let s = &self.shape;
        let (architecture, model_type) = match s.family {
            Family::Llama => ("LlamaForCausalLM", "llama"),
            Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            Family::Mixtral { .. } => ("MixtralForCausalLM", "mixtral"),
            Family::GptOss { .. } => ("GptOssForCausalLM", "gpt_oss"),
            Family::DeepSeek { .. } => ("DeepseekV3ForCausalLM", "deepseek_v3"),
        };
        let qwen3 = s.family == Family::Qwen3;
        let gpt_oss = matches!(s.family, Family::GptOss { .. });
        let plain = |experts, chosen| MoeConfig::plain(experts, chosen, s.intermediate, RoutingMethod::TopKSoftmax);
        ModelConfig {
            architecture: architecture.to_string(),
            model_type: model_type.to_string(),
            dtype: s.dtype,
            vocab_size: s.vocab,
            hidden_size: s.hidden,
            intermediate_size: s.intermediate,
            num_hidden_layers: s.layers,
            num_attention_heads: s.heads,
            num_key_value_heads: s.kv_heads,
            head_dim: s.head_dim,
            rms_norm_eps: s.eps,
            max_position_embeddings: s.positions,
            rope_theta: s.theta,
            rope_scaling: s.scaling.clone(),
            qkv_bias: gpt_oss,
            o_bias: gpt_oss,
            mlp_bias: false,
            attention_sinks: gpt_oss,
            latent: match s.family {
                Family::DeepSeek { q_lora, kv_lora, nope, rotated, .. } => Some(LatentAttention {
                    q_lora_rank: Some(q_lora),
                    kv_lora_rank: kv_lora,
                    qk_nope_head_dim: nope,
                    qk_rope_head_dim: rotated,
                    v_head_dim: nope,
                    rope_interleave: true,
                    // YaRN's stretch for a factor of 40, twice, over the root of the width of a query.
                    scale: ((0.1 * 40f64.ln() + 1.0).powi(2) / ((nope + rotated) as f64).sqrt()) as f32,
                }),
                _ => None,
            },
            qk_norm: qwen3,
            tie_word_embeddings: qwen3,
            sliding_window: match s.family {
                Family::GptOss { window, .. } => (0..s.layers).map(|l| (l % 2 == 0).then_some(window)).collect(),
                _ => Vec::new(),
            },
            moe: match s.family {
                Family::Mixtral { experts, chosen } => Some(plain(experts, chosen)),
                Family::GptOss { experts, chosen, .. } => Some(MoeConfig {
                    router_bias: true,
                    expert_bias: true,
                    clamp: Some(SwigluClamp { alpha: 1.702, limit: 7.0 }),
                    ..plain(experts, chosen)
                }),
                Family::DeepSeek { experts, chosen, width, groups, dense, .. } => Some(MoeConfig {
                    dense_layers: (0..dense).collect(),
                    shared_intermediate_size: width,
                    router_bias: true,
                    intermediate_size: width,
                    routing: RoutingMethod::DeepSeekV3 {
                        groups,
                        topk_groups: groups / 2,
                        scale: 2.5,
                        renormalise: true,
                    },
                    ..plain(experts, chosen)
                }),
                _ => None,
            },
            bos_token_id: Some(s.bos),
            eos_token_ids: s.eos.to_vec(),
        }
    }

    /// A tokenizer that round-trips any text within the preset's vocabulary.
    pub fn tokenizer(&self) -> Tokenizer {
        Tokenizer::byte_level(self.shape.vocab)
    }
}

#[cfg(test)]
mod tests {
    use super::{edits, unknown_model};

    #[test]
    fn edits_are_counted() {
        for (a, b, count) in
            [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("tiny", "tiny", 0)]
        {
            assert_eq!((edits(a, b), edits(b, a)), (count, count), "{a} {b}");
        }
    }

    #[test]
    fn a_name_that_is_nearly_a_preset_gets_that_preset() {
        for (name, says) in [
            ("tinyllama-1b", "did you mean `tinyllama-1.1b`?"),
            ("TinyLlama_1.1B", "did you mean `tinyllama-1.1b`?"),
            ("gpt-os-20b", "did you mean `gpt-oss-20b`?"),
            ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "hf download TinyLlama/TinyLlama-1.1B-Chat-v1.0 --local-dir"),
            ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "preset `tinyllama-1.1b`"),
            ("some/model", "hf download some/model --local-dir model"),
            ("./engine", "presets: "),
            ("nothing-like-it-at-all", "presets: "),
        ] {
            assert!(unknown_model(name).contains(says), "{name}: {}", unknown_model(name));
        }
        assert!(!unknown_model("some/model").contains("preset"));
    }
}
