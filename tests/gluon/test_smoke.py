"""One call of each kind that the Hopper kernels run, interpreted: what `make check` has of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashdelta.kernels.hopper import build

from ..gpu.calls import on_gpu
from ..support.cases import BF16, BY_NAME, Case
from ..support.decoding import SINGLE_BF16
from ..support.decoding_checks import HOPPER_REPLAYED, check_replay
from ..support.wy import WyCase
from . import test_backward, test_chunk, test_decode, test_steps
from .checks import check_steps


@pytest.mark.parametrize("name", ["bounded", "softplus", "packed"])
def test_prefill(name: str):
    test_chunk.check(on_gpu(BY_NAME[name]))


def test_split():
    test_chunk.check(test_chunk.SPLIT[0], split=3)


@pytest.mark.parametrize("case", [replace(test_steps.SMALL, T=65), test_steps.FREE], ids=["bounded", "any"])
def test_steps_of_32_tokens(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "STEPS_FROM", dict.fromkeys(build.STEPS_FROM, 1))
    check_steps(case)


def test_gradients():
    test_backward.check(replace(on_gpu(BY_NAME["bounded"]), H=1, HV=2), "hopper")


def test_wy():
    test_backward.check_hopper_wy(WyCase("smoke", "", K=128, V=128, H=1, HV=2))


def test_step(monkeypatch: pytest.MonkeyPatch):
    test_decode.test_step(SINGLE_BF16[0], monkeypatch)


def test_replay():
    check_replay(replace(HOPPER_REPLAYED[1], H=1, HV=1), BF16, "hopper")
