"""Locates sequences and their chunks: `cu_seqlens`, checkpoint spans and chunk slots (`reference/sequences.py` defines them).

Offsets are clamped as they are read, so bad ones never lead outside the tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

OFFSETS_AT_A_TIME = tl.constexpr(128)
"""Entries of `cu_seqlens` that a CTA reads at a time where it counts the chunks of all sequences."""


@triton.jit
def clamp_bounds(begin, end, T, integer: tl.constexpr = tl.int64):
    """The offsets clamped to `[0, T]`, the second not below the first."""
    begin = tl.minimum(tl.maximum(begin, 0), T).to(integer)
    return begin, tl.minimum(tl.maximum(end, begin), T).to(integer)


@triton.jit
def sequence_bounds(cu_seqlens, n, T, integer: tl.constexpr = tl.int64):
    """The first and past-the-last token of packed sequence `n`."""
    return clamp_bounds(tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1), T, integer)


@triton.jit
def locate_sequence(n, cu_seqlens, T):
    """Batch row, first and past-the-last token of sequence `n`, packed or not."""
    if cu_seqlens is None:
        batch = n
        begin = n * 0
        end = begin + T
    else:
        batch = n * 0
        begin, end = sequence_bounds(cu_seqlens, n, T)
    return batch, begin, end


@triton.jit
def crossing_packet(border, n, packets):
    """The packet that the state of sequence `n` has where it crosses a rank's border, and whether it does: the first of
    `packets` sequences that do is the number at `border`, if it isn't negative."""
    first = tl.load(border)
    packet = n - first
    return packet, (first >= 0) & (packet >= 0) & (packet < packets)


@triton.jit
def at_token(tensors, strides, batch, token, head):
    """`tensors [B, T, H, ...]` from the row of a token and head on. `strides`: batch, token and head of each, one by one."""
    rows = ()
    for i in tl.static_range(len(tensors)):
        in_tensor = batch * strides[3 * i] + token * strides[3 * i + 1] + head * strides[3 * i + 2]
        rows = rows + (tensors[i] + in_tensor,)
    return rows


@triton.jit
def locate_work_tile(work_tile, cu_seqlens, T, HV, SLICES):
    """A work tile of a kernel over (sequence, value head, slice of value channels): its slice, value head and sequence, and the
    sequence's batch row, first and past-the-last token."""
    slice_ = work_tile % SLICES
    head = ((work_tile // SLICES) % HV).to(tl.int64)
    n = (work_tile // SLICES // HV).to(tl.int64)
    batch, begin, end = locate_sequence(n, cu_seqlens, T)
    return slice_, head, n, batch, begin, end


@triton.jit
def own_work_tile(cu_seqlens, T, HV, SLICES):
    """`locate_work_tile` for a grid of one CTA per work tile."""
    return locate_work_tile(tl.program_id(0), cu_seqlens, T, HV, SLICES)


@triton.jit
def end_of_few(begin, end, most_tokens):
    """The end of a sequence of up to `most_tokens` tokens. For a longer one its begin: nothing of it is stored."""
    return tl.where(end - begin > most_tokens, begin, end)


@triton.jit
def span_count(checkpoint_offsets, checkpoints):
    """Checkpoint spans of a sequence. Without checkpoints a compile-time 1, which leaves nothing of the loops over spans."""
    spans = 1
    if checkpoint_offsets is not None:
        spans = checkpoints + 1
    return spans


@triton.jit
def first_chunk_slot(begin, n, spans, C):
    """The first chunk slot of packed sequence `n`. Sequences never share a slot, as each span `[a, b)` of one has
    `ceil((b - a) / C) <= b // C - a // C + 1` chunks."""
    return begin // C + n * spans


@triton.jit
def span_end(checkpoint_offsets, n, span, spans, start, length):
    """Returns the end of the checkpoint span that begins at token `start` of sequence `n`: its checkpoint, or the sequence's
    end for the last span. It is never before `start` or past `length`, whatever the offset is."""
    offset = tl.load(checkpoint_offsets + n * (spans - 1) + tl.minimum(span, spans - 2))
    offset = tl.where(span < spans - 1, offset, length)
    return tl.minimum(tl.maximum(offset, start), length).to(length.dtype)


@triton.jit
def span_extent(checkpoint_offsets, n, span, spans, start, begin, end, C):
    """Past-the-last token and number of chunks of the span that begins at `start`; sequence `n` has tokens `[begin, end)`."""
    stop = end
    if checkpoint_offsets is not None:
        stop = begin + span_end(checkpoint_offsets, n, span, spans, start - begin, end - begin)
    return stop, ((stop - start + C - 1) // C).to(tl.int32)


@triton.jit
def sequence_chunk_slots(cu_seqlens, checkpoint_offsets, checkpoints, n, begin, chunk_slots, C):
    """The first chunk slot and the number of spans of sequence `n`. `chunk_slots`: those of a batch row."""
    spans = span_count(checkpoint_offsets, checkpoints)
    chunk_slot = n * chunk_slots
    if cu_seqlens is not None:
        chunk_slot = first_chunk_slot(begin, n, spans, C)
    return chunk_slot, spans


@triton.jit
def span_of_chunk(checkpoint_offsets, n, chunk, spans, length, C):
    """The checkpoint span of a sequence's chunk, the chunk's first token and the span's past-the-last one, both from the
    sequence's start: the chunk grid starts anew at every checkpoint. The span past the last chunk ends where it starts, or
    before."""
    # 0: an integer that a loop carries from the constant 0, Triton 3.6 takes for that constant
    start = tl.minimum(length, 0)
    span = start.to(tl.int32)
    chunk += start
    stop = span_end(checkpoint_offsets, n, span, spans, start, length)
    while (chunk * C >= stop - start) & (span + 1 < spans):
        chunk -= (stop - start + C - 1) // C
        start = stop
        span += 1
        stop = span_end(checkpoint_offsets, n, span, spans, start, length)
    return span, start + chunk * C, stop


@triton.jit
def chunk_of_sequence(
    cu_seqlens, checkpoint_offsets, checkpoints, n, chunk_slot, chunk_slots, T,
    C, integer: tl.constexpr = tl.int64, bounds=None,
):  # fmt: skip
    """Batch row, first token and token count of a chunk slot of sequence `n`; the count is 0 or less if the slot is unused.
    `bounds`: those of a packed sequence, if they are known."""
    spans = span_count(checkpoint_offsets, checkpoints)
    if cu_seqlens is None:
        batch = n
        chunk = chunk_slot - n * chunk_slots
        begin = chunk_slot * 0
        end = begin + T
    else:
        batch = n * 0
        if bounds is None:
            begin, end = sequence_bounds(cu_seqlens, n, T, integer)
        else:
            begin, end = bounds
        chunk = chunk_slot - first_chunk_slot(begin, n, spans, C)
    if checkpoint_offsets is None:
        start = chunk * C
        stop = end - begin
    else:
        _, start, stop = span_of_chunk(checkpoint_offsets, n, chunk, spans, end - begin, C)
    count = stop - start
    if cu_seqlens is not None:
        count = tl.where(chunk < 0, 0, count)
    return batch, begin + start, count


@triton.jit
def find_chunk(cu_seqlens, checkpoint_offsets, checkpoints, chunk_slot, chunk_slots, N, T, C):
    """`chunk_of_sequence` for a slot whose sequence is not known. Packed: binary search for the last sequence whose first slot
    is not past `chunk_slot`."""
    if cu_seqlens is None:
        n = chunk_slot // chunk_slots
    else:
        spans = span_count(checkpoint_offsets, checkpoints)
        n = chunk_slot * 0
        high = n + N - 1
        while n < high:
            middle = (n + high + 1) // 2
            begin, _ = sequence_bounds(cu_seqlens, middle, T)
            if first_chunk_slot(begin, middle, spans, C) <= chunk_slot:
                n = middle
            else:
                high = middle - 1
    return chunk_of_sequence(cu_seqlens, checkpoint_offsets, checkpoints, n, chunk_slot, chunk_slots, T, C)


@triton.jit
def own_chunk(work_tile, cu_seqlens, checkpoint_offsets, checkpoints, chunk_slots, N, T, HV, C):
    """A work tile of a kernel over (chunk slot, value head): its value head and slot, and `find_chunk`."""
    head = (work_tile % HV).to(tl.int64)
    chunk_slot = (work_tile // HV).to(tl.int64)
    batch, start, count = find_chunk(cu_seqlens, checkpoint_offsets, checkpoints, chunk_slot, chunk_slots, N, T, C)
    return head, chunk_slot, batch, start, count


@triton.jit
def rows_before(cu_seqlens, n, T, tokens, BLOCK):
    """Returns the first row of sequence `n` where each sequence takes `ceil(length / tokens)` rows, such as chunks, without
    gaps. Reads `BLOCK` offsets at a time."""
    if cu_seqlens is None:
        total = n * ((T + tokens - 1) // tokens)
    else:
        total = n * 0
        for base in range(0, n, BLOCK):
            m = base + tl.arange(0, BLOCK)
            begin = tl.load(cu_seqlens + m, mask=m < n, other=0)
            end = tl.load(cu_seqlens + m + 1, mask=m < n, other=0)
            begin, end = clamp_bounds(begin, end, T)
            total += tl.sum((end - begin + tokens - 1) // tokens)
    return total
