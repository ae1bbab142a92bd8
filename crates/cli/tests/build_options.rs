//! Every build option changes what runs, and none of them changes what a model says.

mod common;

use common::trace::TraceFile;
use common::{Sandbox, assert_names, int, outputs};
use serde_json::Value;
use strobe_kernels_cpu::Tier;

/// A profiled run: its ops, its outputs, its iterations and its report.
struct Run {
    trace: TraceFile,
    outputs: Vec<Vec<u64>>,
    iterations: Vec<Value>,
    report: Value,
}

fn read(sandbox: &Sandbox) -> Run {
    Run {
        trace: TraceFile::read(&sandbox.path("run/trace.sqlite")),
        outputs: outputs(&sandbox.json_lines("run/requests.jsonl")),
        iterations: sandbox.json_lines("run/iterations.jsonl"),
        report: sandbox.json("run/report.json"),
    }
}

const BENCH: &str = "--dataset d.jsonl --warmup 0 --profile 0-9 --output-dir run --overwrite";

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 12), (7, 9), (65, 14)]);
    sandbox
}

/// Build with `options`, then run the engine directory.
fn built(options: &str) -> Run {
    let sandbox = sandbox();
    sandbox.ok(&format!("build --model micro --output-dir e {options}"));
    sandbox.ok(&format!("bench throughput --engine-dir e {BENCH}"));
    read(&sandbox)
}

#[test]
fn gemm_plugin_selects_the_gemm() {
    let (packed, plain) = (built(""), built("--gemm-plugin disable"));
    for op in ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"] {
        assert!(
            packed.trace.kernels(op).iter().all(|k| k.starts_with("gemm_packed_f32")),
            "{:?}",
            packed.trace.kernels(op)
        );
        assert!(
            plain.trace.kernels(op).iter().all(|k| k.starts_with("gemm_plain_f32")),
            "{:?}",
            plain.trace.kernels(op)
        );
    }
    assert_eq!(plain.report["strobe"]["build_config"]["plugin_config"]["gemm_plugin"], "disable");
    // Only the tuned product takes the activation in, and only its op says so.
    let activates = Tier::from_env().unwrap().activated_multiple().is_some();
    for (run, activates) in [(&packed, activates), (&plain, false)] {
        let gate_up = run.trace.kernels("gate_up_proj");
        assert!(gate_up.iter().all(|k| k.contains("_silu_") == activates), "{gate_up:?}");
        assert_eq!(run.trace.kernels("silu_mul").is_empty(), activates);
    }
}

#[test]
fn quantization_selects_integer_products_and_every_report_says_so() {
    let plain = built("");
    for (name, algorithm, layers) in [("int8", "INT8", "gemm_packed_int8"), ("int4", "W4A8", "gemm_packed_int4")] {
        let run = built(&format!("--quantization {name} --kv-cache-dtype int8"));
        for op in ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"] {
            assert!(run.trace.kernels(op).iter().all(|k| k.starts_with(layers)), "{:?}", run.trace.kernels(op));
        }
        let kernel = |op: &str, name: &str| {
            let kernels = run.trace.kernels(op);
            assert!(!kernels.is_empty() && kernels.iter().all(|k| k.starts_with(name)), "{op}: {kernels:?}");
        };
        kernel("lm_head", "gemm_packed_int8");
        kernel("post_norm", "add_rms_norm_int8");
        match Tier::from_env().unwrap().activated_multiple() {
            Some(_) => kernel("gate_up_proj", &format!("{layers}_silu_")),
            None => kernel("silu_mul", "silu_mul_int8"),
        }
        kernel("attention", "paged_attention_int8");
        let report = &run.report;
        assert_eq!(report["engine"]["quantization"], algorithm);
        assert_eq!(report["engine"]["kv_cache_dtype"], "int8");
        assert_eq!(report["strobe"]["mfu_denominator"]["type"], "int8");
        let bytes = |run: &Run| int(&run.report, "/strobe/memory/weights_bytes");
        assert!(bytes(&run) < bytes(&plain) / 2, "{} of {}", bytes(&run), bytes(&plain));
        assert!(int(report, "/strobe/memory/kv_cache_reserved_bytes") > 0);
        let read = |run: &Run| int(&run.iterations[9], "/strobe/bytes");
        assert!(read(&run) < read(&plain) / 3, "a step of {} bytes, not of {}", read(&run), read(&plain));
        let start = |phase: &str| report["strobe"]["start"][phase].as_f64().unwrap();
        let phases = ["device_ms", "model_ms", "engine_ms", "first_token_ms"].map(start);
        assert!(phases.is_sorted() && phases[0] > 0.0, "{phases:?}");
    }
    assert_eq!(plain.report["strobe"]["mfu_denominator"]["type"], "f32");
}

#[test]
fn a_build_of_integers_says_what_rounding_took() {
    let sandbox = sandbox();
    let built = sandbox.ok("build --model micro --output-dir e --quantization int4 --json");
    let summary: Value = serde_json::from_str(&built.stdout).unwrap();
    let errors = summary["weight_errors"].as_array().unwrap();
    let names: Vec<_> = errors.iter().map(|e| e["weight"].as_str().unwrap()).collect();
    assert_eq!(names, ["qkv.weight", "o.weight", "gate_up.weight", "down.weight", "lm_head"]);
    for error in errors {
        let relative = error["relative_rms"].as_f64().unwrap();
        let expected = if error["weight"] == "lm_head" { 0.003..0.01 } else { 0.04..0.12 };
        assert!(expected.contains(&relative), "{error}");
    }
    let text = sandbox.ok("build --model micro --output-dir e --overwrite --quantization int8").stdout;
    assert_names(&text, &["matrices in int8", "qkv.weight", "worst in layer"]);
}

#[test]
fn context_fmha_selects_the_attention_of_prompts() {
    let (fused, unfused) = (built(""), built("--context-fmha disable"));
    let names = |run: &Run, context: bool| {
        let with_context =
            |iter: u64| int(&run.iterations[iter as usize], "/inflightBatchingStats/numContextRequests") > 0;
        let mut names: Vec<_> = run
            .trace
            .ops
            .iter()
            .filter(|op| op.category == "attention" && with_context(op.iter) == context)
            .map(|op| op.name.clone())
            .collect();
        names.sort();
        names.dedup();
        names
    };
    assert_eq!(names(&fused, true), ["attention"]);
    assert_eq!(names(&unfused, true), ["attn_scores", "attn_softmax", "attn_values"]);
    assert_eq!(names(&unfused, false), ["attention"], "generation is fused either way");
    assert_eq!(fused.outputs, unfused.outputs);
}

#[test]
fn paged_kv_cache_selects_the_layout() {
    let (paged, contiguous) = (built("--tokens-per-block 16"), built("--tokens-per-block 16 --paged-kv-cache disable"));
    let per_block = |run: &Run| int(&run.iterations[0], "/kvCacheStats/tokensPerBlock");
    assert_eq!(per_block(&paged), 16);
    assert_eq!(per_block(&contiguous), 2048, "one block holds a whole request");
    assert_eq!(int(&contiguous.iterations[0], "/kvCacheStats/usedNumBlocks"), 3, "one per request");
    assert_eq!(paged.outputs, contiguous.outputs);
    assert_eq!(contiguous.report["strobe"]["build_config"]["kv_cache_type"], "CONTINUOUS");
}

#[test]
fn dtype_selects_the_kernels() {
    for (dtype, short) in [("bfloat16", "bf16"), ("float16", "f16")] {
        let run = built(&format!("--dtype {dtype}"));
        // Both keep the cache in float16.
        for (op, short) in [("qkv_proj", short), ("lm_head", short), ("attention", "f16"), ("rope_kv_write", "f16")] {
            let kernels = run.trace.kernels(op);
            assert!(kernels.iter().all(|k| k.contains(&format!("_{short}_"))), "{kernels:?}");
        }
        assert_eq!(run.report["engine"]["kv_cache_dtype"], "float16");
        assert_eq!(run.report["engine"]["dtype"], dtype);
    }
}

#[test]
fn limits_are_built_in() {
    let run = built("--max-batch-size 2 --max-num-tokens 64 --max-seq-len 128");
    for iteration in &run.iterations {
        assert!(int(iteration, "/numActiveRequests") <= 2);
        assert!(int(iteration, "/inflightBatchingStats/numCtxTokens") <= 64);
    }
    assert_eq!(int(&run.report, "/world_info/max_batch_size"), 2);
    assert_eq!(int(&run.report, "/world_info/max_num_tokens"), 64);
    assert_eq!(int(&run.report, "/engine/max_sequence_length"), 128);
    assert_eq!(run.outputs, built("").outputs);
}

#[test]
fn seeds_make_models() {
    assert_ne!(built("--seed 1").outputs, built("--seed 2").outputs);
}

#[test]
fn an_engine_directory_and_a_model_in_memory_are_the_same() {
    let sandbox = sandbox();
    sandbox.ok(&format!("bench throughput --model micro --seed 5 {BENCH}"));
    let in_memory = read(&sandbox);
    let mapped = built("--seed 5");
    assert_eq!(in_memory.outputs, mapped.outputs);
    assert_eq!(in_memory.report["strobe"]["weights"], "random (seed 5)");
    assert_eq!(mapped.report["strobe"]["weights"], "random (seed 5)");
}

#[test]
fn build_says_what_it_did() {
    let sandbox = Sandbox::new();
    let done = sandbox.ok("build --model micro --output-dir deep/down/e");
    assert_names(
        &done.stdout,
        &["deep/down/e", "1,016,960", "random (seed 0)", "packed", "3.88 MiB", "strobe bench throughput"],
    );
    assert_eq!(sandbox.names("deep/down"), ["e"]);
    assert_eq!(sandbox.names("deep/down/e"), ["config.json", "rank0.engine", "tokenizer.json"]);
    let config = sandbox.json("deep/down/e/config.json");
    for key in ["version", "pretrained_config", "build_config"] {
        assert!(config.get(key).is_some(), "{key}");
    }
    let done = sandbox.ok("build --model micro --output-dir deep/down/e --overwrite --json");
    let summary: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(summary["config"], config);
    assert!(int(&summary, "/weight_bytes") >= 1_016_960 * 4);
}

#[test]
fn presets_are_listed_with_parameters_and_bytes() {
    let sandbox = Sandbox::new();
    let list: Value = serde_json::from_str(&sandbox.ok("build --list-presets --json").stdout).unwrap();
    let text = sandbox.ok("build --list-presets").stdout;
    for preset in list.as_array().unwrap() {
        assert!(int(preset, "/bytes") >= 2 * int(preset, "/parameters"));
        assert_names(&text, &[preset["name"].as_str().unwrap(), &int(preset, "/parameters").to_string()]);
    }
    let named = |name: &str| list.as_array().unwrap().iter().any(|preset| preset["name"] == name);
    for name in ["micro", "llama-110m", "tinyllama-1.1b", "llama-3.1-8b", "mixtral-small", "gpt-oss-20b", "deepseek-v3"]
    {
        assert!(named(name), "{name}: {text}");
    }
}

/// The tiers give the same tokens here: random weights leave no near ties in this dataset.
#[test]
fn the_simd_tier_can_be_forced_and_is_reported() {
    let sandbox = sandbox();
    let mut ran = Vec::new();
    for tier in ["scalar", "avx2", "avx512", "avx512vnni", "avx512bf16"] {
        let words = format!("bench throughput --model micro {BENCH}");
        let done = common::finish(sandbox.command(&words).env("STROBE_CPU", tier));
        if done.code == Some(2) {
            assert_names(&done.stderr, &["STROBE_CPU", tier, "this machine lacks"]);
            continue;
        }
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        assert_names(&done.stdout, &["SIMD tier, threads:", tier]);
        let run = read(&sandbox);
        assert_eq!(run.report["strobe"]["machine"]["simd_tier"], tier);
        assert!(run.trace.kernels("qkv_proj").iter().all(|k| k.ends_with(tier)), "{:?}", run.trace.kernels("qkv_proj"));
        ran.push((tier, run.outputs));
    }
    assert_eq!(ran[0].0, "scalar", "every machine has the scalar tier");
    for (tier, found) in &ran {
        assert_eq!(*found, ran[0].1, "{tier}");
    }
}

#[test]
fn types_that_no_device_runs_are_refused_before_anything_is_written() {
    let sandbox = Sandbox::new();
    for (model, options, parts) in [
        ("moe-tiny", "--quantization fp8", ["--quantization fp8", "experts", "--quantization none"]),
        ("gpt-oss-tiny", "--quantization fp8", ["--quantization fp8", "experts", "--quantization none"]),
        ("deepseek-tiny", "--quantization fp8 --kv-cache-dtype fp8", ["--quantization fp8", "no kernels", "use"]),
        ("deepseek-tiny", "--kv-cache-dtype fp8", ["--kv-cache-dtype fp8", "latent attention", "auto"]),
        ("micro", "--quantization fp8 --kv-cache-dtype int8", ["--kv-cache-dtype int8", "fp8", "no device"]),
        ("micro", "--quantization int4 --kv-cache-dtype fp8", ["--kv-cache-dtype fp8", "int4", "no device"]),
    ] {
        let message = sandbox.refused(&format!("build --model {model} {options} --output-dir e --device cpu"));
        assert_names(&message, &parts);
    }
    // What a GPU runs can be built without one.
    sandbox.ok("build --model micro --quantization fp8 --kv-cache-dtype fp8 --output-dir e --device cpu");
    sandbox.ok("build --model moe-tiny --kv-cache-dtype fp8 --output-dir m --device cpu");
    let cache = |dtype: &str| {
        let done =
            sandbox.ok(&format!("build --model micro --dtype bfloat16 --kv-cache-dtype {dtype} --output-dir {dtype}"));
        done.stdout.lines().find(|line| line.starts_with("kv cache")).unwrap().to_owned()
    };
    assert!(cache("float16").ends_with("2.00 KiB per token") && cache("fp8").ends_with("fp8, 1.00 KiB per token"));
}
