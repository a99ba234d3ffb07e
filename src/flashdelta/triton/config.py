"""Launch parameters: a pure function of the call's problem and the device, from tables filled by measurement."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem.problem import Problem
from ..problem.split import SplitCosts


@dataclass(frozen=True)
class PrepareConfig:
    """`BK`: key channels a program holds at a time; `stages`: how many such slices of q, k, g are in flight."""

    BK: int
    num_warps: int
    stages: int


@dataclass(frozen=True)
class RecurrenceConfig:
    """`BV`: value channels a program carries; `stages`: how many chunks of operands are in flight."""

    BV: int
    num_warps: int
    stages: int


@dataclass(frozen=True)
class OutputConfig:
    """`BK`: key channels a program holds at a time; `BV`: its value channels; `stages`: how many slices of keys are in
    flight."""

    BK: int
    BV: int
    num_warps: int
    stages: int


@dataclass(frozen=True)
class ComposeConfig:
    """`BV`: value channels a program; `BK`: key channels of the state that it holds at a time; `stages`: maps in flight."""

    BV: int
    BK: int
    num_warps: int
    stages: int


@dataclass(frozen=True)
class WyConfig:
    """`BK`, `BV`: key and value channels that a program holds at a time; with all value channels, their gradients stay while
    `stages` slices of the state are in flight."""

    BK: int
    BV: int
    num_warps: int
    stages: int


@dataclass(frozen=True)
class BackwardConfig:
    """`BK`, `BV`: key and value channels that a program of `intra` holds at a time."""

    BK: int
    BV: int
    num_warps: int


@dataclass(frozen=True)
class DecodeConfig:
    """`BV`: value channels a program; `stream`: states need not stay in the L2 cache."""

    BV: int
    num_warps: int = 1
    stream: bool = False


DECODE_FEW = 256
"""Pairs of sequence and value head up to which `decode` of one token a sequence counts as few."""


SPLIT_COSTS = SplitCosts(step=165, map=100, compose=230, fixed=1500)
"""Measured on an H200 at K = V = 128; other GPUs differ in all of them alike."""

COMMIT_BLOCK = 4096
"""Elements a program of `commit` copies."""


SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes a program may use, by compute capability."""


def dot_precision(dtype: torch.dtype) -> str:
    """Of products whose operands are float32 in the kernel. tf32x3 carries 21 mantissa bits or more."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def backward_precision(problem: Problem, capability: int) -> str:
    """Of `wy` and `intra`. In float32 on Hopper without tensor cores: Triton 3.6 makes wrong wgmma of tf32 operands that lie by
    columns, and programs that read out of bounds."""
    return "ieee" if problem.dtype == torch.float32 and capability == 90 else dot_precision(problem.dtype)


def safe_blocks(problem: Problem) -> bool:
    """Whether blocks of 32 rows may use one reference: `exp(80)` must be finite in the operand dtype."""
    return problem.safe_gate and problem.dtype != torch.float16


def bounded(problem: Problem) -> bool:
    """Whether `prepare_bounded` runs, which spares `prepare`'s products by level. In float32 `prepare` is no slower."""
    return safe_blocks(problem) and problem.dtype == torch.bfloat16


def prepare_config(problem: Problem, capability: int) -> PrepareConfig:
    """Of `prepare`: 432 us in float32 at T4096 H32 on an H200, with slices of 32 channels 468."""
    if bounded(problem):
        return PrepareConfig(BK=16, num_warps=2, stages=3)
    return PrepareConfig(BK=16, num_warps=problem.chunk_size // 16, stages=3)


def recurrence_config(problem: Problem, capability: int) -> RecurrenceConfig:
    """As many stages as shared memory holds: at T8192 H64 on an H200, 513, 348 and 218 us with one, two and three.

    Wider slices and fewer warps than these spill: 16-bit slices of 64 channels need the register operands of wgmma. In float32
    at T4096 H32, K = 128, chunks of 64: 570 us, 688 with slices of 16, 706 with one stage.
    """
    C, K = problem.chunk_size, problem.K
    warpgroup_mma = capability in (90, 100)
    if problem.dtype == torch.float32:
        BV, num_warps = 16, 8 if K <= 128 else 16
        if capability == 90 and C * K == 8192:
            return RecurrenceConfig(BV=32, num_warps=8, stages=2)
    elif K == 256:
        BV, num_warps = 32, 8
    else:
        BV, num_warps = min(problem.V, 64 if warpgroup_mma else 32), 4
    # asynchronous mma reads a stage while the next ones load; synchronous mma has read it into registers before
    stage = (3 * C * K + 2 * C * C + C * BV) * problem.dtype.itemsize
    buffers = min(3, SHARED_MEMORY[capability] // stage)
    return RecurrenceConfig(BV=BV, num_warps=num_warps, stages=max(1, buffers if warpgroup_mma else buffers + 1))


STATES_FEW = 16
"""Sequences times value heads up to which slices of the states' value channels are narrow: 128 programs, about as many as an
H200 has multiprocessors. (`FEW` in export/c/prefill.c.)"""

WIDE_STATES = 181_248
"""Bytes of shared memory that wide slices need, at the most."""


def states_config(problem: Problem, capability: int, precision: str) -> RecurrenceConfig:
    """Of `recurrence` without the output, in float32. With K = 128 and chunks of 64 on an H200, slices of 32 value channels
    take 314 us at T4096 H32, where slices of 16 take 364, but 1239 at T16384 H8, where those take 721: half as many programs.
    With K = 64 and chunks of 32, T4096 H32, 137 us (slices of 32: 213; 8 warps: 182). In true float32 wide ones spill."""
    BV, num_warps, buffers = 16, 4, 3
    if problem.K > 64:
        num_warps, buffers = 8, 2
        if problem.N * problem.HV > STATES_FEW and precision == "tf32x3" and SHARED_MEMORY[capability] >= WIDE_STATES:
            BV = 32
    stage = (2 * problem.chunk_size * problem.K + problem.chunk_size * BV) * problem.dtype.itemsize
    return RecurrenceConfig(BV=BV, num_warps=num_warps, stages=1 + min(buffers, SHARED_MEMORY[capability] // stage))


def output_config(problem: Problem, capability: int) -> OutputConfig:
    """As above 131 us; 157 with 32 value channels, whose products are not wgmma's."""
    if capability == 90:
        return OutputConfig(BK=32, BV=min(64, problem.V), num_warps=4, stages=2)
    return OutputConfig(BK=32, BV=32, num_warps=2, stages=2)


def compose_config(problem: Problem, capability: int) -> ComposeConfig:
    """At K = V = 128 a step takes 2.3 us on an H200; 2.6 with 2 stages, 4.0 with slices of 32 channels, 5.8 by `BK` = 64."""
    if problem.K > 128:
        return ComposeConfig(BV=min(32, problem.V), BK=64, num_warps=4, stages=1)
    stages = 3 if SHARED_MEMORY[capability] > 170_000 else 2
    return ComposeConfig(BV=min(16, problem.V), BK=problem.K, num_warps=8, stages=stages)


def wy_config(problem: Problem, capability: int) -> WyConfig:
    """Products have 64 rows, which are four warps' of wgmma: eight would have it work on rows that are not there.

    On Hopper, with value channels held, 16 key channels and two buffers of them leave room for two programs a multiprocessor
    (94 KB); 32 do not, and spill. `stages=3` is two buffers: with 2 the compiler copies a slice only once the one before it is
    used up. Elsewhere held operands would fill the registers.
    """
    if problem.dtype == torch.float32:
        return WyConfig(BK=16, BV=16, num_warps=8, stages=1)
    if capability == 90 and problem.V <= 128:
        return WyConfig(BK=16, BV=problem.V, num_warps=4, stages=3)
    if capability == 90:
        # slices of 16 key and 64 value channels come out wrong with Triton 3.6 (dk by 0.8; tests/gpu/test_wy.py), these right
        return WyConfig(BK=32, BV=32, num_warps=4, stages=1)
    return WyConfig(BK=16, BV=min(problem.V, 64) if capability in (90, 100) else 32, num_warps=4, stages=1)


def intra_config(problem: Problem, capability: int) -> BackwardConfig:
    """As `wy_config`."""
    return BackwardConfig(BK=16, BV=0, num_warps=8 if problem.dtype == torch.float32 else 4)


def decode_config(problem: Problem, capability: int) -> DecodeConfig:
    """By kind of call: bytes in flight decide, so a program has 4 KB of states (bf16, one warp: 2 KB reach 76 % of the copy
    rate, 4 KB 89 %, and with 8 KB registers let too few programs run). K first, only the width of a tile makes accesses to
    whole sectors: 64 channels where there are many programs. docs/tuning.md has all that was tried.
    """
    wide = problem.state_dtype == torch.float32
    if problem.T > 1 or problem.packed:
        return DecodeConfig(BV=_channels(problem, 2048), stream=True)
    few = problem.N * problem.HV <= DECODE_FEW
    if problem.state_v_first and wide:
        return DecodeConfig(BV=_channels(problem, 1024))
    if problem.state_v_first or few:
        return DecodeConfig(BV=_channels(problem, 2048), stream=not few)
    return DecodeConfig(BV=min(64, _channels(problem, 8192)), num_warps=4, stream=not wide)


def room(problem: Problem, capability: int, multiprocessors: int) -> int:
    """Maps that `maps` forms at the same time, one program a multiprocessor."""
    return multiprocessors // (problem.HV * ((problem.K + problem.V) // maps_width(problem, capability)))


def maps_width(problem: Problem, capability: int) -> int:
    """Columns of a map that a program forms."""
    return min(recurrence_config(problem, capability).BV, problem.K)


def _channels(problem: Problem, elements: int) -> int:
    """Value channels of a tile of so many elements."""
    return min(problem.V, max(1, elements // problem.K))
