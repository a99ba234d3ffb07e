"""Replays on a CPU: the launch cache records and repeats programs as on a GPU, and an interpreter runs their kernels."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashdelta.backends import TritonBackend
from flashdelta.problem.arguments import extent
from flashdelta.program import record
from flashdelta.program.cache import LaunchCache
from flashdelta.program.launch import ARGUMENTS, Launch
from flashdelta.runtime import call as road


@dataclass
class Replays:
    """The kernels that ran, in order: worked out anew, and replayed."""

    anew: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    def clear(self) -> None:
        self.anew.clear()
        self.repeated.clear()


@dataclass
class _Interpreted:
    """What stands for a compiled kernel: the launch without its tensors, of which it knows how they lie."""

    launch: Launch
    laid_out: list[tuple | None]

    @property
    def name(self) -> str:
        return self.launch.kernel.__name__

    @classmethod
    def of(cls, launch: Launch) -> _Interpreted:
        laid_out = [_layout(x) for x in launch.arguments]
        return cls(replace(launch, arguments=(), scratch=()), laid_out)

    def at(self, grid: tuple[int, int, int], arguments: list) -> Launch:
        given = [x if layout is None else _at(x, layout) for x, layout in zip(arguments, self.laid_out)]
        return replace(self.launch, ctas=grid[0], rows=grid[1], arguments=tuple(given))


def _layout(x: Any) -> tuple | None:
    x = getattr(x, "base", x) if not isinstance(x, Tensor) else x
    return (x.dtype, tuple(x.shape), x.stride(), extent(x)) if isinstance(x, Tensor) else None


def _at(x: Any, layout: tuple) -> Any:
    """The tensor, or the tensor descriptor, that lies at the address `x`."""
    dtype, shape, strides, nbytes = layout
    if not isinstance(x, int):
        other = object.__new__(type(x))
        other.__dict__.update(x.__dict__, base=_at(x.base.data_ptr(), layout))
        return other
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * nbytes).from_address(x)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


@contextlib.contextmanager
def replaying(interpret: Callable[[Launch], object]) -> Iterator[Replays]:
    """CPU tensors pass for a GPU's, with an empty launch cache. `interpret` runs a launch."""
    found = Replays()

    def run(launch: Launch) -> object:
        if launch.ctas > 0:
            found.anew.append(launch.kernel.__name__)
            interpret(launch)
        return _Interpreted.of(launch) if launch.ctas > 0 else None

    def kernel_call(compiled: _Interpreted, grid: tuple, arguments: list) -> tuple[Callable, list]:
        def start(*call: Any) -> None:
            found.repeated.append(compiled.name)
            interpret(compiled.at(grid, [*call[ARGUMENTS:]]))

        return start, [None] * ARGUMENTS + [*arguments]

    patches = [
        mock.patch.object(record, "kernel_call", kernel_call),
        mock.patch.object(record, "current_stream", lambda device: 0),
        mock.patch.object(torch.cuda, "current_device", lambda: None),
        mock.patch.object(Launch, "run", run),
        mock.patch.object(Tensor, "get_device", lambda x: 0 if x.device.type == "cpu" else -1),
        mock.patch.object(road, "CACHE", LaunchCache()),
        mock.patch.object(TritonBackend, "obstacle", lambda self, problem, device: None),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield found
