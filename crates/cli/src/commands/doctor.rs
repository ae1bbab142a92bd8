//! `strobe doctor`: what this machine offers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;
use strobe_engine::engine_dir::LoadedModel;
use strobe_engine::{EngineError, memory};
use strobe_kernels_cpu::{Cpu, Tier, measure};
use strobe_kernels_cuda::library::{self, Lib};
use strobe_kernels_cuda::{Arch, CudaError, DeviceInfo};
use strobe_model::ModelError;
use strobe_report::human;
use strobe_stats::{Interval, bootstrap_interval, median};

use crate::device::Needs;
use crate::machine::{self, Machine, MeasuredPeaks};
use crate::model_args::CpuArgs;
use crate::noise::measure as measure_noise;
use crate::{device, nsys, output};

const EXAMPLES: &str = "EXAMPLES:
  strobe doctor
  strobe doctor --json
  strobe doctor --noise --engine-dir E --dataset d.jsonl   how much equal runs of this workload differ here
  strobe doctor --engine E             compare every weight of an engine with its checksum
  strobe doctor --peaks                measure all peaks anew, in place of the cached ones
  strobe doctor --peaks read --json    one reading of the bandwidth, in half a second
  STROBE_CPU=avx2 strobe doctor        what another instruction set would reach";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub(crate) struct Args {
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Verify an engine directory against the checksums of its build, and do nothing else; exit code 1 if it is damaged
    #[arg(long, value_name = "DIR", conflicts_with = "peaks")]
    engine: Option<PathBuf>,
    /// Measure how much equal runs differ (A/A), and remember it for comparisons where a side has a single run
    #[arg(long, conflicts_with_all = ["engine", "peaks"])]
    noise: bool,
    /// Engine of --noise [default: the embedded one]
    #[arg(long, value_name = "DIR", requires = "noise")]
    engine_dir: Option<PathBuf>,
    /// Requests of --noise
    #[arg(long, value_name = "FILE", requires = "noise")]
    dataset: Option<PathBuf>,
    /// Runs of --noise, each in its own process [default: 10]
    #[arg(long, value_name = "N", requires = "noise")]
    runs: Option<usize>,
    /// Further options of `strobe bench` for --noise
    #[arg(last = true, value_name = "OPTIONS", requires = "noise")]
    options: Vec<String>,
    /// Measure these peaks and print nothing else: without a list all of them, which replace the cached ones, else the better
    /// of each and its cached value is kept
    #[arg(long, value_enum, value_name = "PEAK,..", value_delimiter = ',', num_args = 0..=1)]
    peaks: Option<Vec<Peak>>,
    #[command(flatten)]
    cpu: CpuArgs,
}

/// One of the machine's ceilings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Peak {
    /// float32 FLOP/s
    Float32,
    /// bfloat16 FLOP/s; float32's where the CPU has no bfloat16 instructions
    Bfloat16,
    /// int8 operations per second
    Int8,
    /// Bytes per second of a streaming read
    Read,
    /// Bytes per second of a streaming copy, read and written together
    Copy,
}

impl Peak {
    /// Its name in JSON.
    fn name(self) -> &'static str {
        match self {
            Peak::Float32 => "flops_per_s",
            Peak::Bfloat16 => "bf16_flops_per_s",
            Peak::Int8 => "int8_ops_per_s",
            Peak::Read => "read_bytes_per_s",
            Peak::Copy => "copy_bytes_per_s",
        }
    }

    fn measure(self, cpu: &mut Cpu) -> f64 {
        const LONG: Duration = measure::THOROUGH;
        match self {
            Peak::Float32 => measure::peak_flops_f32(cpu, LONG),
            Peak::Bfloat16 => measure::peak_flops_bf16(cpu, LONG).unwrap_or_else(|| measure::peak_flops_f32(cpu, LONG)),
            Peak::Int8 => measure::peak_ops_int8(cpu, LONG),
            Peak::Read => measure::read_bandwidth(cpu, LONG),
            Peak::Copy => measure::copy_bandwidth(cpu, LONG),
        }
    }

    /// What is known of it, where anything is.
    fn of(self, peaks: &MeasuredPeaks) -> Option<f64> {
        let value = match self {
            Peak::Float32 => Some(peaks.flops_per_s),
            Peak::Bfloat16 => peaks.bf16_flops_per_s,
            Peak::Int8 => peaks.int8_ops_per_s,
            Peak::Read => Some(peaks.read_bytes_per_s),
            Peak::Copy => Some(peaks.copy_bytes_per_s),
        };
        value.filter(|value| *value > 0.0)
    }

    fn set(self, peaks: &mut MeasuredPeaks, value: f64, has_bf16: bool) {
        match self {
            Peak::Float32 => peaks.flops_per_s = value,
            Peak::Bfloat16 if has_bf16 => peaks.bf16_flops_per_s = Some(value),
            Peak::Bfloat16 => peaks.flops_per_s = peaks.flops_per_s.max(value),
            Peak::Int8 => peaks.int8_ops_per_s = Some(value),
            Peak::Read => peaks.read_bytes_per_s = value,
            Peak::Copy => peaks.copy_bytes_per_s = value,
        }
    }

    fn words(self, value: f64) -> String {
        match self {
            Peak::Float32 => format!("{} f32", human::flops_per_s(value)),
            Peak::Bfloat16 => format!("{} bfloat16", human::flops_per_s(value)),
            Peak::Int8 => format!("{} int8", human::ops_per_s(value)),
            Peak::Read => format!("{} read", human::bytes_per_s(value)),
            Peak::Copy => format!("{} copy (read + written)", human::bytes_per_s(value)),
        }
    }
}

const ALL_PEAKS: [Peak; 5] = [Peak::Float32, Peak::Bfloat16, Peak::Int8, Peak::Read, Peak::Copy];

/// What was cached of these peaks, under the names of JSON.
fn cached_json(peaks: &[Peak], before: Option<&MeasuredPeaks>) -> serde_json::Value {
    let known = peaks.iter().filter_map(|peak| Some((peak.name().to_string(), json!(peak.of(before?)?))));
    known.collect::<serde_json::Map<_, _>>().into()
}

/// Measure some peaks and keep the better of each and its cached value, or all of them and replace what is cached.
fn print_peaks(args: &Args, peaks: &[Peak], cpu: &mut Cpu) {
    let all = peaks.is_empty();
    let peaks = if all { &ALL_PEAKS } else { peaks };
    let before = machine::cached_peaks(cpu);
    let measured: Vec<(Peak, f64)> = peaks.iter().map(|peak| (*peak, peak.measure(cpu))).collect();
    let has_bf16 = cpu.tier().multiplies_pairs();
    machine::remember_measured(cpu, all, |peaks| {
        measured.iter().for_each(|(peak, value)| peak.set(peaks, *value, has_bf16))
    });
    if args.json {
        let values: serde_json::Map<_, _> =
            measured.into_iter().map(|(peak, value)| (peak.name().into(), json!(value))).collect();
        let document = json!({
            "peaks": values,
            "cached_before": cached_json(peaks, before.as_ref()),
            "replaced": all,
            "threads": cpu.threads(),
            "tier": cpu.tier().name(),
        });
        return output::line(&format!("{document:#}"));
    }
    for (peak, value) in measured {
        let cached = before.as_ref().and_then(|before| peak.of(before));
        let replaced = if all { ", replaced" } else { "" };
        let cached = cached
            .map_or("nothing cached before".into(), |value| format!("cached before: {}{replaced}", peak.words(value)));
        output::line(&format!("{}, {} threads, {} ({cached})", peak.words(value), cpu.threads(), cpu.tier().name()));
    }
}

/// What reading the machine's part costs an iteration.
#[derive(serde::Serialize)]
struct ReadingCost {
    /// Threads whose waits were read; 0 where the system does not tell them.
    threads: usize,
    readings: usize,
    median_ns: f64,
    /// 95 % bootstrap interval of the median.
    interval_ns: Option<Interval>,
}

/// Readings that are timed one by one.
const READINGS: usize = 1000;

impl ReadingCost {
    fn measure(cpu: &Cpu) -> Option<ReadingCost> {
        let (threads, costs) = strobe_engine::host::reading_costs_ns(cpu, READINGS);
        let costs: Vec<f64> = costs.into_iter().map(|ns| ns as f64).collect();
        let interval_ns = bootstrap_interval(&costs, median, 1000, 0.95, 1);
        Some(ReadingCost { threads, readings: costs.len(), median_ns: median(&costs)?, interval_ns })
    }

    fn words(&self) -> String {
        let interval = self.interval_ns.as_ref().map_or(String::new(), |interval| {
            format!(" (95 % CI {} to {})", human::ns(interval.low), human::ns(interval.high))
        });
        let what = match self.threads {
            0 => "page faults and switches; the system does not tell CPU waits".to_string(),
            1 => "CPU waits of 1 thread, page faults, switches".to_string(),
            threads => format!("CPU waits of {threads} threads, page faults, switches"),
        };
        format!("{} per iteration{interval}, median of {} readings: {what}", human::ns(self.median_ns), self.readings)
    }
}

/// An engine is not as it was built.
#[derive(Debug)]
pub(crate) struct Damaged(String);

impl std::fmt::Display for Damaged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Damaged {}

/// Compares every weight of an engine with its checksum.
fn verify(dir: &Path, as_json: bool, cpu: &mut Cpu) -> Result<()> {
    const REMEDY: &str = "rebuild the engine with `strobe build`, or copy it again";
    let model = match LoadedModel::open(dir) {
        // Its configuration was read: this is an engine, but its file of weights is cut or damaged.
        Err(EngineError::Model(problem @ ModelError::SafeTensors { .. })) => {
            bail!(Damaged(format!("{problem}; {REMEDY}")))
        }
        model => model?,
    };
    let file = model.weights.file().map_or_else(|| dir.to_path_buf(), Path::to_path_buf);
    let start = std::time::Instant::now();
    let check = model.weights.check(cpu).unwrap_or_default();
    let seconds = start.elapsed().as_secs_f64();
    let total = check.intact + check.unchecked + check.damaged.len();
    if as_json {
        let damaged: Vec<_> = check.damaged.iter().map(|damage| damage.tensor.as_str()).collect();
        let document = json!({
            "engine_dir": dir, "file": file, "tensors": total, "intact": check.intact, "unchecked": check.unchecked,
            "damaged": damaged, "bytes": check.bytes, "seconds": seconds,
        });
        output::line(&format!("{document:#}"));
    } else {
        let mut facts = vec![("engine", dir.display().to_string())];
        facts.push(("tensors", format!("{total}: {} intact, {} damaged", check.intact, check.damaged.len())));
        if check.unchecked > 0 {
            let why = "no checksum, from a build before there were any; rebuild the engine to add them";
            facts.push(("unchecked", format!("{} ({why})", check.unchecked)));
        }
        let rate = human::bytes_per_s(check.bytes as f64 / seconds.max(1e-9));
        facts.push(("read", format!("{} in {seconds:.2} s ({rate})", human::bytes(check.bytes))));
        output::facts(&facts);
    }
    if check.damaged.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = check.damaged.iter().map(|damage| format!("`{}`", damage.tensor)).collect();
    let s = if names.len() == 1 { "" } else { "s" };
    bail!(Damaged(format!("{}: damaged tensor{s} {}; {REMEDY}", file.display(), names.join(", "))))
}

/// A/A runs where nobody says how many.
const NOISE_RUNS: usize = 10;

fn noise(args: Args) -> Result<()> {
    let runs = args.runs.unwrap_or(NOISE_RUNS);
    if !(measure_noise::FEWEST..=1000).contains(&runs) {
        bail!("--runs: {runs} runs; expected {} to 1000", measure_noise::FEWEST);
    }
    let threads = args.cpu.threads.iter().flat_map(|threads| ["--threads".to_owned(), threads.to_string()]);
    let options = threads.chain(args.options).collect();
    let (engine_dir, dataset) = (args.engine_dir, args.dataset);
    measure_noise::run(&measure_noise::Task { engine_dir, dataset, runs, options, json: args.json })
}

pub(crate) fn run(args: Args) -> Result<()> {
    if args.noise {
        return noise(args);
    }
    let mut cpu = args.cpu.open()?;
    if let Some(dir) = &args.engine {
        return verify(dir, args.json, &mut cpu);
    }
    if let Some(peaks) = &args.peaks {
        print_peaks(&args, peaks, &mut cpu);
        return Ok(());
    }
    let machine = Machine::describe(&cpu);
    let before = machine::cached_peaks(&cpu);
    let peaks = machine::measure_peaks(&mut cpu);
    let reading = ReadingCost::measure(&cpu);
    let tiers: Vec<_> = Tier::available().iter().map(|t| t.name()).collect();
    let available = memory::available();
    let gpus = strobe_kernels_cuda::devices();
    let auto = device::first_gpu(Needs::ENGINE);
    let cache = kernel_cache();
    let nsys = nsys::search();

    if args.json {
        let libraries: serde_json::Map<_, _> =
            Lib::ALL.iter().map(|lib| (lib.name().into(), library_json(*lib))).collect();
        let document = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "machine": machine,
            "simd": {"tier": cpu.tier().name(), "available": tiers, "forced_by": std::env::var("STROBE_CPU").ok()},
            "memory": {"total_bytes": memory::total(), "available_bytes": available.map(|a| a.bytes),
                       "limited_by_cgroup": available.map(|a| a.limited_by_cgroup)},
            "peaks": {"flops_per_s": peaks.flops_per_s, "int8_ops_per_s": peaks.int8_ops_per_s,
                      "bf16_flops_per_s": peaks.bf16_flops_per_s, "read_bytes_per_s": peaks.read_bytes_per_s,
                      "copy_bytes_per_s": peaks.copy_bytes_per_s, "threads": cpu.threads(), "tier": cpu.tier().name()},
            "cached_peaks_before": cached_json(&ALL_PEAKS, before.as_ref()),
            "host_reading": reading,
            "gpus": gpus.as_ref().ok(), "no_gpu_because": gpus.as_ref().err().map(ToString::to_string),
            "auto_device": if auto.is_ok() { "cuda:0" } else { "cpu" },
            "cuda_libraries": libraries, "cuda_library_places": library::places(),
            "kernel_cache": cache.as_ref().map(|c| json!({"directory": c.directory, "files": c.files, "bytes": c.bytes})),
            "nsys": nsys,
        });
        output::line(&format!("{document:#}"));
        return Ok(());
    }
    let memory_text = match (memory::total(), available) {
        (Some(total), Some(free)) => {
            let limit = if free.limited_by_cgroup { " (limited by a control group)" } else { "" };
            format!("{}, {} available{limit}", human::bytes(total), human::bytes(free.bytes))
        }
        _ => "not known".into(),
    };
    let forced = std::env::var("STROBE_CPU").map(|v| format!(", forced by STROBE_CPU={v}")).unwrap_or_default();
    let mut facts = vec![
        ("cpu", format!("{}, {} cores for this process", machine.cpu, machine.cores)),
        ("simd tier", format!("{}{forced} (this machine has: {})", cpu.tier().name(), tiers.join(", "))),
        ("memory", memory_text),
        (
            "peak compute",
            format!(
                "{}, {} threads, register-resident FMA chains and dot products",
                peaks.compute_text(),
                cpu.threads()
            ),
        ),
        (
            "memory bandwidth",
            format!(
                "{} read, {} copy (read + written), {} threads",
                human::bytes_per_s(peaks.read_bytes_per_s),
                human::bytes_per_s(peaks.copy_bytes_per_s),
                cpu.threads()
            ),
        ),
        (
            "balance",
            format!(
                "{:.1} FLOP per byte: ops below this are bound by memory",
                peaks.flops_per_s / peaks.read_bytes_per_s
            ),
        ),
    ];
    let known = before.iter().flat_map(|before| ALL_PEAKS.iter().filter_map(|peak| Some(peak.words(peak.of(before)?))));
    let known = known.collect::<Vec<_>>().join(", ");
    facts.push((
        "cached before",
        match known.is_empty() {
            true => "nothing; what was measured now is remembered".into(),
            false => format!("{known}; of both readings the better one is kept"),
        },
    ));
    facts.extend(reading.map(|reading| ("iteration readings", reading.words())));
    match &gpus {
        Ok(list) => facts.extend(list.iter().map(|gpu| ("gpu", describe(gpu)))),
        Err(_) if library::open(Lib::Driver).is_err() => {
            facts.push(("gpu", "none: there is no NVIDIA driver (libcuda); strobe runs on the CPU".into()))
        }
        Err(reason) => facts.push(("gpu", format!("none: {reason}"))),
    }
    facts.push(("--device auto", auto.map_or_else(|_| "cpu".into(), |()| "cuda:0".to_string())));
    for lib in Lib::ALL {
        facts.push((lib.name(), library_text(lib)));
    }
    facts.push(("searched", format!("the loader's path, {}", library::searched())));
    facts.push((
        "kernel cache",
        cache.map_or("no place for it: neither HOME, XDG_CACHE_HOME nor STROBE_CACHE_DIR is set".into(), |c| {
            format!("{}, {} files, {}", c.directory.display(), c.files, human::bytes(c.bytes))
        }),
    ));
    let no_nsys = || format!("not found on {}; `strobe profile` says where to get it", nsys::PLACES);
    facts.push(("nsys", nsys.map_or_else(no_nsys, |p| p.display().to_string())));
    output::facts(&facts);
    Ok(())
}

fn describe(gpu: &DeviceInfo) -> String {
    let (major, minor) = gpu.compute_capability;
    let supported = match Arch::of(gpu) {
        Ok(arch) => format!("kernels for {}", arch.name()),
        Err(_) => "not supported".into(),
    };
    format!(
        "cuda:{} {}, compute capability {major}.{minor} ({supported}), {} multiprocessors, {}, driver for CUDA {}.{}",
        gpu.index,
        gpu.name,
        gpu.multiprocessors,
        human::bytes(gpu.memory_bytes),
        gpu.driver_cuda / 1000,
        gpu.driver_cuda % 1000 / 10
    )
}

fn library_text(lib: Lib) -> String {
    match library::open(lib) {
        Ok(found) => {
            let version = library::version(lib).map(|v| format!(" ({v})")).unwrap_or_default();
            format!("{}{version}", found.file().display())
        }
        Err(CudaError::LibraryMissing { names, remedy, .. }) => format!("not found (looked for {names}); {remedy}"),
        Err(problem) => problem.to_string(),
    }
}

fn library_json(lib: Lib) -> serde_json::Value {
    match library::open(lib) {
        Ok(found) => json!({"path": found.file(), "version": library::version(lib)}),
        Err(problem) => json!({"path": null, "problem": problem.to_string()}),
    }
}

/// The directory of compiled kernels and what it holds.
struct KernelCache {
    directory: PathBuf,
    files: usize,
    bytes: u64,
}

fn kernel_cache() -> Option<KernelCache> {
    let directory = strobe_kernels_cuda::kernel_cache_dir()?;
    let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
    let sizes: Vec<u64> = entries.filter_map(|e| e.metadata().ok()).filter(|m| m.is_file()).map(|m| m.len()).collect();
    Some(KernelCache { directory, files: sizes.len(), bytes: sizes.iter().sum() })
}
