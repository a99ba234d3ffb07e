"""Segments that are tried for what they forget, interpreted: against float64, and against whole sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.hopper import prepare, segments
from flashdelta.kernels.hopper.device import trial
from flashdelta.problem.split import SplitCosts

from ..gpu.calls import KIMI, UNBOUNDED, assert_same_bits, hold
from ..support.cases import BF16, FP32, Case, case_id
from ..support.oracle import assert_close, chunked_truth, covered_tokens, relative_error, same_bits
from ..support.trials import EXPLICIT, OTHERS, explicit_call, moved
from .checks import hopper_call, poisoned
from .interpreter import hopper_on_cpu, interpreted

pytestmark = pytest.mark.slow

FREE = SplitCosts(step=100, transition=0, compose=1, fixed=0, shortest=1, margin=0)


@contextlib.contextmanager
def split_freely(tries: bool) -> Iterator[None]:
    """Segments wherever there are CTAs for them, on trial or not."""
    changed = {"SPLIT_COSTS": FREE} | ({} if tries else {"may_try": lambda problem: False})
    with (
        mock.patch.multiple(segments, **changed),
        mock.patch.object(prepare, "SPLIT_COSTS", FREE),
        hopper_on_cpu(sms=24),
    ):
        yield


@pytest.fixture(autouse=True)
def on_trial() -> Iterator[None]:
    with split_freely(True):
        yield


@contextlib.contextmanager
def trials() -> Iterator[list]:
    """A list that gets an entry for each CTA's trial."""
    function, found = interpreted(trial.trial), []
    real = function.python

    def counted(*arguments: Any) -> Any:
        found.append(None)
        return real(*arguments)

    with mock.patch.dict(function.__dict__, python=counted):
        yield found


def assert_untried(call: dict) -> None:
    """No trial runs, and the bits are those of segments that are not on trial."""
    with trials() as ran:
        found = in_segments(call)
    assert not ran
    assert_as_without_trials(call, found)


def assert_as_without_trials(call: dict, found: tuple[torch.Tensor, ...]) -> None:
    with split_freely(False):
        assert_same_bits(found, in_segments(call), covered_tokens(call))


def in_segments(call: dict) -> tuple[torch.Tensor, ...]:
    assert max(fd.explain(fd.chunk_kda, **call).segments) > 1
    return poisoned(call)


ONE = replace(KIMI, name="one", H=1, HV=1, T=300, state=FP32)
PACKED = replace(KIMI, name="packed", H=1, HV=2, lengths=(130, 0, 64, 257), state=FP32, v_first=True)
HALF = replace(UNBOUNDED, name="half", H=1, HV=1, K=64, V=64, T=260, state=BF16, h=True)
CASES = [ONE, PACKED, HALF]


@pytest.mark.parametrize("memory", ["slow", "long"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_where_a_channel_stays_nothing_is_tried(case: Case, memory: str):
    call = hopper_call(replace(case, memory=memory))
    assert_untried(call)
    hold(call, in_segments(call), chunked_truth(call))


@pytest.mark.parametrize(("channel", "gate"), [(3, -1 / 64), (100, -1 / 64), (7, torch.nan)])
def test_one_channel_that_stays_is_enough(channel: int, gate: float):
    g = torch.full((6, 64, 128), -5.0)
    g[..., channel] = gate
    assert_untried(explicit_call(replace(EXPLICIT, H=1, HV=1, T=384), g))


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_what_is_forgotten(case: Case, last_first: bool):
    call = hopper_call(replace(case, memory="random"))
    whole = poisoned(call | {"split": False})
    with hopper_on_cpu(sms=24, last_first=last_first), trials() as ran:
        found = in_segments(call)
    assert ran
    hold(call, found, chunked_truth(call))
    for name, x, y in zip(("o", "final_state", "h"), found, whole):
        x, y = (x[:, covered_tokens(call)], y[:, covered_tokens(call)]) if name == "o" else (x, y)
        assert relative_error(x.double(), y.double()) < 1e-6, name


def test_a_segment_starts_from_what_it_remembers():
    """NaN of the first segment is gone where decays forget, and stays where they don't: each head is tried by itself."""
    case = replace(KIMI, H=1, HV=2, T=320, state=FP32, memory="random")
    call = hopper_call(case)
    call["v"][:, :64] = torch.nan
    # a bias of -30 makes the second head's decays 1
    call["dt_bias"] = torch.stack([torch.zeros(128), torch.full((128,), -30.0)]).flatten()
    o, state = in_segments(call)
    assert o[:, :64].isnan().all()
    assert o[:, 256:, 0].isfinite().all() and state[:, 0].isfinite().all()
    assert o[:, 64:, 1].isnan().all() and state[:, 1].isnan().all()


def test_a_pool_is_read_before_it_is_written():
    """The last segment stores where the first one reads, and may be done first."""
    call = hopper_call(replace(KIMI, H=1, HV=1, T=320, state=FP32, v_first=True, memory="random"))
    pool = torch.cat([torch.randn_like(call["initial_state"]), call.pop("initial_state")])
    call |= {"state_pool": pool, "state_indices": torch.tensor([1], dtype=torch.int32), "output_final_state": False}
    alone = call | {"state_pool": pool.clone(), "split": False}
    want, _ = poisoned(alone)
    with hopper_on_cpu(sms=24, last_first=True):
        found, _ = in_segments(call)
    assert relative_error(found.double(), want.double()) < 1e-6
    assert_close("pool", pool, alone["state_pool"], 1e-6)
    assert same_bits(pool[0], alone["state_pool"][0])


@pytest.mark.parametrize("other", OTHERS)
def test_what_moves_between_channels_is_remembered(other: int):
    call = moved(replace(EXPLICIT, H=1, HV=1, T=384), other)
    call["initial_state"] *= 64
    with trials() as ran:
        found = in_segments(call)
    assert ran
    hold(call, found, chunked_truth(call))
    assert_as_without_trials(call, found)


def test_many_small_decays_are_remembered():
    """Each of them is as small as M may be, not all together."""
    call = explicit_call(replace(EXPLICIT, H=1, HV=1, T=384), torch.full((6, 64, 128), -0.4375))
    call["beta"].zero_()
    with trials() as ran:
        found = in_segments(call)
    assert ran
    assert_as_without_trials(call, found)


@pytest.mark.parametrize("remembered", [(1,), (4,), (0, 1, 3, 4, 5)], ids=str)
def test_each_chunk_is_tried_by_itself(remembered: tuple[int, ...]):
    """The others forget at their ends."""
    g = torch.full((6, 64, 128), -1 / 64)
    g[[i for i in range(6) if i not in remembered], 40:] = -5.0
    call = explicit_call(replace(EXPLICIT, H=1, HV=1, T=384), g)
    with trials() as ran:
        found = in_segments(call)
    # of all segments but the last; M of the first one is not needed
    assert len(ran) == sum(2 if i == 0 else 4 for i in range(5) if i not in remembered)
    hold(call, found, chunked_truth(call))
