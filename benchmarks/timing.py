"""Three ways to time a call, for every benchmark.

Contenders get the same inputs and take turns in one process, each round starting with another one; the median is reported.

* Cold: the GPU is idle and its L2 overwritten before each call. Host time that the overwrite does not hide counts.
* Sustained: calls back to back on warm caches. A GPU under load lowers its clocks, which nobody here touches, so the first half
  of a turn is not counted.
* By CUDA graph: either of these, by replaying the captured call, without host time.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from flashdelta.tools.devices import capture, synchronize

Run = Callable[[], object]
T = TypeVar("T", bound=Hashable)

WARMUP_MS, BUDGET_MS, MIN_ROUNDS = 50.0, 2000.0, 5
"""Before cold samples, each contender runs for `WARMUP_MS`. All samples of a row take about `BUDGET_MS`."""

TURN_MS, TURNS = 60.0, 3
"""Length and number of a contender's sustained turns. An uncounted stretch of the same length precedes each."""

GRAPH_MS = 2.0
"""Length of a graph of many calls; beside it the gap between two graphs hardly counts."""


class Timer:
    """A clock of CUDA events on the current stream."""

    def __init__(self, device: torch.device):
        self.device = device
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(2 * l2, 2**28), dtype=torch.int8, device=device)

    def __call__(self, run: Run) -> float:
        """Milliseconds of one cold call."""
        torch.cuda.synchronize(self.device)
        self._flush.zero_()
        return self.span(run, 1)

    def span(self, run: Run, calls: int) -> float:
        """Milliseconds of `calls` calls back to back."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def turns(names: Iterable[T], rounds: int) -> Iterator[T]:
    """All names `rounds` times, each round starting with another one."""
    order = list(names)
    for i in range(rounds if order else 0):
        yield from order[i % len(order) :] + order[: i % len(order)]


def cold(runs: Mapping[T, Run], timer: Callable[[Run], float], rounds: int) -> dict[T, float]:
    """Median milliseconds of cold calls: at most `rounds` samples each. Compile before."""
    estimate = sum(_warm_up(run, timer) for run in runs.values())
    rounds = max(min(rounds, int(BUDGET_MS / max(estimate, 1e-3))), min(MIN_ROUNDS, rounds))
    samples = defaultdict(list)
    for name in turns(runs, rounds):
        samples[name].append(timer(runs[name]))
    return {name: statistics.median(taken) for name, taken in samples.items()}


def _warm_up(run: Run, timer: Callable[[Run], float]) -> float:
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < WARMUP_MS and len(taken) < 50):
        taken.append(timer(run))
    return statistics.median(taken)


def sustained(runs: Mapping[T, Run], timer: Any) -> dict[T, float]:
    """Milliseconds of a call amid others like it: the median of `TURNS` turns."""
    counts = {name: max(round(TURN_MS / max(timer.span(run, 3) / 3, 1e-3)), 3) for name, run in runs.items()}
    taken = defaultdict(list)
    for name in turns(runs, TURNS):
        timer.span(runs[name], counts[name])
        taken[name].append(timer.span(runs[name], counts[name]) / counts[name])
    return {name: statistics.median(found) for name, found in taken.items()}


def many_in_a_graph(call: Run, ms: float) -> tuple[Run, int]:
    """Replay of a CUDA graph of many calls of about `ms` each, and their number."""
    count = min(max(round(GRAPH_MS / max(ms, 1e-4)), 1), 500)

    def calls() -> tuple:
        for _ in range(count):  # results that nobody keeps share their memory
            call()
        return ()

    return capture(calls)[0], count


def host_us(call: Run, device: torch.device, calls: int, rounds: int = 6) -> float:
    """Host microseconds of an eager call: the least mean of all rounds, as what else runs on the host only adds."""
    found = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) / calls * 1e6)
    synchronize(device)
    return min(found)


def ceilings(device: torch.device, timer: Timer) -> dict[str, float]:
    """Rates of the GPU: a copy of 2 GiB (bytes read plus written), and a bf16 product of 8192 x 8192 matrices."""
    source = torch.randint(-128, 128, (2**31,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    # random data: a product of zeros draws less power and so runs faster
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    ms = cold({"copy": lambda: target.copy_(source), "gemm": lambda: torch.mm(a, b)}, timer, 20)
    return {"copy_tb_s": 2 * 2**31 / ms["copy"] / 1e9, "gemm_tflop_s": 2 * 8192**3 / ms["gemm"] / 1e9}


def peak_above(run: Run, device: torch.device) -> int | None:
    """Peak bytes that `run` allocates beyond those before it; None where the device does not count them."""
    if device.type != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


# ---- kernels -----------------------------------------------------------------------------------------------------------


def profiled(run: Run) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel that `run` launches, in order; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    with tempfile.TemporaryDirectory(prefix="flashdelta-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [x for x in json.loads(path.read_text())["traceEvents"] if x.get("cat") == "kernel"]
    return [(event["name"], event["dur"]) for event in sorted(events, key=lambda event: event["ts"])]


def cold_kernels(call: Run, timer: Callable[[Run], float], calls: int, launches: int) -> list[dict]:
    """Times of the kernels of a launch, from cold calls of so many launches each, without what the timer itself launches."""
    foreign = {name for name, _ in profiled(lambda: timer(lambda: None))}
    found = profiled(lambda: [timer(call) for _ in range(calls)])
    return kernel_times([x for x in found if x[0] not in foreign], calls * launches)


def kernel_times(launched: Iterable[tuple[str, float]], calls: int) -> list[dict]:
    """Milliseconds and launches per call by kernel, the longest first. Names are without what a C++ compiler adds."""
    found = defaultdict(list)
    for name, us in launched:
        found[name.removeprefix("void ").split("<")[0].split("(")[0]].append(us)
    times = [{"kernel": x, "ms": sum(us) / calls / 1e3, "launches": len(us) / calls} for x, us in found.items()]
    return sorted(times, key=lambda kernel: -kernel["ms"])


# ---- tuning of other libraries -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """Compiles all configurations of an autotuned kernel in parallel, before Triton's tuner times one after another."""
    if device.type != "cuda":
        yield
        return
    from triton.runtime.autotuner import Autotuner  # Triton is for Linux only

    timed = Autotuner._bench

    def after_all(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
        configs = tuner.prune_configs(meta)
        if config == configs[0]:  # the first to be timed

            def make(one: Any) -> None:
                with contextlib.suppress(Exception):  # the tuner meets it again and handles it
                    tuner.fn.run(*args, **{**meta, **one.all_kwargs(), "warmup": True})

            with ThreadPoolExecutor(12) as pool:
                list(pool.map(make, configs))
        return timed(tuner, *args, config=config, **meta)

    Autotuner._bench = after_all
    try:
        yield
    finally:
        Autotuner._bench = timed
