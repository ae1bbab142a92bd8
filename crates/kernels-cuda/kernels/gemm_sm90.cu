// Matrix products on Hopper: out[m][n] = x[m][k] . w[n][k]^T.
//
// The copy engine brings tiles of x and w into shared memory, 128 bytes of k at a time and swizzled as the tensor cores
// want them. One thread issues those copies; two warpgroups multiply what has arrived. Blocks are persistent: each takes
// every gridDim-th tile, so the copies of the next tile run during the epilogue of the last one.
//
// A cluster does one of two things. As a pair, its blocks work on neighbouring rows, and each loads one half of their
// common w tile for both. As a split, its blocks share one tile and a range of k each; the partial sums are added in
// the order of the ranks through shared memory, so that results repeat.

struct alignas(64) TensorMap {
    u64 opaque[16];
};

struct GemmParams {
    const float *bias;     // [n], or null
    const float *x_scales; // e4m3 only: one per row, or one in all
    const float *w_scales; // e4m3 only: one per column, or one in all
    u64 *maxima;           // [m][tiles of columns]: the largest value of each row in each tile and its column; or null
    const u32 *spared;     // where it is not 0, nobody reads more than the maxima; or null
    u32 x_scale_stride;    // 1 or 0
    u32 w_scale_stride;
    u32 m, n;
    u32 k_steps; // of 128 bytes
    u32 out;     // see OUT_*
    u32 silu;    // 1: w is the gate's rows and then the up projection's; silu(gate) * up is written, n / 2 wide
    u32 keep;    // 1: L2 keeps the residual stream
    u32 pair;    // 1: clusters are pairs
    u32 split;   // blocks that share a tile; 1 unless clusters are splits
};

#define OUT_BF16 0
#define OUT_F16 1
#define OUT_F32 2
#define OUT_ADD_F32 3

// ---- barriers in shared memory ----------------------------------------------------------------------------------
// In the scope of a block, also between blocks: they only say when the copy engine may write and has written. In a wider
// scope every wait would throw all of L1 away, and every arrival wait for memory.
DEVICE void barrier_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE u32 in_block(u32 address, u32 rank) {
    u32 mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void barrier_arrive_in(u32 bar, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(bar, rank)) : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra finished;\n"
                 "bra again;\n"
                 "finished:\n"
                 "}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
DEVICE void barriers_are_initialised() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// All of the cluster have got here; says nothing of what they wrote.
DEVICE void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    asm volatile("barrier.cluster.wait;" ::: "memory");
}
// The same, and they see what the others wrote.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// Both warpgroups that multiply, and nobody else.
DEVICE void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// ---- the copy engine --------------------------------------------------------------------------------------------
DEVICE void prefetch_map(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
DEVICE void load_box(u32 to, const TensorMap *map, int column, int row, u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(bar)
                 : "memory");
}
// Weights are of no use to the kernels that follow: L2 drops them first and keeps what those read.
DEVICE u64 weights_policy() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE void load_weights(u32 to, const TensorMap *map, int column, int row, u32 bar, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(bar), "l"(policy)
                 : "memory");
}
// To the same place in both blocks of a pair.
DEVICE void load_weights_for_pair(u32 to, const TensorMap *map, int column, int row, u32 bar, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
                 " [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(bar), "h"((u16)3), "l"(policy)
                 : "memory");
}
DEVICE void store_box(const TensorMap *map, int column, int row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column), "r"(row), "r"(from)
                 : "memory");
}
DEVICE void add_box(const TensorMap *map, int column, int row, u32 from, u64 policy) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;" ::"l"(map),
                 "r"(column), "r"(row), "r"(from), "l"(policy)
                 : "memory");
}
DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the last PENDING stores have read their shared memory.
template <int PENDING> DEVICE void stores_wait() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
DEVICE void stores_see_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void store_matrix4(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void store_shared2(u32 to, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
DEVICE void store_shared4(u32 to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE void load_cluster4(float (&v)[4], u32 from) {
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from) : "memory");
}

// ---- the tensor cores -------------------------------------------------------------------------------------------
DEVICE void multiply_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void multiply_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// One warpgroup needs few registers, the others get them.
template <int COUNT> DEVICE void give_registers_back() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// A tile whose rows are 128 bytes, swizzled; groups of 8 rows are 1024 bytes apart.
DEVICE u64 tile_descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

// d[64][N] (+)= a[64][32 bytes] . b[N][32 bytes]^T. Lane l of warp i of the group has, for each 8 columns c, the rows
// 16 i + l / 4 and 8 more of the columns 8 c + 2 (l % 4) and 1 more: d[4c..4c+4].
template <typename T, int N> struct Multiply;
#define PLACES0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PLACES1 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PLACES2 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PLACES3 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PLACES4 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PLACES5 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define PLACES4A "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75"
#define PLACES5A "%80,%81,%82,%83,%84,%85,%86,%87"
#define PLACES6 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define PLACES7 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define VALUES16(b)                                                                                                    \
    "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), "+f"(d[b + 4]), "+f"(d[b + 5]), "+f"(d[b + 6]),           \
        "+f"(d[b + 7]), "+f"(d[b + 8]), "+f"(d[b + 9]), "+f"(d[b + 10]), "+f"(d[b + 11]), "+f"(d[b + 12]),                \
        "+f"(d[b + 13]), "+f"(d[b + 14]), "+f"(d[b + 15])
#define VALUES8(b)                                                                                                     \
    "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), "+f"(d[b + 4]), "+f"(d[b + 5]), "+f"(d[b + 6]), "+f"(d[b + 7])
#define VALUES4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define UNWRAP(...) __VA_ARGS__
#define MULTIPLY(T, N, KIND, ORDER, PLACES, A, B, KEEP, VALUES)                                                         \
    template <> struct Multiply<T, N> {                                                                                \
        static DEVICE void run(float (&d)[N / 2], u64 a, u64 b, u32 keep) {                                            \
            asm volatile("{.reg .pred keep;\n"                                                                         \
                         "setp.ne.u32 keep, %" KEEP ", 0;\n"                                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" PLACES "}, %" A ", %" B ", keep, 1, 1" ORDER \
                         ";}"                                                                                          \
                         : UNWRAP VALUES                                                                               \
                         : "l"(a), "l"(b), "r"(keep));                                                                 \
        }                                                                                                              \
    };
#define MULTIPLY_ALL(T, KIND, ORDER)                                                                                    \
    MULTIPLY(T, 64, KIND, ORDER, PLACES0 "," PLACES1, "32", "33", "34", (VALUES16(0), VALUES16(16))) \
    MULTIPLY(T, 128, KIND, ORDER, PLACES0 "," PLACES1 "," PLACES2 "," PLACES3, "64", "65", "66", (VALUES16(0), VALUES16(16), VALUES16(32), VALUES16(48))) \
    MULTIPLY(T, 152, KIND, ORDER, PLACES0 "," PLACES1 "," PLACES2 "," PLACES3 "," PLACES4A, "76", "77", "78", (VALUES16(0), VALUES16(16), VALUES16(32), VALUES16(48), VALUES8(64), VALUES4(72))) \
    MULTIPLY(T, 160, KIND, ORDER, PLACES0 "," PLACES1 "," PLACES2 "," PLACES3 "," PLACES4, "80", "81", "82", (VALUES16(0), VALUES16(16), VALUES16(32), VALUES16(48), VALUES16(64))) \
    MULTIPLY(T, 176, KIND, ORDER, PLACES0 "," PLACES1 "," PLACES2 "," PLACES3 "," PLACES4 "," PLACES5A, "88", "89", "90", (VALUES16(0), VALUES16(16), VALUES16(32), VALUES16(48), VALUES16(64), VALUES8(80))) \
    MULTIPLY(T, 192, KIND, ORDER, PLACES0 "," PLACES1 "," PLACES2 "," PLACES3 "," PLACES4 "," PLACES5, "96", "97", "98", (VALUES16(0), VALUES16(16), VALUES16(32), VALUES16(48), VALUES16(64), VALUES16(80))) \
    MULTIPLY(T, 256, KIND, ORDER, PLACES0 "," PLACES1 "," PLACES2 "," PLACES3 "," PLACES4 "," PLACES5 "," PLACES6 "," PLACES7, "128", "129", "130", (VALUES16(0), VALUES16(16), VALUES16(32), VALUES16(48), VALUES16(64), VALUES16(80), VALUES16(96), VALUES16(112)))
#if GEMM_TYPE == 0
typedef bf16 Element;
MULTIPLY_ALL(bf16, "k16.f32.bf16.bf16", ", 0, 0")
#elif GEMM_TYPE == 1
typedef f16 Element;
MULTIPLY_ALL(f16, "k16.f32.f16.f16", ", 0, 0")
#else
typedef fp8 Element;
MULTIPLY_ALL(fp8, "k32.f32.e4m3.e4m3", "")
#endif

// ---- the kernel -------------------------------------------------------------------------------------------------
// WM x WN warpgroups, each 64 rows by N columns, STAGES tiles in flight. A large tile has a multiprocessor for itself. Of
// small ones there is room for two: one loads while the other finishes, be it of the same launch or of the next.
template <int WM, int WN, int N, int STAGES, bool SMALL> struct Tile {
    static constexpr int ROWS = 64 * WM, COLUMNS = WN * N;
    static constexpr int X_BYTES = ROWS * 128, W_BYTES = COLUMNS * 128;
    // w comes in boxes of half a warpgroup's columns: of the gate and of up, or both halves. Where those would not be whole
    // groups of 8 rows, it comes in one.
    static constexpr int BOX_ROWS = N % 16 == 0 ? N / 2 : N;
    static constexpr int WARP_STAGING = SMALL ? 2048 : 4096;
    static constexpr int STAGING = STAGES * (X_BYTES + W_BYTES), BARRIERS = STAGING + 8 * WARP_STAGING;
    static constexpr int BYTES = BARRIERS + STAGES * 16;
};

struct Place {
    u32 row_tile, column_tile;
};

// Tiles in an order in which those that run together share rows and columns, so that L2 serves them: down a band of
// 2048 rows, then to the next columns.
template <int ROWS> DEVICE Place place_of(u32 tile, u32 row_tiles, u32 column_tiles) {
    const u32 band = 2048 / ROWS;
    u32 first = tile / (band * column_tiles) * band, rest = tile % (band * column_tiles);
    u32 height = min(band, row_tiles - first);
    return {first + rest % height, rest / height};
}

DEVICE float silu_of(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// What is left to do once a warpgroup has its 64 x N sums: by the warp's own 16 rows, 32 columns at a time.
template <int N, bool SMALL, bool SPLIT> struct Epilogue {
    const GemmParams &p;
    const TensorMap *out_map;
    u32 staging;   // this warp's buffers: 32 columns take 2048 bytes in 32 bits, 1024 in 16
    u32 partial;   // of this thread, in every block of the cluster: sums of column group c are 2048 c bytes on
    u32 rank, row, column, column_up; // first row of the warp, first column in w of the warpgroup
    u32 lane;
    u32 turn;
    float scale_low, scale_high;

    DEVICE void fetch(float (&v)[4], const float (&d)[N / 2], int c, u32 column) {
        if (SPLIT) {
            v[0] = v[1] = v[2] = v[3] = 0.0f;
            for (u32 from = 0; from < p.split; from++) {
                float part[4];
                load_cluster4(part, in_block(partial + 2048 * c, from));
                for (int i = 0; i < 4; i++) v[i] += part[i];
            }
        } else {
            for (int i = 0; i < 4; i++) v[i] = d[4 * c + i];
        }
        u32 mine = column + 2 * (lane & 3);
        if (sizeof(Element) == 1) {
            float left = 0.0f, right = 0.0f;
            if (mine < p.n) {
                left = p.w_scales[mine * p.w_scale_stride];
                right = p.w_scales[(mine + 1) * p.w_scale_stride];
            }
            v[0] *= scale_low * left;
            v[1] *= scale_low * right;
            v[2] *= scale_high * left;
            v[3] *= scale_high * right;
        }
        if (p.bias && mine < p.n) {
            float left = p.bias[mine], right = p.bias[mine + 1];
            v[0] += left;
            v[1] += right;
            v[2] += left;
            v[3] += right;
        }
    }

    DEVICE void write(const float (&v)[4][4], u32 out_column) {
        const bool wide = p.out > OUT_F16, alone = SMALL && wide;
        const u32 buffer = staging + (alone ? 0 : turn * (wide ? 2048 : 1024));
        turn ^= 1;
        if (lane == 0) {
            if (alone) stores_wait<0>();
            else stores_wait<1>();
        }
        __syncwarp();
        if (!wide) {
            // Rows of 64 bytes; pairs of rows swizzle their four 16-byte parts.
            u32 line = lane & 15, part = lane >> 4;
            for (int i = 0; i < 4; i += 2) {
                u32 to = buffer + line * 64 + (((i + part) ^ ((line >> 1) & 3)) << 4);
                if (p.out == OUT_BF16) {
                    store_matrix4(to, pack2<bf16>(v[i][0], v[i][1]), pack2<bf16>(v[i][2], v[i][3]), pack2<bf16>(v[i + 1][0], v[i + 1][1]),
                                  pack2<bf16>(v[i + 1][2], v[i + 1][3]));
                } else {
                    store_matrix4(to, pack2<f16>(v[i][0], v[i][1]), pack2<f16>(v[i][2], v[i][3]), pack2<f16>(v[i + 1][0], v[i + 1][1]),
                                  pack2<f16>(v[i + 1][2], v[i + 1][3]));
                }
            }
        } else {
            // Rows of 128 bytes; each row swizzles its eight 16-byte parts. Row 8 more has the same pattern.
            u32 line = lane >> 2;
            for (int i = 0; i < 4; i++) {
                u32 to = buffer + line * 128 + (((2 * i + ((lane >> 1) & 1)) ^ line) << 4) + (lane & 1) * 8;
                store_shared2(to, v[i][0], v[i][1]);
                store_shared2(to + 1024, v[i][2], v[i][3]);
            }
        }
        stores_see_shared();
        __syncwarp();
        if (lane == 0) {
            if (p.out == OUT_ADD_F32) add_box(out_map, out_column, row, buffer, residual_policy(p.keep));
            else store_box(out_map, out_column, row, buffer);
            stores_commit();
        }
    }

    DEVICE void run(const float (&d)[N / 2], u32 out_column) {
        if (sizeof(Element) == 1) {
            u32 low = row + (lane >> 2), high = low + 8;
            scale_low = low < p.m ? p.x_scales[low * p.x_scale_stride] : 0.0f;
            scale_high = high < p.m ? p.x_scales[high * p.x_scale_stride] : 0.0f;
        }
        // Groups of 8 columns, four at a time. The last four may begin among those before them, and are written twice then.
        constexpr int GROUPS = N / 8, HALF = N / 16;
#pragma unroll
        for (int chunk = 0; chunk < (GROUPS + 3) / 4; chunk++) {
            if (p.silu && chunk >= (HALF + 3) / 4) break;
            if (SPLIT && chunk % p.split != rank) continue;
            float v[4][4];
            if (p.silu) {
                constexpr int LAST = HALF - 4;
                const int first = 4 * chunk < LAST ? 4 * chunk : LAST;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float up[4];
                    fetch(v[i], d, first + i, column + 8 * (first + i));
                    fetch(up, d, first + i + HALF, column_up + 8 * (first + i));
                    for (int j = 0; j < 4; j++) v[i][j] = silu_of(v[i][j]) * up[j];
                }
                write(v, out_column + 8 * first);
            } else {
                constexpr int LAST = GROUPS - 4;
                const int first = 4 * chunk < LAST ? 4 * chunk : LAST;
#pragma unroll
                for (int i = 0; i < 4; i++) fetch(v[i], d, first + i, column + 8 * (first + i));
                write(v, out_column + 8 * first);
            }
        }
    }
};

template <int WM, int WN, int N, int STAGES, bool SMALL>
DEVICE void gemm(const TensorMap &x_map, const TensorMap &w_map, const TensorMap &out_map, const GemmParams &p) {
    typedef Tile<WM, WN, N, STAGES, SMALL> Shape;
    DYNAMIC_SHARED(memory);
    const u32 x_tiles = shared_address(memory), w_tiles = x_tiles + STAGES * Shape::X_BYTES;
    const u32 full = x_tiles + Shape::BARRIERS, empty = full + STAGES * 8;
    const u32 group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), lane = threadIdx.x & 31;
    const u32 rank = p.pair || p.split > 1 ? cluster_rank() : 0;
    const u32 cluster = p.pair ? 2 : p.split;

    if (threadIdx.x == 0) {
        prefetch_map(&x_map);
        prefetch_map(&w_map);
        prefetch_map(&out_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, p.pair ? 16 : 8); // every warp that multiplies from this stage
        }
        barriers_are_initialised();
    }
    __syncthreads();
    if (p.pair) cluster_meet();

    const u32 width = p.silu ? p.n / 2 : p.n, tile_width = p.silu ? Shape::COLUMNS / 2 : Shape::COLUMNS;
    const u32 column_tiles = (width + tile_width - 1) / tile_width;
    // A pair takes two tiles of rows at once; the second of the last pair may be empty.
    const u32 row_tiles = p.pair ? ((p.m + 2 * Shape::ROWS - 1) / (2 * Shape::ROWS)) : (p.m + Shape::ROWS - 1) / Shape::ROWS;
    const u32 tiles = row_tiles * column_tiles, first_tile = blockIdx.x / cluster, tile_step = gridDim.x / cluster;
    const u32 k_begin = p.split > 1 ? p.k_steps * rank / p.split : 0;
    const u32 k_end = p.split > 1 ? p.k_steps * (rank + 1) / p.split : p.k_steps;
    const int k_step = 128 / sizeof(Element);

    if (group == 2) {
        if (!SMALL) give_registers_back<40>();
        if (threadIdx.x == 256) {
            const u64 policy = weights_policy();
            auto load_w = [&](u32 stage, u32 column_tile, u32 k) {
#pragma unroll
                for (int box = 0; box < 2 * WN; box++) {
                    u32 half = box & 1, to = w_tiles + stage * Shape::W_BYTES + box * Shape::BOX_ROWS * 128;
                    u32 row = p.silu ? half * width + column_tile * (Shape::COLUMNS / 2) + (box / 2) * Shape::BOX_ROWS
                                     : column_tile * Shape::COLUMNS + box * Shape::BOX_ROWS;
                    if (!p.pair) load_weights(to, &w_map, k * k_step, row, full + 8 * stage, policy);
                    else if (half == rank) load_weights_for_pair(to, &w_map, k * k_step, row, full + 8 * stage, policy);
                }
            };
            auto load_x = [&](u32 stage, u32 row_tile, u32 k) {
                load_box(x_tiles + stage * Shape::X_BYTES, &x_map, k * k_step, row_tile * Shape::ROWS, full + 8 * stage);
            };
            // Weights do not depend on the launch before this one: fill all stages with them before waiting for it.
            u32 early = 0;
            if (first_tile < tiles) {
                Place at = place_of<Shape::ROWS>(first_tile, row_tiles, column_tiles);
                early = min((u32)STAGES, k_end - k_begin);
                for (u32 i = 0; i < early; i++) {
                    barrier_expect(full + 8 * i, Shape::X_BYTES + Shape::W_BYTES);
                    load_w(i, at.column_tile, k_begin + i);
                }
            }
            wait_for_previous();
            u32 stage = 0, parity = 1;
            for (u32 tile = first_tile; tile < tiles; tile += tile_step) {
                Place at = place_of<Shape::ROWS>(tile, row_tiles, column_tiles);
                u32 row_tile = p.pair ? 2 * at.row_tile + rank : at.row_tile;
                for (u32 k = k_begin; k < k_end; k++) {
                    if (early) {
                        early--;
                    } else {
                        barrier_wait(empty + 8 * stage, parity);
                        barrier_expect(full + 8 * stage, Shape::X_BYTES + Shape::W_BYTES);
                        load_w(stage, at.column_tile, k);
                    }
                    load_x(stage, row_tile, k);
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
            allow_next();
        }
        __syncwarp();
        // The other blocks of a cluster still read this one's memory or arrive at its barriers.
        if (p.split > 1) cluster_sync();
        if (cluster > 1) cluster_meet();
    } else {
        if (!SMALL) take_registers<232>();
        const u32 worker = group, warp = (threadIdx.x / 32) & 3;
        const u32 worker_row = worker % WM, worker_column = worker / WM;
        const u64 x_at = tile_descriptor(x_tiles + worker_row * 64 * 128), w_at = tile_descriptor(w_tiles + worker_column * N * 128);
        const u32 staging = x_tiles + Shape::STAGING + (worker * 4 + warp) * Shape::WARP_STAGING;
        float d[N / 2];
        auto release = [&](u32 stage) {
            if (p.pair) {
                if (lane < 2) barrier_arrive_in(empty + 8 * stage, lane);
            } else if (lane == 0) {
                barrier_arrive(empty + 8 * stage);
            }
        };
        u32 stage = 0, parity = 0, turn = 0;
        wait_for_previous();
        for (u32 tile = first_tile; tile < tiles; tile += tile_step) {
            Place at = place_of<Shape::ROWS>(tile, row_tiles, column_tiles);
            u32 row_tile = p.pair ? 2 * at.row_tile + rank : at.row_tile;
            u32 before = 0;
            for (u32 k = k_begin; k < k_end; k++) {
                barrier_wait(full + 8 * stage, parity);
                multiply_begin();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    Multiply<Element, N>::run(d, x_at + (stage * Shape::X_BYTES + 32 * i) / 16,
                                              w_at + (stage * Shape::W_BYTES + 32 * i) / 16, i > 0 || k > k_begin);
                }
                multiply_commit();
                if (k > k_begin) {
                    multiply_wait<1>();
                    release(before);
                }
                before = stage;
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            multiply_wait<0>();
            release(before);

            const u32 column = at.column_tile * tile_width + worker_column * (p.silu ? N / 2 : N);
            const u32 row = row_tile * Shape::ROWS + worker_row * 64 + warp * 16;
            if (p.split > 1) {
                consumers_sync(); // the partial sums go where the tiles were
                const u32 partial = x_tiles + worker * (64 * N * 4) + (threadIdx.x & 127) * 16;
#pragma unroll
                for (int c = 0; c < N / 8; c++) store_shared4(partial + 2048 * c, d[4 * c], d[4 * c + 1], d[4 * c + 2], d[4 * c + 3]);
                cluster_sync();
                Epilogue<N, SMALL, true> rest{p, &out_map, staging, partial, rank, row, column, width + column, lane, turn, 1.0f, 1.0f};
                rest.run(d, column);
            } else {
                Epilogue<N, SMALL, false> rest{p, &out_map, staging, 0, rank, row, column, width + column, lane, turn, 1.0f, 1.0f};
                rest.run(d, column);
                turn = rest.turn;
            }
        }
        if (lane == 0) stores_wait<0>();
        if (cluster > 1) cluster_meet();
    }
}

// The first of the largest values of each row of 64 x N sums, as the sampler keeps them: a value's bits, then its column.
// Where there is none above minus infinity the column is that of nobody.
template <int N> DEVICE void keep_maxima(const GemmParams &p, const float (&d)[N / 2], u32 row, u32 column, u32 lane, u32 tile, u32 tiles) {
    const u32 first = column + 2 * (lane & 3);
#pragma unroll
    for (int high = 0; high < 2; high++) {
        float best = -infinity();
        u32 at = ~0u;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const float value = d[4 * (i / 2) + 2 * high + i % 2];
            const u32 id = first + 8 * (i / 2) + i % 2;
            if (value > best && id < p.n) {
                best = value;
                at = id;
            }
        }
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            const float other = __shfl_xor_sync(FULL_WARP, best, step);
            const u32 other_at = __shfl_xor_sync(FULL_WARP, at, step);
            if (other > best || (other == best && other_at < at)) {
                best = other;
                at = other_at;
            }
        }
        const u32 mine = row + 8 * high + (lane >> 2);
        if ((lane & 3) == 0 && mine < p.m) p.maxima[(u64)mine * tiles + tile] = ((u64)__float_as_uint(best) << 32) | at;
    }
}

// The same with the two warpgroups taking turns: each multiplies whole tiles, and while it writes one, the other has the
// tensor cores. Worth it where a multiprocessor has several tiles to do; no clusters.
DEVICE void wait_for_turn(u32 group) { asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory"); }
DEVICE void pass_turn_to(u32 group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 + group) : "memory"); }

template <int N, int STAGES>
DEVICE void gemm_in_turns(const TensorMap &x_map, const TensorMap &w_map, const TensorMap &out_map, const GemmParams &p) {
    typedef Tile<2, 1, N, STAGES, false> Shape;
    DYNAMIC_SHARED(memory);
    const u32 x_tiles = shared_address(memory), w_tiles = x_tiles + STAGES * Shape::X_BYTES;
    const u32 full = x_tiles + Shape::BARRIERS, empty = full + STAGES * 8;
    const u32 group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        prefetch_map(&x_map);
        prefetch_map(&w_map);
        prefetch_map(&out_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 4); // the warps of the group whose tile it is
        }
        barriers_are_initialised();
    }
    __syncthreads();

    const u32 width = p.silu ? p.n / 2 : p.n, tile_width = p.silu ? N / 2 : N;
    const u32 column_tiles = (width + tile_width - 1) / tile_width, row_tiles = (p.m + Shape::ROWS - 1) / Shape::ROWS;
    const u32 tiles = row_tiles * column_tiles;
    const int k_step = 128 / sizeof(Element);

    if (group == 2) {
        give_registers_back<24>();
        if (threadIdx.x == 256) {
            const u64 policy = weights_policy();
            auto load_w = [&](u32 stage, u32 column_tile, u32 k) {
#pragma unroll
                for (int half = 0; half < (N % 16 == 0 ? 2 : 1); half++) {
                    u32 row = column_tile * tile_width + half * (p.silu ? width : Shape::BOX_ROWS);
                    load_weights(w_tiles + stage * Shape::W_BYTES + half * Shape::BOX_ROWS * 128, &w_map, k * k_step, row,
                                 full + 8 * stage, policy);
                }
            };
            // As above: weights first, before waiting for what writes x.
            u32 early = min((u32)STAGES, p.k_steps);
            Place at = place_of<Shape::ROWS>(blockIdx.x, row_tiles, column_tiles);
            for (u32 i = 0; i < early; i++) {
                barrier_expect(full + 8 * i, Shape::X_BYTES + Shape::W_BYTES);
                load_w(i, at.column_tile, i);
            }
            wait_for_previous();
            u32 stage = 0, parity = 1;
            for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                at = place_of<Shape::ROWS>(tile, row_tiles, column_tiles);
                for (u32 k = 0; k < p.k_steps; k++) {
                    if (early) {
                        early--;
                    } else {
                        barrier_wait(empty + 8 * stage, parity);
                        barrier_expect(full + 8 * stage, Shape::X_BYTES + Shape::W_BYTES);
                        load_w(stage, at.column_tile, k);
                    }
                    load_box(x_tiles + stage * Shape::X_BYTES, &x_map, k * k_step, at.row_tile * Shape::ROWS, full + 8 * stage);
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
            allow_next();
        }
    } else {
        take_registers<240>();
        const u32 warp = (threadIdx.x / 32) & 3;
        const u64 x_at = tile_descriptor(x_tiles), w_at = tile_descriptor(w_tiles);
        const u32 staging = x_tiles + Shape::STAGING + (group * 4 + warp) * Shape::WARP_STAGING;
        float upper[N / 2], lower[N / 2]; // the first 64 rows of a tile, and the others
        u32 stage = 0, parity = 0, turn = 0;
        auto skip_tile = [&] {
            u32 steps = stage + p.k_steps;
            parity ^= (steps / STAGES) & 1;
            stage = steps % STAGES;
        };
        if (group == 1) {
            skip_tile();
            pass_turn_to(0);
        }
        wait_for_previous();
        for (u32 tile = blockIdx.x + group * gridDim.x; tile < tiles; tile += 2 * gridDim.x) {
            Place at = place_of<Shape::ROWS>(tile, row_tiles, column_tiles);
            wait_for_turn(group);
            u32 before = 0;
            for (u32 k = 0; k < p.k_steps; k++) {
                barrier_wait(full + 8 * stage, parity);
                multiply_begin();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u64 x = x_at + (stage * Shape::X_BYTES + 32 * i) / 16, w = w_at + (stage * Shape::W_BYTES + 32 * i) / 16;
                    Multiply<Element, N>::run(upper, x, w, i > 0 || k > 0);
                    Multiply<Element, N>::run(lower, x + 64 * 128 / 16, w, i > 0 || k > 0);
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
            pass_turn_to(1 - group);
            multiply_wait<0>();
            if (lane == 0) barrier_arrive(empty + 8 * before);
            skip_tile();
            const u32 column = at.column_tile * tile_width, row = at.row_tile * Shape::ROWS + warp * 16;
            if (p.maxima) {
                keep_maxima<N>(p, upper, row, column, lane, at.column_tile, column_tiles);
                keep_maxima<N>(p, lower, row + 64, column, lane, at.column_tile, column_tiles);
                if (p.spared && *p.spared) continue;
            }
            Epilogue<N, false, false> rest{p, &out_map, staging, 0, 0, row, column, width + column, lane, turn, 1.0f, 1.0f};
            rest.run(upper, column);
            rest.row += 64;
            rest.run(lower, column);
            turn = rest.turn;
        }
        if (lane == 0) stores_wait<0>();
    }
}

#define GEMM(NAME, WM, WN, N, STAGES, SMALL)                                                                            \
    KERNEL __launch_bounds__(SMALL ? 288 : 384, SMALL ? 2 : 1)                                                                        \
        NAME(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,                           \
             const __grid_constant__ TensorMap out_map, const __grid_constant__ GemmParams p) {                          \
        gemm<WM, WN, N, STAGES, SMALL>(x_map, w_map, out_map, p);                                                        \
    }
#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#if GEMM_TYPE == 0
#define NAME(tile) JOIN(JOIN(gemm, tile), bf16)
#elif GEMM_TYPE == 1
#define NAME(tile) JOIN(JOIN(gemm, tile), f16)
#else
#define NAME(tile) JOIN(JOIN(gemm, tile), fp8)
#endif
#ifndef GEMM_EXPERTS // which have kernels of their own, in moe_sm90.cu
GEMM(NAME(128x256), 2, 1, 256, 4, false)
GEMM(NAME(128x192), 2, 1, 192, 4, false)
GEMM(NAME(128x176), 2, 1, 176, 5, false)
GEMM(NAME(128x160), 2, 1, 160, 5, false)
GEMM(NAME(128x128), 2, 1, 128, 6, false)
GEMM(NAME(64x256), 1, 2, 128, 4, false)
GEMM(NAME(small_128x128), 2, 1, 128, 3, true)
GEMM(NAME(small_128x64), 2, 1, 64, 4, true)
GEMM(NAME(small_64x128), 1, 2, 64, 4, true)
#define GEMM_IN_TURNS(NAME, N, STAGES)                                                                                  \
    KERNEL __launch_bounds__(384, 1) NAME(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, \
                                          const __grid_constant__ TensorMap out_map, const __grid_constant__ GemmParams p) { \
        gemm_in_turns<N, STAGES>(x_map, w_map, out_map, p);                                                              \
    }
GEMM_IN_TURNS(NAME(turns_128x192), 192, 4)
GEMM_IN_TURNS(NAME(turns_128x176), 176, 5)
GEMM_IN_TURNS(NAME(turns_128x160), 160, 5)
GEMM_IN_TURNS(NAME(turns_128x152), 152, 5)
GEMM_IN_TURNS(NAME(turns_128x128), 128, 6)
#endif
