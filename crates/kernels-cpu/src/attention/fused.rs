//! Attention in one pass over keys and values, with an online softmax; scores never leave the cache.

use std::ops::Range;

use half::{bf16, f16};

use super::products::{FEW_ROWS, add_values, is_streamable, scores};
use super::tile::TileSpan;
use super::{Block, CHUNK, Cache, Job, Scratch, Sums, TILE};
use crate::kv::{KV_LANES, KvType, padded_dim};
use crate::simd::{Element, Kernel, PairKernel, Simd, SimdPairs, exp2_below_one};

/// Some chunks of a block, each of which leaves its sums for others to fold.
pub(super) struct Part<'s> {
    pub(super) chunks: Range<usize>,
    /// One after the other.
    pub(super) sums: &'s mut [f32],
}

/// A block's attention: all of it, or the sums of some chunks.
pub(super) struct FusedBlock<'a, 's> {
    pub(super) job: &'a Job<'a>,
    pub(super) cache: Cache<'a>,
    pub(super) block: Block<'a>,
    pub(super) scratch: Scratch<'s>,
    /// `None`: all of it.
    pub(super) part: Option<Part<'s>>,
    /// What this worker probably does next, and the first position that it reads then.
    pub(super) following: Option<(Block<'a>, usize)>,
    /// The whole output, `[rows][heads * head_dim]`.
    pub(super) out: *mut f32,
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
            let sum = sum + job.sink(block, row, max);
            // SAFETY: within the output, and no other block writes this row and head.
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.add(job.out_offset(block, row)), d) };
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
        // Scores in units of ln 2: the exponential of a score is a power of two then.
        self.job.load_queries(&self.block, std::f32::consts::LOG2_E, self.scratch.q);
        // SAFETY: the caller has the features; the scratch was made for this block.
        unsafe {
            for chunk in self.chunks() {
                self.start_chunk();
                self.chunk::<S>(chunk * CHUNK..(chunk + 1) * CHUNK);
                self.end_chunk::<S>(chunk);
            }
            self.end::<S>();
        }
    }
}

impl PairKernel for FusedBlock<'_, '_> {
    #[inline(always)]
    unsafe fn simd<S: SimdPairs>(mut self) {
        // SAFETY: the caller has the features; the scratch was made for this block.
        unsafe {
            self.round_queries::<S>();
            for chunk in self.chunks() {
                self.start_chunk();
                self.pair_chunk::<S>(chunk * CHUNK..(chunk + 1) * CHUNK);
                self.end_chunk::<S::F>(chunk);
            }
            self.end::<S::F>();
        }
    }
}

impl<'a> FusedBlock<'a, '_> {
    #[inline(always)]
    fn chunks(&self) -> Range<usize> {
        self.part.as_ref().map_or_else(|| self.job.chunks(&self.block), |part| part.chunks.clone())
    }

    #[inline(always)]
    fn start_chunk(&mut self) {
        let (group, d) = (self.job.group, self.job.shape.head_dim);
        if let Some(part) = &mut self.part {
            let (sums, rest) = std::mem::take(&mut part.sums).split_at_mut(Sums::len(group, d));
            part.sums = rest;
            self.scratch.chunk = Sums::carve(sums, group, d);
        }
        self.scratch.chunk.clear(self.block.rows(group), padded_dim(d));
    }

    /// The tile to fetch while one is used: the next of this block, or the first of the next one. Where there is none, it
    /// is the same again.
    #[inline(always)]
    pub(super) fn tile_after(&self, span: &TileSpan<'a>) -> TileSpan<'a> {
        let (job, base) = (self.job, span.base + TILE);
        let end = |block: &Block<'_>| block.position(block.tokens.end - 1) + 1;
        let own_end = self.part.as_ref().map_or(usize::MAX, |part| part.chunks.end * CHUNK).min(end(&self.block));
        match &self.following {
            _ if base < own_end => TileSpan::new(job, &self.block, base, end(&self.block)),
            Some((block, first)) => TileSpan::new(job, block, first / TILE * TILE, end(block)),
            None => *span,
        }
    }

    /// Folds a chunk into those before, unless its sums are what is asked for.
    #[inline(always)]
    unsafe fn end_chunk<S: Simd>(&mut self, chunk: usize) {
        if self.part.is_some() {
            return;
        }
        let (job, block, row_len) = (self.job, &self.block, padded_dim(self.job.shape.head_dim));
        let positions = chunk * CHUNK..(chunk + 1) * CHUNK;
        for row in job.rows_that_see(block, &positions) {
            let is_first = job.visible(block.position_of_row(job.group, row)).start >= positions.start;
            // SAFETY: the caller's promise.
            unsafe { fold_row::<S>(&mut self.scratch.total, &self.scratch.chunk, row, row_len, is_first) };
        }
    }

    #[inline(always)]
    unsafe fn end<S: Simd>(&mut self) {
        if self.part.is_none() {
            // SAFETY: the caller's promise, and no other block writes these rows and heads.
            unsafe { write_rows::<S>(self.job, &self.block, &self.scratch.total, self.out) };
        }
    }

    /// Sums up what the block sees of a chunk, with the loops made for its rows and the cache's type.
    #[inline(always)]
    unsafe fn chunk<S: Simd>(&mut self, positions: Range<usize>) {
        let (geometry, d) = (&self.cache.geometry, self.job.shape.head_dim);
        let is_few = self.block.rows(self.job.group) <= FEW_ROWS && geometry.lanes() == KV_LANES;
        // SAFETY: the caller's promise.
        unsafe {
            match geometry.kind {
                KvType::F32 if is_few => self.tiles::<S, f32, true>(positions),
                KvType::F16 if is_few && is_streamable::<f16>(d) => self.tiles::<S, f16, true>(positions),
                KvType::Bf16 if is_few && is_streamable::<bf16>(d) => self.tiles::<S, bf16, true>(positions),
                KvType::Int8 if is_few && is_streamable::<i8>(d) => self.tiles::<S, i8, true>(positions),
                _ => self.tiles::<S, f32, false>(positions),
            }
        }
    }

    /// With `FEW` rows, keys and values are used as the cache holds them, in elements of `T`; else they are made f32 once
    /// per tile.
    #[inline(always)]
    unsafe fn tiles<S: Simd, T: Element, const FEW: bool>(&mut self, positions: Range<usize>) {
        let (job, block, cache) = (self.job, self.block.clone(), self.cache);
        let (d, row_len) = (job.shape.head_dim, padded_dim(job.shape.head_dim));
        let (first, end) = (block.position(block.tokens.start), block.position(block.tokens.end - 1) + 1);
        let start = job.visible(first).start.max(positions.start);
        for base in (start / TILE * TILE..positions.end.min(end)).step_by(TILE) {
            let span = TileSpan::new(job, &block, base, end);
            let next = self.tile_after(&span);
            let rows = job.rows_that_see(&block, &(base..base + TILE));
            let visible = |row: usize| job.visible_in_tile(&block, row, base);
            let Scratch { q, p, chunk, shrink, keys, values, .. } = &mut self.scratch;
            // SAFETY: the caller's promise.
            unsafe {
                let (keys, next_keys) = if FEW {
                    (cache.in_place::<T>(&span, true), cache.in_place::<T>(&next, true))
                } else {
                    let staged = cache.keys::<S>(&span, keys).map(|run| run.cast::<T>());
                    (staged, staged)
                };
                scores::<S, T, FEW>(rows.clone(), q, d, &keys, &next_keys, p);
                let (key_scales, value_scales) = (cache.scales(&span, true), cache.scales(&span, false));
                let scales = key_scales.as_ref().zip(value_scales.as_ref());
                softmax_rows::<S>(rows.clone(), &visible, scales, row_len, p, shrink, chunk);
                let (values, next_values) = if FEW {
                    (cache.in_place::<T>(&span, false), cache.in_place::<T>(&next, false))
                } else {
                    let staged = cache.values::<S>(&span, values).map(|run| run.cast::<T>());
                    (staged, staged)
                };
                add_values::<S, T, FEW>(rows, &visible, p, &values, &next_values, row_len, chunk.o);
            }
        }
    }
}

/// Turns the scores of rows into powers of two against their largest score so far, and scales what was summed up before to
/// that. Scores of codes are multiplied with the scales of their keys; what values are weighted with, with theirs.
#[inline(always)]
unsafe fn softmax_rows<S: Simd>(
    rows: Range<usize>,
    visible: &impl Fn(usize) -> Range<usize>,
    scales: Option<(&[f32; TILE], &[f32; TILE])>,
    row_len: usize,
    p: &mut [f32],
    shrink: &mut [f32],
    sums: &mut Sums<'_>,
) {
    // Three passes over the rows, in each of which they do not wait for each other.
    // SAFETY: the rows lie within the scratch.
    unsafe {
        for row in rows.clone() {
            let p = p.as_mut_ptr().add(row * TILE);
            let visible = visible(row);
            if visible != (0..TILE) || scales.is_some() {
                let hidden = S::splat(f32::NEG_INFINITY);
                for i in (0..TILE).step_by(S::LANES) {
                    let (lo, hi) = (visible.start as isize - i as isize, visible.end as isize - i as isize);
                    let mut score = S::load(p.add(i));
                    if let Some((keys, _)) = scales {
                        score = S::mul(score, S::load(keys.as_ptr().add(i)));
                    }
                    S::store(p.add(i), S::keep(score, lo, hi, hidden));
                }
            }
            let mut max = S::splat(sums.max[row]);
            for i in (0..TILE).step_by(S::LANES) {
                max = S::max(S::load(p.add(i)), max);
            }
            shrink[row] = sums.max[row];
            sums.max[row] = S::max_lane(max);
        }
        shrink_sums::<S>(rows.clone(), row_len, shrink, sums);
        for row in rows {
            let p = p.as_mut_ptr().add(row * TILE);
            let max = S::splat(sums.max[row]);
            let mut sum = S::zero();
            for i in (0..TILE).step_by(S::LANES) {
                let e = exp2_below_one::<S>(S::sub(S::load(p.add(i)), max));
                sum = S::add(sum, e);
                let weight = match scales {
                    Some((_, values)) => S::mul(e, S::load(values.as_ptr().add(i))),
                    None => e,
                };
                S::store(p.add(i), weight);
            }
            sums.sum[row] += S::sum(sum);
        }
    }
}

/// Scales what was summed up of rows against the largest scores in `shrink` to those that `sums` has now.
#[inline(always)]
pub(super) unsafe fn shrink_sums<S: Simd>(rows: Range<usize>, row_len: usize, shrink: &mut [f32], sums: &mut Sums<'_>) {
    // SAFETY: the rows lie within the scratch.
    unsafe {
        for first in rows.clone().step_by(S::LANES) {
            let n = S::LANES.min(rows.end - first);
            let shrink = shrink.as_mut_ptr().add(first);
            let (sum, max) = (sums.sum.as_mut_ptr().add(first), sums.max.as_ptr().add(first));
            // The first tile of a chunk: 2^-inf is 0, and 0 * 0 stays 0.
            let factor = exp2_below_one::<S>(S::sub(S::load_partial(shrink, n), S::load_partial(max, n)));
            S::store_partial(sum, S::mul(S::load_partial(sum, n), factor), n);
            if S::max_lane(S::sub(S::splat(1.0), factor)) == 0.0 {
                continue;
            }
            S::store_partial(shrink, factor, n);
            for row in 0..n {
                let o = sums.o.as_mut_ptr().add((first + row) * row_len);
                for i in (0..row_len).step_by(S::LANES) {
                    S::store(o.add(i), S::mul(S::load(o.add(i)), S::splat(*shrink.add(row))));
                }
            }
        }
    }
}

/// Adds the sums of a chunk to those of the chunks before, or starts with them.
#[inline(always)]
pub(super) unsafe fn fold_row<S: Simd>(
    total: &mut Sums<'_>,
    chunk: &Sums<'_>,
    row: usize,
    row_len: usize,
    is_first: bool,
) {
    // SAFETY: the row lies within both.
    unsafe {
        let (o, add) = (total.o.as_mut_ptr().add(row * row_len), chunk.o.as_ptr().add(row * row_len));
        if is_first {
            std::ptr::copy_nonoverlapping(add, o, row_len);
            (total.max[row], total.sum[row]) = (chunk.max[row], chunk.sum[row]);
            return;
        }
        let max = total.max[row].max(chunk.max[row]);
        let shrink = |old: f32| S::max_lane(exp2_below_one::<S>(S::splat(old - max)));
        let (keep, join) = (shrink(total.max[row]), shrink(chunk.max[row]));
        total.max[row] = max;
        total.sum[row] = total.sum[row] * keep + chunk.sum[row] * join;
        for i in (0..row_len).step_by(S::LANES) {
            let kept = S::mul(S::load(o.add(i)), S::splat(keep));
            S::store(o.add(i), S::fma(S::load(add.add(i)), S::splat(join), kept));
        }
    }
}

/// Writes the averages of a block's rows.
#[inline(always)]
pub(super) unsafe fn write_rows<S: Simd>(job: &Job<'_>, block: &Block<'_>, total: &Sums<'_>, out: *mut f32) {
    let (d, row_len) = (job.shape.head_dim, padded_dim(job.shape.head_dim));
    for row in 0..block.rows(job.group) {
        // SAFETY: rows were checked against the output's length.
        unsafe {
            let (o, out) = (total.o.as_ptr().add(row * row_len), out.add(job.out_offset(block, row)));
            // Scores are in units of ln 2.
            let sum = S::splat(total.sum[row] + job.sink(block, row, total.max[row] * std::f32::consts::LN_2));
            for i in (0..d).step_by(S::LANES) {
                S::store_partial(out.add(i), S::div(S::load(o.add(i)), sum), S::LANES.min(d - i));
            }
        }
    }
}

/// The oracle's softmax; `sink` adds to the sum what it is against the largest score.
pub(super) fn softmax(p: &mut [f32], sink: impl Fn(f32) -> f32) {
    let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = sink(max);
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
    /// The block's queries, scaled by `unit` / sqrt(head_dim), one row per token and head of the group.
    #[inline(always)]
    pub(super) fn load_queries(&self, block: &Block<'_>, unit: f32, q: &mut [f32]) {
        let d = self.shape.head_dim;
        let scale = unit / (d as f32).sqrt();
        for (row, q) in q.chunks_exact_mut(d).take(block.rows(self.group)).enumerate() {
            let token = block.tokens.start + row / self.group;
            let source = block.packed_row(token) * self.shape.row() + self.head(block, row) * d;
            for (q, x) in q.iter_mut().zip(&self.qkv[source..source + d]) {
                *q = x * scale;
            }
        }
    }

    /// The rows of a block that see any of some positions; later tokens see later positions, so they are a run.
    #[inline(always)]
    pub(super) fn rows_that_see(&self, block: &Block<'_>, positions: &Range<usize>) -> Range<usize> {
        let first = block.position(0);
        // Position p sees p + 1 - window ..= p.
        let from = positions.start.saturating_sub(first).max(block.tokens.start);
        let to = (positions.end - 1).saturating_add(self.window).saturating_sub(first);
        let to = to.min(block.tokens.end).max(from);
        (from - block.tokens.start) * self.group..(to - block.tokens.start) * self.group
    }

    /// The positions of the tile at `base` that a row sees, counted from `base`.
    #[inline(always)]
    pub(super) fn visible_in_tile(&self, block: &Block<'_>, row: usize, base: usize) -> Range<usize> {
        let seen = self.visible(block.position_of_row(self.group, row));
        seen.start.saturating_sub(base)..(seen.end - base).min(TILE)
    }
}
