"""Work tiles on `hopper` that begin where a chunk forgets all before it: segments, and parts of whole sequences."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.hopper import launch, segments
from flashdelta.runtime.call import CACHE
from flashdelta.tools.devices import capture

from ..support.cases import BF16, FP32, Case, case_id
from ..support.inputs import make_call
from ..support.oracle import chunked_truth, covered_tokens, relative_error, same_bits
from .calls import KIMI, assert_same_bits, hold, poisoned

pytestmark = pytest.mark.gpu

CASES = [
    replace(KIMI, name="one", T=8192, H=8, HV=8, state=FP32),
    replace(KIMI, name="packed", lengths=(6000, 100, 0, 2092), H=4, HV=8, state=FP32, v_first=True),
    replace(KIMI, name="parts", T=1024, H=4, HV=4, state=FP32),
    replace(KIMI, name="parts in steps", T=4096, H=32, HV=32, state=FP32),
]
ONE, PACKED, *_ = CASES


def hopper_call(case: Case, memory: str) -> dict:
    return make_call(replace(case, memory=memory), BF16, "cuda") | {"backend": "hopper"}


def in_segments(call: dict) -> tuple[torch.Tensor, ...]:
    found = fd.explain(fd.chunk_kda, **call)
    if found.chosen != "hopper":
        pytest.skip("no Hopper GPU")
    assert (max(found.segments) > 1) == (call["q"].shape[1] == 8192 and call["v"].shape[2] < 32)
    return poisoned(call)


def without_restarts(call: dict) -> tuple[torch.Tensor, ...]:
    try:
        with contextlib.ExitStack() as stack:
            for module in (launch, segments):
                stack.enter_context(mock.patch.object(module, "may_restart", lambda problem: False))
            CACHE.clear()
            return tuple(x.clone() for x in poisoned(call))
    finally:
        CACHE.clear()


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("memory", ["slow", "long", "new", "random"])
def test_as_without_restarts(case: Case, memory: str):
    """To the bit where a channel stays, as nothing is tried there."""
    call = hopper_call(case, memory)
    want = without_restarts(call)
    found = in_segments(call)
    hold(call, found, chunked_truth(call))
    if memory in ("slow", "long"):
        assert_same_bits(found, want, covered_tokens(call))
    if memory == "random":
        for name, x, y in zip(("o", "final_state", "h"), found, want):
            x, y = (x[:, covered_tokens(call)], y[:, covered_tokens(call)]) if name == "o" else (x, y)
            assert relative_error(x.double(), y.double()) < 1e-5, name


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_graph_decides_at_each_replay(case: Case):
    calls = {memory: hopper_call(case, memory) for memory in ("random", "slow")}
    want = {memory: in_segments(call) for memory, call in calls.items()}
    given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in calls["random"].items()}
    replay, results = capture(lambda: fd.chunk_kda(**given))
    for memory in ("slow", "random", "slow"):
        for name, x in calls[memory].items():
            if isinstance(x, torch.Tensor):
                given[name].copy_(x)
        replay()
        assert all(same_bits(x, y) for x, y in zip(results, want[memory])), memory
