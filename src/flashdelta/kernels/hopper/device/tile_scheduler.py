"""Chooses the work tile that a CTA does next. No other file turns the CTA's number into work.

Scans (`recurrence`, segment transitions, `reverse`): a tile is all chunks of a (sequence, value head). Its `SLICES` slices of
64 channels belong to neighbouring CTAs, which do the same tiles. A persistent CTA does every n-th tile; or, with stream-K, a
range of chunks; or, if sequences are split, every n-th segment. A work tile is what a CTA has of one tile.

Kernels over chunks (`prepare`, `wy`, `intra`): a tile is a (chunk slot, value head).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import base_value

from ...shared.gluon.compat import aggregate
from ...shared.gluon.math import reciprocal
from ...shared.segments import chunks_of, outgoing_sequence, part_of_span, place_segment, segment_of
from ...shared.sequences import (
    chunk_of_sequence,
    clamp_bounds,
    first_chunk_slot,
    locate_work_tile,
    sequence_chunk_slots,
    span_count,
    span_extent,
)
from .layouts import BV, C
from .stream_k import range_tile, range_tiles

# ---- scans ---------------------------------------------------------------------------------------------------------------


@aggregate
class WorkTile:
    """Chunks `[first, stop)` of a sequence and value head; `stop` is 0 at the sequence's end. `begin`, `end`: tokens, of the
    work tile, but with checkpoints of the whole sequence, each of whose spans has a grid of chunks of its own; `slot`: the
    chunk slot at `begin`; `num_spans`: checkpoint spans of the sequence. `is_segment`: it is a segment of a split sequence;
    `segment`: the segment's number times value heads plus the head. `restarts`: 1 if it begins from zeros with the chunk before
    `first`, which forgets, else 0. `carry_in`: by stream-K the state before it comes from the CTA before; `carry_out`: that
    after it goes to the next."""

    head: base_value
    n: base_value
    batch: base_value
    begin: base_value
    end: base_value
    slot: base_value
    num_spans: base_value
    first: base_value
    stop: base_value
    is_segment: base_value
    segment: base_value
    restarts: base_value
    carry_in: base_value
    carry_out: base_value


@aggregate
class TileScheduler:
    """Work tiles of a scan, the same for the loader and the warps that compute:

        tiles, segments = scheduler.count()
        for k in range(tiles):
            tile = scheduler.tile(k, segments)

    `tile_range`: of `stream_k_range`, or None; `first_segment [N + 1]`: of `plan_segments`, None if no sequence may be split.
    `forgets`: which chunks do, of `prepare`, or None. A sequence that may not be split then has up to `parts` parts: where the
    chunk before one forgets, a work tile begins.
    """

    tile_range: base_value
    first_segment: base_value
    cu_seqlens: base_value
    checkpoint_offsets: base_value
    T: base_value
    N: base_value
    HV: base_value
    slots: base_value
    checkpoints: base_value
    SLICES: gl.constexpr
    forgets: base_value
    parts: base_value

    @gluon.jit
    def slice(self):
        """The CTA's slice of channels, of all its work tiles."""
        return gl.program_id(0) % self.SLICES

    @gluon.jit
    def count(self):
        """Counts the CTA's work tiles, and the segments of all sequences: more than there are sequences if any is split."""
        if self.tile_range is None:
            tiles = persistent_count(self.N * self.HV * self.parts, self.SLICES)
        else:
            tile0, chunk0, tile1, chunk1 = self.tile_range
            tiles = range_tiles(tile0, chunk0, tile1, chunk1)
        if self.first_segment is None:
            segments: gl.constexpr = 0
        else:
            segments = gl.load(self.first_segment + self.N)
            if segments > self.N:
                tiles = persistent_count(segments * self.HV, self.SLICES)
        return tiles, segments

    @gluon.jit
    def tile(self, k, segments):
        """The CTA's work tile number `k`."""
        if self.first_segment is None:
            head, n, batch, begin, end, slot, num_spans, first, stop, restarts = self._of_sequence(k)
            segment: gl.constexpr = 0
        else:
            if segments > self.N:
                head, n, batch, begin, end, slot, num_spans, first, stop, segment, _, restarts, _ = self._of_segment(
                    k, 0
                )
            else:
                head, n, batch, begin, end, slot, num_spans, first, stop, restarts = self._of_sequence(k)
                segment = n * 0
                # tensors, if they are constants: both branches must have the same types
                first += k * 0
                stop += k * 0
                if self.forgets is not None:
                    restarts += k * 0
        if self.first_segment is None:
            is_segment: gl.constexpr = False
        else:
            is_segment = (segments > self.N) & ((first > 0) | (stop > 0))
        if self.tile_range is None:
            carry_in: gl.constexpr = False
            carry_out: gl.constexpr = False
        else:
            carry_in = first > 0
            carry_out = stop > 0
            if self.first_segment is not None:
                carry_in &= segments == self.N
                carry_out &= segments == self.N
        # 32 bits do, and take half the registers
        begin, end, slot = begin.to(gl.int32), end.to(gl.int32), slot.to(gl.int32)
        return WorkTile(
            *(head.to(gl.int32), n, batch.to(gl.int32), begin, end, slot, num_spans, first, stop),
            *(is_segment, segment, restarts, carry_in, carry_out),
        )

    @gluon.jit
    def row(self, tile):
        """The sequence as row of the checkpoints. 32 bits for segments: else the high half of a row's length takes a register
        from all of the kernel."""
        return tile.n if self.first_segment is None else tile.n.to(gl.int32)

    @gluon.jit
    def span(self, tile, i, start, slot):
        """Extent of the sequence's checkpoint span `i`, from token `start` and chunk slot `slot` on: past-the-last token,
        chunks, and which of these `[low, high)` belong to the work tile."""
        row = self.row(tile)
        end, chunks = span_extent(self.checkpoint_offsets, row, i, tile.num_spans, start, tile.begin, tile.end, C)
        if self.checkpoint_offsets is None or (self.first_segment is None and self.tile_range is None):
            low: gl.constexpr = 0
            high = chunks
        else:
            passed = slot - tile.slot
            stop = gl.where(tile.stop > 0, tile.stop, passed + chunks)
            low, high = part_of_span(tile.first, stop, passed, chunks)
        return end, chunks, low, high

    @gluon.jit
    def span_stop(self, tile, i, start):
        """The past-the-last token of the sequence's checkpoint span `i`, from token `start` on."""
        row = self.row(tile)
        return span_extent(self.checkpoint_offsets, row, i, tile.num_spans, start, tile.begin, tile.end, C)[0]

    @gluon.jit
    def chunks(self, tile):
        """Counts the work tile's chunks."""
        slot = tile.slot
        total = 0
        start = tile.begin
        for i in range(0, tile.num_spans):
            start, chunks, low, high = self.span(tile, i, start, slot)
            total += high - low
            slot += chunks
        return total

    @gluon.jit
    def transition_count(self):
        """Counts the CTA's segment transitions. CTAs past the last group of slices have none."""
        inside = gl.program_id(0) < gl.num_programs(0) // self.SLICES * self.SLICES
        segments = gl.load(self.first_segment + self.N) - self.N
        return gl.where(inside, persistent_count(segments * self.HV, self.SLICES), 0)

    @gluon.jit
    def transition(self, k, K):
        """The segment of the CTA's transition number `k`, its place in the sequence, and how many of its chunks count: M of a
        sequence's first segment is not needed, as the state before it is known. Nor is that of a segment that restarts,
        nor anything of one before such a segment."""
        head, n, batch, begin, end, slot, num_spans, first, stop, segment, place, restarts, follows = self._of_segment(
            k, 1
        )
        in_M = gl.program_id(0) % self.SLICES * BV < K
        chunks = gl.where(((place == 0) | (restarts != 0)) & in_M, 0, stop - first + restarts)
        if self.forgets is not None:
            chunks = gl.where(follows != 0, 0, chunks)
        tile = WorkTile(
            *(head.to(gl.int32), n, batch.to(gl.int32), begin, end, slot, num_spans, first, stop),
            *(True, segment, restarts, False, False),
        )
        return tile, place, chunks

    @gluon.jit
    def outgoing_slices(self, border, K):
        """Counts the slices of a transition for the next rank. A sequence that starts on this rank has those of b alone, so
        that all CTAs form these."""
        place = outgoing_sequence(border, 0)[1]
        return gl.where(place == 0, self.SLICES - K // BV, self.SLICES)

    @gluon.jit
    def outgoing_slice(self, border, K):
        """`slice` of a transition for the next rank."""
        slices = self.outgoing_slices(border, K)
        return self.SLICES - slices + gl.program_id(0) % slices

    @gluon.jit
    def outgoing_count(self, border, K):
        """Counts the CTA's transitions for the next rank: of one packed sequence, or of all batch rows."""
        packets = 1 if self.cu_seqlens is not None else self.N
        slices = self.outgoing_slices(border, K)
        inside = gl.program_id(0) < gl.num_programs(0) // slices * slices
        return gl.where(inside, persistent_count(packets * self.HV, slices), 0)

    @gluon.jit
    def outgoing(self, k, border, K):
        """`transition` of the CTA's packet number `k` for the next rank: of the whole sequence, whose place is 0 if it starts
        on this rank."""
        at = persistent_tile(k, self.outgoing_slices(border, K))
        n, place, goes_on = outgoing_sequence(border, at // self.HV)
        n = gl.maximum(n, 0)
        batch, begin, end, slot, num_spans, first, stop = place_segment(
            n, 0, 1, self.cu_seqlens, self.checkpoint_offsets, self.checkpoints, self.slots, self.T, C
        )
        chunks = gl.where(goes_on, stop - first, 0)
        tile = WorkTile(
            *((at % self.HV).to(gl.int32), n, batch.to(gl.int32), begin, end, slot, num_spans, first, stop),
            *(True, at.to(gl.int64), 0, False, False),
        )
        return tile, place, chunks

    @gluon.jit
    def _forgets(self, slot, head, within):
        """1 if the chunk before the one in chunk slot `slot` forgets all before it, else 0; 0 outside."""
        return gl.load(self.forgets + ((slot - 1) * self.HV + head), mask=within, other=0)

    @gluon.jit
    def _part(self, place, chunks, slot, head):
        """Chunks `[first, stop)` of part `place` of a sequence that begins in chunk slot `slot`, with the parts after it that
        do not restart, none if it does not itself; `stop` is 0 at the sequence's end. Each warp asks for all parts."""
        length = part_length(chunks, self.parts)
        part = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        forgotten = self._forgets(slot + part * length, head, (part > 0) & (part * length < chunks))
        restarts = gl.max(gl.where(part == place, forgotten, 0), axis=0)
        until = gl.min(gl.where((part > place) & (forgotten != 0), part, 32), axis=0)
        first = place * length
        stop = gl.where(until < 32, until * length, 0)
        return first, gl.where((place == 0) | (restarts != 0), stop, first), restarts

    @gluon.jit
    def _of_sequence(self, k):
        restarts: gl.constexpr = 0
        PARTS: gl.constexpr = self.forgets is not None and self.first_segment is None
        if self.tile_range is None:
            tile = persistent_tile(k, self.SLICES)
            if PARTS:
                place = tile % self.parts
                tile //= self.parts
            first: gl.constexpr = 0
            stop: gl.constexpr = 0
        else:
            tile0, chunk0, tile1, chunk1 = self.tile_range
            tile, first, stop = range_tile(k, tile0, chunk0, tile1, chunk1)
        _, head, n, batch, begin, end = locate_work_tile(tile, self.cu_seqlens, self.T, self.HV, 1)
        slot, spans = sequence_chunk_slots(
            self.cu_seqlens, self.checkpoint_offsets, self.checkpoints, n, begin, self.slots, C
        )
        if PARTS:
            first, stop, restarts = self._part(place, ((end - begin + C - 1) // C).to(gl.int32), slot, head)
        if PARTS or (self.tile_range is not None and self.checkpoint_offsets is None):
            if stop > 0:
                end = begin + stop * C
            begin += (first - restarts) * C
            slot += first - restarts
        return head, n, batch, begin, end, slot, spans, first, stop, restarts

    @gluon.jit
    def _of_segment(self, k, skipped):
        """The last `skipped` segments of each sequence are not among the tiles."""
        tile = persistent_tile(k, self.SLICES)
        n, place, places, _ = segment_of(tile // self.HV, self.first_segment, self.N, skipped)
        batch, begin, end, slot, num_spans, first, stop = place_segment(
            n, place, places, self.cu_seqlens, self.checkpoint_offsets, self.checkpoints, self.slots, self.T, C
        )
        last = place + 1 == places
        head = (tile % self.HV).to(gl.int64)
        restarts: gl.constexpr = 0
        follows: gl.constexpr = 0
        if self.forgets is not None:
            restarts = self._forgets(slot + first, head, place > 0)
            # of the segment after it: neither load waits for the other
            follows = self._forgets(slot + stop, head, ~last)
        if self.checkpoint_offsets is None:
            end = gl.where(last, end, begin + stop * C)
            begin += (first - restarts) * C
            slot += first - restarts
        stop = gl.where(last, 0, stop)
        segment = tile + n * (skipped * self.HV)
        return head, n, batch, begin, end, slot, num_spans, first, stop, segment, place, restarts, follows


@gluon.jit
def persistent_count(tiles, slices):
    """Counts the tiles of a CTA that does every n-th."""
    group = gl.program_id(0) // slices
    groups = gl.num_programs(0) // slices
    return (tiles - group + groups - 1) // groups


@gluon.jit
def persistent_tile(k, slices):
    return gl.program_id(0) // slices + k * (gl.num_programs(0) // slices)


@gluon.jit
def rows_before(cu_seqlens, n, T, tokens, nothing=None):
    """Returns the first row of sequence `n` where each sequence takes `ceil(length / tokens)` rows, such as chunks, without
    gaps. `nothing`: a 0 that the compiler can't see, lest it keep the lanes' addresses over a loop around this."""
    if cu_seqlens is None:
        total = n * ((T + tokens - 1) // tokens)
    else:
        total = n * 0
        lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        if nothing is not None:
            lane |= nothing
        for base in range(0, n, 128):
            m = base + lane
            begin = gl.load(cu_seqlens + m, mask=m < n, other=0)
            end = gl.load(cu_seqlens + m + 1, mask=m < n, other=0)
            begin, end = clamp_bounds(begin, end, T, gl.int32)
            total += gl.sum((end - begin + tokens - 1) // tokens)
    return total


@gluon.jit
def span_chunks_before(s, tile):
    """`rows_before` for the chunks of sequences that checkpoints cut, of the scheduler `s`."""
    total = tile.n * 0
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for base in range(0, tile.n, 128):
        m = base + lane
        chunks = chunks_of(m, s.cu_seqlens, s.checkpoint_offsets, tile.num_spans, s.N, s.T, C)
        total += gl.sum(gl.where(m < tile.n, chunks, 0))
    return total


# ---- kernels over chunks -------------------------------------------------------------------------------------------------


@aggregate
class ChunkTile:
    """A chunk of a value head: its place among all chunks, batch row, first token, token count (0 or less: no chunk)."""

    head: base_value
    chunk: base_value
    batch: base_value
    start: base_value
    count: base_value


@gluon.jit
def find_sequence(cu_seqlens, checkpoint_offsets, checkpoints, slot, N, T):
    """The last sequence whose first chunk slot is not past `slot`, and its bounds. Every warp asks for 128 at once: two
    dependent loads for any N that occurs, one up to 128, where a binary search has one for each bit of N."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    spans = span_count(checkpoint_offsets, checkpoints)
    low = 0
    high = N - 1
    begin = 0
    end = 0
    step = 2
    while step > 1:
        step = (high - low) // 128 + 1
        n = low + lane * step
        inside = n <= high
        begins, ends = clamp_bounds(
            gl.load(cu_seqlens + n, mask=inside, other=0),
            gl.load(cu_seqlens + n + 1, mask=inside, other=0),
            T,
            gl.int32,
        )
        passed = inside & (first_chunk_slot(begins, n, spans, C) <= slot)
        last = gl.maximum(gl.sum(passed.to(gl.int32)) - 1, 0)
        begin = gl.sum(gl.where(lane == last, begins, 0))
        end = gl.sum(gl.where(lane == last, ends, 0))
        low += last * step
        high = gl.minimum(high, low + step - 1)
    return low, begin, end


@gluon.jit
def last_chunks_first(HV, BY_HEAD):
    """Value head and chunk slot of the CTA, and the tile's place among all. `recurrence` starts with the first chunks, which
    are then still in the L2 cache. `BY_HEAD`: the grid has heads as its second dimension."""
    if BY_HEAD:
        slot = gl.num_programs(0) - 1 - gl.program_id(0)
        head = gl.program_id(1)
        tile = slot * HV + head
    else:
        tile = gl.num_programs(0) - 1 - gl.program_id(0)
        head = tile % HV
        slot = tile // HV
    return head, slot, tile


@gluon.jit
def chunk_in_slot(cu_seqlens, checkpoint_offsets, checkpoints, slot, slots, N, T, SELECT=False):
    """Batch row, first token and token count of a chunk slot; 0 or less if it has no chunk; the first token of its sequence.
    `SELECT`: of sequences of one length the slots before the row's are taken off by a select, without which ptxas of Triton 3.6
    serialises the MMAs of `prepare` with unbounded gates."""
    before = slots
    if cu_seqlens is None:
        bounds: gl.constexpr = None
        begin: gl.constexpr = 0
        n = 0
        if slot >= slots:  # a division takes as long as dozens of other instructions
            n = slot // slots
        if SELECT:
            slot -= gl.where(n > 0, n * slots, 0)
            before = 0
    else:
        n, begin, end = find_sequence(cu_seqlens, checkpoint_offsets, checkpoints, slot, N, T)
        bounds = (begin, end)
    batch, start, count = chunk_of_sequence(
        cu_seqlens, checkpoint_offsets, checkpoints, n, slot, before, T, C, gl.int32, bounds
    )
    return batch, start, count, begin


@gluon.jit
def part_length(chunks, parts):
    """Chunks of a part, at least two, of a sequence that has so many and is not split."""
    return gl.maximum((chunks + parts - 1) // parts, 2)


@gluon.jit
def may_end_part(start, count, parts):
    """Says whether a work tile may begin after the chunk at token `start` of a sequence with `count` tokens from there on."""
    passed = start // C + 1
    length = part_length(passed + (count - 1) // C, parts)
    return (count > C) & (passed % length == 0)


@gluon.jit
def may_end_segment(start, count, room, shortest):
    """Says the same of segments, whose number is not known yet: whether any number that may be planned puts a border there. A
    lane tries two. Division by float32 is exact for up to 2^15 chunks; of more a border may be missed, which begins nothing."""
    passed = start // C + 1
    chunks = passed + (count - 1) // C
    parts = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [gl.num_warps()], [0])) + 2
    border = ((passed * parts + parts - 0.5) * reciprocal(chunks.to(gl.float32))).to(gl.int32)
    ends = (border * chunks >= passed * parts) & (parts * shortest <= chunks) & (parts <= 1 + room)
    return (count > C) & (gl.max(ends.to(gl.int32), axis=0) != 0)


@gluon.jit
def chunk_tile(tile, cu_seqlens, slots, N, T, HV):
    """The tile's chunk, by chunk slot, its sequence and the sequence's first token."""
    head = tile % HV
    slot = tile // HV
    if cu_seqlens is None:
        n = slot // slots
        begin = n * 0
        bounds: gl.constexpr = None
    else:
        n, begin, end = find_sequence(cu_seqlens, None, 0, slot, N, T)
        bounds = (begin, end)
    batch, start, count = chunk_of_sequence(cu_seqlens, None, 0, n, slot, slots, T, C, gl.int32, bounds)
    found = ChunkTile(head, slot, batch.to(gl.int32), start.to(gl.int32), gl.minimum(count, C).to(gl.int32))
    return found, n, begin


@gluon.jit
def first_tile():
    """The first tile of a CTA that has one, or every n-th."""
    return gl.program_id(0)


@gluon.jit
def next_tile(tile):
    return tile + gl.num_programs(0)


@gluon.jit
def dense_chunk_tile(tile, slots, T, HV):
    """Finds a tile as `chunk_tile` does, for sequences of one length: no slot is without a chunk."""
    slot = tile // HV
    start = slot % slots * C
    return ChunkTile(tile % HV, slot, slot // slots, start, gl.minimum(T - start, C))
