//! Quantised weights and activations: the format, the oracle, and every tier against it, bit for bit.

mod common;

use common::{Rng, assert_same_bits};
use strobe_kernels_cpu::{
    AlignedBuf, Cpu, Elems, Layout, Matrix, QuantKind, QuantRows, Tier, packed_bytes, packed_shape, quantize_panel,
};

const BOTH: [QuantKind; 2] = [QuantKind::Int8, QuantKind::Int4];
const ROWS: [usize; 11] = [1, 2, 3, 4, 5, 8, 13, 16, 33, 70, 130];
/// 600 and 1029 take several blocks of k, the last one short.
const INPUTS: [usize; 9] = [1, 3, 7, 32, 100, 256, 257, 600, 1029];
const COLUMNS: [usize; 5] = [1, 31, 33, 100, 300];

/// A quantised weight of its own memory.
struct Quantized {
    kind: QuantKind,
    bytes: AlignedBuf<u8>,
    n: usize,
    k: usize,
}

impl Quantized {
    fn new(kind: QuantKind, values: &[f32], n: usize, k: usize) -> Quantized {
        let mut bytes = AlignedBuf::zeroed(packed_bytes(kind, n, k));
        let fill = |row: usize, out: &mut [f32]| out.copy_from_slice(&values[row * k..(row + 1) * k]);
        Cpu::new(Tier::Scalar, 3).quantize(kind, fill, n, k, &mut bytes);
        Quantized { kind, bytes, n, k }
    }

    fn matrix(&self) -> Matrix<'_> {
        let data = match self.kind {
            QuantKind::Int8 => Elems::Int8(&self.bytes),
            QuantKind::Int4 => Elems::Int4(&self.bytes),
        };
        Matrix { data, n: self.n, k: self.k, layout: Layout::Packed }
    }
}

fn linear(cpu: &mut Cpu, x: &[f32], m: usize, weight: &Quantized, bias: Option<&[f32]>) -> Vec<f32> {
    let mut out = vec![f32::NAN; m * weight.n];
    cpu.linear(x, m, weight.matrix(), bias, &mut out);
    out
}

/// NaN has many bit patterns; any of them is as good.
fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    let plain = |x: &[f32]| x.iter().map(|x| if x.is_nan() { f32::NAN } else { *x }).collect::<Vec<_>>();
    assert_same_bits(&plain(found), &plain(expected), what);
}

#[test]
fn sizes_are_what_the_format_says() {
    assert_eq!(packed_bytes(QuantKind::Int8, 64, 512), 2 * 2 * (8192 + 128));
    assert_eq!(packed_bytes(QuantKind::Int8, 33, 257), 2 * (8192 + 128 + 1024 + 128));
    assert_eq!(packed_bytes(QuantKind::Int4, 32, 256), 4608);
    assert_eq!(packed_bytes(QuantKind::Int4, 1, 33), 2 * 576);
    assert_eq!(packed_shape(QuantKind::Int4, 100, 40), [4, 2 * 576]);
}

#[test]
fn values_come_back_within_half_a_step() {
    let mut rng = Rng(1);
    for k in INPUTS {
        let n = 37;
        let values = rng.floats(n * k);
        for kind in BOTH {
            let weight = Quantized::new(kind, &values, n, k);
            let (scope, steps) = if kind == QuantKind::Int8 { (256, 254.0) } else { (32, 14.0) };
            for row in 0..n {
                for column in 0..k {
                    let block =
                        &values[row * k + column / scope * scope..row * k + k.min((column / scope + 1) * scope)];
                    let largest = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    let (found, value) = (weight.matrix().get(row, column), values[row * k + column]);
                    // The least squares of int4 may cut a peak short for the good of the others.
                    let bound = largest / steps * if kind == QuantKind::Int8 { 1.001 } else { 2.2 };
                    assert!((found - value).abs() <= bound, "{kind:?} k={k} ({row}, {column}): {found} for {value}");
                }
            }
        }
    }
}

#[test]
fn values_on_an_int4_grid_come_back_exactly() {
    let mut rng = Rng(2);
    let (n, k) = (40, 96);
    let mut values: Vec<f32> = (0..n * k).map(|_| rng.below(16) as f32 - 8.0).collect();
    for group in values.chunks_exact_mut(32) {
        group[rng.below(32)] = -8.0;
        let scale = half::f16::from_f32(0.01 + rng.below(100) as f32 * 0.003).to_f32();
        group.iter_mut().for_each(|x| *x *= scale);
    }
    let weight = Quantized::new(QuantKind::Int4, &values, n, k);
    for row in 0..n {
        for column in 0..k {
            assert_eq!(weight.matrix().get(row, column), values[row * k + column]);
        }
    }
}

#[test]
fn padding_is_zero_weights() {
    let fill = |_: usize, out: &mut [f32]| out.fill(1.0);
    let mut int8 = vec![0xff; packed_bytes(QuantKind::Int8, 1, 5)];
    quantize_panel(QuantKind::Int8, &fill, 1, 5, 0, &mut Vec::new(), &mut int8);
    assert_eq!(int8[..1024].iter().filter(|&&code| code != 128).count(), 5);
    assert!(int8[1024 + 4..].iter().all(|&byte| byte == 0));
    let mut int4 = vec![0xff; packed_bytes(QuantKind::Int4, 1, 5)];
    quantize_panel(QuantKind::Int4, &fill, 1, 5, 0, &mut Vec::new(), &mut int4);
    assert_eq!(int4[..512].iter().filter(|&&code| code != 0x88).count(), 4);
    assert!(int4[512 + 2..].iter().all(|&byte| byte == 0));
}

#[test]
fn the_oracle_is_the_product_of_what_the_codes_say() {
    let mut cpu = Cpu::new(Tier::Scalar, 2);
    let mut rng = Rng(3);
    for (m, n, k) in [(3, 33, 257), (2, 100, 600), (1, 5, 3)] {
        let (values, x, bias) = (rng.floats(n * k), rng.floats(m * k), rng.floats(n));
        let mut rows = QuantRows::new();
        cpu.quantize_rows(&x, k, &mut rows);
        for kind in BOTH {
            let weight = Quantized::new(kind, &values, n, k);
            let mut found = vec![f32::NAN; m * n];
            cpu.linear_quantized(&rows, weight.matrix(), Some(&bias), &mut found);
            for row in 0..m {
                for column in 0..n {
                    let terms = (0..k).map(|i| f64::from(rows.get(row, i)) * f64::from(weight.matrix().get(column, i)));
                    let exact = terms.sum::<f64>() + f64::from(bias[column]);
                    let off = (f64::from(found[row * n + column]) - exact).abs();
                    assert!(off < 1e-5 * (1.0 + exact.abs()), "{kind:?} ({row}, {column}): {off}");
                }
            }
        }
    }
}

#[test]
fn every_tier_agrees_with_the_oracle_to_the_bit() {
    let mut scalar = Cpu::new(Tier::Scalar, 1);
    let mut cpus: Vec<Cpu> =
        Tier::available().into_iter().flat_map(|tier| [Cpu::new(tier, 1), Cpu::new(tier, 3)]).collect();
    let mut rng = Rng(4);
    for n in COLUMNS {
        for k in INPUTS {
            let (values, bias) = (rng.floats(n * k), rng.floats(n));
            for kind in BOTH {
                let weight = Quantized::new(kind, &values, n, k);
                let m = ROWS[rng.below(ROWS.len())];
                let x = rng.floats(m * k);
                let bias = (rng.below(2) == 0).then_some(&bias[..]);
                let expected = linear(&mut scalar, &x, m, &weight, bias);
                for cpu in &mut cpus {
                    let what = format!("{:?} {kind:?} m={m} n={n} k={k}", cpu.tier());
                    assert_same_bits(&linear(cpu, &x, m, &weight, bias), &expected, &what);
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch_or_on_threads() {
    let mut rng = Rng(5);
    for tier in Tier::available() {
        let (mut one, mut three) = (Cpu::new(tier, 1), Cpu::new(tier, 3));
        for (n, k) in [(100, 600), (33, 7), (320, 300)] {
            let (values, bias) = (rng.floats(n * k), rng.floats(n));
            for kind in BOTH {
                let weight = Quantized::new(kind, &values, n, k);
                for m in ROWS {
                    let x = rng.floats(m * k);
                    let what = format!("{tier:?} {kind:?} m={m} n={n} k={k}");
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

#[test]
fn extreme_values_neither_hang_nor_look_right_when_they_are_not() {
    let (n, k) = (40, 520);
    let mut rng = Rng(6);
    for (weights, inputs) in
        [(0.0, 1.0), (1.0, 0.0), (1e-30, 1.0), (1.0, 1e-30), (1e30, 1.0), (1.0, 1e30), (1e-30, 1e-30), (1e-40, 1.0)]
    {
        let values: Vec<f32> = rng.floats(n * k).iter().map(|x| x * weights).collect();
        for m in [1, 7] {
            let x: Vec<f32> = rng.floats(m * k).iter().map(|x| x * inputs).collect();
            for kind in BOTH {
                let weight = Quantized::new(kind, &values, n, k);
                let expected = linear(&mut Cpu::new(Tier::Scalar, 1), &x, m, &weight, None);
                for tier in Tier::available() {
                    let found = linear(&mut Cpu::new(tier, 2), &x, m, &weight, None);
                    assert_same(&found, &expected, &format!("{tier:?} {kind:?} weights {weights}, inputs {inputs}"));
                }
                let visible = kind == QuantKind::Int8 || (1e-7..=1e5).contains(&weights);
                if weights * inputs == 0.0 {
                    assert!(expected.iter().all(|&y| y == 0.0), "{kind:?} weights {weights}, inputs {inputs}");
                } else if visible && weights * inputs > 1e-31 {
                    assert!(expected.iter().all(|y| y.is_finite()) && expected.iter().any(|&y| y != 0.0));
                } else if weights == 1e30 {
                    assert!(expected.iter().all(|y| y.is_nan()), "beyond the scale of int4");
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_reach_the_outputs_they_belong_to() {
    let (m, n, k) = (3, 34, 300);
    let mut rng = Rng(7);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let (mut values, mut x) = (rng.floats(n * k), rng.floats(m * k));
        values[5 * k + 17] = bad;
        x[k + 290] = bad;
        for kind in BOTH {
            let weight = Quantized::new(kind, &values, n, k);
            for tier in Tier::available() {
                let found = linear(&mut Cpu::new(tier, 2), &x, m, &weight, None);
                for (i, y) in found.iter().enumerate() {
                    assert_eq!(y.is_nan(), i / n == 1 || i % n == 5, "{tier:?} {kind:?} element {i} is {y}");
                }
            }
        }
    }
}

/// All that a product can see of quantised rows.
fn contents(rows: &QuantRows) -> Vec<f32> {
    (0..rows.rows()).flat_map(|row| (0..rows.k()).map(move |column| rows.get(row, column))).collect()
}

#[test]
fn ops_that_quantise_equal_the_op_and_quantising() {
    let mut rng = Rng(8);
    let mut scalar = Cpu::new(Tier::Scalar, 1);
    for tier in Tier::available() {
        let mut cpu = Cpu::new(tier, 3);
        let (mut fused, mut plain) = (QuantRows::new(), QuantRows::new());
        for width in [1, 5, 32, 255, 300, 1029] {
            for rows in [1, 3, 40] {
                let what = format!("{tier:?} {rows} rows of {width}");
                let (x, delta, w) = (rng.floats(rows * width), rng.floats(rows * width), rng.floats(width));
                let mut out = vec![f32::NAN; rows * width];
                cpu.rms_norm(&x, &w, 1e-5, &mut out);
                cpu.quantize_rows(&out, width, &mut plain);
                cpu.rms_norm_quantized(&x, &w, 1e-5, &mut fused);
                assert_same_bits(&contents(&fused), &contents(&plain), &what);
                scalar.quantize_rows(&out, width, &mut plain);
                assert_same_bits(&contents(&fused), &contents(&plain), &what);

                let (mut residual, mut other) = (x.clone(), x.clone());
                cpu.add_rms_norm(&mut residual, &delta, &w, 1e-5, &mut out);
                cpu.quantize_rows(&out, width, &mut plain);
                cpu.add_rms_norm_quantized(&mut other, &delta, &w, 1e-5, &mut fused);
                assert_same_bits(&residual, &other, &what);
                assert_same_bits(&contents(&fused), &contents(&plain), &what);

                let gate_up = rng.floats(rows * 2 * width);
                cpu.silu_mul(&gate_up, width, &mut out);
                cpu.quantize_rows(&out, width, &mut plain);
                cpu.silu_mul_quantized(&gate_up, width, &mut fused);
                assert_same_bits(&contents(&fused), &contents(&plain), &what);
            }
        }
    }
}
