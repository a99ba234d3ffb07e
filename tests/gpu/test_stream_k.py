"""Tiles of `recurrence` that stream-K splits: the same bits as a call of few heads, in which every CTA has a whole tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.hopper import recurrence

from ..support.cases import BF16, FP32, Case, case_id
from ..support.inputs import TOKEN_TENSORS, sequence_calls
from ..support.oracle import covered_tokens, lengths_of, same_bits
from ..support.pools import PoolCase, gathered_and_scattered, memory_of
from ..support.stream_k import Work
from .calls import (
    CALLS_TO_A_REPLAY,
    KIMI,
    UNBOUNDED,
    assert_same_bits,
    captured,
    gpu_call,
    in_steps,
    lengths_between,
    poisoned,
)
from .test_pool import gpu_pool_call

pytestmark = pytest.mark.gpu

FEW = 16
"""Heads at a time whose tiles are not split, even if the batch has four rows."""

UNEVEN = (4096, 2048, 1024, 512, 320, 192)


@pytest.fixture(autouse=True)
def stream_k(monkeypatch: pytest.MonkeyPatch):
    """Where it would not pay, too. Many heads would take steps, and the few that they are compared with chunks."""
    monkeypatch.setattr(recurrence, "stream_k_pays", lambda problem, ctas: True)
    with in_steps(False):
        yield


CASES = [
    replace(KIMI, name="one", why="192 tiles of one length on 132 SMs", H=96, HV=96, T=2085),
    replace(KIMI, name="rows", why="rows of a batch", H=24, HV=24, B=4, T=1000, state=FP32, v_first=True),
    replace(KIMI, name="grouped", why="value heads that share a key head", H=20, HV=80, T=1500, state=BF16),
    replace(KIMI, name="uneven", why="packed, each length half of the last", H=96, HV=96, lengths=UNEVEN, state=FP32),
    replace(UNBOUNDED, name="unbounded", why="the other gate", H=40, HV=40, lengths=(*UNEVEN, 0, 1), unused=7),
    replace(
        KIMI, name="one_long", why="longer than an equal range", H=8, HV=8, lengths=(8000, *(530,) * 40), state=FP32
    ),
    replace(KIMI, name="few", why="fewer tiles than SMs", H=4, HV=4, lengths=(3000, 200, 2000), state=FP32),
    replace(KIMI, name="empty", why="empty ones everywhere", H=64, HV=64, lengths=(0, 700, 0, 0, 1900, 0), state=FP32),
    replace(KIMI, name="many", why="400 sequences", H=6, HV=6, lengths=lengths_between(3, 400, 900), state=FP32),
    replace(KIMI, name="h", why="states before each chunk", H=80, HV=80, lengths=(1500, 0, 700), h=True, state=FP32),
    replace(KIMI, name="h_rows", why="the same for rows", H=80, HV=80, B=1, T=1900, h=True, state=BF16, v_first=True),
    replace(KIMI, name="narrow", why="the other head dimension", K=64, V=64, H=150, HV=150, T=1100, state=FP32),
]


def work_of(call: dict) -> Work:
    heads, slices = call["v"].shape[2], call["v"].shape[3] // 64
    most = torch.cuda.get_device_properties("cuda").multi_processor_count // slices
    lengths, offsets = lengths_of(call), call.get("cu_seqlens")
    offsets = None if offsets is None else tuple(offsets.tolist())
    return Work(heads, min(len(lengths) * heads, most), call["v"].shape[1], len(lengths), offsets)


def heads_of(call: dict, heads: range) -> dict:
    """The call of some value heads and their keys."""
    group = call["v"].shape[2] // call["q"].shape[2]
    keys = slice(heads.start // group, -(-heads.stop // group))
    some = slice(heads.start, heads.stop)
    chosen = {name: call[name][:, :, keys if name in "qk" else some] for name in TOKEN_TENSORS}
    parameters = {name: call[name].view(call["v"].shape[2], -1) for name in ("A_log", "dt_bias") if name in call}
    chosen |= {name: x[some].flatten() for name, x in parameters.items()}
    if call.get("initial_state") is not None:
        chosen["initial_state"] = call["initial_state"][:, some]
    return call | {name: x.contiguous() for name, x in chosen.items()}


def head_by_head(call: dict) -> tuple[torch.Tensor, ...]:
    """The results of calls of a few heads each, in which no tile is split."""
    heads = call["v"].shape[2]
    found = []
    for first in range(0, heads, FEW):
        one = heads_of(call, range(first, min(first + FEW, heads)))
        assert work_of(one).carries == 0
        found.append(poisoned(one))
    return tuple(torch.cat(x, dim=axis) for x, axis in zip(zip(*found), (2, 1, 2)))


def sequence_by_sequence(call: dict) -> list[torch.Tensor]:
    """The same of a packed call. Sequences without tokens are not called: they keep their state, or have one of zeros."""
    calls = sequence_calls(call)
    alone = [head_by_head(one) if one["q"].shape[1] > 0 else None for one in calls]
    with_tokens = [results for results in alone if results is not None]
    zeros = torch.zeros_like(with_tokens[0][1])
    states = [one.get("initial_state", zeros) if results is None else results[1] for one, results in zip(calls, alone)]
    found = [torch.cat([o for o, *_ in with_tokens], dim=1), torch.cat(states)]
    if call["return_intermediate_states"]:
        found.append(torch.cat([h for _, _, h in with_tokens], dim=1))
    return found


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_split_tiles_change_no_bit(case: Case, other_backend: str):
    # the plan of a split depends on the batch
    call = gpu_call(fd.chunk_kda, case, BF16, other_backend) | {"split": False}
    assert work_of(call).carries > 0
    want = head_by_head(call) if case.lengths is None else sequence_by_sequence(call)
    for _ in range(CALLS_TO_A_REPLAY + 1):
        o, state, *h = poisoned(call)
        # rows of no sequence are undefined
        assert_same_bits((o, state, *(x[:, : want[2].shape[1]] for x in h)), want, covered_tokens(call))


POOL = PoolCase(
    name="stream-K",
    why="slots of tiles that are split, among null rows and an empty sequence",
    case=replace(KIMI, H=64, HV=64, lengths=(900, 0, 1700, 64, 333, 1200), state=FP32, v_first=True),
    indices=(4, 7, -1, 0, 9, 5),
    flags=(True, True, True, True, False, True),
    slots=9,
    gap=256,
    index_dtype=torch.int32,
)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
def test_split_tiles_of_a_pool(v_first: bool, dtype: torch.dtype, other_backend: str):
    pool_case = replace(POOL, case=replace(POOL.case, v_first=v_first, state=dtype))
    for seed in range(CALLS_TO_A_REPLAY + 2):
        call = gpu_pool_call(fd.chunk_kda, pool_case, BF16, other_backend, seed)
        assert work_of(call).carries > 0
        want_o, want_pool = gathered_and_scattered(fd.chunk_kda, call)
        o, _ = fd.chunk_kda(**call)
        assert same_bits(o, want_o)
        assert same_bits(memory_of(call["state_pool"]), memory_of(want_pool))


def test_a_graph_splits_anew_at_every_replay(other_backend: str):
    """One graph, lengths that change in place, each several times over, as the flags of the last replay lie about."""
    layouts = [(1000, 1000, 1000, 1072), (4072, 0, 0, 0), (0, 3000, 1, 1071), (64, 64, 3944, 0), (1, 2, 3, 4)]
    case = replace(KIMI, H=48, HV=48, lengths=layouts[0], state=FP32, v_first=True)
    call = gpu_call(fd.chunk_kda, case, BF16, other_backend)
    out = torch.full_like(call["v"], torch.nan)
    graph, results = captured(lambda: fd.chunk_kda(**call, out=out))
    for lengths in layouts * 3:
        call["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        want = poisoned(call)
        for x in results:
            x.fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        assert_same_bits(results, want, covered_tokens(call))


def test_split_tiles_a_hundred_times(other_backend: str):
    """A state that is read too early shows in some of them."""
    call = gpu_call(fd.chunk_kda, replace(CASES[0], T=700, state=FP32), BF16, other_backend)
    assert work_of(call).carries > 0
    want = head_by_head(call)
    for _ in range(100):
        assert_same_bits(fd.chunk_kda(**call), want)
