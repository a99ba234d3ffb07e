"""The benchmark of engines' layers without a GPU or an engine: its rows, its contenders, what it makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.testing.cases import BF16, FP32
from flashdelta.testing.engines import LAYERS, Model
from flashdelta.tools.bench import contenders, report
from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.contenders import Setup
from flashdelta.tools.bench.runner import run
from flashdelta.tools.bench.timing import Effort
from flashdelta.tools.bench.views import VIEWS
from flashdelta.tools.bench.workloads import ENGINES, SERVED, VERIFIED, WHOLE, served_row

from ..support.timers import FakeTimer

ROWS = [
    *(served_row(layer, 2, "prefill", "packed", (33, 20), K=32, V=32) for layer in ENGINES),
    *(
        served_row(layer, 2, "decode", f"{state}", (1,) * 3, K=32, V=32, state=state)
        for layer in ENGINES
        for state in (FP32, BF16)
    ),
    *(served_row(VERIFIED, 2, "verify", f"{state}", (3,) * 5, K=32, V=32, state=state) for state in (FP32, BF16)),
    *(
        served_row(layer, 2, "whole step", f"{state}", (1,) * 3, K=32, V=32, state=state)
        for layer in WHOLE
        for state in (FP32, BF16)
    ),
]


def document_of(tmp_path: Path, peer: Any) -> dict:
    sizes = {"pool_bytes": 2**20, "graph_bytes": 2**17, "launches": 4}
    effort, ceilings = Effort(rounds=3, warmup_ms=0.0), {"copy_tb_s": 4.3, "gemm_tflop_s": 700.0}
    setup = Setup(torch.device("cpu"), FakeTimer(), effort, peers={"engine": peer}, ceilings=ceilings, **sizes)
    return run(BENCHMARKS["engines"], setup, tmp_path / "results.json", ROWS)


def stand_in(layer: str) -> dict:
    """An engine whose functions are ours."""
    found = vars(LAYERS[layer](Model(2, 32, device="cpu")).call)
    return found | ({"causal_conv1d_update": convolve, "rms_norm_gated": norm} if layer in WHOLE else {})


def convolve(
    x: Tensor, pool: Tensor, weight: Tensor, bias: None, *, conv_state_indices: Tensor, out: Tensor, **others: Any
):
    fd.short_convolution(x[:, None], weight, state_pool=pool, state_indices=conv_state_indices, out=out[:, None])


def norm(o: Tensor, z: Tensor, weight: Tensor, bias: None, activation: str, eps: float) -> Tensor:
    return fd.gated_rms_norm(o, z[None], weight, eps=eps)


def test_rows():
    assert len(SERVED) == 40 and {row.call.H for row in SERVED} == {12, 32}
    assert {row.call.lower_bound for row in SERVED} == {None, -5.0}
    assert {(row.call.step, *(x.limit for x in row.bounds)) for row in SERVED} == {
        ("verify",),
        ("prefill", 2.5),
        ("decode", 1.3),
        ("decode", 1.6),
        ("whole step", 1.3),
        ("whole step", 1.6),
    }
    assert all(sum(row.call.lengths) == 8192 for row in SERVED if row.call.step == "prefill")


def test_both_are_right_and_timed(tmp_path: Path):
    document = document_of(tmp_path, stand_in)
    assert not report.failures(document) and len(document["rows"]) == len(ROWS)
    for row in document["rows"]:
        assert row["ours"]["problem"] is None and row["engine"]["problem"] is None
        assert row["engine_ratio"] == row["engine"]["ms"]["median"] / row["ours"]["ms"]["median"]
        assert row["ours"]["error"]["o"] < 6e-3
    text = report.show(document, VIEWS["engines"], wide=True)
    assert "engine ms" in text and ">= 2.5x the engine's own" in text


@pytest.mark.parametrize("environment", (None, "/missing"))
def test_an_engine_that_is_not_there(tmp_path: Path, environment: str | None, monkeypatch: pytest.MonkeyPatch):
    from flashdelta.testing import engine_kernels

    engine_kernels.own_functions.cache_clear()
    monkeypatch.delenv(engine_kernels.ENVIRONMENT, raising=False)
    if environment is not None:
        monkeypatch.setenv(engine_kernels.ENVIRONMENT, environment)
    document = document_of(tmp_path, contenders.find("engine"))
    what = engine_kernels.ENVIRONMENT if environment is None else "No module named"
    assert all(what in row["engine"]["problem"] and row["engine"]["ms"] is None for row in document["rows"])
    assert all(row["ours"]["problem"] is None and row["engine_ratio"] is None for row in document["rows"])
