"""A short run of the fuzzer by the reference, and what shows that it can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flashdelta.reference import gate
from flashdelta.runtime.call import CALLS

from ..fuzz import draw, runner

CPU = torch.device("cpu")
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
    assert {function for function, _ in draw.OPERATORS.values()} == {*CALLS}
    for device in ("cpu", "cuda"):
        drawn = [draw.draw_spec(3, number, torch.device(device)).op for number in range(300)]
        assert drawn[: len(draw.OPERATORS)] == [*draw.OPERATORS] and {*drawn} == {*draw.OPERATORS}
