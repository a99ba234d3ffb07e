"""`bench fp32` without a GPU."""

from __future__ import annotations

import ctypes
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashdelta
from flashdelta.tools.bench import fp32, report
from flashdelta.tools.bench.fp32 import FP32, QUICK, Fp32Case, Fp32Ceilings, Outcome, gates_of, run_fp32
from flashdelta.tools.bench.peers import Peer
from flashdelta.tools.bench.protocol import Effort, Timing
from flashdelta.tools.export.bindings import FlashdeltaError, PrefillArgs

SMALL = Fp32Case(H=2, T=40, K=64, C=32, reason="fits a CPU")
NO_FLA = Peer(None, "FLA is not here")


class FakeTimer:
    """Runs the call and says 1 ms."""

    def __call__(self, run):
        run()
        return 1.0


class FakeLibrary:
    """Computes what the C library is to compute, from the addresses that it is given."""

    version = "0"

    def __init__(self, path: str):
        def function(args, stream):
            return 0 if args is None else self.prefill(args._obj, stream or 0) or 0

        self.functions = type("Functions", (), {"fd_prefill_f32": staticmethod(function)})

    def workspace_bytes(self, args: PrefillArgs) -> int:
        return 64

    def prefill(self, args: PrefillArgs, stream: int) -> None:
        if args.workspace_bytes != 64:
            raise FlashdeltaError("ERROR_WORKSPACE", "workspace_bytes: got too few")
        B, H, T, K, chunks = args.B, args.H, args.T, args.K, -(-args.T // args.C)

        def tensor(name: str, *shape: int) -> torch.Tensor:
            count = torch.Size(shape).numel()
            memory = (ctypes.c_float * count).from_address(getattr(args, name))
            return torch.frombuffer(memory, dtype=torch.float32).view(shape)

        inputs = [tensor(name, B, H, T, K) for name in ("q", "k", "v", "g")]
        found = flashdelta.kda_prefill(*inputs, tensor("beta", B, H, T), args.C)
        wide = (B, H, chunks, args.C, K)
        for name, shape, x in zip("owu", ((B, H, T, K), wide, wide), found):
            tensor(name, *shape).copy_(x)


def dry_run(tmp_path: Path, cases, fla: Peer = NO_FLA, library: Path | None = None) -> dict:
    return run_fp32(
        cases,
        device=torch.device("cpu"),
        fla=fla,
        library=library,
        effort=Effort(rounds=3, warmup_ms=0.0),
        path=tmp_path / "results.json",
        timer=FakeTimer(),
        ceilings=Fp32Ceilings(copy_tb_s=4.0, tf32_tflop_s=400.0, fp32_tflop_s=50.0),
    )


def shown(document: dict) -> str:
    console = report.wide_console(record=True, file=io.StringIO())
    console.print(report.fp32_table(document))
    return console.export_text()


@pytest.fixture
def fake_library(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fp32, "Library", FakeLibrary)
    return Path("libflashdelta.so")


def test_rows_are_what_the_issue_asks_for():
    names = [case.name for case in FP32]
    assert len(set(names)) == len(names) == 20
    assert {(case.K, case.C) for case in FP32} == {(64, 32), (128, 64)}
    assert {case.B for case in FP32} == {1, 2, 4} and {case.H for case in FP32} == {8, 16, 32}
    assert min(case.T for case in FP32) == 1024 and max(case.T for case in FP32) == 16384
    assert set(QUICK) <= set(FP32) and len(QUICK) == 4


def test_work_of_a_row():
    case = Fp32Case(B=2, H=3, T=65, K=128, C=64, reason="")
    rows = 2 * 3 * 65
    assert case.chunks == 12
    assert case.bytes == 4 * (rows * (4 * 128 + 128 + 1) + 12 * 64 * (128 + 128))
    assert case.flop == 12 * (10 * 64 * 64 * 128 + 6 * 64 * 128 * 128 + 64**3 // 3)


@pytest.mark.parametrize(("B", "H", "want"), [(1, 1, [0]), (1, 2, [0, 1]), (2, 16, [0, 10, 20, 31])])
def test_checked_heads(B: int, H: int, want: list[int]):
    assert fp32.some_heads(replace(SMALL, B=B, H=H)) == want


@pytest.mark.slow
def test_dry_run_measures_and_saves_every_row(tmp_path: Path, fake_library: Path):
    def fla_chunk_kda(**call):
        return flashdelta.chunk_kda(**call)

    document = dry_run(tmp_path, [SMALL, replace(SMALL, B=2, T=70)], Peer(fla_chunk_kda), fake_library)
    for row in document["rows"]:
        for name in ("ours", "tf32x3", "ieee", "c", "fla_fp32", "fla_bf16"):
            assert row[name]["problem"] is None and row[name]["ms"]["median"] == 1.0, name
        assert row["ours"] == row["tf32x3"] and row["ours"]["host_us"] > 0 and row["c"]["host_us"] > 0
        assert 0 < row["ours"]["error_o"] < 1e-6 and row["c"]["error_u"] < 1e-6
        assert row["fla_bf16"]["error_o"] > 1e-3 > row["fla_fp32"]["error_o"]
        assert row["fla_fp32"]["error_w"] is None
    row = document["rows"][0]
    assert row["floor_ms"] == pytest.approx(SMALL.bytes / 4e9)
    assert row["shares"] == {
        "tf32x3 of copy": pytest.approx(SMALL.bytes / 1e9 / 4),
        "tf32x3 of products": pytest.approx(3 * SMALL.flop / 1e9 / 400),
        "ieee of copy": pytest.approx(SMALL.bytes / 1e9 / 4),
        "ieee of products": pytest.approx(SMALL.flop / 1e9 / 50),
    }
    assert report.load(tmp_path / "results.json") == json.loads(report.to_json(document))
    text = shown(document)
    for expected in ("B2 H2 T70 K64 C32", "copy 4.00 TB/s", "TF32 GEMM 400 TFLOP/s", "fp32 GEMM 50 TFLOP/s"):
        assert expected in text
    said = report.fp32_summary(document)
    assert said[0] == "time <= FLA's on float32: 2 of 2 rows"
    assert said[1].startswith("error <= FLA's / 100: 0 of 2 rows, not: B1 H2 T40 K64 C32; ")
    assert "correctness: all rows passed" in said


def test_what_is_missing_is_said(tmp_path: Path):
    document = dry_run(tmp_path, [SMALL])
    row = document["rows"][0]
    assert row["c"]["problem"] == "not asked for (--library)" and row["fla_bf16"]["problem"] == "FLA is not here"
    assert row["met"] is None and row["gate"] == ""
    said = report.fp32_summary(document)
    assert said[:4] == [f"{gate}: not measured" for gate in row["gates"]]
    assert "no C library time in every row: not asked for (--library)" in said
    assert "no FLA fp32 time in every row: FLA is not here" in said


@pytest.mark.parametrize("damage", ["o", "w", "u", "unwritten", "raises"])
def test_a_wrong_kernel_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str):
    right = flashdelta.kda_prefill

    def kernel(*tensors, **call):
        if damage == "raises":
            raise RuntimeError("no such kernel\nand more")
        results = dict(zip("owu", right(*tensors, **call)))
        if damage == "unwritten":
            results["u"][..., -1, -1] = torch.nan
        else:
            results[damage] *= 1 + 2e-5
        return tuple(results.values())

    monkeypatch.setattr(flashdelta, "kda_prefill", kernel)
    document = dry_run(tmp_path, [SMALL])
    row = document["rows"][0]
    assert row["ours"]["ms"] is None and row["ours"]["problem"] is not None
    assert report.failures(document) == [row]
    assert ("wrong" in shown(document)) == (damage != "raises")


def timed(ms: float, **others: float) -> Outcome:
    return Outcome(ms=Timing(ms, ms, ms, 3), **others)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, None),
        ({"fla_fp32": timed(0.9, error_o=1e-3)}, "time <= FLA's on float32"),
        ({"fla_fp32": timed(2.0, error_o=9e-5)}, "error <= FLA's / 100"),
        ({"c": timed(1.04, host_us=4.0)}, "C <= 1.03 x Python"),
        ({"c": timed(1.02, host_us=5.1)}, "C call <= 5 us"),
    ],
)
def test_gates(changes: dict, missed: str | None):
    outcomes = {"ours": timed(1.0, error_o=1e-6), "fla_fp32": timed(2.0, error_o=1e-3), "c": timed(1.02, host_us=4.0)}
    gates = gates_of(outcomes | changes)
    assert [name for name, met in gates.items() if not met] == ([missed] if missed else [])
    assert all(met is not None for met in gates.values())


def test_command_refuses_a_machine_without_a_gpu():
    testing = pytest.importorskip("typer.testing")
    from flashdelta.tools.cli.app import app

    result = testing.CliRunner().invoke(
        app, ["bench", "fp32", "--quick", "--device", "cpu"], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    assert result.exit_code == 2 and "wanted an NVIDIA GPU" in result.output


def test_saved_results_are_shown_again(tmp_path: Path):
    testing = pytest.importorskip("typer.testing")
    from flashdelta.tools.cli.app import app

    dry_run(tmp_path, [SMALL])
    result = testing.CliRunner().invoke(
        app, ["bench", "show", str(tmp_path / "results.json")], env={"COLUMNS": "300", "TERM": "dumb"}
    )
    assert result.exit_code == 0 and SMALL.name in result.output
