//! What holds for any simulation: skipping changes nothing, nothing is lost, Little's law, the same seed twice, and
//! times that scale.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use strobe_scheduler::scheduler::{Decision, Policy as EnginePolicy, SchedulerConfig};
use strobe_sim::cluster::{Failure, Transfer};
use strobe_sim::dynamic::{DynamicConfig, TimeoutAction};
use strobe_sim::lengths::LengthDist;
use strobe_sim::{
    ClusterConfig, Collector, CostModel, Job, Linear, Load, Policy, ReplicaConfig, Routing, Scenario, SimError, Sink,
    StepRecord,
};
use strobe_workload::{Arrival, RequestRecord};

#[derive(Default)]
struct Everything {
    records: Vec<RequestRecord>,
    steps: Vec<StepRecord>,
    gaps: Vec<(u64, u64)>,
}

impl Sink for Everything {
    fn keeps_token_times(&self) -> bool {
        true
    }
    fn gap(&mut self, gap_ns: u64, weight: u64) {
        match self.gaps.last_mut() {
            Some(last) if last.0 == gap_ns => last.1 += weight,
            _ => self.gaps.push((gap_ns, weight)),
        }
    }
    fn iteration(&mut self, step: &StepRecord, _: &[Decision]) -> Result<(), SimError> {
        self.steps.push(*step);
        Ok(())
    }
    fn request(&mut self, job: Job) -> Result<(), SimError> {
        self.records.push(job.into_record());
        Ok(())
    }
}

fn run(scenario: &Scenario) -> Everything {
    let mut all = Everything::default();
    scenario.run_into(&mut all).unwrap();
    all
}

fn linear(scale: f64) -> CostModel {
    CostModel::Linear(Linear {
        base_ns: 2e6 * scale,
        per_request_ns: 1e5 * scale,
        per_context_token_ns: 3e4 * scale,
        per_kv_token_ns: 200.0 * scale,
    })
}

fn loads() -> impl Strategy<Value = Load> {
    let rate = 1.0..60.0f64;
    prop_oneof![
        rate.clone().prop_map(|rate| Load::Open(Arrival::Poisson { rate })),
        rate.clone().prop_map(|rate| Load::Open(Arrival::Gamma { rate, burstiness: 0.3 })),
        Just(Load::Open(Arrival::AtOnce)),
        (1u64..20, 0.0..1e8).prop_map(|(clients, think_ns)| Load::Closed { clients, think_ns }),
        (rate, 1u32..4, 0u32..40).prop_map(|(rate, turns, shared)| Load::Sessions {
            arrival: Arrival::Poisson { rate },
            turns,
            think_ns: 3e7,
            shared,
        }),
    ]
}

fn scenarios() -> impl Strategy<Value = Scenario> {
    let server = (0usize..3, 1usize..12, 16usize..80, any::<bool>(), any::<bool>(), any::<bool>(), 24usize..80);
    let routing = prop_oneof![
        Just(Routing::RoundRobin),
        Just(Routing::Random),
        Just(Routing::LeastOutstanding),
        Just(Routing::PowerOf(2)),
        Just(Routing::ShortestTokens),
        Just(Routing::PrefixAffinity),
    ];
    let cluster = (routing, 1usize..4, any::<bool>(), any::<bool>());
    (loads(), server, cluster, 1u64..80, any::<u32>()).prop_map(|(load, server, cluster, num_requests, seed)| {
        let (policy, batch, tokens, chunked, reuse, reuse_output, blocks) = server;
        let (routing, servers, apart, fails) = cluster;
        let fails = fails && servers > 1;
        let apart = apart && servers > 1 && !fails;
        Scenario {
            load,
            input: LengthDist::Uniform(1, 16),
            output: LengthDist::Geometric { mean: 6.0 },
            num_requests,
            policy: Policy::Engine(ReplicaConfig {
                scheduler: SchedulerConfig {
                    policy: EnginePolicy::ALL[policy],
                    max_batch_size: batch,
                    max_num_tokens: if chunked { tokens } else { 4096 },
                    max_seq_len: 1 << 20,
                    chunked_context: chunked,
                    chunk_unit: 8,
                    reuse_output,
                },
                kv_blocks: blocks * 4,
                tokens_per_block: 8,
                reuse,
                speed: 1.0,
                skip: true,
                prefill_only: false,
            }),
            cost: linear(1.0),
            speeds: (0..servers).map(|i| 1.0 + i as f64 / 2.0).collect(),
            cluster: ClusterConfig {
                routing,
                prefill_servers: usize::from(apart),
                transfer: Transfer { base_ns: 1e6, per_token_ns: 1e4 },
                failures: if fails {
                    vec![Failure { server: 1, at_ns: 200_000_000, until_ns: 900_000_000 }]
                } else {
                    Vec::new()
                },
                autoscale: None,
                seed: 3,
            },
            slos: Vec::new(),
            warm_up: 0,
            seed: u64::from(seed),
        }
    })
}

fn stepping(scenario: &Scenario) -> Scenario {
    let mut single = scenario.clone();
    if let Policy::Engine(config) = &mut single.policy {
        config.skip = false;
    }
    single
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn skipping_gives_exactly_the_results_of_stepping(scenario in scenarios()) {
        let (ahead, single) = (run(&scenario), run(&stepping(&scenario)));
        prop_assert_eq!(ahead.records, single.records);
        prop_assert_eq!(ahead.gaps, single.gaps);
        prop_assert_eq!(ahead.steps, single.steps);
    }

    #[test]
    fn nothing_is_lost_and_the_same_seed_gives_the_same(scenario in scenarios()) {
        let all = run(&scenario);
        prop_assert_eq!(all.records.len() as u64, scenario.num_requests);
        let mut ids: Vec<u64> = all.records.iter().map(|r| r.id).collect();
        ids.sort_unstable();
        prop_assert!(ids.iter().enumerate().all(|(i, id)| i as u64 == *id), "every request once");
        for record in &all.records {
            prop_assert_eq!(record.error.as_deref(), None);
            let scheduled = record.first_scheduled_ns.unwrap();
            prop_assert!(record.arrival_ns <= scheduled && scheduled <= record.token_times_ns[0]);
            prop_assert!(record.token_times_ns.is_sorted());
        }
        let tokens: usize = all.records.iter().map(|r| r.token_times_ns.len()).sum();
        // A server that fails loses the tokens of the step it was in.
        let made: u64 = all.steps.iter().map(|s| u64::from(s.new_tokens)).sum();
        prop_assert_eq!(tokens as u64, made);
        prop_assert!(all.steps.iter().all(|s| s.kv_used <= s.kv_total));
        prop_assert_eq!(run(&scenario).records, all.records);
    }

    #[test]
    fn latencies_scale_with_times(rate in 5.0..50.0f64, seed in any::<u16>()) {
        let scenario = |scale: f64| Scenario {
            load: Load::Open(Arrival::Poisson { rate: rate / scale }),
            input: LengthDist::Uniform(1, 40),
            output: LengthDist::Uniform(1, 20),
            num_requests: 60,
            policy: Policy::Dynamic(DynamicConfig {
                max_batch: 4,
                preferred: vec![2],
                max_queue_delay_ns: (8e6 * scale) as u64,
                instances: 2,
                priorities: 2,
                timeout: Some(((5e8 * scale) as u64, TimeoutAction::Delay)),
                max_queue_size: 0,
                speed: 1.0,
            }),
            cost: linear(scale),
            speeds: vec![1.0],
            cluster: ClusterConfig::default(),
            slos: Vec::new(),
            warm_up: 0,
            seed: u64::from(seed),
        };
        let mean = |scale: f64| {
            let records = run(&scenario(scale)).records;
            records.iter().map(|r| (r.last_token_ns().unwrap() - r.arrival_ns) as f64).sum::<f64>() / 60.0
        };
        // Waits of whole microseconds and times of whole nanoseconds do not scale.
        prop_assert!((mean(1000.0) / mean(1.0) / 1000.0 - 1.0).abs() < 1e-3);
    }
}

#[test]
fn littles_law_holds_and_streamed_percentiles_are_those_of_all_values() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for _ in 0..20 {
        let mut scenario = scenarios().new_tree(&mut runner).unwrap().current();
        scenario.num_requests = 400;
        let exact = scenario.run(Collector::new(true)).unwrap();
        let streamed = scenario.run(Collector::new(false)).unwrap();
        let little = exact.metrics.as_ref().unwrap().little.clone().unwrap();
        assert!(little.relative_difference.abs() < 1e-6, "{little:?}");
        let pairs = [
            (exact.answer.ttft_ms, streamed.answer.ttft_ms),
            (exact.answer.e2e_ms, streamed.answer.e2e_ms),
            (exact.answer.itl_ms, streamed.answer.itl_ms),
            (exact.answer.tpot_ms, streamed.answer.tpot_ms),
        ];
        for (a, b) in pairs.into_iter().filter_map(|(a, b)| Some((a?, b?))) {
            assert_eq!(a.count, b.count);
            assert!((a.mean - b.mean).abs() <= 1e-4 * a.mean + 1e-6, "{a:?} {b:?}");
            assert!((a.max - b.max).abs() <= 1e-4 * a.max + 1e-5, "{a:?} {b:?}");
        }
    }
}
