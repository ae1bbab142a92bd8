//! Random inputs, and comparisons with the scalar tier.
#![allow(dead_code)] // each test file uses its own part

use half::{bf16, f16};
use strobe_kernels_cpu::{
    AlignedBuf, AttnBatch, Cpu, Elems, KvGeometry, KvLayer, KvType, Layout, Matrix, QkvShape, RopeTable, SeqSpan, Tier,
    pack_panels, packed_len,
};

/// A small generator: tests need the same numbers every time, not good ones.
pub(crate) struct Rng(pub u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Roughly normal, standard deviation 1.
    pub(crate) fn float(&mut self) -> f32 {
        (0..4).map(|_| self.next() as f32 / (1u64 << 31) as f32 - 0.5).sum::<f32>() * 1.7
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

pub(crate) fn simd_tiers() -> Vec<Tier> {
    Tier::available().into_iter().filter(|&tier| tier != Tier::Scalar).collect()
}

pub(crate) fn assert_close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        let close = (f - e).abs() <= tolerance * (1.0 + e.abs());
        assert!(close || f == e, "{what}: element {i} is {f}, expected {e}");
    }
}

pub(crate) fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert_eq!(f.to_bits(), e.to_bits(), "{what}: element {i} is {f}, expected {e}");
    }
}

/// What the oracle is given in place of `x`: a tier that multiplies bfloat16 pairs rounds rows to the type of the weights.
pub(crate) fn as_multiplied(x: &[f32], tier: Tier, kind: KvType, layout: Layout) -> Vec<f32> {
    if tier.multiplies_pairs() && kind == KvType::Bf16 && layout == Layout::Packed {
        x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect()
    } else {
        x.to_vec()
    }
}

/// Whether attention of a tier rounds queries and the weights of values to bfloat16 over such a cache.
pub(crate) fn attends_in_pairs(tier: Tier, kind: KvType, attend: &Attend) -> bool {
    tier.multiplies_pairs() && kind == KvType::Bf16 && attend.fused
}

/// A weight in one of the element types and layouts.
pub(crate) struct Weight {
    f32s: Vec<f32>,
    f16s: Vec<f16>,
    bf16s: Vec<bf16>,
    kind: KvType,
    n: usize,
    k: usize,
    layout: Layout,
}

impl Weight {
    pub(crate) fn new(values: &[f32], n: usize, k: usize, kind: KvType, layout: Layout) -> Weight {
        let f32s = match layout {
            Layout::RowMajor => values.to_vec(),
            Layout::Packed => {
                let mut packed = vec![f32::NAN; packed_len(n, k)];
                pack_panels(
                    |row, dst: &mut [f32]| dst.copy_from_slice(&values[row * k..(row + 1) * k]),
                    n,
                    k,
                    &mut packed,
                );
                packed
            }
        };
        let f16s = f32s.iter().map(|&x| f16::from_f32(x)).collect();
        let bf16s = f32s.iter().map(|&x| bf16::from_f32(x)).collect();
        Weight { f32s, f16s, bf16s, kind, n, k, layout }
    }

    pub(crate) fn matrix(&self) -> Matrix<'_> {
        let data = match self.kind {
            KvType::F32 => Elems::F32(&self.f32s),
            KvType::F16 => Elems::F16(&self.f16s),
            KvType::Bf16 => Elems::Bf16(&self.bf16s),
            KvType::Int8 => unreachable!("weights of codes are made elsewhere"),
        };
        Matrix { data, n: self.n, k: self.k, layout: self.layout }
    }
}

pub(crate) const KINDS: [KvType; 3] = [KvType::F32, KvType::F16, KvType::Bf16];
pub(crate) const CACHE_KINDS: [KvType; 4] = [KvType::F32, KvType::F16, KvType::Bf16, KvType::Int8];

/// How one sequence takes part: how many positions it has, and how many of them are this step's rows.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub q_len: usize,
    pub kv_len: usize,
}

/// A whole layer's history of several sequences: the qkv rows of all positions, before RoPE.
pub(crate) struct Scene {
    pub shape: QkvShape,
    pub rope: RopeTable,
    /// Per sequence, `[positions][qkv row]`.
    pub history: Vec<Vec<f32>>,
}

impl Scene {
    pub(crate) fn new(shape: QkvShape, lengths: &[usize], seed: u64) -> Scene {
        let mut rng = Rng(seed);
        let history = lengths.iter().map(|&n| rng.floats(n * shape.row())).collect();
        let half = shape.head_dim / 2;
        let positions = lengths.iter().copied().max().unwrap_or(0);
        let angle = |i: usize| (i / half) as f32 * 0.3f32.powf((i % half) as f32 * 0.5);
        let cos = (0..positions * half).map(|i| angle(i).cos()).collect();
        let sin = (0..positions * half).map(|i| angle(i).sin()).collect();
        Scene { shape, rope: RopeTable { half, cos, sin }, history }
    }

    /// A cache, all of it poisoned, with room for the sequences in shuffled blocks.
    pub(crate) fn cache(&self, tokens_per_block: usize, kind: KvType) -> Cache {
        let needed: Vec<usize> =
            self.history.iter().map(|h| (h.len() / self.shape.row()).div_ceil(tokens_per_block)).collect();
        let blocks = needed.iter().sum::<usize>() + 3;
        let geometry =
            KvGeometry { kv_heads: self.shape.kv_heads, head_dim: self.shape.head_dim, tokens_per_block, blocks, kind };
        let mut data = AlignedBuf::<u8>::zeroed(geometry.bytes_per_layer());
        data.fill(0xff); // NaN in the float types and in the scales of codes
        let mut order: Vec<u32> = (0..blocks as u32).collect();
        let mut rng = Rng(tokens_per_block as u64);
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i + 1));
        }
        let mut tables = vec![u32::MAX]; // nobody's entry: tables need not start at 0
        let mut table_starts = Vec::new();
        for n in needed {
            table_starts.push(tables.len() as u32);
            tables.extend(order.drain(..n));
        }
        Cache { geometry, data, tables, table_starts }
    }

    /// Runs one step: RoPE and cache write for the rows of `parts` (`None`: the sequence sits this step out), then
    /// `attend` on the same rows. Returns each sequence's output rows.
    pub(crate) fn step(
        &self,
        cpu: &mut Cpu,
        cache: &mut Cache,
        parts: &[Option<Part>],
        attend: &Attend,
    ) -> Vec<Vec<f32>> {
        let (row, q_row) = (self.shape.row(), self.shape.q_row());
        // A row before and after that belong to nobody: they must stay as they are.
        let mut qkv = vec![f32::NAN; row];
        let mut seqs = Vec::new();
        for (i, part) in parts.iter().enumerate() {
            if let Some(part) = part {
                seqs.push(SeqSpan {
                    q_start: (qkv.len() / row) as u32,
                    q_len: part.q_len as u32,
                    kv_len: part.kv_len as u32,
                    table_start: cache.table_starts[i],
                });
                qkv.extend(&self.history[i][(part.kv_len - part.q_len) * row..part.kv_len * row]);
            }
        }
        qkv.extend(vec![f32::NAN; row]);
        let batch = AttnBatch { seqs: &seqs, block_tables: &cache.tables };
        let mut layer = KvLayer { geometry: cache.geometry, data: &mut cache.data };
        cpu.rope_kv_write(&mut qkv, self.shape, &self.rope, &batch, &mut layer);
        let rows = qkv.len() / row;
        let mut out = vec![f32::NAN; rows * q_row];
        attend.run(cpu, &qkv, self.shape, &batch, &layer, &mut out);
        assert!(
            out[..q_row].iter().chain(&out[(rows - 1) * q_row..]).all(|x| x.is_nan()),
            "a row of nobody was written"
        );
        let mut outputs = vec![Vec::new(); parts.len()];
        let mut seqs = seqs.iter();
        for (i, part) in parts.iter().enumerate() {
            if part.is_some() {
                let seq = seqs.next().expect("a span per part");
                let start = seq.q_start as usize * q_row;
                outputs[i] = out[start..start + seq.q_len as usize * q_row].to_vec();
            }
        }
        outputs
    }

    /// All of every sequence in one step.
    pub(crate) fn prefill(&self, cpu: &mut Cpu, cache: &mut Cache, attend: &Attend) -> Vec<Vec<f32>> {
        let parts: Vec<_> =
            (0..self.history.len()).map(|i| Some(Part { q_len: self.len(i), kv_len: self.len(i) })).collect();
        self.step(cpu, cache, &parts, attend)
    }

    pub(crate) fn len(&self, seq: usize) -> usize {
        self.history[seq].len() / self.shape.row()
    }
}

pub(crate) struct Cache {
    pub geometry: KvGeometry,
    pub data: AlignedBuf<u8>,
    pub tables: Vec<u32>,
    pub table_starts: Vec<u32>,
}

/// Which attention to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attend {
    pub fused: bool,
    pub window: Option<usize>,
}

impl Attend {
    fn run(
        &self,
        cpu: &mut Cpu,
        qkv: &[f32],
        shape: QkvShape,
        batch: &AttnBatch<'_>,
        kv: &KvLayer<'_>,
        out: &mut [f32],
    ) {
        if self.fused {
            return cpu.attention(qkv, shape, batch, kv, self.window, out);
        }
        let mut offsets = Vec::new();
        let mut total = 5; // scores need not start at 0
        for seq in batch.seqs {
            offsets.push(total);
            total += shape.heads * (seq.q_len * seq.kv_len) as usize + 3;
        }
        let mut scores = vec![f32::NAN; total];
        cpu.attn_scores(qkv, shape, batch, kv, self.window, &offsets, &mut scores);
        cpu.attn_softmax(shape, batch, self.window, &offsets, &mut scores);
        cpu.attn_values(shape, batch, kv, &offsets, &scores, out);
    }
}
