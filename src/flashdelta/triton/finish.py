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

SUM_ELEMENTS = tl.constexpr(4096)
"""Elements of the partial sums that a CTA loads at a time."""


@triton.jit
def sum_over_chunk_slots(partials, head, chunk_slots, HV, K: tl.constexpr):
    """A head's partial sums `[S, HV, K]` over the chunk slots: `[K]`, in their order."""
    ROWS: tl.constexpr = SUM_ELEMENTS // K
    total = tl.zeros([K], tl.float32)
    row = tl.arange(0, ROWS)
    for chunk_slot in range(0, chunk_slots, ROWS):
        at = ((chunk_slot + row).to(tl.int64) * HV + head)[:, None] * K + tl.arange(0, K)[None, :]
        total += tl.sum(tl.load(partials + at, mask=(chunk_slot + row < chunk_slots)[:, None], other=0.0), axis=0)
    return total


@triton.jit(do_not_specialize=["tokens", "N", "HV", "chunk_slots"])
def finish_kernel(
    heads_q,
    heads_k,
    partial_A_log,
    partial_dt_bias,
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
    chunk_slots,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`dq = sum of its GROUP value heads`, and so on.

    If there are partial sums of the gate's parameters, the first `HV` CTAs add those of one value head each. If value heads
    share queries and keys or sequences are packed, one CTA per (`ROWS` tokens, query head) follows.
    """
    PARTIALS: tl.constexpr = partial_A_log is not None or partial_dt_bias is not None
    cta = tl.program_id(0)
    if PARTIALS:
        if cta < HV:
            if partial_A_log is not None:
                tl.store(grad_A_log + cta, tl.sum(sum_over_chunk_slots(partial_A_log, cta, chunk_slots, HV, K)))
            if partial_dt_bias is not None:
                total = sum_over_chunk_slots(partial_dt_bias, cta, chunk_slots, HV, K)
                tl.store(grad_dt_bias + cta * K + tl.arange(0, K), total)
            return
        cta -= HV
    H = HV // GROUP
    head = (cta % H).to(tl.int64)
    token = (cta // H).to(tl.int64) * ROWS + tl.arange(0, ROWS)
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
