"""The code of a document: which blocks there are, what runs them, and which can't run in a test.

    ```python                        runs: the blocks of a page are one program
    ```python title="FILE"           lines of a file of the repository, which tests of its own run
    ```bash                          commands, whose names `tests/unit/test_docs.py` looks up
    ```text                          a picture

`<!-- needs: a GPU -->`, or another of `NEEDS`, before a block says why no test without one runs it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^(?:<!-- needs: (?P<needs>.*?) -->\n)?```(?P<info>.*)\n(?P<code>(?:.*\n)*?)```$", re.MULTILINE)
NEEDS = {"a GPU": ("cuda",), "an engine": ("vllm", "sglang"), "a framework": ("nemo_automodel", "torchtitan")}
NEEDS |= {"ranks": ("init_device_mesh",), "kernels": ("KernelConfig",)}
"""Marks, and the words one of which their blocks have."""

COLUMNS = 88
"""Columns that the site shows of a block without scrolling."""

HEADING = re.compile(r"^(#+) +(.*)$", re.MULTILINE)


class Block(NamedTuple):
    language: str
    title: str | None
    needs: str | None
    code: str


def blocks(text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = re.fullmatch(r'title="(.*)"', rest.strip())
        found.append(Block(language, title and title[1], match["needs"], match["code"]))
    return found


def program(text: str, on_gpu: bool = False) -> str:
    """The Python blocks that run, one after another."""
    wanted = (None, "a GPU") if on_gpu else (None,)
    return "\n".join(b.code for b in blocks(text) if b.language == "python" and not b.title and b.needs in wanted)


def sections(text: str, github: bool = False) -> dict[str, str]:
    """Text under each heading, up to the next one of its level or above, by the anchor that MkDocs or GitHub gives it."""
    text = BLOCK.sub("", text)
    found: dict[str, str] = {}
    for match in HEADING.finditer(text):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", match[2])).strip().lower()
        slug = words.replace(" ", "-") if github else re.sub(r"[-\s]+", "-", words)
        anchor, number = slug, 0
        while anchor in found:
            number += 1
            anchor = f"{slug}-{number}" if github else f"{slug}_{number}"
        end = re.compile(rf"^#{{1,{len(match[1])}}} ", re.MULTILINE).search(text, match.end())
        found[anchor] = text[match.end() : end.start() if end else len(text)]
    return found


def faults(text: str) -> list[str]:
    """Faults of the blocks that no test runs, and with marks."""
    return [fault for block in blocks(text) for fault in _faults(block)]


def _faults(block: Block) -> list[str]:
    if block.language not in ("python", "bash", "text"):
        return [f"a block in {block.language!r}" if block.language else "a block in no language"]
    if wide := [line for line in block.code.splitlines() if len(line) > COLUMNS]:
        return [f"a line of more than {COLUMNS} columns: {line}" for line in wide]
    if block.needs is not None:
        if block.needs not in NEEDS:
            return [f"marked with {block.needs!r}"]
        if not any(word in block.code for word in NEEDS[block.needs]):
            return [f"marked, but it needs no {block.needs.split()[1]}"]
    if block.title is not None:
        source = (ROOT / block.title).read_text()
        return [] if block.code in source else [f"not an excerpt of {block.title}"]
    if block.language == "bash" and block.needs is None and any(x in block.code for x in NEEDS["an engine"]):
        return ["not marked, but it needs an engine"]
    return []
