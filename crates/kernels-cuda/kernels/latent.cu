// Multi-head latent attention: one cache row of `latent + rotated` elements for each token, which all query heads share.
// Its first `latent` elements are the value, too. Queries are brought into that space head by head before, and what
// attention gives is brought back after.

// ---- rows -------------------------------------------------------------------------------------------------------
// out = norm of x, one block for each row.
template <typename T> DEVICE void norm_row(const T *x, const float *weight, T *out, u32 width, float eps) {
    __shared__ float scratch[32];
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        float value = to_float(x[i]);
        squares += value * value;
    }
    float factor = rsqrtf(block_sum(squares, scratch) / (float)width + eps);
    if (out == nullptr) return;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = Cast<T>::from(to_float(x[i]) * factor * weight[i]);
}

struct LatentKeysParams {
    const void *kv_latent;  // [row][latent + rotated]: before the norm
    const float *norm;      // [latent]
    const void *queries;    // [row][head][nope + rotated], as they are projected
    void *q;                // [row][head][latent + rotated]: the rotated part is written
    const float *cosines;   // [position][angle_stride]
    const float *sines;
    const u32 *positions;
    const u32 *slots; // 0xffffffff: a row that is written nowhere
    void *kv;
    u64 q_stride; // elements
    u32 heads;
    u32 latent;
    u32 nope;
    u32 rotated;
    u32 angle_stride;
    u32 interleaved; // pairs lie side by side in the projections
    float eps;
};

// Norm and rotation of the token's cache row, and rotation of its queries. Rotated pairs come out half their width apart.
template <typename T> DEVICE void latent_rope_kv_write(const LatentKeysParams &p) {
    wait_for_previous();
    allow_next();
    u32 row = blockIdx.x, pairs = p.rotated / 2, width = p.latent + p.rotated;
    const T *from = (const T *)p.kv_latent + (u64)row * width;
    u32 slot = p.slots[row];
    T *to = slot == 0xffffffffu ? nullptr : (T *)p.kv + (u64)slot * width;
    norm_row<T>(from, p.norm, to, p.latent, p.eps);
    u64 angles = (u64)p.positions[row] * p.angle_stride;
    const float *cosines = p.cosines + angles, *sines = p.sines + angles;
    u32 first = p.interleaved ? 2 : 1, second = p.interleaved ? 1 : pairs;
    auto rotate = [&](const T *x, T *y, u32 i) {
        float a = to_float(x[i * first]), b = to_float(x[i * first + second]);
        y[i] = Cast<T>::from(a * cosines[i] - b * sines[i]);
        y[i + pairs] = Cast<T>::from(b * cosines[i] + a * sines[i]);
    };
    if (to != nullptr)
        for (u32 i = threadIdx.x; i < pairs; i += blockDim.x) rotate(from + p.latent, to + p.latent, i);
    const T *queries = (const T *)p.queries + (u64)row * p.heads * (p.nope + p.rotated) + p.nope;
    T *q = (T *)p.q + (u64)row * p.q_stride + p.latent;
    for (u32 i = threadIdx.x; i < p.heads * pairs; i += blockDim.x) {
        u32 head = i / pairs;
        rotate(queries + head * (p.nope + p.rotated), q + head * width, i - head * pairs);
    }
}

// ---- products of each head --------------------------------------------------------------------------------------
// out[row][head] = x[row][head] . w[head]^T; grid: tiles of 64 columns, heads, tiles of rows.
struct LatentProductParams {
    const void *x;
    const void *w; // [head][n][k]
    void *out;
    u64 x_stride; // of rows, in elements
    u64 out_stride;
    u32 x_head; // from one head to the next
    u32 out_head;
    u32 rows;
    u32 n;
    u32 k;
};

// Tensor cores, four warps of 16 rows. k is a multiple of 8, n of 2.
template <typename T> DEVICE void latent_gemm(const LatentProductParams &p) {
    constexpr int TILE = 64, PAD = 72;
    __shared__ __align__(16) T x[2][TILE][PAD], w[2][TILE][PAD];
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    u32 n0 = blockIdx.x * TILE, head = blockIdx.y, m0 = blockIdx.z * TILE;
    const T *weights = (const T *)p.w + (u64)head * p.n * p.k;
    const T *inputs = (const T *)p.x + (u64)m0 * p.x_stride + head * p.x_head;
    u32 rows = min((u32)TILE, p.rows - m0), columns = min((u32)TILE, p.n - n0);
    auto copy_weights = [&](u32 k0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 item = thread + 128 * i, row = item / 8, column = item % 8 * 8;
            bool has = row < columns && k0 + column < p.k;
            copy_async16(&w[k0 / TILE & 1][row][column], weights + (has ? (u64)(n0 + row) * p.k + k0 + column : 0), has);
        }
    };
    auto copy_inputs = [&](u32 k0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 item = thread + 128 * i, row = item / 8, column = item % 8 * 8;
            bool has = row < rows && k0 + column < p.k;
            copy_async16(&x[k0 / TILE & 1][row][column], inputs + (has ? row * p.x_stride + k0 + column : 0), has);
        }
        copy_async_commit();
    };
    copy_weights(0);
    wait_for_previous();
    allow_next();
    copy_inputs(0);
    float acc[8][4] = {};
    for (u32 k0 = 0; k0 < p.k; k0 += TILE) {
        copy_async_wait<0>();
        __syncthreads();
        if (k0 + TILE < p.k) {
            copy_weights(k0 + TILE);
            copy_inputs(k0 + TILE);
        }
        u32 stage = k0 / TILE & 1;
        if (16 * warp < rows) {
#pragma unroll
            for (int step = 0; step < 4; step++) {
                u32 a[4], b[4];
                load_matrix4(a, &x[stage][16 * warp + lane % 16][16 * step + lane / 16 * 8]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    load_matrix4(b, &w[stage][16 * i + lane / 16 * 8 + lane % 8][16 * step + lane / 8 % 2 * 8]);
                    mma16816<T>(acc[2 * i], a, b[0], b[1]);
                    mma16816<T>(acc[2 * i + 1], a, b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 row = 16 * warp + 8 * half + lane / 4;
        if (row >= rows) continue;
        T *to = (T *)p.out + (u64)(m0 + row) * p.out_stride + head * p.out_head + n0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 column = 8 * i + lane % 4 * 2;
            if (column < columns) *(u32 *)(to + column) = pack2<T>(acc[i][2 * half], acc[i][2 * half + 1]);
        }
    }
}

// Any sizes, without tensor cores: 256 threads, tiles of 32 x 32; grid as above with tiles of 32.
template <typename T> DEVICE void latent_gemm_any(const LatentProductParams &p) {
    __shared__ float x[32][33], w[32][33];
    wait_for_previous();
    allow_next();
    u32 column = threadIdx.x % 32, row = threadIdx.x / 32;
    u32 n0 = blockIdx.x * 32, head = blockIdx.y, m0 = blockIdx.z * 32;
    const T *weights = (const T *)p.w + (u64)head * p.n * p.k;
    const T *inputs = (const T *)p.x + head * p.x_head;
    float acc[4] = {};
    for (u32 k0 = 0; k0 < p.k; k0 += 32) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 r = row + 8 * i, k = k0 + column;
            x[r][column] = m0 + r < p.rows && k < p.k ? to_float(inputs[(u64)(m0 + r) * p.x_stride + k]) : 0.0f;
            w[r][column] = n0 + r < p.n && k < p.k ? to_float(weights[(u64)(n0 + r) * p.k + k]) : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < 32; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[i] += x[row + 8 * i][k] * w[column][k];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 r = m0 + row + 8 * i;
        if (r < p.rows && n0 + column < p.n)
            ((T *)p.out)[(u64)r * p.out_stride + head * p.out_head + n0 + column] = Cast<T>::from(acc[i]);
    }
}

// ---- attention --------------------------------------------------------------------------------------------------
struct LatentParams {
    const void *q;  // [row][head][latent + rotated]
    const void *kv; // [block][token][latent + rotated]
    const SeqSpan *spans;
    const u32 *tiles; // pairs: span, and tile of its tokens; null: one tile for each span
    const u32 *block_tables;
    void *out;       // [row][head][latent]
    float *partials; // [tile and chunk][split][ROWS * (LATENT + 2)]
    u64 q_stride;    // elements
    u64 out_stride;
    u32 heads;
    u32 latent;
    u32 rotated;
    u32 block_shift; // log2 of the tokens of a cache block
    u32 tokens;      // of a tile
    u32 chunks;      // blocks that share the heads of a token
    u32 splits;
    u32 min_keys; // no split gets fewer keys than about this
    float scale;  // of scores, times log2(e)
};

// Rows of a block: some tokens times all heads, or one token times some of its heads.
struct LatentTile {
    SeqSpan span;
    u32 first_token, tokens, first_head, heads, first_position, end; // keys up to `end`

    DEVICE LatentTile(const LatentParams &p, u32 tile, u32 chunk, u32 most_rows) {
        span = p.spans[p.tiles != nullptr ? p.tiles[2 * tile] : tile];
        first_token = p.tiles != nullptr ? p.tiles[2 * tile + 1] * p.tokens : 0;
        tokens = first_token < span.q_len ? min(p.tokens, span.q_len - first_token) : 0;
        first_head = chunk * most_rows;
        heads = min(most_rows, p.heads - first_head);
        first_position = span.kv_len == 0 ? 0 : span.kv_len - span.q_len + first_token;
        end = span.kv_len == 0 ? 0 : first_position + tokens;
    }
    DEVICE u32 rows() const { return tokens * heads; }
    DEVICE u32 token(u32 row) const { return row / heads; }
    DEVICE u64 offset(u32 row, u64 stride, u32 width) const {
        u32 token = row / heads;
        return (u64)(span.q_start + first_token + token) * stride + (u64)(first_head + row - token * heads) * width;
    }
};

// How many splits of `keys` keys have any, and how many keys each has.
DEVICE u32 active_splits(u32 keys, u32 splits, u32 min_keys, u32 &each) {
    each = keys;
    if (splits <= 1 || keys <= min_keys) return 1;
    u32 active = min(splits, (keys + min_keys - 1) / min_keys);
    each = (keys / active + 32) & ~31u;
    return (keys + each - 1) / each;
}

// A row of shared memory has 512 elements of the latent vector and 64 that are rotated, in chunks of 16 bytes; rows of one
// matrix fall into different banks.
#define LATENT 512
#define ROTATED 64
#define ROW_CHUNKS ((LATENT + ROTATED) / 8)
DEVICE u32 swizzled(u32 row, u32 chunk) { return row * (ROW_CHUNKS * 16) + ((chunk ^ (row & 7)) << 4); }

// Tensor cores. Two warps share 16 rows: each scores half of a step's keys, and sums up half of the value's elements.
// Latent and rotated part are multiples of 8, and at most as wide as shared memory has them.
template <typename T, int GROUPS, int KEYS> DEVICE void latent_attention(const LatentParams &p) {
    constexpr int ROWS = 16 * GROUPS, THREADS = 64 * GROUPS, TILE_BYTES = KEYS * ROW_CHUNKS * 16;
    constexpr int PARTIAL = ROWS * (LATENT + 2), SCORE_STRIDE = KEYS + 8;
    constexpr int HALF_KEYS = KEYS / 2;
    DYNAMIC_SHARED(shared);
    __shared__ u32 cache_rows[2][KEYS];
    u8 *queries = shared;                         // [ROWS], then the output
    u8 *tiles = shared + ROWS * ROW_CHUNKS * 16;  // two of [KEYS]
    float *scores = (float *)(tiles + 2 * TILE_BYTES); // [ROWS][SCORE_STRIDE]
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, group = warp >> 1, half = warp & 1;
    u32 tile_index = blockIdx.x / p.chunks, chunk = blockIdx.x - tile_index * p.chunks, split = blockIdx.y;

    wait_for_previous();
    allow_next();
    LatentTile tile(p, tile_index, chunk, ROWS);
    u32 rows = tile.rows();
    T *out = (T *)p.out;
    if (tile.end == 0) {
        if (split != 0) return;
        u32 pieces = p.latent / 8;
        for (u32 i = thread; i < rows * pieces; i += THREADS)
            *(bytes16 *)(out + tile.offset(i / pieces, p.out_stride, p.latent) + i % pieces * 8) = bytes16{0, 0, 0, 0};
        return;
    }
    u32 each, active = active_splits(tile.end, p.splits, p.min_keys, each);
    if (split >= active || rows == 0) return;
    u32 begin = split * each, end = min(tile.end, begin + each);
    u32 steps = (end - begin + KEYS - 1) / KEYS;
    const u32 *table = p.block_tables + tile.span.table_start;
    u32 row_bytes = (p.latent + p.rotated) * 2;

    // Keys beyond the end are masked, and read as the last one.
    auto cache_row = [&](u32 step) {
        u32 key = min(begin + step * KEYS + thread, end - 1);
        return (table[key >> p.block_shift] << p.block_shift) + (key & ((1u << p.block_shift) - 1));
    };
    // Where a chunk of a row comes from; chunks that the row does not have are zeroes.
    auto source = [&](u32 chunk, bool &valid) {
        bool turned = chunk >= LATENT / 8;
        u32 dim = (turned ? chunk - LATENT / 8 : chunk) * 8;
        valid = dim < (turned ? p.rotated : p.latent);
        return valid ? dim + (turned ? p.latent : 0) : 0;
    };
    auto copy = [&](u32 step) {
        const u32 *at = cache_rows[step & 1];
#pragma unroll
        for (int i = 0; i < KEYS * ROW_CHUNKS / THREADS; i++) {
            u32 item = thread + i * THREADS, row = item / ROW_CHUNKS, chunk = item - row * ROW_CHUNKS;
            bool valid;
            u32 dim = source(chunk, valid);
            copy_async16(tiles + (step & 1) * TILE_BYTES + swizzled(row, chunk),
                         (const u8 *)p.kv + (u64)at[row] * row_bytes + 2 * dim, valid);
        }
        copy_async_commit();
    };
    if (thread < KEYS) {
        cache_rows[0][thread] = cache_row(0);
        cache_rows[1][thread] = cache_row(1);
    }
    u32 next_row = thread < KEYS ? cache_row(2) : 0;
#pragma unroll 3
    for (int i = 0; i < ROWS * ROW_CHUNKS / THREADS; i++) {
        u32 item = thread + i * THREADS, row = item / ROW_CHUNKS, chunk = item - row * ROW_CHUNKS;
        bool valid;
        u32 dim = source(chunk, valid);
        valid = valid && row < rows;
        u64 at = valid ? tile.offset(row, p.q_stride, p.latent + p.rotated) + dim : 0;
        copy_async16(queries + swizzled(row, chunk), (const T *)p.q + at, valid);
    }
    __syncthreads();
    copy(0);

    // The last key that each of the lane's rows sees; rows that are not there follow the first token.
    u32 last_key[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        u32 row = 16 * group + 8 * j + (lane >> 2);
        last_key[j] = tile.first_position + (row < rows ? tile.token(row) : 0);
    }
    float sum[LATENT / 16][4] = {}; // half of the dimensions
    float maximum[2] = {-infinity(), -infinity()}, total[2] = {};
    float *row_scores = scores + (16 * group + (lane >> 2)) * SCORE_STRIDE + 2 * (lane & 3);

    for (u32 step = 0; step < steps; step++) {
        copy_async_wait<0>();
        __syncthreads();
        if (step + 1 < steps) copy(step + 1);
        if (thread < KEYS) {
            cache_rows[step & 1][thread] = next_row;
            next_row = cache_row(step + 3);
        }
        const u8 *keys = tiles + (step & 1) * TILE_BYTES;
        {
            float score[HALF_KEYS / 8][4] = {}, other[HALF_KEYS / 8][4] = {}; // two sums, for shorter chains
#pragma unroll 3
            for (int d = 0; d < ROW_CHUNKS / 4; d++) { // 32 dimensions
                u32 a[2][4];
#pragma unroll
                for (int i = 0; i < 2; i++)
                    load_matrix4(a[i], queries + swizzled(16 * group + (lane & 15), 4 * d + 2 * i + (lane >> 4)));
#pragma unroll
                for (int i = 0; i < HALF_KEYS / 8; i++) {
                    u32 b[4]; // eight keys
                    load_matrix4(b, keys + swizzled(half * HALF_KEYS + 8 * i + (lane & 7), 4 * d + (lane >> 3)));
                    mma16816<T>(score[i], a[0], b[0], b[1]);
                    mma16816<T>(other[i], a[1], b[2], b[3]);
                }
            }
#pragma unroll
            for (int i = 0; i < HALF_KEYS / 8; i++) {
                float *to = row_scores + half * HALF_KEYS + 8 * i;
                *(float2 *)to = float2{score[i][0] + other[i][0], score[i][1] + other[i][1]};
                *(float2 *)(to + 8 * SCORE_STRIDE) = float2{score[i][2] + other[i][2], score[i][3] + other[i][3]};
            }
        }
        __syncthreads();
        float score[KEYS / 8][4];
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            float2 low = *(const float2 *)(row_scores + 8 * i);
            float2 high = *(const float2 *)(row_scores + 8 * SCORE_STRIDE + 8 * i);
            score[i][0] = low.x, score[i][1] = low.y, score[i][2] = high.x, score[i][3] = high.y;
        }
        u32 tile_key = begin + step * KEYS;
        if (tile_key + KEYS > min(end, tile.first_position + 1)) {
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 key = tile_key + 8 * i + 2 * (lane & 3) + (j & 1);
                    if (key > last_key[j >> 1] || key >= end) score[i][j] = -infinity();
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float highest = score[0][2 * j];
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) highest = fmaxf(highest, fmaxf(score[i][2 * j], score[i][2 * j + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(FULL_WARP, highest, 2));
            highest = fmaxf(maximum[j], highest * p.scale);
            // A share of the keys can lie beyond a row's own.
            float offset = highest == -infinity() ? 0.0f : highest;
            float shrink = exp2_fast(maximum[j] - offset), added = 0.0f;
            maximum[j] = highest;
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
                for (int c = 2 * j; c < 2 * j + 2; c++) {
                    score[i][c] = exp2_fast(score[i][c] * p.scale - offset);
                    added += score[i][c];
                }
            }
            total[j] = total[j] * shrink + added;
            // After a few steps maxima hardly ever move.
            if (__any_sync(FULL_WARP, shrink != 1.0f)) {
#pragma unroll
                for (int i = 0; i < LATENT / 16; i++) {
                    sum[i][2 * j] *= shrink;
                    sum[i][2 * j + 1] *= shrink;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            u32 weight[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                weight[j] = pack2<T>(score[2 * k + (j >> 1)][2 * (j & 1)], score[2 * k + (j >> 1)][2 * (j & 1) + 1]);
#pragma unroll
            for (int i = 0; i < LATENT / 32; i++) {
                u32 b[4];
                u32 column = half * (LATENT / 16) + 2 * i + (lane >> 4);
                load_matrix4_transposed(b, keys + swizzled(16 * k + (lane & 15), column));
                mma16816<T>(sum[2 * i], weight, b[0], b[1]);
                mma16816<T>(sum[2 * i + 1], weight, b[2], b[3]);
            }
        }
    }

#pragma unroll
    for (int j = 0; j < 2; j++) {
        total[j] += __shfl_xor_sync(FULL_WARP, total[j], 1);
        total[j] += __shfl_xor_sync(FULL_WARP, total[j], 2);
    }
    if (active > 1) {
        float *partial = p.partials + ((u64)blockIdx.x * p.splits + split) * PARTIAL;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 row = 16 * group + 8 * j + (lane >> 2);
            if (row >= rows) continue;
            if (half == 0 && (lane & 3) == 0)
                *(float2 *)(partial + ROWS * LATENT + 2 * row) = float2{maximum[j], total[j]};
#pragma unroll
            for (int i = 0; i < LATENT / 16; i++)
                *(float2 *)(partial + row * LATENT + half * (LATENT / 2) + 8 * i + 2 * (lane & 3)) =
                    float2{sum[i][2 * j], sum[i][2 * j + 1]};
        }
        return;
    }
    // Each warp puts its part of the rows where the queries were, so that it leaves as 16 bytes.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2; j++) {
        u32 row = 16 * group + 8 * j + (lane >> 2);
        float over = 1.0f / total[j];
#pragma unroll
        for (int i = 0; i < LATENT / 16; i++)
            *(u32 *)(queries + swizzled(row, half * (LATENT / 16) + i) + 4 * (lane & 3)) =
                pack2<T>(sum[i][2 * j] * over, sum[i][2 * j + 1] * over);
    }
    __syncwarp();
    for (u32 row = 16 * group; row < min(16 * group + 16, rows); row++) {
        u32 piece = half * (LATENT / 16) + lane; // 32 of 16 bytes
        if (piece * 8 < p.latent)
            *(bytes16 *)(out + tile.offset(row, p.out_stride, p.latent) + piece * 8) =
                *(const bytes16 *)(queries + swizzled(row, piece));
    }
}

// Adds the splits of single rows up. grid: heads, spans; 128 threads, four elements each and as many splits at most.
template <typename T, int ROWS> DEVICE void latent_attention_merge(const LatentParams &p) {
    constexpr int PARTIAL = ROWS * (LATENT + 2);
    __shared__ float weights[128], maxima[4], totals[4];
    wait_for_previous();
    allow_next();
    u32 head = blockIdx.x, chunk = head / ROWS, row = head - chunk * ROWS, thread = threadIdx.x;
    SeqSpan span = p.spans[blockIdx.y];
    u32 each, active = active_splits(span.kv_len, p.splits, p.min_keys, each);
    if (active <= 1) return;
    const float *partials = p.partials + (u64)(blockIdx.y * p.chunks + chunk) * p.splits * PARTIAL;
    float highest = -infinity(), all = 0.0f;
    if (thread < active) {
        float2 two = *(const float2 *)(partials + (u64)thread * PARTIAL + ROWS * LATENT + 2 * row);
        highest = two.x;
        all = two.y;
    }
    float top = warp_max(highest);
    if ((thread & 31) == 0) maxima[thread >> 5] = top;
    __syncthreads();
    float weight = exp2_fast(highest - fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3])));
    float total = warp_sum(all * weight);
    if ((thread & 31) == 0) totals[thread >> 5] = total;
    weights[thread] = weight;
    __syncthreads();
    float over = 1.0f / (totals[0] + totals[1] + totals[2] + totals[3]);
    u32 dim = 4 * thread;
    if (dim >= p.latent) return;
    float x[4] = {};
    for (u32 first = 0; first < active; first += 8) {
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            float4 four = *(const float4 *)(partials + (u64)min(first + j, active - 1) * PARTIAL + row * LATENT + dim);
            weight = weights[first + j];
            x[0] += four.x * weight;
            x[1] += four.y * weight;
            x[2] += four.z * weight;
            x[3] += four.w * weight;
        }
    }
    bytes8 packed = {pack2<T>(x[0] * over, x[1] * over), pack2<T>(x[2] * over, x[3] * over)};
    *(bytes8 *)((T *)p.out + (u64)span.q_start * p.out_stride + (u64)head * p.latent + dim) = packed;
}

// Without tensor cores: in 32 bits, where products must be exact, and for widths that the tiles don't fit. Eight rows;
// scores: one key for each thread; sums: up to four dimensions for each thread.
template <typename T> DEVICE void latent_attention_rows(const LatentParams &p) {
    constexpr int ROWS = 8, KEYS = 128;
    __shared__ float queries[ROWS][LATENT + ROTATED];
    __shared__ float scores[ROWS][KEYS];
    __shared__ float shrink[ROWS];
    __shared__ u32 cache_rows[KEYS];
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, width = p.latent + p.rotated;
    u32 tile_index = blockIdx.x / p.chunks, chunk = blockIdx.x - tile_index * p.chunks;
    wait_for_previous();
    allow_next();
    LatentTile tile(p, tile_index, chunk, ROWS);
    u32 rows = tile.rows();
    if (rows == 0) return;
    const u32 *table = p.block_tables + tile.span.table_start;
    for (u32 i = thread; i < ROWS * width; i += KEYS) {
        u32 row = i / width, dim = i - row * width;
        queries[row][dim] = row < rows ? to_float(((const T *)p.q)[tile.offset(row, p.q_stride, width) + dim]) : 0.0f;
    }
    float sum[ROWS][LATENT / KEYS] = {};
    float maximum[2] = {-infinity(), -infinity()}, total[2] = {}; // of rows warp and warp + 4
    for (u32 base = 0; base < tile.end; base += KEYS) {
        u32 key = min(base + thread, tile.end - 1), count = min((u32)KEYS, tile.end - base);
        u32 cache_row = (table[key >> p.block_shift] << p.block_shift) + (key & ((1u << p.block_shift) - 1));
        cache_rows[thread] = cache_row;
        __syncthreads(); // also: queries are there, and the scores of the last keys are used up
        const T *k = (const T *)p.kv + (u64)cache_row * width;
        float score[ROWS] = {};
        for (u32 dim = 0; dim < width; dim++) {
            float x = to_float(k[dim]);
#pragma unroll
            for (int row = 0; row < ROWS; row++) score[row] += x * queries[row][dim];
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            u32 last = tile.first_position + tile.token(min((u32)row, rows - 1));
            scores[row][thread] = base + thread <= last ? score[row] * p.scale : -infinity();
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *row = scores[warp + 4 * half];
            float highest = maximum[half];
            for (u32 i = lane; i < KEYS; i += WARP) highest = fmaxf(highest, row[i]);
            highest = warp_max(highest);
            float added = 0.0f; // every row sees the first key, so there is a maximum
            for (u32 i = lane; i < KEYS; i += WARP) {
                row[i] = exp2f(row[i] - highest);
                added += row[i];
            }
            float factor = exp2f(maximum[half] - highest);
            maximum[half] = highest;
            total[half] = total[half] * factor + warp_sum(added);
            if (lane == 0) shrink[warp + 4 * half] = factor;
        }
        __syncthreads();
#pragma unroll
        for (int part = 0; part < LATENT / KEYS; part++) {
            u32 dim = thread + part * KEYS;
            if (dim >= p.latent) continue;
#pragma unroll
            for (int row = 0; row < ROWS; row++) sum[row][part] *= shrink[row];
            for (u32 i = 0; i < count; i++) {
                float x = to_float(((const T *)p.kv)[(u64)cache_rows[i] * width + dim]);
#pragma unroll
                for (int row = 0; row < ROWS; row++) sum[row][part] += scores[row][i] * x;
            }
        }
        __syncthreads();
    }
    if (lane == 0) {
        shrink[warp] = total[0] > 0.0f ? 1.0f / total[0] : 0.0f;
        shrink[warp + 4] = total[1] > 0.0f ? 1.0f / total[1] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < LATENT / KEYS; part++) {
        u32 dim = thread + part * KEYS;
        if (dim >= p.latent) continue;
#pragma unroll
        for (int row = 0; row < ROWS; row++)
            if (row < rows)
                ((T *)p.out)[tile.offset(row, p.out_stride, p.latent) + dim] = Cast<T>::from(sum[row][part] * shrink[row]);
    }
}

#define LATENT_ANY(T, SUFFIX)                                                                                            \
    KERNEL __launch_bounds__(256) latent_norm_##SUFFIX(const T *x, const float *weight, T *out, u32 width, float eps) {  \
        wait_for_previous();                                                                                             \
        allow_next();                                                                                                    \
        norm_row<T>(x + (u64)blockIdx.x * width, weight, out + (u64)blockIdx.x * width, width, eps);                     \
    }                                                                                                                    \
    KERNEL __launch_bounds__(256) latent_rope_kv_write_##SUFFIX(LatentKeysParams p) { latent_rope_kv_write<T>(p); }                        \
    KERNEL __launch_bounds__(256) latent_gemm_any_##SUFFIX(LatentProductParams p) { latent_gemm_any<T>(p); }       \
    KERNEL __launch_bounds__(128) latent_attention_rows_##SUFFIX(LatentParams p) { latent_attention_rows<T>(p); }
LATENT_ANY(float, f32)
LATENT_ANY(f16, f16)
LATENT_ANY(bf16, bf16)

// `wide`: more than 32 heads, where a block may have this much shared memory.
#define LATENT_TENSOR(T, SUFFIX)                                                                                         \
    KERNEL __launch_bounds__(128) latent_gemm_##SUFFIX(LatentProductParams p) { latent_gemm<T>(p); }               \
    KERNEL __launch_bounds__(128) latent_attention_##SUFFIX(LatentParams p) { latent_attention<T, 2, 16>(p); }           \
    KERNEL __launch_bounds__(256) latent_attention_wide_##SUFFIX(LatentParams p) { latent_attention<T, 4, 32>(p); }      \
    KERNEL __launch_bounds__(128) latent_attention_merge_##SUFFIX(LatentParams p) { latent_attention_merge<T, 32>(p); }                      \
    KERNEL __launch_bounds__(128) latent_attention_merge_wide_##SUFFIX(LatentParams p) { latent_attention_merge<T, 64>(p); }
LATENT_TENSOR(f16, f16)
LATENT_TENSOR(bf16, bf16)
