"""Stage `finish` of the backward pass: sums over what shares an input, in a fixed order and without atomics.

Contract, for `GROUP` value heads to a query head and `S` chunk slots:

    dq, dk    [B, T, H, K]  = sum of the group's value heads of [B, T, HV, K]
    dA_log    [HV]          = sum over chunk slots and key channels of [S, HV, K]
    ddt_bias  [HV, K]       = sum over chunk slots of [S, HV, K]

and zeros in all gradients for tokens of no sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem.problem import ChunkProblem, ChunkTensors
from ...program.launch import Launch
from ...program.plan import Outputs
from ...program.workspace import Slots
from ..shared.scalars import SCALARS
from .launch import Config, launch

SUM_ELEMENTS = tl.constexpr(16384)
"""Elements of the partial sums that a CTA loads at a time: few heads are few CTAs, which wait for memory."""


@triton.jit(do_not_specialize=SCALARS)
def gate_sums_kernel(partial_A_log, partial_dt_bias, grad_A_log, grad_dt_bias, HV, chunk_slots, K: tl.constexpr):
    """Sums of the partial sums of `A_log`, one CTA a value head, then of those of `dt_bias`, as far as there are any."""
    cta = tl.program_id(0)
    if partial_A_log is not None:
        if cta < HV:
            tl.store(grad_A_log + cta, tl.sum(sum_over_chunk_slots(partial_A_log, cta, chunk_slots, HV, K)))
            return
        cta -= HV
    if partial_dt_bias is not None:
        total = sum_over_chunk_slots(partial_dt_bias, cta, chunk_slots, HV, K)
        tl.store(grad_dt_bias + cta * K + tl.arange(0, K), total)


@triton.jit
def sum_over_chunk_slots(partials, head, chunk_slots, HV, K):
    """A head's partial sums `[S, HV, K]` over the chunk slots, in a fixed order: `[K]`."""
    ROWS: tl.constexpr = SUM_ELEMENTS // K
    total = tl.zeros([ROWS, K], tl.float32)
    row = tl.arange(0, ROWS)
    for chunk_slot in tl.range(0, chunk_slots, ROWS, loop_unroll_factor=2):
        at = ((chunk_slot + row).to(tl.int64) * HV + head)[:, None] * K + tl.arange(0, K)[None, :]
        total += tl.load(partials + at, mask=(chunk_slot + row < chunk_slots)[:, None], other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=SCALARS)
def finish_kernel(
    heads_q, heads_k, cu_seqlens, grad_q, grad_k, grad_g, grad_v, grad_beta, tokens, N, HV,
    K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`dq = sum of its GROUP value heads`, and so on, where value heads share queries and keys or sequences are packed. One CTA
    per (`ROWS` tokens, query head).
    """
    cta = tl.program_id(0)
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


def new_gradients(problem: ChunkProblem, memory: Slots) -> dict[str, Tensor | None]:
    """Room for the results of `intra`, under the kernels' names: gradients of the call's inputs by value head, dense, those of
    shared heads in float32; of the gate's parameters the parts of all chunk slots, `[S, HV, K]`, if the call has them."""
    tokens, parts = (problem.B, problem.T, problem.HV), (problem.B * problem.slots, problem.HV, problem.K)
    keys, grouped = (*tokens, problem.K), problem.dtype if problem.group == 1 else torch.float32
    return dict(
        out_q=memory.new(keys, grouped),
        out_k=memory.new(keys, grouped),
        out_g=memory.new(keys, problem.g_dtype),
        out_beta=memory.new(tokens, problem.beta_dtype),
        partial_A_log=memory.new(parts, torch.float32) if problem.has_A_log else None,
        partial_dt_bias=memory.new(parts, torch.float32) if problem.has_dt_bias else None,
    )


def finish(problem: ChunkProblem, t: ChunkTensors, heads: dict[str, Any], outputs: Outputs) -> list[Launch]:
    """The last stage: sums over what shares an input; zeros where packed sequences have no token. Nothing if none is needed.
    `heads`: results of `intra`."""
    outputs.update({name: heads[f"out_{name}"] for name in ("q", "k", "g", "beta")})
    parameters = [name for name in ("A_log", "dt_bias") if heads[f"partial_{name}"] is not None]
    for name in parameters:
        given = getattr(t, name)
        outputs[name] = t.memory.new(given.shape, given.dtype)
    if problem.group > 1:
        for name in ("q", "k"):
            outputs[name] = t.memory.new((problem.B, problem.T, problem.H, problem.K), problem.dtype)
    launches = []
    if parameters:
        chunk_slots = problem.B * problem.slots if problem.N > 0 else 0
        grads = dict(grad_A_log=outputs.get("A_log"), grad_dt_bias=outputs.get("dt_bias"))
        own = dict(heads, **grads, chunk_slots=chunk_slots)
        ctas = problem.HV * len(parameters)
        launches.append(launch(gate_sums_kernel, ctas, problem, t, own, Config(num_warps=16)))
    rows, tokens = 16 if problem.group > 1 else 64, problem.B * problem.T
    ctas = -(-tokens // rows) * problem.H
    if ctas > 0 and (problem.group > 1 or problem.packed):
        grads = {f"grad_{name}": outputs[name] for name in ("q", "k", "g", "v", "beta")}
        own = dict(**grads, heads_q=heads["out_q"], heads_k=heads["out_k"], tokens=tokens, ROWS=rows)
        launches.append(launch(finish_kernel, ctas, problem, t, own))
    return launches
