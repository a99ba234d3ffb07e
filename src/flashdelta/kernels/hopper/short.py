"""`prepare` and `recurrence` in one launch, for batches of short sequences with bounded gates and K = V = 128: a CTA has a
(sequence, value head), and a chunk's tiles never leave its shared memory. The bits are those of `prepare_steps` and
`recurrence`.

Sequences may have any length, but a CTA does one chunk after the other, without overlap: other CTAs of the SM must fill it.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ...program.plan import Outputs, Step
from ..shared.gates import decay_rate
from ..shared.gluon import steps
from ..shared.gluon.compat import barrier, reinterpret
from ..shared.gluon.math import beta_value, exp2, gate_bias, gate_unit, token_offset, wide
from ..shared.gluon.steps import ACC_HALF, FLAT, ROWS, SQUARE, STEP, TILE
from ..shared.scalars import SCALARS_AND_STRIDES
from ..shared.sequences import own_work_tile
from ..shared.states import sequence_slot
from ..stages.backward_pass import StageSet
from ..stages.launch import launch_div8, state_arguments
from .device.layouts import ACC, BV, LEFT, C, as_left, beside, store_transposed
from .device.wgmma import mma, mma_first
from .prepare_steps import decayed_parts, masked_pairs, products, start_copies, store_norms, weigh_keys


@gluon.jit
def prepare_chunk(chunk, rows, tokens, v_s, v, v_token, dt_bias, head, rate, count, scale, lower_bound, GATE, BETA):
    """Leaves the chunk's tiles and decays, and v, `[128, 64]` by slices."""
    keys, queries, right, place, decay = chunk
    biases = 0.0
    if dt_bias is not None:
        bias = steps.load_bias(dt_bias, head, 128)
    betas, g_s = start_copies(rows, tokens, count, keys, queries, right, True)
    steps.copy_tokens(v_s, v, v_token, count, 64)
    async_copy.commit_group()

    norm_k_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    norm_q_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    unit_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    beta_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_HALF))
    # nothing decays past the end
    unit_s.store(gl.where(row < count, gate_unit(rate, lower_bound, GATE), 0.0))
    beta_s.store(gl.where(row < count, beta_value(betas, BETA), 0.0))
    if dt_bias is not None:
        # where decays will be: there is room for three CTAs, and no more
        bias_s = reinterpret(decay, gl.float32, [128], FLAT)
        bias_s.store(gate_bias(bias, rate, GATE))
        columns_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, steps.part_layout(2))))
        biases = bias_s.reshape([2, 64]).load(columns_l)[:, None, None, None, :]
    async_copy.wait_group(1)
    store_norms(keys, queries, norm_k_s, norm_q_s, scale)
    before, middle = steps.decay_sums(g_s, biases, rate, unit_s, 0, GATE, True)
    after, rest = steps.decay_sums(g_s, biases, rate, unit_s, 1, GATE, True)
    # `[half, step, part, channel]`
    decay = decay.reshape([2, 2, 2, 64]).permute((2, 0, 1, 3))
    decay.slice(0, 1, 2).store(exp2(middle))
    decay.slice(1, 1, 2).store(exp2(rest))
    decayed_parts(keys, queries, right, norm_k_s, norm_q_s, (before - middle[:, :, :, None, :], after), False)
    zero = gl.zeros((64, 64), gl.float32, layout=ACC)
    A, Aqk = products(keys, queries, right, zero)
    # anew: there are no registers for it before
    minus_A, Aqk = masked_pairs(A, Aqk, beta_s.load(gl.SliceLayout(1, ACC_HALF)), row[:, None])
    X = steps.block_inverses(minus_A, reinterpret(place, gl.float32, [64, 16], SQUARE))
    async_copy.wait_group(0)
    weigh_keys(X, Aqk, keys, reinterpret(place, gl.float32, [64, 32], STEP), beta_s, place, row[:, None], zero)


@gluon.jit
def state_pointers(states, half: gl.constexpr, K, V, V_FIRST):
    """Pointers to a slice's values and a half of its keys, `[64, 8, 8]`. A thread has all of the second dimension, which is
    added last: else the compiler keeps a pointer for each number."""
    layout: gl.constexpr = gl.zeros((64, 64), gl.float32, layout=ACC).reshape([64, 8, 8]).type.layout
    value = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    eight = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    key = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    if V_FIRST:
        at = states + (value * K + key) + (eight * 8 + half * 64)
    else:
        at = states + (value + key * V) + (eight * (8 * V) + half * (64 * V))
    return at


@gluon.jit
def load_slice(states, K, V, V_FIRST):
    """A slice's state by halves of the keys."""
    state0 = gl.load(state_pointers(states, 0, K, V, V_FIRST)).to(gl.float32).reshape([64, 64])
    state0 = gl.convert_layout(state0, ACC, assert_trivial=True)
    state1 = gl.load(state_pointers(states, 1, K, V, V_FIRST)).to(gl.float32).reshape([64, 64])
    return state0, gl.convert_layout(state1, ACC, assert_trivial=True)


@gluon.jit
def store_slice(states, state0, state1, K, V, V_FIRST):
    gl.store(state_pointers(states, 0, K, V, V_FIRST), state0.reshape([64, 8, 8]).to(states.dtype.element_ty))
    gl.store(state_pointers(states, 1, K, V, V_FIRST), state1.reshape([64, 8, 8]).to(states.dtype.element_ty))


@gluon.jit
def by_threads(state):
    """`[64, 64]` as `[8, 128, 4]`; no data moves between threads."""
    return state.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([8, 128, 4])


@gluon.jit
def carried_pointers(carry, half: gl.constexpr):
    """Pointers to a half of a slice's state between chunks, `[8, 128, 4]`: 16 bytes of each thread side by side."""
    layout: gl.constexpr = by_threads(gl.zeros((64, 64), gl.float32, layout=ACC)).type.layout
    eight = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    thread = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return carry + (thread * 4 + four) + (eight * 512 + half * 4096)


@gluon.jit
def carry_in(carry, half: gl.constexpr):
    state = gl.load(carried_pointers(carry, half)).reshape([8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(state.reshape([64, 64]), ACC, assert_trivial=True)


@gluon.jit
def carry_out(carry, half: gl.constexpr, state):
    gl.store(carried_pointers(carry, half), by_threads(state))


@gluon.jit
def decayed_state(state, decay, i: gl.constexpr):
    return state * decay.slice(64 * i, 64).load(gl.SliceLayout(0, ACC))[None, :]


@gluon.jit
def step(chunk, i: gl.constexpr, state0, state1, v_s, known):
    """Step `i` of `recurrence`: the states after it, and `o^T [64, 32]` in bf16. One half of the keys after the other, so that
    their operands have the same registers. `known`: 0 if the state is zero, which then is not multiplied."""
    keys, queries, right, place, decay = chunk
    ROW: gl.constexpr = 32 * i
    zero = gl.zeros((BV, C // 2), gl.float32, layout=ACC_HALF)
    pairs = place.slice(ROW, 32)
    v_t = v_s.slice(ROW, 32).permute((1, 0)).load(LEFT)
    v_new = mma_first(v_t, pairs.slice(0, 32, 1).permute((1, 0)), zero)
    v_new, v_t = warpgroup_mma_wait(0, deps=[v_new, v_t])
    out = zero
    if known != 0:
        state0 = decayed_state(state0, decay, 4 * i)
        left = as_left(state0)
        v_new = mma(left, keys.slice(ROW, 32).permute((1, 0)), v_new)
        out = mma_first(left, queries.slice(ROW, 32).permute((1, 0)), zero)
        v_new, out, left = warpgroup_mma_wait(0, deps=[v_new, out, left])
        state1 = decayed_state(state1, decay, 4 * i + 1)
        left = as_left(state1)
        v_new = mma(left, keys.slice(64 + ROW, 32).permute((1, 0)), v_new)
        out = mma(left, queries.slice(64 + ROW, 32).permute((1, 0)), out)
        v_new, out, left = warpgroup_mma_wait(0, deps=[v_new, out, left])
    left = as_left(v_new)
    state0 = mma(left, right.slice(ROW, 32), state0)
    out = mma(left, pairs.slice(32, 32, 1).permute((1, 0)), out)
    state1 = mma(left, right.slice(64 + ROW, 32), state1)
    state0, state1, out, left = warpgroup_mma_wait(0, deps=[state0, state1, out, left])
    state0 = decayed_state(state0, decay, 4 * i + 2)
    state1 = decayed_state(state1, decay, 4 * i + 3)
    return state0, state1, out.to(gl.bfloat16)


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def short_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, o, carry,
    initial_state, final_state, state_indices, has_initial_state,
    lowest: gl.int32, pool_slots: gl.int32, has_initial: gl.int32, has_final: gl.int32, state_pitch: gl.int64,
    scale: gl.float32, lower_bound: gl.float32, T: gl.int32, HV: gl.int32, group: gl.int32,
    q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32, k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32,
    v_batch: gl.int32, v_token: gl.int32, v_head: gl.int32, g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    beta_batch: gl.int32, beta_token: gl.int32, beta_head: gl.int32,
    o_batch: gl.int32, o_token: gl.int32, o_head: gl.int32,
    K: gl.constexpr, V: gl.constexpr, V_FIRST: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr,
):  # fmt: skip
    """One sequence and value head. The state `S^T [64, K]` of a slice of 64 value channels is in registers for a chunk; `carry`
    has it in between.

        for each chunk:  g, k, q, v --> `prepare_steps` --> -w, qa, kb, inverse | Aqk, decay    (shared memory)
            for each slice:  S --> two steps as in `recurrence` --> o, S
    """
    _, head, n, batch, begin, end = own_work_tile(cu_seqlens, T, HV, 1)
    rate = decay_rate(A_log, head, volatile=True)
    own, read, stored = sequence_slot(
        state_indices, has_initial_state, n, end - begin, lowest, pool_slots, has_initial, has_final
    )
    batch, begin, length = batch.to(gl.int32), begin.to(gl.int32), (end - begin).to(gl.int32)
    head = head.to(gl.int32)
    qk_head = head
    if group > 1:
        qk_head = head // group
    NEXT: gl.constexpr = BV * K if V_FIRST else BV
    in_states = own * state_pitch + head * (K * V)

    keys = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    queries = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    right = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    place = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    decay = gl.allocate_shared_memory(gl.float32, [512], FLAT)
    # a slice's v, then its output
    v_s = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    chunk = (keys, queries, right, place, decay)
    zero = gl.zeros((64, 64), gl.float32, layout=ACC)
    if (length == 0) & (stored != 0):
        for s in range(2):
            state0, state1 = zero, zero
            if read != 0:
                state0, state1 = load_slice(initial_state + (in_states + s * NEXT), K, V, V_FIRST)
            store_slice(final_state + (in_states + s * NEXT), state0, state1, K, V, V_FIRST)
    for first in tl.range(0, length, C, disable_licm=True):
        start = begin + first
        count = gl.minimum(length - first, C)
        rows = (
            q + token_offset(batch, start, qk_head, q_batch, q_token, q_head) * 8,
            k + token_offset(batch, start, qk_head, k_batch, k_token, k_head) * 8,
            g + token_offset(batch, start, head, g_batch, g_token, g_head) * 8,
            beta + token_offset(batch, start, head, beta_batch, beta_token, beta_head),
        )
        tokens = (q_token, k_token, g_token, beta_token)
        v_rows = v + token_offset(batch, start, head, v_batch, v_token, v_head) * 8
        prepare_chunk(
            *(chunk, rows, tokens, v_s, v_rows, v_token, dt_bias, head, rate, count, scale, lower_bound, GATE, BETA)
        )
        for s in tl.range(0, 2, disable_licm=True):
            slice_s = reinterpret(v_s, gl.bfloat16, [2, 64, 64], TILE).index(s)
            carried = carry + (gl.program_id(0).to(gl.int64) * (K * V) + s * (BV * K))
            state0, state1 = zero, zero
            if first > 0:
                state0, state1 = carry_in(carried, 0), carry_in(carried, 1)
            elif read != 0:
                state0, state1 = load_slice(initial_state + (in_states + s * NEXT), K, V, V_FIRST)
            state0, state1, out0 = step(chunk, 0, state0, state1, slice_s, first + read)
            state0, state1, out1 = step(chunk, 1, state0, state1, slice_s, 1)
            if first + C < length:
                carry_out(carried, 0, state0)
                carry_out(carried, 1, state1)
            elif stored != 0:
                store_slice(final_state + (in_states + s * NEXT), state0, state1, K, V, V_FIRST)
            row = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))
            in_o = row[:, None] * (o_token * 8) + gl.arange(0, BV, layout=gl.SliceLayout(0, ROWS))[None, :]
            o_slice = o + ((wide(batch, o_batch) + wide(head, o_head)) * 8 + s * BV)
            store_transposed(o_slice, slice_s, beside(out0, out1, ACC), start, count, row, in_o, o_token)
        # before the next chunk's copies
        barrier()


def short(stages: StageSet, outputs: Outputs, own: Tensor | None = None) -> list[Step]:
    """The launch of a forward, as `StageSet.forward`. A state between chunks has room of each CTA's own."""
    problem, t = stages.problem, stages.t
    states = (problem.N * problem.HV * problem.K * problem.V,)
    given = dict(o=outputs["o"] if own is None else own, carry=t.memory.new(states, torch.float32))
    given |= state_arguments(problem, t, outputs.get("final_state"))
    # three CTAs on an SM
    return [launch_div8(short_kernel, problem.N * problem.HV, problem, t, given, max_registers=168)]
