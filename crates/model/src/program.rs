//! A model as a short list of ops over named buffers and weights.
//!
//! The list knows shapes and order and nothing of batching: how many rows a step has, and which keys each row
//! attends to, arrive in a [`StepShape`]. Engines run the list node by node through one seam, and everything that
//! needs to know what an op costs (trace, roofline, MFU, simulator) asks [`Node::cost`].

use crate::config::ModelConfig;
use crate::latent::LatentAttention;
use crate::weights::{LayerWeight, WeightId};

pub use crate::cost::{
    Cost, Input, MatrixType, Operands, Output, Pass, Ran, SpanShape, StepShape, StepWork, step_work,
};

/// Activations of a step, each `[rows][width]` and owned by the backend, which also chooses their type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buf {
    /// The residual stream, one row per packed token.
    Hidden,
    /// Normalised input of the next projection.
    Normed,
    /// Fused q, k and v of each token.
    Qkv,
    /// Attention output, heads concatenated.
    Attn,
    /// The queries' latent vectors.
    QLatent,
    /// The same, normalised.
    QLatentNormed,
    /// Queries of latent attention as they are projected, and later each head's values.
    PerHead,
    /// Latent vector of keys and values, and the rotated part of keys.
    KvLatent,
    /// Output of a projection on its way back into the residual stream.
    Proj,
    /// Fused gate and up projections.
    GateUp,
    /// Activated hidden of the MLP.
    Act,
    /// One logit per token and expert.
    RouterLogits,
    /// Fused gate and up projections of each pair of token and expert, sorted by expert.
    ExpertGateUp,
    /// Activated hidden of each pair.
    ExpertAct,
    /// What the expert of each pair answers.
    ExpertOut,
    /// The rows whose logits are wanted, gathered.
    Sampled,
    /// One row of logits per sampled row.
    Logits,
}

/// Which rows of the step an attention op works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Context and generation rows in one pass.
    All,
    /// Only rows of requests whose prompt is being computed.
    Context,
    /// Only rows of requests that generate.
    Generation,
}

/// The ops that models are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OpKind {
    /// Look up the embedding row of each token.
    Embed {
        /// The table.
        table: WeightId,
    },
    /// `out = rmsnorm(hidden)`.
    RmsNorm {
        /// Scale.
        weight: WeightId,
    },
    /// `hidden += proj; out = rmsnorm(hidden)`.
    AddRmsNorm {
        /// Scale.
        weight: WeightId,
    },
    /// `out = x . weight^T + bias`; into [`Buf::Act`] of gates and ups, with the activation of both.
    Linear {
        /// Input rows.
        x: Buf,
        /// `[n][k]` weight.
        weight: WeightId,
        /// Optional `[n]` bias.
        bias: Option<WeightId>,
        /// Output rows.
        out: Buf,
    },
    /// RMS norm of each query and key head, in place.
    QkNorm {
        /// Scale of query heads.
        q: WeightId,
        /// Scale of key heads.
        k: WeightId,
    },
    /// Norm of the queries' latent vectors.
    LatentNorm {
        /// Scale.
        weight: WeightId,
    },
    /// Queries into the latent space, head by head, and beside them the token's key and value: the input of attention.
    LatentQueries {
        /// Scale of the norm of latent vectors.
        norm: WeightId,
        /// One `[kv_lora_rank][qk_nope_head_dim]` weight for each head.
        weight: WeightId,
    },
    /// Attention's output from the latent space to each head's values.
    LatentValues {
        /// One `[v_head_dim][kv_lora_rank]` weight for each head.
        weight: WeightId,
    },
    /// Rotate queries and keys, and write keys and values to the cache.
    RopeKvWrite,
    /// Fused attention over the cache: scores, softmax and values in one pass.
    Attention {
        /// Rows it covers.
        rows: Rows,
        /// The sink of each query head, where the model has them.
        sinks: Option<WeightId>,
    },
    /// Unfused attention, step 1: scores of the context rows into memory.
    AttnScores,
    /// Unfused attention, step 2: softmax over each row of scores, in memory.
    AttnSoftmax {
        /// The sink of each query head, where the model has them.
        sinks: Option<WeightId>,
    },
    /// Unfused attention, step 3: weighted sum of values from the scores in memory.
    AttnValues,
    /// `act = silu(gate) * up`.
    SiluMul,
    /// Choose the experts of each token and their weights by the router's logits, and sort the pairs of token and expert
    /// by expert.
    Route {
        /// One number per expert, used as the routing method says.
        bias: Option<WeightId>,
    },
    /// `out[pair] = x . weight[expert]^T`; x is the row of the pair's token or, after the first product, of the pair. Into
    /// [`Buf::ExpertAct`] with the activation.
    ExpertLinear {
        /// Input rows.
        x: Buf,
        /// One `[n][k]` weight for each expert.
        weight: WeightId,
        /// Optional `[n]` bias of each expert.
        bias: Option<WeightId>,
        /// Output rows.
        out: Buf,
    },
    /// The activation of every pair: SiLU of gate times up, or what the model has instead.
    ExpertSiluMul,
    /// `proj[token] = sum of weight * out[pair]` over the token's pairs, the best expert first.
    ExpertSum {
        /// Whether the sum is added to what a shared block has left in `proj`.
        add: bool,
    },
    /// Collect the rows whose logits are wanted.
    Gather,
    /// Turn logits into tokens.
    Sample,
}

impl OpKind {
    /// The weights that it reads.
    pub fn weights(&self) -> impl Iterator<Item = WeightId> + use<> {
        let found = match *self {
            OpKind::Embed { table: weight }
            | OpKind::RmsNorm { weight }
            | OpKind::AddRmsNorm { weight }
            | OpKind::LatentNorm { weight }
            | OpKind::LatentValues { weight } => [Some(weight), None],
            OpKind::Linear { weight, bias, .. } | OpKind::ExpertLinear { weight, bias, .. } => [Some(weight), bias],
            OpKind::QkNorm { q: first, k: second } | OpKind::LatentQueries { norm: first, weight: second } => {
                [Some(first), Some(second)]
            }
            OpKind::Attention { sinks: weight, .. }
            | OpKind::AttnSoftmax { sinks: weight }
            | OpKind::Route { bias: weight } => [weight, None],
            OpKind::RopeKvWrite
            | OpKind::AttnScores
            | OpKind::AttnValues
            | OpKind::SiluMul
            | OpKind::ExpertSiluMul
            | OpKind::ExpertSum { .. }
            | OpKind::Gather
            | OpKind::Sample => [None, None],
        };
        found.into_iter().flatten()
    }
}

/// One op of a model's list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Node {
    /// What to do.
    pub kind: OpKind,
    /// Name in traces and tables, such as `qkv_proj`.
    pub name: &'static str,
    /// Layer, where the op belongs to one.
    pub layer: Option<u16>,
}

/// How a model's list is put together; set when an engine is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramOptions {
    /// Fused attention for context rows; otherwise three ops through memory.
    pub context_fmha: bool,
    /// The embedding table is a weight of its own also where the head is tied to it.
    pub own_table: bool,
    /// The activation is part of the product before it where gates and ups are a multiple of this wide each; otherwise it is
    /// an op of its own.
    pub activated_multiple: Option<usize>,
}

impl ProgramOptions {
    /// Whether the product of gates and ups of this width applies the activation.
    pub fn activates(&self, width: usize) -> bool {
        self.activated_multiple.is_some_and(|multiple| width.is_multiple_of(multiple))
    }
}

/// The whole forward pass of `config`, in order.
pub fn program(config: &ModelConfig, options: ProgramOptions) -> Vec<Node> {
    let mut nodes = Vec::new();
    let mut push = |layer: Option<u16>, name: &'static str, kind: OpKind| nodes.push(Node { kind, name, layer });
    let embed = if config.tie_word_embeddings && !options.own_table { WeightId::LmHead } else { WeightId::Embed };
    push(None, "embed", OpKind::Embed { table: embed });
    for index in 0..config.num_hidden_layers {
        let index = index as u16;
        let layer = Some(index);
        let w = |part| WeightId::Layer(index, part);
        let norm = w(LayerWeight::InputNorm);
        if index == 0 {
            push(layer, "input_norm", OpKind::RmsNorm { weight: norm });
        } else {
            push(layer, "input_norm", OpKind::AddRmsNorm { weight: norm });
        }
        let linear =
            |x, weight, bias: Option<LayerWeight>, out| OpKind::Linear { x, weight: w(weight), bias: bias.map(w), out };
        match &config.latent {
            None => {
                let qkv_bias = config.qkv_bias.then_some(LayerWeight::QkvBias);
                push(layer, "qkv_proj", linear(Buf::Normed, LayerWeight::Qkv, qkv_bias, Buf::Qkv));
            }
            Some(latent) => {
                push(layer, "kv_a_proj", linear(Buf::Normed, LayerWeight::KvLatent, None, Buf::KvLatent));
                if latent.q_lora_rank.is_some() {
                    push(layer, "q_a_proj", linear(Buf::Normed, LayerWeight::QLatent, None, Buf::QLatent));
                    push(layer, "q_a_norm", OpKind::LatentNorm { weight: w(LayerWeight::QLatentNorm) });
                    push(layer, "q_b_proj", linear(Buf::QLatentNormed, LayerWeight::Q, None, Buf::PerHead));
                } else {
                    push(layer, "q_proj", linear(Buf::Normed, LayerWeight::Q, None, Buf::PerHead));
                }
                let (norm, weight) = (w(LayerWeight::KvLatentNorm), w(LayerWeight::LatentKeys));
                push(layer, "latent_queries", OpKind::LatentQueries { norm, weight });
            }
        }
        if config.qk_norm {
            push(layer, "qk_norm", OpKind::QkNorm { q: w(LayerWeight::QNorm), k: w(LayerWeight::KNorm) });
        }
        push(layer, "rope_kv_write", OpKind::RopeKvWrite);
        let sinks = config.attention_sinks.then_some(w(LayerWeight::Sinks));
        if options.context_fmha {
            push(layer, "attention", OpKind::Attention { rows: Rows::All, sinks });
        } else {
            push(layer, "attn_scores", OpKind::AttnScores);
            push(layer, "attn_softmax", OpKind::AttnSoftmax { sinks });
            push(layer, "attn_values", OpKind::AttnValues);
            push(layer, "attention", OpKind::Attention { rows: Rows::Generation, sinks });
        }
        let o_bias = config.o_bias.then_some(LayerWeight::OBias);
        if config.latent.is_some() {
            push(layer, "latent_values", OpKind::LatentValues { weight: w(LayerWeight::LatentValues) });
        }
        let attended = if config.latent.is_some() { Buf::PerHead } else { Buf::Attn };
        push(layer, "o_proj", linear(attended, LayerWeight::O, o_bias, Buf::Proj));
        push(layer, "post_norm", OpKind::AddRmsNorm { weight: w(LayerWeight::PostNorm) });
        let activated = options.activates(config.dense_width(usize::from(index)));
        let gate_up = if activated { Buf::Act } else { Buf::GateUp };
        if let Some(moe) = config.experts(usize::from(index)) {
            let bias = moe.has_router_bias().then_some(w(LayerWeight::RouterBias));
            let expert = |x, weight, bias: LayerWeight, out| OpKind::ExpertLinear {
                x,
                weight: w(weight),
                bias: moe.expert_bias.then_some(w(bias)),
                out,
            };
            let (up, up_bias) = (LayerWeight::ExpertGateUp, LayerWeight::ExpertGateUpBias);
            let (down, down_bias) = (LayerWeight::ExpertDown, LayerWeight::ExpertDownBias);
            let shared = moe.shared_intermediate_size > 0;
            if shared {
                push(layer, "shared_gate_up", linear(Buf::Normed, LayerWeight::GateUp, None, gate_up));
                if !activated {
                    push(layer, "shared_silu_mul", OpKind::SiluMul);
                }
                push(layer, "shared_down", linear(Buf::Act, LayerWeight::Down, None, Buf::Proj));
            }
            push(layer, "router", linear(Buf::Normed, LayerWeight::Router, None, Buf::RouterLogits));
            push(layer, "route", OpKind::Route { bias });
            if options.activates(moe.intermediate_size) {
                push(layer, "expert_gate_up", expert(Buf::Normed, up, up_bias, Buf::ExpertAct));
            } else {
                push(layer, "expert_gate_up", expert(Buf::Normed, up, up_bias, Buf::ExpertGateUp));
                push(layer, "expert_silu_mul", OpKind::ExpertSiluMul);
            }
            push(layer, "expert_down", expert(Buf::ExpertAct, down, down_bias, Buf::ExpertOut));
            push(layer, "expert_sum", OpKind::ExpertSum { add: shared });
            continue;
        }
        let up_bias = config.mlp_bias.then_some(LayerWeight::GateUpBias);
        push(layer, "gate_up_proj", linear(Buf::Normed, LayerWeight::GateUp, up_bias, gate_up));
        if !activated {
            push(layer, "silu_mul", OpKind::SiluMul);
        }
        let down_bias = config.mlp_bias.then_some(LayerWeight::DownBias);
        push(layer, "down_proj", linear(Buf::Act, LayerWeight::Down, down_bias, Buf::Proj));
    }
    push(None, "final_norm", OpKind::AddRmsNorm { weight: WeightId::FinalNorm });
    push(None, "gather", OpKind::Gather);
    push(None, "lm_head", OpKind::Linear { x: Buf::Sampled, weight: WeightId::LmHead, bias: None, out: Buf::Logits });
    push(None, "sample", OpKind::Sample);
    nodes
}

impl Node {
    /// Category for budgets and tables.
    pub fn category(&self) -> &'static str {
        match self.kind {
            OpKind::Embed { .. } => "embedding",
            OpKind::RmsNorm { .. } | OpKind::AddRmsNorm { .. } | OpKind::QkNorm { .. } | OpKind::LatentNorm { .. } => {
                "norm"
            }
            OpKind::Linear { .. } | OpKind::LatentQueries { .. } | OpKind::LatentValues { .. } => "gemm",
            OpKind::RopeKvWrite => "rope",
            OpKind::Attention { .. } | OpKind::AttnScores | OpKind::AttnSoftmax { .. } | OpKind::AttnValues => {
                "attention"
            }
            OpKind::SiluMul | OpKind::ExpertSiluMul => "activation",
            OpKind::Route { .. } | OpKind::ExpertSum { .. } => "moe_routing",
            OpKind::ExpertLinear { .. } => "moe_gemm",
            OpKind::Gather => "gather",
            OpKind::Sample => "sampling",
        }
    }

    /// Rows this op works on in `step`; an op without rows is neither run nor recorded.
    pub fn rows(&self, step: &StepShape<'_>) -> u64 {
        let context = || step.spans.iter().filter(|s| s.context).map(|s| s.rows).sum();
        match self.kind {
            OpKind::Attention { rows: Rows::All, .. } => step.tokens,
            OpKind::Attention { rows: Rows::Context, .. }
            | OpKind::AttnScores
            | OpKind::AttnSoftmax { .. }
            | OpKind::AttnValues => context(),
            OpKind::Attention { rows: Rows::Generation, .. } => step.tokens - context(),
            OpKind::Gather | OpKind::Sample => step.sampled,
            OpKind::Linear { x: Buf::Sampled, .. } => step.sampled,
            _ => step.tokens,
        }
    }
}

/// Whether a projection reads the rows that experts read, which are kept as floats.
pub fn after_experts_norm(config: &ModelConfig, weight: WeightId) -> bool {
    match weight {
        WeightId::Layer(_, LayerWeight::Router) => true,
        WeightId::Layer(layer, LayerWeight::GateUp) => config.experts(usize::from(layer)).is_some(),
        _ => false,
    }
}

/// Rows and columns of a projection; of one expert, where each has its own.
pub fn linear_shape(config: &ModelConfig, weight: WeightId) -> (u64, u64) {
    let hidden = config.hidden_size as u64;
    let inter = match weight {
        WeightId::Layer(layer, _) => config.dense_width(usize::from(layer)) as u64,
        _ => 0,
    };
    let dim = config.head_dim as u64;
    let latent = |part: fn(&LatentAttention) -> usize| config.latent.as_ref().map_or(0, part) as u64;
    let q = config.num_attention_heads as u64 * dim;
    let kv = config.num_key_value_heads as u64 * dim;
    let experts = config.moe.as_ref().map_or((0, 0), |moe| (moe.num_experts as u64, moe.intermediate_size as u64));
    match weight {
        WeightId::Layer(_, LayerWeight::Qkv) => (q + 2 * kv, hidden),
        WeightId::Layer(_, LayerWeight::QLatent) => (latent(|l| l.q_lora_rank.unwrap_or(0)), hidden),
        WeightId::Layer(_, LayerWeight::Q) => {
            let k = config.latent.and_then(|l| l.q_lora_rank).map_or(hidden, |rank| rank as u64);
            (config.num_attention_heads as u64 * latent(LatentAttention::query_width), k)
        }
        WeightId::Layer(_, LayerWeight::KvLatent) => (dim, hidden),
        WeightId::Layer(_, LayerWeight::LatentKeys) => (latent(|l| l.kv_lora_rank), latent(|l| l.qk_nope_head_dim)),
        WeightId::Layer(_, LayerWeight::LatentValues) => (latent(|l| l.v_head_dim), latent(|l| l.kv_lora_rank)),
        WeightId::Layer(_, LayerWeight::O) => (hidden, config.attention_width() as u64),
        WeightId::Layer(_, LayerWeight::GateUp) => (2 * inter, hidden),
        WeightId::Layer(_, LayerWeight::Down) => (hidden, inter),
        WeightId::Layer(_, LayerWeight::Router) => (experts.0, hidden),
        WeightId::Layer(_, LayerWeight::ExpertGateUp) => (2 * experts.1, hidden),
        WeightId::Layer(_, LayerWeight::ExpertDown) => (hidden, experts.1),
        _ => (config.vocab_size as u64, hidden),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::weights::weight_list;

    /// Engines refuse to start without a weight that [`OpKind::weights`] names.
    #[test]
    fn ops_read_the_weights_that_a_model_has_and_no_others() {
        for preset in crate::presets::presets() {
            let config = preset.config();
            for context_fmha in [true, false] {
                let options = ProgramOptions { context_fmha, own_table: false, activated_multiple: None };
                let nodes = program(&config, options);
                let read: HashSet<WeightId> = nodes.iter().flat_map(|node| node.kind.weights()).collect();
                let listed: HashSet<WeightId> = weight_list(&config).iter().map(|info| info.id).collect();
                assert_eq!(read, listed, "{}", preset.name);
            }
        }
    }
}
