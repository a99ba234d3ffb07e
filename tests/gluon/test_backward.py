"""Gradients by the portable and the Hopper kernels, interpreted, against float64 autograd of the reference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashdelta as fd
from flashdelta.kernels.stages.backward_pass import StageSet
from flashdelta.kernels.triton import segments
from flashdelta.kernels.triton import wy as portable_wy
from flashdelta.runtime import autograd

from ..full import FULL, thinned
from ..gpu.calls import HOPPER_CASES, KIMI, UNBOUNDED, on_gpu
from ..support import gradients as checks
from ..support.cases import BF16, BY_NAME, FORWARD_ONLY, FP32, HARD_CASES, LENGTH_CASES, WITH_GRADIENTS, Case, case_id
from ..support.gradients import gradients, incoming, relative_errors, true_gradients
from ..support.inputs import make_call
from ..support.oracle import as_recurrent, poisoned_memory
from ..support.wy import BY_NAME as WY_CASES
from ..support.wy import WyCase, check_wy, make_wy
from .interpreter import hopper_on_cpu

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def products(request: pytest.FixtureRequest) -> None:
    if "triton" in request.node.name or "portable" in request.node.name:
        request.getfixturevalue("exact_products")


TOLERANCE = {FP32: 3e-4, BF16: 1e-2}
"""Bounds of the error of each gradient over its own norm and the largest gradient's: one that is nearly zero is what is left of
larger terms."""


def few_heads(case: Case) -> Case:
    return case if case.H != case.HV or case.layout != "dense" else replace(case, H=1, HV=1)


ON_HOPPER = [
    replace(KIMI, name="packed_wide", H=1, HV=2, lengths=(1, 63, 64, 65, 0), state=FP32),
    replace(UNBOUNDED, name="packed_wide_unbounded", H=1, HV=1, lengths=(1, 63, 64, 65, 0), state=FP32, v_first=True),
    replace(KIMI, name="small_heads", H=1, HV=2, K=64, V=64, T=130),
    *thinned([few_heads(replace(case, h=False)) for case in HOPPER_CASES if case.name not in FORWARD_ONLY], 2),
]


def small(case: Case) -> Case:
    lengths = case.lengths and tuple(min(length, 66 if case.name == "packed" else 20) for length in case.lengths[:4])
    T = case.chunk_size + 2 if case in LENGTH_CASES or case in HARD_CASES or case.lengths is None else 17
    return few_heads(replace(case, B=min(case.B, 2), T=min(case.T, T), lengths=lengths, h=False))


def call_of(case: Case, backend: str) -> dict:
    return make_call(case, BF16 if backend == "hopper" else FP32) | {"backend": backend}


def hold(found: dict[str, torch.Tensor], call: dict, case: Case) -> None:
    want = true_gradients(call, *incoming(call))
    assert found.keys() == want.keys()
    # a state in bfloat16 is rounded, and so are its gradient and the final state's
    allowed = dict.fromkeys(want, max(TOLERANCE[call["v"].dtype], 5e-3 * (case.state == BF16)))
    if case.hard == "raw_1000" and case.gate == "softplus":
        # it sums gradients of log decays of -1000 times them, so 1e-7 in those, which is rounding, is 1e-4 in it
        allowed["A_log"] *= 10
    assert not {name: x for name, x in relative_errors(found, want).items() if not x <= allowed[name]}


KEPT = (True, False)


def check(case: Case, backend: str, kept: tuple[bool, ...] = KEPT, **options: object) -> None:
    """Kept or computed again, the same bits."""
    call = call_of(case, backend) | options
    grads = incoming(call)
    with poisoned_memory():
        found, *others = [gradients(call | {"disable_recompute": x}, *grads) for x in kept]
    hold(found, call, case)
    assert all(torch.equal(x, again[name]) for again in others for name, x in found.items())


CASES = [*((small(case), "triton") for case in WITH_GRADIENTS), *((case, "hopper") for case in ON_HOPPER)]
LONG = replace(KIMI, H=1, HV=1, K=64, V=64, lengths=(576,), state=FP32, memory="long")
FEW = {"chunk_size": 32, "K": 32, "V": 32, "H": 1, "HV": 1}
V_FIRST = replace(BY_NAME["state_bf16_v_first"], T=66, **FEW)
GROUPED = replace(UNBOUNDED, name="grouped_v_first", H=1, HV=2, v_first=True, memory="long")
SPLIT = [
    # segments of unequal length beside a sequence of one chunk, an empty one and one that stays whole
    (replace(BY_NAME["packed"], name="packed", T=0, lengths=(40, 0, 68, 5), h=False, **FEW), "triton"),
    (replace(BY_NAME["softplus"], name="rows", B=2, T=66, **FEW), "triton"),
    (V_FIRST, "triton"),
    # which go from segment to segment through memory
    (replace(BY_NAME["softplus"], name="wide states", T=66, **FEW | {"K": 256}), "triton"),
    (replace(LONG, name="packed", lengths=(70, 0, 64, 257)), "hopper"),
    (replace(GROUPED, lengths=(63, 0, 140), state=BF16), "hopper"),
    (replace(on_gpu(BY_NAME["decay"]), name="rows", B=2, T=140, H=1, HV=1, memory="long"), "hopper"),
]


def ids(x: object) -> str:
    return getattr(x, "name", str(x))


@pytest.mark.parametrize(
    ("case", "backend", "kept"),
    [(*each, KEPT if FULL else (i % 2 == 0,)) for i, each in enumerate(CASES)],
    ids=ids,
)
def test_gradients_are_those_of_the_reference(case: Case, backend: str, kept: tuple[bool, ...]):
    check(case, backend, kept)


@pytest.mark.parametrize(
    ("case", "backend", "kept"),
    [(*each, KEPT if FULL or i % 4 == 0 else (i % 2 == 0,)) for i, each in enumerate(SPLIT)],
    ids=ids,
)
def test_gradients_of_split_sequences(case: Case, backend: str, kept: tuple[bool, ...]):
    check(case, backend, kept, split=3)


ROWS = replace(KIMI, name="rows", B=2, T=66, H=1, HV=1)


@pytest.mark.parametrize(("case", "split", "sms"), [(ON_HOPPER[0], False, 2), (SPLIT[5][0], 3, 1), (ROWS, False, 1)])
def test_few_ctas_change_no_bit(case: Case, split: bool | int, sms: int):
    """One SM has fewer CTAs than a transition has slices."""
    call = call_of(case, "hopper") | {"split": split}
    grads = incoming(call)
    want = gradients(call, *grads)
    with poisoned_memory(), hopper_on_cpu(sms=sms, workers_first=False):
        found = gradients(call, *grads)
    assert all(torch.equal(x, want[name]) for name, x in found.items())


@pytest.mark.parametrize(("exponent", "hard"), [(-30, None), (-30, "pinned"), (30, "pinned")])
def test_gradients_scale_with_the_loss(exponent: int, hard: str | None):
    """Exactly: what stages leave in float16 has sizes of its own, and large decays leave room."""
    call = call_of(replace(ROWS, hard=hard), "hopper")
    grads = incoming(call)
    want, factor = gradients(call, *grads), 2.0**exponent
    found = gradients(call, *(x * factor for x in grads))
    assert all(torch.equal(x, want[name] * factor) for name, x in found.items())


@pytest.mark.parametrize("hold_sequence", [checks.assert_first_is_its_own, checks.assert_nan_stays])
@pytest.mark.parametrize(("backend", "split"), [("triton", False), ("hopper", False), ("hopper", 3)])
def test_a_sequence_s_gradients_are_its_own(hold_sequence: Callable, backend: str, split: bool | int):
    case = replace(LONG, lengths=(130, 70)) if backend == "hopper" else replace(BY_NAME["packed"], lengths=(17, 40))
    hold_sequence(call_of(replace(case, h=False), backend) | {"split": split})


def test_gradients_of_sums():
    """Which come in as one number, expanded."""
    call = call_of(small(BY_NAME["state"]), "triton")
    v = call["v"].requires_grad_()
    results = fd.chunk_kda(**call)
    (found,) = torch.autograd.grad(sum(x.sum() for x in results), v, retain_graph=True)
    (want,) = torch.autograd.grad(results, v, [torch.ones_like(x) for x in results])
    assert torch.equal(found, want)


@pytest.mark.parametrize("name", ["bounded", "packed_int32"])
def test_what_is_kept_is_not_computed_again(name: str):
    """And the token recurrence has the gradients of the chunks."""
    call = call_of(small(BY_NAME[name]), "triton")
    grads = incoming(call)
    by_token = gradients(as_recurrent(call), *grads, op=fd.fused_recurrent_kda)
    with mock.patch.object(StageSet, "scan", autospec=True, side_effect=StageSet.scan) as scan, poisoned_memory():
        found = gradients(call | {"disable_recompute": True}, *grads)
    assert scan.call_count == 1 and all(torch.equal(x, by_token[name]) for name, x in found.items())


# ---- what a forward leaves -------------------------------------------------------------------------------------------


def test_gradients_by_segments_that_the_forward_left():
    """In two segments, which take less memory than values. The same bits in a second backward pass."""
    call = call_of(LONG, "hopper") | {"split": 2}
    q = call["q"].detach().requires_grad_()
    results = fd.chunk_kda(**call | {"q": q})
    *_, left = results[0].grad_fn.saved_tensors
    assert 0 < left.nbytes <= call["v"].nbytes
    with poisoned_memory():
        first, second = (torch.autograd.grad(results[0].sum(), q, retain_graph=True) for _ in range(2))
    assert torch.equal(*first, *second)


@pytest.mark.parametrize("kept", [False, True], ids=["segments", "all"])
def test_checkpointing_drops_what_a_forward_keeps(kept: bool, monkeypatch: pytest.MonkeyPatch):
    """And a backward pass by segments that the forward left forms none."""
    left, forward = [], autograd.Differentiable.forward
    formed, form = [], segments.transitions

    def noted(*arguments: object) -> dict[str, torch.Tensor]:
        found = forward(*arguments)
        left.extend(weakref.ref(x.untyped_storage()) for name, x in found.items() if name in autograd.KEPT.values())
        return found

    monkeypatch.setattr(autograd.Differentiable, "forward", noted)
    monkeypatch.setattr(segments, "transitions", lambda *arguments: formed.append(1) or form(*arguments))
    call = call_of(replace(V_FIRST, V=64, T=160), "triton") | {"disable_recompute": kept, "split": 3}
    q = call.pop("q").requires_grad_()

    def run(q: torch.Tensor) -> torch.Tensor:
        return fd.chunk_kda(q=q, **call)[0].sum()

    (plain,) = torch.autograd.grad(run(q), q)
    count = len(left)
    assert len(formed) == 1
    loss = checkpoint(run, q, use_reentrant=False)
    gc.collect()
    assert count == (4 if kept else 1) and [x() for x in left[count:]] == [None] * count
    assert torch.equal(*torch.autograd.grad(loss, q), plain) and len(left) == 3 * count


@pytest.mark.parametrize(("slots", "present"), [(0, (True, True)), (65, (True, False)), (1030, (False, True))])
def test_gates_gradients_are_summed_over_all_chunks(slots: int, present: tuple[bool, bool]):
    checks.check_gate_sums(slots, present)


# ---- `chunk_bwd_wy_dqkg` -----------------------------------------------------------------------------------------------

check_hopper_wy = partial(check_wy, dtype=BF16, backend="hopper", device="cpu", tolerance=1e-2)
DIMS = ((128, 128), (64, 128), (128, 64))
WY = [
    replace(case, K=DIMS[i % 3][0], V=DIMS[i % 3][1])
    for i, case in enumerate(WY_CASES.values())
    if case.chunk_size == 64
]


@pytest.mark.parametrize("case", [*WY, replace(WY[0], layout="odd_offset")], ids=lambda x: f"{x.name}-{x.K}-{x.V}")
def test_wy(case: WyCase):
    """Off every boundary by way of copies; the states', too."""
    check_hopper_wy(case)


@pytest.mark.parametrize(("v_first", "sms"), [(False, 1), (True, 5)])
def test_wy_of_persistent_ctas(v_first: bool, sms: int):
    """Tiles that a CTA fetches while it stores those of the one before."""
    with hopper_on_cpu(sms=sms):
        case = WyCase("persistent", "", K=128, V=128, B=2, T=150, H=1, HV=2, log2=True, v_first=v_first)
        check_hopper_wy(case)


@pytest.mark.parametrize("held", [False, True], ids=["sliced", "held"])
@pytest.mark.parametrize("case", WY_CASES.values(), ids=case_id)
def test_portable_wy(case: WyCase, held: bool, monkeypatch: pytest.MonkeyPatch):
    if held:  # as on Hopper
        config = portable_wy.Config
        monkeypatch.setattr(portable_wy, "wy_config", lambda problem, arch: config(4, BK=16, BV=problem.V, STAGES=3))
    heads = {"H": 1, "HV": 1} if case.H == case.HV else {}
    check_wy(replace(case, T=min(case.T, 66), **heads), FP32, "triton", "cpu", 1e-6)


def test_wy_of_a_sequence_is_its_own():
    """Whatever is NaN in another, or has no row of states, as offsets promise more chunks than there are."""
    call = make_wy(WY_CASES["packed32"]) | {"backend": "triton"}
    clean = fd.kernels.chunk_bwd_wy_dqkg(**call)
    call["do"] = call["do"].clone()
    call["do"][:, 3] = torch.nan
    found = fd.kernels.chunk_bwd_wy_dqkg(**call)
    assert all(torch.equal(x[:, 33:], y[:, 33:]) for x, y in zip(found, clean)) and found[0][:, 3].isnan().all()
    call = make_wy(WY_CASES["packed"]) | {"backend": "triton"}
    want, few = fd.kernels.chunk_bwd_wy_dqkg(**call), {name: call[name][:, :2] for name in ("h", "dh")}
    assert all(torch.equal(x[:, :81], y[:, :81]) for x, y in zip(fd.kernels.chunk_bwd_wy_dqkg(**call | few), want))
