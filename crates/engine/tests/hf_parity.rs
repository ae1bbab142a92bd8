//! Logits against those that `transformers` computed for the same checkpoints, on every tier and with every build
//! option; and the tiers against each other on prompts longer than the fixtures'.

mod common;

use common::stepper::{Span, Stepper};
use common::{CASES, assert_same_bits, build, fixture, load, model_name, rebuilt, scratch};
use serde::Deserialize;
use strobe_engine::eval::{self, EvalLogits};
use strobe_engine::{BuildConfig, KvCacheType, LoadedModel, ModelRef, Quantization, engine_dir};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;
use strobe_stats::{PercentileRule, percentile, sorted};

#[derive(Deserialize)]
struct Golden {
    prompt: Vec<u32>,
    logits: Vec<Vec<f32>>,
    greedy: Vec<u32>,
    decode_logits: Vec<Vec<f32>>,
}

impl Golden {
    fn read(case: &str, file: &str) -> Golden {
        serde_json::from_slice(&std::fs::read(fixture(case).join(file)).unwrap()).unwrap()
    }

    /// Row `index` of prompt and decode together.
    fn rows(&self) -> impl Iterator<Item = &Vec<f32>> {
        self.logits.iter().chain(&self.decode_logits)
    }
}

/// A row as found and as expected.
type Pair<'a> = (&'a Vec<f32>, &'a Vec<f32>);

/// Largest magnitude of a row.
fn scale(row: &[f32]) -> f32 {
    row.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// Largest difference relative to the largest magnitude of the expected row.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = found.iter().zip(expected).fold(0.0f32, |m, (f, e)| m.max((f - e).abs()));
    assert!(found.iter().all(|v| v.is_finite()));
    largest / scale(expected)
}

/// By how much the best token of a row leads, relative to the row's scale.
fn lead(row: &[f32]) -> f32 {
    let mut sorted = row.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    (sorted[0] - sorted[1]) / scale(row)
}

/// Rows of `found` that answer the same text as `golden`, side by side. Ends where the greedy texts part, which they
/// may only do at a tie within `tolerance`.
fn comparable<'a>(found: &'a EvalLogits, golden: &'a Golden, tolerance: f32, what: &str) -> Vec<Pair<'a>> {
    assert_eq!(found.logits.len(), golden.logits.len(), "{what}");
    assert_eq!(found.greedy.len(), golden.greedy.len(), "{what}");
    let mut pairs: Vec<_> = found.logits.iter().zip(&golden.logits).collect();
    for (step, (&ours, &theirs)) in found.greedy.iter().zip(&golden.greedy).enumerate() {
        let before = golden.rows().nth(golden.logits.len() - 1 + step).unwrap();
        if ours != theirs {
            let lead = lead(before);
            assert!(lead <= 2.0 * tolerance, "{what}: step {step} chose {ours}, not {theirs}, which leads by {lead:e}");
            break;
        }
        pairs.push((&found.decode_logits[step], &golden.decode_logits[step]));
    }
    pairs
}

fn run(tier: Tier, threads: usize, model: &LoadedModel, golden: &Golden) -> EvalLogits {
    eval::logits(Cpu::new(tier, threads), model, &golden.prompt, golden.greedy.len()).unwrap()
}

fn worst(pairs: &[Pair]) -> f32 {
    pairs.iter().map(|(f, e)| difference(f, e)).fold(0.0, f32::max)
}

/// Every way to build the same weights: fused or not, small blocks or large, paged or not.
fn variants(model: &LoadedModel) -> Vec<(String, LoadedModel)> {
    let mut all = Vec::new();
    for context_fmha in [true, false] {
        for (tokens_per_block, paged_kv_cache) in [(1, true), (16, true), (32, true), (16, false)] {
            let variant =
                rebuilt(model, |b| *b = BuildConfig { context_fmha, tokens_per_block, paged_kv_cache, ..b.clone() });
            all.push((format!("fmha {context_fmha} block {tokens_per_block} paged {paged_kv_cache}"), variant));
        }
    }
    all
}

/// Whether a product rounds its rows too: those of bfloat16 pairs do, as other engines in bfloat16.
fn rounds_rows(tier: Tier, dtype: DType, gemm_plugin: bool) -> bool {
    tier.multiplies_pairs() && dtype == DType::Bf16 && gemm_plugin
}

/// All tiers and variants of `case` in `dtype` against golden.json.
fn check_case(case: &str, dtype: DType, tolerance: f32) {
    let golden = Golden::read(case, "golden.json");
    for gemm_plugin in [true, false] {
        let model = load(case, BuildConfig { gemm_plugin, ..build(dtype) });
        for (variant, model) in variants(&model) {
            for tier in Tier::available() {
                let what = format!("{case} {dtype} {tier:?} plugin {gemm_plugin} {variant}");
                let found = run(tier, 2, &model, &golden);
                let tie = if rounds_rows(tier, dtype, gemm_plugin) { 1e-2 } else { tolerance };
                let pairs = comparable(&found, &golden, tie, &what);
                if rounds_rows(tier, dtype, gemm_plugin) {
                    let off = if model.config.model.moe.is_some() { median_rms(&pairs) } else { relative_rms(&pairs) };
                    assert!(off <= 1e-2, "{what}: off by {off:e}");
                } else {
                    let worst = worst(&pairs);
                    assert!(worst <= tolerance, "{what}: off by {worst:e}");
                }
                assert!(pairs.len() > golden.prompt.len(), "{what}: no decode step could be compared");
            }
        }
    }
}

#[test]
fn float32_equals_transformers() {
    for (case, _) in CASES {
        check_case(case, DType::F32, 1e-4);
    }
}

/// 16-bit engines differ from float32 maths on the same weights only by their cache, which is float16, and where products
/// of bfloat16 pairs round their rows.
#[test]
fn sixteen_bits_stay_near_float32_maths_on_the_same_weights() {
    for (case, dtype) in CASES.into_iter().filter(|c| c.1 != DType::F32) {
        check_case(case, dtype, 2.5e-3);
    }
}

/// Root mean square of the differences of all rows over that of the expected values.
fn relative_rms(pairs: &[Pair]) -> f64 {
    let values = || pairs.iter().flat_map(|(found, expected)| found.iter().zip(*expected));
    let lost: f64 = values().map(|(f, e)| f64::from(f - e).powi(2)).sum();
    let all: f64 = values().map(|(_, e)| f64::from(*e).powi(2)).sum();
    (lost / all).sqrt()
}

/// The middle row's error: rounding may send a token to other experts, which changes its row altogether.
fn median_rms(pairs: &[Pair]) -> f64 {
    let rows: Vec<f64> = pairs.iter().map(|pair| relative_rms(std::slice::from_ref(pair))).collect();
    percentile(&sorted(&rows), 0.5, PercentileRule::Nearest).unwrap()
}

/// Integer matrices stay near float32 maths on every tier, and a cache of 8 bits adds little. The fixtures have 32 inputs
/// per row and large random weights, so that errors neither average out nor shrink on their way; `micro` is wide enough
/// for several scales per row.
#[test]
fn integers_stay_near_float32_maths() {
    for case in CASES.map(|(case, _)| case).into_iter().chain(["micro"]) {
        let (prompt, expected, tolerances) = if case == "micro" {
            let prompt = common::Random(5).tokens(40, 512);
            let model = load(case, build(DType::F32));
            let expected = eval::logits(Cpu::new(Tier::detect(), 2), &model, &prompt, 0).unwrap().logits;
            (prompt, expected, [0.03, 0.18])
        } else {
            let golden = Golden::read(case, "golden.json");
            (golden.prompt, golden.logits, [0.05, 0.45])
        };
        for (quantization, tolerance) in [Quantization::Int8, Quantization::Int4].into_iter().zip(tolerances) {
            let model = load(case, BuildConfig { quantization, ..build(DType::F32) });
            // Attention carries a token's other experts into later rows.
            let moe = model.config.model.moe.is_some();
            let (distance, tolerance) =
                if moe { (median_rms as fn(&[Pair]) -> f64, 2.0 * tolerance) } else { (relative_rms as _, tolerance) };
            for kv_cache in [KvCacheType::Auto, KvCacheType::Int8] {
                let model = rebuilt(&model, |b| b.kv_cache = kv_cache);
                let mut first: Option<EvalLogits> = None;
                for tier in Tier::available().into_iter().rev() {
                    let what = format!("{case} {quantization:?} cache {kv_cache:?} {tier:?}");
                    let found = eval::logits(Cpu::new(tier, 2), &model, &prompt, 0).unwrap();
                    let off = distance(&found.logits.iter().zip(&expected).collect::<Vec<_>>());
                    assert!(off <= tolerance, "{what}: off by {off:e}");
                    let first = first.get_or_insert_with(|| found.clone());
                    let off = distance(&found.logits.iter().zip(&first.logits).collect::<Vec<_>>());
                    assert!(off <= 1e-2, "{what}: off by {off:e} from the best tier");
                }
            }
        }
    }
}

/// The stored weights in float32 over a cache of 16 bits give what the 16-bit engine gives: nothing else is rounded, unless
/// products round their rows.
#[test]
fn the_cache_is_all_that_a_sixteen_bit_engine_rounds() {
    for (case, dtype) in CASES.into_iter().filter(|c| c.1 != DType::F32) {
        let golden = Golden::read(case, "golden.json");
        let text: Vec<u32> = golden.prompt.iter().chain(&golden.greedy).copied().collect();
        let blocks: Vec<u32> = (0..8).collect();
        for gemm_plugin in [true, false] {
            let run = |weights: DType, tier: Tier| {
                let model = load(case, BuildConfig { gemm_plugin, ..build(weights) });
                let cache = BuildConfig { gemm_plugin, ..build(dtype) }.cpu_kv_type(tier).unwrap();
                let mut stepper = Stepper::new(Cpu::new(tier, 2), &model, cache, text.len(), blocks.len());
                stepper.step(&[Span { tokens: &text, start: 0, blocks: &blocks, context: true }]).remove(0)
            };
            for tier in Tier::available().into_iter().filter(|tier| !rounds_rows(*tier, dtype, gemm_plugin)) {
                for (row, (found, expected)) in run(dtype, tier).iter().zip(run(DType::F32, tier)).enumerate() {
                    let off = difference(found, &expected);
                    assert!(off <= 1e-6, "{case} {dtype} {tier:?} plugin {gemm_plugin} row {row}: off by {off:e}");
                }
            }
        }
    }
}

/// Where products round their rows, results need only be nearer to float32 maths than those of `transformers` are.
#[test]
fn sixteen_bits_are_as_near_to_transformers_as_float32_is() {
    for (case, dtype) in [("llama-bf16", DType::Bf16), ("llama-f16", DType::F16)] {
        let (exact, native) = (Golden::read(case, "golden.json"), Golden::read(case, "golden_native.json"));
        assert_eq!(exact.greedy, native.greedy, "{case}: the texts must be the same to be compared");
        for gemm_plugin in [true, false] {
            let model = load(case, BuildConfig { gemm_plugin, ..build(dtype) });
            for (variant, model) in variants(&model) {
                for tier in Tier::available() {
                    let what = format!("{case} {tier:?} plugin {gemm_plugin} {variant}");
                    let found = run(tier, 2, &model, &native);
                    let pairs = comparable(&found, &native, 1e-2, &what);
                    if rounds_rows(tier, dtype, gemm_plugin) {
                        let ours: Vec<_> =
                            pairs.iter().zip(exact.rows()).map(|(pair, exact)| (pair.0, exact)).collect();
                        let theirs: Vec<_> = native.rows().zip(exact.rows()).collect();
                        let (ours, theirs) = (relative_rms(&ours), relative_rms(&theirs));
                        assert!(ours <= theirs, "{what}: {ours:e} from float32 maths, transformers {theirs:e}");
                        continue;
                    }
                    for (row, ((ours, native), exact)) in pairs.iter().zip(exact.rows()).enumerate() {
                        let (ours, allowed) = (difference(ours, native), 1.5 * difference(exact, native));
                        assert!(ours <= allowed, "{what} row {row}: {ours:e} from native, allowed {allowed:e}");
                    }
                }
            }
        }
    }
}

#[test]
fn an_engine_directory_gives_the_same_bits_as_memory() {
    let dir = scratch("parity");
    for (case, own_dtype) in CASES {
        let golden = Golden::read(case, "golden.json");
        for (gemm_plugin, dtype) in [(true, own_dtype), (false, own_dtype), (true, DType::Bf16)] {
            let what = format!("{case} {dtype} plugin {gemm_plugin}");
            let options = BuildConfig { gemm_plugin, ..build(dtype) };
            let in_memory = load(case, options.clone());
            let model = ModelRef::open(&model_name(case), 7).unwrap();
            let config = model.engine_config(options).unwrap();
            let target = dir.join(format!("{case}-{dtype}-{gemm_plugin}"));
            let mut cpu = Cpu::new(Tier::detect(), 1);
            engine_dir::build(&mut cpu, &model, &config, &target, true, &[], &mut |_| true).unwrap();
            let mapped = LoadedModel::open(&target).unwrap();
            assert_eq!(mapped.config, in_memory.config, "{what}");
            let (a, b) = (run(Tier::detect(), 2, &mapped, &golden), run(Tier::detect(), 2, &in_memory, &golden));
            assert_eq!(a.greedy, b.greedy, "{what}");
            for (a, b) in a.logits.iter().chain(&a.decode_logits).zip(b.logits.iter().chain(&b.decode_logits)) {
                assert_same_bits(a, b, &what);
            }
        }
    }
}

/// The fixtures' prompts fit one attention tile; this one spans several, where fused attention rescales.
#[test]
fn tiers_and_fusion_agree_on_a_long_prompt() {
    let mut random = common::Random(11);
    for (name, length) in [("micro", 200), ("mistral-window", 110), ("llama3-rope-tied", 110)] {
        let reference = {
            let model = load(name, BuildConfig { gemm_plugin: false, context_fmha: false, ..build(DType::F32) });
            let ids = random.tokens(length, model.config.model.vocab_size);
            (eval::logits(Cpu::new(Tier::Scalar, 1), &model, &ids, 4).unwrap(), ids)
        };
        let (expected, ids) = reference;
        for gemm_plugin in [true, false] {
            let model = load(name, BuildConfig { gemm_plugin, ..build(DType::F32) });
            for (variant, model) in variants(&model) {
                for tier in Tier::available().into_iter().filter(|&t| t != Tier::Scalar || name != "micro") {
                    let found = eval::logits(Cpu::new(tier, 2), &model, &ids, 4).unwrap();
                    let what = format!("{name} {tier:?} plugin {gemm_plugin} {variant}");
                    for (f, e) in found.logits.iter().zip(&expected.logits) {
                        let off = difference(f, e);
                        assert!(off <= 1e-4, "{what}: off by {off:e}");
                    }
                    assert_eq!(found.greedy, expected.greedy, "{what}");
                }
            }
        }
    }
}

#[test]
fn ids_that_cannot_run_are_refused_in_one_line() {
    let model = load("llama", build(DType::F32));
    let run = |ids: &[u32], decode| eval::logits(Cpu::new(Tier::detect(), 1), &model, ids, decode);
    common::says(run(&[], 1), &["--ids", "empty"]);
    common::says(run(&[3, 64], 1), &["--ids", "64"]);
    common::says(run(&[3; 128], 1), &["129", "128"]);
    assert!(run(&[3; 120], 8).is_ok());
}
