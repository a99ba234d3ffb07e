"""Records the machine code of every kernel: a line for each (kernel, variant, architecture), a file for each Triton version.

A line holds what the code costs, a hash of it, the fingerprint of all that determines it (`variants.fingerprint`) and a
digest of the line, so that nobody edits it by hand. `make record` writes the files.

Fingerprints take minutes. So beside each file stands a digest of it and of all sources that fingerprints depend on: where that
is still right, the recorded fingerprints are the sources'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from .costs import Costs

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "machine_code"

PACKAGE = (
    *("__init__.py", "backends.py", "kernels", "ops", "parallel", "problem", "program", "reference", "runtime"),
    *("tools/__init__.py", "tools/cases.py", "tools/compile.py"),
)
MAKERS = ("cases", "decoding", "fused", "inputs", "layer", "oracle", "prefills", "rounding", "wy", "__init__")
"""In `tests/support`, of the calls that kernels are compiled for."""
SOURCES = (
    *(f"src/flashdelta/{name}" for name in PACKAGE),
    *(f"tests/support/{name}.py" for name in MAKERS),
    *("tests/__init__.py", "tests/compile/__init__.py", "tests/compile/costs.py", "tests/compile/variants.py"),
)
"""Files that fingerprints depend on but for Triton itself; `test_machine_code_is_as_recorded` sees that it is all."""

DEVICE_SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes that a CTA may use on the device: 163, 99 and 227 KB."""


@dataclass(frozen=True, order=True)
class Entry:
    """A kernel to be compiled. Its name is for the reader: a renamed kernel with the same fingerprint is the same entry."""

    arch: int
    variant: str
    kernel: str
    fingerprint: str

    @property
    def key(self) -> tuple[int, str, str]:
        return self.arch, self.variant, self.fingerprint

    @property
    def name(self) -> tuple[int, str, str]:
        return self.arch, self.variant, self.kernel

    def __str__(self) -> str:
        return f"sm_{self.arch} {self.kernel}: {self.variant}"


Records = dict[Entry, Costs]

HEADER = ("arch", "variant", "kernel", *(f.name for f in fields(Costs)), "fingerprint", "digest")


def _digest(line: Sequence[str], triton: str) -> str:
    return hashlib.sha256("\t".join((triton, *line)).encode()).hexdigest()[:8]


def path_of(triton: str) -> Path:
    return FOLDER / f"triton-{triton}.tsv"


def recorded_tritons() -> list[str]:
    return sorted(path.stem.removeprefix("triton-") for path in FOLDER.glob("triton-*.tsv"))


def columns(entry: Entry, costs: Costs) -> tuple[str, ...]:
    """Columns of a line, but for the digest."""
    return tuple(map(str, (entry.arch, entry.variant, entry.kernel, *astuple(costs), entry.fingerprint)))


def render(records: Records, triton: str) -> str:
    lines = ["\t".join(HEADER)]
    for entry in sorted(records):
        own = columns(entry, records[entry])
        lines.append("\t".join((*own, _digest(own, triton))))
    return "\n".join(lines) + "\n"


def parse(text: str, triton: str) -> Records:
    """
    Raises:
        ValueError: a line whose digest is not its own.
    """
    found: Records = {}
    for number, line in enumerate(text.splitlines()[1:], 2):
        *own, digest = line.split("\t")
        if len(own) + 1 != len(HEADER) or digest != _digest(own, triton):
            raise ValueError(
                f"triton-{triton}.tsv line {number}: the digest is not that of the line (edited by hand?): {line}"
            )
        arch, variant, kernel, *costs, sass, fingerprint = own
        found[Entry(int(arch), variant, kernel, fingerprint)] = Costs(*map(int, costs), sass)
    return found


def read(triton: str) -> Records:
    return parse(path_of(triton).read_text(), triton)


def write(records: Records, triton: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    path_of(triton).write_text(render(records, triton))


def source_files() -> list[Path]:
    paths = (ROOT / name for name in SOURCES)
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def sources() -> str:
    """A digest of them."""
    total = hashlib.sha256()
    for file in source_files():
        total.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return total.hexdigest()


def sources_path_of(triton: str) -> Path:
    return path_of(triton).with_suffix(".sources")


def _bound(sources: str, triton: str) -> str:
    """A digest of the sources and of the record, that neither is taken for that of another."""
    return hashlib.sha256(f"{sources}\n".encode() + path_of(triton).read_bytes()).hexdigest()


def write_sources(sources: str, triton: str) -> None:
    """Says that the record holds the fingerprints of these sources."""
    sources_path_of(triton).write_text(f"{_bound(sources, triton)}\n")


def holds_sources(triton: str) -> bool:
    """Whether the recorded fingerprints are known to be those of the sources as they are."""
    path = sources_path_of(triton)
    return path.is_file() and path.read_text().strip() == _bound(sources(), triton)


@dataclass(frozen=True)
class Comparison:
    """Entries that the source makes, beside those recorded: `same` ones, by what is recorded; `stale` ones, whose
    fingerprint changed, by what was recorded under their name; `missing` ones; `gone` ones, which nothing makes any more."""

    same: dict[Entry, Costs]
    stale: dict[Entry, Costs]
    missing: list[Entry]
    gone: list[Entry]

    @property
    def new(self) -> list[Entry]:
        """Entries to compile."""
        return [*self.stale, *self.missing]

    @property
    def before(self) -> dict[Entry, Costs]:
        """Costs that are recorded, or were before the source changed."""
        return self.same | self.stale


def compare(entries: Iterable[Entry], records: Records) -> Comparison:
    entries = list(entries)
    known = {entry.key: entry for entry in records}
    same = {entry: records[known[entry.key]] for entry in entries if entry.key in known}
    made = {entry.key for entry in same}
    left = {entry.name: entry for entry in records if entry.key not in made}
    stale = {entry: records[left.pop(entry.name)] for entry in entries if entry not in same and entry.name in left}
    missing = [entry for entry in entries if entry not in same and entry not in stale]
    return Comparison(same, stale, missing, list(left.values()))


def faults(costs: Costs, arch: int) -> list[str]:
    """Faults that no machine code may have, recorded or not."""
    found = []
    if costs.late_operands:
        found.append(f"{costs.late_operands} operands of asynchronous MMAs are written late, at most 0")
    if costs.shared_bytes > DEVICE_SHARED_BYTES[arch]:
        found.append(f"{costs.shared_bytes} bytes of shared memory, sm_{arch} has {DEVICE_SHARED_BYTES[arch]}")
    return found


def all_faults(compiled: Records) -> list[str]:
    return [f"{entry}: {fault}" for entry, costs in compiled.items() for fault in faults(costs, entry.arch)]


def violations(comparison: Comparison, compiled: dict[Entry, Costs]) -> list[str]:
    """Lists what is wrong, a line each. `compiled`: what was compiled now, all that is new and a sample of the rest."""
    lines = all_faults(compiled)
    for entry, costs in compiled.items():
        if entry in comparison.same and (changed := comparison.same[entry].differences(costs)):
            lines.append(f"{entry}: the record is wrong: {changed}")
    for entry, before in comparison.stale.items():
        changed = (
            before.differences(compiled[entry]) or "the same machine code" if entry in compiled else "not compiled"
        )
        lines.append(f"{entry}: stale, its source changed since the record: {changed}")
    lines += [f"{entry}: not recorded" for entry in comparison.missing]
    return lines + [f"{entry}: recorded, but no longer made" for entry in comparison.gone]


def changes(before: Records, after: Records) -> list[str]:
    """Entries whose machine code changed, a line each: `... registers 128 -> 130, ...`. Renamed kernels are not changes."""
    named = {entry.name: costs for entry, costs in before.items()}
    alike = {(entry.arch, entry.variant, costs) for entry, costs in before.items()}
    lines, matched = [], set()
    for entry, costs in after.items():
        if (entry.arch, entry.variant, costs) in alike:
            matched.add((entry.arch, entry.variant, costs))
        elif entry.name in named:
            lines.append(f"{entry}: {named[entry.name].differences(costs)}")
            matched.add((entry.arch, entry.variant, named[entry.name]))
        else:
            lines.append(f"{entry}: new: {costs}")
    for entry, costs in before.items():
        if (entry.arch, entry.variant, costs) not in matched:
            lines.append(f"{entry}: gone")
    return lines
