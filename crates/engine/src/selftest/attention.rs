//! Fused attention over the paged cache, against loops in double precision.
//!
//! Whatever no row may see is poison: unused cache blocks, the rest of a request's last block, rows of other requests.

use strobe_kernels_cuda::{
    Attention, AttentionConfig, CudaError, DecodeArgs, DeviceBuffer, DevicePtr, KvDtype, Precision, PrefillArgs,
    RopeAngles, Spent,
};

use super::rig::{decode, encode, fp8_code, fp8_value, round};
use super::{Outcome, Output, Random, Rig};

/// Query heads, kv heads, elements of a head, tokens of a cache block.
type Shape = (usize, usize, usize, usize);

const SHAPES: &[Shape] = &[
    (8, 1, 64, 32),
    (4, 4, 64, 16),
    (14, 2, 64, 1),
    (16, 1, 64, 64),
    (34, 2, 64, 32),
    (8, 1, 64, 4096),
    (4, 2, 128, 32),
    (12, 4, 128, 8),
    (16, 4, 128, 32),
    (16, 1, 128, 2),
    (8, 2, 16, 4),
    (6, 2, 32, 8),
    (5, 1, 48, 2),
    (2, 1, 80, 32),
    (8, 2, 96, 128),
    (4, 1, 160, 32),
    (8, 2, 256, 32),
    (9, 1, 256, 16),
    (2, 2, 8, 32),
    (8, 2, 24, 4),
    (3, 1, 72, 32),
    (4, 2, 12, 16),
    (20, 2, 2, 1),
    (7, 1, 66, 32),
    (3, 1, 250, 8),
];

/// Shape, and keys of each of a few long requests.
const LONG: &[(Shape, &[usize])] = &[
    ((8, 1, 64, 32), &[33_000, 4097, 255, 256, 257]),
    ((4, 1, 128, 32), &[33_003, 16_384]),
    ((16, 1, 128, 16), &[8192, 1]),
];

/// Every shape as prompts, as single rows, and as single rows that are rotated and written on the way.
pub(super) fn check(rig: &mut Rig) -> Result<Vec<Outcome>, CudaError> {
    let mut outcomes = Vec::new();
    for precision in Precision::ALL {
        for kv in [KvDtype::Same, KvDtype::Fp8] {
            let fits = |shape: &Shape| kv == KvDtype::Same || shape.2.is_multiple_of(16);
            for &shape in rig.some(SHAPES, 7).filter(|shape| fits(shape)) {
                let block = shape.3;
                let mut lengths = vec![0, 1, 2, block, block + 1, (3 * block).min(5000), 515];
                lengths.extend((0..3).map(|_| rig.random.between(1, 300)));
                // Padding comes last in a step; anywhere else it must not disturb its neighbours.
                lengths.insert(5, 0);
                lengths.push(0);
                // A window that crosses blocks or is smaller than one, and one that no context fills.
                let some = rig.random.between(1, 80);
                for (window, sinks) in [(0, false), (some, false), (rig.random.pick(&[0, 1, some, 9000]), true)] {
                    let pattern = Pattern { window, sinks };
                    let singles: Vec<_> = lengths.iter().map(|&keys| (1, keys)).collect();
                    check_decode(rig, precision, kv, shape, &singles, pattern, &mut outcomes)?;
                    let mut prompts = vec![(1, 1), (33, 33), (2, 0), (1, 77), (block.min(200), block.min(200))];
                    for _ in 0..2 {
                        let rows = rig.random.between(1, 150);
                        prompts.push((rows, rows + rig.random.below(200)));
                    }
                    check_prefill(rig, precision, kv, shape, &prompts, pattern, &mut outcomes)?;
                }
            }
            for &(shape, lengths) in rig.some(LONG, LONG.len()) {
                let singles: Vec<_> = lengths.iter().map(|&keys| (1, keys)).collect();
                for (window, sinks) in [(0, false), (3001, false), (0, true), (128, true)] {
                    check_decode(rig, precision, kv, shape, &singles, Pattern { window, sinks }, &mut outcomes)?;
                }
            }
            check_spent(rig, config_of(precision, kv, SHAPES[0], 0), &mut outcomes)?;
        }
    }
    Ok(outcomes)
}

fn tolerance(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 1e-5,
        Precision::F16 => 1e-3,
        Precision::Bf16 => 6e-3,
    }
}

fn dtype(config: &AttentionConfig) -> String {
    match config.kv {
        KvDtype::Same => config.precision.suffix().to_string(),
        KvDtype::Fp8 => format!("{}, cache fp8", config.precision.suffix()),
    }
}

/// What a row attends to besides the keys up to its own.
#[derive(Clone, Copy)]
struct Pattern {
    /// Keys that it sees; 0 for all.
    window: usize,
    /// Whether every head has a logit of its own in the softmax.
    sinks: bool,
}

/// Requests with their rows and their cache, on host and device.
struct Batch {
    config: AttentionConfig,
    window: usize,
    /// Of each query head; empty where there are none.
    sinks: Vec<f32>,
    device_sinks: DeviceBuffer,
    /// As the device has them: first row, rows, keys, start of the block table.
    spans: Vec<[u32; 4]>,
    tables: Vec<u32>,
    rows: usize,
    qkv: Vec<f32>,
    cache: Vec<f32>,
    device_spans: DeviceBuffer,
    device_tables: DeviceBuffer,
    device_qkv: DeviceBuffer,
    device_cache: DeviceBuffer,
}

impl Batch {
    /// `requests` are rows and keys; with `fresh` the last key of each is not in the cache yet.
    fn new(
        rig: &mut Rig,
        config: AttentionConfig,
        requests: &[(usize, usize)],
        Pattern { window, sinks }: Pattern,
        fresh: bool,
    ) -> Result<Batch, CudaError> {
        let AttentionConfig { heads, kv_heads, head_dim, tokens_per_block, .. } = config;
        let blocks = requests.iter().map(|(_, keys)| keys.div_ceil(tokens_per_block)).sum::<usize>();
        // Nobody has the first block: what attends to nothing must not depend on it.
        let tables: Vec<u32> = rig.random.permutation(blocks + 1).into_iter().map(|block| block + 1).collect();
        let (mut spans, mut rows, mut start) = (Vec::new(), 0, 0);
        for &(q_len, keys) in requests {
            spans.push([rows as u32, q_len as u32, keys as u32, start as u32]);
            rows += q_len;
            start += keys.div_ceil(tokens_per_block);
        }
        let mut qkv = rig.random.normals(rows * (heads + 2 * kv_heads) * head_dim, 1.0);
        let device_qkv = rig.upload_rounded(&mut qkv, config.precision)?;
        // From lost among the keys to stronger than all of them.
        let sinks = if sinks { rig.random.normals(heads, 4.0) } else { Vec::new() };
        let mut batch = Batch {
            config,
            window,
            device_sinks: rig.upload(&sinks)?,
            sinks,
            rows,
            qkv,
            cache: vec![f32::NAN; (blocks + 2) * 2 * kv_heads * tokens_per_block * head_dim],
            device_spans: rig.upload(&spans)?,
            device_tables: rig.upload(&tables)?,
            device_qkv,
            device_cache: DeviceBuffer::new(1, "nothing yet")?,
            spans,
            tables,
        };
        let values = cache_values(&mut rig.random, &config);
        for span in batch.spans.clone() {
            for key in 0..(span[2] as usize).saturating_sub(usize::from(fresh)) {
                for which in 0..2 * kv_heads {
                    let at = batch.slot(&span, key, which % kv_heads, which / kv_heads);
                    for value in &mut batch.cache[at..at + head_dim] {
                        *value = rig.random.pick(&values);
                    }
                }
            }
        }
        batch.device_cache = rig.upload(&encode_cache(&batch.cache, &config))?;
        Ok(batch)
    }

    fn q_width(&self) -> usize {
        self.config.heads * self.config.head_dim
    }

    fn qkv_width(&self) -> usize {
        (self.config.heads + 2 * self.config.kv_heads) * self.config.head_dim
    }

    /// Where the key (0) or value (1) of a position starts in the cache.
    fn slot(&self, span: &[u32; 4], position: usize, kv_head: usize, which: usize) -> usize {
        let AttentionConfig { kv_heads, head_dim, tokens_per_block, .. } = self.config;
        let block = self.tables[span[3] as usize + position / tokens_per_block] as usize;
        (((block * 2 + which) * kv_heads + kv_head) * tokens_per_block + position % tokens_per_block) * head_dim
    }

    /// What attention should give.
    fn expected(&self) -> Vec<f32> {
        let width = self.q_width();
        let mut out = vec![0f32; self.rows * width];
        let owner: Vec<usize> = self.spans.iter().enumerate().flat_map(|(i, span)| vec![i; span[1] as usize]).collect();
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
        let share = self.rows.div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (part, rows) in out.chunks_mut(share * width).enumerate() {
                let owner = &owner;
                scope.spawn(move || {
                    for (i, out) in rows.chunks_mut(width).enumerate() {
                        let row = part * share + i;
                        self.expected_row(&self.spans[owner[row]], row, out);
                    }
                });
            }
        });
        out
    }

    fn expected_row(&self, span: &[u32; 4], row: usize, out: &mut [f32]) {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = self.config;
        let [q_start, q_len, keys, _] = span.map(|x| x as usize);
        if keys == 0 {
            return;
        }
        let position = keys - q_len + row - q_start;
        let first = if self.window > 0 { (position + 1).saturating_sub(self.window) } else { 0 };
        for (head, out) in out.chunks_mut(head_dim).enumerate() {
            let q = &self.qkv[row * self.qkv_width() + head * head_dim..][..head_dim];
            let kv_head = head / (heads / kv_heads);
            let mut scores: Vec<f64> = (first..=position)
                .map(|key| {
                    let k = &self.cache[self.slot(span, key, kv_head, 0)..][..head_dim];
                    let dot: f64 = q.iter().zip(k).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                    dot / (head_dim as f64).sqrt()
                })
                .collect();
            let sink = self.sinks.get(head).map_or(f64::NEG_INFINITY, |&sink| f64::from(sink));
            let highest = scores.iter().copied().fold(sink, f64::max);
            scores.iter_mut().for_each(|score| *score = (*score - highest).exp());
            let total: f64 = scores.iter().sum::<f64>() + (sink - highest).exp();
            let mut sums = vec![0f64; head_dim];
            for (key, weight) in (first..=position).zip(&scores) {
                let v = &self.cache[self.slot(span, key, kv_head, 1)..][..head_dim];
                for (sum, &value) in sums.iter_mut().zip(v) {
                    *sum += weight / total * f64::from(value);
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = sum as f32;
            }
        }
    }

    /// Where the sinks lie; 0 where there are none.
    fn sinks_ptr(&self) -> DevicePtr {
        if self.sinks.is_empty() { 0 } else { self.device_sinks.ptr() }
    }

    fn decode_args(&self, out: &Output, splits: usize) -> DecodeArgs {
        DecodeArgs {
            qkv: self.device_qkv.ptr(),
            q_stride: self.qkv_width(),
            kv: self.device_cache.ptr(),
            spans: self.device_spans.ptr(),
            span_count: self.spans.len(),
            splits,
            block_tables: self.device_tables.ptr(),
            settled: true,
            window: self.window,
            sinks: self.sinks_ptr(),
            out: out.ptr(),
            out_stride: self.q_width(),
        }
    }

    fn case(&self, what: &str) -> String {
        let AttentionConfig { heads, kv_heads, head_dim, tokens_per_block, .. } = self.config;
        let requests: Vec<String> = self.spans.iter().map(|span| format!("{}/{}", span[1], span[2])).collect();
        format!(
            "{what}heads {heads}/{kv_heads} of {head_dim}, blocks of {tokens_per_block}, window {}{}, rows/keys {}",
            self.window,
            if self.sinks.is_empty() { "" } else { ", sinks" },
            requests.join(" ")
        )
    }
}

/// Numbers to fill a cache with, as it can hold them: drawing each one anew would take long.
fn cache_values(random: &mut Random, config: &AttentionConfig) -> Vec<f32> {
    match config.kv {
        // Up to 3.75 in size: as spread out as the normal numbers of the others.
        KvDtype::Fp8 => (0..4096).map(|_| fp8_value((random.below(0x48) | random.below(2) << 7) as u8)).collect(),
        KvDtype::Same => {
            let mut values = random.normals(4096, 1.0);
            round(&mut values, config.precision);
            values
        }
    }
}

fn encode_cache(values: &[f32], config: &AttentionConfig) -> Vec<u8> {
    match config.kv {
        KvDtype::Same => encode(values, config.precision),
        KvDtype::Fp8 => {
            // Every value is one that a code has, and sign, exponent and three bits of mantissa tell which.
            let mut codes = vec![0x7fu8; 4096];
            for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
                codes[(fp8_value(code).to_bits() >> 20) as usize] = code;
            }
            values.iter().map(|v| codes[(v.to_bits() >> 20) as usize]).collect()
        }
    }
}

fn config_of(
    precision: Precision,
    kv: KvDtype,
    (heads, kv_heads, head_dim, tokens_per_block): Shape,
    max_spans: usize,
) -> AttentionConfig {
    AttentionConfig { precision, kv, heads, kv_heads, head_dim, tokens_per_block, max_spans }
}

fn check_prefill(
    rig: &mut Rig,
    precision: Precision,
    kv: KvDtype,
    shape: Shape,
    requests: &[(usize, usize)],
    pattern: Pattern,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let config = config_of(precision, kv, shape, requests.len());
    let attention = Attention::new(rig.gpu, config)?;
    let batch = Batch::new(rig, config, requests, pattern, false)?;
    let lengths: Vec<(u32, u32)> = batch.spans.iter().map(|span| (span[1], span[2])).collect();
    let mut tiles = Vec::new();
    attention.fill_tiles(&lengths, &mut tiles);
    let device_tiles = rig.upload(&tiles)?;
    let out = rig.output_of(batch.rows * batch.q_width(), precision)?;
    let args = PrefillArgs {
        qkv: batch.device_qkv.ptr(),
        q_stride: batch.qkv_width(),
        kv: batch.device_cache.ptr(),
        spans: batch.device_spans.ptr(),
        tiles: device_tiles.ptr(),
        tile_count: tiles.len(),
        block_tables: batch.device_tables.ptr(),
        window: pattern.window,
        sinks: batch.sinks_ptr(),
        out: out.ptr(),
        out_stride: batch.q_width(),
    };
    // SAFETY: the batch has rows, cache and tables for its spans, and lives until the result was read.
    unsafe { attention.prefill(rig.gpu, &args) }?;
    let found = out.read(rig.gpu, precision)?;
    let name = ("attention, prompts", &*dtype(&config));
    outcomes.push(Outcome::compared(name, batch.case(""), &found, &batch.expected(), tolerance(precision)));
    Ok(())
}

fn check_decode(
    rig: &mut Rig,
    precision: Precision,
    kv: KvDtype,
    shape: Shape,
    requests: &[(usize, usize)],
    pattern: Pattern,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let config = config_of(precision, kv, shape, requests.len());
    let attention = Attention::new(rig.gpu, config)?;
    let batch = Batch::new(rig, config, requests, pattern, false)?;
    let expected = batch.expected();
    let longest = requests.iter().map(|request| request.1).max().unwrap_or(0);
    let chosen = attention.splits_for(requests.len(), longest);
    let out = rig.output_of(batch.rows * batch.q_width(), precision)?;
    let dtype = dtype(&config);
    let mut twice = Vec::new();
    // The second round with the same splits finds the counters as the first one left them.
    for splits in [1, 2, chosen, chosen] {
        out.poison()?;
        // SAFETY: the batch has rows, cache and tables for its spans, and lives until the result was read.
        unsafe { attention.decode(rig.gpu, &batch.decode_args(&out, splits)) }?;
        let found = out.read(rig.gpu, precision)?;
        let case = batch.case(&format!("{splits} splits, "));
        outcomes.push(Outcome::compared(
            ("attention, single rows", &dtype),
            case,
            &found,
            &expected,
            tolerance(precision),
        ));
        twice.push(found);
    }
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let case = batch.case(&format!("{chosen} splits, twice, "));
    let name = ("attention, single rows again", &*dtype);
    outcomes.push(Outcome::exact(name, case, &bits(&twice[2]), &bits(&twice[3])));
    if attention.fuses_rope() {
        check_rope(rig, &attention, config, requests, pattern, outcomes)?;
    }
    Ok(())
}

/// More spans than run at once, where single rows drop what nobody reads any more from L2: that, and nothing beside it.
fn check_spent(rig: &mut Rig, config: AttentionConfig, outcomes: &mut Vec<Outcome>) -> Result<(), CudaError> {
    const ROW: usize = 256;
    const OLD: u8 = 0x11;
    const NEW: u8 = 0x5a;
    let count = 16 * rig.gpu.info().multiprocessors as usize + 50;
    let config = AttentionConfig { max_spans: count, ..config };
    let mut attention = Attention::new(rig.gpu, config)?;
    let requests: Vec<_> = (0..count).map(|_| (1, rig.random.between(1, 70))).collect();
    let batch = Batch::new(rig, config, &requests, Pattern { window: 0, sinks: false }, false)?;
    // The first half of each is spent. Memory has old values of the other one until L2 writes the new ones.
    let buffer = || DeviceBuffer::new(2 * count * ROW, "spent rows");
    let (first, second) = (buffer()?, buffer()?);
    let flood = DeviceBuffer::new(4 * rig.gpu.info().l2_bytes as usize, "more than L2 holds")?;
    first.fill(OLD)?;
    second.fill(OLD)?;
    flood.fill(0)?;
    first.fill(NEW)?;
    second.fill(NEW)?;
    // SAFETY: both live until the result was read, and nobody reads what of them belongs to the spans.
    unsafe {
        attention.set_spent([&first, &second].map(|all| Spent { memory: all.ptr(), bytes: all.bytes(), row: ROW }))
    };
    let out = rig.output_of(batch.rows * batch.q_width(), config.precision)?;
    // SAFETY: the batch has rows, cache and tables for its spans, and lives until the result was read.
    unsafe { attention.decode(rig.gpu, &batch.decode_args(&out, 1)) }?;
    let found = out.read(rig.gpu, config.precision)?;
    let (dtype, case) = (dtype(&config), format!("{count} spans"));
    let name = ("attention, spent rows", &*dtype);
    outcomes.push(Outcome::compared(name, &*case, &found, &batch.expected(), tolerance(config.precision)));
    for all in [first, second] {
        let mut rest = vec![0u8; count * ROW];
        all.read(count * ROW, &mut rest)?;
        outcomes.push(Outcome::exact(name, &*case, &rest, &vec![NEW; count * ROW]));
    }
    Ok(())
}

/// Rotation and cache write folded into attention.
fn check_rope(
    rig: &mut Rig,
    attention: &Attention,
    config: AttentionConfig,
    requests: &[(usize, usize)],
    pattern: Pattern,
    outcomes: &mut Vec<Outcome>,
) -> Result<(), CudaError> {
    let AttentionConfig { precision, heads, kv_heads, head_dim, .. } = config;
    let mut batch = Batch::new(rig, config, requests, pattern, true)?;
    let longest = requests.iter().map(|request| request.1).max().unwrap_or(0).max(1);
    let half = head_dim / 2;
    let angles: Vec<f32> = (0..longest * half).map(|_| rig.random.normal()).collect();
    let (cosines, sines): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
    let (device_cosines, device_sines) = (rig.upload(&cosines)?, rig.upload(&sines)?);
    let out = rig.output_of(batch.rows * batch.q_width(), precision)?;
    let args = batch.decode_args(&out, attention.splits_for(requests.len(), longest));
    let angles = RopeAngles { cosines: device_cosines.ptr(), sines: device_sines.ptr() };
    // SAFETY: the batch has rows, cache and tables for its spans, and lives until the result was read.
    unsafe { attention.decode_rope(rig.gpu, &args, angles) }?;
    let found = out.read(rig.gpu, precision)?;
    let mut bytes = vec![0u8; batch.device_cache.bytes()];
    batch.device_cache.read(0, &mut bytes)?;
    let mut written: Vec<f32> = match config.kv {
        KvDtype::Same => decode(&bytes, precision),
        KvDtype::Fp8 => bytes.iter().map(|&code| fp8_value(code)).collect(),
    };

    // The same on the host: rows are rotated and rounded in place, then keys and values go to the cache.
    let width = batch.qkv_width();
    let (mut found_rows, mut expected_rows) = (Vec::new(), Vec::new());
    for span in batch.spans.clone().iter().filter(|span| span[2] > 0) {
        let position = span[2] as usize - 1;
        let row = &mut batch.qkv[span[0] as usize * width..][..width];
        for head in row[..(heads + kv_heads) * head_dim].chunks_mut(head_dim) {
            for i in 0..half {
                let (c, s) = (cosines[position * half + i], sines[position * half + i]);
                let (a, b) = (head[i], head[i + half]);
                (head[i], head[i + half]) = (a * c - b * s, b * c + a * s);
            }
            round(head, precision);
        }
        for which in 0..2 * kv_heads {
            let from = span[0] as usize * width + (heads + which) * head_dim;
            let mut values = batch.qkv[from..from + head_dim].to_vec();
            if config.kv == KvDtype::Fp8 {
                values.iter_mut().for_each(|v| *v = fp8_value(fp8_code(*v)));
            }
            let at = batch.slot(span, position, which % kv_heads, which / kv_heads);
            found_rows.extend_from_slice(&written[at..at + head_dim]);
            written[at..at + head_dim].copy_from_slice(&values);
            batch.cache[at..at + head_dim].copy_from_slice(&values);
            expected_rows.extend(values);
        }
    }
    let dtype = dtype(&config);
    let name = ("attention with rotation", &*dtype);
    outcomes.push(Outcome::compared(name, batch.case(""), &found, &batch.expected(), tolerance(precision)));
    // A sum that lies between two codes may be rounded either way.
    let tolerance = if config.kv == KvDtype::Fp8 { 1e-2 } else { tolerance(precision) / 4.0 };
    let name = ("attention with rotation, cache", &*dtype);
    outcomes.push(Outcome::compared(name, batch.case(""), &found_rows, &expected_rows, tolerance));
    let same = |(a, b): &(&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let strays = batch.cache.iter().zip(&written).filter(|pair| !same(pair)).count();
    let name = ("attention with rotation, rest of the cache", &*dtype);
    outcomes.push(Outcome::exact(name, batch.case(""), &[strays], &[0]));
    Ok(())
}
