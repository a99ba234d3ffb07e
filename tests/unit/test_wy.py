"""`fd.kernels.chunk_bwd_wy_dqkg` without a GPU: the reference, the operator, refusals, and the choice of a backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from flashdelta import backends
from flashdelta.problem import device_checks as checked
from flashdelta.problem.problem import Problem
from flashdelta.runtime.call import check
from flashdelta.runtime.torch_ops import BACKWARD_WY
from flashdelta.testing.cases import case_id
from flashdelta.testing.wy import (
    BY_NAME,
    BY_TOKEN,
    CASES,
    NAMES,
    TENSORS,
    WyCase,
    by_definition,
    errors,
    make_wy,
)

wy = fd.kernels.chunk_bwd_wy_dqkg
PLAIN = BY_NAME["plain"]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reference_is_the_gradient_of_the_definition(case: WyCase):
    call = make_wy(case, torch.float64)
    found = wy(**call)
    assert all(error <= 1e-12 for error in errors(found, by_definition(call)).values())
    assert [x.dtype for x in found] == [torch.float64] * 6


def test_results_have_the_documented_shapes_and_dtypes():
    call = make_wy(BY_NAME["grouped"], torch.bfloat16)
    B, T, HV, K, V, C = 1, 70, 3, 32, 64, 64
    shapes = [[B, T, HV, K], [B, T, HV, K], [B, T, HV, V], [B, T, HV], [B, T, HV, K], [B, T, HV, C]]
    found = dict(zip(NAMES, wy(**call)))
    assert [list(x.shape) for x in found.values()] == shapes
    assert {name: x.dtype for name, x in found.items()} == {
        name: torch.bfloat16 if name == "dv" else torch.float32 for name in NAMES
    }


def test_packed_results_are_those_of_each_sequence():
    call = make_wy(BY_NAME["packed"], torch.float64)
    together = wy(**call)
    row = 0
    for begin, end in zip(call["cu_seqlens"].tolist(), call["cu_seqlens"].tolist()[1:]):
        rows = -(-(end - begin) // 64)
        alone = call | {name: call[name][:, begin:end] for name in BY_TOKEN} | {"cu_seqlens": None}
        alone |= {name: call[name][:, row : row + rows] for name in ("h", "dh")}
        for x, whole in zip(wy(**alone), together):
            torch.testing.assert_close(x, whole[:, begin:end], rtol=1e-12, atol=1e-12)
        row += rows


def test_what_the_docstring_says_is_not_looked_at():
    call = make_wy(BY_NAME["packed"], torch.float64)
    want = wy(**call)
    call["A"] = torch.where(call["A"] == 0.0, torch.nan, call["A"])
    for name in ("h", "dh"):
        call[name] = torch.cat([call[name], call[name].new_full((1, 2, *call[name].shape[2:]), torch.nan)], dim=1)
    assert all(torch.equal(x, y) for x, y in zip(wy(**call), want))


# ---- the operator -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [PLAIN, BY_NAME["packed"], BY_NAME["none"]], ids=case_id)
def test_opcheck(case: WyCase):
    call = make_wy(case)
    arguments = BACKWARD_WY.arguments(*check(wy, **call), "reference")
    # aot_dispatch asks for gradients, which a backward pass has none of
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flashdelta.chunk_bwd_wy_dqkg.default, arguments, test_utils=tests)


def test_compiles_in_one_graph():
    call = make_wy(PLAIN)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **arguments: wy(**arguments), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(x, y) for x, y in zip(compiled(**call), wy(**call)))


# ---- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"q": 3}, TypeError, "q: got int, wanted a torch.Tensor"),
        ({"q": torch.zeros(1, 70, 32)}, ValueError, "q: got shape [1, 70, 32], wanted [B, T, H, K], of rank 4"),
        (
            {"k": torch.zeros(1, 70, 1, 32)},
            ValueError,
            "k: got shape [1, 70, 1, 32], wanted [B, T, H, K] = [1, 70, 2, 32]",
        ),
        ({"v": torch.zeros(1, 70, 3, 64)}, ValueError, "v: got 3 value heads, wanted a positive multiple of the 2"),
        ({"v": torch.zeros(1, 70, 2, 48)}, ValueError, "v: got V = 48, wanted V in"),
        ({"v_new": torch.zeros(1, 71, 2, 64)}, ValueError, "v_new: got shape [1, 71, 2, 64], wanted [B, T, HV, V]"),
        ({"g": torch.zeros(1, 70, 2, 64)}, ValueError, "g: got shape [1, 70, 2, 64], wanted [B, T, HV, K]"),
        ({"beta": torch.zeros(1, 70, 1)}, ValueError, "beta: got shape [1, 70, 1], wanted [B, T, HV] = [1, 70, 2]"),
        ({"A": torch.zeros(1, 70, 2, 32)}, ValueError, "A: got shape [1, 70, 2, 32], wanted [B, T, HV, chunk_size]"),
        ({"h": torch.zeros(1, 2, 2, 64, 32)}, ValueError, "h: got shape [1, 2, 2, 64, 32], wanted [B, NT, HV, K, V]"),
        ({"dh": torch.zeros(1, 1, 2, 32, 64)}, ValueError, "dh: got shape [1, 1, 2, 32, 64], wanted [B, NT, HV, K, V]"),
        ({"do": torch.zeros(1, 70, 2, 64, dtype=torch.float16)}, TypeError, "do: got dtype torch.float16, wanted q's"),
        ({"g": torch.zeros(1, 70, 2, 32).bfloat16()}, TypeError, "g: got dtype torch.bfloat16, wanted torch.float32"),
        ({"h": torch.zeros(1, 2, 2, 32, 64).half()}, TypeError, "h: got dtype torch.float16, wanted torch.float32"),
        ({"cu_seqlens": torch.tensor([0.0, 70.0])}, TypeError, "cu_seqlens: got dtype torch.float32, wanted int32"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, ValueError, "cu_seqlens: got an empty tensor"),
        ({"chunk_size": 16}, ValueError, "chunk_size: got 16, wanted one of (32, 64)"),
        ({"chunk_size": 64.0}, TypeError, "chunk_size: got 64.0 (float), wanted an int"),
        ({"scale": True}, TypeError, "scale: got True (bool), wanted a float or None"),
        ({"use_exp2": 1}, TypeError, "use_exp2: got 1 (int), wanted a bool"),
        (
            {"backend": "fast"},
            ValueError,
            "backend: got 'fast', wanted one of ('auto', 'hopper', 'triton', 'reference')",
        ),
        ({"backend": "hopper"}, ValueError, "backend: got 'hopper', wanted one that can run this call (hopper: device"),
        ({"v": torch.zeros(1, 70, 2, 64).requires_grad_()}, ValueError, "v: got a tensor that requires grad, wanted"),
        ({"dv": torch.zeros(1, 70, 2, 64, device="meta")}, ValueError, "dv: got device meta, wanted q's device cpu"),
    ],
)
def test_bad_arguments_are_named(changes: dict, error: type[Exception], said: str):
    with pytest.raises(error) as raised:
        wy(**make_wy(PLAIN) | changes)
    assert str(raised.value).startswith(said)


def test_offsets_are_verified_on_request(monkeypatch: pytest.MonkeyPatch):
    call = make_wy(BY_NAME["packed"])
    monkeypatch.setattr(checked, "ENABLED", True)
    wy(**call)
    with pytest.raises(ValueError, match=r"^cu_seqlens: got offsets that fall"):
        wy(**call | {"cu_seqlens": torch.tensor([0, 20, 10, 148])})
    short = {name: call[name][:, :-1] for name in ("h", "dh")}
    with pytest.raises(ValueError, match=r"^h: got 4 rows, wanted one for each of the 5 chunks"):
        wy(**call | short)


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
        assert f"backend: got 'hopper', wanted one that can run this call (hopper: {obstacle}" in str(raised.value)
