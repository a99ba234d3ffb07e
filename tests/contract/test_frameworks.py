"""Training frameworks, as pip has them, against docs/frameworks.md: what their code takes from FLA, and with what arguments."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import flashdelta as fd
from flashdelta.integrations import _fla

FOLDER = os.environ.get("FLASHDELTA_WHEELS")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make test-integrations: FLASHDELTA_WHEELS is not set")
PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
MODELS = "nemo_automodel.components.models"
CALLS = {
    f"{MODELS}.kimi_k3.model": "kernel",
    f"{MODELS}.kimi_linear.model": "kernel",
    f"{MODELS}.glm5_next.layers": "_chunk_kda",
}
"""Modules of Automodel, and by what name they call FLA's function."""


@pytest.fixture(scope="module")
def wheels() -> dict[str, Path]:
    """The newest wheels, without what they depend on."""
    folder, names = Path(str(FOLDER)) / "frameworks", ("nemo-automodel", "torchtitan", "megatron-core")
    options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *names], check=True)
    by_age = sorted(folder.glob("*.whl"), key=lambda x: x.stat().st_ctime)
    return {x.name.split("-")[0]: x for x in by_age}


@pytest.mark.parametrize("module", CALLS)
def test_calls_of_automodel_fit(module: str, wheels: dict[str, Path]):
    code = (zipfile.Path(wheels["nemo_automodel"]) / f"{module.replace('.', '/')}.py").read_text()
    assert re.search(r"hunk_kda = safe_import_from\(\s*\"fla.ops.kda\", \"chunk_kda\"", code)
    calls = [x for x in ast.walk(ast.parse(code)) if isinstance(x, ast.Call)]
    named = [x.keywords for x in calls if ast.unparse(x.func).split(".")[-1] == CALLS[module]]
    passed = {x.arg for keywords in named for x in keywords} - {None}
    options = code.split("kernel_options", 1)[-1] if "kernel_options" in code else ""
    passed |= {*re.findall(r"kernel_options\[\"(\w+)\"\] =", options)} | {
        *re.findall(r"\"(\w+)\": (?:True|bool|self)", options)
    }
    known = _fla.CHUNK.taken | _fla.CHUNK.ignored | _fla.CHUNK.renamed.keys()
    assert {"q", "k", "v", "g", "beta", "cu_seqlens"} <= passed
    assert passed & set(_fla.CHUNK.parameters or known) <= known


def test_a_call_like_automodels_runs_on_flashdelta():
    """Kimi-K3's, packed: decays ready, a promise of a bound, FLA's old name of the layout."""
    from fla.ops.kda import chunk_kda

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 90, 2, 32, requires_grad=True) for _ in "qkv")
    g, beta, cu = -5 * torch.rand(1, 90, 2, 32), torch.rand(1, 90, 2), torch.tensor([0, 30, 90], dtype=torch.int32)
    call = dict(
        initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True, cu_seqlens=cu, safe_gate=True
    )
    _fla.enable()
    try:
        o, state = chunk_kda(q=q, k=k, v=v, g=g, beta=beta, **call, transpose_state_layout=True, disable_recompute=True)
    finally:
        _fla.disable()
    want, _ = fd.chunk_kda(q, k, v, g, beta, **call)
    torch.testing.assert_close(o, want)
    assert state is None
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, want)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads))
