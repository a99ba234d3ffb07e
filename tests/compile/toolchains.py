"""Compiles with Tritons other than the installed one, in processes of their own.

Run as a module it is such a process: it prints all entries as JSON, or compiles those whose positions it is given.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from .records import Costs, Entry

ROOT = Path(__file__).parent.parent.parent

OLDEST = "FLASHDELTA_TRITON_OLDEST"
"""Environment variable: a folder that holds the oldest supported Triton, as `pip install --target` leaves it."""

ATTEMPTS = 4

FUSION = "TRITON_DEFAULT_FP_FUSION"
"""Environment variable of Triton's: whether to fuse multiplications and additions where a launch does not say."""


@dataclass(frozen=True)
class Toolchain:
    """A Triton: the installed one, or the one in a folder."""

    folder: Path | None = None

    def run(
        self, *arguments: str, given: object = None, environment: dict[str, str] | None = None, module: str = __name__
    ) -> list:
        """What a module, by default this one, prints as JSON when that Triton runs it. Compiles into a cache of its own if
        `environment` names one.

        Raises:
            RuntimeError: it failed.
        """
        path = [self.folder, ROOT / "src", os.environ.get("PYTHONPATH")]
        joined = os.pathsep.join(str(p) for p in path if p)
        inherited = {name: x for name, x in os.environ.items() if name not in ("TRITON_INTERPRET", FUSION)}
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input=json.dumps(given),
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": joined, **(environment or {})},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(arguments)} failed with {self.folder or 'the installed Triton'}:\n{done.stderr[-6000:]}"
            )
        return json.loads(done.stdout.splitlines()[-1])

    def triton(self) -> str:
        return self.run("version")

    def entries(self) -> list[Entry]:
        """All kernels that are compiled for any variant and architecture."""
        return [Entry(**found) for found in self.run("entries")]

    def compile(
        self,
        entries: list[Entry],
        wanted: Iterable[Entry],
        jobs: int = 1,
        environment: dict[str, str] | None = None,
        expected: Mapping[Entry, Costs] | None = None,
    ) -> dict[Entry, Costs]:
        """Those that are wanted of all `entries`.

        The compiler orders some things by their address, which differs from process to process: once in some hundred entries
        that gives another order of a few instructions. What is not as `expected` is compiled again before that is believed.
        """
        places = {entry: i for i, entry in enumerate(entries)}
        found: dict[Entry, Costs] = {}
        left = list(wanted)
        for attempt in range(ATTEMPTS if expected else 1):
            with tempfile.TemporaryDirectory(prefix="flashdelta-compile-") as cache:
                fresh = {"TRITON_CACHE_DIR": cache} if attempt > 0 else {}
                given = [places[entry] for entry in left]
                costs = self.run("compile", str(jobs), given=given, environment={**(environment or {}), **fresh})
            found |= {entry: Costs(**one) for entry, one in zip(left, costs, strict=True)}
            left = [entry for entry in left if expected and expected.get(entry, found[entry]) != found[entry]]
            if not left:
                break
        return found


def toolchains() -> dict[str, Toolchain]:
    """The installed Triton, and the oldest supported one if its folder is known."""
    oldest = os.environ.get(OLDEST)
    return {"installed": Toolchain()} | ({"oldest": Toolchain(Path(oldest))} if oldest else {})


# ---- in the process of a toolchain ---------------------------------------------------------------------------------------


@functools.cache
def _launches() -> list[tuple]:
    from flashdelta.tools.compile import VARIANTS

    return [
        (arch, variant.name, launch)
        for variant in VARIANTS
        for arch in variant.architectures()
        for launch in variant.launches(arch)
    ]


def _compile(place: int) -> dict:
    from flashdelta.tools.compile import compile_launch

    arch, _, launch = _launches()[place]
    return asdict(compile_launch(launch, arch))


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("version", "entries", "compile"))
    parser.add_argument("jobs", type=int, nargs="?", default=1)
    arguments = parser.parse_args()
    given = json.load(sys.stdin)
    if arguments.what == "version":
        import triton

        found = triton.__version__
    elif arguments.what == "entries":
        from flashdelta.tools.compile import fingerprint

        found = [
            asdict(Entry(arch, variant, launch.kernel.__name__, fingerprint(launch, arch)))
            for arch, variant, launch in _launches()
        ]
    elif arguments.jobs == 1 or len(given) <= 1:
        found = [_compile(place) for place in given]
    else:
        # not forked: PyTorch has threads
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(_compile, given))
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
