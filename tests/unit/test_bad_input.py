"""Input that calls must refuse, on their first run and on a replay; and that inputs are never written."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.problem import device_checks

from ..full import thinned
from ..support import refusals
from ..support.cases import BY_NAME, CASES, Case, case_id
from ..support.inputs import make_call
from ..support.oracle import CHUNK_ONLY, as_recurrent, same_bits
from .conftest import Started

pytestmark = pytest.mark.usefixtures("as_on_gpu")

REFUSALS = refusals.refusals(refusals.REFUSED, *refusals.tensor_axes(), *refusals.option_axes())
both = pytest.mark.parametrize("op", refusals.FORWARD)


def raise_answer(answer: fd.Support) -> None:
    assert not answer and answer.backend is None
    raise ValueError(answer.reason)


@cache
def runs(op: Callable, start: str) -> bool:
    call = refusals.good_call(op, start)
    op(**call)
    return bool(fd.supports(op, **call))


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refused_with_a_message_that_says_all(refusal: refusals.Refusal):
    """Operator, `explain` and `supports` refuse; nothing is written. What is wanted without gradients runs without them."""
    assert runs(refusal.op, refusal.start)
    _, call = refusal.calls()
    plain = [x for x in call.values() if isinstance(x, Tensor) and x.layout is torch.strided]
    written = [x for x in plain if x.device.type == "cpu"]
    before = [x.clone() for x in written]
    refusal.expect(refusal.op, call)
    refusal.expect(lambda **arguments: fd.explain(refusal.op, **arguments), call)
    refusal.expect(lambda **arguments: raise_answer(fd.supports(refusal.op, **arguments)), call)
    assert all(same_bits(x, y) for x, y in zip(written, before))
    if any(x.requires_grad for x in plain):
        with torch.no_grad():
            refusal.op(**call)


@pytest.mark.parametrize("refusal", thinned(REFUSALS, 3))
def test_a_replay_refuses_the_same(refusal: refusals.Refusal, pretended: Started):
    good, call = ({"backend": "triton"} | x for x in refusal.calls())
    for i in range(2):
        pretended.clear()
        refusal.op(**good)
        assert set(pretended.anew()) == {i == 0}
        pretended.clear()
        refusal.expect(refusal.op, call)
        assert not pretended


# ---- signatures -----------------------------------------------------------------------------------------------------

OF_OTHERS = ("sclae", "use_qk_l2norm", "transpose_state_layout", "head_first")
UNKNOWN = {
    fd.chunk_kda: OF_OTHERS,
    fd.fused_recurrent_kda: (*OF_OTHERS, *CHUNK_ONLY),
    fd.recurrent_kda: ("sclae", "state_pool", "out", "state_indices", "transpose_state_layout"),
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in UNKNOWN.items() for name in names])
def test_unknown_argument_is_an_error(op: Callable, name: str):
    call = refusals.good_call(op, "plain")
    for run in (op, lambda **arguments: fd.explain(op, **arguments)):
        with pytest.raises(TypeError, match=f"'{name}'"):
            run(**call, **{name: None})


# ---- backends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interpreted", "changes", "why"),
    [
        ("0", {}, r"tensors are on the CPU \(TRITON_INTERPRET=1"),
        ("1", make_call(BY_NAME["bounded"], torch.float64), "float64; it takes bfloat16"),
    ],
    ids=["CPU", "float64"],
)
def test_triton_backend_says_why_not(interpreted: str, changes: dict, why: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    with pytest.raises(ValueError, match=rf"^backend must be .*{why}.*; got 'triton'"):
        fd.chunk_kda(**refusals.good_call(fd.chunk_kda, "plain") | changes, backend="triton")


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_without_triton_it_is_what_lacks(backend: str, monkeypatch: pytest.MonkeyPatch):
    """And not TRITON_INTERPRET=1, which needs it."""
    monkeypatch.setattr("flashdelta.backends.has_triton", lambda: False)
    monkeypatch.setattr("flashdelta.backends._cached_capability", lambda index: (9, 0))
    explained = fd.explain(fd.chunk_kda, **refusals.good_call(fd.chunk_kda, "plain"), device="cuda")
    assert {v.backend: v.reason for v in explained.verdicts}[backend] == "Triton is not installed"
    if backend == "triton":
        with pytest.raises(ValueError, match=r"^backend must be .*\(triton: Triton is not installed\); got 'triton'"):
            fd.chunk_kda(**refusals.good_call(fd.chunk_kda, "plain"), backend=backend)


BAD_RECORDS = {
    **{"rows": (-1, 2.0, 2**50), "num_spec_tokens": (17, None), "HV": (0,)},
    **{"K": (48,), "V": (512, True), "device": ("foo", 0)},
}


@pytest.mark.parametrize(("name", "value"), [(name, x) for name, values in BAD_RECORDS.items() for x in values])
def test_replay_buffer_refuses_by_name(name: str, value: object):
    good = {"rows": 4, "num_spec_tokens": 3, "HV": 2, "K": 64, "V": 128}
    assert fd.replay_buffer(**good).shape == (4, 4, 2, 272)
    with pytest.raises((ValueError, TypeError), match=f"^{name} must be .+; got "):
        fd.replay_buffer(**good | {name: value})


# ---- values on the device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", refusals.refusals(refusals.REFUSED_IF_CHECKED))
def test_values_on_the_device_are_refused_if_checked(refusal: refusals.Refusal, monkeypatch: pytest.MonkeyPatch):
    """Where values are not checked they touch nothing outside the tensors."""
    monkeypatch.setattr(device_checks, "ENABLED", True)
    good, call = refusal.calls()
    refusal.op(**deepcopy(good))
    refusal.expect(refusal.op, call)
    monkeypatch.setattr(device_checks, "ENABLED", False)
    if refusal.start == "offsets":
        call |= {"output_final_state": True}
        call |= {"return_intermediate_states": True} if refusal.op is fd.chunk_kda else {}
    results = refusal.op(**call)
    if refusal.op is not fd.commit:
        assert results[0].shape[:2] == call["x" if refusal.op is fd.short_convolution else "v"].shape[:2]
    if refusal.start == "offsets":
        assert results[1].shape == (len(call["cu_seqlens"]) - 1, 2, 32, 64)


NULL = {
    "below 0": {"state_indices": refusals.offsets(-1, -1, -9)},
    "slot 0 reserved": {"state_indices": refusals.offsets(0, 0, 0), "null_index": "non_positive"},
    "checkpoints": refusals.marks([[16, 0], [0, 0], [16, 32]], [[0, 0], [9, 9], [-1, 3]]),
}


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op in refusals.FORWARD for name in NULL if op is fd.chunk_kda or name != "checkpoints"],
)
def test_null_indices_pass_the_check(op: Callable, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_checks, "ENABLED", True)
    op(**refusals.good_call(op, "three") | NULL[name])


# ---- inputs are never written, out is ------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("case", [c for c in CASES if c.tokens < 200], ids=case_id)
def test_inputs_are_never_written(case: Case, op: Callable):
    call = make_call(case)
    call = call if op is fd.chunk_kda else as_recurrent(call)
    tensors = {name: x for name, x in call.items() if isinstance(x, Tensor)}
    before = {name: (x.clone(), x._version) for name, x in tensors.items()}
    op(**call)
    for name, (copy, version) in before.items():
        assert same_bits(tensors[name], copy), name
        assert tensors[name]._version == version, name


@both
def test_out_may_be_a_strided_view(op: Callable):
    """Beside v in one buffer too, as long as the two don't touch."""
    call = refusals.good_call(op, "plain")
    want, _ = op(**call)
    buffer = torch.full((2, 70, 2, 2, 64), torch.nan)
    buffer[0, :, :, 0] = call["v"][0]
    o, _ = op(**call | {"v": buffer[:1, :, :, 0]}, out=buffer[1:, :, :, 0])
    assert same_bits(o, want)
    assert buffer[:, :, :, 1].isnan().all()
