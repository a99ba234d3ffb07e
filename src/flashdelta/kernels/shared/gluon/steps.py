"""A chunk of 64 tokens as two steps of 32: how it lies in registers and shared memory, norms, sums of log decays, inverses."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..norms import L2_EPS
from .compat import copy_async, reinterpret
from .math import gate, last, pick, split_high_low, unbounded_gate, widen

ACC_HALF = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
"""Accumulators `[64, 32]`."""
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Rows of bf16 as four warps copy them, 16 bytes per thread."""
GRAM = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]))
"""Accumulators `[4, 16, 16]`, one per warp."""
TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SOLVE = gl.constexpr(gl.BlockedLayout([1, 16, 1], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
"""`[16 rows of a chunk, row, column of their step]`: a warp has 16 rows, a lane a column."""
SIDES = gl.constexpr(gl.BlockedLayout([1, 16, 1, 1], [1, 1, 2, 16], [4, 1, 1, 1], [3, 2, 1, 0]))
"""The same with the columns as `[2, 16]`."""
STEPS_GRAM = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2, 1], instr_shape=[1, 16, 8]))
"""Accumulators `[2, 32, 16]` of both steps, 16 rows per warp."""
SQUARE = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 2, [1, 0]))
STEP = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))


@gluon.jit
def load_bias(dt_bias, head, K):
    """The gate's bias of a value head, `[K]`. Volatile, as the rate is."""
    channel = gl.arange(0, K, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(dt_bias + head * K + channel, volatile=True).to(gl.float32)


@gluon.jit
def copy_tokens(shared, x, x_token, count, TOKENS):
    """Starts the copy of `TOKENS` rows, all channels, to `shared [halves * TOKENS, 64]`. Zeros from `count` on."""
    row = gl.arange(0, shared.shape[0], layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    at = x + ((row % TOKENS) * (x_token * 8) + row // TOKENS * 64)
    copy_async(shared, at[:, None] + column[None, :], mask=(row % TOKENS < count)[:, None])


@gluon.jit
def pair_norm_factors(pair_s, scale, KEYS_FIRST, L2NORM):
    """Factors `[4, 16]` of the 64 rows of a pair of blocks `[KH, 64, 64]`: `1 / sqrt(sum x^2 + eps)` or 1, for queries times
    `scale`. The sums are the diagonal of the Gram matrix, by blocks of 16 rows."""
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAM, k_width=2)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=GRAM, k_width=2)
    row_l: gl.constexpr = gl.SliceLayout(2, GRAM)
    if L2NORM:
        KH: gl.constexpr = pair_s.shape[0]
        gram = gl.zeros((4, 16, 16), gl.float32, layout=GRAM)
        for h in gl.static_range(KH):
            rows = pair_s.index(h).reshape([4, 16, 64])
            # the right operand is loaded, too: taken from the left one's registers, each would have to be moved
            gram = mma_v2(rows.load(left_l), rows.permute((0, 2, 1)).load(right_l), gram)
        i = gl.arange(0, 16, layout=gl.SliceLayout(0, row_l))
        j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, GRAM)))
        total = gl.sum(gl.where(i[None, :, None] == j[None, None, :], gram, 0.0), axis=2)
        factor = gl.rsqrt(total + L2_EPS)
    else:
        factor = gl.full((4, 16), 1.0, gl.float32, layout=row_l)
    tile = gl.arange(0, 4, layout=gl.SliceLayout(1, row_l))[:, None]
    return gl.where((tile < 2) == KEYS_FIRST, factor, factor * scale)


@gluon.jit
def running_sums(step):
    """Inclusive sums of log2 decays `step [4, R, 64]` along the rows, of which a thread has all in 2 channels, and the totals
    `[4, 64]`."""
    R: gl.constexpr = step.shape[1]
    layout: gl.constexpr = step.type.layout
    flat_l: gl.constexpr = gl.BlockedLayout([R, 2], [1, 32], [1, 4], [1, 0])
    flat = gl.convert_layout(step.permute((1, 0, 2)).reshape([R, 256]), flat_l, assert_trivial=True)
    c = gl.associative_scan(flat, 0, add)
    total = gl.convert_layout(gl.reduce(c, 0, last).reshape([4, 64]), gl.SliceLayout(1, layout), assert_trivial=True)
    c = gl.convert_layout(c.reshape([R, 4, 64]).permute((1, 0, 2)), layout, assert_trivial=True)
    return c, total


@gluon.constexpr_function
def part_layout(KH: int) -> gl.BlockedLayout:
    """The layout of a part `[half, step, halves of a step, row, channel]`: a lane has 16 rows of 2 channels. With K = 128 a
    warp has a step of a half of the channels, and a part is half of each step; with K = 64 a warp has half a step, a part all
    rows."""
    return gl.BlockedLayout([1, 1, 1, 16, 2], [1, 1, 1, 1, 32], [KH, 2, 2 // KH, 1, 1], [4, 3, 2, 1, 0])


@gluon.jit
def part(shared, i: gl.constexpr):
    """The rows before the references of a chunk with K = 128, or from them on; with K = 64 all rows."""
    KH: gl.constexpr = shared.shape[0] // 64
    return shared.reshape([KH, 2, 2, 16, 64]).slice(i * (2 // KH), 2 // KH, 2)


@gluon.jit
def row_values(shared, i: gl.constexpr, KH):
    """Values of the rows of a part."""
    rows_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(4, part_layout(KH)))
    return shared.reshape([2, 2, 16]).slice(i * (2 // KH), 2 // KH, 1).load(rows_l)[None, :, :, :, None]


@gluon.jit
def part_sums(step):
    """Sums of log2 decays of a part along its rows, and their totals `[half, step, halves of a step, channel]`."""
    layout: gl.constexpr = step.type.layout
    KH: gl.constexpr = step.shape[0]
    c, total = running_sums(step.reshape([4, 16, 64]))
    total = gl.convert_layout(total.reshape([KH, 2, 2 // KH, 64]), gl.SliceLayout(3, layout), assert_trivial=True)
    return gl.convert_layout(c.reshape(step.shape), layout, assert_trivial=True), total


@gluon.jit
def decay_sums(g_s, biases, rate, unit_s, i: gl.constexpr, GATE, SAFE):
    """`part_sums` of part `i`, from the gate's input."""
    KH: gl.constexpr = g_s.shape[0] // 64
    x = widen(part(g_s, i).load(part_layout(KH)))
    step = gate(x, biases, rate, GATE) if SAFE else unbounded_gate(x, biases, GATE, False)
    return part_sums(step * row_values(unit_s, i, KH))


@gluon.jit
def substitute(x, diagonal_s):
    """`X` with `(I + A) X = R` for the diagonal blocks of 16 rows of A, by forward substitution in fp32: a series would explode
    and cancel on repeated keys. `x [4, 16, 32]`, a thread has all rows of a column; `diagonal_s [16, 4, 16]`: the columns of
    -A's blocks."""
    left_l: gl.constexpr = gl.SliceLayout(2, x.type.layout)
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, left_l))[None, :, None]
    for c in gl.static_range(15):
        x = gl.where(row > c, x + diagonal_s.index(c).load(left_l)[:, :, None] * pick(x, c)[:, None, :], x)
    return x


@gluon.jit
def block_inverses(minus_A, square_s):
    """Inverts the diagonal blocks of 16 rows of `I + A`, for strictly lower `A [32, 32]` of both steps, `minus_A [64, 32]`.
    Returns `[4, 16, 32]`: these inverses, D, on the diagonal and `n = -D A` below it."""
    left, right = gl.split(minus_A.reshape([64, 2, 16]).permute((0, 2, 1)))
    block = gl.arange(0, 64, layout=gl.SliceLayout(1, left.type.layout))[:, None] // 16
    square_s.store(left)
    side_l: gl.constexpr = gl.SliceLayout(2, SIDES)
    x = square_s.reshape([4, 16, 16]).load(side_l)[:, :, None, :]
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, SIDES))))[None, :, None, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, SIDES))))[None, None, None, :]
    side = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, SIDES))))[None, None, :, None]
    of = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, SIDES))))[:, None, None, None]
    own = of % 2 == side
    x = gl.where(own, gl.where(i == j, 1.0, 0.0), gl.where(side == 0, x, 0.0))
    diagonal = gl.where(block % 2 == 0, left, right)
    columns_s = reinterpret(square_s, gl.float32, [1024], FLAT).reshape([16, 4, 16])
    columns_s.permute((1, 2, 0)).store(diagonal.reshape([4, 16, 16]))
    lines_s = reinterpret(square_s, gl.float32, [16, 4, 16], PLAIN)
    return substitute(gl.convert_layout(x.reshape([4, 16, 32]), SOLVE, assert_trivial=True), lines_s)


@gluon.jit
def step_inverses(X_s):
    """`(I + A)^-1` of both steps by halves of its columns `[64, 16]`, from what `block_inverses` gives:
    `[[D0, 0], [n D0, D1]]`. The product is one of a high and a low bf16 each, without low times low."""
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRAM, k_width=2)
    right_l: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=GRAM, k_width=2)
    left, right = gl.split(X_s.load(ACC_HALF).reshape([64, 2, 16]).permute((0, 2, 1)))
    n = gl.convert_layout(left.reshape([4, 16, 16]), left_l, assert_trivial=True)
    n_high, n_low = split_high_low(n)
    operand_l: gl.constexpr = gl.SliceLayout(0, right_l)
    D_first = X_s.slice(0, 16).slice(0, 16, 1).load(operand_l)[None, :, :]
    D_second = X_s.slice(32, 16).slice(0, 16, 1).load(operand_l)[None, :, :]
    of = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, right_l)))[:, None, None]
    D_high, D_low = split_high_low(gl.where(of < 2, D_first, D_second))
    below = gl.zeros((4, 16, 16), gl.float32, layout=GRAM)
    below = mma_v2(n_low, D_high, below)
    below = mma_v2(n_high, D_low, below)
    below = mma_v2(n_high, D_high, below)
    below = gl.convert_layout(below.reshape([64, 16]), left.type.layout, assert_trivial=True)
    block = gl.arange(0, 64, layout=gl.SliceLayout(1, left.type.layout))[:, None] // 16
    return gl.where(block % 2 == 0, left, below), right


@gluon.jit
def add(a, b):
    return a + b
