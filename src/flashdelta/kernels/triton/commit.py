"""Stage `commit`: the state after each sequence's last accepted token goes to its slot of the pool, from a buffer that has the
state after every token, or from one that has what every token changed.

Contract (`reference.decode.commit` is the definition): `pool[slot_n] <- intermediate[row_n, accepted_n - 1]`, or for the first
`accepted_n` records of the row

    S <- diag(exp(g_t)) S + k_t u_t^T

on the slot's state, as one sum over the tokens from the last on,

    S <- diag(exp(G_T)) S + sum_t (exp(G_T - G_t) k_t) u_t^T,   G_t = g_1 + ... + g_t

which needs the state at its end only. A count outside `[1, tokens]` or past what is recorded, or an index that names nothing,
stores nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import RECORD_COUNTS, CommitProblem, CommitTensors
from ...program.launch import Launch
from ...program.plan import Outputs
from ..shared.records import COUNTS, load_record, record_counts, record_width
from ..shared.scalars import SCALARS
from ..shared.states import slot_and_row, state_offsets
from ..stages.decode import commit_arguments
from ..stages.launch import Config, launch


@triton.jit(do_not_specialize=SCALARS)
def commit_kernel(
    initial_state, intermediate_states, slot_indices, row_indices,
    accepted, lowest, slots, rows, tokens, size, slot_pitch: tl.int64, row_pitch: tl.int64, row_step: tl.int64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies states. One CTA per (sequence, `BLOCK` elements of a state)."""
    blocks = tl.cdiv(size, BLOCK)
    n = tl.program_id(0) // blocks
    count = tl.load(accepted + n).to(tl.int64)
    slot, row, named = slot_and_row(slot_indices, row_indices, n, lowest, slots, rows)
    if named & (count >= 1) & (count <= tokens):
        inside = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = inside < size
        state = tl.load(intermediate_states + row * row_pitch + (count - 1) * row_step + inside, mask=mask)
        tl.store(initial_state + slot * slot_pitch + inside, state, mask=mask)


@triton.jit(do_not_specialize=SCALARS)
def replay_kernel(
    initial_state, records, slot_indices, row_indices, accepted, lowest, slots,
    rows, tokens, HV, slot_pitch: tl.int64, row_pitch: tl.int64, row_step: tl.int64,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`S <- diag(exp(g_t)) S + k_t u_t^T` for the accepted tokens. One CTA per (sequence, value head, slice of `BV` value
    channels). Each has a count of its own, which it clears: no other CTA may still have to read it."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    slices: tl.constexpr = V // BV
    slice_ = tl.program_id(0) % slices
    head = (tl.program_id(0) // slices % HV).to(tl.int64)
    n = tl.program_id(0) // slices // HV
    count = tl.load(accepted + n).to(tl.int64)
    slot, row, named = slot_and_row(slot_indices, row_indices, n, lowest, slots, rows)
    if named:
        records += row * row_pitch + head * record_width(K, V)
        counts = record_counts(records, K, V)
        recorded = tl.load(counts + slice_)
        key = tl.arange(0, K)
        value = slice_ * BV + tl.arange(0, BV)
        states = initial_state + slot * slot_pitch + head * (K * V) + state_offsets(0, value, key, K, V, V_FIRST)
        start = tl.load(states)  # whatever the count: nothing waits for it
        if (count >= 1) & (count <= tokens) & (count.to(tl.float32) <= recorded):
            # as tiles `[1, K]` and `[BV, 1]`, which threads load as they use them
            of_key, of_value = key[None, :], value[:, None]
            records += (count - 1) * row_step
            token = load_record(records, True, of_key, of_value, K)
            until = tl.full([1, K], 1.0, tl.float32)
            state = tl.zeros([BV, K], tl.float32)
            for t in range(1, count + 1):
                exp_g, k, u = token
                records -= row_step
                # ahead of the sum, which it does not wait for
                token = load_record(records, t < count, of_key, of_value, K)
                state = tl.fma(u, k * until, state)
                until *= exp_g
            state = tl.fma(start.to(tl.float32), until, state)
            tl.store(states, state.to(initial_state.dtype.element_ty))
        tl.debug_barrier()  # all warps have read the count
        each = tl.arange(0, COUNTS)
        tl.store(counts + each, 0.0, mask=each % slices == slice_)


COMMIT_BLOCK = 4096
"""Elements a CTA of `commit` copies."""


def replay_config(problem: CommitProblem) -> Config:
    """16 KB of float32 states per CTA where the slices allow it, as in `decode`, in 32 registers per thread twice."""
    BV = max(-(-problem.V // RECORD_COUNTS), min(problem.V, 4096 // problem.K))
    return Config(BV=BV, num_warps=max(1, min(16, BV * problem.K // 1024)))


def commit(problem: CommitProblem, t: CommitTensors, arch: int, outputs: Outputs) -> list[Launch]:
    own = commit_arguments(problem, t)
    if problem.has_records:
        c = replay_config(problem)
        ctas = problem.N * problem.HV * (problem.V // c.BV)
        return [launch(replay_kernel, ctas, problem, t, own, c, overlaps=arch >= 90)]
    size = problem.HV * problem.V * problem.K
    own |= dict(size=size, BLOCK=COMMIT_BLOCK)
    return [launch(commit_kernel, problem.N * -(-size // COMMIT_BLOCK), problem, t, own)]
