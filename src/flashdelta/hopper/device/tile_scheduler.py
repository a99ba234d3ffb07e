"""Which work a program of `recurrence` has: whole items, equal shares of all chunks, or segments of sequences."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...triton.device import segments, sequences
from .stream_k import part_count, part_of_share

C = gl.constexpr(64)
BV = gl.constexpr(64)

locate_item = gluon.jit(sequences.locate_work_tile.fn)
chunk_place = gluon.jit(sequences.sequence_chunk_slots.fn)
piece_extent = gluon.jit(sequences.span_extent.fn)
clamp_bounds = gluon.jit(sequences.clamp_bounds.fn)
segment_of = gluon.jit(segments.segment_of.fn)
part_of_piece = gluon.jit(segments.part_of_span.fn)
place_segment = gluon.jit(segments.place_segment.fn)


@gluon.jit
def chunks_before(cu_seqlens, n, T):
    """How many chunks the sequences before `n` have: where the chunks of `n` start in a gapless list."""
    total = n * 0
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for base in range(0, n, 128):
        m = base + lane
        begin = gl.load(cu_seqlens + m, mask=m < n, other=0)
        end = gl.load(cu_seqlens + m + 1, mask=m < n, other=0)
        begin, end = clamp_bounds(begin, end, T, gl.int32)
        total += gl.sum((end - begin + C - 1) // C)
    return total


@gluon.jit
def even_parts(items, SLICES: gl.constexpr):
    """How many of the items, each of so many slices, the program does, where it does every so many-th."""
    group = gl.program_id(0) // SLICES
    groups = gl.num_programs(0) // SLICES
    return (items - group + groups - 1) // groups


@gluon.jit
def program_parts(share, first_segment, sizes, SLICES: gl.constexpr):
    """How many items or parts of items the program does, and the segments of all sequences if any may be split."""
    _, N, HV, _, _ = sizes
    if share is None:
        parts = even_parts(N * HV, SLICES)
    else:
        item0, chunk0, item1, chunk1 = share
        parts = part_count(item0, chunk0, item1, chunk1)
    if first_segment is None:
        segments: gl.constexpr = 0
    else:
        segments = gl.load(first_segment + N)
        if segments > N:
            parts = even_parts(segments * HV, SLICES)
    return parts, segments


@gluon.jit
def item_of(k, SLICES: gl.constexpr):
    """The program's item number `k`, where it does every so many-th."""
    return gl.program_id(0) // SLICES + k * (gl.num_programs(0) // SLICES)


@gluon.jit
def locate_segment(item, skipped, first_segment, cu_seqlens, checkpoint_offsets, sizes):
    """As `locate_share`, where an item is a value head of a segment, and the item that it is a part of the sequence; then the
    number of the segment times value heads plus its head, and how many segments of the sequence lie before it. With
    checkpoints, whose pieces have grids of their own, tokens and chunk slot are those of the whole sequence. The last `skipped`
    segments of each sequence are not among the items."""
    T, N, HV, slots, checkpoints = sizes
    n, part, parts, _ = segment_of(item // HV, first_segment, N, skipped)
    batch, begin, end, slot, pieces, first, stop = place_segment(
        n, part, parts, cu_seqlens, checkpoint_offsets, checkpoints, slots, T, C
    )
    last = part + 1 == parts
    if checkpoint_offsets is None:
        end = gl.where(last, end, begin + stop * C)
        begin += first * C
        slot += first
    stop = gl.where(last, 0, stop)
    return (item % HV).to(gl.int64), n, batch, begin, end, slot, pieces, first, stop, item + n * (skipped * HV), part


@gluon.jit
def own_chunks(first_segment, checkpoint_offsets, before, until, passed, chunks):
    """Which of the chunks of a piece the part has, as `locate_part` gives it; `passed` chunks of the item lie before them.
    Without checkpoints a part's tokens are its own."""
    if first_segment is None or checkpoint_offsets is None:
        low: gl.constexpr = 0
        high = chunks
    else:
        low, high = part_of_piece(before, gl.where(until > 0, until, passed + chunks), passed, chunks)
    return low, high


@gluon.jit
def locate_part(k, segments, share, first_segment, cu_seqlens, checkpoint_offsets, sizes, SLICES: gl.constexpr):
    """The program's part number `k`: value head, sequence, batch row, first and past-the-last token, first chunk slot, number
    of pieces; the item's chunks before it, and the number of those up to its end if it ends before the item, else 0; if any
    sequence is split, the number of its segment times value heads plus its head."""
    if first_segment is None:
        head, n, batch, begin, end, slot, pieces, first, stop = locate_share(
            k, share, cu_seqlens, checkpoint_offsets, sizes, SLICES
        )
        run: gl.constexpr = 0
    else:
        _, N, _, _, _ = sizes
        if segments > N:
            head, n, batch, begin, end, slot, pieces, first, stop, run, _ = locate_segment(
                item_of(k, SLICES), 0, first_segment, cu_seqlens, checkpoint_offsets, sizes
            )
        else:
            head, n, batch, begin, end, slot, pieces, first, stop = locate_share(
                k, share, cu_seqlens, checkpoint_offsets, sizes, SLICES
            )
            run = n * 0
            first += k * 0
            stop += k * 0
    # 32 bits do, and take half the registers; offsets of checkpoints have 64
    integer: gl.constexpr = gl.int32 if checkpoint_offsets is None else gl.int64
    begin, end, slot = begin.to(integer), end.to(integer), slot.to(integer)
    return head.to(gl.int32), n, batch.to(gl.int32), begin, end, slot, pieces, first, stop, run


@gluon.jit
def locate_share(k, share, cu_seqlens, checkpoint_offsets, sizes, SLICES: gl.constexpr):
    """`locate_part` without segments: an item is a value head of a sequence."""
    T, _, HV, slots, checkpoints = sizes
    if share is None:
        item = item_of(k, SLICES)
        first: gl.constexpr = 0
        stop: gl.constexpr = 0
    else:
        item0, chunk0, item1, chunk1 = share
        item, first, stop = part_of_share(k, item0, chunk0, item1, chunk1)
    _, head, n, batch, begin, end = locate_item(item, cu_seqlens, T, HV, 1)
    slot, pieces = chunk_place(cu_seqlens, checkpoint_offsets, checkpoints, n, begin, slots, C)
    if share is not None:
        if stop > 0:
            end = begin + stop * C
        begin += first * C
        slot += first
    return head, n, batch, begin, end, slot, pieces, first, stop
