"""`prepare` and `recurrence` in steps of 32 tokens, interpreted, against float64 and against chunks of 64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.kernels.hopper import build, recurrence
from flashdelta.parallel import context_parallel

from ..gpu.calls import KIMI, UNBOUNDED, assert_same_bits, on_gpu
from ..support.buffers import CASES, BufferCase, buffer_call, buffer_id, hold_buffers
from ..support.cases import BF16, FP32, Case
from ..support.oracle import (
    assert_close,
    covered_tokens,
    float64,
    poisoned_memory,
    relative_error,
    same_bits,
    tolerance_of,
    truth,
)
from ..support.pools import CHECKPOINT_POOLS, PLAIN_POOLS, PoolCase, hold_pool, pool_call, pool_id
from ..support.ranks import Cut
from ..support.virtual import on_ranks
from ..unit.test_hopper_choice import TABLE
from .checks import check_steps, hold_bits_alone, hold_errors, poisoned, steps_call
from .interpreter import hopper_on_cpu

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "STEPS_FROM", dict.fromkeys(build.STEPS_FROM, 1))


NAMES = (
    *("B3", "decay_promised", "bounded_bare", "bound_half", "wide_gate", "gva4", "state_v_first", "state_bf16"),
    *("packed_unused", "packed_tokens", "fused", "padded", "same_keys", "pinned_decay", "zero_rows", "key_norms"),
)
TABLE_NAMED = {case.name: case for case in TABLE}


@pytest.mark.parametrize(("name", "K"), zip(NAMES, itertools.cycle((128, 64))))
def test_cases(name: str, K: int):
    check_steps(replace(TABLE_NAMED[name], K=K))


SMALL = replace(KIMI, H=1, HV=2, V=64, state=FP32)


@pytest.mark.parametrize(
    ("T", "v_first", "K", "V"),
    [
        *((1, False, 128, 128), (16, True, 64, 128), (31, True, 128, 64), (32, False, 64, 64), (33, False, 128, 128)),
        *((64, True, 128, 64), (65, True, 64, 128), (130, False, 64, 64)),
    ],
)
def test_lengths(T: int, v_first: bool, K: int, V: int):
    check_steps(replace(SMALL, name="length", T=T, K=K, V=V, v_first=v_first))


PLAIN = replace(SMALL, gate="none", lower_bound=None, safe=True, beta="value", T=192)
HARD = [
    replace(SMALL, name="random gates", memory="random", T=192),
    replace(SMALL, name="slow gates", memory="slow", T=192),
    replace(SMALL, name="pinned gates", hard="pinned", T=192),
    *(replace(PLAIN, name=hard, hard=hard) for hard in ("g0", "g-5", "same_keys_2", "beta_to_2", "key_norms")),
]
MORE = (1.05, 1.15)
"""How many times the errors of chunks of 64 those of `o` and the final state may be. Both round operands once, at other places;
a state that remembers few tokens is a small sample."""


@pytest.mark.parametrize(("case", "K"), zip(HARD, itertools.cycle((128, 64))), ids=[case.name for case in HARD])
def test_errors_are_those_of_chunks(case: Case, K: int, monkeypatch: pytest.MonkeyPatch):
    call = steps_call(replace(case, K=K))
    want = truth(call)
    found = poisoned(call)
    monkeypatch.setattr(build, "STEPS_FROM", dict.fromkeys(build.STEPS_FROM, 3))
    before = poisoned(call)
    assert not same_bits(found[0], before[0])
    hold_errors(found, before, want, MORE)


def test_small_values_at_the_bound():
    """States of channels that decay by exp(-80) within half a step are lost where values are small, but little of o is."""
    case = replace(PLAIN, name="small values", hard="g-5")
    call = steps_call(case)
    call["v"] = call["v"] * 1e-4
    call["initial_state"] = None
    want = truth(call)
    assert relative_error(poisoned(call)[0], want[0]) < 4.6e-3


PACKED = replace(SMALL, name="packed", lengths=(130, 0, 33, 1, 64, 95))


@pytest.mark.parametrize("K", [128, 64])
def test_bits_are_a_sequence_s_own(K: int):
    hold_bits_alone(steps_call(replace(PACKED, K=K)), (2, 4, 5))


@pytest.mark.parametrize("stream_k", [False, True], ids=["tiles", "stream-K"])
def test_few_ctas_change_no_bit(stream_k: bool, monkeypatch: pytest.MonkeyPatch):
    call = steps_call(replace(PACKED, HV=3, H=3, lengths=(300, 0, 520, 64, 1, 200)))
    want = poisoned(call)
    monkeypatch.setattr(recurrence, "stream_k_pays", lambda problem, ctas: stream_k)
    with hopper_on_cpu(sms=4, workers_first=not stream_k):
        assert_same_bits(poisoned(call), want, covered_tokens(call))


POOL_NAMES = ("v_first_int32", "flags_batch", "gva", "several", "cut_bf16", "bad_offsets")
POOLS = [case for case in PLAIN_POOLS + CHECKPOINT_POOLS if case.name in POOL_NAMES]


@pytest.mark.parametrize("pool_case", POOLS, ids=pool_id)
def test_pools(pool_case: PoolCase):
    case = replace(on_gpu(pool_case.case), K=128, chunk_size=64)
    call = pool_call(replace(pool_case, case=case), BF16) | {"split": False, "backend": "hopper"}
    hold_pool(fd.chunk_kda, call, tolerance_of(call), tolerance_of(call) + 4e-3)


BUFFERS = [case for case in CASES if case.name in ("every_128_batch", "every_pool", "many_offsets", "only_final_bf16")]


@pytest.mark.parametrize("buffer_case", BUFFERS, ids=buffer_id)
def test_buffers(buffer_case: BufferCase):
    case = replace(buffer_case, case=replace(on_gpu(buffer_case.case), K=128))
    call = buffer_call(case, BF16) | {"split": False, "backend": "hopper"}
    hold_buffers(call, tolerance_of(call), lambda dtype: tolerance_of(call) + 4e-3)


# ---- ranks -----------------------------------------------------------------------------------------------------------

LONG = replace(SMALL, memory="long")
OVER_RANKS = {
    "packed, GVA": (replace(LONG, lengths=(40, 0, 171, 13)), 2),
    "through all, V first": (replace(LONG, H=2, V=128, lengths=(210,), v_first=True), 3),
    "K64, states in bf16": (replace(LONG, K=64, lengths=(30, 162), state=BF16), 3),
    # one starts on the rank between
    "unbounded": (replace(UNBOUNDED, H=1, HV=2, V=64, lengths=(80, 112), state=FP32, memory="long"), 3),
    "forgetful": (replace(UNBOUNDED, H=1, HV=1, V=64, lengths=(20, 172), state=FP32, memory="new"), 3),
    "no states": (replace(LONG, lengths=(70, 80), state=None), 2),
}


@pytest.mark.parametrize(
    ("name", "sms", "relay"),
    [*((name, None, True) for name in OVER_RANKS), ("through all, V first", 1, True), ("packed, GVA", None, False)],
)
def test_ranks_find_what_one_finds(name: str, sms: int | None, relay: bool):
    case, ranks = OVER_RANKS[name]
    call = steps_call(case) | {"output_final_state": True}
    cut, exact = Cut(call, ranks, relay=relay), Cut(float64(call), 1).whole(backend="reference")
    with mock.patch.object(build, "outgoing", wraps=build.outgoing) as ran, poisoned_memory(), hopper_on_cpu(sms=sms):
        found = cut.over_ranks()
    # without a relay all but the last tell what becomes of a state
    assert [x.kwargs for x in ran.call_args_list] == [{"steps": True}] * (0 if ranks == 2 and relay else ranks - 1)
    for key, x in exact.items():
        assert_close(key, found[key], x, tolerance_of(call))


@pytest.mark.parametrize(("K", "v_first"), [(128, True), (64, False)])
def test_the_second_of_two_ranks_goes_on_to_the_bit(K: int, v_first: bool):
    """After a whole chunk: the state that leaves the first is the one that one GPU has there."""
    cut = Cut(steps_call(replace(LONG, K=K, lengths=(6, 134), v_first=v_first)) | {"output_final_state": True}, 2)
    found, wanted = cut.over_ranks(), cut.whole()
    assert all(same_bits(found[name], x) for name, x in wanted.items())


def test_a_pool_over_ranks():
    call = steps_call(replace(LONG, lengths=(60, 0, 132))) | {"output_final_state": True}
    exact = Cut(float64(call), 1).whole(backend="reference")["final_state"]
    cut, states = Cut(call, 2), call["initial_state"]
    without = {name: x for name, x in call.items() if name not in ("initial_state", "output_final_state")}

    def run(group) -> Tensor:
        context = context_parallel(call["cu_seqlens"], group=group)
        pool = states.clone()
        slots = torch.tensor(cut.sequences(context.rank))
        fd.chunk_kda(**Cut(without, 2).local(context), state_pool=pool, state_indices=slots)
        return pool

    for pool, ended in zip(on_ranks(2, run), (0, 2)):
        for n in range(3):
            if n == ended:
                assert_close("pool", pool[n], exact[n], tolerance_of(call))
            else:
                assert same_bits(pool[n], states[n])
