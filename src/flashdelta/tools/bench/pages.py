"""The tables and plots of README.md, benchmarks/README.md and pages of docs/, from benchmarks/results, whose rows are held to
the bounds of today first."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from ..files import whole_file
from . import excerpts, scaling
from .benchmarks import BENCHMARKS
from .environment import model_of
from .excerpts import RESULTS, ROOT
from .report import (
    View,
    cells,
    headline,
    load,
    markdown_table,
    mean,
    new_figure,
    require_matplotlib,
    save,
    save_figure,
    short,
    summary,
)
from .runner import judge_again
from .views import PLOTS, VIEWS
from .workloads import value

BEGIN, END = "<!-- tables: flashdelta bench pages -->", "<!-- end of tables -->"

SPLIT_SHOWN = ("8K H4", "32K H4", "128K H4", "2x16K H4", "128K+5x1K H4", "8K H8", "128K H8", "64K+512+256+128 H8")
WY_SHOWN = ("B1 T512 H32", "B1 T8192 H32", "B2 T8192 H32", "B1 T8192 H8 HV32", "packed random 20 of 16384 H32")


MADE = {"fuzz": "make fuzz", "tests": "make gpu-test"}
"""Commands of documents that are no benchmark's."""


def shown(document: dict) -> list[str]:
    """The rows of a document that a page shows."""
    rows, kind = document["rows"], document["benchmark"]
    if kind == "decode":
        return [row["name"] for row in rows if row["bounds"]]
    few = {"split": SPLIT_SHOWN, "wy": WY_SHOWN, "classic": (), "toolchains": (), "fuzz": ()}.get(kind)
    return [row["name"] for row in rows if few is None or row["name"] in few]


def command(document: dict) -> str:
    if document["benchmark"] in MADE:
        return MADE[document["benchmark"]]
    backend = document["protocol"].get("backend", "auto")
    named = "" if backend == "auto" or document["benchmark"] in ("decode", "fp32") else f" --backend {backend}"
    return f"flashdelta bench {document['benchmark']}{named}"


def commit_of(row: dict, document: dict) -> str:
    """Short. A row of another run than its document has a commit of its own."""
    return (row.get("commit") or document["environment"]["commit"])[:7]


def when(document: dict) -> str:
    own, rows = document["environment"]["commit"][:7], document["rows"]
    later = [commit for row in rows if (commit := commit_of(row, document)) != own]
    at = ", ".join(f"`{commit}`" for commit in dict.fromkeys(later))
    if len(later) == len(rows) > 0:
        return f"rows at {at}"
    said = f"; {len(later)} row{'s' * (len(later) > 1)} later, at {at}" if later else ""
    return f"{document['date'][:10]}, commit `{own}`{said}"


def section(path: Path) -> str:
    """A result file: what was measured and how to repeat it, rows, and what they say."""
    document, view = load(path), VIEWS[load(path)["benchmark"]]
    names = shown(document)
    rows = "its row" if len(document["rows"]) == 1 else f"all {len(document['rows'])} rows"
    source = f"`{command(document)}`, {headline(document)}; {when(document)} ([{rows}](results/{path.name}))."
    said = [f"### {path.stem}", fold(source)]
    said += [markdown_table(cells(document, view, wide=False, names=names))] if names else []
    return "\n\n".join([*said, "\n".join(fold(f"* {line.strip()}", "  ") for line in summary(document, view))])


def fold(line: str, indent: str = "") -> str:
    return textwrap.fill(line, 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def all_sections() -> str:
    """Those of all result files, and which benchmarks have none."""
    paths = sorted(RESULTS.glob("*.json"))
    there = {load(path)["benchmark"] for path in paths}
    absent = ", ".join(f"`{kind}`" for kind in VIEWS if kind not in there)
    return "\n\n".join([*([f"No results yet: {absent}."] if absent else []), *map(section, paths)])


REVISIONS_STAGES = ("prepare", "recurrence", "transitions", "compose")


def revisions() -> str:
    """Calls of the prefill, their kernels and their errors, of an older revision and of a newer one."""
    path = RESULTS / "revisions" / "prefill-h200.json"
    document = load(path)
    about, rows = document["about"], document["rows"]
    source = headline({"benchmark": "prefill", "environment": about})
    commits = f"before: commit `{about['base']}`, after: `{about['commit'][:7]}`"
    table = [["us", "before", "after", "ratio", *(f"`{stage}`: before, after" for stage in REVISIONS_STAGES)]]
    for row in rows:
        times = [row["row"], short(row["base"]), short(row["ours"]), f"{row['ratio']:.2f}"]
        table.append([*times, *(stage_of_both(row["kernels"], stage) for stage in REVISIONS_STAGES)])
    said = fold(f"{source}; {commits} ([file](results/revisions/{path.name})).")
    summary = [mean("after/before", [row["ratio"] for row in rows])]
    for kind, words in (("rmse", "root mean square errors"), ("max_error", "largest single errors")):
        for output in ("o", "state"):
            ratios = [after[kind][output] / before[kind][output] for after, before in map(errors_of_both, rows)]
            summary.append(mean(f"{words} of {output} against float64, after/before", ratios))
    return "\n\n".join([said, markdown_table(table), "\n".join(fold(f"* {line}", "  ") for line in summary)])


def errors_of_both(row: dict) -> tuple[dict, dict]:
    return row["errors"]["ours"], row["errors"]["base"]


def stage_of_both(kernels: dict[str, dict[str, float]], stage: str) -> str:
    """Before and after; `prepare_steps` is a form of `prepare`."""
    found = [[us for name, us in kernels[who].items() if name.startswith(stage)] for who in ("base", "ours")]
    return ", ".join(short(us[0]) if us else "-" for us in found) if any(found) else ""


@dataclass(frozen=True)
class Headline:
    """A row of README.md: what it is, the result files without their GPU, the row of them, and the unit of its times."""

    what: str
    results: str
    row: str
    unit: str = "ms"


HEADLINES = (
    Headline("prefill: 8192 tokens, 64 heads", "prefill-hopper", "T8192 H64"),
    Headline("packed: 8192 tokens of 20 sequences, 64 heads", "prefill-hopper", "packed 20 random H64"),
    Headline("long: 131072 tokens, 8 heads", "split-hopper", "128K H8"),
    Headline("training: 8192 tokens, 32 heads", "train-hopper", "B1 T8192 H32"),
    Headline("decode: 128 sequences, 32 heads", "decode", "N128 H32 bf16", "us"),
    Headline("layer: decode, 128 sequences, 32 heads", "layer", "decode N128 H32 bf16", "us"),
    Headline("7 drafts: 32 sequences, 32 heads", "decode", "verify N32 H32 bf16 S7", "us"),
)
"""Shown are the first `MOST` of which a file holds sustained times of ours and of FLA's."""

MOST = 6

GPUS = ("h200", "h100")
"""Of the result files of a headline the first that holds its row."""

PICTURE = RESULTS / "headlines.svg"


@dataclass(frozen=True)
class Measured:
    """A headline that has been measured, at `commit`; times are sustained."""

    headline: Headline
    file: str
    document: dict
    commit: str
    ours: float
    fla: float
    cold: float

    def short(self, ms: float) -> str:
        return f"{short(ms * (1e3 if self.headline.unit == 'us' else 1.0))} {self.headline.unit}"

    @property
    def gpu(self) -> str:
        return model_of(self.document["environment"]["gpu"]["name"])


def measured(folder: Path = RESULTS) -> list[Measured]:
    """The first `MOST` headlines that the files of `folder` hold, in order.

    Raises:
        ValueError: there is none.
    """
    found = []
    for wanted in HEADLINES:
        for name in (f"{wanted.results}-{gpu}.json" for gpu in GPUS):
            document = load(folder / name) if (folder / name).exists() else {"rows": []}
            row = next((row for row in document["rows"] if row["name"] == wanted.row), None)
            times = [value(row, path) for path in ("ours.sustained_ms", "fla.sustained_ms", "speedup")]
            if row is not None and None not in times:
                found.append(Measured(wanted, name, document, commit_of(row, document), *times))
                break
    if not found:
        files = ", ".join(dict.fromkeys(f"{x.results}-{GPUS[0]}" for x in HEADLINES))
        raise ValueError(f"results: got {folder}, wanted a folder with one of: {files}")
    return found[:MOST]


def headline_table(folder: Path = RESULTS) -> list[list[str]]:
    """Titles, then a line for each headline."""
    table = [["", "ours", "FLA", "FLA/ours", "cold", "GPU", "commit", "repeat with"]]
    for found in measured(folder):
        times = [
            found.short(found.ours),
            found.short(found.fla),
            f"{found.fla / found.ours:.2f}x",
            f"{found.cold:.2f}x",
            found.gpu,
            found.commit,
        ]
        table.append([found.headline.what, *times, f'{command(found.document)} --rows "{found.headline.row}"'])
    return table


def headlines(folder: Path = RESULTS) -> str:
    """The table of README.md, whose rows link to their files."""
    titles, *lines = headline_table(folder)
    rows = [
        [f"[{what}](benchmarks/results/{found.file})", *rest, f"`{commit}`", f"`{repeat}`"]
        for found, (what, *rest, commit, repeat) in zip(measured(folder), lines)
    ]
    return markdown_table([titles, *rows], words=3)


NOT_MEASURED = {"layer": "the layer", "engines": "vLLM and SGLang", "cp": "several GPUs"}
"""Benchmarks of which README.md says that they have no results, as long as they have none."""


def misses(found: Measured) -> list[str]:
    """The bounds that a headline's row misses, and what it reaches."""
    rows, kind = found.document["rows"], BENCHMARKS[found.document["benchmark"]]
    row = next(row for row in rows if row["name"] == found.headline.row)
    missed = {words for words, met in row.get("bounds", {}).items() if met is False}
    bounds = next(each.bounds for each in kind.rows if each.name == row["name"])
    return [f"{bound.words}: {bound.found(row, rows):.3g}" for bound in bounds if bound.words in missed]


def readme(folder: Path = RESULTS) -> str:
    """The table of README.md, and what to know of it."""
    there = {load(path)["benchmark"] for path in folder.glob("*.json")}
    said = ["All rows, errors, memory and missed targets: [benchmarks/README.md](benchmarks/README.md)."]
    if any(found.headline.what.startswith("7 drafts") for found in measured(folder)):
        said.insert(0, "The drafts row times verification plus commit; FLA writes one state per token instead.")
    by_row = {found.headline.what.partition(":")[0]: misses(found) for found in measured(folder)}
    missed = [f"{what} ({', '.join(bounds)})" for what, bounds in by_row.items() if bounds]
    calls = "The target with a checkpoint is for sustained calls, the layer's for cold ones."
    said += [f"Of these rows {len(missed)} miss a target: {', '.join(missed)}. {calls}"] if missed else []
    absent = [what for kind, what in NOT_MEASURED.items() if kind not in there]
    said += [f"No results yet: {', '.join(absent)}."] if absent else []
    return f"{headlines(folder)}\n\n{fold(' '.join(said))}"


def draw_headlines(path: Path, folder: Path = RESULTS) -> None:
    """Ours and FLA's sustained times in pairs of bars, in shares of FLA's.

    Raises:
        ValueError: the folder has no such times, or matplotlib is not installed.
    """
    rows = measured(folder)[::-1]
    figure, axes = new_figure(8, 0.6 + 0.55 * len(rows))
    for place, row in enumerate(rows):
        share = row.ours / row.fla
        axes.barh(place - 0.2, 1.0, height=0.36, color="silver")
        axes.barh(place + 0.2, share, height=0.36, color="C0")
        axes.text(1.01, place - 0.2, f"FLA {row.short(row.fla)}", va="center", fontsize=8)
        said = f"flashdelta {row.short(row.ours)}, {row.fla / row.ours:.1f}x as fast"
        axes.text(share + 0.01, place + 0.2, said, va="center", fontsize=8)
    where = sorted({row.gpu for row in rows})
    labels = [row.headline.what + (f" ({row.gpu})" if len(where) > 1 else "") for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_xlim(0, 1.3)
    beside = sorted({row.document["environment"]["versions"]["fla"] for row in rows})
    on = f" on one {where[0]}" if len(where) == 1 else ""
    figure.suptitle(
        f"Sustained times{on}, bf16, K = V = 128, as shares of FLA {', '.join(beside)}'s: shorter is faster",
        fontsize=10,
    )
    save_figure(figure, path)


PLOTTED = ("layer-h100", "split-hopper-h200", "train-hopper-h200", "wy-hopper-h200")
"""Result files whose plots the pages show."""


def draw_plot(name: str, path: Path) -> None:
    """Raises a ValueError where matplotlib is not installed."""
    document = load(RESULTS / f"{name}.json")
    PLOTS[document["benchmark"]].draw(document, path)


def toolchains() -> str:
    """The table of docs/machine-code.md."""
    document = load(RESULTS / "toolchains-h200.json")
    view: View = VIEWS["toolchains"]
    return markdown_table([[line[0].strip(), *line[1:]] for line in cells(document, view, wide=False)])


def layer() -> str:
    """The table of docs/layer.md, of the newest file."""
    paths = sorted(RESULTS.glob("layer-*.json"), key=lambda path: load(path)["date"])
    if not paths:
        return "No results yet."
    document, view = load(paths[-1]), VIEWS["layer"]
    said = "\n".join(fold(f"* {line.strip()}", "  ") for line in summary(document, view))
    return f"{fold(headline(document) + '.')}\n\n{markdown_table(cells(document, view, wide=False))}\n\n{said}"


def parallel() -> str:
    """The tables of docs/parallel.md: what was measured, and what is modelled."""
    said = []
    for path in sorted(RESULTS.glob("cp-*.json")):
        document = load(path)
        source = f"`{command(document)}`, {headline(document)} ([file](../benchmarks/results/{path.name}))."
        document["rows"].sort(
            key=lambda row: (row["ranks"], row["table"], row["shape"]["H"], row["shape"]["T"], row["name"])
        )
        said += [fold(source), markdown_table(cells(document, VIEWS["cp"], wide=True))]
    said = said or ["Not measured yet."]
    documents = {name: load(RESULTS / f"{name}-hopper-h200.json") for name in ("prefill", "train")}
    gathers, copies = (
        ", ".join(f"{us} us at {mib} MiB" for mib, us in measured[1:])
        for measured in (scaling.GATHER_US, scaling.PUT_US)
    )
    inputs = f"""**Modelled, not measured** (`tools/bench/scaling.py`): one GPU's time over that of ranks that share one
sequence, back to back. Inputs, of H200s: calls at 8192 tokens back to back and `reverse`, all times the tokens
([prefill](../benchmarks/results/prefill-hopper-h200.json), [train](../benchmarks/results/train-hopper-h200.json));
{scaling.TRANSITION_US} us a chunk of `transitions`, {scaling.TRANSITION_IN_STEPS_US} in steps of 32 tokens, and
{scaling.COMPOSE_US} us a step of `merge`, as many CTAs at once as there are SMs ([split.md](split.md));
memory at {scaling.COPY_TB_S} TB/s. Exchanges between two GPUs of one host: a copy into symmetric memory ({copies}),
one after another to more GPUs, and {scaling.SIGNAL_US} us for signals; or NCCL's all-gather, by what a rank receives
({gathers}). Left out: gaps between launches, ranks that do not start together, the host.
`flashdelta bench pages` writes the table."""
    said += [fold(" ".join(inputs.split())), markdown_table(scaling.table(documents))]
    return "\n\n".join(said)


PAGES = {
    ROOT / "README.md": (readme,),
    ROOT / "benchmarks" / "README.md": (revisions, all_sections),
    ROOT / "docs" / "backward.md": (excerpts.training,),
    ROOT / "docs" / "fp32-and-c.md": (excerpts.fp32,),
    ROOT / "docs" / "hopper-prefill.md": (excerpts.kernels, excerpts.half_steps, excerpts.beside_cudnn),
    ROOT / "docs" / "layer.md": (excerpts.step_parts, excerpts.missed_steps, layer),
    ROOT / "docs" / "machine-code.md": (toolchains,),
    ROOT / "docs" / "parallel.md": (parallel,),
    ROOT / "docs" / "split.md": (excerpts.few_heads,),
}
"""What writes the tables of a page, in their order."""


def page(path: Path) -> str:
    """The page's text with its tables made anew."""
    text, *rest = path.read_text().split(BEGIN)
    for table, part in zip(PAGES[path], rest, strict=True):
        text += f"{BEGIN}\n\n{table()}\n\n{END}{part.split(END)[1]}"
    return text


def judge_results() -> None:
    """Holds the rows of all results to the bounds of today."""
    for path in sorted(RESULTS.glob("*.json")):
        document = load(path)
        if document["benchmark"] in BENCHMARKS:
            save(judge_again(document, BENCHMARKS[document["benchmark"]]), path)


def write() -> None:
    """Judges results, and writes all pages and pictures.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require_matplotlib()
    judge_results()
    for path in PAGES:
        with whole_file(path) as unfinished:
            unfinished.write_text(page(path))
    draw_headlines(PICTURE)
    for name in PLOTTED:
        draw_plot(name, RESULTS / f"{name}.svg")
