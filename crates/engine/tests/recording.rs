//! What is told of iterations: records of all of them, and the ops of those inside profile windows.

mod common;

use std::collections::BTreeMap;

use common::{Heard, build, greedy, listen_until, load, run_windows};
use strobe_engine::recorder::Recording;
use strobe_engine::window::{Window, parse_windows};
use strobe_engine::{
    BuildConfig, CacheSize, Engine, EngineInfo, EngineOptions, FinishReason, IterationRecord, LoadedModel, Policy,
    Request,
};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;
use strobe_model::program::{OpKind, Rows};

fn cpu() -> Cpu {
    Cpu::new(Tier::detect(), 2)
}

/// Prompts and outputs of mixed lengths for `llama`.
fn requests() -> Vec<Request> {
    let mut random = common::Random(4);
    let request = |(id, (prompt, output))| greedy(id, random.tokens(prompt, 64), output);
    (0..).zip([(64, 3), (30, 12), (5, 20), (1, 1), (17, 16), (40, 8)]).map(request).collect()
}

const PROMPT_TOKENS: u32 = 64 + 30 + 5 + 1 + 17 + 40;
const OUTPUT_TOKENS: u32 = 3 + 12 + 20 + 1 + 16 + 8;

fn chunked() -> EngineOptions {
    EngineOptions { max_num_tokens: Some(40), max_batch_size: Some(4), ..EngineOptions::default() }
}

fn small_blocks(context_fmha: bool) -> LoadedModel {
    load("llama", BuildConfig { tokens_per_block: 4, context_fmha, ..build(DType::F32) })
}

fn info(model: &LoadedModel, options: EngineOptions) -> EngineInfo {
    Engine::start(cpu(), model, options).unwrap().info().clone()
}

// ---- Windows ------------------------------------------------------------------------------------------------------

fn iterations(recording: &Recording) -> Vec<u64> {
    recording.steps.iter().map(|s| s.iteration).collect()
}

#[test]
fn exactly_the_iterations_asked_for_are_recorded() {
    let model = small_blocks(true);
    for spec in ["0", "3", "2-4", "0-5", "1-2,5-6", "1,2,3", "0-1,2-4,9", ""] {
        let windows = parse_windows(spec).unwrap();
        let heard = run_windows(cpu(), &model, chunked(), requests(), spec);
        let recordings: Vec<_> = heard.recordings().collect();
        assert_eq!(recordings.len(), windows.len(), "{spec}");
        for (index, (recording, window)) in recordings.iter().zip(&windows).enumerate() {
            assert_eq!((recording.index, recording.window, recording.complete), (index, *window, true), "{spec}");
            assert_eq!(iterations(recording), (window.first..=window.last).collect::<Vec<_>>(), "{spec}");
        }
        let inside = |iter: u64| windows.iter().any(|w| (w.first..=w.last).contains(&iter));
        for record in heard.records() {
            assert_eq!(record.profiled, inside(record.iter), "{spec}: iteration {}", record.iter);
        }
        assert!(heard.all.iter().all(|o| o.unreached.is_empty()), "{spec}");
    }
}

#[test]
fn a_window_cut_short_is_incomplete_and_later_ones_are_named() {
    let model = small_blocks(true);
    let heard = run_windows(cpu(), &model, chunked(), requests(), "2-3,5-1000,2000,3000-4000");
    let recordings: Vec<_> = heard.recordings().collect();
    assert_eq!(recordings.len(), 2);
    assert!(recordings[0].complete && !recordings[1].complete);
    let last = heard.records().map(|r| r.iter).max().unwrap();
    assert_eq!(iterations(recordings[1]), (5..=last).collect::<Vec<_>>());
    let unreached: Vec<_> = heard.all.iter().flat_map(|o| &o.unreached).copied().collect();
    assert_eq!(unreached, [Window { first: 2000, last: 2000 }, Window { first: 3000, last: 4000 }]);
}

#[test]
fn a_new_measurement_closes_the_windows_of_the_old_one() {
    let model = small_blocks(true);
    let engine = Engine::start(cpu(), &model, chunked()).unwrap();
    let mut heard = Heard::default();
    engine.begin_measurement(parse_windows("1-999,1000").unwrap());
    engine.submit(requests());
    listen_until(&engine, &mut heard, |h| h.ended() == 6);
    engine.begin_measurement(parse_windows("2").unwrap());
    let again = requests().into_iter().map(|r| Request { id: r.id + 100, ..r });
    engine.submit(again);
    listen_until(&engine, &mut heard, |h| h.ended() == 12);
    heard.take(engine.shutdown().unwrap());
    let recordings: Vec<_> = heard.recordings().collect();
    assert_eq!(recordings.iter().map(|r| r.complete).collect::<Vec<_>>(), [false, true]);
    assert_eq!(iterations(recordings[1]), [2]);
    let unreached: Vec<_> = heard.all.iter().flat_map(|o| &o.unreached).map(|w| w.first).collect();
    assert_eq!(unreached, [1000]);
}

/// Whether an op has work in a step, by what the step's event says.
fn has_rows(kind: &OpKind, context: u32, generation: u32, sampled: u32) -> bool {
    match kind {
        OpKind::AttnScores | OpKind::AttnSoftmax { .. } | OpKind::AttnValues => context > 0,
        OpKind::Attention { rows: Rows::Context, .. } => context > 0,
        OpKind::Attention { rows: Rows::Generation, .. } => generation > 0,
        OpKind::Gather | OpKind::Sample => sampled > 0,
        OpKind::Linear { x: strobe_model::program::Buf::Sampled, .. } => sampled > 0,
        _ => true,
    }
}

#[test]
fn every_op_with_rows_is_recorded_inside_its_iteration() {
    for context_fmha in [true, false] {
        let model = small_blocks(context_fmha);
        let info = info(&model, chunked());
        assert_eq!(info.program.len(), info.kernels.len());
        let heard = run_windows(cpu(), &model, chunked(), requests(), "0-1000");
        let recording = heard.recordings().next().unwrap();
        let records: BTreeMap<u64, &IterationRecord> = heard.records().map(|r| (r.iter, r)).collect();
        assert_eq!(recording.steps.len(), records.len());
        let (mut without_sample, mut without_context) = (0, 0);
        for step in &recording.steps {
            let record = records[&step.iteration];
            assert_eq!(step.times, record.times);
            assert_eq!(step.context_requests, record.context_requests);
            assert_eq!(step.generation_requests, record.generation_requests);
            assert_eq!(
                (step.context_tokens, step.generation_tokens),
                (record.context_tokens, record.generation_requests)
            );
            let (context, generation, sampled) = (record.context_tokens, record.generation_requests, record.new_tokens);
            without_sample += u32::from(sampled == 0);
            without_context += u32::from(context == 0);

            let ops: Vec<_> = recording.ops.iter().filter(|o| o.iteration == step.iteration).collect();
            let wanted =
                info.program.iter().enumerate().filter(|(_, n)| has_rows(&n.kind, context, generation, sampled));
            let wanted: Vec<_> = wanted.map(|(index, _)| index as u32).collect();
            assert_eq!(ops.iter().map(|o| o.node).collect::<Vec<_>>(), wanted, "iteration {}", step.iteration);

            let mut before = step.times.prepared;
            for op in ops {
                let node = &info.program[op.node as usize];
                assert!(before <= op.start && op.start <= op.end, "{} overlaps its neighbour", node.name);
                before = op.end;
                let (from, to) = match node.kind {
                    OpKind::Sample => (step.times.forwarded, step.times.sampled),
                    _ => (step.times.prepared, step.times.forwarded),
                };
                assert!(from <= op.start && op.end <= to, "{} lies outside of its phase", node.name);
                assert!(op.cost.bytes > 0, "{} costs nothing", node.name);
                if node.name == "qkv_proj" {
                    assert_eq!(op.cost.shape[0], u64::from(context + generation));
                } else if node.name == "lm_head" {
                    assert_eq!(op.cost.shape, [u64::from(sampled), 64, 32]);
                }
            }
        }
        assert!(without_sample > 0 && without_context > 0, "both kinds of steps must have occurred");
    }
}

#[test]
fn the_probe_records_every_second_iteration_and_tells_nothing() {
    let model = small_blocks(true);
    let options = EngineOptions { probe_recorder: true, ..chunked() };
    let heard = run_windows(cpu(), &model, options, requests(), "");
    assert!(heard.records().count() > 10);
    assert!(heard.records().all(|r| r.profiled == (r.iter % 2 == 1)));
    assert_eq!(heard.recordings().count(), 0);
}

// ---- Records ------------------------------------------------------------------------------------------------------

/// What must hold of the records of any run of [`requests`] that reused nothing.
fn check_records(heard: &Heard, blocks: u32, batch: u32, tokens: u32) {
    let records: Vec<_> = heard.records().collect();
    let sum = |field: fn(&IterationRecord) -> u32| records.iter().map(|r| field(r)).sum::<u32>();
    assert!(records.iter().map(|r| r.iter).eq(0..records.len() as u64), "numbers without gaps");
    assert_eq!(sum(|r| r.new_tokens), OUTPUT_TOKENS);
    assert_eq!(sum(|r| r.completed), 6);
    assert_eq!(sum(|r| r.new_active), 6);
    assert_eq!(sum(|r| r.paused), heard.finished.values().map(|f| f.pauses).sum::<u32>());
    // Every position but each last token's is computed once, and whatever is computed again is called so.
    let computed = sum(|r| r.context_tokens + r.generation_requests) - sum(|r| r.recomputed_tokens);
    assert_eq!(computed, PROMPT_TOKENS + OUTPUT_TOKENS - 6);
    if sum(|r| r.paused) == 0 {
        assert_eq!(sum(|r| r.context_tokens), PROMPT_TOKENS);
        assert_eq!(sum(|r| r.recomputed_tokens), 0);
    }
    let mut produced: BTreeMap<u64, u32> = BTreeMap::new();
    for event in heard.all.iter().flat_map(|o| &o.tokens) {
        *produced.entry(event.iteration).or_default() += 1;
    }
    let mut end = 0;
    for r in &records {
        let t = r.times;
        assert!(end <= t.start, "iteration {} begins before the last one ends", r.iter);
        let stamps = [t.start, t.scheduled, t.prepared, t.forwarded, t.sampled, t.end];
        assert!(stamps.is_sorted(), "iteration {}: {t:?}", r.iter);
        end = t.end;
        assert_eq!(r.kv_used + r.kv_free, blocks);
        assert!(r.context_requests + r.generation_requests <= r.active && r.active <= batch);
        assert!((1..=tokens).contains(&(r.context_tokens + r.generation_requests)));
        assert!(r.new_tokens >= r.generation_requests && r.new_tokens <= r.context_requests + r.generation_requests);
        assert_eq!(r.new_tokens, produced.get(&r.iter).copied().unwrap_or(0), "iteration {}", r.iter);
        assert_eq!(r.pool.allocated_new, r.pool.allocated_total);
        assert!(r.work.flops > 0 && r.work.bytes > 0);
        assert_eq!(r.wall_ns(), t.end - t.start);
        assert!(r.compute_ns() <= r.wall_ns());
    }
    assert!(records.windows(2).all(|w| w[0].pool.allocated_total <= w[1].pool.allocated_total));
    assert!(heard.finished.values().all(|f| f.reason == FinishReason::Length));
}

#[test]
fn records_agree_with_what_was_asked_for() {
    let model = small_blocks(true);
    for policy in Policy::ALL {
        let options = EngineOptions { policy, ..chunked() };
        let blocks = info(&model, options.clone()).limits.kv_blocks as u32;
        check_records(&run_windows(cpu(), &model, options, requests(), ""), blocks, 4, 40);
        // A cache in which requests have to wait, or to pause.
        let options = EngineOptions { policy, cache: CacheSize::Blocks(17), ..chunked() };
        let heard = run_windows(cpu(), &model, options, requests(), "");
        check_records(&heard, 17, 4, 40);
        let paused = heard.records().map(|r| r.paused).sum::<u32>();
        assert_eq!(paused > 0, policy == Policy::MaxUtilization, "{}", policy.name());
        let first = heard.records().next().unwrap();
        assert_eq!(first.active + first.queued, 6, "all six arrived in the same instant");
    }
}

#[test]
fn reused_tokens_are_counted_and_not_computed() {
    let model = small_blocks(true);
    let options = EngineOptions { prefix_reuse: true, max_batch_size: Some(1), ..chunked() };
    let twice = requests().into_iter().flat_map(|r| [Request { id: r.id + 100, ..r.clone() }, r]).collect();
    let heard = run_windows(cpu(), &model, options, twice, "");
    let reused: u32 = heard.finished.values().map(|f| f.reused_tokens).sum();
    // Full blocks of 4 of the second of each pair, the last token never counted: 60 + 28 + 4 + 0 + 16 + 36.
    assert_eq!(reused, 60 + 28 + 4 + 16 + 36);
    assert_eq!(heard.records().map(|r| r.context_tokens).sum::<u32>(), 2 * PROMPT_TOKENS - reused);
    let last = heard.records().last().unwrap();
    assert_eq!(last.pool.reused, u64::from(reused / 4));
    assert_eq!(last.pool.allocated_total, last.pool.allocated_new + last.pool.reused);
}
