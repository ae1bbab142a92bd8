//! Paged keys and values: shapes, memory layout, and which rows of a batch belong to which sequence.

use std::ops::Range;

use half::{bf16, f16};

/// Positions that lie side by side in K, so that one vector load holds 16 positions of one dimension.
pub(crate) const KV_LANES: usize = 16;

/// Heads of one attention layer. A qkv row is `[heads * d | kv_heads * d | kv_heads * d]`.
#[derive(Clone, Copy, Debug)]
pub struct QkvShape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of one head; even.
    pub head_dim: usize,
}

impl QkvShape {
    /// Elements of one qkv row.
    pub fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Elements of the queries of one row, which is also the width of attention's output.
    pub fn q_row(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Query heads that share one kv head.
    pub(crate) fn group(&self) -> usize {
        assert!(
            self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads) && self.head_dim.is_multiple_of(2),
            "heads must be a multiple of kv_heads and head_dim even, found {self:?}"
        );
        self.heads / self.kv_heads
    }
}

/// Rotation angles, `[positions][half]`.
pub struct RopeTable {
    /// Half of the head dimension.
    pub half: usize,
    /// Cosines.
    pub cos: Vec<f32>,
    /// Sines.
    pub sin: Vec<f32>,
}

/// The rows of one sequence in a batch: row `q_start + i` is the query at position `kv_len - q_len + i`.
#[derive(Clone, Copy, Debug)]
pub struct SeqSpan {
    /// First packed row.
    pub q_start: u32,
    /// Rows in this step.
    pub q_len: u32,
    /// Valid positions, these `q_len` included.
    pub kv_len: u32,
    /// Where the sequence's block table starts in [`AttnBatch::block_tables`].
    pub table_start: u32,
}

impl SeqSpan {
    /// The position of the first query row.
    pub(crate) fn first_position(&self) -> usize {
        assert!(self.q_len <= self.kv_len, "a sequence has more query rows than positions: {self:?}");
        (self.kv_len - self.q_len) as usize
    }
}

/// The sequences of one call. Only rows that they cover are read or written.
pub struct AttnBatch<'a> {
    /// One span per sequence.
    pub seqs: &'a [SeqSpan],
    /// Position `p` of a sequence is in block `block_tables[table_start + p / tokens_per_block]`.
    pub block_tables: &'a [u32],
}

impl AttnBatch<'_> {
    /// Query rows of all sequences together.
    pub(crate) fn rows(&self) -> usize {
        self.seqs.iter().map(|seq| seq.q_len as usize).sum()
    }

    /// Calls `f(sequence, row within it)` for a range of the rows counted by [`Self::rows`].
    pub(crate) fn for_rows(&self, rows: Range<usize>, mut f: impl FnMut(&SeqSpan, usize)) {
        let mut first = 0;
        for seq in self.seqs {
            let end = first + seq.q_len as usize;
            for row in rows.start.max(first)..rows.end.min(end) {
                f(seq, row - first);
            }
            first = end;
        }
    }

    /// Block, and token within it, of a position.
    #[inline(always)]
    pub(crate) fn block(&self, seq: &SeqSpan, position: usize, tokens_per_block: usize) -> (usize, usize) {
        let shift = tokens_per_block.trailing_zeros();
        let block = self.block_tables[seq.table_start as usize + (position >> shift)];
        (block as usize, position & (tokens_per_block - 1))
    }
}

/// The element type of a KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvType {
    /// 32-bit floats.
    F32,
    /// IEEE 16-bit floats.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit codes with one f32 scale per position and kv head, for keys and for values.
    Int8,
}

impl KvType {
    /// Bytes of one element, without what a scale adds.
    pub fn bytes(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::F16 | KvType::Bf16 => 2,
            KvType::Int8 => 1,
        }
    }

    /// Bytes of the scale that the elements of one head share.
    pub fn scale_bytes(self) -> usize {
        if self == KvType::Int8 { size_of::<f32>() } else { 0 }
    }
}

/// The shape of one layer's cache.
///
/// In memory: block, then kv head, then K as `[tokens / lanes][head_dim][lanes]` with `lanes = min(16,
/// tokens_per_block)`, then V as `[tokens][head_dim rounded up to 16]`. Scores then need no horizontal sums, and a
/// value row is whole vectors. 8-bit codes are followed by their scales: `[tokens]` of K, then `[tokens]` of V.
#[derive(Clone, Copy, Debug)]
pub struct KvGeometry {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Positions in a block: any power of two.
    pub tokens_per_block: usize,
    /// Blocks in the pool.
    pub blocks: usize,
    /// Element type.
    pub kind: KvType,
}

impl KvGeometry {
    /// Bytes of one layer, K and V together.
    pub fn bytes_per_layer(&self) -> usize {
        self.blocks * self.kv_heads * self.head_block() * self.kind.bytes()
    }

    /// Elements of a value row, padding included.
    pub(crate) fn padded_dim(&self) -> usize {
        padded_dim(self.head_dim)
    }

    /// Positions side by side in K.
    pub(crate) fn lanes(&self) -> usize {
        self.tokens_per_block.min(KV_LANES)
    }

    /// Elements of K and V of one head in one block; codes and their scales are counted in bytes.
    fn head_block(&self) -> usize {
        let elements = self.tokens_per_block * (self.head_dim + self.padded_dim());
        match self.kind {
            KvType::Int8 => elements.next_multiple_of(size_of::<f32>()) + 2 * self.tokens_per_block * size_of::<f32>(),
            _ => elements,
        }
    }

    /// Element `index` of a layer's memory; the index comes from [`Self::key_offset`] or [`Self::value_offset`]. A code
    /// comes without its scale.
    pub(crate) fn read(&self, data: &[u8], index: usize) -> f32 {
        match self.kind {
            KvType::F32 => bytemuck::cast_slice::<u8, f32>(data)[index],
            KvType::F16 => bytemuck::cast_slice::<u8, f16>(data)[index].to_f32(),
            KvType::Bf16 => bytemuck::cast_slice::<u8, bf16>(data)[index].to_f32(),
            KvType::Int8 => f32::from(data[index] as i8),
        }
    }

    /// What the elements of the key (or value) at `token` of a block are multiples of.
    pub(crate) fn read_scale(&self, data: &[u8], block: usize, head: usize, token: usize, keys: bool) -> f32 {
        match self.kind {
            KvType::Int8 => bytemuck::cast_slice::<u8, f32>(data)[self.scale_offset(block, head, token, keys)],
            _ => 1.0,
        }
    }

    /// Where the scale of the key (or value) at `token` of a block of codes is, counted in f32; those of the block's
    /// other tokens are beside it.
    pub(crate) fn scale_offset(&self, block: usize, head: usize, token: usize, keys: bool) -> usize {
        let end = (block * self.kv_heads + head + 1) * self.head_block() / size_of::<f32>();
        end - (1 + usize::from(keys)) * self.tokens_per_block + token
    }

    /// Where dimension 0 of the key at `token` of a block starts; the next dimension is `lanes()` further.
    pub(crate) fn key_offset(&self, block: usize, head: usize, token: usize) -> usize {
        let lanes = self.lanes();
        (block * self.kv_heads + head) * self.head_block() + token / lanes * lanes * self.head_dim + token % lanes
    }

    /// Where the value row at `token` of a block starts.
    pub(crate) fn value_offset(&self, block: usize, head: usize, token: usize) -> usize {
        (block * self.kv_heads + head) * self.head_block()
            + self.tokens_per_block * self.head_dim
            + token * self.padded_dim()
    }
}

/// A head dimension rounded up to whole vectors of the widest tier.
pub(crate) fn padded_dim(head_dim: usize) -> usize {
    head_dim.next_multiple_of(KV_LANES)
}

/// The keys and values of one layer.
pub struct KvLayer<'a> {
    /// Its shape.
    pub geometry: KvGeometry,
    /// Its memory: 64-byte aligned, `geometry.bytes_per_layer()` long.
    pub data: &'a mut [u8],
}

impl KvLayer<'_> {
    /// # Panics
    /// When memory, geometry, shape and block tables do not fit together, so that kernels may trust every offset.
    pub(crate) fn check(&self, shape: QkvShape, batch: &AttnBatch<'_>) {
        let geometry = &self.geometry;
        assert!(geometry.tokens_per_block.is_power_of_two(), "tokens_per_block must be a power of two: {geometry:?}");
        assert_eq!(self.data.len(), geometry.bytes_per_layer(), "bytes of a KV layer with {geometry:?}");
        assert_eq!(self.data.as_ptr() as usize % 4, 0, "a KV layer must be aligned for its elements");
        assert_eq!(
            (geometry.kv_heads, geometry.head_dim),
            (shape.kv_heads, shape.head_dim),
            "kv_heads and head_dim of cache and qkv"
        );
        for seq in batch.seqs {
            let start = seq.table_start as usize;
            let end = start + (seq.kv_len as usize).div_ceil(geometry.tokens_per_block);
            assert!(end <= batch.block_tables.len(), "the block table of {seq:?} ends early");
            let table = &batch.block_tables[start..end];
            assert!(table.iter().all(|&block| (block as usize) < geometry.blocks), "block out of range in {seq:?}");
        }
    }
}
