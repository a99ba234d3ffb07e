"""Tests here run with the Hopper backend on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from . import language
from .interpreter import hopper_on_cpu


@pytest.fixture(autouse=True)
def on_cpu(as_on_gpu: None) -> Iterator[None]:
    with hopper_on_cpu(sms=16):  # as CTAs without work cost time, too
        yield


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Matrix products of float32 in float32, whatever their precision: tolerances are those of rounding."""
    with mock.patch.object(language, "as_operand", lambda x, dtype, precision: x.astype(np.float32, copy=False)):
        yield
