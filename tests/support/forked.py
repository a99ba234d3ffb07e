"""Ranks on processes that are forked from one which has imported what takes seconds, instead of importing it each."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

IMPORTED = ["pytest", "torch._dynamo", "flashdelta.nn", "fla.ops.cp", "fla.ops.kda"]
"""FLA's where it is installed."""


@contextmanager
def imported_once() -> Iterator[None]:
    """In the block `torch.multiprocessing.spawn` forks. The process that it forks ends with this one."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    fork = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.multiprocessing, "spawn", fork)
        yield
