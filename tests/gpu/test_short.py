"""Batches of short sequences in one launch of `hopper`: the bits of two launches, whatever lengths a replay has."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.hopper import build

from ..support.cases import BF16, FP32, Case, case_id
from ..support.inputs import make_call
from ..support.oracle import covered_tokens, same_bits, truth
from .calls import KIMI, captured, hold, in_steps, poisoned

pytestmark = pytest.mark.gpu

CASES = [
    replace(KIMI, name="packed", H=8, HV=16, lengths=(40, 0, 64, 1, *(17,) * 16), state=FP32),
    replace(KIMI, name="two chunks, V first", B=32, H=8, HV=8, T=100, state=BF16, v_first=True),
]


def short_call(case: Case) -> dict:
    call = make_call(case, BF16, "cuda") | {"backend": "hopper"}
    return call | ({"cu_seqlens_cpu": call["cu_seqlens"].cpu()} if case.lengths else {})


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_bits_are_those_of_two_launches(case: Case, other_backend: str):
    call = short_call(case)
    with mock.patch.object(build, "short", wraps=build.short) as ran:
        found = tuple(x.clone() for x in poisoned(call))
    assert ran.called
    with in_steps() as ran, mock.patch.object(build, "in_one_launch", lambda problem, device: False):
        want = poisoned(call)
    assert ran.called
    covered = covered_tokens(call)
    assert same_bits(found[0][:, covered], want[0][:, covered]) and same_bits(found[1], want[1])
    hold(call, found, truth(call))


def test_a_graph_replays_other_lengths(other_backend: str):
    """Within the bound it was captured with, and longer ones."""
    case = CASES[0]
    call = short_call(case)
    with mock.patch.object(build, "short", wraps=build.short) as ran:
        poisoned(call)
    assert ran.called
    graph, results = captured(lambda: fd.chunk_kda(**call))
    for lengths in ((64, *(17,) * 18, 0), (0, *(19,) * 19), (130, 0, *(13,) * 18)):
        offsets = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0).int()
        call["cu_seqlens"].copy_(offsets)
        graph.replay()
        hold(call, results, truth(call))
