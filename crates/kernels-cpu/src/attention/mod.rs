//! Causal attention over the paged cache, for prompts and decoding alike.
//!
//! Work is cut into blocks of query tokens of one kv head; the query heads that share it are rows of one small matrix
//! product, so keys and values are read once for all of them. Positions are walked in tiles at absolute multiples of
//! [`TILE`], and a row takes part in exactly the tiles and positions that it may see. So its result depends neither on
//! the other rows of its block, nor on chunking, nor on the size of cache blocks.

mod fused;
mod tile;
mod unfused;

use std::ops::Range;

use crate::cpu::Cpu;
use crate::kv::{AttnBatch, KvGeometry, KvLayer, QkvShape, SeqSpan, padded_dim};

/// Positions that are processed together.
pub(crate) const TILE: usize = 64;
/// Rows (query tokens times heads of a group) that a block aims at: enough to reuse a tile well, small enough for the
/// cache.
const BLOCK_ROWS: usize = 96;

/// What all blocks of one call share.
pub(crate) struct Job<'a> {
    /// Empty where queries are not read.
    qkv: &'a [f32],
    shape: QkvShape,
    group: usize,
    batch: &'a AttnBatch<'a>,
    /// How many positions a query sees, itself included.
    window: usize,
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
        Job { qkv, shape, group, batch, window }
    }

    fn tokens_per_block(&self) -> usize {
        (BLOCK_ROWS / self.group).max(1)
    }

    /// Rows of the largest block.
    fn max_rows(&self) -> usize {
        self.tokens_per_block() * self.group
    }

    fn block_count(&self) -> usize {
        let blocks = |seq: &SeqSpan| (seq.q_len as usize).div_ceil(self.tokens_per_block());
        self.batch.seqs.iter().map(blocks).sum::<usize>() * self.shape.kv_heads
    }

    /// Block `index`; neighbours share tokens, not heads.
    fn block(&self, index: usize) -> Block<'a> {
        let (mut run, kv_head) = (index / self.shape.kv_heads, index % self.shape.kv_heads);
        let size = self.tokens_per_block();
        for (seq_index, seq) in self.batch.seqs.iter().enumerate() {
            let q_len = seq.q_len as usize;
            let runs = q_len.div_ceil(size);
            if run < runs {
                return Block { seq_index, seq, kv_head, tokens: run * size..q_len.min((run + 1) * size) };
            }
            run -= runs;
        }
        unreachable!("attention block {index} of {}", self.block_count())
    }

    /// The positions that the query at `position` sees.
    #[inline(always)]
    fn visible(&self, position: usize) -> Range<usize> {
        (position + 1).saturating_sub(self.window)..position + 1
    }

    /// The query head of a row of a block.
    fn head(&self, block: &Block<'_>, row: usize) -> usize {
        block.kv_head * self.group + row % self.group
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

    /// The packed row of a token.
    fn packed_row(&self, token: usize) -> usize {
        self.seq.q_start as usize + token
    }

    /// Where the score row of a head and token starts in the sequence's score matrix.
    fn score_row(&self, head: usize, token: usize) -> usize {
        (head * self.seq.q_len as usize + token) * self.seq.kv_len as usize
    }
}

/// One worker's memory for one block, carved from its scratch.
struct Scratch<'s> {
    /// Scaled queries, `[rows][head_dim]`.
    q: &'s mut [f32],
    /// Scores, then probabilities of the current tile, `[rows][TILE]`.
    p: &'s mut [f32],
    /// Sums of values, `[rows][padded head_dim]`.
    o: &'s mut [f32],
    /// Largest score so far, per row.
    max: &'s mut [f32],
    /// Sum of exponentials so far, per row.
    sum: &'s mut [f32],
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
        rows * (d + TILE + padded_dim(d) + 3) + TILE * (d + padded_dim(d)) + 8 * 16
    }

    fn carve(memory: &'s mut [f32], rows: usize, d: usize) -> Scratch<'s> {
        let mut rest = memory;
        let mut take = |len: usize| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(16));
            rest = tail;
            &mut part[..len]
        };
        Scratch {
            q: take(rows * d),
            p: take(rows * TILE),
            o: take(rows * padded_dim(d)),
            max: take(rows),
            sum: take(rows),
            first: bytemuck::cast_slice_mut(take(rows)),
            keys: take(TILE * d),
            values: take(TILE * padded_dim(d)),
        }
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
