//! `linear` against the scalar oracle, and its independence of the batch.

mod common;

use common::{KINDS, Rng, Weight, as_multiplied, assert_close, assert_same_bits, simd_tiers};
use strobe_kernels_cpu::{Cpu, KvType, Layout, Tier};

const ROWS: [usize; 10] = [1, 2, 3, 4, 5, 8, 13, 16, 33, 70];
const COLUMNS: [usize; 6] = [1, 31, 32, 33, 100, 300];
/// 600 takes three blocks of k.
const INPUTS: [usize; 6] = [1, 7, 64, 100, 257, 600];

fn linear(cpu: &mut Cpu, x: &[f32], m: usize, weight: &Weight, bias: Option<&[f32]>) -> Vec<f32> {
    let mut out = vec![f32::NAN; m * weight.matrix().n];
    cpu.linear(x, m, weight.matrix(), bias, &mut out);
    out
}

#[test]
fn every_tier_agrees_with_the_oracle() {
    let mut scalar = Cpu::new(Tier::Scalar, 1);
    let mut cpus: Vec<Cpu> = simd_tiers().into_iter().flat_map(|tier| [Cpu::new(tier, 1), Cpu::new(tier, 3)]).collect();
    let mut rng = Rng(1);
    for n in COLUMNS {
        for k in INPUTS {
            let (values, bias) = (rng.floats(n * k), rng.floats(n));
            for (i, kind) in KINDS.into_iter().enumerate() {
                for (j, layout) in [Layout::Packed, Layout::RowMajor].into_iter().enumerate() {
                    let weight = Weight::new(&values, n, k, kind, layout);
                    let m = ROWS[rng.below(ROWS.len())];
                    let x = rng.floats(m * k);
                    let bias = (i != j).then_some(&bias[..]);
                    for cpu in &mut cpus {
                        let rows = as_multiplied(&x, cpu.tier(), kind, layout);
                        let expected = linear(&mut scalar, &rows, m, &weight, bias);
                        let found = linear(cpu, &x, m, &weight, bias);
                        let what = format!("{:?} {kind:?} {layout:?} m={m} n={n} k={k}", cpu.tier());
                        assert_close(&found, &expected, 1e-6 * (k as f32 + 10.0), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn the_oracle_is_the_dot_product() {
    let mut cpu = Cpu::new(Tier::Scalar, 2);
    for layout in [Layout::Packed, Layout::RowMajor] {
        let weight = Weight::new(&[1.0, 2.0, 3.0, -1.0, 0.5, 4.0], 2, 3, KvType::F32, layout);
        let out = linear(&mut cpu, &[1.0, 10.0, 100.0, 0.0, 1.0, 0.0], 2, &weight, Some(&[0.25, -1.0]));
        assert_eq!(out, [321.25, 403.0, 2.25, -0.5]);
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch_or_on_threads() {
    let mut rng = Rng(2);
    for tier in Tier::available() {
        let (mut one, mut three) = (Cpu::new(tier, 1), Cpu::new(tier, 3));
        for (n, k) in [(100, 600), (33, 7), (320, 300)] {
            let (values, bias) = (rng.floats(n * k), rng.floats(n));
            for kind in KINDS {
                for layout in [Layout::Packed, Layout::RowMajor] {
                    let weight = Weight::new(&values, n, k, kind, layout);
                    for m in ROWS {
                        let x = rng.floats(m * k);
                        let what = format!("{tier:?} {kind:?} {layout:?} m={m} n={n} k={k}");
                        let batch = linear(&mut one, &x, m, &weight, Some(&bias));
                        assert_same_bits(&linear(&mut three, &x, m, &weight, Some(&bias)), &batch, &what);
                        for row in [0, m / 2, m - 1] {
                            let alone = linear(&mut one, &x[row * k..(row + 1) * k], 1, &weight, Some(&bias));
                            assert_same_bits(&alone, &batch[row * n..(row + 1) * n], &what);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rows_beyond_one_block_are_right_too() {
    let (m, n, k) = (1100, 40, 20);
    let mut rng = Rng(3);
    let (values, x) = (rng.floats(n * k), rng.floats(m * k));
    let weight = Weight::new(&values, n, k, KvType::F32, Layout::Packed);
    for tier in simd_tiers() {
        let mut cpu = Cpu::new(tier, 2);
        let out = linear(&mut cpu, &x, m, &weight, None);
        for row in [0, 365, 366, 367, 733, 1099] {
            let alone = linear(&mut cpu, &x[row * k..(row + 1) * k], 1, &weight, None);
            assert_same_bits(&alone, &out[row * n..(row + 1) * n], "a row of 1100");
        }
    }
}

#[test]
fn no_inputs_give_the_bias() {
    for tier in Tier::available() {
        for layout in [Layout::Packed, Layout::RowMajor] {
            let weight = Weight::new(&[], 3, 0, KvType::F32, layout);
            assert_eq!(
                linear(&mut Cpu::new(tier, 1), &[], 2, &weight, Some(&[1.0, 2.0, 3.0])),
                [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
            );
        }
    }
}

#[test]
fn a_nan_stays_in_its_row_and_column() {
    let (m, n, k) = (14, 70, 40);
    let mut rng = Rng(4);
    let (mut values, mut x) = (rng.floats(n * k), rng.floats(m * k));
    values[5 * k + 3] = f32::NAN;
    x[9 * k + 30] = f32::INFINITY;
    for tier in Tier::available() {
        for (layout, kind) in
            [Layout::Packed, Layout::RowMajor].into_iter().flat_map(|l| [(l, KvType::F32), (l, KvType::Bf16)])
        {
            let out = linear(&mut Cpu::new(tier, 2), &x, m, &Weight::new(&values, n, k, kind, layout), None);
            for (i, y) in out.iter().enumerate() {
                assert_eq!(
                    y.is_finite(),
                    i / n != 9 && i % n != 5,
                    "{tier:?} {kind:?} {layout:?} row {} column {}",
                    i / n,
                    i % n
                );
            }
        }
    }
}

#[test]
fn packing_on_all_workers_equals_packing_alone() {
    let (n, k) = (1000, 37);
    let values = Rng(5).floats(n * k);
    let fill = |row: usize, dst: &mut [f32]| dst.copy_from_slice(&values[row * k..(row + 1) * k]);
    let mut expected = vec![f32::NAN; strobe_kernels_cpu::packed_len(n, k)];
    strobe_kernels_cpu::pack_panels(fill, n, k, &mut expected);
    let mut found = vec![f32::NAN; expected.len()];
    Cpu::new(Tier::detect(), 3).pack(fill, n, k, &mut found);
    assert_eq!(found, expected);
}

/// Machines without such a tier have nothing to show here.
fn pair_tier() -> Option<Tier> {
    let tier = Tier::available().into_iter().find(|tier| tier.multiplies_pairs());
    if tier.is_none() {
        eprintln!("skipped: this CPU does not multiply bfloat16 pairs");
    }
    tier
}

#[test]
fn products_of_bfloat16_pairs_agree_with_the_oracle() {
    let Some(tier) = pair_tier() else { return };
    let (mut scalar, mut cpus) = (Cpu::new(Tier::Scalar, 1), [Cpu::new(tier, 1), Cpu::new(tier, 3)]);
    let mut rng = Rng(6);
    for m in ROWS {
        for n in [1, 33, 70] {
            for k in [1, 2, 31, 64, 255, 257, 513] {
                // Powers of two leave the rounding as it is, so the sums may be scaled back exactly.
                for (weight_scale, row_scale) in [(1.0, 1.0), (2f32.powi(90), 2f32.powi(-80)), (2f32.powi(-70), 1.0)] {
                    let values: Vec<f32> = rng.floats(n * k).iter().map(|w| w * weight_scale).collect();
                    let x: Vec<f32> = rng.floats(m * k).iter().map(|x| x * row_scale).collect();
                    let weight = Weight::new(&values, n, k, KvType::Bf16, Layout::Packed);
                    let rows = as_multiplied(&x, tier, KvType::Bf16, Layout::Packed);
                    let back =
                        |out: Vec<f32>| -> Vec<f32> { out.iter().map(|y| y / weight_scale / row_scale).collect() };
                    let expected = back(linear(&mut scalar, &rows, m, &weight, None));
                    for cpu in &mut cpus {
                        let found = back(linear(cpu, &x, m, &weight, None));
                        let what = format!("m={m} n={n} k={k} scales {weight_scale:e} {row_scale:e}");
                        assert_close(&found, &expected, 1e-6 * (k as f32 + 10.0), &what);
                    }
                }
            }
        }
    }
}

/// Sums that bfloat16 and f32 hold exactly come out to the last bit, whatever the order of additions.
#[test]
fn products_of_bfloat16_pairs_of_small_integers_are_exact() {
    let Some(tier) = pair_tier() else { return };
    let mut rng = Rng(7);
    for (m, n, k) in [(1, 33, 7), (2, 64, 300), (13, 40, 513), (40, 100, 256), (600, 33, 31)] {
        let mut integers = |len: usize| -> Vec<f32> { (0..len).map(|_| rng.below(257) as f32 - 128.0).collect() };
        let (values, x, bias) = (integers(n * k), integers(m * k), integers(n));
        let weight = Weight::new(&values, n, k, KvType::Bf16, Layout::Packed);
        let expected = linear(&mut Cpu::new(Tier::Scalar, 1), &x, m, &weight, Some(&bias));
        let found = linear(&mut Cpu::new(tier, 2), &x, m, &weight, Some(&bias));
        assert_eq!(found, expected, "m={m} n={n} k={k}");
    }
}

#[test]
fn products_of_bfloat16_pairs_round_rows_to_even_and_keep_what_is_not_finite() {
    let Some(tier) = pair_tier() else { return };
    let mut cpu = Cpu::new(tier, 1);
    // One input per row and a weight of 1: the row as it was rounded.
    let one = Weight::new(&[1.0], 1, 1, KvType::Bf16, Layout::Packed);
    let next = 1.0 + 2f32.powi(-7);
    let halfway = [1.0 + 2f32.powi(-8), next + 2f32.powi(-8), 1.0 + 2f32.powi(-8) + 2f32.powi(-20)];
    assert_eq!(linear(&mut cpu, &halfway, 3, &one, None), [1.0, 1.0 + 2f32.powi(-6), next]);
    assert_eq!(linear(&mut cpu, &[0.0, -0.0, 1e-40], 3, &one, None), [0.0; 3]);
    let odd = linear(&mut cpu, &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX], 4, &one, None);
    assert_eq!(odd[..2], [f32::INFINITY, f32::NEG_INFINITY]);
    assert!(odd[2].is_nan() && odd[3] == f32::INFINITY, "{odd:?}");
    // Infinity times the zero that ends an odd k would be NaN.
    let infinite = Weight::new(&[1.0, 2.0, f32::INFINITY], 1, 3, KvType::Bf16, Layout::Packed);
    for m in [1, 2, 40] {
        assert_eq!(linear(&mut cpu, &vec![1.0; 3 * m], m, &infinite, None), vec![f32::INFINITY; m]);
    }
}
