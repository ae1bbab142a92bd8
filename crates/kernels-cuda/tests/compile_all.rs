//! Every kernel file compiles for every supported architecture, and its kernels take the arguments that
//! `kernel_arguments.txt` says, by which the launch goldens read what is launched. Needs NVRTC and no GPU.
//!
//! `.ci/nvrtc` puts NVRTC under the target directory, where this test finds it; without any NVRTC it says that it
//! skipped. What compiled is kept there too, so that only changed files are compiled again.

mod cubin_arguments;

use std::collections::BTreeMap;
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
    let arguments: Mutex<BTreeMap<String, Vec<u32>>> = Mutex::default();
    // Of one architecture after the other: a kernel's arguments are the same on all.
    let note = |code: &[u8]| -> Option<String> {
        let found = match cubin_arguments::read(code) {
            Ok(found) => found,
            Err(problem) => return Some(problem.to_string()),
        };
        let mut all = arguments.lock().unwrap();
        let mut differs = Vec::new();
        for (kernel, sizes) in found {
            let known = all.entry(kernel.clone()).or_insert_with(|| sizes.clone());
            if *known != sizes {
                differs.push(format!("{kernel} takes {sizes:?} and elsewhere {known:?}"));
            }
        }
        (!differs.is_empty()).then(|| differs.join("; "))
    };
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get()).min(wanted.len());
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((source, arch)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let begin = Instant::now();
                    let (how, problem) = match cubin(source, *arch, Some(&kept)) {
                        Ok((code, Origin::Cache)) => ("unchanged", note(&code)),
                        Ok((code, Origin::Compiler | Origin::CompilerOnly(_))) => ("compiled", note(&code)),
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
    check_table(&arguments.into_inner().unwrap());
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!("{} checked with NVRTC {version} in {seconds:.1} s by {workers} workers", wanted.len());
}

/// Compare with the committed table, or write it where `STROBE_RECORD_GOLDENS` is set.
fn check_table(arguments: &BTreeMap<String, Vec<u32>>) {
    const HEAD: &str = "# Bytes of each argument of each kernel, as machine code has them (KPARAM_INFO).\n\
        # Written by `STROBE_RECORD_GOLDENS=1 cargo test -p strobe-kernels-cuda --test compile_all`.\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernel_arguments.txt");
    let line = |(kernel, sizes): (&String, &Vec<u32>)| {
        let sizes: Vec<String> = sizes.iter().map(u32::to_string).collect();
        format!("{kernel} {}\n", sizes.join(" "))
    };
    let new = format!("{HEAD}{}", arguments.iter().map(line).collect::<String>());
    if std::env::var_os("STROBE_RECORD_GOLDENS").is_some() {
        std::fs::write(path, new).unwrap();
        return;
    }
    let old = std::fs::read_to_string(path).unwrap_or_default();
    let only =
        |a: &str, b: &str| a.lines().filter(|line| !b.lines().any(|l| l == *line)).collect::<Vec<_>>().join("\n");
    assert!(
        old == new,
        "kernels take other arguments than tests/kernel_arguments.txt says; where that is intended, record it with \
         `STROBE_RECORD_GOLDENS=1 cargo test -p strobe-kernels-cuda --test compile_all`\nthe table has\n{}\nthe kernels have\n{}",
        only(&old, &new),
        only(&new, &old)
    );
}
