/* Kimi Delta Attention (KDA) on NVIDIA GPUs, without Python: whole sequences (prefill) and token by token (decode).
 *
 * Per head, with a state S [K, V], log decay g_t <= 0 (natural log) per key channel and write strength beta_t:
 *
 *     S  <- diag(exp(g_t)) S
 *     S  <- S + beta_t k_t (v_t - k_t^T S)
 *     o_t = scale * q_t^T S
 *
 * All functions may be called from any thread, at the same time. They only launch kernels: what they return says whether the
 * launch was accepted, and results are there when the stream has got that far. Arguments are checked before anything is
 * launched: after an error nothing was, but for FD_ERROR_CUDA from a prefill's second or third launch.
 *
 * A prefill that comes again with the same arguments is launched as a CUDA graph, which costs the host less. The library keeps
 * up to 64 of them for each context, for the last calls of each stream and kind.
 *
 * A call uses the calling thread's current CUDA context, in which memory and stream must live. A kernel's first call on a
 * device loads it: make that call before capturing a CUDA graph. Tensors are dense, row by row, in device memory, and start at
 * multiples of 16 bytes; results must not overlap anything else that a call is given.
 */
#ifndef FLASHDELTA_H
#define FLASHDELTA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FD_VERSION "@VERSION@"

/* Of the binary interface, and the number in the library's SONAME: a program built with this header runs with every library of the
 * same number that is not older. Structs only grow at their end, by multiples of 8 bytes, and 0 in a new member means what was
 * done without it. A caller's struct_size says which members it has: those past it are taken as 0. A size larger than the library
 * knows is refused, as is one that cuts a member in two. */
#define FD_ABI 1

#if defined(__GNUC__)
#define FD_API __attribute__((visibility("default")))
#else
#define FD_API
#endif

/* The same type as in cuda.h; a cudaStream_t is one. */
typedef struct CUstream_st *CUstream;

typedef enum fd_status {
    FD_SUCCESS = 0,
    FD_ERROR_STRUCT = 1,       /* struct_size is 0, larger than this library's struct, or no multiple of 8 */
    FD_ERROR_NULL_POINTER = 2, /* a pointer that is needed is NULL, or one that must be NULL is not */
    FD_ERROR_SIZE = 3,         /* a size is negative, or larger than a launch can be */
    FD_ERROR_UNSUPPORTED = 4,  /* (K, V, C) for which there are no kernels */
    FD_ERROR_OPTION = 5,       /* a value that gate, precision, scale or a pitch can't have */
    FD_ERROR_ALIGNMENT = 6,    /* a pointer is no multiple of 16 bytes */
    FD_ERROR_WORKSPACE = 7,    /* workspace_bytes is less than the workspace query says */
    FD_ERROR_NOT_EXPORTED = 8, /* the library was exported without this operator, size, gate or precision */
    FD_ERROR_ARCHITECTURE = 9, /* the library was exported without this GPU's architecture */
    FD_ERROR_DRIVER = 10,      /* there is no CUDA driver, or one older than CUDA 12.0 */
    FD_ERROR_CUDA = 11         /* a call of the CUDA driver failed */
} fd_status;

typedef enum fd_gate {
    FD_GATE_NONE = 0,      /* g is the log decay */
    FD_GATE_LOGSIGMOID = 1 /* g is a logit: the log decay is log(sigmoid(g)) */
} fd_gate;

typedef enum fd_precision {
    FD_PRECISION_DEFAULT = 0, /* tf32x3 for fd_prefill_f32; the only value for the others */
    FD_PRECISION_TF32X3 = 1,  /* three TF32 products for each product: 21 mantissa bits or more, on tensor cores */
    FD_PRECISION_IEEE = 2     /* float32 throughout */
} fd_precision;

/* Whole sequences. (K, V, C) is one of (64, 64, 32), (64, 64, 64), (128, 128, 32), (128, 128, 64); Nc = ceil(T / C).
 * "real" is float for fd_prefill_f32 and bfloat16 for fd_prefill_bf16. */
typedef struct fd_prefill_args {
    size_t struct_size;         /* sizeof(fd_prefill_args) */
    int64_t B, H, T;            /* batch rows, heads, tokens; any may be 0 */
    int32_t K, V, C;            /* key and value channels of a head, tokens of a chunk */
    int32_t gate;               /* fd_gate */
    int32_t precision;          /* fd_precision */
    float scale;                /* factor on o; 0 stands for 1 / sqrt(K) */
    const void *q;              /* real [B, H, T, K] */
    const void *k;              /* real [B, H, T, K] */
    const void *v;              /* real [B, H, T, V] */
    const float *g;             /* [B, H, T, K]: log decay of each step, or its logit */
    const float *beta;          /* [B, H, T]: write strength, in [0, 2) */
    const float *initial_state; /* [B, H, V, K], or NULL for zeros */
    void *o;                    /* real [B, H, T, V] */
    void *w;                    /* fd_prefill_f32: float [B, H, Nc, C, K]; fd_prefill_bf16: NULL */
    void *u;                    /* fd_prefill_f32: float [B, H, Nc, C, V]; fd_prefill_bf16: NULL */
    float *final_state;         /* [B, H, V, K], or NULL if it is not wanted */
    void *workspace;            /* device memory that belongs to this call until it is done */
    size_t workspace_bytes;     /* at least what the workspace query says */
} fd_prefill_args;

/* One token of each of N sequences, over a pool of states that is updated in place. K and V are both 64 or both 128. */
typedef struct fd_decode_args {
    size_t struct_size;           /* sizeof(fd_decode_args) */
    int64_t N, H, slots;          /* sequences, heads, states in the pool */
    int32_t K, V;                 /* key and value channels of a head */
    int32_t gate;                 /* fd_gate */
    float scale;                  /* factor on o; 0 stands for 1 / sqrt(K) */
    const void *q;                /* bfloat16 [N, H, K] */
    const void *k;                /* bfloat16 [N, H, K] */
    const void *v;                /* bfloat16 [N, H, V] */
    const float *g;               /* [N, H, K] */
    const float *beta;            /* [N, H] */
    float *states;                /* [slots, H, V, K], slots slot_pitch floats apart */
    int64_t slot_pitch;           /* a multiple of 16, at least H * V * K; 0 stands for H * V * K */
    const int32_t *state_indices; /* [N]: each sequence's slot, no two the same. One below 0 or past the end of the pool reads
                                     and writes no state, and its row of o is 0 */
    void *o;                      /* bfloat16 [N, H, V] */
} fd_decode_args;

/* Bytes of workspace that the call with these arguments needs. Of the arguments only struct_size, B, H, T, K, V and C are
 * read. */
FD_API fd_status fd_prefill_f32_workspace(const fd_prefill_args *args, size_t *bytes);
FD_API fd_status fd_prefill_bf16_workspace(const fd_prefill_args *args, size_t *bytes);

FD_API fd_status fd_prefill_f32(const fd_prefill_args *args, CUstream stream);
FD_API fd_status fd_prefill_bf16(const fd_prefill_args *args, CUstream stream);
FD_API fd_status fd_decode_bf16(const fd_decode_args *args, CUstream stream);

/* What a status means, in a few words; never NULL. */
FD_API const char *fd_status_string(fd_status status);

/* The calling thread's last error in full: which argument, the rule, what came. Empty before the first one. */
FD_API const char *fd_last_error(void);

/* FD_VERSION of the library, which may differ from the header's. */
FD_API const char *fd_version(void);

#ifdef __cplusplus
}
#endif

#endif
