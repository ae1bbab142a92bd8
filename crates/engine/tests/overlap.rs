//! Overlapped scheduling: a step is planned and launched before the tokens of the one before it are known. What comes
//! out must not depend on it, however requests end.

mod common;

use common::{Heard, Random, build, listen_until, load, run, run_windows};
use strobe_engine::{
    BuildConfig, CacheSize, Engine, EngineOptions, FinishReason, LoadedModel, Policy, Request, SamplingParams,
};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;

fn model() -> LoadedModel {
    load("micro", BuildConfig { max_seq_len: 512, max_num_tokens: 96, max_batch_size: 6, ..build(DType::F32) })
}

fn requests(model: &LoadedModel, count: u64) -> Vec<Request> {
    let mut random = Random(5);
    let vocab = model.config.model.vocab_size;
    (0..count)
        .map(|id| {
            let prompt = random.tokens(3 + (id as usize * 37) % 120, vocab);
            // Some end by length, some by one of many stop tokens, some at once.
            let stop_ids =
                if id % 3 == 0 { (0..vocab as u32).filter(|t| t % 7 == id as u32 % 7).collect() } else { Vec::new() };
            let params = SamplingParams {
                temperature: if id % 2 == 0 { 0.0 } else { 0.8 },
                top_k: if id % 4 == 1 { 20 } else { 0 },
                seed: id,
                max_tokens: 1 + (id as u32 * 11) % 40,
                min_tokens: if id % 6 == 0 { 1.min(1 + (id as u32 * 11) % 40) } else { 0 },
                stop_ids,
                ..SamplingParams::default()
            };
            Request::new(id, prompt, params)
        })
        .collect()
}

fn outcome(heard: &Heard, count: u64) -> Vec<(Vec<u32>, FinishReason)> {
    let tokens = |id: u64| heard.tokens.get(&id).cloned().unwrap_or_default();
    (0..count).map(|id| (tokens(id), heard.finished[&id].reason)).collect()
}

#[test]
fn results_do_not_depend_on_it() {
    let model = model();
    let cpu = || Cpu::new(Tier::detect(), 2);
    for policy in Policy::ALL {
        for (blocks, reuse) in [(200, false), (200, true), (14, false), (14, true)] {
            let options = |overlap| EngineOptions {
                policy,
                overlap,
                prefix_reuse: reuse,
                cache: CacheSize::Blocks(blocks),
                ..EngineOptions::default()
            };
            let off = run(cpu(), &model, options(false), requests(&model, 24));
            let on = run(cpu(), &model, options(true), requests(&model, 24));
            assert_eq!(outcome(&on, 24), outcome(&off, 24), "{} {blocks} blocks, reuse {reuse}", policy.name());
            let produced = |heard: &Heard| heard.records().map(|r| u64::from(r.new_tokens)).sum::<u64>();
            assert_eq!(produced(&on), produced(&off), "every token is counted once");
            let ended = |heard: &Heard| heard.records().map(|r| u64::from(r.completed)).sum::<u64>();
            assert_eq!(ended(&on), 24);
            assert_eq!(
                on.records().last().unwrap().kv_free as usize + on.records().last().unwrap().kv_used as usize,
                blocks
            );
        }
    }
}

#[test]
fn iterations_tile_the_time_and_phases_touch() {
    let model = model();
    let options = EngineOptions { overlap: true, cache: CacheSize::Blocks(200), ..EngineOptions::default() };
    let heard = run_windows(Cpu::new(Tier::detect(), 2), &model, options, requests(&model, 12), "3-5,8");
    let records: Vec<_> = heard.records().collect();
    for (index, record) in records.iter().enumerate() {
        assert_eq!(record.iter, index as u64);
        let t = record.times;
        let order = [t.start, t.fetched, t.planned, t.scheduled, t.prepared, t.forwarded, t.sampled, t.end];
        assert!(order.is_sorted(), "{index}: {order:?}");
    }
    for pair in records.windows(2) {
        assert!(pair[1].times.start >= pair[0].times.end, "iterations overlap: {:?}", pair[1].iter);
    }
    let profiled: Vec<u64> = records.iter().filter(|r| r.profiled).map(|r| r.iter).collect();
    assert_eq!(profiled, [3, 4, 5, 8]);
    let recordings: Vec<_> = heard.all.iter().flat_map(|outbox| &outbox.recordings).collect();
    assert_eq!(recordings.len(), 2);
    assert!(recordings.iter().all(|r| r.complete));
}

/// One request that ends by a stop token after some steps, while the step after that is on its way.
fn stopped(model: &LoadedModel) -> Request {
    let prompt = Random(3).tokens(7, model.config.model.vocab_size);
    let request = |stop_ids| {
        let params = SamplingParams { max_tokens: 40, stop_ids, ..SamplingParams::default() };
        Request::new(0, prompt.clone(), params)
    };
    let free = run(Cpu::new(Tier::detect(), 2), model, EngineOptions::default(), vec![request(Vec::new())]);
    let tokens = &free.tokens[&0];
    let new = (4..tokens.len()).find(|&at| !tokens[..at].contains(&tokens[at])).unwrap();
    request(vec![tokens[new]])
}

#[test]
fn a_window_may_open_when_the_last_request_has_just_ended() {
    let model = model();
    let options = EngineOptions { overlap: true, ..EngineOptions::default() };
    let heard = run(Cpu::new(Tier::detect(), 2), &model, options.clone(), vec![stopped(&model)]);
    let steps = heard.tokens[&0].len() as u64;
    for first in 0..steps + 3 {
        let window = format!("{first}-{}", first + 1);
        let heard = run_windows(Cpu::new(Tier::detect(), 2), &model, options.clone(), vec![stopped(&model)], &window);
        assert_eq!(heard.finished[&0].reason, FinishReason::Stop, "{window}");
    }
}

#[test]
fn a_measurement_holds_its_own_iterations_only() {
    let model = model();
    let options = EngineOptions { overlap: true, ..EngineOptions::default() };
    let engine = Engine::start(Cpu::new(Tier::detect(), 2), &model, options).unwrap();
    for repeat in 0..4 {
        engine.begin_measurement(Vec::new());
        let mut heard = Heard::default();
        engine.submit([stopped(&model)]);
        listen_until(&engine, &mut heard, |h| h.finished.contains_key(&0));
        let numbers: Vec<u64> = heard.records().map(|r| r.iter).collect();
        assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>(), "repeat {repeat}");
        // Time for the step that nobody needs to land.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn aborts_in_flight_leave_nothing_behind() {
    let model = model();
    let options = EngineOptions { overlap: true, cache: CacheSize::Blocks(64), ..EngineOptions::default() };
    let engine = Engine::start(Cpu::new(Tier::detect(), 2), &model, options).unwrap();
    engine.begin_measurement(Vec::new());
    let mut heard = Heard::default();
    let mut random = Random(9);
    for round in 0..20u64 {
        let long = SamplingParams { max_tokens: 300, ..SamplingParams::default() };
        let prompt = random.tokens(5, model.config.model.vocab_size);
        engine.submit([Request::new(round, prompt, long)]);
        listen_until(&engine, &mut heard, |h| h.tokens.contains_key(&round));
        engine.abort(round);
        listen_until(&engine, &mut heard, |h| h.finished.contains_key(&round));
    }
    // A request that needs every block still runs.
    let prompt = random.tokens(500, model.config.model.vocab_size);
    let params = SamplingParams { max_tokens: 8, ..SamplingParams::default() };
    engine.submit([Request::new(99, prompt, params)]);
    listen_until(&engine, &mut heard, |h| h.finished.contains_key(&99));
    heard.take(engine.shutdown().unwrap());
    assert_eq!(heard.finished[&99].reason, FinishReason::Length);
    assert_eq!(heard.tokens[&99].len(), 8);
}
