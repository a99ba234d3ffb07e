"""What warps of `recurrence` share: stages of chunks in shared memory, states, and word of what others have done."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...triton.device import states
from .layouts import from_lines, to_lines
from .tile_scheduler import BV

THREADS = gl.constexpr(128)
"""Of the four warps that compute."""

state_offsets = gluon.jit(states.state_offsets.fn)
load_state = gluon.jit(states.load_state.fn)
store_state = gluon.jit(states.store_state.fn)
sequence_slot = gluon.jit(states.sequence_slot.fn)


@gluon.jit
def stage_barriers(STAGES: gl.constexpr):
    """Of each stage: one that it is filled, one that it is free."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        # the TMA's expectation and the copies of the loader's 32 threads
        mbarrier.init(ready.index(s), count=33)
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    return ready, free


@gluon.jit
def load_halves(states, at, next_, present, K: gl.constexpr, layout: gl.constexpr):
    """A state by halves of 64 key channels, which lie `next_` elements apart; the second is zero if there is only one."""
    first = from_lines(load_state(states, at, present), layout)
    if K == 128:
        second = from_lines(load_state(states, at + next_, present), layout)
    else:
        second = gl.zeros((BV, 64), gl.float32, layout=layout)
    return first, second


@gluon.jit
def store_halves(states, at, next_, first, second, wanted, K: gl.constexpr):
    store_state(states, at, to_lines(first), wanted)
    if K == 128:
        store_state(states, at + next_, to_lines(second), wanted)


@gluon.jit
def announce_state(arrived):
    """Says that all that the program's threads stored before may be read."""
    lane = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.atomic_add(arrived + lane * 0, lane * 0 + 1, sem="release", scope="gpu")


@gluon.jit
def await_state(arrived):
    """Waits until the threads of another program have all said so."""
    lane = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.static_assert(THREADS == 128 and gl.num_warps() == 4, "each of the threads announces the state, and awaits it")
    asm: gl.constexpr = """{
        .reg .pred all;
    again:
        ld.acquire.gpu.global.s32 $0, [$1];
        setp.ge.s32 all, $0, 128;
        @!all bra again;
    }"""
    at = (arrived + lane * 0).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(asm, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)
