"""Stage `commit` for Hopper: the accepted tokens of a replay buffer, up to 16, into states as `[V, K]`. One CTA per (sequence,
value head, slice of 64 value channels).

Contract and sum as in `triton/commit.py`, which is a matrix product with the tokens inside:

    S^T <- S^T diag(exp(G_T)) + u^T (exp(G_T - G_t) k_t),   [V, K] = [V, K] + [V, T] [T, K]

All that a CTA reads, it asks for at once: states come to where accumulators of MMAs are, records to one thread a key channel,
which has all tokens of it. What is recorded decides only whether the result is stored.
"""

from __future__ import annotations

from dataclasses import replace

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..problem.problem import Problem, Tensors
from ..program.launch import Launch
from ..program.program import Outputs
from ..triton import commit as portable
from .device.compat import barrier
from .device.layouts import BV
from .device.math import multiply
from .device.portable import (
    RECORD_COUNTS,
    everywhere,
    record_counts,
    record_values,
    record_width,
    slot_and_row,
    stacked,
    two_parts,
)
from .launch import aligned


@gluon.jit
def swap_pairs(x, first: gl.constexpr, second: gl.constexpr):
    """Columns of every 16: `first` groups of `second` pairs change places, to `second` groups of `first` pairs."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return x.reshape([rows, columns // 16, first, second, 2]).permute((0, 1, 3, 2, 4)).reshape([rows, columns])


@gluon.jit(do_not_specialize=["lowest", "slots", "rows", "tokens", "HV"])
def replay_kernel(
    initial_state,
    records,
    slot_indices,
    row_indices,
    accepted,
    lowest,
    slots,
    rows,
    tokens,
    HV,
    slot_pitch: gl.int64,
    row_pitch: gl.int64,
    row_step: gl.int64,
    K: gl.constexpr,
    V: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """At most `TOKENS` tokens, in four warps. Both parts of the operands lie along the sum: the low part of keys, then the high
    one for both parts of `u`. An accumulator gives a thread 2 adjacent columns of every 8; with pairs swapped
    these are 4 adjacent ones of every 16."""
    sums_l: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_l, k_width=1)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums_l, k_width=1)
    registers: gl.constexpr = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]] + ([[0, 64]] if K == 128 else [])
    lines_l: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, K],
    )
    row_l: gl.constexpr = gl.BlockedLayout([TOKENS, 1], [1, 32], [1, 4], [1, 0])
    key_l: gl.constexpr = gl.SliceLayout(0, row_l)
    # 4 rows of 8 numbers are read at once
    rows_in: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, order=[1, 0])

    gdc_wait()
    gdc_launch_dependents()
    slices: gl.constexpr = V // BV
    slice_ = gl.program_id(0) % slices
    head = (gl.program_id(0) // slices % HV).to(gl.int64)
    n = gl.program_id(0) // slices // HV
    count = gl.load(accepted + n).to(gl.int64)
    slot, row, named = slot_and_row(slot_indices, row_indices, n, lowest, slots, rows)
    if named:
        records += row * row_pitch + head * record_width(K, V)
        counts = record_counts(records, K, V)
        recorded = gl.load(counts + slice_)
        value = gl.arange(0, BV, layout=gl.SliceLayout(1, lines_l))
        channel = gl.arange(0, K, layout=gl.SliceLayout(0, lines_l))
        states = initial_state + slot * slot_pitch + head * (K * V) + slice_ * (BV * K)
        states += value[:, None] * K + channel[None, :]
        start = gl.load(states)
        # from the last token on: what a token adds decays by those before it in this order
        last = gl.minimum(count, tokens)
        back = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, row_l))
        key = gl.arange(0, K, layout=key_l)
        at = (last - 1 - back)[:, None] * row_step + key[None, :]
        everything = (key >= 0)[None, :]
        k = gl.load(records + K + at, mask=(back < last)[:, None] & everything, other=0.0)
        decays = gl.load(records + row_step + at, mask=((back > 0) & (back < last))[:, None] & everything, other=1.0)
        first_decay = gl.load(records + key, mask=everywhere(key, last > 0), other=1.0)
        of_u = gl.arange(0, BV, layout=gl.SliceLayout(1, left_l))
        column = gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(0, left_l))
        back = column % TOKENS
        at = (last - 1 - back)[None, :] * row_step + (slice_ * BV + of_u)[:, None]
        u = gl.load(record_values(records, K) + at, mask=(back < last)[None, :] & (of_u >= 0)[:, None], other=0.0)

        until = gl.associative_scan(decays, 0, multiply)
        all_s = gl.allocate_shared_memory(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
        all_s.store(first_decay * gl.reduce(decays, 0, multiply))
        high, low = two_parts(swap_pairs(k * until, 4, 2))
        rows_s = gl.allocate_shared_memory(gl.float32, [2, 2 * TOKENS, K], rows_in)
        rows_s.index(0).store(stacked(low, high))
        rows_s.index(1).store(stacked(high, high))
        state = start.to(gl.float32) * all_s.load(gl.SliceLayout(0, lines_l))[None, :]
        sums = gl.convert_layout(swap_pairs(state, 4, 2), sums_l, assert_trivial=True)
        high, low = two_parts(u)
        once = (column < TOKENS)[None, :]
        sums = mma_v2(gl.where(once, high, 0.0), rows_s.index(0).load(right_l), sums, input_precision="tf32")
        sums = mma_v2(gl.where(once, high, low), rows_s.index(1).load(right_l), sums, input_precision="tf32")
        state = gl.convert_layout(swap_pairs(sums, 2, 4), lines_l, assert_trivial=True)
        wanted = (count >= 1) & (count <= tokens) & (count.to(gl.float32) <= recorded)
        gl.store(states, state.to(initial_state.dtype.element_ty), mask=everywhere(states.to(gl.int64), wanted))
        barrier()  # all warps have read the count
        each = gl.arange(0, RECORD_COUNTS, layout=key_l)
        gl.store(counts + each, gl.zeros_like(each).to(gl.float32), mask=each % slices == slice_)


def commit(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    """Where states lie on no 16 bytes, the portable kernel."""
    (launch,) = portable.commit(problem, t, arch, outputs)
    assert t.state_pool is not None
    if not aligned(t.state_pool, 16):
        return [launch]
    constants = {"K": problem.K, "V": problem.V, "TOKENS": 8 if problem.most_tokens <= 8 else 16}
    ctas = problem.N * problem.HV * (problem.V // BV.value)
    kernel = {"kernel": replay_kernel, "constants": constants, "num_warps": 4}
    return [replace(launch, ctas=ctas, **kernel)]
