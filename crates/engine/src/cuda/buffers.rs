//! What a step's ops read and write on the GPU; made once, for the limits of a step.

use strobe_kernels_cuda::{CudaError, DeviceBuffer, Precision, score_elements};
use strobe_model::ModelConfig;

use crate::backend::qkv_shape;
use crate::step::StepLimits;

/// Room for forbidden tokens that is made at once.
pub(super) const FEW_BANNED: usize = 1 << 12;

/// What a step's ops write into.
pub(super) struct Buffers {
    pub hidden: DeviceBuffer,
    pub normed: DeviceBuffer,
    pub qkv: DeviceBuffer,
    pub attn: DeviceBuffer,
    pub proj: DeviceBuffer,
    pub gate_up: DeviceBuffer,
    pub act: DeviceBuffer,
    pub sampled: DeviceBuffer,
    pub logits: DeviceBuffer,
    pub tokens: DeviceBuffer,
    pub cos: DeviceBuffer,
    pub sin: DeviceBuffer,
    /// e4m3 codes and row scales of a product's input.
    pub codes: Option<(DeviceBuffer, DeviceBuffer)>,
    pub scores: Option<DeviceBuffer>,
    /// Where the model has latent attention.
    pub latent: Option<LatentBuffers>,
    pub packed: DeviceBuffer,
    /// Tokens that some rows may not draw; grows, because nobody knows how many a request will name.
    pub banned: DeviceBuffer,
}

/// What latent attention needs besides.
pub(super) struct LatentBuffers {
    /// The queries' latent vectors, before and after their norm.
    pub q_latent: DeviceBuffer,
    pub q_normed: DeviceBuffer,
    /// Queries as they are projected; later what attention gives for each head.
    pub per_head: DeviceBuffer,
    /// Latent vector and rotated part of each token.
    pub kv_latent: DeviceBuffer,
}

/// Elements of all score matrices that a step can have: each row of a step may belong to a request of full length.
fn most_scores(config: &ModelConfig, limits: StepLimits) -> usize {
    score_elements(config.num_attention_heads, limits.tokens, limits.positions)
}

impl Buffers {
    /// Everything that a step of `limits` needs, with inputs of `words` words.
    pub(super) fn new(
        config: &ModelConfig,
        limits: StepLimits,
        precision: Precision,
        fp8: bool,
        context_fmha: bool,
        words: usize,
    ) -> Result<Buffers, CudaError> {
        let shape = qkv_shape(config);
        let (hidden, rows) = (config.hidden_size, limits.tokens);
        // Of dense blocks, and of what experts share; the experts' own gate and up never reach memory.
        let inter = (0..config.num_hidden_layers).map(|layer| config.dense_width(layer)).max().unwrap_or(0);
        let experts = config.moe.as_ref().map_or(0, |moe| moe.experts_per_token * moe.intermediate_size);
        let q_width = shape.heads * shape.head_dim;
        let wide = |width: usize, what: &str| DeviceBuffer::new(rows * width * precision.bytes(), what);
        let (cos, sin) = config.rope_tables(limits.positions);
        let table = |values: &[f32]| {
            let buffer = DeviceBuffer::new(size_of_val(values), "rotary tables")?;
            buffer.write(0, values)?;
            Ok::<_, CudaError>(buffer)
        };
        let codes = match fp8 {
            true => Some((
                DeviceBuffer::new(rows * hidden.max(inter).max(q_width), "e4m3 activations")?,
                DeviceBuffer::new(rows * 4, "scales of activations")?,
            )),
            false => None,
        };
        let scores = match context_fmha {
            true => None,
            false => Some(DeviceBuffer::new(most_scores(config, limits) * 4, "unfused attention")?),
        };
        let latent = match &config.latent {
            None => None,
            Some(latent) => {
                let of_queries = latent.q_lora_rank.unwrap_or(0);
                let head = latent.query_width().max(latent.v_head_dim);
                Some(LatentBuffers {
                    q_latent: wide(of_queries, "latent queries")?,
                    q_normed: wide(of_queries, "latent queries")?,
                    per_head: wide(shape.heads * head, "queries of heads")?,
                    kv_latent: wide(latent.key_width(), "latent keys")?,
                })
            }
        };
        let buffers = Buffers {
            hidden: DeviceBuffer::new(rows * hidden * 4, "the residual stream")?,
            normed: wide(hidden, "normed rows")?,
            qkv: wide(q_width + 2 * shape.kv_heads * shape.head_dim, "q, k and v")?,
            attn: wide(q_width, "attention")?,
            proj: wide(hidden, "projections")?,
            gate_up: wide(2 * inter, "gate and up")?,
            act: wide(inter.max(experts), "activations")?,
            sampled: DeviceBuffer::new(limits.sampled * hidden * precision.bytes(), "sampled rows")?,
            logits: DeviceBuffer::new(limits.sampled * config.vocab_size * 4, "logits")?,
            tokens: DeviceBuffer::new(limits.sampled * 4, "tokens")?,
            cos: table(&cos)?,
            sin: table(&sin)?,
            codes,
            scores,
            latent,
            packed: DeviceBuffer::new(words * 4, "step inputs")?,
            banned: DeviceBuffer::new(FEW_BANNED * 4, "forbidden tokens")?,
        };
        // The first step reads it for padding rows.
        buffers.tokens.fill(0)?;
        Ok(buffers)
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> u64 {
        let plain = [
            &self.hidden,
            &self.normed,
            &self.qkv,
            &self.attn,
            &self.proj,
            &self.gate_up,
            &self.act,
            &self.sampled,
            &self.logits,
            &self.tokens,
            &self.cos,
            &self.sin,
            &self.packed,
        ];
        let codes = self.codes.as_ref().map_or(0, |(codes, scales)| codes.bytes() + scales.bytes());
        let scores = self.scores.as_ref().map_or(0, DeviceBuffer::bytes);
        let latent = self
            .latent
            .as_ref()
            .map_or(0, |l| [&l.q_latent, &l.q_normed, &l.per_head, &l.kv_latent].iter().map(|b| b.bytes()).sum());
        (plain.iter().map(|b| b.bytes()).sum::<usize>() + codes + scores + latent) as u64
    }
}
