//! `strobe simulate` as its users call it.

mod common;

use common::{Done, Sandbox, assert_names, int, num};
use serde_json::Value;

const COST: &str = "--cost linear:base=2ms,per_request=10us,per_context_token=3us,per_kv_token=5ns";

fn json(done: &Done) -> Value {
    serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {}", done.stdout))
}

/// One request alone: every time follows from the cost by hand.
#[test]
fn a_single_request_takes_what_its_cost_says() {
    let sandbox = Sandbox::new();
    let report = json(
        &sandbox.ok(&format!("simulate --rate 1 --num-requests 1 --input-tokens 100 --output-tokens 3 {COST} --json")),
    );
    // Prompt: 2 ms + 10 us + 300 us. Then two tokens that read 101 and 102 keys.
    let ttft = 2.0 + 0.01 + 0.3;
    let gaps = [2.0 + 0.01 + 101.0 * 5e-6, 2.0 + 0.01 + 102.0 * 5e-6];
    for (pointer, expected) in [
        ("/queue_ms/mean", 0.0),
        ("/ttft_ms/p99", ttft),
        ("/tpot_ms/mean", (gaps[0] + gaps[1]) / 2.0),
        ("/itl_ms/max", gaps[1]),
        ("/e2e_ms/mean", ttft + gaps[0] + gaps[1]),
    ] {
        assert!((num(&report, pointer) - expected).abs() < 2e-6, "{pointer}: {} not {expected}", num(&report, pointer));
    }
    assert_eq!(int(&report, "/batch/iterations"), 3);
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_does_not() {
    let sandbox = Sandbox::new();
    let call = |seed: u32, dir: &str| {
        sandbox.ok(&format!(
            "simulate --rate 40 --num-requests 200 --input-tokens lognormal:60,0.7 --output-tokens geometric:20 {COST} --seed {seed} --output-dir {dir}"
        ))
    };
    for (seed, dir) in [(1, "a"), (1, "b"), (2, "c")] {
        call(seed, dir);
    }
    for file in ["requests.jsonl", "iterations.jsonl"] {
        assert_eq!(sandbox.read(&format!("a/{file}")), sandbox.read(&format!("b/{file}")), "{file}");
        assert_ne!(sandbox.read(&format!("a/{file}")), sandbox.read(&format!("c/{file}")), "{file}");
    }
    assert_eq!(sandbox.json_lines("a/requests.jsonl").len(), 200);
    let report = sandbox.json("a/report.json");
    assert_eq!(int(&report, "/request_info/num_requests"), 200);
    assert!((num(&report, "/e2e_ms/mean") - num(&report, "/performance/avg_request_latency_ms")).abs() < 1e-9);

    let page = sandbox.read("a/report.html");
    assert!(page.matches("<svg").count() == 2 * 3 && page.contains("Share of requests done"));

    // Later verbs open it.
    let analyzed = sandbox.ok("analyze a");
    assert!(analyzed.stdout.contains("simulated"), "{}", analyzed.stdout);
    let life = json(&sandbox.ok("simulate explain a --slowest 2 --json"));
    assert_eq!(life.as_array().unwrap().len(), 2);
    assert_names(&sandbox.ok("simulate explain a --request 5").stdout, &["request 5:", "queue d - q", "analyze a"]);
    assert_names(&sandbox.refused("simulate explain a --request 5000"), &["--request", "5000"]);
    // A simulated run is replayed, and its own cost is found again.
    sandbox.ok(&format!("simulate --trace a/requests.jsonl {COST}"));
    sandbox.ok("simulate calibrate a -o cost.json");
    let again = "simulate --rate 40 --num-requests 200 --input-tokens lognormal:60,0.7 --output-tokens geometric:20 --seed 1 --json";
    let fitted = json(&sandbox.ok(&format!("{again} --cost cost.json")));
    let ratio = num(&fitted, "/e2e_ms/mean") / num(&report, "/e2e_ms/mean");
    assert!((ratio - 1.0).abs() < 0.01, "{ratio}");
    let low = num(&fitted, "/prediction_intervals/e2e_ms/p99/0");
    assert!(low > 0.0 && low < num(&fitted, "/prediction_intervals/e2e_ms/p99/1"));
    // Calibrated on one run, the other is predicted.
    let validation = json(&sandbox.ok("simulate validate a c --json"));
    assert_eq!(validation["passed"], true, "{validation:#}");
    assert_eq!(validation["loads"][1]["fitted"], false);
    assert_names(&sandbox.refused("simulate validate a"), &["at least two runs"]);
}

#[test]
fn a_gpu_that_is_not_there_is_simulated() {
    let sandbox = Sandbox::new();
    sandbox.write("slow.toml", "ops_per_s = 10e12\nbytes_per_s = 100e9\n");
    let tpot = |gpu: &str| {
        let words = format!(
            "simulate --rate 1 --num-requests 20 --output-tokens 8 --cost analytic --model llama-3.1-8b --gpu {gpu} --json"
        );
        num(&json(&sandbox.ok(&words)), "/tpot_ms/p50")
    };
    // 16 GB of weights at 4.8 TB/s and at 0.3 TB/s.
    let (h200, l4, slow) = (tpot("h200"), tpot("l4"), tpot("slow.toml"));
    assert!(3.3 < h200 && h200 < 8.0 && 53.0 < l4 && l4 < 90.0 && 160.0 < slow && slow < 300.0, "{h200} {l4} {slow}");
    let call = "simulate --rate 1 --cost analytic";
    assert_names(&sandbox.refused(call), &["--gpu", "--model"]);
    assert_names(&sandbox.refused(&format!("{call} --gpu abacus --model micro")), &["--gpu", "abacus", "h200"]);
    assert_names(&sandbox.refused(&format!("{call} --gpu l4 --model nobody")), &["--model", "nobody"]);
    assert_names(&sandbox.refused(&format!("{call} --gpu l4 --model micro --dtype int3")), &["--dtype", "int3"]);
    // One token of Mixtral reads 2 of 8 experts; 93 GB of weights need two GPUs of 80 GB.
    let mixtral = "simulate --rate 1 --num-requests 20 --output-tokens 8 --cost analytic --model mixtral-8x7b --json";
    assert_names(&sandbox.refused(&format!("{mixtral} --gpu h100")), &["mixtral-8x7b", "GB", "--tp"]);
    let on = |options: &str| json(&sandbox.ok(&format!("{mixtral} {options}")));
    let (two, fp8) = (on("--gpu h100 --tp 2"), on("--gpu h100 --tp 2 --dtype fp8"));
    let all_experts = 93.4 / (2.0 * 3.35 * 0.8);
    assert!(num(&two, "/tpot_ms/p50") < 0.6 * all_experts, "{two:#}");
    assert!(num(&fp8, "/tpot_ms/p50") < num(&two, "/tpot_ms/p50"));
    assert!(int(&two, "/kv/blocks") < int(&fp8, "/kv/blocks"));
}

#[test]
fn a_published_table_is_a_cost() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "t.csv",
        "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,e2e_time,tensor_parallel\n\
         m,g,512,1,128,50,10,1320,8\nm,g,512,2,128,90,12,1614,8\n",
    );
    let call =
        "simulate --rate 0.1 --num-requests 1 --input-tokens 512 --output-tokens 128 --json --cost splitwise:t.csv";
    let report = json(&sandbox.ok(&format!("{call},model=m,hardware=g,tp=8")));
    assert_eq!((num(&report, "/ttft_ms/mean"), num(&report, "/tpot_ms/mean")), (50.0, 10.0));
    assert_names(&sandbox.refused(&format!("{call},model=m,hardware=g,tp=4")), &["t.csv", "model=m,hardware=g,tp=8"]);
}

#[test]
fn policies_loads_and_clusters_run() {
    let sandbox = Sandbox::new();
    sandbox.write("t.csv", "arrival_s,input_tokens,output_tokens\n0,10,4\n0.1,20,5\n0.2,5,1\n");
    sandbox.write("d.jsonl", "{\"task_id\":0,\"input_ids\":[1,2,3],\"output_tokens\":4}\n{\"task_id\":1,\"input_ids\":[1],\"output_tokens\":2}\n");
    for options in [
        "--rate 50 --policy static --max-batch-size 8",
        "--rate 50 --policy dynamic --max-batch-size 8 --max-queue-delay 5ms --preferred-batch-size 2,4 --priority-levels 2",
        "--rate 50 --policy dynamic --instances 4 --queue-timeout 50ms --max-queue-size 10 --output-tokens 1",
        "--rate 50 --arrival gamma --burstiness 0.3 --scheduler-policy max_utilization --kv-cache-blocks 16",
        "--rate 50 --arrival onoff:on=1s,off=1s",
        "--rate 50 --arrival drift:swing=0.5,period=10s",
        "--concurrency 4 --think-time 10ms",
        "--rate 5 --turns 3 --shared-prefix 64 --think-time 100ms --kv-cache-reuse enable",
        "--trace t.csv --rate-scale 2",
        "--dataset t.csv",
        "--dataset d.jsonl --rate 100",
        "--dataset d.jsonl --concurrency 2",
        "--rate 100 --replicas 3 --speeds 1,2 --routing power-of-2",
        "--rate 100 --replicas 3 --routing shortest-tokens --prefill-replicas 1 --transfer base=1ms,per_token=1us",
        "--rate 100 --replicas 3 --routing least-outstanding --fail 1@100ms-600ms",
        "--rate 100 --replicas 4 --autoscale min=1,target=4,delay=100ms,interval=50ms",
    ] {
        let report =
            json(&sandbox.ok(&format!("simulate {options} --num-requests 150 {COST} --allow-unstable --json")));
        assert_eq!(
            int(&report, "/num_requests") + int(&report, "/num_refused"),
            int(&report, "/num_offered"),
            "{options}"
        );
        assert!(num(&report, "/e2e_ms/mean") >= num(&report, "/ttft_ms/mean"), "{options}");
    }
}

#[test]
fn capacity_sweep_and_unstable_loads() {
    let sandbox = Sandbox::new();
    let small = "--num-requests 600 --input-tokens 32 --output-tokens 8 --max-batch-size 4";
    let found =
        json(&sandbox.ok(&format!("simulate capacity --slo ttft:p99:50ms {small} {COST} --replications 3 --json")));
    let rate = num(&found, "/capacity/rate_req_s");
    assert!(rate > 20.0 && rate < 250.0, "{rate}");
    let done = sandbox.run(&format!("simulate capacity --slo ttft:p99:1ms {small} {COST}"));
    assert_eq!(done.code, Some(1));
    assert_names(&done.stderr, &["no rate meets", "best possible"]);
    let servers = json(
        &sandbox
            .ok(&format!("simulate capacity --rate 300 --slo ttft:p99:50ms {small} {COST} --replications 2 --json")),
    );
    assert!(int(&servers, "/replicas") >= 2, "{servers}");

    let over = sandbox.run(&format!("simulate --rate 2000 {small} {COST}"));
    assert_eq!(over.code, Some(1), "{}", over.stderr);
    assert_names(&over.stderr, &["unstable", "--rate"]);

    sandbox.ok(&format!(
        "simulate sweep --vary rate=10,20 --vary max-batch-size=2,4,8 {small} {COST} --output-csv s.csv --html s.html --plots s"
    ));
    assert!(sandbox.read("s.html").matches("<svg").count() >= 10);
    for (plot, said) in
        [("ttft-p99", "max-batch-size 8"), ("goodput", "rate 20"), ("e2e-cdf", "rate 10, max-batch-size 2")]
    {
        assert!(sandbox.read(&format!("s/{plot}.svg")).contains(said), "{plot}");
    }
    let csv = sandbox.read("s.csv");
    assert_eq!(csv.lines().count(), 7);
    assert!(csv.starts_with("rate,max_batch_size,queue_mean_ms"), "{csv}");
    let columns = csv.lines().next().unwrap().split(',').count();
    assert!(csv.lines().all(|line| line.split(',').count() == columns));
}

#[test]
fn the_selftest_agrees_with_theory() {
    let sandbox = Sandbox::new();
    let report = json(&sandbox.ok("simulate selftest --requests 1000 --seed 3 --json"));
    assert_eq!(report["passed"], true, "{report:#}");
}

#[test]
fn bad_input_is_one_clear_line() {
    let sandbox = Sandbox::new();
    sandbox.write("late.csv", "arrival_s,input_tokens,output_tokens\n5,10,4\n1,20,5\n");
    sandbox.write("foreign.json", "{\"format\":\"other\"}");
    sandbox.write("d.jsonl", "{\"task_id\":0,\"input_ids\":[1,2,3],\"output_tokens\":4}\n");
    sandbox.write("text.json", "hello");
    for (options, parts) in [
        ("--rate 0", &["--rate", "above 0"][..]),
        ("--rate -3", &["--rate"]),
        ("--rate nan", &["--rate"]),
        ("", &["--rate", "--concurrency"]),
        ("--rate 1 --num-requests 0", &["--num-requests"]),
        ("--rate 1 --input-tokens 0", &["--input-tokens"]),
        ("--rate 1 --output-tokens -4", &["--output-tokens"]),
        ("--rate 1 --output-tokens zipf:3", &["--output-tokens"]),
        ("--rate 1 --arrival weibull", &["--arrival", "weibull"]),
        ("--rate 1 --arrival onoff:on=0s,off=1s", &["--arrival"]),
        ("--rate 1 --burstiness 2", &["--burstiness"]),
        ("--rate 1 --max-batch-size 0", &["--max-batch-size"]),
        ("--rate 1 --max-queue-delay 5ms", &["--max-queue-delay", "dynamic"]),
        ("--rate 1 --policy dynamic --kv-cache-blocks 5", &["--kv-cache-blocks", "dynamic"]),
        ("--rate 1 --policy static --scheduler-policy max_utilization", &["--scheduler-policy"]),
        ("--rate 1 --think-time 5ms", &["--think-time"]),
        ("--rate 1 --gpu l4", &["--gpu", "analytic"]),
        ("--rate 1 --dtype fp8", &["--dtype", "analytic"]),
        ("--rate 1 --tp 2", &["--tp", "analytic"]),
        ("--rate 1 --rate-scale 2", &["--trace"]),
        ("--rate 1 --policy dynamic --preferred-batch-size 9 --max-batch-size 8", &["--preferred-batch-size", "9"]),
        ("--rate 1 --kv-cache-blocks 1 --input-tokens 500", &["request 0", "KV cache is too small"]),
        ("--rate 1 --routing best", &["--routing", "best"]),
        ("--rate 1 --replicas 2 --prefill-replicas 2", &["--prefill-replicas"]),
        ("--rate 1 --fail 3@1s-2s", &["--fail", "3"]),
        ("--rate 1 --slo ttft:p99:fast", &["--slo"]),
        ("--trace late.csv", &["late.csv", "line 3", "before"]),
        ("--trace nothing.csv", &["nothing.csv"]),
        ("--trace late.csv --rate-scale 0", &["--rate-scale"]),
        ("--trace late.csv --rate 3", &["--rate", "late.csv"]),
        ("--trace late.csv --input-tokens 3", &["--input-tokens", "late.csv"]),
        ("--dataset d.jsonl", &["--rate"]),
        ("--dataset d.jsonl --rate 1 --output-tokens 3", &["--output-tokens", "d.jsonl"]),
    ] {
        assert_names(&sandbox.refused(&format!("simulate {options} {COST}")), parts);
    }
    for (cost, parts) in [
        ("linear:base=2", &["--cost", "unit"][..]),
        ("linear:speed=2ms", &["--cost", "speed"]),
        ("cubic", &["--cost", "cubic"]),
        ("foreign.json", &["foreign.json", "other", "calibrate"]),
        ("text.json", &["text.json", "cost file"]),
    ] {
        assert_names(&sandbox.refused(&format!("simulate --rate 1 --cost {cost}")), parts);
    }
    assert_names(&sandbox.refused("simulate calibrate nowhere -o c.json"), &["nowhere", "iterations.jsonl"]);
    assert_names(&sandbox.refused(&format!("simulate capacity {COST}")), &["--slo"]);
    assert_names(&sandbox.refused(&format!("simulate sweep --vary colour=red --rate 1 {COST}")), &["--vary", "colour"]);
}
