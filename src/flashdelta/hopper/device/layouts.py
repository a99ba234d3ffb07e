"""How the tiles `[64, 64]` lie that `prepare` leaves for `recurrence`: row r at row `position(r)`, column c at column
`position(c)`.

An accumulator of wgmma gives a thread 2 adjacent columns of every 8. By position these are 8 adjacent ones, twice: 16 bytes
that go from registers to memory, with 4 lanes on 64 adjacent bytes, and no shared memory between. A product's sum runs over
the same order in both operands, so `recurrence` uses the tiles as they lie, and only what enters or leaves it (v, o and
states) knows of the order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def position(x):
    """Where row, column or channel `x` lies: bits 1 and 2 change places with bits 3 and 4, which also leads back."""
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
"""What `to_lines` gives: a thread has twice 8 adjacent elements of 2 rows."""


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
def store_tile(tile, x, first_row: gl.constexpr):
    """Stores the accumulator `x`, whose row 0 is row `first_row` of the tile, 16 bytes at a time."""
    row = position((gl.arange(0, 64, layout=gl.SliceLayout(1, LINES)) + first_row) % 64)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    gl.store(tile + (row[:, None] * 64 + column[None, :]), to_lines(x.to(gl.bfloat16)))


@gluon.jit
def store_cells(tile, x):
    """Stores 32 rows from the tile's start on, given as cells `[4, 8, 64]`, 4 bytes at a time."""
    x = x.to(gl.bfloat16).reshape([4, 8, 2, 4, 4, 2]).permute((0, 1, 2, 4, 3, 5)).reshape([4, 8, 64])
    layout: gl.constexpr = x.type.layout
    row_l: gl.constexpr = gl.SliceLayout(2, layout)
    cell = gl.arange(0, 4, layout=gl.SliceLayout(1, row_l))
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, row_l))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    gl.store(tile + (position(cell[:, None] * 8 + row[None, :])[:, :, None] * 64 + column[None, None, :]), x)
