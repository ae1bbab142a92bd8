//! Weights on the device: generated, unpacked from the layout of the CPU's engines, quantized.

use crate::dtype::Precision;
use crate::error::CudaError;
use crate::gpu::{Gpu, Launch};
use crate::kernel_args;
use crate::memory::DevicePtr;
use crate::module::Function;
use crate::rows::{RowKernels, row_kernels, typed_function};

/// Standard deviation of the generator's raw numbers, the sum of four sixteen-bit fields: `sqrt(4 * (65536^2 - 1) / 12)`.
/// The model crate's generator has the same.
const SUM_STD: f64 = 37_837.227_237_206_48;

/// Rows that share a panel of a packed weight.
const PANEL: usize = 32;
/// Columns that one block unpacks.
const UNPACKED_COLUMNS: usize = 64;

/// What is done to weights while an engine is loaded.
pub struct WeightOps {
    random_normal: [Function; 3],
    unpack_panels: Function,
    quantize: RowKernels,
    fill_f32: Function,
}

impl WeightOps {
    /// Find the kernels. `precision` is that of the matrices.
    pub fn new(gpu: &Gpu, precision: Precision) -> Result<WeightOps, CudaError> {
        let random = |precision| typed_function!(gpu, precision, "weights.cu", "random_normal");
        Ok(WeightOps {
            random_normal: [random(Precision::F32)?, random(Precision::F16)?, random(Precision::Bf16)?],
            unpack_panels: typed_function!(gpu, precision, "weights.cu", "unpack_panels")?,
            quantize: row_kernels!(gpu, precision, "quantize_rows"),
            fill_f32: gpu.function("weights.cu", "fill_f32")?,
        })
    }

    /// Elements `start..start + count` of the random tensor `key`, in type `precision`: those that the model crate's
    /// generator makes, rounded.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn random_normal(
        &self,
        gpu: &Gpu,
        out: DevicePtr,
        precision: Precision,
        key: u64,
        start: u64,
        count: u64,
        std: f32,
    ) -> Result<(), CudaError> {
        let [f32, f16, bf16] = self.random_normal;
        let function = match precision {
            Precision::F32 => f32,
            Precision::F16 => f16,
            Precision::Bf16 => bf16,
        };
        let scale = (f64::from(std) / SUM_STD) as f32;
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { launch_over(gpu, function, count, kernel_args![out, key, start, count, scale]) }
    }

    /// From `[ceil(n / 32)][k][32]`, zero padded, to `[n][k]`.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    pub unsafe fn unpack_panels(
        &self,
        gpu: &Gpu,
        packed: DevicePtr,
        out: DevicePtr,
        n: usize,
        k: usize,
    ) -> Result<(), CudaError> {
        let parts = k.div_ceil(UNPACKED_COLUMNS);
        let blocks = n.div_ceil(PANEL) * parts;
        if blocks == 0 {
            return Ok(());
        }
        let (rows, columns, parts) = (n as u32, k as u32, parts as u32);
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe {
            gpu.launch(self.unpack_panels, Launch::grid(blocks, 256), kernel_args![packed, out, rows, columns, parts])
        }
    }

    /// A matrix of `n` rows and `k` columns into e4m3 codes `[n][k]` and one f32 scale per row.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    pub unsafe fn quantize_weight(
        &self,
        gpu: &Gpu,
        weight: DevicePtr,
        codes: DevicePtr,
        scales: DevicePtr,
        n: usize,
        k: usize,
    ) -> Result<(), CudaError> {
        let columns = k as u32;
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { self.quantize.launch(gpu, n, k, kernel_args![weight, codes, scales, columns]) }
    }

    /// `count` times `value`.
    ///
    /// # Safety
    /// As for [`Gpu::launch`]: memory has the extents that the arguments name.
    pub unsafe fn fill_f32(&self, gpu: &Gpu, out: DevicePtr, value: f32, count: u64) -> Result<(), CudaError> {
        // SAFETY: these are the kernel's arguments; the rest is the caller's promise.
        unsafe { launch_over(gpu, self.fill_f32, count, kernel_args![out, value, count]) }
    }
}

/// Enough blocks to fill any GPU; each takes many elements when there are more.
///
/// # Safety
/// As for [`Gpu::launch`].
unsafe fn launch_over(
    gpu: &Gpu,
    function: Function,
    count: u64,
    args: &mut [*mut std::ffi::c_void],
) -> Result<(), CudaError> {
    if count == 0 {
        return Ok(());
    }
    let blocks = count.div_ceil(256).min(16 * u64::from(gpu.info().multiprocessors));
    // SAFETY: the caller's promise.
    unsafe { gpu.launch(function, Launch::grid(blocks as usize, 256), args) }
}
