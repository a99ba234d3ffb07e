"""Batches of short sequences in one launch, interpreted: the bits of `prepare_steps` and `recurrence`."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.hopper import build

from ..gpu.calls import KIMI, hold, on_gpu
from ..support.cases import BF16, FP32, SHORT_CASES, Case, case_id
from ..support.oracle import covered_tokens, same_bits, truth
from ..support.pools import PLAIN_POOLS, PoolCase, hold_pool, pool_call, pool_id
from .checks import hold_nan_inside, poisoned, steps_call

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "STEPS_FROM", dict.fromkeys(build.STEPS_FROM, 1))
    monkeypatch.setattr(build, "in_one_launch", lambda problem, device: True)


def in_two_launches(call: dict) -> tuple[torch.Tensor, ...]:
    with mock.patch.object(build, "in_one_launch", lambda problem, device: False):
        return poisoned(call)


@pytest.mark.parametrize("case", SHORT_CASES, ids=case_id)
def test_bits_are_those_of_two_launches(case: Case):
    call = steps_call(case)
    want = in_two_launches(call)
    with mock.patch.object(build, "short", wraps=build.short) as ran:
        found = poisoned(call)
    assert ran.call_count == 1
    covered = covered_tokens(call)
    assert same_bits(found[0][:, covered], want[0][:, covered]) and same_bits(found[1], want[1])
    hold(call, found, truth(call))


def test_an_output_that_no_kernel_can_write():
    call = steps_call(replace(KIMI, H=1, HV=2, T=70))
    out = torch.empty(*call["v"].shape[:3], 129, dtype=BF16)[..., 1:]
    assert same_bits(fd.chunk_kda(**call, out=out)[0], in_two_launches(call)[0])


@pytest.mark.parametrize("name", ["q", "v", "g", "initial_state"])
def test_nan_stays_in_its_sequence(name: str):
    hold_nan_inside(steps_call(replace(KIMI, H=1, HV=2, lengths=(70, 40, 66), state=FP32)), [name])


@pytest.mark.parametrize("pool_case", [x for x in PLAIN_POOLS if x.case.lower_bound is not None], ids=pool_id)
def test_pools(pool_case: PoolCase):
    case = replace(on_gpu(pool_case.case), K=128, V=128, chunk_size=64)
    call = pool_call(replace(pool_case, case=case), BF16) | {"split": False, "backend": "hopper"}
    hold_pool(fd.chunk_kda, call, more=4e-3)
