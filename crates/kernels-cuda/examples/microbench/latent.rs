//! Latent attention as in DeepSeek-V3, and windows and sinks as in GPT-OSS.

use strobe_kernels_cuda::{
    Attention, AttentionConfig, CudaError, DecodeArgs, DeviceBuffer, Gpu, KvDtype, LatentConfig, LatentOps, Precision,
    PrefillArgs,
};

use crate::graph_microseconds;

const BLOCK: usize = 32;
/// The cache is read from different places, so that the L2 cache holds little of it.
const PLACES: usize = 4;

pub(crate) fn run(gpu: &Gpu) -> Result<(), CudaError> {
    println!("latent rows of 512 + 64, bf16; bytes are those of the cache");
    println!("| heads | batch | context | splits | us | TB/s | TFLOP/s |\n|---|---|---|---|---|---|---|");
    for heads in [128, 16] {
        for (batch, context) in [(1, 1024), (1, 8192), (1, 65_536), (32, 1024), (32, 8192), (128, 4096)] {
            latent(gpu, heads, batch, 1, context)?;
        }
    }
    println!(
        "\nprompts in the same space\n| heads | prompts | tokens | | us | TB/s | TFLOP/s |\n|---|---|---|---|---|---|---|"
    );
    for (heads, prompts, tokens) in [(128, 1, 1024), (128, 1, 4096), (16, 4, 1024), (16, 1, 4096)] {
        latent(gpu, heads, prompts, tokens, tokens)?;
    }
    println!("\nproducts of 128 heads\n| rows | queries us | values us |\n|---|---|---|");
    for rows in [1, 16, 64, 256, 2048] {
        products(gpu, rows)?;
    }
    println!("\nsingle rows of 64 heads of 64 over 8, bf16; us");
    println!("| batch | context | plain | sinks | window of 128 |\n|---|---|---|---|---|");
    for (batch, context) in [(1, 8192), (64, 200), (64, 8192), (256, 2048)] {
        windows(gpu, batch, context)?;
    }
    Ok(())
}

fn config(heads: usize) -> LatentConfig {
    LatentConfig {
        precision: Precision::Bf16,
        heads,
        latent: 512,
        rotated: 64,
        nope: 128,
        values: 128,
        interleaved: true,
        scale: 0.1,
        tokens_per_block: BLOCK,
        eps: 1e-6,
    }
}

fn zeroes(bytes: usize) -> Result<DeviceBuffer, CudaError> {
    let buffer = DeviceBuffer::new(bytes, "operands")?;
    buffer.fill(0)?;
    Ok(buffer)
}

fn upload(values: &[[u32; 4]]) -> Result<DeviceBuffer, CudaError> {
    let buffer = zeroes(size_of_val(values).max(1))?;
    buffer.write(0, values)?;
    Ok(buffer)
}

/// Spans of `rows` rows each, and their tables, block after block.
fn spans(batch: usize, rows: usize, context: usize) -> Result<(DeviceBuffer, DeviceBuffer), CudaError> {
    let blocks = context.div_ceil(BLOCK);
    let list: Vec<[u32; 4]> = (0..batch).map(|i| [i * rows, rows, context, i * blocks].map(|x| x as u32)).collect();
    let tables: Vec<u32> = (0..(batch * blocks) as u32).collect();
    let device = zeroes(tables.len() * 4)?;
    device.write(0, &tables)?;
    Ok((upload(&list)?, device))
}

fn latent(gpu: &Gpu, heads: usize, batch: usize, rows: usize, context: usize) -> Result<(), CudaError> {
    let config = config(heads);
    let ops = LatentOps::new(gpu, config)?;
    let width = config.key_width();
    let layer = batch * context.next_multiple_of(BLOCK) * width * 2;
    let places = if layer > 1 << 30 { 1 } else { PLACES };
    let cache = zeroes(places * layer)?;
    let q = zeroes(batch * rows * heads * width * 2)?;
    let out = zeroes(batch * rows * heads * config.latent * 2)?;
    let (spans, tables) = spans(batch, rows, context)?;
    let tokens = ops.tokens_per_tile();
    let tiles: Vec<[u32; 2]> = (0..batch as u32)
        .flat_map(|span| (0..rows.div_ceil(tokens) as u32).rev().map(move |tile| [span, tile]))
        .collect();
    let device_tiles = zeroes(tiles.len() * 8)?;
    device_tiles.write(0, &tiles)?;
    let splits = ops.splits_for(batch, context);
    let kv = |turn: usize| cache.ptr() + (turn % places * layer) as u64;
    let us = graph_microseconds(gpu, PLACES, |turn| {
        if rows > 1 {
            let args = PrefillArgs {
                qkv: q.ptr(),
                q_stride: heads * width,
                kv: kv(turn),
                spans: spans.ptr(),
                tiles: device_tiles.ptr(),
                tile_count: tiles.len(),
                block_tables: tables.ptr(),
                window: 0,
                sinks: 0,
                out: out.ptr(),
                out_stride: heads * config.latent,
            };
            // SAFETY: all of it was made for so many rows and keys, and lives until the times are taken.
            return unsafe { ops.prefill(gpu, &args) };
        }
        let args = DecodeArgs {
            qkv: q.ptr(),
            q_stride: heads * width,
            kv: kv(turn),
            spans: spans.ptr(),
            span_count: batch,
            splits,
            block_tables: tables.ptr(),
            settled: true,
            window: 0,
            sinks: 0,
            out: out.ptr(),
            out_stride: heads * config.latent,
        };
        // SAFETY: all of it was made for so many rows and keys, and lives until the times are taken.
        unsafe { ops.decode(gpu, &args) }
    })?;
    let pairs = batch as f64 * (rows * (2 * context - rows + 1)) as f64 / 2.0;
    let flops = 2.0 * heads as f64 * (width + config.latent) as f64 * pairs;
    let splits = if rows > 1 { String::new() } else { splits.to_string() };
    println!(
        "| {heads} | {batch} | {context} | {splits} | {us:.1} | {:.2} | {:.0} |",
        layer as f64 / us / 1e6,
        flops / us / 1e6
    );
    Ok(())
}

fn products(gpu: &Gpu, rows: usize) -> Result<(), CudaError> {
    let config = config(128);
    let ops = LatentOps::new(gpu, config)?;
    let (heads, width) = (config.heads, config.key_width());
    let weights = heads * 512 * 128 * 2;
    let (weight, projected) = (zeroes(PLACES * weights)?, zeroes(rows * heads * 192 * 2)?);
    let (q, out) = (zeroes(rows * heads * width * 2)?, zeroes(rows * heads * 128 * 2)?);
    let at = |turn: usize| weight.ptr() + (turn % PLACES * weights) as u64;
    let queries = graph_microseconds(gpu, PLACES, |turn| {
        // SAFETY: all of it was made for so many rows and keys, and lives until the times are taken.
        unsafe { ops.queries(gpu, projected.ptr(), at(turn), q.ptr(), heads * width, rows) }
    })?;
    // SAFETY: all of it was made for so many rows and keys, and lives until the times are taken.
    let values =
        graph_microseconds(gpu, PLACES, |turn| unsafe { ops.values(gpu, q.ptr(), at(turn), out.ptr(), rows) })?;
    println!("| {rows} | {queries:.1} | {values:.1} |");
    Ok(())
}

fn windows(gpu: &Gpu, batch: usize, context: usize) -> Result<(), CudaError> {
    let (heads, kv_heads, head_dim) = (64, 8, 64);
    let config = AttentionConfig {
        precision: Precision::Bf16,
        kv: KvDtype::Same,
        heads,
        kv_heads,
        head_dim,
        tokens_per_block: BLOCK,
        max_spans: batch,
    };
    let attention = Attention::new(gpu, config)?;
    let layer = batch * context.next_multiple_of(BLOCK) * 2 * kv_heads * head_dim * 2;
    let cache = zeroes(PLACES * layer)?;
    let (q_width, qkv_width) = (heads * head_dim, (heads + 2 * kv_heads) * head_dim);
    let (qkv, out, sinks) = (zeroes(batch * qkv_width * 2)?, zeroes(batch * q_width * 2)?, zeroes(heads * 4)?);
    let (spans, tables) = spans(batch, 1, context)?;
    let time = |window: usize, sinks: u64| {
        let most = if window > 0 { window.min(context) } else { context };
        let splits = attention.splits_for(batch, most);
        graph_microseconds(gpu, PLACES, |turn| {
            let args = DecodeArgs {
                qkv: qkv.ptr(),
                q_stride: qkv_width,
                kv: cache.ptr() + (turn % PLACES * layer) as u64,
                spans: spans.ptr(),
                span_count: batch,
                splits,
                block_tables: tables.ptr(),
                settled: true,
                window,
                sinks,
                out: out.ptr(),
                out_stride: q_width,
            };
            // SAFETY: all of it was made for so many rows and keys, and lives until the times are taken.
            unsafe { attention.decode(gpu, &args) }
        })
    };
    let (plain, with_sinks, windowed) = (time(0, 0)?, time(0, sinks.ptr())?, time(128, sinks.ptr())?);
    println!("| {batch} | {context} | {plain:.1} | {with_sinks:.1} | {windowed:.1} |");
    Ok(())
}
