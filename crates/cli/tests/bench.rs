//! `strobe bench`: what a run leaves behind, and that its numbers follow from its records.

mod common;

use std::sync::OnceLock;

use common::{Done, Sandbox, assert_close, assert_names, int, ints, num, outputs};
use serde_json::Value;

/// Prompt and output lengths of the shared runs: different ones, so that steps mix prompts and generation.
const LENGTHS: [(usize, usize); 8] = [(40, 9), (7, 12), (65, 4), (1, 15), (33, 1), (20, 20), (12, 6), (50, 11)];

/// What a run directory held.
struct Run {
    done: Done,
    names: Vec<String>,
    about: Value,
    report: Value,
    requests: Vec<Value>,
    iterations: Vec<Value>,
    html: String,
}

/// Run `strobe bench MODE --model micro` on [`LENGTHS`] and read its run directory.
fn bench(mode_and_options: &str) -> Run {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &LENGTHS);
    let (mode, options) = mode_and_options.split_once(' ').unwrap_or((mode_and_options, ""));
    let words = format!("bench {mode} --model micro --dataset d.jsonl --warmup 1 --output-dir run {options}");
    let done = sandbox.ok(&words);
    assert_eq!(sandbox.names("."), ["d.jsonl", "run"], "something was left beside the run directory");
    Run {
        done,
        names: sandbox.names("run"),
        about: sandbox.json("run/run.json"),
        report: sandbox.json("run/report.json"),
        requests: sandbox.json_lines("run/requests.jsonl"),
        iterations: sandbox.json_lines("run/iterations.jsonl"),
        html: sandbox.read("run/report.html"),
    }
}

/// A run with streaming, and a batch that is smaller than the number of requests.
fn throughput() -> &'static Run {
    static RUN: OnceLock<Run> = OnceLock::new();
    RUN.get_or_init(|| bench("throughput --streaming --max-batch-size 3 --kv-cache-blocks 40"))
}

#[test]
fn a_run_directory_holds_the_whole_run() {
    let run = throughput();
    assert_eq!(run.names, ["iterations.jsonl", "report.html", "report.json", "requests.jsonl", "run.json"]);
    assert_eq!(run.about["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(run.about["partial"], false);
    assert_eq!(run.about["dataset"], "d.jsonl");
    assert_names(run.about["command"].as_str().unwrap(), &["bench throughput", "--max-batch-size 3"]);
    assert_eq!(run.about.pointer("/engine/build_config/weights/origin").unwrap(), "random");
    assert!(int(&run.about, "/machine/threads") > 0);
    assert_eq!(run.requests.len(), LENGTHS.len());
    for (request, (input, output)) in run.requests.iter().zip(LENGTHS) {
        assert_eq!(int(request, "/num_input_tokens"), input as u64);
        assert_eq!(ints(request, "/output_ids").len(), output);
        assert_eq!(ints(request, "/token_times_ns").len(), output);
        assert_eq!(request["finish_reason"], "length");
    }
    assert_names(&run.html, &["<html", "<svg", "micro"]);
    assert!(run.done.stderr.contains("run directory: run"));
}

/// What the machine did to a run and its iterations, as far as it tells.
#[test]
fn the_machines_part_is_reported() {
    let run = throughput();
    let host = &run.report["strobe"]["host"];
    assert!(num(host, "/wall_ms") > 0.0 && int(host, "/cores") > 0);
    assert_names(&run.done.stdout, &["Machine:", "for a CPU"]);
    assert_eq!(&run.report["strobe"]["repeats"][0]["host"]["wall_ms"], &host["wall_ms"]);
    assert_eq!(host["disturbance"].is_string(), run.done.stdout.contains("DISTURBED RUN"));
    let mut covered = 0;
    let mut known = 0;
    for iteration in &run.iterations {
        let strobe = &iteration["strobe"];
        let told = strobe["host"].get("cpuWaitMaxMS").is_some();
        assert_eq!(strobe["disturbed"].is_boolean(), told, "only where it is known: {strobe}");
        if strobe["host"].is_null() {
            continue;
        }
        covered += int(strobe, "/host/iterations");
        known += if told { int(strobe, "/host/iterations") } else { 0 };
        if told {
            assert!(num(strobe, "/host/cpuWaitMaxMS") <= num(strobe, "/host/cpuWaitSumMS"));
        }
    }
    assert!(covered <= run.iterations.len() as u64, "no iteration is covered twice");
    assert_eq!(int(host, "/iterations_read"), known);
    if std::path::Path::new("/proc/self/task").join(std::process::id().to_string()).join("schedstat").exists() {
        assert_eq!(int(host, "/threads"), int(&run.about, "/machine/threads"));
        assert!(num(host, "/cpu_wait_max_ms") <= num(host, "/cpu_wait_sum_ms"));
    } else {
        assert!(host.get("threads").is_none() && host.get("cpu_wait_sum_ms").is_none(), "unknown is absent: {host}");
    }
}

#[test]
fn the_anchors_variable_for_the_garbage_collector_is_answered() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &LENGTHS[..1]);
    let words = "bench throughput --model micro --dataset d.jsonl";
    let note = |value: &str| sandbox.ok_with(&[("TLLM_PROFILE_RECORD_GC", value)], words).stderr;
    let told = note("1");
    assert_names(&told, &["no garbage collector", "strobe.host"]);
    assert_eq!(told.matches("garbage").count(), 1);
    assert!(!note("0").contains("garbage"));
}

#[test]
fn iterations_have_the_anchors_fields_and_count_from_zero() {
    let run = throughput();
    for (index, iteration) in run.iterations.iter().enumerate() {
        assert_eq!(int(iteration, "/iter"), index as u64);
        assert!(num(iteration, "/iterLatencyMS") > 0.0);
        let split = num(iteration, "/hostStepTimeMS") + num(iteration, "/computeStepTimeMS");
        assert_close(split, num(iteration, "/iterLatencyMS"), "host and compute time");
        assert!((1..=3).contains(&int(iteration, "/numActiveRequests")));
        let kv = |name: &str| int(iteration, &format!("/kvCacheStats/{name}"));
        assert_eq!(kv("maxNumBlocks"), 40);
        assert_eq!(kv("freeNumBlocks") + kv("usedNumBlocks"), 40);
        assert_eq!(kv("tokensPerBlock"), 32);
        let batch = |name: &str| int(iteration, &format!("/inflightBatchingStats/{name}"));
        assert_eq!(batch("numScheduledRequests"), batch("numContextRequests") + batch("numGenRequests"));
        assert!(batch("numScheduledRequests") >= 1);
        assert_eq!(batch("numContextRequests") > 0, batch("numCtxTokens") > 0);
    }
    let sum = |pointer: &str| run.iterations.iter().map(|i| int(i, pointer)).sum::<u64>();
    let (inputs, made): (usize, usize) = LENGTHS.iter().fold((0, 0), |sum, l| (sum.0 + l.0, sum.1 + l.1));
    assert_eq!(sum("/inflightBatchingStats/numCtxTokens"), inputs as u64);
    assert_eq!(sum("/strobe/numNewTokens"), made as u64);
    assert_eq!(sum("/numCompletedRequests"), LENGTHS.len() as u64);
    assert_eq!(sum("/numNewActiveRequests"), LENGTHS.len() as u64);
    let mixed = |i: &&Value| {
        int(i, "/inflightBatchingStats/numContextRequests") > 0 && int(i, "/inflightBatchingStats/numGenRequests") > 0
    };
    assert!(run.iterations.iter().any(|i| mixed(&i)), "no step mixed prompts and generation");
}

#[test]
fn iterations_say_why_requests_waited() {
    let decisions: Vec<_> =
        throughput().iterations.iter().flat_map(|i| i["strobe"]["decisions"].as_array().unwrap()).collect();
    let of = |name: &str| decisions.iter().filter(|d| d["decision"] == name).count();
    assert_eq!(of("admitted"), LENGTHS.len());
    assert!(of("deferred: batch full") > 0, "{decisions:?}");
}

/// Order statistic by linear interpolation (Hyndman-Fan type 7).
fn linear(sorted: &[f64], q: f64) -> f64 {
    let place = (sorted.len() - 1) as f64 * q;
    let low = place.floor() as usize;
    let high = (low + 1).min(sorted.len() - 1);
    sorted[low] + (place - low as f64) * (sorted[high] - sorted[low])
}

/// trtllm-bench's rule: the value at index trunc(n*q).
fn nearest(sorted: &[f64], q: f64) -> f64 {
    sorted[((sorted.len() as f64 * q) as usize).min(sorted.len() - 1)]
}

fn check_percentiles(block: &Value, values: &[f64], rule: fn(&[f64], f64) -> f64, what: &str) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    for (key, q) in [("/p50", 0.5), ("/p90", 0.9), ("/p95", 0.95), ("/p99", 0.99)] {
        assert_close(num(block, key), rule(&sorted, q), &format!("{what}{key}"));
    }
    assert_close(num(block, "/minimum"), sorted[0], what);
    assert_close(num(block, "/maximum"), sorted[sorted.len() - 1], what);
    assert_close(num(block, "/average"), mean(values), what);
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Recompute the report from the request records, by the formulas of trtllm-bench's rows.
fn check_report(run: &Run, rule: fn(&[f64], f64) -> f64) {
    let arrivals: Vec<_> = run.requests.iter().map(|r| num(r, "/arrival_ns")).collect();
    let tokens: Vec<Vec<f64>> =
        run.requests.iter().map(|r| ints(r, "/token_times_ns").iter().map(|&t| t as f64).collect()).collect();
    let ends: Vec<_> = tokens.iter().map(|t| *t.last().unwrap()).collect();
    let n: Vec<_> = tokens.iter().map(|t| t.len() as f64).collect();
    let e2e: Vec<_> = ends.iter().zip(&arrivals).map(|(e, a)| (e - a) / 1e6).collect();
    let ttft: Vec<_> = tokens.iter().zip(&arrivals).map(|(t, a)| (t[0] - a) / 1e6).collect();
    let several = || tokens.iter().filter(|t| t.len() > 1);
    let tpot: Vec<_> = several().map(|t| (t[t.len() - 1] - t[0]) / 1e6 / (t.len() - 1) as f64).collect();
    let gtps: Vec<_> = several().map(|t| (t.len() - 1) as f64 / (t[t.len() - 1] - t[0]) * 1e9).collect();
    let start = arrivals.iter().copied().fold(f64::INFINITY, f64::min);
    let total_ms = (ends.iter().copied().fold(0.0, f64::max) - start) / 1e6;
    let inputs: f64 = run.requests.iter().map(|r| num(r, "/num_input_tokens")).sum();
    let made: f64 = n.iter().sum();
    let count = run.requests.len() as f64;

    let report = &run.report;
    let performance = |key: &str| num(report, &format!("/performance/{key}"));
    assert_close(performance("total_latency_ms"), total_ms, "total latency");
    assert_close(performance("avg_request_latency_ms"), mean(&e2e), "request latency");
    assert_close(performance("request_throughput_req_s"), count / total_ms * 1e3, "request throughput");
    assert_close(performance("system_output_throughput_tok_s"), made / total_ms * 1e3, "output throughput");
    assert_close(performance("system_total_throughput_tok_s"), (inputs + made) / total_ms * 1e3, "token throughput");
    let per_user: Vec<_> = n.iter().zip(&e2e).map(|(n, e)| n / e * 1e3).collect();
    assert_close(performance("output_throughput_per_user_tok_s"), mean(&per_user), "per user");
    assert_close(performance("output_throughput_per_gpu_tok_s"), made / total_ms * 1e3, "per device");
    let block = &report["performance"]["request_latency_percentiles_ms"];
    check_percentiles(block, &e2e, rule, "latency");

    let info = |key: &str| num(report, &format!("/request_info/{key}"));
    assert_eq!(info("num_requests"), count);
    assert_close(info("avg_num_concurrent_requests"), e2e.iter().sum::<f64>() / total_ms, "concurrency");
    assert_close(info("avg_input_length"), inputs / count, "input length");
    assert_close(info("avg_output_length"), made / count, "output length");

    let streaming = &report["streaming_metrics"];
    assert_close(num(streaming, "/avg_ttft_ms"), mean(&ttft), "TTFT");
    assert_close(num(streaming, "/avg_tpot_ms"), mean(&tpot), "TPOT");
    assert_close(num(streaming, "/token_output_speed_tok_s"), mean(&gtps), "output speed");
    check_percentiles(&streaming["ttft_percentiles"], &ttft, rule, "ttft");
    check_percentiles(&streaming["tpot_percentiles"], &tpot, rule, "tpot");
    check_percentiles(&streaming["gen_tps_percentiles"], &gtps, rule, "gtps");

    let isl: Vec<_> = run.requests.iter().map(|r| num(r, "/num_input_tokens")).collect();
    let seq: Vec<_> = isl.iter().zip(&n).map(|(i, o)| i + o).collect();
    for (key, values) in [("isl_stats", &isl), ("osl_stats", &n), ("seq_len_stats", &seq)] {
        check_percentiles(&report["dataset"][key], values, rule, key);
    }
}

#[test]
fn the_report_follows_from_the_records() {
    check_report(throughput(), linear);
}

#[test]
fn nearest_percentiles_are_the_anchors() {
    let run = bench("throughput --streaming --percentiles nearest");
    check_report(&run, nearest);
    assert!(run.done.stdout.contains("nearest rank"));
}

#[test]
fn report_json_has_the_anchors_keys() {
    let report = &throughput().report;
    let has = |section: &str, keys: &[&str]| {
        let object = report[section].as_object().unwrap_or_else(|| panic!("no {section}"));
        keys.iter().for_each(|key| assert!(object.contains_key(*key), "{section} has no {key}"));
    };
    has("engine", &["model", "version", "backend", "dtype", "kv_cache_dtype", "quantization", "max_sequence_length"]);
    has("machine", &["name", "memory.total"]);
    let world =
        ["tp_size", "pp_size", "ep_size", "world_size", "max_batch_size", "max_num_tokens", "scheduling_policy"];
    has("world_info", &world);
    has("world_info", &["issue_rate"]);
    has("request_info", &["num_requests", "avg_num_concurrent_requests", "avg_input_length", "avg_output_length"]);
    has("dataset", &["isl_stats", "osl_stats", "seq_len_stats", "num_requests", "dataset_path", "max_isl", "max_osl"]);
    assert_eq!(int(report, "/world_info/max_batch_size"), 3);
    assert_eq!(report["strobe"]["weights"], "random (seed 0)");
    for fact in [
        "/strobe/peaks/flops_per_s",
        "/strobe/peaks/read_bytes_per_s",
        "/strobe/memory/weights_bytes",
        "/strobe/memory/kv_cache_reserved_bytes",
    ] {
        assert!(num(report, fact) > 0.0, "{fact}");
    }
    for row in report["strobe"]["utilization"].as_array().unwrap() {
        assert!(num(row, "/mfu") > 0.0 && num(row, "/mbu") > 0.0);
    }
    assert!(report["strobe"].get("profile").is_none(), "nothing was profiled");
}

#[test]
fn the_text_report_has_the_anchors_rows_in_order() {
    let text = &throughput().done.stdout;
    let mut rest = text.as_str();
    for row in [
        "= ENGINE DETAILS",
        "= MACHINE DETAILS",
        "= REQUEST DETAILS",
        "Number of requests:             8\n",
        "= WORLD + RUNTIME INFORMATION",
        "Max Runtime Batch Size: 3\n",
        "= PERFORMANCE OVERVIEW",
        "Request Throughput (req/sec): ",
        "Total Output Throughput (tokens/sec): ",
        "Total Token Throughput (tokens/sec): ",
        "Total Latency (ms): ",
        "Average request latency (ms): ",
        "Per User Output Throughput [w/ ctx] (tps/user): ",
        "Per GPU Output Throughput (tps/gpu): ",
        "Average time-to-first-token [TTFT] (ms): ",
        "Average time-per-output-token [TPOT] (ms): ",
        "Per User Output Speed (tps/user): ",
        "[TPOT] P50    : ",
        "[TTFT] P99    : ",
        "[GTPS] AVERAGE: ",
        "[Latency] P50    : ",
        "= DATASET DETAILS",
        "random (seed 0)",
        "SIMD tier, threads:",
        "MFU",
    ] {
        let place = rest.find(row).unwrap_or_else(|| panic!("`{row}` is missing or out of order in\n{text}"));
        rest = &rest[place + row.len()..];
    }
    let latency = format!("{:.4}", num(&throughput().report, "/performance/total_latency_ms"));
    assert!(text.contains(&format!("Total Latency (ms):                               {latency}\n")));
}

#[test]
fn latency_runs_one_request_at_a_time() {
    let run = bench("latency --num-requests 3");
    assert_eq!(run.requests.len(), 3);
    assert!(run.iterations.iter().all(|i| int(i, "/numActiveRequests") == 1));
    assert!(run.report.get("streaming_metrics").is_some(), "latency always streams");
    for pair in run.requests.windows(2) {
        assert!(int(&pair[1], "/sent_ns") >= *ints(&pair[0], "/token_times_ns").last().unwrap());
    }
}

#[test]
fn concurrency_limits_the_requests_in_flight() {
    let run = bench("throughput --concurrency 2");
    assert!(run.iterations.iter().all(|i| int(i, "/numActiveRequests") <= 2));
    let spans: Vec<_> =
        run.requests.iter().map(|r| (int(r, "/sent_ns"), *ints(r, "/token_times_ns").last().unwrap())).collect();
    for &(sent, _) in &spans {
        let in_flight = spans.iter().filter(|(start, end)| *start <= sent && sent < *end).count();
        assert!(in_flight <= 2, "{spans:?}");
    }
    assert!(run.report.get("streaming_metrics").is_none(), "nothing was streamed");
    assert_names(run.report["strobe"]["arrival"].as_str().unwrap(), &["at most 2"]);
}

/// Times between intended arrivals, in nanoseconds.
fn gaps(run: &Run) -> Vec<u64> {
    let arrivals: Vec<_> = run.requests.iter().map(|r| int(r, "/arrival_ns")).collect();
    arrivals.windows(2).map(|w| w[1] - w[0]).collect()
}

#[test]
fn arrivals_keep_the_rate_and_the_seed() {
    let constant = bench("throughput --request-rate 100 --arrival constant");
    assert!(gaps(&constant).iter().all(|&gap| gap.abs_diff(10_000_000) <= 1), "{:?}", gaps(&constant));
    assert_close(num(&constant.report, "/strobe/metrics/offered_rate_req_s"), 100.0, "offered rate");
    for process in ["poisson", "gamma --burstiness 0.5"] {
        let load = format!("throughput --request-rate 200 --arrival {process}");
        let [a, b, c] =
            ["--random-seed 1", "--random-seed 1", "--random-seed 2"].map(|seed| bench(&format!("{load} {seed}")));
        assert_eq!(gaps(&a), gaps(&b), "{process}");
        assert_ne!(gaps(&a), gaps(&c), "{process}");
        assert!(a.requests.iter().all(|r| int(r, "/sent_ns") >= int(r, "/arrival_ns")));
        assert_names(a.report["strobe"]["arrival"].as_str().unwrap(), &["open loop", "200 req/s", "seed 1"]);
        assert_eq!(outputs(&a.requests), outputs(&throughput().requests));
    }
}

#[test]
fn pausing_and_recomputing_changes_no_token() {
    // 10 requests of 30 + 40 tokens need 9 blocks of 8 tokens each at their end; 24 hold two of them.
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &[(30, 40); 10]);
    let run = |policy: &str| {
        let words = format!(
            "bench throughput --model micro --dataset d.jsonl --tokens-per-block 8 --kv-cache-blocks 24 \
             --scheduler-policy {policy} --overwrite --output-dir run"
        );
        sandbox.ok(&words);
        (sandbox.json_lines("run/requests.jsonl"), sandbox.json_lines("run/iterations.jsonl"))
    };
    let (calm, _) = run("guaranteed_no_evict");
    let (pausing, iterations) = run("max_utilization");
    let (batch, static_iterations) = run("static_batch");
    assert_eq!(outputs(&calm), outputs(&pausing));
    assert_eq!(outputs(&calm), outputs(&batch));
    let pauses = |requests: &[Value]| requests.iter().map(|r| int(r, "/preemptions")).sum::<u64>();
    assert_eq!(pauses(&calm), 0);
    assert!(pauses(&pausing) > 0, "the cache was too large to make it pause");
    let paused: u64 = iterations.iter().map(|i| int(i, "/inflightBatchingStats/numPausedRequests")).sum();
    assert_eq!(paused, pauses(&pausing));
    assert!(iterations.iter().any(|i| int(i, "/strobe/numRecomputedTokens") > 0));
    assert!(static_iterations.iter().all(|i| i.get("staticBatchingStats").is_some()));
}

#[test]
fn end_tokens_end_requests() {
    let free = outputs(&throughput().requests);
    // A token from the middle of the longest output ends that request where it first occurs.
    let end = free[5][6];
    let cut = |output: &Vec<u64>| match output.iter().position(|&id| id == end) {
        Some(place) => output[..=place].to_vec(),
        None => output.clone(),
    };
    for (option, reason) in [("--eos-id", "eos"), ("--stop-ids", "stop")] {
        let run = bench(&format!("throughput {option} {end}"));
        assert_eq!(outputs(&run.requests), free.iter().map(cut).collect::<Vec<_>>(), "{option}");
        assert_eq!(run.requests[5]["finish_reason"], reason);
        let held = bench(&format!("throughput {option} {end} --min-tokens 20"));
        assert_eq!(held.requests[5]["finish_reason"], if free[5][19] == end { reason } else { "length" });
        assert_eq!(outputs(&held.requests)[5].len(), 20);
    }
}

#[test]
fn sampling_follows_its_seed() {
    let run = |options: &str| outputs(&bench(&format!("throughput {options}")).requests);
    let hot = run("--temperature 1.5 --random-seed 7");
    assert_eq!(hot, run("--temperature 1.5 --random-seed 7 --max-batch-size 1"));
    assert_ne!(hot, run("--temperature 1.5 --random-seed 8"));
    assert_eq!(run("--temperature 1.5 --top-k 1"), outputs(&throughput().requests));
}

#[test]
fn prefix_reuse_is_counted_and_changes_no_token() {
    let sandbox = Sandbox::new();
    let ids: Vec<_> = (0..70).map(|i| (5 + i * 3 % 480).to_string()).collect();
    let line = |task: usize| format!("{{\"task_id\":{task},\"input_ids\":[{}],\"output_tokens\":5}}\n", ids.join(","));
    sandbox.write("d.jsonl", (0..3).map(line).collect::<String>());
    let run = |reuse: &str| {
        let words = "bench throughput --model micro --dataset d.jsonl --concurrency 1 --overwrite --output-dir run";
        sandbox.ok(&format!("{words} --kv-cache-reuse {reuse}"));
        sandbox.json_lines("run/requests.jsonl")
    };
    let (off, on) = (run("disable"), run("enable"));
    assert_eq!(outputs(&off), outputs(&on));
    assert!(off.iter().all(|r| int(r, "/reused_tokens") == 0));
    let reused: Vec<_> = on.iter().map(|r| int(r, "/reused_tokens")).collect();
    assert_eq!(reused, [0, 64, 64], "two whole blocks of 32 are shared");
    let last = &sandbox.json_lines("run/iterations.jsonl");
    assert!(num(last.last().unwrap(), "/kvCacheStats/cacheHitRate") > 0.0);
}

#[test]
fn long_prompts_are_spread_over_steps() {
    let run = bench("throughput --max-num-tokens 32");
    assert_eq!(outputs(&run.requests), outputs(&throughput().requests));
    let tokens =
        |i: &Value| int(i, "/inflightBatchingStats/numCtxTokens") + int(i, "/inflightBatchingStats/numGenRequests");
    assert!(run.iterations.iter().all(|i| tokens(i) <= 32));
    let decisions = run.iterations.iter().flat_map(|i| i["strobe"]["decisions"].as_array().unwrap());
    assert!(decisions.into_iter().any(|d| d["decision"] == "chunked"));
}

#[test]
fn single_files_and_old_style_lines() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &LENGTHS);
    let done = sandbox.ok("bench throughput --model micro --dataset d.jsonl --log-iteration-data \
         --report-json report.json --request-json requests.json --iteration-log iterations.jsonl");
    assert_eq!(sandbox.names("."), ["d.jsonl", "iterations.jsonl", "report.json", "requests.json"]);
    assert_eq!(int(&sandbox.json("report.json"), "/request_info/num_requests"), 8);

    let requests = sandbox.json("requests.json");
    let requests = requests.as_array().unwrap();
    assert_eq!(requests.len(), LENGTHS.len());
    for (request, (input, output)) in requests.iter().zip(LENGTHS) {
        assert_eq!(int(request, "/num_input_tokens"), input as u64);
        assert_eq!(int(request, "/num_total_output_tokens"), output as u64);
        let latency = int(request, "/end_timestamp") - int(request, "/start_timestamp");
        assert_eq!(int(request, "/end_to_end_latency"), latency);
        assert_eq!(int(request, "/time_to_first_token") + int(request, "/generation_time"), latency);
        assert!(request["output"].is_string(), "micro has a tokenizer");
    }

    let iterations = sandbox.json_lines("iterations.jsonl");
    let old: Vec<Value> = done
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("[strobe][INFO] "))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(old.len(), iterations.len());
    for (old, new) in old.iter().zip(&iterations) {
        for (key, pointer) in [
            ("Iteration Counter", "/iter"),
            ("Active Request Count", "/numActiveRequests"),
            ("Max Request Count", "/maxNumActiveRequests"),
            ("Scheduled Requests", "/inflightBatchingStats/numScheduledRequests"),
            ("Context Requests", "/inflightBatchingStats/numContextRequests"),
            ("Generation Requests", "/inflightBatchingStats/numGenRequests"),
            ("Total Context Tokens", "/inflightBatchingStats/numCtxTokens"),
            ("Max KV cache blocks", "/kvCacheStats/maxNumBlocks"),
            ("Free KV cache blocks", "/kvCacheStats/freeNumBlocks"),
            ("Used KV cache blocks", "/kvCacheStats/usedNumBlocks"),
            ("Tokens per KV cache block", "/kvCacheStats/tokensPerBlock"),
        ] {
            assert_eq!(old.get(key), new.pointer(pointer), "{key}");
        }
        assert!(new["timestamp"].as_str().unwrap().starts_with(old["Timestamp"].as_str().unwrap()));
    }
}

#[test]
fn single_files_may_go_into_the_run_directory() {
    let sandbox = Sandbox::new();
    sandbox.dataset("d.jsonl", &LENGTHS);
    let words = "bench throughput --model micro --dataset d.jsonl --output-dir run --profile 1 \
         --report-json run/again.json --trace-out run/trace.json";
    sandbox.ok(words);
    assert!(sandbox.exists("run/again.json") && sandbox.exists("run/trace.json") && sandbox.exists("run/trace.sqlite"));
    sandbox.ok(&format!("{words} --overwrite"));
    assert!(sandbox.exists("run/again.json") && sandbox.exists("run/trace.json"));
    std::fs::create_dir(sandbox.path("empty")).unwrap();
    sandbox.ok(&words.replace("run/", "empty/").replace("--output-dir run", "--output-dir empty"));
    assert!(sandbox.exists("empty/again.json") && sandbox.exists("empty/run.json"));
}

#[test]
fn repeats_give_a_spread() {
    let run = bench("throughput --repeat 3");
    assert_names(&run.done.stdout, &["SPREAD OVER 3 RUNS", "Output throughput (tokens/sec)", "stdev"]);
    let repeats = run.report["strobe"]["repeats"].as_array().unwrap();
    assert_eq!(repeats.len(), 3);
    let throughputs: Vec<_> = repeats.iter().map(|r| num(r, "/output_throughput_tok_s")).collect();
    let spread = &run.report["strobe"]["spread"]["Output throughput (tokens/sec)"];
    let (low, high) = throughputs.iter().fold((f64::INFINITY, 0.0), |(l, h): (f64, f64), &t| (l.min(t), h.max(t)));
    assert_close(num(spread, "/min"), low, "min");
    assert_close(num(spread, "/max"), high, "max");
    // Every run has all its iterations, the last one too.
    assert!(repeats.iter().all(|r| r["prefill_mfu"].is_number() && r["decode_mbu"].is_number()));
    // The report is about the last one, and so are the files.
    assert_close(num(&run.report, "/performance/system_output_throughput_tok_s"), throughputs[2], "last");
    assert_eq!(run.requests.len(), LENGTHS.len());
    assert_eq!(int(&run.iterations[0], "/iter"), 0);
}

#[test]
fn json_is_the_report_and_nothing_else() {
    let run = bench("throughput --json");
    let printed: Value = serde_json::from_str(&run.done.stdout).unwrap();
    assert_eq!(printed, run.report);
}
