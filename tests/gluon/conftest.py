"""Tests here run with the Hopper backend on CPU tensors; the slow ones where a kernel changed since they passed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..full import FULL
from .interpreter import hopper_on_cpu
from .record import recorded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if FULL or not recorded():
        return
    passed = pytest.mark.skip(reason="nothing that it reads changed since it passed (tests/gluon/record.py)")
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("slow"):
            item.add_marker(passed)


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with hopper_on_cpu():
        yield
