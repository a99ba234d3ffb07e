"""Stream-K: equal ranges of the chunks of all tiles, by the wrap-around rule (McNaughton 1959).

The chunks of all tiles lie in a row, tile by tile; each tile has more steps than chunks, one for the change of tile and one for
each checkpoint. The row is cut into equal ranges, one for each group of CTAs that do a tile's slices. A cut may leave a tile in
two parts. The first part lies at the end of its range but is done first; the second lies at the start of the next range but is
done last: the state that it starts from is there long before. A CTA only waits for one before it, so the kernel ends whatever
runs at the same time. No range is shorter than the longest tile, so no tile has three parts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...shared.gluon.steps import add
from ...shared.segments import chunks_of
from ...shared.sequences import clamp_bounds, span_count
from .layouts import C

SHORT = gl.constexpr(2)
"""Chunks at a tile's start or end that are not cut off: passing the state on takes as long."""


@gluon.jit
def range_start(i, ranges, steps, longest):
    """The step that range `i` starts with."""
    even = i * (steps // ranges) + i * (steps % ranges) // ranges
    return min(max(even, i * longest), steps)


@gluon.jit
def cut_at(step, tile_steps, overhead):
    """Cuts tiles of `tile_steps` steps each, `overhead` of them no chunks: the tile that the cut before `step` goes through,
    and how many of its chunks lie before the cut; if that is 0, the cut is at the tile's start."""
    tile = step // tile_steps
    chunk = step % tile_steps
    rest = tile_steps - overhead - chunk
    return tile + ((chunk > SHORT) & (rest <= SHORT)), chunk * ((chunk > SHORT) & (rest > SHORT))


@gluon.jit
def range_tiles(tile0, chunk0, tile1, chunk1):
    """Work tiles of the range from chunk `chunk0` of `tile0` to before chunk `chunk1` of `tile1`."""
    return tile1 - tile0 + (chunk1 > 0)


@gluon.jit
def range_tile(k, tile0, chunk0, tile1, chunk1):
    """The work tile that is done as number `k` of the range: tile, first chunk, past-the-last chunk, 0 at the tile's end."""
    tile = tile0 + k + (chunk0 > 0) - (chunk1 > 0)
    first = chunk0 * (k + 1 == range_tiles(tile0, chunk0, tile1, chunk1))
    stop = chunk1 * (k == 0)
    tile = tile0 if first > 0 else tile
    tile = tile1 if stop > 0 else tile
    return tile, first, stop


@gluon.jit
def sequence_steps(cu_seqlens, checkpoint_offsets, overhead, base, N, T, C):
    """Steps of a tile of each of the 128 sequences from `base` on, `overhead` of them no chunks; 0 past the last. Each warp has
    them all."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    n = base + lane
    if checkpoint_offsets is None:
        begin, end = clamp_bounds(
            gl.load(cu_seqlens + n, mask=n < N, other=0), gl.load(cu_seqlens + n + 1, mask=n < N, other=0), T, gl.int64
        )
        chunks = (end - begin + C - 1) // C
    else:
        chunks = chunks_of(n, cu_seqlens, checkpoint_offsets, overhead, N, T, C).to(gl.int64)
    return gl.where(n < N, chunks + overhead, 0)


@gluon.jit
def tiles_before(step, stop, tile_steps, overhead, HV):
    """Counts a sequence's tiles before the cut that precedes `step`, and the next tile's chunks before it. The sequence's tiles
    have `tile_steps` steps each, the last of which is before step `stop * HV`."""
    start = (stop - tile_steps) * HV
    tile, chunk = cut_at((step - start).to(gl.int32), gl.maximum(tile_steps, 1).to(gl.int32), overhead)
    inside = (start <= step) & (step < stop * HV)
    return gl.where(inside, tile, gl.where((tile_steps > 0) & (step >= start), HV, 0)), gl.where(inside, chunk, 0)


@gluon.jit
def tile_range(i, ranges, cu_seqlens, checkpoint_offsets, checkpoints, N, T, HV, C):
    """Range `i`: its first tile, the number of its chunks that belong to the range before, and the same of the next range."""
    # as many as checkpoint spans: a change of tile and each checkpoint take about as long as a chunk
    overhead = span_count(checkpoint_offsets, checkpoints)
    if cu_seqlens is None and checkpoint_offsets is None:
        tile_steps = (T + C - 1) // C + overhead
        steps = (N * HV).to(gl.int64) * tile_steps
        tile0, chunk0 = cut_at(range_start(i, ranges, steps, tile_steps).to(gl.int32), tile_steps, overhead)
        tile1, chunk1 = cut_at(range_start(i + 1, ranges, steps, tile_steps).to(gl.int32), tile_steps, overhead)
    else:
        total = sequence_steps(cu_seqlens, checkpoint_offsets, overhead, 0, N, T, C)
        most = total
        for base in range(128, N, 128):
            tile_steps = sequence_steps(cu_seqlens, checkpoint_offsets, overhead, base, N, T, C)
            total += tile_steps
            most = gl.maximum(most, tile_steps)
        steps = gl.sum(total) * HV
        longest = gl.max(most, axis=0)
        step0 = range_start(i, ranges, steps, longest)
        step1 = range_start(i + 1, ranges, steps, longest)
        tile0 = (total * 0).to(gl.int32)
        tile1 = tile0
        chunk0 = tile0
        chunk1 = tile0
        before = steps * 0
        for base in range(0, N, 128):
            tile_steps = sequence_steps(cu_seqlens, checkpoint_offsets, overhead, base, N, T, C)
            stop = before + gl.associative_scan(tile_steps, 0, add)
            before += gl.sum(tile_steps)
            tile, chunk = tiles_before(step0, stop, tile_steps, overhead, HV)
            tile0 += tile
            chunk0 += chunk
            tile, chunk = tiles_before(step1, stop, tile_steps, overhead, HV)
            tile1 += tile
            chunk1 += chunk
        # of 32 bits: the machine's sum over a warp, whose result the compiler knows to be the same for all of it
        tile0 = gl.sum(tile0)
        chunk0 = gl.sum(chunk0)
        tile1 = gl.sum(tile1)
        chunk1 = gl.sum(chunk1)
    return tile0, chunk0, tile1, chunk1


@gluon.jit
def stream_k_range(cu_seqlens, checkpoint_offsets, checkpoints, N, T, HV, SLICES):
    """The CTA's `tile_range`: equal ranges for the groups of CTAs that do a tile's slices."""
    i, ranges = gl.program_id(0) // SLICES, gl.num_programs(0) // SLICES
    return tile_range(i, ranges, cu_seqlens, checkpoint_offsets, checkpoints, N, T, HV, C)
