"""Every oracle must be able to fail: each is shown something wrong here and has to say so."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd

from ..support.cases import BY_NAME
from ..support.inputs import make_call
from ..support.oracle import (
    TOLERANCE,
    assert_close,
    assert_right,
    poisoned_memory,
    relative_error,
    rounding_error,
    same_bits,
    state_tolerance,
)


def test_error_above_tolerance_fails_and_names_the_worst_coordinate():
    want = torch.ones(3, 4)
    got = want.clone()
    got[1, 2] = 1.5
    with pytest.raises(AssertionError, match=r"x: relative error 0\.144.*\n  \[1, 2\]: got 1\.5, wanted 1"):
        assert_close("x", got, want, 1e-2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite_fails(bad: float):
    want = torch.ones(1000, 4)
    got = want.clone()
    got[777, 3] = bad
    with pytest.raises(AssertionError, match=r"\[777, 3\]: got"):
        assert_close("x", got, want, 1e9)


def test_one_wrong_row_among_many_fails():
    """Its share of the whole norm, 1/300, is below a bf16 tolerance; the bound on rows sees it."""
    want = torch.randn(90_000, 8)
    got = want.clone()
    got[4321] = 0.0
    assert relative_error(got, want) < 6e-3
    with pytest.raises(AssertionError, match=r"worst row .*\n  \[4321, "):
        assert_close("x", got, want, 6e-3)


def test_wrong_shape_fails():
    with pytest.raises(AssertionError, match=r"x: shape \[2, 3\], wanted \[3, 2\]"):
        assert_close("x", torch.zeros(2, 3), torch.zeros(3, 2), 1.0)


def test_bf16_state_may_be_rounded_once_and_no_more():
    want = torch.randn(64, 64, dtype=torch.float64)
    allowed = state_tolerance(torch.float32, torch.bfloat16)
    assert_close("state", want.bfloat16(), want, allowed)
    with pytest.raises(AssertionError):
        assert_close("state", want * 1.006, want, allowed)


def test_same_bits():
    nan = torch.tensor([torch.nan, 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), None)
    assert same_bits(None, None)


def test_poisoned_memory_shows_what_nobody_wrote():
    with poisoned_memory():
        assert torch.empty(8).isnan().all()
        assert torch.empty(8, dtype=torch.uint8).view(torch.bfloat16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def _state_transposed(**call):
    o, state = fd.chunk_kda(**call)
    return o, state.transpose(-1, -2).reshape(state.shape)


def _last_token_lost(**call):
    o, state = fd.chunk_kda(**call)
    o[:, -1] = 0.0
    return o, state


def _decay_forgotten(**call):
    without = {"g": torch.zeros_like(call["g"]), "A_log": None, "dt_bias": None, "lower_bound": None}
    return fd.chunk_kda(**call | without | {"gate": "none", "use_gate_in_kernel": False})


def _head_order_wrong(**call):
    o, state = fd.chunk_kda(**call)
    return o.flip(2), state


@pytest.mark.parametrize("broken", [_state_transposed, _last_token_lost, _decay_forgotten, _head_order_wrong])
def test_a_wrong_operator_fails_against_the_truth(broken):
    call = make_call(BY_NAME["state"])
    assert_right(fd.chunk_kda, call)
    with pytest.raises(AssertionError):
        assert_right(broken, call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["bounded", "softplus", "state_v_first", "g-50"])
def test_rounding_costs_less_than_the_tolerance_on_ordinary_inputs(name: str, dtype: torch.dtype):
    for error in rounding_error(make_call(BY_NAME[name], dtype)):
        assert 0 < error < TOLERANCE[dtype]
