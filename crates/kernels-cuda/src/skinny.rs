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
/// Weight rows and bytes of each in a piece of work.
const GROUP_ROWS: usize = 16;
const PIECE_BYTES: usize = 256;
/// Most rows of x.
const MAX_M: usize = 16;
/// Up to so many bytes, a plain x that does not fit into registers is kept in shared memory.
const KEPT_X_BYTES: usize = 16 << 10;
/// Numbers of slots that the kernels know how to wait for.
const SLOTS: [usize; 5] = [1, 2, 3, 4, 6];

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

/// How the kernels fetch. The defaults are meant for every shape; a benchmark may try others.
#[derive(Clone, Copy, Debug)]
pub struct SkinnyTuning {
    /// Pieces of work (4 KiB) that each warp has on their way.
    pub slots: usize,
    /// Bytes of its own weights that a block fetches into L2 while the kernel in front still runs.
    pub ahead: usize,
    /// Groups of 16 weight rows of a block, where there are several blocks' worth for every multiprocessor; 0 gives each
    /// multiprocessor one block with an equal share.
    pub groups: usize,
    /// Launches may begin before the one in front has ended.
    pub overlap: bool,
}

impl Default for SkinnyTuning {
    fn default() -> SkinnyTuning {
        // With three slots two successive kernels share a multiprocessor, which is faster in a row of products and slower
        // in whole steps, where attention is between them.
        SkinnyTuning { slots: 4, ahead: 0, groups: 0, overlap: true }
    }
}

/// What the kernels take, in the layout of the kernel file. Arguments have no hidden padding: what is launched is the same
/// bytes every time.
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
    sums_at: u32,
    sums: u32,
    ring_at: u32,
    slots: u32,
    ahead: u32,
    padding: u32,
}

/// Where the kernel has its slices of x.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Registers,
    /// More of them.
    ManyRegisters,
    Shared,
}

/// Shape of one launch.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plan {
    blocks: usize,
    slots: usize,
    x_at: usize,
    sums_at: usize,
    sums: usize,
    ring_at: usize,
    place: Place,
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
}

impl Shape {
    fn units(self) -> usize {
        if self.silu { self.n / 2 } else { self.n }
    }

    fn fits(self) -> bool {
        let multiple = if self.width == 1 { 16 } else { 8 };
        let (n, k) = (self.n, self.k);
        (1..=MAX_M).contains(&self.m) && n > 0 && n.is_multiple_of(8) && k > 0 && k.is_multiple_of(multiple)
    }

    fn plan(self, limits: Limits, tuning: SkinnyTuning) -> Option<Plan> {
        if !self.fits() {
            return None;
        }
        let group = if self.silu { GROUP_ROWS / 2 } else { GROUP_ROWS };
        let all_groups = self.units().div_ceil(group);
        let blocks = match all_groups.checked_div(tuning.groups) {
            Some(blocks) if blocks >= 4 * limits.multiprocessors => all_groups.div_ceil(tuning.groups),
            _ => limits.multiprocessors.min(self.units()),
        };
        let pieces = (self.k * self.width).div_ceil(PIECE_BYTES);
        let pieces_of_warp = pieces.div_ceil(WARPS);
        let x_bytes = align(self.m * pieces * (PIECE_BYTES / self.width * 2));
        let place = match pieces_of_warp {
            few if few <= self.width => Place::Registers,
            some if some <= 2 * self.width && self.m <= 8 => Place::ManyRegisters,
            _ if self.norm || x_bytes <= KEPT_X_BYTES => Place::Shared,
            _ if self.m <= 8 => Place::ManyRegisters,
            _ => Place::Registers,
        };
        let tokens = self.m.div_ceil(8) * 8;
        let groups = self.units().div_ceil(blocks).div_ceil(group);
        let sums = if groups > 1 && self.m <= 8 { 2 } else { 1 };
        let sums_at = align(tokens * WARPS * 4 + if self.norm { self.k * 4 } else { 0 });
        let x_at = align(sums_at + sums * WARPS * self.m * 20 * 4);
        let ring_at = x_at + if place == Place::Shared { x_bytes } else { 0 };
        let work = pieces_of_warp * groups;
        let shared = |slots: usize| ring_at + WARPS * slots * GROUP_ROWS * PIECE_BYTES;
        let wanted = |slots: &usize| *slots <= tuning.slots.min(work) && shared(*slots) <= limits.shared;
        let slots = SLOTS.into_iter().rev().find(wanted)?;
        Some(Plan { blocks, slots, x_at, sums_at, sums, ring_at, place, shared: shared(slots) })
    }
}

fn align(bytes: usize) -> usize {
    bytes.next_multiple_of(128)
}

/// Functions of one pair of activation and weight types.
struct Family {
    to_8: Function,
    to_8_deep: Function,
    to_8_kept: Function,
    to_16: Function,
    to_16_kept: Function,
}

impl Family {
    fn choose(&self, m: usize, place: Place) -> Function {
        match (m <= 8, place) {
            (true, Place::Registers) => self.to_8,
            (true, Place::ManyRegisters) => self.to_8_deep,
            (true, Place::Shared) => self.to_8_kept,
            (false, Place::Shared) => self.to_16_kept,
            (false, _) => self.to_16,
        }
    }
}

macro_rules! family {
    ($gpu:expr, $file:expr, $suffix:literal) => {
        Family {
            to_8: $gpu.function($file, concat!("skinny8_", $suffix))?,
            to_8_deep: $gpu.function($file, concat!("skinny8_deep_", $suffix))?,
            to_8_kept: $gpu.function($file, concat!("skinny8_kept_", $suffix))?,
            to_16: $gpu.function($file, concat!("skinny16_", $suffix))?,
            to_16_kept: $gpu.function($file, concat!("skinny16_kept_", $suffix))?,
        }
    };
}

/// The kernels.
pub struct Skinny {
    bf16: Family,
    f16: Family,
    fp8_bf16: Family,
    fp8_f16: Family,
    f32: Function,
    limits: Limits,
    /// How the kernels fetch.
    pub tuning: SkinnyTuning,
}

impl Skinny {
    /// Find the kernels.
    pub fn new(gpu: &Gpu) -> Result<Skinny, CudaError> {
        Ok(Skinny {
            bf16: family!(gpu, BF16_FILE, "bf16"),
            f16: family!(gpu, F16_FILE, "f16"),
            fp8_bf16: family!(gpu, BF16_FILE, "fp8_bf16"),
            fp8_f16: family!(gpu, F16_FILE, "fp8_f16"),
            f32: gpu.function(BF16_FILE, "skinny_f32")?,
            limits: Limits {
                multiprocessors: gpu.info().multiprocessors as usize,
                shared: gpu.info().shared_bytes_per_block as usize,
            },
            tuning: SkinnyTuning::default(),
        })
    }

    /// Most rows of x.
    pub fn max_m(&self) -> usize {
        MAX_M
    }

    /// Whether [`Skinny::run`] takes it.
    pub fn supports(&self, args: &SkinnyArgs, precision: Precision) -> bool {
        match precision {
            Precision::F32 => args.w_scales.is_none() && shape(args, 4).fits(),
            _ => shape(args, if args.w_scales.is_some() { 1 } else { 2 }).plan(self.limits, self.tuning).is_some(),
        }
    }

    /// Launch it.
    pub fn run(&self, gpu: &Gpu, args: &SkinnyArgs, precision: Precision) -> Result<(), CudaError> {
        let unsupported = || {
            CudaError::Unsupported(format!(
                "the skinny GEMM can't do {} rows with {} x {} weights of {}{}",
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
        let arguments = Arguments {
            x_at: plan.x_at as u32,
            sums_at: plan.sums_at as u32,
            sums: plan.sums as u32,
            ring_at: plan.ring_at as u32,
            slots: plan.slots as u32,
            ahead: self.tuning.ahead as u32,
            ..arguments(args)
        };
        let launch = Launch::grid(plan.blocks, THREADS).shared(plan.shared);
        self.launch(gpu, family.choose(args.m, plan.place), launch, arguments)
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
        sums_at: 0,
        sums: 0,
        ring_at: 0,
        slots: 0,
        ahead: 0,
        padding: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Limits = Limits { multiprocessors: 132, shared: 232_448 };
    const SM86: Limits = Limits { multiprocessors: 84, shared: 101_376 };

    fn shape(m: usize, n: usize, k: usize) -> Shape {
        Shape { m, n, k, norm: false, silu: false, width: 2 }
    }

    fn planned(shape: Shape) -> Plan {
        shape.plan(H200, SkinnyTuning::default()).unwrap()
    }

    #[test]
    fn with_three_slots_successive_kernels_fit_on_a_multiprocessor() {
        let tuning = SkinnyTuning { slots: 3, ..SkinnyTuning::default() };
        let planned = |shape: Shape| shape.plan(H200, tuning).unwrap();
        for m in 1..=MAX_M {
            let qkv = planned(Shape { norm: true, ..shape(m, 2560, 2048) });
            let o = planned(shape(m, 2048, 2048));
            let gate_up = planned(Shape { norm: true, silu: true, ..shape(m, 11264, 2048) });
            let down = planned(shape(m, 2048, 5632));
            for (a, b) in [(&qkv, &o), (&o, &gate_up), (&gate_up, &down), (&down, &qkv)] {
                assert_eq!(a.blocks, 132);
                assert!(a.shared + b.shared + 2048 <= 228 << 10, "{m} rows: {a:?} {b:?}");
            }
        }
    }

    #[test]
    fn x_is_where_it_fits() {
        let place = |m, k, norm| planned(Shape { norm, ..shape(m, 4096, k) }).place;
        assert_eq!((place(16, 2048, true), place(8, 4096, true)), (Place::Registers, Place::ManyRegisters));
        assert_eq!((place(16, 4096, true), place(1, 5632, false)), (Place::Shared, Place::Shared));
        assert_eq!((place(8, 5632, false), place(16, 5632, false)), (Place::ManyRegisters, Place::Registers));
    }

    #[test]
    fn many_blocks_share_what_is_large() {
        let tuning = SkinnyTuning { groups: 2, ..SkinnyTuning::default() };
        let blocks = |n| shape(1, n, 2048).plan(H200, tuning).unwrap().blocks;
        assert_eq!((blocks(32000), blocks(2048)), (1000, 132));
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
                        assert!(plan.shared <= limits.shared && plan.blocks > 0, "{shape:?} {plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn odd_sizes_are_refused() {
        let refused = |shape: Shape| shape.plan(H200, SkinnyTuning::default()).is_none();
        assert!(refused(shape(17, 64, 64)) && refused(shape(0, 64, 64)));
        assert!(refused(shape(1, 60, 64)) && refused(shape(1, 64, 60)));
        assert!(refused(Shape { width: 1, ..shape(1, 64, 24) }));
    }
}
