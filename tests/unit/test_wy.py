"""`fd.kernels.chunk_bwd_wy_dqkg` without a GPU: the reference, the operator, refusals, and the choice of a backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from flashdelta import backends
from flashdelta.problem.problem import Problem
from flashdelta.runtime.call import check

from ..support.cases import case_id
from ..support.wy import BY_NAME, CASES, TENSORS, WyCase, by_definition, errors, make_wy

wy = fd.kernels.chunk_bwd_wy_dqkg
PLAIN = BY_NAME["plain"]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reference_is_the_gradient_of_the_definition(case: WyCase):
    call = make_wy(case, torch.float64)
    found = wy(**call)
    assert all(error <= 1e-12 for error in errors(found, by_definition(call)).values())
    assert [x.dtype for x in found] == [torch.float64] * 6


def test_what_the_docstring_says_is_not_looked_at():
    call = make_wy(BY_NAME["packed"], torch.float64)
    want = wy(**call)
    call["A"] = torch.where(call["A"] == 0.0, torch.nan, call["A"])
    for name in ("h", "dh"):
        call[name] = torch.cat([call[name], call[name].new_full((1, 2, *call[name].shape[2:]), torch.nan)], dim=1)
    assert all(torch.equal(x, y) for x, y in zip(wy(**call), want))


# ---- the choice of a backend ----------------------------------------------------------------------------------------------


def problem_for(**changes: torch.dtype) -> Problem:
    call = make_wy(replace(PLAIN, K=64))
    tensors = {name: call[name].to(changes.get(name, torch.bfloat16)) for name in TENSORS} | {"g": call["g"]}
    return check(wy, **tensors)[0]


@pytest.mark.parametrize(
    ("capability", "changes", "obstacle"),
    [
        ((9, 0), {}, None),
        ((8, 0), {}, "compute capability (8, 0)"),
        ((9, 0), {"A": torch.float32}, "A in torch.float32; it takes bfloat16"),
        ((9, 0), {"dh": torch.float32}, "dh in torch.float32; it takes bfloat16"),
        ((9, 0), dict.fromkeys(TENSORS, torch.float32), "A in torch.float32"),
    ],
    ids=str,
)
def test_hopper_comes_first_where_it_can_run_the_call(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], changes: dict, obstacle: str | None
):
    monkeypatch.setattr(backends, "nvidia_capability", lambda index: capability)
    problem, device = problem_for(**changes), torch.device("cuda", 0)
    assert backends.choose(problem, device, "auto").name == ("triton" if obstacle else "hopper")
    if obstacle:
        with pytest.raises(ValueError) as raised:
            backends.choose(problem, device, "hopper")
        assert f"backend must be one that can run this call (hopper: {obstacle}" in str(raised.value)
