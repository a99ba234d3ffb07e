"""Writes an export: the files of c/ with what this export holds filled in, the table of kernels, and their machine code."""

from collections.abc import Sequence
from pathlib import Path

from ...problem.errors import rule
from ...problem.operations import PREFILL_GATES, PREFILL_SIZES
from . import bindings
from .cubins import OPS, Kernel, parameters_of, wanted_kernels

NUMBERS_A_LINE = 32


def write(kernels: Sequence[Kernel], out: Path, version: str) -> list[Path]:
    """Fills the folder `out`, which is made if need be; returns its files. Others that lie there stay.

    Raises:
        ValueError: there is no kernel to write.
    """
    rule("kernels", len(kernels) > 0, "at least one", "none")
    out.mkdir(parents=True, exist_ok=True)
    texts = {path.name: path.read_text() for path in sorted((Path(__file__).parent / "c").iterdir())}
    for mark, text in marks(kernels, version).items():
        texts = {name: template.replace(f"@{mark}@", text) for name, template in texts.items()}
    texts |= {f"{kernel.symbol}.c": machine_code(kernel) for kernel in kernels}
    texts["flashdelta_ctypes.py"] = Path(bindings.__file__).read_text()
    for name, text in texts.items():
        (out / name).write_text(text)
    return [out / name for name in texts]


def marks(kernels: Sequence[Kernel], version: str) -> dict[str, str]:
    """Text that the files of c/ leave open, by the mark that stands for it (between two @)."""
    orders: dict[str, str] = {}
    for kernel in kernels:
        orders.setdefault(order_of(kernel), f"order_{len(orders)}")
    return {
        "VERSION": version,
        "CUBINS": "\n    ".join(f"{kernel.symbol}.c" for kernel in kernels),
        "PARAMETERS": ",\n    ".join(map(c_name, parameter_names())),
        "KERNELS": str(len(kernels)),
        "ARCHITECTURES": ", ".join(f"sm_{arch}" for arch in sorted({kernel.arch for kernel in kernels})),
        "DECLARATIONS": "\n".join(f"extern const unsigned char {kernel.symbol}[];" for kernel in kernels),
        "ORDERS": "\n".join(f"static const unsigned char {name}[] = {{{order}}};" for order, name in orders.items()),
        "TABLE": ",\n    ".join(row(kernel, orders[order_of(kernel)]) for kernel in kernels),
    }


def parameter_names() -> list[str]:
    """Names of the parameters of all kernels that can be exported: c/ has a value for each."""
    names: dict[str, str] = {}
    for wanted in wanted_kernels(OPS, PREFILL_SIZES[:1], PREFILL_GATES[:1]):
        for name, kind in parameters_of(wanted.launch(90)):
            kind = "pointer" if kind.startswith("*") else kind
            if names.setdefault(name, kind) != kind:
                raise RuntimeError(f"{name}: a parameter of type {names[name]} in one kernel and {kind} in another")
    return list(names)


C_NAMES = {"chunk_slots": "slots", "v_new": "pseudo"}
"""Parameters that c/ has under other names than the kernels."""


def c_name(parameter: str) -> str:
    """Name of a kernel's parameter in c/."""
    return f"FD_P_{C_NAMES.get(parameter, parameter)}"


def order_of(kernel: Kernel) -> str:
    return ", ".join(c_name(name) for name, _ in kernel.parameters)


def row(kernel: Kernel, order: str) -> str:
    """An `fd_kernel`; `order` is the array that lists its parameters."""
    variant = ", ".join(map(str, kernel.wanted.variant()))
    specific = int(kernel.arch >= 90)  # Triton compiles sm_90 and newer with features that later ones do not have
    return (
        f'{{{{{variant}}}, {kernel.arch}, {specific}, "{kernel.entry}", {kernel.symbol}, {kernel.threads}, '
        f"{kernel.shared_bytes}, {kernel.slices}, {int(kernel.overlaps)}, {len(kernel.parameters)}, {order}}}"
    )


def machine_code(kernel: Kernel) -> str:
    """The cubin as an array, aligned as the driver wants an ELF image."""
    numbers = [str(byte) for byte in kernel.cubin]
    rows = (",".join(numbers[i : i + NUMBERS_A_LINE]) for i in range(0, len(numbers), NUMBERS_A_LINE))
    declared = f"extern const unsigned char {kernel.symbol}[];"
    defined = f"_Alignas(16) const unsigned char {kernel.symbol}[] = {{"
    return "\n".join(("/* Written by `flashdelta export`. */", declared, defined, ",\n".join(rows), "};\n"))
