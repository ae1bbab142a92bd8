// From logits to tokens: the first maximum, or a draw from the softmax over the most likely.
//
// Weights are fixed-point numbers and their sums are integers, so that the order of additions can't change a token.
// The most likely are found by histograms of ever finer bins, never by sorting; see `select`.

#define THREADS 1024
#define ARGMAX_THREADS 256 // fewer: many rows at once keep more loads on their way than few with large blocks
#define WARPS 32
#define BINS 2048
#define BIN_BITS 11
#define NOBODY 0xffffffffu

// How one row's token is drawn; the same layout as the host's.
struct Draw {
    float temperature; // 0 takes the maximum
    u32 top_k;         // 0 keeps all
    float top_p;       // 1 keeps all
    u64 seed, index;
    u32 banned_start, banned_len;
};

struct Best {
    float value;
    u32 id;
};

// The last of the kept: `key` is its place in the order of logits, equals go by id.
struct Cut {
    u32 key, id;
};

struct Scratch {
    u32 low[BINS], high[BINS]; // 64-bit sums in two halves: shared memory adds only 32 bits at once
    u64 sums[WARPS];
    float best_values[WARPS];
    u32 best_ids[WARPS], lowest[WARPS], counts[WARPS];
    u32 bin;
    u64 above, inside;
    bool last;
};

// Where the bits of the forbidden ids begin in dynamic shared memory; the host reserves the same.
#define SCRATCH_BYTES 18432
static_assert(sizeof(Scratch) <= SCRATCH_BYTES, "the host reserves too little");

// A row's logits and which ids it may not be.
struct Row {
    const float *logits;
    u32 vocab;
    const u32 *forbidden; // a bit per id, or null

    DEVICE bool allows(float x, u32 id) const {
        return x == x && (forbidden == 0 || ((forbidden[id >> 5] >> (id & 31)) & 1) == 0);
    }
};

// Calls f(logit, id) for ids begin..end, spread over the block, a thread's ids in rising order; or in falling order, so
// that what a product wrote last, and a cache still has, comes first.
template <bool FALLING, typename F> DEVICE void each(const float *logits, u32 begin, u32 end, F f) {
    u32 count = end - begin, misaligned = (u32)((u64)(logits + begin) & 15) / 4, threads = blockDim.x;
    u32 head = misaligned == 0 ? 0 : 4 - misaligned;
    head = head < count ? head : count;
    u32 vectors = (count - head) / 4, done = head + vectors * 4;
    auto first_few = [&] {
        if (threadIdx.x < head) f(logits[begin + threadIdx.x], begin + threadIdx.x);
    };
    auto last_few = [&] {
        if (threadIdx.x < count - done) f(logits[begin + done + threadIdx.x], begin + done + threadIdx.x);
    };
    if (FALLING) last_few();
    else first_few();
    const bytes16 *body = (const bytes16 *)(logits + begin + head);
    for (u32 next = threadIdx.x; next < vectors; next += 4 * threads) {
        bytes16 v[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 at = next + i * threads;
            if (at < vectors) v[i] = body[FALLING ? vectors - 1 - at : at];
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 at = next + i * threads;
            if (at >= vectors) continue;
            u32 id = begin + head + (FALLING ? vectors - 1 - at : at) * 4;
            f(__uint_as_float(v[i].x), id);
            f(__uint_as_float(v[i].y), id + 1);
            f(__uint_as_float(v[i].z), id + 2);
            f(__uint_as_float(v[i].w), id + 3);
        }
    }
    if (FALLING) first_few();
    else last_few();
}

DEVICE bool beats(Best a, Best b) {
    if (a.id == NOBODY || b.id == NOBODY) return a.id != NOBODY;
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}
DEVICE Best warp_best(Best best) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        Best other;
        other.value = __shfl_xor_sync(FULL_WARP, best.value, step);
        other.id = __shfl_xor_sync(FULL_WARP, best.id, step);
        if (beats(other, best)) best = other;
    }
    return best;
}
DEVICE Best block_best(Best best, Scratch &s) {
    best = warp_best(best);
    if ((threadIdx.x & 31) == 0) {
        s.best_values[threadIdx.x >> 5] = best.value;
        s.best_ids[threadIdx.x >> 5] = best.id;
    }
    __syncthreads();
    u32 other = threadIdx.x & 31;
    best.id = NOBODY;
    if (other < blockDim.x / 32) {
        best.value = s.best_values[other];
        best.id = s.best_ids[other];
    }
    return warp_best(best);
}

// Where tokens go: to the GPU for the next step, and to the host unless that is null.
struct Tokens {
    u32 *here, *host;
    DEVICE void put(u32 row, u32 token) const {
        here[row] = token;
        if (host) host[row] = token;
    }
};

// ---- the maximum ------------------------------------------------------------------------------------------------
// The row is cut among gridDim.x blocks; the last one to finish combines.
DEVICE void take_maximum(const Row &row, const Tokens &out, u64 *partials, u32 *counters, Scratch &s) {
    u32 splits = gridDim.x, place = blockIdx.y;
    u32 part = ((row.vocab + splits - 1) / splits + 3) & ~3u;
    u32 begin = blockIdx.x * part, end = begin + part;
    begin = begin < row.vocab ? begin : row.vocab;
    end = end < row.vocab ? end : row.vocab;
    Best best = {-infinity(), NOBODY};
    each<true>(row.logits, begin, end, [&](float x, u32 id) {
        if ((x > best.value || (x == best.value && id < best.id)) && row.allows(x, id)) {
            best.value = x;
            best.id = id;
        }
    });
    best = block_best(best, s);
    if (splits > 1) {
        if (threadIdx.x == 0) {
            partials[(u64)place * splits + blockIdx.x] = ((u64)__float_as_uint(best.value) << 32) | best.id;
            __threadfence();
            s.last = atomicAdd(&counters[place], 1) == splits - 1;
        }
        __syncthreads();
        if (!s.last) return;
        __threadfence();
        best.id = NOBODY;
        if (threadIdx.x < splits) {
            u64 partial = ((volatile u64 *)partials)[(u64)place * splits + threadIdx.x];
            best.value = __uint_as_float((u32)(partial >> 32));
            best.id = (u32)partial;
        }
        if (threadIdx.x < WARP) best = warp_best(best);
        if (threadIdx.x == 0) counters[place] = 0;
    }
    if (threadIdx.x == 0) out.put(place, best.id == NOBODY ? 0 : best.id);
}

// ---- draws ------------------------------------------------------------------------------------------------------
// Rises with the number; the two zeroes are one.
DEVICE u32 key_of(float x) {
    u32 bits = x == 0.0f ? 0 : __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float number_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

DEVICE u32 bits_of(u32 x) { return 32 - __clz((int)x); }

DEVICE bool keeps(Cut cut, u32 key, u32 id) { return key > cut.key || (key == cut.key && id <= cut.id); }

// Softmax weights as fixed-point numbers: 2^44 is the most likely token, and the sum of 2^18 of them still fits.
struct Softmax {
    float highest, temperature;
    bool finite;

    DEVICE u64 operator()(float x) const {
        float weight = finite ? expf((x - highest) / temperature) : 1.0f;
        return (u64)(weight * 17592186044416.0f);
    }
};
struct One {
    DEVICE u64 operator()(float) const { return 1; }
};

DEVICE u64 warp_sum64(u64 x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}
// Sum of this lane and those below it.
DEVICE u64 warp_scan64(u64 x) {
    u32 lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        u64 below = __shfl_up_sync(FULL_WARP, x, step);
        if (lane >= step) x += below;
    }
    return x;
}

DEVICE u64 bin_mass(const Scratch &s, u32 bin) { return ((u64)s.high[bin] << 32) + s.low[bin]; }

DEVICE void add_to_bin(Scratch &s, u32 bin, u64 mass) {
    u32 low = (u32)mass, before = atomicAdd(&s.low[bin], low);
    u32 high = (u32)(mass >> 32) + (before + low < before ? 1 : 0);
    if (high != 0) atomicAdd(&s.high[bin], high);
}

// Finds the bin in which the running sum reaches `wanted` (of all bins: `share` of their total, when `wanted` is 0) and
// leaves it in `s` with the mass above and inside it.
template <typename SHARE> DEVICE u64 find_bin(Scratch &s, u64 before, u64 wanted, SHARE share) {
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u64 first = bin_mass(s, 2 * threadIdx.x), both = first + bin_mass(s, 2 * threadIdx.x + 1);
    u64 scanned = warp_scan64(both);
    if (lane == 31) s.sums[warp] = scanned;
    __syncthreads();
    u64 warps = warp_scan64(s.sums[lane]);
    u64 total = __shfl_sync(FULL_WARP, warps, 31);
    u64 below = warp == 0 ? 0 : __shfl_sync(FULL_WARP, warps, warp == 0 ? 0 : warp - 1);
    if (wanted == 0) wanted = share(total);
    u64 start = before + below + scanned - both;
    if (start < wanted && wanted <= start + both) {
        bool in_first = wanted <= start + first;
        s.bin = 2 * threadIdx.x + (in_first ? 0 : 1);
        s.above = in_first ? start : start + first;
        s.inside = in_first ? first : both - first;
    }
    __syncthreads();
    return wanted;
}

// Of what `limit` keeps, the fewest most likely whose mass reaches share(all of it). Each pass over the row bins the
// distance from the top of a range and goes on inside the bin where the sum is reached: first by logit, then, among
// equal logits, by id.
template <typename MASS, typename SHARE>
DEVICE Cut select(const Row &row, u32 highest, u32 lowest, Cut limit, MASS mass, SHARE share, Scratch &s) {
    u32 bits = bits_of(highest - lowest);
    u32 top = highest, shift = bits > BIN_BITS ? bits - BIN_BITS : 0, key = 0;
    bool by_id = false;
    u64 before = 0, wanted = 0;
    for (;;) {
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) s.low[i] = s.high[i] = 0;
        __syncthreads();
        each<false>(row.logits, 0, row.vocab, [&](float x, u32 id) {
            u32 own = key_of(x);
            bool candidate = by_id ? own == key && id >= top : own <= top;
            u32 bin = (by_id ? id - top : top - own) >> shift;
            if (!candidate || bin >= BINS || !keeps(limit, own, id) || !row.allows(x, id)) return;
            u64 m = mass(x);
            if (m != 0) add_to_bin(s, bin, m);
        });
        __syncthreads();
        wanted = find_bin(s, before, wanted, share);
        u32 first = s.bin << shift, last = first + ((1u << shift) - 1);
        before = s.above;
        bool whole = before + s.inside == wanted;
        if (!by_id) {
            // A bin of one logit and the mass of one token holds one token.
            bool single = shift == 0 && s.inside == mass(number_of(top - first));
            if (whole || single) return Cut{last > top ? 0 : top - last, NOBODY};
            top -= first;
            if (shift == 0) {
                by_id = true;
                key = top;
                top = 0;
                bits = bits_of(row.vocab - 1);
                shift = bits > BIN_BITS ? bits - BIN_BITS : 0;
                continue;
            }
        } else {
            if (whole || shift == 0) return Cut{key, top + last};
            top += first;
        }
        shift = shift > BIN_BITS ? shift - BIN_BITS : 0;
    }
}

// The first id at which the sum over what `cut` keeps passes `uniform` of the whole.
DEVICE u32 invert(const Row &row, Cut cut, const Softmax &mass, double uniform, Scratch &s) {
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    auto mass_at = [&](u32 id) -> u64 {
        float x = row.logits[id];
        return row.allows(x, id) && keeps(cut, key_of(x), id) ? mass(x) : 0;
    };
    u32 begin = 0, end = row.vocab;
    u64 before = 0, target = 0;
    bool whole = true;
    while (whole || end - begin > WARP) {
        // Each warp sums a stretch of ids; the stretch that holds the target is cut up again.
        u32 stretch = ((end - begin + WARPS - 1) / WARPS + 31) & ~31u;
        u32 from = begin + warp * stretch, to = from + stretch < end ? from + stretch : end;
        u64 sum = 0;
#pragma unroll 4
        for (u32 id = from + lane; id < to; id += WARP) sum += mass_at(id);
        sum = warp_sum64(sum);
        if (lane == 0) s.sums[warp] = sum;
        __syncthreads();
        u64 scanned = warp_scan64(s.sums[lane]);
        u64 total = __shfl_sync(FULL_WARP, scanned, 31);
        __syncthreads();
        if (whole) {
            target = (u64)(uniform * (double)total);
            if (target >= total) target = total - 1;
            whole = false;
        }
        u32 holder = __ffs((int)__ballot_sync(FULL_WARP, before + scanned > target)) - 1;
        u64 below = __shfl_sync(FULL_WARP, scanned, holder == 0 ? 0 : holder - 1);
        before += holder == 0 ? 0 : below;
        begin += holder * stretch;
        end = begin + stretch < end ? begin + stretch : end;
    }
    u64 own = begin + lane < end ? mass_at(begin + lane) : 0;
    u64 scanned = warp_scan64(own);
    return begin + __ffs((int)__ballot_sync(FULL_WARP, before + scanned > target)) - 1;
}

// The `index`-th number of stream `seed`, in [0, 1); the host's.
DEVICE double uniform_of(u64 seed, u64 index) {
    u64 z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (double)((z ^ (z >> 31)) >> 11) * (1.0 / 9007199254740992.0);
}

DEVICE u32 block_min(u32 x, u32 *scratch) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = min(x, __shfl_xor_sync(FULL_WARP, x, step));
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    x = scratch[threadIdx.x & 31];
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = min(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}
DEVICE u32 block_count(u32 x, u32 *scratch) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    x = scratch[threadIdx.x & 31];
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

DEVICE u32 draw_token(const Row &row, const Draw &draw, Scratch &s) {
    Best best = {-infinity(), NOBODY};
    u32 lowest = NOBODY, count = 0;
    each<false>(row.logits, 0, row.vocab, [&](float x, u32 id) {
        if (!row.allows(x, id)) return;
        if (x > best.value || (best.id == NOBODY && x == best.value)) {
            best.value = x;
            best.id = id;
        }
        lowest = min(lowest, key_of(x));
        count++;
    });
    best = block_best(best, s);
    lowest = block_min(lowest, s.lowest);
    count = block_count(count, s.counts);
    if (count <= 1) return best.id == NOBODY ? 0 : best.id;
    u32 highest = key_of(best.value);
    Softmax mass = {best.value, draw.temperature, fabsf(best.value) < infinity()};
    Cut cut = {0, NOBODY};
    if (draw.top_k > 0 && draw.top_k < count) {
        u64 k = draw.top_k;
        cut = select(row, highest, lowest, cut, One{}, [=](u64) { return k; }, s);
    }
    if (draw.top_p < 1.0f) {
        double p = (double)draw.top_p;
        auto share = [=](u64 total) {
            u64 wanted = (u64)ceil((double)total * p);
            return wanted < 1 ? 1ull : wanted < total ? wanted : total;
        };
        cut = select(row, highest, lowest, cut, mass, share, s);
    }
    return invert(row, cut, mass, uniform_of(draw.seed, draw.index), s);
}

// ---- kernels ----------------------------------------------------------------------------------------------------
// grid: splits of a row, rows. `partials` has room for every block, `counters` for every row; the counters are zero
// between launches.
KERNEL __launch_bounds__(ARGMAX_THREADS) argmax_f32(const float *logits, u32 vocab, u32 *out, u32 *host, u64 *partials, u32 *counters) {
    __shared__ Scratch s;
    allow_next();
    wait_for_previous();
    take_maximum(Row{logits + (u64)blockIdx.y * vocab, vocab, 0}, Tokens{out, host}, partials, counters, s);
}

// The same where a product has kept the maximum of each of its tiles; a warp for each row.
KERNEL __launch_bounds__(ARGMAX_THREADS) argmax_tiles(const u64 *maxima, u32 tiles, u32 rows, u32 *out, u32 *host) {
    allow_next();
    wait_for_previous();
    u32 row = blockIdx.x * (ARGMAX_THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    Best best = {-infinity(), NOBODY};
    for (u32 tile = lane; tile < tiles; tile += WARP) {
        u64 kept = maxima[(u64)row * tiles + tile];
        Best other = {__uint_as_float((u32)(kept >> 32)), (u32)kept};
        if (beats(other, best)) best = other;
    }
    best = warp_best(best);
    if (lane == 0) Tokens{out, host}.put(row, best.id == NOBODY ? 0 : best.id);
}

// Only the first block of a row draws; all of them look for a maximum. Dynamic shared memory: scratch, a bit per id.
KERNEL __launch_bounds__(THREADS)
    sample_f32(const float *logits, u32 vocab, const Draw *draws, const u32 *banned, u32 *out, u32 *host, u64 *partials,
               u32 *counters) {
    DYNAMIC_SHARED(shared);
    Scratch &s = *(Scratch *)shared;
    allow_next();
    wait_for_previous();
    Draw draw = draws[blockIdx.y];
    bool greedy = draw.temperature == 0.0f || draw.top_k == 1;
    if (!greedy && blockIdx.x > 0) return;
    Row row = {logits + (u64)blockIdx.y * vocab, vocab, 0};
    if (draw.banned_len > 0) {
        u32 *bits = (u32 *)(shared + SCRATCH_BYTES);
        for (u32 i = threadIdx.x; i < (vocab + 31) / 32; i += THREADS) bits[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < draw.banned_len; i += THREADS) {
            u32 id = banned[draw.banned_start + i];
            if (id < vocab) atomicOr(&bits[id >> 5], 1u << (id & 31));
        }
        __syncthreads();
        row.forbidden = bits;
    }
    if (greedy) {
        take_maximum(row, Tokens{out, host}, partials, counters, s);
    } else {
        u32 token = draw_token(row, draw, s);
        if (threadIdx.x == 0) Tokens{out, host}.put(blockIdx.y, token);
    }
}
