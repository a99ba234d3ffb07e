"""Whether a call can run, and on which backend: what engines ask before a call, and on every one of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import backends
from ..problem.arguments import PLAIN, extent, is_plain
from ..problem.problem import Problem
from ..problem.split import known_lengths
from .call import Pairs, public_call


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


class _Answer(NamedTuple):
    """Of calls whose tensors pass the `guards`, PyTorch's own of traced code: all the same but for addresses and contents.
    `written`: tensors that the call writes, by place and bytes, and those which must not share their memory."""

    guards: Any
    support: Support
    written: Sequence[tuple[int, int, list[tuple[int, int]]]]


Asked = tuple[Support, Sequence[object], Pairs]
"""An answer, the call's tensors, and which of them are written."""

MOST, MOST_ALIKE = 4096, 16
"""Kinds of calls, and answers to calls of a kind, that are kept."""

_answers: dict[tuple, list[_Answer]] = {}
"""By all that the answer depends on but the tensors; the newest first."""


def supports(op: Callable, /, *arguments: object, **named: object) -> Support:
    """Says whether `op(*arguments, **named)` can run, without running it.

    Reads no device data, allocates nothing on a device, and raises nothing: what `op` would refuse is the answer's `reason`. It
    may be asked on every call (a repeated question takes some microseconds), while a CUDA graph is captured, and inside
    `torch.compile`. Values on a device are not read, not even with FLASHDELTA_CHECK=1.

    Args:
        op: a public operator; the rest are its own arguments.

    Returns:
        `Support(ok, backend, reason)`.
    """
    return remembered(ask, op, arguments, named)


def remembered(
    question: Callable[[Any, Sequence, Mapping], Asked], asked: Hashable, arguments: Sequence, named: Mapping
) -> Support:
    """The answer to `question(asked, arguments, named)`, or the one that calls like this got before."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return question(asked, arguments, named)[0]
    tensors: list[Tensor] = []
    addresses: list[int] = []
    known = False
    try:
        kind = _kind(asked, arguments, named, tensors, addresses)
        alike = _answers.get(kind, ())
        for answer in alike:
            if answer.guards.check(*tensors):
                if not _shares(answer, addresses):
                    return answer.support
                known = True
        guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except Exception:  # what can't be hashed, compared or guarded is asked about anew each time
        return question(asked, arguments, named)[0]
    support, passed, pairs = question(asked, arguments, named)
    answer = _Answer(guards, support, _written(passed, pairs, tensors))
    # a refusal may be for memory that is shared, which the guards don't know
    if not known and not _shares(answer, addresses):
        if len(_answers) >= MOST:
            _answers.clear()
        _answers[kind] = [answer, *alike[: MOST_ALIKE - 1]]
    return support


OPTIONS = frozenset((type(None), bool, int, float, str))
"""Types of what is certainly no tensor."""


def _kind(asked: Hashable, arguments: Sequence, named: Mapping, tensors: list[Tensor], addresses: list[int]) -> tuple:
    """All that the answer depends on but the tensors, which are added to `tensors`."""
    found: list = [asked, len(arguments), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *named]
    for x in (*arguments, *named.values()):
        kind = type(x)
        if kind in PLAIN or (kind not in OPTIONS and is_plain(x)):
            found.append(kind)
            tensors.append(x)
            addresses.append(x.data_ptr())
            if x.is_nested:  # the guards of what has no strides end the process; sparse tensors have no address
                raise TypeError
        elif kind in OPTIONS or not isinstance(x, Tensor):
            found += kind, x
        else:
            raise TypeError  # of a class that may answer otherwise each time
    offsets = named.get("cu_seqlens_cpu")
    if offsets is not None:
        q = arguments[0] if arguments else named.get("q")
        if known_lengths(offsets, named.get("chunk_size") or 64, q) is None:
            raise ValueError  # the refusal names them
    return tuple(found)


def _shares(answer: _Answer, addresses: list[int]) -> bool:
    """Whether a tensor that is written lies in another's memory."""
    for place, nbytes, others in answer.written:
        begin = addresses[place]
        for other, size in others:
            if -size < addresses[other] - begin < nbytes:
                return True
    return False


def ask(op: Callable, arguments: Sequence, named: Mapping) -> Asked:
    """What `supports` answers, worked out anew."""
    passed: list[object] = []
    pairs: Pairs = ()
    try:
        call = public_call(op)
        given = call.bind(arguments, named)
        passed, pairs = [given.get(name) for name in call.tensors], call.pairs
        problem, t, backend = call.check(given, dry=True)
    except Exception as refusal:  # arguments may raise anything, as they are asked what they are
        return Support(False, None, str(refusal)), passed, pairs
    return answer_of(problem, t.device, backend), passed, pairs


def answer_of(problem: Problem, device: torch.device, chosen: backends.Backend) -> Support:
    faster = takewhile(lambda verdict: verdict.backend != chosen.name, backends.judge(problem, device))
    reasons = [f"{verdict.backend}: {verdict.reason}" for verdict in faster if not verdict.preferred]
    return Support(True, chosen.name, "; ".join(reasons))


def _written(passed: Sequence[object], pairs: Pairs, tensors: list[Tensor]) -> list:
    """As `_Answer` has them, where each tensor that was `passed` is one of `tensors`."""
    places = [next((i for i, other in enumerate(tensors) if other is x), None) for x in passed]
    found = []
    for writes, others in pairs:
        if (place := places[writes]) is not None:
            rest = [(i, extent(tensors[i])) for i in (places[other] for other in others) if i is not None]
            found.append((place, extent(tensors[place]), rest))
    return found
