// Matrix products for every shape and architecture: out[m][n] = x[m][k] . w[n][k]^T. Tensor cores for 16 and 8 bits,
// plain multiply-adds for 32.

struct GemmTask {
    const void *x, *w;
    void *out;
    const float *bias;     // [n], or null
    const float *x_scales; // e4m3 only: one per row, or one in all
    const float *w_scales; // e4m3 only: one per column, or one in all
    u32 x_scale_stride;    // 1 or 0
    u32 w_scale_stride;
    u32 m, n, k;
    u32 out_type; // see OUT_*
    u32 silu;     // 1: w is the gate's rows and then the up projection's; silu(gate) * up is written, n / 2 wide
    u32 aligned;  // 1: every row of x and w begins at a multiple of 16 bytes
};

#define OUT_BF16 0
#define OUT_F16 1
#define OUT_F32 2
#define OUT_ADD_F32 3

DEVICE float silu_of(float x) { return x / (1.0f + __expf(-x)); }

// The row of w that is row `r` of a tile, when each run of `group` rows is one half gate and one half up.
DEVICE u32 row_of_w(const GemmTask &t, u32 tile, u32 columns, u32 group, u32 r) {
    if (!t.silu) return tile * columns + r;
    u32 inner = r % group, half = group / 2;
    return (inner >= half ? t.n / 2 : 0) + tile * (columns / 2) + r / group * half + inner % half;
}

// The first of a tile's columns in the output that the group's run holds.
DEVICE u32 column_of_group(const GemmTask &t, u32 tile, u32 columns, u32 group, u32 index) {
    return t.silu ? tile * (columns / 2) + index * (group / 2) : tile * columns + index * group;
}

DEVICE float with_bias(const GemmTask &t, float value, u32 column) { return t.bias && column < t.n ? value + t.bias[column] : value; }

DEVICE void put(const GemmTask &t, u32 row, u32 column, float value) {
    u32 width = t.silu ? t.n / 2 : t.n;
    if (row >= t.m || column >= width) return;
    u64 at = (u64)row * width + column;
    if (t.out_type == OUT_BF16) ((bf16 *)t.out)[at] = Cast<bf16>::from(value);
    else if (t.out_type == OUT_F16) ((f16 *)t.out)[at] = Cast<f16>::from(value);
    else if (t.out_type == OUT_F32) ((float *)t.out)[at] = value;
    else ((float *)t.out)[at] += value;
}

// Two neighbours, the first at an even column.
DEVICE void put2(const GemmTask &t, u32 row, u32 column, float left, float right) {
    u32 width = t.silu ? t.n / 2 : t.n;
    if (t.out_type <= OUT_F16 && width % 2 == 0) {
        if (row >= t.m || column >= width) return;
        u32 pair = t.out_type == OUT_BF16 ? pack2<bf16>(left, right) : pack2<f16>(left, right);
        *(u32 *)((u16 *)t.out + (u64)row * width + column) = pair;
    } else {
        put(t, row, column, left);
        put(t, row, column + 1, right);
    }
}

// ---- tensor cores -----------------------------------------------------------------------------------------------
#define STEP 32 // elements of k in one stage
#define STAGES 4

template <typename In> struct Operand {
    typedef In Type;
};
template <> struct Operand<fp8> {
    typedef f16 Type; // holds every e4m3 value
};

// Eight elements of a row of x or w from element k on, as 16 bytes; zeroes past the end.
template <typename In> DEVICE void stage_part(void *to, const In *from, u32 k, u32 limit, bool valid, bool aligned) {
    typedef typename Operand<In>::Type Type;
    if (sizeof(In) == 2 && aligned) {
        bool inside = valid && k < limit;
        copy_async16(to, inside ? from + k : from, inside);
        return;
    }
    u16 parts[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        parts[i] = 0;
        if (valid && k + i < limit) parts[i] = sizeof(In) == 2 ? *(const u16 *)(from + k + i) : Cast<Type>::from(to_float(from[k + i])).bits;
    }
    bytes16 all;
    all.x = parts[0] | (u32)parts[1] << 16;
    all.y = parts[2] | (u32)parts[3] << 16;
    all.z = parts[4] | (u32)parts[5] << 16;
    all.w = parts[6] | (u32)parts[7] << 16;
    *(bytes16 *)to = all;
}

// Where part (of 16 bytes) of a 64-byte row lies: pairs of rows swizzle their four parts, so that eight rows of one part
// are in different banks.
DEVICE u32 part_at(u32 row, u32 part) { return row * 64 + ((part ^ ((row >> 1) & 3)) << 4); }

// 256 threads: two warps down, four across.
template <typename In, int ROWS, int COLUMNS> DEVICE void gemm_tensor(const GemmTask &t) {
    typedef typename Operand<In>::Type Type;
    const int WARP_ROWS = ROWS / 2, WARP_COLUMNS = COLUMNS / 4, TALL = WARP_ROWS / 16, WIDE = WARP_COLUMNS / 8;
    DYNAMIC_SHARED(memory);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, warp_row = warp / 4, warp_column = warp % 4;
    const u32 row_tile = blockIdx.x, column_tile = blockIdx.y;
    const In *x = (const In *)t.x, *w = (const In *)t.w;
    u8 *x_stages = memory, *w_stages = memory + STAGES * ROWS * 64;
    wait_for_previous();
    allow_next();

    auto load = [&](u32 stage, u32 step) {
        u32 k = step * STEP;
        for (u32 i = threadIdx.x; i < (ROWS + COLUMNS) * 4; i += 256) {
            u32 r = i / 4, part = i % 4;
            if (r < ROWS) {
                u32 row = row_tile * ROWS + r;
                bool valid = row < t.m;
                stage_part<In>(x_stages + stage * ROWS * 64 + part_at(r, part), x + (u64)(valid ? row : 0) * t.k, k + part * 8, t.k, valid,
                               t.aligned);
            } else {
                r -= ROWS;
                u32 row = row_of_w(t, column_tile, COLUMNS, WARP_COLUMNS, r);
                bool valid = row < t.n;
                stage_part<In>(w_stages + stage * COLUMNS * 64 + part_at(r, part), w + (u64)(valid ? row : 0) * t.k, k + part * 8, t.k,
                               valid, t.aligned);
            }
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
    for (u32 step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) load((step + STAGES - 1) % STAGES, step + STAGES - 1);
        copy_async_commit();
        const u8 *x_stage = x_stages + step % STAGES * ROWS * 64, *w_stage = w_stages + step % STAGES * COLUMNS * 64;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 a[TALL][4], b[WIDE / 2][4];
#pragma unroll
            for (int i = 0; i < TALL; i++) load_matrix4(a[i], x_stage + part_at(warp_row * WARP_ROWS + i * 16 + (lane & 15), half * 2 + (lane >> 4)));
#pragma unroll
            for (int j = 0; j < WIDE / 2; j++)
                load_matrix4(b[j], w_stage + part_at(warp_column * WARP_COLUMNS + j * 16 + (lane & 7) + (lane >> 4) * 8, half * 2 + ((lane >> 3) & 1)));
#pragma unroll
            for (int i = 0; i < TALL; i++)
#pragma unroll
                for (int j = 0; j < WIDE; j++) mma16816<Type>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }

    const u32 first_row = row_tile * ROWS + warp_row * WARP_ROWS + (lane >> 2);
    const u32 first_column = column_of_group(t, column_tile, COLUMNS, WARP_COLUMNS, warp_column) + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < TALL; i++) {
        u32 row = first_row + i * 16;
        float x_low = 1.0f, x_high = 1.0f;
        if (sizeof(In) == 1) {
            x_low = row < t.m ? t.x_scales[row * t.x_scale_stride] : 0.0f;
            x_high = row + 8 < t.m ? t.x_scales[(row + 8) * t.x_scale_stride] : 0.0f;
        }
        auto finish = [&](float (&v)[4], u32 column) {
#pragma unroll
            for (int side = 0; side < 2; side++) {
                if (sizeof(In) == 1) {
                    float scale = column + side < t.n ? t.w_scales[(column + side) * t.w_scale_stride] : 0.0f;
                    v[side] *= x_low * scale;
                    v[side + 2] *= x_high * scale;
                }
                v[side] = with_bias(t, v[side], column + side);
                v[side + 2] = with_bias(t, v[side + 2], column + side);
            }
        };
#pragma unroll
        for (int j = 0; j < WIDE; j++) {
            if (t.silu && j >= WIDE / 2) break;
            u32 column = first_column + j * 8;
            finish(sums[i][j], column);
            if (t.silu && j < WIDE / 2) {
                finish(sums[i][j + WIDE / 2], t.n / 2 + column);
#pragma unroll
                for (int e = 0; e < 4; e++) sums[i][j][e] = silu_of(sums[i][j][e]) * sums[i][j + WIDE / 2][e];
            }
            put2(t, row, column, sums[i][j][0], sums[i][j][1]);
            put2(t, row + 8, column, sums[i][j][2], sums[i][j][3]);
        }
    }
}

// ---- 32 bits ----------------------------------------------------------------------------------------------------
#define STEP32 16

// 256 threads, 16 x 16; each has the same small tile in both halves of the rows and of the columns.
template <int ROWS, int COLUMNS> DEVICE void gemm_plain(const GemmTask &t) {
    const int TALL = ROWS / 32, WIDE = COLUMNS / 32; // of a small tile
    __shared__ __align__(16) float x_step[STEP32][ROWS + 4], w_step[STEP32][COLUMNS + 4];
    const u32 down = threadIdx.x / 16, across = threadIdx.x % 16, row_tile = blockIdx.x, column_tile = blockIdx.y;
    const float *x = (const float *)t.x, *w = (const float *)t.w;
    wait_for_previous();
    allow_next();

    float sums[2 * TALL][2 * WIDE];
#pragma unroll
    for (int i = 0; i < 2 * TALL; i++)
#pragma unroll
        for (int j = 0; j < 2 * WIDE; j++) sums[i][j] = 0.0f;

    for (u32 k = 0; k < t.k; k += STEP32) {
        // Neighbouring threads take neighbouring elements of k, so that reads of a row come together.
        for (u32 i = threadIdx.x; i < (ROWS + COLUMNS) * STEP32; i += 256) {
            u32 r = i / STEP32, e = i % STEP32;
            bool inside = k + e < t.k;
            if (r < ROWS) {
                u32 row = row_tile * ROWS + r;
                x_step[e][r] = inside && row < t.m ? x[(u64)row * t.k + k + e] : 0.0f;
            } else {
                r -= ROWS;
                u32 row = row_of_w(t, column_tile, COLUMNS, COLUMNS, r);
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

    const u32 first_column = column_of_group(t, column_tile, COLUMNS, COLUMNS, 0);
#pragma unroll
    for (int i = 0; i < 2 * TALL; i++) {
        u32 row = row_tile * ROWS + i / TALL * (ROWS / 2) + down * TALL + i % TALL;
#pragma unroll
        for (int j = 0; j < 2 * WIDE; j++) {
            if (t.silu && j >= WIDE) break;
            u32 column = first_column + j / WIDE * (COLUMNS / 2) + across * WIDE + j % WIDE;
            float value = with_bias(t, sums[i][j], column);
            if (t.silu && j < WIDE) value = silu_of(value) * with_bias(t, sums[i][j + WIDE], t.n / 2 + column);
            put(t, row, column, value);
        }
    }
}

#define TENSOR(NAME, TYPE, ROWS, COLUMNS)                                                                               \
    KERNEL __launch_bounds__(256) NAME(const __grid_constant__ GemmTask t) { gemm_tensor<TYPE, ROWS, COLUMNS>(t); }
TENSOR(gemm_mma_128x128_bf16, bf16, 128, 128)
TENSOR(gemm_mma_128x128_f16, f16, 128, 128)
TENSOR(gemm_mma_128x128_fp8, fp8, 128, 128)
TENSOR(gemm_mma_32x64_bf16, bf16, 32, 64)
TENSOR(gemm_mma_32x64_f16, f16, 32, 64)
TENSOR(gemm_mma_32x64_fp8, fp8, 32, 64)
KERNEL __launch_bounds__(256) gemm_plain_128x128_f32(const __grid_constant__ GemmTask t) { gemm_plain<128, 128>(t); }
KERNEL __launch_bounds__(256) gemm_plain_32x64_f32(const __grid_constant__ GemmTask t) { gemm_plain<32, 64>(t); }
