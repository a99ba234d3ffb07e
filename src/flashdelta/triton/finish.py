"""Stage `finish` of the backward pass: sums over what shares an input, in a fixed order and without atomics.

Contract, for `GROUP` value heads to a query head and `S` chunk slots:

    dq, dk    [B, T, H, K]  = sum of the group's value heads of [B, T, HV, K]
    dA_log    [HV]          = sum over chunk slots and key channels of [S, HV, K]
    ddt_bias  [HV, K]       = sum over chunk slots of [S, HV, K]

and zeros in all gradients for tokens of no sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_of_slots(parts, head, slots, HV, K: tl.constexpr):
    """`[K]`, in the order of the slots."""
    ROWS: tl.constexpr = 4096 // K
    total = tl.zeros([K], tl.float32)
    row = tl.arange(0, ROWS)
    for slot in range(0, slots, ROWS):
        at = ((slot + row).to(tl.int64) * HV + head)[:, None] * K + tl.arange(0, K)[None, :]
        total += tl.sum(tl.load(parts + at, mask=(slot + row < slots)[:, None], other=0.0), axis=0)
    return total


@triton.jit(do_not_specialize=["tokens", "N", "HV", "slots"])
def finish_kernel(
    heads_q,
    heads_k,
    part_A_log,
    part_dt_bias,
    cu_seqlens,
    grad_q,
    grad_k,
    grad_g,
    grad_v,
    grad_beta,
    grad_A_log,
    grad_dt_bias,
    tokens,
    N,
    HV,
    slots,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """First, if there are parts of the gate's parameters, one program per value head, which sums them over the `slots`. Then,
    if value heads share queries and keys or sequences are packed, one per (`ROWS` tokens, query head): sums of the `GROUP`
    value heads, and zeros for tokens of no sequence."""
    PARTS: tl.constexpr = part_A_log is not None or part_dt_bias is not None
    program = tl.program_id(0)
    if PARTS:
        if program < HV:
            if part_A_log is not None:
                tl.store(grad_A_log + program, tl.sum(sum_of_slots(part_A_log, program, slots, HV, K)))
            if part_dt_bias is not None:
                total = sum_of_slots(part_dt_bias, program, slots, HV, K)
                tl.store(grad_dt_bias + program * K + tl.arange(0, K), total)
            return
        program -= HV
    H = HV // GROUP
    head = (program % H).to(tl.int64)
    token = (program // H).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = token < tokens
    inside = valid
    if cu_seqlens is not None:
        inside = valid & (token >= tl.load(cu_seqlens)) & (token < tl.load(cu_seqlens + N))
    outside = (valid & (inside == 0))[:, None]
    key = tl.arange(0, K)[None, :]
    in_keys = (token * H + head)[:, None] * K + key
    if GROUP > 1:
        total_q = tl.zeros([ROWS, K], tl.float32)
        total_k = tl.zeros([ROWS, K], tl.float32)
        for i in range(GROUP):
            in_heads = (token * HV + head * GROUP + i)[:, None] * K + key
            total_q += tl.load(heads_q + in_heads, mask=inside[:, None], other=0.0)
            total_k += tl.load(heads_k + in_heads, mask=inside[:, None], other=0.0)
        tl.store(grad_q + in_keys, total_q.to(grad_q.dtype.element_ty), mask=valid[:, None])
        tl.store(grad_k + in_keys, total_k.to(grad_k.dtype.element_ty), mask=valid[:, None])
    if cu_seqlens is not None:  # noqa: SIM102 (a constant, and what is known when it runs)
        if tl.max(outside.to(tl.int32)) > 0:
            if GROUP == 1:
                tl.store(grad_q + in_keys, tl.zeros([ROWS, K], grad_q.dtype.element_ty), mask=outside)
                tl.store(grad_k + in_keys, tl.zeros([ROWS, K], grad_k.dtype.element_ty), mask=outside)
            for i in range(GROUP):
                own = (token * HV + head * GROUP + i)[:, None]
                value = tl.arange(0, V)[None, :]
                tl.store(grad_g + own * K + key, tl.zeros([ROWS, K], grad_g.dtype.element_ty), mask=outside)
                tl.store(grad_v + own * V + value, tl.zeros([ROWS, V], grad_v.dtype.element_ty), mask=outside)
                tl.store(grad_beta + own, tl.zeros([ROWS, 1], grad_beta.dtype.element_ty), mask=outside)
