"""Tiles of `recurrence` that stream-K splits: the same bits as where every CTA has whole tiles."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.hopper import recurrence

from ..support.cases import BF16, FP32, Case, case_id
from ..support.decoding import memory_of
from ..support.oracle import covered_tokens, lengths_of, same_bits
from ..support.pools import gathered_and_scattered
from ..support.stream_k import Work
from . import calls
from .calls import KIMI, UNBOUNDED, assert_same_bits, gpu_call, poisoned
from .test_pool import PREFILL, gpu_pool_call

pytestmark = pytest.mark.gpu

UNEVEN = (4096, 2048, 1024, 512, 320, 192)


@pytest.fixture(autouse=True)
def stream_k(monkeypatch: pytest.MonkeyPatch):
    """Where it would not pay, too; by chunks."""
    monkeypatch.setattr(recurrence, "stream_k_pays", lambda problem, ctas: True)
    with calls.in_steps(False):
        yield


CASES = [
    replace(KIMI, name="one", why="192 tiles of one length on 132 SMs", H=96, HV=96, T=2085),
    replace(KIMI, name="rows", why="rows of a batch", H=24, HV=24, B=4, T=1000, state=FP32, v_first=True),
    replace(KIMI, name="grouped", why="value heads that share a key head", H=20, HV=80, T=1500, state=BF16),
    replace(UNBOUNDED, name="unbounded", why="the other gate", H=40, HV=40, lengths=(*UNEVEN, 0, 1), unused=7),
    replace(KIMI, name="one_long", why="longer than a range", H=8, HV=8, lengths=(8000, *(530,) * 40), state=FP32),
    replace(KIMI, name="few", why="fewer tiles than SMs", H=4, HV=4, lengths=(3000, 200, 2000), state=FP32),
    replace(KIMI, name="many", why="400 sequences", H=6, HV=6, lengths=calls.lengths_between(3, 400, 900), state=FP32),
    replace(KIMI, name="h_rows", why="the same for rows", H=80, HV=80, B=1, T=1900, h=True, state=BF16, v_first=True),
    replace(KIMI, name="narrow", why="the other head dimension", K=64, V=64, H=150, HV=150, T=1100, state=FP32),
]


def work_of(call: dict) -> Work:
    heads, slices = call["v"].shape[2], call["v"].shape[3] // 64
    most = torch.cuda.get_device_properties("cuda").multi_processor_count // slices
    lengths, offsets = lengths_of(call), call.get("cu_seqlens")
    offsets = None if offsets is None else tuple(offsets.tolist())
    return Work(heads, min(len(lengths) * heads, most), call["v"].shape[1], len(lengths), offsets)


def whole_tiles(call: dict) -> tuple[torch.Tensor, ...]:
    """The results when every CTA has whole tiles."""
    with calls.nothing_replayed(), mock.patch.object(recurrence, "stream_k_pays", lambda problem, ctas: False):
        return poisoned(call)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_split_tiles_change_no_bit(case: Case, other_backend: str):
    # the plan of a split depends on the batch
    call = gpu_call(fd.chunk_kda, case, BF16, other_backend) | {"split": False}
    assert work_of(call).carries > 0
    want = whole_tiles(call)
    for _ in range(calls.CALLS_TO_A_REPLAY + 1):
        assert_same_bits(poisoned(call), want, covered_tokens(call))


POOL = replace(
    PREFILL,  # slots of tiles that are split, among null rows and an empty sequence
    case=replace(KIMI, H=64, HV=64, lengths=(900, 0, 1700, 64, 333, 1200), state=FP32, v_first=True),
    indices=(4, 7, -1, 0, 9, 5),
    flags=(True, True, True, True, False, True),
    marks=None,
)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
def test_split_tiles_of_a_pool(v_first: bool, dtype: torch.dtype, other_backend: str):
    pool_case = replace(POOL, case=replace(POOL.case, v_first=v_first, state=dtype))
    for seed in range(calls.CALLS_TO_A_REPLAY + 2):
        call = gpu_pool_call(fd.chunk_kda, pool_case, BF16, other_backend, seed)
        assert work_of(call).carries > 0
        want = gathered_and_scattered(fd.chunk_kda, call)
        assert same_bits(fd.chunk_kda(**call)[0], want["o"])
        assert same_bits(memory_of(call["state_pool"]), memory_of(want["state_pool"]))


def test_a_graph_splits_anew_at_every_replay(other_backend: str):
    """One graph, lengths that change in place, each several times over, as the flags of the last replay lie about."""
    layouts = [(1000, 1000, 1000, 1072), (4072, 0, 0, 0), (0, 3000, 1, 1071), (64, 64, 3944, 0), (1, 2, 3, 4)]
    case = replace(KIMI, H=48, HV=48, lengths=layouts[0], state=FP32, v_first=True)
    call = gpu_call(fd.chunk_kda, case, BF16, other_backend)
    out = torch.full_like(call["v"], torch.nan)
    graph, results = calls.captured(lambda: fd.chunk_kda(**call, out=out))
    for lengths in layouts * 3:
        call["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        want = poisoned(call)
        for x in results:
            x.fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        assert_same_bits(results, want, covered_tokens(call))
