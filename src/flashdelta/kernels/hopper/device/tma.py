"""Copies by the TMA unit of whole tiles between memory and shared memory, which one thread starts for all."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...shared.gluon.compat import barrier, reinterpret, store_tile


@gluon.jit
def load_tiles(channels, first, second, third, wanted):
    """Starts the copies of the tiles at these coordinates. Zeros past the tensor's end."""
    # first what is expected of all: between it and a copy the compiler has all threads meet
    for i in gl.static_range(len(channels)):
        channels[i].expect(wanted)
    for i in gl.static_range(len(channels)):
        channels[i].copy(first, second, third, wanted)


@gluon.jit
def wait_tiles(channels, phase):
    for i in gl.static_range(len(channels)):
        channels[i].wait(phase)


@gluon.jit
def tma_store(tiles, first, second, third, x, place):
    """Starts the copy of `x` to the tile at these coordinates, but for what is past the tensor's end, by way of `place`, which
    may be written again after `tma.store_wait`."""
    x = x.to(tiles.dtype)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([x.shape[0], x.shape[1]], x.dtype)
    reinterpret(place, x.dtype, [x.shape[0], x.shape[1]], layout).store(x)
    fence_async_shared()
    barrier()
    store_tile(tiles, [first, second, third, 0], reinterpret(place, tiles.dtype, tiles.block_shape, tiles.layout))
