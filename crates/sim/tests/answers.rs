//! Capacities that theory knows, overload of every kind of load, and clusters whose servers come and go.

use std::sync::Arc;

use strobe_scheduler::scheduler::{Decision, Policy as EnginePolicy, SchedulerConfig};
use strobe_sim::capacity::{Found, Resource, Search, at_rate, judged_longer, rate_of};
use strobe_sim::cluster::{Autoscale, Failure, Transfer};
use strobe_sim::lengths::LengthDist;
use strobe_sim::{
    ClusterConfig, Collector, Content, CostModel, Job, Linear, Load, Policy, ReplicaConfig, Routing, Scenario,
    SimError, SimRequest, Sink, Slo, StepRecord,
};
use strobe_workload::{Arrival, RequestRecord};

const MS: u64 = 1_000_000;

/// Servers that take `slots` requests at once, with iterations of 1 ms; requests of one iteration each.
fn scenario(slots: usize, servers: usize) -> Scenario {
    Scenario {
        load: Load::Open(Arrival::Poisson { rate: 100.0 }),
        input: LengthDist::Fixed(1),
        output: LengthDist::Fixed(1),
        num_requests: 2_000,
        policy: Policy::Engine(ReplicaConfig {
            scheduler: SchedulerConfig {
                policy: EnginePolicy::GuaranteedNoEvict,
                max_batch_size: slots,
                max_num_tokens: 64,
                max_seq_len: 1 << 20,
                chunked_context: true,
                chunk_unit: 8,
                reuse_output: false,
            },
            kv_blocks: 4096,
            tokens_per_block: 8,
            reuse: false,
            speed: 1.0,
            skip: true,
            prefill_only: false,
        }),
        cost: CostModel::Linear(Linear { base_ns: 1e6, ..Linear::default() }),
        speeds: vec![1.0; servers],
        cluster: ClusterConfig::default(),
        slos: Vec::new(),
        warm_up: 0,
        seed: 1,
    }
}

fn with_limit(scenario: Scenario, limit: &str) -> Scenario {
    Scenario { slos: vec![Slo::parse(limit).unwrap()], ..scenario }
}

fn search() -> Search {
    Search { longest: 32_000, runs: 10, threads: 2, ..Search::default() }
}

/// The rate found, after fresh runs said that it holds and that 5 % more does not.
fn rate(scenario: &Scenario) -> f64 {
    match search().largest(scenario).unwrap() {
        Found::Rate(found) => {
            assert_eq!(found.tried.held, found.tried.runs, "{found:?}");
            assert!(found.values_ms.iter().all(|seen| seen.highest_ms <= seen.slo.limit_ms), "{found:?}");
            assert_eq!(found.tried_above.held, 0, "{found:?}");
            found.rate_req_s
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_capacity_of_a_queue_is_that_of_theory() {
    // M/M/1: p99 of the time in the system is ln(100)/(1 - rate), so 23.0259 ms at 0.8 requests per ms.
    let mm1 =
        Scenario { cost: CostModel::Exponential { mean_ns: 1e6 }, ..with_limit(scenario(1, 1), "e2e:p99:23.0259ms") };
    // The tail of this queue is long: it takes many requests to know its p99.
    let long = Search { longest: 128_000, ..search() };
    let Found::Rate(found) = long.largest(&mm1).unwrap() else { panic!("there is a largest rate") };
    let (low, high) = found.interval_req_s;
    assert!(low < 812.0 && 788.0 < high, "{found:?}");
    assert!(found.rate_req_s > 740.0 && found.rate_req_s < 805.0, "{found:?}");
    assert_eq!(found.tried.held, 10);
    assert!(found.tried_above.held <= 3, "{found:?}");
    assert_eq!(found.binds.slo, Some(mm1.slos[0]));

    let fewest = |rate: f64| search().fewest_servers(&at_rate(&mm1, rate).unwrap(), 8).unwrap().map(|f| f.replicas);
    assert_eq!((fewest(500.0), fewest(1200.0), fewest(100_000.0)), (Some(1), Some(2), None));
    let hard = with_limit(mm1.clone(), "e2e:p99:1us");
    assert_eq!(search().unmeetable(&hard).unwrap().unwrap().best_ms.len(), 1);
    assert!(search().unmeetable(&mm1).unwrap().is_none());
}

#[test]
fn where_no_limit_binds_the_rate_is_that_of_saturation() {
    // Eight requests in every iteration of 1 ms: 8000/s, whatever the limit on the time between tokens.
    let two_tokens = Scenario { output: LengthDist::Fixed(2), ..with_limit(scenario(8, 1), "tpot:p99:20ms") };
    let found = rate(&two_tokens);
    assert!(found > 3_700.0 && found <= 4_000.0, "{found}");
    // Two conversations' turns are two requests each.
    let load = Load::Sessions { arrival: Arrival::Poisson { rate: 1.0 }, turns: 2, think_ns: 1e6, shared: 0 };
    let found = rate(&Scenario { load, ..two_tokens.clone() });
    assert!(found > 1_850.0 && found <= 2_000.0, "{found}");
    // One server for prompts, one for the tokens after the first: each takes 8000/s.
    let cluster = ClusterConfig { prefill_servers: 1, ..ClusterConfig::default() };
    let found = rate(&Scenario { cluster, speeds: vec![1.0; 2], ..two_tokens });
    assert!(found > 7_400.0 && found <= 8_000.0, "{found}");
}

#[test]
fn what_binds_is_named_and_what_would_move_it() {
    let four = Scenario { output: LengthDist::Fixed(2), ..with_limit(scenario(4, 1), "ttft:p99:20ms") };
    let Found::Rate(found) = search().largest(&four).unwrap() else { panic!("there is a largest rate") };
    assert_eq!(found.binds.resource, Resource::Batch, "{found:?}");
    let batch = found.what_if.iter().find(|other| other.options == "--max-batch-size 8").unwrap();
    assert!(batch.change > 0.8 && batch.change < 1.2, "{found:?}");
    let tokens = found.what_if.iter().find(|other| other.options == "--max-num-tokens 128").unwrap();
    assert!(tokens.change.abs() < 0.02, "{found:?}");
    // With blocks for two requests only, the cache binds.
    let mut small = four.clone();
    if let Policy::Engine(config) = &mut small.policy {
        config.kv_blocks = 2;
    }
    let Found::Rate(found) = search().largest(&small).unwrap() else { panic!("there is a largest rate") };
    assert_eq!(found.binds.resource, Resource::Kv, "{found:?}");
}

fn recording(gaps_ns: impl Iterator<Item = u64>) -> Load {
    let mut arrival_ns = 0;
    let requests = gaps_ns.enumerate().map(|(id, gap)| {
        let request =
            SimRequest { id: id as u64, arrival_ns, input: 1, output: 1, content: Content::Unique, priority: 1 };
        arrival_ns += gap;
        request
    });
    Load::Replay(Arc::new(requests.collect()))
}

#[test]
fn a_recording_has_a_capacity() {
    // A request every 5 ms for a server that needs 1 ms: 5 times as fast is all it takes.
    let trace = Scenario {
        load: recording(std::iter::repeat_n(5 * MS, 3_000)),
        num_requests: 3_000,
        ..with_limit(scenario(1, 1), "ttft:p99:2ms")
    };
    assert!((rate_of(&trace).unwrap() - 200.0).abs() < 1e-6);
    let Found::Rate(found) = search().largest(&trace).unwrap() else { panic!("there is a largest rate") };
    let scale = found.rate_scale.unwrap();
    assert!(scale > 4.95 && scale <= 5.01, "{scale}");
    assert!(found.only_one_run);
}

#[test]
fn overload_is_seen_in_every_load_that_does_not_wait() {
    let stable = |scenario: &Scenario| scenario.run(Collector::new(false)).unwrap().answer.stable;
    let open = |rate: f64| Load::Open(Arrival::Poisson { rate });
    let loads: [(&str, Load); 3] = [
        ("open", open(1_200.0)),
        (
            "conversations",
            Load::Sessions { arrival: Arrival::Poisson { rate: 400.0 }, turns: 3, think_ns: 1e6, shared: 0 },
        ),
        ("recording", recording(std::iter::repeat_n(MS * 10 / 12, 2_000))),
    ];
    for (name, load) in loads {
        assert_eq!(stable(&Scenario { load, ..scenario(1, 1) }), Some(false), "{name}");
    }
    assert_eq!(stable(&Scenario { load: open(700.0), ..scenario(1, 1) }), Some(true));
    let calm = recording(std::iter::repeat_n(2 * MS, 2_000));
    assert_eq!(stable(&Scenario { load: calm, ..scenario(1, 1) }), Some(true));
    // The second of two pools is the one that is too small.
    let apart = Scenario {
        load: open(700.0),
        output: LengthDist::Fixed(3),
        cluster: ClusterConfig {
            prefill_servers: 1,
            transfer: Transfer { base_ns: 1e5, per_token_ns: 0.0 },
            ..ClusterConfig::default()
        },
        ..scenario(1, 2)
    };
    assert_eq!(stable(&apart), Some(false));
    assert_eq!(stable(&Scenario { load: open(300.0), ..apart }), Some(true));
    // Nothing to say of loads that wait for answers.
    assert_eq!(stable(&Scenario { load: Load::Closed { clients: 8, think_ns: 0.0 }, ..scenario(1, 1) }), None);
}

#[test]
fn one_per_cent_too_much_is_too_much() {
    let judged = |rate: f64| {
        let own = Scenario { load: Load::Open(Arrival::Poisson { rate }), ..scenario(1, 1) };
        let short = own.run(Collector::new(false)).unwrap().answer;
        let longer = judged_longer(&own, &short, || false).unwrap();
        longer.map_or(short.stable, |longer| longer.stable)
    };
    // A burst that the server can't keep up with is no overload if the lull after it is long enough.
    let bursts = |rate: f64| {
        let load = Load::Open(Arrival::OnOff { rate, on_s: 0.5, off_s: 0.5 });
        let own = Scenario { load, ..scenario(1, 1) };
        let short = own.run(Collector::new(false)).unwrap().answer;
        judged_longer(&own, &short, || false).unwrap().map_or(short.stable, |longer| longer.stable)
    };
    assert_eq!((bursts(700.0), bursts(1_500.0)), (Some(true), Some(false)));
    assert_eq!(judged(1_010.0), Some(false));
    assert_eq!(judged(950.0), Some(true));
    assert_eq!(judged(300.0), Some(true));
}

#[derive(Default)]
struct Everything {
    records: Vec<RequestRecord>,
    steps: Vec<StepRecord>,
}

impl Sink for Everything {
    fn keeps_token_times(&self) -> bool {
        true
    }
    fn gap(&mut self, _: u64, _: u64) {}
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

#[test]
fn round_robin_uses_every_server_of_both_pools() {
    let cluster = ClusterConfig { prefill_servers: 2, ..ClusterConfig::default() };
    let all = run(&Scenario { cluster, output: LengthDist::Fixed(2), ..scenario(1, 4) });
    let steps = |server: u32| all.steps.iter().filter(|step| step.server == server).count();
    assert!((0..4).all(|server| (990..=1_010).contains(&steps(server))), "{:?}", (0..4).map(steps).collect::<Vec<_>>());
}

#[test]
fn the_shorter_of_two_queues_is_always_found() {
    // Of two servers at most one is busy when a request arrives; two draws of the same would miss the other.
    let load = Load::Open(Arrival::Constant { rate: 1_600.0 });
    let cluster = ClusterConfig { routing: Routing::PowerOf(2), ..ClusterConfig::default() };
    let all = run(&Scenario { load, cluster, ..scenario(1, 2) });
    assert!(all.records.iter().all(|record| record.first_scheduled_ns == Some(record.arrival_ns)));
}

#[test]
fn a_server_that_is_not_there_does_not_come_back_from_a_failure() {
    let cluster = ClusterConfig {
        failures: vec![Failure { server: 2, at_ns: 100 * MS, until_ns: 200 * MS }],
        autoscale: Some(Autoscale { min: 1, target: 1e6, delay_ns: MS, interval_ns: 10 * MS }),
        ..ClusterConfig::default()
    };
    let all = run(&Scenario { cluster, ..scenario(4, 3) });
    assert!(all.steps.iter().all(|step| step.server == 0));
    assert_eq!(all.records.len(), 2_000);
}

#[test]
fn a_server_is_back_when_the_last_of_its_failures_is_over() {
    let failure = |from: u64, until: u64| Failure { server: 0, at_ns: from * MS, until_ns: until * MS };
    let failures = vec![failure(1_000, 4_000), failure(2_000, 3_000), failure(4_000, 5_000)];
    let cluster = ClusterConfig { failures, ..ClusterConfig::default() };
    let all = run(&Scenario { cluster, ..scenario(4, 2) });
    let own: Vec<u64> = all.steps.iter().filter(|step| step.server == 0).map(|step| step.start_ns / MS).collect();
    assert!(own.iter().all(|at| !(1_000..5_000).contains(at)));
    assert!(own.iter().any(|at| *at < 1_000) && own.iter().any(|at| *at >= 5_000));
}

#[test]
fn clusters_that_cannot_be_are_errors() {
    let with = |cluster| Scenario { cluster, ..scenario(1, 2) }.run(Collector::new(false)).err();
    let failures = vec![Failure { server: 2, at_ns: 1, until_ns: 2 }];
    let error = with(ClusterConfig { failures, ..ClusterConfig::default() }).unwrap();
    assert!(error.to_string().starts_with("--fail"), "{error}");
    let error = with(ClusterConfig { prefill_servers: 2, ..ClusterConfig::default() }).unwrap();
    assert!(error.to_string().starts_with("--prefill-replicas"), "{error}");
}

#[test]
fn a_run_that_is_stopped_keeps_what_it_has() {
    let mut collector = Collector::new(false);
    collector.stop = Some(|| true);
    let outcome = scenario(1, 1).run_collecting(&mut collector).unwrap();
    assert!(outcome.partial && outcome.answer.num_offered == 0);
    // A simulation ends with the first limit that can no longer hold.
    let mut collector = Collector::new(false);
    collector.until_broken = true;
    let hopeless = with_limit(scenario(1, 1), "ttft:p99:1us");
    assert!(matches!(hopeless.run_collecting(&mut collector), Err(SimError::Stopped)));
    assert!(collector.is_broken() && collector.num_ended() < 100);
}
