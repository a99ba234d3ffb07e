"""States on their way in and out: rows of a tensor, or slots of a pool. Nothing here waits for a GPU.

An index names a slot of the pool if it is not null (`KdaSpec.lowest_index`) and not past the pool's end. A sequence without
tokens stores nothing.
"""

from __future__ import annotations

import torch

from ..spec import KdaSpec, KdaTensors
from .gate import compute_dtype
from .sequences import lengths_of


def states_in(spec: KdaSpec, t: KdaTensors) -> torch.Tensor:
    """The initial states as `[N, HV, K, V]` in the compute dtype; zeros where there are none."""
    dtype = compute_dtype(spec)
    state = t.initial_state
    if spec.pool_slots > 0:
        slot, read = _slots(spec, t.state_indices)
        if t.has_initial_state is not None:
            read = read & t.has_initial_state
        state = torch.where(read[:, None, None, None], t.state_pool[slot], 0.0)
    if state is None:
        return t.v.new_zeros((spec.N, spec.HV, spec.K, spec.V), dtype=dtype)
    state = state.to(dtype)
    state = state.transpose(-1, -2) if spec.state_v_first else state
    return state.contiguous()  # BLAS may round differently for another layout, and no state must give the bits of zeros


def states_out(spec: KdaSpec, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A state `[..., K, V]` in the caller's layout and `dtype`, in memory of its own."""
    state = state.transpose(-1, -2) if spec.state_v_first else state
    return state.to(dtype, copy=True).contiguous()


def store_final(spec: KdaSpec, t: KdaTensors, final: torch.Tensor) -> None:
    """The final states `[N, HV, K, V]` to the sequences' slots of the pool."""
    _store(spec, t.state_pool, t.state_indices, lengths_of(spec, t) > 0, final)


def store_checkpoints(spec: KdaSpec, t: KdaTensors, states: torch.Tensor, stored: torch.Tensor) -> None:
    """The states at checkpoints `[N, M, HV, K, V]` to their slots of the pool, where `stored [N, M]`."""
    _store(spec, t.state_pool, t.checkpoint_indices.flatten(), stored.flatten(), states.flatten(0, 1))


def _slots(spec: KdaSpec, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot of each index (some slot where it names none), and whether it names one."""
    named = (index >= spec.lowest_index) & (index < spec.pool_slots)
    return index.long().clamp(0, spec.pool_slots - 1), named


def _store(spec: KdaSpec, pool: torch.Tensor, index: torch.Tensor, stored: torch.Tensor, states: torch.Tensor) -> None:
    """Writes `states[i]` to `pool[index[i]]` where `stored[i]` and the index names a slot, and no other slot.

    How many rows that are, only the device knows. So every row writes: one that is not to be stored repeats what the first
    one to be stored writes, or, if there is none, writes back what its slot holds.
    """
    if spec.pool_slots == 0 or index.numel() == 0:
        return
    slot, named = _slots(spec, index)
    stored = stored & named
    row = torch.where(stored, torch.arange(len(index), device=index.device), stored.long().argmax())
    slot = slot[row]
    values = states_out(spec, states, pool.dtype)[row]
    pool.index_copy_(0, slot, torch.where(stored.any(), values, pool[slot]))
