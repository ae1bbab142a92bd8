//! `--device` on a machine without a GPU, and words it does not know.

mod common;

use common::{Sandbox, assert_names};

fn with_dataset() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(5, 3), (9, 2)]);
    sandbox
}

const BENCH: &str = "bench throughput --model micro --dataset d.jsonl --warmup 0";

/// Whether there is a driver; its absence is what most of these tests are about.
fn driver() -> bool {
    let here = strobe_kernels_cuda::library::open(strobe_kernels_cuda::library::Lib::Driver).is_ok();
    if here {
        eprintln!("skipped: this machine has NVIDIA's driver");
    }
    here
}

#[test]
fn unknown_devices() {
    let sandbox = with_dataset();
    for device in ["tpu", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "cuda:4294967296"] {
        let message = sandbox.refused(&format!("{BENCH} --device {device}"));
        assert_names(&message, &["--device", &format!("`{device}`"), "cpu, cuda, cuda:N", "auto"]);
    }
}

#[test]
fn a_gpu_that_is_not_there() {
    if driver() {
        return;
    }
    let sandbox = with_dataset();
    for device in ["cuda", "cuda:0", "cuda:7"] {
        let message = sandbox.refused(&format!("{BENCH} --device {device}"));
        assert_names(&message, &["libcuda was not found", "libcuda.so.1", "loader's path", "driver", "--device cpu"]);
    }
}

#[test]
fn a_gpu_number_that_the_driver_does_not_list() {
    let Ok(gpus) = strobe_kernels_cuda::devices() else {
        eprintln!("skipped: this machine has no GPU");
        return;
    };
    let sandbox = with_dataset();
    let message = sandbox.refused(&format!("{BENCH} --device cuda:{}", gpus.len()));
    assert_names(&message, &["no CUDA device", &format!("there is no GPU {}", gpus.len())]);
}

#[test]
fn auto_falls_back_to_the_cpu() {
    if driver() {
        return;
    }
    let sandbox = with_dataset();
    let quiet = sandbox.ok(BENCH);
    assert!(!quiet.stderr.contains("libcuda"), "{}", quiet.stderr);
    let asked = sandbox.ok(&format!("{BENCH} --device auto"));
    assert_names(&asked.stderr, &["note: using the CPU", "libcuda was not found"]);
    sandbox.ok(&format!("{BENCH} --device cpu"));
}

#[test]
fn graphs_and_launches_that_block_exclude_each_other() {
    let sandbox = with_dataset();
    let both = "--cuda-graph enable --cuda-launch-blocking";
    for words in [format!("{BENCH} --device cuda {both}"), format!("{BENCH} {both}")] {
        let message = sandbox.refused(&words);
        assert_names(&message, &["--cuda-graph enable", "--cuda-launch-blocking", "leave one of them out"]);
        let message = sandbox.refused(&words.replace("throughput --model micro", "moe-balance --model moe-tiny"));
        assert_names(&message, &["--cuda-graph enable", "--cuda-launch-blocking", "leave one of them out"]);
    }
}
