//! `strobe doctor`: what this machine offers.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::json;
use strobe_engine::engine_dir::LoadedModel;
use strobe_engine::{EngineError, memory};
use strobe_kernels_cpu::{Cpu, Tier, measure};
use strobe_kernels_cuda::library::{self, Lib};
use strobe_kernels_cuda::{Arch, CudaError, DeviceInfo};
use strobe_model::ModelError;
use strobe_report::human;

use crate::device::Needs;
use crate::machine::{self, Machine};
use crate::model_args::CpuArgs;
use crate::{device, nsys, output};

const EXAMPLES: &str = "EXAMPLES:
  strobe doctor
  strobe doctor --json
  strobe doctor --engine E             compare every weight of an engine with its checksum
  strobe doctor --peaks read --json    one reading of the bandwidth, in half a second
  STROBE_CPU=avx2 strobe doctor        what another instruction set would reach";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Verify an engine directory against the checksums of its build, and do nothing else; exit code 1 if it is damaged
    #[arg(long, value_name = "DIR", conflicts_with = "peaks")]
    engine: Option<PathBuf>,
    /// Measure these peaks and print nothing else: quick enough to frame a run with
    #[arg(long, value_enum, value_name = "PEAK,..", value_delimiter = ',')]
    peaks: Vec<Peak>,
    #[command(flatten)]
    cpu: CpuArgs,
}

/// One of the machine's ceilings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Peak {
    /// Operations per second of float32 multiply-adds
    Float32,
    /// Operations per second of bfloat16 products: those of float32 where the CPU has none of their own
    Bfloat16,
    /// Operations per second of 8-bit dot products
    Int8,
    /// Bytes per second of a streaming read
    Read,
    /// Bytes per second of a streaming copy, read and written together
    Copy,
}

impl Peak {
    /// Its name in JSON, the value and the value in words.
    fn measure(self, cpu: &mut Cpu) -> (&'static str, f64, String) {
        match self {
            Peak::Float32 => {
                let value = measure::peak_flops_f32(cpu);
                ("flops_per_s", value, format!("{} f32", human::flops_per_s(value)))
            }
            Peak::Bfloat16 => {
                let value = measure::peak_flops_bf16(cpu).unwrap_or_else(|| measure::peak_flops_f32(cpu));
                ("bf16_flops_per_s", value, format!("{} bfloat16", human::flops_per_s(value)))
            }
            Peak::Int8 => {
                let value = measure::peak_ops_int8(cpu);
                ("int8_ops_per_s", value, format!("{} int8", human::ops_per_s(value)))
            }
            Peak::Read => {
                let value = measure::read_bandwidth(cpu);
                ("read_bytes_per_s", value, format!("{} read", human::bytes_per_s(value)))
            }
            Peak::Copy => {
                let value = measure::copy_bandwidth(cpu);
                ("copy_bytes_per_s", value, format!("{} copy (read + written)", human::bytes_per_s(value)))
            }
        }
    }
}

fn print_peaks(args: &Args, cpu: &mut Cpu) {
    let measured: Vec<_> = args.peaks.iter().map(|peak| peak.measure(cpu)).collect();
    if args.json {
        let values: serde_json::Map<_, _> =
            measured.into_iter().map(|(name, value, _)| (name.into(), json!(value))).collect();
        let document = json!({"peaks": values, "threads": cpu.threads(), "tier": cpu.tier().name()});
        return output::line(&format!("{document:#}"));
    }
    for (_, _, words) in measured {
        output::line(&format!("{words}, {} threads, {}", cpu.threads(), cpu.tier().name()));
    }
}

/// An engine is not as it was built.
#[derive(Debug)]
pub struct Damaged(String);

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

pub fn run(args: Args) -> Result<()> {
    let mut cpu = args.cpu.open()?;
    if let Some(dir) = &args.engine {
        return verify(dir, args.json, &mut cpu);
    }
    if !args.peaks.is_empty() {
        print_peaks(&args, &mut cpu);
        return Ok(());
    }
    let machine = Machine::describe(&cpu);
    let peaks = machine::measure_peaks(&mut cpu);
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
