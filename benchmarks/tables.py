"""Writes the marked tables of documents and README's picture from benchmarks/results: `python -m benchmarks.tables`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from .run import RESULTS, ROOT, load

MARKED = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n\n).*?(\n\n<!-- end of table -->)", re.DOTALL)
PICTURE = RESULTS / "headlines.svg"
TITLES = dict(fla="FLA", cudnn="cuDNN", cudnn_ready="cuDNN, ready inputs", flash_kda="FlashKDA")
TITLES |= dict(attn_gym="attention-gym", ieee="plain float32", fla_bf16="FLA bf16", one="one GPU", gather="all-gather")
TITLES |= dict(no_relay="without relay", chain="single operators", bare="attention alone", whole="not split")
TITLES |= {"share": "share of copy rate", "peak": "peak GiB", "graph cold": "cold, by graph"}

WAYS = {"sustained": "Times are sustained", "graph cold": "Times are cold, by CUDA graph"}

# ---- cells -----------------------------------------------------------------------------------------------------------


def short(x: float) -> str:
    """Three digits, fewer below 0.1."""
    return f"{x:.{0 if x >= 100 else 1 if x >= 10 else 2 if x >= 1 else 3}f}"


def value(row: dict, who: str, what: str) -> Any:
    """A contender's time in ms ("cold", "graph sustained", ...), largest "error", or "peak" in GiB; None if there is none."""
    found = row["contenders"].get(who, {})
    if what == "error":
        return max(map(float, found["error"].values())) if found.get("error") else None
    if what == "peak":
        return found["peak_above_bytes"] / 2**30 if found.get("peak_above_bytes") is not None else None
    return found.get(what.replace(" ", "_") + "_ms")


def ratio(row: dict, column: str) -> float | None:
    """The quotient of a column `a/b what`."""
    pair, _, what = column.partition(" ")
    a, b = (value(row, who, what) for who in pair.split("/"))
    return a / b if a and b else None


def cell(row: dict, column: str, unit: str, copy_tb_s: float) -> str:
    who, _, what = column.partition(" ")
    if who == "segments":
        return " ".join(map(str, row.get("segments", ["-"])))
    if "/" in who:
        found = ratio(row, column)
        return "-" if found is None else f"{found:.2f}x"
    if who == "share":
        ms = value(row, "ours", what)
        return f"{row['bytes'] / copy_tb_s / 1e9 / ms:.0%}" if ms and "bytes" in row else "-"
    found = value(row, who, what)
    if found is None:
        return "-"
    if what == "error":
        return f"{found:.1e}".replace("e-0", "e-")
    return short(found * 1e3) if unit == "us" and what != "peak" else short(found)


def title(column: str, way: str) -> str:
    """`way`: the kind of time that the table's caption names."""
    who, _, what = column.partition(" ")
    said = "/".join(TITLES.get(x, x) for x in who.split("/"))
    return said if what in ("", way) else f"{said}, {TITLES.get(what, what)}"


def markdown(table: Sequence[Sequence[str]]) -> str:
    lines = [table[0], ["---", *("---:" for _ in table[0][1:])], *table[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows of a results file, by names and by tables; of a table, those without named gates. `columns`: `who what`."""

    results: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    unit: str = "ms"

    def __call__(self) -> str:
        document = load(RESULTS / f"{self.results}.json")
        rows = [row for row in document["rows"] if self.has(row)]
        used = {row["run"]: document["runs"][row["run"]] for row in rows}
        way = max(WAYS, key=[x.partition(" ")[2] for x in self.columns].count)
        table = [[self.unit, *(title(column, way) for column in self.columns)]]
        for row in rows:
            copy = used[row["run"]]["ceilings"].get("copy_tb_s", 1.0)
            table.append([row["name"], *(cell(row, column, self.unit, copy) for column in self.columns)])
        commits = ", ".join(sorted({f"`{run['commit'][:7]}`" for run in used.values()}))
        said = [f"{WAYS[way]}, on {self.results[-4:].upper()}, at {commits}."]
        for column in (x for x in self.columns if "/" in x):
            known = [x for row in rows if (x := ratio(row, column)) is not None]
            if len(known) > 1:
                mean, least, most = statistics.geometric_mean(known), min(known), max(known)
                said.append(f"{title(column, way)}: {mean:.2f}x in the geometric mean, {least:.2f}x to {most:.2f}x.")
        return f"{markdown(table)}\n\n{' '.join(said)}"

    def has(self, row: dict) -> bool:
        gates = " gates" in row["name"] and row["table"] != "shards"
        return row["name"] in self.rows or (row["table"] in self.rows and not gates and "[" not in row["name"])


def kernels(results: str, *names: str) -> str:
    """Microseconds of each kernel of ours, a column per row of a results file."""
    rows = [x for x in load(RESULTS / f"{results}.json")["rows"] if x["name"] in names]
    each = [{x["kernel"]: x for x in row["contenders"]["ours"]["kernels"]} for row in rows]
    table = [["us", *(row["name"] for row in rows)]]
    for name in dict.fromkeys(name for found in each for name in found if name.endswith("_kernel")):
        times = [f"{x[name]['ms'] * 1e3:.0f}" if name in x else "-" for x in each]
        table.append([f"`{name.removesuffix('_kernel')}`", *times])
    return markdown(table)


SUSTAINED = ("ours sustained", "fla sustained", "cudnn sustained", "fla/ours sustained")
FLASH_KDA = ("ours sustained", "flash_kda sustained", "flash_kda/ours sustained", "ours error", "flash_kda error")
GRAPH = ("ours graph cold", "cudnn graph cold", "cudnn_ready graph cold", "cudnn/ours graph cold")
STEP = ("ours graph cold", "fla graph cold", "fla/ours graph cold", "share graph cold")
LAYER = ("ours graph cold", "bare graph cold", "chain graph cold", "fla graph cold", "fla/ours graph cold")
ENGINE = ("ours graph cold", "engine graph cold", "engine/ours graph cold", "share graph cold")
TRAIN = ("ours sustained", "fla sustained", "fla/ours sustained", "ours peak", "fla peak", "ours error")
RANKS = ("one sustained", "ours sustained", "one/ours sustained", "gather sustained", "fla sustained", "ours error")
WY = ("ours graph cold", "fla graph cold", "fla/ours graph cold", "ours error")
FLOAT32 = ("ours graph cold", "ieee graph cold", "fla cold", "fla_bf16 cold", "ours error", "fla error")
SHOWN = [f"N{N} H32 {state}" for state in ("fp32", "bf16") for N in (1, 8, 32, 128, 256)]
LAYERS = ("Kimi-Linear decode", "SGLang decode", "Kimi-K3 whole step")
SERVED = tuple(f"{layer} N{N} {state} H32" for layer in LAYERS for state in ("fp32", "bf16") for N in (32, 128))

TABLES: dict[str, Callable[[], str]] = {
    "prefill-h200": Table("prefill-h200", ("prefill", "few heads"), SUSTAINED),
    "flashkda-h200": Table("flashkda-h200", ("prefill", "few heads"), FLASH_KDA),
    "prefill-h100": Table("prefill-h100", ("prefill", "few heads"), SUSTAINED[:2] + SUSTAINED[3:]),
    "few-heads": Table("prefill-h200", ("few heads",), ("segments", "ours graph cold", "ours sustained")),
    "cudnn-h200": Table("prefill-h200", ("shards",), GRAPH),
    "fp32": Table("prefill-h200", ("fp32",), FLOAT32),
    "decode-h200": Table("decode-h200", tuple(SHOWN), STEP, "us"),
    "engines-h100": Table("decode-h100", SERVED, ENGINE, "us"),
    "train-h200": Table("train-h200", ("train",), TRAIN),
    "train-kernels": lambda: kernels("train-h200", "B1 T8192 H32", "B1 T8192 H32 softplus"),
    "wy-h200": Table("train-h200", ("wy",), WY, "us"),
    "layer-h100": Table("layer-h100", tuple(f"decode {name}" for name in SHOWN), LAYER, "us"),
    "layer-train-h100": Table("layer-h100", ("train",), TRAIN),
    "ranks-h200": Table("ranks-h200", ("forward", "forward + backward", "packed"), RANKS),
}

# ---- README ----------------------------------------------------------------------------------------------------------

HEADLINES = {
    "prefill: 8192 tokens, 64 heads": ("prefill-h200", "T8192 H64", "ms"),
    "the same, beside FlashKDA": ("flashkda-h200", "T8192 H64", "ms"),
    "Kimi-K3's 96 heads, beside FlashKDA": ("flashkda-h200", "T8192 H96", "ms"),
    "packed: 8192 tokens of 20 sequences, 64 heads": ("prefill-h200", "packed 20 random H64", "ms"),
    "long: 131072 tokens, 8 heads": ("prefill-h200", "T131072 H8", "ms"),
    "training: 8192 tokens, 32 heads": ("train-h200", "B1 T8192 H32", "ms"),
    "decode: 128 sequences, 32 heads, float32 states": ("decode-h200", "N128 H32 fp32", "us"),
    "decode: the same, bfloat16 states": ("decode-h200", "N128 H32 bf16", "us"),
    "layer: decode, 128 sequences, 32 heads": ("layer-h100", "decode N128 H32 bf16", "us"),
    "vLLM's prefill: 8 sequences of 1024, 32 heads": ("prefill-h100", "Kimi-Linear prefill 8 x 1024 H32", "ms"),
    "SGLang's prefill: the same": ("prefill-h100", "SGLang prefill 8 x 1024 H32", "ms"),
    "vLLM's decode: 128 sequences, 32 heads": ("decode-h100", "Kimi-Linear decode N128 fp32 H32", "us"),
    "vLLM's decode: the same, bfloat16 states": ("decode-h100", "Kimi-Linear decode N128 bf16 H32", "us"),
}
"""README's rows: results file, row and unit."""

BESIDE: dict[str, tuple[str, ...]] = {"FLA": ("fla",), "FlashKDA": ("flash_kda",), "the engine's kernel": ("engine",)}
BESIDE |= {"cuDNN": ("cudnn", "cudnn_ready", "cudnn_cute")}
"""README's columns, each the fastest of these contenders."""


def headlines() -> dict[str, tuple[str, dict[str, tuple[float, str]], str, str]]:
    """Per headline: our time, by column how many times as fast ours is and the column's time, the program, the commit."""
    found = {}
    for what, (results, name, unit) in HEADLINES.items():
        document = load(RESULTS / f"{results}.json")
        row = next(x for x in document["rows"] if x["name"] == name)
        # the first of those that most have
        kinds = ("graph cold", "sustained")
        kind = max(kinds, key=lambda x: len([who for who in row["contenders"] if value(row, who, x)]))
        said = {who: f"{cell(row, f'{who} {kind}', unit, 1.0)} {unit}" for who in row["contenders"]}
        gains = {who: x for who in said if (x := ratio(row, f"{who}/ours {kind}"))}
        # only where all of them have a time
        there = {x: {*of} & {*row["contenders"]} for x, of in BESIDE.items()}
        beside = {x: min((gains[w], said[w]) for w in of) for x, of in there.items() if of and of <= {*gains}}
        found[what] = said["ours"], beside, document["program"], document["runs"][row["run"]]["commit"][:7]
    return found


def served() -> list[list[str]]:
    """README's line of a server's tokens per second, once `benchmarks/serve/run.py times` has left a serve-*.json there."""
    lines = []
    for path in sorted(RESULTS.glob("serve-*.json")):
        row = [x for x in load(path)["samples"] if x["scenario"] == "linear" and x["row"].startswith("tokens/s")]
        if row:
            ours, engine = (f"{statistics.median(x[mode] for x in row):,.0f} tokens/s" for mode in ("on", "off"))
            name = f"[vLLM serves random Kimi-Linear layers: {row[0]['row'][10:]}](benchmarks/results/{path.name})"
            engine += f" ({statistics.median(x['on'] / x['off'] for x in row):.2f}x)"
            gpu = load(path)["engines"]["linear:on"]["gpu"][7:]
            lines.append([name, ours, "-", "-", engine, "-", gpu, "`python benchmarks/serve/run.py times --waves 3`"])
    return lines


def readme() -> str:
    lines = [["", "ours", *BESIDE, "GPU, commit", "repeat with"]]
    for what, (ours, beside, program, commit) in headlines().items():
        results, name, _ = HEADLINES[what]
        cells = ["{1} ({0:.2f}x)".format(*beside[x]) if x in beside else "-" for x in BESIDE]
        library = "VLLM_LIBRARIES=FOLDER " * ("FlashKDA" in beside)
        repeat = f'`{library}python -m benchmarks.{program} --rows "{name}"`'
        link = f"[{what}](benchmarks/results/{results}.json)"
        lines.append([link, ours, *cells, f"{results[-4:].upper()}, `{commit}`", repeat])
    return markdown(lines + served())


TABLES["readme"] = readme


def picture() -> str:
    """README's picture: ours and FLA's times in pairs of bars, as shares of FLA's."""
    rows, width = {k: x for k, x in headlines().items() if "FLA" in x[1] and "FlashKDA" not in x[1]}, 330
    style = "font-family='sans-serif' font-size='12'"
    said = "As shares of FLA's time, sustained; decode and layer cold, by CUDA graph"
    parts = [f"<text x='10' y='18' {style}>{escape(said)}</text>"]
    for i, (what, (ours, beside, *_)) in enumerate(rows.items()):
        times, fla = beside["FLA"]
        y, bar = 52 + 64 * i, width / times
        what = f"{what}, {HEADLINES[what][0][-4:].upper()}"
        parts += [
            f"<text x='10' y='{y - 6}' {style}>{escape(what)}</text>",
            f"<rect x='10' y='{y}' width='{width}' height='17' fill='silver'/>",
            f"<text x='{width + 16}' y='{y + 13}' {style}>FLA {fla}</text>",
            f"<rect x='10' y='{y + 18}' width='{bar:.1f}' height='17' fill='#1f77b4'/>",
            f"<text x='{bar + 16:.1f}' y='{y + 31}' {style}>flashdelta {ours}, {times:.1f}x as fast</text>",
        ]
    size = f"viewBox='0 0 {width + 170} {36 + 64 * len(rows)}' width='{width + 170}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size}>\n<rect width='100%' height='100%' fill='white'/>"
    return "\n".join([head, *parts, "</svg>\n"])


# ---- pages -----------------------------------------------------------------------------------------------------------


def page(text: str) -> str:
    """A document with its tables made anew."""
    return MARKED.sub(lambda match: match[1] + match[2] + TABLES[match[1]]() + match[3], text)


def changed() -> dict[Path, str]:
    """New contents of the documents, and of the picture, that differ."""
    pages = [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    made = {path: page(path.read_text()) for path in pages} | {PICTURE: picture()}
    return {path: text for path, text in made.items() if not path.exists() or path.read_text() != text}


def main() -> None:
    for path, text in changed().items():
        print(f"wrote: {path.relative_to(ROOT)}")
        path.write_text(text)


if __name__ == "__main__":
    main()
