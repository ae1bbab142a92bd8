//! Fused attention over the paged cache: tiles of rows for prompts, split keys for single rows.

use crate::dtype::{KvDtype, Precision};
use crate::error::CudaError;
use crate::gpu::{Gpu, Launch};
use crate::kernel_args;
use crate::memory::{DeviceBuffer, DevicePtr};
use crate::module::Function;

const PREFILL: &str = "attention_prefill.cu";
const DECODE: &str = "attention_decode.cu";
const ROWS: &str = "attention_rows.cu";

/// A split of a span gets about this many keys or more: below it, adding the splits up costs more than they save.
const MIN_KEYS_PER_SPLIT: u32 = 256;
/// Most splits of a span: the lanes of a warp, which weigh them against each other.
const MAX_SPLITS: usize = 32;
/// Bytes of a line of L2.
const LINE: usize = 128;
/// Blocks per multiprocessor that splitting aims at: with many warps each they keep the memory busy.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;
/// Where spans can be longer than this, more blocks than that, so that a long one among short ones is no straggler.
const LONG_SPAN: usize = 4096;
/// Most blocks per multiprocessor then.
const MAX_BLOCKS_PER_MULTIPROCESSOR: usize = 8;
/// Rows of a block of the kernels without tensor cores.
const PLAIN_ROWS: usize = 8;

/// What attention is done on.
#[derive(Clone, Copy, Debug)]
pub struct AttentionConfig {
    /// Type of queries and outputs.
    pub precision: Precision,
    /// Type of the cache.
    pub kv: KvDtype,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head: even, a multiple of 16 with an e4m3 cache, at most 256. Others than multiples of 8 are slow.
    pub head_dim: usize,
    /// Tokens of a cache block: a power of two.
    pub tokens_per_block: usize,
    /// Most spans of one `decode`.
    pub max_spans: usize,
}

/// A call of [`Attention::prefill`]. Strides are in elements.
#[derive(Clone, Copy, Debug)]
pub struct PrefillArgs {
    /// Rows of q, k and v; q is rotated, k and v are in the cache.
    pub qkv: DevicePtr,
    /// From one row of `qkv` to the next.
    pub q_stride: usize,
    /// The layer's cache.
    pub kv: DevicePtr,
    /// Array of spans.
    pub spans: DevicePtr,
    /// Pairs of u32: a span, and a tile of its rows, see [`Attention::fill_tiles`].
    pub tiles: DevicePtr,
    /// Number of tiles.
    pub tile_count: usize,
    /// Cache blocks of all spans.
    pub block_tables: DevicePtr,
    /// Keys that a row sees, itself included; 0 for all.
    pub window: usize,
    /// A logit (f32) of each query head that joins every row's softmax and has no value; 0 for none.
    pub sinks: DevicePtr,
    /// Rows of the result, heads concatenated.
    pub out: DevicePtr,
    /// From one row of `out` to the next.
    pub out_stride: usize,
}

/// A call of [`Attention::decode`]. Strides are in elements.
///
/// Spans and block tables are read before the launch before this one has ended, so they may not be written by launches that
/// overlap: what copies and earlier steps left is safe. So are keys and values where they are `settled`.
#[derive(Clone, Copy, Debug)]
pub struct DecodeArgs {
    /// Rows of q, k and v.
    pub qkv: DevicePtr,
    /// From one row of `qkv` to the next.
    pub q_stride: usize,
    /// The layer's cache.
    pub kv: DevicePtr,
    /// Array of spans of one row each.
    pub spans: DevicePtr,
    /// Number of spans, padding included.
    pub span_count: usize,
    /// Most shares into which the keys of a span are cut, see [`Attention::splits_for`].
    pub splits: usize,
    /// Cache blocks of all spans.
    pub block_tables: DevicePtr,
    /// Whether no launch that may still run writes keys and values of any position but a span's last.
    pub settled: bool,
    /// Keys that a row sees, itself included; 0 for all.
    pub window: usize,
    /// A logit (f32) of each query head that joins every row's softmax and has no value; 0 for none.
    pub sinks: DevicePtr,
    /// Rows of the result, heads concatenated.
    pub out: DevicePtr,
    /// From one row of `out` to the next.
    pub out_stride: usize,
}

/// Angles for [`Attention::decode_rope`]: f32 `[position][head_dim / 2]`.
#[derive(Clone, Copy, Debug)]
pub struct RopeAngles {
    /// Cosines.
    pub cosines: DevicePtr,
    /// Sines.
    pub sines: DevicePtr,
}

#[repr(C)]
struct PrefillParams {
    qkv: u64,
    kv: u64,
    spans: u64,
    tiles: u64,
    block_tables: u64,
    out: u64,
    sinks: u64,
    qkv_stride: u64,
    out_stride: u64,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    block_shift: u32,
    window: u32,
    tokens: u32,
    scale: f32,
    padding: u32,
}

/// What the kernels without tensor cores take.
#[repr(C)]
struct PlainParams {
    rows: PrefillParams,
    partials: u64,
    counters: u64,
    splits: u32,
    padding: u32,
}

#[repr(C)]
struct DecodeParams {
    qkv: u64,
    kv: u64,
    spans: u64,
    block_tables: u64,
    out: u64,
    cosines: u64,
    sines: u64,
    partials: u64,
    counters: u64,
    sinks: u64,
    spent: [u64; 2],
    qkv_stride: u64,
    out_stride: u64,
    heads: u32,
    kv_heads: u32,
    group: u32,
    chunks: u32,
    head_dim: u32,
    block_shift: u32,
    window: u32,
    splits: u32,
    min_keys: u32,
    scale: f32,
    spent_lines: [u32; 2],
}

/// Kernels of one shape of heads.
enum Kernels {
    Tensor { prefill: Function, decode: Function },
    Plain(Function),
}

/// Memory whose contents are of no use any more, see [`Attention::set_spent`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    /// Where it begins.
    pub memory: DevicePtr,
    /// Of all of it.
    pub bytes: usize,
    /// Of each span.
    pub row: usize,
}

/// Fused attention for one shape of heads.
pub struct Attention {
    config: AttentionConfig,
    shape: Shape,
    multiprocessors: usize,
    warps: Option<usize>,
    spent: [Spent; 2],
    kernels: Kernels,
    /// Sums of splits, and how many of them each block of rows has.
    partials: DeviceBuffer,
    counters: DeviceBuffer,
}

/// What the kernels for a shape of heads are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// `head_dim`, padded.
    dim: usize,
    /// Query rows of a tile of `prefill`: tokens times heads of a group.
    tile_rows: usize,
    /// Keys of one step of `prefill`.
    tile_keys: usize,
    /// Query heads of a block of `decode`.
    block_heads: usize,
    /// Most warps of a block of `decode`; a multiprocessor has registers for twice as many.
    max_warps: usize,
}

impl Shape {
    fn new(head_dim: usize, group: usize) -> Shape {
        let (dim, tile_rows, tile_keys, max_warps) = match head_dim {
            0..=64 => (64, 128, 64, 8),
            65..=128 => (128, 128, 64, 6),
            _ => (256, 64, 32, 4),
        };
        let wide = group > 8 && dim < 256;
        Shape {
            dim,
            tile_rows,
            tile_keys,
            block_heads: if wide { 16 } else { 8 },
            max_warps: if wide { 4 } else { max_warps },
        }
    }

    /// Floats that a split leaves for the block that adds them up.
    fn partial_len(&self) -> usize {
        self.block_heads * (self.dim + 2)
    }

    fn prefill_shared(&self) -> usize {
        2 * self.dim * (self.tile_rows + 4 * self.tile_keys)
    }

    fn decode_shared(&self, warps: usize) -> usize {
        8 * self.dim + 4 * warps * self.block_heads * (self.dim + 10)
    }
}

/// Name of a kernel by element types.
macro_rules! by_type {
    ($stem:literal, $config:expr) => {
        match ($config.precision, $config.kv) {
            (Precision::F16, KvDtype::Same) => concat!($stem, "_f16"),
            (Precision::F16, KvDtype::Fp8) => concat!($stem, "_f16_fp8"),
            (Precision::Bf16, KvDtype::Same) => concat!($stem, "_bf16"),
            (Precision::Bf16, KvDtype::Fp8) => concat!($stem, "_bf16_fp8"),
            (Precision::F32, KvDtype::Same) => "attention_rows_f32",
            (Precision::F32, KvDtype::Fp8) => "attention_rows_f32_fp8",
        }
    };
}

impl Attention {
    /// Find the kernels for `config` and take their scratch.
    pub fn new(gpu: &Gpu, config: AttentionConfig) -> Result<Attention, CudaError> {
        check(&config)?;
        let group = config.heads / config.kv_heads;
        let mut shape = Shape::new(config.head_dim, group);
        if is_plain(&config) {
            shape = Shape { dim: config.head_dim, block_heads: PLAIN_ROWS, ..shape };
        }
        let multiprocessors = gpu.info().multiprocessors as usize;
        let kernels = if is_plain(&config) {
            Kernels::Plain(gpu.function(ROWS, plain_kernel(&config))?)
        } else {
            let prefill = match shape.dim {
                64 => by_type!("attention_prefill_d64", config),
                128 => by_type!("attention_prefill_d128", config),
                _ => by_type!("attention_prefill_d256", config),
            };
            let decode = match (shape.dim, shape.block_heads) {
                (64, 8) => by_type!("attention_decode_d64", config),
                (64, _) => by_type!("attention_decode_d64_wide", config),
                (128, 8) => by_type!("attention_decode_d128", config),
                (128, _) => by_type!("attention_decode_d128_wide", config),
                _ => by_type!("attention_decode_d256", config),
            };
            Kernels::Tensor { prefill: gpu.function(PREFILL, prefill)?, decode: gpu.function(DECODE, decode)? }
        };
        // `splits_for` never asks for more than this.
        let slots = 2 * MAX_BLOCKS_PER_MULTIPROCESSOR * multiprocessors;
        let partials = DeviceBuffer::new(slots * shape.partial_len() * 4, "partial sums of attention")?;
        let pairs = config.max_spans * config.kv_heads * group.div_ceil(shape.block_heads);
        let counters = DeviceBuffer::new(pairs * 4, "counters of attention")?;
        counters.fill(0)?;
        Ok(Attention {
            config,
            shape,
            multiprocessors,
            warps: None,
            spent: Default::default(),
            kernels,
            partials,
            counters,
        })
    }

    /// What is in these places when `decode` begins is never read again. So L2 need not write it to memory while keys and
    /// values stream through.
    pub fn set_spent(&mut self, places: [Spent; 2]) {
        self.spent = places.map(|one| if one.memory.is_multiple_of(LINE as u64) { one } else { Spent::default() });
    }

    /// Let blocks of `decode` have this many warps, instead of as many as suit the number of spans. For measurements.
    pub fn set_warps(&mut self, warps: usize) {
        self.warps = Some(warps.clamp(1, self.shape.max_warps));
    }

    /// Query tokens of one tile of [`Attention::prefill`].
    pub fn tokens_per_tile(&self) -> usize {
        let rows = if is_plain(&self.config) { PLAIN_ROWS } else { self.shape.tile_rows };
        (rows / self.group()).max(1)
    }

    /// The tiles of spans, given as `(q_len, kv_len)`: those with the most keys first, so that no long one starts last.
    pub fn fill_tiles(&self, spans: &[(u32, u32)], tiles: &mut Vec<[u32; 2]>) {
        tiles.clear();
        let tokens = self.tokens_per_tile() as u32;
        for (index, (q_len, _)) in spans.iter().enumerate() {
            tiles.extend((0..q_len.div_ceil(tokens)).map(|tile| [index as u32, tile]));
        }
        tiles.sort_unstable_by_key(|&[index, tile]| {
            let (q_len, kv_len) = spans[index as usize];
            let keys = kv_len.saturating_sub(q_len) + q_len.min((tile + 1) * tokens);
            (std::cmp::Reverse(keys), index, tile)
        });
    }

    /// Whether [`Attention::decode_rope`] can be used.
    pub fn fuses_rope(&self) -> bool {
        self.config.precision != Precision::F32 && self.config.head_dim.is_multiple_of(16)
    }

    /// Bytes of scratch on the device.
    pub fn scratch_bytes(&self) -> usize {
        self.partials.bytes() + self.counters.bytes()
    }

    /// Into how many shares to cut the keys of each of `span_count` spans, of which the longest has `max_kv` keys. A
    /// span with few keys uses fewer, so `max_kv` may be an upper limit; a generous one costs blocks that do nothing.
    pub fn splits_for(&self, span_count: usize, max_kv: usize) -> usize {
        splits_for(span_count * self.blocks_per_span(), self.multiprocessors, max_kv)
    }

    fn group(&self) -> usize {
        self.config.heads / self.config.kv_heads
    }

    fn blocks_per_span(&self) -> usize {
        self.config.kv_heads * self.group().div_ceil(self.shape.block_heads)
    }

    /// Attention of packed rows of any number for each span.
    pub fn prefill(&self, gpu: &Gpu, args: &PrefillArgs) -> Result<(), CudaError> {
        if args.tile_count == 0 {
            return Ok(());
        }
        let params = PrefillParams {
            qkv: args.qkv,
            kv: args.kv,
            spans: args.spans,
            tiles: args.tiles,
            block_tables: args.block_tables,
            out: args.out,
            sinks: args.sinks,
            qkv_stride: args.q_stride as u64,
            out_stride: args.out_stride as u64,
            heads: self.config.heads as u32,
            kv_heads: self.config.kv_heads as u32,
            head_dim: self.config.head_dim as u32,
            block_shift: self.config.tokens_per_block.trailing_zeros(),
            window: args.window as u32,
            tokens: self.tokens_per_tile() as u32,
            scale: self.scale(),
            padding: 0,
        };
        match &self.kernels {
            Kernels::Tensor { prefill, .. } => {
                let launch = Launch::grid(args.tile_count * self.config.kv_heads, 128);
                let launch = launch.shared(self.shape.prefill_shared()).overlapping();
                gpu.launch(*prefill, launch, kernel_args![params])
            }
            Kernels::Plain(function) => self.plain(gpu, *function, args.tile_count, 1, params),
        }
    }

    /// Attention of spans of one row each; q is rotated, and k and v are in the cache.
    pub fn decode(&self, gpu: &Gpu, args: &DecodeArgs) -> Result<(), CudaError> {
        self.decode_with(gpu, args, RopeAngles { cosines: 0, sines: 0 })
    }

    /// Rotates q and k of each span's row, writes its k and v to the cache, and does its attention. `qkv` is only read.
    pub fn decode_rope(&self, gpu: &Gpu, args: &DecodeArgs, angles: RopeAngles) -> Result<(), CudaError> {
        if !self.fuses_rope() {
            return Err(CudaError::Unsupported(format!(
                "rotation inside of attention needs 16 bits and heads of a multiple of 16, found {:?}",
                self.config
            )));
        }
        self.decode_with(gpu, args, angles)
    }

    fn decode_with(&self, gpu: &Gpu, args: &DecodeArgs, angles: RopeAngles) -> Result<(), CudaError> {
        if args.span_count == 0 {
            return Ok(());
        }
        let pairs = args.span_count * self.blocks_per_span();
        let slots = self.partials.bytes() / (self.shape.partial_len() * 4);
        let splits = args.splits.clamp(1, MAX_SPLITS);
        if args.span_count > self.config.max_spans || (splits > 1 && pairs * splits > slots) {
            return Err(CudaError::Unsupported(format!(
                "attention was set up for {} spans and {slots} blocks of split keys, asked for are {} spans and {}",
                self.config.max_spans,
                args.span_count,
                pairs * splits
            )));
        }
        let decode = match &self.kernels {
            Kernels::Tensor { decode, .. } => *decode,
            Kernels::Plain(function) => {
                let params = PrefillParams {
                    qkv: args.qkv,
                    kv: args.kv,
                    spans: args.spans,
                    tiles: 0,
                    block_tables: args.block_tables,
                    out: args.out,
                    sinks: args.sinks,
                    qkv_stride: args.q_stride as u64,
                    out_stride: args.out_stride as u64,
                    heads: self.config.heads as u32,
                    kv_heads: self.config.kv_heads as u32,
                    head_dim: self.config.head_dim as u32,
                    block_shift: self.config.tokens_per_block.trailing_zeros(),
                    window: args.window as u32,
                    tokens: 1,
                    scale: self.scale(),
                    padding: 0,
                };
                return self.plain(gpu, *function, args.span_count, splits, params);
            }
        };
        let warps = self.warps.unwrap_or_else(|| warps_for(pairs, self.multiprocessors, self.shape.max_warps));
        // Where blocks wait for places anyway there is nothing to begin early, and those that do slow the launch down.
        let at_once = runs_at_once(pairs, warps, self.multiprocessors, self.shape.max_warps);
        let spent = if at_once { Default::default() } else { self.spent };
        let params = DecodeParams {
            qkv: args.qkv,
            kv: args.kv,
            spans: args.spans,
            block_tables: args.block_tables,
            out: args.out,
            cosines: angles.cosines,
            sines: angles.sines,
            partials: self.partials.ptr(),
            counters: self.counters.ptr(),
            sinks: args.sinks,
            spent: spent.map(|one| one.memory),
            qkv_stride: args.q_stride as u64,
            out_stride: args.out_stride as u64,
            heads: self.config.heads as u32,
            kv_heads: self.config.kv_heads as u32,
            group: self.group() as u32,
            chunks: self.group().div_ceil(self.shape.block_heads) as u32,
            head_dim: self.config.head_dim as u32,
            block_shift: self.config.tokens_per_block.trailing_zeros(),
            window: args.window as u32,
            splits: splits as u32,
            min_keys: MIN_KEYS_PER_SPLIT,
            scale: self.scale(),
            spent_lines: spent.map(|one| ((args.span_count * one.row).min(one.bytes) / LINE) as u32),
        };
        // Splits that a span has no keys for come last, where they hold nothing up.
        let grid = (self.blocks_per_span() as u32, args.span_count as u32, splits as u32);
        let launch = Launch { grid, ..Launch::grid(1, 32 * warps as u32) };
        let launch = launch.shared(self.shape.decode_shared(warps));
        let early = at_once && args.settled;
        gpu.launch(decode, if early { launch.overlapping() } else { launch }, kernel_args![params])
    }

    fn plain(
        &self,
        gpu: &Gpu,
        function: Function,
        tiles: usize,
        splits: usize,
        rows: PrefillParams,
    ) -> Result<(), CudaError> {
        let (partials, counters) = (self.partials.ptr(), self.counters.ptr());
        let params = PlainParams { rows, partials, counters, splits: splits as u32, padding: 0 };
        let launch = Launch::grid(tiles * self.blocks_per_span(), 128);
        let launch = Launch { grid: (launch.grid.0, splits as u32, 1), ..launch };
        gpu.launch(function, launch.overlapping(), kernel_args![params])
    }

    /// Of scores, for powers of two.
    fn scale(&self) -> f32 {
        std::f32::consts::LOG2_E / (self.config.head_dim as f32).sqrt()
    }
}

fn splits_for(pairs: usize, multiprocessors: usize, max_kv: usize) -> usize {
    let pairs = pairs.max(1);
    let to_fill = BLOCKS_PER_MULTIPROCESSOR * multiprocessors / pairs;
    let for_stragglers = (MAX_BLOCKS_PER_MULTIPROCESSOR * multiprocessors).div_ceil(pairs).min(max_kv / LONG_SPAN);
    let useful = max_kv.div_ceil(MIN_KEYS_PER_SPLIT as usize);
    to_fill.max(for_stragglers).min(useful).clamp(1, MAX_SPLITS)
}

/// Warps of a block: as many as possible while all blocks run at once, for a short way to the result. Where they can't,
/// small blocks follow each other with fewer gaps.
fn warps_for(pairs: usize, multiprocessors: usize, max_warps: usize) -> usize {
    (1..=max_warps).rev().find(|warps| runs_at_once(pairs, *warps, multiprocessors, max_warps)).unwrap_or(1)
}

fn runs_at_once(pairs: usize, warps: usize, multiprocessors: usize, max_warps: usize) -> bool {
    pairs * warps <= 2 * max_warps * multiprocessors
}

/// Whether the kernels without tensor cores are used: 32 bits, or heads that don't come in pieces of 16 bytes.
fn is_plain(config: &AttentionConfig) -> bool {
    config.precision == Precision::F32 || !config.head_dim.is_multiple_of(8)
}

fn plain_kernel(config: &AttentionConfig) -> &'static str {
    match (config.precision, config.kv) {
        (Precision::F32, KvDtype::Fp8) => "attention_rows_f32_fp8",
        (Precision::F32, KvDtype::Same) if config.head_dim.is_multiple_of(4) => "attention_rows_f32",
        (Precision::F32, KvDtype::Same) => "attention_any_f32",
        (Precision::F16, _) => "attention_any_f16",
        (Precision::Bf16, _) => "attention_any_bf16",
    }
}

fn check(config: &AttentionConfig) -> Result<(), CudaError> {
    let AttentionConfig { heads, kv_heads, head_dim, tokens_per_block, .. } = *config;
    let unsupported =
        |problem: &str| Err(CudaError::Unsupported(format!("attention on the GPU {problem}: {config:?}")));
    if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
        return unsupported("needs heads that are a multiple of kv_heads");
    }
    if head_dim == 0 || head_dim > 256 || !head_dim.is_multiple_of(2) {
        return unsupported("needs heads of an even number of elements, at most 256");
    }
    if config.kv == KvDtype::Fp8 && !head_dim.is_multiple_of(16) {
        return unsupported("with an 8-bit cache needs heads of a multiple of 16 elements");
    }
    if !tokens_per_block.is_power_of_two() {
        return unsupported("needs cache blocks of a power of two");
    }
    let shape = Shape::new(head_dim, heads / kv_heads);
    if !is_plain(config) && heads / kv_heads > shape.tile_rows {
        return unsupported("too many query heads per KV head");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_fill_the_device_and_fit_the_scratch() {
        for multiprocessors in [1, 46, 132] {
            let slots = 2 * MAX_BLOCKS_PER_MULTIPROCESSOR * multiprocessors;
            for pairs in [1, 3, 4, 32, 500, 1000, 12_000] {
                for max_kv in [1, 200, 256, 257, 4096, 33_000, 1_000_000] {
                    let splits = splits_for(pairs, multiprocessors, max_kv);
                    assert!((1..=MAX_SPLITS).contains(&splits));
                    assert!(splits == 1 || pairs * splits <= slots, "{pairs} pairs, {splits} splits, {slots} slots");
                    assert!(splits == 1 || (splits - 1) * (MIN_KEYS_PER_SPLIT as usize) < max_kv);
                }
            }
        }
        assert_eq!(splits_for(4, 132, 200), 1);
        assert_eq!(splits_for(4, 132, 33_000), 32);
        assert_eq!(splits_for(256, 132, 2048), 1);
    }

    #[test]
    fn blocks_run_at_once_where_they_can() {
        for (pairs, warps) in [(4, 8), (256, 8), (264, 8), (512, 4), (1024, 2), (4096, 1), (12_000, 1)] {
            assert_eq!(warps_for(pairs, 132, 8), warps, "{pairs} pairs");
        }
        assert_eq!(warps_for(300, 132, 6), 5);
    }

    #[test]
    fn shared_memory_fits_every_architecture() {
        for head_dim in [8, 64, 72, 128, 136, 256] {
            for group in [1, 8, 9, 64] {
                let shape = Shape::new(head_dim, group);
                assert!(shape.prefill_shared() + 1024 <= 99 * 1024, "{shape:?}");
                assert!(shape.decode_shared(shape.max_warps) <= 48 * 1024, "{shape:?}");
                assert!(MAX_SPLITS <= shape.dim + 8, "{shape:?}: weights of splits lie where sums were");
            }
        }
    }

    #[test]
    fn shapes_without_kernels_are_refused() {
        let good = AttentionConfig {
            precision: Precision::Bf16,
            kv: KvDtype::Fp8,
            heads: 32,
            kv_heads: 4,
            head_dim: 64,
            tokens_per_block: 32,
            max_spans: 1,
        };
        assert!(check(&good).is_ok());
        for bad in [
            AttentionConfig { heads: 30, ..good },
            AttentionConfig { kv_heads: 0, ..good },
            AttentionConfig { head_dim: 60, ..good },
            AttentionConfig { head_dim: 61, kv: KvDtype::Same, ..good },
            AttentionConfig { head_dim: 264, ..good },
            AttentionConfig { head_dim: 72, ..good },
            AttentionConfig { tokens_per_block: 24, ..good },
            AttentionConfig { heads: 129, kv_heads: 1, ..good },
        ] {
            assert!(check(&bad).is_err(), "{bad:?}");
        }
    }
}
