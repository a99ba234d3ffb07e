"""Checkpoints and final states in buffers of the caller's, run by Triton's interpreter: the bits of plain calls put together by
hand, and the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.buffers import BY_NAME, BufferCase, buffer_call, buffer_id, buffer_truth, by_pieces, untouched_rows
from ..support.cases import BF16, FP32
from ..support.decoding import memory_of
from ..support.oracle import (
    TOLERANCE,
    as_recurrent,
    assert_close,
    covered_tokens,
    poisoned_memory,
    same_bits,
    state_tolerance,
)

SIZES: dict[str, dict] = {
    "every_64_chunk32": {"T": 100, "K": 32, "V": 32},
    "every_128_batch": {"T": 130, "V": 32},
    "every_packed": {"lengths": (17, 0, 70)},
    "every_too_few": {"lengths": (3, 66)},
    "every_no_rows": {"lengths": (3, 5)},
    "every_pool": {"lengths": (17, 0, 66, 3)},
    "every_h": {"lengths": (3, 130), "state": FP32},
    "at_offsets": {"lengths": (66, 5, 66)},
    "many_offsets": {"lengths": (82, 0, 48)},
    "offsets_batch": {"B": 2, "T": 50},
    "bad_offsets": {"lengths": (66, 0, 33, 40)},
}
"""As few chunks as show the thing."""


def small(name: str) -> BufferCase:
    two = {"marks": ((48, 64), (0, 16)), "mark_rows": ((3, 4), (0, 5))} if name == "offsets_batch" else {}
    buffer_case = replace(BY_NAME[name], **two)
    return replace(buffer_case, case=replace(buffer_case.case, **{"HV": 1} | SIZES.get(name, {})))


SMALL = [small(name) for name in SIZES]
SPLIT = [
    replace(small("split_every"), case=replace(small("split_every").case, lengths=(130, 5), V=32)),
    replace(small("split_offsets"), case=replace(small("split_offsets").case, lengths=(130, 16, 66), V=32)),
]


def check(buffer_case: BufferCase, dtype: torch.dtype) -> None:
    """What the interpreter stores in bfloat16 it cuts off instead of rounding: near the truth is all that can be asked."""
    call = buffer_call(buffer_case, dtype) | {"backend": "triton"}
    want, tokens = buffer_truth(call), covered_tokens(call)
    pieces = None if buffer_case.split else by_pieces(fd.chunk_kda, call)
    buffer = call["checkpoint_states"]
    before, untouched = memory_of(buffer).clone(), untouched_rows(call, want)
    out = torch.full(call["v"].shape, torch.nan, dtype=dtype)
    with poisoned_memory():
        results = fd.chunk_kda(**call, out=out)
    assert results[1] is call.get("final_state")
    assert same_bits(memory_of(buffer)[untouched], before[untouched])
    assert_close("o", out[:, tokens], want.o[:, tokens], TOLERANCE[dtype])
    assert_close("checkpoint_states", buffer, want.buffer, 2 * state_tolerance(dtype, buffer.dtype))
    if results[1] is not None:
        assert_close("final_state", results[1], want.final, 2 * state_tolerance(dtype, results[1].dtype))
    if pieces is None:
        return
    assert same_bits(out[:, tokens], pieces.o[:, tokens])
    assert buffer.dtype == BF16 or same_bits(buffer, pieces.buffer)
    assert results[1] is None or results[1].dtype == BF16 or same_bits(results[1], pieces.final)
    assert pieces.h is None or same_bits(results[2], pieces.h)
    assert pieces.pool is None or same_bits(call["state_pool"], pieces.pool)


@pytest.mark.parametrize("buffer_case", SMALL + SPLIT, ids=buffer_id)
def test_chunk(buffer_case: BufferCase):
    check(buffer_case, FP32)


@pytest.mark.parametrize("name", ["only_final", "only_final_bf16"])
def test_recurrent_writes_a_final_state(name: str):
    buffer_case = BY_NAME[name]
    lengths = buffer_case.case.lengths and (7, 0, 3)
    call = as_recurrent(buffer_call(replace(buffer_case, case=replace(buffer_case.case, T=5, lengths=lengths))))
    call["backend"], final = "triton", call["final_state"].fill_(torch.nan)
    want = buffer_truth(call)
    o, found = fd.fused_recurrent_kda(**call)
    assert found is final
    assert_close("o", o[:, covered_tokens(call)], want.o[:, covered_tokens(call)], TOLERANCE[FP32])
    assert_close("final_state", final, want.final, 2 * state_tolerance(FP32, final.dtype))


def test_bad_offsets_touch_nothing_outside():
    """Offsets of sequences that fall and leave the tensors; the buffer lies amid numbers that must stay."""
    call = buffer_call(replace(small("every_packed"), rows=3)) | {"backend": "triton"}
    del call["final_state"]
    call["cu_seqlens"] = torch.tensor([0, 2**40, -(2**40), 2**62])
    buffer = call["checkpoint_states"]
    before = memory_of(buffer).clone()
    fd.chunk_kda(**call)
    changed = torch.zeros_like(before, dtype=torch.bool)
    changed.as_strided(buffer.shape, buffer.stride(), buffer.storage_offset()).fill_(True)
    assert same_bits(memory_of(buffer)[~changed], before[~changed])
