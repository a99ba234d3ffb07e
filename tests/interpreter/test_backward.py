"""Gradients by the Triton kernels, run on the CPU by Triton's interpreter, against float64 autograd of the reference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashdelta as fd
from flashdelta.kernels.triton import gradients as kernels
from flashdelta.kernels.triton import segments
from flashdelta.runtime import autograd

from ..support.cases import BF16, BY_NAME, HARD_CASES, LENGTH_CASES, Case, case_id
from ..support.gradients import (
    assert_first_is_its_own,
    assert_nan_stays,
    check_gate_sums,
    gradients,
    incoming,
    relative_errors,
    true_gradients,
)
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import as_recurrent, poisoned_memory

TOLERANCE = 3e-4
"""Of each gradient's norm, and of the largest gradient's: one that is nearly zero is what is left of larger terms."""

LARGE_STEPS = {"A_log": 10 * TOLERANCE}
"""With log decays of -1000: A_log's gradient sums those of log decays times them, so 1e-7 in those, which is rounding and
differs from one processor to the next, is 1e-4 in it."""


TWO_CHUNKS = {
    *("decay", "softplus", "bounded", "logsigmoid", "state", "state_v_first", "same_keys", "same_keys_unsafe"),
    *("g-50", "forget_channels", "softplus_saturated"),
}
"""Of each kind of gate and state one case, and of hard numbers those that matter from chunk to chunk. (And
`softplus_saturated`, of whose rounding errors `LARGE_STEPS` is a measure on as many tokens.)"""

NAMES = (
    *("T0", "T33", "B0", "chunk32", "chunk32_unsafe"),
    *("decay", "decay_promised", "softplus", "softplus_broad", "bounded", "bounded_bare", "logsigmoid"),
    *("beta_double", "beta_value_2", "no_l2norm", "scale", "no_final_state"),
    # one power of two and one other: the kernels' loop over value heads is of any length
    *("gva2", "gva3_unsafe", "V32", "state", "state_v_first", "state_bf16"),
    *("packed", "packed_int32", "packed_empty_ends", "packed_none", "packed_unused", "packed_gva", "packed_chunk32"),
    # of the other layouts `gradients` makes dense leaves
    "last_dim_strided",
    *("same_keys", "same_keys_unsafe", "g-50", "forget_channels", "softplus_saturated", "zero_rows", "key_norms"),
)


def small(case: Case) -> Case:
    """The case on few tokens: every program takes the interpreter a second."""
    heads = {} if case.H != case.HV or case.layout != "dense" else {"H": 1, "HV": 1}
    T = case.chunk_size + 2 if case in LENGTH_CASES or case.name in TWO_CHUNKS else 64 if case in HARD_CASES else 17
    lengths = case.lengths and tuple(min(length, 66 if case.name == "packed" else 20) for length in case.lengths[:4])
    return replace(case, B=min(case.B, 2), T=min(case.T, T), lengths=lengths, h=False, **heads)


AGAIN = {"chunk32", "state_bf16", "state_v_first", "packed_gva", "packed_chunk32"}
"""Cases in which the backward pass runs the forward pass again: of each kind of state and chunk. With the others it takes the
interpreter a third less to keep what the forward pass leaves; both give the same bits (a test below)."""

KINDS = {name: small(BY_NAME[name]) for name in NAMES}
KEPT = {"backend": "triton", "disable_recompute": True}
RECOMPUTED = {"backend": "triton"}


def assert_gradients(found: dict, truth: dict, tolerance: float = TOLERANCE, **others: float) -> None:
    """`others`: tolerances of gradients that have one of their own, by name."""
    assert found.keys() == truth.keys()
    allowed = dict.fromkeys(truth, tolerance) | others
    errors = {name: error for name, error in relative_errors(found, truth).items() if not error <= allowed[name]}
    assert not errors


@pytest.mark.parametrize("case", KINDS.values(), ids=case_id)
def test_gradients_are_those_of_the_reference(case: Case):
    call = make_call(case)
    grads = incoming(call)
    with poisoned_memory():
        found = gradients(call | {"backend": "triton", "disable_recompute": case.name not in AGAIN}, *grads)
    # a state in bfloat16 is rounded, and so are its gradient and the final state's
    tolerance = 5e-3 if case.state == BF16 else TOLERANCE
    others = LARGE_STEPS if case.hard == "raw_1000" and case.gate == "softplus" else {}
    assert_gradients(found, true_gradients(call, *grads), tolerance, **others)


def test_gradients_of_sums():
    """Which come in as one number, expanded."""
    call = make_call(KINDS["state"]) | RECOMPUTED
    v = call["v"].requires_grad_()
    results = fd.chunk_kda(**call)
    (found,) = torch.autograd.grad(sum(x.sum() for x in results), v, retain_graph=True)
    (want,) = torch.autograd.grad(results, v, [torch.ones_like(x) for x in results])
    assert torch.equal(found, want)


def test_token_by_token_gradients_are_those_of_the_chunks():
    call = as_recurrent(make_call(KINDS["packed"])) | {"backend": "triton"}
    grads = incoming(call)
    found, want = (gradients(call, *grads, op=op) for op in (fd.fused_recurrent_kda, fd.chunk_kda))
    assert all(torch.equal(found[name], x) for name, x in want.items())


@pytest.mark.parametrize("name", ["bounded", "packed_int32"])
def test_kept_gradients_are_those_of_a_forward_that_runs_again(name: str, monkeypatch: pytest.MonkeyPatch):
    call = make_call(replace(KINDS[name], T=66 if name == "bounded" else 17)) | {"backend": "triton"}
    grads = incoming(call)
    want = gradients(call, *grads)
    scans, scan = [], kernels.scan
    monkeypatch.setattr(kernels, "scan", lambda *arguments: scans.append(arguments) or scan(*arguments))
    with poisoned_memory():
        found = gradients(call | {"disable_recompute": True}, *grads)
    assert len(scans) == 1
    assert all(torch.equal(x, want[name]) for name, x in found.items())


SPLIT = {
    # segments of unequal length beside a sequence of one chunk, an empty one and one that stays whole
    "packed": replace(KINDS["packed"], T=0, lengths=(40, 0, 68, 5), chunk_size=32, K=32, V=32, H=1, HV=1),
    "rows": replace(KINDS["softplus"], B=2, T=66, chunk_size=32, K=32, V=32, H=1, HV=1),
    "v_first": replace(small(BY_NAME["state_bf16_v_first"]), T=66, chunk_size=32, K=32, V=32, H=1, HV=1),
}


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_of_split_sequences(name: str):
    """Those of the reference, whose autograd knows of no segments; kept or computed again, the same bits."""
    call = make_call(SPLIT[name])
    grads = incoming(call)
    with poisoned_memory():
        found, again = (gradients(call | options | {"split": 3}, *grads) for options in (KEPT, RECOMPUTED))
    assert_gradients(found, true_gradients(call, *grads), 5e-3 if SPLIT[name].state == BF16 else TOLERANCE)
    assert all(torch.equal(x, again[name]) for name, x in found.items())


def test_segments_are_kept_where_they_are_small(monkeypatch: pytest.MonkeyPatch):
    """No backward pass then forms transitions, and all find the same bits."""
    formed, form = [], segments.transitions
    monkeypatch.setattr(segments, "transitions", lambda *arguments: formed.append(1) or form(*arguments))
    call = make_call(replace(SPLIT["v_first"], V=64, T=160)) | RECOMPUTED | {"split": 3}
    results = fd.chunk_kda(**call | {"q": call["q"].requires_grad_()})
    incoming = [torch.ones_like(x) for x in results]
    with poisoned_memory():
        found, counts = [], []
        for _ in range(2):
            found += torch.autograd.grad(results, call["q"], incoming, retain_graph=True)
            counts.append(len(formed))
    kept = gradients(call | KEPT, *incoming)["q"]
    assert counts == [1, 1] and all(torch.equal(x, kept) for x in found)


@pytest.mark.parametrize("options", [RECOMPUTED, KEPT], ids=["segments", "all"])
def test_checkpointing_drops_what_a_forward_keeps(options: dict, monkeypatch: pytest.MonkeyPatch):
    left, forward = [], autograd.Differentiable.forward

    def noted(*arguments: object) -> dict[str, torch.Tensor]:
        found = forward(*arguments)
        left.extend(weakref.ref(x.untyped_storage()) for name, x in found.items() if name in autograd.KEPT.values())
        return found

    monkeypatch.setattr(autograd.Differentiable, "forward", noted)
    call = make_call(replace(SPLIT["v_first"], V=64, T=160)) | options | {"split": 3}
    q = call.pop("q").requires_grad_()

    def run(q: torch.Tensor) -> torch.Tensor:
        return fd.chunk_kda(q=q, **call)[0].sum()

    (plain,) = torch.autograd.grad(run(q), q)
    count = len(left)
    loss = checkpoint(run, q, use_reentrant=False)
    gc.collect()
    assert count == (4 if options is KEPT else 1) and [x() for x in left[count:]] == [None] * count
    assert torch.equal(*torch.autograd.grad(loss, q), plain) and len(left) == 3 * count


@pytest.mark.parametrize(
    ("slots", "present"), [(0, (True, True)), (65, (True, False)), (300, (False, True)), (1030, (True, True))]
)
def test_gates_gradients_are_summed_over_all_chunks(slots: int, present: tuple[bool, bool]):
    check_gate_sums(slots, present)


def test_gradients_of_split_sequences_of_wide_states():
    """Which go from segment to segment through memory; and without a gradient of the final state."""
    call = make_call(replace(SPLIT["rows"], B=1, HV=1, K=256)) | {"output_final_state": False}

    def found(**options: object) -> dict[str, torch.Tensor]:
        leaves = {name: call[name].detach().clone().requires_grad_() for name in TOKEN_TENSORS}
        o, _ = fd.chunk_kda(**call | leaves | options)
        return dict(zip(leaves, torch.autograd.grad(o.sum(), list(leaves.values()))))

    want = found(backend="reference")
    errors = relative_errors(found(backend="triton", split=3), {name: x.double() for name, x in want.items()})
    assert all(error <= TOLERANCE for error in errors.values()), errors


@pytest.mark.parametrize("hold", [assert_first_is_its_own, assert_nan_stays])
def test_a_sequence_s_gradients_are_its_own(hold: Callable):
    hold(make_call(replace(KINDS["packed"], lengths=(17, 40))) | KEPT)
