"""The layout holds: imports go one way, a basename means one thing, and functions stay short. docs/architecture.md shows it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import flashdelta as fd

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "flashdelta"
KERNELS = ("kernels.hopper", "kernels.triton", "kernels.stages", "kernels.shared")
FLOORS = ("ops", "runtime", "backends", *KERNELS, "reference", "program", "problem")
"""From the top; a module imports from its own floor or from one below. What stands beside them may use all."""

ELSEWHERE = {"parallel": "problem", "parallel.merge": "kernels.stages"}
"""Floors of the folder for several GPUs: a call's problem has a context, and merging is part of building a program."""

BESIDE = ("nn", "integrations", "testing", "tools", "kernels", "__init__", "__main__")
SAME = {
    *("prepare", "recurrence", "segments", "reverse", "wy", "intra", "decode", "verify", "commit"),
    *("launch", "build", "gradients", "chunk", "recurrent", "split", "sequences", "states", "convolution", "norm"),
    *("fused_decode", "merge"),
}
"""Operations, stages, and what every backend has: a file of such a name is about the same in each."""

LONGEST, MOST_ARGUMENTS = 60, 8


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


def test_a_basename_means_one_thing():
    by_name = defaultdict(list)
    for name in MODULES:
        if floor(name) in FLOORS and not name.endswith("__init__"):
            by_name[name.split(".")[-1]].append(name)
    folders = {"device", "parallel", "problem", "program", "reference", "ops", "runtime"} | {x[8:] for x in KERNELS}
    repeated = {name for name, where in by_name.items() if len(where) > 1 and name not in folders}
    assert repeated <= SAME, repeated - SAME


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list)


def host_functions() -> list[tuple[str, ast.FunctionDef]]:
    """All but kernels, whose language is another."""
    found = []
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not is_kernel(node):
                found.append((name, node))
    return found


def test_host_functions_are_short():
    """Without signature and docstring."""
    long = []
    for name, node in host_functions():
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if body and node.end_lineno - body[0].lineno + 1 > LONGEST:
            long.append(f"{name}.{node.name}")
    assert long == []


def test_calls_have_few_arguments():
    """Of functions; a record is made of as many fields as it has, and `op` is a public function."""
    many = []
    for name, tree in MODULES.items():
        kernels = [range(node.lineno, node.end_lineno + 1) for node in ast.walk(tree) if is_kernel(node)]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or any(node.lineno in lines for lines in kernels):
                continue
            called = ast.unparse(node.func).split(".")[-1]
            passed = [x for x in node.args if not isinstance(x, ast.Starred)] + [x for x in node.keywords if x.arg]
            if len(passed) > MOST_ARGUMENTS and called not in ("dict", "replace", "op") and not called[0].isupper():
                many.append(f"{name}:{node.lineno} {called}")
    assert many == []


def test_the_picture_is_that_of_the_imports():
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = re.search(r"```text\n(.*?)```", text, flags=re.DOTALL)[1]
    assert [word for word in re.findall(r"^([\w.]+)", picture, flags=re.MULTILINE)] == list(FLOORS)


OPERATORS = {
    "chunk_kda": (fd.chunk_kda, "q k v g beta"),
    "recurrent_kda": (fd.recurrent_kda, "q k v g beta"),
    "fused_recurrent_kda": (fd.fused_recurrent_kda, "q k v g beta"),
    "kda_prefill": (fd.kda_prefill, "q k v g beta chunk_size"),
    "chunk_bwd_wy_dqkg": (fd.kernels.chunk_bwd_wy_dqkg, "q k v v_new g beta A h dh do dv"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_keep_their_names(name: str):
    op, arguments = OPERATORS[name]
    code = op.__code__
    assert op.__name__ == name
    assert list(code.co_varnames[: code.co_argcount]) == arguments.split()


def test_the_operator_of_other_programs_keeps_its_schema():
    assert str(torch.ops.kda_prefill.forward.default._schema) == (
        "kda_prefill::forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int chunk_size, *, float? scale=None, "
        'str gate="none", str precision="tf32x3", str backend="auto") -> (Tensor o, Tensor w, Tensor u)'
    )


C_SYMBOLS = (
    *("fd_prefill_f32", "fd_prefill_f32_workspace", "fd_prefill_bf16", "fd_prefill_bf16_workspace", "fd_decode_bf16"),
    "fd_last_error",
)


def test_the_c_library_keeps_its_symbols():
    header = (PACKAGE / "tools" / "export" / "c" / "flashdelta.h").read_text()
    assert set(C_SYMBOLS) <= set(re.findall(r"\b(fd_\w+)\s*\(", header))
