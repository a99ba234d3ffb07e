"""Pools, checkpoints and final states in tensors of the caller's: the reference against the recurrence, and the plan of chunk
slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashdelta as fd
from flashdelta.reference.sequences import chunk_slots
from flashdelta.runtime.call import check

from ..full import paired
from ..support import pools
from ..support.cases import FP32
from ..support.oracle import same_bits
from ..support.pools import PoolCase, call_for, hold_pool, pool_call, with_memory_of_its_own

pytestmark = pytest.mark.usefixtures("as_on_gpu")

ALL = [
    (fd.chunk_kda, pool_case) for pool_case in pools.PLAIN_POOLS + pools.CHECKPOINT_POOLS + pools.BUFFERS + pools.SPLITS
]
ALL += [(fd.fused_recurrent_kda, x) for x in pools.PLAIN_POOLS + pools.BUFFERS if x.marks is None and x.every is None]


def op_and_case(value: object) -> str | None:
    return value.name if isinstance(value, PoolCase) else None


# ---- what a call computes and where it writes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "pool_case", "dtype"), [(*x, y) for x, y in paired(ALL, (FP32, torch.float64))], ids=op_and_case
)
def test_pool_call_is_the_recurrence(op, pool_case: PoolCase, dtype: torch.dtype):
    hold_pool(op, call_for(op, pool_case, dtype))


@pytest.mark.parametrize("name", [x.name for x in pools.BUFFERS + pools.SPLITS if x.every is not None])
def test_regular_checkpoints_change_no_bit(name: str):
    call = pool_call(pools.BUFFERS_BY_NAME[name])
    plain = {name: x for name, x in with_memory_of_its_own(call).items() if not name.startswith("checkpoint")}
    assert all(same_bits(x, y) for x, y in zip(fd.chunk_kda(**call), fd.chunk_kda(**plain), strict=True))


# ---- the plan of chunk slots ----------------------------------------------------------------------------------------


MARKS = st.one_of(st.just(0), st.integers(0, 12).map(lambda i: 16 * i), st.integers(-(2**62), 2**62))
WILD = st.one_of(st.integers(-200, 400), st.integers(-(2**62), 2**62))


@given(st.data(), st.booleans(), st.integers(1, 3), st.integers(1, 200), st.integers(0, 4), st.sampled_from([32, 64]))
def test_no_plan_leads_outside(data: st.DataObject, packed: bool, B: int, T: int, M: int, C: int):
    """Any offsets of sequences and of checkpoints: zeros, past the end, out of order."""
    offsets = data.draw(st.lists(WILD, min_size=2, max_size=5)) if packed else None
    B, N = (1, len(offsets) - 1) if packed else (B, B)
    x, state = torch.zeros(B, T, 1, 32), torch.zeros(1, 1, 32, 32)
    call = {"q": x, "k": x, "v": x, "g": x, "beta": x[..., 0], "chunk_size": C, "state_pool": state}
    call |= {"state_v_first": False, "use_qk_l2norm_in_kernel": False, "state_indices": torch.zeros(N).long()}
    if packed:
        call["cu_seqlens"] = torch.tensor(offsets)
    if M > 0:
        marks = data.draw(st.lists(MARKS, min_size=N * M, max_size=N * M))
        call["checkpoint_offsets"] = torch.tensor(marks).view(N, M)
        call["checkpoint_indices"] = torch.zeros(N, M).long()
    problem, t = check(fd.chunk_kda, **call)
    slots = chunk_slots(problem, t)
    for x in (slots.last, slots.reached):
        assert x.numel() == 0 or (x.min() >= 0 and x.max() < problem.B * problem.slots)
    assert slots.token.numel() == 0 or (slots.token.min() >= 0 and slots.token.max() < max(problem.B * problem.T, 1))
