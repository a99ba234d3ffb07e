"""From a validated call to the launches of the Hopper kernels."""

from __future__ import annotations

import functools
import math
from dataclasses import astuple, replace

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..problem.problem import Problem, Tensors
from ..problem.split import SplitCosts, segments_of_call
from ..program.launch import Launch, sm_count, strides
from ..program.program import Outputs
from ..program.workspace import Layout, Workspace
from ..triton import launch as portable
from ..triton.config import DECODE_FEW
from ..triton.launch import Call, compose, densed, segment_layout, state_arguments
from .decode import decode_kernel
from .prepare import prepare_kernel
from .recurrence import recurrence_kernel
from .segments import transitions_kernel

TILE = 64
"""Rows and columns of a tile of the workspace."""

SHARED_MEMORY = 232_448
"""Bytes a program may use."""

MOST_CTAS = 144
"""Of `recurrence`: no Hopper GPU has more SMs."""

SPLIT_COSTS = SplitCosts(step=98, map=57, compose=230, fixed=850)
"""Measured on an H200 at K = V = 128 (docs/split.md)."""

FULL_WAVE = 0.9
"""Share of the SMs that a last wave must fill for whole work tiles to do."""

MOST_WAVES = 10
"""From so many on the last wave matters little."""

FLAGS = 256
"""Words of the workspace that `prepare` clears: a power of 2, `MOST_CTAS` or more."""


DECODE_AT_ONCE = 28
"""Programs of `decode` that registers and shared memory let a multiprocessor run at once (K = 128; at 64 a few more)."""


def layout(problem: Problem, segments: int = 0) -> Layout:
    """What `prepare` leaves for `recurrence`: `tiles` (-w, qg and kg by halves of K, Akk_inv, Aqk of each chunk and head) and
    `decay`. What CTAs of `recurrence` leave for each other: `carry`, a state, and `semaphores`, how many threads have
    stored theirs. What a split keeps, if there is one."""
    chunks = problem.B * problem.slots * problem.HV
    # a tensor descriptor must have a row, even if there is no chunk to fetch
    rows = max(chunks * (3 * (problem.K // TILE) + 2), 1) * TILE
    return {
        "tiles": ((rows, TILE), torch.bfloat16),
        "decay": ((chunks * problem.K,), torch.float32),
        "carry": ((min(work_tiles(problem), MOST_CTAS) * TILE * problem.K,), torch.float32),
        "semaphores": ((FLAGS,), torch.int32),
        **segment_layout(problem, segments),
    }


def work_tiles(problem: Problem) -> int:
    """Of `recurrence`: sequences, value heads and slices of 64 value channels."""
    return problem.N * problem.HV * (problem.V // TILE)


def aligned(x: torch.Tensor, unit: int = 8) -> bool:
    """Whether rows can be copied 16 bytes at a time, and lie a multiple of `unit` elements apart: 8 is that of strides in most
    kernels."""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % unit == 0 for s in x.stride()[:-1])


def copyable(x: torch.Tensor) -> torch.Tensor:
    """The tensor if `aligned`, as those of a model are, else a copy."""
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


def prepare_inputs(t: Tensors) -> Tensors:
    """As the kernels can read them."""
    rows = {role: copyable(getattr(t, role)) for role in ("q", "k", "v", "g")}
    return replace(t, **rows, **densed(t, (*portable.DENSE, "state_indices")))


def chunk(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    """The launches that run a call of whole sequences, in order."""
    segments = segments_of_call(problem, room(problem, t.device), SPLIT_COSTS)
    call = Call(problem, t, arch, Workspace.allocate(layout(problem, segments), t.device))
    final_state = outputs.get("final_state")
    split = [maps(call, final_state), compose(call, final_state)] if segments else []
    return [prepare(call), *split, recurrence(call, outputs["o"], final_state, outputs.get("h"))]


def step(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> Launch:
    """One token a sequence. For few pairs of sequence and head, and where copies can't be asynchronous, the portable kernel."""
    launch = portable.decode(problem, t, arch, outputs)
    given = dict(zip(decode_kernel.arg_names, launch.arguments))
    many = problem.N * problem.HV > DECODE_FEW
    if many and all(aligned(given[name], 16) for name in ("q", "k", "g", "initial_state")):
        # it takes the portable kernel's arguments and one more, and as much of a state
        at_once = min(launch.ctas, DECODE_AT_ONCE * sm_count(t.q.device))
        return replace(launch, kernel=decode_kernel, arguments=(*launch.arguments, at_once))
    return launch


def tiles(x: torch.Tensor) -> TensorDescriptor:
    """Of the workspace's."""
    return describe(x, (TILE, TILE))


def describe(x: torch.Tensor, tile: tuple[int, ...]) -> TensorDescriptor:
    """For copies of tiles of this shape by the TMA unit."""
    return TensorDescriptor(x, x.shape, x.stride(), tile, tile_layout(tile, x.dtype))


@functools.cache
def tile_layout(tile: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(tile, {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype])


def stride_div8(*tensors: torch.Tensor) -> list[int]:
    """Strides in units of 8 elements."""
    return [s // 8 for s in strides(*tensors)]


def prepare(call: Call, Akk_inv: Tensor | None = None) -> Launch:
    problem, t, workspace = call.problem, call.t, call.workspace
    slots = problem.B * problem.slots if problem.N > 0 else 0
    chunks = slots * problem.HV if problem.safe_gate else slots
    return Launch(
        prepare_kernel,
        chunks + (workspace.get("first_segment") is not None),
        (
            *(t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, t.checkpoint_offsets),
            *(*workspace.select("tiles", "decay", "semaphores", "first_segment"), Akk_inv),
            *(problem.scale, problem.lower_bound or 0.0),
            *(problem.T, problem.N, problem.HV, problem.HV // problem.H, problem.slots, problem.checkpoints),
            *stride_div8(t.q, t.k, t.g),
            *strides(t.beta),
            *(room(problem, t.q.device), problem.split, int(problem.batch_invariant)),
        ),
        dict(
            K=problem.K,
            GATE=problem.gate,
            SAFE=problem.safe_gate,
            BETA=problem.beta_kind,
            L2NORM=problem.l2norm,
            FLAGS=FLAGS,
            COSTS=astuple(SPLIT_COSTS),
        ),
        num_warps=4,
        scratch=call.buffers,
        # three CTAs on an SM; the exact path of K = 64 would have its MMAs waited for one by one (C7511)
        max_registers=168 if problem.safe_gate or problem.K == 128 else None,
        rows=1 if problem.safe_gate else problem.HV,
    )


def room(problem: Problem, device: torch.device) -> int:
    """Maps that `maps` forms at the same time."""
    return min(sm_count(device), MOST_CTAS) // (problem.HV * ((problem.K + problem.V) // TILE))


def ctas(problem: Problem, device: torch.device) -> int:
    """Resident CTAs, the slices of a head side by side."""
    slices = problem.V // TILE
    return min(sm_count(device), MOST_CTAS) // slices * slices


def stages(problem: Problem, fetched: int, beside: int) -> int:
    """Chunks in flight, of so many tiles and a row of decays each, up to 4: as many as shared memory holds beside tiles that
    stay."""
    tile = TILE * TILE * 2
    return min(4, (SHARED_MEMORY - beside * tile - 256) // (fetched * tile + problem.K * 4))


def maps(call: Call, final_state: Tensor | None) -> Launch:
    problem, t, workspace = call.problem, call.t, call.workspace
    return Launch(
        transitions_kernel,
        min(sm_count(t.v.device), MOST_CTAS),
        (
            tiles(workspace["tiles"]),
            *(workspace["decay"], t.v, *workspace.select("maps", "offsets", "first_segment")),
            *(t.cu_seqlens, t.checkpoint_offsets),
            *state_arguments(problem, t, final_state),
            *(problem.T, problem.N, problem.HV, problem.slots, problem.checkpoints),
            *stride_div8(t.v),
        ),
        dict(
            K=problem.K,
            V=problem.V,
            V_FIRST=problem.state_v_first,
            STAGES=stages(problem, 2 * problem.K // TILE + 2, beside=0),
        ),
        num_warps=4,
        overlaps=True,
        scratch=call.buffers,
    )


def stream_k_pays(problem: Problem, ctas: int) -> bool:
    """Whether `recurrence` deals out chunks evenly (stream-K): where whole work tiles would leave many SMs idle in the last
    wave, of all tiles or of the last sequence's. Otherwise CTAs take whole tiles, which is kinder to memory and leaves less
    to work out at each change of tile."""
    if problem.checkpoints > 0:
        return False
    waves, last = work_tiles(problem) / ctas, problem.HV * (problem.V // TILE) / ctas
    return 1 < waves < MOST_WAVES and any(n > 1 and n < FULL_WAVE * math.ceil(n) for n in (waves, last))


def recurrence(
    call: Call, o: Tensor | None, final_state: Tensor | None, h: Tensor | None, v_new: Tensor | None = None
) -> Launch:
    """With `v_new`, for the backward pass, `h` is V first and `o` may be None."""
    problem, t, workspace = call.problem, call.t, call.workspace
    most = ctas(problem, t.v.device)
    split = workspace.get("starts") is not None
    return Launch(
        recurrence_kernel,
        most if split and problem.N > 0 else min(work_tiles(problem), most),
        (
            tiles(workspace["tiles"]),
            workspace["decay"],
            *(t.v, o, h, v_new),
            *(t.cu_seqlens, t.checkpoint_offsets, t.checkpoint_indices),
            *workspace.select("carry", "semaphores", "first_segment", "starts"),
            *state_arguments(problem, t, final_state),
            *(problem.T, problem.N, problem.HV, problem.slots, problem.checkpoints),
            *stride_div8(t.v, t.v if o is None else o),
        ),
        dict(
            K=problem.K,
            V=problem.V,
            V_FIRST=problem.state_v_first,
            H_V_FIRST=problem.state_v_first or v_new is not None,
            STAGES=stages(problem, 3 * problem.K // TILE + 3, beside=1),
            STREAM_K=stream_k_pays(problem, most),
        ),
        num_warps=4,
        scratch=call.buffers,
    )
