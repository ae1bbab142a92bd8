//! Register tiles over quantised weights: up to 12 rows by the 32 columns of one or more panels, over one block of k.
//!
//! Integer sums are exact and each tile takes its f32 results up from memory, so that neither tile sizes nor blocking
//! change a bit of the result. The order of the f32 operations is in [`crate::linear_quant`].

use crate::matrix::PANEL;
use crate::quant::{BLOCK, GROUP, INT4_CODES, INT4_GROUP};
use crate::quant_rows::GROUPS;
use crate::simd::{Simd, SimdInt};

/// Bytes of four codes of all rows of a panel.
const STEP: usize = 4 * PANEL;
/// Bytes of a group of int4 weights made ready for many tiles: a byte for each code, then f32 scales.
pub(crate) const UNPACKED_GROUP: usize = GROUP * PANEL + PANEL * size_of::<f32>();

/// Rows of quantised activations within one block of k.
#[derive(Clone, Copy)]
pub(crate) struct BlockRows {
    /// `[rows][256]`.
    pub(crate) codes: *const i8,
    /// `[rows]`.
    pub(crate) scales: *const f32,
    /// `[rows]`.
    pub(crate) starts_int8: *const i32,
    /// `[rows][8]`.
    pub(crate) starts_int4: *const i32,
}

/// The f32 results of a tile: `[panels][rows of the panel][32]`.
#[derive(Clone, Copy)]
pub(crate) struct Results {
    pub(crate) start: *mut f32,
    /// Elements from one panel to the next.
    pub(crate) panel_stride: usize,
    /// Whether an earlier block of k has been here.
    pub(crate) resume: bool,
}

/// Weights of one block of k.
#[derive(Clone, Copy)]
pub(crate) struct BlockWeights {
    pub(crate) start: *const u8,
    /// Bytes from one panel to the next.
    pub(crate) panel_stride: usize,
    /// Inputs of this block, a multiple of 32.
    pub(crate) k_len: usize,
    /// What to ask for meanwhile, unless the tile streams: weights and rows of tiles to come.
    pub(crate) ahead: [Ahead; 2],
}

/// Memory to ask for: a line for every four inputs, `step` bytes further each time.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    pub(crate) at: *const u8,
    pub(crate) step: usize,
}

impl Ahead {
    #[inline(always)]
    unsafe fn fetch<S: SimdInt>(&mut self) {
        // SAFETY: the caller has the features; a prefetch may point anywhere.
        unsafe { S::F::prefetch(self.at) };
        self.at = self.at.wrapping_add(self.step);
    }
}

/// Four codes of a row, as a number.
#[inline(always)]
unsafe fn four(codes: *const i8, offset: usize) -> i32 {
    // SAFETY: the caller's pointer covers them.
    unsafe { codes.add(offset).cast::<i32>().read_unaligned() }
}

/// `R` rows by `P` panels, of each of which `V` vectors starting at column `first`. One that streams meets its weights
/// for the first and last time and leaves fetching ahead to the hardware: asking as well is slower on a Zen 4.
#[inline(always)]
unsafe fn int8<S: SimdInt, const R: usize, const P: usize, const V: usize, const STREAM: bool>(
    x: BlockRows,
    w: BlockWeights,
    c: Results,
    first: usize,
) {
    // SAFETY: the caller's pointers cover the tile; a prefetch may point anywhere.
    unsafe {
        let zero = S::splat(0);
        let mut sums = [[[zero; V]; P]; R];
        for row in 0..R {
            sums[row] = [[S::int8_start(*x.starts_int8.add(row)); V]; P];
        }
        let lanes = <S::F as Simd>::LANES;
        let (mut codes, mut b, mut ahead) = (x.codes, w.start.add(4 * first), w.ahead);
        for _ in 0..w.k_len / 4 {
            let mut weights = [[S::int8_weights(zero); V]; P];
            for p in 0..P {
                for v in 0..V {
                    weights[p][v] = S::int8_weights(S::load(b.add(p * w.panel_stride + 4 * lanes * v)));
                }
            }
            for row in 0..R {
                let x = S::splat(four(codes, row * BLOCK));
                for p in 0..P {
                    for v in 0..V {
                        sums[row][p][v] = S::int8_dot(sums[row][p][v], weights[p][v], x);
                    }
                }
            }
            if !STREAM {
                ahead.iter_mut().for_each(|ahead| ahead.fetch::<S>());
            }
            codes = codes.add(4);
            b = b.add(STEP);
        }
        for p in 0..P {
            for v in 0..V {
                let column = first + v * lanes;
                let scales = w.start.add(p * w.panel_stride + w.k_len * PANEL).cast::<f32>();
                let scales = S::F::load(scales.add(column));
                for row in 0..R {
                    let scale = S::F::mul(scales, S::F::splat(*x.scales.add(row)));
                    let out = c.start.add(p * c.panel_stride + row * PANEL + column);
                    let acc = if c.resume { S::F::load(out) } else { S::F::zero() };
                    S::F::store(out, S::F::fma(S::to_f32(sums[row][p][v]), scale, acc));
                }
            }
        }
    }
}

/// The same for int4 weights: streamed as they are stored, or unpacked by [`unpack_int4`].
#[inline(always)]
unsafe fn int4<S: SimdInt, const R: usize, const P: usize, const V: usize, const UNPACKED: bool>(
    x: BlockRows,
    w: BlockWeights,
    c: Results,
    first: usize,
) {
    // SAFETY: the caller's pointers cover the tile; a prefetch may point anywhere.
    unsafe {
        let lanes = <S::F as Simd>::LANES;
        let (codes_bytes, group_bytes) =
            if UNPACKED { (GROUP * PANEL, UNPACKED_GROUP) } else { (INT4_CODES, INT4_GROUP) };
        let mut parts = [[[S::F::zero(); V]; P]; R];
        let (mut codes, mut group, mut ahead) = (x.codes, w.start, w.ahead);
        for g in 0..w.k_len / GROUP {
            let mut sums = [[[S::splat(0); V]; P]; R];
            for row in 0..R {
                sums[row] = [[S::splat(*x.starts_int4.add(row * GROUPS + g)); V]; P];
            }
            for s in 0..GROUP / 8 {
                let mut low = [[S::splat(0); V]; P];
                let mut high = low;
                for p in 0..P {
                    for v in 0..V {
                        let b = group.add(p * w.panel_stride + 4 * (first + lanes * v));
                        if UNPACKED {
                            low[p][v] = S::load(b.add(2 * s * STEP));
                            high[p][v] = S::load(b.add((2 * s + 1) * STEP));
                        } else {
                            let both = S::load(b.add(s * STEP));
                            low[p][v] = S::low_nibbles(both);
                            high[p][v] = S::high_nibbles(both);
                        }
                    }
                }
                for (half, weights) in [low, high].into_iter().enumerate() {
                    for row in 0..R {
                        let x = S::splat(four(codes, row * BLOCK + 8 * s + 4 * half));
                        for p in 0..P {
                            for v in 0..V {
                                sums[row][p][v] = S::int4_dot(sums[row][p][v], weights[p][v], x);
                            }
                        }
                    }
                    if UNPACKED {
                        ahead.iter_mut().for_each(|ahead| ahead.fetch::<S>());
                    }
                }
            }
            for p in 0..P {
                for v in 0..V {
                    let column = first + lanes * v;
                    let scales = group.add(p * w.panel_stride + codes_bytes);
                    let scales = if UNPACKED {
                        S::F::load(scales.cast::<f32>().add(column))
                    } else {
                        S::load_f16(scales.add(2 * column))
                    };
                    for row in 0..R {
                        parts[row][p][v] = S::F::fma(S::to_f32(sums[row][p][v]), scales, parts[row][p][v]);
                    }
                }
            }
            codes = codes.add(GROUP);
            group = group.add(group_bytes);
        }
        for row in 0..R {
            let scale = S::F::splat(*x.scales.add(row));
            for p in 0..P {
                for v in 0..V {
                    let out = c.start.add(p * c.panel_stride + row * PANEL + first + lanes * v);
                    let acc = if c.resume { S::F::load(out) } else { S::F::zero() };
                    S::F::store(out, S::F::fma(parts[row][p][v], scale, acc));
                }
            }
        }
    }
}

/// Makes a block of int4 weights of one panel ready for many tiles.
#[inline(always)]
pub(crate) unsafe fn unpack_int4<S: SimdInt>(packed: *const u8, k_len: usize, unpacked: *mut u8) {
    let lanes = <S::F as Simd>::LANES;
    for g in 0..k_len / GROUP {
        // SAFETY: the caller's pointers cover the block.
        unsafe {
            let (from, to) = (packed.add(g * INT4_GROUP), unpacked.add(g * UNPACKED_GROUP));
            for s in 0..GROUP / 8 {
                for part in (0..STEP).step_by(4 * lanes) {
                    let both = S::load(from.add(s * STEP + part));
                    S::store(to.add(2 * s * STEP + part), S::low_nibbles(both));
                    S::store(to.add((2 * s + 1) * STEP + part), S::high_nibbles(both));
                }
            }
            for column in (0..PANEL).step_by(lanes) {
                let scales = S::load_f16(from.add(INT4_CODES + 2 * column));
                S::F::store(to.add(GROUP * PANEL).cast::<f32>().add(column), scales);
            }
        }
    }
}

/// Makes the call with `$name` as the number of rows, for each of the numbers listed up to the limit.
macro_rules! by_rows {
    ($rows:expr, $limit:expr, [$($r:literal)*], $name:ident => $call:expr) => {
        match $rows {
            $($r if $r <= $limit => {
                const $name: usize = $r;
                $call
            })*
            _ => unreachable!("a tile is higher than the tier has registers for"),
        }
    };
}

/// A tile of two vectors across.
#[inline(always)]
pub(crate) unsafe fn int8_tile<S: SimdInt, const STREAM: bool>(
    rows: usize,
    x: BlockRows,
    w: BlockWeights,
    c: Results,
    first: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        by_rows!(rows, S::INT8_ROWS, [1 2 3 4 5 6 7 8 9 10 11 12], R => int8::<S, R, 1, 2, STREAM>(x, w, c, first))
    }
}

/// A tile of two vectors across, over unpacked weights.
#[inline(always)]
pub(crate) unsafe fn int4_tile<S: SimdInt>(rows: usize, x: BlockRows, w: BlockWeights, c: Results, first: usize) {
    // SAFETY: the caller's promise.
    unsafe { by_rows!(rows, S::INT4_ROWS, [1 2 3 4 5 6], R => int4::<S, R, 1, 2, true>(x, w, c, first)) }
}

/// All columns of one, two or four panels.
#[inline(always)]
pub(crate) unsafe fn int8_panels<S: SimdInt>(rows: usize, panels: usize, x: BlockRows, w: BlockWeights, c: Results) {
    // SAFETY: the caller's promise.
    unsafe {
        if <S::F as Simd>::LANES == 16 {
            match panels {
                4 => by_rows!(rows, 2, [1 2], R => int8::<S, R, 4, 2, true>(x, w, c, 0)),
                2 => by_rows!(rows, 4, [3 4], R => int8::<S, R, 2, 2, true>(x, w, c, 0)),
                _ => int8_tile::<S, true>(rows, x, w, c, 0),
            }
        } else {
            int8_tile::<S, true>(rows, x, w, c, 0);
            int8_tile::<S, true>(rows, x, w, c, PANEL / 2);
        }
    }
}

#[inline(always)]
pub(crate) unsafe fn int4_panels<S: SimdInt>(rows: usize, panels: usize, x: BlockRows, w: BlockWeights, c: Results) {
    // SAFETY: the caller's promise.
    unsafe {
        if <S::F as Simd>::LANES == 16 {
            match panels {
                4 => int4::<S, 1, 4, 2, false>(x, w, c, 0),
                2 => by_rows!(rows, 3, [2 3], R => int4::<S, R, 2, 2, false>(x, w, c, 0)),
                _ => by_rows!(rows, 6, [1 2 3 4 5 6], R => int4::<S, R, 1, 2, false>(x, w, c, 0)),
            }
        } else {
            by_rows!(rows, 2, [1 2], R => int4::<S, R, 1, 2, false>(x, w, c, 0));
            by_rows!(rows, 2, [1 2], R => int4::<S, R, 1, 2, false>(x, w, c, PANEL / 2));
        }
    }
}
