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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flashdelta.backends import HopperBackend, TritonBackend
from flashdelta.parallel.exchange import Exchange
from flashdelta.problem.arguments import extent
from flashdelta.program import record
from flashdelta.program.cache import LaunchCache
from flashdelta.program.launch import ARGUMENTS, Launch
from flashdelta.program.program import Program
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


COMPUTES_NOTHING = {
    *(
        "empty",
        "empty_like",
        "new_empty",
        "zeros",
        "view",
        "detach",
        "alias",
        "slice",
        "select",
        "split",
        "unbind",
        "t",
    ),
    *("expand", "unsqueeze", "squeeze", "permute", "transpose", "as_strided", "split_with_sizes", "_unsafe_view"),
}
"""Operations of PyTorch that allocate, or make a view."""


class Watched(TorchDispatchMode):
    """Where a program is built and run, beside its launches: PyTorch computes nothing that a replay would have to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **kwargs or {}), func.name().removeprefix("aten::").split(".")[0]
        # in inference mode these are seen whole
        is_view = name in ("flatten", "reshape") and found.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        assert is_view or name in COMPUTES_NOTHING, f"{name} computes data while a program is built"
        return found


def watched(build: Callable) -> Callable:
    """A backend's `build`, and its program's `run`."""

    def build_and_run(*arguments: Any) -> Program:
        mode = Watched()
        with mode:
            program = build(*arguments)
        run = program.run

        def run_watched(record: Any = None) -> Any:
            with mode:
                return run(record)

        program.run = run_watched
        return program

    return build_and_run


def unwatched(run: Callable) -> Callable:
    def run_alone(step: Any) -> Any:
        with _disable_current_modes():
            return run(step)

    return run_alone


@contextlib.contextmanager
def replaying(interpret: Callable[[Launch], object]) -> Iterator[Replays]:
    """CPU tensors pass for a GPU's, with an empty launch cache. `interpret` runs a launch."""
    found = Replays()

    def run(launch: Launch) -> object:
        if launch.ctas <= 0:
            return None
        found.anew.append(launch.kernel.__name__)
        interpret(launch)
        return _Interpreted.of(launch)

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
        mock.patch.object(TritonBackend, "obstacle", lambda self, problem, device: None),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield stack.enter_context(strictly(found))


@contextlib.contextmanager
def strictly(found: Replays) -> Iterator[Replays]:
    """With an empty launch cache. A program that can't be replayed fails, and so does one for which PyTorch computes."""
    patches = [
        mock.patch.object(road, "CACHE", LaunchCache()),
        mock.patch.object(record, "STRICT", True),
        mock.patch.object(Exchange, "run", unwatched(Exchange.run)),
        mock.patch.object(Launch, "run", unwatched(Launch.run)),
        *(mock.patch.object(kind, "build", watched(kind.build)) for kind in (TritonBackend, HopperBackend)),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield found


@contextlib.contextmanager
def counting() -> Iterator[Replays]:
    """The same on a GPU, where nothing stands in for anything. Of kernels that are replayed only the number is known."""
    found = Replays()
    launch, repeat = Launch.run, record.Recorded.run

    def run(step: Launch) -> object:
        if step.ctas > 0:
            found.anew.append(step.kernel.__name__)
        return launch(step)

    def run_again(entry: record.Recorded, *arguments: Any) -> Any:
        assert entry.replay is not None
        found.repeated += ["?" for step in entry.replay.steps if not step.tensors]
        return repeat(entry, *arguments)

    with mock.patch.object(Launch, "run", run), mock.patch.object(record.Recorded, "run", run_again), strictly(found):
        yield found
