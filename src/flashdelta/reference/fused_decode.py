"""The definition of the layer's step: the convolution of q, k and v, the token recurrence and the gated norm.

    q, k, v = split(short_convolution(x));   o = gated_rms_norm(decode(q, k, v, g, beta), z)

with nothing rounded in between. A slot of the convolution's pool holds a window of inputs. A sequence's last `W - 1` begin at
place `a - 1`, `a` the count of accepted tokens (1 without counts); after a call with `T` tokens places 0 to `W - 3 + T` hold
the last `W - 2` of them and the tokens, so that the next call finds its window in the same way. Never waits for a device.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..problem.problem import (
    ConvolutionProblem,
    ConvolutionTensors,
    FusedProblem,
    FusedTensors,
    NormProblem,
    NormTensors,
    problem_of,
    wider,
)
from .convolution import short_convolution
from .decode import decode_kda
from .norm import gated_rms_norm
from .sequences import few_tokens, offsets_of
from .states import named_slots, store_rows


def fused_kda_decode(problem: FusedProblem, t: FusedTensors) -> tuple[Tensor, None, None]:
    """`(o [B, T, HV, V], None, None)`; states and windows go to the pools, or records to `intermediate_states`."""
    dtype = wider(problem.dtype)
    live, slot, shift = _sequences(problem, t)
    history = _windows(problem, t, live, slot, shift).to(dtype)
    x = torch.cat([part.flatten(2) for part in (t.q, t.k, t.v)], dim=2).to(dtype)
    channels = [part.shape[2:].numel() for part in (t.q, t.k, t.v)]
    weight = t.weight.reshape(-1, problem.taps)
    rows = ConvolutionTensors(x=x, weight=weight, bias=t.bias, initial_state=history, cu_seqlens=t.cu_seqlens)
    convolution = problem_of(ConvolutionProblem, rows, operation="short_convolution", activation="silu")
    mixed, _, _ = short_convolution(convolution, rows)
    q, k, v = (part.view_as(whole) for part, whole in zip(mixed.split(channels, dim=2), (t.q, t.k, t.v)))
    # null sequences by index: a count outside 1 .. 1 + S makes one, too
    indices = torch.where(live if t.state_indices.dim() == 1 else live[:, None], t.state_indices, -1)
    step = replace(problem, dtype=dtype, output_dtype=dtype)
    o, _, _ = decode_kda(step, replace(t, q=q, k=k, v=v, state_indices=indices))
    outputs = NormTensors(x=o, z=t.z, weight=t.norm_weight)
    norm = problem_of(NormProblem, outputs, operation="gated_rms_norm", activation="sigmoid", eps=problem.eps)
    normed, _, _ = gated_rms_norm(replace(norm, output_dtype=problem.output_dtype), outputs)
    _roll(problem, t, live, slot, history, x.flatten(0, 1))
    null = (o == 0).all(-1, keepdim=True)  # whatever the gate of a null sequence holds
    return torch.where(null, 0.0, normed), None, None


def _sequences(problem: FusedProblem, t: FusedTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Finds which sequences are not null, the index of the slot of their window, and the place where that begins."""
    index = t.state_indices
    count = torch.ones_like(index[:, 0] if index.dim() == 2 else index)
    count = count if t.num_accepted_tokens is None else t.num_accepted_tokens
    live = (count >= 1) & (count <= problem.most_tokens)
    shift = torch.where(live, count - 1, 0).long()
    first = index if index.dim() == 1 else index[:, 0]
    start = index if index.dim() == 1 else index.gather(1, shift[:, None])[:, 0]
    for named in (first, start):
        live = live & named_slots(named, t.state_pool)[1]
    return live, first, shift


def _windows(problem: FusedProblem, t: FusedTensors, live: Tensor, slot: Tensor, shift: Tensor) -> Tensor:
    """The last `W - 1` inputs of each sequence, `[N, D, W - 1]`; zeros for null ones."""
    pool, W = t.conv_state, problem.taps
    if pool.shape[0] == 0:
        return pool.new_zeros(len(slot), pool.shape[1], W - 1)
    rows = pool[named_slots(slot, pool)[0]]
    place = shift[:, None, None] + torch.arange(W - 1, device=pool.device)
    return torch.where(live[:, None, None], rows.gather(2, place.expand(-1, pool.shape[1], -1)), 0.0)


def _roll(problem: FusedProblem, t: FusedTensors, live: Tensor, slot: Tensor, history: Tensor, x: Tensor) -> None:
    """Moves the windows on, by one place for the sequence's first token; further ones follow it."""
    pool, W = t.conv_state, problem.taps
    if pool.shape[0] == 0 or len(slot) == 0 or len(x) == 0:
        return
    begins, lengths = offsets_of(problem, t)[:-1], few_tokens(problem, t)
    after = pool[named_slots(slot, pool)[0]]
    for place in range(min(pool.shape[2], W - 2 + problem.most_tokens)):
        i = place - (W - 2)
        value = x[(begins + i).clamp(0, len(x) - 1)] if i >= 0 else history[:, :, place + 1]
        after[:, :, place] = torch.where((i < lengths)[:, None], value.to(pool.dtype), after[:, :, place])
    store_rows(pool, slot, live & (lengths > 0), after)
