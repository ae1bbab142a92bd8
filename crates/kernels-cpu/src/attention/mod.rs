//! Causal attention over the paged cache, for prompts and decoding alike.
//!
//! Work is cut into blocks of query tokens of one kv head; the query heads that share it are rows of one small matrix
//! product, so keys and values are read once for all of them. Positions are walked in tiles at absolute multiples of
//! [`TILE`], and a row takes part in exactly the tiles and positions that it may see. The sums of every [`CHUNK`]
//! positions, again at absolute multiples, are kept apart and folded together in order, so that chunks may also be
//! computed by different workers. So a row's result depends neither on the other rows of its block, nor on how a prompt
//! was cut, nor on the size of cache blocks, nor on the number of workers.

mod fused;
mod pairs;
mod products;
mod split;
mod tile;
mod unfused;

use std::ops::Range;

use crate::cpu::Cpu;
use crate::kv::{AttnBatch, KV_LANES, KvGeometry, KvLayer, QkvShape, SeqSpan, padded_dim};

/// Positions that are processed together.
pub(crate) const TILE: usize = 64;
/// Positions whose sums are made on their own: a multiple of [`TILE`].
pub(crate) const CHUNK: usize = 512;
/// Rows (query tokens times heads of a group) that a block aims at: enough to reuse a tile well, small enough for the
/// cache.
const BLOCK_ROWS: usize = 96;

/// Rows of a block of as many whole tokens as fit.
fn max_block_rows(group: usize) -> usize {
    (BLOCK_ROWS / group).max(1) * group
}

/// What all blocks of one call share.
pub(crate) struct Job<'a> {
    /// Empty where queries are not read.
    qkv: &'a [f32],
    shape: QkvShape,
    group: usize,
    batch: &'a AttnBatch<'a>,
    /// How many positions a query sees, itself included.
    window: usize,
    /// A score for each query head that takes its part of the softmax and has no value.
    sinks: Option<&'a [f32]>,
}

/// The keys and values, shared by the workers.
#[derive(Clone, Copy)]
pub(crate) struct Cache<'a> {
    geometry: KvGeometry,
    data: &'a [u8],
}

/// A run of query tokens of one sequence, for the heads that share one kv head.
#[derive(Clone)]
pub(crate) struct Block<'a> {
    seq_index: usize,
    seq: &'a SeqSpan,
    kv_head: usize,
    /// Counted from the sequence's first row in this step.
    tokens: Range<usize>,
}

impl<'a> Job<'a> {
    fn new(qkv: &'a [f32], shape: QkvShape, batch: &'a AttnBatch<'a>, window: Option<usize>) -> Job<'a> {
        let group = shape.group();
        let window = window.unwrap_or(usize::MAX);
        assert!(window > 0, "an attention window holds at least the query itself");
        Job { qkv, shape, group, batch, window, sinks: None }
    }

    /// # Panics
    /// When there is not one sink for each query head.
    fn with_sinks(self, sinks: Option<&'a [f32]>) -> Job<'a> {
        assert!(sinks.is_none_or(|sinks| sinks.len() == self.shape.heads), "sinks of {} heads", self.shape.heads);
        Job { sinks, ..self }
    }

    /// What the sink of a row adds to the sum of exponentials against `max`.
    #[inline(always)]
    fn sink(&self, block: &Block<'_>, row: usize, max: f32) -> f32 {
        self.sinks.map_or(0.0, |sinks| (sinks[self.head(block, row)] - max).exp())
    }

    /// Rows of the largest block.
    fn max_rows(&self) -> usize {
        max_block_rows(self.group)
    }

    fn tokens_per_block(&self) -> usize {
        self.max_rows() / self.group
    }

    /// Runs of tokens that a sequence is cut into.
    fn runs(&self, seq: &SeqSpan) -> usize {
        (seq.q_len as usize).div_ceil(self.tokens_per_block())
    }

    fn block_count(&self) -> usize {
        self.batch.seqs.iter().map(|seq| self.runs(seq)).sum::<usize>() * self.shape.kv_heads
    }

    /// Block `index` of all sequences.
    fn block(&self, mut index: usize) -> Block<'a> {
        for (seq_index, seq) in self.batch.seqs.iter().enumerate() {
            let blocks = self.runs(seq) * self.shape.kv_heads;
            if index < blocks {
                return self.block_of(seq_index, index);
            }
            index -= blocks;
        }
        unreachable!("attention block beyond {}", self.block_count())
    }

    /// Block `index` of a sequence; neighbours share tokens, not heads.
    fn block_of(&self, seq_index: usize, index: usize) -> Block<'a> {
        let seq = &self.batch.seqs[seq_index];
        let (run, kv_head) = (index / self.shape.kv_heads, index % self.shape.kv_heads);
        let (q_len, size) = (seq.q_len as usize, self.tokens_per_block());
        Block { seq_index, seq, kv_head, tokens: run * size..q_len.min((run + 1) * size) }
    }

    /// The positions that the query at `position` sees.
    #[inline(always)]
    fn visible(&self, position: usize) -> Range<usize> {
        (position + 1).saturating_sub(self.window)..position + 1
    }

    /// The chunks that hold what a block sees.
    #[inline(always)]
    fn chunks(&self, block: &Block<'_>) -> Range<usize> {
        let (first, last) = (block.position(block.tokens.start), block.position(block.tokens.end - 1));
        self.visible(first).start / CHUNK..last / CHUNK + 1
    }

    /// The query head of a row of a block.
    fn head(&self, block: &Block<'_>, row: usize) -> usize {
        block.kv_head * self.group + row % self.group
    }

    /// Where the output of a row of a block starts.
    #[inline(always)]
    fn out_offset(&self, block: &Block<'_>, row: usize) -> usize {
        let token = block.tokens.start + row / self.group;
        block.packed_row(token) * self.shape.q_row() + self.head(block, row) * self.shape.head_dim
    }

    /// # Panics
    /// When a sequence's rows lie outside of buffers of `rows` rows, or its lengths contradict each other.
    fn check_rows(&self, rows: usize) {
        for seq in self.batch.seqs {
            seq.first_position();
            assert!(seq.q_start as usize + seq.q_len as usize <= rows, "{seq:?} lies outside of {rows} rows");
        }
    }

    /// # Panics
    /// When a sequence's scores lie outside of the buffer.
    fn check_scores(&self, offsets: &[usize], len: usize) {
        assert_eq!(offsets.len(), self.batch.seqs.len(), "score offsets and sequences");
        for (&offset, seq) in offsets.iter().zip(self.batch.seqs) {
            let end = offset + self.shape.heads * seq.q_len as usize * seq.kv_len as usize;
            assert!(end <= len, "the scores of {seq:?} at {offset} end beyond {len}");
        }
    }
}

impl Block<'_> {
    fn rows(&self, group: usize) -> usize {
        self.tokens.len() * group
    }

    /// The position of a token, counted as in `tokens`.
    #[inline(always)]
    fn position(&self, token: usize) -> usize {
        self.seq.first_position() + token
    }

    /// The position of a row's token.
    #[inline(always)]
    fn position_of_row(&self, group: usize, row: usize) -> usize {
        self.position(self.tokens.start + row / group)
    }

    /// The packed row of a token.
    fn packed_row(&self, token: usize) -> usize {
        self.seq.q_start as usize + token
    }

    /// Where the score row of a head and token starts in the sequence's score matrix.
    fn score_row(&self, head: usize, token: usize) -> usize {
        (head * self.seq.q_len as usize + token) * self.seq.kv_len as usize
    }
}

/// What is summed up of rows so far.
struct Sums<'s> {
    /// Values weighted with exponentials, `[rows][padded head_dim]`.
    o: &'s mut [f32],
    /// The largest score, per row.
    max: &'s mut [f32],
    /// The exponentials of all scores against it, per row.
    sum: &'s mut [f32],
}

impl<'s> Sums<'s> {
    fn len(rows: usize, d: usize) -> usize {
        rows * padded_dim(d) + 2 * rows.next_multiple_of(KV_LANES)
    }

    fn carve(memory: &'s mut [f32], rows: usize, d: usize) -> Sums<'s> {
        let mut carver = Carver(memory);
        Sums { o: carver.take(rows * padded_dim(d)), max: carver.take(rows), sum: carver.take(rows) }
    }

    #[inline(always)]
    fn clear(&mut self, rows: usize, row_len: usize) {
        self.o[..rows * row_len].fill(0.0);
        self.max[..rows].fill(f32::NEG_INFINITY);
        self.sum[..rows].fill(0.0);
    }
}

/// One worker's memory for one block, carved from its scratch.
struct Scratch<'s> {
    /// Scaled queries, `[rows][head_dim]`.
    q: &'s mut [f32],
    /// Scores, then probabilities of the current tile, `[rows][TILE]`.
    p: &'s mut [f32],
    /// Of the current chunk.
    chunk: Sums<'s>,
    /// Of all chunks before.
    total: Sums<'s>,
    /// What is left of earlier sums, per row.
    shrink: &'s mut [f32],
    /// The first position that counts, per row; for probabilities that come from memory.
    first: &'s mut [u32],
    /// Keys of the current tile as f32, `[TILE / 16][head_dim][16]`.
    keys: &'s mut [f32],
    /// Values of the current tile as f32, `[TILE][padded head_dim]`.
    values: &'s mut [f32],
}

impl<'s> Scratch<'s> {
    fn len(rows: usize, d: usize) -> usize {
        // Each part is rounded up to a cache line.
        rows * (d + TILE + 2) + TILE * (d + padded_dim(d)) + 2 * Sums::len(rows, d) + 6 * KV_LANES
    }

    fn carve(memory: &'s mut [f32], rows: usize, d: usize) -> Scratch<'s> {
        let mut carver = Carver(memory);
        Scratch {
            q: carver.take(rows * d),
            p: carver.take(rows * TILE),
            chunk: Sums::carve(carver.take(Sums::len(rows, d)), rows, d),
            total: Sums::carve(carver.take(Sums::len(rows, d)), rows, d),
            shrink: carver.take(rows),
            first: bytemuck::cast_slice_mut(carver.take(rows)),
            keys: carver.take(TILE * d),
            values: carver.take(TILE * padded_dim(d)),
        }
    }
}

/// Cuts memory into parts that start on cache lines.
struct Carver<'s>(&'s mut [f32]);

impl<'s> Carver<'s> {
    fn take(&mut self, len: usize) -> &'s mut [f32] {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(len.next_multiple_of(KV_LANES));
        self.0 = rest;
        &mut part[..len]
    }
}

impl<'a> Cache<'a> {
    fn of(kv: &'a KvLayer<'_>) -> Cache<'a> {
        Cache { geometry: kv.geometry, data: &*kv.data }
    }
}

impl Cpu {
    /// Runs `f(block, scratch)` for all blocks, those of late (long) runs first.
    fn for_blocks(&mut self, job: &Job<'_>, f: &(dyn Fn(Block<'_>, Scratch<'_>) + Sync)) {
        let (blocks, rows, d) = (job.block_count(), job.max_rows(), job.shape.head_dim);
        self.reserve_worker_scratch(Scratch::len(rows, d));
        let scratch = crate::cpu::SharedMut::new(&mut self.worker_scratch);
        self.pool.run(blocks, &|task, worker| {
            // SAFETY: a worker runs one task at a time.
            let memory = unsafe { &mut scratch.slice(worker, 1)[0] };
            f(job.block(blocks - 1 - task), Scratch::carve(memory, rows, d));
        });
    }
}
