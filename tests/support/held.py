"""Calls of every operation against `tests.fuzz.truth`: what they return and write, and all memory that must stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..fuzz.truth import Claim, claims_of
from .oracle import assert_close, one_rounding, poisoned_memory

RESULTS = {
    "chunk_kda": ("o", "final_state", "h"),
    "fused_recurrent_kda": ("o", "final_state"),
    "recurrent_kda": ("o", "final_state"),
    "short_convolution": ("o", "final_state"),
    "fused_kda_decode": ("o",),
    "gated_rms_norm": ("o",),
}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_states(dtype: torch.dtype) -> float:
    """The tolerance of a state that is worked out in float32 (float64) and rounded once."""
    return 1e-11 if dtype == torch.float64 else 1e-5 + one_rounding(dtype)


def bytes_of(x: Tensor) -> Tensor:
    """All memory that `x` lies in."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def run_held(
    op: Callable, call: dict, tolerance: float, states: Callable[[torch.dtype], float] = of_states
) -> tuple[Tensor | None, ...]:
    """Returns the results of `op(**call)`. Outputs are held to `tolerance`, and states, by their dtype, to `states`."""
    claims = claims_of(op.__name__, call)
    tensors = {name: x for name, x in call.items() if isinstance(x, Tensor) and x.numel() > 0}
    before = {name: bytes_of(x).clone() for name, x in tensors.items()}
    with poisoned_memory():
        found = op(**call)
    results = (found,) if isinstance(found, Tensor) else found or ()
    for name, x in (("out", results[:1]), ("output", results[:1]), ("final_state", results[1:2])):
        assert call.get(name) is None or x[0] is call[name], f"{name}: the result lies elsewhere"
    hold_memory(claims, tensors, before)
    hold_claims(claims, call | dict(zip(RESULTS.get(op.__name__, ()), results)), tolerance, states)
    return results


def hold_memory(claims: Sequence[Claim], tensors: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """No byte has changed but of outputs, and of what some claim is about."""
    free: dict[int, Tensor] = {}
    for name, x in tensors.items():
        mask = free.setdefault(x.untyped_storage().data_ptr(), torch.zeros_like(before[name]))
        item = x.element_size()
        elements = mask[: len(mask) // item * item].view(INTEGERS[item])
        places = [()] if name in ("out", "output") else [c.index for c in claims if c.target == name]
        for index in places:
            elements.as_strided(x.shape, x.stride(), x.storage_offset())[index] = -1
    for name, x in tensors.items():
        stays = free[x.untyped_storage().data_ptr()] == 0
        assert torch.equal(bytes_of(x)[stays], before[name][stays]), f"{name}: written where nothing is to be stored"


def hold_claims(
    claims: Sequence[Claim], where: dict, tolerance: float, states: Callable[[torch.dtype], float] = of_states
) -> None:
    """All claims of a tensor together. What is no number must be none, and zeros must be zeros."""
    rows: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
    for claim in (x for x in claims if x.want is not None):
        found = where[claim.target].detach()
        got = found[claim.index].cpu().double()
        got = got if claim.read is None else claim.read(got)
        want, name = claim.want.expand(got.shape), f"{claim.target}{claim.index}"
        finite = want.isfinite()
        assert torch.equal(got.isfinite(), finite), f"{name}: not finite elsewhere than wanted"
        assert claim.target != "o" or got[want == 0].eq(0).all(), f"{name}: not zero"
        assert not claim.exact or torch.equal(got, want), f"{name}: {got}, not {want}"
        pair = (torch.where(finite, x, 0.0).reshape(-1, x.shape[-1]) for x in (got, want))
        rows.setdefault((claim.target, found.dtype, got.shape[-1]), []).append(tuple(pair))
    for (target, dtype, _), pairs in rows.items():
        got, want = (torch.cat(x) for x in zip(*pairs))
        allowed = 0.0 if target == "conv_state" else tolerance if target in ("o", "h") else states(dtype)
        assert_close(target, got, want, allowed)
