//! Attention gives a row the same bits alone, in a batch, chunked, on any number of threads and in any block size.

mod common;

use common::{Attend, CACHE_KINDS, Cache, Part, Rng, Scene, assert_same_bits, simd_tiers};
use proptest::prelude::*;
use strobe_kernels_cpu::{Cpu, KvType, QkvShape, Tier};

const LENGTHS: [usize; 4] = [150, 1, 67, 100];

fn attends() -> impl Iterator<Item = Attend> {
    [None, Some(40)].into_iter().flat_map(|window| [true, false].map(|fused| Attend { fused, window }))
}

fn scene() -> Scene {
    Scene::new(QkvShape { heads: 6, kv_heads: 2, head_dim: 20 }, &LENGTHS, 1)
}

/// Runs one sequence in chunks that end where `cuts` say.
fn chunked(scene: &Scene, cpu: &mut Cpu, cache: &mut Cache, seq: usize, cuts: &[usize], attend: &Attend) -> Vec<f32> {
    let mut out = Vec::new();
    let mut start = 0;
    for &end in cuts {
        let mut parts = vec![None; scene.history.len()];
        parts[seq] = Some(Part { q_len: end - start, kv_len: end });
        out.extend(scene.step(cpu, cache, &parts, attend).remove(seq));
        start = end;
    }
    out
}

#[test]
fn threads_blocks_and_company_change_nothing() {
    let scene = scene();
    for tier in Tier::available() {
        for attend in attends() {
            for kind in CACHE_KINDS {
                let expected = scene.prefill(&mut Cpu::new(tier, 1), &mut scene.cache(16, kind), &attend);
                for block in [1, 4, 16, 32, 128] {
                    let found = scene.prefill(&mut Cpu::new(tier, 3), &mut scene.cache(block, kind), &attend);
                    for seq in 0..LENGTHS.len() {
                        let what = format!("{tier:?} {attend:?} {kind:?} block {block} sequence {seq}");
                        assert_same_bits(&found[seq], &expected[seq], &what);
                    }
                }
                for (seq, &len) in LENGTHS.iter().enumerate() {
                    let alone =
                        chunked(&scene, &mut Cpu::new(tier, 1), &mut scene.cache(4, kind), seq, &[len], &attend);
                    assert_same_bits(
                        &alone,
                        &expected[seq],
                        &format!("{tier:?} {attend:?} {kind:?} sequence {seq} alone"),
                    );
                }
            }
        }
    }
}

#[test]
fn decoding_token_by_token_equals_the_prompt_at_once() {
    let scene = scene();
    for tier in Tier::available() {
        for attend in attends() {
            for kind in [KvType::F32, KvType::Bf16] {
                let mut cpu = Cpu::new(tier, 2);
                let expected = scene.prefill(&mut cpu, &mut scene.cache(16, kind), &attend);
                let cuts: Vec<usize> = (1..=LENGTHS[0]).collect();
                for block in [8, 32] {
                    let found = chunked(&scene, &mut cpu, &mut scene.cache(block, kind), 0, &cuts, &attend);
                    assert_same_bits(&found, &expected[0], &format!("{tier:?} {attend:?} {kind:?} blocks of {block}"));
                }
            }
        }
    }
}

/// Long contexts are shared out in chunks when there is little else to do.
#[test]
fn splitting_a_long_context_changes_nothing() {
    for (heads, kv_heads, window) in [(8, 1, None), (8, 1, Some(700)), (3, 1, None), (4, 2, Some(1000)), (10, 1, None)]
    {
        let scene = Scene::new(QkvShape { heads, kv_heads, head_dim: 16 }, &[1300, 600, 20], 3);
        let attend = Attend { fused: true, window };
        let last = |seq: usize| scene.len(seq) - 1;
        let history: Vec<_> = (0..3).map(|seq| Some(Part { q_len: last(seq), kv_len: last(seq) })).collect();
        for tier in simd_tiers() {
            for kind in CACHE_KINDS {
                let expected = scene.prefill(&mut Cpu::new(tier, 1), &mut scene.cache(16, kind), &attend);
                let mut cache = scene.cache(32, kind);
                scene.step(&mut Cpu::new(tier, 2), &mut cache, &history, &attend);
                for threads in [1, 2, 3, 5] {
                    for company in [vec![0], vec![1], vec![0, 2], vec![0, 1, 2]] {
                        let part = |seq| Part { q_len: 1, kv_len: scene.len(seq) };
                        let parts: Vec<_> = (0..3).map(|seq| company.contains(&seq).then(|| part(seq))).collect();
                        let found = scene.step(&mut Cpu::new(tier, threads), &mut cache, &parts, &attend);
                        for seq in company {
                            let row = &expected[seq][last(seq) * scene.shape.q_row()..];
                            let what = format!("{tier:?} {attend:?} {kind:?} {threads} threads, sequence {seq}");
                            assert_same_bits(&found[seq], row, &what);
                        }
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Any shape, any chunking, any block size.
    #[test]
    fn any_chunking_gives_the_same_bits(
        seed in 0u64..1000,
        group in 1usize..9,
        kv_heads in 1usize..3,
        half in 1usize..25,
        len in 1usize..200,
        block in 0u32..8,
        window in proptest::option::of(1usize..150),
    ) {
        let scene = Scene::new(QkvShape { heads: group * kv_heads, kv_heads, head_dim: 2 * half }, &[len], seed);
        let mut rng = Rng(seed);
        let mut cuts: Vec<usize> = (0..rng.below(6)).map(|_| 1 + rng.below(len)).chain([len]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let kind = CACHE_KINDS[rng.below(4)];
        for tier in Tier::available() {
            let attend = Attend { fused: rng.below(3) > 0, window };
            let whole = scene.prefill(&mut Cpu::new(tier, 1), &mut scene.cache(16, kind), &attend);
            let parts = chunked(&scene, &mut Cpu::new(tier, 2), &mut scene.cache(1 << block, kind), 0, &cuts, &attend);
            assert_same_bits(&parts, &whole[0], &format!("{tier:?} {attend:?} {kind:?} cuts {cuts:?}"));
        }
    }
}
