"""Replays on a CPU: the launch cache keeps plans and executes them again as on a GPU, and an interpreter runs their kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashdelta.backends import HopperBackend, TritonBackend
from flashdelta.parallel.exchange import Exchange
from flashdelta.program.cache import LaunchCache
from flashdelta.program.launch import ARGUMENTS, Launch, on_cpu
from flashdelta.program.plan import Plan
from flashdelta.runtime import call as runtime


@dataclass
class Replays:
    """The kernels that ran, in order: for the first time in a plan, and again."""

    anew: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    def clear(self) -> None:
        self.anew.clear()
        self.repeated.clear()


class Computes(TorchDispatchMode):
    """Fails where PyTorch computes something, and does not just allocate or view."""

    def __torch_dispatch__(self, op: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        plain = op.is_view or op.overloadpacket.__name__ in ("empty", "new_empty", "zeros", "detach")
        assert plain, f"{op}: a plan computes by PyTorch"
        return op(*arguments, **(options or {}))


def without_pytorch(function: Callable) -> Callable:
    """A function of a backend or a plan, whose ranks may exchange packets by PyTorch."""

    @functools.wraps(function)
    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        exchanges = isinstance(self, Plan) and any(isinstance(x, Exchange) for x in self.launches)
        exchanges |= any(step.exchanged for step in getattr(self, "steps", None) or ())
        with contextlib.nullcontext() if exchanges else Computes():
            return function(self, *arguments, **options)

    return watched


def compiled_by(start: Callable[[Launch, list], object]) -> Callable[[Launch], Any]:
    """A stand-in for `Launch.compiled`: `start` takes the launch, and the call of the compiled kernel."""

    def compiled(launch: Launch) -> Any:
        return SimpleNamespace(run=lambda *call: start(launch, [*call]), function=None, packed_metadata=None)

    return compiled


def interpreted_by(interpret: Callable[[Launch], object]) -> Callable[[Launch], Any]:
    """The same; `interpret` takes a launch with tensors of the CPU's memory."""

    def start(launch: Launch, call: list) -> None:
        interpret(replace(launch, arguments=tuple(on_cpu(launch.arguments, call[ARGUMENTS:]))))

    return compiled_by(start)


@contextlib.contextmanager
def replaying(interpret: Callable[[Launch], object]) -> Iterator[Replays]:
    """CPU tensors pass for a GPU's, with an empty launch cache. `interpret` runs a launch."""
    found, run = Replays(), interpreted_by(interpret)

    def compiled(launch: Launch) -> Any:
        kernel, name = run(launch), launch.kernel.__name__
        found.anew.append(name)
        first = iter([True])

        def start(*call: Any) -> None:
            if not next(first, False):
                found.repeated.append(name)
            kernel.run(*call)

        return SimpleNamespace(run=start, function=None, packed_metadata=None)

    patches = [
        mock.patch.object(runtime, "CACHE", LaunchCache()),
        mock.patch.object(Launch, "compiled", compiled),
        mock.patch.object(Tensor, "get_device", lambda x: 0 if x.device.type == "cpu" else -1),
        mock.patch.object(TritonBackend, "obstacle", lambda self, problem, device: None),
        *(mock.patch.object(kind, "build", without_pytorch(kind.build)) for kind in (TritonBackend, HopperBackend)),
        *(mock.patch.object(Plan, name, without_pytorch(getattr(Plan, name))) for name in ("locate", "execute")),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield found


@contextlib.contextmanager
def counting() -> Iterator[Replays]:
    """The same on a GPU, where nothing stands in for anything. Of kernels that are replayed only the number is known."""
    found = Replays()
    prepare, execute = Launch.prepare, Plan.execute

    def prepare_and_count(launch: Launch) -> Any:
        found.anew.append(launch.kernel.__name__)
        return prepare(launch)

    def execute_and_count(plan: Plan, *arguments: Any) -> Any:
        found.repeated += ["?" for step in plan.steps or () if not step.exchanged]
        return execute(plan, *arguments)

    with (
        mock.patch.object(runtime, "CACHE", LaunchCache()),
        mock.patch.object(Launch, "prepare", prepare_and_count),
        mock.patch.object(Plan, "execute", execute_and_count),
    ):
        yield found
