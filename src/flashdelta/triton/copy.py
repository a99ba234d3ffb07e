"""Stage `copy`: dense rows of inputs that no kernel reads in place, such as those of a convolution that has tokens innermost.
`Tensor.contiguous` takes four times as long for these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..problem.problem import Tensors
from ..program.launch import Launch

TOKENS, CHANNELS = 64, 128
"""Of a tile, at most."""


@triton.jit(do_not_specialize=["H"])
def copy_kernel(
    x,
    rows,
    T,
    H,
    batch_stride: tl.int64,
    token_stride: tl.int64,
    head_stride: tl.int64,
    channel_stride: tl.int64,
    K: tl.constexpr,
    TILE: tl.constexpr,
    BK: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """`x [B, T, H, K]` to dense `rows`, `TILE` tokens of a head a CTA. `BY_TOKEN`: tokens are adjacent."""
    tile = tl.program_id(0)
    tiles = tl.cdiv(T, TILE)
    token = (tile % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    head = (tile // tiles % H).to(tl.int64)
    batch = (tile // tiles // H).to(tl.int64)
    from_ = x + batch * batch_stride + head * head_stride
    to = rows + ((batch * T + token) * H + head)[:, None] * K
    in_row = token if BY_TOKEN else token * token_stride
    for first in tl.static_range(0, K, BK):
        channel = first + tl.arange(0, BK)
        inside = (token < T)[:, None] & (channel < K)[None, :]
        found = tl.load(from_ + in_row[:, None] + (channel * channel_stride)[None, :], mask=inside, other=0.0)
        tl.store(to + channel[None, :], found, mask=inside)


def copy(x: Tensor) -> Launch:
    """Of `x [B, T, H, K]`; its scratch is the copy."""
    B, T, H, K = x.shape
    rows = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return Launch(
        copy_kernel,
        B * H * triton.cdiv(T, TOKENS),
        (x, rows, T, H, *x.stride()),
        dict(K=K, TILE=TOKENS, BK=min(triton.next_power_of_2(K), CHANNELS), BY_TOKEN=x.stride(1) == 1),
        num_warps=4,
        scratch=(rows,),
    )


class Inputs(NamedTuple):
    """A call's tensors as kernels read them, and the launches that copy those they can't."""

    t: Tensors
    copies: list[Launch]


def read(t: Tensors, roles: tuple[str, ...], fits: Callable[[Tensor], bool]) -> Inputs:
    """With copies of the tensors that do not fit."""
    named = {role: x for role in roles if (x := getattr(t, role)) is not None and not fits(x)}
    copies = {role: copy(x) for role, x in named.items() if x.numel() > 0}
    empty = {role: x.contiguous() for role, x in named.items() if role not in copies}
    return Inputs(
        replace(t, **empty, **{role: launch.scratch[0] for role, launch in copies.items()}), [*copies.values()]
    )
