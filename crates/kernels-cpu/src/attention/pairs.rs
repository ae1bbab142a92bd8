//! Attention over a bfloat16 cache on CPUs that multiply pairs of bfloat16.
//!
//! Queries and the weights of values are rounded to bfloat16; sums stay f32. A row's score at a position is one chain of
//! pairs of dimensions, and its sum of values one chain of pairs of positions, each at an even position and the next,
//! whatever rows and positions share the register tile. The sum of exponentials is that of the rounded weights, so that
//! rounding them does not change what they add up to.

use std::ops::Range;

use half::bf16;

use super::fused::{FusedBlock, shrink_sums};
use super::products::{FEW_ROWS, STRIP, strip};
use super::tile::{TileParts, TileSpan};
use super::{Scratch, Sums, TILE};
use crate::kv::{KV_LANES, padded_dim};
use crate::simd::{PairKernel, Simd, SimdPairs, exp2_below_one};

/// Elements of a vector of bfloat16, and of a cache line.
const WIDE: usize = 2 * KV_LANES;
/// bfloat16 numbers between the weights of two rows: they take the place of the row's scores.
const WEIGHT_STRIDE: usize = 2 * TILE;
const FIRST_OF_PAIR: u32 = 0x0000_ffff;
const SECOND_OF_PAIR: u32 = 0xffff_0000;

impl FusedBlock<'_, '_> {
    /// Rounds the block's queries, unscaled, to `[rows][head_dim]` at the start of `scratch.q`.
    #[inline(always)]
    pub(super) unsafe fn round_queries<S: SimdPairs>(&mut self) {
        let (job, block, d) = (self.job, &self.block, self.job.shape.head_dim);
        for row in 0..block.rows(job.group) {
            let token = block.tokens.start + row / job.group;
            let source = block.packed_row(token) * job.shape.row() + job.head(block, row) * d;
            for i in (0..d).step_by(WIDE) {
                let n = WIDE.min(d - i);
                let (low, high) = (n.min(KV_LANES), n.saturating_sub(KV_LANES));
                let mut rounded = [bf16::ZERO; WIDE];
                // SAFETY: `n` elements are left in the row, and two bfloat16 fit into the room of an f32.
                unsafe {
                    let x = job.qkv.as_ptr().add(source + i);
                    let (low, high) = (S::F::load_partial(x, low), S::F::load_partial(x.wrapping_add(KV_LANES), high));
                    S::store(rounded.as_mut_ptr(), S::round(low, high));
                    let target = self.scratch.q.as_mut_ptr().cast::<bf16>().add(row * d + i);
                    std::ptr::copy_nonoverlapping(rounded.as_ptr(), target, n);
                }
            }
        }
    }

    /// Sums up what the block sees of a chunk.
    #[inline(always)]
    pub(super) unsafe fn pair_chunk<S: SimdPairs>(&mut self, positions: Range<usize>) {
        let is_few = self.block.rows(self.job.group) <= FEW_ROWS && self.cache.geometry.lanes() == KV_LANES;
        // SAFETY: the caller's promise.
        unsafe {
            if is_few {
                self.pair_tiles::<S, true>(positions);
            } else {
                self.pair_tiles::<S, false>(positions);
            }
        }
    }

    /// With `FEW` rows, keys and values are paired on the way; else once per tile.
    #[inline(always)]
    unsafe fn pair_tiles<S: SimdPairs, const FEW: bool>(&mut self, positions: Range<usize>) {
        let (job, block, cache) = (self.job, self.block.clone(), self.cache);
        let (d, row_len) = (job.shape.head_dim, padded_dim(job.shape.head_dim));
        // Scores in units of ln 2: the exponential of a score is a power of two then.
        let unit = std::f32::consts::LOG2_E / (d as f32).sqrt();
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
                    (cache.in_place(&span, true), cache.in_place(&next, true))
                } else {
                    let staged = cache.paired_keys::<S>(&span, keys);
                    (staged, staged)
                };
                scores::<S, FEW>(rows.clone(), q.as_ptr().cast(), d, &keys, &next_keys, p);
                softmax_rows::<S>(rows.clone(), &visible, unit, row_len, p, shrink, chunk);
                let (values, next_values) = if FEW {
                    (cache.in_place(&span, false), cache.in_place(&next, false))
                } else {
                    let staged = cache.paired_values::<S>(&span, values);
                    (staged, staged)
                };
                add_values::<S, FEW>(rows, &visible, p, &values, &next_values, row_len, chunk.o);
            }
        }
    }
}

/// Turns the scores of rows into powers of two against their largest score so far, rounded to bfloat16, and scales what was
/// summed up before to that.
#[inline(always)]
unsafe fn softmax_rows<S: SimdPairs>(
    rows: Range<usize>,
    visible: &impl Fn(usize) -> Range<usize>,
    unit: f32,
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
            if visible != (0..TILE) {
                for i in (0..TILE).step_by(KV_LANES) {
                    let (lo, hi) = (visible.start as isize - i as isize, visible.end as isize - i as isize);
                    let kept = S::F::keep(S::F::load(p.add(i)), lo, hi, S::F::splat(f32::NEG_INFINITY));
                    S::F::store(p.add(i), kept);
                }
            }
            let mut max = S::F::load(p);
            for i in (KV_LANES..TILE).step_by(KV_LANES) {
                max = S::F::max(S::F::load(p.add(i)), max);
            }
            shrink[row] = sums.max[row];
            sums.max[row] = (S::F::max_lane(max) * unit).max(sums.max[row]);
        }
        shrink_sums::<S::F>(rows.clone(), row_len, shrink, sums);
        let (ones, unit) = (S::splat_pair([bf16::ONE; 2].as_ptr()), S::F::splat(unit));
        for row in rows {
            let p = p.as_mut_ptr().add(row * TILE);
            let minus_max = S::F::splat(-sums.max[row]);
            let mut sum = S::F::zero();
            for i in (0..TILE).step_by(WIDE) {
                let low = exp2_below_one::<S::F>(S::F::fma(S::F::load(p.add(i)), unit, minus_max));
                let high = exp2_below_one::<S::F>(S::F::fma(S::F::load(p.add(i + KV_LANES)), unit, minus_max));
                let weights = S::round(low, high);
                // Never beyond the scores that were read.
                S::store(p.cast::<bf16>().add(i), weights);
                sum = S::dot(sum, weights, ones);
            }
            sums.sum[row] += S::F::sum(sum);
        }
    }
}

/// `p[rows][TILE] = q[rows][d] . keys`. With `FEW` rows, keys are as the cache holds them, and `next` is fetched meanwhile.
#[inline(always)]
unsafe fn scores<S: SimdPairs, const FEW: bool>(
    rows: Range<usize>,
    q: *const bf16,
    d: usize,
    keys: &TileParts<bf16>,
    next: &TileParts<bf16>,
    p: &mut [f32],
) {
    let mut index = 0;
    while let Some(strip) = strip::<FEW>(&rows, index) {
        // SAFETY: the strip's rows lie within q and p.
        unsafe {
            let (q, p) = (q.add(strip.start * d), p.as_mut_ptr().add(strip.start * TILE));
            S::call(ScoreStrip::<FEW> { rows: strip.len(), q, d, keys, next, p });
        }
        index += 1;
    }
}

struct ScoreStrip<'a, const FEW: bool> {
    rows: usize,
    q: *const bf16,
    d: usize,
    keys: &'a TileParts<bf16>,
    next: &'a TileParts<bf16>,
    p: *mut f32,
}

/// Calls `$function` with as many rows and vectors as a register tile of `$rows` rows has.
macro_rules! by_rows {
    ($rows:expr, $few:expr, $function:ident, $args:tt) => {
        match $rows {
            0 => {}
            1 => by_rows!(@call $function, 1, 4, $args),
            2 => by_rows!(@call $function, 2, 4, $args),
            3 => by_rows!(@call $function, 3, 4, $args),
            4 => by_rows!(@call $function, 4, 4, $args),
            5 => by_rows!(@call $function, 5, 4, $args),
            STRIP => by_rows!(@call $function, STRIP, 4, $args),
            7 if $few => by_rows!(@call $function, 7, 2, $args),
            _ if $few => by_rows!(@call $function, FEW_ROWS, 2, $args),
            _ => unreachable!("a strip of {} rows", $rows),
        }
    };
    (@call $function:ident, $rows:expr, $vectors:literal, ($($arg:expr),*)) => {
        $function::<S, FEW, { $rows }, $vectors>($($arg),*)
    };
}

impl<const FEW: bool> PairKernel for ScoreStrip<'_, FEW> {
    #[inline(always)]
    unsafe fn simd<S: SimdPairs>(self) {
        let ScoreStrip { rows, q, d, keys, next, p } = self;
        // SAFETY: the caller's promise.
        unsafe { by_rows!(rows, FEW, score_rows, (q, d, keys, next, p)) }
    }
}

/// All positions of the tile, `NV` vectors at a time.
#[inline(always)]
unsafe fn score_rows<S: SimdPairs, const FEW: bool, const R: usize, const NV: usize>(
    q: *const bf16,
    d: usize,
    keys: &TileParts<bf16>,
    next: &TileParts<bf16>,
    p: *mut f32,
) {
    for first in (0..TILE / KV_LANES).step_by(NV) {
        // SAFETY: the caller's promise; a prefetch may point anywhere.
        unsafe {
            let mut acc = [[S::F::zero(); NV]; R];
            for i in (0..d).step_by(2) {
                let mut k = [S::zero(); NV];
                for v in 0..NV {
                    k[v] = S::load(keys[first + v].add(i * KV_LANES));
                    if FEW {
                        S::F::prefetch_far(next[first + v].wrapping_add(i * KV_LANES));
                        k[v] = S::zip_halves(k[v]);
                    }
                }
                for row in 0..R {
                    let x = S::splat_pair(q.add(row * d + i));
                    for v in 0..NV {
                        acc[row][v] = S::dot(acc[row][v], k[v], x);
                    }
                }
            }
            for row in 0..R {
                for v in 0..NV {
                    S::F::store(p.add(row * TILE + (first + v) * KV_LANES), acc[row][v]);
                }
            }
        }
    }
}

/// `o[rows] += p[rows][j] * values[j]` for the positions `visible(row)` of the tile, in order, with the weights in `p`.
///
/// A position that a row does not see counts as zero, whatever lies there: a later token, or memory never written, may be
/// infinite or NaN.
#[inline(always)]
unsafe fn add_values<S: SimdPairs, const FEW: bool>(
    rows: Range<usize>,
    visible: &impl Fn(usize) -> Range<usize>,
    p: &[f32],
    values: &TileParts<bf16>,
    next: &TileParts<bf16>,
    row_len: usize,
    o: &mut [f32],
) {
    if rows.is_empty() {
        return;
    }
    let mut index = 0;
    let all_rows = rows;
    let weights = p.as_ptr().cast::<bf16>();
    while let Some(strip) = strip::<FEW>(&all_rows, index) {
        let add = |rows: Range<usize>, positions: Range<usize>, o: *mut f32| {
            // A pair of which one position is seen stands apart at either end.
            let (mut from, mut to) = (positions.start, positions.end);
            let mut parts = [(0..0, !0), (0..0, !0), (0..0, !0)];
            if from < to && from % 2 == 1 {
                parts[0] = (from / 2..from / 2 + 1, SECOND_OF_PAIR);
                from += 1;
            }
            if from < to && to % 2 == 1 {
                parts[2] = (to / 2..to / 2 + 1, FIRST_OF_PAIR);
                to -= 1;
            }
            parts[1].0 = from / 2..to / 2;
            for (pairs, mask) in parts {
                if pairs.is_empty() {
                    continue;
                }
                // SAFETY: rows lie within p and o, pairs within the tile.
                unsafe {
                    let weights = weights.add(rows.start * WEIGHT_STRIDE);
                    let o = o.add(rows.start * row_len);
                    S::call(ValueStrip::<FEW> { rows: rows.len(), weights, pairs, mask, values, next, row_len, o });
                }
            }
        };
        let (first, last) = (visible(strip.start), visible(strip.end - 1));
        if first == last {
            add(strip, first, o.as_mut_ptr());
            index += 1;
            continue;
        }
        // Pairs that all rows of the strip see are done together, the edges row by row: first all lower edges, then the
        // common part, then the upper edges. Later rows see later positions.
        let mut common = last.start.next_multiple_of(2)..first.end / 2 * 2;
        if common.is_empty() {
            common = TILE..TILE;
        }
        for row in strip.clone() {
            let seen = visible(row);
            add(row..row + 1, seen.start..seen.end.min(common.start), o.as_mut_ptr());
        }
        add(strip.clone(), common.clone(), o.as_mut_ptr());
        for row in strip {
            let seen = visible(row);
            add(row..row + 1, seen.start.max(common.end)..seen.end, o.as_mut_ptr());
        }
        index += 1;
    }
}

/// The sums of values of one strip, over the same pairs of positions for all its rows.
struct ValueStrip<'a, const FEW: bool> {
    rows: usize,
    weights: *const bf16,
    pairs: Range<usize>,
    /// The part of each pair that counts.
    mask: u32,
    values: &'a TileParts<bf16>,
    next: &'a TileParts<bf16>,
    row_len: usize,
    o: *mut f32,
}

impl<const FEW: bool> PairKernel for ValueStrip<'_, FEW> {
    #[inline(always)]
    unsafe fn simd<S: SimdPairs>(self) {
        let rows = self.rows;
        // SAFETY: the caller's promise.
        unsafe { by_rows!(rows, FEW, value_rows, (&self)) }
    }
}

/// All columns, up to `NV` vectors at a time; `row_len` is a multiple of 16.
#[inline(always)]
unsafe fn value_rows<S: SimdPairs, const FEW: bool, const R: usize, const NV: usize>(strip: &ValueStrip<'_, FEW>) {
    let mut column = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while column + NV * KV_LANES <= strip.row_len {
            value_tile::<S, FEW, R, NV>(strip, column);
            column += NV * KV_LANES;
        }
        if NV > 2 && column + WIDE <= strip.row_len {
            value_tile::<S, FEW, R, 2>(strip, column);
            column += WIDE;
        }
        if column < strip.row_len {
            value_tile::<S, FEW, R, 1>(strip, column);
        }
    }
}

/// `R` rows of `NV` vectors of columns from `column` on.
#[inline(always)]
unsafe fn value_tile<S: SimdPairs, const FEW: bool, const R: usize, const NV: usize>(
    strip: &ValueStrip<'_, FEW>,
    column: usize,
) {
    let &ValueStrip { weights, ref pairs, mask, values, next, row_len, o, .. } = strip;
    // SAFETY: the caller's promise; a prefetch may point anywhere.
    unsafe {
        let mut acc = [[S::F::zero(); NV]; R];
        for row in 0..R {
            for v in 0..NV {
                acc[row][v] = S::F::load(o.add(row * row_len + column + v * KV_LANES));
            }
        }
        for pair in pairs.clone() {
            let (group, place) = (pair / (KV_LANES / 2), pair % (KV_LANES / 2));
            let mut x = [S::zero(); NV];
            if FEW {
                let offset = 2 * place * row_len + column;
                let (value, ahead) = (values[group].add(offset), next[group].wrapping_add(offset));
                S::F::prefetch_far(ahead);
                S::F::prefetch_far(ahead.wrapping_add(row_len));
                if NV == 4 {
                    S::F::prefetch_far(ahead.wrapping_add(WIDE));
                    S::F::prefetch_far(ahead.wrapping_add(row_len + WIDE));
                }
                if NV == 1 {
                    x[0] = S::zip_at(value, value.add(row_len));
                } else {
                    for v in (0..NV).step_by(2) {
                        let value = value.add(v * KV_LANES);
                        [x[v], x[v + 1]] = S::zip(S::load(value), S::load(value.add(row_len)));
                    }
                }
            } else {
                let value = values[group].add(2 * (place * row_len + column));
                for v in 0..NV {
                    x[v] = S::load(value.add(v * WIDE));
                }
            }
            if mask != !0 {
                for v in 0..NV {
                    x[v] = S::mask(x[v], mask);
                }
            }
            for row in 0..R {
                let weight = S::splat_pair(weights.add(row * WEIGHT_STRIDE + 2 * pair));
                for v in 0..NV {
                    acc[row][v] = S::dot(acc[row][v], x[v], weight);
                }
            }
        }
        for row in 0..R {
            for v in 0..NV {
                S::F::store(o.add(row * row_len + column + v * KV_LANES), acc[row][v]);
            }
        }
    }
}
