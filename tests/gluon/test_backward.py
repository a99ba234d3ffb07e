"""Gradients by the Hopper kernels, interpreted: `reverse`, `wy`, `intra`, on one GPU and over ranks, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashdelta as fd

from ..gpu.calls import KIMI, UNBOUNDED, on_gpu
from ..support.cases import BF16, BY_NAME, FP32, Case, case_id
from ..support.gradients import (
    assert_first_is_its_own,
    assert_nan_stays,
    gradients,
    incoming,
    relative_errors,
    true_gradients,
)
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import float64, poisoned_memory, same_bits
from ..support.ranks import Cut, incoming_of
from ..support.virtual import on_ranks
from ..support.wy import BY_NAME as WY_CASES
from ..support.wy import WyCase, errors, exact, make_wy
from .interpreter import hopper_on_cpu

pytestmark = pytest.mark.slow

TOLERANCE = 1e-2

GRADIENTS = [
    replace(KIMI, name="packed_wide", H=1, HV=2, lengths=(1, 63, 64, 65, 0), state=FP32),
    replace(UNBOUNDED, name="packed_wide_unbounded", H=1, HV=1, lengths=(1, 63, 64, 65, 0), state=FP32, v_first=True),
    replace(KIMI, name="small_heads", H=1, HV=2, K=64, V=64, T=130),
    *(on_gpu(BY_NAME[name]) for name in (*("decay", "softplus_broad", "logsigmoid", "wide_gate", "T131", "B3",
        "beta_double", "no_l2norm"), *("gva3_unsafe", "state_bf16_v_first", "packed_unused", "expanded", "same_keys",
        "g-50", "zero_rows"))),
]  # fmt: skip


def hopper_call(case: Case) -> dict:
    return make_call(case, BF16) | {"backend": "hopper"}


def hold(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    wrong = {name: error for name, error in relative_errors(found, want).items() if not error <= TOLERANCE}
    assert not wrong


@pytest.mark.parametrize("case", GRADIENTS, ids=case_id)
def test_gradients_are_those_of_the_reference(case: Case):
    call = hopper_call(case)
    grads = incoming(call)
    with poisoned_memory():
        found = gradients(call, *grads)
    hold(found, true_gradients(call, *grads))


# ---- splits ----------------------------------------------------------------------------------------------------------

SPLIT = [
    replace(KIMI, name="packed", H=1, HV=1, K=64, V=64, lengths=(130, 0, 64, 257), state=FP32),
    replace(UNBOUNDED, name="grouped_v_first", H=1, HV=2, lengths=(63, 0, 200), state=BF16, v_first=True,
        memory="long"),
    replace(on_gpu(BY_NAME["decay"]), name="rows", B=2, T=140, memory="long"),
]  # fmt: skip


@pytest.mark.parametrize("case", SPLIT, ids=case_id)
def test_gradients_of_split_sequences(case: Case):
    """Kept or computed again, the same bits."""
    call = hopper_call(case) | {"split": 4}
    grads = incoming(call)
    with poisoned_memory():
        found, again = (gradients(call | {"disable_recompute": kept}, *grads) for kept in (True, False))
    hold(found, true_gradients(call, *grads))
    assert all(torch.equal(x, again[name]) for name, x in found.items())


LONG = replace(KIMI, H=1, HV=1, K=64, V=64, lengths=(576,), state=FP32, memory="long")
"""In two segments, which take less memory than its values."""


def test_gradients_by_segments_that_the_forward_left():
    """The same bits as by those that are formed again, and by what the whole forward leaves; in a second backward pass, too."""
    call = hopper_call(LONG) | {"split": 2}
    grads = incoming(call)
    q = call["q"].detach().requires_grad_()
    results = fd.chunk_kda(**call | {"q": q})
    *_, segments = results[0].grad_fn.saved_tensors
    assert 0 < segments.nbytes <= call["v"].nbytes
    with poisoned_memory():
        first, second = (torch.autograd.grad(results[0].sum(), q, retain_graph=True) for _ in range(2))
        found, kept = (gradients(call | {"disable_recompute": kept}, *grads) for kept in (False, True))
    assert torch.equal(*first, *second) and all(torch.equal(x, found[name]) for name, x in kept.items())


@pytest.mark.parametrize(("case", "sms"), [(GRADIENTS[0], 2), (SPLIT[1], 1)], ids=["kept", "split"])
def test_few_ctas_change_no_bit(case: Case, sms: int):
    """Nor does what is kept. One SM has fewer CTAs than a transition has slices."""
    call = hopper_call(case) | {"split": 3 if case is SPLIT[1] else False}
    grads = incoming(call)
    want = gradients(call, *grads)
    with poisoned_memory(), hopper_on_cpu(sms=sms, workers_first=False):
        found = gradients(call | {"disable_recompute": case is GRADIENTS[0]}, *grads)
    assert all(torch.equal(x, want[name]) for name, x in found.items())


@pytest.mark.parametrize("split", [False, 3])
@pytest.mark.parametrize("hold", [assert_first_is_its_own, assert_nan_stays])
def test_a_sequence_s_gradients_are_its_own(hold: Callable, split: bool | int):
    hold(hopper_call(replace(SPLIT[0], lengths=(200, 130))) | {"split": split})


# ---- `chunk_bwd_wy_dqkg` -----------------------------------------------------------------------------------------------

DIMS = ((128, 128), (64, 128), (128, 64))
WY = [
    replace(case, K=DIMS[i % 3][0], V=DIMS[i % 3][1])
    for i, case in enumerate(WY_CASES.values())
    if case.chunk_size == 64
]


def check_wy(case: WyCase) -> None:
    call = make_wy(case, BF16)
    with poisoned_memory():
        found = errors(fd.kernels.chunk_bwd_wy_dqkg(**call, backend="hopper"), exact(call))
    assert all(error <= TOLERANCE for error in found.values()), found


@pytest.mark.parametrize("case", WY, ids=lambda case: f"{case.name}-K{case.K}-V{case.V}")
def test_wy(case: WyCase):
    check_wy(case)


def test_wy_off_every_boundary():
    """By way of copies; the states', too."""
    case = replace(next(case for case in WY if case.layout == "dense"), layout="odd_offset")
    check_wy(case)


@pytest.mark.parametrize(("v_first", "sms"), [(False, 1), (True, 5)])
def test_wy_of_persistent_ctas(v_first: bool, sms: int):
    """Tiles that a CTA fetches while it stores those of the one before."""
    with hopper_on_cpu(sms=sms):
        check_wy(WyCase("persistent", "", K=128, V=128, B=2, T=150, H=1, HV=2, log2=True, v_first=v_first))


# ---- ranks -----------------------------------------------------------------------------------------------------------

PACKED = replace(KIMI, H=1, HV=1, lengths=(40, 0, 171, 13), state=FP32, memory="long")
RANKS: dict[str, tuple[Case, int, bool, bool]] = {
    "packed": (PACKED, 2, False, True),
    "no relay": (PACKED, 2, False, False),
    "kept": (
        replace(KIMI, H=1, HV=2, K=64, V=64, lengths=(576,), state=FP32, v_first=True, memory="long"),
        3,
        True,
        True,
    ),
    # one starts on the rank between
    "three": (replace(KIMI, H=1, HV=1, K=64, V=64, lengths=(80, 112), state=FP32, memory="long"), 3, False, True),
}
"""Calls, of how many ranks, whether they keep what their forwards made, and whether the first of two relays."""


@pytest.mark.parametrize(
    ("name", "sms", "split"), [*((name, None, "auto") for name in RANKS), ("packed", 1, 3), ("kept", 1, 3)]
)
def test_ranks_find_what_one_finds(name: str, sms: int | None, split: str | int):
    """Also where each cuts its tokens into segments."""
    case, ranks, kept, relay = RANKS[name]
    call = hopper_call(case) | {"output_final_state": True}
    cut = Cut(call, ranks, incoming_of(call), relay=relay)
    truth = Cut(float64(call), 1, tuple(x.double() for x in cut.incoming)).whole(backend="reference")
    with poisoned_memory(), hopper_on_cpu(sms=sms):
        found = cut.over_ranks(disable_recompute=kept, split=split)
    hold(found, truth)


@pytest.mark.parametrize(("v_first", "HV", "sms"), [(False, 1, None), (True, 3, 2)], ids=["tiles", "stream-K"])
def test_two_ranks_have_the_bits_of_one(v_first: bool, HV: int, sms: int | None):
    """Of whole chunks, as each goes on from what the scan of the other ends with: results and gradients, but for those of
    parameters, which the ranks have a share of each."""
    case = replace(KIMI, H=1, HV=HV, K=64, V=64, lengths=(256,), state=FP32, v_first=v_first, memory="long")
    call = hopper_call(case)
    cut = Cut(call | {"output_final_state": True}, 2, incoming_of(call))
    with hopper_on_cpu(sms=sms):
        found, wanted = cut.over_ranks(), cut.whole()
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], x) for name, x in wanted.items() if name not in ("A_log", "dt_bias"))


def test_batch_rows_of_two_ranks_have_the_bits_of_one():
    """Each row's state and gradient is in a packet of its own."""
    case = replace(KIMI, B=3, H=1, HV=1, K=64, V=64, T=256, state=FP32, memory="long")
    call = hopper_call(case) | {"output_final_state": True}
    states = call.pop("initial_state")
    do, dht = torch.randn(3, 256, 1, 64).bfloat16(), torch.randn_like(states)

    def step(tokens: slice, last: bool, **options: Any) -> list[torch.Tensor]:
        own = [call[name][:, tokens].detach().clone().requires_grad_() for name in TOKEN_TENSORS]
        initial = states.clone().requires_grad_()
        given = call | dict(zip(TOKEN_TENSORS, own)) | {"initial_state": initial} | options
        o, final_state = fd.chunk_kda(**given)
        if last:
            torch.autograd.backward([o, final_state], [do[:, tokens], dht])
        else:
            o.backward(do[:, tokens])
        return [final_state, initial.grad, o, *(x.grad for x in own)]

    def run(group: Any) -> list[torch.Tensor]:
        first = group.rank() == 0
        return step(slice(0, 128) if first else slice(128, 256), not first, group=group)

    with poisoned_memory(), hopper_on_cpu():
        (_, grad, *first), (final_state, cleared, *second) = on_ranks(2, run)
    with hopper_on_cpu():
        wanted = step(slice(None), True)
    joined = [final_state, grad, *(torch.cat(x, dim=1) for x in zip(first, second))]
    assert all(same_bits(x, y) for x, y in zip(joined, wanted, strict=True)) and not cleared.any()
