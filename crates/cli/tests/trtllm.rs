//! Command lines of TensorRT-LLM's users: each runs, or is answered by a line that does.

mod common;

use std::process::{Command, Stdio};

use common::{Done, Sandbox, assert_names, finish};

/// A sandbox with a model (M), links to the binary under the tools' names, and a line of a script run with both.
struct Script(Sandbox);

const TOOLS: [&str; 8] = [
    "strobe",
    "trtllm-bench",
    "trtllm-build",
    "trtllm-run",
    "trtllm-serve",
    "gptManagerBenchmark",
    "prepare_dataset.py",
    "convert_checkpoint.py",
];

impl Script {
    fn new() -> Script {
        let sandbox = Sandbox::new();
        sandbox.copy_model("llama", "M");
        std::fs::create_dir(sandbox.path("bin")).unwrap();
        for tool in TOOLS {
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_strobe"), sandbox.path("bin").join(tool)).unwrap();
        }
        Script(sandbox)
    }

    /// Runs a line as a shell does.
    fn line(&self, line: &str) -> Done {
        let plain = self.0.command("");
        let mut command = Command::new("sh");
        command.args(["-c", line]).current_dir(self.0.path("")).stdin(Stdio::null());
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.0.path("bin").display()));
        finish(&mut command)
    }

    #[track_caller]
    fn works(&self, line: &str) -> Done {
        let done = self.line(line);
        assert_eq!(done.code, Some(0), "{line}\n{}\n{}", done.stdout, done.stderr);
        done
    }

    /// The line to type that an answer has between its backticks.
    #[track_caller]
    fn answer(&self, line: &str) -> String {
        let done = self.line(line);
        assert_eq!((done.code, done.stdout.as_str()), (Some(2), ""), "{line}: {}", done.stderr);
        assert_eq!(done.stderr.lines().count(), 1, "{}", done.stderr);
        let (_, rest) = done.stderr.split_once('`').unwrap_or_else(|| panic!("no line to type: {}", done.stderr));
        rest.split_once('`').unwrap().0.to_owned()
    }
}

#[test]
fn the_workflow_of_a_gemm_plugin_ablation_runs_unchanged() {
    let script = Script::new();
    script.works(
        "prepare_dataset.py --stdout --tokenizer M token-norm-dist --input-mean 8 --output-mean 4 --input-stdev 0 \
         --output-stdev 0 --num-requests 5 > d.jsonl",
    );
    assert_eq!(script.0.json_lines("d.jsonl").len(), 5);
    // The checkpoint that another tool would convert is the model itself.
    let answer = script.answer("convert_checkpoint.py --model_dir M --output_dir C --dtype float16");
    assert_eq!(answer, "trtllm-build --checkpoint_dir M --dtype float16 --output_dir ENGINE");
    script.works(&answer);
    // A script that goes on with the checkpoint that was not made, or with an engine, is told what to build from.
    for (dir, what) in [("C", "C does not exist"), ("ENGINE", "ENGINE is an engine directory")] {
        let done = script.line(&format!("trtllm-build --checkpoint_dir {dir} --output_dir E --gemm_plugin auto"));
        assert_eq!(done.code, Some(2), "{}", done.stdout);
        let line = "`trtllm-build --checkpoint_dir MODEL --output_dir E --gemm_plugin auto`";
        assert_names(&done.stderr, &[what, "not needed", line]);
    }
    assert_eq!(
        script.answer("gptManagerBenchmark --log_iteration_data"),
        "strobe bench throughput --log-iteration-data --engine-dir ENGINE --dataset dataset.jsonl"
    );
    for plugin in ["auto", "disable"] {
        let done = script.works(&format!(
            "trtllm-build --checkpoint_dir M --output_dir E-{plugin} --gemm_plugin {plugin} --gpt_attention_plugin auto \
             --max_batch_size 8 --max_input_len 64 --max_seq_len 96 --remove_input_padding enable --workers 1"
        ));
        assert!(done.stdout.contains(&format!("--gemm-plugin {plugin}")), "{}", done.stdout);
        assert_names(&done.stderr, &["running `strobe build", "--max-input-len 64 left out", "--workers 1 left out"]);
        let done = script.works(&format!(
            "trtllm-bench --model org/name --model_path M throughput --dataset d.jsonl --engine_dir E-{plugin} \
             --backend pytorch --streaming --warmup 0 --report_json {plugin}.json"
        ));
        assert_names(
            &done.stderr,
            &["--model org/name left out", "--backend pytorch left out", "--runtime pytorch-graph"],
        );
        let report = script.0.json(&format!("{plugin}.json"));
        assert_eq!(report["request_info"]["num_requests"], 5);
        assert!(report["streaming_metrics"].is_object(), "--streaming was dropped");
        let ran = report["strobe"]["command"].as_str().unwrap();
        assert!(ran.contains("bench throughput") && ran.contains(&format!("--engine-dir E-{plugin}")), "{ran}");
    }
    let done =
        script.works("gptManagerBenchmark --engine_dir E-auto --dataset d.jsonl --type IFB --log_iteration_data");
    assert!(done.stdout.contains("[strobe][INFO]"), "{}", done.stdout);
}

#[test]
fn the_same_lines_run_behind_strobe_and_with_options_before_the_verb() {
    let script = Script::new();
    script.works(
        "strobe trtllm-bench --model M prepare-dataset --output d.jsonl token-norm-dist --num-requests=3 --input-mean=8 \
         --output-mean=4 --input-stdev=0 --output-stdev=0",
    );
    script.works("strobe --model M throughput --dataset d.jsonl --backend pytorch --warmup 0");
    script
        .works("strobe --model M --json bench throughput --dataset d.jsonl --max_batch_size 2 --kv_cache_reuse enable");
    let done = script.works(
        "strobe python3 benchmarks/cpp/prepare_dataset.py --tokenizer M --stdout token-norm-dist --num-requests 2 \
         --input-mean 4 --output-mean 2 | strobe bench throughput --model M --dataset - --warmup 0",
    );
    assert!(done.stdout.contains("Number of requests:             2"), "{}", done.stdout);
}

#[test]
fn what_strobe_does_not_do_is_answered_by_lines_that_run() {
    let script = Script::new();
    script.works("strobe build --model M --output-dir E");
    script.0.write("p.txt", "the first prompt\n\na second one\n");
    let answer =
        script.answer("trtllm-run --engine_dir E --prompts_file p.txt --max_output_len 6 --report_json r.json");
    script.works(&answer);
    assert_eq!(script.0.json("r.json")["request_info"]["num_requests"], 2);
    let answer = script.answer("trtllm-serve M --host 0.0.0.0");
    assert!(answer.contains("--model M"), "{answer}");
    script.works(&answer.replace("FILE", "prompts.jsonl").replace("RATE", "100"));
}

#[test]
fn settings_of_a_yaml_file_are_followed() {
    let script = Script::new();
    script.works(
        "strobe prepare-dataset --model M --output d.jsonl token-norm-dist --num-requests 2 --input-mean 4 --input-stdev 0 \
         --output-mean 2 --output-stdev 0",
    );
    script.0.write(
        "extra.yaml",
        "max_batch_size: 1\nenable_chunked_prefill: true\nkv_cache_config:\n  enable_block_reuse: false\nattn_backend: TRTLLM\n",
    );
    let line =
        "trtllm-bench --model M throughput --dataset d.jsonl --max_batch_size 8 --extra_llm_api_options extra.yaml";
    let done = script.works(&format!("{line} --report_json r.json"));
    assert_names(
        &done.stderr,
        &[
            "--max-batch-size 1 --chunked-context enable --kv-cache-reuse disable",
            "attn_backend left out",
            "extra.yaml says 1",
        ],
    );
    assert_eq!(script.0.json("r.json")["world_info"]["max_batch_size"], 1);
}

#[test]
fn options_that_would_change_the_work_are_refused() {
    let script = Script::new();
    script.0.write("x.yaml", "max_batch_size: 4\ntensor_parallel_size: 8\n");
    for (line, parts) in [
        ("trtllm-bench --model M throughput --dataset d --tp 2", ["--tp 2", "one device"]),
        (
            "trtllm-bench --model M throughput --dataset d --extra_llm_api_options x.yaml",
            ["x.yaml, line 2", "one device"],
        ),
        ("trtllm-bench --model M throughput --dataset d --config none.yaml", ["--config", "none.yaml"]),
        (
            "trtllm-build --checkpoint_dir M --output_dir E --gemm_plugin fp8",
            ["--gemm-plugin fp8", "--quantization fp8"],
        ),
        ("trtllm-build --checkpoint_dir M --output_dir E --max_beam_width 4", ["--max-beam-width 4", "beam"]),
        ("strobe bench throughput --model M --dataset d --backend triton", ["--backend triton", "pytorch"]),
    ] {
        let done = script.line(line);
        assert_eq!(done.code, Some(2), "{line}");
        assert_names(&done.stderr, &parts);
        assert_eq!(done.stderr.lines().count(), 1, "{}", done.stderr);
    }
}

#[test]
fn models_that_are_not_here_get_the_right_hint() {
    let script = Script::new();
    script.0.dataset("d.jsonl", &[(4, 2)]);
    let hint = |words: &str, parts: &[&str]| assert_names(&script.0.refused(words), parts);
    hint(
        "build --model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --output-dir E",
        &["hf download TinyLlama/TinyLlama-1.1B-Chat-v1.0 --local-dir", "`tinyllama-1.1b`"],
    );
    hint("build --model tinylama-1.1b --output-dir E", &["did you mean `tinyllama-1.1b`?"]);
    hint(
        "bench throughput --engine-dir M --dataset d.jsonl",
        &["model directory", "--model M", "strobe build --model M"],
    );
    hint("bench throughput --engine-dir nowhere --dataset d.jsonl", &["no such directory", "strobe build"]);
    std::fs::create_dir(script.0.path("C")).unwrap();
    script.0.write("C/config.json", "{\"architecture\": \"LlamaForCausalLM\"}");
    script.0.write("C/rank0.safetensors", "");
    hint("build --model C --output-dir E", &["converted for TensorRT-LLM", "Hugging Face directory"]);
    hint("bench throughput --model M --dataset d.jsonl --dtype flaot16", &["float16"]);
    script.0.ok("build --model M --output-dir E --dtype bf16");
}

#[test]
fn a_build_says_what_it_does_not_keep() {
    let script = Script::new();
    let file = format!("{}/gguf/llama-q8_0.gguf", common::FIXTURES);
    let done = script.0.ok(&format!("build --model {file} --output-dir E"));
    assert_names(&done.stderr, &["Q8_0", "8.5 bits per weight", "float16", "--quantization int8"]);
    let done = script.0.ok(&format!("build --model {file} --output-dir E8 --quantization int8"));
    assert_eq!(done.stderr, "", "what keeps its bits needs no word");
    let mut tokenizer = script.0.json("M/tokenizer.json");
    let token = serde_json::json!({
        "id": 64, "content": "<extra>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    });
    tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    script.0.write("M/tokenizer.json", tokenizer.to_string());
    let done = script.0.ok("build --model M --output-dir E65");
    assert_names(&done.stderr, &["tokenizer has 65 ids", "the model 64"]);
}

#[test]
fn completions_man_pages_and_the_commit() {
    let script = Script::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let done = script.works(&format!("strobe completions {shell}"));
        assert_names(&done.stdout, &["strobe", "gemm-plugin"]);
    }
    let done = script.works("strobe man --output-dir man");
    assert!(done.stdout.contains("pages"), "{}", done.stdout);
    let names = script.0.names("man");
    for page in ["strobe.1", "strobe-bench-throughput.1", "strobe-compare.1"] {
        assert!(names.iter().any(|name| name == page), "{page} of {names:?}");
    }
    assert_names(&script.0.read("man/strobe-bench-throughput.1"), &["engine\\-dir", ".TH"]);
    let version = script.works("strobe --version").stdout;
    assert!(version.starts_with(&format!("strobe {}", env!("CARGO_PKG_VERSION"))), "{version}");
}
