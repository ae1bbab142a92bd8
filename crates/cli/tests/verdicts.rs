//! Verdicts of `strobe compare` and `strobe ab` on runs whose figures are known: what is said, and the exit code.

mod common;

use common::{Done, Sandbox, assert_names, finish};
use serde_json::{Value, json};

const GATE: &str = "--fail-on-regression 5%";

/// What one made run shows.
#[derive(Clone)]
struct Made {
    /// Output tokens per second, of every repeat.
    tok_s: Vec<f64>,
    /// How long a decode iteration takes, in ms; prompts take the rest of the time.
    decode_ms: f64,
    /// How long a prompt iteration takes, in ms; what is left of half of the run where it is not said.
    prefill_ms: Option<f64>,
    requests: u64,
    /// Share of the run that threads waited for a CPU.
    waited: f64,
    threads: u64,
    model: &'static str,
}

fn made(tok_s: f64) -> Made {
    Made {
        tok_s: vec![tok_s],
        decode_ms: 8000.0 / tok_s,
        prefill_ms: None,
        requests: 64,
        waited: 0.001,
        threads: 2,
        model: "m",
    }
}

impl Made {
    fn repeats(tok_s: &[f64]) -> Made {
        Made { tok_s: tok_s.to_vec(), ..made(tok_s[0]) }
    }

    /// Writes a run directory of these figures.
    fn write(&self, sandbox: &Sandbox, name: &str) {
        std::fs::create_dir_all(sandbox.path(name)).unwrap();
        let repeat = |tok_s: &f64| {
            let total_ms = 2_000_000.0 / tok_s * 1e3;
            json!({
                "request_throughput_req_s": tok_s / 32.0, "output_throughput_tok_s": tok_s,
                "total_latency_ms": total_ms, "avg_request_latency_ms": 0.8 * total_ms, "avg_ttft_ms": 0.1 * total_ms,
                "host": {
                    "wall_ms": total_ms, "cores": 2, "threads": self.threads, "iterations_read": 10,
                    "cpu_wait_sum_ms": self.waited * total_ms * self.threads as f64, "cpu_wait_max_ms": self.waited * total_ms,
                },
                "cells": [
                    {"context_tokens": 1024, "generation_requests": 0, "iterations": 4, "total_ns": self.prefill_ms.map_or(0.5e6 * total_ms, |ms| 4e6 * ms)},
                    {"context_tokens": 0, "generation_requests": 64, "iterations": 100_000, "total_ns": 1e11 * self.decode_ms},
                ],
            })
        };
        let run = json!({
            "version": "0.1.0", "state": "complete", "partial": false, "started_utc_ns": 1_700_000_000_000_000_000u64,
            "engine": {"model_name": self.model, "build_config": {"plugin_config": {"context_fmha": true}}},
            "engine_dir": "E", "dataset": "d.jsonl", "arrival": "all at once, no concurrency limit",
            "machine": {"cpu": "Test CPU", "cores": 2, "threads": 2, "simd_tier": "avx2"},
        });
        let report = json!({
            "request_info": {"num_requests": self.requests, "avg_input_length": 64.0, "avg_output_length": 32.0},
            "strobe": {"repeats": self.tok_s.iter().map(repeat).collect::<Vec<_>>()},
        });
        sandbox.write(&format!("{name}/run.json"), run.to_string());
        sandbox.write(&format!("{name}/report.json"), report.to_string());
        let mut start = 1_000_000u64;
        let lines: Vec<String> = (0..20u64)
            .map(|iter| {
                let prompts = iter < 4;
                let ms = if prompts { 50.0 } else { self.decode_ms };
                let line = json!({
                    "iter": iter, "iterLatencyMS": ms,
                    "inflightBatchingStats": {
                        "numContextRequests": if prompts { 16 } else { 0 }, "numGenRequests": if prompts { 0 } else { 64 },
                        "numCtxTokens": if prompts { 1024 } else { 0 },
                    },
                    "strobe": {
                        "startNS": start, "scheduleMS": 0.0, "prepareMS": 0.0, "forwardMS": ms, "sampleMS": 0.0,
                        "respondMS": 0.0, "flops": 1, "bytes": 1,
                    },
                });
                start += (ms * 1e6) as u64 + 1000;
                format!("{line}\n")
            })
            .collect();
        sandbox.write(&format!("{name}/iterations.jsonl"), lines.concat());
    }
}

/// A comparison with a cache of the sandbox's own.
fn compare(sandbox: &Sandbox, words: &str) -> Done {
    // Wide enough that no sentence is broken.
    let mut command = sandbox.command(&format!("compare {words}"));
    finish(command.env("XDG_CACHE_HOME", sandbox.path("cache")).env("COLUMNS", "1000"))
}

/// Stores what `doctor --noise` would: equal runs of about this length differ by `sd`.
fn store_noise(sandbox: &Sandbox, model: &str, seconds: f64, sd: f64) {
    let spread = json!({"sd": sd, "freedom": 9.0});
    let noise = json!([{
        "machine": "Test CPU, 2 threads of 2 cores, avx2", "model": model, "seconds": seconds, "runs": 10,
        "measured_at": 1_700_000_000u64, "command": "strobe doctor --noise",
        "spreads": {"Output throughput (tokens/sec)": spread, "decode": spread, "prefill": spread},
    }]);
    std::fs::create_dir_all(sandbox.path("cache/strobe")).unwrap();
    sandbox.write("cache/strobe/noise.json", noise.to_string());
}

fn first_words(done: &Done) -> &str {
    done.stdout.split(':').next().unwrap_or_default()
}

#[test]
fn one_run_a_side_without_anything_known_cannot_tell() {
    let sandbox = Sandbox::new();
    made(1000.0).write(&sandbox, "a");
    made(700.0).write(&sandbox, "b");
    let done = compare(&sandbox, "a b");
    assert_eq!((first_words(&done), done.code), ("cannot tell", Some(0)), "without a gate it is an answer");
    assert_names(
        &done.stdout,
        &["700 vs 1,000 output tok/s", "strobe doctor --noise --engine-dir E --dataset d.jsonl", "strobe ab"],
    );
    for (more, code) in [("", 3), ("--inconclusive pass", 0), ("--inconclusive fail", 1)] {
        let done = compare(&sandbox, &format!("a b {GATE} {more}"));
        assert_eq!(done.code, Some(code), "{more}: {}", done.stderr);
    }
    assert_names(&compare(&sandbox, &format!("a b {GATE}")).stderr, &["CANNOT TELL", "5.0 %"]);
    assert_eq!(compare(&sandbox, "a b --inconclusive pass").code, Some(2), "nothing is gated");
}

#[test]
fn stored_noise_stands_in_for_repeats_of_the_same_model_and_length() {
    let sandbox = Sandbox::new();
    store_noise(&sandbox, "m", 2000.0, 0.02);
    made(1000.0).write(&sandbox, "a");
    made(1000.0 / 1.3).write(&sandbox, "slow");
    made(1001.0).write(&sandbox, "same");
    let done = compare(&sandbox, &format!("a slow {GATE}"));
    assert_eq!((first_words(&done), done.code), ("slower", Some(1)), "{}\n{}", done.stdout, done.stderr);
    assert_names(
        &done.stdout,
        &["B (slow) is 1.30x slower: 769 vs 1,000 output tok/s (one run a side, 99 % CI", "10 A/A runs"],
    );
    assert_names(&done.stderr, &["FAIL: B is slower by more than 5.0 %"]);
    let back = compare(&sandbox, &format!("slow a {GATE}"));
    assert_eq!((first_words(&back), back.code), ("faster", Some(0)));
    assert_names(&back.stdout, &["B (a) is 1.30x faster"]);
    // 9 degrees of freedom at 99 %: 3.25 x 1.414 x 2 % = 9.2 %: more than 5 %, so nothing can be told.
    let done = compare(&sandbox, &format!("a same {GATE}"));
    assert_eq!((first_words(&done), done.code), ("cannot tell", Some(3)), "{}", done.stdout);
    assert_names(&done.stdout, &["Smallest difference", "more runs a side"]);
    let done = compare(&sandbox, "a same --fail-on-regression 12%");
    assert_eq!((first_words(&done), done.code), ("no difference", Some(0)));
    assert_names(&done.stdout, &["No difference larger than 9."]);
    // Another model, or runs of another length: that spread says nothing about them.
    for (model, seconds) in [("other", 2000.0), ("m", 90.0), ("m", 20_000.0)] {
        store_noise(&sandbox, model, seconds, 0.02);
        let done = compare(&sandbox, "a slow");
        assert_eq!(first_words(&done), "cannot tell", "{model} {seconds}: {}", done.stdout);
    }
}

#[test]
fn single_runs_in_different_states_of_the_machine_are_not_told_apart() {
    let sandbox = Sandbox::new();
    store_noise(&sandbox, "m", 2000.0, 0.01);
    for (name, tok_s, bandwidth) in [("a", 1000.0, 91e9), ("b", 800.0, 54e9), ("c", 800.0, 80e9)] {
        made(tok_s).write(&sandbox, name);
        let mut report = sandbox.json(&format!("{name}/report.json"));
        report["strobe"]["peaks"] = json!({"read_bytes_per_s": bandwidth, "bandwidth_measured": "right before (1) and after (2) this run, the larger one"});
        sandbox.write(&format!("{name}/report.json"), report.to_string());
    }
    let done = compare(&sandbox, "a b");
    assert_eq!(first_words(&done), "cannot tell", "{}", done.stdout);
    assert_names(&done.stdout, &["the machine changed between the runs", "54.0 to 91.0 GB/s", "strobe ab"]);
    assert_eq!(first_words(&compare(&sandbox, "a c")), "slower");
}

#[test]
fn repeats_carry_their_own_spread() {
    let sandbox = Sandbox::new();
    Made::repeats(&[1000.0, 1020.0, 990.0]).write(&sandbox, "a");
    Made::repeats(&[900.0, 912.0, 893.0]).write(&sandbox, "b");
    for (index, tok_s) in [1000.0, 1020.0, 990.0].iter().enumerate() {
        made(*tok_s).write(&sandbox, &format!("a-{index}"));
        made(tok_s / 1.1).write(&sandbox, &format!("b-{index}"));
    }
    for words in ["a b", "a-* b-*"] {
        let done = compare(&sandbox, &format!("{words} {GATE} --json"));
        let document: Value = serde_json::from_str(&done.stdout).unwrap();
        assert_eq!(document["outcome"], "slower", "{words}");
        let runs = &document["comparison"]["runs"];
        assert_eq!((&runs["evidence"], &runs["counts"]), (&json!("repeats"), &json!([3, 3])), "{words}");
        let (low, high) = (&runs["figures"][0]["interval"]["low"], &runs["figures"][0]["interval"]["high"]);
        assert!(low.as_f64().unwrap() > 0.05 && high.as_f64().unwrap() < 0.2, "{low} {high}");
        assert_eq!((&document["gate"]["result"], done.code), (&json!("failed"), Some(1)));
    }
    assert_names(
        &compare(&sandbox, "a b").stdout,
        &["B (b) is 1.1", "means of 3 runs a side, 95 % CI", "one process", "up to 2 %", "strobe ab"],
    );
}

#[test]
fn a_run_that_the_machine_disturbed_says_nothing() {
    let sandbox = Sandbox::new();
    store_noise(&sandbox, "m", 2000.0, 0.01);
    made(1000.0).write(&sandbox, "a");
    Made { waited: 0.4, ..made(600.0) }.write(&sandbox, "busy");
    let done = compare(&sandbox, &format!("a busy {GATE}"));
    assert_eq!((first_words(&done), done.code), ("cannot tell", Some(3)), "{}", done.stdout);
    assert_names(&done.stdout, &["the machine was busy", "1 of 1 of B", "waited 40.0 % of the run for a CPU"]);
    // A little waiting does not explain a large difference.
    Made { waited: 0.05, ..made(600.0) }.write(&sandbox, "slow");
    let done = compare(&sandbox, "a slow");
    assert_eq!(first_words(&done), "slower", "{}", done.stdout);
    assert_names(&done.stdout, &["Note: the machine was busy", "wider by 2 times what was lost"]);
    // With more threads than cores the waiting is strobe's own doing.
    Made { waited: 0.4, threads: 4, ..made(600.0) }.write(&sandbox, "crowded");
    assert_eq!(first_words(&compare(&sandbox, "a crowded")), "slower");
    // Among repeats it is set aside, and the right side is named.
    for (name, tok_s, waited) in [("b-1", 1003.0, 0.0), ("b-2", 998.0, 0.0), ("b-3", 1001.0, 0.0), ("b-4", 500.0, 0.5)]
    {
        Made { waited, ..made(tok_s) }.write(&sandbox, name);
        made(tok_s.max(998.0) + 1.0).write(&sandbox, &name.replace('b', "c"));
    }
    let done = compare(&sandbox, "c-* b-*");
    assert_eq!(first_words(&done), "no difference", "{}", done.stdout);
    assert_names(&done.stdout, &["Excluded: 0 of 4 runs of A and 1 of 4 of B", "b-4"]);
}

#[test]
fn kinds_of_iteration_speak_where_whole_runs_cannot() {
    let sandbox = Sandbox::new();
    // Whole runs differ by noise, decode steps surely.
    for (index, (a, b)) in [(1000.0, 1050.0), (1100.0, 950.0), (950.0, 1060.0)].into_iter().enumerate() {
        let step = [8.0, 8.02, 7.99][index];
        let prefill_ms = Some(2.5e5 + index as f64);
        Made { decode_ms: step, prefill_ms, ..made(a) }.write(&sandbox, &format!("a-{index}"));
        Made { decode_ms: 1.2 * step, prefill_ms, ..made(b) }.write(&sandbox, &format!("b-{index}"));
    }
    let done = compare(&sandbox, "a-* b-*");
    assert_eq!(first_words(&done), "slower", "{}", done.stdout);
    assert_names(
        &done.stdout,
        &[
            "% slower, its kinds of iteration added up (95 % CI",
            "decode iterations",
            "1.20x slower",
            "whole runs alone do not tell",
            // What the table's figures are is said in its title.
            "Iterations of the runs by kind: typical time of one in ms (lower quartile, over the batches that all runs had)",
        ],
    );
    // Prompts that may make up for it: then nothing is proven, and the sentence names the part that differs.
    for (index, (prefill_a, prefill_b)) in [(2.4e5, 1.2e5), (3.1e5, 2.3e5), (1.9e5, 1.6e5)].into_iter().enumerate() {
        let step = [8.0, 8.02, 7.99][index];
        Made { decode_ms: step, prefill_ms: Some(prefill_a), ..made([1000.0, 1100.0, 950.0][index]) }
            .write(&sandbox, &format!("e-{index}"));
        Made { decode_ms: 1.12 * step, prefill_ms: Some(prefill_b), ..made([1250.0, 980.0, 1100.0][index]) }
            .write(&sandbox, &format!("f-{index}"));
    }
    let done = compare(&sandbox, &format!("e-* f-* {GATE}"));
    assert_eq!((first_words(&done), done.code), ("cannot tell", Some(3)), "{}\n{}", done.stdout, done.stderr);
    let headline = done.stdout.lines().find(|line| line.starts_with("Cannot tell")).unwrap();
    assert_names(headline, &["; but decode iterations", "1.12x slower"]);
    // A kind that disagrees is named in the sentence of the whole.
    for (index, tok_s) in [1000.0, 1001.0, 999.0].iter().enumerate() {
        made(*tok_s).write(&sandbox, &format!("c-{index}"));
        Made { decode_ms: 16.0 + index as f64 / 100.0, ..made(1.5 * tok_s) }.write(&sandbox, &format!("d-{index}"));
    }
    let done = compare(&sandbox, "c-* d-*");
    assert_eq!(first_words(&done), "faster");
    let headline: String = done.stdout.lines().skip(2).take(4).collect::<Vec<_>>().join(" ");
    assert!(headline.contains("1.50x faster") && headline.contains("; but decode iterations"), "{headline}");
}

#[test]
fn different_work_is_not_compared() {
    let sandbox = Sandbox::new();
    made(1000.0).write(&sandbox, "a");
    Made { requests: 128, ..made(1000.0) }.write(&sandbox, "b");
    let done = compare(&sandbox, "a b");
    assert_eq!((first_words(&done), done.code), ("not comparable", Some(2)));
    assert_names(&done.stderr, &["different work: A 64 requests, B 128"]);
    assert_eq!(compare(&sandbox, &format!("a b {GATE}")).code, Some(2));
}

#[test]
fn another_figure_can_decide() {
    let sandbox = Sandbox::new();
    for index in 0..3 {
        let tok_s = 1000.0 + f64::from(index);
        made(tok_s).write(&sandbox, &format!("a-{index}"));
        made(tok_s).write(&sandbox, &format!("b-{index}"));
        let report = sandbox.json(&format!("b-{index}/report.json"));
        let ttft = report["strobe"]["repeats"][0]["avg_ttft_ms"].as_f64().unwrap();
        sandbox.edit(
            &format!("b-{index}/report.json"),
            &format!("\"avg_ttft_ms\":{ttft:?}"),
            &format!("\"avg_ttft_ms\":{:?}", 2.0 * ttft),
        );
    }
    assert_eq!(first_words(&compare(&sandbox, "a-* b-*")), "no difference");
    let done = compare(&sandbox, "a-* b-* --metric throughput");
    assert_eq!(done.code, Some(2), "two figures are called so");
    assert_names(&done.stderr, &["Average TTFT"]);
    let done = compare(&sandbox, "a-* b-* --metric ttft");
    assert_eq!(first_words(&done), "slower", "{}\n{}", done.stdout, done.stderr);
    assert_names(&done.stdout, &["2.00x slower", "ms average TTFT"]);
}

#[test]
fn a_window_of_decode_steps_cannot_show_a_prompt_option() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 12), (7, 12), (65, 12)]);
    let bench = "bench throughput --model micro --device cpu --dataset d.jsonl --warmup 1 --profile 6-9 --output-dir";
    sandbox.ok(&format!("{bench} on --context-fmha enable"));
    sandbox.ok(&format!("{bench} off --context-fmha disable"));
    let done = compare(&sandbox, "on off");
    assert_names(
        &done.stdout.replace('\n', " ").replace("  ", " "),
        &["context_fmha, which acts on prompts only", "--profile 0-20"],
    );
    sandbox.ok(&format!("{bench} chunked --context-fmha enable --chunked-context disable --kv_cache_reuse enable"));
    assert_names(
        &compare(&sandbox, "on chunked").stdout.replace('\n', " ").replace("  ", " "),
        &["chunked_context and kv_cache_reuse, which act on prompts only", "cannot show them"],
    );
}

/// A command that answers with a vLLM result: `FIRST`, plus a little that differs from call to call.
fn fake(sandbox: &Sandbox, name: &str, first: u32, spread: u32) {
    let script = format!(
        "n=$(cat {name}.count 2>/dev/null || echo 0); echo $((n + 1)) > {name}.count\n\
         echo \"{{\\\"output_throughput\\\": $(({first} + (n * 7 % 5) * {spread})), \\\"completed\\\": 4, \\\"mean_ttft_ms\\\": 9.5}}\" > \"$1\"\n"
    );
    sandbox.write(&format!("{name}.sh"), script);
}

fn ab(sandbox: &Sandbox, words: &[&str]) -> Done {
    finish(sandbox.command("ab").args(words).env("COLUMNS", "1000"))
}

#[test]
fn ab_runs_any_commands_until_the_interval_is_narrow() {
    let sandbox = Sandbox::new();
    fake(&sandbox, "a", 1000, 2);
    fake(&sandbox, "b", 900, 2);
    let sides = ["--a-cmd", "sh a.sh {out}", "--b-cmd", "sh b.sh {out}", "--pairs", "5..9"];
    let done = ab(&sandbox, &[&sides[..], &["--fail-on-regression", "5%", "--output-dir", "x"]].concat());
    assert_eq!(done.code, Some(1), "{}\n{}", done.stdout, done.stderr);
    assert_names(
        &done.stdout,
        &["warm-up", "slower: A = a.sh, B = b.sh", "1.11x slower", "5 interleaved pairs", "99 % CI"],
    );
    // The gate's sentence: what failed, how sure, the limit, and where to look.
    let sentence =
        done.stderr.lines().find(|line| line.contains("FAIL: ")).unwrap_or_else(|| panic!("{}", done.stderr));
    let parts = ["FAIL: B is slower by more than 5.0 % (99 % CI +1", " % time, limit 5.0 %)", "Inspect: x/ab.json"];
    assert_names(sentence, &parts);
    // Order A B B A: the warm-up pair and five more, each side once in each.
    assert_eq!((sandbox.read("a.count").trim(), sandbox.read("b.count").trim()), ("6", "6"));
    let kept = sandbox.json("x/ab.json");
    assert_eq!((&kept["state"], &kept["outcome"]["pairs"]), (&json!("complete"), &json!(5)));
    assert_eq!(sandbox.names("x/runs").len(), 12);

    // Called again it takes what is there; with other sides it is refused; --overwrite starts anew.
    let again = ab(&sandbox, &[&sides[..], &["--output-dir", "x", "--json"]].concat());
    let document: Value = serde_json::from_str(&again.stdout).unwrap();
    assert_eq!((&document["outcome"], &document["pairs"]), (&json!("slower"), &json!(5)));
    assert_eq!(sandbox.read("a.count").trim(), "6");
    let other = ["--a-cmd", "sh b.sh {out}", "--b-cmd", "sh b.sh {out}", "--pairs", "5..9", "--output-dir", "x"];
    let done = ab(&sandbox, &other);
    assert_eq!(done.code, Some(2));
    assert_names(&done.stderr, &["holds another comparison", "A's command was `sh a.sh {out}`", "--overwrite"]);
    // A script that was changed is another side.
    let script = sandbox.read("a.sh");
    sandbox.write("a.sh", format!("{script}# faster\n"));
    let done = ab(&sandbox, &[&sides[..], &["--output-dir", "x"]].concat());
    assert_eq!(done.code, Some(2), "{}", done.stdout);
    assert_names(&done.stderr, &["a.sh has changed", "--overwrite starts anew"]);
    assert_eq!(sandbox.read("a.count").trim(), "6", "nothing ran");
    let same = ab(&sandbox, &[&other[..], &["--overwrite", "--fail-on-regression", "5%"]].concat());
    assert_eq!(same.code, Some(0), "{}\n{}", same.stdout, same.stderr);
    assert_names(&same.stdout, &["no difference", "No difference larger than"]);
    assert_names(&same.stdout, &["No difference larger than 2.5 %"]);
    // A figure of its own decides where it is named.
    let done = ab(&sandbox, &[&sides[..], &["--metric", "mean_ttft_ms", "--output-dir", "y"]].concat());
    assert_names(&done.stdout, &["no difference", "9.50 vs 9.50 mean_ttft_ms"]);
    let done = ab(&sandbox, &[&sides[..], &["--metric", "goodness", "--output-dir", "z"]].concat());
    assert_eq!(done.code, Some(2));
    assert_names(&done.stderr, &["goodness", "mean_ttft_ms"]);
    assert_eq!(sandbox.names("z/runs").len(), 2, "the first pair tells");
}

#[test]
fn ab_counts_runs_that_fail_and_gives_up_on_sides_that_never_work() {
    let sandbox = Sandbox::new();
    fake(&sandbox, "a", 1000, 2);
    fake(&sandbox, "b", 1000, 2);
    // Every third call of B fails.
    let script = sandbox.read("b.sh");
    sandbox.write("b.sh", format!("{script}if [ $((n % 3)) = 2 ]; then echo out of luck >&2; exit 7; fi\n"));
    let words = ["--a-cmd", "sh a.sh {out}", "--b-cmd", "sh b.sh {out}", "--pairs", "3..4", "--output-dir", "x"];
    let done = ab(&sandbox, &words);
    assert_eq!(done.code, Some(0), "{}\n{}", done.stdout, done.stderr);
    assert_names(&done.stdout, &["failed: B: exit code 7: out of luck", "runs failed and their pairs do not count"]);
    let never = ["--a-cmd", "sh a.sh {out}", "--b-cmd", "echo nope >&2; exit 9 # {out}", "--output-dir", "y"];
    let done = ab(&sandbox, &never);
    assert_eq!(done.code, Some(2));
    assert_names(&done.stderr, &["3 pairs in a row failed", "exit code 9: nope"]);
    // What counted before is concluded.
    fake(&sandbox, "c", 800, 2);
    let script = sandbox.read("c.sh");
    sandbox.write("c.sh", format!("{script}if [ $n -ge 4 ]; then echo gone >&2; exit 7; fi\n"));
    let done = ab(&sandbox, &["--a-cmd", "sh a.sh {out}", "--b-cmd", "sh c.sh {out}", "--output-dir", "v"]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_names(
        &done.stdout,
        &["1.25x slower", "Note: 3 pairs counted", "stopped by: 3 pairs in a row failed", "exit code 7: gone"],
    );
    let wrong = ["--a-cmd", "echo 5 > {out}", "--b-cmd", "echo 5 > {out}", "--output-dir", "z"];
    assert_names(&ab(&sandbox, &wrong).stderr, &["trtllm-bench, vLLM bench or llama-bench"]);
    // A result on stdout is one too.
    let echo = "echo '[{\"n_prompt\": 8, \"n_gen\": 0, \"avg_ts\": 5.5}]'";
    let done = ab(&sandbox, &["--a-cmd", echo, "--b-cmd", echo, "--pairs", "2", "--output-dir", "w"]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_names(&done.stdout, &["tok/s pp8"]);
}

#[test]
fn ab_builds_what_the_options_say_and_explains_with_a_recorded_pair() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 6), (7, 6)]);
    let words = [
        "--a",
        "--gemm-plugin auto",
        "--b",
        "--gemm-plugin disable --kv-cache-reuse enable",
        "--model",
        "micro",
        "--dataset",
        "d.jsonl",
        "--profile",
        "1-3",
        "--pairs",
        "2",
        "--output-dir",
        "x",
        "--json",
        "--",
        "--device",
        "cpu",
    ];
    let done = ab(&sandbox, &words);
    assert_eq!(done.code, Some(0), "{}\n{}", done.stdout, done.stderr);
    let document: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(
        document["comparison"]["names"],
        json!(["gemm-plugin auto", "gemm-plugin disable kv-cache-reuse enable"]),
        "{}",
        document["comparison"]["names"]
    );
    assert_eq!(document["comparison"]["runs"]["evidence"], "pairs");
    assert!(!document["comparison"]["by_op"].as_array().unwrap().is_empty());
    for name in [
        "x/engine-a/config.json",
        "x/engine-b/config.json",
        "x/compare.html",
        "x/runs/recorded-a/trace.sqlite",
        "x/runs/002-b/report.json",
    ] {
        assert!(sandbox.exists(name), "{name}");
    }
    assert!(!sandbox.exists("x/runs/002-b/trace.sqlite"), "pairs that count are not recorded");
    let of = |side: &str| {
        sandbox.json(&format!("x/engine-{side}/config.json"))["build_config"]["plugin_config"]["gemm_plugin"].clone()
    };
    assert_ne!(of("a"), of("b"));

    let refused = |words: &[&str]| {
        let done = ab(&sandbox, words);
        assert_eq!(done.code, Some(2), "{words:?}: {}", done.stdout);
        done.stderr
    };
    assert_names(&refused(&["--a", "--gemm-plugin auto", "--dataset", "d.jsonl"]), &["--model", "--engine-dir"]);
    assert_names(
        &refused(&["--a", "--gemm-plugin auto", "--engine-dir", "x/engine-a", "--dataset", "d.jsonl"]),
        &["--gemm-plugin", "built already"],
    );
    assert_names(&refused(&["--a", "'", "--model", "micro", "--dataset", "d.jsonl"]), &["quote"]);
    assert_names(&refused(&["--model", "micro", "--dataset", "d.jsonl", "--pairs", "1..2"]), &["1..2"]);
    assert_names(&refused(&["--model", "micro", "--dataset", "d.jsonl", "--output-dir", "."]), &["no ab.json"]);
    assert_names(&refused(&["--a-bin", "nowhere", "--model", "micro", "--dataset", "d.jsonl"]), &["nowhere"]);
}

#[test]
fn doctor_measures_and_remembers_what_equal_runs_differ_by() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(40, 6), (7, 6)]);
    sandbox.ok("build --model micro --output-dir E --device cpu");
    let words = "doctor --noise --engine-dir E --dataset d.jsonl --runs 4 --json -- --device cpu";
    let done = finish(sandbox.command(words).env("XDG_CACHE_HOME", sandbox.path("cache")));
    if done.code == Some(2) {
        // On a busy machine nothing is stored, and that is said.
        assert_names(&done.stderr, &["the machine was busy"]);
        return;
    }
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let document: Value = serde_json::from_str(&done.stdout).unwrap();
    let runs = document["noise"]["runs"].as_u64().unwrap();
    assert_eq!(runs + document["runs_disturbed"].as_u64().unwrap(), 4);
    assert!(document["noise"]["spreads"]["Output throughput (tokens/sec)"]["sd"].as_f64().unwrap() > 0.0);
    let stored = sandbox.json("cache/strobe/noise.json");
    assert_eq!(stored[0], document["noise"]);
    for name in ["a", "b"] {
        sandbox.ok(&format!("bench throughput --engine-dir E --dataset d.jsonl --device cpu --output-dir {name}"));
    }
    // Runs of milliseconds differ much in length: what was stored is made to be of theirs.
    let seconds = |name: &str| {
        let report = sandbox.json(&format!("{name}/report.json"));
        report["strobe"]["repeats"][0]["total_latency_ms"].as_f64().unwrap() / 1e3
    };
    let mut stored = stored;
    stored[0]["seconds"] = (0.8 * seconds("a").min(seconds("b"))).into();
    sandbox.write("cache/strobe/noise.json", stored.to_string());
    let text = compare(&sandbox, "a b").stdout;
    assert!(text.contains("A/A runs of this model and length") || text.contains("the machine was busy"), "{text}");
    assert_names(&sandbox.refused("doctor --noise --runs 2"), &["--runs", "3 to 1000"]);
    assert_names(&sandbox.refused("doctor --noise --engine-dir E"), &["--dataset"]);
    sandbox.refused("doctor --runs 5");
}

#[test]
fn an_interrupted_ab_keeps_its_pairs_and_goes_on() {
    use std::io::{BufRead, BufReader};
    let sandbox = Sandbox::new();
    fake(&sandbox, "a", 1000, 2);
    fake(&sandbox, "b", 800, 2);
    let words = [
        "--a-cmd",
        "sh a.sh {out}; sleep 0.1",
        "--b-cmd",
        "sh b.sh {out}; sleep 0.1",
        "--pairs",
        "6",
        "--output-dir",
        "x",
    ];
    let mut child = sandbox.command("ab").args(words).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().any(|line| line.unwrap().starts_with("pair 3")), "it ended too early");
    // SAFETY: the child was not waited for yet, so the number is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) }, 0);
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(rest.iter().any(|line| line.contains("slower")), "what ran is worth a verdict: {rest:?}");
    assert_eq!(sandbox.json("x/ab.json")["state"], "partial");
    let before: u32 = sandbox.read("a.count").trim().parse().unwrap();
    assert!((4..7).contains(&before), "{before}");
    let done = ab(&sandbox, &words);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_names(&done.stdout, &["6 pairs counted", "of them from an earlier call", "1.25x slower"]);
    assert_eq!(sandbox.json("x/ab.json")["state"], "complete");
    let after: u32 = sandbox.read("a.count").trim().parse().unwrap();
    assert!(after <= 8, "what was there was not run again: {before}, {after}");
}

#[test]
fn too_few_pairs_are_no_verdict() {
    let sandbox = Sandbox::new();
    fake(&sandbox, "a", 1000, 2);
    fake(&sandbox, "b", 100, 400);
    let slow = ["--a-cmd", "sh a.sh {out}; sleep 0.3", "--b-cmd", "sh b.sh {out}; sleep 0.3", "--budget", "0.2s"];
    for (more, code) in [
        (&["--output-dir", "x"][..], 2),
        (&["--output-dir", "y", "--fail-on-regression", "5%"], 3),
        (&["--output-dir", "z", "--fail-on-regression", "5%", "--inconclusive", "pass", "--json"], 0),
        (&["--output-dir", "w", "--fail-on-regression", "5%", "--inconclusive", "fail"], 1),
    ] {
        let done = ab(&sandbox, &[&slow[..], more].concat());
        assert_eq!(done.code, Some(code), "{more:?}: {}\n{}", done.stdout, done.stderr);
        let said = format!("{}{}", done.stdout, done.stderr);
        assert_names(&said, &["fewer than 2 pairs ended (the time of --budget)"]);
    }
    // Two pairs that differ much have an interval of no use, and say so.
    let two = ["--a-cmd", "sh a.sh {out}", "--b-cmd", "sh b.sh {out}", "--pairs", "2", "--output-dir", "v"];
    let done = ab(&sandbox, &two);
    assert_names(
        &done.stdout,
        &["cannot tell", "interval not known with n=2 pairs", "(80 % power): not known with n=2 pairs"],
    );
    let longest = done.stdout.split(|letter: char| !letter.is_ascii_digit()).map(str::len).max();
    assert!(longest < Some(8), "{}", done.stdout);
    assert!(!done.stdout.contains("--profile"), "commands have no such option: {}", done.stdout);
}

#[test]
fn a_full_disk_costs_files_but_not_the_verdict_of_ab() {
    let sandbox = Sandbox::new();
    fake(&sandbox, "a", 1000, 2);
    fake(&sandbox, "b", 900, 2);
    let mut command = sandbox.with_small_files(4, "ab");
    command.args(["--a-cmd", "sh a.sh {out}", "--b-cmd", "sh b.sh {out}", "--pairs", "3", "--output-dir", "x"]);
    let done = finish(command.env("COLUMNS", "1000"));
    assert_eq!(done.code, Some(2), "{}\n{}", done.stdout, done.stderr);
    assert_names(&done.stdout, &["1.11x slower", "3 interleaved pairs", "runs      x"]);
    assert_names(&done.stderr, &["x/ab.json", "File too large"]);
}

#[test]
fn an_ab_that_is_stopped_early_says_what_it_kept() {
    use std::io::{BufRead, BufReader, Read};
    let sandbox = Sandbox::new();
    fake(&sandbox, "a", 1000, 2);
    fake(&sandbox, "b", 800, 2);
    let words = ["--a-cmd", "sh a.sh {out}; sleep 0.2", "--b-cmd", "sh b.sh {out}; sleep 0.2", "--pairs", "6"];
    let mut child = sandbox
        .command("ab")
        .args(words)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().any(|line| line.unwrap().starts_with("pair 0")), "it ended too early");
    // SAFETY: the child was not waited for yet, so the number is still its own.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) }, 0);
    lines.for_each(drop);
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
    assert_names(
        &said,
        &["interrupted; ", "runs are kept in runs/ab-", "strobe ab", "--output-dir runs/ab-", "goes on"],
    );
    assert!(!said.contains("nothing was written"), "{said}");
}
