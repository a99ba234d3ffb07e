"""The kernels of the forward one by one: GPU time, work against the ceilings, and what a CTA occupies.

Times and launch costs are what the GPU's own profiling interface (CUPTI) records through torch.profiler, so this needs no
word from a backend: a kernel is assigned to its stage by name, the same in every backend, and what a stage must move and
compute follows from its contract.
"""

from __future__ import annotations

import gc
import json
import math
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ...testing.cases import Case
from .timing import Run, Timer


@dataclass(frozen=True)
class StageWork:
    """What a stage must move to and from memory, each byte once, and the operations of its matrix products."""

    bytes: int
    flop: int


def chunk_counts(case: Case) -> list[int]:
    """Chunks of every sequence."""
    return [-(-length // case.chunk_size) for length in case.lengths or (case.T,) * case.B]


def prepare_work(case: Case) -> StageWork:
    """Reads q, k, g and beta in bf16, writes the workspace. A chunk's products: `A` and `Aqk` (`C x C`, over K), `w` (`C x K`,
    over C), and `C^3 / 3` for the inverse of a unit lower triangle."""
    C, K, HV = case.chunk_size, case.K, case.HV
    read = 2 * case.B * case.tokens * (2 * case.H * K + HV * K + HV)
    flop = 3 * 2 * C * C * K + C**3 // 3
    return StageWork(read + _workspace_bytes(case), sum(chunk_counts(case)) * HV * flop)


def recurrence_work(case: Case) -> StageWork:
    """Reads the workspace and v, writes o, both in bf16, and the final state in fp32. A chunk's products: `inverse v` and
    `Aqk v'` (`C x V`, over C), `w S` and `qg S` (`C x V`, over K), `kg^T v'` (`K x V`, over C)."""
    C, K, V, HV = case.chunk_size, case.K, case.V, case.HV
    moved = 2 * 2 * case.B * case.tokens * HV * V + 4 * case.sequences * HV * K * V
    flop = 2 * 2 * C * C * V + 3 * 2 * C * K * V
    return StageWork(_workspace_bytes(case) + moved, sum(chunk_counts(case)) * HV * flop)


def _workspace_bytes(case: Case) -> int:
    """What `prepare` hands to `recurrence`: `w, qg, kg [C, K]`, `inverse, Aqk [C, C]` in bf16 and `decay [K]` in fp32 for every
    chunk of every value head. Full squares, and full tiles where a sequence ends inside a chunk, as the kernels write them."""
    C, K = case.chunk_size, case.K
    return sum(chunk_counts(case)) * case.HV * (2 * (3 * C * K + 2 * C * C) + 4 * K)


STAGES = {"prepare": prepare_work, "recurrence": recurrence_work}
"""By stage. Its kernel is called `<stage>_kernel`, `<stage>_bounded_kernel` or `<stage>_steps_kernel`; a kernel of another name
is timed, and its work unknown."""


@dataclass(frozen=True)
class KernelRun:
    """One execution of a kernel as CUPTI recorded it. `threads` are those of a CTA."""

    name: str
    us: float
    ctas: int
    threads: int
    registers: int
    shared_bytes: int


def kernel_runs(trace: dict) -> list[KernelRun]:
    """The kernels of a trace of torch.profiler (Chrome's format), in the order in which they ran."""
    events = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    return [
        KernelRun(
            name=event["name"],
            us=event["dur"],
            ctas=math.prod(event["args"]["grid"]),
            threads=math.prod(event["args"]["block"]),
            registers=event["args"]["registers per thread"],
            shared_bytes=event["args"]["shared memory"],
        )
        for event in sorted(events, key=lambda event: event["ts"])
    ]


def profiled(run: Run) -> list[KernelRun]:
    """The kernels that `run` launches; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    with tempfile.TemporaryDirectory(prefix="flashdelta-trace-") as folder:
        # only the exported trace has registers and shared memory
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return kernel_runs(json.loads(path.read_text()))


RESERVED_SHARED_BYTES = 1024
"""What the driver takes of every CTA, sm_80 and newer."""


def ctas_per_sm(kernel: KernelRun, device: Any) -> int:
    """CTAs of the kernel that fit at a time, by registers, shared memory and threads (CUDA's occupancy rules); `device` is
    what `torch.cuda.get_device_properties` says."""
    warps = -(-kernel.threads // 32)
    # registers come in units of 256 a warp, and an equal share of them belongs to each of the four schedulers
    warp_registers = -(-kernel.registers * 32 // 256) * 256
    by_registers = device.regs_per_multiprocessor // 4 // warp_registers * 4 // warps
    by_shared = device.shared_memory_per_multiprocessor // (kernel.shared_bytes + RESERVED_SHARED_BYTES)
    return min(by_registers, by_shared, device.max_threads_per_multi_processor // (32 * warps))


def spilled_bytes(kernel: KernelRun) -> int | None:
    """Bytes a thread keeps in local memory; None if Triton did not compile the kernel.

    Traces do not have it. Backends cache compiled kernels each in their own way, but all are `CompiledKernel`s of this process.
    """
    from triton.compiler import CompiledKernel  # Triton is for Linux only; saved results are shown anywhere

    words = [
        compiled.n_spills
        for compiled in gc.get_objects()
        if type(compiled) is CompiledKernel
        and compiled.module is not None  # loaded on the device
        and (compiled.name, compiled.n_regs) == (kernel.name, kernel.registers)
    ]
    return 4 * max(words) if words else None


def by_name(runs: Sequence[KernelRun]) -> dict[str, list[KernelRun]]:
    found = defaultdict(list)
    for run in runs:
        found[run.name].append(run)
    return found


def profile_calls(call: Run, timer: Timer, calls: int) -> list[KernelRun]:
    """What so many calls launch, each on a cold L2."""
    # without what the timer itself launches, to overwrite the L2
    foreign = {run.name for run in profiled(lambda: timer(lambda: None))}

    def repeat() -> None:
        for _ in range(calls):
            timer(call)

    return [run for run in profiled(repeat) if run.name not in foreign]


def times(runs: Sequence[KernelRun], calls: int) -> list[dict]:
    """Milliseconds and launches a call by kernel, the longest first, from the `runs` of `calls` equal calls."""
    found = [
        {"kernel": name, "ms": sum(run.us for run in each) / calls / 1e3, "launches": len(each) / calls}
        for name, each in by_name(runs).items()
    ]
    return sorted(found, key=lambda kernel: -kernel["ms"])


def describe(
    case: Case, device: torch.device, ceilings: Mapping[str, float], runs: Sequence[KernelRun], calls: int
) -> list[dict]:
    """One JSON-ready dict a kernel, in the order of their first runs, from the `runs` of `calls` equal calls.

    Raises:
        RuntimeError: a kernel did not run equally often in every call, so the profiler lost some.
    """
    found = by_name(runs)
    for name, each in found.items():
        if len(each) % calls:
            raise RuntimeError(f"profiler: recorded {len(each)} runs of {name} in {calls} calls")
    properties = torch.cuda.get_device_properties(device)
    chunks = max(chunk_counts(case))
    if any("prepare_steps_kernel" in name for name in found):
        # but for a second decay of each channel and step, the work is that of chunks of 32
        case = replace(case, chunk_size=32)
    return [_describe(each, calls, case, chunks, ceilings, properties) for each in found.values()]


def _describe(
    runs: list[KernelRun], calls: int, case: Case, chunks: int, ceilings: Mapping[str, float], device: Any
) -> dict:
    kernel = runs[0]
    launches = len(runs) // calls
    ms = statistics.median(sum(run.us for run in runs[i : i + launches]) for i in range(0, len(runs), launches)) / 1e3
    residents = ctas_per_sm(kernel, device)
    stage = next((stage for stage in STAGES if re.search(rf"{stage}(_bounded|_steps)?_kernel", kernel.name)), None)
    described = {
        **{"kernel": kernel.name, "stage": stage, "ms": ms, "launches": launches},
        **{key: x for key, x in asdict(kernel).items() if key not in ("name", "us")},
        "spill_bytes": spilled_bytes(kernel),
        "ctas_per_sm": residents,
        "waves": kernel.ctas / (residents * device.multi_processor_count),
    }
    if stage is not None:
        work = STAGES[stage](case)
        tb_s, tflop_s = work.bytes / ms / 1e9, work.flop / ms / 1e9
        described |= {
            "bytes": work.bytes,
            "flop": work.flop,
            "tb_s": tb_s,
            "share_of_copy": tb_s / ceilings["copy_tb_s"],
            "tflop_s": tflop_s,
            "share_of_gemm": tflop_s / ceilings["gemm_tflop_s"],
        }
    if stage == "recurrence":
        described["us_per_chunk"] = 1e3 * ms / chunks
    return described
