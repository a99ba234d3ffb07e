"""The newest FLA, transformers and kernels that pip has: `make test-integrations` installs them to `FLASHDELTA_NEWEST`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from flashdelta.integrations import _fla, _transformers

FOLDER = os.environ.get("FLASHDELTA_NEWEST")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make test-integrations: FLASHDELTA_NEWEST is not set")
ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    """The output of Python with the newest ones on its path."""
    path = os.pathsep.join((FOLDER, str(ROOT / "src")))
    found = subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    return found.stdout


@pytest.fixture(scope="module")
def versions() -> dict[str, str]:
    return {x.name: x.version for x in metadata.distributions(path=[FOLDER])}


def test_the_newest_were_run(versions: dict[str, str]):
    """A later release fails here: run it, then raise the extra `fla`, and `READ`."""
    assert versions["flash-linear-attention"] == versions["fla-core"] and versions["fla-core"] in _fla.READ
    assert ".".join(versions["transformers"].split(".")[:2]) in _transformers.READ


def test_integrations_with_the_newest():
    assert " passed" in run(
        "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/unit/test_integrations.py"
    )


NAMED = """
from flashdelta import integrations
for name in ("fla", "transformers"):
    print(integrations.status(name))
"""


def test_what_fla_can_not_do_is_named(versions: dict[str, str]):
    """transformers 5.24 passes `cache`, which FLA 0.6's models do not read: Hugging Face's own models run there."""
    fla, theirs = run("-W", "ignore", "-c", NAMED).splitlines()[-2:]
    is_lost = tuple(map(int, versions["transformers"].split(".")[:2])) >= (5, 24)
    assert ("can't generate with a cache" in fla) is is_lost
    assert "state='possible'" in fla and "state='possible'" in theirs and "generate" not in theirs


HUB = """
import inspect, sys, warnings
from pathlib import Path
import torch
import flashdelta
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_forward_from_hub
from kernels import use_kernel_mapping, use_kernelized_func
from transformers.models.kimi_linear import modeling_kimi_linear as theirs

folder = Path(sys.argv[1])
kernel = get_local_kernel(folder, backend="cpu")
assert kernel.__name__ == "flashdelta_" + flashdelta.__version__.replace(".", "_") and kernel is not flashdelta
LAYERS = {"chunk_kda": "chunk_kimi_delta_attention", "fused_recurrent_kda": "recurrent_kimi_delta_attention"}
LAYERS |= {"causal_conv1d_fn": "causal_conv1d_fn"}
plain = {name: inspect.unwrap(getattr(theirs, layer)) for name, layer in LAYERS.items()}
hub = {name: use_kernel_forward_from_hub(name)(function) for name, function in plain.items()}

@use_kernelized_func(*hub.values())
class Model(torch.nn.Module):
    pass

repos = {name: {"cpu": LocalLayerRepository(folder, layer_name=layer)} for name, layer in LAYERS.items()}
torch.manual_seed(0)
q, k, v = (torch.randn(2, 70, 2, 32) for _ in "qkv")
call = dict(g=-torch.rand(2, 70, 2, 32), beta=torch.rand(2, 70, 2), use_qk_l2norm_in_kernel=True)
call |= dict(initial_state=torch.randn(2, 2, 32, 32), output_final_state=True)
x, w = torch.randn(2, 64, 70), torch.randn(64, 4)
with use_kernel_mapping(repos, inherit_mapping=False):
    model = kernelize(Model(), mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
for name in ("chunk_kda", "fused_recurrent_kda"):
    for found, want in zip(hub[name](q, k, v, **call), plain[name](q, k, v, **call)):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert "flashdelta" in hub[name].forward.__func__.__module__
torch.testing.assert_close(
    hub["causal_conv1d_fn"](x, w, activation="silu"), plain["causal_conv1d_fn"](x, w, activation="silu"))
cu = torch.tensor([0, 50, 140])
packed = hub["chunk_kda"](q, k, v, g=call["g"], beta=call["beta"], cu_seq_lens_q=cu)[0].view(140, 2, 32)
want = flashdelta.chunk_kda(*(y.reshape(1, 140, *y.shape[2:]) for y in (q, k, v, call["g"], call["beta"])),
    use_qk_l2norm_in_kernel=False, cu_seqlens=cu)[0][0]
torch.testing.assert_close(packed, want)
print("ok", kernel.__version__)
"""


def test_the_hub_kernel_runs_in_place_of_transformers_functions(tmp_path: Path):
    """Layers as `kernels` checks them, from a folder, beside the installed package."""
    subprocess.run([sys.executable, "hub/build.py", str(tmp_path)], cwd=ROOT, check=True)
    assert run("-W", "ignore", "-c", HUB, str(tmp_path)).startswith("ok")
