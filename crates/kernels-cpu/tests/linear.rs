//! `linear` against the scalar oracle, and its independence of the batch.

mod common;

use common::{KINDS, Rng, Weight, assert_close, assert_same_bits, simd_tiers};
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
                    let expected = linear(&mut scalar, &x, m, &weight, bias);
                    for cpu in &mut cpus {
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
        for layout in [Layout::Packed, Layout::RowMajor] {
            let out = linear(&mut Cpu::new(tier, 2), &x, m, &Weight::new(&values, n, k, KvType::F32, layout), None);
            for (i, y) in out.iter().enumerate() {
                assert_eq!(
                    y.is_finite(),
                    i / n != 9 && i % n != 5,
                    "{tier:?} {layout:?} row {} column {}",
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
