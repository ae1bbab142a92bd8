//! Latent attention on a CPU: queries into the space of the cache, and values back, the products of all heads together.

use std::ops::Range;

use strobe_kernels_cpu::{Cpu, Matrix, QuantRows};
use strobe_model::{LatentAttention, ModelConfig};

/// Tokens whose heads are multiplied together: enough to use a weight well, few enough for the buffers to stay small.
const BLOCK: usize = 64;
/// The epsilon of the norms of latent vectors, whatever the model's other norms have.
pub(crate) const EPS: f32 = 1e-6;

/// Buffers of latent attention.
pub(crate) struct LatentState {
    shapes: LatentAttention,
    heads: usize,
    /// The queries' latent vectors, before and after their norm.
    pub(crate) q_latent: Vec<f32>,
    pub(crate) q_normed: Vec<f32>,
    /// Queries as they are projected; later what attention gives for each head.
    pub(crate) per_head: Vec<f32>,
    /// Latent vector and rotated part of each token.
    pub(crate) kv_latent: Vec<f32>,
    /// The rows of a block of tokens before and after the products of the heads, head by head.
    before: Vec<f32>,
    after: Vec<f32>,
    /// The rows as integers, where the weights are.
    codes: QuantRows,
}

/// The widest input of a head's product.
fn widest(shapes: &LatentAttention) -> usize {
    shapes.kv_lora_rank.max(shapes.qk_nope_head_dim)
}

/// The widest input or output of a head's product.
fn widest_row(shapes: &LatentAttention) -> usize {
    widest(shapes).max(shapes.v_head_dim)
}

/// Rows and inputs of the largest product of heads.
pub(crate) fn largest_product(config: &ModelConfig, tokens: usize) -> Option<(usize, usize)> {
    let shapes = config.latent.as_ref()?;
    Some((config.num_attention_heads * tokens.min(BLOCK), widest(shapes)))
}

/// `out[head] = x[head] . w[head]^T`, of integers where the weight is.
fn product(cpu: &mut Cpu, codes: &mut QuantRows, x: &[f32], heads: usize, w: Matrix<'_>, out: &mut [f32]) {
    if w.data.quant_kind().is_some() {
        cpu.quantize_rows(x, w.k, codes);
        cpu.stacked_linear_quantized(codes, heads, w, out);
    } else {
        cpu.stacked_linear(x, heads, w, out);
    }
}

/// Blocks of at most [`BLOCK`] of `m` tokens.
fn blocks(m: usize) -> impl Iterator<Item = Range<usize>> {
    (0..m).step_by(BLOCK).map(move |start| start..m.min(start + BLOCK))
}

/// Bytes of these buffers for so many tokens.
pub(crate) fn bytes(config: &ModelConfig, tokens: usize, integers: bool) -> usize {
    let (Some(shapes), Some((rows, width))) = (&config.latent, largest_product(config, tokens)) else { return 0 };
    let head = shapes.query_width().max(shapes.v_head_dim);
    let floats = 2 * shapes.q_lora_rank.unwrap_or(0) + config.num_attention_heads * head + shapes.key_width();
    let codes = if integers { QuantRows::bytes_of(rows, width) } else { 0 };
    4 * (tokens * floats + 2 * rows * widest_row(shapes)) + codes
}

impl LatentState {
    pub(crate) fn new(config: &ModelConfig, tokens: usize, integers: bool) -> Option<LatentState> {
        let (shapes, (product_rows, width)) = (config.latent?, largest_product(config, tokens)?);
        let mut codes = QuantRows::new();
        if integers {
            codes.reserve(product_rows, width);
        }
        let rows = |width: usize| vec![0.0; tokens * width];
        Some(LatentState {
            q_latent: rows(shapes.q_lora_rank.unwrap_or(0)),
            q_normed: rows(shapes.q_lora_rank.unwrap_or(0)),
            per_head: rows(config.num_attention_heads * shapes.query_width().max(shapes.v_head_dim)),
            kv_latent: rows(shapes.key_width()),
            before: vec![0.0; product_rows * widest_row(&shapes)],
            after: vec![0.0; product_rows * widest_row(&shapes)],
            codes,
            heads: config.num_attention_heads,
            shapes,
        })
    }

    /// Normalise the queries' latent vectors of `m` tokens.
    pub(crate) fn norm_queries(&mut self, cpu: &mut Cpu, m: usize, weight: &[f32]) {
        let len = m * weight.len();
        cpu.rms_norm(&self.q_latent[..len], weight, EPS, &mut self.q_normed[..len]);
    }

    /// Make the rows of attention's input: the queries of all heads, then the key and the value of the token.
    pub(crate) fn queries_and_keys(
        &mut self,
        cpu: &mut Cpu,
        m: usize,
        norm: &[f32],
        keys: Matrix<'_>,
        qkv: &mut [f32],
    ) {
        let shapes = &self.shapes;
        let (latent, rotated, width) = (shapes.kv_lora_rank, shapes.qk_rope_head_dim, shapes.key_width());
        let (nope, query) = (shapes.qk_nope_head_dim, shapes.query_width());
        let (heads, row_len) = (self.heads, (self.heads + 2) * width);
        let factor = shapes.query_factor();
        for block in blocks(m) {
            let (tokens, first) = (block.len(), block.start);
            let (before, after) = (&mut self.before, &mut self.after);
            let kv_latent = &self.kv_latent[first * width..block.end * width];
            let qkv = &mut qkv[first * row_len..block.end * row_len];
            for (token, kv) in kv_latent.chunks_exact(width).enumerate() {
                before[token * latent..(token + 1) * latent].copy_from_slice(&kv[..latent]);
            }
            cpu.rms_norm(&before[..tokens * latent], norm, EPS, &mut after[..tokens * latent]);
            for (token, row) in qkv.chunks_exact_mut(row_len).enumerate() {
                let c = &after[token * latent..(token + 1) * latent];
                let k_rotated = &kv_latent[token * width + latent..(token + 1) * width];
                let (key, value) = row[heads * width..].split_at_mut(width);
                shapes.arrange(c, k_rotated, 1.0, key);
                value[..latent].copy_from_slice(c);
                value[latent..].fill(0.0);
            }
            let query_of = |token: usize, head: usize| ((first + token) * heads + head) * query;
            for (row, before) in before.chunks_exact_mut(nope).take(heads * tokens).enumerate() {
                before.copy_from_slice(&self.per_head[query_of(row % tokens, row / tokens)..][..nope]);
            }
            let (x, out) = (&before[..heads * tokens * nope], &mut after[..heads * tokens * latent]);
            product(cpu, &mut self.codes, x, heads, keys, out);
            for (token, row) in qkv.chunks_exact_mut(row_len).enumerate() {
                for (head, row) in row.chunks_exact_mut(width).take(heads).enumerate() {
                    let q_rotated = &self.per_head[query_of(token, head) + nope..][..rotated];
                    let c = &after[(head * tokens + token) * latent..][..latent];
                    shapes.arrange(c, q_rotated, factor, row);
                }
            }
        }
    }

    /// Bring what attention gives in the latent space back to each head's values.
    pub(crate) fn values(&mut self, cpu: &mut Cpu, m: usize, values: Matrix<'_>, attn: &[f32]) {
        let (latent, width, v) = (self.shapes.kv_lora_rank, self.shapes.key_width(), self.shapes.v_head_dim);
        let heads = self.heads;
        for block in blocks(m) {
            let (tokens, first) = (block.len(), block.start);
            for (row, before) in self.before.chunks_exact_mut(latent).take(heads * tokens).enumerate() {
                let (token, head) = (first + row % tokens, row / tokens);
                before.copy_from_slice(&attn[(token * heads + head) * width..][..latent]);
            }
            let (x, out) = (&self.before[..heads * tokens * latent], &mut self.after[..heads * tokens * v]);
            product(cpu, &mut self.codes, x, heads, values, out);
            for (row, after) in self.after.chunks_exact(v).take(heads * tokens).enumerate() {
                let (token, head) = (first + row % tokens, row / tokens);
                self.per_head[(token * heads + head) * v..][..v].copy_from_slice(after);
            }
        }
    }
}
