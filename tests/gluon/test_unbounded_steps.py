"""Steps of 32 tokens for gates without a bound, interpreted, against float64 and against chunks of 64."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from flashdelta.kernels.hopper import build, recurrence

from ..gpu.calls import UNBOUNDED, assert_same_bits, hold
from ..support.cases import BF16, FP32, Case
from ..support.decays import KINDS, decays_call
from ..support.inputs import TOKEN_TENSORS
from ..support.oracle import covered_tokens, relative_error, same_bits, truth
from ..unit.test_hopper_choice import TABLE
from .checks import check_steps, hold_bits_alone, hold_errors, hold_nan_inside, poisoned, steps_call
from .interpreter import hopper_on_cpu

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def unbounded_steps(steps: bool = True) -> Iterator[None]:
    with mock.patch.object(build, "STEPS_FROM", dict.fromkeys(build.STEPS_FROM, 1 if steps else 1 << 30)):
        yield


@pytest.fixture(autouse=True)
def in_steps() -> Iterator[None]:
    with unbounded_steps():
        yield


NAMES = (
    *("decay", "softplus_broad", "logsigmoid", "wide_decay", "gva3_unsafe", "final_v_first", "packed_all_empty"),
    *(
        "packed_gva",
        "tokens_innermost",
        "same_keys_unsafe",
        "g-50",
        "g_mixed",
        "forget_channels",
        "zero_rows_unbounded",
    ),
)
TABLE_NAMED = {case.name: case for case in TABLE}


@pytest.mark.parametrize(("name", "K"), zip(NAMES, itertools.cycle((64, 128))))
def test_cases(name: str, K: int):
    check_steps(replace(TABLE_NAMED[name], K=K))


SMALL = replace(UNBOUNDED, H=1, HV=2, V=64, T=192, state=FP32)
FORGETFUL = replace(SMALL, name="forgetful", memory="new")


@pytest.mark.parametrize(
    ("T", "memory", "K"),
    [
        *((1, "new", 64), (8, "short", 128), (9, "new", 128), (17, "short", 64), (32, "new", 64), (33, "short", 128)),
        *((64, "new", 128), (65, "short", 64), (130, "new", 64)),
    ],
)
def test_lengths(T: int, memory: str, K: int):
    check_steps(replace(SMALL, name="length", T=T, memory=memory, v_first=T % 2 == 0, K=K))


PLAIN = replace(SMALL, gate="none", beta="value")

HARD = [
    *(replace(SMALL, name=f"{memory} memory", memory=memory) for memory in ("short", "long", "new", "random")),
    *(replace(PLAIN, name=hard, hard=hard) for hard in ("g0", "g-50", "same_keys_2", "beta_to_2", "key_norms")),
]
MORE = (1.07, 1.2)
"""How many times the errors of chunks of 64 those of `o` and the final state may be, as in `test_steps`."""


def compare(call: dict) -> None:
    want, found = truth(call), poisoned(call)
    with unbounded_steps(False):
        before = poisoned(call)
    assert not same_bits(found[0], before[0])
    hold_errors(found, before, want, MORE)


@pytest.mark.parametrize(("case", "K"), zip(HARD, itertools.cycle((64, 128))), ids=[case.name for case in HARD])
def test_errors_are_those_of_chunks(case: Case, K: int):
    compare(steps_call(replace(case, K=K)))


def steps_decays(kind: str, K: int = 128) -> dict:
    return decays_call(kind, SMALL.T, SMALL.H, K=K)


def hold_decays(kind: str) -> None:
    call = steps_decays(kind)
    hold(call, poisoned(call), truth(call))


@pytest.mark.parametrize(("kind", "K"), zip(KINDS, itertools.cycle((128, 64))))
def test_errors_of_decays_are_those_of_chunks(kind: str, K: int):
    compare(steps_decays(kind, K))


@pytest.mark.parametrize(("rate", "K"), [(-6.0, 64), (1.0, 128)], ids=["slow", "forgetful"])
def test_large_inputs_of_the_gate(rate: float, K: int):
    """Whose exponential overflows, also where no token is."""
    call = steps_call(replace(SMALL, name="large inputs", T=70, K=K))
    call["A_log"] = torch.full_like(call["A_log"], rate)
    call["dt_bias"] = call["dt_bias"].clone()
    call["dt_bias"].view(-1)[::5] += 150.0
    hold(call, poisoned(call), truth(call))


PACKED = replace(FORGETFUL, name="packed", lengths=(130, 0, 33, 1, 64, 95))


def test_bits_are_a_sequence_s_own():
    hold_bits_alone(steps_call(PACKED), (2, 4, 5))


def test_few_ctas_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    call = steps_call(replace(PACKED, HV=3, H=3, lengths=(200, 0, 320, 64, 1)))
    want = poisoned(call)
    monkeypatch.setattr(recurrence, "stream_k_pays", lambda problem, ctas: True)
    with hopper_on_cpu(sms=4, last_first=True):
        assert_same_bits(poisoned(call), want, covered_tokens(call))


@pytest.mark.parametrize(("name", "K"), zip(TOKEN_TENSORS, itertools.cycle((64, 128))))
def test_nan_stays_in_its_sequence(name: str, K: int):
    hold_nan_inside(steps_call(replace(PACKED, lengths=(70, 40, 66), K=K)), [name])


def test_no_factor_loses_what_its_product_has():
    """Few tokens have values, and decay by exp(-24) to the step's reference; to get there from the middle of their 8 rows takes
    exp(-104), which float32 does not hold."""
    call = steps_decays("steep, then flat")
    row = torch.arange(call["g"].shape[1]) % 16
    steps = torch.where(row // 4 == 1, -20.0, torch.where(row < 8, -1.0, -2.953125))
    g = torch.zeros_like(call["g"]) + steps[None, :, None, None].to(BF16)
    few = (torch.arange(g.shape[1]) % 32 == 7)[None, :, None, None]
    call |= {"g": g, "v": torch.where(few, call["v"], 0.0).to(BF16), "initial_state": None}
    want, found = truth(call), poisoned(call)
    later = slice(16, 24)
    assert relative_error(found[0][:, later], want[0][:, later]) < 1e-2
