"""The commands of the documents: options, extras, rows of benchmarks and paths that they name exist. (`documents.faults` looks
up commands, targets and modules.)"""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import run, workloads
from flashdelta.tools.cli.app import app
from tests.support import documents

ROOT = documents.ROOT
DOCUMENTS = sorted(x for pattern in ("*.md", "*/*.md", "docs/*/*.md", "examples/c/*.md") for x in ROOT.glob(pattern))
PROGRAMS = ("flashdelta", "make", "python", "pytest", "torchrun", "pip")
"""Whose commands are looked for in sentences, too."""


def commands(text: str) -> list[list[str]]:
    """Those of bash blocks and those within a sentence, by words, without variables before them."""
    lines = [line for block in documents.blocks(text) if block.language == "bash" for line in block.code.splitlines()]
    lines += re.findall(rf"`((?:{'|'.join(PROGRAMS)}) [^`]+)`", documents.BLOCK.sub("", text))
    found = [shlex.split(part, comments=True) for line in lines for part in re.split(r" (?:&&|\||&) ", line)]
    return [words[next((i for i, x in enumerate(words) if not re.match(r"[A-Z_]+=", x)), 0) :] for words in found]


def faults(words: list[str]) -> list[str]:
    """What a command names that isn't there."""
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    given = [x.partition("=")[0] for x in rest if x.startswith("-")]
    if program == "flashdelta":
        command: Any = typer.main.get_command(app)
        if rest and not rest[0].startswith("-"):
            command = command.commands[rest[0]]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        return [x for x in given if x not in known]
    if program == "make":
        text = (ROOT / "Makefile").read_text()
        return [
            x for x in rest if not re.search(rf"^{x}:|\b{x.split('=')[0]} *[?:]?=|\({x.split('=')[0]}\)", text, re.M)
        ]
    if program == "pip":
        extras = {
            x for word in rest for said in re.findall(r"^(?:\.|flashdelta)\[(.*)\]", word) for x in said.split(",")
        }
        return [x for x in extras if f"\n{x} = [" not in (ROOT / "pyproject.toml").read_text()]
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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda x: str(x.relative_to(ROOT).with_suffix("")).replace("/", "-"))
def test_what_commands_name_exists(path: Path):
    assert [(words, wrong) for words in commands(path.read_text()) if words and (wrong := faults(words))] == []
