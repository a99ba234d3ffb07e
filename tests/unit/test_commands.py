"""The commands of the documents: what they name exists, down to options, targets, extras, rows of benchmarks and paths."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import run, workloads
from flashdelta.tools.cli.app import app
from tests.support import documents

ROOT = documents.ROOT
DOCUMENTS = sorted(
    path for pattern in ("*.md", "*/*.md", "docs/*/*.md", "examples/c/*.md") for path in ROOT.glob(pattern)
)
PROGRAMS = ("flashdelta", "make", "python", "pytest", "torchrun", "pip")
"""Whose arguments are looked up."""
OTHERS = ("build/example/kda", "cd", "cmake", "export", "git", "grep", "ncu", "pre-commit", "sed", "vllm")
MODULES = ("build", "pytest", "sglang.launch_server")
"""Those that `python -m` runs and other packages bring."""
PYTEST = {"-q", "-m", "-n", "-k", "-x", "--maxschedchunk"}


def commands(text: str) -> list[str]:
    """Those of bash blocks, line by line, and those within a sentence."""
    lines = [line for block in documents.blocks(text) if block.language == "bash" for line in block.code.splitlines()]
    prose = documents.BLOCK.sub("", text)
    return lines + re.findall(rf"`((?:{'|'.join(PROGRAMS)}) [^`]+)`", prose)


def faults(line: str) -> list[str]:
    """What the commands of a line name that isn't there."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    one: list[str] = []
    found = []
    for word in (*lexer, ";"):
        if set(word) <= set("&|;"):
            found += _faults(one)
            one = []
        else:
            one.append(word)
    return [f"{line!r}: {fault}" for fault in found]


def _faults(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words:
        return []
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    known = {"flashdelta": _flashdelta, "make": _make, "python": _python, "pytest": _pytest, "pip": _pip}
    if program == "torchrun":
        start = next(i for i, word in enumerate(rest) if word.endswith(".py"))
        return _python(rest[start:])
    if program in known:
        return known[program](rest)
    return [] if program in OTHERS else [f"no program {program!r} is known"]


def _flashdelta(words: list[str]) -> list[str]:
    command: Any = typer.main.get_command(app)
    path = []
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return [f"no command {words[0]!r}"]
        path.append(words[0])
        command, words = command.commands[words[0]], words[1:]
    options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    missing, free = [], 0
    while words:
        word, *words = words
        if not word.startswith("-"):
            free += 1
        elif word not in options:
            missing.append(f"no option {word!r}")
        elif not options[word].is_flag:
            if not words:
                missing.append(f"{word} without a value")
            words = words[1:]
    places = [option for option in command.params if option.param_type_name == "argument"]
    if free > len(places) and all(place.nargs == 1 for place in places):
        missing.append(f"{free} arguments, of {len(places)}")
    return missing


def _benchmark(name: str, words: list[str]) -> list[str]:
    """Options of a benchmark's command, and rows that it has not."""
    parser = run.parser(run.Program(name, getattr(workloads, name.upper()), peers=("fla",)))
    known = {x for action in parser._actions for x in action.option_strings}
    missing = [f"no option {word!r}" for word in words if word.startswith("-") and word not in known]
    for option, text in pairwise(words):
        if option == "--rows":
            try:
                run.select(getattr(workloads, name.upper()), [text])
            except ValueError as error:
                missing.append(str(error))
    return missing + ["--rows without a value"] * (words[-1:] == ["--rows"])


@cache
def _targets() -> tuple[set[str], set[str]]:
    """Targets of the Makefile, and its variables."""
    text = (ROOT / "Makefile").read_text()
    assigned = re.findall(r"^(\w+) *[?:]?=", text, flags=re.MULTILINE)
    return {*re.findall(r"^([a-z][a-z-]*):", text, flags=re.MULTILINE)}, {*assigned, *re.findall(r"\$\((\w+)\)", text)}


def _make(words: list[str]) -> list[str]:
    targets, variables = _targets()
    given = [word.partition("=")[0] for word in words if "=" in word]
    missing = [f"no variable {name!r}" for name in given if name not in variables]
    return missing + [f"no target {word!r}" for word in words if "=" not in word and word not in targets]


def _python(words: list[str]) -> list[str]:
    first, *rest = words
    if first == "-c":
        ast.parse(rest[0])
        return []
    if first != "-m":
        return _options([ROOT / first], rest) if (ROOT / first).is_file() else [f"no file {first!r}"]
    module, *rest = rest
    if module == "pytest":
        return _pytest(rest)
    if module in MODULES:
        return []
    program = module.removeprefix("benchmarks.")
    if module != program and hasattr(workloads, program.upper()):
        return _benchmark(program, rest)
    for folder in (ROOT, ROOT / "src"):
        place = folder / module.replace(".", "/")
        if (place / "__main__.py").is_file():
            return _options(sorted(place.glob("*.py")), rest)
        if place.with_suffix(".py").is_file():
            return _options([place.with_suffix(".py")], rest)
    return [f"no module {module!r}"]


def _options(files: list[Path], words: list[str]) -> list[str]:
    """Options that neither the files nor those beside them that they import define."""
    text = "".join(path.read_text() for path in files)
    beside = [
        files[0].with_name(f"{name}.py") for name in re.findall(r"^(?:from|import) (\w+)", text, flags=re.MULTILINE)
    ]
    text += "".join(path.read_text() for path in beside if path.is_file())
    known = set(re.findall(r'"(--?[\w-]+)"', text))
    known |= {f"--no-{name}" for name in re.findall(r'"--([\w-]+)", action=argparse.BooleanOptionalAction', text)}
    return [f"no option {word!r}" for word in words if word.startswith("-") and word not in known]


def _pytest(words: list[str]) -> list[str]:
    missing = []
    while words:
        word, *words = words
        if word in ("-m", "-n", "-k", "--maxschedchunk"):
            words = words[1:]
        elif word.startswith("-"):
            missing += [] if word in PYTEST else [f"no option {word!r}"]
        elif not (ROOT / word.partition("::")[0]).exists():
            missing.append(f"no file {word!r}")
    return missing


@cache
def _extras() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    (table,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)^\[", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^(\w+) = ", table, flags=re.MULTILINE))


def _pip(words: list[str]) -> list[str]:
    asked = [
        extra for word in words for said in re.findall(r"^(?:\.|flashdelta)\[(.*)\]", word) for extra in said.split(",")
    ]
    return [f"no extra {extra!r}" for extra in asked if extra not in _extras()]


@pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")).replace("/", "-")
)
def test_what_commands_name_exists(path: Path):
    assert [fault for line in commands(path.read_text()) for fault in faults(line)] == []


def runnable() -> list[str]:
    """Commands of ours that need no GPU, write nothing and take seconds, as the documents have them. (`test_demo.py` has the
    demo's other options.)"""
    lines = [line.partition("#")[0].strip() for path in DOCUMENTS for line in commands(path.read_text())]
    return sorted({line for line in lines if re.fullmatch(r"flashdelta (demo|doctor|verify( --quick)?)", line)})


@pytest.mark.parametrize("line", runnable())
def test_commands_run_as_they_are_written(line: str):
    done = subprocess.run([sys.executable, "-m", *shlex.split(line)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_every_extra_is_described():
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    assert len(table) == len({*table}) and {*table} == _extras()


def test_most_documents_have_commands():
    lines = [line for path in DOCUMENTS for line in commands(path.read_text())]
    for program in PROGRAMS:
        assert any(program in line for line in lines), program
    assert len(lines) > 100


@pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")).replace("/", "-")
)
def test_commands_stand_in_bash_blocks(path: Path):
    text = documents.BLOCK.sub("", path.read_text())
    assert (
        re.findall(rf"^    (?:\$ |[A-Z_]+=\S+ )*(?:{'|'.join((*PROGRAMS, *OTHERS))}) .*", text, flags=re.MULTILINE)
        == []
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("flashdelta nothing", "no command 'nothing'"),
        ("flashdelta demo --nothing", "no option '--nothing'"),
        ("flashdelta demo --tokens", "--tokens without a value"),
        ("python -m benchmarks.nothing", "no module 'benchmarks.nothing'"),
        ("python -m benchmarks.prefill --nothing", "no option '--nothing'"),
        ("python -m benchmarks.prefill --rows", "--rows without a value"),
        ("python -m benchmarks.prefill --rows nothing", "no row 'nothing'; the nearest are"),
        ("flashdelta doctor there", "1 arguments, of 0"),
        ("make nothing", "no target 'nothing'"),
        ("make test NOTHING=1", "no variable 'NOTHING'"),
        ("cd x && FLASHDELTA_VLLM=0 python nothing.py", "no file 'nothing.py'"),
        ("python examples/train_tiny_lm.py --nothing x", "no option '--nothing'"),
        ("torchrun --nproc-per-node 2 examples/train_parallel.py --nothing", "no option '--nothing'"),
        ("python -m tests.nothing", "no module 'tests.nothing'"),
        ("python -m tests.fuzz --nothing", "no option '--nothing'"),
        (".venv/bin/python -m pytest -q tests/nothing.py", "no file 'tests/nothing.py'"),
        ("pytest --nothing", "no option '--nothing'"),
        ("pip install '.[nothing]'", "no extra 'nothing'"),
        ("nothing --at all", "no program 'nothing'"),
    ],
)
def test_what_is_not_there_is_found(line: str, said: str):
    (found,) = faults(line)
    assert said in found
