"""Stage `prepare` for Hopper: everything about a chunk that does not depend on the state. One CTA of 4 warps per (chunk, value
head).

Contract: as `triton/prepare.py`, for chunks of 64 tokens and bf16, except that `w` is stored negated and that the results lie
as `recurrence` loads them: for each (chunk, value head) `3 K/64 + 2` tiles of `[64, 64]`, namely `-w`, `qg` and `kg` by
halves of the key channels, `inverse = (I + A)^-1 diag(beta)`, `Aqk`. For the backward pass also `Akk_inv = (I + A)^-1`.

A chunk is two blocks of 32 rows, a block four sub-chunks of 8 rows. In the elementwise part a thread owns 2 channels of a
sub-chunk: sums along tokens stay in its registers, and every operand is the raw key or query times `exp(distance to a
reference row)`, which is `a` or `b = 1 / a` of the thread's own sub-chunk times a factor per channel.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import base_value
from triton.language.extra.cuda import gdc_launch_dependents

from ...problem.problem import ChunkProblem
from ...program.launch import Launch
from ..shared.gates import decay_rate
from ..shared.gluon import steps
from ..shared.gluon.compat import aggregate, copy_async, reinterpret
from ..shared.gluon.math import (
    LOWEST,
    LOWEST_HALF,
    beta_value,
    column_halves,
    exp2,
    exp2_negative,
    gate,
    gate_bias,
    gate_unit,
    high_pair,
    larger,
    last,
    low_pair,
    pick,
    round_pairs,
    split_high_low,
    wide,
    widen,
)
from ..shared.gluon.steps import ACC_HALF, FLAT, PLAIN, ROWS, TILE
from ..shared.scalars import SCALARS_AND_STRIDES
from ..stages.launch import StageCall, launch_div8
from .device.layouts import ACC, LEFT, beside, position, store_block, store_tile
from .device.tile_scheduler import chunk_in_slot, last_chunks_first, may_end_part, may_end_segment
from .device.wgmma import mma3
from .launch import FLAGS, overlaps_prepare, parts
from .segments import SPLIT_COSTS, plan_segments, room

# registers of four warps; a thread has all tokens that it sums over
BLOCK = gl.constexpr(gl.BlockedLayout([1, 8, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
"""A block, `[sub-chunk, row, channel]`: a warp has a sub-chunk, a lane all rows of 2 channels."""
COLUMNS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, BLOCK.value)))
TOTALS = gl.constexpr(gl.SliceLayout(1, BLOCK.value))
BLOCKS = gl.constexpr(gl.BlockedLayout([2, 1, 8, 2], [1, 1, 1, 32], [1, 4, 1, 1], [3, 2, 1, 0]))
"""Two blocks like that."""
SOLVE = gl.constexpr(gl.BlockedLayout([1, 2, 8, 2], [1, 1, 1, 32], [4, 1, 1, 1], [3, 2, 1, 0]))
"""`[16 rows, half of them, row, column]`: a warp has 16 rows, a lane all of them in 2 columns."""


FORGOTTEN = gl.constexpr(2.0**-60)
"""A chunk forgets if the norm of its M is no larger: that is the error, as a part of the state before it."""


@aggregate
class Buffers:
    """Shared memory. Data stored or loaded without a barrier between lies in allocations of its own: the compiler puts a
    barrier between two accesses to one allocation if one of them writes. `h` is a half of the channels."""

    pair0: gl.shared_memory_descriptor
    pair1: gl.shared_memory_descriptor
    right0: gl.shared_memory_descriptor
    right1: gl.shared_memory_descriptor
    small: gl.shared_memory_descriptor
    from_start: gl.shared_memory_descriptor
    between: gl.shared_memory_descriptor
    norm0: gl.shared_memory_descriptor
    norm1: gl.shared_memory_descriptor
    beta: gl.shared_memory_descriptor
    unit: gl.shared_memory_descriptor
    bias: base_value
    largest: base_value
    KH: gl.constexpr

    @gluon.jit
    def pairs(self, block: gl.constexpr):
        """`[KH, 64, 64]`, left operands: keys and queries of a block. Block 0 is stacked as k, q and block 1 as q, k, so that
        rows 0..31 of the one product and rows 32..63 of the other are the rows of A where they belong."""
        return reinterpret(self.pair0 if block == 0 else self.pair1, gl.bfloat16, [self.KH, 64, 64], TILE)

    @gluon.jit
    def keys(self, block: gl.constexpr):
        """`[2 KH, 32, 64]`: the same, of which number `2 h + block` are keys."""
        return reinterpret(self.pair0 if block == 0 else self.pair1, gl.bfloat16, [2 * self.KH, 32, 64], TILE)

    @gluon.jit
    def rights(self, block: gl.constexpr):
        """`[2, 64, 64]`, right operands of the pairs, then of the inverse."""
        return reinterpret(self.right0 if block == 0 else self.right1, gl.bfloat16, [2, 64, 64], TILE)

    @gluon.jit
    def right_halves(self, block: gl.constexpr):
        """`[4, 32, 64]`: the same."""
        return reinterpret(self.right0 if block == 0 else self.right1, gl.bfloat16, [4, 32, 64], TILE)

    @gluon.jit
    def sums(self, block: gl.constexpr):
        """`[2, 32, 64]`: sums of log decays, where the right operands will be."""
        return reinterpret(self.right0 if block == 0 else self.right1, gl.float32, [2, 32, 64], PLAIN)

    @gluon.jit
    def totals(self):
        """`[8, 256]`: of the sub-chunks, number `2 h + block`."""
        return reinterpret(self.small, gl.float32, [8, 256], FLAT)

    @gluon.jit
    def store_keys(self, kg, x, h, block: gl.constexpr, flag_tile):
        """`store_block` of a block's half of kg; at a border the largest elements of its sub-chunks, to `largest [2 KH, 4]`."""
        store_block(kg, x)
        if flag_tile >= 0:
            sizes = gl.abs(x).to(gl.int32, bitcast=True)
            self.largest.index(2 * h + block).store(gl.max(gl.max(sizes, axis=1), axis=1).to(gl.float32, bitcast=True))

    @gluon.jit
    def both_totals(self, h):
        """`[2, 4, 64]`: of both blocks."""
        return reinterpret(self.small, gl.float32, [4, 512], FLAT).index(h).reshape([2, 4, 64])


@gluon.jit
def make_buffers(dt_bias, forgets, KH):
    pair0 = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    pair1 = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    right0 = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    right1 = gl.allocate_shared_memory(gl.bfloat16, [128, 64], TILE)
    # totals of the sub-chunks, then -A's diagonal blocks, then I + n
    small = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    # decays from the chunk's start to block 0's reference, negated, and on to block 1's
    from_start = gl.allocate_shared_memory(gl.float32, [KH, 64], FLAT)
    between = gl.allocate_shared_memory(gl.float32, [KH, 64], FLAT)
    norm0 = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    norm1 = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    beta = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    unit = gl.allocate_shared_memory(gl.float32, [2, 32], FLAT)
    if dt_bias is not None:
        bias = gl.allocate_shared_memory(gl.float32, [KH, 64], FLAT)
    else:
        bias: gl.constexpr = None  # type: ignore[no-redef]
    if forgets is not None:
        largest = gl.allocate_shared_memory(gl.float32, [2 * KH, 4], FLAT)
    else:
        largest: gl.constexpr = None  # type: ignore[no-redef]
    return Buffers(
        pair0, pair1, right0, right1, small, from_start, between, norm0, norm1, beta, unit, bias, largest, KH
    )


@gluon.jit
def copy_pair(shared, first, first_token, first_count, second, second_token, second_count):
    """Starts the copy of equally many rows of two tensors, all channels, to `shared [halves * rows, 64]`, where each half of
    the channels has the rows of the first, then those of the second. Zeros from the counts on."""
    row = gl.arange(0, shared.shape[0], layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    token = row % 32
    at_first = (row // 32) % 2 == 0
    at = gl.where(at_first, first + token * (first_token * 8), second + token * (second_token * 8))
    at = gl.multiple_of(at, 16)  # Triton 3.9 does not see it through the choice
    inside = token < gl.where(at_first, first_count, second_count)
    copy_async(shared, (at + row // 64 * 64)[:, None] + column[None, :], mask=inside[:, None])


@gluon.jit
def load_gate(buffers, h, dtype: gl.constexpr):
    """The gate's input for half `h` of the channels, block by block. It lies where this half's right operands will."""
    if dtype == gl.bfloat16:
        both = reinterpret(buffers.right1, dtype, [4, 32, 64], PLAIN)
        first = both.index(2 * h)
        second = both.index(2 * h + 1)
    else:
        first = reinterpret(buffers.right0, dtype, [2, 32, 64], PLAIN).index(h)
        second = reinterpret(buffers.right1, dtype, [2, 32, 64], PLAIN).index(h)
    return first.reshape([4, 8, 64]).load(BLOCK), second.reshape([4, 8, 64]).load(BLOCK)


@gluon.jit
def store_norms(buffers, scale, L2NORM):
    buffers.norm0.reshape([4, 16]).store(steps.pair_norm_factors(buffers.pairs(0), scale, True, L2NORM))
    buffers.norm1.reshape([4, 16]).store(steps.pair_norm_factors(buffers.pairs(1), scale, False, L2NORM))


@gluon.jit
def pair_factors(norm_s):
    """The factors `[4, 8, 1]` of the rows of a pair's blocks."""
    first, second = gl.split(norm_s.reshape([2, 4, 8]).load(gl.SliceLayout(3, BLOCKS)).permute((1, 2, 0)))
    first = gl.convert_layout(first, gl.SliceLayout(2, BLOCK), assert_trivial=True)[:, :, None]
    second = gl.convert_layout(second, gl.SliceLayout(2, BLOCK), assert_trivial=True)[:, :, None]
    return first, second


@gluon.jit
def decay_steps(x, bias, rate, unit_s, GATE, SAFE):
    """Log2 decays `[4, 8, 64]` of a block's rows."""
    unit = unit_s.reshape([4, 8]).load(gl.SliceLayout(2, BLOCK))[:, :, None]
    step = gate(widen(x), bias, rate, GATE) * unit
    if not SAFE:
        step = gl.where(step < LOWEST, LOWEST, step)  # a NaN stays one
    return step


@gluon.jit
def half_sums(buffers, h, rate, dtype: gl.constexpr, GATE, SAFE):
    """`running_sums` of both blocks for half `h` of the channels, and the sub-chunks' totals `[2, 4, 64]`."""
    bias = 0.0
    if buffers.bias is not None:
        bias = buffers.bias.index(h).load(COLUMNS)[None, None, :]
    g0, g1 = load_gate(buffers, h, dtype)
    c0, total0 = steps.running_sums(decay_steps(g0, bias, rate, buffers.unit.index(0), GATE, SAFE))
    c1, total1 = steps.running_sums(decay_steps(g1, bias, rate, buffers.unit.index(1), GATE, SAFE))
    return c0, c1, gl.join(total0, total1).permute((2, 0, 1))


@gluon.jit
def block_sums(total_s):
    """Sums the totals of a block's sub-chunks: of those before each `[4, 64]`; of the block's first half and of the whole block
    `[64]`."""
    peers_l: gl.constexpr = gl.BlockedLayout([1, 4, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    all_l: gl.constexpr = gl.SliceLayout(0, peers_l)
    peers = total_s.reshape([4, 64]).load(all_l)
    peer = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, peers_l)))
    mine = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, peers_l)))
    before = gl.sum(gl.where((peer[None, :] < mine[:, None])[:, :, None], peers[None, :, :], 0.0), axis=1)
    before = gl.convert_layout(before, TOTALS, assert_trivial=True)
    half = gl.arange(0, 4, layout=gl.SliceLayout(1, all_l)) < 2
    middle = gl.convert_layout(gl.sum(gl.where(half[:, None], peers, 0.0), axis=0), COLUMNS, assert_trivial=True)
    whole = gl.convert_layout(gl.sum(peers, axis=0), COLUMNS, assert_trivial=True)
    return before, middle, whole


@gluon.jit
def sub_chunk_middle(c):
    """Row 3 of `c [4, 8, 64]`: the sum up to the middle of each sub-chunk, `[4, 64]`."""
    low, _ = gl.split(c.reshape([4, 2, 4, 64]).permute((0, 2, 3, 1)))
    return gl.convert_layout(gl.reduce(low, 1, last), TOTALS, assert_trivial=True)


@gluon.jit
def load_pair(pair_s):
    """Both blocks of 32 rows of a tile, `[4, 8, 64]` each; no data moves between threads."""
    first, second = gl.split(pair_s.reshape([2, 4, 8, 64]).load(BLOCKS).permute((1, 2, 3, 0)))
    return gl.convert_layout(first, BLOCK, assert_trivial=True), gl.convert_layout(second, BLOCK, assert_trivial=True)


@gluon.jit
def store_pair(pair_s, first, second):
    """One store for both blocks of a tile: between two the compiler would put a barrier."""
    pair = gl.join(first.to(gl.bfloat16), second.to(gl.bfloat16)).permute((3, 0, 1, 2))
    pair_s.reshape([2, 4, 8, 64]).store(pair)


@gluon.jit
def store_parts(parts_s, x):
    """`x [64, 64]`, in any shape of four dimensions, as two bf16 tiles: the high and the low part."""
    high, low = split_high_low(x)
    shape: gl.constexpr = x.shape
    parts = gl.join(high, low)
    parts_s.reshape([2, shape[0], shape[1], shape[2], shape[3]]).store(parts.permute((4, 0, 1, 2, 3)))


@gluon.jit
def substitute(low, high, diagonal_s):
    """`X` with `(I + A) X = R` for the diagonal blocks of 16 rows of A, by forward substitution in fp32: a series would
    explode and cancel on repeated keys.

    `low, high [4, 8, 64]` are rows 0..7 and 8..15 of each block of R; a thread has all rows of 2 columns. `diagonal_s
    [32, 4, 8]`: half by half the columns of -A's blocks, each for all four.
    """
    left_l: gl.constexpr = gl.SliceLayout(2, low.type.layout)
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, left_l))[None, :, None]
    for c in gl.static_range(15):
        below = diagonal_s.index(2 * c + 1).load(left_l)[:, :, None]
        if c < 8:
            x = pick(low, c)[:, None, :]
            low = gl.where(row > c, low + diagonal_s.index(2 * c).load(left_l)[:, :, None] * x, low)
            high += below * x
        else:
            high = gl.where(row > c - 8, high + below * pick(high, c - 8)[:, None, :], high)
    return low, high


@gluon.jit
def weighted(high, low, k_s, acc, use_acc: gl.constexpr):
    """`acc` plus keys, weighted by weights in two parts."""
    acc = warpgroup_mma(high, k_s, acc, use_acc=use_acc, is_async=True)
    return warpgroup_mma(low, k_s, acc, is_async=True)


@gluon.jit
def block_inverses(minus_A, rhs_s, diagonal_s):
    """Inverts the diagonal blocks of 16 rows of `I + A`, for strictly lower `A [64, 64]`. Returns these inverses, D, on the
    diagonal and `-D A` below it, as `[4, 2, 8, 64]`. D and -A's other blocks are the right sides of one substitution."""
    layout: gl.constexpr = minus_A.type.layout
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    blocks = minus_A.reshape([4, 16, 4, 16])
    blocks_l: gl.constexpr = blocks.type.layout
    block_i = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, blocks_l))))
    block_j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, blocks_l))))
    same = block_i[:, None, None, None] == block_j[None, None, :, None]
    diagonal = gl.sum(gl.where(same, blocks, 0.0), axis=2)
    # column by column and half by half, each for all four blocks
    diagonal_s.reshape([16, 2, 4, 8]).permute((2, 1, 3, 0)).store(diagonal.reshape([4, 2, 8, 16]))
    rhs_s.store(gl.where(i // 16 == j // 16, gl.where(i == j, 1.0, 0.0), minus_A))
    X = rhs_s.reshape([4, 2, 8, 64]).load(SOLVE)
    low, high = gl.split(X.permute((0, 2, 3, 1)))
    lines_s = reinterpret(diagonal_s, gl.float32, [32, 4, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    low, high = substitute(low, high, lines_s)
    return gl.convert_layout(gl.join(low, high).permute((0, 3, 1, 2)), SOLVE, assert_trivial=True)


@gluon.jit
def store_inverse_parts(X, D_s, n_s, I_n_s):
    """Stores what `block_inverses` returns: D and n, each as its high and its low parts, and the high part of I + n. Parts are
    worked on in words of 2 columns."""
    x0, x1 = gl.split(X.reshape([4, 2, 8, 32, 2]))
    layout: gl.constexpr = x0.type.layout
    word_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    half_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    row_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    block_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    word = gl.arange(0, 32, layout=word_l)[None, None, None, :]
    row = gl.arange(0, 2, layout=half_l)[None, :, None, None] * 8 + gl.arange(0, 8, layout=row_l)[None, None, :, None]
    diagonal = word // 8 == gl.arange(0, 4, layout=block_l)[:, None, None, None]
    one = gl.where(row // 2 == word % 8, gl.where(row % 2 == 0, 0x3F80, 0x3F800000), 0)
    high = high_pair(x0, x1)
    low = low_pair(x0, x1)
    words_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], gl.int32)
    D = gl.join(gl.where(diagonal, high, 0), gl.where(diagonal, low, 0)).permute((4, 0, 1, 2, 3))
    reinterpret(D_s, gl.int32, [128, 32], words_s).reshape([2, 4, 2, 8, 32]).store(D)
    n = gl.join(gl.where(diagonal, 0, high), gl.where(diagonal, 0, low)).permute((4, 0, 1, 2, 3))
    reinterpret(n_s, gl.int32, [128, 32], words_s).reshape([2, 4, 2, 8, 32]).store(n)
    reinterpret(I_n_s, gl.int32, [64, 32], words_s).reshape([4, 2, 8, 32]).store(gl.where(diagonal, one, high))


@gluon.jit
def store_sums(buffers, rate, dtype: gl.constexpr, GATE):
    """Unbounded decays: stores the sums of log decays, and gives the least of half a block, by channel."""
    lowest = gl.zeros((64,), gl.float32, layout=COLUMNS)
    for h in range(buffers.KH):
        c0, c1, totals = half_sums(buffers, h, rate, dtype, GATE, False)
        buffers.both_totals(h).store(totals)
        for block in gl.static_range(2):
            _, middle, whole = block_sums(buffers.totals().index(2 * h + block))
            lowest = gl.minimum(lowest, gl.minimum(middle, whole - middle))
        buffers.sums(0).index(h).reshape([4, 8, 64]).store(c0)
        buffers.sums(1).index(h).reshape([4, 8, 64]).store(c1)
    return lowest


@gluon.jit
def bounded_pairs(buffers, tiles, decay, column, rate, scale, dtype: gl.constexpr, GATE, SAFE, L2NORM, flag_tile):
    """Stores `qg`, `kg` and `decay`, and leaves `k a` in the pairs. Accumulators `[64, 32]`: `upper`, of pair 0 by block 0's
    columns; `lower` and `right`, of pair 1 by block 0's and by block 1's.

    16 rows decay by no more than float32 holds: one reference, its middle, serves all pairs of a block, and block 1's middle
    those of both blocks.
    """
    KH: gl.constexpr = buffers.KH
    pairs0 = buffers.pairs(0)
    pairs1 = buffers.pairs(1)
    right0 = buffers.right_halves(0)
    right1 = buffers.rights(1)
    total_s = buffers.totals()
    for h in range(KH):
        if SAFE:
            c0, c1, totals = half_sums(buffers, h, rate, dtype, GATE, SAFE)
            if h == 0:
                async_copy.wait_group(0)
                store_norms(buffers, scale, L2NORM)
            buffers.both_totals(h).store(totals)
        else:
            c0 = buffers.sums(0).index(h).reshape([4, 8, 64]).load(BLOCK)
            c1 = buffers.sums(1).index(h).reshape([4, 8, 64]).load(BLOCK)
        # before the barrier that the totals need, as the operands will take their place
        k0, q0 = load_pair(pairs0.index(h))
        q1, k1 = load_pair(pairs1.index(h))
        before0, middle0, whole0 = block_sums(total_s.index(2 * h))
        before1, middle1, whole1 = block_sums(total_s.index(2 * h + 1))
        decays = exp2(whole0 + whole1)
        gl.store(decay + h * 64 + position(column), decays)
        if flag_tile >= 0:
            # one channel that stays is enough
            flag_tile |= -gl.max((decays > FORGOTTEN).to(gl.int32), axis=0)
        qg = tiles + (KH + h) * 4096
        kg = tiles + (2 * KH + h) * 4096
        norm_k0, norm_q0 = pair_factors(buffers.norm0)
        norm_q1, norm_k1 = pair_factors(buffers.norm1)

        d = c0 + (before0 - middle0[None, :])[:, None, :]
        a = exp2(d)
        kn = widen(k0) * norm_k0
        qa = widen(q0) * norm_q0 * a
        kb = kn * exp2_negative(d)
        store_pair(pairs0.index(h), kn * a, qa)
        right0.index(2 * h).reshape([4, 8, 64]).store(kb.to(gl.bfloat16))
        from_start = exp2(middle0)
        buffers.from_start.index(h).store(-from_start)
        store_block(qg, qa * from_start[None, None, :])
        # in two factors: each fits in fp32, their product need not
        kb = kb * exp2(whole0 - middle0)[None, None, :]
        buffers.store_keys(kg, kb * exp2(whole1)[None, None, :], h, 0, flag_tile)
        moved = (kb * exp2(middle1)[None, None, :]).to(gl.bfloat16)

        d = c1 + (before1 - middle1[None, :])[:, None, :]
        a = exp2(d)
        kn = widen(k1) * norm_k1
        qa = widen(q1) * norm_q1 * a
        kb = kn * exp2_negative(d)
        store_pair(pairs1.index(h), qa, kn * a)
        store_pair(right1.index(h), moved, kb)
        from_start = exp2(whole0 + middle1)
        buffers.between.index(h).store(exp2(whole0 - middle0 + middle1))
        store_block(qg + 2048, qa * from_start[None, None, :])
        buffers.store_keys(kg + 2048, kb * exp2(whole1 - middle1)[None, None, :], h, 1, flag_tile)

    fence_async_shared()
    upper = gl.zeros((64, 32), gl.float32, layout=ACC_HALF)
    lower = gl.zeros((64, 64), gl.float32, layout=ACC)
    for h in gl.static_range(KH):
        upper = warpgroup_mma(pairs0.index(h), right0.index(2 * h).permute((1, 0)), upper, use_acc=h > 0, is_async=True)
        lower = warpgroup_mma(pairs1.index(h), right1.index(h).permute((1, 0)), lower, use_acc=h > 0, is_async=True)
    upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    lower, right = column_halves(lower, ACC_HALF)
    return upper, lower, right, flag_tile


@gluon.jit
def exact_pairs(buffers, tiles, decay, sub_chunk, column, half_row, half_column):
    """`bounded_pairs` for any decay: pairs at four distances, each with a reference between their rows.

    One block and half of the channels after the other: with more accumulators ptxas has no registers left for the MMAs and
    waits for each of them, in `bounded_pairs`, too (C7511).
    """
    KH: gl.constexpr = buffers.KH
    # of each block; formed in the loop, they make ptxas wait for each MMA in some variants
    pair_s = (buffers.pairs(0), buffers.pairs(1))
    key_s = (buffers.keys(0), buffers.keys(1))
    right_s = (buffers.right_halves(0), buffers.right_halves(1))
    sum_s = (buffers.sums(0), buffers.sums(1))
    total_s = buffers.totals()
    warp_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, BLOCK))
    half_zero = gl.zeros((64, 32), gl.float32, layout=ACC_HALF)
    in_block = half_row % 32
    same8 = in_block // 8 == half_column // 8
    same16 = in_block // 16 == half_column // 16
    lower = half_zero
    for block in gl.static_range(2):
        within = half_zero
        for h in range(KH):
            c = sum_s[block].index(h).reshape([4, 8, 64]).load(BLOCK)
            if block == 0:
                kn, qn = load_pair(pair_s[0].index(h))
                norm_k, norm_q = pair_factors(buffers.norm0)
            else:
                qn, kn = load_pair(pair_s[1].index(h))
                norm_q, norm_k = pair_factors(buffers.norm1)
            total = gl.reduce(c, 1, last)
            before, middle, whole = block_sums(total_s.index(2 * h + block))
            _, _, other = block_sums(total_s.index(2 * h + 1 - block))
            kn = widen(kn) * norm_k
            # which form leaves ptxas registers for the MMAs depends on K, here and below (docs/machine-code.md)
            qn = (widen(qn) if KH == 1 else qn.to(gl.float32)) * norm_q
            # a sub-chunk decays by at most exp(-80) to either side of its middle
            mid = sub_chunk_middle(c)
            d = c - mid[:, None, :]
            a = exp2(d)
            b = exp2_negative(d)
            up = a * exp2(before + mid)[:, None, :]
            down = b * exp2(whole[None, :] - before - mid)[:, None, :]
            qg = tiles + (KH + h) * 4096 + block * 2048
            kg = tiles + (2 * KH + h) * 4096 + block * 2048
            q_up = qn * up
            k_down = kn * down
            if block == 0:
                store_pair(pair_s[0].index(h), kn * a, qn * a)
                store_pair(buffers.rights(0).index(h), kn * b, k_down)
                store_block(qg, q_up)
                store_block(kg, k_down * exp2(other)[None, None, :])
                gl.store(decay + h * 64 + position(column), exp2(whole + other))
                buffers.from_start.index(h).store(whole * 0.0 - 1.0)
                buffers.between.index(h).store(exp2(whole))
            else:
                store_pair(pair_s[1].index(h), qn * a, kn * a)
                right_s[1].index(2 * h).reshape([4, 8, 64]).store((kn * b).to(gl.bfloat16))
                store_block(qg, q_up * exp2(other)[None, None, :])
                store_block(kg, k_down)
            fence_async_shared()
            pair = pair_s[block].index(h)
            pair_k = key_s[block].index(2 * h + block).permute((1, 0))
            near = warpgroup_mma(
                pair, right_s[block].index(2 * h).permute((1, 0)), half_zero, use_acc=False, is_async=True
            )
            # pairs of the two halves of 16 and of 32 rows meet at the boundary between the halves: one factor a row
            second = sub_chunk % 2 == 1
            half = gl.where(second[:, None], mid, total - mid)
            factor = exp2(gl.where(gl.convert_layout(second, warp_l)[:, None, None], d, -d) + half[:, None, :])
            near = warpgroup_mma_wait(0, deps=[near])
            within += gl.where(same8, near, 0.0)
            if block == 0:
                store_pair(pair, kn * factor, qn * factor)
            else:
                store_pair(pair, qn * factor, kn * factor)
            fence_async_shared()
            eight = warpgroup_mma(pair, pair_k, half_zero, use_acc=False, is_async=True)
            second = sub_chunk >= 2
            half = before + mid - middle[None, :]
            half = gl.where(second[:, None], half, -half)
            factor = exp2(gl.where(gl.convert_layout(second, warp_l)[:, None, None], d, -d) + half[:, None, :])
            eight = warpgroup_mma_wait(0, deps=[eight])
            within += gl.where(same8, 0.0, gl.where(same16, eight, 0.0))
            if block == 0:
                store_pair(pair, kn * factor, qn * factor)
            else:
                store_pair(pair, qn * factor, kn * factor)
            fence_async_shared()
            sixteen = warpgroup_mma(pair, pair_k, half_zero, use_acc=False, is_async=True)
            sixteen = warpgroup_mma_wait(0, deps=[sixteen])
            # the same sum
            if KH == 2:
                within = gl.where(same16, within, within + sixteen)
            else:
                within += gl.where(same16, 0.0, sixteen)
            # anew: kept until here, it would cost registers that ptxas wants for the MMAs
            up = exp2(d + (before + mid)[:, None, :])
            k_up = kn * up
            if block == 0:
                store_pair(pair, k_up, k_up)
            else:
                store_pair(pair, qn * up, k_up)
        if block == 0:
            upper = within
        else:
            right = within
    fence_async_shared()
    for h in gl.static_range(KH):
        lower = warpgroup_mma(pair_s[1].index(h), right_s[0].index(2 * h + 1).permute((1, 0)), lower, is_async=True)
    lower = warpgroup_mma_wait(0, deps=[lower])
    return upper, lower, right


@gluon.jit
def minus_A_and_Aqk(upper, lower, right, betas, half_row, half_column):
    """`-A` and Aqk `[64, 64]`, Aqk with its halves of the rows exchanged. Rows of `upper`: k, then q of block 0; of `lower` and
    `right`: q, then k of block 1. Pairs i < j may have overflowed."""
    first = half_row < 32
    left_A = gl.where(half_row > half_column, gl.where(first, upper, lower), 0.0)
    right_A = gl.where(half_row > half_column + 32, right, 0.0)
    minus_A = beside(left_A, right_A, ACC) * -betas[:, None]
    query = (half_row + 32) % 64
    left_Aqk = gl.where(query >= half_column, gl.where(first, lower, upper), 0.0)
    right_Aqk = gl.where(query >= half_column + 32, right, 0.0)
    return minus_A, beside(left_Aqk, right_Aqk, ACC)


@gluon.jit
def inverse(minus_A, buffers):
    """`(I + A)^-1`. With D the inverses of the diagonal blocks of 16 rows and n = -D (A off the diagonal), n^4 = 0 and
    (I + A)^-1 = (I + n^2) Y with Y = (I + n) D."""
    zero = gl.zeros((64, 64), gl.float32, layout=ACC)
    half_zero = gl.zeros((64, 32), gl.float32, layout=ACC_HALF)
    rhs_s = reinterpret(buffers.right1, gl.float32, [64, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    diagonal_s = reinterpret(buffers.small, gl.float32, [1024], FLAT)
    X = block_inverses(minus_A, rhs_s, diagonal_s)
    store_inverse_parts(X, buffers.right1, buffers.right0, buffers.small)
    D_high = buffers.rights(1).index(0)
    D_low = buffers.rights(1).index(1)
    n_high = buffers.rights(0).index(0)
    n_low = buffers.rights(0).index(1)
    fence_async_shared()
    Y = mma3(buffers.small, n_low, D_high, D_low, zero, False)
    # n^2 has nothing right of column 32
    n2 = mma3(n_high, n_low, n_high.slice(0, 32, 1), n_low.slice(0, 32, 1), half_zero, False)
    Y, n2 = warpgroup_mma_wait(0, deps=[Y, n2])
    store_parts(buffers.right1, Y.reshape([4, 2, 8, 64]))
    fence_async_shared()
    n2_high, n2_low = split_high_low(n2)
    n2_high = gl.convert_layout(n2_high, LEFT, assert_trivial=True)
    n2_low = gl.convert_layout(n2_low, LEFT, assert_trivial=True)
    X = mma3(n2_high, n2_low, D_high.slice(0, 32), D_low.slice(0, 32), Y, True)
    X, n2_high, n2_low = warpgroup_mma_wait(0, deps=[X, n2_high, n2_low])
    return X


@gluon.jit
def store_w(tiles, high, low, buffers):
    """`-w = -inverse (k exp G)`, with the inverse as `high + low` and `k a` of the pairs: relative to block 1's reference
    first, then moved to block 0's, then to the chunk's start. Returns its halves."""
    KH: gl.constexpr = buffers.KH
    zero = gl.zeros((64, 64), gl.float32, layout=ACC)
    high0, high1 = column_halves(high, LEFT)
    low0, low1 = column_halves(low, LEFT)
    w = weighted(high1, low1, buffers.keys(1).index(1), zero, False)
    if KH == 2:
        w_right = weighted(high1, low1, buffers.keys(1).index(3), zero, False)
        w, w_right, high1, low1 = warpgroup_mma_wait(0, deps=[w, w_right, high1, low1])
        w_right *= buffers.between.index(1).load(gl.SliceLayout(0, ACC))[None, :]
    else:
        w, high1, low1 = warpgroup_mma_wait(0, deps=[w, high1, low1])
    w *= buffers.between.index(0).load(gl.SliceLayout(0, ACC))[None, :]
    w = weighted(high0, low0, buffers.keys(0).index(0), w, True)
    if KH == 2:
        w_right = weighted(high0, low0, buffers.keys(0).index(2), w_right, True)
        w, w_right, high0, low0 = warpgroup_mma_wait(0, deps=[w, w_right, high0, low0])
        w_right *= buffers.from_start.index(1).load(gl.SliceLayout(0, ACC))[None, :]
        store_tile(tiles + 4096, w_right, 0)
    else:
        w_right = w
        w, high0, low0 = warpgroup_mma_wait(0, deps=[w, high0, low0])
    w *= buffers.from_start.index(0).load(gl.SliceLayout(0, ACC))[None, :]
    store_tile(tiles, w, 0)
    return w, w_right


@gluon.jit
def does_forget(buffers, w_left, w_right):
    """Says whether a bound on the norm of M, which maps the state before the chunk to the one after, is next to nothing:

        |M| = |diag(decay) - kg^T w| <= sum_c decay_c + sum_i |kg_i| |w_i|

    `|w_i|` is at most `sqrt(K)` times the largest element of its row, `|kg_i|` times that of its sub-chunk, and decays are at
    most those up to the references. Rounding adds less than 1 %."""
    lanes_l: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    largest = larger(gl.reduce(gl.abs(w_left), 1, larger), gl.reduce(gl.abs(w_right), 1, larger))
    w = gl.sum(largest.reshape([8, 8]), axis=1)
    largest_s = reinterpret(buffers.largest, gl.float32, [2, 8], FLAT)
    kg = larger(largest_s.index(0).load(w.type.layout), largest_s.index(1).load(w.type.layout))
    minus_decay = reinterpret(buffers.from_start, gl.float32, [128], FLAT).load(lanes_l)
    minus_decay *= reinterpret(buffers.between, gl.float32, [128], FLAT).load(lanes_l)
    bound = gl.sum(w * kg, axis=0) * 128 - gl.sum(minus_decay, axis=0)
    return bound * 1.01 <= FORGOTTEN


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, checkpoint_offsets,
    tiles, decay, semaphores, forgets, first_segment, Akk_inv, scale: gl.float32, lower_bound: gl.float32, T: gl.int32,
    N: gl.int32, HV: gl.int32, group: gl.int32, slots: gl.int32, checkpoints: gl.int32,
    q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32, k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32,
    g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    beta_batch: gl.int32, beta_token: gl.int32, beta_head: gl.int32,
    room: gl.int32, split: gl.int32, batch_invariant: gl.int32, parts,
    K: gl.constexpr, GATE: gl.constexpr, SAFE: gl.constexpr, BETA: gl.constexpr, L2NORM: gl.constexpr,
    FLAGS: gl.constexpr, COSTS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """One chunk and value head, K = 128 (KH = 2 halves of the channels); * goes to memory:

    g, then k and q          by cp.async, g to right1, k and q to pair0 and pair1
          |
          v                  d = log decay from the block's middle to the row, a = exp(d), b = exp(-d)
    left operands            right operands
    pair0 [64, K]  k0 a      right0 [32, K]  k0 b               * qg = q a exp(start .. middle)
                   q0 a                                         * kg = k b exp(middle .. end)
    pair1 [64, K]  q1 a      right1 [64, K]  k0 b, moved to     * decay [K]
                   k1 a                      block 1; k1 b
          |
          v                  wgmma
    upper [64, 32] = pair0 right0^T        lower, right [64, 32] = pair1 right1^T
    A (0, 0)                               Aqk (1, 0)   Aqk (1, 1)
    Aqk (0, 0)                             A (1, 0)     A (1, 1)
          |
          v                                                     * Aqk
    -A [64, 64]              by way of shared memory: a warp solves 16 rows in float32
          |
          v                  wgmma of operands in two parts: Y, n^2, Y + n^2 Y
    (I + A)^-1 [64, 64]                                         * Akk_inv, and times diag(beta): inverse
          |
          v                  wgmma, left operands in registers, k a of pair1, then of pair0
    -w [64, K]                                                  * -w
    """
    KH: gl.constexpr = K // 64
    # unbounded decays head by head: most heads take one path throughout, and the code of both is more than the instruction
    # cache holds
    head, slot, tile = last_chunks_first(HV, not SAFE)
    if OVERLAPS:
        gdc_launch_dependents()
    if first_segment is not None:
        # one CTA more, the first to start, has no chunk but makes the plan
        plans = gl.program_id(0) == 0
        if plans:
            if gl.program_id(1) == 0:
                plan_segments(
                    *(cu_seqlens, checkpoint_offsets, first_segment, T, N, checkpoints),
                    *(room, split, batch_invariant, COSTS),
                )
            return
    if tile == 0:
        # `recurrence` counts up from zero
        flag = gl.arange(0, FLAGS, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(semaphores + flag, flag * 0)
    # volatile, here and below: else the compiler moves these loads behind the copies, where they queue
    rate = decay_rate(A_log, head, volatile=True)
    if dt_bias is not None:
        bias = steps.load_bias(dt_bias, head, K)
    batch, start, count, begin = chunk_in_slot(cu_seqlens, checkpoint_offsets, checkpoints, slot, slots, N, T, not SAFE)
    if count <= 0:
        return
    batch = batch.to(gl.int32)
    start = start.to(gl.int32)
    to_end = count
    count = gl.minimum(count, 64).to(gl.int32)
    qk_head = head
    if group > 1:
        qk_head = head // group
    # these strides come in units of 8 elements, which tells the compiler that 16-byte copies are aligned
    q += (wide(batch, q_batch) + wide(start, q_token) + wide(qk_head, q_head)) * 8
    k += (wide(batch, k_batch) + wide(start, k_token) + wide(qk_head, k_head)) * 8
    g += (wide(batch, g_batch) + wide(start, g_token) + wide(head, g_head)) * 8
    beta += wide(batch, beta_batch) + wide(start, beta_token) + wide(head, beta_head)
    chunk = tile.to(gl.int64)
    tiles += chunk * ((3 * KH + 2) * 4096)
    decay += chunk * K

    buffers = make_buffers(dt_bias, forgets, KH)

    acc_row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    betas = gl.load(beta + acc_row * beta_token, mask=acc_row < count, other=0.0, volatile=True).to(gl.float32)
    # the gate's input first: decays are worked out while keys and queries are on their way
    if g.dtype.element_ty == gl.bfloat16:
        g_s = reinterpret(buffers.right1, gl.bfloat16, [KH * 64, 64], PLAIN)
        copy_pair(g_s, g, g_token, count, g + g_token * 256, g_token, count - 32)
    else:
        g_s = reinterpret(buffers.right0, gl.float32, [KH * 32, 64], PLAIN)
        steps.copy_tokens(g_s, g, g_token, count, 32)
        g_s = reinterpret(buffers.right1, gl.float32, [KH * 32, 64], PLAIN)
        steps.copy_tokens(g_s, g + g_token * 256, g_token, count - 32, 32)
    async_copy.commit_group()
    copy_pair(buffers.pair0, k, k_token, count, q, q_token, count)
    copy_pair(buffers.pair1, q + q_token * 256, q_token, count - 32, k + k_token * 256, k_token, count - 32)
    async_copy.commit_group()

    # whether somebody asks if the chunk forgets: the tile, or -1; found now that copies are on their way
    if forgets is None:
        flag_tile: gl.constexpr = -1
    else:
        if first_segment is not None:
            ends = may_end_segment(start - begin, to_end, room, COSTS[4])
        else:
            ends = may_end_part(start - begin, to_end, parts)
        # a condition and a tile in one register: without the hidden 0 the compiler would keep both apart
        flag_tile = gl.where(ends, tile, -1) + gl.minimum(tile, 0)
        gl.store(forgets + tile, 0)

    sub_chunk = gl.arange(0, 4, layout=gl.SliceLayout(1, TOTALS))
    column = gl.arange(0, 64, layout=COLUMNS)
    # nothing decays past the end
    reinterpret(buffers.unit, gl.float32, [64], FLAT).store(
        gl.where(acc_row < count, gate_unit(rate, lower_bound, GATE), 0.0)
    )
    betas = gl.where(acc_row < count, beta_value(betas, BETA), 0.0)
    buffers.beta.store(betas)
    if dt_bias is not None:
        reinterpret(buffers.bias, gl.float32, [K], FLAT).store(gate_bias(bias, rate, GATE))

    async_copy.wait_group(1)

    dtype: gl.constexpr = g.dtype.element_ty
    if SAFE:
        fits: gl.constexpr = True
    else:
        lowest = store_sums(buffers, rate, dtype, GATE)
        async_copy.wait_group(0)
        store_norms(buffers, scale, L2NORM)
        # whether no half of a block decays by more than a float32 holds
        fits = gl.min(lowest, axis=0) >= LOWEST_HALF
    half_row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_HALF))[:, None]
    half_column = gl.arange(0, 32, layout=gl.SliceLayout(0, ACC_HALF))[None, :]
    if forgets is not None:
        # apart from `fits`, as only here `flag_tile` is more than a constant
        upper, lower, right, flag_tile = bounded_pairs(
            buffers, tiles, decay, column, rate, scale, dtype, GATE, SAFE, L2NORM, flag_tile
        )
    elif fits:
        upper, lower, right, _ = bounded_pairs(
            buffers, tiles, decay, column, rate, scale, dtype, GATE, SAFE, L2NORM, flag_tile
        )
    else:
        upper, lower, right = exact_pairs(buffers, tiles, decay, sub_chunk, column, half_row, half_column)
    if not SAFE or forgets is not None:
        # anew: they would be spilled
        betas = buffers.beta.load(gl.SliceLayout(1, ACC))
    minus_A, Aqk = minus_A_and_Aqk(upper, lower, right, betas, half_row, half_column)
    store_tile(tiles + (3 * KH + 1) * 4096, Aqk, 32)

    X = inverse(minus_A, buffers)
    if Akk_inv is not None:
        # by token, as the operator of the backward pass has it
        first_row = (wide(batch, T) + (start + acc_row)) * HV + head
        acc_column = gl.arange(0, 64, layout=gl.SliceLayout(0, ACC))
        at = Akk_inv + first_row[:, None] * 64 + acc_column[None, :]
        # compared anew, or with a 0 that the compiler can't see: the first comparison's results would be spilled
        inside = acc_row + gl.minimum(tile, 0) < count if SAFE else start + acc_row < start + count
        gl.store(at, round_pairs(X), mask=inside[:, None])
    weights = X * buffers.beta.load(gl.SliceLayout(0, ACC))[None, :]
    # Rounded to nearest, not cut off: `recurrence` multiplies v with the high part alone. Here the low part counts too: rows
    # of weights alternate in sign where keys repeat, and rounding them once would leave more error than result.
    high = round_pairs(weights)
    low = (weights - high.to(gl.float32)).to(gl.bfloat16)
    store_tile(tiles + 3 * KH * 4096, high, 0)
    w_left, w_right = store_w(tiles, high, low, buffers)
    if flag_tile >= 0:
        gl.store(forgets + flag_tile, does_forget(buffers, w_left, w_right).to(gl.int32))


def grid(problem: ChunkProblem) -> tuple[int, int]:
    """CTAs and rows of CTAs for all chunks, as `last_chunks_first` counts them."""
    slots = problem.B * problem.slots if problem.N > 0 else 0
    return (slots * problem.HV, 1) if problem.safe_gate else (slots, problem.HV)


def prepare(call: StageCall, Akk_inv: Tensor | None = None) -> Launch:
    problem = call.problem
    ctas, rows = grid(problem)
    plan = call.workspace["first_segment"] if call.forms_segments else None
    own = dict(
        **call.left("tiles", "decay", "semaphores", "forgets"),
        **dict(first_segment=plan, Akk_inv=Akk_inv, room=room(problem, call.t.device)),
        parts=parts(problem, call.t.device) if "forgets" in call.workspace else None,
        **dict(FLAGS=FLAGS, COSTS=tuple(vars(SPLIT_COSTS).values())),
        OVERLAPS=plan is not None or overlaps_prepare(call),
    )
    ctas += plan is not None
    # three CTAs on an SM; the exact path of K = 64 would have its MMAs waited for one by one (C7511)
    most = 168 if problem.safe_gate or problem.K == 128 else None
    return launch_div8(prepare_kernel, ctas, problem, call.t, own, max_registers=most, rows=rows)
