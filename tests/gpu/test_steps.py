"""Checks of other modules, for chunks of 64 tokens, made of `hopper` in steps of 32, which calls of few heads don't take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from flashdelta.kernels.hopper import recurrence

from ..support.cases import BF16, FP32, HARD_CASES, Case
from ..support.decays import KINDS, decays_call
from ..support.oracle import rounding_error, truth
from ..support.pools import CHECKPOINT_POOLS
from . import test_chunk, test_execution, test_pool, test_stream_k
from .calls import BOTH, KIMI, UNBOUNDED, check, hold, in_steps, poisoned

pytestmark = pytest.mark.gpu

CHUNK = BOTH[0]
FORGETFUL = replace(UNBOUNDED, name="forgetful", memory="new")
NARROW = replace(KIMI, name="narrow", K=64)
MODELS = (KIMI, UNBOUNDED, FORGETFUL)
"""Whose chunks take the path of bounded gates, hardly ever leave it, and hardly ever take it."""


def stepping(case: Case) -> bool:
    """Gates that are given are float32, unlike those that the kernel works out."""
    return case.gate != "none" and case.l2norm and not case.h and case.chunk_size == 64


def cases(test: Callable, found: list, case_of: Callable = lambda x: x) -> dict[str, Callable]:
    """The test of those that can take steps, by name."""
    name = f"{test.__module__.rsplit('_')[-1]}: {test.__name__.removeprefix('test_')}"
    return {f"{name}, {x.name}": partial(test, x) for x in found if stepping(case_of(x))}


def checks(what: str, found: list[Case]) -> dict[str, Callable]:
    """Those that can take steps, against the reference."""
    return {f"{what} {n}, {x.name}": partial(check, CHUNK, x, BF16) for n, x in enumerate(found) if stepping(x)}


K_FIRST = replace(test_pool.PREFILL, name="K first", case=replace(test_pool.PREFILL.case, v_first=False))
STATES = [*CHECKPOINT_POOLS[1::6], test_pool.PREFILL, K_FIRST, *test_pool.BUFFER_MODELS[:3]]
CHECKS = {
    **cases(test_chunk.test_packed_with_states, HARD_CASES),
    **checks("both paths", [case for case in test_chunk.BOTH_PATHS + test_chunk.LONG_AND_HARD if case.K == 128]),
    **{f"every tail, {x.name}": partial(test_chunk.test_every_tail, FP32, x) for x in MODELS},
    **checks("layout", [replace(KIMI, B=2, T=130, **test_chunk.LAYOUTS["fused, grouped heads"])]),
    **checks("layout, packed", [replace(KIMI, **test_chunk.BETWEEN, **test_chunk.LAYOUTS["padded rows"])]),
    **checks("dims", [replace(KIMI, **dims) for dims in test_chunk.OTHER_DIMS]),
    **{f"every tail, K 64, {x}": partial(test_chunk.test_every_tail, x, NARROW) for x in (None, FP32)},
    "packed bits, K 64": partial(test_chunk.test_a_packed_sequences_bits_are_its_own, NARROW, CHUNK),
    **cases(test_pool.test_chunk_bf16, STATES, lambda x: x.case),
    **{
        f"packed bits, {x.name}": partial(test_chunk.test_a_packed_sequences_bits_are_its_own, x, CHUNK) for x in MODELS
    },
    "bits of rows": partial(test_chunk.test_a_batch_rows_bits_are_its_own, KIMI, CHUNK),
    **{
        f"graph, {kind.name}": partial(test_execution.test_graph_replays_with_other_tensors, kind)
        for kind in test_execution.GRAPHS
        if kind.name.startswith(("chunk_kda kimi", "chunk_kda unbounded", "chunk_kda prefill"))
    },
}


@pytest.mark.parametrize("name", CHECKS)
def test_steps(name: str, other_backend: str):
    with in_steps() as ran:
        CHECKS[name](backend=other_backend)
    assert ran.called


@pytest.mark.parametrize("kind", KINDS)
def test_decays(kind: str, other_backend: str):
    call = decays_call(kind, 192, 2, "cuda")
    slack = tuple(2 * x for x in rounding_error(call)) if "one key" in kind else (0.0, 0.0)
    with in_steps() as ran:
        hold(call, poisoned(call), truth(call), slack)
    assert ran.called


STREAM_K = {
    **cases(test_stream_k.test_split_tiles_change_no_bit, [case for case in test_stream_k.CASES if case.K == 128]),
    "pool, K first": partial(test_stream_k.test_split_tiles_of_a_pool, False, FP32),
    "pool, V first": partial(test_stream_k.test_split_tiles_of_a_pool, True, FP32),
    "graph": test_stream_k.test_a_graph_splits_anew_at_every_replay,
}


@pytest.mark.parametrize("name", STREAM_K)
def test_stream_k_in_steps(name: str, other_backend: str):
    with in_steps() as ran, mock.patch.object(recurrence, "stream_k_pays", lambda problem, ctas: True):
        STREAM_K[name](other_backend=other_backend)
    assert ran.called
