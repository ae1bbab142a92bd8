//! `strobe selftest`: what it refuses, and what it says where there is a GPU.

mod common;

use common::{Sandbox, assert_names};

#[test]
fn calls_that_make_no_sense() {
    let sandbox = Sandbox::new();
    assert_names(&sandbox.refused("selftest --device cpu"), &["a GPU with the CPU", "--device cuda"]);
    assert_names(&sandbox.refused("selftest --only nothing"), &["`nothing`", "attention", "models", "soak", "fault"]);
    assert_names(&sandbox.refused("selftest --device tpu"), &["--device", "`tpu`"]);
}

#[test]
fn without_a_gpu_it_says_what_is_missing() {
    if strobe_kernels_cuda::devices().is_ok() {
        eprintln!("skipped: this machine has a GPU");
        return;
    }
    let message = Sandbox::new().refused("selftest --device cuda");
    assert!(message.contains("libcuda") || message.contains("no CUDA device"), "{message}");
}

#[test]
fn a_fault_is_reported_by_the_name_of_its_kernel() {
    if strobe_kernels_cuda::devices().is_err() {
        eprintln!("skipped: this machine has no GPU");
        return;
    }
    let text = Sandbox::new().ok("selftest --only fault").stdout;
    assert_names(&text, &["fault", "pass", "all passed"]);
}
