"""Tokens of the ranks before, as a short convolution needs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ..problem.context import HALO, ContextParallel, context_of, gather
from ..problem.errors import wrong


def halo(x: Tensor, context: Any, width: int) -> Tensor:
    """The `width` tokens before this rank's, of the sequence that its first token goes on with; zeros where that has fewer.

    A convolution of `W` taps over `torch.cat([halo(x, context, W - 1), x], dim=1)` is, on this rank's tokens, that over the
    sequence on all ranks. Every rank must call this, and run the backward pass, which brings gradients to the tokens' ranks.

    Args:
        x: `[B, T, D]`, this rank's tokens; `B == 1` for packed sequences. Without a context's offsets `T >= width`.
        context: a `ContextParallel`, FLA's context, or a process group (each batch row is one sequence over all ranks).
        width: tokens, at least 1.

    Returns:
        `[B, width, D]` in x's dtype, differentiable in x.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it, what came and what was wanted.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, wanted a torch.Tensor")
    if x.dim() != 3:
        raise wrong("x", f"shape {list(x.shape)}", "[B, T, D]")
    if isinstance(width, bool) or not isinstance(width, int):
        raise TypeError(f"width: got {width!r} ({type(width).__name__}), wanted an int")
    if width < 1:
        raise wrong("width", width, "at least 1")
    is_group = torch.distributed.is_available() and isinstance(context, torch.distributed.ProcessGroup)
    c = context_of(None, context, x.device) if is_group else context_of(context, None, x.device)
    if not c.knows_halo:
        raise wrong("context", "one without pre_num_conv_tokens", "FLA's with the number of tokens on earlier ranks")
    if c.cu_seqlens is not None and (x.shape[0] != 1 or x.shape[1] != c.tokens):
        raise wrong("x", f"shape {list(x.shape)}", f"[1, T, D] with the context's T = {c.tokens} tokens a rank")
    if c.cu_seqlens is None and x.shape[1] < width:
        raise wrong("x", f"{x.shape[1]} tokens", f"at least width = {width} on every rank")
    if x.device != c.device:
        raise wrong("x", f"device {x.device}", f"the context's device {c.device}")
    if c.ranks == 1:
        return x.new_zeros(x.shape[0], width, x.shape[2])
    return _Halo.apply(x, c, width)


def _visible(c: ContextParallel, width: int) -> Tensor:
    """Which of the tokens before belong to the sequence, `[1, width, 1]`."""
    return (torch.arange(width, 0, -1, device=c.device) <= c.border[HALO])[None, :, None]


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, c: ContextParallel, width: int) -> Tensor:
        B, T, D = x.shape
        tail = min(T, width)
        tails = x.new_empty(c.ranks, B, tail, D)
        gather(x[:, T - tail :].contiguous(), tails, c.name)
        before = tails[: c.rank].transpose(0, 1).flatten(1, 2)[:, -width:] if tail else x.new_empty(B, 0, D)
        missing = x.new_zeros(B, width - before.shape[1], D)
        ctx.context, ctx.shape, ctx.width = c, x.shape, width  # type: ignore[attr-defined]
        ctx.visible = _visible(c, width)  # type: ignore[attr-defined]
        return torch.where(ctx.visible, torch.cat([missing, before], dim=1), 0)  # type: ignore[attr-defined]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        c, (B, T, D), width = ctx.context, ctx.shape, ctx.width
        grads = grad.new_empty(c.ranks, B, width, D)
        gather(torch.where(ctx.visible, grad, 0).contiguous(), grads, c.name)
        found, tail = grad.new_zeros(B, T, D), min(T, width)
        # rank r sees this rank's last tokens behind those of the ranks between
        for r in range(c.rank + 1, c.ranks):
            stop = width - (r - c.rank - 1) * tail
            start = max(stop - tail, 0)
            if stop > 0 and tail > 0:
                found[:, T - (stop - start) :] += grads[r][:, start:stop]
        return found, None, None
