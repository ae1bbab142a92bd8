//! strobe's own matrix products: Hopper's copy engine and tensor cores where the shape allows it, kernels for any shape
//! elsewhere. What follows a product (bias, scales, residual, activation) is done while it is still in registers.

use std::fmt;

use bytemuck::NoUninit;

use crate::dtype::Precision;
use crate::error::CudaError;
use crate::gpu::{Gpu, Launch};
use crate::kernel_args;
use crate::memory::DevicePtr;
use crate::module::Function;
use crate::tensor_map::{MapElement, MapKey, OUT_BOX_ROWS, TensorMaps};

/// Scales of e4m3 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scales {
    /// f32 on the device.
    pub pointer: DevicePtr,
    /// One for each row of the matrix; otherwise one in all.
    pub per_row: bool,
}

/// Element type of both operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmInput {
    /// That of the activations.
    Same,
    /// e4m3. A value is its code times the scale of its row.
    Fp8 {
        /// Of the input.
        x_scales: Scales,
        /// Of the weights.
        w_scales: Scales,
    },
}

/// What becomes of the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmEpilogue {
    /// Written in the activations' type.
    Store,
    /// Written as f32.
    StoreF32,
    /// Added to f32 values: the residual stream.
    AddResidual,
    /// The weights are the gate's rows, then as many of the up projection: `silu(gate) * up` is written in the
    /// activations' type, `n / 2` wide.
    SiluMul,
}

/// One product: `out[m][n] = x[m][k] . w[n][k]^T`.
#[derive(Clone, Copy, Debug)]
pub struct GemmArgs {
    /// Type of activations.
    pub precision: Precision,
    /// Type of `x` and `w`.
    pub input: GemmInput,
    /// `[m][k]`.
    pub x: DevicePtr,
    /// `[n][k]`.
    pub w: DevicePtr,
    /// `[m][n]`, or `[m][n / 2]` for [`GemmEpilogue::SiluMul`].
    pub out: DevicePtr,
    /// What becomes of the product.
    pub epilogue: GemmEpilogue,
    /// f32 `[n]`, added before anything else.
    pub bias: Option<DevicePtr>,
    /// u64 `[m][n / columns of the tile]`, rounded up: gets the largest value of each row in each tile, and its column, for
    /// [`crate::SampleOps::argmax_tiles`]. Only where [`OwnGemm::keeps_maxima`].
    pub maxima: Option<DevicePtr>,
    /// u32: where it is not 0 when the kernel runs, nobody reads more than the maxima, and `out` is left alone.
    pub spared: Option<DevicePtr>,
    /// Rows of the input.
    pub m: usize,
    /// Rows of the weights.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
}

impl GemmArgs {
    fn input_bytes(&self) -> usize {
        match self.input {
            GemmInput::Same => self.precision.bytes(),
            GemmInput::Fp8 { .. } => 1,
        }
    }

    /// Columns of the output.
    pub fn width(&self) -> usize {
        if self.epilogue == GemmEpilogue::SiluMul { self.n / 2 } else { self.n }
    }

    fn out_type(&self) -> OutType {
        match (self.epilogue, self.precision) {
            (GemmEpilogue::AddResidual, _) => OutType::AddF32,
            (GemmEpilogue::StoreF32, _) | (_, Precision::F32) => OutType::F32,
            (_, Precision::Bf16) => OutType::Bf16,
            (_, Precision::F16) => OutType::F16,
        }
    }

    /// Whether rows begin where vector loads and the copy engine want them.
    fn aligned(&self) -> bool {
        (self.k * self.input_bytes()).is_multiple_of(16) && self.x.is_multiple_of(16) && self.w.is_multiple_of(16)
    }
}

/// Numbers shared with the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
enum OutType {
    Bf16 = 0,
    F16 = 1,
    F32 = 2,
    AddF32 = 3,
}

impl OutType {
    fn bytes(self) -> usize {
        match self {
            OutType::Bf16 | OutType::F16 => 2,
            OutType::F32 | OutType::AddF32 => 4,
        }
    }
}

/// How blocks of a Hopper kernel work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmCluster {
    /// Not at all.
    None,
    /// Two, on neighbouring rows, load their weights for each other.
    Pair,
    /// So many share a tile, each with its range of k.
    Split(u32),
}

/// A way to compute a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct GemmVariant {
    /// Hopper's own instructions, or those of any GPU.
    pub hopper: bool,
    /// Hopper only: so little memory that a multiprocessor runs two blocks at once, of this launch or of its neighbours.
    pub small: bool,
    /// Hopper only: one warpgroup writes its tile while the other multiplies the next.
    #[serde(default)]
    pub turns: bool,
    /// Rows of a tile.
    pub rows: u32,
    /// Columns of a tile.
    pub columns: u32,
    /// Hopper only.
    pub cluster: GemmCluster,
}

impl fmt::Display for GemmVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match (self.hopper, self.small, self.turns) {
            (false, ..) => "any ",
            (true, true, _) => "small ",
            (true, _, true) => "turns ",
            (true, ..) => "",
        };
        write!(f, "{kind}{}x{}", self.rows, self.columns)?;
        match self.cluster {
            GemmCluster::None => Ok(()),
            GemmCluster::Pair => write!(f, " pair"),
            GemmCluster::Split(parts) => write!(f, " split {parts}"),
        }
    }
}

/// A tile shape of the Hopper kernels; the order of its instances is bf16, f16, e4m3.
struct HopperTile {
    rows: usize,
    columns: usize,
    /// Columns of one of the two warpgroups.
    worker_columns: usize,
    /// Tiles in flight.
    stages: usize,
    /// See [`GemmVariant::small`].
    small: bool,
    /// See [`GemmVariant::turns`].
    turns: bool,
    names: [&'static str; 3],
}

impl HopperTile {
    const fn new(rows: usize, columns: usize, stages: usize, small: bool, names: [&'static str; 3]) -> HopperTile {
        // Two warpgroups of 64 rows each, side by side where there are only 64.
        let worker_columns = if rows == 64 { columns / 2 } else { columns };
        HopperTile { rows, columns, worker_columns, stages, small, turns: false, names }
    }

    const fn in_turns(columns: usize, stages: usize, names: [&'static str; 3]) -> HopperTile {
        HopperTile { turns: true, ..HopperTile::new(128, columns, stages, false, names) }
    }

    /// Rows of the boxes in which weights come, as the kernel has them.
    fn weight_box(&self) -> u32 {
        let columns = self.worker_columns as u32;
        if columns.is_multiple_of(16) { columns / 2 } else { columns }
    }

    /// As laid out by the kernel: tiles, buffers of each warp that multiplies, barriers.
    fn shared_bytes(&self) -> usize {
        self.stages * (self.rows + self.columns) * 128 + 8 * if self.small { 2048 } else { 4096 } + self.stages * 16
    }

    /// Two warpgroups that multiply, and one that loads; of the latter a small tile has one warp.
    fn threads(&self) -> u32 {
        if self.small { 288 } else { 384 }
    }

    /// Blocks that a multiprocessor has room for.
    fn resident(&self) -> usize {
        if self.small { 2 } else { 1 }
    }
}

const HOPPER_FILES: [&str; 3] = ["gemm_sm90_bf16.cu", "gemm_sm90_f16.cu", "gemm_sm90_fp8.cu"];
const HOPPER_TILES: [HopperTile; 14] = [
    HopperTile::new(128, 256, 4, false, ["gemm_128x256_bf16", "gemm_128x256_f16", "gemm_128x256_fp8"]),
    HopperTile::new(128, 192, 4, false, ["gemm_128x192_bf16", "gemm_128x192_f16", "gemm_128x192_fp8"]),
    HopperTile::new(128, 176, 5, false, ["gemm_128x176_bf16", "gemm_128x176_f16", "gemm_128x176_fp8"]),
    HopperTile::new(128, 160, 5, false, ["gemm_128x160_bf16", "gemm_128x160_f16", "gemm_128x160_fp8"]),
    HopperTile::new(128, 128, 6, false, ["gemm_128x128_bf16", "gemm_128x128_f16", "gemm_128x128_fp8"]),
    HopperTile::new(64, 256, 4, false, ["gemm_64x256_bf16", "gemm_64x256_f16", "gemm_64x256_fp8"]),
    HopperTile::in_turns(192, 4, ["gemm_turns_128x192_bf16", "gemm_turns_128x192_f16", "gemm_turns_128x192_fp8"]),
    HopperTile::in_turns(176, 5, ["gemm_turns_128x176_bf16", "gemm_turns_128x176_f16", "gemm_turns_128x176_fp8"]),
    HopperTile::in_turns(160, 5, ["gemm_turns_128x160_bf16", "gemm_turns_128x160_f16", "gemm_turns_128x160_fp8"]),
    HopperTile::in_turns(152, 5, ["gemm_turns_128x152_bf16", "gemm_turns_128x152_f16", "gemm_turns_128x152_fp8"]),
    HopperTile::in_turns(128, 6, ["gemm_turns_128x128_bf16", "gemm_turns_128x128_f16", "gemm_turns_128x128_fp8"]),
    HopperTile::new(128, 128, 3, true, ["gemm_small_128x128_bf16", "gemm_small_128x128_f16", "gemm_small_128x128_fp8"]),
    HopperTile::new(128, 64, 4, true, ["gemm_small_128x64_bf16", "gemm_small_128x64_f16", "gemm_small_128x64_fp8"]),
    HopperTile::new(64, 128, 4, true, ["gemm_small_64x128_bf16", "gemm_small_64x128_f16", "gemm_small_64x128_fp8"]),
];

/// Tiles of the kernels for every GPU, and their instances: bf16, f16, e4m3, f32.
const ANY_TILES: [(usize, usize, [&str; 4]); 2] = [
    (128, 128, ["gemm_mma_128x128_bf16", "gemm_mma_128x128_f16", "gemm_mma_128x128_fp8", "gemm_plain_128x128_f32"]),
    (32, 64, ["gemm_mma_32x64_bf16", "gemm_mma_32x64_f16", "gemm_mma_32x64_fp8", "gemm_plain_32x64_f32"]),
];

/// Which instance of a kernel multiplies this.
fn instance(args: &GemmArgs) -> usize {
    match (args.input, args.precision) {
        (GemmInput::Fp8 { .. }, _) => 2,
        (_, Precision::Bf16) => 0,
        (_, Precision::F16) => 1,
        (_, Precision::F32) => 3,
    }
}

/// What the Hopper kernels take, beside the three maps.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct HopperParams {
    bias: DevicePtr,
    x_scales: DevicePtr,
    w_scales: DevicePtr,
    maxima: DevicePtr,
    spared: DevicePtr,
    x_scale_stride: u32,
    w_scale_stride: u32,
    m: u32,
    n: u32,
    k_steps: u32,
    out: u32,
    silu: u32,
    keep: u32,
    pair: u32,
    split: u32,
}

/// What the other kernels take.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct AnyParams {
    x: DevicePtr,
    w: DevicePtr,
    out: DevicePtr,
    bias: DevicePtr,
    x_scales: DevicePtr,
    w_scales: DevicePtr,
    x_scale_stride: u32,
    w_scale_stride: u32,
    m: u32,
    n: u32,
    k: u32,
    out_type: u32,
    silu: u32,
    aligned: u32,
}

/// The kernels, ready to launch.
pub struct OwnGemm {
    hopper: Vec<[Function; 3]>,
    any: Vec<[Function; 4]>,
    multiprocessors: usize,
    maps: TensorMaps,
}

impl OwnGemm {
    /// Look the kernels up.
    pub fn new(gpu: &Gpu) -> Result<OwnGemm, CudaError> {
        let mut hopper = Vec::new();
        if gpu.arch().number() >= 90 {
            for tile in &HOPPER_TILES {
                let [a, b, c] = tile.names;
                let [in_a, in_b, in_c] = HOPPER_FILES;
                hopper.push([gpu.function(in_a, a)?, gpu.function(in_b, b)?, gpu.function(in_c, c)?]);
            }
        }
        let mut any = Vec::new();
        for (_, _, [a, b, c, d]) in ANY_TILES {
            let find = |name| gpu.function("gemm.cu", name);
            any.push([find(a)?, find(b)?, find(c)?, find(d)?]);
        }
        let multiprocessors = gpu.info().multiprocessors.max(1) as usize;
        Ok(OwnGemm { hopper, any, multiprocessors, maps: TensorMaps::default() })
    }

    /// Whether these kernels can compute it.
    pub fn supports(&self, args: &GemmArgs) -> bool {
        let halves = args.epilogue != GemmEpilogue::SiluMul || args.n.is_multiple_of(2);
        let fits = [args.m, args.n, args.k].iter().all(|size| *size > 0 && *size < 1 << 31);
        halves && fits
    }

    /// Every way to compute it, for a tuner.
    pub fn variants(&self, args: &GemmArgs) -> Vec<GemmVariant> {
        let mut all = Vec::new();
        if !self.supports(args) {
            return all;
        }
        if self.hopper_fits(args) {
            for tile in HOPPER_TILES.iter().filter(|tile| tile_fits(tile, args)) {
                let with = |cluster| GemmVariant {
                    hopper: true,
                    small: tile.small,
                    turns: tile.turns,
                    rows: tile.rows as u32,
                    columns: tile.columns as u32,
                    cluster,
                };
                all.push(with(GemmCluster::None));
                if tile.turns {
                    continue;
                }
                if args.m > tile.rows {
                    all.push(with(GemmCluster::Pair));
                }
                let tiles = tiles(tile, args, 1);
                // Splits that leave each block enough to do, and blocks no more than there are places for.
                for parts in 2..=8 {
                    if tiles * parts <= self.multiprocessors * tile.resident() && k_steps(args) >= 2 * parts {
                        all.push(with(GemmCluster::Split(parts as u32)));
                    }
                }
            }
        }
        for (rows, columns, _) in ANY_TILES {
            all.push(GemmVariant {
                hopper: false,
                small: false,
                turns: false,
                rows: rows as u32,
                columns: columns as u32,
                cluster: GemmCluster::None,
            });
        }
        all
    }

    /// The way that should be fastest, by arithmetic alone.
    pub fn choose(&self, args: &GemmArgs) -> GemmVariant {
        let any = |(rows, columns, _): (usize, usize, [&str; 4])| GemmVariant {
            hopper: false,
            small: false,
            turns: false,
            rows: rows as u32,
            columns: columns as u32,
            cluster: GemmCluster::None,
        };
        if !self.hopper_fits(args) {
            let [large, small] = ANY_TILES;
            let blocks = args.m.div_ceil(128) * args.n.div_ceil(128);
            return any(if args.m > 32 && blocks * 2 > self.multiprocessors { large } else { small });
        }
        let mut best = (f64::INFINITY, any(ANY_TILES[0]));
        for variant in self.variants(args).into_iter().filter(|variant| variant.hopper) {
            let cost = self.cycles(args, variant);
            if cost < best.0 {
                best = (cost, variant);
            }
        }
        best.1
    }

    /// Cycles that a variant should take: waves of tiles, each the longer of multiplying and loading. The factors put what
    /// bench/results/cuda-gemm.json found fastest near the front.
    pub(crate) fn cycles(&self, args: &GemmArgs, variant: GemmVariant) -> f64 {
        let Some(tile) = HOPPER_TILES.iter().find(|tile| is_tile(tile, variant)) else { return f64::INFINITY };
        let (together, split) = match variant.cluster {
            GemmCluster::None => (1, 1),
            GemmCluster::Pair => (2, 1),
            GemmCluster::Split(parts) => (1, parts as usize),
        };
        let tiles = tiles(tile, args, together) * together;
        let blocks = (tiles * split).min(self.multiprocessors);
        // Two small blocks on a multiprocessor take turns: one multiplies while the other loads or writes.
        let places = self.multiprocessors * tile.resident() / split;
        let shared = if tile.small && tiles * 2 > places { 1.9 } else { 1.0 };
        let waves = tiles.div_ceil(places) as f64 * shared;
        let begin = if tile.small { 800.0 } else { 1500.0 };
        let steps = k_steps(args).div_ceil(split) as f64;
        // 2048 multiply-adds of 16 bits in a cycle, or twice as many of 8; narrow tiles wait for shared memory.
        let narrow = match tile.worker_columns {
            ..128 => 1.5,
            128..152 => 1.2,
            _ => 1.1,
        };
        let area = (tile.rows * tile.columns) as f64;
        let multiply = area / 32.0 * narrow;
        let bytes = ((tile.rows + tile.columns / together) * 128) as f64;
        let load = (bytes / 64.0).max(bytes * blocks as f64 / 6000.0);
        // A split's partial sums pass from block to block.
        let finish = area / 16.0 / split as f64 + if split > 1 { 1000.0 + area / 4.0 } else { 0.0 };
        let each = steps * multiply.max(load);
        // Where warpgroups take turns, only the last tile's writing is not hidden.
        let hidden = tile.small || tile.turns;
        let all = if hidden { waves * each + finish + begin } else { waves * (each + finish) + begin };
        // A pair saves loads, but waits for its other half.
        if together > 1 { all * 1.02 } else { all }
    }

    /// Tiles whose maxima a variant keeps for each row of the product, where it can.
    pub fn keeps_maxima(&self, args: &GemmArgs, variant: GemmVariant) -> Option<usize> {
        let plain = args.input == GemmInput::Same && args.epilogue == GemmEpilogue::StoreF32 && args.bias.is_none();
        (variant.turns && plain && self.hopper_fits(args)).then(|| args.n.div_ceil(variant.columns as usize))
    }

    /// Compute it in the way that should be fastest.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` name.
    pub unsafe fn run(&self, gpu: &Gpu, args: &GemmArgs) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.run_variant(gpu, args, self.choose(args)) }
    }

    /// Compute it in a given way, one of [`OwnGemm::variants`].
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` name.
    pub unsafe fn run_variant(&self, gpu: &Gpu, args: &GemmArgs, variant: GemmVariant) -> Result<(), CudaError> {
        if !self.supports(args) {
            return Err(CudaError::Unsupported(format!(
                "no own GEMM of {} x {} x {} ({:?})",
                args.m, args.n, args.k, args.epilogue
            )));
        }
        let maxima = args.maxima.is_some() && self.keeps_maxima(args, variant).is_some();
        if (args.maxima.is_some() || args.spared.is_some()) && !maxima {
            return Err(no_variant(args, variant));
        }
        // SAFETY: the caller's promise.
        unsafe { if variant.hopper { self.run_hopper(gpu, args, variant) } else { self.run_any(gpu, args, variant) } }
    }

    fn hopper_fits(&self, args: &GemmArgs) -> bool {
        !self.hopper.is_empty()
            && instance(args) < 3
            && args.aligned()
            && args.out.is_multiple_of(16)
            && (args.width() * args.out_type().bytes()).is_multiple_of(16)
    }

    /// # Safety
    /// As for [`Gpu::launch`].
    unsafe fn run_hopper(&self, gpu: &Gpu, args: &GemmArgs, variant: GemmVariant) -> Result<(), CudaError> {
        let found = HOPPER_TILES.iter().zip(&self.hopper).find(|(tile, _)| is_tile(tile, variant));
        let split = if let GemmCluster::Split(parts) = variant.cluster { parts as usize } else { 1 };
        let usable = self.hopper_fits(args) && (1..=8).contains(&split) && split <= k_steps(args);
        let alone = variant.cluster == GemmCluster::None;
        let fits = |tile: &HopperTile| usable && tile_fits(tile, args) && (alone || !tile.turns);
        let Some((tile, functions)) = found.filter(|(tile, _)| fits(tile)) else {
            return Err(no_variant(args, variant));
        };
        let pair = variant.cluster == GemmCluster::Pair;
        let (x_element, out_element) = match instance(args) {
            0 => (MapElement::Bf16, args.out_type()),
            1 => (MapElement::F16, args.out_type()),
            _ => (MapElement::Fp8, args.out_type()),
        };
        let out_element = match out_element {
            OutType::Bf16 => MapElement::Bf16,
            OutType::F16 => MapElement::F16,
            OutType::F32 | OutType::AddF32 => MapElement::F32,
        };
        let x =
            MapKey { pointer: args.x, rows: args.m, columns: args.k, element: x_element, box_rows: tile.rows as u32 };
        let box_rows = tile.weight_box();
        let w = MapKey { pointer: args.w, rows: args.n, columns: args.k, element: x_element, box_rows };
        let out = MapKey {
            pointer: args.out,
            rows: args.m,
            columns: args.width(),
            element: out_element,
            box_rows: OUT_BOX_ROWS,
        };
        let (x, w, out) = (self.maps.get(x)?, self.maps.get(w)?, self.maps.get(out)?);
        let (x_scales, w_scales) = scales(args);
        let params = HopperParams {
            bias: args.bias.unwrap_or(0),
            x_scales: x_scales.pointer,
            w_scales: w_scales.pointer,
            maxima: args.maxima.unwrap_or(0),
            spared: args.spared.unwrap_or(0),
            x_scale_stride: u32::from(x_scales.per_row),
            w_scale_stride: u32::from(w_scales.per_row),
            m: args.m as u32,
            n: args.n as u32,
            k_steps: k_steps(args) as u32,
            out: args.out_type() as u32,
            silu: u32::from(args.epilogue == GemmEpilogue::SiluMul),
            keep: u32::from(gpu.keeps_residual(args.m, args.n)),
            pair: u32::from(pair),
            split: split as u32,
        };
        let places = self.multiprocessors * tile.resident();
        let blocks = if pair {
            2 * tiles(tile, args, 2).min(places / 2)
        } else if split > 1 {
            tiles(tile, args, 1) * split
        } else {
            tiles(tile, args, 1).min(places)
        };
        let cluster = if pair { 2 } else { split as u32 };
        let shape = Launch::grid(blocks, tile.threads()).shared(tile.shared_bytes()).clustered(cluster);
        // Where a block computes several tiles its first weights are little of its time, and waiting for the kernel before takes
        // power: begun early, batches of 1024 decode 0.3 to 0.6 % slower (docs/cuda.md).
        let shape = if tile.turns { shape } else { shape.overlapping() };
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { gpu.launch(functions[instance(args).min(2)], shape, kernel_args![x, w, out, params]) }
    }

    /// # Safety
    /// As for [`Gpu::launch`].
    unsafe fn run_any(&self, gpu: &Gpu, args: &GemmArgs, variant: GemmVariant) -> Result<(), CudaError> {
        let is = |rows: usize, columns: usize| (rows as u32, columns as u32) == (variant.rows, variant.columns);
        let found = ANY_TILES.iter().zip(&self.any).find(|((rows, columns, _), _)| is(*rows, *columns));
        let Some(((rows, columns, _), functions)) = found else { return Err(no_variant(args, variant)) };
        let (x_scales, w_scales) = scales(args);
        let params = AnyParams {
            x: args.x,
            w: args.w,
            out: args.out,
            bias: args.bias.unwrap_or(0),
            x_scales: x_scales.pointer,
            w_scales: w_scales.pointer,
            x_scale_stride: u32::from(x_scales.per_row),
            w_scale_stride: u32::from(w_scales.per_row),
            m: args.m as u32,
            n: args.n as u32,
            k: args.k as u32,
            out_type: args.out_type() as u32,
            silu: u32::from(args.epilogue == GemmEpilogue::SiluMul),
            aligned: u32::from(args.aligned()),
        };
        let which = instance(args);
        // Four stages of 64 bytes of each row; the 32-bit kernels have memory of their own.
        let shared = if which == 3 { 0 } else { 4 * (rows + columns) * 64 };
        let mut shape = Launch::grid(args.m.div_ceil(*rows), 256).shared(shared).overlapping();
        shape.grid.1 = args.n.div_ceil(*columns) as u32;
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { gpu.launch(functions[which], shape, kernel_args![params]) }
    }
}

fn no_variant(args: &GemmArgs, variant: GemmVariant) -> CudaError {
    CudaError::Unsupported(format!(
        "the GEMM of {} x {} x {} ({:?}) can't be computed as {variant}",
        args.m, args.n, args.k, args.epilogue
    ))
}

fn scales(args: &GemmArgs) -> (Scales, Scales) {
    let none = Scales { pointer: 0, per_row: false };
    match args.input {
        GemmInput::Same => (none, none),
        GemmInput::Fp8 { x_scales, w_scales } => (x_scales, w_scales),
    }
}

/// Steps of 128 bytes along k.
fn k_steps(args: &GemmArgs) -> usize {
    (args.k * args.input_bytes()).div_ceil(128)
}

/// Tiles of an output, `together` tiles of rows counted as one.
fn tiles(tile: &HopperTile, args: &GemmArgs, together: usize) -> usize {
    args.m.div_ceil(tile.rows * together) * args.n.div_ceil(tile.columns)
}

/// Columns are written in pieces of 32; where those don't fill a tile some are written twice, which must not add them twice.
/// Gate and up have half of the columns each, in whole groups of 8.
fn tile_fits(tile: &HopperTile, args: &GemmArgs) -> bool {
    let multiple = match args.epilogue {
        GemmEpilogue::AddResidual => 32,
        GemmEpilogue::SiluMul => 16,
        GemmEpilogue::Store | GemmEpilogue::StoreF32 => 8,
    };
    tile.worker_columns.is_multiple_of(multiple)
}

fn is_tile(tile: &HopperTile, variant: GemmVariant) -> bool {
    let shape = (tile.rows as u32, tile.columns as u32, tile.small, tile.turns);
    variant.hopper && shape == (variant.rows, variant.columns, variant.small, variant.turns)
}
