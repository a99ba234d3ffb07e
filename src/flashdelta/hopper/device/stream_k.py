"""How `recurrence` shares out its chunks evenly: the wrap-around rule (McNaughton 1959).

All chunks of all items lie in a row, item by item, an item with one step more than it has chunks, for what a change of item
takes. The row is cut into equal shares. An item that a cut goes through is done in two parts. Its first part lies at the end
of a share but is done at the start, and its second lies at the start of the next share but is done at the end: the state that
the second part needs is there long before. Waits go to the share before only, so everything ends whatever runs beside what.

No share is shorter than the longest item, lest an item have three parts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...triton.device import sequences

SHORT = gl.constexpr(2)
"""Chunks at an item's start or end that a cut leaves with the rest of it: handing the state over takes as long."""

clamp_bounds = gluon.jit(sequences.clamp_bounds.fn)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def cut_step(share, shares, steps, longest):
    """The step that share `share` starts with."""
    even = share * (steps // shares) + share * (steps % shares) // shares
    return min(max(even, share * longest), steps)


@gluon.jit
def cut_place(step, weight):
    """Among items of `weight` steps each: the item that the cut before step `step` goes through and how many of its chunks lie
    before it; if that is 0, the cut is at the item's start."""
    item = step // weight
    chunk = step % weight
    rest = weight - 1 - chunk
    return item + ((chunk > SHORT) & (rest <= SHORT)), chunk * ((chunk > SHORT) & (rest > SHORT))


@gluon.jit
def part_count(item0, chunk0, item1, chunk1):
    """Parts of items, whole ones among them, in the share from chunk `chunk0` of item `item0` to before chunk `chunk1` of
    `item1`."""
    return item1 - item0 + (chunk1 > 0)


@gluon.jit
def part_of_share(k, item0, chunk0, item1, chunk1):
    """The share's part that is done as number `k`: item, first chunk, past-the-last chunk, 0 if that is the item's end."""
    item = item0 + k + (chunk0 > 0) - (chunk1 > 0)
    first = chunk0 * (k + 1 == part_count(item0, chunk0, item1, chunk1))
    stop = chunk1 * (k == 0)
    item = item0 if first > 0 else item
    item = item1 if stop > 0 else item
    return item, first, stop


@gluon.jit
def weights(cu_seqlens, base, N, T, C: gl.constexpr):
    """Steps of an item of each of the 128 sequences from `base` on, 0 past the last. Each warp has them all."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    n = base + lane
    begin, end = clamp_bounds(
        gl.load(cu_seqlens + n, mask=n < N, other=0), gl.load(cu_seqlens + n + 1, mask=n < N, other=0), T, gl.int64
    )
    return gl.where(n < N, (end - begin + C - 1) // C + 1, 0)


@gluon.jit
def items_before(step, stop, weight, HV):
    """How many of a sequence's items lie before the cut before `step`, and chunks of the next one. The sequence's items have
    `weight` steps each, the last of which is before step `stop * HV`."""
    start = (stop - weight) * HV
    item, chunk = cut_place((step - start).to(gl.int32), gl.maximum(weight, 1).to(gl.int32))
    inside = (start <= step) & (step < stop * HV)
    return gl.where(inside, item, gl.where((weight > 0) & (step >= start), HV, 0)), gl.where(inside, chunk, 0)


@gluon.jit
def own_share(share, shares, cu_seqlens, N, T, HV, C: gl.constexpr):
    """The share's first item, the number of its chunks that belong to the share before, and the same of the next share."""
    if cu_seqlens is None:
        weight = (T + C - 1) // C + 1
        steps = (N * HV).to(gl.int64) * weight
        item0, chunk0 = cut_place(cut_step(share, shares, steps, weight).to(gl.int32), weight)
        item1, chunk1 = cut_place(cut_step(share + 1, shares, steps, weight).to(gl.int32), weight)
    else:
        total = weights(cu_seqlens, 0, N, T, C)
        most = total
        for base in range(128, N, 128):
            weight = weights(cu_seqlens, base, N, T, C)
            total += weight
            most = gl.maximum(most, weight)
        steps = gl.sum(total) * HV
        longest = gl.max(most, axis=0)
        step0 = cut_step(share, shares, steps, longest)
        step1 = cut_step(share + 1, shares, steps, longest)
        item0 = (total * 0).to(gl.int32)
        item1 = item0
        chunk0 = item0
        chunk1 = item0
        before = steps * 0
        for base in range(0, N, 128):
            weight = weights(cu_seqlens, base, N, T, C)
            stop = before + gl.associative_scan(weight, 0, add)
            before += gl.sum(weight)
            item, chunk = items_before(step0, stop, weight, HV)
            item0 += item
            chunk0 += chunk
            item, chunk = items_before(step1, stop, weight, HV)
            item1 += item
            chunk1 += chunk
        # of 32 bits: the machine's sum over a warp, whose result the compiler knows to be the same for all of it
        item0 = gl.sum(item0)
        chunk0 = gl.sum(chunk0)
        item1 = gl.sum(item1)
        chunk1 = gl.sum(chunk1)
    return item0, chunk0, item1, chunk1
