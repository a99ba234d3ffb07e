"""How a contender's results are checked against float64. No time is shown without a passed check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...testing.cases import Case
from ...testing.oracle import absolute_errors, relative_error

Errors = dict[str, dict[str, float]]
"""By measure (`error`, the relative one, is what decides), then by result."""

GRADIENT_TOLERANCE = 2e-2
"""Largest relative error of a gradient of the whole call in bf16."""

WY_TOLERANCE = 1e-2
"""The same of the WY step alone: operands of two products in a row are rounded."""


def errors(
    want: Sequence[Tensor], names: Sequence[str], found: Sequence[Tensor], absolute: bool = False, largest: bool = False
) -> Errors:
    """`error`: `||x - want|| / ||want||`; if `absolute` also root mean square and maximum of the distance, `rmse` and
    `max_error`; with `largest` that maximum over the largest element wanted."""
    pairs = list(zip(names, found, want))
    measured = {"error": {name: relative_error(x, exact) for name, x, exact in pairs}}
    if absolute or largest:
        both = {name: absolute_errors(x, exact) for name, x, exact in pairs}
        scale = {name: (exact.abs().max().item() if largest else 0) or 1.0 for name, _, exact in pairs}
        measured["max_error"] = {name: maximum / scale[name] for name, (_, maximum) in both.items()}
        if absolute:
            measured["rmse"] = {name: rmse for name, (rmse, _) in both.items()}
    return measured


def fault(found: Mapping[str, float], tolerance: float) -> str | None:
    """What is wrong with results that err so much, if anything; a NaN is."""
    wrong = [f"{name} {error:.1e}" for name, error in found.items() if not error <= tolerance]
    return f"wrong: error {', '.join(wrong)}, tolerance {tolerance:.0e}" if wrong else None


# ---- gradients of some heads: of all of them float64 would take terabytes --------------------------------------------

CHECKED = 8
"""Query/key heads, at most. As many as make the error of `A_log`, one number a head, say something: a sum over all tokens may
be near zero."""


def spread(count: int, total: int) -> list[int]:
    """`count` of `total` indices, or all if there are fewer: the first, the last and some between."""
    return sorted({i * (total - 1) // (count - 1) for i in range(count)})


def checked_heads(case: Case) -> list[int]:
    """Query/key heads that are held against float64."""
    return spread(CHECKED, case.H)


def heads_of(x: Tensor, name: str, case: Case, head: int) -> Tensor:
    """What belongs to query/key head `head` and to the value heads that read it."""
    group = case.HV // case.H
    own = slice(head * group, (head + 1) * group)
    if name in ("q", "k"):
        return x[:, :, head : head + 1]
    if name == "A_log":
        return x[own]
    if name == "dt_bias":
        return x.view(case.HV, case.K)[own].flatten()
    return x[:, :, own]


def gradient_errors(want: Mapping[int, Mapping[str, Tensor]], case: Case, found: Sequence[Tensor]) -> Errors:
    """Of each gradient over the checked heads; `want` is by head and name."""
    names = list(next(iter(want.values())))
    ours = [torch.cat([heads_of(x, name, case, head).flatten() for head in want]) for name, x in zip(names, found)]
    exact = [torch.cat([part[name].flatten() for part in want.values()]) for name in names]
    return errors(exact, names, ours)
