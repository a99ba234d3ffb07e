"""Stage `reverse` of the backward pass (FLA: `chunk_gated_delta_rule_bwd_dhu`): scans a sequence's chunks from the last to the
first. One CTA per (sequence, value head, slice of `BV` value channels).

Contract (docs/backward.md), from `prepare`'s tiles, `do`, and the gradient `dS'` of the state after the chunk:

    dv_new = Aqk^T do + kg dS'                            [C, V]
    dS     = diag(decay) dS' + qg^T do - w^T dv_new       [K, V]

The same work as the forward's `recurrence`, and as there everything is kept transposed: `dS^T [BV, K]`, `dv_new^T [BV, C]`.

In split sequences (docs/split.md) a CTA has a segment. The gradient before one is affine in that after it,

    dS = M^T dS' + c                                      with the segment's own M, [K, K]

so that this stage runs twice: without `dh` and `dv` for c, and, from what `compose` makes of these, for all else.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...program.launch import Launch
from ..shared.scalars import SCALARS
from ..shared.segments import place_segment, segment_of
from ..shared.sequences import crossing_packet, own_work_tile
from ..shared.states import load_state, state_offsets, store_state
from ..stages.launch import StageCall, launch, precision
from .recurrence import recurrence_config


@triton.jit(do_not_specialize=SCALARS)
def reverse_kernel(
    w, qg, kg, Aqk, decay, grad_o, grad_final, grad_v_new, grad_h,
    grad_initial, first_segment, offsets, ends, border, packet, cu_seqlens,
    has_initial, has_final, T, N, HV, chunk_slots, o_batch: tl.int64, o_token: tl.int64, o_head: tl.int64,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`dS = diag(decay) dS' + qg^T do - w^T dv_new`.

    Leaves `grad_h [S, HV, V, K]`, the gradient of the state after the chunk in each slot, `grad_v_new [B, T, HV, V]`, both or
    neither, and `grad_initial`, that of the initial state. On the second of two ranks `packet` receives the gradients, in
    the caller's layout, of the states of sequences that come from the first.

    With `first_segment [N + 1]` a CTA scans a segment instead of a sequence, from the gradient in `ends [G, HV, V, K]`; or, for
    `offsets [G, HV, V, K]`, from zeros, a sequence's last segment from the gradient of the final state. A first segment has no
    offset: nobody needs it.
    """
    if first_segment is None:
        slice_, head, n, batch, begin, end = own_work_tile(cu_seqlens, T, HV, V // BV)
        slot = n * chunk_slots
        if cu_seqlens is not None:
            slot = begin // C + n
    else:
        slice_ = tl.program_id(0) % (V // BV)
        head = (tl.program_id(0) // (V // BV) % HV).to(tl.int64)
        segment = tl.program_id(0) // (V // BV) // HV
        n, part, parts, exists = segment_of(segment, first_segment, N)
        if offsets is not None:
            exists &= part > 0
        if not exists:
            return
        batch, begin, end, slot, _, first, stop = place_segment(n, part, parts, cu_seqlens, None, 0, chunk_slots, T, C)
        last = part + 1 == parts
        end = tl.where(last, end, begin + stop * C)
        begin += first * C
        slot += first
    chunks = ((end - begin + C - 1) // C).to(tl.int32)
    dtype = w.dtype.element_ty
    row = tl.arange(0, C)
    key = tl.arange(0, K)
    value = slice_ * BV + tl.arange(0, BV)
    in_slot = state_offsets(head * K * V, value, key, K, V, V_FIRST)
    if first_segment is None:
        grad = load_state(grad_final, n * HV * K * V + in_slot, has_final)
    else:
        in_segment = state_offsets((segment.to(tl.int64) * HV + head) * K * V, value, key, K, V, True)
        if offsets is not None:
            grad = load_state(grad_final, n * HV * K * V + in_slot, has_final * last.to(tl.int32))
        elif parts > 1:
            grad = tl.load(ends + in_segment)
        else:
            grad = load_state(grad_final, n * HV * K * V + in_slot, has_final)
    tile = row[:, None] * K + key[None, :]
    square = row[:, None] * C + row[None, :]
    grad_o += batch * o_batch + head * o_head
    for step in tl.range(0, chunks, num_stages=STAGES):
        i = chunks - 1 - step
        chunk = (slot + i) * HV + head
        token = begin + i * C + row
        valid = (token < end)[:, None]
        if grad_h is not None:
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
        if grad_v_new is not None:
            here = ((batch * T + token) * HV + head)[:, None] * V + value[None, :]
            tl.store(grad_v_new + here, tl.trans(dv_new).to(dtype), mask=valid)
        grad = tl.dot(left, tile_qg, acc=grad * exp_g_last[None, :], input_precision=PRECISION)
        grad -= tl.dot(dv_new.to(dtype), tile_w, input_precision=PRECISION)
    if offsets is not None:
        tl.store(offsets + in_segment, grad)
    else:
        if first_segment is not None:
            has_initial *= (part == 0).to(tl.int32)
        store_state(grad_initial, n * HV * K * V + in_slot, grad, has_initial)
        if border is not None:
            place, crosses = crossing_packet(border, n, 1 if cu_seqlens is not None else N)
            if first_segment is not None:
                crosses &= part == 0
            store_state(packet, place * HV * K * V + in_slot, grad, crosses.to(tl.int32))


def reverse(call: StageCall, own: dict[str, Any]) -> Launch:
    problem, ends = call.problem, own["ends"]
    c = recurrence_config(problem, call.arch)
    own = dict(own, **call.left("w", "qg", "kg", "Aqk", "decay"), PRECISION=precision(problem))
    ctas = (problem.N if ends is None else ends.shape[0]) * problem.HV * (problem.V // c.BV)
    return launch(reverse_kernel, ctas, problem, call.t, own, c)
