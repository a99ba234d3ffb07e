"""`prepare` and `recurrence` in steps of 32 tokens, interpreted, against float64 and against chunks of 64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.hopper import build, recurrence

from ..full import thinned
from ..gpu.calls import HOPPER_CASES, KIMI, UNBOUNDED, assert_same_bits, hold, on_gpu
from ..support import oracle
from ..support.cases import BF16, FP32, Case, case_id
from ..support.decays import KINDS, decays_call
from ..support.inputs import TOKEN_TENSORS
from ..support.oracle import assert_close, float64, poisoned_memory, relative_error, same_bits, truth
from ..support.pools import BUFFERS, CHECKPOINT_POOLS, PLAIN_POOLS, PoolCase, hold_pool, pool_call, pool_id
from ..support.ranks import Cut
from .checks import check_steps, hold_bits_alone, hold_nan_inside, poisoned, steps_call
from .interpreter import hopper_on_cpu
from .test_ranks import hold_pool_over_ranks

pytestmark = pytest.mark.slow

IN_STEPS, IN_CHUNKS = (dict.fromkeys(build.STEPS_FROM, heads) for heads in (1, 1 << 30))


@pytest.fixture(autouse=True)
def in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "STEPS_FROM", IN_STEPS)


def widths(cases: list) -> list[tuple]:
    """Each with K of 128 or 64, alternately."""
    return [*zip(cases, itertools.cycle((128, 64)))]


SMALL = replace(KIMI, H=1, HV=2, V=64, T=192, state=FP32)
FREE = replace(UNBOUNDED, H=1, HV=2, V=64, T=192, state=FP32)
TOKENS = [(1, False, 128), (16, True, 128), (31, True, 64), (32, False, 64)]
TOKENS += [(33, False, 128), (64, True, 64), (65, True, 128), (130, False, 64)]
LENGTHS = [replace(SMALL, name=f"T{T}", T=T, v_first=v_first, V=V) for T, v_first, V in TOKENS]
LENGTHS += [
    replace(FREE, name=f"unbounded T{T}", T=T, v_first=T % 2 == 0, memory=memory)
    for T, memory in zip((1, 8, 9, 17, 32, 33, 64, 65, 130), itertools.cycle(("new", "short")))
]


@pytest.mark.parametrize(
    ("case", "K"),
    # in turn with chunks, which have the others
    widths([*(replace(x, h=False) for x in thinned(HOPPER_CASES, 2, 1) if x.l2norm), *LENGTHS]),
    ids=lambda x: getattr(x, "name", x),
)
def test_cases(case: Case, K: int):
    check_steps(replace(case, K=K))


PLAIN = replace(SMALL, gate="none", lower_bound=None, safe=True, beta="value")
PLAIN_FREE = replace(FREE, gate="none", beta="value")
HARD = [
    *(replace(SMALL, name=f"{memory} gates", memory=memory) for memory in ("random", "slow")),
    replace(SMALL, name="pinned gates", hard="pinned", T=200),
    *(replace(PLAIN, name=hard, hard=hard) for hard in ("g0", "g-5", "same_keys_2", "beta_to_2", "key_norms")),
]
HARD_FREE = [
    *(replace(FREE, name=f"{memory} memory", memory=memory) for memory in ("long", "short", "random", "new")),
    *(replace(PLAIN_FREE, name=hard, hard=hard) for hard in ("g-50", "g0", "beta_to_2", "same_keys_2", "key_norms")),
]
MORE = {True: (1.05, 1.15), False: (1.07, 1.2)}
"""How many times the errors of chunks of 64 those of `o` and the final state may be, of gates with a bound and without. Both
round operands once, at other places; a state that remembers few tokens is a small sample."""


def compare(call: dict, bounded: bool) -> None:
    want, found = truth(call), poisoned(call)
    with mock.patch.object(build, "STEPS_FROM", IN_CHUNKS):
        before = poisoned(call)
    assert not same_bits(found[0], before[0])
    for got, old, true, times in zip(found, before, want, MORE[bounded]):
        assert relative_error(got, true) < times * relative_error(old, true)


@pytest.mark.parametrize(("case", "K"), widths(HARD + HARD_FREE), ids=lambda x: getattr(x, "name", x))
def test_errors_are_those_of_chunks(case: Case, K: int):
    compare(steps_call(replace(case, K=K)), case.gate == "lower_bound" or case.safe)


@pytest.mark.parametrize(("kind", "K"), widths([*KINDS]))
def test_errors_of_decays_are_those_of_chunks(kind: str, K: int):
    compare(decays_call(kind, FREE.T, FREE.H, K=K), False)


def test_small_values_at_the_bound():
    """States of channels that decay by exp(-80) within half a step are lost where values are small, but little of o is."""
    call = steps_call(replace(PLAIN, name="small values", hard="g-5"))
    call |= {"v": call["v"] * 1e-4, "initial_state": None}
    want = truth(call)
    assert relative_error(poisoned(call)[0], want[0]) < 4.6e-3


@pytest.mark.parametrize(("rate", "K"), [(-6.0, 64), (1.0, 128)], ids=["slow", "forgetful"])
def test_large_inputs_of_the_gate(rate: float, K: int):
    """Whose exponential overflows, also where no token is."""
    call = steps_call(replace(FREE, name="large inputs", T=70, K=K))
    call |= {"A_log": torch.full_like(call["A_log"], rate), "dt_bias": call["dt_bias"].clone()}
    call["dt_bias"].view(-1)[::5] += 150.0
    hold(call, poisoned(call), truth(call))


def test_no_factor_loses_what_its_product_has():
    """Few tokens have values, and decay by exp(-24) to the step's reference; to get there from the middle of their 8 rows takes
    exp(-104), which float32 does not hold."""
    call = decays_call("steep, then flat", FREE.T, FREE.H)
    row = torch.arange(call["g"].shape[1]) % 16
    steps = torch.where(row // 4 == 1, -20.0, torch.where(row < 8, -1.0, -2.953125))
    g = torch.zeros_like(call["g"]) + steps[None, :, None, None].to(BF16)
    few = (torch.arange(g.shape[1]) % 32 == 7)[None, :, None, None]
    call |= {"g": g, "v": torch.where(few, call["v"], 0.0).to(BF16), "initial_state": None}
    want, found = truth(call), poisoned(call)
    later = slice(16, 24)
    assert relative_error(found[0][:, later], want[0][:, later]) < 1e-2


# ---- sequences, CTAs, pools ------------------------------------------------------------------------------------------

PACKED = replace(SMALL, name="packed", lengths=(130, 0, 33, 1, 64, 95))
PACKED_FREE = replace(FREE, name="packed, unbounded", lengths=PACKED.lengths, memory="new")


@pytest.mark.parametrize("case", [replace(PACKED, K=64), PACKED_FREE], ids=case_id)
def test_bits_are_a_sequence_s_own(case: Case):
    hold_bits_alone(steps_call(case), (2, 4, 5))


@pytest.mark.parametrize("name", TOKEN_TENSORS)
def test_nan_stays_in_its_sequence(name: str):
    hold_nan_inside(steps_call(replace(PACKED_FREE, lengths=(70, 40, 66))), [name])


@pytest.mark.parametrize(
    ("case", "stream_k"), [(PACKED, False), (PACKED, True), (PACKED_FREE, True)], ids=["tiles", "stream-K", "unbounded"]
)
def test_few_ctas_change_no_bit(case: Case, stream_k: bool, monkeypatch: pytest.MonkeyPatch):
    call = steps_call(replace(case, HV=3, H=3, lengths=(130, 0, 260, 64, 1)))
    want = poisoned(call)
    monkeypatch.setattr(recurrence, "stream_k_pays", lambda problem, ctas: stream_k)
    with hopper_on_cpu(sms=4, workers_first=not stream_k, last_first=case is PACKED_FREE):
        assert_same_bits(poisoned(call), want, oracle.covered_tokens(call))


@pytest.mark.parametrize("pool_case", thinned(PLAIN_POOLS + CHECKPOINT_POOLS + BUFFERS, 2), ids=pool_id)
def test_pools(pool_case: PoolCase):
    case = replace(on_gpu(pool_case.case), K=128, chunk_size=64)
    call = pool_call(replace(pool_case, case=case), BF16) | {"split": False, "backend": "hopper"}
    hold_pool(fd.chunk_kda, call, more=4e-3)


# ---- ranks -----------------------------------------------------------------------------------------------------------

LONG = replace(SMALL, memory="long")
OVER_RANKS = {
    "packed, GVA": (replace(LONG, lengths=(40, 0, 171, 13)), 2),
    "through all, V first": (replace(LONG, H=2, V=128, lengths=(210,), v_first=True), 3),
    "K64, states in bf16": (replace(LONG, K=64, lengths=(30, 162), state=BF16), 3),
    # one starts on the rank between
    "unbounded": (replace(FREE, lengths=(80, 112), memory="long"), 3),
    "forgetful": (replace(FREE, HV=1, lengths=(20, 172), memory="new"), 3),
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
        assert_close(key, found[key], x, oracle.tolerance_of(call))


@pytest.mark.parametrize(("K", "v_first"), [(128, True), (64, False)])
def test_the_second_of_two_ranks_goes_on_to_the_bit(K: int, v_first: bool):
    """After a whole chunk: the state that leaves the first is the one that one GPU has there."""
    cut = Cut(steps_call(replace(LONG, K=K, lengths=(6, 134), v_first=v_first)) | {"output_final_state": True}, 2)
    found, wanted = cut.over_ranks(), cut.whole()
    assert all(same_bits(found[name], x) for name, x in wanted.items())


def test_a_pool_over_ranks():
    call = steps_call(replace(LONG, lengths=(60, 0, 132))) | {"output_final_state": True}
    hold_pool_over_ranks(call, lambda found, want: assert_close("pool", found, want, oracle.tolerance_of(call)))
