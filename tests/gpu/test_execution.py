"""How calls run: compiled when, captured in CUDA graphs, on several streams, without waiting, under torch.compile."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch
import triton

import flashdelta as fd
from flashdelta.program.workspace import sizes
from flashdelta.runtime.call import check
from flashdelta.testing.cases import BF16, FP32, Case, case_id
from flashdelta.testing.inputs import TOKEN_TENSORS
from flashdelta.testing.oracle import same_bits, truth
from flashdelta.tools.bench.profiling import profiled

from .calls import BOTH, CALLS_TO_A_REPLAY, KIMI, UNBOUNDED, gpu_call, hold, on_streams

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of kernels that Triton compiles, or loads from its disk cache, inside the context."""
    names: list[str] = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda **event: names.append(event["src"].name)
    try:
        yield names
    finally:
        triton.knobs.compilation.listener = before


# ---- compilation ----------------------------------------------------------------------------------------------------

# K = V = 64 is used by no other test in a way that would hide a first compilation.
SMALL = replace(KIMI, K=64, V=64, H=2, HV=2, T=100, state=FP32)


def test_the_counter_counts(backend: str):
    """Head dimensions are compile-time values: two new ones must be seen."""
    fresh = replace(SMALL, K=32, V=256, scale=0.123)
    with compilations() as names:
        fd.chunk_kda(**gpu_call(fd.chunk_kda, fresh, torch.float16, backend))
    assert names


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_compiles_when_only_heads_lengths_or_batch_change(packed: bool, op, backend: str):
    start = replace(SMALL, lengths=(60, 40) if packed else None)
    op(**gpu_call(op, start, BF16, backend))
    if op is fd.fused_recurrent_kda and not packed:  # one token a sequence, of few and of many, is a kind of its own
        for B in (1, 300):
            op(**gpu_call(op, replace(start, T=1, B=B), BF16, backend))
    others = [
        *(replace(start, H=H, HV=HV) for H, HV in ((1, 1), (3, 3), (16, 16), (1, 2), (4, 20))),
        *(replace(start, T=T) for T in (1, 16, 63, 64, 1000)),
        *(replace(start, B=B) for B in (2, 16)),
        *(replace(start, T=1, B=B) for B in (3, 500)),
    ]
    if packed:
        lengths = ((1,), (64,), (1, 1), (0, 5, 0, 900), (16,) * 16)
        others = [*(replace(start, lengths=n) for n in lengths), *(replace(c, B=1) for c in others)]
    with compilations() as names:
        for case in others:
            op(**gpu_call(op, case, BF16, backend))
    assert names == []


@pytest.mark.parametrize("op", BOTH)
def test_warmup_compiles_all_that_calls_need(op, backend: str):
    """Afterwards no call of those kinds compiles: other heads, other lengths, slices of a fused projection."""
    fd.warmup(op, [(64, 128)], backend=backend, state_v_first=True)
    # heads that keep the fused projection's rows a multiple of 16 long
    base = replace(KIMI, K=64, V=128, H=8, HV=16, v_first=True, offsets_dtype=torch.int32)
    with compilations() as names:
        for state in (None, FP32):
            for lengths in (None, (7, 0, 120)):
                for layout in ("dense", "fused"):
                    case = replace(base, state=state, lengths=lengths, layout=layout)
                    op(**gpu_call(op, case, BF16, backend))
        if op is fd.chunk_kda:  # long sequences over few heads are split, or may be
            for lengths in (None, (9000, 10), (400,) * 20):
                op(**gpu_call(op, replace(base, H=4, HV=4, T=9000, lengths=lengths), BF16, backend))
    assert names == []


# ---- no waiting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("lengths", [None, (60, 0, 40)], ids=["fixed", "packed"])
def test_the_host_never_waits_for_the_gpu(lengths, op, backend: str, no_synchronisation):
    call = gpu_call(op, replace(KIMI, lengths=lengths, state=FP32, h=op is fd.chunk_kda), BF16, backend)
    if lengths and op is fd.chunk_kda:
        call["cu_seqlens_cpu"] = call["cu_seqlens"].cpu()
    want = op(**call)
    with no_synchronisation():
        results = op(**call)
    for a, b in zip(results, want):
        assert same_bits(a, b)


def test_the_sync_check_can_fail(no_synchronisation):
    x = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation():
        x.item()


# ---- launches and memory ----------------------------------------------------------------------------------------------

FORWARDS = {
    "fixed": replace(KIMI, H=32, HV=32, T=2048),
    "packed": replace(KIMI, H=16, HV=32, lengths=(1000, 0, 1, 1047), state=FP32, v_first=True),
    "unbounded": replace(UNBOUNDED, H=32, HV=32, lengths=(1500, 500), state=BF16),
    "fused": replace(KIMI, H=32, HV=32, T=2048, layout="fused"),
}


def kernels_of(call: dict) -> list[str]:
    fd.chunk_kda(**call)
    torch.cuda.synchronize()

    def run() -> None:
        fd.chunk_kda(**call)
        torch.cuda.synchronize()

    return [kernel.name for kernel in profiled(run)]


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_is_at_most_two_kernels(name: str, backend: str):
    """No copy of inputs, no conversion, no fill."""
    names = kernels_of(gpu_call(fd.chunk_kda, FORWARDS[name], BF16, backend))
    assert 1 <= len(names) <= 2, names


@pytest.mark.parametrize(("lengths", "split"), [((1024,) * 4, False), ((9000, 10), True)], ids=str)
def test_lengths_on_the_host_leave_out_what_would_plan(lengths: tuple[int, ...], split: bool, backend: str):
    """And change no bit, whatever they were when the call was first seen."""
    call = gpu_call(fd.chunk_kda, replace(KIMI, lengths=lengths), BF16, backend)
    told = call | {"cu_seqlens_cpu": call["cu_seqlens"].cpu()}
    assert len(kernels_of(call)) > 2
    assert (len(kernels_of(told)) > 2) == split
    other = told["cu_seqlens_cpu"].clone()
    other[1:-1] -= 64  # the same kind of call, if the longest is as long in powers of two
    for offsets in (told["cu_seqlens_cpu"], other) * CALLS_TO_A_REPLAY:
        given = {"cu_seqlens": offsets.cuda(), "cu_seqlens_cpu": offsets}
        results = fd.chunk_kda(**call | given)
        wanted = fd.chunk_kda(**call | {"cu_seqlens": offsets.cuda()})
        assert all(same_bits(a, b) for a, b in zip(results, wanted))


@pytest.mark.parametrize("name", FORWARDS)
def test_memory_is_the_results_and_one_workspace(name: str, backend: str):
    call = gpu_call(fd.chunk_kda, FORWARDS[name], BF16, backend)
    problem, _ = check(fd.chunk_kda, **call)
    fd.chunk_kda(**call)  # what it returns is freed, what compilation leaves stays
    torch.cuda.synchronize()

    def requested(kind: str) -> int:
        return torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"]

    workspace = sum(sizes(importlib.import_module(f"flashdelta.{backend}.launch").layout(problem)))
    assert workspace > 2**25
    gc.collect()  # what earlier tests left in cycles must not go meanwhile
    for _ in range(CALLS_TO_A_REPLAY + 1):
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        results = fd.chunk_kda(**call)
        torch.cuda.synchronize()
        kept = sum(x.nbytes for x in results)
        assert requested("current") - before == kept
        # beside them only what is there in place of an absent state
        assert requested("peak") - before <= kept + workspace + 1024
        del results


# ---- repeated calls -------------------------------------------------------------------------------------------------

REPEATED = [
    KIMI,
    replace(UNBOUNDED, name="packed", lengths=(65, 0, 100), state=FP32, v_first=True),
    replace(KIMI, name="no state", final=False),
    replace(KIMI, name="fused", layout="fused", H=8, HV=8, state=BF16),
    replace(KIMI, name="copied", layout="odd_offset"),
]


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("case", REPEATED, ids=case_id)
def test_a_repeated_call_has_its_own_tensors(case: Case, with_out: bool, op, backend: str):
    """What is kept of a call must not be an address, or anything that the tensors hold."""
    kept = []
    for seed in range(CALLS_TO_A_REPLAY + 2):
        call = gpu_call(op, case, BF16, backend, seed)
        out = {"out": torch.full(call["v"].shape, torch.nan, dtype=BF16, device="cuda")} if with_out else {}
        results = op(**call, **out)
        if with_out:
            assert results[0] is out["out"]
        kept.append((call, results))  # so that the next tensors lie elsewhere
    for call, results in kept:
        hold(call, results, truth(call))


def test_a_repeated_call_is_checked_as_the_first(backend: str):
    """Another shape, dtype, stride or device is another call."""
    call = gpu_call(fd.chunk_kda, KIMI, BF16, backend)
    for _ in range(CALLS_TO_A_REPLAY):
        fd.chunk_kda(**call)
    for wrong in ({"beta": call["beta"][:, :-1]}, {"k": call["k"].float()}, {"v": call["v"].cpu()}, {"scale": "1"}):
        with pytest.raises((ValueError, TypeError)):
            fd.chunk_kda(**call | wrong)
    out = torch.empty_like(call["v"])
    for _ in range(CALLS_TO_A_REPLAY):
        fd.chunk_kda(**call, out=out)
    with pytest.raises(ValueError, match="memory shared with v"):
        fd.chunk_kda(**call, out=call["v"])


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------

LAYOUTS = [(300, 100, 0, 112), (0, 0, 512, 0), (1, 2, 3, 4), (128, 128, 128, 128)]


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("model", [KIMI, UNBOUNDED], ids=case_id)
def test_graph_replays_with_other_lengths_and_inputs(model: Case, op, backend: str):
    """Captured once for 4 sequences of 512 tokens in all; `cu_seqlens` changes in place, and may leave tokens over."""

    def fresh(lengths: tuple[int, ...], seed: int) -> dict:
        case = replace(model, lengths=lengths, unused=512 - sum(lengths), state=FP32, v_first=True)
        return gpu_call(op, case, BF16, backend, seed)

    static = fresh(LAYOUTS[0], 0)
    out = torch.full_like(static["v"], torch.nan)
    op(**static, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, state = op(**static, out=out)
    for seed, lengths in enumerate(LAYOUTS, start=1):
        call = fresh(lengths, seed)
        for name in (*TOKEN_TENSORS, "cu_seqlens", "initial_state"):
            static[name].copy_(call[name])
        for parameter in ("A_log", "dt_bias"):
            static[parameter].copy_(call[parameter])
        out.fill_(torch.nan)
        graph.replay()
        want_o, want_state = op(**call)
        tokens = slice(0, sum(lengths))
        assert same_bits(out[:, tokens], want_o[:, tokens])
        assert same_bits(state, want_state)
        hold(call, (want_o, want_state), truth(call))


@pytest.mark.parametrize("model", [KIMI, UNBOUNDED], ids=case_id)
def test_graph_replays_with_other_splits_of_many_sequences(model: Case, backend: str):
    """48 sequences share 3000 tokens, in other ways each time; many are empty."""

    def lengths(seed: int) -> tuple[int, ...]:
        random = Random(seed)
        cuts = sorted(random.choice((0, 1000, 3000, random.randint(0, 3000))) for _ in range(47))
        return tuple(b - a for a, b in itertools.pairwise((0, *cuts, 3000)))

    static = gpu_call(fd.chunk_kda, replace(model, lengths=lengths(0), state=FP32, v_first=True), BF16, backend)
    fd.chunk_kda(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = fd.chunk_kda(**static)
    for seed in range(1, 13):
        static["cu_seqlens"].copy_(torch.tensor([0, *lengths(seed)]).cumsum(0))
        graph.replay()
        want_o, want_state = fd.chunk_kda(**static)
        assert same_bits(o, want_o)
        assert same_bits(state, want_state)


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BOTH)
def test_two_streams_at_once(op, backend: str):
    """Calls that overlap share no scratch memory."""
    cases = [replace(KIMI, H=8, HV=8, T=2000), replace(KIMI, H=8, HV=8, lengths=(700, 900))]
    calls = [functools.partial(op, **gpu_call(op, case, BF16, backend, seed)) for seed, case in enumerate(cases)]
    want = [call() for call in calls]
    found = on_streams(calls)
    for results, (want_o, want_state) in zip(found, want):
        for o, state in results:
            assert same_bits(o, want_o)
            assert same_bits(state, want_state)


# ---- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BOTH)
def test_compiles_in_one_graph_with_inductor(op, backend: str):
    call = gpu_call(op, replace(KIMI, lengths=(90, 110), state=FP32), BF16, backend)

    def layer(arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = op(**arguments)
        return o, state

    torch._dynamo.reset()
    for got, want in zip(torch.compile(layer, fullgraph=True)(call), layer(call)):
        assert same_bits(got, want)


@pytest.mark.parametrize("op", BOTH)
def test_compiles_with_out_with_inductor(op, backend: str):
    call = gpu_call(op, KIMI, BF16, backend)
    want, _ = op(**call)
    out = torch.full_like(want, torch.nan)
    torch._dynamo.reset()
    torch.compile(lambda out, arguments: op(**arguments, out=out), fullgraph=True)(out, call)
    assert same_bits(out, want)
