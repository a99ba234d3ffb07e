/* Stands in for libcuda.so.1: launches nothing, and records what it was asked to. Memory is the host's. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>

#define MOST_LAUNCHES 4096
#define MOST_PARAMETERS 96
#define MOST_KERNELS 64

typedef struct {
    char name[64];
    const void *image;
    unsigned grid, block, shared, attributes, attribute;
    void *stream;
    int count;
    uint64_t values[MOST_PARAMETERS];
} record;

record fake_launches[MOST_LAUNCHES];
_Atomic int fake_launch_count, fake_load_count;
int fake_arch = 90, fake_shared = 232448;
/* The function that fails, and how many parameters kernels have, as in "prepare_kernel=35;decode_kernel=20;". */
char fake_failing[256], fake_parameters[256];

static struct {
    char name[64];
    const void *image;
} kernels[MOST_KERNELS];
static _Atomic int kernel_count;
static struct CUctx_st *context = (struct CUctx_st *)8;

#define MAY_FAIL(function)                      \
    do {                                        \
        if (strcmp(fake_failing, function) == 0) \
            return CUDA_ERROR_INVALID_HANDLE;   \
    } while (0)

CUresult cuCtxGetDevice(CUdevice *device) {
    MAY_FAIL("cuCtxGetDevice");
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    MAY_FAIL("cuDeviceGetAttribute");
    if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        *value = fake_arch / 10;
    else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        *value = fake_arch % 10;
    else if (attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        *value = fake_shared;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *a, void **b, unsigned c, CUlibraryOption *d,
                           void **e, unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    MAY_FAIL("cuLibraryLoadData");
    if (memcmp(code, "\177ELF", 4) != 0 || (uintptr_t)code % 16 != 0)
        return CUDA_ERROR_INVALID_IMAGE;
    fake_load_count++;
    *library = (CUlibrary)(uintptr_t)code;
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    MAY_FAIL("cuLibraryGetKernel");
    int i = kernel_count++;
    strncpy(kernels[i].name, name, sizeof kernels[i].name - 1);
    kernels[i].image = library;
    *kernel = (CUkernel)&kernels[i];
    return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
    (void)kernel, (void)device;
    MAY_FAIL("cuKernelSetAttribute");
    return attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value <= fake_shared ? CUDA_SUCCESS
                                                                                                : CUDA_ERROR_INVALID_VALUE;
}

static int parameters_of(const char *name) {
    const char *found = strstr(fake_parameters, name);
    return found == NULL ? 0 : atoi(found + strlen(name) + 1);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    MAY_FAIL("cuLaunchKernelEx");
    if (extra != NULL || config->gridDimY != 1 || config->gridDimZ != 1 || config->blockDimY != 1 || config->blockDimZ != 1)
        return CUDA_ERROR_INVALID_VALUE;
    int i = fake_launch_count++ % MOST_LAUNCHES;
    record *found = &fake_launches[i];
    memcpy(found->name, ((char(*)[64])function), sizeof found->name);
    found->image = *(const void *const *)((const char *)function + 64);
    found->grid = config->gridDimX;
    found->block = config->blockDimX;
    found->shared = config->sharedMemBytes;
    found->attributes = config->numAttrs;
    found->attribute = config->numAttrs ? (unsigned)config->attrs[0].id : 0;
    found->stream = config->hStream;
    found->count = parameters_of(found->name);
    for (int p = 0; p < found->count; p++)
        memcpy(&found->values[p], parameters[p], sizeof(uint64_t));
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_INVALID_HANDLE ? "invalid resource handle" : NULL;
    return *text == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* ---- what programs call themselves: examples/c ---- */

CUresult cuInit(unsigned flags) {
    MAY_FAIL("cuInit");
    return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) {
    (void)device;
    *found = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext current) {
    return current == context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuMemAlloc(CUdeviceptr *pointer, size_t bytes) {
    *pointer = (CUdeviceptr)aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *pointer != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFree(CUdeviceptr pointer) {
    free((void *)pointer);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    memcpy((void *)to, from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    memcpy(to, (const void *)from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8(CUdeviceptr pointer, unsigned char value, size_t bytes) {
    memset((void *)pointer, value, bytes);
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    return CUDA_SUCCESS;
}
