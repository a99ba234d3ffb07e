"""Stage `norm`: the gated RMS norm of rows, and its backward pass. One CTA per tile of whole rows.

Contract (`reference.norm` is the definition), with `r = 1 / sqrt(mean(x^2) + eps)` and `y = x r`:

    o  = y weight act(z)
    dy = do weight act(z);   dx = r (dy - y mean(dy y));   dz = do y weight act'(z);   dweight = sum of rows do y act(z)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import NormProblem, NormTensors
from ...program.launch import Launch, sm_count
from ...program.plan import Outputs
from ..shared.gates import quick_sigmoid
from ..shared.scalars import SCALARS
from ..stages.launch import Config, launch
from .sums import sums


@triton.jit
def row_offsets(row, T, H, batch_stride, token_stride, head_stride):
    """Returns the offsets of rows `[.., T, H]`."""
    row = row.to(tl.uint32)  # as `rows` has 31 bits; a division of 64 bits takes longer than a load
    tokens = tl.zeros_like(row) + T
    heads = tl.zeros_like(row) + H
    token = row // heads
    in_batch = (token // tokens).to(tl.int64) * batch_stride + (token % tokens).to(tl.int64) * token_stride
    return in_batch + (row % heads).to(tl.int64) * head_stride


@triton.jit
def tile_rows(tile, ROWS):
    return (tl.zeros([ROWS], tl.int64) + tile) * ROWS + tl.arange(0, ROWS)


@triton.jit
def load_tile(x, tile, rows, T, H, batch_stride, token_stride, head_stride, V, BV, ROWS):
    row = tile_rows(tile, ROWS)
    value = tl.arange(0, BV)[None, :]
    at = row_offsets(row, T, H, batch_stride, token_stride, head_stride)[:, None] + value
    return tl.load(x + at, mask=(row < rows)[:, None] & (value < V), other=0.0)


@triton.jit
def gate_of(z, SIGMOID):
    """`act(z)` and its derivative."""
    s = quick_sigmoid(z)
    if SIGMOID:
        gate = s
        slope = s * (1.0 - s)
    else:
        gate = z * s
        slope = s * tl.fma(z, 1.0 - s, 1.0)
    return gate, slope


@triton.jit(do_not_specialize=SCALARS)
def norm_kernel(
    x, z, weight, o, eps, rows, T, H, x_batch: tl.int64, x_token: tl.int64, x_head: tl.int64,
    z_batch: tl.int64, z_token: tl.int64, z_head: tl.int64,
    V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, SIGMOID: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tile_rows(tl.program_id(0), ROWS)
    value = tl.arange(0, BV)[None, :]
    mask = (row < rows)[:, None] & (value < V)
    tile_x = load_tile(x, tl.program_id(0), rows, T, H, x_batch, x_token, x_head, V, BV, ROWS)
    tile_z = load_tile(z, tl.program_id(0), rows, T, H, z_batch, z_token, z_head, V, BV, ROWS)
    w = tl.load(weight + value, mask=value < V, other=0.0).to(tl.float32)
    tile_x = tile_x.to(tl.float32)
    norm = tl.rsqrt(tl.sum(tile_x * tile_x, axis=1) * (1.0 / V) + eps)
    gate, _ = gate_of(tile_z.to(tl.float32), SIGMOID)
    tile_o = tile_x * norm[:, None] * w * gate
    tl.store(o + row[:, None] * V + value, tile_o.to(o.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SCALARS)
def norm_backward_kernel(
    x, z, weight, do, dx, dz, partials, eps, rows, T, H, tile_count,
    x_batch: tl.int64, x_token: tl.int64, x_head: tl.int64, z_batch: tl.int64, z_token: tl.int64, z_head: tl.int64,
    do_batch: tl.int64, do_token: tl.int64, do_head: tl.int64,
    V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, SIGMOID: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A persistent loop over tiles, of which the next is loaded ahead: `partials [CTAs, V]` has each CTA's part of the weight's
    gradient."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.arange(0, BV)[None, :]
    w = tl.load(weight + value, mask=value < V, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BV], tl.float32)
    next_x = load_tile(x, tl.program_id(0), rows, T, H, x_batch, x_token, x_head, V, BV, ROWS)
    next_z = load_tile(z, tl.program_id(0), rows, T, H, z_batch, z_token, z_head, V, BV, ROWS)
    next_grad = load_tile(do, tl.program_id(0), rows, T, H, do_batch, do_token, do_head, V, BV, ROWS)
    for tile in range(tl.program_id(0), tile_count, tl.num_programs(0)):
        tile_x = next_x
        tile_z = next_z
        grad = next_grad
        coming = tile + tl.num_programs(0)
        next_x = load_tile(x, coming, rows, T, H, x_batch, x_token, x_head, V, BV, ROWS)
        next_z = load_tile(z, coming, rows, T, H, z_batch, z_token, z_head, V, BV, ROWS)
        next_grad = load_tile(do, coming, rows, T, H, do_batch, do_token, do_head, V, BV, ROWS)
        row = tile_rows(tile, ROWS)
        mask = (row < rows)[:, None] & (value < V)
        tile_x = tile_x.to(tl.float32)
        grad = grad.to(tl.float32)
        norm = tl.rsqrt(tl.sum(tile_x * tile_x, axis=1) * (1.0 / V) + eps)[:, None]
        normed = tile_x * norm
        gate, slope = gate_of(tile_z.to(tl.float32), SIGMOID)
        total += grad * normed * gate
        grad *= w
        here = row[:, None] * V + value
        tl.store(dz + here, (grad * normed * slope).to(dz.dtype.element_ty), mask=mask)
        grad *= gate
        mean = (tl.sum(grad * normed, axis=1) * (1.0 / V))[:, None]
        tl.store(dx + here, (norm * (grad - normed * mean)).to(dx.dtype.element_ty), mask=mask)
    at = tl.program_id(0).to(tl.int64) * V + value
    tl.store(partials + at, tl.sum(total, axis=0)[None, :], mask=value < V)


TILE = 2048
"""Elements of a tile of each tensor, or more for a longer row."""

CTAS_PER_SM = 3
"""CTAs of the backward pass, as many as fit. Each is a row that `sums` adds."""


def norm_config(BV: int, warps: int) -> Config:
    """`warps` of a CTA, more for long rows."""
    return Config(max(warps, min(BV // 256, 16)))


def row_layout(x: Tensor) -> Tensor:
    """The tensor as `[B, T, H, V]`."""
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, x.dim() - 4)


def arguments(problem: NormProblem, t: NormTensors) -> dict[str, Any]:
    """Arguments that both kernels take under other names than the call's, or as rows."""
    x, BV = row_layout(t.x), max(16, triton.next_power_of_2(problem.V))
    sizes = dict(rows=x.shape[:3].numel(), T=max(x.shape[1], 1), H=max(x.shape[2], 1), BV=BV, ROWS=max(1, TILE // BV))
    return dict(x=x, z=row_layout(t.z), **sizes, SIGMOID=problem.activation == "sigmoid")


def gated_rms_norm(problem: NormProblem, t: NormTensors, arch: int, outputs: Outputs) -> list[Launch]:
    own = dict(arguments(problem, t), o=outputs["o"])
    c = norm_config(own["BV"], warps=8)
    return [launch(norm_kernel, -(-own["rows"] // own["ROWS"]), problem, t, own, c, overlaps=arch >= 90)]


def backward(problem: NormProblem, t: NormTensors, arch: int, outputs: Outputs) -> Iterator[Launch]:
    """Gradients by input."""
    own, overlaps = arguments(problem, t), arch >= 90
    tiles = -(-own["rows"] // own["ROWS"])
    partials = t.memory.new((max(1, min(tiles, CTAS_PER_SM * sm_count(t.device))), 1, problem.V), torch.float32)
    dtypes = {"x": problem.dtype, "z": problem.output_dtype}
    outputs |= {role: t.memory.new(problem.shape, dtype) for role, dtype in dtypes.items()}
    grads = {f"d{role}": outputs[role] for role in dtypes}
    own |= dict(**grads, do=row_layout(t.do), partials=partials, tile_count=tiles)
    yield launch(norm_backward_kernel, partials.shape[0], problem, t, own, norm_config(own["BV"], warps=4), overlaps)
    outputs["weight"] = dweight = t.memory.new(t.weight.shape, t.weight.dtype)
    yield sums(partials, dweight, None, overlaps)
