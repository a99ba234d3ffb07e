"""The operator `chunk_bwd_wy_dqkg` by its Triton kernel, run on the CPU by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.triton import wy

from ..support.oracle import poisoned_memory
from ..support.wy import BY_NAME, CASES, WyCase, errors, exact, make_wy

SMALL = [
    replace(case, HV=case.HV if case.H != case.HV else 1, H=1 if case.H == case.HV else case.H, T=min(case.T, 66))
    for case in CASES
]
"""One head where heads are not the point."""

HELD = [case for case in SMALL if case.name not in ("rows", "strong", "strided", "none", "no_sequence")]
"""Those in which what is held differs: it is of one chunk, wherever that lies."""


@pytest.mark.parametrize(
    ("case", "held"),
    [pytest.param(case, False, id=f"{case.name}-sliced") for case in SMALL]
    + [pytest.param(case, True, id=f"{case.name}-held") for case in HELD],
)
def test_results_are_the_reference(case: WyCase, held: bool, monkeypatch: pytest.MonkeyPatch):
    if held:  # as on Hopper
        monkeypatch.setattr(wy, "wy_config", lambda problem, capability: wy.WyConfig(16, problem.V, 4, 3))
    call = make_wy(case)
    with poisoned_memory():
        found = fd.kernels.chunk_bwd_wy_dqkg(**call, backend="triton")
    assert all(error <= 1e-6 for error in errors(found, exact(call)).values())


def test_nan_stays_in_its_sequence():
    call = make_wy(BY_NAME["packed32"])
    clean = fd.kernels.chunk_bwd_wy_dqkg(**call, backend="triton")
    call["do"] = call["do"].clone()
    call["do"][:, 3] = torch.nan
    found = fd.kernels.chunk_bwd_wy_dqkg(**call, backend="triton")
    assert all(torch.equal(x[:, 33:], y[:, 33:]) for x, y in zip(found, clean))
    assert found[0][:, 3].isnan().all()


def test_chunks_without_a_row_are_left_alone():
    """Offsets that promise more chunks than there are states: nothing outside the tensors is read or written."""
    call = make_wy(BY_NAME["packed"])
    short = {name: call[name][:, :2] for name in ("h", "dh")}
    want = fd.kernels.chunk_bwd_wy_dqkg(**call, backend="triton")
    found = fd.kernels.chunk_bwd_wy_dqkg(**call | short, backend="triton")
    assert all(torch.equal(x[:, :81], y[:, :81]) for x, y in zip(found, want))
