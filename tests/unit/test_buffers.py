"""Checkpoints and final states in buffers of the caller's: the reference against calls by hand, the operators, replays."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd

from ..support.cases import FP32
from ..support.decoding import memory_of
from ..support.oracle import as_recurrent, same_bits
from ..support.pools import BUFFERS, SPLITS, PoolCase, hold_pool, pool_call, pool_id, with_memory_of_its_own
from ..support.pools import BUFFERS_BY_NAME as BY_NAME

pytestmark = pytest.mark.usefixtures("as_on_gpu")

FINAL = [BY_NAME[name] for name in ("only_final", "only_final_bf16", "no_tokens", "no_sequences")]


def without_checkpoints(call: dict) -> dict:
    return {name: x for name, x in call.items() if not name.startswith("checkpoint")}


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
@pytest.mark.parametrize("pool_case", BUFFERS + SPLITS, ids=pool_id)
def test_call_is_the_recurrence(pool_case: PoolCase, dtype: torch.dtype):
    hold_pool(fd.chunk_kda, pool_call(pool_case, dtype))


@pytest.mark.parametrize("name", [x.name for x in BUFFERS + SPLITS if x.every is not None])
def test_regular_checkpoints_change_no_bit(name: str):
    call = pool_call(BY_NAME[name])
    want = fd.chunk_kda(**without_checkpoints(with_memory_of_its_own(call)))
    found = fd.chunk_kda(**call)
    assert len(found) == len(want)
    assert all(same_bits(x, y) for x, y in zip(found, want))


@pytest.mark.parametrize("pool_case", FINAL, ids=pool_id)
@pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda])
def test_a_final_state_is_what_is_returned_without(op, pool_case: PoolCase):
    call = without_checkpoints(pool_call(pool_case))
    call = call if op is fd.chunk_kda else as_recurrent(call)
    given = call.pop("final_state")
    want = op(**call | {"output_final_state": True})[1]
    for asked in (False, True):
        found = op(**call | {"output_final_state": asked}, final_state=given.fill_(torch.nan))
        assert found[1] is given
        narrow = min(given.dtype, want.dtype, key=lambda dtype: dtype.itemsize)
        assert same_bits(given.to(narrow), want.to(narrow))


@pytest.mark.parametrize("name", ["every_packed", "many_offsets", "offsets_pool", "split_every"])
def test_traced_calls_write_the_buffers(name: str):
    call = pool_call(BY_NAME[name])
    other = with_memory_of_its_own(call)
    want = fd.chunk_kda(**call)
    torch._dynamo.reset()
    compiled = torch.compile(lambda arguments: fd.chunk_kda(**arguments), fullgraph=True, backend="aot_eager")
    found = compiled(other)
    assert all(same_bits(x, y) for x, y in zip(found, want))
    for written in ("checkpoint_states", "final_state", "state_pool"):
        if written in call:
            assert same_bits(memory_of(call[written]), memory_of(other[written]))
