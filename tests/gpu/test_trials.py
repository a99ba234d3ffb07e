"""Segments on trial on `hopper`: from what the chunk before them leaves if it forgets all before it, else one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.hopper import segments
from flashdelta.runtime.call import CACHE
from flashdelta.testing.cases import BF16, FP32, Case, case_id
from flashdelta.testing.inputs import make_call
from flashdelta.testing.oracle import chunked_truth, covered_tokens, relative_error, same_bits
from flashdelta.tools.bench.timing import capture

from ..support.trials import EXPLICIT, OTHERS, moved, replaced
from .calls import KIMI, UNBOUNDED, assert_same_bits, hold, poisoned

pytestmark = pytest.mark.gpu

COMPOSED = [
    replace(KIMI, name="with transitions", T=8192, H=8, HV=8, state=FP32),
    replace(KIMI, name="packed, with transitions", lengths=(6000, 100, 0, 2092), H=4, HV=8, state=FP32, v_first=True),
]
ALONE = [
    replace(KIMI, name="without", T=2048, H=12, HV=12, state=FP32),
    replace(KIMI, name="packed, without", lengths=(1900, 0, 148), H=6, HV=12, state=FP32, v_first=True),
    replace(UNBOUNDED, name="half as wide, without", T=2048, H=24, HV=24, K=64, V=64, state=BF16, h=True),
]


@pytest.fixture(autouse=True)
def tried() -> Iterator[None]:
    with mock.patch.object(segments, "TRIALS", True):
        CACHE.clear()
        yield
    CACHE.clear()


def hopper_call(case: Case, memory: str) -> dict:
    return make_call(replace(case, memory=memory), BF16, "cuda") | {"backend": "hopper"}


def in_segments(call: dict) -> tuple[torch.Tensor, ...]:
    found = fd.explain(fd.chunk_kda, **call)
    if found.chosen != "hopper":
        pytest.skip("no Hopper GPU")
    assert max(found.segments) > 1
    return poisoned(call)


@pytest.mark.parametrize("case", [*COMPOSED, *ALONE], ids=case_id)
@pytest.mark.parametrize("memory", ["slow", "long", "new", "random"])
def test_as_whole_sequences(case: Case, memory: str):
    call = hopper_call(case, memory)
    found = in_segments(call)
    hold(call, found, chunked_truth(call))
    whole = poisoned(call | {"split": False})
    if case in ALONE and memory == "long":
        assert_same_bits(found, whole, covered_tokens(call))
    if memory == "random":
        for name, x, y in zip(("o", "final_state", "h"), found, whole):
            x, y = (x[:, covered_tokens(call)], y[:, covered_tokens(call)]) if name == "o" else (x, y)
            assert relative_error(x.double(), y.double()) < 1e-5, name


@pytest.mark.parametrize("case", [COMPOSED[0], ALONE[0]], ids=case_id)
def test_a_graph_decides_at_each_replay(case: Case):
    calls = {memory: hopper_call(case, memory) for memory in ("random", "slow")}
    want = {memory: in_segments(call) for memory, call in calls.items()}
    given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in calls["random"].items()}
    replay, results = capture(lambda: fd.chunk_kda(**given))
    for memory in ("slow", "random", "slow"):
        for name, x in calls[memory].items():
            if isinstance(x, torch.Tensor):
                given[name].copy_(x)
        replay()
        assert all(same_bits(x, y) for x, y in zip(results, want[memory])), memory


@pytest.mark.parametrize("memory", ["random", "slow"])
@pytest.mark.parametrize("case", [COMPOSED[1], ALONE[1]], ids=case_id)
def test_a_pool_in_place(case: Case, memory: str):
    """The last segment stores where the first one reads, 200 times."""
    call = hopper_call(case, memory)
    states = call.pop("initial_state")
    slots = torch.randperm(2 * states.shape[0], device="cuda")[: states.shape[0]].int()
    pool = torch.randn(2 * states.shape[0], *states.shape[1:], device="cuda")
    pool[slots.long()] = states
    before = pool.clone()
    call |= {"state_pool": pool, "state_indices": slots, "output_final_state": False}
    want = in_segments(call)[0].clone()
    after = pool.clone()
    untouched = torch.ones(len(pool), dtype=torch.bool, device="cuda")
    untouched[slots.long()] = False
    assert same_bits(after[untouched], before[untouched])
    for _ in range(200):
        pool.copy_(before)
        found = poisoned(call)[0]
        assert_same_bits((found,), (want,), covered_tokens(call))
        assert same_bits(pool, after)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("case", [COMPOSED[0], ALONE[0]], ids=case_id)
def test_what_moves_between_channels_is_remembered(case: Case, other: int):
    call = moved(replace(EXPLICIT, T=case.T, H=case.H, HV=case.HV), other, "cuda")
    found = in_segments(call)
    hold(call, found, chunked_truth(call))
    if case is ALONE[0]:
        assert_same_bits(found, poisoned(call | {"split": False}), covered_tokens(call))


@pytest.mark.parametrize(("T", "H"), [(8192, 8), (2048, 24)], ids=["with transitions", "without"])
def test_what_is_replaced_is_forgotten(T: int, H: int):
    """The NaN of the first chunk spreads no further than its segment."""
    o, state = in_segments(replaced(replace(EXPLICIT, K=64, V=64, T=T, H=H, HV=H), "cuda"))
    assert o[:, :64].isnan().any() and o[:, 3 * T // 4 :].isfinite().all() and state.isfinite().all()
