"""Stage `sums` of the layer's backward passes: gradients of parameters from what each CTA of the stage before has of them.

Rows are added in their order, so that a gradient has the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...program.launch import Launch
from ..shared.scalars import SCALARS


@triton.jit(do_not_specialize=SCALARS)
def sums_kernel(
    partials, grad_weight, grad_bias, rows, channels,
    TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`partials [rows, TAPS (+ 1), channels]` to `grad_weight [channels, TAPS]`, and the last to `grad_bias [channels]` if
    there is one. One CTA per `BLOCK` columns."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    ALL: tl.constexpr = TAPS if grad_bias is None else TAPS + 1
    columns = channels * ALL
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    inside = (column < columns)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, rows, ROWS):
        at = (begin + row).to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(partials + at, mask=(begin + row < rows)[:, None] & inside, other=0.0)
    found = tl.sum(total, axis=0)
    tap = column // channels
    channel = column % channels
    tl.store(grad_weight + channel * TAPS + tap, found.to(grad_weight.dtype.element_ty), mask=tap < TAPS)
    if grad_bias is not None:
        tl.store(grad_bias + channel, found.to(grad_bias.dtype.element_ty), mask=tap == TAPS)


ELEMENTS, MOST_ROWS, FEWEST_COLUMNS = 4096, 1024, 8
"""Most rows of a tile: all where it can be, so that they are loaded at once, and at least 32 bytes of each."""


def sums(partials: Tensor, grad_weight: Tensor, grad_bias: Tensor | None, overlaps: bool) -> Launch:
    """`partials [rows, TAPS (+ 1), channels]` in float32."""
    rows, columns, channels = partials.shape
    ROWS = min(max(triton.next_power_of_2(rows), 16), MOST_ROWS)
    BLOCK = max(ELEMENTS // ROWS, FEWEST_COLUMNS)
    arguments = (partials, grad_weight, grad_bias, rows, channels)
    constants = dict(TAPS=columns - (grad_bias is not None), ROWS=ROWS, BLOCK=BLOCK, OVERLAP=overlaps)
    return Launch(sums_kernel, -(-columns * channels // BLOCK), arguments, constants, num_warps=8, overlaps=overlaps)
