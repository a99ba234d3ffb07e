"""Stage `output` (FLA: `chunk_gla_fwd_o_gk`): what a chunk's queries read, once the states before all chunks are known. One CTA
per (chunk, value head, slice of `BV` value channels).

Contract (docs/algorithm.md), from `prepare`'s tiles, the state `S` before the chunk and `v_new`:

    o = qg S + Aqk v_new                    [C, V]

`recurrence` does this as it scans, unless told to leave it out. In float32 only one chunk's tiles would fit in shared memory,
and the serial chain waits for them; without this half of the work, two do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...problem.problem import ChunkProblem
from ...program.launch import Launch
from ..shared.mma import dot
from ..shared.scalars import SCALARS
from ..shared.sequences import own_chunk
from ..stages.launch import Config, StageCall, launch, precision


@triton.jit(do_not_specialize=SCALARS)
def output_kernel(
    qg, Aqk, h, o, T, N, HV, chunk_slots, o_batch: tl.int64, o_token: tl.int64, o_head: tl.int64,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`o = qg S + Aqk v_new`, with the states `h [S, HV, V, K]` in fp32. `o` holds `v_new` until it is overwritten."""
    SLICES: tl.constexpr = V // BV
    head, slot, batch, start, count = own_chunk(tl.program_id(0) // SLICES, None, None, 0, chunk_slots, N, T, HV, C)
    chunk = slot * HV + head
    row = tl.arange(0, C)
    value = tl.program_id(0) % SLICES * BV + tl.arange(0, BV)
    valid = (row < count)[None, :]
    # transposed, as in `recurrence`: then right operands lie by rows. Triton 3.6 gets others wrong in wgmma of TF32.
    o += batch * o_batch + head * o_head + (start + row)[None, :] * o_token + value[:, None]
    tile_v_new = tl.load(o, mask=valid, other=0.0)
    tile_Aqk = tl.load(Aqk + chunk * C * C + row[:, None] * C + row[None, :])
    tile_o = dot(tile_v_new, tl.trans(tile_Aqk), tl.zeros([BV, C], tl.float32), PRECISION)
    for s in tl.range(0, K, BK, num_stages=STAGES):
        key = s + tl.arange(0, BK)
        state = tl.load(h + chunk * V * K + value[:, None] * K + key[None, :])
        tile_qg = tl.load(qg + chunk * C * K + row[:, None] * K + key[None, :])
        tile_o = dot(state, tl.trans(tile_qg), tile_o, PRECISION)
    tl.store(o, tile_o, mask=valid)


def output_config(problem: ChunkProblem, capability: int) -> Config:
    """Takes 64 value channels on Hopper, in 131 us; 157 with 32, whose products are not wgmma's."""
    if capability == 90:
        return Config(BK=32, BV=min(64, problem.V), num_warps=4, STAGES=2)
    return Config(BK=32, BV=32, num_warps=2, STAGES=2)


def output(call: StageCall, o: Tensor) -> Launch:
    """`o` holds `v_new`."""
    problem = call.problem
    c = output_config(problem, call.arch)
    own = dict(call.left("qg", "Aqk", "h"), o=o, PRECISION=precision(problem))
    ctas = problem.B * problem.slots * problem.HV * (problem.V // c.BV)
    return launch(output_kernel, ctas, problem, call.t, own, c)
