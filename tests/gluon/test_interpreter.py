"""The interpreter's numbers are the GPU's, and accesses outside of tensors are told; `tests/mutants.py` has what else is."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashdelta.program.launch import Launch

from . import language
from .interpreter import run
from .values import Fault, Value, round_bf16, scalar

N = 64
ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


def launch(kernel, *arguments: object, ctas: int = 1, **constants: object) -> None:
    run(Launch(kernel, ctas, arguments, constants, num_warps=4))


# ---- numbers -----------------------------------------------------------------------------------------------------------


def test_bfloat16_is_rounded_as_pytorch_rounds_it():
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).int()
    x = torch.cat([bits.view(torch.float32), torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.3961e38])])
    found, want = torch.from_numpy(round_bf16(x.numpy())), x.bfloat16().float()
    assert torch.equal(found.nan_to_num(nan=7.0).view(torch.int32), want.nan_to_num(nan=7.0).view(torch.int32))
    assert torch.equal(found.isnan(), want.isnan())


@pytest.mark.parametrize(
    ("found", "data", "dtype"),
    [
        (lambda a, b, x: a // b, -3, tl.int32),  # towards zero
        (lambda a, b, x: a % b, -1, tl.int32),
        (lambda a, b, x: a * 2**29, -10 * 2**29 + 2**32, tl.int32),  # around the corner
        (lambda a, b, x: a.to(tl.int64) * 2**29, -10 * 2**29, tl.int64),
        (lambda a, b, x: a / 4, -2.5, tl.float32),
        (lambda a, b, x: x * 1.0, 0.33398438, tl.bfloat16),
        (lambda a, b, x: x + a.to(tl.float32), -9.6660156, tl.float32),
        (lambda a, b, x: (a < b) & (b > 0), True, tl.int1),
        (lambda a, b, x: (a < b) * b, 3, tl.int32),
        (lambda a, b, x: language.maximum(float("nan"), a.to(tl.float32)), -10.0, tl.float32),
        (lambda a, b, x: language.exp2(scalar(-130.0)), 0.0, tl.float32),  # too small for full precision
        (lambda a, b, x: (a - b * 4.0).to(tl.int32), -22, tl.int32),
    ],
)
def test_scalars_are_tritons(found, data: object, dtype: tl.dtype):
    x = scalar(1 / 3).to(tl.bfloat16)
    with np.errstate(over="ignore"):
        value = found(scalar(-10), scalar(3), x)
    assert value.dtype is dtype and np.isclose(value.data, data, rtol=1e-6, atol=0.0)


def test_operands_have_the_bits_of_tf32():
    exact = struct.unpack("f", struct.pack("I", 0x3F802000))[0]
    just_below = struct.unpack("f", struct.pack("I", 0x3F803FFF))[0]
    one = Value(np.full((16, 16), 1 / 16, np.float32), tl.float32)
    acc = language.zeros([16, 16], tl.float32)
    for number in (exact, just_below):
        found = language.mma_v2(language.full([16, 16], number, tl.float32), one, acc, input_precision="tf32")
        assert found.data[0, 0] == np.float32(exact)


# ---- memory ------------------------------------------------------------------------------------------------------------


@gluon.jit
def copy_kernel(source, to, count, OTHER: gl.constexpr):
    lane = gl.program_id(0) * 32 + gl.arange(0, 32, layout=ROW)
    other: gl.constexpr = 0.0 if OTHER else None
    x = gl.load(source + lane, mask=lane < count, other=other)
    gl.store(to + lane, x)


@pytest.mark.parametrize(("dtype", "other"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)])
def test_a_masked_copy(dtype: torch.dtype, other: bool):
    """Elements that are masked and have no other are undefined."""
    source, to = torch.randn(N).to(dtype), torch.empty(N, dtype=dtype)
    launch(copy_kernel, source, to, 40, ctas=2, OTHER=other)
    assert torch.equal(to[:40], source[:40])
    assert (to[40:] == 0 if other else to[40:].isnan()).all()


@pytest.mark.parametrize(("count", "ctas", "name"), [(65, 3, "source"), (64, 3, "to"), (-1, 3, "to")])
def test_an_access_outside_names_the_tensor(count: int, ctas: int, name: str):
    memory = torch.zeros(4 * N)
    with pytest.raises(Fault, match=rf"copy_kernel, CTA \(2, 0\) of \(3, 1\): a \w+ outside {name} \(64 elements"):
        launch(copy_kernel, memory[:N], memory[2 * N : 3 * N], count, ctas=ctas, OTHER=True)
