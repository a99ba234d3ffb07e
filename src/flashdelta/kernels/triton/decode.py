"""Stage `decode` (FLA: `fused_recurrent_kda`): KDA token by token, for few tokens per sequence. One CTA per (sequence, value
head, slice of `BV` value channels).

Contract (docs/decode.md; `reference.decode` is the definition), in fp32 throughout:

    S <- diag(exp(g_t)) S;   S <- S + beta_t k_t (v_t - k_t^T S);   o_t = scale * q_t^T S

A tile `S^T [BV, K]` of the state is read once and stays in registers. Both sums over K are taken of the decayed state,

    D = diag(exp(g_t)) S,   a = k_t^T D,   b = q_t^T D,   d = beta_t (v_t - a),   o_t = scale * (b + (q_t^T k_t) d),

so that neither sum waits for the other, and one pass over the registers is left: `S <- D + k_t d`. The L2 norms of `q_t` and
`k_t` multiply the sums instead of the rows. That leaves four instructions per element, which count where states are bfloat16.

Memory bounds the kernel, so loads are issued in the order in which others wait for them: the slot's index, the first token's
rows, the tile. Norms and gate are computed while the tile is in flight. From sm_90 on a launch may overlap the end of the
kernel before it (programmatic dependent launch), up to `gdc_wait`; nothing is loaded or stored before that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import StepProblem, StepTensors
from ...program.launch import Launch
from ...program.plan import Outputs
from ..shared.gates import beta_of, decay_rate, head_bias, log2_decay
from ..shared.norms import L2_EPS
from ..shared.products import summand
from ..shared.records import record_values, store_decay_and_key
from ..shared.scalars import SCALARS
from ..shared.sequences import at_token, end_of_few, own_work_tile
from ..shared.states import everywhere, start_slot, state_offsets, target_slot
from ..stages.decode import DECODE_FEW, step_arguments
from ..stages.launch import Config, launch

CHANNELS_A_THREAD = tl.constexpr(4)
"""Adjacent value channels of a thread where states lie K first, in bf16 too. With 8 fewer threads lie along V and more along K,
over which sums run (docs/log/tuning.md)."""


@triton.jit
def load_row(x, at, there):
    return tl.load(x + at, mask=everywhere(at, there), other=0.0)


@triton.jit
def load_tile(states, at, read, STREAM):
    mask = everywhere(at, read)
    return tl.load(states + at, mask=mask, other=0.0, eviction_policy="evict_first" if STREAM else "")


@triton.jit
def store_tile(states, at, state, stored, STREAM):
    mask = everywhere(at, stored)
    state = state.to(states.dtype.element_ty)
    tl.store(states + at, state, mask=mask, eviction_policy="evict_first" if STREAM else "")


@triton.jit
def load_token(q, k, g, beta, t, there, q_token, k_token, g_token, beta_token, key):
    """Token `t` as it lies in memory: rows of q, k, g `[K]`, and beta. Zeros if it is not `there`."""
    rows = (load_row(q + t * q_token, key, there), load_row(k + t * k_token, key, there))
    return rows + (load_row(g + t * g_token, key, there), tl.load(beta + t * beta_token, mask=there, other=0.0))


@triton.jit
def norm_factor(row, L2NORM):
    norm = 1.0
    if L2NORM:
        norm = tl.rsqrt(tl.sum(summand(row, row)) + L2_EPS)
    return norm


@triton.jit
def factors(rows, there, bias, rate, lower_bound, scale, GATE, BETA, L2NORM):
    """Factors of one token: `q`, `k` and `exp(g)` `[K]`, then `scale / |q|`, `1 / |k|`, `q^T k / |k|` and `beta`. A token that
    is not `there` changes no state."""
    row_q, row_k, row_g, beta = rows
    row_q, row_k = row_q.to(tl.float32), row_k.to(tl.float32)
    exp_g = tl.exp2(log2_decay(row_g.to(tl.float32) + bias, rate, lower_bound, GATE))
    exp_g = tl.where(there, exp_g, 1.0)
    norm_q = norm_factor(row_q, L2NORM) * scale
    norm_k = norm_factor(row_k, L2NORM)
    overlap = tl.sum(summand(row_q, row_k)) * norm_k
    return row_q, row_k, exp_g, norm_q, norm_k, overlap, beta_of(beta.to(tl.float32), BETA)


@triton.jit
def step(state, row_v, token, A_THREAD=CHANNELS_A_THREAD):
    """The state `S^T [BV, K]` after a token, the token's output and what it wrote, `u`, `[BV]`. `token`: from `factors`.
    `A_THREAD`: adjacent value channels of a thread."""
    row_q, row_k, exp_g, norm_q, norm_k, overlap, beta = token
    # a state that is not aligned lies element by element along the lanes: then of 32 key channels each has one
    OTHERS: tl.constexpr = A_THREAD if row_k.shape[0] > 32 else state.shape[0]
    state = state * exp_g[None, :]
    along_k = tl.sum(summand(state, row_k[None, :], OTHERS), axis=1)
    along_q = tl.sum(summand(state, row_q[None, :], OTHERS), axis=1)
    # fused by name, here and below: what is recorded is worked out again in another layout
    correction = beta * tl.fma(along_k, -norm_k, row_v.to(tl.float32))
    written = norm_k * correction
    state = tl.fma(written[:, None], row_k[None, :], state)
    return state, norm_q * (along_q + overlap * correction), written


@triton.jit
def record(records, stored, slice_, key, value, token, written, K):
    """Stores what a token changed, for `commit` to replay: `k` is as it came."""
    _, row_k, exp_g, _, _, _, _ = token
    store_decay_and_key(records, key, everywhere(key, stored & (slice_ == 0)), exp_g, row_k, K)
    tl.store(record_values(records, K) + value, written, mask=everywhere(value, stored))


@triton.jit(do_not_specialize=SCALARS)
def decode_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, o,
    initial_state, final_state, starts, targets, accepted, has_initial_state, lowest, start_slots, target_slots,
    has_initial, has_final, start_pitch: tl.int64, target_pitch: tl.int64, target_step: tl.int64,
    start_row, start_token, target_row, target_token, most_tokens, scale, lower_bound, T, group, HV,
    q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64, k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64, g_batch: tl.int64, g_token: tl.int64, g_head: tl.int64,
    beta_batch: tl.int64, beta_token: tl.int64, beta_head: tl.int64,
    o_batch: tl.int64, o_token: tl.int64, o_head: tl.int64,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SINGLE: tl.constexpr, STREAM: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr, V_FIRST: tl.constexpr, EACH: tl.constexpr,
    IN_PLACE: tl.constexpr, TWO_POOLS: tl.constexpr, NULL_GIVES_ZERO: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`S <- diag(exp(g_t)) S + beta_t k_t (v_t - k_t^T diag(exp(g_t)) S)`, `o_t = scale q_t^T S`.

    `SINGLE`: one token per sequence. `EACH`: the state after every token is stored, in slots of the pool or (2) in rows of a
    scratch buffer.
    `IN_PLACE`: states are slots of a pool; `TWO_POOLS`: read from one and stored to another. `STREAM`: states need not stay in
    the L2 cache.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    slice_, head, n, batch, begin, end = own_work_tile(cu_seqlens, T, HV, V // BV)
    end = end_of_few(begin, end, most_tokens)
    there = begin < end
    qk_head = (head.to(tl.int32) // group).to(tl.int64)
    q, k = at_token((q, k), (q_batch, q_token, q_head, k_batch, k_token, k_head), batch, 0, qk_head)
    v, g = at_token((v, g), (v_batch, v_token, v_head, g_batch, g_token, g_head), batch, 0, head)
    beta, o = at_token((beta, o), (beta_batch, beta_token, beta_head, o_batch, o_token, o_head), batch, 0, head)
    key = tl.arange(0, K)
    value = slice_ * BV + tl.arange(0, BV)
    if not V_FIRST:
        value = tl.max_contiguous(value, min(CHANNELS_A_THREAD, BV))

    slot, live, read = start_slot(
        *(starts, targets, accepted, has_initial_state, n, there, has_initial, start_row, start_token, target_row),
        *(most_tokens, lowest, start_slots, target_slots, TWO_POOLS),
    )
    rows = load_token(q, k, g, beta, begin, there, q_token, k_token, g_token, beta_token, key)
    rate = decay_rate(A_log, head)
    bias = head_bias(dt_bias, head, key, K)
    in_slot = state_offsets(0, value, key, K, V, V_FIRST)
    state = load_tile(initial_state + (slot * start_pitch + head * (K * V)), in_slot, read, STREAM)
    row_v = load_row(v + begin * v_token, value, there)
    first = factors(rows, there, bias, rate, lower_bound, scale, GATE, BETA, L2NORM)

    stored = has_final
    if IN_PLACE:
        stored *= live.to(tl.int32)
    if TWO_POOLS and not EACH:
        slot, _ = target_slot(targets, n * target_row, n, lowest, target_slots)
    final_state += head * (K * V)
    if not EACH:
        final_state += slot * target_pitch

    state, out, _ = step(state.to(tl.float32), row_v, first)
    if SINGLE:
        if NULL_GIVES_ZERO:
            out = tl.where(live, out, 0.0)
        tl.store(o + begin * o_token + value, out.to(o.dtype.element_ty))
    else:
        for t in range(begin, end):
            if NULL_GIVES_ZERO:
                out = tl.where(live, out, 0.0)
            tl.store(o + t * o_token + value, out.to(o.dtype.element_ty))
            if EACH:
                nth = t - begin
                index = n * target_row + nth * target_token
                # a scratch buffer has no reserved row
                target, named = target_slot(targets, index, slot, 0 if EACH == 2 else lowest, target_slots)
                state_at = target * target_pitch + nth * target_step + in_slot
                store_tile(final_state, state_at, state, (live & named).to(tl.int32), STREAM)
            more = t + 1 < end
            if more:
                rows = load_token(q, k, g, beta, t + 1, more, q_token, k_token, g_token, beta_token, key)
                row_v = load_row(v + (t + 1) * v_token, value, more)
                token = factors(rows, more, bias, rate, lower_bound, scale, GATE, BETA, L2NORM)
                state, out, _ = step(state, row_v, token)
    if not EACH:
        store_tile(final_state, in_slot, state, stored, STREAM)


def decode_config(problem: StepProblem, capability: int) -> Config:
    """Chooses sizes by kind of call: bytes in flight decide, so a CTA has 4 KB of states (bf16, one warp: 2 KB reach 76 % of
    the copy rate, 4 KB 89 %, and with 8 KB registers let too few CTAs run). K first, only the width of a tile makes accesses to
    whole sectors: 64 channels where there are many CTAs. docs/log/tuning.md has all that was tried."""
    wide = problem.state_dtype == torch.float32
    if problem.T > 1 or problem.packed:
        return Config(num_warps=1, BV=_channels(problem, 2048), STREAM=True)
    few = problem.N * problem.HV <= DECODE_FEW
    if problem.state_v_first and wide:
        return Config(num_warps=1, BV=_channels(problem, 1024))
    if problem.state_v_first or few:
        return Config(num_warps=1, BV=_channels(problem, 2048), STREAM=not few)
    return Config(BV=min(64, _channels(problem, 8192)), num_warps=4, STREAM=not wide)


def _channels(problem: StepProblem, elements: int) -> int:
    """Value channels of a tile of `elements` elements."""
    return min(problem.V, max(1, elements // problem.K))


def decode(problem: StepProblem, t: StepTensors, arch: int, outputs: Outputs) -> list[Launch]:
    """Token by token: `fused_recurrent_kda` and `recurrent_kda`."""
    c = decode_config(problem, arch)
    own = dict(
        **step_arguments(problem, t, outputs),
        SINGLE=problem.T == 1 and not problem.packed,
        EACH=2 if problem.has_intermediate else problem.stores_each_state,
    )
    ctas = problem.N * problem.HV * (problem.V // c.BV)
    return [launch(decode_kernel, ctas, problem, t, own, c, overlaps=arch >= 90)]
