"""Layouts of registers and of the tiles that kernels leave for each other, with the loads and stores between them.

Tiles `[64, 64]` that `prepare` leaves: row r lies at row `position(r)`, column c at column `position(c)`. An accumulator of
wgmma gives a thread 2 adjacent columns of every 8. In positions these are 8 adjacent ones, twice: 16 bytes that go from
registers to memory, with 4 lanes on 64 adjacent bytes, and no shared memory between. An MMA sums in the same order over both
operands, so `recurrence` uses the tiles as they lie, and only what enters or leaves it (v, o and states) knows of the order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...shared.gluon.compat import copy_async
from ...shared.gluon.steps import ROWS
from ...shared.states import load_state, store_state

C = gl.constexpr(64)
"""Tokens of a chunk."""

BV = gl.constexpr(64)
"""Value channels of a slice: a CTA of a scan has one."""

ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
"""Accumulators `[64, 64]` of four warps."""


LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=ACC.value, k_width=2))
"""A left operand in registers. An accumulator rounded to bf16 has this layout: no data moves."""


@gluon.jit
def position(x):
    """Returns the place of row, column or channel `x`: bits 1 and 2 swap with bits 3 and 4, so it is its own inverse."""
    return (x & -31) | ((x & 6) << 2) | ((x >> 2) & 6)


LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
"""The layout that `to_lines` gives: a thread has twice 8 adjacent elements of 2 rows."""


@gluon.jit
def swap_columns(x):
    return x.reshape([64, 2, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, 64])


@gluon.jit
def to_lines(x):
    """An accumulator `[64, 64]` with its columns as they lie; no data moves between threads."""
    return gl.convert_layout(swap_columns(x), LINES)


@gluon.jit
def from_lines(x, layout: gl.constexpr):
    return gl.convert_layout(swap_columns(x), layout)


@gluon.jit
def beside(left, right, layout: gl.constexpr):
    """`[64, 64]` from two `[64, 32]`; no data moves between threads."""
    both = gl.join(left, right).permute((0, 2, 1)).reshape([64, 64])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def store_tile(tile, x, first_row: gl.constexpr):
    """Stores the accumulator `x`, whose row 0 is row `first_row` of the tile, 16 bytes at a time."""
    row = position((gl.arange(0, 64, layout=gl.SliceLayout(1, LINES)) + first_row) % 64)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    gl.store(tile + (row[:, None] * 64 + column[None, :]), to_lines(x.to(gl.bfloat16)))


@gluon.jit
def store_block(tile, x):
    """Stores 32 rows from the tile's start on, given as sub-chunks `[4, 8, 64]`, 4 bytes at a time."""
    x = x.to(gl.bfloat16).reshape([4, 8, 2, 4, 4, 2]).permute((0, 1, 2, 4, 3, 5)).reshape([4, 8, 64])
    layout: gl.constexpr = x.type.layout
    row_l: gl.constexpr = gl.SliceLayout(2, layout)
    sub_chunk = gl.arange(0, 4, layout=gl.SliceLayout(1, row_l))
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, row_l))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    gl.store(tile + (position(sub_chunk[:, None] * 8 + row[None, :])[:, :, None] * 64 + column[None, None, :]), x)


# ---- scans over chunks ---------------------------------------------------------------------------------------------------


@gluon.jit
def loader_offsets(token_stride, K, STEPS=False):
    """Offsets of the loader warp: rows `[64]` of a tile of tokens and the elements' offsets `[64, 64]`; key channels `[K]`.
    `STEPS`: rows in their order, and four decays of each channel."""
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    line_l: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    row = gl.arange(0, C, layout=gl.SliceLayout(1, copy_l))
    if not STEPS:
        row = position(row)
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, copy_l))
    key = gl.arange(0, 4 * K if STEPS else K, layout=line_l)
    return row, row[:, None] * (token_stride * 8) + column[None, :], key


@gluon.jit
def load_halves(states, at, next_, present, K, IN_ORDER=False):
    """A state by halves of 64 key channels, which lie `next_` elements apart; the second is zero if there is only one.
    `IN_ORDER`: an accumulator's column is the channel of that number, and `at` has an accumulator's layout."""
    first = load_state(states, at, present)
    if not IN_ORDER:
        first = from_lines(first, ACC)
    if K == 128:
        second = load_state(states, at + next_, present)
        if not IN_ORDER:
            second = from_lines(second, ACC)
    else:
        second = gl.zeros((BV, 64), gl.float32, layout=ACC)
    return first, second


@gluon.jit
def store_halves(states, at, next_, first, second, wanted, K, IN_ORDER=False):
    store_state(states, at, first if IN_ORDER else to_lines(first), wanted)
    if K == 128:
        store_state(states, at + next_, second if IN_ORDER else to_lines(second), wanted)


@gluon.jit
def as_left(x, ORDERED=True):
    """An accumulator, rounded to bf16, as a left operand in registers. `ORDERED`: before the next MMA starts; LLVM would put it
    between MMAs in flight, for which ptxas then waits."""
    if ORDERED:
        asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        x = gl.inline_asm_elementwise(asm, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=False, pack=2)
    else:
        x = x.to(gl.bfloat16)
    return gl.convert_layout(x, LEFT, assert_trivial=True)


@gluon.jit
def store_transposed(out, staging_s, x, token, count, row, in_out, token_stride):
    """`x [BV, 64]`, bf16, as `count` rows of `out` from `token` on, by way of shared memory."""
    staging_s.permute((1, 0)).store(x)
    inside = (row < count)[:, None]
    offset = token.to(gl.int64) * token_stride.to(gl.int64) * 8
    gl.store(out + offset + in_out, staging_s.load(ROWS), mask=inside)


# ---- the 64 rows of a chunk, all key channels ----------------------------------------------------------------------------


@gluon.jit
def row_column(rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr):
    """Indices of rows `[rows, 1]` and of columns `[1, columns]`."""
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, layout))[:, None]
    return row, gl.arange(0, columns, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def copy_rows(shared, x, token, count):
    """Starts the copy of `shared.shape[0]` rows that lie `token` elements apart. Zeros from row `count` on."""
    LANES: gl.constexpr = 128 // shared.dtype.primitive_bitwidth
    copy_l: gl.constexpr = gl.BlockedLayout([1, LANES], [4, 8], [gl.num_warps(), 1], [1, 0])
    row, column = row_column(shared.shape[0], shared.shape[1], copy_l)
    copy_async(shared, x + row * token + column, mask=row < count)


@gluon.jit
def store_rows(out, token, x, count, staging_s):
    """Stores `x` as `count` rows that lie `token` elements apart; bf16 16 bytes at a time if there is shared memory to change
    the layout in."""
    x = x.to(out.dtype.element_ty)
    if staging_s is not None and out.dtype.element_ty.primitive_bitwidth == 16:
        staging_s.store(x)
        x = staging_s.load(gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))
    layout: gl.constexpr = x.type.layout
    row, column = row_column(x.shape[0], x.shape[1], layout)
    gl.store(out + row * token + column, x, mask=row < count)


@gluon.jit
def half_rows(x):
    """`x [64, K]` as `[64, 2, K / 2]`; of an accumulator of 2 x 4 warps each has a half of its rows."""
    return x.reshape([C, 2, x.shape[1] // 2])


@gluon.jit
def load_rows(x, token, count, layout: gl.constexpr, K):
    """64 rows, in the layout; zeros from `count` on."""
    row, column = row_column(C, K, layout)
    return gl.load(x + row * token + column, mask=row < count, other=0.0)


@gluon.jit
def row_partials(x, layout: gl.constexpr):
    """`[64, 2, 8]`, in the layout: of an accumulator of 2 x 4 warps the sums of each row that threads have without asking
    others. Their sum is the row's."""
    x = gl.sum(x.reshape([C, 2, x.shape[1] // 16, 8]), axis=2)
    return gl.convert_layout(x, layout, assert_trivial=True)
