"""Stage `prepare` for one decay per row and value head. One CTA of 4 warps per (chunk, value head).

Contract: as `prepare.py`, with g `[B, T, HV]`, any decays. With G the sums of log decays from the chunk's start, the gate and
the L2 norm are factors of rows, and keys and queries enter products as they come:

    A   = strict_lower(beta_i nk_i nk_j <k_i, k_j> exp(G_i - G_j))      nk = 1 / |k|
    Aqk = lower(nq_i nk_j <q_i, k_j> exp(G_i - G_j))                    nq = scale / |q|

No exponent is above 0, so no pair needs a reference between its rows.
"""

from __future__ import annotations

from dataclasses import astuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from ...program.launch import Launch
from ..shared.scalars import SCALARS_AND_STRIDES
from ..stages.launch import StageCall, bind, chunks
from .device.compat import aggregate, barrier, reinterpret
from .device.layouts import ACC, LEFT, store_tile
from .device.math import (
    LOWEST,
    beta_value,
    exp2,
    gate,
    gate_bias,
    gate_unit,
    log2,
    round_pairs,
    wide,
    widen,
)
from .device.portable import L2_EPS, decay_rate
from .device.stream_k import add
from .device.tile_scheduler import chunk_in_slot, last_chunks_first
from .launch import FLAGS, overlaps_prepare, stride_div8
from .prepare import FLAT, GRAM, TILE, copy_tokens, inverse, weighted
from .segments import SPLIT_COSTS, plan_segments, room

LINE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
"""A value of each of 64 rows; every warp has all."""


@aggregate
class Scratch:
    """Shared memory of `inverse`."""

    right0: gl.shared_memory_descriptor
    right1: gl.shared_memory_descriptor
    small: gl.shared_memory_descriptor

    @gluon.jit
    def rights(self, block: gl.constexpr):
        return reinterpret(self.right0 if block == 0 else self.right1, gl.bfloat16, [2, 64, 64], TILE)


@gluon.jit
def row_factors(parts, L2NORM):
    """`1 / sqrt(sum x^2 + eps)` of the rows, or 1; `parts [64, 64]`, left operands. The sums are the diagonal of the Gram
    matrix, by blocks of 16 rows."""
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAM, k_width=2)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=GRAM, k_width=2)
    row_l: gl.constexpr = gl.SliceLayout(2, GRAM)
    factor = gl.full((4, 16), 1.0, gl.float32, layout=row_l)
    if L2NORM:
        gram = gl.zeros((4, 16, 16), gl.float32, layout=GRAM)
        for h in gl.static_range(len(parts)):
            x = parts[h].reshape([4, 16, 64])
            right = gl.convert_layout(x.permute((0, 2, 1)), right_l)
            gram = mma_v2(gl.convert_layout(x, left_l, assert_trivial=True), right, gram)
        i = gl.arange(0, 16, layout=gl.SliceLayout(0, row_l))
        j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, GRAM)))
        factor = gl.rsqrt(gl.sum(gl.where(i[None, :, None] == j[None, None, :], gram, 0.0), axis=2) + L2_EPS)
    return gl.convert_layout(factor.reshape([64]), gl.SliceLayout(1, ACC), assert_trivial=True)


@gluon.jit
def scaled(x, high, low):
    """`x (high + low)` in bf16, rounded once: two at a time, a quarter of the instructions that float32 takes."""
    asm: gl.constexpr = "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t; }"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [x, high, low], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def store_scaled(tiles, parts, factor):
    """The rows times their factors, by halves of the channels."""
    high = factor.to(gl.bfloat16)
    low = (factor - high.to(gl.float32)).to(gl.bfloat16)
    for h in gl.static_range(len(parts)):
        x = gl.convert_layout(parts[h], ACC, assert_trivial=True)
        store_tile(tiles + h * 4096, scaled(x, high[:, None], low[:, None]), 0)


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def prepare_scalar_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, checkpoint_offsets,
    tiles, decay, semaphores, first_segment, scale: gl.float32, lower_bound: gl.float32, T: gl.int32,
    N: gl.int32, HV: gl.int32, group: gl.int32, slots: gl.int32, checkpoints: gl.int32,
    q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32, k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32,
    g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    beta_batch: gl.int32, beta_token: gl.int32, beta_head: gl.int32,
    room: gl.int32, split: gl.int32, batch_invariant: gl.int32,
    K: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr, L2NORM: gl.constexpr,
    FLAGS: gl.constexpr, COSTS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """One chunk and value head; * goes to memory:

    k, q [64, K]      by cp.async; meanwhile G [64]                   * decay = exp(G_C), for every channel
    k k^T, q k^T      wgmma; meanwhile the rows' norms                * qg = nq exp(G) q, kg = nk exp(G_C - G) k
    -A, Aqk [64, 64]  their pairs times exp(G_i - G_j)                * Aqk
    inverse           of `prepare.py`, times diag(beta)               * inverse
    -w [64, K]        wgmma: inverse (nk exp(G)), in two parts, by k  * -w
    """
    KH: gl.constexpr = K // 64
    row_l: gl.constexpr = gl.SliceLayout(1, ACC)
    column_l: gl.constexpr = gl.SliceLayout(0, ACC)
    head, slot, tile = last_chunks_first(HV, False)
    if OVERLAPS:
        gdc_launch_dependents()
    if first_segment is not None:
        # as in `prepare_kernel`
        plans = gl.program_id(0) == 0
        if plans:
            plan_segments(
                *(cu_seqlens, checkpoint_offsets, first_segment, T, N, checkpoints),
                *(room, split, batch_invariant, COSTS),
            )
            return
    if tile == 0:
        # `recurrence` counts up from zero
        flag = gl.arange(0, FLAGS, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(semaphores + flag, flag * 0)
    batch, start, count = chunk_in_slot(cu_seqlens, checkpoint_offsets, checkpoints, slot, slots, N, T)
    if count <= 0:
        return
    batch = batch.to(gl.int32)
    start = start.to(gl.int32)
    count = gl.minimum(count, 64).to(gl.int32)
    qk_head = head
    if group > 1:
        qk_head = head // group
    # these strides come in units of 8 elements, which tells the compiler that 16-byte copies are aligned
    q += (wide(batch, q_batch) + wide(start, q_token) + wide(qk_head, q_head)) * 8
    k += (wide(batch, k_batch) + wide(start, k_token) + wide(qk_head, k_head)) * 8
    g += wide(batch, g_batch) + wide(start, g_token) + wide(head, g_head)
    beta += wide(batch, beta_batch) + wide(start, beta_token) + wide(head, beta_head)
    chunk = tile.to(gl.int64)
    tiles += chunk * ((3 * KH + 2) * 4096)
    decay += chunk * K

    # between copies to one memory the compiler would put a barrier
    k_s = ()
    q_s = ()
    for _ in gl.static_range(KH):
        k_s = k_s + (gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE),)  # type: ignore[assignment]
        q_s = q_s + (gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE),)  # type: ignore[assignment]
    right0 = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    right1 = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    small = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    # log2 decays from the start, by row; factors of columns
    G_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    to_end_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    beta_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    w_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)

    line = gl.arange(0, 64, layout=LINE)
    row = gl.arange(0, 64, layout=row_l)
    for h in gl.static_range(KH):
        copy_tokens(k_s[h], k + h * 64, k_token, count, 64)
        copy_tokens(q_s[h], q + h * 64, q_token, count, 64)
    async_copy.commit_group()
    # ptxas would have the copies wait for these loads and what is made of them
    barrier()
    rate = decay_rate(A_log, head, volatile=True)
    bias = 0.0
    if dt_bias is not None:
        bias = gate_bias(gl.load(dt_bias + head, volatile=True).to(gl.float32), rate, GATE)
    x = gl.load(g + line * g_token, mask=line < count, other=0.0, volatile=True).to(gl.float32)
    betas = gl.load(beta + row * beta_token, mask=row < count, other=0.0, volatile=True).to(gl.float32)

    step = gate(x, bias, rate, GATE) * gate_unit(rate, lower_bound, GATE)
    step = gl.where(step < LOWEST, LOWEST, step)  # a NaN stays one
    # nothing decays past the end
    line_G = gl.associative_scan(gl.where(line < count, step, 0.0), 0, add)
    # the last: lanes exchange what they add, and would not find it in order
    whole = gl.sum(gl.where(line == 63, line_G, 0.0), axis=0)
    channel = gl.arange(0, K, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(decay + channel, exp2(whole + channel * 0.0))
    G_s.store(line_G)
    betas = gl.where(row < count, beta_value(betas, BETA), 0.0)
    beta_s.store(betas)

    async_copy.wait_group(0)
    fence_async_shared()
    zero = gl.zeros((64, 64), gl.float32, layout=ACC)
    kk = zero
    qk = zero
    # in registers, as they are needed there, too: shared memory is the bottleneck
    keys = ()
    queries = ()
    for h in gl.static_range(KH):
        keys = keys + (k_s[h].load(LEFT),)  # type: ignore[assignment]
        queries = queries + (q_s[h].load(LEFT),)  # type: ignore[assignment]
    for h in gl.static_range(KH):
        k_t = k_s[h].permute((1, 0))  # type: ignore[var-annotated]
        kk = warpgroup_mma(keys[h], k_t, kk, use_acc=h > 0, is_async=True)
        qk = warpgroup_mma(queries[h], k_t, qk, use_acc=h > 0, is_async=True)
    norm_k = row_factors(keys, L2NORM)
    norm_q = row_factors(queries, L2NORM) * scale
    G = G_s.load(row_l)
    from_start = exp2(G)
    to_end_s.store(log2(norm_k) - G)
    w_s.store(norm_k * from_start * -betas)
    store_scaled(tiles + KH * 4096, queries, norm_q * from_start)
    store_scaled(tiles + 2 * KH * 4096, keys, norm_k * exp2(whole - G))
    kk, qk = warpgroup_mma_wait(0, deps=[kk, qk])

    column = gl.arange(0, 64, layout=column_l)
    # pairs i < j may have overflowed; `inverse` does not look at i = j
    mask = exp2(G[:, None] + to_end_s.load(column_l)[None, :])
    mask = gl.where(row[:, None] >= column[None, :], mask, 0.0)
    store_tile(tiles + (3 * KH + 1) * 4096, qk * mask * norm_q[:, None], 0)
    X = inverse(kk * mask * (norm_k * -betas)[:, None], Scratch(right0, right1, small))
    store_tile(tiles + 3 * KH * 4096, X * beta_s.load(column_l)[None, :], 0)
    # in two parts: rows of weights alternate in sign where keys repeat
    weights = X * w_s.load(column_l)[None, :]
    high = round_pairs(weights)
    low = gl.convert_layout((weights - widen(high)).to(gl.bfloat16), LEFT, assert_trivial=True)
    high = gl.convert_layout(high, LEFT, assert_trivial=True)
    w = weighted(high, low, k_s[0], zero, False)  # type: ignore[misc]
    if KH == 2:
        w_right = weighted(high, low, k_s[1], zero, False)  # type: ignore[misc]
        w, w_right, high, low = warpgroup_mma_wait(0, deps=[w, w_right, high, low])
        store_tile(tiles + 4096, w_right, 0)
    else:
        w, high, low = warpgroup_mma_wait(0, deps=[w, high, low])
    store_tile(tiles, w, 0)


def stride(name: str, x: Tensor, axis: int) -> int:
    """As `stride_div8`, with those of g in elements."""
    return stride_div8("beta" if name == "g" else name, x, axis)


def prepare_scalar(call: StageCall) -> Launch:
    problem = call.problem
    plan = call.workspace["first_segment"] if call.forms_segments else None
    own = dict(
        **call.left("tiles", "decay", "semaphores"),
        **dict(first_segment=plan, room=room(problem, call.t.q.device)),
        **dict(FLAGS=FLAGS, COSTS=astuple(SPLIT_COSTS), OVERLAPS=plan is not None or overlaps_prepare(call)),
    )
    return Launch(
        prepare_scalar_kernel,
        chunks(problem) + (plan is not None),
        *bind(prepare_scalar_kernel, problem, call.t, own, stride),
        num_warps=4,
        max_registers=168,  # three CTAs on an SM
    )
