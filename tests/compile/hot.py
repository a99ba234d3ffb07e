"""The variants that most calls run. docs/machine-code.md keeps their spills in view, in a table that `make record` writes."""

from __future__ import annotations

from . import records
from .records import Costs, Entry
from .toolchains import ROOT

PAGE = ROOT / "docs" / "machine-code.md"
BEGIN, END = "<!-- hot variants: written by `make record` -->\n", "<!-- end -->\n"


KERNELS = {
    "prepare": ("fixed length", "offsets in int64", "unbounded, fixed length"),
    "recurrence": (
        *("fixed length", "offsets in int64", "stream-K, fixed length", "stream-K, offsets in int64"),
        "split, fixed length",
    ),
    "transitions": ("split, fixed length",),
    "reverse": ("backward, fixed length",),
    "wy": ("backward, fixed length",),
    "intra": ("backward, fixed length",),
}
HOT = (
    *((kernel, f"hopper K128 V128 {end}") for kernel, ends in KERNELS.items() for end in ends),
    *(("prepare_steps", f"hopper steps K128 V128 {end}") for end in ("fixed length", "unbounded, fixed length")),
    *(("recurrence", f"hopper steps K128 V128 {end}") for end in KERNELS["recurrence"][:3]),
    *((kernel, "hopper forgetting K128 V128, fixed length") for kernel in ("prepare", "transitions", "recurrence")),
    *((kernel, "hopper forgetting steps K128 V128, fixed length") for kernel in ("prepare_steps", "recurrence")),
    ("decode", "hopper decode K128 V128, lower_bound"),
    ("wy", "hopper wy K128 V128 fixed length"),
    ("prepare_mma", "bf16 K128 V128 bounded"),
    ("recurrence", "bf16 K128 V128 bounded"),
    *(("decode", f"decode K128 V128, fp32 states, V first, N={N}") for N in (2, 256)),
)
"""Kernels and the variants of `variants.py`, on sm_90."""


def hot_costs(found: dict[Entry, Costs]) -> list[tuple[str, str, Costs]]:
    by_name = {entry.name: costs for entry, costs in found.items()}
    return [(kernel, variant, by_name[90, variant, f"{kernel}_kernel"]) for kernel, variant in HOT]


def table() -> str:
    """Lists for all recorded Tritons, in Markdown, registers and spilled bytes per thread, and instructions."""
    tritons = records.recorded_tritons()
    lines = ["| kernel | variant | " + " | ".join(tritons) + " |", "| --- | --- |" + " ---: |" * len(tritons)]
    for rows in zip(*(hot_costs(records.read(triton)) for triton in tritons)):
        shown = (f"{c.registers} / {c.spill_bytes} / {c.instructions}" for *_, c in rows)
        lines.append(f"| `{rows[0][0]}` | {rows[0][1]} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with its table as recorded."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]
