"""Stage `prepare` in Gluon, of chunks of 64 tokens with K = 64 or 128 in bfloat16 and bounded decays: the contract is that of
`prepare.py`. One CTA of 4 warps per (chunk, value head), with nothing but what sm_80 has: `cp.async` and `mma.sync`.

A chunk is two steps of 32 rows, with references E_0 and E_1 after their 16th rows: `a = exp(G - E)` and `b = exp(E - G)` of a
row's own step are at most exp(80). Pairs in the first step are `<k a, k b>`. Rows of the second meet all rows at E_1: `k b` of
the first step times `exp(E_1 - E_0)`, which is `kg` but for a factor of the channel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ...problem.problem import ChunkProblem, ChunkTensors
from ...program.launch import Launch
from ..shared.gates import decay_rate
from ..shared.gluon import steps
from ..shared.gluon.compat import reinterpret
from ..shared.gluon.math import (
    beta_value,
    dot3,
    exp2,
    exp2_negative,
    gate_bias,
    gate_unit,
    round_pairs,
    split_high_low,
    widen,
)
from ..shared.gluon.steps import ACC_HALF, FLAT, PLAIN, ROWS, SQUARE, STEP, STEPS_GRAM, TILE
from ..shared.mma import two_parts
from ..shared.scalars import SCALARS_AND_STRIDES
from ..shared.sequences import own_chunk
from ..stages.launch import StageCall, aligned, chunks, launch_div8

QUARTERS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8]))
"""Accumulators of the rows of a step, 16 of half the columns a warp."""
LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=QUARTERS.value, k_width=2))
RIGHT = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=QUARTERS.value, k_width=2))


@gluon.jit
def store_part(out, x, i: gl.constexpr):
    """Stores what a part's rows `x` have of a chunk's `out [64, K]`."""
    layout: gl.constexpr = x.type.layout
    KH: gl.constexpr = x.shape[0]
    of_rows: gl.constexpr = gl.SliceLayout(4, layout)
    of_half: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, of_rows))
    half = gl.arange(0, KH, layout=gl.SliceLayout(1, of_half))[:, None, None, None, None]
    step = gl.arange(0, 2, layout=gl.SliceLayout(0, of_half))[None, :, None, None, None]
    sixteen = gl.arange(0, 2 // KH, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, of_rows))))
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, of_rows))))
    column_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    column = gl.arange(0, 64, layout=column_l)
    rows = step * 32 + (sixteen[None, None, :, None, None] + i) * 16 + row[None, None, None, :, None]
    gl.store(out + (rows * (64 * KH) + half * 64 + column[None, None, None, None, :]), x)


@gluon.jit
def store_square(out, x, first_row: gl.constexpr, OWN: gl.constexpr):
    """Stores `x` in the `out [64, 64]` of a chunk: `OWN`, rows `[64, 32]` with the columns of each row's own step; else a block
    `[32, 32]` from column 0 on, or from column 32 if it has the first rows."""
    layout: gl.constexpr = x.type.layout
    row = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, layout))[None, :]
    if OWN:
        column += row // 32 * 32
    elif first_row == 0:
        column += 32
    gl.store(out + ((row + first_row) * 64 + column), x.to(out.dtype.element_ty))


@gluon.jit
def store_triangle(out, own, below):
    """`own` blocks `[64, 32]` on the diagonal of `out [64, 64]`, `below [32, 32]` under it."""
    store_square(out, own, 0, True)
    store_square(out, below, 32, False)
    store_square(out, gl.zeros_like(below), 0, False)


@gluon.jit
def store_parts(x, high_s, low_s):
    high, low = split_high_low(x)
    high_s.store(high)
    low_s.store(low)


@gluon.jit
def product(left_s, right_s):
    """The product of two matrices `[32, 32]` in float32: where keys repeat, terms alternate in sign and cancel."""
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=QUARTERS, k_width=1)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=QUARTERS, k_width=1)
    zero = gl.zeros((32, 32), gl.float32, layout=QUARTERS)
    return dot3(two_parts(left_s.load(left_l)), two_parts(right_s.load(right_l)), zero)


@gluon.jit
def weighted(high_s, low_s, k_s, acc):
    """`acc` plus keys `[32, 64]`, weighted by weights in two parts."""
    k = k_s.load(RIGHT)
    return mma_v2(low_s.load(LEFT), k, mma_v2(high_s.load(LEFT), k, acc))


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def prepare_mma_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, checkpoint_offsets,
    w, qg, kg, inverse, Aqk, decay, Akk_inv, scale: gl.float32, lower_bound: gl.float32, T, N, H, HV,
    chunk_slots, checkpoints, q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32,
    k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32, g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    beta_batch: gl.int64, beta_token: gl.int64, beta_head: gl.int64,
    K: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr, L2NORM: gl.constexpr,
):  # fmt: skip
    """`w = (I + Akk)^-1 diag(beta) (k exp(G))`, and all else of the contract in `prepare.py` but `u`; * goes to memory:

    g, k, q                              by cp.async
          |
          v                  a = exp(G - E), b = exp(E - G)
    k a, q a, k b, k exp(E_1 - G) [64, K]                       * qg, kg, decay
          |
          v                  mma; of both steps' rows with their own, and of the second step's with the first
    Akk, Aqk                                                    * Aqk
          |
          v                  a warp solves 16 rows in float32; the rest by mma
    inverse                                                     * inverse
          |
          v                  mma of k a; factors exp(E) come last
    w [64, K]                                                   * w
    """
    KH: gl.constexpr = K // 64
    LAYOUT: gl.constexpr = steps.part_layout(KH)
    head, slot, batch, start, count = own_chunk(
        gl.program_id(0), cu_seqlens, checkpoint_offsets, checkpoints, chunk_slots, N, T, HV, 64
    )
    if count <= 0:
        return
    count = gl.minimum(count, 64).to(gl.int32)
    qk_head = head // (HV // H)
    # these strides come in units of 8 elements, which tells the compiler that 16-byte copies are aligned
    q += (batch * q_batch + start * q_token + qk_head * q_head) * 8
    k += (batch * k_batch + start * k_token + qk_head * k_head) * 8
    g += (batch * g_batch + start * g_token + head * g_head) * 8
    beta += batch * beta_batch + start * beta_token + head * beta_head
    chunk = slot * HV + head

    keys = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    queries = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    g_s = gl.allocate_shared_memory(g.dtype.element_ty, [KH * 64, 64], PLAIN)
    norm_k_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    norm_q_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    unit_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    beta_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    totals_s = gl.allocate_shared_memory(gl.float32, [4 * K], FLAT)
    # exp(E) of both steps
    until_s = gl.allocate_shared_memory(gl.float32, [2 * K], FLAT)
    # volatile: else the compiler moves these loads behind the copies, where they queue
    rate = decay_rate(A_log, head, volatile=True)
    if dt_bias is not None:
        bias = steps.load_bias(dt_bias, head, K)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_HALF))
    betas = gl.load(beta + row * beta_token, mask=row < count, other=0.0, volatile=True).to(gl.float32)
    steps.copy_tokens(g_s, g, g_token, count, 64)
    steps.copy_tokens(keys, k, k_token, count, 64)
    steps.copy_tokens(queries, q, q_token, count, 64)
    async_copy.commit_group()

    betas = gl.where(row < count, beta_value(betas, BETA), 0.0)
    beta_s.store(betas)
    # nothing decays past the end
    unit_s.store(gl.where(row < count, gate_unit(rate, lower_bound, GATE), 0.0))
    biases = 0.0
    if dt_bias is not None:
        bias_s = gl.allocate_shared_memory(gl.float32, [K], FLAT)
        bias_s.store(gate_bias(bias, rate, GATE))
        columns_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
        biases = bias_s.reshape([KH, 64]).load(columns_l)[:, None, None, None, :]
    async_copy.wait_group(0)
    keys3 = reinterpret(keys, gl.bfloat16, [KH, 64, 64], TILE)
    queries3 = reinterpret(queries, gl.bfloat16, [KH, 64, 64], TILE)
    norm_k_s.reshape([4, 16]).store(steps.pair_norm_factors(keys3, 1.0, True, L2NORM))
    norm_q_s.reshape([4, 16]).store(steps.pair_norm_factors(queries3, 1.0, True, L2NORM) * scale)

    # sums of log decays in each half of a step, and their totals
    totals = totals_s.reshape([KH, 2, 2, 64])
    before, total = steps.decay_sums(g_s, biases, rate, unit_s, 0, GATE, True)
    totals.slice(0, 2 // KH, 2).store(total)
    if KH == 2:
        after, rest = steps.decay_sums(g_s, biases, rate, unit_s, 1, GATE, True)
        totals.slice(1, 1, 2).store(rest)
    total_l: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    total_0 = totals.slice(0, 1, 1).slice(0, 1, 2).load(total_l)
    total_1 = totals.slice(0, 1, 1).slice(1, 1, 2).load(total_l)
    total_2 = totals.slice(1, 1, 1).slice(0, 1, 2).load(total_l)
    total_3 = totals.slice(1, 1, 1).slice(1, 1, 2).load(total_l)
    of_step: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, total_l)))
    first = gl.arange(0, 2, layout=of_step)[None, :, None, None] == 0
    between = total_1 + total_2
    until = exp2(gl.where(first, total_0, total_0 + between))
    until_s.reshape([KH, 2, 1, 64]).store(until)
    # half of it, twice: the whole may be less than float32 holds
    onward = exp2(gl.where(first, between * 0.5, 0.0))[:, :, :, None, :]
    until = until[:, :, :, None, :]
    last = exp2(total_3)[:, :, :, None, :]
    half = gl.arange(0, KH, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, total_l))))
    column_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, total_l)))
    at = decay + chunk * K + (half[:, None, None, None] * 64 + gl.arange(0, 64, layout=column_l)[None, None, None, :])
    gl.store(at, exp2(total_0 + between + total_3))
    # right operands at the second reference, and at each step's own, where the gate's input was
    right = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    near = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    for i in gl.static_range(KH):
        if i == 1:
            d = after
        elif KH == 2:
            d = before - total[:, :, :, None, :]
        else:
            sixteen_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, total_l)))
            sixteen = gl.arange(0, 2, layout=sixteen_l)[None, None, :, None]
            d = before - gl.where(sixteen == 0, total, 0.0)[:, :, :, None, :]
        a = exp2(d)
        kn = widen(steps.part(keys, i).load(LAYOUT)) * steps.row_values(norm_k_s, i, KH)
        kb = kn * exp2_negative(d)
        steps.part(keys, i).store(round_pairs(kn * a))
        steps.part(near, i).store(round_pairs(kb))
        kb = kb * onward * onward
        steps.part(right, i).store(round_pairs(kb))
        store_part(kg + chunk * (64 * K), round_pairs(kb * last), i)
        qa = widen(steps.part(queries, i).load(LAYOUT)) * steps.row_values(norm_q_s, i, KH) * a
        steps.part(queries, i).store(round_pairs(qa))
        store_part(qg + chunk * (64 * K), round_pairs(qa * until), i)

    right3 = reinterpret(right, gl.bfloat16, [KH, 64, 64], TILE)
    near3 = reinterpret(near, gl.bfloat16, [KH, 64, 64], TILE)
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=STEPS_GRAM, k_width=2)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=STEPS_GRAM, k_width=2)
    own_k = gl.zeros((2, 32, 32), gl.float32, layout=STEPS_GRAM)
    own_q = gl.zeros((2, 32, 32), gl.float32, layout=STEPS_GRAM)
    far_k = gl.zeros((32, 32), gl.float32, layout=QUARTERS)
    far_q = gl.zeros((32, 32), gl.float32, layout=QUARTERS)
    for h in gl.static_range(KH):
        kb_t = near3.index(h).reshape([2, 32, 64]).permute((0, 2, 1)).load(right_l)
        own_k = mma_v2(keys3.index(h).reshape([2, 32, 64]).load(left_l), kb_t, own_k)
        own_q = mma_v2(queries3.index(h).reshape([2, 32, 64]).load(left_l), kb_t, own_q)
        kb_t = right3.index(h).slice(0, 32).permute((1, 0)).load(RIGHT)
        far_k = mma_v2(keys3.index(h).slice(32, 32).load(LEFT), kb_t, far_k)
        far_q = mma_v2(queries3.index(h).slice(32, 32).load(LEFT), kb_t, far_q)
    own_k = gl.convert_layout(own_k.reshape([64, 32]), ACC_HALF, assert_trivial=True)
    own_q = gl.convert_layout(own_q.reshape([64, 32]), ACC_HALF, assert_trivial=True)
    in_step = row[:, None] % 32
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, ACC_HALF))[None, :]
    # what is dropped may have overflowed
    store_triangle(Aqk + chunk * 4096, gl.where(in_step >= column, own_q, 0.0), far_q)
    minus_A = gl.where(in_step > column, own_k, 0.0) * -betas[:, None]
    far_k *= -beta_s.slice(32, 32).load(gl.SliceLayout(1, QUARTERS))[:, None]

    blocks_s = gl.allocate_shared_memory(gl.float32, [64, 16], SQUARE)
    X_s = gl.allocate_shared_memory(gl.float32, [64, 32], STEP)
    X_s.reshape([4, 16, 32]).store(steps.block_inverses(minus_A, blocks_s))
    left, upper = steps.step_inverses(X_s)
    X = gl.convert_layout(gl.join(left, upper).permute((0, 2, 1)).reshape([64, 32]), ACC_HALF, assert_trivial=True)
    inverses = gl.allocate_shared_memory(gl.float32, [64, 32], STEP)
    below = gl.allocate_shared_memory(gl.float32, [32, 32], STEP)
    below_first = gl.allocate_shared_memory(gl.float32, [32, 32], STEP)
    inverses.store(X)
    below.store(far_k)
    weights = X * gl.where(
        row[:, None] < 32,
        beta_s.slice(0, 32).load(gl.SliceLayout(0, ACC_HALF))[None, :],
        beta_s.slice(32, 32).load(gl.SliceLayout(0, ACC_HALF))[None, :],
    )
    # weights of keys, in two parts
    parts_l: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    own_high = gl.allocate_shared_memory(gl.bfloat16, [64, 32], parts_l)
    own_low = gl.allocate_shared_memory(gl.bfloat16, [64, 32], parts_l)
    far_high = gl.allocate_shared_memory(gl.bfloat16, [32, 32], parts_l)
    far_low = gl.allocate_shared_memory(gl.bfloat16, [32, 32], parts_l)
    store_parts(weights, own_high, own_low)
    below_first.store(product(below, inverses.slice(0, 32)))
    corner = product(inverses.slice(32, 32), below_first)
    if Akk_inv is not None:
        store_triangle(Akk_inv + chunk * 4096, X, corner)
    corner *= beta_s.slice(0, 32).load(gl.SliceLayout(0, QUARTERS))[None, :]
    store_triangle(inverse + chunk * 4096, weights, corner)
    store_parts(corner, far_high, far_low)

    w_s = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    zero = gl.zeros((32, 64), gl.float32, layout=QUARTERS)
    for h in gl.static_range(KH):
        k_0 = keys.slice(64 * h, 32)
        until_0 = until_s.slice(128 * h, 64).load(gl.SliceLayout(0, QUARTERS))[None, :]
        until_1 = until_s.slice(128 * h + 64, 64).load(gl.SliceLayout(0, QUARTERS))[None, :]
        upper = weighted(own_high.slice(0, 32), own_low.slice(0, 32), k_0, zero) * until_0
        w_s.slice(64 * h, 32).store(round_pairs(upper))
        lower = weighted(own_high.slice(32, 32), own_low.slice(32, 32), keys.slice(64 * h + 32, 32), zero) * until_1
        lower += weighted(far_high, far_low, k_0, zero) * until_0
        w_s.slice(64 * h + 32, 32).store(round_pairs(lower))
    w_row = gl.arange(0, KH * 64, layout=gl.SliceLayout(1, ROWS))[:, None]
    w_column = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))[None, :]
    w_at = w + chunk * (64 * K) + (w_row % 64 * K + w_row // 64 * 64 + w_column)
    gl.store(w_at, w_s.load(ROWS))


def by_mma(problem: ChunkProblem, t: ChunkTensors) -> bool:
    """Says whether `prepare_mma` runs, which spares `prepare`'s products by level."""
    fits = problem.safe_gate and problem.chunk_size == 64 and problem.K in (64, 128)
    return fits and problem.dtype == torch.bfloat16 and all([aligned(x) for x in (t.q, t.k, t.g)])


def prepare_mma(call: StageCall, Akk_inv: Tensor | None) -> Launch:
    own = dict(call.left("w", "qg", "kg", "Aqk", "decay"), inverse=call.workspace["Akk_inv"], Akk_inv=Akk_inv)
    return launch_div8(prepare_mma_kernel, chunks(call.problem), call.problem, call.t, own, max_registers=168)
