"""The kernels of `recurrent_kda` and `commit`, run by Triton's interpreter, against a plain loop."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.triton import decode
from flashdelta.runtime.warmup import WARM_MANY

from ..support.cases import BF16, FP32, case_id
from ..support.decoding import BY_NAME, STEPS, Step
from ..support.decoding_checks import (
    RECORD_CHECKS,
    REPLAYED,
    check_commit,
    check_replay,
    check_rounds,
    check_step,
    commit_call,
)


@pytest.mark.parametrize("step", STEPS, ids=case_id)
def test_step(step: Step):
    check_step(fd.recurrent_kda, step, FP32, "triton")


@pytest.mark.parametrize("name", ["paged", "mixed_rows", "spec_packed", "verify"])
def test_step_fp16(name: str):
    check_step(fd.recurrent_kda, BY_NAME[name], torch.float16, "triton")


@pytest.mark.parametrize("name", ["k_first", "bf16", "bf16_k_first", "V64", "K16"])
def test_step_of_a_large_batch(name: str, monkeypatch):
    """The launch parameters for many sequences and heads, on a small step. (fp32 states with V first have no others.)"""
    monkeypatch.setattr(decode, "DECODE_FEW", 0)
    check_step(fd.recurrent_kda, BY_NAME[name], FP32, "triton")


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rows", [None, (1, 0, 5, 2), (-1, 0, 6, 2)], ids=str)
def test_commit(rows: tuple[int, ...] | None, state: torch.dtype):
    check_commit(commit_call(state, rows), "triton")
    if rows is not None:
        check_commit(commit_call(state, rows) | {"null_index": "non_positive"}, "triton")


@pytest.mark.parametrize("step", REPLAYED[::2], ids=case_id)
def test_replay(step: Step):
    check_replay(step, FP32, "triton")


def test_rounds_of_replay():
    check_rounds(3, "triton", S=16)


@pytest.mark.parametrize("name", [*RECORD_CHECKS][::2])
def test_records(name: str):
    RECORD_CHECKS[name](backend="triton")


def test_warmup_runs(monkeypatch: pytest.MonkeyPatch):
    assert 2 * WARM_MANY > decode.DECODE_FEW
    monkeypatch.setattr("flashdelta.runtime.warmup.WARM_MANY", 2)
    monkeypatch.setattr(decode, "DECODE_FEW", 3)
    options = {"dtype": FP32, "device": "cpu", "backend": "triton", "speculative": True}
    assert fd.warmup(fd.recurrent_kda, [(32, 32)], **options) == (1 + 3) + (12 + 12)
