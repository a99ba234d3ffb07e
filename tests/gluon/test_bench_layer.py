"""Benchmarks of steps of the layer with Hopper's kernels, interpreted, by a clock that is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashdelta.tools.bench import report
from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.contenders import Setup
from flashdelta.tools.bench.runner import run
from flashdelta.tools.bench.timing import Effort
from flashdelta.tools.bench.workloads import layer_step_row

from ..support.timers import FakeTimer

ROWS = [layer_step_row(3, 1, state, "fits a CPU", K=64, V=64) for state in ("fp32", "bf16")]
HOPPERS = [f"Hopper's own{x}" for x in ("", ", 96 registers", ", 168 registers", ", no prefetch", ", all prefetch")]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fused_steps.py"


def setup_of(backend: str) -> Setup:
    sizes = {"pool_bytes": 2**18, "graph_bytes": 2**17, "launches": 4, "host_calls": 2}
    ceilings = {"copy_tb_s": 4.3, "gemm_tflop_s": 700.0}
    effort = Effort(rounds=3, warmup_ms=0.0)
    return Setup(torch.device("cpu"), FakeTimer(2.0), effort, backend, ceilings=ceilings, **sizes)


def test_steps_by_hopper_beside_what_it_has_not(tmp_path: Path):
    """Convolution, norm and attention alone run where they can."""
    document = run(BENCHMARKS["layer"], setup_of("hopper"), tmp_path / "results.json", ROWS)
    assert report.failures(document) == []
    for row in document["rows"]:
        for name in ("ours", "chain", "bare"):
            assert row[name]["problem"] is None, (name, row[name])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fused_steps", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def captured(call):
        return call, call()

    monkeypatch.setattr(module, "capture", captured)
    return module


@pytest.mark.slow
def test_forms_take_turns(script: ModuleType):
    """All are held to the reference, and none fails."""
    row = ROWS[0]
    found = script.measured(row, setup_of("auto"))
    assert found["problems"] == {} and [*found["forms"]] == ["bare", *script.FORMS.values(), *HOPPERS]
    assert len(script.table(found).splitlines()) == 3 + len(HOPPERS) + len(script.FORMS)
    assert script.spills(row, setup_of("auto")) == []
    chosen = script.measured(row, setup_of("auto"), script.CHOSEN)
    assert chosen["problems"] == {} and [*chosen["forms"]] == ["bare", *script.CHOSEN.values(), *HOPPERS]
    assert {*script.CHOSEN_ROWS} <= {row.name for row in script.LAYER}


def test_a_form_that_fails_leaves_the_others(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    def config(problem: object, arch: int):
        raise ValueError("too many registers")

    monkeypatch.setattr(script, "configured", lambda form: config)
    found = script.measured(ROWS[0], setup_of("auto"))
    assert {*found["problems"].values()} == {"ValueError: too many registers"}
    assert [*found["forms"]] == ["bare", *HOPPERS]
