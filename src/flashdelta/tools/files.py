"""Files that are there as a whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

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


def counted(n: int, thing: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{n} {thing}{'s' * (n != 1)}"


def in_bytes(size: int) -> str:
    """A size with a unit in which it is not 0."""
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
