"""The GPU tier: `pytest -m gpu` (add `-n 14 --maxschedchunk 1` to compile kernels, and run sanitizers, in parallel)."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from flashdelta.backends import BACKENDS

from .calls import BOTH, MODELS, first_configurations

GPU_BACKENDS = [backend.name for backend in BACKENDS if backend.name != "reference"]
ARGUMENTS = {
    "backend": GPU_BACKENDS,
    "other_backend": [name for name in GPU_BACKENDS if name != "triton"],
    "op": BOTH,
    "model": MODELS,
}
"""Backends of a test that takes one of these: every backend that has kernels, all of them but the portable one, ..."""


MADE_ONCE = {"library_path", "processes", "few_or_more"}
"""Fixtures that one worker makes for all, for which the others wait: the C library, and what processes on several GPUs find."""

HERE = Path(__file__).parent

# of processes that tests start: their tensors are tiny, and beside other workers threads cost more than they save
os.environ.setdefault("OMP_NUM_THREADS", "1")


def begins(item: pytest.Item) -> float:
    """When a test begins, as a share of all: at random, but the same in every run. Long ones are in the first quarter, that no
    worker is left alone with one in the end; those that need what a long one makes for all are in the second half."""
    chance = zlib.crc32(item.nodeid.encode()) / 2**32
    if item.get_closest_marker("long"):
        return chance / 4
    return chance if MADE_ONCE.isdisjoint(item.fixturenames) else (1 + chance) / 2


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Neighbours in a file need the same kernels, lock or library: workers that run them side by side compile each kernel many
    times, and wait for each other. So workers get tests of this tier in another order."""
    if hasattr(config, "workerinput"):
        ours = iter(sorted((item for item in items if item.path.parent == HERE), key=begins))
        items[:] = [next(ours) if item.path.parent == HERE else item for item in items]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for argument, values in ARGUMENTS.items():
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, values, ids=lambda value: getattr(value, "name", None))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A backend for some GPUs or shapes may decline a call, and its test is skipped; the portable one may not."""
    try:
        return (yield)
    except (ValueError, torch._dynamo.exc.Unsupported) as error:  # torch.compile wraps the former in the latter
        backend = pyfuncitem.funcargs.get("backend") or pyfuncitem.funcargs.get("other_backend")
        if backend not in (None, "triton") and f"backend must be one that can run this call ({backend}" in str(error):
            pytest.skip(str(error))
        raise


KEPT = 1 << 30
"""Bytes that a worker may keep from test to test, lest 14 of them fill a GPU of 80 GB."""

MUCH, LONGEST_WAIT = 40 << 30, 120.0
"""Bytes that tests of many GB find free, and the seconds that they wait for them before they try with what there is."""


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    assert torch.cuda.is_available(), "the GPU tier needs an NVIDIA GPU that PyTorch can see"
    yield
    if torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def untuned() -> Iterator[None]:
    with first_configurations():
        yield


@pytest.fixture
def much_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For tests of many GB: one at a time among all workers, once there is room, and nothing is left behind for the processes
    beside this one."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "much_memory.lock"):
        torch.cuda.empty_cache()
        until = time.monotonic() + LONGEST_WAIT
        while torch.cuda.mem_get_info()[0] < MUCH and time.monotonic() < until:
            time.sleep(0.5)
        yield
        torch.cuda.empty_cache()
