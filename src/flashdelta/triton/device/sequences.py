"""Where a sequence and its chunks lie, from `cu_seqlens`, checkpoints and chunk slots (`reference/sequences.py` defines all
three). Offsets are clamped as they are read, so bad ones never lead outside the tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamp_bounds(begin, end, T, integer: tl.constexpr = tl.int64):
    """Offsets in `[0, T]`, the second not below the first, so that bad ones stay inside the tensors."""
    begin = tl.minimum(tl.maximum(begin, 0), T).to(integer)
    return begin, tl.minimum(tl.maximum(end, begin), T).to(integer)


@triton.jit
def sequence_bounds(cu_seqlens, n, T, integer: tl.constexpr = tl.int64):
    """First and past-the-last token of sequence `n`, clamped."""
    return clamp_bounds(tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1), T, integer)


@triton.jit
def place_of(n, cu_seqlens, T):
    """Batch row, first and past-the-last token of sequence `n`."""
    if cu_seqlens is None:
        batch = n
        begin = n * 0
        end = begin + T
    else:
        batch = n * 0
        begin, end = sequence_bounds(cu_seqlens, n, T)
    return batch, begin, end


@triton.jit
def locate_item(item, cu_seqlens, T, HV, SLICES: tl.constexpr):
    """What work item `item` of a kernel over (sequence, value head, slice of value channels) is: slice, value head, sequence,
    batch row, first and past-the-last token."""
    slice_ = item % SLICES
    head = ((item // SLICES) % HV).to(tl.int64)
    n = (item // SLICES // HV).to(tl.int64)
    batch, begin, end = place_of(n, cu_seqlens, T)
    return slice_, head, n, batch, begin, end


@triton.jit
def locate(cu_seqlens, T, HV, SLICES: tl.constexpr):
    """`locate_item` where each program has one item."""
    return locate_item(tl.program_id(0), cu_seqlens, T, HV, SLICES)


@triton.jit
def piece_count(checkpoint_offsets, checkpoints):
    """Pieces that checkpoints cut a sequence into. Without them one, known when compiling: nothing is left of the search."""
    pieces = 1
    if checkpoint_offsets is not None:
        pieces = checkpoints + 1
    return pieces


@triton.jit
def first_slot(begin, n, pieces, C: tl.constexpr):
    """Slots of different sequences never meet: `ceil((b - a) / C) <= b // C - a // C + 1` for each piece of a sequence."""
    return begin // C + n * pieces


@triton.jit
def piece_end(checkpoint_offsets, n, piece, pieces, start, length):
    """Where the piece of sequence `n` that begins at its token `start` ends: at a checkpoint, the last piece at the
    sequence's end. Never before `start` or past `length`, whatever the offset is."""
    offset = tl.load(checkpoint_offsets + n * (pieces - 1) + tl.minimum(piece, pieces - 2)).to(tl.int64)
    offset = tl.where(piece < pieces - 1, offset, length)
    return tl.minimum(tl.maximum(offset, start), length)


@triton.jit
def piece_extent(checkpoint_offsets, n, piece, pieces, start, begin, end, C: tl.constexpr):
    """Where the piece that starts at token `start` of sequence `n`, tokens `[begin, end)`, ends, and how many chunks it has."""
    stop = end
    if checkpoint_offsets is not None:
        stop = begin + piece_end(checkpoint_offsets, n, piece, pieces, start - begin, end - begin)
    return stop, ((stop - start + C - 1) // C).to(tl.int32)


@triton.jit
def chunk_place(cu_seqlens, checkpoint_offsets, checkpoints, n, begin, slots, C: tl.constexpr):
    """The first chunk slot of sequence `n`, and how many pieces checkpoints cut it into."""
    pieces = piece_count(checkpoint_offsets, checkpoints)
    slot = n * slots
    if cu_seqlens is not None:
        slot = first_slot(begin, n, pieces, C)
    return slot, pieces


@triton.jit
def find_in_pieces(checkpoint_offsets, n, chunk, pieces, length, C: tl.constexpr):
    """First token and token count of a sequence's chunk, whose grid starts anew at every checkpoint; the count is 0 if the
    sequence has no such chunk. Tokens count from the sequence's start."""
    piece_start = chunk * 0
    start = piece_start
    count = piece_start
    for piece in range(0, pieces):
        end = piece_end(checkpoint_offsets, n, piece, pieces, piece_start, length)
        chunks = (end - piece_start + C - 1) // C
        here = (chunk >= 0) & (chunk < chunks)
        start = tl.where(here, piece_start + chunk * C, start)
        count = tl.where(here, end - start, count)
        chunk -= chunks
        piece_start = end
    return start, count


@triton.jit
def chunk_of_sequence(
    cu_seqlens,
    checkpoint_offsets,
    checkpoints,
    n,
    slot,
    slots,
    T,
    C: tl.constexpr,
    integer: tl.constexpr = tl.int64,
    bounds=None,
):
    """The batch row, first token and token count of a chunk slot that belongs to sequence `n`; the count is 0 or less where
    the slot is not used. `bounds`: those of a packed sequence, if they are known."""
    pieces = piece_count(checkpoint_offsets, checkpoints)
    if cu_seqlens is None:
        batch = n
        chunk = slot % slots
        begin = slot * 0
        end = begin + T
    else:
        batch = n * 0
        if bounds is None:
            begin, end = sequence_bounds(cu_seqlens, n, T, integer)
        else:
            begin, end = bounds
        chunk = slot - first_slot(begin, n, pieces, C)
    if checkpoint_offsets is None:
        start = chunk * C
        count = end - begin - start
        if cu_seqlens is not None:
            count = tl.where(chunk < 0, 0, count)
    else:
        start, count = find_in_pieces(checkpoint_offsets, n, chunk, pieces, end - begin, C)
    return batch, begin + start, count


@triton.jit
def find_chunk(cu_seqlens, checkpoint_offsets, checkpoints, slot, slots, N, T, C: tl.constexpr):
    """`chunk_of_sequence` with the sequence found: packed, by binary search for the last one whose first slot is not past
    `slot`."""
    if cu_seqlens is None:
        n = slot // slots
    else:
        pieces = piece_count(checkpoint_offsets, checkpoints)
        n = slot * 0
        high = n + N - 1
        while n < high:
            middle = (n + high + 1) // 2
            begin, _ = sequence_bounds(cu_seqlens, middle, T)
            if first_slot(begin, middle, pieces, C) <= slot:
                n = middle
            else:
                high = middle - 1
    return chunk_of_sequence(cu_seqlens, checkpoint_offsets, checkpoints, n, slot, slots, T, C)


@triton.jit
def own_chunk(item, cu_seqlens, checkpoint_offsets, checkpoints, slots, N, T, HV, C: tl.constexpr):
    """What work item `item` of a kernel over (chunk slot, value head) is: value head, slot, and `find_chunk`."""
    head = (item % HV).to(tl.int64)
    slot = (item // HV).to(tl.int64)
    batch, start, count = find_chunk(cu_seqlens, checkpoint_offsets, checkpoints, slot, slots, N, T, C)
    return head, slot, batch, start, count


@triton.jit
def chunks_before(cu_seqlens, n, T, C: tl.constexpr, BLOCK: tl.constexpr):
    """How many chunks the sequences before `n` have: where the chunks of `n` start in a gapless list."""
    total = n * 0
    for base in range(0, n, BLOCK):
        m = base + tl.arange(0, BLOCK)
        begin = tl.load(cu_seqlens + m, mask=m < n, other=0)
        end = tl.load(cu_seqlens + m + 1, mask=m < n, other=0)
        begin, end = clamp_bounds(begin, end, T)
        total += tl.sum((end - begin + C - 1) // C)
    return total
