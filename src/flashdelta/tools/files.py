"""Folders that are there as a whole or not at all, and how results are printed."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..problem.errors import wrong

UNFINISHED = ".unfinished-"
"""Starts the names of what is being written."""


@contextlib.contextmanager
def whole_folder(name: str, folder: Path) -> Iterator[Path]:
    """A folder inside `folder` to write files to. In the end they move up and replace those of the same names; an exception
    leaves nothing of them.

    Raises:
        ValueError: `folder` can't be written; it is the argument `name`.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = TemporaryDirectory(prefix=UNFINISHED, dir=folder)
    except OSError as error:
        raise wrong(name, folder, f"a folder that can be written ({error.strerror})") from error
    try:
        with made as unfinished:
            yield Path(unfinished)
            for path in sorted(Path(unfinished).iterdir()):
                os.replace(path, folder / path.name)
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def to_json(document: object) -> str:
    """Strict JSON: NaN and infinities become "nan", "inf" and "-inf"."""
    return json.dumps(strict(document), allow_nan=False, indent=1)


def strict(x: object) -> Any:
    if isinstance(x, dict):
        return {key: strict(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [strict(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def counted(n: int, thing: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{n} {thing}{'s' * (n != 1)}"


def in_bytes(size: int) -> str:
    """A size with a unit in which it is not 0."""
    if size < 2**10:
        return counted(size, "byte")
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
