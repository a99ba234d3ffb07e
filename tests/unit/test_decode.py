"""The reference of `recurrent_kda` and `commit` against a plain loop, and what holds for any backend on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import BF16, FP32, case_id
from ..support.decoding import BY_NAME, STEPS, Step, make_step, memory_of
from ..support.decoding_checks import (
    OTHER_ROUNDS,
    RECORD_CHECKS,
    REPLAYED,
    check_commit,
    check_replay,
    check_rounds,
    check_step,
    commit_call,
)
from ..support.held import run_held
from ..support.inputs import HARD
from ..support.oracle import assert_close, same_bits

pytestmark = pytest.mark.usefixtures("as_on_gpu")

FP64 = torch.float64


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("step", STEPS, ids=case_id)
def test_reference_is_the_recurrence(step: Step, dtype: torch.dtype):
    check_step(fd.recurrent_kda, step, dtype, "reference")


# ---- commit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rows", [None, (1, 0, 5, 2), (-1, 0, 6, 2)], ids=str)
def test_commit_copies_the_accepted_states(rows: tuple[int, ...] | None, state: torch.dtype):
    check_commit(commit_call(state, rows), "reference")


def test_commit_of_row_0_where_slot_0_is_reserved():
    check_commit(commit_call(rows=(0, 1, 2, 3)) | {"null_index": "non_positive"}, "reference")


def test_commit_of_nothing():
    call = commit_call()
    fd.commit(**call | {name: call[name][:0] for name in ("ssm_state_indices", "num_accepted_tokens")})
    fd.commit(**call | {"intermediate_states": call["intermediate_states"][:0]})
    fd.commit(**call | {"initial_state": call["initial_state"][:0]})
    assert same_bits(memory_of(call["initial_state"]), memory_of(commit_call()["initial_state"]))


# ---- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("step", REPLAYED, ids=case_id)
def test_a_replay_is_the_accepted_state(step: Step, dtype: torch.dtype):
    if dtype == FP64 and step.state == BF16:
        pytest.skip("records are float32 then")
    check_replay(step, dtype, "reference")


@pytest.mark.parametrize("other", OTHER_ROUNDS, ids=str)
@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
def test_many_rounds_of_replay_are_steps_one_by_one(state: torch.dtype, other: dict):
    check_rounds(60, "reference", state=state, **other)


@pytest.mark.parametrize("name", RECORD_CHECKS)
def test_records(name: str):
    RECORD_CHECKS[name](backend="reference")


# ---- laws -----------------------------------------------------------------------------------------------------------


def test_a_constant_decay_is_the_gated_delta_rule():
    """One decay for all of K is a number per head: S <- a S + beta k (v - a k^T S), the gated delta rule."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 1, 32, dtype=FP64) for _ in range(3))
    g, beta = -torch.rand(1, 6, 1, dtype=FP64), torch.rand(1, 6, 1, dtype=FP64)
    S, outputs = torch.zeros(32, 32, dtype=FP64), []
    unit = {name: torch.nn.functional.normalize(x[0, :, 0], dim=-1) for name, x in (("q", q), ("k", k))}
    for i in range(6):
        a, b, row = g[0, i, 0].exp(), beta[0, i, 0], unit["k"][i]
        S = a * (S - b * torch.outer(row, row @ S)) + b * torch.outer(row, v[0, i, 0])
        outputs.append(unit["q"][i] @ S * 32**-0.5)
    o, _ = fd.recurrent_kda(q, k, v, g[..., None].expand(1, 6, 1, 32), beta)
    assert_close("o", o[0, :, 0], torch.stack(outputs), 1e-5)


@pytest.mark.parametrize("hard", ["same_keys", "g-50", "pinned", "zero_rows", "g-1e4"])
def test_hard_inputs_are_finite_and_right(hard: str):
    step = replace(BY_NAME["T17"], gate="lower_bound" if hard == "pinned" else "none", beta="value", state=FP64)
    call = make_step(step, FP64)
    HARD[hard]({name: call[name] for name in ("q", "k", "v", "g", "beta")})
    o, _ = run_held(fd.recurrent_kda, call, 1e-11)
    assert o.isfinite().all()


# ---- reached by another name ----------------------------------------------------------------------------------------


def test_flas_name_gives_the_same():
    call = make_step(BY_NAME["paged"])
    names = {
        "initial_state": "state_pool",
        "ssm_state_indices": "state_indices",
        "beta_is_logit": "use_beta_sigmoid_in_kernel",
    }
    other = {names.get(name, name): x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    for name in ("num_spec_tokens", "update_state"):
        del other[name]
    o, _ = fd.recurrent_kda(**call)
    want, _ = fd.fused_recurrent_kda(**other)
    assert_close("o", o, want, 1e-6)
    assert_close("pool", call["initial_state"], other["state_pool"], 1e-6)
