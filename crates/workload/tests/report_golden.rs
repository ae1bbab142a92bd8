//! trtllm-bench's report, byte for byte, of a run small enough to compute by hand.

mod common;

use common::{record, three_requests};
use serde_json::{Map, Value, json};
use strobe_workload::{
    EngineInfo, MachineInfo, MetricOptions, Metrics, PercentileRule, ReportContext, WorldInfo, metrics, strobe_text,
    trtllm_report, trtllm_requests, trtllm_requests_with_text, trtllm_text,
};

fn run(streaming: bool) -> Metrics {
    let options = MetricOptions { rule: PercentileRule::Linear, world_size: 2, streaming };
    metrics(&three_requests(), &options).unwrap()
}

fn context() -> ReportContext {
    ReportContext {
        engine: EngineInfo {
            model: "micro".to_string(),
            model_path: None,
            engine_dir: Some("engines/micro".to_string()),
            version: "0.1.0".to_string(),
            backend: "strobe-cpu".to_string(),
            dtype: "float32".to_string(),
            kv_cache_dtype: None,
            quantization: None,
            max_input_length: None,
            max_sequence_length: Some(512),
        },
        machine: Some(MachineInfo { name: "Some CPU".to_string(), memory_total_gib: Some(24.0), clocks_mem_ghz: None }),
        world: WorldInfo {
            tp_size: 2,
            pp_size: 1,
            ep_size: 1,
            max_batch_size: 64,
            max_num_tokens: Some(2048),
            scheduling_policy: "guaranteed_no_evict".to_string(),
            kv_cache_percentage: Some(0.9),
        },
        dataset_path: Some("data.jsonl".to_string()),
        strobe: Map::from_iter([("weights".to_string(), json!("random"))]),
    }
}

#[test]
fn the_streaming_report() {
    let text = trtllm_text(&run(true), &context(), "linear, N = 3");
    assert_eq!(text, include_str!("golden/report.txt"));
}

#[test]
fn without_streaming_only_the_streaming_rows_go() {
    let streaming = trtllm_text(&run(true), &context(), "");
    let plain = trtllm_text(&run(false), &context(), "");
    let kept: Vec<&str> = streaming
        .lines()
        .filter(|line| !["TTFT", "TPOT", "GTPS", "Output Speed"].iter().any(|word| line.contains(word)))
        .collect();
    let squeeze = |text: &str| text.lines().filter(|l| !l.is_empty()).collect::<Vec<_>>().join("\n");
    assert_eq!(squeeze(&plain), squeeze(&kept.join("\n")));
    assert!(!plain.contains("Percentiles: "));
}

#[test]
fn unknown_numbers_are_never_printed_as_zero() {
    let options = MetricOptions { rule: PercentileRule::Nearest, world_size: 1, streaming: true };
    let m = metrics(&[record(0, 3, 0, 0, &[4])], &options).unwrap();
    let mut ctx = context();
    ctx.machine = None;
    ctx.world.kv_cache_percentage = None;
    let text = trtllm_text(&m, &ctx, "");
    for row in [
        "Issue Rate (req/sec):   N/A",
        "KV Memory Percentage:   N/A",
        "[TPOT] P99    : N/A",
        "Average time-per-output-token [TPOT] (ms):        N/A",
        "No machine info available",
    ] {
        assert!(text.contains(row), "{row:?} is not in:\n{text}");
    }
    let report = trtllm_report(&m, &ctx);
    assert_eq!(report["machine"], Value::Null);
    for (section, key) in [
        ("world_info", "issue_rate"),
        ("world_info", "kv_cache_percentage"),
        ("streaming_metrics", "avg_tpot_ms"),
        ("streaming_metrics", "tpot_percentiles"),
    ] {
        assert!(report[section].get(key).is_none(), "{section}.{key}");
    }
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn the_report_json_has_the_anchors_keys() {
    let report = trtllm_report(&run(true), &context());
    assert_eq!(
        keys(&report),
        ["engine", "machine", "world_info", "request_info", "performance", "streaming_metrics", "dataset", "strobe"]
    );
    assert_eq!(
        keys(&report["world_info"]),
        [
            "tp_size",
            "pp_size",
            "ep_size",
            "world_size",
            "max_batch_size",
            "max_num_tokens",
            "scheduling_policy",
            "kv_cache_percentage",
            "issue_rate"
        ]
    );
    assert_eq!(keys(&report["machine"]), ["name", "memory.total"]);
    assert_eq!(
        keys(&report["performance"]),
        [
            "total_latency_ms",
            "avg_request_latency_ms",
            "request_throughput_req_s",
            "system_output_throughput_tok_s",
            "system_total_throughput_tok_s",
            "output_throughput_per_user_tok_s",
            "output_throughput_per_gpu_tok_s",
            "request_latency_percentiles_ms"
        ]
    );
    assert_eq!(
        keys(&report["performance"]["request_latency_percentiles_ms"]),
        ["p50", "p90", "p95", "p99", "minimum", "maximum", "average"]
    );
    assert_eq!(
        keys(&report["streaming_metrics"]),
        [
            "token_output_speed_tok_s",
            "avg_ttft_ms",
            "avg_tpot_ms",
            "tpot_percentiles",
            "ttft_percentiles",
            "gen_tps_percentiles"
        ]
    );
    assert_eq!(
        report["request_info"],
        json!({"num_requests": 3, "avg_num_concurrent_requests": 2.2, "avg_input_length": 4.0, "avg_output_length": 3.0})
    );
    assert_eq!(
        report["engine"],
        json!({"model": "micro", "engine_dir": "engines/micro", "version": "0.1.0",
               "backend": "strobe-cpu", "dtype": "float32", "kv_cache_dtype": null,
               "quantization": null, "max_sequence_length": 512})
    );
    let dataset = &report["dataset"];
    assert_eq!(
        keys(dataset),
        [
            "isl_stats",
            "osl_stats",
            "seq_len_stats",
            "num_requests",
            "dataset_path",
            "max_isl",
            "max_osl",
            "max_sequence_length",
            "avg_isl",
            "avg_osl",
            "avg_sequence_length"
        ]
    );
    assert_eq!((&dataset["max_isl"], &dataset["avg_sequence_length"]), (&json!(6), &json!(7)));
    assert_eq!(report["world_info"]["issue_rate"], json!(200.0));
    assert_eq!(report["strobe"]["weights"], json!("random"));
    assert_eq!(report["strobe"]["metrics"]["percentile_rule"], json!("linear"));
    assert!(report["strobe"]["metrics"].get("phases").is_none());
    assert!(trtllm_report(&run(false), &context()).get("streaming_metrics").is_none());
}

#[test]
fn the_request_json_has_the_anchors_keys_in_ns() {
    let mut records = three_requests();
    records[1].finish_reason = "error".to_string();
    records[1].error = Some("out of blocks".to_string());
    records[1].token_times_ns.clear();
    records[1].first_scheduled_ns = None;
    let list = trtllm_requests_with_text(&records, &|r| (r.id == 0).then(|| "text".to_string()));
    let first = &list[0];
    let expected = [
        ("id", json!(0)),
        ("num_input_tokens", json!(4)),
        ("error_tokens", json!(0)),
        ("start_timestamp", json!(0)),
        ("first_token_timestamp", json!(10_000_000)),
        ("end_timestamp", json!(30_000_000)),
        ("decode_iteration", json!(2)),
        ("num_total_output_tokens", json!(3)),
        ("num_generated_tokens", json!(2)),
        ("generation_time", json!(20_000_000)),
        ("time_to_first_token", json!(10_000_000)),
        ("intertoken_latency", json!(1e7)),
        ("end_to_end_latency", json!(30_000_000)),
        ("output_token_throughput", json!(1e-7)),
        ("generation_token_throughput", json!(1e-7)),
        ("output", json!("text")),
        ("output_tokens", json!(3)),
    ];
    for (found, (key, value)) in first.as_object().unwrap().iter().zip(&expected) {
        assert_eq!((found.0.as_str(), found.1), (*key, value));
    }
    let failed = &list[1];
    assert_eq!((&failed["error_tokens"], &failed["error"]), (&json!(1), &json!("out of blocks")));
    for key in ["first_token_timestamp", "end_timestamp", "decode_iteration", "end_to_end_latency", "output"] {
        assert!(failed.get(key).is_none(), "{key}");
    }
    assert!(trtllm_requests(&records)[0].get("output").is_none());
}

#[test]
fn strobes_own_half_names_formulas_and_gaps() {
    let text = strobe_text(&run(true));
    for words in ["(N-1)/(max s - min s)", "t(i+1) - t(i)", "d - q", "No steady state: too short", "Client lag"] {
        assert!(text.contains(words), "{words:?} is not in:\n{text}");
    }
}
