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

// A warp for each token. Shared memory: a word for each expert and warp.
KERNEL __launch_bounds__(128) moe_route(const __grid_constant__ RouteTask t) {
    DYNAMIC_SHARED(route_memory);
    wait_for_previous();
    allow_next();
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, token = blockIdx.x * (blockDim.x / 32) + warp;
    if (token >= t.tokens) return;
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
    u32 *orders = (u32 *)route_memory + warp * t.experts;
    auto score = [&](u32 e) { return t.method == ROUTE_DEEPSEEK ? 1.0f / (1.0f + expf(-logits[e])) : logits[e]; };
    auto biased = [&](u32 e) { return bias ? score(e) + bias[e] : score(e); };
    for (u32 e = lane; e < t.experts; e += 32) orders[e] = order_of(biased(e));
    __syncwarp();

    if (t.method == ROUTE_DEEPSEEK) {
        // The sum of the two best of each group: two groups for each lane at most.
        __shared__ u32 of_groups[4][64];
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

// Sum over a block of at most 1024 threads of what the threads before have; `total` is that of all. Two sums at once where
// neither reaches 32 bits.
DEVICE u64 block_scan(u64 x, u64 *scratch, u64 &total) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u64 sum = x;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        u64 other = __shfl_up_sync(FULL_WARP, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (u32 i = 0; i < warps; i++) {
        u64 here = scratch[i];
        if (i < warp) before += here;
        total += here;
    }
    return before + sum - x;
}

// A block for each expert: every block counts the pairs of all, and places its own in the order of tokens.
KERNEL __launch_bounds__(1024) moe_plan(const __grid_constant__ PlanTask t) {
    DYNAMIC_SHARED(plan_memory);
    __shared__ u64 scratch[32];
    wait_for_previous();
    allow_next();
    u32 *counts = (u32 *)plan_memory;
    const u32 expert = blockIdx.x;
    for (u32 e = threadIdx.x; e < t.experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < t.pairs; i += blockDim.x) {
        u32 e = t.chosen[i];
        if (e < t.experts) atomicAdd(&counts[e], 1u);
    }
    __syncthreads();
    u64 before = 0, all = 0;
    for (u32 e = threadIdx.x; e < expert; e += blockDim.x) before += (u64)counts[e] << 32 | (counts[e] + t.tile_rows - 1) / t.tile_rows;
    block_scan(before, scratch, all);
    const u32 first = (u32)(all >> 32), first_tile = (u32)all, own = counts[expert], own_tiles = (own + t.tile_rows - 1) / t.tile_rows;
    for (u32 i = threadIdx.x; i < own_tiles; i += blockDim.x) {
        ExpertTile tile;
        tile.expert = expert;
        tile.first = first + i * t.tile_rows;
        tile.rows = min(t.tile_rows, own - i * t.tile_rows);
        tile.unused = 0;
        t.tiles[first_tile + i] = tile;
    }
    if (threadIdx.x == 0) {
        t.counts[expert] = own;
        if (expert + 1 == t.experts) {
            t.tile_count[0] = first_tile + own_tiles;
            t.tile_count[1] = first + own;
        }
    }
    if (own == 0) return;
    // Neighbouring pairs for each thread, so that order within an expert is that of pairs.
    const u32 per = (t.pairs + blockDim.x - 1) / blockDim.x, begin = min(threadIdx.x * per, t.pairs), end = min(begin + per, t.pairs);
    u32 found = 0;
    for (u32 i = begin; i < end; i++) found += t.chosen[i] == expert;
    u64 total;
    u32 place = first + (u32)block_scan(found, scratch, total);
    for (u32 i = begin; i < end; i++) {
        if (t.chosen[i] != expert) continue;
        t.order[place] = i;
        t.places[i] = place++;
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

template <typename T> DEVICE void expert_sum(const SumTask &t) {
    wait_for_previous();
    allow_next();
    const u32 token = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * 2;
    const u32 *chosen = t.chosen + (u64)token * t.k, *places = t.places + (u64)token * t.k;
    if (column >= t.width || chosen[0] == NO_EXPERT) return;
    const bool pair = column + 1 < t.width, even = t.width % 2 == 0;
    float low = 0.0f, high = 0.0f;
    for (u32 i = 0; i < t.k; i++) {
        const T *x = (const T *)t.x + (u64)places[i] * t.width + column;
        float weight = t.weights[(u64)token * t.k + i], a, b = 0.0f;
        if (even && sizeof(T) == 2) {
            u32 both = *(const u32 *)x;
            T l, h;
            *(u16 *)&l = (u16)both;
            *(u16 *)&h = (u16)(both >> 16);
            a = to_float(l);
            b = to_float(h);
        } else {
            a = to_float(x[0]);
            if (pair) b = to_float(x[1]);
        }
        low = fmaf(weight, a, low);
        high = fmaf(weight, b, high);
    }
    float *hidden = t.hidden + (u64)token * t.width + column;
    hidden[0] += low;
    if (pair) hidden[1] += high;
}
KERNEL __launch_bounds__(256) moe_sum_bf16(const __grid_constant__ SumTask t) { expert_sum<bf16>(t); }
KERNEL __launch_bounds__(256) moe_sum_f16(const __grid_constant__ SumTask t) { expert_sum<f16>(t); }
KERNEL __launch_bounds__(256) moe_sum_f32(const __grid_constant__ SumTask t) { expert_sum<float>(t); }

// Counts of all layers into memory of the host.
KERNEL moe_copy_counts(const u32 *counts, u32 *host, u32 count) {
    wait_for_previous();
    allow_next();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) host[i] = counts[i];
}
