"""How time is measured, for every benchmark.

Speed is a ratio within one run: contenders get the same inputs and take turns, each round starting with another one, and the
median of each is reported. There are two such times.

Cold: every sample starts on an idle device with a cold L2. The device is synchronised, a buffer larger than L2 is overwritten,
and the call is enclosed by two events. The overwrite takes some tens of microseconds, in which the host may run ahead; host
time beyond that counts, as it does for the user. `capture` shows the same call without host time.

Sustained: calls back to back on warm caches, `SUSTAINED_MS` a contender at a time. A GPU under load lowers its clocks, which
nobody here touches. Between turns they drift by a few per cent; what is to be told apart more finely takes turns call by call.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

Run = Callable[[], object]
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of `samples` calls."""

    median: float
    min: float
    p90: float
    samples: int

    @staticmethod
    def of(samples: list[float]) -> Timing:
        ordered = sorted(samples)
        p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
        return Timing(statistics.median(ordered), ordered[0], p90, len(ordered))

    def over(self, launches: int) -> Timing:
        """Of one of so many launches in a sample."""
        return replace(self, median=self.median / launches, min=self.min / launches, p90=self.p90 / launches)


class Timer:
    """Times with CUDA events on the current stream of `device`."""

    MIN_FLUSH_BYTES = 256 * 2**20

    def __init__(self, device: torch.device):
        self.device = device
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(2 * l2, self.MIN_FLUSH_BYTES), dtype=torch.int8, device=device)

    def __call__(self, run: Run) -> float:
        """Milliseconds of one call, from an idle device with cold caches."""
        torch.cuda.synchronize(self.device)
        self._flush.zero_()
        return self.span(run, 1)

    def span(self, run: Run, calls: int) -> float:
        """Milliseconds of so many calls back to back."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def laps(self, runs: Sequence[Run]) -> list[float]:
        """Milliseconds of each of these calls, back to back."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
        events[0].record()
        for run, event in zip(runs, events[1:]):
            run()
            event.record()
        events[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Seconds by what they were spent on, each lap from the end of the one before."""

    def __init__(self, device: torch.device):
        self.device, self.seconds, self.since = device, dict[str, float](), time.perf_counter()

    def lap(self, name: str) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name], self.since = now - self.since, now


def to_the_millisecond(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(x, 3) for name, x in seconds.items()}


def second_result(call: Callable[[], tuple[Tensor, ...]], device: torch.device) -> tuple[tuple[Tensor, ...], float]:
    """Calls twice. The results of the second call, for which the allocator hands out the memory of the first one's, full of
    NaN, so that an element that is left unwritten shows; and the seconds of the first."""
    began = time.perf_counter()
    first = [*call()]
    synchronize(device)
    seconds = time.perf_counter() - began
    while first:
        first.pop().fill_(torch.nan)
    results = call()
    synchronize(device)
    return results, seconds


@dataclass(frozen=True)
class Effort:
    """How long to measure: at most `rounds` samples a contender and about `budget_ms` altogether, but at least
    `min_rounds`; before that, `warmup_ms` of calls of each, which also brings the clocks up."""

    rounds: int = 100
    min_rounds: int = 11
    budget_ms: float = 2000.0
    warmup_ms: float = 50.0


DEFAULT_EFFORT = Effort()
CEILING_EFFORT = Effort(rounds=20)


def take_turns(contenders: Mapping[T, Run], timer: Timer, effort: Effort = DEFAULT_EFFORT) -> dict[T, Timing]:
    """Times all contenders cold, in interleaved rounds.

    Each contender must have been called once already, so that no compilation is timed.
    """
    estimate = sum(_warm_up(run, timer, effort.warmup_ms) for run in contenders.values())
    rounds = max(min(effort.rounds, int(effort.budget_ms / max(estimate, 1e-3))), min(effort.min_rounds, effort.rounds))
    samples: dict[T, list[float]] = {name: [] for name in contenders}
    for name in _turns(contenders, rounds):
        samples[name].append(timer(contenders[name]))
    return {name: Timing.of(taken) for name, taken in samples.items()}


def _turns(names: Iterable[T], rounds: int) -> Iterator[T]:
    """All names, `rounds` times, each round starting with another one."""
    order = list(names)
    for i in range(rounds if order else 0):
        first = i % len(order)
        yield from order[first:] + order[:first]


SUSTAINED_MS, SUSTAINED_ROUNDS = 60.0, 3
"""How long a contender runs at a time, and how often it gets its turn."""


def sustained(contenders: Mapping[T, Run], timer: Timer, turn_ms: float = SUSTAINED_MS) -> dict[T, float]:
    """Milliseconds of a call amid others like it: the median of the rounds. The first half of a turn is not counted: clocks are
    still those of the contender before."""
    counts = {}
    for name, run in contenders.items():
        counts[name] = max(round(turn_ms / max(timer.span(run, 3) / 3, 1e-3)), 3)
    found: dict[T, list[float]] = {name: [] for name in contenders}
    for name in _turns(contenders, SUSTAINED_ROUNDS):
        timer.span(contenders[name], counts[name])
        found[name].append(timer.span(contenders[name], counts[name]) / counts[name])
    return {name: statistics.median(taken) for name, taken in found.items()}


def times_as_long(run: Run, other: Run, timer: Timer, ms: float = 10 * SUSTAINED_MS) -> float:
    """How many times as long the one takes as the other: the median over pairs of calls, back to back, so that both have the
    same clocks. The first half is not counted, as in `sustained`."""
    pairs = max(round(ms / max(timer.span(run, 3) / 3 + timer.span(other, 3) / 3, 1e-3)), 3)
    laps = timer.laps([run, other] * pairs)
    counted = slice(2 * (pairs // 2), None)
    return statistics.median(a / b for a, b in zip(laps[counted][::2], laps[counted][1::2]))


def _warm_up(run: Run, timer: Timer, duration_ms: float) -> float:
    """Calls until `duration_ms` have been spent (3 to 50 calls); returns the median of a call."""
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < duration_ms and len(taken) < 50):
        taken.append(timer(run))
    return statistics.median(taken)


def capture(run: Callable[[], tuple]) -> tuple[Run, tuple]:
    """Captures `run` in a CUDA graph; returns its replay and the tensors each replay writes.

    Raises:
        RuntimeError: `run` does something that can't be captured (a host synchronisation, say).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph.replay, results


GRAPH_MS = 2.0
"""What a graph of many calls lasts, about: beside it the gap between two graphs hardly counts."""


def many_in_a_graph(call: Callable[[], object], ms: float) -> tuple[Run, int]:
    """The replay of a CUDA graph of many calls of about `ms` each, and how many."""
    count = min(max(round(GRAPH_MS / max(ms, 1e-4)), 1), 500)

    def calls() -> tuple:
        for _ in range(count):  # results that nobody keeps share their memory
            call()
        return ()

    return capture(calls)[0], count


def host_us(call: Run, device: torch.device, calls: int) -> float:
    """Of an eager call, the least of several means."""
    found = []
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) / calls * 1e6)
    synchronize(device)
    return min(found)


def ceilings(device: torch.device, timer: Timer) -> dict[str, float]:
    """What the device can do: a large copy (bytes read plus written), and a square bf16 product."""
    return {"copy_tb_s": copy_tb_s(device, timer), "gemm_tflop_s": gemm_tflop_s(device, timer)}


def float32_ceilings(device: torch.device, timer: Timer) -> dict[str, float]:
    """The same with products of float32 matrices, in TF32 and in float32."""
    found = {"copy_tb_s": copy_tb_s(device, timer)}
    before = torch.get_float32_matmul_precision()
    for name, allowed in (("tf32_tflop_s", "high"), ("fp32_tflop_s", "highest")):
        torch.set_float32_matmul_precision(allowed)
        found[name] = gemm_tflop_s(device, timer, dtype=torch.float32)
    torch.set_float32_matmul_precision(before)
    return found


def copy_tb_s(device: torch.device, timer: Timer, size: int = 2**31, effort: Effort = CEILING_EFFORT) -> float:
    """Of `size` bytes copied within the device: read plus written."""
    source = torch.randint(-128, 128, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    ms = take_turns({"copy": lambda: target.copy_(source)}, timer, effort)["copy"].median
    return 2 * size / ms / 1e9


def gemm_tflop_s(
    device: torch.device,
    timer: Timer,
    size: int = 8192,
    effort: Effort = CEILING_EFFORT,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Of a product of two square matrices of `size` rows."""
    # random data: a product of zeros draws less power and so runs faster
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    ms = take_turns({"gemm": lambda: torch.mm(a, b, out=c)}, timer, effort)["gemm"].median
    return 2 * size**3 / ms / 1e9


def peak_above(run: Run, device: torch.device) -> int | None:
    """Bytes that `run` allocates at its peak beyond what was there before; None where the device does not count them."""
    if device.type != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def summarize(error: Exception) -> str:
    """An exception in one line of a document."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
