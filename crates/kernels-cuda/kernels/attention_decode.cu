// Attention of spans with one row each, over the paged cache. One block works on one span, one kv head and one share
// of the span's keys; one pass over keys and values serves all query heads of the group.
//
// Keys and values go from memory straight into the registers that the tensor cores read. A dot product does not care
// in which order its terms come, so every lane loads 16 neighbouring bytes of a key and Q is laid out to match; the
// output is computed transposed, so that a lane's 16 bytes of a value are its own rows of the product. Nothing but the
// sums over warps passes through shared memory.
//
// All keys but the newest are from earlier steps, so they are on their way before the kernel that computes Q has ended.
// The newest one joins at the end.

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
    const float *sinks; // of each query head; null: none
    u8 *spent[2];    // `spent_lines` lines of 128 bytes each that nobody reads any more
    u64 qkv_stride;  // elements
    u64 out_stride;
    u32 heads;
    u32 kv_heads;
    u32 group;  // query heads of a kv head
    u32 chunks; // blocks that share a group
    u32 head_dim;
    u32 block_shift; // log2 of the tokens of a cache block
    u32 window;      // 0 is none
    u32 splits;
    u32 min_keys;    // no split gets fewer keys than about this
    float scale;     // of scores, times log2(e)
    u32 spent_lines[2]; // 0 where the launch before may still run
};

// What earlier kernels left behind in L2 would be written to memory as the cache streams through, though nobody reads it.
DEVICE void drop_spent(u8 *spent, u32 lines) {
    u32 blocks = gridDim.x * gridDim.y * gridDim.z, each = (lines + blocks - 1) / blocks;
    u32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x, end = min(lines, (block + 1) * each);
    for (u32 line = block * each + threadIdx.x; line < end; line += blockDim.x)
        asm volatile("discard.global.L2 [%0], 128;" ::"l"(spent + (u64)line * 128) : "memory");
}

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
    // The second operand of Q . K^T: 16 dimensions of 8 keys, of which the lane has `key`.
    static DEVICE void key_operand(const u32 (&key)[4 * K_PIECES], int step, u32 &b0, u32 &b1) {
        if constexpr (sizeof(KV) == 1) {
            b0 = fp8_pair_to_f16(key[step] & 0xffff);
            b1 = fp8_pair_to_f16(key[step] >> 16);
        } else {
            b0 = key[2 * step];
            b1 = key[2 * step + 1];
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

template <typename T> DEVICE void load4(const T *from, float (&x)[4]) {
    bytes8 packed = *(const bytes8 *)from;
    unpack2<T>(packed.x, x[0], x[1]);
    unpack2<T>(packed.y, x[2], x[3]);
}

// The lane's pieces of a head, rotated where there are angles; zeroes beyond the head's width. The lane has dimensions
// (4 * piece + lane % 4) * DIMS and the next ones. Half a head with angles is a multiple of 8.
template <typename T, int D, int DIMS>
DEVICE void load_pieces(const T *head, u32 head_dim, const float *cosines, const float *sines, u32 lane, u32 (&to)[D / 8]) {
    if (cosines == nullptr) {
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            u32 dim = (4 * (4 * i / DIMS) + (lane & 3)) * DIMS + 4 * i % DIMS;
            bytes8 packed = {0, 0};
            if (dim < head_dim) packed = *(const bytes8 *)(head + dim);
            to[2 * i] = packed.x;
            to[2 * i + 1] = packed.y;
        }
        return;
    }
    // A few elements at a time: registers are scarce while keys and values are on their way.
    if constexpr (DIMS == 8) {
        if (head_dim == D) {
            // Both halves of what is rotated are the lane's own.
#pragma unroll
            for (int i = 0; i < D / 32; i++) {
                u32 dim = (4 * (i / 2) + (lane & 3)) * 8 + 4 * (i & 1);
                float x[4], y[4];
                load4(head + dim, x);
                load4(head + D / 2 + dim, y);
                float4 c = *(const float4 *)(cosines + dim), s = *(const float4 *)(sines + dim);
                to[2 * i] = pack2<T>(x[0] * c.x - y[0] * s.x, x[1] * c.y - y[1] * s.y);
                to[2 * i + 1] = pack2<T>(x[2] * c.z - y[2] * s.z, x[3] * c.w - y[3] * s.w);
                to[D / 16 + 2 * i] = pack2<T>(y[0] * c.x + x[0] * s.x, y[1] * c.y + x[1] * s.y);
                to[D / 16 + 2 * i + 1] = pack2<T>(y[2] * c.z + x[2] * s.z, y[3] * c.w + x[3] * s.w);
            }
            return;
        }
    }
    u32 half = head_dim / 2;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        u32 dim = (4 * (4 * i / DIMS) + (lane & 3)) * DIMS + 4 * i % DIMS;
        bool inside = dim < head_dim, second = inside && dim >= half;
        u32 angle = inside ? (second ? dim - half : dim) : 0;
        float x[4], y[4];
        load4(head + (second ? dim : angle), x);
        load4(head + (second ? angle : angle + half), y);
        float4 c = *(const float4 *)(cosines + angle), s = *(const float4 *)(sines + angle);
        float sign = second ? 1.0f : -1.0f;
        u32 low = pack2<T>(x[0] * c.x + sign * y[0] * s.x, x[1] * c.y + sign * y[1] * s.y);
        u32 high = pack2<T>(x[2] * c.z + sign * y[2] * s.z, x[3] * c.w + sign * y[3] * s.w);
        to[2 * i] = inside ? low : 0;
        to[2 * i + 1] = inside ? high : 0;
    }
}

// Four codes of four elements.
template <typename T> DEVICE u32 to_codes(u32 low, u32 high) {
    float x[4];
    unpack2<T>(low, x[0], x[1]);
    unpack2<T>(high, x[2], x[3]);
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) codes |= (u32)Cast<fp8>::from(x[i]).bits << (8 * i);
    return codes;
}

template <bool YES> struct Choice {
    static constexpr bool yes = YES;
};

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
    float *maxima = (float *)shared;          // [warps][HEADS]
    float *totals = maxima + warps * HEADS;   // [warps][HEADS]
    float *sums = totals + warps * HEADS;     // [warps][HEADS][STRIDE]
    u8 *fresh = (u8 *)(sums + warps * HEADS * STRIDE); // [4][2 * D]: the new key, its value, cosines and sines

    for (int i = 0; i < 2; i++)
        if (p.spent_lines[i] > 0) drop_spent(p.spent[i], p.spent_lines[i]);
    SeqSpan span = p.spans[blockIdx.y];
    u32 kv_head = blockIdx.x, chunk = 0;
    if (p.chunks > 1) {
        kv_head = blockIdx.x / p.chunks;
        chunk = blockIdx.x - kv_head * p.chunks;
    }
    u32 first_head = kv_head * p.group + chunk * HEADS;
    u32 heads = min((u32)HEADS, p.group - chunk * HEADS);
    u32 row_bytes = p.head_dim * sizeof(KV);
    u32 split = blockIdx.z;
    bool fused = p.cosines != nullptr;
    T *out = (T *)p.out + (u64)span.q_start * p.out_stride + (u64)first_head * p.head_dim;
    u32 groups_of_4 = p.head_dim / 4;
    if (span.kv_len == 0) {
        if (split != 0) return;
        wait_for_previous();
        float zeroes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (u32 i = thread; i < heads * groups_of_4; i += blockDim.x) store4(out + 4 * i, zeroes);
        return;
    }
    // The keys of earlier steps; the new one belongs to the first warp of the first split.
    u32 new_key = span.kv_len - 1;
    u32 begin = p.window != 0 && span.kv_len > p.window ? span.kv_len - p.window : 0;
    u32 end = new_key;
    u32 active = 1;
    if (p.splits > 1 && end - begin > p.min_keys) {
        active = min(p.splits, (end - begin + p.min_keys - 1) / p.min_keys);
        u32 each = ((end - begin) / active + 16) & ~15u;
        active = (end - begin + each - 1) / each;
        if (split >= active) return;
        begin += split * each;
        end = min(end, begin + each);
    } else if (split > 0) {
        return;
    }
    const u32 *table = p.block_tables + span.table_start;
    const u8 *keys = (const u8 *)p.kv;
    u32 value_rows = p.kv_heads << p.block_shift; // from a key's row to its value's
    const u8 *values = keys + (u64)value_rows * row_bytes;
    u32 slot_mask = (1u << p.block_shift) - 1;
    auto row_of = [&](u32 key) {
        return ((table[key >> p.block_shift] * 2 * p.kv_heads + kv_head) << p.block_shift) + (key & slot_mask);
    };
    // Keys beyond the end are masked, and read as the last one. Warps without keys load some that they do not use: where
    // loads depend on a condition, the compiler makes copies and so waits for them at once.
    u32 last = end > begin ? end - 1 : new_key;
    auto tile_row = [&](u32 tile) { return row_of(min(begin + tile * KEYS + lane % KEYS, last)); };

    u32 tiles = (end - begin + KEYS - 1) / KEYS;
    u32 row = tile_row(warp), next_row = tile_row(warp + warps);
    Tile cache;
    cache.load_keys(keys, row, row_bytes, lane);
    cache.load_values(values, row, row_bytes, lane);
    allow_next();
    wait_for_previous();

    constexpr int DIMS = 16 / sizeof(KV); // of a piece of a key
    const T *qkv = (const T *)p.qkv + (u64)span.q_start * p.qkv_stride;
    const float *cosines = fused ? p.cosines + (u64)new_key * (p.head_dim / 2) : nullptr;
    const float *sines = fused ? p.sines + (u64)new_key * (p.head_dim / 2) : nullptr;
    if (split == 0 && warp == 0) {
        const u8 *from[4] = {(const u8 *)(qkv + (p.heads + kv_head) * p.head_dim),
                             (const u8 *)(qkv + (p.heads + p.kv_heads + kv_head) * p.head_dim), (const u8 *)cosines,
                             (const u8 *)sines};
        u32 bytes = 2 * p.head_dim;
        if (!fused) {
            from[0] = keys + (u64)row_of(new_key) * row_bytes;
            from[1] = from[0] + (u64)value_rows * row_bytes;
            bytes = row_bytes;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (16 * lane < bytes && (fused || i < 2)) copy_async16(fresh + 2 * D * i + 16 * lane, from[i] + 16 * lane, true);
        }
        copy_async_commit();
    }
    u32 q[TILES][D / 8];
#pragma unroll
    for (int h = 0; h < TILES; h++) {
        u32 head = 8 * h + (lane >> 2);
        // What comes of heads beyond the group is not stored.
        const T *from = qkv + (first_head + min(head, heads - 1)) * p.head_dim;
        load_pieces<T, D, DIMS>(from, p.head_dim, cosines, sines, lane, q[h]);
        if constexpr (sizeof(KV) == 1) {
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                float low, high;
                unpack2<T>(q[h][i], low, high);
                q[h][i] = pack2<C>(low, high);
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
    u32 left = end - begin - warp * KEYS; // keys from the warp's tile on
    auto attend = [&](auto last_tile) {
        float score[KEYS / 8][2 * TILES]; // of heads lane / 4 (and the eighth after it), keys 2 * (lane % 4) and the next
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            // The tensor cores take 16 rows. Where there are 8, both halves are the same heads in different dimensions:
            // each product is right in one half.
            float first[4] = {}, second[4] = {};
#pragma unroll
            for (int step = 0; step < D / 16; step += 2) {
                u32 b[4];
                Tile::key_operand(cache.k[i], step, b[0], b[1]);
                Tile::key_operand(cache.k[i], step + 1, b[2], b[3]);
                if constexpr (TILES == 1) {
                    u32 a[4] = {q[0][2 * step], q[0][2 * step + 2], q[0][2 * step + 1], q[0][2 * step + 3]};
                    mma16816<C>(first, a, b[0], b[1]);
                    mma16816<C>(second, a, b[2], b[3]);
                } else {
                    u32 a[4] = {q[0][2 * step], q[1][2 * step], q[0][2 * step + 1], q[1][2 * step + 1]};
                    u32 c[4] = {q[0][2 * step + 2], q[1][2 * step + 2], q[0][2 * step + 3], q[1][2 * step + 3]};
                    mma16816<C>(first, a, b[0], b[1]);
                    mma16816<C>(second, c, b[2], b[3]);
                }
            }
#pragma unroll
            for (int j = 0; j < 2 * TILES; j++) score[i][j] = first[j] + second[TILES == 1 ? j + 2 : j];
        }
        if (last_tile.yes && left < KEYS) {
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
                for (int j = 0; j < 2 * TILES; j++)
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
        if constexpr (!last_tile.yes) cache.load_keys(keys, row, row_bytes, lane);
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
        if constexpr (!last_tile.yes) cache.load_values(values, row, row_bytes, lane);
    };
    u32 tile = warp;
    for (; tile + warps < tiles; tile += warps) {
        row = next_row;
        next_row = tile_row(tile + 2 * warps);
        attend(Choice<false>());
        left -= warps * KEYS;
    }
    if (tile < tiles) attend(Choice<true>());


    if (split == 0 && warp == 0) {
        constexpr int V_WORDS = Tile::V_BYTES / 4;
        u32 key[4 * Tile::K_PIECES], value[Tile::V_PIECES * V_WORDS]; // as the cache has them
        copy_async_wait<0>();
        __syncwarp();
        if (fused) {
            u32 elements[D / 8];
            const float *angles = (const float *)(fresh + 4 * D);
            load_pieces<T, D, DIMS>((const T *)fresh, p.head_dim, angles, angles + D / 2, lane, elements);
#pragma unroll
            for (int i = 0; i < 4 * Tile::K_PIECES; i++) {
                if constexpr (sizeof(KV) == 1) {
                    key[i] = to_codes<T>(elements[2 * i], elements[2 * i + 1]);
                } else {
                    key[i] = elements[i];
                }
            }
#pragma unroll
            for (int piece = 0; piece < Tile::V_PIECES; piece++) {
                const T *from = (const T *)(fresh + 2 * D) + Tile::value_offset(piece, lane, row_bytes) / sizeof(KV);
                u32 four[Tile::V_DIMS / 2];
#pragma unroll
                for (int i = 0; i < Tile::V_DIMS / 8; i++) Tile::put(four + 4 * i, *(const bytes16 *)(from + 8 * i));
#pragma unroll
                for (int i = 0; i < V_WORDS; i++) {
                    if constexpr (sizeof(KV) == 1) {
                        value[piece * V_WORDS + i] = to_codes<T>(four[2 * i], four[2 * i + 1]);
                    } else {
                        value[piece * V_WORDS + i] = four[i];
                    }
                }
            }
            if (chunk == 0) {
                u8 *key_row = (u8 *)p.kv + (u64)row_of(new_key) * row_bytes;
                u8 *value_row = key_row + (u64)value_rows * row_bytes;
#pragma unroll
                for (int piece = 0; piece < Tile::K_PIECES; piece++) {
                    u32 offset = (4 * piece + (lane & 3)) * 16;
                    const u32 *k = key + 4 * piece;
                    if (lane < 4 && offset < row_bytes) *(bytes16 *)(key_row + offset) = bytes16{k[0], k[1], k[2], k[3]};
                }
#pragma unroll
                for (int piece = 0; piece < Tile::V_PIECES; piece++) {
                    u32 offset = (8 * piece + (lane >> 2)) * Tile::V_BYTES;
                    const u32 *v = value + piece * V_WORDS;
                    if ((lane & 3) == 0 && offset < row_bytes) {
                        if constexpr (V_WORDS == 4) {
                            *(bytes16 *)(value_row + offset) = bytes16{v[0], v[1], v[2], v[3]};
                        } else {
                            *(bytes8 *)(value_row + offset) = bytes8{v[0], v[1]};
                        }
                    }
                }
            }
        } else {
#pragma unroll
            for (int piece = 0; piece < Tile::K_PIECES; piece++)
                Tile::put(key + 4 * piece, *(const bytes16 *)(fresh + Tile::key_offset(piece, lane, row_bytes)));
#pragma unroll
            for (int piece = 0; piece < Tile::V_PIECES; piece++) {
                const u8 *at = fresh + 2 * D + Tile::value_offset(piece, lane, row_bytes);
                if constexpr (V_WORDS == 4) {
                    Tile::put(value + 4 * piece, *(const bytes16 *)at);
                } else {
                    Tile::put(value + 2 * piece, *(const bytes8 *)at);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < TILES; h++) {
            float score = 0.0f;
#pragma unroll
            for (int step = 0; step < D / 16; step++) {
                u32 pairs[2];
                Tile::key_operand(key, step, pairs[0], pairs[1]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float a, b, c, d;
                    unpack2<C>(q[h][2 * step + i], a, b);
                    unpack2<C>(pairs[i], c, d);
                    score += a * c + b * d;
                }
            }
            score += __shfl_xor_sync(FULL_WARP, score, 1);
            score += __shfl_xor_sync(FULL_WARP, score, 2);
            score *= p.scale;
            float highest = fmaxf(maximum[h], score);
            float shrink = exp2_fast(maximum[h] - highest), weight = exp2_fast(score - highest);
            maximum[h] = highest;
            total[h] = total[h] * shrink + ((lane & 3) == 0 ? weight : 0.0f); // four lanes are added up below
            float shrinks[2], weights[2];
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                shrinks[odd] = __shfl_sync(FULL_WARP, shrink, 8 * (lane & 3) + 4 * odd);
                weights[odd] = __shfl_sync(FULL_WARP, weight, 8 * (lane & 3) + 4 * odd);
            }
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                u32 pair;
                if constexpr (sizeof(KV) == 1) {
                    pair = fp8_pair_to_f16(i & 1 ? value[i / 2] >> 16 : value[i / 2] & 0xffff);
                } else {
                    pair = value[i];
                }
                float x[2];
                unpack2<C>(pair, x[0], x[1]);
#pragma unroll
                for (int j = 0; j < 4; j++) sum[h][i][j] = sum[h][i][j] * shrinks[j & 1] + x[j >> 1] * weights[j & 1];
            }
        }
    }

    // Sums of the warps.
    u32 busy = max(1u, min(warps, tiles));
#pragma unroll
    for (int h = 0; h < TILES; h++) {
        total[h] += __shfl_xor_sync(FULL_WARP, total[h], 1);
        total[h] += __shfl_xor_sync(FULL_WARP, total[h], 2);
        if ((lane & 3) == 0) {
            maxima[warp * HEADS + 8 * h + lane / 4] = maximum[h];
            totals[warp * HEADS + 8 * h + lane / 4] = total[h];
        }
        if (warp < busy) {
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
    u32 pair = blockIdx.y * gridDim.x + blockIdx.x;
    float *partials = p.partials + (u64)pair * p.splits * PARTIAL;
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
            float over = 1.0f / (all + sink_weight(p.sinks, first_head + head, highest));
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
    float *weights = sums; // [HEADS][WARP]: the host allows no more splits than a warp has lanes
    for (u32 head = warp; head < heads; head += warps) {
        float highest = -infinity(), all = 0.0f;
        if (lane < active) {
            float2 two = *(const float2 *)(partials + lane * PARTIAL + HEADS * D + 2 * head);
            highest = two.x;
            all = two.y;
        }
        float top = warp_max(highest), weight = exp2_fast(highest - top);
        weights[head * WARP + lane] = weight / (warp_sum(all * weight) + sink_weight(p.sinks, first_head + head, top));
    }
    __syncthreads();
    for (u32 i = thread; i < heads * groups_of_4; i += blockDim.x) {
        u32 head = i / groups_of_4, dim = 4 * (i - head * groups_of_4);
        float x[4] = {};
        // Many at once, so that they come in the time of one; weights beyond the last are zero.
        for (u32 first = 0; first < active; first += 16) {
#pragma unroll
            for (u32 j = 0; j < 16; j++) {
                float4 four = *(const float4 *)(partials + min(first + j, active - 1) * PARTIAL + head * D + dim);
                float weight = weights[head * WARP + first + j];
                x[0] += four.x * weight;
                x[1] += four.y * weight;
                x[2] += four.z * weight;
                x[3] += four.w * weight;
            }
        }
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
