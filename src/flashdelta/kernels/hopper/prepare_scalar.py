"""Stage `prepare` for one decay per row and value head. One CTA of 4 warps per chunk and up to four value heads of a key head,
which share keys, queries and their products.

Contract: as `prepare.py`, with g `[B, T, HV]`, any decays. With G the sums of log decays from the chunk's start, the gate and
the L2 norm are factors of rows, and keys and queries enter products as they come:

    A   = strict_lower(beta_i nk_i nk_j <k_i, k_j> exp(G_i - G_j))      nk = 1 / |k|
    Aqk = lower(nq_i nk_j <q_i, k_j> exp(G_i - G_j))                    nq = scale / |q|

No exponent is above 0, so no pair needs a reference between its rows.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from ...problem.problem import ChunkProblem
from ...program.launch import Launch, sm_count
from ..shared.gates import decay_rate
from ..shared.gluon.compat import barrier, copy_async, reinterpret
from ..shared.gluon.math import (
    LOWEST,
    beta_value,
    column_halves,
    exp2,
    gate,
    gate_bias,
    gate_unit,
    hidden_zero,
    log2,
    round_pairs,
    split_high_low,
    wide,
    widen,
)
from ..shared.gluon.steps import (
    ACC_HALF,
    FLAT,
    PLAIN,
    ROWS,
    SQUARE,
    STEP,
    TILE,
    add,
    block_inverses,
    step_inverses,
)
from ..shared.norms import L2_EPS
from ..shared.scalars import SCALARS_AND_STRIDES
from ..stages.launch import StageCall, bind, chunks, stride_div8
from .device.layouts import ACC, LEFT, beside, store_tile
from .device.tile_scheduler import chunk_in_slot, last_chunks_first
from .device.wgmma import mma3
from .launch import FLAGS, overlaps_prepare
from .prepare import weighted
from .prepare_steps import own_step, upper_lower
from .segments import SPLIT_COSTS, plan_segments, room

HEADS = gl.constexpr(4)
"""The most value heads of a CTA."""

LINE = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
"""A value of each of 64 rows of all heads, one a warp."""

NEAR = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [1, 4], [0, 1]))
"""The same values as memory has them, the heads side by side."""

PAIRS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""An accumulator in float32, without bank conflicts."""

LEFT_HALF = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=ACC_HALF.value, k_width=2))
"""`LEFT` of a product `[64, 32]`."""

HALF_TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 32], gl.bfloat16))
"""Two tiles `[64, 32]`: the high and the low parts of a matrix."""


@gluon.jit
def copy_tokens(shared, x, x_token, count):
    """Starts the copy of 64 rows, all channels, to `shared [halves * 64, 64]`. Zeros from `count` on."""
    row = gl.arange(0, shared.shape[0], layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    # one address for both halves of a row
    at = x + (row % 64) * (x_token * 8) + row // 64 * 64
    copy_async(shared, at[:, None] + column[None, :], mask=(row % 64 < count)[:, None])


@gluon.jit
def load_half(rows, h: gl.constexpr):
    """64 channels of 64 rows, as an accumulator has them."""
    return gl.convert_layout(rows.slice(64 * h, 64).load(LEFT), ACC, assert_trivial=True)


@gluon.jit
def load_rows(rows):
    """All channels of 64 rows, by halves; with 64 channels twice the same."""
    first = load_half(rows, 0)
    second = first
    if rows.shape[0] == 128:
        second = load_half(rows, 1)
    return first, second


@gluon.jit
def row_factors(first, second, KH, L2NORM):
    """`1 / sqrt(sum x^2 + eps)` of 64 rows, or 1."""
    x = widen(first)
    total = gl.sum(x * x, axis=1)
    if KH == 2:
        x = widen(second)
        total += gl.sum(x * x, axis=1)
    return gl.rsqrt(total + L2_EPS) if L2NORM else total * 0.0 + 1.0


@gluon.jit
def scaled(x, high, low):
    """`x (high + low)` in bf16, rounded once: two at a time, a quarter of the instructions that float32 takes."""
    asm: gl.constexpr = "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t; }"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [x, high, low], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def store_scaled(tiles, first, second, factor, KH):
    """The rows times their factors."""
    high = factor.to(gl.bfloat16)
    low = (factor - high.to(gl.float32)).to(gl.bfloat16)
    store_tile(tiles, scaled(first, high[:, None], low[:, None]), 0)
    if KH == 2:
        store_tile(tiles + 4096, scaled(second, high[:, None], low[:, None]), 0)


@gluon.jit
def store_parts(parts_s, x):
    """`x [64, 32]` as two bf16 tiles, its high and its low part, to `parts_s [128, 32]`; gives these parts, too."""
    high, low = split_high_low(x)
    parts_s.reshape([2, 64, 32]).store(gl.join(high, low).permute((2, 0, 1)))
    return left_half(high), left_half(low)


@gluon.jit
def round_sums(x):
    """`x [64, 64]` in bf16. Rows get what rounding took from the rows 8 before them: the state sums over rows, and where keys
    repeat rounding is most of its error."""
    upper, lower = upper_lower(x.reshape([4, 16, 64]))
    high = round_pairs(upper)
    lower = round_pairs(lower + (upper - widen(high)))
    return gl.convert_layout(
        gl.join(high, lower).permute((0, 3, 1, 2)).reshape([64, 64]), x.type.layout, assert_trivial=True
    )


@gluon.jit
def pair_decays(G, to_end, row, column):
    """`exp2(G_i + to_end_j)` of pairs i >= j, 0 of others, which may have overflowed. `inverse` does not look at i = j."""
    return gl.where(row[:, None] >= column[None, :], exp2(G[:, None] + to_end[None, :]), 0.0)


@gluon.jit
def store_columns(lines_s, x):
    """Stores values by column, `x [HEADS, 64]`, in the order in which a thread has four adjacent ones of an accumulator's."""
    lines = reinterpret(lines_s, gl.float32, [HEADS, 64], PLAIN).reshape([HEADS, 4, 4, 2, 2])
    lines.permute((0, 1, 3, 2, 4)).store(x.reshape([HEADS, 4, 2, 4, 2]))


@gluon.jit
def load_columns(line_s, layout: gl.constexpr):
    """Loads what `store_columns` has stored of a head."""
    in_order: gl.constexpr = gl.zeros((64,), gl.float32, layout=layout).reshape([4, 2, 4, 2]).type.layout
    x = line_s.reshape([4, 4, 2, 2]).permute((0, 2, 1, 3)).load(in_order)
    return gl.convert_layout(x.reshape([64]), layout, assert_trivial=True)


@gluon.jit
def last(line_s):
    """The last value of a line."""
    return gl.sum(line_s.slice(63, 1).load(gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def left_half(x):
    return gl.convert_layout(x, LEFT_HALF, assert_trivial=True)


@gluon.jit
def inverse(minus_A, blocks_s, X_s, A_s):
    """`(I + A)^-1 = [[I_0, 0], [-I_1 A_10 I_0, I_1]]` with the inverses I_0, I_1 of both blocks of 32 rows, by columns
    `[64, 32]`. Products of a high and a low bf16 each, without low times low."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_HALF))[:, None]
    zero = gl.zeros((64, 32), gl.float32, layout=ACC_HALF)
    below, _ = column_halves(minus_A, ACC_HALF)
    store_parts(A_s, below)
    X_s.reshape([4, 16, 32]).store(block_inverses(own_step(minus_A, row), blocks_s))
    left, right = step_inverses(X_s)
    own = gl.convert_layout(gl.join(left, right).permute((0, 2, 1)).reshape([64, 32]), ACC_HALF, assert_trivial=True)
    first_s = reinterpret(X_s, gl.bfloat16, [128, 32], HALF_TILE)
    high, low = store_parts(first_s, own)
    fence_async_shared()
    n = mma3(high, low, A_s.slice(32, 32), A_s.slice(96, 32), zero, False)
    n, high, low = warpgroup_mma_wait(0, deps=[n, high, low])
    high, low = split_high_low(n)
    high = left_half(high)
    low = left_half(low)
    below = mma3(high, low, first_s.slice(0, 32), first_s.slice(64, 32), zero, False)
    below, high, low = warpgroup_mma_wait(0, deps=[below, high, low])
    return beside(gl.where(row < 32, own, below), gl.where(row < 32, 0.0, own), ACC)


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def prepare_scalar_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, checkpoint_offsets,
    tiles, decay, semaphores, first_segment, scale: gl.float32, lower_bound: gl.float32, T: gl.int32,
    N: gl.int32, HV: gl.int32, group: gl.int32, slots: gl.int32, checkpoints: gl.int32,
    q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32, k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32,
    g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    beta_batch: gl.int32, beta_token: gl.int32, beta_head: gl.int32,
    room: gl.int32, split: gl.int32, batch_invariant: gl.int32, heads: gl.int32,
    K: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr, L2NORM: gl.constexpr,
    FLAGS: gl.constexpr, COSTS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """One chunk and `heads` value heads of a key head; * goes to memory:

    k, q [64, K]      by cp.async; meanwhile G [64] of all heads      * decay = exp(G_C), for every channel
    q k^T             wgmma; meanwhile the rows' norms
    Aqk [64, 64]      of each head: pairs times exp(G_i - G_j)        * Aqk, qg = nq exp(G) q
    k k^T             wgmma, kept in place of the queries

    and of each head:
    -A [64, 64]       pairs times exp(G_i - G_j)                      * kg = nk exp(G_C - G) k
    inverse [64, 64]  of 32 rows as in `prepare_steps.py`; wgmma      * inverse
    -w [64, K]        wgmma: inverse (nk exp(G)), in two parts, by k  * -w
    """
    KH: gl.constexpr = K // 64
    OF_HEAD: gl.constexpr = (3 * KH + 2) * 4096
    row_l: gl.constexpr = gl.SliceLayout(1, ACC)
    column_l: gl.constexpr = gl.SliceLayout(0, ACC)
    head, slot, tile = last_chunks_first(HV // heads, False)
    head *= heads
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
    batch, start, count, _ = chunk_in_slot(cu_seqlens, checkpoint_offsets, checkpoints, slot, slots, N, T)
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
    chunk = tile.to(gl.int64) * heads
    tiles += chunk * OF_HEAD
    decay += chunk * K

    keys = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    # later the products of keys
    kk_s = gl.allocate_shared_memory(gl.float32, [64, 64], PAIRS)
    queries = reinterpret(kk_s, gl.bfloat16, [KH * 64, 64], TILE)
    blocks_s = gl.allocate_shared_memory(gl.float32, [64, 16], SQUARE)
    X_s = gl.allocate_shared_memory(gl.float32, [64, 32], STEP)
    A_s = gl.allocate_shared_memory(gl.bfloat16, [128, 32], HALF_TILE)
    # log2 decays from the start, by row, and what columns add to them; of each head
    G_s = gl.allocate_shared_memory(gl.float32, [HEADS, 64], FLAT)
    to_end_s = gl.allocate_shared_memory(gl.float32, [HEADS, 64], FLAT)
    beta_s = gl.allocate_shared_memory(gl.float32, [HEADS, 64], FLAT)
    w_s = gl.allocate_shared_memory(gl.float32, [HEADS, 64], FLAT)
    step_s = reinterpret(blocks_s, gl.float32, [HEADS, 64], PLAIN)
    norm_k_s = reinterpret(blocks_s, gl.float32, [64], FLAT)

    token = gl.arange(0, 64, layout=gl.SliceLayout(0, NEAR))[None, :]
    of = gl.arange(0, HEADS, layout=gl.SliceLayout(1, NEAR))[:, None]
    # heads past the last are the last
    own = gl.minimum(of, heads - 1)
    copy_tokens(keys, k, k_token, count)
    copy_tokens(queries, q, q_token, count)
    async_copy.commit_group()
    # ptxas would have the copies wait for these loads and what is made of them
    barrier()
    rate = decay_rate(A_log, head + own, volatile=True)
    bias = 0.0
    if dt_bias is not None:
        bias = gate_bias(gl.load(dt_bias + head + own, volatile=True).to(gl.float32), rate, GATE)
    inside = token < count
    x = gl.load(g + token * g_token + own * g_head, mask=inside, other=0.0, volatile=True).to(gl.float32)
    betas = gl.load(beta + token * beta_token + own * beta_head, mask=inside, other=0.0, volatile=True)
    step = gate(x, bias, rate, GATE) * gate_unit(1.0, lower_bound, GATE)
    if GATE == "softplus":
        step *= rate
    step = gl.where(step < LOWEST, LOWEST, step)  # a NaN stays one
    # nothing decays past the end
    step_s.store(gl.where(inside, step, 0.0))
    store_columns(beta_s, gl.where(inside, beta_value(betas.to(gl.float32), BETA), 0.0))
    line_G = gl.associative_scan(step_s.load(LINE), 1, add)
    reinterpret(G_s, gl.float32, [HEADS, 64], PLAIN).store(line_G)
    # the last: lanes exchange what they add, and would not find it in order
    line = gl.arange(0, 64, layout=gl.SliceLayout(0, LINE))[None, :]
    whole = gl.sum(gl.where(line == 63, line_G, 0.0), axis=1)[:, None]
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, LINE))[None, :]
    of = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LINE))[:, None]
    gl.store(decay + of * K + channel, exp2(whole + channel * 0.0), mask=of < heads)

    async_copy.wait_group(0)
    fence_async_shared()
    zero = gl.zeros((64, 64), gl.float32, layout=ACC)
    qk = zero
    for h in gl.static_range(KH):
        right = keys.slice(64 * h, 64).permute((1, 0))
        qk = warpgroup_mma(queries.slice(64 * h, 64), right, qk, use_acc=h > 0, is_async=True)
    first, second = load_rows(keys)
    norm_k = row_factors(first, second, KH, L2NORM)
    norm_k_s.store(norm_k)
    line_norm_k = norm_k_s.load(gl.SliceLayout(0, LINE))[None, :]
    store_columns(to_end_s, log2(line_norm_k) - line_G)
    store_columns(w_s, line_norm_k * -exp2(line_G))
    barrier()  # here, and not in loops
    for i in tl.range(0, heads, disable_licm=True):
        # anew: kept, it would be spilled
        at = tiles + (i * OF_HEAD + hidden_zero(T))
        G_i = G_s.index(i)
        store_scaled(at + 2 * KH * 4096, first, second, norm_k * exp2(last(G_i) - G_i.load(row_l)), KH)

    first, second = load_rows(queries)
    norm_q = row_factors(first, second, KH, L2NORM) * scale
    qk = warpgroup_mma_wait(0, deps=[qk])
    qk *= norm_q[:, None]
    row = gl.arange(0, 64, layout=row_l)
    column = gl.arange(0, 64, layout=column_l)
    for i in tl.range(0, heads, disable_licm=True):
        at = tiles + (i * OF_HEAD + hidden_zero(T))
        G = G_s.index(i).load(row_l)
        store_scaled(at + KH * 4096, first, second, norm_q * exp2(G), KH)
        mask = pair_decays(G, load_columns(to_end_s.index(i), column_l), row, column)
        store_tile(at + (3 * KH + 1) * 4096, qk * mask, 0)

    kk = zero
    for h in gl.static_range(KH):
        right = keys.slice(64 * h, 64).permute((1, 0))
        kk = warpgroup_mma(keys.slice(64 * h, 64), right, kk, use_acc=h > 0, is_async=True)
    kk = warpgroup_mma_wait(0, deps=[kk])
    kk_s.store(kk * -norm_k[:, None])
    for i in tl.range(0, heads, disable_licm=True):
        at = tiles + (i * OF_HEAD + hidden_zero(T))
        G = G_s.index(i).load(row_l)
        mask = pair_decays(G, load_columns(to_end_s.index(i), column_l), row, column)
        minus_A = kk_s.load(ACC) * mask * load_columns(beta_s.index(i), row_l)[:, None]
        X = inverse(minus_A, blocks_s, X_s, A_s)
        X *= load_columns(beta_s.index(i), column_l)[None, :]
        store_tile(at + 3 * KH * 4096, round_sums(X), 0)
        # in two parts: rows of weights alternate in sign where keys repeat
        weights = X * load_columns(w_s.index(i), column_l)[None, :]
        high = round_pairs(weights)
        low = gl.convert_layout((weights - widen(high)).to(gl.bfloat16), LEFT, assert_trivial=True)
        high = gl.convert_layout(high, LEFT, assert_trivial=True)
        for h in gl.static_range(KH):
            # one half after the other: with the accumulators of both ptxas has no registers left for the MMAs
            w = weighted(high, low, keys.slice(64 * h, 64), zero, False)
            w, high, low = warpgroup_mma_wait(0, deps=[w, high, low])
            store_tile(at + h * 4096, w, 0)


def stride(name: str, x: Tensor, axis: int) -> int:
    """As `stride_div8`, with those of g in elements."""
    return stride_div8("beta" if name == "g" else name, x, axis)


def heads_at_once(problem: ChunkProblem, device: torch.device) -> int:
    """Value heads of a key head that a CTA does: up to four, or one where SMs would be idle."""
    return math.gcd(problem.group, HEADS.value) if chunks(problem) >= 4 * sm_count(device) else 1


def prepare_scalar(call: StageCall) -> Launch:
    problem = call.problem
    heads = heads_at_once(problem, call.t.device)
    plan = call.workspace["first_segment"] if call.forms_segments else None
    own = dict(
        **call.left("tiles", "decay", "semaphores"),
        **dict(first_segment=plan, room=room(problem, call.t.device), heads=heads),
        **dict(
            FLAGS=FLAGS, COSTS=tuple(vars(SPLIT_COSTS).values()), OVERLAPS=plan is not None or overlaps_prepare(call)
        ),
    )
    return Launch(
        prepare_scalar_kernel,
        chunks(problem) // heads + (plan is not None),
        *bind(prepare_scalar_kernel, problem, call.t, own, stride),
        num_warps=4,
        max_registers=128,  # four CTAs on an SM
    )
