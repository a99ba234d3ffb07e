"""Where sequences and chunks lie, computed on the device: nothing here waits for a GPU.

Chunk slots: the chunks of sequence `n` take the slots from `cu_seqlens[n] // C + n` on. Since
`ceil((b - a) / C) <= b // C - a // C + 1`, the slots of two sequences never meet, every sequence (an empty one too) owns
at least one, and `T // C + N` slots hold them all, whatever the offsets are. A slot without tokens changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..spec import KdaSpec


@dataclass(frozen=True)
class ChunkSlots:
    """Packed sequences cut into chunk slots (`S = T // C + N` of them).

    `token [S, C]`: token index, clamped; `valid [S, C]`: whether it lies in the sequence; `sequence [S]`; `first [S]`:
    whether the slot opens its sequence; `last [N]`: the last slot of each sequence that holds tokens (its first if empty).
    """

    token: torch.Tensor
    valid: torch.Tensor
    sequence: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


def offsets_of(spec: KdaSpec, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """`cu_seqlens` as int64, clamped to the tensors so that bad offsets can't read outside them."""
    return cu_seqlens.long().clamp(0, spec.T)


def chunk_slots(spec: KdaSpec, cu_seqlens: torch.Tensor) -> ChunkSlots:
    C, N, device = spec.chunk_size, spec.N, cu_seqlens.device
    cu = offsets_of(spec, cu_seqlens)
    begin = torch.div(cu[:-1], C, rounding_mode="floor") + torch.arange(N, device=device)
    slot = torch.arange(spec.slots, device=device)
    sequence = (torch.searchsorted(begin, slot, right=True) - 1).clamp(0, N - 1)
    token = cu[sequence][:, None] + (slot - begin[sequence])[:, None] * C + torch.arange(C, device=device)
    length = (cu[1:] - cu[:-1]).clamp(min=0)
    return ChunkSlots(
        token=token.clamp(0, max(spec.T - 1, 0)),
        valid=(token >= 0) & (token < cu[1:][sequence][:, None]),
        sequence=sequence,
        first=slot == begin[sequence],
        last=begin + (torch.div(length + C - 1, C, rounding_mode="floor") - 1).clamp(min=0),
    )


@dataclass(frozen=True)
class TokenSequences:
    """Of every token of a packed batch: the `sequence [T]` it belongs to, whether it is the `first [T]` of it, whether it
    belongs to one at all (`valid [T]`), and `ends [T]`: its sequence if it is the last token of it, else `N`."""

    sequence: torch.Tensor
    first: torch.Tensor
    valid: torch.Tensor
    ends: torch.Tensor


def token_sequences(spec: KdaSpec, cu_seqlens: torch.Tensor) -> TokenSequences:
    cu = offsets_of(spec, cu_seqlens)
    t = torch.arange(spec.T, device=cu.device)
    sequence = torch.searchsorted(cu, t, right=True) - 1
    valid = (sequence >= 0) & (sequence < spec.N)
    sequence = sequence.clamp(0, max(spec.N - 1, 0))
    is_last = valid & (cu[(sequence + 1).clamp(max=spec.N)] == t + 1)
    return TokenSequences(sequence, cu[sequence] == t, valid, torch.where(is_last, sequence, spec.N))
