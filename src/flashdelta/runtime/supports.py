"""Answers whether a call can run, and on which backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import backends
from ..problem.problem import Problem
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
