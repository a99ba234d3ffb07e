"""`flashdelta export`: the kernels as a C library."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import flashdelta

from ...kernels.stages.launch import SHARED_MEMORY
from ...problem.errors import rule
from ...problem.operations import PRECISIONS, PREFILL_GATES, PREFILL_SIZES
from ...problem.problem import DEFAULT_PRECISION
from ..export.cubins import OPS, compile_kernels, wanted_kernels
from ..export.write import write
from ..files import counted, in_bytes, whole_folder

Choice = Mapping[str, Sequence[str]]


def run_export(out: Path, arches: Sequence[str], choice: Choice, jobs: int | None) -> None:
    """Compiles and writes what was chosen, everything where nothing was (of precisions: the default one).

    Raises:
        ValueError: a choice that there is not, or a folder that can't be written; the message names it.
    """
    sizes = {",".join(map(str, size)): size for size in PREFILL_SIZES}
    wanted = wanted_kernels(
        _chosen("op", choice, OPS),
        _chosen("size", choice, list(sizes), sizes.__getitem__),
        _chosen("gate", choice, PREFILL_GATES),
        _chosen("precision", {"precision": (DEFAULT_PRECISION,), **choice}, PRECISIONS),
    )
    numbers = {f"sm_{arch}": arch for arch in SHARED_MEMORY}
    chosen = _chosen("arch", {"arch": arches}, list(numbers), numbers.__getitem__)
    log = Console(stderr=True, highlight=False)
    with whole_folder("out", out) as unfinished:
        log.print(f"compiling {counted(len(wanted), 'kernel')} for {', '.join(arches)}", soft_wrap=True)
        kernels = compile_kernels(wanted, chosen, jobs)
        files = write(kernels, unfinished, flashdelta.__version__)
    size = sum(len(kernel.cubin) for kernel in kernels)
    log.print(f"{counted(len(files), 'file')} in {out}, {in_bytes(size)} of machine code", soft_wrap=True)
    log.print(f"next: cmake -S {out} -B {out / 'build'} && cmake --build {out / 'build'}", soft_wrap=True)


def _chosen(name: str, choice: Choice, known: Sequence[str], convert: Callable[[str], Any] = str) -> list[Any]:
    """The values of an option, each once; all that are known where none is given."""
    values = choice.get(name) or known
    for value in values:
        rule(name, value in known, f"one of {', '.join(known)}", repr(value))
    return [convert(value) for value in dict.fromkeys(values)]
