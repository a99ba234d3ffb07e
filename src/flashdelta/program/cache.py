"""Repeated calls: what was found out about a call (its validation, the backend, the launches) is kept for the next call that
differs in nothing but the contents and addresses of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..problem import device_checks as checked

PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors whose work needs no dispatcher."""

Found = TypeVar("Found")

MOST = 4096
"""Kept calls. Beyond that all are forgotten, and found out again."""


class Plan(Protocol):
    """`steps.Plan`. These are protocols for modules that must not import kernels."""

    def usable(self) -> bool: ...

    def run(
        self,
        given: Sequence[Tensor | None],
        out: Tensor | None,
        addresses: list[int],
        refuse: Callable[[Sequence[Tensor | None], Tensor], None],
    ) -> tuple[Tensor, Tensor | None]: ...


class Steps(Protocol):
    """`steps.Steps`."""

    def usable(self) -> bool: ...

    def run(self, addresses: list[int]) -> dict[str, Tensor]: ...


class Recorder(Protocol):
    """`steps.Recorder`, which is shown launches."""

    def add(self, launch: object, outputs: Mapping[str, Tensor]) -> None: ...

    def steps(self) -> Steps | None: ...


_SEEN = object()
_plans: dict[tuple, object] = {}
"""By key: `_SEEN` after the first such call, then its plan, or None if it has none."""


def key(tensors: Sequence[Tensor | None], options: tuple) -> tuple[tuple | None, list[int]]:
    """All that a call's validation and launches depend on, and the addresses of its `tensors` (0 where there is none). The
    key is None for a call that may not be kept: one that is traced, checked on the host, or not on a GPU, and one with
    arguments that are no plain tensors, or have no memory of their own (sparse ones, those inside `torch.vmap`)."""
    if checked.ENABLED or torch.compiler.is_compiling():
        return None, []
    grad = torch.is_grad_enabled()
    found, addresses, device = [options, grad], [], -1
    for x in tensors:
        if x is None:
            found.append(None)
            addresses.append(0)
        elif type(x) in PLAIN:
            # flat, and the device as a number: all this is most of the host time of a repeated call
            try:
                index, address = x.get_device(), x.data_ptr()
                found += (x.shape, x.stride(), x.dtype, index, grad and x.requires_grad, address & 15)
            except RuntimeError:
                return None, []
            if index > device:
                device = index
            addresses.append(address)
        else:
            return None, []
    if device < 0:
        return None, []
    return tuple(found), addresses


def recorder(known: Sequence[Tensor | None]) -> Recorder:
    """That turns launches into `Steps`, for a call of the tensors `known`."""
    from .program import Recorder as StepsRecorder  # decorated kernels read TRITON_INTERPRET when first imported

    return StepsRecorder(known[0].device, known)


def find(key: tuple | None) -> Plan | Steps | None:
    try:
        plan = _plans.get(key)
    except TypeError:  # an option that can't be hashed, which the validation will refuse
        return None
    return plan if plan is not None and plan is not _SEEN and plan.usable() else None


def remember(key: tuple | None, make: Callable[[], Plan | Steps | None]) -> None:
    """Of a call that has just run. Its plan is made the second time: most calls with lengths of their own never repeat."""
    if key is None:
        return
    if key not in _plans:
        if len(_plans) >= MOST:
            _plans.clear()
        _plans[key] = _SEEN
    elif _plans[key] is _SEEN:
        _plans[key] = make()


def recorded(key: tuple | None, known: Sequence[Tensor | None], run: Callable[[Recorder | None], Found]) -> Found:
    """`run(recorder)`. There is a recorder the second time such a call runs: what it is shown becomes the call's plan. Unlike
    with `remember`, nothing is worked out and allocated again for that."""
    shown = recorder(known) if key is not None and _plans.get(key) is _SEEN else None
    found = run(shown)
    remember(key, lambda: None if shown is None else shown.steps())
    return found
