//! A model's attention on the GPU, whichever kind it is, and the ops around latent attention.

use strobe_kernels_cuda::{
    Attention, AttentionConfig, CudaError, DecodeArgs, DevicePtr, Gpu, KvDtype, LatentConfig, LatentKeysArgs,
    LatentOps, Precision, PrefillArgs, RopeAngles, Spent, UnfusedConfig,
};
use strobe_model::program::{Node, OpKind};
use strobe_model::{LayerWeight, ModelConfig, WeightId};

use crate::backend::qkv_shape;
use crate::latent::EPS;

use super::CudaBackend;
use super::inputs::{Packed, at};

/// The kernels of a model's attention.
pub(super) enum AttentionOps {
    /// Keys and values of heads.
    Heads(Attention),
    /// One latent row for all heads.
    Latent(LatentOps),
}

impl AttentionOps {
    /// Find the kernels for a model, for at most `max_spans` single rows.
    pub(super) fn new(
        gpu: &Gpu,
        config: &ModelConfig,
        precision: Precision,
        kv: KvDtype,
        tokens_per_block: usize,
        max_spans: usize,
    ) -> Result<AttentionOps, CudaError> {
        let shape = qkv_shape(config);
        let Some(latent) = latent_config(config, precision, tokens_per_block) else {
            let config = AttentionConfig {
                precision,
                kv,
                heads: shape.heads,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                tokens_per_block,
                max_spans,
            };
            return Attention::new(gpu, config).map(AttentionOps::Heads);
        };
        LatentOps::new(gpu, latent).map(AttentionOps::Latent)
    }

    /// See [`Attention::set_spent`]; latent attention reads too little for it to matter.
    ///
    /// # Safety
    /// As for [`Attention::set_spent`].
    pub(super) unsafe fn set_spent(&mut self, places: [Spent; 2]) {
        if let AttentionOps::Heads(ops) = self {
            // SAFETY: the caller's promise.
            unsafe { ops.set_spent(places) };
        }
    }

    /// Query tokens of one tile of [`AttentionOps::prefill`].
    pub(super) fn tokens_per_tile(&self) -> usize {
        match self {
            AttentionOps::Heads(ops) => ops.tokens_per_tile(),
            AttentionOps::Latent(ops) => ops.tokens_per_tile(),
        }
    }

    /// Into how many shares to cut the keys of each of `spans` single rows.
    pub(super) fn splits_for(&self, spans: usize, max_kv: usize) -> usize {
        match self {
            AttentionOps::Heads(ops) => ops.splits_for(spans, max_kv),
            AttentionOps::Latent(ops) => ops.splits_for(spans, max_kv),
        }
    }

    /// Whether [`AttentionOps::decode`] can rotate and write the cache itself.
    pub(super) fn fuses_rope(&self) -> bool {
        matches!(self, AttentionOps::Heads(ops) if ops.fuses_rope())
    }

    /// Attention of spans of several rows.
    ///
    /// # Safety
    /// As for [`Attention::prefill`].
    pub(super) unsafe fn prefill(&self, gpu: &Gpu, args: &PrefillArgs) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                AttentionOps::Heads(ops) => ops.prefill(gpu, args),
                AttentionOps::Latent(ops) => ops.prefill(gpu, args),
            }
        }
    }

    /// Attention of spans of one row; with `angles` rows are rotated and written first.
    ///
    /// # Safety
    /// As for [`Attention::decode_rope`].
    pub(super) unsafe fn decode(
        &self,
        gpu: &Gpu,
        args: &DecodeArgs,
        angles: Option<RopeAngles>,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            match (self, angles) {
                (AttentionOps::Heads(ops), Some(angles)) => ops.decode_rope(gpu, args, angles),
                (AttentionOps::Heads(ops), None) => ops.decode(gpu, args),
                (AttentionOps::Latent(ops), _) => ops.decode(gpu, args),
            }
        }
    }
}

/// The shapes of latent attention, where a model has it.
pub(super) fn latent_config(
    config: &ModelConfig,
    precision: Precision,
    tokens_per_block: usize,
) -> Option<LatentConfig> {
    config.latent.map(|latent| LatentConfig {
        precision,
        heads: config.num_attention_heads,
        latent: latent.kv_lora_rank,
        rotated: latent.qk_rope_head_dim,
        nope: latent.qk_nope_head_dim,
        values: latent.v_head_dim,
        interleaved: latent.rope_interleave,
        scale: latent.scale,
        tokens_per_block,
        eps: EPS,
    })
}

/// Elements of a head's part of attention's output.
pub(super) fn value_dim(config: &ModelConfig) -> usize {
    config.latent.map_or(config.head_dim, |latent| latent.kv_lora_rank)
}

/// Elements of the cache that a token takes in one layer.
pub(super) fn cache_width(config: &ModelConfig) -> usize {
    // A latent row is key and value at once.
    let parts = if config.latent.is_some() { 1 } else { 2 };
    parts * config.num_key_value_heads * config.head_dim
}

/// The same attention through memory.
pub(super) fn unfused_config(
    config: &ModelConfig,
    precision: Precision,
    kv: KvDtype,
    tokens_per_block: usize,
) -> UnfusedConfig {
    let shape = qkv_shape(config);
    UnfusedConfig {
        precision,
        kv,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        tokens_per_block,
        latent: config.latent.map(|latent| latent.kv_lora_rank),
        scale: config.latent.map_or(1.0 / (shape.head_dim as f32).sqrt(), |latent| latent.scale),
    }
}

impl CudaBackend {
    /// Launch an op of latent attention other than the attention itself; `rows` rows, `kv` is the layer's cache.
    ///
    /// # Safety
    /// As for [`CudaBackend::run_nodes`].
    #[expect(unsafe_op_in_unsafe_fn, reason = "nearly every line launches, each on the promise made to this function")]
    pub(super) unsafe fn run_latent(
        &self,
        node: &Node,
        rows: usize,
        packed: &Packed,
        kv: DevicePtr,
    ) -> Result<(), CudaError> {
        let (gpu, b, layout, base) = (&self.gpu, &self.buffers, packed.layout, self.buffers.packed.ptr());
        let (AttentionOps::Latent(ops), Some(latent)) = (&self.attention, &b.latent) else {
            return Err(CudaError::Unsupported(format!("{} in a model without latent attention", node.name)));
        };
        let shape = qkv_shape(&self.config);
        let q_stride = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
        let weight = |id| self.weights.ptr(id);
        match node.kind {
            OpKind::LatentNorm { weight: id } => {
                let width = self.config.latent.and_then(|latent| latent.q_lora_rank).unwrap_or(0);
                ops.norm(gpu, latent.q_latent.ptr(), weight(id)?, latent.q_normed.ptr(), rows, width)
            }
            // The norm is left to the kernel that writes the cache.
            OpKind::LatentQueries { weight: id, .. } => {
                ops.queries(gpu, latent.per_head.ptr(), weight(id)?, b.qkv.ptr(), q_stride, rows)
            }
            OpKind::LatentValues { weight: id } => {
                ops.values(gpu, b.attn.ptr(), weight(id)?, latent.per_head.ptr(), rows)
            }
            _ => ops.keys(
                gpu,
                &LatentKeysArgs {
                    kv_latent: latent.kv_latent.ptr(),
                    norm: weight(WeightId::Layer(node.layer.unwrap_or(0), LayerWeight::KvLatentNorm))?,
                    queries: latent.per_head.ptr(),
                    q: b.qkv.ptr(),
                    q_stride,
                    cosines: b.cos.ptr(),
                    sines: b.sin.ptr(),
                    angle_stride: shape.head_dim / 2,
                    positions: at(base, layout.positions()),
                    slots: at(base, layout.slots()),
                    kv,
                    rows,
                },
            ),
        }
    }
}
