//! Attention in one pass over keys and values, with an online softmax; scores never leave the cache.

use std::ops::Range;

use super::tile::{TileSpan, add_values, scores};
use super::{Block, Cache, Job, Scratch, TILE};
use crate::cpu::Cpu;
use crate::kv::{AttnBatch, KvLayer, QkvShape, padded_dim};
use crate::simd::{Kernel, Simd, dispatch, exp};

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
        kv.check(shape, batch);
        let job = Job::new(qkv, shape, batch, window);
        job.check_rows(qkv.len() / shape.row());
        job.check_rows(out.len() / shape.q_row());
        let (tier, cache) = (self.tier, Cache::of(kv));
        let out = crate::cpu::SharedMut::new(out);
        self.for_blocks(&job, &|block, scratch| {
            // SAFETY: everything was checked, and each block writes its own rows and heads.
            unsafe { dispatch(tier, FusedBlock { job: &job, cache, block, scratch, out: out.ptr() }) };
        });
    }
}

struct FusedBlock<'a, 's> {
    job: &'a Job<'a>,
    cache: Cache<'a>,
    block: Block<'a>,
    scratch: Scratch<'s>,
    /// The whole output, `[rows][heads * head_dim]`.
    out: *mut f32,
}

impl FusedBlock<'_, '_> {
    /// Where the output of a row of the block starts.
    #[inline(always)]
    unsafe fn out_row(&self, row: usize) -> *mut f32 {
        let (shape, token) = (&self.job.shape, self.block.tokens.start + row / self.job.group);
        let head = self.job.head(&self.block, row);
        // SAFETY: rows were checked against the output's length.
        unsafe { self.out.add(self.block.packed_row(token) * shape.q_row() + head * shape.head_dim) }
    }
}

impl Kernel for FusedBlock<'_, '_> {
    /// Row by row: the largest score, the sum of the exponentials, the weighted sum.
    fn scalar(self) {
        let (job, block, d) = (self.job, &self.block, self.job.shape.head_dim);
        let scale = 1.0 / (d as f32).sqrt();
        for row in 0..block.rows(job.group) {
            let token = block.tokens.start + row / job.group;
            let q = block.packed_row(token) * job.shape.row() + job.head(block, row) * d;
            let seen = job.visible(block.position(token));
            // Scores are computed three times over rather than kept: the reference needs no memory of its own.
            let score = |position| self.cache.score(job, block, &job.qkv[q..q + d], position) * scale;
            let max = seen.clone().map(score).fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = seen.clone().map(|position| (score(position) - max).exp()).sum();
            // SAFETY: within the output, and no other block writes this row and head.
            let out = unsafe { std::slice::from_raw_parts_mut(self.out_row(row), d) };
            out.fill(0.0);
            for position in seen {
                let p = (score(position) - max).exp() / sum;
                for (i, out) in out.iter_mut().enumerate() {
                    *out += p * self.cache.value(job, block, position, i);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(mut self) {
        let (job, block) = (self.job, self.block.clone());
        let (d, row_len, rows) = (job.shape.head_dim, padded_dim(job.shape.head_dim), block.rows(job.group));
        let (first, last) = (block.position(block.tokens.start), block.position(block.tokens.end - 1));
        job.load_queries(&block, self.scratch.q);
        self.scratch.o[..rows * row_len].fill(0.0);
        self.scratch.max[..rows].fill(f32::NEG_INFINITY);
        self.scratch.sum[..rows].fill(0.0);
        for tile in job.visible(first).start / TILE..last / TILE + 1 {
            let base = tile * TILE;
            let span = TileSpan::new(job, &block, base, last + 1);
            let next = (base + TILE <= last).then(|| TileSpan::new(job, &block, base + TILE, last + 1));
            let rows = job.rows_that_see(&block, base);
            let visible = |row: usize| job.visible_in_tile(&block, row, base);
            // SAFETY: the caller has the features; the scratch was made for this block.
            unsafe {
                let keys = self.cache.keys::<S>(&span, self.scratch.keys);
                let ahead = self.cache.ahead(next.as_ref(), true);
                scores::<S>(rows.clone(), self.scratch.q, d, &keys, ahead, self.scratch.p);
                self.cache.scale::<S>(&span, true, rows.clone(), self.scratch.p);
                for row in rows.clone() {
                    self.softmax_row::<S>(row, visible(row), row_len);
                }
                self.cache.scale::<S>(&span, false, rows.clone(), self.scratch.p);
                let values = self.cache.values::<S>(&span, self.scratch.values);
                let ahead = self.cache.ahead(next.as_ref(), false);
                add_values::<S>(rows, &visible, self.scratch.p, &values, ahead, row_len, self.scratch.o);
            }
        }
        for row in 0..rows {
            // SAFETY: as above.
            unsafe {
                let (o, out) = (self.scratch.o.as_ptr().add(row * row_len), self.out_row(row));
                let sum = S::splat(self.scratch.sum[row]);
                let mut i = 0;
                while i < d {
                    S::store_partial(out.add(i), S::div(S::load(o.add(i)), sum), S::LANES.min(d - i));
                    i += S::LANES;
                }
            }
        }
    }
}

impl FusedBlock<'_, '_> {
    /// Turns the scores of one row into exponentials against the largest score so far, and scales what was summed up
    /// before to that.
    #[inline(always)]
    unsafe fn softmax_row<S: Simd>(&mut self, row: usize, visible: Range<usize>, row_len: usize) {
        // SAFETY: the row lies within the scratch.
        unsafe {
            let p = self.scratch.p.as_mut_ptr().add(row * TILE);
            let hidden = S::splat(f32::NEG_INFINITY);
            let mut max = S::splat(self.scratch.max[row]);
            for i in (0..TILE).step_by(S::LANES) {
                let (lo, hi) = (visible.start as isize - i as isize, visible.end as isize - i as isize);
                let score = S::keep(S::load(p.add(i)), lo, hi, hidden);
                S::store(p.add(i), score);
                max = S::max(score, max);
            }
            let max = S::max_lane(max);
            let mut sum = S::zero();
            for i in (0..TILE).step_by(S::LANES) {
                let e = exp::<S>(S::sub(S::load(p.add(i)), S::splat(max)));
                S::store(p.add(i), e);
                sum = S::add(sum, e);
            }
            // The first tile of a row: exp(-inf) is 0, and 0 * 0 stays 0.
            let shrink = S::max_lane(exp::<S>(S::splat(self.scratch.max[row] - max)));
            self.scratch.max[row] = max;
            self.scratch.sum[row] = self.scratch.sum[row] * shrink + S::sum(sum);
            if shrink != 1.0 {
                let o = self.scratch.o.as_mut_ptr().add(row * row_len);
                for i in (0..row_len).step_by(S::LANES) {
                    S::store(o.add(i), S::mul(S::load(o.add(i)), S::splat(shrink)));
                }
            }
        }
    }
}

/// The oracle's softmax.
pub(super) fn softmax(p: &mut [f32]) {
    let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for p in p.iter_mut() {
        *p = (*p - max).exp();
        sum += *p;
    }
    for p in p {
        *p /= sum;
    }
}

impl Cache<'_> {
    /// The oracle's dot product of a query with the key at a position.
    pub(super) fn score(&self, job: &Job<'_>, block: &Block<'_>, q: &[f32], position: usize) -> f32 {
        let (physical, token) = job.batch.block(block.seq, position, self.geometry.tokens_per_block);
        let key = self.geometry.key_offset(physical, block.kv_head, token);
        let mut sum = 0.0;
        for (i, q) in q.iter().enumerate() {
            sum += q * self.geometry.read(self.data, key + i * self.geometry.lanes());
        }
        sum * self.geometry.read_scale(self.data, physical, block.kv_head, token, true)
    }

    /// Dimension `i` of the value at a position.
    pub(super) fn value(&self, job: &Job<'_>, block: &Block<'_>, position: usize, i: usize) -> f32 {
        let (physical, token) = job.batch.block(block.seq, position, self.geometry.tokens_per_block);
        self.geometry.read(self.data, self.geometry.value_offset(physical, block.kv_head, token) + i)
            * self.geometry.read_scale(self.data, physical, block.kv_head, token, false)
    }
}

impl Job<'_> {
    /// The block's queries, scaled by 1 / sqrt(head_dim), one row per token and head of the group.
    #[inline(always)]
    pub(super) fn load_queries(&self, block: &Block<'_>, q: &mut [f32]) {
        let d = self.shape.head_dim;
        let scale = 1.0 / (d as f32).sqrt();
        for (row, q) in q.chunks_exact_mut(d).take(block.rows(self.group)).enumerate() {
            let token = block.tokens.start + row / self.group;
            let source = block.packed_row(token) * self.shape.row() + self.head(block, row) * d;
            for (q, x) in q.iter_mut().zip(&self.qkv[source..source + d]) {
                *q = x * scale;
            }
        }
    }

    /// The rows of a block that see anything of the tile at `base`; later tokens see later positions, so they are a run.
    #[inline(always)]
    pub(super) fn rows_that_see(&self, block: &Block<'_>, base: usize) -> Range<usize> {
        let first = block.position(0);
        // Position p sees p + 1 - window ..= p.
        let from = base.saturating_sub(first).max(block.tokens.start);
        let to = (base + TILE - 1).saturating_add(self.window).saturating_sub(first);
        let to = to.min(block.tokens.end).max(from);
        (from - block.tokens.start) * self.group..(to - block.tokens.start) * self.group
    }

    /// The positions of the tile at `base` that a row sees, counted from `base`.
    #[inline(always)]
    pub(super) fn visible_in_tile(&self, block: &Block<'_>, row: usize, base: usize) -> Range<usize> {
        let seen = self.visible(block.position(block.tokens.start + row / self.group));
        seen.start.saturating_sub(base)..(seen.end - base).min(TILE)
    }
}
