"""Sequences over virtual ranks by the portable and the Hopper kernels, interpreted, against the whole in float64, forward and
backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.parallel import context_parallel

from ..gpu.calls import KIMI
from ..support.cases import BF16, FP32, Case
from ..support.gradients import relative_errors
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import float64, poisoned_memory, same_bits
from ..support.ranks import Cut, Found, incoming_of
from ..support.virtual import on_ranks
from .interpreter import hopper_on_cpu

pytestmark = pytest.mark.slow

TOLERANCE = {"triton": 2e-5, "hopper": 1e-2}
SMALL = {
    "triton": Case("ranks", "", K=32, V=64, H=1, HV=1, chunk_size=32, memory="long", state=FP32),
    "hopper": replace(KIMI, H=1, HV=1, K=64, V=64, state=FP32, memory="long"),
}
KEPT, IN_SEGMENTS = {"disable_recompute": True}, {"split": 3}
BEFORE, PACKED = {"lengths": (10, 0, 139, 11)}, {"lengths": (40, 0, 171, 13), "K": 128, "V": 128}
LONG = {"lengths": (576,), "v_first": True, "HV": 2}
CASES: dict[str, tuple[str, dict, int, dict]] = {
    # cut inside sequences, with an empty one, tails, and one that three ranks have
    "packed": ("triton", {"lengths": (10, 0, 75, 11)}, 3, {}),
    # whose packets are b alone
    "two ranks": ("triton", {"lengths": (10, 0, 43, 11)}, 2, {}),
    "kept": ("triton", {"lengths": (96,), "v_first": True, "HV": 2}, 3, KEPT),
    "sent before the scan": ("triton", BEFORE, 2, {"relay": False}),
    "sent before the scan, in segments": ("triton", BEFORE, 2, {"relay": False} | IN_SEGMENTS),
    "segments": ("triton", {"lengths": (20, 172)}, 2, IN_SEGMENTS),
    "segments, kept": ("triton", {"lengths": (192,), "v_first": True}, 2, IN_SEGMENTS | KEPT),
    "packed on Hopper": ("hopper", PACKED, 2, {}),
    "no relay on Hopper": ("hopper", PACKED, 2, {"relay": False}),
    "kept on Hopper": ("hopper", LONG, 3, KEPT),
    # one starts on the rank between
    "three on Hopper": ("hopper", {"lengths": (80, 112), "K": 128, "V": 128}, 3, {}),
    "segments on one SM": ("hopper", PACKED, 2, {"sms": 1} | IN_SEGMENTS),
    "segments on one SM, kept": ("hopper", LONG, 3, {"sms": 1} | IN_SEGMENTS | KEPT),
}
"""Backends, calls, of how many ranks, and options: whether the first of two relays, the number of SMs, and those of calls."""


@pytest.fixture(autouse=True)
def products(exact_products: None) -> None:
    """Also of Hopper's kernels, whose operands in float32 are few."""


def cut_of(backend: str, case: dict, ranks: int) -> Cut:
    call = make_call(replace(SMALL[backend], **case), BF16 if backend == "hopper" else FP32)
    call |= {"output_final_state": True, "backend": backend}
    return Cut(call, ranks, incoming_of(call))


def exact(cut: Cut) -> Found:
    """Results of the whole call in float64."""
    incoming = None if cut.incoming is None else tuple(x.double() for x in cut.incoming)
    return Cut(float64(cut.call), 1, incoming).whole(backend="reference")


@pytest.mark.parametrize("name", CASES)
def test_ranks_find_what_one_finds(name: str):
    backend, case, ranks, options = CASES[name]
    cut = replace(cut_of(backend, case, ranks), relay=options.get("relay", True))
    with poisoned_memory(), hopper_on_cpu(sms=options.get("sms")):
        found = cut.over_ranks(**{key: x for key, x in options.items() if key not in ("relay", "sms")})
    assert max(relative_errors(found, exact(cut)).values()) <= TOLERANCE[backend]


@pytest.mark.parametrize(
    ("backend", "case", "sms"),
    [
        *(("triton", {"lengths": (128,)}, None), ("hopper", {"lengths": (256,)}, None)),
        ("hopper", {"lengths": (256,), "HV": 3, "v_first": True}, 2),
    ],
    ids=["triton", "tiles", "stream-K"],
)
def test_two_ranks_have_the_bits_of_one(backend: str, case: dict, sms: int | None):
    """Whole chunks, as each goes on from what the scan of the other ends with: results and gradients, but for those of
    parameters, which the ranks have a share of each."""
    cut = cut_of(backend, case, 2)
    with hopper_on_cpu(sms=sms):
        found, wanted = cut.over_ranks(), cut.whole()
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], x) for name, x in wanted.items() if name not in ("A_log", "dt_bias"))


@pytest.mark.parametrize("backend", SMALL)
def test_batch_rows_of_two_ranks_have_the_bits_of_one(backend: str):
    """Each row's state and gradient is in a packet of its own."""
    case = replace(SMALL[backend], B=2, T=128)
    call = make_call(case, BF16 if backend == "hopper" else FP32) | {"output_final_state": True, "backend": backend}
    states = call.pop("initial_state")
    do, dht = torch.randn_like(call["v"]), torch.randn_like(states)

    def step(tokens: slice, last: bool, **options: Any) -> list[Tensor]:
        own = [call[name][:, tokens].detach().clone().requires_grad_() for name in TOKEN_TENSORS]
        initial = states.clone().requires_grad_()
        o, final_state = fd.chunk_kda(**call | dict(zip(TOKEN_TENSORS, own)) | {"initial_state": initial} | options)
        torch.autograd.backward([o, final_state][: 1 + last], [do[:, tokens], dht][: 1 + last])
        return [final_state, initial.grad, o, *(x.grad for x in own)]

    def run(group: Any) -> list[Tensor]:
        first = group.rank() == 0
        return step(slice(0, 64) if first else slice(64, 128), not first, group=group)

    with poisoned_memory():
        (_, grad, *first), (final_state, cleared, *second) = on_ranks(2, run)
    joined = [final_state, grad, *(torch.cat(x, dim=1) for x in zip(first, second))]
    assert all(same_bits(x, y) for x, y in zip(joined, step(slice(None), True), strict=True)) and not cleared.any()


def test_a_second_backward_pass_finds_the_same_bits():
    """From what the forward left, which the first one has not changed."""
    cut = cut_of("triton", {"lengths": (64,)}, 2)

    def run(group: Any) -> bool:
        context = context_parallel(cut.call["cu_seqlens"], group=group)
        call = cut.local(context)
        inputs = [call[name].requires_grad_() for name in TOKEN_TENSORS]
        results = list(fd.chunk_kda(**call))
        grads = [
            torch.autograd.grad(results, inputs, list(cut.gradients(context.rank)), retain_graph=True) for _ in range(2)
        ]
        return all(same_bits(x, y) for x, y in zip(*grads))

    assert all(on_ranks(2, run))


def hold_pool_over_ranks(call: dict, hold: Callable[[Tensor, Tensor], None], **options: Any) -> None:
    """A pool is read where a sequence starts and stored where it ends."""
    wanted = Cut(float64(call), 1).whole(backend="reference")["final_state"]
    cut, states = Cut(call, 2), call["initial_state"]
    without = Cut({name: x for name, x in call.items() if name not in ("initial_state", "output_final_state")}, 2)

    def run(group: Any) -> Tensor:
        context, pool = context_parallel(call["cu_seqlens"], group=group), states.clone()
        slots = torch.tensor(cut.sequences(context.rank))
        fd.chunk_kda(**without.local(context), state_pool=pool, state_indices=slots, **options)
        return pool

    for pool, ended in zip(on_ranks(2, run), (0, 2)):
        assert all(same_bits(pool[n], states[n]) for n in range(3) if n != ended)
        hold(pool[ended], wanted[ended])


def test_a_pool_is_read_where_a_sequence_starts_and_stored_where_it_ends():
    def hold(found: Tensor, want: Tensor) -> None:
        assert (found.double() - want).norm() / want.norm() <= TOLERANCE["triton"]

    hold_pool_over_ranks(cut_of("triton", {"lengths": (60, 0, 132)}, 2).call, hold, split=2)
