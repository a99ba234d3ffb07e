"""A call's road: `cache -> replay`, or `Problem -> backend -> Program -> run`, which is recorded for the next one like it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..problem.arguments import Operation, extent, is_plain
from ..problem.problem import INPUTS, Problem, Tensors
from ..program.cache import Key, LaunchCache, key
from . import autograd, torch_ops

CACHE: LaunchCache[Any] = LaunchCache()

CALLS: dict[Callable[..., Any], Call] = {}
"""By public function."""


class Call:
    """The calls of a public function. It passes its tensors and its options, each in the order of its signature."""

    def __init__(self, operation: Operation, function: Callable[..., Any]):
        parameters = inspect.signature(function).parameters.values()
        self.operation, self.function = operation, function
        self.tensors = tuple(p.name for p in parameters if "Tensor" in str(p.annotation))
        self.options = tuple(p.name for p in parameters if p.name not in self.tensors)
        CALLS[function] = self

    def __call__(self, tensors: tuple[Tensor | None, ...], options: tuple, host: object = None) -> Mapping[str, Any]:
        """The results by name. `host`: what the host knows of device data, on which launches depend, too."""
        known, addresses = key((self.operation.name, host), tensors, options)
        replay = CACHE.find(known)
        if replay is not None:
            return replay(tensors, addresses)
        return self.first(known, tensors, dict(zip(self.tensors, tensors)) | dict(zip(self.options, options)))

    def first(self, known: Key, tensors: tuple[Tensor | None, ...], given: dict[str, Any]) -> Mapping[str, Any]:
        """A call unlike earlier ones."""
        problem, t = self.operation.check(given)
        backend = backends.choose(problem, t.device, given["backend"])
        if torch.compiler.is_compiling() or not all(map(is_plain, t.present().values())):
            # by name: inside the operator gradients are off, and "auto" might choose another backend than `explain` says
            return torch_ops.call(problem, t, backend.name)
        if problem.requires_grad:
            differentiable = autograd.Differentiable(problem, backend, CACHE, self.tensors, known is not None)
            CACHE.keep(known, differentiable)
            return differentiable.run(*(getattr(t, role) for role in INPUTS))
        program = backend.build(problem, t)
        results = program.run(None if known is None else tensors)
        if program.recorded is not None:
            CACHE.keep(known, Replay(self, program.recorded, tensors))
        return results

    def refuse(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Of a call whose tensors overlap: says which."""
        by_name = dict(zip(self.tensors, tensors))
        self.operation.check_overlaps(self.operation.by_role(by_name))


class Replay:
    """A recorded program, and which tensors may not overlap: all that a check of a repeated call can still find."""

    used = 0

    def __init__(self, call: Call, program: backends.Recording, tensors: tuple[Tensor | None, ...]):
        self.call, self.program, self.usable = call, program, program.usable
        extents = {
            name: extent(x) for name, x in zip(call.tensors, tensors) if x is not None and x.device.type != "cpu"
        }
        place = {name: i for i, name in enumerate(call.tensors)}
        pairs: dict[str, list[tuple[int, int]]] = {}
        for role, other in call.operation.overlaps():
            a, b = call.operation.name_of(role), call.operation.name_of(other)
            if extents.get(a) and extents.get(b):
                pairs.setdefault(a, []).append((place[b], extents[b]))
        self.disjoint = [(place[name], extents[name], others) for name, others in pairs.items()]

    def __call__(self, tensors: tuple[Tensor | None, ...], addresses: list[int]) -> Mapping[str, Tensor]:
        for i, size, others in self.disjoint:
            begin = addresses[i]
            end = begin + size
            for j, length in others:
                if addresses[j] < end and begin < addresses[j] + length:
                    self.call.refuse(tensors)
        return self.program.run(tensors, addresses)


def public_call(op: Callable[..., Any]) -> Call:
    if op not in CALLS:
        names = ", ".join(f"flashdelta.{function.__name__}" for function in CALLS)
        raise ValueError(f"op: got {op!r}, wanted one of {names}")
    return CALLS[op]


def check(op: Callable[..., Any], *arguments: object, **named: object) -> tuple[Problem, Tensors]:
    """Validates a public function's arguments, and runs nothing."""
    call = public_call(op)
    bound = inspect.signature(op).bind(*arguments, **named)
    bound.apply_defaults()
    return call.operation.check(bound.arguments)
