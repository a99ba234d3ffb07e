"""Whether a call can run, and on which backend: what engines ask before a call, and on every one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import backends
from ..problem.arguments import PLAIN, extent
from ..problem.problem import Problem
from ..problem.split import known_lengths
from .call import public_call


class Support(NamedTuple):
    """The answer of `supports`: true as a condition if the call can run.

    `backend` would run it (None: no one would). `reason` says why the call is refused, or else why a faster backend was passed
    over; it is empty if the fastest takes the call.
    """

    ok: bool
    backend: str | None
    reason: str

    def __bool__(self) -> bool:
        return self.ok


class _Answer(NamedTuple):
    """`written`: tensors that the call writes, by place and bytes, and those which must not share their memory."""

    support: Support
    written: list[tuple[int, int, list[tuple[int, int]]]]


MOST = 4096
"""Answers that are kept."""

_answers: dict[tuple, _Answer] = {}


def supports(op: Callable, /, *arguments: object, **named: object) -> Support:
    """Says whether `op(*arguments, **named)` can run, without running it.

    Reads no device data, allocates nothing on a device, and raises nothing: what `op` would refuse is the answer's `reason`. It
    may be asked on every call (a repeated question takes some microseconds), while a CUDA graph is captured, and inside
    `torch.compile`. Values on a device are not looked at, with FLASHDELTA_CHECK=1 neither.

    Args:
        op: a public operator; the rest are its own arguments.

    Returns:
        `Support(ok, backend, reason)`.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return _ask(op, arguments, named)
    tensors: list[Tensor] = []
    try:
        key = _key(op, arguments, named, tensors)
        answer = _answers.get(key)
        if answer is not None and not _shares(answer, tensors):
            return answer.support
    # what can't be hashed, or has no strides or no memory of its own, is asked about anew each time
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return _ask(op, arguments, named)
    support = _ask(op, arguments, named)
    written = _written(op, arguments, named, tensors) if answer is None else []
    # a refusal may be for memory that is shared, which the key doesn't know
    if answer is None and (support.ok or not written):
        if len(_answers) >= MOST:
            _answers.clear()
        _answers[key] = _Answer(support, written)
    return support


def _key(op: Callable, arguments: Sequence, named: Mapping, tensors: list[Tensor]) -> tuple:
    """All that the answer depends on but addresses. Adds the call's tensors to `tensors`."""
    grad = torch.is_grad_enabled()
    found: list = [op, len(arguments), tuple(named)]
    for values in (arguments, named.values()):
        for x in values:
            kind = type(x)
            if kind in PLAIN:
                strides = x.is_contiguous() or x.stride()
                found += x.shape, strides, x.dtype, x.device, x.layout, grad and x.requires_grad
                tensors.append(x)
            elif isinstance(x, Tensor):
                raise TypeError  # a subclass may answer otherwise each time
            else:
                found += kind, x
    offsets = named.get("cu_seqlens_cpu")
    if offsets is not None:
        q = arguments[0] if arguments else named.get("q")
        if known_lengths(offsets, named.get("chunk_size", 64), q) is None:
            raise ValueError  # the refusal names them
    return tuple(found)


def _shares(answer: _Answer, tensors: list[Tensor]) -> bool:
    """Whether a tensor that is written lies in another's memory, or stands for the negative of its own."""
    addresses = [x.data_ptr() for x in tensors] if answer.written else []
    for place, nbytes, others in answer.written:
        begin = addresses[place]
        end = begin + nbytes
        for other, size in others:
            if addresses[other] < end and begin < addresses[other] + size:
                return True
        if tensors[place].is_neg():
            return True
    return False


def _ask(op: Callable, arguments: Sequence, named: Mapping) -> Support:
    try:
        call = public_call(op)
        problem, t, backend = call.check(call.bind(arguments, named), dry=True)
    except (TypeError, ValueError, RuntimeError) as refusal:
        return Support(False, None, str(refusal))
    return answer_of(problem, t.device, backend)


def answer_of(problem: Problem, device: torch.device, chosen: backends.Backend) -> Support:
    faster = takewhile(lambda verdict: verdict.backend != chosen.name, backends.judge(problem, device))
    reasons = [f"{verdict.backend}: {verdict.reason}" for verdict in faster if not verdict.preferred]
    return Support(True, chosen.name, "; ".join(reasons))


def _written(op: Callable, arguments: Sequence, named: Mapping, tensors: list[Tensor]) -> list:
    try:
        call = public_call(op)
        given = call.operation.by_role(call.bind(arguments, named))
    except (TypeError, ValueError):  # such a call is refused
        return []
    place = {role: i for role, x in given.items() for i, other in enumerate(tensors) if other is x}
    found = []
    for role, others in call.operation.overlaps.items():
        if role in place:
            rest = [(place[other], extent(given[other])) for other in others if other in place]
            found.append((place[role], extent(given[role]), rest))
    return found
