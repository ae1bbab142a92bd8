//! Models of experts through the binary: what they record, skewed routers, and what is refused.

mod common;

use common::trace::TraceFile;
use common::{Sandbox, assert_names};
use strobe_kernels_cpu::Tier;

#[test]
fn experts_are_ops_of_their_own() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 6), (7, 4)]);
    sandbox.ok("build --model moe-tiny --output-dir e");
    sandbox.ok("bench throughput --engine-dir e --dataset d.jsonl --warmup 0 --profile 0-3 --output-dir run");
    let trace = TraceFile::read(&sandbox.path("run/trace.sqlite"));
    for (op, kernel) in [
        ("router", "gemm_packed_f32"),
        ("route", "moe_route"),
        match Tier::from_env().unwrap().activated_multiple() {
            Some(_) => ("expert_gate_up", "grouped_gemm_packed_f32_silu_"),
            None => ("expert_silu_mul", "silu_mul"),
        },
        ("expert_down", "grouped_gemm_packed_f32"),
        ("expert_sum", "moe_sum"),
    ] {
        let kernels = trace.kernels(op);
        assert!(!kernels.is_empty() && kernels.iter().all(|k| k.starts_with(kernel)), "{op}: {kernels:?}");
    }
}

#[test]
fn a_skewed_router_is_part_of_the_engine_and_said_in_its_reports() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 6)]);
    sandbox.ok("build --model moe-tiny --router-skew zipf:1.2 --output-dir e");
    let config = sandbox.json("e/config.json");
    assert_eq!(config["pretrained_config"]["moe"]["router_skew"]["asked"], "zipf:1.2");
    sandbox.ok("bench throughput --engine-dir e --dataset d.jsonl --warmup 0 --output-dir run");
    assert_eq!(sandbox.json("run/run.json")["engine"]["pretrained_config"], config["pretrained_config"]);
    let report = sandbox.json("run/report.json");
    assert!(report["strobe"]["weights"].as_str().unwrap().contains("zipf:1.2"), "{}", report["strobe"]["weights"]);
    sandbox.write("short.json", "[1, 2]");
    for (words, parts) in [
        ("build --model micro --router-skew zipf:1 --output-dir x", ["--router-skew", "micro", "experts"]),
        ("build --model moe-tiny --router-skew zipf:x --output-dir x", ["--router-skew", "zipf:x", "number"]),
        ("build --model moe-tiny --router-skew short.json --output-dir x", ["--router-skew", "short.json", "8"]),
        (
            "bench throughput --engine-dir e --router-skew zipf:1 --dataset d.jsonl --output-dir x",
            ["--router-skew", "built", "--model"],
        ),
    ] {
        assert_names(&sandbox.refused(words), &parts);
    }
}

#[test]
fn a_model_beyond_the_memory_is_refused_with_the_arithmetic() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(4, 2)]);
    // 187 GB of weights.
    let message =
        sandbox.refused("bench throughput --model mixtral-8x7b --dtype float32 --dataset d.jsonl --output-dir run");
    assert_names(&message, &["memory", "mixtral-8x7b", "GiB"]);
}
