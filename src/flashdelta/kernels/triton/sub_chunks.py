"""Blocks of a chunk's rows: which pairs of rows share a reference, and the inverse of a sub-chunk of 16 rows."""

from __future__ import annotations

import triton
import triton.language as tl

SUB = tl.constexpr(16)
"""Rows of a sub-chunk: those of one MMA, and of the diagonal blocks that forward substitution inverts."""

SUB_LEVELS = tl.constexpr(4)
"""log2(SUB): halvings of a sub-chunk."""


@triton.jit
def boundary_matrix(level, COUNT: tl.constexpr):
    """`[COUNT, COUNT]`: row i selects the tokens whose decays lie between i and the boundary between the halves of its block of
    `2 << level` rows. In the second half those from the boundary up to and with i, in the first those after i."""
    i = tl.arange(0, COUNT)[:, None]
    s = tl.arange(0, COUNT)[None, :]
    second = (i >> level) % 2 == 1
    same = (i >> level) == (s >> level)
    return same & ((second & (s <= i)) | (((i >> level) % 2 == 0) & (s > i)))


@triton.jit
def pair_mask(level, COUNT: tl.constexpr):
    """`[COUNT, COUNT]`: pairs (i, j) of one block of `2 << level` rows, i in its second half and j in its first."""
    i = tl.arange(0, COUNT)[:, None] >> level
    j = tl.arange(0, COUNT)[None, :] >> level
    return (i >> 1 == j >> 1) & (i % 2 == 1) & (j % 2 == 0)


@triton.jit
def forward_substitution(A):
    """`(I + A)^-1` of every strictly lower `A [NB, 16, 16]`.

    Row i of the inverse is `e_i - sum_{j<i} A_ij X_j`. In fp32, row by row: a Neumann series would explode and cancel on
    repeated keys.
    """
    row = tl.arange(0, SUB)[None, :, None]
    column = tl.arange(0, SUB)[None, None, :]
    # transposed, so that row i comes out indexed by the rows of X it multiplies
    A = tl.permute(A, (0, 2, 1))
    X = tl.where(row == column, 1.0, 0.0) + tl.zeros(A.shape, tl.float32)
    for r in range(1, SUB):
        a = tl.sum(tl.where(column == r, A, 0.0), axis=2)
        x = tl.sum(a[:, :, None] * X, axis=1)
        X -= tl.where(row == r, x[:, None, :], 0.0)
    return X
