// Products of few rows with a large weight matrix, as decoding makes them: out[m][n] = x[m][k] . w[n][k]^T, m <= 16.
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
    u32 output;  // what becomes of the sums, one of OUT_*
    u32 x_at;    // offset into shared memory of x, where it is kept
    u32 sums_at; // offset of the sums of the warps
    u32 sums;    // 2: those of successive groups have places of their own
    u32 ring_at; // offset of the slots that the weights pass through
    u32 slots;   // of each warp
    u32 ahead;   // bytes of its weights that a block fetches into L2 before the kernel in front has ended
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

// ---- pieces of work ---------------------------------------------------------------------------------------------
// A piece is 16 weight rows (a group) by 256 bytes; a warp takes every eighth piece of its block's groups, so that it
// needs the same slices of x for every group and no other warp needs them.
#define PIECE_BYTES 256
#define SLOT_BYTES (16 * PIECE_BYTES)

template <typename W> struct Piece {
    static const u32 ELEMENTS = PIECE_BYTES / sizeof(W);
    static const u32 X_BYTES = ELEMENTS * 2;   // of x that go with a piece, in one row
    static const int LOADS = 2 / sizeof(W);    // of 16 bytes of x that go with a lane's 16 bytes of weights
    static const u32 SWAP = sizeof(W) == 2 ? 4 : 1;
    // 16-byte parts are swapped between neighbouring rows so that a quarter of a warp, which reads two rows, meets
    // every bank once.
    static DEVICE u32 x_offset(u32 token, u32 part) { return (part ^ ((token & 1) * SWAP)) << 4; }
};
DEVICE u32 pieces_of(u32 row_bytes) { return (row_bytes + PIECE_BYTES - 1) / PIECE_BYTES; }

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

// bf16 has the range of f32: there x need not be divided by the root mean square before it is rounded, and the sums are
// divided instead, so that no product waits for the sum of squares.
template <typename T> struct Late {
    static const bool norm = true;
};
template <> struct Late<f16> {
    static const bool norm = false;
};

// A lane's part of x for one piece: [8 rows of x][quarter of the piece][register].
template <typename W, int MT> struct XPart {
    static const int LOADS = Piece<W>::LOADS;
    bytes16 b[MT][4][LOADS];
    static DEVICE u32 part(int quarter, int i) { return ((threadIdx.x & 3) + quarter * 4) * LOADS + i; }
    // Rows beyond the last are read as the last: their sums are not used.
    static DEVICE u32 token(const SkinnyArgs &a, int mt) {
        u32 token = mt * 8 + ((threadIdx.x & 31) >> 2);
        return token < a.m ? token : a.m - 1;
    }
    // From global memory; zeroes behind the end.
    DEVICE void fetch(const SkinnyArgs &a, u32 piece) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            const u8 *row = (const u8 *)a.x + (u64)token(a, mt) * a.k * 2;
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
                for (int i = 0; i < LOADS; i++) {
                    u32 at = piece * Piece<W>::X_BYTES + part(quarter, i) * 16;
                    b[mt][quarter][i] = {0, 0, 0, 0};
                    if (at < a.k * 2) b[mt][quarter][i] = *(const bytes16 *)(row + at);
                }
            }
        }
    }
    // To and from where the warp keeps its slices.
    static DEVICE void put(const SkinnyArgs &a, const bytes16 (&b)[4][LOADS], int mt, u8 *kept, u32 pitch, u32 piece) {
        const u32 row = mt * 8 + ((threadIdx.x & 31) >> 2);
        u8 *to = kept + row * pitch + piece * Piece<W>::X_BYTES;
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                if (row < a.m) *(bytes16 *)(to + Piece<W>::x_offset(row, part(quarter, i))) = b[quarter][i];
            }
        }
    }
    DEVICE void take(const SkinnyArgs &a, u32 kept, u32 pitch, u32 piece) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            const u32 row = token(a, mt), from = kept + row * pitch + piece * Piece<W>::X_BYTES;
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
                for (int i = 0; i < LOADS; i++) b[mt][quarter][i] = load_shared16(from + Piece<W>::x_offset(row, part(quarter, i)));
            }
        }
    }
};

// A lane's part of one row of the f32 stream for one piece, on its way through the norm.
template <typename T, typename W> struct HiddenPart {
    static const int LOADS = Piece<W>::LOADS;
    float4 h[4][LOADS][2];
    DEVICE void fetch(const SkinnyArgs &a, u32 token, u32 piece) {
        const float *row = (const float *)a.x + (u64)token * a.k;
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const u32 at = piece * Piece<W>::ELEMENTS + XPart<W, 1>::part(quarter, i) * 8;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    h[quarter][i][j] = {0.0f, 0.0f, 0.0f, 0.0f};
                    if (at < a.k) h[quarter][i][j] = *(const float4 *)(row + at + j * 4);
                }
            }
        }
    }
    DEVICE float squares() const {
        float sum = 0.0f;
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
            for (int i = 0; i < LOADS * 2; i++) {
                const float4 v = h[quarter][i / 2][i % 2];
                sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
        }
        return sum;
    }
    // Times the norm's weight, which lies in shared memory, and `factor`.
    DEVICE void scale(bytes16 (&b)[4][LOADS], u32 weight, u32 k, u32 piece, float factor) const {
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const u32 at = piece * Piece<W>::ELEMENTS + XPart<W, 1>::part(quarter, i) * 8;
                u32 pairs[4];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float4 v = h[quarter][i][j];
                    bytes16 g = {0, 0, 0, 0};
                    if (at < k) g = load_shared16(weight + (at + j * 4) * 4);
                    pairs[2 * j] = pack2<T>(v.x * factor * __uint_as_float(g.x), v.y * factor * __uint_as_float(g.y));
                    pairs[2 * j + 1] = pack2<T>(v.z * factor * __uint_as_float(g.z), v.w * factor * __uint_as_float(g.w));
                }
                b[quarter][i] = {pairs[0], pairs[1], pairs[2], pairs[3]};
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
            for (int i = 0; i < Piece<W>::LOADS; i++) {
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

// Wait until all but the newest `slots - 1` pieces that were asked for are there.
DEVICE void wait_for_slot(u32 slots) {
    switch (slots) {
    case 2: copy_async_wait<1>(); break;
    case 3: copy_async_wait<2>(); break;
    case 4: copy_async_wait<3>(); break;
    case 6: copy_async_wait<5>(); break;
    default: copy_async_wait<0>();
    }
}

// The rest of the block's own weights, as far as it may go: the copies then come from L2.
DEVICE void prefetch_own(const SkinnyArgs &a, const Share &share, u32 row_bytes) {
    const u32 from = share.groups > 1 ? share.begin(1) : share.first, parts = a.output == OUT_SILU ? 2 : 1;
    const u64 rest = (u64)(share.first + share.count - from) * row_bytes, most = a.ahead / parts / 16 * 16;
    const u8 *at = (const u8 *)a.w + (u64)from * row_bytes;
    for (u32 i = 0; i < parts; i++) prefetch_l2_bulk(at + (u64)i * (a.n / 2) * row_bytes, (u32)(rest < most ? rest : most));
}

// Sums of squares of this warp's slices, for all.
template <int MT> DEVICE void publish(const SkinnyArgs &a, float *squares, const float (&sums)[MT]) {
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        float sum = sums[mt] + __shfl_xor_sync(FULL_WARP, sums[mt], 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        const u32 row = mt * 8 + ((threadIdx.x & 31) >> 2);
        if ((threadIdx.x & 3) == 0 && row < a.m) squares[row * WARPS + (threadIdx.x >> 5)] = sum;
    }
}
DEVICE float norm_factor(const SkinnyArgs &a, const float *squares, u32 token) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += squares[token * WARPS + i];
    return rsqrtf(sum / (float)a.k + a.eps);
}

// This warp's slices of norm(hidden) * weight, without the division where that comes late.
template <typename T, typename W, int MT, int PARTS, bool KEPT>
DEVICE void norm_x(const SkinnyArgs &a, XPart<W, MT> (&x)[PARTS], float *squares, u32 weight, u8 *kept, u32 pitch, u32 mine) {
    const int AT_ONCE = MT * PARTS * Piece<W>::LOADS > 2 ? 1 : 2 / Piece<W>::LOADS; // pieces on their way, as registers allow
    const u32 warp = threadIdx.x >> 5, most = KEPT ? mine : PARTS;
    float sums[MT] = {};
    if (!Late<T>::norm) {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            for (u32 i = 0; i < mine; i++) {
                HiddenPart<T, W> hidden;
                hidden.fetch(a, XPart<W, MT>::token(a, mt), warp + i * WARPS);
                sums[mt] += hidden.squares();
            }
        }
        publish<MT>(a, squares, sums);
        __syncthreads();
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
        const u32 token = XPart<W, MT>::token(a, mt);
        const float factor = Late<T>::norm ? 1.0f : norm_factor(a, squares, token);
#pragma unroll KEPT ? 1 : PARTS
        for (u32 first = 0; first < most; first += AT_ONCE) {
            HiddenPart<T, W> hidden[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) hidden[i].fetch(a, token, warp + (first + i) * WARPS);
            // The norm's weights come with the first piece.
            if (mt == 0 && first == 0) {
                wait_for_slot(a.slots);
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const u32 piece = warp + (first + i) * WARPS;
                if (Late<T>::norm) sums[mt] += hidden[i].squares();
                if constexpr (KEPT) {
                    bytes16 b[4][Piece<W>::LOADS];
                    hidden[i].scale(b, weight, a.k, piece, factor);
                    if (first + i < mine) XPart<W, MT>::put(a, b, mt, kept, pitch, piece);
                } else {
                    hidden[i].scale(x[first + i].b[mt], weight, a.k, piece, factor);
                }
            }
        }
    }
    if (Late<T>::norm) publish<MT>(a, squares, sums);
}

// ---- the kernel -------------------------------------------------------------------------------------------------
// A lane's parts of x are in registers: PARTS at a time, which are all or a ring of their own; or in shared memory (KEPT).
template <typename T, typename W, int MT, int PARTS, bool KEPT> DEVICE void stream_rows(const SkinnyArgs &a) {
    DYNAMIC_SHARED(memory);
    allow_next();
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool silu = a.output == OUT_SILU;
    const Share share(a, blockIdx.x, gridDim.x, silu ? 8 : 16);
    const u32 row_bytes = a.k * (u32)sizeof(W), pieces = pieces_of(row_bytes);
    const u64 second_half = (u64)row_bytes * (silu ? a.n / 2 : 8);
    const u32 mine = pieces > warp ? (pieces - warp + WARPS - 1) / WARPS : 0, items = share.groups * mine;
    const u32 ring = shared_address(memory) + a.ring_at + warp * a.slots * SLOT_BYTES;
    // [a.sums][WARPS][m][20, of which 16 are used]; with two of them one barrier per group is enough.
    float *partial = (float *)(memory + a.sums_at);
    const u32 partial_floats = a.m * 20;
    float *squares = (float *)memory, *norm_weight = squares + MT * 8 * WARPS;

    // Each warp brings the weights of its own slices.
    if (a.norm_weight) {
        for (u32 piece = warp; piece < pieces; piece += WARPS) {
            for (u32 i = lane * 4; i < Piece<W>::ELEMENTS; i += 128) {
                const u32 at = piece * Piece<W>::ELEMENTS + i;
                if (at < a.k) copy_async16(norm_weight + at, a.norm_weight + at, true);
            }
        }
    }
    Walk walk = {mine > 0 ? 0 : share.groups, warp, 0, nullptr};
    walk.enter(a, share, row_bytes);
    u32 asked = 0;
    for (; asked < a.slots; asked++) {
        if (asked < items) {
            ask_piece(walk, ring + asked * SLOT_BYTES, row_bytes, second_half, silu);
            walk.advance(a, share, row_bytes);
        }
        copy_async_commit();
    }
    if (a.ahead > 0 && threadIdx.x == 0) prefetch_own(a, share, row_bytes);
    wait_for_previous();

    XPart<W, MT> x[PARTS];
    const u32 x_pitch = pieces * Piece<W>::X_BYTES;
    u8 *kept = memory + a.x_at;
    if (a.norm_weight) {
        norm_x<T, W, MT, PARTS, KEPT>(a, x, squares, shared_address(norm_weight), kept, x_pitch, mine);
    } else {
        for (u32 first = 0; first < (KEPT ? mine : 1); first += PARTS) {
#pragma unroll
            for (int i = 0; i < PARTS; i++) x[i].fetch(a, warp + (first + i) * WARPS);
            if constexpr (KEPT) {
#pragma unroll
                for (int i = 0; i < PARTS; i++) {
#pragma unroll
                    for (int mt = 0; mt < MT; mt++) {
                        if (first + i < mine) XPart<W, MT>::put(a, x[i].b[mt], mt, kept, x_pitch, warp + (first + i) * WARPS);
                    }
                }
            }
        }
    }
    if (KEPT) __syncwarp();

    const u32 out_row = threadIdx.x & 15, token = threadIdx.x >> 4;
    const int STEP = KEPT ? 1 : PARTS;
    float factor = 1.0f;
    u32 slot = 0;
    for (u32 group = 0; group < share.groups; group++) {
        const u32 units = share.size(group), first = share.begin(group);
        const bool writes = token < a.m && out_row < units && (!silu || out_row < 8);
        Finish finish;
        if (writes) finish.fetch(a, token, first + out_row);
        float acc[2][MT][4] = {};
        for (u32 base = 0; base < mine; base += STEP) {
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                if (base + i >= mine) break;
                wait_for_slot(a.slots);
                __syncwarp();
                if (KEPT) x[0].take(a, shared_address(kept), x_pitch, warp + base * WARPS);
                multiply_piece<T, W, MT>(acc, ring + slot * SLOT_BYTES, x[i]);
                __syncwarp();
                if (asked < items) {
                    ask_piece(walk, ring + slot * SLOT_BYTES, row_bytes, second_half, silu);
                    walk.advance(a, share, row_bytes);
                    asked++;
                }
                copy_async_commit();
                slot = slot + 1 == a.slots ? 0 : slot + 1;
                const u32 again = base + i + PARTS; // what these registers are for next, in this group or the one behind
                if (!KEPT && mine > PARTS && (again < mine || group + 1 < share.groups)) {
                    x[i].fetch(a, warp + (again < mine ? again : i) * WARPS);
                }
            }
        }
        float *sums = partial + (group & (a.sums - 1)) * WARPS * partial_floats;
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
            if (Late<T>::norm && a.norm_weight && group == 0) factor = norm_factor(a, squares, token);
            float value = 0.0f, up = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) value += sums[i * partial_floats + token * 20 + out_row];
            if (silu) {
#pragma unroll
                for (int i = 0; i < WARPS; i++) up += sums[i * partial_floats + token * 20 + out_row + 8];
            }
            finish.store<T>(a, token, first + out_row, value * factor, up * factor);
        }
        if (a.sums == 1 && group + 1 < share.groups) __syncthreads();
    }
}

// Up to 8 rows of x and up to 16. `deep` holds more of x in registers, `kept` all of it in shared memory.
#define SKINNY(name, T, W)                                                                                                  \
    KERNEL __launch_bounds__(THREADS, 2) skinny8_##name(SkinnyArgs a) { stream_rows<T, W, 1, sizeof(W), false>(a); }        \
    KERNEL __launch_bounds__(THREADS, 2) skinny8_deep_##name(SkinnyArgs a) { stream_rows<T, W, 1, 2 * sizeof(W), false>(a); } \
    KERNEL __launch_bounds__(THREADS, 2) skinny8_kept_##name(SkinnyArgs a) { stream_rows<T, W, 1, 2 * sizeof(W), true>(a); } \
    KERNEL __launch_bounds__(THREADS, 2) skinny16_##name(SkinnyArgs a) { stream_rows<T, W, 2, sizeof(W), false>(a); }       \
    KERNEL __launch_bounds__(THREADS, 2) skinny16_kept_##name(SkinnyArgs a) { stream_rows<T, W, 2, sizeof(W), true>(a); }
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
