"""Stage `norm`: the gated RMS norm of rows, and its backward pass. One CTA per tile of whole rows.

Contract (`reference.norm` is the definition), with `r = 1 / sqrt(mean(x^2) + eps)` and `y = x r`:

    o  = y weight act(z)
    dy = do weight act(z);   dx = r (dy - y mean(dy y));   dz = do y weight act'(z);   dweight = sum of rows do y act(z)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..problem.problem import Problem, Result, Tensors
from ..program.launch import Launch
from ..program.program import Outputs, Program, new
from .launch import strided
from .sums import sums


@triton.jit
def row_offsets(row, T, H, batch_stride, token_stride, head_stride):
    """Where rows `[.., T, H]` begin."""
    token = row // H
    return (token // T) * batch_stride + (token % T) * token_stride + (row % H) * head_stride


@triton.jit
def gate_of(z, SIGMOID: tl.constexpr):
    """`act(z)` and its derivative."""
    s = 1.0 / (1.0 + tl.exp(-z))
    if SIGMOID:
        gate = s
        slope = s * (1.0 - s)
    else:
        gate = z * s
        slope = s * (1.0 + z * (1.0 - s))
    return gate, slope


@triton.jit(do_not_specialize=["rows", "T", "H"])
def norm_kernel(
    x,
    z,
    weight,
    o,
    eps,
    rows,
    T,
    H,
    x_batch: tl.int64,
    x_token: tl.int64,
    x_head: tl.int64,
    z_batch: tl.int64,
    z_token: tl.int64,
    z_head: tl.int64,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    value = tl.arange(0, BV)[None, :]
    mask = (row < rows)[:, None] & (value < V)
    tile_x = tl.load(x + row_offsets(row, T, H, x_batch, x_token, x_head)[:, None] + value, mask=mask, other=0.0)
    tile_z = tl.load(z + row_offsets(row, T, H, z_batch, z_token, z_head)[:, None] + value, mask=mask, other=0.0)
    w = tl.load(weight + value, mask=value < V, other=0.0).to(tl.float32)
    tile_x = tile_x.to(tl.float32)
    norm = 1.0 / tl.sqrt(tl.sum(tile_x * tile_x, axis=1) / V + eps)
    gate, _ = gate_of(tile_z.to(tl.float32), SIGMOID)
    tile_o = tile_x * norm[:, None] * w * gate
    tl.store(o + row[:, None] * V + value, tile_o.to(o.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "T", "H", "tiles"])
def norm_backward_kernel(
    x,
    z,
    weight,
    do,
    dx,
    dz,
    partials,
    eps,
    rows,
    T,
    H,
    tiles,
    x_batch: tl.int64,
    x_token: tl.int64,
    x_head: tl.int64,
    z_batch: tl.int64,
    z_token: tl.int64,
    z_head: tl.int64,
    do_batch: tl.int64,
    do_token: tl.int64,
    do_head: tl.int64,
    V: tl.constexpr,
    BV: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """A persistent loop over tiles: `partials [CTAs, V]` has each CTA's part of the weight's gradient."""
    value = tl.arange(0, BV)[None, :]
    w = tl.load(weight + value, mask=value < V, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BV], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (value < V)
        tile_x = tl.load(x + row_offsets(row, T, H, x_batch, x_token, x_head)[:, None] + value, mask=mask, other=0.0)
        tile_z = tl.load(z + row_offsets(row, T, H, z_batch, z_token, z_head)[:, None] + value, mask=mask, other=0.0)
        grad = tl.load(do + row_offsets(row, T, H, do_batch, do_token, do_head)[:, None] + value, mask=mask, other=0.0)
        tile_x = tile_x.to(tl.float32)
        grad = grad.to(tl.float32)
        norm = (1.0 / tl.sqrt(tl.sum(tile_x * tile_x, axis=1) / V + eps))[:, None]
        normed = tile_x * norm
        gate, slope = gate_of(tile_z.to(tl.float32), SIGMOID)
        total += grad * normed * gate
        grad *= w
        here = row[:, None] * V + value
        tl.store(dz + here, (grad * normed * slope).to(dz.dtype.element_ty), mask=mask)
        grad *= gate
        mean = (tl.sum(grad * normed, axis=1) / V)[:, None]
        tl.store(dx + here, (norm * (grad - normed * mean)).to(dx.dtype.element_ty), mask=mask)
    at = tl.program_id(0).to(tl.int64) * V + value
    tl.store(partials + at, tl.sum(total, axis=0)[None, :], mask=value < V)


@dataclass(frozen=True)
class NormConfig:
    BV: int
    ROWS: int
    num_warps: int


def norm_config(problem: Problem, elements: int) -> NormConfig:
    """So many elements of each tensor a tile, or a row; 16 bytes a thread at a time."""
    BV = max(16, triton.next_power_of_2(problem.V))
    return NormConfig(BV, max(1, elements // BV), num_warps=8 if BV > 4096 else 4)


ELEMENTS, BACKWARD_ELEMENTS = 4096, 2048
"""Of a tile; the backward pass holds more tensors of it, and its sum."""

MOST_CTAS = 512
"""Of the backward pass: rows that `sums` adds."""


def row_layout(x: Tensor) -> tuple[Tensor, list[int]]:
    """The tensor as `[B, T, H, V]`, and the sizes `[T, H]`; a copy where its dimensions before the last three are not one."""
    x = x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, x.dim() - 4)
    return x, [*x.shape[1:3]]


def row_arguments(*tensors: Tensor) -> list[int]:
    """Strides of the batch, the token and the head."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def gated_rms_norm(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> list[Launch]:
    dense = strided(t, ("x", "z"))
    (x, sizes), (z, _) = row_layout(dense["x"]), row_layout(dense["z"])
    c, rows = norm_config(problem, ELEMENTS), x.shape[:3].numel()
    return [
        Launch(
            norm_kernel,
            -(-rows // c.ROWS),
            (x, z, t.weight.contiguous(), outputs["o"], problem.eps, rows, *sizes, *row_arguments(x, z)),
            dict(V=problem.V, BV=c.BV, ROWS=c.ROWS, SIGMOID=problem.activation == "sigmoid"),
            c.num_warps,
        )
    ]


def backward(problem: Problem, t: Tensors, arch: int) -> Program:
    """Gradients by input."""
    outputs = Outputs(t.device)
    return Program(outputs, backward_launches(problem, t, outputs))


def backward_launches(problem: Problem, t: Tensors, outputs: Outputs) -> Iterator[Launch]:
    dense = strided(t, ("x", "z", "do"))
    (x, sizes), (z, _), (do, _) = (row_layout(dense[role]) for role in ("x", "z", "do"))
    c, rows = norm_config(problem, BACKWARD_ELEMENTS), x.shape[:3].numel()
    tiles = -(-rows // c.ROWS)
    partials = new((max(1, min(tiles, MOST_CTAS)), 1, problem.V), torch.float32, t.device)
    dx, dz = (outputs.allocate(role, Result(problem.shape, problem.dtype)) for role in ("x", "z"))
    yield Launch(
        norm_backward_kernel,
        partials.shape[0],
        (
            *(x, z, t.weight.contiguous(), do, dx, dz, partials, problem.eps),
            *(rows, *sizes, tiles, *row_arguments(x, z, do)),
        ),
        dict(V=problem.V, BV=c.BV, ROWS=c.ROWS, SIGMOID=problem.activation == "sigmoid"),
        c.num_warps,
        scratch=(partials,),
    )
    dweight = outputs.allocate("weight", Result(tuple(t.weight.shape), t.weight.dtype))
    yield sums(partials, dweight, None)
