"""Copies by the TMA unit of whole tiles between memory and shared memory, which one thread starts for all.

A copy into shared memory is a tuple `(tiles, place, arrival)`: the tensor descriptor `[.., .., .., columns]` of tiles with all
the columns, the memory that the tile goes to, and what tells that it is there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .compat import barrier, copy_tile, reinterpret, store_tile


@gluon.jit
def incoming(tiles, place):
    """The copy, before its first `fetch`; `fence_async_shared` and a barrier must come between."""
    arrival = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrival, count=1)
    return tiles, place, arrival


@gluon.jit
def fetch(copies, first, second, third, wanted):
    """Starts the copies of the tiles at these coordinates. Zeros past the tensor's end."""
    # first what is expected of all: between it and a copy the compiler has all threads meet
    for i in gl.static_range(len(copies)):
        place = copies[i][1]
        mbarrier.expect(copies[i][2], place.shape[0] * place.shape[1] * (place.dtype.primitive_bitwidth // 8), wanted)
    for i in gl.static_range(len(copies)):
        tiles = copies[i][0]
        tile = reinterpret(copies[i][1], tiles.dtype, tiles.block_shape, tiles.layout)
        copy_tile(tiles, [first, second, third, 0], copies[i][2], tile, wanted)


@gluon.jit
def await_copies(copies, phase):
    """Until the tiles are there; `phase` is that of how many before, modulo 2."""
    for i in gl.static_range(len(copies)):
        mbarrier.wait(copies[i][2], phase)


@gluon.jit
def send(tiles, first, second, third, x, place):
    """Starts the copy of `x` to the tile at these coordinates, but for what is past the tensor's end, by way of `place`, which
    is free again after `tma.store_wait`."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([x.shape[0], x.shape[1]], x.dtype)
    reinterpret(place, x.dtype, [x.shape[0], x.shape[1]], layout).store(x)
    fence_async_shared()
    barrier()
    store_tile(tiles, [first, second, third, 0], reinterpret(place, tiles.dtype, tiles.block_shape, tiles.layout))
