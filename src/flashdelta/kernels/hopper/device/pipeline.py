"""Barriers: between the loader and the computing warps of a CTA (`Ring`), between TMA copies and all warps (`Channel`), and
between CTAs (`signal`, `wait`). Phases are worked out here and nowhere else."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import base_value

from ...shared.gluon.compat import aggregate, copy_tile, reinterpret
from .layouts import BV, C

TILE_BYTES = gl.constexpr(8192)
"""Bytes of `[64, 64]` in bf16."""


@aggregate
class Ring:
    """A pipeline of `STAGES` stages in shared memory, from a loader warp to the warps that compute.

    A stage holds a chunk: `TILES` tiles `[64, 64]` by TMA; by `cp.async` a tile of 64 tokens, `rows`, and the decays of K
    channels. `iteration` counts the chunks of all work tiles of the CTA; chunk i uses stage i % STAGES.
    """

    tiles: gl.shared_memory_descriptor
    decay: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    TILES: gl.constexpr

    @gluon.jit
    def acquire(self, iteration):
        """The loader's: the stage, once it is empty, and its full barrier."""
        stage = iteration % self.STAGES
        # stages are empty at first
        mbarrier.wait(self.empty.index(stage), (iteration // self.STAGES) & 1 ^ 1)
        return stage, self.full.index(stage)

    @gluon.jit
    def expect(self, full):
        """The loader's, before its copies of all tiles by TMA."""
        mbarrier.expect(full, self.TILES * TILE_BYTES)

    @gluon.jit
    def commit(self, full):
        """The loader's, after its copies by `cp.async`: the stage is full when they have landed, and the tiles."""
        async_copy.mbarrier_arrive(full, increment_count=False)

    @gluon.jit
    def wait(self, iteration):
        """Waits, in the warps that compute, until the stage is full, and returns it."""
        stage = iteration % self.STAGES
        mbarrier.wait(self.full.index(stage), (iteration // self.STAGES) & 1)
        return stage

    @gluon.jit
    def release(self, stage):
        """The computing warps': no MMA reads the stage any more."""
        mbarrier.arrive(self.empty.index(stage), count=1)

    @gluon.jit
    def tile(self, stage, i):
        return self.tiles.index(stage * self.TILES + i)

    @gluon.jit
    def decays(self, stage, half: gl.constexpr, layout: gl.constexpr):
        """`[1, 64]`: of a half of the key channels."""
        return self.decay.index(stage).slice(64 * half, 64).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def make_ring(tiles_d, K, STAGES, TILES):
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TILES, 64, 64], tiles_d.layout)
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], tiles_d.layout)
    decay = gl.allocate_shared_memory(gl.float32, [STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # the TMA's expectation and the copies of the loader's 32 threads
        mbarrier.init(full.index(stage), count=33)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    return Ring(tiles, decay, rows, full, empty, STAGES, TILES)


@aggregate
class Channel:
    """A place in shared memory that TMA copies of tiles go to, one after another: `tiles` is the tensor descriptor, a tile
    `[.., .., .., columns]` has all columns."""

    tiles: base_value
    place: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor

    @gluon.jit
    def expect(self, wanted):
        place = self.place
        mbarrier.expect(self.full, place.shape[0] * place.shape[1] * (place.dtype.primitive_bitwidth // 8), wanted)

    @gluon.jit
    def copy(self, first, second, third, wanted):
        tile = reinterpret(self.place, self.tiles.dtype, self.tiles.block_shape, self.tiles.layout)
        copy_tile(self.tiles, [first, second, third, 0], self.full, tile, wanted)

    @gluon.jit
    def wait(self, phase):
        """Waits until the copy has arrived; `phase` is 0 for the first copy, then `next_phase`."""
        mbarrier.wait(self.full, phase)


@gluon.jit
def make_channel(tiles, place):
    """`fence_async_shared` and a barrier must come before the first copy."""
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    return Channel(tiles, place, full)


@gluon.jit
def next_phase(phase):
    """The phase of a channel's next copy."""
    return phase ^ 1


THREADS = gl.constexpr(128)
"""Threads of the four warps that compute."""


@gluon.jit
def signal(semaphore):
    """Signals, from each thread, that another CTA may read what it stored before."""
    lane = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.atomic_add(semaphore + lane * 0, lane * 0 + 1, sem="release", scope="gpu")


@gluon.jit
def wait(semaphore):
    """Waits until all threads of another CTA have signalled."""
    lane = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.static_assert(THREADS == 128 and gl.num_warps() == 4, "each of the threads that compute signals and waits")
    asm: gl.constexpr = """{
        .reg .pred all;
    again:
        ld.acquire.gpu.global.s32 $0, [$1];
        setp.ge.s32 all, $0, 128;
        @!all bra again;
    }"""
    at = (semaphore + lane * 0).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(asm, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)
