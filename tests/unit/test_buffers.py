"""Checkpoints and final states in buffers of the caller's: the reference against calls by hand, the operators, replays."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd

from ..support.buffers import (
    BY_NAME,
    CASES,
    SPLITS,
    BufferCase,
    buffer_call,
    buffer_id,
    by_pieces,
    hold_buffers,
    with_memory_of_its_own,
)
from ..support.cases import BF16, FP32
from ..support.decoding import memory_of
from ..support.oracle import TOLERANCE, as_recurrent, assert_close, same_bits, state_tolerance

FINAL = [BY_NAME[name] for name in ("only_final", "only_final_bf16", "no_tokens", "no_sequences")]


def without_checkpoints(call: dict) -> dict:
    return {name: x for name, x in call.items() if not name.startswith("checkpoint")}


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
@pytest.mark.parametrize("buffer_case", CASES + SPLITS, ids=buffer_id)
def test_call_is_the_recurrence(buffer_case: BufferCase, dtype: torch.dtype):
    call = buffer_call(buffer_case, dtype)
    pieces = by_pieces(fd.chunk_kda, call)
    results = hold_buffers(call, TOLERANCE[dtype], lambda states: state_tolerance(dtype, states))
    if pieces.h is not None:
        assert_close("h", results[2], pieces.h, TOLERANCE[dtype])


@pytest.mark.parametrize("name", [x.name for x in CASES + SPLITS if x.every is not None])
def test_regular_checkpoints_change_no_bit(name: str):
    call = buffer_call(BY_NAME[name])
    want = fd.chunk_kda(**without_checkpoints(with_memory_of_its_own(call)))
    found = fd.chunk_kda(**call)
    assert len(found) == len(want)
    assert all(same_bits(x, y) for x, y in zip(found, want))


@pytest.mark.parametrize("buffer_case", FINAL, ids=buffer_id)
@pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda])
def test_a_final_state_is_what_is_returned_without(op, buffer_case: BufferCase):
    call = without_checkpoints(buffer_call(buffer_case))
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
    call = buffer_call(BY_NAME[name])
    other = with_memory_of_its_own(call)
    want = fd.chunk_kda(**call)
    torch._dynamo.reset()
    compiled = torch.compile(lambda arguments: fd.chunk_kda(**arguments), fullgraph=True, backend="aot_eager")
    found = compiled(other)
    assert all(same_bits(x, y) for x, y in zip(found, want))
    for written in ("checkpoint_states", "final_state", "state_pool"):
        if written in call:
            assert same_bits(memory_of(call[written]), memory_of(other[written]))


@pytest.mark.parametrize("name", ["every_packed", "many_offsets", "offsets_pool"])
def test_explain_and_supports_write_nothing(name: str):
    call = buffer_call(BY_NAME[name], BF16)
    before = memory_of(call["checkpoint_states"]).clone()
    assert fd.explain(fd.chunk_kda, **call).chosen == "reference"
    assert fd.supports(fd.chunk_kda, **call)
    assert same_bits(memory_of(call["checkpoint_states"]), before)
    shared = call | {"out": call["v"]}
    assert "out must be in memory of its own; got memory shared with v" in fd.supports(fd.chunk_kda, **shared).reason


def test_warmup_makes_calls_with_buffers():
    one = {"device": "cpu", "packed": (True,), "initial_state": (True,)}
    assert fd.warmup(fd.chunk_kda, [(32, 32)], checkpoint_states=(False, True), **one) == 1 + 2
    assert fd.warmup(fd.chunk_kda, [(32, 32)], final_state=(False, True), output_final_state=(False, True), **one) == 3
    pools = {"state_pool": (True,), "has_initial_state": (True,), "checkpoints": (True,)}
    assert fd.warmup(fd.chunk_kda, [(32, 32)], checkpoint_states=(False, True), **one | pools) == 1 + 2
    assert fd.warmup(fd.fused_recurrent_kda, [(32, 32)], final_state=(True,), **one) == 1
