/* A CUDA driver that answers every call and computes nothing. What strobe does about GPUs that are old, full or faulty is
   seen with it on machines that have none. Variables say what is the matter:

     HOLLOW_DRIVER=12060          the version of CUDA that it is for
     HOLLOW_CAPABILITY=75         the GPU's compute capability
     HOLLOW_GPUS=0                how many there are
     HOLLOW_FREE_MIB=100          free memory
     HOLLOW_FAULT=cuCtx...:700:5  a function fails with this code from its sixth call on; -1: from the first profile window

   With OLD defined it has no function that came after CUDA 12.4. With RECORDS defined, recorder.c has the functions that
   move data and launch, and writes down what they are asked for. A context that is given back with kernels in it ends the
   process: strobe has one at a time, and what the next one loads must not lie beside the old kernels. */

#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int in_window;

/* What the call of this function returns. */
static int outcome(const char *name) {
    static int calls; /* of the one function that fails */
    const char *fault = getenv("HOLLOW_FAULT");
    size_t length = strlen(name);
    int code, after;
    if (!fault || strncmp(fault, name, length) || fault[length] != ':') return 0;
    if (sscanf(fault + length, ":%d:%d", &code, &after) != 2) return 0;
    return (after < 0 ? in_window : calls++ >= after) ? code : 0;
}

#define NOTHING(name) int name(void) { return outcome(#name); }
#define HANDLE(name) int name(void **handle) { *handle = (void *)8; return outcome(#name); }

int cuDriverGetVersion(int *version) { *version = number("HOLLOW_DRIVER", 13000); return 0; }
int cuDeviceGetCount(int *count) { *count = number("HOLLOW_GPUS", 1); return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Hollow GPU"); return 0; }
int cuDeviceGetPCIBusId(char *id, int size, int device) { snprintf(id, size, "0000:00:00.0"); return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { for (int i = 0; i < 16; i++) uuid[i] = 0x10 + i; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 80ul << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    int capability = number("HOLLOW_CAPABILITY", 90);
    switch (which) {
    case 16: *value = capability >= 90 ? 132 : capability == 80 ? 108 : 84; break; /* multiprocessors */
    case 38: *value = 50 << 20; break;         /* L2 */
    case 75: *value = capability / 10; break;
    case 76: *value = capability % 10; break;
    case 97: *value = capability >= 90 ? 232448 : capability == 80 ? 166912 : 101376; break; /* shared memory of a block */
    default: *value = 1000;
    }
    return 0;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN";
    return 0;
}
int cuGetErrorString(int code, const char **text) { *text = "as asked for"; return 0; }
static atomic_int modules;
int cuModuleLoadData(void **module) {
    int code = outcome("cuModuleLoadData");
    *module = (void *)8;
    modules += code == 0;
    return code;
}
int cuModuleUnload(void *module) { modules--; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) {
    if (modules) {
        fprintf(stderr, "a context was given back with %d modules\n", modules);
        abort();
    }
    return 0;
}

/* NVRTC 13 looks for tables that only NVIDIA's driver has, and does without. */
int cuGetExportTable(const void **table) { *table = NULL; return 500; }

int cuProfilerStart(void) { in_window = 1; return outcome("cuProfilerStart"); }

HANDLE(cuDevicePrimaryCtxRetain)
HANDLE(cuStreamCreate)
NOTHING(cuInit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuProfilerStop)
NOTHING(cuStreamDestroy_v2)

#ifndef RECORDS

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = (size_t)number("HOLLOW_FREE_MIB", 80000) << 20;
    *total = 80ul << 30;
    return 0;
}
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) { *pointer = 4096; return outcome("cuMemAlloc_v2"); }
int cuMemHostAlloc(void **pointer, size_t bytes) { *pointer = calloc(1, bytes + 64); return 0; }
int cuMemFreeHost(void *pointer) { free(pointer); return 0; }
int cuStreamGetCaptureInfo_v3(void *stream, int *status) { *status = 0; return 0; }
#ifdef OLD
int cuEventElapsedTime(float *milliseconds) { *milliseconds = 0.5f; return 0; }
#else
int cuEventElapsedTime_v2(float *milliseconds) { *milliseconds = 0.5f; return 0; }
#endif
int cuModuleGetFunction(void **handle) { *handle = (void *)8; return 0; }

HANDLE(cuEventCreate)
NOTHING(cuCtxSynchronize)
NOTHING(cuEventDestroy_v2)
NOTHING(cuEventQuery)
NOTHING(cuEventRecord)
NOTHING(cuEventSynchronize)
NOTHING(cuFuncSetAttribute)
NOTHING(cuGraphDestroy)
NOTHING(cuGraphExecDestroy)
NOTHING(cuGraphGetNodes)
NOTHING(cuGraphInstantiateWithFlags)
NOTHING(cuGraphLaunch)
NOTHING(cuGraphUpload)
NOTHING(cuLaunchKernelEx)
NOTHING(cuMemFree_v2)
NOTHING(cuMemcpyDtoDAsync_v2)
NOTHING(cuMemcpyDtoHAsync_v2)
NOTHING(cuMemcpyDtoH_v2)
NOTHING(cuMemcpyHtoDAsync_v2)
NOTHING(cuMemcpyHtoD_v2)
NOTHING(cuMemsetD8_v2)
NOTHING(cuStreamBeginCapture_v2)
NOTHING(cuStreamEndCapture)
NOTHING(cuStreamSynchronize)
NOTHING(cuTensorMapEncodeTiled)

#endif
