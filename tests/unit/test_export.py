"""The C library on a machine without a GPU: it builds, its interface is what the header says, and beside a stand-in for the
CUDA driver it launches what the Python functions would launch, and nothing after an error."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashdelta
from flashdelta.kernels.stages.launch import layout
from flashdelta.kernels.triton.build import prefill, prefill_layout
from flashdelta.problem.problem import Problem, Tensors
from flashdelta.program.launch import Launch
from flashdelta.program.workspace import SLOT, Slots, Workspace, address_of
from flashdelta.tools.export import bindings, cubins
from flashdelta.tools.export.cubins import parameters_of, prefill_call, prefill_outputs, sample_decode

from ..support.exports import CUDA_INCLUDE, HERE, ROOT, SIZE, Export, build, call, compile_c, run, small_export, task
from ..support.shared import folder_of_run

pytestmark = [pytest.mark.slow, pytest.mark.long]

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
    script = "import sys; sys.path.insert(0, sys.argv[1]); import flashdelta_ctypes; "
    script += "print(flashdelta_ctypes.Library(sys.argv[2]).version)"
    version = run(sys.executable, "-I", "-S", "-c", script, exported.folder, exported.shared)
    assert version.strip() == flashdelta.__version__


@pytest.mark.parametrize("language", ["c90", "c++17"])
def test_header_compiles(exported: Export, language: str, tmp_path: Path):
    source = tmp_path / ("use.cpp" if "++" in language else "use.c")
    source.write_text(
        '#include <cuda.h>\n#include "flashdelta.h"\nint used(void);\nint used(void) { return FD_SUCCESS; }\n'
    )
    compile_c(tmp_path / "use.o", source, "-I", exported.folder, "-c", language=language)


# ---- errors: nothing is launched -----------------------------------------------------------------------------------------

Refusals = dict[str, tuple[dict | None, str, str]]
"""Changes in a call that is right, the status, and how the message starts."""


def missing(*names: str) -> Refusals:
    return {name: ({name: 0}, "ERROR_NULL_POINTER", f"{name} must be device memory; got NULL") for name in names}


def unaligned(*names: str) -> Refusals:
    said = "must be at a multiple of 16 bytes; got 0x7008"
    return {f"{name} unaligned": ({name: 0x7008}, "ERROR_ALIGNMENT", f"{name} {said}") for name in names}


MOST = 2**31 - 1
ROWS = 2**25 - 1
SIZES = "(64, 64, 32), (64, 64, 64), (128, 128, 32), (128, 128, 64)"
PITCH = "slot_pitch must be 0 or a multiple of 16, at least H * V * K ="
BYTES = f"slots * slot_pitch must be at most {(2**63 - 1) // 4}; got"
BAD_PREFILL = {
    "no args": (None, "ERROR_NULL_POINTER", "args must be an fd_prefill_args; got NULL"),
    "K": ({"K": 32}, "ERROR_UNSUPPORTED", f"(K, V, C) must be one of {SIZES}; got (32, 64, 32)"),
    "B": ({"B": -1}, "ERROR_SIZE", f"B must be from 0 to {MOST}; got -1"),
    "T": ({"T": MOST}, "ERROR_SIZE", f"T must be from 0 to {MOST - 32}; got {MOST}"),
    "heads": (
        {"B": MOST, "H": MOST, "T": MOST - 32},
        "ERROR_SIZE",
        f"B * H must be at most {ROWS}, and so must all chunks; got {MOST**2} with {2**26 - 1} chunks each",
    ),
    "gate": ({"gate": 2}, "ERROR_OPTION", "gate must be FD_GATE_NONE or FD_GATE_LOGSIGMOID; got 2"),
    "scale": ({"scale": float("inf")}, "ERROR_OPTION", "scale must be a finite number; got inf"),
    **missing("q", "k", "v", "g", "beta", "o", "workspace"),
    **unaligned("q", "k", "v", "g", "beta", "o", "workspace", "initial_state", "final_state"),
    "workspace": ({"workspace_bytes": 100}, "ERROR_WORKSPACE", "workspace_bytes must be at least "),
    "other gate": ({"gate": 1}, "ERROR_NOT_EXPORTED", "no kernels for (K, V, C) = (64, 64, 32), gate 1, precision "),
}
BAD_DECODE = {
    "no args": (None, "ERROR_NULL_POINTER", "args must be an fd_decode_args; got NULL"),
    "K": ({"K": 32}, "ERROR_UNSUPPORTED", "(K, V) must be (64, 64) or (128, 128); got (32, 64)"),
    "H": ({"H": 2**63 - 1}, "ERROR_SIZE", f"H must be from 0 to {ROWS}; got {2**63 - 1}"),
    "programs": ({"N": 2**25}, "ERROR_SIZE", f"N must be at most {ROWS // 3} with 3 heads; got {2**25}"),
    "small pitch": ({"slot_pitch": 16}, "ERROR_OPTION", f"{PITCH} 12288; got 16"),
    "lowest pitch": ({"H": 0, "slot_pitch": -(2**63)}, "ERROR_OPTION", f"{PITCH} 0; got {-(2**63)}"),
    "pool": ({"slots": 2, "slot_pitch": 2**60}, "ERROR_SIZE", f"{BYTES} 2 * {2**60}"),
    "large pool": ({"slots": MOST, "N": 0, "H": ROWS}, "ERROR_SIZE", f"{BYTES} {MOST} * {ROWS * 4096}"),
    **missing("q", "k", "v", "g", "beta", "states", "state_indices", "o"),
    "unaligned": ({"states": 0x7004}, "ERROR_ALIGNMENT", "states must be at a multiple of 16 bytes; got 0x7004"),
    "other size": ({"K": 128, "V": 128}, "ERROR_NOT_EXPORTED", "no kernels for "),
}
BAD = {
    "prefill_f32": BAD_PREFILL | missing("w", "u"),
    "prefill_bf16": BAD_PREFILL | {"w": ({"w": 0x7000}, "ERROR_NULL_POINTER", "w must be NULL")},
    "decode_bf16": BAD_DECODE,
}


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


@pytest.mark.parametrize("op", [*BAD, "prefill_f32_workspace"])
def test_sizes_that_no_struct_had_are_refused(exported: Export, op: str):
    whole = ctypes.sizeof(bindings.DecodeArgs if "decode" in op else bindings.PrefillArgs)
    sizes, asked = (0, 4, 12, whole - 4, whole + 8, 2**64 - 8), task(op.removesuffix("_workspace")) | {"op": op}
    found = call(exported, [asked | {"struct_size": size} for size in sizes])
    wanted = [f"struct_size must be a multiple of 8 from 8 to {whole}; got {size}" for size in sizes]
    assert found.statuses == ["ERROR_STRUCT"] * len(sizes) and found.launches == []
    assert [outcome["message"] for outcome in found.outcomes] == wanted


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
        (query,) = call(trapping, [task("prefill_f32", **sizes) | {"op": "prefill_f32_workspace"}]).outcomes
        # q g and k g [C, K], Aqk [C, C], the decay [K] and the state [V, K] of every chunk, in float32
        chunks = sizes["B"] * sizes["H"] * -(-sizes["T"] // 32)
        assert query["bytes"] == chunks * (2 * 32 * 64 + 32 * 32 + 64 + 64 * 64) * 4
        asked["args"] |= {"workspace_bytes": query["bytes"], "final_state": 0xB0000}
    found = call(trapping, [asked], parameters=parameter_counts([sample_decode(64, 64, "none", 90)]))
    assert found.statuses == ["SUCCESS"] and len(found.launches) == launches


def python_prefill(op: str, args: dict) -> tuple[Problem, Tensors]:
    """The Python function's call with the same sizes."""
    precision = "tf32x3" if op == "prefill_f32" else "tf32"
    return prefill_call(op, SIZE, precision=precision, B=args["B"], H=args["H"], T=args["T"])


def prefill_workspace(problem: Problem, memory: Slots) -> Workspace:
    """That of the Python function; in bfloat16 `w` lies there, too."""
    if problem.dtype != torch.float32:
        return Workspace.allocate(layout(problem), memory)
    result = {"w": memory.new((0,), torch.float32)}
    return Workspace.allocate(prefill_layout(problem, True), memory, result)


# ---- what is launched ----------------------------------------------------------------------------------------------------


NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
"""Per type of a kernel's parameter; others are pointers."""


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
        if given.get(name.partition("_")[0], 0) is None:  # strides of an absent tensor, which nothing reads
            continue
        if kind in NUMBERS:  # eight bytes from where it lies were recorded
            got = NUMBERS[kind].from_buffer_copy(struct.pack("<Q", bits)).value
            assert got == (pytest.approx(given[name]) if kind == "fp32" else given[name]), name
        elif name in addresses:
            assert bits == addresses[name], name


def parameter_counts(wanted: list[Launch]) -> str:
    """As the stand-in takes them."""
    return "".join(f"{x.kernel.__name__}={len(parameters_of(x)) + cubins.SCRATCH};" for x in wanted)


STATES = {"initial_state": 0xA0000, "final_state": 0xB0000}
SHAPES = [dict(zip("BHT", sizes)) for sizes in ((1, 1, 1), (2, 3, 70), (1, 2, 100_000), (4, 32, 16384))]


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
        outputs["final_state"] = t.memory.new((problem.B, 1, 64, 64), torch.float32)
        problem, t = replace(problem, has_initial_state=True), replace(t, initial_state=outputs["final_state"])
    want = prefill(problem, t, 90, outputs)
    found = call(exported, [asked], parameters=parameter_counts(want))
    assert found.statuses == ["SUCCESS"]
    assert found.counts == {"load": len(want), "graph": 1, "set": 0, "destroy": 0}
    assert [record["graph"] for record in found.launches] == [0] * len(want) + [*range(1, len(want) + 1)] * 2
    addresses = {name: args[name] for name in ("q", "k", "v", "g", "beta", "o", "w", "u", *STATES) if name in args}
    workspace = prefill_workspace(problem, t.memory)
    parts = {name: workspace[name] for name in ("qg", "kg", "Aqk", "decay", *(("w",) if bf16 else ("h",)))}
    parts |= {"inverse": workspace["Akk_inv"]} if bf16 else {}
    addresses |= {name: args["workspace"] + address_of(x) % SLOT for name, x in parts.items()}
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
    # one token per sequence: how many more would be looked at does not count
    arguments = [1 if p.name == "most_tokens" else x for p, x in zip(want.kernel.params, want.arguments)]
    check_launch(record, replace(want, arguments=tuple(arguments)), given)


def test_empty_calls_need_no_memory_and_carry_states_on(exported: Export):
    sizes = {"K": 64, "V": 64}
    empty = [{"op": "decode_bf16", "args": sizes | x} for x in ({"N": 0, "H": 2}, {"N": 2, "H": 0})]
    empty += [{"op": "prefill_f32", "args": sizes | {"C": 32} | x} for x in ({"B": 0, "H": 2, "T": 5}, {"B": 1})]
    found = call(exported, [*empty, task("prefill_f32", T=0, **STATES)])
    assert found.statuses == ["SUCCESS"] * 5
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


def test_graphs_take_turns_and_beyond_eight_take_new_arguments(exported: Export):
    """The first eight are remembered, the next each make a graph in the place of one of them, later ones make none."""
    calls = [*other_calls(8) * 2, *other_calls(12)[8:] * 2]
    found = call(exported, calls, parameters="output_kernel=20;")
    assert graphs_of(found.launches) == [0] * 8 + [1] * 16
    assert found.counts == {"load": 3, "graph": 8, "set": 3 * 4, "destroy": 0}
    check_outputs(found.launches, calls)


def test_every_stream_has_a_graph_and_the_oldest_goes(exported: Export):
    streams = [0x1000 * (i + 1) for i in range(80)]
    streams += [*streams[-2:], streams[0]]
    found = call(exported, [task("prefill_f32", stream=stream, repeats=3) for stream in streams])
    assert graphs_of(found.launches) == [0, 1, 1] * 80 + [1] * 6 + [0, 1, 1]
    assert found.counts == {"load": 3, "graph": 81, "set": 0, "destroy": 81 - 64}


@pytest.mark.parametrize("places", [1, 200])
def test_places_of_destroyed_contexts_come_back(exported: Export, places: int):
    """Where the driver gives out addresses of contexts again, or not. The stand-in ends the process if a graph of a context
    that is gone is touched. One context lives on and keeps its graph."""
    lives = task("prefill_f32") | {"context": 0}
    calls = [task("prefill_f32", repeats=3) | {"context": 1 + i % places, "destroys": True} for i in range(200)]
    found = call(exported, [lives, *(x for one in calls for x in (one, lives))])
    assert graphs_of(found.launches) == [0] + [0, 1, 1, 1] * 200


@pytest.mark.parametrize("function", ["", "cuCtxGetId", "cuGraphInstantiateWithFlags", "cuGraphLaunch"])
def test_without_graphs_kernels_are_launched_one_by_one(exported: Export, function: str):
    """Where the driver has none, or the caller captures one."""
    given = {"failing": function} if function else {"capturing": 1}
    found = call(exported, other_calls(9) * 2, parameters="output_kernel=20;", **given)
    assert found.statuses == ["SUCCESS"] * 18 and graphs_of(found.launches) == [0] * 18
    check_outputs(found.launches, other_calls(9) * 2)


# ---- architectures, failures, threads ------------------------------------------------------------------------------------


ARCHITECTURES = [(90, 232_448, True), (89, 101_376, True), (86, 101_376, False)]


@pytest.mark.parametrize(("arch", "shared", "runs"), ARCHITECTURES)
def test_kernels_are_picked_by_architecture(exported: Export, arch: int, shared: int, runs: bool):
    found = call(exported, [task("prefill_f32")] * 2, arch=arch, shared=shared)
    assert found.statuses == ["SUCCESS" if runs else "ERROR_ARCHITECTURE"] * 2
    assert len(found.launches) == 2 * found.counts["load"] == 6 * runs
    message = f"device 0 must be a GPU of: sm_89, sm_90; got sm_{arch} with {shared} bytes of shared memory"
    assert found.outcomes[0]["message"] == ("" if runs else message)


@pytest.mark.parametrize(
    "function", ["cuDeviceGetAttribute", "cuLibraryLoadData", "cuKernelSetAttribute", "cuLaunchKernelEx"]
)
def test_a_failure_of_cuda_is_told(exported: Export, function: str):
    found = call(exported, [task("prefill_f32")], failing=function)
    (outcome,) = found.outcomes
    wanted = ("ERROR_CUDA", f"{function}: error 400, invalid resource handle")
    assert (outcome["status"], outcome["message"]) == wanted and found.launches == []
    old = exported.folder.parent / "old" / "libcuda.so.1"
    (outcome,) = call(exported, [task("decode_bf16")], driver=old).outcomes
    wanted = ("ERROR_DRIVER", "libcuda.so.1 has no cuCtxGetDevice; CUDA 12.0 has")
    assert (outcome["status"], outcome["message"]) == wanted


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
    first, *checks, last = done.stdout.splitlines()
    assert first == f"flashdelta {flashdelta.__version__}, H 4, T 50, K 64, V 64"
    assert len(checks) == 3 and all(line.endswith(": WRONG") for line in checks) and "us of host time" in last
