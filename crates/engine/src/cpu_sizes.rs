//! How much room the CPU backend's buffers take for a step.

use strobe_kernels_cpu::{ExpertPairs, KvGeometry, QuantRows, Tier};
use strobe_model::program::ProgramOptions;
use strobe_model::{ModelConfig, MoeConfig};

use crate::engine::CacheSize;
use crate::engine_config::BuildConfig;
use crate::engine_dir::LoadedModel;
use crate::error::EngineError;
use crate::step::StepLimits;
use crate::{latent, memory};

/// The widest input of a layer's product, but for activated values.
pub(crate) fn widest_input(config: &ModelConfig) -> usize {
    let latent = config.latent.map_or(0, |latent| latent.kv_lora_rank.max(latent.q_lora_rank.unwrap_or(0)));
    config.hidden_size.max(config.num_attention_heads * config.head_dim).max(latent)
}

/// Rows of the largest product of a step.
pub(crate) fn widest_step(config: &ModelConfig, limits: StepLimits) -> usize {
    let pairs = config.moe.as_ref().map_or(1, |moe| moe.experts_per_token);
    (limits.tokens * pairs).max(limits.sampled)
}

/// A kind of feed-forward block.
pub(crate) struct FeedForward {
    /// Gates, and activated values.
    pub(crate) width: usize,
    /// How many of them a token passes.
    pub(crate) per_token: usize,
}

/// The feed-forward blocks that a model's layers have: dense ones, experts, and what experts share.
pub(crate) fn feed_forwards(config: &ModelConfig) -> impl Iterator<Item = FeedForward> {
    let moe = config.moe.as_ref();
    let dense = moe.is_none_or(|moe| !moe.dense_layers.is_empty()).then_some((config.intermediate_size, 1));
    let experts = moe.map(|moe| (moe.intermediate_size, moe.experts_per_token));
    let shared = moe.map(|moe| (moe.shared_intermediate_size, 1)).filter(|(width, _)| *width > 0);
    let blocks = [dense, experts, shared].into_iter().flatten();
    blocks.map(|(width, per_token)| FeedForward { width, per_token })
}

/// Activated values of a token: of its dense block, or of all its experts.
pub(crate) fn activated_width(config: &ModelConfig) -> usize {
    feed_forwards(config).map(|block| block.width * block.per_token).max().unwrap_or(0)
}

/// Gates and ups of a token that are kept in memory: none of those that their product activates.
pub(crate) fn gate_up_width(config: &ModelConfig, program: ProgramOptions) -> usize {
    let kept = feed_forwards(config).filter(|block| !program.activates(block.width));
    kept.map(|block| 2 * block.width * block.per_token).max().unwrap_or(0)
}

/// Bytes of what only a model of experts has.
pub(crate) fn expert_bytes(config: &ModelConfig, moe: &MoeConfig, tokens: usize) -> usize {
    let floats = tokens * (moe.num_experts + moe.experts_per_token * config.hidden_size);
    4 * floats + ExpertPairs::bytes_of(moe.num_experts, moe.experts_per_token, tokens)
}

/// Bytes of the score matrix that unfused attention writes to memory.
pub(crate) fn unfused_score_bytes(config: &ModelConfig, limits: StepLimits) -> usize {
    config.num_attention_heads * limits.tokens * limits.positions * 4
}

/// Bytes that a step of `limits` needs besides weights and cache: activations, logits, block tables, rotary tables.
pub(crate) fn activation_bytes(config: &ModelConfig, limits: StepLimits, build: &BuildConfig, tier: Tier) -> u64 {
    let [tokens, sampled, requests, positions] =
        [limits.tokens, limits.sampled, limits.requests, limits.positions].map(|n| n as u64);
    let heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim;
    let codes = build.quantization.is_integer();
    let gate_up = gate_up_width(config, build.program_options(Some(tier)));
    let inter = gate_up + if codes { 0 } else { activated_width(config) };
    let width = (3 * config.hidden_size + heads + inter) as u64;
    let rows = tokens * width + sampled * (config.hidden_size + config.vocab_size) as u64;
    let tables =
        2 * requests * positions.div_ceil(build.cache_block_tokens() as u64) + positions * config.head_dim as u64;
    let scores = if build.context_fmha { 0 } else { unfused_score_bytes(config, limits) as u64 };
    let codes = if codes {
        let activated = feed_forwards(config).map(|f| QuantRows::bytes_of(limits.tokens * f.per_token, f.width));
        let inputs = QuantRows::bytes_of(widest_step(config, limits), widest_input(config));
        (inputs + activated.max().unwrap_or(0)) as u64
    } else {
        0
    };
    let experts = config.moe.as_ref().map_or(0, |moe| expert_bytes(config, moe, limits.tokens) as u64);
    let latent = latent::bytes(config, limits.tokens, build.quantization.is_integer()) as u64;
    (rows + tables) * 4 + scores + codes + experts + latent
}

/// Blocks of the cache, after checking that they fit the memory of this machine.
pub(crate) fn cache_blocks(
    model: &LoadedModel,
    asked: CacheSize,
    limits: StepLimits,
    tier: Tier,
) -> Result<usize, EngineError> {
    let build = &model.config.build;
    let config = &model.config.model;
    let block_tokens = build.cache_block_tokens();
    let geometry = KvGeometry {
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        tokens_per_block: block_tokens,
        blocks: 1,
        kind: build.cpu_kv_type(tier)?,
    };
    let block_bytes = geometry.bytes_per_layer() as u64 * config.num_hidden_layers as u64;
    let most = limits.requests * build.max_seq_len.div_ceil(block_tokens);
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    // Mapped weights count as available memory until they are read, so they are set aside as well.
    let mapped = if model.weights.is_mapped() { model.weights.total_bytes() } else { 0 };
    let activations = activation_bytes(config, limits, build, tier);
    let available = memory::available().map_or(u64::MAX, |available| available.bytes);
    let free = available.saturating_sub(mapped.saturating_add(activations));
    let blocks = match asked {
        CacheSize::Blocks(blocks) => blocks,
        CacheSize::FreeFraction(fraction) => ((free as f64 * fraction / block_bytes as f64) as usize).clamp(1, most),
    };
    let needed = (blocks as u64).saturating_mul(block_bytes);
    if needed > free {
        return Err(EngineError::Memory {
            what: "this engine".into(),
            arithmetic: format!(
                "{blocks} KV cache blocks of {block_bytes} bytes = {:.1} GiB, activations {:.1} GiB, mapped weights {:.1} GiB, {:.1} GiB available",
                gib(needed),
                gib(activations),
                gib(mapped),
                gib(available)
            ),
            remedy: "use a smaller model or cache, or lower --max-batch-size, --max-num-tokens or --max-seq-len".into(),
        });
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_and_ups_take_room_only_where_they_are_kept() {
        let options = |activated_multiple: Option<usize>| ProgramOptions {
            context_fmha: true,
            own_table: false,
            activated_multiple,
        };
        // Dense blocks, experts, and experts beside dense and shared blocks.
        for name in ["micro", "moe-tiny", "deepseek-tiny"] {
            let config = strobe_model::preset(name).unwrap().config();
            let widest = activated_width(&config);
            assert_eq!(gate_up_width(&config, options(None)), 2 * widest, "{name}");
            assert_eq!(gate_up_width(&config, options(Some(1))), 0, "{name}");
        }
        let mut config = strobe_model::preset("deepseek-tiny").unwrap().config();
        config.intermediate_size = 33;
        assert_eq!(gate_up_width(&config, options(Some(32))), 66, "only dense blocks are left");
    }
}
