"""Files that are there as a whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile

from flashdelta.problem.errors import wrong
from flashdelta.tools.files import UNFINISHED, to_json


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


def require_writable(name: str, path: Path) -> None:
    """Raises a ValueError if no file can be written at `path`, which is the argument `name`. Leaves its folder."""
    if path.exists() and not path.is_file():  # renaming would put a file in the place of a device
        raise wrong(name, path, "a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        NamedTemporaryFile(prefix=UNFINISHED, dir=path.parent).close()
    except OSError as error:
        raise wrong(name, path, f"a file that can be written ({error.strerror})") from error


def save_json(document: dict, path: Path) -> None:
    """Writes the document so that `path` always holds a whole one, however the process ends."""
    with whole_file(path) as unfinished:
        unfinished.write_text(to_json(document) + "\n")
