"""State pools: the reference against calls by hand, the plan of chunk slots against a plan in plain Python, the operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given

import flashdelta as fd
from flashdelta.reference.sequences import chunk_slots
from flashdelta.runtime.call import check

from ..support.cases import BF16, FP32
from ..support.oracle import TOLERANCE, assert_close, same_bits, state_tolerance
from ..support.plans import Plan, planned_chunks, plans
from ..support.pools import (
    BY_NAME,
    CHECKPOINT_POOLS,
    LONG,
    PLAIN_POOLS,
    PoolCase,
    call_for,
    copied,
    gathered_and_scattered,
    initial_states,
    memory_of,
    pool_call,
    pool_id,
    pool_truth,
    untouched_memory,
    without_pool,
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
    call = call_for(op, pool_case, dtype)
    want_o, want_pool = pool_truth(call)
    pool = call["state_pool"]
    before, untouched = memory_of(copied(pool)), untouched_memory(call)
    o, final_state = op(**call)
    assert final_state is None
    assert o.dtype == dtype
    assert_close("o", o, want_o, TOLERANCE[dtype])
    assert_close("pool", pool, want_pool, state_tolerance(dtype, pool.dtype))
    assert same_bits(memory_of(pool)[untouched], before[untouched])


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("pool_case", PLAIN_POOLS, ids=pool_id)
def test_pool_call_has_the_bits_of_gather_call_scatter(pool_case: PoolCase, op):
    call = call_for(op, pool_case)
    want_o, want_pool = gathered_and_scattered(op, call)
    o, _ = op(**call)
    assert same_bits(o, want_o)
    assert same_bits(memory_of(call["state_pool"]), memory_of(want_pool))


def test_checkpoints_at_chunk_ends_change_no_bit():
    call = pool_call(BY_NAME["chunk_ends"])
    plain = pool_call(replace(BY_NAME["chunk_ends"], marks=None))
    o, _ = fd.chunk_kda(**call)
    want, _ = fd.chunk_kda(**plain)
    assert same_bits(o, want)
    assert same_bits(call["state_pool"][[0, 1, 2]], plain["state_pool"][[0, 1, 2]])


def test_intermediate_states_come_with_a_pool():
    call = pool_call(BY_NAME["packed"])
    asked = {"return_intermediate_states": True}
    want = fd.chunk_kda(**without_pool(call) | asked, initial_state=initial_states(call))
    o, none, h = fd.chunk_kda(**call | asked)
    assert none is None
    assert same_bits(o, want[0])
    assert same_bits(h, want[2])


@pytest.mark.parametrize("op", BOTH)
def test_out_may_be_given(op):
    call = call_for(op, BY_NAME["packed"])
    want_pool = copied(call["state_pool"])
    want, _ = op(**call | {"state_pool": want_pool})
    out = torch.full_like(want, torch.nan)
    o, _ = op(**call, out=out)
    assert o is out
    assert same_bits(out, want)
    assert same_bits(call["state_pool"], want_pool)


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


@pytest.mark.parametrize("op", BOTH)
def test_explain_takes_a_pool_and_writes_nothing(op):
    call = call_for(op, BY_NAME["packed"], BF16)
    before = memory_of(call["state_pool"]).clone()
    assert fd.explain(op, **call).chosen == "reference"
    assert same_bits(memory_of(call["state_pool"]), before)


def test_warmup_makes_pool_calls():
    pools = {"state_pool": (False, True), "has_initial_state": (True,), "checkpoints": (False, True)}
    assert fd.warmup(fd.chunk_kda, [(32, 32)], device="cpu", packed=(True,), **pools) == 2 + 2
    assert fd.warmup(fd.fused_recurrent_kda, [(32, 32)], device="cpu", state_pool=(True,)) == 2 * (1 + 3)


def test_problem_of_a_pool_call():
    problem, t = check(fd.chunk_kda, **pool_call(BY_NAME["one_each"]))
    assert (problem.has_pool, problem.pool_slots, problem.checkpoints, problem.lowest_index) == (True, 6, 1, 0)
    assert not problem.has_initial_state and not problem.output_final_state and problem.stores_final_state
    assert problem.slots == sum(LONG.lengths) // 64 + 3 * 2
    assert t.checkpoint_offsets.shape == t.checkpoint_indices.shape == (3, 1)
