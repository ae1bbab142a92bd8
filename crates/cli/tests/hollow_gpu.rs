//! GPUs that are old, full or faulty, on any machine: the driver and the compiler are stand-ins that answer every call and
//! compute nothing (`hollow_gpu/*.c`). What GPUs compute is `strobe selftest`'s business, on a real one.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use common::hollow::library;
use common::{Done, Sandbox, assert_names, finish};

/// Directories that go on the loader's path.
struct Libraries {
    driver: PathBuf,
    old_driver: PathBuf,
    compiler: PathBuf,
    older_compiler: PathBuf,
}

/// Compiled once, by the compiler that Rust links with.
fn libraries() -> &'static Libraries {
    static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
    LIBRARIES.get_or_init(|| {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hollow-{}", std::process::id()));
        let library = |directory, source, names, options: &[&str]| library(&root, directory, source, names, options);
        Libraries {
            driver: library("driver", "driver.c", ["libcuda.so.1", "libcuda.so"], &[]),
            old_driver: library("old-driver", "driver.c", ["libcuda.so.1", "libcuda.so"], &["-DOLD"]),
            compiler: library("compiler", "compiler.c", ["libnvrtc.so.13", "libnvrtc.so"], &[]),
            older_compiler: library("older", "compiler.c", ["libnvrtc.so.12", "libnvrtc.so.11"], &["-DMAJOR=12"]),
        }
    })
}

/// A sandbox, and a cache of its own for kernels and peaks: what is compiled here must not be loaded elsewhere.
struct Machine {
    sandbox: Sandbox,
    cache: PathBuf,
}

const BENCH: &str = "bench throughput --model micro --dataset d.jsonl --warmup 0 --device cuda --gemm-plugin disable";

impl Machine {
    fn new() -> Machine {
        let (sandbox, elsewhere) = (Sandbox::new(), Sandbox::new());
        sandbox.dataset("d.jsonl", &[(5, 30), (9, 30)]);
        let cache = elsewhere.path("cache");
        std::mem::forget(elsewhere);
        Machine { sandbox, cache }
    }

    fn command(&self, directories: &[&Path], variables: &[(&str, &str)], words: &str) -> Command {
        let mut command = self.sandbox.command(words);
        command.env("LD_LIBRARY_PATH", std::env::join_paths(directories).unwrap());
        command.env("XDG_CACHE_HOME", &self.cache).envs(variables.iter().copied());
        command
    }

    fn usual(&self, variables: &[(&str, &str)], words: &str) -> Command {
        let Libraries { driver, compiler, .. } = libraries();
        self.command(&[driver, compiler], variables, words)
    }

    fn run(&self, variables: &[(&str, &str)], words: &str) -> Done {
        finish(&mut self.usual(variables, words))
    }

    fn refused(&self, variables: &[(&str, &str)], words: &str) -> String {
        self.sandbox.refused_command(&mut self.usual(variables, words))
    }

    fn kernels(&self) -> PathBuf {
        self.cache.join("strobe/kernels")
    }
}

fn assert_runs(done: &Done) {
    assert_eq!(done.code, Some(0), "{}\n{}", done.stdout, done.stderr);
}

#[test]
fn drivers_from_12_4_on_run() {
    let machine = Machine::new();
    let Libraries { old_driver, compiler, .. } = libraries();
    for version in ["12040", "12060", "13000"] {
        let directories: [&Path; 2] = [old_driver, compiler];
        assert_runs(&finish(&mut machine.command(&directories, &[("HOLLOW_DRIVER", version)], BENCH)));
    }
    let message = machine.refused(&[("HOLLOW_DRIVER", "12030")], BENCH);
    assert_names(&message, &["12.3", "too old", "12.4"]);
}

#[test]
fn an_older_driver_gets_the_older_compiler() {
    let machine = Machine::new();
    let Libraries { driver, compiler, older_compiler, .. } = libraries();
    let both: [&Path; 3] = [driver, compiler, older_compiler];
    let compilers = |variables: &[(&str, &str)]| {
        let _ = std::fs::remove_dir_all(machine.kernels());
        assert_runs(&finish(&mut machine.command(&both, variables, BENCH)));
        let names = std::fs::read_dir(machine.kernels()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut versions: Vec<_> = names
            .map(|name| name.to_string_lossy().rsplit_once("-nvrtc").map(|(_, version)| version.to_string()))
            .collect();
        versions.dedup();
        versions
    };
    assert_eq!(compilers(&[("HOLLOW_DRIVER", "12060")]), [Some("12.1.cubin".to_string())]);
    assert_eq!(compilers(&[]), [Some("13.1.cubin".to_string())]);
    // Where there is only a newer one and its code does not load, the reason is named.
    let _ = std::fs::remove_dir_all(machine.kernels());
    let message = machine.refused(&[("HOLLOW_DRIVER", "12060"), ("HOLLOW_FAULT", "cuModuleLoadData:200:0")], BENCH);
    assert_names(&message, &["NVRTC 13.1 is newer than the driver", "CUDA 12.6", "nvidia-cuda-nvrtc-cu12"]);
}

#[test]
fn gpus_that_are_not_there_or_not_supported() {
    let machine = Machine::new();
    let message = machine.refused(&[("HOLLOW_GPUS", "0")], BENCH);
    assert_names(&message, &["there is no GPU 0"]);
    for capability in ["75", "100"] {
        let message = machine.refused(&[("HOLLOW_CAPABILITY", capability)], BENCH);
        assert_names(&message, &["Hollow GPU", "sm_80", "sm_90"]);
        let auto = machine.run(&[("HOLLOW_CAPABILITY", capability)], &BENCH.replace(" --device cuda", ""));
        assert_runs(&auto);
        assert_names(&auto.stderr, &["note: using the CPU", "Hollow GPU"]);
    }
}

#[test]
fn a_run_without_cublaslt_needs_none() {
    let machine = Machine::new();
    let done = machine.run(&[], &BENCH.replace(" --device cuda", ""));
    assert_runs(&done);
    assert!(done.stdout.contains("Hollow GPU"), "{}", done.stdout);
}

#[test]
fn kernels_are_compiled_once_and_then_need_no_compiler() {
    let machine = Machine::new();
    let files = |done: &Done| done.stdout.lines().find(|line| line.starts_with("Kernel files:")).map(str::to_string);
    let count = |text: Option<String>, what: &str| assert_names(&text.unwrap_or_default(), &[what]);
    count(files(&machine.run(&[], BENCH)), " 0 from the cache");
    count(files(&machine.run(&[], BENCH)), " 0 compiled now");
    let without: [&Path; 1] = [&libraries().driver];
    let warm = finish(&mut machine.command(&without, &[], BENCH));
    assert_runs(&warm);
    count(files(&warm), " 0 compiled now");
    // Nor does a GPU that nobody asked for.
    let warm = finish(&mut machine.command(&without, &[], &BENCH.replace(" --device cuda", "")));
    assert_runs(&warm);
    count(files(&warm), " 0 compiled now");

    // What a newer compiler has made need not run on an older driver.
    let older = [("HOLLOW_DRIVER", "12060")];
    let message = machine.sandbox.refused_command(&mut machine.command(&without, &older, BENCH));
    assert_names(&message, &["libnvrtc was not found", "pip install nvidia-cuda-nvrtc-cu12"]);
    let auto = finish(&mut machine.command(&without, &older, &BENCH.replace(" --device cuda", "")));
    assert_runs(&auto);
    assert_names(&auto.stderr, &["note: using the CPU: libnvrtc was not found"]);

    // Every file cut short: they are noticed, and made again where there is a compiler.
    for entry in std::fs::read_dir(machine.kernels()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 3]).unwrap();
    }
    let message = machine.sandbox.refused_command(&mut machine.command(&without, &[], BENCH));
    assert_names(&message, &["libnvrtc was not found", "pip install 'nvidia-cuda-nvrtc==13.*'"]);
    count(files(&machine.run(&[], BENCH)), " 0 from the cache");
    count(files(&machine.run(&[], BENCH)), " 0 compiled now");
}

#[test]
fn a_cache_that_can_t_be_written_to_is_told() {
    let machine = Machine::new();
    let done = machine.run(&[("STROBE_CACHE_DIR", "/proc/nowhere")], BENCH);
    assert_runs(&done);
    assert_names(&done.stderr, &["kernels could not be kept", "/proc/nowhere/kernels", "STROBE_CACHE_DIR"]);
    assert!(!machine.run(&[], BENCH).stderr.contains("could not be kept"));
}

#[test]
fn the_report_names_the_gpu_and_the_workspace_of_products() {
    let machine = Machine::new();
    assert_runs(&machine.run(&[], &format!("{BENCH} --output-dir run")));
    let report = machine.sandbox.json("run/report.json");
    let (gpu, memory) = (&report["strobe"]["machine"]["gpu"], &report["strobe"]["memory"]);
    assert_eq!(gpu["uuid"], "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f", "{gpu}");
    assert!(memory["workspace_bytes"].as_u64().unwrap() > 0, "{memory}");
}

#[test]
fn what_means_nothing_to_a_gpu_is_refused() {
    let machine = Machine::new();
    let message = machine.refused(&[], &format!("{BENCH} --threads 2"));
    assert_names(&message, &["--threads is for the CPU", "--device cpu"]);
    let built = machine.run(&[], "build --model micro --gemm-plugin disable --device cpu --output-dir engine");
    assert_runs(&built);
    let words = "bench throughput --engine-dir engine --dataset d.jsonl --device cuda --weights-memory copy";
    assert_names(&machine.refused(&[], words), &["--weights-memory is for the CPU", "--device cpu"]);
    let message = machine
        .refused(&[], "eval logits --model micro --ids 1,2 --output - --device cuda --threads 2 --gemm-plugin disable");
    assert_names(&message, &["--threads is for the CPU"]);
}

#[test]
fn a_kernel_that_does_not_compile() {
    let machine = Machine::new();
    let done = machine.run(&[("HOLLOW_COMPILE_ERROR", "1")], BENCH);
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert_names(&done.stderr, &["identifier \"nonsense\" is undefined", ".cu", "sm_90a", "13.1", "--std=c++17"]);
}

#[test]
fn ctrl_c_while_kernels_compile() {
    let machine = Machine::new();
    for words in [BENCH, "build --model micro --gemm-plugin disable --device cuda --output-dir engine"] {
        let _ = std::fs::remove_dir_all(machine.kernels());
        let compiled = || std::fs::read_dir(machine.kernels()).map_or(0, Iterator::count);
        let mut child = machine.usual(&[("HOLLOW_COMPILE_MS", "200")], words).stderr(Stdio::null()).spawn().unwrap();
        while compiled() == 0 {
            assert!(child.try_wait().unwrap().is_none(), "{words}: it ended too early");
            std::thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: the child was not waited for yet, so the number is still its own.
        assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) }, 0);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{words}");
        assert!(compiled() < 20, "{words}: everything was compiled first");
        assert!(!machine.sandbox.exists("engine"), "{words}");
    }
}

#[test]
fn memory_that_is_not_enough() {
    let machine = Machine::new();
    let message = machine.refused(&[("HOLLOW_FREE_MIB", "0")], BENCH);
    assert_names(&message, &["not enough memory", "weights"]);
    let message = machine.refused(&[("HOLLOW_FREE_MIB", "0")], &BENCH.replace("--model micro", "--model moe-tiny"));
    assert_names(&message, &["not enough memory", "weights"]);
    assert!(!message.contains("fp8"), "experts have no kernels in it: {message}");
    let message = machine.refused(&[], &format!("{BENCH} --kv-cache-blocks 99999999"));
    assert_names(&message, &["99999999 blocks", "1.00 GiB of that is kept", "lower --kv-cache-blocks to"]);
    let message = machine.refused(&[("HOLLOW_FREE_MIB", "1000")], BENCH);
    assert_names(&message, &["not enough memory for the KV cache", "1000.00 MiB of 80.00 GiB", "one block needs"]);
    let message = machine.refused(&[], &format!("{BENCH} --kv-cache-free-gpu-mem-fraction 0.0000001"));
    assert_names(&message, &["one block needs", "raise --kv-cache-free-gpu-mem-fraction"]);
    let message = machine.refused(&[("HOLLOW_FAULT", "cuMemAlloc_v2:2:0")], BENCH);
    assert_names(&message, &["memory"]);
}

#[test]
fn a_fault_in_a_step_names_the_step_and_blocking_names_the_op() {
    let machine = Machine::new();
    let faulty = |function: &str, words: &str| {
        let fault = format!("{function}:700:-1");
        let done = machine.run(&[("HOLLOW_FAULT", &fault)], &format!("{BENCH} --profile 5-9 {words}"));
        assert_eq!(done.code, Some(2), "{}", done.stderr);
        assert_names(&done.stderr, &["CUDA_ERROR_ILLEGAL_ADDRESS", "iteration 5"]);
        done.stderr
    };
    let message = faulty("cuEventSynchronize", "--output-dir waiting");
    assert_names(&message, &["--cuda-launch-blocking"]);
    // The device is at fault as soon as it is waited for: which is right behind the op that launches block for.
    let message = faulty("cuStreamSynchronize", "--output-dir blocking --cuda-launch-blocking");
    assert_names(&message, &["embed"]);
}

#[test]
fn a_fault_while_kernels_are_chosen_names_the_kernel() {
    let machine = Machine::new();
    let message = machine.refused(&[("HOLLOW_FAULT", "cuEventSynchronize:700:100")], BENCH);
    assert_names(&message, &["GEMM `", "rows with", "CUDA_ERROR_ILLEGAL_ADDRESS"]);
}

#[test]
fn fp8_on_a_gpu_that_has_none() {
    let machine = Machine::new();
    let fp8 = "--dtype bfloat16 --quantization fp8 --gemm-plugin disable --model micro --device cuda";
    for words in
        [format!("bench throughput {fp8} --dataset d.jsonl --warmup 0"), format!("build {fp8} --output-dir engine")]
    {
        let message = machine.refused(&[("HOLLOW_CAPABILITY", "86")], &words);
        assert_names(&message, &["--quantization fp8", "8.9 or newer", "Hollow GPU has 8.6"]);
    }
}

#[test]
fn a_profiler_that_takes_no_marks_does_not_end_the_run() {
    let machine = Machine::new();
    let done = machine.run(&[("HOLLOW_FAULT", "cuProfilerStart:5:0")], &format!("{BENCH} --profile 5-9"));
    assert_runs(&done);
    assert_names(&done.stderr, &["can't see the start of a window"]);
}

#[test]
fn a_recorder_that_can_t_run_is_not_measured() {
    if strobe_kernels_cuda::library::open(strobe_kernels_cuda::library::Lib::Cupti).is_ok() {
        eprintln!("skipped: this machine has libcupti");
        return;
    }
    let machine = Machine::new();
    let message = machine.refused(&[], &format!("{BENCH} --measure-profiler-overhead"));
    assert_names(&message, &["--measure-profiler-overhead", "libcupti was not found"]);
    let done = machine.run(&[], &format!("{BENCH} --profile 5-9 --output-dir run"));
    assert_runs(&done);
    assert_names(&done.stderr, &["no kernel timeline", "libcupti"]);
    assert!(!done.stdout.contains("Cost of recording"), "{}", done.stdout);
}

#[test]
fn a_library_that_can_t_be_loaded_is_named_with_the_reason() {
    let machine = Machine::new();
    let broken = machine.cache.with_file_name("broken");
    std::fs::create_dir_all(&broken).unwrap();
    std::fs::write(broken.join("libcuda.so.1"), "no library").unwrap();
    let mut command = machine.command(&[&broken], &[("CUDA_HOME", "/no/such/toolkit")], BENCH);
    let message = machine.sandbox.refused_command(&mut command);
    assert_names(&message, &["libcuda can't be loaded", "broken/libcuda.so.1", "driver"]);
    let mut command = machine.command(&[&libraries().driver], &[("CUDA_HOME", "/no/such/toolkit")], BENCH);
    let message = machine.sandbox.refused_command(&mut command);
    assert_names(&message, &["libnvrtc was not found", "CUDA_HOME=/no/such/toolkit, which is no directory"]);
    let message = machine.refused(&[("STROBE_CUDA_PATH", "/no/such/toolkit")], BENCH);
    assert_names(&message, &["STROBE_CUDA_PATH=/no/such/toolkit is no directory", "unset it"]);
    let message = machine.refused(&[("STROBE_CUDA_PATH", "/no/such/toolkit")], &BENCH.replace(" --device cuda", ""));
    assert_names(&message, &["STROBE_CUDA_PATH=/no/such/toolkit is no directory"]);
}
