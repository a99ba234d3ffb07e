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

ON_HOPPER = """
import torch
import flashdelta as fd
from tests.gluon.interpreter import hopper_on_cpu

def call(backend, heads, K):
    torch.manual_seed(0)
    leaves = [torch.randn(1, 64, heads, K).bfloat16() for _ in range(4)] + [torch.rand(1, 64, heads).bfloat16()]
    leaves[3] *= 0.1
    if heads < 48:  # gradients do not go through steps of 32 tokens
        leaves = [x.requires_grad_() for x in leaves]
    o, _ = fd.chunk_kda(*leaves, gate="relu", use_qk_l2norm_in_kernel=True, backend=backend)
    if heads < 48:
        o.float().square().sum().backward()
    return o, *(x.grad for x in leaves if x.requires_grad)

for heads, K in ((2, 64), (48, 128)):
    wanted = call("reference", heads, K)
    with hopper_on_cpu():
        found = call("hopper", heads, K)
    for x, want in zip(found, wanted):
        error = (x.float() - want.float()).norm() / want.float().norm()
        assert error < 1e-2, (heads, K, error)
"""

COMPILES = """
from flashdelta.tools.compile import compile_launch
from tests.compile.variants import VARIANTS, Variant

given = dict(backend="hopper", gate="relu")
small = [Variant("relu", K=64, V=64, backward=backward, **given) for backward in (False, True)]
found = set()
for variant in (*small, *(x for x in VARIANTS if x.gate == "relu")):
    for launch in variant.launches(90):
        name = launch.kernel.__name__
        if name in ("prepare_kernel", "intra_kernel", "prepare_steps_kernel"):
            assert compile_launch(launch, 90).late_operands == 0
            found.add(name)
assert len(found) == 3
"""

LAYER = """
layer = fd.nn.KimiDeltaAttention(64, num_heads=2, head_dim=32, gate="relu")
layer(torch.randn(1, 9, 64))[0].sum().backward()
assert layer.f_proj[0].weight.grad.abs().sum() > 0
"""

TRUTHS = """
import sys
import pytest
import torch
from tests.fuzz.draw import draw_spec

assert any(draw_spec(0, i, torch.device("cpu")).options.get("gate") == "relu" for i in range(50))
chosen = "relu and (test_recurrence_is_the_papers or test_reference_is_the_recurrence)"
sys.exit(pytest.main(["-q", "-k", chosen, "tests/unit/test_reference.py", "tests/unit/test_decode.py"]))
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("gate")
    for name in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    # git would look for a repository around the folder, and leave alone what is outside of it
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", str(PATCH)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tree


def run(tree: Path, code: str, **environment: str) -> None:
    given = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)]), **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=given, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_the_patched_package_is_linted(patched: Path):
    pytest.importorskip("ruff")
    shutil.copy(ROOT / "pyproject.toml", patched)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "src", "tests"], cwd=patched, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_gate_agrees_with_the_decay_it_stands_for(patched: Path):
    run(patched, AGREES, TRITON_INTERPRET="1")


def test_hoppers_kernels_and_the_layer_take_it_too(patched: Path):
    """48 heads of 128 channels go through steps of 32 tokens. In one process, as importing takes the most."""
    run(patched, ON_HOPPER + COMPILES + LAYER)


def test_a_formula_that_was_forgotten_is_an_error_and_no_wrong_result(patched: Path, tmp_path: Path):
    shutil.copytree(patched, tmp_path / "tree")
    forgotten = "src/flashdelta/kernels/hopper/device/math.py"
    shutil.copy(ROOT / forgotten, tmp_path / "tree" / forgotten)
    with pytest.raises(AssertionError, match=r"prepare_kernel.*an unknown gate"):
        run(tmp_path / "tree", ON_HOPPER)


def test_every_truth_knows_it(patched: Path):
    run(patched, TRUTHS)
