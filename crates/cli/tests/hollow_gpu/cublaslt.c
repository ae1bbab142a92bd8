/* A cuBLASLt that multiplies nothing: it has algorithms for every product, and tells recorder.c of each that runs. Some
   algorithms do not take every number of rows, as in the real one. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern void hollow_launch(const char *name, const uint32_t *grid, const void *arguments, int bytes);

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { ALGORITHMS = 3, PICKY = 2 };

/* Attributes of a description, as NVIDIA numbers them. */
enum { TRANSPOSE_A = 3, TRANSPOSE_B = 4, A_SCALE = 17, B_SCALE = 18, FAST_SUMS = 25, A_SCALE_MODE = 31, B_SCALE_MODE = 32 };

struct description {
    int32_t compute, scale, transpose_a, transpose_b, fast_sums, a_mode, b_mode;
    uint64_t a_scale, b_scale;
};
struct layout {
    int32_t type;
    uint64_t rows, columns;
    int64_t leading;
};
struct algorithm {
    uint64_t data[8];
};
struct found {
    struct algorithm algorithm;
    size_t workspace;
    int32_t state;
    float waves;
    int32_t reserved[4];
};

int cublasLtCreate(void **handle) { *handle = malloc(1); return SUCCESS; }
int cublasLtDestroy(void *handle) { free(handle); return SUCCESS; }
size_t cublasLtGetVersion(void) { return 130001; }

int cublasLtMatmulDescCreate(struct description **made, int compute, int scale) {
    *made = calloc(1, sizeof **made);
    (*made)->compute = compute;
    (*made)->scale = scale;
    return SUCCESS;
}
int cublasLtMatmulDescDestroy(struct description *description) { free(description); return SUCCESS; }
int cublasLtMatmulDescSetAttribute(struct description *description, int which, const void *value, size_t bytes) {
    void *field;
    size_t size = 4;
    switch (which) {
    case TRANSPOSE_A: field = &description->transpose_a; break;
    case TRANSPOSE_B: field = &description->transpose_b; break;
    case A_SCALE_MODE: field = &description->a_mode; break;
    case B_SCALE_MODE: field = &description->b_mode; break;
    case FAST_SUMS: field = &description->fast_sums; size = 1; break;
    case A_SCALE: field = &description->a_scale; size = 8; break;
    case B_SCALE: field = &description->b_scale; size = 8; break;
    default: return INVALID_VALUE;
    }
    if (bytes != size) return INVALID_VALUE;
    memcpy(field, value, size);
    return SUCCESS;
}

int cublasLtMatrixLayoutCreate(struct layout **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *made = malloc(sizeof **made);
    **made = (struct layout){type, rows, columns, leading};
    return SUCCESS;
}
int cublasLtMatrixLayoutDestroy(struct layout *layout) { free(layout); return SUCCESS; }
int cublasLtMatrixLayoutSetAttribute(struct layout *layout, int which, const void *value, size_t bytes) {
    if (which != 3 || bytes != 8) return INVALID_VALUE; /* columns */
    memcpy(&layout->columns, value, 8);
    return SUCCESS;
}

int cublasLtMatmulPreferenceCreate(void **preference) { *preference = malloc(1); return SUCCESS; }
int cublasLtMatmulPreferenceDestroy(void *preference) { free(preference); return SUCCESS; }
int cublasLtMatmulPreferenceSetAttribute(void *preference, int which, const void *value, size_t bytes) { return SUCCESS; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, struct description *description, struct layout *a, struct layout *b,
                                   struct layout *c, struct layout *d, void *preference, int most, struct found *found,
                                   int *count) {
    *count = 0;
    for (int i = 0; i < ALGORITHMS && i < most; i++) {
        if (i == PICKY && d->columns % 8) continue;
        found[(*count)++] = (struct found){{{i + 1, d->rows, a->rows}}, (size_t)i << 20, SUCCESS, 1};
    }
    return SUCCESS;
}

int cublasLtMatmulAlgoCheck(void *handle, struct description *description, struct layout *a, struct layout *b,
                            struct layout *c, struct layout *d, const struct algorithm *algorithm, struct found *result) {
    if (algorithm->data[1] != d->rows || algorithm->data[2] != a->rows) return INVALID_VALUE;
    if (algorithm->data[0] == PICKY + 1 && d->columns % 8) return NOT_SUPPORTED;
    *result = (struct found){*algorithm, (algorithm->data[0] - 1) << 20, SUCCESS, 1};
    return SUCCESS;
}

int cublasLtMatmul(void *handle, struct description *description, const float *alpha, uint64_t a, struct layout *la,
                   uint64_t b, struct layout *lb, const float *beta, uint64_t c, struct layout *lc, uint64_t d,
                   struct layout *ld, const struct algorithm *algorithm, uint64_t workspace, size_t workspace_bytes,
                   void *stream) {
    struct {
        uint64_t a, b, c, d, workspace, a_scale, b_scale, workspace_bytes;
        float alpha, beta;
        uint32_t algorithm, compute, scale, transpose_a, transpose_b, fast_sums, a_mode, b_mode;
        struct layout a_layout, b_layout, c_layout, d_layout;
    } arguments;
    memset(&arguments, 0, sizeof arguments);
    struct layout *layouts[] = {la, lb, lc, ld}, *kept = &arguments.a_layout;
    for (int i = 0; i < 4; i++) {
        kept[i].type = layouts[i]->type;
        kept[i].rows = layouts[i]->rows;
        kept[i].columns = layouts[i]->columns;
        kept[i].leading = layouts[i]->leading;
    }
    arguments.a = a, arguments.b = b, arguments.c = c, arguments.d = d;
    arguments.workspace = workspace, arguments.workspace_bytes = workspace_bytes;
    /* Pointers to scales count where they are asked for. */
    arguments.a_scale = description->a_mode ? description->a_scale : 0;
    arguments.b_scale = description->b_mode ? description->b_scale : 0;
    arguments.alpha = *alpha, arguments.beta = *beta;
    arguments.algorithm = algorithm->data[0];
    arguments.compute = description->compute, arguments.scale = description->scale;
    arguments.transpose_a = description->transpose_a, arguments.transpose_b = description->transpose_b;
    arguments.fast_sums = description->fast_sums;
    arguments.a_mode = description->a_mode, arguments.b_mode = description->b_mode;
    uint32_t grid[] = {algorithm->data[0], ld->rows, ld->columns};
    hollow_launch("cublasLtMatmul", grid, &arguments, sizeof arguments);
    return SUCCESS;
}
