//! AVX2 with FMA and F16C: 8 lanes, 16 registers, masks as vectors.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{IntKernel, Kernel, Simd, SimdInt};

#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// # Safety
/// The CPU has these features, and the kernel's pointers are valid for what it touches.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) {
    // SAFETY: the caller's promise.
    unsafe { kernel.simd::<Avx2>() }
}

/// # Safety
/// As [`run`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run_int<K: IntKernel>(kernel: K) {
    // SAFETY: the caller's promise.
    unsafe { kernel.simd::<Avx2>() }
}

/// All bits set in the lowest `n` lanes, for any `n`.
#[inline(always)]
unsafe fn lanes_below(n: isize) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n.clamp(0, 8) as i32), lane)
    }
}

// What the caller promises in all methods, as the trait demands: it has the features and valid pointers.
impl Simd for Avx2 {
    type V = __m256;

    const LANES: usize = 8;
    /// 12 accumulators, 2 weights, 1 broadcast: 15 of 16 registers.
    const TILE_ROWS: usize = 6;

    #[inline(always)]
    unsafe fn call<K: Kernel>(kernel: K) {
        // SAFETY: the caller's promise.
        unsafe { run(kernel) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_maskload_ps(p, lanes_below(n as isize)) }
    }
    #[inline(always)]
    unsafe fn store_partial(p: *mut f32, v: __m256, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_maskstore_ps(p, lanes_below(n as isize), v) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: __m256) {
        // SAFETY: the caller's promise.
        unsafe {
            let whole = _mm256_cvtps_epi32(v);
            let words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256::<1>(whole));
            _mm_storel_epi64(p.cast(), _mm_packs_epi16(words, words))
        }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: __m256) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn scale_by_power(p: __m256, n: __m256) -> __m256 {
        // Two factors, each a normal number, so that the product underflows and overflows as it should.
        // SAFETY: the caller's promise.
        unsafe {
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let bias = _mm256_set1_epi32(127);
            let first = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
            let second = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias));
            _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second))
        }
    }
    #[inline(always)]
    unsafe fn keep(v: __m256, lo: isize, hi: isize, other: __m256) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let kept = _mm256_andnot_si256(lanes_below(lo), lanes_below(hi));
            _mm256_blendv_ps(other, v, _mm256_castsi256_ps(kept))
        }
    }
    #[inline(always)]
    unsafe fn any_equal(a: __m256, b: __m256) -> bool {
        // SAFETY: the caller's promise.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, b)) != 0 }
    }
    #[inline(always)]
    unsafe fn sum(a: __m256) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn max_lane(a: __m256) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch<T>(p: *const T) {
        // SAFETY: the caller's promise.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_far<T>(p: *const T) {
        // SAFETY: the caller's promise.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}

// What the caller promises in all methods, as the trait demands: it has the features and valid pointers.
impl SimdInt for Avx2 {
    type F = Avx2;
    type I = __m256i;
    /// Magnitudes, and the signed values that they are of.
    type Weights = (__m256i, __m256i);

    /// 8 sums, 2 weights of two registers, 1 broadcast, 1 product, ones: 15 of 16 registers.
    const INT8_ROWS: usize = 4;
    /// 4 sums, 4 parts, 2 weights, 1 broadcast, 1 product, ones: 13 of 16 registers.
    const INT4_ROWS: usize = 2;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut u8, v: __m256i) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn splat(x: i32) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn to_f32(v: __m256i) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn low_nibbles(v: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_and_si256(v, _mm256_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(v: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_and_si256(_mm256_srli_epi16::<4>(v), _mm256_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn int8_weights(codes: __m256i) -> (__m256i, __m256i) {
        // SAFETY: the caller's promise.
        unsafe {
            let signed = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
            (_mm256_abs_epi8(signed), signed)
        }
    }
    #[inline(always)]
    unsafe fn int8_start(_start: i32) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn int8_dot(sums: __m256i, (magnitudes, signed): (__m256i, __m256i), x: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            // Magnitudes up to 127 times 127, two at a time, stay within 16 bits.
            let pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, signed));
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn int4_dot(sums: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            let pairs = _mm256_maddubs_epi16(codes, x);
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
}
