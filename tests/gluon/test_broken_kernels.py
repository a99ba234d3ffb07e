"""Kernels that are broken on purpose, in one place at a time: each kind of fault that the interpreter tells is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
from triton.runtime.jit import JITFunction

from flashdelta.kernels.hopper import fused_decode, intra, prepare, recurrence, wy
from flashdelta.kernels.hopper.device import layouts, pipeline, tma

from ..gpu.calls import KIMI
from ..support.cases import FP32
from ..support.wy import WyCase
from . import test_backward, test_chunk, test_fused
from .interpreter import hopper_on_cpu, interpreted

pytestmark = pytest.mark.slow

LONG = replace(KIMI, H=1, HV=1, T=330, memory="long")
PACKED = replace(LONG, lengths=(130, 0, 64, 70), state=FP32)


def prefill() -> None:
    test_chunk.check(LONG)


def packed() -> None:
    test_chunk.check(PACKED)


def stream_k() -> None:
    with hopper_on_cpu(sms=2, last_first=True), mock.patch.object(recurrence, "stream_k_pays", lambda *_: True):
        test_chunk.check(replace(PACKED, V=64, lengths=(200, 0, 520)), split=False)


def gradients() -> None:
    test_backward.check(PACKED, "hopper")


def persistent_wy() -> None:
    with hopper_on_cpu(sms=2):
        test_backward.check_hopper_wy(WyCase("persistent", "", K=128, V=128, B=2, T=150, H=1, HV=2, log2=True))


def late() -> None:
    test_fused.test_an_index_that_the_kernel_before_writes_late(1, 0)


@dataclass(frozen=True)
class Break:
    """The first place of `function` that reads `old` reads `new`, which `run` finds."""

    name: str
    function: JITFunction
    old: str
    new: str
    run: Callable[[], None]


WAIT_FULL = "mbarrier.wait(self.full.index(stage), (iteration // self.STAGES) & 1)"
WAIT_EMPTY = "mbarrier.wait(self.empty.index(stage), (iteration // self.STAGES) & 1 ^ 1)"
ARRIVE = "mbarrier.arrive(self.empty.index(stage), count=1)"
OVERWRITE = "replace_decays(last_rows); i, s = opaque"

# fmt: off
FAULTS = [
    Break("a row too many is copied", prepare.copy_pair, "inside = token <", "inside = token <=", prefill),
    Break("a row too many is fetched", recurrence.load, "row < (stop", "row <= (stop", packed),
    Break("a row too many is stored", layouts.store_transposed, "row < count", "row <= count", packed),
    Break("a stage is read before it is full", pipeline.Ring.wait, WAIT_FULL, "pass", prefill),
    Break("a stage is filled before it is empty", pipeline.Ring.acquire, WAIT_EMPTY, "pass", prefill),
    Break("the other phase", pipeline.Ring.wait, "& 1)", "& 1 ^ 1)", prefill),
    Break("no stage is released", pipeline.Ring.release, ARRIVE, "pass", prefill),
    Break("too few MMAs are waited for", recurrence.compute, "wait(KH if OUTPUT", "wait(KH + 2 if OUTPUT", prefill),
    Break("a copy is read too early", prepare.prepare_kernel, "copy.wait_group(1)", "copy.wait_group(2)", prefill),
    Break("no fence", prepare.bounded_pairs, "fence_async_shared()", "pass", prefill),
    Break("a state is taken before it is there", recurrence.compute, "wait(semaphore - SLICES)", "pass", stream_k),
    Break("a state is passed on in silence", recurrence.compute, "signal(semaphore)", "pass", stream_k),
    Break("semaphores are not cleared", prepare.prepare_kernel, "if tile == 0", "if tile == -1", stream_k),
    Break("a store is not waited for", wy.wy_kernel, "tma.store_wait(0)", "pass", persistent_wy),
    Break("a store is not fenced", tma.tma_store, "fence_async_shared()", "pass", persistent_wy),
    Break("an operand is not waited for", wy.wy_kernel, "wait_tiles(outputs, phase)", "pass", persistent_wy),
    Break("a place is overwritten too early", intra.bounded_pairs, "i, s = opaque", OVERWRITE, gradients),
    Break("an index that comes late is not looked at", fused_decode.fused_decode_kernel,
          "(slot != guess) | (live != guessed)", "slot < 0", late),
]
# fmt: on


@pytest.fixture
def broken(fault: Break) -> Iterator[None]:
    source, function = "".join(fault.function.raw_src), interpreted(fault.function)
    assert fault.old in source
    before = function.__dict__.pop("python", None)
    with mock.patch.object(fault.function, "raw_src", [source.replace(fault.old, fault.new, 1)]):
        yield
    function.__dict__.pop("python", None)
    if before is not None:
        function.__dict__["python"] = before


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_is_found(fault: Break):
    with pytest.raises(AssertionError):
        fault.run()


@pytest.mark.parametrize("run", {fault.run: None for fault in FAULTS}, ids=lambda run: run.__name__)
def test_unbroken_kernels_pass(run: Callable[[], None]):
    run()
