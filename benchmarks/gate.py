"""The gate before the clock: results are held against float64, and a contender that fails has no time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flashdelta.tools.devices import synchronize
from tests.support.cases import Case
from tests.support.oracle import relative_error

Results = Sequence[Tensor]
Errors = dict[str, float]

PEER_TOLERANCE = 5e-2
"""Relative error past which another library's result is wrong and its time means nothing."""

GRADIENT_TOLERANCE = 2e-2
"""Largest relative error of a gradient of a call in bf16."""

CHECKED_HEADS = 8
"""Query/key heads held against float64 where all of them would take terabytes."""

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
"""Arguments whose gradients are taken."""


def errors(want: Sequence[Tensor], names: Sequence[str], found: Results) -> Errors:
    """`||x - want|| / ||want||` by name."""
    return {name: relative_error(x, exact) for name, x, exact in zip(names, found, want)}


def fault(found: Mapping[str, float], tolerance: float) -> str | None:
    """Names the results past the tolerance, if any; a NaN is."""
    wrong = [f"{name} {error:.1e}" for name, error in found.items() if not error <= tolerance]
    return f"wrong: error {', '.join(wrong)}, tolerance {tolerance:.0e}" if wrong else None


def second_result(call: Callable[[], Results], device: torch.device) -> Results:
    """Results of a second call. The allocator gives it the memory of the first one's, overwritten with NaN: an element that is
    never written shows."""
    first = [*call()]
    synchronize(device)
    while first:
        first.pop().fill_(torch.nan)
    results = call()
    synchronize(device)
    return results


def spread(count: int, total: int) -> list[int]:
    """`count` of `total` indices, first and last among them; all if there are fewer."""
    return sorted({i * (total - 1) // (count - 1) for i in range(count)})


def heads_of(x: Tensor, name: str, case: Case, head: int) -> Tensor:
    """The part that belongs to query/key head `head` and its value heads."""
    group = case.HV // case.H
    own = slice(head * group, (head + 1) * group)
    if name in ("q", "k"):
        return x[:, :, head : head + 1]
    if name == "A_log":
        return x[own]
    return x.view(case.HV, case.K)[own].flatten() if name == "dt_bias" else x[:, :, own]


def random_like(x: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator(device=x.device).manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)


def true_gradients(
    heads: Sequence[int],
    leaves_of: Callable[[int], Mapping[str, Tensor]],
    run: Callable[[Mapping[str, Tensor]], Tensor],
    grad_of: Callable[[int], Tensor],
) -> dict[int, dict[str, Tensor]]:
    """Gradients by head and leaf, from float64 autograd of `run` on the head's part of the leaves."""
    found = {}
    for head in heads:
        leaves = {name: x.detach().double().contiguous().requires_grad_() for name, x in leaves_of(head).items()}
        grads = torch.autograd.grad(run(leaves), list(leaves.values()), grad_of(head).double())
        found[head] = dict(zip(leaves, grads))
    return found


def gradient_errors(want: Mapping[int, Mapping[str, Tensor]], part: Callable[..., Tensor], found: Results) -> Errors:
    """Errors of gradients over the checked heads. `part(x, name, head)` is the head's part of the gradient called `name`."""
    names = list(next(iter(want.values())))
    ours = [torch.cat([part(x, name, head).flatten() for head in want]) for name, x in zip(names, found)]
    exact = [torch.cat([heads[name].flatten() for heads in want.values()]) for name in names]
    return errors(exact, names, ours)
