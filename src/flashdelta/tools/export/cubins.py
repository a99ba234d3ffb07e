"""The kernels that an export holds, and their compilation for GPUs that need not be there."""

import itertools
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from ...kernels.stages.launch import SHARED_MEMORY, dot_precision
from ...kernels.triton.build import build, prefill
from ...kernels.triton.recurrence import BV32_BYTES, STATES_FEW
from ...ops.decode import recurrent_kda
from ...problem import operations
from ...problem.operations import PRECISIONS, PREFILL_GATES, PREFILL_SIZES
from ...problem.problem import ChunkProblem, ChunkTensors
from ...program.launch import Launch
from ...program.plan import Outputs
from ...program.workspace import in_slots
from ...runtime.call import check
from ..compile import in_processes, only_launches, source
from . import bindings

OPS = ("prefill_f32", "prefill_bf16", "decode_bf16")
"""Operators, in the order of `fd_operator` in c/runtime.h."""

STAGES = ("prepare", "recurrence", "output", "decode", "recurrence_wide")
"""Stages, in the order of `fd_stage`."""

ANY = -1
"""`FD_ANY`."""

SAMPLE_HEADS = 2
"""Heads of the calls that kernels are compiled for; they run any number. `recurrence_wide` is that of many."""

TYPES = {"i32": ".u32", "i64": ".u64", "fp32": ".f32"}
"""Types of scalar parameters: in a kernel's signature, and in PTX. Pointers are `.u64` there."""

SCRATCH = 2
"""Parameters for scratch memory that Triton appends to every kernel's own."""

Parameters = tuple[tuple[str, str], ...]
"""Names and types."""


SPECIALISED = ("_batch", "_token", "_head", "_pitch", "_step")
"""Ends of the names of integers that kernels take to be multiples of 16: strides in elements, of which c/ passes no others."""


@dataclass(frozen=True)
class Wanted:
    """One kernel of an export. `C`, `gate` and `precision` are None where it does not depend on them."""

    op: str
    stage: str
    K: int
    V: int
    C: int | None
    gate: str | None
    precision: str | None

    @property
    def label(self) -> str:
        """Part of the names of files and symbols."""
        parts = (self.op, self.stage, f"k{self.K}", self.C and f"c{self.C}", self.gate, self.precision)
        return "_".join(part for part in parts if part)

    def variant(self) -> tuple[int, ...]:
        """Numbers of `fd_variant`."""
        chunk = ANY if self.C is None else self.C
        gate = ANY if self.gate is None else bindings.GATES.index(self.gate)
        precision = ANY if self.precision is None else bindings.PRECISIONS.index(self.precision)
        return (OPS.index(self.op), STAGES.index(self.stage), self.K, self.V, chunk, gate, precision)

    def exists(self, arch: int) -> bool:
        """Tells whether GPUs of this architecture have room for it."""
        return self.stage != "recurrence_wide" or SHARED_MEMORY[arch] >= BV32_BYTES

    def launch(self, arch: int) -> Launch:
        """Launch that the Python functions would make, for a call of any size."""
        gate = self.gate or PREFILL_GATES[0]
        if self.op == "decode_bf16":
            return sample_decode(self.K, self.V, gate, arch)
        wide = self.stage == "recurrence_wide"
        heads = 2 * STATES_FEW if wide else SAMPLE_HEADS
        assert self.C is not None
        call = prefill_call(self.op, (self.K, self.V, self.C), gate, self.precision, H=heads)
        return prefill(*call, arch, prefill_outputs(*call))[1 if wide else STAGES.index(self.stage)]


def prefill_call(
    op: str,
    size: tuple[int, int, int],
    gate: str = "none",
    precision: str | None = None,
    B: int = 1,
    H: int = SAMPLE_HEADS,
    T: int | None = None,
) -> tuple[ChunkProblem, ChunkTensors]:
    """A prefill at `(K, V, C)`; g and beta are in float32 whatever the others are."""
    (K, V, C), T = size, 4 * size[2] if T is None else T
    dtype = torch.float32 if op == "prefill_f32" else torch.bfloat16
    q, k, v = (torch.empty(B, H, T, width, dtype=dtype, device="meta") for width in (K, K, V))
    g, beta = torch.empty(B, H, T, K, device="meta"), torch.empty(B, H, T, device="meta")
    options = SimpleNamespace(scale=None, gate=gate, chunk_size=C, precision=precision or dot_precision(dtype))
    problem, t = operations.prefill_problem(options, dict(q=q, k=k, v=v, g=g, beta=beta))
    return problem, in_slots(t)


def prefill_outputs(problem: ChunkProblem, t: ChunkTensors) -> Outputs:
    """Outputs of a prefill: in bfloat16 without `u`."""
    wanted = {name: x for name, x in problem.results().items() if name != "u" or problem.dtype == torch.float32}
    return {name: t.memory.new(*x) for name, x in wanted.items()}


def sample_decode(
    K: int, V: int, gate: str, arch: int, N: int = 1, H: int = SAMPLE_HEADS, slots: int = 4, pitch: int | None = None
) -> Launch:
    """A step over a pool of float32 states, values first, by index; g and beta in float32. `pitch`: of the pool's slots."""
    q, k, v = (torch.empty(N, 1, H, width, dtype=torch.bfloat16, device="meta") for width in (K, K, V))
    g, beta = torch.empty(N, 1, H, K, device="meta"), torch.empty(N, 1, H, device="meta")
    pool = torch.empty_strided((slots, H, V, K), (pitch or H * V * K, V * K, K, 1), device="meta")
    index = torch.empty(N, dtype=torch.int32, device="meta")
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": pool, "ssm_state_indices": index}
    (launch,) = only_launches(build(*check(recurrent_kda, **tensors, gate=gate, use_qk_l2norm_in_kernel=False), arch))
    return launch


def wanted_kernels(
    ops: Iterable[str],
    sizes: Iterable[tuple[int, int, int]] = PREFILL_SIZES,
    gates: Iterable[str] = PREFILL_GATES,
    precisions: Iterable[str] = PRECISIONS,
) -> list[Wanted]:
    """The kernels of the operators at `(K, V, C)` in `sizes`, each once."""
    found: dict[Wanted, None] = {}
    for op, (K, V, C), gate in itertools.product(ops, sizes, gates):
        if op == "decode_bf16":
            found[Wanted(op, "decode", K, V, None, gate, None)] = None
            continue
        for precision in precisions if op == "prefill_f32" else (None,):
            found[Wanted(op, "prepare", K, V, C, gate, precision)] = None
            found[Wanted(op, "recurrence", K, V, C, None, precision)] = None
            if op == "prefill_f32":
                found[Wanted(op, "output", K, V, C, None, precision)] = None
            if op == "prefill_f32" and K > 64 and precision == "tf32x3":
                found[Wanted(op, "recurrence_wide", K, V, C, None, precision)] = None
    return list(found)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. `parameters` are the names and types of its parameters, in order; `slices` is the number of programs
    that share a head's value channels."""

    wanted: Wanted
    arch: int
    entry: str
    cubin: bytes
    threads: int
    shared_bytes: int
    slices: int
    overlaps: bool
    parameters: Parameters

    @property
    def symbol(self) -> str:
        return f"fd_{self.wanted.label}_sm{self.arch}"


def parameters_of(launch: Launch) -> Parameters:
    """Names and types of what is passed at run time, in order: all but constants and absent tensors."""
    signature = source(launch).signature
    return tuple((p.name, signature[p.name]) for p in launch.kernel.params if signature[p.name] != "constexpr")


def compile_kernel(wanted: Wanted, arch: int) -> Kernel:
    """Raises a RuntimeError if the kernel is not as c/ launches it, or does not fit the GPU."""
    launch = wanted.launch(arch)
    with knobs.compilation.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's are for who writes kernels, not for who exports them
        knobs.compilation.disable_line_info = True  # the names of source files on the machine that exports are in it
        compiled = triton.compile(source(launch), target=GPUTarget("cuda", arch, 32), options=launch.options())
    parameters = parameters_of(launch)
    _check(compiled, launch, parameters, arch, wanted.label)
    code = dict(entry=compiled.metadata.name, cubin=compiled.asm["cubin"], parameters=parameters)
    slices = 1 if wanted.stage == "prepare" else wanted.V // launch.constants["BV"]
    sizes = dict(threads=32 * compiled.metadata.num_warps, shared_bytes=compiled.metadata.shared, slices=slices)
    return Kernel(wanted, arch, **code, **sizes, overlaps=launch.overlaps)


def _check(compiled: CompiledKernel, launch: Launch, parameters: Parameters, arch: int, label: str) -> None:
    metadata = compiled.metadata
    (entry,) = re.findall(rf"\.entry {metadata.name}\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    found = re.findall(r"\.param\s+(\.\w+)", entry)
    expected = [TYPES.get(kind, ".u64") for _, kind in parameters] + [".u64"] * SCRATCH
    if found != expected:
        raise RuntimeError(f"{label}: the compiled kernel must take {expected}; got {found}")
    extra = {name: getattr(metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size", "tmem_size")}
    if any(extra.values()) or metadata.num_ctas != 1:
        raise RuntimeError(f"{label}: scratch must be 0 and blocks per cluster 1; got {extra} and {metadata.num_ctas}")
    if metadata.shared > SHARED_MEMORY[arch]:
        raise RuntimeError(f"{label}, sm_{arch}: shared bytes must be <= {SHARED_MEMORY[arch]}; got {metadata.shared}")
    for param, x in zip(launch.kernel.params, launch.arguments):
        if isinstance(x, int) and not param.do_not_specialize and not param.name.endswith(SPECIALISED):
            raise RuntimeError(f"{label}: specialised parameters must be strides; got {param.name}")


def compile_kernels(wanted: Iterable[Wanted], arches: Iterable[int], jobs: int | None = None) -> list[Kernel]:
    """All of them for all architectures, `jobs` at a time (by default as many as there are processors)."""
    tasks = [(kernel, arch) for kernel, arch in itertools.product(wanted, arches) if kernel.exists(arch)]
    return list(in_processes(compile_kernel, tasks, jobs or os.cpu_count() or 1))
