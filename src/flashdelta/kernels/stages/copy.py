"""Stage `copy`: inputs that no kernel reads in place, laid out anew, and an output that none writes in place. `copy_kernel` has
tokens with their channels, `strided_copy_kernel` everything else. `Tensor.contiguous` takes four times as long for tokens that
lie innermost, and would be no part of a plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem.problem import Tensors, replaced
from ...program.launch import Launch

T = TypeVar("T", bound=Tensors)
Fits = Callable[[Tensor], bool]

TOKENS, CHANNELS = 64, 128
"""Most tokens and channels of a tile."""

AT_ONCE = 4
"""Tensors of a launch."""


@triton.jit
def copy_tile(x, rows, H, batch_stride, token_stride, head_stride, channel_stride, T, K, TILE, BK, BY_TOKEN):
    """`TILE` tokens of a head."""
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


HEADS = [f"H{i}" for i in range(AT_ONCE)]


@triton.jit(do_not_specialize=["B", *HEADS])
def copy_kernel(
    x0, rows0, H0, batch0: tl.int64, token0: tl.int64, head0: tl.int64, channel0: tl.int64,
    x1, rows1, H1, batch1: tl.int64, token1: tl.int64, head1: tl.int64, channel1: tl.int64,
    x2, rows2, H2, batch2: tl.int64, token2: tl.int64, head2: tl.int64, channel2: tl.int64,
    x3, rows3, H3, batch3: tl.int64, token3: tl.int64, head3: tl.int64, channel3: tl.int64, B, T,
    K: tl.constexpr, TILE: tl.constexpr, BK: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Tensors `x [B, T, H, K]` to dense `rows`, as many as there are. `BY_TOKEN`: tokens are adjacent."""
    which = tl.program_id(1)
    tile = tl.program_id(0)
    tiles = B * tl.cdiv(T, TILE)
    if (which == 0) & (tile < tiles * H0):
        copy_tile(x0, rows0, H0, batch0, token0, head0, channel0, T, K, TILE, BK, BY_TOKEN)
    # `and` would ask of an absent tensor, too
    if x1 is not None:  # noqa: SIM102
        if (which == 1) & (tile < tiles * H1):
            copy_tile(x1, rows1, H1, batch1, token1, head1, channel1, T, K, TILE, BK, BY_TOKEN)
    if x2 is not None:  # noqa: SIM102
        if (which == 2) & (tile < tiles * H2):
            copy_tile(x2, rows2, H2, batch2, token2, head2, channel2, T, K, TILE, BK, BY_TOKEN)
    if x3 is not None:  # noqa: SIM102
        if (which == 3) & (tile < tiles * H3):
            copy_tile(x3, rows3, H3, batch3, token3, head3, channel3, T, K, TILE, BK, BY_TOKEN)


def copy(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> Launch:
    """Copies tensors `[B, T, H, K]` that differ in their heads and strides to dense `rows`."""
    B, T, _, K = tensors[0].shape
    each = [(x, to, x.shape[2], *x.stride()) for x, to in zip(tensors, rows)]
    absent = [(None, None, 0, 0, 0, 0, 0)] * (AT_ONCE - len(each))
    ctas, arguments = B * triton.cdiv(T, TOKENS) * max(x.shape[2] for x in tensors), itertools.chain(*each, *absent)
    constants = dict(K=K, TILE=TOKENS, BK=min(triton.next_power_of_2(K), CHANNELS), BY_TOKEN=is_by_token(tensors[0]))
    return Launch(copy_kernel, ctas, (*arguments, B, T), constants, num_warps=4, rows=len(rows))


def is_by_token(x: Tensor) -> bool:
    return x.stride(1) == 1


ROWS, COLUMNS = 32, 128
"""Size of a tile of `strided_copy_kernel`."""

OUTER = 3
"""Its dimensions before those of a tile."""


@triton.jit(
    do_not_specialize=[
        *("x", "to", "n1", "n2", "rows", "columns"),
        *(f"{of}{i}" for of in ("x", "to") for i in range(OUTER + 2)),
    ]
)
def strided_copy_kernel(
    x, to, n1, n2, rows, columns, x0: tl.int64, x1: tl.int64, x2: tl.int64, x3: tl.int64, x4: tl.int64,
    to0: tl.int64, to1: tl.int64, to2: tl.int64, to3: tl.int64, to4: tl.int64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`to = x [n0, n1, n2, rows, columns]` of any strides, by tiles. One variant for each size of an element."""
    tile = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(columns, COLUMNS)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile //= across
    down = tl.cdiv(rows, ROWS)
    row = (tile % down) * ROWS + tl.arange(0, ROWS)[:, None]
    tile //= down
    x += tile % n2 * x2 + tile // n2 % n1 * x1 + tile // n2 // n1 * x0
    to += tile % n2 * to2 + tile // n2 % n1 * to1 + tile // n2 // n1 * to0
    inside = (row < rows) & (column < columns)
    tl.store(to + row * to3 + column * to4, tl.load(x + row * x3 + column * x4, mask=inside), mask=inside)


WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def strided_copy(x: Tensor, to: Tensor) -> list[Launch]:
    """Copies a tensor to one of its shape and dtype. One launch, unless many dimensions lie apart."""
    dims: list[tuple[int, int, int]] = []
    for n, *strides in zip(x.shape, x.stride(), to.stride()):
        if dims and [n * s for s in strides] == [*dims[-1][1:]]:
            n *= dims.pop()[0]
        if n > 1:
            dims.append((n, *strides))
    if len(dims) > OUTER + 2:
        first = max(i for i, n in enumerate(x.shape[: x.dim() - OUTER - 2]) if n > 1)
        parts = zip(x.unbind(first), to.unbind(first))
        return [launch for part in parts for launch in strided_copy(*part)]
    if len(dims) == 1 and dims[0][0] % COLUMNS == 0:
        n, *strides = dims[0]
        dims = [(n // COLUMNS, *(s * COLUMNS for s in strides)), (COLUMNS, *strides)]
    dims = [(1, 0, 0)] * (OUTER + 2 - len(dims)) + dims
    sizes, *places = zip(*dims)
    *outer, rows, columns = sizes
    word = WORDS[x.element_size()]
    ctas = math.prod(outer) * triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS) if x.numel() else 0
    arguments = (x.detach().view(word), to.detach().view(word), *sizes[1:], *itertools.chain(*places))
    return [Launch(strided_copy_kernel, ctas, arguments, dict(ROWS=ROWS, COLUMNS=COLUMNS), num_warps=4)]


def made_dense(t: T, roles: tuple[str, ...], fits: Fits) -> tuple[T, dict[str, tuple[Tensor, Tensor]]]:
    """Makes room for dense copies of tensors that do not fit. Returns the tensors with these in place, and by role those with
    elements, each with its copy."""
    given = {role: x for role in roles if (x := getattr(t, role, None)) is not None and not fits(x)}
    dense = {role: t.memory.new(x.shape, x.dtype) for role, x in given.items()}
    pairs = {role: (x, dense[role]) for role, x in given.items() if x.numel() > 0}
    return replaced(t, **dense) if dense else t, pairs


def laid_out(t: T, roles: tuple[str, ...], fits: Fits = Tensor.is_contiguous) -> tuple[T, list[Launch]]:
    """Replaces tensors of any shape that do not fit by dense copies."""
    t, pairs = made_dense(t, roles, fits)
    return t, [launch for pair in pairs.values() for launch in strided_copy(*pair)]


def read(t: T, roles: tuple[str, ...], fits: Fits) -> tuple[T, list[Launch]]:
    """Replaces tensors that do not fit by dense copies, those alike by one launch."""
    t, pairs = made_dense(t, roles, fits)
    alike: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
    for x, to in pairs.values():
        alike.setdefault((x.dtype, *x.shape[:2], x.shape[3], is_by_token(x)), []).append((x, to))
    parts = [found[i : i + AT_ONCE] for found in alike.values() for i in range(0, len(found), AT_ONCE)]
    return t, [copy(*zip(*part)) for part in parts]
