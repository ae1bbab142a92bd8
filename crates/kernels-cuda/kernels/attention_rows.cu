// Attention without tensor cores, for prompts and single rows alike: in 32 bits, where products must be exact, and for
// heads that the tensor cores' tiles don't fit (`any`).
//
// A block takes eight rows (query tokens times query heads of one kv head). Scores: one key for each thread; sums: one or
// two dimensions for each thread. Of single rows the keys may be cut among blocks, the last of which adds their sums up.

struct AttentionRowsParams {
    const void *qkv;
    const void *kv;
    const SeqSpan *spans;
    const u32 *tiles; // pairs: span, and tile of its rows; null: one tile for each span
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
    // Up to here as in attention_prefill.cu.
    float *partials; // [block of rows][split][8 * (head_dim + 2)]; unused where nothing is split
    u32 *counters;   // [block of rows], all 0 between launches
    u32 splits;      // blocks that may share the keys
};

// WIDTH neighbours.
template <int WIDTH> DEVICE void load_some(const float *p, float (&x)[WIDTH]) {
    if constexpr (WIDTH == 4) {
        float4 v = *(const float4 *)p;
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) x[i] = p[i];
    }
}
template <int WIDTH> DEVICE void load_some(const fp8 *p, float (&x)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) x[i] = to_float(p[i]);
}
template <int WIDTH> DEVICE void load_some(const f16 *p, float (&x)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) unpack2<f16>(*(const u32 *)(p + i), x[i], x[i + 1]);
}
template <int WIDTH> DEVICE void load_some(const bf16 *p, float (&x)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) unpack2<bf16>(*(const u32 *)(p + i), x[i], x[i + 1]);
}

// Heads are a multiple of WIDTH elements.
template <typename T, typename KV, int WIDTH> DEVICE void attention_rows(const AttentionRowsParams &p) {
    constexpr int ROWS = 8, KEYS = 128, MAX_DIM = 256, AHEAD = 8;
    __shared__ __align__(16) float queries[ROWS][MAX_DIM];
    __shared__ float scores[ROWS][KEYS];
    __shared__ float shrink[ROWS];
    __shared__ u32 cache_rows[KEYS];
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    u32 group = p.heads / p.kv_heads;
    u32 width = min(group, (u32)ROWS); // heads of a tile
    u32 chunks = (group + width - 1) / width;
    u32 tile = blockIdx.x / (p.kv_heads * chunks), rest = blockIdx.x - tile * p.kv_heads * chunks;
    u32 kv_head = rest / chunks, first_in_group = (rest - kv_head * chunks) * width;
    u32 first_head = kv_head * group + first_in_group;
    u32 heads = min(width, group - first_in_group);

    wait_for_previous();
    allow_next();
    SeqSpan span = p.spans[p.tiles != nullptr ? p.tiles[2 * tile] : tile];
    u32 first_token = p.tiles != nullptr ? p.tiles[2 * tile + 1] * p.tokens : 0;
    if (first_token >= span.q_len) return;
    u32 rows = min(p.tokens, span.q_len - first_token) * heads;
    u32 first_position = span.kv_len == 0 ? 0 : span.kv_len - span.q_len + first_token;
    u32 end = span.kv_len == 0 ? 0 : first_position + (rows - 1) / heads + 1;
    u32 begin = p.window != 0 && first_position + 1 > p.window ? first_position + 1 - p.window : 0;
    // Whole steps of keys for each split.
    u32 steps = (end - begin + KEYS - 1) / KEYS, splits = max(1u, min(p.splits, steps)), split = blockIdx.y;
    if (split >= splits) return;
    if (splits > 1) {
        u32 start = begin;
        begin = start + steps * split / splits * KEYS;
        end = min(end, start + steps * (split + 1) / splits * KEYS);
    }
    const u32 *table = p.block_tables + span.table_start;
    const KV *keys = (const KV *)p.kv;
    const KV *values = keys + ((u64)p.kv_heads << p.block_shift) * p.head_dim;
    const T *qkv = (const T *)p.qkv + (u64)(span.q_start + first_token) * p.qkv_stride + first_head * p.head_dim;
    T *out = (T *)p.out + (u64)(span.q_start + first_token) * p.out_stride + first_head * p.head_dim;
    for (u32 i = thread; i < ROWS * p.head_dim; i += KEYS) {
        u32 row = i / p.head_dim, dim = i - row * p.head_dim;
        queries[row][dim] = row < rows ? to_float(qkv[(row / heads) * p.qkv_stride + (row % heads) * p.head_dim + dim]) : 0.0f;
    }
    float sum[ROWS][MAX_DIM / KEYS] = {};
    float maximum[2] = {-infinity(), -infinity()}, total[2] = {}; // of rows warp and warp + 4
    for (u32 base = begin; base < end; base += KEYS) {
        u32 key = min(base + thread, end - 1), count = min((u32)KEYS, end - base);
        u32 cache_row = ((table[key >> p.block_shift] * 2 * p.kv_heads + kv_head) << p.block_shift) +
                        (key & ((1u << p.block_shift) - 1));
        cache_rows[thread] = cache_row;
        __syncthreads(); // also: queries are there, and the scores of the last keys are used up
        const KV *k = keys + (u64)cache_row * p.head_dim;
        float score[ROWS] = {};
#pragma unroll 4
        for (u32 dim = 0; dim < p.head_dim; dim += WIDTH) {
            float x[WIDTH], q[WIDTH];
            load_some(k + dim, x);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                load_some(&queries[row][dim], q);
                float products = x[0] * q[0];
#pragma unroll
                for (int i = 1; i < WIDTH; i++) products += x[i] * q[i];
                score[row] += products;
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            u32 last = first_position + min((u32)row, rows - 1) / heads;
            bool seen = base + thread <= last && (p.window == 0 || last - key < p.window);
            scores[row][thread] = seen ? score[row] * p.scale : -infinity();
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *row = scores[warp + 4 * half];
            float highest = maximum[half];
            for (u32 i = lane; i < KEYS; i += WARP) highest = fmaxf(highest, row[i]);
            highest = warp_max(highest);
            float offset = highest == -infinity() ? 0.0f : highest, added = 0.0f;
            for (u32 i = lane; i < KEYS; i += WARP) {
                row[i] = exp2f(row[i] - offset);
                added += row[i];
            }
            float factor = exp2f(maximum[half] - offset);
            maximum[half] = highest;
            total[half] = total[half] * factor + warp_sum(added);
            if (lane == 0) shrink[warp + 4 * half] = factor;
        }
        __syncthreads();
#pragma unroll
        for (int part = 0; part < MAX_DIM / KEYS; part++) {
            u32 dim = thread + part * KEYS;
            if (dim >= p.head_dim) continue;
#pragma unroll
            for (int row = 0; row < ROWS; row++) sum[row][part] *= shrink[row];
            for (u32 i = 0; i < count; i += AHEAD) {
                // All on their way before the first is used. Beyond the last key weights are 0, and any row will do.
                float x[AHEAD];
#pragma unroll
                for (int j = 0; j < AHEAD; j++) x[j] = to_float(values[(u64)cache_rows[i + j] * p.head_dim + dim]);
#pragma unroll
                for (int j = 0; j < AHEAD; j++)
#pragma unroll
                    for (int row = 0; row < ROWS; row++) sum[row][part] += scores[row][i + j] * x[j];
            }
        }
        __syncthreads();
    }
    if (splits > 1) {
        __shared__ bool last;
        const u32 stride = p.head_dim + 2;
        float *mine = p.partials + ((u64)blockIdx.x * p.splits + split) * ROWS * stride;
        if (lane == 0) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float *to = mine + (warp + 4 * half) * stride + p.head_dim;
                to[0] = maximum[half];
                to[1] = total[half];
            }
        }
#pragma unroll
        for (int part = 0; part < MAX_DIM / KEYS; part++) {
            u32 dim = thread + part * KEYS;
            if (dim >= p.head_dim) continue;
#pragma unroll
            for (int row = 0; row < ROWS; row++) mine[row * stride + dim] = sum[row][part];
        }
        __threadfence();
        __syncthreads();
        if (thread == 0) {
            last = atomicAdd(&p.counters[blockIdx.x], 1) == splits - 1;
            if (last) p.counters[blockIdx.x] = 0;
        }
        __syncthreads();
        if (!last) return;
        __threadfence();
        const volatile float *all = p.partials + (u64)blockIdx.x * p.splits * ROWS * stride;
        // A lane for each split.
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = warp + 4 * half;
            const volatile float *of_split = all + ((u64)min(lane, splits - 1) * ROWS + row) * stride + p.head_dim;
            float its_maximum = lane < splits ? of_split[0] : -infinity();
            maximum[half] = warp_max(its_maximum);
            float weight = its_maximum == -infinity() ? 0.0f : exp2f(its_maximum - maximum[half]);
            total[half] = warp_sum(lane < splits ? of_split[1] * weight : 0.0f);
            scores[row][lane] = weight;
        }
        __syncthreads();
#pragma unroll
        for (int part = 0; part < MAX_DIM / KEYS; part++) {
            u32 dim = thread + part * KEYS;
            if (dim >= p.head_dim) continue;
#pragma unroll
            for (int row = 0; row < ROWS; row++) sum[row][part] = 0.0f;
            for (u32 from = 0; from < splits; from++) {
#pragma unroll
                for (int row = 0; row < ROWS; row++) sum[row][part] += scores[row][from] * all[((u64)from * ROWS + row) * stride + dim];
            }
        }
    }
    if (lane == 0) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = warp + 4 * half;
            float all = total[half] + sink_weight(p.sinks, first_head + row % heads, maximum[half]);
            shrink[row] = total[half] > 0.0f ? 1.0f / all : 0.0f;
        }
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < MAX_DIM / KEYS; part++) {
        u32 dim = thread + part * KEYS;
        if (dim >= p.head_dim) continue;
#pragma unroll
        for (int row = 0; row < ROWS; row++)
            if (row < rows)
                out[(row / heads) * p.out_stride + (row % heads) * p.head_dim + dim] = Cast<T>::from(sum[row][part] * shrink[row]);
    }
}

#define ATTENTION_ROWS(NAME, T, KV, WIDTH)                                                                               \
    KERNEL __launch_bounds__(128) NAME(AttentionRowsParams p) { attention_rows<T, KV, WIDTH>(p); }
ATTENTION_ROWS(attention_rows_f32, float, float, 4)
ATTENTION_ROWS(attention_rows_f32_fp8, float, fp8, 4)
ATTENTION_ROWS(attention_any_f32, float, float, 2)
ATTENTION_ROWS(attention_any_f16, f16, f16, 2)
ATTENTION_ROWS(attention_any_bf16, bf16, bf16, 2)
