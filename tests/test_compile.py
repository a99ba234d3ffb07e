"""Every kernel compiles for every supported GPU, on the installed and the oldest Triton, within its budget."""

from __future__ import annotations

import pytest

from flashdelta.compile import VARIANTS, late_operands
from flashdelta.hopper.launch import DECODE_AT_ONCE

from . import compile_budget
from .compile_budget import ARCHITECTURES, DEVICE_SHARED_BYTES


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("toolchain", compile_budget.toolchains())
def test_kernels_stay_within_their_budget(toolchain: str, arch: int):
    costs = compile_budget.report(arch, compile_budget.toolchains()[toolchain])
    if toolchain == "oldest":
        assert {cost["triton"] for cost in costs} == {"3.6.0"}
    wrong = compile_budget.violations(costs, compile_budget.read(), arch)
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_budget_covers_every_stage_on_every_gpu(arch: int):
    names = [name.split(" ", 1)[1] for name in compile_budget.read() if name.startswith(f"sm_{arch} ")]
    kernels = {name: name.split(": ", 1)[0] for name in names}
    # Hopper's kernels are named as the portable ones; their variants tell them apart
    hopper = {kernel for name, kernel in kernels.items() if name.startswith(f"{kernel}: hopper ")}
    portable = {kernel for name, kernel in kernels.items() if not name.startswith(f"{kernel}: hopper ")}
    forward, split = {"prepare_kernel", "recurrence_kernel"}, {"maps_kernel", "compose_kernel"}
    backward = {"reverse_kernel", "wy_kernel", "intra_kernel", "finish_kernel"}
    alone = {"prepare_bounded_kernel", "output_kernel", "plan_kernel", "decode_kernel", "commit_kernel"}
    assert portable == forward | split | backward | alone
    # `prepare` plans, and composition is the portable one
    assert hopper == (forward | split | backward | {"decode_kernel"} if arch == 90 else set())


def test_as_many_programs_of_hoppers_decode_fit_as_it_counts_on():
    """A multiprocessor has 65,536 registers, which a warp gets 8 a thread at a time, and 228 KB of shared memory, of which 1 KB
    goes with each program."""
    costs = [cost for name, cost in compile_budget.read().items() if name.startswith("sm_90 decode_kernel: hopper ")]
    by_registers = min(65_536 // (32 * 8 * -(-cost["registers"] // 8)) for cost in costs)
    by_memory = min(228 * 1024 // (cost["shared_bytes"] + 1024) for cost in costs)
    assert min(by_registers, by_memory) == DECODE_AT_ONCE


def test_hopper_variants_are_named_so():
    assert all(variant.name.startswith("hopper ") == (variant.backend == "hopper") for variant in VARIANTS)


def _cost(**changes: object) -> dict:
    cost = {"kernel": "k", "variant": "v", "arch": 90, "triton": "3.6.0"}
    costs = {"registers": 128, "spill_bytes": 0, "shared_bytes": 1000, "product_waits": 4, "late_operands": 0}
    return cost | costs | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"registers": 129}, "129 registers, at most 128"),
        ({"spill_bytes": 8}, "8 spill_bytes, at most 0"),
        ({"shared_bytes": 1001}, "1001 shared_bytes, at most 1000"),
        ({"product_waits": 5}, "5 product_waits, at most 4"),
        ({"late_operands": 1}, "1 late_operands, at most 0"),
        ({"variant": "new"}, "not in the budget"),
        ({"variant": "new"}, "but not compiled"),
    ],
)
def test_going_over_budget_is_said(changes: dict, said: str):
    budget = {"sm_90 k: v": {"registers": 128, "spill_bytes": 0, "shared_bytes": 1000, "product_waits": 4}}
    assert compile_budget.violations([_cost()], budget, 90) == []
    assert any(said in line for line in compile_budget.violations([_cost(**changes)], budget, 90))


def test_more_shared_memory_than_the_device_has_is_said():
    size = DEVICE_SHARED_BYTES[90] + 1
    budget = {"sm_90 k: v": {"registers": 128, "spill_bytes": 0, "shared_bytes": size, "product_waits": 4}}
    said = compile_budget.violations([_cost(shared_bytes=size)], budget, 90)
    assert said == [f"sm_90 k: v: {size} shared_bytes, the device has {size - 1}"]


PRODUCT = "/*0010*/ HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8].tnspB, R24, gsb0 ;"
FENCE, WAIT = "/*0000*/ WARPGROUP.ARRIVE ;", "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((FENCE, PRODUCT, "/*0020*/ MOV R58, 0x3f803f80 ;", WAIT), 1),
        ((FENCE, PRODUCT, "/*0020*/ @!P0 LDS.128 R56, [R4] ;", WAIT), 4),
        ((FENCE, "/*0008*/ MOV R57, RZ ;", PRODUCT, WAIT), 1),
        (("/*0000*/ MOV R57, RZ ;", FENCE, PRODUCT, WAIT, "/*0040*/ MOV R58, RZ ;"), 0),
        ((FENCE, PRODUCT, "/*0020*/ STS [R58], R59 ;", "/*0024*/ MOV R60, RZ ;", WAIT), 0),
        ((FENCE, PRODUCT.replace("R56", "gdesc[UR4]"), "/*0020*/ MOV R58, RZ ;", WAIT), 0),
    ],
    ids=["under way", "wide", "after the fence", "in time", "read", "in shared memory"],
)
def test_operands_that_are_written_late_are_counted(lines: tuple[str, ...], found: int):
    assert late_operands("\n".join(lines)) == found
