"""Before all else of a test session: what is imported and collected stays, so no garbage is looked for in it.

Looking for some at every few thousand objects is a third of the time that importing PyTorch, FLA and the tests takes.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator

import pytest

MANY = 50_000
"""New objects after which garbage is looked for in a test: 700 by default, and a compiled test takes a tenth longer."""

gc.disable()
atexit.register(gc.unfreeze)  # nanobind complains of what is left in the end


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(MANY)
