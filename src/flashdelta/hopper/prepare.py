"""Stage `prepare` for Hopper: everything about a chunk that does not depend on the state. One program of 4 warps per
(chunk, value head).

Contract: as `triton/prepare.py`, for chunks of 64 tokens and bf16, except that `w` is stored negated and that the results lie
as `recurrence` fetches them: for each (chunk, value head) `3 K/64 + 2` tiles of `[64, 64]`, namely `-w`, `qg` and `kg` by
halves of the key channels, `inverse`, `Aqk`.

How (docs/hopper-prefill.md has a picture): a chunk is two blocks of 32 rows, a block four cells of 8 rows. In the elementwise
part a thread owns a cell of 2 channels: sums along tokens stay in its registers, and every operand is the raw key or query
times `exp(distance to a reference row)`, which is `a` or `b = 1 / a` of the thread's own cell times a factor per channel.
Products run on wgmma with 64 rows: the keys of a block and its queries together. `(I + A)^-1` is forward substitution in
registers for the diagonal blocks of 16, then three products that hold 16 bits of each operand.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from ..triton.device import gates, sequences
from ..triton.device.norms import L2_EPS
from .device.compat import copy_async, reinterpret
from .device.layouts import position, store_cells, store_tile
from .device.math import (
    LOWEST,
    LOWEST_HALF,
    column_halves,
    exp2,
    exp2_negative,
    gate,
    gate_bias,
    gate_unit,
    high_pair,
    low_pair,
    product3,
    round_pairs,
    split_high_low,
    wide,
    write_strength,
)
from .segments import plan_segments

chunk_of_sequence = gluon.jit(sequences.chunk_of_sequence.fn)
clamp_bounds = gluon.jit(sequences.clamp_bounds.fn)
decay_rate = gluon.jit(gates.decay_rate.fn)
first_slot = gluon.jit(sequences.first_chunk_slot.fn)
piece_count = gluon.jit(sequences.span_count.fn)


_STRIDES = [f"{x}_{dim}" for x in ("q", "k", "g", "beta") for dim in ("batch", "token", "head")]
PLANNED = ("room", "split", "batch_invariant")
SCALARS = ("scale", "lower_bound", "T", "N", "HV", "group", "slots", "checkpoints", *_STRIDES, *PLANNED)
"""Arguments whose values leave the machine code as it is."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _second(a, b):
    return b


@gluon.jit
def fetch(shared, first, first_token, first_count, second, second_token, second_count, copy_l: gl.constexpr):
    """Starts the copy of equally many rows of two tensors, all channels, to `shared [halves * rows, 64]`, where each half of
    the channels has the rows of the first, then those of the second. Zeros from the counts on."""
    row = gl.arange(0, shared.shape[0], layout=gl.SliceLayout(1, copy_l))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, copy_l))
    token = row % 32
    at_first = (row // 32) % 2 == 0
    at = gl.where(at_first, first + token * (first_token * 8), second + token * (second_token * 8))
    at = gl.multiple_of(at, 16)  # Triton 3.9 does not see it through the choice
    inside = token < gl.where(at_first, first_count, second_count)
    copy_async(shared, (at + row // 64 * 64)[:, None] + column[None, :], mask=inside[:, None])


@gluon.jit
def fetch_block(shared, x, x_token, count, copy_l: gl.constexpr):
    """Starts the copy of 32 rows, all channels, to `shared [halves * 32, 64]`. Zeros from `count` on."""
    row = gl.arange(0, shared.shape[0], layout=gl.SliceLayout(1, copy_l))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, copy_l))
    at = x + ((row % 32) * (x_token * 8) + row // 32 * 64)
    copy_async(shared, at[:, None] + column[None, :], mask=(row % 32 < count)[:, None])


@gluon.jit
def load_gate(even_s, odd_s, h, dtype: gl.constexpr, rows_s: gl.constexpr, cell: gl.constexpr):
    """The gate's input for half `h` of the channels, block by block. It lies where this half's right operands will."""
    if dtype == gl.bfloat16:
        both = reinterpret(odd_s, dtype, [4, 32, 64], rows_s)
        first = both.index(2 * h)
        second = both.index(2 * h + 1)
    else:
        first = reinterpret(even_s, dtype, [2, 32, 64], rows_s).index(h)
        second = reinterpret(odd_s, dtype, [2, 32, 64], rows_s).index(h)
    return first.reshape([4, 8, 64]).load(cell), second.reshape([4, 8, 64]).load(cell)


@gluon.jit
def row_factors(pair_s, scale, KEYS_FIRST: gl.constexpr, L2NORM: gl.constexpr, square_l: gl.constexpr):
    """Factors `[4, 16]` of the 64 rows of a pair of blocks `[KH, 64, 64]`: `1 / sqrt(sum x^2 + eps)` or 1, for queries times
    `scale`. The sums are the diagonal of the Gram matrix, by blocks of 16 rows."""
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=square_l, k_width=2)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=square_l, k_width=2)
    row_l: gl.constexpr = gl.SliceLayout(2, square_l)
    if L2NORM:
        KH: gl.constexpr = pair_s.shape[0]
        gram = gl.zeros((4, 16, 16), gl.float32, layout=square_l)
        for h in gl.static_range(KH):
            rows = pair_s.index(h).reshape([4, 16, 64])
            # the right operand is loaded, too: taken from the left one's registers, each would have to be moved
            gram = mma_v2(rows.load(left_l), rows.permute((0, 2, 1)).load(right_l), gram)
        i = gl.arange(0, 16, layout=gl.SliceLayout(0, row_l))
        j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, square_l)))
        total = gl.sum(gl.where(i[None, :, None] == j[None, None, :], gram, 0.0), axis=2)
        factor = gl.rsqrt(total + L2_EPS)
    else:
        factor = gl.full((4, 16), 1.0, gl.float32, layout=row_l)
    tile = gl.arange(0, 4, layout=gl.SliceLayout(1, row_l))[:, None]
    return gl.where((tile < 2) == KEYS_FIRST, factor, factor * scale)


@gluon.jit
def pair_factors(norm_s, norm_l: gl.constexpr, cell: gl.constexpr):
    """The factors `[4, 8, 1]` of the rows of a pair's blocks."""
    first, second = gl.split(norm_s.reshape([2, 4, 8]).load(norm_l).permute((1, 2, 0)))
    first = gl.convert_layout(first, gl.SliceLayout(2, cell), assert_trivial=True)[:, :, None]
    second = gl.convert_layout(second, gl.SliceLayout(2, cell), assert_trivial=True)[:, :, None]
    return first, second


@gluon.jit
def decay_steps(x, bias, rate, unit_s, GATE: gl.constexpr, SAFE: gl.constexpr, cell: gl.constexpr):
    """Log2 decays `[4, 8, 64]` of a block's rows."""
    unit = unit_s.reshape([4, 8]).load(gl.SliceLayout(2, cell))[:, :, None]
    step = gate(x.to(gl.float32), bias, rate, GATE) * unit
    if not SAFE:
        step = gl.where(step < LOWEST, LOWEST, step)  # a NaN stays one
    return step


@gluon.jit
def cell_sums(step, cell: gl.constexpr):
    """Inclusive sums of log2 decays `step [4, 8, 64]` in cells of 8 rows, and the cells' totals `[4, 64]`."""
    flat_l: gl.constexpr = gl.BlockedLayout([8, 2], [1, 32], [1, 4], [1, 0])
    flat = gl.convert_layout(step.permute((1, 0, 2)).reshape([8, 256]), flat_l, assert_trivial=True)
    c = gl.associative_scan(flat, 0, _add)
    total = gl.convert_layout(gl.reduce(c, 0, _second).reshape([4, 64]), gl.SliceLayout(1, cell), assert_trivial=True)
    c = gl.convert_layout(c.reshape([8, 4, 64]).permute((1, 0, 2)), cell, assert_trivial=True)
    return c, total


@gluon.jit
def half_sums(
    even_s,
    odd_s,
    bias_s,
    unit_s,
    h,
    rate,
    dtype: gl.constexpr,
    GATE: gl.constexpr,
    SAFE: gl.constexpr,
    rows_s: gl.constexpr,
    cell: gl.constexpr,
):
    """`cell_sums` of both blocks for half `h` of the channels, and the cells' totals `[2, 4, 64]`."""
    bias = 0.0
    if bias_s is not None:
        bias = bias_s.index(h).load(gl.SliceLayout(0, gl.SliceLayout(1, cell)))[None, None, :]
    g0, g1 = load_gate(even_s, odd_s, h, dtype, rows_s, cell)
    c0, total0 = cell_sums(decay_steps(g0, bias, rate, unit_s.index(0), GATE, SAFE, cell), cell)
    c1, total1 = cell_sums(decay_steps(g1, bias, rate, unit_s.index(1), GATE, SAFE, cell), cell)
    return c0, c1, gl.join(total0, total1).permute((2, 0, 1))


@gluon.jit
def block_sums(total_s, cell: gl.constexpr):
    """From the totals of a block's cells: for each cell the sum of those before it `[4, 64]`; of the block's first half and
    of the whole block `[64]`."""
    peers_l: gl.constexpr = gl.BlockedLayout([1, 4, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    all_l: gl.constexpr = gl.SliceLayout(0, peers_l)
    peers = total_s.reshape([4, 64]).load(all_l)
    peer = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, peers_l)))
    mine = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, peers_l)))
    before = gl.sum(gl.where((peer[None, :] < mine[:, None])[:, :, None], peers[None, :, :], 0.0), axis=1)
    before = gl.convert_layout(before, gl.SliceLayout(1, cell), assert_trivial=True)
    half = gl.arange(0, 4, layout=gl.SliceLayout(1, all_l)) < 2
    column_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, cell))
    middle = gl.convert_layout(gl.sum(gl.where(half[:, None], peers, 0.0), axis=0), column_l, assert_trivial=True)
    whole = gl.convert_layout(gl.sum(peers, axis=0), column_l, assert_trivial=True)
    return before, middle, whole


@gluon.jit
def cell_middle(c, cell: gl.constexpr):
    """Row 3 of `c [4, 8, 64]`: the sum up to the middle of each cell, `[4, 64]`."""
    low, _ = gl.split(c.reshape([4, 2, 4, 64]).permute((0, 2, 3, 1)))
    return gl.convert_layout(gl.reduce(low, 1, _second), gl.SliceLayout(1, cell), assert_trivial=True)


@gluon.jit
def load_pair(pair_s, quad_l: gl.constexpr, cell: gl.constexpr):
    """Both blocks of 32 rows of a tile, `[4, 8, 64]` each; no data moves between threads."""
    first, second = gl.split(pair_s.reshape([2, 4, 8, 64]).load(quad_l).permute((1, 2, 3, 0)))
    return gl.convert_layout(first, cell, assert_trivial=True), gl.convert_layout(second, cell, assert_trivial=True)


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
def beside(left, right, layout: gl.constexpr):
    """`[64, 64]` from two `[64, 32]`; no data moves between threads."""
    both = gl.join(left, right).permute((0, 2, 1)).reshape([64, 64])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def substitute(low, high, diagonal_s):
    """`X` with `(I + A) X = R` for the diagonal blocks of 16 rows of A, by forward substitution in fp32: a series would
    explode and cancel on repeated keys.

    `low, high [4, 8, 64]` are rows 0..7 and 8..15 of each block of R; a thread has all rows of 2 columns.
    """
    layout: gl.constexpr = low.type.layout
    left_l: gl.constexpr = gl.SliceLayout(2, layout)
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, left_l))[None, :, None]
    for r in gl.static_range(1, 16):
        x = gl.sum(diagonal_s.index(2 * r).load(left_l)[:, :, None] * low, axis=1)[:, None, :]
        if r < 8:
            low = gl.where(row == r, low + x, low)
        else:
            if r > 8:
                x += gl.sum(diagonal_s.index(2 * r + 1).load(left_l)[:, :, None] * high, axis=1)[:, None, :]
            high = gl.where(row == r - 8, high + x, high)
    return low, high


@gluon.jit
def weighted(high, low, k_s, acc, use_acc: gl.constexpr):
    """`acc` plus the 32 keys of a block, weighted by weights in two parts."""
    acc = warpgroup_mma(high, k_s, acc, use_acc=use_acc, is_async=True)
    return warpgroup_mma(low, k_s, acc, is_async=True)


@gluon.jit
def block_inverses(minus_A, right_s, diagonal_s, rows_l: gl.constexpr):
    """For strictly lower `A [64, 64]`, with D the inverses of the diagonal blocks of `I + A` of 16 rows: D on the diagonal
    and `-D A` below it, as `[4, 2, 8, 64]`. D and -A's other blocks are the right sides of one substitution."""
    layout: gl.constexpr = minus_A.type.layout
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    blocks = minus_A.reshape([4, 16, 4, 16])
    blocks_l: gl.constexpr = blocks.type.layout
    block_i = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, blocks_l))))
    block_j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, blocks_l))))
    same = block_i[:, None, None, None] == block_j[None, None, :, None]
    diagonal = gl.sum(gl.where(same, blocks, 0.0), axis=2)
    # row by row and half by half, each for all four blocks
    diagonal_s.reshape([16, 2, 4, 8]).permute((2, 0, 1, 3)).store(diagonal.reshape([4, 16, 2, 8]))
    right_s.store(gl.where(i // 16 == j // 16, gl.where(i == j, 1.0, 0.0), minus_A))
    X = right_s.reshape([4, 2, 8, 64]).load(rows_l)
    low, high = gl.split(X.permute((0, 2, 3, 1)))
    lines_s = reinterpret(diagonal_s, gl.float32, [32, 4, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    low, high = substitute(low, high, lines_s)
    return gl.convert_layout(gl.join(low, high).permute((0, 3, 1, 2)), rows_l, assert_trivial=True)


@gluon.jit
def store_inverse_parts(X, D_s, n_s, I_n_s):
    """From what `block_inverses` gives: D and n, each as its high and its low parts, and the high part of I + n. Parts are
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
def find_sequence(cu_seqlens, checkpoint_offsets, checkpoints, slot, N, T):
    """The last sequence whose first chunk slot is not past `slot`, and its bounds. Every warp asks for 128 at once: two
    dependent loads for any N that occurs, one up to 128, where a binary search has one for each bit of N."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    pieces = piece_count(checkpoint_offsets, checkpoints)
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
        passed = inside & (first_slot(begins, n, pieces, 64) <= slot)
        last = gl.maximum(gl.sum(passed.to(gl.int32)) - 1, 0)
        begin = gl.sum(gl.where(lane == last, begins, 0))
        end = gl.sum(gl.where(lane == last, ends, 0))
        low += last * step
        high = gl.minimum(high, low + step - 1)
    return low, begin, end


@gluon.jit(do_not_specialize=SCALARS)
def prepare_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    checkpoint_offsets,
    tiles,
    decay,
    arrived,
    first_segment,
    solved,
    scale: gl.float32,
    lower_bound: gl.float32,
    T: gl.int32,
    N: gl.int32,
    HV: gl.int32,
    group: gl.int32,
    slots: gl.int32,
    checkpoints: gl.int32,
    q_batch: gl.int32,
    q_token: gl.int32,
    q_head: gl.int32,
    k_batch: gl.int32,
    k_token: gl.int32,
    k_head: gl.int32,
    g_batch: gl.int32,
    g_token: gl.int32,
    g_head: gl.int32,
    beta_batch: gl.int32,
    beta_token: gl.int32,
    beta_head: gl.int32,
    room: gl.int32,
    split: gl.int32,
    batch_invariant: gl.int32,
    K: gl.constexpr,
    GATE: gl.constexpr,
    SAFE: gl.constexpr,
    BETA: gl.constexpr,
    L2NORM: gl.constexpr,
    FLAGS: gl.constexpr,
    COSTS: gl.constexpr,
):
    KH: gl.constexpr = K // 64
    # [warp, row, channel] of a cell per thread
    cell: gl.constexpr = gl.BlockedLayout([1, 8, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    acc_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    half_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    square_l: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
    dot_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_l, k_width=2)
    quad_l: gl.constexpr = gl.BlockedLayout([2, 1, 8, 2], [1, 1, 1, 32], [1, 4, 1, 1], [3, 2, 1, 0])
    norm_l: gl.constexpr = gl.SliceLayout(3, quad_l)
    rows_l: gl.constexpr = gl.BlockedLayout([1, 2, 8, 2], [1, 1, 1, 32], [4, 1, 1, 1], [3, 2, 1, 0])
    tile_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    rows_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    # last chunks first: `recurrence` starts with the first ones, which are then still in the L2
    if SAFE:
        pid = gl.num_programs(0) - 1 - gl.program_id(0)
        head = pid % HV
        slot = pid // HV
    else:
        # head by head: most take one path throughout, and the code of both is more than the instruction cache holds
        slot = gl.num_programs(0) - 1 - gl.program_id(0)
        head = gl.program_id(1)
        pid = slot * HV + head
    if first_segment is not None:
        gdc_launch_dependents()
        # one more program, the first to start, is none of a chunk
        if gl.program_id(0) == 0:
            if gl.program_id(1) == 0:
                plan_segments(
                    cu_seqlens,
                    checkpoint_offsets,
                    first_segment,
                    T,
                    N,
                    checkpoints,
                    room,
                    split,
                    batch_invariant,
                    COSTS,
                )
            return
    if pid == 0:
        # `recurrence` counts up from zero
        flag = gl.arange(0, FLAGS, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(arrived + flag, flag * 0)
    # volatile: else the compiler asks for these and `beta` after the copies, and they queue
    rate = decay_rate(A_log, head, volatile=True)
    if dt_bias is not None:
        channel = gl.arange(0, K, layout=gl.BlockedLayout([1], [32], [4], [0]))
        bias = gl.load(dt_bias + head * K + channel, volatile=True).to(gl.float32)
    integer: gl.constexpr = gl.int32 if checkpoint_offsets is None else gl.int64
    if cu_seqlens is None:
        bounds: gl.constexpr = None
        n = 0
        if slot >= slots:  # a division takes as long as dozens of other instructions
            n = slot // slots
    else:
        n, begin, end = find_sequence(cu_seqlens, checkpoint_offsets, checkpoints, slot, N, T)
        bounds = (begin.to(integer), end.to(integer))
    batch, start, count = chunk_of_sequence(
        cu_seqlens, checkpoint_offsets, checkpoints, n, slot.to(integer), slots, T, 64, integer, bounds
    )
    if count <= 0:
        return
    batch = batch.to(gl.int32)
    start = start.to(gl.int32)
    count = gl.minimum(count, 64).to(gl.int32)
    qk_head = head
    if group > 1:
        qk_head = head // group
    # these strides come in units of 8 elements, which tells the compiler that 16-byte copies are aligned
    q += (wide(batch, q_batch) + wide(start, q_token) + wide(qk_head, q_head)) * 8
    k += (wide(batch, k_batch) + wide(start, k_token) + wide(qk_head, k_head)) * 8
    g += (wide(batch, g_batch) + wide(start, g_token) + wide(head, g_head)) * 8
    beta += wide(batch, beta_batch) + wide(start, beta_token) + wide(head, beta_head)
    chunk = pid.to(gl.int64)
    tiles += chunk * ((3 * KH + 2) * 4096)
    decay += chunk * K

    # What is stored or loaded without a barrier between lies in separate allocations. Pairs of blocks, by halves of the
    # channels: k and q of the first block; q and k of the second, so that of two products one has the keys of both blocks
    # in their order.
    pair0_s = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], tile_s)
    pair1_s = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], tile_s)
    kq0_s = reinterpret(pair0_s, gl.bfloat16, [KH, 64, 64], tile_s)
    qk1_s = reinterpret(pair1_s, gl.bfloat16, [KH, 64, 64], tile_s)
    k0_s = reinterpret(pair0_s, gl.bfloat16, [2 * KH, 32, 64], tile_s)
    k1_s = reinterpret(pair1_s, gl.bfloat16, [2 * KH, 32, 64], tile_s)
    # right operands of the pairs, then of the inverse
    even_s = gl.allocate_shared_memory(gl.bfloat16, [128, 64], tile_s)
    odd_s = gl.allocate_shared_memory(gl.bfloat16, [128, 64], tile_s)
    even_half_s = reinterpret(even_s, gl.bfloat16, [4, 32, 64], tile_s)
    even_tile_s = reinterpret(even_s, gl.bfloat16, [2, 64, 64], tile_s)
    odd_tile_s = reinterpret(odd_s, gl.bfloat16, [2, 64, 64], tile_s)
    if not SAFE:
        # sums of log decays lie where the right operands will
        sums0_s = reinterpret(even_s, gl.float32, [2, 32, 64], rows_s)
        sums1_s = reinterpret(odd_s, gl.float32, [2, 32, 64], rows_s)
        odd_half_s = reinterpret(odd_s, gl.bfloat16, [4, 32, 64], tile_s)
    # totals of the cells, then -A's diagonal blocks, then I + n
    small_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile_s)
    total_s = reinterpret(small_s, gl.float32, [8, 256], flat_s)
    both_totals_s = reinterpret(small_s, gl.float32, [4, 512], flat_s)
    grow_s = gl.allocate_shared_memory(gl.float32, [KH, 64], flat_s)
    move_s = gl.allocate_shared_memory(gl.float32, [KH, 64], flat_s)
    norm0_s = gl.allocate_shared_memory(gl.float32, [64], flat_s)
    norm1_s = gl.allocate_shared_memory(gl.float32, [64], flat_s)
    beta_s = gl.allocate_shared_memory(gl.float32, [64], flat_s)
    unit_s = gl.allocate_shared_memory(gl.float32, [2, 32], flat_s)
    if dt_bias is not None:
        bias_s = gl.allocate_shared_memory(gl.float32, [KH, 64], flat_s)
    else:
        bias_s: gl.constexpr = None

    acc_row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc_l))
    strength = gl.load(beta + acc_row * beta_token, mask=acc_row < count, other=0.0, volatile=True).to(gl.float32)
    # the gate's input first: decays are worked out while keys and queries are on their way
    if g.dtype.element_ty == gl.bfloat16:
        g_s = reinterpret(odd_s, gl.bfloat16, [KH * 64, 64], rows_s)
        fetch(g_s, g, g_token, count, g + g_token * 256, g_token, count - 32, copy_l)
    else:
        fetch_block(reinterpret(even_s, gl.float32, [KH * 32, 64], rows_s), g, g_token, count, copy_l)
        fetch_block(
            reinterpret(odd_s, gl.float32, [KH * 32, 64], rows_s), g + g_token * 256, g_token, count - 32, copy_l
        )
    async_copy.commit_group()
    fetch(pair0_s, k, k_token, count, q, q_token, count, copy_l)
    fetch(pair1_s, q + q_token * 256, q_token, count - 32, k + k_token * 256, k_token, count - 32, copy_l)
    async_copy.commit_group()

    warp_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, cell))
    cells = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(1, cell)))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, cell)))
    # nothing decays past the end
    reinterpret(unit_s, gl.float32, [64], flat_s).store(
        gl.where(acc_row < count, gate_unit(rate, lower_bound, GATE), 0.0)
    )
    strength = gl.where(acc_row < count, write_strength(strength, BETA), 0.0)
    beta_s.store(strength)
    if dt_bias is not None:
        reinterpret(bias_s, gl.float32, [K], flat_s).store(gate_bias(bias, rate, GATE))

    async_copy.wait_group(1)

    if SAFE:
        fits: gl.constexpr = True
    else:
        lowest = gl.zeros((64,), gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(1, cell)))
        for h in range(KH):
            c0, c1, totals = half_sums(
                even_s, odd_s, bias_s, unit_s, h, rate, g.dtype.element_ty, GATE, SAFE, rows_s, cell
            )
            both_totals_s.index(h).reshape([2, 4, 64]).store(totals)
            for block in gl.static_range(2):
                _, middle, whole = block_sums(total_s.index(2 * h + block), cell)
                lowest = gl.minimum(lowest, gl.minimum(middle, whole - middle))
            sums0_s.index(h).reshape([4, 8, 64]).store(c0)
            sums1_s.index(h).reshape([4, 8, 64]).store(c1)
        async_copy.wait_group(0)
        norm0_s.reshape([4, 16]).store(row_factors(kq0_s, scale, True, L2NORM, square_l))
        norm1_s.reshape([4, 16]).store(row_factors(qk1_s, scale, False, L2NORM, square_l))
        # whether no half of a block decays by more than a float32 holds
        fits = gl.min(lowest, axis=0) >= LOWEST_HALF
    half_row = gl.arange(0, 64, layout=gl.SliceLayout(1, half_l))[:, None]
    half_column = gl.arange(0, 32, layout=gl.SliceLayout(0, half_l))[None, :]
    half_zero = gl.zeros((64, 32), gl.float32, layout=half_l)
    zero = gl.zeros((64, 64), gl.float32, layout=acc_l)
    if fits:
        for h in range(KH):
            if SAFE:
                c0, c1, totals = half_sums(
                    even_s, odd_s, bias_s, unit_s, h, rate, g.dtype.element_ty, GATE, SAFE, rows_s, cell
                )
                if h == 0:
                    async_copy.wait_group(0)
                    norm0_s.reshape([4, 16]).store(row_factors(kq0_s, scale, True, L2NORM, square_l))
                    norm1_s.reshape([4, 16]).store(row_factors(qk1_s, scale, False, L2NORM, square_l))
                both_totals_s.index(h).reshape([2, 4, 64]).store(totals)
            else:
                c0 = sums0_s.index(h).reshape([4, 8, 64]).load(cell)
                c1 = sums1_s.index(h).reshape([4, 8, 64]).load(cell)
            # before the barrier that the totals need, as the operands will take their place
            k0, q0 = load_pair(kq0_s.index(h), quad_l, cell)
            q1, k1 = load_pair(qk1_s.index(h), quad_l, cell)
            before0, middle0, whole0 = block_sums(total_s.index(2 * h), cell)
            before1, middle1, whole1 = block_sums(total_s.index(2 * h + 1), cell)
            gl.store(decay + h * 64 + position(column), exp2(whole0 + whole1))
            qg = tiles + (KH + h) * 4096
            kg = tiles + (2 * KH + h) * 4096
            norm_k0, norm_q0 = pair_factors(norm0_s, norm_l, cell)
            norm_q1, norm_k1 = pair_factors(norm1_s, norm_l, cell)

            # 16 rows decay by no more than float32 holds: one reference, its middle, serves all pairs of a block
            d = c0 + (before0 - middle0[None, :])[:, None, :]
            a = exp2(d)
            kn = k0.to(gl.float32) * norm_k0
            qa = q0.to(gl.float32) * norm_q0 * a
            kb = kn * exp2_negative(d)
            store_pair(kq0_s.index(h), kn * a, qa)
            even_half_s.index(2 * h).reshape([4, 8, 64]).store(kb.to(gl.bfloat16))
            grow = exp2(middle0)
            grow_s.index(h).store(-grow)
            store_cells(qg, qa * grow[None, None, :])
            # in two factors: each fits in fp32, their product need not
            kb = kb * exp2(whole0 - middle0)[None, None, :]
            store_cells(kg, kb * exp2(whole1)[None, None, :])
            moved = (kb * exp2(middle1)[None, None, :]).to(gl.bfloat16)

            d = c1 + (before1 - middle1[None, :])[:, None, :]
            a = exp2(d)
            kn = k1.to(gl.float32) * norm_k1
            qa = q1.to(gl.float32) * norm_q1 * a
            kb = kn * exp2_negative(d)
            store_pair(qk1_s.index(h), qa, kn * a)
            store_pair(odd_tile_s.index(h), moved, kb)
            grow = exp2(whole0 + middle1)
            move_s.index(h).store(exp2(whole0 - middle0 + middle1))
            store_cells(qg + 2048, qa * grow[None, None, :])
            store_cells(kg + 2048, kb * exp2(whole1 - middle1)[None, None, :])

        fence_async_shared()
        upper = half_zero
        lower = zero
        for part in gl.static_range(KH):
            upper = warpgroup_mma(
                kq0_s.index(part), even_half_s.index(2 * part).permute((1, 0)), upper, use_acc=part > 0, is_async=True
            )
            lower = warpgroup_mma(
                qk1_s.index(part), odd_tile_s.index(part).permute((1, 0)), lower, use_acc=part > 0, is_async=True
            )
        upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
        lower, right = column_halves(lower, half_l)
    else:
        # One block and half of the channels after the other: with more accumulators ptxas has no registers left for the
        # products and waits for each of them, in the path above, too (C7511).
        in_block = half_row % 32
        same8 = in_block // 8 == half_column // 8
        same16 = in_block // 16 == half_column // 16
        lower = half_zero
        for block in gl.static_range(2):
            within = half_zero
            for h in range(KH):
                if block == 0:
                    c = sums0_s.index(h).reshape([4, 8, 64]).load(cell)
                    kn, qn = load_pair(kq0_s.index(h), quad_l, cell)
                    norm_k, norm_q = pair_factors(norm0_s, norm_l, cell)
                else:
                    c = sums1_s.index(h).reshape([4, 8, 64]).load(cell)
                    qn, kn = load_pair(qk1_s.index(h), quad_l, cell)
                    norm_q, norm_k = pair_factors(norm1_s, norm_l, cell)
                total = gl.reduce(c, 1, _second)
                before, middle, whole = block_sums(total_s.index(2 * h + block), cell)
                _, _, other = block_sums(total_s.index(2 * h + 1 - block), cell)
                kn = kn.to(gl.float32) * norm_k
                qn = qn.to(gl.float32) * norm_q
                # a cell decays by at most exp(-80) to either side of its middle
                mid = cell_middle(c, cell)
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
                    store_pair(kq0_s.index(h), kn * a, qn * a)
                    store_pair(even_tile_s.index(h), kn * b, k_down)
                    store_cells(qg, q_up)
                    store_cells(kg, k_down * exp2(other)[None, None, :])
                    gl.store(decay + h * 64 + position(column), exp2(whole + other))
                    grow_s.index(h).store(whole * 0.0 - 1.0)
                    move_s.index(h).store(exp2(whole))
                else:
                    store_pair(qk1_s.index(h), qn * a, kn * a)
                    odd_half_s.index(2 * h).reshape([4, 8, 64]).store((kn * b).to(gl.bfloat16))
                    store_cells(qg, q_up * exp2(other)[None, None, :])
                    store_cells(kg, k_down)
                fence_async_shared()
                pair = kq0_s.index(h) if block == 0 else qk1_s.index(h)
                near_k = even_half_s.index(2 * h) if block == 0 else odd_half_s.index(2 * h)
                pair_k = (k0_s.index(2 * h) if block == 0 else k1_s.index(2 * h + 1)).permute((1, 0))
                near = warpgroup_mma(pair, near_k.permute((1, 0)), half_zero, use_acc=False, is_async=True)
                # pairs of the two halves of 16 and of 32 rows meet at the boundary between the halves: one factor a row
                second = cells % 2 == 1
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
                second = cells >= 2
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
                within += gl.where(same16, 0.0, sixteen)
                # anew: kept until here, it would cost registers that ptxas wants for the products
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
        for part in gl.static_range(KH):
            far_k = even_half_s.index(2 * part + 1).permute((1, 0))
            lower = warpgroup_mma(qk1_s.index(part), far_k, lower, is_async=True)
        lower = warpgroup_mma_wait(0, deps=[lower])

    # rows of `upper`: k, then q of the first block, by its columns; of `lower` and `right`: q, then k of the second block, by
    # the columns of the first and of the second
    first = half_row < 32
    left_A = gl.where(half_row > half_column, gl.where(first, upper, lower), 0.0)
    right_A = gl.where(half_row > half_column + 32, right, 0.0)
    minus_A = beside(left_A, right_A, acc_l) * -strength[:, None]
    query = (half_row + 32) % 64
    left_Aqk = gl.where(query >= half_column, gl.where(first, lower, upper), 0.0)
    right_Aqk = gl.where(query >= half_column + 32, right, 0.0)
    store_tile(tiles + (3 * KH + 1) * 4096, beside(left_Aqk, right_Aqk, acc_l), 32)

    right_s = reinterpret(odd_s, gl.float32, [64, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    diagonal_s = reinterpret(small_s, gl.float32, [1024], flat_s)
    X = block_inverses(minus_A, right_s, diagonal_s, rows_l)

    # With D the inverses of the diagonal blocks of 16 and n = -D (A off the diagonal), n^4 = 0 and
    # (I + A)^-1 = (I + n^2) Y with Y = (I + n) D.
    store_inverse_parts(X, odd_s, even_s, small_s)
    D_high = odd_tile_s.index(0)
    D_low = odd_tile_s.index(1)
    n_high = even_tile_s.index(0)
    n_low = even_tile_s.index(1)
    fence_async_shared()
    Y = product3(small_s, n_low, D_high, D_low, zero, False)
    # n^2 has nothing right of column 32
    n2 = product3(n_high, n_low, n_high.slice(0, 32, 1), n_low.slice(0, 32, 1), half_zero, False)
    Y, n2 = warpgroup_mma_wait(0, deps=[Y, n2])
    store_parts(odd_s, Y.reshape([4, 2, 8, 64]))
    fence_async_shared()
    n2_high, n2_low = split_high_low(n2)
    n2_high = gl.convert_layout(n2_high, dot_l, assert_trivial=True)
    n2_low = gl.convert_layout(n2_low, dot_l, assert_trivial=True)
    X = product3(n2_high, n2_low, D_high.slice(0, 32), D_low.slice(0, 32), Y, True)
    X, n2_high, n2_low = warpgroup_mma_wait(0, deps=[X, n2_high, n2_low])

    if solved is not None:
        # by token, as the operator of the backward pass has it
        own = (wide(batch, T) + (start + acc_row)) * HV + head
        acc_column = gl.arange(0, 64, layout=gl.SliceLayout(0, acc_l))
        gl.store(solved + own[:, None] * 64 + acc_column[None, :], round_pairs(X), mask=(acc_row < count)[:, None])
    weights = X * beta_s.load(gl.SliceLayout(0, acc_l))[None, :]
    # Rounded to nearest, not cut off: `recurrence` multiplies v with the high part alone. Here the low part counts too: rows
    # of weights alternate in sign where keys repeat, and rounding them once would leave more error than result.
    high = round_pairs(weights)
    low = (weights - high.to(gl.float32)).to(gl.bfloat16)
    store_tile(tiles + 3 * KH * 4096, high, 0)
    high0, high1 = column_halves(high, dot_l)
    low0, low1 = column_halves(low, dot_l)
    # relative to the second block's reference first, then moved to the first block's
    w = weighted(high1, low1, k1_s.index(1), zero, False)
    if KH == 2:
        w_right = weighted(high1, low1, k1_s.index(3), zero, False)
        w, w_right, high1, low1 = warpgroup_mma_wait(0, deps=[w, w_right, high1, low1])
        w_right *= move_s.index(1).load(gl.SliceLayout(0, acc_l))[None, :]
    else:
        w, high1, low1 = warpgroup_mma_wait(0, deps=[w, high1, low1])
    w *= move_s.index(0).load(gl.SliceLayout(0, acc_l))[None, :]
    w = weighted(high0, low0, k0_s.index(0), w, True)
    if KH == 2:
        w_right = weighted(high0, low0, k0_s.index(2), w_right, True)
        w, w_right, high0, low0 = warpgroup_mma_wait(0, deps=[w, w_right, high0, low0])
        store_tile(tiles + 4096, w_right * grow_s.index(1).load(gl.SliceLayout(0, acc_l))[None, :], 0)
    else:
        w, high0, low0 = warpgroup_mma_wait(0, deps=[w, high0, low0])
    store_tile(tiles, w * grow_s.index(0).load(gl.SliceLayout(0, acc_l))[None, :], 0)
