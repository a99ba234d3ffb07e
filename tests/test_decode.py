"""The reference of `recurrent_kda` and `commit` against a plain loop, and what holds for any backend on the CPU."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd

from .cases import BF16, FP32
from .decoding import STEPS, Step, step_id
from .decoding_checks import check_step

FP64 = torch.float64


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("step", STEPS, ids=step_id)
def test_reference_is_the_recurrence(step: Step, dtype: torch.dtype):
    check_step(fd.recurrent_kda, step, dtype, "reference")
