//! Products of few rows with a large weight matrix, with the work before and after them: what decoding spends its time
//! on.

use crate::dtype::Precision;
use crate::error::CudaError;
use crate::gpu::{Gpu, Launch};
use crate::kernel_args;
use crate::memory::DevicePtr;
use crate::module::Function;

const BF16_FILE: &str = "skinny_bf16.cu";
const F16_FILE: &str = "skinny_f16.cu";
/// Threads and warps of a block, as in the kernel file.
const THREADS: u32 = 256;
const WARPS: usize = 8;
/// Weight rows and bytes of each in a piece of work of the streaming kernels, and slots of a warp's ring.
const GROUP_ROWS: usize = 16;
const PIECE_BYTES: usize = 256;
const SLOTS: usize = 3;
/// Weight rows of a pass of the tile kernels, and bytes of each in a slot.
const TILE_ROWS: usize = 128;
const CHUNK_BYTES: usize = 128;
/// Most rows of x of the streaming kernels, and of all.
const STREAM_MAX_M: usize = 16;
const MAX_M: usize = 64;
/// Up to so many bytes, a plain x that is needed several times is kept in shared memory.
const KEPT_X_BYTES: usize = 40 << 10;
/// Numbers of slots that the tile kernels know how to wait for.
const STAGES: [usize; 8] = [3, 4, 5, 6, 7, 8, 10, 12];

/// Where x comes from.
#[derive(Clone, Copy, Debug)]
pub enum SkinnyInput {
    /// `[m][k]` of the precision.
    Plain(DevicePtr),
    /// RMSNorm of the f32 rows `hidden`, rounded to the precision.
    Norm {
        /// `[m][k]` of f32.
        hidden: DevicePtr,
        /// `[k]` of f32.
        weight: DevicePtr,
        /// Added to the mean of squares.
        eps: f32,
    },
}

/// What becomes of the product.
#[derive(Clone, Copy, Debug)]
pub enum SkinnyOutput {
    /// Written as `[m][n]` of the precision.
    Store(DevicePtr),
    /// Written as `[m][n]` of f32.
    StoreF32(DevicePtr),
    /// Added to `[m][n]` of f32, which must not be where the input comes from.
    AddResidual(DevicePtr),
    /// `silu(gate) * up` written as `[m][n / 2]` of the precision; the first half of w's rows are the gate's.
    SiluMul(DevicePtr),
}

/// One product.
#[derive(Clone, Copy, Debug)]
pub struct SkinnyArgs {
    /// Where x comes from.
    pub input: SkinnyInput,
    /// `[n][k]` of the precision; with `w_scales`, of fp8 (e4m3).
    pub w: DevicePtr,
    /// Scale of each row of w, `[n]` of f32.
    pub w_scales: Option<DevicePtr>,
    /// `[n]` of f32.
    pub bias: Option<DevicePtr>,
    /// What becomes of the product.
    pub out: SkinnyOutput,
    /// Rows of x.
    pub m: usize,
    /// Rows of w.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
}

/// How deep the kernels fetch. The defaults are meant for every shape; a benchmark may try others.
#[derive(Clone, Copy, Debug)]
pub struct SkinnyTuning {
    /// Most slots of a tile kernel's ring.
    pub stages: usize,
    /// Pieces of work (4 KiB per warp) that streaming kernels fetch into L2 beyond their rings while the kernel in front
    /// still runs.
    pub l2_ahead: usize,
    /// The next kernel may begin when at most so many pieces of work per warp have not been asked for.
    pub early: usize,
    /// Launches may begin before the one in front has ended.
    pub overlap: bool,
    /// Blocks that share k in the tile kernels; 0 chooses by shape.
    pub cluster: usize,
}

impl Default for SkinnyTuning {
    fn default() -> SkinnyTuning {
        SkinnyTuning { stages: 6, l2_ahead: 0, early: usize::MAX, overlap: true, cluster: 0 }
    }
}

/// What the kernels take, in the layout of the kernel file.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    x: DevicePtr,
    norm_weight: DevicePtr,
    w: DevicePtr,
    scales: DevicePtr,
    bias: DevicePtr,
    out: DevicePtr,
    eps: f32,
    m: u32,
    n: u32,
    k: u32,
    output: u32,
    x_at: u32,
    ring_at: u32,
    l2_ahead: u32,
    early: u32,
    tile_rows: u32,
    slot_bytes: u32,
    stages: u32,
}

/// Shape of one launch.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plan {
    blocks: usize,
    cluster: usize,
    stages: usize,
    slot_bytes: usize,
    x_at: usize,
    ring_at: usize,
    keeps_x: bool,
    tile_rows: usize,
    shared: usize,
}

/// What a plan depends on.
#[derive(Clone, Copy, Debug)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    norm: bool,
    silu: bool,
    /// Bytes of a weight.
    width: usize,
}

/// What of the device a plan depends on.
#[derive(Clone, Copy, Debug)]
struct Limits {
    multiprocessors: usize,
    shared: usize,
    clusters: bool,
}

impl Shape {
    fn units(self) -> usize {
        if self.silu { self.n / 2 } else { self.n }
    }

    fn chunks(self) -> usize {
        (self.k * self.width).div_ceil(CHUNK_BYTES)
    }

    /// Bytes of one row of x that go with a chunk of weights.
    fn x_chunk_bytes(self) -> usize {
        CHUNK_BYTES / self.width * 2
    }

    fn aligned(self) -> bool {
        let multiple = if self.width == 1 { 16 } else { 8 };
        self.m > 0 && self.n > 0 && self.n.is_multiple_of(8) && self.k > 0 && self.k.is_multiple_of(multiple)
    }

    fn plan(self, limits: Limits, tuning: SkinnyTuning) -> Option<Plan> {
        if !self.aligned() || self.m > MAX_M {
            return None;
        }
        if self.m <= STREAM_MAX_M { self.stream_plan(limits) } else { self.tile_plan(limits, tuning) }
    }

    fn stream_plan(self, limits: Limits) -> Option<Plan> {
        let blocks = limits.multiprocessors.min(self.units());
        let groups = self.units().div_ceil(blocks).div_ceil(if self.silu { GROUP_ROWS / 2 } else { GROUP_ROWS });
        let tokens = self.m.div_ceil(8) * 8;
        let squares = tokens * WARPS * 4;
        let partial = 2 * WARPS * tokens * 20 * 4;
        let x_at = align(squares + partial.max(if self.norm { self.k * 4 } else { 0 }));
        let x_bytes = align(self.m * (self.k * self.width).div_ceil(PIECE_BYTES) * (PIECE_BYTES / self.width * 2));
        let keeps_x = self.norm || (groups > 1 && x_bytes <= KEPT_X_BYTES);
        let ring_at = x_at + if keeps_x { x_bytes } else { 0 };
        let shared = ring_at + WARPS * SLOTS * GROUP_ROWS * PIECE_BYTES;
        let plan = Plan { blocks, cluster: 1, stages: 0, slot_bytes: 0, x_at, ring_at, keeps_x, tile_rows: 0, shared };
        (shared <= limits.shared).then_some(plan)
    }

    fn tile_plan(self, limits: Limits, tuning: SkinnyTuning) -> Option<Plan> {
        if self.norm {
            return None;
        }
        let per_unit = if self.silu { 2 } else { 1 };
        let most_rows = if limits.shared < 160 << 10 { TILE_ROWS / 2 } else { TILE_ROWS };
        let rows_with = |clusters: usize| self.units().div_ceil(clusters) * per_unit;
        // Clusters stay within a group of 16 or 18 multiprocessors.
        let clusters_of = |size: usize| {
            let usable = if size > 2 { limits.multiprocessors / 16 * 16 } else { limits.multiprocessors };
            (usable / size).clamp(1, self.units())
        };
        // Bytes that a block reads, and for its cluster also writes and waits for.
        let cost = |size: usize| {
            let rows = rows_with(clusters_of(size));
            let passes = rows.div_ceil(most_rows);
            let read = (rows * self.width + passes * self.m * 2) * self.k / size;
            read + if size > 1 { rows * self.m * 8 + 40_000 } else { 0 }
        };
        let fits = |size: &usize| *size == 1 || (limits.clusters && self.chunks() >= *size);
        let cluster = match tuning.cluster {
            0 => [1, 2, 4, 8].into_iter().filter(fits).min_by_key(|size| cost(*size))?,
            chosen => Some(chosen).filter(fits)?,
        };
        let clusters = clusters_of(cluster);
        let rows = rows_with(clusters);
        let tile_rows = rows.div_ceil(rows.div_ceil(most_rows)).next_multiple_of(16);
        // Whole tiles, of which parts may stay empty.
        let tokens = if self.m <= 32 { 32 } else { MAX_M };
        let whole_rows = tile_rows.next_multiple_of(64);
        let slot_bytes = whole_rows * CHUNK_BYTES + tokens * self.x_chunk_bytes();
        let ring_at = (tokens * (whole_rows + 4) * 4).next_multiple_of(1024);
        let (stages, shared) = stages(limits, tuning, ring_at, slot_bytes)?;
        let blocks = clusters * cluster;
        Some(Plan { blocks, cluster, stages, slot_bytes, x_at: 0, ring_at, keeps_x: false, tile_rows, shared })
    }
}

fn align(bytes: usize) -> usize {
    bytes.next_multiple_of(128)
}

/// As many slots as leave room for the next kernel's block on the same multiprocessor, four at least; and all shared
/// memory of a block then.
fn stages(limits: Limits, tuning: SkinnyTuning, before: usize, stage_bytes: usize) -> Option<(usize, usize)> {
    let total = |stages: usize| before + stages * stage_bytes;
    let half = limits.shared / 2 - 1024;
    let wanted = |stages: &usize| *stages <= tuning.stages.max(4) && (*stages <= 4 || total(*stages) <= half);
    let stages = STAGES.into_iter().rev().filter(wanted).find(|stages| total(*stages) <= limits.shared)?;
    Some((stages, total(stages)))
}

/// Functions of one pair of activation and weight types: streaming ones up to 8 rows, and with x kept; the same up to
/// 16 rows; tile ones up to 32 and 64.
type Family = [Function; 6];

/// The kernels.
pub struct Skinny {
    bf16: Family,
    f16: Family,
    fp8_bf16: Family,
    fp8_f16: Family,
    f32: Function,
    limits: Limits,
    /// How deep the kernels fetch.
    pub tuning: SkinnyTuning,
}

impl Skinny {
    /// Find the kernels.
    pub fn new(gpu: &Gpu) -> Result<Skinny, CudaError> {
        let family = |file: &'static str, names: [&'static str; 6]| -> Result<Family, CudaError> {
            let [a, b, c, d, e, f] = names.map(|name| gpu.function(file, name));
            Ok([a?, b?, c?, d?, e?, f?])
        };
        Ok(Skinny {
            bf16: family(
                BF16_FILE,
                [
                    "skinny8_bf16",
                    "skinny8_kept_bf16",
                    "skinny16_bf16",
                    "skinny16_kept_bf16",
                    "skinny32_bf16",
                    "skinny64_bf16",
                ],
            )?,
            f16: family(
                F16_FILE,
                [
                    "skinny8_f16",
                    "skinny8_kept_f16",
                    "skinny16_f16",
                    "skinny16_kept_f16",
                    "skinny32_f16",
                    "skinny64_f16",
                ],
            )?,
            fp8_bf16: family(
                BF16_FILE,
                [
                    "skinny8_fp8_bf16",
                    "skinny8_kept_fp8_bf16",
                    "skinny16_fp8_bf16",
                    "skinny16_kept_fp8_bf16",
                    "skinny32_fp8_bf16",
                    "skinny64_fp8_bf16",
                ],
            )?,
            fp8_f16: family(
                F16_FILE,
                [
                    "skinny8_fp8_f16",
                    "skinny8_kept_fp8_f16",
                    "skinny16_fp8_f16",
                    "skinny16_kept_fp8_f16",
                    "skinny32_fp8_f16",
                    "skinny64_fp8_f16",
                ],
            )?,
            f32: gpu.function(BF16_FILE, "skinny_f32")?,
            limits: Limits {
                multiprocessors: gpu.info().multiprocessors as usize,
                shared: gpu.info().shared_bytes_per_block as usize,
                clusters: gpu.arch().number() >= 90,
            },
            tuning: SkinnyTuning::default(),
        })
    }

    /// Most rows of x.
    pub fn max_m(&self) -> usize {
        MAX_M
    }

    /// Whether [`Skinny::run`] takes it. A norm in front is refused beyond 16 rows, where a kernel of its own is better.
    pub fn supports(&self, args: &SkinnyArgs, precision: Precision) -> bool {
        match precision {
            Precision::F32 => args.w_scales.is_none() && shape(args, 4).aligned() && args.m <= MAX_M,
            _ => shape(args, if args.w_scales.is_some() { 1 } else { 2 }).plan(self.limits, self.tuning).is_some(),
        }
    }

    /// Launch it.
    pub fn run(&self, gpu: &Gpu, args: &SkinnyArgs, precision: Precision) -> Result<(), CudaError> {
        let unsupported = || {
            CudaError::Unsupported(format!(
                "the skinny product can't do {} rows with {} x {} weights of {}{}",
                args.m,
                args.n,
                args.k,
                precision.suffix(),
                if args.w_scales.is_some() { " scaled from fp8" } else { "" }
            ))
        };
        let family = match (precision, args.w_scales) {
            (Precision::F32, _) => {
                if !self.supports(args, precision) {
                    return Err(unsupported());
                }
                let blocks = shape(args, 4).units().div_ceil(WARPS);
                return self.launch(gpu, self.f32, Launch::grid(blocks, THREADS), arguments(args));
            }
            (Precision::Bf16, None) => &self.bf16,
            (Precision::Bf16, Some(_)) => &self.fp8_bf16,
            (Precision::F16, None) => &self.f16,
            (Precision::F16, Some(_)) => &self.fp8_f16,
        };
        let width = if args.w_scales.is_some() { 1 } else { 2 };
        let plan = shape(args, width).plan(self.limits, self.tuning).ok_or_else(unsupported)?;
        let [to_8, to_8_kept, to_16, to_16_kept, to_32, to_64] = *family;
        let function = match (args.m, plan.keeps_x) {
            (0..=8, false) => to_8,
            (0..=8, true) => to_8_kept,
            (9..=16, false) => to_16,
            (9..=16, true) => to_16_kept,
            (17..=32, _) => to_32,
            _ => to_64,
        };
        let arguments = Arguments {
            x_at: plan.x_at as u32,
            ring_at: plan.ring_at as u32,
            slot_bytes: plan.slot_bytes as u32,
            stages: plan.stages as u32,
            l2_ahead: self.tuning.l2_ahead as u32,
            early: u32::try_from(self.tuning.early).unwrap_or(u32::MAX),
            tile_rows: plan.tile_rows as u32,
            ..arguments(args)
        };
        let launch = Launch::grid(plan.blocks, THREADS).shared(plan.shared).clustered(plan.cluster as u32);
        self.launch(gpu, function, launch, arguments)
    }

    fn launch(&self, gpu: &Gpu, function: Function, shape: Launch, args: Arguments) -> Result<(), CudaError> {
        let shape = if self.tuning.overlap { shape.overlapping() } else { shape };
        gpu.launch(function, shape, kernel_args![args])
    }
}

fn shape(args: &SkinnyArgs, width: usize) -> Shape {
    Shape {
        m: args.m,
        n: args.n,
        k: args.k,
        norm: matches!(args.input, SkinnyInput::Norm { .. }),
        silu: matches!(args.out, SkinnyOutput::SiluMul(_)),
        width,
    }
}

/// The arguments that do not depend on a plan.
fn arguments(args: &SkinnyArgs) -> Arguments {
    let (x, norm_weight, eps) = match args.input {
        SkinnyInput::Plain(x) => (x, 0, 0.0),
        SkinnyInput::Norm { hidden, weight, eps } => (hidden, weight, eps),
    };
    let (output, out) = match args.out {
        SkinnyOutput::Store(out) => (0, out),
        SkinnyOutput::StoreF32(out) => (1, out),
        SkinnyOutput::AddResidual(out) => (2, out),
        SkinnyOutput::SiluMul(out) => (3, out),
    };
    Arguments {
        x,
        norm_weight,
        w: args.w,
        scales: args.w_scales.unwrap_or(0),
        bias: args.bias.unwrap_or(0),
        out,
        eps,
        m: args.m as u32,
        n: args.n as u32,
        k: args.k as u32,
        output,
        x_at: 0,
        ring_at: 0,
        slot_bytes: 0,
        stages: 0,
        l2_ahead: 0,
        early: 0,
        tile_rows: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Limits = Limits { multiprocessors: 132, shared: 232_448, clusters: true };
    const SM86: Limits = Limits { multiprocessors: 84, shared: 101_376, clusters: false };

    fn shape(m: usize, n: usize, k: usize) -> Shape {
        Shape { m, n, k, norm: false, silu: false, width: 2 }
    }

    #[test]
    fn successive_kernels_fit_on_a_multiprocessor() {
        let shared = |m: usize, n: usize, k: usize, norm: bool, silu: bool| {
            let plan = Shape { norm, silu, ..shape(m, n, k) }.plan(H200, SkinnyTuning::default()).unwrap();
            assert_eq!(plan.blocks, 132);
            plan.shared + 1024
        };
        for m in [1, 2] {
            let with_norm = shared(m, 2560, 2048, true, false).max(shared(m, 11264, 2048, true, true));
            let without = shared(m, 2048, 2048, false, false).max(shared(m, 2048, 5632, false, false));
            assert!(with_norm + without <= 228 << 10);
        }
    }

    #[test]
    fn small_products_of_many_rows_split_k_over_a_cluster() {
        let plan = |n, k| shape(64, n, k).plan(H200, SkinnyTuning::default()).unwrap();
        assert_eq!((plan(2048, 2048).cluster, plan(2048, 2048).tile_rows), (4, 64));
        assert!(plan(2048, 5632).cluster > 1);
        assert_eq!(plan(32000, 2048).cluster, 1);
        assert_eq!(shape(64, 2048, 2048).plan(SM86, SkinnyTuning::default()).unwrap().cluster, 1);
    }

    #[test]
    fn plans_stay_within_the_device() {
        for limits in [H200, SM86] {
            for m in 1..=MAX_M {
                for (n, k) in [(8, 8), (24, 40), (2560, 2048), (2048, 5632), (4096, 14336)] {
                    for (norm, silu, width) in [(false, false, 2), (true, true, 2), (false, true, 1), (true, false, 1)]
                    {
                        let shape = Shape { norm, silu: silu && n % 16 == 0, width, ..shape(m, n, k) };
                        let Some(plan) = shape.plan(limits, SkinnyTuning::default()) else { continue };
                        assert!(plan.shared <= limits.shared, "{shape:?} {plan:?}");
                        assert!(plan.blocks > 0 && plan.blocks % plan.cluster == 0 && plan.tile_rows <= TILE_ROWS);
                        assert!(!norm || plan.keeps_x);
                    }
                }
            }
        }
    }

    #[test]
    fn odd_sizes_are_refused() {
        let refused = |shape: Shape| shape.plan(H200, SkinnyTuning::default()).is_none();
        assert!(refused(shape(65, 64, 64)) && refused(shape(0, 64, 64)));
        assert!(refused(shape(1, 60, 64)) && refused(shape(1, 64, 60)));
        assert!(refused(Shape { width: 1, ..shape(1, 64, 24) }));
        assert!(refused(Shape { norm: true, ..shape(17, 64, 64) }));
    }
}
