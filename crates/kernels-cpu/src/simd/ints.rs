//! Dot products of bytes: the same step from a tier into code compiled for it as for f32 kernels, with one tier more.

use half::f16;

use super::Simd;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::tier::Tier;

/// Work on one share of a product of quantised weights and rows; see [`super::Kernel`].
pub(crate) trait IntKernel {
    /// The obvious loops.
    fn scalar(self);

    /// The same with vectors. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// The CPU has the features of `S`, and the kernel's pointers are valid for what it touches.
    unsafe fn simd<S: SimdInt>(self);
}

/// Runs a kernel on a tier.
///
/// # Safety
/// The kernel's pointers are valid for what it touches. (`Cpu::new` made sure that the machine has the tier.)
pub(crate) unsafe fn dispatch_int<K: IntKernel>(tier: Tier, kernel: K) {
    match tier {
        Tier::Scalar => kernel.scalar(),
        // SAFETY: the tier was detected, the rest is the caller's promise.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { avx2::run_int(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { avx512::run_int(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512Vnni | Tier::Avx512Bf16 => unsafe { avx512::run_vnni(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("the tier does not exist on this architecture"),
    }
}

/// Vectors of i32 sums, each of which takes up the products of four pairs of bytes at a time. Sums are exact. All
/// functions need the CPU features of the implementor; pointers need no alignment.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait SimdInt {
    /// The f32 vectors that go with it, of as many lanes.
    type F: Simd;
    /// i32 lanes, or four bytes in each.
    type I: Copy;
    /// Int8 weights made ready for products.
    type Weights: Copy;

    /// Rows of the largest tile that stays in registers, two vectors across: of int8, and of int4 weights.
    const INT8_ROWS: usize;
    const INT4_ROWS: usize;

    unsafe fn load(p: *const u8) -> Self::I;
    unsafe fn store(p: *mut u8, v: Self::I);
    /// The same i32, or the same four bytes, in all lanes.
    unsafe fn splat(x: i32) -> Self::I;
    unsafe fn to_f32(v: Self::I) -> <Self::F as Simd>::V;
    unsafe fn low_nibbles(v: Self::I) -> Self::I;
    unsafe fn high_nibbles(v: Self::I) -> Self::I;

    /// Weights of 8 bits from their codes (q + 128).
    unsafe fn int8_weights(codes: Self::I) -> Self::Weights;
    /// What a sum of int8 products starts from, given what makes up for the offset of the codes.
    unsafe fn int8_start(start: i32) -> Self::I;
    unsafe fn int8_dot(sums: Self::I, weights: Self::Weights, x: Self::I) -> Self::I;
    /// Adds products of codes from 0 to 15 as they are.
    unsafe fn int4_dot(sums: Self::I, codes: Self::I, x: Self::I) -> Self::I;

    /// Rounded to f32 from f16.
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> <Self::F as Simd>::V {
        // SAFETY: the caller's promise.
        unsafe { Self::F::load_f16(p.cast::<f16>()) }
    }
}
