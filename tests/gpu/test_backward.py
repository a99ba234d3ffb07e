"""Gradients on the GPU: against float64, bit for bit again, NaN where it belongs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support import gradients as checks
from ..support.cases import BF16, FP32, Case, case_id, named
from ..support.gradients import check_gradients, gradients, incoming, same_gradients
from ..support.oracle import NO_H, poisoned_memory
from .calls import CALLS_TO_A_REPLAY, KIMI, UNBOUNDED, case_and_dtype, gpu_call, in_turn, on_gpu, requested_bytes

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 0, 300)
CASES = [
    replace(KIMI, name="kimi", lengths=LENGTHS, state=FP32),
    replace(UNBOUNDED, name="unbounded", lengths=LENGTHS, state=FP32, v_first=True),
    replace(KIMI, name="grouped", H=2, HV=6, T=130),
    replace(UNBOUNDED, name="rows", why="more chunks than SMs", B=2, H=24, HV=24, T=130, broad_parameters=True),
    replace(KIMI, name="zero_rows", T=66, hard="zero_rows"),
    replace(KIMI, name="large_heads", K=256, V=256, T=130),
    replace(KIMI, name="chunk32", chunk_size=32, T=100),
    *map(on_gpu, named("same_keys", "g-50", "no_decay", "beta_double")),
]
KIMI_PACKED, UNBOUNDED_PACKED, GROUPED, *_ = CASES
TOLERANCE = {BF16: 2e-2, FP32: 1e-3}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, BF16) for case in CASES), (GROUPED, FP32), (UNBOUNDED_PACKED, FP32)],
    ids=case_and_dtype,
)
def test_gradients_are_those_of_the_reference(case: Case, dtype: torch.dtype, backend: str):
    check_gradients(gpu_call(fd.chunk_kda, case, dtype, backend), TOLERANCE[dtype])


@pytest.mark.parametrize("case", CASES[:4], ids=case_id)
def test_gradients_repeat_to_the_bit(case: Case, backend: str):
    """Also of a forward that keeps what the backward pass else computes again."""
    call = gpu_call(fd.chunk_kda, case, backend=backend) | {"split": False}
    grads = incoming(call)
    first = gradients(call, *grads)
    for kept in (False, True) * 25:
        with poisoned_memory():
            assert same_gradients(gradients(call | {"disable_recompute": kept}, *grads), first)


# ---- split sequences ------------------------------------------------------------------------------------------------

SPLIT = [
    replace(KIMI_PACKED, lengths=(*LENGTHS, 700)),
    replace(UNBOUNDED_PACKED, lengths=(*LENGTHS, 700)),
    replace(GROUPED, B=2, T=520),
]


@pytest.mark.parametrize(("case", "parts"), in_turn(SPLIT, 2, 7, 64), ids=case_and_dtype)
def test_gradients_of_split_sequences(case: Case, parts: int, backend: str):
    """As near to the truth as those of whole ones; kept, computed again, and repeated, the same bits."""
    call = gpu_call(fd.chunk_kda, case, backend=backend) | {"split": parts}
    found, errors = check_gradients(call, TOLERANCE[BF16])
    _, plain = check_gradients(call | {"split": False}, TOLERANCE[BF16])
    assert all(error <= 1.2 * plain[name] + 1e-5 for name, error in errors.items()), (errors, plain)
    for kept in (True,) * CALLS_TO_A_REPLAY + (False,) * CALLS_TO_A_REPLAY:
        with poisoned_memory():
            assert same_gradients(gradients(call | {"disable_recompute": kept}, *incoming(call)), found)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [((300, 500), {"split": 3}), ((8192, 4096), {"batch_invariant": True}), ((63, 200), {"split": False})],
)
def test_gradients_of_a_split_are_the_sequences_own(lengths: tuple[int, ...], options: dict, backend: str):
    """A plan that depends on a sequence's own length alone leaves its gradients their bits."""
    case = replace(KIMI, H=2, HV=2, lengths=lengths, state=FP32)
    call = gpu_call(fd.chunk_kda, case, backend=backend) | options
    assert (max(fd.explain(fd.chunk_kda, **call).segments) > 1) == (options != {"split": False})
    checks.assert_first_is_its_own(call)


@pytest.mark.parametrize("split", [False, 4])
def test_nan_stays_in_its_sequence(split: bool | int, backend: str):
    case = replace(KIMI, lengths=(300, 400), state=FP32)
    checks.assert_nan_stays(gpu_call(fd.chunk_kda, case, backend=backend) | {"split": split})


def test_a_long_sequence_of_few_heads_is_split(backend: str):
    """The planner splits it, both ways: fewer heads than SMs leave room."""
    call = gpu_call(fd.chunk_kda, replace(KIMI, T=8192, H=4, HV=4), backend=backend)
    assert max(fd.explain(fd.chunk_kda, **call).segments) > 1
    check_gradients(call, TOLERANCE[BF16])


# ---- repeated steps -------------------------------------------------------------------------------------------------


PARAMETERLESS = replace(GROUPED, gate="none", lower_bound=None, state=FP32)


@pytest.mark.parametrize("case", [replace(PARAMETERLESS, T=0), replace(PARAMETERLESS, lengths=(0, 0))], ids=case_id)
def test_a_repeated_step_of_no_tokens_has_all_gradients(case: Case, backend: str):
    """No launch follows the last gradients that are allocated."""
    call = gpu_call(fd.chunk_kda, case, backend=backend)
    grads = incoming(call)
    for _ in range(CALLS_TO_A_REPLAY + 1):
        found = gradients(call, *grads)
        assert found.keys() == {name for name in checks.INPUTS if call.get(name) is not None}
        assert all(x.shape == call[name].shape for name, x in found.items())


def step(call: dict, reduce: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    leaves = {name: call[name].detach().requires_grad_() for name in checks.INPUTS if call.get(name) is not None}
    o = fd.chunk_kda(**call | leaves | NO_H)[0]
    return torch.autograd.grad(reduce(o), list(leaves.values()))


def test_a_repeated_step_takes_no_more_memory(backend: str):
    call = gpu_call(fd.chunk_kda, replace(KIMI, T=2048, H=8, HV=8), backend=backend) | {"output_final_state": False}
    peaks, held = [], []
    for _ in range(CALLS_TO_A_REPLAY + 3):
        peaks.append(requested_bytes(lambda: step(call, lambda o: o.square().sum()))[-1])
        held.append(torch.cuda.memory_allocated())
    assert peaks[-1] <= 1.01 * peaks[0]
    until = time.monotonic() + 2
    while torch.cuda.memory_allocated() > held[0] and time.monotonic() < until:
        time.sleep(0.01)  # a busy machine's thread of autograd may hold the last gradients a while
    assert torch.cuda.memory_allocated() <= held[0]
