"""Exports as tests use them: made once for all workers, built, and called beside a stand-in for the CUDA driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import triton
from filelock import FileLock

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parents[1] / "c"
CUDA_INCLUDE = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
"""Where Triton keeps cuda.h."""

STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")
ARCHES = (89, 90)
SIZE = (64, 64, 32)
CHOICE = ["--size", ",".join(map(str, SIZE)), "--gate", "none", "--jobs", "1"]
"""A small export: every operator at one size, with one gate and one precision."""


def finished(*command: object, **options: object) -> subprocess.CompletedProcess:
    """A failure is an error that shows both outputs."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def run(*command: object, **options: object) -> str:
    return finished(*command, **options).stdout


@dataclass(frozen=True)
class Export:
    """A folder that `flashdelta export` wrote, and what was built of it."""

    folder: Path

    @property
    def bindings(self) -> Path:
        return self.folder / "flashdelta_ctypes.py"

    @property
    def shared(self) -> Path:
        return self.folder / "build" / "libflashdelta.so"

    @property
    def static(self) -> Path:
        return self.folder / "build" / "libflashdelta.a"


def export(folder: Path, *choice: str) -> str:
    """Runs the command; what it said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")]))}
    environment.pop("TRITON_INTERPRET", None)
    command = (sys.executable, "-m", "flashdelta", "export", "--out", folder, *choice)
    return finished(*command, cwd=ROOT, env=environment).stderr


def build(folder: Path, source: Path, *definitions: str) -> None:
    """Configures and builds with CMake; warnings are errors."""
    flags = f"-DCMAKE_C_FLAGS={' '.join(STRICT)}"
    run("cmake", "-S", source, "-B", folder, flags, "-DCMAKE_BUILD_TYPE=Release", *definitions)
    run("cmake", "--build", folder, "--parallel", "2")


def small_export(shared: Path) -> Export:
    """Made by the first worker that asks; `shared` is a folder of this run's, the same for all workers."""
    found = Export(shared / "export")
    with FileLock(shared / "export.lock"):
        if not (shared / "export.done").exists():
            export(found.folder, *(f"--arch=sm_{arch}" for arch in ARCHES), *CHOICE)
            build(found.folder / "build", found.folder)
            compile_c(shared / "libcuda.so.1", HERE / "fake_driver.c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
            (shared / "empty.c").write_text("int nothing;\n")
            compile_c(shared / "old" / "libcuda.so.1", shared / "empty.c", "-shared", "-Wl,-soname,libcuda.so.1")
            (shared / "export.done").touch()
    return found


def compile_c(out: Path, source: Path, *options: object, language: str = "c11") -> None:
    out.parent.mkdir(exist_ok=True)
    compiler = "g++" if "++" in language else "gcc"
    include = ("-isystem", CUDA_INCLUDE)
    run(compiler, f"-std={language}", *STRICT, *include, source, "-o", out, *options)


@dataclass(frozen=True)
class Called:
    """Report of `c/calls.py`: per call its status, message and bytes; the launches; how often the driver was asked to
    load a kernel, and to make, change and destroy a graph."""

    outcomes: list[dict]
    launches: list[dict]
    counts: dict[str, int]

    @property
    def statuses(self) -> list[str]:
        return [outcome["status"] for outcome in self.outcomes]


def call(found: Export, calls: list[dict], *, driver: Path | None = None, **settings) -> Called:
    """Makes the calls (dicts of `op`, `args` and more) beside the stand-in, or another `driver`, whose variables are set
    first."""
    task = {
        "driver": str(driver or found.folder.parent / "libcuda.so.1"),
        "library": str(found.shared),
        "bindings": str(found.bindings),
        "settings": {f"fake_{name}": value for name, value in settings.items()},
        "calls": calls,
    }
    return Called(**json.loads(run(sys.executable, HERE / "calls.py", input=json.dumps(task))))


def pointers(*names: str) -> dict[str, int]:
    """Addresses that nobody may touch, all different and aligned."""
    return {name: 0x10000 * (i + 1) for i, name in enumerate(names)}


def task(op: str, *, stream: int = 0, repeats: int = 1, **changes: object) -> dict:
    """A call for `call` that is right in all but its addresses, and in what `changes`."""
    K, V, C = SIZE
    if op == "decode_bf16":
        sizes = {"N": 5, "H": 3, "slots": 7, "K": K, "V": V}
        given = sizes | pointers("q", "k", "v", "g", "beta", "states", "state_indices", "o")
    else:
        sizes = {"B": 2, "H": 3, "T": 70, "K": K, "V": V, "C": C, "workspace_bytes": 2**40}
        results = ("w", "u") if op == "prefill_f32" else ()
        given = sizes | pointers("q", "k", "v", "g", "beta", "o", "workspace", *results)
    return {"op": op, "args": given | changes, "stream": stream, "repeats": repeats}
