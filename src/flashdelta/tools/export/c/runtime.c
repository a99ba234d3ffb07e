/* The CUDA driver, found at run time, and the kernels, loaded when they are first needed. */
#include "runtime.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* ---- errors ------------------------------------------------------------------------------------------------------------ */

static _Thread_local char last_error[512];

fd_status fd_fail(fd_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char *fd_last_error(void) {
    return last_error;
}

const char *fd_version(void) {
    return FD_VERSION;
}

const char *fd_status_string(fd_status status) {
    switch (status) {
    case FD_SUCCESS:
        return "success";
    case FD_ERROR_STRUCT:
        return "struct_size is no size that the struct has or had";
    case FD_ERROR_NULL_POINTER:
        return "a pointer is missing, or one too many";
    case FD_ERROR_SIZE:
        return "a size is out of range";
    case FD_ERROR_UNSUPPORTED:
        return "(K, V, C) is not supported";
    case FD_ERROR_OPTION:
        return "an option has no such value";
    case FD_ERROR_ALIGNMENT:
        return "a pointer is not aligned to 16 bytes";
    case FD_ERROR_WORKSPACE:
        return "the workspace is too small";
    case FD_ERROR_NOT_EXPORTED:
        return "the library was exported without these kernels";
    case FD_ERROR_ARCHITECTURE:
        return "the library was exported without this GPU's architecture";
    case FD_ERROR_DRIVER:
        return "no usable CUDA driver";
    case FD_ERROR_CUDA:
        return "a CUDA call failed";
    }
    return "unknown status";
}

/* ---- checks ------------------------------------------------------------------------------------------------------------ */

fd_status fd_take(const char *type, void *known, size_t size, const void *args) {
    size_t given;
    if (args == NULL)
        return fd_fail(FD_ERROR_NULL_POINTER, "args must be an %s; got NULL", type);
    memcpy(&given, args, sizeof given);
    /* members are aligned and have at most 8 bytes: a multiple of 8 cuts none in two */
    if (given < 8 || given > size || given % 8 != 0)
        return fd_fail(FD_ERROR_STRUCT, "struct_size must be a multiple of 8 from 8 to %zu; got %zu", size, given);
    memset(known, 0, size);
    memcpy(known, args, given);
    return FD_SUCCESS;
}

fd_status fd_check_size(const char *name, int64_t size, int64_t most) {
    if (size < 0 || size > most)
        return fd_fail(FD_ERROR_SIZE, "%s must be from 0 to %lld; got %lld", name, (long long)most, (long long)size);
    return FD_SUCCESS;
}

fd_status fd_check_gate(int32_t gate) {
    if (gate != FD_GATE_NONE && gate != FD_GATE_LOGSIGMOID)
        return fd_fail(FD_ERROR_OPTION, "gate must be FD_GATE_NONE or FD_GATE_LOGSIGMOID; got %d", (int)gate);
    return FD_SUCCESS;
}

fd_status fd_check_scale(float scale) {
    if (!isfinite(scale))
        return fd_fail(FD_ERROR_OPTION, "scale must be a finite number; got %g", (double)scale);
    return FD_SUCCESS;
}

fd_status fd_check_pointer(const char *name, const void *pointer, int needed) {
    if (pointer == NULL && needed)
        return fd_fail(FD_ERROR_NULL_POINTER, "%s must be device memory; got NULL", name);
    if ((uintptr_t)pointer % 16 != 0)
        return fd_fail(FD_ERROR_ALIGNMENT, "%s must be at a multiple of 16 bytes; got %p", name, pointer);
    return FD_SUCCESS;
}

/* ---- the driver: what of cuda.h is needed ------------------------------------------------------------------------------- */

typedef struct {
    int id;
    char pad[4];
    union {
        char bytes[64];
        int number;
    } value;
} launch_attribute;

typedef struct {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    CUstream stream;
    launch_attribute *attributes;
    unsigned attribute_count;
} launch_config;

typedef struct {
    void *function; /* NULL: `kernel`, in the current context */
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void **parameters, **extra;
    void *kernel, *context;
} node_parameters;

enum {
    COMPUTE_CAPABILITY_MAJOR = 75,      /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ... */
    COMPUTE_CAPABILITY_MINOR = 76,
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,  /* CU_FUNC_ATTRIBUTE_... */
    PROGRAMMATIC_STREAM_SERIALIZATION = 6, /* CU_LAUNCH_ATTRIBUTE_... */
    CAPTURE_MODE_RELAXED = 2,           /* CU_STREAM_CAPTURE_MODE_RELAXED */
    SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
};

static struct {
    int (*get_device)(int *);
    int (*get_attribute)(int *, int, int);
    int (*load)(void **, const void *, void *, void **, unsigned, void *, void **, unsigned);
    int (*get_kernel)(void **, void *, const char *);
    int (*set_attribute)(int, int, void *, int);
    int (*launch)(const launch_config *, void *, void **, void **);
    int (*context_id)(void *, unsigned long long *);
    int (*is_capturing)(CUstream, int *);
    int (*exchange_capture_mode)(int *);
    int (*graph_create)(void **, unsigned);
    int (*graph_add_kernel)(void **, void *, void *const *, size_t, const node_parameters *);
    int (*graph_instantiate)(void **, void *, unsigned long long);
    int (*graph_exec_set)(void *, void *, const node_parameters *);
    int (*graph_launch)(void *, CUstream);
    int (*graph_exec_destroy)(void *);
    int (*graph_destroy)(void *);
    int (*get_error_string)(int, const char **);
    char problem[256];
} driver;

static pthread_once_t driver_once = PTHREAD_ONCE_INIT;

static void open_driver(void) {
    static const struct {
        const char *name;
        void *pointer;
    } wanted[] = {
        {"cuCtxGetDevice", &driver.get_device},       {"cuDeviceGetAttribute", &driver.get_attribute},
        {"cuLibraryLoadData", &driver.load},          {"cuLibraryGetKernel", &driver.get_kernel},
        {"cuKernelSetAttribute", &driver.set_attribute}, {"cuLaunchKernelEx", &driver.launch},
        {"cuCtxGetId", &driver.context_id},           {"cuStreamIsCapturing", &driver.is_capturing},
        {"cuThreadExchangeStreamCaptureMode", &driver.exchange_capture_mode},
        {"cuGraphCreate", &driver.graph_create},      {"cuGraphAddKernelNode_v2", &driver.graph_add_kernel},
        {"cuGraphInstantiateWithFlags", &driver.graph_instantiate},
        {"cuGraphExecKernelNodeSetParams_v2", &driver.graph_exec_set},
        {"cuGraphLaunch", &driver.graph_launch},      {"cuGraphExecDestroy", &driver.graph_exec_destroy},
        {"cuGraphDestroy", &driver.graph_destroy},    {"cuGetErrorString", &driver.get_error_string},
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(driver.problem, sizeof driver.problem, "%s", dlerror());
        return;
    }
    for (unsigned i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(library, wanted[i].name);
        if (found == NULL) {
            snprintf(driver.problem, sizeof driver.problem, "libcuda.so.1 has no %s; CUDA 12.0 has", wanted[i].name);
            return;
        }
        *(void **)wanted[i].pointer = found;
    }
}

static fd_status cuda_failed(const char *call, int result) {
    const char *text = NULL;
    if (driver.get_error_string(result, &text) != 0 || text == NULL)
        text = "unknown error";
    return fd_fail(FD_ERROR_CUDA, "%s: error %d, %s", call, result, text);
}

#define CUDA_TRY(name, call)                     \
    do {                                         \
        int result_ = (call);                    \
        if (result_ != 0)                        \
            return cuda_failed(name, result_);   \
    } while (0)

/* ---- devices ----------------------------------------------------------------------------------------------------------- */

/* Devices of which the library keeps what it found out; on others it asks the driver in every call. */
#define DEVICES 64

typedef struct {
    int index, arch, shared_bytes;
} device;

static struct {
    _Atomic int arch, shared_bytes;
} known_devices[DEVICES];

static fd_status current_device(device *found) {
    pthread_once(&driver_once, open_driver);
    if (driver.problem[0] != '\0')
        return fd_fail(FD_ERROR_DRIVER, "%s", driver.problem);
    CUDA_TRY("cuCtxGetDevice", driver.get_device(&found->index));
    int keep = found->index < DEVICES;
    if (keep && (found->arch = atomic_load_explicit(&known_devices[found->index].arch, memory_order_acquire)) != 0) {
        found->shared_bytes = atomic_load_explicit(&known_devices[found->index].shared_bytes, memory_order_relaxed);
        return FD_SUCCESS;
    }
    int major, minor;
    CUDA_TRY("cuDeviceGetAttribute", driver.get_attribute(&major, COMPUTE_CAPABILITY_MAJOR, found->index));
    CUDA_TRY("cuDeviceGetAttribute", driver.get_attribute(&minor, COMPUTE_CAPABILITY_MINOR, found->index));
    CUDA_TRY("cuDeviceGetAttribute",
             driver.get_attribute(&found->shared_bytes, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, found->index));
    found->arch = 10 * major + minor;
    if (keep) {
        atomic_store_explicit(&known_devices[found->index].shared_bytes, found->shared_bytes, memory_order_relaxed);
        atomic_store_explicit(&known_devices[found->index].arch, found->arch, memory_order_release);
    }
    return FD_SUCCESS;
}

/* ---- kernels ----------------------------------------------------------------------------------------------------------- */

static int matches(int has, int wanted) {
    return has == FD_ANY || has == wanted;
}

static int fits(const fd_variant *has, const fd_variant *wanted) {
    return has->op == wanted->op && has->stage == wanted->stage && has->K == wanted->K && has->V == wanted->V &&
           matches(has->C, wanted->C) && matches(has->gate, wanted->gate) && matches(has->precision, wanted->precision);
}

static int runs_on(const fd_kernel *kernel, const device *where) {
    if ((int)kernel->shared_bytes > where->shared_bytes)
        return 0;
    if (kernel->specific || kernel->arch == where->arch)
        return kernel->arch == where->arch;
    return kernel->arch / 10 == where->arch / 10 && kernel->arch < where->arch;
}

static fd_status find_kernel(const fd_variant *wanted, const device *where, const fd_kernel **found) {
    int exported = 0;
    *found = NULL;
    for (unsigned i = 0; i < fd_kernel_count; i++) {
        const fd_kernel *kernel = &fd_kernels[i];
        if (!fits(&kernel->variant, wanted))
            continue;
        exported = 1;
        if (runs_on(kernel, where) && (*found == NULL || kernel->arch > (*found)->arch))
            *found = kernel;
    }
    if (!exported)
        return fd_fail(FD_ERROR_NOT_EXPORTED,
                       "no kernels for (K, V, C) = (%d, %d, %d), gate %d, precision %d; `flashdelta export` chooses them",
                       wanted->K, wanted->V, wanted->C, wanted->gate, wanted->precision);
    if (*found == NULL)
        return fd_fail(FD_ERROR_ARCHITECTURE, "device %d must be a GPU of: %s; got sm_%d with %d bytes of shared memory",
                       where->index, FD_ARCHITECTURES, where->arch, where->shared_bytes);
    return FD_SUCCESS;
}

/* `function` may be read once a bit of `devices` is set. */
static struct {
    void *function;
    _Atomic uint64_t devices;
} loaded[FD_KERNELS];

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

/* With the lock held. A library belongs to no context: it stays for all devices, until the process ends. */
static fd_status load(const fd_kernel *kernel, const device *where, void **function) {
    if (*function == NULL) {
        void *library, *entry;
        CUDA_TRY("cuLibraryLoadData", driver.load(&library, kernel->cubin, NULL, NULL, 0, NULL, NULL, 0));
        CUDA_TRY("cuLibraryGetKernel", driver.get_kernel(&entry, library, kernel->name));
        *function = entry;
    }
    if (kernel->shared_bytes > SHARED_BYTES_WITHOUT_ASKING)
        CUDA_TRY("cuKernelSetAttribute", driver.set_attribute(MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)kernel->shared_bytes,
                                                              *function, where->index));
    return FD_SUCCESS;
}

static fd_status make_ready(const fd_kernel *kernel, const device *where, void **function) {
    unsigned i = (unsigned)(kernel - fd_kernels);
    uint64_t bit = where->index < DEVICES ? UINT64_C(1) << where->index : 0;
    if ((atomic_load_explicit(&loaded[i].devices, memory_order_acquire) & bit) != 0) {
        *function = loaded[i].function;
        return FD_SUCCESS;
    }
    pthread_mutex_lock(&loading);
    fd_status status = load(kernel, where, &loaded[i].function);
    *function = loaded[i].function;
    if (status == FD_SUCCESS)
        atomic_fetch_or_explicit(&loaded[i].devices, bit, memory_order_release);
    pthread_mutex_unlock(&loading);
    return status;
}

fd_status fd_find(const fd_variant *variants, const int64_t *items, unsigned count, fd_ready *found) {
    device where;
    FD_TRY(current_device(&where));
    for (unsigned i = 0; i < count; i++) {
        fd_variant wanted = variants[i];
        fd_status status = find_kernel(&wanted, &where, &found[i].kernel);
        if (status != FD_SUCCESS && wanted.stage == FD_RECURRENCE_WIDE) {
            wanted.stage = FD_RECURRENCE;
            status = find_kernel(&wanted, &where, &found[i].kernel);
        }
        FD_TRY(status);
        found[i].programs = items[i] * found[i].kernel->slices;
    }
    for (unsigned i = 0; i < count; i++)
        FD_TRY(make_ready(found[i].kernel, &where, &found[i].function));
    return FD_SUCCESS;
}

/* ---- launches ---------------------------------------------------------------------------------------------------------- */

/* Room for a kernel's parameters: its own, and two for scratch memory, which none of these uses. */
typedef struct {
    void *of[FD_PARAMETERS + 2];
} parameter_list;

static parameter_list parameters_of(const fd_kernel *kernel, const fd_values *values) {
    static const void *const no_scratch = NULL;
    parameter_list list;
    for (unsigned i = 0; i < kernel->parameters; i++)
        list.of[i] = (void *)&values->of[kernel->order[i]];
    list.of[kernel->parameters] = (void *)&no_scratch;
    list.of[kernel->parameters + 1] = (void *)&no_scratch;
    return list;
}

static fd_status launch_alone(const fd_ready *ready, const fd_values *values, CUstream stream) {
    const fd_kernel *kernel = ready->kernel;
    parameter_list parameters = parameters_of(kernel, values);
    launch_attribute early = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value.number = 1};
    launch_config config = {
        .grid_x = (unsigned)ready->programs,
        .grid_y = 1,
        .grid_z = 1,
        .block_x = kernel->threads,
        .block_y = 1,
        .block_z = 1,
        .shared_bytes = kernel->shared_bytes,
        .stream = stream,
        .attributes = &early,
        .attribute_count = kernel->overlaps ? 1 : 0,
    };
    CUDA_TRY("cuLaunchKernelEx", driver.launch(&config, ready->function, parameters.of, NULL));
    return FD_SUCCESS;
}

/* The kernels of a call as one CUDA graph, which costs the host less than one kernel does. A graph does not run while it runs
 * already, so every stream has its own. It belongs to a call's arguments: a call that differs from those before is only
 * remembered, the same one again makes the graph. After `VARIETY` different ones on a stream no further graph is made, and the
 * one that was used longest ago takes a new call's arguments, which costs more than its launch. */
typedef struct {
    CUstream stream;
    unsigned count;
    fd_ready kernels[FD_LAUNCHES];
    fd_values values;
    void *graph, *nodes[FD_LAUNCHES], *run; /* `run` NULL: not made yet */
    uint64_t used;                          /* 0: nothing here */
} chain;

#define VARIETY 8
#define CHAINS (8 * VARIETY)
#define CONTEXTS 64

/* A context's chains. */
typedef struct {
    unsigned long long context;
    uint64_t used; /* 0: nobody's */
    chain chains[CHAINS];
} table;

static table tables[CONTEXTS];
static uint64_t chain_calls;
static pthread_mutex_t chains_lock = PTHREAD_MUTEX_INITIALIZER;

/* A context's own table: nobody else's chains make room for a call. A context that is new gets a free one, or else the one of the
 * context used longest ago, so that those of destroyed contexts come back. Nothing tells whether that one was destroyed (an id is
 * never used again; to ask the driver about a dead handle is undefined), so its graphs are left to the driver as they are. */
static table *table_of(unsigned long long context) {
    table *found = tables;
    for (table *t = tables; t < tables + CONTEXTS; t++) {
        if (t->used != 0 && t->context == context)
            return t;
        if (t->used < found->used)
            found = t;
    }
    memset(found, 0, sizeof *found);
    found->context = context;
    return found;
}

static int same_kernels(const chain *c, const fd_ready *kernels, unsigned count) {
    int same = c->count == count;
    for (unsigned i = 0; same && i < count; i++)
        same = c->kernels[i].kernel == kernels[i].kernel;
    return same;
}

static int same_arguments(const chain *c, const fd_ready *kernels, const fd_values *values) {
    for (unsigned i = 0; i < c->count; i++)
        if (c->kernels[i].programs != kernels[i].programs)
            return 0;
    return memcmp(&c->values, values, sizeof *values) == 0;
}

static void forget(chain *c) {
    if (c->run != NULL)
        driver.graph_exec_destroy(c->run); /* which frees it once it has run */
    if (c->graph != NULL)
        driver.graph_destroy(c->graph);
    memset(c, 0, sizeof *c);
}

/* The chain of this call, or of `VARIETY` others of its kernels the one that was used longest ago; if there are fewer, a new one,
 * where there is room or instead of the one that was used longest ago. It has the call's arguments; where it was `taken` from
 * another call, its graph has not. */
static chain *chain_of(chain *chains, const fd_ready *kernels, unsigned count, const fd_values *values, CUstream stream,
                       int *taken) {
    chain *place = chains, *oldest_alike = NULL;
    unsigned alike = 0;
    for (chain *c = chains; c < chains + CHAINS; c++) {
        if (c->used < place->used)
            place = c;
        if (c->stream != stream || !same_kernels(c, kernels, count))
            continue;
        if (same_arguments(c, kernels, values)) {
            *taken = 0;
            return c;
        }
        alike++;
        if (oldest_alike == NULL || c->used < oldest_alike->used)
            oldest_alike = c;
    }
    *taken = alike == VARIETY;
    if (*taken) {
        place = oldest_alike;
    } else {
        forget(place);
        place->stream = stream;
        place->count = count;
    }
    memcpy(place->kernels, kernels, count * sizeof *kernels);
    place->values = *values;
    return place;
}

static node_parameters node_of(const fd_ready *ready, parameter_list *parameters) {
    return (node_parameters){
        .grid_x = (unsigned)ready->programs,
        .grid_y = 1,
        .grid_z = 1,
        .block_x = ready->kernel->threads,
        .block_y = 1,
        .block_z = 1,
        .shared_bytes = ready->kernel->shared_bytes,
        .parameters = parameters->of,
        .kernel = ready->function,
    };
}

/* Another thread's capture of a stream must not forbid it. */
static int make_run(chain *c) {
    int mode = CAPTURE_MODE_RELAXED;
    int result = driver.exchange_capture_mode(&mode);
    if (result != 0)
        return result;
    result = driver.graph_create(&c->graph, 0);
    for (unsigned i = 0; result == 0 && i < c->count; i++) {
        parameter_list parameters = parameters_of(c->kernels[i].kernel, &c->values);
        node_parameters node = node_of(&c->kernels[i], &parameters);
        result = driver.graph_add_kernel(&c->nodes[i], c->graph, i > 0 ? &c->nodes[i - 1] : NULL, i > 0, &node);
    }
    if (result == 0)
        result = driver.graph_instantiate(&c->run, c->graph, 0);
    driver.exchange_capture_mode(&mode);
    return result;
}

static int update_run(chain *c) {
    int result = 0;
    for (unsigned i = 0; result == 0 && i < c->count; i++) {
        parameter_list parameters = parameters_of(c->kernels[i].kernel, &c->values);
        node_parameters node = node_of(&c->kernels[i], &parameters);
        result = driver.graph_exec_set(c->run, c->nodes[i], &node);
    }
    return result;
}

/* Whether the kernels were launched as a graph; if not, none was. With the lock held. */
static int launch_chain(const fd_ready *kernels, unsigned count, const fd_values *values, CUstream stream) {
    int capturing, taken;
    unsigned long long context;
    /* a graph cannot be launched into a stream that is being captured */
    if (driver.is_capturing(stream, &capturing) != 0 || capturing || driver.context_id(NULL, &context) != 0)
        return 0;
    table *own = table_of(context);
    chain *c = chain_of(own->chains, kernels, count, values, stream, &taken);
    int first = c->used == 0;
    c->used = own->used = ++chain_calls;
    if (first)
        return 0;
    int result = 0;
    if (c->run == NULL)
        result = make_run(c);
    else if (taken)
        result = update_run(c);
    if (result == 0)
        result = driver.graph_launch(c->run, stream);
    if (result != 0)
        forget(c);
    return result == 0;
}

fd_status fd_launch(const fd_ready *kernels, unsigned count, const fd_values *values, CUstream stream) {
    unsigned empty = 0;
    for (unsigned i = 0; i < count; i++)
        empty += kernels[i].programs == 0;
    /* who finds another thread here does not wait for it */
    if (count > 1 && empty == 0 && pthread_mutex_trylock(&chains_lock) == 0) {
        int launched = launch_chain(kernels, count, values, stream);
        pthread_mutex_unlock(&chains_lock);
        if (launched)
            return FD_SUCCESS;
    }
    for (unsigned i = 0; i < count; i++)
        if (kernels[i].programs != 0)
            FD_TRY(launch_alone(&kernels[i], values, stream));
    return FD_SUCCESS;
}
