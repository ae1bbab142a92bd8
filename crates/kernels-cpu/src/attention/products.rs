//! The inner loops of attention: scores, and sums of values.
//!
//! A row's score at a position is one chain of multiply-adds over the dimensions, and its sum of values one chain over the
//! positions, whatever rows and positions share the register tile.

use std::ops::Range;

use super::TILE;
use super::tile::TileParts;
use crate::kv::KV_LANES;
use crate::simd::{Element, Kernel, Simd};

/// Rows of a register tile as wide as a tile of positions.
pub(super) const STRIP: usize = 6;
/// Rows up to which one register tile takes them all. Such blocks, as in decoding, wait for memory rather than for
/// arithmetic: they convert keys and values on the way, and fetch the next tile as they go.
pub(super) const FEW_ROWS: usize = 8;
const CACHE_LINE: usize = 64;

/// Whether elements of `T` can be used as they are stored: a line of keys must hold whole dimensions.
pub(super) fn is_streamable<T>(head_dim: usize) -> bool {
    head_dim.is_multiple_of(dims_per_line::<T>())
}

/// Dimensions of 16 keys in a cache line.
const fn dims_per_line<T>() -> usize {
    CACHE_LINE / (KV_LANES * size_of::<T>())
}

/// Vectors of a register tile of some rows: as many as the tier's registers hold.
const fn vectors_across(lanes: usize, rows: usize) -> usize {
    match (lanes, rows) {
        (16, ..=STRIP) | (_, ..=2) => 4,
        (16, _) | (_, ..=STRIP) => 2,
        _ => 1,
    }
}

/// Strips of nearly equal height: all rows where there are few, else none above [`STRIP`].
#[inline(always)]
pub(super) fn strip<const FEW: bool>(rows: &Range<usize>, index: usize) -> Option<Range<usize>> {
    let count = if FEW { 1 } else { rows.len().div_ceil(STRIP) };
    (index < count).then(|| rows.start + rows.len() * index / count..rows.start + rows.len() * (index + 1) / count)
}

/// Asks for elements of the next tile. A tile of codes fits into the first cache beside the current one, and their
/// conversion suffers more from loads that take longer.
#[inline(always)]
unsafe fn prefetch<S: Simd, T>(p: *const T) {
    // SAFETY: any address will do.
    unsafe { if size_of::<T>() == 1 { S::prefetch(p) } else { S::prefetch_far(p) } }
}

/// `p[rows][TILE] = q[rows][d] . keys`. With `FEW` rows, `next` is fetched meanwhile.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd, T: Element, const FEW: bool>(
    rows: Range<usize>,
    q: &[f32],
    d: usize,
    keys: &TileParts<T>,
    next: &TileParts<T>,
    p: &mut [f32],
) {
    let mut index = 0;
    while let Some(strip) = strip::<FEW>(&rows, index) {
        // SAFETY: the strip's rows lie within q and p.
        unsafe {
            let (q, p) = (q.as_ptr().add(strip.start * d), p.as_mut_ptr().add(strip.start * TILE));
            S::call(ScoreStrip::<T, FEW> { rows: strip.len(), q, d, keys, next, p });
        }
        index += 1;
    }
}

/// The scores of one strip: a function of its own for each type, which keeps compiling fast.
struct ScoreStrip<'a, T, const FEW: bool> {
    rows: usize,
    q: *const f32,
    d: usize,
    keys: &'a TileParts<T>,
    next: &'a TileParts<T>,
    p: *mut f32,
}

impl<T: Element, const FEW: bool> Kernel for ScoreStrip<'_, T, FEW> {
    fn scalar(self) {
        unreachable!("the scalar tier scores position by position");
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let ScoreStrip { rows, q, d, keys, next, p } = self;
        // SAFETY: the caller's promise.
        unsafe {
            match rows {
                0 => {}
                1 => score_rows::<S, T, FEW, 1>(q, d, keys, next, p),
                2 => score_rows::<S, T, FEW, 2>(q, d, keys, next, p),
                3 => score_rows::<S, T, FEW, 3>(q, d, keys, next, p),
                4 => score_rows::<S, T, FEW, 4>(q, d, keys, next, p),
                5 => score_rows::<S, T, FEW, 5>(q, d, keys, next, p),
                STRIP => score_rows::<S, T, FEW, STRIP>(q, d, keys, next, p),
                _ => {
                    if FEW {
                        if rows == 7 {
                            score_rows::<S, T, FEW, 7>(q, d, keys, next, p);
                        } else {
                            score_rows::<S, T, FEW, FEW_ROWS>(q, d, keys, next, p);
                        }
                    }
                }
            }
        }
    }
}

/// All positions of the tile, in as many register tiles as it takes.
#[inline(always)]
unsafe fn score_rows<S: Simd, T: Element, const FEW: bool, const R: usize>(
    q: *const f32,
    d: usize,
    keys: &TileParts<T>,
    next: &TileParts<T>,
    p: *mut f32,
) {
    let width = const { vectors_across(S::LANES, R) * S::LANES };
    for first in (0..TILE).step_by(width) {
        // SAFETY: the caller's promise.
        unsafe {
            if const { vectors_across(S::LANES, R) == 4 } {
                score_tile::<S, T, FEW, R, 4>(q, d, keys, next, first, p);
            } else if const { vectors_across(S::LANES, R) == 2 } {
                score_tile::<S, T, FEW, R, 2>(q, d, keys, next, first, p);
            } else {
                score_tile::<S, T, FEW, R, 1>(q, d, keys, next, first, p);
            }
        }
    }
}

/// `R` rows against `NV` vectors of positions from `first` on.
#[inline(always)]
unsafe fn score_tile<S: Simd, T: Element, const FEW: bool, const R: usize, const NV: usize>(
    q: *const f32,
    d: usize,
    keys: &TileParts<T>,
    next: &TileParts<T>,
    first: usize,
    p: *mut f32,
) {
    let step = if FEW { dims_per_line::<T>() } else { 1 };
    // SAFETY: the caller's promise; a prefetch may point anywhere.
    unsafe {
        let mut key = [std::ptr::null::<T>(); NV];
        let mut ahead = [std::ptr::null::<T>(); NV];
        for v in 0..NV {
            let position = first + v * S::LANES;
            key[v] = keys[position / KV_LANES].add(position % KV_LANES);
            ahead[v] = next[position / KV_LANES];
        }
        let mut acc = [[S::zero(); NV]; R];
        let mut line = 0;
        while line < d {
            if FEW {
                for v in 0..NV {
                    prefetch::<S, T>(ahead[v].wrapping_add(line * KV_LANES));
                }
            }
            for i in line..line + step {
                let mut k = [S::zero(); NV];
                for v in 0..NV {
                    k[v] = T::load::<S>(key[v].add(i * KV_LANES));
                }
                for row in 0..R {
                    let x = S::splat(*q.add(row * d + i));
                    for v in 0..NV {
                        acc[row][v] = S::fma(x, k[v], acc[row][v]);
                    }
                }
            }
            line += step;
        }
        for row in 0..R {
            for v in 0..NV {
                S::store(p.add(row * TILE + first + v * S::LANES), acc[row][v]);
            }
        }
    }
}

/// `o[rows] += p[rows][j] * values[j]` for the positions `visible(row)` of the tile, in order. With `FEW` rows, `next` is
/// fetched meanwhile.
///
/// A position that a row does not see is never multiplied, not even by zero: what lies there (a later token, or memory
/// never written) may be infinite or NaN.
#[inline(always)]
pub(super) unsafe fn add_values<S: Simd, T: Element, const FEW: bool>(
    rows: Range<usize>,
    visible: &impl Fn(usize) -> Range<usize>,
    p: &[f32],
    values: &TileParts<T>,
    next: &TileParts<T>,
    row_len: usize,
    o: &mut [f32],
) {
    let mut index = 0;
    let all_rows = rows;
    while let Some(strip) = strip::<FEW>(&all_rows, index) {
        // What all rows of the strip see is done together, the edges row by row: first all lower edges, then the common
        // part, then the upper edges.
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
                S::call(ValueStrip::<T, FEW> { rows: rows.len(), p, positions, values, next, row_len, o });
            }
        }
        index += 1;
    }
}

/// The sums of values of one strip, over the same positions for all its rows.
struct ValueStrip<'a, T, const FEW: bool> {
    rows: usize,
    p: *const f32,
    positions: Range<usize>,
    values: &'a TileParts<T>,
    next: &'a TileParts<T>,
    row_len: usize,
    o: *mut f32,
}

impl<T: Element, const FEW: bool> Kernel for ValueStrip<'_, T, FEW> {
    fn scalar(self) {
        unreachable!("the scalar tier adds position by position");
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let ValueStrip { rows, p, positions, values, next, row_len, o } = self;
        // SAFETY: the caller's promise.
        unsafe {
            match rows {
                0 => {}
                1 => value_rows::<S, T, FEW, 1>(p, positions, values, next, row_len, o),
                2 => value_rows::<S, T, FEW, 2>(p, positions, values, next, row_len, o),
                3 => value_rows::<S, T, FEW, 3>(p, positions, values, next, row_len, o),
                4 => value_rows::<S, T, FEW, 4>(p, positions, values, next, row_len, o),
                5 => value_rows::<S, T, FEW, 5>(p, positions, values, next, row_len, o),
                STRIP => value_rows::<S, T, FEW, STRIP>(p, positions, values, next, row_len, o),
                _ => {
                    if FEW {
                        if rows == 7 {
                            value_rows::<S, T, FEW, 7>(p, positions, values, next, row_len, o);
                        } else {
                            value_rows::<S, T, FEW, FEW_ROWS>(p, positions, values, next, row_len, o);
                        }
                    }
                }
            }
        }
    }
}

/// All columns, in as many register tiles as it takes; `row_len` is a multiple of 16.
#[inline(always)]
unsafe fn value_rows<S: Simd, T: Element, const FEW: bool, const R: usize>(
    p: *const f32,
    positions: Range<usize>,
    values: &TileParts<T>,
    next: &TileParts<T>,
    row_len: usize,
    o: *mut f32,
) {
    let mut column = 0;
    // SAFETY: the caller's promise.
    unsafe {
        if const { vectors_across(S::LANES, R) == 4 } {
            while column + 4 * S::LANES <= row_len {
                value_tile::<S, T, FEW, R, 4>(p, positions.clone(), values, next, row_len, column, o);
                column += 4 * S::LANES;
            }
        }
        if const { vectors_across(S::LANES, R) >= 2 } {
            while column + 2 * S::LANES <= row_len {
                value_tile::<S, T, FEW, R, 2>(p, positions.clone(), values, next, row_len, column, o);
                column += 2 * S::LANES;
            }
        }
        if const { S::LANES == 16 || vectors_across(S::LANES, R) == 1 } {
            while column < row_len {
                value_tile::<S, T, FEW, R, 1>(p, positions.clone(), values, next, row_len, column, o);
                column += S::LANES;
            }
        }
    }
}

/// `R` rows of `NV` vectors of columns from `column` on.
#[inline(always)]
unsafe fn value_tile<S: Simd, T: Element, const FEW: bool, const R: usize, const NV: usize>(
    p: *const f32,
    positions: Range<usize>,
    values: &TileParts<T>,
    next: &TileParts<T>,
    row_len: usize,
    column: usize,
    o: *mut f32,
) {
    // SAFETY: the caller's promise; a prefetch may point anywhere.
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
            let offset = position % KV_LANES * row_len + column;
            let (mut value, mut ahead) = (values[group].add(offset), next[group].wrapping_add(offset));
            while position < end {
                if FEW {
                    let mut i = 0;
                    while i < NV * S::LANES {
                        prefetch::<S, T>(ahead.wrapping_add(i));
                        i += CACHE_LINE / size_of::<T>();
                    }
                }
                let mut x = [S::zero(); NV];
                for v in 0..NV {
                    x[v] = T::load::<S>(value.add(v * S::LANES));
                }
                for row in 0..R {
                    let weight = S::splat(*p.add(row * TILE + position));
                    for v in 0..NV {
                        acc[row][v] = S::fma(weight, x[v], acc[row][v]);
                    }
                }
                value = value.add(row_len);
                ahead = ahead.wrapping_add(row_len);
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
