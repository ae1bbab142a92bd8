//! What a request gets does not depend on what else runs, nor on how it is run: batching, chunking, paging, block
//! size, threads, reuse, pauses and recording change no bit.

mod common;

use std::collections::BTreeMap;

use common::stepper::{Span, Stepper};
use common::{Heard, Random, assert_same_bits, build, load, rebuilt};
use strobe_engine::scheduler::{Entry, Item, Phase, Reason};
use strobe_engine::step::{StepInputs, StepLimits};
use strobe_engine::{
    BuildConfig, CacheSize, Engine, EngineOptions, KvCacheType, LoadedModel, Policy, Quantization, Request,
    SamplingParams,
};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;

/// Every dtype, attention, GEMM and quantization of a model.
fn combinations(name: &'static str) -> impl Iterator<Item = (String, LoadedModel)> {
    let mut builds = Vec::new();
    for context_fmha in [true, false] {
        for dtype in [DType::F32, DType::Bf16] {
            for gemm_plugin in [true, false] {
                builds.push(BuildConfig { context_fmha, gemm_plugin, ..build(dtype) });
            }
        }
        for quantization in [Quantization::Int8, Quantization::Int4] {
            let kv_cache = if context_fmha { KvCacheType::Int8 } else { KvCacheType::Auto };
            builds.push(BuildConfig { context_fmha, quantization, kv_cache, ..build(DType::Bf16) });
        }
    }
    builds.into_iter().map(move |build| {
        let BuildConfig { dtype, context_fmha, gemm_plugin, quantization, .. } = build;
        let quantization = quantization.name();
        let what = format!("{name} {dtype} fmha {context_fmha} plugin {gemm_plugin} quantization {quantization}");
        (what, load(name, build))
    })
}

// ---- Logits, bit by bit, under random schedules -------------------------------------------------------------------

/// A text, where its prompt ends, and the cache blocks it lives in.
struct Sequence {
    text: Vec<u32>,
    prompt: usize,
    blocks: Vec<u32>,
}

/// Logits of every position of `sequence`, computed alone: the prompt at once, then token by token.
fn alone(tier: Tier, model: &LoadedModel, sequence: &Sequence) -> Vec<Vec<f32>> {
    let per_block = model.config.build.cache_block_tokens();
    let blocks: Vec<u32> = (0..sequence.text.len().div_ceil(per_block) as u32).collect();
    let kv = model.config.build.cpu_kv_type(tier).unwrap();
    let mut stepper = Stepper::new(Cpu::new(tier, 1), model, kv, sequence.prompt, blocks.len());
    let (prompt, rest) = sequence.text.split_at(sequence.prompt);
    let mut rows = stepper.step(&[Span { tokens: prompt, start: 0, blocks: &blocks, context: true }]).remove(0);
    for (index, token) in rest.iter().enumerate() {
        let start = sequence.prompt + index;
        let span = Span { tokens: std::slice::from_ref(token), start, blocks: &blocks, context: false };
        rows.append(&mut stepper.step(&[span])[0]);
    }
    rows
}

/// Hand out shuffled blocks to the sequences; returns how many there are.
fn place(sequences: &mut [Sequence], per_block: usize, random: &mut Random) -> usize {
    let needed: Vec<usize> = sequences.iter().map(|s| s.text.len().div_ceil(per_block)).collect();
    let total: usize = needed.iter().sum::<usize>() + 2;
    let mut free: Vec<u32> = (0..total as u32).collect();
    for last in (1..free.len()).rev() {
        free.swap(last, random.below(last + 1));
    }
    for (sequence, needed) in sequences.iter_mut().zip(needed) {
        sequence.blocks = free.split_off(free.len() - needed);
    }
    total
}

/// Run all sequences together in random chunks and compare every row.
fn random_schedule(
    tier: Tier,
    model: &LoadedModel,
    sequences: &mut [Sequence],
    expected: &[Vec<Vec<f32>>],
    seed: u64,
    what: &str,
) {
    let mut random = Random(seed);
    let blocks = place(sequences, model.config.build.cache_block_tokens(), &mut random);
    let most: usize = sequences.iter().map(|s| s.text.len()).sum();
    let cpu = Cpu::new(tier, 1 + random.below(3));
    let mut stepper = Stepper::new(cpu, model, model.config.build.cpu_kv_type(tier).unwrap(), most, blocks);
    let mut done = vec![0; sequences.len()];
    while sequences.iter().zip(&done).any(|(s, &d)| d < s.text.len()) {
        // What each sequence does in this step: nothing, a piece of its prompt, or one generated token.
        let mut parts = Vec::new();
        for (index, sequence) in sequences.iter().enumerate() {
            let start = done[index];
            let context = start < sequence.prompt;
            let left = if context { sequence.prompt - start } else { usize::from(start < sequence.text.len()) };
            let len = match random.below(4) {
                0 => 0,
                1 => left.min(1),
                2 => left.min(1 + random.below(20)),
                _ => left,
            };
            if len > 0 {
                parts.push((!context, index, start, len));
            }
        }
        parts.sort_unstable();
        let span = |&(generates, index, start, len): &(bool, usize, usize, usize)| Span {
            tokens: &sequences[index].text[start..start + len],
            start,
            blocks: &sequences[index].blocks,
            context: !generates,
        };
        let spans: Vec<_> = parts.iter().map(span).collect();
        for (rows, &(_, index, start, len)) in stepper.step(&spans).iter().zip(&parts) {
            for (offset, row) in rows.iter().enumerate() {
                let at = format!("{what}: sequence {index}, position {} of {start}+{len}", start + offset);
                assert_same_bits(row, &expected[index][start + offset], &at);
            }
            done[index] = start + len;
        }
    }
}

#[test]
fn logits_are_the_same_to_the_last_bit_in_any_company() {
    for name in ["llama", "mistral-window", "qwen3", "llama3-rope-tied", "micro", "deepseek-v3", "gpt-oss"] {
        for (what, model) in combinations(name) {
            let mut random = Random(5);
            let vocab = model.config.model.vocab_size;
            let mut sequences: Vec<Sequence> = [(100, 90), (5, 1), (37, 36), (128, 127), (70, 40)]
                .map(|(length, prompt)| Sequence { text: random.tokens(length, vocab), prompt, blocks: Vec::new() })
                .into();
            for tier in Tier::available() {
                if name == "micro" && tier == Tier::Scalar {
                    continue; // the same code as on the small models, and slow
                }
                let expected: Vec<_> = sequences.iter().map(|s| alone(tier, &model, s)).collect();
                for (seed, (tokens_per_block, paged_kv_cache)) in
                    [(16, true), (1, true), (64, true), (32, false)].into_iter().enumerate()
                {
                    let change =
                        |b: &mut BuildConfig| *b = BuildConfig { tokens_per_block, paged_kv_cache, ..b.clone() };
                    let what = format!("{what} {tier:?} block {tokens_per_block} paged {paged_kv_cache}");
                    let model = rebuilt(&model, change);
                    random_schedule(tier, &model, &mut sequences, &expected, 31 + seed as u64, &what);
                }
            }
        }
    }
}

// ---- Tokens, through the whole engine -----------------------------------------------------------------------------

/// Requests of mixed lengths; every second one draws its tokens with a seed of its own.
fn requests(vocab: usize, base: u64) -> Vec<Request> {
    let mut random = Random(77);
    [(40, 20), (3, 30), (70, 10), (17, 24), (33, 8), (9, 16), (64, 12)]
        .into_iter()
        .enumerate()
        .map(|(index, (prompt, output))| {
            let drawn = index % 2 == 1;
            let params = SamplingParams {
                temperature: if drawn { 1.0 } else { 0.0 },
                top_k: if index % 4 == 1 { 20 } else { 0 },
                top_p: if drawn { 0.9 } else { 1.0 },
                seed: index as u64,
                max_tokens: output,
                ..SamplingParams::default()
            };
            Request::new(base + index as u64, random.tokens(prompt, vocab), params)
        })
        .collect()
}

/// One way to run the same requests.
struct Way {
    name: &'static str,
    build: fn(&mut BuildConfig),
    options: EngineOptions,
    threads: usize,
    windows: &'static str,
    /// That the way was really taken.
    proof: fn(&Heard) -> bool,
}

fn decided(heard: &Heard, wanted: fn(&Reason) -> bool) -> bool {
    heard.all.iter().flat_map(|o| &o.decisions).any(|d| wanted(&d.reason))
}

fn ways() -> Vec<Way> {
    let plain = || Way {
        name: "batched",
        build: |_| (),
        options: EngineOptions::default(),
        threads: 1,
        windows: "",
        proof: |heard| heard.records().any(|r| r.context_requests + r.generation_requests > 3),
    };
    let options = EngineOptions::default;
    vec![
        plain(),
        Way { name: "two threads", threads: 2, ..plain() },
        Way { name: "three threads", threads: 3, ..plain() },
        Way {
            name: "chunked",
            build: |b| b.tokens_per_block = 4,
            options: EngineOptions { max_num_tokens: Some(14), ..options() },
            proof: |heard| decided(heard, |r| matches!(r, Reason::Chunked { .. })),
            ..plain()
        },
        Way {
            name: "not chunked",
            options: EngineOptions { chunked_context: false, max_num_tokens: Some(72), ..options() },
            proof: |heard| decided(heard, |r| *r == Reason::TokenBudget),
            ..plain()
        },
        Way { name: "contiguous cache", build: |b| b.paged_kv_cache = false, threads: 2, ..plain() },
        Way { name: "blocks of 32", build: |b| b.tokens_per_block = 32, ..plain() },
        Way { name: "blocks of 64", build: |b| b.tokens_per_block = 64, ..plain() },
        Way {
            name: "paused and recomputed",
            build: |b| b.tokens_per_block = 4,
            options: EngineOptions {
                policy: Policy::MaxUtilization,
                cache: CacheSize::Blocks(26),
                max_num_tokens: Some(48),
                ..options()
            },
            proof: |heard| {
                heard.finished.values().any(|f| f.pauses > 0) && heard.records().any(|r| r.recomputed_tokens > 0)
            },
            ..plain()
        },
        Way {
            name: "static batch",
            options: EngineOptions { policy: Policy::StaticBatch, max_batch_size: Some(3), ..options() },
            proof: |heard| decided(heard, |r| *r == Reason::StaticBatchRunning),
            ..plain()
        },
        Way {
            name: "few blocks",
            options: EngineOptions { cache: CacheSize::Blocks(9), ..options() },
            proof: |heard| decided(heard, |r| matches!(r, Reason::KvCapacity { .. })),
            ..plain()
        },
        Way {
            name: "recorded",
            windows: "0-3,5,8-12",
            threads: 2,
            proof: |heard| heard.recordings().count() == 3,
            ..plain()
        },
        Way {
            name: "probed",
            options: EngineOptions { probe_recorder: true, ..options() },
            proof: |heard| heard.records().any(|r| r.profiled),
            ..plain()
        },
    ]
}

fn tokens_alone(tier: Tier, model: &LoadedModel, requests: &[Request]) -> BTreeMap<u64, Vec<u32>> {
    requests
        .iter()
        .map(|request| {
            let heard = common::run(Cpu::new(tier, 1), model, EngineOptions::default(), vec![request.clone()]);
            (request.id, heard.tokens[&request.id].clone())
        })
        .collect()
}

#[test]
fn tokens_are_the_same_however_the_engine_runs() {
    for name in ["llama", "mistral-window", "micro"] {
        for (what, model) in combinations(name) {
            let tier = Tier::detect();
            let requests = requests(model.config.model.vocab_size, 0);
            let expected = tokens_alone(tier, &model, &requests);
            for request in &requests {
                assert_eq!(expected[&request.id].len(), request.params.max_tokens as usize, "{what}");
            }
            for way in ways() {
                let model = rebuilt(&model, way.build);
                let cpu = Cpu::new(tier, way.threads);
                let heard = common::run_windows(cpu, &model, way.options, requests.clone(), way.windows);
                assert!((way.proof)(&heard), "{what}: `{}` was not what happened", way.name);
                assert_eq!(heard.tokens, expected, "{what}: {}", way.name);
            }
        }
    }
}

#[test]
fn tokens_are_the_same_with_and_without_reuse() {
    for name in ["llama", "mistral-window", "micro"] {
        for (what, model) in combinations(name) {
            let tier = Tier::detect();
            let vocab = model.config.model.vocab_size;
            let expected = tokens_alone(tier, &model, &requests(vocab, 0));
            for (prefix_reuse, policy, blocks) in [
                (true, Policy::GuaranteedNoEvict, 64),
                (false, Policy::GuaranteedNoEvict, 64),
                (true, Policy::MaxUtilization, 9),
            ] {
                let options = EngineOptions {
                    prefix_reuse,
                    policy,
                    cache: CacheSize::Blocks(blocks),
                    ..EngineOptions::default()
                };
                let engine = Engine::start(Cpu::new(tier, 2), &model, options).unwrap();
                engine.begin_measurement(Vec::new());
                let mut heard = Heard::default();
                // Again while the first are running, and again when all have ended.
                engine.submit(requests(vocab, 0));
                engine.submit(requests(vocab, 100));
                common::listen_until(&engine, &mut heard, |h| h.ended() == 14);
                engine.submit(requests(vocab, 200));
                common::listen_until(&engine, &mut heard, |h| h.ended() == 21);
                heard.take(engine.shutdown().unwrap());
                for (id, tokens) in &heard.tokens {
                    assert_eq!(
                        tokens,
                        &expected[&(id % 100)],
                        "{what}: request {id}, reuse {prefix_reuse}, {}",
                        policy.name()
                    );
                }
                let reused: u32 = heard.finished.values().map(|f| f.reused_tokens).sum();
                if blocks == 64 {
                    assert_eq!(reused > 0, prefix_reuse, "{what}: {reused} tokens reused");
                }
            }
        }
    }
}

/// The texts must be able to tell a change. (Greedy texts of random weights tend to go in circles; drawn ones do not.)
#[test]
fn the_texts_are_lively_enough_to_tell() {
    for name in ["llama", "mistral-window", "micro", "mixtral"] {
        let model = load(name, build(DType::F32));
        let requests = requests(model.config.model.vocab_size, 0);
        let texts = tokens_alone(Tier::detect(), &model, &requests);
        for request in requests.iter().filter(|r| name != "micro" || !r.params.draw(0).is_greedy()) {
            let text = &texts[&request.id];
            let distinct: std::collections::BTreeSet<_> = text.iter().collect();
            assert!(distinct.len() * 3 >= text.len(), "{name}: request {} says {text:?}", request.id);
        }
    }
}

/// Recomputing prompt and output in one step, as after a pause, gives every position the bits that it had before.
#[test]
fn recomputed_output_has_the_same_bits() {
    const PROMPT: usize = 30;
    for name in ["llama", "mistral-window", "qwen3", "micro"] {
        for (what, model) in combinations(name) {
            let text = Random(9).tokens(120, model.config.model.vocab_size);
            let blocks: Vec<u32> = (0..8).collect();
            for tier in Tier::available().into_iter().filter(|&t| name != "micro" || t != Tier::Scalar) {
                let sequence = Sequence { text: text.clone(), prompt: PROMPT, blocks: Vec::new() };
                let generated = alone(tier, &model, &sequence);
                let mut stepper =
                    Stepper::new(Cpu::new(tier, 2), &model, model.config.build.cpu_kv_type(tier).unwrap(), 120, 8);
                let recomputed = stepper.step(&[
                    Span { tokens: &text[..PROMPT], start: 0, blocks: &blocks, context: true },
                    Span { tokens: &text[PROMPT..], start: PROMPT, blocks: &blocks, context: false },
                ]);
                for (row, (again, first)) in recomputed.concat().iter().zip(&generated).enumerate() {
                    assert_same_bits(again, first, &format!("{what} {tier:?} row {row}"));
                }
            }
        }
    }
}

/// The engine's batches are made that way: output after a pause is a generation span behind all prompts.
#[test]
fn output_after_a_pause_runs_as_generation() {
    let entry = |id, prompt_len: usize, output: usize| {
        let mut entry = Entry::new(id, 0, vec![id as u32; prompt_len], 20, 16, 128);
        entry.tokens.extend(std::iter::repeat_n(60 + id as u32, output));
        entry.blocks = vec![id as u32; 2];
        entry
    };
    // Resumed whole; a fresh prompt; resumed in the middle of its output; generating.
    let running = [entry(1, 5, 3), entry(2, 4, 0), entry(3, 2, 6), entry(4, 3, 2)];
    let item = |running, start, len, phase, samples| Item { running, start, len, phase, samples };
    let items = [
        item(0, 0, 8, Phase::Context, true),
        item(1, 0, 4, Phase::Context, true),
        item(2, 4, 3, Phase::Context, false),
        item(3, 4, 1, Phase::Generation, true),
    ];
    let limits = StepLimits { tokens: 32, sampled: 4, requests: 4, positions: 128 };
    let mut inputs = StepInputs::new(limits, 16, strobe_model::program::Operands::plain(4, 4, 4));
    inputs.fill(&items, &running, |_| -1);
    assert_eq!(inputs.tokens, [1, 1, 1, 1, 1, 2, 2, 2, 2, 61, 61, 61, 63, 63, 63, 64]);
    assert_eq!(inputs.sampled, [11, 8, 15], "in the order of the items");
    assert_eq!(inputs.context_seqs, 2);
    let spans: Vec<_> = inputs.seqs.iter().map(|s| (s.q_start, s.q_len, s.kv_len)).collect();
    assert_eq!(spans, [(0, 5, 5), (5, 4, 4), (9, 3, 8), (12, 3, 7), (15, 1, 5)]);
}
