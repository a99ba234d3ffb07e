"""Records and compares the machine code of all kernels.

python -m tests.compile record              # compile what changed, and write what it is
python -m tests.compile launches            # write launches.tsv alone: compiles nothing, takes half a minute
python -m tests.compile all [FOLDER ...]    # compile everything from nothing, with Tritons in folders, too
python -m tests.compile gate --base REV     # what changed since a git revision
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from . import hot, launches, records
from .toolchains import ROOT, Toolchain, toolchains

JOBS = os.cpu_count() or 1


def record() -> None:
    """Compiles entries that are not recorded as the source has them, and writes all; with a wrong digest anywhere, all."""
    for toolchain in toolchains().values():
        sources = records.sources()
        triton, entries = toolchain.triton(), toolchain.entries()
        known = {}
        if records.path_of(triton).exists():
            try:
                known = records.read(triton)
            except ValueError as error:
                print(f"{error}\nall of Triton {triton} is compiled")
        comparison = records.compare(entries, known)
        # most of what differs was meant to
        compiled = toolchain.compile(entries, comparison.new, JOBS, expected=comparison.before, attempts=2)
        wrong = records.all_faults(compiled)
        found = comparison.same | compiled
        records.write(found, triton)
        records.write_sources(sources, triton)
        print(f"Triton {triton}: {len(entries)} entries, {len(compiled)} compiled, {len(comparison.gone)} dropped")
        print(*(records.changes(known, found) if known else []), *wrong, sep="\n")
        if wrong:
            sys.exit(1)
    launches.write()
    hot.PAGE.write_text(hot.page())


def compile_all(found: Iterable[Toolchain]) -> None:
    """Says what differs from the records, if that Triton is recorded, and what its hot variants cost."""
    wrong = 0
    for toolchain in found:
        triton, entries = toolchain.triton(), toolchain.entries()
        recorded = records.read(triton) if triton in records.recorded_tritons() else {}
        comparison = records.compare(entries, recorded)
        with tempfile.TemporaryDirectory(prefix="flashdelta-compile-") as cache:
            environment = {"TRITON_CACHE_DIR": cache}
            compiled = toolchain.compile(entries, entries, JOBS, environment, expected=comparison.before)
        lines = records.violations(comparison, compiled) if recorded else records.all_faults(compiled)
        spilling = {entry: costs for entry, costs in compiled.items() if costs.spill_bytes}
        print(f"Triton {triton}: {len(entries)} entries, {len(spilling)} spill; {len(lines)} wrong or not as recorded")
        print(*lines, sep="\n")
        for kernel, variant, costs in hot.hot_costs(compiled):
            print(f"  {kernel}, {variant}: {costs.registers} registers, {costs.spill_bytes} bytes spilled", flush=True)
        wrong += len(lines)
    sys.exit(wrong > 0)


def gate(base: str) -> None:
    """Exits with 1 if the machine code or the launches of any entry differ from the revision `base`."""
    found = 0
    for toolchain in toolchains().values():
        triton = toolchain.triton()
        now = records.read(triton)
        comparison = records.compare(now if records.holds_sources(triton) else toolchain.entries(), now)
        if comparison.new or comparison.gone:
            sys.exit("the record is stale; first run: make record\n" + "\n".join(records.violations(comparison, {})))
        lines = records.changes(records.parse(_at(base, records.path_of(triton)), triton), now)
        print(f"Triton {triton}: the machine code of {len(lines)} of {len(now)} entries changed since {base}")
        print(*lines, sep="\n")
        found += len(lines)
    lines = launches.differences(launches.parse(_at(base, launches.FILE)), launches.traced())
    print(f"the launches of {len(lines)} cases changed since {base}", *lines, sep="\n")
    sys.exit(found + len(lines) > 0)


def _at(revision: str, path: Path) -> str:
    done = subprocess.run(
        ["git", "show", f"{revision}:{path.relative_to(ROOT)}"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{path.name} can't be read at {revision}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record")
    commands.add_parser("launches")
    commands.add_parser("all").add_argument("folders", nargs="*", type=Path)
    commands.add_parser("gate").add_argument("--base", default="HEAD")
    arguments = parser.parse_args()
    try:
        if arguments.command == "record":
            record()
        elif arguments.command == "launches":
            launches.write()
        elif arguments.command == "all":
            compile_all([*toolchains().values(), *map(Toolchain, arguments.folders)])
        else:
            gate(arguments.base)
    except ValueError as error:
        sys.exit(f"{error}\nmake record writes it anew")


if __name__ == "__main__":
    main()
