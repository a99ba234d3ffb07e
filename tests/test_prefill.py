"""`kda_prefill` on the CPU: the reference against a definition written anew, the operator, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.prefill import INPUTS, PREFILL_SIZES

from .cases import Case, case_id
from .oracle import assert_close, same_bits
from .prefills import CASES, LOGITS, PLAIN, SIZES, hold, prefill_call, size_id, sized, truth


def recurrence(call: dict) -> Tensor:
    """`o` token by token, in float64."""
    exact = {name: call[name].transpose(1, 2).double() for name in INPUTS}
    options = {name: call[name] for name in ("scale", "gate") if name in call}
    return fd.fused_recurrent_kda(**exact, **options, backend="reference")[0].transpose(1, 2)


def defined(call: dict) -> tuple[Tensor, Tensor]:
    """`w` and `u` chunk by chunk as the formulas say, in float64, for decays whose prefix sums do not cancel."""
    C = call["chunk_size"]
    q, k, v, g, beta = (call[name].double() for name in INPUTS)
    if call["gate"] == "logsigmoid":
        g = torch.nn.functional.logsigmoid(g)
    T = q.shape[2]
    chunks = -(-T // C)
    w, u = (torch.zeros(*x.shape[:2], chunks, C, x.shape[3], dtype=torch.float64) for x in (k, v))
    for c in range(chunks):
        rows = slice(c * C, min(T, (c + 1) * C))
        key, value, strength, G = k[:, :, rows], v[:, :, rows], beta[:, :, rows], g[:, :, rows].cumsum(2)
        A = torch.zeros(*strength.shape, strength.shape[-1], dtype=torch.float64)
        for i in range(key.shape[2]):
            for j in range(i):
                pair = key[:, :, i] * key[:, :, j] * (G[:, :, i] - G[:, :, j]).exp()
                A[:, :, i, j] = strength[:, :, i] * pair.sum(-1)
        inverse = torch.linalg.inv(torch.eye(A.shape[-1], dtype=torch.float64) + A) * strength[:, :, None]
        w[:, :, c, : key.shape[2]] = inverse @ (key * G.exp())
        u[:, :, c, : key.shape[2]] = inverse @ value
    return w, u


@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize("case", [replace(PLAIN, B=2, T=75), LOGITS], ids=case_id)
def test_truth_is_the_definition(case: Case, size: tuple[int, int, int]):
    call = prefill_call(sized(case, size))
    o, w, u = truth(call)
    assert_close("o", o, recurrence(call), 1e-11)
    for name, got, want in zip("wu", (w, u), defined(call)):
        assert_close(name, got, want, 1e-11)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reference_backend(case: Case):
    call = prefill_call(case)
    want = truth(call)
    if case.T > 0:
        assert_close("o", want[0], recurrence(call), 1e-10)
    hold(case, fd.kda_prefill(**call), want)


def test_public_function_and_operator_are_one():
    call = prefill_call(PLAIN)
    tensors = [call[name] for name in INPUTS]
    for got, want in zip(torch.ops.kda_prefill.forward(*tensors, 64), fd.kda_prefill(*tensors)):
        assert same_bits(got, want)


def test_operator_passes_opcheck():
    call = prefill_call(PLAIN)
    checked = torch.library.opcheck(torch.ops.kda_prefill.forward, (*(call[name] for name in INPUTS), 32))
    assert set(checked.values()) == {"SUCCESS"}


def test_compiles_in_one_graph():
    call = prefill_call(LOGITS)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **arguments: fd.kda_prefill(**arguments), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**call), fd.kda_prefill(**call)):
        assert same_bits(got, want)


BAD = {
    "rank": ({"q": torch.zeros(2, 70, 64)}, ValueError, "q: got shape [2, 70, 64], wanted a tensor of rank 4"),
    "no tensor": ({"beta": 1.0}, TypeError, "beta: got float, wanted a torch.Tensor"),
    "k shape": ({"k": torch.zeros(1, 2, 71, 64)}, ValueError, "k: got shape [1, 2, 71, 64], wanted [B, H, T, K]"),
    "v tokens": ({"v": torch.zeros(1, 2, 71, 64)}, ValueError, "v: got shape [1, 2, 71, 64], wanted [B, H, T, V]"),
    "g heads": ({"g": torch.zeros(1, 1, 70, 64)}, ValueError, "g: got shape [1, 1, 70, 64], wanted [B, H, T, K]"),
    "beta shape": ({"beta": torch.zeros(1, 70, 2)}, ValueError, "beta: got shape [1, 70, 2], wanted [B, H, T]"),
    "dtype": ({"g": torch.zeros(1, 2, 70, 64).bfloat16()}, TypeError, "g: got dtype torch.bfloat16, wanted float32"),
    "float64": ({"q": torch.zeros(1, 2, 70, 64).double()}, TypeError, "q: got dtype torch.float64, wanted float32"),
    "strides": ({"v": torch.zeros(1, 70, 2, 64).transpose(1, 2)}, ValueError, "v: got strides "),
    "device": (
        {"k": torch.zeros(1, 2, 70, 64, device="meta")},
        ValueError,
        "k: got device meta, wanted q's device cpu",
    ),
    "chunk": ({"chunk_size": 16}, ValueError, "chunk_size: got (K, V, C) = (64, 64, 16), wanted one of (64, 64, 32)"),
    "chunk type": ({"chunk_size": 64.0}, TypeError, "chunk_size: got 64.0 (float), wanted an int"),
    "scale": ({"scale": "1"}, TypeError, "scale: got '1' (str), wanted a float or None"),
    "gate": ({"gate": "softplus"}, ValueError, "gate: got 'softplus', wanted one of ('none', 'logsigmoid')"),
    "tf32": ({"precision": "tf32"}, ValueError, "precision: got 'tf32', wanted one of ('ieee', 'tf32x3')"),
    "backend": ({"backend": "cuda"}, ValueError, "backend: got 'cuda', wanted one of"),
    "hopper": ({"backend": "hopper"}, ValueError, "backend: got 'hopper', wanted one that can run this call"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_with_a_message_that_says_all(name: str):
    call = prefill_call(replace(PLAIN, T=70))
    changes, error, said = BAD[name]
    with pytest.raises(error) as caught:
        fd.kda_prefill(**call | changes)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("K", "V", "C", "named"), [(32, 32, 32, "q"), (128, 64, 64, "v"), (64, 128, 32, "v"), (256, 256, 64, "q")]
)
def test_other_sizes_are_refused_by_name(K: int, V: int, C: int, named: str):
    call = prefill_call(replace(PLAIN, K=K, V=V, chunk_size=C, T=5))
    with pytest.raises(ValueError) as caught:
        fd.kda_prefill(**call)
    sizes = ", ".join(map(str, PREFILL_SIZES))
    assert str(caught.value) == f"{named}: got (K, V, C) = {(K, V, C)}, wanted one of {sizes}"


def test_gradients_are_refused():
    call = prefill_call(PLAIN)
    call["v"].requires_grad_()
    with pytest.raises(ValueError, match=r"^v: got a tensor that requires grad"):
        fd.kda_prefill(**call)
    with torch.no_grad():
        fd.kda_prefill(**call)
