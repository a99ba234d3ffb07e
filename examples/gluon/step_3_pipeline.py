"""Step 3: the same with a pipeline: the next tiles are on their way while this one is multiplied.

python -m examples.gluon.step_3_pipeline
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashdelta.kernels.shared.gluon.compat import barrier, copy_tile
from flashdelta.program.launch import Launch

from .step_2_multiply import ACC, K, M, N, product, show, store_product

STAGES = 4
"""Tiles of 16 KB for x and y each: 128 KB of the 227 KB that a CTA may have."""


@gluon.jit
def start(x_d, y_d, x_s, y_s, full, row, column, i, inner, STAGES: gl.constexpr):
    """Starts the copies of step i along the sum, if there is one, into its stage."""
    stage = i % STAGES
    wanted = i * K < inner
    mbarrier.expect(full.index(stage), x_d.block_type.nbytes + y_d.block_type.nbytes, wanted)
    copy_tile(x_d, [row, i * K], full.index(stage), x_s.index(stage), wanted)
    copy_tile(y_d, [i * K, column], full.index(stage), y_s.index(stage), wanted)


@gluon.jit
def pipeline_kernel(x_d, y_d, out_d, inner, STAGES: gl.constexpr):
    row = gl.program_id(0) * M
    column = gl.program_id(1) * N
    x_s = gl.allocate_shared_memory(x_d.dtype, [STAGES, M, K], x_d.layout)
    y_s = gl.allocate_shared_memory(y_d.dtype, [STAGES, K, N], y_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES - 1):
        start(x_d, y_d, x_s, y_s, full, row, column, s, inner, STAGES)
    acc = gl.zeros((M, N), gl.float32, layout=ACC)
    for i in range((inner + K - 1) // K):
        stage = i % STAGES
        # a stage's phase changes each time it is filled
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        acc = warpgroup_mma(x_s.index(stage), y_s.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # this product runs on
        barrier()  # all warps: the previous product's stage is free to refill
        start(x_d, y_d, x_s, y_s, full, row, column, i + STAGES - 1, inner, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()  # the product is stored by way of the tiles' memory
    store_product(out_d, acc, row, column)


def launch(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, stages: int = STAGES) -> Launch:
    return product(pipeline_kernel, x, y, out, STAGES=stages)


def multiply(x: torch.Tensor, y: torch.Tensor, stages: int = STAGES) -> torch.Tensor:
    """As `step_2_multiply.multiply`."""
    out = x.new_empty(x.shape[0], y.shape[1])
    launch(x, y, out, stages).run()
    return out


if __name__ == "__main__":
    show(multiply, launch)
