"""The part of other ranks that a rank's kernels read: where sequences go on, as numbers on the device (docs/parallel.md)."""

import torch
from torch import Tensor

OPEN_IN, OPEN_OUT, FIRST_RANK, LAST_RANK, HALO, SEQUENCES, DIGEST, FIRST, OPENED = range(9)
"""Places in `border`: the local sequences that go on from the rank before and to the rank after (-1: none), the rank where the
former starts and that where the latter ends, tokens of the former on earlier ranks, how many local sequences there are, a hash
of all ranks' offsets (0: not known here), the number of the first local sequence among all; and from `OPENED` on, at an address
of 32 bytes, the offsets of the first alone, 0 and its end."""

PLACES = (
    *("open_in", "open_out", "first_rank", "last_rank", "halo", "sequences", "digest", "first", "opened"),
    "opened_end",
)
"""Names of all numbers of a border, in order."""

BORDER = len(PLACES)

MASK = 2**31 - 1
"""Bits of a hash."""

ANY_HALO = 2**30
"""Tokens on earlier ranks, where only shapes tell how many there are; and the most that are counted."""


def shard(offsets: Tensor, rank: int, ranks: int, tokens: int, N: int) -> tuple[Tensor, Tensor]:
    """Selects, from all ranks' sequences, those of a rank with `tokens` tokens, on the device of the offsets, without reading
    any. Returns `cu_seqlens [N + 1]` and the border. If there are more than `N` sequences, the last are left out, and none
    goes on to the next rank."""
    # of values that nobody has read kernels take ranks, which must be there
    inside = offsets.long().clamp(0, ranks * tokens)
    begins, ends = inside[:-1], inside[1:]
    low, high = rank * tokens, (rank + 1) * tokens
    # those that end before the rank's tokens; an empty one at the border belongs to the rank after it
    first = ((ends < low) | ((ends == low) & (begins < low))).sum()
    stop = torch.full_like(first, len(begins)) if rank + 1 == ranks else (begins < high).sum()
    stop = torch.maximum(first, stop)
    # a last sequence of no tokens, so that there is one to look at
    padded = torch.cat([inside, inside[-1:]])
    index = torch.arange(N + 1, device=offsets.device)
    local = (padded[torch.minimum(first + index, stop)] - low).clamp(0, tokens)
    begin, end = padded[first], padded[stop]
    some = stop > first
    opened, left = some & (begin < low), some & (end > high) & (stop - first <= N)
    none, size = torch.full_like(first, -1), max(tokens, 1)
    values = {
        OPEN_IN: torch.where(opened, 0, none),
        OPEN_OUT: torch.where(left, stop - first - 1, none),
        FIRST_RANK: torch.where(opened, begin // size, rank),
        LAST_RANK: torch.where(left, (end - 1) // size, rank),
        HALO: torch.where(opened, low - begin, 0).clamp(max=ANY_HALO),
        SEQUENCES: stop - first,
        DIGEST: digest(offsets),
        FIRST: first,
        OPENED + 1: torch.where(opened, local[min(N, 1)], 0),
    }
    nothing = torch.zeros_like(first)
    border = torch.stack([values.get(place, nothing) for place in range(BORDER)])
    return local.int(), border.int()


def counts(offsets: Tensor, ranks: int, tokens: int) -> Tensor:
    """Counts the sequences of each rank, `[ranks]`, of offsets that never fall: as many as `shard` says."""
    offsets = offsets.long()
    begins, ends = offsets[:-1].contiguous(), offsets[1:].contiguous()
    low = torch.arange(ranks, device=offsets.device) * tokens
    started = torch.searchsorted(begins, low)
    first = torch.minimum(started, torch.searchsorted(ends, low, right=True))
    stop = torch.cat([started[1:], started.new_full((1,), len(begins))])
    return (stop - first).clamp(min=0)


def digest(offsets: Tensor) -> Tensor:
    """A hash of 31 bits, on the device of the offsets."""
    place = torch.arange(len(offsets), device=offsets.device)
    mixed = (offsets.long() * 40_503 + place * 2_654_435_761) & MASK
    return ((mixed ^ (mixed >> 15)) * 739_982_445 & MASK).sum() & MASK


def new_border(device: torch.device, **values: int) -> Tensor:
    """A border of these values, by the names of their places, and zeros. Calls with gradients take it wherever it is made."""
    with torch.inference_mode(False):
        return torch.tensor([values.get(name, 0) for name in PLACES], dtype=torch.int32, device=device)
