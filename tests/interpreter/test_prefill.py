"""The kernels of `kda_prefill` run by Triton's interpreter, in which both precisions are float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.triton import recurrence

from ..support.cases import Case, case_id
from ..support.oracle import poisoned_memory, relative_error
from ..support.prefills import HARD, LOGITS, PLAIN, SIZES, hold, prefill_call, size_id, sized, truth

ONE = replace(PLAIN, H=1, HV=1, T=17)
LENGTHS = (0, 1, 17, 64, 131)
"""Beside every boundary; the others of the table are cut by the same masks."""

SMALL = [replace(ONE, name=f"T{T}", T=T) for T in LENGTHS] + [
    replace(ONE, name="heads", B=2, H=2, HV=2, why="the strides of batches and heads"),
    replace(ONE, name="scale", scale=0.7),
    replace(LOGITS, H=1, HV=1),
    # without a promise about decays one case of equal keys is as the other
    *(replace(case, T=66 if "forget" in case.name else 64) for case in HARD if case.name != "same_keys"),
]


def check(case: Case, **options: object) -> None:
    call = prefill_call(case)
    with poisoned_memory():
        results = fd.kda_prefill(**call, **options, backend="triton")
    hold(case, results, truth(call))


@pytest.mark.parametrize("case", SMALL, ids=case_id)
def test_cases(case: Case):
    check(case)


@pytest.mark.parametrize("size", SIZES, ids=size_id)
def test_sizes(size: tuple[int, int, int]):
    check(sized(replace(ONE, T=size[2] + 1), size), precision="tf32x3")


@pytest.mark.parametrize("case", [ONE, replace(LOGITS, H=1, HV=1, T=17)], ids=case_id)
def test_float32_products(case: Case):
    check(sized(case, SIZES[0]), precision="ieee")


def test_wide_slices_of_the_states(monkeypatch: pytest.MonkeyPatch):
    """As for many heads, on one."""
    monkeypatch.setattr(recurrence, "STATES_FEW", 0)
    check(sized(replace(ONE, T=33), (128, 128, 32)), precision="tf32x3")


@pytest.mark.parametrize("g", [-3e-8, -2e-6, -1e-3])
def test_small_decays_are_not_rounded_away(g: float):
    """Over 100,000 tokens the least of these takes 0.3 % of a state: its log must be right to far less than its size."""
    call = prefill_call(replace(ONE, T=64)) | {"g": torch.full((1, 1, 64, 64), g)}
    tensors = {name: call[name][:, :, :64].transpose(1, 2) for name in ("q", "k", "v", "g", "beta")}
    tensors["beta"] = torch.zeros(1, 64, 1)
    ones = torch.ones(1, 1, 64, 64)
    _, state = fd.chunk_kda(**tensors, initial_state=ones, output_final_state=True, backend="triton")
    lost = torch.special.expm1(torch.tensor(64 * g, dtype=torch.float64)).expand_as(state)
    resolution = torch.finfo(torch.float32).eps / -64 / g
    assert relative_error(state.double() - 1, lost) < 2e-6 + resolution


@pytest.mark.parametrize("name", ["q", "g"])
def test_a_nan_of_a_gpus_arithmetic_is_one_as_any_other(name: str):
    """Of all ones but for the sign: rounded by adding to its bits, it would turn into a zero."""
    found = []
    for bits in (0x7FC0_0000, 0x7FFF_FFFF):
        call = prefill_call(ONE)
        call[name].view(torch.int32)[0, 0, 5] = bits
        found.append(fd.kda_prefill(**call, backend="triton"))
    assert found[0][0][0, 0, 5].isnan().any()
    for plain, ones in zip(*found, strict=True):
        assert torch.equal(plain.isnan(), ones.isnan())
