"""The documents: code runs as shown, links lead somewhere, and the README's figures are the recorded ones."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

import flashdelta as fd
from benchmarks import tables
from benchmarks.run import RESULTS, load
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
        ("CONTRIBUTING.md", "docs/log/tuning.md#tuning-log", False),
        ("docs/decode.md", "kernels/forward.md#plan-transitions-compose", False),
        ("docs/decode.md", "kernels/forward.md#recurrence_1", True),
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


# ---- tables and figures --------------------------------------------------------------------------------------------------


def test_tables_and_the_picture_are_made_of_the_results():
    assert [str(path.relative_to(ROOT)) for path in tables.changed()] == [], "python -m benchmarks.tables"
    shown = {name for path in DOCUMENTS for name, *_ in tables.MARKED.findall(path.read_text())}
    assert shown == {*tables.TABLES}


def test_the_readme_is_short_and_its_figures_are_the_tables():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(tables.headlines()) == len(tables.HEADLINES)
    assert str(tables.PICTURE.relative_to(ROOT)) in text
    outside = text.replace(tables.readme(), "")
    assert not re.findall(r"\d[\d.]* ?(?:ms|us|x|TB/s|TFLOP/s)\b", outside), "a figure that no file holds"


def test_the_readme_names_the_architectures_that_were_run_and_those_only_compiled():
    said = re.search(
        r"\*\*Run and measured on:\*\*(.*?)\*\*Only compiled for:\*\*(.*?);", (ROOT / "README.md").read_text(), re.S
    )
    run, compiled = (re.findall(r"sm_(\d+)", part) for part in said.groups())
    records = [path.read_text().splitlines()[1:] for path in (ROOT / "tests/compile/machine_code").glob("*.tsv")]
    assert {*run, *compiled} == {line.split("\t")[0] for lines in records for line in lines}
    found = [x["gpu"]["name"] for path in RESULTS.glob("*-h*.json") for x in load(path).get("runs", ())]
    assert (run, {*found}) == (["90"], {"NVIDIA H200", "NVIDIA H100 80GB HBM3"})


def test_pictures_are_as_drawn():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.pictures()
    assert {path: path.read_text() for path in (ROOT / "docs").rglob("*.svg")} == drawn
    pages = [ROOT / "docs" / "parallel.md", *(ROOT / "docs" / "kernels").glob("*.md")]
    shown = {page.parent / name for page in pages for name in re.findall(r"!\[.*?\]\((.*?\.svg)\)", page.read_text())}
    assert shown == set(drawn), "a picture that no page shows, or the reverse"
