//! Kernels of a GPU: replayed as graphs, so that launches cost the host nothing, with operands that no cache holds; checked
//! against the scalar tier of the CPU.

use anyhow::{Result, bail};
use half::{bf16, f16};
use strobe_engine::device::DeviceFacts;
use strobe_kernels_cpu::{
    AlignedBuf, AttnBatch, Cpu, Elems, KvGeometry, KvLayer, KvType, Layout, Matrix, QkvShape, RopeTable, SeqSpan, Tier,
};
use strobe_kernels_cuda::{
    Attention, AttentionConfig, CapturedGraph, CudaError, DecodeArgs, DeviceBuffer, Epilogue, Event, Gpu, KvDtype,
    Linear, LinearArgs, LinearInput, LinearShape, LinearSite, Precision, PrefillArgs, UnfusedArgs, UnfusedAttention,
    UnfusedConfig, Weights, measure, score_elements, tune,
};

use super::cases::{Case, Kind, Shape};
use super::{Ceiling, Ceilings, Measured, Times, deviation, noise, spread_rows};
use crate::machine::{self, Machine};
use crate::{interrupt, progress};

const ORACLE_WORK: usize = 1 << 27;
const ORACLE_ROWS: usize = 8;
const MOST_SCORES_BYTES: usize = 8 << 30;
const TOKENS_PER_BLOCK: usize = 32;
/// Calls in one graph at least, so that its launch is no part of the time.
const CALLS: usize = 8;

/// The GPU under test and its oracle.
pub(super) struct Bench {
    gpu: Gpu,
    oracle: Cpu,
    repeats: usize,
    /// Tuned as they are met, one per type.
    linears: Vec<(Precision, Linear)>,
}

fn precision(kind: Kind) -> Result<Precision> {
    match kind {
        Kind::Float32 => Ok(Precision::F32),
        Kind::Bfloat16 => Ok(Precision::Bf16),
        Kind::Float16 => Ok(Precision::F16),
        Kind::Int8 | Kind::Int4 => bail!("{} is for the CPU", kind.name()),
    }
}

/// Values as a type holds them, and their bytes.
fn rounded(values: impl Iterator<Item = f32>, precision: Precision) -> (Vec<f32>, Vec<u8>) {
    let mut bytes = Vec::new();
    let round = |value: f32| match precision {
        Precision::F32 => {
            bytes.extend(value.to_le_bytes());
            value
        }
        Precision::F16 => {
            bytes.extend(f16::from_f32(value).to_le_bytes());
            f16::from_f32(value).to_f32()
        }
        Precision::Bf16 => {
            bytes.extend(bf16::from_f32(value).to_le_bytes());
            bf16::from_f32(value).to_f32()
        }
    };
    (values.map(round).collect(), bytes)
}

fn from_bytes(bytes: &[u8], precision: Precision) -> Vec<f32> {
    match precision {
        Precision::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Precision::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Precision::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
    }
}

fn upload<T: bytemuck::NoUninit>(data: &[T], what: &str) -> Result<DeviceBuffer, CudaError> {
    let buffer = DeviceBuffer::new(size_of_val(data), what)?;
    buffer.write(0, data)?;
    Ok(buffer)
}

/// What a result rounded to the type may be off by.
fn tolerance(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 1e-4,
        Precision::F16 => 2e-3,
        Precision::Bf16 => 1e-2,
    }
}

impl Bench {
    pub(super) fn open(index: u32, repeats: usize) -> Result<Bench> {
        let oracle = Cpu::new(Tier::Scalar, machine::cores());
        Ok(Bench { gpu: Gpu::open(index)?, oracle, repeats, linears: Vec::new() })
    }

    pub(super) fn machine(&self) -> Machine {
        let plain = Machine::of(&DeviceFacts::Cpu { tier: Tier::Scalar, threads: machine::cores() });
        Machine { gpu: Some(self.gpu.info().clone()), simd_tier: None, threads: None, ..plain }
    }

    /// The ceilings for the types that the cases have.
    pub(super) fn ceilings(&self, cases: &[Case]) -> Result<Ceilings> {
        let spinner = progress::spinner("measuring the GPU's FLOP/s and memory bandwidth");
        let mut ceilings = Ceilings::default();
        for kind in cases.iter().filter_map(|case| case.dtype) {
            if ceilings.ops_per_s(kind).is_none() {
                let peaks = measure::peaks(&self.gpu, precision(kind)?, false)?;
                ceilings.ops.push((kind, peaks.flops_per_s));
                ceilings.copy_bytes_per_s = ceilings.copy_bytes_per_s.max(peaks.copy_bytes_per_s);
            }
        }
        // A copy moves as many bytes per second as a read does.
        ceilings.read_bytes_per_s = ceilings.copy_bytes_per_s;
        spinner.finish_and_clear();
        Ok(ceilings)
    }

    pub(super) fn run(&mut self, case: &Case) -> Result<Measured> {
        let precision = precision(case.dtype.unwrap_or(Kind::Float32))?;
        match case.shape {
            Shape::Product { m, n, k } => self.product(precision, m, n, k),
            Shape::Attention { .. } => self.attention(precision, case.shape),
            Shape::Rows { .. } => bail!("{} is not measured on a GPU", case.op.name()),
        }
    }

    /// Seconds of one call of `body`, which is told which call it is.
    fn time(&self, calls: usize, body: impl Fn(usize) -> Result<(), CudaError>) -> Result<Times> {
        body(0)?;
        let graph = CapturedGraph::capture(&self.gpu, || (0..calls).try_for_each(&body))?;
        // SAFETY: operands and results were made for this case, and live until the times are taken.
        unsafe { graph.launch(&self.gpu) }?;
        let (begin, end) = (Event::new(true)?, Event::new(true)?);
        let mut times = Vec::new();
        for _ in 0..self.repeats {
            if interrupt::requested() {
                bail!(interrupt::Interrupted);
            }
            begin.record(&self.gpu)?;
            // SAFETY: operands and results were made for this case, and live until the times are taken.
            unsafe { graph.launch(&self.gpu) }?;
            end.record(&self.gpu)?;
            end.wait()?;
            times.push(f64::from(end.since(&begin)?) / 1e3 / calls as f64);
        }
        Ok(Times::new(times))
    }

    /// Copies of an operand of so many bytes that the L2 cache holds none of them.
    fn copies(&self, bytes: usize) -> usize {
        (4 * self.gpu.info().l2_bytes as usize).div_ceil(bytes).clamp(2, 256)
    }

    /// `copies` of the same bytes, side by side.
    fn cold(&self, bytes: &[u8], copies: usize) -> Result<DeviceBuffer, CudaError> {
        let buffer = DeviceBuffer::new(copies * bytes.len(), "operands")?;
        (0..copies).try_for_each(|copy| buffer.write(copy * bytes.len(), bytes))?;
        Ok(buffer)
    }

    fn product(&mut self, precision: Precision, m: usize, n: usize, k: usize) -> Result<Measured> {
        let shape = LinearShape { n, k, epilogue: Epilogue::Store, weights: Weights::Same, bias: false, norm: false };
        let place = match self.linears.iter().position(|(known, _)| *known == precision) {
            Some(place) => place,
            None => {
                let linear = Linear::with_what_is_there(&self.gpu, precision)?;
                self.linears.push((precision, linear));
                self.linears.len() - 1
            }
        };
        tune(&self.gpu, &mut self.linears[place].1, &[LinearSite { shape, max_rows: m }], None, || {
            !crate::interrupt::requested()
        })?;
        let linear = &self.linears[place].1;
        let (x, x_bytes) = rounded((0..m * k).map(|i| noise(3, i)), precision);
        let (w, w_bytes) = rounded((0..n * k).map(|i| 0.5 * noise(2, i)), precision);
        let copies = self.copies(w_bytes.len());
        let weights = self.cold(&w_bytes, copies)?;
        let x_device = upload(&x_bytes, "activations")?;
        let out = DeviceBuffer::new(m * n * precision.bytes(), "a product")?;
        let times = self.time(copies.max(CALLS), |turn| {
            let args = LinearArgs {
                shape,
                input: LinearInput::Plain(x_device.ptr()),
                w: weights.ptr() + (turn % copies * w_bytes.len()) as u64,
                w_scales: 0,
                bias: 0,
                out: out.ptr(),
                spared: 0,
                m,
            };
            // SAFETY: operands and results were made for this case, and live until the times are taken.
            unsafe { linear.run(&self.gpu, &args) }
        })?;

        let mut bytes = vec![0u8; m * n * precision.bytes()];
        out.read(0, &mut bytes)?;
        let got = from_bytes(&bytes, precision);
        let rows = spread_rows(m, (ORACLE_WORK / (n * k)).clamp(1, ORACLE_ROWS));
        let chosen: Vec<f32> = rows.iter().flat_map(|row| &x[row * k..][..k]).copied().collect();
        let mut want = vec![0.0; rows.len() * n];
        let matrix = Matrix { data: Elems::F32(&w), n, k, layout: Layout::RowMajor };
        self.oracle.linear(&chosen, rows.len(), matrix, None, &mut want);
        Ok(Measured {
            times,
            flops: Some(2.0 * m as f64 * n as f64 * k as f64),
            bytes: (w_bytes.len() + m * (n + k) * precision.bytes()) as f64,
            ceiling: Ceiling::Read,
            error: deviation(rows.iter().flat_map(|row| &got[row * n..][..n]), &want),
            tolerance: tolerance(precision),
            naive: None,
            one_thread: None,
        })
    }

    fn attention(&mut self, precision: Precision, shape: Shape) -> Result<Measured> {
        let batch = Batch::new(self, precision, shape)?;
        let Batch { config, rows, sequences, q_len, kv_len, .. } = batch;
        let AttentionConfig { heads, kv_heads, head_dim, .. } = config;
        let (q_row, row) = (heads * head_dim, (heads + 2 * kv_heads) * head_dim);
        let attention = Attention::new(&self.gpu, config)?;
        let out = DeviceBuffer::new(rows * q_row * precision.bytes(), "output")?;
        let mut tiles = Vec::new();
        attention.fill_tiles(&vec![(q_len as u32, kv_len as u32); sequences], &mut tiles);
        let device_tiles = upload(&tiles, "tiles")?;
        let splits = attention.splits_for(sequences, kv_len);
        let fused = |turn: usize| match q_len {
            // SAFETY: operands and results were made for this case, and live until the times are taken.
            1 => unsafe {
                attention.decode(
                    &self.gpu,
                    &DecodeArgs {
                        qkv: batch.qkv.ptr(),
                        q_stride: row,
                        kv: batch.layer(turn),
                        spans: batch.spans.ptr(),
                        span_count: sequences,
                        splits,
                        block_tables: batch.tables.ptr(),
                        settled: true,
                        window: 0,
                        sinks: 0,
                        out: out.ptr(),
                        out_stride: q_row,
                    },
                )
            },
            // SAFETY: operands and results were made for this case, and live until the times are taken.
            _ => unsafe {
                attention.prefill(
                    &self.gpu,
                    &PrefillArgs {
                        qkv: batch.qkv.ptr(),
                        q_stride: row,
                        kv: batch.layer(turn),
                        spans: batch.spans.ptr(),
                        tiles: device_tiles.ptr(),
                        tile_count: tiles.len(),
                        block_tables: batch.tables.ptr(),
                        window: 0,
                        sinks: 0,
                        out: out.ptr(),
                        out_stride: q_row,
                    },
                )
            },
        };
        let times = self.time(batch.layers.max(CALLS), fused)?;
        let mut bytes = vec![0u8; rows * q_row * precision.bytes()];
        out.read(0, &mut bytes)?;
        let got = from_bytes(&bytes, precision);

        let each = score_elements(heads, q_len, kv_len);
        let naive = if sequences * each * 4 <= MOST_SCORES_BYTES {
            let unfused = UnfusedAttention::new(
                &self.gpu,
                UnfusedConfig {
                    precision,
                    kv: KvDtype::Same,
                    heads,
                    kv_heads,
                    head_dim,
                    tokens_per_block: TOKENS_PER_BLOCK,
                    latent: None,
                    scale: 1.0 / (head_dim as f32).sqrt(),
                },
            )?;
            let scores = DeviceBuffer::new(sequences * each * 4, "scores")?;
            let offsets: Vec<u64> = (0..sequences).map(|i| (i * each) as u64).collect();
            let offsets = upload(&offsets, "score offsets")?;
            Some(self.time(batch.layers.clamp(2, CALLS), |turn| {
                let args = UnfusedArgs {
                    qkv: batch.qkv.ptr(),
                    kv: batch.layer(turn),
                    spans: batch.spans.ptr(),
                    span_count: sequences,
                    max_q: q_len,
                    max_kv: kv_len,
                    block_tables: batch.tables.ptr(),
                    window: 0,
                    sinks: 0,
                    score_offsets: offsets.ptr(),
                    scores: scores.ptr(),
                    out: out.ptr(),
                };
                // SAFETY: operands and results were made for this case, and live until the times are taken.
                unsafe {
                    unfused.scores(&self.gpu, &args)?;
                    unfused.softmax(&self.gpu, &args)?;
                    unfused.values(&self.gpu, &args)
                }
            })?)
        } else {
            None
        };

        let chosen = spread_rows(rows, (ORACLE_WORK / (2 * kv_len * q_row)).clamp(1, ORACLE_ROWS));
        let want = batch.expected(&mut self.oracle, &chosen);
        let seen: f64 = (0..q_len).map(|i| (kv_len - q_len + i + 1) as f64).sum();
        Ok(Measured {
            times,
            flops: Some(4.0 * sequences as f64 * seen * q_row as f64),
            bytes: ((sequences * kv_len * 2 * kv_heads * head_dim + 2 * rows * q_row) * precision.bytes()) as f64,
            ceiling: Ceiling::Read,
            error: deviation(chosen.iter().flat_map(|row| &got[row * q_row..][..q_row]), &want),
            tolerance: tolerance(precision),
            naive,
            one_thread: None,
        })
    }
}

/// Sequences with their rows and caches of a few layers, on the device and on the host.
struct Batch {
    config: AttentionConfig,
    sequences: usize,
    q_len: usize,
    kv_len: usize,
    rows: usize,
    layers: usize,
    layer_bytes: usize,
    cache: DeviceBuffer,
    qkv: DeviceBuffer,
    spans: DeviceBuffer,
    tables: DeviceBuffer,
    host_qkv: Vec<f32>,
    /// Rows of q, k and v at every position of every sequence, of which the cache holds k and v.
    host_positions: Vec<f32>,
}

impl Batch {
    fn new(bench: &Bench, precision: Precision, shape: Shape) -> Result<Batch> {
        let Shape::Attention { sequences, q_len, kv_len, heads, kv_heads, head_dim } = shape else {
            bail!("only attention has a cache");
        };
        let config = AttentionConfig {
            precision,
            kv: KvDtype::Same,
            heads,
            kv_heads,
            head_dim,
            tokens_per_block: TOKENS_PER_BLOCK,
            max_spans: sequences,
        };
        let (row, rows) = ((heads + 2 * kv_heads) * head_dim, sequences * q_len);
        let blocks = kv_len.div_ceil(TOKENS_PER_BLOCK);
        let (host_qkv, qkv) = rounded((0..rows * row).map(|i| noise(4, i)), precision);
        let (host_positions, positions) = rounded((0..sequences * kv_len * row).map(|i| noise(6, i)), precision);
        // Block, then k or v, then head, then token.
        let size = precision.bytes();
        let mut layer = vec![0u8; sequences * blocks * TOKENS_PER_BLOCK * 2 * kv_heads * head_dim * size];
        for position in 0..sequences * kv_len {
            let (sequence, at) = (position / kv_len, position % kv_len);
            let (block, token) = (sequence * blocks + at / TOKENS_PER_BLOCK, at % TOKENS_PER_BLOCK);
            for head in 0..2 * kv_heads {
                let to = ((block * 2 * kv_heads + head) * TOKENS_PER_BLOCK + token) * head_dim * size;
                let from = (position * row + (heads + head) * head_dim) * size;
                layer[to..to + head_dim * size].copy_from_slice(&positions[from..from + head_dim * size]);
            }
        }
        let tables: Vec<u32> = (0..(sequences * blocks) as u32).collect();
        let spans: Vec<[u32; 4]> =
            (0..sequences).map(|i| [(i * q_len) as u32, q_len as u32, kv_len as u32, (i * blocks) as u32]).collect();
        let layers = bench.copies(layer.len()).min(64);
        Ok(Batch {
            config,
            sequences,
            q_len,
            kv_len,
            rows,
            layers,
            layer_bytes: layer.len(),
            cache: bench.cold(&layer, layers)?,
            qkv: upload(&qkv, "qkv")?,
            spans: upload(spans.as_flattened(), "spans")?,
            tables: upload(&tables, "block tables")?,
            host_qkv,
            host_positions,
        })
    }

    fn layer(&self, turn: usize) -> u64 {
        self.cache.ptr() + (turn % self.layers * self.layer_bytes) as u64
    }

    /// What the oracle answers to some of the rows.
    fn expected(&self, oracle: &mut Cpu, chosen: &[usize]) -> Vec<f32> {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = self.config;
        let shape = QkvShape { heads, kv_heads, head_dim };
        let blocks = self.kv_len.div_ceil(TOKENS_PER_BLOCK);
        let geometry = KvGeometry {
            kv_heads,
            head_dim,
            tokens_per_block: TOKENS_PER_BLOCK,
            blocks: self.sequences * blocks,
            kind: KvType::F32,
        };
        let mut data = AlignedBuf::zeroed(geometry.bytes_per_layer());
        let mut kv = KvLayer { geometry, data: &mut data };
        let tables: Vec<u32> = (0..geometry.blocks as u32).collect();
        let whole: Vec<SeqSpan> = (0..self.sequences)
            .map(|i| SeqSpan {
                q_start: (i * self.kv_len) as u32,
                q_len: self.kv_len as u32,
                kv_len: self.kv_len as u32,
                table_start: (i * blocks) as u32,
            })
            .collect();
        // No rotation: the rows are as the cache has them.
        let half = head_dim / 2;
        let unturned = RopeTable { half, cos: vec![1.0; self.kv_len * half], sin: vec![0.0; self.kv_len * half] };
        let mut positions = self.host_positions.clone();
        let batch = AttnBatch { seqs: &whole, block_tables: &tables };
        oracle.rope_kv_write(&mut positions, shape, &unturned, &batch, &mut kv);
        let single = |(i, row): (usize, &usize)| SeqSpan {
            q_start: i as u32,
            q_len: 1,
            kv_len: (self.kv_len - self.q_len + row % self.q_len + 1) as u32,
            table_start: (row / self.q_len * blocks) as u32,
        };
        let spans: Vec<SeqSpan> = chosen.iter().enumerate().map(single).collect();
        let width = shape.row();
        let queries: Vec<f32> = chosen.iter().flat_map(|row| &self.host_qkv[row * width..][..width]).copied().collect();
        let mut want = vec![0.0; chosen.len() * shape.q_row()];
        let alone = AttnBatch { seqs: &spans, block_tables: &tables };
        oracle.attention(&queries, shape, &alone, &kv, None, &mut want);
        want
    }
}
