"""`prepare` and `recurrence` in one launch, for batches of short sequences with bounded gates and K = V = 128: a CTA of 8 warps
has a (sequence, value head), and neither a chunk's tiles nor its state leave the SM. The bits are those of `prepare_steps` and
`recurrence`.

Sequences may have any length, but a CTA does one chunk after the other, without overlap: the other CTA of the SM must fill it.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...program.launch import Launch
from ...program.plan import Outputs, Step
from ..shared.gates import decay_rate
from ..shared.scalars import SCALARS_AND_STRIDES
from ..shared.sequences import own_work_tile
from ..shared.states import sequence_slot
from ..stages.backward_pass import StageSet
from ..stages.launch import state_arguments
from .device.compat import barrier, reinterpret
from .device.layouts import C, as_left
from .device.math import (
    beta_value,
    column_halves,
    exp2,
    exp2_negative,
    gate_bias,
    gate_unit,
    mma,
    mma_first,
    round_pairs,
    split_high_low,
    token_offset,
    widen,
)
from .launch import bind_div8
from .prepare import FLAT, PLAIN, TILE, copy_pair, copy_tokens, load_bias, pair_norm_factors, weighted
from .prepare_steps import SQUARE, STEP, decay_sums, part_layout, row_values, step_operands, substitute

# of eight warps: a warpgroup has keys or queries, a slice of the value channels, or a half of the key channels
ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16]))
"""Accumulators `[128, 64]`."""
ACC_HALF = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 32, 16]))
"""Accumulators `[128, 32]`."""
LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=ACC.value, k_width=2))
BESIDE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 64, 16]))
"""Accumulators `[64, 128]`."""
BOTH = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
"""`[64, 32]` of each warpgroup."""
BLOCK = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 2, 1], instr_shape=[1, 16, 8]))
"""Accumulators `[4, 16, 16]`, of two warps each."""
SIDES = gl.constexpr(gl.BlockedLayout([1, 16, 1, 1], [1, 1, 2, 16], [4, 1, 2, 1], [0, 1, 3, 2]))
"""`[16 rows of a chunk, row, half, column]` of their step: two warps have 16 rows, a lane a column."""
SOLVE = gl.constexpr(gl.BlockedLayout([1, 16, 1], [1, 1, 32], [4, 1, 2], [0, 1, 2]))
"""The same with the columns as `[32]`."""
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
PAIRS = gl.constexpr(gl.NVMMASharedLayout.get_default_for([128, 32], gl.bfloat16))
PART = gl.constexpr(gl.BlockedLayout([1, 1, 1, 1, 16, 2], [1, 1, 1, 1, 1, 32], [2, 1, 2, 2, 1, 1], [5, 4, 3, 2, 1, 0]))
"""`part_layout` of all rows, beside keys or queries."""


@gluon.jit
def rows_of(kq, i: gl.constexpr):
    """Keys or queries `[half, 1, step, half of it, row, channel]`."""
    return kq.reshape([2, 2, 2, 2, 16, 64]).slice(i, 1, 1)


@gluon.jit
def normed(kq, norms, i: gl.constexpr):
    layout: gl.constexpr = part_layout(2, 8)
    x = widen(rows_of(kq, i).load(PART)).reshape([2, 2, 2, 16, 64])
    return gl.convert_layout(x, layout, assert_trivial=True) * row_values(norms.index(i), 0, 2)


@gluon.jit
def store_rows(kq, i: gl.constexpr, x):
    rows_of(kq, i).store(x.to(gl.bfloat16).reshape([2, 1, 2, 2, 16, 64]))


@gluon.jit
def block_inverses(pairs, left_s, columns_s):
    """`prepare_steps.block_inverses` of the first 64 of the rows `[128, 32]`."""
    left, right = gl.split(pairs.reshape([128, 2, 16]).permute((0, 2, 1)))
    block = gl.arange(0, 128, layout=gl.SliceLayout(1, left.type.layout))[:, None] // 16
    left_s.store(left)
    diagonal = gl.where(block % 2 == 0, left, right)
    columns_s.reshape([2, 16, 4, 16]).permute((0, 2, 3, 1)).store(diagonal.reshape([2, 4, 16, 16]))
    x = left_s.reshape([8, 16, 16]).slice(0, 4).load(gl.SliceLayout(2, SIDES))[:, :, None, :]
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, SIDES))))[None, :, None, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, SIDES))))[None, None, None, :]
    side = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, SIDES))))[None, None, :, None]
    of = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, SIDES))))[:, None, None, None]
    x = gl.where(of % 2 == side, gl.where(i == j, 1.0, 0.0), gl.where(side == 0, x, 0.0))
    x = gl.convert_layout(x.reshape([4, 16, 32]), SOLVE, assert_trivial=True)
    return substitute(x, reinterpret(columns_s, gl.float32, [16, 4, 16], PLAIN))


@gluon.jit
def step_inverses(X_s):
    """`prepare_steps.step_inverses`, in place."""
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=BLOCK, k_width=2)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=BLOCK, k_width=2)
    operand_l: gl.constexpr = gl.SliceLayout(0, right_l)
    left_s = X_s.reshape([4, 16, 32]).slice(0, 16, 2)
    n_high, n_low = split_high_low(left_s.load(left_l))
    D_first = X_s.slice(0, 16).slice(0, 16, 1).load(operand_l)[None, :, :]
    D_second = X_s.slice(32, 16).slice(0, 16, 1).load(operand_l)[None, :, :]
    of = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, right_l)))[:, None, None]
    D_high, D_low = split_high_low(gl.where(of < 2, D_first, D_second))
    below = gl.zeros((4, 16, 16), gl.float32, layout=BLOCK)
    below = mma_v2(n_low, D_high, below)
    below = mma_v2(n_high, D_low, below)
    below = mma_v2(n_high, D_high, below)
    block = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCK)))[:, None, None]
    left_s.store(gl.where(block % 2 == 0, left_s.load(BLOCK), below))


@gluon.jit
def prepare_chunk(chunk, rows, tokens, dt_bias, head, rate, count, scale, lower_bound, GATE, BETA):
    """Leaves the chunk's tiles and decays, and starts the copy of v, of which it returns the place, `[2, 64, 64]`: by steps,
    then by slices."""
    kq, right, pairs_s, decay = chunk
    q, k, g, beta, v = rows
    q_token, k_token, g_token, beta_token, v_token = tokens
    biases = 0.0
    if dt_bias is not None:
        bias = load_bias(dt_bias, head, 128)
    row = gl.arange(0, 128, layout=gl.SliceLayout(1, ACC_HALF))
    # volatile: else the compiler moves it behind the copies, where it queues
    betas = gl.load(beta + row % 64 * beta_token, mask=row % 64 < count, other=0.0, volatile=True).to(gl.float32)
    copy_tokens(right, g, g_token, count, 64)
    copy_pair(kq, k, k_token, count, q, q_token, count, 64)
    async_copy.commit_group()

    norm_s = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    unit_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    # -beta of keys, 1 of queries
    factor_s = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    unit = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [8], [0]))
    # nothing decays past the end
    unit_s.store(gl.where(unit < count, gate_unit(rate, lower_bound, GATE), 0.0))
    betas = gl.where(row % 64 < count, -beta_value(betas, BETA), 0.0)
    factor_s.store(gl.where(row < 64, betas, 1.0))
    LAYOUT: gl.constexpr = part_layout(2, 8)
    if dt_bias is not None:
        # where decays will be
        bias_s = reinterpret(decay, gl.float32, [128], FLAT)
        bias_s.store(gate_bias(bias, rate, GATE))
        columns_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
        biases = bias_s.reshape([2, 64]).load(columns_l)[:, None, None, None, :]
    async_copy.wait_group(0)
    halves = reinterpret(kq, gl.bfloat16, [2, 128, 64], TILE)
    norm_s.reshape([8, 16]).store(pair_norm_factors(halves, scale, True, True))
    norms = reinterpret(norm_s, gl.float32, [2, 64], FLAT)
    d, total = decay_sums(right, biases, rate, unit_s, 0, GATE, True)
    # `[half, step, part, channel]`
    # a lane of `ACC` needs every fourth pair of 64: they lie side by side
    decay = decay.reshape([2, 2, 2, 4, 8, 2]).permute((2, 0, 1, 4, 3, 5))
    decay.store(exp2(total).reshape([2, 2, 2, 8, 4, 2]))
    part_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(3, LAYOUT))))
    before = gl.arange(0, 2, layout=part_l)[None, None, :, None] == 0
    d -= gl.where(before, total, 0.0)[:, :, :, None, :]
    # queries first: else there are no registers
    a = exp2(d)
    store_rows(kq, 1, normed(kq, norms, 1) * a)
    kn = normed(kq, norms, 0)
    store_rows(kq, 0, kn * a)
    right.reshape([2, 2, 2, 16, 64]).store((kn * exp2_negative(d)).to(gl.bfloat16))
    fence_async_shared()
    barrier()
    zero = gl.zeros((128, 64), gl.float32, layout=ACC)
    x = warpgroup_mma(kq.slice(0, 128), right.slice(0, 64).permute((1, 0)), zero, use_acc=False, is_async=True)
    x = warpgroup_mma(kq.slice(128, 128), right.slice(64, 64).permute((1, 0)), x, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    # rows of -A, then of Aqk; the columns of each row's own step
    first, second = column_halves(x, ACC_HALF)
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, ACC_HALF))[None, :]
    in_step = row[:, None] % 32 + row[:, None] // 64
    x = gl.where(row[:, None] % 64 < 32, first, second) * factor_s.load(gl.SliceLayout(1, ACC_HALF))[:, None]
    x = gl.where(in_step > column, x, 0.0)
    pairs_s.store(round_pairs(x))
    left_s = gl.allocate_shared_memory(gl.float32, [128, 16], SQUARE)
    columns_s = gl.allocate_shared_memory(gl.float32, [2048], FLAT)
    X = block_inverses(x, left_s, columns_s)
    X_s = gl.allocate_shared_memory(gl.float32, [64, 32], STEP)
    X_s.reshape([4, 16, 32]).store(X)
    step_inverses(X_s)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, BOTH))[:, None]
    columns: gl.constexpr = gl.SliceLayout(0, BOTH)
    beta_first = factor_s.slice(0, 32).load(columns)[None, :]
    beta_second = factor_s.slice(32, 32).load(columns)[None, :]
    # negative, as w is stored
    weights = X_s.load(BOTH) * gl.where(row < 32, beta_first, beta_second)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    for i in gl.static_range(2):
        copy_tokens(v_s.index(i), v + v_token * (256 * i), v_token, count - 32 * i, 32)
    async_copy.commit_group()
    # rounded and in two parts as in `prepare`
    high = round_pairs(weights)
    low = round_pairs(weights - widen(high))
    pairs_s.slice(0, 64).store(round_pairs(-weights))
    high0, high1, high2, high3 = step_operands(high, BESIDE)
    low0, low1, low2, low3 = step_operands(low, BESIDE)
    keys = reinterpret(kq, gl.bfloat16, [128, 128], TILE)
    zero = gl.zeros((64, 128), gl.float32, layout=BESIDE)
    w = weighted(high0, low0, keys.slice(0, 16), zero, False)
    w = weighted(high1, low1, keys.slice(16, 16), w, True)
    w = weighted(high2, low2, keys.slice(32, 16), w, True)
    w = weighted(high3, low3, keys.slice(48, 16), w, True)
    w, high0, high1, high2, high3, low0, low1, low2, low3 = warpgroup_mma_wait(
        0, deps=[w, high0, high1, high2, high3, low0, low1, low2, low3]
    )
    keys.slice(0, 64).store(w.to(gl.bfloat16))
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    return v_s


@gluon.jit
def parked(memory):
    """A half of a state in shared memory, 16 bytes of each thread side by side."""
    return memory.reshape([8, 8, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))


@gluon.jit
def park(memory, state):
    parked(memory).store(state.reshape([8, 2, 8, 8, 4, 2]))


@gluon.jit
def unpark(memory):
    layout: gl.constexpr = gl.zeros((128, 64), gl.float32, layout=ACC).reshape([8, 2, 8, 8, 4, 2]).type.layout
    return gl.convert_layout(parked(memory).load(layout).reshape([128, 64]), ACC, assert_trivial=True)


@gluon.jit
def state_pointers(states, nothing, half: gl.constexpr, K, V, V_FIRST):
    """Pointers to all values and a half of the keys, `[128, 8, 8]`. A thread has all of the second dimension, which is added
    last: else the compiler keeps a pointer for each number. `nothing`: a 0 that it does not see, lest it keep those of the
    initial state for the final one."""
    layout: gl.constexpr = gl.zeros((128, 64), gl.float32, layout=ACC).reshape([128, 8, 8]).type.layout
    value = nothing + gl.arange(0, 128, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    eight = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    key = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    if V_FIRST:
        at = states + (value * K + key) + (eight * 8 + half * 64)
    else:
        at = states + (value + key * V) + (eight * (8 * V) + half * (64 * V))
    return at


@gluon.jit
def load_half(states, half: gl.constexpr, K, V, V_FIRST):
    state = gl.load(state_pointers(states, 0, half, K, V, V_FIRST)).to(gl.float32).reshape([128, 64])
    return gl.convert_layout(state, ACC, assert_trivial=True)


@gluon.jit
def store_half(states, nothing, half: gl.constexpr, state, K, V, V_FIRST):
    state = state.reshape([128, 8, 8]).to(states.dtype.element_ty)
    gl.store(state_pointers(states, nothing, half, K, V, V_FIRST), state)


@gluon.jit
def decayed_state(state, decay, i):
    state = state.reshape([128, 8, 4, 2])
    factors = decay.index(i).reshape([4, 8, 2]).permute((1, 0, 2))
    state = state * factors.load(gl.SliceLayout(0, state.type.layout))[None, :, :, :]
    return gl.convert_layout(state.reshape([128, 64]), ACC, assert_trivial=True)


@gluon.jit
def step(chunk, i, state0, state1, v_s, known):
    """Step `i` of `recurrence`: the states after it, and `o^T [128, 32]` in bf16. 16 keys after the other, so that
    their operands have the same registers. `known`: 0 if the state is zero, which then is not multiplied."""
    kq, right, pairs, decay = chunk
    kq = reinterpret(kq, gl.bfloat16, [8, 32, 64], TILE)
    right = reinterpret(right, gl.bfloat16, [4, 32, 64], TILE)
    pairs = reinterpret(pairs, gl.bfloat16, [4, 32, 32], PAIRS)
    decay = reinterpret(decay, gl.float32, [8, 64], FLAT)
    zero = gl.zeros((128, 32), gl.float32, layout=ACC_HALF)
    v_t = v_s.permute((1, 0)).load(LEFT)
    v_new = mma_first(v_t, pairs.index(i).permute((1, 0)), zero)
    v_new, v_t = warpgroup_mma_wait(0, deps=[v_new, v_t])
    out = zero
    if known != 0:
        for h in gl.static_range(2):
            if h == 0:
                state0 = decayed_state(state0, decay, 4 * i)
            else:
                state1 = decayed_state(state1, decay, 4 * i + 1)
            first, second = column_halves(state0 if h == 0 else state1, ACC_HALF)
            for j in gl.static_range(4):
                left, other = gl.split((first if j < 2 else second).reshape([128, 2, 16]).permute((0, 2, 1)))
                left = as_left(left if j % 2 == 0 else other, True, LEFT)
                v_new = mma(left, kq.index(4 * h + i).slice(16 * j, 16, 1).permute((1, 0)), v_new)
                queries = kq.index(4 * h + 2 + i).slice(16 * j, 16, 1).permute((1, 0))
                out = warpgroup_mma(left, queries, out, use_acc=h + j > 0, is_async=True)
                v_new, out, left = warpgroup_mma_wait(0, deps=[v_new, out, left])
    left = as_left(v_new, True, LEFT)
    state0 = mma(left, right.index(i), state0)
    out = mma(left, pairs.index(2 + i).permute((1, 0)), out)
    state1 = mma(left, right.index(2 + i), state1)
    state0, state1, out, left = warpgroup_mma_wait(0, deps=[state0, state1, out, left])
    state0 = decayed_state(state0, decay, 4 * i + 2)
    state1 = decayed_state(state1, decay, 4 * i + 3)
    return state0, state1, out.to(gl.bfloat16)


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def short_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, o,
    initial_state, final_state, state_indices, has_initial_state,
    lowest: gl.int32, pool_slots: gl.int32, has_initial: gl.int32, has_final: gl.int32, state_pitch: gl.int64,
    scale: gl.float32, lower_bound: gl.float32, T: gl.int32, HV: gl.int32, group: gl.int32,
    q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32, k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32,
    v_batch: gl.int32, v_token: gl.int32, v_head: gl.int32, g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    beta_batch: gl.int32, beta_token: gl.int32, beta_head: gl.int32,
    o_batch: gl.int32, o_token: gl.int32, o_head: gl.int32,
    K: gl.constexpr, V: gl.constexpr, V_FIRST: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr,
):  # fmt: skip
    """One sequence and value head. Of the state `S^T [V, K]` a half of the keys is in registers, the other in shared memory
    while a chunk is prepared.

        for each chunk:  g, k, q --> `prepare_steps` --> -w, qa, kb, inverse, Aqk, decay    (shared memory)
                         S, v    --> two steps as in `recurrence` --> o, S
    """
    _, own_head, n, own_batch, begin, end = own_work_tile(cu_seqlens, T, HV, 1)
    rate = decay_rate(A_log, own_head, volatile=True)
    own, read, stored = sequence_slot(
        state_indices, has_initial_state, n, end - begin, lowest, pool_slots, has_initial, has_final
    )
    own_batch, begin, length = own_batch.to(gl.int32), begin.to(gl.int32), (end - begin).to(gl.int32)
    own_head = own_head.to(gl.int32)
    own_qk_head = own_head
    if group > 1:
        own_qk_head = own_head // group
    in_states = own * state_pitch + own_head * (K * V)

    # by halves of the channels keys, then queries
    kq = gl.allocate_shared_memory(gl.bfloat16, [256, 64], TILE)
    right = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    # inverse, then Aqk
    pairs_s = gl.allocate_shared_memory(gl.bfloat16, [128, 32], PAIRS)
    decay = gl.allocate_shared_memory(gl.float32, [512], FLAT)
    carried_s = gl.allocate_shared_memory(gl.float32, [8192], FLAT)
    chunk = (kq, right, pairs_s, decay)
    state0 = gl.zeros((128, 64), gl.float32, layout=ACC)
    state1 = state0
    if read != 0:
        state1 = load_half(initial_state + in_states, 1, K, V, V_FIRST)
        state0 = load_half(initial_state + in_states, 0, K, V, V_FIRST)
    park(carried_s, state1)
    for first in tl.range(0, length, C, disable_licm=True):
        start = begin + first
        count = gl.minimum(length - first, C)
        # a 0 that the compiler does not see: else it keeps offsets from chunk to chunk
        nothing = gl.minimum(count, 0)
        head, qk_head, batch = own_head + nothing, own_qk_head + nothing, own_batch + nothing
        rows = (
            q + token_offset(batch, start, qk_head, q_batch, q_token, q_head) * 8,
            k + token_offset(batch, start, qk_head, k_batch, k_token, k_head) * 8,
            g + token_offset(batch, start, head, g_batch, g_token, g_head) * 8,
            beta + token_offset(batch, start, head, beta_batch, beta_token, beta_head),
            v + token_offset(batch, start, head, v_batch, v_token, v_head) * 8,
        )
        tokens = (q_token, k_token, g_token, beta_token, v_token)
        v_s = prepare_chunk(chunk, rows, tokens, dt_bias, head, rate, count, scale, lower_bound, GATE, BETA)
        v_s = reinterpret(v_s, gl.bfloat16, [2, 32, 128], TILE)
        state1 = unpark(carried_s)
        at = o + token_offset(batch, start, head, o_batch, o_token, o_head) * 8
        for i in tl.range(0, 2, disable_licm=True):
            state0, state1, out = step(chunk, i, state0, state1, v_s.index(i), first + i + read)
            v_s.index(i).permute((1, 0)).store(out)
            row = i * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, ROWS))
            column = gl.arange(0, V, layout=gl.SliceLayout(0, ROWS))
            at_rows = at + (row[:, None] * (o_token * 8) + column[None, :])
            gl.store(at_rows, v_s.index(i).load(ROWS), mask=(row < count)[:, None])
        park(carried_s, state1)
        # before the next chunk's copies
        barrier()
    if stored != 0:
        nothing = gl.minimum(length, 0)
        store_half(final_state + in_states, nothing, 0, state0, K, V, V_FIRST)
        store_half(final_state + in_states, nothing, 1, unpark(carried_s), K, V, V_FIRST)


def short(stages: StageSet, outputs: Outputs, own: Tensor | None = None) -> list[Step]:
    """The launch of a forward, as `StageSet.forward`."""
    problem, t = stages.problem, stages.t
    given = dict(
        o=outputs["o"] if own is None else own,
        **state_arguments(problem, t, outputs.get("final_state")),
    )
    arguments = bind_div8(short_kernel, problem, t, given)
    # two CTAs on an SM
    return [Launch(short_kernel, problem.N * problem.HV, *arguments, num_warps=8, max_registers=128)]
