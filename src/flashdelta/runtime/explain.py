"""Which backend would run a call, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import backends
from ..backends import Verdict
from ..problem.arguments import is_plain
from ..reference.sequences import chunks_of
from .call import check


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`: `chosen` backend (None if none can run the call) and every backend's verdict; of `chunk_kda` on
    it, how many `segments` each sequence is cut into (None where the lengths can't be read)."""

    chosen: str | None
    verdicts: tuple[Verdict, ...]
    segments: tuple[int, ...] | None = None

    def __str__(self) -> str:
        lines = [f"runs on: {self.chosen or 'no backend'}"]
        if self.segments is not None:
            split = f"segments of the sequences: {', '.join(map(str, self.segments))}"
            lines.append("  " + (split if max(self.segments, default=1) > 1 else "sequences stay whole"))
        for v in self.verdicts:
            state = "preferred" if v.preferred else "supported, not preferred" if v.supported else "not supported"
            lines.append(f"  {v.backend:<10} {state}: {v.reason}")
        return "\n".join(lines)


def explain(op: Callable, *arguments: object, device: torch.device | str | None = None, **named: object) -> Explanation:
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
    problem, tensors = check(op, *arguments, **named)
    device = tensors.device if device is None else torch.device(device)
    verdicts = tuple(backends.judge(problem, device))
    name = named.get("backend", "auto")
    if isinstance(name, str) and name == "auto" and not any(v.supported for v in verdicts):
        return Explanation(None, verdicts)
    chosen = backends.choose(problem, device, name)
    segments = None
    if problem.operation == "chunk" and is_plain(tensors.q) and tensors.q.device.type == device.type != "meta":
        segments = tuple(chosen.parts(problem, chunks_of(problem, tensors), device).tolist())
    return Explanation(chosen.name, verdicts, segments)
