"""The tables in README.md, benchmarks/README.md, docs/layer.md and docs/machine-code.md, made from benchmarks/results."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ..files import whole_file
from .report import View, cells, headline, load, markdown_table, short, summary
from .views import VIEWS
from .workloads import value

ROOT = Path(__file__).resolve().parents[4]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- tables: flashdelta bench pages -->", "<!-- end of tables -->"

SPLIT_SHOWN = ("8K H4", "32K H4", "128K H4", "2x16K H4", "128K+5x1K H4", "8K H8", "128K H8", "64K+512+256+128 H8")
WY_SHOWN = ("B1 T512 H32", "B1 T8192 H32", "B2 T8192 H32", "B1 T8192 H8 HV32", "packed random 20 of 16384 H32")


def shown(document: dict) -> list[str]:
    """The rows of a document that a page shows."""
    rows, kind = document["rows"], document["benchmark"]
    if kind == "decode":
        return [row["name"] for row in rows if row["bounds"]]
    few = {"split": SPLIT_SHOWN, "wy": WY_SHOWN, "classic": (), "toolchains": ()}.get(kind)
    return [row["name"] for row in rows if few is None or row["name"] in few]


def command(document: dict) -> str:
    backend = document["protocol"].get("backend", "auto")
    named = "" if backend == "auto" or document["benchmark"] in ("decode", "fp32") else f" --backend {backend}"
    return f"flashdelta bench {document['benchmark']}{named}"


def section(path: Path) -> str:
    """A result file: what was measured and how to repeat it, rows, and what they say."""
    document, view = load(path), VIEWS[load(path)["benchmark"]]
    names = shown(document)
    measured = f"{headline(document)}; {document['date'][:10]}, commit `{document['environment']['commit'][:7]}`"
    source = f"`{command(document)}`, {measured} ([all {len(document['rows'])} rows](results/{path.name}))."
    said = [f"### {path.stem}", fold(source)]
    said += [markdown_table(cells(document, view, wide=False, names=names))] if names else []
    return "\n\n".join([*said, "\n".join(fold(f"* {line.strip()}", "  ") for line in summary(document, view))])


def fold(line: str, indent: str = "") -> str:
    return textwrap.fill(line, 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def all_sections() -> str:
    return "\n\n".join(section(path) for path in sorted(RESULTS.glob("*.json")))


HEADLINES = (
    ("prefill, 8192 tokens, 64 heads", "prefill-hopper-h200", "T8192 H64"),
    ("prefill, 20 packed sequences, 64 heads", "prefill-hopper-h200", "packed 20 random H64"),
    ("prefill, 131072 tokens, 8 heads", "split-hopper-h200", "128K H8"),
    ("prefill in float32, 4096 tokens, 32 heads", "fp32-h200", "B1 H32 T4096 K128 C64"),
    ("decoding, 128 sequences, 32 heads", "decode-h200", "N128 H32 bf16"),
    ("training step, 8192 tokens, 32 heads", "train-hopper-h200", "B1 T8192 H32"),
)
"""Rows of README.md: what, file, row."""


def headlines() -> str:
    """The table of README.md. The last ratio is there once a file has it."""
    table = [["", "ours ms", "FLA ms", "FLA/ours, cold", "sustained", "repeat with", "file"]]
    for what, stem, name in HEADLINES:
        document = load(RESULTS / f"{stem}.json")
        row = next(row for row in document["rows"] if row["name"] == name)
        times = [short(value(row, f"{contender}.ms.median")) for contender in ("ours", "fla")]
        again = value(row, "sustained_speedup")
        ratios = [f"{row['speedup']:.2f}x", "-" if again is None else f"{again:.2f}x"]
        repeat = f'`{command(document)} --rows "{name}"`'
        table.append([what, *times, *ratios, repeat, f"[{stem}](benchmarks/results/{stem}.json)"])
    if all(line[4] == "-" for line in table[1:]):
        table = [[*line[:4], *line[5:]] for line in table]
    return markdown_table(table, words=2)


def toolchains() -> str:
    """The table of docs/machine-code.md."""
    document = load(RESULTS / "toolchains-h200.json")
    view: View = VIEWS["toolchains"]
    return markdown_table([[line[0].strip(), *line[1:]] for line in cells(document, view, wide=False)])


def layer() -> str:
    """The table of docs/layer.md, of the newest file."""
    paths = sorted(RESULTS.glob("layer-*.json"), key=lambda path: load(path)["date"])
    if not paths:
        return "Not measured yet."
    document, view = load(paths[-1]), VIEWS["layer"]
    said = "\n".join(fold(f"* {line.strip()}", "  ") for line in summary(document, view))
    return f"{fold(headline(document) + '.')}\n\n{markdown_table(cells(document, view, wide=False))}\n\n{said}"


PAGES = {
    ROOT / "README.md": headlines,
    ROOT / "benchmarks" / "README.md": all_sections,
    ROOT / "docs" / "layer.md": layer,
    ROOT / "docs" / "machine-code.md": toolchains,
}


def page(path: Path) -> str:
    """The page's text with its tables made anew."""
    before, rest = path.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{PAGES[path]()}\n\n{END}{rest.split(END)[1]}"


def write() -> None:
    for path in PAGES:
        with whole_file(path) as unfinished:
            unfinished.write_text(page(path))
