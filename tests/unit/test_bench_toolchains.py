"""`bench toolchains` without a GPU: the half that compiles, and the other on a driver that only pretends."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler, make_backend
from triton.runtime import jit
from triton.runtime.driver import driver

from flashdelta.program.launch import Launch
from flashdelta.tools.bench import report, toolchains
from flashdelta.tools.bench.contenders import Setup
from flashdelta.tools.bench.runner import run
from flashdelta.tools.bench.timing import Effort
from flashdelta.tools.bench.toolchains import META, ROWS, ToolchainRow, call_of, compile_rows, key_of
from flashdelta.tools.bench.toolchains import specialized as source
from flashdelta.tools.bench.views import VIEWS
from flashdelta.tools.bench.workloads import decode_row

from ..support.timers import FakeTimer

SMALL = ToolchainRow(decode_row(2, H=2, HV=2).call, "decode", backend="triton")
TARGET = GPUTarget("cuda", 90, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("toolchains")
    compile_rows([SMALL], found)
    return found


@pytest.fixture(scope="module")
def launches():
    with torch.no_grad():
        return {row.name: call_of(row, META).launches for row in ROWS}


def launched(launch):
    """The source that Triton makes of the launch's arguments."""
    backend, kernel = make_backend(TARGET), launch.kernel
    named = {**launch.constants, **launch.options()}
    binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*launch.arguments, **named)
    found = kernel._pack_args(backend, named, bound, specialization, options)
    return type(source(launch))(kernel, *found[1:])


def key(launch):
    return key_of(source(launch), launch.options())


# --- the half that compiles ---


def test_rows_cover_the_hot_kernels(launches):
    names = {
        row.name: [launch.kernel.__name__.removesuffix("_kernel") for launch in launches[row.name]] for row in ROWS
    }
    assert names["prefill T8192 H64"] == names["prefill T8192 H96"] == ["prepare_steps", "recurrence"]
    assert names["prefill T8192 H64 softplus"] == ["prepare_steps", "recurrence"]
    assert names["prefill T32768 H4"] == ["prepare", "transitions", "compose", "recurrence"]
    assert names["train B1 T8192 H32"] == ["prepare", "recurrence", "reverse", "wy", "intra", "gate_sums"]
    assert names["triton prefill T8192 H64"] == ["prepare_bounded", "recurrence"]
    stream_k = {name: x[-1].constants["STREAM_K"] for name, x in launches.items() if name.startswith("prefill")}
    assert [name for name, x in stream_k.items() if x] == ["prefill T8192 H96", "prefill packed 6 uneven H96"]


def test_a_key_is_that_of_the_launch(launches):
    for found in launches.values():
        for launch in found:
            assert key_of(launched(launch), launch.options()) == key(launch)


def test_a_key_tells_kernels_apart_and_no_sizes(launches):
    first = launches["prefill T8192 H64"]
    assert key(first[0]) == key(launches["prefill T8192 H96"][0])
    assert len({key(launch) for found in launches.values() for launch in found}) == 22
    assert "NVMMA" not in key(first[1]) and "tensordesc<bf16[64,64]>" in key(first[1])


def test_the_folder_holds_machine_code_and_what_it_is(folder):
    manifest = toolchains.load_manifest(folder)
    (launch,) = call_of(SMALL, META).launches
    found = manifest["kernels"][key(launch)]
    assert (folder / found["file"]).read_bytes()[:4] == b"\x7fELF"
    assert found["entry"] == "decode_kernel" and found["registers"] > 0 and found["traits"]["num_warps"] == 1
    assert found["traits"]["parameters"][:2] == [".u64", ".u64"]


@pytest.mark.parametrize("damage", ["manifest", "text", "file"])
def test_a_folder_that_does_not_fit_is_refused(folder, tmp_path, damage):
    manifest = json.loads((folder / toolchains.MANIFEST).read_text())
    if damage == "text":
        manifest["text"] = "other"
    if damage != "manifest":
        (tmp_path / toolchains.MANIFEST).write_text(json.dumps(manifest))
    said = {"manifest": "without a manifest.json", "text": "wanted those of this package", "file": "without decode_"}
    with pytest.raises(ValueError, match=f"^folder: got .*{said[damage]}"):
        toolchains.load_manifest(tmp_path)


# --- the half that measures ---


@pytest.fixture
def pretended(monkeypatch, folder):
    """A driver whose kernels write `o`: 1, or for machine code in `values` what that says, call by call. The loads, and the
    launches."""
    (launch,) = call_of(SMALL, META).launches
    compiled = compiler.compile(source(launch), target=TARGET, options=launch.options())
    state = SimpleNamespace(values={}, loads=[], runs=set(), compiled=compiled)

    def load(name, cubin, shared, device):
        state.loads.append((name, cubin, shared))
        return None, cubin, 42, 3, 1024

    def launcher(src, metadata):
        def run(x, y, z, stream, function, packed, *rest):
            o = rest[3:][launch.kernel.arg_names.index("o")]
            values = state.values.get(function, [1.0])
            o.fill_(values.pop(0) if len(values) > 1 else values[0])
            state.runs.add((function, packed))

        return run

    def start(compiled, device, grid, arguments):
        run = compiled.run
        run(*grid, 0, compiled.function, compiled.packed_metadata, None, None, None, *arguments)

    fake = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: TARGET,
        launcher_cls=launcher,
        utils=SimpleNamespace(load_binary=load),
    )
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 232_448)
    monkeypatch.setattr(toolchains, "start", start)
    monkeypatch.setattr(Launch, "run", lambda self: compiled)
    return state


def dry_run(folder, tmp_path):
    cpu = torch.device("cpu")
    loaded, compared = toolchains.prepare(folder, cpu)
    setup = Setup(cpu, FakeTimer(), Effort(rounds=2, warmup_ms=0.0), folder=loaded)
    return run(toolchains.BENCHMARK, setup, tmp_path / "results.json", [SMALL], toolchains=compared)


def altered(folder, tmp_path, change):
    """The folder with another manifest, and machine code that begins otherwise."""
    manifest = json.loads((folder / toolchains.MANIFEST).read_text())
    for found in manifest["kernels"].values():
        change(found)
        (tmp_path / found["file"]).write_bytes(b"other" + (folder / found["file"]).read_bytes())
    (tmp_path / toolchains.MANIFEST).write_text(json.dumps(manifest))
    return tmp_path


def test_dry_run(pretended, folder, tmp_path):
    other = altered(folder, tmp_path, lambda found: found.update(entry="renamed", shared_bytes=4096))
    document = dry_run(other, tmp_path)
    whole, kernel = document["rows"]
    assert (whole["name"], kernel["name"]) == (SMALL.name, f"{SMALL.name}: decode_kernel")
    assert SMALL.name == "triton decode N2 H2 fp32" and report.load(tmp_path / "results.json") == document
    assert whole["ours"]["error"] == {"difference": 0.0} and report.failures(document) == []
    assert all(
        row[name]["ms"] and row[name]["problem"] is None for row in (whole, kernel) for name in ("ours", "other")
    )
    assert kernel["registers"] == {"ours": 42, "other": 42} and kernel["spill_bytes"] == {"ours": 12, "other": 12}
    ours = pretended.compiled.kernel
    loads = {cubin: (name, shared) for name, cubin, shared in pretended.loads}
    assert loads == {ours: ("decode_kernel", 16), b"other" + ours: ("renamed", 4096)}
    assert pretended.runs == {(ours, (1, 1, 16)), (b"other" + ours, (1, 1, 4096))}
    assert pretended.compiled.asm["cubin"] == ours and "ptx" in pretended.compiled.asm


def test_results_that_differ_are_wrong(pretended, folder, tmp_path):
    other = altered(folder, tmp_path, lambda found: None)
    pretended.values[b"other" + pretended.compiled.kernel] = [1.1]
    document = dry_run(other, tmp_path)
    (failed,) = report.failures(document)
    assert failed["ours"]["problem"] == "wrong: error difference 9.2e-02, tolerance 6e-03"
    assert document["rows"] == [failed]  # no kernels


def test_machine_code_that_gives_other_bits_is_wrong(pretended, folder, tmp_path):
    other = altered(folder, tmp_path, lambda found: None)
    pretended.values[b"other" + pretended.compiled.kernel] = [1.0] * 20 + [1.1]
    (row,) = dry_run(other, tmp_path)["rows"]
    assert "other bits from one call to the next" in row["ours"]["problem"]


def test_what_can_not_be_swapped_is_said_by_name(pretended, folder, tmp_path):
    other = altered(folder, tmp_path, lambda found: found["traits"].update(num_warps=2, parameters=[".u64"]))
    document = dry_run(other, tmp_path)
    problem = document["rows"][1]["other"]["problem"]
    assert "num_warps 1 here, 2 in the folder" in problem and "parameters" in problem
    assert document["rows"][1]["other"]["ms"] is None and report.failures(document) == []
    manifest = json.loads((tmp_path / toolchains.MANIFEST).read_text())
    (tmp_path / toolchains.MANIFEST).write_text(json.dumps({**manifest, "kernels": {}}))
    document = dry_run(other, tmp_path)
    assert "not in the folder" in document["rows"][1]["other"]["problem"]
    assert "not in the folder" in report.show(document, VIEWS["toolchains"])


def test_a_row_that_raises_leaves_the_others(pretended, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(toolchains, "call_of", lambda row, device: 1 / 0)
    document = dry_run(folder, tmp_path)
    assert document["rows"][0]["ours"]["problem"] == "ZeroDivisionError: division by zero"


def test_the_table_fits_80_columns(pretended, folder, tmp_path):
    document = dry_run(folder, tmp_path)
    whole, kernel = document["rows"]
    whole["name"] = max((row.name for row in ROWS), key=len)
    times = {"ours": {"ms": {"median": 1.23456}, "sustained_ms": 1.0}, "other": {"ms": None, "sustained_ms": 1.1}}
    kernel |= {"kernel": "prepare_bounded_kernel", **times}
    kernel |= {"registers": {"ours": 255, "other": 255}, "spill_bytes": {"ours": 160, "other": 248}}
    shown = report.show(document, VIEWS["toolchains"])
    assert max(map(len, shown.splitlines())) <= report.WIDTH
    assert " 255 " in shown and "160/248" in shown and "1235" in shown and "1.10" in shown
    assert "other/ours, sustained: 1.10x" in shown
