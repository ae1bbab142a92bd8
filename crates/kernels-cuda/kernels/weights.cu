// Weights on the device: generated, unpacked from the layout of the CPU's engines, filled.

// Elements of a random tensor: a counter-based generator, the same numbers as the host's, bit for bit.
DEVICE u64 mixed(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
template <typename T> DEVICE void random_normal(T *out, u64 key, u64 start, u64 count, float scale) {
    wait_for_previous();
    const u64 odd_fields = 0x0000FFFF0000FFFFull;
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        u64 bits = mixed(key + (start + i) * 0x9E3779B97F4A7C15ull);
        u64 pairs = (bits & odd_fields) + ((bits >> 16) & odd_fields);
        u32 sum = (u32)(pairs >> 32) + (u32)pairs;
        out[i] = Cast<T>::from(((float)sum - 131070.0f) * scale);
    }
}

// `[ceil(n / 32)][k][32]` to `[n][k]`; a block of 256 threads turns 64 columns of one panel.
template <typename T> DEVICE void unpack_panels(const T *packed, T *out, u32 n, u32 k, u32 parts) {
    __shared__ T tile[32][65];
    wait_for_previous();
    u32 panel = blockIdx.x / parts, first = blockIdx.x % parts * 64;
    for (u32 i = threadIdx.x; i < 64 * 32; i += blockDim.x) {
        u32 column = i / 32, row = i % 32;
        if (first + column < k) tile[row][column] = packed[((u64)panel * k + first + column) * 32 + row];
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 64 * 32; i += blockDim.x) {
        u32 row = i / 64, column = i % 64;
        if (panel * 32 + row < n && first + column < k)
            out[(u64)(panel * 32 + row) * k + first + column] = tile[row][column];
    }
}

#define WEIGHT_OPS(SUFFIX, T)                                                                                             \
    KERNEL random_normal_##SUFFIX(T *out, u64 key, u64 start, u64 count, float scale) {                                   \
        random_normal<T>(out, key, start, count, scale);                                                                  \
    }                                                                                                                     \
    KERNEL unpack_panels_##SUFFIX(const T *packed, T *out, u32 n, u32 k, u32 parts) {                                     \
        unpack_panels<T>(packed, out, n, k, parts);                                                                       \
    }
WEIGHT_OPS(f32, float)
WEIGHT_OPS(f16, f16)
WEIGHT_OPS(bf16, bf16)

KERNEL fill_f32(float *out, float value, u64 count) {
    wait_for_previous();
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) out[i] = value;
}
