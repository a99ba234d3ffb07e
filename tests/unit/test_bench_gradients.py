"""`bench train` and `bench wy` without a GPU."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch

import flashdelta
from flashdelta.tools.bench import gradients_report, kernels, report, train, wy
from flashdelta.tools.bench.cases import Shape
from flashdelta.tools.bench.peers import Peer, WyPeer
from flashdelta.tools.bench.protocol import Ceilings, Effort
from flashdelta.tools.bench.train import TRAIN, TrainCase, run_train
from flashdelta.tools.bench.wy import GRADIENTS, WY, WyCase, run_wy, wy_inputs, wy_truth
from flashdelta.tools.cli.bench import show_results

CPU = torch.device("cpu")
SMALL = Shape(T=70, H=1, HV=2, K=32, V=64)
PACKED = Shape(lengths=(65, 0, 3), H=2, K=32, V=32)
TRAIN_ROWS = [
    TrainCase("small", SMALL, "fits a CPU", must=2.1, aim=1.6),
    TrainCase("packed", PACKED, "fits a CPU"),
    TrainCase("softplus", SMALL, "fits a CPU", bounded=False),
]
WY_ROWS = [WyCase("small", SMALL, "fixed length", "fits a CPU"), WyCase("packed", PACKED, "packed", "fits a CPU")]


class FakeTimer:
    """Runs the call and says 2 ms."""

    def __call__(self, run):
        run()
        return 2.0


def dry_run(run, tmp_path, cases, fla=None):
    return run(
        cases,
        device=CPU,
        backend="reference",
        fla=fla,
        effort=Effort(rounds=3, warmup_ms=0.0),
        path=tmp_path / "results.json",
        timer=FakeTimer(),
        ceilings=Ceilings(copy_tb_s=4.3, gemm_tflop_s=700.0),
    )


def shown(table):
    console = report.wide_console(record=True, file=io.StringIO())
    console.width = 400
    console.print(table)
    return console.export_text()


# ---- train --------------------------------------------------------------------------------------------------------------


def test_training_rows_are_what_the_anchors_ask_for():
    assert {case.name: (case.must, case.aim) for case in TRAIN if case.must} == {
        "B1 T8192 H32": (2.1, 1.6),
        "B4 T2048 H32": (2.1, 1.6),
        "B1 T8192 H64": (4.0, 3.1),
    }
    assert all(case.shape.B * case.shape.tokens == 8192 for case in TRAIN)
    assert set(train.QUICK) < set(TRAIN) and len(train.QUICK) == 2


def test_training_dry_run_measures_and_saves_every_row(tmp_path):
    document = dry_run(run_train, tmp_path, TRAIN_ROWS, Peer(None, "FLA is not here"))
    assert [row["ours"]["problem"] for row in document["rows"]] == [None] * 3
    row = document["rows"][0]
    assert row["ours"]["ms"]["median"] == row["ours"]["forward_ms"]["median"] == 2.0
    assert set(row["ours"]["error"]) == set(train.LEAVES)
    assert all(error < 1e-2 for row in document["rows"] for error in row["ours"]["error"].values())
    # q, k, g [70, .., 32] and v, o's gradient [70, 2, 64] in bf16, beta; A_log and dt_bias in fp32; all twice
    moved = 2 * (2 * 70 * (2 * 32 + 2 * 32 + 2 * 2 * 64 + 2) + 4 * (2 + 2 * 32))
    assert row["bytes"] == moved and row["floor_ms"] == pytest.approx(moved / 4.3e9)
    assert (row["gate"], row["met"]) == ("<= 2.1 ms, <= 0.50 of FLA's, <= 0.70 of its memory", None)
    assert report.load(tmp_path / "results.json") == json.loads(report.to_json(document))
    assert "2.000" in shown(gradients_report.train_table(document))
    assert "no FLA time in every row: FLA is not here" in gradients_report.train_summary(document)


def test_fla_trains_beside_us_on_the_same_inputs(tmp_path):
    fla = Peer(lambda **inputs: flashdelta.chunk_kda(**inputs, backend="reference"))
    document = dry_run(run_train, tmp_path, TRAIN_ROWS[:2], fla)
    for row in document["rows"]:
        assert row["speedup"] == row["forward_speedup"] == 1.0
        assert row["fla"]["error"] == row["ours"]["error"]
    assert gradients_report.train_summary(document)[1].startswith("FLA/ours: 1.00x (geometric mean of 2 rows")


def test_wrong_gradients_are_not_timed(tmp_path, monkeypatch):
    right = flashdelta.chunk_kda

    def kernel(**call):
        o, state = right(**call)
        return (o if call["q"].dtype == torch.float64 else o * 1.05), state

    monkeypatch.setattr(flashdelta, "chunk_kda", kernel)
    document = dry_run(run_train, tmp_path, TRAIN_ROWS[:1], Peer(None, "FLA is not here"))
    row = document["rows"][0]
    assert row["ours"]["ms"] is None and row["ours"]["problem"].startswith("wrong: error q 5")
    assert report.failures(document) == [row]
    assert "wrong" in shown(gradients_report.train_table(document))


def test_checked_heads_are_the_ones_they_say():
    shape = Shape(T=3, H=3, HV=6, K=4, V=5)
    assert train.checked_heads(shape) == (0, 1, 2)
    assert train.checked_heads(Shape(H=64)) == (0, 9, 18, 27, 36, 45, 54, 63)
    tokens, bias = torch.arange(6).expand(1, 3, 6), torch.arange(24)
    assert train.heads_of(tokens, "beta", shape, 2).unique().tolist() == [4, 5]
    assert train.heads_of(torch.arange(3).expand(1, 3, 3)[..., None], "q", shape, 2).unique().tolist() == [2]
    assert train.heads_of(bias, "dt_bias", shape, 1).tolist() == list(range(8, 16))


def test_kernels_are_summed_by_name():
    runs = [kernels.KernelRun(name, us, 1, 32, 32, 0) for name, us in (("a", 2.0), ("b", 9.0), ("a", 4.0)) * 2]
    assert train.kernel_times(runs, 2) == [
        {"kernel": "b", "ms": pytest.approx(9e-3), "launches": 1.0},
        {"kernel": "a", "ms": pytest.approx(6e-3), "launches": 2.0},
    ]


def test_gates_need_time_and_memory(tmp_path):
    setup = train.TrainSetup(CPU, FakeTimer(), Ceilings(4.3, 700.0), "auto", Peer(None), Effort(), gated=True)
    step = train.make_step(TRAIN_ROWS[0], CPU)
    timing = wy.Timing(2.0, 2.0, 2.0, 3)

    def judged(ms: float, size: int) -> bool | None:
        ours = train.Outcome(ms=replace(timing, median=ms), forward_ms=timing, peak_above_bytes=size)
        fla = train.Outcome(ms=replace(timing, median=4.0), forward_ms=timing, peak_above_bytes=100)
        return train._row(TRAIN_ROWS[0], step, {"ours": ours, "fla": fla}, setup)["met"]

    assert judged(2.0, 70) is True
    assert judged(2.05, 70) is False  # half of FLA's time
    assert judged(2.0, 71) is False
    assert judged(2.11, 1) is False


def test_plot_of_kernels(tmp_path):
    pytest.importorskip("matplotlib")
    document = dry_run(run_train, tmp_path, TRAIN_ROWS[:1], Peer(None, "FLA is not here"))
    with pytest.raises(ValueError, match="plot: got no row"):
        gradients_report.plot_kernels(document, tmp_path / "plot.png")
    for name in ("ours", "fla"):
        document["rows"][0][name]["kernels"] = [{"kernel": "void wy_kernel<1>(x)", "ms": 1.0, "launches": 1.0}]
    gradients_report.plot_kernels(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert "wy_kernel 1.000" in "".join(gradients_report.train_summary(document))


# ---- wy -----------------------------------------------------------------------------------------------------------------


def test_wy_rows_are_what_the_issue_asks_for():
    names = [case.name for case in WY]
    assert len(set(names)) == len(names) == 58
    for heads in ("H32", "H8 HV32"):
        assert [name for name in names if name.startswith("B1") and name.endswith(f" {heads}")] == [
            f"B1 T{T} {heads}" for T in (256, 512, 1024, 2048, 4096, 8192)
        ]
        assert sum(name.startswith("B2") and name.endswith(f" {heads}") for name in names) == 5
        assert sum(name.startswith("packed") and name.endswith(f" {heads}") for name in names) == 18
    assert all(case.shape.value_heads == 32 for case in WY) and len(wy.QUICK) == 4


@pytest.mark.parametrize("shape", [SMALL, PACKED, Shape(B=2, T=66, H=1, K=32, V=32)], ids=["gva", "packed", "rows"])
def test_inputs_are_those_of_a_training_step(shape: Shape):
    """With what goes through the matrices `A` and `Aqk` left out, `dv` is the whole gradient of v."""
    inputs = wy_inputs(shape, CPU, torch.float64)
    assert all(x.is_contiguous() for x in inputs.values() if x is not None)
    dv = dict(zip(GRADIENTS, wy_truth(inputs, heads=1)))["dv"]
    call = wy.random_inputs(shape, CPU, dtype=torch.float64)
    call["v"].requires_grad_()
    options = wy.MODEL_OPTIONS | {"output_final_state": False, "backend": "reference"}
    o, _ = flashdelta.chunk_kda(**call, **options)
    (want,) = torch.autograd.grad(o, call["v"], inputs["do"])
    torch.testing.assert_close(dv, want, rtol=1e-6, atol=1e-6)


def test_wy_dry_run_measures_and_saves_every_row(tmp_path):
    document = dry_run(run_wy, tmp_path, WY_ROWS, WyPeer(None, "FLA is not here"))
    assert [row["ours"]["problem"] for row in document["rows"]] == [None] * 2
    row = document["rows"][0]
    assert (row["backend"], row["ours"]["ms"]["median"]) == ("reference", 2.0)
    assert set(row["ours"]["error"]) == set(row["ours"]["max_error"]) == set(GRADIENTS)
    read = 2 * 2 * 32 + 2 * (4 * 2 * 64 + 4 * 32 + 4 + 2 * 64)
    written = 2 * (3 * 4 * 32 + 2 * 64 + 4 + 4 * 64)
    assert row["bytes"] == 70 * (read + written) + 2 * 2 * 2 * 2 * 32 * 64
    assert (row["gate"], row["met"]) == ("<= 0.38 of FLA's", None)
    assert report.load(tmp_path / "results.json") == json.loads(report.to_json(document))
    assert "2.000" in shown(gradients_report.wy_table(document))
    assert gradients_report.wy_summary(document)[-1] == "no FLA time in every row: FLA is not here"


def test_fla_takes_turns_on_the_same_tensors(tmp_path):
    def bind(**inputs):
        return lambda: flashdelta.kernels.chunk_bwd_wy_dqkg(**inputs, use_exp2=True, backend="reference")

    document = dry_run(run_wy, tmp_path, WY_ROWS, WyPeer(bind))
    for row in document["rows"]:
        assert row["speedup"] == 1.0 and row["fla"]["error"] == row["ours"]["error"]


def test_a_wrong_wy_kernel_is_not_timed(tmp_path, monkeypatch):
    right = flashdelta.kernels.chunk_bwd_wy_dqkg

    def kernel(**call):
        found = right(**call)
        return found if call["q"].dtype == torch.float64 else (*found[:5], found[5] * 1.02)

    monkeypatch.setattr(flashdelta.kernels, "chunk_bwd_wy_dqkg", kernel)
    document = dry_run(run_wy, tmp_path, WY_ROWS[:1], WyPeer(None, "FLA is not here"))
    assert document["rows"][0]["ours"]["problem"].startswith("wrong: error dA 2")
    assert document["rows"][0]["ours"]["ms"] is None


def test_plot_of_wy(tmp_path):
    pytest.importorskip("matplotlib")
    document = dry_run(run_wy, tmp_path, WY_ROWS[:1], WyPeer(None, "FLA is not here"))
    with pytest.raises(ValueError, match="H = HV = 32"):
        gradients_report.plot_wy(document, tmp_path / "plot.png")
    document["rows"][0]["shape"] |= {"H": 32, "HV": 32}
    gradients_report.plot_wy(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


# ---- the commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("benchmark", "run", "cases", "peer"),
    [("train", run_train, TRAIN_ROWS[:1], Peer), ("wy", run_wy, WY_ROWS[:1], WyPeer)],
)
def test_a_saved_result_is_shown_and_plotted(tmp_path, capsys, benchmark, run, cases, peer):
    document = dry_run(run, tmp_path, cases, peer(None, "FLA is not here"))
    if benchmark == "train":
        for name in ("ours", "fla"):
            document["rows"][0][name]["kernels"] = [{"kernel": "wy_kernel", "ms": 1.0, "launches": 1.0}]
    else:
        document["rows"][0]["shape"] |= {"H": 32, "HV": 32}
    report.save(document, tmp_path / "results.json")
    pytest.importorskip("matplotlib")
    show_results(tmp_path / "results.json", tmp_path / "plot.png")
    assert f"{benchmark} on CPU" in capsys.readouterr().out
    assert (tmp_path / "plot.png").stat().st_size > 1000
