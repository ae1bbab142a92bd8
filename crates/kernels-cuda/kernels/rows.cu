// Ops that work on rows: embedding, norms, rotation with the write of keys and values, activation, quantization.
//
// Rows of a multiple of eight elements go eight at a time, one block per row, the row kept in registers: one group of
// eight per thread in the plain kernels, up to four in the `wide` ones. The `any` kernels take every other width. Norms of
// many rows have one or two warps for each: fewer blocks, more loads on their way, and no block waits for itself.

// ---- eight elements ---------------------------------------------------------------------------------------------
DEVICE bytes16 as_bytes(float a, float b, float c, float d) {
    return bytes16{__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
}
DEVICE void as_floats(bytes16 v, float *x) {
    x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
}
template <typename T> DEVICE void load8(const T *from, float (&x)[8]) {
    bytes16 v = *(const bytes16 *)from;
    unpack2<T>(v.x, x[0], x[1]);
    unpack2<T>(v.y, x[2], x[3]);
    unpack2<T>(v.z, x[4], x[5]);
    unpack2<T>(v.w, x[6], x[7]);
}
template <> DEVICE void load8<float>(const float *from, float (&x)[8]) {
    as_floats(((const bytes16 *)from)[0], x);
    as_floats(((const bytes16 *)from)[1], x + 4);
}
// Of the residual stream.
DEVICE void load8_residual(const float *from, float (&x)[8], u64 policy) {
    as_floats(load_with(from, policy), x);
    as_floats(load_with(from + 4, policy), x + 4);
}
DEVICE void store8_residual(float *to, const float (&x)[8], u64 policy) {
    store_with(to, as_bytes(x[0], x[1], x[2], x[3]), policy);
    store_with(to + 4, as_bytes(x[4], x[5], x[6], x[7]), policy);
}
template <typename T> DEVICE void store8(T *to, const float (&x)[8]) {
    bytes16 v;
    v.x = pack2<T>(x[0], x[1]), v.y = pack2<T>(x[2], x[3]), v.z = pack2<T>(x[4], x[5]), v.w = pack2<T>(x[6], x[7]);
    *(bytes16 *)to = v;
}
template <> DEVICE void store8<float>(float *to, const float (&x)[8]) {
    ((bytes16 *)to)[0] = as_bytes(x[0], x[1], x[2], x[3]);
    ((bytes16 *)to)[1] = as_bytes(x[4], x[5], x[6], x[7]);
}
template <> DEVICE void store8<fp8>(fp8 *to, const float (&x)[8]) {
    u32 word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) word[i >> 2] |= (u32)Cast<fp8>::from(x[i]).bits << (8 * (i & 3));
    bytes8 v;
    v.x = word[0], v.y = word[1];
    *(bytes8 *)to = v;
}

// ---- a row over a block -----------------------------------------------------------------------------------------
// `scratch` holds 32 floats and is used once: nothing keeps a later use from overtaking this one.
DEVICE float row_sum(float x, float *scratch) {
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    u32 lane = threadIdx.x & 31;
    return warp_sum(lane < (blockDim.x >> 5) ? scratch[lane] : 0.0f);
}
DEVICE float row_max(float x, float *scratch) {
    x = warp_max(x);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    u32 lane = threadIdx.x & 31;
    return warp_max(lane < (blockDim.x >> 5) ? scratch[lane] : 0.0f);
}

// The largest magnitude of a row becomes the largest code, 448. A row of zeroes still has a scale to divide by.
DEVICE float fp8_scale(float largest) { return fmaxf(largest * (1.0f / 448.0f), 1e-12f); }

template <typename T> struct IsFp8 {
    static const bool value = false;
};
template <> struct IsFp8<fp8> {
    static const bool value = true;
};

// Store groups of eight that the row's threads hold; as fp8 with the row's scale.
template <typename OUT, int GROUPS>
DEVICE void store_row(float (&x)[GROUPS][8], OUT *out, float *scales, u32 row, u32 width) {
    float inverse = 1.0f;
    if (IsFp8<OUT>::value) {
        __shared__ float scratch[32];
        float largest = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x[g][i]));
        float scale = fp8_scale(row_max(largest, scratch));
        if (threadIdx.x == 0) scales[row] = scale;
        inverse = 1.0f / scale;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        u32 column = (threadIdx.x + g * blockDim.x) * 8;
        if (column >= width) continue;
        if (IsFp8<OUT>::value) {
#pragma unroll
            for (int i = 0; i < 8; i++) x[g][i] *= inverse;
        }
        store8<OUT>(out + (u64)row * width + column, x[g]);
    }
}

// ---- norms ------------------------------------------------------------------------------------------------------
// A team of one or two warps for each row, up to eight groups of eight in every thread.
template <typename T, typename OUT, bool ADD, int TEAM>
DEVICE void norm_in_teams(float *hidden, const T *delta, const float *weight, float eps, OUT *out, float *scales, u32 rows,
                          u32 width, u32 keep) {
    __shared__ float scratch[2][8];
    const u32 warp = threadIdx.x / WARP, thread = threadIdx.x % (WARP * TEAM);
    const u32 row = blockIdx.x * (blockDim.x / (WARP * TEAM)) + warp / TEAM;
    auto column_of = [&](int group) { return (group * WARP * TEAM + thread) * 8; };
    auto of_team = [&](float own, float *shared) {
        if (TEAM > 1) {
            if (threadIdx.x % WARP == 0) shared[warp] = own;
            __syncthreads();
        }
        return TEAM > 1 ? shared[warp ^ 1] : 0.0f;
    };
    float x[8][8] = {}, w[8][8] = {};
    // Weights depend on no earlier kernel.
#pragma unroll
    for (int g = 0; g < 8; g++)
        if (column_of(g) < width) load8<float>(weight + column_of(g), w[g]);
    allow_next();
    wait_for_previous();
    const u64 first = (u64)row * width, policy = residual_policy(keep);
    const u32 end = row < rows ? width : 0;
#pragma unroll
    for (int g = 0; g < 8; g++)
        if (column_of(g) < end) load8_residual(hidden + first + column_of(g), x[g], policy);
    if (ADD) {
#pragma unroll
        for (int g = 0; g < 8; g++) {
            if (column_of(g) >= end) continue;
            float d[8];
            load8<T>(delta + first + column_of(g), d);
#pragma unroll
            for (int i = 0; i < 8; i++) x[g][i] += d[i];
            store8_residual(hidden + first + column_of(g), x[g], policy);
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int g = 0; g < 8; g++)
#pragma unroll
        for (int i = 0; i < 8; i++) squares += x[g][i] * x[g][i];
    squares = warp_sum(squares);
    squares += of_team(squares, scratch[0]);
    const float scale = 1.0f / sqrtf(squares / (float)width + eps);
    float largest = 0.0f;
#pragma unroll
    for (int g = 0; g < 8; g++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[g][i] *= scale * w[g][i];
            largest = fmaxf(largest, fabsf(x[g][i]));
        }
    }
    if (IsFp8<OUT>::value) {
        largest = warp_max(largest);
        const float step = fp8_scale(fmaxf(largest, of_team(largest, scratch[1])));
        if (thread == 0 && row < rows) scales[row] = step;
        const float inverse = 1.0f / step;
#pragma unroll
        for (int g = 0; g < 8; g++)
#pragma unroll
            for (int i = 0; i < 8; i++) x[g][i] *= inverse;
    }
#pragma unroll
    for (int g = 0; g < 8; g++)
        if (column_of(g) < end) store8<OUT>(out + first + column_of(g), x[g]);
}

// A block for each row, GROUPS groups of eight in every thread.
template <typename T, typename OUT, bool ADD, int GROUPS>
DEVICE void norm(float *hidden, const T *delta, const float *weight, float eps, OUT *out, float *scales, u32, u32 width, u32 keep) {
    __shared__ float scratch[32];
    u32 row = blockIdx.x;
    float x[GROUPS][8], w[8] = {};
    // Weights depend on no earlier kernel; with several groups they would not fit beside the row.
    if (GROUPS == 1 && threadIdx.x * 8 < width) load8<float>(weight + threadIdx.x * 8, w);
    allow_next();
    wait_for_previous();
    float *own = hidden + (u64)row * width;
    const u64 policy = residual_policy(keep);
    float squares = 0.0f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        u32 column = (threadIdx.x + g * blockDim.x) * 8;
        if (column < width) {
            load8_residual(own + column, x[g], policy);
            if (ADD) {
                float d[8];
                load8<T>(delta + (u64)row * width + column, d);
#pragma unroll
                for (int i = 0; i < 8; i++) x[g][i] += d[i];
                store8_residual(own + column, x[g], policy);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) x[g][i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) squares += x[g][i] * x[g][i];
    }
    float scale = 1.0f / sqrtf(row_sum(squares, scratch) / (float)width + eps);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        u32 column = (threadIdx.x + g * blockDim.x) * 8;
        if (GROUPS > 1 && column < width) load8<float>(weight + column, w);
#pragma unroll
        for (int i = 0; i < 8; i++) x[g][i] *= scale * w[i];
    }
    store_row<OUT, GROUPS>(x, out, scales, row, width);
}

template <typename T, typename OUT, bool ADD>
DEVICE void norm_any(float *hidden, const T *delta, const float *weight, float eps, OUT *out, float *scales, u32, u32 width, u32) {
    __shared__ float scratch[64];
    allow_next();
    wait_for_previous();
    u64 first = (u64)blockIdx.x * width;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float x = hidden[first + i];
        if (ADD) {
            x += to_float(delta[first + i]);
            hidden[first + i] = x;
        }
        squares += x * x;
    }
    float scale = 1.0f / sqrtf(row_sum(squares, scratch) / (float)width + eps);
    float inverse = 1.0f;
    if (IsFp8<OUT>::value) {
        float largest = 0.0f;
        for (u32 i = threadIdx.x; i < width; i += blockDim.x)
            largest = fmaxf(largest, fabsf(hidden[first + i] * (scale * weight[i])));
        float step = fp8_scale(row_max(largest, scratch + 32));
        if (threadIdx.x == 0) scales[blockIdx.x] = step;
        inverse = 1.0f / step;
    }
    for (u32 i = threadIdx.x; i < width; i += blockDim.x)
        out[first + i] = Cast<OUT>::from(hidden[first + i] * (scale * weight[i]) * inverse);
}

#define NORM(NAME, BOUNDS, T, OUT, BODY)                                                                                \
    KERNEL BOUNDS NAME(float *hidden, const T *delta, const float *weight, float eps, OUT *out, float *scales, u32 rows,\
                       u32 width, u32 keep) {                                                                           \
        BODY(hidden, delta, weight, eps, out, scales, rows, width, keep);                                               \
    }
#define NORMS_OF(NAME, SUFFIX, T, OUT, ADD)                                                                             \
    NORM(NAME##_##SUFFIX, __launch_bounds__(512), T, OUT, (norm<T, OUT, ADD, 1>))                                       \
    NORM(NAME##_in_warps_##SUFFIX, __launch_bounds__(256), T, OUT, (norm_in_teams<T, OUT, ADD, 1>))                     \
    NORM(NAME##_in_pairs_##SUFFIX, __launch_bounds__(256), T, OUT, (norm_in_teams<T, OUT, ADD, 2>))                     \
    NORM(NAME##_wide_##SUFFIX, __launch_bounds__(1024), T, OUT, (norm<T, OUT, ADD, 4>))                                 \
    NORM(NAME##_any_##SUFFIX, , T, OUT, (norm_any<T, OUT, ADD>))
#define NORMS(SUFFIX, T, NAME, OUT)                                                                                     \
    NORMS_OF(rms_norm##NAME, SUFFIX, T, OUT, false)                                                                     \
    NORMS_OF(add_rms_norm##NAME, SUFFIX, T, OUT, true)
NORMS(f32, float, , float)
NORMS(f16, f16, , f16)
NORMS(bf16, bf16, , bf16)
NORMS(f32, float, _fp8, fp8)
NORMS(f16, f16, _fp8, fp8)
NORMS(bf16, bf16, _fp8, fp8)

// ---- activation and quantization --------------------------------------------------------------------------------
DEVICE float silu(float x) { return x / (1.0f + __expf(-x)); }

// Element `i` of what a row becomes: silu(gate) * up of `[gate | up]`, or the row itself.
template <typename T, bool SILU> DEVICE void source8(const T *row, u32 width, u32 column, float (&x)[8]) {
    load8<T>(row + column, x);
    if (SILU) {
        float up[8];
        load8<T>(row + width + column, up);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = silu(x[i]) * up[i];
    }
}
template <typename T, bool SILU> DEVICE float source(const T *row, u32 width, u32 column) {
    float x = to_float(row[column]);
    return SILU ? silu(x) * to_float(row[width + column]) : x;
}

template <typename T, bool SILU, int GROUPS> DEVICE void quantize(const T *x, fp8 *out, float *scales, u32 width) {
    allow_next();
    wait_for_previous();
    const T *row = x + (u64)blockIdx.x * width * (SILU ? 2 : 1);
    float v[GROUPS][8];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        u32 column = (threadIdx.x + g * blockDim.x) * 8;
        if (column < width) {
            source8<T, SILU>(row, width, column, v[g]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) v[g][i] = 0.0f;
        }
    }
    store_row<fp8, GROUPS>(v, out, scales, blockIdx.x, width);
}

template <typename T, bool SILU> DEVICE void quantize_any(const T *x, fp8 *out, float *scales, u32 width) {
    __shared__ float scratch[32];
    allow_next();
    wait_for_previous();
    const T *row = x + (u64)blockIdx.x * width * (SILU ? 2 : 1);
    float largest = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) largest = fmaxf(largest, fabsf(source<T, SILU>(row, width, i)));
    float scale = fp8_scale(row_max(largest, scratch));
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    float inverse = 1.0f / scale;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x)
        out[(u64)blockIdx.x * width + i] = Cast<fp8>::from(source<T, SILU>(row, width, i) * inverse);
}

#define QUANTIZERS(SUFFIX, T, NAME, SILU)                                                                                 \
    KERNEL __launch_bounds__(512) NAME##_##SUFFIX(const T *x, fp8 *out, float *scales, u32 width) {                       \
        quantize<T, SILU, 1>(x, out, scales, width);                                                                      \
    }                                                                                                                     \
    KERNEL __launch_bounds__(1024) NAME##_wide_##SUFFIX(const T *x, fp8 *out, float *scales, u32 width) {                 \
        quantize<T, SILU, 4>(x, out, scales, width);                                                                      \
    }                                                                                                                     \
    KERNEL NAME##_any_##SUFFIX(const T *x, fp8 *out, float *scales, u32 width) {                                          \
        quantize_any<T, SILU>(x, out, scales, width);                                                                     \
    }
QUANTIZERS(f32, float, silu_mul_fp8, true)
QUANTIZERS(f16, f16, silu_mul_fp8, true)
QUANTIZERS(bf16, bf16, silu_mul_fp8, true)
QUANTIZERS(f32, float, quantize_rows, false)
QUANTIZERS(f16, f16, quantize_rows, false)
QUANTIZERS(bf16, bf16, quantize_rows, false)

// `parts` blocks share a row.
template <typename T> DEVICE void silu_mul(const T *gate_up, T *act, u32 inter, u32 parts) {
    allow_next();
    wait_for_previous();
    u32 row = blockIdx.x / parts, column = ((blockIdx.x % parts) * blockDim.x + threadIdx.x) * 8;
    if (column >= inter) return;
    float x[8];
    source8<T, true>(gate_up + (u64)row * inter * 2, inter, column, x);
    store8<T>(act + (u64)row * inter + column, x);
}
template <typename T> DEVICE void silu_mul_any(const T *gate_up, T *act, u32 inter, u32 parts) {
    allow_next();
    wait_for_previous();
    u32 row = blockIdx.x / parts, column = (blockIdx.x % parts) * blockDim.x + threadIdx.x;
    if (column >= inter) return;
    act[(u64)row * inter + column] = Cast<T>::from(source<T, true>(gate_up + (u64)row * inter * 2, inter, column));
}

// ---- embedding, gathering, bias ---------------------------------------------------------------------------------
// A token that an earlier step has drawn may exist on the device only: then `from_sampled` names its place.
DEVICE u32 token_of(const u32 *tokens, const int *from_sampled, const u32 *last_tokens, u32 row) {
    int place = from_sampled[row];
    return place >= 0 ? last_tokens[place] : tokens[row];
}
template <typename T>
DEVICE void embed(const u32 *tokens, const int *from_sampled, const u32 *last_tokens, const T *table, float *hidden,
                  u32 width, u32 keep) {
    allow_next();
    wait_for_previous();
    u32 row = blockIdx.x;
    const T *from = table + (u64)token_of(tokens, from_sampled, last_tokens, row) * width;
    const u64 policy = residual_policy(keep);
    for (u32 column = threadIdx.x * 8; column < width; column += blockDim.x * 8) {
        float x[8];
        load8<T>(from + column, x);
        store8_residual(hidden + (u64)row * width + column, x, policy);
    }
}
template <typename T>
DEVICE void embed_any(const u32 *tokens, const int *from_sampled, const u32 *last_tokens, const T *table, float *hidden,
                      u32 width, u32) {
    allow_next();
    wait_for_previous();
    u32 row = blockIdx.x;
    const T *from = table + (u64)token_of(tokens, from_sampled, last_tokens, row) * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) hidden[(u64)row * width + i] = to_float(from[i]);
}

template <typename T> DEVICE void gather_rows(const T *x, const u32 *index, T *out, u32 width) {
    allow_next();
    wait_for_previous();
    const T *from = x + (u64)index[blockIdx.x] * width;
    T *to = out + (u64)blockIdx.x * width;
    const u32 group = 16 / sizeof(T);
    if (width % group == 0) {
        for (u32 i = threadIdx.x; i < width / group; i += blockDim.x) ((bytes16 *)to)[i] = ((const bytes16 *)from)[i];
    } else {
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
    }
}

template <typename T> DEVICE void add_bias(T *out, const float *bias, u32 width, u32 parts) {
    allow_next();
    wait_for_previous();
    u32 row = blockIdx.x / parts, column = (blockIdx.x % parts) * blockDim.x + threadIdx.x;
    if (column >= width) return;
    T *element = out + (u64)row * width + column;
    *element = Cast<T>::from(to_float(*element) + bias[column]);
}

// ---- heads ------------------------------------------------------------------------------------------------------
// VEC elements of one head: 8, or 4 or 1 where half a head is no multiple of 8.
template <typename T, int VEC> DEVICE void load_part(const T *from, float (&x)[8]) {
    if (VEC == 8) {
        load8<T>(from, x);
    } else if (VEC == 4 && sizeof(T) == 4) {
        bytes16 v = *(const bytes16 *)from;
        x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i++) x[i] = to_float(from[i]);
    }
}
template <typename T, int VEC> DEVICE void store_part(T *to, const float (&x)[8]) {
    if (VEC == 8) {
        store8<T>(to, x);
    } else {
#pragma unroll
        for (int i = 0; i < VEC; i++) to[i] = Cast<T>::from(x[i]);
    }
}

// One warp per head of q and k; heads of up to 256 elements, a multiple of VEC.
template <typename T, int VEC>
DEVICE void qk_norm(T *qkv, const float *q_weight, const float *k_weight, float eps, u32 rows, u32 heads, u32 kv_heads,
                    u32 head_dim) {
    allow_next();
    wait_for_previous();
    u32 warp = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    u32 row = warp / (heads + kv_heads), head = warp % (heads + kv_heads);
    if (row >= rows) return;
    const float *weight = head < heads ? q_weight : k_weight;
    T *own = qkv + ((u64)row * (heads + 2 * kv_heads) + head) * head_dim;
    const int PARTS = 8 / VEC;
    float x[PARTS][8], squares = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        u32 column = (lane + part * 32) * VEC;
        if (column >= head_dim) continue;
        load_part<T, VEC>(own + column, x[part]);
#pragma unroll
        for (int i = 0; i < VEC; i++) squares += x[part][i] * x[part][i];
    }
    float scale = 1.0f / sqrtf(warp_sum(squares) / (float)head_dim + eps);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        u32 column = (lane + part * 32) * VEC;
        if (column >= head_dim) continue;
#pragma unroll
        for (int i = 0; i < VEC; i++) x[part][i] *= scale * weight[column + i];
        store_part<T, VEC>(own + column, x[part]);
    }
}

// Each thread turns VEC elements of the first half of a head against those of the second half, or copies them for a
// value head, and writes keys and values to the cache. What the cache gets is what stands in qkv, rounded once more
// when it is fp8.
template <typename T, typename KV, int VEC>
DEVICE void rope_kv_write(T *qkv, const float *cos, const float *sin, const int *positions, const int *slots, KV *kv,
                          u32 rows, u32 heads, u32 kv_heads, u32 head_dim, u32 block_shift) {
    allow_next();
    wait_for_previous();
    u32 half = head_dim / 2, parts = half / VEC, all_heads = heads + 2 * kv_heads;
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    u32 part = index % parts, head = (index / parts) % all_heads, row = index / parts / all_heads;
    if (row >= rows) return;
    T *own = qkv + ((u64)row * all_heads + head) * head_dim + part * VEC;
    float a[8], b[8];
    load_part<T, VEC>(own, a);
    load_part<T, VEC>(own + half, b);
    if (head < heads + kv_heads) {
        u64 angle = (u64)positions[row] * half + part * VEC;
        float c[8], s[8];
        load_part<float, VEC>(cos + angle, c);
        load_part<float, VEC>(sin + angle, s);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            float first = fmaf(a[i], c[i], -(b[i] * s[i])), second = fmaf(b[i], c[i], a[i] * s[i]);
            a[i] = to_float(Cast<T>::from(first));
            b[i] = to_float(Cast<T>::from(second));
        }
        store_part<T, VEC>(own, a);
        store_part<T, VEC>(own + half, b);
    }
    if (head < heads) return;
    int slot = slots[row];
    if (slot < 0) return;
    u32 is_value = head >= heads + kv_heads ? 1 : 0;
    u32 kv_head = head - heads - (is_value ? kv_heads : 0);
    u32 block = (u32)slot >> block_shift, token = (u32)slot & ((1u << block_shift) - 1);
    u64 place = (((((u64)block * 2 + is_value) * kv_heads + kv_head) << block_shift) + token) * head_dim + part * VEC;
    store_part<KV, VEC>(kv + place, a);
    store_part<KV, VEC>(kv + place + half, b);
}

#define ROPE(SUFFIX, T, NAME, KV, VEC)                                                                                    \
    KERNEL rope_kv_write##NAME##_##SUFFIX(T *qkv, const float *cos, const float *sin, const int *positions,               \
                                          const int *slots, KV *kv, u32 rows, u32 heads, u32 kv_heads, u32 head_dim,      \
                                          u32 block_shift) {                                                              \
        rope_kv_write<T, KV, VEC>(qkv, cos, sin, positions, slots, kv, rows, heads, kv_heads, head_dim, block_shift);     \
    }
#define ROW_OPS(SUFFIX, T)                                                                                                \
    KERNEL silu_mul_##SUFFIX(const T *gate_up, T *act, u32 inter, u32 parts) { silu_mul<T>(gate_up, act, inter, parts); } \
    KERNEL silu_mul_any_##SUFFIX(const T *gate_up, T *act, u32 inter, u32 parts) {                                        \
        silu_mul_any<T>(gate_up, act, inter, parts);                                                                      \
    }                                                                                                                     \
    KERNEL embed_##SUFFIX(const u32 *tokens, const int *from_sampled, const u32 *last_tokens, const T *table,             \
                          float *hidden, u32 width, u32 keep) {                                                           \
        embed<T>(tokens, from_sampled, last_tokens, table, hidden, width, keep);                                          \
    }                                                                                                                     \
    KERNEL embed_any_##SUFFIX(const u32 *tokens, const int *from_sampled, const u32 *last_tokens, const T *table,         \
                              float *hidden, u32 width, u32 keep) {                                                       \
        embed_any<T>(tokens, from_sampled, last_tokens, table, hidden, width, keep);                                      \
    }                                                                                                                     \
    KERNEL gather_rows_##SUFFIX(const T *x, const u32 *index, T *out, u32 width) { gather_rows<T>(x, index, out, width); } \
    KERNEL add_bias_##SUFFIX(T *out, const float *bias, u32 width, u32 parts) { add_bias<T>(out, bias, width, parts); }   \
    KERNEL qk_norm_##SUFFIX(T *qkv, const float *q_weight, const float *k_weight, float eps, u32 rows, u32 heads,         \
                            u32 kv_heads, u32 head_dim) {                                                                 \
        qk_norm<T, 4>(qkv, q_weight, k_weight, eps, rows, heads, kv_heads, head_dim);                                     \
    }                                                                                                                     \
    KERNEL qk_norm_any_##SUFFIX(T *qkv, const float *q_weight, const float *k_weight, float eps, u32 rows, u32 heads,     \
                                u32 kv_heads, u32 head_dim) {                                                             \
        qk_norm<T, 1>(qkv, q_weight, k_weight, eps, rows, heads, kv_heads, head_dim);                                     \
    }                                                                                                                     \
    ROPE(SUFFIX, T, , T, 8)                                                                                               \
    ROPE(SUFFIX, T, _odd, T, 4)                                                                                           \
    ROPE(SUFFIX, T, _any, T, 1)                                                                                           \
    ROPE(SUFFIX, T, _fp8, fp8, 8)                                                                                         \
    ROPE(SUFFIX, T, _fp8_odd, fp8, 4)                                                                                     \
    ROPE(SUFFIX, T, _fp8_any, fp8, 1)
// Inputs of a step out of page-locked host memory, 16 bytes per thread. They come while the launch before this one still
// runs. Whatever follows may read them before it waits for anything, so nothing begins before this is done.
KERNEL copy_inputs(const bytes16 *from, bytes16 *to, u32 count) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    bytes16 value = {0, 0, 0, 0};
    if (i < count) value = load_host(from + i);
    wait_for_previous();
    if (i < count) to[i] = value;
}

ROW_OPS(f32, float)
ROW_OPS(f16, f16)
ROW_OPS(bf16, bf16)
