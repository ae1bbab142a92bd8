//! What `config.json` says about experts, family by family.

use serde_json::Value;

use crate::config_json::{Family, Fields};
use crate::error::ModelError;
use crate::moe::{MoeConfig, SwigluClamp};
use crate::routing::RoutingMethod;

/// The experts of a model, or `None` for a family without.
pub(crate) fn experts(
    fields: &Fields<'_>,
    family: Family,
    layers: usize,
    intermediate_size: usize,
) -> Result<Option<MoeConfig>, ModelError> {
    let count = match fields.size("num_local_experts")? {
        None => fields.size("num_experts")?,
        given => given,
    };
    let chosen = fields.size("num_experts_per_tok")?;
    let config = match family {
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => return Ok(None),
        Family::Mixtral => {
            MoeConfig::plain(count.unwrap_or(8), chosen.unwrap_or(2), intermediate_size, RoutingMethod::TopKSoftmax)
        }
        Family::Qwen3Moe => {
            let routing = RoutingMethod::SoftmaxTopK { renormalise: fields.flag("norm_topk_prob")?.unwrap_or(false) };
            let width = fields.size("moe_intermediate_size")?.unwrap_or(768);
            let dense_layers = qwen_dense_layers(fields, layers)?;
            MoeConfig { dense_layers, ..MoeConfig::plain(count.unwrap_or(128), chosen.unwrap_or(8), width, routing) }
        }
        Family::DeepseekV3 => {
            let routing = RoutingMethod::DeepSeekV3 {
                groups: fields.size("n_group")?.unwrap_or(8),
                topk_groups: fields.size("topk_group")?.unwrap_or(4),
                scale: fields.number("routed_scaling_factor")?.unwrap_or(2.5) as f32,
                renormalise: fields.flag("norm_topk_prob")?.unwrap_or(true),
            };
            let count = match fields.size("n_routed_experts")? {
                None => count.unwrap_or(256),
                Some(given) => given,
            };
            let width = fields.size("moe_intermediate_size")?.unwrap_or(2048);
            let dense = fields.whole("first_k_dense_replace")?.unwrap_or(3).min(layers);
            MoeConfig {
                dense_layers: (0..dense).collect(),
                shared_intermediate_size: fields.whole("n_shared_experts")?.unwrap_or(1).saturating_mul(width),
                router_bias: true,
                ..MoeConfig::plain(count, chosen.unwrap_or(8), width, routing)
            }
        }
        Family::GptOss => MoeConfig {
            router_bias: true,
            expert_bias: true,
            clamp: Some(SwigluClamp {
                alpha: fields.number("swiglu_alpha")?.unwrap_or(1.702) as f32,
                limit: fields.number("swiglu_limit")?.unwrap_or(7.0) as f32,
            }),
            ..MoeConfig::plain(count.unwrap_or(128), chosen.unwrap_or(4), intermediate_size, RoutingMethod::TopKSoftmax)
        },
    };
    // A model of dense layers alone has none, whatever its class.
    Ok((config.dense_layers.len() < layers).then_some(config))
}

/// The layers named in `mlp_only_layers`, and those that `decoder_sparse_step` skips.
fn qwen_dense_layers(fields: &Fields<'_>, layers: usize) -> Result<Vec<usize>, ModelError> {
    let step = fields.size("decoder_sparse_step")?.unwrap_or(1);
    let named = match fields.get("mlp_only_layers") {
        None => &[][..],
        Some(Value::Array(list)) => list,
        Some(other) => return Err(fields.wrong("mlp_only_layers", "a list of layers", other)),
    };
    if let Some(odd) = named.iter().find(|layer| layer.as_u64().is_none()) {
        return Err(fields.wrong("mlp_only_layers", "a list of layers", odd));
    }
    let is_named = |layer: usize| named.iter().any(|l| l.as_u64() == Some(layer as u64));
    Ok((0..layers).filter(|&layer| is_named(layer) || !(layer + 1).is_multiple_of(step)).collect())
}
