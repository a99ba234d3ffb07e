"""`prepare`, `recurrence` and the stages of a split on Hopper, interpreted, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashdelta.kernels.hopper import build, recurrence

from ..full import thinned
from ..gpu.calls import HOPPER_CASES, KIMI, UNBOUNDED, assert_same_bits, hold, on_gpu, slack_of
from ..support.cases import BF16, BY_NAME, FP32, Case, case_id
from ..support.inputs import TOKEN_TENSORS
from ..support.oracle import check_h, chunked_truth, covered_tokens, tolerance_of, truth
from ..support.stream_k import Work
from .checks import hold_bits_alone, hold_nan_inside, hopper_call, poisoned, steps_call
from .interpreter import hopper_on_cpu

pytestmark = pytest.mark.slow


def check(case: Case, **options: object) -> None:
    call = hopper_call(case, **options)
    results = poisoned(call)
    hold(call, results, truth(call) if case.tokens < 300 else chunked_truth(call), slack_of(case, call))
    if case.h:
        check_h(call, results[2], tolerance_of(call))


DIMS = {"bounded": (64, 64), "wide_gate": (64, 128), "softplus": (128, 128), "h_v_first": (64, 128)}
CASES = [replace(BY_NAME[name], name=f"{name} K{K} V{V}", H=1, HV=2, K=K, V=V) for name, (K, V) in DIMS.items()]


@pytest.mark.parametrize("case", [*thinned(HOPPER_CASES, 2), *CASES], ids=case_id)
def test_cases(case: Case):
    check(case)


# ---- in which order CTAs and their partitions run ------------------------------------------------------------------------

LONG = replace(KIMI, name="long", H=1, HV=1, K=64, V=64, memory="long")
WIDE = replace(UNBOUNDED, name="wide", H=1, HV=1, lengths=(200, 5, 70), state=FP32, v_first=True, memory="long")
UNEVEN = replace(LONG, name="uneven", H=3, HV=3, lengths=(400, 0, 300, 64, 1), state=FP32)
# a CTA does several tiles, one after another; the loader is as far ahead as it may be, or as late; the last CTA is first
TILES, LATE, LAST = {"sms": 2}, {"workers_first": False, "last_first": True}, {"last_first": True}
TURNS = [
    (replace(LONG, name="rows", B=3, T=200, state=FP32), False, [TILES]),
    (replace(LONG, name="packed", HV=2, lengths=(130, 0, 200, 1, 65), state=FP32, h=True), False, [TILES, LATE]),
    (WIDE, False, [TILES, LATE]),
    (replace(LONG, name="one length", H=5, HV=5, T=500, state=FP32), True, [{"sms": 3}, {"sms": 3} | LAST]),
    (replace(UNEVEN, h=True), True, [{"sms": 3}, {"sms": 3} | LAST]),
    (replace(WIDE, name="wide V64", V=64, lengths=(200, 0, 520), v_first=False), True, [TILES, TILES | LAST]),
]


@pytest.mark.parametrize(
    ("case", "stream_k", "orders"), TURNS, ids=[f"{x.name}{', stream-K' * k}" for x, k, _ in TURNS]
)
def test_turns_change_no_bit(case: Case, stream_k: bool, orders: list[dict], monkeypatch: pytest.MonkeyPatch):
    """States go from CTA to CTA by stream-K."""
    call = hopper_call(case, split=False)
    want = poisoned(call)
    hold(call, want, chunked_truth(call))
    if stream_k:
        offsets = tuple(call["cu_seqlens"].tolist()) if case.lengths else None
        assert Work(case.HV, orders[0]["sms"], case.tokens, case.sequences, offsets).carries > 0
    monkeypatch.setattr(recurrence, "stream_k_pays", lambda problem, ctas: stream_k)
    for order in orders:
        with hopper_on_cpu(**order):
            assert_same_bits(poisoned(call), want, covered_tokens(call))


CHECKED = [
    (replace(LONG, name="rows", B=2, H=2, HV=2, K=128, T=330, state=FP32), 5, False),
    (replace(UNEVEN, K=128, v_first=True), 7, True),
]


@pytest.mark.parametrize(("case", "stored", "steps"), CHECKED, ids=["chunks", "steps"])
def test_stream_k_with_checkpoints_changes_no_bit(
    case: Case, stored: int, steps: bool, monkeypatch: pytest.MonkeyPatch
):
    """Chunk grids that start anew, in what one CTA has of a sequence and in what the next has."""
    monkeypatch.setattr(build, "STEPS_FROM", dict.fromkeys(build.STEPS_FROM, 1 if steps else 999))
    call = steps_call(case)
    offsets = torch.tensor([[64, 144, 288], [16, 48, 0], [0, 208, 288], [32, 64, 0], [0, 0, 0]])[: case.sequences]
    rows = torch.arange(offsets.numel(), dtype=torch.int32).view_as(offsets)

    def run(stream_k: bool) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(recurrence, "stream_k_pays", lambda problem, ctas: stream_k)
        there = torch.zeros(offsets.numel(), *call["initial_state"].shape[1:])
        checkpoints = {"checkpoint_offsets": offsets, "checkpoint_indices": rows, "checkpoint_states": there}
        return *poisoned(call | checkpoints), there

    want = run(False)
    assert want[-1].flatten(1).any(1).sum() == stored
    with hopper_on_cpu(sms=3, last_first=True):
        found = run(True)
    assert_same_bits(found, want, covered_tokens(call))


# ---- splits ----------------------------------------------------------------------------------------------------------

SPLIT = [
    replace(LONG, name="packed", HV=2, lengths=(130, 0, 64, 257), state=FP32),
    replace(KIMI, name="wide", H=1, HV=2, lengths=(63, 0, 330), state=BF16, v_first=True, h=True, memory="long"),
    replace(on_gpu(BY_NAME["decay"]), name="rows", B=2, T=260, memory="long"),
]


@pytest.mark.parametrize(
    ("case", "parts", "sms"),
    [
        *((SPLIT[0], 64, None), (SPLIT[1], 3, None), (SPLIT[2], 3, None)),
        # several transitions and segments for each CTA, also where a transition has more slices than there are SMs
        *((SPLIT[1], 3, 1), (SPLIT[1], 3, 4)),
        # CTAs as many as slices, one after another
        (replace(SPLIT[1], HV=1, lengths=(63, 0, 130)), False, 1),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_split_is_the_recurrence(case: Case, parts: int, sms: int | None):
    with hopper_on_cpu(sms=sms):
        check(case, split=parts)


def test_forced_split_of_a_sequence_is_its_own():
    hold_bits_alone(hopper_call(replace(LONG, lengths=(200, 300), state=FP32), split=3), [0])


def test_nan_stays_in_its_sequence():
    call = hopper_call(replace(KIMI, H=1, HV=1, lengths=(70, 40, 66), state=FP32))
    hold_nan_inside(call, TOKEN_TENSORS)
