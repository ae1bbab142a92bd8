// Attention of spans with one row each, over the paged cache. One block works on one span, one kv head and one share
// of the span's keys; one pass over keys and values serves all query heads of the group.
//
// Keys and values go from memory straight into the registers that the tensor cores read. A dot product does not care
// in which order its terms come, so every lane loads 16 neighbouring bytes of a key and Q is laid out to match; the
// output is computed transposed, so that a lane's 16 bytes of a value are its own rows of the product. Nothing but Q
// and the sums over warps passes through shared memory.

struct DecodeParams {
    const void *qkv;
    void *kv;
    const SeqSpan *spans;
    const u32 *block_tables;
    void *out;
    const float *cosines; // null: q is rotated, and the new token is in the cache
    const float *sines;
    float *partials; // [span][kv head and chunk of its group][split][HEADS * (D + 2)]
    u32 *counters;   // [span][kv head and chunk of its group], all 0 between launches
    u64 qkv_stride;  // elements
    u64 out_stride;
    u32 heads;
    u32 kv_heads;
    u32 head_dim;
    u32 block_shift; // log2 of the tokens of a cache block
    u32 window;      // 0 is none
    u32 splits;
    u32 min_keys;    // no split gets fewer keys than about this
    float scale;     // of scores, times log2(e)
};

// What the tensor cores multiply: e4m3 is exact in f16.
template <typename T, typename KV> struct Product {
    typedef T type;
};
template <typename T> struct Product<T, fp8> {
    typedef f16 type;
};

template <typename KV, int D> struct CacheTile {
    static constexpr int KEYS = D * sizeof(KV) <= 128 ? 32 : 16;           // of one warp at a time
    static constexpr int K_PIECES = D * sizeof(KV) / 64;                  // of 16 bytes for each of 4 lanes
    static constexpr int V_BYTES = D * sizeof(KV) < 128 ? 8 : 16;         // of one piece for each of 8 lanes
    static constexpr int V_PIECES = D * sizeof(KV) / (8 * V_BYTES);
    static constexpr int V_DIMS = V_BYTES / sizeof(KV);                   // of one piece
    u32 k[KEYS / 8][4 * K_PIECES];                                        // key 8 * i + lane / 4
    u32 v[KEYS / 16][4][V_PIECES * V_BYTES / 4];                          // keys 16 * i + 2 * (lane % 4) + 0, 1, 8, 9

    static DEVICE u32 value_key(int block, int which, u32 lane) {
        return 16 * block + 2 * (lane & 3) + (which & 1) + 8 * (which >> 1);
    }
    // Where a lane's piece of a row starts. Beyond the head's width any finite numbers do: Q is zero there, and that
    // part of the output is not stored.
    static DEVICE u32 key_offset(int piece, u32 lane, u32 row_bytes) {
        u32 offset = (4 * piece + (lane & 3)) * 16;
        return offset < row_bytes ? offset : 0;
    }
    static DEVICE u32 value_offset(int piece, u32 lane, u32 row_bytes) {
        u32 offset = (8 * piece + (lane >> 2)) * V_BYTES;
        return offset < row_bytes ? offset : 0;
    }

    // `row` is the cache row of key `lane % KEYS` of the tile.
    DEVICE void load_keys(const u8 *cache, u32 row, u32 row_bytes, u32 lane) {
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            const u8 *from = cache + (u64)__shfl_sync(FULL_WARP, row, 8 * i + (lane >> 2)) * row_bytes;
#pragma unroll
            for (int piece = 0; piece < K_PIECES; piece++)
                put(&k[i][4 * piece], load_streaming(from + key_offset(piece, lane, row_bytes)));
        }
    }
    DEVICE void load_values(const u8 *cache, u32 row, u32 row_bytes, u32 lane) {
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
#pragma unroll
            for (int which = 0; which < 4; which++) {
                const u8 *from = cache + (u64)__shfl_sync(FULL_WARP, row, value_key(i, which, lane)) * row_bytes;
#pragma unroll
                for (int piece = 0; piece < V_PIECES; piece++) {
                    const u8 *at = from + value_offset(piece, lane, row_bytes);
                    if constexpr (V_BYTES == 16) {
                        put(&v[i][which][4 * piece], load_streaming(at));
                    } else {
                        put(&v[i][which][2 * piece], load_streaming8(at));
                    }
                }
            }
        }
    }
    // Keys from `first` of the tile on are the new token's, which is in shared memory only; those behind it are masked
    // and need finite values.
    DEVICE void patch_keys(const u8 *fresh, u32 first, u32 row_bytes, u32 lane) {
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            if (8 * i + (lane >> 2) >= first) {
#pragma unroll
                for (int piece = 0; piece < K_PIECES; piece++)
                    put(&k[i][4 * piece], *(const bytes16 *)(fresh + key_offset(piece, lane, row_bytes)));
            }
        }
    }
    DEVICE void patch_values(const u8 *fresh, u32 first, u32 row_bytes, u32 lane) {
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
#pragma unroll
            for (int which = 0; which < 4; which++) {
                if (value_key(i, which, lane) >= first) {
#pragma unroll
                    for (int piece = 0; piece < V_PIECES; piece++) {
                        const u8 *at = fresh + value_offset(piece, lane, row_bytes);
                        if constexpr (V_BYTES == 16) {
                            put(&v[i][which][4 * piece], *(const bytes16 *)at);
                        } else {
                            put(&v[i][which][2 * piece], *(const bytes8 *)at);
                        }
                    }
                }
            }
        }
    }

    // The second operand of Q . K^T: 16 dimensions of 8 keys.
    DEVICE void key_operand(int i, int step, u32 &b0, u32 &b1) const {
        if constexpr (sizeof(KV) == 1) {
            b0 = fp8_pair_to_f16(k[i][step] & 0xffff);
            b1 = fp8_pair_to_f16(k[i][step] >> 16);
        } else {
            b0 = k[i][2 * step];
            b1 = k[i][2 * step + 1];
        }
    }
    // The first operand of V^T . P^T: 16 keys of the lane's dimensions 2 * tile and 2 * tile + 1.
    DEVICE void value_operand(int i, int tile, u32 (&a)[4]) const {
        if constexpr (sizeof(KV) == 1) {
            u32 select = tile & 1 ? 0x7362 : 0x5140;
            u32 low = __byte_perm(v[i][0][tile / 2], v[i][1][tile / 2], select);
            u32 high = __byte_perm(v[i][2][tile / 2], v[i][3][tile / 2], select);
            a[0] = fp8_pair_to_f16(low & 0xffff);
            a[1] = fp8_pair_to_f16(low >> 16);
            a[2] = fp8_pair_to_f16(high & 0xffff);
            a[3] = fp8_pair_to_f16(high >> 16);
        } else {
            a[0] = __byte_perm(v[i][0][tile], v[i][1][tile], 0x5410);
            a[1] = __byte_perm(v[i][0][tile], v[i][1][tile], 0x7632);
            a[2] = __byte_perm(v[i][2][tile], v[i][3][tile], 0x5410);
            a[3] = __byte_perm(v[i][2][tile], v[i][3][tile], 0x7632);
        }
    }
    // The dimension that row lane / 4 of `tile` is; the next one is row lane / 4 + 8.
    static DEVICE u32 dimension(int tile, u32 lane) {
        return (8 * (2 * tile / V_DIMS) + (lane >> 2)) * V_DIMS + 2 * tile % V_DIMS;
    }

    static DEVICE void put(u32 *to, bytes16 from) {
        to[0] = from.x;
        to[1] = from.y;
        to[2] = from.z;
        to[3] = from.w;
    }
    static DEVICE void put(u32 *to, bytes8 from) {
        to[0] = from.x;
        to[1] = from.y;
    }
};

template <typename T> DEVICE void unpack8(bytes16 packed, float (&x)[8]) {
    unpack2<T>(packed.x, x[0], x[1]);
    unpack2<T>(packed.y, x[2], x[3]);
    unpack2<T>(packed.z, x[4], x[5]);
    unpack2<T>(packed.w, x[6], x[7]);
}
template <typename T> DEVICE bytes16 pack8(const float (&x)[8]) {
    return bytes16{pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7])};
}
DEVICE void load8(const float *from, float (&x)[8]) {
    float4 a = *(const float4 *)from, b = *(const float4 *)(from + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// Eight elements of a head, rotated where there are angles; `dim` is a multiple of 8, and so is half the head then.
template <typename T>
DEVICE bytes16 load_head8(const T *head, u32 dim, u32 head_dim, const float *cosines, const float *sines) {
    bytes16 own = *(const bytes16 *)(head + dim);
    if (cosines == nullptr) return own;
    u32 half = head_dim / 2;
    bool second = dim >= half;
    u32 angle = second ? dim - half : dim;
    float x[8], y[8], c[8], s[8];
    unpack8<T>(own, x);
    unpack8<T>(*(const bytes16 *)(head + (second ? angle : angle + half)), y);
    load8(cosines + angle, c);
    load8(sines + angle, s);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = x[i] * c[i] + (second ? y[i] : -y[i]) * s[i];
    return pack8<T>(x);
}

template <typename T> DEVICE void store4(T *to, const float (&x)[4]) {
    bytes8 packed;
    packed.x = pack2<T>(x[0], x[1]);
    packed.y = pack2<T>(x[2], x[3]);
    *(bytes8 *)to = packed;
}

// Bytes of dynamic shared memory are computed alike on the host (attention.rs).
template <typename T, typename KV, int D, int TILES> DEVICE void decode(const DecodeParams &p) {
    typedef typename Product<T, KV>::type C;
    typedef CacheTile<KV, D> Tile;
    constexpr int HEADS = 8 * TILES; // of one block
    constexpr int STRIDE = D + 8;    // of a head's sums, against bank conflicts
    constexpr int KEYS = Tile::KEYS;
    constexpr int PARTIAL = HEADS * (D + 2);
    DYNAMIC_SHARED(shared);
    __shared__ u32 arrived;
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, warps = blockDim.x >> 5;
    C *queries = (C *)shared;                                // [HEADS][D]
    KV *fresh = (KV *)(queries + HEADS * D);                 // [2][D], key and value of the new token
    float *maxima = (float *)(shared + HEADS * D * 2 + 4 * D); // [warps][HEADS]
    float *totals = maxima + warps * HEADS;                  // [warps][HEADS]
    float *sums = totals + warps * HEADS;                    // [warps][HEADS][STRIDE]

    u32 group = p.heads / p.kv_heads;
    u32 chunks = (group + HEADS - 1) / HEADS;
    u32 kv_head = blockIdx.x / chunks, chunk = blockIdx.x - kv_head * chunks;
    u32 first_head = kv_head * group + chunk * HEADS;
    u32 heads = min((u32)HEADS, group - chunk * HEADS);
    u32 row_bytes = p.head_dim * sizeof(KV);
    u32 split = blockIdx.y;
    bool fused = p.cosines != nullptr;

    wait_for_previous();
    allow_next();
    SeqSpan span = p.spans[blockIdx.z];
    T *out = (T *)p.out + (u64)span.q_start * p.out_stride + (u64)first_head * p.head_dim;
    u32 groups_of_4 = p.head_dim / 4;
    if (span.kv_len == 0) {
        float zeroes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (split == 0)
            for (u32 i = thread; i < heads * groups_of_4; i += blockDim.x) store4(out + 4 * i, zeroes);
        return;
    }
    u32 begin = p.window != 0 && span.kv_len > p.window ? span.kv_len - p.window : 0;
    u32 end = span.kv_len;
    u32 active = min(p.splits, (end - begin + p.min_keys - 1) / p.min_keys);
    if (active > 1) {
        u32 each = ((end - begin) / active + 16) & ~15u;
        active = (end - begin + each - 1) / each;
        if (split >= active) return;
        begin += split * each;
        end = min(end, begin + each);
    } else if (split > 0) {
        return;
    }
    u32 new_key = span.kv_len - 1;
    const u32 *table = p.block_tables + span.table_start;
    const u8 *keys = (const u8 *)p.kv;
    const u8 *values = keys + ((u64)p.kv_heads << p.block_shift) * row_bytes;
    // Keys beyond the end are masked, and read as the last one that is in the cache.
    u32 last = fused && end == span.kv_len ? (new_key > 0 ? new_key - 1 : 0) : end - 1;
    u32 slot_mask = (1u << p.block_shift) - 1;
    auto row_of = [&](u32 key) {
        return ((table[key >> p.block_shift] * 2 * p.kv_heads + kv_head) << p.block_shift) + (key & slot_mask);
    };
    auto tile_row = [&](u32 tile) { return row_of(min(begin + tile * KEYS + lane % KEYS, last)); };

    u32 tiles = (end - begin + KEYS - 1) / KEYS;
    u32 next_row = 0;
    Tile cache;
    if (warp < tiles) {
        u32 row = tile_row(warp);
        next_row = tile_row(warp + warps);
        cache.load_keys(keys, row, row_bytes, lane);
        cache.load_values(values, row, row_bytes, lane);
    }

    // While those are on their way: Q, and the new token's key and value where they are not in the cache yet.
    const T *qkv = (const T *)p.qkv + (u64)span.q_start * p.qkv_stride;
    const float *cosines = fused ? p.cosines + (u64)new_key * (p.head_dim / 2) : nullptr;
    const float *sines = fused ? p.sines + (u64)new_key * (p.head_dim / 2) : nullptr;
    for (u32 i = thread; i < HEADS * D / 8; i += blockDim.x) {
        u32 head = i / (D / 8), dim = i % (D / 8) * 8;
        bytes16 packed = {0, 0, 0, 0};
        if (head < heads && dim < p.head_dim) {
            packed = load_head8(qkv + (first_head + head) * p.head_dim, dim, p.head_dim, cosines, sines);
            if constexpr (sizeof(KV) == 1) {
                float x[8];
                unpack8<T>(packed, x);
                packed = pack8<C>(x);
            }
        }
        *(bytes16 *)(queries + head * D + dim) = packed;
    }
    if (fused && end == span.kv_len) {
        for (u32 i = thread; i < p.head_dim / 4; i += blockDim.x) {
            bool is_value = i >= p.head_dim / 8;
            u32 dim = 8 * (is_value ? i - p.head_dim / 8 : i);
            const T *head = qkv + (p.heads + (is_value ? p.kv_heads : 0) + kv_head) * p.head_dim;
            bytes16 packed = load_head8(head, dim, p.head_dim, is_value ? nullptr : cosines, sines);
            KV *to = (KV *)p.kv + (u64)(row_of(new_key) + (is_value ? p.kv_heads << p.block_shift : 0)) * p.head_dim + dim;
            KV *copy = fresh + (is_value ? D : 0) + dim;
            if constexpr (sizeof(KV) == 1) {
                float x[8];
                unpack8<T>(packed, x);
                u32 codes[2] = {};
#pragma unroll
                for (int j = 0; j < 8; j++) codes[j / 4] |= (u32)Cast<fp8>::from(x[j]).bits << (j % 4 * 8);
                *(bytes8 *)copy = bytes8{codes[0], codes[1]};
                if (chunk == 0) *(bytes8 *)to = bytes8{codes[0], codes[1]};
            } else {
                *(bytes16 *)copy = packed;
                if (chunk == 0) *(bytes16 *)to = packed;
            }
        }
    }
    __syncthreads();

    u32 q[TILES][D / 8];
#pragma unroll
    for (int h = 0; h < TILES; h++) {
        constexpr int DIMS = 16 / sizeof(KV); // of a piece of a key
#pragma unroll
        for (int piece = 0; piece < D / (4 * DIMS); piece++) {
#pragma unroll
            for (int part = 0; part < DIMS / 8; part++) {
                u32 at = (8 * h + (lane >> 2)) * D + (4 * piece + (lane & 3)) * DIMS + 8 * part;
                Tile::put(&q[h][piece * DIMS / 2 + 4 * part], *(const bytes16 *)(queries + at));
            }
        }
    }

    float sum[TILES][D / 16][4] = {}; // rows: the lane's dimensions; columns: heads 2 * (lane % 4) and the next
    float maximum[TILES], total[TILES]; // of head lane / 4
#pragma unroll
    for (int h = 0; h < TILES; h++) {
        maximum[h] = -infinity();
        total[h] = 0.0f;
    }
    for (u32 tile = warp; tile < tiles; tile += warps) {
        u32 left = end - begin - tile * KEYS; // keys from this tile on
        bool more = tile + warps < tiles;
        bool patch = fused && end == span.kv_len && left <= KEYS;
        u32 row = next_row;
        next_row = tile_row(tile + 2 * warps);
        if (patch) cache.patch_keys((const u8 *)fresh, left - 1, row_bytes, lane);
        float score[KEYS / 8][4] = {};
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            u32 a[4] = {q[0][2 * step], TILES > 1 ? q[TILES - 1][2 * step] : 0, q[0][2 * step + 1],
                        TILES > 1 ? q[TILES - 1][2 * step + 1] : 0};
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
                u32 b0, b1;
                cache.key_operand(i, step, b0, b1);
                mma16816<C>(score[i], a, b0, b1);
            }
        }
        if (more) cache.load_keys(keys, row, row_bytes, lane);
        if (left < KEYS) {
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (8 * i + 2 * (lane & 3) + (j & 1) >= left) score[i][j] = -infinity();
            }
        }
        u32 weights[TILES][KEYS / 8];
#pragma unroll
        for (int h = 0; h < TILES; h++) {
            float highest = score[0][2 * h];
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) highest = fmaxf(highest, fmaxf(score[i][2 * h], score[i][2 * h + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 2));
            highest = fmaxf(maximum[h], highest * p.scale);
            float shrink = exp2_fast(maximum[h] - highest);
            maximum[h] = highest;
            total[h] *= shrink;
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
                float low = exp2_fast(score[i][2 * h] * p.scale - highest);
                float high = exp2_fast(score[i][2 * h + 1] * p.scale - highest);
                total[h] += low + high;
                weights[h][i] = pack2<C>(low, high);
            }
            float even = __shfl_sync(FULL_WARP, shrink, 8 * (lane & 3));
            float odd = __shfl_sync(FULL_WARP, shrink, 8 * (lane & 3) + 4);
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                sum[h][i][0] *= even;
                sum[h][i][1] *= odd;
                sum[h][i][2] *= even;
                sum[h][i][3] *= odd;
            }
        }
        if (patch) cache.patch_values((const u8 *)(fresh + D), left - 1, row_bytes, lane);
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                u32 a[4];
                cache.value_operand(i, d, a);
#pragma unroll
                for (int h = 0; h < TILES; h++) mma16816<C>(sum[h][d], a, weights[h][2 * i], weights[h][2 * i + 1]);
            }
        }
        if (more) cache.load_values(values, row, row_bytes, lane);
    }

    // Sums of the warps.
#pragma unroll
    for (int h = 0; h < TILES; h++) {
        total[h] += __shfl_xor_sync(FULL_WARP, total[h], 1);
        total[h] += __shfl_xor_sync(FULL_WARP, total[h], 2);
        if ((lane & 3) == 0) {
            maxima[warp * HEADS + 8 * h + lane / 4] = maximum[h];
            totals[warp * HEADS + 8 * h + lane / 4] = total[h];
        }
        if (warp < tiles) {
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                float *to = sums + (warp * HEADS + 8 * h + 2 * (lane & 3) + odd) * STRIDE;
#pragma unroll
                for (int i = 0; i < D / 16; i += 2) {
                    float4 four = {sum[h][i][odd], sum[h][i][2 + odd], sum[h][i + 1][odd], sum[h][i + 1][2 + odd]};
                    *(float4 *)(to + Tile::dimension(i, lane)) = four;
                }
            }
        }
    }
    __syncthreads();
    u32 pair = blockIdx.z * gridDim.x + blockIdx.x;
    float *partials = p.partials + (u64)pair * p.splits * PARTIAL;
    u32 busy = min(warps, tiles);
    for (u32 i = thread; i < heads * groups_of_4; i += blockDim.x) {
        u32 head = i / groups_of_4, dim = 4 * (i - head * groups_of_4);
        float highest = maxima[head];
        for (u32 w = 1; w < busy; w++) highest = fmaxf(highest, maxima[w * HEADS + head]);
        float all = 0.0f, x[4] = {};
        for (u32 w = 0; w < busy; w++) {
            float weight = exp2_fast(maxima[w * HEADS + head] - highest);
            float4 four = *(const float4 *)(sums + (w * HEADS + head) * STRIDE + dim);
            all += totals[w * HEADS + head] * weight;
            x[0] += four.x * weight;
            x[1] += four.y * weight;
            x[2] += four.z * weight;
            x[3] += four.w * weight;
        }
        if (active == 1) {
            float over = 1.0f / all;
#pragma unroll
            for (int j = 0; j < 4; j++) x[j] *= over;
            store4(out + 4 * i, x);
        } else {
            float *to = partials + split * PARTIAL;
            if (dim == 0) {
                to[HEADS * D + 2 * head] = highest;
                to[HEADS * D + 2 * head + 1] = all;
            }
            *(float4 *)(to + head * D + dim) = float4{x[0], x[1], x[2], x[3]};
        }
    }
    if (active == 1) return;

    // The block that arrives last adds the splits up, always in the same order.
    __syncthreads();
    if (thread == 0) {
        fence_device();
        arrived = atomicAdd(p.counters + pair, 1);
        if (arrived == active - 1) p.counters[pair] = 0;
        fence_device();
    }
    __syncthreads();
    if (arrived != active - 1) return;
    float *weights = sums; // [active][HEADS]; the host allows no more splits than fit
    for (u32 i = thread; i < active * heads; i += blockDim.x) {
        u32 s = i / heads, head = i - s * heads;
        weights[s * HEADS + head] = partials[s * PARTIAL + HEADS * D + 2 * head];
    }
    __syncthreads();
    if (thread < heads) {
        float highest = -infinity(), all = 0.0f;
        for (u32 s = 0; s < active; s++) highest = fmaxf(highest, weights[s * HEADS + thread]);
        for (u32 s = 0; s < active; s++) {
            float weight = exp2_fast(weights[s * HEADS + thread] - highest);
            all += partials[s * PARTIAL + HEADS * D + 2 * thread + 1] * weight;
            weights[s * HEADS + thread] = weight;
        }
        maxima[thread] = 1.0f / all;
    }
    __syncthreads();
    for (u32 i = thread; i < heads * groups_of_4; i += blockDim.x) {
        u32 head = i / groups_of_4, dim = 4 * (i - head * groups_of_4);
        float x[4] = {};
#pragma unroll 8
        for (u32 s = 0; s < active; s++) {
            float4 four = *(const float4 *)(partials + s * PARTIAL + head * D + dim);
            float weight = weights[s * HEADS + head];
            x[0] += four.x * weight;
            x[1] += four.y * weight;
            x[2] += four.z * weight;
            x[3] += four.w * weight;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] *= maxima[head];
        store4(out + 4 * i, x);
    }
}

// `wide`: groups of more than 8 query heads, 16 at a time.
#define DECODE(T, KV, SUFFIX)                                                                                            \
    KERNEL __launch_bounds__(256, 2) attention_decode_d64_##SUFFIX(DecodeParams p) { decode<T, KV, 64, 1>(p); }          \
    KERNEL __launch_bounds__(192, 2) attention_decode_d128_##SUFFIX(DecodeParams p) { decode<T, KV, 128, 1>(p); }        \
    KERNEL __launch_bounds__(128) attention_decode_d256_##SUFFIX(DecodeParams p) { decode<T, KV, 256, 1>(p); }           \
    KERNEL __launch_bounds__(128) attention_decode_d64_wide_##SUFFIX(DecodeParams p) { decode<T, KV, 64, 2>(p); }        \
    KERNEL __launch_bounds__(128) attention_decode_d128_wide_##SUFFIX(DecodeParams p) { decode<T, KV, 128, 2>(p); }
DECODE(bf16, bf16, bf16)
DECODE(f16, f16, f16)
DECODE(bf16, fp8, bf16_fp8)
DECODE(f16, fp8, f16_fp8)
