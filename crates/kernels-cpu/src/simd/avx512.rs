//! AVX-512: 16 lanes, 32 registers, masks.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{IntKernel, Kernel, PairKernel, Simd, SimdInt, SimdPairs};

#[derive(Clone, Copy)]
pub(super) struct Avx512;

/// # Safety
/// The CPU has these features, and the kernel's pointers are valid for what it touches.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) {
    // SAFETY: the caller's promise.
    unsafe { kernel.simd::<Avx512>() }
}

/// # Safety
/// As [`run`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn run_int<K: IntKernel>(kernel: K) {
    // SAFETY: the caller's promise.
    unsafe { kernel.simd::<Bytes<false>>() }
}

/// # Safety
/// As [`run`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn run_vnni<K: IntKernel>(kernel: K) {
    // SAFETY: the caller's promise.
    unsafe { kernel.simd::<Bytes<true>>() }
}

/// # Safety
/// As [`run`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn run_pairs<K: PairKernel>(kernel: K) {
    // SAFETY: the caller's promise.
    unsafe { kernel.simd::<Pairs>() }
}

/// The lowest `n` lanes, for any `n`.
#[inline(always)]
fn lanes_below(n: isize) -> __mmask16 {
    ((1u32 << n.clamp(0, 16)) - 1) as __mmask16
}

// What the caller promises in all methods, as the trait demands: it has the features and valid pointers.
impl Simd for Avx512 {
    type V = __m512;

    const LANES: usize = 16;
    /// 24 accumulators, 2 weights, 1 broadcast: 27 of 32 registers.
    const TILE_ROWS: usize = 12;

    #[inline(always)]
    unsafe fn call<K: Kernel>(kernel: K) {
        // SAFETY: the caller's promise.
        unsafe { run(kernel) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(lanes_below(n as isize), p) }
    }
    #[inline(always)]
    unsafe fn store_partial(p: *mut f32, v: __m512, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_mask_storeu_ps(p, lanes_below(n as isize), v) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v))) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn scale_by_power(p: __m512, n: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_scalef_ps(p, n) }
    }
    #[inline(always)]
    unsafe fn keep(v: __m512, lo: isize, hi: isize, other: __m512) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_mask_blend_ps(lanes_below(hi) & !lanes_below(lo), other, v) }
    }
    #[inline(always)]
    unsafe fn any_equal(a: __m512, b: __m512) -> bool {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b) != 0 }
    }
    #[inline(always)]
    unsafe fn sum(a: __m512) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_reduce_add_ps(a) }
    }
    #[inline(always)]
    unsafe fn max_lane(a: __m512) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_reduce_max_ps(a) }
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

/// Products of bytes, with the instruction made for them or without.
pub(super) struct Bytes<const VNNI: bool>;

// What the caller promises in all methods, as the trait demands: it has the features and valid pointers.
impl<const VNNI: bool> SimdInt for Bytes<VNNI> {
    type F = Avx512;
    type I = __m512i;
    /// With VNNI the codes as they are, else magnitudes and signs.
    type Weights = (__m512i, __mmask64);

    /// 24 sums, 2 weights, 1 broadcast: 27 of 32 registers.
    const INT8_ROWS: usize = 12;
    /// 12 sums, 12 parts, 2 weights, 1 broadcast: 27 of 32 registers.
    const INT4_ROWS: usize = 6;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut u8, v: __m512i) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn splat(x: i32) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn to_f32(v: __m512i) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn low_nibbles(v: __m512i) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_and_si512(v, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(v: __m512i) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(v), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn int8_weights(codes: __m512i) -> (__m512i, __mmask64) {
        if VNNI {
            return (codes, 0);
        }
        // SAFETY: the caller's promise.
        unsafe {
            let signed = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
            (_mm512_abs_epi8(signed), _mm512_movepi8_mask(signed))
        }
    }
    #[inline(always)]
    unsafe fn int8_start(start: i32) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_set1_epi32(if VNNI { start } else { 0 }) }
    }
    #[inline(always)]
    unsafe fn int8_dot(sums: __m512i, (weights, negative): (__m512i, __mmask64), x: __m512i) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            if VNNI {
                return _mm512_dpbusd_epi32(sums, weights, x);
            }
            // Magnitudes up to 127 times 127, two at a time, stay within 16 bits.
            let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
            let pairs = _mm512_maddubs_epi16(weights, x);
            _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn int4_dot(sums: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            if VNNI {
                return _mm512_dpbusd_epi32(sums, codes, x);
            }
            let pairs = _mm512_maddubs_epi16(codes, x);
            _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
}

/// Products of bfloat16 pairs.
pub(super) struct Pairs;

/// Which words of two vectors of 32 make up the pairs of their lower halves, and those of their upper halves.
static ZIP: [[i16; 32]; 2] = {
    let mut words = [[0; 32]; 2];
    let mut i = 0;
    while i < 32 {
        words[i / 16][i % 16 * 2] = i as i16;
        words[i / 16][i % 16 * 2 + 1] = i as i16 + 32;
        i += 1;
    }
    words
};

/// The same for the two halves of one vector.
static ZIP_HALVES: [i16; 32] = {
    let mut words = [0; 32];
    let mut i = 0;
    while i < 32 {
        words[i] = (i / 2 + i % 2 * 16) as i16;
        i += 1;
    }
    words
};

// What the caller promises in all methods, as the trait demands: it has the features and valid pointers.
impl SimdPairs for Pairs {
    type F = Avx512;
    type B = __m512i;

    #[inline(always)]
    unsafe fn load(p: *const bf16) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut bf16, v: __m512i) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn zero() -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn splat_pair(p: *const bf16) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn zip(first: __m512i, second: __m512i) -> [__m512i; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let low = _mm512_loadu_si512(ZIP[0].as_ptr().cast());
            let high = _mm512_loadu_si512(ZIP[1].as_ptr().cast());
            [_mm512_permutex2var_epi16(first, low, second), _mm512_permutex2var_epi16(first, high, second)]
        }
    }
    #[inline(always)]
    unsafe fn zip_halves(v: __m512i) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_permutexvar_epi16(_mm512_loadu_si512(ZIP_HALVES.as_ptr().cast()), v) }
    }
    #[inline(always)]
    unsafe fn zip_at(first: *const bf16, second: *const bf16) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            let first = _mm512_castsi256_si512(_mm256_loadu_si256(first.cast()));
            Self::zip_halves(_mm512_inserti64x4::<1>(first, _mm256_loadu_si256(second.cast())))
        }
    }
    #[inline(always)]
    unsafe fn mask(v: __m512i, bits: u32) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_and_si512(v, _mm512_set1_epi32(bits as i32)) }
    }
    #[inline(always)]
    unsafe fn call<K: PairKernel>(kernel: K) {
        // SAFETY: the caller's promise.
        unsafe { run_pairs(kernel) }
    }
    #[inline(always)]
    unsafe fn round(low: __m512, high: __m512) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
    }
    #[inline(always)]
    unsafe fn dot(sums: __m512, weights: __m512i, x: __m512i) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            let weights = std::mem::transmute::<__m512i, __m512bh>(weights);
            _mm512_dpbf16_ps(sums, weights, std::mem::transmute::<__m512i, __m512bh>(x))
        }
    }
}
