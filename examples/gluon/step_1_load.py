"""Step 1: a CTA loads a tile by TMA, doubles it, and stores it by TMA.

python -m examples.gluon.step_1_load
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashdelta.kernels.hopper.launch import describe
from flashdelta.kernels.shared.gluon.compat import barrier, copy_tile, store_tile
from flashdelta.program.launch import Launch
from tests.compile.costs import compile_launch

ROWS, COLUMNS = 64, 64
"""A tile's."""


@gluon.jit
def load_kernel(x_d, out_d):
    row = gl.program_id(0) * x_d.block_shape[0]
    column = gl.program_id(1) * x_d.block_shape[1]
    x_s = gl.allocate_shared_memory(x_d.dtype, x_d.block_shape, x_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()  # the TMA unit sees the barrier from here on
    mbarrier.expect(full, x_d.block_type.nbytes)
    copy_tile(x_d, [row, column], full, x_s)
    mbarrier.wait(full, 0)  # phase 0: the first copy that uses this barrier

    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    x = x_s.load(layout)
    x_s.store(x * 2.0)
    fence_async_shared()  # what the threads stored is there for the TMA unit
    barrier()  # all threads have stored
    store_tile(out_d, [row, column], x_s)
    tma.store_wait(0)


def launch(x: torch.Tensor, out: torch.Tensor) -> Launch:
    rows, columns = x.shape
    tiles = [describe(tensor, (ROWS, COLUMNS)) for tensor in (x, out)]
    return Launch(load_kernel, -(-rows // ROWS), (*tiles,), {}, num_warps=4, rows=-(-columns // COLUMNS))


def double(x: torch.Tensor) -> torch.Tensor:
    """`2 x` of a matrix `[M, N]` in bfloat16 on a Hopper GPU; M and N need not be multiples of a tile's sides."""
    out = torch.empty_like(x)
    launch(x, out).run()
    return out


def main() -> None:
    if torch.cuda.is_available():
        x = torch.randn(1000, 200, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(double(x), 2 * x, rtol=0, atol=0)
        print("2 x, to the bit")
    x = torch.empty(1024, 256, dtype=torch.bfloat16, device="meta")
    print(compile_launch(launch(x, x), 90))


if __name__ == "__main__":
    main()
