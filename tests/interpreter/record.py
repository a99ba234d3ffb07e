"""Which functions each group of interpreter tests calls, and their fingerprints when it last passed (`record.txt`).

A group is stale, and runs with the other tests, where one of its functions has changed or is gone. Record stale groups anew
(`--all`: all of them), for them to be skipped again:

    python -m tests.interpreter.record
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .fingerprints import hash_of, module
from .groups import GROUPS, paths, selection

FILE = Path(__file__).with_name("record.txt")
ROOT = FILE.parents[2]
SELECTION = "selection:"
AT_A_TIME = 2

Entry = tuple[str, str, str]
"""A function (`path:qualified name`), its fingerprint, and a group that calls it."""


def fingerprint(function: str) -> str | None:
    """Of a function as it is now, or of the tests that a group selects; None if it is gone."""
    path, _, name = function.partition(":")
    if function.startswith(SELECTION):
        return hash_of(selection(name)) if name in GROUPS else None
    file = ROOT / path
    return module(file).functions.get(name) if file.is_file() else None


def text_of(entries: Iterable[Entry]) -> str:
    """Lines of function, fingerprint and groups, and a digest of them as the last."""
    groups: dict[tuple[str, str], list[str]] = {}
    for function, mark, group in sorted(entries):
        groups.setdefault((function, mark), []).append(group)
    lines = "".join(f"{function}  {mark}  {' '.join(names)}\n" for (function, mark), names in groups.items())
    return f"{lines}digest  {hash_of(lines)}\n"


def read(text: str) -> set[Entry]:
    """The entries; ValueError where the digest is not theirs."""
    entries = set()
    for line in text.splitlines()[:-1]:
        function, mark, groups = line.split("  ")
        entries |= {(function, mark, group) for group in groups.split(" ")}
    if text != text_of(entries):
        raise ValueError(f"{FILE.name} is not as it was recorded (edited or merged by hand?)")
    return entries


def stale_groups(entries: set[Entry], now=fingerprint) -> dict[str, list[str]]:
    """The groups that have to run, each with the functions that are why."""
    marks = {function: now(function) for function, _, _ in entries}
    stale = {group: [] for group in GROUPS}
    for function, mark, group in sorted(entries):
        if group in stale and marks[function] != mark:
            stale[group].append(function)
    for group in stale.keys() - {group for _, _, group in entries}:
        stale[group].append(f"{SELECTION}{group}")
    return {group: functions for group, functions in stale.items() if functions}


def run(group: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    """One group in a session of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore", *options]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [*command, "-p", "tests.interpreter.groups", "--group", group, *paths(group)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "", **environment},
        capture_output=True,
        text=True,
    )


def traced(group: str) -> tuple[list[str] | None, str]:
    """The functions that the group calls (None if it fails), and what to say of it."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        done = run(group, "-p", "tests.interpreter.tracing", FLASHDELTA_TRACE=str(trace))
        if done.returncode != 0:
            return None, f"{group}: FAILED\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
        found = json.loads(trace.read_text())
    found["functions"].append(f"{SELECTION}{group}")
    return found["functions"], f"{group}: {found['seconds']} s of CPU time, {len(found['functions'])} functions"


def main() -> int:
    parser = argparse.ArgumentParser(description="Record stale groups of interpreter tests anew.")
    parser.add_argument("--all", action="store_true", help="all groups")
    options = parser.parse_args()
    try:
        entries = set() if options.all else read(FILE.read_text())
    except ValueError as error:
        print(f"{error}: all groups are recorded")
        entries = set()
    groups = list(stale_groups(entries))
    for folder in ("src", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            module(path)  # as it is now: what changes while a group runs is stale
    failed = False
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for group, (functions, said) in zip(groups, pool.map(traced, groups)):
            print(said, flush=True)
            failed |= functions is None
            if functions is not None:
                entries = {entry for entry in entries if entry[2] in GROUPS and entry[2] != group}
                entries |= {(function, fingerprint(function), group) for function in functions}
                FILE.write_text(text_of(entries))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
