"""Assigns the chunks of a split sequence to its segments (docs/split.md).

A sequence is cut into `parts` segments; `part` is the number of one of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sequences import locate_sequence, sequence_bounds, sequence_chunk_slots, span_end


@triton.jit
def sequence_chunks(checkpoint_offsets, n, spans, length, C):
    """Chunks of sequences `n` of these lengths, over all their spans."""
    if checkpoint_offsets is None:
        chunks = (length + C - 1) // C
    else:
        chunks = length * 0
        start = length * 0
        for span in range(0, spans):
            end = span_end(checkpoint_offsets, n, span, spans, start, length)
            chunks += (end - start + C - 1) // C
            start = end
    return chunks


@triton.jit
def span_chunks_before(cu_seqlens, checkpoint_offsets, n, spans, T, C, BLOCK):
    """`rows_before` for the chunks of sequences that checkpoints cut."""
    total = n * 0
    for base in range(0, n, BLOCK):
        m = base + tl.arange(0, BLOCK)
        inside = tl.minimum(m, n - 1)
        begin, end = sequence_bounds(cu_seqlens, inside, T)
        chunks = sequence_chunks(checkpoint_offsets, inside, spans, end - begin, C)
        total += tl.sum(tl.where(m < n, chunks, 0))
    return total


@triton.jit
def segment_of(segment, first_segment, N, skipped=0):
    """Place of segment `segment` among all: its sequence, `part`, `parts`, and whether there is such a segment. The last
    `skipped` segments of each sequence do not count."""
    n = segment * 0
    high = n + N - 1
    while n < high:
        middle = (n + high + 1) // 2
        if tl.load(first_segment + middle) - middle * skipped <= segment:
            n = middle
        else:
            high = middle - 1
    first = tl.load(first_segment + n)
    parts = tl.load(first_segment + n + 1) - first
    segment += n * skipped
    return n.to(tl.int64), segment - first, parts, segment - first < parts


@triton.jit
def segment_chunks(part, parts, chunks):
    """The first and past-the-last of the sequence's chunks that segment `part` has."""
    chunks = chunks.to(tl.int64)
    return (part * chunks // parts).to(tl.int32), ((part + 1) * chunks // parts).to(tl.int32)


@triton.jit
def place_segment(n, part, parts, cu_seqlens, checkpoint_offsets, checkpoints, chunk_slots, T, C):
    """`locate_sequence` and `sequence_chunk_slots` of sequence `n`, and `segment_chunks` of its segment `part`."""
    batch, begin, end = locate_sequence(n, cu_seqlens, T)
    chunk_slot, spans = sequence_chunk_slots(cu_seqlens, checkpoint_offsets, checkpoints, n, begin, chunk_slots, C)
    first, stop = segment_chunks(part, parts, sequence_chunks(checkpoint_offsets, n, spans, end - begin, C))
    return batch, begin, end, chunk_slot, spans, first, stop


@triton.jit
def part_of_span(first, stop, before, chunks):
    """Clips chunks `[first, stop)` of a sequence to a span after `before` of its chunks, counted from the span on. `before`
    must come from what the loop over spans carries anyway: a counter that starts at 0, Triton 3.6 takes for the constant 0."""
    start = tl.minimum(tl.maximum(first - before, 0), chunks)
    return start.to(tl.int32), tl.minimum(tl.maximum(stop - before, start), chunks).to(tl.int32)


ROOT_BITS = tl.constexpr(7)
"""Bits of an integer square root, and so of the number of segments that is worth planning: 127 at most."""


HIGH_BIT = tl.constexpr(1 << 6)
"""The highest of them."""


@triton.jit
def chunks_of(n, cu_seqlens, checkpoint_offsets, spans, N, T, C):
    """Chunks of sequences `n`, 0 past the last sequence."""
    inside = tl.minimum(n, N - 1)
    _, begin, end = locate_sequence(inside, cu_seqlens, T)
    length = (end - begin).to(tl.int64)
    return tl.where(n < N, sequence_chunks(checkpoint_offsets, inside, spans, length, C), 0)


@triton.jit
def states_fit(total, cu_seqlens, spans, N, T, C):
    """Says whether `T` tokens can hold `total` chunks. Falling offsets say more of them than that. As the states between
    segments have room for `split.py: most_segments` alone, a batch with such offsets stays whole."""
    if cu_seqlens is None:
        return True
    return total <= T // C + N * spans


@triton.jit
def planned_parts(chunks, total, room, split, batch_invariant, step, transition, compose, fixed, shortest, margin):
    """`split.py: parts_of_sequences` for sequences of `chunks` chunks."""
    total = tl.where(batch_invariant != 0, chunks, total)
    planned = tl.minimum(1 + room * chunks // tl.maximum(total, 1), chunks // shortest)
    square = chunks * (step + transition)
    root = chunks * 0
    for i in tl.static_range(ROOT_BITS):
        more = root + (HIGH_BIT >> i)
        root = tl.where(more * more * compose <= square, more, root)
    planned = tl.maximum(tl.minimum(planned, root), 1)
    longest = (chunks + planned - 1) // planned
    cut = longest * (step + transition) + planned * compose + fixed
    planned = tl.where(cut * 100 <= chunks * step * (100 - margin), planned, 1)
    forced = tl.minimum(tl.maximum(chunks, 1), split)
    return tl.where(split != 0, forced, planned)


@triton.jit
def outgoing_sequence(border, packet):
    """The sequence of a packet for the next rank, whether there is one, and 1 if it comes from the rank before, else 0."""
    opened = tl.load(border)
    n = tl.load(border + 1) + packet
    goes_on = n >= packet
    return n.to(tl.int64), ((opened >= 0) & (opened + packet == n)).to(tl.int32), goes_on
