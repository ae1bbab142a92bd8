//! Kernels of the CPU: timed with operands that no cache holds, as in a model of many layers, and checked against the
//! scalar tier.

use anyhow::{Result, bail};
use half::{bf16, f16};
use strobe_engine::memory;
use strobe_kernels_cpu::{
    Activation, AlignedBuf, AttnBatch, Cpu, Elems, KvGeometry, KvLayer, KvType, Layout, Matrix, QkvShape, QuantKind,
    QuantRows, RopeTable, SeqSpan, Tier, packed_bytes, packed_len,
};
use strobe_report::human;

use super::cases::{Case, Kind, Op, Shape};
use super::{Ceiling, Measured, Times, deviation, noise, sample, sample_ways, spread_rows};

/// Operands are repeated until they are larger than any cache but the largest.
const FRESH_BYTES: usize = 256 << 20;
/// Multiply-adds that the oracle may take for one case.
const ORACLE_WORK: usize = 1 << 27;
/// Rows that the oracle computes at most: the others run the same code.
const ORACLE_ROWS: usize = 8;
/// Scores that naive attention may keep.
const MOST_SCORES_BYTES: usize = 1 << 30;
const TOKENS_PER_BLOCK: usize = 32;
const EPS: f32 = 1e-5;

/// The CPU under test and its oracle.
pub(super) struct Bench {
    pub cpu: Cpu,
    oracle: Cpu,
    /// What all threads are compared with.
    alone: Option<Cpu>,
    repeats: usize,
}

/// Copies of one operand side by side, of which each run takes the next.
struct Cold<T: bytemuck::Pod> {
    data: AlignedBuf<T>,
    len: usize,
}

impl<T: bytemuck::Pod> Cold<T> {
    fn new(len: usize, fill: impl FnOnce(&mut [T])) -> Cold<T> {
        let copies = FRESH_BYTES.div_ceil(len * size_of::<T>());
        let mut data = AlignedBuf::zeroed(copies * len);
        fill(&mut data[..len]);
        for copy in 1..copies {
            data.copy_within(..len, copy * len);
        }
        Cold { data, len }
    }

    fn noise(len: usize) -> Cold<f32> {
        Cold::new(len, |values| values.iter_mut().enumerate().for_each(|(i, x)| *x = noise(1, i)))
    }

    fn start(&self, turn: usize) -> usize {
        turn % (self.data.len() / self.len) * self.len
    }

    fn copy(&self, turn: usize) -> &[T] {
        &self.data[self.start(turn)..][..self.len]
    }

    fn copy_mut(&mut self, turn: usize) -> &mut [T] {
        let start = self.start(turn);
        &mut self.data[start..][..self.len]
    }
}

/// Packed random weights.
enum Weights {
    F32(Cold<f32>),
    F16(Cold<f16>),
    Bf16(Cold<bf16>),
    Int8(Cold<u8>),
    Int4(Cold<u8>),
}

impl Weights {
    fn random(cpu: &mut Cpu, kind: Kind, n: usize, k: usize) -> Weights {
        let len = packed_len(n, k);
        let value = |row: usize, column: usize| 0.5 * noise(2, row * k + column);
        let mut quantised = |kind: QuantKind| {
            Cold::new(packed_bytes(kind, n, k), |w| cpu.quantize(kind, |r, v| fill(v, |c| value(r, c)), n, k, w))
        };
        match kind {
            Kind::Int8 => Weights::Int8(quantised(QuantKind::Int8)),
            Kind::Int4 => Weights::Int4(quantised(QuantKind::Int4)),
            Kind::Float32 => Weights::F32(Cold::new(len, |w| cpu.pack(|r, v| fill(v, |c| value(r, c)), n, k, w))),
            Kind::Float16 => {
                Weights::F16(Cold::new(len, |w| cpu.pack(|r, v| fill(v, |c| f16::from_f32(value(r, c))), n, k, w)))
            }
            Kind::Bfloat16 => {
                Weights::Bf16(Cold::new(len, |w| cpu.pack(|r, v| fill(v, |c| bf16::from_f32(value(r, c))), n, k, w)))
            }
        }
    }

    fn copy(&self, turn: usize) -> Elems<'_> {
        match self {
            Weights::F32(cold) => Elems::F32(cold.copy(turn)),
            Weights::F16(cold) => Elems::F16(cold.copy(turn)),
            Weights::Bf16(cold) => Elems::Bf16(cold.copy(turn)),
            Weights::Int8(cold) => Elems::Int8(cold.copy(turn)),
            Weights::Int4(cold) => Elems::Int4(cold.copy(turn)),
        }
    }

    /// Bytes of one copy.
    fn bytes(&self) -> usize {
        match self {
            Weights::F32(cold) => size_of_val(cold.copy(0)),
            Weights::F16(cold) => size_of_val(cold.copy(0)),
            Weights::Bf16(cold) => size_of_val(cold.copy(0)),
            Weights::Int8(cold) | Weights::Int4(cold) => cold.len,
        }
    }
}

fn fill<T>(values: &mut [T], value: impl Fn(usize) -> T) {
    values.iter_mut().enumerate().for_each(|(i, v)| *v = value(i));
}

fn kv_type(kind: Kind) -> KvType {
    match kind {
        Kind::Float32 => KvType::F32,
        Kind::Bfloat16 => KvType::Bf16,
        Kind::Float16 => KvType::F16,
        Kind::Int8 | Kind::Int4 => KvType::Int8,
    }
}

impl Bench {
    pub(super) fn new(cpu: Cpu, repeats: usize, scaling: bool) -> Bench {
        let oracle = Cpu::new(Tier::Scalar, cpu.threads());
        let alone = scaling.then(|| Cpu::new(cpu.tier(), 1));
        Bench { cpu, oracle, alone, repeats }
    }

    /// Refuse what would not fit into memory, before anything runs.
    pub(super) fn check(&self, case: &Case) -> Result<()> {
        let fresh = |bytes: f64| bytes.max(FRESH_BYTES as f64) + bytes;
        let needed = match case.shape {
            Shape::Product { m, n, k } => fresh(4.0 * n as f64 * k as f64) + 8.0 * m as f64 * (n + k) as f64,
            Shape::Attention { sequences, q_len, kv_len, heads, kv_heads, head_dim } => {
                let positions = sequences as f64 * (kv_len + q_len) as f64;
                fresh(positions * 8.0 * (kv_heads * head_dim) as f64)
                    + positions * 8.0 * (heads + 2 * kv_heads) as f64 * head_dim as f64
                    + MOST_SCORES_BYTES as f64
            }
            Shape::Rows { rows, width } => 4.0 * fresh(4.0 * rows as f64 * width as f64),
        };
        match memory::available() {
            Some(available) if needed > available.bytes as f64 => bail!(
                "{} needs about {} of memory, and {} are available; give a smaller shape",
                case.describe(),
                human::bytes(needed as u64),
                human::bytes(available.bytes)
            ),
            _ => Ok(()),
        }
    }

    pub(super) fn run(&mut self, case: &Case) -> Result<Measured> {
        let kind = case.dtype.unwrap_or(Kind::Float32);
        match (case.op, case.shape) {
            (Op::GateUp, Shape::Product { m, n, k }) => self.gate_up(kind, m, n, k),
            (_, Shape::Product { m, n, k }) => self.product(kind, m, n, k),
            (Op::Rope, Shape::Attention { .. }) => self.rope(kind, case.shape),
            (_, Shape::Attention { .. }) => self.attention(kind, case.shape),
            (Op::Norm, Shape::Rows { rows, width }) => self.norm(rows, width),
            (Op::AddNorm, Shape::Rows { rows, width }) => self.add_norm(rows, width),
            (Op::Silu, Shape::Rows { rows, width }) => self.silu(rows, width),
            (_, Shape::Rows { rows, width }) => self.argmax(rows, width),
        }
    }

    fn product(&mut self, kind: Kind, m: usize, n: usize, k: usize) -> Result<Measured> {
        let weights = Weights::random(&mut self.cpu, kind, n, k);
        let matrix = |turn: usize| Matrix { data: weights.copy(turn), n, k, layout: Layout::Packed };
        let x: Vec<f32> = (0..m * k).map(|i| noise(3, i)).collect();
        let mut out = AlignedBuf::<f32>::zeroed(m * n);
        // Activations are quantised by the op before a product, not by the product.
        let quantised = matches!(kind, Kind::Int8 | Kind::Int4);
        let mut codes = QuantRows::new();
        if quantised {
            self.cpu.quantize_rows(&x, k, &mut codes);
        }
        let alone = &mut self.alone;
        // All threads come last: theirs is the result that is checked.
        let last = usize::from(alone.is_some());
        let mut times = sample_ways(self.repeats, 1 + last, |way, turn| {
            let cpu = alone.as_mut().filter(|_| way < last).unwrap_or(&mut self.cpu);
            match quantised {
                true => cpu.linear_quantized(&codes, matrix(turn), None, &mut out),
                false => cpu.linear(&x, m, matrix(turn), None, &mut out),
            }
        })?;

        let (rows, want) = self.oracle_product(kind, &x, m, matrix(0));
        let got = rows.iter().flat_map(|row| &out[row * n..][..n]);
        Ok(Measured {
            times: times.remove(last),
            flops: Some(2.0 * m as f64 * n as f64 * k as f64),
            bytes: (weights.bytes() + m * (4 * n + if quantised { k } else { 4 * k })) as f64,
            ceiling: Ceiling::Read,
            error: deviation(got, &want),
            tolerance: sum_tolerance(k),
            naive: None,
            one_thread: times.pop(),
        })
    }

    /// Some rows of a product, and what they are by the oracle.
    fn oracle_product(&mut self, kind: Kind, x: &[f32], m: usize, w: Matrix<'_>) -> (Vec<usize>, Vec<f32>) {
        let rows = spread_rows(m, (ORACLE_WORK / (w.n * w.k)).clamp(1, ORACLE_ROWS));
        let mut chosen: Vec<f32> = rows.iter().flat_map(|row| &x[row * w.k..][..w.k]).copied().collect();
        if kind == Kind::Bfloat16 && self.cpu.tier().multiplies_pairs() {
            // Part of that product, and none of its errors.
            chosen.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        let mut want = vec![0.0; rows.len() * w.n];
        self.oracle.linear(&chosen, rows.len(), w, None, &mut want);
        (rows, want)
    }

    fn gate_up(&mut self, kind: Kind, m: usize, n: usize, k: usize) -> Result<Measured> {
        let weights = Weights::random(&mut self.cpu, kind, n, k);
        let matrix = |turn: usize| Matrix { data: weights.copy(turn), n, k, layout: Layout::Packed };
        let (x, width) = ((0..m * k).map(|i| noise(3, i)).collect::<Vec<f32>>(), n / 2);
        let (mut out, mut gate_up) = (AlignedBuf::<f32>::zeroed(m * width), AlignedBuf::<f32>::zeroed(m * n));
        let quantised = matches!(kind, Kind::Int8 | Kind::Int4);
        let (mut codes, mut out_codes) = (QuantRows::new(), QuantRows::new());
        if quantised {
            self.cpu.quantize_rows(&x, k, &mut codes);
        }
        let cpu = &mut self.cpu;
        // The fused product comes last: its result is the one that is checked.
        let mut times = sample_ways(self.repeats, 2, |way, turn| match (way, quantised) {
            (0, false) => {
                cpu.linear(&x, m, matrix(turn), None, &mut gate_up);
                cpu.silu_mul(&gate_up, width, &mut out);
            }
            (0, true) => {
                cpu.linear_quantized(&codes, matrix(turn), None, &mut gate_up);
                cpu.silu_mul_quantized(&gate_up, width, &mut out_codes);
            }
            (_, false) => cpu.linear_activated(&x, m, matrix(turn), None, Activation::Silu, &mut out),
            (_, true) => {
                cpu.linear_activated_quantized(&codes, matrix(turn), None, Activation::Silu, &mut out_codes);
            }
        })?;
        if quantised {
            fill(&mut out, |i| out_codes.get(i / width, i % width));
        }
        let (rows, sums) = self.oracle_product(kind, &x, m, matrix(0));
        let mut want = vec![0.0; rows.len() * width];
        self.oracle.silu_mul(&sums, width, &mut want);
        let got = rows.iter().flat_map(|row| &out[row * width..][..width]);
        let (x_bytes, out_bytes) = if quantised { (k, width) } else { (4 * k, 4 * width) };
        Ok(Measured {
            times: times.remove(1),
            flops: Some(m as f64 * (2.0 * n as f64 * k as f64 + 5.0 * width as f64)),
            bytes: (weights.bytes() + m * (x_bytes + out_bytes)) as f64,
            ceiling: Ceiling::Read,
            error: deviation(got, &want),
            // Gates and ups are off by as much as any sum; codes by half a step besides.
            tolerance: 4.0 * sum_tolerance(k) + if quantised { 0.5 / 127.0 } else { 0.0 },
            naive: times.pop(),
            one_thread: None,
        })
    }

    fn attention(&mut self, kind: Kind, shape: Shape) -> Result<Measured> {
        let cache = Cache::new(&mut self.cpu, kind, shape);
        let Cache { qkv_shape, sequences, q_len, kv_len, .. } = cache;
        let rows = sequences * q_len;
        let qkv: Vec<f32> = (0..rows * qkv_shape.row()).map(|i| noise(4, i)).collect();
        let mut layers = Cold::<u8>::new(cache.layer.len(), |bytes| bytes.copy_from_slice(&cache.layer));
        let batch = AttnBatch { seqs: &cache.spans, block_tables: &cache.tables };
        let mut out = AlignedBuf::<f32>::zeroed(rows * qkv_shape.q_row());
        let score_count = sequences as f64 * qkv_shape.heads as f64 * q_len as f64 * kv_len as f64;
        // Scores that would not fit leave fused attention alone.
        let each = qkv_shape.heads * q_len * kv_len;
        let with_naive = score_count * 4.0 <= MOST_SCORES_BYTES as f64;
        let offsets: Vec<usize> = (0..sequences).map(|i| i * each).collect();
        let mut scores = AlignedBuf::<f32>::zeroed(if with_naive { sequences * each } else { 0 });
        let mut naive_out = AlignedBuf::<f32>::zeroed(out.len());
        let pairs = self.cpu.tier().multiplies_pairs();
        let cpu = &mut self.cpu;
        let mut times = sample_ways(self.repeats, 1 + usize::from(with_naive), |way, turn| {
            let kv = KvLayer { geometry: cache.geometry, data: layers.copy_mut(turn) };
            if way == 0 {
                return cpu.attention(&qkv, qkv_shape, &batch, &kv, None, &mut out);
            }
            cpu.attn_scores(&qkv, qkv_shape, &batch, &kv, None, &offsets, &mut scores);
            cpu.attn_softmax(qkv_shape, &batch, None, &offsets, &mut scores);
            cpu.attn_values(qkv_shape, &batch, &kv, &offsets, &scores, &mut naive_out);
        })?;
        let naive = if with_naive { times.pop() } else { None };

        // The oracle answers single rows: each is a sequence of its own that ends at that row.
        let chosen = spread_rows(rows, (ORACLE_WORK / (2 * kv_len * qkv_shape.q_row())).clamp(1, ORACLE_ROWS));
        let single = |(i, row): (usize, &usize)| SeqSpan {
            q_start: i as u32,
            q_len: 1,
            kv_len: (kv_len - q_len + row % q_len + 1) as u32,
            table_start: cache.spans[row / q_len].table_start,
        };
        let spans: Vec<SeqSpan> = chosen.iter().enumerate().map(single).collect();
        let queries: Vec<f32> =
            chosen.iter().flat_map(|row| &qkv[row * qkv_shape.row()..][..qkv_shape.row()]).copied().collect();
        let mut want = vec![0.0; chosen.len() * qkv_shape.q_row()];
        let kv = KvLayer { geometry: cache.geometry, data: layers.copy_mut(0) };
        let alone = AttnBatch { seqs: &spans, block_tables: &cache.tables };
        self.oracle.attention(&queries, qkv_shape, &alone, &kv, None, &mut want);
        let got = chosen.iter().flat_map(|row| &out[row * qkv_shape.q_row()..][..qkv_shape.q_row()]);

        let seen: f64 = (0..q_len).map(|i| (kv_len - q_len + i + 1) as f64).sum();
        let positions = (sequences * kv_len * 2 * qkv_shape.kv_heads) as f64;
        Ok(Measured {
            times: times.remove(0),
            flops: Some(4.0 * sequences as f64 * seen * qkv_shape.q_row() as f64),
            bytes: positions * cache.head_row_bytes() + (8 * rows * qkv_shape.q_row()) as f64,
            ceiling: Ceiling::Read,
            error: deviation(got, &want),
            // Pairs of bfloat16 have queries and weights rounded to that type.
            tolerance: if kind == Kind::Bfloat16 && pairs { 1e-2 } else { 1e-4 },
            naive,
            one_thread: None,
        })
    }

    fn rope(&mut self, kind: Kind, shape: Shape) -> Result<Measured> {
        let cache = Cache::new(&mut self.cpu, kind, shape);
        let Cache { qkv_shape, sequences, q_len, kv_len, .. } = cache;
        let (rows, row) = (sequences * q_len, qkv_shape.row());
        let mut layers = Cold::<u8>::new(cache.layer.len(), |bytes| bytes.copy_from_slice(&cache.layer));
        let mut qkv = Cold::<f32>::noise(rows * row);
        let batch = AttnBatch { seqs: &cache.spans, block_tables: &cache.tables };
        let rope = rope_table(qkv_shape.head_dim, kv_len);
        let written = |cpu: &mut Cpu| {
            let (mut rotated, mut layer) = (qkv.copy(0).to_vec(), AlignedBuf::<u8>::zeroed(cache.layer.len()));
            let mut kv = KvLayer { geometry: cache.geometry, data: &mut layer };
            cpu.rope_kv_write(&mut rotated, qkv_shape, &rope, &batch, &mut kv);
            (rotated, layer)
        };
        let (got, mut got_layer) = written(&mut self.cpu);
        let (want, mut want_layer) = written(&mut self.oracle);
        // What was written is told by reading it: the oracle's attention over either cache.
        let spans: Vec<SeqSpan> = cache.spans.iter().map(|span| SeqSpan { q_len: 1, ..*span }).collect();
        let mut read = |layer: &mut [u8]| {
            let kv = KvLayer { geometry: cache.geometry, data: layer };
            let one_each = AttnBatch { seqs: &spans, block_tables: &cache.tables };
            let mut out = vec![0.0; rows * qkv_shape.q_row()];
            self.oracle.attention(&want, qkv_shape, &one_each, &kv, None, &mut out);
            out
        };
        let error = deviation(&got, &want).max(deviation(&read(&mut got_layer), &read(&mut want_layer)));
        let times = sample(self.repeats, |turn| {
            let mut kv = KvLayer { geometry: cache.geometry, data: layers.copy_mut(turn) };
            self.cpu.rope_kv_write(qkv.copy_mut(turn), qkv_shape, &rope, &batch, &mut kv);
        })?;
        let rotated = (qkv_shape.heads + qkv_shape.kv_heads) * qkv_shape.head_dim;
        let written = (2 * qkv_shape.kv_heads) as f64 * cache.head_row_bytes();
        Ok(Measured {
            times,
            flops: None,
            bytes: rows as f64 * ((4 * (row + rotated)) as f64 + written),
            ceiling: Ceiling::Copy,
            error,
            // A rounding to the type of the cache may fall to either side.
            tolerance: match kind {
                Kind::Float32 => 1e-5,
                Kind::Float16 => 1e-3,
                _ => 1e-2,
            },
            naive: None,
            one_thread: None,
        })
    }

    fn norm(&mut self, rows: usize, width: usize) -> Result<Measured> {
        let weight: Vec<f32> = (0..width).map(|i| 1.0 + 0.1 * noise(5, i)).collect();
        let (x, mut out) = (Cold::<f32>::noise(rows * width), Cold::<f32>::noise(rows * width));
        let times = sample(self.repeats, |turn| {
            self.cpu.rms_norm(x.copy(turn), &weight, EPS, out.copy_mut(turn));
        })?;
        let mut want = vec![0.0; rows * width];
        self.oracle.rms_norm(x.copy(0), &weight, EPS, &mut want);
        Ok(rows_measured(times, 2, rows * width, deviation(out.copy(0), &want)))
    }

    fn add_norm(&mut self, rows: usize, width: usize) -> Result<Measured> {
        let weight: Vec<f32> = (0..width).map(|i| 1.0 + 0.1 * noise(5, i)).collect();
        let (mut residual, mut out) = (Cold::<f32>::noise(rows * width), Cold::<f32>::noise(rows * width));
        let delta = Cold::<f32>::noise(rows * width);
        let (mut sum, mut want) = (residual.copy(0).to_vec(), vec![0.0; rows * width]);
        self.oracle.add_rms_norm(&mut sum, delta.copy(0), &weight, EPS, &mut want);
        let mut own_sum = residual.copy(0).to_vec();
        self.cpu.add_rms_norm(&mut own_sum, delta.copy(0), &weight, EPS, out.copy_mut(0));
        let error = deviation(&own_sum, &sum).max(deviation(out.copy(0), &want));
        let times = sample(self.repeats, |turn| {
            self.cpu.add_rms_norm(residual.copy_mut(turn), delta.copy(turn), &weight, EPS, out.copy_mut(turn));
        })?;
        Ok(rows_measured(times, 4, rows * width, error))
    }

    fn silu(&mut self, rows: usize, width: usize) -> Result<Measured> {
        let (gate_up, mut out) = (Cold::<f32>::noise(2 * rows * width), Cold::<f32>::noise(rows * width));
        let times = sample(self.repeats, |turn| self.cpu.silu_mul(gate_up.copy(turn), width, out.copy_mut(turn)))?;
        let mut want = vec![0.0; rows * width];
        self.oracle.silu_mul(gate_up.copy(0), width, &mut want);
        Ok(rows_measured(times, 3, rows * width, deviation(out.copy(0), &want)))
    }

    fn argmax(&mut self, rows: usize, width: usize) -> Result<Measured> {
        let logits = Cold::<f32>::noise(rows * width);
        let (mut got, mut want) = (vec![0; rows], vec![0; rows]);
        let times = sample(self.repeats, |turn| self.cpu.argmax_rows(logits.copy(turn), width, &mut got))?;
        self.oracle.argmax_rows(logits.copy(0), width, &mut want);
        let wrong = got.iter().zip(&want).filter(|(got, want)| got != want).count();
        let measured = rows_measured(times, 1, rows * width, wrong as f64);
        Ok(Measured { ceiling: Ceiling::Read, tolerance: 0.0, ..measured })
    }
}

/// Sums in another order: the error grows with the root of their length.
fn sum_tolerance(k: usize) -> f64 {
    4.0 * f64::from(f32::EPSILON) * (k as f64).sqrt().max(4.0)
}

/// An op that reads and writes `touched` buffers of `len` elements.
fn rows_measured(times: Times, touched: usize, len: usize, error: f64) -> Measured {
    let bytes = (4 * touched * len) as f64;
    Measured {
        times,
        flops: None,
        bytes,
        ceiling: Ceiling::Copy,
        error,
        tolerance: 1e-5,
        naive: None,
        one_thread: None,
    }
}

fn rope_table(head_dim: usize, positions: usize) -> RopeTable {
    let half = head_dim / 2;
    let angle = |i: usize| (i / half) as f32 * 10_000f32.powf(-((i % half) as f32) / half as f32);
    let angles = 0..positions * half;
    RopeTable {
        half,
        cos: angles.clone().map(|i| angle(i).cos()).collect(),
        sin: angles.map(|i| angle(i).sin()).collect(),
    }
}

/// Sequences with random keys and values, their blocks in reverse order.
struct Cache {
    geometry: KvGeometry,
    qkv_shape: QkvShape,
    layer: AlignedBuf<u8>,
    tables: Vec<u32>,
    spans: Vec<SeqSpan>,
    sequences: usize,
    q_len: usize,
    kv_len: usize,
}

impl Cache {
    fn new(cpu: &mut Cpu, kind: Kind, shape: Shape) -> Cache {
        let Shape::Attention { sequences, q_len, kv_len, heads, kv_heads, head_dim } = shape else {
            unreachable!("only attention and rope have a cache");
        };
        let qkv_shape = QkvShape { heads, kv_heads, head_dim };
        let blocks_each = kv_len.div_ceil(TOKENS_PER_BLOCK);
        let geometry = KvGeometry {
            kv_heads,
            head_dim,
            tokens_per_block: TOKENS_PER_BLOCK,
            blocks: sequences * blocks_each,
            kind: kv_type(kind),
        };
        let tables: Vec<u32> = (0..geometry.blocks as u32).rev().collect();
        let spans_of = |rows: usize| -> Vec<SeqSpan> {
            let span = |i: usize| SeqSpan {
                q_start: (i * rows) as u32,
                q_len: rows as u32,
                kv_len: kv_len as u32,
                table_start: (i * blocks_each) as u32,
            };
            (0..sequences).map(span).collect()
        };
        let mut layer = AlignedBuf::zeroed(geometry.bytes_per_layer());
        let mut qkv: Vec<f32> = (0..sequences * kv_len * qkv_shape.row()).map(|i| noise(6, i)).collect();
        let all = spans_of(kv_len);
        let batch = AttnBatch { seqs: &all, block_tables: &tables };
        let mut kv = KvLayer { geometry, data: &mut layer };
        cpu.rope_kv_write(&mut qkv, qkv_shape, &rope_table(head_dim, kv_len), &batch, &mut kv);
        Cache { geometry, qkv_shape, layer, tables, spans: spans_of(q_len), sequences, q_len, kv_len }
    }

    /// Bytes of one key or value of one head, as the cache stores it.
    fn head_row_bytes(&self) -> f64 {
        (self.geometry.head_dim * self.geometry.kind.bytes() + self.geometry.kind.scale_bytes()) as f64
    }
}
