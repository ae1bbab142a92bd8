//! Where an engine sends tokens: counts of every iteration, and the perfect router in place of the model's own.

mod common;

use std::time::Duration;

use common::{Random, build, greedy, load, says};
use strobe_engine::{Engine, EngineOptions, IterationRecord, LoadedModel, PerfectRouterOptions};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;
use strobe_model::perfect_router::Plan;

/// Iterations, their expert counts and the tokens of every request.
type Seen = (Vec<IterationRecord>, Vec<u32>, Vec<Vec<u32>>);

fn start(model: &LoadedModel, perfect: Option<usize>, overlap: bool) -> Engine {
    let perfect_router = perfect.map(|ranks| PerfectRouterOptions { ranks, plan: Plan::Even });
    let options = EngineOptions { perfect_router, overlap, max_batch_size: Some(4), ..EngineOptions::default() };
    Engine::start(Cpu::new(Tier::detect(), 2), model, options).unwrap()
}

/// Run a few requests to their end.
fn run(engine: &Engine) -> Seen {
    const REQUESTS: u64 = 6;
    let mut outbox = engine.outbox();
    let mut seen: Seen = (Vec::new(), Vec::new(), vec![Vec::new(); REQUESTS as usize]);
    engine.begin_measurement(Vec::new());
    engine.submit((0..REQUESTS).map(|id| greedy(id, Random(id + 1).tokens(3 + 4 * id as usize, 64), 9)));
    let mut finished = 0;
    while finished < REQUESTS as usize {
        assert!(engine.wait(&mut outbox, Duration::from_secs(1)), "the engine stopped");
        finished += outbox.finished.len();
        seen.0.extend_from_slice(&outbox.iterations);
        seen.1.extend_from_slice(&outbox.expert_counts);
        outbox.tokens.iter().for_each(|event| seen.2[event.request as usize].push(event.token));
    }
    seen
}

/// Every layer's counts of every iteration.
fn by_layer<'a>(
    model: &LoadedModel,
    seen: &'a Seen,
) -> impl Iterator<Item = (&'a IterationRecord, usize, &'a [u32])> + use<'a> {
    let experts = model.config.model.moe.as_ref().unwrap().num_experts;
    let layers = model.config.model.num_hidden_layers;
    assert_eq!(seen.1.len(), seen.0.len() * layers * experts, "counts of every iteration");
    let rows = seen.1.chunks_exact(experts).enumerate();
    rows.map(move |(row, counts)| (&seen.0[row / layers], row % layers, counts))
}

fn tokens_of(iteration: &IterationRecord) -> u32 {
    iteration.context_tokens + iteration.generation_requests
}

#[test]
fn counts_add_up_to_the_tokens_of_the_step() {
    for name in ["mixtral", "qwen3-moe", "moe-tiny"] {
        let model = load(name, build(DType::F32));
        let moe = model.config.model.moe.clone().unwrap();
        for overlap in [false, true] {
            let seen = run(&start(&model, None, overlap));
            for (iteration, layer, counts) in by_layer(&model, &seen) {
                let pairs = if moe.in_layer(layer) { tokens_of(iteration) * moe.experts_per_token as u32 } else { 0 };
                assert_eq!(counts.iter().sum::<u32>(), pairs, "{name} overlap {overlap} {} {layer}", iteration.iter);
            }
        }
    }
}

#[test]
fn the_perfect_router_balances_every_step_and_can_be_switched() {
    for name in ["mixtral", "qwen3-moe", "moe-tiny"] {
        let model = load(name, build(DType::F32));
        let moe = model.config.model.moe.clone().unwrap();
        let learned = run(&start(&model, None, false));
        let ranks = (2..).find(|ranks| moe.num_experts.is_multiple_of(*ranks)).unwrap();
        let engine = start(&model, Some(ranks), false);
        assert_eq!(engine.info().perfect_router.map(|balance| balance.ranks), Some(ranks));
        let perfect = run(&engine);
        for (iteration, layer, counts) in by_layer(&model, &perfect).filter(|(_, layer, _)| moe.in_layer(*layer)) {
            let spread = |loads: &[u32]| loads.iter().max().unwrap() - loads.iter().min().unwrap();
            let by_rank: Vec<u32> = counts.chunks(counts.len() / ranks).map(|rank| rank.iter().sum()).collect();
            assert!(spread(counts) <= 1 && spread(&by_rank) <= 1, "{name} {} {layer} {counts:?}", iteration.iter);
        }
        assert_ne!(perfect.2, learned.2, "{name}: wrong by design");
        engine.use_perfect_router(false);
        let switched = run(&engine);
        assert_eq!((&switched.1, &switched.2), (&learned.1, &learned.2), "{name}: the router decides again");
        engine.use_perfect_router(true);
        assert_eq!(run(&engine).2, perfect.2, "{name}: and not any more");
    }
}

#[test]
fn what_cannot_be_balanced_is_refused_before_it_starts() {
    let try_start = |name: &str, ranks: usize| {
        let model = load(name, build(DType::F32));
        let perfect_router = Some(PerfectRouterOptions { ranks, plan: Plan::Even });
        Engine::start(Cpu::new(Tier::detect(), 1), &model, EngineOptions { perfect_router, ..EngineOptions::default() })
    };
    says(try_start("llama", 1), &["--perfect-router", "LlamaForCausalLM", "no experts"]);
    says(try_start("mixtral", 7), &["perfect router", "7 expert-parallel ranks"]);
}
