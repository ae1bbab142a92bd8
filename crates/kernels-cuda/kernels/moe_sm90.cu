// The products of all experts on Hopper, after the instructions and the tile shapes of gemm_sm90.cu: each tile's rows
// belong to one expert and lie together, so the copy engine brings them like those of any other product. A tile may reach
// into the rows of the next expert; these are multiplied and not written.

struct ExpertParams {
    const ExpertTile *tiles;
    const u32 *tile_count;
    const float *bias; // [experts][n], or null
    void *out;         // a row for each place
    u32 n;
    u32 k_steps;    // of 128 bytes
    u32 activation; // see ACTIVATION_*: w is gate rows, then up rows; n / 2 are written
    float alpha, limit;
};

#define ACTIVATION_SILU 1

DEVICE float activated(const ExpertParams &p, float gate, float up) {
    if (p.activation == ACTIVATION_SILU) return silu_of(gate) * up;
    gate = fminf(gate, p.limit);
    up = fminf(fmaxf(up, -p.limit), p.limit);
    return __fdividef(gate, 1.0f + __expf(-p.alpha * gate)) * (up + 1.0f);
}

// A warp's 16 rows and its warpgroup's N columns of w: 32 columns of the output at a time go through shared memory, so
// that rows are written in whole sectors, and only those of this expert.
template <int N> struct ExpertEpilogue {
    const ExpertParams &p;
    const float *bias;
    u32 staging;
    u32 place, rows; // first of the warp, and how many are this expert's
    u32 column, width;
    u32 lane;

    DEVICE void fetch(float (&v)[4], const float (&d)[N / 2], int c, u32 first) {
        for (int i = 0; i < 4; i++) v[i] = d[4 * c + i];
        u32 mine = first + 2 * (lane & 3);
        if (bias && mine < p.n) {
            float left = bias[mine], right = bias[mine + 1];
            v[0] += left;
            v[1] += right;
            v[2] += left;
            v[3] += right;
        }
    }

    DEVICE void write(const float (&v)[4][4], u32 out_column) {
        // Rows of 64 bytes; pairs of rows swizzle their four 16-byte parts.
        u32 line = lane & 15, part = lane >> 4;
        __syncwarp();
        for (int i = 0; i < 4; i += 2) {
            u32 to = staging + line * 64 + (((i + part) ^ ((line >> 1) & 3)) << 4);
            store_matrix4(to, pack2<Element>(v[i][0], v[i][1]), pack2<Element>(v[i][2], v[i][3]), pack2<Element>(v[i + 1][0], v[i + 1][1]),
                          pack2<Element>(v[i + 1][2], v[i + 1][3]));
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = half * 8 + lane / 4, piece = lane % 4, at = out_column + piece * 8;
            bytes16 all = load_shared16(staging + row * 64 + ((piece ^ ((row >> 1) & 3)) << 4));
            if (row < rows && at < width) *(bytes16 *)((Element *)p.out + (u64)(place + row) * width + at) = all;
        }
    }

    DEVICE void run(const float (&d)[N / 2]) {
        constexpr int HALF = N / 16;
#pragma unroll
        for (int chunk = 0; chunk < N / 32; chunk++) {
            if (p.activation && chunk >= HALF / 4) break;
            float v[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int c = 4 * chunk + i;
                fetch(v[i], d, c, column + 8 * c);
                if (p.activation && c < HALF) {
                    float up[4];
                    fetch(up, d, (c + HALF) % (2 * HALF), width + column + 8 * c);
                    for (int j = 0; j < 4; j++) v[i][j] = activated(p, v[i][j], up[j]);
                }
            }
            write(v, column + 32 * chunk);
        }
    }
};

template <int WM, int WN, int N, int STAGES>
DEVICE void expert_gemm(const TensorMap &x_map, const TensorMap &w_map, const ExpertParams &p) {
    typedef Tile<WM, WN, N, STAGES, false> Shape;
    DYNAMIC_SHARED(memory);
    const u32 x_tiles = shared_address(memory), w_tiles = x_tiles + STAGES * Shape::X_BYTES;
    const u32 full = x_tiles + Shape::BARRIERS, empty = full + STAGES * 8;
    const u32 group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        prefetch_map(&x_map);
        prefetch_map(&w_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8); // every warp that multiplies
        }
        barriers_are_initialised();
    }
    __syncthreads();
    wait_for_previous();

    const u32 width = p.activation ? p.n / 2 : p.n, tile_width = p.activation ? Shape::COLUMNS / 2 : Shape::COLUMNS;
    const u32 column_tiles = (width + tile_width - 1) / tile_width, row_tiles = *p.tile_count, tiles = row_tiles * column_tiles;
    if (group == 2) {
        give_registers_back<40>();
        if (threadIdx.x == 256) {
            u32 stage = 0, parity = 1;
            for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
                Place at = place_of<Shape::ROWS>(index, row_tiles, column_tiles);
                const ExpertTile tile = p.tiles[at.row_tile];
                const u32 first = tile.expert * p.n;
                for (u32 k = 0; k < p.k_steps; k++) {
                    barrier_wait(empty + 8 * stage, parity);
                    barrier_expect(full + 8 * stage, Shape::X_BYTES + Shape::W_BYTES);
                    load_box(x_tiles + stage * Shape::X_BYTES, &x_map, k * 64, tile.first, full + 8 * stage);
#pragma unroll
                    for (int box = 0; box < 2 * WN; box++) {
                        u32 row = p.activation ? (box & 1) * width + at.column_tile * (Shape::COLUMNS / 2) + (box / 2) * Shape::BOX_ROWS
                                               : at.column_tile * Shape::COLUMNS + box * Shape::BOX_ROWS;
                        load_box(w_tiles + stage * Shape::W_BYTES + box * Shape::BOX_ROWS * 128, &w_map, k * 64, first + row, full + 8 * stage);
                    }
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
            allow_next();
        }
    } else {
        take_registers<232>();
        const u32 worker = group, warp = (threadIdx.x / 32) & 3, worker_row = worker % WM, worker_column = worker / WM;
        const u64 x_at = tile_descriptor(x_tiles + worker_row * 64 * 128), w_at = tile_descriptor(w_tiles + worker_column * N * 128);
        float d[N / 2];
        u32 stage = 0, parity = 0;
        for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
            Place at = place_of<Shape::ROWS>(index, row_tiles, column_tiles);
            const ExpertTile tile = p.tiles[at.row_tile];
            u32 before = 0;
            for (u32 k = 0; k < p.k_steps; k++) {
                barrier_wait(full + 8 * stage, parity);
                multiply_begin();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    Multiply<Element, N>::run(d, x_at + (stage * Shape::X_BYTES + 32 * i) / 16,
                                              w_at + (stage * Shape::W_BYTES + 32 * i) / 16, i > 0 || k > 0);
                }
                multiply_commit();
                if (k > 0) {
                    multiply_wait<1>();
                    if (lane == 0) barrier_arrive(empty + 8 * before);
                }
                before = stage;
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            multiply_wait<0>();
            if (lane == 0) barrier_arrive(empty + 8 * before);
            const u32 row = worker_row * 64 + warp * 16, rows = tile.rows > row ? tile.rows - row : 0;
            const u32 column = at.column_tile * tile_width + worker_column * (p.activation ? N / 2 : N);
            const float *bias = p.bias ? p.bias + (u64)tile.expert * p.n : nullptr;
            const u32 staging = x_tiles + Shape::STAGING + (worker * 4 + warp) * Shape::WARP_STAGING;
            ExpertEpilogue<N> rest{p, bias, staging, tile.first + row, rows, column, width, lane};
            rest.run(d);
        }
    }
}

#define EXPERT_GEMM(NAME, WM, WN, N, STAGES)                                                                            \
    KERNEL __launch_bounds__(384, 1) NAME(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, \
                                          const __grid_constant__ ExpertParams p) {                                      \
        expert_gemm<WM, WN, N, STAGES>(x_map, w_map, p);                                                                 \
    }
#if GEMM_TYPE == 0
#define EXPERT_NAME(tile) JOIN(JOIN(moe_experts_sm90, tile), bf16)
#else
#define EXPERT_NAME(tile) JOIN(JOIN(moe_experts_sm90, tile), f16)
#endif
EXPERT_GEMM(EXPERT_NAME(128x256), 2, 1, 256, 4)
EXPERT_GEMM(EXPERT_NAME(64x256), 1, 2, 128, 4)
