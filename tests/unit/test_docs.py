"""The documents: code runs as shown, links lead somewhere, and the README's figures are the recorded ones."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

import flashdelta as fd
from benchmarks import tables
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


@every_document
def test_every_block_is_tested_or_says_why_not(path: Path):
    elsewhere = ("an unknown command", "no such file")  # test_commands.py knows more commands, and looks each up
    assert [fault for fault in documents.faults(path.read_text()) if not fault.endswith(elsewhere)] == []


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


def test_every_public_name_has_an_entry_in_the_reference():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    entries = set(re.findall(r"^::: (?:.*\n    options: \{heading: )?([\w.]+)", pages, flags=re.MULTILINE))
    modules = {
        "flashdelta": fd,
        "flashdelta.nn": fd.nn,
        "flashdelta.parallel": fd.parallel,
        "flashdelta.kernels": fd.kernels,
    }
    public = {f"{name}.{x}" for name, module in modules.items() for x in module.__all__}
    public |= {f"flashdelta.integrations.{x}" for x in ("status", "Status")}
    public |= {f"flashdelta.integrations.fla.{x}" for x in ("ENVIRONMENT", "disable", "enable", "status")}
    assert public - entries == {"flashdelta.nn", "flashdelta.parallel", "flashdelta.kernels"}


# ---- tables and figures --------------------------------------------------------------------------------------------------


def test_tables_and_the_picture_are_made_of_the_results():
    assert [str(path.relative_to(ROOT)) for path in tables.changed()] == [], "python -m benchmarks.tables"
    shown = {name for path in DOCUMENTS for name, *_ in tables.MARKED.findall(path.read_text())}
    assert shown == {*tables.TABLES}
