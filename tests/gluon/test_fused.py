"""`fused_kda_decode` on Hopper, interpreted, against a plain loop in float64."""

from __future__ import annotations

import pytest
import torch

from flashdelta.testing.cases import BF16, FP32
from flashdelta.testing.fused import FUSED_STEPS, FusedStep

from ..support.fused_checks import HOPPER_FUSED, check_fused


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("step", HOPPER_FUSED, ids=lambda step: step.name)
def test_kernel_is_the_loop(step: FusedStep, dtype: torch.dtype):
    check_fused(step, dtype, "hopper")


@pytest.mark.slow
@pytest.mark.parametrize("step", FUSED_STEPS, ids=lambda step: step.name)
def test_the_portable_kernel_stays_inside_its_tensors(step: FusedStep):
    check_fused(step, BF16, "triton")
