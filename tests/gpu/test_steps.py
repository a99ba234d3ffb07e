"""Hopper's prefill in steps of 32 tokens, which calls that fill the GPU take: here all that can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from flashdelta.hopper import build
from flashdelta.program.cache import LaunchCache
from flashdelta.runtime import call as road
from flashdelta.testing.cases import BF16, CASES, FP32, Case, case_id
from flashdelta.testing.oracle import assert_close, covered_tokens, poisoned_memory, same_bits, tolerance_of

from ..support.buffers import CASES as BUFFER_CASES
from ..support.buffers import BufferCase, buffer_call, buffer_id, buffer_truth
from ..support.pools import CHECKPOINT_POOLS, PLAIN_POOLS, PoolCase, copied, pool_call, pool_id, pool_truth
from .calls import CALLS_TO_A_REPLAY, KIMI, check, compilations, gpu_call, on_gpu

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def in_steps(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With a launch cache of their own: other tests' calls of the same kind were recorded in chunks."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    monkeypatch.setattr(build, "STEPS_FROM", 1)
    monkeypatch.setattr(road, "CACHE", LaunchCache())
    yield


def assert_steps(call: dict) -> None:
    problem, _ = road.check(fd.chunk_kda, **call)
    assert build.in_steps(problem)


def bounded(case: Case) -> bool:
    return (case.safe or case.gate == "lower_bound") and case.l2norm and not case.h and not case.wide_gate


TABLE = [replace(on_gpu(case), K=128) for case in CASES if case.chunk_size == 64 and case.V >= 64 and bounded(case)]
LONG = [
    replace(KIMI, name="uneven", lengths=(1500, 0, 33, 64, 1, 700), state=FP32, v_first=True),
    replace(KIMI, name="slow gates", memory="slow", T=2048, v_first=True),
    replace(KIMI, name="random gates", memory="random", T=2048, state=BF16),
    replace(KIMI, name="shared heads", H=4, HV=16, B=2, T=1000),
]


@pytest.mark.parametrize("case", TABLE + LONG, ids=case_id)
def test_cases(case: Case):
    check(fd.chunk_kda, case, BF16, "hopper")


POOLS = [case for case in PLAIN_POOLS + CHECKPOINT_POOLS if case.case.gate == "lower_bound"]


@pytest.mark.parametrize("pool_case", POOLS, ids=pool_id)
def test_pools(pool_case: PoolCase):
    case = replace(on_gpu(pool_case.case), K=128, chunk_size=64)
    call = pool_call(replace(pool_case, case=case), BF16, "cuda") | {"split": False, "backend": "hopper"}
    assert_steps(call)
    true_o, true_pool = pool_truth(call)
    tokens = covered_tokens(call)
    for _ in range(CALLS_TO_A_REPLAY):
        own = call | {"state_pool": copied(call["state_pool"])}
        with poisoned_memory():
            o, _ = fd.chunk_kda(**own)
        assert_close("o", o[:, tokens], true_o[:, tokens], tolerance_of(call))
        assert_close("pool", own["state_pool"], true_pool, tolerance_of(call) + 4e-3)


BUFFERS = [case for case in BUFFER_CASES if case.case.gate == "lower_bound" and case.case.chunk_size == 64]


@pytest.mark.parametrize("buffer_case", BUFFERS, ids=buffer_id)
def test_buffers(buffer_case: BufferCase):
    call = buffer_call(replace(buffer_case, case=replace(on_gpu(buffer_case.case), K=128)), BF16, "cuda")
    call |= {"split": False}
    want, tokens = buffer_truth(call), covered_tokens(call)
    with poisoned_memory():
        o, *_ = fd.chunk_kda(**call, backend="hopper")
    assert_close("o", o[:, tokens], want.o[:, tokens], tolerance_of(call))
    for name, wanted in (("checkpoint_states", want.buffer), ("final_state", want.final), ("state_pool", want.pool)):
        if name in call:
            assert_close(name, call[name], wanted, tolerance_of(call) + 4e-3)


PACKED = replace(KIMI, name="packed", lengths=(1300, 0, 33, 64, 1, 700), state=FP32)


def test_bits_repeat_and_are_a_sequences_own():
    """Also where a NaN lies in the sequence beside it."""
    call = gpu_call(fd.chunk_kda, PACKED, BF16, "hopper") | {"split": False}
    assert_steps(call)
    together = fd.chunk_kda(**call)
    for _ in range(20):
        assert all(same_bits(x, y) for x, y in zip(fd.chunk_kda(**call)[:2], together))
    begin, end = call["cu_seqlens"].tolist()[5:7]
    rows = {name: call[name][:, begin:end] for name in ("q", "k", "v", "g", "beta")}
    offsets = torch.tensor([0, end - begin], device="cuda", dtype=call["cu_seqlens"].dtype)
    alone = call | rows | {"cu_seqlens": offsets, "initial_state": call["initial_state"][5:]}
    o, state = fd.chunk_kda(**alone)[:2]
    assert same_bits(together[0][:, begin:end], o) and same_bits(together[1][5:], state)
    call["v"][:, begin - 1] = torch.nan
    o, state = fd.chunk_kda(**call)[:2]
    assert same_bits(together[0][:, begin:end], o[:, begin:end]) and same_bits(together[1][5:], state[5:])


def test_a_graph_replays_with_other_lengths():
    call = gpu_call(fd.chunk_kda, PACKED, BF16, "hopper") | {"split": False}
    fd.chunk_kda(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fd.chunk_kda(**call)[:2]
    call["cu_seqlens"].copy_(torch.tensor([0, 64, 65, 65, 165, 198, 2098]))
    graph.replay()
    want = fd.chunk_kda(**call)[:2]
    assert all(same_bits(x, y) for x, y in zip(found, want))


def test_warmup_compiles_both_forms(monkeypatch: pytest.MonkeyPatch):
    """Head counts on both sides of the mark, and those that leave SMs idle."""
    monkeypatch.undo()
    fd.warmup(fd.chunk_kda, backend="hopper", state_v_first=True)
    base = replace(KIMI, v_first=True, offsets_dtype=torch.int32)
    with compilations() as names:
        for lengths in (None, (70, 0, 130)):
            for heads in (2, 32, 64, 66, 96):
                for state in (None, FP32):
                    case = replace(base, H=heads, HV=heads, lengths=lengths, state=state)
                    fd.chunk_kda(**gpu_call(fd.chunk_kda, case, BF16, "hopper"))
    assert names == []
