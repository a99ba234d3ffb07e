"""The documents: code runs as shown, links lead somewhere, and the README's figures are the recorded ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flashdelta.tools.bench.report import decode_markdown, prefill_markdown, split_markdown, toolchains_markdown

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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path):
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_the_readmes_table_is_the_recorded_run():
    assert prefill_markdown(_measured()) in (ROOT / "README.md").read_text()


def test_the_readmes_decode_table_is_the_recorded_run():
    document = json.loads((ROOT / "benchmarks/results/decode-h200-2026-11-22.json").read_text())
    judged = [row["name"] for row in document["rows"] if row["met"] is not None]
    assert len(judged) == 10
    assert decode_markdown(document, judged) in (ROOT / "README.md").read_text()


def test_the_readmes_split_table_is_the_recorded_run():
    document = json.loads((ROOT / "benchmarks/results/split-hopper-h200-2026-11-21.json").read_text())
    names = ("8K H4", "32K H4", "128K H4", "2x16K H4", "128K+5x1K H4")
    assert split_markdown(document, names) in (ROOT / "README.md").read_text()
    errors = [(row["ours"][x], row["fla"][x]) for row in document["rows"] for x in ("error_o", "error_state")]
    assert len(document["rows"]) == 26 and all(ours < fla for ours, fla in errors)


def test_the_table_of_toolchains_is_the_recorded_run():
    document = json.loads((ROOT / "benchmarks/results/toolchains-h200-2026-11-23.json").read_text())
    assert toolchains_markdown(document) in (ROOT / "docs" / "machine-code.md").read_text()


def test_the_readme_names_every_missed_bound():
    missed = [
        (row["name"], row["ours"]["ms"]["median"], row["must_ms"]) for row in _measured()["rows"] if row["met"] is False
    ]
    stated = re.search(r"\| case \| ours ms \| bound ms \|\n.*\n((?:\|.*\n)+)", (ROOT / "README.md").read_text())[1]
    cells = [[cell.strip().split(" (")[0] for cell in line.split("|")[1:-1]] for line in stated.splitlines()]
    assert cells == [[name, f"{ours:.3f}", f"{must:.2f}"] for name, ours, must in missed]


def _measured() -> dict:
    return json.loads((ROOT / "benchmarks/results/prefill-hopper-h200-2026-11-21.json").read_text())
