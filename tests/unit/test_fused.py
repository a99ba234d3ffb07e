"""`fd.fused_kda_decode` without a GPU: the reference, and calls as engines make them."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd

from ..support.fused import FUSED_BY_NAME, FUSED_STEPS, FusedStep, make_fused
from ..support.fused_checks import check_fused, check_rounds_of_fused
from ..support.oracle import same_bits

pytestmark = pytest.mark.usefixtures("as_on_gpu")


@pytest.mark.parametrize("step", FUSED_STEPS, ids=lambda step: step.name)
def test_reference_is_the_loop(step: FusedStep):
    check_fused(step, torch.float64, "reference")


def test_rounds_of_speculation_are_steps_one_by_one():
    check_rounds_of_fused(6, torch.float64, "reference")


def test_takes_the_shapes_of_engines():
    """A dimension of one before the rows, flat gates, `A_log [1, 1, HV, 1]`."""
    step = FUSED_BY_NAME["bias"]
    call, other = make_fused(step), make_fused(step)
    want = fd.fused_kda_decode(**call)
    shapes = {"raw_g": (1, 3, 2, 32), "raw_beta": (1, 3, 2), "output_gate": (1, 3, 2, 32), "A_log": (1, 1, 2, 1)}
    other |= {name: other[name].reshape(shape) for name, shape in shapes.items()}
    assert same_bits(fd.fused_kda_decode(**other), want)
    assert same_bits(other["state"], call["state"])
