//! Attention through a score matrix in memory.

use strobe_kernels_cpu::{QkvShape, SeqSpan};
use strobe_kernels_cuda::{
    CudaError, KvDtype, Precision, UnfusedArgs, UnfusedAttention, UnfusedConfig, score_elements,
};

use super::rig;
use super::{Outcome, Rig};

/// Probabilities are rounded to 16 bits before the values are summed up.
fn tolerance(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 1e-5,
        Precision::F16 => 2e-3,
        Precision::Bf16 => 1e-2,
    }
}

/// Query heads, kv heads, elements of a key, and of a value where the key's first elements are it.
const SHAPES: [(usize, usize, usize, Option<usize>); 11] = [
    (8, 1, 64, None),
    (4, 2, 128, None),
    (3, 3, 24, None),
    (6, 2, 80, None),
    (2, 1, 256, None),
    (2, 2, 16, None),
    (4, 2, 12, None),
    (2, 1, 70, None),
    (8, 1, 80, Some(64)),
    (4, 1, 20, Some(12)),
    (3, 1, 576, Some(512)),
];

/// Rows and keys of each span.
const MIXES: [&[(usize, usize)]; 5] =
    [&[(1, 1), (5, 5), (64, 64)], &[(70, 70), (3, 130), (2, 0)], &[(65, 200)], &[(130, 513), (1, 700)], &[(257, 257)]];

pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let mut outcomes = Vec::new();
    for precision in Precision::ALL {
        for kv in [KvDtype::Same, KvDtype::Fp8] {
            for &(heads, kv_heads, head_dim, latent) in rig.some(&SHAPES, 4) {
                if kv == KvDtype::Fp8 && (!head_dim.is_multiple_of(8) || latent.is_some()) {
                    continue;
                }
                let shape = QkvShape { heads, kv_heads, head_dim };
                for spans in rig.some(&MIXES, 2) {
                    let window = rig.random.pick(&[0, 0, 1, 9, 100]);
                    let tokens_per_block = rig.random.pick(&[1, 16, 32, 128]);
                    let scale = latent.map_or(1.0 / (head_dim as f32).sqrt(), |_| 0.07);
                    let config =
                        UnfusedConfig { precision, kv, heads, kv_heads, head_dim, tokens_per_block, latent, scale };
                    outcomes.push(one_batch(rig, config, shape, spans, window)?);
                }
            }
        }
    }
    Ok(outcomes)
}

fn one_batch(
    rig: &mut Rig,
    config: UnfusedConfig,
    shape: QkvShape,
    lengths: &[(usize, usize)],
    window: usize,
) -> Result<Outcome, CudaError> {
    let UnfusedConfig { precision, kv, heads, kv_heads, head_dim, tokens_per_block, latent, scale } = config;
    let (parts, value_dim) = (if latent.is_some() { 1 } else { 2 }, config.value_dim());
    let out_row = heads * value_dim;
    let attention = UnfusedAttention::new(rig.gpu, config)?;
    let (mut spans, mut offsets, mut rows, mut blocks, mut elements) = (Vec::new(), Vec::new(), 0, 0, 0);
    for &(q_len, kv_len) in lengths {
        spans.push(SeqSpan {
            q_start: rows as u32,
            q_len: q_len as u32,
            kv_len: kv_len as u32,
            table_start: blocks as u32,
        });
        offsets.push(elements as u64);
        rows += q_len;
        blocks += kv_len.div_ceil(tokens_per_block);
        elements += score_elements(heads, q_len, kv_len);
    }
    let tables = rig.random.permutation(blocks);
    let mut qkv = rig.random.normals(rows * shape.row(), 1.0);
    let mut cache = rig.random.normals(blocks * parts * kv_heads * tokens_per_block * head_dim, 1.0);
    let device_qkv = rig.upload_rounded(&mut qkv, precision)?;
    let device_cache = match kv {
        KvDtype::Same => rig.upload_rounded(&mut cache, precision)?,
        KvDtype::Fp8 => {
            let codes: Vec<u8> = cache.iter().map(|&x| rig::fp8_code(x)).collect();
            cache.iter_mut().zip(&codes).for_each(|(x, &code)| *x = rig::fp8_value(code));
            rig.upload(&codes)?
        }
    };
    let span_words: Vec<[u32; 4]> = spans.iter().map(|s| [s.q_start, s.q_len, s.kv_len, s.table_start]).collect();
    let (device_spans, device_tables) = (rig.upload(&span_words)?, rig.upload(&tables)?);
    let device_offsets = rig.upload(&offsets)?;
    let sinks = if rig.random.below(2) == 0 { Vec::new() } else { rig.random.normals(heads, 4.0) };
    let device_sinks = rig.upload(&sinks)?;
    let scores = rig.output(elements, 4)?;
    let out = rig.output_of(rows * out_row, precision)?;
    let args = UnfusedArgs {
        qkv: device_qkv.ptr(),
        kv: device_cache.ptr(),
        spans: device_spans.ptr(),
        span_count: spans.len(),
        max_q: lengths.iter().map(|l| l.0).max().unwrap_or(0),
        max_kv: lengths.iter().map(|l| l.1).max().unwrap_or(0),
        block_tables: device_tables.ptr(),
        window,
        sinks: if sinks.is_empty() { 0 } else { device_sinks.ptr() },
        score_offsets: device_offsets.ptr(),
        scores: scores.ptr(),
        out: out.ptr(),
    };
    // SAFETY: the batch has rows, cache, tables and scores for its spans, and lives until the result was read.
    unsafe {
        attention.scores(rig.gpu, &args)?;
        attention.softmax(rig.gpu, &args)?;
        attention.values(rig.gpu, &args)?;
    }
    let found = out.read(rig.gpu, precision)?;
    scores.bytes(rig.gpu)?; // looks at the guards

    let mut expected = vec![0.0f32; rows * out_row];
    for span in spans.iter().filter(|span| span.kv_len > 0) {
        let place = |key: usize, which: usize, head: usize| {
            let block = tables[span.table_start as usize + key / tokens_per_block] as usize;
            (((block * parts + which) * kv_heads + head) * tokens_per_block + key % tokens_per_block) * head_dim
        };
        for row in 0..span.q_len as usize {
            let end = (span.kv_len - span.q_len) as usize + row + 1;
            let begin = if window > 0 { end.saturating_sub(window) } else { 0 };
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads);
                let packed = span.q_start as usize + row;
                let q = &qkv[packed * shape.row() + head * head_dim..][..head_dim];
                let score = |key: usize| -> f64 {
                    let k = &cache[place(key, 0, kv_head)..][..head_dim];
                    let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    dot * f64::from(scale)
                };
                let mut weights: Vec<f64> = (begin..end).map(score).collect();
                let sink = sinks.get(head).map_or(f64::NEG_INFINITY, |&sink| f64::from(sink));
                let highest = weights.iter().copied().fold(sink, f64::max);
                weights.iter_mut().for_each(|w| *w = (*w - highest).exp());
                let total: f64 = weights.iter().sum::<f64>() + (sink - highest).exp();
                let mut sums = vec![0.0f64; value_dim];
                for (key, weight) in (begin..end).zip(&weights) {
                    let values = &cache[place(key, parts - 1, kv_head)..][..value_dim];
                    sums.iter_mut().zip(values).for_each(|(sum, v)| *sum += weight * f64::from(*v));
                }
                let target = &mut expected[packed * out_row + head * value_dim..][..value_dim];
                target.iter_mut().zip(&sums).for_each(|(target, sum)| *target = (sum / total) as f32);
            }
        }
    }
    let case = format!(
        "{lengths:?}, {shape:?}, window {window}, blocks of {tokens_per_block}, cache {kv:?}, {} sinks, latent {latent:?}",
        sinks.len()
    );
    let name = ("unfused_attention", precision.suffix());
    Ok(Outcome::compared(name, case, &found, &expected, tolerance(precision)))
}
