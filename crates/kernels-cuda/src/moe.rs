//! Mixtures of experts: routing, the pairs of token and expert sorted by expert, the products of all experts in one launch,
//! and the sum of what a token's experts answer.
//!
//! What was chosen stays on the device: grids follow from the number of tokens alone.

use crate::dtype::Precision;
use crate::error::CudaError;
use crate::gpu::{Gpu, Launch};
use crate::kernel_args;
use crate::memory::{DeviceBuffer, DevicePtr};
use crate::module::Function;
use crate::rows::typed_function;
use crate::tensor_map::{MapElement, MapKey, TensorMaps};

/// How experts and weights follow from logits; the same methods as the model crate's, which says what each does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertRouting {
    /// Softmax over all, then the best k, not renormalised.
    SoftmaxTopK,
    /// The best k, then softmax over these.
    TopKSoftmax,
    /// Sigmoid, the best groups, then the best k of these.
    DeepSeekV3 {
        /// Equal groups the experts are divided into.
        groups: usize,
        /// Groups a token's experts may come from.
        topk_groups: usize,
        /// What every weight is multiplied by.
        scale: f32,
        /// Whether the k weights are divided by their sum.
        renormalise: bool,
    },
}

/// What becomes of gate and up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// `silu(gate) * up`.
    Silu,
    /// `min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clamp(up, -limit, limit) + 1)`.
    Clamped {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Bound of both.
        limit: f32,
    },
}

/// Experts of a model.
#[derive(Clone, Copy, Debug)]
pub struct MoeShape {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// How they are chosen.
    pub routing: ExpertRouting,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of one expert.
    pub inter: usize,
    /// The experts' activation.
    pub activation: ExpertActivation,
}

/// What routing reads.
#[derive(Clone, Copy, Debug)]
pub struct RouteArgs {
    /// f32, `[tokens][experts]`.
    pub logits: DevicePtr,
    /// f32, `[experts]`; 0 where there is none.
    pub bias: DevicePtr,
    /// i32, one for each token, negative where a row is padding and goes nowhere; 0 where none is.
    pub slots: DevicePtr,
    /// Rows.
    pub tokens: usize,
    /// Out: u32, `[experts]`, tokens that each expert got.
    pub counts: DevicePtr,
}

/// Rows of a block's tile. Chosen by the pairs that an expert has on average.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertTiles {
    /// Rows of a tile.
    pub rows: usize,
    /// Hopper's own instructions, or those of any GPU.
    pub hopper: bool,
    columns: usize,
    threads: u32,
    stages: usize,
}

impl ExpertTiles {
    /// Every shape for 16 bits, fewest rows first.
    pub const TENSOR: [ExpertTiles; 4] = [
        ExpertTiles::any(16, 64, 128, 5),
        ExpertTiles::any(32, 64, 128, 5),
        ExpertTiles::any(64, 128, 256, 4),
        ExpertTiles::any(128, 128, 256, 3),
    ];
    /// Those for 16 bits on Hopper.
    pub const HOPPER: [ExpertTiles; 2] = [ExpertTiles::hopper(64, 256, 4), ExpertTiles::hopper(128, 256, 4)];
    /// No tiles: every pair by itself, for 16 bits. Reads the weights of an expert again for each of its pairs.
    pub const PAIRS: ExpertTiles = ExpertTiles::any(1, 16, 128, 0);
    /// The shape for 32 bits.
    pub const PLAIN: ExpertTiles = ExpertTiles::any(32, 64, 256, 0);

    const fn any(rows: usize, columns: usize, threads: u32, stages: usize) -> ExpertTiles {
        ExpertTiles { rows, hopper: false, columns, threads, stages }
    }

    const fn hopper(rows: usize, columns: usize, stages: usize) -> ExpertTiles {
        ExpertTiles { rows, hopper: true, columns, threads: 384, stages }
    }

    fn shared_bytes(&self) -> usize {
        // On Hopper a buffer for each warp that multiplies, and two barriers for each stage.
        let more = if self.hopper { 8 * 4096 + self.stages * 16 } else { 0 };
        self.stages * (self.rows + self.columns) * 128 + more
    }

    /// Rows of w that the copy engine brings at once: half of a warpgroup's columns.
    fn box_rows(&self) -> u32 {
        let workers_across = if self.rows == 64 { 2 } else { 1 };
        (self.columns / workers_across / 2) as u32
    }

    /// Most tiles that so many pairs can make: each expert that has any may leave one unfilled.
    fn most(&self, pairs: usize, experts: usize) -> usize {
        (pairs + pairs.min(experts) * (self.rows - 1)) / self.rows
    }
}

/// Pairs of each expert on average up to which each shape wins, measured by `microbench moe` with the shapes of Mixtral,
/// GPT-OSS and Qwen3-MoE (`bench/results/cuda-moe-tiles.txt`): those for 16 bits on any GPU, and on Hopper; beyond the last number it is the last shape.
const ANY_ROWS: [(usize, ExpertTiles); 4] = {
    let [a, b, c, d] = ExpertTiles::TENSOR;
    [(12, a), (20, b), (180, c), (usize::MAX, d)]
};
const HOPPER_ROWS: [(usize, ExpertTiles); 3] = {
    let [few, ..] = ExpertTiles::TENSOR;
    let [some, many] = ExpertTiles::HOPPER;
    [(10, few), (45, some), (usize::MAX, many)]
};

/// Words of a tile in the kernels' table.
const TILE_WORDS: usize = 4;

/// The kernels, and what they leave for each other; made for the most tokens of a step.
pub struct MoeOps {
    shape: MoeShape,
    precision: Precision,
    route: Function,
    plan: Function,
    route_and_plan: Function,
    experts: Vec<(ExpertTiles, Function)>,
    sum: Function,
    gather: Function,
    copy_counts: Function,
    maps: TensorMaps,
    chosen: DeviceBuffer,
    weights: DeviceBuffer,
    order: DeviceBuffer,
    places: DeviceBuffer,
    tiles: DeviceBuffer,
    tile_count: DeviceBuffer,
    /// Balanced logits, and beside them whether they are used.
    planned: Option<(DeviceBuffer, DeviceBuffer)>,
    max_tokens: usize,
}

#[repr(C)]
struct RouteTask {
    logits: DevicePtr,
    planned: DevicePtr,
    use_planned: DevicePtr,
    bias: DevicePtr,
    slots: DevicePtr,
    chosen: DevicePtr,
    weights: DevicePtr,
    tokens: u32,
    experts: u32,
    k: u32,
    method: u32,
    groups: u32,
    topk_groups: u32,
    renormalise: u32,
    scale: f32,
}

#[repr(C)]
struct PlanTask {
    chosen: DevicePtr,
    order: DevicePtr,
    places: DevicePtr,
    tiles: DevicePtr,
    tile_count: DevicePtr,
    counts: DevicePtr,
    pairs: u32,
    experts: u32,
    tile_rows: u32,
    padding: u32,
}

#[repr(C)]
struct ExpertTask {
    x: DevicePtr,
    w: DevicePtr,
    out: DevicePtr,
    bias: DevicePtr,
    order: DevicePtr,
    tiles: DevicePtr,
    tile_count: DevicePtr,
    per_token: u32,
    n: u32,
    k: u32,
    tile_slots: u32,
    activation: u32,
    alpha: f32,
    limit: f32,
    aligned: u32,
}

#[repr(C)]
struct SumTask {
    x: DevicePtr,
    chosen: DevicePtr,
    places: DevicePtr,
    weights: DevicePtr,
    hidden: DevicePtr,
    k: u32,
    width: u32,
}

#[repr(C)]
struct ExpertParams {
    tiles: DevicePtr,
    tile_count: DevicePtr,
    bias: DevicePtr,
    out: DevicePtr,
    n: u32,
    k_steps: u32,
    activation: u32,
    alpha: f32,
    limit: f32,
    padding: u32,
}

/// A product on Hopper.
struct HopperTask {
    function: Function,
    tiles: ExpertTiles,
    n: usize,
    k: usize,
    activation: u32,
    alpha: f32,
    limit: f32,
}

/// Which product of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertProduct {
    /// Rows of tokens, `[tokens][hidden]`, times `[experts][2 * inter][hidden]`, and the activation: `[pairs][inter]`.
    GateUp,
    /// `[pairs][inter]` times `[experts][hidden][inter]`: `[pairs][hidden]`.
    Down,
}

/// Operands of one of the experts' products.
#[derive(Clone, Copy, Debug)]
pub struct ExpertArgs {
    /// Which.
    pub product: ExpertProduct,
    /// Input rows.
    pub x: DevicePtr,
    /// Weights of all experts.
    pub w: DevicePtr,
    /// f32, of all experts; 0 where there are none.
    pub bias: DevicePtr,
    /// Output rows.
    pub out: DevicePtr,
    /// Room for the rows of all pairs, `[pairs][hidden]`, which [`ExpertProduct::GateUp`] may use.
    pub gathered: DevicePtr,
    /// Tokens of the step.
    pub tokens: usize,
}

impl MoeOps {
    /// Find the kernels and make room for steps of up to `max_tokens` tokens.
    pub fn new(gpu: &Gpu, precision: Precision, shape: MoeShape, max_tokens: usize) -> Result<MoeOps, CudaError> {
        let find = |name| gpu.function("moe.cu", name);
        let mut experts = match precision {
            Precision::F32 => vec![(ExpertTiles::PLAIN, gpu.function("moe_gemm.cu", "moe_experts_32x64_f32")?)],
            Precision::F16 | Precision::Bf16 => {
                let [f16, bf16] = [
                    [
                        "moe_experts_16x64_f16",
                        "moe_experts_32x64_f16",
                        "moe_experts_64x128_f16",
                        "moe_experts_128x128_f16",
                    ],
                    [
                        "moe_experts_16x64_bf16",
                        "moe_experts_32x64_bf16",
                        "moe_experts_64x128_bf16",
                        "moe_experts_128x128_bf16",
                    ],
                ];
                let names = if precision == Precision::F16 { f16 } else { bf16 };
                let found: Result<Vec<_>, CudaError> = ExpertTiles::TENSOR
                    .iter()
                    .zip(names)
                    .map(|(tiles, name)| Ok((*tiles, gpu.function("moe_gemm.cu", name)?)))
                    .collect();
                found?
            }
        };
        // The copy engine wants rows that begin at multiples of 16 bytes, and the epilogue writes so many at once.
        let whole = shape.hidden.is_multiple_of(8) && shape.inter.is_multiple_of(8);
        if precision != Precision::F32 && whole {
            let name = if precision == Precision::F16 { "moe_pairs_f16" } else { "moe_pairs_bf16" };
            experts.push((ExpertTiles::PAIRS, gpu.function("moe_gemm.cu", name)?));
        }
        if gpu.arch().number() >= 90 && whole {
            let found = match precision {
                Precision::F32 => None,
                Precision::F16 => {
                    Some(("moe_sm90_f16.cu", ["moe_experts_sm90_64x256_f16", "moe_experts_sm90_128x256_f16"]))
                }
                Precision::Bf16 => {
                    Some(("moe_sm90_bf16.cu", ["moe_experts_sm90_64x256_bf16", "moe_experts_sm90_128x256_bf16"]))
                }
            };
            if let Some((file, names)) = found {
                for (tiles, name) in ExpertTiles::HOPPER.into_iter().zip(names) {
                    experts.push((tiles, gpu.function(file, name)?));
                }
            }
        }
        let pairs = max_tokens * shape.per_token;
        if pairs >= 1 << 28 {
            return Err(CudaError::Unsupported(format!(
                "{max_tokens} tokens of {} experts each are more pairs than the GPU's kernels can number",
                shape.per_token
            )));
        }
        let most_tiles = experts.iter().map(|(tiles, _)| tiles.most(pairs, shape.experts)).max().unwrap_or(0);
        let words = |count: usize, what: &str| DeviceBuffer::new(count * 4, what);
        Ok(MoeOps {
            route: find("moe_route")?,
            plan: find("moe_plan")?,
            route_and_plan: find("moe_route_and_plan")?,
            sum: match shape.hidden.is_multiple_of(SUM_GROUP) {
                true => typed_function!(gpu, precision, "moe.cu", "moe_sum")?,
                false => typed_function!(gpu, precision, "moe.cu", "moe_sum_any")?,
            },
            gather: find("moe_gather")?,
            copy_counts: find("moe_copy_counts")?,
            maps: TensorMaps::default(),
            experts,
            chosen: words(pairs, "experts of tokens")?,
            weights: words(pairs, "weights of experts")?,
            order: words(pairs, "tokens sorted by expert")?,
            places: words(pairs, "places of tokens")?,
            tiles: words(TILE_WORDS * most_tiles, "tiles of experts")?,
            tile_count: words(2, "tiles of experts")?,
            planned: None,
            max_tokens,
            shape,
            precision,
        })
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let own = [&self.chosen, &self.weights, &self.order, &self.places, &self.tiles, &self.tile_count];
        let planned = self.planned.as_ref().map_or(0, |(table, switch)| table.bytes() + switch.bytes());
        (own.iter().map(|buffer| buffer.bytes()).sum::<usize>() + planned) as u64
    }

    /// Keep balanced logits, `[tokens][experts]` for as many tokens as a step can have, and use them from now on instead of
    /// the router's. What was captured before does not know of them.
    pub fn set_planned(&mut self, logits: &[f32]) -> Result<(), CudaError> {
        if logits.len() != self.max_tokens * self.shape.experts {
            return Err(CudaError::Unsupported(format!(
                "a plan of {} logits for {} tokens and {} experts",
                logits.len(),
                self.max_tokens,
                self.shape.experts
            )));
        }
        let (table, switch) =
            (DeviceBuffer::new(size_of_val(logits), "balanced logits")?, DeviceBuffer::new(4, "balanced logits")?);
        table.write(0, logits)?;
        switch.write(0, &[1u32])?;
        self.planned = Some((table, switch));
        Ok(())
    }

    /// Use balanced logits, where there are any, or the router's own. No step may be on its way.
    pub fn use_planned(&self, on: bool) -> Result<(), CudaError> {
        match &self.planned {
            Some((_, switch)) => switch.write(0, &[u32::from(on)]),
            None => Ok(()),
        }
    }

    /// Every tile shape there is for the precision, in order.
    pub fn tile_shapes(&self) -> impl Iterator<Item = ExpertTiles> + '_ {
        self.experts.iter().map(|(tiles, _)| *tiles)
    }

    /// The tiles that a step of so many tokens is cut into.
    pub fn tiles_for(&self, tokens: usize) -> ExpertTiles {
        let pairs = tokens * self.shape.per_token;
        let has = |wanted: ExpertTiles| self.experts.iter().any(|(tiles, _)| *tiles == wanted);
        if pairs * 3 <= self.shape.experts && has(ExpertTiles::PAIRS) {
            return ExpertTiles::PAIRS;
        }
        let average = pairs.div_ceil(self.shape.experts);
        let choices = match self.precision {
            Precision::F32 => return ExpertTiles::PLAIN,
            _ if has(ExpertTiles::HOPPER[0]) => &HOPPER_ROWS[..],
            _ => &ANY_ROWS[..],
        };
        choices.iter().find(|(most, _)| average <= *most).map_or(ExpertTiles::TENSOR[0], |(_, tiles)| *tiles)
    }

    /// Choose experts and sort the pairs of token and expert by expert, for products in `tiles`.
    pub fn route(&self, gpu: &Gpu, args: &RouteArgs, tiles: ExpertTiles) -> Result<(), CudaError> {
        let MoeShape { experts, per_token, .. } = self.shape;
        if args.tokens == 0 {
            return Ok(());
        }
        self.check_tokens(args.tokens)?;
        let (method, groups, topk_groups, scale, renormalise) = match self.shape.routing {
            ExpertRouting::SoftmaxTopK => (0, 1, 1, 1.0, false),
            ExpertRouting::TopKSoftmax => (1, 1, 1, 1.0, false),
            ExpertRouting::DeepSeekV3 { groups, topk_groups, scale, renormalise } => {
                (2, groups, topk_groups, scale, renormalise)
            }
        };
        let (planned, use_planned) = self.planned.as_ref().map_or((0, 0), |(table, on)| (table.ptr(), on.ptr()));
        let route = RouteTask {
            logits: args.logits,
            planned,
            use_planned,
            bias: args.bias,
            slots: args.slots,
            chosen: self.chosen.ptr(),
            weights: self.weights.ptr(),
            tokens: args.tokens as u32,
            experts: experts as u32,
            k: per_token as u32,
            method,
            groups: groups as u32,
            topk_groups: topk_groups as u32,
            renormalise: u32::from(renormalise),
            scale,
        };
        let pairs = args.tokens * per_token;
        let plan = PlanTask {
            chosen: self.chosen.ptr(),
            order: self.order.ptr(),
            places: self.places.ptr(),
            tiles: self.tiles.ptr(),
            tile_count: self.tile_count.ptr(),
            counts: args.counts,
            pairs: pairs as u32,
            experts: experts as u32,
            tile_rows: tiles.rows as u32,
            padding: 0,
        };
        let warps = args.tokens.max(pairs.div_ceil(32)).min(32);
        let shared = (warps + 1) * experts * 4;
        if pairs <= FEW_PAIRS && args.tokens <= FEW_TOKENS && shared <= MOST_SHARED {
            let launch = Launch::grid(1, 32 * warps as u32).shared(shared).overlapping();
            return gpu.launch(self.route_and_plan, launch, kernel_args![route, plan]);
        }
        let warps = ROUTE_WARPS.min(args.tokens);
        let launch = Launch::grid(args.tokens.div_ceil(warps), 32 * warps as u32);
        gpu.launch(self.route, launch.shared(warps * experts * 4).overlapping(), kernel_args![route])?;
        let threads = pairs.next_multiple_of(32).clamp(64, 1024) as u32;
        gpu.launch(self.plan, Launch::grid(experts, threads).shared(experts * 4).overlapping(), kernel_args![plan])
    }

    /// One of the experts' products, after [`MoeOps::route`] with the same tokens and tiles.
    pub fn experts(&self, gpu: &Gpu, args: &ExpertArgs, tiles: ExpertTiles) -> Result<(), CudaError> {
        let MoeShape { experts, per_token, hidden, inter, activation, .. } = self.shape;
        if args.tokens == 0 {
            return Ok(());
        }
        self.check_tokens(args.tokens)?;
        let Some((_, function)) = self.experts.iter().find(|(shape, _)| *shape == tiles) else {
            return Err(CudaError::Unsupported(format!("{tiles:?} of {:?}", self.precision)));
        };
        let gate_up = args.product == ExpertProduct::GateUp;
        let (n, k) = if gate_up { (2 * inter, hidden) } else { (hidden, inter) };
        let (activation, alpha, limit) = match activation {
            _ if !gate_up => (0, 0.0, 0.0),
            ExpertActivation::Silu => (1, 0.0, 0.0),
            ExpertActivation::Clamped { alpha, limit } => (2, alpha, limit),
        };
        if tiles.hopper {
            let task = HopperTask { function: *function, tiles, n, k, activation, alpha, limit };
            return self.hopper_experts(gpu, args, task);
        }
        let aligned =
            (k * self.precision.bytes()).is_multiple_of(16) && args.x.is_multiple_of(16) && args.w.is_multiple_of(16);
        let slots = tiles.most(args.tokens * per_token, experts);
        let task = ExpertTask {
            x: args.x,
            w: args.w,
            out: args.out,
            bias: args.bias,
            order: if gate_up { self.order.ptr() } else { 0 },
            tiles: self.tiles.ptr(),
            tile_count: self.tile_count.ptr(),
            per_token: per_token as u32,
            n: n as u32,
            k: k as u32,
            tile_slots: slots as u32,
            activation,
            alpha,
            limit,
            aligned: u32::from(aligned),
        };
        if tiles == ExpertTiles::PAIRS {
            let (chosen, places) = (self.chosen.ptr(), self.places.ptr());
            // Four rows of w for each of four warps.
            let launch = Launch { grid: (n.div_ceil(tiles.columns) as u32, slots as u32, 1), ..Launch::grid(1, 128) };
            return gpu.launch(*function, launch.overlapping(), kernel_args![task, chosen, places]);
        }
        let blocks = slots * n.div_ceil(tiles.columns);
        if blocks >= 1 << 31 {
            return Err(CudaError::Unsupported(format!("{blocks} blocks for the GEMMs of {experts} experts")));
        }
        let launch = Launch::grid(blocks, tiles.threads).shared(tiles.shared_bytes()).overlapping();
        gpu.launch(*function, launch, kernel_args![task])
    }

    fn hopper_experts(&self, gpu: &Gpu, args: &ExpertArgs, task: HopperTask) -> Result<(), CudaError> {
        let HopperTask { function, tiles, n, k, activation, alpha, limit } = task;
        let MoeShape { experts, per_token, .. } = self.shape;
        let pairs = args.tokens * per_token;
        let x = match args.product {
            ExpertProduct::Down => args.x,
            ExpertProduct::GateUp => {
                let parts = (k * self.precision.bytes() / 16) as u32;
                let (order, count, per_token) = (self.order.ptr(), self.tile_count.ptr(), per_token as u32);
                let list = kernel_args![args.x, args.gathered, order, count, per_token, parts];
                let threads = parts.next_multiple_of(32).clamp(32, 256);
                gpu.launch(self.gather, Launch::grid(pairs, threads).overlapping(), list)?;
                args.gathered
            }
        };
        let element = if self.precision == Precision::F16 { MapElement::F16 } else { MapElement::Bf16 };
        let rows = self.max_tokens * per_token;
        let x = MapKey { pointer: x, rows, columns: k, element, box_rows: tiles.rows as u32 };
        let w = MapKey { pointer: args.w, rows: experts * n, columns: k, element, box_rows: tiles.box_rows() };
        let (x, w) = (self.maps.get(x)?, self.maps.get(w)?);
        let params = ExpertParams {
            tiles: self.tiles.ptr(),
            tile_count: self.tile_count.ptr(),
            bias: args.bias,
            out: args.out,
            n: n as u32,
            k_steps: (k * self.precision.bytes()).div_ceil(128) as u32,
            activation,
            alpha,
            limit,
            padding: 0,
        };
        let blocks = tiles.most(pairs, experts) * n.div_ceil(tiles.columns);
        let launch = Launch::grid(blocks.min(gpu.info().multiprocessors as usize), tiles.threads);
        gpu.launch(function, launch.shared(tiles.shared_bytes()).overlapping(), kernel_args![x, w, params])
    }

    /// Add each token's sum of `weight * x[pair]` to the residual stream, the best expert first. `x` is what
    /// [`ExpertProduct::Down`] wrote.
    pub fn sum(&self, gpu: &Gpu, x: DevicePtr, hidden: DevicePtr, tokens: usize) -> Result<(), CudaError> {
        if tokens == 0 {
            return Ok(());
        }
        self.check_tokens(tokens)?;
        let width = self.shape.hidden;
        let task = SumTask {
            x,
            chosen: self.chosen.ptr(),
            places: self.places.ptr(),
            weights: self.weights.ptr(),
            hidden,
            k: self.shape.per_token as u32,
            width: width as u32,
        };
        let groups = if width.is_multiple_of(SUM_GROUP) { width / SUM_GROUP } else { width };
        let threads = groups.next_multiple_of(32).clamp(32, 256);
        let parts = groups.div_ceil(threads);
        let grid = Launch { grid: (tokens as u32, parts as u32, 1), ..Launch::grid(1, threads as u32) };
        gpu.launch(self.sum, grid.overlapping(), kernel_args![task])
    }

    /// Write `count` counts into page-locked memory of the host.
    pub fn copy_counts(&self, gpu: &Gpu, counts: DevicePtr, host: &[u32], count: usize) -> Result<(), CudaError> {
        let (to, words) = (host.as_ptr() as DevicePtr, count.min(host.len()) as u32);
        if words == 0 {
            return Ok(());
        }
        let launch = Launch::grid(count.div_ceil(128), 128).overlapping();
        gpu.launch(self.copy_counts, launch, kernel_args![counts, to, words])
    }

    /// What was chosen: experts and weights of each token, and the place of each pair. For tests.
    pub fn chosen(&self, gpu: &Gpu, tokens: usize) -> Result<Chosen, CudaError> {
        gpu.synchronize()?;
        let pairs = tokens * self.shape.per_token;
        let mut found = Chosen { experts: vec![0; pairs], weights: vec![0.0; pairs], places: vec![0; pairs] };
        self.chosen.read(0, &mut found.experts)?;
        self.weights.read(0, &mut found.weights)?;
        self.places.read(0, &mut found.places)?;
        Ok(found)
    }

    fn check_tokens(&self, tokens: usize) -> Result<(), CudaError> {
        match tokens <= self.max_tokens {
            true => Ok(()),
            false => Err(CudaError::Unsupported(format!("{tokens} tokens for {} there is room for", self.max_tokens))),
        }
    }
}

/// See [`MoeOps::chosen`].
#[derive(Clone, Debug)]
pub struct Chosen {
    /// `[tokens][k]`; the largest number in rows of padding.
    pub experts: Vec<u32>,
    /// `[tokens][k]`.
    pub weights: Vec<f32>,
    /// `[tokens][k]`; nothing in rows of padding.
    pub places: Vec<u32>,
}

/// Tokens that a block routes.
const ROUTE_WARPS: usize = 4;
/// Pairs that one block sorts (the kernel knows it too), tokens that it routes, and the most memory it may take for that.
/// Beyond, two launches are faster than one.
const FEW_PAIRS: usize = 64;
const FEW_TOKENS: usize = 16;
const MOST_SHARED: usize = 64 << 10;
/// Elements of a row that a thread sums, where rows have whole groups of them.
const SUM_GROUP: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_the_tiles_of_any_load() {
        let shapes = ExpertTiles::TENSOR.iter().chain(&ExpertTiles::HOPPER).chain([&ExpertTiles::PAIRS]);
        for tiles in shapes {
            for (pairs, experts) in [(1, 8), (7, 8), (8, 8), (100, 8), (1000, 3), (129, 128), (5000, 1)] {
                let of = |loads: &[usize]| loads.iter().map(|load| load.div_ceil(tiles.rows)).sum::<usize>();
                let most = tiles.most(pairs, experts);
                let mut skewed = vec![1; experts.min(pairs)];
                skewed[0] = pairs - (skewed.len() - 1);
                let even: Vec<usize> = (0..experts).map(|e| (pairs + e) / experts).collect();
                for loads in [&skewed, &even] {
                    assert_eq!(loads.iter().sum::<usize>(), pairs);
                    assert!(of(loads) <= most, "{tiles:?}: {loads:?} make {} tiles, room for {most}", of(loads));
                }
                // Not much more than can happen.
                assert!(most <= pairs.div_ceil(tiles.rows) + experts.min(pairs), "{tiles:?} {pairs} {experts}");
            }
        }
    }

    #[test]
    fn shared_memory_fits_every_architecture() {
        // The least of all is 99 KiB for a block of compute capability 8.6 and 8.9; Hopper has 227.
        assert!(ExpertTiles::TENSOR.iter().all(|tiles| tiles.shared_bytes() <= 99 << 10));
        assert!(ExpertTiles::HOPPER.iter().all(|tiles| tiles.shared_bytes() <= 227 << 10));
    }
}
