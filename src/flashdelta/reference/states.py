"""States on their way in and out: rows of a tensor, or slots of a pool. Nothing here waits for a GPU.

An index names a slot of the pool if it is neither below 0 (`without_null`) nor past the pool's end. A sequence without tokens
stores nothing.
"""

import contextlib
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ..problem.problem import (
    AttentionProblem,
    AttentionTensors,
    ChunkProblem,
    ChunkTensors,
    CommitProblem,
    PoolProblem,
    Problem,
    Tensors,
    wider,
)
from .parallel import outgoing
from .sequences import lengths_of

T = TypeVar("T", bound=Tensors)
StatesProblem = AttentionProblem | CommitProblem


def without_null(problem: Problem, t: T) -> T:
    """The tensors with -1 for indices that are null by the call's rule. Rows of a buffer are null below 0 by any."""
    if not isinstance(problem, PoolProblem):
        return t
    buffered = getattr(t, "checkpoint_states", None) is not None
    names = ("state_indices", "source_indices", "checkpoint_indices")[: 2 if buffered else 3]
    given = {name: x for name in names if (x := getattr(t, name, None)) is not None}
    return replace(t, **{name: torch.where(x >= problem.lowest_index, x, -1) for name, x in given.items()})


def states_in(problem: AttentionProblem, t: AttentionTensors) -> Tensor:
    """The initial states as `[N, HV, K, V]` in the compute dtype; zeros where there are none."""
    state = t.initial_state
    if problem.pool_slots > 0:
        state = gathered(t.state_pool, t.state_indices, t.has_initial_state)
    if state is None:
        return t.v.new_zeros((problem.N, problem.HV, problem.K, problem.V), dtype=wider(problem.dtype))
    return from_layout(problem, state)


def gathered(pool: Tensor, index: Tensor, read: Tensor | None = None) -> Tensor:
    """`pool[index]` where `read` and the index names a slot, zeros elsewhere; other slots are not looked at, whatever they
    hold."""
    if pool.shape[0] == 0:
        return pool.new_zeros((len(index), *pool.shape[1:]))
    slot, named = named_slots(index, pool)
    read = named if read is None else named & read
    return torch.where(read.view(-1, *[1] * (pool.dim() - 1)), pool[slot], 0.0)


def from_layout(problem: StatesProblem, state: Tensor) -> Tensor:
    """States as the caller lays them out, as `[..., K, V]` in the compute dtype."""
    state = state.to(wider(problem.dtype))
    state = state.mT if problem.state_v_first else state
    return state.contiguous()  # BLAS may round differently for another layout, and no state must give the bits of zeros


def states_out(problem: StatesProblem, state: Tensor, dtype: torch.dtype) -> Tensor:
    """A state `[..., K, V]` in the caller's layout and `dtype`, in memory of its own."""
    state = state.mT if problem.state_v_first else state
    return state.to(dtype, copy=True).contiguous()


def store_final(problem: AttentionProblem, t: AttentionTensors, final: Tensor) -> None:
    """The final states `[N, HV, K, V]` to the sequences' slots of the pool, on the rank where they end."""
    stored = lengths_of(problem, t) > 0
    if isinstance(problem, ChunkProblem) and isinstance(t, ChunkTensors) and problem.ranks > 1:
        stored[outgoing(problem, t)] = False
    store(problem, t.state_pool, t.state_indices, stored, final)


def named_slots(index: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """The slot of each index (some slot where it names none), and whether it names one."""
    slots = pool.shape[0]
    return index.long().clamp(0, max(slots - 1, 0)), (index >= 0) & (index < slots)


def store(problem: StatesProblem, pool: Tensor, index: Tensor, stored: Tensor, states: Tensor) -> None:
    """Writes the states `[M, HV, K, V]` in the caller's layout and dtype to `pool[index]` where `stored`."""
    store_rows(pool, index, stored, states_out(problem, states, pool.dtype))


def store_rows(pool: Tensor, index: Tensor, stored: Tensor, values: Tensor) -> None:
    """Writes `values[i]` to `pool[index[i]]` where `stored[i]` and the index names a slot, and no other slot.

    How many rows that are, only the device knows. So every row writes: one that is not to be stored repeats what the first
    one to be stored writes, or, if there is none, writes back what its slot holds.
    """
    if pool.shape[0] == 0 or index.numel() == 0:
        return
    slot, named = named_slots(index, pool)
    stored = stored & named
    row = torch.where(stored, torch.arange(len(index), device=index.device), stored.long().argmax())
    slot = slot[row]
    with writing(pool):
        pool.index_copy_(0, slot, torch.where(stored.any(), values[row], pool[slot]))


def writing(x: Tensor) -> contextlib.AbstractContextManager:
    """Lets PyTorch write to `x`, as a kernel may: outside of inference mode it writes to no tensor made inside."""
    return torch.inference_mode() if x.is_inference() else contextlib.nullcontext()
