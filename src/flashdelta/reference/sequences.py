"""Locates sequences and chunks on the device: nothing here waits for a GPU.

Checkpoint spans: a sequence of `L` tokens is cut at its `M` checkpoints, `cut_m = clamp(offset_m, cut_{m-1}, L)`, and its chunk
grid starts anew at every cut, so that every checkpoint is a chunk boundary. Spans may be empty. The state after `cut_m` tokens
is stored if the caller asked for it there, `0 < offset_m = cut_m`: no offset, good or bad, leads outside the sequence.

Chunk slots: the chunks of packed sequence `n` take the slots from `cu_seqlens[n] // C + n (1 + M)` on. Since
`ceil((b - a) / C) <= b // C - a // C + 1` for each of its spans, the slots of two sequences never meet, every sequence (an
empty one too) owns at least one, and `T // C + N (1 + M)` slots hold them all, whatever the offsets are. In a batch, each row
has `ceil(T / C) + M` slots. A slot without tokens changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..problem.problem import ChunkProblem, SequenceProblem, SequenceTensors


@dataclass(frozen=True)
class ChunkSlots:
    """Sequences cut into chunk slots, `S` of them in all. Batch rows count as sequences one after another.

    `token [S, C]`: token index, clamped; `valid [S, C]`: whether it lies in the chunk; `sequence [S]`; `first [S]`: whether
    the slot opens its sequence; `opening [N]`: the first slot of each sequence, and `chunks [N]` how many it has;
    `last [N]`: the last slot of each sequence that holds tokens (its first if empty);
    `reached [N, M]`: the slot after which a checkpoint's state is there; `stored [N, M]`: whether it is to be stored.
    """

    token: Tensor
    valid: Tensor
    sequence: Tensor
    first: Tensor
    opening: Tensor
    chunks: Tensor
    last: Tensor
    reached: Tensor
    stored: Tensor


def offsets_of(problem: SequenceProblem, t: SequenceTensors) -> Tensor:
    """Offsets where each sequence begins and the last one ends, `[N + 1]`, in tokens of all batch rows one after another.
    Clamped to the tensors, so that bad offsets can't read outside them."""
    if t.cu_seqlens is None:
        return torch.arange(problem.N + 1, device=t.device) * problem.T
    return t.cu_seqlens.long().clamp(0, problem.T)


def lengths_of(problem: SequenceProblem, t: SequenceTensors) -> Tensor:
    """Tokens of each sequence, `[N]`."""
    return offsets_of(problem, t).diff().clamp(min=0)


def few_tokens(problem: SequenceProblem, t: SequenceTensors) -> Tensor:
    """Tokens of each sequence of a step, `[N]`; 0 where they are more than `Problem.most_tokens`."""
    lengths = lengths_of(problem, t)
    return torch.where(lengths > problem.most_tokens, 0, lengths)


def span_cuts(checkpoint_offsets: Tensor | None, length: Tensor) -> Tensor:
    """Offsets where the spans of each sequence begin and the last one ends, in tokens from its start: `[N, M + 2]`."""
    cuts = [torch.zeros_like(length)]
    for offset in () if checkpoint_offsets is None else checkpoint_offsets.long().unbind(1):
        cuts.append(torch.minimum(torch.maximum(offset, cuts[-1]), length))
    return torch.stack([*cuts, length], dim=1)


def span_chunks(problem: ChunkProblem, cuts: Tensor) -> Tensor:
    """Chunks of each span, from `span_cuts`."""
    return (cuts.diff(dim=1) + problem.chunk_size - 1) // problem.chunk_size


def chunks_of(problem: ChunkProblem, t: SequenceTensors) -> Tensor:
    """Chunks of each sequence, `[N]`, over all its spans."""
    return span_chunks(problem, span_cuts(t.checkpoint_offsets, lengths_of(problem, t))).sum(1)


def chunk_slots(problem: ChunkProblem, t: SequenceTensors) -> ChunkSlots:
    C, N = problem.chunk_size, problem.N
    begins, lengths = offsets_of(problem, t)[:-1], lengths_of(problem, t)
    n = torch.arange(N, device=begins.device)
    opening = begins // C + n * (1 + problem.checkpoints) if problem.packed else n * problem.slots
    cuts = span_cuts(t.checkpoint_offsets, lengths)
    chunks = span_chunks(problem, cuts)
    through = chunks.cumsum(1)  # chunks of a sequence up to and with each span

    slot = torch.arange(problem.B * problem.slots, device=begins.device)
    sequence = (torch.searchsorted(opening, slot, right=True) - 1).clamp(0, N - 1)
    chunk = slot - opening[sequence]
    span = (chunk[:, None] >= through[sequence]).sum(1).clamp(max=problem.checkpoints)
    start = cuts[sequence, span] + (chunk - (through - chunks)[sequence, span]) * C
    inside = start[:, None] + torch.arange(C, device=begins.device)  # token within its sequence
    token = begins[sequence][:, None] + inside

    offsets = cuts[:, 1:-1] if t.checkpoint_offsets is None else t.checkpoint_offsets
    valid = (chunk >= 0)[:, None] & (inside < cuts[sequence, span + 1][:, None])
    places = token.clamp(0, max(problem.B * problem.T - 1, 0)), valid, sequence, slot == opening[sequence]
    last = opening + (through[:, -1] - 1).clamp(min=0)
    reached = opening[:, None] + (through[:, :-1] - 1).clamp(min=0)
    stored = (offsets > 0) & (offsets == cuts[:, 1:-1])
    return ChunkSlots(*places, opening, through[:, -1], last, reached, stored)


def in_sequences(problem: SequenceProblem, t: SequenceTensors) -> Tensor:
    """Says which tokens of a packed batch belong to a sequence, `[T]`."""
    sequence = torch.searchsorted(offsets_of(problem, t), torch.arange(problem.T, device=t.device), right=True) - 1
    return (sequence >= 0) & (sequence < problem.N)
