"""The kernel for the Hugging Face hub: its layout, and versions side by side. `tests/contract/test_newest.py` loads it as users
do."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

HUB = Path(__file__).parents[2] / "hub" / "build.py"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("hub_build", HUB)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("hub")
    module.build(folder / "later", "9.9.9")
    return module.build(folder / "kernel") / "build" / "torch-universal"


def test_layout(kernel: Path):
    """Relative imports alone, a namespace of this version, and the metadata that `kernels` reads."""
    assert json.loads((kernel / "metadata.json").read_text())["id"] == "flashdelta_0_1_0"
    files = [*kernel.rglob("*.py")]
    assert len(files) > 100 and not {"tools", "testing"} & {x.name for x in kernel.iterdir()}
    for file in files:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            names += [x.name for x in node.names] if isinstance(node, ast.Import) else []
            assert not any(x.split(".")[0] == "flashdelta" for x in names), file
        for name in ("flashdelta", "kda_prefill"):
            assert f"{name}::" not in text and f"torch.ops.{name}." not in text, file


BESIDE = """
import importlib.util, sys
from pathlib import Path
import torch
import flashdelta

def load(name, folder):
    spec = importlib.util.spec_from_file_location(name, Path(folder) / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

q, k, v, g = (torch.randn(1, 40, 2, 32) for _ in "qkvg")
beta, found = torch.rand(1, 40, 2), []
for x in (flashdelta, load("flashdelta_0_1_0", sys.argv[1]), load("flashdelta_9_9_9", sys.argv[2])):
    run = lambda: x.chunk_kda(q, k, v, g, beta, gate="logsigmoid")[0]
    found.append((run if x is flashdelta else torch.compile(run, backend="eager", fullgraph=True))())
    assert getattr(torch.ops, x.__name__).kda_forward is not None
    assert x.layers.chunk_kimi_delta_attention.has_backward if x is not flashdelta else True
assert all(torch.equal(x, found[0]) for x in found)
"""


@pytest.mark.slow
def test_versions_run_side_by_side(kernel: Path):
    later = kernel.parents[2] / "later" / "build" / kernel.name
    found = subprocess.run([sys.executable, "-c", BESIDE, kernel, later], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
