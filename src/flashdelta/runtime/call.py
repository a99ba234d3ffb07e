"""Dispatch: executes the plan that the launch cache has of calls like this one, or validates the call and builds one."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from .. import backends
from ..parallel.checks import broadcast_errors, check_call_of_ranks
from ..problem.arguments import is_plain, is_wrapped, refuse_transforms
from ..problem.errors import wrong
from ..problem.lengths import Lengths
from ..problem.operations import Operation
from ..problem.problem import ChunkProblem, Problem, Tensors, Written
from ..problem.split import known_lengths
from ..program.cache import Entry, Key, LaunchCache, is_transformed
from . import autograd, torch_ops

CACHE = LaunchCache()

CALLS: dict[Callable[..., Any], Dispatcher] = {}
"""Dispatchers by public function."""

Checked = tuple[Problem, Tensors, backends.Backend]

REFUSALS = (ValueError, TypeError, NotImplementedError)
"""Errors of a check that refuses a call; others are faults, which `NoKernel` must not hide."""


class NoKernel(ValueError):
    """Raised by a call with `backend=KERNEL` that no kernel runs, or that is refused, before anything is written."""


class Refused(Entry):
    """An entry of the launch cache: a call with `backend=KERNEL` that was refused, for something other than addresses."""

    def __init__(self, why: str):
        self.why = why

    def execute(self, tensors: Sequence[Tensor | None], addresses: list[int]) -> NoReturn:
        raise NoKernel(self.why)


class Dispatcher:
    """The way of a public function's calls. It passes its tensors and its options, each in the order of its signature, and
    last the `extra_tensors`, which come from an option."""

    def __init__(self, operation: Operation, function: Callable[..., Any], extra_tensors: tuple[str, ...] = ()):
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters.values()
        self.operation, self.function, self.kind = operation, function, operation.name
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.tensors = (*(p.name for p in parameters if "Tensor" in str(p.annotation)), *extra_tensors)
        self.options = tuple(p.name for p in parameters if p.name not in self.tensors)
        self.place = place = {name: i for i, name in enumerate(self.tensors)}
        of_rows = dict.fromkeys("qkv", place.get(operation.rows, -1))
        self.roles = of_rows | place | {role: place[name] for role, name in operation.called.items() if name in place}
        self.lengths = Lengths(operation, self.tensors)
        self.pairs = [(place[x], [place[other] for other in others]) for x, others in operation.overlaps(self.tensors)]
        CALLS[function] = self

    def __call__(self, tensors: tuple[Tensor | None, ...], options: tuple, host: object = None) -> Mapping[str, Any]:
        """The results by name. `host`: what the host knows of device data, on which launches depend, too."""
        entry, key, addresses = CACHE.find(self.kind if host is None else (self.kind, host), tensors, options)
        if entry is not None:
            results = entry.execute(tensors, addresses)
            count_writes(tensors, entry.writes)
            return results
        given = dict(zip((*self.tensors, *self.options), (*tensors, *options), strict=True))
        return self.first(key, addresses, tensors, given)

    def first(
        self, key: Key, addresses: list[int], tensors: tuple[Tensor | None, ...], given: dict[str, Any]
    ) -> Mapping[str, Any]:
        """A call unlike earlier ones."""
        for_kernel = given["backend"] is backends.KERNEL
        problem, t, backend = (self.check_for_kernel if for_kernel else self.check_on_all_ranks)(given, key)
        tracing = torch.compiler.is_compiling()
        inside = not tracing and is_transformed()
        if inside and (problem.requires_grad or any(map(is_wrapped, t.present().values()))):
            if isinstance(problem, ChunkProblem) and problem.ranks > 1:
                refuse_transforms("cp_context" if problem.packed else "group")
            return backend.build(problem, t).execute(())  # the reference: plain PyTorch, which every transform takes
        # a call that has a key has nothing but plain tensors
        if tracing or (key is None and not all(map(is_plain, t.present().values()))):
            # by name: inside the operator gradients are off, and "auto" might choose another backend than `explain` says
            found = torch_ops.call(problem, t, backend.name)
            if not tracing:
                count_writes(tensors, self.writes(given))
            return found
        if problem.requires_grad:
            differentiable = autograd.Differentiable(problem, backend, CACHE, self.tensors, key is not None)
            CACHE.keep(key, differentiable)
            if key is not None:  # as a repeated call, so that both have the same backward pass
                return differentiable.execute(tensors, [])
            return differentiable.apply(*(getattr(t, role) for role in differentiable.inputs))
        # a transform that no argument has a part in must not wrap what kernels write
        with torch._C._DisableFuncTorch() if inside else contextlib.nullcontext():
            plan, writes = backend.build(problem, t), self.writes(given)
            if key is None:
                results = plan.execute([*t.present().values()])
            else:
                refuse = functools.partial(self.refuse, error=NoKernel if for_kernel else ValueError)
                if not plan.lasting:  # others look themselves, in every call
                    refuse(tensors)
                plan.locate(t, tensors, self.index(tensors), Written(writes, self.pairs, refuse))
                results = plan.execute(tensors, addresses)
        count_writes(tensors, writes)
        if plan.lasting:
            CACHE.keep(key, plan)
        return results

    def index(self, tensors: Sequence[Tensor | None]) -> Mapping[str, int]:
        """The index of the caller's tensor that each role's is, or is a view of: q, k and v may be parts of rows."""
        rows = self.place.get(self.operation.rows)
        return self.roles if rows is None else {x: rows if tensors[i] is None else i for x, i in self.roles.items()}

    def writes(self, given: Mapping[str, Any]) -> list[int]:
        """Places of the tensors that the call writes."""
        return [self.place[name] for name in self.operation.written(given)]

    def check(
        self, given: Mapping[str, Any], *, dry: bool = False, device: torch.device | None = None, key: Key = None
    ) -> Checked:
        """Validates the arguments, and chooses the backend: for `device`, or where the tensors are. `dry`: as in
        `Operation.check`. `key`: of the launch cache."""
        options = None if key is None else (*key[:3], *map(type, key[1]))
        problem, t = self.lengths.check(given, options, dry)
        backend = backends.choose(problem, device or t.device, given["backend"])
        if not torch.compiler.is_compiling():
            self.check_transforms(problem, t, given, backend.plain)
        return problem, t, backend

    def check_for_kernel(self, given: Mapping[str, Any], key: Key) -> Checked:
        """`check_on_all_ranks`, whose refusals are remembered.

        Raises:
            NoKernel: with the reason.
        """
        try:
            return self.check_on_all_ranks(given, key)
        except REFUSALS as refusal:
            self.remember_refusal(str(refusal), given, key)
            raise NoKernel(str(refusal)) from refusal

    def remember_refusal(self, why: str, given: Mapping[str, Any], key: Key) -> None:
        """Remembers a refusal, unless overlaps or offsets on the host may have caused it, which the key does not tell."""
        if key is not None and given.get("cu_seqlens_cpu") is None:
            with contextlib.suppress(ValueError):
                self.refuse([given.get(name) for name in self.tensors])
                CACHE.keep(key, Refused(why))

    def refusal(self, named: Mapping[str, Any]) -> str | None:
        """The reason for which a call with `backend=KERNEL` would be refused, or None: for dispatchers that ask before they
        call. For a call like an earlier one the launch cache has the answer."""
        key: Key = None
        given: Mapping[str, Any] = self.defaults | dict(named)
        try:
            if given.keys() != self.signature.parameters.keys():
                given = self.named((), named)  # says what is missing, or unknown
            if given.get("cp_context") is None and given.get("group") is None:
                offsets = given.get("cu_seqlens_cpu")
                host = None if offsets is None else known_lengths(offsets, given["chunk_size"], given["q"])
                tensors, options = map(given.get, self.tensors), map(given.get, self.options)
                kind = self.kind if host is None else (self.kind, host)
                entry, key, _ = CACHE.find(kind, tuple(tensors), tuple(options))
                if entry is not None:
                    return getattr(entry, "why", None)
            self.check(given, dry=True)
        except Exception as refusal:  # arguments may raise anything, as they are asked what they are
            if isinstance(refusal, REFUSALS):
                self.remember_refusal(str(refusal), given, key)
            return str(refusal)
        return None

    def check_on_all_ranks(self, given: Mapping[str, Any], key: Key = None) -> Checked:
        context = given.get("cp_context")
        with broadcast_errors(context, given.get("group")):
            problem, t, backend = self.check(given, key=key)
        if isinstance(problem, ChunkProblem) and problem.ranks > 1:
            check_call_of_ranks(context, problem, backend.name)
        return problem, t, backend

    def named(self, arguments: Sequence[object], named: Mapping[str, object]) -> dict[str, Any]:
        """All arguments by name, with the defaults of those left out."""
        bound = self.signature.bind(*arguments, **named)
        bound.apply_defaults()
        return bound.arguments

    def check_transforms(self, problem: Problem, t: Tensors, given: Mapping[str, Any], plain: bool) -> None:
        """Refuses tensors inside transforms of `torch.func`, and with forward-mode tangents. Calls that are `plain` PyTorch
        take both, unless they write a tensor of the caller's, which has no room for what is inside a transform."""
        inside, tangents = is_transformed(), forward_ad._current_level >= 0
        if not inside and not tangents:
            return
        name_of, no_gradients, present = self.operation.name_of, self.operation.no_gradients, t.present()
        written = next(iter(self.operation.written(given)), None)
        for role, x in present.items():
            transformed = is_wrapped(x) or (inside and problem.requires_grad and x.requires_grad)
            if transformed and not (plain and written is None):
                why = f"{written} is written in place" if plain and written else 'or backend="reference"'
                raise wrong(name_of(role), "one inside", f"a tensor outside transforms of torch.func ({why})")
            if tangents and not (plain and no_gradients is None) and forward_ad.unpack_dual(x).tangent is not None:
                why = no_gradients or 'backend="reference" has forward-mode gradients'
                raise wrong(name_of(role), "one that has", f"a tensor without a forward-mode tangent ({why})")

    def refuse(self, tensors: Sequence[Tensor | None], error: type[ValueError] = ValueError) -> None:
        """Refuses a call whose tensors overlap, and says which."""
        try:
            self.operation.check_overlaps(dict(zip(self.tensors, tensors)))
        except ValueError as refusal:
            raise error(str(refusal)) from None


def count_writes(tensors: Sequence[Tensor | None], places: Sequence[int]) -> None:
    """Counts kernels' writes for autograd, which knows nothing of them: it refuses a backward pass of what it saved before."""
    written = [x for i in places if (x := tensors[i]) is not None]
    if written:
        increment_version(written)


def public_call(op: Callable[..., Any]) -> Dispatcher:
    if not callable(op) or op not in CALLS:
        places = ((f, "kernels." if call.kind == "wy" else "") for f, call in CALLS.items())
        names = ", ".join(f"flashdelta.{place}{function.__name__}" for function, place in places)
        raise ValueError(f"op must be one of {names}; got {op!r}, which is no operator")
    return CALLS[op]


def check(op: Callable[..., Any], /, *arguments: object, **named: object) -> tuple[Any, Any]:
    """Validates a public function's arguments, and runs nothing: the problem and the tensors, of the operation's family."""
    call = public_call(op)
    return call.operation.check(call.named(arguments, named))
