//! `strobe doctor`: what this machine offers.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::json;
use strobe_engine::memory;
use strobe_kernels_cpu::Tier;
use strobe_report::human;

use crate::machine::{self, Machine};
use crate::model_args::CpuArgs;
use crate::output;

const EXAMPLES: &str = "EXAMPLES:
  strobe doctor
  strobe doctor --json
  STROBE_CPU=avx2 strobe doctor        what another instruction set would reach";

#[derive(clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cpu: CpuArgs,
}

/// Libraries the CUDA backend would load.
const CUDA_LIBRARIES: [&str; 6] =
    ["libcuda.so.1", "libnvrtc.so", "libcublasLt.so", "libcupti.so", "libnccl.so", "libnvidia-ml.so.1"];

pub fn run(args: Args) -> Result<()> {
    let mut cpu = args.cpu.open()?;
    let machine = Machine::describe(&cpu);
    let peaks = machine::measure_peaks(&mut cpu);
    let tiers: Vec<_> = Tier::available().iter().map(|t| t.name()).collect();
    let available = memory::available();
    let gpus = gpus();
    let libraries: Vec<_> = CUDA_LIBRARIES.iter().map(|name| (*name, find_library(name))).collect();
    let nsys = find_nsys();

    if args.json {
        let found: serde_json::Map<_, _> =
            libraries.iter().map(|(name, path)| (name.to_string(), json!(path))).collect();
        let document = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "machine": machine,
            "simd": {"tier": cpu.tier().name(), "available": tiers, "forced_by": std::env::var("STROBE_CPU").ok()},
            "memory": {"total_bytes": memory::total(), "available_bytes": available.map(|a| a.bytes),
                       "limited_by_cgroup": available.map(|a| a.limited_by_cgroup)},
            "peaks": {"flops_per_s": peaks.flops_per_s, "read_bytes_per_s": peaks.read_bytes_per_s,
                      "copy_bytes_per_s": peaks.copy_bytes_per_s, "threads": cpu.threads(), "tier": cpu.tier().name()},
            "gpus": gpus.as_ref().ok(), "no_gpu_because": gpus.as_ref().err(),
            "cuda_libraries": found, "nsys": nsys,
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
                "{} f32, {} threads, register-resident FMA chains",
                human::flops_per_s(peaks.flops_per_s),
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
        Ok(list) => facts.extend(list.iter().map(|gpu| ("gpu", gpu.clone()))),
        Err(reason) => facts.push(("gpu", format!("none: {reason}"))),
    }
    for (name, path) in &libraries {
        facts.push((name, path.as_ref().map_or("not found".into(), |p| p.display().to_string())));
    }
    facts.push((
        "nsys",
        nsys.map_or("not found on PATH or under /opt/nvidia (Nsight Systems)".into(), |p| p.display().to_string()),
    ));
    output::facts(&facts);
    Ok(())
}

/// GPUs by name, or why there are none.
fn gpus() -> Result<Vec<String>, String> {
    let root = Path::new("/proc/driver/nvidia/gpus");
    let Ok(entries) = std::fs::read_dir(root) else {
        return Err("the NVIDIA driver is not loaded (no /proc/driver/nvidia); strobe runs on the CPU".into());
    };
    let name = |path: PathBuf| {
        let text = std::fs::read_to_string(path.join("information")).unwrap_or_default();
        let model = text.lines().find_map(|l| l.strip_prefix("Model:")).map(|m| m.trim().to_string());
        model.unwrap_or_else(|| path.display().to_string())
    };
    let list: Vec<_> = entries.flatten().map(|e| name(e.path())).collect();
    if list.is_empty() { Err("the NVIDIA driver is loaded but lists no GPU".into()) } else { Ok(list) }
}

/// Where the loader would find a library: its usual folders, with any version behind the name.
fn find_library(name: &str) -> Option<PathBuf> {
    let from_env = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/cuda/lib64",
        "/usr/local/cuda/extras/CUPTI/lib64",
    ];
    let folders = from_env.split(':').filter(|f| !f.is_empty()).chain(usual);
    folders
        .filter_map(|folder| std::fs::read_dir(folder).ok())
        .flat_map(|entries| entries.flatten())
        .map(|e| e.path())
        .find(|path| {
            path.file_name()
                .and_then(|f| f.to_str())
                .is_some_and(|f| f == name || f.strip_prefix(name).is_some_and(|rest| rest.starts_with('.')))
        })
}

/// Nsight Systems, on the PATH or where its installers put it.
fn find_nsys() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|p| p.join("nsys")).find(|p| p.is_file());
    let versions =
        |root: &str| std::fs::read_dir(root).into_iter().flatten().flatten().map(|e| e.path()).collect::<Vec<_>>();
    let installed = || {
        let systems = versions("/opt/nvidia/nsight-systems").into_iter().map(|p| p.join("target-linux-x64/nsys"));
        let compute = versions("/opt/nvidia/nsight-compute").into_iter().map(|p| p.join("host/target-linux-x64/nsys"));
        systems.chain(compute).find(|p| p.is_file())
    };
    on_path.or_else(installed)
}
