"""Calls whose channels differ from each other in what they forget, or from token to token."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..gpu.calls import UNBOUNDED
from .cases import BF16, FP32
from .inputs import make_call

KINDS = (
    "channels gone at once",
    "one channel gone at once, one key",
    "tokens that forget",
    "first halves",
    "second halves",
    "just beyond, one key",
    "down to the clamp",
    "steep, then flat",
    "infinite",
)


def decays_call(kind: str, T: int, H: int, device: str = "cpu", K: int = 128) -> dict:
    """With log decays of one of `KINDS`, given in bf16."""
    hard = "same_keys_2" if "one key" in kind else None
    case = replace(
        UNBOUNDED, name=kind, gate="none", beta="value", hard=hard, H=H, HV=2 * H, K=K, V=64, T=T, state=FP32
    )
    call = make_call(case, BF16, device)
    g = torch.full_like(call["g"], -1e-3, dtype=BF16)
    token = torch.arange(T, device=device)[None, :, None, None]
    if kind == "channels gone at once":
        g[..., ::7] = -200.0
    elif kind == "one channel gone at once, one key":
        g[..., 5] = -200.0
    elif kind == "tokens that forget":
        g[:, ::5, :, ::3] = -200.0
    elif kind == "first halves":
        g[..., ::2] = torch.where(token % 32 < 16, -12.0, -1e-3)
    elif kind == "second halves":
        g[..., ::2] = torch.where(token % 32 >= 16, -12.0, -1e-3)
    elif kind == "just beyond, one key":
        g[..., ::3] = -5.1
    elif kind == "down to the clamp":
        g[..., 1::2] = -20.0
    elif kind == "steep, then flat":
        # -20 for 4 tokens behind the middle of 8: what a factor loses the product must not
        g[..., ::2] = torch.where(token % 16 // 4 == 1, -20.0, -1.0)
    elif kind == "infinite":
        g[:, ::9, :, ::2] = -torch.inf
    return call | {"g": g, "backend": "hopper", "split": False}
