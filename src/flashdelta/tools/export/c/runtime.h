/* What the operators share: errors, the table of kernels, and the way from it to the GPU. Not for callers of the library. */
#ifndef FLASHDELTA_RUNTIME_H
#define FLASHDELTA_RUNTIME_H

#include "flashdelta.h"
#include "parameters.h"

_Static_assert(sizeof(size_t) == 8, "sizes of memory are computed in 64 bits");

enum fd_operator { FD_PREFILL_F32, FD_PREFILL_BF16, FD_DECODE_BF16 };
enum fd_stage { FD_PREPARE, FD_RECURRENCE, FD_OUTPUT, FD_DECODE, FD_RECURRENCE_WIDE };

/* Stands for every value, of a field that a kernel does not depend on. */
#define FD_ANY (-1)

/* What a kernel was compiled for, and what is asked for. */
typedef struct fd_variant {
    int op, stage, K, V, C, gate, precision;
} fd_variant;

/* A kernel's machine code for one architecture, written by `flashdelta export`. */
typedef struct fd_kernel {
    fd_variant variant;
    int arch;                        /* 89 for sm_89 */
    int specific;                    /* runs on GPUs of exactly this architecture */
    const char *name;                /* of its entry point */
    const unsigned char *cubin;
    unsigned threads, shared_bytes;  /* of a thread block */
    unsigned slices;                 /* thread blocks that share the value channels of a head */
    int overlaps;                    /* may be started before the kernel in front of it has ended, for which it waits itself */
    unsigned parameters;
    const unsigned char *order;      /* of its parameters: FD_P_... */
} fd_kernel;

extern const fd_kernel fd_kernels[];
extern const unsigned fd_kernel_count;

/* A kernel's argument. */
typedef union fd_value {
    const void *pointer;
    int32_t i32;
    int64_t i64;
    float f32;
} fd_value;

/* The arguments of all kernels of a call, by name. */
typedef struct fd_values {
    fd_value of[FD_PARAMETERS];
} fd_values;

/* A kernel that is ready to be launched on the current device, with `programs` thread blocks. */
typedef struct fd_ready {
    const fd_kernel *kernel;
    void *function;
    int64_t programs;
} fd_ready;

/* The most kernels of a call. */
#define FD_LAUNCHES 3

/* Records the message, printf-like, and returns the status. */
fd_status fd_fail(fd_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Finds and loads, for the current device, a kernel for each of the variants; its `programs` are those of one slice of the value
 * channels, `items`, times slices. FD_RECURRENCE_WIDE is FD_RECURRENCE where there is none. */
fd_status fd_find(const fd_variant *variants, const int64_t *items, unsigned count, fd_ready *found);

/* Launches the kernels one after another, leaving out those without programs. */
fd_status fd_launch(const fd_ready *kernels, unsigned count, const fd_values *values, CUstream stream);

/* Copies a caller's struct into `known`, of `size` bytes. Members past the caller's struct_size are 0. */
fd_status fd_take(const char *type, void *known, size_t size, const void *args);

/* Checks that hold for several operators. */
fd_status fd_check_size(const char *name, int64_t size, int64_t most);
fd_status fd_check_gate(int32_t gate);
fd_status fd_check_scale(float scale);
fd_status fd_check_pointer(const char *name, const void *pointer, int needed);

/* The first failure of several checks leaves the function. */
#define FD_TRY(call)                     \
    do {                                 \
        fd_status fd_status_ = (call);   \
        if (fd_status_ != FD_SUCCESS)    \
            return fd_status_;           \
    } while (0)

/* The most thread blocks of a launch, and the largest 32-bit argument. */
#define FD_MOST INT64_C(0x7fffffff)

#endif
