"""Tensors in memory of their own, between guard zones, at any strides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

GUARD = 256
"""Bytes before the first element of a tensor and behind the last one, at least."""

POISON = 0xFF
"""Every byte that no element covers: NaN in a float of any width, -1 in an integer."""


@dataclass(frozen=True)
class Place:
    """Where the elements of a tensor lie: `offset` and `strides` in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def extent(self) -> int:
        """Elements from the first one to behind the last one."""
        return 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides))


def dense(shape: Iterable[int], dtype: torch.dtype, order: Iterable[int] = (), pads: dict | None = None) -> Place:
    """Dimensions from the outermost in memory to the innermost, as `order` says; `pads[d]`: elements that lie between two steps
    of dimension `d` beyond what the inner ones need."""
    shape = tuple(shape)
    strides, step = [0] * len(shape), 1
    for d in reversed([*order] or range(len(shape))):
        step += (pads or {}).get(d, 0)
        strides[d] = step
        step *= max(shape[d], 1)
    return Place(shape, tuple(strides), dtype)


LAYOUTS = ("dense", "head_first", "last_strided", "expanded", "odd_offset", "padded", "wide_rows")


def token_place(draw: Random, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Place:
    """The place of a tensor `[B, T, heads, ...]`."""
    ranks = range(len(shape))
    pads = {"last_strided": {ranks[-1]: 1}, "padded": {1: draw.choice((4, 7, 8))}}
    pads["wide_rows"] = {1: draw.choice((64, 128)), 0: 16}
    found = dense(shape, dtype, (0, 2, 1, *ranks[3:]) if layout == "head_first" else (), pads.get(layout))
    if layout == "odd_offset":
        return replace(found, offset=draw.choice((1, 2, 3, 5)))
    if layout == "expanded":
        return replace(found, strides=tuple(0 if d in (0, 2) else s for d, s in zip(ranks, found.strides)))
    return found


class Memory:
    """A tensor and the bytes around it."""

    def __init__(self, place: Place, device: torch.device):
        self.place = place
        item = torch.empty((), dtype=place.dtype).element_size()
        size = 2 * GUARD + (place.offset + place.extent) * item
        self.bytes = torch.full((size + -size % 16,), POISON, dtype=torch.uint8, device=device)
        self.start = GUARD // item + place.offset
        self.tensor = self.view(self.bytes)

    def view(self, memory: Tensor) -> Tensor:
        if 0 in self.place.shape:
            return torch.empty(self.place.shape, dtype=self.place.dtype, device=memory.device)
        return memory.view(self.place.dtype).as_strided(self.place.shape, self.place.strides, self.start)

    def fill(self, values: Tensor) -> None:
        """The tensor's elements; of an expanded dimension the first counts."""
        if values.numel() == 0:
            return
        for d, stride in enumerate(self.place.strides):
            if stride == 0:
                values = values.narrow(d, 0, 1)
        target = self.tensor
        for d, n in enumerate(values.shape):
            target = target.narrow(d, 0, n)
        target.copy_(values)

    def changed(self, before: Tensor, allowed: Iterable[tuple]) -> bool:
        """Whether a byte differs from `before` that is not of an element at one of the indices."""
        item = self.tensor.element_size()
        free = torch.zeros(len(self.bytes) // item, dtype=torch.bool, device=self.bytes.device)
        if self.tensor.numel() > 0:
            view = free.as_strided(self.place.shape, self.place.strides, self.start)
            for index in allowed:
                view[index] = True
        same = (self.bytes.view(-1, item) == before.view(-1, item)).all(1)
        return not bool((same | free).all())
