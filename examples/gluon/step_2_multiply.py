"""Step 2: a CTA works out a tile of a product: load, multiply by wgmma, wait, and again.

python -m examples.gluon.step_2_multiply
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashdelta.kernels.hopper.launch import describe
from flashdelta.kernels.shared.gluon.compat import barrier, copy_tile, store_tile
from flashdelta.program.launch import Launch
from tests.compile.costs import compile_launch

M, N, K = gl.constexpr(128), gl.constexpr(128), gl.constexpr(64)
"""A CTA's tile of the product is `[M, N]`; it goes along the sum K at a time."""

ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
"""How four warps hold the product: a warp has 16 of every 64 rows."""


@gluon.jit
def store_product(out_d, acc, row, column):
    out_s = gl.allocate_shared_memory(out_d.dtype, out_d.block_shape, out_d.layout)
    out_s.store(acc.to(out_d.dtype))
    fence_async_shared()
    barrier()
    store_tile(out_d, [row, column], out_s)
    tma.store_wait(0)


@gluon.jit
def multiply_kernel(x_d, y_d, out_d, inner):
    row = gl.program_id(0) * M
    column = gl.program_id(1) * N
    x_s = gl.allocate_shared_memory(x_d.dtype, x_d.block_shape, x_d.layout)
    y_s = gl.allocate_shared_memory(y_d.dtype, y_d.block_shape, y_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    acc = gl.zeros((M, N), gl.float32, layout=ACC)
    phase = 0
    for k in range(0, inner, K):
        mbarrier.expect(full, x_d.block_type.nbytes + y_d.block_type.nbytes)
        copy_tile(x_d, [row, k], full, x_s)
        copy_tile(y_d, [k, column], full, y_s)
        mbarrier.wait(full, phase)
        phase ^= 1  # the phase of the next two copies
        acc = warpgroup_mma(x_s, y_s, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()  # no warp reads the tiles any more
    store_product(out_d, acc, row, column)


def tiles(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> tuple:
    sides = ((M.value, K.value), (K.value, N.value), (M.value, N.value))
    return tuple(describe(tensor, side) for tensor, side in zip((x, y, out), sides))


def product(kernel: Any, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, **constants: int) -> Launch:
    """A CTA for each tile of `out`."""
    grid = [-(-size // side.value) for size, side in zip(out.shape, (M, N))]
    return Launch(kernel, grid[0], (*tiles(x, y, out), x.shape[1]), constants, num_warps=4, rows=grid[1])


def launch(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> Launch:
    return product(multiply_kernel, x, y, out)


def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x y` of `[R, S]` and `[S, C]` in bfloat16 on a Hopper GPU; rows are multiples of 8 numbers, as TMA wants them."""
    out = x.new_empty(x.shape[0], y.shape[1])
    launch(x, y, out).run()
    return out


def show(multiply: Callable[..., torch.Tensor], launch: Callable[..., Launch]) -> None:
    """That it is right, on a GPU, and what it costs."""
    if torch.cuda.is_available():
        x, y = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((1000, 520), (520, 264)))
        torch.testing.assert_close(multiply(x, y), x @ y, rtol=2e-2, atol=2e-1)
        print("x y")
    x = torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta")
    print(compile_launch(launch(x, x, x), 90))


if __name__ == "__main__":
    show(multiply, launch)
