"""Machine code of two Tritons on one GPU: kernels as another Triton compiles them, beside this process's own.

`compile_rows` needs no GPU and leaves a folder: a manifest, and the machine code of every launch of the rows. `measure`
launches the same kernels twice, as compiled here and as in the folder. Both halves build a row's launches by `call_of`, on the
meta device and on the GPU, and tell kernels apart by `key_of`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend

import flashdelta

from ...problem.problem import BACKWARD, Problem, Tensors
from ...program.launch import Launch, capability, start
from ...runtime.call import check
from ...testing.cases import BF16
from ...testing.inputs import make_call, meta_call, on_meta
from ...testing.oracle import TOLERANCE, relative_error
from ..compile import BUILD, Variant, resource_usage, source
from ..files import whole_folder
from . import workloads
from .checks import GRADIENT_TOLERANCE, Errors, fault
from .contenders import Contender, Setup, Work, decode_calls, state_bytes
from .environment import git_commit
from .report import load, save
from .runner import Benchmark
from .timing import Effort, Run, summarize, synchronize
from .training import random_like, wy_inputs
from .workloads import Row, select

ARCH = 90
META = torch.device("meta")
MANIFEST = "manifest.json"


# ---- rows ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolchainRow(Row):
    """A row of the benchmark `table`, by the kernels of one backend."""

    backend: str = "hopper"

    @property
    def name(self) -> str:
        return " ".join([*(["triton"] if self.backend == "triton" else []), self.table, self.call.name])


@dataclass(frozen=True)
class Call:
    """The launches of a row, in order, and what they leave; `states` are those results that are read as well."""

    launches: list[Launch]
    results: list[Tensor]
    states: Tensor | None = None


def _arguments(row: Row, device: torch.device) -> dict:
    case: Any = row.call
    return meta_call(case, BF16) if device.type == "meta" else make_call(case, BF16, device)


def _prefill(row: ToolchainRow, device: torch.device) -> tuple[Problem, Tensors]:
    return check(flashdelta.chunk_kda, **_arguments(row, device))


def _train(row: ToolchainRow, device: torch.device) -> tuple[Problem, Tensors]:
    """The backward pass, the forward's stages among it."""
    problem, t = _prefill(row, device)
    grad_o = torch.empty_like(t.v) if device.type == "meta" else random_like(t.v)
    return replace(problem, operation=problem.operation + BACKWARD), replace(t, do=grad_o, dht=grad_o.new_zeros(0))


def _wy(row: ToolchainRow, device: torch.device) -> tuple[Problem, Tensors]:
    return check(flashdelta.kernels.chunk_bwd_wy_dqkg, **wy_inputs(row.call, device), use_exp2=True)


def _decode(row: ToolchainRow, device: torch.device) -> tuple[Problem, Tensors]:
    step: Any = row.call
    meta, size = device.type == "meta", step.N * state_bytes(step)
    drawn: Any = torch.device("cpu") if meta else device
    pools = {step.state: torch.empty(size // step.state.itemsize, dtype=step.state, device=META)} if meta else {}
    call, slots = decode_calls(step, Setup(drawn, None, Effort(), launches=1, pool_bytes=size, pools=pools))
    call |= {"ssm_state_indices": slots[0]}
    return check(flashdelta.recurrent_kda, **(on_meta(call) if meta else call))


KINDS = {"prefill": _prefill, "train": _train, "wy": _wy, "decode": _decode}
"""By benchmark: what makes a row's call."""


def call_of(row: ToolchainRow, device: torch.device) -> Call:
    if row.table == "wy" and device.type == "meta":
        # inputs that make sense must be computed; no size of theirs is in the machine code
        return Call(Variant(row.name, row.backend, operation="wy", packed=False, heads=row.call.H).launches(ARCH), [])
    problem, t = KINDS[row.table](row, device)
    program = BUILD[row.backend](problem, t, ARCH)
    launches = [*program.launches]  # what they find is allocated as they are made
    pool = t.state_pool
    return Call(launches, [*program.outputs.values(), *([] if pool is None else [pool])], pool)


def _rows(kind: str, rows: Sequence[Row], *names: str, backend: str = "hopper") -> list[ToolchainRow]:
    return [ToolchainRow(row.call, kind, backend=backend) for name in names for row in select(rows, [name])]


HOT = ("T8192 H64", "packed 6 uneven H64", "T8192 H96", "packed 6 uneven H96", "T8192 H64 softplus", "T32768 H4")
ROWS: tuple[ToolchainRow, ...] = (
    *_rows("prefill", workloads.PREFILL, *HOT),
    *_rows("train", workloads.TRAIN, "B1 T8192 H32"),
    *_rows("wy", workloads.WY, "B1 T8192 H32"),
    *_rows("decode", workloads.DECODE, "N128 H32 bf16"),
    *_rows("prefill", workloads.PREFILL, "T8192 H64", backend="triton"),
    *_rows("decode", workloads.DECODE, "N128 H32 fp32", backend="triton"),
)
"""`recurrence` at fixed length and packed, whole work tiles a CTA and stream-K; gates without a bound; a split; the backward
pass; decoding; and the portable kernels."""


# ---- kernels ------------------------------------------------------------------------------------------------------------


def specialized(launch: Launch) -> ASTSource:
    """The source as Triton specialises it at a launch: integers that are 1 become constants, too."""
    found = source(launch)
    for i, (param, x) in enumerate(zip(launch.kernel.params, launch.arguments)):
        if type(x) is int and x == 1 and not param.do_not_specialize:
            found.signature[param.name], found.constants[(i,)] = "constexpr", 1
    return found


def key_of(found: ASTSource, options: Mapping[str, object]) -> str:
    """What the machine code is compiled from, but for the kernel's text, in words that do not depend on the Triton."""
    names = found.fn.arg_names
    # layouts of descriptors are written differently; `traits` has what is left of them
    kinds = {name: re.sub(r",\s*\w+\(.*\)>$", ">", kind).replace(" ", "") for name, kind in found.signature.items()}
    constants = {names[i]: repr(x) for (i,), x in sorted(found.constants.items())}
    attributes = {names[i]: x for (i,), x in sorted(found.attrs.items()) if x}
    kernel = f"{found.fn.fn.__module__}.{found.fn.__name__}"
    parts = [kernel, kinds, constants, attributes, {name: repr(x) for name, x in sorted(options.items())}]
    return json.dumps(parts)


DESCRIPTOR = ("swizzle", "elem_size", "elem_type", "block_size", "fp4_padded")
METADATA = ("num_warps", "num_ctas", "global_scratch_size", "profile_scratch_size", "launch_pdl")


def traits(compiled: CompiledKernel) -> dict[str, object]:
    """What a launch must know of the machine code: the parameters, hidden ones among them, as PTX declares them; how tensor
    descriptors are to be filled; warps and scratch memory. As JSON has it. (Shared memory is an argument of a launch.)"""
    metadata = compiled.metadata
    entry = re.search(rf"\.entry {re.escape(metadata.name)}\((.*?)\)", compiled.asm["ptx"], re.DOTALL)[1]
    declared = re.findall(r"\.param\s+((?:\.align \d+ )?\.\w+)[^,\[]*(\[\d+\])?", entry)
    descriptors = [[x[name] for name in DESCRIPTOR] for x in getattr(metadata, "tensordesc_meta", None) or ()]
    found = {"parameters": ["".join(x) for x in declared], "descriptors": descriptors}
    return found | {name: getattr(metadata, name) for name in METADATA}


def text_of_kernels() -> str:
    """A hash of the kernels' text."""
    here = Path(__file__).parents[2]
    files = sorted(path for folder in ("hopper", "triton") for path in (here / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def ptxas_version() -> str:
    from triton.backends.nvidia.compiler import get_ptxas_version

    try:
        return re.search(r"V([\d.]+)", get_ptxas_version(ARCH))[1]
    except (OSError, subprocess.SubprocessError, TypeError) as error:
        return summarize(error)


def compile_rows(
    rows: Sequence[ToolchainRow], folder: Path, progress: Callable[[str], None] = lambda line: None
) -> dict:
    """Compiles every launch of the rows for `ARCH`; the manifest, which is saved with the machine code."""
    kernels: dict[str, dict] = {}
    with whole_folder("folder", folder) as unfinished:
        for row in rows:
            with torch.no_grad():
                launches = call_of(row, META).launches
            for launch in launches:
                found = specialized(launch)
                key = key_of(found, launch.options())
                if launch.ctas <= 0 or key in kernels:
                    continue
                compiled = triton.compile(found, target=GPUTarget("cuda", ARCH, 32), options=launch.options())
                cubin = compiled.asm["cubin"]
                registers, spills = resource_usage(cubin)
                file = f"{compiled.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.cubin"
                (unfinished / file).write_bytes(cubin)
                kernels[key] = {"file": file, "entry": compiled.name, "registers": registers, "spill_bytes": spills}
                kernels[key] |= {"shared_bytes": compiled.metadata.shared, "traits": traits(compiled)}
                progress(f"{row.name}: {compiled.name}, {registers} registers, {spills} B spilled, {len(cubin)} B")
        manifest = {"triton": triton.__version__, "ptxas": ptxas_version(), "commit": git_commit(), "arch": ARCH}
        manifest |= {"text": text_of_kernels(), "kernels": kernels}
        save(manifest, unfinished / MANIFEST)
    return manifest


def load_manifest(folder: Path) -> dict:
    """What `compile_rows` left.

    Raises:
        ValueError: the folder holds no manifest, or one of other kernels than this package's.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"folder: got {folder} without a {MANIFEST}, wanted one that --compile has written")
    manifest = load(path)
    if manifest["text"] != text_of_kernels():
        raise ValueError(
            f"folder: got kernels of commit {manifest['commit']}, wanted those of this package ({git_commit()})"
        )
    missing = [x["file"] for x in manifest["kernels"].values() if not (folder / x["file"]).is_file()]
    if missing:
        raise ValueError(f"folder: got {folder} without {', '.join(missing)}, wanted all files of its manifest")
    return manifest


def swapped(compiled: CompiledKernel, entry: str, cubin: bytes, shared_bytes: int) -> CompiledKernel:
    """The kernel with other machine code, not yet loaded: Triton does that when it is first run."""
    other = copy.copy(compiled)
    other.module = other.function = other._run = None
    other.name, other.kernel, other.asm = entry, cubin, type(compiled.asm)(cubin=cubin)
    other.metadata = compiled.metadata._replace(shared=shared_bytes)
    other.packed_metadata = make_backend(other.metadata.target).pack_metadata(other.metadata)
    return other


def counterpart(compiled: CompiledKernel, launch: Launch, folder: Path, manifest: dict) -> CompiledKernel:
    """The kernel with the folder's machine code.

    Raises:
        ValueError: it has none, or one that is launched otherwise.
    """
    found = manifest["kernels"].get(key_of(compiled.src, launch.options()))
    if found is None:
        raise ValueError(f"{compiled.name}: not in the folder, as it is specialised here")
    here = traits(compiled)
    differing = [
        f"{name} {here[name]} here, {x} in the folder" for name, x in found["traits"].items() if here[name] != x
    ]
    if differing:
        raise ValueError(f"{compiled.name}: {'; '.join(differing)}")
    return swapped(compiled, found["entry"], (folder / found["file"]).read_bytes(), found["shared_bytes"])


# ---- measuring ------------------------------------------------------------------------------------------------------------

REPEATS = 50
"""Calls whose results must have the same bits."""

SAME_BITS = {"error": {"difference": 0.0}}


def run_all(runs: Sequence[Run]) -> tuple:
    for run in runs:
        run()
    return ()


def results_of(call: Call, runs: Sequence[Run], before: Tensor | None) -> list[Tensor]:
    """What `runs` leave in memory that was full of NaN, with the states as they were `before`."""
    for x in (*call.results, *(x for launch in call.launches for x in launch.scratch)):
        x.fill_(torch.nan if x.is_floating_point() else 255)
    if before is not None:
        call.states.copy_(before)
    run_all(runs)
    return [x.clone() for x in call.results]


def difference(want: Sequence[Tensor], found: Sequence[Tensor]) -> Errors:
    """0 if all bits are the same, else the largest relative error of one result."""
    if all(torch.equal(a, b) for a, b in zip(want, found)):
        return SAME_BITS
    errors = [relative_error(x, exact.double()) for x, exact in zip(found, want)]
    return {"error": {"difference": next((error for error in errors if error != error), max(errors))}}


def compiled_by(launch: Launch, setup: Setup) -> dict[str, Any]:
    """The kernel as each toolchain compiled it, loaded; or why the folder's can't be launched."""
    ours = launch.run()
    try:
        other: Any = counterpart(ours, launch, *setup.folder)
        other._init_handles()  # loads it
    except Exception as error:  # the rest of the row is worth having
        other = summarize(error)
    return {"ours": ours, "other": other}


def start_of(compiled: CompiledKernel, launch: Launch, device: torch.device) -> Run:
    index = torch.cuda.current_device() if device.type == "cuda" else None
    arguments = (*launch.arguments, *launch.constants.values())
    return functools.partial(start, compiled, index, (launch.ctas, launch.rows, 1), arguments)


def costs(compiled: dict[str, Any]) -> dict[str, object]:
    found = {name: x for name, x in compiled.items() if not isinstance(x, str)}
    return {
        "kernel": found["ours"].name,
        "registers": {name: getattr(x, "n_regs", None) for name, x in found.items()},
        "spill_bytes": {name: 4 * getattr(x, "n_spills", 0) for name, x in found.items()},
        "shared_bytes": {name: x.metadata.shared for name, x in found.items()},
    }


def no_errors(results: Sequence[Tensor]) -> Errors:
    """Nothing is checked but the whole call."""
    return {"error": {}}


def make(row: ToolchainRow, setup: Setup) -> Iterator[Work]:
    """The whole call, and once its results agree, each of its kernels on the buffers that the call has filled. `ours` is this
    process's Triton, `other` the folder's. All in graphs: the host takes long to fill many tensor descriptors."""
    facts: dict[str, object] = {"backend": row.backend}
    try:
        call = call_of(row, setup.device)
        before = None if call.states is None else call.states.clone()
        kernels, runs = [], []
        for launch in (launch for launch in call.launches if launch.ctas > 0):
            kernels.append(compiled_by(launch, setup))
            starts = {
                name: x if isinstance(x, str) else start_of(x, launch, setup.device) for name, x in kernels[-1].items()
            }
            runs.append(starts)
        ours = [each["ours"] for each in runs]
        other = [each["ours"] if isinstance(each["other"], str) else each["other"] for each in runs]
        want = results_of(call, other, before)
        if any(difference(want, results_of(call, other, before)) != SAME_BITS for _ in range(REPEATS)):
            raise RuntimeError("the folder's machine code gives other bits from one call to the next")
        synchronize(setup.device)
    except Exception as error:  # whatever a row raises, the others are worth having
        yield Work({"ours": summarize(error)}, no_errors, facts=facts)
        return
    tolerance = GRADIENT_TOLERANCE if row.table in ("train", "wy") else TOLERANCE[BF16]
    errors = functools.partial(difference, want)

    def contender(runs: Sequence[Run]) -> Contender:
        checked = functools.partial(results_of, call, runs, before)
        return Contender(functools.partial(run_all, runs), tolerance, checked, graph="only")

    # the whole call first: the sustained load of the kernels leaves the chip warm
    yield Work({"ours": contender(ours), "other": contender(other)}, errors, facts=facts)
    if fault(errors(results_of(call, ours, before))["error"], tolerance) is not None:
        return
    for compiled, starts in zip(kernels, runs):
        contenders = {
            name: x if isinstance(x, str) else Contender(functools.partial(run_all, [x]), graph="only")
            for name, x in starts.items()
        }
        yield Work(contenders, no_errors, facts=facts | costs(compiled), name=compiled["ours"].name)


def prepare(folder: Path, device: torch.device) -> tuple[tuple[Path, dict], dict]:
    """The folder with its manifest, and which toolchains are compared.

    Raises:
        ValueError: as `load_manifest`, or a GPU of another architecture.
    """
    manifest = load_manifest(folder)
    if device.type == "cuda":
        if capability(device) != manifest["arch"]:
            raise ValueError(f"device: got sm_{capability(device)}, wanted sm_{manifest['arch']}, as in {folder}")
        torch.cuda.set_device(device.index or 0)
    other = {name: manifest[name] for name in ("triton", "ptxas", "commit")}
    return (folder, manifest), {"ours": {"triton": triton.__version__, "ptxas": ptxas_version()}, "other": other}


BENCHMARK = Benchmark(
    "toolchains",
    "Time kernels as another Triton compiles them beside this Triton's",
    ROWS,
    make,
    effort=Effort(rounds=50, budget_ms=500.0, warmup_ms=10.0),
    ceilings=None,
    grad=torch.no_grad,
    peers=(),
)
