"""Sequences that go on from rank to rank (docs/parallel.md): the state before a rank's tokens, from what all say of theirs.

    packet of a rank    S' = M S + b of its tokens of the sequence that goes on to the next rank
    merge               S = b_first;  S = M_j S + b_j for the ranks j between the first one and this one

The exchange is part of the graph: autograd goes through it, which the kernels' own backward pass is held against.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..parallel.border import FIRST_RANK, OPEN_IN, OPEN_OUT
from ..parallel.exchange import exchange as exchange_packets
from ..parallel.exchange import gather
from ..problem.problem import ChunkProblem, ChunkTensors


class _Gather(torch.autograd.Function):
    """Every rank's packet. A rank's gradient is the sum of what all ranks have for its packet."""

    @staticmethod
    def forward(ctx: FunctionCtx, packet: Tensor, problem: ChunkProblem) -> Tensor:
        ctx.problem = problem  # type: ignore[attr-defined]
        packets = packet.new_empty(problem.packet_shape)
        exchange_packets(packet.contiguous(), packets, problem.process_group, problem.exchange)
        return packets

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        problem = ctx.problem
        # of all packets, for which no memory is kept
        grads = grad.new_empty(problem.ranks, *grad.shape)
        gather(grad.contiguous(), grads.flatten(0, 1), problem.process_group)
        return grads[:, problem.rank].sum(0), None


def outgoing(problem: ChunkProblem, t: ChunkTensors) -> list[int]:
    """The local sequences that go on to the next rank."""
    assert t.border is not None
    first = int(t.border[OPEN_OUT])
    return [] if first < 0 else [*range(first, first + problem.packets)]


def started_here(problem: ChunkProblem, t: ChunkTensors, initial: Tensor) -> Tensor:
    """The initial states of the sequences that start on this rank, zeros for others."""
    assert t.border is not None
    opened = int(t.border[OPEN_IN])
    if opened < 0:
        return initial
    n = torch.arange(problem.N, device=initial.device)
    others = (n < opened) | (n >= opened + problem.packets)
    return torch.where(others.view(-1, 1, 1, 1), initial, 0)


def identity(HV: int, K: int, V: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """`M [HV, K, K]` and `b [HV, K, V]` of no tokens."""
    return torch.eye(K, dtype=like.dtype, device=like.device).expand(HV, K, K), like.new_zeros(HV, K, V)


def exchange(problem: ChunkProblem, t: ChunkTensors, transitions: list, initial: Tensor) -> Tensor:
    """All packets, `Problem.packet_shape`; `transitions` are `(M, b)` of this rank's outgoing sequences."""
    rows = [torch.cat([M.mT, b.mT], dim=1)[:, -problem.packet_shape[3] :] for M, b in transitions]
    packet = torch.stack(rows) if rows else initial.new_zeros(problem.packet_shape[1:])
    # in every rank's graph, so that every rank joins the exchange of the gradients
    return _Gather.apply(packet + nothing(t.v).to(packet.dtype), problem)


def carried(problem: ChunkProblem, t: ChunkTensors, packets: Tensor, initial: Tensor) -> Tensor:
    """The initial states `[N, HV, K, V]`, with what the ranks before leave for the sequences that go on here."""
    assert t.border is not None
    initial = initial + nothing(packets)
    opened, first = int(t.border[OPEN_IN]), int(t.border[FIRST_RANK])
    if opened < 0:
        return initial
    b = packets[:, :, :, -problem.V :].mT
    states = b[first]
    for j in range(first + 1, problem.rank):
        states = packets[j, :, :, : problem.K].mT @ states + b[j]
    return torch.cat([initial[:opened], states + nothing(initial), initial[opened + problem.packets :]])


def nothing(x: Tensor) -> Tensor:
    """Zero, whose gradient is zero, too, whatever `x` holds."""
    total = x.sum()
    return torch.where(torch.zeros_like(total, dtype=torch.bool), total, 0)
