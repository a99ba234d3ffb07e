"""Whether a call can run, and on which backend: what engines ask before a call, and on every one of them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import backends
from ..problem.arguments import extent, is_lazy, is_plain
from ..problem.context import as_context
from ..problem.groups import is_group
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


@dataclass(slots=True, eq=False)
class _Answer:
    """Of calls whose tensors pass the `guards`, PyTorch's own of traced code: all the same but for addresses and contents.
    `written`: tensors that the call writes, by place and bytes, and others which must not share their memory. `twice`: pairs of
    places of one tensor, which guards take `once`, and fail where it comes again. `host`: the place of offsets on the host;
    of dense ones how many bytes, and the content that was found right last."""

    guards: Any
    support: Support
    written: Sequence[tuple[int, int, list[tuple[int, int]]]]
    twice: Sequence[tuple[int, int]]
    once: Callable[[Sequence], Sequence]
    host: int | None = None
    nbytes: int = 0
    content: bytes = b""

    def given(self, tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Each tensor once of a call that passes; None of another."""
        for i, j in self.twice:
            if tensors[i] is not tensors[j]:
                return None
        given = self.once(tensors) if self.twice else tensors
        return given if self.guards.check(*given) else None

    def recalled(self, tensors: Sequence[Tensor], arguments: Sequence, named: Mapping) -> Support | None:
        """The answer to a call that passes; None to another.

        Raises:
            ValueError: offsets on the host are wrong, and the refusal names them.
        """
        given = self.given(tensors) if self.twice else tensors if self.guards.check(*tensors) else None
        if given is None or (self.written and _shares(self, given)):
            return None
        if self.host is not None:
            offsets = tensors[self.host]
            address = offsets.data_ptr() if self.nbytes else 0  # also 0 of memory that was given back
            content = ctypes.string_at(address, self.nbytes) if address else b""
            if not content or content != self.content:
                _check_offsets(offsets, arguments, named)
                self.content = content
        return self.support


Asked = tuple[Support, Sequence[object], Pairs]
"""An answer, the call's tensors, and which of them are written."""

MOST, MOST_ALIKE = 4096, 16
"""Answers that are kept, some KB each; and of those, how many to calls of a kind."""

_answers: dict[tuple, list[_Answer]] = {}
"""By kind of call and a hash of the sizes; the newest first."""

_latest: dict[tuple, _Answer] = {}
"""By kind of call: the one that was recalled last, for which no sizes are read."""


def supports(op: Callable, /, *arguments: object, **named: object) -> Support:
    """Says whether `op(*arguments, **named)` can run, without running it.

    Reads no device data, allocates nothing on a device, and raises nothing: what `op` would refuse is the answer's `reason`. It
    may be asked on every call (a repeated question takes some microseconds), while a CUDA graph is captured, and inside
    `torch.compile`. Values on a device are not read, not even with FLASHDELTA_CHECK=1. Lazy clones (copy-on-write) stay clones,
    and are asked about anew each time. FLA's `cp_context` is an exception when no call had it before: what calls keep on it is
    made then, from offsets that are read from the device if it has none on the host.

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
    try:
        kind, tensors, host = _kind(asked, arguments, named)
        latest = _latest.get(kind)
        if latest is not None and (support := latest.recalled(tensors, arguments, named)) is not None:
            return support
        sized = (kind, hash((*map(SHAPE, tensors),)), tensors[0].stride() if tensors else None)
        for answer in _answers.get(sized, ()):
            if answer is not latest and (support := answer.recalled(tensors, arguments, named)) is not None:
                _latest[kind] = answer
                return support
        if host is not None:
            _check_offsets(tensors[host], arguments, named)
        firsts: dict[int, int] = {}
        twice = [(i, j) for i, x in enumerate(tensors) if (j := firsts.setdefault(id(x), i)) < i]
        once = _picker([*firsts.values()])
        guards = torch._C._dynamo.guards.TensorGuards(
            *once(tensors), dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
    except Exception:  # what can't be hashed, compared or guarded is asked about anew each time
        return question(asked, arguments, named)[0]
    support, passed, pairs = question(asked, arguments, named)
    given, alike = once(tensors), _answers.get(sized, [])
    answer = _Answer(guards, support, _written(passed, pairs, given), twice, once)
    with contextlib.suppress(RuntimeError):  # of a tensor that has no address
        # a refusal may be for memory that is shared, which the guards don't know
        if not _shares(answer, given) and all(other.given(tensors) is None for other in alike):
            if host is not None and tensors[host].is_cpu:
                answer.host, answer.nbytes = host, _dense_bytes(tensors[host])
            if sum(map(len, [*_answers.values()])) >= MOST:
                forget()
            _answers[sized] = [answer, *alike[: MOST_ALIKE - 1]]
            _latest[kind] = answer
    return support


def forget() -> None:
    """Every answer."""
    _answers.clear()
    _latest.clear()


OPTIONS = frozenset((type(None), bool, int, float, str))
"""Types of what is certainly no tensor."""

SHAPE = operator.attrgetter("shape")


class _Plan(NamedTuple):
    """Of calls with arguments of these names and types: how their tensors are picked out, and what is certainly no tensor.
    `others` are the places of what is left. Of the tensors `leading` is the place of the tokens', and `host` that of offsets on
    the host. The `number` is its own."""

    number: int
    tensors: Callable[[Sequence], tuple]
    options: Callable[[Sequence], tuple]
    others: tuple[int, ...]
    leading: int
    host: int | None


_plans: dict[tuple, _Plan] = {}

_numbers = itertools.count()

LEADING, OFFSETS = ("q", "x"), "cu_seqlens_cpu"
"""Names of tensors in whose sizes calls differ most, and that of offsets whose values are looked at."""


def _planned(key: tuple, given: tuple, named: Mapping) -> _Plan:
    tensors = [i for i, x in enumerate(given) if is_plain(x)]
    options = [i for i, x in enumerate(given) if type(x) in OPTIONS]
    others = tuple(i for i in range(1, len(given)) if i not in tensors and i not in options)
    if any(isinstance(given[i], Tensor) for i in others):
        raise TypeError  # of a class that may answer otherwise each time
    places = dict(zip(named, range(len(given) - len(named), len(given))))
    among = {name: tensors.index(place) for name, place in places.items() if place in tensors}
    leading = next((among[name] for name in LEADING if name in among), 0)
    if len(_plans) >= MOST:
        _plans.clear()
    found = _plans[key] = _Plan(next(_numbers), _picker(tensors), _picker(options), others, leading, among.get(OFFSETS))
    return found


def _picker(places: Sequence[int]) -> Callable[[Sequence], tuple]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda arguments: tuple(arguments[i] for i in places)


def _kind(asked: Hashable, arguments: Sequence, named: Mapping) -> tuple[tuple, tuple[Tensor, ...], int | None]:
    """All that the answer depends on but the tensors, with the sizes of the leading one; the tensors; and which of them are
    offsets on the host."""
    given = (asked, *arguments, *named.values())
    key = (asked, len(arguments), *named, *map(type, given))
    number, pick_tensors, pick_options, others, leading, host = _plans.get(key) or _planned(key, given, named)
    tensors, options = pick_tensors(given), pick_options(given)
    kind: tuple = (number, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), options)
    if others:
        for i in others:
            x = given[i]
            context = as_context(x)  # FLA's can't be hashed, and changes
            if context is None:
                kind += (weakref.ref(x) if is_group(x) else x,)
                continue
            for part in context.tensors:
                if part is not None:
                    if type(part) is not Tensor and not is_plain(part):
                        raise TypeError
                    tensors += (part,)
            kind += context.alike, context.cu_seqlens is None
    # `is_lazy` also fails for tensors of other layouts than strided ones. Guards of those and of nested ones end the process
    for x in tensors:
        if x.is_nested or is_lazy(x):
            raise TypeError
    if tensors:
        x = tensors[leading]
        kind += (x.shape, backends.interpreting()) if x.is_cpu else (x.shape,)
    return kind, tensors, host


def _check_offsets(offsets: Tensor, arguments: Sequence, named: Mapping) -> None:
    q = arguments[0] if arguments else named.get("q")
    if known_lengths(offsets, named.get("chunk_size") or 64, q) is None:
        raise ValueError  # the refusal names them


def _dense_bytes(x: Tensor) -> int:
    """Of a tensor on the CPU whose elements lie there one after the other, as they are; 0 of another."""
    try:
        return x.numpy().nbytes if x.is_contiguous() else 0
    except (RuntimeError, TypeError):  # without memory of its own, or without NumPy
        return 0


def _shares(answer: _Answer, tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor that is written lies in another's memory."""
    if not answer.written:
        return False
    addresses = [*map(Tensor.data_ptr, tensors)]
    for place, nbytes, others in answer.written:
        begin = addresses[place]
        end = begin + nbytes
        for other, size in others:
            if begin - size < addresses[other] < end:
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
        with contextlib.suppress(Exception):  # which the check meets in its turn
            if (context := as_context(given.get("cp_context"))) is not None:
                parts = dict(zip(("border", "cu_seqlens"), context.tensors))
                passed = [parts.get(name, x) for name, x in zip(call.tensors, passed)]
        problem, t, backend = call.check(given, dry=True)
    except Exception as refusal:  # arguments may raise anything, as they are asked what they are
        return Support(False, None, str(refusal)), passed, pairs
    return answer_of(problem, t.device, backend), passed, pairs


def answer_of(problem: Problem, device: torch.device, chosen: backends.Backend) -> Support:
    faster = itertools.takewhile(lambda verdict: verdict.backend != chosen.name, backends.judge(problem, device))
    reasons = [f"{verdict.backend}: {verdict.reason}" for verdict in faster if not verdict.preferred]
    return Support(True, chosen.name, "; ".join(reasons))


def _written(passed: Sequence[object], pairs: Pairs, tensors: Sequence[Tensor]) -> list:
    """As `_Answer` has them, where each tensor that was `passed` is one of `tensors`."""
    places = [next((i for i, other in enumerate(tensors) if other is x), None) for x in passed]
    found = []
    for writes, others in pairs:
        if (place := places[writes]) is not None:
            rest = [(i, extent(tensors[i])) for i in (places[other] for other in others) if i not in (None, place)]
            found.append((place, extent(tensors[place]), rest))
    return found
