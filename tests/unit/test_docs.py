"""The documents: code runs as shown, links lead somewhere, and the README's figures are the recorded ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flashdelta.tools.bench import pages
from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.report import load
from flashdelta.tools.bench.workloads import select

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md"]
DOCUMENTS.append(ROOT / "examples" / "c" / "README.md")
SNIPPETS = [
    pytest.param(code, id=f"{path.name}-{i}")
    for path in DOCUMENTS
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL))
]


def test_there_are_snippets():
    assert SNIPPETS


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code: str):
    exec(compile(code, "snippet", "exec"), {})
    if "flashdelta.integrations.fla" in sys.modules:  # its import enables it
        del sys.modules["flashdelta.integrations.fla"]
        sys.modules["flashdelta.integrations._fla"].disable()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path):
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.parent.name + "-" + path.stem)
def test_tables_are_the_recorded_runs(path: Path):
    assert pages.page(path) == path.read_text(), "flashdelta bench pages"


def test_the_readme_is_short_and_its_figures_are_the_tables():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    table = pages.headlines()
    assert len(table.splitlines()) == 2 + 6 and table.count("flashdelta bench") == 6
    outside = text.replace(table, "")
    assert not re.findall(r"\d[\d.]* ?(?:ms|us|x|TB/s|TFLOP/s)\b", outside), "a figure that no file holds"


@pytest.mark.parametrize("line", pages.headlines().splitlines()[2:])
def test_a_headline_names_the_command_that_repeats_it(line: str):
    name, rows = re.search(r"`flashdelta bench (\w+).* --rows \"(.*)\"`", line).groups()
    assert len(select(BENCHMARKS[name].rows, [rows])) == 1


def test_every_result_is_on_the_page_and_every_missed_bound_is_named():
    text = " ".join((ROOT / "benchmarks/README.md").read_text().split())
    for path in pages.RESULTS.glob("*.json"):
        document = load(path)
        assert f"results/{path.name}" in text
        assert all(row["name"] in text for row in document["rows"] if row["met"] is False)


def test_split_errors_are_below_flas():
    document = load(pages.RESULTS / "split-hopper-h200.json")
    errors = [(row["ours"]["error"][x], row["fla"]["error"][x]) for row in document["rows"] for x in ("o", "state")]
    assert len(document["rows"]) == 52 and all(ours < fla for ours, fla in errors)
