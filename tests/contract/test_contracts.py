"""The integrations of engines against the engines' wheels: names, signatures and defaults, what callers pass, what becomes of
results, attributes that are read.

`make test-integrations` runs them. The wheels are downloaded without dependencies to `FLASHDELTA_WHEELS`, and only read.
"""

from __future__ import annotations

import ast
import os
import zipfile
from pathlib import Path

import pytest

from flashdelta.integrations import _sglang, _vllm
from flashdelta.integrations.engine import Engine
from flashdelta.integrations.seams import Seam, Source, differences, stored, uses

from ..support.engine_kernels import wheel

FOLDER = os.environ.get("FLASHDELTA_WHEELS")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make test-integrations: FLASHDELTA_WHEELS is not set")

NEWEST = ("newest",) if os.environ.get("FLASHDELTA_NEWEST") else ()
WHEELS = [(engine, version) for engine in (_vllm.ENGINE, _sglang.ENGINE) for version in (*engine.read, *NEWEST)]


@pytest.fixture(scope="module", params=WHEELS, ids=lambda x: f"{x[0].name}-{x[1]}")
def found(request: pytest.FixtureRequest) -> tuple[Engine, Source]:
    engine, version = request.param
    return engine, Source(zipfile.Path(wheel(Path(str(FOLDER)), engine.name, version)))


@pytest.fixture(scope="module")
def vllm() -> Source:
    return Source(zipfile.Path(wheel(Path(str(FOLDER)), "vllm", _vllm.ENGINE.read[-1])))


def test_names_and_signatures(found: tuple[Engine, Source]):
    engine, source = found
    assert differences(engine.seams, source.root) == []


def test_every_call_of_what_is_replaced_is_found(found: tuple[Engine, Source]):
    """So that `differences` holds what callers pass to what adapters know."""
    engine, source = found
    seams = [x for x in engine.seams if isinstance(x, Seam) and x.adapter is not None and not x.name.endswith("__")]
    for seam in seams:
        assert any(source.passed(module, seam.name) for module in (seam.module, *seam.callers)), seam.name


def test_every_use_of_states_is_found(vllm: Source):
    for seam in _vllm.USES:
        assert uses(vllm.definition(seam.module, seam.name), seam.variable), seam


def test_how_ling_uses_its_pool(vllm: Source):
    """It indexes it and hands it to kernels, as a `Pool` can be."""
    forward = vllm.definition(_vllm.LING, _vllm.FORWARD[_vllm.LING])
    parents = {child: node for node in ast.walk(forward) for child in ast.iter_child_nodes(node)}
    names = [x for x in ast.walk(forward) if isinstance(x, ast.Name) and x.id.startswith("recurrent_state")]
    loads = [parents[x] for x in names if isinstance(x.ctx, ast.Load)]
    assert len(loads) >= 6
    assert all(isinstance(x, ast.Subscript) or (isinstance(x, ast.keyword) and x.arg == "initial_state") for x in loads)
    assert not stored(forward)  # it runs with a stand-in for the layer


GROUPS = {"vllm": ("vllm.plugins", "vllm.general_plugins"), "sglang": ("sglang.srt.plugins", "sglang.srt.plugins")}


def test_engines_load_plugins_of_the_group(found: tuple[Engine, Source]):
    engine, source = found
    module, group = GROUPS[engine.name]
    assert any(isinstance(x, ast.Constant) and x.value == group for x in ast.walk(source.tree(module)[0]))


def test_variables_that_workers_on_ray_get(vllm: Source):
    """Of ours those that a variable of vLLM's names, as the docs say."""
    docs = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    assert "`VLLM_RAY_EXTRA_ENV_VARS_TO_COPY` names" in docs
    names = {x.attr for x in ast.walk(vllm.tree("vllm.ray.ray_env")[0]) if isinstance(x, ast.Attribute)}
    assert "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY" in names
    assigned = next(
        x.value
        for x in vllm.tree("vllm.ray.ray_env")[0].body
        if isinstance(x, (ast.Assign, ast.AnnAssign)) and "DEFAULT_ENV_VAR_PREFIXES" in ast.unparse(x)
    )
    prefixes = [x.value for x in ast.walk(assigned) if isinstance(x, ast.Constant)]
    ours = (_vllm.ENGINE.environment, _vllm.FUSED)
    assert prefixes and not any(name.startswith(x) for name in ours for x in prefixes)
    assert ",".join(ours) in docs
