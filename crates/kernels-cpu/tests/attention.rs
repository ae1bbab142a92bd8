//! RoPE, cache and attention against the scalar oracle, on poisoned memory.

mod common;

use common::{Attend, CACHE_KINDS, Part, Scene, assert_close, attends_in_pairs, simd_tiers};
use strobe_kernels_cpu::{Cpu, KvType, QkvShape, Tier};

const FUSED: Attend = Attend { fused: true, window: None };

fn shape(heads: usize, kv_heads: usize, head_dim: usize) -> QkvShape {
    QkvShape { heads, kv_heads, head_dim }
}

/// Prefills all but the last rows of each sequence, then runs a mixed step of chunks and single tokens.
fn mixed_steps(scene: &Scene, cpu: &mut Cpu, block: usize, kind: KvType, attend: &Attend) -> Vec<Vec<f32>> {
    let mut cache = scene.cache(block, kind);
    let mut first = Vec::new();
    let mut second = Vec::new();
    for i in 0..scene.history.len() {
        let len = scene.len(i);
        let rest = [1, 5, 40, 2][i % 4].min(len);
        first.push((len > rest).then(|| Part { q_len: len - rest, kv_len: len - rest }));
        second.push(Some(Part { q_len: rest, kv_len: len }));
    }
    let mut out = scene.step(cpu, &mut cache, &first, attend);
    for (out, rest) in out.iter_mut().zip(scene.step(cpu, &mut cache, &second, attend)) {
        out.extend(rest);
    }
    out
}

fn check(scene: &Scene, block: usize, kind: KvType, attend: &Attend) {
    check_within(2e-5, scene, block, kind, attend);
}

fn check_within(tolerance: f32, scene: &Scene, block: usize, kind: KvType, attend: &Attend) {
    let mut scalar = Cpu::new(Tier::Scalar, 2);
    let fused = Attend { fused: true, ..*attend };
    let expected = mixed_steps(scene, &mut scalar, block, kind, &fused);
    for tier in simd_tiers().into_iter().chain([Tier::Scalar]) {
        let found = mixed_steps(scene, &mut Cpu::new(tier, 2), block, kind, attend);
        for (seq, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let what = format!("{tier:?} {:?} block {block} {kind:?} {attend:?} sequence {seq}", scene.shape);
            assert!(expected.iter().all(|x| x.is_finite()), "{what}: the oracle read poison");
            // Weights of values with 8 bits of mantissa, and queries too.
            let tolerance = if attends_in_pairs(tier, kind, attend) { 1e-2 } else { tolerance };
            assert_close(found, expected, tolerance, &what);
        }
    }
}

#[test]
fn head_dims_and_groups() {
    for (heads, kv_heads, d) in
        [(2, 2, 8), (4, 2, 16), (4, 1, 20), (8, 1, 64), (8, 4, 80), (2, 1, 128), (7, 1, 2), (3, 1, 32), (16, 1, 48)]
    {
        let scene = Scene::new(shape(heads, kv_heads, d), &[130, 3], d as u64);
        for fused in [true, false] {
            check(&scene, 16, KvType::F32, &Attend { fused, window: None });
        }
    }
}

#[test]
fn block_sizes_and_types() {
    let scene = Scene::new(shape(4, 2, 24), &[1, 67, 150, 64], 7);
    for block in [1, 2, 4, 8, 16, 32, 128] {
        for kind in CACHE_KINDS {
            for fused in [true, false] {
                check(&scene, block, kind, &Attend { fused, window: None });
            }
        }
    }
}

#[test]
fn windows() {
    let scene = Scene::new(shape(4, 2, 16), &[200, 65, 9], 8);
    for window in [1, 2, 5, 63, 64, 65, 100, 1000] {
        for block in [4, 32] {
            for fused in [true, false] {
                check(&scene, block, KvType::F32, &Attend { fused, window: Some(window) });
            }
        }
    }
}

#[test]
fn long_sequences() {
    let scene = Scene::new(shape(8, 1, 32), &[300, 299], 9);
    check(&scene, 16, KvType::Bf16, &FUSED);
    check(&scene, 64, KvType::F32, &Attend { fused: false, window: None });
}

#[test]
fn contexts_of_several_chunks() {
    let scene = Scene::new(shape(3, 1, 16), &[700, 513], 15);
    for (kind, window) in
        [(KvType::F32, None), (KvType::Int8, None), (KvType::F16, Some(600)), (KvType::Bf16, Some(512))]
    {
        check(&scene, 16, kind, &Attend { fused: true, window });
    }
}

/// What models use: multiples of 8 from 16 to 256, groups up to 16.
#[test]
fn every_head_dim_and_group() {
    for (i, d) in (16..=256).step_by(8).enumerate() {
        let group = 1 + i % 16;
        let scene = Scene::new(shape(group, 1, d), &[70, 9], d as u64);
        let kind = [KvType::Int8, KvType::F16, KvType::F32, KvType::Bf16][i % 4];
        check(&scene, 1 << (i % 7), kind, &Attend { fused: true, window: [None, Some(33)][i / 2 % 2] });
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let mut scene = Scene::new(shape(4, 2, 16), &[150], 10);
    scene.history[0].iter_mut().for_each(|x| *x *= 12.0);
    // Scores of several hundred carry rounding errors of 1e-4 into the exponent.
    check_within(1e-3, &scene, 16, KvType::F32, &FUSED);
}

#[test]
fn one_position_returns_its_value_and_equal_keys_the_mean() {
    let shape = shape(2, 1, 4);
    let mut scene = Scene::new(shape, &[3], 11);
    for (position, row) in scene.history[0].chunks_exact_mut(shape.row()).enumerate() {
        row[8..12].fill(0.0); // keys of zero score alike everywhere
        row[12..].fill(position as f32);
    }
    for tier in Tier::available() {
        for fused in [true, false] {
            let attend = Attend { fused, window: None };
            let out = scene.prefill(&mut Cpu::new(tier, 1), &mut scene.cache(4, KvType::F32), &attend).remove(0);
            assert_close(&out[..8], &[0.0; 8], 1e-6, "first position");
            assert_close(&out[8..16], &[0.5; 8], 1e-6, "second position");
            assert_close(&out[16..], &[1.0; 8], 1e-6, "third position");
        }
    }
}

/// Queries of zero weigh all positions alike, so no type of the weights rounds them: what is left is which values are summed
/// up, at every edge of tiles, windows and pairs of positions.
#[test]
fn equal_weights_give_the_mean_of_what_is_seen() {
    for (group, d, block) in [(1, 16, 32), (5, 24, 16), (8, 64, 32), (16, 48, 4), (2, 80, 128)] {
        let shape = shape(group, 1, d);
        let mut scene = Scene::new(shape, &[201, 66, 1], d as u64);
        for row in scene.history.iter_mut().flat_map(|history| history.chunks_exact_mut(shape.row())) {
            row[..shape.q_row()].fill(0.0);
        }
        for kind in CACHE_KINDS {
            for window in [None, Some(1), Some(63), Some(100)] {
                let attend = Attend { fused: true, window };
                let expected = mixed_steps(&scene, &mut Cpu::new(Tier::Scalar, 1), block, kind, &attend);
                for tier in simd_tiers() {
                    let found = mixed_steps(&scene, &mut Cpu::new(tier, 2), block, kind, &attend);
                    for (found, expected) in found.iter().zip(&expected) {
                        let what = format!("{tier:?} {shape:?} block {block} {kind:?} window {window:?}");
                        assert_close(found, expected, 2e-5, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn keys_are_rotated_and_values_are_not() {
    let shape = shape(1, 1, 2);
    let scene = Scene::new(shape, &[5], 12);
    let mut cpu = Cpu::new(Tier::detect(), 1);
    let mut cache = scene.cache(1, KvType::F32);
    scene.prefill(&mut cpu, &mut cache, &FUSED);
    for position in 0..5 {
        let block = cache.tables[cache.table_starts[0] as usize + position] as usize;
        let start = block * cache.geometry.bytes_per_layer() / cache.geometry.blocks;
        let read = |i: usize| f32::from_le_bytes(cache.data[start + 4 * i..][..4].try_into().expect("four bytes"));
        let (x, y) = (scene.history[0][position * 6 + 2], scene.history[0][position * 6 + 3]);
        let (sin, cos) = (position as f32).sin_cos();
        assert_close(&[read(0), read(1)], &[x * cos - y * sin, y * cos + x * sin], 1e-6, "key");
        assert_close(&[read(2), read(3)], &scene.history[0][position * 6 + 4..][..2], 0.0, "value");
    }
}

#[test]
fn codes_stay_close_to_the_floats_they_stand_for() {
    let shape = shape(4, 2, 24);
    let mut scene = Scene::new(shape, &[70], 14);
    // Rows of very different size, one of them all zero: each has a scale of its own.
    for (position, row) in scene.history[0].chunks_exact_mut(shape.row()).enumerate() {
        let size = [1.0, 1e-3, 0.0, 2.0][position % 4];
        row[shape.q_row()..].iter_mut().for_each(|x| *x *= size);
    }
    for tier in Tier::available() {
        let mut cpu = Cpu::new(tier, 1);
        let exact = scene.prefill(&mut cpu, &mut scene.cache(16, KvType::F32), &FUSED).remove(0);
        let coded = scene.prefill(&mut cpu, &mut scene.cache(16, KvType::Int8), &FUSED).remove(0);
        let rms = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        let error = rms(&mut exact.iter().zip(&coded).map(|(x, y)| x - y)) / rms(&mut exact.iter().copied());
        assert!(error > 0.0 && error < 0.02, "{tier:?}: relative error {error}");
    }
}

#[test]
fn an_infinite_later_value_does_not_reach_earlier_rows() {
    let shape = shape(4, 2, 16);
    for (fused, kind) in [true, false].into_iter().flat_map(|fused| CACHE_KINDS.map(|kind| (fused, kind))) {
        if kind == KvType::F16 {
            continue; // saturates
        }
        let attend = Attend { fused, window: None };
        for tier in Tier::available() {
            let mut scene = Scene::new(shape, &[100], 13);
            let last_value = scene.history[0].len() - 1;
            scene.history[0][last_value] = f32::INFINITY;
            let out = scene.prefill(&mut Cpu::new(tier, 1), &mut scene.cache(16, kind), &attend).remove(0);
            let (before, last) = out.split_at(99 * shape.q_row());
            assert!(before.iter().all(|x| x.is_finite()), "{tier:?} {attend:?}");
            assert!(last.iter().any(|x| !x.is_finite()), "{tier:?} {attend:?}");
        }
    }
}
