"""The documents: code runs as shown, links lead somewhere, what commands name exists, and figures are the recorded ones."""

from __future__ import annotations

import doctest
import inspect
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import flashdelta as fd
from benchmarks import run, tables, workloads
from flashdelta.tools.cli.app import app
from tests.support import documents

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix("")).replace("/", "-")


every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=named)
WITH_CODE = [path for path in DOCUMENTS if documents.program(path.read_text())]


@pytest.mark.parametrize("path", WITH_CODE, ids=named)
def test_code_runs(path: Path):
    """The blocks of a page are one program."""
    try:
        exec(compile(documents.program(path.read_text()), path.name, "exec"), {"__name__": path.stem})
    finally:
        if "flashdelta.integrations.fla" in sys.modules:  # its import enables it
            del sys.modules["flashdelta.integrations.fla"]
            sys.modules["flashdelta.integrations._fla"].disable()


@pytest.mark.parametrize("name", [x for x in fd.__all__ if inspect.isfunction(getattr(fd, x))])
def test_examples_run(name: str):
    """Those of docstrings, as the user reads them."""
    parts = doctest.DocTestFinder(recurse=False).find(getattr(fd, name), name, globs={"fd": fd, "torch": torch})
    assert parts[0].examples and not doctest.DocTestRunner().run(parts[0]).failed


@every_document
def test_every_block_is_tested_or_says_why_not(path: Path):
    assert documents.faults(path.read_text()) == []


def astray(path: Path, text: str) -> list[str]:
    """Links of a document to files or headings that there are not. MkDocs makes the anchors of a link within docs/."""

    def leads(link: str) -> bool:
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not anchor or not target.exists():
            return target.exists()
        on_site = all(x.is_relative_to(ROOT / "docs") for x in (path, target))
        return anchor in documents.sections(text if target == path else target.read_text(), github=not on_site)

    return [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link and not leads(link)]


@every_document
def test_links_lead_somewhere(path: Path):
    assert astray(path, path.read_text()) == []


# ---- commands: the options, targets, extras, rows of benchmarks and paths that they name exist -----------------------------

PROGRAMS = ("flashdelta", "make", "python", "pytest", "torchrun", "pip")
"""Whose commands are looked for in sentences, too."""


def commands(text: str) -> list[list[str]]:
    """Those of bash blocks and those within a sentence, by words, without variables before them."""
    scripts = [block.code.replace("\\\n", "") for block in documents.blocks(text) if block.language == "bash"]
    lines = [line for script in scripts for line in script.splitlines()]
    lines += re.findall(rf"`((?:{'|'.join(PROGRAMS)}) [^`]+)`", documents.BLOCK.sub("", text))
    found = [shlex.split(part, comments=True) for line in lines for part in re.split(r" (?:&&|\||&) ", line)]
    return [words[next((i for i, x in enumerate(words) if not re.match(r"[A-Z_]+=", x)), 0) :] for words in found]


def missing(words: list[str]) -> list[str]:
    """Names of a command that aren't there."""
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    given = [x.partition("=")[0] for x in rest if x.startswith("-")]
    if program == "flashdelta":
        command: Any = typer.main.get_command(app)
        if rest and not rest[0].startswith("-"):
            command = command.commands[rest[0]]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        return [x for x in given if x not in known]
    if program == "make":
        text, names = (ROOT / "Makefile").read_text(), [x.partition("=")[0] for x in rest]
        return [x for x in names if not re.search(rf"^{x}:|\b{x} *[?:]?=|\({x}\)", text, re.M)]
    if program == "pip":
        said = [x for word in rest for x in re.findall(r"^(?:\.|flashdelta)\[(.+)\]", word)]
        return [
            x for extras in said for x in extras.split(",") if f"\n{x} = [" not in (ROOT / "pyproject.toml").read_text()
        ]
    if program not in ("python", "torchrun", "pytest"):
        return []
    name = rest[rest.index("-m") + 1].removeprefix("benchmarks.") if "-m" in rest else ""
    if "benchmarks." + name in rest and hasattr(workloads, name.upper()):
        rows = getattr(workloads, name.upper())
        parser = run.parser(run.Program(name, rows, peers=("fla",)))
        known = {x for action in parser._actions for x in action.option_strings} | {"-m"}
        for option, text in pairwise(rest):
            if option == "--rows":
                run.select(rows, [text])
        return [x for x in given if x not in known]
    paths = [x.partition("::")[0] for x in rest if re.match(r"(tests|examples|docs|src|hub)/", x)]
    return [x for x in paths if not (ROOT / x).exists()]


@every_document
def test_what_commands_name_exists(path: Path):
    assert [(words, wrong) for words in commands(path.read_text()) if words and (wrong := missing(words))] == []


# ---- names and defaults --------------------------------------------------------------------------------------------------


def test_differences_from_fla_are_all_named():
    kda = pytest.importorskip("fla.ops.kda")
    text = (ROOT / "docs" / "start" / "coming-from.md").read_text()
    named = set(re.findall(r"`(\w+)", text))
    for name in ("chunk_kda", "fused_recurrent_kda"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (fd, kda))
        different = {x for x in ours.keys() & theirs.keys() if ours[x].default != theirs[x].default}
        assert different == {"use_qk_l2norm_in_kernel", "state_v_first"}
        assert (ours.keys() ^ theirs.keys()) - {"kwargs"} <= named
        assert [x for x, p in ours.items() if p.kind != p.KEYWORD_ONLY] == ["q", "k", "v", "g", "beta"]


def test_signatures_side_by_side_are_the_functions():
    """Names, and defaults where the page has them."""
    text = (ROOT / "docs" / "start" / "serving.md").read_text()
    found = re.search(r"<!-- signatures: (.*) -->\n\n.*\n.*\n((?:\|.*\n)+)\n<!-- end of signatures -->", text)
    assert found
    columns = [*zip(*(row.split("|")[2:-1] for row in found[2].splitlines()))]
    for name, column in zip(found[1].split(", "), columns, strict=True):
        parameters = inspect.signature(getattr(fd, name)).parameters.values()
        own = {f"{x.name}={x.default!r}" if x.default is not x.empty else x.name for x in parameters}
        said = re.findall(r"`([^`]+)`", " ".join(column))
        assert said and {*said} <= own, name


# ---- tables and figures --------------------------------------------------------------------------------------------------


def test_tables_and_the_picture_are_made_of_the_results():
    assert [str(path.relative_to(ROOT)) for path in tables.changed()] == [], "python -m benchmarks.tables"
    shown = {name for path in DOCUMENTS for name, *_ in tables.MARKED.findall(path.read_text())}
    assert shown == {*tables.TABLES}
