"""Calls on the GPU: what the tests of this tier share."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import TypeVar
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.autotuner import Autotuner

import flashdelta as fd
from benchmarks.contenders import find
from flashdelta.kernels.hopper import build
from flashdelta.runtime.call import CACHE

from ..support import oracle
from ..support.cases import BF16, BY_NAME, CASES, FP16, FP32, Case
from ..support.gradients import gradients, incoming, relative_errors
from ..support.inputs import make_call, sequence_calls
from ..support.oracle import assert_close, chunked_truth, float64, poisoned_memory, same_bits, truth
from ..support.scalar_decay import expanded, gated_delta_net, scalar_call

R = TypeVar("R")

BOTH = [fd.chunk_kda, fd.fused_recurrent_kda]

KIMI = replace(BY_NAME["bounded"], name="kimi", K=128, V=128, H=4, HV=4, T=200)
"""As Kimi-K3 calls it: bounded gate, L2 norm and beta's sigmoid in the kernel."""

UNBOUNDED = replace(BY_NAME["softplus"], name="unbounded", K=128, V=128, H=4, HV=4, T=200)
"""As Kimi-Linear calls it."""

MODELS = [KIMI, UNBOUNDED]

CALLS_TO_A_REPLAY = 2
"""The second call of a kind replays what the first recorded (`flashdelta.program.cache`)."""


overlapping = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="launches overlap on sm_90"
)


@triton.jit
def write_late(indices, wanted, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Lets the next kernel start at once, and only then works for a while and writes its indices."""
    gdc_wait()
    gdc_launch_dependents()
    i = tl.arange(0, N)
    x = tl.load(wanted + i).to(tl.float32)
    for _ in range(ROUNDS):
        x = tl.sqrt(x * x + 1e-6)
    tl.store(indices + i, (x + 0.5).to(tl.int32))


def check_late(prepare: Callable[[torch.Tensor], Callable[[], list]], wanted: torch.Tensor, before: int) -> None:
    """A kernel that starts early may see what indices were `before` the kernel before it wrote what is wanted; what counts is
    what they are. `prepare`: a call with these indices, on memory of its own, which returns its results."""
    want = prepare(wanted)()
    # of a length that one program writes
    indices = torch.full((64,), before, device="cuda", dtype=wanted.dtype)
    late, given = torch.nn.functional.pad(wanted, (0, 64 - len(wanted))), indices[: len(wanted)]
    for _ in range(CALLS_TO_A_REPLAY):
        indices.copy_(late)
        prepare(given)()
    for _ in range(20):
        indices.fill_(before)
        run = prepare(given)
        write_late[(1,)](indices, late, 64, 2000, num_warps=1, launch_pdl=True)
        assert all(same_bits(x, y) for x, y in zip(run(), want, strict=True))


def in_turn(cases: Iterable, *values: object) -> list[tuple]:
    """Pairs of a case and a value: the values in turn, by default dtypes, as each compiles all kernels anew."""
    return [*zip(cases, itertools.cycle(values or (BF16, FP32, BF16, FP16)))]


def case_and_dtype(x: object) -> str:
    return getattr(x, "name", str(x))


def on_gpu(case: Case) -> Case:
    """The case at the head dimensions of the models, still with K != V."""
    return replace(case, K=128, V=64) if case.K == 32 else case


def check_scalar_decay(case: Case, dtype: torch.dtype, backend: str, device: str = "cuda") -> None:
    """Holds a call with g expanded, and the gradient of g, against Gated DeltaNet's own recurrence."""
    scalar = scalar_call(case, dtype, device) | {"backend": backend}
    call = expanded(scalar)
    hold(call, fd.chunk_kda(**call), gated_delta_net(**float64(scalar)), slack_of(case, call))
    if not case.ill_conditioned:
        found = gradients(scalar, *incoming(call), lambda **x: fd.chunk_kda(**expanded(x)))
        want = gradients(float64(scalar), *incoming(call), gated_delta_net)
        assert relative_errors(found, want)["g"] <= 5 * oracle.tolerance_of(call)


def takes_hopper(case: Case) -> bool:
    return case.chunk_size == 64 and case.V >= 64


HOPPER_CASES = [case for case in map(on_gpu, CASES) if takes_hopper(case) and case.tokens < 1000]


def gpu_call(op, case: Case, dtype: torch.dtype = BF16, backend: str = "triton", seed: int = 0) -> dict:
    call = make_call(case, dtype, "cuda", seed) | {"backend": backend}
    return call if op is fd.chunk_kda else oracle.as_recurrent(call)


def check(op, case: Case, dtype: torch.dtype = BF16, backend: str = "triton") -> None:
    """Holds `o`, the final state and `h` against the truth. `out` and every allocation start as NaN."""
    call = gpu_call(op, case, dtype, backend)
    out = torch.empty_like(call["v"], memory_format=torch.contiguous_format)
    for _ in range(CALLS_TO_A_REPLAY):
        out.fill_(torch.nan)
        with poisoned_memory():
            results = op(**call | {"out": out})
        assert results[0] is out
    want = truth(call) if case.tokens < 300 else chunked_truth(call)
    hold(call, results, want, slack_of(case, call))
    if case.h and op is fd.chunk_kda:
        oracle.check_h(call, results[2], oracle.tolerance_of(call))


def slack_of(case: Case, call: dict) -> tuple[float, float]:
    """Allows an ill-conditioned call more than its tolerance, in `o` and the final state: a kernel rounds in a few more
    places than the exact algorithm does."""
    if not case.ill_conditioned:
        return 0.0, 0.0
    alone = [call] if call.get("cu_seqlens") is None else sequence_calls(call)
    errors = [oracle.rounding_error(one) for one in alone if one["q"].shape[1] > 0]
    return tuple(2 * max(kind) for kind in zip(*errors))


def hold(call: dict, results: tuple, want: tuple, slack: tuple[float, float] = (0.0, 0.0)) -> None:
    tokens, tolerance = oracle.covered_tokens(call), oracle.tolerance_of(call)
    assert_close("o", results[0][:, tokens], want[0][:, tokens], tolerance + slack[0])
    if call["output_final_state"]:
        assert_close("final_state", results[1], want[1], tolerance + oracle.one_rounding(results[1].dtype) + slack[1])
    else:
        assert results[1] is None


def hold_each(call: dict, results: tuple, want: tuple) -> None:
    """As `hold`, for every sequence on its own: a wrong short one can't hide among long ones."""
    for n, (one, length) in enumerate(zip(sequence_calls(call), oracle.lengths_of(call))):
        try:
            hold(one, of_sequence(call, results, n), of_sequence(call, want, n))
        except AssertionError as error:
            raise AssertionError(f"sequence {n} of {length} tokens: {error}") from None


def of_sequence(call: dict, results: tuple, n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`o` and the final state of one sequence of a packed call."""
    begin, end = call["cu_seqlens"][n : n + 2].tolist()
    return results[0][:, begin:end], None if results[1] is None else results[1][n : n + 1]


def assert_same_bits(found: Iterable, want: Iterable, tokens: slice = slice(None)) -> None:
    """All results, of which `o`, the first, counts on these tokens alone."""
    (o, *others), (want_o, *want_others) = found, want
    assert same_bits(o[:, tokens], want_o[:, tokens]), "o"
    for n, (x, y) in enumerate(zip(others, want_others, strict=True), start=1):
        assert same_bits(x, y), f"result {n}"


def peer(name: str) -> Callable:
    """Another library's function, or the test is skipped."""
    function = find(name)
    if isinstance(function, str):
        pytest.skip(function)
    return function


def poisoned(call: dict) -> tuple[torch.Tensor, ...]:
    """The results of `chunk_kda`, with NaN in `out` and in every allocation at first."""
    with poisoned_memory():
        return fd.chunk_kda(**call, out=torch.full_like(call["v"], torch.nan))


@contextlib.contextmanager
def first_configurations() -> Iterator[None]:
    """FLA's kernels run in the first of their configurations, on which their errors don't depend: to choose among them takes
    FLA minutes. No result of a tuning is kept, so that benchmarks on this machine choose for themselves."""
    first = property(lambda self: vars(self)["configs"][:1], lambda self, configs: vars(self).update(configs=configs))
    with mock.patch.object(Autotuner, "configs", first, create=True):
        yield


@contextlib.contextmanager
def nothing_replayed() -> Iterator[None]:
    """No call inside replays what one before it recorded, nor one after it what those inside did."""
    CACHE.clear()
    try:
        yield
    finally:
        CACHE.clear()


@contextlib.contextmanager
def in_steps(steps: bool = True) -> Iterator[mock.Mock]:
    """Calls of `hopper` that can go through their chunks in steps of 32 tokens do, however few heads they have; or none does.
    The mock is called for each that does."""
    with (
        nothing_replayed(),
        mock.patch.object(build, "STEPS_FROM", dict.fromkeys(build.STEPS_FROM, 1 if steps else 1 << 30)),
        mock.patch.object(build, "room", (lambda problem, device: 0) if steps else build.room),
        mock.patch.object(build, "prepare_steps", wraps=build.prepare_steps) as ran,
    ):
        yield ran


@contextlib.contextmanager
def whole_heads() -> Iterator[None]:
    """`commit` has one CTA per head for bfloat16 states, as of many sequences."""
    with nothing_replayed(), mock.patch("flashdelta.kernels.hopper.commit.SLICES_AT_ONCE", 0):
        yield


def joined(parts: Iterable[tuple]) -> tuple[torch.Tensor, torch.Tensor]:
    """`o` and the final states of sequences that were calls of their own, as of one packed call."""
    outputs, states = zip(*parts)
    return torch.cat(outputs, dim=1), torch.cat(states)


def lengths_between(seed: int, count: int, longest: int) -> tuple[int, ...]:
    """`count` random lengths up to `longest`, as many short as long ones; a tenth of them are 0."""
    random = Random(seed)
    return tuple(
        0 if random.random() < 0.1 else round(math.exp(random.uniform(0.0, math.log(longest)))) for _ in range(count)
    )


@contextlib.contextmanager
def nothing_compiles() -> Iterator[None]:
    """Nor is anything loaded from Triton's disk cache."""
    names: list[str] = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda **event: names.append(event["src"].name)
    try:
        yield
    finally:
        triton.knobs.compilation.listener = before
    assert names == []


def captured(run: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
    """A CUDA graph of a call that ran before, and the results that replays write."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def hold_replay(
    run: Callable[[], torch.Tensor], written: list, change: Callable[[], None], covered: slice = slice(None)
) -> None:
    """A graph has the bits of a plain call, in what is returned and `written`, when its tensors have changed in place.
    `covered`: what counts of the second dimension of what is returned."""
    graph, o = captured(run)
    change()
    before = [x.clone(memory_format=torch.preserve_format) for x in written]
    graph.replay()
    found = [x.clone() for x in (o, *written)]
    for x, kept in zip(written, before):
        x.copy_(kept)
    want = run()
    assert same_bits(found[0][:, covered], want[:, covered])
    assert all(same_bits(x, y) for x, y in zip(found[1:], written))
    assert not same_bits(before[0], written[0]) or not same_bits(before[-1], written[-1])


def requested_bytes(run: Callable[[], tuple]) -> tuple[tuple, int, int]:
    """A call's results, and how much more memory is asked for after it and at its peak than before."""

    def requested(kind: str) -> int:
        return torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"]

    gc.collect()  # what earlier tests left in cycles must not go meanwhile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    results = run()
    torch.cuda.synchronize()
    return results, requested("current") - before, requested("peak") - before
