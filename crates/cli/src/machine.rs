//! The machine: what it is, and what it can do at most (measured once, then remembered).

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use strobe_engine::device::DeviceFacts;
use strobe_engine::{BuildConfig, EngineError, Quantization, memory};
use strobe_kernels_cpu::{Cpu, measure};
use strobe_kernels_cuda::{DeviceInfo, Gpu, Precision};
use strobe_model::DType;
use strobe_report::human;
use strobe_trace::Peaks;

use crate::{interrupt, progress, run_dir};

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Name of the processor.
pub fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find(|l| l.starts_with("model name")).and_then(|l| l.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

/// What a report says of the machine.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
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
    pub fn describe(cpu: &Cpu) -> Machine {
        Machine::of(&DeviceFacts::Cpu { tier: cpu.tier(), threads: cpu.threads() })
    }

    /// A machine on which another runtime computes with so many threads, or on this GPU.
    pub fn plain(threads: usize, gpu: Option<DeviceInfo>) -> Machine {
        Machine {
            simd_tier: None,
            gpu,
            ..Machine::of(&DeviceFacts::Cpu { tier: strobe_kernels_cpu::Tier::Scalar, threads })
        }
    }

    pub fn of(device: &DeviceFacts) -> Machine {
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
pub struct MeasuredPeaks {
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
}

fn fma_chains() -> String {
    "f32 FMA chains and streaming read".into()
}

fn once() -> String {
    "once, cached".into()
}

impl MeasuredPeaks {
    /// Each ceiling as the better of two readings gave it.
    pub fn better_of(&self, other: &MeasuredPeaks) -> MeasuredPeaks {
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
    pub fn of_products(&self, build: &BuildConfig) -> (f64, &str) {
        let in_pairs = build.dtype == DType::Bf16 && build.gemm_plugin;
        let apart = match build.quantization.is_integer() {
            true => self.int8_ops_per_s.map(|ops| (ops, "int8")),
            false => self.bf16_flops_per_s.filter(|_| in_pairs).map(|flops| (flops, "bfloat16")),
        };
        match apart {
            Some(apart) => apart,
            None if self.flops_of == fma_chains() => (self.flops_per_s, "f32"),
            None => (self.flops_per_s, &self.flops_of),
        }
    }

    /// The arithmetic ceilings of a CPU, in words.
    pub fn compute_text(&self) -> String {
        let bf16 = self.bf16_flops_per_s.map(|flops| format!(", {} bfloat16", human::flops_per_s(flops)));
        let int8 = self.int8_ops_per_s.map(|ops| format!(", {} int8", human::ops_per_s(ops)));
        let [bf16, int8] = [bf16, int8].map(Option::unwrap_or_default);
        format!("{} f32{bf16}{int8}", human::flops_per_s(self.flops_per_s))
    }

    /// For a trace's roofline.
    pub fn for_trace(&self) -> Peaks {
        Peaks {
            flops_per_s: self.flops_per_s,
            int8_ops_per_s: self.int8_ops_per_s,
            bf16_flops_per_s: self.bf16_flops_per_s,
            bytes_per_s: self.read_bytes_per_s,
            note: format!("measured: {} ({})", self.flops_of, self.key),
        }
    }
}

/// Memory bandwidth of a shared machine is not a constant: neighbours take from it, and it can double within a minute.
/// A long run is therefore held against what the machine gave right before and right after it. A short one is held
/// against the cached figure, because the readings would take longer than the run.
pub struct BandwidthFrame {
    cpu: Cpu,
    last: f64,
}

/// From this length on a run is framed by readings.
const LONG_RUN_SECONDS: f64 = 1.0;

impl BandwidthFrame {
    /// Take the first reading, if a run of `seconds` is worth it.
    pub fn open(tier: strobe_kernels_cpu::Tier, threads: usize, seconds: f64) -> Option<BandwidthFrame> {
        (seconds >= LONG_RUN_SECONDS).then(|| {
            let mut cpu = Cpu::new(tier, threads);
            let last = measure::read_bandwidth(&mut cpu);
            BandwidthFrame { cpu, last }
        })
    }

    /// Take a reading after a run; the larger of the two around it is the run's denominator. A run whose fastest kind
    /// of iteration `achieved` more than that met a better moment than both readings: then the cached figure is taken.
    pub fn close(&mut self, peaks: &MeasuredPeaks, achieved: f64) -> MeasuredPeaks {
        let (before, after) = (self.last, measure::read_bandwidth(&mut self.cpu));
        self.last = after;
        if achieved > before.max(after) && peaks.read_bytes_per_s > before.max(after) {
            let bandwidth_measured = format!(
                "once, cached: this run was faster than the readings before ({:.1}) and after it ({:.1})",
                before / 1e9,
                after / 1e9
            );
            return MeasuredPeaks { bandwidth_measured, ..peaks.clone() };
        }
        let framed = MeasuredPeaks {
            read_bytes_per_s: before.max(after),
            bandwidth_measured: format!(
                "right before ({:.1}) and after ({:.1}) this run, the larger one",
                before / 1e9,
                after / 1e9
            ),
            ..peaks.clone()
        };
        if framed.read_bytes_per_s > peaks.read_bytes_per_s {
            remember(&framed);
        }
        framed
    }
}

fn key(cpu: &Cpu) -> String {
    format!("{}, {} threads of {} cores, {}", cpu_name(), cpu.threads(), cores(), cpu.tier().name())
}

/// A file of the cache that outlives runs.
pub fn cache_file(name: &str) -> Option<PathBuf> {
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
pub fn peaks(cpu: &mut Cpu) -> MeasuredPeaks {
    let key = key(cpu);
    let known = cached().into_iter().find(|p| {
        p.key == key && p.flops_per_s > 0.0 && p.read_bytes_per_s > 0.0 && p.int8_ops_per_s.is_some_and(|x| x > 0.0)
    });
    known.unwrap_or_else(|| measure_peaks(cpu))
}

/// Measure the ceilings now and remember the best.
pub fn measure_peaks(cpu: &mut Cpu) -> MeasuredPeaks {
    let spinner = progress::spinner("measuring peak FLOP/s and memory bandwidth");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let peaks = MeasuredPeaks {
        key: key(cpu),
        flops_per_s: measure::peak_flops_f32(cpu),
        int8_ops_per_s: Some(measure::peak_ops_int8(cpu)),
        bf16_flops_per_s: measure::peak_flops_bf16(cpu),
        read_bytes_per_s: measure::read_bandwidth(cpu),
        copy_bytes_per_s: measure::copy_bandwidth(cpu),
        measured_at: now.as_secs(),
        flops_of: fma_chains(),
        bandwidth_measured: once(),
    };
    spinner.finish_and_clear();
    remember(&peaks);
    peaks
}

/// The ceilings of a GPU for engines built like `build`: a large matrix product of its type, and a copy in its memory.
pub fn gpu_peaks(index: u32, build: &BuildConfig) -> Result<MeasuredPeaks, EngineError> {
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
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let peaks = MeasuredPeaks {
        key,
        flops_per_s: measured.flops_per_s,
        int8_ops_per_s: None,
        bf16_flops_per_s: None,
        read_bytes_per_s: measured.copy_bytes_per_s,
        copy_bytes_per_s: measured.copy_bytes_per_s,
        measured_at: now.as_secs(),
        flops_of: format!("{kind} matrix product with 8192 x 8192 weights by {}, and device copy", measured.by),
        bandwidth_measured: once(),
    };
    remember(&peaks);
    Ok(peaks)
}

/// Keep the best that was ever read: a peak is what the machine can do, not what it did last time. A cache that can't be
/// written costs a second next time, nothing else.
fn remember(peaks: &MeasuredPeaks) {
    let mut all = cached();
    let mut best = peaks.clone();
    if let Some(known) = all.iter().find(|p| p.key == peaks.key) {
        best = best.better_of(known);
    }
    best.bandwidth_measured = once();
    all.retain(|p| p.key != best.key);
    all.push(best);
    if let (Some(path), Ok(text)) = (cache_file("peaks.json"), serde_json::to_string_pretty(&all))
        && matches!(path.parent().map(fs::create_dir_all), Some(Ok(())))
    {
        let _ = run_dir::write_whole(&path, text.as_bytes());
    }
}
