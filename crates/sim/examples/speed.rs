//! How many requests per second of real time the simulator gets through, on one thread:
//! `cargo run --release -p strobe-sim --example speed`.

use std::time::Instant;

use strobe_scheduler::scheduler::{Policy as EnginePolicy, SchedulerConfig};
use strobe_sim::lengths::LengthDist;
use strobe_sim::{
    ClusterConfig, Collector, CostModel, Linear, Load, Policy, ReplicaConfig, Routing, Scenario, SimError,
};
use strobe_workload::Arrival;

fn scenario(rate: f64, num_requests: u64, servers: usize, skip: bool) -> Scenario {
    let (base_ns, per_request_ns, per_context_token_ns, per_kv_token_ns) = (2e6, 10e3, 3e3, 5.0);
    Scenario {
        load: Load::Open(Arrival::Poisson { rate }),
        input: LengthDist::Fixed(128),
        output: LengthDist::Fixed(128),
        num_requests,
        policy: Policy::Engine(ReplicaConfig {
            scheduler: SchedulerConfig {
                policy: EnginePolicy::GuaranteedNoEvict,
                max_batch_size: 256,
                max_num_tokens: 8192,
                max_seq_len: 1 << 20,
                chunked_context: true,
                chunk_unit: 64,
                reuse_output: true,
            },
            kv_blocks: 2048,
            tokens_per_block: 64,
            reuse: false,
            speed: 1.0,
            skip,
            prefill_only: false,
        }),
        cost: CostModel::Linear(Linear { base_ns, per_request_ns, per_context_token_ns, per_kv_token_ns }),
        speeds: vec![1.0; servers],
        cluster: ClusterConfig { routing: Routing::LeastOutstanding, ..ClusterConfig::default() },
        slos: Vec::new(),
        warm_up: 0,
        seed: 420,
    }
}

fn main() -> Result<(), SimError> {
    println!(
        "{:>8} {:>8} {:>10} {:>6} {:>12} {:>14}",
        "servers", "rate/s", "requests", "skip", "mean batch", "requests/s"
    );
    let cases =
        [(1, 20.0, 100_000), (1, 100.0, 200_000), (1, 200.0, 200_000), (1, 300.0, 200_000), (64, 6_400.0, 500_000)];
    for (servers, rate, requests) in cases {
        for skip in [false, true] {
            let start = Instant::now();
            let outcome = scenario(rate, requests, servers, skip).run(Collector::new(false))?;
            let per_s = requests as f64 / start.elapsed().as_secs_f64();
            let batch = outcome.answer.batch.mean_requests;
            println!("{servers:>8} {rate:>8} {requests:>10} {skip:>6} {batch:>12.2} {per_s:>14.0}");
        }
    }
    Ok(())
}
