"""Machine code of two Tritons on one GPU: kernels as another Triton compiles them, beside this process's own.

`compile_rows` needs no GPU and leaves a folder: a manifest, and the machine code of every launch of the rows. `run_toolchains`
launches the same kernels twice, as compiled here and as in the folder. Both halves build a row's launches by `call_of`, on the
meta device and on the GPU, and tell kernels apart by `key_of`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import itertools
import json
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend

import flashdelta

from ...hopper.gradients import stages_of, wy_dqkg_launch
from ...hopper.launch import launches as hopper_launches
from ...problem.decode_spec import check_decode_arguments
from ...problem.problem import Incoming, check_arguments
from ...problem.wy_spec import WyGradients, WyTensors, check_wy
from ...program.launch import Launch, allocate, capability, start
from ...triton import backward_pass as gradients
from ...triton.launch import launches as triton_launches
from ..compile import Variant, resource_usage, source
from .cases import FEW_HEADS, PREFILL, UNBOUNDED, PrefillCase, select
from .decode import DECODE, DecodeCase, DecodeSetup, Pools, our_arguments
from .decode import make_step as decode_step
from .environment import environment, git_commit
from .inputs import random_inputs
from .oracle import TOLERANCE, relative_error
from .peers import DecodePeer
from .prefill import options_of
from .protocol import Effort, Run, Timer, capture, summarize, synchronize, take_turns, timer_for
from .report import add_row, load, new_document, save
from .train import TOLERANCE as GRADIENT_TOLERANCE
from .train import TRAIN, TrainCase
from .train import make_step as train_step
from .wy import WY, WyCase, wy_inputs

ARCH = 90
META = torch.device("meta")
MANIFEST = "manifest.json"


# ---- rows ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolchainRow:
    """A row of another benchmark, by the kernels of one backend."""

    case: PrefillCase | TrainCase | WyCase | DecodeCase
    backend: str = "hopper"

    @property
    def name(self) -> str:
        return " ".join([*(["triton"] if self.backend == "triton" else []), KINDS[type(self.case)][0], self.case.name])


@dataclass(frozen=True)
class Call:
    """The launches of a row, in order, and what they leave; `states` are those results that are read as well."""

    launches: list[Launch]
    results: list[Tensor]
    states: Tensor | None = None


LAUNCHES = {"hopper": hopper_launches, "triton": triton_launches}


def _prefill(case: PrefillCase, backend: str, device: torch.device) -> Call:
    inputs = random_inputs(case.shape, device, forgetful=case.forgetful)
    problem, t = check_arguments({**inputs, **options_of(case)})
    results = allocate(problem, t, None)
    return Call(LAUNCHES[backend](problem, t, ARCH, results), [x for x in results if x is not None])


def _train(case: TrainCase, backend: str, device: torch.device) -> Call:
    """The backward pass, the forward's stages among it."""
    step = train_step(case, device)
    stages = stages_of(*check_arguments({**step.inputs, **case.options}))
    found: dict[str, Tensor] = {}
    launches = list(gradients.launches(stages, Incoming(step.grad_o, step.grad_o.new_zeros(0)), found))
    return Call(launches, list(found.values()))


def _wy(case: WyCase, backend: str, device: torch.device) -> Call:
    if device.type == "meta":  # inputs that make sense must be computed; no size of theirs is in the machine code
        return Call(Variant(case.name, backend, algorithm="wy", packed=False, heads=case.shape.H).launches(ARCH), [])
    t = WyTensors(**wy_inputs(case.shape, device))
    problem = check_wy(t, use_exp2=True)
    found = WyGradients.allocate(problem, t)
    return Call([wy_dqkg_launch(problem, t, found)], list(found.in_order()))


def _decode(case: DecodeCase, backend: str, device: torch.device) -> Call:
    pools, peer = Pools(device, case.N * case.state_bytes), DecodePeer(None, "not asked for")
    step = decode_step(case, DecodeSetup(device, None, None, backend, peer, Effort(), pools, launches=1))
    bound = inspect.signature(flashdelta.recurrent_kda).bind(**our_arguments(step, step.slots[0]))
    bound.apply_defaults()
    problem, t = check_decode_arguments(bound.arguments)
    launches = LAUNCHES[backend](problem, t, ARCH, (step.output, None, None))
    return Call(launches, [step.output, step.pool], step.pool)


KINDS = {PrefillCase: ("prefill", _prefill), TrainCase: ("train", _train), WyCase: ("wy", _wy)}
KINDS[DecodeCase] = ("decode", _decode)
"""By type of a case: the benchmark that it is of, and what makes its call."""


def call_of(row: ToolchainRow, device: torch.device) -> Call:
    return KINDS[type(row.case)][1](row.case, row.backend, device)


def _rows(cases: Sequence, *names: str, backend: str = "hopper") -> list[ToolchainRow]:
    return [ToolchainRow(case, backend) for name in names for case in select(cases, [name])]


ROWS: tuple[ToolchainRow, ...] = (
    *_rows(PREFILL, "T8192 H64", "packed 6 uneven H64", "T8192 H96", "packed 6 uneven H96"),
    *_rows(UNBOUNDED, "T8192 H64 softplus"),
    *_rows(FEW_HEADS, "T32768 H4"),
    *_rows(TRAIN, "B1 T8192 H32"),
    *_rows(WY, "B1 T8192 H32"),
    *_rows(DECODE, "N128 H32 bf16"),
    *_rows(PREFILL, "T8192 H64", backend="triton"),
    *_rows(DECODE, "N128 H32 fp32", backend="triton"),
)
"""`recurrence` at fixed length and packed, whole items a program and shared out; gates without a bound; a split; the backward
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
    folder.mkdir(parents=True, exist_ok=True)
    kernels: dict[str, dict] = {}
    for row in rows:
        with torch.no_grad():
            launches = call_of(row, META).launches
        for launch in launches:
            found = specialized(launch)
            key = key_of(found, launch.options())
            if launch.programs <= 0 or key in kernels:
                continue
            compiled = triton.compile(found, target=GPUTarget("cuda", ARCH, 32), options=launch.options())
            cubin = compiled.asm["cubin"]
            registers, spills = resource_usage(cubin)
            file = f"{compiled.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.cubin"
            (folder / file).write_bytes(cubin)
            kernels[key] = {"file": file, "entry": compiled.name, "registers": registers, "spill_bytes": spills}
            kernels[key] |= {"shared_bytes": compiled.metadata.shared, "traits": traits(compiled)}
            progress(f"{row.name}: {compiled.name}, {registers} registers, {spills} B spilled, {len(cubin)} B")
    manifest = {"triton": triton.__version__, "ptxas": ptxas_version(), "commit": git_commit(), "arch": ARCH}
    manifest |= {"text": text_of_kernels(), "kernels": kernels}
    save(manifest, folder / MANIFEST)
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

SUSTAINED_MS, SUSTAINED_ROUNDS, GRAPH_MS = 60.0, 3, 2.0
"""Of `sustained`: how long a contender runs at a time, how often it gets its turn, and what a graph lasts."""


REPEATS = 50
"""Calls whose results must have the same bits."""


def run_all(runs: Sequence[Run]) -> tuple:
    for run in runs:
        run()
    return ()


def graph_of(runs: Sequence[Run]) -> Run:
    return capture(functools.partial(run_all, runs))[0]


def sustained(runs: Mapping[str, Run], ms: float) -> dict[str, float]:
    """Milliseconds of a launch amid others like it, by contender: graphs of many launches, replayed back to back, in turns.
    `ms`: what a launch takes, about. The median of the rounds' medians."""
    count = min(max(round(GRAPH_MS / ms), 1), 500)
    replays = max(round(SUSTAINED_MS / (count * ms)), 3)
    graphs = {name: graph_of([run] * count) for name, run in runs.items()}
    medians: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(SUSTAINED_ROUNDS):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
            events[0].record()
            for event in events[1:]:
                graphs[name]()
                event.record()
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) / count for a, b in itertools.pairwise(events)]
            medians[name].append(statistics.median(times))
    return {name: statistics.median(found) for name, found in medians.items()}


@dataclass(frozen=True)
class ToolchainSetup:
    """What all rows of a run share."""

    device: torch.device
    timer: Timer
    effort: Effort
    folder: Path
    manifest: dict


def results_of(call: Call, runs: Sequence[Run], before: Tensor | None) -> list[Tensor]:
    """What `runs` leave in memory that was full of NaN, with the states as they were `before`."""
    for x in (*call.results, *(x for launch in call.launches for x in launch.scratch)):
        x.fill_(torch.nan if x.is_floating_point() else 255)
    if before is not None:
        call.states.copy_(before)
    run_all(runs)
    return [x.clone() for x in call.results]


def difference(ours: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """0 if all bits are the same, else the largest relative error of one result against the other toolchain's."""
    if all(torch.equal(a, b) for a, b in zip(ours, other)):
        return 0.0
    errors = [relative_error(b, a.double()) for a, b in zip(ours, other)]
    return next((error for error in errors if error != error), max(errors))


@dataclass(frozen=True)
class Pair:
    """One kernel of a row: what launches it, by toolchain, if both have it; else why not."""

    kernels: dict[str, CompiledKernel]
    runs: dict[str, Run]
    problem: str | None

    def run(self, toolchain: str) -> Run:
        return self.runs.get(toolchain, self.runs["ours"])


def pair_of(launch: Launch, setup: ToolchainSetup) -> Pair:
    launch.run()  # compiles the kernel
    index = torch.cuda.current_device() if setup.device.type == "cuda" else None
    kernels, problem = {"ours": launch.compiled(index)}, None
    try:
        other = counterpart(kernels["ours"], launch, setup.folder, setup.manifest)
        other._init_handles()  # loads it
        kernels["other"] = other
    except Exception as error:  # the rest of the row is worth having
        problem = summarize(error)
    grid, arguments = (launch.programs, launch.rows, 1), (*launch.arguments, *launch.constants.values())
    runs = {name: functools.partial(start, kernel, index, grid, arguments) for name, kernel in kernels.items()}
    return Pair(kernels, runs, problem)


def measure_kernel(pair: Pair, setup: ToolchainSetup) -> dict:
    """One kernel of a row, on the buffers that the call has filled, in graphs: the host takes long to fill many tensor
    descriptors. Without times where there is a problem."""
    found = {
        "kernel": pair.kernels["ours"].name,
        "registers": {name: getattr(x, "n_regs", None) for name, x in pair.kernels.items()},
        "spill_bytes": {name: 4 * getattr(x, "n_spills", 0) for name, x in pair.kernels.items()},
        "shared_bytes": {name: x.metadata.shared for name, x in pair.kernels.items()},
        "ms": None,
        "sustained_ms": None,
        "problem": pair.problem,
    }
    if pair.problem is None:
        try:
            on_gpu = setup.device.type == "cuda"
            runs = {name: graph_of([run]) for name, run in pair.runs.items()} if on_gpu else pair.runs
            cold = take_turns(runs, setup.timer, setup.effort)
            found["ms"] = {name: asdict(timing) for name, timing in cold.items()}
            if on_gpu:
                found["sustained_ms"] = sustained(pair.runs, cold["ours"].median)
        except Exception as error:  # as above
            found["problem"] = summarize(error)
    return found


def measure_row(row: ToolchainRow, setup: ToolchainSetup) -> dict:
    """One row of the document: `ours` is this process's Triton, `other` the folder's."""
    call = call_of(row, setup.device)
    before = None if call.states is None else call.states.clone()
    pairs = [pair_of(launch, setup) for launch in call.launches if launch.programs > 0]
    runs = {name: [pair.run(name) for pair in pairs] for name in ("ours", "other")}
    ours, other = (results_of(call, each, before) for each in runs.values())
    error = difference(ours, other)
    tolerance = GRADIENT_TOLERANCE if isinstance(row.case, (TrainCase, WyCase)) else TOLERANCE[torch.bfloat16]
    wrong = None
    if not error <= tolerance:
        wrong = f"wrong: results differ by {error:.1e}, tolerance {tolerance:.0e}"
    elif any(difference(other, results_of(call, runs["other"], before)) != 0 for _ in range(REPEATS)):
        wrong = "wrong: the folder's machine code gives other bits from one call to the next"
    kernels, graphs = [], {}
    if wrong is None:
        # the whole call first: the sustained load of the kernels leaves the chip warm
        if setup.device.type == "cuda":
            graphs = take_turns({name: graph_of(each) for name, each in runs.items()}, setup.timer, setup.effort)
        kernels = [measure_kernel(pair, setup) for pair in pairs]
    return {
        "name": row.name,
        "backend": row.backend,
        "difference": error,
        "ours": {"problem": wrong},
        "graph_ms": {name: asdict(timing) for name, timing in graphs.items()} or None,
        "kernels": kernels,
    }


def run_toolchains(
    rows: Sequence[ToolchainRow],
    *,
    folder: Path,
    device: torch.device,
    effort: Effort,
    path: Path,
    timer: Timer | None = None,
    progress: Callable[[dict], None] = lambda row: None,
    begin: Callable[[str], None] = lambda name: None,
) -> dict:
    """Measures `rows` one after another and returns the document, which is saved to `path` after every row. `begin` is called
    with a row's name before, `progress` with the row after.

    Raises:
        ValueError: as `load_manifest`, or a GPU of another architecture.
    """
    manifest = load_manifest(folder)
    if device.type == "cuda":
        if capability(device) != manifest["arch"]:
            raise ValueError(f"device: got sm_{capability(device)}, wanted sm_{manifest['arch']}, as in {folder}")
        torch.cuda.set_device(device.index or 0)
    setup = ToolchainSetup(device, timer or timer_for(device), effort, folder, manifest)
    document = new_document("toolchains", environment(device))
    document["toolchains"] = {
        "ours": {"triton": triton.__version__, "ptxas": ptxas_version()},
        "other": {name: manifest[name] for name in ("triton", "ptxas", "commit")},
    }
    document["protocol"] = {
        "clock": type(setup.timer).__name__,
        "effort": asdict(effort),
        "sustained": {"ms": SUSTAINED_MS, "rounds": SUSTAINED_ROUNDS},
    }
    for row in rows:
        begin(row.name)
        try:
            with torch.no_grad():
                found = measure_row(row, setup)
                synchronize(device)
        except Exception as error:  # whatever a row raises, the others are worth having
            found = {"name": row.name, "backend": row.backend, "difference": None, "graph_ms": None, "kernels": []}
            found["ours"] = {"problem": summarize(error)}
        add_row(document, found, path, progress)
    return document
