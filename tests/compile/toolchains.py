"""Compiles with Tritons other than the installed one, in processes of their own: `python -m tests.compile.variants`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from .records import Costs, Entry

ROOT = Path(__file__).parent.parent.parent

OLDEST = "FLASHDELTA_TRITON_OLDEST"
"""Environment variable: a folder that holds the oldest supported Triton, as `pip install --target` leaves it."""

COMPILE = "-m", "tests.compile.variants"

LISTED = """
import gc
gc.disable()  # a fourth of the time
import json, sys
from tests.compile.variants import all_launches, report
wanted = {tuple(name) for name in json.loads(sys.argv[1])}
names = [(arch, variant, launch.kernel.__name__) for arch, variant, launch in all_launches()]
entries = [(place, report(place, compiles=False)) for place, name in enumerate(names) if name in wanted]
costs = [report(place, compiles=True) for place, _ in entries]
files = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] in ("flashdelta", "tests")]
print(json.dumps({"names": names, "entries": entries, "costs": costs, "files": files}))
"""

ATTEMPTS = 4

FUSION = "TRITON_DEFAULT_FP_FUSION"
"""Environment variable of Triton's: whether to fuse multiplications and additions where a launch does not say."""


@dataclass(frozen=True)
class Listed:
    """The names of all kernels that are compiled, by place; of those asked for the entries, by their places, and the costs;
    the files that made them."""

    names: list[tuple[int, str, str]]
    entries: dict[Entry, int]
    costs: dict[Entry, Costs]
    files: list[Path]


@dataclass(frozen=True)
class Toolchain:
    """A Triton: the installed one, or the one in a folder."""

    folder: Path | None = None

    def run(self, *arguments: str, environment: dict[str, str] | None = None) -> list:
        """Returns what Python prints as JSON. Compiles into a cache of its own if `environment` names one.

        Raises:
            RuntimeError: it failed.
        """
        path = [self.folder, ROOT / "src", os.environ.get("PYTHONPATH")]
        joined = os.pathsep.join(str(p) for p in path if p)
        inherited = {name: x for name, x in os.environ.items() if name not in ("TRITON_INTERPRET", FUSION)}
        done = subprocess.run(
            [sys.executable, *arguments],
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
        return self.run("-c", "import json, triton; print(json.dumps(triton.__version__))")

    def entries(self) -> dict[Entry, int]:
        """All kernels that are compiled for any variant and architecture, by their places. Each is lowered, which takes
        minutes."""
        return {Entry(**found): place for place, found in enumerate(self.run(*COMPILE, "--list"))}

    def listed(self, wanted: Collection[Entry], environment: dict[str, str]) -> Listed:
        """Lowers and compiles only kernels that are named as those that are wanted."""
        found = self.run("-c", LISTED, json.dumps([entry.name for entry in wanted]), environment=environment)
        entries = {Entry(**row): place for place, row in found["entries"]}
        names, files = [tuple(name) for name in found["names"]], [Path(file) for file in found["files"]]
        return Listed(names, entries, costs_of([*entries], found["costs"]), files)

    def compile(
        self,
        entries: Mapping[Entry, int],
        wanted: Iterable[Entry],
        jobs: int = 1,
        environment: dict[str, str] | None = None,
        expected: Mapping[Entry, Costs] | None = None,
        attempts: int = ATTEMPTS,
    ) -> dict[Entry, Costs]:
        """Those that are wanted of all `entries`.

        The compiler orders some things by their address, which differs from process to process: once in some hundred entries
        that gives another order of a few instructions. What is not as `expected` is compiled again before that is believed.
        """
        found: dict[Entry, Costs] = {}
        left = list(wanted)
        for attempt in range(attempts if expected else 1):
            if not left:
                break
            with tempfile.TemporaryDirectory(prefix="flashdelta-compile-") as cache:
                fresh = {"TRITON_CACHE_DIR": cache} if attempt > 0 else {}
                given = map(str, (entries[entry] for entry in left))
                options = "--json", f"--jobs={jobs}", "--places"
                rows = self.run(*COMPILE, *options, *given, environment={**(environment or {}), **fresh})
            found |= costs_of(left, rows)
            left = [entry for entry in left if expected and expected.get(entry, found[entry]) != found[entry]]
        return found


def costs_of(entries: list[Entry], rows: list[dict]) -> dict[Entry, Costs]:
    """Reads the costs of entries from rows of a report, in the same order.

    Raises:
        RuntimeError: lanes of a kernel hold unequal sums, which no kernel's may.
    """
    unequal = [str(entry) for entry, row in zip(entries, rows) if row["unequal_sums"]]
    if unequal:
        raise RuntimeError("\n".join(("lanes hold unequal sums (flashdelta/kernels/shared/products.py):", *unequal)))
    costs = [Costs(**{f.name: row[f.name] for f in fields(Costs)}) for row in rows]
    return dict(zip(entries, costs, strict=True))


def toolchains() -> dict[str, Toolchain]:
    """The installed Triton, and the oldest supported one if its folder is known."""
    oldest = os.environ.get(OLDEST)
    return {"installed": Toolchain()} | ({"oldest": Toolchain(Path(oldest))} if oldest else {})
