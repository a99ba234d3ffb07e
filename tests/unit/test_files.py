"""Files that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashdelta.tools.files import whole_file, whole_folder


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_unfinished_file_leaves_the_old_one(error: type[BaseException], tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(error), whole_file(path) as unfinished:
        unfinished.write_text("ne")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("exists", [True, False])
def test_an_unfinished_folder_leaves_nothing(exists: bool, tmp_path: Path):
    folder = tmp_path / "out"
    if exists:
        folder.mkdir()
        (folder / "kept").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_folder("out", folder) as unfinished:
        (unfinished / "kept").write_text("new")
        raise KeyboardInterrupt
    assert {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == (
        {"kept": "old"} if exists else {}
    )
    assert folder.exists() == exists
