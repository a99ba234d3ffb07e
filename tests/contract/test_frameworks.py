"""Training frameworks, as pip has them, of docs/frameworks.md: what their code takes from FLA, and with what arguments."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flashdelta.integrations import _fla

FOLDER = os.environ.get("FLASHDELTA_WHEELS")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="make test-integrations: FLASHDELTA_WHEELS is not set")
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
    known = _fla.CHUNK.taken | _fla.CHUNK.ignored | _fla.OLD_NAMES.keys()
    assert {"q", "k", "v", "g", "beta", "cu_seqlens"} <= passed
    assert passed & set(_fla.CHUNK.parameters or known) <= known
