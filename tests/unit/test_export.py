"""The C library on a machine without a GPU: it builds, its interface is what the header says, and beside a stand-in for the
CUDA driver it launches what the Python functions would launch, and nothing after an error."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashdelta
from flashdelta.kernels.stages.launch import layout
from flashdelta.kernels.triton.build import prefill, prefill_layout
from flashdelta.problem.operations import PREFILL_SIZES
from flashdelta.problem.problem import Problem, Result, Tensors
from flashdelta.program.launch import Launch
from flashdelta.program.workspace import Workspace
from flashdelta.tools.export import bindings, cubins
from flashdelta.tools.export.cubins import (
    Wanted,
    compile_kernel,
    parameters_of,
    prefill_call,
    prefill_outputs,
    sample_decode,
)

from ..compile.toolchains import toolchains
from ..support.exports import (
    CUDA_INCLUDE,
    HERE,
    ROOT,
    SIZE,
    Export,
    build,
    call,
    compile_c,
    export,
    run,
    small_export,
    task,
)
from ..support.shared import folder_of_run

pytestmark = pytest.mark.slow

FUNCTIONS = {
    *("fd_prefill_f32", "fd_prefill_bf16", "fd_decode_bf16", "fd_prefill_f32_workspace", "fd_prefill_bf16_workspace"),
    *("fd_status_string", "fd_last_error", "fd_version"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    return small_export(folder_of_run(tmp_path_factory))


# ---- the files and the built library -------------------------------------------------------------------------------------


def test_libraries_export_the_headers_functions_and_need_no_more_than_libc(exported: Export):
    assert exported.static.exists()
    dynamic = run("nm", "-D", "--defined-only", exported.shared)
    assert set(re.findall(r" [TBDR] (\w+)", dynamic)) == FUNCTIONS
    assert set(re.findall(r" \w (\w+)", run("nm", "-g", "--defined-only", exported.static))) == FUNCTIONS
    header = (exported.folder / "flashdelta.h").read_text()
    assert set(re.findall(r"^FD_API .*?(fd_\w+)\(", header, re.MULTILINE)) == FUNCTIONS
    needed = set(re.findall(r"NEEDED.*\[(\w+)", run("readelf", "-d", exported.shared)))
    assert needed <= {"libc", "libm", "libdl", "libpthread", "ld"}
    abi = re.search(r"#define FD_ABI (\d+)", header)[1]
    assert f"soname: [libflashdelta.so.{abi}]" in run("readelf", "-d", exported.shared)
    assert exported.shared.resolve().name == f"libflashdelta.so.{abi}.{flashdelta.__version__}"
    for path in (exported.shared, *exported.folder.glob("*.[ch]")):
        assert str(ROOT).encode() not in path.read_bytes(), f"{path}: a path of the machine that exported"


def test_numbers_and_words_of_the_bindings_are_the_headers(exported: Export):
    """The copy beside the C files is imported where there is no torch (the package is not found in isolated mode)."""
    header = (exported.folder / "flashdelta.h").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"FD_(\w+) = (\d+)", header)}
    gates = [f"GATE_{gate.upper()}" for gate in bindings.GATES]
    precisions = [f"PRECISION_{precision.upper()}" for precision in bindings.PRECISIONS]
    assert numbers == {name: i for names in (bindings.STATUS, gates, precisions) for i, name in enumerate(names)}
    functions = bindings.Library(str(exported.shared)).functions
    words = {functions.fd_status_string(i).decode() for i in range(len(bindings.STATUS))}
    assert len(words) == len(bindings.STATUS) and functions.fd_status_string(99) == b"unknown status"
    script = "import sys; sys.path.insert(0, sys.argv[1]); import flashdelta_ctypes as f; print(f.Library(sys.argv[2]).version)"
    version = run(sys.executable, "-I", "-S", "-c", script, exported.folder, exported.shared)
    assert version.strip() == flashdelta.__version__


@pytest.fixture
def compile_text(exported: Export, tmp_path: Path) -> Callable[..., Path]:
    """Compiles a source that includes exported files."""

    def compile_source(text: str, *options: str, language: str = "c11") -> Path:
        source = tmp_path / ("use.cpp" if "++" in language else "use.c")
        source.write_text(text)
        compile_c(tmp_path / "use", source, "-I", exported.folder, *options, language=language)
        return tmp_path / "use"

    return compile_source


@pytest.mark.parametrize("language", ["c90", "c11", "c++17"])
def test_header_compiles(compile_text: Callable[..., Path], language: str):
    header = '#include "flashdelta.h"\n'
    use = "int used(void);\nint used(void) { return FD_SUCCESS; }\n"
    compile_text(f"{header}#include <cuda.h>\n{header}{use}", "-c", language=language)


def test_ctypes_structs_have_the_headers_layout(exported: Export, compile_text: Callable[..., Path]):
    kinds = {"fd_prefill_args": bindings.PrefillArgs, "fd_decode_args": bindings.DecodeArgs}
    lines, want = [], []
    for name, kind in kinds.items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        want.append(ctypes.sizeof(kind))
        for field, _ in kind._fields_:
            lines.append(f'printf("%zu\\n%zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
            want += [getattr(kind, field).offset, getattr(kind, field).size]
        header = (exported.folder / "flashdelta.h").read_text()
        body = re.search(rf"struct {name} {{(.*?)}} {name};", header, re.DOTALL)[1]
        declared = re.findall(r"[\w, ]+;", re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL))
        names = [re.sub(r"^(.* )?\*?", "", part) for line in declared for part in line.strip(" ;").split(",")]
        assert [part.strip() for part in names] == [field for field, _ in kind._fields_]
    text = '#include <stdio.h>\n#include "flashdelta.h"\nint main(void) {\n' + "\n".join(lines) + "\n}\n"
    assert [int(line) for line in run(compile_text(text)).split()] == want


def test_the_drivers_types_are_those_of_cuda_h(compile_text: Callable[..., Path]):
    attribute, shared = "CU_DEVICE_ATTRIBUTE_", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"
    names = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", shared)
    pairs = {name: attribute + name for name in names}
    pairs |= {"MAX_DYNAMIC_SHARED_SIZE_BYTES": "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"}
    pairs |= {"PROGRAMMATIC_STREAM_SERIALIZATION": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"}
    types = {"launch_config": "CUlaunchConfig", "launch_attribute": "CUlaunchAttribute"}
    pairs |= {f"sizeof({ours})": f"sizeof({cuda})" for ours, cuda in types.items()}
    pairs |= {
        "offsetof(launch_attribute, value)": "offsetof(CUlaunchAttribute, value)",
        "sizeof(CUdevice)": "sizeof(int)",
    }
    fields = {f"{part}_{x}": f"{part}Dim{x.upper()}" for part in ("grid", "block") for x in "xyz"}
    fields |= {
        "shared_bytes": "sharedMemBytes",
        "stream": "hStream",
        "attributes": "attrs",
        "attribute_count": "numAttrs",
    }
    pairs |= {f"offsetof(launch_config, {ours})": f"offsetof(CUlaunchConfig, {cuda})" for ours, cuda in fields.items()}
    asserts = "".join(f'_Static_assert((long)({a}) == (long)({b}), "{a}");\n' for a, b in pairs.items())
    compile_text(f'#include <cuda.h>\n#include "runtime.c"\n{asserts}', "-c", "-D_POSIX_C_SOURCE=200809L")


# ---- errors: nothing is launched -----------------------------------------------------------------------------------------

Refusals = dict[str, tuple[dict | None, str, str]]
"""What changes in a call that is right, the status, and how the message starts."""


def missing(*names: str) -> Refusals:
    return {name: ({name: 0}, "ERROR_NULL_POINTER", f"{name}: got NULL, wanted device memory") for name in names}


def unaligned(*names: str) -> Refusals:
    said = "got 0x7008, wanted a multiple of 16 bytes"
    return {f"{name} unaligned": ({name: 0x7008}, "ERROR_ALIGNMENT", f"{name}: {said}") for name in names}


MOST = 2**31 - 1
BAD_PREFILL = {
    "no args": (None, "ERROR_NULL_POINTER", "args: got NULL, wanted an fd_prefill_args"),
    "K": ({"K": 32}, "ERROR_UNSUPPORTED", "(K, V, C): got (32, 64, 32), wanted one of (64, 64, 32)"),
    "C": ({"C": 16}, "ERROR_UNSUPPORTED", "(K, V, C): got (64, 64, 16)"),
    "B": ({"B": -1}, "ERROR_SIZE", f"B: got -1, wanted 0 to {MOST}"),
    "H": ({"H": 2**62}, "ERROR_SIZE", f"H: got {2**62}, wanted 0 to {MOST}"),
    "T": ({"T": MOST}, "ERROR_SIZE", f"T: got {MOST}, wanted 0 to {MOST - 32}"),
    "heads": ({"B": MOST, "H": MOST, "T": MOST - 32}, "ERROR_SIZE", f"B * H: got {MOST**2} with {2**26 - 1} chunks"),
    "chunks": ({"B": 2**13, "H": 2**12, "T": 1}, "ERROR_SIZE", f"B * H: got {2**25} with 1 chunks"),
    "gate": ({"gate": 2}, "ERROR_OPTION", "gate: got 2, wanted FD_GATE_NONE or FD_GATE_LOGSIGMOID"),
    "precision": ({"precision": -1}, "ERROR_OPTION", "precision: got -1, wanted "),
    "scale": ({"scale": float("inf")}, "ERROR_OPTION", "scale: got inf, wanted a finite number"),
    **missing("q", "k", "v", "g", "beta", "o", "workspace"),
    **unaligned("q", "k", "v", "g", "beta", "o", "workspace", "initial_state", "final_state"),
    "workspace": ({"workspace_bytes": 100}, "ERROR_WORKSPACE", "workspace_bytes: got 100, wanted at least "),
    "other gate": ({"gate": 1}, "ERROR_NOT_EXPORTED", "no kernels for (K, V, C) = (64, 64, 32), gate 1, precision "),
}
BAD_F32 = {**missing("w", "u"), "odd": ({"u": 0x7001}, "ERROR_ALIGNMENT", "u: got 0x7001")}
BAD_BF16 = {
    "w": ({"w": 0x7000}, "ERROR_NULL_POINTER", "w: got a pointer, wanted NULL (only fd_prefill_f32 returns it)"),
    "tf32x3": ({"precision": 1}, "ERROR_OPTION", "precision: got 1, wanted FD_PRECISION_DEFAULT"),
}
PITCH, POOL = "ERROR_OPTION", "slots * slot_pitch: got"
BAD_DECODE = {
    "no args": (None, "ERROR_NULL_POINTER", "args: got NULL, wanted an fd_decode_args"),
    "K": ({"K": 32}, "ERROR_UNSUPPORTED", "(K, V): got (32, 64), wanted (64, 64) or (128, 128)"),
    "N": ({"N": -1}, "ERROR_SIZE", f"N: got -1, wanted 0 to {MOST}"),
    "H": ({"H": 2**63 - 1}, "ERROR_SIZE", f"H: got {2**63 - 1}, wanted 0 to {2**25 - 1}"),
    "slots": ({"slots": 2**31}, "ERROR_SIZE", f"slots: got {2**31}"),
    "programs": ({"N": 2**25}, "ERROR_SIZE", f"N: got {2**25} with 3 heads, wanted at most "),
    "gate": ({"gate": -1}, "ERROR_OPTION", "gate: got -1"),
    "small pitch": ({"slot_pitch": 16}, PITCH, "slot_pitch: got 16, wanted 0 or a multiple of 16, at least"),
    "negative pitch": ({"H": 0, "slot_pitch": -(2**63)}, PITCH, f"slot_pitch: got {-(2**63)}, wanted 0 or a"),
    "odd pitch": ({"slot_pitch": 3 * 64 * 64 + 1}, PITCH, "slot_pitch: got 12289"),
    "pool": ({"slots": 2, "slot_pitch": 2**60}, "ERROR_SIZE", f"{POOL} 2 * {2**60}, wanted at most {2**61 - 1}"),
    "large pool": ({"slots": MOST, "N": 0, "H": 2**25 - 1}, "ERROR_SIZE", f"{POOL} {MOST} * {(2**25 - 1) * 64 * 64}, "),
    **missing("q", "k", "v", "g", "beta", "states", "state_indices", "o"),
    "unaligned": ({"states": 0x7004}, "ERROR_ALIGNMENT", "states: got 0x7004, wanted a multiple of 16 bytes"),
    "other size": ({"K": 128, "V": 128}, "ERROR_NOT_EXPORTED", "no kernels for "),
}
BAD = {"prefill_f32": BAD_PREFILL | BAD_F32, "prefill_bf16": BAD_PREFILL | BAD_BF16, "decode_bf16": BAD_DECODE}


@pytest.fixture(scope="module")
def trapping(exported: Export, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """The same library, in which arithmetic that overflows ends the process."""
    folder = tmp_path_factory.mktemp("trapping") / "export"
    folder.mkdir()
    (folder.parent / "libcuda.so.1").symlink_to(exported.folder.parent / "libcuda.so.1")
    (folder / exported.bindings.name).symlink_to(exported.bindings)
    linked = ("-I", exported.folder, "-shared", "-fPIC", "-fvisibility=hidden", "-D_POSIX_C_SOURCE=200809L")
    options = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-ldl", "-lpthread", "-lm")
    compile_c(Export(folder).shared, *exported.folder.glob("*.c"), *linked, *options)
    return Export(folder)


@pytest.mark.parametrize("op", BAD)
def test_bad_arguments_are_named_and_launch_nothing(trapping: Export, op: str):
    exported, bad = trapping, BAD[op]
    calls = [{"op": op, "args": None} if changes is None else task(op, **changes) for changes, _, _ in bad.values()]
    found = call(exported, calls)
    for (name, (_, status, said)), outcome in zip(bad.items(), found.outcomes):
        assert (outcome["status"], outcome["message"].startswith(said)) == (status, True), (name, outcome)
    assert found.launches == [] and found.counts["load"] == 0


QUERIES = ("prefill_f32_workspace", "prefill_bf16_workspace")


def struct_of(op: str) -> type[ctypes.Structure]:
    return bindings.DecodeArgs if "decode" in op else bindings.PrefillArgs


def of_op(op: str, **changes: object) -> dict:
    """`task`, for workspace queries, too."""
    return task(op.removesuffix("_workspace"), **changes) | {"op": op}


@pytest.mark.parametrize("op", [*BAD, *QUERIES])
def test_sizes_that_no_struct_had_are_refused(exported: Export, op: str):
    whole = ctypes.sizeof(struct_of(op))
    sizes = [0, 4, 7, 12, whole - 4, whole - 1, whole + 4, whole + 8, 2**32 + whole, 2**64 - 8]
    found = call(exported, [of_op(op) | {"struct_size": size} for size in sizes])
    for size, outcome in zip(sizes, found.outcomes, strict=True):
        wanted = f"struct_size: got {size}, wanted a multiple of 8 from 8 to {whole}"
        assert (outcome["status"], outcome["message"]) == ("ERROR_STRUCT", wanted)
    assert found.launches == []


@pytest.mark.parametrize("changes", [{}, {"T": 0, "initial_state": 0xA0000}], ids=["whole", "no tokens"])
@pytest.mark.parametrize("op", [*BAD, *QUERIES])
def test_members_past_struct_size_are_zero(exported: Export, op: str, changes: dict):
    """A shorter struct is one whose further members are 0, whatever lies behind it."""
    if "decode" in op:
        changes = {"N": 0} if changes else {}
    whole, full = struct_of(op), of_op(op, **changes)
    sizes = range(8, ctypes.sizeof(whole) + 1, 8)
    zeroed = [{name: x for name, x in full["args"].items() if getattr(whole, name).offset < size} for size in sizes]
    shorter = call(exported, [full | {"struct_size": size} for size in sizes], parameters="recurrence_kernel=20;")
    longer = call(exported, [full | {"args": args} for args in zeroed], parameters="recurrence_kernel=20;")
    assert shorter.outcomes == longer.outcomes
    assert [r | {"image": 0} for r in shorter.launches] == [r | {"image": 0} for r in longer.launches]
    accepted = shorter.statuses.count("SUCCESS")
    assert (accepted > 1) == (bool(changes) or op in QUERIES) and 1 <= accepted < len(sizes)


LARGEST = [
    ("prefill_f32", {"B": 1, "H": 1, "T": 2**30 - 32}, 3),
    ("prefill_f32", {"B": 1, "H": 2**25 - 1, "T": 32}, 3),
    ("prefill_f32", {"B": 2**25 - 1, "H": 1, "T": 0}, 1),
    ("decode_bf16", {"slots": 2**31 - 1, "slot_pitch": 2**30}, 1),
    ("decode_bf16", {"N": 2**25 - 1, "H": 1}, 1),
]


@pytest.mark.parametrize(("op", "sizes", "launches"), LARGEST, ids=str)
def test_the_largest_sizes_are_taken(trapping: Export, op: str, sizes: dict, launches: int):
    asked = task(op, **sizes)
    if op == "prefill_f32":
        (query,) = call(trapping, [of_op("prefill_f32_workspace", **sizes)]).outcomes
        # q g and k g [C, K], Aqk [C, C], the decay [K] and the state [V, K] of every chunk, in float32
        chunks = sizes["B"] * sizes["H"] * -(-sizes["T"] // 32)
        assert query["bytes"] == chunks * (2 * 32 * 64 + 32 * 32 + 64 + 64 * 64) * 4
        asked["args"] |= {"workspace_bytes": query["bytes"], "final_state": 0xB0000}
    found = call(trapping, [asked], parameters=parameter_counts([sample_decode(64, 64, "none", 90)]))
    assert found.statuses == ["SUCCESS"] and len(found.launches) == launches


@pytest.mark.parametrize("op", ["prefill_f32", "prefill_bf16"])
def test_workspace_query(exported: Export, op: str):
    """What the Python functions allocate, and the first size that is enough; it reads no pointer."""
    query = {"op": f"{op}_workspace"}
    query["args"] = {name: value for name, value in task(op)["args"].items() if name in "BHTKVC"}
    found, refused = call(exported, [query, query | {"no_result": True}]).outcomes
    problem, _ = python_prefill(op, query["args"])
    assert (found["status"], found["bytes"]) == ("SUCCESS", prefill_workspace(problem).buffer.nbytes)
    assert refused["status"] == "ERROR_NULL_POINTER"
    assert refused["message"] == "bytes: got NULL, wanted where to write the number"
    tight = [task(op, workspace_bytes=found["bytes"] - missing) for missing in (0, 1)]
    assert call(exported, tight).statuses == ["SUCCESS", "ERROR_WORKSPACE"]


def python_prefill(op: str, args: dict) -> tuple[Problem, Tensors]:
    """The Python function's call with the same sizes."""
    precision = "tf32x3" if op == "prefill_f32" else "tf32"
    return prefill_call(op, SIZE, precision=precision, B=args["B"], H=args["H"], T=args["T"])


def prefill_workspace(problem: Problem) -> Workspace:
    """That of the Python function; in bfloat16 `w` lies there, too."""
    if problem.dtype != torch.float32:
        return Workspace.allocate(layout(problem), torch.device("meta"))
    result = {"w": torch.empty(0, device="meta")}
    return Workspace.allocate(prefill_layout(problem, True), torch.device("meta"), result)


# ---- what is launched ----------------------------------------------------------------------------------------------------


NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
"""By the type of a kernel's parameter; others are pointers."""


def check_launch(record: dict, launch: Launch, addresses: dict[str, int]) -> None:
    """A recorded launch against the one of the Python function: grid, block, every number and every address given."""
    assert record["name"] == launch.kernel.__name__
    assert (record["grid"], record["block"]) == (launch.ctas, 32 * launch.num_warps)
    assert (record["attributes"], record["attribute"]) == ((1, 6) if launch.overlaps else (0, 0))
    given = {p.name: x for p, x in zip(launch.kernel.params, launch.arguments)}
    parameters = parameters_of(launch)
    own, scratch = record["values"][: len(parameters)], record["values"][len(parameters) :]
    assert scratch == [0] * cubins.SCRATCH
    for (name, kind), bits in zip(parameters, own, strict=True):
        if kind in NUMBERS:  # eight bytes from where it lies were recorded
            got = NUMBERS[kind].from_buffer_copy(struct.pack("<Q", bits)).value
            assert got == (pytest.approx(given[name]) if kind == "fp32" else given[name]), name
        elif name in addresses:
            assert bits == addresses[name], name


def parameter_counts(wanted: list[Launch]) -> str:
    """As the stand-in takes them."""
    return "".join(f"{x.kernel.__name__}={len(parameters_of(x)) + cubins.SCRATCH};" for x in wanted)


STATES = {"initial_state": 0xA0000, "final_state": 0xB0000}
SHAPES = [
    {"B": 1, "H": 1, "T": 1},
    {"B": 2, "H": 3, "T": 70},
    {"B": 1, "H": 2, "T": 100_000},
    {"B": 4, "H": 32, "T": 16384},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("op", ["prefill_f32", "prefill_bf16"])
def test_prefill_launches_what_python_does(exported: Export, op: str, states: bool, shape: dict):
    bf16 = op == "prefill_bf16"
    # the first call kernel by kernel, the second as a graph, the third as the same graph
    asked = task(op, stream=0x5000, repeats=3, **shape, **(STATES if states else {}))
    args = asked["args"]
    problem, t = python_prefill(op, args)
    outputs = prefill_outputs(problem, t)
    if states:
        outputs.allocate("final_state", Result((problem.B, 1, 64, 64), torch.float32))
        problem, t = replace(problem, has_initial_state=True), replace(t, initial_state=outputs["final_state"])
    want = prefill(problem, t, 90, outputs)
    found = call(exported, [asked], parameters=parameter_counts(want))
    assert found.statuses == ["SUCCESS"]
    assert found.counts == {"load": len(want), "graph": 1, "set": 0, "destroy": 0}
    assert [record["graph"] for record in found.launches] == [0] * len(want) + [*range(1, len(want) + 1)] * 2
    addresses = {name: args[name] for name in ("q", "k", "v", "g", "beta", "o", "w", "u", *STATES) if name in args}
    workspace = prefill_workspace(problem)
    parts = {name: workspace[name] for name in ("qg", "kg", "Aqk", "decay", *(("w",) if bf16 else ("h",)))}
    parts |= {"inverse": workspace["Akk_inv"]} if bf16 else {}
    addresses |= {name: args["workspace"] + x.storage_offset() * x.element_size() for name, x in parts.items()}
    if not bf16:
        addresses["v_new"] = args["o"]
    for record, launch in zip(found.launches, want * 3, strict=True):
        assert record["stream"] == 0x5000
        check_launch(record, launch, addresses)


@pytest.mark.parametrize("shape", [{"N": 1, "H": 1}, {"N": 5, "H": 3}, {"N": 300, "H": 32}], ids=str)
@pytest.mark.parametrize("gap", [0, 32])
def test_decode_launches_what_python_does(exported: Export, gap: int, shape: dict):
    N, H, slots, (K, V, _) = shape["N"], shape["H"], 400, SIZE
    pitch = H * K * V + gap
    asked = task("decode_bf16", **shape, slots=slots, slot_pitch=pitch if gap else 0)
    args, want = asked["args"], sample_decode(K, V, "none", 90, N, H, slots, pitch)
    found = call(exported, [asked], parameters=parameter_counts([want]))
    assert found.statuses == ["SUCCESS"]
    given = {name: args[name] for name in ("q", "k", "v", "g", "beta", "o")}
    given |= {"initial_state": args["states"], "final_state": args["states"], "starts": args["state_indices"]}
    (record,) = found.launches
    # one token a sequence: how many more would be looked at does not count
    arguments = [1 if p.name == "most_tokens" else x for p, x in zip(want.kernel.params, want.arguments)]
    check_launch(record, replace(want, arguments=tuple(arguments)), given)


def test_empty_calls_need_no_memory_and_carry_states_on(exported: Export):
    sizes = {"K": 64, "V": 64}
    empty = [{"op": "decode_bf16", "args": sizes | x} for x in ({"N": 0, "H": 2}, {"N": 2, "H": 0})]
    more = [{"B": 0, "H": 2, "T": 5}, {"B": 1}]
    empty += [{"op": op, "args": sizes | {"C": 32} | x} for x in more for op in ("prefill_f32", "prefill_bf16")]
    found = call(exported, [*empty, task("prefill_f32", T=0, **STATES)])
    assert found.statuses == ["SUCCESS"] * 7
    assert [record["name"] for record in found.launches] == ["recurrence_kernel"]


def graphs_of(records: list[dict]) -> list[int]:
    """1 for every prefill in float32 that was launched as a graph, 0 for the others, whose kernels were launched one by one."""
    calls = [records[i : i + 3] for i in range(0, len(records), 3)]
    for one in calls:
        assert [record["name"] for record in one] == ["prepare_kernel", "recurrence_kernel", "output_kernel"]
        assert [record["graph"] for record in one] in ([0, 0, 0], [1, 2, 3])
    return [int(one[0]["graph"] > 0) for one in calls]


def other_calls(count: int) -> list[dict]:
    return [task("prefill_f32", o=0x90000 + 0x1000 * i, T=100 + i) for i in range(count)]


def check_outputs(records: list[dict], calls: list[dict]) -> None:
    """Every call's last kernel wrote to that call's `o`."""
    for record, one in zip(records[2::3], calls, strict=True):
        assert one["args"]["o"] in record["values"]


def test_calls_that_take_turns_have_a_graph_each(exported: Export):
    calls = other_calls(8) * 3
    found = call(exported, calls, parameters="output_kernel=20;")
    assert graphs_of(found.launches) == [0] * 8 + [1] * 16
    assert found.counts == {"load": 3, "graph": 8, "set": 0, "destroy": 0}
    check_outputs(found.launches, calls)


def test_beyond_eight_the_graph_used_longest_ago_takes_new_arguments(exported: Export):
    """The first eight are remembered, the next eight each make a graph in the place of one of them, later ones make none."""
    calls = other_calls(12) * 2
    found = call(exported, [*calls, calls[-1]], parameters="output_kernel=20;")
    assert graphs_of(found.launches) == [0] * 8 + [1] * 17
    assert found.counts == {"load": 3, "graph": 8, "set": 3 * 8, "destroy": 0}
    check_outputs(found.launches, [*calls, calls[-1]])


def test_every_stream_has_a_graph_and_the_oldest_goes(exported: Export):
    streams = [0x1000 * (i + 1) for i in range(80)]
    streams += [*streams[-2:], streams[0]]
    found = call(exported, [task("prefill_f32", stream=stream, repeats=3) for stream in streams])
    assert graphs_of(found.launches) == [0, 1, 1] * 80 + [1] * 6 + [0, 1, 1]
    assert [record["stream"] for record in found.launches[:: 3 * 3]] == streams
    assert found.counts == {"load": 3, "graph": 81, "set": 0, "destroy": 81 - 64}


@pytest.mark.parametrize("places", [1, 200])
def test_places_of_destroyed_contexts_come_back(exported: Export, places: int):
    """Every new context has graphs, however many came before it, where the driver gives out their addresses again or not. The
    stand-in ends the process if a graph of a context that is gone is touched. One context lives on and keeps its graph."""
    lives = task("prefill_f32") | {"context": 0}
    calls = [task("prefill_f32", repeats=3) | {"context": 1 + i % places, "destroys": True} for i in range(200)]
    found = call(exported, [lives, *(x for one in calls for x in (one, lives))])
    assert graphs_of(found.launches) == [0] + [0, 1, 1, 1] * 200
    assert found.counts == {"load": 3, "graph": 201, "set": 0, "destroy": 0}


def test_what_is_captured_is_kernels(exported: Export):
    found = call(exported, [task("prefill_f32", repeats=4)], capturing=1)
    assert graphs_of(found.launches) == [0] * 4 and found.counts["graph"] == 0


@pytest.mark.parametrize(
    "function",
    [
        *("cuCtxGetId", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuGraphCreate"),
        *("cuGraphAddKernelNode", "cuGraphInstantiateWithFlags", "cuGraphExecKernelNodeSetParams", "cuGraphLaunch"),
    ],
)
def test_without_graphs_kernels_are_launched_one_by_one(exported: Export, function: str):
    calls = other_calls(9) * 2
    found = call(exported, calls, parameters="output_kernel=20;", failing=function)
    assert found.statuses == ["SUCCESS"] * 18
    assert graphs_of(found.launches) == [0] * 8 + ([1] * 8 + [0] * 2 if "SetParams" in function else [0] * 10)
    check_outputs(found.launches, calls)


# ---- architectures, failures, threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "shared", "status"),
    [
        (90, 232_448, "SUCCESS"),
        (89, 101_376, "SUCCESS"),
        (89, 1_000, "ERROR_ARCHITECTURE"),
        (86, 101_376, "ERROR_ARCHITECTURE"),
        (80, 166_912, "ERROR_ARCHITECTURE"),
        (91, 232_448, "ERROR_ARCHITECTURE"),
        (100, 232_448, "ERROR_ARCHITECTURE"),
    ],
)
@pytest.mark.parametrize("op", BAD)
def test_kernels_are_picked_by_architecture(exported: Export, op: str, arch: int, shared: int, status: str):
    if op == "decode_bf16" and shared == 1_000:
        status = "SUCCESS"  # it needs hardly any
    found = call(exported, [task(op)] * 2, arch=arch, shared=shared)
    assert found.statuses == [status] * 2
    if status == "SUCCESS":
        assert len(found.launches) == 2 * found.counts["load"] > 0
    else:
        assert found.launches == []
        message = f"device 0: got sm_{arch} with {shared} bytes of shared memory, wanted a GPU of: sm_89, sm_90"
        assert found.outcomes[0]["message"] == message


@pytest.mark.parametrize(
    "function",
    [
        *("cuCtxGetDevice", "cuDeviceGetAttribute", "cuLibraryLoadData", "cuLibraryGetKernel"),
        *("cuKernelSetAttribute", "cuLaunchKernelEx"),
    ],
)
def test_a_failure_of_cuda_is_told(exported: Export, function: str):
    found = call(exported, [task("prefill_f32")], failing=function)
    (outcome,) = found.outcomes
    message = f"{function}: error 400, invalid resource handle"
    assert (outcome["status"], outcome["message"]) == ("ERROR_CUDA", message)
    assert found.launches == []


def test_an_old_driver_is_told(exported: Export):
    old = exported.folder.parent / "old" / "libcuda.so.1"
    (outcome,) = call(exported, [task("decode_bf16")], driver=old).outcomes
    assert outcome["status"] == "ERROR_DRIVER"
    assert outcome["message"] == "libcuda.so.1 has no cuCtxGetDevice; CUDA 12.0 has"


def test_threads_load_each_kernel_once_and_keep_their_own_errors(exported: Export):
    good = [task(op, repeats=100) for op in BAD] * 3
    bad = [task("prefill_f32", T=-i, repeats=100) for i in range(1, 5)]
    found = call(exported, good + bad, threads=True)
    assert found.statuses == ["SUCCESS"] * len(good) + ["ERROR_SIZE"] * len(bad)
    messages = [""] * len(good) + [f"T: got {-i}" for i in range(1, 5)]
    assert [one["message"].split(",")[0] for one in found.outcomes] == messages
    assert found.counts["load"] == 6 and len(found.launches) == 3 * 100 * (3 + 2 + 1)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(exported: Export, sanitizer: str, tmp_path: Path):
    """The C files themselves, without CMake, under GCC's sanitizers; the first call of each thread meets the others'."""
    sources = [*exported.folder.glob("*.c"), HERE / "threads.c"]
    options = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover", "-g", "-O1", "-D_POSIX_C_SOURCE=200809L")
    driver = tmp_path / "libcuda.so.1"
    compile_c(driver, HERE / "fake_driver.c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *options[:3])
    linked = (*sources[1:], "-I", exported.folder, *options, "-ldl", "-lpthread", "-lm")
    compile_c(tmp_path / "threads", sources[0], *linked)
    run(tmp_path / "threads", env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "ASAN_OPTIONS": "detect_leaks=0"})


# ---- exporting -----------------------------------------------------------------------------------------------------------


STEP = Wanted("decode_bf16", "decode", 64, 64, None, "none", None)


def test_unknown_parameters_are_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cubins, "SCRATCH", 3)
    with pytest.raises(RuntimeError, match=r"^decode_bf16_decode_k64_none: the compiled kernel takes"):
        compile_kernel(STEP, 90)


def test_kernels_are_compiled_for_calls_of_any_size():
    """Every integer that a kernel is specialised for is a multiple of 16 in the sample call, as it is in all others."""
    call = prefill_call("prefill_f32", PREFILL_SIZES[0], precision="tf32x3")
    for launch in [*prefill(*call, 90, prefill_outputs(*call)), sample_decode(64, 64, "none", 90)]:
        for param, x in zip(launch.kernel.params, launch.arguments):
            if isinstance(x, int) and not param.do_not_specialize:
                assert x % 16 == 0, param.name


OTHERS = {name: toolchain.folder for name, toolchain in toolchains().items() if toolchain.folder}


@pytest.mark.parametrize("toolchain", OTHERS)
def test_other_toolchains_export_too(toolchain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The installed one made `exported`."""
    monkeypatch.setenv("PYTHONPATH", str(OTHERS[toolchain]))
    choice = ["--op=decode_bf16", "--size=64,64,32", "--gate=none"]
    said = export(tmp_path / "out", "--arch=sm_86", "--arch=sm_120", *choice)
    assert "compiling 1 kernel for sm_86, sm_120" in said
    build(tmp_path / "out" / "build", tmp_path / "out")
    assert (tmp_path / "out" / "build" / "libflashdelta.so").exists()


# ---- the example ---------------------------------------------------------------------------------------------------------


def test_the_example_builds_and_notices_wrong_results(exported: Export, tmp_path: Path):
    """Beside the stand-in, which computes nothing: every result is off, and the program says so. This export has no kernels
    for the example's sizes, so those are made smaller."""
    source = tmp_path / "source"
    source.mkdir()
    text = (ROOT / "examples" / "c" / "kda.c").read_text()
    assert text.count("K = 128, V = 128, C = 64") == 1
    small = text.replace("K = 128, V = 128, C = 64", "K = 64, V = 64, C = 32").replace("T = 1000", "T = 50")
    (source / "kda.c").write_text(small)
    (source / "CMakeLists.txt").write_text((ROOT / "examples" / "c" / "CMakeLists.txt").read_text())
    driver = exported.folder.parent / "libcuda.so.1"
    definitions = (f"-DFLASHDELTA={exported.folder}", f"-DCUDA_INCLUDE={CUDA_INCLUDE}", f"-DCUDA_DRIVER={driver}")
    build(tmp_path / "build", source, *definitions)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver.parent)}
    done = subprocess.run([tmp_path / "build" / "kda"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"flashdelta {flashdelta.__version__}, H 4, T 50, K 64, V 64"
    assert [line.split()[0] for line in lines[1:4]] == ["prefill,", "prefill,", "decode,"]
    assert all(line.endswith(": WRONG") for line in lines[1:4])
    assert re.fullmatch(r"a call of fd_prefill_f32 costs \d+\.\d\d us of host time", lines[4])
