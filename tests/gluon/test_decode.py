"""`decode`, `verify` and `commit` on Hopper, interpreted, against a plain loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..gpu.test_decode import MODELS
from ..support.cases import BF16, FP32, case_id
from ..support.decoding import SINGLE_BF16, Step
from ..support.decoding_checks import (
    HOPPER_REPLAYED,
    RECORD_CHECKS,
    WHOLE_HEADS,
    check_replay,
    check_rounds,
    check_step,
    counts_of,
)
from ..support.readouts import check_readout
from .language import WRITTEN_LATE

pytestmark = pytest.mark.slow

KIMI_BF16 = next(step for step in MODELS if step.name == "kimi_bf16")


STEPS = [step for i, step in enumerate(SINGLE_BF16) if i % 4 in (0, 3)]
"""Of two with other head dims one each."""


@pytest.mark.parametrize("step", [*STEPS, replace(KIMI_BF16, H=2, HV=2)], ids=case_id)
def test_step(step: Step, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashdelta.kernels.hopper.decode.DECODE_FEW", 0)
    check_step(fd.recurrent_kda, step, BF16, "hopper")


REPLAYED = {step.name: step for step in HOPPER_REPLAYED}
"""With states in bfloat16, where there are both."""


@pytest.mark.parametrize("step", REPLAYED.values(), ids=lambda step: step.name)
def test_a_replay_is_the_accepted_state(step: Step):
    """What the kernels find is held to the portable ones', which are interpreted too."""
    check_replay(replace(step, H=1, HV=step.HV // step.H), BF16, "hopper")


@pytest.mark.parametrize("step", WHOLE_HEADS[::2], ids=lambda step: step.name)
def test_a_replay_of_whole_heads(step: Step, monkeypatch: pytest.MonkeyPatch):
    """With a CTA a head in `commit`."""
    monkeypatch.setattr("flashdelta.kernels.hopper.commit.SLICES_AT_ONCE", 0)
    check_replay(replace(step, H=1, HV=step.HV // step.H), BF16, "hopper", wide=False)


ROUNDS = [{}, {"state": BF16}, {"S": 9, "gate": "softplus", "group": 2}, {"S": 16}, {"S": 16, "gate": "softplus"}]


@pytest.mark.parametrize("options", ROUNDS, ids=str)
def test_rounds_of_replay_are_steps_one_by_one(options: dict):
    check_rounds(4, "hopper", K=64, dtype=BF16, **options)


@pytest.mark.parametrize("name", RECORD_CHECKS)
def test_records(name: str):
    RECORD_CHECKS[name](backend="hopper", K=64, dtype=BF16)


@pytest.mark.parametrize(
    ("slot", "row", "count", "form"),
    [
        *((1, 2, 3, "slices"), (-1, 2, 3, "heads"), (0, 0, 3, "17 tokens")),
        *((0, 9, 3, "slices"), (0, 2, 1, "heads"), (0, 2, 0, "17 tokens")),
    ],
)
def test_a_commit_whose_indices_the_kernel_before_writes_late(
    slot: int, row: int, count: int, form: str, monkeypatch: pytest.MonkeyPatch
):
    """A state and records are asked for by what indices and the count were before; what counts is what they are."""
    V, state = (128, BF16) if form == "heads" else (64, FP32)
    tokens = 17 if form == "17 tokens" else 4
    monkeypatch.setattr("flashdelta.kernels.hopper.commit.SLICES_AT_ONCE", 0)
    draw = torch.Generator().manual_seed(0)
    records = torch.randn(fd.replay_buffer(3, tokens - 1, 2, 64, V).shape, generator=draw).mul_(0.5)
    records[:, 0, :, counts_of(64, V)] = float(tokens)
    pools = [torch.randn(3, 2, V, 64, generator=draw.manual_seed(1)).to(state) for _ in range(2)]
    given = [torch.tensor([x], dtype=torch.int32) for x in (slot, row, count)]
    late = (records.clone(), *given)
    true = (0, 2, tokens - 1 if tokens < 17 else tokens)
    for x, y in zip(given, true):
        WRITTEN_LATE.append(lambda x=x, y=y: x.fill_(y))
    fd.commit(pools[0], late[0], given[0], given[2], intermediate_state_indices=given[1], backend="hopper")
    assert not WRITTEN_LATE
    known = [torch.tensor([x], dtype=torch.int32) for x in true]
    fd.commit(pools[1], records, known[0], known[2], intermediate_state_indices=known[1], backend="hopper")
    assert torch.equal(*pools) and torch.equal(late[0], records)


def test_an_output_in_float32():
    check_readout(fd.recurrent_kda, BF16, "hopper", state=BF16)
