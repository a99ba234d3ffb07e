"""The benchmark of whole layers without a GPU: rows, what is captured of a call, the switch, checks, shares, the table."""

from __future__ import annotations

import functools
import os

import pytest
import torch

import flashdelta
from flashdelta.integrations import _fla
from flashdelta.testing.cases import FP32, Case
from flashdelta.testing.inputs import make_call
from flashdelta.testing.oracle import relative_error, truth
from flashdelta.tools.bench import models, profiling, report, runner
from flashdelta.tools.bench.benchmarks import BENCHMARKS, models_extra
from flashdelta.tools.bench.contenders import Setup
from flashdelta.tools.bench.timing import Effort
from flashdelta.tools.bench.views import VIEWS
from flashdelta.tools.bench.workloads import MODELS, block_row, select

from ..support.timers import FakeTimer

CPU = torch.device("cpu")
SMALL = {"hidden": 64, "H": 2, "HV": 2, "K": 32, "V": 32, "prompt": 5}
SIZES = {"prefill 8K": {"B": 2, "T": 70}, "train 1x8192": {"T": 70}, "decode 32": {"B": 3, "T": 1}}


def small(framework, step, part):
    return block_row(f"{framework} {step}", "fits a CPU", part, 1.0, **SMALL, **SIZES[step])


def rows_of(framework):
    return [small(framework, step, part) for step in SIZES for part in ("block", "KDA")]


def measure(tmp_path, rows):
    effort = Effort(rounds=3, warmup_ms=0.0)
    ceilings = {"copy_tb_s": 4.3, "gemm_tflop_s": 700.0}
    setup = Setup(CPU, FakeTimer(2.0), effort, peers={"fla": print}, ceilings=ceilings)
    return runner.run(BENCHMARKS["models"], setup, tmp_path / "results.json", rows)


@pytest.fixture
def frameworks(monkeypatch):
    """FLA and Hugging Face, with the integration off before and after."""
    pytest.importorskip("fla")
    pytest.importorskip("transformers")
    monkeypatch.delenv(_fla.ENVIRONMENT, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # so what surrounds KDA runs on the CPU
    _fla.disable()
    yield
    _fla.disable()


@pytest.fixture
def off_is_noted(frameworks, monkeypatch):
    """FLA has no kernels for a CPU, so its calls run on flashdelta where the integration is off, too; what it was is noted."""
    seen, is_on = [], _fla.is_on

    def note():
        seen.append(is_on())
        return True

    monkeypatch.setattr(_fla, "is_on", note)
    return seen


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows():
    assert len({row.name for row in MODELS}) == len(MODELS) == 28
    assert all(row.call.framework in models.LAYERS and row.call.part in models.PARTS for row in MODELS)
    bounds = {row.name: [bound.words for bound in row.bounds] for row in MODELS}
    assert bounds["FLA prefill 64K KDA"] == [">= 2.5x FLA"] and bounds["HF train 4x2048 KDA"] == [">= 2.2x FLA"]
    assert bounds["HF decode 256 KDA"] == [] and bounds["HF decode 256 block"] == [">= 1x FLA"]


@pytest.mark.parametrize(
    ("text", "count"), [("HF", 14), ("decode 1", 4), ("FLA prefill", 4), ("KDA", 14), ("HF train 4x2048 block", 1)]
)
def test_rows_are_selected(text, count):
    assert len(select(MODELS, [text])) == count


def test_a_part_stands_behind_its_layer():
    """Of which it tells the share."""
    names = [row.name for row in MODELS]
    assert [f"{name.removesuffix('block')}KDA" for name in names[::2]] == names[1::2]


# ---- layers on a CPU ---------------------------------------------------------------------------------------------------


def check_rows(document, seen):
    assert report.failures(document) == [] and {True, False} <= {*seen}
    for row in document["rows"]:
        for name in ("ours", "fla"):
            assert row[name]["problem"] is None and row[name]["ms"]["median"] == 2.0, row
            assert row[name]["sustained_ms"] == 3.0 and max(row[name]["error"].values()) < 1e-2
        assert row["speedup"] == row["sustained_speedup"] == 1.0 and row["backend"] == "reference"
        assert row["operator"] == ("fused_recurrent_kda" if "decode" in row["name"] else "chunk_kda")
    text = report.show(document, VIEWS["models"], wide=True)
    assert all(row["name"] in text for row in document["rows"])


@pytest.mark.slow
def test_layers_of_hugging_face(tmp_path, off_is_noted):
    document = measure(tmp_path, rows_of("HF"))
    check_rows(document, off_is_noted)
    errors = [[*row["ours"]["error"]] for row in document["rows"]]
    assert errors[:2] == [["out", "state"], ["o", "state"]]
    assert errors[2:4] == [["x", "weights"], ["q", "k", "v", "g", "beta"]]
    assert document["rows"][0]["framework"].startswith("transformers ")


@pytest.mark.slow
def test_layers_of_fla(tmp_path, off_is_noted):
    document = measure(tmp_path, rows_of("FLA"))
    check_rows(document, off_is_noted)
    assert [*document["rows"][3]["ours"]["error"]] == ["q", "k", "v", "g", "beta", "A_log", "dt_bias"]


@pytest.mark.slow
def test_flas_layer_keeps_its_gate_in_float32(frameworks):
    layer = models.layer_of(small("FLA", "prefill 8K", "block").call, CPU)
    wide = [name.rpartition(".")[2] for name, x in layer.module.named_parameters() if x.dtype == FP32]
    assert wide == ["A_log", "dt_bias"]
    again = models.layer_of(small("FLA", "prefill 8K", "block").call, CPU)
    assert all(torch.equal(x, y) for x, y in zip(layer.module.parameters(), again.module.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("step", SIZES)
def test_a_wrong_kernel_is_not_timed(tmp_path, off_is_noted, monkeypatch, step):
    def damaged(right, **call):
        o, state = right(**call)
        return (o if o.dtype == FP32 else -o), state

    for name in ("chunk_kda", "fused_recurrent_kda"):
        monkeypatch.setattr(_fla, name, functools.partial(damaged, getattr(_fla, name)))
    document = measure(tmp_path, [small("HF", step, part) for part in ("block", "KDA")])
    assert all(row["ours"]["problem"].startswith("wrong") for row in document["rows"]), document["rows"]


@pytest.mark.slow
def test_without_kernels_of_flas_ours_are_timed_alone(tmp_path, frameworks):
    (row,) = measure(tmp_path, [small("HF", "prefill 8K", "KDA")])["rows"]
    assert row["ours"]["problem"] is None and row["ours"]["ms"] and row["fla"]["problem"] and not row["fla"]["ms"]
    assert not _fla.is_on() and _fla.ENVIRONMENT not in os.environ


@pytest.mark.slow
def test_what_is_captured_is_what_the_layer_gave(frameworks):
    case = small("HF", "prefill 8K", "KDA").call
    with models.session():
        _fla.enable()
        ours = models.block_contender(models.layer_of(case, CPU), case, True)
        name, call = models.captured(ours.checked, 70)
        # Hugging Face's convolution leaves tokens side by side in memory
        assert name == "chunk_kda" and call["q"].stride(1) == 1 and call["g"].dtype == FP32
        with pytest.raises(RuntimeError, match="FLA kept its KDA call of 71 tokens; the integration is active"):
            models.captured(ours.checked, 71)
        assert _fla.chunk_kda is flashdelta.chunk_kda
        assert not any(x.requires_grad for x in call.values() if isinstance(x, torch.Tensor))


@pytest.mark.slow
def test_contenders_decode_with_caches_of_their_own(off_is_noted):
    case = small("HF", "decode 32", "block").call
    with models.session():
        _fla.enable()
        layer = models.layer_of(case, CPU)
        ours, theirs = (models.block_contender(layer, case, on) for on in (True, False))
        first = [x.clone() for x in ours.call()]
        for _ in range(3):
            last = ours.call()
        assert last[1].shape == first[1].shape and not torch.equal(last[1], first[1])
        for call in (theirs.call, ours.checked, ours.checked):
            assert all(torch.equal(x, y) for x, y in zip(call(), first))


# ---- without the frameworks ------------------------------------------------------------------------------------------


def test_a_row_whose_framework_fails_says_why(tmp_path, monkeypatch):
    def fail(case):
        raise ImportError("no such layer\nand more")

    monkeypatch.setattr(_fla, "enable", lambda: None)
    monkeypatch.setitem(models.LAYERS, "HF", (fail, "transformers"))
    document = measure(tmp_path, rows_of("HF")[:2])
    assert [row["ours"]["problem"] for row in document["rows"]] == ["ImportError: no such layer"] * 2
    assert "2 of 2 rows failed" in report.show(document, VIEWS["models"])


def test_the_session_leaves_the_integration_as_it_was(monkeypatch):
    monkeypatch.setattr(_fla._State, "enabled", True)
    monkeypatch.setenv(_fla.ENVIRONMENT, "0")
    with models.session():
        assert torch.is_grad_enabled() and [models.switched(on, _fla.is_on) for on in (True, False)] == [True, False]
    assert os.environ[_fla.ENVIRONMENT] == "0" and not _fla.is_on()


def test_the_truth_of_some_heads_is_that_of_all():
    sizes = {"B": 2, "T": 5, "H": 4, "HV": 4, "K": 32, "V": 32}
    case = Case("heads", "", gate="softplus", beta="logit", state=FP32, v_first=True, **sizes)
    call = make_call(case, torch.float64)
    o, state = truth(call)
    some_o, some_state = truth(models.some_heads(call, case, [0, 3]))
    assert relative_error(some_o, o[:, :, [0, 3]]) < 1e-14 and relative_error(some_state, state[:, [0, 3]]) < 1e-14


def test_kernels_are_few_and_their_sum_is_whole():
    names = ["void at::native::copy<int>(int)", "void at::native::copy<float>(int)", *(f"gemm_{i}" for i in range(9))]
    runs = [profiling.KernelRun(name, us, 1, 32, 32, 0) for us, name in enumerate(reversed(names), 1)] * 2
    found = models.kernels(runs, 2)
    assert found[0] == {"kernel": "at::native::copy", "ms": pytest.approx(21e-3), "launches": 2.0}
    assert len(found) == 9 and found[-1] == {"kernel": "others", "ms": pytest.approx(3e-3), "launches": 2.0}
    assert sum(x["ms"] for x in found) == pytest.approx(66e-3)
    assert models.kernels(runs[:1], 1) == [{"kernel": "gemm_8", "ms": pytest.approx(1e-3), "launches": 1.0}]


def finished(row, ms):
    """A measured row, whose kernels take half of the time."""
    timed = {"ms": {"median": ms}, "sustained_ms": ms, "error": {"o": 4e-3}, "problem": None}
    found = {"name": row.name, "ours": timed | {"kernels": [{"ms": ms / 4}, {"ms": ms / 4}]}}
    found |= {"fla": timed | {"ms": {"median": 2 * ms}, "kernels": [{"ms": 1.5 * ms}]}}
    return found | {"speedup": 2.0, "sustained_speedup": 13.37}


def test_the_table_has_shares_and_fits_80_columns():
    versions = {"gpu": {"name": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}}
    document = {"benchmark": "models", "environment": versions, "rows": []}
    for row in MODELS:
        found = finished(row, 0.12 if row.call.part == "KDA" else 101.2)
        found |= models_extra(found, document)
        runner.judge(found, row.bounds, (), gated=True)
        document["rows"].append(found)
    layer, part = document["rows"][:2]
    assert layer["kernel_ms"] == {"ours": 50.6, "fla": pytest.approx(151.8)} and layer["share"]["ours"] is None
    assert part["share"] == {"ours": pytest.approx(0.06 / 50.6), "fla": pytest.approx(0.18 / 151.8)}
    text = report.show(document, VIEWS["models"])
    assert max(map(len, text.splitlines())) <= report.WIDTH and "3.00x" in text and "NO" in text
    for said in ("block, FLA/ours: 2.00x (geometric mean of 14", "KDA, FLA/ours, sustained: 13.37x"):
        assert said in text
    assert "4.0e-3" in report.show(document, VIEWS["models"], wide=True)
