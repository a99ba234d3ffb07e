"""`flashdelta bench kernels` on the device: what the profiler tells of every backend's kernels."""

from __future__ import annotations

import pytest
import torch

from flashdelta.tools.bench.cases import PrefillCase, Shape
from flashdelta.tools.bench.kernels import measure_kernels
from flashdelta.tools.bench.peers import Peer
from flashdelta.tools.bench.prefill import run_prefill
from flashdelta.tools.bench.protocol import Ceilings, Effort

pytestmark = pytest.mark.gpu


def test_every_stage_is_found_with_its_costs(backend, tmp_path):
    document = run_prefill(
        [PrefillCase("short", Shape(T=640, H=4), "ten chunks")],
        benchmark="kernels",
        measure=measure_kernels,
        device=torch.device("cuda", torch.cuda.current_device()),
        backend=backend,
        fla=Peer(None, "not asked for"),
        fla_rows=frozenset(),
        effort=Effort(rounds=5),
        path=tmp_path / "kernels.json",
        ceilings=Ceilings(copy_tb_s=4.3, gemm_tflop_s=700.0),
    )
    (row,) = document["rows"]
    assert row["ours"]["spec"] is None
    found = {kernel["stage"]: kernel for kernel in row["kernels"]}
    assert {"prepare", "recurrence"} <= found.keys()
    for stage in ("prepare", "recurrence"):
        kernel = found[stage]
        assert kernel["launches"] == 1
        assert 0 < kernel["share_of_copy"] < 1
        assert 0 < kernel["registers"] <= 255 and kernel["shared_bytes"] > 0
        assert kernel["ctas_per_sm"] >= 1
        assert kernel["spill_bytes"] is not None
