"""A call's way without a GPU: launches are noted, and nothing is compiled or started."""

from __future__ import annotations

import pytest
import torch

from flashdelta.backends import TritonBackend
from flashdelta.program.cache import LaunchCache
from flashdelta.program.launch import ARGUMENTS, STREAM, Launch
from flashdelta.runtime import call as runtime

from ..support.replays import compiled_by


class Started(list):
    """The arguments of every start: the kernel, its grid, its arguments; `first`: which were a plan's first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.known = list[bool](), dict[int, Launch]()

    def start(self, launch: Launch, call: list) -> None:
        self.append((launch.kernel, tuple(call[:STREAM]), call[ARGUMENTS:]))
        self.first.append(id(launch) not in self.known)
        self.known[id(launch)] = launch

    def clear(self) -> None:
        super().clear()
        self.first.clear()

    def anew(self) -> list[bool]:
        return self.first.copy()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()
    monkeypatch.setattr(Launch, "compiled", compiled_by(found.start))
    return found


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a GPU."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0 if x.device.type == "cpu" else -1)


@pytest.fixture
def pretended(started: Started, on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Started:
    """The same with an empty launch cache."""
    monkeypatch.setattr(runtime, "CACHE", LaunchCache())
    monkeypatch.setattr(TritonBackend, "obstacle", lambda self, problem, device: None)
    return started
