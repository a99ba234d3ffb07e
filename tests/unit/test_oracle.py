"""Every oracle must be able to fail: each is shown something wrong here and has to say so."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd

from ..support.cases import BY_NAME
from ..support.inputs import make_call
from ..support.oracle import (
    assert_close,
    assert_right,
    relative_error,
)


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


def _state_transposed(**call):
    o, state = fd.chunk_kda(**call)
    return o, state.transpose(-1, -2).reshape(state.shape)


def _last_token_lost(**call):
    o, state = fd.chunk_kda(**call)
    o[:, -1] = 0.0
    return o, state


@pytest.mark.parametrize("broken", [_state_transposed, _last_token_lost])
def test_a_wrong_operator_fails_against_the_truth(broken):
    call = make_call(BY_NAME["state"])
    assert_right(fd.chunk_kda, call)
    with pytest.raises(AssertionError):
        assert_right(broken, call)
