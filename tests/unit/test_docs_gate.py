"""gate.patch, which docs/howto/gate.md explains, applies to the package, and the gate that it adds works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from flashdelta.problem.problem import GateName

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("relu" in get_args(GateName), reason="the patch was applied to this tree"),
]

ROOT = Path(__file__).parents[2]
PATCH = Path(__file__).with_name("gate.patch")


CALLS = """
import torch
import flashdelta as fd
from tests.gluon.interpreter import hopper_on_cpu

def call(g, **options):
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    o, _ = fd.chunk_kda(*leaves, use_qk_l2norm_in_kernel=True, **options)
    o.float().square().sum().backward()
    return o, *(x.grad for x in leaves)

torch.manual_seed(0)
for backend in ("triton", "hopper"):
    dtype, K = (torch.bfloat16, 64) if backend == "hopper" else (torch.float32, 32)
    q, k, v, g = (torch.randn(1, 40, 1, K, dtype=dtype) for _ in range(4))
    beta = torch.rand(1, 40, 1, dtype=dtype)
    truth = [*call(-g.relu(), gate="none", backend="reference")]
    truth[4] = torch.where(g > 0, -truth[4], 0.0)
    with hopper_on_cpu():
        for found, wanted in zip(call(g, gate="relu", backend=backend), truth):
            error = (found.float() - wanted.float()).norm() / wanted.float().norm()
            assert error < 1e-2, error
layer = fd.nn.KimiDeltaAttention(64, num_heads=2, head_dim=32, gate="relu", backend="reference")
layer(torch.randn(1, 9, 64))[0].sum().backward()
assert layer.f_proj[0].weight.grad.abs().sum() > 0
"""


def test_the_gate_agrees_with_the_decay_it_stands_for(tmp_path: Path):
    """Kernels are interpreted; the layer takes the gate, too."""
    for name in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    # git would look for a repository around the folder, and leave alone what is outside of it
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    command = ["git", "apply", str(PATCH)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", CALLS], cwd=tmp_path, env=given, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
