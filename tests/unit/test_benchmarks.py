"""The benchmarks on a CPU with tiny shapes and a clock that is none, and the tables made of their results."""

from __future__ import annotations

import functools
import importlib
import json
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashdelta as fd
from benchmarks import run, tables, workloads
from benchmarks.run import Row, Setup
from benchmarks.workloads import decode_row, layer_call_row, layer_step_row, model, served, spread_row, verify_row

from ..full import FULL
from ..support.forked import imported_once
from ..support.timers import FakeTimer

PROGRAMS = ("prefill", "decode", "train", "layer", "ranks")
SMALL = {"H": 2, "HV": 2, "K": 32, "V": 32}
FLOAT32 = {"T": 66, "H": 2, "HV": 2, "K": 64, "V": 64, "chunk_size": 32, "l2norm": False}


def small(row: Row, **changes: object) -> Row:
    return replace(row, call=replace(row.call, **{**SMALL, **changes}))


ROWS = {
    "prefill": [
        Row(model("one", "", 2, T=130, K=32, V=32), "prefill"),
        Row(model("packed", "", 2, K=32, V=32, lengths=(70, 9)), "split"),
        Row(replace(model("float32", "", 2), gate="none", beta="value", safe=False, **FLOAT32), "fp32"),
        small(served("Kimi-Linear", 2, "prefill", "packed", (5, 3))),
    ],
    "decode": [
        decode_row(3, "fp32", H=2, K=32),
        verify_row(3, 2, 3, "bf16", K=32),
        small(served("Kimi-Linear", 2, "decode", "N3", (1,) * 3)),
        small(served("Kimi-Linear", 2, "verify", "N3", (4,) * 3)),
        small(served("Kimi-K3", 2, "whole step", "N3", (1,) * 3)),
    ],
    "train": [
        Row(model("one", "", 2, T=70, K=32, V=32, final=False), "train"),
        small(next(row for row in workloads.TRAIN if row.table == "wy"), T=70),
    ],
    "layer": [
        layer_step_row(3, 2, "fp32", "", K=32, V=32),
        small(layer_call_row("train", "", "train"), T=70),
        *(small(layer_call_row(part, "", part), T=20) for part in ("convolution", "norm")),
    ],
    "ranks": [small(spread_row(2, 2, 1, trains), T=70) for trains in ((False, True) if FULL else (True,))],
}


EACH = [(program, row) for program in PROGRAMS for row in ROWS[program]]


def setup_of(**changes: object) -> Setup:
    sizes = {"pool_bytes": 2**18, "graph_bytes": 2**15, "launches": 2, "host_calls": 1}
    return Setup(torch.device("cpu"), FakeTimer(2.0), rounds=2, backend="reference", **{**sizes, **changes})


@pytest.mark.parametrize(("program", "row"), EACH, ids=lambda x: getattr(x, "name", x))
def test_a_row_is_checked_and_timed(program: str, row: Row, tmp_path: Path):
    asked = importlib.import_module(f"benchmarks.{program}").PROGRAM
    with imported_once():
        (found,) = run.measure_all(asked, [row], setup_of(), tmp_path / "x.json")
    ours = found["contenders"]["ours"]
    assert ours["problem"] is None and max(ours["error"].values()) < 2e-2
    times = [ours.get(f"{graph}{kind}_ms") for graph in ("", "graph_") for kind in ("cold", "sustained")]
    assert [ms for ms in times if ms]
    document = run.load(tmp_path / "x.json")
    assert document["program"] == program and document["rows"] == [json.loads(json.dumps(found)) | {"run": 0}]
    assert {"date", "versions", "gpu", "commit"} <= document["runs"][0].keys()
    assert re.match(rf"{re.escape(row.name)} \[reference\]: .*ours \d+\.\d+ ms", run.line(found))


def test_other_libraries_are_held_to_the_truth_too():
    """A wrong one has no time, and says why; nor has one that raises or is not here."""
    program = importlib.import_module("benchmarks.prefill").PROGRAM
    right = functools.partial(fd.chunk_kda, backend="reference")
    peers = {"fla": right, "flash_kda": "can't be imported", "attn_gym": right, "cudnn": lambda **call: 1 / 0}
    row = Row(model("one", "", 2, T=70, memory="random"), "prefill")
    found = run.measure(program, row, setup_of(peers=peers))["contenders"]
    assert found["fla"]["cold_ms"] == 2.0 and found["fla"]["sustained_ms"] == 3.0
    assert found["flash_kda"] == {"problem": "can't be imported"}
    assert found["attn_gym"]["problem"].startswith("ModuleNotFoundError")
    assert found["cudnn"] == {"problem": "ZeroDivisionError: division by zero"}
    peers["fla"] = lambda **call: [1.1 * x for x in right(**call)]
    found = run.measure(program, row, setup_of(peers=peers))["contenders"]
    assert found["fla"]["problem"].startswith("wrong: error o 1.0e-01") and "cold_ms" not in found["fla"]


def test_vllms_fused_step_writes_into_a_tensor():
    def step(out: torch.Tensor, **call: Any) -> None:
        fd.fused_kda_decode(**call, output=out.transpose(0, 1), null_index="non_positive", backend="reference")

    setup = setup_of(peers={"vllm_fused": SimpleNamespace(fused_kda_decode=step)})
    found = run.measure(importlib.import_module("benchmarks.decode").PROGRAM, ROWS["decode"][-1], setup)
    assert found["contenders"]["vllm_fused"]["problem"] is None


def test_readme_has_the_served_row_once_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = {"scenario": "linear", "row": "tokens/s, 64 requests of 8192 in, 32 out", "wave": 0}
    samples = [row | {"off": 1000.0, "on": 1250.0}, row | {"off": 2000.0, "on": 2100.0}, {"scenario": "k3", "row": "x"}]
    document = {"samples": samples, "engines": {"linear:on": {"gpu": "NVIDIA H200"}}}
    (tmp_path / "serve-times.json").write_text(json.dumps(document))
    (tmp_path / "serve-agree.json").write_text(json.dumps({"samples": [], "engines": {}}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    ((name, *cells, _),) = tables.served()
    assert "64 requests of 8192 in, 32 out](benchmarks/results/serve-times.json)" in name
    assert cells == ["1,675 tokens/s", "-", "-", "1,500 tokens/s (1.15x)", "-", "H200"]


def test_the_serving_programs_tables():
    """A row's gain is the median ratio of neighbours; the program starts where there is no engine."""
    program = """if True:
        import run, times
        samples = [dict(scenario="k3", row="step of 1", wave=0, off=x, on=x / 2) for x in (2.0, 6.0)]
        print(times.table(times.summary(samples)))"""
    folder = Path(__file__).parents[2] / "benchmarks" / "serve"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert "| k3 | step of 1, ms | 4.00 | 2.00 | 2.00 (2.00-2.00) |" in done.stdout, done.stderr


def test_a_bundle_packs_its_files_the_same_each_time(tmp_path: Path) -> None:
    bundle = run_path(str(Path(__file__).parents[2] / "benchmarks" / "serve" / "bundle.py"))
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "a.py").write_text("x = 1\n")
    for name in ("first", "second"):
        bundle["pack"](tmp_path, name, tmp_path, ["vllm/a.py"])
    assert (tmp_path / "first.tar.xz").read_bytes() == (tmp_path / "second.tar.xz").read_bytes()
    with tarfile.open(tmp_path / "first.tar.xz") as tar:
        assert tar.extractfile("vllm/a.py").read() == b"x = 1\n"  # type: ignore[union-attr]
