// The products of all experts in one launch: each block takes some columns of one expert, for rows that were sent to it.

struct ExpertTask {
    const void *x, *w; // rows; [experts][n][k]
    void *out;         // a row for each place
    const float *bias; // [experts][n], or null
    const u32 *order;  // the pair at each place: x has a row for each token; null: x has a row for each place
    const ExpertTile *tiles;
    const u32 *tile_count;
    u32 per_token; // pairs of a token
    u32 n, k;
    u32 tile_slots;  // most tiles there can be
    u32 activation;  // see ACTIVATION_*: w is gate rows, then up rows; n / 2 are written
    float alpha, limit;
    u32 aligned; // every row of x and w begins at a multiple of 16 bytes
};

#define ACTIVATION_NONE 0
#define ACTIVATION_SILU 1
#define ACTIVATION_CLAMPED 2

DEVICE float activated(const ExpertTask &t, float gate, float up) {
    if (t.activation == ACTIVATION_SILU) return gate / (1.0f + __expf(-gate)) * up;
    gate = fminf(gate, t.limit);
    up = fminf(fmaxf(up, -t.limit), t.limit);
    return gate / (1.0f + __expf(-t.alpha * gate)) * (up + 1.0f);
}

// Blocks that run at the same time share rows of x and columns of w: so many tiles of rows go through all columns before
// the next ones do.
#define TILE_GROUP 16
struct Work {
    ExpertTile tile;
    u32 column_tile;
};
DEVICE bool find_work(const ExpertTask &t, u32 column_tiles, Work &work) {
    u32 group = blockIdx.x / (TILE_GROUP * column_tiles), inside = blockIdx.x % (TILE_GROUP * column_tiles);
    u32 size = min(TILE_GROUP, t.tile_slots - group * TILE_GROUP), tile = group * TILE_GROUP + inside % size;
    if (tile >= *t.tile_count) return false;
    work.column_tile = inside / size;
    work.tile = t.tiles[tile];
    return true;
}

// The row of w that is row `r` of a tile; with an activation each run of `group` rows is one half gate and one half up.
DEVICE u32 row_of_w(const ExpertTask &t, u32 tile, u32 columns, u32 group, u32 r) {
    if (!t.activation) return tile * columns + r;
    u32 inner = r % group, half = group / 2;
    return (inner >= half ? t.n / 2 : 0) + tile * (columns / 2) + r / group * half + inner % half;
}
DEVICE u32 column_of_group(const ExpertTask &t, u32 tile, u32 columns, u32 group, u32 index) {
    return t.activation ? tile * (columns / 2) + index * (group / 2) : tile * columns + index * group;
}
DEVICE u32 row_of_x(const ExpertTask &t, u32 place) { return t.order ? t.order[place] / t.per_token : place; }
DEVICE u32 out_width(const ExpertTask &t) { return t.activation ? t.n / 2 : t.n; }

#define STEP 64 // elements of k in one stage: rows of 128 bytes

// Where part (of 16 bytes) of a row lies: eight rows of one part are in different banks.
DEVICE u32 part_at(u32 row, u32 part) { return row * 128 + ((part ^ (row & 7)) << 4); }

// Eight elements from element k on; zeroes past the end.
template <typename T> DEVICE void stage_part(void *to, const T *row, u32 k, u32 limit, bool valid, bool aligned) {
    if (aligned) {
        bool inside = valid && k < limit;
        copy_async16(to, inside ? row + k : row, inside);
        return;
    }
    u32 parts[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 low = valid && k + 2 * i < limit ? row[k + 2 * i].bits : 0, high = valid && k + 2 * i + 1 < limit ? row[k + 2 * i + 1].bits : 0;
        parts[i] = low | high << 16;
    }
    bytes16 all;
    all.x = parts[0], all.y = parts[1], all.z = parts[2], all.w = parts[3];
    *(bytes16 *)to = all;
}

template <typename T, int ROWS, int COLUMNS, int DOWN, int ACROSS, int STAGES> DEVICE void expert_tensor(const ExpertTask &t) {
    const int THREADS = 32 * DOWN * ACROSS, WARP_ROWS = ROWS / DOWN, WARP_COLUMNS = COLUMNS / ACROSS;
    const int TALL = WARP_ROWS / 16, WIDE = WARP_COLUMNS / 8, LANES = THREADS / 8;
    const int X_PARTS = (ROWS + LANES - 1) / LANES, W_PARTS = (COLUMNS + LANES - 1) / LANES;
    DYNAMIC_SHARED(memory);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, warp_row = warp / ACROSS, warp_column = warp % ACROSS;
    wait_for_previous();
    allow_next();
    Work work;
    if (!find_work(t, (t.n + COLUMNS - 1) / COLUMNS, work)) return;
    const ExpertTile tile = work.tile;
    const u32 column_tile = work.column_tile;
    const T *x = (const T *)t.x, *w = (const T *)t.w + (u64)tile.expert * t.n * t.k;
    u8 *x_stages = memory, *w_stages = memory + STAGES * ROWS * 128;

    // A thread brings the same part of the same rows in every step.
    const u32 part = threadIdx.x % 8, own_row = threadIdx.x / 8;
    u32 x_rows[X_PARTS], w_rows[W_PARTS];
    bool x_valid[X_PARTS], w_valid[W_PARTS];
#pragma unroll
    for (int i = 0; i < X_PARTS; i++) {
        u32 r = own_row + i * LANES;
        x_valid[i] = r < tile.rows;
        x_rows[i] = x_valid[i] ? row_of_x(t, tile.first + r) : 0;
    }
#pragma unroll
    for (int i = 0; i < W_PARTS; i++) {
        u32 row = row_of_w(t, column_tile, COLUMNS, WARP_COLUMNS, own_row + i * LANES);
        w_valid[i] = row < t.n;
        w_rows[i] = w_valid[i] ? row : 0;
    }
    auto load = [&](u32 stage, u32 step) {
        u32 k = step * STEP + part * 8;
#pragma unroll
        for (int i = 0; i < X_PARTS; i++) {
            u32 r = own_row + i * LANES;
            if (ROWS % LANES == 0 || r < ROWS)
                stage_part<T>(x_stages + stage * ROWS * 128 + part_at(r, part), x + (u64)x_rows[i] * t.k, k, t.k, x_valid[i], t.aligned);
        }
#pragma unroll
        for (int i = 0; i < W_PARTS; i++) {
            u32 r = own_row + i * LANES;
            if (COLUMNS % LANES == 0 || r < COLUMNS)
                stage_part<T>(w_stages + stage * COLUMNS * 128 + part_at(r, part), w + (u64)w_rows[i] * t.k, k, t.k, w_valid[i], t.aligned);
        }
    };

    float sums[TALL][WIDE][4];
#pragma unroll
    for (int i = 0; i < TALL; i++)
#pragma unroll
        for (int j = 0; j < WIDE; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;

    const u32 steps = (t.k + STEP - 1) / STEP;
    for (u32 s = 0; s < STAGES - 1; s++) {
        if (s < steps) load(s, s);
        copy_async_commit();
    }
    u32 stage = 0, next = STAGES - 1;
    for (u32 step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) load(next, step + STAGES - 1);
        copy_async_commit();
        const u8 *x_stage = x_stages + stage * ROWS * 128, *w_stage = w_stages + stage * COLUMNS * 128;
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
            u32 a[TALL][4], b[WIDE / 2][4];
#pragma unroll
            for (int i = 0; i < TALL; i++)
                load_matrix4(a[i], x_stage + part_at(warp_row * WARP_ROWS + i * 16 + (lane & 15), quarter * 2 + (lane >> 4)));
#pragma unroll
            for (int j = 0; j < WIDE / 2; j++)
                load_matrix4(b[j], w_stage + part_at(warp_column * WARP_COLUMNS + j * 16 + (lane & 7) + (lane >> 4) * 8, quarter * 2 + ((lane >> 3) & 1)));
#pragma unroll
            for (int i = 0; i < TALL; i++)
#pragma unroll
                for (int j = 0; j < WIDE; j++) mma16816<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }

    const u32 width = out_width(t), first_row = warp_row * WARP_ROWS + (lane >> 2);
    const u32 first_column = column_of_group(t, column_tile, COLUMNS, WARP_COLUMNS, warp_column) + 2 * (lane & 3);
    const float *bias = t.bias ? t.bias + (u64)tile.expert * t.n : nullptr;
    auto put = [&](u32 row, u32 column, float left, float right) {
        if (row >= tile.rows || column >= width) return;
        T *out = (T *)t.out + (u64)(tile.first + row) * width + column;
        if (width % 2 == 0) {
            *(u32 *)out = pack2<T>(left, right);
        } else {
            out[0] = Cast<T>::from(left);
            if (column + 1 < width) out[1] = Cast<T>::from(right);
        }
    };
#pragma unroll
    for (int i = 0; i < TALL; i++) {
        auto add_bias = [&](float (&v)[4], u32 column) {
            if (!bias) return;
#pragma unroll
            for (int side = 0; side < 2; side++) {
                float here = column + side < t.n ? bias[column + side] : 0.0f;
                v[side] += here;
                v[side + 2] += here;
            }
        };
#pragma unroll
        for (int j = 0; j < WIDE; j++) {
            if (t.activation && j >= WIDE / 2) break;
            u32 column = first_column + j * 8;
            add_bias(sums[i][j], column);
            if (t.activation && j < WIDE / 2) {
                add_bias(sums[i][j + WIDE / 2], t.n / 2 + column);
#pragma unroll
                for (int e = 0; e < 4; e++) sums[i][j][e] = activated(t, sums[i][j][e], sums[i][j + WIDE / 2][e]);
            }
            put(first_row + i * 16, column, sums[i][j][0], sums[i][j][1]);
            put(first_row + i * 16 + 8, column, sums[i][j][2], sums[i][j][3]);
        }
    }
}

// 32 bits: plain multiply-adds, 256 threads as 16 x 16; each has the same small tile in both halves of rows and columns.
#define STEP32 16
template <int ROWS, int COLUMNS> DEVICE void expert_plain(const ExpertTask &t) {
    const int TALL = ROWS / 32, WIDE = COLUMNS / 32; // of a small tile
    __shared__ __align__(16) float x_step[STEP32][ROWS + 4], w_step[STEP32][COLUMNS + 4];
    __shared__ u32 x_rows[ROWS];
    const u32 down = threadIdx.x / 16, across = threadIdx.x % 16;
    wait_for_previous();
    allow_next();
    Work work;
    if (!find_work(t, (t.n + COLUMNS - 1) / COLUMNS, work)) return;
    const ExpertTile tile = work.tile;
    const float *x = (const float *)t.x, *w = (const float *)t.w + (u64)tile.expert * t.n * t.k;
    for (u32 r = threadIdx.x; r < tile.rows; r += 256) x_rows[r] = row_of_x(t, tile.first + r);
    __syncthreads();

    float sums[2 * TALL][2 * WIDE];
#pragma unroll
    for (int i = 0; i < 2 * TALL; i++)
#pragma unroll
        for (int j = 0; j < 2 * WIDE; j++) sums[i][j] = 0.0f;
    for (u32 k = 0; k < t.k; k += STEP32) {
        for (u32 i = threadIdx.x; i < (ROWS + COLUMNS) * STEP32; i += 256) {
            u32 r = i / STEP32, e = i % STEP32;
            bool inside = k + e < t.k;
            if (r < ROWS) {
                x_step[e][r] = inside && r < tile.rows ? x[(u64)x_rows[r] * t.k + k + e] : 0.0f;
            } else {
                r -= ROWS;
                u32 row = row_of_w(t, work.column_tile, COLUMNS, COLUMNS, r);
                w_step[e][r] = inside && row < t.n ? w[(u64)row * t.k + k + e] : 0.0f;
            }
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < STEP32; e++) {
            float a[2 * TALL], b[2 * WIDE];
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < TALL; i++) a[half * TALL + i] = x_step[e][half * (ROWS / 2) + down * TALL + i];
#pragma unroll
                for (int j = 0; j < WIDE; j++) b[half * WIDE + j] = w_step[e][half * (COLUMNS / 2) + across * WIDE + j];
            }
#pragma unroll
            for (int i = 0; i < 2 * TALL; i++)
#pragma unroll
                for (int j = 0; j < 2 * WIDE; j++) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
        }
        __syncthreads();
    }

    const u32 width = out_width(t), first_column = column_of_group(t, work.column_tile, COLUMNS, COLUMNS, 0);
    const float *bias = t.bias ? t.bias + (u64)tile.expert * t.n : nullptr;
    auto with_bias = [&](float value, u32 column) { return bias && column < t.n ? value + bias[column] : value; };
#pragma unroll
    for (int i = 0; i < 2 * TALL; i++) {
        u32 row = i / TALL * (ROWS / 2) + down * TALL + i % TALL;
#pragma unroll
        for (int j = 0; j < 2 * WIDE; j++) {
            if (t.activation && j >= WIDE) break;
            u32 column = first_column + j / WIDE * (COLUMNS / 2) + across * WIDE + j % WIDE;
            float value = with_bias(sums[i][j], column);
            if (t.activation && j < WIDE) value = activated(t, value, with_bias(sums[i][j + WIDE], t.n / 2 + column));
            if (row < tile.rows && column < width) ((float *)t.out)[(u64)(tile.first + row) * width + column] = value;
        }
    }
}

#define EXPERTS(NAME, TYPE, ROWS, COLUMNS, DOWN, ACROSS, STAGES, BLOCKS)                                                \
    KERNEL __launch_bounds__(32 * DOWN * ACROSS, BLOCKS) NAME(const __grid_constant__ ExpertTask t) {                    \
        expert_tensor<TYPE, ROWS, COLUMNS, DOWN, ACROSS, STAGES>(t);                                                     \
    }
EXPERTS(moe_experts_16x64_bf16, bf16, 16, 64, 1, 4, 5, 4)
EXPERTS(moe_experts_16x64_f16, f16, 16, 64, 1, 4, 5, 4)
EXPERTS(moe_experts_32x64_bf16, bf16, 32, 64, 1, 4, 5, 3)
EXPERTS(moe_experts_32x64_f16, f16, 32, 64, 1, 4, 5, 3)
EXPERTS(moe_experts_64x128_bf16, bf16, 64, 128, 2, 4, 4, 2)
EXPERTS(moe_experts_64x128_f16, f16, 64, 128, 2, 4, 4, 2)
EXPERTS(moe_experts_128x128_bf16, bf16, 128, 128, 2, 4, 3, 2)
EXPERTS(moe_experts_128x128_f16, f16, 128, 128, 2, 4, 3, 2)
KERNEL __launch_bounds__(256) moe_experts_32x64_f32(const __grid_constant__ ExpertTask t) { expert_plain<32, 64>(t); }

// ---- few pairs --------------------------------------------------------------------------------------------------
// A row of x for each pair, and a warp for every four rows of w: two of the gate and two of up, or four neighbours. What
// matters is how much of w is on its way at once.
#define PAIR_ROWS 4
template <typename T> DEVICE void expert_pair(const ExpertTask &t, const u32 *chosen, const u32 *places) {
    wait_for_previous();
    allow_next();
    const u32 pair = blockIdx.y, expert = chosen[pair], lane = threadIdx.x & 31;
    if (expert == 0xffffffffu) return;
    const u32 place = places[pair], width = out_width(t), outputs = t.activation ? PAIR_ROWS / 2 : PAIR_ROWS;
    const u32 first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * outputs;
    if (first >= width) return;
    const T *x = (const T *)t.x + (u64)(t.order ? pair / t.per_token : place) * t.k, *w = (const T *)t.w + (u64)expert * t.n * t.k;
    const T *rows[PAIR_ROWS];
#pragma unroll
    for (int r = 0; r < PAIR_ROWS; r++) {
        u32 output = t.activation ? first + r % 2 : first + r;
        u32 row = min(output, width - 1) + (t.activation && r >= 2 ? width : 0);
        rows[r] = w + (u64)row * t.k;
    }
    float sums[PAIR_ROWS] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (u32 k = lane * 8; k < t.k; k += 256) {
        bytes16 parts[PAIR_ROWS], own = *(const bytes16 *)(x + k);
#pragma unroll
        for (int r = 0; r < PAIR_ROWS; r++) parts[r] = load_streaming(rows[r] + k);
        float values[8];
        unpack2<T>(own.x, values[0], values[1]);
        unpack2<T>(own.y, values[2], values[3]);
        unpack2<T>(own.z, values[4], values[5]);
        unpack2<T>(own.w, values[6], values[7]);
#pragma unroll
        for (int r = 0; r < PAIR_ROWS; r++) {
            u32 words[4] = {parts[r].x, parts[r].y, parts[r].z, parts[r].w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float low, high;
                unpack2<T>(words[i], low, high);
                sums[r] = fmaf(low, values[2 * i], sums[r]);
                sums[r] = fmaf(high, values[2 * i + 1], sums[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < PAIR_ROWS; r++) sums[r] = warp_sum(sums[r]);
    if (lane >= outputs || first + lane >= width) return;
    const float *bias = t.bias ? t.bias + (u64)expert * t.n : nullptr;
    const u32 column = first + lane;
    float value = lane == 0 ? sums[0] : lane == 1 ? sums[1] : lane == 2 ? sums[2] : sums[3];
    if (bias) value += bias[column];
    if (t.activation) {
        float up = lane == 0 ? sums[2] : sums[3];
        if (bias) up += bias[width + column];
        value = activated(t, value, up);
    }
    ((T *)t.out)[(u64)place * width + column] = Cast<T>::from(value);
}
KERNEL __launch_bounds__(128) moe_pairs_bf16(const __grid_constant__ ExpertTask t, const u32 *chosen, const u32 *places) {
    expert_pair<bf16>(t, chosen, places);
}
KERNEL __launch_bounds__(128) moe_pairs_f16(const __grid_constant__ ExpertTask t, const u32 *chosen, const u32 *places) {
    expert_pair<f16>(t, chosen, places);
}
