"""`fd.fused_kda_decode` without a GPU: the reference, the operator, the launch cache, what it refuses."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd
from flashdelta.runtime.call import check
from flashdelta.runtime.torch_ops import FUSED_DECODE, operator_of
from flashdelta.testing.fused import FUSED_BY_NAME, FUSED_STEPS, FusedStep, make_fused
from flashdelta.testing.oracle import same_bits

from ..support.fused_checks import check_fused
from .conftest import Started


@pytest.mark.parametrize("step", FUSED_STEPS, ids=lambda step: step.name)
def test_reference_is_the_loop(step: FusedStep):
    check_fused(step, torch.float64, "reference")
