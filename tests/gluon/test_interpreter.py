"""The interpreter itself: numbers as the GPU has them, and that it tells what a kernel does wrong."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashdelta.kernels.hopper.device.compat import copy_async, copy_tile, store_tile
from flashdelta.kernels.hopper.launch import describe
from flashdelta.program.launch import Launch

from . import language
from .interpreter import hopper_on_cpu, run
from .values import Fault, Value, round_bf16, scalar

N = 64
ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))


def launch(kernel, *arguments: object, ctas: int = 1, **constants: object) -> None:
    run(Launch(kernel, ctas, arguments, constants, num_warps=4))


def tile(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


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
    """What is masked and has no other is undefined."""
    source, to = torch.randn(N).to(dtype), torch.empty(N, dtype=dtype)
    launch(copy_kernel, source, to, 40, ctas=2, OTHER=other)
    assert torch.equal(to[:40], source[:40])
    assert (to[40:] == 0 if other else to[40:].isnan()).all()


@pytest.mark.parametrize(("count", "ctas", "name"), [(65, 3, "source"), (64, 3, "to"), (-1, 3, "to")])
def test_an_access_outside_names_the_tensor(count: int, ctas: int, name: str):
    memory = torch.zeros(4 * N)
    with pytest.raises(Fault, match=rf"copy_kernel, CTA \(2, 0\) of \(3, 1\): a \w+ outside {name} \(64 elements"):
        launch(copy_kernel, memory[:N], memory[2 * N : 3 * N], count, ctas=ctas, OTHER=True)


# ---- what is under way -------------------------------------------------------------------------------------------------


@gluon.jit
def tma_kernel(source_d, to_d, to, WAIT: gl.constexpr, FENCE: gl.constexpr, STORED: gl.constexpr, OVER: gl.constexpr):
    """Copies a tile by way of shared memory, times two."""
    shared = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, 8192)
    copy_tile(source_d, [0, 0], full, shared)
    if WAIT:
        mbarrier.wait(full, 0)
    x = shared.load(ROWS).to(gl.float32)
    shared.store((x * 2.0).to(gl.bfloat16))
    if FENCE:
        fence_async_shared()
    store_tile(to_d, [0, 0], shared)
    if OVER:
        shared.store(x.to(gl.bfloat16))
    if STORED:
        tma.store_wait(0)


RIGHT = {"WAIT": True, "FENCE": True, "STORED": True, "OVER": False}


def doubled(**wrong: bool) -> torch.Tensor:
    to = torch.zeros(64, 64, dtype=torch.bfloat16)
    launch(tma_kernel, describe(tile(), (64, 64)), describe(to, (64, 64)), to, **RIGHT | wrong)
    return to


def test_tma_copies():
    """What is not waited for is not there, and the source of a store must stay."""
    assert torch.equal(doubled(), 2 * tile())
    assert doubled(WAIT=False).isnan().all()
    assert torch.equal(doubled(OVER=True), tile())


@pytest.mark.parametrize(("wrong", "told"), [("FENCE", "without a fence_async_shared"), ("STORED", "1 stores by TMA")])
def test_what_is_missing_is_told(wrong: str, told: str):
    with pytest.raises(Fault, match=told):
        doubled(**{wrong: False})


@gluon.jit
def mma_kernel(a, b, to, GROUPS: gl.constexpr, MMAS: gl.constexpr, OVER: gl.constexpr, READ: gl.constexpr):
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))[:, None]
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))[None, :]
    a_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    b_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    copy_async(a_s, a + row * 64 + column)
    async_copy.commit_group()
    copy_async(b_s, b + row * 64 + column)
    async_copy.commit_group()
    async_copy.wait_group(GROUPS)
    fence_async_shared()
    acc = warpgroup_mma(a_s, b_s, gl.zeros((64, 64), gl.float32, layout=ACC), use_acc=False, is_async=True)
    if OVER:
        b_s.store(gl.zeros((64, 64), gl.bfloat16, layout=ROWS))
    if READ:
        acc = acc + 1.0
    acc = warpgroup_mma_wait(MMAS, deps=[acc])
    gl.store(to + row * 64 + column, acc)


def product(**wrong: object) -> torch.Tensor:
    to = torch.zeros(64, 64)
    launch(mma_kernel, tile(1), tile(2), to, **{"GROUPS": 0, "MMAS": 0, "OVER": False, "READ": False} | wrong)
    return to


def test_mma():
    """An operand must stay until the MMA is done, and must be waited for."""
    assert torch.allclose(product(), tile(1).float() @ tile(2).float(), atol=1e-4)
    assert product(OVER=True).eq(0).all()
    assert product(GROUPS=1).isnan().all()


@pytest.mark.parametrize("wrong", [{"MMAS": 1}, {"READ": True}], ids=str)
def test_an_accumulator_must_be_waited_for(wrong: dict):
    with pytest.raises(Fault, match=r"not waited for|Accumulator"):
        product(**wrong)


# ---- partitions --------------------------------------------------------------------------------------------------------


@gluon.jit
def produce(numbers, ring, full, empty, count, ARRIVE: gl.constexpr):
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    for i in range(count):
        mbarrier.wait(empty.index(i % 2), (i // 2) & 1 ^ 1)
        copy_async(ring.index(i % 2), numbers + i * 32 + lane)
        if ARRIVE:
            async_copy.mbarrier_arrive(full.index(i % 2), increment_count=False)


@gluon.jit
def consume(to, ring, full, empty, count, EARLY: gl.constexpr):
    lane = gl.arange(0, 32, layout=ROW)
    total = gl.zeros([32], gl.float32, layout=ROW)
    for i in range(count):
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        if EARLY:
            mbarrier.arrive(empty.index(i % 2), count=1)
        total += ring.index(i % 2).load(ROW)
        if not EARLY:
            mbarrier.arrive(empty.index(i % 2), count=1)
    gl.store(to + lane, total)


@gluon.jit
def ring_kernel(numbers, to, count, ARRIVE: gl.constexpr, EARLY: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.float32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=32)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [(consume, (to, ring, full, empty, count, EARLY)), (produce, (numbers, ring, full, empty, count, ARRIVE))],
        [1],
        [24],
    )


def summed(ARRIVE: bool = True, EARLY: bool = False) -> bool:
    numbers, to = torch.randn(7, 32, generator=torch.Generator().manual_seed(3)), torch.zeros(32)
    launch(ring_kernel, numbers, to, 7, ARRIVE=ARRIVE, EARLY=EARLY)
    return torch.allclose(to, numbers.sum(0), atol=1e-5)


@pytest.mark.parametrize("workers_first", [False, True])
def test_partitions_take_turns(workers_first: bool):
    with hopper_on_cpu(workers_first=workers_first):
        assert summed()


def test_a_place_that_is_given_back_too_early_is_overwritten():
    assert not summed(EARLY=True)


def test_a_deadlock_is_told():
    with pytest.raises(Fault, match=r"all wait for each other:\n  produce of ring_kernel, .* waits for phase 0"):
        summed(ARRIVE=False)
