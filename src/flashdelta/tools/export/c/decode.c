/* fd_decode_bf16: one kernel. */
#include <math.h>

#include "runtime.h"

_Static_assert(offsetof(fd_decode_args, o) + 8 == sizeof(fd_decode_args),
               "a later member would lie in the padding of this struct");

/* Floats from one slot to the next. */
static int64_t pitch_of(const fd_decode_args *a) {
    return a->slot_pitch != 0 ? a->slot_pitch : a->H * a->V * a->K;
}

static fd_status check(const fd_decode_args *a) {
    if (a->K != a->V || (a->K != 64 && a->K != 128))
        return fd_fail(FD_ERROR_UNSUPPORTED, "(K, V) must be (64, 64) or (128, 128); got (%d, %d)", (int)a->K, (int)a->V);
    FD_TRY(fd_check_size("N", a->N, FD_MOST));
    FD_TRY(fd_check_size("H", a->H, FD_MOST / a->V));
    FD_TRY(fd_check_size("slots", a->slots, FD_MOST));
    /* as in a prefill: V is no fewer than the slices of a head */
    if (a->H > 0 && a->N > FD_MOST / a->V / a->H)
        return fd_fail(FD_ERROR_SIZE, "N must be at most %lld with %lld heads; got %lld",
                       (long long)(FD_MOST / a->V / a->H), (long long)a->H, (long long)a->N);
    FD_TRY(fd_check_gate(a->gate));
    FD_TRY(fd_check_scale(a->scale));
    int64_t content = a->H * a->V * a->K;
    if (a->slot_pitch != 0 && (a->slot_pitch < content || a->slot_pitch % 16 != 0))
        return fd_fail(FD_ERROR_OPTION, "slot_pitch must be 0 or a multiple of 16, at least H * V * K = %lld; got %lld",
                       (long long)content, (long long)a->slot_pitch);
    /* of every float's address, in bytes; sizes that come first bound all other products */
    int64_t pitch = pitch_of(a), most = INT64_MAX / (int64_t)sizeof *a->states;
    if (a->slots > 0 && pitch > most / a->slots)
        return fd_fail(FD_ERROR_SIZE, "slots * slot_pitch must be at most %lld; got %lld * %lld", (long long)most,
                       (long long)a->slots, (long long)pitch);
    int needed = a->N > 0 && a->H > 0;
    FD_TRY(fd_check_pointer("q", a->q, needed));
    FD_TRY(fd_check_pointer("k", a->k, needed));
    FD_TRY(fd_check_pointer("v", a->v, needed));
    FD_TRY(fd_check_pointer("g", a->g, needed));
    FD_TRY(fd_check_pointer("beta", a->beta, needed));
    FD_TRY(fd_check_pointer("states", a->states, needed && a->slots > 0));
    FD_TRY(fd_check_pointer("state_indices", a->state_indices, needed));
    return fd_check_pointer("o", a->o, needed);
}

static fd_values values_of(const fd_decode_args *a) {
    fd_values values = {0};
    fd_value *of = values.of;
    of[FD_P_q].pointer = a->q;
    of[FD_P_k].pointer = a->k;
    of[FD_P_v].pointer = a->v;
    of[FD_P_g].pointer = a->g;
    of[FD_P_beta].pointer = a->beta;
    of[FD_P_o].pointer = a->o;
    of[FD_P_initial_state].pointer = a->states;
    of[FD_P_final_state].pointer = a->states;
    of[FD_P_starts].pointer = a->state_indices;
    of[FD_P_start_slots].i32 = of[FD_P_target_slots].i32 = (int32_t)a->slots;
    of[FD_P_has_initial].i32 = of[FD_P_has_final].i32 = 1;
    of[FD_P_start_pitch].i64 = of[FD_P_target_pitch].i64 = pitch_of(a);
    of[FD_P_start_row].i32 = 1;
    of[FD_P_most_tokens].i32 = 1;
    of[FD_P_scale].f32 = a->scale == 0.0f ? 1.0f / sqrtf((float)a->K) : a->scale;
    of[FD_P_T].i32 = 1;
    of[FD_P_group].i32 = 1;
    of[FD_P_HV].i32 = (int32_t)a->H;
    of[FD_P_q_batch].i64 = of[FD_P_k_batch].i64 = of[FD_P_g_batch].i64 = a->H * a->K;
    of[FD_P_q_token].i64 = of[FD_P_k_token].i64 = of[FD_P_g_token].i64 = a->H * a->K;
    of[FD_P_q_head].i64 = of[FD_P_k_head].i64 = of[FD_P_g_head].i64 = a->K;
    of[FD_P_v_batch].i64 = of[FD_P_o_batch].i64 = a->H * a->V;
    of[FD_P_v_token].i64 = of[FD_P_o_token].i64 = a->H * a->V;
    of[FD_P_v_head].i64 = of[FD_P_o_head].i64 = a->V;
    of[FD_P_beta_batch].i64 = of[FD_P_beta_token].i64 = a->H;
    of[FD_P_beta_head].i64 = 1;
    return values;
}

fd_status fd_decode_bf16(const fd_decode_args *args, CUstream stream) {
    fd_decode_args a;
    FD_TRY(fd_take("fd_decode_args", &a, sizeof a, args));
    FD_TRY(check(&a));
    fd_variant wanted = {FD_DECODE_BF16, FD_DECODE, a.K, a.V, 0, a.gate, FD_PRECISION_DEFAULT};
    int64_t items = a.N * a.H;
    fd_ready found;
    FD_TRY(fd_find(&wanted, &items, 1, &found));
    fd_values values = values_of(&a);
    return fd_launch(&found, 1, &values, stream);
}
