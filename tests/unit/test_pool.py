"""State pools: the reference against calls by hand, the plan of chunk slots against a plan in plain Python, the operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import flashdelta as fd
from flashdelta.reference.sequences import chunk_slots

from ..support.cases import FP32
from ..support.plans import Plan, planned_chunks, plans
from ..support.pools import (
    CHECKPOINT_POOLS,
    PLAIN_POOLS,
    PoolCase,
    call_for,
    gathered_and_scattered,
    hold_pool,
    pool_id,
)

pytestmark = pytest.mark.usefixtures("as_on_gpu")

BOTH = [fd.chunk_kda, fd.fused_recurrent_kda]
ALL = [(fd.chunk_kda, pool_case) for pool_case in PLAIN_POOLS + CHECKPOINT_POOLS]
ALL += [(fd.fused_recurrent_kda, pool_case) for pool_case in PLAIN_POOLS]


def op_and_case(value: object) -> str | None:
    return value.name if isinstance(value, PoolCase) else None


# ---- what a call computes and where it writes -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
@pytest.mark.parametrize(("op", "pool_case"), ALL, ids=op_and_case)
def test_pool_call_is_the_recurrence(op, pool_case: PoolCase, dtype: torch.dtype):
    hold_pool(op, call_for(op, pool_case, dtype))


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("pool_case", PLAIN_POOLS, ids=pool_id)
def test_pool_call_has_the_bits_of_gather_call_scatter(pool_case: PoolCase, op):
    hold_pool(op, call_for(op, pool_case), [gathered_and_scattered])


# ---- the plan of chunk slots ----------------------------------------------------------------------------------------


@given(plans())
def test_chunk_slots_are_the_plan(plan: Plan):
    problem, t = plan.call()
    slots = chunk_slots(problem, t)
    found = {}
    for slot in range(problem.B * problem.slots):
        tokens = slots.token[slot][slots.valid[slot]].tolist()
        if tokens:
            found[slot] = (int(slots.sequence[slot]), tokens)
    want = planned_chunks(plan)
    assert len(found) == len(want)
    assert [found[slot] for slot in sorted(found)] == [(chunk.sequence, chunk.tokens) for chunk in want]
    for n in range(problem.N):
        own = [slot for slot, (sequence, _) in found.items() if sequence == n]
        assert own == list(range(own[0], own[0] + len(own))) if own else True
        if own:
            assert slots.first[own[0]]
            assert int(slots.last[n]) == own[-1]
        for m in range(problem.checkpoints):
            cut, stored = plan.cuts(n)[m]
            assert bool(slots.stored[n, m]) == stored
            if stored:
                start = plan.begin(n)
                assert found[int(slots.reached[n, m])][1][-1] == start + cut - 1


@given(plans(wild=True))
def test_no_plan_leads_outside(plan: Plan):
    problem, t = plan.call()
    slots = chunk_slots(problem, t)
    for x in (slots.last, slots.reached):
        assert x.numel() == 0 or (x.min() >= 0 and x.max() < problem.B * problem.slots)
    assert slots.token.numel() == 0 or (slots.token.min() >= 0 and slots.token.max() < max(problem.B * problem.T, 1))


# ---- explained, warmed up -------------------------------------------------------------------------------------------


def test_warmup_makes_pool_calls():
    pools = {"state_pool": (False, True), "has_initial_state": (True,), "checkpoints": (False, True)}
    assert fd.warmup(fd.chunk_kda, [(32, 32)], device="cpu", packed=(True,), **pools) == 2 + 2
    assert fd.warmup(fd.fused_recurrent_kda, [(32, 32)], device="cpu", state_pool=(True,)) == 2 * (1 + 3)
