//! `strobe bench --runtime`: PyTorch on the same dataset. A stand-in for Python shows what is asked of it and what is
//! made of its answers; with a real one (`STROBE_TEST_PYTHON`, or a `python3` that has torch and transformers) its
//! tokens must be strobe's.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use common::{FIXTURES, Sandbox, assert_names, int, num, outputs};
use serde_json::Value;

/// A sandbox with a dataset of two requests and a stand-in `python` that keeps its input and answers with `answer`.
fn with_python(answer: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(5, 3), (9, 2)]);
    sandbox.write("answer", answer);
    let script = format!("#!/bin/sh\ncd {}\ncat > input\ncat answer\n", sandbox.path("").display());
    sandbox.write("python", script);
    fs::set_permissions(sandbox.path("python"), fs::Permissions::from_mode(0o755)).unwrap();
    sandbox
}

const READY: &str = r#"{"event":"ready","torch":"9.9","python":"3.99","description":"a stand-in","device_name":null,"device_bytes":null,"threads":2,"load_seconds":1.5,"warmup_seconds":0.5,"weight_bytes":1000,"kv_bytes":0}"#;
const RUN: &str = r#"{"event":"run"}
{"event":"request","id":0,"first_scheduled_ns":0,"token_times_ns":[1000000,2000000,3000000],"output_ids":[7,8,9]}
{"event":"request","id":1,"first_scheduled_ns":0,"token_times_ns":[1000000,2000000],"output_ids":[5,6]}
{"event":"done","steps":[[0,1000000,2,0,14],[1000000,2000000,0,2,0],[2000000,3000000,0,1,0]],"peak_bytes":null}"#;

const BENCH: &str = "bench throughput --model micro --dataset d.jsonl --runtime pytorch --device cpu --python ./python";

#[test]
fn requests_go_out_and_token_times_come_back() {
    let sandbox = with_python(&format!("{READY}\n{RUN}\n{RUN}\n"));
    let done = sandbox.ok(&format!(
        "{BENCH} --max-batch-size 3 --warmup 3 --repeat 2 --streaming --output-dir run --report-json r.json --request-json q.json \
         --iteration-log i.jsonl"
    ));
    let input = sandbox.json_lines("input");
    assert_eq!(input.len(), 3, "what to do, and two requests");
    for (key, value) in [
        ("runtime", Value::from("pytorch")),
        ("device", "cpu".into()),
        ("dtype", "float32".into()),
        ("batch", 3.into()),
        ("repeat", 2.into()),
        ("warmup", 3.into()),
        ("checkpoint", Value::Null),
    ] {
        assert_eq!(input[0][key], value, "{key}");
    }
    assert_eq!(input[0]["model"]["model_type"], "llama");
    assert_eq!(int(&input[2], "/output_tokens"), 2);
    assert_eq!(input[2]["input_ids"].as_array().unwrap().len(), 9);

    assert_names(
        &done.stdout,
        &["pytorch: a stand-in, torch 9.9", "Python 3.99", "static_batch", "SPREAD OVER 2 RUNS"],
    );
    let report = sandbox.json("r.json");
    assert_eq!(report, sandbox.json("run/report.json"));
    assert_names(report["engine"]["backend"].as_str().unwrap(), &["pytorch", "torch 9.9"]);
    assert_eq!(report["strobe"]["runtime"], "pytorch");
    // It has no such limit.
    assert!(report.pointer("/world_info").unwrap().get("max_num_tokens").is_none(), "{report:#}");
    // Five tokens in three milliseconds.
    assert!((num(&report, "/performance/system_output_throughput_tok_s") - 5.0 / 3e-3).abs() < 1e-6);
    assert_eq!(sandbox.names("run"), ["iterations.jsonl", "report.json", "requests.jsonl", "run.json"]);
    assert_eq!(outputs(&sandbox.json_lines("run/requests.jsonl")), [vec![7, 8, 9], vec![5, 6]]);
    assert_eq!(sandbox.read("i.jsonl"), sandbox.read("run/iterations.jsonl"));
    assert_eq!(sandbox.json_lines("i.jsonl").len(), 3);
    assert!(sandbox.exists("q.json"));
    // A run directory like any other.
    assert_names(&sandbox.ok("compare run run").stdout, &["decode"]);
}

#[test]
fn a_full_disk_costs_files_but_not_the_report() {
    let sandbox = with_python(&format!("{READY}\n{RUN}\n"));
    let words = format!("{BENCH} --streaming --output-dir run --report-json r.json --request-json q.json");
    let done = common::finish(&mut sandbox.with_small_files(6, &words));
    assert_eq!(done.code, Some(2), "{}\n{}", done.stdout, done.stderr);
    assert_names(&done.stdout, &["pytorch: a stand-in"]);
    assert_names(&done.stderr, &["run/report.json", "r.json", "File too large", "run directory: run"]);
    assert_eq!(sandbox.json("run/run.json")["state"], "partial");
    assert_eq!(sandbox.json_lines("run/requests.jsonl").len(), 2);
    assert!(sandbox.exists("q.json") && !sandbox.exists("r.json"));
}

#[test]
fn latency_is_one_request_at_a_time() {
    let second = r#"{"event":"request","id":1,"first_scheduled_ns":3000000,"token_times_ns":[5000000,6000000],"output_ids":[5,6]}"#;
    let run =
        RUN.lines().map(|line| if line.contains("\"id\":1") { second } else { line }).collect::<Vec<_>>().join("\n");
    let sandbox = with_python(&format!("{READY}\n{run}\n"));
    let words = BENCH.replace("throughput", "latency");
    sandbox.ok(&format!("{words} --output-dir run"));
    assert_eq!(int(&sandbox.json_lines("input")[0], "/batch"), 1);
    let requests = sandbox.json_lines("run/requests.jsonl");
    assert_eq!(int(&requests[1], "/sent_ns"), 3_000_000, "sent when the one before had ended");
}

#[test]
fn failures_of_the_runner() {
    for (answer, parts) in [
        (
            "{\"event\":\"error\",\"message\":\"no torch here\"}\n".to_string(),
            vec!["--runtime pytorch", "no torch here"],
        ),
        (format!("{READY}\n"), vec!["ended early", "did not say why"]),
        (format!("{READY}\n{}\n", RUN.lines().take(3).collect::<Vec<_>>().join("\n")), vec!["ended early"]),
        (format!("{READY}\nnonsense\n"), vec!["nonsense"]),
        (
            format!("{READY}\n{{\"event\":\"run\"}}\n{{\"event\":\"done\",\"steps\":[],\"peak_bytes\":null}}\n"),
            vec!["0 of 2"],
        ),
    ] {
        let sandbox = with_python(&answer);
        sandbox.write("input", ""); // so that the sandbox is as before but for its contents
        let done = sandbox.run(&format!("{BENCH} --output-dir run"));
        assert_eq!(done.code, Some(2), "{}", done.stderr);
        assert_eq!(done.stderr.lines().count(), 1, "{}", done.stderr);
        assert_names(&done.stderr, &parts);
        assert!(done.stdout.is_empty() && !sandbox.exists("run"));
    }
}

#[test]
fn bad_calls() {
    let sandbox = with_python("");
    for (words, parts) in [
        (BENCH.replace("./python", "nowhere/python"), vec!["nowhere/python", "--python"]),
        (BENCH.replace("--runtime pytorch", "--runtime tensorflow"), vec!["--runtime", "pytorch-graph"]),
        (BENCH.replace("--runtime pytorch ", ""), vec!["--python is for --runtime pytorch"]),
        (format!("{BENCH} --profile 1-2"), vec!["--profile", "--runtime strobe"]),
        (format!("{BENCH} --temperature 0.5"), vec!["--temperature", "--runtime strobe"]),
        (format!("{BENCH} --kv-cache-reuse enable"), vec!["--kv-cache-reuse", "--runtime strobe"]),
        (format!("{BENCH} --gemm-plugin disable"), vec!["--gemm-plugin", "--runtime strobe"]),
        (format!("{BENCH} --cuda-graph disable"), vec!["--cuda-graph", "--runtime strobe"]),
        (format!("{BENCH} --quantization fp8"), vec!["--runtime pytorch has no fp8"]),
        (format!("{BENCH} --request-rate 3"), vec!["--request-rate", "--runtime strobe"]),
        (
            format!("{BENCH} --max-num-tokens 64"),
            vec!["--max-num-tokens", "strobe and pytorch-graph", "--max-batch-size"],
        ),
    ] {
        assert_names(&sandbox.refused(&words), &parts);
    }
}

/// A request of 14 tokens within the vocabulary of the fixtures.
const SMALL_IDS: &str = r#"{"task_id":0,"input_ids":[3,4,5,6,7,8,9,10,11],"output_tokens":5}"#;

#[test]
fn models_that_the_runner_would_run_as_others_are_refused_before_it_starts() {
    let sandbox = with_python("");
    sandbox.ok("build --model moe-tiny --output-dir e --device cpu");
    let bench = |model: &str, runtime: &str| {
        format!("bench throughput {model} --dataset d.jsonl --runtime {runtime} --device cpu --python ./python")
    };
    for runtime in ["pytorch", "pytorch-graph"] {
        for (model, part) in [
            ("--model gpt-oss-20b", "experts"),
            ("--model moe-tiny", "experts"),
            ("--model deepseek-tiny", "experts"),
            ("--engine-dir e", "experts"),
        ] {
            // The stand-in would leave its input behind, which `refused` would notice.
            let message = sandbox.refused(&bench(model, runtime));
            let runtime = format!("--runtime {runtime} ");
            assert_names(&message, &[&runtime, part, "--runtime strobe", "tinyllama-1.1b"]);
        }
    }
    for (fixture, part) in [("mixtral", "experts"), ("gpt-oss", "experts"), ("mistral-window", "14 tokens pass")] {
        let model = format!("--model {FIXTURES}/{fixture}");
        let longer = bench(&model, "pytorch-graph").replace("d.jsonl", "long.jsonl");
        sandbox.write("long.jsonl", SMALL_IDS);
        assert_names(&sandbox.refused(&longer), &[fixture, part, "--runtime pytorch, which"]);
        // What transformers loads it knows.
        let done = sandbox.run(&longer.replace("pytorch-graph", "pytorch"));
        assert_names(&done.stderr, &["ended early"]);
        fs::remove_file(sandbox.path("input")).unwrap();
        fs::remove_file(sandbox.path("long.jsonl")).unwrap();
    }
}

#[test]
fn checkpoints_that_python_cannot_read_are_refused_before_it_starts() {
    let sandbox = with_python("");
    sandbox.write("d.jsonl", SMALL_IDS);
    let words = BENCH.replace("--model micro", &format!("--model {FIXTURES}/gguf/llama-q8_0.gguf"));
    assert_names(&sandbox.refused(&words), &["llama-q8_0.gguf", "GGUF", "Hugging Face directory"]);
}

/// A Python that has what the runner needs.
fn torch() -> Option<String> {
    let python = std::env::var("STROBE_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let mut command = Command::new(&python);
    command.args(["-c", "import torch, transformers"]).stdout(Stdio::null()).stderr(Stdio::null());
    if command.status().is_ok_and(|status| status.success()) {
        return Some(python);
    }
    eprintln!("skipped: {python} has no torch and transformers; name one that has with STROBE_TEST_PYTHON");
    None
}

#[test]
fn pytorch_gives_the_tokens_that_strobe_gives() {
    let Some(python) = torch() else { return };
    const BOTH: [&str; 2] = ["pytorch", "pytorch-graph"];
    for (model, runtimes) in [
        ("llama-bias", &BOTH[..]),
        ("llama3-rope-tied", &BOTH),
        ("qwen2", &BOTH),
        ("qwen3", &BOTH),
        // What only transformers knows.
        ("mistral-window", &BOTH[..1]),
        ("mixtral", &BOTH[..1]),
        ("gpt-oss", &BOTH[..1]),
        ("deepseek-v3", &BOTH[..1]),
    ] {
        let sandbox = Sandbox::new();
        let line = |(task, (input, output)): (usize, (usize, usize))| {
            let ids: Vec<_> = (0..input).map(|i| (3 + (task * 13 + i * 7) % 60).to_string()).collect();
            format!("{{\"task_id\":{task},\"input_ids\":[{}],\"output_tokens\":{output}}}\n", ids.join(","))
        };
        // The first three are of one length, as those of most synthetic datasets are.
        let lengths = [(9, 7), (9, 7), (9, 7), (12, 5), (3, 2), (20, 9), (8, 1)];
        sandbox.write("d.jsonl", lengths.into_iter().enumerate().map(line).collect::<String>());
        // In float32, where no two candidates are close enough for the order of a sum to decide.
        let common = "--dataset d.jsonl --dtype float32 --device cpu --threads 1";
        let bench = format!("bench throughput --model {FIXTURES}/{model} {common}");
        sandbox.ok(&format!("{bench} --output-dir strobe"));
        let expected = outputs(&sandbox.json_lines("strobe/requests.jsonl"));
        for &runtime in runtimes {
            let few = if runtime == "pytorch-graph" { "--max-num-tokens 32" } else { "" };
            let words = format!("--runtime {runtime} --python {python} --max-batch-size 3 {few}");
            sandbox.ok(&format!("{bench} {words} --warmup 0 --output-dir {runtime}"));
            let found = outputs(&sandbox.json_lines(&format!("{runtime}/requests.jsonl")));
            assert_eq!(found, expected, "{model} on {runtime}");
        }
    }
}

#[test]
fn pytorch_runs_presets() {
    let Some(python) = torch() else { return };
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(5, 3), (9, 2), (7, 4)]);
    for runtime in ["pytorch", "pytorch-graph"] {
        let words =
            format!("--runtime {runtime} --python {python} --dtype bfloat16 --threads 1 --output-dir {runtime}");
        sandbox.ok(&format!("bench throughput --model micro --dataset d.jsonl --device cpu {words}"));
        let requests = sandbox.json_lines(&format!("{runtime}/requests.jsonl"));
        let lengths: Vec<_> = outputs(&requests).iter().map(Vec::len).collect();
        assert_eq!(lengths, [3, 2, 4]);
        assert_eq!(sandbox.json(&format!("{runtime}/report.json"))["engine"]["dtype"], "bfloat16");
    }
}
