//! One vector interface over the SIMD tiers, and the step from a tier chosen at run time into code compiled for it.
//!
//! A kernel is written once, generic over [`Simd`], and is compiled once per tier: [`dispatch`] enters a function that
//! carries the tier's `target_feature`s, and everything below it is `#[inline(always)]` so that it ends up inside that
//! function. (A helper that is not inlined, or a closure, would be compiled without the features and run many times
//! slower.)

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod ints;
mod pairs;

use half::{bf16, f16};

use crate::tier::Tier;

pub(crate) use ints::{IntKernel, SimdInt, dispatch_int};
pub(crate) use pairs::{PairKernel, SimdPairs, dispatch_pairs};

/// Work on one share of an op: the oracle and the fast way side by side.
pub(crate) trait Kernel {
    /// The obvious loops.
    fn scalar(self);

    /// The same with vectors. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// The CPU has the features of `S`, and the kernel's pointers are valid for what it touches.
    unsafe fn simd<S: Simd>(self);
}

/// Runs a kernel on a tier.
///
/// # Safety
/// The kernel's pointers are valid for what it touches. (`Cpu::new` made sure that the machine has the tier.)
pub(crate) unsafe fn dispatch<K: Kernel>(tier: Tier, kernel: K) {
    match tier {
        Tier::Scalar => kernel.scalar(),
        // SAFETY: the tier was detected, the rest is the caller's promise.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { avx2::run(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 | Tier::Avx512Vnni | Tier::Avx512Bf16 => unsafe { avx512::run(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("the tier does not exist on this architecture"),
    }
}

/// Vectors of f32. All functions need the CPU features of the implementor; pointers need no alignment.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Simd: Copy {
    type V: Copy;

    /// f32 lanes of a vector: 8 or 16.
    const LANES: usize;
    /// Rows of the largest GEMM tile that stays in registers with two vectors across.
    const TILE_ROWS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// The first `n` elements, zeroes above; `n <= LANES`.
    unsafe fn load_partial(p: *const f32, n: usize) -> Self::V;
    unsafe fn store_partial(p: *mut f32, v: Self::V, n: usize);
    unsafe fn load_f16(p: *const f16) -> Self::V;
    unsafe fn load_bf16(p: *const bf16) -> Self::V;
    unsafe fn load_i8(p: *const i8) -> Self::V;
    /// The nearest whole numbers, ties to even, of values from -128 to 127.
    unsafe fn store_i8(p: *mut i8, v: Self::V);

    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of each pair; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of each pair; `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn round(a: Self::V) -> Self::V;
    /// `p * 2^n` for whole `n` between -150 and 128, underflowing gradually.
    unsafe fn scale_by_power(p: Self::V, n: Self::V) -> Self::V;
    /// Lanes `lo..hi` of `v` (both may lie outside the vector), `other` elsewhere.
    unsafe fn keep(v: Self::V, lo: isize, hi: isize, other: Self::V) -> Self::V;
    /// Whether any lane of `a` equals its lane of `b`.
    unsafe fn any_equal(a: Self::V, b: Self::V) -> bool;
    /// The sum of all lanes, always in the same order.
    unsafe fn sum(a: Self::V) -> f32;
    unsafe fn max_lane(a: Self::V) -> f32;
    /// Asks for the cache line at `p`; any address will do.
    unsafe fn prefetch<T>(p: *const T);
    /// Asks for the cache line at `p` only as far as the second cache: many more requests may be under way, and none holds
    /// up the loads of now.
    unsafe fn prefetch_far<T>(p: *const T);

    /// Runs a kernel as a function of its own, compiled for this tier.
    unsafe fn call<K: Kernel>(kernel: K);

    /// No vector at all: zeroes.
    #[inline(always)]
    unsafe fn zero() -> Self::V {
        // SAFETY: the caller has the features.
        unsafe { Self::splat(0.0) }
    }
}

/// e^x within 2e-7 relative, exactly 1 at 0, 0 far below, NaN for NaN. Arguments are cut to what f32 can hold.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller has the features of `S`.
    unsafe {
        let x = S::max(S::splat(-104.0), S::min(S::splat(88.72), x));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, the first short enough for n * part to be exact.
        let r = S::fma(n, S::splat(-0.693_359_4), x);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
            p = S::fma(p, r, S::splat(c));
        }
        let p = S::fma(S::mul(r, r), p, S::add(r, S::splat(1.0)));
        S::scale_by_power(p, n)
    }
}

/// 2^x for x at most 0, within 2e-7 relative, exactly 1 at 0, 0 far below, NaN for NaN. Cheaper than [`exp`]: cutting off
/// the whole part is exact.
#[inline(always)]
pub(crate) unsafe fn exp2_below_one<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller has the features of `S`.
    unsafe {
        let x = S::max(S::splat(-150.0), x);
        let n = S::round(x);
        let r = S::sub(x, n);
        // (2^r - 1) / r between -0.5 and 0.5, fitted for the least relative error of 2^r.
        let mut p = S::splat(1.330_060_7e-3);
        for c in [9.669_691e-3, 5.550_558_5e-2, 0.240_222_83, std::f32::consts::LN_2] {
            p = S::fma(p, r, S::splat(c));
        }
        S::scale_by_power(S::fma(p, r, S::splat(1.0)), n)
    }
}

/// A stored element type of weights or KV caches.
pub(crate) trait Element: Copy + Default + Send + Sync + 'static {
    /// Whether a vector load needs no conversion.
    const IS_F32: bool = false;

    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;

    /// # Safety
    /// `p` is valid for `S::LANES` elements, and the CPU has the features of `S`.
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;

    /// The first `n` elements, zeroes above.
    ///
    /// # Safety
    /// `p` is valid for `n <= S::LANES` elements, and the CPU has the features of `S`.
    #[inline(always)]
    unsafe fn load_partial<S: Simd>(p: *const Self, n: usize) -> S::V {
        let mut whole = [Self::default(); 16];
        // SAFETY: `n` is at most 16, the widest vector.
        unsafe {
            std::ptr::copy_nonoverlapping(p, whole.as_mut_ptr(), n);
            Self::load::<S>(whole.as_ptr())
        }
    }
}

impl Element for f32 {
    const IS_F32: bool = true;

    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load(p) }
    }
}

impl Element for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    /// Saturates: an outlier beyond the range becomes the largest number, not infinity.
    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const()))
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f16) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load_f16(p) }
    }
}

impl Element for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const bf16) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load_bf16(p) }
    }
}

/// A code; its scale is kept elsewhere.
impl Element for i8 {
    fn to_f32(self) -> f32 {
        f32::from(self)
    }
    /// The nearest code; 0 for NaN.
    fn from_f32(x: f32) -> i8 {
        x.round_ties_even() as i8
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const i8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::load_i8(p) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// e^x, or 2^x for x at most 0.
    struct Exp<'a> {
        base_2: bool,
        x: &'a [f32],
        out: &'a mut [f32],
    }

    impl Kernel for Exp<'_> {
        fn scalar(self) {
            for (out, x) in self.out.iter_mut().zip(self.x) {
                *out = if self.base_2 { x.exp2() } else { x.exp() };
            }
        }

        #[inline(always)]
        unsafe fn simd<S: Simd>(self) {
            for i in (0..self.x.len()).step_by(S::LANES) {
                let n = S::LANES.min(self.x.len() - i);
                // SAFETY: `n` elements are left.
                unsafe {
                    let x = S::load_partial(self.x.as_ptr().add(i), n);
                    let y = if self.base_2 { exp2_below_one::<S>(x) } else { exp::<S>(x) };
                    S::store_partial(self.out.as_mut_ptr().add(i), y, n);
                }
            }
        }
    }

    #[test]
    fn exp2_is_exact_to_2e_7_and_keeps_its_promises() {
        let x: Vec<f32> = (0..=130_000).map(|i| i as f32 * -1e-3 + 4.5).filter(|&x| x <= 0.0).collect();
        for tier in Tier::available() {
            let mut out = vec![0.0; x.len()];
            // SAFETY: the tier is available, both slices have one length.
            unsafe { dispatch(tier, Exp { base_2: true, x: &x, out: &mut out }) };
            for (&x, &y) in x.iter().zip(&out) {
                let error = (f64::from(y) / f64::from(x).exp2() - 1.0).abs();
                assert!(error < 2e-7, "{tier:?}: 2^{x} = {y}, off by {error:e}");
            }
            let edges = [0.0, -0.0, f32::NEG_INFINITY, -1e30, -200.0, -150.0, f32::NAN, -149.0];
            let mut out = [0.5; 8];
            // SAFETY: as above.
            unsafe { dispatch(tier, Exp { base_2: true, x: &edges, out: &mut out }) };
            assert_eq!(out[..6], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], "{tier:?}");
            assert!(out[6].is_nan() && out[7] > 0.0, "{tier:?} {out:?}");
        }
    }

    #[test]
    fn exp_is_exact_to_2e_7() {
        let mut x: Vec<f32> = (0..200_001).map(|i| -87.0 + i as f32 * 8.7e-4).collect();
        x.retain(|x| *x < 88.5);
        for tier in Tier::available() {
            let mut out = vec![0.0; x.len()];
            // SAFETY: the tier is available, both slices have one length.
            unsafe { dispatch(tier, Exp { base_2: false, x: &x, out: &mut out }) };
            for (&x, &y) in x.iter().zip(&out) {
                let exact = f64::from(x).exp();
                let error = (f64::from(y) / exact - 1.0).abs();
                assert!(error < 2e-7, "{tier:?}: exp({x}) = {y}, exact {exact}, off by {error:e}");
            }
        }
    }

    #[test]
    fn exp_keeps_its_promises_at_the_edges() {
        let x = [0.0, -0.0, f32::NEG_INFINITY, -1e30, -200.0, -104.0, f32::NAN, 1e30];
        for tier in Tier::available() {
            let mut out = [0.5; 8];
            // SAFETY: the tier is available, both slices have one length.
            unsafe { dispatch(tier, Exp { base_2: false, x: &x, out: &mut out }) };
            assert_eq!(out[..2], [1.0, 1.0], "{tier:?}");
            assert_eq!(out[2..5], [0.0; 3], "{tier:?}");
            assert!(out[5].abs() < 1e-44 && out[6].is_nan() && out[7] > 3e38, "{tier:?} {out:?}");
        }
    }
}
