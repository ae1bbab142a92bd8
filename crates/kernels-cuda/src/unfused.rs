//! Attention as three kernels that pass their results through memory: the baseline that fusing is measured against.

use bytemuck::NoUninit;

use crate::dtype::{KvDtype, Precision};
use crate::error::CudaError;
use crate::gpu::{Gpu, Launch};
use crate::kernel_args;
use crate::memory::DevicePtr;
use crate::module::Function;
use crate::rows::typed_function;

const FILE: &str = "unfused.cu";

/// What does not change between calls.
#[derive(Clone, Copy, Debug)]
pub struct UnfusedConfig {
    /// Type of the activations.
    pub precision: Precision,
    /// Type of the cache.
    pub kv: KvDtype,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head; a multiple of eight with an e4m3 cache. Others are slow.
    pub head_dim: usize,
    /// Tokens of a block; a power of two.
    pub tokens_per_block: usize,
    /// Where keys are values too, with one kv head: how many of a key's first elements are its value.
    pub latent: Option<usize>,
    /// What scores are multiplied by.
    pub scale: f32,
}

impl UnfusedConfig {
    /// Elements of a value.
    pub fn value_dim(&self) -> usize {
        self.latent.unwrap_or(self.head_dim)
    }
}

/// One layer's spans. All three kernels take the same.
#[derive(Clone, Copy, Debug)]
pub struct UnfusedArgs {
    /// Rows of q heads, k heads, v heads, after the rotation.
    pub qkv: DevicePtr,
    /// The layer's cache.
    pub kv: DevicePtr,
    /// Spans, laid out as the CPU's `SeqSpan`.
    pub spans: DevicePtr,
    /// How many.
    pub span_count: usize,
    /// Most rows of a span.
    pub max_q: usize,
    /// Most keys of a span.
    pub max_kv: usize,
    /// Cache blocks of all spans (u32).
    pub block_tables: DevicePtr,
    /// Keys that a row sees, its own included; 0 is all.
    pub window: usize,
    /// A logit (f32) of each query head that joins every row's softmax and has no value; 0 for none.
    pub sinks: DevicePtr,
    /// Where each span's scores start, in elements (u64): the sum of [`score_elements`] of the spans before it.
    pub score_offsets: DevicePtr,
    /// Scores, f32.
    pub scores: DevicePtr,
    /// Out: `[rows][heads * value_dim]`.
    pub out: DevicePtr,
}

/// Elements of one span's score matrix.
pub fn score_elements(heads: usize, q_len: usize, kv_len: usize) -> usize {
    heads * q_len * kv_len.next_multiple_of(4)
}

/// What the kernels take; laid out as their `Unfused`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Parameters {
    qkv: DevicePtr,
    kv: DevicePtr,
    spans: DevicePtr,
    tables: DevicePtr,
    offsets: DevicePtr,
    scores: DevicePtr,
    out: DevicePtr,
    sinks: DevicePtr,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    block_shift: u32,
    window: u32,
    scale: f32,
    parts: u32,
    value_dim: u32,
}

/// The three kernels.
pub struct UnfusedAttention {
    config: UnfusedConfig,
    scores: Function,
    softmax: Function,
    values: Function,
    /// Rows and columns of a tile, and threads of its block.
    tile: usize,
    threads: u32,
}

impl UnfusedAttention {
    /// Find the kernels.
    pub fn new(gpu: &Gpu, config: UnfusedConfig) -> Result<UnfusedAttention, CudaError> {
        let UnfusedConfig { precision, heads, kv_heads, head_dim, tokens_per_block, .. } = config;
        let fits = kv_heads > 0 && heads.is_multiple_of(kv_heads) && tokens_per_block.is_power_of_two();
        let whole = head_dim.is_multiple_of(8) && config.value_dim().is_multiple_of(8);
        if !fits || (config.kv == KvDtype::Fp8 && !whole) {
            return Err(CudaError::Unsupported(format!("unfused attention can't be built for {config:?}")));
        }
        let plain = precision == Precision::F32 || !whole;
        let (scores, values) = match (config.kv, precision) {
            (KvDtype::Same, Precision::F16) if !whole => {
                (gpu.function(FILE, "unfused_scores_any_f16")?, gpu.function(FILE, "unfused_values_any_f16")?)
            }
            (KvDtype::Same, Precision::Bf16) if !whole => {
                (gpu.function(FILE, "unfused_scores_any_bf16")?, gpu.function(FILE, "unfused_values_any_bf16")?)
            }
            (KvDtype::Same, _) => (
                typed_function!(gpu, precision, "unfused.cu", "unfused_scores")?,
                typed_function!(gpu, precision, "unfused.cu", "unfused_values")?,
            ),
            (KvDtype::Fp8, _) => (
                typed_function!(gpu, precision, "unfused.cu", "unfused_scores_fp8")?,
                typed_function!(gpu, precision, "unfused.cu", "unfused_values_fp8")?,
            ),
        };
        let (tile, threads) = if plain { (32, 256) } else { (64, 128) };
        let softmax = gpu.function(FILE, "unfused_softmax_f32")?;
        Ok(UnfusedAttention { config, scores, softmax, values, tile, threads })
    }

    /// Scaled scores of every row and key that it sees.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` and its spans name, and blocks of the tables are in the cache.
    pub unsafe fn scores(&self, gpu: &Gpu, args: &UnfusedArgs) -> Result<(), CudaError> {
        let key_tiles = args.max_kv.div_ceil(self.tile);
        let (parameters, tiles) = (self.parameters(args), key_tiles as u32);
        let blocks = args.max_q.div_ceil(self.tile) * key_tiles;
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe {
            self.launch(
                gpu,
                self.scores,
                args,
                (blocks, self.config.heads),
                self.threads,
                kernel_args![parameters, tiles],
            )
        }
    }

    /// Scores to probabilities, in place.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` and its spans name, and blocks of the tables are in the cache.
    pub unsafe fn softmax(&self, gpu: &Gpu, args: &UnfusedArgs) -> Result<(), CudaError> {
        let parameters = self.parameters(args);
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { self.launch(gpu, self.softmax, args, (args.max_q, self.config.heads), 128, kernel_args![parameters]) }
    }

    /// Values summed up with the probabilities.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` and its spans name, and blocks of the tables are in the cache.
    pub unsafe fn values(&self, gpu: &Gpu, args: &UnfusedArgs) -> Result<(), CudaError> {
        let parameters = self.parameters(args);
        let pieces = self.config.heads * self.config.value_dim().div_ceil(self.tile);
        let grid = (args.max_q.div_ceil(self.tile), pieces);
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { self.launch(gpu, self.values, args, grid, self.threads, kernel_args![parameters]) }
    }

    fn parameters(&self, args: &UnfusedArgs) -> Parameters {
        let config = &self.config;
        Parameters {
            qkv: args.qkv,
            kv: args.kv,
            spans: args.spans,
            tables: args.block_tables,
            offsets: args.score_offsets,
            scores: args.scores,
            out: args.out,
            sinks: args.sinks,
            heads: config.heads as u32,
            kv_heads: config.kv_heads as u32,
            head_dim: config.head_dim as u32,
            block_shift: config.tokens_per_block.trailing_zeros(),
            window: args.window as u32,
            scale: config.scale,
            parts: if config.latent.is_some() { 1 } else { 2 },
            value_dim: config.value_dim() as u32,
        }
    }

    /// # Safety
    /// As for [`Gpu::launch`].
    unsafe fn launch(
        &self,
        gpu: &Gpu,
        function: Function,
        args: &UnfusedArgs,
        (x, y): (usize, usize),
        threads: u32,
        list: &mut [*mut std::ffi::c_void],
    ) -> Result<(), CudaError> {
        if x == 0 || args.span_count == 0 {
            return Ok(());
        }
        let mut shape = Launch::grid(x, threads).overlapping();
        (shape.grid.1, shape.grid.2) = (y as u32, args.span_count as u32);
        // SAFETY: the caller's promise.
        unsafe { gpu.launch(function, shape, list) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn score_rows_start_where_four_can_be_read_at_once() {
        assert_eq!(score_elements(2, 3, 5), 2 * 3 * 8);
        assert_eq!(score_elements(2, 3, 8), 2 * 3 * 8);
        assert_eq!(size_of::<Parameters>(), 96);
    }
}
