/* KDA from C: a prompt in float32, the same prompt in bfloat16 with its final state, one more token from that state, and what a
 * call costs the host. Results are held against the recurrence in double on the CPU; the exit code is 1 if one is off.
 */
#include <cuda.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "flashdelta.h"

enum { H = 4, T = 1000, K = 128, V = 128, C = 64, NC = (T + C - 1) / C, CALLS = 200 };

static void cuda(CUresult result, const char *what) {
    const char *text = NULL;
    if (result == CUDA_SUCCESS)
        return;
    cuGetErrorString(result, &text);
    fprintf(stderr, "%s: %s\n", what, text ? text : "unknown error");
    exit(2);
}
#define CUDA(call) cuda((call), #call)

static void fd(fd_status status) {
    if (status == FD_SUCCESS)
        return;
    fprintf(stderr, "%s: %s\n", fd_status_string(status), fd_last_error());
    exit(2);
}

/* ---- numbers ----------------------------------------------------------------------------------------------------------- */

static float uniform(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) / (float)(1 << 24);
}

static uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Numbers that bfloat16 holds, so that both precisions get the same inputs. */
static float *numbers(size_t count, float low, float high) {
    float *x = malloc(count * sizeof *x);
    for (size_t i = 0; i < count; i++)
        x[i] = from_bf16(to_bf16(low + (high - low) * uniform()));
    return x;
}

static double error(const float *got, const double *want, size_t count) {
    double distance = 0, size = 0;
    for (size_t i = 0; i < count; i++) {
        distance += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    return sqrt(distance / size);
}

/* The inputs of T + 1 tokens of each head, [H, T + 1, ...], and the outputs. */
typedef struct {
    float *q, *k, *v, *g, *beta;
    double *o;
} prompt;

static void recurrence(prompt *p) {
    double *state = malloc(K * V * sizeof *state);
    for (int h = 0; h < H; h++) {
        memset(state, 0, K * V * sizeof *state);
        for (int t = 0; t <= T; t++) {
            size_t token = (size_t)h * (T + 1) + (size_t)t;
            const float *q = p->q + token * K, *k = p->k + token * K, *v = p->v + token * V, *g = p->g + token * K;
            for (int j = 0; j < V; j++) {
                double along_k = 0, along_q = 0;
                for (int i = 0; i < K; i++) {
                    state[i * V + j] *= exp(g[i]);
                    along_k += k[i] * state[i * V + j];
                }
                double correction = p->beta[token] * (v[j] - along_k);
                for (int i = 0; i < K; i++) {
                    state[i * V + j] += k[i] * correction;
                    along_q += q[i] * state[i * V + j];
                }
                p->o[token * V + (size_t)j] = along_q / sqrt(K);
            }
        }
    }
    free(state);
}

/* ---- device memory ----------------------------------------------------------------------------------------------------- */

static void *device(size_t bytes) {
    CUdeviceptr pointer;
    CUDA(cuMemAlloc(&pointer, bytes));
    CUDA(cuMemsetD8(pointer, 0xff, bytes)); /* NaN: what is not written shows */
    return (void *)(uintptr_t)pointer;
}

/* Rows of `width` numbers of tokens `first` to `first + count` of each head, in bfloat16 if `half`. */
static void *upload(const float *x, int width, int first, int count, int half) {
    size_t row = (size_t)(count * width), size = half ? 2 : 4;
    char *host = malloc(H * row * size);
    for (size_t h = 0; h < H; h++)
        for (size_t i = 0; i < row; i++) {
            float value = x[(h * (T + 1) + (size_t)first) * (size_t)width + i];
            if (half)
                ((uint16_t *)(void *)host)[h * row + i] = to_bf16(value);
            else
                ((float *)(void *)host)[h * row + i] = value;
        }
    void *found = device(H * row * size);
    CUDA(cuMemcpyHtoD((CUdeviceptr)(uintptr_t)found, host, H * row * size));
    free(host);
    return found;
}

/* Prints the error of `o [H, count, V]` and says whether it is small enough. */
static int right(const char *name, const void *o, const prompt *p, int first, int count, int half, double tolerance) {
    size_t all = (size_t)(H * count * V);
    void *raw = malloc(all * 4);
    float *got = malloc(all * sizeof *got);
    double *want = malloc(all * sizeof *want);
    CUDA(cuCtxSynchronize());
    CUDA(cuMemcpyDtoH(raw, (CUdeviceptr)(uintptr_t)o, all * (half ? 2 : 4)));
    for (size_t i = 0; i < all; i++) {
        size_t h = i / (size_t)(count * V), rest = i % (size_t)(count * V);
        got[i] = half ? from_bf16(((uint16_t *)raw)[i]) : ((float *)raw)[i];
        want[i] = p->o[(h * (T + 1) + (size_t)first) * V + rest];
    }
    double found = error(got, want, all);
    int good = found <= tolerance;
    printf("%-20s error %.1e, at most %.0e: %s\n", name, found, tolerance, good ? "right" : "WRONG");
    free(raw);
    free(got);
    free(want);
    return good;
}

/* ---- the calls --------------------------------------------------------------------------------------------------------- */

static fd_prefill_args prefill_args(const prompt *p, int half) {
    fd_prefill_args a = {.struct_size = sizeof a, .B = 1, .H = H, .T = T, .K = K, .V = V, .C = C};
    a.q = upload(p->q, K, 0, T, half);
    a.k = upload(p->k, K, 0, T, half);
    a.v = upload(p->v, V, 0, T, half);
    a.g = upload(p->g, K, 0, T, 0);
    a.beta = upload(p->beta, 1, 0, T, 0);
    a.o = device(H * T * V * (half ? 2 : 4));
    fd(half ? fd_prefill_bf16_workspace(&a, &a.workspace_bytes) : fd_prefill_f32_workspace(&a, &a.workspace_bytes));
    a.workspace = device(a.workspace_bytes);
    return a;
}

static int prefill_f32(const prompt *p, CUstream stream) {
    fd_prefill_args a = prefill_args(p, 0);
    a.w = device(sizeof(float) * H * NC * C * K);
    a.u = device(sizeof(float) * H * NC * C * V);
    fd(fd_prefill_f32(&a, stream));
    return right("prefill, float32", a.o, p, 0, T, 0, 1e-5);
}

static int prefill_and_decode_bf16(const prompt *p, CUstream stream) {
    fd_prefill_args a = prefill_args(p, 1);
    float *states = device(sizeof(float) * H * V * K);
    a.final_state = states;
    fd(fd_prefill_bf16(&a, stream));
    int32_t slot = 0;
    void *indices = device(sizeof slot);
    CUDA(cuMemcpyHtoD((CUdeviceptr)(uintptr_t)indices, &slot, sizeof slot));
    fd_decode_args d = {.struct_size = sizeof d, .N = 1, .H = H, .slots = 1, .K = K, .V = V};
    d.q = upload(p->q, K, T, 1, 1);
    d.k = upload(p->k, K, T, 1, 1);
    d.v = upload(p->v, V, T, 1, 1);
    d.g = upload(p->g, K, T, 1, 0);
    d.beta = upload(p->beta, 1, T, 1, 0);
    d.states = states; /* the pool's only slot is the prompt's final state */
    d.state_indices = indices;
    d.o = device(H * V * 2);
    fd(fd_decode_bf16(&d, stream));
    int good = right("prefill, bfloat16", a.o, p, 0, T, 1, 6e-3);
    return right("decode, bfloat16", d.o, p, T, 1, 1, 1e-2) && good;
}

/* Of short prefills, few enough that the host need not wait for the device. */
static void host_time(const prompt *p, CUstream stream) {
    fd_prefill_args a = prefill_args(p, 0);
    a.w = device(sizeof(float) * H * NC * C * K);
    a.u = device(sizeof(float) * H * NC * C * V);
    a.T = C;
    double least = INFINITY;
    for (int round = 0; round < 10; round++) {
        struct timespec began, ended;
        CUDA(cuCtxSynchronize());
        timespec_get(&began, TIME_UTC);
        for (int i = 0; i < CALLS; i++)
            fd(fd_prefill_f32(&a, stream));
        timespec_get(&ended, TIME_UTC);
        double taken = (double)(ended.tv_sec - began.tv_sec) * 1e6 + (double)(ended.tv_nsec - began.tv_nsec) / 1e3;
        least = fmin(least, taken / CALLS);
    }
    CUDA(cuCtxSynchronize());
    printf("a call of fd_prefill_f32 costs %.2f us of host time\n", least);
}

int main(void) {
    CUdevice first;
    CUcontext context;
    CUDA(cuInit(0));
    CUDA(cuDeviceGet(&first, 0));
    CUDA(cuDevicePrimaryCtxRetain(&context, first));
    CUDA(cuCtxSetCurrent(context));
    CUstream stream = NULL;
    size_t tokens = (size_t)H * (T + 1);
    float unit = sqrtf(3.0f / K); /* keys and queries of length 1, more or less */
    prompt p = {
        .q = numbers(tokens * K, -unit, unit),
        .k = numbers(tokens * K, -unit, unit),
        .v = numbers(tokens * V, -1.0f, 1.0f),
        .g = numbers(tokens * K, -0.2f, 0.0f),
        .beta = numbers(tokens, 0.0f, 1.0f),
        .o = malloc(tokens * V * sizeof(double)),
    };
    recurrence(&p);
    printf("flashdelta %s, H %d, T %d, K %d, V %d\n", fd_version(), H, T, K, V);
    int good = prefill_f32(&p, stream);
    good = prefill_and_decode_bf16(&p, stream) && good;
    host_time(&p, stream);
    return good ? 0 : 1;
}
