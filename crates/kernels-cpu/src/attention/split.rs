//! How fused attention is shared out: whole blocks, or the chunks of long ones.
//!
//! A block of a single token whose context is a large share of all there is to read would leave workers without work. Runs of
//! its chunks become tasks of their own; their sums wait in memory until all are there and are then folded in order, which is
//! what a worker that does the whole block does as well. So it never shows in the result what was split.

use std::ops::Range;

use super::fused::{FusedBlock, Part, fold_row, write_rows};
use super::{Block, CHUNK, Cache, Job, Scratch, Sums};
use crate::cpu::{Cpu, SharedMut};
use crate::kv::{AttnBatch, KvLayer, KvType, QkvShape, SeqSpan, padded_dim};
use crate::simd::{Kernel, Simd, dispatch, dispatch_pairs};
use crate::tier::Tier;

/// Tasks of equal size that each worker should find at least.
const TASKS_PER_WORKER: usize = 4;

impl Cpu {
    /// Fused causal attention over the paged cache, with grouped heads and an optional sliding window (the positions
    /// that a query sees, itself included). Prompt and decode rows take the same path.
    ///
    /// # Panics
    /// When a length does not fit, or a block table is too short.
    pub fn attention(
        &mut self,
        qkv: &[f32],
        shape: QkvShape,
        batch: &AttnBatch<'_>,
        kv: &KvLayer<'_>,
        window: Option<usize>,
        out: &mut [f32],
    ) {
        self.attention_with_sinks(qkv, shape, batch, kv, window, None, out);
    }

    /// [`Cpu::attention`] where each query head may have a sink: a score that takes its part of the softmax and gives no
    /// value.
    ///
    /// # Panics
    /// When a length does not fit, or a block table is too short.
    pub fn attention_with_sinks(
        &mut self,
        qkv: &[f32],
        shape: QkvShape,
        batch: &AttnBatch<'_>,
        kv: &KvLayer<'_>,
        window: Option<usize>,
        sinks: Option<&[f32]>,
        out: &mut [f32],
    ) {
        kv.check(shape, batch);
        let job = Job::new(qkv, shape, batch, window).with_sinks(sinks);
        job.check_rows(qkv.len() / shape.row());
        job.check_rows(out.len() / shape.q_row());
        let (tier, cache, out) = (self.tier, Cache::of(kv), SharedMut::new(out));
        let in_pairs = tier.multiplies_pairs() && cache.geometry.kind == KvType::Bf16;
        let plan = Plan::new(&job, if tier == Tier::Scalar { 1 } else { self.threads() });
        let (rows, d, group) = (job.max_rows(), shape.head_dim, job.group);
        let sums_len = Sums::len(group, d);
        self.reserve_worker_scratch(Scratch::len(rows, d));
        self.reserve_partial_sums(plan.slots() * sums_len);
        let (scratch, partial) = (SharedMut::new(&mut self.worker_scratch), SharedMut::new(&mut self.partial_sums));

        let (tasks, threads) = (plan.tasks(), self.threads());
        self.pool.run(tasks, &|task, worker| {
            // SAFETY: a worker runs one task at a time.
            let memory = unsafe { &mut scratch.slice(worker, 1)[0] };
            let scratch = Scratch::carve(memory, rows, d);
            // Late runs of a prompt take longest: they come first.
            let Share { block, part } = plan.share(tasks - 1 - task);
            // Workers take turns, more or less.
            let following = (task + threads < tasks).then(|| plan.share(tasks - 1 - task - threads).start(&job));
            let part = part.map(|Slots { chunks, first_slot }| Part {
                // SAFETY: each chunk has its own slot.
                sums: unsafe { partial.slice(first_slot * sums_len, chunks.len() * sums_len) },
                chunks,
            });
            // SAFETY: everything was checked, and each block writes its own rows and heads.
            unsafe {
                let block = FusedBlock { job: &job, cache, block, scratch, part, following, out: out.ptr() };
                if in_pairs { dispatch_pairs(tier, block) } else { dispatch(tier, block) }
            }
        });
        if plan.slots() == 0 {
            return;
        }
        self.pool.run(plan.split_blocks(), &|task, worker| {
            let (block, slots) = plan.split_block(task);
            // SAFETY: a worker runs one task at a time, and no task shares its slots.
            let (memory, chunks) = unsafe {
                (&mut scratch.slice(worker, 1)[0], partial.slice(slots.start * sums_len, slots.len() * sums_len))
            };
            let total = Sums::carve(memory, group, d);
            // SAFETY: as above.
            unsafe { dispatch(tier, Fold { job: &job, block, chunks, total, out: out.ptr() }) };
        });
    }

    /// Allocates what attention over up to `max_positions` of a sequence needs, so that it never allocates.
    pub fn reserve_attention(&mut self, shape: QkvShape, max_positions: usize) {
        let (group, d) = (shape.group(), shape.head_dim);
        let rows = super::max_block_rows(group);
        self.reserve_worker_scratch(Scratch::len(rows, d));
        if self.threads() > 1 {
            // Each split block is more than this part of all blocks together, so they are fewer. One that does not start
            // and end with a chunk touches two more.
            let blocks = TASKS_PER_WORKER * self.threads();
            self.reserve_partial_sums(blocks * (max_positions / CHUNK + 2) * Sums::len(group, d));
        }
    }
}

/// Which sequences are split, and what the tasks are: sequence by sequence, blocks of a sequence in the order of
/// [`Job::block`], runs of chunks of a block in order.
struct Plan<'a> {
    job: &'a Job<'a>,
    /// Single tokens that see more than this are split.
    whole_positions: usize,
}

/// A task.
struct Share<'a> {
    block: Block<'a>,
    /// `None`: the whole block.
    part: Option<Slots>,
}

impl<'a> Share<'a> {
    /// The block, and the first position that is read.
    fn start(self, job: &Job<'_>) -> (Block<'a>, usize) {
        let first = job.visible(self.block.position(self.block.tokens.start)).start;
        let first = self.part.map_or(first, |part| first.max(part.chunks.start * CHUNK));
        (self.block, first)
    }
}

/// Chunks of a block, and where the sums of the first of them go.
struct Slots {
    chunks: Range<usize>,
    first_slot: usize,
}

impl<'a> Plan<'a> {
    fn new(job: &'a Job<'a>, workers: usize) -> Plan<'a> {
        let work = |seq: &SeqSpan| seq.q_len as usize * job.visible(seq.kv_len as usize - 1).len();
        let total = job.batch.seqs.iter().filter(|seq| seq.q_len > 0).map(work).sum::<usize>() * job.shape.kv_heads;
        let whole_positions = if workers > 1 { total / (TASKS_PER_WORKER * workers) } else { usize::MAX };
        Plan { job, whole_positions }
    }

    /// The chunks that a sequence's blocks are split into; none where they stay whole.
    fn chunks(&self, seq: &SeqSpan) -> Range<usize> {
        let is_single = seq.q_len == 1;
        if is_single && self.job.visible(seq.kv_len as usize - 1).len() > self.whole_positions {
            let chunks = self.job.chunks(&Block { seq_index: 0, seq, kv_head: 0, tokens: 0..1 });
            if chunks.len() > 1 {
                return chunks;
            }
        }
        0..0
    }

    /// The tasks that the chunks of a block make. Neighbours stay together, for the next tile is fetched ahead; half of
    /// what a block may be is small enough to share out evenly.
    fn chunk_runs(&self, chunks: &Range<usize>) -> usize {
        chunks.len().div_ceil((self.whole_positions / (2 * CHUNK)).max(1))
    }

    fn slots(&self) -> usize {
        self.job.batch.seqs.iter().map(|seq| self.chunks(seq).len()).sum::<usize>() * self.job.shape.kv_heads
    }

    fn tasks(&self) -> usize {
        let tasks = |seq: &SeqSpan| self.job.runs(seq) * self.chunk_runs(&self.chunks(seq)).max(1);
        self.job.batch.seqs.iter().map(tasks).sum::<usize>() * self.job.shape.kv_heads
    }

    fn share(&self, mut index: usize) -> Share<'a> {
        let (mut first_slot, kv_heads) = (0, self.job.shape.kv_heads);
        for (seq_index, seq) in self.job.batch.seqs.iter().enumerate() {
            let chunks = self.chunks(seq);
            let runs = self.chunk_runs(&chunks);
            let tasks = self.job.runs(seq) * runs.max(1) * kv_heads;
            if index >= tasks {
                index -= tasks;
                first_slot += chunks.len() * kv_heads;
                continue;
            }
            if chunks.is_empty() {
                return Share { block: self.job.block_of(seq_index, index), part: None };
            }
            let (block, run) = (index / runs, index % runs);
            let (from, to) = (chunks.len() * run / runs, chunks.len() * (run + 1) / runs);
            first_slot += block * chunks.len() + from;
            let part = Some(Slots { chunks: chunks.start + from..chunks.start + to, first_slot });
            return Share { block: self.job.block_of(seq_index, block), part };
        }
        unreachable!("attention task beyond {}", self.tasks())
    }

    fn split_blocks(&self) -> usize {
        self.job.batch.seqs.iter().filter(|seq| !self.chunks(seq).is_empty()).count() * self.job.shape.kv_heads
    }

    /// A block that was split, and the slots of its chunks in order.
    fn split_block(&self, index: usize) -> (Block<'a>, Range<usize>) {
        let kv_heads = self.job.shape.kv_heads;
        let (nth, head) = (index / kv_heads, index % kv_heads);
        let mut first_slot = 0;
        let mut split = self.job.batch.seqs.iter().map(|seq| self.chunks(seq).len()).enumerate();
        let mut split = split.by_ref().filter(|(_, chunks)| *chunks > 0);
        for (_, chunks) in split.by_ref().take(nth) {
            first_slot += chunks * kv_heads;
        }
        match split.next() {
            Some((seq_index, chunks)) => {
                let first = first_slot + head * chunks;
                (self.job.block_of(seq_index, head), first..first + chunks)
            }
            None => unreachable!("split block {index} of {}", self.split_blocks()),
        }
    }
}

/// Folds the chunks of a block and writes its rows.
struct Fold<'a, 's> {
    job: &'a Job<'a>,
    block: Block<'a>,
    /// The sums of its chunks, in order.
    chunks: &'s mut [f32],
    total: Sums<'s>,
    out: *mut f32,
}

impl Kernel for Fold<'_, '_> {
    fn scalar(self) {
        unreachable!("the scalar tier splits nothing");
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(mut self) {
        let (group, d) = (self.job.group, self.job.shape.head_dim);
        for (index, memory) in self.chunks.chunks_exact_mut(Sums::len(group, d)).enumerate() {
            let chunk = Sums::carve(memory, group, d);
            for row in 0..group {
                // SAFETY: both have a row per head of the group.
                unsafe { fold_row::<S>(&mut self.total, &chunk, row, padded_dim(d), index == 0) };
            }
        }
        // SAFETY: no other block writes these rows and heads.
        unsafe { write_rows::<S>(self.job, &self.block, &self.total, self.out) };
    }
}
