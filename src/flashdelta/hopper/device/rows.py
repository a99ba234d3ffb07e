"""What the kernels of the backward pass share that work on the 64 rows of a chunk and all its key channels, in the layout of
wgmma's accumulators: each warpgroup has all rows of its share of the channels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ...triton.device import sequences
from ...triton.device.norms import L2_EPS
from ..prepare import find_sequence
from .compat import copy_async
from .math import LOWEST, gate, gate_bias, gate_unit

chunk_of_sequence = gluon.jit(sequences.chunk_of_sequence.fn)

C = gl.constexpr(64)


@gluon.jit
def own_chunk(cu_seqlens, slot, slots, N, T):
    """Sequence, its first token, batch row, first token and token count of a chunk slot; a count of 0 or less if it has no
    chunk."""
    if cu_seqlens is None:
        n = slot // slots
        begin = n * 0
        bounds: gl.constexpr = None
    else:
        n, begin, end = find_sequence(cu_seqlens, None, 0, slot, N, T)
        bounds = (begin, end)
    batch, start, count = chunk_of_sequence(cu_seqlens, None, 0, n, slot, slots, T, C, gl.int32, bounds)
    return n, begin, batch.to(gl.int32), start.to(gl.int32), gl.minimum(count, C).to(gl.int32)


@gluon.jit
def places(rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr):
    """Indices of rows `[rows, 1]` and of columns `[1, columns]`."""
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, layout))[:, None]
    return row, gl.arange(0, columns, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def fetch_rows(shared, x, token, count):
    """Starts the copy of `shared.shape[0]` rows that lie `token` elements apart. Zeros from row `count` on."""
    LANES: gl.constexpr = 128 // shared.dtype.primitive_bitwidth
    copy_l: gl.constexpr = gl.BlockedLayout([1, LANES], [4, 8], [gl.num_warps(), 1], [1, 0])
    row, column = places(shared.shape[0], shared.shape[1], copy_l)
    copy_async(shared, x + row * token + column, mask=row < count)


@gluon.jit
def store_rows(out, token, x, count, stage_s):
    """Stores `x` as `count` rows that lie `token` elements apart; bf16 16 bytes at a time if there is a place to turn it."""
    x = x.to(out.dtype.element_ty)
    if stage_s is not None and out.dtype.element_ty == gl.bfloat16:
        stage_s.store(x)
        x = stage_s.load(gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))
    layout: gl.constexpr = x.type.layout
    row, column = places(x.shape[0], x.shape[1], layout)
    gl.store(out + row * token + column, x, mask=row < count)


@gluon.jit
def load_rows(x, token, count, layout: gl.constexpr, K: gl.constexpr):
    """64 rows of float32, in the layout; zeros from `count` on."""
    row, column = places(C, K, layout)
    return gl.load(x + row * token + column, mask=row < count, other=0.0)


@gluon.jit
def inverse_norms(x, L2NORM: gl.constexpr):
    """`[64, 1]`: `1 / sqrt(sum x^2 + eps)` of the rows, or 1."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    factor = gl.full((C,), 1.0, gl.float32, layout=layout)
    if L2NORM:
        factor = gl.rsqrt(gl.sum(x * x, axis=1) + L2_EPS)
    return factor[:, None]


@gluon.jit
def decay_bias(dt_bias, head, rate, column, K: gl.constexpr, GATE: gl.constexpr, volatile: gl.constexpr = False):
    """Of the value head's key channels `column`, as `gate` takes it, in one row."""
    layout: gl.constexpr = column.type.layout
    bias = gl.zeros(column.shape, gl.float32, layout=layout)
    if dt_bias is not None:
        bias += gate_bias(gl.load(dt_bias + head * K + column, volatile=volatile).to(gl.float32), rate, GATE)
    return bias[None, :]


@gluon.jit
def store_decays(high_s, low_s, x, bias, rate, lower_bound, valid, GATE: gl.constexpr, SAFE: gl.constexpr):
    """Log2 decays of rows with the gate's input `x`, as float16 `high_s + low_s`: exact to 22 bits. None past the end."""
    step = gate(x, bias, rate, GATE) * gl.where(valid, gate_unit(rate, lower_bound, GATE), 0.0)
    if not SAFE:
        step = gl.where(step < LOWEST, LOWEST, step)  # a NaN stays one
    high = step.to(gl.float16)
    high_s.store(high)
    low_s.store((step - high.to(gl.float32)).to(gl.float16))
    fence_async_shared()


@gluon.jit
def weight_places(T, N, layout: gl.constexpr):
    """Rows `[64, 1]` and columns `[1, 64]` of weights that are a left operand in registers. No compiler may know them: of
    constants ptxas writes the registers when the product is already under way (`compile.late_operands`). T and N are not
    negative, but neither is that known."""
    i, s = places(C, C, layout)
    return i + (gl.minimum(T, 0) - gl.minimum(N, 0)), s


@gluon.jit
def weighted_sums(weights, high_s, low_s, zero):
    """`weights [64, 64]`, small integers as a left operand, times `high_s + low_s [64, K]`; not waited for."""
    acc = warpgroup_mma(weights, high_s, zero, use_acc=False, is_async=True)
    return warpgroup_mma(weights, low_s, acc, is_async=True)


@gluon.jit
def row_parts(x, layout: gl.constexpr):
    """`[64, 2, 8]`, in the layout: of an accumulator of 2 x 4 warps the sums of each row that threads have without asking
    others. Their sum is the row's."""
    x = gl.sum(x.reshape([C, 2, x.shape[1] // 16, 8]), axis=2)
    return gl.convert_layout(x, layout, assert_trivial=True)
