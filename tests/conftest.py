"""Shared set-up of all tiers."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from flashdelta.problem import device_checks

from .support.gpus import visible_gpus

# The same examples in every run: a test passes or fails.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None, max_examples=40)
settings.load_profile("fixed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list) -> None:
    """Each worker finds another GPU first, and sees them all. It is told before it starts: CUDA reads the order once."""
    gpus = visible_gpus()
    for number, spec in enumerate(specs if len(gpus) > 1 else ()):
        first = number % len(gpus)
        spec.env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # long ones first, that no worker is left alone with one in the end
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_configure(config: pytest.Config) -> None:
    # The tensors are tiny: handing pieces of them to other threads costs more than it saves, most of all under xdist.
    torch.set_num_threads(1)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference stands for kernels on a GPU, where nobody reads indices: wild ones pass."""
    monkeypatch.setattr(device_checks, "ON_CPU", False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, here and in processes that the test starts: under `nohup`, cron and `&` in a script all ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
