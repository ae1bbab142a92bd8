//! The verbs a new user meets first: `demo`, `doctor`, `--help`, `--version`.

mod common;

use common::{Sandbox, assert_names, num};
use serde_json::Value;

#[test]
fn the_demo_runs_the_whole_loop() {
    let sandbox = Sandbox::new();
    let done = sandbox.ok("demo --output-dir x");
    let verdict = done.stdout.lines().find(|l| l.contains("output tok/s, medians of"));
    let verdict = verdict.unwrap_or_else(|| panic!("no verdict in\n{}", done.stdout));
    assert!(verdict.contains("x faster than") || verdict.contains("No difference beyond the noise"), "{verdict}");
    assert_names(verdict, &["fmha enable", "fmha disable"]);
    assert_eq!(sandbox.names("."), ["x"]);
    for name in ["index.html", "compare.html", "dataset.jsonl", "engine-fmha-enable", "engine-fmha-disable"] {
        assert!(sandbox.exists(&format!("x/{name}")), "{name}");
    }
    assert_names(&sandbox.read("x/index.html"), &["<html", "<svg", "fmha enable", "fmha disable"]);
    for (run, fused) in [("run-fmha-enable", true), ("run-fmha-disable", false)] {
        let files = [
            "iterations.jsonl",
            "report.html",
            "report.json",
            "requests.jsonl",
            "run.json",
            "trace.html",
            "trace.sqlite",
        ];
        assert_eq!(sandbox.names(&format!("x/{run}")), files);
        let report = sandbox.json(&format!("x/{run}/report.json"));
        assert_eq!(report["strobe"]["build_config"]["plugin_config"]["context_fmha"], fused);
        assert!(num(&report, "/performance/system_output_throughput_tok_s") > 0.0);
        assert!(!report["strobe"]["profile"]["top_ops"].as_array().unwrap().is_empty());
    }
    assert_names(&sandbox.refused("demo --output-dir x"), &["`x` exists already", "--overwrite"]);
}

#[test]
fn doctor_measures_the_machine() {
    let sandbox = Sandbox::new();
    let text = sandbox.ok("doctor").stdout;
    assert_names(
        &text,
        &["cpu", "simd tier", "memory bandwidth", "peak compute", "gpu", "libcuda", "libnvrtc", "kernel cache", "nsys"],
    );
    let document: Value = serde_json::from_str(&sandbox.ok("doctor --json").stdout).unwrap();
    for peak in ["flops_per_s", "read_bytes_per_s", "copy_bytes_per_s", "threads"] {
        assert!(num(&document, &format!("/peaks/{peak}")) > 0.0, "{peak}");
    }
    assert!(document["simd"]["available"].as_array().unwrap().contains(&Value::from("scalar")));
    assert!(document["gpus"].is_array() != document["no_gpu_because"].is_string(), "GPUs, or why there are none");
    assert!(num(&document, "/memory/total_bytes") > 0.0);
    for library in ["libcuda", "libnvrtc", "libcublasLt", "libcupti", "libnvtx3interop", "libnvidia-ml"] {
        let found = &document["cuda_libraries"][library];
        assert!(found["path"].is_string() != found["problem"].is_string(), "{library}: a path, or why there is none");
    }
    assert!(document["kernel_cache"]["directory"].is_string());
    assert_eq!(document["auto_device"] == "cuda:0", document["gpus"].is_array() && text.contains("cuda:0"));
}

#[test]
fn doctor_measures_single_peaks() {
    let sandbox = Sandbox::new();
    let document: Value =
        serde_json::from_str(&sandbox.ok("doctor --peaks int8,float32,bfloat16 --json").stdout).unwrap();
    assert_eq!(document["peaks"].as_object().unwrap().len(), 3);
    assert!(num(&document, "/peaks/int8_ops_per_s") > 0.0 && num(&document, "/peaks/flops_per_s") > 0.0);
    assert_names(&sandbox.ok("doctor --peaks float32 --threads 1").stdout, &["f32", "1 thread"]);
}

#[test]
fn help_of_every_verb_starts_with_examples() {
    let sandbox = Sandbox::new();
    for verb in [
        "demo",
        "doctor",
        "prepare-dataset",
        "build",
        "bench",
        "bench throughput",
        "bench latency",
        "eval",
        "eval logits",
        "profile",
        "selftest",
    ] {
        let help = sandbox.ok(&format!("{verb} --help")).stdout;
        let mut lines = help.lines();
        assert_eq!(lines.next(), Some("EXAMPLES:"), "{verb}");
        let first_word = verb.split(' ').next().unwrap();
        assert_names(lines.next().unwrap(), &["strobe", first_word]);
        assert_names(&help, &["Usage: strobe", first_word]);
    }
    let top = sandbox.ok("--help").stdout;
    assert_names(
        &top,
        &["EXAMPLES:", "strobe demo", "Exit codes:", "prepare-dataset", "doctor", "build", "bench", "eval"],
    );
}

#[test]
fn version_and_bare_calls() {
    let sandbox = Sandbox::new();
    assert_eq!(sandbox.ok("--version").stdout, format!("strobe {}\n", env!("CARGO_PKG_VERSION")));
    for words in ["", "bench", "eval"] {
        let done = sandbox.run(words);
        assert_eq!(done.code, Some(2), "`strobe {words}` needs more words");
        assert_eq!(done.stdout, "");
        assert_names(&done.stderr, &["Usage: strobe"]);
    }
}
