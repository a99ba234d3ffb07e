"""How calls of any operation run: without waiting, captured in CUDA graphs, under torch.compile, on several streams; and of
`chunk_kda` and `fused_recurrent_kda` when kernels are compiled, how many are launched, and how much memory is taken."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch

import flashdelta as fd
from benchmarks.timing import profiled
from flashdelta.kernels.hopper import launch as hopper
from flashdelta.kernels.stages import launch as portable
from flashdelta.problem.operations import PRECISIONS
from flashdelta.program.workspace import sizes
from flashdelta.runtime.call import check
from tests.support import prefills

from ..support.cases import BF16, FP32, Case, case_id
from ..support.decoding import Step, memory_of
from ..support.decoding_checks import output_of
from ..support.fused import FusedStep
from ..support.layer import CONVOLUTION_BY_NAME, ConvolutionCase
from ..support.oracle import covered_tokens, same_bits
from ..support.pools import PoolCase
from ..support.rows import call_of
from ..support.wy import WyCase
from . import calls
from .calls import KIMI, MODELS, assert_same_bits, captured, gpu_call
from .test_decode import MODELS as STEPS
from .test_fused import BY_NAME as FUSED_BY_NAME
from .test_pool import BUFFER_MODELS as BUFFERS
from .test_pool import PREFILL
from .test_prefill import REPEATED as PREFILLS
from .test_split import CASES as SPLIT_CASES
from .test_split import FEW_HEADS, PLANNED
from .test_wy import CASES as WY_CASES
from .test_wy import MODEL as WY
from .test_wy import PACKED as WY_PACKED

pytestmark = pytest.mark.gpu

FUSED = [FUSED_BY_NAME[name] for name in ("heads_12", "gva8_model", "many", "heads_12_bf16")]
LAYOUTS = [(300, 100, 0, 112), (0, 0, 512, 0), (1, 2, 3, 4), (128, 128, 128, 128)]


@dataclass(frozen=True)
class Kind:
    """Calls of one kind, which differ in what their tensors hold. `out`: the argument that the output goes to, "" for none."""

    name: str
    op: Callable
    cases: tuple
    out: str = ""
    options: dict = field(default_factory=dict)

    def call(self, backend: str, number: int = 0) -> dict:
        case = self.cases[number % len(self.cases)]
        call = call_of(self.op, case, BF16, "cuda", number) | self.options | {"backend": backend}
        if self.options.get("cu_seqlens_cpu"):
            call["cu_seqlens_cpu"] = call["cu_seqlens"].cpu()
        return call | ({self.out: output_of(getattr(case, "case", case), BF16, "cuda")} if self.out else {})

    def run(self, call: dict) -> tuple:
        found = self.op(**call)
        return found if isinstance(found, tuple) else (found,)


def memories(call: dict) -> list[torch.Tensor]:
    """Memory of all tensors of a call, the pools that it writes among them, but for `out`."""
    return [memory_of(x) for name, x in call.items() if isinstance(x, torch.Tensor) and name not in ("out", "output")]


def assert_same_memories(found: dict, want: dict) -> None:
    assert all(same_bits(x, y) for x, y in zip(memories(found), memories(want), strict=True))


def kinds(name: str, *cases: Any, ops: Iterable[Callable] = calls.BOTH, out: str = "", **options: object) -> list[Kind]:
    return [Kind(f"{op.__name__} {name or cases[0].name}", op, cases, out, options) for op in ops]


chunked, prefill = (functools.partial(kinds, ops=[op]) for op in (fd.chunk_kda, fd.kda_prefill))


def decoding(*steps: Step, out: str = "") -> list[Kind]:
    op = fd.fused_kda_decode if isinstance(steps[0], FusedStep) else fd.recurrent_kda
    return kinds("", *steps, ops=[op], out=out)


def wy(case: WyCase) -> list[Kind]:
    return kinds("", case, ops=[fd.kernels.chunk_bwd_wy_dqkg])


def fused(step: FusedStep) -> list[Kind]:
    return decoding(step, replace(step, indices=(-1, *step.indices[:0:-1])))


def convolution(case: ConvolutionCase) -> list[Kind]:
    return kinds("", case, replace(case, name="other", indices=case.indices[::-1]), ops=[fd.short_convolution])


def each(make: Callable[..., list[Kind]], cases: Iterable) -> list[Kind]:
    return [kind for case in cases for kind in make(case)]


# ---- no waiting -----------------------------------------------------------------------------------------------------

STATES = replace(KIMI, state=FP32)
SPLIT = [
    *chunked("split as planned", *(replace(FEW_HEADS, lengths=lengths) for lengths in PLANNED)),
    *chunked("split in 4", *(replace(STATES, lengths=(n, 999 - n, 0, 0)) for n in (127, 0, 333, 999)), split=4),
]
UNWATCHED = [
    *kinds("fixed", replace(STATES, h=True)),
    *chunked("packed, offsets on the host", replace(STATES, h=True, lengths=(60, 0, 40)), cu_seqlens_cpu=True),
    *each(decoding, STEPS),
    *wy(WY_PACKED),
]
"""Work that is not captured below: in a graph nothing can wait."""


@pytest.mark.parametrize("kind", UNWATCHED, ids=case_id)
def test_the_host_never_waits_for_the_gpu(kind: Kind, backend: str):
    first, again = kind.call(backend), kind.call(backend)
    want = kind.run(first)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = kind.run(again)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(results, want)


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


def sharing(model: Case, *layouts: tuple[int, ...]) -> list[Case]:
    """Packed calls of as many tokens, some of which no sequence has."""
    most = max(sum(lengths) for lengths in layouts)
    return [
        replace(model, lengths=lengths, unused=most - sum(lengths), state=FP32, v_first=True) for lengths in layouts
    ]


def many_lengths(seed: int) -> tuple[int, ...]:
    """48 sequences that share 3000 tokens; many are empty."""
    random = Random(seed)
    cuts = sorted(random.choice((0, 1000, 3000, random.randint(0, 3000))) for _ in range(47))
    return tuple(b - a for a, b in itertools.pairwise((0, *cuts, 3000)))


SLOTS = [
    ((0, 1, 2, 3), (True,) * 4, ((64, 128), (16, 0), (0, 0), (0, 112))),
    ((-1, 5, 6, 0), (False,) * 4, ((0, 0), (0, 0), (512, 0), (0, 0))),
    ((6, -1, 2, 9), (True, False, True, True), ((0, 0),) * 4),
    ((3, 2, 1, 0), (False, True, False, True), ((16, 32), (48, 64), (80, 96), (112, 0))),
]
CHECKPOINTS = ((10, 11), (12, 13), (14, 15), (16, 17))


def with_slots(cases: list[Case]) -> list[PoolCase]:
    return [
        replace(PREFILL, case=case, indices=indices, flags=flags, marks=marks, mark_rows=CHECKPOINTS, slots=18)
        for case, (indices, flags, marks) in zip(cases, SLOTS)
    ]


def with_other_slots(step: Step) -> list[Step]:
    lengths = None if step.lengths is None else (1, 0, 2, 1, 1)
    slots = ((-1, -1, -1, -1, -1), (3, 12, -1, 1, 8), (4, 3, 2, 1, 0), step.indices)
    return [step, *(replace(step, indices=indices, lengths=lengths) for indices in slots)]


OTHER_LENGTHS = replace(BUFFERS[0].case, lengths=(70, 130, 0, 131, 64))
OTHER_MARKS = ((16, 64), (128, 0), (16, 0), (0, 128), (64, 1000))
OTHER_ROWS = ((0, 5), (4, 0), (1, 0), (0, 3), (-1, 2))
GRAPHS = [
    *chunked("", BUFFERS[0], replace(BUFFERS[0], case=OTHER_LENGTHS, marks=OTHER_MARKS, mark_rows=OTHER_ROWS)),
    *chunked("", BUFFERS[1], replace(BUFFERS[1], case=OTHER_LENGTHS)),
    *each(fused, FUSED),
    *each(lambda model: kinds(model.name, *sharing(model, *LAYOUTS), out="out"), MODELS),
    *each(lambda model: chunked(f"{model.name}, 48 sequences", *sharing(model, *map(many_lengths, range(13)))), MODELS),
    *each(lambda model: kinds(f"{model.name}, pool", *with_slots(sharing(model, *LAYOUTS)), out="out"), MODELS),
    *each(
        lambda step: decoding(*with_other_slots(step), out="output"),
        (STEPS[0], STEPS[1], STEPS[4], replace(STEPS[0], name="packed", lengths=(1, 1, 1, 1, 1))),
    ),
    *prefill("", prefills.PLAIN, prefills.PLAIN),
    *prefill("", PREFILLS[0], PREFILLS[0]),
    *wy(WY),
    *SPLIT,
    *each(convolution, [CONVOLUTION_BY_NAME[name] for name in ("pool", "step")]),
]


@pytest.mark.parametrize("kind", GRAPHS, ids=case_id)
def test_graph_replays_with_other_tensors(kind: Kind, backend: str):
    """One graph: lengths, slots, data and the pool change in place, and tokens may be left over."""
    static = kind.call(backend)
    graph, results = captured(lambda: kind.run(static))
    for number in range(1, len(kind.cases) + 1):
        call = kind.call(backend, number)
        for memory, x in zip(memories(static), memories(call), strict=True):
            memory.copy_(x)
        for x in filter(torch.is_tensor, results):
            x.fill_(torch.nan)
        graph.replay()
        want = kind.run(call)
        assert_same_bits(results, want, covered_tokens(call))
        assert_same_memories(static, call)


# ---- torch.compile --------------------------------------------------------------------------------------------------

COMPILED = [
    *kinds("packed", replace(KIMI, lengths=(90, 110), state=FP32)),
    *kinds("pool, out", PREFILL, out="out"),
    *chunked("", BUFFERS[0]),
    *each(decoding, (STEPS[0], STEPS[-2], STEPS[-1])),
    *prefill("", prefills.LOGITS),
]


@pytest.mark.parametrize("kind", COMPILED, ids=case_id)
def test_compiles_in_one_graph_with_inductor(kind: Kind, backend: str):
    torch._dynamo.reset()
    op = kind.op
    compiled = torch.compile(lambda arguments: op(**arguments), fullgraph=True)
    for number in range(calls.CALLS_TO_A_REPLAY):
        call, other = (kind.call(backend, number) for _ in range(2))
        want = op(**other)
        assert_same_bits(compiled(call), want)
        assert_same_memories(call, other)
        assert "out" not in call or same_bits(call["out"], want[0])


# ---- again, and at once ---------------------------------------------------------------------------------------------

UNEVEN = {"H": 8, "HV": 16, "lengths": (500, 3, 0, 700, 65, 64, 1), "state": FP32, "v_first": True}
STEADY = [
    *each(lambda model: kinds(model.name, replace(model, **UNEVEN)), MODELS),
    *chunked("split in 5", SPLIT_CASES[0], split=5),
    *each(wy, WY_CASES[:5]),
    *each(lambda precision: prefill(precision, PREFILLS[-1], precision=precision), PRECISIONS),
]


@pytest.mark.parametrize("kind", STEADY, ids=case_id)
def test_a_hundred_calls_give_the_same_bits(kind: Kind, backend: str):
    """The second half while another stream keeps the device busy, so that CTAs run in another order."""
    call = kind.call(backend)
    want = kind.run(call)
    noise, beside = torch.randn(4096, 4096, device="cuda", dtype=BF16), torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    for repeat in range(100):
        if repeat >= 50:
            with torch.cuda.stream(beside):
                for _ in range(4):
                    torch.mm(noise, noise)
                    noise.clone()
        assert_same_bits(kind.run(call), want)
    torch.cuda.synchronize()


# ---- compilation ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_warmup_compiles_all_that_calls_need(backend: str):
    """Afterwards no call of those kinds compiles: other heads, other lengths, slices of a fused projection. On any machine
    `tests/unit/test_hopper_choice.py` holds that of more operators and options."""
    fd.warmup(fd.chunk_kda, [(64, 128)], backend=backend, state_v_first=True)
    # heads that keep the fused projection's rows a multiple of 16 long
    base = replace(KIMI, K=64, V=128, H=8, HV=16, v_first=True, offsets_dtype=torch.int32)
    with calls.nothing_compiles():
        for state, lengths, layout in itertools.product((None, FP32), (None, (7, 0, 120)), ("dense", "fused")):
            case = replace(base, state=state, lengths=lengths, layout=layout)
            fd.chunk_kda(**gpu_call(fd.chunk_kda, case, BF16, backend))
        for lengths in (None, (9000, 10), (400,) * 20):  # long sequences over few heads are split, or may be
            call = gpu_call(fd.chunk_kda, replace(base, H=4, HV=4, T=9000, lengths=lengths), BF16, backend)
            for options in ({}, {"batch_invariant": True}, {"split": 3}):
                fd.chunk_kda(**call | options)


# ---- launches and memory ----------------------------------------------------------------------------------------------

FORWARDS = {
    "fixed": replace(KIMI, H=32, HV=32, T=2048),
    "packed": replace(KIMI, H=16, HV=32, lengths=(1000, 0, 1, 1047), state=FP32, v_first=True),
    "fused": replace(KIMI, H=32, HV=32, T=2048, layout="fused"),
}


def kernels_of(call: dict) -> list[str]:
    def run() -> None:
        fd.chunk_kda(**call)
        torch.cuda.synchronize()

    run()
    return [name for name, _ in profiled(run)]


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
    for offsets in (told["cu_seqlens_cpu"], other) * calls.CALLS_TO_A_REPLAY:
        given = {"cu_seqlens": offsets.cuda(), "cu_seqlens_cpu": offsets}
        want = fd.chunk_kda(**call | {"cu_seqlens": offsets.cuda()})
        assert_same_bits(fd.chunk_kda(**call | given), want)


@pytest.mark.parametrize("name", FORWARDS)
def test_memory_is_the_results_and_one_workspace(name: str, backend: str):
    call = gpu_call(fd.chunk_kda, FORWARDS[name], BF16, backend)
    problem, _ = check(fd.chunk_kda, **call)
    fd.chunk_kda(**call)  # what it returns is freed, what compilation leaves stays
    workspace = sum(sizes(hopper.layout(problem, {}, False) if backend == "hopper" else portable.layout(problem)))
    assert workspace > 2**25
    for _ in range(calls.CALLS_TO_A_REPLAY + 1):
        results, kept, peak = calls.requested_bytes(lambda: fd.chunk_kda(**call))
        assert kept == sum(x.nbytes for x in results)
        # beside them only what is there in place of an absent state
        assert peak <= kept + workspace + 1024
        del results
