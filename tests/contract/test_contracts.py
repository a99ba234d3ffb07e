"""The integrations of engines against the engines' wheels: digests, signatures, plugins, variables.

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
from flashdelta.integrations.seams import Source, differences

from ..support.engine_kernels import wheel
from ..support.engines import SIGNATURES

FOLDER = os.environ.get("FLASHDELTA_WHEELS")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make test-integrations: FLASHDELTA_WHEELS is not set")

NEWEST = ("newest",) if os.environ.get("FLASHDELTA_NEWEST") else ()
WHEELS = [(engine, version) for engine in (_vllm.ENGINE, _sglang.ENGINE) for version in (*engine.read, *NEWEST)]


@pytest.fixture(scope="module", params=WHEELS, ids=lambda x: f"{x[0].name}-{x[1]}")
def found(request: pytest.FixtureRequest) -> tuple[Engine, str, Source]:
    engine, version = request.param
    return engine, version, Source(zipfile.Path(wheel(Path(str(FOLDER)), engine.name, version)))


def test_the_code_is_what_was_read(found: tuple[Engine, str, Source]):
    """A later release fails here: read what differs, add its digests and the version."""
    engine, _, source = found
    assert differences(engine.patches, source.root) == []


def parameters(arguments: ast.arguments) -> list[str]:
    required = len(arguments.args) - len(arguments.defaults)
    pairs = [
        *zip(arguments.args, [None] * required + arguments.defaults),
        *zip(arguments.kwonlyargs, arguments.kw_defaults),
    ]
    return [x.arg if default is None else f"{x.arg}={ast.unparse(default)}" for x, default in pairs]


def test_signatures_that_unit_tests_take_for_granted(found: tuple[Engine, str, Source]):
    engine, _, source = found
    told = [x for x in engine.patches if x.adapter in SIGNATURES]
    assert len(told) > 2
    for seam in told:
        for node in source.definitions(seam.module, seam.name):
            assert isinstance(node, ast.FunctionDef) and parameters(node.args) == SIGNATURES[seam.adapter].split()
            assert not seam.keywords or node.args.kwarg is not None


GROUPS = {"vllm": ("vllm.plugins", "vllm.general_plugins"), "sglang": ("sglang.srt.plugins", "sglang.srt.plugins")}


def test_engines_load_plugins_of_the_group(found: tuple[Engine, str, Source]):
    engine, _, source = found
    module, group = GROUPS[engine.name]
    assert any(isinstance(x, ast.Constant) and x.value == group for x in ast.walk(source.tree(module)[0]))
