//! Row ops, sampling, unfused attention and the generation of weights, on the shapes of TinyLlama in bfloat16.

use strobe_kernels_cuda::{
    CudaError, DeviceBuffer, DevicePtr, Draw, EmbedArgs, Gpu, KvDtype, NormArgs, Precision, RopeArgs, RowOps,
    SampleArgs, SampleOps, UnfusedArgs, UnfusedAttention, UnfusedConfig, WeightOps, score_elements,
};

use crate::graph_microseconds;

const HIDDEN: usize = 2048;
const INTER: usize = 5632;
const HEADS: usize = 32;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const VOCAB: usize = 32_000;
const TOKENS_PER_BLOCK: usize = 32;
/// Operands of many rows are taken from different places of this much memory, several times the L2 cache. Those of few
/// rows stay where they are: in a real step the kernel before has just written them.
const POOL: usize = 1 << 30;
const STAYS_IN_L2: usize = 16 << 20;

struct Pool {
    memory: DeviceBuffer,
}

impl Pool {
    /// The place of call number `turn` for `bytes` in all.
    fn at(&self, turn: usize, bytes: usize) -> DevicePtr {
        let stride = bytes.next_multiple_of(1024);
        let places = if bytes < STAYS_IN_L2 { 1 } else { (POOL / stride).max(1) };
        self.memory.ptr() + (turn % places * stride) as DevicePtr
    }
}

pub(crate) fn run(gpu: &Gpu) -> Result<(), CudaError> {
    let weights = WeightOps::new(gpu, Precision::Bf16)?;
    let pool = Pool { memory: DeviceBuffer::new(POOL, "operands")? };
    // The same bits are small numbers as f32 and as bf16.
    // SAFETY: the pool and the tables are large enough for so many rows, and live until the times are taken.
    unsafe { weights.random_normal(gpu, pool.memory.ptr(), Precision::Bf16, 1, 0, POOL as u64 / 2, 1.0) }?;
    let count = POOL as u64 / 2;
    let us = graph_microseconds(gpu, 1, |_| {
        // SAFETY: the pool and the tables are large enough for so many rows, and live until the times are taken.
        unsafe { weights.random_normal(gpu, pool.memory.ptr(), Precision::Bf16, 1, 0, count, 1.0) }
    })?;
    println!("random_normal bf16: {count} elements in {us:.0} us, {:.0} GB/s", POOL as f64 / us / 1e3);
    row_ops(gpu, &pool)?;
    sampling(gpu, &weights)?;
    unfused(gpu, &pool)
}

fn row_ops(gpu: &Gpu, pool: &Pool) -> Result<(), CudaError> {
    let ops = RowOps::new(gpu, Precision::Bf16)?;
    let most = 8192;
    let small = DeviceBuffer::new(1 << 20, "weights and scales")?;
    small.fill(0)?;
    let indices: Vec<u32> = (0..most as u32).collect();
    let index = DeviceBuffer::new(most * 4, "indices")?;
    index.write(0, &indices)?;
    let none = DeviceBuffer::new(most * 4, "no indices")?;
    none.fill(0xff)?;
    let angles = DeviceBuffer::new(most * HEAD_DIM / 2 * 4, "angles")?;
    angles.fill(0)?;
    let cache_bytes = most * 2 * KV_HEADS * HEAD_DIM * 2;
    let cache = DeviceBuffer::new(cache_bytes, "cache")?;
    println!("\n| op | rows | us | GB/s |\n|---|---|---|---|");
    let report = |name: &str, rows: usize, bytes: usize, body: &dyn Fn(DevicePtr) -> Result<(), CudaError>| {
        let us = graph_microseconds(gpu, 40, |turn| body(pool.at(turn, bytes)))?;
        println!("| {name} | {rows} | {us:.2} | {:.0} |", bytes as f64 / us / 1e3);
        Ok::<(), CudaError>(())
    };
    for rows in [1, 16, 64, 256, 1024, 2048, most] {
        let (w, scales) = (small.ptr(), small.ptr() + (512 << 10));
        let (f32_bytes, t_bytes) = (rows * HIDDEN * 4, rows * HIDDEN * 2);
        report("embed", rows, f32_bytes + t_bytes, &|at| {
            // SAFETY: the pool and the tables are large enough for so many rows, and live until the times are taken.
            unsafe {
                ops.embed(
                    gpu,
                    &EmbedArgs {
                        tokens: index.ptr(),
                        from_sampled: none.ptr(),
                        last_tokens: index.ptr(),
                        table: at + f32_bytes as u64,
                        hidden: at,
                        rows,
                        width: HIDDEN,
                    },
                )
            }
        })?;
        let norm = |hidden, delta, out, scales| {
            // SAFETY: the pool and the tables are large enough for so many rows, and live until the times are taken.
            unsafe {
                ops.rms_norm(gpu, &NormArgs { hidden, delta, weight: w, eps: 1e-5, out, scales, rows, width: HIDDEN })
            }
        };
        report("rms_norm", rows, f32_bytes + t_bytes, &|at| norm(at, None, at + f32_bytes as u64, None))?;
        report("add_rms_norm", rows, 2 * f32_bytes + 2 * t_bytes, &|at| {
            let delta = at + f32_bytes as u64;
            norm(at, Some(delta), delta + t_bytes as u64, None)
        })?;
        report("add_rms_norm_fp8", rows, 2 * f32_bytes + t_bytes + t_bytes / 2, &|at| {
            let delta = at + f32_bytes as u64;
            norm(at, Some(delta), delta + t_bytes as u64, Some(scales))
        })?;
        let act = rows * INTER * 2;
        // SAFETY: the pool and the tables are large enough for so many rows, and live until the times are taken.
        report("silu_mul", rows, 3 * act, &|at| unsafe { ops.silu_mul(gpu, at, at + 2 * act as u64, rows, INTER) })?;
        report("silu_mul_fp8", rows, 2 * act + act / 2, &|at| {
            // SAFETY: the pool and the tables are large enough for so many rows, and live until the times are taken.
            unsafe { ops.silu_mul_fp8(gpu, at, at + 2 * act as u64, scales, rows, INTER) }
        })?;
        let (q_and_k, kv) = (rows * (HEADS + KV_HEADS) * HEAD_DIM * 2, rows * KV_HEADS * HEAD_DIM * 2);
        report("rope_kv_write", rows, 2 * q_and_k + 3 * kv, &|at| {
            // SAFETY: the pool and the tables are large enough for so many rows, and live until the times are taken.
            unsafe {
                ops.rope_kv_write(
                    gpu,
                    &RopeArgs {
                        qkv: at,
                        cos: angles.ptr(),
                        sin: angles.ptr(),
                        positions: index.ptr(),
                        slots: index.ptr(),
                        kv: cache.ptr(),
                        rows,
                        heads: HEADS,
                        kv_heads: KV_HEADS,
                        head_dim: HEAD_DIM,
                        tokens_per_block: TOKENS_PER_BLOCK,
                        kv_dtype: KvDtype::Same,
                    },
                )
            }
        })?;
    }
    Ok(())
}

fn sampling(gpu: &Gpu, weights: &WeightOps) -> Result<(), CudaError> {
    let most = 1024;
    let ops = SampleOps::new(gpu, most)?;
    let logits = DeviceBuffer::new(most * VOCAB.max(128_256) * 4, "logits")?;
    // SAFETY: the pool and the tables are large enough for so many rows, and live until the times are taken.
    unsafe { weights.random_normal(gpu, logits.ptr(), Precision::F32, 2, 0, logits.bytes() as u64 / 4, 2.0) }?;
    let draws = DeviceBuffer::new(most * Draw::WORDS * 4, "draws")?;
    let out = DeviceBuffer::new(most * 4, "tokens")?;
    println!("\n| op | rows | vocabulary | us | GB/s once |\n|---|---|---|---|---|");
    let plain = Draw { temperature: 1.0, top_p: 1.0, ..Draw::default() };
    let kinds = [
        ("sample, greedy", Draw { temperature: 0.0, ..plain }),
        ("sample, temperature", plain),
        ("sample, top-k 50", Draw { top_k: 50, ..plain }),
        ("sample, top-p 0.95", Draw { top_p: 0.95, ..plain }),
        ("sample, top-k 50, top-p 0.95", Draw { top_k: 50, top_p: 0.95, ..plain }),
    ];
    for vocab in [VOCAB, 128_256] {
        for rows in [1, 64, 256, most] {
            let report = |name: &str, us: f64| {
                println!("| {name} | {rows} | {vocab} | {us:.2} | {:.0} |", (rows * vocab * 4) as f64 / us / 1e3);
            };
            // SAFETY: the pool and the tables are large enough for so many rows, and live until the times are taken.
            let us =
                graph_microseconds(gpu, 10, |_| unsafe { ops.argmax(gpu, logits.ptr(), vocab, rows, out.ptr(), 0) })?;
            report("argmax", us);
            for (name, draw) in kinds {
                let all: Vec<u32> = (0..most as u64).flat_map(|seed| Draw { seed, ..draw }.words()).collect();
                draws.write(0, &all)?;
                let args = SampleArgs {
                    logits: logits.ptr(),
                    vocab,
                    rows,
                    draws: draws.ptr(),
                    banned: out.ptr(),
                    out: out.ptr(),
                    host: 0,
                };
                // SAFETY: the pool and the tables are large enough for so many rows, and live until the times are taken.
                report(name, graph_microseconds(gpu, 10, |_| unsafe { ops.sample(gpu, &args) })?);
            }
        }
    }
    Ok(())
}

/// One layer of 2048-token prompts.
fn unfused(gpu: &Gpu, pool: &Pool) -> Result<(), CudaError> {
    let config = UnfusedConfig {
        precision: Precision::Bf16,
        kv: KvDtype::Same,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        tokens_per_block: TOKENS_PER_BLOCK,
        latent: None,
        scale: 1.0 / (HEAD_DIM as f32).sqrt(),
    };
    let attention = UnfusedAttention::new(gpu, config)?;
    let length = 2048;
    println!("\n| unfused attention | prompts | us | score GB/s |\n|---|---|---|---|");
    for prompts in [1, 4] {
        let elements = score_elements(HEADS, length, length);
        let blocks = length / TOKENS_PER_BLOCK;
        let spans: Vec<[u32; 4]> =
            (0..prompts).map(|i| [(i * length) as u32, length as u32, length as u32, (i * blocks) as u32]).collect();
        let offsets: Vec<u64> = (0..prompts).map(|i| (i * elements) as u64).collect();
        let tables: Vec<u32> = (0..(prompts * blocks) as u32).collect();
        let table = DeviceBuffer::new(1 << 20, "spans")?;
        table.write(0, &spans)?;
        table.write(4096, &offsets)?;
        table.write(8192, &tables)?;
        let scores = DeviceBuffer::new(prompts * elements * 4, "scores")?;
        let out = DeviceBuffer::new(prompts * length * HEADS * HEAD_DIM * 2, "output")?;
        let args = UnfusedArgs {
            qkv: pool.memory.ptr(),
            kv: pool.memory.ptr() + (POOL / 2) as u64,
            spans: table.ptr(),
            span_count: prompts,
            max_q: length,
            max_kv: length,
            block_tables: table.ptr() + 8192,
            window: 0,
            sinks: 0,
            score_offsets: table.ptr() + 4096,
            scores: scores.ptr(),
            out: out.ptr(),
        };
        // Half of the matrix is never touched; the softmax reads twice, once from the caches, and writes once.
        let seen = (prompts * elements * 4 / 2) as f64;
        type Step = unsafe fn(&UnfusedAttention, &Gpu, &UnfusedArgs) -> Result<(), CudaError>;
        let steps: [(&str, Step, f64); 3] = [
            ("scores", UnfusedAttention::scores, 1.0),
            ("softmax", UnfusedAttention::softmax, 2.0),
            ("values", UnfusedAttention::values, 1.0),
        ];
        for (name, step, passes) in steps {
            // SAFETY: rows, cache, tables and scores are those of these prompts, and live until the times are taken.
            let us = graph_microseconds(gpu, 5, |_| unsafe { step(&attention, gpu, &args) })?;
            println!("| {name} | {prompts} | {us:.1} | {:.0} |", passes * seen / us / 1e3);
        }
    }
    Ok(())
}
