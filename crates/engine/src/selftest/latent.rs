//! Latent attention and the ops around it, against loops in double precision.
//!
//! Cache rows that no row may see are poison, as in the check of plain attention.

use strobe_kernels_cuda::{CudaError, DecodeArgs, LatentConfig, LatentKeysArgs, LatentOps, Precision, PrefillArgs};

use super::rig::round;
use super::{Outcome, Rig};

/// Heads, widths of the latent vector, the rotated part, the rest of a query and a value, tokens of a cache block.
type Shape = (usize, usize, usize, usize, usize, usize);

const SHAPES: &[Shape] = &[
    (128, 512, 64, 128, 128, 32),
    (16, 512, 64, 128, 128, 16),
    (8, 64, 16, 32, 32, 4),
    (4, 12, 8, 10, 14, 2),
    (5, 24, 8, 16, 24, 1),
    (70, 128, 32, 40, 22, 64),
    (33, 512, 64, 24, 10, 4096),
    (1, 8, 8, 8, 8, 8),
    (3, 510, 62, 6, 2, 32),
];

/// Heads of the wide shapes above, and keys of a few long requests.
const LONG: &[(Shape, &[usize])] =
    &[((16, 512, 64, 128, 128, 32), &[9001, 1, 1025]), ((128, 512, 64, 128, 128, 16), &[4100, 127])];

pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let mut outcomes = Vec::new();
    for precision in Precision::ALL {
        for &shape in rig.some(SHAPES, 3) {
            let config = config_of(rig, precision, shape);
            let ops = LatentOps::new(rig.gpu, config)?;
            for &rows in rig.some(&[7, 1, 65], 3) {
                around(rig, &ops, config, rows, &mut outcomes)?;
            }
            let block = shape.5.min(200);
            let prompts = [(1, 1), (33, 33), (2, 0), (1, 77), (block, block + 3), (17, rig.random.between(17, 200))];
            prefill(rig, &ops, config, &prompts, &mut outcomes)?;
            let singles: Vec<_> = [0, 1, 2, block, block + 1, 515, rig.random.between(1, 300)].map(|n| (1, n)).into();
            single_rows(rig, &ops, config, &singles, &mut outcomes)?;
        }
        for &(shape, lengths) in rig.some(LONG, LONG.len()) {
            let config = config_of(rig, precision, shape);
            let ops = LatentOps::new(rig.gpu, config)?;
            let singles: Vec<_> = lengths.iter().map(|&keys| (1, keys)).collect();
            single_rows(rig, &ops, config, &singles, &mut outcomes)?;
        }
    }
    Ok(outcomes)
}

fn config_of(
    rig: &mut Rig,
    precision: Precision,
    (heads, latent, rotated, nope, values, tokens_per_block): Shape,
) -> LatentConfig {
    let interleaved = rig.random.below(2) == 0;
    // Scores of about the size that trained models have.
    let scale = 1.0 / ((latent + rotated) as f32).sqrt();
    LatentConfig { precision, heads, latent, rotated, nope, values, interleaved, scale, tokens_per_block, eps: 1e-6 }
}

fn tolerance(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 1e-5,
        Precision::F16 => 1e-3,
        Precision::Bf16 => 6e-3,
    }
}

fn case(config: &LatentConfig, what: &str) -> String {
    let LatentConfig { heads, latent, rotated, nope, values, tokens_per_block, interleaved, .. } = *config;
    let pairs = if interleaved { "side by side" } else { "apart" };
    format!(
        "{heads} heads of {latent} + {rotated}, from {nope}, to {values}, pairs {pairs}, blocks of {tokens_per_block}, {what}"
    )
}

/// Norm, products of heads, rotation and cache write.
fn around(
    rig: &mut Rig,
    ops: &LatentOps,
    config: LatentConfig,
    rows: usize,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let LatentConfig { precision, heads, latent, rotated, nope, values, interleaved, eps, .. } = config;
    let (width, query, pairs) = (latent + rotated, nope + rotated, rotated / 2);
    let text = case(&config, &format!("{rows} rows"));
    let suffix = precision.suffix();
    let mut compare = |op: &str, found: &[f32], expected: &[f32]| {
        outcomes.push(Outcome::compared((op, suffix), text.clone(), found, expected, tolerance(precision)));
    };
    let gpu = rig.gpu;
    let norm_of = |x: &[f32], weight: &[f32]| -> Vec<f32> {
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + f64::from(eps)).sqrt();
        x.iter().zip(weight).map(|(x, w)| (f64::from(*x) * factor * f64::from(*w)) as f32).collect()
    };

    let mut x = rig.random.normals(rows * latent, 1.5);
    let weight = rig.random.normals(latent, 1.0);
    let (device_x, device_weight) = (rig.upload_rounded(&mut x, precision)?, rig.upload(&weight)?);
    let out = rig.output_of(rows * latent, precision)?;
    // SAFETY: the batch has rows, cache and tables for its spans, and lives until the result was read.
    unsafe { ops.norm(gpu, device_x.ptr(), device_weight.ptr(), out.ptr(), rows, latent) }?;
    let expected: Vec<f32> = x.chunks(latent).flat_map(|x| norm_of(x, &weight)).collect();
    compare("latent norm", &out.read(gpu, precision)?, &expected);

    // Queries into the latent space, their rotated part, and the token's row of the cache.
    let mut projected = rig.random.normals(rows * heads * query, 1.0);
    let mut keys = rig.random.normals(heads * latent * nope, (nope as f32).powf(-0.5));
    let mut kv_latent = rig.random.normals(rows * width, 1.0);
    let device_projected = rig.upload_rounded(&mut projected, precision)?;
    let device_keys = rig.upload_rounded(&mut keys, precision)?;
    let device_kv = rig.upload_rounded(&mut kv_latent, precision)?;
    let q_stride = (heads + 2) * width;
    let q = rig.output_of(rows * q_stride, precision)?;
    // SAFETY: the batch has rows, cache and tables for its spans, and lives until the result was read.
    unsafe { ops.queries(gpu, device_projected.ptr(), device_keys.ptr(), q.ptr(), q_stride, rows) }?;
    let positions: Vec<u32> = (0..rows).map(|_| rig.random.below(50) as u32).collect();
    let mut slots = rig.random.permutation(rows + 3);
    slots.truncate(rows);
    if rows > 1 {
        slots[rows / 2] = u32::MAX; // a padding row
    }
    let angles = rig.random.normals(50 * width / 2, 2.0);
    let (cosines, sines): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
    let cache = rig.output_of((rows + 3) * width, precision)?;
    let (device_cosines, device_sines) = (rig.upload(&cosines)?, rig.upload(&sines)?);
    let (device_positions, device_slots) = (rig.upload(&positions)?, rig.upload(&slots)?);
    let args = LatentKeysArgs {
        kv_latent: device_kv.ptr(),
        norm: device_weight.ptr(),
        queries: device_projected.ptr(),
        q: q.ptr(),
        q_stride,
        cosines: device_cosines.ptr(),
        sines: device_sines.ptr(),
        angle_stride: width / 2,
        positions: device_positions.ptr(),
        slots: device_slots.ptr(),
        kv: cache.ptr(),
        rows,
    };
    // SAFETY: the batch has rows, cache and tables for its spans, and lives until the result was read.
    unsafe { ops.keys(gpu, &args) }?;
    let rotate = |x: &[f32], row: usize| -> Vec<f32> {
        let mut turned = vec![0f32; rotated];
        for i in 0..pairs {
            let (a, b) = if interleaved { (x[2 * i], x[2 * i + 1]) } else { (x[i], x[i + pairs]) };
            let at = positions[row] as usize * (width / 2) + i;
            turned[i] = a * cosines[at] - b * sines[at];
            turned[i + pairs] = b * cosines[at] + a * sines[at];
        }
        turned
    };
    let product = |x: &[f32], w: &[f32]| -> Vec<f32> {
        let dot = |w: &[f32]| x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32;
        w.chunks(x.len()).map(dot).collect()
    };
    let (mut expected_q, mut found_q) = (Vec::new(), Vec::new());
    let read = q.read(gpu, precision)?;
    for row in 0..rows {
        for head in 0..heads {
            let x = &projected[(row * heads + head) * query..][..query];
            expected_q.extend(product(&x[..nope], &keys[head * latent * nope..][..latent * nope]));
            expected_q.extend(rotate(&x[nope..], row));
        }
        found_q.extend_from_slice(&read[row * q_stride..][..heads * width]);
    }
    compare("latent queries", &found_q, &expected_q);
    let strays = read.chunks(q_stride).flat_map(|row| &row[heads * width..]).filter(|v| !v.is_nan()).count();
    let (mut expected, mut found, mut written) = (Vec::new(), Vec::new(), vec![false; rows + 3]);
    let read = cache.read(gpu, precision)?;
    for (row, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot != u32::MAX) {
        let x = &kv_latent[row * width..][..width];
        expected.extend(norm_of(&x[..latent], &weight));
        expected.extend(rotate(&x[latent..], row));
        found.extend_from_slice(&read[slot as usize * width..][..width]);
        written[slot as usize] = true;
    }
    compare("latent keys", &found, &expected);
    let others = read.chunks(width).zip(&written).filter(|(_, written)| !**written);
    let strays = strays + others.flat_map(|(row, _)| row).filter(|v| !v.is_nan()).count();

    let mut attention = rig.random.normals(rows * heads * latent, 1.0);
    let mut back = rig.random.normals(heads * values * latent, (latent as f32).powf(-0.5));
    let device_attention = rig.upload_rounded(&mut attention, precision)?;
    let device_back = rig.upload_rounded(&mut back, precision)?;
    let out = rig.output_of(rows * heads * values, precision)?;
    // SAFETY: the batch has rows, cache and tables for its spans, and lives until the result was read.
    unsafe { ops.values(gpu, device_attention.ptr(), device_back.ptr(), out.ptr(), rows) }?;
    let expected: Vec<f32> = (0..rows * heads)
        .flat_map(|i| {
            product(&attention[i * latent..][..latent], &back[i % heads * values * latent..][..values * latent])
        })
        .collect();
    compare("latent values", &out.read(gpu, precision)?, &expected);
    outcomes.push(Outcome::exact(("latent keys, the rest", suffix), text, &[strays], &[0]));
    Ok(())
}

/// Requests with their rows and their cache.
struct Batch {
    config: LatentConfig,
    spans: Vec<[u32; 4]>,
    tables: Vec<u32>,
    rows: usize,
    q: Vec<f32>,
    cache: Vec<f32>,
}

impl Batch {
    /// `requests` are rows and keys.
    fn new(rig: &mut Rig, config: LatentConfig, requests: &[(usize, usize)]) -> Batch {
        let (width, block) = (config.key_width(), config.tokens_per_block);
        let blocks = requests.iter().map(|(_, keys)| keys.div_ceil(block)).sum::<usize>();
        let tables = rig.random.permutation(blocks + 2);
        let (mut spans, mut rows, mut start) = (Vec::new(), 0, 0);
        for &(q_len, keys) in requests {
            spans.push([rows as u32, q_len as u32, keys as u32, start as u32]);
            rows += q_len;
            start += keys.div_ceil(block);
        }
        let mut q = rig.random.normals(rows * config.heads * width, 1.0);
        round(&mut q, config.precision);
        let mut values = rig.random.normals(4096, 1.0);
        round(&mut values, config.precision);
        let cache = vec![f32::NAN; (blocks + 2) * block * width];
        let mut batch = Batch { config, spans, tables, rows, q, cache };
        for span in batch.spans.clone() {
            for key in 0..span[2] as usize {
                let at = batch.slot(&span, key);
                for value in &mut batch.cache[at..at + width] {
                    *value = rig.random.pick(&values);
                }
            }
        }
        batch
    }

    fn slot(&self, span: &[u32; 4], key: usize) -> usize {
        let block = self.config.tokens_per_block;
        let number = self.tables[span[3] as usize + key / block] as usize;
        (number * block + key % block) * self.config.key_width()
    }

    fn expected(&self) -> Vec<f32> {
        let width = self.config.heads * self.config.latent;
        let mut out = vec![0f32; self.rows * width];
        let owner: Vec<usize> = self.spans.iter().enumerate().flat_map(|(i, span)| vec![i; span[1] as usize]).collect();
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
        // Neighbours have requests of about the same length: a thread takes one here and one there.
        let mut shares: Vec<Vec<(usize, &mut [f32])>> = (0..threads).map(|_| Vec::new()).collect();
        for (i, head) in out.chunks_mut(self.config.latent).enumerate() {
            shares[i % threads].push((i, head));
        }
        std::thread::scope(|scope| {
            for share in shares {
                let owner = &owner;
                scope.spawn(move || {
                    for (i, out) in share {
                        let row = i / self.config.heads;
                        self.expected_head(&self.spans[owner[row]], row, i % self.config.heads, out);
                    }
                });
            }
        });
        out
    }

    fn expected_head(&self, span: &[u32; 4], row: usize, head: usize, out: &mut [f32]) {
        let LatentConfig { heads, latent, scale, .. } = self.config;
        let width = self.config.key_width();
        let [q_start, q_len, keys, _] = span.map(|x| x as usize);
        if keys == 0 {
            return;
        }
        let position = keys - q_len + row - q_start;
        let q = &self.q[(row * heads + head) * width..][..width];
        let key = |key: usize| &self.cache[self.slot(span, key)..][..width];
        let dot = |k: &[f32]| q.iter().zip(k).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        let mut weights: Vec<f64> = (0..=position).map(|k| dot(key(k)) * f64::from(scale)).collect();
        let highest = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        weights.iter_mut().for_each(|w| *w = (*w - highest).exp());
        let total: f64 = weights.iter().sum();
        let mut sums = vec![0f64; latent];
        for (k, weight) in weights.iter().enumerate() {
            sums.iter_mut().zip(key(k)).for_each(|(sum, &v)| *sum += weight / total * f64::from(v));
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum as f32);
    }

    fn case(&self, what: &str) -> String {
        let requests: Vec<String> = self.spans.iter().map(|span| format!("{}/{}", span[1], span[2])).collect();
        case(&self.config, &format!("{what}rows/keys {}", requests.join(" ")))
    }
}

fn prefill(
    rig: &mut Rig,
    ops: &LatentOps,
    config: LatentConfig,
    requests: &[(usize, usize)],
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let mut batch = Batch::new(rig, config, requests);
    let LatentConfig { precision, heads, latent, .. } = config;
    let tokens = ops.tokens_per_tile() as u32;
    let tiles: Vec<[u32; 2]> = (0u32..)
        .zip(&batch.spans)
        .flat_map(|(index, span)| (0..span[1].div_ceil(tokens)).map(move |tile| [index, tile]))
        .collect();
    let (q, cache) = (rig.upload_rounded(&mut batch.q, precision)?, rig.upload_rounded(&mut batch.cache, precision)?);
    let (spans, tables) = (rig.upload(&batch.spans)?, rig.upload(&batch.tables)?);
    let device_tiles = rig.upload(&tiles)?;
    let out = rig.output_of(batch.rows * heads * latent, precision)?;
    let args = PrefillArgs {
        qkv: q.ptr(),
        q_stride: heads * config.key_width(),
        kv: cache.ptr(),
        spans: spans.ptr(),
        tiles: device_tiles.ptr(),
        tile_count: tiles.len(),
        block_tables: tables.ptr(),
        window: 0,
        sinks: 0,
        out: out.ptr(),
        out_stride: heads * latent,
    };
    // SAFETY: the batch has rows, cache and tables for its spans, and lives until the result was read.
    unsafe { ops.prefill(rig.gpu, &args) }?;
    let found = out.read(rig.gpu, precision)?;
    let name = ("latent attention, prompts", precision.suffix());
    outcomes.push(Outcome::compared(name, batch.case(""), &found, &batch.expected(), tolerance(precision)));
    Ok(())
}

fn single_rows(
    rig: &mut Rig,
    ops: &LatentOps,
    config: LatentConfig,
    requests: &[(usize, usize)],
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let mut batch = Batch::new(rig, config, requests);
    let LatentConfig { precision, heads, latent, .. } = config;
    let (q, cache) = (rig.upload_rounded(&mut batch.q, precision)?, rig.upload_rounded(&mut batch.cache, precision)?);
    let (spans, tables) = (rig.upload(&batch.spans)?, rig.upload(&batch.tables)?);
    let out = rig.output_of(batch.rows * heads * latent, precision)?;
    let expected = batch.expected();
    let longest = requests.iter().map(|request| request.1).max().unwrap_or(0);
    let chosen = ops.splits_for(requests.len(), longest);
    for splits in [1, 3.min(ops.splits_for(requests.len(), 1 << 20)), chosen] {
        out.poison()?;
        let args = DecodeArgs {
            qkv: q.ptr(),
            q_stride: heads * config.key_width(),
            kv: cache.ptr(),
            spans: spans.ptr(),
            span_count: requests.len(),
            splits,
            block_tables: tables.ptr(),
            settled: true,
            window: 0,
            sinks: 0,
            out: out.ptr(),
            out_stride: heads * latent,
        };
        // SAFETY: the batch has rows, cache and tables for its spans, and lives until the result was read.
        unsafe { ops.decode(rig.gpu, &args) }?;
        let found = out.read(rig.gpu, precision)?;
        let text = batch.case(&format!("{splits} splits, "));
        let name = ("latent attention, single rows", precision.suffix());
        outcomes.push(Outcome::compared(name, text, &found, &expected, tolerance(precision)));
    }
    Ok(())
}
