"""Which chunks a segment of a split sequence has (docs/split.md)."""

from __future__ import annotations

import triton
import triton.language as tl

from .sequences import chunk_place, piece_end, place_of


@triton.jit
def sequence_chunks(checkpoint_offsets, n, pieces, length, C: tl.constexpr):
    """How many chunks sequences `n` of these lengths have, over all their pieces."""
    if checkpoint_offsets is None:
        chunks = (length + C - 1) // C
    else:
        chunks = length * 0
        start = length * 0
        for piece in range(0, pieces):
            end = piece_end(checkpoint_offsets, n, piece, pieces, start, length)
            chunks += (end - start + C - 1) // C
            start = end
    return chunks


@triton.jit
def segment_of(segment, first_segment, N, skipped=0):
    """Of segment number `segment`: its sequence, its place in it, how many segments the sequence has, and whether there are so
    many segments at all. The last `skipped` segments of each sequence are not counted."""
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
    """The chunks of a sequence that a segment has: the first, and past the last one."""
    chunks = chunks.to(tl.int64)
    return (part * chunks // parts).to(tl.int32), ((part + 1) * chunks // parts).to(tl.int32)


@triton.jit
def place_segment(n, part, parts, cu_seqlens, checkpoint_offsets, checkpoints, slots, T, C: tl.constexpr):
    """Of a sequence `place_of` and `chunk_place`, of its segment `segment_chunks`."""
    batch, begin, end = place_of(n, cu_seqlens, T)
    slot, pieces = chunk_place(cu_seqlens, checkpoint_offsets, checkpoints, n, begin, slots, C)
    first, stop = segment_chunks(part, parts, sequence_chunks(checkpoint_offsets, n, pieces, end - begin, C))
    return batch, begin, end, slot, pieces, first, stop


@triton.jit
def part_of_piece(first, stop, before, chunks):
    """Which of the chunks of a piece, `before` of whose sequence lie before it, are in `[first, stop)`. `before` comes from
    what the loop over pieces carries already: a count of its own, from 0, Triton 3.6 takes for the constant 0."""
    start = tl.minimum(tl.maximum(first - before, 0), chunks)
    return start.to(tl.int32), tl.minimum(tl.maximum(stop - before, start), chunks).to(tl.int32)
