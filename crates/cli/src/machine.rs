//! The machine: what it is, and what it can do at most (measured once, then remembered).

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use strobe_engine::device::DeviceFacts;
use strobe_engine::{BuildConfig, EngineError, Quantization, memory};
use strobe_kernels_cpu::{Cpu, Tier, measure};
use strobe_kernels_cuda::{DeviceInfo, Gpu, Precision};
use strobe_model::DType;
use strobe_report::human;
use strobe_trace::Peaks;

use crate::{interrupt, progress, run_dir};

/// Cores this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Name of the processor.
pub(crate) fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find(|l| l.starts_with("model name")).and_then(|l| l.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

/// What a report says of the machine.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub cpu: String,
    pub cores: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simd_tier: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// The GPU that computed, where one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<DeviceInfo>,
    pub kernel: String,
}

impl Machine {
    pub(crate) fn describe(cpu: &Cpu) -> Machine {
        Machine::of(&DeviceFacts::Cpu { tier: cpu.tier(), threads: cpu.threads() })
    }

    /// A machine on which another runtime computes with so many threads, or on this GPU.
    pub(crate) fn plain(threads: usize, gpu: Option<DeviceInfo>) -> Machine {
        Machine { simd_tier: None, gpu, ..Machine::of(&DeviceFacts::Cpu { tier: Tier::Scalar, threads }) }
    }

    pub(crate) fn of(device: &DeviceFacts) -> Machine {
        let (simd_tier, threads) = match device {
            DeviceFacts::Cpu { tier, threads } => (Some(tier.name().to_string()), Some(*threads)),
            DeviceFacts::Cuda(_) => (None, None),
        };
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_string();
        Machine {
            cpu: cpu_name(),
            cores: cores(),
            memory_bytes: memory::total(),
            simd_tier,
            threads,
            gpu: device.cuda().map(|facts| facts.device.clone()),
            kernel,
        }
    }
}

/// Measured ceilings of one CPU, tier and number of threads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeasuredPeaks {
    /// What they hold for.
    pub key: String,
    /// Of register-resident f32 FMA chains on all workers of a CPU; of a large matrix product on a GPU.
    pub flops_per_s: f64,
    /// 8-bit operations per second of register-resident dot products on all workers of a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub int8_ops_per_s: Option<f64>,
    /// Operations per second of register-resident products of bfloat16 pairs, on a CPU that has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bf16_flops_per_s: Option<f64>,
    /// Bytes per second of a streaming read on all workers.
    pub read_bytes_per_s: f64,
    /// Bytes per second of a streaming copy, read and written bytes together.
    pub copy_bytes_per_s: f64,
    /// When, in seconds since 1970.
    pub measured_at: u64,
    /// What the operations were counted on.
    #[serde(default = "fma_chains")]
    pub flops_of: String,
    /// Under which conditions the bandwidth was read.
    #[serde(default = "once")]
    pub bandwidth_measured: String,
    /// Under which conditions the operations of the products' type were counted.
    #[serde(default = "once")]
    pub flops_measured: String,
}

/// The type of an engine's matrix products, which decides the arithmetic ceiling of MFU on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Products {
    F32,
    Bf16,
    Int8,
}

impl Products {
    /// Those of an engine on a CPU with these ceilings.
    fn on_cpu(build: &BuildConfig, peaks: &MeasuredPeaks) -> Products {
        let in_pairs = build.dtype == DType::Bf16 && build.gemm_plugin;
        match (build.quantization.is_integer(), peaks.int8_ops_per_s, peaks.bf16_flops_per_s) {
            (true, Some(_), _) => Products::Int8,
            (false, _, Some(_)) if in_pairs => Products::Bf16,
            _ => Products::F32,
        }
    }

    /// Their ceiling.
    fn of(self, peaks: &MeasuredPeaks) -> Option<f64> {
        match self {
            Products::F32 => Some(peaks.flops_per_s),
            Products::Bf16 => peaks.bf16_flops_per_s,
            Products::Int8 => peaks.int8_ops_per_s,
        }
    }

    fn set(self, peaks: &mut MeasuredPeaks, ops_per_s: f64) {
        match self {
            Products::F32 => peaks.flops_per_s = ops_per_s,
            Products::Bf16 => peaks.bf16_flops_per_s = Some(ops_per_s),
            Products::Int8 => peaks.int8_ops_per_s = Some(ops_per_s),
        }
    }

    fn measure(self, cpu: &mut Cpu, budget: Duration) -> f64 {
        match self {
            Products::F32 => measure::peak_flops_f32(cpu, budget),
            Products::Bf16 => measure::peak_flops_bf16(cpu, budget).unwrap_or(0.0),
            Products::Int8 => measure::peak_ops_int8(cpu, budget),
        }
    }
}

fn fma_chains() -> String {
    "f32 FMA chains and streaming read".into()
}

fn once() -> String {
    "once, cached".into()
}

impl MeasuredPeaks {
    /// Each ceiling as the better of two readings gave it.
    pub(crate) fn better_of(&self, other: &MeasuredPeaks) -> MeasuredPeaks {
        let best = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::max);
        MeasuredPeaks {
            flops_per_s: self.flops_per_s.max(other.flops_per_s),
            int8_ops_per_s: best(self.int8_ops_per_s, other.int8_ops_per_s),
            bf16_flops_per_s: best(self.bf16_flops_per_s, other.bf16_flops_per_s),
            read_bytes_per_s: self.read_bytes_per_s.max(other.read_bytes_per_s),
            copy_bytes_per_s: self.copy_bytes_per_s.max(other.copy_bytes_per_s),
            ..self.clone()
        }
    }

    /// Operations per second at which the products of an engine run at best, and of which type they are: the denominator
    /// of MFU.
    pub(crate) fn of_products(&self, build: &BuildConfig) -> (f64, &str) {
        let products = self.products(build);
        let of_type = match products {
            Products::Int8 => "int8",
            Products::Bf16 => "bfloat16",
            Products::F32 if self.flops_of == fma_chains() => "f32",
            Products::F32 => &self.flops_of,
        };
        (products.of(self).unwrap_or(self.flops_per_s), of_type)
    }

    /// The type of an engine's products. A GPU's ceiling is that of its type already.
    pub(crate) fn products(&self, build: &BuildConfig) -> Products {
        Products::on_cpu(build, self)
    }

    /// The arithmetic ceilings of a CPU, in words.
    pub(crate) fn compute_text(&self) -> String {
        let bf16 = self.bf16_flops_per_s.map(|flops| format!(", {} bfloat16", human::flops_per_s(flops)));
        let int8 = self.int8_ops_per_s.map(|ops| format!(", {} int8", human::ops_per_s(ops)));
        let [bf16, int8] = [bf16, int8].map(Option::unwrap_or_default);
        format!("{} f32{bf16}{int8}", human::flops_per_s(self.flops_per_s))
    }

    /// For a trace's roofline.
    pub(crate) fn for_trace(&self) -> Peaks {
        Peaks {
            flops_per_s: self.flops_per_s,
            int8_ops_per_s: self.int8_ops_per_s,
            bf16_flops_per_s: self.bf16_flops_per_s,
            bytes_per_s: self.read_bytes_per_s,
            note: format!("measured: {} ({})", self.flops_of, self.key),
        }
    }
}

/// What a shared machine gives is not a constant: its bandwidth can double within a minute. A long run is therefore compared
/// with the bandwidth right before and right after it; a short one with the cached figure, because the readings would take
/// longer than the run. Arithmetic is not shared but withheld, when a thread has no CPU, and a run's own waits say how much:
/// its peak is the best that was ever read, and readings around a run can only raise it. Halved by a neighbor, as they often
/// are, they would double MFU.
pub(crate) struct PeakFrame {
    cpu: Cpu,
    products: Products,
    last: Reading,
}

/// Bandwidth and operations of the products' type, read together.
#[derive(Clone, Copy, Debug)]
struct Reading {
    bytes_per_s: f64,
    ops_per_s: f64,
}

/// What a run reached in its best kind of iteration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Achieved {
    pub bytes_per_s: f64,
    pub ops_per_s: f64,
}

/// What the readings around a run say.
pub(crate) struct Framed {
    /// The ceilings of that run.
    pub peaks: MeasuredPeaks,
    /// Bytes per second read right before and right after it.
    pub bandwidth: [f64; 2],
}

/// From this length on a run is framed by readings.
const LONG_RUN_SECONDS: f64 = 1.0;

impl PeakFrame {
    /// Take the first reading, if a run of `seconds` is worth it.
    pub(crate) fn open(tier: Tier, threads: usize, seconds: f64, products: Products) -> Option<PeakFrame> {
        (seconds >= LONG_RUN_SECONDS).then(|| {
            let mut cpu = Cpu::new(tier, threads);
            let last = Reading::take(&mut cpu, products);
            PeakFrame { cpu, products, last }
        })
    }

    /// Take a reading after a run; the larger of the two around it is the run's bandwidth.
    pub(crate) fn close(&mut self, peaks: &MeasuredPeaks, achieved: Achieved) -> Framed {
        let before = self.last;
        let mut after = Reading::take(&mut self.cpu, self.products);
        if after.bytes_per_s * READ_AGAIN < before.bytes_per_s {
            // One short pass may have met a neighbor; two have met a slower machine.
            after = after.better_of(Reading::take(&mut self.cpu, self.products));
        }
        self.last = after;
        let bandwidth = [before.bytes_per_s, after.bytes_per_s];
        let (framed, better) = framed(peaks, self.products, (before, after), achieved);
        if better {
            remember(&framed);
        }
        Framed { peaks: corrected(framed, &mut self.cpu, self.products, achieved.ops_per_s), bandwidth }
    }
}

/// A reading that is this many times lower than the one before the run is taken twice.
const READ_AGAIN: f64 = 1.25;

impl Reading {
    fn better_of(self, other: Reading) -> Reading {
        Reading { bytes_per_s: self.bytes_per_s.max(other.bytes_per_s), ops_per_s: self.ops_per_s.max(other.ops_per_s) }
    }

    fn take(cpu: &mut Cpu, products: Products) -> Reading {
        let ops_per_s = products.measure(cpu, measure::BRIEF);
        Reading { bytes_per_s: measure::read_bandwidth(cpu, measure::BRIEF), ops_per_s }
    }
}

/// The denominators of a run between two readings, and whether one of them is above the cached one. A run that `achieved`
/// more bandwidth than both readings met a better moment than they did: then the cached figure is taken, if that is higher.
/// Of operations the best of all readings counts.
fn framed(
    peaks: &MeasuredPeaks,
    products: Products,
    (before, after): (Reading, Reading),
    achieved: Achieved,
) -> (MeasuredPeaks, bool) {
    let choose = |before: f64, after: f64, achieved: f64, cached: f64| {
        let (best, readings) = (before.max(after), [before, after].map(|value| format!("{:.1}", value / 1e9)));
        let [before, after] = readings;
        match achieved > best && cached > best {
            true => {
                let words =
                    format!("once, cached: this run was faster than measured before ({before}) and after it ({after})");
                (cached, words)
            }
            false => (best, format!("right before ({before}) and after ({after}) this run, the larger one")),
        }
    };
    let cached = (peaks.read_bytes_per_s, products.of(peaks).unwrap_or(0.0));
    let bytes = choose(before.bytes_per_s, after.bytes_per_s, achieved.bytes_per_s, cached.0);
    let ops = match before.ops_per_s.max(after.ops_per_s) {
        best if best >= cached.1 => choose(before.ops_per_s, after.ops_per_s, 0.0, 0.0),
        _ => {
            let readings = [before, after].map(|reading| format!("{:.1}", reading.ops_per_s / 1e9));
            let [before, after] = readings;
            (
                cached.1,
                format!(
                    "once, cached: the best so far, above those measured before ({before}) and after ({after}) this run"
                ),
            )
        }
    };
    let mut framed = MeasuredPeaks {
        read_bytes_per_s: bytes.0,
        bandwidth_measured: bytes.1,
        flops_measured: ops.1,
        ..peaks.clone()
    };
    products.set(&mut framed, ops.0);
    (framed, bytes.0 > cached.0 || ops.0 > cached.1)
}

/// A run that achieved more than the peak it is divided by proves that peak wrong: it is measured again, at length, and what
/// is higher is remembered.
pub(crate) fn corrected(
    peaks: MeasuredPeaks,
    cpu: &mut Cpu,
    products: Products,
    achieved_ops_per_s: f64,
) -> MeasuredPeaks {
    let known = products.of(&peaks).unwrap_or(0.0);
    if achieved_ops_per_s <= known {
        return peaks;
    }
    let again = products.measure(cpu, measure::THOROUGH);
    if again <= known {
        return peaks;
    }
    let was = format!("again after this run, which reached more than the {:.1} known before", known / 1e9);
    let mut better = MeasuredPeaks { flops_measured: was, ..peaks };
    products.set(&mut better, again);
    remember(&better);
    better
}

fn key(cpu: &Cpu) -> String {
    format!("{}, {} threads of {} cores, {}", cpu_name(), cpu.threads(), cores(), cpu.tier().name())
}

/// A file of the cache that outlives runs.
pub(crate) fn cache_file(name: &str) -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let base = base.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(base.join("strobe").join(name))
}

fn cached() -> Vec<MeasuredPeaks> {
    let text = cache_file("peaks.json").and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
    // One by one: an entry that another version wrote is no reason to forget the rest.
    let entries: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap_or_default();
    entries.into_iter().filter_map(|entry| serde_json::from_value(entry).ok()).collect()
}

/// The ceilings, from the cache when this machine was measured before.
pub(crate) fn peaks(cpu: &mut Cpu) -> MeasuredPeaks {
    let key = key(cpu);
    let known = cached().into_iter().find(|p| {
        p.key == key && p.flops_per_s > 0.0 && p.read_bytes_per_s > 0.0 && p.int8_ops_per_s.is_some_and(|x| x > 0.0)
    });
    known.unwrap_or_else(|| measure_peaks(cpu))
}

/// What is remembered of this machine with these workers, complete or not.
pub(crate) fn cached_peaks(cpu: &Cpu) -> Option<MeasuredPeaks> {
    let key = key(cpu);
    cached().into_iter().find(|p| p.key == key)
}

/// Remember ceilings, measured now; `set` fills them in. Single ones can only raise what is known, and the others stay as
/// they were; `all` of them, measured at length because somebody asked for it, take the place of what is known.
pub(crate) fn remember_measured(cpu: &Cpu, all: bool, set: impl FnOnce(&mut MeasuredPeaks)) {
    // What is not known is 0 here, and less than anything: entries with such a ceiling are measured before they are used.
    let mut peaks = MeasuredPeaks {
        key: key(cpu),
        flops_per_s: 0.0,
        int8_ops_per_s: None,
        bf16_flops_per_s: None,
        read_bytes_per_s: 0.0,
        copy_bytes_per_s: 0.0,
        measured_at: seconds_since_1970(),
        flops_of: fma_chains(),
        bandwidth_measured: once(),
        flops_measured: once(),
    };
    set(&mut peaks);
    if all { store(peaks) } else { remember(&peaks) }
}

fn seconds_since_1970() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Measure the ceilings now and remember the best.
pub(crate) fn measure_peaks(cpu: &mut Cpu) -> MeasuredPeaks {
    let spinner = progress::spinner("measuring peak FLOP/s and memory bandwidth");
    let peaks = MeasuredPeaks {
        key: key(cpu),
        flops_per_s: measure::peak_flops_f32(cpu, measure::THOROUGH),
        int8_ops_per_s: Some(measure::peak_ops_int8(cpu, measure::THOROUGH)),
        bf16_flops_per_s: measure::peak_flops_bf16(cpu, measure::THOROUGH),
        read_bytes_per_s: measure::read_bandwidth(cpu, measure::THOROUGH),
        copy_bytes_per_s: measure::copy_bandwidth(cpu, measure::THOROUGH),
        measured_at: seconds_since_1970(),
        flops_of: fma_chains(),
        bandwidth_measured: once(),
        flops_measured: once(),
    };
    spinner.finish_and_clear();
    remember(&peaks);
    peaks
}

/// The ceilings of a GPU for engines built like `build`: a large matrix product of its type, and a copy in its memory.
pub(crate) fn gpu_peaks(index: u32, build: &BuildConfig) -> Result<MeasuredPeaks, EngineError> {
    let spinner = progress::spinner("loading GPU kernels, which are compiled the first time");
    let gpu = Gpu::open_while(index, &|| !interrupt::requested());
    spinner.finish_and_clear();
    let gpu = gpu?;
    let precision = match build.dtype {
        DType::F32 => Precision::F32,
        DType::F16 => Precision::F16,
        DType::Bf16 => Precision::Bf16,
    };
    let fp8 = build.quantization == Quantization::Fp8;
    let kind = if fp8 { "e4m3".to_string() } else { precision.suffix().to_string() };
    let key = format!("{}, {kind}", gpu.info().name);
    let known = cached().into_iter().find(|p| p.key == key && p.flops_per_s > 0.0 && p.read_bytes_per_s > 0.0);
    if let Some(known) = known {
        return Ok(known);
    }
    let spinner = progress::spinner("measuring the GPU's FLOP/s and memory bandwidth");
    let measured = strobe_kernels_cuda::measure::peaks(&gpu, precision, fp8);
    spinner.finish_and_clear();
    let measured = measured?;
    let peaks = MeasuredPeaks {
        key,
        flops_per_s: measured.flops_per_s,
        int8_ops_per_s: None,
        bf16_flops_per_s: None,
        read_bytes_per_s: measured.copy_bytes_per_s,
        copy_bytes_per_s: measured.copy_bytes_per_s,
        measured_at: seconds_since_1970(),
        flops_of: format!("{kind} GEMM with 8192 x 8192 weights by {}, and device copy", measured.by),
        bandwidth_measured: once(),
        flops_measured: once(),
    };
    remember(&peaks);
    Ok(peaks)
}

/// Keep the best that was ever read: a peak is what the machine can do, not what it did last time. A cache that can't be
/// written costs a second next time, nothing else.
fn remember(peaks: &MeasuredPeaks) {
    let known = cached().into_iter().find(|p| p.key == peaks.key);
    store(known.map_or_else(|| peaks.clone(), |known| peaks.better_of(&known)));
}

fn store(mut best: MeasuredPeaks) {
    let mut all = cached();
    best.bandwidth_measured = once();
    best.flops_measured = once();
    all.retain(|p| p.key != best.key);
    all.push(best);
    if let (Some(path), Ok(text)) = (cache_file("peaks.json"), serde_json::to_string_pretty(&all))
        && matches!(path.parent().map(fs::create_dir_all), Some(Ok(())))
    {
        let _ = run_dir::write_whole(&path, text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(flops_per_s: f64, read_bytes_per_s: f64) -> MeasuredPeaks {
        MeasuredPeaks {
            key: "a machine".into(),
            flops_per_s,
            int8_ops_per_s: Some(4.0 * flops_per_s),
            bf16_flops_per_s: Some(2.0 * flops_per_s),
            read_bytes_per_s,
            copy_bytes_per_s: read_bytes_per_s,
            measured_at: 0,
            flops_of: fma_chains(),
            bandwidth_measured: once(),
            flops_measured: once(),
        }
    }

    fn reading(bytes_per_s: f64, ops_per_s: f64) -> Reading {
        Reading { bytes_per_s, ops_per_s }
    }

    #[test]
    fn a_first_measurement_on_a_busy_machine_does_not_last() {
        let busy = known(290e9, 20e9);
        let around = (reading(18e9, 540e9), reading(21e9, 552e9));
        let achieved = Achieved { bytes_per_s: 10e9, ops_per_s: 400e9 };
        let (framed, better) = framed(&busy, Products::F32, around, achieved);
        assert_eq!((framed.flops_per_s, framed.read_bytes_per_s, better), (552e9, 21e9, true));
        assert!(framed.flops_measured.contains("before (540.0) and after (552.0)"), "{}", framed.flops_measured);
        assert_eq!((framed.int8_ops_per_s, framed.bf16_flops_per_s), (busy.int8_ops_per_s, busy.bf16_flops_per_s));
    }

    #[test]
    fn a_run_that_met_a_better_moment_is_divided_by_the_cached_peak() {
        let around = (reading(9e9, 300e9), reading(8e9, 310e9));
        let fast = Achieved { bytes_per_s: 12e9, ops_per_s: 700e9 };
        let (found, better) = framed(&known(500e9, 20e9), Products::Bf16, around, fast);
        assert_eq!((found.bf16_flops_per_s, found.read_bytes_per_s, better), (Some(1000e9), 20e9, false));
        assert!(found.flops_measured.starts_with("once, cached"), "{}", found.flops_measured);
        let slow = Achieved { bytes_per_s: 1e9, ops_per_s: 100e9 };
        let (found, better) = framed(&known(500e9, 20e9), Products::Bf16, around, slow);
        // Neighbors halve readings of arithmetic: they must not double MFU.
        assert_eq!((found.bf16_flops_per_s, found.read_bytes_per_s, better), (Some(1000e9), 9e9, false));
        assert_eq!(found.flops_per_s, 500e9, "another type was not measured");
    }

    #[test]
    fn a_peak_that_a_run_exceeded_is_never_lowered() {
        let mut cpu = Cpu::new(Tier::Scalar, 1);
        let absurd = known(f64::MAX / 8.0, 1.0);
        assert_eq!(corrected(absurd.clone(), &mut cpu, Products::F32, f64::MAX), absurd);
        assert_eq!(corrected(absurd.clone(), &mut cpu, Products::F32, 1.0), absurd, "nothing to correct");
    }

    #[test]
    fn the_better_of_two_readings_stays() {
        let better = known(290e9, 20e9).better_of(&known(552e9, 18e9));
        assert_eq!((better.flops_per_s, better.read_bytes_per_s), (552e9, 20e9));
    }
}
