//! Attention as three ops that pass their results through memory: the baseline that fusing is measured against.
//!
//! The scores of sequence i start at `score_offsets[i]` and are laid out `[heads][q_len][kv_len]`.

use super::fused::softmax;
use super::products::{add_values, scores};
use super::tile::TileSpan;
use super::{Block, Cache, Job, Scratch, TILE};
use crate::cpu::{Cpu, SharedMut};
use crate::kv::{AttnBatch, KvLayer, QkvShape, padded_dim};
use crate::simd::{Kernel, Simd, dispatch, exp};

impl Cpu {
    /// Scaled scores of every query and position; minus infinity where a query does not see the position.
    ///
    /// # Panics
    /// When a length does not fit, or a block table is too short.
    pub fn attn_scores(
        &mut self,
        qkv: &[f32],
        shape: QkvShape,
        batch: &AttnBatch<'_>,
        kv: &KvLayer<'_>,
        window: Option<usize>,
        score_offsets: &[usize],
        scores: &mut [f32],
    ) {
        kv.check(shape, batch);
        let job = Job::new(qkv, shape, batch, window);
        job.check_rows(qkv.len() / shape.row());
        job.check_scores(score_offsets, scores.len());
        let (tier, cache) = (self.tier, Cache::of(kv));
        let all = SharedMut::new(scores);
        self.for_blocks(&job, &|block, scratch| {
            // SAFETY: everything was checked, and each block writes its own rows and heads.
            unsafe {
                let scores = all.ptr().add(score_offsets[block.seq_index]);
                dispatch(tier, ScoreBlock { job: &job, cache, block, scratch, scores });
            }
        });
    }

    /// Softmax of every score row, in place; 0 where a query does not see the position.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn attn_softmax(
        &mut self,
        shape: QkvShape,
        batch: &AttnBatch<'_>,
        window: Option<usize>,
        score_offsets: &[usize],
        scores: &mut [f32],
    ) {
        self.attn_softmax_with_sinks(shape, batch, window, None, score_offsets, scores);
    }

    /// [`Cpu::attn_softmax`] with sinks, as in [`Cpu::attention_with_sinks`].
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn attn_softmax_with_sinks(
        &mut self,
        shape: QkvShape,
        batch: &AttnBatch<'_>,
        window: Option<usize>,
        sinks: Option<&[f32]>,
        score_offsets: &[usize],
        scores: &mut [f32],
    ) {
        let job = Job::new(&[], shape, batch, window).with_sinks(sinks);
        job.check_rows(usize::MAX);
        job.check_scores(score_offsets, scores.len());
        let (tier, all) = (self.tier, SharedMut::new(scores));
        self.for_blocks(&job, &|block, _scratch| {
            for index in 0..block.rows(job.group) {
                let token = block.tokens.start + index / job.group;
                let start = score_offsets[block.seq_index] + block.score_row(job.head(&block, index), token);
                let sink = |max: f32| job.sink(&block, index, max);
                // SAFETY: rows are disjoint.
                let row = unsafe { all.slice(start, block.seq.kv_len as usize) };
                let seen = job.visible(block.position(token));
                row[..seen.start].fill(0.0);
                row[seen.end..].fill(0.0);
                // SAFETY: the visible part lies within the row.
                unsafe { dispatch(tier, SoftmaxRow { row, seen, sink }) };
            }
        });
    }

    /// Values summed up with the probabilities in `scores`.
    ///
    /// # Panics
    /// When a length does not fit, or a block table is too short.
    pub fn attn_values(
        &mut self,
        shape: QkvShape,
        batch: &AttnBatch<'_>,
        kv: &KvLayer<'_>,
        score_offsets: &[usize],
        scores: &[f32],
        out: &mut [f32],
    ) {
        kv.check(shape, batch);
        let job = Job::new(&[], shape, batch, None);
        job.check_rows(out.len() / shape.q_row());
        job.check_scores(score_offsets, scores.len());
        let (tier, cache, out) = (self.tier, Cache::of(kv), SharedMut::new(out));
        self.for_blocks(&job, &|block, scratch| {
            let probabilities = &scores[score_offsets[block.seq_index]..];
            // SAFETY: everything was checked, and each block writes its own rows and heads.
            unsafe { dispatch(tier, ValueBlock { job: &job, cache, block, scratch, probabilities, out: out.ptr() }) };
        });
    }
}

struct ScoreBlock<'a, 's> {
    job: &'a Job<'a>,
    cache: Cache<'a>,
    block: Block<'a>,
    scratch: Scratch<'s>,
    /// The sequence's scores.
    scores: *mut f32,
}

impl Kernel for ScoreBlock<'_, '_> {
    fn scalar(self) {
        let (job, block, d) = (self.job, &self.block, self.job.shape.head_dim);
        let scale = 1.0 / (d as f32).sqrt();
        for row in 0..block.rows(job.group) {
            let token = block.tokens.start + row / job.group;
            let head = job.head(block, row);
            let q = block.packed_row(token) * job.shape.row() + head * d;
            let seen = job.visible(block.position(token));
            for position in 0..block.seq.kv_len as usize {
                let score = if seen.contains(&position) {
                    self.cache.score(job, block, &job.qkv[q..q + d], position) * scale
                } else {
                    f32::NEG_INFINITY
                };
                // SAFETY: within the sequence's scores, and no other block writes this row.
                unsafe { *self.scores.add(block.score_row(head, token) + position) = score };
            }
        }
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let (job, block, scratch) = (self.job, self.block, self.scratch);
        let (d, rows, kv_len) = (job.shape.head_dim, block.rows(job.group), block.seq.kv_len as usize);
        let end = block.position(block.tokens.end - 1) + 1;
        job.load_queries(&block, 1.0, scratch.q);
        for base in (0..kv_len).step_by(TILE) {
            let seeing = if base < end { job.rows_that_see(&block, &(base..base + TILE)) } else { 0..0 };
            if !seeing.is_empty() {
                let span = TileSpan::new(job, &block, base, end);
                // SAFETY: the caller has the features; the scratch was made for this block.
                unsafe {
                    let keys = self.cache.keys::<S>(&span, scratch.keys);
                    scores::<S, f32, false>(seeing.clone(), scratch.q, d, &keys, &keys, scratch.p);
                    if let Some(scales) = self.cache.scales(&span, true) {
                        scale_columns(&mut scratch.p[seeing.start * TILE..seeing.end * TILE], &scales);
                    }
                }
            }
            let width = TILE.min(kv_len - base);
            for row in 0..rows {
                let token = block.tokens.start + row / job.group;
                let visible = if seeing.contains(&row) { job.visible_in_tile(&block, row, base) } else { 0..0 };
                // SAFETY: the row's part of this tile lies within the sequence's scores.
                unsafe {
                    let target = self.scores.add(block.score_row(job.head(&block, row), token) + base);
                    let mut i = 0;
                    while i < width {
                        let (lo, hi) = (visible.start as isize - i as isize, visible.end as isize - i as isize);
                        let score = S::load(scratch.p.as_ptr().add(row * TILE + i));
                        let score = S::keep(score, lo, hi, S::splat(f32::NEG_INFINITY));
                        S::store_partial(target.add(i), score, S::LANES.min(width - i));
                        i += S::LANES;
                    }
                }
            }
        }
    }
}

/// Multiplies each row of a tile with the scales of its columns.
#[inline(always)]
fn scale_columns(p: &mut [f32], scales: &[f32; TILE]) {
    for row in p.chunks_exact_mut(TILE) {
        for (x, scale) in row.iter_mut().zip(scales) {
            *x *= scale;
        }
    }
}

struct SoftmaxRow<'a, F> {
    row: &'a mut [f32],
    /// The part that the query sees.
    seen: std::ops::Range<usize>,
    /// What the sink adds to the sum of exponentials against the largest score.
    sink: F,
}

impl<F: Fn(f32) -> f32> Kernel for SoftmaxRow<'_, F> {
    fn scalar(self) {
        softmax(&mut self.row[self.seen], self.sink);
    }

    /// Vectors start at multiples of the lane count from the row's start, so that a position is always summed up in the
    /// same lane.
    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let (lo, hi) = (self.seen.start, self.seen.end);
        let row = self.row.as_mut_ptr();
        let start = lo - lo % S::LANES;
        // SAFETY: partial vectors end with the visible part; what lies before it in the first vector is kept apart.
        unsafe {
            let hidden = S::splat(f32::NEG_INFINITY);
            let mut max = hidden;
            for i in (start..hi).step_by(S::LANES) {
                let n = S::LANES.min(hi - i);
                let score = S::keep(S::load_partial(row.add(i), n), lo as isize - i as isize, n as isize, hidden);
                max = S::max(score, max);
            }
            let largest = S::max_lane(max);
            let max = S::splat(largest);
            let mut sum = S::zero();
            for i in (start..hi).step_by(S::LANES) {
                let n = S::LANES.min(hi - i);
                let score = S::keep(S::load_partial(row.add(i), n), lo as isize - i as isize, n as isize, hidden);
                let e = exp::<S>(S::sub(score, max));
                S::store_partial(row.add(i), e, n);
                sum = S::add(sum, e);
            }
            let sum = S::splat(S::sum(sum) + (self.sink)(largest));
            for i in (start..hi).step_by(S::LANES) {
                let n = S::LANES.min(hi - i);
                S::store_partial(row.add(i), S::div(S::load_partial(row.add(i), n), sum), n);
            }
        }
    }
}

struct ValueBlock<'a, 's> {
    job: &'a Job<'a>,
    cache: Cache<'a>,
    block: Block<'a>,
    scratch: Scratch<'s>,
    /// The sequence's score rows after the softmax.
    probabilities: &'a [f32],
    /// The whole output, `[rows][heads * head_dim]`.
    out: *mut f32,
}

impl ValueBlock<'_, '_> {
    /// A row's probabilities, and the positions that count: up to its own, from the first that is not zero. (What a
    /// window hides has probability zero, and the cache may have reused its memory.)
    #[inline(always)]
    fn row(&self, row: usize) -> (&[f32], std::ops::Range<usize>) {
        let (job, block) = (self.job, &self.block);
        let token = block.tokens.start + row / job.group;
        let start = block.score_row(job.head(block, row), token);
        let end = block.position(token) + 1;
        let p = &self.probabilities[start..start + end];
        (p, p.iter().position(|&p| p != 0.0).unwrap_or(end)..end)
    }
}

impl Kernel for ValueBlock<'_, '_> {
    fn scalar(self) {
        for row in 0..self.block.rows(self.job.group) {
            let (p, seen) = self.row(row);
            for i in 0..self.job.shape.head_dim {
                let mut sum = 0.0;
                for position in seen.clone() {
                    sum += p[position] * self.cache.value(self.job, &self.block, position, i);
                }
                // SAFETY: within the output, and no other block writes this row and head.
                unsafe { *self.out.add(self.job.out_offset(&self.block, row) + i) = sum };
            }
        }
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let (job, block) = (self.job, self.block.clone());
        let (d, row_len, rows) = (job.shape.head_dim, padded_dim(job.shape.head_dim), block.rows(job.group));
        let end = block.position(block.tokens.end - 1) + 1;
        self.scratch.total.o[..rows * row_len].fill(0.0);
        for row in 0..rows {
            self.scratch.first[row] = self.row(row).1.start as u32;
        }
        for base in (0..end).step_by(TILE) {
            let span = TileSpan::new(job, &block, base, end);
            let rows = job.rows_that_see(&block, &(base..base + TILE));
            for row in rows.clone() {
                let token = block.tokens.start + row / job.group;
                let start = block.score_row(job.head(&block, row), token) + base;
                self.scratch.p[row * TILE..][..span.valid]
                    .copy_from_slice(&self.probabilities[start..start + span.valid]);
            }
            let first = &*self.scratch.first;
            let visible = |row: usize| {
                let causal = job.visible_in_tile(&block, row, base);
                (first[row] as usize).saturating_sub(base).min(causal.end)..causal.end
            };
            // SAFETY: the caller has the features; the scratch was made for this block.
            unsafe {
                if let Some(scales) = self.cache.scales(&span, false) {
                    scale_columns(&mut self.scratch.p[rows.start * TILE..rows.end * TILE], &scales);
                }
                let values = self.cache.values::<S>(&span, self.scratch.values);
                let (p, o) = (&*self.scratch.p, &mut *self.scratch.total.o);
                add_values::<S, f32, false>(rows, &visible, p, &values, &values, row_len, o);
            }
        }
        for row in 0..rows {
            // SAFETY: as above.
            unsafe {
                let o = self.scratch.total.o.as_ptr().add(row * row_len);
                std::ptr::copy_nonoverlapping(o, self.out.add(job.out_offset(&block, row)), d);
            }
        }
    }
}
