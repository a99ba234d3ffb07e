"""The road of a call without a GPU: launches are noted, and nothing is compiled or started."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashdelta.backends import TritonBackend
from flashdelta.program import record
from flashdelta.program.cache import LaunchCache
from flashdelta.program.launch import ARGUMENTS, Launch
from flashdelta.runtime import call as road


class Started(list):
    """What every start was given: the kernel, its grid, its arguments."""

    def __call__(self, compiled: object, grid: tuple, arguments: list) -> None:
        self.append((compiled, grid, arguments))

    def kernel_call(self, compiled: object, grid: tuple, arguments: list) -> tuple[Callable, list]:
        return lambda *call: self(compiled, grid, [*call[ARGUMENTS:]]), [None] * ARGUMENTS + [*arguments]

    def anew(self) -> list[bool]:
        """Which were worked out anew: those have tensors, where replayed ones have addresses."""
        return [any(isinstance(x, Tensor) for x in arguments) for _, _, arguments in self]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()
    monkeypatch.setattr(record, "kernel_call", found.kernel_call)
    monkeypatch.setattr(record, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(Launch, "run", lambda self: self.kernel)
    return found


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a GPU."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0 if x.device.type == "cpu" else -1)


@pytest.fixture
def pretended(started: Started, on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Started:
    """The same with an empty launch cache. Starts that are worked out anew are noted, too."""

    def run(launch: Launch) -> object:
        arguments = [*launch.arguments, *launch.constants.values()]
        started(launch.kernel, (launch.ctas, launch.rows, 1), arguments)
        return launch.kernel

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(road, "CACHE", LaunchCache())
    monkeypatch.setattr(record, "STRICT", True)
    monkeypatch.setattr(TritonBackend, "obstacle", lambda self, problem, device: None)
    return started
