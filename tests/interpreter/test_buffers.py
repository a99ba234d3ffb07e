"""Checkpoints and final states in buffers of the caller's, run by Triton's interpreter: the bits of plain calls put together by
hand, and the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import FP32
from ..support.decoding import memory_of
from ..support.oracle import as_recurrent, same_bits
from ..support.pools import BUFFERS_BY_NAME as BY_NAME
from ..support.pools import PoolCase, by_pieces, hold_pool, pool_call, pool_id

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


def small(name: str) -> PoolCase:
    two = {"marks": ((48, 64), (0, 16)), "mark_rows": ((3, 4), (0, 5))} if name == "offsets_batch" else {}
    pool_case = replace(BY_NAME[name], **two)
    return replace(pool_case, case=replace(pool_case.case, **{"HV": 1} | SIZES.get(name, {})))


SMALL = [small(name) for name in SIZES]
SPLIT = [
    replace(small("split_every"), case=replace(small("split_every").case, lengths=(130, 5), V=32)),
    replace(small("split_offsets"), case=replace(small("split_offsets").case, lengths=(130, 16, 66), V=32)),
]


def check(pool_case: PoolCase) -> None:
    call = pool_call(pool_case) | {"backend": "triton"}
    hold_pool(fd.chunk_kda, call, [] if pool_case.split else [by_pieces])


@pytest.mark.parametrize("pool_case", SMALL + SPLIT, ids=pool_id)
def test_chunk(pool_case: PoolCase):
    check(pool_case)


@pytest.mark.parametrize("name", ["only_final", "only_final_bf16"])
def test_recurrent_writes_a_final_state(name: str):
    pool_case = BY_NAME[name]
    lengths = pool_case.case.lengths and (7, 0, 3)
    call = as_recurrent(pool_call(replace(pool_case, case=replace(pool_case.case, T=5, lengths=lengths))))
    call["final_state"].fill_(torch.nan)
    hold_pool(fd.fused_recurrent_kda, call | {"backend": "triton"})


def test_bad_offsets_touch_nothing_outside():
    """Offsets of sequences that fall and leave the tensors; the buffer lies amid numbers that must stay."""
    call = pool_call(replace(small("every_packed"), rows=3)) | {"backend": "triton"}
    del call["final_state"]
    call["cu_seqlens"] = torch.tensor([0, 2**40, -(2**40), 2**62])
    buffer = call["checkpoint_states"]
    before = memory_of(buffer).clone()
    fd.chunk_kda(**call)
    changed = torch.zeros_like(before, dtype=torch.bool)
    changed.as_strided(buffer.shape, buffer.stride(), buffer.storage_offset()).fill_(True)
    assert same_bits(memory_of(buffer)[~changed], before[~changed])
