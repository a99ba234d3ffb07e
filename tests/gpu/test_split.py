"""Split sequences on the GPU: truth, bits, pools with checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import BF16, BY_NAME, FP32, Case
from ..support.inputs import TOKEN_TENSORS, sequence_calls
from ..support.oracle import assert_close, covered_tokens, float64, one_rounding, poisoned_memory, tolerance_of
from ..support.pools import PoolCase, hold_pool
from . import calls
from .calls import KIMI, UNBOUNDED, assert_same_bits, gpu_call, on_gpu
from .test_pool import PREFILL, gpu_pool_call

pytestmark = pytest.mark.gpu

IRREGULAR = (1, 63, 64, 65, 0, 1009, 127, 640)
CASES = [
    replace(KIMI, name="kimi", lengths=IRREGULAR, state=FP32),
    replace(UNBOUNDED, name="unbounded", lengths=IRREGULAR, state=FP32, v_first=True),
    replace(KIMI, name="grouped", H=2, HV=6, lengths=(700, 64), state=BF16),
    replace(KIMI, name="rows", B=2, T=520),
    replace(KIMI, name="small_heads", K=64, V=64, T=777),
    replace(on_gpu(BY_NAME["decay"]), name="other_head_dims", T=400),
    replace(KIMI, name="h", T=500, h=True),
]


def hold_as_whole(call: dict, found: tuple, whole: tuple, truth: tuple, tolerance: bool = True) -> None:
    """Results of split sequences to the truth, and to the errors of whole ones."""
    tokens = covered_tokens(call)
    for name, *three in zip(("o", "final_state", "h"), found, whole, truth):
        if three[0] is not None:
            x, w, t = (y[:, tokens] if name == "o" else y for y in three)
            if tolerance:
                assert_close(name, x, t, tolerance_of(call) + one_rounding(x.dtype))
            error, plain = ((y.double() - t).norm() / t.norm() for y in (x, w))
            assert error <= 1.2 * plain + 1e-6, f"{name}: error {error:.3g}, of whole sequences {plain:.3g}"


def truth_of(call: dict) -> tuple:
    return fd.chunk_kda(**float64(call) | {"backend": "reference"})


@pytest.mark.parametrize(("case", "parts"), calls.in_turn(CASES, 2, 7, 64), ids=calls.case_and_dtype)
def test_split_is_the_recurrence(case: Case, parts: int, backend: str):
    call = gpu_call(fd.chunk_kda, case, backend=backend)
    for _ in range(calls.CALLS_TO_A_REPLAY):
        with poisoned_memory():
            found = fd.chunk_kda(**call | {"split": parts})
    truth = truth_of(call)
    if case.lengths:
        calls.hold_each(call, found, truth)
    hold_as_whole(call, found, fd.chunk_kda(**call | {"split": False}), truth)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("pool_case", [PREFILL, replace(PREFILL, marks=None)], ids=["marks", "plain"])
def test_split_with_a_pool_and_checkpoints(pool_case: PoolCase, parts: int, backend: str):
    """In place: the last segment stores where the first one's state lay."""
    hold_pool(fd.chunk_kda, gpu_pool_call(fd.chunk_kda, pool_case, BF16, backend) | {"split": parts})


FEW_HEADS = replace(KIMI, H=2, HV=2, state=FP32)
PLANNED = [(9000, 0, 100, 0), (2275, 2275, 2275, 2275), (0, 4000, 1, 5099)]
"""As many tokens, in sequences that are split and in ones that are not."""


def _planned(call: dict) -> list[int]:
    return list(fd.explain(fd.chunk_kda, **call).segments)


def _remembering(call: dict, low: float, high: float) -> dict:
    """The call with log decays between these."""
    call = {name: x for name, x in call.items() if name not in ("A_log", "dt_bias", "lower_bound")}
    return call | {"g": torch.empty_like(call["g"]).uniform_(low, high), "use_gate_in_kernel": False}


@pytest.mark.parametrize("sizes", [*({"lengths": x} for x in PLANNED), {"H": 1, "HV": 1, "T": 2**20}], ids=str)
def test_planned_splits_are_near_the_whole(sizes: dict, backend: str):
    """`o` and the final states; short sequences beside a long one stay whole."""
    call = gpu_call(fd.chunk_kda, replace(FEW_HEADS, **sizes), backend=backend)
    parts = _planned(call)
    assert "T" not in sizes or parts[0] > 8
    assert sizes.get("lengths") != PLANNED[0] or parts[0] > 1 == max(parts[1:])
    for name, x, whole in zip(("o", "final_state"), fd.chunk_kda(**call), fd.chunk_kda(**call | {"split": False})):
        assert_close(name, x, whole.double(), tolerance_of(call))


@pytest.mark.parametrize("decays", [(-1e-5, 0.0), (-4.0, -0.5)], ids=["long memory", "strong decay"])
def test_split_errs_as_the_whole_does(decays: tuple[float, float], backend: str):
    """Against float64, over 256 chunks, with decays near 0 and strong ones."""
    call = _remembering(gpu_call(fd.chunk_kda, replace(FEW_HEADS, T=16384), backend=backend), *decays)
    whole, truth = fd.chunk_kda(**call | {"split": False}), truth_of(call)
    for parts in ("auto", 3, 64):
        hold_as_whole(call, fd.chunk_kda(**call | {"split": parts}), whole, truth, tolerance=False)


@pytest.mark.parametrize(
    ("lengths", "options"), [((300, 500), {"split": 3}), ((9000, 300, 5000), {"batch_invariant": True})]
)
def test_a_split_sequences_bits_are_its_own(lengths: tuple[int, ...], options: dict, backend: str):
    """Whatever is beside it: its plan depends on its own length alone."""
    call = gpu_call(fd.chunk_kda, replace(FEW_HEADS, lengths=lengths), backend=backend) | options
    parts, results = _planned(call), fd.chunk_kda(**call)
    assert max(parts) > 1
    for n, (one, length) in enumerate(zip(sequence_calls(call), lengths)):
        alone = call | {name: one[name] for name in (*TOKEN_TENSORS, "initial_state")}
        alone |= {"cu_seqlens": torch.tensor([0, length], device="cuda", dtype=call["cu_seqlens"].dtype)}
        assert _planned(alone) == parts[n : n + 1]
        assert_same_bits(calls.of_sequence(call, results, n), fd.chunk_kda(**alone))
