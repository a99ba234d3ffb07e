/* fd_prefill_f32 and fd_prefill_bf16: `prepare`, over chunks, then `recurrence`, along them; in float32 that leaves the output to
 * `output`, over chunks again. */
#include <math.h>

#include "runtime.h"

_Static_assert(offsetof(fd_prefill_args, workspace_bytes) + 8 == sizeof(fd_prefill_args),
               "a later member would lie in the padding of this struct");

/* What the stages leave for each other, one part after another: of every chunk w, qg, kg [C, K], inverse, Aqk [C, C], and decay [K]
 * in float32. In float32, w is the caller's, there is no inverse, and the last part is the state before every chunk, h [V, K]. */
typedef struct {
    size_t w, qg, kg, inverse, Aqk, decay, h, bytes;
} layout;

static layout layout_of(int op, const fd_prefill_args *a, int64_t chunks) {
    int wide = op == FD_PREFILL_F32;
    size_t element = wide ? 4 : 2;
    size_t all = (size_t)(a->B * a->H * chunks);
    size_t tile = all * (size_t)(a->C * a->K) * element, square = all * (size_t)(a->C * a->C) * element;
    layout at = {.w = 0, .qg = wide ? 0 : tile};
    at.kg = at.qg + tile;
    at.inverse = at.kg + tile;
    at.Aqk = at.inverse + (wide ? 0 : square);
    at.decay = at.Aqk + square;
    at.h = at.decay + all * (size_t)a->K * 4;
    at.bytes = at.h + (wide ? all * (size_t)(a->K * a->V) * 4 : 0);
    return at;
}

static fd_status check_sizes(const fd_prefill_args *a) {
    if (a->K != a->V || (a->K != 64 && a->K != 128) || (a->C != 32 && a->C != 64))
        return fd_fail(FD_ERROR_UNSUPPORTED,
                       "(K, V, C) must be one of (64, 64, 32), (64, 64, 64), (128, 128, 32), (128, 128, 64); got (%d, %d, %d)",
                       (int)a->K, (int)a->V, (int)a->C);
    FD_TRY(fd_check_size("B", a->B, FD_MOST));
    FD_TRY(fd_check_size("H", a->H, FD_MOST));
    FD_TRY(fd_check_size("T", a->T, FD_MOST - a->C));
    /* a thread block takes 16 value channels or more: V of them are enough for the slices of a head; with so few chunks every
     * later product of sizes stays far below 2^63, too */
    int64_t heads = a->B * a->H, most = FD_MOST / a->V, chunks = (a->T + a->C - 1) / a->C;
    if (heads > most || (chunks > 0 && heads > most / chunks))
        return fd_fail(FD_ERROR_SIZE, "B * H must be at most %lld, and so must all chunks; got %lld with %lld chunks each",
                       (long long)most, (long long)heads, (long long)chunks);
    return FD_SUCCESS;
}

static fd_status check_options(int op, const fd_prefill_args *a) {
    FD_TRY(fd_check_gate(a->gate));
    FD_TRY(fd_check_scale(a->scale));
    int most = op == FD_PREFILL_F32 ? FD_PRECISION_IEEE : FD_PRECISION_DEFAULT;
    if (a->precision < FD_PRECISION_DEFAULT || a->precision > most)
        return fd_fail(FD_ERROR_OPTION, "precision must be %s; got %d",
                       op == FD_PREFILL_F32 ? "an fd_precision" : "FD_PRECISION_DEFAULT", (int)a->precision);
    return FD_SUCCESS;
}

static fd_status check_pointers(int op, const fd_prefill_args *a, size_t workspace_bytes) {
    int tokens = a->B * a->H > 0 && a->T > 0;
    FD_TRY(fd_check_pointer("q", a->q, tokens));
    FD_TRY(fd_check_pointer("k", a->k, tokens));
    FD_TRY(fd_check_pointer("v", a->v, tokens));
    FD_TRY(fd_check_pointer("g", a->g, tokens));
    FD_TRY(fd_check_pointer("beta", a->beta, tokens));
    FD_TRY(fd_check_pointer("initial_state", a->initial_state, 0));
    FD_TRY(fd_check_pointer("o", a->o, tokens));
    if (op == FD_PREFILL_BF16 && (a->w != NULL || a->u != NULL))
        return fd_fail(FD_ERROR_NULL_POINTER, "%s must be NULL (only fd_prefill_f32 returns it); got a pointer",
                       a->w != NULL ? "w" : "u");
    FD_TRY(fd_check_pointer("w", a->w, tokens && op == FD_PREFILL_F32));
    FD_TRY(fd_check_pointer("u", a->u, tokens && op == FD_PREFILL_F32));
    FD_TRY(fd_check_pointer("final_state", a->final_state, 0));
    FD_TRY(fd_check_pointer("workspace", a->workspace, tokens));
    if (a->workspace_bytes < workspace_bytes)
        return fd_fail(FD_ERROR_WORKSPACE, "workspace_bytes must be at least %zu; got %zu", workspace_bytes,
                       a->workspace_bytes);
    return FD_SUCCESS;
}

static fd_status workspace(int op, const fd_prefill_args *args, size_t *bytes) {
    fd_prefill_args a;
    FD_TRY(fd_take("fd_prefill_args", &a, sizeof a, args));
    FD_TRY(check_sizes(&a));
    if (bytes == NULL)
        return fd_fail(FD_ERROR_NULL_POINTER, "bytes must be where to write the number; got NULL");
    *bytes = layout_of(op, &a, (a.T + a.C - 1) / a.C).bytes;
    return FD_SUCCESS;
}

/* Every head of every batch row is a sequence of its own, with one head: chunks of a head then lie one after another. */
static fd_values values_of(const fd_prefill_args *a, const layout *at, int64_t chunks, int has_w) {
    fd_values values = {0};
    fd_value *of = values.of;
    const char *base = a->workspace;
    of[FD_P_q].pointer = a->q;
    of[FD_P_k].pointer = a->k;
    of[FD_P_v].pointer = a->v;
    of[FD_P_g].pointer = a->g;
    of[FD_P_beta].pointer = a->beta;
    of[FD_P_o].pointer = a->o;
    of[FD_P_w].pointer = has_w ? a->w : base + at->w;
    of[FD_P_u].pointer = a->u;
    of[FD_P_qg].pointer = base + at->qg;
    of[FD_P_kg].pointer = base + at->kg;
    of[FD_P_inverse].pointer = base + at->inverse;
    of[FD_P_Aqk].pointer = base + at->Aqk;
    of[FD_P_decay].pointer = base + at->decay;
    of[FD_P_h].pointer = base + at->h;
    of[FD_P_pseudo].pointer = a->o; /* until `output` overwrites them */
    of[FD_P_initial_state].pointer = a->initial_state;
    of[FD_P_final_state].pointer = a->final_state;
    of[FD_P_has_initial].i32 = a->initial_state != NULL;
    of[FD_P_has_final].i32 = a->final_state != NULL;
    of[FD_P_state_pitch].i64 = (int64_t)a->K * a->V;
    of[FD_P_scale].f32 = a->scale == 0.0f ? 1.0f / sqrtf((float)a->K) : a->scale;
    of[FD_P_T].i32 = (int32_t)a->T;
    of[FD_P_N].i32 = (int32_t)(a->B * a->H);
    of[FD_P_H].i32 = 1;
    of[FD_P_HV].i32 = 1;
    of[FD_P_slots].i32 = (int32_t)chunks;
    of[FD_P_q_batch].i64 = of[FD_P_k_batch].i64 = of[FD_P_g_batch].i64 = a->T * a->K;
    of[FD_P_q_token].i64 = of[FD_P_k_token].i64 = of[FD_P_g_token].i64 = a->K;
    of[FD_P_q_head].i64 = of[FD_P_k_head].i64 = of[FD_P_g_head].i64 = a->K;
    of[FD_P_v_batch].i64 = of[FD_P_o_batch].i64 = a->T * a->V;
    of[FD_P_v_token].i64 = of[FD_P_o_token].i64 = a->V;
    of[FD_P_v_head].i64 = of[FD_P_o_head].i64 = a->V;
    of[FD_P_beta_batch].i64 = a->T;
    of[FD_P_beta_token].i64 = 1;
    of[FD_P_beta_head].i64 = 1;
    return values;
}

/* Heads of all sequences up to which slices of the value channels are narrow, for more thread blocks: `STATES_FEW` of
 * kernels/triton/recurrence.py. */
#define FEW 16

static fd_status prefill(int op, const fd_prefill_args *args, CUstream stream) {
    fd_prefill_args taken;
    const fd_prefill_args *a = &taken;
    FD_TRY(fd_take("fd_prefill_args", &taken, sizeof taken, args));
    FD_TRY(check_sizes(a));
    FD_TRY(check_options(op, a));
    int64_t chunks = (a->T + a->C - 1) / a->C, heads = a->B * a->H;
    layout at = layout_of(op, a, chunks);
    FD_TRY(check_pointers(op, a, at.bytes));
    int precision = a->precision;
    if (op == FD_PREFILL_F32 && precision == FD_PRECISION_DEFAULT)
        precision = FD_PRECISION_TF32X3;
    int wide = op == FD_PREFILL_F32 && a->K > 64 && heads > FEW && precision == FD_PRECISION_TF32X3;
    int recurrence = wide ? FD_RECURRENCE_WIDE : FD_RECURRENCE;
    fd_variant stages[] = {
        {op, FD_PREPARE, a->K, a->V, a->C, a->gate, precision},
        {op, recurrence, a->K, a->V, a->C, a->gate, precision},
        {op, FD_OUTPUT, a->K, a->V, a->C, a->gate, precision},
    };
    unsigned count = op == FD_PREFILL_F32 ? 3 : 2;
    int64_t items[] = {heads * chunks, heads, heads * chunks};
    fd_ready found[FD_LAUNCHES];
    FD_TRY(fd_find(stages, items, count, found));
    fd_values values = values_of(a, &at, chunks, op == FD_PREFILL_F32);
    return fd_launch(found, count, &values, stream);
}

fd_status fd_prefill_f32_workspace(const fd_prefill_args *args, size_t *bytes) {
    return workspace(FD_PREFILL_F32, args, bytes);
}

fd_status fd_prefill_bf16_workspace(const fd_prefill_args *args, size_t *bytes) {
    return workspace(FD_PREFILL_BF16, args, bytes);
}

fd_status fd_prefill_f32(const fd_prefill_args *args, CUstream stream) {
    return prefill(FD_PREFILL_F32, args, stream);
}

fd_status fd_prefill_bf16(const fd_prefill_args *args, CUstream stream) {
    return prefill(FD_PREFILL_BF16, args, stream);
}
