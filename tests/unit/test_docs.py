"""The documents: code runs as shown, links lead somewhere, and the README's figures are the recorded ones."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import flashdelta as fd
from flashdelta.reference.rounding import TF32X3_BITS
from flashdelta.tools.bench import pages
from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.report import load
from flashdelta.tools.bench.workloads import select, value
from tests.support import documents

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix("")).replace("/", "-")


every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=named)
WITH_CODE = [path for path in DOCUMENTS if documents.program(path.read_text())]


def test_every_quickstart_has_code():
    assert {path.name for path in WITH_CODE} >= {"serving.md", "training.md", "coming-from.md"}


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```\nx\n```\n", "a block in no language"),
        ("```rust\nx\n```\n", "a block in 'rust'"),
        ("```bash\nflashdelta nothing\n```\n", "'flashdelta nothing': no such command"),
        ("```bash\nmake nothing\n```\n", "'make nothing': no such target"),
        ("```bash\npython nothing.py\n```\n", "'python nothing.py': no such file"),
        ("```bash\npip install vllm\n```\n", "'pip install vllm': not marked, but it needs an engine"),
        ("<!-- needs: an engine -->\n```bash\nmake test\n```\n", "marked, but it needs no engine"),
        ("<!-- needs: luck -->\n```bash\nmake test\n```\n", "marked with 'luck'"),
        ("<!-- needs: a GPU -->\n```python\nx = 1\n```\n", "marked, but it needs no GPU"),
        (
            '```python title="examples/train_tiny_lm.py"\nno such line\n```\n',
            "not an excerpt of examples/train_tiny_lm.py",
        ),
    ],
    ids=lambda text: text[:40].replace("\n", " "),
)
def test_a_block_that_is_neither_is_found(text: str, said: str):
    (found,) = documents.faults(text)
    assert said in found


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


@pytest.mark.parametrize(
    ("page", "link", "found"),
    [
        ("README.md", "docs/nothing.md", True),
        ("README.md", "CONTRIBUTING.md#set-up", False),
        ("README.md", "CONTRIBUTING.md#set-down", True),
        ("CONTRIBUTING.md", "#a-heading", False),
        ("CONTRIBUTING.md", "#no-heading", True),
        ("CONTRIBUTING.md", "docs/log/tuning.md#recurrence-1", False),
        ("docs/decode.md", "log/tuning.md#recurrence_1", False),
        ("docs/decode.md", "log/tuning.md#recurrence_2", True),
    ],
)
def test_a_link_astray_is_found(page: str, link: str, found: bool):
    assert astray(ROOT / page, f"# A `heading`\n\n[said]({link})\n") == [link] * found


# ---- names and defaults --------------------------------------------------------------------------------------------------


def test_names_and_defaults_side_by_side_are_the_signatures():
    text = (ROOT / "docs" / "start" / "serving.md").read_text()
    names, table = re.search(r"<!-- signatures: (.*?) -->\n\n(.*?)\n\n<!-- end", text, flags=re.DOTALL).groups()
    functions = [getattr(fd, name) for name in names.split(", ")]
    compared = 0
    for line in table.splitlines()[2:]:
        for function, cell in zip(functions, line.strip("|").split("|")[1:], strict=True):
            parameters = inspect.signature(function).parameters
            for name, default in re.findall(r"`(\w+)(?:=([^`]+))?`", cell):
                expected = inspect.Parameter.empty if not default else ast.literal_eval(default)
                # what a cell says of an argument besides its default has no `=`
                assert parameters[name].default == expected or (name, expected) == ("gate", None), (function, name)
                compared += 1
    assert compared > 30


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


def test_the_bits_of_3xtf32_are_said_alike():
    """Of mantissas: one fewer than the significant bits that `TF32X3_BITS` counts."""
    files = [x for folder in ("src", "docs") for x in (ROOT / folder).rglob("*") if x.suffix in (".py", ".md", ".h")]
    said = [n for path in files for n in re.findall(r"(\d+)\s+mantissa\s+bits\s+or\s+more", path.read_text())]
    assert len(said) >= 7 and set(said) == {str(TF32X3_BITS - 1)}


# ---- tables and figures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.parent.name + "-" + path.stem)
def test_tables_are_the_recorded_runs(path: Path):
    assert pages.page(path) == path.read_text(), "flashdelta bench pages"


def test_the_readme_is_short_and_its_figures_are_the_tables():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    table = pages.headlines()
    shown = len(pages.measured())
    assert shown == pages.MOST and len(table.splitlines()) == 2 + shown and table.count("flashdelta bench") == shown
    assert table in text
    assert pages.readme() in text
    outside = text.replace(pages.readme(), "")
    assert not any(said in outside for said in ("No results", "drafts row"))
    assert not re.findall(r"\d[\d.]* ?(?:ms|us|x|TB/s|TFLOP/s)\b", outside), "a figure that no file holds"


def test_the_readme_names_the_architectures_that_were_run_and_those_only_compiled():
    said = re.search(
        r"\*\*Run and measured on:\*\*(.*?)\*\*Only compiled for:\*\*(.*?);", (ROOT / "README.md").read_text(), re.S
    )
    run, compiled = (re.findall(r"sm_(\d+)", part) for part in said.groups())
    records = [path.read_text().splitlines()[1:] for path in (ROOT / "tests/compile/machine_code").glob("*.tsv")]
    assert {*run, *compiled} == {line.split("\t")[0] for lines in records for line in lines}
    found = [load(path)["environment"]["gpu"] for path in pages.RESULTS.glob("*.json")]
    gpus = {gpu["name"] for gpu in found if gpu is not None}
    assert (run, gpus) == (["90"], {"NVIDIA H200", "NVIDIA H100 80GB HBM3"})
    ranks = {row["ranks"] for row in load(pages.RESULTS / "cp-h200.json")["rows"]}
    assert ranks == {1, 2, 4} and "one, two and four NVIDIA H200s" in said[1] and "and one H100;" in said[1]
    assert not [*pages.RESULTS.glob("cp-h100.json")]
    tests = load(pages.RESULTS / "tests-h200.json")
    assert tests["finished"] and not any(tests["totals"][x] for x in ("failed", "missing"))
    assert not [skip for skip in tests["skips"] if "GPUs" in skip["reason"]]
    commit = tests["environment"]["commit"][:7]
    assert f"the GPU tests passed on four H200s at `{commit}`." in said[1]


def drawing(path: Path) -> tuple[list[str], list[float]]:
    """The words of an SVG, and the coordinates of its paths."""
    elements = list(ElementTree.parse(path).iter())
    numbers = [
        re.findall(r"-?\d+\.?\d*", element.get("d", "")) for element in elements if element.tag.endswith("}path")
    ]
    words = ["".join(element.itertext()) for element in elements if element.tag.endswith("}text")]
    return words, [float(x) for found in numbers for x in found]


def same_drawing(drawn: Path, kept: Path) -> list[str]:
    """The words of both."""
    words, numbers = drawing(drawn)
    kept_words, kept_numbers = drawing(kept)
    assert kept_words == words, "flashdelta bench pages"
    assert kept_numbers == pytest.approx(numbers, abs=0.5), "flashdelta bench pages"
    return words


@pytest.mark.parametrize("name", pages.PLOTTED)
def test_plots_are_drawn_from_the_recorded_runs_and_name_their_gpu(tmp_path: Path, name: str):
    pytest.importorskip("matplotlib", "3.11")  # older ones, all that Python 3.10 has, draw other axes
    pages.draw_plot(name, tmp_path / "drawn.svg")
    words = same_drawing(tmp_path / "drawn.svg", pages.RESULTS / f"{name}.svg")
    assert any(word.startswith(f"{name.rsplit('-')[-1].upper()}, 2026-") for word in words)
    assert any(f"results/{name}.svg" in path.read_text() for path in DOCUMENTS)


def test_the_picture_is_drawn_from_the_recorded_runs(tmp_path: Path):
    pytest.importorskip("matplotlib")
    pages.draw_headlines(tmp_path / "drawn.svg")
    words = same_drawing(tmp_path / "drawn.svg", pages.PICTURE)
    assert all(any(word.startswith(found.headline.what) for word in words) for found in pages.measured())
    assert str(pages.PICTURE.relative_to(ROOT)) in (ROOT / "README.md").read_text()


def test_a_headline_appears_once_its_file_does(tmp_path: Path):
    """Of the layer, say, only with times of both, and in place of one that comes after it."""
    layer = next(headline for headline in pages.HEADLINES if headline.what.startswith("layer"))
    path = tmp_path / f"{layer.results}-h200.json"
    row = {"name": layer.row, "speedup": 2.0, "ours": {"sustained_ms": 0.05}, "fla": {}}
    environment = {"commit": "0" * 40, "gpu": {"name": "NVIDIA H200"}}
    document = {"benchmark": "layer", "environment": environment, "protocol": {}, "rows": [row]}
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"^results: got .*, wanted a folder with one of: prefill"):
        pages.headline_table(tmp_path)
    row["fla"]["sustained_ms"] = 0.1
    path.write_text(json.dumps(document))
    ((what, *cells),) = pages.headline_table(tmp_path)[1:]
    assert what == layer.what
    repeat = f'flashdelta bench layer --rows "{layer.row}"'
    assert cells == ["50.0 us", "100 us", "2.00x", "2.00x", "H200", "0" * 7, repeat]
    row["commit"] = "1" * 7
    path.write_text(json.dumps(document))
    assert pages.headline_table(tmp_path)[1][-2] == row["commit"]
    before = [found.headline for found in pages.measured()]
    for kept in pages.RESULTS.glob("*.json"):
        shutil.copy(kept, tmp_path)
    assert [found.headline for found in pages.measured(tmp_path)] == [*before[:-1], layer]


def test_what_the_readme_says_of_its_table_follows_from_the_files(tmp_path: Path):
    def said() -> str:
        return " ".join(pages.readme(tmp_path).split())

    for kept in pages.RESULTS.glob("*.json"):
        document = load(kept)
        if document["benchmark"] not in pages.NOT_MEASURED:
            shutil.copy(kept, tmp_path)
    assert "The drafts row" in said()
    assert said().endswith("No results yet: the layer, vLLM and SGLang, several GPUs.")
    headline = next(x for x in pages.HEADLINES if x.results == "layer")
    times = {"speedup": 2.0, "ours": {"sustained_ms": 0.05}, "fla": {"sustained_ms": 0.1}}
    environment = {"commit": "0" * 40, "gpu": {"name": "NVIDIA H100 80GB HBM3"}}
    document = {"benchmark": "layer", "environment": environment, "protocol": {}}
    (tmp_path / "layer-h100.json").write_text(json.dumps(document | {"rows": [{"name": headline.row, **times}]}))
    assert "| [layer: " in said() and "drafts" not in said()
    assert said().endswith("No results yet: vLLM and SGLang, several GPUs.")
    for kind in ("engines", "cp"):
        (tmp_path / f"{kind}-h200.json").write_text(json.dumps(document | {"benchmark": kind, "rows": []}))
    assert "No results" not in said()


@pytest.mark.parametrize("line", pages.headlines().splitlines()[2:])
def test_a_headline_names_the_command_that_repeats_it(line: str):
    name, rows = re.search(r"`flashdelta bench (\w+).* --rows \"(.*)\"`", line).groups()
    assert len(select(BENCHMARKS[name].rows, [rows])) == 1


def test_every_result_is_on_the_page_and_every_missed_bound_is_named():
    text = " ".join((ROOT / "benchmarks/README.md").read_text().split())
    for path in pages.RESULTS.glob("*.json"):
        document = load(path)
        assert f"results/{path.name}" in text
        assert all(row["name"] in text for row in document["rows"] if row.get("met") is False)


def test_split_errors_are_below_flas():
    rows = load(pages.RESULTS / "split-hopper-h200.json")["rows"]
    ratios = {(row["name"], x): value(row, f"ours.error.{x}/fla.error.{x}") for row in rows for x in ("o", "state")}
    plain = [ratio for (name, _), ratio in ratios.items() if "gates" not in name]
    assert len(plain) == 2 * 52 and max(plain) < 1
    assert max(ratios.values()) <= 1.1


def test_pictures_are_as_drawn():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.pictures()
    assert {path: path.read_text() for path in (ROOT / "docs").rglob("*.svg")} == drawn
    pages = {path.with_suffix(".svg") for path in (ROOT / "docs" / "kernels").glob("*.md")}
    stages = {path for path in drawn if path.parent.name == "kernels"}
    assert pages == stages | {ROOT / "docs" / "kernels" / "index.svg"}, "a page without a picture, or the reverse"
