"""Stage `wy` of the backward pass, and the operator `kernels.chunk_bwd_wy_dqkg` (FLA: `chunk_kda_bwd_wy_dqkg_fused`). One CTA
per (chunk, value head).

Contract (docs/backward.md), with `Akk_inv = (I + Akk)^-1`, the state `S` before the chunk and the gradient `dS'` of the state
after it:

    dAqk  = lower(do v_new^T)                                    [C, C]
    dw    = -dv_new S^T                                          [C, K]
    R, Z  = Akk_inv^T dv_new, Akk_inv^T dw                       [C, V], [C, K]
    dv    = beta R                                               [C, V]
    dbeta = <R, v> + <Z, k exp(G)>                               [C]
    dAkk  = strict_lower(-Akk_inv^T dAkk_inv Akk_inv^T)          [C, C]    dAkk_inv = (dv_new v^T + dw (k exp G)^T) diag(beta)
    dq    = scale (do S^T) exp(G)                                [C, K]
    dk    = beta Z exp(G) + (v_new dS'^T) exp(G_C - G)           [C, K]
    dG    = what each exponential's argument takes of these      [C, K]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..problem.problem import Problem
from ..problem.wy_spec import WyGradients, WySpec, WyTensors
from ..program.cache import Recorder
from ..program.launch import Launch, capability, dense, launch_all, strides
from . import config
from .device.decays import chunk_decays, sums
from .device.gates import LOG2E, decay_rate, write_strength
from .device.norms import row_norms
from .device.sequences import chunks_before, own_chunk
from .device.states import state_offsets


@triton.jit
def chunk_sums(
    g, dt_bias, g_token, column, row, valid, count, head, rate, lower_bound, K: tl.constexpr, GATE: tl.constexpr
):
    """From which `grown` and `shrunk` take their sums of log2 decays: the rows' decays as `high, low`. With the gate
    `cumulative` (`cumulative_log2`: in base 2) g holds the sums `G`: these and the last one, `G_C`."""
    if GATE == "cumulative" or GATE == "cumulative_log2":
        first = tl.load(g + row[:, None] * g_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        second = tl.load(g + (tl.minimum(count, row.shape[0]) - 1) * g_token + column).to(tl.float32)
    else:
        _, first, second = chunk_decays(
            g, dt_bias, row[:, None] * g_token, column, valid, head, rate, lower_bound, K, GATE
        )
    return first, second


@triton.jit
def exp_of(G, GATE: tl.constexpr):
    """Of a sum of log decays as the gate `cumulative` or `cumulative_log2` has it."""
    return tl.exp2(G * LOG2E if GATE == "cumulative" else G)


@triton.jit
def grown_by(first, second, row, GATE: tl.constexpr):
    """`exp(G)` of all rows, and `exp(G_C)`."""
    if GATE == "cumulative" or GATE == "cumulative_log2":
        grown = exp_of(first, GATE)
        total = exp_of(second, GATE)
    else:
        grown = tl.exp2(sums(row[None, :] <= row[:, None], first, second))
        # rows past the end do not decay
        total = tl.sum(tl.where(row[:, None] == row.shape[0] - 1, grown, 0.0), axis=0)
    return grown, total


@triton.jit
def shrunk_by(first, second, row, GATE: tl.constexpr):
    """`exp(G_C - G)` of all rows."""
    if GATE == "cumulative" or GATE == "cumulative_log2":
        # of sums close to each other the difference is exact: before any product rounds them
        shrunk = exp_of(second[None, :] - first, GATE)
    else:
        shrunk = tl.exp2(sums(row[None, :] > row[:, None], first, second))
    return shrunk


@triton.jit
def value_tile(x, rows, value, valid):
    return tl.load(x + rows + value[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def through_states(
    x,
    rows,
    valid,
    states,
    column,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`x S^T` by slices of value channels."""
    found = tl.zeros([valid.shape[0], column.shape[0]], tl.float32)
    for t in tl.range(0, V, BV, num_stages=1):
        value = t + tl.arange(0, BV)
        tile = value_tile(x, rows, value, valid)
        state = tl.load(states + state_offsets(0, value, column, K, V, V_FIRST)).to(tile.dtype)
        found = tl.dot(tile, state, acc=found, input_precision=PRECISION)
    return found


@triton.jit
def state_overlap(h, grad_h, column, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr):
    """`sum_v S dS'` by slices of value channels."""
    whole = tl.zeros([column.shape[0]], tl.float32)
    for t in tl.range(0, V, BV, num_stages=1):
        in_state = state_offsets(0, t + tl.arange(0, BV), column, K, V, V_FIRST)
        whole += tl.sum(tl.load(h + in_state).to(tl.float32) * tl.load(grad_h + in_state).to(tl.float32), axis=0)
    return whole


@triton.jit
def value_tiles(v, v_token, grad_o, o_token, pseudo, grad_pseudo, in_own, row, value, valid, V: tl.constexpr):
    """The chosen channels of `v, do, v', dv'`."""
    tile_v = value_tile(v, row[:, None] * v_token, value, valid)
    tile_o = value_tile(grad_o, row[:, None] * o_token, value, valid)
    return (
        tile_v,
        tile_o,
        value_tile(pseudo, in_own * V, value, valid),
        value_tile(grad_pseudo, in_own * V, value, valid),
    )


@triton.jit
def value_products(
    grad_M, Aqk, of_beta, tiles, tile_M, strength, grad_v, grad_Aqk, in_values, valid, PRECISION: tl.constexpr
):
    """Adds the channels of `value_tiles` to `dM` (without beta), `dAqk` and `dbeta`; stores `dv`."""
    tile_v, tile_o, tile_p, tile_dp = tiles
    grad_M = tl.dot(tile_dp, tl.trans(tile_v), acc=grad_M, input_precision=PRECISION)
    if grad_Aqk is not None:
        Aqk = tl.dot(tile_o, tl.trans(tile_p), acc=Aqk, input_precision=PRECISION)
    written = tl.dot(tl.trans(tile_M), tile_dp, input_precision=PRECISION)
    of_beta += tl.sum(written * tile_v.to(tl.float32), axis=1)
    written *= strength[:, None]
    tl.store(grad_v + in_values, written.to(grad_v.dtype.element_ty), mask=valid[:, None])
    return grad_M, Aqk, of_beta


@triton.jit(
    do_not_specialize=[
        *("T", "N", "H", "HV", "slots", "rows", "beta_batch", "beta_token", "beta_head", "scale", "lower_bound"),
    ]
)
def wy_kernel(
    q,
    k,
    g,
    v,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    solved,
    h,
    pseudo,
    grad_o,
    grad_pseudo,
    grad_h,
    grad_q,
    grad_k,
    grad_G,
    grad_v,
    grad_beta,
    grad_A,
    grad_Aqk,
    scale,
    lower_bound,
    T,
    N,
    H,
    HV,
    slots,
    rows,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    g_batch: tl.int64,
    g_token: tl.int64,
    g_head: tl.int64,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    o_batch: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    beta_batch: tl.int64,
    beta_token: tl.int64,
    beta_head: tl.int64,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (chunk, value head). In float32, by token and value head: `grad_q, grad_k` (of normalised rows) and
    `grad_G [B, T, HV, K]` without what comes through the chunk's matrices, `grad_beta [B, T, HV]`; `grad_A, grad_Aqk`, lower.
    `grad_v [B, T, HV, V]` is done.

    Matrices `solved, grad_A` lie by chunk slot, `[S, HV, C, C]`, and so do states, `[S, HV, V, K]`. `BY_TOKEN` (the operator of
    its own): matrices by token, `[B, T, HV, C]`, and states of `rows` chunks a batch row, packed without gaps between
    sequences.
    """
    head, slot, batch, start, count = own_chunk(tl.program_id(0), cu_seqlens, None, 0, slots, N, T, HV, C)
    state = slot
    if BY_TOKEN and cu_seqlens is not None:
        # a chunk's first token tells how many chunks begin before it
        state = chunks_before(cu_seqlens, slot * 0 + N, start, C, 128)
        count = tl.where(state < rows, count, 0)
    if count <= 0:
        return
    HELD: tl.constexpr = BV == V
    qk_head = head // (HV // H)
    q += batch * q_batch + start * q_token + qk_head * q_head
    k += batch * k_batch + start * k_token + qk_head * k_head
    g += batch * g_batch + start * g_token + head * g_head
    v += batch * v_batch + start * v_token + head * v_head
    beta += batch * beta_batch + start * beta_token + head * beta_head
    grad_o += batch * o_batch + start * o_token + head * o_head
    own = (batch * T + start) * HV + head
    pseudo += own * V
    grad_pseudo += own * V
    grad_v += own * V
    grad_q += own * K
    grad_k += own * K
    grad_G += own * K
    grad_beta += own
    h += (state * HV + head) * K * V
    grad_h += (state * HV + head) * K * V
    matrix = own * C if BY_TOKEN else (slot * HV + head) * C * C
    solved += matrix
    grad_A += matrix
    dtype: tl.constexpr = pseudo.dtype.element_ty
    row = tl.arange(0, C)
    valid = row < count
    lower = row[:, None] >= row[None, :]
    in_own = row[:, None] * HV
    in_matrix = (in_own if BY_TOKEN else row[:, None]) * C + row[None, :]
    tile_M = tl.load(solved + in_matrix, mask=lower & valid[:, None], other=0.0).to(dtype)
    strength = write_strength(tl.load(beta + row * beta_token, mask=valid, other=0.0).to(tl.float32), BETA)

    grad_M = tl.zeros([C, C], tl.float32)
    Aqk = tl.zeros([C, C], tl.float32)
    of_beta = tl.zeros([C], tl.float32)
    if HELD:
        value = tl.arange(0, V)
        held = value_tiles(v, v_token, grad_o, o_token, pseudo, grad_pseudo, in_own, row, value, valid, V)
        grad_M, Aqk, of_beta = value_products(
            *(grad_M, Aqk, of_beta, held, tile_M, strength, grad_v, grad_Aqk),
            *(in_own * V + value[None, :], valid, PRECISION),
        )
    else:
        for t in tl.range(0, V, BV, num_stages=1):
            value = t + tl.arange(0, BV)
            tiles = value_tiles(v, v_token, grad_o, o_token, pseudo, grad_pseudo, in_own, row, value, valid, V)
            grad_M, Aqk, of_beta = value_products(
                *(grad_M, Aqk, of_beta, tiles, tile_M, strength, grad_v, grad_Aqk),
                *(in_own * V + value[None, :], valid, PRECISION),
            )
    if grad_Aqk is not None:
        tl.store(grad_Aqk + matrix + in_matrix, tl.where(lower, Aqk, 0.0))

    rate = decay_rate(A_log, head)
    norm_q = row_norms(q, row[:, None] * q_token, valid, C, K, 32, L2NORM)
    norm_k = row_norms(k, row[:, None] * k_token, valid, C, K, 32, L2NORM)
    last = row[:, None] == tl.minimum(count, C) - 1
    for s in tl.range(0, K, BK, num_stages=STAGES):
        # in an order in which little is alive at a time
        column = s + tl.arange(0, BK)
        tile_q = value_tile(q, row[:, None] * q_token, column, valid)
        tile_k = value_tile(k, row[:, None] * k_token, column, valid)
        first, second = chunk_sums(g, dt_bias, g_token, column, row, valid, count, head, rate, lower_bound, K, GATE)
        if HELD:
            in_state = state_offsets(0, value, column, K, V, V_FIRST)
            before = tl.load(h + in_state).to(dtype)
            after = tl.load(grad_h + in_state).to(dtype)
            whole = tl.sum(before.to(tl.float32) * after.to(tl.float32), axis=0)
            w = tl.dot(held[3], before, input_precision=PRECISION)
        else:
            whole = state_overlap(h, grad_h, column, K, V, BV, V_FIRST)
            w = through_states(grad_pseudo, in_own * V, valid, h, column, K, V, BV, V_FIRST, PRECISION)
        # w came from `v' = u - w S`
        w = (-w).to(dtype)
        grown, total = grown_by(first, second, row, GATE)
        tile_k = tile_k.to(tl.float32) * norm_k[:, None]
        written = tile_k * grown
        grad_M = tl.dot(w, tl.trans(written.to(dtype)), acc=grad_M, input_precision=PRECISION)
        kG = tl.dot(tl.trans(tile_M), w, input_precision=PRECISION)
        of_beta += tl.sum(kG * written, axis=1)
        kG *= grown * strength[:, None]
        if HELD:
            qg = tl.dot(held[1], before, input_precision=PRECISION)
        else:
            qg = through_states(grad_o, row[:, None] * o_token, valid, h, column, K, V, BV, V_FIRST, PRECISION)
        qg *= grown * scale
        in_keys = in_own * K + column[None, :]
        tl.store(grad_q + in_keys, qg, mask=valid[:, None])
        G = tile_q.to(tl.float32) * norm_q[:, None] * qg + tile_k * kG
        if HELD:
            kg = tl.dot(held[2], after, input_precision=PRECISION)
        else:
            kg = through_states(pseudo, in_own * V, valid, grad_h, column, K, V, BV, V_FIRST, PRECISION)
        kg *= shrunk_by(first, second, row, GATE)
        tl.store(grad_k + in_keys, kG + kg, mask=valid[:, None])
        # `G_C` is the last row's own G: there what goes through kg = k exp(G_C - G) cancels, exactly only if left out
        left = tl.where(last, 0.0, tile_k * kg)
        G -= left
        G += tl.where(last, (tl.sum(left, axis=0) + whole * total)[None, :], 0.0)
        tl.store(grad_G + in_keys, G, mask=valid[:, None])

    tl.store(grad_beta + row * HV, of_beta, mask=valid)
    # of the matrix of which M = (I + A)^-1 is: -M^T dM M^T
    X = tl.dot(tl.trans(tile_M), (grad_M * strength[None, :]).to(dtype), input_precision=PRECISION)
    A = -tl.dot(X.to(dtype), tl.trans(tile_M), input_precision=PRECISION)
    below = row[:, None] > row[None, :]
    tl.store(grad_A + in_matrix, tl.where(below, A, 0.0), mask=valid[:, None] | (not BY_TOKEN))


@dataclass(frozen=True)
class WyOperands:
    """What `wy` reads, under the kernels' names."""

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    solved: torch.Tensor
    h: torch.Tensor
    pseudo: torch.Tensor
    grad_o: torch.Tensor
    grad_pseudo: torch.Tensor
    grad_h: torch.Tensor
    cu_seqlens: torch.Tensor | None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None

    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """As the kernels take them."""
        return (
            *(self.q, self.k, self.g, self.v, self.beta, self.A_log, self.dt_bias, self.cu_seqlens),
            *(self.solved, self.h, self.pseudo, self.grad_o, self.grad_pseudo, self.grad_h),
        )

    def kept(self) -> tuple[torch.Tensor, ...]:
        """What stages before it left."""
        return self.solved, self.h, self.pseudo, self.grad_pseudo, self.grad_h


def wy_launch(
    problem: Problem | WySpec,
    at: int,
    x: WyOperands,
    found: tuple[torch.Tensor | None, ...],
    lower_bound: float,
    rows: int,
    **kinds: object,
) -> Launch:
    """`found`: `grad_q, grad_k, grad_G, grad_v, grad_beta, grad_A, grad_Aqk`; `rows`: chunks that `h` has of a batch row."""
    c = config.wy_config(problem, at)
    return Launch(
        wy_kernel,
        problem.B * problem.slots * problem.HV if problem.N > 0 else 0,
        (
            *x.arguments(),
            *found,
            *(problem.scale, lower_bound),
            *(problem.T, problem.N, problem.H, problem.HV, problem.slots, rows),
            *strides(x.q, x.k, x.g, x.v, x.grad_o, x.beta),
        ),
        dict(
            C=problem.chunk_size,
            K=problem.K,
            V=problem.V,
            BK=c.BK,
            BV=c.BV,
            **kinds,
            PRECISION=config.backward_precision(problem, at),
            STAGES=c.stages,
        ),
        c.num_warps,
    )


def wy_dqkg(problem: WySpec, t: WyTensors, recorder: Recorder | None = None) -> WyGradients:
    t = readable(t)
    found = WyGradients.allocate(problem, t)
    device = t.q.device
    launch_all([launch(problem, t, capability(device), found)], device, recorder, found.by_name())
    return found


def readable(t: WyTensors) -> WyTensors:
    """The kernel reads q, k, v, g and do at any strides but the last dimension's, beta at any, and the others dense."""
    q, k, v, g, do = (x if x.stride(-1) == 1 else x.contiguous() for x in (t.q, t.k, t.v, t.g, t.do))
    v_new, A, h, dh, dv, cu_seqlens = dense(t.v_new, t.A, t.h, t.dh, t.dv, t.cu_seqlens)
    return WyTensors(q, k, v, v_new, g, t.beta, A, h, dh, do, dv, cu_seqlens)


def launch(problem: WySpec, t: WyTensors, at: int, found: WyGradients) -> Launch:
    x = WyOperands(t.q, t.k, t.g, t.v, t.beta, t.A, t.h, t.v_new, t.do, t.dv, t.dh, t.cu_seqlens)
    results = (found.q, found.k, found.g, found.v, found.beta, found.A, None)
    gate = "cumulative_log2" if problem.log2 else "cumulative"
    kinds = dict(GATE=gate, BETA="value", L2NORM=False, BY_TOKEN=True, V_FIRST=problem.state_v_first)
    return wy_launch(problem, at, x, results, 0.0, problem.rows, **kinds)
