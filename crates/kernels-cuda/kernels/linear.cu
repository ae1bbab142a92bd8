// What a matrix product leaves to be done: the scales of e4m3 operands where the library multiplies bare codes.

// Four neighbours of sums . scales + bias; `column` is a multiple of four, and so is the row's width.
DEVICE void scaled4(float (&v)[4], const float *sums, const float *w_scales, const float *bias, float x_scale, u32 column) {
    bytes16 s = *(const bytes16 *)(sums + column), w = *(const bytes16 *)(w_scales + column);
    u32 sum[4] = {s.x, s.y, s.z, s.w}, scale[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = __uint_as_float(sum[i]) * x_scale * __uint_as_float(scale[i]);
        if (bias) v[i] += bias[column + i];
    }
}

template <typename T>
DEVICE void scale_store(const float *sums, const float *x_scales, const float *w_scales, const float *bias, T *out, u32 n) {
    wait_for_previous();
    allow_next();
    u32 row = blockIdx.y, column = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (column >= n) return;
    float v[4];
    scaled4(v, sums + (u64)row * n, w_scales, bias, x_scales[row], column);
#pragma unroll
    for (int i = 0; i < 4; i++) out[(u64)row * n + column + i] = Cast<T>::from(v[i]);
}

KERNEL scale_store_f32(const float *sums, const float *x_scales, const float *w_scales, const float *bias, float *out, u32 n) {
    scale_store<float>(sums, x_scales, w_scales, bias, out, n);
}
KERNEL scale_store_f16(const float *sums, const float *x_scales, const float *w_scales, const float *bias, f16 *out, u32 n) {
    scale_store<f16>(sums, x_scales, w_scales, bias, out, n);
}
KERNEL scale_store_bf16(const float *sums, const float *x_scales, const float *w_scales, const float *bias, bf16 *out, u32 n) {
    scale_store<bf16>(sums, x_scales, w_scales, bias, out, n);
}
KERNEL scale_add(const float *sums, const float *x_scales, const float *w_scales, const float *bias, float *out, u32 n) {
    wait_for_previous();
    allow_next();
    u32 row = blockIdx.y, column = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (column >= n) return;
    float v[4];
    scaled4(v, sums + (u64)row * n, w_scales, bias, x_scales[row], column);
#pragma unroll
    for (int i = 0; i < 4; i++) out[(u64)row * n + column + i] += v[i];
}
