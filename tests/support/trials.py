"""Calls of which decays alone do not tell what a chunk forgets."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..gpu.calls import KIMI
from .cases import BF16, FP32, Case
from .inputs import make_call

EXPLICIT = replace(
    KIMI, name="explicit", gate="none", lower_bound=None, safe=True, l2norm=False, beta="value", state=FP32
)
"""Decays, keys and write strengths as they are given."""

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
