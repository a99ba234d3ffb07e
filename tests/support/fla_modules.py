"""The surroundings of KDA in FLA's models, in PyTorch: FLA's own kernels need a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashdelta as fd

UNFUSED = {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False}
"""Options of a model of FLA's that runs on a CPU, with these functions in place of FLA's."""


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """FLA's states have one input more than ours."""
    past = None if initial_state is None else initial_state[..., 1:].to(x.dtype)
    options = {"activation": activation, "cu_seqlens": cu_seqlens, "output_final_state": output_final_state}
    y, state = fd.short_convolution(x, weight.to(x.dtype), bias, initial_state=past, **options)
    return y, None if state is None else F.pad(state, (1, 0))


def causal_conv1d_update(x: Tensor, cache: Tensor, weight: Tensor, activation: str | None, **_: Any) -> tuple:
    y, state = causal_conv1d(x.reshape(-1, 1, len(weight)), weight, None, cache, True, activation)
    cache.copy_(state)
    return y.reshape(x.shape), cache


def rms_norm_gated(x: Tensor, g: Tensor, weight: Tensor, bias: None, activation: str, eps: float, **_: Any) -> Tensor:
    assert bias is None and activation == "sigmoid"
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps) * torch.sigmoid(g.float())
    return y.to(x.dtype)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return (F.silu(x.float()) * y).to(x.dtype)


def put(patch: pytest.MonkeyPatch) -> None:
    """Puts them in place of FLA 0.6's."""
    ops = import_module("fla.modules.causal_conv1d.ops")
    patch.setattr(ops, "causal_conv1d", causal_conv1d)
    patch.setattr(ops, "causal_conv1d_update", causal_conv1d_update)
    patch.setattr(import_module("fla.modules.norm.fused_norm_gate"), "rms_norm_gated", rms_norm_gated)
    patch.setattr(import_module("fla.modules.mlp"), "swiglu", swiglu)
