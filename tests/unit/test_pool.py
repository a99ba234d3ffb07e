"""State pools: the reference against calls by hand, the plan of chunk slots against a plan in plain Python, the operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import flashdelta as fd
from flashdelta.reference.sequences import chunk_slots

from ..support.cases import FP32
from ..support.plans import Plan, plans
from ..support.pools import (
    CHECKPOINT_POOLS,
    PLAIN_POOLS,
    PoolCase,
    call_for,
    hold_pool,
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


# ---- the plan of chunk slots ----------------------------------------------------------------------------------------


@given(plans(wild=True))
def test_no_plan_leads_outside(plan: Plan):
    problem, t = plan.call()
    slots = chunk_slots(problem, t)
    for x in (slots.last, slots.reached):
        assert x.numel() == 0 or (x.min() >= 0 and x.max() < problem.B * problem.slots)
    assert slots.token.numel() == 0 or (slots.token.min() >= 0 and slots.token.max() < max(problem.B * problem.T, 1))
