// Mixtures of experts: the experts of each token, the pairs of token and expert sorted by expert, and the sum of what a
// token's experts answer. The experts' products are in moe_gemm.cu. No grid depends on what was chosen.

// ---- routing ----------------------------------------------------------------------------------------------------
struct RouteTask {
    const float *logits;    // [tokens][experts]
    const float *planned;   // the same in balance, or null
    const u32 *use_planned; // whether these are to be used instead; null with `planned`
    const float *bias;      // [experts], or null
    const int *slots;       // [tokens]: negative where a row is padding, or null
    u32 *chosen;            // [tokens][k], the best first; NO_EXPERT in rows of padding
    float *weights;         // [tokens][k]
    u32 tokens, experts, k;
    u32 method; // see ROUTE_*
    u32 groups, topk_groups;
    u32 renormalise;
    float scale;
};

#define ROUTE_SOFTMAX_TOPK 0
#define ROUTE_TOPK_SOFTMAX 1
#define ROUTE_DEEPSEEK 2
#define NO_EXPERT 0xffffffffu
#define FEW_PAIRS 64 // that one block sorts

// Numbers as integers of the same order, none of them 0; both zeroes are one, and what is not a number comes last.
DEVICE u32 order_of(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    if (x != x) return 1;
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
DEVICE float value_of(u32 order) { return __uint_as_float(order ^ (order >> 31 ? 0x80000000u : 0xffffffffu)); }

// The best of `orders`, of which 0 is taken already, and its index: ties to the lower one.
DEVICE u64 lane_best(const u32 *orders, u32 count, u32 lane) {
    u64 best = 0;
    for (u32 i = lane; i < count; i += 32) {
        u64 here = (u64)orders[i] << 32 | (0xffffffffu - i);
        if (orders[i] && here > best) best = here;
    }
    return best;
}
DEVICE u64 warp_best(u64 best) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        u64 other = __shfl_xor_sync(FULL_WARP, best, step);
        best = other > best ? other : best;
    }
    return best;
}

// Takes the best `count` of `orders`, best first; `use(i, index, order)` hears of each in every lane.
template <typename Use> DEVICE void take_best(u32 *orders, u32 length, u32 count, u32 lane, Use use) {
    u64 own = lane_best(orders, length, lane);
    for (u32 i = 0; i < count; i++) {
        u64 best = warp_best(own);
        u32 index = 0xffffffffu - (u32)best;
        use(i, index, (u32)(best >> 32));
        if (index % 32 == lane) {
            orders[index] = 0;
            own = lane_best(orders, length, lane);
        }
    }
    __syncwarp();
}

// One token, by a warp; `orders` are a word for each expert in shared memory.
DEVICE void route_token(const RouteTask &t, u32 token, u32 warp, u32 lane, u32 *orders) {
    u32 *chosen = t.chosen + (u64)token * t.k;
    float *weights = t.weights + (u64)token * t.k;
    if (t.slots && t.slots[token] < 0) {
        for (u32 i = lane; i < t.k; i += 32) {
            chosen[i] = NO_EXPERT;
            weights[i] = 0.0f;
        }
        return;
    }
    const bool planned = t.planned && *t.use_planned;
    const float *logits = (planned ? t.planned : t.logits) + (u64)token * t.experts;
    const float *bias = planned ? nullptr : t.bias; // it would undo the balance
    auto score = [&](u32 e) { return t.method == ROUTE_DEEPSEEK ? 1.0f / (1.0f + expf(-logits[e])) : logits[e]; };
    auto biased = [&](u32 e) { return bias ? score(e) + bias[e] : score(e); };
    for (u32 e = lane; e < t.experts; e += 32) orders[e] = order_of(biased(e));
    __syncwarp();

    if (t.method == ROUTE_DEEPSEEK) {
        // The sum of the two best of each group: two groups for each lane at most.
        __shared__ u32 of_groups[32][64];
        const u32 per = t.experts / t.groups;
        for (u32 group = lane; group < t.groups; group += 32) {
            u32 first = 0, second = 0;
            for (u32 e = group * per; e < (group + 1) * per; e++) {
                u32 here = orders[e];
                if (here > first) second = first, first = here;
                else if (here > second) second = here;
            }
            of_groups[warp][group] = order_of(value_of(first) + (per > 1 ? value_of(second) : 0.0f));
        }
        __syncwarp();
        u64 allowed = 0;
        take_best(of_groups[warp], t.groups, t.topk_groups, lane, [&](u32, u32 group, u32) { allowed |= 1ull << group; });
        for (u32 e = lane; e < t.experts; e += 32)
            if (!(allowed >> (e / per) & 1)) orders[e] = 0;
        __syncwarp();
    }

    float best = 0.0f, sum = 0.0f;
    take_best(orders, t.experts, t.k, lane, [&](u32 i, u32 expert, u32 order) {
        float value = value_of(order);
        if (i == 0) best = value;
        float weight = t.method == ROUTE_DEEPSEEK ? score(expert) : expf(value - best);
        sum += weight;
        if (i % 32 == lane) {
            chosen[i] = expert;
            weights[i] = weight;
        }
    });
    if (t.method == ROUTE_SOFTMAX_TOPK) {
        sum = 0.0f;
        for (u32 e = lane; e < t.experts; e += 32) sum += expf(biased(e) - best);
        sum = warp_sum(sum);
    }
    if (t.method == ROUTE_DEEPSEEK) sum = t.renormalise ? sum + 1e-20f : 1.0f;
    const float scale = t.method == ROUTE_DEEPSEEK ? t.scale : 1.0f;
    for (u32 i = lane; i < t.k; i += 32) weights[i] = weights[i] / sum * scale;
}

// A warp for each token. Shared memory: a word for each expert and warp.
KERNEL __launch_bounds__(128) moe_route(const __grid_constant__ RouteTask t) {
    DYNAMIC_SHARED(route_memory);
    wait_for_previous();
    allow_next();
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, token = blockIdx.x * (blockDim.x / 32) + warp;
    if (token < t.tokens) route_token(t, token, warp, lane, (u32 *)route_memory + warp * t.experts);
}

// ---- pairs sorted by expert -------------------------------------------------------------------------------------
struct PlanTask {
    const u32 *chosen; // [pairs]
    u32 *order;        // the pair at each place
    u32 *places;       // the place of each pair
    ExpertTile *tiles;
    u32 *tile_count; // and behind it the number of pairs that go somewhere
    u32 *counts; // [experts]: pairs of each
    u32 pairs, experts;
    u32 tile_rows;
};

// Sum over a block of at most 1024 threads; `scratch` holds 32 sums.
DEVICE u64 block_total(u64 x, u64 *scratch) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    u64 total = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) total += scratch[i];
    return total;
}

// Pairs and tiles of an expert in one number: neither sum reaches 32 bits.
DEVICE u64 pairs_and_tiles(u32 pairs, u32 tile_rows) { return (u64)pairs << 32 | (pairs + tile_rows - 1) / tile_rows; }

DEVICE void put_tiles(const PlanTask &t, u32 expert, u32 first, u32 first_tile, u32 own, u32 from, u32 step) {
    for (u32 i = from; i * t.tile_rows < own; i += step) {
        ExpertTile tile;
        tile.expert = expert;
        tile.first = first + i * t.tile_rows;
        tile.rows = min(t.tile_rows, own - i * t.tile_rows);
        tile.unused = 0;
        t.tiles[first_tile + i] = tile;
    }
}

// A block for each expert: every block counts the pairs of all, and places its own in the order of tokens. A warp takes
// neighbouring pairs, so that reads come together and order is kept.
KERNEL __launch_bounds__(1024) moe_plan(const __grid_constant__ PlanTask t) {
    DYNAMIC_SHARED(plan_memory);
    __shared__ u64 scratch[32];
    __shared__ u32 of_warps[32];
    wait_for_previous();
    allow_next();
    u32 *counts = (u32 *)plan_memory;
    const u32 expert = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (u32 e = threadIdx.x; e < t.experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    const u32 per = ((t.pairs + warps - 1) / warps + 31) / 32 * 32, begin = min(warp * per, t.pairs), end = min(begin + per, t.pairs);
    u32 found = 0;
#pragma unroll 4
    for (u32 base = begin; base < end; base += 32) {
        const u32 i = base + lane;
        u32 e = i < end ? t.chosen[i] : NO_EXPERT;
        if (e < t.experts) atomicAdd(&counts[e], 1u);
        found += __popc(__ballot_sync(FULL_WARP, e == expert));
    }
    if (lane == 0) of_warps[warp] = found;
    __syncthreads();
    u64 before = 0;
    for (u32 e = threadIdx.x; e < expert; e += blockDim.x) before += pairs_and_tiles(counts[e], t.tile_rows);
    const u64 all = block_total(before, scratch);
    const u32 first = (u32)(all >> 32), first_tile = (u32)all, own = counts[expert];
    put_tiles(t, expert, first, first_tile, own, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) {
        t.counts[expert] = own;
        if (expert + 1 == t.experts) {
            t.tile_count[0] = first_tile + (own + t.tile_rows - 1) / t.tile_rows;
            t.tile_count[1] = first + own;
        }
    }
    if (found == 0) return;
    u32 place = first;
    for (u32 i = 0; i < warp; i++) place += of_warps[i];
#pragma unroll 4
    for (u32 base = begin; base < end; base += 32) {
        const u32 i = base + lane;
        bool mine = i < end && t.chosen[i] == expert;
        u32 taken = __ballot_sync(FULL_WARP, mine);
        if (mine) {
            u32 at = place + __popc(taken & ((1u << lane) - 1));
            t.order[at] = i;
            t.places[i] = at;
        }
        place += __popc(taken);
    }
}

// Both in one block, for few pairs: a warp for each token, then a thread for each pair. Shared memory: a word for each
// expert and warp, and one more for each expert.
KERNEL __launch_bounds__(1024) moe_route_and_plan(const __grid_constant__ RouteTask r, const __grid_constant__ PlanTask t) {
    DYNAMIC_SHARED(both_memory);
    __shared__ u64 scratch[32];
    __shared__ u32 chosen[FEW_PAIRS];
    wait_for_previous();
    allow_next();
    u32 *counts = (u32 *)both_memory, *orders = counts + t.experts;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    for (u32 e = threadIdx.x; e < t.experts; e += blockDim.x) counts[e] = 0;
    for (u32 token = warp; token < r.tokens; token += blockDim.x / 32) {
        route_token(r, token, warp, lane, orders + warp * r.experts);
        __syncwarp();
        for (u32 i = token * r.k + lane; i < (token + 1) * r.k; i += 32) chosen[i] = r.chosen[i];
    }
    __syncthreads();
    const u32 pair = threadIdx.x, expert = pair < t.pairs ? chosen[pair] : NO_EXPERT;
    // One warp after the other, so that the order within an expert is that of pairs.
    u32 rank = 0;
    for (u32 turn = 0; turn * 32 < t.pairs; turn++) {
        if (warp == turn) {
            u32 same = __match_any_sync(FULL_WARP, expert), before = same & ((1u << lane) - 1);
            if (expert < t.experts) rank = counts[expert] + __popc(before);
            __syncwarp();
            if (expert < t.experts && !before) counts[expert] += __popc(same);
        }
        __syncthreads();
    }
    // Experts in turn, some for each thread, and what those before them have.
    const u32 per = (t.experts + blockDim.x - 1) / blockDim.x, begin = min(threadIdx.x * per, t.experts), end = min(begin + per, t.experts);
    u64 own = 0;
    for (u32 e = begin; e < end; e++) own += pairs_and_tiles(counts[e], t.tile_rows);
    u64 sum = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        u64 other = __shfl_up_sync(FULL_WARP, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    u64 at = sum - own;
    for (u32 i = 0; i < warp; i++) at += scratch[i];
    for (u32 e = begin; e < end; e++) {
        u32 here = counts[e], first = (u32)(at >> 32);
        t.counts[e] = here;
        put_tiles(t, e, first, (u32)at, here, 0, 1);
        at += pairs_and_tiles(here, t.tile_rows);
        counts[e] = first;
    }
    if (end == t.experts && begin < end) {
        t.tile_count[0] = (u32)at;
        t.tile_count[1] = (u32)(at >> 32);
    }
    __syncthreads();
    if (expert < t.experts) {
        u32 place = counts[expert] + rank;
        t.order[place] = pair;
        t.places[pair] = place;
    }
}

// Rows of tokens in the order of places, for products that want them side by side; a block for each place.
KERNEL __launch_bounds__(256) moe_gather(const bytes16 *x, bytes16 *out, const u32 *order, const u32 *tile_count, u32 per_token, u32 parts) {
    wait_for_previous();
    allow_next();
    if (blockIdx.x >= tile_count[1]) return;
    const bytes16 *from = x + (u64)(order[blockIdx.x] / per_token) * parts;
    for (u32 i = threadIdx.x; i < parts; i += blockDim.x) out[(u64)blockIdx.x * parts + i] = from[i];
}

// ---- what a token's experts answer ------------------------------------------------------------------------------
struct SumTask {
    const void *x;        // a row for each place
    const u32 *chosen;    // [tokens][k]
    const u32 *places;    // [tokens][k]
    const float *weights; // [tokens][k]
    float *hidden;        // [tokens][width]: the sum is added
    u32 k, width;
};

template <typename T, int N> DEVICE void load_group(const T *from, float (&x)[N]) {
    if (N == 1) {
        x[0] = to_float(from[0]);
    } else if (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            bytes16 v = *(const bytes16 *)(from + i);
            x[i] = __uint_as_float(v.x), x[i + 1] = __uint_as_float(v.y), x[i + 2] = __uint_as_float(v.z), x[i + 3] = __uint_as_float(v.w);
        }
    } else {
        bytes16 v = *(const bytes16 *)from;
        u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < N; i++) {
            T one;
            *(u16 *)&one = (u16)(words[i / 2] >> (i % 2 * 16));
            x[i] = to_float(one);
        }
    }
}

// N neighbours for each thread; all rows have whole groups of them.
template <typename T, int N> DEVICE void expert_sum(const SumTask &t) {
    wait_for_previous();
    allow_next();
    const u32 token = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    const u32 *chosen = t.chosen + (u64)token * t.k, *places = t.places + (u64)token * t.k;
    if (column >= t.width || chosen[0] == NO_EXPERT) return;
    const float *weights = t.weights + (u64)token * t.k;
    float sums[N];
#pragma unroll
    for (int i = 0; i < N; i++) sums[i] = 0.0f;
#pragma unroll 4
    for (u32 slot = 0; slot < t.k; slot++) {
        const T *x = (const T *)t.x + (u64)places[slot] * t.width + column;
        const float weight = weights[slot];
        float values[N];
        load_group<T, N>(x, values);
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = fmaf(weight, values[i], sums[i]);
    }
    float *hidden = t.hidden + (u64)token * t.width + column, old[N];
    load_group<float, N>(hidden, old);
#pragma unroll
    for (int i = 0; i < N; i++) old[i] += sums[i];
    if (N == 1) {
        hidden[0] = old[0];
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            bytes16 all;
            all.x = __float_as_uint(old[i]), all.y = __float_as_uint(old[i + 1]), all.z = __float_as_uint(old[i + 2]), all.w = __float_as_uint(old[i + 3]);
            *(bytes16 *)(hidden + i) = all;
        }
    }
}
#define SUMS(SUFFIX, T)                                                                                                \
    KERNEL __launch_bounds__(256) moe_sum_##SUFFIX(const __grid_constant__ SumTask t) { expert_sum<T, 8>(t); }          \
    KERNEL __launch_bounds__(256) moe_sum_any_##SUFFIX(const __grid_constant__ SumTask t) { expert_sum<T, 1>(t); }
SUMS(bf16, bf16)
SUMS(f16, f16)
SUMS(f32, float)

// Counts of all layers into memory of the host.
KERNEL moe_copy_counts(const u32 *counts, u32 *host, u32 count) {
    wait_for_previous();
    allow_next();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) host[i] = counts[i];
}
