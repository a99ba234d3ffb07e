"""Memory of a plan that is being built: slots, tensors in them, and named tensors of one slot."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..problem.problem import Tensors, replaced

T = TypeVar("T", bound=Tensors)

Shape = tuple[int, ...]
Layout = Mapping[str, tuple[Shape, torch.dtype]]
"""Shapes and dtypes by name, in the order in which the tensors lie."""


ALIGNMENT = 16
"""Bytes. A kernel is compiled anew for a pointer that does not lie on so many."""

LINE = 128
"""Bytes of a cache line, at which tensors of a workspace begin."""

SLOT_BITS = 44
SLOT = 1 << SLOT_BITS
"""Bytes from slot to slot in the addresses of their tensors: no GPU has as many."""

FIRST = 1 << 16
"""The number of a plan's first slot: real addresses are below it."""

with torch.inference_mode():  # views of others count their versions, which takes as long again
    _typed_slots = functools.cache(torch.empty(1 << 62, dtype=torch.uint8, device="meta").view)


@functools.lru_cache(4096)  # calls of other lengths have parameters, pools and indices in the same places
def tensor_at(address: int, shape: Shape, dtype: torch.dtype, strides: Shape | None = None) -> Tensor:
    """A tensor in slots, by default a dense one."""
    if strides is None:
        count, strides = 1, ()
        for n in reversed(shape):
            count, strides = count * (n or 1), (count, *strides)
    return _typed_slots(dtype).as_strided(shape, strides, address // dtype.itemsize)


class Slots:
    """Memory of a plan: the tensors of its call, one per slot, then outputs and scratch. They have shapes and strides, but no
    data: an address is a slot's number times `SLOT`, and bytes from there. Nothing that PyTorch computes lies in a slot."""

    def __init__(self, device: torch.device, roles: Sequence[str]):
        self.device, self.roles = device, roles
        self.begins: list[int] = []
        """The address at which each slot begins."""
        self.sizes: dict[int, int] = {}
        """Bytes of outputs and scratch, by slot."""
        self.zeroed: set[int] = set()

    def _next(self, offset: int = 0) -> int:
        begin = (FIRST + len(self.begins)) * SLOT + offset
        self.begins.append(begin)
        return begin

    def take(self, x: Tensor) -> Tensor:
        """A tensor of the call in its slot, where its address is a multiple of 16 if its own is."""
        offset, size = x.data_ptr() % ALIGNMENT, x.dtype.itemsize
        return tensor_at(self._next(offset if offset % size == 0 else size), x.shape, x.dtype, x.stride())

    def new(self, shape: Sequence[int], dtype: torch.dtype, zeroed: bool = False) -> Tensor:
        """An output or scratch, in a slot of its own."""
        begin = self._next()
        x = tensor_at(begin, tuple(shape), dtype)
        self.sizes[begin // SLOT] = x.nbytes
        if zeroed:
            self.zeroed.add(begin // SLOT)
        return x


def address_of(x: Tensor) -> int:
    """The address of a tensor in slots. An empty one has no `data_ptr`."""
    return x.data_ptr() or x.storage_offset() * x.element_size()


def in_slots(t: T) -> T:
    """A call's tensors as a plan is built from them."""
    present = t.present()
    memory = Slots(t.device, tuple(present))
    return replaced(t, **{role: memory.take(x) for role, x in present.items()}, memory=memory)


def sizes(layout: Layout) -> list[int]:
    """Bytes from each tensor to the next."""
    return [-(-math.prod(shape) * dtype.itemsize // LINE) * LINE for shape, dtype in layout.values()]


class Workspace(dict[str, Tensor]):
    """The tensors of a layout, by name. `buffer` holds them all but those `beside`, which lie elsewhere."""

    def __init__(self, layout: Layout, buffer: Tensor, beside: Mapping[str, Tensor] | None = None):
        super().__init__()
        self.buffer, address = buffer, buffer.storage_offset()
        for (name, kind), nbytes in zip(layout.items(), sizes(layout)):
            self[name] = tensor_at(address, *kind)
            address += nbytes
        self.update(beside or {})

    @classmethod
    def allocate(cls, layout: Layout, memory: Slots, beside: Mapping[str, Tensor] | None = None) -> Workspace:
        if beside:
            layout = {name: kind for name, kind in layout.items() if name not in beside}
        return cls(layout, memory.new([sum(sizes(layout))], torch.uint8), beside)
