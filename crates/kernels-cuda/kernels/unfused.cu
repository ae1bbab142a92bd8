// Attention as three kernels that pass their results through memory: the baseline that fusing is measured against.
//
// The scores of span i start at offsets[i] and are laid out [head][q_len][stride], the stride being kv_len rounded up
// to a multiple of four. Only what a row sees is written and read.

#define TILE 64
#define PAD 72 // elements of a row in shared memory: eight rows then lie in different banks

struct Unfused {
    const void *qkv, *kv;
    const SeqSpan *spans;
    const u32 *tables;
    const u64 *offsets;
    float *scores;
    void *out;
    const float *sinks; // of each query head; null: none
    u32 heads, kv_heads, head_dim, block_shift, window;
    float scale;
    u32 parts;     // 2: keys, then values; 1: the first elements of keys are the values
    u32 value_dim; // elements of a value
};

// One span and one head of it.
struct Job {
    SeqSpan span;
    u32 head, kv_head, stride;
    float *scores;

    DEVICE Job(const Unfused &a, u32 span_index, u32 head_index) {
        span = a.spans[span_index];
        head = head_index;
        kv_head = head / (a.heads / a.kv_heads);
        stride = (span.kv_len + 3) & ~3u;
        scores = a.scores + a.offsets[span_index] + (u64)head * span.q_len * stride;
    }
    DEVICE u32 position(u32 row) const { return span.kv_len - span.q_len + row; }
    // First key that a row sees; the last is at its own position.
    DEVICE u32 first_key(const Unfused &a, u32 row) const {
        u32 end = position(row) + 1;
        return a.window != 0 && end > a.window ? end - a.window : 0;
    }
    DEVICE bool sees(const Unfused &a, u32 row, u32 key) const { return key <= position(row) && key >= first_key(a, row); }
    // Where a key (0) or value (1) of this head lies in the cache, in elements.
    DEVICE u64 cache(const Unfused &a, u32 key, u32 which) const {
        u32 block = a.tables[span.table_start + (key >> a.block_shift)], token = key & ((1u << a.block_shift) - 1);
        which = a.parts == 2 ? which : 0;
        return (((((u64)block * a.parts + which) * a.kv_heads + kv_head) << a.block_shift) + token) * a.head_dim;
    }
    DEVICE u64 query(const Unfused &a, u32 row) const {
        return ((u64)(span.q_start + row) * (a.heads + 2 * a.kv_heads) + head) * a.head_dim;
    }
    DEVICE u64 out(const Unfused &a, u32 row) const { return ((u64)(span.q_start + row) * a.heads + head) * a.value_dim; }
};

// Eight elements to shared memory, as T.
template <typename T, typename KV> struct Copy8 {
    static DEVICE void to(T *shared, const KV *from, bool valid) {
        bytes8 codes = {0, 0};
        if (valid) codes = *(const bytes8 *)from;
        bytes16 v;
        u32 *words = (u32 *)&v;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 pair = (i < 2 ? codes.x : codes.y) >> (16 * (i & 1));
            fp8 a, b;
            a.bits = (u8)pair, b.bits = (u8)(pair >> 8);
            words[i] = pack2<T>(to_float(a), to_float(b));
        }
        *(bytes16 *)shared = v;
    }
};
template <typename T> struct Copy8<T, T> {
    static DEVICE void to(T *shared, const T *from, bool valid) { copy_async16(shared, from, valid); }
};

// ---- 16-bit types, on tensor cores: 128 threads, each warp 16 rows of a tile of 64 x 64 -------------------------
template <typename T> DEVICE void load_a(u32 (&a)[4], const T (&tile)[TILE][PAD], u32 step) {
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    load_matrix4(a, &tile[warp * 16 + lane % 16][step * 16 + lane / 16 * 8]);
}

// grid: tiles of keys x tiles of queries, heads, spans.
template <typename T, typename KV> DEVICE void scores_tile(const Unfused &a, u32 key_tiles) {
    __shared__ T q[TILE][PAD], k[TILE][PAD];
    __shared__ u64 places[TILE];
    allow_next();
    wait_for_previous();
    Job job(a, blockIdx.z, blockIdx.y);
    u32 q0 = blockIdx.x / key_tiles * TILE, k0 = blockIdx.x % key_tiles * TILE;
    if (q0 >= job.span.q_len || k0 >= job.span.kv_len) return;
    u32 q_rows = min(TILE, job.span.q_len - q0), keys = min(TILE, job.span.kv_len - k0);
    if (k0 > job.position(q0 + q_rows - 1) || k0 + keys <= job.first_key(a, q0)) return;
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (threadIdx.x < keys) places[threadIdx.x] = job.cache(a, k0 + threadIdx.x, 0);
    __syncthreads();
    float acc[8][4] = {};
    for (u32 d0 = 0; d0 < a.head_dim; d0 += TILE) {
#pragma unroll
        for (u32 i = threadIdx.x; i < TILE * 8; i += 128) {
            u32 row = i / 8, column = i % 8 * 8;
            bool inside = d0 + column < a.head_dim, has_q = inside && row < q_rows, has_k = inside && row < keys;
            const T *from_q = (const T *)a.qkv + (has_q ? job.query(a, q0 + row) + d0 + column : 0);
            const KV *from_k = (const KV *)a.kv + (has_k ? places[row] + d0 + column : 0);
            copy_async16(&q[row][column], from_q, has_q);
            Copy8<T, KV>::to(&k[row][column], from_k, has_k);
        }
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (u32 step = 0; step < 4; step++) {
            u32 qa[4], kb[4];
            load_a(qa, q, step);
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                load_matrix4(kb, &k[n * 16 + lane / 16 * 8 + lane % 8][step * 16 + lane / 8 % 2 * 8]);
                mma16816<T>(acc[2 * n], qa, kb[0], kb[1]);
                mma16816<T>(acc[2 * n + 1], qa, kb[2], kb[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 row = q0 + warp * 16 + lane / 4 + half * 8;
        if (row >= job.span.q_len) continue;
        float *to = job.scores + (u64)row * job.stride;
        u32 first = job.first_key(a, row), last = job.position(row);
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            // Pairs lie within the stride, so what a row does not see may be written with its neighbour.
            u32 key = k0 + n * 8 + lane % 4 * 2;
            if (key > last || key + 1 < first) continue;
            bytes8 pair;
            pair.x = __float_as_uint(acc[n][2 * half] * a.scale), pair.y = __float_as_uint(acc[n][2 * half + 1] * a.scale);
            *(bytes8 *)(to + key) = pair;
        }
    }
}

// grid: tiles of queries, heads x pieces of 64 elements of a head, spans.
template <typename T, typename KV> DEVICE void values_tile(const Unfused &a) {
    __shared__ T p[TILE][PAD], v[TILE][PAD];
    __shared__ u64 places[TILE];
    allow_next();
    wait_for_previous();
    u32 pieces = (a.value_dim + TILE - 1) / TILE;
    Job job(a, blockIdx.z, blockIdx.y / pieces);
    u32 q0 = blockIdx.x * TILE, d0 = blockIdx.y % pieces * TILE;
    if (q0 >= job.span.q_len) return;
    u32 q_rows = min(TILE, job.span.q_len - q0), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float acc[8][4] = {};
    u32 end = job.span.kv_len == 0 ? 0 : job.position(q0 + q_rows - 1) + 1;
    u32 begin = end == 0 ? 0 : job.first_key(a, q0) / TILE * TILE;
    for (u32 k0 = begin; k0 < end; k0 += TILE) {
        u32 keys = min(TILE, end - k0);
        if (threadIdx.x < keys) places[threadIdx.x] = job.cache(a, k0 + threadIdx.x, 1);
        __syncthreads();
#pragma unroll
        for (u32 i = threadIdx.x; i < TILE * 8; i += 128) {
            u32 row = i / 8, column = i % 8 * 8;
            // A key that a window hides from all rows may lie in a block that now belongs to another request.
            bool has = d0 + column < a.value_dim && row < keys && k0 + row >= job.first_key(a, q0);
            Copy8<T, KV>::to(&v[row][column], (const KV *)a.kv + (has ? places[row] + d0 + column : 0), has);
        }
        copy_async_commit();
#pragma unroll
        for (u32 i = threadIdx.x; i < TILE * 16; i += 128) {
            u32 row = i / 16, column = i % 16 * 4, key = k0 + column;
            float x[4] = {};
            if (row < q_rows && key < job.stride) {
                bytes16 raw = *(const bytes16 *)(job.scores + (u64)(q0 + row) * job.stride + key);
                u32 first = job.first_key(a, q0 + row), last = job.position(q0 + row);
                if (key >= first && key <= last) x[0] = __uint_as_float(raw.x);
                if (key + 1 >= first && key + 1 <= last) x[1] = __uint_as_float(raw.y);
                if (key + 2 >= first && key + 2 <= last) x[2] = __uint_as_float(raw.z);
                if (key + 3 >= first && key + 3 <= last) x[3] = __uint_as_float(raw.w);
            }
            bytes8 packed;
            packed.x = pack2<T>(x[0], x[1]), packed.y = pack2<T>(x[2], x[3]);
            *(bytes8 *)&p[row][column] = packed;
        }
        copy_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (u32 step = 0; step < 4; step++) {
            u32 pa[4], vb[4];
            load_a(pa, p, step);
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                load_matrix4_transposed(vb, &v[step * 16 + lane % 16][n * 16 + lane / 16 * 8]);
                mma16816<T>(acc[2 * n], pa, vb[0], vb[1]);
                mma16816<T>(acc[2 * n + 1], pa, vb[2], vb[3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 row = q0 + warp * 16 + lane / 4 + half * 8;
        if (row >= job.span.q_len) continue;
        T *to = (T *)a.out + job.out(a, row) + d0;
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            u32 column = n * 8 + lane % 4 * 2;
            if (d0 + column < a.value_dim) *(u32 *)(to + column) = pack2<T>(acc[n][2 * half], acc[n][2 * half + 1]);
        }
    }
}

// ---- f32 and heads of any size, on plain cores: 256 threads, a tile of 32 x 32, four results per thread ----------
template <typename T, typename KV> DEVICE void scores_plain(const Unfused &a, u32 key_tiles) {
    __shared__ float q[32][33], k[32][33];
    allow_next();
    wait_for_previous();
    Job job(a, blockIdx.z, blockIdx.y);
    u32 q0 = blockIdx.x / key_tiles * 32, k0 = blockIdx.x % key_tiles * 32;
    if (q0 >= job.span.q_len || k0 >= job.span.kv_len) return;
    u32 column = threadIdx.x % 32, row = threadIdx.x / 32;
    float acc[4] = {};
    for (u32 d0 = 0; d0 < a.head_dim; d0 += 32) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 r = row + 8 * i;
            bool inside = d0 + column < a.head_dim;
            bool has_q = inside && q0 + r < job.span.q_len, has_k = inside && k0 + r < job.span.kv_len;
            q[r][column] = has_q ? to_float(((const T *)a.qkv)[job.query(a, q0 + r) + d0 + column]) : 0.0f;
            k[r][column] = has_k ? to_float(((const KV *)a.kv)[job.cache(a, k0 + r, 0) + d0 + column]) : 0.0f;
        }
        __syncthreads();
        for (u32 d = 0; d < 32; d++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc[i] += q[row + 8 * i][d] * k[column][d];
        __syncthreads();
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 r = q0 + row + 8 * i, key = k0 + column;
        if (r < job.span.q_len && key < job.span.kv_len && job.sees(a, r, key))
            job.scores[(u64)r * job.stride + key] = acc[i] * a.scale;
    }
}

// grid: tiles of queries, heads x pieces of 32 elements of a head, spans.
template <typename T, typename KV> DEVICE void values_plain(const Unfused &a) {
    __shared__ float p[32][33], v[32][33];
    allow_next();
    wait_for_previous();
    u32 pieces = (a.value_dim + 31) / 32;
    Job job(a, blockIdx.z, blockIdx.y / pieces);
    u32 q0 = blockIdx.x * 32, d0 = blockIdx.y % pieces * 32;
    if (q0 >= job.span.q_len) return;
    u32 column = threadIdx.x % 32, row = threadIdx.x / 32;
    float acc[4] = {};
    for (u32 k0 = job.span.kv_len == 0 ? 0 : job.first_key(a, q0) / 32 * 32; k0 < job.span.kv_len; k0 += 32) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 r = row + 8 * i, query = q0 + r, key = k0 + column;
            bool has_p = query < job.span.q_len && key < job.span.kv_len && job.sees(a, query, key);
            bool has_v = d0 + column < a.value_dim && k0 + r < job.span.kv_len && k0 + r >= job.first_key(a, q0);
            p[r][column] = has_p ? job.scores[(u64)query * job.stride + key] : 0.0f;
            v[r][column] = has_v ? to_float(((const KV *)a.kv)[job.cache(a, k0 + r, 1) + d0 + column]) : 0.0f;
        }
        __syncthreads();
        for (u32 key = 0; key < 32; key++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc[i] += p[row + 8 * i][key] * v[key][column];
        __syncthreads();
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 r = q0 + row + 8 * i;
        if (r < job.span.q_len && d0 + column < a.value_dim)
            ((T *)a.out)[job.out(a, r) + d0 + column] = Cast<T>::from(acc[i]);
    }
}

// ---- softmax ----------------------------------------------------------------------------------------------------
// grid: queries, heads, spans; 128 threads share a row and read it twice.
KERNEL unfused_softmax_f32(Unfused a) {
    __shared__ float highest_of[4], sum_of[4];
    allow_next();
    wait_for_previous();
    Job job(a, blockIdx.z, blockIdx.y);
    u32 row = blockIdx.x;
    if (row >= job.span.q_len || job.span.kv_len == 0) return;
    u32 first = job.first_key(a, row), last = job.position(row);
    float *scores = job.scores + (u64)row * job.stride;
    float highest = -infinity(), sum = 0.0f;
    for (u32 key = first / 4 * 4 + threadIdx.x * 4; key <= last; key += 128 * 4) {
        bytes16 raw = *(const bytes16 *)(scores + key);
        float x[4] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w)};
        float top = highest;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            x[i] = key + i >= first && key + i <= last ? x[i] : -infinity();
            top = fmaxf(top, x[i]);
        }
        sum *= __expf(highest - top);
#pragma unroll
        for (u32 i = 0; i < 4; i++) sum += __expf(x[i] - top);
        highest = top;
    }
    float top = warp_max(highest);
    // A thread without a key has no maximum of its own to subtract from.
    sum = warp_sum(highest == -infinity() ? 0.0f : sum * __expf(highest - top));
    if ((threadIdx.x & 31) == 0) {
        highest_of[threadIdx.x >> 5] = top;
        sum_of[threadIdx.x >> 5] = sum;
    }
    __syncthreads();
    top = fmaxf(fmaxf(highest_of[0], highest_of[1]), fmaxf(highest_of[2], highest_of[3]));
    sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 4; i++) sum += highest_of[i] == -infinity() ? 0.0f : sum_of[i] * __expf(highest_of[i] - top);
    float inverse = 1.0f / (sum + sink_weight(a.sinks, job.head, top * LOG2_E));
    for (u32 key = first / 4 * 4 + threadIdx.x * 4; key <= last; key += 128 * 4) {
        bytes16 raw = *(const bytes16 *)(scores + key);
        raw.x = __float_as_uint(__expf(__uint_as_float(raw.x) - top) * inverse);
        raw.y = __float_as_uint(__expf(__uint_as_float(raw.y) - top) * inverse);
        raw.z = __float_as_uint(__expf(__uint_as_float(raw.z) - top) * inverse);
        raw.w = __float_as_uint(__expf(__uint_as_float(raw.w) - top) * inverse);
        *(bytes16 *)(scores + key) = raw;
    }
}

#define UNFUSED(SUFFIX, THREADS, SCORES, VALUES)                                                                          \
    KERNEL __launch_bounds__(THREADS) unfused_scores##SUFFIX(Unfused a, u32 key_tiles) { SCORES(a, key_tiles); }          \
    KERNEL __launch_bounds__(THREADS, 4) unfused_values##SUFFIX(Unfused a) { VALUES(a); }
#define COMMA ,
UNFUSED(_f32, 256, scores_plain<float COMMA float>, values_plain<float COMMA float>)
UNFUSED(_fp8_f32, 256, scores_plain<float COMMA fp8>, values_plain<float COMMA fp8>)
UNFUSED(_any_f16, 256, scores_plain<f16 COMMA f16>, values_plain<f16 COMMA f16>)
UNFUSED(_any_bf16, 256, scores_plain<bf16 COMMA bf16>, values_plain<bf16 COMMA bf16>)
UNFUSED(_f16, 128, scores_tile<f16 COMMA f16>, values_tile<f16 COMMA f16>)
UNFUSED(_fp8_f16, 128, scores_tile<f16 COMMA fp8>, values_tile<f16 COMMA fp8>)
UNFUSED(_bf16, 128, scores_tile<bf16 COMMA bf16>, values_tile<bf16 COMMA bf16>)
UNFUSED(_fp8_bf16, 128, scores_tile<bf16 COMMA fp8>, values_tile<bf16 COMMA fp8>)
