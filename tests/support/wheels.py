"""Wheels of the engines that the integrations were written against."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64")


def wheel(folder: Path, name: str, version: str) -> Path:
    """The wheel in `folder`, downloaded without what it depends on if it is not there yet."""
    pattern = f"{name}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.12", *(f"--platform={x}" for x in PLATFORMS)]
        subprocess.run([*command, f"--dest={folder}", f"{name}=={version}"], check=True)
    return next(folder.glob(pattern))
