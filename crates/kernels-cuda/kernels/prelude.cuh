// What every kernel file starts from: types, conversions and the instructions that C++ has no words for.
// No header is included anywhere, so that NVRTC needs no include path. Inline PTX is written here and nowhere else,
// Hopper's matrix and copy instructions excepted (gemm_sm90.cu).
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define WARP 32
#define FULL_WARP 0xffffffffu
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
// The block's dynamic shared memory, as bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) u8 name[]

struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};
struct fp8 { // e4m3, no infinity, largest 448
    u8 bits;
};
struct alignas(16) bytes16 {
    u32 x, y, z, w;
};
struct alignas(8) bytes8 {
    u32 x, y;
};

// Rows and cache of one request in a step; the same layout as the host's.
struct SeqSpan {
    u32 q_start;     // first packed row
    u32 q_len;       // rows of this step
    u32 kv_len;      // keys once this step's rows are written; 0 is a padded entry that attends to nothing
    u32 table_start; // first entry in block_tables
};

// Rows of one expert that a block multiplies: places `first` and on among the pairs sorted by expert.
struct alignas(16) ExpertTile {
    u32 expert, first, rows, unused;
};

DEVICE float infinity() { return __int_as_float(0x7f800000); }
// 2^x to about 22 bits; results below the smallest normal number are 0.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define LOG2_E 1.4426950408889634f
// What a head's sink adds to the total of a row: a logit that every row sees and that has no value. `maximum` is the
// row's, in powers of two, as its total is. Where there are no sinks the answer is 0.
DEVICE float sink_weight(const float *sinks, u32 head, float maximum) {
    return sinks != nullptr ? exp2_fast(sinks[head] * LOG2_E - maximum) : 0.0f;
}

// ---- conversions ------------------------------------------------------------------------------------------------
DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE float to_float(fp8 x) {
#if STROBE_ARCH >= 89
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)x.bits));
    f16 low;
    low.bits = (u16)pair;
    return to_float(low);
#else
    u32 magnitude = x.bits & 0x7f;
    if (magnitude == 0x7f) return __uint_as_float(0x7fc00000);
    u32 exponent = magnitude >> 3, mantissa = magnitude & 7;
    float value = exponent == 0 ? (float)mantissa * 0.001953125f : __uint_as_float(((exponent + 120) << 23) | (mantissa << 20));
    return x.bits & 0x80 ? -value : value;
#endif
}

template <typename T> struct Cast;
template <> struct Cast<float> {
    static DEVICE float from(float x) { return x; }
};
template <> struct Cast<bf16> {
    static DEVICE bf16 from(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
template <> struct Cast<f16> {
    static DEVICE f16 from(float x) {
        // Saturates: a value beyond the range must not become an infinity that spreads.
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(fminf(fmaxf(x, -65504.0f), 65504.0f)));
        return y;
    }
};
template <> struct Cast<fp8> {
    static DEVICE fp8 from(float x) {
        fp8 y;
#if STROBE_ARCH >= 89
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
        y.bits = (u8)pair;
#else
        u32 sign = (__float_as_uint(x) >> 24) & 0x80;
        float a = fminf(fabsf(x), 448.0f);
        u32 code;
        if (!(x == x)) {
            code = 0x7f;
        } else if (a < 0.015625f) {
            code = (u32)rintf(a * 512.0f); // subnormal; 8 is the first normal number
        } else {
            u32 bits = __float_as_uint(a);
            bits += 0x7ffff + ((bits >> 20) & 1); // nearest, ties to even
            code = ((bits >> 20) & 0x7ff) - (120 << 3);
            code = code > 0x7e ? 0x7e : code;
        }
        y.bits = (u8)(sign | code);
#endif
        return y;
    }
};

// Two e4m3 values to two f16 values, exactly.
DEVICE u32 fp8_pair_to_f16(u32 pair) {
    u32 halves;
#if STROBE_ARCH >= 89
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)pair));
#else
    fp8 low, high;
    low.bits = (u8)pair;
    high.bits = (u8)(pair >> 8);
    f16 a = Cast<f16>::from(to_float(low)), b = Cast<f16>::from(to_float(high));
    halves = (u32)a.bits | ((u32)b.bits << 16);
#endif
    return halves;
}

// Two values in one register: `low` in the low half.
template <typename T> DEVICE u32 pack2(float low, float high) {
    return (u32)Cast<T>::from(low).bits | ((u32)Cast<T>::from(high).bits << 16);
}
template <> DEVICE u32 pack2<bf16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <> DEVICE u32 pack2<f16>(float low, float high) {
    u32 pair; // saturates, as above
    low = fminf(fmaxf(low, -65504.0f), 65504.0f);
    high = fminf(fmaxf(high, -65504.0f), 65504.0f);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <typename T> DEVICE void unpack2(u32 pair, float &low, float &high) {
    T a, b;
    a.bits = (u16)pair;
    b.bits = (u16)(pair >> 16);
    low = to_float(a);
    high = to_float(b);
}

// Four e4m3 codes as two pairs, exactly: the bits of a code are those of a value that is a power of two too small.
// The two codes without a value (0x7f, 0xff) become 480, not NaN.
template <typename T> DEVICE void fp8_to_pairs(u32 codes, u32 &low, u32 &high);
template <> DEVICE void fp8_to_pairs<bf16>(u32 codes, u32 &low, u32 &high) {
    u32 a = __byte_perm(codes, 0, 0x1404), b = __byte_perm(codes, 0, 0x3424);
    a = (a & 0x80008000) | ((a >> 4) & 0x07f007f0);
    b = (b & 0x80008000) | ((b >> 4) & 0x07f007f0);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(low) : "r"(a), "r"(0x7b807b80), "r"(0x80008000)); // times 2^120
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(high) : "r"(b), "r"(0x7b807b80), "r"(0x80008000));
}
template <> DEVICE void fp8_to_pairs<f16>(u32 codes, u32 &low, u32 &high) {
    u32 a = __byte_perm(codes, 0, 0x1404), b = __byte_perm(codes, 0, 0x3424);
    a = (a & 0x80008000) | ((a >> 1) & 0x3f803f80);
    b = (b & 0x80008000) | ((b >> 1) & 0x3f803f80);
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(low) : "r"(a), "r"(0x5c005c00), "r"(0x80008000)); // times 2^8
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(high) : "r"(b), "r"(0x5c005c00), "r"(0x80008000));
}

// ---- warps and blocks -------------------------------------------------------------------------------------------
DEVICE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}
DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}
// Sum over a block of at most 1024 threads; `scratch` holds 32 floats. Every thread gets it.
DEVICE float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    u32 warps = (blockDim.x + 31) >> 5;
    float total = 0.0f;
    for (u32 i = 0; i < warps; i++) total += scratch[i];
    __syncthreads();
    return total;
}

// ---- memory -----------------------------------------------------------------------------------------------------
// Host memory, which no cache of the GPU may remember from the step before.
DEVICE bytes16 load_host(const void *p) {
    bytes16 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
// Read once, so that it does not push other data out of the caches.
DEVICE bytes16 load_streaming(const void *p) {
    bytes16 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
DEVICE bytes8 load_streaming8(const void *p) {
    bytes8 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
// The residual stream is read and written by every layer: L2 keeps it, where it fits, while weights and keys stream through.
DEVICE u64 residual_policy(bool keep) {
    u64 last, normal;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return keep ? last : normal;
}
DEVICE bytes16 load_with(const void *p, u64 policy) {
    bytes16 v;
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy)
                 : "memory");
    return v;
}
DEVICE void store_with(void *p, bytes16 v, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
                 : "memory");
}
DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// 16 bytes to shared memory in the background; zeroes where `valid` is false.
DEVICE void copy_async16(void *to, const void *from, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
// The same to an address of `shared_address`, which loops need not compute again and again.
DEVICE void copy_async16_to(u32 to, const void *from, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE bytes16 load_shared16(u32 from) {
    bytes16 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
// What this thread saw or wrote before is there for whoever sees what it writes after, on the whole device.
DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Fetch a range into L2 in the background (sm_90 and later; nothing elsewhere); address and size are multiples of 16.
DEVICE void prefetch_l2_bulk(const void *p, u32 bytes) {
#if STROBE_ARCH >= 90
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}

// ---- tensor cores (sm_80 and later) -----------------------------------------------------------------------------
// Four 8x8 tiles of 16-bit elements; lane i gives the address of row i % 8 of tile i / 8.
DEVICE void load_matrix4(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}
DEVICE void load_matrix4_transposed(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}
// d[16x8] += a[16x16] . b[16x8]; lane layout as PTX's m16n8k16.
template <typename T> DEVICE void mma16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> DEVICE void mma16816<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DEVICE void mma16816<f16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- launches that overlap (sm_90 and later) --------------------------------------------------------------------
// Every kernel calls `wait_for_previous` before it reads or writes what an earlier kernel touches; weights may be read
// before. `allow_next` lets the next launch begin its own preparations.
DEVICE void wait_for_previous() {
#if STROBE_ARCH >= 90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void allow_next() {
#if STROBE_ARCH >= 90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- clusters: neighbouring blocks that share their shared memory (sm_90 and later; one block elsewhere) ---------
DEVICE u32 cluster_rank() {
    u32 rank = 0;
#if STROBE_ARCH >= 90
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
