/* Stands in for libcuda.so.1: launches nothing, and records what it was asked to. Memory is the host's. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>

#define MOST_LAUNCHES 4096
#define MOST_PARAMETERS 96
#define MOST_KERNELS 64
#define MOST_CONTEXTS 256

typedef struct {
    char name[64];
    const void *image;
    unsigned grid, block, shared, attributes, attribute, graph; /* `graph`: 1 + the place of its node, or 0 */
    void *stream;
    int count;
    uint64_t values[MOST_PARAMETERS];
} record;

record fake_launches[MOST_LAUNCHES];
_Atomic int fake_launch_count, fake_load_count, fake_graph_count, fake_set_count, fake_destroy_count;
int fake_arch = 90, fake_shared = 232448, fake_capturing = 0;
/* The function that fails, and how many parameters kernels have, as in "prepare_kernel=35;decode_kernel=20;". */
char fake_failing[256], fake_parameters[256];

static struct {
    char name[64];
    const void *image;
} kernels[MOST_KERNELS];
static _Atomic int kernel_count;

/* Contexts: a destroyed one's place is that of the next, which has another id, as where the driver frees and allocates. */
struct CUctx_st {
    unsigned long long id;
    int destroyed;
};
static struct CUctx_st contexts[MOST_CONTEXTS] = {{.id = 7}};
static _Atomic unsigned long long last_id = 7;
static _Thread_local struct CUctx_st *context = contexts;

/* Makes a context current, which is created if it is not there. */
void fake_use_context(int place) {
    context = &contexts[place];
    if (context->id == 0 || context->destroyed)
        *context = (struct CUctx_st){.id = ++last_id};
}

void fake_destroy_context(int place) {
    contexts[place].destroyed = 1;
}

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

static record recorded(const void *kernel, unsigned grid, unsigned block, unsigned shared, void **parameters) {
    record found = {.grid = grid, .block = block, .shared = shared};
    memcpy(found.name, ((const char(*)[64])kernel), sizeof found.name);
    found.image = *(const void *const *)((const char *)kernel + 64);
    found.count = parameters_of(found.name);
    for (int p = 0; p < found.count; p++)
        memcpy(&found.values[p], parameters[p], sizeof(uint64_t));
    return found;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    MAY_FAIL("cuLaunchKernelEx");
    if (extra != NULL || config->gridDimY != 1 || config->gridDimZ != 1 || config->blockDimY != 1 || config->blockDimZ != 1)
        return CUDA_ERROR_INVALID_VALUE;
    record found = recorded(function, config->gridDimX, config->blockDimX, config->sharedMemBytes, parameters);
    found.attributes = config->numAttrs;
    found.attribute = config->numAttrs ? (unsigned)config->attrs[0].id : 0;
    found.stream = config->hStream;
    fake_launches[fake_launch_count++ % MOST_LAUNCHES] = found;
    return CUDA_SUCCESS;
}

/* ---- graphs: a chain of kernels ---- */

typedef struct {
    int count;
    record nodes[4];
    unsigned long long context; /* the id of the one that was current */
} chain;

/* A real driver may do anything with a graph whose context is gone. */
static chain *alive(void *graph) {
    chain *found = graph;
    if (context->id != found->context || context->destroyed) {
        fprintf(stderr, "a graph of context %llu was used in context %llu\n", found->context, context->id);
        abort();
    }
    return found;
}

CUresult cuCtxGetId(CUcontext given, unsigned long long *id) {
    MAY_FAIL("cuCtxGetId");
    if (context->destroyed)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *id = context->id;
    return given == NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    (void)stream;
    MAY_FAIL("cuStreamIsCapturing");
    *status = fake_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    static _Thread_local CUstreamCaptureMode now = CU_STREAM_CAPTURE_MODE_GLOBAL;
    MAY_FAIL("cuThreadExchangeStreamCaptureMode");
    CUstreamCaptureMode before = now;
    now = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *graph, unsigned flags) {
    MAY_FAIL("cuGraphCreate");
    chain *made = calloc(1, sizeof *made);
    made->context = context->id;
    *graph = (CUgraph)made;
    return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int node_fits(const CUDA_KERNEL_NODE_PARAMS *node) {
    return node->func == NULL && node->extra == NULL && node->ctx == NULL && node->gridDimY == 1 && node->gridDimZ == 1 &&
           node->blockDimY == 1 && node->blockDimZ == 1;
}

/* Node i of a graph is 1 + i. */
CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS *given) {
    MAY_FAIL("cuGraphAddKernelNode");
    chain *found = alive(graph);
    int i = found->count;
    if (!node_fits(given) || count != (size_t)(i > 0) || (i > 0 && (uintptr_t)before[0] != (uintptr_t)i))
        return CUDA_ERROR_INVALID_VALUE;
    found->nodes[i] = recorded(given->kern, given->gridDimX, given->blockDimX, given->sharedMemBytes, given->kernelParams);
    *node = (CUgraphNode)(uintptr_t)++found->count;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *run, CUgraph graph, unsigned long long flags) {
    MAY_FAIL("cuGraphInstantiateWithFlags");
    fake_graph_count++;
    *run = malloc(sizeof(chain));
    memcpy(*run, alive(graph), sizeof(chain));
    return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec run, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *given) {
    MAY_FAIL("cuGraphExecKernelNodeSetParams");
    fake_set_count++;
    record *old = &alive(run)->nodes[(uintptr_t)node - 1];
    record new = recorded(given->kern, given->gridDimX, given->blockDimX, given->sharedMemBytes, given->kernelParams);
    if (!node_fits(given) || old->image != new.image)
        return CUDA_ERROR_INVALID_VALUE;
    *old = new;
    return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec run, CUstream stream) {
    MAY_FAIL("cuGraphLaunch");
    const chain *found = alive(run);
    for (int i = 0; i < found->count; i++) {
        record one = found->nodes[i];
        one.stream = stream;
        one.graph = 1 + (unsigned)i;
        fake_launches[fake_launch_count++ % MOST_LAUNCHES] = one;
    }
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec run) {
    fake_destroy_count++;
    free(alive(run));
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
    free(alive(graph));
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
