"""A short run of the fuzzer by the reference, and what shows that it can fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from flashdelta.reference import gate
from flashdelta.runtime.call import CALLS

from ..fuzz import draw, modes, runner

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


def end_at_the_third(part: str, seed: int, number: int, device: torch.device) -> runner.Outcome:
    if number == 2:
        os._exit(7)
    return runner.Outcome(part, number, "commit", "right")


def test_a_process_that_ends_is_a_failure_of_its_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(runner, "run_case", end_at_the_third)
    file = tmp_path / "fuzz.json"
    assert run("--part", "calls", "--cases", "6", "--jobs", "2", "--json", str(file)) == 1
    document = json.loads(file.read_text())
    assert document["cases"] == 6 and document["jobs"] == 2
    assert 2 in [failure["case"] for failure in document["failures"]]
    assert "--part calls --seed 0 --case" in document["failures"][0]["rerun"]


@pytest.mark.parametrize(("op", "target"), [("chunk_kda", "q"), ("fused_recurrent_kda", "state_pool")])
def test_a_byte_that_must_stay_shows(op: str, target: str):
    """Beside an input, and in a slot that no sequence has."""
    drawn = (draw.draw_spec(1, number, CPU) for number in range(10_000))
    spec = next(x for x in drawn if x.op == op and target in x.places and 0 not in x.places["q"].shape)
    case = modes.Case(spec, CPU, 0)
    results = case.run()
    case.hold(results)
    places = [(-1,)]
    if target == "state_pool":
        stored = {claim.index[0] for claim in case.claims if claim.target == target}
        places = [(slot, 0, 0, 0) for slot in {*range(len(case.call[target]))} - stored]
    memory = case.contents.memories[target]
    for place in places:
        (memory.bytes if place == (-1,) else memory.tensor)[place] += 1
        with pytest.raises(AssertionError, match=f"{target}: bytes changed"):
            case.hold(results)
        (memory.bytes if place == (-1,) else memory.tensor)[place] -= 1


def test_each_public_operation_is_drawn():
    assert {operator.function for operator in draw.OPERATORS.values()} == {*CALLS}
    for device in ("cpu", "cuda"):
        drawn = [draw.draw_spec(3, number, torch.device(device)).op for number in range(300)]
        assert drawn[: len(draw.OPERATORS)] == [*draw.OPERATORS] and {*drawn} == {*draw.OPERATORS}
