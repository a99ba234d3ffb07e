"""The definition of the short convolution: causal, a filter of `W` taps for each channel.

    o[t] = act(bias + sum_j weight[j] x[t - (W - 1) + j])

Inputs before a sequence's first token are its state's: `state[L + p]` is the input at position `p < 0`. The state after the
sequence holds its last `L` inputs. Never waits for a device.
"""

import torch
from torch import Tensor

from ..problem.problem import ConvolutionProblem, ConvolutionTensors, wider
from .norm import ACTIVATIONS
from .sequences import offsets_of
from .states import gathered, store_rows


def short_convolution(problem: ConvolutionProblem, t: ConvolutionTensors) -> tuple[Tensor, Tensor | None, None]:
    """`(o [B, T, D], final_state [N, D, L] or None, None)`. With a pool, the final states go there."""
    dtype, D, W = wider(problem.dtype), problem.D, problem.taps
    offsets = offsets_of(problem, t)
    begins, lengths = offsets[:-1], offsets.diff().clamp(min=0)
    x = t.x.reshape(-1, D).to(dtype)
    state = t.initial_state
    if t.state_pool is not None and t.state_indices is not None:
        state = gathered(t.state_pool, t.state_indices, t.has_initial_state)
    # `[N + 1, D, L]`: the last one is of no sequence
    none = x.new_zeros(1, D, problem.state_length)
    states = none.expand(problem.N + 1, -1, -1) if state is None else torch.cat([state.to(dtype), none])
    token = torch.arange(x.shape[0], device=x.device)
    n = torch.searchsorted(offsets, token, right=True) - 1
    valid = (n >= 0) & (n < problem.N)
    # zeros for tokens of no sequence, whose gradients are zeros then, and a row of them at the end
    x = torch.cat([torch.where(valid[:, None], x, 0.0), x.new_zeros(1, D)])
    n = torch.where(valid, n, problem.N)
    # past the last one, a sequence that has no token
    position = token - torch.cat([begins, begins.new_zeros(1)])[n]
    weight = t.weight.reshape(D, W).to(dtype)
    o = torch.zeros_like(x[:-1]) if t.bias is None else t.bias.to(dtype).expand(len(token), D)
    for j in range(W):
        o = o + weight[:, j] * _inputs(x, states, begins, n, position - (W - 1) + j)
    o = torch.where(valid[:, None], ACTIVATIONS[problem.activation](o), 0.0)
    o = o.view(problem.shape).to(problem.dtype)
    if t.checkpoint_states is not None and problem.N > 0:
        _store_checkpoints(problem, t, x, states, begins, lengths)
    if not problem.stores_final_state:
        return o, None, None
    sequence = torch.arange(problem.N, device=x.device)
    last = [_inputs(x, states, begins, sequence, lengths - problem.state_length + j) for j in range(states.shape[2])]
    final = torch.stack(last, dim=-1).to(problem.final_dtype)
    if problem.has_pool:
        assert t.state_pool is not None and t.state_indices is not None
        store_rows(t.state_pool, t.state_indices, lengths > 0, final)
        return o, None, None
    return o, final, None


def _store_checkpoints(
    problem: ConvolutionProblem, t: ConvolutionTensors, x: Tensor, states: Tensor, begins: Tensor, lengths: Tensor
) -> None:
    """The states after some tokens of each sequence, to rows of their buffer. Regular ones lie without gaps, sequence after
    sequence."""
    every, L, buffer = problem.checkpoint_every, states.shape[2], t.checkpoint_states
    assert buffer is not None
    if every > 0:
        past = ((lengths + every - 1) // every).cumsum(0)
        most = problem.T // every + problem.N if problem.packed else problem.B * -(-problem.T // every)
        row = torch.arange(most, device=x.device)
        n = torch.searchsorted(past, row, right=True)
        stored, n = n < problem.N, n.clamp(max=problem.N - 1)
        offset = (row - torch.cat([past.new_zeros(1), past])[n]) * every
    else:
        assert t.checkpoint_offsets is not None and t.checkpoint_indices is not None
        row, offset = t.checkpoint_indices.flatten(), t.checkpoint_offsets.flatten().long()
        n = torch.arange(problem.N, device=x.device).repeat_interleave(problem.checkpoints)
        stored = (offset > 0) & (offset <= lengths[n])
        offset = torch.where(stored, offset, 0)
    found = torch.stack([_inputs(x, states, begins, n, offset - L + j) for j in range(L)], dim=-1)
    store_rows(buffer, row, stored, found.to(buffer.dtype))


def _inputs(x: Tensor, states: Tensor, begins: Tensor, n: Tensor, position: Tensor) -> Tensor:
    """Inputs of sequences `n` at these positions, `[.., D]`; those below 0 are the states'."""
    first = torch.cat([begins, begins.new_zeros(1)])[n]
    at, L = (first + position).clamp(0, x.shape[0] - 1), states.shape[2]
    return torch.where((position >= 0)[:, None], x[at], states[n, :, (L + position).clamp(0, L - 1)])
