//! The ops on single rows against the oracle and against known values.

mod common;

use common::{KINDS, Rng, Weight, assert_close, assert_same_bits, simd_tiers};
use strobe_kernels_cpu::{Activation, Cpu, KvType, Layout, QkvShape, Tier};

const WIDTHS: [usize; 9] = [1, 2, 7, 8, 15, 16, 33, 100, 2048];
const ROWS: [usize; 5] = [1, 2, 5, 33, 70];

/// Runs `op(cpu, rows, row)` (inputs made from the rows' numbers) on all tiers, thread counts and batches.
fn check(width: usize, tolerance: f32, what: &str, op: &dyn Fn(&mut Cpu, std::ops::Range<usize>) -> Vec<f32>) {
    let rows = *ROWS.last().expect("rows");
    let expected = op(&mut Cpu::new(Tier::Scalar, 1), 0..rows);
    let out_width = expected.len() / rows;
    for tier in Tier::available() {
        let (mut one, mut three) = (Cpu::new(tier, 1), Cpu::new(tier, 3));
        let all = op(&mut one, 0..rows);
        assert_close(&all, &expected, tolerance, &format!("{what} {tier:?} width {width}"));
        for n in ROWS {
            let found = op(&mut three, rows - n..rows);
            assert_same_bits(
                &found,
                &all[(rows - n) * out_width..],
                &format!("{what} {tier:?} width {width} rows {n}"),
            );
        }
    }
}

#[test]
fn rms_norms() {
    let mut rng = Rng(1);
    for width in WIDTHS {
        let (x, delta, w) = (rng.floats(70 * width), rng.floats(70 * width), rng.floats(width));
        let part = |values: &[f32], rows: std::ops::Range<usize>| values[rows.start * width..rows.end * width].to_vec();
        check(width, 1e-5, "rms_norm", &|cpu, rows| {
            let x = part(&x, rows);
            let mut out = vec![f32::NAN; x.len()];
            cpu.rms_norm(&x, &w, 1e-5, &mut out);
            out
        });
        check(width, 1e-5, "add_rms_norm", &|cpu, rows| {
            let (mut residual, delta) = (part(&x, rows.clone()), part(&delta, rows));
            let sums: Vec<f32> = residual.iter().zip(&delta).map(|(a, b)| a + b).collect();
            let mut out = vec![f32::NAN; delta.len()];
            cpu.add_rms_norm(&mut residual, &delta, &w, 1e-5, &mut out);
            assert_eq!(residual, sums);
            out
        });
    }
}

#[test]
fn rms_norm_has_the_textbook_value() {
    for tier in Tier::available() {
        let mut out = [f32::NAN; 2];
        Cpu::new(tier, 1).rms_norm(&[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
        let rms = (12.5f32).sqrt();
        assert_close(&out, &[3.0 / rms, 8.0 / rms], 1e-6, "rms_norm");
    }
}

#[test]
fn qk_norm_leaves_values_alone() {
    for d in [2, 8, 20, 64, 80, 128] {
        let shape = QkvShape { heads: 4, kv_heads: 2, head_dim: d };
        let mut rng = Rng(d as u64);
        let (qkv, q_w, k_w) = (rng.floats(70 * shape.row()), rng.floats(d), rng.floats(d));
        check(d, 1e-5, "qk_norm", &|cpu, rows| {
            let mut x = qkv[rows.start * shape.row()..rows.end * shape.row()].to_vec();
            let before = x.clone();
            cpu.qk_norm(&mut x, shape, &q_w, &k_w, 1e-6);
            for (new, old) in x.chunks(shape.row()).zip(before.chunks(shape.row())) {
                assert_eq!(new[6 * d..], old[6 * d..]);
                let mut head = vec![0.0; d];
                cpu.rms_norm(&old[4 * d..5 * d], &k_w, 1e-6, &mut head);
                assert_same_bits(&new[4 * d..5 * d], &head, "first key head");
            }
            x
        });
    }
}

#[test]
fn silu_mul() {
    let mut rng = Rng(3);
    for width in WIDTHS {
        let mut gate_up = rng.floats(70 * 2 * width);
        gate_up[0] = -1000.0;
        gate_up[2 * width] = 1000.0;
        gate_up.iter_mut().step_by(3).for_each(|x| *x *= 10.0);
        for activation in [Activation::Silu, Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 }] {
            check(width, 1e-6, "silu_mul", &|cpu, rows| {
                let mut out = vec![f32::NAN; rows.len() * width];
                let rows = &gate_up[rows.start * 2 * width..rows.end * 2 * width];
                cpu.activate(rows, width, activation, &mut out);
                out
            });
        }
    }
}

#[test]
fn embed_finds_rows_in_both_layouts() {
    let (n, k) = (77, 19);
    let values = Rng(4).floats(n * k);
    let ids = [0u32, 76, 31, 32, 33, 5, 5, 64];
    for kind in KINDS {
        let plain = Weight::new(&values, n, k, kind, Layout::RowMajor);
        let expected: Vec<f32> = ids
            .iter()
            .flat_map(|&id| (0..k).map(move |i| (id as usize, i)))
            .map(|(id, i)| plain.matrix().get(id, i))
            .collect();
        for layout in [Layout::Packed, Layout::RowMajor] {
            let weight = Weight::new(&values, n, k, kind, layout);
            let mut out = vec![f32::NAN; ids.len() * k];
            Cpu::new(Tier::detect(), 2).embed(&ids, weight.matrix(), &mut out);
            assert_same_bits(&out, &expected, &format!("{kind:?} {layout:?}"));
        }
    }
    let weight = Weight::new(&values, n, k, KvType::F32, Layout::Packed);
    Cpu::new(Tier::detect(), 1).embed(&[], weight.matrix(), &mut []);
}

#[test]
fn gather_rows_copies() {
    let x: Vec<f32> = (0..5000).map(|i| i as f32).collect();
    let rows: Vec<u32> = (0..400).map(|i| (i * 7 % 500) as u32).collect();
    let mut out = vec![f32::NAN; 4000];
    Cpu::new(Tier::detect(), 3).gather_rows(&x, 10, &rows, &mut out);
    for (i, row) in rows.iter().enumerate() {
        assert_eq!(out[i * 10..(i + 1) * 10], x[*row as usize * 10..][..10]);
    }
}

fn argmax(tier: Tier, logits: &[f32], width: usize) -> Vec<u32> {
    let mut out = vec![u32::MAX; logits.len() / width];
    Cpu::new(tier, 2).argmax_rows(logits, width, &mut out);
    out
}

#[test]
fn argmax_takes_the_first_maximum_and_never_nan() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for tier in Tier::available() {
        assert_eq!(argmax(tier, &[1.0, 3.0, 3.0, 2.0, nan, nan, -1.0, nan], 4), [1, 2], "{tier:?}");
        assert_eq!(argmax(tier, &[nan; 40], 20), [0, 0], "{tier:?}");
        assert_eq!(argmax(tier, &[nan, -inf, -inf, -inf, -inf, -inf], 3), [1, 0], "{tier:?}");
        assert_eq!(argmax(tier, &[0.0, inf, inf, inf], 4), [1], "{tier:?}");
        assert_eq!(argmax(tier, &[-0.0, 0.0], 2), [0], "{tier:?}");
        // A negative row whose length leaves lanes over: padding must not win.
        assert_eq!(argmax(tier, &[-5.0, -4.0, -3.0, -9.0, -8.0], 5), [2], "{tier:?}");
    }
}

#[test]
fn argmax_agrees_with_the_oracle() {
    let mut rng = Rng(6);
    for width in [1, 7, 16, 17, 64, 1000, 32000] {
        let rows = 9;
        // Coarse values, so that maxima repeat.
        let logits: Vec<f32> = (0..rows * width).map(|_| (rng.float() * 4.0).round() - 8.0).collect();
        let expected = argmax(Tier::Scalar, &logits, width);
        for tier in simd_tiers() {
            assert_eq!(argmax(tier, &logits, width), expected, "{tier:?} width {width}");
        }
    }
}
