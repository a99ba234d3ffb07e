"""State pools in the kernels, run by Triton's interpreter: the bits of plain calls put together by hand, and the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings

import flashdelta as fd
from flashdelta.kernels.shared.sequences import find_chunk

from ..support.cases import FP32
from ..support.oracle import TOLERANCE, state_tolerance
from ..support.plans import Plan, planned_chunks, plans
from ..support.pools import (
    CHECKPOINT_POOLS,
    PLAIN_POOLS,
    PoolCase,
    as_recurrent_pool,
    hold_pool,
    memory_of,
    piece_by_piece,
    pool_call,
    pool_id,
)

LENGTHS = {
    "one_each": (66, 5, 66),
    "several": (98, 0, 48),
    "at_the_end": (64, 80, 96),
    "chunk32": (50, 34),
    "null_slots": (20, 16, 50),
    "bad_offsets": (66, 0, 33, 40),
}
"""Of cases with checkpoints, which cut there just as in the longer sequences."""

ALIKE = {"one_slot", "all_null", "batch", "unbounded", "packed"}
"""`one`, `past_the_end`, `flags_batch`, `test_kernels.py` and `negative` run the same, and a kernel knows no names."""


def small(pool_case: PoolCase) -> PoolCase:
    """As few chunks as show the thing: without checkpoints, slots have nothing to do with chunks."""
    case = pool_case.case
    most = 64 if pool_case.marks is not None else 9
    lengths = LENGTHS.get(pool_case.name) or (case.lengths and tuple(min(length, most) for length in case.lengths))
    heads = {"H": 1, "HV": 2 if pool_case.name == "gva" else 1}
    return replace(pool_case, case=replace(case, T=min(case.T, most), lengths=lengths, **heads))


PLAIN = [small(pool_case) for pool_case in PLAIN_POOLS if pool_case.name not in ALIKE]
CHECKPOINTS = [
    small(pool_case) for pool_case in CHECKPOINT_POOLS if pool_case.name in LENGTHS or pool_case.name == "cut_bf16"
]
BY_TOKEN = [
    pool_case for pool_case in PLAIN if pool_case.name in ("v_first_int32", "bf16", "non_positive", "flags", "gva")
]


def check(op, pool_case: PoolCase, dtype: torch.dtype) -> None:
    call = pool_call(pool_case, dtype) | {"backend": "triton"}
    call = call if op is fd.chunk_kda else as_recurrent_pool(call)
    hold_pool(op, call, TOLERANCE[dtype], state_tolerance(dtype, call["state_pool"].dtype), [piece_by_piece])


@pytest.mark.parametrize("pool_case", PLAIN + CHECKPOINTS, ids=pool_id)
def test_chunk(pool_case: PoolCase):
    check(fd.chunk_kda, pool_case, FP32)


@pytest.mark.parametrize("pool_case", BY_TOKEN, ids=pool_id)
def test_recurrent(pool_case: PoolCase):
    check(fd.fused_recurrent_kda, pool_case, FP32)


@triton.jit
def find_all(cu_seqlens, checkpoint_offsets, checkpoints, slots, N, T, found, C: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    batch, start, count = find_chunk(cu_seqlens, checkpoint_offsets, checkpoints, slot, slots, N, T, C)
    tl.store(found + slot * 3, batch)
    tl.store(found + slot * 3 + 1, start)
    tl.store(found + slot * 3 + 2, count)


def found_chunks(plan: Plan) -> list[list[int]]:
    """Batch row, first token and token count of every slot, as kernels find them."""
    problem, t = plan.call()
    total = problem.B * problem.slots
    found = torch.full((total, 3), -(10**9))
    arguments = t.cu_seqlens, t.checkpoint_offsets, problem.checkpoints, problem.slots, problem.N, problem.T, found
    find_all[(total,)](*arguments, C=problem.chunk_size)
    return found.tolist()


@settings(max_examples=12)
@given(plans())
def test_kernels_find_the_planned_chunks(plan: Plan):
    found = [
        list(range(batch * plan.T + start, batch * plan.T + start + min(count, plan.C)))
        for batch, start, count in found_chunks(plan)
        if count > 0
    ]
    assert found == [chunk.tokens for chunk in planned_chunks(plan)]


@settings(max_examples=12)
@given(plans(wild=True))
def test_kernels_find_no_chunk_outside(plan: Plan):
    for batch, start, count in found_chunks(plan):
        if count > 0:
            assert 0 <= batch < plan.B
            assert 0 <= start < start + count <= plan.T


BAD_OFFSETS = [(0, 50, 20, 70), (0, 2**40, -(2**40), 2**62)]


@pytest.mark.parametrize(
    ("op", "values"),
    [*((fd.chunk_kda, values) for values in BAD_OFFSETS), (fd.fused_recurrent_kda, BAD_OFFSETS[1])],
    ids=lambda x: getattr(x, "__name__", str(x)),  # an address differs from worker to worker
)
def test_bad_offsets_and_indices_touch_nothing_outside(op, values: tuple[int, ...]):
    """The pool and `out` lie amid numbers that must stay."""
    N = len(values) - 1
    pool_case = replace(
        PLAIN_POOLS[0], indices=(5, 2**40, -(2**62))[:N], marks=(16, 2**50, 48)[:N], mark_slots=(2**40, 1, 2)[:N], gap=8
    )
    case = pool_case.case
    sequences = replace(pool_case, case=replace(case, lengths=(case.T, *(0,) * (N - 1)), HV=1))
    call = pool_call(sequences) | {"backend": "triton", "cu_seqlens": torch.tensor(values)}
    call = call if op is fd.chunk_kda else as_recurrent_pool(call)
    guarded = torch.zeros(1, 70 + 140, 1, 64)
    memory = memory_of(call["state_pool"])
    before, pitch = memory.clone(), call["state_pool"].stride(0)
    op(**call, out=guarded[:, 70:140])
    assert guarded[:, :70].eq(0).all() and guarded[:, 140:].eq(0).all()
    changed = (memory != before).nonzero().flatten() - 64
    may_be = torch.tensor([5] if op is fd.fused_recurrent_kda else [1, 2, 5])
    assert torch.isin(changed // pitch, may_be).all()
    assert (changed % pitch < pitch - 8).all()
