/* Many threads call the library from its first call on, in contexts that come and go, for sanitizers. Exit code 0 if every call
 * succeeded. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flashdelta.h"

/* All launches fit into the stand-in's list. */
enum { THREADS = 8, CALLS = 100, CALLS_A_CONTEXT = 4 };

/* Of the stand-in. */
static void (*use_context)(int), (*destroy_context)(int);

typedef struct {
    int context, failures;
} thread;

/* A struct that ends in front of `precision`, and the memory with it. */
static fd_status short_struct(const fd_prefill_args *p) {
    size_t size = offsetof(fd_prefill_args, precision), bytes;
    void *args = malloc(size);
    memcpy(args, p, size);
    memcpy(args, &size, sizeof size);
    fd_status status = fd_prefill_f32_workspace(args, &bytes);
    free(args);
    return status;
}

static void *somewhere(int i) {
    return (void *)(uintptr_t)(0x10000 * (i + 1));
}

static void *work(void *given) {
    fd_prefill_args p = {.struct_size = sizeof p, .B = 1, .H = 2, .T = 70, .K = 64, .V = 64, .C = 32};
    p.q = somewhere(0), p.k = somewhere(1), p.v = somewhere(2), p.g = somewhere(3), p.beta = somewhere(4);
    p.o = somewhere(5), p.w = somewhere(6), p.u = somewhere(7), p.workspace = somewhere(8), p.workspace_bytes = SIZE_MAX;
    fd_decode_args d = {.struct_size = sizeof d, .N = 3, .H = 2, .slots = 4, .K = 64, .V = 64};
    d.q = somewhere(0), d.k = somewhere(1), d.v = somewhere(2), d.g = somewhere(3), d.beta = somewhere(4);
    d.states = somewhere(5), d.state_indices = somewhere(6), d.o = somewhere(7);
    thread *self = given;
    int *count = &self->failures;
    for (int i = 0; i < CALLS; i++) {
        if (i % CALLS_A_CONTEXT == 0) {
            destroy_context(self->context);
            use_context(self->context);
        }
        *count += fd_prefill_f32(&p, NULL) != FD_SUCCESS;
        *count += fd_decode_bf16(&d, NULL) != FD_SUCCESS;
        *count += short_struct(&p) != FD_SUCCESS;
        *count += fd_prefill_f32(NULL, NULL) != FD_ERROR_NULL_POINTER;
        *count += strncmp(fd_last_error(), "args must ", 10) != 0;
    }
    return NULL;
}

int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    pthread_t threads[THREADS];
    thread states[THREADS] = {0};
    int sum = 0;
    if (driver == NULL)
        return 2;
    *(void **)&use_context = dlsym(driver, "fake_use_context");
    *(void **)&destroy_context = dlsym(driver, "fake_destroy_context");
    for (int i = 0; i < THREADS; i++) {
        states[i].context = i;
        if (pthread_create(&threads[i], NULL, work, &states[i]) != 0)
            return 2;
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        sum += states[i].failures;
    }
    if (sum != 0)
        fprintf(stderr, "%d failures: %s\n", sum, fd_last_error());
    return sum != 0;
}
