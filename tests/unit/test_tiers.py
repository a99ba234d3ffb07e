"""The other tiers without what they need: the fuzzer by the reference, the GPU tier's fixtures, the recorded breaks of `make
mutants`, which fit the code as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashdelta.reference import gate
from flashdelta.runtime.call import CALLS

from ..fuzz import draw, runner
from ..gpu import conftest as tier
from ..mutants import MUTANTS, ROOT

CASES = 12


def run(*arguments: str) -> int:
    return runner.main([*arguments, "--device", "cpu", "--seconds", "600"])


@pytest.mark.parametrize("part", runner.PARTS)
def test_a_short_run_finds_nothing(part: str, tmp_path: Path):
    file = tmp_path / "fuzz.json"
    assert run("--part", part, "--cases", str(CASES), "--json", str(file)) == 0
    document = json.loads(file.read_text())
    assert document["cases"] == CASES == sum(row["cases"] for row in document["rows"])
    assert document["seed"] == 0 and document["ran"].startswith("reference alone")


def test_a_failure_prints_the_line_that_reruns_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    exact = gate.beta_of
    monkeypatch.setattr(gate, "beta_of", lambda problem, t: exact(problem, t) * 1.1)
    assert run("--part", "calls", "--cases", "8") == 1
    lines = capsys.readouterr().out.splitlines()
    words = next(line for line in lines if line.startswith("python -m tests.fuzz")).split("  #")[0].split()[3:]
    assert run(*words) == 1
    monkeypatch.undo()
    assert run(*words) == 0


def test_each_public_operation_is_drawn():
    assert {operator.function for operator in draw.OPERATORS.values()} == {*CALLS}
    for device in ("cpu", "cuda"):
        drawn = [draw.draw_spec(3, number, torch.device(device)).op for number in range(60)]
        assert drawn[: len(draw.OPERATORS)] == [*draw.OPERATORS] and {*drawn} == {*draw.OPERATORS}


# ---- the GPU tier -------------------------------------------------------------------------------------------------------


class Plan:
    """One case of each test, as its cases differ in values alone where they have the same fixtures."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = {(item.path, item.originalname, *item.fixturenames): item for item in items}.values()
        self.tests = {(item.path, item.originalname) for item in items}


def test_every_test_finds_its_fixtures():
    """Which shows only when it is set up; here nothing is."""
    plan, without = Plan(), ("-p", "no:cacheprovider", "-p", "no:faulthandler")
    assert pytest.main(["-q", "-m", "gpu", "--setup-plan", *without, str(tier.HERE)], [plan]) == 0
    assert len(plan.tests) > 100


# ---- mutants ------------------------------------------------------------------------------------------------------------

SOURCE = ROOT / "src" / "flashdelta"


def test_old_texts_stand_once_and_tests_are_there():
    rows = [row for found in MUTANTS.values() for row in found]
    assert not [row for row in rows if (SOURCE / row[0]).read_text().count(row[1]) != 1]
    assert not [test for test in MUTANTS if not (ROOT / "tests" / test.partition("::")[0]).is_file()]


def test_every_file_of_kernels_is_broken():
    kernels = [*(SOURCE / "kernels").glob("*/*.py")]
    kernels = [file for file in kernels if "_kernel(\n" in file.read_text()]
    assert len(kernels) > 20
    assert {file.relative_to(SOURCE).as_posix() for file in kernels} <= {
        row[0] for found in MUTANTS.values() for row in found
    }


# ---- make test ----------------------------------------------------------------------------------------------------------


def test_what_passed_on_this_very_tree_is_left_out(tmp_path: Path):
    file = tmp_path / "test_it.py"
    file.write_text("def test_a(): pass\ndef test_b(): assert False\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("__pycache__\n.pytest_cache\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def outcome() -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.unchanged", "test_it.py"]
        found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return found.returncode, found.stdout.splitlines()[-1].rpartition(" in ")[0]

    assert outcome() == (1, "1 failed, 1 passed")
    assert outcome() == (1, "1 failed, 1 deselected")
    file.write_text("def test_a(): pass\ndef test_b(): pass\n")
    assert outcome() == (0, "2 passed")
    assert outcome() == (0, "2 deselected")
