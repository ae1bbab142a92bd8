//! Ops that work on rows: embedding, norms, rotation with the cache write, activation, quantization.

use std::ffi::c_void;

use crate::dtype::{KvDtype, Precision};
use crate::error::CudaError;
use crate::gpu::{Gpu, Launch};
use crate::kernel_args;
use crate::memory::{DevicePtr, PinnedBuffer};
use crate::module::Function;

/// The kernel `name_<precision>` of a file; the name may come in several pieces.
macro_rules! typed_function {
    ($gpu:expr, $precision:expr, $file:literal, $($name:literal),+) => {
        $gpu.function(
            $file,
            match $precision {
                $crate::dtype::Precision::F32 => concat!($($name,)+ "_f32"),
                $crate::dtype::Precision::F16 => concat!($($name,)+ "_f16"),
                $crate::dtype::Precision::Bf16 => concat!($($name,)+ "_bf16"),
            },
        )
    };
}

pub(crate) use typed_function;

/// Elements that a thread takes at a time.
const GROUP: usize = 8;

const WARP: usize = 32;
/// Groups that a thread takes where a row has one or two warps.
const TEAM_GROUPS: usize = 8;
/// Most warps of a block of such rows.
const TEAM_WARPS: usize = 8;
/// Threads of a block that works on elements rather than rows.
const THREADS: usize = 256;
/// Threads of a block that copies inputs: few, so that many multiprocessors ask the host.
const COPY_THREADS: usize = 128;
/// Words that each of them copies.
const COPY_GROUP: usize = 4;

/// An op's kernels for rows of different widths.
#[derive(Clone, Copy)]
pub(crate) struct RowKernels {
    /// Eight elements per thread, up to 512 threads.
    pub(crate) plain: Function,
    /// Up to four times eight per thread, up to 1024 threads.
    pub(crate) wide: Function,
    /// Any width.
    pub(crate) any: Function,
}

/// Which of [`RowKernels`] a width takes, and with how many threads.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RowShape {
    Plain(u32),
    Wide(u32),
    Any(u32),
}

impl RowShape {
    fn of(width: usize) -> RowShape {
        let groups = width / GROUP;
        let threads = |n: usize| n.next_multiple_of(32).max(32) as u32;
        match groups {
            _ if !width.is_multiple_of(GROUP) || groups > 4096 => RowShape::Any(threads(width.min(1024))),
            0..=512 => RowShape::Plain(threads(groups)),
            _ => RowShape::Wide(threads(groups.div_ceil(4))),
        }
    }
}

impl RowKernels {
    /// # Safety
    /// As for [`Gpu::launch`].
    pub(crate) unsafe fn launch(
        &self,
        gpu: &Gpu,
        rows: usize,
        width: usize,
        args: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let (function, threads) = match RowShape::of(width) {
            RowShape::Plain(threads) => (self.plain, threads),
            RowShape::Wide(threads) => (self.wide, threads),
            RowShape::Any(threads) => (self.any, threads),
        };
        // SAFETY: the caller's promise.
        unsafe { launch(gpu, function, rows, threads, args) }
    }
}

/// Nothing is launched for no blocks.
///
/// # Safety
/// As for [`Gpu::launch`].
unsafe fn launch(
    gpu: &Gpu,
    function: Function,
    blocks: usize,
    threads: u32,
    args: &mut [*mut c_void],
) -> Result<(), CudaError> {
    if blocks == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { gpu.launch(function, Launch::grid(blocks, threads).overlapping(), args) }
}

/// The three kernels of a row op.
macro_rules! row_kernels {
    ($gpu:expr, $precision:expr, $name:literal) => {
        $crate::rows::RowKernels {
            plain: typed_function!($gpu, $precision, "rows.cu", $name)?,
            wide: typed_function!($gpu, $precision, "rows.cu", $name, "_wide")?,
            any: typed_function!($gpu, $precision, "rows.cu", $name, "_any")?,
        }
    };
}

pub(crate) use row_kernels;

/// A norm's kernels.
struct NormKernels {
    /// A block for each row.
    each: RowKernels,
    /// A warp for each of many rows.
    in_warps: Function,
    /// Two warps for each.
    in_pairs: Function,
}

macro_rules! norm_kernels {
    ($gpu:expr, $precision:expr, $name:literal) => {
        NormKernels {
            each: row_kernels!($gpu, $precision, $name),
            in_warps: typed_function!($gpu, $precision, "rows.cu", $name, "_in_warps")?,
            in_pairs: typed_function!($gpu, $precision, "rows.cu", $name, "_in_pairs")?,
        }
    };
}

/// Tokens to rows of the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct EmbedArgs {
    /// Token of each row (u32).
    pub tokens: DevicePtr,
    /// For each row, the place in `last_tokens` to take its token from instead, or a negative number (i32).
    pub from_sampled: DevicePtr,
    /// Tokens that the step before has drawn (u32).
    pub last_tokens: DevicePtr,
    /// Embedding table, `[vocab][width]`.
    pub table: DevicePtr,
    /// Out: f32, `[rows][width]`.
    pub hidden: DevicePtr,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

/// A norm of rows.
#[derive(Clone, Copy, Debug)]
pub struct NormArgs {
    /// The residual stream, f32, `[rows][width]`.
    pub hidden: DevicePtr,
    /// Added to it first, in the activations' type.
    pub delta: Option<DevicePtr>,
    /// f32, `[width]`.
    pub weight: DevicePtr,
    /// Added to the mean of squares.
    pub eps: f32,
    /// In the activations' type, or e4m3 codes where there are scales.
    pub out: DevicePtr,
    /// Out: f32, one per row: a value is its code times it.
    pub scales: Option<DevicePtr>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

/// Rotation of q and k, and the write of k and v into the cache.
#[derive(Clone, Copy, Debug)]
pub struct RopeArgs {
    /// Rows of q heads, k heads, v heads; q and k are turned in place.
    pub qkv: DevicePtr,
    /// Cosines, f32, `[position][head_dim / 2]`.
    pub cos: DevicePtr,
    /// Sines, the same.
    pub sin: DevicePtr,
    /// Position of each row (i32).
    pub positions: DevicePtr,
    /// Block of each row times `tokens_per_block`, plus its place there (i32); negative writes nothing.
    pub slots: DevicePtr,
    /// The layer's cache.
    pub kv: DevicePtr,
    /// Rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Tokens of a block; a power of two.
    pub tokens_per_block: usize,
    /// Type of the cache.
    pub kv_dtype: KvDtype,
}

/// The row ops of one precision.
pub struct RowOps {
    embed: Function,
    embed_any: Function,
    rms_norm: NormKernels,
    add_rms_norm: NormKernels,
    rms_norm_fp8: NormKernels,
    add_rms_norm_fp8: NormKernels,
    silu_mul_fp8: RowKernels,
    quantize_rows: RowKernels,
    silu_mul: Function,
    silu_mul_any: Function,
    copy_inputs: Function,
    gather_rows: Function,
    add_bias: Function,
    qk_norm: Function,
    qk_norm_any: Function,
    /// By the elements that a thread takes: 8, 4, 1.
    rope_kv_write: [Function; 3],
    rope_kv_write_fp8: [Function; 3],
}

impl RowOps {
    /// Find the kernels.
    pub fn new(gpu: &Gpu, precision: Precision) -> Result<RowOps, CudaError> {
        macro_rules! typed {
            ($name:literal) => {
                typed_function!(gpu, precision, "rows.cu", $name)?
            };
        }
        Ok(RowOps {
            embed: typed!("embed"),
            embed_any: typed!("embed_any"),
            rms_norm: norm_kernels!(gpu, precision, "rms_norm"),
            add_rms_norm: norm_kernels!(gpu, precision, "add_rms_norm"),
            rms_norm_fp8: norm_kernels!(gpu, precision, "rms_norm_fp8"),
            add_rms_norm_fp8: norm_kernels!(gpu, precision, "add_rms_norm_fp8"),
            silu_mul_fp8: row_kernels!(gpu, precision, "silu_mul_fp8"),
            quantize_rows: row_kernels!(gpu, precision, "quantize_rows"),
            silu_mul: typed!("silu_mul"),
            silu_mul_any: typed!("silu_mul_any"),
            copy_inputs: gpu.function("rows.cu", "copy_inputs")?,
            gather_rows: typed!("gather_rows"),
            add_bias: typed!("add_bias"),
            qk_norm: typed!("qk_norm"),
            qk_norm_any: typed!("qk_norm_any"),
            rope_kv_write: [typed!("rope_kv_write"), typed!("rope_kv_write_odd"), typed!("rope_kv_write_any")],
            rope_kv_write_fp8: [
                typed!("rope_kv_write_fp8"),
                typed!("rope_kv_write_fp8_odd"),
                typed!("rope_kv_write_fp8_any"),
            ],
        })
    }

    /// Rows of the table, as f32.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` name, tokens are in the table and places among the last ones.
    pub unsafe fn embed(&self, gpu: &Gpu, args: &EmbedArgs) -> Result<(), CudaError> {
        let width = args.width as u32;
        let grouped = args.width.is_multiple_of(GROUP);
        let function = if grouped { self.embed } else { self.embed_any };
        let threads = if grouped { args.width / GROUP } else { args.width }.next_multiple_of(32).clamp(32, THREADS);
        let keep = u32::from(gpu.keeps_residual(args.rows, args.width));
        let list = kernel_args![args.tokens, args.from_sampled, args.last_tokens, args.table, args.hidden, width, keep];
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { launch(gpu, function, args.rows, threads as u32, list) }
    }

    /// `out = hidden / rms(hidden) * weight` for each row, after `hidden += delta` where there is a delta.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` name.
    pub unsafe fn rms_norm(&self, gpu: &Gpu, args: &NormArgs) -> Result<(), CudaError> {
        let kernels = match (args.delta, args.scales) {
            (None, None) => &self.rms_norm,
            (Some(_), None) => &self.add_rms_norm,
            (None, Some(_)) => &self.rms_norm_fp8,
            (Some(_), Some(_)) => &self.add_rms_norm_fp8,
        };
        let (delta, scales) = (args.delta.unwrap_or(0), args.scales.unwrap_or(0));
        let (rows, columns) = (args.rows as u32, args.width as u32);
        let keep = u32::from(gpu.keeps_residual(args.rows, args.width));
        let list = kernel_args![args.hidden, delta, args.weight, args.eps, args.out, scales, rows, columns, keep];
        let multiprocessors = gpu.info().multiprocessors.max(1) as usize;
        let warps = args.width.div_ceil(WARP * TEAM_GROUPS * GROUP);
        let function = match warps {
            1 => kernels.in_warps,
            2 => kernels.in_pairs,
            // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
            _ => return unsafe { kernels.each.launch(gpu, args.rows, args.width, list) },
        };
        if args.rows < 2 * multiprocessors || !args.width.is_multiple_of(GROUP) {
            // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
            return unsafe { kernels.each.launch(gpu, args.rows, args.width, list) };
        }
        let per_block = args.rows.div_ceil(multiprocessors).min(TEAM_WARPS / warps);
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { launch(gpu, function, args.rows.div_ceil(per_block), (WARP * warps * per_block) as u32, list) }
    }

    /// `rms_norm` of each query head with `q_weight` and of each key head with `k_weight`, in place.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn qk_norm(
        &self,
        gpu: &Gpu,
        qkv: DevicePtr,
        q_weight: DevicePtr,
        k_weight: DevicePtr,
        eps: f32,
        rows: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Result<(), CudaError> {
        if head_dim > 256 {
            return Err(CudaError::Unsupported(format!(
                "heads of {head_dim} elements exceed what GPU norms support (256)"
            )));
        }
        let function = if head_dim.is_multiple_of(4) { self.qk_norm } else { self.qk_norm_any };
        let blocks = (rows * (heads + kv_heads)).div_ceil(THREADS / 32);
        let (n, q, kv, d) = (rows as u32, heads as u32, kv_heads as u32, head_dim as u32);
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe {
            launch(gpu, function, blocks, THREADS as u32, kernel_args![qkv, q_weight, k_weight, eps, n, q, kv, d])
        }
    }

    /// Turn q and k, write k and v.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that `args` name, positions are in the tables and slots in the cache.
    pub unsafe fn rope_kv_write(&self, gpu: &Gpu, args: &RopeArgs) -> Result<(), CudaError> {
        let half = args.head_dim / 2;
        let per_thread = [8, 4, 1].into_iter().find(|part| half.is_multiple_of(*part)).unwrap_or(1);
        let threads = args.rows * (args.heads + 2 * args.kv_heads) * (half / per_thread);
        let fits = args.head_dim.is_multiple_of(2) && args.tokens_per_block.is_power_of_two();
        if !fits || threads >= 1 << 31 {
            return Err(CudaError::Unsupported(format!(
                "the GPU can't rotate {} rows of {} + 2 * {} heads of {} elements into blocks of {} tokens",
                args.rows, args.heads, args.kv_heads, args.head_dim, args.tokens_per_block
            )));
        }
        let kernels = match args.kv_dtype {
            KvDtype::Same => &self.rope_kv_write,
            KvDtype::Fp8 => &self.rope_kv_write_fp8,
        };
        let [eight, four, one] = *kernels;
        let function = match per_thread {
            8 => eight,
            4 => four,
            _ => one,
        };
        let (rows, heads, kv_heads) = (args.rows as u32, args.heads as u32, args.kv_heads as u32);
        let (head_dim, shift) = (args.head_dim as u32, args.tokens_per_block.trailing_zeros());
        let list = kernel_args![
            args.qkv,
            args.cos,
            args.sin,
            args.positions,
            args.slots,
            args.kv,
            rows,
            heads,
            kv_heads,
            head_dim,
            shift
        ];
        // Small blocks spread a few rows over more multiprocessors.
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { launch(gpu, function, threads.div_ceil(128), 128, list) }
    }

    /// `act = silu(gate) * up` for rows `[gate | up]`, each `inter` wide.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    pub unsafe fn silu_mul(
        &self,
        gpu: &Gpu,
        gate_up: DevicePtr,
        act: DevicePtr,
        rows: usize,
        inter: usize,
    ) -> Result<(), CudaError> {
        let grouped = inter.is_multiple_of(GROUP);
        let (function, per_thread) = if grouped { (self.silu_mul, GROUP) } else { (self.silu_mul_any, 1) };
        let parts = inter.div_ceil(per_thread * THREADS);
        let (columns, row_parts) = (inter as u32, parts as u32);
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { launch(gpu, function, rows * parts, THREADS as u32, kernel_args![gate_up, act, columns, row_parts]) }
    }

    /// [`RowOps::silu_mul`] into e4m3 codes with one scale per row.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    pub unsafe fn silu_mul_fp8(
        &self,
        gpu: &Gpu,
        gate_up: DevicePtr,
        codes: DevicePtr,
        scales: DevicePtr,
        rows: usize,
        inter: usize,
    ) -> Result<(), CudaError> {
        let columns = inter as u32;
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { self.silu_mul_fp8.launch(gpu, rows, inter, kernel_args![gate_up, codes, scales, columns]) }
    }

    /// Rows into e4m3 codes with one scale per row.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    pub unsafe fn quantize_rows(
        &self,
        gpu: &Gpu,
        x: DevicePtr,
        codes: DevicePtr,
        scales: DevicePtr,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        let columns = width as u32;
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { self.quantize_rows.launch(gpu, rows, width, kernel_args![x, codes, scales, columns]) }
    }

    /// `out[i] = x[index[i]]` for `rows` indices (u32).
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name, and every index is a row of `x`.
    pub unsafe fn gather_rows(
        &self,
        gpu: &Gpu,
        x: DevicePtr,
        index: DevicePtr,
        out: DevicePtr,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        let (columns, threads) = (width as u32, (width / GROUP).next_multiple_of(32).clamp(32, THREADS) as u32);
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { launch(gpu, self.gather_rows, rows, threads, kernel_args![x, index, out, columns]) }
    }

    /// Copy the first `words` words of `from`, rounded up to whole groups of four: sooner there than with the copy engine, which
    /// begins when kernels have ended and ends before they begin.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: there are as many bytes at `to`, and nobody writes `from` before the kernel has run.
    pub unsafe fn copy_inputs(
        &self,
        gpu: &Gpu,
        from: &PinnedBuffer<u32>,
        words: usize,
        to: DevicePtr,
    ) -> Result<(), CudaError> {
        let groups = words.div_ceil(COPY_GROUP);
        if groups * COPY_GROUP > from.len() {
            return Err(CudaError::Unsupported(format!("copying {words} words out of {}", from.len())));
        }
        let (count, host) = (groups as u32, from.ptr());
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe {
            launch(
                gpu,
                self.copy_inputs,
                groups.div_ceil(COPY_THREADS),
                COPY_THREADS as u32,
                kernel_args![host, to, count],
            )
        }
    }

    /// `out += bias` (f32) for each row.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    pub unsafe fn add_bias(
        &self,
        gpu: &Gpu,
        out: DevicePtr,
        bias: DevicePtr,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        let parts = width.div_ceil(THREADS);
        let (columns, row_parts) = (width as u32, parts as u32);
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { launch(gpu, self.add_bias, rows * parts, THREADS as u32, kernel_args![out, bias, columns, row_parts]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_is_covered_by_whole_warps() {
        for width in (1..5000).chain([8191, 8192, 14336, 28672, 32760, 32768, 32776, 100_000]) {
            let (covered, threads) = match RowShape::of(width) {
                RowShape::Plain(threads) => (threads as usize * GROUP, threads),
                RowShape::Wide(threads) => (threads as usize * 4 * GROUP, threads),
                RowShape::Any(threads) => (usize::MAX, threads),
            };
            assert!(covered >= width && threads.is_multiple_of(32) && (32..=1024).contains(&threads), "{width}");
        }
        assert_eq!(RowShape::of(2048), RowShape::Plain(256));
        assert_eq!(RowShape::of(8192), RowShape::Wide(256));
        assert_eq!(RowShape::of(100), RowShape::Any(128));
    }
}
