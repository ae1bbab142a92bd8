// Products of few rows with a large weight matrix, as decoding makes them: out[m][n] = x[m][k] . w[n][k]^T, m <= 64.
// The weights are read once, and reading them is the whole cost, so everything here is about never letting memory wait:
// each block owns a fixed share of the weights, starts fetching it before the kernel in front has ended, and has the
// work around the product (norm in front; bias, residual, activation behind) done on the way.
//
// Tensor cores multiply. The weights are their 16-row operand, the rows of x the 8-wide one, which a single row fills
// to an eighth: that costs nothing, and it makes an output the same however many rows are computed with it. The order
// of k within a product is free as long as both operands agree on it, so each lane takes 16 neighbouring bytes of a
// weight row and the matching elements of x.

// 0: bf16 and f32, 1: f16.
#ifndef SKINNY_TYPE
#define SKINNY_TYPE 0
#endif

#define THREADS 256
#define WARPS 8
// Bytes of a weight row in one piece of work.
#define CHUNK_BYTES 128

// The same layout as the host's `Arguments`.
struct SkinnyArgs {
    const void *x;            // T [m][k]; with a norm: float [m][k]
    const float *norm_weight; // null: x is taken as it is
    const void *w;            // T or fp8 [n][k]
    const float *scales;      // of the rows of w, or null
    const float *bias;        // [n], or null
    void *out;
    float eps;
    u32 m, n, k;
    u32 output;     // what becomes of the sums, one of OUT_*
    u32 x_at;       // offset into shared memory of x, where it is kept
    u32 ring_at;    // offset of the slots that the weights pass through
    u32 l2_ahead;   // pieces of work per warp to be fetched into L2 beyond the ring
    u32 early;      // pieces of work per warp not yet asked for when the next kernel may begin
    u32 tile_rows;  // of the tile kernel: weight rows of one pass,
    u32 slot_bytes; // bytes of a slot,
    u32 stages;     // and slots
};

#define OUT_STORE 0
#define OUT_STORE_F32 1
#define OUT_ADD 2
#define OUT_SILU 3

// ---- shares of the output ---------------------------------------------------------------------------------------
// A unit is an output column: a weight row, or with OUT_SILU a gate row and its up row.
struct Share {
    u32 first, count, groups, size_less, one_more; // the first `one_more` groups are one larger than the others
    DEVICE Share(const SkinnyArgs &a, u32 part, u32 parts, u32 group_units) {
        u32 units = a.output == OUT_SILU ? a.n / 2 : a.n;
        first = (u32)((u64)units * part / parts);
        count = (u32)((u64)units * (part + 1) / parts) - first;
        groups = (count + group_units - 1) / group_units;
        size_less = groups > 0 ? count / groups : 0;
        one_more = count - size_less * groups;
    }
    DEVICE u32 begin(u32 group) const { return first + group * size_less + (group < one_more ? group : one_more); }
    DEVICE u32 size(u32 group) const { return size_less + (group < one_more ? 1 : 0); }
};

// ---- what becomes of a sum --------------------------------------------------------------------------------------
// Fetched before the sums are there, so that nothing is waited for at the end.
struct Finish {
    float scale[2], bias[2], old;
    DEVICE void fetch(const SkinnyArgs &a, u32 token, u32 unit) {
        u32 up = unit + (a.output == OUT_SILU ? a.n / 2 : 0);
        scale[0] = a.scales ? a.scales[unit] : 1.0f;
        scale[1] = a.scales ? a.scales[up] : 1.0f;
        bias[0] = a.bias ? a.bias[unit] : 0.0f;
        bias[1] = a.bias ? a.bias[up] : 0.0f;
        old = a.output == OUT_ADD ? ((const float *)a.out)[(u64)token * a.n + unit] : 0.0f;
    }
    template <typename T> DEVICE void store(const SkinnyArgs &a, u32 token, u32 unit, float value, float up) const {
        value = value * scale[0] + bias[0];
        if (a.output == OUT_SILU) {
            up = up * scale[1] + bias[1];
            ((T *)a.out)[(u64)token * (a.n / 2) + unit] = Cast<T>::from(value / (1.0f + __expf(-value)) * up);
        } else if (a.output == OUT_STORE) {
            ((T *)a.out)[(u64)token * a.n + unit] = Cast<T>::from(value);
        } else {
            ((float *)a.out)[(u64)token * a.n + unit] = old + value;
        }
    }
};

// ---- operands in shared memory ----------------------------------------------------------------------------------
// 16-byte pieces are swapped between neighbouring rows so that a quarter of a warp, which reads two rows, meets every
// bank once.
template <typename W> struct Layout {
    static const u32 x_pieces = CHUNK_BYTES / sizeof(W) / 8; // 16-byte pieces of x that go with a chunk
    static const u32 swap = sizeof(W) == 2 ? 4 : 1;
    static DEVICE u32 x_offset(u32 token, u32 piece) { return (piece ^ ((token & 1) * swap)) << 4; }
};

// A lane's 16 bytes of weight row r and of row r + 8 as operands of successive products.
template <typename T, typename W> DEVICE void weight_registers(u32 (&a)[4 / sizeof(W)][4], bytes16 low, bytes16 high) {
    const u32 l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
    if constexpr (sizeof(W) == 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[i][0] = l[2 * i], a[i][1] = h[2 * i], a[i][2] = l[2 * i + 1], a[i][3] = h[2 * i + 1];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            fp8_to_pairs<T>(l[i], a[i][0], a[i][2]);
            fp8_to_pairs<T>(h[i], a[i][1], a[i][3]);
        }
    }
}

// ---- up to 16 rows: every warp streams its own slices of k -------------------------------------------------------
// A piece of work is 16 weight rows (a group) by 256 bytes; a warp takes every eighth piece of its block's groups, so
// that each warp needs the same slices of x for every group.
#define PIECE_BYTES 256
#define SLOTS 3

// Bytes of x that go with a piece, in one row.
template <typename W> DEVICE u32 x_piece_bytes() { return PIECE_BYTES / (u32)sizeof(W) * 2; }
DEVICE u32 pieces_of(u32 row_bytes) { return (row_bytes + PIECE_BYTES - 1) / PIECE_BYTES; }

// A plain x that is needed several times is kept in shared memory, zeroes behind its end.
template <typename W> DEVICE void keep_plain_x(const SkinnyArgs &a, u8 *x, u32 pitch) {
    const u32 real = a.k / 8;
    for (u32 token = 0; token < a.m; token++) {
#pragma unroll 2
        for (u32 i = threadIdx.x; i < pitch / 16; i += THREADS) {
            bytes16 v = {0, 0, 0, 0};
            if (i < real) v = ((const bytes16 *)a.x)[(u64)token * real + i];
            *(bytes16 *)(x + token * pitch + Layout<W>::x_offset(token, i)) = v;
        }
    }
}

// x = norm(hidden) * weight, the weight from shared memory. A row is shared by as many warps as there are to spare.
// `squares` holds WARPS floats per row of x. The first of SLOTS groups of copies brings the weight.
template <typename T, typename W>
DEVICE void keep_norm_x(const SkinnyArgs &a, u8 *x, u32 pitch, const float *weight, float *squares) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 rows_at_once = 1;
    while (rows_at_once < a.m && rows_at_once < WARPS) rows_at_once *= 2;
    const u32 team = WARPS / rows_at_once, member = warp % team, quads = a.k / 4, step = team * 32;
    const float4 none = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 token = warp / team; token < a.m; token += rows_at_once) {
        const float4 *hidden = (const float4 *)((const float *)a.x + (u64)token * a.k);
        float sum = 0.0f;
        for (u32 i = member * 32 + lane; i < quads; i += 4 * step) {
            float4 h[4];
#pragma unroll
            for (int j = 0; j < 4; j++) h[j] = i + j * step < quads ? hidden[i + j * step] : none;
#pragma unroll
            for (int j = 0; j < 4; j++) sum += h[j].x * h[j].x + h[j].y * h[j].y + h[j].z * h[j].z + h[j].w * h[j].w;
        }
        sum = warp_sum(sum);
        if (lane == 0) squares[token * WARPS + member] = sum;
    }
    copy_async_wait<SLOTS - 1>();
    __syncthreads();
    for (u32 token = warp / team; token < a.m; token += rows_at_once) {
        const float4 *hidden = (const float4 *)((const float *)a.x + (u64)token * a.k);
        float sum = 0.0f;
        for (u32 i = 0; i < team; i++) sum += squares[token * WARPS + i];
        const float factor = rsqrtf(sum / (float)a.k + a.eps);
        for (u32 i = member * 32 + lane; i < pitch / 8; i += 4 * step) {
            float4 h[4];
#pragma unroll
            for (int j = 0; j < 4; j++) h[j] = i + j * step < quads ? hidden[i + j * step] : none;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 at = i + j * step;
                float4 g = at < quads ? ((const float4 *)weight)[at] : none;
                bytes8 v;
                v.x = pack2<T>(h[j].x * factor * g.x, h[j].y * factor * g.y);
                v.y = pack2<T>(h[j].z * factor * g.z, h[j].w * factor * g.w);
                if (at < pitch / 8) *(bytes8 *)(x + token * pitch + Layout<W>::x_offset(token, at / 2) + at % 2 * 8) = v;
            }
        }
    }
}

// A lane's part of x for one piece: [8 rows of x][quarter of the piece][register].
template <typename W, int MT> struct XPart {
    static const int LOADS = 2 / sizeof(W); // of 16 bytes per quarter
    bytes16 b[MT][4][LOADS];
    // From global memory; zeroes behind the end.
    DEVICE void fetch(const SkinnyArgs &a, u32 piece) {
        const u32 lane = threadIdx.x & 31;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            u32 token = mt * 8 + (lane >> 2);
            token = token < a.m ? token : a.m - 1;
            const u8 *row = (const u8 *)a.x + (u64)token * a.k * 2;
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
                for (int i = 0; i < LOADS; i++) {
                    u32 at = piece * x_piece_bytes<W>() + (((lane & 3) + quarter * 4) * LOADS + i) * 16;
                    b[mt][quarter][i] = {0, 0, 0, 0};
                    if (at < a.k * 2) b[mt][quarter][i] = *(const bytes16 *)(row + at);
                }
            }
        }
    }
    // From where the whole of x is kept.
    DEVICE void take(u32 m, u32 kept, u32 pitch, u32 piece) {
        const u32 lane = threadIdx.x & 31;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            u32 token = mt * 8 + (lane >> 2);
            token = token < m ? token : m - 1;
            u32 row = kept + token * pitch + piece * x_piece_bytes<W>();
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
                for (int i = 0; i < LOADS; i++) {
                    b[mt][quarter][i] = load_shared16(row + Layout<W>::x_offset(token, ((lane & 3) + quarter * 4) * LOADS + i));
                }
            }
        }
    }
};

// acc += a piece's weights in the slot at `w` . x, in two sums, so that products need not wait for each other.
template <typename T, typename W, int MT> DEVICE void multiply_piece(float (&acc)[2][MT][4], u32 w, const XPart<W, MT> &x) {
    const u32 lane = threadIdx.x & 31, row = lane >> 2;
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) {
        u32 at = w + row * PIECE_BYTES + ((((lane & 3) + quarter * 4) ^ ((row & 1) << 2)) << 4);
        bytes16 low = load_shared16(at), high = load_shared16(at + 8 * PIECE_BYTES);
        u32 a[4 / sizeof(W)][4];
        weight_registers<T, W>(a, low, high);
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int i = 0; i < XPart<W, MT>::LOADS; i++) {
                bytes16 b = x.b[mt][quarter][i];
                mma16816<T>(acc[0][mt], a[2 * i], b.x, b.y);
                mma16816<T>(acc[1][mt], a[2 * i + 1], b.z, b.w);
            }
        }
    }
}

// A warp's way through its pieces: the group it is in, and where its lanes' rows of the group begin. Lanes copy the
// rows lane / 16 + 2 i, 16 bytes each.
struct Walk {
    u32 group, piece, units;
    const u8 *from;
    DEVICE void enter(const SkinnyArgs &a, const Share &share, u32 row_bytes) {
        if (group >= share.groups) return;
        const u32 lane = threadIdx.x & 31;
        units = share.size(group);
        from = (const u8 *)a.w + (u64)(share.begin(group) + (lane >> 4)) * row_bytes + (lane & 15) * 16;
    }
    DEVICE void advance(const SkinnyArgs &a, const Share &share, u32 row_bytes) {
        piece += WARPS;
        if (piece < pieces_of(row_bytes)) return;
        piece = threadIdx.x >> 5;
        group++;
        enter(a, share, row_bytes);
    }
};

// Ask for the weights of a piece. Rows that the group does not have are not read: their sums are not used.
DEVICE void ask_piece(const Walk &walk, u32 slot, u32 row_bytes, u64 second_half, bool silu) {
    const u32 lane = threadIdx.x & 31, row = lane >> 4, piece = lane & 15;
    const u32 to = slot + row * PIECE_BYTES + ((piece ^ (row << 2)) << 4);
    const bool inside = walk.piece * PIECE_BYTES + piece * 16 < row_bytes;
    const u8 *from = walk.from + walk.piece * PIECE_BYTES, *upper = from + second_half;
#pragma unroll
    for (int i = 0; i < 4; i++, from += 2 * row_bytes) copy_async16_to(to + i * 2 * PIECE_BYTES, from, inside && row + 2 * i < walk.units);
#pragma unroll
    for (int i = 4; i < 8; i++, upper += 2 * row_bytes) {
        copy_async16_to(to + i * 2 * PIECE_BYTES, upper, inside && row + 2 * i - (silu ? 8 : 0) < walk.units);
    }
}

template <typename T, typename W, int MT, bool KEPT> DEVICE void stream_rows(const SkinnyArgs &a) {
    DYNAMIC_SHARED(memory);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool silu = a.output == OUT_SILU;
    const Share share(a, blockIdx.x, gridDim.x, silu ? 8 : 16);
    const u32 row_bytes = a.k * (u32)sizeof(W), pieces = pieces_of(row_bytes);
    const u64 second_half = (u64)row_bytes * (silu ? a.n / 2 : 8);
    const u32 mine = pieces > warp ? (pieces - warp + WARPS - 1) / WARPS : 0, items = share.groups * mine;
    const u32 told_at = items > a.early ? items - a.early : 0; // the next kernel may begin once so many are asked for
    const u32 slot_bytes = 16 * PIECE_BYTES, ring = shared_address(memory) + a.ring_at + warp * SLOTS * slot_bytes;
    // The norm is done with its weights before the first sums are written.
    float *squares = (float *)memory, *norm_weight = squares + MT * 8 * WARPS;
    // Sums of the warps, twice, so that one barrier per group is enough: [2][WARPS][token][20, of which 16 are used].
    float *partial = norm_weight;
    const u32 partial_floats = MT * 8 * 20;

    if (KEPT && a.norm_weight) {
        for (u32 i = threadIdx.x; i < a.k / 4; i += THREADS) copy_async16(norm_weight + i * 4, a.norm_weight + i * 4, true);
    }
    Walk walk = {mine > 0 ? 0 : share.groups, warp, 0, nullptr};
    walk.enter(a, share, row_bytes);
    u32 asked = 0;
    for (; asked < SLOTS; asked++) {
        if (asked < items) {
            ask_piece(walk, ring + asked * slot_bytes, row_bytes, second_half, silu);
            walk.advance(a, share, row_bytes);
        }
        copy_async_commit();
    }
    Walk later = walk;
    for (u32 i = asked; i < asked + a.l2_ahead && i < items; i++) {
        // A line of 128 bytes for each lane.
        const u32 row = (lane >> 1) & 7, unit = silu || lane < 16 ? row : row + 8;
        const u8 *line = (const u8 *)a.w + (u64)(share.begin(later.group) + row) * row_bytes + (lane >= 16 ? second_half : 0) +
                         later.piece * PIECE_BYTES + (lane & 1) * 128;
        if (unit < later.units && later.piece * PIECE_BYTES + (lane & 1) * 128 < row_bytes) prefetch_l2(line);
        later.advance(a, share, row_bytes);
    }
    if (asked >= told_at) allow_next();
    wait_for_previous();

    const bool EARLY_X = !KEPT && MT * XPart<W, MT>::LOADS <= 2; // where registers allow, x is fetched a piece ahead
    XPart<W, MT> x;
    const u32 kept = shared_address(memory) + a.x_at, x_pitch = pieces * x_piece_bytes<W>();
    if (KEPT) {
        if (a.norm_weight) {
            keep_norm_x<T, W>(a, memory + a.x_at, x_pitch, norm_weight, squares);
        } else {
            keep_plain_x<W>(a, memory + a.x_at, x_pitch);
        }
        __syncthreads();
    } else if (EARLY_X) {
        x.fetch(a, warp);
    }

    const u32 out_row = threadIdx.x & 15, token = threadIdx.x >> 4;
    u32 slot = 0;
    for (u32 group = 0; group < share.groups; group++) {
        const u32 units = share.size(group), first = share.begin(group);
        const bool writes = token < a.m && token < MT * 8 && out_row < units && (!silu || out_row < 8);
        Finish finish;
        if (writes) finish.fetch(a, token, first + out_row);
        float acc[2][MT][4] = {};
        for (u32 piece = warp; piece < pieces; piece += WARPS) {
            XPart<W, MT> next;
            if (EARLY_X) next.fetch(a, piece + WARPS < pieces ? piece + WARPS : warp);
            if (!KEPT && !EARLY_X) x.fetch(a, piece);
            copy_async_wait<SLOTS - 1>();
            __syncwarp();
            if (KEPT) x.take(a.m, kept, x_pitch, piece);
            multiply_piece<T, W, MT>(acc, ring + slot * slot_bytes, x);
            __syncwarp();
            if (asked < items) {
                ask_piece(walk, ring + slot * slot_bytes, row_bytes, second_half, silu);
                walk.advance(a, share, row_bytes);
            }
            copy_async_commit();
            if (++asked == told_at) allow_next();
            slot = slot + 1 == SLOTS ? 0 : slot + 1;
            if (EARLY_X) x = next;
        }
        float *sums = partial + (group & 1) * WARPS * partial_floats;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 to_token = mt * 8 + (lane & 3) * 2 + (i & 1), to_row = (lane >> 2) + (i >> 1) * 8;
                if (to_token < a.m) sums[warp * partial_floats + to_token * 20 + to_row] = acc[0][mt][i] + acc[1][mt][i];
            }
        }
        __syncthreads();
        if (writes) {
            float value = 0.0f, up = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) value += sums[i * partial_floats + token * 20 + out_row];
            if (silu) {
#pragma unroll
                for (int i = 0; i < WARPS; i++) up += sums[i * partial_floats + token * 20 + out_row + 8];
            }
            finish.store<T>(a, token, first + out_row, value, up);
        }
    }
}

// ---- up to 64 rows: warps share x -------------------------------------------------------------------------------
// A pass covers up to 128 weight rows, two tiles of 64: warps 0-3 take the first half of each chunk of k, 4-7 the second,
// each warp 16 rows of both tiles. Where n is small, the blocks of a cluster share the same rows and split k, so that
// the whole of x does not have to be read for a few weight rows each.

// Hopper multiplies straight from shared memory, where rows of 128 bytes must be swizzled in its way.
template <typename W> struct Tiles {
#if STROBE_ARCH >= 90
    static const bool FROM_SHARED = sizeof(W) == 2;
#else
    static const bool FROM_SHARED = false;
#endif
    static DEVICE u32 w_offset(u32 row, u32 piece) {
        return row * CHUNK_BYTES + ((piece ^ (FROM_SHARED ? row & 7 : (row & 1) << 2)) << 4);
    }
    static DEVICE u32 x_offset(u32 token, u32 piece) {
        return token * Layout<W>::x_pieces * 16 + (FROM_SHARED ? (piece ^ (token & 7)) << 4 : Layout<W>::x_offset(token, piece));
    }
};

#if STROBE_ARCH >= 90
// d[64 weight rows][8 MT rows of x] += a[64][32 bytes] . b[8 MT][32 bytes]^T, both swizzled; lanes hold what they hold of
// 16-row products.
template <typename T, int MT> struct GroupProduct;
#define PLACES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PLACES32 PLACES16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define GROUP_PRODUCT(T, MT, SHAPE, PLACES, A, B, ...)                                                                  \
    template <> struct GroupProduct<T, MT> {                                                                            \
        static DEVICE void add(float (&d)[MT][4], u64 a, u64 b) {                                                       \
            asm volatile("{.reg .pred keep;\nsetp.eq.u32 keep, 0, 0;\n"                                                 \
                         "wgmma.mma_async.sync.aligned." SHAPE " {" PLACES "}, %" A ", %" B ", keep, 1, 1, 0, 0;}"      \
                         : __VA_ARGS__                                                                                  \
                         : "l"(a), "l"(b));                                                                             \
        }                                                                                                               \
    };
GROUP_PRODUCT(bf16, 4, "m64n32k16.f32.bf16.bf16", PLACES16, "16", "17", SUMS(0), SUMS(1), SUMS(2), SUMS(3))
GROUP_PRODUCT(f16, 4, "m64n32k16.f32.f16.f16", PLACES16, "16", "17", SUMS(0), SUMS(1), SUMS(2), SUMS(3))
GROUP_PRODUCT(bf16, 8, "m64n64k16.f32.bf16.bf16", PLACES32, "32", "33", SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5), SUMS(6), SUMS(7))
GROUP_PRODUCT(f16, 8, "m64n64k16.f32.f16.f16", PLACES32, "32", "33", SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5), SUMS(6), SUMS(7))

// Rows of 128 swizzled bytes; groups of 8 rows are 1024 bytes apart.
DEVICE u64 tile_descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

// Begins; the sums may not be touched before `multiply_shared_wait`.
template <typename T, int MT>
DEVICE void multiply_shared(float (&acc)[2][MT][4], u32 w, u32 tiles64, u32 x, u32 half) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 2; step++) {
        const u32 at = half * 64 + step * 32;
        GroupProduct<T, MT>::add(acc[0], tile_descriptor(w + at), tile_descriptor(x + at));
        if (tiles64 > 1) GroupProduct<T, MT>::add(acc[1], tile_descriptor(w + 64 * CHUNK_BYTES + at), tile_descriptor(x + at));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
DEVICE void multiply_shared_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
DEVICE void copies_are_for_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

// One half of a chunk: acc += this warp's 16 weight rows of each tile . rows of x. Rows of x beyond the last are read as the
// last: their sums are not used.
template <typename T, typename W, int MT>
DEVICE void multiply_half(float (&acc)[2][MT][4], u32 w, u32 tiles64, u32 x, u32 m, u32 half) {
    const u32 lane = threadIdx.x & 31, row = lane >> 2, piece = (lane & 3) + half * 4;
    const int STEPS = 4 / sizeof(W); // products of depth 16
    u32 a[2][STEPS][4];
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        if (tile >= tiles64) break;
        u32 first = tile * 64 + (threadIdx.x >> 5 & 3) * 16 + row;
        weight_registers<T, W>(a[tile], load_shared16(w + Tiles<W>::w_offset(first, piece)),
                               load_shared16(w + Tiles<W>::w_offset(first + 8, piece)));
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        u32 token = mt * 8 + row, b[2 * STEPS];
        token = token < m ? token : m - 1;
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++) {
            bytes16 v = load_shared16(x + Tiles<W>::x_offset(token, piece * (STEPS / 2) + i));
            b[4 * i] = v.x, b[4 * i + 1] = v.y, b[4 * i + 2] = v.z, b[4 * i + 3] = v.w;
        }
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            if (tile >= tiles64) break;
#pragma unroll
            for (int step = 0; step < STEPS; step++) mma16816<T>(acc[tile][mt], a[tile][step], b[2 * step], b[2 * step + 1]);
        }
    }
}

// Wait for the oldest copies, all but those of `stages - 2` slots.
DEVICE void wait_for_slot(u32 stages) {
    switch (stages) {
    case 3: copy_async_wait<1>(); break;
    case 4: copy_async_wait<2>(); break;
    case 5: copy_async_wait<3>(); break;
    case 6: copy_async_wait<4>(); break;
    case 7: copy_async_wait<5>(); break;
    case 8: copy_async_wait<6>(); break;
    case 10: copy_async_wait<8>(); break;
    case 12: copy_async_wait<10>(); break;
    default: copy_async_wait<0>();
    }
}

// The chunk's part of x.
template <typename W> DEVICE void copy_x(const SkinnyArgs &a, u32 to, u32 chunk) {
    const u32 pieces = Layout<W>::x_pieces, real = a.k / 8;
    for (u32 i = threadIdx.x; i < a.m * pieces; i += THREADS) {
        u32 token = i / pieces, piece = i % pieces, at = chunk * pieces + piece;
        bool inside = at < real;
        const u8 *from = (const u8 *)a.x + (inside ? ((u64)token * real + at) * 16 : 0);
        copy_async16_to(to + Tiles<W>::x_offset(token, piece), from, inside);
    }
}

// Four sums of every block of the cluster, always in the same order.
DEVICE void add_ranks(float (&sum)[4], const float *at, u32 ranks) {
    float4 v[8];
    v[0] = *(const float4 *)at;
    if (ranks > 1) {
#pragma unroll
        for (int rank = 0; rank < 8; rank++) {
            if (rank < ranks) v[rank] = load_cluster_quad(at, rank);
        }
    }
    sum[0] = v[0].x, sum[1] = v[0].y, sum[2] = v[0].z, sum[3] = v[0].w;
#pragma unroll
    for (int rank = 1; rank < 8; rank++) {
        if (rank < ranks) sum[0] += v[rank].x, sum[1] += v[rank].y, sum[2] += v[rank].z, sum[3] += v[rank].w;
    }
}

// Scales and biases of four neighbouring columns, of which there are `left`.
DEVICE void scale_and_shift(float (&value)[4], const SkinnyArgs &a, u32 column, u32 left) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (a.scales && j < left) value[j] *= a.scales[column + j];
        if (a.bias && j < left) value[j] += a.bias[column + j];
    }
}

template <typename T, typename W, int MT> DEVICE void tile_rows(const SkinnyArgs &a) {
    DYNAMIC_SHARED(memory);
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row_warp = warp & 3, half = warp >> 2;
    const bool silu = a.output == OUT_SILU;
    const u32 rank = cluster_rank(), ranks = cluster_blocks();
    const Share share(a, blockIdx.x / ranks, gridDim.x / ranks, silu ? a.tile_rows / 2 : a.tile_rows);
    const u32 row_bytes = a.k * (u32)sizeof(W), chunks = (row_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    const u32 first_chunk = chunks * rank / ranks, mine = chunks * (rank + 1) / ranks - first_chunk;
    const u32 items = share.groups * mine, ahead = a.stages - 1, tiles64 = (a.tile_rows + 63) / 64;
    const u32 weight_bytes = tiles64 * 64 * CHUNK_BYTES;
    const u32 told_at = items > a.early ? items - a.early : 0;
    const u32 ring = shared_address(memory) + a.ring_at;
    float *sums = (float *)memory; // [8 MT][pitch]
    const u32 pitch = tiles64 * 64 + 4;

    // This thread's rows of a pass are thread / 8 + 32 i.
    const u32 piece = threadIdx.x & 7;
    u32 group = 0, chunk = 0;
    const u8 *from[4];
    auto enter = [&]() {
        u32 units = share.size(group), first = share.begin(group);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 row = (threadIdx.x >> 3) + 32 * i;
            u32 unit = silu ? (row >> 4) * 8 + (row & 7) : row;
            u64 weight_row = first + unit + (silu && (row & 8) ? a.n / 2 : 0);
            from[i] = row < a.tile_rows && unit < units ? (const u8 *)a.w + weight_row * row_bytes + piece * 16 : nullptr;
        }
    };
    auto ask_weights = [&](u32 slot) {
        u32 offset = (first_chunk + chunk) * CHUNK_BYTES;
        bool inside = offset + piece * 16 < row_bytes;
        u32 to = slot + Tiles<W>::w_offset(threadIdx.x >> 3, piece);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (from[i]) copy_async16_to(to + i * 32 * CHUNK_BYTES, inside ? from[i] + offset : (const u8 *)a.w, inside);
        }
    };
    auto advance = [&]() {
        if (++chunk == mine) {
            chunk = 0;
            if (++group < share.groups) enter();
        }
    };
    if (items > 0) enter();
    u32 asked = 0;
    for (; asked < ahead; asked++) {
        if (asked < items) {
            ask_weights(ring + asked * a.slot_bytes);
            advance();
        }
        copy_async_commit();
    }
    if (asked >= told_at) allow_next();
    wait_for_previous();
    for (u32 i = 0; i < ahead; i++) {
        if (i < items) copy_x<W>(a, ring + i * a.slot_bytes + weight_bytes, first_chunk + i % mine);
        copy_async_commit();
    }

    u32 slot = 0, free_slot = ahead, item = ahead;
    for (u32 now = 0; now < share.groups; now++) {
        const u32 units = share.size(now), first = share.begin(now);
        float acc[2][MT][4] = {};
        for (u32 i = 0; i < mine; i++) {
            wait_for_slot(a.stages);
#if STROBE_ARCH >= 90
            copies_are_for_tensor_cores();
#endif
            __syncthreads();
            const u32 w = ring + slot * a.slot_bytes;
#if STROBE_ARCH >= 90
            if constexpr (Tiles<W>::FROM_SHARED) multiply_shared<T, MT>(acc, w, tiles64, w + weight_bytes, half);
#endif
            if (item < items) {
                u32 to = ring + free_slot * a.slot_bytes;
                ask_weights(to);
                copy_x<W>(a, to + weight_bytes, first_chunk + chunk);
                advance();
            }
            item++;
            copy_async_commit();
            if (++asked == told_at) allow_next();
#if STROBE_ARCH >= 90
            if constexpr (Tiles<W>::FROM_SHARED) multiply_shared_wait();
#endif
            if constexpr (!Tiles<W>::FROM_SHARED) multiply_half<T, W, MT>(acc, w, tiles64, w + weight_bytes, a.m, half);
            slot = slot + 1 == a.stages ? 0 : slot + 1;
            free_slot = free_slot + 1 == a.stages ? 0 : free_slot + 1;
        }
        // The second half's sums go to shared memory, the first half's are added to them.
        float *own = sums + (lane & 3) * 2 * pitch + row_warp * 16 + (lane >> 2);
#pragma unroll
        for (u32 turn = 0; turn < 2; turn++) {
            if (half != turn) {
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    if (tile >= tiles64) break;
#pragma unroll
                    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            float *to = own + (mt * 8 + (i & 1)) * pitch + tile * 64 + (i >> 1) * 8;
                            *to = turn == 0 ? acc[tile][mt][i] : *to + acc[tile][mt][i];
                        }
                    }
                }
            }
            if (turn == 0) __syncthreads();
        }
        // Four neighbouring columns of a row for each thread. What a residual was is fetched before the wait.
        const u32 quads = (units + 3) / 4;
        float old[4];
        auto fetch = [&](u32 i) {
            if (a.output != OUT_ADD || i >= quads * a.m) return;
            const u32 token = i / quads, unit = i % quads * 4;
            const float *from = (const float *)a.out + (u64)token * a.n + first + unit;
#pragma unroll
            for (int j = 0; j < 4; j++) old[j] = unit + j < units ? from[j] : 0.0f;
        };
        u32 i = rank * THREADS + threadIdx.x;
        fetch(i);
        if (ranks > 1) {
            cluster_barrier();
        } else {
            __syncthreads();
        }
        while (i < quads * a.m) {
            const u32 token = i / quads, unit = i % quads * 4, wide = silu ? a.n / 2 : a.n;
            const float *at = sums + token * pitch + (silu ? (unit >> 3) * 16 + (unit & 7) : unit);
            float value[4];
            add_ranks(value, at, ranks);
            scale_and_shift(value, a, first + unit, units - unit);
            if (silu) {
                float up[4];
                add_ranks(up, at + 8, ranks);
                scale_and_shift(up, a, first + unit + wide, units - unit);
#pragma unroll
                for (int j = 0; j < 4; j++) value[j] = value[j] / (1.0f + __expf(-value[j])) * up[j];
            }
            const u64 to = (u64)token * wide + first + unit;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (unit + j >= units) break;
                if (a.output == OUT_ADD) {
                    ((float *)a.out)[to + j] = old[j] + value[j];
                } else if (a.output == OUT_STORE_F32) {
                    ((float *)a.out)[to + j] = value[j];
                } else {
                    ((T *)a.out)[to + j] = Cast<T>::from(value[j]);
                }
            }
            i += ranks * THREADS;
            fetch(i);
        }
        // The sums are written again in the next pass, and a block that has ended can't be read.
        if (ranks > 1) cluster_done();
    }
}

#define SKINNY(name, T, W)                                                                                             \
    KERNEL __launch_bounds__(THREADS, 2) skinny8_##name(SkinnyArgs a) { stream_rows<T, W, 1, false>(a); }               \
    KERNEL __launch_bounds__(THREADS, 3) skinny8_kept_##name(SkinnyArgs a) { stream_rows<T, W, 1, true>(a); }           \
    KERNEL __launch_bounds__(THREADS, 2) skinny16_##name(SkinnyArgs a) { stream_rows<T, W, 2, false>(a); }              \
    KERNEL __launch_bounds__(THREADS, 2) skinny16_kept_##name(SkinnyArgs a) { stream_rows<T, W, 2, true>(a); }          \
    KERNEL __launch_bounds__(THREADS, 2) skinny32_##name(SkinnyArgs a) { tile_rows<T, W, 4>(a); }                       \
    KERNEL __launch_bounds__(THREADS, sizeof(W)) skinny64_##name(SkinnyArgs a) { tile_rows<T, W, 8>(a); }
#if SKINNY_TYPE == 0
SKINNY(bf16, bf16, bf16)
SKINNY(fp8_bf16, bf16, fp8)
#else
SKINNY(f16, f16, f16)
SKINNY(fp8_f16, f16, fp8)
#endif

#if SKINNY_TYPE == 0
// ---- single precision: plain multiplications ---------------------------------------------------------------------
// A warp per output column and eight rows of x at a time.
KERNEL __launch_bounds__(THREADS) skinny_f32(SkinnyArgs a) {
    __shared__ float factors[64];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool silu = a.output == OUT_SILU;
    const Share share(a, blockIdx.x, gridDim.x, 1);
    allow_next();
    wait_for_previous();
    const float *x = (const float *)a.x, *w = (const float *)a.w;
    for (u32 token = warp; token < a.m; token += WARPS) {
        float sum = 0.0f;
        if (a.norm_weight) {
            for (u32 i = lane; i < a.k; i += 32) sum += x[(u64)token * a.k + i] * x[(u64)token * a.k + i];
            sum = warp_sum(sum);
        }
        if (lane == 0) factors[token] = a.norm_weight ? rsqrtf(sum / (float)a.k + a.eps) : 1.0f;
    }
    __syncthreads();
    for (u32 i = warp; i < share.count; i += WARPS) {
        const u32 unit = share.first + i;
        const float *row = w + (u64)unit * a.k, *up_row = silu ? row + (u64)(a.n / 2) * a.k : row;
        for (u32 base = 0; base < a.m; base += 8) {
            float sums[8] = {}, ups[8] = {};
            for (u32 c = lane * 4; c < a.k; c += 128) {
                float4 v = *(const float4 *)(row + c), g = {1.0f, 1.0f, 1.0f, 1.0f};
                float4 u = silu ? *(const float4 *)(up_row + c) : v;
                if (a.norm_weight) g = *(const float4 *)(a.norm_weight + c);
#pragma unroll
                for (int t = 0; t < 8; t++) {
                    if (base + t < a.m) {
                        float4 h = *(const float4 *)(x + (u64)(base + t) * a.k + c);
                        float f = factors[base + t];
                        h.x = h.x * f * g.x, h.y = h.y * f * g.y, h.z = h.z * f * g.z, h.w = h.w * f * g.w;
                        sums[t] += h.x * v.x + h.y * v.y + h.z * v.z + h.w * v.w;
                        ups[t] += h.x * u.x + h.y * u.y + h.z * u.z + h.w * u.w;
                    }
                }
            }
#pragma unroll
            for (int t = 0; t < 8; t++) {
                float value = warp_sum(sums[t]), up = silu ? warp_sum(ups[t]) : 0.0f;
                if (lane == t && base + t < a.m) {
                    Finish finish;
                    finish.fetch(a, base + t, unit);
                    finish.store<float>(a, base + t, unit, value, up);
                }
            }
        }
    }
}
#endif
