"""Decoding and verification beside the engines' own Triton kernels, which are interpreted on a CPU. (Their prefill kernels tune
themselves, which wants a GPU: `tests/gpu/test_engines.py`.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("FLASHDELTA_WHEELS")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make test-integrations: FLASHDELTA_WHEELS is not set")

CODE = """
import sys
import torch
import triton.language as tl
from tests.support.engine_kernels import STEP, extract, load
from tests.support.engines import LAYERS, Batch, K3Step, Model
from tests.support.oracle import relative_error
from pathlib import Path

wheels, folder = map(Path, sys.argv[1:])
assert extract(wheels, folder) > 40
# the interpreter takes no mask that it made of scalars and tensors
(file,) = folder.rglob("causal_conv1d.py")
text = file.read_text().replace("_source, mask, other", "_source, mask != 0, other")
file.write_text(text.replace(", mask=mask_1d", ", mask=mask_1d != 0"))
theirs = load(folder)
# the interpreter replaces functions of tl, not those that modules hold
for module in [x for name, x in sys.modules.items() if name.startswith(("vllm.", "sglang."))]:
    for name in {"exp", "log", "exp2"} & vars(module).keys():
        setattr(module, name, lambda x, name=name: getattr(tl, name)(x))
model = Model(2, 32, dtype=torch.float32, device="cpu")
start, slots = model.pool(9), model.index([3, 5, -1])
one, drafts = Batch(model, model.tokens(3), [1] * 3), Batch(model, model.tokens(8), [3, 2, 3])
table = model.index([1, 2, 3, 4, 5, 6, 0, 0, 0]).view(3, 3)
chain = theirs.pop(STEP)
for name, functions in theirs.items():
    found = []
    for layer in (LAYERS[name](model), LAYERS[name](model, functions, ours=False)):
        pools = [model.pool(9).copy_(start) for _ in range(2)]
        decoded = layer.decode(one, pools[0], slots)
        if name == "SGLang":
            buffer = torch.zeros(3, 3, *start.shape[1:])
            verified = layer.verify_read_only(drafts, pools[1], slots, buffer, 3)
            pools.append(buffer[:2])
        else:
            verified = layer.verify(drafts, pools[1], table, model.index([2, 1, 1]))
        # GLM leaves rows of padding as they are
        found.append([decoded[:, :2], verified[:, :5], *pools])
    errors = [relative_error(x, y) for x, y in zip(*found)]
    print(name, *(f"{x:.1e}" for x in errors))
    assert max(errors) < 1e-6, name
for by_channel in (False, True):
    step = K3Step(model, 2, by_channel)
    assert step.backends() == ("flashdelta", "flashinfer")
    windows, gates, slots = step.windows(9), step.output_gate(8), model.index([3, 5, 0])
    found = []
    for run in (step.fused, lambda *arguments: step.chain(chain, *arguments)):
        pool, own = start.clone(), windows.clone(memory_format=torch.preserve_format)
        decoded = run(one, gates[:3], pool, own, slots)
        # rounds with drafts before, between and after those without
        table[:2] = model.index([3, 2, 1, 5, 4, 6]).view(2, 3)
        first = run(drafts, gates, pool, own, table, model.index([1, 1, 1]))
        second = run(drafts, gates, pool, own, table, model.index([3, 2, 1]))
        found.append([decoded[:, :2], first[:, :5], second[:, :5], pool, own])
    errors = [relative_error(x, y) for x, y in zip(*found)]
    print("step", by_channel, *(f"{x:.1e}" for x in errors))
    assert max(errors) < 1e-6
"""


def test_steps_beside_theirs(tmp_path: Path):
    path = os.pathsep.join((str(Path(__file__).parents[2]), *(x for x in sys.path if x)))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(Path(str(FOLDER)).resolve()), str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    assert len(found.stdout.splitlines()) == 6
