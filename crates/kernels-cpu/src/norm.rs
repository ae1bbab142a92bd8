//! Root-mean-square norms: of rows, of rows with a residual added first, and of the heads of q and k.

use crate::cpu::{Cpu, SharedMut};
use crate::kv::QkvShape;
use crate::rows::for_row_ranges;
use crate::simd::{Kernel, Simd, dispatch};

impl Cpu {
    /// `out = x / rms(x) * w` for each row of `w.len()` elements.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn rms_norm(&mut self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        let width = w.len();
        assert_eq!(x.len(), out.len(), "x and out of rms_norm");
        assert!(width > 0 && x.len().is_multiple_of(width), "x of rms_norm: rows of {width}, found {}", x.len());
        let (tier, rows, out) = (self.tier, x.len() / width, SharedMut::new(out));
        for_row_ranges(&mut self.pool, rows, width, &|rows| {
            for row in rows {
                let x = x[row * width..].as_ptr();
                // SAFETY: rows are disjoint; x, w and out have `width` elements.
                unsafe { dispatch(tier, RmsNorm { x, w, eps, out: out.slice(row * width, width).as_mut_ptr() }) };
            }
        });
    }

    /// `residual += delta`, then `out = rms_norm(residual)`.
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn add_rms_norm(&mut self, residual: &mut [f32], delta: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        let width = w.len();
        assert_eq!(residual.len(), out.len(), "residual and out of add_rms_norm");
        assert_eq!(residual.len(), delta.len(), "residual and delta of add_rms_norm");
        assert!(
            width > 0 && out.len().is_multiple_of(width),
            "rows of add_rms_norm: {width} wide, found {}",
            out.len()
        );
        let (tier, rows) = (self.tier, out.len() / width);
        let (residual, out) = (SharedMut::new(residual), SharedMut::new(out));
        for_row_ranges(&mut self.pool, rows, 2 * width, &|rows| {
            for row in rows {
                // SAFETY: rows are disjoint.
                let residual = unsafe { residual.slice(row * width, width) };
                add(residual, &delta[row * width..(row + 1) * width]);
                let x = residual.as_ptr();
                // SAFETY: rows are disjoint; x, w and out have `width` elements.
                unsafe { dispatch(tier, RmsNorm { x, w, eps, out: out.slice(row * width, width).as_mut_ptr() }) };
            }
        });
    }

    /// `rms_norm` of each query head with `q_w` and each key head with `k_w`, in place (before RoPE, as in Qwen3).
    ///
    /// # Panics
    /// When a length does not fit.
    pub fn qk_norm(&mut self, qkv: &mut [f32], shape: QkvShape, q_w: &[f32], k_w: &[f32], eps: f32) {
        let (row_len, d) = (shape.row(), shape.head_dim);
        assert!(
            row_len > 0 && qkv.len().is_multiple_of(row_len),
            "qkv of qk_norm: rows of {row_len}, found {}",
            qkv.len()
        );
        assert_eq!((q_w.len(), k_w.len()), (d, d), "weights of qk_norm: head_dim");
        let (tier, rows, qkv) = (self.tier, qkv.len() / row_len, SharedMut::new(qkv));
        for_row_ranges(&mut self.pool, rows, row_len, &|rows| {
            for row in rows {
                for head in 0..shape.heads + shape.kv_heads {
                    let w = if head < shape.heads { q_w } else { k_w };
                    // SAFETY: heads are disjoint; a norm may write over its input.
                    unsafe {
                        let x = qkv.slice(row * row_len + head * d, d).as_mut_ptr();
                        dispatch(tier, RmsNorm { x, w, eps, out: x });
                    }
                }
            }
        });
    }
}

pub(crate) fn add(residual: &mut [f32], delta: &[f32]) {
    for (residual, delta) in residual.iter_mut().zip(delta) {
        *residual += delta;
    }
}

/// One row of `w.len()` elements; `out` may be `x`.
pub(crate) struct RmsNorm<'a> {
    pub(crate) x: *const f32,
    pub(crate) w: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: *mut f32,
}

/// Sums kept side by side, always as many, so that a row's result depends on nothing else.
const SUMS: usize = 4;

impl Kernel for RmsNorm<'_> {
    fn scalar(self) {
        // SAFETY: x and out have the weight's length.
        unsafe {
            let mut squares = 0.0;
            for i in 0..self.w.len() {
                squares += *self.x.add(i) * *self.x.add(i);
            }
            let scale = 1.0 / (squares / self.w.len() as f32 + self.eps).sqrt();
            for i in 0..self.w.len() {
                *self.out.add(i) = *self.x.add(i) * scale * self.w[i];
            }
        }
    }

    #[inline(always)]
    unsafe fn simd<S: Simd>(self) {
        let len = self.w.len();
        // SAFETY: x and out have the weight's length, and partial vectors end there.
        unsafe {
            let mut squares = [S::zero(); SUMS];
            let mut i = 0;
            while i + SUMS * S::LANES <= len {
                for s in 0..SUMS {
                    let x = S::load(self.x.add(i + s * S::LANES));
                    squares[s] = S::fma(x, x, squares[s]);
                }
                i += SUMS * S::LANES;
            }
            while i < len {
                let n = S::LANES.min(len - i);
                let x = S::load_partial(self.x.add(i), n);
                squares[0] = S::fma(x, x, squares[0]);
                i += n;
            }
            let sum = S::sum(S::add(S::add(squares[0], squares[1]), S::add(squares[2], squares[3])));
            let scale = S::splat(1.0 / (sum / len as f32 + self.eps).sqrt());
            i = 0;
            while i < len {
                let n = S::LANES.min(len - i);
                let x = S::mul(S::load_partial(self.x.add(i), n), scale);
                S::store_partial(self.out.add(i), S::mul(x, S::load_partial(self.w.as_ptr().add(i), n)), n);
                i += n;
            }
        }
    }
}
