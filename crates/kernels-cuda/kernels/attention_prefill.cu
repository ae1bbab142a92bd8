// Causal attention of packed rows over the paged cache: tensor cores, online softmax, nothing but the result written.
//
// A tile is some query tokens times the query heads of one kv head, so that keys and values are read once for the whole
// group. Four warps share a tile; each has its own rows, and all walk the same keys, which are copied to shared memory
// one step ahead.

struct PrefillParams {
    const void *qkv;
    const void *kv;
    const SeqSpan *spans;
    const u32 *tiles; // pairs: span, and tile of its rows
    const u32 *block_tables;
    void *out;
    const float *sinks; // of each query head; null: none
    u64 qkv_stride; // elements
    u64 out_stride;
    u32 heads;
    u32 kv_heads;
    u32 head_dim;
    u32 block_shift; // log2 of the tokens of a cache block
    u32 window;      // 0 is none
    u32 tokens;      // of a tile
    float scale;     // of scores, times log2(e)
};

// What the tensor cores multiply: e4m3 is exact in f16.
template <typename T, typename KV> struct Product {
    typedef T type;
};
template <typename T> struct Product<T, fp8> {
    typedef f16 type;
};

// Byte offset of a 16-byte chunk in a tile of rows of `D` 16-bit elements; rows of one matrix fall into different banks.
template <int D> DEVICE u32 swizzled(u32 row, u32 chunk) { return row * (2 * D) + ((chunk ^ (row & 7)) << 4); }

template <typename T, typename KV, int D, int MATRICES, int KEYS> DEVICE void prefill(const PrefillParams &p) {
    typedef typename Product<T, KV>::type C;
    constexpr bool CONVERT = sizeof(KV) == 1;
    constexpr bool KEEP_QUERIES = D <= 64; // in registers
    constexpr int THREADS = 128;
    constexpr int ROWS = 64 * MATRICES; // of a tile; MATRICES of 16 for each warp
    constexpr int CHUNKS = D / 8;       // of 16 bytes in a row
    constexpr int TILE_BYTES = KEYS * D * 2;
    DYNAMIC_SHARED(shared);
    __shared__ u32 cache_rows[2][KEYS];
    u8 *queries = shared;                     // [ROWS][D], then the output
    u8 *tiles = shared + ROWS * D * 2;        // 16-bit cache: two of keys, then two of values
    u8 *raw = tiles + 2 * TILE_BYTES;         // e4m3: one of each, then the next two of each as they are in the cache
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    u32 tile_index = blockIdx.x / p.kv_heads, kv_head = blockIdx.x - tile_index * p.kv_heads;
    u32 group = p.heads / p.kv_heads;
    u32 reciprocal = (65536 + group - 1) / group; // exact for the rows of a tile

    wait_for_previous();
    allow_next();
    SeqSpan span = p.spans[p.tiles[2 * tile_index]];
    u32 first_token = p.tiles[2 * tile_index + 1] * p.tokens;
    if (first_token >= span.q_len) return;
    u32 tokens = min(p.tokens, span.q_len - first_token);
    T *out = (T *)p.out + (u64)(span.q_start + first_token) * p.out_stride + kv_head * group * p.head_dim;
    if (span.kv_len == 0) {
        u32 chunks = group * p.head_dim / 8;
        for (u32 i = thread; i < tokens * chunks; i += THREADS) {
            u32 token = i / chunks;
            *(bytes16 *)(out + token * p.out_stride + (i - token * chunks) * 8) = bytes16{0, 0, 0, 0};
        }
        return;
    }
    u32 first_position = span.kv_len - span.q_len + first_token;
    u32 end = first_position + tokens; // of the keys
    u32 begin = p.window != 0 && first_position + 1 > p.window ? first_position + 1 - p.window : 0;
    u32 steps = (end - begin + KEYS - 1) / KEYS;
    const u32 *table = p.block_tables + span.table_start;
    u32 row_bytes = p.head_dim * sizeof(KV);
    const u8 *keys = (const u8 *)p.kv;
    const u8 *values = keys + ((u64)p.kv_heads << p.block_shift) * row_bytes;

    // Keys beyond the end are masked, and read as the last one.
    auto cache_row = [&](u32 step) {
        u32 key = min(begin + step * KEYS + thread, end - 1);
        return ((table[key >> p.block_shift] * 2 * p.kv_heads + kv_head) << p.block_shift) +
               (key & ((1u << p.block_shift) - 1));
    };
    auto copy = [&](u32 step) {
        const u32 *rows = cache_rows[step & 1];
        constexpr int PIECES = CONVERT ? CHUNKS / 2 : CHUNKS; // of 16 bytes in a cache row
        u32 piece = thread % PIECES;
        bool valid = piece * 16 < row_bytes;
        u32 from = valid ? piece * 16 : 0;
#pragma unroll
        for (int i = 0; i < KEYS * PIECES / THREADS; i++) {
            u32 row = thread / PIECES + i * (THREADS / PIECES);
            u64 at = (u64)rows[row] * row_bytes + from;
            if constexpr (CONVERT) {
                u8 *to = raw + (step & 1) * TILE_BYTES + (row * PIECES + piece) * 16;
                copy_async16(to, keys + at, valid);
                copy_async16(to + TILE_BYTES / 2, values + at, valid);
            } else {
                u8 *to = tiles + (step & 1) * TILE_BYTES + swizzled<D>(row, piece);
                copy_async16(to, keys + at, valid);
                copy_async16(to + 2 * TILE_BYTES, values + at, valid);
            }
        }
        copy_async_commit();
    };

    if (thread < KEYS) cache_rows[0][thread] = cache_row(0);
    const T *qkv = (const T *)p.qkv + (u64)(span.q_start + first_token) * p.qkv_stride + kv_head * group * p.head_dim;
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / THREADS; i++) {
        u32 row = thread / CHUNKS + i * (THREADS / CHUNKS), chunk = thread % CHUNKS;
        u32 token = (row * reciprocal) >> 16, head = row - token * group;
        bool valid = token < tokens && chunk * 8 < p.head_dim;
        const T *from = valid ? qkv + token * p.qkv_stride + head * p.head_dim + chunk * 8 : qkv;
        u8 *to = queries + swizzled<D>(row, chunk);
        if constexpr (CONVERT) {
            bytes16 x = {0, 0, 0, 0};
            if (valid) x = *(const bytes16 *)from;
            float low, high;
            unpack2<T>(x.x, low, high);
            x.x = pack2<C>(low, high);
            unpack2<T>(x.y, low, high);
            x.y = pack2<C>(low, high);
            unpack2<T>(x.z, low, high);
            x.z = pack2<C>(low, high);
            unpack2<T>(x.w, low, high);
            x.w = pack2<C>(low, high);
            *(bytes16 *)to = x;
        } else {
            copy_async16(to, from, valid);
        }
    }
    if (thread < KEYS) cache_rows[1][thread] = cache_row(1);
    u32 next_row = thread < KEYS ? cache_row(2) : 0;
    __syncthreads();
    copy(0);

    // The last key that each of the lane's rows sees; rows that are not there follow the first token.
    u32 last_key[MATRICES][2];
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 token = ((16 * (warp * MATRICES + m) + 8 * half + (lane >> 2)) * reciprocal) >> 16;
            last_key[m][half] = first_position + (token < tokens ? token : 0);
        }
    }
    float sum[MATRICES][D / 8][4] = {};
    float maximum[MATRICES][2], total[MATRICES][2];
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
        maximum[m][0] = maximum[m][1] = -infinity();
        total[m][0] = total[m][1] = 0.0f;
    }
    u32 q[MATRICES][KEEP_QUERIES ? D / 16 : 1][4];
    auto load_queries = [&](int step, int slot) {
#pragma unroll
        for (int m = 0; m < MATRICES; m++)
            load_matrix4(q[m][slot],
                         queries + swizzled<D>(16 * (warp * MATRICES + m) + (lane & 15), 2 * step + (lane >> 4)));
    };

    for (u32 step = 0; step < steps; step++) {
        copy_async_wait<0>();
        __syncthreads();
        if (step + 1 < steps) copy(step + 1);
        if (thread < KEYS) {
            cache_rows[step & 1][thread] = next_row;
            next_row = cache_row(step + 3);
        }
        const u8 *key_tile = tiles + (CONVERT ? 0 : (step & 1) * TILE_BYTES);
        const u8 *value_tile = key_tile + (CONVERT ? 1 : 2) * TILE_BYTES;
        if constexpr (CONVERT) {
            // Keys, then values: 16 bytes of e4m3 to 32 of f16.
#pragma unroll
            for (int i = 0; i < KEYS * CHUNKS / THREADS; i++) {
                u32 piece = thread + i * THREADS;
                bytes16 codes = *(const bytes16 *)(raw + (step & 1) * TILE_BYTES + piece * 16);
                bytes16 low, high;
                low.x = fp8_pair_to_f16(codes.x & 0xffff);
                low.y = fp8_pair_to_f16(codes.x >> 16);
                low.z = fp8_pair_to_f16(codes.y & 0xffff);
                low.w = fp8_pair_to_f16(codes.y >> 16);
                high.x = fp8_pair_to_f16(codes.z & 0xffff);
                high.y = fp8_pair_to_f16(codes.z >> 16);
                high.z = fp8_pair_to_f16(codes.w & 0xffff);
                high.w = fp8_pair_to_f16(codes.w >> 16);
                u32 row = piece / (CHUNKS / 2), chunk = piece % (CHUNKS / 2) * 2; // of both tiles as one
                *(bytes16 *)(tiles + swizzled<D>(row, chunk)) = low;
                *(bytes16 *)(tiles + swizzled<D>(row, chunk + 1)) = high;
            }
            __syncthreads();
        }
        if (KEEP_QUERIES && step == 0) {
#pragma unroll
            for (int d = 0; d < D / 16; d++) load_queries(d, KEEP_QUERIES ? d : 0);
        }

        float score[MATRICES][KEYS / 8][4] = {};
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            if (!KEEP_QUERIES) load_queries(d, 0);
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) {
                u32 b[4];
                load_matrix4(b, key_tile + swizzled<D>(16 * i + (lane & 7) + (lane >> 4) * 8, 2 * d + ((lane >> 3) & 1)));
#pragma unroll
                for (int m = 0; m < MATRICES; m++) {
                    mma16816<C>(score[m][2 * i], q[m][KEEP_QUERIES ? d : 0], b[0], b[1]);
                    mma16816<C>(score[m][2 * i + 1], q[m][KEEP_QUERIES ? d : 0], b[2], b[3]);
                }
            }
        }

        u32 tile_key = begin + step * KEYS;
        bool masked = tile_key + KEYS - 1 > first_position || (p.window != 0 && tile_key + p.window < end);
        if (masked) {
            u32 window = p.window != 0 ? p.window : 0xffffffffu;
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
#pragma unroll
                for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        u32 key = tile_key + 8 * i + 2 * (lane & 3) + (j & 1), last = last_key[m][j >> 1];
                        if (key > last || last - key >= window) score[m][i][j] = -infinity();
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float highest = score[m][0][2 * half];
#pragma unroll
                for (int i = 0; i < KEYS / 8; i++)
                    highest = fmaxf(highest, fmaxf(score[m][i][2 * half], score[m][i][2 * half + 1]));
                highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 2));
                highest = fmaxf(maximum[m][half], highest * p.scale);
                // A window can hide all keys of a step from a row.
                float offset = highest == -infinity() ? 0.0f : highest;
                float shrink = exp2_fast(maximum[m][half] - offset);
                maximum[m][half] = highest;
                float added = 0.0f;
#pragma unroll
                for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
                    for (int j = 2 * half; j < 2 * half + 2; j++) {
                        score[m][i][j] = exp2_fast(score[m][i][j] * p.scale - offset);
                        added += score[m][i][j];
                    }
                }
                total[m][half] = total[m][half] * shrink + added;
#pragma unroll
                for (int i = 0; i < D / 8; i++) {
                    sum[m][i][2 * half] *= shrink;
                    sum[m][i][2 * half + 1] *= shrink;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            u32 weight[MATRICES][4];
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    weight[m][j] = pack2<C>(score[m][2 * k + (j >> 1)][2 * (j & 1)], score[m][2 * k + (j >> 1)][2 * (j & 1) + 1]);
            }
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                u32 b[4];
                load_matrix4_transposed(b, value_tile + swizzled<D>(16 * k + (lane & 15), 2 * i + (lane >> 4)));
#pragma unroll
                for (int m = 0; m < MATRICES; m++) {
                    mma16816<C>(sum[m][2 * i], weight[m], b[0], b[1]);
                    mma16816<C>(sum[m][2 * i + 1], weight[m], b[2], b[3]);
                }
            }
        }
    }

    // Each warp puts its rows where its own queries were, so that they leave as 16 bytes.
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float all = total[m][half];
            all += __shfl_xor_sync(FULL_WARP, all, 1);
            all += __shfl_xor_sync(FULL_WARP, all, 2);
            u32 row = 16 * (warp * MATRICES + m) + 8 * half + (lane >> 2);
            u32 head = row - ((row * reciprocal) >> 16) * group;
            float over = 1.0f / (all + sink_weight(p.sinks, kv_head * group + head, maximum[m][half]));
#pragma unroll
            for (int i = 0; i < D / 8; i++)
                *(u32 *)(queries + swizzled<D>(row, i) + 4 * (lane & 3)) =
                    pack2<T>(sum[m][i][2 * half] * over, sum[m][i][2 * half + 1] * over);
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * MATRICES * CHUNKS / WARP; i++) {
        u32 item = lane + i * WARP;
        u32 row = 16 * MATRICES * warp + item / CHUNKS, chunk = item % CHUNKS;
        u32 token = (row * reciprocal) >> 16, head = row - token * group;
        if (token < tokens && chunk * 8 < p.head_dim)
            *(bytes16 *)(out + token * p.out_stride + head * p.head_dim + chunk * 8) =
                *(const bytes16 *)(queries + swizzled<D>(row, chunk));
    }
}

#define PREFILL(T, KV, SUFFIX)                                                                                           \
    KERNEL __launch_bounds__(128, 2) attention_prefill_d64_##SUFFIX(PrefillParams p) { prefill<T, KV, 64, 2, 64>(p); }   \
    KERNEL __launch_bounds__(128, 2) attention_prefill_d128_##SUFFIX(PrefillParams p) { prefill<T, KV, 128, 2, 64>(p); } \
    KERNEL __launch_bounds__(128, 2) attention_prefill_d256_##SUFFIX(PrefillParams p) { prefill<T, KV, 256, 1, 32>(p); }
PREFILL(bf16, bf16, bf16)
PREFILL(f16, f16, f16)
PREFILL(bf16, fp8, bf16_fp8)
PREFILL(f16, fp8, f16_fp8)
