"""The integrations of engines against the engines' wheels: names, signatures, what callers pass, what becomes of the results.

`make test-integrations` runs them. The wheels are downloaded without dependencies to `FLASHDELTA_WHEELS`, and only read.
"""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashdelta.integrations import _sglang, _vllm
from flashdelta.integrations.engine import Engine
from flashdelta.integrations.seams import Seam, Source, differences
from flashdelta.testing.engine_kernels import wheel

FOLDER = os.environ.get("FLASHDELTA_WHEELS")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make test-integrations: FLASHDELTA_WHEELS is not set")

WHEELS = [(engine, version) for engine in (_vllm.ENGINE, _sglang.ENGINE) for version in engine.read]


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


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name:
            yield node


CALLERS = {
    **{module: _vllm.SEAMS for module in (_vllm.KIMI_LINEAR, _vllm.KIMI_K3, _vllm.GLM, _vllm.LING)},
    **{module: _sglang.SEAMS for module in (_sglang.BACKEND, f"{_sglang.LINEAR}.kda_prefill_graph")},
}
"""Modules whose code calls what is replaced."""

OWN = {_vllm.KIMI_LINEAR: (_vllm.KIMI_KERNELS,), _vllm.KIMI_K3: (_vllm.KIMI_KERNELS, _vllm.OPS)}
"""Where those import kernels from."""


def test_what_callers_pass(found: tuple[Engine, Source]):
    """Every argument by name is one that the adapters know."""
    engine, source = found
    checked = set()
    for module, seams in CALLERS.items():
        if not module.startswith(engine.name):
            continue
        tree, _ = source.tree(module)
        for seam in seams:
            there = seam.module in (module, *OWN.get(module, ())) or engine.name == "sglang"
            if not isinstance(seam, Seam) or not there or seam.name.endswith("__"):
                continue
            for call in calls(tree, seam.name.split(".")[-1]):
                passed = {x.arg for x in call.keywords if x.arg is not None}
                known = {*seam.parameters.split(), *seam.keywords.split()}
                assert passed <= known, f"{module}:{call.lineno} {seam.name}: {passed - known}"
                checked.add(seam.name)
    replaced = {x.name for x in engine.seams if isinstance(x, Seam) and x.adapter is not None}
    assert checked == {name for name in replaced if not name.endswith("__")}


FORWARDS = {
    _vllm.KIMI_LINEAR: "KimiGatedDeltaNetAttention",
    _vllm.KIMI_K3: "KimiK3DeltaAttention",
    _vllm.GLM: "Glm5NextLinearAttention",
    _vllm.LING: "BailingMoeV3KimiDeltaAttention",
}

USES = {
    "initial_state": {"initial_state=", ".shape"},
    "last_recurrent_state": {"pool[...] =", ".to", "scatter_states"},
    "last_state": {"pool[...] ="},
}
"""What vLLM's layers do with states before and after a prefill, which here are `Slots`."""


@pytest.mark.parametrize("module", FORWARDS)
def test_what_becomes_of_states(module: str, vllm: Source):
    forward = vllm.definition(module, f"{FORWARDS[module]}._forward")
    parents = {child: node for node in ast.walk(forward) for child in ast.iter_child_nodes(node)}
    used: dict[str, set[str]] = {}
    for node in ast.walk(forward):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in USES:
            used.setdefault(node.id, set()).add(use_of(node, parents))
    assert used["initial_state"] <= USES["initial_state"]
    (after,) = used.keys() - {"initial_state"}
    assert used[after] <= USES[after]


def test_how_ling_uses_its_pool(vllm: Source):
    """It indexes it and hands it to kernels, as a `Pool` can be."""
    forward = vllm.definition(_vllm.LING, f"{FORWARDS[_vllm.LING]}._forward")
    parents = {child: node for node in ast.walk(forward) for child in ast.iter_child_nodes(node)}
    names = [x for x in ast.walk(forward) if isinstance(x, ast.Name) and x.id.startswith("recurrent_state")]
    loads = [parents[x] for x in names if isinstance(x.ctx, ast.Load)]
    assert len(loads) >= 6
    assert all(isinstance(x, ast.Subscript) or (isinstance(x, ast.keyword) and x.arg == "initial_state") for x in loads)
    assert not attributes(forward)  # it runs with a stand-in for the layer


def use_of(node: ast.AST, parents: dict) -> str:
    parent = parents[node]
    if isinstance(parent, ast.keyword):
        return f"{parent.arg}="
    if isinstance(parent, ast.Attribute):
        return f".{parent.attr}"
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Subscript):
        return "pool[...] ="
    return ast.unparse(parent.func) if isinstance(parent, ast.Call) else ast.unparse(parent)


LAYER = {"head_dim", "model_config"}
READ = {
    _vllm.KIMI_LINEAR: LAYER - {"model_config"} | {"gate_lower_bound"},
    _vllm.KIMI_K3: LAYER - {"model_config"}
    | {"gate_lower_bound", "_checkpoint_exporter", "local_num_heads", "conv_size"}
    | {"kda_decode_backend", "kda_spec_decode_backend"},
    _vllm.GLM: LAYER - {"model_config"} | {"kda_lower_bound", "_checkpoint_exporter"},
    _vllm.LING: LAYER | {"lower_bound", "safe_gate", "num_speculative_tokens"},
}


@pytest.mark.parametrize("module", READ)
def test_attributes_of_layers(module: str, vllm: Source):
    """Those that adapters read."""
    base = vllm.definition("vllm.model_executor.layers.mamba.gdn.base", "GatedDeltaNetAttention")
    layer = vllm.definition(module, FORWARDS[module])
    assert READ[module] <= attributes(layer)
    assert vllm.definition(module, f"{FORWARDS[module]}.get_state_dtype") is not None
    assert {"model_config", "num_spec"} <= attributes(base)


def attributes(node: ast.AST) -> set[str]:
    """Of `self` that are set."""
    return {
        x.attr
        for x in ast.walk(node)
        if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and ast.unparse(x.value) == "self"
    }


GROUPS = {"vllm": ("vllm.plugins", "vllm.general_plugins"), "sglang": ("sglang.srt.plugins", "sglang.srt.plugins")}


def test_engines_load_plugins_of_the_group(found: tuple[Engine, Source]):
    engine, source = found
    module, group = GROUPS[engine.name]
    assert any(isinstance(x, ast.Constant) and x.value == group for x in ast.walk(source.tree(module)[0]))
