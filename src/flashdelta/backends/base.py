"""What a backend is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from ..problem.decode_spec import CommitSpec, CommitTensors
from ..problem.problem import Incoming, Problem, Results, Tensors
from ..program.cache import Plan, Recorder

T = TypeVar("T")


class Backend(Protocol):
    name: str
    summary: str

    def obstacle(self, problem: Problem | CommitSpec, device: torch.device) -> str | None:
        """Why this backend can't run the call, or None if it can."""

    def drawback(self, problem: Problem | CommitSpec, device: torch.device) -> str | None:
        """Why `auto` should rather take another backend that can run the call, or None."""

    def run(self, problem: Problem, t: Tensors, out: torch.Tensor | None) -> Results:
        """The forward. Writes `o` to `out` when given."""

    def plan(
        self, problem: Problem, t: Tensors, given: Sequence[torch.Tensor | None], out: torch.Tensor | None
    ) -> Plan | None:
        """How to repeat a call that has just run, whose tensors were `given` and `out`; None if there is no shorter way than
        `run`."""

    def parts(self, problem: Problem, chunks: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Segments that each sequence of so many `chunks [N]` is cut into (`split.py`)."""

    def commit(self, problem: CommitSpec, t: CommitTensors) -> None:
        """`ops.commit`. Only called where a `CommitSpec` meets no obstacle."""

    def run_kept(
        self, problem: Problem, t: Tensors, recorder: Recorder | None = None
    ) -> tuple[Results, dict[str, torch.Tensor]]:
        """The forward, and what `backward` would compute again of it, by names that no result has. `recorder`: is shown the
        launches, if there are any."""

    def backward(
        self, problem: Problem, t: Tensors, incoming: Incoming, recorder: Recorder | None = None
    ) -> dict[str, torch.Tensor]:
        """Gradients by input name, from what `run_kept` gave if it is at hand."""


def assume_constant(function: Callable[..., T]) -> Callable[..., T]:
    """torch.compile asks `function` while it traces, and keeps the answer.

    `torch.compiler.assume_constant_result` does no more, but imports torch._dynamo to do it, which takes a second.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010 (a type checker knows no such attribute)
    return function


@functools.cache
def _cached_capability(index: int | None) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else None


@assume_constant
def nvidia_capability(index: int | None) -> tuple[int, int] | None:
    """The GPU's compute capability; None where there is none."""
    return _cached_capability(index)
