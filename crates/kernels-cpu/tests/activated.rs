//! Products that end in the activation: against the scalar product and activation, and bit for bit against the two steps of
//! their own tier.

mod common;

use common::{KINDS, Rng, Weight, as_multiplied, assert_close, assert_same_bits, simd_tiers};
use strobe_kernels_cpu::{
    Activation, AlignedBuf, Cpu, Elems, ExpertPairs, KvType, Layout, Matrix, QuantKind, QuantRows, Tier, packed_bytes,
};

/// 140 and 300 rows are more than one block of rows of some types, 1100 of all.
const ROWS: [usize; 11] = [1, 2, 3, 4, 5, 8, 16, 33, 70, 140, 300];
/// Gates, of which 32 share a panel and 256 activated ones a scale.
const WIDTHS: [usize; 4] = [32, 96, 256, 1120];
/// 600 takes several blocks of k, the last one short.
const INPUTS: [usize; 6] = [1, 7, 64, 100, 257, 600];
const ACTIVATIONS: [Activation; 2] = [Activation::Silu, Activation::ClampedSwiglu { alpha: 1.702, limit: 2.0 }];

fn fused(cpu: &mut Cpu, x: &[f32], m: usize, w: Matrix<'_>, bias: Option<&[f32]>, activation: Activation) -> Vec<f32> {
    let mut out = vec![f32::NAN; m * w.n / 2];
    cpu.linear_activated(x, m, w, bias, activation, &mut out);
    out
}

/// The product, and then the activation.
fn two_steps(
    cpu: &mut Cpu,
    x: &[f32],
    m: usize,
    w: Matrix<'_>,
    bias: Option<&[f32]>,
    activation: Activation,
) -> Vec<f32> {
    let (mut gate_up, mut out) = (vec![f32::NAN; m * w.n], vec![f32::NAN; m * w.n / 2]);
    cpu.linear(x, m, w, bias, &mut gate_up);
    cpu.activate(&gate_up, w.n / 2, activation, &mut out);
    out
}

fn quantized(kind: QuantKind, values: &[f32], n: usize, k: usize) -> AlignedBuf<u8> {
    let mut bytes = AlignedBuf::zeroed(packed_bytes(kind, n, k));
    let fill = |row: usize, out: &mut [f32]| out.copy_from_slice(&values[row * k..(row + 1) * k]);
    Cpu::new(Tier::Scalar, 2).quantize(kind, fill, n, k, &mut bytes);
    bytes
}

fn matrix(kind: QuantKind, bytes: &[u8], n: usize, k: usize) -> Matrix<'_> {
    let data = if kind == QuantKind::Int8 { Elems::Int8(bytes) } else { Elems::Int4(bytes) };
    Matrix { data, n, k, layout: Layout::Packed }
}

/// All that a product can see of quantised rows.
fn contents(rows: &QuantRows) -> Vec<f32> {
    (0..rows.rows()).flat_map(|row| (0..rows.k()).map(move |column| rows.get(row, column))).collect()
}

#[test]
fn floats_agree_with_the_oracle_and_to_the_bit_with_two_steps() {
    let mut scalar = Cpu::new(Tier::Scalar, 1);
    let mut cpus: Vec<Cpu> = simd_tiers().into_iter().flat_map(|tier| [Cpu::new(tier, 1), Cpu::new(tier, 3)]).collect();
    let mut rng = Rng(1);
    for width in WIDTHS {
        for k in INPUTS {
            let (values, bias) = (rng.floats(2 * width * k), rng.floats(2 * width));
            for kind in KINDS {
                let weight = Weight::new(&values, 2 * width, k, kind, Layout::Packed);
                let m = ROWS[rng.below(ROWS.len())];
                let x = rng.floats(m * k);
                let bias = (rng.below(2) == 0).then_some(&bias[..]);
                let activation = ACTIVATIONS[rng.below(2)];
                // The oracle takes the rows of one batch only: its cost is why.
                let checked = m.min(8);
                for cpu in &mut cpus {
                    let what = format!("{:?} {kind:?} m={m} width={width} k={k} {activation:?}", cpu.tier());
                    let found = fused(cpu, &x, m, weight.matrix(), bias, activation);
                    assert_same_bits(&found, &two_steps(cpu, &x, m, weight.matrix(), bias, activation), &what);
                    let rows = as_multiplied(&x[..checked * k], cpu.tier(), kind, Layout::Packed);
                    let expected = two_steps(&mut scalar, &rows, checked, weight.matrix(), bias, activation);
                    let largest = expected.iter().fold(1.0f32, |most, x| most.max(x.abs()));
                    let tolerance = 1e-6 * (k as f32 + 10.0) * largest;
                    assert_close(&found[..checked * width], &expected, tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn every_number_of_rows_equals_two_steps_and_each_row_alone() {
    let mut rng = Rng(2);
    let (width, k) = (160, 300);
    let (values, bias) = (rng.floats(2 * width * k), rng.floats(2 * width));
    for tier in simd_tiers() {
        let mut cpu = Cpu::new(tier, 3);
        for kind in KINDS {
            let weight = Weight::new(&values, 2 * width, k, kind, Layout::Packed);
            for m in ROWS.into_iter().chain([1100]) {
                let x = rng.floats(m * k);
                let what = format!("{tier:?} {kind:?} m={m}");
                let silu = Activation::Silu;
                let found = fused(&mut cpu, &x, m, weight.matrix(), Some(&bias), silu);
                assert_same_bits(&found, &two_steps(&mut cpu, &x, m, weight.matrix(), Some(&bias), silu), &what);
                for row in [0, m / 2, m - 1] {
                    let alone = fused(&mut cpu, &x[row * k..(row + 1) * k], 1, weight.matrix(), Some(&bias), silu);
                    assert_same_bits(&alone, &found[row * width..(row + 1) * width], &what);
                }
            }
        }
    }
}

#[test]
fn integers_equal_the_product_the_activation_and_quantising() {
    let mut rng = Rng(3);
    let mut cpus: Vec<Cpu> = simd_tiers().into_iter().flat_map(|tier| [Cpu::new(tier, 1), Cpu::new(tier, 3)]).collect();
    let (mut x, mut plain, mut out) = (QuantRows::new(), QuantRows::new(), QuantRows::new());
    for width in WIDTHS.into_iter().chain([2336]) {
        for k in [3, 100, 257, 600] {
            let (values, bias) = (rng.floats(2 * width * k), rng.floats(2 * width));
            for kind in [QuantKind::Int8, QuantKind::Int4] {
                let bytes = quantized(kind, &values, 2 * width, k);
                let w = matrix(kind, &bytes, 2 * width, k);
                let m = ROWS[rng.below(ROWS.len())];
                let rows = rng.floats(m * k);
                let bias = (rng.below(2) == 0).then_some(&bias[..]);
                let activation = ACTIVATIONS[rng.below(2)];
                for cpu in &mut cpus {
                    let what = format!("{:?} {kind:?} m={m} width={width} k={k} {activation:?}", cpu.tier());
                    let expected = two_steps(cpu, &rows, m, w, bias, activation);
                    assert_same_bits(&fused(cpu, &rows, m, w, bias, activation), &expected, &what);
                    cpu.quantize_rows(&rows, k, &mut x);
                    cpu.linear_activated_quantized(&x, w, bias, activation, &mut out);
                    cpu.quantize_rows(&expected, width, &mut plain);
                    assert_eq!((out.rows(), out.k()), (m, width), "{what}");
                    assert_same_bits(&contents(&out), &contents(&plain), &what);
                }
            }
        }
    }
}

/// Codes that two products read must come with the right sums, whoever made them: rows of every kind of batch go on to a
/// second product.
#[test]
fn a_second_product_reads_activated_codes() {
    let mut rng = Rng(4);
    let (width, k, n) = (544, 128, 40);
    let (values, second) = (rng.floats(2 * width * k), rng.floats(n * width));
    for tier in simd_tiers() {
        let mut cpu = Cpu::new(tier, 2);
        for kind in [QuantKind::Int8, QuantKind::Int4] {
            let (up, down) = (quantized(kind, &values, 2 * width, k), quantized(kind, &second, n, width));
            let (up, down) = (matrix(kind, &up, 2 * width, k), matrix(kind, &down, n, width));
            for m in ROWS {
                let rows = rng.floats(m * k);
                let (mut x, mut codes) = (QuantRows::new(), QuantRows::new());
                cpu.quantize_rows(&rows, k, &mut x);
                cpu.linear_activated_quantized(&x, up, None, Activation::Silu, &mut codes);
                let (mut found, mut expected) = (vec![f32::NAN; m * n], vec![f32::NAN; m * n]);
                cpu.linear_quantized(&codes, down, None, &mut found);
                let activated = two_steps(&mut cpu, &rows, m, up, None, Activation::Silu);
                cpu.linear(&activated, m, down, None, &mut expected);
                assert_same_bits(&found, &expected, &format!("{tier:?} {kind:?} m={m}"));
            }
        }
    }
}

#[test]
fn extreme_values_end_as_they_do_in_two_steps() {
    let mut rng = Rng(5);
    let (width, k) = (64, 70);
    // NaN has many bit patterns; any of them is as good.
    let plain = |x: &[f32]| x.iter().map(|x| if x.is_nan() { f32::NAN } else { *x }).collect::<Vec<_>>();
    for (scale, bad) in [(0.0, 0.0), (1e-30, 0.0), (1e18, 0.0), (300.0, 0.0), (1.0, f32::NAN), (1.0, f32::INFINITY)] {
        let mut values: Vec<f32> = rng.floats(2 * width * k).iter().map(|x| x * scale).collect();
        values[5 * k + 3] += bad;
        values[(width + 9) * k] -= bad;
        for tier in simd_tiers() {
            let mut cpu = Cpu::new(tier, 2);
            for m in [1, 3, 40] {
                let x = rng.floats(m * k);
                for kind in KINDS {
                    let weight = Weight::new(&values, 2 * width, k, kind, Layout::Packed);
                    let what = format!("{tier:?} {kind:?} m={m} scale {scale} with {bad}");
                    let found = fused(&mut cpu, &x, m, weight.matrix(), None, Activation::Silu);
                    let expected = two_steps(&mut cpu, &x, m, weight.matrix(), None, Activation::Silu);
                    assert_same_bits(&plain(&found), &plain(&expected), &what);
                }
                for kind in [QuantKind::Int8, QuantKind::Int4] {
                    let bytes = quantized(kind, &values, 2 * width, k);
                    let w = matrix(kind, &bytes, 2 * width, k);
                    let found = fused(&mut cpu, &x, m, w, None, Activation::Silu);
                    let expected = two_steps(&mut cpu, &x, m, w, None, Activation::Silu);
                    assert_same_bits(&plain(&found), &plain(&expected), &format!("{tier:?} {kind:?} {scale} {bad}"));
                }
            }
        }
    }
}

#[test]
fn experts_equal_two_steps_of_each() {
    let mut rng = Rng(6);
    let (experts, width, k) = (5, 288, 130);
    let values: Vec<Vec<f32>> = (0..experts).map(|_| rng.floats(2 * width * k)).collect();
    let bias = rng.floats(experts * 2 * width);
    let activation = ACTIVATIONS[1];
    for tier in simd_tiers() {
        let mut cpu = Cpu::new(tier, 3);
        for tokens in [1, 7, 90] {
            let mut pairs = ExpertPairs::new(experts, 2, tokens);
            // Expert 3 gets nothing, expert 0 most.
            cpu.route(&mut pairs, tokens, |token, chosen, weights| {
                chosen.copy_from_slice(&[if token % 9 == 4 { 4 } else { 0 }, [1, 2][token % 2]]);
                weights.fill(0.5);
            });
            let x = rng.floats(pairs.len() * k);
            let own = |expert: usize| pairs.of_expert(expert);
            let mut weights = Vec::new();
            values.iter().for_each(|values| {
                weights.push(Weight::new(values, 2 * width, k, KvType::F32, Layout::Packed));
            });
            let stacked: Vec<f32> = weights
                .iter()
                .flat_map(|w| match w.matrix().data {
                    Elems::F32(data) => data.to_vec(),
                    _ => unreachable!("made as f32"),
                })
                .collect();
            let stack = Matrix { data: Elems::F32(&stacked), ..weights[0].matrix() };
            let mut found = vec![f32::NAN; pairs.len() * width];
            cpu.expert_linear_activated(&x, &pairs, stack, Some(&bias), activation, &mut found);
            for expert in 0..experts {
                let (rows, w) = (own(expert), weights[expert].matrix());
                let bias = &bias[expert * 2 * width..(expert + 1) * 2 * width];
                let expected =
                    two_steps(&mut cpu, &x[rows.start * k..rows.end * k], rows.len(), w, Some(bias), activation);
                let found = &found[rows.start * width..rows.end * width];
                assert_same_bits(found, &expected, &format!("{tier:?} {tokens} tokens, expert {expert}"));
            }
            for kind in [QuantKind::Int8, QuantKind::Int4] {
                let bytes: Vec<AlignedBuf<u8>> = values.iter().map(|v| quantized(kind, v, 2 * width, k)).collect();
                let stacked: Vec<u8> = bytes.iter().flat_map(|b| b.to_vec()).collect();
                let (mut codes, mut out, mut plain) = (QuantRows::new(), QuantRows::new(), QuantRows::new());
                cpu.quantize_rows(&x, k, &mut codes);
                let stack = matrix(kind, &stacked, 2 * width, k);
                cpu.expert_linear_activated_quantized(&codes, &pairs, stack, Some(&bias), activation, &mut out);
                let mut expected = Vec::new();
                for expert in 0..experts {
                    let (rows, w) = (own(expert), matrix(kind, &bytes[expert], 2 * width, k));
                    let bias = &bias[expert * 2 * width..(expert + 1) * 2 * width];
                    let x = &x[rows.start * k..rows.end * k];
                    expected.extend(two_steps(&mut cpu, x, rows.len(), w, Some(bias), activation));
                }
                cpu.quantize_rows(&expected, width, &mut plain);
                let what = format!("{tier:?} {kind:?} {tokens} tokens");
                assert_same_bits(&contents(&out), &contents(&plain), &what);
            }
        }
    }
}

#[test]
fn widths_and_tiers_without_such_a_product_are_named() {
    assert_eq!(Tier::Scalar.activated_multiple(), None);
    for tier in simd_tiers() {
        assert_eq!(tier.activated_multiple(), Some(32), "{tier:?}");
    }
    let refused = |tier: Tier, n: usize, layout: Layout| {
        let weight = Weight::new(&vec![0.0; n * 3], n, 3, KvType::F32, layout);
        let run = || fused(&mut Cpu::new(tier, 1), &[0.0; 3], 1, weight.matrix(), None, Activation::Silu);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.contains("no fused activation") && message.contains(tier.name()), "{message}");
    };
    refused(Tier::Scalar, 64, Layout::Packed);
    for tier in simd_tiers() {
        refused(tier, 48, Layout::Packed);
        refused(tier, 96, Layout::Packed);
        refused(tier, 64, Layout::RowMajor);
    }
}
