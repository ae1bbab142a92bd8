//! The inner loops of attention: getting a tile of keys or values as f32, scores, and sums of values.

use std::ops::Range;

use half::{bf16, f16};

use super::{Block, Cache, Job, TILE};
use crate::kv::{AttnBatch, KV_LANES, KvType, SeqSpan, padded_dim};
use crate::simd::{Element, Simd};

/// Rows that one register tile holds.
const STRIP: usize = 6;
/// Runs of 16 positions in a tile.
const GROUPS: usize = TILE / KV_LANES;

/// Where the runs of 16 positions of a tile are: keys as `[head_dim][16]`, values as `[16][padded head_dim]`.
pub(super) type TileParts = [*const f32; GROUPS];

/// Where the same runs of the next tile are in the cache, to be fetched while the current tile is computed.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    parts: [*const u8; GROUPS],
    element: usize,
}

/// A sequence's tile: positions `base..base + valid` of one kv head.
pub(super) struct TileSpan<'a> {
    pub(super) batch: &'a AttnBatch<'a>,
    pub(super) seq: &'a SeqSpan,
    pub(super) kv_head: usize,
    pub(super) base: usize,
    pub(super) valid: usize,
}

impl<'a> TileSpan<'a> {
    /// The tile at `base` of a block that uses positions below `end`.
    #[inline(always)]
    pub(super) fn new(job: &Job<'a>, block: &Block<'a>, base: usize, end: usize) -> TileSpan<'a> {
        TileSpan { batch: job.batch, seq: block.seq, kv_head: block.kv_head, base, valid: TILE.min(end - base) }
    }
}

/// Strips of nearly equal height, none above [`STRIP`].
#[inline(always)]
pub(super) fn strip(rows: &Range<usize>, index: usize) -> Option<Range<usize>> {
    let count = rows.len().div_ceil(STRIP);
    (index < count).then(|| rows.start + rows.len() * index / count..rows.start + rows.len() * (index + 1) / count)
}

impl Cache<'_> {
    /// The keys of a tile: in place where the cache has the right form, else converted into `staging`. Positions from
    /// `valid` on hold anything.
    #[inline(always)]
    pub(super) unsafe fn keys<S: Simd>(&self, span: &TileSpan<'_>, staging: &mut [f32]) -> TileParts {
        // SAFETY: the caller has the features of `S`; `KvLayer::check` looked at sizes and block tables.
        unsafe {
            match self.geometry.kind {
                KvType::F32 if self.geometry.lanes() == KV_LANES => self.in_place(span, true),
                KvType::F32 => self.stage_keys::<S, f32>(span, staging),
                KvType::F16 => self.stage_keys::<S, f16>(span, staging),
                KvType::Bf16 => self.stage_keys::<S, bf16>(span, staging),
                KvType::Int8 => self.stage_keys::<S, i8>(span, staging),
            }
        }
    }

    /// The values of a tile, likewise.
    #[inline(always)]
    pub(super) unsafe fn values<S: Simd>(&self, span: &TileSpan<'_>, staging: &mut [f32]) -> TileParts {
        // SAFETY: as in `keys`.
        unsafe {
            match self.geometry.kind {
                KvType::F32 if self.geometry.lanes() == KV_LANES => self.in_place(span, false),
                KvType::F32 => self.stage_values::<S, f32>(span, staging),
                KvType::F16 => self.stage_values::<S, f16>(span, staging),
                KvType::Bf16 => self.stage_values::<S, bf16>(span, staging),
                KvType::Int8 => self.stage_values::<S, i8>(span, staging),
            }
        }
    }

    /// The runs of a tile that comes next; `None` (or a cache of short runs, which are not worth it) asks for nothing new.
    #[inline(always)]
    pub(super) unsafe fn ahead(&self, next: Option<&TileSpan<'_>>, keys: bool) -> Ahead {
        let element = self.geometry.kind.bytes();
        let mut ahead = Ahead { parts: [self.data.as_ptr(); GROUPS], element };
        if let Some(next) = next
            && self.geometry.lanes() == KV_LANES
        {
            for (group, part) in ahead.parts.iter_mut().enumerate() {
                *part = self.data.as_ptr().wrapping_add(self.run(next, group, keys) * element);
            }
        }
        ahead
    }

    /// Where a run of 16 positions starts, as an element of the layer. Runs beyond the last valid position repeat the
    /// last run: they are computed, but never used.
    #[inline(always)]
    fn run(&self, span: &TileSpan<'_>, group: usize, keys: bool) -> usize {
        let position = span.base + (group * KV_LANES).min((span.valid - 1) / KV_LANES * KV_LANES);
        let (block, token) = span.batch.block(span.seq, position, self.geometry.tokens_per_block);
        if keys {
            self.geometry.key_offset(block, span.kv_head, token)
        } else {
            self.geometry.value_offset(block, span.kv_head, token)
        }
    }

    #[inline(always)]
    unsafe fn in_place(&self, span: &TileSpan<'_>, keys: bool) -> TileParts {
        let mut parts = [std::ptr::null(); GROUPS];
        for (group, part) in parts.iter_mut().enumerate() {
            // SAFETY: within the layer.
            *part = unsafe { self.data.as_ptr().cast::<f32>().add(self.run(span, group, keys)) };
        }
        parts
    }

    #[inline(always)]
    unsafe fn stage_keys<S: Simd, T: Element>(&self, span: &TileSpan<'_>, staging: &mut [f32]) -> TileParts {
        let (d, lanes) = (self.geometry.head_dim, self.geometry.lanes());
        let mut done = 0;
        while done < span.valid {
            let (block, token) = span.batch.block(span.seq, span.base + done, self.geometry.tokens_per_block);
            // SAFETY: a run of `lanes` keys lies within its block, and a run of 16 within `staging`.
            unsafe {
                let src = self.data.as_ptr().cast::<T>().add(self.geometry.key_offset(block, span.kv_head, token));
                let dst = staging.as_mut_ptr().add(done / KV_LANES * KV_LANES * d + done % KV_LANES);
                if lanes == KV_LANES {
                    convert::<S, T>(src, KV_LANES * d, dst);
                } else {
                    for i in 0..d {
                        for lane in 0..lanes {
                            *dst.add(i * KV_LANES + lane) = (*src.add(i * lanes + lane)).to_f32();
                        }
                    }
                }
            }
            done += lanes;
        }
        parts_of(staging, KV_LANES * d)
    }

    /// Multiplies the tile's columns of `p` with the scales of its keys or values, where the cache has any. Scores are
    /// thus sums over codes, scaled once; and a value's scale goes into its weight.
    #[inline(always)]
    pub(super) unsafe fn scale<S: Simd>(&self, span: &TileSpan<'_>, keys: bool, rows: Range<usize>, p: &mut [f32]) {
        if self.geometry.kind != KvType::Int8 {
            return;
        }
        let mut scales = [0.0f32; TILE];
        let mut done = 0;
        while done < span.valid {
            let (block, token) = span.batch.block(span.seq, span.base + done, self.geometry.tokens_per_block);
            let run = (self.geometry.tokens_per_block - token).min(span.valid - done);
            // SAFETY: the scales of a block's tokens lie side by side.
            unsafe {
                let src = self.data.as_ptr().cast::<f32>();
                let src = src.add(self.geometry.scale_offset(block, span.kv_head, token, keys));
                std::ptr::copy_nonoverlapping(src, scales.as_mut_ptr().add(done), run);
            }
            done += run;
        }
        for row in p.chunks_exact_mut(TILE).take(rows.end).skip(rows.start) {
            for i in (0..TILE).step_by(S::LANES) {
                // SAFETY: within the row, and within the scales.
                unsafe {
                    let at = row.as_mut_ptr().add(i);
                    S::store(at, S::mul(S::load(at), S::load(scales.as_ptr().add(i))));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn stage_values<S: Simd, T: Element>(&self, span: &TileSpan<'_>, staging: &mut [f32]) -> TileParts {
        let row = padded_dim(self.geometry.head_dim);
        let mut done = 0;
        while done < span.valid {
            let (block, token) = span.batch.block(span.seq, span.base + done, self.geometry.tokens_per_block);
            let run = (self.geometry.tokens_per_block - token).min(span.valid - done);
            // SAFETY: the rows of a run lie side by side in their block.
            unsafe {
                let src = self.data.as_ptr().cast::<T>().add(self.geometry.value_offset(block, span.kv_head, token));
                convert::<S, T>(src, run * row, staging.as_mut_ptr().add(done * row));
            }
            done += run;
        }
        parts_of(staging, KV_LANES * row)
    }
}

#[inline(always)]
fn parts_of(staging: &[f32], part: usize) -> TileParts {
    let mut parts = [std::ptr::null(); GROUPS];
    for (group, p) in parts.iter_mut().enumerate() {
        *p = staging[group * part..].as_ptr();
    }
    parts
}

/// `len` elements, a multiple of 16.
#[inline(always)]
unsafe fn convert<S: Simd, T: Element>(src: *const T, len: usize, dst: *mut f32) {
    let mut i = 0;
    while i < len {
        // SAFETY: the caller's pointers cover `len` elements.
        unsafe { S::store(dst.add(i), T::load::<S>(src.add(i))) };
        i += S::LANES;
    }
}

/// Whether a block has so few rows, as in decoding, that it waits for memory rather than for arithmetic. Then its first
/// strip fetches the next tile as it goes.
#[inline(always)]
fn is_memory_bound(rows: &Range<usize>) -> bool {
    rows.len() <= 2 * STRIP
}

/// `p[rows][TILE] = q[rows][d] . keys`: each score is one chain of multiply-adds over d.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd>(
    rows: Range<usize>,
    q: &[f32],
    d: usize,
    keys: &TileParts,
    ahead: Ahead,
    p: &mut [f32],
) {
    let mut index = 0;
    while let Some(strip) = strip(&rows, index) {
        // SAFETY: the strip's rows lie within q and p.
        unsafe {
            let (q, p) = (q.as_ptr().add(strip.start * d), p.as_mut_ptr().add(strip.start * TILE));
            if index == 0 && is_memory_bound(&rows) {
                score_strip::<S, true>(strip.len(), q, d, keys, ahead, p);
            } else {
                score_strip::<S, false>(strip.len(), q, d, keys, ahead, p);
            }
        }
        index += 1;
    }
}

#[inline(always)]
unsafe fn score_strip<S: Simd, const FETCH: bool>(
    rows: usize,
    q: *const f32,
    d: usize,
    keys: &TileParts,
    ahead: Ahead,
    p: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match rows {
            1 => score_rows::<S, FETCH, 1>(q, d, keys, ahead, p),
            2 => score_rows::<S, FETCH, 2>(q, d, keys, ahead, p),
            3 => score_rows::<S, FETCH, 3>(q, d, keys, ahead, p),
            4 => score_rows::<S, FETCH, 4>(q, d, keys, ahead, p),
            5 => score_rows::<S, FETCH, 5>(q, d, keys, ahead, p),
            _ => score_rows::<S, FETCH, 6>(q, d, keys, ahead, p),
        }
    }
}

#[inline(always)]
unsafe fn score_rows<S: Simd, const FETCH: bool, const R: usize>(
    q: *const f32,
    d: usize,
    keys: &TileParts,
    ahead: Ahead,
    p: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if S::LANES == 16 {
            score_tile::<S, FETCH, R, 4>(q, d, keys, ahead, 0, p);
        } else {
            for position in (0..TILE).step_by(16) {
                score_tile::<S, FETCH, R, 2>(q, d, keys, ahead, position, p);
            }
        }
    }
}

/// `R` rows against `NV` vectors of positions from `first` on.
#[inline(always)]
unsafe fn score_tile<S: Simd, const FETCH: bool, const R: usize, const NV: usize>(
    q: *const f32,
    d: usize,
    keys: &TileParts,
    ahead: Ahead,
    first: usize,
    p: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut key = [std::ptr::null::<f32>(); NV];
        let mut next = [std::ptr::null::<u8>(); NV];
        for v in 0..NV {
            let position = first + v * S::LANES;
            key[v] = keys[position / KV_LANES].add(position % KV_LANES);
            next[v] = ahead.parts[position / KV_LANES];
        }
        let mut acc = [[S::zero(); NV]; R];
        for i in 0..d {
            let mut k = [S::zero(); NV];
            for v in 0..NV {
                k[v] = S::load(key[v].add(i * KV_LANES));
                if FETCH {
                    S::prefetch(next[v].wrapping_add(i * KV_LANES * ahead.element));
                }
            }
            for row in 0..R {
                let x = S::splat(*q.add(row * d + i));
                for v in 0..NV {
                    acc[row][v] = S::fma(x, k[v], acc[row][v]);
                }
            }
        }
        for row in 0..R {
            for v in 0..NV {
                S::store(p.add(row * TILE + first + v * S::LANES), acc[row][v]);
            }
        }
    }
}

/// `o[rows] += p[rows][j] * values[j]` for the positions `visible(row)` of the tile, in order.
///
/// A position that a row does not see is never multiplied, not even by zero: what lies there (a later token, or memory
/// never written) may be infinite or NaN.
#[inline(always)]
pub(super) unsafe fn add_values<S: Simd>(
    rows: Range<usize>,
    visible: &impl Fn(usize) -> Range<usize>,
    p: &[f32],
    values: &TileParts,
    ahead: Ahead,
    row_len: usize,
    o: &mut [f32],
) {
    let mut index = 0;
    let all_rows = rows;
    while let Some(strip) = strip(&all_rows, index) {
        // What all rows of the strip see is done together, the edges row by row: first all lower edges, then the common
        // part, then the upper edges.
        let fetch = index == 0 && is_memory_bound(&all_rows);
        let (mut common, n) = (0..TILE, strip.len());
        for row in strip.clone() {
            let seen = visible(row);
            common = common.start.max(seen.start)..common.end.min(seen.end);
        }
        if common.is_empty() {
            common = TILE..TILE;
        }
        for part in 0..2 * n + 1 {
            let (rows, positions) = if part < n {
                let row = strip.start + part;
                let seen = visible(row);
                (row..row + 1, seen.start..seen.end.min(common.start))
            } else if part == n {
                (strip.clone(), common.clone())
            } else {
                let row = strip.start + part - n - 1;
                let seen = visible(row);
                (row..row + 1, seen.start.max(common.end)..seen.end)
            };
            if positions.is_empty() {
                continue;
            }
            // SAFETY: rows lie within p and o, positions within the tile.
            unsafe {
                let (p, o) = (p.as_ptr().add(rows.start * TILE), o.as_mut_ptr().add(rows.start * row_len));
                if fetch {
                    value_strip::<S, true>(rows.len(), p, positions, values, ahead, row_len, o);
                } else {
                    value_strip::<S, false>(rows.len(), p, positions, values, ahead, row_len, o);
                }
            }
        }
        index += 1;
    }
}

#[inline(always)]
unsafe fn value_strip<S: Simd, const FETCH: bool>(
    rows: usize,
    p: *const f32,
    positions: Range<usize>,
    values: &TileParts,
    ahead: Ahead,
    row_len: usize,
    o: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match rows {
            1 => value_rows::<S, FETCH, 1>(p, positions, values, ahead, row_len, o),
            2 => value_rows::<S, FETCH, 2>(p, positions, values, ahead, row_len, o),
            3 => value_rows::<S, FETCH, 3>(p, positions, values, ahead, row_len, o),
            4 => value_rows::<S, FETCH, 4>(p, positions, values, ahead, row_len, o),
            5 => value_rows::<S, FETCH, 5>(p, positions, values, ahead, row_len, o),
            _ => value_rows::<S, FETCH, 6>(p, positions, values, ahead, row_len, o),
        }
    }
}

/// All columns; `row_len` is a multiple of 16.
#[inline(always)]
unsafe fn value_rows<S: Simd, const FETCH: bool, const R: usize>(
    p: *const f32,
    positions: Range<usize>,
    values: &TileParts,
    ahead: Ahead,
    row_len: usize,
    o: *mut f32,
) {
    let mut column = 0;
    while column < row_len {
        let left = row_len - column;
        // SAFETY: the caller's promise.
        unsafe {
            if S::LANES == 8 {
                value_tile::<S, FETCH, R, 2>(p, positions.clone(), values, ahead, row_len, column, o);
                column += 16;
            } else if left >= 64 {
                value_tile::<S, FETCH, R, 4>(p, positions.clone(), values, ahead, row_len, column, o);
                column += 64;
            } else if left >= 32 {
                value_tile::<S, FETCH, R, 2>(p, positions.clone(), values, ahead, row_len, column, o);
                column += 32;
            } else {
                value_tile::<S, FETCH, R, 1>(p, positions.clone(), values, ahead, row_len, column, o);
                column += 16;
            }
        }
    }
}

#[inline(always)]
unsafe fn value_tile<S: Simd, const FETCH: bool, const R: usize, const NV: usize>(
    p: *const f32,
    positions: Range<usize>,
    values: &TileParts,
    ahead: Ahead,
    row_len: usize,
    column: usize,
    o: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[S::zero(); NV]; R];
        for row in 0..R {
            for v in 0..NV {
                acc[row][v] = S::load(o.add(row * row_len + column + v * S::LANES));
            }
        }
        let mut position = positions.start;
        while position < positions.end {
            let group = position / KV_LANES;
            let end = positions.end.min((group + 1) * KV_LANES);
            let mut value = values[group].add(position % KV_LANES * row_len + column);
            let mut next = ahead.parts[group].wrapping_add((position % KV_LANES * row_len + column) * ahead.element);
            while position < end {
                let mut x = [S::zero(); NV];
                for v in 0..NV {
                    x[v] = S::load(value.add(v * S::LANES));
                    if FETCH {
                        S::prefetch(next.wrapping_add(v * S::LANES * ahead.element));
                    }
                }
                for row in 0..R {
                    let weight = S::splat(*p.add(row * TILE + position));
                    for v in 0..NV {
                        acc[row][v] = S::fma(weight, x[v], acc[row][v]);
                    }
                }
                value = value.add(row_len);
                next = next.wrapping_add(row_len * ahead.element);
                position += 1;
            }
        }
        for row in 0..R {
            for v in 0..NV {
                S::store(o.add(row * row_len + column + v * S::LANES), acc[row][v]);
            }
        }
    }
}
