"""Checkpoints and final states in buffers of the caller's, on the GPU: bits, truth, graphs, replays, and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.buffers import (
    BY_NAME,
    CASES,
    SPLITS,
    BufferCase,
    buffer_call,
    buffer_id,
    buffer_truth,
    by_pieces,
    hold_buffers,
    with_memory_of_its_own,
)
from ..support.cases import BF16, FP32, Case
from ..support.oracle import as_recurrent, assert_close, one_rounding, poisoned_memory, tolerance_of
from .calls import CALLS_TO_A_REPLAY, KIMI, UNBOUNDED, compilations, on_gpu

pytestmark = pytest.mark.gpu

PREFILL = BufferCase(
    "prefill",
    "a mixed batch as an engine sends it",
    replace(KIMI, lengths=(200, 0, 1, 130, 64), state=FP32, v_first=True, final=False),
    marks=((64, 144), (0, 0), (0, 0), (128, 0), (64, 0)),
    mark_rows=((1, 2), (0, 0), (0, 0), (3, 0), (5, 0)),
    gap=256,
    states=BF16,
    final=FP32,
    index_dtype=torch.int32,
)
MODELS = [
    PREFILL,
    replace(PREFILL, name="prefill_every", marks=None, mark_rows=None, every=64, rows=9),
    replace(PREFILL, name="prefill_fp32", states=FP32, final=BF16, case=replace(PREFILL.case, v_first=False)),
    replace(PREFILL, name="prefill_unbounded", case=replace(UNBOUNDED, lengths=PREFILL.case.lengths, final=False)),
    replace(BY_NAME["every_h"], name="many_heads", why="stream-K: a sequence's rows come from CTAs that share it",
        case=replace(KIMI, H=96, HV=96, lengths=(300, 70, 200, 5), h=True, final=False, v_first=True), every=64,
        rows=12),
]  # fmt: skip


def gpu_buffer_call(buffer_case: BufferCase, dtype: torch.dtype, backend: str, seed: int = 0) -> dict:
    case = replace(buffer_case, case=on_gpu(buffer_case.case))
    return buffer_call(case, dtype, "cuda", seed) | {"backend": backend}


@pytest.mark.parametrize("buffer_case", CASES + SPLITS + MODELS, ids=buffer_id)
def test_chunk_bf16(buffer_case: BufferCase, backend: str):
    check(buffer_case, BF16, backend)


@pytest.mark.parametrize("dtype", [torch.float16, FP32], ids=str)
@pytest.mark.parametrize("buffer_case", [BY_NAME["many_offsets"], *MODELS[:2]], ids=buffer_id)
def test_chunk_other_dtypes(buffer_case: BufferCase, dtype: torch.dtype, backend: str):
    check(buffer_case, dtype, backend)


def check(buffer_case: BufferCase, dtype: torch.dtype, backend: str) -> None:
    """Where no sequence is split, to the bit against a plain call for each piece."""
    first = gpu_buffer_call(buffer_case, dtype, backend)
    want, tolerance = buffer_truth(first), tolerance_of(first)
    pieces = None if buffer_case.split else by_pieces(fd.chunk_kda, first)
    for _ in range(CALLS_TO_A_REPLAY):
        call = with_memory_of_its_own(first)
        hold_buffers(call, tolerance, lambda dtype: tolerance + one_rounding(dtype), pieces, want)


# ---- how calls run --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_warmup_compiles_all_that_calls_with_buffers_need(backend: str):
    sizes = {"K": 64, "V": 128, "H": 8, "HV": 8, "offsets_dtype": torch.int32}
    base = [replace(x, case=replace(x.case, **sizes), states=FP32, final=FP32) for x in MODELS[:2]]
    calls = [gpu_buffer_call(x, BF16, backend) for x in base]
    options = {"backend": backend, "state_v_first": True, "packed": (True,), "initial_state": (True,)}
    fd.warmup(fd.chunk_kda, [(64, 128)], **options, checkpoint_states=(True,))
    with compilations() as names:
        for call in calls:
            fd.chunk_kda(**call | {"split": "auto"})
    assert names == []


SEVERAL = replace(KIMI, lengths=(20, 0, 3), state=BF16, v_first=True, final=False)


@pytest.mark.parametrize("case", [SEVERAL, replace(SEVERAL, lengths=None, B=300, T=1)], ids=["several", "one each"])
@pytest.mark.parametrize("final", [FP32, BF16], ids=str)
def test_recurrent_writes_a_final_state(final: torch.dtype, case: Case, backend: str):
    """Of several tokens, and of one each with states as Hopper's own kernel has them."""
    call = as_recurrent(gpu_buffer_call(BufferCase("final", "", case, final=final), BF16, backend))
    want = buffer_truth(call)
    for _ in range(CALLS_TO_A_REPLAY):
        call["final_state"].fill_(torch.nan)
        with poisoned_memory():
            o, state = fd.fused_recurrent_kda(**call)
        assert state is call["final_state"]
        assert_close("o", o, want.o, tolerance_of(call))
        assert_close("final_state", state, want.final, tolerance_of(call) + one_rounding(final))
