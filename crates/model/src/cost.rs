//! What the ops of a model's list cost: the numbers behind roofline, MFU, MBU and the simulator.
//!
//! Shapes come from the list and the configuration, batch metadata from a [`StepShape`], types from [`Operands`]. How an op
//! was run is not in the list: the backend that launches says so in a [`Ran`], so that costs are those of what ran.

use crate::config::ModelConfig;
use crate::moe::MoeConfig;
use crate::program::{Buf, Node, OpKind, Rows, linear_shape};
use crate::weights::{LayerWeight, WeightId};

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
    /// A byte per element, and 4 for each row.
    Fp8,
    /// Rows of activations as 8-bit integers: blocks of 256, each with a scale and what sums over it and over its groups of
    /// 32 start from.
    Int8Rows,
}

impl MatrixType {
    /// Bytes of `n` rows of `k` inputs.
    pub fn bytes(self, n: u64, k: u64) -> u64 {
        match self {
            MatrixType::Plain(bytes) => n * k * bytes,
            MatrixType::Int8 => n * (k + 4 * k.div_ceil(256)),
            MatrixType::Int4 => n * 18 * k.div_ceil(32),
            MatrixType::Fp8 => n * (k + 4),
            MatrixType::Int8Rows => n * (256 + 4 + 4 + 8 * 4) * k.div_ceil(256),
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
    /// Rows of codes, where products take them.
    pub codes: MatrixType,
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
            codes: MatrixType::Plain(activation),
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

/// How an op ran, where its place in the list leaves that open: what it read and wrote, and which of its neighbours it folded
/// in. The code that launches says it, and [`Node::cost`] goes by it. The default is the op by itself, as listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// What it read.
    pub input: Input,
    /// What it wrote.
    pub output: Output,
    /// What a kernel behind a product did with its output.
    pub pass: Pass,
}

/// What an op read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Input {
    /// The op's own input, in the activations' type.
    #[default]
    Plain,
    /// Codes that an op before it has made.
    Codes,
    /// Plain rows, of which it made codes first.
    Quantized,
    /// The residual stream, which the product normed itself.
    Norm,
    /// The residual stream alone: nothing was left for the norm to add to it.
    Settled,
    /// Rows of tokens, copied once for each of their experts first.
    Gathered,
    /// The same, as codes.
    GatheredCodes,
    /// Rows before the rotation: attention rotated them and wrote the cache itself.
    Unrotated,
    /// Of latent attention: keys are made where rows are rotated, and neither op touches what only the other needs.
    LatentKeys,
    /// The maximum of each of so many tiles of a row of logits.
    Maxima(u32),
}

/// What an op wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// The op's own output, in the activations' type (f32 for logits).
    #[default]
    Plain,
    /// Codes for the product behind it.
    Codes,
    /// What the activation makes of gates and ups.
    Activated,
    /// A sum on top of the residual stream.
    Residual,
    /// Of scores only those of keys that a row sees.
    Visible,
    /// Maxima of so many tiles of each row of logits, and the logits unless nobody reads them.
    Maxima {
        /// Tiles of a row.
        tiles: u32,
        /// Whether only the maxima were written.
        spared: bool,
    },
}

/// What a kernel of its own does with a product's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pass {
    /// There is none.
    #[default]
    None,
    /// Adds the bias.
    Bias,
    /// Multiplies f32 sums by the scales of both operands, and writes them as the product's output.
    Scale,
}

/// What one op needs: the numbers behind roofline, MFU and MBU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// `m, n, k` of a matrix product, or rows and width; 0 where it does not apply.
    pub shape: [u64; 3],
    /// Floating-point operations (a fused multiply-add is two).
    pub flops: u64,
    /// Bytes of the operands of every kernel that ran for the op, read and written once each. What a kernel keeps to itself
    /// is not among them, nor are indices and angles, which are few, nor rows that only pad a batch.
    pub bytes: u64,
}

/// A cost with its bytes by what they belong to.
#[derive(Clone, Copy, Debug)]
struct Parts {
    shape: [u64; 3],
    flops: u64,
    /// Of matrices.
    matrices: u64,
    /// Of keys and values in the cache.
    cache: u64,
    /// Of activations and vectors.
    rows: u64,
}

const F32: u64 = 4;
/// Bytes of a tile's maximum and its column.
const MAXIMUM: u64 = 8;
/// Operations of an activation for each gate.
const ACTIVATION: u64 = 5;
/// Operations of a norm for each element.
const NORM: u64 = 4;
/// Operations of the rotation of an element.
const ROTATION: u64 = 3;

impl Node {
    /// What this op costs in `step`, run as `ran` says.
    pub fn cost(&self, config: &ModelConfig, step: &StepShape<'_>, ran: Ran) -> Cost {
        let Parts { shape, flops, matrices, cache, rows } = self.parts(config, step, ran);
        Cost { shape, flops, bytes: matrices + cache + rows }
    }

    fn parts(&self, config: &ModelConfig, step: &StepShape<'_>, ran: Ran) -> Parts {
        let operands = &step.operands;
        let act = operands.activation;
        let hidden = config.hidden_size as u64;
        let layer = self.layer.map_or(0, usize::from);
        let inter = config.dense_width(layer) as u64;
        let heads = config.num_attention_heads as u64;
        let kv_heads = config.num_key_value_heads as u64;
        let dim = config.head_dim as u64;
        let values = value_width(config);
        let rotated = config.latent.map_or(dim, |latent| latent.qk_rope_head_dim as u64);
        let m = step.tokens;
        let window = self.layer.and_then(|l| config.sliding_window.get(usize::from(l)).copied().flatten());
        let attention = |rows| attention_work(step, rows, window);
        let kv_token = kv_heads * operands.kv_head(dim);
        let kv_row = operands.kv_parts * kv_token;
        let experts = config.experts(layer).filter(|_| self.layer.is_some());
        let pairs = m * experts.map_or(0, |moe| moe.experts_per_token as u64);
        let count = experts.map_or(0, |moe| moe.num_experts as u64);
        let codes = |rows, width| operands.codes.bytes(rows, width);
        // Rows that another product reads are written in its form.
        let written = |rows, width| match ran.output {
            Output::Codes => codes(rows, width),
            Output::Residual => 2 * rows * width * F32,
            _ => rows * width * act,
        };
        let parts = |shape, flops, rows| Parts { shape, flops, matrices: 0, cache: 0, rows };
        match self.kind {
            OpKind::Embed { .. } => parts([m, hidden, 0], 0, m * hidden * (operands.table + F32)),
            OpKind::RmsNorm { .. } | OpKind::AddRmsNorm { .. } => {
                let adds = matches!(self.kind, OpKind::AddRmsNorm { .. }) && ran.input != Input::Settled;
                let added = if adds { m * hidden * (F32 + act) } else { 0 };
                let bytes = m * hidden * F32 + added + written(m, hidden) + hidden * F32;
                parts([m, hidden, 0], (NORM + u64::from(adds)) * m * hidden, bytes)
            }
            OpKind::LatentNorm { .. } => {
                let width = config.latent.and_then(|l| l.q_lora_rank).unwrap_or(0) as u64;
                parts([m, width, 0], NORM * m * width, 2 * m * width * act + width * F32)
            }
            OpKind::LatentQueries { weight, .. } | OpKind::LatentValues { weight } => {
                let (n, k) = linear_shape(config, weight);
                let beside = match self.kind {
                    // The rotated part of queries passes through; the token's key and value are made of its latent vector.
                    OpKind::LatentQueries { .. } if ran.input != Input::LatentKeys => 2 * heads * rotated + 3 * dim,
                    _ => 0,
                };
                let rows = m * (heads * (n + k) + beside) * act;
                let matrices = heads * operands.matrix(weight).bytes(n, k);
                Parts { matrices, ..parts([m * heads, n, k], 2 * m * heads * n * k, rows) }
            }
            OpKind::QkNorm { .. } => {
                let width = (heads + kv_heads) * dim;
                parts([m, width, 0], NORM * m * width, 2 * m * width * act + 2 * dim * F32)
            }
            OpKind::Linear { x, weight, bias, out } => {
                let rows = if x == Buf::Sampled { step.sampled } else { m };
                let (n, k) = linear_shape(config, weight);
                let (input, normed) = match ran.input {
                    Input::Codes => (codes(rows, k), 0),
                    Input::Quantized => (rows * k * act + 2 * codes(rows, k), 0),
                    Input::Norm => (rows * k * F32 + k * F32, NORM * rows * k),
                    _ => (rows * k * act, 0),
                };
                let activates = out == Buf::Act || ran.output == Output::Activated;
                let width = if activates { n / 2 } else { n };
                let (output, applied) = match (ran.output, out) {
                    (Output::Maxima { tiles, spared }, _) => {
                        let logits = if spared { 0 } else { n * F32 };
                        (rows * (logits + u64::from(tiles) * MAXIMUM), 0)
                    }
                    (Output::Residual, _) => (written(rows, n), rows * n),
                    (_, Buf::Logits | Buf::RouterLogits) => (rows * n * F32, 0),
                    _ if activates => (written(rows, width), ACTIVATION * rows * width),
                    _ => (written(rows, n), 0),
                };
                let again = match ran.pass {
                    Pass::None => 0,
                    Pass::Bias => 2 * rows * n * act,
                    Pass::Scale => 2 * rows * n * F32,
                };
                let bias = if bias.is_some() { n * F32 } else { 0 };
                let flops = 2 * rows * n * k + normed + applied;
                let matrices = operands.matrix(weight).bytes(n, k);
                Parts { matrices, ..parts([rows, n, k], flops, input + output + again + bias) }
            }
            OpKind::RopeKvWrite => {
                let width = (heads + kv_heads) * dim;
                let (turned, rows) = match (ran.input, config.latent) {
                    (Input::LatentKeys, Some(latent)) => {
                        let (latent, turned) = (latent.kv_lora_rank as u64, (heads + 1) * rotated);
                        (ROTATION * turned + NORM * latent, (dim + 2 * heads * rotated) * act)
                    }
                    _ => (ROTATION * width, 2 * width * act + kv_heads * dim * act),
                };
                Parts { cache: m * kv_row, ..parts([m, width, 0], m * turned, m * rows) }
            }
            OpKind::Attention { rows, .. } => {
                let work = attention(rows);
                let (mut turned, mut fresh, mut cache) = (0, 0, operands.kv_parts * work.read * kv_token);
                if ran.input == Input::Unrotated {
                    // A row's own key and value come from where they were projected, and only go to the cache.
                    turned = ROTATION * work.rows * (heads + kv_heads) * dim;
                    fresh = work.rows * 2 * kv_heads * dim * act;
                    cache = operands.kv_parts * work.read.saturating_sub(work.rows) * kv_token + work.rows * kv_row;
                }
                let flops = 2 * heads * (dim + values) * work.attended + turned;
                let rows = work.rows * heads * (dim + values) * act + fresh;
                Parts { cache, ..parts([work.rows, work.widest, dim], flops, rows) }
            }
            // The score matrix lies in memory whole: the first op writes all of it, the second one too (zeroes where
            // nothing is visible), the third reads what is visible. Others write no more than that.
            OpKind::AttnScores => {
                let work = attention(Rows::Context);
                let scores = if ran.output == Output::Visible { work.attended } else { work.rectangle };
                let rows = work.rows * heads * dim * act + scores * heads * F32;
                let flops = 2 * heads * dim * work.attended;
                Parts { cache: work.read * kv_token, ..parts([work.rows, work.widest, dim], flops, rows) }
            }
            OpKind::AttnSoftmax { .. } => {
                let work = attention(Rows::Context);
                let scores = if ran.output == Output::Visible { work.attended } else { work.rectangle };
                let rows = (work.attended + scores) * heads * F32;
                parts([work.rows * heads, work.widest, 0], 5 * heads * work.attended, rows)
            }
            OpKind::AttnValues => {
                let work = attention(Rows::Context);
                let rows = work.rows * heads * values * act + work.attended * heads * F32;
                let flops = 2 * heads * values * work.attended;
                Parts { cache: work.read * kv_token, ..parts([work.rows, work.widest, values], flops, rows) }
            }
            OpKind::SiluMul => parts([m, inter, 0], ACTIVATION * m * inter, 2 * m * inter * act + written(m, inter)),
            OpKind::Route { bias } => {
                let bias = if bias.is_some() { count * F32 } else { 0 };
                parts([m, count, 0], 5 * m * count, (m * count + 2 * pairs) * F32 + bias)
            }
            OpKind::ExpertLinear { x, weight, bias, out } => {
                let (n, k) = linear_shape(config, weight);
                let activates = out == Buf::ExpertAct || ran.output == Output::Activated;
                let (width, applied) = if activates { (n / 2, ACTIVATION * pairs * (n / 2)) } else { (n, 0) };
                let input = match ran.input {
                    Input::Gathered => (m + 2 * pairs) * k * act,
                    Input::GatheredCodes => m * k * act + 2 * codes(pairs, k),
                    Input::Codes => codes(pairs, k),
                    _ if x == Buf::Normed => m * k * act,
                    _ => pairs * k * act,
                };
                let used = experts.map_or(0, |moe| step.used(moe, layer));
                let bias = if bias.is_some() { used * n * F32 } else { 0 };
                let matrices = used * operands.matrix(weight).bytes(n, k);
                let flops = 2 * pairs * n * k + applied;
                Parts { matrices, ..parts([pairs, n, k], flops, input + written(pairs, width) + bias) }
            }
            OpKind::ExpertSiluMul => {
                let width = experts.map_or(0, |moe| moe.intermediate_size as u64);
                let bytes = 2 * pairs * width * act + written(pairs, width);
                parts([pairs, width, 0], ACTIVATION * pairs * width, bytes)
            }
            OpKind::ExpertSum { add } => {
                let read = if add && ran.output != Output::Residual { m } else { 0 };
                let bytes = (pairs + read) * hidden * act + written(m, hidden) + 2 * pairs * F32;
                parts([m, hidden, pairs / m.max(1)], 2 * pairs * hidden, bytes)
            }
            OpKind::Gather => parts([step.sampled, hidden, 0], 0, 2 * step.sampled * hidden * act),
            OpKind::Sample => match ran.input {
                Input::Maxima(tiles) => {
                    let found = step.sampled * u64::from(tiles);
                    parts([step.sampled, u64::from(tiles), 0], found, found * MAXIMUM)
                }
                _ => {
                    let logits = step.sampled * config.vocab_size as u64;
                    parts([step.sampled, config.vocab_size as u64, 0], logits, logits * F32)
                }
            },
        }
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
    // A layer whose experts share nothing has no block of its own.
    for layer in (0..config.num_hidden_layers).filter(|layer| config.dense_width(*layer) > 0) {
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
    use super::*;
    use crate::presets::{preset, presets};
    use crate::program::{ProgramOptions, program};

    /// Every op by itself.
    const SEPARATE: ProgramOptions = ProgramOptions { context_fmha: true, own_table: false, activated_multiple: None };

    fn config(name: &str) -> ModelConfig {
        preset(name).unwrap().config()
    }

    fn prompt(rows: u64, keys: u64) -> SpanShape {
        SpanShape { rows, keys, context: true }
    }

    fn decode(keys: u64) -> SpanShape {
        SpanShape { rows: 1, keys, context: false }
    }

    fn step(spans: &[SpanShape], sampled: u64, operands: Operands) -> StepShape<'_> {
        let tokens = spans.iter().map(|span| span.rows).sum();
        StepShape { spans, tokens, sampled, operands, experts_used: &[] }
    }

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
                    let span = prompt(rows, before + rows);
                    assert_eq!(attended(span, window).0, attended_by_rows(span, window), "{span:?} {window:?}");
                }
            }
        }
    }

    /// Every preset, and what no preset has: windows in some layers, other layers without experts.
    fn configs() -> Vec<ModelConfig> {
        let mut all: Vec<_> = presets().iter().map(|preset| preset.config()).collect();
        for (name, windowed, dense) in [("moe-tiny", true, 0), ("moe-tiny", false, 1), ("micro", true, 0)] {
            let mut config = config(name);
            if windowed {
                config.sliding_window = (0..config.num_hidden_layers).map(|l| (l % 2 == 0).then_some(16)).collect();
            }
            config.moe = config.moe.map(|moe| MoeConfig { dense_layers: (0..dense).collect(), ..moe });
            all.push(config);
        }
        all
    }

    /// How engines keep things: floats, integers on a CPU, e4m3 on a GPU.
    fn operands(config: &ModelConfig) -> Vec<Operands> {
        let plain = Operands::plain(2, 2, 2);
        let ints = Operands { kv: 1, kv_scale: 4, codes: MatrixType::Int8Rows, ..Operands::plain(4, 1, 4) };
        let mut all = vec![
            plain,
            Operands::plain(4, 4, 4),
            Operands { layers: MatrixType::Int8, head: MatrixType::Int8, ..ints },
            Operands { layers: MatrixType::Int4, head: MatrixType::Int8, ..ints },
        ];
        if config.moe.is_none() && config.latent.is_none() {
            all.push(Operands { layers: MatrixType::Fp8, codes: MatrixType::Fp8, kv: 1, ..plain });
        }
        if config.latent.is_some() {
            all.push(Operands { kv_parts: 1, ..plain });
        }
        all
    }

    #[test]
    fn step_work_is_the_sum_over_the_list() {
        let batches: [(&[SpanShape], u64); 7] = [
            (&[decode(1)], 1),
            (&[decode(33), decode(9), decode(2000)], 3),
            (&[prompt(40, 40)], 1),
            (&[prompt(40, 72)], 0),
            (&[prompt(40, 72), decode(33)], 2),
            (&[prompt(1, 17), prompt(300, 300), decode(18), decode(512)], 4),
            (&[prompt(3, 3), decode(4)], 2),
        ];
        for config in configs() {
            let experts = config.moe.as_ref().map_or(0, |moe| moe.num_experts as u32);
            let few: Vec<u32> = (0..config.num_hidden_layers as u32).map(|layer| experts.min(1 + layer % 3)).collect();
            for (spans, sampled) in batches {
                for operands in operands(&config) {
                    for experts_used in [&few[..], &[]] {
                        let step = StepShape { experts_used, ..step(spans, sampled, operands) };
                        check_sum(&config, &step);
                    }
                }
            }
        }
    }

    fn check_sum(config: &ModelConfig, step: &StepShape<'_>) {
        let work = step_work(config, step);
        for context_fmha in [true, false] {
            let nodes = program(config, ProgramOptions { context_fmha, ..SEPARATE });
            let run: Vec<_> = nodes.iter().filter(|node| node.rows(step) > 0).collect();
            let parts = || run.iter().map(|node| (node, node.parts(config, step, Ran::default())));
            let counted = |node: &Node| {
                matches!(node.category(), "gemm" | "moe_gemm" | "attention") && node.name != "attn_softmax"
            };
            let flops: u64 = parts().filter(|(node, _)| counted(node)).map(|(_, parts)| parts.flops).sum();
            assert_eq!(flops, work.flops, "{step:?}, fused {context_fmha}");
            let bytes: u64 = parts().map(|(_, parts)| parts.matrices + parts.cache).sum();
            // Without fused attention, a key that is its own value is read twice.
            let twice = !context_fmha && step.operands.kv_parts == 1 && step.spans.iter().any(|span| span.context);
            if twice {
                assert!(bytes > work.bytes, "{step:?}");
            } else {
                assert_eq!(bytes, work.bytes, "{step:?}, fused {context_fmha}");
            }
            let all: u64 = run.iter().map(|node| node.cost(config, step, Ran::default()).bytes).sum();
            assert!(all > bytes, "{step:?}: activations are no part of it");
        }
    }

    #[test]
    fn an_activation_within_the_product_spares_memory_and_no_work() {
        for name in ["micro", "moe-tiny", "deepseek-tiny"] {
            let config = config(name);
            let spans = [prompt(9, 9)];
            let step = step(&spans, 1, Operands::plain(2, 2, 4));
            let total = |activated_multiple: Option<usize>| {
                let nodes = program(&config, ProgramOptions { activated_multiple, ..SEPARATE });
                let names: Vec<_> = nodes.iter().filter(|node| node.category() == "activation").collect();
                let costs = nodes.iter().map(|node| node.cost(&config, &step, Ran::default()));
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
        let config = config("moe-tiny");
        let spans = [decode(9)];
        let step = step(&spans, 1, Operands::plain(2, 2, 4));
        let nodes = program(&config, SEPARATE);
        let node = nodes.iter().find(|n| n.name == "expert_gate_up").unwrap();
        let bytes = |used: &[u32]| node.cost(&config, &StepShape { experts_used: used, ..step }, Ran::default()).bytes;
        let matrix = 2 * 2 * 192 * 128;
        // One token reaches two experts at most, and known numbers win.
        assert_eq!(bytes(&[]), bytes(&[2]));
        assert_eq!(bytes(&[7]) - bytes(&[2]), 5 * matrix);
        let work = |used: &[u32]| step_work(&config, &StepShape { experts_used: used, ..step }).bytes;
        assert_eq!(work(&[2; 4]), work(&[]));
        assert_eq!(work(&[3; 4]) - work(&[2; 4]), 4 * (matrix + matrix / 2));
    }

    /// What ops of `tinyllama-1.1b` cost for 3 rows in 16 bits, by how they ran: 2048 wide, 5632 inside, 32 heads and 4 of
    /// keys of 64, 32000 tokens.
    #[test]
    fn costs_are_those_of_what_ran() {
        let config = config("tinyllama-1.1b");
        let spans = [decode(10), decode(20), decode(30)];
        let operands = Operands { layers: MatrixType::Fp8, codes: MatrixType::Fp8, ..Operands::plain(2, 2, 2) };
        let step = step(&spans, 3, operands);
        let nodes = program(&config, SEPARATE);
        let cost = |name: &str, ran: Ran| {
            let node = nodes.iter().find(|n| n.name == name).unwrap();
            let cost = node.cost(&config, &step, ran);
            (cost.flops, cost.bytes)
        };
        let plain = Ran::default();
        let read = |input| Ran { input, ..plain };
        let wrote = |output| Ran { output, ..plain };
        let (h, inter) = (2048, 5632);

        let norm = |ran| cost("post_norm", ran);
        assert_eq!(norm(plain), (5 * 3 * h, 3 * h * (4 + 2 + 4 + 2) + 4 * h));
        assert_eq!(norm(read(Input::Settled)), (4 * 3 * h, 3 * h * (4 + 2) + 4 * h));
        let codes = Ran { output: Output::Codes, ..read(Input::Settled) };
        assert_eq!(norm(codes), (4 * 3 * h, 3 * h * 4 + 3 * (h + 4) + 4 * h));

        let (weight, flops) = (h * (h + 4), 2 * 3 * h * h);
        let o = |ran| cost("o_proj", ran);
        assert_eq!(o(plain), (flops, weight + 3 * h * (2 + 2)));
        assert_eq!(o(read(Input::Codes)), (flops, weight + 3 * (h + 4) + 3 * h * 2));
        assert_eq!(o(read(Input::Quantized)), (flops, weight + 3 * h * 2 + 2 * 3 * (h + 4) + 3 * h * 2));
        assert_eq!(o(wrote(Output::Residual)), (flops + 3 * h, weight + 3 * h * (2 + 8)));
        let scaled = Ran { pass: Pass::Scale, ..wrote(Output::Residual) };
        assert_eq!(o(scaled), (flops + 3 * h, weight + 3 * h * (2 + 8 + 8)));
        assert_eq!(o(Ran { pass: Pass::Bias, ..plain }), (flops, weight + 3 * h * (2 + 2 + 4)));

        let (weight, flops) = (2 * inter * (h + 4), 2 * 3 * 2 * inter * h);
        let gate_up = |ran| cost("gate_up_proj", ran);
        assert_eq!(gate_up(plain), (flops, weight + 3 * h * 2 + 3 * 2 * inter * 2));
        let folded = Ran { output: Output::Activated, ..read(Input::Norm) };
        let expected = (flops + 4 * 3 * h + 5 * 3 * inter, weight + 3 * h * 4 + 4 * h + 3 * inter * 2);
        assert_eq!(gate_up(folded), expected);
        assert_eq!(cost("silu_mul", plain), (5 * 3 * inter, 3 * inter * 6));
        assert_eq!(cost("silu_mul", wrote(Output::Codes)), (5 * 3 * inter, 3 * inter * 4 + 3 * (inter + 4)));

        let (qk, kv) = ((32 + 4) * 64, 4 * 64);
        let rope = 3 * (2 * qk * 2 + kv * 2 + 2 * kv * 2);
        assert_eq!(cost("rope_kv_write", plain), (3 * 3 * qk, rope));
        let attention = |ran| cost("attention", ran);
        assert_eq!(attention(plain), (4 * h * 60, 3 * 2 * h * 2 + 60 * 2 * kv * 2));
        // 57 keys of before and three new ones: read where they were projected, written to the cache.
        let fused = 3 * 2 * h * 2 + 3 * 2 * kv * 2 + 60 * 2 * kv * 2;
        assert_eq!(attention(read(Input::Unrotated)), (4 * h * 60 + 3 * 3 * qk, fused));

        let (vocab, flops) = (32_000, 2 * 3 * 32_000 * h);
        let head = |ran| cost("lm_head", ran);
        assert_eq!(head(plain), (flops, vocab * h * 2 + 3 * h * 2 + 3 * vocab * 4));
        let maxima = |spared| wrote(Output::Maxima { tiles: 250, spared });
        assert_eq!(head(maxima(false)).1, head(plain).1 + 3 * 250 * 8);
        assert_eq!(head(maxima(true)).1, vocab * h * 2 + 3 * h * 2 + 3 * 250 * 8);
        assert_eq!(cost("sample", plain), (3 * vocab, 3 * vocab * 4));
        assert_eq!(cost("sample", read(Input::Maxima(250))), (3 * 250, 3 * 250 * 8));
    }

    #[test]
    fn costs_of_experts_and_of_latent_attention_too() {
        let config = config("moe-tiny");
        let spans = [prompt(9, 9)];
        let step_of = step(&spans, 1, Operands { codes: MatrixType::Int8Rows, ..Operands::plain(2, 2, 4) });
        let nodes = program(&config, SEPARATE);
        let bytes = |name: &str, ran| nodes.iter().find(|n| n.name == name).unwrap().cost(&config, &step_of, ran).bytes;
        let read = |input| Ran { input, ..Ran::default() };
        let wrote = |output| Ran { output, ..Ran::default() };
        let of = |name: &str, ran| bytes(name, ran) as i64 - bytes(name, Ran::default()) as i64;
        // 9 rows of 128 become 18; experts are 192 wide. A block of 256 codes takes 296 bytes.
        assert_eq!(of("expert_gate_up", read(Input::Gathered)), 2 * 18 * 128 * 4);
        assert_eq!(of("expert_gate_up", read(Input::GatheredCodes)), 2 * 18 * 296);
        assert_eq!(of("expert_gate_up", wrote(Output::Activated)), -18 * 192 * 4);
        assert_eq!(of("expert_down", read(Input::Codes)), 18 * (296 - 192 * 4));
        assert_eq!(of("expert_sum", wrote(Output::Residual)), 9 * 128 * (8 - 4));

        let config = self::config("deepseek-tiny");
        let latent = config.latent.unwrap();
        let (heads, turned) = (config.num_attention_heads as i64, latent.qk_rope_head_dim as i64);
        let dim = config.head_dim as i64;
        let step_of = step(&spans, 1, Operands { kv_parts: 1, ..Operands::plain(2, 2, 2) });
        let nodes = program(&config, SEPARATE);
        let bytes =
            |name: &str, ran| nodes.iter().find(|n| n.name == name).unwrap().cost(&config, &step_of, ran).bytes as i64;
        let keys = read(Input::LatentKeys);
        let queries = bytes("latent_queries", Ran::default()) - bytes("latent_queries", keys);
        assert_eq!(queries, 9 * (2 * heads * turned + 3 * dim) * 2);
        // One row of latents in, one into the cache; only the rotated part of queries.
        assert_eq!(bytes("rope_kv_write", keys), 9 * (2 * dim + 2 * heads * turned) * 2);
    }

    #[test]
    fn bytes_of_integer_matrices_hold_their_scales() {
        assert_eq!(MatrixType::Int8.bytes(32, 512), 2 * 8320);
        assert_eq!(MatrixType::Int4.bytes(32, 512), 2 * 4608);
        assert_eq!(MatrixType::Int8.bytes(1, 300), 308);
        assert_eq!(MatrixType::Plain(2).bytes(3, 5), 30);
        assert_eq!(MatrixType::Fp8.bytes(3, 5), 27);
        assert_eq!(MatrixType::Int8Rows.bytes(2, 257), 2 * 2 * 296);
    }
}
