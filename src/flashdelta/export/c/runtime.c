/* The CUDA driver, found at run time, and the kernels, loaded when they are first needed. */
#include "runtime.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

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
        return "struct_size does not fit this library";
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

fd_status fd_check_size(const char *name, int64_t size, int64_t most) {
    if (size < 0 || size > most)
        return fd_fail(FD_ERROR_SIZE, "%s: got %lld, wanted 0 to %lld", name, (long long)size, (long long)most);
    return FD_SUCCESS;
}

fd_status fd_check_gate(int32_t gate) {
    if (gate != FD_GATE_NONE && gate != FD_GATE_LOGSIGMOID)
        return fd_fail(FD_ERROR_OPTION, "gate: got %d, wanted FD_GATE_NONE or FD_GATE_LOGSIGMOID", (int)gate);
    return FD_SUCCESS;
}

fd_status fd_check_scale(float scale) {
    if (!isfinite(scale))
        return fd_fail(FD_ERROR_OPTION, "scale: got %g, wanted a finite number", (double)scale);
    return FD_SUCCESS;
}

fd_status fd_check_pointer(const char *name, const void *pointer, int needed) {
    if (pointer == NULL && needed)
        return fd_fail(FD_ERROR_NULL_POINTER, "%s: got NULL, wanted device memory", name);
    if ((uintptr_t)pointer % 16 != 0)
        return fd_fail(FD_ERROR_ALIGNMENT, "%s: got %p, wanted a multiple of 16 bytes", name, pointer);
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

enum {
    COMPUTE_CAPABILITY_MAJOR = 75,      /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ... */
    COMPUTE_CAPABILITY_MINOR = 76,
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,  /* CU_FUNC_ATTRIBUTE_... */
    PROGRAMMATIC_STREAM_SERIALIZATION = 6, /* CU_LAUNCH_ATTRIBUTE_... */
    SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
};

static struct {
    int (*get_device)(int *);
    int (*get_attribute)(int *, int, int);
    int (*load)(void **, const void *, void *, void **, unsigned, void *, void **, unsigned);
    int (*get_kernel)(void **, void *, const char *);
    int (*set_attribute)(int, int, void *, int);
    int (*launch)(const launch_config *, void *, void **, void **);
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
        {"cuGetErrorString", &driver.get_error_string},
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
        return fd_fail(FD_ERROR_ARCHITECTURE, "device %d: got sm_%d with %d bytes of shared memory, wanted a GPU of: %s",
                       where->index, where->arch, where->shared_bytes, FD_ARCHITECTURES);
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

fd_status fd_find(const fd_variant *variants, unsigned count, fd_ready *found) {
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
    }
    for (unsigned i = 0; i < count; i++)
        FD_TRY(make_ready(found[i].kernel, &where, &found[i].function));
    return FD_SUCCESS;
}

fd_status fd_launch(const fd_ready *ready, int64_t programs, const fd_values *values, CUstream stream) {
    if (programs == 0)
        return FD_SUCCESS;
    const fd_kernel *kernel = ready->kernel;
    /* after its own parameters a kernel has two for scratch memory, which none of these uses */
    static const void *const no_scratch = NULL;
    void *parameters[FD_PARAMETERS + 2];
    for (unsigned i = 0; i < kernel->parameters; i++)
        parameters[i] = (void *)&values->of[kernel->order[i]];
    parameters[kernel->parameters] = (void *)&no_scratch;
    parameters[kernel->parameters + 1] = (void *)&no_scratch;
    launch_attribute early = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value.number = 1};
    launch_config config = {
        .grid_x = (unsigned)programs,
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
    CUDA_TRY("cuLaunchKernelEx", driver.launch(&config, ready->function, parameters, NULL));
    return FD_SUCCESS;
}
