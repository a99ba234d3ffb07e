"""Repeated calls: what was found out about a call (its validation, the backend, the launches) is kept for the next call that
differs in nothing but the contents and addresses of its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors whose work needs no dispatcher."""

MOST = 4096
"""Kept calls. Beyond that all are forgotten, and found out again."""


class Plan(Protocol):
    """`launch.Plan`, as seen from a module that must not import kernels."""

    def usable(self) -> bool: ...

    def run(self, given: Sequence[Tensor | None], out: Tensor | None) -> tuple[Tensor, Tensor | None]: ...


_SEEN = object()
_plans: dict[tuple, object] = {}
"""By key: `_SEEN` after the first such call, then its plan, or None if it has none."""


def key(given: Sequence[Tensor | None], options: tuple) -> tuple | None:
    """All that a call's validation and launches depend on; None for a call that may not be kept: one that is traced, or
    checked on the host."""
    if torch.compiler.is_compiling() or os.environ.get("FLASHDELTA_CHECK") == "1":
        return None
    try:
        tensors = [
            None
            if x is None
            else (x.shape, x.stride(), x.dtype, x.device, x.__class__, x.requires_grad, x.data_ptr() & 15)
            for x in given
        ]
        found = (*tensors, options, torch.is_grad_enabled())
        hash(found)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # no tensor, no memory, or no valid option: the validation says what
        return None
    return found


def find(key: tuple | None) -> Plan | None:
    plan = _plans.get(key)
    return plan if plan is not None and plan is not _SEEN and plan.usable() else None


def remember(key: tuple | None, make: Callable[[], Plan | None]) -> None:
    """Of a call that has just run. Its plan is made the second time: most calls with lengths of their own never repeat."""
    if key is None:
        return
    if key not in _plans:
        if len(_plans) >= MOST:
            _plans.clear()
        _plans[key] = _SEEN
    elif _plans[key] is _SEEN:
        _plans[key] = make()
