"""The benchmark's arithmetic, protocol and report, without a GPU."""

from __future__ import annotations

import io
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

import flashdelta
from flashdelta.tools.bench import kernels, report
from flashdelta.tools.bench.cases import (
    CASES,
    FEW_HEADS,
    PREFILL,
    TABLES,
    PrefillCase,
    Shape,
    Target,
    lengths_named,
    random_lengths,
    select,
    skewed_lengths,
    uniform_lengths,
)
from flashdelta.tools.bench.inputs import MODEL_OPTIONS, random_inputs
from flashdelta.tools.bench.oracle import absolute_errors, relative_error, truth
from flashdelta.tools.bench.peers import Peer
from flashdelta.tools.bench.prefill import compare, judge, run_prefill
from flashdelta.tools.bench.protocol import Ceilings, Effort, HostTimer, Timing, measure_ceilings, take_turns
from flashdelta.tools.bench.split import measure_split
from flashdelta.tools.bench.startup import run_startup

CPU = torch.device("cpu")
SMALL = PrefillCase("small", Shape(T=70, H=2, K=32, V=32), "fits a CPU", Target(1.0, 0.5))
SMALL_PACKED = PrefillCase("packed", Shape(lengths=(33, 0, 20), H=2, K=32, V=32), "packed", Target(1.0, 0.5))
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
    assert all(0 < case.target.aim < case.target.must and case.reason for case in (*PREFILL, *FEW_HEADS))


def test_the_classic_table_has_52_rows():
    names = [case.name for case in CASES["classic"]]
    assert len(set(names)) == len(names) == 52
    assert names[0] == "B1 T1024 H64" and "B2 T16384 H8 HV64" in names and "packed skewed 10 of 8192 H16 HV64" in names
    for case in CASES["classic"]:
        assert case.shape.value_heads == 64 and case.target is None and case.reason
        assert case.shape.tokens in (1024, 4096, 8192, 16384)


def test_every_case_is_in_one_table():
    for case in itertools.chain(*CASES.values()):
        assert sum(case in cases for cases in TABLES.values()) == 1


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


def test_uniform_and_skewed_lengths():
    assert uniform_lengths(4, 10) == (3, 3, 2, 2)
    assert skewed_lengths(3, 11) == (5, 3, 3)
    assert sum(skewed_lengths(20, 4096)) == 4096 and skewed_lengths(20, 4096)[0] == 2048


def test_select_by_name():
    assert [case.name for case in select(PREFILL, ["T8192 H64"])] == ["T8192 H64"]
    names = [case.name for case in select(PREFILL, ["T8192 H64", "GVA"])]
    assert names == ["T8192 H64", "GVA T8192 H16 HV64"]


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


def test_absolute_errors():
    x, reference = torch.tensor([1.0, 2.0, 2.0, -1.0]), torch.tensor([1.0, 2.0, 1.0, 0.0])
    assert absolute_errors(x, reference) == pytest.approx((math.sqrt(0.5), 1.0))
    assert all(math.isnan(error) for error in absolute_errors(x * math.nan, reference))


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
    assert 0 < row["ours"]["rmse_o"] < row["ours"]["max_error_o"]
    assert row["ours"]["rmse_state"] < row["ours"]["max_error_state"] < 1e-3
    assert row["floor_ms"] == pytest.approx(SMALL.shape.forward_bytes() / 4.3e12 * 1e3)
    assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / 2.0)
    assert (row["speedup"], row["met"], row["backend"]) == (None, None, "reference")
    assert row["fla"]["problem"] == "FLA is not here"
    assert row["reference"] == "recurrence, float64"
    assert report.load(tmp_path / "results.json") == json.loads(report.to_json(document))
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_row_without_a_bound_on_its_decays_is_held_to_the_one_with(tmp_path):
    unbounded = replace(SMALL, name="unbounded", bounded=False, forgetful=True, against=("small", 1.3))
    document = dry_run(tmp_path, (SMALL, unbounded))
    row = document["rows"][1]
    assert row["ours"]["error_o"] < 6e-3
    assert (row["gate"], row["must_ms"], row["met"]) == ("<= 1.3x small", None, None)  # not on this GPU
    report.prefill_table(document | {"rows": [row]})
    for ours, met in ((1.2, True), (1.4, False)):
        judged = {**row, "backend": "hopper", "ours": {"ms": {"median": ours}}}
        compare(unbounded, judged, [{"name": "small", "ours": {"ms": {"median": 1.0}}}], gated=True)
        assert (judged["must_ms"], judged["met"]) == (1.3, met)


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


def shown(table):
    console = report.wide_console(record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_table_and_summary(tmp_path):
    document = sample_document(tmp_path)
    text = shown(report.prefill_table(document))
    for expected in ("T8192", "0.500", "2.000", "4.00x", "not met", "4.0e-03 3.0e-03", "copy 4.30 TB/s"):
        assert expected in text
    assert report.prefill_summary(document)[:2] == [
        "gates: 1 of 2 met, not: T8192 (0.500)",
        "correctness: all rows passed",
    ]


def test_json_is_strict_about_nan():
    assert json.loads(report.to_json({"a": [math.nan, -math.inf, 1.0]})) == {"a": ["nan", "-inf", 1.0]}


def test_classic_table_and_summary(tmp_path):
    cases = [replace(case, target=None) for case in (SMALL, SMALL_PACKED)]
    fla = Peer(lambda **inputs: flashdelta.chunk_kda(**inputs, backend="reference"))
    settings = {"fla": fla, "fla_rows": frozenset(["small"]), "timer": FakeTimer([2.0])}
    document = dry_run(tmp_path, cases, benchmark="classic", **settings)
    assert document["benchmark"] == "classic"
    assert not {"must_ms", "gate", "met"} & document["rows"][0].keys()
    text = shown(report.classic_table(document))
    ours = document["rows"][0]["ours"]
    assert f"{ours['rmse_o']:.1e} {ours['max_error_o']:.1e}" in text
    assert f"{ours['rmse_state']:.1e} {ours['max_error_state']:.1e}" in text
    assert report.classic_summary(document)[:2] == [
        "FLA/ours: 1.00x (geometric mean of 1 rows, least 1.00x)",
        "correctness: all rows passed",
    ]


def test_lengths_are_read_off_a_batchs_name():
    assert lengths_named("1K+1+63") == (1024, 1, 63)
    assert lengths_named("2x16K+3x256") == (16384, 16384, 256, 256, 256)
    names = [case.name for case in CASES["split"]]
    assert len(set(names)) == len(names) == 52
    assert {case.shape.H for case in CASES["split"]} == {4, 8}


def test_split_table_and_summary(tmp_path):
    cases = [replace(case, target=None) for case in (SMALL, SMALL_PACKED)]
    fla = Peer(lambda **inputs: flashdelta.chunk_kda(**inputs, backend="reference"))
    settings = {"fla": fla, "fla_rows": frozenset(["small"]), "timer": FakeTimer([2.0])}
    document = dry_run(tmp_path, cases, benchmark="split", measure=measure_split, **settings)
    row = document["rows"][0]
    assert row["gain"] == 1.0 and set(row["segments"]) == {1} and row["whole"]["problem"] is None
    assert "whole" in shown(report.split_table(document))
    document["rows"][1] |= {"gain": 2.0, "segments": (3, 1)}
    assert "3 1" in shown(report.split_table(document))
    assert report.split_summary(document)[:4] == [
        "split rows: 2.00x as fast as whole (geometric mean), best 2.00x, worst 2.00x",
        "whole rows: planning costs 0.0% at most, 0.0% where the host has the lengths",
        "FLA with its own split over ours: 1.00x (geometric mean)",
        "correctness: all rows passed",
    ]


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot_times(sample_document(tmp_path), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_plot_has_the_floor_and_every_contender_at_its_lengths(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self.axes[0]))
    document = sample_document(tmp_path)
    report.plot_times(document, tmp_path / "plot.svg")
    (axes,) = drawn
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    floor = lines.pop("floor: q, k, v, g, o moved once at 4.30 TB/s")
    assert floor == [[row["shape"]["T"], row["floor_ms"]] for row in document["rows"]]
    assert lines == {"FLA": [[1024, 0.4], [8192, 2.0]], "flashdelta, reference": [[1024, 0.1], [8192, 0.5]]}


def test_plot_without_its_rows_says_which_it_needs(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="H = HV = 64"):
        report.plot_times(dry_run(tmp_path), tmp_path / "plot.png")


def test_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'flashdelta\[bench\]'"):
        report.plot_times(sample_document(tmp_path), tmp_path / "plot.png")


@pytest.mark.slow
def test_startup_times_two_processes():
    document = run_startup(CPU, "reference", tokens=64)
    assert [row["process"] for row in document["rows"]] == ["empty cache"] * 4 + ["new process, cache filled"] * 4
    assert all(row["seconds"] > 0 for row in document["rows"])
    assert [row["budget_s"] for row in document["rows"][:4]] == [8.0, 0.5, 0.5, 8.0]


@pytest.mark.slow
def test_startup_reports_why_the_process_failed():
    with pytest.raises(RuntimeError, match="tensors are on the CPU"):
        run_startup(CPU, "triton", tokens=64)


# --- gates ---


def target(name):
    return next(case.target for case in (*PREFILL, *FEW_HEADS) if case.name == name)


def test_the_gate_depends_on_the_backend():
    headline = target("T8192 H64")
    assert judge(headline, "triton", 1.0, 1.49) == (">= 1.5x FLA", False)
    assert judge(headline, "triton", 1.0, 1.5) == (">= 1.5x FLA", True)
    assert judge(headline, "triton", None, None) == (">= 1.5x FLA", None)
    assert judge(target("T8192 H96"), "hopper", 0.80, None) == ("<= 0.80 ms", True)
    assert judge(target("T8192 H96"), "hopper", 0.81, 9.0) == ("<= 0.80 ms", False)
    assert judge(headline, "reference", 0.1, 9.0) == (None, None)


@pytest.mark.parametrize(
    ("ours_ms", "speedup", "met"),
    [
        (0.55, 1 / 0.31, True),
        (0.56, 5.0, False),
        (0.50, 3.22, False),
        (0.50, None, None),  # FLA was not timed
        (0.56, None, False),
        (None, None, None),
    ],
)
def test_hopper_must_meet_both_its_time_and_its_share_of_flas(ours_ms, speedup, met):
    assert judge(target("T8192 H64"), "hopper", ours_ms, speedup) == ("<= 0.55 ms, <= 0.31 of FLA's", met)


def test_the_rows_that_have_a_share_of_flas_time():
    shares = {case.name: case.target.share for case in CASES["prefill"] if case.target and case.target.share}
    assert shares == {"T8192 H64": 0.31, "packed 6 uneven H96": 0.30, "GVA T8192 H16 HV64": 0.33}


def test_few_heads_are_judged_too():
    """Where sequences are split."""
    assert len(FEW_HEADS) == 9
    for case in FEW_HEADS:
        assert judge(case.target, "hopper", case.target.must, 1.0) == (f"<= {case.target.must:.2f} ms", True)
        assert judge(case.target, "hopper", case.target.must + 0.01, 9.0)[1] is False
        assert judge(case.target, "triton", 9.0, 1.0) == (">= 1.0x FLA", True)


# --- kernels ---

H200 = kernels.Multiprocessor(count=132, registers=65536, shared_bytes=233472, threads=2048)
HEADLINE = Shape(T=8192, H=64)


def trace_event(name, us, ts, registers=128, shared=1000, grid=(264, 1, 1), block=(64, 1, 1)):
    args = {"registers per thread": registers, "shared memory": shared, "grid": list(grid), "block": list(block)}
    return {"cat": "kernel", "name": name, "dur": us, "ts": ts, "args": args}


def trace_of(*names_and_us):
    others = [{"cat": "gpu_memset", "name": "Memset", "ts": 0, "dur": 1}, {"name": "process_name", "ph": "M"}]
    events = [trace_event(name, us, ts) for ts, (name, us) in enumerate(names_and_us)]
    return {"traceEvents": [*others, *reversed(events)]}


def test_work_of_the_headline_is_what_the_design_counts():
    prepare, recurrence = kernels.prepare_work(HEADLINE), kernels.recurrence_work(HEADLINE)
    tensor = 2 * 8192 * 64 * 128
    decay, beta = 8192 // 64 * 64 * 128 * 4, 2 * 8192 * 64
    assert prepare.bytes == (3 + 4) * tensor + beta + decay
    assert recurrence.bytes == (4 + 2) * tensor + decay + 64 * 128 * 128 * 4
    assert prepare.flop + recurrence.flop == pytest.approx(94e9, rel=0.02)


def test_work_counts_partial_chunks_whole_and_query_heads_once():
    ragged = Shape(lengths=(65, 0, 1), H=1, HV=4, K=32, V=64)
    assert kernels.chunk_counts(ragged) == [2, 0, 1]
    workspace = 3 * 4 * (2 * (3 * 64 * 32 + 2 * 64 * 64) + 4 * 32)
    assert kernels.prepare_work(ragged).bytes == workspace + 2 * 66 * (2 * 32 + 4 * 32 + 4)
    assert kernels.recurrence_work(ragged).bytes == workspace + 2 * 2 * 66 * 4 * 64 + 4 * 3 * 4 * 32 * 64
    assert kernels.recurrence_work(ragged).flop == 3 * 4 * (4 * 64 * 64 * 64 + 6 * 64 * 32 * 64)


def test_kernel_runs_come_in_the_order_of_their_execution():
    runs = kernels.kernel_runs(trace_of(("prepare_kernel", 3.0), ("recurrence_kernel", 2.5)))
    assert [run.name for run in runs] == ["prepare_kernel", "recurrence_kernel"]
    assert runs[0] == kernels.KernelRun("prepare_kernel", 3.0, 264, 64, 128, 1000)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "residents"),
    [
        (64, 255, 1000, 4 * (16384 // (256 * 32)) // 2),  # registers: 2 warps a scheduler
        (128, 168, 0, 3),  # 168 x 32 = 21 units of 256: 3 warps a scheduler
        (128, 128, 113 * 1024, 2),  # shared memory: 228 KiB hold two with their reserved KiB
        (128, 128, 227 * 1024, 1),
        (1024, 32, 0, 2),  # threads
    ],
)
def test_programs_a_multiprocessor_holds(threads, registers, shared, residents):
    assert H200.residents(kernels.KernelRun("k", 1.0, 1, threads, registers, shared)) == residents


def test_description_of_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "spilled_bytes", lambda kernel: 0)
    names = ("prepare_kernel", 600.0), ("recurrence_kernel", 256.0), ("compose", 1.0), ("compose", 2.0)
    runs = kernels.kernel_runs(trace_of(*names * 3))
    prepare, recurrence, compose = kernels.describe(runs, 3, HEADLINE, CEILINGS, H200)
    assert (prepare["stage"], prepare["ms"], prepare["launches"]) == ("prepare", 0.6, 1)
    assert prepare["share_of_copy"] == pytest.approx(kernels.prepare_work(HEADLINE).bytes / 0.6e-3 / 4.3e12)
    assert prepare["share_of_gemm"] == pytest.approx(kernels.prepare_work(HEADLINE).flop / 0.6e-3 / 700e12)
    assert (prepare["registers"], prepare["shared_bytes"], prepare["spill_bytes"]) == (128, 1000, 0)
    assert (prepare["ctas_per_sm"], prepare["waves"]) == (8, 264 / (8 * 132))
    assert "us_per_chunk" not in prepare and recurrence["us_per_chunk"] == pytest.approx(256 / 128)
    assert (compose["stage"], compose["ms"], compose["launches"]) == (None, pytest.approx(3e-3), 2)
    assert "bytes" not in compose


def test_a_trace_with_lost_runs_is_refused():
    runs = kernels.kernel_runs(trace_of(*[("prepare_kernel", 1.0)] * 5))
    with pytest.raises(RuntimeError, match="5 runs of prepare_kernel in 3 calls"):
        kernels.describe(runs, 3, HEADLINE, CEILINGS, H200)


def test_spills_of_a_loaded_kernel(monkeypatch):
    compiler = pytest.importorskip("triton.compiler")

    def compiled(registers, spilled_words, module):
        kernel = object.__new__(compiler.CompiledKernel)
        vars(kernel).update(name="mine", n_regs=registers, n_spills=spilled_words, module=module, _module_pid=None)
        return kernel

    loaded = [compiled(128, 3, "module"), compiled(128, 2, "module"), compiled(255, 9, "module"), compiled(96, 7, None)]
    spills = [
        kernels.spilled_bytes(kernels.KernelRun("mine", 1.0, 1, 32, registers, 0)) for registers in (128, 255, 96)
    ]
    assert spills == [12, 36, None]
    assert len(loaded) == 4  # alive until here


def test_a_kernel_that_triton_did_not_compile_has_no_known_spills():
    assert kernels.spilled_bytes(kernels.KernelRun("cutlass", 1.0, 1, 32, 32, 0)) is None


def fake_profiler(run):
    """Calls `run` and pretends that each call of flashdelta launched two kernels, and the timer one."""
    before = len(TIMED.calls)
    run()
    found = []
    for result in TIMED.calls[before:]:
        found += [("fill", 50.0)] + ([("prepare_kernel", 600.0), ("recurrence_kernel", 256.0)] if result else [])
    return kernels.kernel_runs(trace_of(*found))


TIMED = FakeTimer([2.0])


def test_kernel_report_leaves_out_what_the_timer_launches(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "profiled", fake_profiler)
    monkeypatch.setattr(kernels.Multiprocessor, "of", lambda device: H200)
    document = dry_run(tmp_path, benchmark="kernels", measure=kernels.measure_kernels, timer=TIMED)
    row = document["rows"][0]
    assert [kernel["kernel"] for kernel in row["kernels"]] == ["prepare_kernel", "recurrence_kernel"]
    text = shown(report.kernels_table(document))
    for expected in ("prepare_kernel", "0.600", "0.256", "CTAs/SM", "128.00"):
        assert expected in text
    assert "kernels 0.856 ms" in report.kernels_summary(document)[0]


def test_kernels_of_a_wrong_result_are_not_reported(tmp_path, monkeypatch):
    def fail(**arguments):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(flashdelta, "chunk_kda", fail)
    document = dry_run(tmp_path, benchmark="kernels", measure=kernels.measure_kernels)
    assert document["rows"][0]["kernels"] == []
    assert "no such kernel" in "".join(report.kernels_summary(document))
