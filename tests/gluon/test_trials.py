"""Segments that are tried for what they forget, interpreted: against float64, and against whole sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.hopper import prepare, segments
from flashdelta.kernels.hopper.device import trial
from flashdelta.problem.split import SplitCosts

from ..gpu.calls import KIMI, UNBOUNDED, assert_same_bits, hold
from ..support.cases import BF16, FP32, Case, case_id
from ..support.decays import EXPLICIT, OTHERS, explicit_call, moved
from ..support.oracle import assert_close, chunked_truth, covered_tokens, relative_error, same_bits
from .checks import hopper_call, poisoned
from .interpreter import hopper_on_cpu, interpreted

pytestmark = pytest.mark.slow

FREE = SplitCosts(step=100, transition=0, compose=1, fixed=0, shortest=1, margin=0)


@contextlib.contextmanager
def split_freely(tries: bool = True, last_first: bool = False) -> Iterator[None]:
    """Segments wherever there are CTAs for them, on trial or not."""
    changed = {"SPLIT_COSTS": FREE} | ({} if tries else {"may_try": lambda problem: False})
    costs = mock.patch.object(prepare, "SPLIT_COSTS", FREE)
    with mock.patch.multiple(segments, **changed), costs, hopper_on_cpu(sms=24, last_first=last_first):
        yield


@pytest.fixture(autouse=True)
def on_trial() -> Iterator[None]:
    with split_freely():
        yield


def in_segments(call: dict) -> tuple[tuple[torch.Tensor, ...], int]:
    """The results, and how many trials ran: one for each CTA's."""
    assert max(fd.explain(fd.chunk_kda, **call).segments) > 1
    function = interpreted(trial.trial)
    with mock.patch.dict(function.__dict__, python=mock.Mock(wraps=function.python)):
        return poisoned(call), function.python.call_count


def check(call: dict, trials: bool | int, as_without: bool, right: bool = True) -> tuple[torch.Tensor, ...]:
    """Whether, or how many, trials run; whether the bits are those of segments that are not on trial."""
    found, ran = in_segments(call)
    assert ran == trials if type(trials) is int else bool(ran) == trials
    if as_without:
        with split_freely(tries=False):
            assert_same_bits(found, in_segments(call)[0], covered_tokens(call))
    if right:
        hold(call, found, chunked_truth(call))
    return found


CASES = [
    replace(KIMI, name="one", H=1, HV=1, T=300, state=FP32),
    replace(KIMI, name="packed", H=1, HV=2, lengths=(130, 0, 64, 257), state=FP32, v_first=True),
    replace(UNBOUNDED, name="half", H=1, HV=1, K=64, V=64, T=260, state=BF16, h=True),
]
SHORT = replace(EXPLICIT, H=1, HV=1, T=384)


@pytest.mark.parametrize(("channel", "gate"), [(3, -1 / 64), (100, -1 / 64), (7, torch.nan)])
def test_one_channel_that_stays_is_enough(channel: int, gate: float):
    g = torch.full((6, 64, 128), -5.0)
    g[..., channel] = gate
    check(explicit_call(SHORT, g), trials=False, as_without=True, right=False)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_what_is_forgotten(case: Case, last_first: bool):
    call = hopper_call(replace(case, memory="random"))
    whole = poisoned(call | {"split": False})
    with split_freely(last_first=last_first):
        found = check(call, trials=True, as_without=False)
    for name, x, y in zip(("o", "final_state", "h"), found, whole):
        x, y = (x[:, covered_tokens(call)], y[:, covered_tokens(call)]) if name == "o" else (x, y)
        assert relative_error(x.double(), y.double()) < 1e-6, name


def test_a_segment_starts_from_what_it_remembers():
    """NaN of the first segment is gone where decays forget, and stays where they don't: each head is tried by itself."""
    call = hopper_call(replace(KIMI, H=1, HV=2, T=320, state=FP32, memory="random"))
    call["v"][:, :64] = torch.nan
    # a bias of -30 makes the second head's decays 1
    call["dt_bias"] = torch.stack([torch.zeros(128), torch.full((128,), -30.0)]).flatten()
    (o, state), _ = in_segments(call)
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
    with split_freely(last_first=True):
        (found, _), _ = in_segments(call)
    assert relative_error(found.double(), want.double()) < 1e-6
    assert_close("pool", pool, alone["state_pool"], 1e-6)
    assert same_bits(pool[0], alone["state_pool"][0])


@pytest.mark.parametrize("other", [*OTHERS, None], ids=str)
def test_what_moves_between_channels_is_remembered(other: int | None):
    """And many small decays: each of them is as small as M may be, not all together."""
    if other is None:
        call = explicit_call(SHORT, torch.full((6, 64, 128), -0.4375))
        call["beta"].zero_()
    else:
        call = moved(SHORT, other)
        call["initial_state"] *= 64
    check(call, trials=True, as_without=True, right=other is not None)
