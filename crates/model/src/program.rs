//! A model as a short list of ops over named buffers and weights.
//!
//! The list knows shapes and order and nothing of batching: how many rows a step has, and which keys each row
//! attends to, arrive in a [`StepShape`]. Engines run the list node by node through one seam, and everything that
//! needs to know what an op costs (trace, roofline, MFU, simulator) asks [`Node::cost`].

use crate::config::ModelConfig;
use crate::latent::LatentAttention;
use crate::moe::MoeConfig;
use crate::weights::{LayerWeight, WeightId};

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

/// Rows of one request in a step, as far as the cost of attention is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanShape {
    /// Rows computed in this step.
    pub rows: u64,
    /// Keys in the cache once they are written; the last row attends to all of them.
    pub keys: u64,
    /// Whether the rows belong to the prompt.
    pub context: bool,
}

/// What the cost of a step depends on.
#[derive(Clone, Copy, Debug)]
pub struct StepShape<'a> {
    /// One entry per request in the step.
    pub spans: &'a [SpanShape],
    /// Packed rows: the sum of `rows`.
    pub tokens: u64,
    /// Rows whose logits are computed.
    pub sampled: u64,
    /// How what the ops read and write is stored.
    pub operands: Operands,
    /// Experts that some token was sent to, layer by layer. Where it is not known, as before a step has run, costs take
    /// the most that can be: as many as there are pairs, and no more than all.
    pub experts_used: &'a [u32],
}

impl StepShape<'_> {
    fn used(&self, moe: &MoeConfig, layer: usize) -> u64 {
        let most = (moe.num_experts as u64).min(self.tokens * moe.experts_per_token as u64);
        self.experts_used.get(layer).map_or(most, |used| u64::from(*used))
    }
}

/// How a matrix is stored, as far as cost is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixType {
    /// Elements of so many bytes.
    Plain(u64),
    /// A byte per element, and 4 for each row and 256 inputs.
    Int8,
    /// Half a byte per element, and 2 for each row and 32 inputs.
    Int4,
}

impl MatrixType {
    /// Bytes of `n` rows of `k` inputs.
    pub fn bytes(self, n: u64, k: u64) -> u64 {
        match self {
            MatrixType::Plain(bytes) => n * k * bytes,
            MatrixType::Int8 => n * (k + 4 * k.div_ceil(256)),
            MatrixType::Int4 => n * 18 * k.div_ceil(32),
        }
    }
}

/// How what the ops read and write is stored. The residual stream and the logits are f32 everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operands {
    /// The layers' projections.
    pub layers: MatrixType,
    /// The head.
    pub head: MatrixType,
    /// Bytes of one element of the embedding table.
    pub table: u64,
    /// Bytes of one cache element.
    pub kv: u64,
    /// Bytes of the scale that a head's elements of one token share in the cache.
    pub kv_scale: u64,
    /// What the cache holds of a token and kv head: a key and a value, or 1 where the key is the value too.
    pub kv_parts: u64,
    /// Bytes of one activation element.
    pub activation: u64,
    /// Bytes of one element of a projection's input, where the op before it makes it for the projection alone.
    pub input: u64,
}

impl Operands {
    /// Plain elements: bytes of a weight, of the cache and of an activation.
    pub fn plain(weight: usize, kv: usize, activation: usize) -> Operands {
        let [weight, kv, activation] = [weight, kv, activation].map(|bytes| bytes as u64);
        Operands {
            layers: MatrixType::Plain(weight),
            head: MatrixType::Plain(weight),
            table: weight,
            kv,
            kv_scale: 0,
            kv_parts: 2,
            activation,
            input: activation,
        }
    }

    /// Bytes of one key or one value of a head.
    fn kv_head(&self, head_dim: u64) -> u64 {
        head_dim * self.kv + self.kv_scale
    }

    fn matrix(&self, weight: WeightId) -> MatrixType {
        match weight {
            // Routers are not quantised.
            WeightId::Layer(_, LayerWeight::Router) => MatrixType::Plain(self.table),
            WeightId::Layer(..) => self.layers,
            _ => self.head,
        }
    }
}

/// What one op needs: the numbers behind roofline, MFU and MBU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// `m, n, k` of a matrix product, or rows and width; 0 where it does not apply.
    pub shape: [u64; 3],
    /// Floating-point operations (a fused multiply-add is two).
    pub flops: u64,
    /// Bytes of all operands, read and written once each.
    pub bytes: u64,
}

/// Elements of a head's value in attention; of a latent key the rotated part is none.
fn value_width(config: &ModelConfig) -> u64 {
    config.latent.map_or(config.head_dim, |latent| latent.kv_lora_rank) as u64
}

/// Keys attended to by `span`'s rows in all, and keys that have to be read, under an optional sliding window.
fn attended(span: SpanShape, window: Option<usize>) -> (u64, u64) {
    let SpanShape { rows, keys, .. } = span;
    let first = keys.saturating_sub(rows); // keys before the first row
    match window.map(|w| w as u64) {
        Some(window) if keys > window => {
            // Row i sees min(first + i + 1, window) keys.
            let below = window.saturating_sub(first).min(rows); // rows that still see everything
            let full = below * first + below * (below + 1) / 2;
            let read = (window + rows - 1).min(keys);
            (full + (rows - below) * window, read)
        }
        _ => (rows * first + rows * (rows + 1) / 2, keys),
    }
}

/// Sums over the spans that an attention op covers.
struct AttentionWork {
    rows: u64,
    attended: u64,
    read: u64,
    widest: u64,
    /// Rows times keys: what a score matrix in memory holds, the masked part included.
    rectangle: u64,
}

fn attention_work(step: &StepShape<'_>, rows: Rows, window: Option<usize>) -> AttentionWork {
    let mut work = AttentionWork { rows: 0, attended: 0, read: 0, widest: 0, rectangle: 0 };
    for span in step.spans {
        let wanted = match rows {
            Rows::All => true,
            Rows::Context => span.context,
            Rows::Generation => !span.context,
        };
        if wanted {
            let (sum, read) = attended(*span, window);
            work.rows += span.rows;
            work.attended += sum;
            work.read += read;
            work.widest = work.widest.max(span.keys);
            work.rectangle += span.rows * span.keys;
        }
    }
    work
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

    /// What this op costs in `step`.
    pub fn cost(&self, config: &ModelConfig, step: &StepShape<'_>) -> Cost {
        const F32: u64 = 4;
        /// Operations of an activation for each gate.
        const ACTIVATION: u64 = 5;
        let Operands { activation: act, input, kv_parts, .. } = step.operands;
        let hidden = config.hidden_size as u64;
        let inter = config.dense_width(self.layer.map_or(0, usize::from)) as u64;
        let heads = config.num_attention_heads as u64;
        let kv_heads = config.num_key_value_heads as u64;
        let dim = config.head_dim as u64;
        let values = value_width(config);
        let m = step.tokens;
        let window = self.layer.and_then(|l| config.sliding_window.get(usize::from(l)).copied().flatten());
        let attention = |rows| attention_work(step, rows, window);
        let cost = |shape: [u64; 3], flops, bytes| Cost { shape, flops, bytes };
        let kv_token = kv_heads * step.operands.kv_head(dim);
        let layer = self.layer.map_or(0, usize::from);
        let experts = config.experts(layer).filter(|_| self.layer.is_some());
        let pairs = m * experts.map_or(0, |moe| moe.experts_per_token as u64);
        let count = experts.map_or(0, |moe| moe.num_experts as u64);
        let expert_inter = experts.map_or(0, |moe| moe.intermediate_size as u64);
        // The final norm's rows are gathered first, and those before experts go to the router and to several experts.
        let normed = |weight| match weight {
            WeightId::FinalNorm => act,
            WeightId::Layer(_, LayerWeight::PostNorm) if experts.is_some() => act,
            _ => input,
        };
        match self.kind {
            OpKind::Embed { .. } => cost([m, hidden, 0], 0, m * hidden * (step.operands.table + F32)),
            OpKind::RmsNorm { weight } => {
                cost([m, hidden, 0], 4 * m * hidden, m * hidden * (F32 + normed(weight)) + hidden * F32)
            }
            OpKind::AddRmsNorm { weight } => {
                let bytes = m * hidden * (2 * F32 + act + normed(weight)) + hidden * F32;
                cost([m, hidden, 0], 5 * m * hidden, bytes)
            }
            OpKind::LatentNorm { .. } => {
                let width = config.latent.and_then(|l| l.q_lora_rank).unwrap_or(0) as u64;
                cost([m, width, 0], 4 * m * width, 2 * m * width * act + width * F32)
            }
            OpKind::LatentQueries { weight, .. } | OpKind::LatentValues { weight } => {
                let (n, k) = linear_shape(config, weight);
                let matrices = heads * step.operands.matrix(weight).bytes(n, k);
                cost([m * heads, n, k], 2 * m * heads * n * k, matrices + m * heads * (n + k) * act)
            }
            OpKind::QkNorm { .. } => {
                let width = (heads + kv_heads) * dim;
                cost([m, width, 0], 4 * m * width, 2 * m * width * act)
            }
            OpKind::Linear { x, weight, out, .. } => {
                let rows = if x == Buf::Sampled { step.sampled } else { m };
                let (n, k) = linear_shape(config, weight);
                let (out, activated) = match out {
                    Buf::Logits => (n * F32, 0),
                    Buf::Act => (n / 2 * input, n / 2 * ACTIVATION),
                    _ => (n * act, 0),
                };
                let made =
                    matches!(x, Buf::Normed | Buf::Act) && !(x == Buf::Normed && after_experts_norm(config, weight));
                let x = if made { input } else { act };
                let matrix = step.operands.matrix(weight).bytes(n, k);
                cost([rows, n, k], rows * (2 * n * k + activated), matrix + rows * (out + k * x))
            }
            OpKind::RopeKvWrite => {
                let width = (heads + kv_heads) * dim;
                cost(
                    [m, width, 0],
                    3 * m * width,
                    m * width * 2 * act + m * (kv_heads * dim * act + kv_parts * kv_token),
                )
            }
            OpKind::Attention { rows, .. } => {
                let work = attention(rows);
                let io = work.rows * heads * (dim + values) * act;
                cost(
                    [work.rows, work.widest, dim],
                    2 * heads * (dim + values) * work.attended,
                    io + kv_parts * work.read * kv_token,
                )
            }
            // The score matrix lies in memory whole: the first op writes all of it, the second one too (zeroes where
            // nothing is visible), the third reads what is visible.
            OpKind::AttnScores => {
                let work = attention(Rows::Context);
                let io = work.rows * heads * dim * act + work.read * kv_token;
                let bytes = io + work.rectangle * heads * F32;
                cost([work.rows, work.widest, dim], 2 * heads * dim * work.attended, bytes)
            }
            OpKind::AttnSoftmax { .. } => {
                let work = attention(Rows::Context);
                let bytes = (work.attended + work.rectangle) * heads * F32;
                cost([work.rows * heads, work.widest, 0], 5 * heads * work.attended, bytes)
            }
            OpKind::AttnValues => {
                let work = attention(Rows::Context);
                let io = work.rows * heads * values * act + work.read * kv_token;
                let bytes = io + work.attended * heads * F32;
                cost([work.rows, work.widest, values], 2 * heads * values * work.attended, bytes)
            }
            OpKind::SiluMul => cost([m, inter, 0], ACTIVATION * m * inter, m * inter * (2 * act + input)),
            OpKind::Route { .. } => cost([m, count, 0], 5 * m * count, m * count * act + 2 * pairs * F32),
            OpKind::ExpertLinear { x, weight, out, .. } => {
                let (n, k) = linear_shape(config, weight);
                let (out, activated) = match out {
                    Buf::ExpertAct => (n / 2 * input, n / 2 * ACTIVATION),
                    _ => (n * act, 0),
                };
                let used = experts.map_or(0, |moe| step.used(moe, layer));
                let x = if x == Buf::Normed { m * k * act } else { pairs * k * input };
                let matrices = used * step.operands.matrix(weight).bytes(n, k);
                cost([pairs, n, k], pairs * (2 * n * k + activated), matrices + pairs * out + x)
            }
            OpKind::ExpertSiluMul => {
                let elements = pairs * expert_inter;
                cost([pairs, expert_inter, 0], ACTIVATION * elements, elements * (2 * act + input))
            }
            OpKind::ExpertSum { add } => {
                let bytes = (pairs + m * if add { 2 } else { 1 }) * hidden * act + 2 * pairs * F32;
                cost([m, hidden, pairs / m.max(1)], 2 * pairs * hidden, bytes)
            }
            OpKind::Gather => cost([step.sampled, hidden, 0], 0, 2 * step.sampled * hidden * act),
            OpKind::Sample => {
                let vocab = config.vocab_size as u64;
                cost([step.sampled, vocab, 0], step.sampled * vocab, step.sampled * vocab * F32)
            }
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

/// The work of a whole step by the definitions of MFU and MBU: matrix products and attention count as operations,
/// weights once (of experts, those that were used) plus the cache read and written count as bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// `2 * weights used + 4 * layers * heads * head_dim * keys` over all rows (of latent values, their own width).
    pub flops: u64,
    /// Bytes that must move at least once.
    pub bytes: u64,
}

/// Work of a step in closed form: cheap enough to keep for every iteration, profiled or not.
pub fn step_work(config: &ModelConfig, step: &StepShape<'_>) -> StepWork {
    let layers = config.num_hidden_layers as u64;
    let heads = config.num_attention_heads as u64;
    let dim = config.head_dim as u64;
    let kv_row = step.operands.kv_parts * config.num_key_value_heads as u64 * step.operands.kv_head(dim);
    let head = linear_shape(config, WeightId::LmHead);
    let mut flops = 2 * head.0 * head.1 * step.sampled;
    let mut bytes = layers * step.tokens * kv_row;
    let mut matrix = |layer: usize, part: LayerWeight, layers: u64, read: u64, rows: u64| {
        let id = WeightId::Layer(layer as u16, part);
        let (n, k) = linear_shape(config, id);
        flops += 2 * layers * n * k * rows;
        bytes += read * step.operands.matrix(id).bytes(n, k);
    };
    let sparse = config.moe.as_ref().map_or(0, |moe| layers - moe.dense_layers.len() as u64);
    match &config.latent {
        None => matrix(0, LayerWeight::Qkv, layers, layers, step.tokens),
        Some(latent) => {
            if latent.q_lora_rank.is_some() {
                matrix(0, LayerWeight::QLatent, layers, layers, step.tokens);
            }
            for part in [LayerWeight::Q, LayerWeight::KvLatent] {
                matrix(0, part, layers, layers, step.tokens);
            }
            for part in [LayerWeight::LatentKeys, LayerWeight::LatentValues] {
                matrix(0, part, layers, layers * heads, step.tokens * heads);
            }
        }
    }
    matrix(0, LayerWeight::O, layers, layers, step.tokens);
    for layer in 0..config.num_hidden_layers {
        matrix(layer, LayerWeight::GateUp, 1, 1, step.tokens);
        matrix(layer, LayerWeight::Down, 1, 1, step.tokens);
    }
    if let Some(moe) = &config.moe {
        let pairs = step.tokens * moe.experts_per_token as u64;
        let used = (0..config.num_hidden_layers).filter(|l| moe.in_layer(*l)).map(|l| step.used(moe, l)).sum();
        matrix(0, LayerWeight::Router, sparse, sparse, step.tokens);
        matrix(0, LayerWeight::ExpertGateUp, sparse, used, pairs);
        matrix(0, LayerWeight::ExpertDown, sparse, used, pairs);
    }
    if step.sampled > 0 {
        bytes += step.operands.head.bytes(head.0, head.1);
    }
    let mut add = |count: u64, window: Option<usize>| {
        let work = attention_work(step, Rows::All, window);
        flops += count * 2 * heads * (dim + value_width(config)) * work.attended;
        bytes += count * work.read * kv_row;
    };
    if config.sliding_window.iter().all(Option::is_none) {
        add(layers, None);
    } else {
        config.sliding_window.iter().for_each(|window| add(1, *window));
    }
    StepWork { flops, bytes }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::weights::weight_list;

    /// Every op by itself.
    const SEPARATE: ProgramOptions = ProgramOptions { context_fmha: true, own_table: false, activated_multiple: None };

    /// The definition, one row at a time.
    fn attended_by_rows(span: SpanShape, window: Option<usize>) -> u64 {
        (0..span.rows)
            .map(|i| {
                let keys = span.keys - span.rows + i + 1;
                window.map_or(keys, |w| keys.min(w as u64))
            })
            .sum()
    }

    #[test]
    fn attended_keys_follow_the_definition() {
        for rows in 1..20u64 {
            for before in 0..20u64 {
                for window in [None, Some(1), Some(3), Some(8), Some(100)] {
                    let span = SpanShape { rows, keys: before + rows, context: true };
                    assert_eq!(attended(span, window).0, attended_by_rows(span, window), "{span:?} {window:?}");
                }
            }
        }
    }

    /// Engines refuse to start without a weight that [`OpKind::weights`] names.
    #[test]
    fn ops_read_the_weights_that_a_model_has_and_no_others() {
        for preset in crate::presets::presets() {
            let config = preset.config();
            for context_fmha in [true, false] {
                let nodes = program(&config, ProgramOptions { context_fmha, ..SEPARATE });
                let read: HashSet<WeightId> = nodes.iter().flat_map(|node| node.kind.weights()).collect();
                let listed: HashSet<WeightId> = weight_list(&config).iter().map(|info| info.id).collect();
                assert_eq!(read, listed, "{}", preset.name);
            }
        }
    }

    #[test]
    fn step_work_is_the_sum_of_the_matrix_ops() {
        let mut config = crate::presets::preset("moe-tiny").unwrap().config();
        for (windowed, dense) in [(false, 0), (true, 0), (false, 1), (false, 4)] {
            let sparse = crate::presets::preset("moe-tiny").unwrap().config().moe;
            config.moe =
                sparse.filter(|_| dense < 4).map(|moe| MoeConfig { dense_layers: (0..dense).collect(), ..moe });
            if windowed {
                config.sliding_window = (0..config.num_hidden_layers).map(|l| (l % 2 == 0).then_some(16)).collect();
            }
            let spans =
                [SpanShape { rows: 40, keys: 72, context: true }, SpanShape { rows: 1, keys: 33, context: false }];
            let step = StepShape {
                spans: &spans,
                tokens: 41,
                sampled: 2,
                operands: Operands::plain(4, 4, 4),
                experts_used: &[],
            };
            for fmha in [true, false] {
                let nodes = program(&config, ProgramOptions { context_fmha: fmha, ..SEPARATE });
                let flops: u64 = nodes
                    .iter()
                    .filter(|n| matches!(n.category(), "gemm" | "moe_gemm" | "attention") && n.name != "attn_softmax")
                    .map(|n| n.cost(&config, &step).flops)
                    .sum();
                assert_eq!(flops, step_work(&config, &step).flops, "fmha {fmha}");
            }
        }
    }

    #[test]
    fn an_activation_within_the_product_spares_memory_and_no_work() {
        for name in ["micro", "moe-tiny", "deepseek-tiny"] {
            let config = crate::presets::preset(name).unwrap().config();
            let spans = [SpanShape { rows: 9, keys: 9, context: true }];
            let operands = Operands { input: 1, ..Operands::plain(2, 2, 4) };
            let step = StepShape { spans: &spans, tokens: 9, sampled: 1, operands, experts_used: &[] };
            let total = |activated_multiple: Option<usize>| {
                let nodes = program(&config, ProgramOptions { activated_multiple, ..SEPARATE });
                let names: Vec<_> = nodes.iter().filter(|node| node.category() == "activation").collect();
                let costs = nodes.iter().map(|node| node.cost(&config, &step));
                let cost = costs.fold((0, 0), |sum, cost| (sum.0 + cost.flops, sum.1 + cost.bytes));
                (names.len(), cost.0, cost.1)
            };
            let (separate, within) = (total(None), total(Some(1)));
            assert_eq!((within.0, within.1), (0, separate.1), "{name}");
            // Gates and ups are neither written nor read.
            let gates = |layer: usize| {
                let experts = config.experts(layer).map_or(0, |moe| moe.experts_per_token * moe.intermediate_size);
                config.dense_width(layer) + experts
            };
            let spared: usize = (0..config.num_hidden_layers).map(|layer| 2 * 2 * 4 * 9 * gates(layer)).sum();
            assert_eq!(separate.2 - within.2, spared as u64, "{name}");
            // No width is a multiple of a number above all of them.
            assert_eq!(total(Some(1 << 20)), separate, "{name}");
        }
    }

    #[test]
    fn only_experts_that_were_used_are_read() {
        let config = crate::presets::preset("moe-tiny").unwrap().config();
        let spans = [SpanShape { rows: 1, keys: 9, context: false }];
        let operands = Operands::plain(2, 2, 4);
        let step = StepShape { spans: &spans, tokens: 1, sampled: 1, operands, experts_used: &[] };
        let nodes = program(&config, SEPARATE);
        let node = nodes.iter().find(|n| n.name == "expert_gate_up").unwrap();
        let bytes = |used: &[u32]| node.cost(&config, &StepShape { experts_used: used, ..step }).bytes;
        let matrix = 2 * 2 * 192 * 128;
        // One token reaches two experts at most, and known numbers win.
        assert_eq!(bytes(&[]), bytes(&[2]));
        assert_eq!(bytes(&[7]) - bytes(&[2]), 5 * matrix);
        let work = |used: &[u32]| step_work(&config, &StepShape { experts_used: used, ..step }).bytes;
        assert_eq!(work(&[2; 4]), work(&[]));
        assert_eq!(work(&[3; 4]) - work(&[2; 4]), 4 * (matrix + matrix / 2));
    }

    #[test]
    fn bytes_of_integer_matrices_hold_their_scales() {
        assert_eq!(MatrixType::Int8.bytes(32, 512), 2 * 8320);
        assert_eq!(MatrixType::Int4.bytes(32, 512), 2 * 4608);
        assert_eq!(MatrixType::Int8.bytes(1, 300), 308);
        assert_eq!(MatrixType::Plain(2).bytes(3, 5), 30);
    }
}
