//! Mixtures of experts on every tier, against each expert's rows one by one: skewed loads, empty experts, all tokens on one.

mod common;

use common::{KINDS, Rng, Weight, as_multiplied, assert_close, assert_same_bits};
use half::{bf16, f16};
use strobe_kernels_cpu::{
    AlignedBuf, Cpu, Elems, ExpertPairs, KvType, Layout, Matrix, QuantKind, QuantRows, Tier, packed_bytes,
};

/// How tokens are spread over the experts.
#[derive(Clone, Copy, Debug)]
enum Load {
    Even,
    /// Most tokens go to the first ones.
    Skewed,
    /// Every token goes to the same ones.
    Same,
}

const LOADS: [Load; 3] = [Load::Even, Load::Skewed, Load::Same];

/// Distinct experts for a token, and weights.
fn choose(load: Load, token: usize, experts: usize, chosen: &mut [u32], weights: &mut [f32]) {
    let mut rng = Rng(1 + token as u64);
    let mut all: Vec<u32> = (0..experts as u32).collect();
    for i in 0..chosen.len() {
        let left = experts - i;
        let pick = match load {
            Load::Even => rng.below(left),
            Load::Skewed => rng.below(left).min(rng.below(left)).min(rng.below(left)),
            Load::Same => left - 1,
        };
        chosen[i] = all.remove(pick);
        weights[i] = 0.1 + rng.below(100) as f32 / 100.0;
    }
}

fn routed(cpu: &mut Cpu, load: Load, experts: usize, k: usize, tokens: usize) -> ExpertPairs {
    let mut pairs = ExpertPairs::new(experts, k, tokens.max(1));
    cpu.route(&mut pairs, tokens, |token, chosen, weights| choose(load, token, experts, chosen, weights));
    pairs
}

/// Experts, experts of a token, and tokens; the last more than one block of rows.
const SHAPES: [(usize, usize, usize); 8] =
    [(1, 1, 3), (4, 2, 0), (4, 2, 1), (8, 2, 5), (5, 5, 2), (8, 3, 40), (3, 2, 90), (4, 2, 300)];

#[test]
fn pairs_are_sorted_by_expert_and_then_by_token() {
    let mut cpu = Cpu::new(Tier::detect(), 2);
    for (experts, k, tokens) in SHAPES {
        for load in LOADS {
            let pairs = routed(&mut cpu, load, experts, k, tokens);
            assert_eq!(pairs.len(), tokens * k);
            assert_eq!(pairs.is_empty(), tokens == 0);
            let mut next = 0;
            for expert in 0..experts {
                let run = pairs.of_expert(expert);
                assert_eq!(run.start, next);
                next = run.end;
                let expected: Vec<u32> = (0..tokens)
                    .filter(|&token| {
                        let (mut chosen, mut weights) = (vec![0; k], vec![0.0; k]);
                        choose(load, token, experts, &mut chosen, &mut weights);
                        chosen.contains(&(expert as u32))
                    })
                    .map(|token| token as u32)
                    .collect();
                assert_eq!(pairs.tokens()[run], expected, "expert {expert} of {experts}, {load:?}");
            }
            assert_eq!(next, pairs.len());
        }
    }
}

/// One weight after the other, in their own layouts.
fn stacked(weights: &[Vec<f32>], n: usize, k: usize, kind: KvType, layout: Layout) -> (Vec<f32>, Vec<f16>, Vec<bf16>) {
    let mut all = (Vec::new(), Vec::new(), Vec::new());
    for values in weights {
        match Weight::new(values, n, k, kind, layout).matrix().data {
            Elems::F32(data) => all.0.extend_from_slice(data),
            Elems::F16(data) => all.1.extend_from_slice(data),
            Elems::Bf16(data) => all.2.extend_from_slice(data),
            _ => unreachable!(),
        }
    }
    all
}

#[test]
fn each_pair_is_the_product_with_its_own_expert() {
    let (n, k) = (45, 70);
    for (experts, per_token, tokens) in SHAPES {
        let mut rng = Rng(7);
        let weights: Vec<Vec<f32>> = (0..experts).map(|_| rng.floats(n * k)).collect();
        let bias = rng.floats(experts * n);
        for load in LOADS {
            for (kind, layout) in KINDS.into_iter().flat_map(|kind| [(kind, Layout::Packed), (kind, Layout::RowMajor)])
            {
                let data = stacked(&weights, n, k, kind, layout);
                let elems = match kind {
                    KvType::F32 => Elems::F32(&data.0),
                    KvType::F16 => Elems::F16(&data.1),
                    _ => Elems::Bf16(&data.2),
                };
                let matrix = Matrix { data: elems, n, k, layout };
                let mut oracle = Cpu::new(Tier::Scalar, 1);
                for tier in Tier::available() {
                    let what = format!(
                        "{experts} experts, {per_token} per token, {tokens} tokens, {load:?} {kind:?} {layout:?} {tier:?}"
                    );
                    let mut cpu = Cpu::new(tier, 2);
                    let pairs = routed(&mut cpu, load, experts, per_token, tokens);
                    let x = Rng(9).floats(pairs.len() * k);
                    let mut out = vec![f32::NAN; pairs.len() * n];
                    cpu.expert_linear(&x, &pairs, matrix, Some(&bias), &mut out);
                    for expert in 0..experts {
                        for pair in pairs.of_expert(expert) {
                            let (x, out) = (&x[pair * k..(pair + 1) * k], &out[pair * n..(pair + 1) * n]);
                            let mut expected = vec![0.0; n];
                            let bias = Some(&bias[expert * n..(expert + 1) * n]);
                            let rounded = as_multiplied(x, tier, kind, layout);
                            oracle.linear(&rounded, 1, matrix.nth(expert), bias, &mut expected);
                            assert_close(out, &expected, 2e-5, &what);
                            cpu.linear(x, 1, matrix.nth(expert), bias, &mut expected);
                            assert_same_bits(out, &expected, &format!("{what}, alone"));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn quantised_experts_give_the_oracles_bits() {
    let (n, k) = (45, 300);
    for (experts, per_token, tokens) in SHAPES {
        let mut rng = Rng(3);
        let bias = rng.floats(experts * n);
        for kind in [QuantKind::Int8, QuantKind::Int4] {
            let one = packed_bytes(kind, n, k);
            let mut bytes = AlignedBuf::<u8>::zeroed(experts * one);
            for expert in 0..experts {
                let values = rng.floats(n * k);
                let row = |row: usize, out: &mut [f32]| out.copy_from_slice(&values[row * k..(row + 1) * k]);
                Cpu::new(Tier::Scalar, 1).quantize(kind, row, n, k, &mut bytes[expert * one..(expert + 1) * one]);
            }
            let data = if kind == QuantKind::Int8 { Elems::Int8(&bytes) } else { Elems::Int4(&bytes) };
            let matrix = Matrix { data, n, k, layout: Layout::Packed };
            for load in LOADS {
                let token_rows = Rng(9).floats(tokens.max(1) * k);
                let run = |tier: Tier| {
                    let mut cpu = Cpu::new(tier, 2);
                    let pairs = routed(&mut cpu, load, experts, per_token, tokens);
                    let mut rows = QuantRows::new();
                    cpu.quantize_gathered_rows(&token_rows, k, pairs.tokens(), &mut rows);
                    let mut out = vec![f32::NAN; pairs.len() * n];
                    cpu.expert_linear_quantized(&rows, &pairs, matrix, Some(&bias), &mut out);
                    (pairs, out)
                };
                let (pairs, expected) = run(Tier::Scalar);
                let mut alone = vec![0.0; n];
                for expert in 0..experts {
                    for pair in pairs.of_expert(expert) {
                        let token = pairs.tokens()[pair] as usize;
                        let x = &token_rows[token * k..(token + 1) * k];
                        let bias = &bias[expert * n..(expert + 1) * n];
                        Cpu::new(Tier::Scalar, 1).linear(x, 1, matrix.nth(expert), Some(bias), &mut alone);
                        assert_same_bits(&expected[pair * n..(pair + 1) * n], &alone, &format!("{kind:?} {load:?}"));
                    }
                }
                for tier in common::simd_tiers() {
                    let what = format!("{experts} experts, {tokens} tokens, {load:?} {kind:?} {tier:?}");
                    assert_same_bits(&run(tier).1, &expected, &what);
                }
            }
        }
    }
}

#[test]
fn a_tokens_answers_are_weighed_and_added_in_its_own_order() {
    for width in [1, 15, 16, 70] {
        for (experts, per_token, tokens) in SHAPES {
            for load in LOADS {
                for tier in Tier::available() {
                    let mut cpu = Cpu::new(tier, 2);
                    let pairs = routed(&mut cpu, load, experts, per_token, tokens);
                    let x = Rng(5).floats(pairs.len() * width);
                    let held = Rng(6).floats(tokens * width);
                    let add = width % 2 == 0;
                    let mut expected = if add { held.clone() } else { vec![0.0; held.len()] };
                    let mut out = if add { held } else { vec![f32::NAN; held.len()] };
                    cpu.expert_sum(&x, &pairs, width, add, &mut out);
                    for token in 0..tokens {
                        let (mut chosen, mut weights) = (vec![0; per_token], vec![0.0; per_token]);
                        choose(load, token, experts, &mut chosen, &mut weights);
                        for (&expert, weight) in chosen.iter().zip(weights) {
                            let mut own = pairs.of_expert(expert as usize);
                            let pair = own.find(|&p| pairs.tokens()[p] as usize == token).unwrap();
                            for i in 0..width {
                                let sum = &mut expected[token * width + i];
                                *sum = weight.mul_add(x[pair * width + i], *sum);
                            }
                        }
                    }
                    assert_same_bits(&out, &expected, &format!("{experts} experts, {load:?} {tier:?}"));
                }
            }
        }
    }
}

#[test]
fn stacked_products_give_the_bits_of_single_ones() {
    let (count, n, k) = (5, 45, 70);
    let mut rng = Rng(11);
    let weights: Vec<Vec<f32>> = (0..count).map(|_| rng.floats(n * k)).collect();
    for rows in [1, 2, 13, 120] {
        let x = rng.floats(count * rows * k);
        for tier in Tier::available() {
            let mut cpu = Cpu::new(tier, 2);
            let mut out = vec![f32::NAN; count * rows * n];
            let mut alone = vec![f32::NAN; rows * n];
            for kind in KINDS {
                let data = stacked(&weights, n, k, kind, Layout::Packed);
                let elems = match kind {
                    KvType::F32 => Elems::F32(&data.0),
                    KvType::F16 => Elems::F16(&data.1),
                    _ => Elems::Bf16(&data.2),
                };
                let matrix = Matrix { data: elems, n, k, layout: Layout::Packed };
                cpu.stacked_linear(&x, count, matrix, &mut out);
                for (i, x) in x.chunks_exact(rows * k).enumerate() {
                    cpu.linear(x, rows, matrix.nth(i), None, &mut alone);
                    assert_same_bits(
                        &out[i * rows * n..][..rows * n],
                        &alone,
                        &format!("{tier:?} {kind:?} {rows} rows"),
                    );
                }
            }
            let one = packed_bytes(QuantKind::Int8, n, k);
            let mut bytes = AlignedBuf::<u8>::zeroed(count * one);
            for (values, bytes) in weights.iter().zip(bytes.chunks_exact_mut(one)) {
                let row = |row: usize, out: &mut [f32]| out.copy_from_slice(&values[row * k..(row + 1) * k]);
                cpu.quantize(QuantKind::Int8, row, n, k, bytes);
            }
            let matrix = Matrix { data: Elems::Int8(&bytes), n, k, layout: Layout::Packed };
            let mut codes = QuantRows::new();
            cpu.quantize_rows(&x, k, &mut codes);
            cpu.stacked_linear_quantized(&codes, count, matrix, &mut out);
            for (i, x) in x.chunks_exact(rows * k).enumerate() {
                cpu.linear(x, rows, matrix.nth(i), None, &mut alone);
                assert_same_bits(&out[i * rows * n..][..rows * n], &alone, &format!("{tier:?} int8 {rows} rows"));
            }
        }
    }
}
