"""Memory of an interpreted kernel: tensors behind pointers and descriptors, and shared memory.

Every access by a lane that is not masked is held to the bounds of the tensor that the pointer came from. Shared memory is full
of ones at first, which is NaN.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
import triton.language as tl

from .machine import Barrier, now
from .values import OF_TORCH, STORED, UNDEFINED, Fault, TypeOf, Value, from_memory, shape_of, to_memory, value


class Memory:
    """A kernel's tensor, from its first element to its last, whatever lies between."""

    def __init__(self, name: str, x: torch.Tensor):
        self.name, self.dtype = name, OF_TORCH[x.dtype]
        count = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) if x.numel() else 0
        flat = x.detach().as_strided((count,), (1,), x.storage_offset())
        self.cells = flat.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else flat.numpy()
        self.cells = self.cells.view(STORED[self.dtype])
        self.begin = self.cells.ctypes.data
        self.end = self.begin + self.cells.nbytes

    @property
    def size(self) -> int:
        return self.cells.itemsize

    def pointer(self) -> Value:
        return Value(np.int64(self.begin), tl.pointer_type(self.dtype), None, (self,))

    def __repr__(self) -> str:
        return f"{self.name} ({len(self.cells)} elements of {self.dtype})"


def lanes(p: Value, mask: Any, access: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Addresses, and which are used if not all are."""
    if not p.dtype.is_ptr():
        raise Fault(f"{access} at {p.dtype}, which is no pointer")
    if mask is None:
        return p.data, None
    mask = value(mask)
    if mask.dtype is not tl.int1:
        raise Fault(f"a mask of {mask.dtype}")
    at, used = np.broadcast_arrays(p.data, mask.data)
    return at, None if used.all() else used


def cells_of(p: Value, at: np.ndarray, used: np.ndarray | None, access: str) -> tuple[Memory, np.ndarray]:
    """The tensor that all used lanes lead to, and their elements in it; the others' are 0."""
    for memory in p.sources:
        inside = (at >= memory.begin) & (at < memory.end)
        if inside.all() if used is None else inside[used].all():
            element = (at - memory.begin) // memory.size
            if used is not None:
                element = np.where(used, element, 0)
            if p.dtype.element_ty is not memory.dtype:
                raise Fault(f"{access} of {p.dtype.element_ty} in {memory}")
            return memory, element
    raise outside(p, at, used, access)


def outside(p: Value, at: np.ndarray, used: np.ndarray | None, access: str) -> Fault:
    memory = p.sources[0]
    wrong = ~((at >= memory.begin) & (at < memory.end))
    if used is not None:
        wrong &= used
    elements = (np.asarray(at)[wrong] - memory.begin) // memory.size
    return Fault(f"{access} outside {memory}: {len(elements)} lanes, the first at element {elements[0]}")


def gather(p: Value, at: np.ndarray, used: np.ndarray | None, unused: Any) -> np.ndarray:
    """The cells at these addresses; `unused` for lanes that are masked."""
    if used is not None and not used.any():
        return np.full(np.shape(at), unused, STORED[p.dtype.element_ty])
    if len(p.sources) > 1:
        return gather_from_several(p, at, used, unused)
    memory, element = cells_of(p, at, used, "a load")
    found = memory.cells[element]
    return found if used is None else np.where(used, found, unused).astype(found.dtype, copy=False)


def gather_from_several(p: Value, at: np.ndarray, used: np.ndarray | None, unused: Any) -> np.ndarray:
    """Where a choice between pointers leads to more than one tensor."""
    found = np.full(np.shape(at), unused, STORED[p.dtype.element_ty])
    left = np.ones(np.shape(at), bool) if used is None else used.copy()
    for memory in p.sources:
        inside = left & (at >= memory.begin) & (at < memory.end)
        found[inside] = memory.cells[(at[inside] - memory.begin) // memory.size]
        left &= ~inside
    if left.any():
        raise outside(p, at, left, "a load")
    return found


def load(p: Value, mask: Any = None, other: Any = None) -> Value:
    at, used = lanes(p, mask, "a load")
    dtype = p.dtype.element_ty
    found = from_memory(gather(p, at, used, UNDEFINED[STORED[dtype]]), dtype)
    if used is not None and other is not None:
        found = np.where(used, found, value(other).to(dtype).data)
    return Value(found[()], dtype)


def store(p: Value, x: Any, mask: Any = None) -> None:
    at, used = lanes(p, mask, "a store")
    if used is not None and not used.any():
        return
    memory, element = cells_of(p, at, used, "a store")
    cells = np.broadcast_to(to_memory(value(x).to(memory.dtype).data, memory.dtype), np.shape(element))
    if used is None:
        memory.cells[element] = cells
    else:
        memory.cells[element[used]] = cells[used]


def atomic_add(p: Value, x: Any, mask: Any = None) -> Value:
    at, used = lanes(p, mask, "an addition")
    memory, element = cells_of(p, at, used, "an addition")
    before = from_memory(memory.cells[element], memory.dtype)
    added = np.broadcast_to(value(x).to(memory.dtype).data, np.shape(element))
    if used is not None:
        element, added = element[used], added[used]
    np.add.at(memory.cells, element, added)
    return Value(before, memory.dtype)


class Descriptor:
    """A tensor descriptor, for copies of tiles by TMA."""

    def __init__(self, name: str, descriptor: Any):
        self.memory = Memory(name, descriptor.base)
        self.dtype, self.layout = self.memory.dtype, descriptor.layout
        self.block_shape = list(descriptor.block_shape)
        strides = [stride * self.memory.size for stride in descriptor.strides]
        self.cells = np.lib.stride_tricks.as_strided(self.memory.cells, descriptor.shape, strides)

    @property
    def block_type(self) -> Any:
        return tl.block_type(self.dtype, self.block_shape)

    def _inside(self, coordinates: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where of the tensor and where of the tile what both have lies."""
        first = shape_of((list(coordinates),))
        if len(first) != len(self.block_shape):
            raise Fault(f"{len(first)} coordinates of {self.memory}, which has {len(self.block_shape)}")
        begin = [max(x, 0) for x in first]
        end = [max(min(x + n, size), b) for x, n, size, b in zip(first, self.block_shape, self.cells.shape, begin)]
        there = tuple(slice(b, e) for b, e in zip(begin, end))
        return there, tuple(slice(b - x, e - x) for b, e, x in zip(begin, end, first))

    def read(self, coordinates: Any) -> np.ndarray:
        there, here = self._inside(coordinates)
        tile = np.zeros(self.block_shape, self.cells.dtype)
        tile[here] = self.cells[there]
        return tile

    def write(self, coordinates: Any, tile: np.ndarray) -> None:
        there, here = self._inside(coordinates)
        self.cells[there] = tile.reshape(self.block_shape)[here]


# ---- shared memory -------------------------------------------------------------------------------------------------


class Shared:
    """A shared-memory descriptor: elements lie in the order of the shape, whatever the layout."""

    def __init__(self, cells: np.ndarray, dtype: tl.dtype, layout: Any):
        self.cells, self.dtype, self.layout = cells, dtype, layout

    @classmethod
    def allocate(cls, dtype: tl.dtype, shape: Any, layout: Any, initial: Value | None = None) -> Shared:
        kind = STORED[dtype]
        found = cls(np.full(shape_of((shape,)), -1, np.dtype(f"i{np.dtype(kind).itemsize}")).view(kind), dtype, layout)
        if initial is not None:
            found.store(initial)
        return found

    @property
    def shape(self) -> list[int]:
        return list(self.cells.shape)

    @property
    def type(self) -> TypeOf:
        return TypeOf(self)

    @property
    def nbytes(self) -> int:
        return self.cells.size * self.cells.itemsize

    def _view(self, cells: np.ndarray) -> Shared:
        return Shared(cells, self.dtype, self.layout)

    def index(self, i: Any) -> Shared:
        i = int(i)
        if not 0 <= i < len(self.cells):
            raise Fault(f"index {i} of shared memory of shape {self.shape}")
        return self._view(self.cells[i])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        start = int(start)
        if not 0 <= start <= start + length <= self.cells.shape[dim]:
            raise Fault(f"[{start}, {start + length}) of dimension {dim} of shared memory of shape {self.shape}")
        return self._view(self.cells[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: Any) -> Shared:
        return self._view(self.cells.transpose(shape_of((order,))))

    def reshape(self, *shape: Any) -> Shared:
        return self._view(self.cells.reshape(shape_of(shape), copy=False))

    def reinterpret(self, dtype: tl.dtype, shape: Any, layout: Any) -> Shared:
        shape = shape_of((shape,))
        size = math.prod(shape) * np.dtype(STORED[dtype]).itemsize
        if size > self.nbytes:
            raise Fault(f"{size} bytes of {self.nbytes} in shared memory")
        raw = self.cells.reshape(-1, copy=False).view(np.uint8)[:size]
        return Shared(raw.view(STORED[dtype]).reshape(shape), dtype, layout)

    def extent(self) -> tuple[int, int]:
        begin, end = np.lib.array_utils.byte_bounds(self.cells)
        return int(begin), int(end)

    def _check(self, x: Value) -> None:
        if x.dtype is not self.dtype or x.shape != self.shape:
            raise Fault(f"{x.dtype} {x.shape} to shared memory of {self.dtype} {self.shape}")

    def load(self, layout: Any = None) -> Value:
        return Value(from_memory(self.cells, self.dtype), self.dtype, layout)

    def store(self, x: Value) -> None:
        self._check(x)
        self.cells[...] = to_memory(x.data, self.dtype)
        now().cta.unfenced.add(self.extent())

    def poison(self) -> None:
        """What a copy will overwrite."""
        self.cells[...] = np.array(-1, f"i{self.cells.itemsize}").view(self.cells.dtype)

    def receive(self, cells: np.ndarray) -> None:
        self.cells[...] = cells.reshape(self.cells.shape)

    def operand(self, reader: str) -> Shared:
        """For an MMA or the TMA unit to read."""
        now().cta.check_fenced(*self.extent(), reader)
        return self


class Barriers:
    """mbarriers in shared memory."""

    def __init__(self, barriers: list[Barrier]):
        self.barriers = barriers

    @classmethod
    def allocate(cls, shape: Any) -> Barriers:
        return cls([Barrier() for _ in itertools.repeat(None, math.prod(shape_of((shape,))))])

    def index(self, i: Any) -> Barriers:
        i = int(i)
        if not 0 <= i < len(self.barriers):
            raise Fault(f"mbarrier {i} of {len(self.barriers)}")
        return Barriers([self.barriers[i]])

    @property
    def one(self) -> Barrier:
        if len(self.barriers) != 1:
            raise Fault(f"{len(self.barriers)} mbarriers where one is wanted")
        return self.barriers[0]
