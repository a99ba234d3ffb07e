"""The variants that most calls run. docs/machine-code.md keeps their spills in view, in a table that `make record` writes."""

from __future__ import annotations

from dataclasses import dataclass

from . import records
from .records import Costs, Entry
from .toolchains import ROOT

PAGE = ROOT / "docs" / "machine-code.md"
BEGIN, END = "<!-- hot variants: written by `make record` -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Hot:
    """A kernel of one of the variants of `variants.py`, for sm_90."""

    name: str
    kernel: str
    variant: str

    def costs(self, found: dict[Entry, Costs]) -> Costs:
        own = (90, self.variant, f"{self.kernel}_kernel")
        (costs,) = (costs for entry, costs in found.items() if entry.name == own)
        return costs


HOT = (
    Hot("Hopper `prepare`, bounded gate", "prepare", "hopper K128 V128 fixed length"),
    Hot("Hopper `prepare`, packed", "prepare", "hopper K128 V128 offsets in int64"),
    Hot("Hopper `prepare`, unbounded gate", "prepare", "hopper K128 V128 unbounded, fixed length"),
    Hot("Hopper `recurrence`, fixed length", "recurrence", "hopper K128 V128 fixed length"),
    Hot("Hopper `recurrence`, packed", "recurrence", "hopper K128 V128 offsets in int64"),
    Hot("Hopper `recurrence`, stream-K", "recurrence", "hopper K128 V128 stream-K, fixed length"),
    Hot("Hopper `recurrence`, packed, stream-K", "recurrence", "hopper K128 V128 stream-K, offsets in int64"),
    Hot("Hopper `prepare`, in steps", "prepare_steps", "hopper steps K128 V128 fixed length"),
    Hot(
        "Hopper `prepare`, in steps, unbounded gate", "prepare_steps", "hopper steps K128 V128 unbounded, fixed length"
    ),
    Hot("Hopper `recurrence`, in steps", "recurrence", "hopper steps K128 V128 fixed length"),
    Hot("Hopper `recurrence`, in steps, packed", "recurrence", "hopper steps K128 V128 offsets in int64"),
    Hot("Hopper `recurrence`, in steps, stream-K", "recurrence", "hopper steps K128 V128 stream-K, fixed length"),
    Hot("Hopper `recurrence`, split", "recurrence", "hopper K128 V128 split, fixed length"),
    Hot("Hopper `transitions`", "transitions", "hopper K128 V128 split, fixed length"),
    Hot("Hopper `transitions`, on trial", "transitions", "hopper tried K128 V128, fixed length"),
    Hot("Hopper `decode`", "decode", "hopper decode K128 V128, lower_bound"),
    Hot("Hopper `reverse`", "reverse", "hopper K128 V128 backward, fixed length"),
    Hot("Hopper `wy`", "wy", "hopper K128 V128 backward, fixed length"),
    Hot("Hopper `wy`, the operator", "wy", "hopper wy K128 V128 fixed length"),
    Hot("Hopper `intra`", "intra", "hopper K128 V128 backward, fixed length"),
    Hot("Triton `prepare_bounded`", "prepare_bounded", "bf16 K128 V128 bounded"),
    Hot("Triton `recurrence`", "recurrence", "bf16 K128 V128 bounded"),
    Hot("Triton `decode`, few", "decode", "decode K128 V128, fp32 states, V first, N=2"),
    Hot("Triton `decode`, many", "decode", "decode K128 V128, fp32 states, V first, N=256"),
)


def table() -> str:
    """Of all recorded Tritons, in Markdown: registers and spilled bytes a thread, and instructions."""
    tritons = records.recorded_tritons()
    found = {triton: records.read(triton) for triton in tritons}
    lines = ["| variant | " + " | ".join(tritons) + " |", "| --- |" + " ---: |" * len(tritons)]
    for hot in HOT:
        cells = (hot.costs(found[triton]) for triton in tritons)
        shown = (f"{c.registers} / {c.spill_bytes} / {c.instructions}" for c in cells)
        lines.append(f"| {hot.name} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with its table as recorded."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]
