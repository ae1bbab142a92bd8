//! Perplexity of the trained fixture: against `transformers`, against plain logits, and of every quantisation.

mod common;

use common::{build, fixture, load, says};
use strobe_engine::perplexity::{Score, Windows, perplexity};
use strobe_engine::{BuildConfig, EngineError, KvCacheType, LoadedModel, Quantization, eval};
use strobe_kernels_cpu::{Cpu, Tier};
use strobe_model::DType;

/// Tokens of a window that the fixture was trained on.
const CONTEXT: usize = 192;

fn trained(change: impl Fn(&mut BuildConfig)) -> LoadedModel {
    let mut config = BuildConfig { max_num_tokens: 512, max_seq_len: 512, ..build(DType::F32) };
    change(&mut config);
    load("trained", config)
}

fn text_ids(model: &LoadedModel) -> Vec<u32> {
    let text = std::fs::read_to_string(fixture("trained").join("text.txt")).unwrap();
    model.tokenizer.as_ref().unwrap().encode_with_special_tokens(&text).unwrap()
}

fn score(model: &LoadedModel, ids: &[u32], context: usize, stride: usize) -> Result<Score, EngineError> {
    perplexity(Cpu::new(Tier::detect(), 2), model, ids, Windows { context, stride }, &mut |_| true)
}

#[test]
fn equals_transformers() {
    let golden: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixture("trained").join("golden.json")).unwrap()).unwrap();
    let number = |field: &str| golden[field].as_f64().unwrap();
    let model = trained(|_| {});
    let ids = text_ids(&model);
    let found = score(&model, &ids, number("context") as usize, number("stride") as usize).unwrap();
    assert_eq!(found.tokens, number("tokens") as usize);
    let ratio = found.perplexity() / number("perplexity");
    assert!((ratio - 1.0).abs() < 1e-5, "{} against {golden}", found.perplexity());
}

/// The definition, window by window, from the logits of whole windows.
fn plainly(model: &LoadedModel, ids: &[u32], context: usize, stride: usize) -> Score {
    let mut plain = Score { tokens: 0, nats: 0.0, windows: 0 };
    let mut next = 1;
    while next < ids.len() {
        let end = if next == 1 { context } else { next + stride }.min(ids.len());
        let begin = end.saturating_sub(context);
        let logits = eval::logits(Cpu::new(Tier::detect(), 2), model, &ids[begin..end], 0).unwrap().logits;
        for target in next..end {
            let row = &logits[target - 1 - begin];
            let sum: f64 = row.iter().map(|l| f64::from(*l).exp()).sum();
            plain.nats += sum.ln() - f64::from(row[ids[target] as usize]);
            plain.tokens += 1;
        }
        next = end;
        plain.windows += 1;
    }
    plain
}

#[test]
fn every_token_but_the_first_is_scored_once_whatever_the_windows() {
    let model = trained(|_| {});
    let ids = &text_ids(&model)[..700];
    // One window, windows of several steps, the largest and the smallest stride, and a last window that is nearly empty.
    for (length, context, stride) in [
        (2, 512, 256),
        (256, 512, 256),
        (257, 512, 1),
        (700, 512, 100),
        (700, 300, 299),
        (40, 8, 1),
        (699, 349, 349 / 2),
    ] {
        let found = score(&model, &ids[..length], context, stride).unwrap();
        let expected = plainly(&model, &ids[..length], context, stride);
        assert_eq!((found.tokens, found.windows), (length - 1, expected.windows), "{length} {context} {stride}");
        let off = (found.nats - expected.nats).abs() / expected.nats;
        assert!(off < 1e-9, "{length} {context} {stride}: {} is not {}", found.nats, expected.nats);
    }
}

#[test]
fn what_cannot_be_scored_is_refused() {
    let model = trained(|_| {});
    says(score(&model, &[1], 8, 4), &["--text", "1 token"]);
    says(score(&model, &[1, 512], 8, 4), &["--text", "token 512", "512 entries"]);
    says(score(&model, &[1, 2], 513, 4), &["--context", "512", "513"]);
    says(score(&model, &[1, 2], 1, 4), &["--context", "found 1"]);
    says(score(&model, &[1, 2], 8, 8), &["--stride", "between 1 and 7"]);
    says(score(&model, &[1, 2], 8, 0), &["--stride", "found 0"]);
    let stopped =
        perplexity(Cpu::new(Tier::detect(), 1), &model, &[1, 2, 3], Windows { context: 2, stride: 1 }, &mut |_| false);
    assert!(matches!(stopped, Err(EngineError::Interrupted)));
}

/// What fewer bits may cost: 16-bit types next to nothing, int8 1 %, int4 5 %.
#[test]
fn fewer_bits_cost_little() {
    let exact = trained(|_| {});
    let ids = text_ids(&exact);
    let reference = score(&exact, &ids, CONTEXT, CONTEXT / 2).unwrap().perplexity();
    let check = |what: &str, most: f64, change: &dyn Fn(&mut BuildConfig)| {
        let found = score(&trained(change), &ids, CONTEXT, CONTEXT / 2).unwrap().perplexity();
        let cost = found / reference - 1.0;
        println!("{what}: {found:.4} against {reference:.4}, {:+.2} %", 100.0 * cost);
        assert!(cost.abs() < most, "{what}: {found} against {reference}");
    };
    check("float16", 1e-3, &|b| b.dtype = DType::F16);
    check("bfloat16", 1e-3, &|b| b.dtype = DType::Bf16);
    check("int8", 0.01, &|b| b.quantization = Quantization::Int8);
    check("int4", 0.05, &|b| b.quantization = Quantization::Int4);
    check("int8 and an int8 cache", 0.01, &|b| {
        b.quantization = Quantization::Int8;
        b.kv_cache = KvCacheType::Int8;
    });
}
