"""Things that the workers of a run share: a folder, and what one of them makes for all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from filelock import FileLock

from benchmarks.files import whole_file

T = TypeVar("T")


def folder_of_run(factory: pytest.TempPathFactory) -> Path:
    """The same for all workers of this run, and for no other run."""
    base = factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


def once(path: Path, make: Callable[[], T]) -> T:
    """The result of `make`, which the first process that asks calls, and all read from `path`.

    Raises:
        RuntimeError: `make` raised, in whatever process; it is not called again.
    """
    with FileLock(f"{path}.lock"):
        if not path.exists():
            try:
                found = {"made": make()}
            except Exception as error:
                found = {"raised": f"{type(error).__name__}: {error}"}
            with whole_file(path) as unfinished:
                torch.save(found, unfinished)
    found = torch.load(path, weights_only=False)
    if "raised" in found:
        raise RuntimeError(found["raised"])
    return found["made"]
