"""Stage `reverse` of the backward pass (FLA: `chunk_gated_delta_rule_bwd_dhu`): scans a sequence's chunks from the last to the
first. One CTA per (sequence, value head, slice of `BV` value channels).

Contract (docs/backward.md), from `prepare`'s tiles, `do`, and the gradient `dS'` of the state after the chunk:

    dv_new = Aqk^T do + kg dS'                            [C, V]
    dS     = diag(decay) dS' + qg^T do - w^T dv_new       [K, V]

The same work as the forward's `recurrence`, and as there everything is kept transposed: `dS^T [BV, K]`, `dv_new^T [BV, C]`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..problem.problem import Problem, Tensors
from ..program.launch import Launch, strides
from .backward_pass import Kept, Scanned
from .device.sequences import own_work_tile
from .device.states import load_state, state_offsets, store_state
from .launch import or_empty
from .recurrence import recurrence_config, scan_constants


@triton.jit(do_not_specialize=["T", "N", "HV", "chunk_slots", "has_initial", "has_final"])
def reverse_kernel(
    w,
    qg,
    kg,
    Aqk,
    decay,
    grad_o,
    grad_final,
    grad_v_new,
    grad_h,
    grad_initial,
    cu_seqlens,
    has_initial,
    has_final,
    T,
    N,
    HV,
    chunk_slots,
    o_batch: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`dS = diag(decay) dS' + qg^T do - w^T dv_new`.

    Leaves `grad_h [S, HV, V, K]`, the gradient of the state after the chunk in each slot, `grad_v_new [B, T, HV, V]`, and
    `grad_initial`, that of the initial state.
    """
    slice_, head, n, batch, begin, end = own_work_tile(cu_seqlens, T, HV, V // BV)
    chunks = ((end - begin + C - 1) // C).to(tl.int32)
    chunk_slot = n * chunk_slots
    if cu_seqlens is not None:
        chunk_slot = begin // C + n
    dtype = w.dtype.element_ty
    row = tl.arange(0, C)
    key = tl.arange(0, K)
    value = slice_ * BV + tl.arange(0, BV)
    in_slot = state_offsets(head * K * V, value, key, K, V, V_FIRST)
    grad = load_state(grad_final, n * HV * K * V + in_slot, has_final)
    tile = row[:, None] * K + key[None, :]
    square = row[:, None] * C + row[None, :]
    grad_o += batch * o_batch + head * o_head
    for step in tl.range(0, chunks, num_stages=STAGES):
        i = chunks - 1 - step
        chunk = (chunk_slot + i) * HV + head
        token = begin + i * C + row
        valid = (token < end)[:, None]
        tl.store(grad_h + chunk * K * V + value[:, None] * K + key[None, :], grad.to(dtype))
        tile_grad_o = tl.load(grad_o + token[:, None] * o_token + value[None, :], mask=valid, other=0.0)
        tile_Aqk = tl.load(Aqk + chunk * C * C + square)
        tile_kg = tl.load(kg + chunk * C * K + tile)
        tile_qg = tl.load(qg + chunk * C * K + tile)
        tile_w = tl.load(w + chunk * C * K + tile)
        exp_g_last = tl.load(decay + chunk * K + key)
        left = tl.trans(tile_grad_o)
        dv_new = tl.dot(left, tile_Aqk, input_precision=PRECISION)
        dv_new = tl.dot(grad.to(dtype), tl.trans(tile_kg), acc=dv_new, input_precision=PRECISION)
        here = ((batch * T + token) * HV + head)[:, None] * V + value[None, :]
        tl.store(grad_v_new + here, tl.trans(dv_new).to(dtype), mask=valid)
        grad = tl.dot(left, tile_qg, acc=grad * exp_g_last[None, :], input_precision=PRECISION)
        grad -= tl.dot(dv_new.to(dtype), tile_w, input_precision=PRECISION)
    store_state(grad_initial, n * HV * K * V + in_slot, grad, has_initial)


def reverse(
    problem: Problem, t: Tensors, kept: Kept, scanned: Scanned, dht: Tensor | None, dh0: Tensor | None, arch: int
) -> Launch:
    c = recurrence_config(problem, arch)
    final, initial = or_empty(problem, t, dht, dh0)
    return Launch(
        reverse_kernel,
        problem.N * problem.HV * (problem.V // c.BV),
        (
            *(*kept.workspace.select("w", "qg", "kg", "Aqk", "decay"), t.do),
            *(final, scanned.dv, scanned.dh, initial),
            *(t.cu_seqlens, int(dh0 is not None), int(dht is not None)),
            *(problem.T, problem.N, problem.HV, problem.slots),
            *strides(t.do),
        ),
        scan_constants(problem, c, c.BV),
        c.num_warps,
        scratch=(kept.workspace.buffer, scanned.dv, scanned.dh, final, initial),
    )
