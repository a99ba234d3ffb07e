"""When the slow tests of interpreted Hopper kernels run again."""

from __future__ import annotations

import ast
import contextlib
import subprocess
from pathlib import Path

import pytest

from . import record
from .test_broken_kernels import FAULTS, Break, around


def test_what_is_read_is_there():
    assert all((record.ROOT / name).exists() for name in record.READ)


def test_whatever_the_tests_take_from_others_is_read():
    nodes = [node for file in Path(__file__).parent.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    taken = {tuple(node.module.split(".")) for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 2}
    assert taken
    for folder, *name in taken:
        assert folder in record.TESTS or f"{'/'.join((folder, *name))}.py" in record.TESTS, (folder, name)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_kernels_have_what_is_broken_on_purpose(fault: Break):
    """Not only where they run."""
    assert around(fault)


def test_a_change_is_noticed_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "READ", ("kernels", "truth.py"))
    monkeypatch.setattr(record, "FILE", tmp_path / "record.txt")
    kernel, truth = tmp_path / "kernels" / "device" / "math.py", tmp_path / "truth.py"
    kernel.parent.mkdir(parents=True)
    for file in (kernel, truth):
        file.write_text("x = 1\n")
    assert not record.recorded()
    record.FILE.write_text(f"{record.digest()}\n")
    assert record.recorded()
    for file in (kernel, truth):
        file.write_text("x = 2\n")
        assert not record.recorded()
        file.write_text("x = 1\n")
        assert record.recorded()
    kernel.rename(kernel.with_name("norms.py"))
    assert not record.recorded()


@pytest.mark.parametrize(("outcome", "kept"), [(KeyboardInterrupt, True), (1, False), (0, True)], ids=str)
def test_the_record_goes_where_a_test_failed(
    outcome: type[BaseException] | int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not while they run: a run may be interrupted."""

    def run(command: list[str], env: dict[str, str], **where: Path) -> subprocess.CompletedProcess:
        assert env["FLASHDELTA_TESTS"] == "full"
        if outcome is KeyboardInterrupt:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, outcome)

    monkeypatch.setattr(record, "FILE", tmp_path / "record.txt")
    monkeypatch.setattr(record.subprocess, "run", run)
    record.FILE.write_text(f"{record.digest()}\n")
    with contextlib.suppress(KeyboardInterrupt):
        assert record.main() == (not kept)
    assert record.recorded() == kept
