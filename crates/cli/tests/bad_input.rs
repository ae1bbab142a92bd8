//! Bad input: each call ends with exit code 2 and one line that says what, where and what to do, and leaves the disk
//! as it found it (the sandbox compares every byte before and after).

mod common;

use std::fs::{self, OpenOptions};

use common::{FIXTURES, Sandbox, assert_names};

/// A sandbox with a dataset `d.jsonl` that is fine.
fn with_dataset() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(5, 3), (9, 2)]);
    sandbox
}

/// The same with an engine directory `e`.
fn with_engine() -> Sandbox {
    let sandbox = with_dataset();
    sandbox.ok("build --model micro --output-dir e");
    sandbox
}

/// A damaged copy of a model, refused by `build`.
fn refused_model(fixture: &str, damage: impl Fn(&Sandbox)) -> String {
    let sandbox = Sandbox::new();
    sandbox.copy_model(fixture, "model");
    damage(&sandbox);
    sandbox.refused("build --model model --output-dir engine")
}

fn truncate(sandbox: &Sandbox, name: &str, bytes: u64) {
    OpenOptions::new().write(true).open(sandbox.path(name)).unwrap().set_len(bytes).unwrap();
}

// Models

#[test]
fn missing_safetensors() {
    let message = refused_model("llama", |s| fs::remove_file(s.path("model/model.safetensors")).unwrap());
    assert_names(&message, &["model:", "no *.safetensors", "converted"]);
}

#[test]
fn missing_shard() {
    let shard = "model-00002-of-00003.safetensors";
    let message = refused_model("llama-sharded", |s| fs::remove_file(s.path("model").join(shard)).unwrap());
    assert_names(&message, &[shard, "index.json", "download"]);
}

#[test]
fn truncated_safetensors() {
    for bytes in [5000, 300, 4, 0] {
        let message = refused_model("llama", |s| truncate(s, "model/model.safetensors", bytes));
        assert_names(&message, &["model/model.safetensors:", &bytes.to_string(), "copy the file again"]);
    }
}

#[test]
fn shape_that_does_not_match_the_config() {
    let message = refused_model("llama", |s| s.edit("model/config.json", "\"hidden_size\": 32", "\"hidden_size\": 64"));
    assert_names(&message, &["model.embed_tokens.weight", "[64, 32]", "[64, 64]", "config.json"]);
}

#[test]
fn dtype_that_does_not_match_the_config() {
    let message = refused_model("llama", |s| s.edit("model/config.json", "\"float32\"", "\"bfloat16\""));
    assert_names(&message, &["model.embed_tokens.weight", "F32", "bfloat16", "torch_dtype"]);
}

#[test]
fn nan_in_config_numbers() {
    for (field, old) in [("rms_norm_eps", "1e-05"), ("rope_theta", "10000.0"), ("hidden_size", "32")] {
        for bad in ["NaN", "Infinity", "-Infinity"] {
            let (from, to) = (format!("\"{field}\": {old}"), format!("\"{field}\": {bad}"));
            let message = refused_model("llama", |s| s.edit("model/config.json", &from, &to));
            assert_names(&message, &["model/config.json", field, "expected", bad]);
        }
    }
}

#[test]
fn unknown_architecture_lists_the_supported_ones() {
    let change = |s: &Sandbox| s.edit("model/config.json", "LlamaForCausalLM", "GPT2LMHeadModel");
    let message = refused_model("llama", change);
    let supported = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"];
    assert_names(&message, &["architectures", "GPT2LMHeadModel"]);
    assert_names(&message, &supported);
}

#[test]
fn missing_or_broken_config() {
    let message = refused_model("llama", |s| fs::remove_file(s.path("model/config.json")).unwrap());
    assert_names(&message, &["model/config.json", "No such file"]);
    assert_eq!(message.matches("No such file").count(), 1, "the cause is said once: {message}");
    let message = refused_model("llama", |s| s.write("model/config.json", "{\n\"hidden_size\": 32,\n"));
    assert_names(&message, &["model/config.json", "line 3"]);
}

#[test]
fn unknown_preset_lists_the_presets() {
    let sandbox = with_dataset();
    let presets = ["micro", "llama-110m", "tinyllama-1.1b", "llama-2-7b", "llama-3.1-8b", "qwen3-0.6b"];
    for words in [
        "build --model nope --output-dir e",
        "bench throughput --model nope --dataset d.jsonl --output-dir run",
        "eval logits --model nope --ids 1 --output f.json",
        "prepare-dataset --model nope --output x.jsonl token-norm-dist --num-requests 1 --input-mean 1 --output-mean 1",
    ] {
        let message = sandbox.refused(words);
        assert_names(&message, &["--model", "`nope`"]);
        assert_names(&message, &presets);
    }
}

// Datasets

/// `bench throughput` on micro with a dataset of these bytes.
fn refused_dataset(text: &str, options: &str) -> String {
    let sandbox = Sandbox::new();
    sandbox.write("d.jsonl", text);
    sandbox.refused(&format!("bench throughput --model micro --dataset d.jsonl --output-dir run {options}"))
}

#[test]
fn vocab_id_out_of_range() {
    let text = "{\"task_id\":0,\"input_ids\":[5],\"output_tokens\":2}\n{\"task_id\":9,\"input_ids\":[5,512],\"output_tokens\":2}\n";
    let message = refused_dataset(text, "");
    assert_names(&message, &["line 2", "task_id 9", "input_ids[1]", "512", "0 to 511", "tokenizer"]);
}

#[test]
fn empty_dataset() {
    for text in ["", "\n\n"] {
        assert_names(&refused_dataset(text, ""), &["d.jsonl", "no samples", "prepare-dataset"]);
    }
}

#[test]
fn missing_dataset() {
    let message = Sandbox::new().refused("bench throughput --model micro --dataset gone.jsonl --output-dir run");
    assert_names(&message, &["gone.jsonl", "No such file"]);
    assert_eq!(message.matches("No such file").count(), 1, "the cause is said once: {message}");
}

#[test]
fn malformed_dataset_line_is_named_with_its_field() {
    let good = "{\"task_id\":0,\"input_ids\":[5],\"output_tokens\":2}\n";
    let cases = [
        ("{\"task_id\":1,\"input_ids\":[5],\"output_tokens\":\"x\"}", "output_tokens"),
        ("{\"task_id\":1,\"input_ids\":[5],\"output_tokens\":0}", "output_tokens"),
        ("{\"task_id\":1,\"input_ids\":[5,-1],\"output_tokens\":2}", "input_ids[1]"),
        ("{\"task_id\":1,\"input_ids\":[],\"output_tokens\":2}", "input_ids"),
        ("{\"task_id\":1,\"output_tokens\":2}", "input_ids"),
        ("{\"input_ids\":[5],\"output_tokens\":2}", "task_id"),
    ];
    for (line, field) in cases {
        assert_names(
            &refused_dataset(&format!("{good}{line}\n"), ""),
            &["d.jsonl", "line 2", field, "expected", "found"],
        );
    }
    for line in ["{\"task_id\":1,\"input", "[1,2]"] {
        assert_names(&refused_dataset(&format!("{good}{line}\n"), ""), &["d.jsonl", "line 2", "object"]);
    }
}

#[test]
fn request_longer_than_max_seq_len() {
    let text = "{\"task_id\":7,\"input_ids\":[5,6],\"output_tokens\":99}\n";
    let message = refused_dataset(text, "--max-seq-len 100");
    assert_names(&message, &["request 0", "task_id 7", "2 + output of 99 = 101", "max_seq_len 100", "--max-seq-len"]);
}

#[test]
fn kv_cache_too_small_for_one_request() {
    let text = "{\"task_id\":7,\"input_ids\":[5,6],\"output_tokens\":99}\n";
    let message = refused_dataset(text, "--kv-cache-blocks 3");
    assert_names(&message, &["request 0", "4 blocks of 32 tokens needed", "3 in the cache", "--kv-cache-blocks"]);
    assert_names(&refused_dataset(text, "--kv-cache-blocks 0"), &["--kv-cache-blocks", "between 1"]);
    for fraction in ["0", "1.5", "nan"] {
        let message = refused_dataset(text, &format!("--kv-cache-free-mem-fraction {fraction}"));
        assert_names(&message, &["--kv-cache-free-mem-fraction", "above 0 and at most 1"]);
    }
}

#[test]
fn more_requests_than_the_dataset_has() {
    let message = with_dataset().refused("bench throughput --model micro --dataset d.jsonl --num-requests 3");
    assert_names(&message, &["--num-requests 3", "the 2 requests", "d.jsonl"]);
}

#[test]
fn text_prompts_without_a_tokenizer() {
    let sandbox = Sandbox::new();
    sandbox.write("d.jsonl", "{\"task_id\":0,\"prompt\":\"hello\",\"output_tokens\":2}\n");
    let message =
        sandbox.refused(&format!("bench throughput --model {FIXTURES}/qwen2 --dataset d.jsonl --output-dir run"));
    assert_names(&message, &["sample 0", "tokenizer.json", "input_ids"]);
    sandbox.write("text.jsonl", "{\"q\":\"hello\",\"a\":3}\n");
    let real = "real-dataset --file text.jsonl --prompt-key q --output-key a";
    let message = sandbox.refused(&format!("prepare-dataset --model {FIXTURES}/qwen2 --output x.jsonl {real}"));
    assert_names(&message, &["qwen2", "tokenizer.json", "--tokenizer"]);
}

#[test]
fn datasets_that_cannot_be_made() {
    let sandbox = Sandbox::new();
    sandbox.write("text.jsonl", "{\"q\":\"hello\",\"a\":3}\n");
    for (kind, named) in [
        ("token-norm-dist --num-requests 0 --input-mean 4 --output-mean 4", "--num-requests"),
        ("token-norm-dist --num-requests 2 --input-mean nan --output-mean 4", "--input-mean"),
        ("token-norm-dist --num-requests 2 --input-mean 4 --output-mean -4", "--output-mean"),
        ("token-norm-dist --num-requests 2 --input-mean 4 --input-stdev -1 --output-mean 4", "--input-stdev"),
        ("token-unif-dist --num-requests 2 --input-min 9 --input-max 4 --output-min 1 --output-max 2", "--input-max"),
        ("token-unif-dist --num-requests 2 --input-min 0 --input-max 4 --output-min 1 --output-max 2", "--input-min"),
        ("real-dataset --file text.jsonl --prompt-key question --output-key a", "question"),
        ("real-dataset --file text.jsonl --prompt-key q", "--output-key"),
        ("real-dataset --file text.jsonl --prompt-key q --output-len-dist 5", "--output-len-dist"),
        ("real-dataset --file gone.jsonl --prompt-key q --output-key a", "gone.jsonl"),
    ] {
        assert_names(&sandbox.refused(&format!("prepare-dataset --model micro --output x.jsonl {kind}")), &[named]);
    }
}

// Flags

#[test]
fn unknown_flag_values_list_the_known_ones() {
    let sandbox = with_dataset();
    let bench = "bench throughput --model micro --dataset d.jsonl --output-dir run";
    for (words, named) in [
        ("build --model micro --output-dir e --dtype int3", ["int3", "--dtype", "bfloat16"]),
        ("build --model micro --output-dir e --context-fmha maybe", ["maybe", "--context-fmha", "disable"]),
        ("build --model micro --output-dir e --gemm-plugin fp8", ["fp8", "--gemm-plugin", "auto"]),
        ("build --model micro --output-dir e --quantization int3", ["int3", "--quantization", "int8"]),
        ("build --model micro --output-dir e --kv-cache-dtype int4", ["int4", "--kv-cache-dtype", "int8"]),
        (
            "build --model micro --output-dir e --gemm-plugin disable --quantization int8",
            ["--gemm-plugin", "--quantization", "int8"],
        ),
        (&format!("{bench} --device cpu --kv-cache-dtype fp8"), ["--kv-cache-dtype fp8", "GPU", "cuda"]),
        (&format!("{bench} --device cpu --overlap-scheduler enable"), ["--overlap-scheduler", "GPU", "cuda"]),
        (&format!("{bench} --weights-memory map"), ["--weights-memory", "--engine-dir", "--model"]),
        (&format!("{bench} --min-tokens 5"), ["--min-tokens", "--eos-id", "--stop-ids"]),
        ("build --model micro --output-dir e --paged-kv-cache 1", ["1", "--paged-kv-cache", "enable"]),
        (&format!("{bench} --scheduler-policy x"), ["x", "--scheduler-policy", "max_utilization"]),
        (&format!("{bench} --arrival often --request-rate 1"), ["often", "--arrival", "poisson"]),
        (&format!("{bench} --percentiles upper"), ["upper", "--percentiles", "nearest"]),
    ] {
        assert_names(&sandbox.refused(words), &named);
    }
    assert_names(&sandbox.refused(&format!("{bench} --frob")), &["--frob", "--help"]);
    assert_names(&sandbox.refused("frob"), &["frob", "--help"]);
}

#[test]
fn numbers_out_of_range() {
    let sandbox = with_dataset();
    for (option, named) in [
        ("--threads 0", ["--threads", "between 1 and"]),
        ("--threads 100000", ["--threads", "found 100000"]),
        ("--threads -1", ["--threads", "-1"]),
        ("--threads two", ["--threads", "two"]),
        ("--concurrency 0", ["--concurrency", "at least 1"]),
        ("--concurrency -2", ["--concurrency", "found -2"]),
        ("--request-rate 0", ["--request-rate", "above 0"]),
        ("--request-rate -1", ["--request-rate", "found -1"]),
        ("--request-rate nan", ["--request-rate", "NaN"]),
        ("--request-rate inf", ["--request-rate", "finite"]),
        ("--burstiness 2", ["--burstiness", "--request-rate"]),
        ("--request-rate 9 --arrival gamma --burstiness 0", ["--burstiness", "above 0"]),
        ("--request-rate 9 --arrival constant --burstiness 2", ["--burstiness", "gamma"]),
        ("--repeat 0", ["--repeat", "at least 1"]),
        ("--temperature -1", ["temperature", "found -1"]),
        ("--temperature 1 --top-p 0", ["top_p", "above 0"]),
        ("--top-p 0.5", ["--top-p", "--temperature"]),
        ("--stop-ids 5,512", ["--stop-ids", "512"]),
        ("--eos-id 512", ["--eos-id", "below 512"]),
        ("--eos-id -7", ["--eos-id", "found -7"]),
        ("--max-batch-size 0", ["--max-batch-size", "1"]),
        ("--max-num-tokens 5", ["--max-num-tokens", "--tokens-per-block"]),
        ("--tokens-per-block 33", ["--tokens-per-block", "power of two"]),
        ("--max-seq-len 4096", ["--max-seq-len", "2048"]),
        ("--trace-out t.json", ["--trace-out", "--profile"]),
        ("--arrival gamma", ["--arrival", "--request-rate"]),
        ("--warmup 18446744073709551615", ["--warmup", "at most"]),
        ("--kv-cache-blocks 1000000000000000", ["--kv-cache-blocks", "between 1 and"]),
        ("--kv-cache-blocks 4000000000", ["not enough memory", "GiB available"]),
        ("--profile 0-18446744073709551615", ["0-18446744073709551615", "too large"]),
        ("--measure-profiler-overhead --trace-out t.json", ["--trace-out", "without --measure-profiler-overhead"]),
    ] {
        let words = format!("bench throughput --model micro --dataset d.jsonl --output-dir run {option}");
        assert_names(&sandbox.refused(&words), &named);
    }
    let words = "eval logits --model micro --ids 1 --output l.json --decode 18446744073709551615";
    assert_names(&sandbox.refused(words), &["--decode", "2048"]);
    let words = "prepare-dataset --model micro --output o.jsonl token-norm-dist --num-requests 18446744073709551615 \
         --input-mean 1 --output-mean 1";
    assert_names(&sandbox.refused(words), &["--num-requests", "at most"]);
    let message = sandbox.refused("bench latency --model micro --dataset d.jsonl --concurrency 4");
    assert_names(&message, &["--concurrency 4", "one request at a time"]);
}

#[test]
fn negative_numbers_are_put_to_their_option() {
    let sandbox = with_dataset();
    let bench = "bench throughput --model micro --dataset d.jsonl --output-dir run";
    for spelling in ["--kv-cache-free-mem-fraction -1", "--kv-cache-free-gpu-mem-fraction -0.5"] {
        let message = sandbox.refused(&format!("{bench} --device cpu {spelling}"));
        assert_names(&message, &["--kv-cache-free-mem-fraction", "above 0 and at most 1", "found -"]);
    }
    for (words, options) in [
        (
            bench,
            "--num-requests --warmup --random-seed --repeat --top-k --stop-ids --min-tokens --kv-cache-blocks --max-batch-size \
             --max-num-tokens --max-seq-len --tokens-per-block --seed --assume-ep --threads",
        ),
        (
            "build --model micro --output-dir e",
            "--max-batch-size --max-num-tokens --max-seq-len --tokens-per-block --seed --threads",
        ),
        ("bench moe-plan --experts 8", "--tokens --top-k --ep --n-group --topk-group"),
        ("bench kernels", "--repeat --threads"),
        ("bench moe-balance --model micro --dataset d.jsonl", "--threshold --assume-ep"),
        ("simulate --rate 1", "--num-requests --concurrency"),
    ] {
        for option in options.split_whitespace() {
            let message = sandbox.refused(&format!("{words} {option} -1"));
            assert_names(&message, &[&format!("'-1' for '{option} ")]);
        }
    }
}

#[test]
fn options_that_exclude_each_other() {
    let sandbox = with_dataset();
    let bench = "bench throughput --model micro --dataset d.jsonl";
    for (option, other) in [
        ("--measure-profiler-overhead --profile 2", "--profile"),
        ("--kv-cache-blocks 9 --kv-cache-free-mem-fraction 0.5", "--kv-cache-blocks"),
        ("--log-iteration-data --json", "--json"),
    ] {
        assert_names(&sandbox.refused(&format!("{bench} {option}")), &[other, "cannot be used with"]);
    }
}

#[test]
fn a_call_without_a_model() {
    let message = with_dataset().refused("bench throughput --dataset d.jsonl");
    assert_names(&message, &["--engine-dir", "--model", "strobe build"]);
}

#[test]
fn bad_cpu_tier() {
    let sandbox = with_dataset();
    for words in [
        "bench throughput --model micro --dataset d.jsonl --output-dir run",
        "build --model micro --output-dir e",
        "doctor",
    ] {
        let message = sandbox.refused_with(&[("STROBE_CPU", "sse9")], words);
        assert_names(&message, &["STROBE_CPU", "sse9", "scalar, avx2, avx512"]);
    }
}

#[test]
fn token_ids_that_eval_cannot_run() {
    let sandbox = Sandbox::new();
    let eval = format!("eval logits --model {FIXTURES}/llama --output l.json");
    assert_names(&sandbox.refused(&format!("{eval} --ids 5,64")), &["--ids", "64"]);
    assert_names(&sandbox.refused(&format!("{eval} --ids 5,x")), &["--ids", "x"]);
    assert_names(&sandbox.refused(&format!("{eval} --ids 5,6 --decode 127")), &["--decode", "129", "128"]);
}

// Profile windows

const BAD_WINDOWS: [(&str, &str); 10] = [
    ("8-3", "`8-3` is reversed"),
    ("1-4,4-8", "`1-4` and `4-8` overlap"),
    ("3,3", "`3` and `3` overlap"),
    ("9,1-100", "`1-100` and `9` overlap"),
    ("5-", "`5-` has an end missing"),
    ("-5", "`-5` has an end missing"),
    ("1,,2", "is empty"),
    ("+1", "`+1` has a sign"),
    ("1-2-3", "`1-2-3` has a second dash"),
    ("x", "`x` is not a number"),
];

#[test]
fn bad_profile_windows_name_the_span() {
    let sandbox = with_dataset();
    let words = "bench throughput --model micro --dataset d.jsonl --output-dir run --profile";
    for (spec, named) in BAD_WINDOWS {
        assert_names(&sandbox.refused(&format!("{words} {spec}")), &["--profile", spec, named]);
    }
    assert_names(&sandbox.refused_command(sandbox.command(words).arg("")), &["--profile", "empty"]);
}

#[test]
fn bad_profile_variables_are_named_too() {
    let sandbox = with_dataset();
    let words = "bench throughput --model micro --dataset d.jsonl --output-dir run";
    let variables = ["STROBE_PROFILE_START_STOP", "TLLM_PROFILE_START_STOP", "TLLM_GPTM_PROFILE_START_STOP"];
    for (index, (spec, named)) in BAD_WINDOWS.into_iter().enumerate() {
        let variable = variables[index % variables.len()];
        assert_names(&sandbox.refused_with(&[(variable, spec)], words), &[variable, spec, named]);
    }
    let both = [("TLLM_PROFILE_START_STOP", "9-2"), ("TLLM_GPTM_PROFILE_START_STOP", "1")];
    assert_names(&sandbox.refused_with(&both, words), &["TLLM_PROFILE_START_STOP: ", "`9-2` is reversed"]);
}

// Engine directories

#[test]
fn where_nothing_can_be_written_free_space_is_not_the_reason() {
    let sandbox = Sandbox::new();
    let message = sandbox.refused("build --model micro --output-dir /proc/engine");
    assert_names(&message, &["/proc"]);
    assert!(!message.contains("GiB free"), "{message}");
}

#[test]
fn missing_engine_directory() {
    let sandbox = with_dataset();
    let message = sandbox.refused("bench throughput --engine-dir gone --dataset d.jsonl --output-dir run");
    assert_names(&message, &["--engine-dir", "`gone`", "strobe build"]);
    let message = sandbox.refused(&format!("bench throughput --engine-dir {FIXTURES}/llama --dataset d.jsonl"));
    assert_names(&message, &["--engine-dir", "model directory", "--model"]);
}

#[test]
fn engine_of_another_version() {
    let sandbox = with_engine();
    sandbox.edit(
        "e/config.json",
        &format!("\"version\": \"{}\"", env!("CARGO_PKG_VERSION")),
        "\"version\": \"99.4.0\"",
    );
    let message = sandbox.refused("bench throughput --engine-dir e --dataset d.jsonl --output-dir run");
    assert_names(&message, &["e/config.json", "99.4.0", env!("CARGO_PKG_VERSION"), "rebuild"]);
}

#[test]
fn engine_field_that_cannot_be_run() {
    let sandbox = with_engine();
    let original = sandbox.read("e/config.json");
    for (from, to, field) in [
        ("\"tp_size\": 1", "\"tp_size\": 2", "pretrained_config.mapping.tp_size"),
        ("\"quant_algo\": null", "\"quant_algo\": \"W4A16\"", "pretrained_config.quantization.quant_algo"),
        ("\"max_beam_width\": 1", "\"max_beam_width\": 4", "build_config.max_beam_width"),
        ("\"gemm_plugin\": \"auto\"", "\"gemm_plugin\": \"fp8\"", "build_config.plugin_config.gemm_plugin"),
        ("\"hidden_act\": \"silu\"", "\"hidden_act\": \"relu\"", "pretrained_config.hidden_act"),
    ] {
        sandbox.write("e/config.json", &original);
        sandbox.edit("e/config.json", from, to);
        let message = sandbox.refused("bench throughput --engine-dir e --dataset d.jsonl --output-dir run");
        assert_names(&message, &["e/config.json", field, "expected", "found", "rebuild"]);
    }
}

#[test]
fn engine_with_damaged_weights() {
    let sandbox = with_engine();
    truncate(&sandbox, "e/rank0.engine", 100_000);
    let message = sandbox.refused("bench throughput --engine-dir e --dataset d.jsonl --output-dir run");
    assert_names(&message, &["e/rank0.engine", "truncated", "100000"]);
}

#[test]
fn build_options_with_an_engine_directory() {
    let sandbox = with_engine();
    for (option, value) in [
        ("--dtype", "float32"),
        ("--max-seq-len", "64"),
        ("--tokens-per-block", "16"),
        ("--gemm-plugin", "disable"),
        ("--context-fmha", "disable"),
        ("--paged-kv-cache", "disable"),
        ("--seed", "1"),
    ] {
        let message = sandbox.refused(&format!("bench throughput --engine-dir e --dataset d.jsonl {option} {value}"));
        assert_names(&message, &[option, "strobe build", "--model"]);
    }
    let message = sandbox.refused("bench throughput --engine-dir e --model micro --dataset d.jsonl");
    assert_names(&message, &["--engine-dir", "--model", "not both"]);
    let message = sandbox.refused("bench throughput --model e --dataset d.jsonl");
    assert_names(&message, &["`e` is an engine directory", "--engine-dir"]);
    for option in ["--max-batch-size 999", "--max-num-tokens 99999"] {
        let message = sandbox.refused(&format!("bench throughput --engine-dir e --dataset d.jsonl {option}"));
        assert_names(&message, &[option, "built for"]);
    }
}

// Where results go

#[test]
fn unwritable_output() {
    let sandbox = with_dataset();
    let bench = "bench throughput --model micro --dataset d.jsonl";
    let dist = "token-norm-dist --num-requests 1 --input-mean 1 --output-mean 1";
    for (words, named) in [
        // Below a regular file nobody can create anything, not even root.
        ("build --model micro --output-dir d.jsonl/e", "d.jsonl"),
        ("build --model micro --output-dir d.jsonl", "d.jsonl"),
        ("build --model micro --output-dir /proc/strobe-e", "/proc/strobe-e"),
        (&format!("{bench} --output-dir d.jsonl/run"), "d.jsonl"),
        (&format!("{bench} --output-dir /proc/strobe-run"), "/proc/strobe-run"),
        (&format!("{bench} --report-json gone/r.json"), "gone/r.json"),
        (&format!("{bench} --request-json gone/r.json"), "gone/r.json"),
        (&format!("{bench} --iteration-log gone/i.jsonl"), "gone/i.jsonl"),
        (&format!("{bench} --profile 1 --trace-out gone/t.json"), "gone/t.json"),
        (&format!("prepare-dataset --model micro --output gone/x.jsonl {dist}"), "gone/x.jsonl"),
        (&format!("eval logits --model {FIXTURES}/llama --ids 1 --output gone/l.json"), "gone/l.json"),
        ("demo --output-dir d.jsonl/demo", "d.jsonl"),
    ] {
        assert_names(&sandbox.refused(words), &[named]);
    }
}

#[test]
fn an_existing_run_directory_is_replaced_only_on_request() {
    let sandbox = with_dataset();
    let bench = "bench throughput --model micro --dataset d.jsonl --warmup 0 --output-dir run";
    sandbox.ok(&format!("{bench} --num-requests 1"));
    assert_eq!(sandbox.json_lines("run/requests.jsonl").len(), 1);
    assert_names(&sandbox.refused(bench), &["--output-dir", "`run` exists already", "--overwrite"]);
    // A call that fails does not cost the old run either.
    let message = sandbox.refused(&format!("{bench} --overwrite --kv-cache-blocks 0"));
    assert_names(&message, &["--kv-cache-blocks"]);
    sandbox.ok(&format!("{bench} --overwrite"));
    assert_eq!(sandbox.json_lines("run/requests.jsonl").len(), 2);
    assert_eq!(sandbox.names("."), ["d.jsonl", "run"]);
}

#[test]
fn a_foreign_directory_is_never_replaced() {
    let sandbox = with_engine();
    fs::create_dir(sandbox.path("mine")).unwrap();
    sandbox.write("mine/thesis.txt", "years of work");
    let bench = "bench throughput --engine-dir e --dataset d.jsonl --output-dir";
    for (words, named) in [
        (format!("{bench} mine --overwrite"), "run.json"),
        (format!("{bench} e --overwrite"), "run.json"),
        ("build --model micro --output-dir mine --overwrite".into(), "config.json"),
        ("demo --output-dir mine --overwrite".into(), "ab.json"),
    ] {
        assert_names(&sandbox.refused(&words), &["--output-dir", named, "--overwrite does not touch it"]);
    }
}
