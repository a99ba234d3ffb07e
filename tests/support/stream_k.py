"""How `recurrence` splits its chunks by stream-K: the functions of `kernels/hopper/device/stream_k.py`, run as plain Python."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, SimpleNamespace

import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from flashdelta.kernels.hopper.device import stream_k

C = 64


class Value(torch.Tensor):
    """A tensor or scalar of a kernel: it never changes, `x += y` makes another."""

    def __iadd__(self, other: Value | int) -> Value:
        return self + other


class Pointer:
    """Into a tensor, as a kernel has it."""

    def __init__(self, tensor: torch.Tensor, at: torch.Tensor | int = 0):
        self.tensor, self.at = tensor, at

    def __add__(self, offset: torch.Tensor | int) -> Pointer:
        return Pointer(self.tensor, self.at + offset)


def _load(pointer: Pointer, mask: torch.Tensor, other: int) -> torch.Tensor:
    assert (pointer.at[mask] >= 0).all() and (pointer.at[mask] < len(pointer.tensor)).all(), "out of bounds"
    return torch.where(mask, pointer.tensor[pointer.at.clamp(0, len(pointer.tensor) - 1)], other)


def _extreme(of):
    return lambda a, b: of(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))


LANGUAGE = SimpleNamespace(
    arange=lambda start, stop, layout: torch.arange(start, stop).as_subclass(Value),
    BlockedLayout=lambda *arguments: None,
    num_warps=lambda: 4,
    load=_load,
    where=torch.where,
    minimum=_extreme(torch.minimum),
    maximum=_extreme(torch.maximum),
    sum=lambda x: x.sum(),
    max=lambda x, axis: x.max(axis).values,
    associative_scan=lambda x, axis, combine: x.cumsum(axis),
    int32=torch.int32,
    int64=torch.int64,
)


def _as_python() -> SimpleNamespace:
    functions = {name: x.fn for name, x in vars(stream_k).items() if isinstance(x, GluonJITFunction)}
    scope = {"gl": LANGUAGE, "tl": LANGUAGE, "SHORT": stream_k.SHORT.value}
    for name, function in functions.items():
        scope[name] = FunctionType(function.__code__, scope, name)
    return SimpleNamespace(**scope)


PYTHON = _as_python()


@dataclass(frozen=True)
class WorkTile:
    """Chunks `[first, stop)` of a tile. `carry_in`: its state comes from the CTA before; `carry_out`: goes to the next."""

    tile: int
    first: int
    stop: int
    carry_in: bool
    carry_out: bool


@dataclass(frozen=True)
class Work:
    """Tiles of `lengths`, `heads` each, for `ctas` CTAs. `offsets`: cu_seqlens of `T` tokens, or None for sequences of T tokens
    each."""

    heads: int
    ctas: int
    T: int
    sequences: int
    offsets: tuple[int, ...] | None = None

    @cached_property
    def chunks(self) -> list[int]:
        """Of each tile."""
        if self.offsets is None:
            return [-(-self.T // C)] * (self.sequences * self.heads)
        inside = [min(max(offset, 0), self.T) for offset in self.offsets]
        lengths = [max(b - a, 0) for a, b in itertools.pairwise(inside)]
        return [-(-length // C) for length in lengths for _ in range(self.heads)]

    def tile_range(self, cta: int) -> tuple[int, int, int, int]:
        scalars = (torch.tensor(x, dtype=torch.int32).as_subclass(Value) for x in (self.sequences, self.T, self.heads))
        offsets = None if self.offsets is None else Pointer(torch.tensor(self.offsets))
        found = PYTHON.tile_range(
            torch.tensor(cta, dtype=torch.int32).as_subclass(Value), self.ctas, offsets, None, 0, *scalars, C
        )
        return tuple(int(x) for x in found)

    def work_tiles(self, cta: int) -> list[WorkTile]:
        """What a CTA does, in order, as `TileScheduler.tile` says."""
        tile_range = self.tile_range(cta)
        tiles = []
        for k in range(PYTHON.range_tiles(*tile_range)):
            tile, first, stop = PYTHON.range_tile(k, *tile_range)
            tiles.append(WorkTile(tile, first, stop if stop > 0 else self.chunks[tile], first > 0, stop > 0))
        return tiles

    @property
    def carries(self) -> int:
        """How many states go from one CTA to the next."""
        return sum(tile.carry_in for cta in range(self.ctas) for tile in self.work_tiles(cta))
