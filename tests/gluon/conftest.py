"""Tests here run with the Hopper backend on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .interpreter import hopper_on_cpu


@pytest.fixture(autouse=True)
def on_cpu(as_on_gpu: None) -> Iterator[None]:
    with hopper_on_cpu():
        yield
