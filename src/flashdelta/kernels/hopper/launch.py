"""Launches of Hopper's kernels: inputs as they read them, tiles of the workspace, tensor descriptors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem.problem import AUTO, ChunkProblem, ChunkTensors, WyTensors
from ...program.launch import Launch, sm_count
from ...program.workspace import Layout
from ..stages import launch as portable
from ..stages.copy import laid_out, read
from ..stages.launch import aligned, near

TILE = 64
"""Rows and columns of a tile of the workspace."""

MOST_CTAS = 144
"""Most CTAs of `recurrence`: no Hopper GPU has more SMs."""


FLAGS = 256
"""Words of the workspace that `prepare` clears: a power of 2, `MOST_CTAS` or more."""


def chunk_tiles(K, steps):
    """The tiles that `prepare` leaves for a chunk."""
    return 3 * (K // 64) + (1 if steps else 2)


def layout(problem: ChunkProblem, split: Layout, steps: bool) -> Layout:
    """Layout of what `prepare` leaves for `recurrence`: `tiles` (-w, qg and kg by halves of K, Akk_inv, Aqk of each chunk and
    head) and `decay`; in steps of 32 tokens `tiles` (-w, qa and kb by halves of K, inverse beside Aqk) and four decays of a
    channel. CTAs of `recurrence` leave for each other: `carry`, a state, and `semaphores`, how many threads have stored
    theirs. What depends on T comes last, so that calls of other lengths have the rest in the same places."""
    chunks = problem.B * problem.slots * problem.HV
    # a tensor descriptor must have a row, even if there is no chunk to fetch
    rows = max(chunks * chunk_tiles(problem.K, steps), 1) * TILE
    return {
        "carry": ((min(work_tiles(problem), MOST_CTAS) * TILE * problem.K,), torch.float32),
        "semaphores": ((FLAGS,), torch.int32),
        **split,
        "tiles": ((rows, TILE), torch.bfloat16),
        "decay": ((chunks * problem.K * (4 if steps else 1),), torch.float32),
    }


def work_tiles(problem: ChunkProblem) -> int:
    """Counts the work tiles of `recurrence`: sequences, value heads and slices of 64 value channels."""
    return problem.N * problem.HV * (problem.V // TILE)


def prepare_inputs(t: ChunkTensors) -> tuple[ChunkTensors, list[Launch]]:
    """Lays out inputs so that the kernels can read them."""
    t, of_beta = laid_out(t, ("beta",), lambda x: near(x, 1))
    t, others = laid_out(t, (*portable.DENSE, *portable.DENSE_TOO["chunk"]))
    t, of_rows = read(t, portable.ROWS, aligned)
    return t, of_beta + others + of_rows


def prepare_wy_inputs(t: WyTensors) -> tuple[WyTensors, list[Launch]]:
    """Lays out inputs as `wy_dqkg` reads them: those that are no rows lie without gaps."""
    t, offsets = laid_out(t, ("cu_seqlens",))
    t, of_rows = read(t, portable.ROWS, aligned)
    t, others = laid_out(t, portable.DENSE_TOO["wy"], lambda x: x.is_contiguous() and aligned(x))
    return t, offsets + of_rows + others


@functools.lru_cache(8)  # the stages of a call have it in common
def tiles(x: Tensor) -> TensorDescriptor:
    """A descriptor of the workspace's tiles."""
    return describe(x, (TILE, TILE))


def describe(x: Tensor, tile: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor for copies of tiles of this shape by the TMA unit."""
    return TensorDescriptor(x, x.shape, x.stride(), tile, tile_layout(tile, x.dtype))


@functools.cache
def tile_layout(tile: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(tile, getattr(gl, str(dtype).removeprefix("torch.")))


def ctas(slices: int, device: torch.device) -> int:
    """Persistent CTAs of a scan, one per SM, the slices of a head side by side. Never fewer than these: a GPU that shows a few
    of its SMs only (MPS) runs them one after another."""
    return max(min(sm_count(device), MOST_CTAS) // slices, 1) * slices


def may_restart(problem: ChunkProblem) -> bool:
    """Says whether a work tile may begin where a chunk forgets: not in what the backward pass will compute again, nor in what
    must not depend on the batch, nor where states inside a sequence are asked for."""
    own = problem.batch_invariant or problem.requires_grad or problem.ranks > 1 or problem.operation != "chunk"
    inside = problem.return_intermediate_states or problem.checkpoints > 0 or problem.checkpoint_every > 0
    # with unbounded gates `prepare_steps` would spill, and chunks gain nothing
    return problem.K == 128 and problem.split == AUTO and problem.safe_gate and not own and not inside


def parts(problem: ChunkProblem, device: torch.device) -> int:
    """Parts of each sequence that SMs would be idle without, if it may not be split. In a pool the last one might store the
    final state before the first has read the initial one."""
    if problem.has_pool or not may_restart(problem):
        return 1
    # no more than `TileScheduler` can tell
    return max(min(ctas(problem.V // TILE, device) // max(work_tiles(problem), 1), 32), 1)


def overlaps_prepare(call: portable.StageCall) -> bool:
    """Says whether `recurrence` starts while `prepare` ends: where its work tiles take a quarter of the SMs at most. With more,
    slices of a head would land where room is, and not on two SMs that share what they fetch: that costs more than it brings."""
    problem = call.problem
    follows = problem.ranks == 1 and not call.may_split
    return follows and 0 < 4 * work_tiles(problem) <= ctas(1, call.t.device)


def prefetching_ctas(ctas: int, at_once: int) -> tuple[int, int]:
    """The CTAs that prefetch before they wait, from the first to before the second: the last quarter of those that run
    `at_once`. They start when the launch before theirs has hardly any state left to load. If more did, memory would be idle
    later, during their first updates."""
    past = min(ctas, at_once)
    return past - past // 4, past


def chunks_in_flight(problem: ChunkProblem, fetched: int, beside: int, decays: int = 1) -> int:
    """Counts the chunks, of so many tiles and rows of decays each, that are fetched ahead, up to 4: as many as shared memory
    holds beside tiles that stay."""
    tile = TILE * TILE * 2
    return min(4, (portable.SHARED_MEMORY[90] - beside * tile - 256) // (fetched * tile + decays * problem.K * 4))
