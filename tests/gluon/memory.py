"""Memory of an interpreted kernel: tensors behind pointers and descriptors, and shared memory.

Every access by a lane that is not masked is held to the bounds of the tensor that the pointer came from. Shared memory is full
of ones at first, which is NaN.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon import language as gl

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
        self.shift = self.size.bit_length() - 1

    @property
    def size(self) -> int:
        return self.cells.itemsize

    def pointer(self) -> Value:
        return Value(np.int64(self.begin), tl.pointer_type(self.dtype), None, (self,))

    def __repr__(self) -> str:
        return f"{self.name} ({len(self.cells)} elements of {self.dtype})"


def lanes(p: Value, mask: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Addresses, and which are used if not all are."""
    if mask is None:
        return p.data, None
    at, used = p.data, value(mask).data
    if at.shape != used.shape:
        used = used | np.zeros(at.shape, bool)
        at = at if at.shape == used.shape else np.broadcast_to(at, used.shape)
    return at, None if used.all() else used


def cells_of(p: Value, at: np.ndarray, used: np.ndarray | None, access: str) -> tuple[Memory, np.ndarray]:
    """The tensor that all used lanes lead to, and their elements in it; the others' are 0."""
    for memory in p.sources:
        element = (at - memory.begin) >> memory.shift
        if used is not None:
            element = np.where(used, element, 0)
        if not element.size or element.view(np.uint64).max() < len(memory.cells):  # negative ones are large
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
    at, used = lanes(p, mask)
    dtype = p.dtype.element_ty
    unused = UNDEFINED[STORED[dtype]] if other is None else to_memory(value(other).to(dtype).data, dtype)
    return Value(from_memory(gather(p, at, used, unused), dtype)[()], dtype)


def store(p: Value, x: Any, mask: Any = None) -> None:
    at, used = lanes(p, mask)
    if used is not None and not used.any():
        return
    memory, element = cells_of(p, at, used, "a store")
    cells = to_memory(value(x).to(memory.dtype).data, memory.dtype)
    if used is not None:
        cells = cells if np.shape(cells) == element.shape else np.broadcast_to(cells, element.shape)
        element, cells = element[used], cells[used]
    memory.cells[element] = cells


def atomic_add(p: Value, x: Any, mask: Any = None) -> Value:
    at, used = lanes(p, mask)
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


@functools.cache
def physical(layout: Any, shape: tuple[int, ...], size: int) -> np.ndarray:
    """Where in memory each element of `size` bytes lies, in elements."""
    columns = shape[-1]
    row, column = np.divmod(np.arange(math.prod(shape)), columns)
    if isinstance(layout, gl.NVMMASharedLayout):
        rows = math.prod(shape[-layout.rank : -1])
        if layout.transposed:
            raise Fault(f"a layout that is not modelled: {layout}")
        width = min(layout.swizzle_byte_width // size or columns, columns)  # of a tile, where rows are longer
        of, row = np.divmod(row, rows)
        tile, column = np.divmod(column, width)
        vector, phase = 16 // size, row * width * size // 128 % max(layout.swizzle_byte_width // 16, 1)
        begin = (of * columns + tile * width) * rows
    else:
        if list(layout.order) != [*reversed(range(len(layout.order)))]:
            raise Fault(f"a layout that is not modelled: {layout}")
        vector, phase = layout.vec, row % (shape[-2] if len(shape) > 1 else 1) // layout.per_phase % layout.max_phase
        begin, width = 0, columns
    return begin + row * width + ((column // vector) ^ phase) * vector + column % vector


@functools.cache
def seen_as(
    layout: Any, shape: tuple, size: int, begin: int, other: Any, other_shape: tuple, other_size: int
) -> np.ndarray | None:
    """For each element of another tensor, from byte `begin` of the same memory on, its place among all of its size in the order
    of this one; None where that is its own order."""
    unit = min(size, other_size)
    inverse = np.empty(math.prod(shape) * size // unit, np.int64)
    own = physical(layout, shape, size)[:, None] * (size // unit) + np.arange(size // unit)
    inverse[own.reshape(-1)] = np.arange(len(inverse))
    within = np.arange(other_size // unit)
    elements = physical(other, other_shape, other_size) + begin // other_size
    parts = inverse[elements[:, None] * len(within) + within]
    places = parts[:, 0] // len(within)
    if (parts != places[:, None] * len(within) + within).any():
        raise Fault(f"{other} cuts what lies together as {layout}")
    return None if np.array_equal(places, np.arange(len(places)) + begin // other_size) else places


class Shared:
    """A shared-memory descriptor. Elements are kept in the order of the shape as it was allocated, whatever its layout; only
    where the memory is seen in another layout does it count where they lie."""

    def __init__(self, cells: np.ndarray, dtype: tl.dtype, layout: Any):
        self.places, self.dtype, self.layout = cells, dtype, layout

    @classmethod
    def allocate(cls, dtype: tl.dtype, shape: Any, layout: Any, initial: Value | None = None) -> Shared:
        kind = STORED[dtype]
        found = cls(np.full(shape_of((shape,)), -1, np.dtype(f"i{np.dtype(kind).itemsize}")).view(kind), dtype, layout)
        if initial is not None:
            found.store(initial)
        return found

    @property
    def cells(self) -> np.ndarray:
        return self.places

    def put(self, cells: Any) -> None:
        self.places[...] = cells

    @property
    def shape(self) -> list[int]:
        return list(self.places.shape)

    @property
    def type(self) -> TypeOf:
        return TypeOf(self)

    @property
    def itemsize(self) -> int:
        return np.dtype(STORED[self.dtype]).itemsize

    @property
    def nbytes(self) -> int:
        return self.places.size * self.itemsize

    def _view(self, places: np.ndarray) -> Shared:
        return Shared(places, self.dtype, self.layout)

    def index(self, i: Any) -> Shared:
        i = int(i)
        if not 0 <= i < len(self.places):
            raise Fault(f"index {i} of shared memory of shape {self.shape}")
        return self._view(self.places[i])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        start = int(start)
        if not 0 <= start <= start + length <= self.places.shape[dim]:
            raise Fault(f"[{start}, {start + length}) of dimension {dim} of shared memory of shape {self.shape}")
        return self._view(self.places[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: Any) -> Shared:
        return self._view(self.places.transpose(shape_of((order,))))

    def reshape(self, *shape: Any) -> Shared:
        return self._view(self.places.reshape(shape_of(shape), copy=False))

    def reinterpret(self, dtype: tl.dtype, shape: Any, layout: Any, begin: int = 0) -> Shared:
        """From byte `begin` on."""
        shape, kind = shape_of((shape,)), np.dtype(STORED[dtype])
        end = begin + math.prod(shape) * kind.itemsize
        if end > self.nbytes:
            raise Fault(f"{end - begin} bytes of {self.nbytes - begin} in shared memory")
        raw = self.places.reshape(-1, copy=False).view(np.uint8)
        places = seen_as(self.layout, tuple(self.shape), self.itemsize, begin, layout, tuple(shape), kind.itemsize)
        if places is None:
            return Shared(raw[begin:end].view(kind).reshape(shape), dtype, layout)
        return Swizzled(self, begin, raw.view(kind), places.reshape(shape), dtype, layout)

    def extent(self) -> tuple[int, int]:
        if self.places.flags.c_contiguous:
            return (begin := self.places.ctypes.data), begin + self.nbytes
        begin, end = np.lib.array_utils.byte_bounds(self.places)
        return int(begin), int(end)

    def _check(self, x: Value) -> None:
        if x.dtype is not self.dtype or x.shape != self.shape:
            raise Fault(f"{x.dtype} {x.shape} to shared memory of {self.dtype} {self.shape}")

    def load(self, layout: Any = None) -> Value:
        return Value(from_memory(self.cells, self.dtype), self.dtype, layout)

    def store(self, x: Value) -> None:
        self._check(x)
        self.put(to_memory(x.data, self.dtype))
        now().cta.unfenced.add(self.extent())

    def poison(self) -> None:
        """Fills what a copy will overwrite."""
        self.put(np.array(-1, f"i{self.itemsize}").view(STORED[self.dtype]))

    def receive(self, cells: np.ndarray) -> None:
        self.put(cells.reshape(self.shape))

    def operand(self, reader: str) -> Shared:
        """For an MMA or the TMA unit to read."""
        now().cta.check_fenced(*self.extent(), reader)
        return self


class Swizzled(Shared):
    """One that is seen in another layout than it was allocated in, as `whole`, from byte `begin` on: `places` are those of its
    elements among `flat`."""

    def __init__(self, whole: Shared, begin: int, flat: np.ndarray, places: np.ndarray, dtype: tl.dtype, layout: Any):
        super().__init__(places, dtype, layout)
        self.whole, self.begin, self.flat = whole, begin, flat

    @property
    def cells(self) -> np.ndarray:
        return self.flat[self.places]

    def put(self, cells: Any) -> None:
        self.flat[self.places] = cells

    def _view(self, places: np.ndarray) -> Shared:
        # a part that need not lie together is seen in no third layout
        begin = self.begin if places.size == self.places.size else self.whole.nbytes
        return Swizzled(self.whole, begin, self.flat, places, self.dtype, self.layout)

    def index(self, i: Any) -> Shared:
        found = super().index(i)
        found.begin = self.begin + int(i) * found.nbytes
        return found

    def reinterpret(self, dtype: tl.dtype, shape: Any, layout: Any, begin: int = 0) -> Shared:
        return self.whole.reinterpret(dtype, shape, layout, self.begin + begin)

    def extent(self) -> tuple[int, int]:
        begin = self.flat.ctypes.data
        return begin + int(self.places.min()) * self.itemsize, begin + (int(self.places.max()) + 1) * self.itemsize


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
