"""Stage `output`: what a chunk's queries read, once the states before all chunks are known. One program per (chunk, value
head, slice of value channels).

Contract (docs/algorithm.md), from `prepare`'s tiles, the state `S` before the chunk and the pseudo-values `v'`:

    o = qg S + Aqk v'                  [C, V]

`recurrence` does this on its way where it is not told to leave it out. In float32 only one chunk's tiles would fit into shared
memory, and the serial chain waits for them; without this half of the work, two do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device.mma import dot
from .device.sequences import own_chunk


@triton.jit(do_not_specialize=["T", "N", "HV", "slots"])
def output_kernel(
    qg,
    Aqk,
    h,
    o,
    T,
    N,
    HV,
    slots,
    o_batch: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`h [S, HV, V, K]`; `o` holds the pseudo-values until here."""
    SLICES: tl.constexpr = V // BV
    head, slot, batch, start, count = own_chunk(tl.program_id(0) // SLICES, None, None, 0, slots, N, T, HV, C)
    chunk = slot * HV + head
    row = tl.arange(0, C)
    value = tl.program_id(0) % SLICES * BV + tl.arange(0, BV)
    valid = (row < count)[None, :]
    # transposed, as in `recurrence`: then right operands lie by rows, without which Triton 3.6 gets wgmma wrong in TF32
    o += batch * o_batch + head * o_head + (start + row)[None, :] * o_token + value[:, None]
    pseudo = tl.load(o, mask=valid, other=0.0)
    tile_Aqk = tl.load(Aqk + chunk * C * C + row[:, None] * C + row[None, :])
    found = dot(pseudo, tl.trans(tile_Aqk), tl.zeros([BV, C], tl.float32), PRECISION)
    for s in tl.range(0, K, BK, num_stages=STAGES):
        key = s + tl.arange(0, BK)
        state = tl.load(h + chunk * V * K + value[:, None] * K + key[None, :])
        tile_qg = tl.load(qg + chunk * C * K + row[:, None] * K + key[None, :])
        found = dot(state, tl.trans(tile_qg), found, PRECISION)
    tl.store(o, found, mask=valid)
