//! Two runs that others measured, predicted from their operator profiles. Nothing is fitted.

use std::path::PathBuf;
use std::sync::Arc;

use strobe_scheduler::scheduler::{Policy as EnginePolicy, SchedulerConfig};
use strobe_sim::lengths::LengthDist;
use strobe_sim::profile::OperatorTables;
use strobe_sim::replay::{self, ReplayOptions};
use strobe_sim::{ClusterConfig, Collector, CostModel, Load, Policy, ReplicaConfig, Scenario};

/// Mean TTFT, TPOT and E2E of the measured run, in milliseconds.
fn measured(run: &std::path::Path) -> [f64; 3] {
    let text = std::fs::read_to_string(run.join("vllm/requests.jsonl")).unwrap();
    let mut sums = [0.0; 3];
    let mut count = 0.0;
    for line in text.lines() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        let at = |key: &str| value[key].as_f64().unwrap() * 1e3;
        let (queued, first, last) = (at("queued_ts"), at("first_token_ts"), at("last_token_ts"));
        let tokens = value["output_toks"].as_f64().unwrap();
        sums[0] += first - queued;
        sums[1] += (last - first) / (tokens - 1.0).max(1.0);
        sums[2] += last - queued;
        count += 1.0;
    }
    sums.map(|sum| sum / count)
}

fn predicted(run: &std::path::Path, cost: &str, slots: usize, kv_blocks: usize) -> [f64; 3] {
    let options = ReplayOptions { rate_scale: 1.0, jitter: false, seed: 0 };
    let recorded = replay::read(&run.join("workload.jsonl"), &options).unwrap();
    let scenario = Scenario {
        num_requests: recorded.requests.len() as u64,
        load: Load::Replay(Arc::new(recorded.requests)),
        input: LengthDist::Fixed(1),
        output: LengthDist::Fixed(1),
        policy: Policy::Engine(ReplicaConfig {
            scheduler: SchedulerConfig {
                policy: EnginePolicy::MaxUtilization,
                max_batch_size: slots,
                max_num_tokens: 2048,
                max_seq_len: 1 << 20,
                chunked_context: true,
                chunk_unit: 16,
                reuse_output: true,
            },
            kv_blocks,
            tokens_per_block: 16,
            reuse: true,
            speed: 1.0,
            skip: true,
            prefill_only: false,
        }),
        cost: CostModel::Tables(Arc::new(OperatorTables::parse(&format!("{}/profile/{cost}", run.display())).unwrap())),
        speeds: vec![1.0],
        cluster: ClusterConfig::default(),
        slos: Vec::new(),
        warm_up: 0,
        seed: 0,
    };
    let answer = scenario.run(Collector::new(true)).unwrap().answer;
    [answer.ttft_ms, answer.tpot_ms, answer.e2e_ms].map(|summary| summary.unwrap().mean)
}

#[test]
fn measured_runs_are_predicted_from_their_profiles() {
    let Some(data) = std::env::var_os("STROBE_TEST_DATA") else {
        eprintln!("skipped: STROBE_TEST_DATA names no folder with workloads/llmservingsim_groundtruth");
        return;
    };
    let runs = PathBuf::from(data).join("workloads/llmservingsim_groundtruth");
    let cases = [
        ("rtx4090_llama-3.1-8b_tp1", "tp1,layers=32", 256, 2588),
        ("rtxpro6000_qwen3-32b_tp2", "tp2,layers=64,tp=2,hidden=5120,link_latency=20us,link_gb_s=16", 128, 60_000),
    ];
    for (name, cost, slots, blocks) in cases {
        let run = runs.join(name);
        let (measured, predicted) = (measured(&run), predicted(&run, cost, slots, blocks));
        for ((what, limit), (m, p)) in
            [("TTFT", 0.15), ("TPOT", 0.05), ("E2E", 0.05)].into_iter().zip(measured.into_iter().zip(predicted))
        {
            println!("{name} {what}: measured {m:.1} ms, predicted {p:.1} ms, {:+.2} %", (p / m - 1.0) * 100.0);
            assert!((p / m - 1.0).abs() < limit, "{name} {what}: measured {m} ms, predicted {p} ms");
        }
    }
}
