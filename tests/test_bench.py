"""The benchmark's arithmetic, protocol and report, without a GPU."""

from __future__ import annotations

import io
import itertools
import json
import math

import pytest
import torch

import flashdelta
from flashdelta.bench import report
from flashdelta.bench.cases import FEW_HEADS, PREFILL, PrefillCase, Shape, random_lengths, select
from flashdelta.bench.inputs import MODEL_OPTIONS, random_inputs
from flashdelta.bench.oracle import relative_error, truth
from flashdelta.bench.peers import Peer
from flashdelta.bench.prefill import judge, run_prefill
from flashdelta.bench.protocol import Ceilings, Effort, HostTimer, Timing, measure_ceilings, take_turns
from flashdelta.bench.startup import run_startup

CPU = torch.device("cpu")
SMALL = PrefillCase("small", Shape(T=70, H=2, K=32, V=32), must=1.0, aim=0.5, reason="fits a CPU")
SMALL_PACKED = PrefillCase("packed", Shape(lengths=(33, 0, 20), H=2, K=32, V=32), must=1.0, aim=0.5, reason="packed")
CEILINGS = Ceilings(copy_tb_s=4.3, gemm_tflop_s=700.0)
EFFORT = Effort(rounds=3, warmup_ms=0.0)


class FakeTimer:
    """Runs the call and reports a time from a script instead of a clock."""

    def __init__(self, ms):
        self.ms = itertools.cycle(ms)
        self.calls = []

    def __call__(self, run):
        self.calls.append(run())
        return next(self.ms)


def dry_run(tmp_path, cases=(SMALL,), **changes):
    settings = {"device": CPU, "fla": Peer(None, "FLA is not here"), "fla_rows": frozenset(), "effort": EFFORT}
    settings |= {"timer": FakeTimer([2.0]), "ceilings": CEILINGS, "path": tmp_path / "results.json"}
    return run_prefill(cases, **{**settings, **changes})


# --- cases ---


def test_tables_hold_every_anchor_row_once():
    names = [case.name for case in (*PREFILL, *FEW_HEADS)]
    assert (len(PREFILL), len(FEW_HEADS)) == (11, 9)
    assert len(set(names)) == 20
    assert all(0 < case.aim < case.must and case.reason for case in (*PREFILL, *FEW_HEADS))


@pytest.mark.parametrize(
    ("name", "floor"),
    [
        ("T8192 H32", 0.078),
        ("T8192 H64", 0.156),
        ("B2 T8192 H64", 0.312),
        ("packed 20 random H64", 0.156),
        ("GVA T8192 H16 HV64", 0.109),
        ("T131072 H4", 0.156),
        ("128K + 5 x 1K H4", 0.162),
        ("64K+512+256+128 H8", 0.158),
    ],
)
def test_floor_at_the_copy_rate_of_an_h200(name, floor):
    shape = next(case.shape for case in (*PREFILL, *FEW_HEADS) if case.name == name)
    assert shape.forward_bytes() / 4.30e12 * 1e3 == pytest.approx(floor, abs=6e-4)


def test_floor_with_different_head_dims():
    assert Shape(T=1, H=1, HV=3, K=32, V=64).forward_bytes() == 2 * (2 * 32 + 3 * (2 * 64 + 32))


def test_random_lengths_add_up_and_repeat():
    lengths = random_lengths(20, 8192)
    assert len(lengths) == 20 and sum(lengths) == 8192 and min(lengths) >= 1
    assert lengths == random_lengths(20, 8192)


def test_select_by_part_of_a_name():
    assert [case.name for case in select(FEW_HEADS, ["H12"])] == ["T8192 H12"]
    assert select(FEW_HEADS, []) == list(FEW_HEADS)
    with pytest.raises(ValueError, match=r"'H13'.*T8192 H12"):
        select(FEW_HEADS, ["H13"])


# --- oracle ---


def test_truth_of_packed_sequences_equals_the_packed_reference():
    inputs = random_inputs(SMALL_PACKED.shape, CPU, dtype=torch.float64, initial_state=True)
    inputs = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in inputs.items()}
    o, state = flashdelta.chunk_kda(**inputs, **MODEL_OPTIONS, backend="reference")
    for method in ("recurrence", "chunked"):
        expected = truth(inputs, MODEL_OPTIONS, method)
        assert relative_error(o, expected.o) < 1e-13
        assert relative_error(state, expected.state) < 1e-13


def test_relative_error():
    one = torch.ones(4)
    assert relative_error(one, one) == 0
    assert relative_error(1.5 * one, one) == pytest.approx(0.5)
    assert relative_error(0 * one, 0 * one) == 0
    assert relative_error(one, 0 * one) == math.inf
    assert math.isnan(relative_error(torch.tensor([1.0, math.nan]), torch.ones(2)))
    assert math.isnan(relative_error(torch.tensor([1.0, math.nan]), torch.zeros(2)))


# --- protocol ---


def test_contenders_take_turns_and_rotate():
    order = []
    timings = take_turns(
        {name: (lambda name=name: order.append(name)) for name in "abc"}, FakeTimer([1.0, 2.0, 3.0]), EFFORT
    )
    timed = order[9:]  # after three warm-up calls of each
    assert timed == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {name: timing.samples for name, timing in timings.items()} == {"a": 3, "b": 3, "c": 3}
    assert timings["a"].median == 2.0


def test_slow_contenders_get_fewer_rounds():
    effort = Effort(rounds=100, min_rounds=5, budget_ms=100.0, warmup_ms=0.0)
    assert take_turns({"slow": lambda: None}, FakeTimer([10.0]), effort)["slow"].samples == 10
    assert take_turns({"slower": lambda: None}, FakeTimer([1e4]), effort)["slower"].samples == 5


def test_timing_statistics():
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(median=2.0, min=1.0, p90=3.0, samples=3)


def test_ceilings_count_bytes_both_ways_and_two_flops_a_product():
    ceilings = measure_ceilings(CPU, FakeTimer([2.0]), copy_bytes=1000, gemm_size=16, effort=EFFORT)
    assert ceilings.copy_tb_s == pytest.approx(2 * 1000 / 2e-3 / 1e12)
    assert ceilings.gemm_tflop_s == pytest.approx(2 * 16**3 / 2e-3 / 1e12)


def test_host_timer_measures_milliseconds():
    assert 0 < HostTimer()(lambda: sum(range(1000))) < 1000


# --- prefill ---


def test_dry_run_measures_and_saves_every_row(tmp_path):
    seen = []
    document = dry_run(tmp_path, (SMALL, SMALL_PACKED), progress=lambda row: seen.append(row["name"]))
    assert seen == ["small", "packed"]
    row = document["rows"][0]
    assert row["ours"]["ms"]["median"] == 2.0
    assert row["ours"]["error_o"] < 6e-3 and row["ours"]["error_state"] < 1e-5
    assert row["floor_ms"] == pytest.approx(SMALL.shape.forward_bytes() / 4.3e12 * 1e3)
    assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / 2.0)
    assert (row["speedup"], row["met"], row["backend"]) == (None, None, "reference")
    assert row["fla"]["problem"] == "FLA is not here"
    assert row["reference"] == "recurrence, float64"
    assert report.load(tmp_path / "results.json") == json.loads(report.to_json(document))
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_an_interrupted_run_keeps_the_rows_it_had(tmp_path):
    def interrupt(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dry_run(tmp_path, (SMALL, SMALL_PACKED), progress=interrupt)
    assert [row["name"] for row in report.load(tmp_path / "results.json")["rows"]] == ["small"]


def test_peer_is_timed_beside_us_on_the_same_inputs(tmp_path):
    fla = Peer(lambda **inputs: flashdelta.fused_recurrent_kda(**{k: v for k, v in inputs.items() if k != "safe_gate"}))
    document = dry_run(tmp_path, fla=fla, fla_rows=frozenset(["small"]), timer=FakeTimer([2.0]))
    row = document["rows"][0]
    assert row["speedup"] == 1.0
    assert row["fla"]["error_o"] < 6e-3
    assert "met" not in report.prefill_summary(document)[0]


@pytest.mark.parametrize("damage", ["wrong", "unwritten", "raises"])
def test_a_wrong_kernel_is_not_timed(tmp_path, monkeypatch, damage):
    right = flashdelta.chunk_kda

    def kernel(**arguments):
        o, state = right(**{name: x for name, x in arguments.items() if name != "out"})
        if damage == "raises":
            raise RuntimeError("no such kernel\nand more")
        if damage == "wrong":
            return o * 1.01, state
        arguments.get("out", o)[:, 1:] = o[:, 1:]
        return arguments.get("out", o), state

    monkeypatch.setattr(flashdelta, "chunk_kda", kernel)
    # the oracle itself goes through the recurrence and stays right
    monkeypatch.setattr(flashdelta, "explain", lambda *_, **__: flashdelta.Explanation("reference", ()))
    row = dry_run(tmp_path)["rows"][0]
    assert row["ours"]["ms"] is None
    assert {
        "wrong": "wrong: error o 1.0e-02",
        "unwritten": "wrong: error o nan",
        "raises": "RuntimeError: no such kernel",
    }[damage] in row["ours"]["problem"]
    assert report.failures({"rows": [row]}) == [row]


# --- report ---


def sample_document(tmp_path):
    document = dry_run(tmp_path)
    row = document["rows"][0]
    rows = []
    for T, ours in ((1024, 0.1), (8192, 0.5)):
        timing = {"median": ours, "min": ours, "p90": ours, "samples": 9}
        shape = {**row["shape"], "T": T, "H": 64, "HV": 64}
        fla = {
            **row["fla"],
            "ms": {**timing, "median": 4 * ours},
            "error_o": 4e-3,
            "error_state": 3e-3,
            "problem": None,
        }
        measured = {
            "ours": {**row["ours"], "ms": timing},
            "fla": fla,
            "speedup": 4.0,
            "must_ms": 0.3,
            "gate": "<= 0.30 ms",
            "met": ours < 0.3,
        }
        rows.append({**row, **measured, "name": f"T{T}", "shape": shape})
    return {**document, "rows": rows}


def test_table_and_summary(tmp_path):
    document = sample_document(tmp_path)
    console = report.wide_console(record=True, file=io.StringIO())
    console.print(report.prefill_table(document))
    text = console.export_text()
    for expected in ("T8192", "0.500", "2.000", "4.00x", "not met", "4.0e-03 3.0e-03", "copy 4.30 TB/s"):
        assert expected in text
    assert report.prefill_summary(document)[:2] == [
        "gates: 1 of 2 met, not: T8192 (0.500)",
        "correctness: all rows passed",
    ]


def test_json_is_strict_about_nan():
    assert json.loads(report.to_json({"a": [math.nan, -math.inf, 1.0]})) == {"a": ["nan", "-inf", 1.0]}


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot_prefill(sample_document(tmp_path), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_plot_without_its_rows_says_which_it_needs(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="H = HV = 64"):
        report.plot_prefill(dry_run(tmp_path), tmp_path / "plot.png")


def test_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'flashdelta\[bench\]'"):
        report.plot_prefill(sample_document(tmp_path), tmp_path / "plot.png")


def test_startup_times_two_processes():
    document = run_startup(CPU, "reference", tokens=64)
    assert [row["process"] for row in document["rows"]] == ["empty cache"] * 4 + ["new process, cache filled"] * 4
    assert all(row["seconds"] > 0 for row in document["rows"])
    assert [row["budget_s"] for row in document["rows"][:4]] == [8.0, 0.5, 0.5, 8.0]


def test_startup_reports_why_the_process_failed():
    with pytest.raises(RuntimeError, match="tensors are on the CPU"):
        run_startup(CPU, "triton", tokens=64)


def test_the_gate_depends_on_the_backend():
    headline = next(case for case in PREFILL if case.name == "T8192 H64")
    assert judge(headline, "triton", 1.0, 1.49) == (">= 1.5x FLA", False)
    assert judge(headline, "triton", 1.0, 1.5) == (">= 1.5x FLA", True)
    assert judge(headline, "triton", None, None) == (">= 1.5x FLA", None)
    assert judge(headline, "hopper", 0.56, 3.0) == ("<= 0.55 ms", False)
    assert judge(FEW_HEADS[0], "triton", 1.0, 0.5) == (None, None)
