"""Stage `commit`: of each sequence's intermediate states, the one after its last accepted token goes to its slot of the pool.

Contract (`reference.decode.commit` is the definition): `pool[slot_n] <- intermediate[row_n, accepted_n - 1]`. A count outside
`[1, tokens]`, or an index that names nothing, copies nothing. One CTA per (sequence, `BLOCK` elements of a state).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..problem.problem import Problem, Tensors
from ..program.launch import Launch
from ..program.program import Outputs
from .device.states import named_slot


@triton.jit(do_not_specialize=["lowest", "slots", "rows", "tokens"])
def commit_kernel(
    initial_state,
    intermediate_states,
    slot_indices,
    row_indices,
    accepted,
    lowest,
    slots,
    rows,
    tokens,
    size,
    slot_pitch: tl.int64,
    row_pitch: tl.int64,
    row_step: tl.int64,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(size, BLOCK)
    n = tl.program_id(0) // blocks
    count = tl.load(accepted + n).to(tl.int64)
    slot, named = named_slot(slot_indices, n, lowest, slots)
    row = slot
    exists = slot < rows
    if row_indices is not None:
        row, exists = named_slot(row_indices, n, 0, rows)  # a scratch buffer has no reserved row
    if named & exists & (count >= 1) & (count <= tokens):
        inside = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = inside < size
        state = tl.load(intermediate_states + row * row_pitch + (count - 1) * row_step + inside, mask=mask)
        tl.store(initial_state + slot * slot_pitch + inside, state, mask=mask)


COMMIT_BLOCK = 4096
"""Elements a CTA of `commit` copies."""


def commit(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    block, size = COMMIT_BLOCK, problem.HV * problem.V * problem.K
    assert t.state_pool is not None and t.intermediate_states is not None
    return [
        Launch(
            commit_kernel,
            problem.N * -(-size // block),
            (
                *(t.state_pool, t.intermediate_states),
                *(t.state_indices, t.intermediate_indices, t.num_accepted_tokens),
                *(problem.lowest_index, problem.pool_slots, problem.rows, problem.most_tokens, size),
                *(t.state_pool.stride(0), *t.intermediate_states.stride()[:2]),
            ),
            dict(BLOCK=block),
            num_warps=4,
        )
    ]
