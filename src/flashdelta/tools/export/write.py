"""Writes an export: the files of c/ with what this export holds filled in, the table of kernels, and their machine code."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ...problem.operations import PREFILL_GATES, PREFILL_SIZES
from . import bindings
from .cubins import OPS, Kernel, parameters_of, wanted_kernels

HERE = Path(__file__).parent
TEMPLATES = ("flashdelta.h", "CMakeLists.txt")
COPIED = ("runtime.h", "runtime.c", "prefill.c", "decode.c")
BINDINGS = "flashdelta_ctypes.py"

NUMBERS_A_LINE = 32


def write(kernels: Sequence[Kernel], out: Path, version: str) -> list[Path]:
    """Fills the folder `out`, which is made if need be; returns its files. Others that lie there stay.

    Raises:
        ValueError: there is no kernel to write.
    """
    if not kernels:
        raise ValueError("kernels: got none, wanted at least one")
    out.mkdir(parents=True, exist_ok=True)
    cubins = [f"{kernel.symbol}.c" for kernel in kernels]
    filled = {"@VERSION@": version, "@CUBINS@": "\n    ".join(cubins)}
    texts = {name: (HERE / "c" / name).read_text() for name in TEMPLATES + COPIED}
    for name in TEMPLATES:
        for mark, text in filled.items():
            texts[name] = texts[name].replace(mark, text)
    names = parameter_names()
    texts["parameters.h"] = parameters_header(names, kernels)
    texts["kernels.c"] = table(kernels, names)
    texts |= {name: machine_code(kernel) for name, kernel in zip(cubins, kernels)}
    written = []
    for name, text in texts.items():
        (out / name).write_text(text)
        written.append(out / name)
    shutil.copyfile(bindings.__file__, out / BINDINGS)
    return [*written, out / BINDINGS]


def parameter_names() -> list[str]:
    """Of all kernels that can be exported: c/ has a value for each, whether or not an export needs it."""
    names: dict[str, str] = {}
    for wanted in wanted_kernels(OPS, PREFILL_SIZES[:1], PREFILL_GATES[:1]):
        for name, kind in parameters_of(wanted.launch(90)):
            kind = "pointer" if kind.startswith("*") else kind
            if names.setdefault(name, kind) != kind:
                raise RuntimeError(f"{name}: a parameter of type {names[name]} in one kernel and {kind} in another")
    return list(names)


C_NAMES = {"chunk_slots": "slots", "v_new": "pseudo"}
"""Parameters that c/ has under other names than the kernels."""

GENERATED = "/* Written by `flashdelta export`. */\n"


def c_name(parameter: str) -> str:
    """Of a kernel's parameter in c/."""
    return f"FD_P_{C_NAMES.get(parameter, parameter)}"


def parameters_header(names: Sequence[str], kernels: Sequence[Kernel]) -> str:
    arches = sorted({kernel.arch for kernel in kernels})
    listed = "".join(f"    {c_name(name)},\n" for name in names)
    return (
        f"{GENERATED}#ifndef FLASHDELTA_PARAMETERS_H\n#define FLASHDELTA_PARAMETERS_H\n\n"
        f"/* Parameters of kernels, by name. */\nenum fd_parameter {{\n{listed}    FD_PARAMETERS\n}};\n\n"
        f"#define FD_KERNELS {len(kernels)}\n"
        f'#define FD_ARCHITECTURES "{", ".join(f"sm_{arch}" for arch in arches)}"\n\n#endif\n'
    )


def table(kernels: Sequence[Kernel], names: Sequence[str]) -> str:
    lines = [GENERATED, '#include "runtime.h"\n\n']
    lines += [f"extern const unsigned char {kernel.symbol}[];\n" for kernel in kernels]
    orders: dict[tuple[str, ...], str] = {}
    for kernel in kernels:
        order = tuple(name for name, _ in kernel.parameters)
        if order not in orders:
            orders[order] = f"order_{len(orders)}"
            listed = ", ".join(map(c_name, order))
            lines.append(f"\nstatic const unsigned char {orders[order]}[] = {{{listed}}};\n")
    lines.append("\nconst fd_kernel fd_kernels[] = {\n")
    for kernel in kernels:
        order = tuple(name for name, _ in kernel.parameters)
        variant = ", ".join(map(str, kernel.wanted.variant()))
        lines.append(
            f'    {{{{{variant}}}, {kernel.arch}, {int(kernel.specific)}, "{kernel.entry}", {kernel.symbol}, {kernel.threads}, '
            f"{kernel.shared_bytes}, {kernel.slices}, {int(kernel.overlaps)}, {len(order)}, {orders[order]}}},\n"
        )
    lines.append("};\n\nconst unsigned fd_kernel_count = FD_KERNELS;\n")
    return "".join(lines)


def machine_code(kernel: Kernel) -> str:
    """The cubin as an array, aligned as the driver wants an ELF image."""
    numbers = [str(byte) for byte in kernel.cubin]
    rows = (",".join(numbers[i : i + NUMBERS_A_LINE]) for i in range(0, len(numbers), NUMBERS_A_LINE))
    declared = f"extern const unsigned char {kernel.symbol}[];\n"
    return (
        f"{GENERATED}{declared}_Alignas(16) const unsigned char {kernel.symbol}[] = {{\n" + ",\n".join(rows) + "\n};\n"
    )
