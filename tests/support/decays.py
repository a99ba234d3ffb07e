"""Calls whose channels differ in what they forget, or from token to token; and such of which decays alone do not
tell what a chunk forgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..gpu.calls import KIMI, UNBOUNDED
from .cases import BF16, FP32, Case
from .inputs import make_call

EVERY = slice(None)
KINDS: dict[str, tuple[tuple, Callable[[torch.Tensor], object]]] = {
    "channels gone at once": ((..., slice(0, None, 7)), lambda token: -200.0),
    "one channel gone at once, one key": ((..., 5), lambda token: -200.0),
    "tokens that forget": ((EVERY, slice(0, None, 5), EVERY, slice(0, None, 3)), lambda token: -200.0),
    "first halves": ((..., slice(0, None, 2)), lambda token: torch.where(token % 32 < 16, -12.0, -1e-3)),
    "second halves": ((..., slice(0, None, 2)), lambda token: torch.where(token % 32 >= 16, -12.0, -1e-3)),
    "just beyond, one key": ((..., slice(0, None, 3)), lambda token: -5.1),
    "down to the clamp": ((..., slice(1, None, 2)), lambda token: -20.0),
    # -20 for 4 tokens behind the middle of 8: what a factor loses the product must not
    "steep, then flat": ((..., slice(0, None, 2)), lambda token: torch.where(token % 16 // 4 == 1, -20.0, -1.0)),
    "infinite": ((EVERY, slice(0, None, 9), EVERY, slice(0, None, 2)), lambda token: -torch.inf),
}
"""Where channels and tokens have what log decay, by the number of the token; all others have -1e-3."""


def decays_call(kind: str, T: int, H: int, device: str = "cpu", K: int = 128) -> dict:
    """With log decays of one of `KINDS`, given in bf16."""
    hard = "same_keys_2" if "one key" in kind else None
    case = replace(
        UNBOUNDED, name=kind, gate="none", beta="value", hard=hard, H=H, HV=2 * H, K=K, V=64, T=T, state=FP32
    )
    call = make_call(case, BF16, device)
    g = torch.full_like(call["g"], -1e-3, dtype=BF16)
    place, decay = KINDS[kind]
    g[place] = decay(torch.arange(T, device=device)[None, :, None, None])
    return call | {"g": g, "backend": "hopper", "split": False}


EXPLICIT = replace(KIMI, name="explicit", gate="none", lower_bound=None, safe=True, beta="value", state=FP32)
"""Decays and write strengths as they are given."""

OTHERS = (9, 70)
"""Channels that `moved` moves to: of the same half, and of the other."""


def explicit_call(case: Case, g: torch.Tensor, k: torch.Tensor | None = None, device: str = "cpu") -> dict:
    """With log decays `g [chunks, 64, K]`, and keys `k`, written with strength 1, for all heads."""
    call = make_call(case, BF16, device) | {"backend": "hopper"}
    call["g"].copy_(g.reshape(1, -1, 1, case.K))
    if k is not None:
        call["k"].copy_(k.reshape(1, -1, 1, case.K))
        call["beta"].fill_(1.0)
    return call


def moved(case: Case, other: int, device: str = "cpu") -> dict:
    """No channel's decay lets anything outlast a chunk. But in the middle of each a key moves half of channel 3 to another, or
    back, which decays in the first half of the chunk alone."""
    g, k = torch.full((case.T // 64, 2, 32, case.K), -5.0), torch.zeros(case.T // 64, 64, case.K)
    g[0::2, 0, :, 3] = g[0::2, 1, :, other] = g[1::2, 0, :, other] = g[1::2, 1, :, 3] = 0.0
    k[:, 31, [3, other]] = 0.5**0.5
    return explicit_call(case, g, k, device)
