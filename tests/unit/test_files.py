"""Files that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashdelta.tools.files import require_writable, whole_file, whole_folder


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path):
    path = tmp_path / "new" / "x.json"
    for text in ("first", "second"):
        with whole_file(path) as unfinished:
            unfinished.write_text(text)
            assert unfinished.suffix == ".json" and (text == "first") == (not path.exists())
        assert path.read_text() == text and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_unfinished_file_leaves_the_old_one(error: type[BaseException], tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(error), whole_file(path) as unfinished:
        unfinished.write_text("ne")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_keeps_its_other_files(tmp_path: Path):
    for name in ("kept", "replaced"):
        (tmp_path / name).write_text("old")
    with whole_folder("out", tmp_path) as unfinished:
        for name in ("replaced", "added"):
            (unfinished / name).write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "kept": "old",
        "replaced": "new",
        "added": "new",
    }


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


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(
            ValueError, match=r"^out must be a folder that can be written \(Not a directory\).*; got .*file/x"
        ),
        whole_folder("out", tmp_path / "file" / "x"),
    ):
        raise AssertionError("must not be reached")
    with pytest.raises(ValueError, match=r"^json must be a file that can be written \(File exists\).*; got .*x.json"):
        require_writable("json", tmp_path / "file" / "x.json")
    with pytest.raises(ValueError, match=r"^json must be a file; got /dev/null$"):
        require_writable("json", Path("/dev/null"))
    require_writable("json", tmp_path / "x.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
