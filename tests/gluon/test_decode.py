"""`decode`, `verify` and `commit`, portable and on Hopper, interpreted, against a plain loop."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..full import FULL
from ..gpu.test_decode import MODELS
from ..support import decoding_checks as checks
from ..support.cases import BF16, FP32, case_id
from ..support.decoding import BY_NAME, SINGLE_BF16, STEPS, Step
from ..support.readouts import check_readout
from .language import WRITTEN_LATE

pytestmark = pytest.mark.slow

KIMI_BF16 = next(step for step in MODELS if step.name == "kimi_bf16")


@pytest.mark.parametrize("step", [*SINGLE_BF16, replace(KIMI_BF16, H=2, HV=2)], ids=case_id)
def test_step(step: Step, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashdelta.kernels.hopper.decode.DECODE_FEW", 0)
    checks.check_step(fd.recurrent_kda, step, BF16, "hopper")


LARGE = ("k_first", "bf16", "bf16_k_first", "V64", "K16")
"""Steps with launch parameters of their own for many sequences and heads."""


@pytest.mark.parametrize(
    ("step", "dtype", "few"),
    [
        *((step, FP32, None) for step in STEPS),
        *((BY_NAME[name], torch.float16, None) for name in ("paged", "mixed_rows", "spec_packed", "verify")),
        *((BY_NAME[name], FP32, 0) for name in LARGE),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_portable_step(step: Step, dtype: torch.dtype, few: int | None, monkeypatch: pytest.MonkeyPatch):
    if few is not None:
        monkeypatch.setattr("flashdelta.kernels.triton.decode.DECODE_FEW", few)
    checks.check_step(fd.recurrent_kda, step, dtype, "triton")


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rows", [None, (1, 0, 5, 2), (-1, 0, 6, 2)], ids=str)
def test_commit(rows: tuple[int, ...] | None, state: torch.dtype):
    checks.check_commit(checks.commit_call(state, rows), "triton")
    if rows is not None:
        checks.check_commit(checks.commit_call(state, rows) | {"null_index": "non_positive"}, "triton")


@pytest.mark.parametrize("step", {step.name: step for step in checks.HOPPER_REPLAYED}.values(), ids=case_id)
def test_a_replay_is_the_accepted_state(step: Step):
    """Holds what the kernels find to the portable ones', which are interpreted too."""
    few = {} if FULL or step.B < 18 else {"B": 6, "indices": (0, 1, 2, 3, 4, 5)}
    few |= {"lengths": step.lengths[2::3]} if few and step.lengths else {}
    checks.check_replay(replace(step, H=1, HV=step.HV // step.H, **few), BF16, "hopper")


@pytest.mark.parametrize("step", checks.REPLAYED, ids=case_id)
def test_portable_replay(step: Step):
    checks.check_replay(step, FP32, "triton")


@pytest.mark.parametrize("step", checks.WHOLE_HEADS, ids=lambda step: step.name)
def test_a_replay_of_whole_heads(step: Step, monkeypatch: pytest.MonkeyPatch):
    """With one CTA per head in `commit`."""
    monkeypatch.setattr("flashdelta.kernels.hopper.commit.SLICES_AT_ONCE", 0)
    checks.check_replay(replace(step, H=1, HV=step.HV // step.H), BF16, "hopper", wide=False)


ROUNDS = [{}, {"state": BF16}, {"S": 9, "gate": "softplus", "group": 2}, {"S": 16}, {"S": 16, "gate": "softplus"}]


@pytest.mark.parametrize("options", ROUNDS, ids=str)
def test_rounds_of_replay_are_steps_one_by_one(options: dict):
    checks.check_rounds(4, "hopper", K=64, dtype=BF16, **options)


def test_rounds_of_portable_replay():
    checks.check_rounds(3, "triton", S=16)


RECORDS = itertools.product(
    checks.RECORD_CHECKS, ({"backend": "hopper", "K": 64, "dtype": BF16}, {"backend": "triton"})
)


@pytest.mark.parametrize(
    ("name", "options"),
    [each for i, each in enumerate(RECORDS) if FULL or i % 4 in (0, 3)],
    ids=lambda x: x if isinstance(x, str) else x["backend"],
)
def test_records(name: str, options: dict):
    checks.RECORD_CHECKS[name](**options)


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
    records[:, 0, :, checks.counts_of(64, V)] = float(tokens)
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
