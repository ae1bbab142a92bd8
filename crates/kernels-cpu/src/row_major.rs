//! The product over weights as checkpoints store them: the scalar oracle, and a plain blocked GEMM of dot products.
//!
//! The vector version computes every output as one vector chain over k and one sum of its lanes, whatever the tile, so
//! it is as independent of the batch as the packed product (though its rounding differs from that).

use std::ops::Range;

use crate::matrix::Matrix;
use crate::simd::{Element, Kernel, Simd};

/// Rows of x that stay in the cache while the task's weight rows pass by.
const ROW_BLOCK: usize = 48;
/// Rows of x in one register tile.
const TILE_M: usize = 4;

/// A range of output columns for all rows.
pub(crate) struct RowMajorTask<'a, W> {
    pub(crate) x: &'a [f32],
    pub(crate) m: usize,
    /// Shape and layout; `data` are its elements.
    pub(crate) w: Matrix<'a>,
    pub(crate) data: &'a [W],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) columns: Range<usize>,
    /// The whole output, `[m][n]`.
    pub(crate) out: *mut f32,
}

impl<W: Element> Kernel for RowMajorTask<'_, W> {
    /// The oracle of `linear`, for both layouts.
    fn scalar(self) {
        let Matrix { n, k, .. } = self.w;
        for row in 0..self.m {
            for column in self.columns.clone() {
                let mut sum = 0.0;
                for i in 0..k {
                    sum += self.x[row * k + i] * self.data[self.w.index(column, i)].to_f32();
                }
                sum += self.bias.map_or(0.0, |bias| bias[column]);
                // SAFETY: within the output, and no other task writes these columns.
                unsafe { *self.out.add(row * n + column) = sum };
            }
        }
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let mut block = 0;
        while block < self.m {
            let end = self.m.min(block + ROW_BLOCK);
            let mut column = self.columns.start;
            // SAFETY: rows and columns lie within x, weight and output.
            unsafe {
                if S::LANES == 16 {
                    while column + 4 <= self.columns.end {
                        self.rows::<S, 4>(block, end, column);
                        column += 4;
                    }
                } else {
                    while column + 2 <= self.columns.end {
                        self.rows::<S, 2>(block, end, column);
                        column += 2;
                    }
                }
                while column < self.columns.end {
                    self.rows::<S, 1>(block, end, column);
                    column += 1;
                }
            }
            block = end;
        }
    }
}

impl<W: Element> RowMajorTask<'_, W> {
    /// `N` columns for rows `row..end`.
    #[inline(always)]
    unsafe fn rows<S: Simd, const N: usize>(&self, mut row: usize, end: usize, column: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            while row + TILE_M <= end {
                self.dots::<S, TILE_M, N>(row, column);
                row += TILE_M;
            }
            while row < end {
                self.dots::<S, 1, N>(row, column);
                row += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn dots<S: Simd, const M: usize, const N: usize>(&self, row: usize, column: usize) {
        let Matrix { n, k, .. } = self.w;
        // SAFETY: the caller's promise.
        unsafe {
            let x = self.x.as_ptr().add(row * k);
            let w = self.data.as_ptr().add(column * k);
            let mut acc = [[S::zero(); N]; M];
            let mut i = 0;
            while i + S::LANES <= k {
                let mut weights = [S::zero(); N];
                for b in 0..N {
                    weights[b] = W::load::<S>(w.add(b * k + i));
                }
                for a in 0..M {
                    let x = S::load(x.add(a * k + i));
                    for b in 0..N {
                        acc[a][b] = S::fma(x, weights[b], acc[a][b]);
                    }
                }
                i += S::LANES;
            }
            if i < k {
                for a in 0..M {
                    let x = S::load_partial(x.add(a * k + i), k - i);
                    for b in 0..N {
                        acc[a][b] = S::fma(x, W::load_partial::<S>(w.add(b * k + i), k - i), acc[a][b]);
                    }
                }
            }
            for a in 0..M {
                for b in 0..N {
                    let bias = self.bias.map_or(0.0, |bias| bias[column + b]);
                    *self.out.add((row + a) * n + column + b) = S::sum(acc[a][b]) + bias;
                }
            }
        }
    }
}
