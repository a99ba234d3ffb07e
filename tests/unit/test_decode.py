"""The reference of `recurrent_kda` and `commit` against a plain loop, and what holds for any backend on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import flashdelta as fd

from ..full import paired
from ..support import decoding_checks as checks
from ..support.cases import BF16, FP32
from ..support.decoding import BY_NAME, STEPS, Step, make_step, memory_of
from ..support.held import run_held
from ..support.inputs import HARD
from ..support.oracle import same_bits

pytestmark = pytest.mark.usefixtures("as_on_gpu")

FP64 = torch.float64
DTYPES = (FP32, FP64, BF16)
steps_and_dtypes = partial(pytest.mark.parametrize, ("step", "dtype"), ids=lambda x: getattr(x, "name", str(x)))


@steps_and_dtypes(paired(STEPS, DTYPES))
def test_reference_is_the_recurrence(step: Step, dtype: torch.dtype):
    checks.check_step(fd.recurrent_kda, step, dtype, "reference")


# ---- commit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rows", [None, (1, 0, 5, 2), (-1, 0, 6, 2), (0, 1, 2, 3)], ids=str)
def test_commit_copies_the_accepted_states(rows: tuple[int, ...] | None, state: torch.dtype):
    null = "non_positive" if rows == (0, 1, 2, 3) else "negative"  # where slot 0 is reserved
    checks.check_commit(checks.commit_call(state, rows) | {"null_index": null}, "reference")


def test_commit_of_nothing():
    call = checks.commit_call()
    for names in (("ssm_state_indices", "num_accepted_tokens"), ("intermediate_states",), ("initial_state",)):
        fd.commit(**call | {name: call[name][:0] for name in names})
    assert same_bits(memory_of(call["initial_state"]), memory_of(checks.commit_call()["initial_state"]))


# ---- replay ---------------------------------------------------------------------------------------------------------


@steps_and_dtypes(paired(checks.REPLAYED, DTYPES))
def test_a_replay_is_the_accepted_state(step: Step, dtype: torch.dtype):
    # records are float32 if states are
    checks.check_replay(step, FP32 if step.state == BF16 and dtype == FP64 else dtype, "reference")


@pytest.mark.parametrize("other", checks.OTHER_ROUNDS, ids=str)
@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
def test_many_rounds_of_replay_are_steps_one_by_one(state: torch.dtype, other: dict):
    checks.check_rounds(25, "reference", state=state, **other)


@pytest.mark.parametrize("name", checks.RECORD_CHECKS)
def test_records(name: str):
    checks.RECORD_CHECKS[name](backend="reference")


# ---- laws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", ["same_keys", "g-50", "pinned", "zero_rows", "g-1e4"])
def test_hard_inputs_are_finite_and_right(hard: str):
    step = replace(BY_NAME["T17"], gate="lower_bound" if hard == "pinned" else "none", beta="value", state=FP64)
    call = make_step(step, FP64)
    HARD[hard]({name: call[name] for name in ("q", "k", "v", "g", "beta")})
    o, _ = run_held(fd.recurrent_kda, call, 1e-11)
    assert o.isfinite().all()
