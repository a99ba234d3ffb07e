"""`flashdelta bench kernels` on the device: what the profiler tells of every backend's kernels."""

from __future__ import annotations

import pytest
import torch

from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.contenders import Setup
from flashdelta.tools.bench.runner import run
from flashdelta.tools.bench.timing import Effort, Timer
from flashdelta.tools.bench.workloads import Row, model

pytestmark = pytest.mark.gpu


def test_every_stage_is_found_with_its_costs(backend, tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    ceilings = {"copy_tb_s": 4.3, "gemm_tflop_s": 700.0}
    setup = Setup(device, Timer(device), Effort(rounds=5), backend, ceilings=ceilings)
    rows = [Row(model("short", "ten chunks", 4, T=640), "prefill")]
    document = run(BENCHMARKS["kernels"], setup, tmp_path / "kernels.json", rows)
    (row,) = document["rows"]
    assert row["ours"]["problem"] is None
    found = {kernel["stage"]: kernel for kernel in row["ours"]["kernels"]}
    assert {"prepare", "recurrence"} <= found.keys()
    for stage in ("prepare", "recurrence"):
        kernel = found[stage]
        assert kernel["launches"] == 1
        assert 0 < kernel["share_of_copy"] < 1
        assert 0 < kernel["registers"] <= 255 and kernel["shared_bytes"] > 0
        assert kernel["ctas_per_sm"] >= 1
        assert kernel["spill_bytes"] is not None
