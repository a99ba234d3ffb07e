"""The diffs of docs/howto/gate.md are a patch of the package, and the gate that it adds works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "gate.md"

AGREES = """
import torch
import flashdelta as fd

def call(g, **options):
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    o, state = fd.chunk_kda(*leaves, use_qk_l2norm_in_kernel=True, chunk_size=32, output_final_state=True, **options)
    (o.square().sum() + state.sum()).backward()
    return o, state, *(x.grad for x in leaves)

torch.manual_seed(0)
q, k, v, g = (torch.randn(1, 40, 1, 32) for _ in range(4))
beta = torch.rand(1, 40, 1)
truth = [*call(-g.relu(), gate="none", backend="reference")]
truth[5] = torch.where(g > 0, -truth[5], 0.0)
for backend in ("reference", "triton"):
    for found, wanted in zip(call(g, gate="relu", backend=backend), truth):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
for backend in ("reference", "triton"):
    o, _ = fd.recurrent_kda(q[:, :4], k[:, :4], v[:, :4], g[:, :4], beta[:, :4], gate="relu", backend=backend)
    torch.testing.assert_close(o, truth[0][:, :4], rtol=1e-4, atol=1e-5)
try:
    fd.chunk_kda(q, k, v, g, beta, gate="relu", A_log=torch.zeros(1))
except ValueError as error:
    assert "A_log" in str(error)
else:
    raise AssertionError("A_log was taken")
"""

COMPILES = """
from flashdelta.tools.compile import Variant, compile_launch

for backward in (False, True):
    for launch in Variant("relu", "hopper", K=64, V=64, gate="relu", backward=backward).launches(90):
        if launch.kernel.__name__ in ("prepare_kernel", "intra_kernel"):
            assert compile_launch(launch, 90).late_operands == 0
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("gate")
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    diffs = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    # git would look for a repository around the folder, and leave alone what is outside of it
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", "-"]
    done = subprocess.run(command, cwd=tree, env=environment, input="".join(diffs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tree / "src"


def run(source: Path, code: str, **environment: str) -> None:
    given = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"PYTHONPATH": str(source), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_gate_agrees_with_the_decay_it_stands_for(patched: Path):
    run(patched, AGREES, TRITON_INTERPRET="1")


def test_hoppers_kernels_compile_with_it(patched: Path):
    run(patched, COMPILES)


def test_without_the_patch_there_is_no_such_gate():
    with pytest.raises(AssertionError, match="relu"):
        run(ROOT / "src", AGREES, TRITON_INTERPRET="1")
