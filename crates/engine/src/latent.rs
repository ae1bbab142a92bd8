//! Latent attention on a CPU: queries into the space of the cache, and values back, head by head.

use strobe_kernels_cpu::{Cpu, Matrix, QuantRows};
use strobe_model::{LatentAttention, ModelConfig};

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
    /// One head's rows before and after its product.
    before: Vec<f32>,
    after: Vec<f32>,
    /// Its rows as integers, where the weights are.
    codes: QuantRows,
}

/// The widest input of a head's product.
fn widest(shapes: &LatentAttention) -> usize {
    shapes.kv_lora_rank.max(shapes.qk_nope_head_dim)
}

/// `out = x . w^T`, of integers where the weight is.
fn product(cpu: &mut Cpu, codes: &mut QuantRows, x: &[f32], w: Matrix<'_>, out: &mut [f32]) {
    if w.data.quant_kind().is_some() {
        cpu.quantize_rows(x, w.k, codes);
        cpu.linear_quantized(codes, w, None, out);
    } else {
        cpu.linear(x, x.len() / w.k, w, None, out);
    }
}

/// Bytes of these buffers for so many tokens.
pub(crate) fn bytes(config: &ModelConfig, tokens: usize, integers: bool) -> usize {
    let Some(shapes) = &config.latent else { return 0 };
    let head = shapes.query_width().max(shapes.v_head_dim);
    let one = shapes.kv_lora_rank.max(shapes.qk_nope_head_dim).max(shapes.v_head_dim);
    let floats = 2 * shapes.q_lora_rank.unwrap_or(0) + config.num_attention_heads * head + shapes.key_width() + 2 * one;
    let codes = if integers { QuantRows::bytes_of(tokens, widest(shapes)) } else { 0 };
    4 * tokens * floats + codes
}

impl LatentState {
    pub(crate) fn new(config: &ModelConfig, tokens: usize, integers: bool) -> Option<LatentState> {
        let shapes = config.latent?;
        let mut codes = QuantRows::new();
        if integers {
            codes.reserve(tokens, widest(&shapes));
        }
        let rows = |width: usize| vec![0.0; tokens * width];
        let one = shapes.kv_lora_rank.max(shapes.qk_nope_head_dim).max(shapes.v_head_dim);
        Some(LatentState {
            q_latent: rows(shapes.q_lora_rank.unwrap_or(0)),
            q_normed: rows(shapes.q_lora_rank.unwrap_or(0)),
            per_head: rows(config.num_attention_heads * shapes.query_width().max(shapes.v_head_dim)),
            kv_latent: rows(shapes.key_width()),
            before: rows(one),
            after: rows(one),
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
        let row_len = (self.heads + 2) * width;
        let (before, after) = (&mut self.before, &mut self.after);
        for (token, kv) in self.kv_latent[..m * width].chunks_exact(width).enumerate() {
            before[token * latent..(token + 1) * latent].copy_from_slice(&kv[..latent]);
        }
        cpu.rms_norm(&before[..m * latent], norm, EPS, &mut after[..m * latent]);
        for (token, row) in qkv[..m * row_len].chunks_exact_mut(row_len).enumerate() {
            let c = &after[token * latent..(token + 1) * latent];
            let k_rotated = &self.kv_latent[token * width + latent..(token + 1) * width];
            let (key, value) = row[self.heads * width..].split_at_mut(width);
            shapes.arrange(c, k_rotated, 1.0, key);
            value[..latent].copy_from_slice(c);
            value[latent..].fill(0.0);
        }
        let factor = shapes.query_factor();
        for head in 0..self.heads {
            let query_of = |token: usize| (token * self.heads + head) * query;
            for token in 0..m {
                let q = &self.per_head[query_of(token)..][..nope];
                before[token * nope..(token + 1) * nope].copy_from_slice(q);
            }
            product(cpu, &mut self.codes, &before[..m * nope], keys.nth(head), &mut after[..m * latent]);
            for (token, row) in qkv[..m * row_len].chunks_exact_mut(row_len).enumerate() {
                let q_rotated = &self.per_head[query_of(token) + nope..][..rotated];
                let c = &after[token * latent..(token + 1) * latent];
                shapes.arrange(c, q_rotated, factor, &mut row[head * width..(head + 1) * width]);
            }
        }
    }

    /// Bring what attention gives in the latent space back to each head's values.
    pub(crate) fn values(&mut self, cpu: &mut Cpu, m: usize, values: Matrix<'_>, attn: &[f32]) {
        let (latent, width, v) = (self.shapes.kv_lora_rank, self.shapes.key_width(), self.shapes.v_head_dim);
        for head in 0..self.heads {
            for token in 0..m {
                let from = &attn[(token * self.heads + head) * width..][..latent];
                self.before[token * latent..(token + 1) * latent].copy_from_slice(from);
            }
            let (x, out) = (&self.before[..m * latent], &mut self.after[..m * v]);
            product(cpu, &mut self.codes, x, values.nth(head), out);
            for token in 0..m {
                let to = &mut self.per_head[(token * self.heads + head) * v..][..v];
                to.copy_from_slice(&self.after[token * v..(token + 1) * v]);
            }
        }
    }
}
