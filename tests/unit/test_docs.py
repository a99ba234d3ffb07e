"""The documents: code runs as shown, links lead somewhere, and the README's figures are the recorded ones."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flashdelta.tools.bench import pages
from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.report import load
from flashdelta.tools.bench.workloads import select

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md"]
DOCUMENTS += [ROOT / "examples" / "c" / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
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
    assert len(text.splitlines()) <= 120
    table = pages.headlines()
    shown = len(pages.measured())
    assert shown >= 5 and len(table.splitlines()) == 2 + shown and table.count("flashdelta bench") == shown
    assert table in text
    outside = text.replace(table, "")
    assert not re.findall(r"\d[\d.]* ?(?:ms|us|x|TB/s|TFLOP/s)\b", outside), "a figure that no file holds"


def test_the_readme_names_the_architectures_that_were_run_and_those_only_compiled():
    said = re.search(
        r"\*\*Run and measured on:\*\*(.*?)\*\*Only compiled for:\*\*(.*?);", (ROOT / "README.md").read_text(), re.S
    )
    run, compiled = (re.findall(r"sm_(\d+)", part) for part in said.groups())
    records = [path.read_text().splitlines()[1:] for path in (ROOT / "tests/compile/machine_code").glob("*.tsv")]
    assert {*run, *compiled} == {line.split("\t")[0] for lines in records for line in lines}
    gpus = {load(path)["environment"]["gpu"]["name"] for path in pages.RESULTS.glob("*.json")}
    assert (run, gpus) == (["90"], {"NVIDIA H200"})


def drawing(path: Path) -> tuple[list[str], list[float]]:
    """The words of an SVG, and the coordinates of its paths."""
    elements = list(ElementTree.parse(path).iter())
    numbers = [
        re.findall(r"-?\d+\.?\d*", element.get("d", "")) for element in elements if element.tag.endswith("}path")
    ]
    words = ["".join(element.itertext()) for element in elements if element.tag.endswith("}text")]
    return words, [float(x) for found in numbers for x in found]


def test_the_picture_is_drawn_from_the_recorded_runs(tmp_path: Path):
    pytest.importorskip("matplotlib")
    pages.draw_headlines(tmp_path / "drawn.svg")
    words, numbers = drawing(tmp_path / "drawn.svg")
    kept_words, kept_numbers = drawing(pages.PICTURE)
    assert kept_words == words, "flashdelta bench pages"
    assert kept_numbers == pytest.approx(numbers, abs=0.5), "flashdelta bench pages"
    assert all(found.headline.what in words for found in pages.measured())
    assert str(pages.PICTURE.relative_to(ROOT)) in (ROOT / "README.md").read_text()


def test_a_headline_appears_once_its_file_does(tmp_path: Path):
    """Of the layer, say, and only with times of both."""
    layer = next(headline for headline in pages.HEADLINES if headline.what.startswith("layer"))
    path = tmp_path / f"{layer.stem}.json"
    row = {"name": layer.row, "speedup": 2.0, "ours": {"sustained_ms": 0.05}, "fla": {}}
    document = {"benchmark": "layer", "protocol": {}, "rows": [row]}
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"^results: got .*, wanted a folder with one of: prefill"):
        pages.headline_table(tmp_path)
    row["fla"]["sustained_ms"] = 0.1
    path.write_text(json.dumps(document))
    ((what, *cells),) = pages.headline_table(tmp_path)[1:]
    assert what == layer.what
    assert cells == ["50.0 us", "100 us", "2.00x", "2.00x", f'flashdelta bench layer --rows "{layer.row}"']


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
