"""How `recurrence` splits its chunks by stream-K: the functions of `kernels/hopper/device/stream_k.py`, interpreted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import torch

from flashdelta.kernels.hopper.device import stream_k

from ..gluon import machine
from ..gluon.interpreter import argument, interpreted
from ..gluon.values import scalar

C = 64
CTA = machine.Cta("tile_range", (0, 0), (1, 1), 4, [])
RANGE_TILES, RANGE_TILE = interpreted(stream_k.range_tiles), interpreted(stream_k.range_tile)


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
        """Chunks of each tile."""
        if self.offsets is None:
            return [-(-self.T // C)] * (self.sequences * self.heads)
        inside = [min(max(offset, 0), self.T) for offset in self.offsets]
        lengths = [max(b - a, 0) for a, b in itertools.pairwise(inside)]
        return [-(-length // C) for length in lengths for _ in range(self.heads)]

    def tile_range(self, cta: int) -> tuple[int, int, int, int]:
        offsets = None if self.offsets is None else argument("cu_seqlens", "", torch.tensor(self.offsets))
        sizes = map(scalar, (self.sequences, self.T, self.heads))
        with mock.patch.object(machine, "_current", [CTA.main]):
            found = interpreted(stream_k.tile_range)(scalar(cta), self.ctas, offsets, None, 0, *sizes, C)
        return tuple(int(x) for x in found)

    def work_tiles(self, cta: int) -> list[WorkTile]:
        """The work of a CTA, in order, as `TileScheduler.tile` says."""
        tile_range = self.tile_range(cta)
        tiles = []
        for k in range(RANGE_TILES(*tile_range)):
            tile, first, stop = map(int, RANGE_TILE(k, *tile_range))
            tiles.append(WorkTile(tile, first, stop if stop > 0 else self.chunks[tile], first > 0, stop > 0))
        return tiles

    @property
    def carries(self) -> int:
        """How many states go from one CTA to the next."""
        return sum(tile.carry_in for cta in range(self.ctas) for tile in self.work_tiles(cta))
