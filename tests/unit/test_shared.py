"""What workers of the GPU tier share is made once, also where making it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ..support.shared import folder_of_run, once

ROOT = Path(__file__).parents[2]

WORKERS = """
import time
import pytest, torch
from tests.support.shared import folder_of_run, once

@pytest.fixture(scope="module", params=["one", "two", "bad"])
def made(request, tmp_path_factory):
    folder = folder_of_run(tmp_path_factory)
    def make():
        with (folder / "made.txt").open("a") as file:
            file.write(request.param + "\\n")
        time.sleep(0.5)
        if request.param == "bad":
            raise ValueError("no such processes")
        return request.param, [{"x": torch.arange(3)}]
    return request.param, once(folder / f"{request.param}.pt", make)

@pytest.mark.parametrize("i", range(6))
def test_takes_it(made, i):
    name, (found, (rank,)) = made
    assert found == name and rank["x"].tolist() == [0, 1, 2]
"""


def test_workers_make_each_thing_once(tmp_path: Path):
    """Also what fails, which all of them say."""
    (tmp_path / "test_some.py").write_text(WORKERS)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", "-n", "2", "--maxschedchunk", "1", "--basetemp", str(tmp_path / "base")]
    given = {**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [*command, str(tmp_path / "test_some.py")], cwd=ROOT, env=given, capture_output=True, text=True
    )
    assert "12 passed, 6 errors" in done.stdout, done.stdout
    assert done.stdout.count("RuntimeError: ValueError: no such processes") >= 6
    assert sorted((tmp_path / "base" / "made.txt").read_text().split()) == ["bad", "one", "two"]


def test_a_process_asks_twice(tmp_path: Path):
    calls = []
    for _ in range(2):
        found = once(tmp_path / "x.pt", lambda: calls.append(1) or {"x": torch.ones(2, dtype=torch.bfloat16)})
        assert found["x"].dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"^ZeroDivisionError: "):
        once(tmp_path / "y.pt", lambda: 1 // 0)
    assert len(calls) == 1 and not list(tmp_path.glob("*unfinished*"))


def test_a_run_without_workers_has_its_own_folder():
    for name, wanted in (("pytest-7", "pytest-7"), ("popen-gw1", "pytest-7")):
        base = Path("/tmp/pytest-7") if name == "pytest-7" else Path("/tmp/pytest-7/popen-gw1")
        assert folder_of_run(SimpleNamespace(getbasetemp=lambda base=base: base)).name == wanted
