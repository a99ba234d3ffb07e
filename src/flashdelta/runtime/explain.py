"""Which backend would run a call, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import backends
from ..backends import Verdict
from ..problem.arguments import is_plain
from ..reference.sequences import chunks_of
from .call import public_call
from .supports import Support, answer_of


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`: what `supports` says, every backend's verdict, and of `chunk_kda` how many `segments` each
    sequence is cut into, in its backward pass too (None where the lengths can't be read)."""

    support: Support
    verdicts: tuple[Verdict, ...]
    segments: tuple[int, ...] | None = None

    @property
    def chosen(self) -> str:
        """The backend that runs the call."""
        assert self.support.backend is not None
        return self.support.backend

    def __str__(self) -> str:
        lines = [f"runs on: {self.chosen}"]
        if self.segments is not None:
            split = f"segments of the sequences: {', '.join(map(str, self.segments))}"
            lines.append("  " + (split if max(self.segments, default=1) > 1 else "sequences stay whole"))
        for v in self.verdicts:
            state = "preferred" if v.preferred else "supported, not preferred" if v.supported else "not supported"
            lines.append(f"  {v.backend:<10} {state}: {v.reason}")
        return "\n".join(lines)


def explain(
    op: Callable, /, *arguments: object, device: torch.device | str | None = None, **named: object
) -> Explanation:
    """Says which backend would run `op(*arguments, **named)`, and why each other one would not; of `chunk_kda` also how
    sequences would be split. Runs no kernel, but reads `cu_seqlens`.

    Args:
        op: a public function; the rest are its own arguments (an unknown one is a `TypeError`, as in a call).
        device: judge for this device instead of the tensors' own; the tensors may then be on the meta device.

    Returns:
        An `Explanation`; `print` it, or read `chosen`, `verdicts` (`supported`, `preferred`, `reason`) and `segments`.

    Raises:
        ValueError, TypeError: as `op` itself would.
    """
    call = public_call(op)
    given = call.bind(arguments, named)
    device = None if device is None else torch.device(device)
    problem, t, chosen = call.check(given, device=device)
    device = device or t.device
    support = answer_of(problem, device, chosen)
    verdicts = tuple(backends.judge(problem, device))
    segments = None
    if problem.operation == "chunk" and is_plain(t.q) and t.q.device.type == device.type != "meta":
        segments = tuple(chosen.parts(problem, chunks_of(problem, t), t.device).tolist())
    return Explanation(support, verdicts, segments)
