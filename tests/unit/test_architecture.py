"""The layout holds: imports go one way, as docs/architecture.md shows, and functions stay short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "flashdelta"
TABLE = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
FLOORS = tuple(line.split()[0] for line in TABLE.splitlines()[1:])
"""From the top; a module imports from its own floor or from one below. What stands beside them may use all."""

KERNELS = tuple(x for x in FLOORS if x.startswith("kernels."))

ELSEWHERE = {"parallel": "problem", "parallel.merge": "kernels.stages"}
"""Floors of the folder for several GPUs: a call's problem has a context, and merging is part of building a program."""

BESIDE = ("nn", "integrations", "tools", "kernels", "__init__", "__main__")

LONGEST = 60


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = ast.parse(
            path.read_text()
        )
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """Modules of the package that a module imports, functions' own and those for types among them."""
    is_package = (PACKAGE / Path(*name.split("."))).is_dir()
    here = name.split(".") if is_package else name.split(".")[:-1]
    found = set()
    for node in ast.walk(MODULES[name]):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = [*here[: len(here) - node.level + 1], *(node.module.split(".") if node.module else [])]
        for alias in node.names:
            full = ".".join([*base, alias.name])
            found.add(full if full in MODULES else ".".join(base) or "__init__")
    return found


def floor(name: str) -> str:
    first, second = name.split(".")[0], ".".join(name.split(".")[:2])
    return ELSEWHERE.get(name) or ELSEWHERE.get(first) or (second if second in FLOORS else first)


@pytest.mark.parametrize("name", [name for name in MODULES if floor(name) in FLOORS])
def test_imports_go_one_way(name: str):
    wrong = [x for x in imports(name) if floor(x) in FLOORS and FLOORS.index(floor(x)) < FLOORS.index(floor(name))]
    beside = [x for x in imports(name) if floor(x) in BESIDE]
    assert wrong == [] and beside == []


def test_there_is_no_circle():
    graph = {name: {x for x in imports(name) if x in MODULES and x != name} for name in MODULES}
    while graph:
        free = [name for name, wanted in graph.items() if not wanted & graph.keys()]
        assert free, f"circle among {sorted(graph)}"
        for name in free:
            del graph[name]


def test_only_backends_knows_backends():
    others = {*KERNELS, "reference"}
    users = {name for name in MODULES if floor(name) in ("ops", "runtime", "program", "problem")}
    # the chunks of a call's sequences, which `explain` counts
    allowed = {("runtime.explain", "reference.sequences")}
    assert {(name, x) for name in users for x in imports(name) if floor(x) in others} <= allowed
    leaves = {"kernels.hopper", "kernels.triton"}
    assert not {(n, x) for n in MODULES for x in imports(n) if {floor(n), floor(x)} == leaves}


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list)


def test_host_functions_are_short():
    """All but kernels, whose language is another; without signature and docstring."""
    long = []
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not is_kernel(node):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body and node.end_lineno - body[0].lineno + 1 > LONGEST:
                    long.append(f"{name}.{node.name}")
    assert long == []


def test_the_operator_of_other_programs_keeps_its_schema():
    assert str(torch.ops.kda_prefill.forward.default._schema) == (
        "kda_prefill::forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int chunk_size, *, float? "
        'scale=None, str gate="none", str precision="tf32x3", str backend="auto") -> (Tensor o, Tensor w, Tensor u)'
    )
