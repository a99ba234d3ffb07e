"""Stage `commit` for Hopper: the accepted tokens of a replay buffer, up to 17, into states as `[V, K]`. One CTA per (sequence,
value head, slice of 64 value channels), or per (sequence, value head).

Contract and sum as in `triton/commit.py`, which is a matrix product with the tokens inside:

    S^T <- S^T diag(exp(G_T)) + u^T (exp(G_T - G_t) k_t),   [V, K] = [V, K] + [V, T] [T, K]

For a whole head it puts records in shared memory once, and works on one slice after the other.

All that a CTA reads, it asks for at once: states come to where accumulators of MMAs are, records to one thread a key channel,
which has all tokens of it. The recorded count decides only whether the result is stored. Where it all lies is a guess: indices
and counts are read before the wait for the kernel before this one, which may yet overwrite them, and again after it.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import CommitProblem, CommitTensors
from ...program.launch import Launch, sm_count
from ...program.plan import Outputs
from ..shared.gluon.compat import barrier
from ..shared.gluon.math import multiply
from ..shared.mma import stacked, two_parts
from ..shared.records import COUNTS, record_counts, record_values, record_width
from ..shared.scalars import SCALARS
from ..shared.states import everywhere, slot_and_row
from ..stages.decode import commit_arguments
from ..stages.launch import Config, aligned, launch
from .device.layouts import BV


@gluon.jit
def swap_pairs(x, first: gl.constexpr, second: gl.constexpr):
    """`first` groups of `second` pairs of columns change places, to `second` groups of `first` pairs."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return (
        x.reshape([rows, columns // (2 * first * second), first, second, 2])
        .permute((0, 1, 3, 2, 4))
        .reshape([rows, columns])
    )


@gluon.jit
def load_slices(x, offsets, next_: gl.constexpr, SLICES, mask=None, other=None):
    """Loads what lies at the offsets of each slice, `next_` elements on from the slice before."""
    first = gl.load(x + offsets, mask=mask, other=other)
    if SLICES == 1:
        return (first,)
    else:
        return first, gl.load(x + next_ + offsets, mask=mask, other=other)


@gluon.jit
def load_states(states, at, next_: gl.constexpr, SLICES, mask=None):
    """Loads the states of each slice, packed."""
    loaded = load_slices(states, at, next_, SLICES, mask=mask)
    if SLICES == 1:
        return (packed(loaded[0]),)
    else:
        return packed(loaded[0]), packed(loaded[1])


@gluon.jit
def packed(x):
    """Pairs of adjacent bfloat16 numbers as one integer: where branches meet, each number would take a register."""
    if x.dtype == gl.bfloat16:
        low, high = gl.split(x.to(gl.int16, bitcast=True).to(gl.int32).reshape([x.shape[0], x.shape[1] // 2, 2]))
        x = (high << 16) | (low & 65535)
    return x


@gluon.jit
def unpacked(x, layout: gl.constexpr):
    """Unpacks what `packed` gives, as float32."""
    if x.dtype == gl.int32:
        low = (x << 16).to(gl.float32, bitcast=True)
        high = (x & -65536).to(gl.float32, bitcast=True)
        x = gl.convert_layout(gl.join(low, high).reshape([x.shape[0], 2 * x.shape[1]]), layout, assert_trivial=True)
    return x


@gluon.jit
def load_records(
    record, count, tokens, there, of_u, row_step, K, SLICES, TOKENS, row_l: gl.constexpr, left_l: gl.constexpr,
):  # fmt: skip
    """Loads accepted tokens from the last one on: `k` and the decays that what is before them goes through, `[TOKENS, K]`; the
    first token's decay; and channels `of_u` of each slice of `u`, twice. A token's update decays by those before it in this
    order."""
    last = gl.where(there, gl.minimum(count, tokens), 0)
    back = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, row_l))
    key = gl.arange(0, K, layout=gl.SliceLayout(0, row_l))
    at = (last - 1 - back)[:, None] * row_step + key[None, :]
    everything = (key >= 0)[None, :]
    k = gl.load(record + K + at, mask=(back < last)[:, None] & everything, other=0.0)
    decays = gl.load(record + row_step + at, mask=((back > 0) & (back < last))[:, None] & everything, other=1.0)
    first_decay = gl.load(record + key, mask=everywhere(key, last > 0), other=1.0)
    back = gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(0, left_l)) % TOKENS
    at = (last - 1 - back)[None, :] * row_step + of_u[:, None]
    mask = (back < last)[None, :] & (of_u >= 0)[:, None]
    u = load_slices(record_values(record, K), at, BV, SLICES, mask=mask, other=0.0)
    return k, decays, first_decay, u


@gluon.jit
def load_first(record, count, tokens, there, of_u, row_step, K, SLICES, TOKENS, key_l: gl.constexpr):
    """Loads the first of more than `TOKENS` accepted tokens: `k`, the second token's decay, and `u`. Zeros and ones of
    fewer."""
    more = there & (gl.minimum(count, tokens) > TOKENS)
    key = gl.arange(0, K, layout=key_l)
    k = gl.load(record + K + key, mask=everywhere(key, more), other=0.0)
    decay = gl.load(record + row_step + key, mask=everywhere(key, more), other=1.0)
    return k, decay, load_slices(record_values(record, K), of_u, BV, SLICES, everywhere(of_u, more), 0.0)


@gluon.jit(do_not_specialize=SCALARS)
def replay_kernel(
    initial_state, records, slot_indices, row_indices, accepted, lowest, slots,
    rows, tokens, HV, slot_pitch: gl.int64, row_pitch: gl.int64, row_step: gl.int64,
    K: gl.constexpr, V: gl.constexpr, SLICES: gl.constexpr, TOKENS: gl.constexpr, ONE_MORE: gl.constexpr,
):  # fmt: skip
    """Replays at most `TOKENS` tokens for `SLICES` slices of a head, in four warps. Both parts of the operands lie along the
    sum: the low part of keys, then the high one for both parts of `u`. An accumulator gives a thread 2 adjacent columns of
    every 8; with pairs swapped these are 4 adjacent ones of every 16, or 8 of 32: 16 bytes. `ONE_MORE`: the first of 17 tokens
    is a sum of its own, not part of the product."""
    sums_l: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_l, k_width=1)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums_l, k_width=1)
    PAIRS: gl.constexpr = 4 if initial_state.dtype.element_ty == gl.bfloat16 else 2
    adjacent: gl.constexpr = [[0, 1], [0, 2], [0, 4]] if PAIRS == 4 else [[0, 1], [0, 2]]
    others: gl.constexpr = [[8, 0], [0, 32]] if PAIRS == 4 else [[8, 0], [0, 16], [0, 32]]
    lines_l: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=adjacent + others + ([[0, 64]] if K == 128 else []),
        lane_bases=[[0, 2 * PAIRS], [0, 4 * PAIRS], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, K],
    )
    row_l: gl.constexpr = gl.BlockedLayout([TOKENS, 1], [1, 32], [1, 4], [1, 0])
    key_l: gl.constexpr = gl.SliceLayout(0, row_l)
    # 4 rows of 8 numbers are read at once
    rows_in: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, order=[1, 0])

    parts: gl.constexpr = V // (SLICES * BV)
    part = gl.program_id(0) % parts
    head = (gl.program_id(0) // parts % HV).to(gl.int64)
    n = gl.program_id(0) // parts // HV
    value = gl.arange(0, BV, layout=gl.SliceLayout(1, lines_l))
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, lines_l))
    initial_state += head * (K * V) + part * (SLICES * BV * K)
    records += head * record_width(K, V)
    in_slot = value[:, None] * K + channel[None, :]
    of_u = part * (SLICES * BV) + gl.arange(0, BV, layout=gl.SliceLayout(1, left_l))
    of_first = part * (SLICES * BV) + value
    guess = gl.load(accepted + n).to(gl.int64)
    guessed_slot, guessed_row, guessed = slot_and_row(slot_indices, row_indices, n, lowest, slots, rows)
    states = initial_state + guessed_slot * slot_pitch
    record = records + guessed_row * row_pitch
    gdc_wait()
    gdc_launch_dependents()
    start = load_states(states, in_slot, BV * K, SLICES, mask=everywhere(in_slot, guessed))
    asked = load_records(record, guess, tokens, guessed, of_u, row_step, K, SLICES, TOKENS, row_l, left_l)
    if ONE_MORE:
        first = load_first(record, guess, tokens, guessed, of_first, row_step, K, SLICES, TOKENS, key_l)
    barrier()  # no load passes it; else those above would follow the ones below, and wait for them
    count = gl.load(accepted + n).to(gl.int64)
    slot, row, named = slot_and_row(slot_indices, row_indices, n, lowest, slots, rows)
    if named:
        if (slot != guessed_slot) | (row != guessed_row) | (count != guess) | (named != guessed):
            states = initial_state + slot * slot_pitch
            record = records + row * row_pitch
            start = load_states(states, in_slot, BV * K, SLICES)
            asked = load_records(record, count, tokens, named, of_u, row_step, K, SLICES, TOKENS, row_l, left_l)
            if ONE_MORE:
                first = load_first(record, count, tokens, named, of_first, row_step, K, SLICES, TOKENS, key_l)
        k, decays, first_decay, u = asked
        counts = record_counts(record, K, V)
        recorded = load_slices(counts, part * SLICES, 1, SLICES)

        until = gl.associative_scan(decays, 0, multiply)
        all_s = gl.allocate_shared_memory(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
        every = gl.reduce(decays, 0, multiply)
        if ONE_MORE:
            first_k, second_decay, first_u = first
            every *= second_decay
            first_s = gl.allocate_shared_memory(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
            first_s.store(first_k * every)
        all_s.store(first_decay * every)
        high, low = two_parts(swap_pairs(k * until, 4, PAIRS))
        rows_s = gl.allocate_shared_memory(gl.float32, [2, 2 * TOKENS, K], rows_in)
        rows_s.index(0).store(stacked(low, high))
        rows_s.index(1).store(stacked(high, high))
        once = (gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(0, left_l)) < TOKENS)[None, :]
        for i in gl.static_range(SLICES):
            if i > 0:
                barrier()  # the operands in shared memory are read again; else registers would keep them from slice to slice
            state = unpacked(start[i], lines_l) * all_s.load(gl.SliceLayout(0, lines_l))[None, :]
            if ONE_MORE:
                state += first_u[i][:, None] * first_s.load(gl.SliceLayout(0, lines_l))[None, :]
            sums = gl.convert_layout(swap_pairs(state, 4, PAIRS), sums_l, assert_trivial=True)
            high, low = two_parts(u[i])
            sums = mma_v2(gl.where(once, high, 0.0), rows_s.index(0).load(right_l), sums, input_precision="tf32")
            sums = mma_v2(gl.where(once, high, low), rows_s.index(1).load(right_l), sums, input_precision="tf32")
            state = gl.convert_layout(swap_pairs(sums, PAIRS, 4), lines_l, assert_trivial=True)
            state = state.to(initial_state.dtype.element_ty)
            wanted = (count >= 1) & (count <= tokens) & (count.to(gl.float32) <= recorded[i])
            gl.store(states + i * (BV * K) + in_slot, state, mask=everywhere(in_slot, wanted))
        barrier()  # all warps have read the count
        each = gl.arange(0, COUNTS, layout=key_l)
        gl.store(counts + each, gl.zeros_like(each).to(gl.float32), mask=each % (V // BV) // SLICES == part)


SLICES_AT_ONCE = 4
"""CTAs of a slice and up to 8 tokens that an SM has at once. Where there are more, a CTA takes a whole head, if that fits."""


def slices_a_cta(problem: CommitProblem, sms: int) -> int:
    """Counts the slices of a CTA. Registers hold one of float32 states, and of bfloat16 ones beside 17 tokens."""
    slices = problem.V // BV.value
    many = problem.N * problem.HV * slices > SLICES_AT_ONCE * sms
    fits = problem.state_dtype == torch.bfloat16 and problem.most_tokens <= 16
    return slices if many and fits else 1


def commit(problem: CommitProblem, t: CommitTensors, arch: int, outputs: Outputs) -> list[Launch] | None:
    """Accepted tokens into states. None where states lie on no 16 bytes."""
    if not aligned(t.state_pool, 16):
        return None
    tokens = 8 if problem.most_tokens <= 8 else 16
    more = problem.most_tokens > tokens
    slices = slices_a_cta(problem, sm_count(t.device))
    own = dict(commit_arguments(problem, t), SLICES=slices, TOKENS=tokens, ONE_MORE=more)
    # four CTAs of a slice and up to 8 tokens fit on an SM; three of 17 tokens, with fewer registers in bfloat16, or of a head
    large = slices > 1 or (more and problem.state_dtype == torch.float32)
    cap = 168 if large else 128 if tokens == 8 else None
    ctas = problem.N * problem.HV * (problem.V // (slices * BV.value))
    return [launch(replay_kernel, ctas, problem, t, own, Config(4, max_registers=cap), overlaps=True)]
