"""Answers whether a call can run, on which backend, and why."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import Verdict
from ..problem import device_checks
from ..problem.arguments import is_plain, named_device
from ..problem.problem import ChunkProblem, ChunkTensors, Problem
from ..reference.sequences import chunks_of
from .call import public_call


class Support(NamedTuple):
    """The answer of `supports`: true as a condition if the call can run.

    `backend` would run it (None: none would). `reason` says why the call is refused, or else why a faster backend was passed
    over; it is empty if the fastest takes the call.
    """

    ok: bool
    backend: str | None
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def supports(op: Callable, /, *arguments: object, **named: object) -> Support:
    """Says whether `op(*arguments, **named)` can run, without running it.

    Examples:
        >>> x, gate, weight = torch.randn(10, 64), torch.randn(10, 32), torch.ones(64)
        >>> bool(fd.supports(fd.gated_rms_norm, x, gate, weight))
        False

    Reads no device data, allocates nothing on a device, and raises nothing: what `op` would refuse is the answer's `reason`. It
    may be asked while a CUDA graph is captured, and inside `torch.compile`. It validates the call anew each time, which takes
    about as long as a first call's validation. Values on a GPU are not read, not even with FLASHDELTA_CHECK=1; on a CPU they
    are. FLA's `cp_context` is an exception when no call had it before: what calls keep on it is made then, from offsets that
    are read from the device if it has none on the host.

    Args:
        op: a public operator; the rest are its own arguments.

    Returns:
        `Support(ok, backend, reason)`.
    """
    try:
        call = public_call(op)
        problem, t, backend = call.check(call.named(arguments, named), dry=True)
    except Exception as refusal:  # arguments may raise anything, as they are asked what they are
        return Support(False, None, str(refusal))
    return answer_of(problem, t.device, backend)


def answer_of(problem: Problem, device: torch.device, chosen: backends.Backend) -> Support:
    faster = itertools.takewhile(lambda verdict: verdict.backend != chosen.name, backends.judge(problem, device))
    reasons = [f"{verdict.backend}: {verdict.reason}" for verdict in faster if not verdict.preferred]
    return Support(True, chosen.name, "; ".join(reasons))


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`: what `supports` says, every backend's verdict, and of `chunk_kda` how many `segments` each
    sequence is cut into, in its backward pass too (None where the lengths can't be read). `restarts`: whether a whole sequence
    may be done in pieces that begin where a chunk forgets. `not_replayed`: why calls like it are built anew each time, which
    takes the host a millisecond (None where the second one replays the first)."""

    support: Support
    verdicts: tuple[Verdict, ...]
    segments: tuple[int, ...] | None = None
    not_replayed: str | None = None
    restarts: bool = False

    @property
    def chosen(self) -> str:
        """The backend that runs the call."""
        assert self.support.backend is not None
        return self.support.backend

    def __str__(self) -> str:
        lines = [f"runs on: {self.chosen}"]
        if self.segments is not None:
            split = f"segments of the sequences: {', '.join(map(str, self.segments))}"
            whole = "sequences stay whole" + ", but may restart where a chunk forgets" * self.restarts
            lines.append("  " + (split if max(self.segments, default=1) > 1 else whole))
        if self.not_replayed is not None:
            lines.append(f"  not replayed: {self.not_replayed}")
        for v in self.verdicts:
            state = "preferred" if v.preferred else "supported, not preferred" if v.supported else "not supported"
            lines.append(f"  {v.backend:<10} {state}: {v.reason}")
        return "\n".join(lines)


def explain(op: Callable, /, *arguments: object, device: torch.device | str | None = None, **named: Any) -> Explanation:
    """Says which backend would run `op(*arguments, **named)`, and why each other one would not; of `chunk_kda` also how
    sequences would be split. Runs no kernel, but reads `cu_seqlens`.

    Examples:
        >>> x, weight = torch.randn(10, 64), torch.ones(64)
        >>> fd.explain(fd.gated_rms_norm, x, x, weight, device="cpu").chosen
        'reference'

    Args:
        op: a public function; the rest are its own arguments (an unknown one is a `TypeError`, as in a call).
        device: judge for this device instead of the tensors' own; the tensors may then be on the meta device.

    Returns:
        An `Explanation`; `print` it, or read `chosen`, `verdicts` (`supported`, `preferred`, `reason`), `segments` and
        `not_replayed`.

    Raises:
        ValueError, TypeError: as `op` itself would.
    """
    call = public_call(op)
    given = call.named(arguments, named)
    asked = None if device is None else named_device(device)
    problem, t, chosen = call.check(given, device=asked)
    place = asked or t.device
    segments, restarts = None, False
    if isinstance(problem, ChunkProblem) and isinstance(t, ChunkTensors) and problem.operation == "chunk":
        known = is_plain(t.q) and t.q.device.type == place.type != "meta"
        segments, restarts = chosen.parts(problem, chunks_of(problem, t).tolist(), t.device) if known else (None, False)
    why = None if chosen.plain else not_replayed({name: given[name] for name in call.tensors if name in given})
    return Explanation(answer_of(problem, place, chosen), (*backends.judge(problem, place),), segments, why, restarts)


def not_replayed(tensors: Mapping[str, Tensor | None]) -> str | None:
    """The reason why calls by kernels like this one have no plan that lasts, or None."""
    if device_checks.ENABLED:
        return "FLASHDELTA_CHECK=1 reads values on the host"
    for name, x in tensors.items():
        if x is not None and not is_plain(x):
            return f"{name} is a {type(x).__name__}, whose operators must see the call"
        if x is not None and (x.is_neg() or x._is_zerotensor()):
            return f"{name} has no memory: it stands for {'the negative of another' if x.is_neg() else 'zeros'}"
    return None
