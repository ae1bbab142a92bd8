//! What a GPU can do at most: the denominators of its utilisation.

use crate::driver;
use crate::dtype::Precision;
use crate::error::CudaError;
use crate::gpu::{Event, Gpu};
use crate::linear::{Epilogue, GemmPlugin, Linear, LinearArgs, LinearInput, LinearShape, Weights};
use crate::memory::DeviceBuffer;
use crate::rows::RowOps;
use crate::tune::{LinearSite, running, tune};
use crate::weights::WeightOps;

/// Measured ceilings.
#[derive(Clone, Debug)]
pub struct GpuPeaks {
    /// Operations per second of the fastest of some large matrix products.
    pub flops_per_s: f64,
    /// Bytes read and written per second by a copy in device memory.
    pub copy_bytes_per_s: f64,
    /// Whose kernels multiplied.
    pub by: &'static str,
}

/// Rows, columns and depth of the product.
const SIDE: usize = 8192;
/// Bytes copied at once; far beyond any cache.
const COPIED: usize = 2 << 30;
/// Timed repetitions, of which the fastest counts: a ceiling is the best that was seen.
const REPEATS: usize = 7;

/// Measure. Takes a fraction of a second and about 3 GiB.
pub fn peaks(gpu: &Gpu, precision: Precision, fp8: bool) -> Result<GpuPeaks, CudaError> {
    let linear = Linear::with_what_is_there(gpu, precision)?;
    let by = match linear.plugin() {
        GemmPlugin::Auto => "cuBLASLt or strobe",
        GemmPlugin::Disable => "strobe",
    };
    Ok(GpuPeaks { flops_per_s: product(gpu, linear, precision, fp8)?, copy_bytes_per_s: copy(gpu)?, by })
}

/// Milliseconds of `work` at its fastest, after one run to warm up. `what` it is stands in errors.
fn best_ms(
    gpu: &Gpu,
    what: impl Fn() -> String,
    work: impl FnMut() -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    // What was launched before is not this work's fault.
    gpu.synchronize().map_err(|error| error.during(|| format!("preparing {}", what())))?;
    fastest_ms(gpu, work).map_err(|error| error.during(what))
}

fn fastest_ms(gpu: &Gpu, mut work: impl FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
    let (start, end) = (Event::new(true)?, Event::new(true)?);
    work()?;
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        start.record(gpu)?;
        work()?;
        end.record(gpu)?;
        end.wait()?;
        best = best.min(f64::from(end.since(&start)?));
    }
    Ok(best)
}

fn copy(gpu: &Gpu) -> Result<f64, CudaError> {
    let bytes = COPIED.min((gpu.memory()?.0 / 4) as usize);
    let (from, to) = (DeviceBuffer::new(bytes, "a copy")?, DeviceBuffer::new(bytes, "a copy")?);
    from.fill(0x5a)?;
    let what = || format!("the copy of {bytes} bytes that memory's peak is measured with");
    let ms = best_ms(gpu, what, || {
        // SAFETY: both buffers have `bytes` bytes and outlive the copy.
        let status = unsafe { driver::cuMemcpyDtoDAsync_v2(to.ptr(), from.ptr(), bytes, gpu.stream()) };
        crate::error::check(status, || "copying device memory".into())
    })?;
    Ok(2.0 * bytes as f64 / (ms / 1e3))
}

fn product(gpu: &Gpu, mut linear: Linear, precision: Precision, fp8: bool) -> Result<f64, CudaError> {
    let weights = if fp8 { Weights::Fp8 } else { Weights::Same };
    let shape = LinearShape { n: SIDE, k: SIDE, epilogue: Epilogue::Store, weights, bias: false, norm: false };
    let tuned = tune(gpu, &mut linear, &[LinearSite { shape, max_rows: SIDE }], None, || true)?;
    let ops = WeightOps::new(gpu, precision)?;
    let count = (SIDE * SIDE) as u64;
    let random = |key| {
        let buffer = DeviceBuffer::new(SIDE * SIDE * precision.bytes(), "a matrix")?;
        // Never zeroes: they multiply faster than numbers.
        // SAFETY: the buffer has so many elements, and lives until the product has been measured.
        unsafe { ops.random_normal(gpu, buffer.ptr(), precision, key, 0, count, 1.0)? };
        Ok::<_, CudaError>(buffer)
    };
    let (x, w) = (random(1)?, random(2)?);
    let out = DeviceBuffer::new(SIDE * SIDE * 4, "a product")?;
    let codes = [DeviceBuffer::new(SIDE * SIDE, "codes")?, DeviceBuffer::new(SIDE * SIDE, "codes")?];
    let scales = [DeviceBuffer::new(SIDE * 4, "scales")?, DeviceBuffer::new(SIDE * 4, "scales")?];
    if fp8 {
        let rows = RowOps::new(gpu, precision)?;
        // SAFETY: matrices and codes have `SIDE` rows and columns, scales as many rows, and all live until the end.
        unsafe {
            rows.quantize_rows(gpu, x.ptr(), codes[0].ptr(), scales[0].ptr(), SIDE, SIDE)?;
            ops.quantize_weight(gpu, w.ptr(), codes[1].ptr(), scales[1].ptr(), SIDE, SIDE)?;
        }
    }
    let args = LinearArgs {
        shape,
        input: match fp8 {
            true => LinearInput::Fp8 { codes: codes[0].ptr(), scales: scales[0].ptr() },
            false => LinearInput::Plain(x.ptr()),
        },
        w: if fp8 { codes[1].ptr() } else { w.ptr() },
        w_scales: scales[1].ptr(),
        bias: 0,
        out: out.ptr(),
        spared: 0,
        m: SIDE,
    };
    let kernel = tuned.choices.choices.iter().find(|choice| choice.rows == SIDE);
    let kernel = kernel.and_then(|choice| choice.candidates.first()).map_or("the likeliest", |timing| &timing.kernel);
    let what = || format!("the peak's {}", running(kernel, &shape, SIDE));
    // SAFETY: operands and result have `SIDE` rows and columns and live until `best_ms` has waited for the last product.
    let ms = best_ms(gpu, what, || unsafe { linear.run(gpu, &args) })?;
    // Choosing has warmed the GPU up, and at its power limit it may be slower now than it was for a kernel that won, perhaps
    // with fewer rows.
    let chosen = tuned.choices.choices.iter().map(|choice| choice.tflops * 1e12).fold(0.0, f64::max);
    Ok(chosen.max(2.0 * (SIDE as f64).powi(3) / (ms / 1e3)))
}
