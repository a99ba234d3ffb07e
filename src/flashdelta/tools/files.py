"""Files that are there as a whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

from ..problem.errors import wrong

UNFINISHED = ".unfinished-"
"""Starts the names of what is being written."""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, with its suffix. In the end it takes the place of `path`; an exception removes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(UNFINISHED + path.name)
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


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


def require_writable(name: str, path: Path) -> None:
    """Raises a ValueError if no file can be written at `path`, which is the argument `name`. Leaves its folder."""
    if path.exists() and not path.is_file():  # renaming would put a file in the place of a device
        raise wrong(name, path, "a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        NamedTemporaryFile(prefix=UNFINISHED, dir=path.parent).close()
    except OSError as error:
        raise wrong(name, path, f"a file that can be written ({error.strerror})") from error


def to_json(document: object) -> str:
    """Strict JSON, a line per key, and per element of a list: NaN and infinities become "nan", "inf" and "-inf"."""
    document = _strict(document)
    if not isinstance(document, dict):
        return json.dumps(document, allow_nan=False)
    lines = []
    for key, x in document.items():
        if isinstance(x, list) and x:
            elements = ",\n".join("  " + json.dumps(element, allow_nan=False) for element in x)
            lines.append(f" {json.dumps(key)}: [\n{elements}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(x, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _strict(x: object) -> Any:
    if isinstance(x, dict):
        return {key: _strict(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_strict(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def save_json(document: dict, path: Path) -> None:
    """Writes the document so that `path` always holds a whole one, however the process ends."""
    with whole_file(path) as unfinished:
        unfinished.write_text(to_json(document) + "\n")


def counted(n: int, thing: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{n} {thing}{'s' * (n != 1)}"


def in_bytes(size: int) -> str:
    """A size with a unit in which it is not 0."""
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
