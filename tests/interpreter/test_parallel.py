"""Sequences over virtual ranks: the Triton kernels against the whole in float64, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.parallel import context_parallel

from ..support.cases import Case
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import float64, same_bits
from ..support.ranks import Cut, Found, incoming_of
from ..support.virtual import on_ranks

TOLERANCE = 2e-5

SMALL = Case("ranks", "", K=32, V=64, H=1, HV=1, chunk_size=32, memory="long", state=torch.float32)
KEPT, IN_SEGMENTS = {"disable_recompute": True}, {"split": 3}
BEFORE = replace(SMALL, lengths=(10, 0, 139, 11))
CASES: dict[str, tuple[Case, int, bool, dict]] = {
    # cut inside sequences, with an empty one, tails, and one that three ranks have
    "packed": (replace(SMALL, lengths=(10, 0, 75, 11)), 3, True, {}),
    # whose packets are b alone
    "two ranks": (replace(SMALL, lengths=(10, 0, 43, 11)), 2, True, {}),
    "kept": (replace(SMALL, lengths=(96,), v_first=True, HV=2), 3, True, KEPT),
    "sent before the scan": (BEFORE, 2, False, {}),
    "sent before the scan, in segments": (BEFORE, 2, False, IN_SEGMENTS),
    "segments": (replace(SMALL, lengths=(20, 172)), 2, True, IN_SEGMENTS),
    "segments, kept": (replace(SMALL, lengths=(192,), v_first=True), 2, True, IN_SEGMENTS | KEPT),
}
"""Calls, of how many ranks, whether the first of two relays, and options."""


def cut_of(case: Case, ranks: int) -> Cut:
    call = make_call(case) | {"output_final_state": True, "backend": "triton"}
    return Cut(call, ranks, incoming_of(call))


def exact(cut: Cut) -> Found:
    """What the whole call finds in float64."""
    incoming = None if cut.incoming is None else tuple(x.double() for x in cut.incoming)
    return Cut(float64(cut.call), 1, incoming).whole(backend="reference")


@pytest.mark.parametrize("name", CASES)
def test_ranks_find_what_one_finds(name: str):
    case, ranks, relay, options = CASES[name]
    cut = replace(cut_of(case, ranks), relay=relay)
    found = cut.over_ranks(**options)
    for key, x in exact(cut).items():
        error = (found[key].double() - x).norm() / x.norm()
        assert error <= TOLERANCE, f"{key}: {error:.1e}"


def test_copies_into_memory_of_other_ranks_change_nothing():
    """Of a forward with its backward pass, whose exchanges are of two sizes."""
    cut = replace(cut_of(replace(SMALL, lengths=(10, 54)), 2), exchange="put")
    found, wanted = cut.joined(on_ranks(2, cut.run, 0)), replace(cut, exchange="gather").over_ranks()
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], x) for name, x in wanted.items())


def test_two_ranks_have_the_bits_of_one():
    """Of whole chunks: results and gradients. Each goes on from what the scan of the other ends with."""
    cut = cut_of(replace(SMALL, lengths=(128,)), 2)
    found, wanted = cut.over_ranks(), cut.whole()
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], x) for name, x in wanted.items())


def test_batch_rows_over_all_ranks():
    call = make_call(replace(SMALL, B=2, T=50, state=None), torch.float32) | {"output_final_state": True}
    wanted = fd.chunk_kda(**float64(call), backend="reference")

    def run(group) -> tuple[Tensor, Tensor]:
        tokens = slice(0, 20) if group.rank() == 0 else slice(20, 50)
        own = {name: call[name][:, tokens] for name in TOKEN_TENSORS}
        return fd.chunk_kda(**call | own, group=group, backend="triton")

    (first, _), (second, final_state) = on_ranks(2, run)
    for x, y in ((torch.cat([first, second], dim=1), wanted[0]), (final_state, wanted[1])):
        assert (x.double() - y).norm() / y.norm() <= TOLERANCE


def test_a_second_backward_pass_finds_the_same_bits():
    """From what the forward left, which the first one has not changed."""
    cut = cut_of(replace(SMALL, lengths=(64,)), 2)

    def run(group) -> bool:
        context = context_parallel(cut.call["cu_seqlens"], group=group)
        call = cut.local(context)
        inputs = [call[name].requires_grad_() for name in TOKEN_TENSORS]
        results = list(fd.chunk_kda(**call))
        grads = [
            torch.autograd.grad(results, inputs, list(cut.gradients(context.rank)), retain_graph=True) for _ in range(2)
        ]
        return all(same_bits(x, y) for x, y in zip(*grads))

    assert all(on_ranks(2, run))


def test_a_pool_is_read_where_a_sequence_starts_and_stored_where_it_ends():
    cut = cut_of(replace(SMALL, lengths=(60, 0, 132)), 2)
    states = cut.call.pop("initial_state")
    wanted = exact(Cut(cut.call | {"initial_state": states}, 2))["final_state"]
    call = {name: x for name, x in cut.call.items() if name != "output_final_state"}

    def run(group) -> Tensor:
        context = context_parallel(call["cu_seqlens"], group=group)
        slots = torch.tensor(cut.sequences(context.rank))
        pool = states.clone()
        own = Cut(call, 2).local(context) | {"state_pool": pool, "state_indices": slots, "state_v_first": False}
        fd.chunk_kda(**own, split=2)
        return pool

    for pool, ended in zip(on_ranks(2, run), (0, 2)):
        for n in range(3):
            if n == ended:
                assert (pool[n].double() - wanted[n]).norm() / wanted[n].norm() <= TOLERANCE
            else:
                assert same_bits(pool[n], states[n])
