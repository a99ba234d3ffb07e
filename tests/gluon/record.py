"""Whether the interpreted Hopper kernels have passed as they are now (`record.txt`): if so, their slow tests are skipped
(FLASHDELTA_TESTS=full runs them all the same). Run them, and record that they pass:

    python -m tests.gluon.record
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("record.txt")
PACKAGE = (
    *("backends.py", "hopper", "kernels.py", "ops", "parallel", "problem", "program", "reference", "runtime"),
    *("testing", "triton"),
)
TESTS = (
    "full.py",
    "gluon",
    "support",
    "gpu/calls.py",
    "gpu/test_decode.py",
    "gpu/test_pool.py",
    "unit/test_hopper_choice.py",
)
READ = (*(f"src/flashdelta/{name}" for name in PACKAGE), *(f"tests/{name}" for name in TESTS))
"""What the tests run, and what they hold it to."""


def files_of(root: Path, names: Iterable[str]) -> list[Path]:
    """All Python in files and folders of `root`."""
    paths = (root / name for name in names)
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def digest_of(root: Path, names: Iterable[str]) -> str:
    """Of the names and contents of `files_of`."""
    total = hashlib.sha256()
    for file in files_of(root, names):
        total.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return total.hexdigest()


def digest() -> str:
    return digest_of(ROOT, READ)


def recorded() -> bool:
    return FILE.is_file() and FILE.read_text().strip() == digest()


def main() -> int:
    before, everything = digest(), os.environ | {"FLASHDELTA_TESTS": "full"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "tests/gluon"]
    passed = subprocess.run(command, cwd=ROOT, env=everything).returncode == 0
    if passed and before == digest():
        FILE.write_text(f"{before}\n")
    elif not passed:
        FILE.unlink(missing_ok=True)
    return int(not recorded())


if __name__ == "__main__":
    sys.exit(main())
