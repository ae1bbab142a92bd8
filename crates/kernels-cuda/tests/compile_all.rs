//! Every kernel file compiles for every supported architecture. Needs NVRTC and no GPU.
//!
//! `.ci/nvrtc` puts NVRTC under the target directory, where this test finds it; without any NVRTC it says that it
//! skipped. What compiled is kept there too, so that only changed files are compiled again.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use strobe_kernels_cuda::{Arch, KernelSource, Origin, SOURCES, SUPPORTED_ARCHS, cubin, nvrtc_version};

/// Where `.ci/nvrtc` unpacks the wheel.
fn fetched() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?;
    Some(target.join("nvrtc/nvidia/cu13")).filter(|path| path.is_dir())
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    if std::env::var_os("STROBE_CUDA_PATH").is_none()
        && let Some(path) = fetched()
    {
        // SAFETY: this is the only test of its process and no other thread runs yet that reads the environment.
        unsafe { std::env::set_var("STROBE_CUDA_PATH", path) };
    }
    let version = match nvrtc_version() {
        Ok((major, minor)) => format!("{major}.{minor}"),
        Err(problem) => {
            eprintln!("skipped: {problem}; `.ci/nvrtc` fetches it");
            return;
        }
    };
    let mut wanted: Vec<(&KernelSource, Arch)> = SOURCES
        .iter()
        .flat_map(|source| SUPPORTED_ARCHS.map(|arch| (source, arch)))
        .filter(|(source, arch)| source.min_arch <= arch.number())
        .collect();
    // Long files first, so that no worker is left alone with one at the end.
    wanted.sort_by_key(|(source, _)| std::cmp::Reverse(source.text.len()));
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cubins");
    std::fs::create_dir_all(&kept).unwrap();
    let (next, problems) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get()).min(wanted.len());
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((source, arch)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let begin = Instant::now();
                    let (how, problem) = match cubin(source, *arch, Some(&kept)) {
                        Ok((code, _)) if !code.starts_with(b"\x7fELF") => ("odd", Some("no machine code".into())),
                        Ok((_, Origin::Cache)) => ("unchanged", None),
                        Ok((_, Origin::Compiler | Origin::CompilerOnly(_))) => ("compiled", None),
                        Err(problem) => ("failed", Some(problem.to_string())),
                    };
                    let (file, arch, seconds) = (source.file, arch.name(), begin.elapsed().as_secs_f64());
                    eprintln!("{file} for {arch}: {how}, {seconds:.1} s");
                    problems.lock().unwrap().extend(problem.map(|problem| format!("{file} for {arch}: {problem}")));
                }
            });
        }
    });
    let problems = problems.into_inner().unwrap();
    assert!(problems.is_empty(), "{} of {} do not compile:\n{}", problems.len(), wanted.len(), problems.join("\n\n"));
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!("{} checked with NVRTC {version} in {seconds:.1} s by {workers} workers", wanted.len());
}
