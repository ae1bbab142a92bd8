//! `strobe prepare-dataset`, and the datasets that `strobe bench` reads.

mod common;

use common::{FIXTURES, Sandbox, assert_names, int, ints, outputs};
use serde_json::Value;

const NORMAL: &str =
    "token-norm-dist --num-requests 200 --input-mean 40 --input-stdev 10 --output-mean 40 --output-stdev 10";
const UNIFORM: &str = "token-unif-dist --num-requests 200 --input-min 3 --input-max 9 --output-min 5 --output-max 6";

/// Input and output lengths of a dataset.
fn lengths(lines: &[Value]) -> Vec<(usize, usize)> {
    lines.iter().map(|l| (ints(l, "/input_ids").len(), int(l, "/output_tokens") as usize)).collect()
}

/// Every line is exactly `{"task_id":0,"input_ids":[..],"output_tokens":N}`, as trtllm-bench writes it.
fn assert_anchor_format(text: &str) {
    for (number, line) in text.lines().enumerate() {
        let rest =
            line.strip_prefix(&format!("{{\"task_id\":{number},\"input_ids\":[")).unwrap_or_else(|| panic!("{line}"));
        let (ids, tail) = rest.split_once(']').unwrap();
        assert!(ids.split(',').all(|id| id.parse::<u32>().is_ok()), "{line}");
        let tokens = tail
            .strip_prefix(",\"output_tokens\":")
            .and_then(|t| t.strip_suffix('}'))
            .unwrap_or_else(|| panic!("{line}"));
        assert!(tokens.parse::<u32>().is_ok(), "{line}");
    }
    assert!(text.ends_with("}\n"));
}

#[test]
fn lines_are_the_anchors_in_every_kind() {
    let sandbox = Sandbox::new();
    sandbox.write("chats.jsonl", "{\"q\":\"How many?\",\"a\":\"Six.\"}\n{\"q\":\"ü\",\"a\":\"No one knows.\"}\n");
    for kind in [NORMAL, UNIFORM, "real-dataset --file chats.jsonl --prompt-key q --output-key a"] {
        let done = sandbox.ok(&format!("prepare-dataset --model micro --output d.jsonl {kind}"));
        assert_anchor_format(&sandbox.read("d.jsonl"));
        assert_names(&done.stdout, &["d.jsonl", "requests", "input", "output"]);
        assert_eq!(
            sandbox.ok(&format!("prepare-dataset --model micro --stdout {kind}")).stdout,
            sandbox.read("d.jsonl")
        );
    }
}

#[test]
fn the_seed_decides_the_file() {
    let sandbox = Sandbox::new();
    let make = |options: &str| sandbox.ok(&format!("prepare-dataset --model micro --stdout {options} {NORMAL}")).stdout;
    let default = make("");
    assert_eq!(default, make("--random-seed 420"));
    assert_ne!(default, make("--random-seed 421"));
}

#[test]
fn input_and_output_lengths_are_independent() {
    let sandbox = Sandbox::new();
    let kind = NORMAL.replace("200", "2000");
    sandbox.ok(&format!("prepare-dataset --model micro --output d.jsonl {kind}"));
    let pairs = lengths(&sandbox.json_lines("d.jsonl"));
    let mean = |of: &dyn Fn(&(usize, usize)) -> f64| pairs.iter().map(of).sum::<f64>() / pairs.len() as f64;
    let (x, y) = (mean(&|p| p.0 as f64), mean(&|p| p.1 as f64));
    let covariance = mean(&|p| (p.0 as f64 - x) * (p.1 as f64 - y));
    let (sx, sy) = (mean(&|p| (p.0 as f64 - x).powi(2)).sqrt(), mean(&|p| (p.1 as f64 - y).powi(2)).sqrt());
    // 2000 independent pairs: the correlation's standard deviation is 0.022.
    assert!((covariance / (sx * sy)).abs() < 0.08, "correlation {}", covariance / (sx * sy));
    for (mean, deviation) in [(x, sx), (y, sy)] {
        assert!((mean - 40.5).abs() < 1.0 && (deviation - 10.0).abs() < 0.7, "{mean} {deviation}");
    }
}

#[test]
fn uniform_lengths_stay_in_their_range_and_ids_in_the_vocabulary() {
    let sandbox = Sandbox::new();
    sandbox.ok(&format!("prepare-dataset --model {FIXTURES}/qwen3 --output d.jsonl {UNIFORM}"));
    let lines = sandbox.json_lines("d.jsonl");
    let pairs = lengths(&lines);
    for length in 3..=9 {
        assert!(pairs.iter().any(|p| p.0 == length));
    }
    assert!(pairs.iter().all(|p| (3..=9).contains(&p.0) && (5..=6).contains(&p.1)));
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(format!("{FIXTURES}/qwen3/config.json")).unwrap()).unwrap();
    let vocabulary = int(&config, "/vocab_size");
    assert!(lines.iter().flat_map(|l| ints(l, "/input_ids")).all(|id| id < vocabulary));
}

#[test]
fn a_vocabulary_comes_from_a_preset_a_model_an_engine_or_a_tokenizer() {
    let sandbox = Sandbox::new();
    sandbox.ok(&format!("build --model {FIXTURES}/llama --output-dir e"));
    for source in [
        "--model e".to_string(),
        format!("--model {FIXTURES}/llama"),
        format!("--tokenizer {FIXTURES}/llama"),
        format!("--tokenizer {FIXTURES}/llama/tokenizer.json"),
    ] {
        let summary = sandbox.ok(&format!("prepare-dataset {source} --output d.jsonl --json {UNIFORM}")).stdout;
        let summary: Value = serde_json::from_str(&summary).unwrap();
        assert_eq!(int(&summary, "/num_requests"), 200, "{source}");
        assert!((1..=64).contains(&int(&summary, "/vocab_size")), "{source}");
        assert_anchor_format(&sandbox.read("d.jsonl"));
    }
}

#[test]
fn real_text_is_tokenized() {
    let sandbox = Sandbox::new();
    let text = "Grüße, 世界!";
    sandbox.write(
        "chats.jsonl",
        format!("{{\"q\":\"{text}\",\"a\":7}}\n\n{{\"q\":\"b\",\"a\":\"four\"}}\n{{\"q\":\"c\",\"a\":1}}\n"),
    );
    let real = "real-dataset --file chats.jsonl --prompt-key q";
    sandbox.ok(&format!("prepare-dataset --model micro --output d.jsonl {real} --output-key a --num-requests 2"));
    let lines = sandbox.json_lines("d.jsonl");
    assert_eq!(lines.len(), 2);
    assert_eq!(int(&lines[0], "/output_tokens"), 7);
    assert!(int(&lines[1], "/output_tokens") >= 1);
    // The prompt as text gives the same tokens, so the same answers, as its ids.
    sandbox.write("text.jsonl", format!("{{\"task_id\":0,\"prompt\":\"{text}\",\"output_tokens\":7}}\n"));
    let answer = |dataset: &str| {
        sandbox.ok(&format!(
            "bench throughput --model micro --dataset {dataset} --num-requests 1 --output-dir run --overwrite"
        ));
        sandbox.json_lines("run/requests.jsonl")
    };
    let (ids, words) = (answer("d.jsonl"), answer("text.jsonl"));
    assert_eq!(ints(&lines[0], "/input_ids").len() as u64, int(&words[0], "/num_input_tokens"));
    assert_eq!(outputs(&ids), outputs(&words));

    sandbox.ok(&format!("prepare-dataset --model micro --output drawn.jsonl {real} --output-len-dist 12,0"));
    assert!(lengths(&sandbox.json_lines("drawn.jsonl")).iter().all(|l| l.1 == 12));
}

#[test]
fn bench_reads_the_anchors_variants() {
    let sandbox = Sandbox::new();
    let answer = |text: &str| {
        sandbox.write("d.jsonl", text);
        sandbox.ok("bench throughput --model micro --dataset d.jsonl --output-dir run --overwrite");
        outputs(&sandbox.json_lines("run/requests.jsonl"))
    };
    let ids = answer("{\"task_id\":0,\"input_ids\":[5,9,17],\"output_tokens\":6}\n");
    assert_eq!(ids[0].len(), 6);
    let same = [
        ("logits", "{\"task_id\":4,\"logits\":[5,9,17],\"output_tokens\":6}\n"),
        ("ids before text", "{\"task_id\":0,\"prompt\":\"other\",\"input_ids\":[5,9,17],\"output_tokens\":6}\n"),
        ("null ids are none", "{\"task_id\":0,\"input_ids\":null,\"logits\":[5,9,17],\"output_tokens\":6}\n"),
        ("unknown keys", "\n{\"task_id\":0,\"lora\":1,\"input_ids\":[5,9,17],\"output_tokens\":6}"),
        (
            "one document",
            "{\"metadata\":{\"workload_type\":\"x\"},\"samples\":[{\"input_len\":3,\"input_ids\":[5,9,17],\"output_len\":6,\"task_id\":-1}]}",
        ),
        ("spread out", "{\n \"samples\": [\n  {\"input_ids\": [5, 9, 17], \"output_len\": 6}\n ]\n}\n"),
    ];
    for (what, text) in same {
        assert_eq!(answer(text), ids, "{what}");
    }
    assert_eq!(answer("{\"task_id\":0,\"prompt\":\"hello\",\"output_tokens\":3}\n")[0].len(), 3);
}
