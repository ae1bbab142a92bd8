//! Prints how fast attention (fused, and in three ops) and the small ops run on TinyLlama's shapes: prompts of 512
//! tokens, and decoding at several depths.
//!
//! Usage: `cargo run --release -p strobe-kernels-cpu --example attention [-- THREADS]`; `STROBE_CPU` chooses the tier.

use std::time::{Duration, Instant};

use strobe_kernels_cpu::{
    AlignedBuf, AttnBatch, Cpu, KvGeometry, KvLayer, KvType, QkvShape, RopeTable, SeqSpan, Tier, measure,
};

const SHAPE: QkvShape = QkvShape { heads: 32, kv_heads: 4, head_dim: 64 };
const TOKENS_PER_BLOCK: usize = 32;
/// (sequences, rows of each, positions of each)
const CASES: [(usize, usize, usize); 7] =
    [(1, 512, 512), (4, 128, 128), (1, 512, 2048), (1, 1, 512), (1, 1, 8192), (64, 1, 256), (16, 1, 2048)];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = match std::env::args().nth(1) {
        Some(threads) => threads.parse()?,
        None => std::thread::available_parallelism()?.get(),
    };
    let mut cpu = Cpu::new(Tier::from_env()?, threads);
    let (peak, read) =
        (measure::peak_flops_f32(&mut cpu, measure::THOROUGH), measure::read_bandwidth(&mut cpu, measure::THOROUGH));
    println!(
        "tier {}, {} threads, peak {:.1} GFLOP/s, read {:.1} GB/s",
        cpu.tier().name(),
        threads,
        peak / 1e9,
        read / 1e9
    );
    for kind in [KvType::F32, KvType::Bf16, KvType::F16, KvType::Int8] {
        for (seqs, q_len, kv_len) in CASES {
            attention(&mut cpu, kind, seqs, q_len, kv_len, peak, read);
        }
    }
    for rows in [1, 64, 512] {
        small_ops(&mut cpu, rows);
    }
    Ok(())
}

fn attention(cpu: &mut Cpu, kind: KvType, seqs: usize, q_len: usize, kv_len: usize, peak: f64, read: f64) {
    let blocks_each = kv_len.div_ceil(TOKENS_PER_BLOCK);
    let geometry = KvGeometry {
        kv_heads: SHAPE.kv_heads,
        head_dim: SHAPE.head_dim,
        tokens_per_block: TOKENS_PER_BLOCK,
        blocks: seqs * blocks_each,
        kind,
    };
    let mut data = AlignedBuf::<u8>::zeroed(geometry.bytes_per_layer());
    let mut kv = KvLayer { geometry, data: &mut data };
    let tables: Vec<u32> = (0..geometry.blocks as u32).rev().collect();
    let spans: Vec<SeqSpan> = (0..seqs)
        .map(|i| SeqSpan {
            q_start: (i * q_len) as u32,
            q_len: q_len as u32,
            kv_len: kv_len as u32,
            table_start: (i * blocks_each) as u32,
        })
        .collect();
    let batch = AttnBatch { seqs: &spans, block_tables: &tables };
    let mut qkv: Vec<f32> = (0..seqs * q_len * SHAPE.row()).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect();
    let half = SHAPE.head_dim / 2;
    let rope = RopeTable { half, cos: vec![1.0; kv_len * half], sin: vec![0.0; kv_len * half] };
    let mut out = vec![0.0; seqs * q_len * SHAPE.q_row()];
    let write = best(|| cpu.rope_kv_write(&mut qkv, SHAPE, &rope, &batch, &mut kv));
    let fused = best(|| cpu.attention(&qkv, SHAPE, &batch, &kv, None, &mut out));
    let offsets: Vec<usize> = (0..seqs).map(|i| i * SHAPE.heads * q_len * kv_len).collect();
    let mut scores = vec![0.0; seqs * SHAPE.heads * q_len * kv_len];
    let unfused = best(|| {
        cpu.attn_scores(&qkv, SHAPE, &batch, &kv, None, &offsets, &mut scores);
        cpu.attn_softmax(SHAPE, &batch, None, &offsets, &mut scores);
        cpu.attn_values(SHAPE, &batch, &kv, &offsets, &scores, &mut out);
    });
    let seen: usize = (0..q_len).map(|i| kv_len - q_len + i + 1).sum();
    let flops = (4 * seqs * seen * SHAPE.q_row()) as f64;
    let bytes = (geometry.bytes_per_layer()) as f64;
    println!(
        "{kind:?} {seqs:>3} x {q_len:>3} rows at {kv_len:>4}: rope+write {:>8.3} ms, fused {:>8.3} ms ({:>5.1} GFLOP/s, {:>4.1} % of peak; {:>4.1} GB/s, {:>5.1} % of read), three ops {:>8.3} ms",
        write * 1e3,
        fused * 1e3,
        flops / fused / 1e9,
        100.0 * flops / fused / peak,
        bytes / fused / 1e9,
        100.0 * bytes / fused / read,
        unfused * 1e3,
    );
}

fn small_ops(cpu: &mut Cpu, rows: usize) {
    let (hidden, inter, vocab) = (2048, 5632, 32000);
    let x: Vec<f32> = (0..rows * 2 * inter).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect();
    let weight = vec![1.0; hidden];
    let mut out = vec![0.0; rows * inter];
    let mut residual = x[..rows * hidden].to_vec();
    let norm = best(|| cpu.rms_norm(&x[..rows * hidden], &weight, 1e-5, &mut out[..rows * hidden]));
    let add = best(|| cpu.add_rms_norm(&mut residual, &x[..rows * hidden], &weight, 1e-5, &mut out[..rows * hidden]));
    let silu = best(|| cpu.silu_mul(&x, inter, &mut out));
    let logits = vec![0.5; rows * vocab];
    let mut tokens = vec![0; rows];
    let argmax = best(|| cpu.argmax_rows(&logits, vocab, &mut tokens));
    println!(
        "{rows:>3} rows: rms_norm {:.3} ms, add_rms_norm {:.3} ms, silu_mul {:.3} ms, argmax {:.3} ms",
        norm * 1e3,
        add * 1e3,
        silu * 1e3,
        argmax * 1e3
    );
}

/// The shortest of the runs that fit into a tenth of a second; at least three.
fn best(mut run: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut best = f64::INFINITY;
    let mut runs = 0;
    while runs < 3 || start.elapsed() < Duration::from_millis(100) {
        let before = Instant::now();
        run();
        best = best.min(before.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}
