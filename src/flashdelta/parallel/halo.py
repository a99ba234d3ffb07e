"""Tokens of the ranks before, as a short convolution needs them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..problem.arguments import check_tensor, is_wrapped, note_offsets, positive, refuse_changed, refuse_transforms
from ..problem.errors import rule, wrong
from .border import HALO
from .checks import broadcast_errors, check_on_all_ranks
from .context import ContextParallel, context_of
from .exchange import EARLIER, LATER, exchange, is_group


def halo(x: Tensor, context: Any, width: int) -> Tensor:
    """The `width` tokens before this rank's, of the sequence that its first token goes on with; zeros where that has fewer.

    A convolution of `W` taps over `torch.cat([halo(x, context, W - 1), x], dim=1)` is, on this rank's tokens, that over the
    sequence on all ranks. Every rank must call this, and run the backward pass, which brings gradients to the tokens' ranks.
    FLASHDELTA_CHECK=1 verifies that all ranks make the same call.

    Args:
        x: `[B, T, D]`, this rank's tokens; `B == 1` for packed sequences. Without a context's offsets `T >= width`.
        context: a `ContextParallel`, FLA's context, or a process group (each batch row is one sequence over all ranks).
        width: tokens, at least 1.

    Returns:
        `[B, width, D]` in x's dtype, differentiable in x.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message states the rule, then the value.
    """
    with broadcast_errors(context):
        c = _context(x, context, width)
    differentiable = torch.is_grad_enabled() and x.requires_grad
    # of batch rows each rank may have as many tokens as it likes
    sizes = (x.shape[0], x.shape[2], width, c.cu_seqlens is not None and x.shape[1])
    check_on_all_ranks(c, ("halo", sizes, x.dtype, differentiable, c.exchange), "context")
    if c.ranks == 1:
        return x.new_zeros(x.shape[0], width, x.shape[2])
    return _halo(x, c.border, c.name, c.exchange, c.rank, c.ranks, width)


def _context(x: Tensor, context: Any, width: int) -> ContextParallel:
    """The `ContextParallel` that `context` is or stands for; refuses arguments that do not fit."""
    check_tensor("x", x)
    if x.dim() != 3:
        raise wrong("x", f"shape {list(x.shape)}", "[B, T, D]")
    positive("width", width)
    of_rows = is_group(context) or context is torch.distributed.GroupMember.NON_GROUP_MEMBER
    given = (None, context) if of_rows else (context, None)
    c = context_of(*given, x.device, "context", "context")
    rule("context", c.knows_halo, "FLA's with the number of tokens on earlier ranks", "one without pre_num_conv_tokens")
    c.check_tokens(x)
    if c.cu_seqlens is None and x.shape[1] < width:
        raise wrong("x", f"{x.shape[1]} tokens", f"of at least width = {width} tokens on every rank")
    if x.device != c.device:
        raise wrong("x", f"device {x.device}", f"on the context's device {c.device}")
    if torch.compiler.is_compiling():
        return c
    if is_wrapped(x):
        refuse_transforms("halo")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise wrong("x", "one that has", "a tensor without a forward-mode tangent (halo has no forward-mode gradients)")
    return c


def _visible(border: Tensor, width: int) -> Tensor:
    """Says which of the tokens before belong to the sequence, `[1, width, 1]`."""
    return (torch.arange(width, 0, -1, device=border.device) <= border[HALO])[None, :, None]


# Operators with all that surrounds an exchange: a compiler would leave out one whose result a rank does not need, and others
# would wait for it.


@torch.library.custom_op("flashdelta::halo", mutates_args=())
def _halo(x: Tensor, border: Tensor, name: str, way: str, rank: int, ranks: int, width: int) -> Tensor:
    B, T, D = x.shape
    tail = min(T, width)
    tails = x.new_empty(ranks, B, tail, D)
    # not the caller's memory, which may be written while others are sent what was there
    own = x[:, T - tail :].clone(memory_format=torch.contiguous_format)
    exchange(own, tails, name, way, LATER)
    before = tails[:rank].transpose(0, 1).flatten(1, 2)[:, -width:] if tail else x.new_empty(B, 0, D)
    missing = x.new_zeros(B, width - before.shape[1], D)
    return torch.where(_visible(border, width), torch.cat([missing, before], dim=1), 0)


@_halo.register_fake
def _(x: Tensor, border: Tensor, name: str, way: str, rank: int, ranks: int, width: int) -> Tensor:
    return x.new_empty(x.shape[0], width, x.shape[2])


@torch.library.custom_op("flashdelta::halo_backward", mutates_args=())
def _halo_backward(grad: Tensor, border: Tensor, name: str, way: str, rank: int, ranks: int, tokens: int) -> Tensor:
    B, width, D = grad.shape
    grads = grad.new_empty(ranks, B, width, D)
    exchange(torch.where(_visible(border, width), grad, 0).contiguous(), grads, name, way, EARLIER)
    found, tail = grad.new_zeros(B, tokens, D), min(tokens, width)
    # rank r sees this rank's last tokens behind those of the ranks between
    for r in range(rank + 1, ranks):
        stop = width - (r - rank - 1) * tail
        start = max(stop - tail, 0)
        if stop > 0 and tail > 0:
            found[:, tokens - (stop - start) :] += grads[r][:, start:stop]
    return found


@_halo_backward.register_fake
def _(grad: Tensor, border: Tensor, name: str, way: str, rank: int, ranks: int, tokens: int) -> Tensor:
    return grad.new_empty(grad.shape[0], tokens, grad.shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, border, *ctx.where, _ = inputs
    ctx.tokens = x.shape[1]
    ctx.save_for_backward(border)
    note_offsets(ctx, {"context": border})


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_changed(ctx)
    return _halo_backward(grad, *ctx.saved_tensors, *ctx.where, ctx.tokens), *[None] * 6


_halo.register_autograd(_differentiate, setup_context=_save)
