//! Multi-head latent attention: one short cache row per token, which all query heads share and which is the value too.

use crate::attention::{DecodeArgs, PrefillArgs};
use crate::dtype::Precision;
use crate::error::CudaError;
use crate::gpu::{Gpu, Launch};
use crate::kernel_args;
use crate::memory::{DeviceBuffer, DevicePtr};
use crate::module::Function;
use crate::rows::typed_function;

/// The widest latent vector and rotated part that the kernels have room for.
const MOST: (usize, usize) = (512, 64);
/// A split of a span gets about this many keys or more.
const MIN_KEYS_PER_SPLIT: u32 = 128;
/// Most splits of a span: the threads of the block that weighs them against each other.
const MAX_SPLITS: usize = 128;
/// Rows of a block of the kernels without tensor cores.
const PLAIN_ROWS: usize = 8;
/// Most blocks of a launch in its second and third dimension.
const MOST_BLOCKS: usize = 65_535;

/// What latent attention is done on.
#[derive(Clone, Copy, Debug)]
pub struct LatentConfig {
    /// Type of activations, weights and cache.
    pub precision: Precision,
    /// Query heads.
    pub heads: usize,
    /// Width of the latent vector, at most 512; a multiple of 8 for tensor cores.
    pub latent: usize,
    /// Width of the rotated part, even and at most 64; a multiple of 8 for tensor cores.
    pub rotated: usize,
    /// Width of the part of a projected query that is not rotated.
    pub nope: usize,
    /// Width of a head's values.
    pub values: usize,
    /// Whether pairs of rotated elements lie side by side in the projections.
    pub interleaved: bool,
    /// What scores are multiplied by.
    pub scale: f32,
    /// Tokens of a cache block: a power of two.
    pub tokens_per_block: usize,
    /// Added to the mean square in norms.
    pub eps: f32,
}

impl LatentConfig {
    /// Whether there are kernels for it.
    pub fn check(&self) -> Result<(), CudaError> {
        check(self)
    }

    /// Width of a row of the cache, and of a query in its space.
    pub fn key_width(&self) -> usize {
        self.latent + self.rotated
    }
}

/// A call of [`LatentOps::keys`].
#[derive(Clone, Copy, Debug)]
pub struct LatentKeysArgs {
    /// `[row][latent + rotated]` as it is projected.
    pub kv_latent: DevicePtr,
    /// Scale of the norm of the latent vector (f32).
    pub norm: DevicePtr,
    /// `[row][head][nope + rotated]` as they are projected.
    pub queries: DevicePtr,
    /// `[row][head][latent + rotated]`: the rotated part is written.
    pub q: DevicePtr,
    /// From one row of `q` to the next, in elements.
    pub q_stride: usize,
    /// Cosines (f32), `[position][angle_stride]`.
    pub cosines: DevicePtr,
    /// Sines.
    pub sines: DevicePtr,
    /// From one position's angles to the next's.
    pub angle_stride: usize,
    /// Position of each row (u32).
    pub positions: DevicePtr,
    /// Cache row of each row (u32); `u32::MAX` for none.
    pub slots: DevicePtr,
    /// The layer's cache, `[block][token][latent + rotated]`.
    pub kv: DevicePtr,
    /// Rows.
    pub rows: usize,
}

#[repr(C)]
struct KeysParams {
    kv_latent: u64,
    norm: u64,
    queries: u64,
    q: u64,
    cosines: u64,
    sines: u64,
    positions: u64,
    slots: u64,
    kv: u64,
    q_stride: u64,
    heads: u32,
    latent: u32,
    nope: u32,
    rotated: u32,
    angle_stride: u32,
    interleaved: u32,
    eps: f32,
    padding: u32,
}

#[repr(C)]
struct ProductParams {
    x: u64,
    w: u64,
    out: u64,
    x_stride: u64,
    out_stride: u64,
    x_head: u32,
    out_head: u32,
    rows: u32,
    n: u32,
    k: u32,
    padding: u32,
}

#[repr(C)]
struct AttentionParams {
    q: u64,
    kv: u64,
    spans: u64,
    tiles: u64,
    block_tables: u64,
    out: u64,
    partials: u64,
    q_stride: u64,
    out_stride: u64,
    heads: u32,
    latent: u32,
    rotated: u32,
    block_shift: u32,
    tokens: u32,
    chunks: u32,
    splits: u32,
    min_keys: u32,
    scale: f32,
    padding: u32,
}

/// Kernels that do attention itself.
enum Kernels {
    Tensor { attention: Function, merge: Function, partials: DeviceBuffer },
    Plain(Function),
}

/// The ops of latent attention for one shape.
pub struct LatentOps {
    config: LatentConfig,
    shape: Shape,
    norm: Function,
    keys: Function,
    /// Head by head into the latent space, and back; and whether tensor cores do it.
    products: [(Function, bool); 2],
    kernels: Kernels,
}

/// What the kernels for a number of heads are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Rows of a block.
    rows: usize,
    /// Keys of one step.
    keys: usize,
    /// Blocks that a device runs at once.
    blocks: usize,
}

impl Shape {
    /// `shared` is the most shared memory of a block.
    fn new(heads: usize, multiprocessors: usize, shared: usize) -> Shape {
        let wide = Shape { rows: 64, keys: 32, blocks: multiprocessors };
        if heads > 32 && wide.shared() + 1024 <= shared {
            return wide;
        }
        Shape { rows: 32, keys: 16, blocks: 2 * multiprocessors }
    }

    fn shared(&self) -> usize {
        2 * (MOST.0 + MOST.1) * (self.rows + 2 * self.keys) + 4 * self.rows * (self.keys + 8)
    }

    /// Floats that a split leaves behind.
    fn partial_len(&self) -> usize {
        self.rows * (MOST.0 + 2)
    }
}

impl LatentOps {
    /// Find the kernels for `config` and take their scratch.
    pub fn new(gpu: &Gpu, config: LatentConfig) -> Result<LatentOps, CudaError> {
        config.check()?;
        let LatentConfig { precision, .. } = config;
        let info = gpu.info();
        let plain = is_plain(&config);
        let mut shape = Shape::new(config.heads, info.multiprocessors as usize, info.shared_bytes_per_block as usize);
        let kernels = if plain {
            shape.rows = PLAIN_ROWS;
            Kernels::Plain(typed_function!(gpu, precision, "latent.cu", "latent_attention_rows")?)
        } else {
            let (attention, merge) = match (shape.rows, precision) {
                (64, Precision::Bf16) => ("latent_attention_wide_bf16", "latent_attention_merge_wide_bf16"),
                (64, _) => ("latent_attention_wide_f16", "latent_attention_merge_wide_f16"),
                (_, Precision::Bf16) => ("latent_attention_bf16", "latent_attention_merge_bf16"),
                (_, _) => ("latent_attention_f16", "latent_attention_merge_f16"),
            };
            let partials = DeviceBuffer::new(shape.blocks * shape.partial_len() * 4, "partial sums of attention")?;
            let (attention, merge) = (gpu.function(FILE, attention)?, gpu.function(FILE, merge)?);
            Kernels::Tensor { attention, merge, partials }
        };
        let product = |n: usize, k: usize, head: usize| {
            // Rows of heads start on 16 bytes, and results leave in pairs.
            let tensor =
                precision != Precision::F32 && [k, head].iter().all(|x| x.is_multiple_of(8)) && n.is_multiple_of(2);
            let function = match (tensor, precision) {
                (true, Precision::Bf16) => gpu.function(FILE, "latent_gemm_bf16"),
                (true, _) => gpu.function(FILE, "latent_gemm_f16"),
                (false, _) => typed_function!(gpu, precision, "latent.cu", "latent_gemm_any"),
            };
            function.map(|function| (function, tensor))
        };
        Ok(LatentOps {
            shape,
            norm: typed_function!(gpu, precision, "latent.cu", "latent_norm")?,
            keys: typed_function!(gpu, precision, "latent.cu", "latent_rope_kv_write")?,
            products: [
                product(config.latent, config.nope, config.nope + config.rotated)?,
                product(config.values, config.latent, config.latent)?,
            ],
            kernels,
            config,
        })
    }

    /// Bytes of scratch on the device.
    pub fn scratch_bytes(&self) -> usize {
        match &self.kernels {
            Kernels::Tensor { partials, .. } => partials.bytes(),
            Kernels::Plain(_) => 0,
        }
    }

    /// Query tokens of one tile of [`LatentOps::prefill`].
    pub fn tokens_per_tile(&self) -> usize {
        (self.shape.rows / self.config.heads).max(1)
    }

    /// Into how many shares to cut the keys of each of `span_count` spans, of which the longest has `max_kv` keys. A span
    /// with few keys uses fewer.
    pub fn splits_for(&self, span_count: usize, max_kv: usize) -> usize {
        splits_for(span_count * self.chunks(), self.shape.blocks, max_kv)
    }

    /// `out = norm(x)`, rows of `width` elements.
    pub fn norm(
        &self,
        gpu: &Gpu,
        x: DevicePtr,
        weight: DevicePtr,
        out: DevicePtr,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        if rows == 0 {
            return Ok(());
        }
        let (width, eps) = (width as u32, self.config.eps);
        gpu.launch(self.norm, Launch::grid(rows, 256).overlapping(), kernel_args![x, weight, out, width, eps])
    }

    /// Norms and rotates each row's latent key and writes it to the cache; rotates the queries of all heads.
    pub fn keys(&self, gpu: &Gpu, args: &LatentKeysArgs) -> Result<(), CudaError> {
        if args.rows == 0 {
            return Ok(());
        }
        let params = KeysParams {
            kv_latent: args.kv_latent,
            norm: args.norm,
            queries: args.queries,
            q: args.q,
            cosines: args.cosines,
            sines: args.sines,
            positions: args.positions,
            slots: args.slots,
            kv: args.kv,
            q_stride: args.q_stride as u64,
            heads: self.config.heads as u32,
            latent: self.config.latent as u32,
            nope: self.config.nope as u32,
            rotated: self.config.rotated as u32,
            angle_stride: args.angle_stride as u32,
            interleaved: u32::from(self.config.interleaved),
            eps: self.config.eps,
            padding: 0,
        };
        gpu.launch(self.keys, Launch::grid(args.rows, 256).overlapping(), kernel_args![params])
    }

    /// Brings what is not rotated of `projected`, `[row][head][nope + rotated]`, into the latent space by `weight`,
    /// `[head][latent][nope]`: the first part of `q`, `[row][head][latent + rotated]`, whose rows are `q_stride` apart.
    pub fn queries(
        &self,
        gpu: &Gpu,
        projected: DevicePtr,
        weight: DevicePtr,
        q: DevicePtr,
        q_stride: usize,
        rows: usize,
    ) -> Result<(), CudaError> {
        let LatentConfig { heads, latent, rotated, nope, .. } = self.config;
        let params = ProductParams {
            x: projected,
            w: weight,
            out: q,
            x_stride: (heads * (nope + rotated)) as u64,
            out_stride: q_stride as u64,
            x_head: (nope + rotated) as u32,
            out_head: (latent + rotated) as u32,
            rows: rows as u32,
            n: latent as u32,
            k: nope as u32,
            padding: 0,
        };
        self.product(gpu, 0, params)
    }

    /// Brings `attention`, `[row][head][latent]`, to each head's values by `weight`, `[head][values][latent]`: `out`,
    /// `[row][head][values]`.
    pub fn values(
        &self,
        gpu: &Gpu,
        attention: DevicePtr,
        weight: DevicePtr,
        out: DevicePtr,
        rows: usize,
    ) -> Result<(), CudaError> {
        let LatentConfig { heads, latent, values, .. } = self.config;
        let params = ProductParams {
            x: attention,
            w: weight,
            out,
            x_stride: (heads * latent) as u64,
            out_stride: (heads * values) as u64,
            x_head: latent as u32,
            out_head: values as u32,
            rows: rows as u32,
            n: values as u32,
            k: latent as u32,
            padding: 0,
        };
        self.product(gpu, 1, params)
    }

    fn product(&self, gpu: &Gpu, which: usize, params: ProductParams) -> Result<(), CudaError> {
        if params.rows == 0 {
            return Ok(());
        }
        let (function, tensor) = self.products[which];
        let (tile, threads) = if tensor { (64, 128) } else { (32, 256) };
        let grid = (params.n.div_ceil(tile), self.config.heads as u32, params.rows.div_ceil(tile));
        gpu.launch(function, Launch { grid, ..Launch::grid(1, threads) }.overlapping(), kernel_args![params])
    }

    /// Attention of packed rows of any number for each span: `out` is `[row][head][latent]`. Windows and sinks are none.
    pub fn prefill(&self, gpu: &Gpu, args: &PrefillArgs) -> Result<(), CudaError> {
        check_pattern(args.window, args.sinks)?;
        if args.tile_count == 0 {
            return Ok(());
        }
        let tokens = self.tokens_per_tile();
        let params = AttentionParams {
            tiles: args.tiles,
            tokens: tokens as u32,
            ..self.params(args.qkv, args.q_stride, args.kv, args.spans, args.block_tables, args.out, args.out_stride)
        };
        self.attend(gpu, args.tile_count, 1, params)
    }

    /// Attention of spans of one row each.
    pub fn decode(&self, gpu: &Gpu, args: &DecodeArgs) -> Result<(), CudaError> {
        check_pattern(args.window, args.sinks)?;
        if args.span_count == 0 {
            return Ok(());
        }
        let splits = match self.kernels {
            Kernels::Tensor { .. } => args.splits.clamp(1, MAX_SPLITS),
            Kernels::Plain(_) => 1,
        };
        if splits > 1 && args.span_count * self.chunks() * splits > self.shape.blocks {
            return Err(CudaError::Unsupported(format!(
                "latent attention was set up for {} blocks of split keys, asked for are {} spans in {splits}",
                self.shape.blocks, args.span_count
            )));
        }
        let params = AttentionParams {
            splits: splits as u32,
            ..self.params(args.qkv, args.q_stride, args.kv, args.spans, args.block_tables, args.out, args.out_stride)
        };
        self.attend(gpu, args.span_count, splits, params)
    }

    fn attend(&self, gpu: &Gpu, tiles: usize, splits: usize, params: AttentionParams) -> Result<(), CudaError> {
        let blocks = tiles * self.chunks();
        match &self.kernels {
            Kernels::Plain(function) => {
                gpu.launch(*function, Launch::grid(blocks, 128).overlapping(), kernel_args![params])
            }
            Kernels::Tensor { attention, merge, .. } => {
                let launch = Launch::grid(blocks, 4 * self.shape.rows as u32).shared(self.shape.shared());
                let launch = Launch { grid: (blocks as u32, splits as u32, 1), ..launch };
                gpu.launch(*attention, launch.overlapping(), kernel_args![params])?;
                if splits == 1 {
                    return Ok(());
                }
                let grid = (self.config.heads as u32, tiles as u32, 1);
                gpu.launch(*merge, Launch { grid, ..Launch::grid(1, 128) }.overlapping(), kernel_args![params])
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn params(
        &self,
        q: DevicePtr,
        q_stride: usize,
        kv: DevicePtr,
        spans: DevicePtr,
        block_tables: DevicePtr,
        out: DevicePtr,
        out_stride: usize,
    ) -> AttentionParams {
        AttentionParams {
            q,
            kv,
            spans,
            tiles: 0,
            block_tables,
            out,
            partials: match &self.kernels {
                Kernels::Tensor { partials, .. } => partials.ptr(),
                Kernels::Plain(_) => 0,
            },
            q_stride: q_stride as u64,
            out_stride: out_stride as u64,
            heads: self.config.heads as u32,
            latent: self.config.latent as u32,
            rotated: self.config.rotated as u32,
            block_shift: self.config.tokens_per_block.trailing_zeros(),
            tokens: 1,
            chunks: self.chunks() as u32,
            splits: 1,
            min_keys: MIN_KEYS_PER_SPLIT,
            scale: self.config.scale * std::f32::consts::LOG2_E,
            padding: 0,
        }
    }

    /// Blocks that share the heads of a token.
    fn chunks(&self) -> usize {
        self.config.heads.div_ceil(self.shape.rows)
    }
}

const FILE: &str = "latent.cu";

fn splits_for(pairs: usize, blocks: usize, max_kv: usize) -> usize {
    let useful = max_kv.div_ceil(MIN_KEYS_PER_SPLIT as usize);
    (blocks / pairs.max(1)).min(useful).clamp(1, MAX_SPLITS)
}

/// Whether the kernels without tensor cores are used: 32 bits, or rows that don't come in pieces of 16 bytes.
fn is_plain(config: &LatentConfig) -> bool {
    let whole = config.latent.is_multiple_of(8) && config.rotated.is_multiple_of(8);
    config.precision == Precision::F32 || !whole
}

fn check_pattern(window: usize, sinks: DevicePtr) -> Result<(), CudaError> {
    match (window, sinks) {
        (0, 0) => Ok(()),
        _ => Err(CudaError::Unsupported("latent attention with a window or with sinks".into())),
    }
}

fn check(config: &LatentConfig) -> Result<(), CudaError> {
    let LatentConfig { heads, latent, rotated, nope, values, tokens_per_block, .. } = *config;
    let unsupported =
        |problem: &str| Err(CudaError::Unsupported(format!("latent attention on the GPU {problem}: {config:?}")));
    if heads == 0 || nope == 0 || values == 0 || heads > MOST_BLOCKS {
        return unsupported("needs heads with queries and values");
    }
    if latent == 0 || latent > MOST.0 || !latent.is_multiple_of(2) {
        return unsupported("needs a latent vector of an even number of elements, at most 512");
    }
    if rotated == 0 || rotated > MOST.1 || !rotated.is_multiple_of(2) {
        return unsupported("needs a rotated part of an even number of elements, at most 64");
    }
    if !tokens_per_block.is_power_of_two() {
        return unsupported("needs cache blocks of a power of two");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEEPSEEK: LatentConfig = LatentConfig {
        precision: Precision::Bf16,
        heads: 128,
        latent: 512,
        rotated: 64,
        nope: 128,
        values: 128,
        interleaved: true,
        scale: 0.1,
        tokens_per_block: 32,
        eps: 1e-6,
    };

    #[test]
    fn splits_fill_the_device_and_fit_the_scratch() {
        for blocks in [1, 132, 264] {
            for pairs in [1, 2, 7, 64, 132, 1000] {
                for max_kv in [1, 128, 129, 4096, 200_000] {
                    let splits = splits_for(pairs, blocks, max_kv);
                    assert!((1..=MAX_SPLITS).contains(&splits));
                    assert!(splits == 1 || pairs * splits <= blocks, "{pairs} pairs, {splits} splits, {blocks} blocks");
                }
            }
        }
        assert_eq!(splits_for(2, 132, 200_000), 66);
        assert_eq!(splits_for(2, 132, 256), 2);
    }

    #[test]
    fn shared_memory_fits_every_architecture() {
        for (heads, shared) in [(4, 99), (16, 163), (128, 99), (128, 163), (128, 227)] {
            let shape = Shape::new(heads, 132, shared * 1024);
            assert!(shape.shared() + 1024 <= shared * 1024, "{shape:?}");
        }
        assert_eq!(Shape::new(128, 132, 227 * 1024).rows, 64);
        assert_eq!(Shape::new(128, 132, 99 * 1024).rows, 32);
        assert_eq!(Shape::new(8, 132, 227 * 1024).rows, 32);
    }

    #[test]
    fn shapes_without_kernels_are_refused() {
        assert!(check(&DEEPSEEK).is_ok());
        for bad in [
            LatentConfig { heads: 0, ..DEEPSEEK },
            LatentConfig { latent: 514, ..DEEPSEEK },
            LatentConfig { latent: 15, ..DEEPSEEK },
            LatentConfig { rotated: 66, ..DEEPSEEK },
            LatentConfig { rotated: 0, ..DEEPSEEK },
            LatentConfig { tokens_per_block: 24, ..DEEPSEEK },
        ] {
            assert!(check(&bad).is_err(), "{bad:?}");
        }
    }
}
