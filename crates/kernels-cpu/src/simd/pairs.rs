//! Dot products of bfloat16 pairs: a step from the tier that has them into code compiled for it, as for f32 kernels.

use half::bf16;

use super::Simd;
use crate::tier::Tier;

/// Work on one share of a product with bfloat16 weights; see [`super::Kernel`]. There is no scalar side: tiers without
/// such instructions widen the weights and leave the rows as they are.
pub(crate) trait PairKernel {
    /// Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// The CPU has the features of `S`, and the kernel's pointers are valid for what it touches.
    unsafe fn simd<S: SimdPairs>(self);
}

/// Runs a kernel on a tier that [multiplies pairs](Tier::multiplies_pairs).
///
/// # Safety
/// The kernel's pointers are valid for what it touches. (`Cpu::new` made sure that the machine has the tier.)
pub(crate) unsafe fn dispatch_pairs<K: PairKernel>(tier: Tier, kernel: K) {
    assert!(tier.multiplies_pairs(), "the tier {} cannot multiply bfloat16 pairs", tier.name());
    // SAFETY: the tier was detected, the rest is the caller's promise.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        super::avx512::run_pairs(kernel)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = kernel;
        unreachable!("the tier does not exist on this architecture")
    }
}

/// Vectors of f32 sums, each of which takes up the products of two pairs of bfloat16 at a time. A vector of bfloat16
/// is as long as a row of a panel. All functions need the CPU features of the implementor; pointers need no alignment.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait SimdPairs {
    /// The sums: f32 vectors of half as many lanes.
    type F: Simd;
    /// 32 bfloat16, or 16 pairs of them.
    type B: Copy;

    unsafe fn load(p: *const bf16) -> Self::B;
    unsafe fn store(p: *mut bf16, v: Self::B);
    unsafe fn zero() -> Self::B;
    /// The two elements at `p` in all lanes.
    unsafe fn splat_pair(p: *const bf16) -> Self::B;
    /// Pairs of an element of each: those of the lower and of the upper halves.
    unsafe fn zip(first: Self::B, second: Self::B) -> [Self::B; 2];
    /// Pairs of an element of each half of a vector.
    unsafe fn zip_halves(v: Self::B) -> Self::B;
    /// Pairs of the 16 elements at each of two addresses.
    unsafe fn zip_at(first: *const bf16, second: *const bf16) -> Self::B;
    /// Those bits of each pair that are set in `bits`; the lower half is the first of a pair.
    unsafe fn mask(v: Self::B, bits: u32) -> Self::B;
    /// Rounds to nearest, ties to even; numbers below the normal range become 0.
    unsafe fn round(low: <Self::F as Simd>::V, high: <Self::F as Simd>::V) -> Self::B;
    /// Adds both products of each pair. Rounding and the order within a pair are the CPU's; numbers below the normal
    /// range count as 0.
    unsafe fn dot(sums: <Self::F as Simd>::V, weights: Self::B, x: Self::B) -> <Self::F as Simd>::V;

    /// Runs a kernel as a function of its own, compiled for this tier.
    unsafe fn call<K: PairKernel>(kernel: K);
}
