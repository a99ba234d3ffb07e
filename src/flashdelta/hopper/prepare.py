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

from ..triton import common
from ..triton.common import L2_EPS
from .arithmetic import (
    LOWEST,
    LOWEST_HALF,
    column_halves,
    exp2,
    exp2_negative,
    gate,
    gate_bias,
    gate_unit,
    product3,
    split_high_low,
    write_strength,
)
from .compat import copy_async, reinterpret

find_chunk = gluon.jit(common.find_chunk.fn)
decay_rate = gluon.jit(common.decay_rate.fn)


_STRIDES = [f"{x}_{dim}" for x in ("q", "k", "g", "beta") for dim in ("batch", "token", "head")]
SCALARS = ("scale", "lower_bound", "T", "N", "H", "HV", "slots", "checkpoints", *_STRIDES)
"""Arguments whose values leave the machine code as it is."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _second(a, b):
    return b


@gluon.jit
def wide(a, b):
    """The 64-bit product of two 32-bit integers."""
    return a.to(gl.int64) * b.to(gl.int64)


@gluon.jit
def inverse_norms(pair_s, square_l: gl.constexpr, KH: gl.constexpr, block: gl.constexpr):
    """`1 / sqrt(sum x^2 + eps)` of the 64 rows of a block's pair of tiles: the diagonal of their Gram matrix, which is
    computed by blocks of 16 from one set of registers for both operands."""
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=square_l, k_width=2)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=square_l, k_width=2)
    gram = gl.zeros((4, 16, 16), gl.float32, layout=square_l)
    for h in gl.static_range(KH):
        x = pair_s.index(2 * h + block).reshape([4, 16, 64]).load(left_l)
        gram = mma_v2(x, gl.convert_layout(x.permute((0, 2, 1)), right_l), gram)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, square_l)))
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, square_l)))
    total = gl.sum(gl.where(i[None, :, None] == j[None, None, :], gram, 0.0), axis=2)
    return gl.rsqrt(total + L2_EPS)


@gluon.jit
def row_norms(norm_s, L2NORM: gl.constexpr, cell: gl.constexpr):
    """The factors `[4, 8, 1]` that normalise a block's rows."""
    if L2NORM:
        return norm_s.reshape([4, 8]).load(gl.SliceLayout(2, cell))[:, :, None]
    return gl.full((4, 8, 1), 1.0, gl.float32, layout=cell)


@gluon.jit
def channel_bias(dt_bias, at, rate, GATE: gl.constexpr):
    """`dt_bias` of the 64 channels `at`, as `gate` takes it, `[1, 1, 64]`; 0 without one."""
    bias = 0.0
    if dt_bias is not None:
        bias = gate_bias(gl.load(dt_bias + at).to(gl.float32), rate, GATE)[None, None, :]
    return bias


@gluon.jit
def decay_steps(tile, bias, rate, unit, GATE: gl.constexpr, SAFE: gl.constexpr, cell: gl.constexpr):
    """Log2 decays `[4, 8, 64]` of a block's rows."""
    step = gate(tile.reshape([4, 8, 64]).load(cell).to(gl.float32), bias, rate, GATE) * unit
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
def block_decays(tile, total_s, bias, rate, unit, GATE: gl.constexpr, SAFE: gl.constexpr, cell: gl.constexpr):
    """`cell_sums` of a block's rows; the totals go to `total_s`."""
    c, total = cell_sums(decay_steps(tile, bias, rate, unit, GATE, SAFE, cell), cell)
    total_s.reshape([4, 64]).store(total)
    return c


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
def operands_from(d, k_s, q_s, right_s, norm_k, norm_q, cell: gl.constexpr):
    """For distances `d` of a block's rows to their reference: normalised keys and queries times `exp(d)` in place of the raw
    ones, keys times `exp(-d)` to `right_s`. Returns the queries and the last in fp32."""
    k_tile = k_s.reshape([4, 8, 64])
    q_tile = q_s.reshape([4, 8, 64])
    kn = k_tile.load(cell).to(gl.float32) * norm_k
    qn = q_tile.load(cell).to(gl.float32) * norm_q
    a = exp2(d)
    qa = qn * a
    kb = kn * exp2_negative(d)
    k_tile.store((kn * a).to(gl.bfloat16))
    q_tile.store(qa.to(gl.bfloat16))
    right_s.reshape([4, 8, 64]).store(kb.to(gl.bfloat16))
    return qa, kb


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
def block_inverses(minus_A, b_s, diagonal_s, rows_l: gl.constexpr):
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
    right_s = reinterpret(b_s, gl.float32, [64, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    right_s.store(gl.where(i // 16 == j // 16, gl.where(i == j, 1.0, 0.0), minus_A))
    X = right_s.reshape([4, 2, 8, 64]).load(rows_l)
    low, high = gl.split(X.permute((0, 2, 3, 1)))
    lines_s = reinterpret(diagonal_s, gl.float32, [32, 4, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    low, high = substitute(low, high, lines_s)
    return gl.convert_layout(gl.join(low, high).permute((0, 3, 1, 2)), rows_l, assert_trivial=True)


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
    scale: gl.float32,
    lower_bound: gl.float32,
    T: gl.int32,
    N: gl.int32,
    H: gl.int32,
    HV: gl.int32,
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
    K: gl.constexpr,
    GATE: gl.constexpr,
    SAFE: gl.constexpr,
    BETA: gl.constexpr,
    L2NORM: gl.constexpr,
):
    KH: gl.constexpr = K // 64
    g_dtype: gl.constexpr = g.dtype.element_ty
    # [warp, row, channel] of a cell per thread
    cell: gl.constexpr = gl.BlockedLayout([1, 8, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    acc_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    half_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    square_l: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
    dot_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_l, k_width=2)
    rows_l: gl.constexpr = gl.BlockedLayout([1, 2, 8, 2], [1, 1, 1, 32], [4, 1, 1, 1], [3, 2, 1, 0])
    tile_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    gate_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 64], g_dtype)
    flat_s: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    pid = gl.program_id(0)
    head = pid % HV
    slot = pid // HV
    # 64-bit divisions are slow
    chunk_slot = slot if checkpoint_offsets is None else slot.to(gl.int64)
    batch, start, count = find_chunk(cu_seqlens, checkpoint_offsets, checkpoints, chunk_slot, slots, N, T, 64)
    if count <= 0:
        return
    batch = batch.to(gl.int32)
    start = start.to(gl.int32)
    count = gl.minimum(count, 64).to(gl.int32)
    qk_head = head // (HV // H)
    # these strides come in units of 8 elements, which tells the compiler that 16-byte copies are aligned
    q += (wide(batch, q_batch) + wide(start, q_token) + wide(qk_head, q_head)) * 8
    k += (wide(batch, k_batch) + wide(start, k_token) + wide(qk_head, k_head)) * 8
    g += (wide(batch, g_batch) + wide(start, g_token) + wide(head, g_head)) * 8
    beta += wide(batch, beta_batch) + wide(start, beta_token) + wide(head, beta_head)
    chunk = pid.to(gl.int64)
    tiles += chunk * ((3 * KH + 2) * 4096)
    decay += chunk * K

    # per half of the channels: k and q of the first block, q and k of the second, so that of two products one has the keys
    # of both blocks in their order
    kq_s = gl.allocate_shared_memory(gl.bfloat16, [4 * KH, 32, 64], tile_s)
    pair_s = reinterpret(kq_s, gl.bfloat16, [2 * KH, 64, 64], tile_s)
    b_s = gl.allocate_shared_memory(gl.bfloat16, [8, 32, 64], tile_s)
    square_s = reinterpret(b_s, gl.bfloat16, [4, 64, 64], tile_s)
    # the gate's input lies where the right operands will: that space is not needed before
    G: gl.constexpr = 4 if g_dtype == gl.bfloat16 else 2
    g_s = reinterpret(b_s, g_dtype, [2 * G, 32, 64], gate_s)
    if not SAFE:
        # sums of log decays take the place of the gate's input, and the exact path's operands that of the sums
        sums_s = reinterpret(b_s, gl.float32, [4, 32, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        level_s = gl.allocate_shared_memory(gl.bfloat16, [8, 32, 64], tile_s)
        level_pair_s = reinterpret(level_s, gl.bfloat16, [4, 64, 64], tile_s)
    total_s = gl.allocate_shared_memory(gl.float32, [2 * KH, 256], flat_s)
    grow_s = gl.allocate_shared_memory(gl.float32, [2 * KH, 64], flat_s)
    norm_s = gl.allocate_shared_memory(gl.float32, [4, 32], flat_s)
    pair_norm_s = reinterpret(norm_s, gl.float32, [2, 64], flat_s)
    beta_s = gl.allocate_shared_memory(gl.float32, [64], flat_s)
    diagonal_s = gl.allocate_shared_memory(gl.float32, [1024], flat_s)

    copy_row = gl.arange(0, 32, layout=gl.SliceLayout(1, copy_l))
    copy_column = gl.arange(0, 64, layout=gl.SliceLayout(0, copy_l))
    for block in gl.static_range(2):
        token = copy_row + block * 32
        inside = (token < count)[:, None]
        from_k = k + (token[:, None] * (k_token * 8) + copy_column[None, :])
        from_q = q + (token[:, None] * (q_token * 8) + copy_column[None, :])
        from_g = g + (token[:, None] * (g_token * 8) + copy_column[None, :])
        for side in gl.static_range(KH):
            copy_async(kq_s.index(4 * side + 3 * block), from_k + side * 64, mask=inside)
            copy_async(kq_s.index(4 * side + 1 + block), from_q + side * 64, mask=inside)
            copy_async(g_s.index(G * side + block), from_g + side * 64, mask=inside)
    async_copy.commit_group()

    row_l: gl.constexpr = gl.SliceLayout(2, cell)
    warp_l: gl.constexpr = gl.SliceLayout(1, row_l)
    cells = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(1, cell)))
    row = (gl.arange(0, 4, layout=warp_l)[:, None] * 8 + gl.arange(0, 8, layout=gl.SliceLayout(0, row_l))[None, :])[
        :, :, None
    ]
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, cell)))
    here = row * 64 + column[None, None, :]
    rate = decay_rate(A_log, head)
    # nothing decays past the end
    unit0 = gl.where(row < count, gate_unit(rate, lower_bound, GATE), 0.0)
    unit1 = gl.where(row + 32 < count, gate_unit(rate, lower_bound, GATE), 0.0)
    acc_row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc_l))
    acc_column = gl.arange(0, 64, layout=gl.SliceLayout(0, acc_l))
    strength = gl.load(beta + acc_row * beta_token, mask=acc_row < count, other=0.0).to(gl.float32)
    strength = gl.where(acc_row < count, write_strength(strength, BETA), 0.0)
    beta_s.store(strength)

    async_copy.wait_group(0)
    if L2NORM:
        pair_norm_s.index(0).reshape([4, 16]).store(inverse_norms(pair_s, square_l, KH, 0))
        pair_norm_s.index(1).reshape([4, 16]).store(inverse_norms(pair_s, square_l, KH, 1))

    zero = gl.zeros((64, 64), gl.float32, layout=acc_l)
    if SAFE:
        fits: gl.constexpr = True
    else:
        lowest = gl.zeros((64,), gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(1, cell)))
        for h in range(KH):
            bias = channel_bias(dt_bias, head * K + h * 64 + column, rate, GATE)
            c0 = block_decays(g_s.index(G * h), total_s.index(2 * h), bias, rate, unit0, GATE, SAFE, cell)
            c1 = block_decays(g_s.index(G * h + 1), total_s.index(2 * h + 1), bias, rate, unit1, GATE, SAFE, cell)
            for block in gl.static_range(2):
                _, middle, whole = block_sums(total_s.index(2 * h + block), cell)
                lowest = gl.minimum(lowest, gl.minimum(middle, whole - middle))
            sums_s.index(2 * h).reshape([4, 8, 64]).store(c0)
            sums_s.index(2 * h + 1).reshape([4, 8, 64]).store(c1)
        # whether no half of a block decays by more than a float32 holds
        fits = gl.min(lowest, axis=0) >= LOWEST_HALF
    if fits:
        for h in range(KH):
            if SAFE:
                bias = channel_bias(dt_bias, head * K + h * 64 + column, rate, GATE)
                c0 = block_decays(g_s.index(G * h), total_s.index(2 * h), bias, rate, unit0, GATE, SAFE, cell)
                c1 = block_decays(g_s.index(G * h + 1), total_s.index(2 * h + 1), bias, rate, unit1, GATE, SAFE, cell)
            else:
                c0 = sums_s.index(2 * h).reshape([4, 8, 64]).load(cell)
                c1 = sums_s.index(2 * h + 1).reshape([4, 8, 64]).load(cell)
            before0, middle0, whole0 = block_sums(total_s.index(2 * h), cell)
            before1, middle1, whole1 = block_sums(total_s.index(2 * h + 1), cell)
            gl.store(decay + h * 64 + column, exp2(whole0 + whole1))
            qg = tiles + (KH + h) * 4096 + here
            kg = tiles + (2 * KH + h) * 4096 + here

            # 16 rows decay by no more than float32 holds: one reference, its middle, serves all pairs of a block
            norm_k = row_norms(norm_s.index(0), L2NORM, cell)
            norm_q = row_norms(norm_s.index(1), L2NORM, cell) * scale
            d = c0 + (before0 - middle0[None, :])[:, None, :]
            qa, kb = operands_from(d, kq_s.index(4 * h), kq_s.index(4 * h + 1), b_s.index(4 * h), norm_k, norm_q, cell)
            grow = exp2(middle0)
            grow_s.index(2 * h).store(-grow)
            # in two factors: each fits in fp32, their product need not
            kb = kb * exp2(whole0 - middle0)[None, None, :]
            b_s.index(4 * h + 2).reshape([4, 8, 64]).store((kb * exp2(middle1)[None, None, :]).to(gl.bfloat16))
            gl.store(qg, (qa * grow[None, None, :]).to(gl.bfloat16))
            gl.store(kg, (kb * exp2(whole1)[None, None, :]).to(gl.bfloat16))

            norm_k = row_norms(norm_s.index(3), L2NORM, cell)
            norm_q = row_norms(norm_s.index(2), L2NORM, cell) * scale
            d = c1 + (before1 - middle1[None, :])[:, None, :]
            qa, kb = operands_from(
                d, kq_s.index(4 * h + 3), kq_s.index(4 * h + 2), b_s.index(4 * h + 3), norm_k, norm_q, cell
            )
            grow = exp2(whole0 + middle1)
            grow_s.index(2 * h + 1).store(-grow)
            gl.store(qg + 2048, (qa * grow[None, None, :]).to(gl.bfloat16))
            gl.store(kg + 2048, (kb * exp2(whole1 - middle1)[None, None, :]).to(gl.bfloat16))

        fence_async_shared()
        upper = zero
        lower = zero
        for side in gl.static_range(KH):
            # the second 32 rows of this one are anything: columns that are masked
            first = square_s.index(2 * side).permute((1, 0))
            second = square_s.index(2 * side + 1).permute((1, 0))
            upper = warpgroup_mma(pair_s.index(2 * side), first, upper, use_acc=side > 0, is_async=True)
            lower = warpgroup_mma(pair_s.index(2 * side + 1), second, lower, use_acc=side > 0, is_async=True)
        upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    else:
        half_zero = gl.zeros((64, 32), gl.float32, layout=half_l)
        half_row = (gl.arange(0, 64, layout=gl.SliceLayout(1, half_l)) % 32)[:, None]
        half_column = gl.arange(0, 32, layout=gl.SliceLayout(0, half_l))[None, :]
        same8 = half_row // 8 == half_column // 8
        same16 = half_row // 16 == half_column // 16
        near0 = half_zero
        near1 = half_zero
        eight0 = half_zero
        eight1 = half_zero
        sixteen0 = half_zero
        sixteen1 = half_zero
        far = half_zero
        for h in range(KH):
            c0 = sums_s.index(2 * h).reshape([4, 8, 64]).load(cell)
            c1 = sums_s.index(2 * h + 1).reshape([4, 8, 64]).load(cell)
            for block in gl.static_range(2):
                c = c0 if block == 0 else c1
                total = gl.reduce(c, 1, _second)
                before, middle, whole = block_sums(total_s.index(2 * h + block), cell)
                _, _, other = block_sums(total_s.index(2 * h + 1 - block), cell)
                k_tile = kq_s.index(4 * h + 3 * block).reshape([4, 8, 64])
                q_tile = kq_s.index(4 * h + 1 + block).reshape([4, 8, 64])
                kn = k_tile.load(cell).to(gl.float32) * row_norms(norm_s.index(3 * block), L2NORM, cell)
                qn = q_tile.load(cell).to(gl.float32) * (row_norms(norm_s.index(1 + block), L2NORM, cell) * scale)
                # a cell decays by at most exp(-80) to either side of its middle
                mid = cell_middle(c, cell)
                d = c - mid[:, None, :]
                a = exp2(d)
                b = exp2_negative(d)
                k_tile.store((kn * a).to(gl.bfloat16))
                q_tile.store((qn * a).to(gl.bfloat16))
                b_s.index(4 * h + block).reshape([4, 8, 64]).store((kn * b).to(gl.bfloat16))
                # pairs of the two halves of 16 and of 32 rows meet at the boundary between the halves: one factor a row
                second = cells % 2 == 1
                half = exp2(gl.where(second[:, None], mid, total - mid))
                factor = gl.where(gl.convert_layout(second, warp_l)[:, None, None], a, b) * half[:, None, :]
                level_s.index(5 * block).reshape([4, 8, 64]).store((kn * factor).to(gl.bfloat16))
                level_s.index(1 + 3 * block).reshape([4, 8, 64]).store((qn * factor).to(gl.bfloat16))
                second = cells >= 2
                half = before + mid - middle[None, :]
                half = exp2(gl.where(second[:, None], half, -half))
                factor = gl.where(gl.convert_layout(second, warp_l)[:, None, None], a, b) * half[:, None, :]
                level_s.index(2 + 5 * block).reshape([4, 8, 64]).store((kn * factor).to(gl.bfloat16))
                level_s.index(3 + 3 * block).reshape([4, 8, 64]).store((qn * factor).to(gl.bfloat16))

                up = a * exp2(before + mid)[:, None, :]
                down = b * exp2(whole[None, :] - before - mid)[:, None, :]
                qg = tiles + (KH + h) * 4096 + block * 2048 + here
                kg = tiles + (2 * KH + h) * 4096 + block * 2048 + here
                q_up = qn * up
                k_down = kn * down
                if block == 0:
                    k0_up = (kn * up).to(gl.bfloat16)
                    b_s.index(4 * h + 2).reshape([4, 8, 64]).store(k_down.to(gl.bfloat16))
                    gl.store(qg, q_up.to(gl.bfloat16))
                    gl.store(kg, (k_down * exp2(other)[None, None, :]).to(gl.bfloat16))
                    gl.store(decay + h * 64 + column, exp2(whole + other))
                    grow_s.index(2 * h).store(whole * 0.0 - 1.0)
                    grow_s.index(2 * h + 1).store(-exp2(whole))
                else:
                    k1_up = (kn * up).to(gl.bfloat16)
                    q1_up = q_up.to(gl.bfloat16)
                    gl.store(qg, (q_up * exp2(other)[None, None, :]).to(gl.bfloat16))
                    gl.store(kg, k_down.to(gl.bfloat16))
            fence_async_shared()
            near0 = warpgroup_mma(pair_s.index(2 * h), b_s.index(4 * h).permute((1, 0)), near0, is_async=True)
            near1 = warpgroup_mma(pair_s.index(2 * h + 1), b_s.index(4 * h + 1).permute((1, 0)), near1, is_async=True)
            eight0 = warpgroup_mma(level_pair_s.index(0), level_s.index(0).permute((1, 0)), eight0, is_async=True)
            sixteen0 = warpgroup_mma(level_pair_s.index(1), level_s.index(2).permute((1, 0)), sixteen0, is_async=True)
            eight1 = warpgroup_mma(level_pair_s.index(2), level_s.index(5).permute((1, 0)), eight1, is_async=True)
            sixteen1 = warpgroup_mma(level_pair_s.index(3), level_s.index(7).permute((1, 0)), sixteen1, is_async=True)
            near0, near1, eight0, eight1, sixteen0, sixteen1 = warpgroup_mma_wait(
                0, deps=[near0, near1, eight0, eight1, sixteen0, sixteen1]
            )
            kq_s.index(4 * h).reshape([4, 8, 64]).store(k0_up)
            kq_s.index(4 * h + 2).reshape([4, 8, 64]).store(q1_up)
            kq_s.index(4 * h + 3).reshape([4, 8, 64]).store(k1_up)
        fence_async_shared()
        for part in gl.static_range(KH):
            shared_k = b_s.index(4 * part + 2).permute((1, 0))
            far = warpgroup_mma(pair_s.index(2 * part + 1), shared_k, far, is_async=True)
        far = warpgroup_mma_wait(0, deps=[far])
        pairs0 = gl.where(same8, near0, gl.where(same16, eight0, sixteen0))
        pairs1 = gl.where(same8, near1, gl.where(same16, eight1, sixteen1))
        upper = beside(pairs0, pairs0, acc_l)
        lower = beside(far, pairs1, acc_l)

    # rows of `upper`: k, then q of the first block; of `lower`: q, then k of the second
    i = acc_row[:, None]
    j = acc_column[None, :]
    minus_A = gl.where(i > j, gl.where(i < 32, upper, lower), 0.0) * -strength[:, None]
    query = (i + 32) % 64
    Aqk = gl.where(query >= j, gl.where(i < 32, lower, upper), 0.0)

    # the operands of these products are not needed any more, but for the keys
    stage = square_s.index(3)
    stage.store(Aqk.to(gl.bfloat16))
    X = block_inverses(minus_A, b_s, diagonal_s, rows_l)
    out_row = gl.arange(0, 64, layout=gl.SliceLayout(1, copy_l))
    out = out_row[:, None] * 64 + copy_column[None, :]
    gl.store(tiles + (3 * KH + 1) * 4096 + (out + 2048) % 4096, stage.load(copy_l))

    # With D the inverses of the diagonal blocks of 16 and n = -D (A off the diagonal), n^4 = 0 and
    # (I + A)^-1 = (I + n^2) Y with Y = D + n D.
    D_high = square_s.index(0)
    D_low = square_s.index(1)
    n_high = square_s.index(2)
    n_low = square_s.index(3)
    block16 = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, rows_l))))[
        :, None, None, None
    ]
    column64 = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, rows_l))))[
        None, None, None, :
    ]
    high, low = split_high_low(gl.where(column64 // 16 == block16, X, 0.0))
    D_high.reshape([4, 2, 8, 64]).store(high)
    D_low.reshape([4, 2, 8, 64]).store(low)
    high, low = split_high_low(gl.where(column64 // 16 < block16, X, 0.0))
    n_high.reshape([4, 2, 8, 64]).store(high)
    n_low.reshape([4, 2, 8, 64]).store(low)
    fence_async_shared()
    D = D_high.load(acc_l).to(gl.float32) + D_low.load(acc_l).to(gl.float32)
    Y = product3(n_high, n_low, D_high, D_low, D, True)
    # n^2 has nothing right of column 32
    n2 = gl.zeros((64, 32), gl.float32, layout=half_l)
    n2 = product3(n_high, n_low, n_high.slice(0, 32, 1), n_low.slice(0, 32, 1), n2, False)
    Y, n2 = warpgroup_mma_wait(0, deps=[Y, n2])
    high, low = split_high_low(Y)
    D_high.store(high)
    D_low.store(low)
    fence_async_shared()
    n2_high, n2_low = split_high_low(n2)
    n2_high = gl.convert_layout(n2_high, dot_l, assert_trivial=True)
    n2_low = gl.convert_layout(n2_low, dot_l, assert_trivial=True)
    X = product3(n2_high, n2_low, D_high.slice(0, 32), D_low.slice(0, 32), Y, True)
    X, n2_high, n2_low = warpgroup_mma_wait(0, deps=[X, n2_high, n2_low])

    weights = X * beta_s.load(gl.SliceLayout(0, acc_l))[None, :]
    # Rounded to nearest, not cut off: `recurrence` multiplies v with the high part alone. Here the low part counts too: rows
    # of weights alternate in sign where keys repeat, and rounding them once would leave more error than result.
    high = weights.to(gl.bfloat16)
    low = (weights - high.to(gl.float32)).to(gl.bfloat16)
    n_high.store(high)
    gl.store(tiles + 3 * KH * 4096 + out, n_high.load(copy_l))
    high0, high1 = column_halves(high, dot_l)
    low0, low1 = column_halves(low, dot_l)
    for side in gl.static_range(KH):
        w0 = warpgroup_mma(high0, kq_s.index(4 * side), zero, use_acc=False, is_async=True)
        w0 = warpgroup_mma(low0, kq_s.index(4 * side), w0, is_async=True)
        w1 = warpgroup_mma(high1, kq_s.index(4 * side + 3), zero, use_acc=False, is_async=True)
        w1 = warpgroup_mma(low1, kq_s.index(4 * side + 3), w1, is_async=True)
        w0, w1, high0, high1, low0, low1 = warpgroup_mma_wait(0, deps=[w0, w1, high0, high1, low0, low1])
        grow0 = grow_s.index(2 * side).load(gl.SliceLayout(0, acc_l))[None, :]
        grow1 = grow_s.index(2 * side + 1).load(gl.SliceLayout(0, acc_l))[None, :]
        stage = square_s.index(side)
        stage.store((w0 * grow0 + w1 * grow1).to(gl.bfloat16))
        gl.store(tiles + side * 4096 + out, stage.load(copy_l))
