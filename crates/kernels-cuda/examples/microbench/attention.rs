//! Fused attention: single rows against the memory's speed, prompts against the tensor cores'.

use strobe_kernels_cuda::{
    Attention, AttentionConfig, CudaError, DecodeArgs, DeviceBuffer, DevicePtr, Gpu, KvDtype, NormArgs, Precision,
    PrefillArgs, RopeAngles, RowOps, Skinny, SkinnyArgs, SkinnyInput, SkinnyOutput,
};

use crate::graph_microseconds;

const BLOCK: usize = 32;

/// Name, query heads, kv heads, elements of a head.
type Model = (&'static str, usize, usize, usize);
const TINYLLAMA: Model = ("tinyllama", 32, 4, 64);
const LLAMA_8B: Model = ("llama-8b", 32, 8, 128);

pub(crate) fn run(gpu: &Gpu) -> Result<(), CudaError> {
    println!("single rows, bf16; bytes are those of keys and values");
    println!("| model | cache | batch | context | splits | us | rotated us | TB/s | by splits: us |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for kv in [KvDtype::Same, KvDtype::Fp8] {
        for (batch, context) in
            [(1, 200), (1, 2048), (1, 32768), (8, 192), (64, 192), (256, 192), (1024, 192), (3000, 192)]
        {
            decode(gpu, TINYLLAMA, kv, batch, context)?;
        }
        for (batch, context) in [(1, 200), (1, 4096), (1, 32768), (64, 4096), (256, 1500), (1024, 256)] {
            decode(gpu, LLAMA_8B, kv, batch, context)?;
        }
    }
    println!("\nprompts, bf16; operations are those of the causal half");
    println!("| model | cache | prompts | tokens | us | TFLOP/s |\n|---|---|---|---|---|---|");
    for model in [TINYLLAMA, LLAMA_8B] {
        for kv in [KvDtype::Same, KvDtype::Fp8] {
            for (prompts, tokens) in [(64, 128), (8, 1000), (1, 2048), (4, 2048), (1, 8192)] {
                prefill(gpu, model, kv, prompts, tokens)?;
            }
        }
    }
    Ok(())
}

/// What single rows cost where a step has them: behind a kernel that lets them begin early.
pub(crate) fn run_chain(gpu: &Gpu) -> Result<(), CudaError> {
    println!("single rows with rotation, bf16, context 192, one graph of 22 layers; us of a layer");
    println!("front is a product of q, k and v, for many rows a norm; behind it is what attention adds to it");
    println!("| model | batch | alone | front | both | behind it | alone, by warps |\n|---|---|---|---|---|---|---|");
    for batch in [1, 8, 64, 256, 1024, 3000] {
        chain(gpu, TINYLLAMA, batch, 192)?;
    }
    for batch in [1, 64, 256] {
        chain(gpu, LLAMA_8B, batch, 192)?;
    }
    Ok(())
}

fn chain(gpu: &Gpu, model: Model, span_count: usize, context: usize) -> Result<(), CudaError> {
    const LAYERS: usize = 22;
    const HIDDEN: usize = 2048;
    let batch = Batch::new(gpu, model, KvDtype::Same, span_count, 1, context)?;
    let angles = DeviceBuffer::new(context * batch.config.head_dim * 2, "angles")?;
    angles.fill(0)?;
    let angles = RopeAngles { cosines: angles.ptr(), sines: angles.ptr() };
    let mut attention = Attention::new(gpu, batch.config)?;
    let splits = attention.splits_for(span_count, context);
    let attend = |attention: &Attention, turn: usize| {
        let args = DecodeArgs {
            qkv: batch.qkv.ptr(),
            q_stride: batch.qkv_width(),
            kv: batch.layer(turn),
            spans: batch.spans.ptr(),
            span_count,
            splits,
            block_tables: batch.tables.ptr(),
            settled: true,
            window: 0,
            sinks: 0,
            out: batch.out.ptr(),
            out_stride: batch.q_width(),
        };
        // SAFETY: the batch has rows, cache and tables for its spans, and lives until the times are taken.
        unsafe { attention.decode_rope(gpu, &args, angles) }
    };
    let (skinny, rows) = (Skinny::new(gpu)?, RowOps::new(gpu, Precision::Bf16)?);
    let zeroes = |bytes: usize| {
        let buffer = DeviceBuffer::new(bytes, "operands of the front")?;
        buffer.fill(0)?;
        Ok::<_, CudaError>(buffer)
    };
    let weight_bytes = batch.qkv_width() * HIDDEN * 2;
    let weights = zeroes(LAYERS * weight_bytes)?;
    let (hidden, norm, x) = (zeroes(span_count * HIDDEN * 4)?, zeroes(HIDDEN * 4)?, zeroes(span_count * HIDDEN * 2)?);
    let front = |turn: usize| {
        let w: DevicePtr = weights.ptr() + (turn % LAYERS * weight_bytes) as u64;
        let (input, out) = (SkinnyInput::Plain(x.ptr()), SkinnyOutput::Store(batch.qkv.ptr()));
        let n = batch.qkv_width();
        let args = SkinnyArgs { input, w, w_scales: None, bias: None, out, m: span_count, n, k: HIDDEN };
        if skinny.supports(&args, Precision::Bf16) {
            // SAFETY: the batch has rows, cache and tables for its spans, and lives until the times are taken.
            unsafe { skinny.run(gpu, &args, Precision::Bf16) }
        } else {
            // SAFETY: the batch has rows, cache and tables for its spans, and lives until the times are taken.
            unsafe {
                rows.rms_norm(
                    gpu,
                    &NormArgs {
                        hidden: hidden.ptr(),
                        delta: None,
                        weight: norm.ptr(),
                        eps: 1e-5,
                        out: x.ptr(),
                        scales: None,
                        rows: span_count,
                        width: HIDDEN,
                    },
                )
            }
        }
    };
    let alone = graph_microseconds(gpu, LAYERS, |turn| attend(&attention, turn))?;
    let front_us = graph_microseconds(gpu, LAYERS, front)?;
    let both = graph_microseconds(gpu, LAYERS, |turn| {
        front(turn)?;
        attend(&attention, turn)
    })?;
    let mut by_warps = Vec::new();
    for warps in [1, 2, 3, 4, 6, 8] {
        attention.set_warps(warps);
        let us = graph_microseconds(gpu, LAYERS, |turn| attend(&attention, turn))?;
        by_warps.push(format!("{warps}: {us:.1}"));
    }
    println!(
        "| {} | {span_count} | {alone:.1} | {front_us:.1} | {both:.1} | {:.1} | {} |",
        model.0,
        both - front_us,
        by_warps.join(", ")
    );
    Ok(())
}

/// Requests with a cache for a few layers, so that no layer finds its keys in L2.
struct Batch {
    config: AttentionConfig,
    layers: usize,
    layer_bytes: usize,
    cache: DeviceBuffer,
    qkv: DeviceBuffer,
    out: DeviceBuffer,
    spans: DeviceBuffer,
    tables: DeviceBuffer,
}

impl Batch {
    fn new(gpu: &Gpu, model: Model, kv: KvDtype, batch: usize, rows: usize, keys: usize) -> Result<Batch, CudaError> {
        let (_, heads, kv_heads, head_dim) = model;
        let config = AttentionConfig {
            precision: Precision::Bf16,
            kv,
            heads,
            kv_heads,
            head_dim,
            tokens_per_block: BLOCK,
            max_spans: batch,
        };
        let blocks = keys.div_ceil(BLOCK);
        let element = if kv == KvDtype::Fp8 { 1 } else { 2 };
        let layer_bytes = batch * blocks * BLOCK * 2 * kv_heads * head_dim * element;
        let layers = (4 * gpu.info().l2_bytes as usize).div_ceil(layer_bytes).clamp(2, 64);
        let cache = DeviceBuffer::new(layers * layer_bytes, "cache")?;
        let qkv = DeviceBuffer::new(batch * rows * (heads + 2 * kv_heads) * head_dim * 2, "qkv")?;
        // Either sign and magnitudes below one, in every type.
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize
        };
        let pattern: Vec<u8> = (0..1 << 20).map(|_| next() as u8 & 0x8f | 0x30).collect();
        for buffer in [&cache, &qkv] {
            for start in (0..buffer.bytes()).step_by(pattern.len()) {
                buffer.write(start, &pattern[..pattern.len().min(buffer.bytes() - start)])?;
            }
        }
        let mut tables: Vec<u32> = (0..(batch * blocks) as u32).collect();
        for i in (1..tables.len()).rev() {
            tables.swap(i, next() % (i + 1));
        }
        let spans: Vec<[u32; 4]> =
            (0..batch).map(|i| [(i * rows) as u32, rows as u32, keys as u32, (i * blocks) as u32]).collect();
        let upload = |data: &[u32], what: &str| {
            let buffer = DeviceBuffer::new(data.len() * 4, what)?;
            buffer.write(0, data)?;
            Ok::<_, CudaError>(buffer)
        };
        Ok(Batch {
            config,
            layers,
            layer_bytes,
            cache,
            qkv,
            out: DeviceBuffer::new(batch * rows * heads * head_dim * 2, "output")?,
            spans: upload(spans.as_flattened(), "spans")?,
            tables: upload(&tables, "block tables")?,
        })
    }

    fn layer(&self, turn: usize) -> u64 {
        self.cache.ptr() + (turn % self.layers * self.layer_bytes) as u64
    }

    fn qkv_width(&self) -> usize {
        (self.config.heads + 2 * self.config.kv_heads) * self.config.head_dim
    }

    fn q_width(&self) -> usize {
        self.config.heads * self.config.head_dim
    }
}

fn cache_name(kv: KvDtype) -> &'static str {
    match kv {
        KvDtype::Same => "bf16",
        KvDtype::Fp8 => "fp8",
    }
}

fn decode(gpu: &Gpu, model: Model, kv: KvDtype, span_count: usize, context: usize) -> Result<(), CudaError> {
    let batch = Batch::new(gpu, model, kv, span_count, 1, context)?;
    let attention = Attention::new(gpu, batch.config)?;
    let half = batch.config.head_dim / 2;
    let angles = DeviceBuffer::new(context * half * 4, "angles")?;
    angles.fill(0)?;
    let angles = RopeAngles { cosines: angles.ptr(), sines: angles.ptr() };
    let args = |turn: usize, splits: usize| DecodeArgs {
        qkv: batch.qkv.ptr(),
        q_stride: batch.qkv_width(),
        kv: batch.layer(turn),
        spans: batch.spans.ptr(),
        span_count,
        splits,
        block_tables: batch.tables.ptr(),
        settled: true,
        window: 0,
        sinks: 0,
        out: batch.out.ptr(),
        out_stride: batch.q_width(),
    };
    let repeats = batch.layers.clamp(8, 24);
    // SAFETY: the batch has rows, cache and tables for its spans, and lives until the times are taken.
    let time =
        |splits: usize| graph_microseconds(gpu, repeats, |turn| unsafe { attention.decode(gpu, &args(turn, splits)) });
    let chosen = attention.splits_for(span_count, context);
    let mut by_splits = Vec::new();
    for splits in [1, 2, 4, 8, 16, 32] {
        // More than a few times what the device can hold at once is refused for want of scratch.
        match time(splits) {
            Ok(us) => by_splits.push(format!("{splits}: {us:.1}")),
            Err(CudaError::Unsupported(_)) => break,
            Err(error) => return Err(error),
        }
        if splits * 256 >= context {
            break;
        }
    }
    let us = time(chosen)?;
    // SAFETY: the batch has rows, cache and tables for its spans, and lives until the times are taken.
    let rotated =
        graph_microseconds(gpu, repeats, |turn| unsafe { attention.decode_rope(gpu, &args(turn, chosen), angles) })?;
    let element = if kv == KvDtype::Fp8 { 1 } else { 2 };
    let bytes = span_count * context * 2 * batch.config.kv_heads * batch.config.head_dim * element;
    println!(
        "| {} | {} | {span_count} | {context} | {chosen} | {us:.1} | {rotated:.1} | {:.2} | {} |",
        model.0,
        cache_name(kv),
        bytes as f64 / us / 1e6,
        by_splits.join(", ")
    );
    Ok(())
}

fn prefill(gpu: &Gpu, model: Model, kv: KvDtype, prompts: usize, tokens: usize) -> Result<(), CudaError> {
    let batch = Batch::new(gpu, model, kv, prompts, tokens, tokens)?;
    let attention = Attention::new(gpu, batch.config)?;
    let mut tiles = Vec::new();
    attention.fill_tiles(&vec![(tokens as u32, tokens as u32); prompts], &mut tiles);
    let device_tiles = DeviceBuffer::new(tiles.len() * 8, "tiles")?;
    device_tiles.write(0, &tiles)?;
    let us = graph_microseconds(gpu, 8, |turn| {
        let args = PrefillArgs {
            qkv: batch.qkv.ptr(),
            q_stride: batch.qkv_width(),
            kv: batch.layer(turn),
            spans: batch.spans.ptr(),
            tiles: device_tiles.ptr(),
            tile_count: tiles.len(),
            block_tables: batch.tables.ptr(),
            window: 0,
            sinks: 0,
            out: batch.out.ptr(),
            out_stride: batch.q_width(),
        };
        // SAFETY: the batch has rows, cache and tables for its spans, and lives until the times are taken.
        unsafe { attention.prefill(gpu, &args) }
    })?;
    let pairs = prompts * tokens * (tokens + 1) / 2;
    let operations = 4.0 * pairs as f64 * batch.q_width() as f64;
    println!("| {} | {} | {prompts} | {tokens} | {us:.1} | {:.0} |", model.0, cache_name(kv), operations / us / 1e6);
    Ok(())
}
