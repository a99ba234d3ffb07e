"""Stage `prepare` in steps of 32 tokens, bf16: everything about a chunk that does not depend on the state. It always
norms q and k: a call without `use_qk_l2norm_in_kernel` goes to `prepare.py`. One CTA of 4 warps per (chunk, value head).

Contract: a chunk of 64 tokens is two steps, each with a reference after its 16th row. With G the sum of log decays from the
step's start, G_m up to the reference and G_C of the whole step, `recurrence` does for each step

    S' = exp(G_m) S        v' = inverse v - w S'        o = qa S' + Aqk v'        S = exp(G_C - G_m) (S' + kb^T v')

from what lies for each (chunk, value head) as 7 tiles `[64, 64]`, rows and columns in their order:

    -w  = -inverse (k exp(G - G_m))      by halves of the key channels
    qa  =  q exp(G - G_m)                by halves of the key channels
    kb  =  k exp(G_m - G)                by halves of the key channels
    inverse = (I + A)^-1 diag(beta) in columns 0 .. 31, Aqk in columns 32 .. 63, of each row's own step

and `exp(G_m)`, `exp(G_C - G_m)` of both steps, `[2, 2, K]`.

A warp has a step and a half of the channels, a lane 2 channels with all 32 rows; with K = 64 half a step and all channels, a
lane 16 rows. Sums begin at the reference, so they never leave a thread.

Gates without a bound: where 16 rows of a channel decay by more than exp(-80), no reference serves the pairs in them.
`exact_pairs` does chunks with such channels, and all those of a value head whose parameters make them likely (`may_fit`). With
totals H_0 and H_1 of a step's halves and H' = max(H, -80) `recurrence` gets `exp(H_0')` and `exp(H_1')`, and

    rows 0 .. 15     w of k exp(G - H_0')      qa = q exp(G - H_0')      kb = k exp(H_0 - G)
    rows 16 .. 31    w of k exp(G - H_0)       qa = q exp(G - H_0)       kb = k exp(H_0 + H_1 - H_1' - G)

which is the same as above but for terms that come with exp(-80) where they should be less.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from ...program.launch import Launch
from ..shared.gates import LOG2E, decay_rate
from ..shared.gluon import steps
from ..shared.gluon.compat import barrier, reinterpret, store_tile
from ..shared.gluon.math import (
    LOWEST,
    LOWEST_HALF,
    beta_value,
    column_halves,
    exp2,
    exp2_negative,
    gate_bias,
    gate_unit,
    larger,
    log2,
    round_pairs,
    unbounded_gate,
    wide,
    widen,
)
from ..shared.gluon.steps import ACC_HALF, FLAT, GRAM, PLAIN, SQUARE, STEP, STEPS_GRAM, TILE
from ..shared.products import rounded_product
from ..shared.scalars import SCALARS_AND_STRIDES
from ..stages.launch import StageCall, launch_div8
from .device.layouts import ACC, beside, row_column
from .device.tile_scheduler import chunk_in_slot, last_chunks_first, may_end_part
from .launch import FLAGS, parts, tiles
from .prepare import FORGOTTEN, grid, weighted

BLOCK_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
"""`TILE` as blocks `[4, 16, 64]`, of which columns can be taken."""


@gluon.jit
def may_fit(bias_s, rate):
    """Says whether 16 rows with 0 as the gate's input decay by no more than exp(-80) in every channel; where not, hardly a
    chunk fits. `bias_s [K]`: in log2."""
    biases = bias_s.reshape([32, bias_s.shape[0] // 32]).load(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
    # where rate * log2(1 + exp2(bias)) is a sixteenth of the bound
    limit = log2(exp2((LOWEST_HALF / -16) / rate) - 1.0)
    return gl.max(gl.where(gl.max(biases, axis=1) > limit, 1, 0), axis=0) == 0


@gluon.jit
def decayed(keys, queries, right, norm_k_s, norm_q_s, d, i: gl.constexpr, QUERIES_FIRST=False):
    """Makes operands of a part's keys and queries, in their place, and right operands, from log2 decays `d` since the
    reference. `QUERIES_FIRST`: the order in which registers suffice for all rows of a packed chunk at once, where gates are
    bounded."""
    layout: gl.constexpr = d.type.layout
    KH: gl.constexpr = d.shape[0]
    a = exp2(d)
    if QUERIES_FIRST:
        decayed_queries(queries, norm_q_s, a, i)
    kn = widen(steps.part(keys, i).load(layout)) * steps.row_values(norm_k_s, i, KH)
    if not QUERIES_FIRST:
        steps.part(right, i).store((kn * exp2_negative(d)).to(gl.bfloat16))
    steps.part(keys, i).store((kn * a).to(gl.bfloat16))
    if QUERIES_FIRST:
        steps.part(right, i).store((kn * exp2_negative(d)).to(gl.bfloat16))
    else:
        decayed_queries(queries, norm_q_s, a, i)


@gluon.jit
def decayed_queries(queries, norm_q_s, a, i: gl.constexpr):
    qn = widen(steps.part(queries, i).load(a.type.layout)) * steps.row_values(norm_q_s, i, a.shape[0])
    steps.part(queries, i).store((qn * a).to(gl.bfloat16))


@gluon.jit
def own_step(x, row):
    """`[64, 32]`, of a product `[64, 64]` of the chunk's rows the columns of each row's own step. The others may have
    overflowed."""
    if x.shape[1] == 64:
        first, second = column_halves(x, ACC_HALF)
        x = gl.where(row < 32, first, second)
    return x


@gluon.jit
def like(x, other):
    """`x` in the other's layout; no data moves between threads."""
    return gl.convert_layout(x, other.type.layout, assert_trivial=True)


@gluon.jit
def round_half(x):
    """`x` in float16, two at a time."""
    asm: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def upper_lower(x):
    """Rows 0 .. 7 and 8 .. 15 of each block of `x [4, 16, N]`, which a thread has one each of."""
    return gl.split(x.reshape([4, 2, 8, x.shape[2]]).permute((0, 2, 3, 1)))


@gluon.jit
def left_operand(upper, lower):
    """`[4, 16, N]` in bf16 from `upper_lower`'s; no data moves between threads."""
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAM, k_width=2)
    x = gl.join(round_pairs(upper), round_pairs(lower)).permute((0, 3, 1, 2)).reshape([4, 16, upper.shape[2]])
    return gl.convert_layout(x, left_l, assert_trivial=True)


@gluon.jit
def right_operand(x):
    """`[4, N, 8]` in bf16 from 8 rows of each block; no data moves between threads."""
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=GRAM, k_width=2)
    return gl.convert_layout(round_pairs(x).permute((0, 2, 1)), right_l, assert_trivial=True)


@gluon.jit
def sums(weights, high, low, acc):
    """`acc` plus weighted sums of log decays in two parts."""
    return mma_v2(weights, low, mma_v2(weights, high, acc))


@gluon.jit
def sum_weights():
    """Left operands `[4, 16, 16]` whose products with log decays of each block's rows are sums over some of them: from row 4 of
    its 8 to the row; of all for rows 0 .. 7, from row 4 on for the others; from the step's reference to the row."""
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAM, k_width=2)
    block = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, left_l)))[:, None, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, left_l)))[None, :, None] + 0 * block
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, left_l)))[None, None, :]
    reference = row // 8 * 8 + 4
    near = gl.where((of > reference) & (of <= row), 1.0, gl.where((of > row) & (of <= reference), -1.0, 0.0))
    far = gl.where((row < 8) | ((of > 4) & (of <= row)), 1.0, 0.0)
    state = gl.where(block % 2 == 0, gl.where(of > row, -1.0, 0.0), gl.where(of <= row, 1.0, 0.0))
    return near.to(gl.float16), far.to(gl.float16), state.to(gl.float16)


@gluon.jit
def products_below(left_s, right_s, acc):
    """`[2, 32, 16]`: `acc` plus the products of a step's rows with its first 16."""
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=STEPS_GRAM, k_width=2)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=STEPS_GRAM, k_width=2)
    left = left_s.reshape([2, 32, 64]).load(left_l)
    right = right_s.reshape([2, 32, 64]).permute((0, 2, 1)).slice(0, 16, 2).load(right_l)
    return mma_v2(left, right, acc)


@gluon.jit
def of_steps(first, last, below):
    """`[64, 32]` of products: of the rows of each block of 16 with their first and last 8, and of a step's rows with its first
    16."""
    half, _ = gl.split(gl.zeros((64, 32), gl.float32, layout=ACC_HALF).reshape([64, 2, 16]).permute((0, 2, 1)))
    half_l: gl.constexpr = half.type.layout
    right = gl.join(first, last).permute((0, 1, 3, 2)).reshape([64, 16])
    right = gl.convert_layout(right, half_l, assert_trivial=True)
    below = gl.convert_layout(below.reshape([64, 16]), half_l, assert_trivial=True)
    block = gl.arange(0, 64, layout=gl.SliceLayout(1, half_l))[:, None] // 16
    left = gl.where(block % 2 == 0, right, below)
    return gl.convert_layout(gl.join(left, right).permute((0, 2, 1)).reshape([64, 32]), ACC_HALF, assert_trivial=True)


@gluon.jit
def exact_pairs(keys, queries, right, norm_k_s, norm_q_s, unit_s, bias_s, decay, GATE):
    """`A` and `Aqk` `[64, 32]` of each row's own step for any decay, and the operands and decays of `recurrence`.

    Pairs within 8 rows split at row 4, both factors at most exp(80) by the clamp. Rows 8 .. 15 meet the first 8 as those lie,
    at most exp(60): products that are lost with their own factors, below exp(-87), are less than exp(-27). Pairs of the two
    halves of a step split at the reference, as the state does.

    A warp has 16 rows. Exponents are sums of log decays by `mma`, whose accumulators have the layout of its operands: only
    what `recurrence` gets goes to shared memory. Those of pairs within 8 rows do without the low parts, which add at most
    1e-4 to a factor of 1."""
    KH: gl.constexpr = keys.shape[0] // 64
    keys_b = reinterpret(keys, gl.bfloat16, [KH, 4, 16, 64], BLOCK_TILE)
    queries_b = reinterpret(queries, gl.bfloat16, [KH, 4, 16, 64], BLOCK_TILE)
    right_b = reinterpret(right, gl.bfloat16, [KH, 4, 16, 64], BLOCK_TILE)
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAM, k_width=2)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=GRAM, k_width=2)
    near_w, far_w, state_w = sum_weights()
    norm_k = norm_k_s.reshape([4, 16]).load(gl.SliceLayout(2, left_l))[:, :, None]
    norm_q = norm_q_s.reshape([4, 16]).load(gl.SliceLayout(2, left_l))[:, :, None]
    zero = gl.zeros((4, 16, 32), gl.float32, layout=GRAM)
    half, _ = upper_lower(zero)
    half_l: gl.constexpr = half.type.layout
    block = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, half_l)))[:, None, None]
    # A quarter's decays as `[block, row, 4, 8]`: a thread has all of the third dimension. One pointer a thread, to which that
    # dimension comes last: of `[4, 8, 32]` the compiler would keep three, and spill them.
    split_l: gl.constexpr = half.reshape([4, 8, 4, 8]).type.layout
    lane_l: gl.constexpr = gl.SliceLayout(2, split_l)
    of_block = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, lane_l)))[:, None, None]
    of_row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, lane_l)))[None, :, None]
    of_column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, lane_l)))[None, None, :]
    decay_at = (decay + (of_block * (64 * KH) + of_row * 0 + of_column))[:, :, None, :]
    eight_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, split_l)))
    eight = gl.arange(0, 4, layout=eight_l)[None, None, :, None] * 8
    first = gl.zeros((4, 16, 8), gl.float32, layout=GRAM)
    first_q = gl.zeros((4, 16, 8), gl.float32, layout=GRAM)
    last = gl.zeros((4, 16, 8), gl.float32, layout=GRAM)
    last_q = gl.zeros((4, 16, 8), gl.float32, layout=GRAM)
    for h in range(KH):
        for i in gl.static_range(2):
            keys_s = keys_b.index(h).slice(32 * i, 32, 2)
            queries_s = queries_b.index(h).slice(32 * i, 32, 2)
            right_s = right_b.index(h).slice(32 * i, 32, 2)
            bias = 0.0
            if bias_s is not None:
                biases_s = reinterpret(bias_s, gl.float32, [KH, 64], FLAT).index(h).slice(32 * i, 32)
                bias = biases_s.load(gl.SliceLayout(0, gl.SliceLayout(1, right_l)))[None, None, :]
            # loaded each time: held over the loop, it would be spilled
            unit = unit_s.reshape([4, 16]).load(gl.SliceLayout(2, right_l))[:, :, None]
            step = unbounded_gate(widen(right_s.load(right_l)), bias, GATE, True) * unit
            step = gl.maximum(step, LOWEST, propagate_nan=tl.PropagateNan.ALL)
            high = round_half(step)
            low = round_half(step - high.to(gl.float32))
            if GATE != "none":
                near_u, near_l = upper_lower(mma_v2(near_w, high, zero))
            total, far = upper_lower(sums(far_w, high, low, zero))
            # the factors of the state are no less than exp(-80): what is lost is next to nothing
            kept = gl.maximum(total, LOWEST_HALF, propagate_nan=tl.PropagateNan.ALL)
            over = total - kept
            gl.store(decay_at + (h * 64 + i * 32) + eight, exp2(kept).reshape([4, 8, 4, 8]))
            added = gl.where(block % 2 == 0, over, 0.0)
            added = gl.join(added, added).permute((0, 3, 1, 2)).reshape([4, 16, 32])
            state_u, state_l = upper_lower(sums(state_w, high, low, like(added, zero)))
            kn_u, kn_l = upper_lower(like(widen(keys_s.load(left_l)) * norm_k, zero))
            qn_u, qn_l = upper_lower(like(widen(queries_s.load(left_l)) * norm_q, zero))

            if GATE == "none":
                # here, as they would be spilled from above on
                near_u, near_l = upper_lower(mma_v2(near_w, high, zero))
            a_u, a_l, a_far = exp2(near_u), exp2(near_l), exp2(far)
            upper_s = right_operand(kn_u * exp2_negative(near_u))
            lower_s = right_operand(kn_l * exp2_negative(near_l))
            ka_u = kn_u * a_u
            qa_u = qn_u * a_u
            first = mma_v2(left_operand(ka_u, kn_l * a_far), upper_s, first)
            first_q = mma_v2(left_operand(qa_u, qn_l * a_far), upper_s, first_q)
            last = mma_v2(left_operand(ka_u, kn_l * a_l), lower_s, last)
            last_q = mma_v2(left_operand(qa_u, qn_l * a_l), lower_s, last_q)

            a_u, a_l = exp2(state_u), exp2(state_l)
            keys_s.store(left_operand(kn_u * a_u, kn_l * a_l))
            queries_s.store(left_operand(qn_u * a_u, qn_l * a_l))
            right_s.store(left_operand(kn_u * exp2(over - state_u), kn_l * exp2(over - state_l)))
    keys_h = reinterpret(keys, gl.bfloat16, [KH, 64, 64], TILE)
    queries_h = reinterpret(queries, gl.bfloat16, [KH, 64, 64], TILE)
    right_h = reinterpret(right, gl.bfloat16, [KH, 64, 64], TILE)
    below = gl.zeros((2, 32, 16), gl.float32, layout=STEPS_GRAM)
    below_q = gl.zeros((2, 32, 16), gl.float32, layout=STEPS_GRAM)
    for h in gl.static_range(KH):
        below = products_below(keys_h.index(h), right_h.index(h), below)
        below_q = products_below(queries_h.index(h), right_h.index(h), below_q)
    return of_steps(first, last, below), of_steps(first_q, last_q, below_q)


@gluon.jit
def masked(x, mask):
    """`x`, bf16, where `mask` is -1, and 0 where it is 0: two at a time."""
    asm: gl.constexpr = "and.b32 $0, $1, $2;"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [x, mask], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def step_operands(x):
    """Returns both steps' matrices `[64, 32]`, in bf16, as left operands, in registers, of a product with the chunk's rows, 16
    rows at a time."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    left, right = gl.split(x.reshape([64, 2, 16]).permute((0, 2, 1)))
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, left.type.layout))[:, None]
    first = gl.where(row < 32, -1, 0)
    left0 = gl.convert_layout(masked(left, first), layout, assert_trivial=True)
    right0 = gl.convert_layout(masked(right, first), layout, assert_trivial=True)
    left1 = gl.convert_layout(masked(left, ~first), layout, assert_trivial=True)
    right1 = gl.convert_layout(masked(right, ~first), layout, assert_trivial=True)
    return left0, right0, left1, right1


@gluon.jit
def start_copies(rows, tokens, count, keys, queries, right, SAFE):
    """Loads beta `[64]` and starts the copies of g, k and q, by strides `tokens`. Returns beta, and where g goes."""
    q, k, g, beta = rows
    q_token, k_token, g_token, beta_token = tokens
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_HALF))
    # volatile: else the compiler moves it behind the copies, where it queues
    betas = gl.load(beta + row * beta_token, mask=row < count, other=0.0, volatile=True).to(gl.float32)
    g_s = reinterpret(right, gl.bfloat16, right.shape, PLAIN if SAFE else TILE)
    steps.copy_tokens(g_s, g, g_token, count, 64)
    steps.copy_tokens(keys, k, k_token, count, 64)
    steps.copy_tokens(queries, q, q_token, count, 64)
    async_copy.commit_group()
    return betas, g_s


@gluon.jit
def store_norms(keys, queries, norm_k_s, norm_q_s, scale):
    KH: gl.constexpr = keys.shape[0] // 64
    norm_k_s.reshape([4, 16]).store(
        steps.pair_norm_factors(reinterpret(keys, gl.bfloat16, [KH, 64, 64], TILE), 1.0, KEYS_FIRST=True, L2NORM=True)
    )
    norm_q_s.reshape([4, 16]).store(
        steps.pair_norm_factors(
            reinterpret(queries, gl.bfloat16, [KH, 64, 64], TILE), 1.0, KEYS_FIRST=True, L2NORM=True
        )
        * scale
    )


@gluon.jit
def decayed_parts(keys, queries, right, norm_k_s, norm_q_s, parts, QUERIES_FIRST):
    """`decayed` of both parts, with K = 64 of the only one, then a barrier."""
    for i in gl.static_range(len(parts)):
        decayed(keys, queries, right, norm_k_s, norm_q_s, parts[i], i, QUERIES_FIRST and len(parts) == 1)
    fence_async_shared()
    barrier()


@gluon.jit
def products(keys, queries, right, zero):
    """The products `[64, 64]` of keys and of queries with right operands."""
    for h in gl.static_range(keys.shape[0] // 64):
        right_h = right.slice(64 * h, 64).permute((1, 0))
        if h == 0:
            A = warpgroup_mma(keys.slice(0, 64), right_h, zero, use_acc=False, is_async=True)
            Aqk = warpgroup_mma(queries.slice(0, 64), right_h, zero, use_acc=False, is_async=True)
        else:
            A = warpgroup_mma(keys.slice(64 * h, 64), right_h, A, is_async=True)
            Aqk = warpgroup_mma(queries.slice(64 * h, 64), right_h, Aqk, is_async=True)
    return warpgroup_mma_wait(0, deps=[A, Aqk])


@gluon.jit
def masked_pairs(A, Aqk, betas, row):
    """-A and Aqk `[64, 32]`, that in bf16, from products."""
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, ACC_HALF))[None, :]
    minus_A = gl.where(row % 32 > column, own_step(A, row), 0.0) * -betas[:, None]
    return minus_A, round_pairs(gl.where(row % 32 >= column, own_step(Aqk, row), 0.0))


@gluon.jit
def weigh_keys(X, Aqk, keys, X_s, beta_s, place, row, zero):
    """Stores `inverse | Aqk` in the first rows of `place`, which it returns, and -w in place of the keys, from
    `block_inverses`."""
    X_s.reshape([4, 16, 32]).store(X)
    X_left, X_right = steps.step_inverses(X_s)
    columns: gl.constexpr = gl.SliceLayout(0, ACC_HALF)
    # of each step
    beta_first = beta_s.slice(0, 32).load(columns)[None, :]
    beta_second = beta_s.slice(32, 32).load(columns)[None, :]
    X = gl.convert_layout(gl.join(X_left, X_right).permute((0, 2, 1)).reshape([64, 32]), ACC_HALF, assert_trivial=True)
    # negative, as w is stored
    weights = X * gl.where(row < 32, -beta_first, -beta_second)
    # rounded and in two parts as in `prepare`
    high = round_pairs(weights)
    low = round_pairs(weights - widen(high))
    place = place.slice(0, 64)
    place.store(beside(round_pairs(-weights), Aqk, ACC))

    high0, high1, high2, high3 = step_operands(high)
    low0, low1, low2, low3 = step_operands(low)
    for h in gl.static_range(keys.shape[0] // 64):
        # one half after the other: with the accumulators of both ptxas has no registers left for the MMAs
        w = weighted(high0, low0, keys.slice(64 * h, 16), zero, False)
        w = weighted(high1, low1, keys.slice(64 * h + 16, 16), w, True)
        w = weighted(high2, low2, keys.slice(64 * h + 32, 16), w, True)
        w = weighted(high3, low3, keys.slice(64 * h + 48, 16), w, True)
        w, high0, high1, high2, high3, low0, low1, low2, low3 = warpgroup_mma_wait(
            0, deps=[w, high0, high1, high2, high3, low0, low1, low2, low3]
        )
        keys.slice(64 * h, 64).store(w.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    return place


@gluon.jit
def largest_of_rows(tile_s, factors):
    """The largest elements, in size, of the rows of `tile_s [KH * 64, 64]` in all halves of the channels, `[2, 32]`, times
    factors of each step's channels, which lie as `decay` does."""
    KH: gl.constexpr = tile_s.shape[0] // 64
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1, 32], [1, 16, 2], [2, 2, 1], [2, 1, 0])
    step, column = row_column(2, 64, gl.SliceLayout(1, ROWS))
    for h in gl.static_range(KH):
        half_s = reinterpret(tile_s, gl.bfloat16, [KH, 64, 64], TILE).index(h)
        x = (
            widen(half_s.reshape([2, 32, 64]).load(ROWS))
            * gl.load(factors + (step * KH * 128 + h * 64 + column))[:, None]
        )
        rows = gl.reduce(gl.abs(x), 2, larger)
        most = larger(most, rows) if h > 0 else rows  # noqa: F821 (the loop is unrolled)
    return most


@gluon.jit
def does_forget(decay, largest_kb_s, largest_w, K):
    """Says whether a bound on the norm of M, which maps the state before the chunk to the one after, is next to nothing.
    For each step, with a = exp(G_m) and D = exp(G_C - G_m) by channel,

        |M| = |diag(D) (I - kb^T w) diag(a)| <= max D a + sum_i |D kb_i| |a w_i|

    and norms of rows are at most `sqrt(K)` times their largest elements. Logarithms, as products would underflow; what did
    is less than 2^-120."""
    step, column = row_column(2, K, gl.BlockedLayout([1, K // 32], [1, 32], [2, 2], [1, 0]))
    at_decay = decay + (step * 2 * K + column)
    most = gl.reduce(gl.load(at_decay) * gl.load(at_decay + K), 1, larger)
    products = rounded_product(largest_w, largest_kb_s.reshape([2, 32]).load(largest_w.type.layout))
    bound = most + gl.convert_layout(K * gl.sum(products, axis=1), most.type.layout) + 2.0**-120
    return exp2(gl.sum(log2(bound), axis=0)) * 1.01 <= FORGOTTEN


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def prepare_steps_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, checkpoint_offsets,
    tiles_d, decay, semaphores, forgets, scale: gl.float32, lower_bound: gl.float32, T: gl.int32, N: gl.int32,
    HV: gl.int32, group: gl.int32, slots: gl.int32, checkpoints: gl.int32,
    q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32, k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32,
    g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    beta_batch: gl.int32, beta_token: gl.int32, beta_head: gl.int32, parts,
    K: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr, FLAGS: gl.constexpr, SAFE: gl.constexpr,
):  # fmt: skip
    """One chunk and value head; * goes to memory:

    g, then k and q          by cp.async
          |
          v                  d = log decay from the step's reference to the row, a = exp(d), b = exp(-d)
    keys k a, queries q a, right k b  [64, K]                   * qa, kb, decay
          |
          v                  wgmma; of both products [64, 64] the columns of each row's own step
    -A, Aqk [64, 32]
          |
          v                  a warp solves 16 rows in float32; n D0 by mma
    (I + A)^-1 [64, 32]      times diag(beta): inverse          * inverse | Aqk
          |
          v                  wgmma, left operands in registers
    -w [64, K]               in the keys' place                 * -w
    """
    KH: gl.constexpr = K // 64
    LAYOUT: gl.constexpr = steps.part_layout(KH)
    # as in `prepare`
    head, slot, tile = last_chunks_first(HV, not SAFE)
    if tile == 0:
        # `recurrence` counts up from zero
        flag = gl.arange(0, FLAGS, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(semaphores + flag, flag * 0)
    # volatile, here and below: else the compiler moves these loads behind the copies, where they queue
    rate = decay_rate(A_log, head, volatile=True)
    if dt_bias is not None:
        bias = steps.load_bias(dt_bias, head, K)
    batch, start, count, begin = chunk_in_slot(cu_seqlens, checkpoint_offsets, checkpoints, slot, slots, N, T)
    if count <= 0:
        return
    batch = batch.to(gl.int32)
    start = start.to(gl.int32)
    to_end = count
    count = gl.minimum(count, 64).to(gl.int32)
    if forgets is not None:
        # here: behind the copies it costs a spill
        ends = may_end_part(start - begin, to_end, parts)
    qk_head = head
    if group > 1:
        qk_head = head // group
    # these strides come in units of 8 elements, which tells the compiler that 16-byte copies are aligned
    q += (wide(batch, q_batch) + wide(start, q_token) + wide(qk_head, q_head)) * 8
    k += (wide(batch, k_batch) + wide(start, k_token) + wide(qk_head, k_head)) * 8
    g += (wide(batch, g_batch) + wide(start, g_token) + wide(head, g_head)) * 8
    beta += wide(batch, beta_batch) + wide(start, beta_token) + wide(head, beta_head)
    decay += tile.to(gl.int64) * (4 * K)
    first_row = tile * ((3 * KH + 1) * 64)

    keys = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    queries = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    # the gate's input, then the right operands
    right = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    # -A's blocks, first by rows, then by columns
    blocks_s = gl.allocate_shared_memory(gl.float32, [64, 16], SQUARE)
    norm_k_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    norm_q_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    unit_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    beta_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    if dt_bias is not None:
        bias_s = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    else:
        bias_s: gl.constexpr = None  # type: ignore[no-redef]
    acc_row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_HALF))
    rows, tokens = (q, k, g, beta), (q_token, k_token, g_token, beta_token)
    betas, g_s = start_copies(rows, tokens, count, keys, queries, right, SAFE)

    # whether somebody asks if the chunk forgets: the tile, or -1
    if forgets is None:
        flag_tile: gl.constexpr = -1
    else:
        flag_tile = gl.where(ends, tile, -1)

    # nothing decays past the end
    unit_s.store(gl.where(acc_row < count, gate_unit(rate, lower_bound, GATE), 0.0))
    betas = gl.where(acc_row < count, beta_value(betas, BETA), 0.0)
    beta_s.store(betas)
    biases = 0.0
    if dt_bias is not None:
        if SAFE:
            bias_s.store(gate_bias(bias, rate, GATE))
        else:
            bias_s.store(bias * LOG2E)
        columns_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
        biases = bias_s.reshape([KH, 64]).load(columns_l)[:, None, None, None, :]

    async_copy.wait_group(0)
    # norms first: their MMAs and the sums of decays together need more registers than there are
    store_norms(keys, queries, norm_k_s, norm_q_s, scale)
    if SAFE:
        fits: gl.constexpr = True
        before, middle = steps.decay_sums(g_s, biases, rate, unit_s, 0, GATE, True)
        if KH == 2:
            after, rest = steps.decay_sums(g_s, biases, rate, unit_s, 1, GATE, True)
    else:
        if GATE == "none" or KH == 1:
            # with the branch 8 or 16 B are spilled
            likely: gl.constexpr = True
        else:
            likely = may_fit(bias_s, rate) if GATE == "softplus" and dt_bias is not None else start >= 0
        fits = likely
        if likely:
            before, middle = steps.decay_sums(g_s, biases, rate, unit_s, 0, GATE, False)
            inside = middle >= LOWEST_HALF
            if KH == 2:
                after, rest = steps.decay_sums(g_s, biases, rate, unit_s, 1, GATE, False)
                inside = inside & (rest >= LOWEST_HALF)
            # whether no half of a step decays by more than a float32 holds; a NaN does
            far = gl.where(inside, 0, 1)
            # of each warp, then of all: a reduction of the whole takes a barrier more
            far_s = reinterpret(blocks_s, gl.int32, [4], FLAT)
            far_s.reshape([KH, 2, 2 // KH]).store(gl.max(far, axis=3))
            fits = gl.max(far_s.load(gl.BlockedLayout([4], [32], [4], [0])), axis=0) == 0
        else:
            before = gl.zeros((2, 2, 1, 16, 64), gl.float32, layout=LAYOUT)
            after = before
            middle = gl.zeros((2, 2, 1, 64), gl.float32, layout=gl.SliceLayout(3, LAYOUT))
            rest = middle
    if fits:
        totals_l: gl.constexpr = gl.SliceLayout(3, LAYOUT)
        at_half = gl.arange(0, KH, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, totals_l))))
        at_step = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, totals_l))))
        at_part = gl.arange(0, 2 // KH, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, totals_l))))
        at_column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, totals_l))))
        row = at_step[None, :, None, None] * (2 * K) + at_half[:, None, None, None] * 64
        if KH == 1:
            row += at_part[None, None, :, None] * K
        at_decay = decay + (row + at_column[None, None, None, :])
        gl.store(at_decay, exp2(middle))
        if KH == 2:
            gl.store(at_decay + K, exp2(rest))
            exponents = before - middle[:, :, :, None, :], after
        else:
            until = gl.where(at_part[None, None, :, None] == 0, middle, 0.0)
            exponents = (before - until[:, :, :, None, :],)  # type: ignore[assignment]
        decayed_parts(keys, queries, right, norm_k_s, norm_q_s, exponents, SAFE and cu_seqlens is not None)
        for h in gl.static_range(KH):
            store_tile(tiles_d, [first_row + (KH + h) * 64, 0], queries.slice(64 * h, 64))
            store_tile(tiles_d, [first_row + (2 * KH + h) * 64, 0], right.slice(64 * h, 64))

        zero = gl.zeros((64, 64), gl.float32, layout=ACC)
        A, Aqk = products(keys, queries, right, zero)
        if not SAFE:
            # anew: there are no registers for it before
            betas = beta_s.load(gl.SliceLayout(1, ACC_HALF))
        row = acc_row[:, None]
        minus_A, Aqk = masked_pairs(A, Aqk, betas, row)
    else:
        own_A, own_Aqk = exact_pairs(keys, queries, right, norm_k_s, norm_q_s, unit_s, bias_s, decay, GATE)
        fence_async_shared()
        barrier()
        for h in gl.static_range(KH):
            store_tile(tiles_d, [first_row + (KH + h) * 64, 0], queries.slice(64 * h, 64))
            store_tile(tiles_d, [first_row + (2 * KH + h) * 64, 0], right.slice(64 * h, 64))
        betas = beta_s.load(gl.SliceLayout(1, ACC_HALF))
        row = acc_row[:, None]
        minus_A, Aqk = masked_pairs(own_A, own_Aqk, betas, row)
    if not SAFE:
        zero = gl.zeros((64, 64), gl.float32, layout=ACC)

    X = steps.block_inverses(minus_A, blocks_s)
    # the queries and the right operands have left
    tma.store_wait(0)
    barrier()
    if flag_tile >= 0:
        # here, and where the norms were, there are registers for them
        norm_k_s.reshape([2, 32]).store(largest_of_rows(right, decay + K))
    place = weigh_keys(X, Aqk, keys, reinterpret(queries, gl.float32, [64, 32], STEP), beta_s, right, row, zero)
    for h in gl.static_range(KH):
        store_tile(tiles_d, [first_row + h * 64, 0], keys.slice(64 * h, 64))
    store_tile(tiles_d, [first_row + 3 * KH * 64, 0], place)
    if flag_tile >= 0:
        gl.store(forgets + flag_tile, does_forget(decay, norm_k_s, largest_of_rows(keys, decay), K).to(gl.int32))
    tma.store_wait(0)


def prepare_steps(call: StageCall) -> Launch:
    problem = call.problem
    ctas, rows = grid(problem)
    own = dict(
        **call.left("decay", "semaphores", "forgets"),
        **dict(tiles_d=tiles(call.workspace["tiles"]), FLAGS=FLAGS),
        parts=parts(problem, call.t.device) if "forgets" in call.workspace else None,
    )
    # five CTAs on an SM, or four: with K = 128, or where `exact_pairs` would spill
    most = 96 if problem.K == 64 and problem.safe_gate else 128
    return launch_div8(prepare_steps_kernel, ctas, problem, call.t, own, max_registers=most, rows=rows)
