//! Which kernel multiplies which shape: chosen by measurement, kept in a file, shown in the report.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::code_cache::fingerprint;
use crate::compile::nvrtc_version;
use crate::dtype::Precision;
use crate::error::CudaError;
use crate::gemm::{GemmCluster, GemmVariant};
use crate::gpu::{Event, Gpu};
use crate::graph::CapturedGraph;
use crate::linear::{Candidate, Epilogue, GemmPlugin, Linear, LinearArgs, LinearInput, LinearShape, Weights};
use crate::memory::{DeviceBuffer, DevicePtr};
use crate::module::SOURCES;
use crate::rows::NormArgs;
use crate::sample::SampleOps;

/// Name of the file in an engine directory.
pub const CHOICES_FILE: &str = "gemm_choices.cuda.json";

/// Numbers of rows that are measured; between them the next larger one counts. Most tiles have 128 rows: where a product has
/// few rows of them, one more changes how many times all multiprocessors are filled.
pub const BUCKETS: [usize; 21] =
    [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048, 4096, 8192];

/// Place in [`BUCKETS`] of the nearest bucket that holds `m` rows; the last one also takes what is beyond it.
pub fn bucket_index(m: usize) -> usize {
    BUCKETS.partition_point(|bucket| *bucket < m).min(BUCKETS.len() - 1)
}

/// What a measurement depends on. Choices made for another one are made again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedFor {
    /// Name of the GPU.
    pub device: String,
    /// Its compute capability.
    pub compute_capability: (i32, i32),
    /// Version of cuBLASLt; absent when it was not to be used.
    pub cublaslt: Option<usize>,
    /// Version of NVRTC, or "none" where kernels came from the cache and no compiler was there.
    pub nvrtc: String,
    /// Fingerprint of strobe's own kernels.
    pub kernels: String,
    /// Type of activations.
    pub precision: Precision,
    /// Whether cuBLASLt was to be used.
    pub gemm_plugin: GemmPlugin,
}

impl TunedFor {
    /// What is measured here.
    pub fn here(gpu: &Gpu, linear: &Linear) -> TunedFor {
        let texts: Vec<&str> = SOURCES.iter().map(|source| source.text).collect();
        TunedFor {
            device: gpu.info().name.clone(),
            compute_capability: gpu.info().compute_capability,
            cublaslt: linear.cublaslt_version(),
            nvrtc: nvrtc_version().map_or_else(|_| "none".into(), |(major, minor)| format!("{major}.{minor}")),
            kernels: fingerprint(&texts),
            precision: linear.precision(),
            gemm_plugin: linear.plugin(),
        }
    }

    /// Why choices made for `self` do not count for `here`; `None` when they do.
    fn differs(&self, here: &TunedFor) -> Option<String> {
        let version = |v: &Option<usize>| v.map_or("none".to_string(), |v| v.to_string());
        let different = [
            ("the GPU", self.device.clone(), here.device.clone()),
            ("compute capability", format!("{:?}", self.compute_capability), format!("{:?}", here.compute_capability)),
            ("cuBLASLt", version(&self.cublaslt), version(&here.cublaslt)),
            ("strobe's kernels", self.kernels.clone(), here.kernels.clone()),
            ("the precision", self.precision.suffix().into(), here.precision.suffix().into()),
            ("--gemm-plugin", self.gemm_plugin.name().into(), here.gemm_plugin.name().into()),
        ];
        if let Some((what, old, new)) = different.into_iter().find(|(_, old, new)| old != new) {
            return Some(format!("{what} was {old} and is {new}"));
        }
        // A compiler that is not there compiles nothing, so its version can't matter.
        let known = self.nvrtc != "none" && here.nvrtc != "none";
        (known && self.nvrtc != here.nvrtc).then(|| format!("NVRTC was {} and is {}", self.nvrtc, here.nvrtc))
    }
}

/// One kernel's time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Which.
    pub kernel: String,
    /// Median, of all that the product needs around it too.
    pub microseconds: f64,
}

/// The choice for a shape at a number of rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GemmChoice {
    /// What is multiplied.
    pub shape: LinearShape,
    /// One of [`BUCKETS`].
    pub bucket: usize,
    /// Rows that were measured: the bucket, or the most that can occur.
    pub rows: usize,
    /// The fastest.
    pub winner: Candidate,
    /// Its time, with a norm, an activation or a search for each row's maximum that it does not fold in.
    pub microseconds: f64,
    /// Its arithmetic, in 1e12 operations per second.
    pub tflops: f64,
    /// Bytes of weights that it read, in 1e9 per second.
    pub weight_gb_per_s: f64,
    /// All that were tried, the fastest first.
    pub candidates: Vec<Timing>,
}

/// All choices of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GemmChoices {
    /// What they hold for.
    pub tuned_for: TunedFor,
    /// The choices.
    pub choices: Vec<GemmChoice>,
}

impl GemmChoices {
    /// Read a file; the error says what is wrong with it.
    pub fn read(path: &Path) -> Result<GemmChoices, String> {
        let text = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Write a file, whole or not at all.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let beside = path.with_extension(format!("{}.tmp", std::process::id()));
        // A line for each choice: readable, and still small.
        let lines = self.choices.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
        let tuned_for = serde_json::to_string(&self.tuned_for)?;
        let text = format!("{{\"tuned_for\":{tuned_for},\n\"choices\":[\n{}\n]}}\n", lines.join(",\n"));
        std::fs::write(&beside, text)?;
        std::fs::rename(&beside, path)
    }

    /// Those of `self` that count for `here`, and a note when they are not all used.
    fn usable(self, here: &TunedFor) -> (Vec<GemmChoice>, Option<String>) {
        if let Some(why) = self.tuned_for.differs(here) {
            return (Vec::new(), Some(format!("stored GEMM choices are measured again: {why}")));
        }
        let known = self.choices.into_iter().filter(|choice| BUCKETS.contains(&choice.bucket));
        (known.collect(), None)
    }
}

/// A product that an engine will run, and how many rows it can have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearSite {
    /// What is multiplied.
    pub shape: LinearShape,
    /// Most rows.
    pub max_rows: usize,
}

/// What tuning gave.
pub struct Tuned {
    /// Every choice, stored and new.
    pub choices: GemmChoices,
    /// How many were measured now.
    pub measured: usize,
    /// What a user should know.
    pub notes: Vec<String>,
}

/// Choose a kernel for every site and bucket: from `stored` what counts here, the rest by measurement. `go_on` is asked
/// before each of those.
pub fn tune(
    gpu: &Gpu,
    linear: &mut Linear,
    sites: &[LinearSite],
    stored: Option<GemmChoices>,
    mut go_on: impl FnMut() -> bool,
) -> Result<Tuned, CudaError> {
    let tuned_for = TunedFor::here(gpu, linear);
    let (known, note) = stored.map_or((Vec::new(), None), |stored| stored.usable(&tuned_for));
    let mut notes: Vec<String> = note.into_iter().collect();
    let mut wanted: Vec<(LinearShape, usize, usize)> = Vec::new();
    for site in sites {
        for bucket in &BUCKETS[..=bucket_index(site.max_rows.max(1))] {
            let rows = (*bucket).min(site.max_rows.max(1));
            match wanted.iter_mut().find(|(shape, b, _)| *shape == site.shape && b == bucket) {
                Some(same) => same.2 = same.2.max(rows),
                None => wanted.push((site.shape, *bucket, rows)),
            }
        }
    }
    let mut choices = Vec::new();
    let mut missing = Vec::new();
    for (shape, bucket, rows) in wanted {
        match known.iter().find(|c| c.shape == shape && c.bucket == bucket) {
            Some(choice) if linear.can_run(choice, rows) => choices.push(choice.clone()),
            _ => missing.push((shape, bucket, rows)),
        }
    }
    let measured = missing.len();
    let mut skipped = 0;
    if !missing.is_empty() {
        let (free, _) = gpu.memory()?;
        // Half of what is free is left alone.
        missing.retain(|(shape, _, rows)| {
            let fits = Bench::bytes(linear, shape, *rows) < free / 2;
            skipped += usize::from(!fits);
            fits
        });
        let bench = Bench::new(gpu, linear, &missing)
            .map_err(|error| error.during(|| "preparing the choice of GEMMs".into()))?;
        for (shape, bucket, rows) in &missing {
            if !go_on() {
                return Err(CudaError::Interrupted);
            }
            choices.push(bench.choose(gpu, linear, shape, *bucket, *rows)?);
        }
    }
    if skipped > 0 {
        notes.push(format!("{skipped} GEMM sizes were not measured, there is too little free memory for them"));
    }
    for choice in &choices {
        linear.reserve(&choice.winner)?;
    }
    linear.set_plan(choices.iter().map(|c| (c.shape, c.bucket, c.winner)));
    Ok(Tuned { choices: GemmChoices { tuned_for, choices }, measured: measured - skipped, notes })
}

/// Two blocks that load weights for each other and have all rows between them read every weight once instead of twice, which
/// no short measurement shows: a GPU at its power limit turns the saving into clock. Such a pair wins if it is slower by no
/// more than this. With more rows pairs are no better in a running model than they are alone, rather worse.
const PAIR: f64 = 0.99;
/// With many rows a model's down projection, which adds long sums to the residual stream, is better off with cuBLASLt than
/// it looks alone: at the power limit steps were up to 1 % faster with kernels up to 1.3 % slower, on all of five H200s. It
/// wins if it is slower by no more than this. The sums of attention's output, at most twice as long as there are results, are
/// better off with own kernels, which begin while attention is ending.
const LONG_SUMS: f64 = 0.98;
/// Rows from which that counts.
const MANY_ROWS: usize = 1024;
/// A replay should take about so long: short enough for hundreds of candidates, long enough for a clock.
const REPLAY_MICROSECONDS: f64 = 150.0;
/// Timed replays of a candidate that is in the race.
const REPLAYS: usize = 5;
/// A candidate this much slower than the best so far is out after one replay,
const HOPELESS: f64 = 1.3;
/// and one whose faster of two replays is this much slower is out after these.
const BEHIND: f64 = 1.05;
/// What launching outside a graph can add to a time, at most.
const LAUNCH_MICROSECONDS: f64 = 100.0;
/// Weights are read from different places in turn, this many bytes in all, so that no cache holds them.
const WEIGHT_POOL: usize = 256 << 20;

/// Buffers to measure in.
struct Bench {
    /// Operands of the activations' type.
    weights: DeviceBuffer,
    x: DeviceBuffer,
    codes: DeviceBuffer,
    /// f32: the residual stream, what ops write as scales, and constants: norm weights, weight scales, bias.
    hidden: DeviceBuffer,
    x_scales: DeviceBuffer,
    constants: DeviceBuffer,
    out: DeviceBuffer,
    act: DeviceBuffer,
    sample: SampleOps,
}

impl Bench {
    /// What measuring `shape` at so many rows takes.
    fn bytes(linear: &Linear, shape: &LinearShape, rows: usize) -> u64 {
        let element = linear.precision().bytes();
        (shape.n * shape.k * element + rows * shape.k * (element + 5) + rows * shape.n * 6) as u64
    }

    fn new(gpu: &Gpu, linear: &Linear, sizes: &[(LinearShape, usize, usize)]) -> Result<Bench, CudaError> {
        let most = |size: &dyn Fn(&LinearShape, usize) -> usize| {
            sizes.iter().map(|(shape, _, rows)| size(shape, *rows)).max().unwrap_or(0)
        };
        let element = linear.precision().bytes();
        let fp8 = sizes.iter().any(|(shape, ..)| shape.weights == Weights::Fp8);
        let buffer = |bytes: usize| DeviceBuffer::new(bytes, "measuring GEMMs");
        let weights = most(&|s, _| s.n * s.k * if s.weights == Weights::Fp8 { 1 } else { element });
        let bench = Bench {
            weights: buffer(weights.max(WEIGHT_POOL))?,
            x: buffer(most(&|s, m| m * s.k * element))?,
            codes: buffer(if fp8 { most(&|s, m| m * s.k) } else { 0 })?,
            hidden: buffer(most(&|s, m| m * s.k * 4))?,
            x_scales: buffer(most(&|_, m| m * 4))?,
            constants: buffer(most(&|s, _| s.n.max(s.k) * 4))?,
            out: buffer(most(&|s, m| m * s.n * 4))?,
            act: buffer(most(&|s, m| m * s.n / 2 * element))?,
            sample: SampleOps::new(gpu, most(&|s, m| if s.epilogue == Epilogue::Logits { m } else { 0 }))?,
        };
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let mut uniform = move || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        // Random values: with zeroes a GPU draws less power, clocks higher and flatters every kernel.
        let values: Vec<f32> = (0..1 << 20).map(|_| uniform() * 0.1).collect();
        let typed: Vec<u8> = match linear.precision() {
            Precision::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Precision::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
            Precision::Bf16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
        };
        // Both signs, magnitudes below two, no NaN.
        let codes: Vec<u8> =
            values.iter().map(|v| (v.to_bits() >> 24) as u8 & 0x80 | (v.to_bits() & 0x3f) as u8).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        repeat(&bench.weights, if fp8 { &codes } else { &typed })?;
        repeat(&bench.x, &typed)?;
        repeat(&bench.codes, &codes)?;
        repeat(&bench.hidden, &bytes)?;
        repeat(&bench.x_scales, &0.01f32.to_le_bytes().repeat(1 << 12))?;
        repeat(&bench.constants, &0.01f32.to_le_bytes().repeat(1 << 18))?;
        bench.out.fill(0)?;
        gpu.synchronize()?;
        Ok(bench)
    }

    fn choose(
        &self,
        gpu: &Gpu,
        linear: &mut Linear,
        shape: &LinearShape,
        bucket: usize,
        rows: usize,
    ) -> Result<GemmChoice, CudaError> {
        let mut timed: Vec<(Candidate, String, f64)> = Vec::new();
        let (mut best, mut repeats) = (f64::INFINITY, 0);
        for (candidate, name) in linear.candidates(shape, rows)? {
            linear.reserve(&candidate)?;
            let running = |error: CudaError| error.during(|| running(&name, shape, rows));
            let time = |repeats, best| -> Result<Option<f64>, CudaError> {
                match self.time(gpu, linear, shape, rows, &candidate, repeats, best) {
                    // A library may refuse because its own kernel has faulted, for which the next candidate is not to blame.
                    Err(error) if refused(&error) => gpu.synchronize().map(|()| None).map_err(running),
                    timed => timed.map(Some).map_err(running),
                }
            };
            if repeats == 0 {
                let Some(estimate) = time(4, f64::INFINITY)? else { continue };
                repeats = (REPLAY_MICROSECONDS / estimate).clamp(2.0, 48.0) as usize;
            }
            if let Some(microseconds) = time(repeats, best)? {
                best = best.min(microseconds);
                timed.push((candidate, name, microseconds));
            }
        }
        let weighed =
            |(candidate, _, microseconds): &(Candidate, String, f64)| microseconds * favour(candidate, shape, rows);
        timed.sort_by(|a, b| weighed(a).total_cmp(&weighed(b)));
        let Some((winner, _, microseconds)) = timed.first().cloned() else {
            return Err(CudaError::Unsupported(format!("no kernel multiplies {rows} rows of {shape:?} on this GPU")));
        };
        let weight_bytes =
            shape.n * shape.k * if shape.weights == Weights::Fp8 { 1 } else { linear.precision().bytes() };
        let short = |value: f64| (value * 1e3).round() / 1e3;
        let timing = |(_, kernel, time)| Timing { kernel, microseconds: short(time) };
        Ok(GemmChoice {
            shape: *shape,
            bucket,
            rows,
            winner,
            microseconds: short(microseconds),
            tflops: short(2.0 * (rows * shape.n) as f64 * shape.k as f64 / microseconds / 1e6),
            weight_gb_per_s: short(weight_bytes as f64 / microseconds / 1e3),
            candidates: timed.into_iter().map(timing).collect(),
        })
    }

    /// Median microseconds of one product with all that it needs around it. Stops early where it
    /// can't win against `best`.
    fn time(
        &self,
        gpu: &Gpu,
        linear: &Linear,
        shape: &LinearShape,
        rows: usize,
        candidate: &Candidate,
        repeats: usize,
        best: f64,
    ) -> Result<f64, CudaError> {
        // Once outside the graph: libraries load their code when it is first used, which no capture allows.
        self.product(gpu, linear, shape, rows, candidate, 0)?;
        let (begin, end) = (Event::new(true)?, Event::new(true)?);
        begin.record(gpu)?;
        self.product(gpu, linear, shape, rows, candidate, 1)?;
        end.record(gpu)?;
        end.wait()?;
        let once = f64::from(end.since(&begin)?) * 1e3;
        if once > 2.0 * HOPELESS * best + LAUNCH_MICROSECONDS {
            return Ok(once);
        }
        let graph = CapturedGraph::capture(gpu, || {
            (0..repeats).try_for_each(|turn| self.product(gpu, linear, shape, rows, candidate, turn))
        })?;
        // SAFETY: it was captured right above, with memory of `self`; nothing else is on its way.
        unsafe { graph.launch(gpu) }?;
        let mut times = Vec::with_capacity(REPLAYS);
        for _ in 0..REPLAYS {
            begin.record(gpu)?;
            // SAFETY: it was captured right above, with memory of `self`; nothing else is on its way.
            unsafe { graph.launch(gpu) }?;
            end.record(gpu)?;
            end.wait()?;
            let microseconds = f64::from(end.since(&begin)?) * 1e3 / repeats as f64;
            times.push(microseconds);
            let fastest = times.iter().copied().fold(f64::INFINITY, f64::min);
            if fastest > best * if times.len() < 2 { HOPELESS } else { BEHIND } {
                break;
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// What an engine would launch for this product, of a size that the bench was made for.
    fn product(
        &self,
        gpu: &Gpu,
        linear: &Linear,
        shape: &LinearShape,
        rows: usize,
        candidate: &Candidate,
        turn: usize,
    ) -> Result<(), CudaError> {
        let route = linear.route_of(shape, rows, candidate);
        let ops = linear.row_ops();
        let (eps, constants, scales): (f32, DevicePtr, DevicePtr) = (1e-5, self.constants.ptr(), self.x_scales.ptr());
        let norm = |out, scales| NormArgs {
            hidden: self.hidden.ptr(),
            delta: None,
            weight: constants,
            eps,
            out,
            scales,
            rows,
            width: shape.k,
        };
        let input = if route.folds_norm {
            LinearInput::Norm { hidden: self.hidden.ptr(), weight: constants, eps }
        } else if route.fp8_input {
            let codes = self.codes.ptr();
            if shape.norm {
                // SAFETY: memory of `self`, as large as this size needs and there until `time` has waited.
                unsafe { ops.rms_norm(gpu, &norm(codes, Some(scales))) }?;
            } else {
                // SAFETY: memory of `self`, as large as this size needs and there until `time` has waited.
                unsafe { ops.quantize_rows(gpu, self.x.ptr(), codes, scales, rows, shape.k) }?;
            }
            LinearInput::Fp8 { codes, scales }
        } else {
            if shape.norm {
                // SAFETY: memory of `self`, as large as this size needs and there until `time` has waited.
                unsafe { ops.rms_norm(gpu, &norm(self.x.ptr(), None)) }?;
            }
            LinearInput::Plain(self.x.ptr())
        };
        let weight_bytes =
            shape.n * shape.k * if shape.weights == Weights::Fp8 { 1 } else { linear.precision().bytes() };
        let places = (self.weights.bytes() / weight_bytes.next_multiple_of(1024)).max(1);
        let args = LinearArgs {
            shape: *shape,
            input,
            w: self.weights.ptr() + (turn % places * weight_bytes.next_multiple_of(1024)) as u64,
            w_scales: constants,
            bias: constants,
            out: if route.folds_silu { self.act.ptr() } else { self.out.ptr() },
            // No constant is 0: as in a step whose tokens are all the likeliest.
            spared: constants,
            m: rows,
        };
        // SAFETY: memory of `self`, as large as this size needs and there until `time` has waited.
        unsafe { linear.run_route(gpu, &args, &route) }?;
        if !route.folds_silu && shape.epilogue == Epilogue::SiluMul {
            // SAFETY: memory of `self`, as large as this size needs and there until `time` has waited.
            unsafe { ops.silu_mul(gpu, self.out.ptr(), self.act.ptr(), rows, shape.n / 2) }?;
        }
        // Whoever wants logits looks for the largest, which costs less after some kernels.
        let tokens = self.x_scales.ptr();
        match route.maxima {
            // SAFETY: memory of `self`, as large as this size needs and there until `time` has waited.
            Some(maxima) => unsafe { self.sample.argmax_tiles(gpu, maxima, rows, tokens, 0) }?,
            None if shape.epilogue == Epilogue::Logits => {
                // SAFETY: memory of `self`, as large as this size needs and there until `time` has waited.
                unsafe { self.sample.argmax(gpu, self.out.ptr(), shape.n, rows, tokens, 0) }?;
            }
            None => {}
        }
        Ok(())
    }
}

/// What a candidate's time counts in the comparison, where a running model takes it better than it looks alone.
fn favour(candidate: &Candidate, shape: &LinearShape, rows: usize) -> f64 {
    match candidate {
        Candidate::Own { variant: Some(GemmVariant { cluster: GemmCluster::Pair, rows: tile, .. }) }
            if rows <= 2 * *tile as usize =>
        {
            PAIR
        }
        Candidate::CublasLt { .. }
            if rows >= MANY_ROWS
                && shape.epilogue == Epilogue::AddResidual
                && shape.k > 2 * shape.n
                && shape.weights == Weights::Same =>
        {
            LONG_SUMS
        }
        _ => 1.0,
    }
}

/// A candidate at work, for errors.
pub(crate) fn running(name: &str, shape: &LinearShape, rows: usize) -> String {
    let with = [
        (shape.norm, ", the norm before it"),
        (shape.bias, ", a bias"),
        (shape.weights == Weights::Fp8, ", weights in e4m3"),
        (shape.epilogue == Epilogue::SiluMul, ", the activation"),
        (shape.epilogue == Epilogue::AddResidual, ", the residual"),
        (shape.epilogue == Epilogue::Logits, ", the maxima"),
    ];
    let with: String = with.iter().filter(|(there, _)| *there).map(|(_, words)| *words).collect();
    let LinearShape { n, k, .. } = shape;
    format!("GEMM `{name}` ({rows} rows with {n} x {k} weights{with})")
}

/// Errors that only mean that a candidate is none.
fn refused(error: &CudaError) -> bool {
    matches!(error, CudaError::Library { .. } | CudaError::Unsupported(_))
}

/// Fill a buffer with a pattern, again and again.
fn repeat(buffer: &DeviceBuffer, pattern: &[u8]) -> Result<(), CudaError> {
    let mut offset = 0;
    while offset < buffer.bytes() {
        let bytes = pattern.len().min(buffer.bytes() - offset);
        buffer.write(offset, &pattern[..bytes])?;
        offset += bytes;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lt::LtAlgo;

    fn directory(name: &str) -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("strobe-choices-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    fn shape() -> LinearShape {
        LinearShape { n: 2560, k: 2048, epilogue: Epilogue::Store, weights: Weights::Same, bias: false, norm: true }
    }

    #[test]
    fn a_fault_names_kernel_shape_and_rows() {
        let error = CudaError::Driver {
            action: "waiting for the GPU".into(),
            code: "CUDA_ERROR_ILLEGAL_ADDRESS".into(),
            meaning: "an illegal memory access was encountered".into(),
        };
        let error = error.during(|| running("skinny with norm", &shape(), 16));
        assert!(matches!(error, CudaError::Fault { .. }), "{error:?}");
        let said = error.to_string();
        for part in ["skinny with norm", "16 rows", "2560 x 2048", "norm before", "ILLEGAL_ADDRESS"] {
            assert!(said.contains(part), "{said}");
        }
        let gates = LinearShape { epilogue: Epilogue::SiluMul, weights: Weights::Fp8, norm: false, ..shape() };
        let said = running("cublaslt 3", &gates, 1);
        assert!(said.contains("e4m3") && said.contains("activation") && !said.contains("norm"), "{said}");
    }

    fn choices() -> GemmChoices {
        let algorithm = LtAlgo::from_hex(&"0123456789abcdef".repeat(8));
        GemmChoices {
            tuned_for: TunedFor {
                device: "NVIDIA H200".into(),
                compute_capability: (9, 0),
                cublaslt: Some(130_001),
                nvrtc: "13.0".into(),
                kernels: "abc".into(),
                precision: Precision::Bf16,
                gemm_plugin: GemmPlugin::Auto,
            },
            choices: vec![GemmChoice {
                shape: shape(),
                bucket: 256,
                rows: 256,
                winner: Candidate::CublasLt { algorithm },
                microseconds: 5.5,
                tflops: 488.0,
                weight_gb_per_s: 1906.0,
                candidates: vec![Timing { kernel: "cublaslt 3".into(), microseconds: 5.5 }],
            }],
        }
    }

    #[test]
    fn a_size_goes_to_the_nearest_bucket_that_holds_it() {
        let bucket = |m: usize| BUCKETS[bucket_index(m)];
        let sizes = [1, 2, 3, 4, 5, 64, 65, 257, 700, 1024, 1025, 8192, 8193, 100_000];
        assert_eq!(sizes.map(bucket), [1, 2, 4, 4, 8, 64, 96, 384, 768, 1024, 1536, 8192, 8192, 8192]);
        assert_eq!(bucket(0), 1);
    }

    #[test]
    fn choices_survive_their_file() {
        let dir = directory("survive");
        let path = dir.join(CHOICES_FILE);
        choices().write(&path).unwrap();
        assert_eq!(GemmChoices::read(&path).unwrap(), choices());
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_damaged_file_is_told_and_not_used() {
        let dir = directory("damaged");
        let path = dir.join(CHOICES_FILE);
        assert!(GemmChoices::read(&path).unwrap_err().contains(CHOICES_FILE));
        let good = serde_json::to_string(&choices()).unwrap();
        for bad in ["", "{", &good.replace("0123456789abcdef", "xyz"), &good.replace("\"bucket\"", "\"bouquet\"")] {
            std::fs::write(&path, bad).unwrap();
            assert!(GemmChoices::read(&path).unwrap_err().contains(CHOICES_FILE), "{bad}");
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn choices_of_another_machine_are_made_again() {
        let here = choices().tuned_for;
        assert_eq!(choices().usable(&here), (choices().choices, None));
        type Change = fn(&mut TunedFor);
        let changes: [(Change, &str); 6] = [
            (|t| t.device = "NVIDIA A100".into(), "the GPU was NVIDIA A100 and is NVIDIA H200"),
            (|t| t.cublaslt = None, "cuBLASLt was none and is 130001"),
            (|t| t.nvrtc = "12.4".into(), "NVRTC was 12.4 and is 13.0"),
            (|t| t.kernels = "xyz".into(), "strobe's kernels"),
            (|t| t.precision = Precision::F16, "the precision was f16 and is bf16"),
            (|t| t.gemm_plugin = GemmPlugin::Disable, "--gemm-plugin was disable and is auto"),
        ];
        for (change, why) in changes {
            let mut foreign = choices();
            change(&mut foreign.tuned_for);
            let (known, note) = foreign.usable(&here);
            assert_eq!(known, []);
            assert!(note.unwrap().contains(why), "{why}");
        }
    }

    #[test]
    fn kernels_that_a_running_model_takes_better_are_favoured_there_only() {
        let library = Candidate::CublasLt { algorithm: None };
        let down = LinearShape { n: 2048, k: 5632, epilogue: Epilogue::AddResidual, norm: false, ..shape() };
        assert!(favour(&library, &down, 1024) < 1.0);
        assert_eq!(favour(&library, &down, 1023), 1.0);
        let others = [
            LinearShape { k: 2 * down.n, ..down },
            LinearShape { epilogue: Epilogue::Store, ..down },
            LinearShape { weights: Weights::Fp8, ..down },
        ];
        assert!(others.iter().all(|shape| favour(&library, shape, 4096) == 1.0));
        let tile = GemmVariant {
            hopper: true,
            small: false,
            turns: false,
            rows: 128,
            columns: 176,
            cluster: GemmCluster::Pair,
        };
        let pair = Candidate::Own { variant: Some(tile) };
        assert!(favour(&pair, &shape(), 256) < 1.0);
        assert_eq!(favour(&pair, &shape(), 257), 1.0);
        assert_eq!(favour(&Candidate::Own { variant: None }, &down, 1024), 1.0);
    }

    #[test]
    fn a_missing_compiler_forgets_nothing() {
        let here = TunedFor { nvrtc: "none".into(), ..choices().tuned_for };
        assert_eq!(choices().usable(&here).0.len(), 1);
    }

    #[test]
    fn a_choice_of_no_bucket_is_ignored() {
        let mut stored = choices();
        stored.choices[0].bucket = 300;
        let here = stored.tuned_for.clone();
        assert_eq!(stored.usable(&here).0, []);
    }
}
