//! The life of requests in an engine: how they end, are refused and aborted, and how the engine itself ends.

mod common;

use std::sync::mpsc;
use std::time::Duration;

use common::{Heard, PATIENCE, Random, build, greedy, listen_until, load, rebuilt, run, says};
use strobe_engine::scheduler::Rejection;
use strobe_engine::{
    BuildConfig, CacheSize, Engine, EngineOptions, FinishReason, LoadedModel, Outbox, Policy, Request, SamplingParams,
};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;

fn cpu() -> Cpu {
    Cpu::new(Tier::detect(), 2)
}

/// A model with room for requests that take hundreds of steps.
fn long_model() -> LoadedModel {
    load("micro", BuildConfig { max_seq_len: 2048, max_num_tokens: 512, ..build(DType::F32) })
}

fn start(model: &LoadedModel, options: EngineOptions) -> Engine {
    Engine::start(cpu(), model, options).unwrap()
}

fn blocks(count: usize) -> EngineOptions {
    EngineOptions { cache: CacheSize::Blocks(count), ..EngineOptions::default() }
}

/// A prompt for the fixture `llama`.
fn prompt(length: usize) -> Vec<u32> {
    Random(21).tokens(length, 64)
}

// ---- Abort --------------------------------------------------------------------------------------------------------

#[test]
fn aborted_requests_give_their_blocks_back() {
    let model = long_model();
    for policy in Policy::ALL {
        let engine = start(&model, EngineOptions { policy, ..blocks(128) });
        engine.begin_measurement(Vec::new());
        let mut heard = Heard::default();
        // The whole cache each: 40 + 2000 positions in blocks of 16.
        engine.submit([greedy(1, prompt(40), 2000), greedy(2, prompt(41), 2000)]);
        listen_until(&engine, &mut heard, |h| h.tokens.contains_key(&1));
        engine.abort(2);
        engine.abort(99); // nobody
        listen_until(&engine, &mut heard, |h| h.finished.contains_key(&2));
        engine.abort(1);
        listen_until(&engine, &mut heard, |h| h.finished.contains_key(&1));
        engine.abort(1); // again: nothing left to abort

        // All blocks are free: a request that needs every single one runs to its end.
        engine.submit([greedy(3, prompt(2040), 8)]);
        listen_until(&engine, &mut heard, |h| h.finished.contains_key(&3));
        heard.take(engine.shutdown().unwrap());

        let name = policy.name();
        let running = heard.finished[&1];
        assert_eq!(running.reason, FinishReason::Aborted, "{name}");
        assert!(running.first_scheduled_ns.unwrap() >= running.queued_ns && running.iterations.is_some(), "{name}");
        assert!(heard.tokens[&1].len() < 2000, "{name}");
        let waiting = heard.finished[&2];
        assert_eq!(waiting.reason, FinishReason::Aborted, "{name}");
        if policy != Policy::MaxUtilization {
            assert_eq!((waiting.first_scheduled_ns, waiting.iterations), (None, None), "{name}: it never ran");
            assert!(!heard.tokens.contains_key(&2), "{name}");
        }
        assert_eq!(heard.finished[&3].reason, FinishReason::Length, "{name}");
        assert_eq!(heard.tokens[&3].len(), 8, "{name}");
        let full = heard.records().filter(|r| r.kv_used == 128).count();
        assert!(full >= 1, "{name}: the last request fills the cache");
        assert!(heard.rejected.is_empty());
    }
}

#[test]
fn a_request_aborted_with_its_submission_never_runs() {
    let model = load("llama", build(DType::F32));
    let engine = start(&model, EngineOptions::default());
    engine.begin_measurement(Vec::new());
    let mut heard = Heard::default();
    // Keeps the engine busy enough that both commands usually arrive together; either way the request ends once.
    engine.submit([greedy(1, prompt(8), 100)]);
    engine.submit([greedy(2, prompt(100), 1)]);
    engine.abort(2);
    listen_until(&engine, &mut heard, |h| h.ended() == 2);
    assert!(matches!(heard.finished[&2].reason, FinishReason::Aborted | FinishReason::Length));
    assert_eq!(heard.finished[&1].reason, FinishReason::Length);
}

// ---- Refusals -----------------------------------------------------------------------------------------------------

#[test]
fn requests_that_cannot_run_are_refused_and_the_others_run() {
    let model = load("llama", build(DType::F32));
    let options = EngineOptions { chunked_context: false, max_num_tokens: Some(48), ..blocks(5) };
    let engine = start(&model, options);
    engine.begin_measurement(Vec::new());
    let bad = [
        (greedy(1, Vec::new(), 4), Rejection::EmptyPrompt),
        (greedy(2, prompt(4), 0), Rejection::NoOutput),
        (greedy(3, prompt(100), 29), Rejection::TooLong { prompt: 100, output: 29, limit: 128 }),
        (greedy(4, prompt(40), 42), Rejection::CacheTooSmall { needed: 6, total: 5, tokens_per_block: 16 }),
        (greedy(5, prompt(49), 4), Rejection::PromptExceedsStep { prompt: 49, limit: 48 }),
        (greedy(6, vec![3, 64, 5], 4), Rejection::UnknownToken { token: 64, vocab: 64 }),
        (greedy(7, vec![3, u32::MAX], 4), Rejection::UnknownToken { token: u32::MAX, vocab: 64 }),
        (greedy(8, prompt(4), u32::MAX), Rejection::TooLong { prompt: 4, output: u32::MAX as usize, limit: 128 }),
    ];
    for (request, reason) in &bad {
        let known_before = engine.info().check(request.prompt.len(), request.params.max_tokens as usize);
        if !matches!(reason, Rejection::UnknownToken { .. }) {
            assert_eq!(known_before, Err(reason.clone()), "the same answer before anything is sent");
        }
        assert!(!reason.to_string().contains('\n'));
    }
    engine.submit([greedy(10, prompt(40), 8)]);
    engine.submit(bad.iter().map(|(request, _)| request.clone()));
    engine.submit([greedy(11, prompt(48), 33)]);
    let mut heard = Heard::default();
    listen_until(&engine, &mut heard, |h| h.ended() == bad.len() + 2);
    let expected: Vec<_> = bad.into_iter().map(|(request, reason)| (request.id, reason)).collect();
    assert_eq!(heard.rejected, expected);
    assert_eq!((heard.tokens[&10].len(), heard.tokens[&11].len()), (8, 33));
}

#[test]
fn options_that_do_not_fit_the_engine_are_refused() {
    let model = load("llama", build(DType::F32));
    let try_start = |options| Engine::start(cpu(), &model, options);
    let plain = EngineOptions::default;
    says(try_start(EngineOptions { max_batch_size: Some(0), ..plain() }), &["--max-batch-size", "at least 1"]);
    says(try_start(EngineOptions { max_batch_size: Some(9), ..plain() }), &["--max-batch-size", "9", "8"]);
    says(try_start(EngineOptions { max_num_tokens: Some(129), ..plain() }), &["--max-num-tokens", "129", "128"]);
    says(try_start(EngineOptions { max_num_tokens: Some(15), ..plain() }), &["--max-num-tokens", "15", "16"]);
    says(try_start(blocks(0)), &["--kv-cache-blocks"]);
    says(try_start(blocks(u32::MAX as usize - 1)), &["not enough memory", "KV cache blocks", "GiB available"]);
    says(try_start(blocks(usize::MAX >> 24)), &["--kv-cache-blocks", "between 1 and"]);
    for fraction in [0.0, -0.5, 1.5, f64::NAN] {
        let options = EngineOptions { cache: CacheSize::FreeFraction(fraction), ..plain() };
        says(try_start(options), &["--kv-cache-free-mem-fraction", &fraction.to_string()]);
    }
    let contiguous = rebuilt(&model, |b| b.paged_kv_cache = false);
    says(Engine::start(cpu(), &contiguous, EngineOptions { prefix_reuse: true, ..plain() }), &["paged"]);
    let lowered = try_start(EngineOptions { max_num_tokens: Some(4), chunked_context: false, ..plain() }).unwrap();
    assert_eq!(lowered.info().limits.runtime, (4, 4));
    assert_eq!(lowered.info().limits.built, (8, 128));
    assert_eq!(lowered.info().notes.len(), 1, "it says so: {:?}", lowered.info().notes);
}

// ---- How requests end ---------------------------------------------------------------------------------------------

/// A text of the fixture, and an index whose token has not occurred before it.
fn text_with_a_turn(model: &LoadedModel) -> (Vec<u32>, usize) {
    let heard = run(cpu(), model, EngineOptions::default(), vec![greedy(1, prompt(10), 40)]);
    let text = heard.tokens[&1].clone();
    let turn = (5..text.len()).find(|&i| !text[..i].contains(&text[i])).expect("a lively text");
    (text, turn)
}

#[test]
fn stop_ids_end_of_sequence_and_lengths_end_a_request() {
    let model = load("llama", build(DType::F32));
    let (text, turn) = text_with_a_turn(&model);
    let ender = text[turn];
    let params = |change: fn(&mut SamplingParams, u32)| {
        let mut params = SamplingParams { max_tokens: 40, ..SamplingParams::default() };
        change(&mut params, ender);
        params
    };
    let cut = &text[..=turn];
    // (eos id of the engine, parameters, text, reason)
    let cases = [
        (None, params(|_, _| ()), &text[..], FinishReason::Length),
        (None, params(|p, id| p.stop_ids = vec![63, id]), cut, FinishReason::Stop),
        (Some(ender), params(|_, _| ()), cut, FinishReason::Eos),
        (Some(ender), params(|p, _| p.ignore_eos = true), &text[..], FinishReason::Length),
        (Some(ender), params(|p, id| (p.stop_ids, p.ignore_eos) = (vec![id], true)), cut, FinishReason::Stop),
        (Some(ender), params(|p, id| p.stop_ids = vec![id]), cut, FinishReason::Stop),
        (None, params(|p, _| p.max_tokens = 1), &text[..1], FinishReason::Length),
        (None, params(|p, _| p.max_tokens = 7), &text[..7], FinishReason::Length),
    ];
    for (index, (eos, params, expected, reason)) in cases.into_iter().enumerate() {
        let options = EngineOptions { eos_ids: eos.into_iter().collect(), ..EngineOptions::default() };
        let request = Request::new(9, prompt(10), params.clone());
        let heard = run(cpu(), &model, options, vec![request]);
        assert_eq!(heard.tokens[&9], expected, "case {index}: {params:?}");
        assert_eq!(heard.finished[&9].reason, reason, "case {index}: {params:?}");
    }
    // On the last allowed token both reasons hold: what the token means wins.
    let params = SamplingParams { max_tokens: turn as u32 + 1, stop_ids: vec![ender], ..SamplingParams::default() };
    let heard = run(cpu(), &model, EngineOptions::default(), vec![Request::new(9, prompt(10), params)]);
    assert_eq!((&heard.tokens[&9][..], heard.finished[&9].reason), (cut, FinishReason::Stop));
}

#[test]
fn enders_are_not_drawn_before_the_least_number_of_tokens() {
    let model = load("llama", build(DType::F32));
    let (text, turn) = text_with_a_turn(&model);
    let ender = text[turn];
    for temperature in [0.0, 1.0] {
        for (eos_ids, stop_ids) in [(vec![ender], vec![]), (vec![], vec![ender]), (vec![4, 5, 6], vec![ender, 7])] {
            let params = SamplingParams {
                max_tokens: 40,
                min_tokens: 30,
                temperature,
                stop_ids: stop_ids.clone(),
                ..SamplingParams::default()
            };
            let options = EngineOptions { eos_ids: eos_ids.clone(), ..EngineOptions::default() };
            let heard = run(cpu(), &model, options, vec![Request::new(1, prompt(10), params)]);
            let tokens = &heard.tokens[&1];
            assert!(tokens.len() > 30 && tokens.len() <= 40);
            let early = &tokens[..30];
            assert!(early.iter().all(|t| !eos_ids.contains(t) && !stop_ids.contains(t)), "{early:?}");
            if temperature == 0.0 && eos_ids.len() + stop_ids.len() == 1 {
                assert_eq!(tokens[..turn], text[..turn], "up to there nothing changes");
                assert_ne!(tokens[turn], ender);
            }
        }
    }
}

#[test]
fn times_of_a_request_are_in_order() {
    let model = load("llama", build(DType::F32));
    let requests = (0..6).map(|id| greedy(id, prompt(20 + id as usize), 10)).collect();
    let options = EngineOptions { max_batch_size: Some(2), ..EngineOptions::default() };
    let heard = run(cpu(), &model, options, requests);
    for (id, finish) in &heard.finished {
        let events: Vec<_> = heard.all.iter().flat_map(|o| &o.tokens).filter(|t| t.request == *id).collect();
        let scheduled = finish.first_scheduled_ns.unwrap();
        assert!(finish.queued_ns <= scheduled && scheduled <= events[0].time_ns);
        assert!(events.windows(2).all(|w| w[0].time_ns < w[1].time_ns && w[0].iteration + 1 == w[1].iteration));
        assert_eq!(finish.iterations.unwrap(), (events[0].iteration, events[9].iteration), "a prompt of one step");
        assert_eq!((finish.pauses, finish.reused_tokens), (0, 0));
    }
}

// ---- Measurement --------------------------------------------------------------------------------------------------

#[test]
fn every_measurement_counts_from_zero() {
    let model = load("llama", build(DType::F32));
    let engine = start(&model, EngineOptions::default());
    let mut outbox = Outbox::default();
    // Warm-up: tokens and ends are told, iterations are not kept.
    engine.submit([greedy(1, prompt(9), 5)]);
    let mut warm = Heard::default();
    listen_until(&engine, &mut warm, |h| h.ended() == 1);
    assert_eq!(warm.tokens[&1].len(), 5);
    for round in 0..3 {
        engine.begin_measurement(Vec::new());
        engine.submit([greedy(10 + round, prompt(9), 5 + round as u32)]);
        let mut heard = Heard::default();
        // The record of an iteration follows its tokens; look until all are there.
        listen_until(&engine, &mut heard, |h| h.ended() == 1 && h.records().count() == 5 + round as usize);
        let numbers: Vec<_> = heard.records().map(|r| r.iter).collect();
        assert_eq!(numbers, (0..5 + round).collect::<Vec<_>>(), "round {round}");
        assert_eq!(heard.finished[&(10 + round)].iterations, Some((0, 4 + round)));
    }
    assert!(warm.records().next().is_none());
    assert!(engine.wait(&mut outbox, Duration::ZERO));
    assert!(outbox.iterations.is_empty() && outbox.tokens.is_empty());
}

#[test]
fn a_request_that_outlives_a_measurement_counts_in_the_new_one() {
    let model = long_model();
    let engine = start(&model, EngineOptions::default());
    engine.begin_measurement(Vec::new());
    let mut heard = Heard::default();
    engine.submit([greedy(1, prompt(9), 1500)]);
    listen_until(&engine, &mut heard, |h| h.records().count() > 20);
    engine.begin_measurement(Vec::new());
    listen_until(&engine, &mut heard, |h| h.ended() == 1);
    heard.take(engine.shutdown().unwrap());
    let numbers: Vec<_> = heard.records().map(|r| r.iter).collect();
    let restart = numbers.iter().rposition(|&n| n == 0).unwrap();
    assert!(restart > 20);
    assert!(numbers[..restart].iter().copied().eq(0..restart as u64));
    // What was not heard of the old one by then is not told any more.
    let counted = (numbers.len() - restart) as u64;
    assert!((1..=1500 - restart as u64).contains(&counted));
    assert!(numbers[restart..].iter().copied().eq(0..counted));
    assert_eq!(heard.finished[&1].iterations, Some((0, counted - 1)));
}

// ---- The engine's own end -----------------------------------------------------------------------------------------

/// Do it on another thread and fail, instead of hanging, when it does not end.
fn ends(what: &str, action: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        action();
        let _ = done.send(());
    });
    assert!(ended.recv_timeout(PATIENCE).is_ok(), "{what} does not end");
}

#[test]
fn an_engine_ends_when_it_is_dropped_or_shut_down() {
    let model = long_model();
    let idle = start(&model, EngineOptions::default());
    ends("dropping an idle engine", move || drop(idle));

    let busy = start(&model, EngineOptions::default());
    busy.submit([greedy(1, prompt(40), 2000), greedy(2, prompt(40), 2000)]);
    listen_until(&busy, &mut Heard::default(), |h| !h.tokens.is_empty());
    ends("dropping a busy engine", move || drop(busy));

    let unheard = start(&model, EngineOptions::default());
    unheard.submit([greedy(1, prompt(40), 2000)]);
    ends("dropping an engine that nobody listened to", move || drop(unheard));

    let stopped = start(&model, EngineOptions::default());
    stopped.begin_measurement(Vec::new());
    stopped.submit([greedy(1, prompt(40), 2000)]);
    listen_until(&stopped, &mut Heard::default(), |h| !h.tokens.is_empty());
    ends("shutting a busy engine down", move || {
        let rest = stopped.shutdown().unwrap();
        assert!(rest.finished.is_empty(), "the request has not ended");
    });
}
