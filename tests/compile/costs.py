"""Compiles a launch's kernel, and reads off what its machine code costs."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass, fields

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from flashdelta.program.launch import Launch
from flashdelta.tools.compile import source


@dataclass(frozen=True)
class Costs:
    """Registers a thread, bytes spilled a thread, bytes of shared memory a CTA, waits for asynchronous MMAs, operands of those
    that are written late, instructions, and a hash of the instructions."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    mma_waits: int
    late_operands: int
    instructions: int
    sass: str

    def differences(self, other: Costs) -> str:
        """`registers 128 -> 130, ...`; empty if the machine code is the same."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return ", ".join(f"{name} {a} -> {b}" for name, a, b in pairs if a != b)


def compiled(launch: Launch, arch: int) -> CompiledKernel:
    return triton.compile(source(launch), target=GPUTarget("cuda", arch, 32), options=launch.options())


def compile_launch(launch: Launch, arch: int) -> Costs:
    return costs_of(compiled(launch, arch), arch)


def costs_of(kernel: CompiledKernel, arch: int) -> Costs:
    cubin = kernel.asm["cubin"]
    registers, spills = resource_usage(cubin)
    sass = listing(kernel) if arch == 90 else ""
    code = machine_code(cubin)
    return Costs(
        registers=registers,
        spill_bytes=spills,
        shared_bytes=kernel.metadata.shared,
        # they multiply where ptxas serialises MMAs, which it does without failing: for want of registers, or because an operand
        # changes too early
        mma_waits=sass.count("WARPGROUP.DEPBAR"),
        late_operands=late_operands(sass),
        instructions=len(code) // INSTRUCTION_BYTES,
        sass=hashlib.sha256(code).hexdigest()[:16],
    )


INSTRUCTION_BYTES = 16
"""Volta and newer."""


def machine_code(cubin: bytes) -> bytes:
    """A kernel's instructions, in which there are no names: the `.text` sections of the ELF file."""
    sections, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 40)
    headers = [struct.unpack_from("<II2Q2Q", cubin, sections + size * i) for i in range(count)]
    strings = headers[names][4]
    found = []
    for name, _, _, _, offset, length in headers:
        begin = strings + name
        if cubin[begin : begin + 6] == b".text.":
            found.append(cubin[offset : offset + length])
    return b"".join(found)


def _inspect(tool: str, cubin: bytes, *options: str) -> str:
    """Asks one of the tools that Triton carries about a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [getattr(knobs.nvidia, tool).path, *options, f.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def listing(kernel: CompiledKernel) -> str:
    """A kernel's machine code in words."""
    return _inspect("nvdisasm", kernel.asm["cubin"], "-c")


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack (spills) a thread."""
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", _inspect("cuobjdump", cubin, "-res-usage"))
    return int(registers), int(stack)


def late_operands(sass: str) -> int:
    """Registers of left operands of Hopper's asynchronous MMAs that are written when they should have been before: after
    the fence before the MMA, or while it is under way. ptxas does that to constants, and the MMA reads what was there
    before."""
    fenced: set[int] = set()
    flying: set[int] = set()
    found = 0
    for line in sass.splitlines():
        match = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*) ?(.*)", line)
        if match is None:
            continue
        operation, operands = match[1], match[2]
        if operation == "WARPGROUP.ARRIVE":
            fenced.clear()
        elif operation.startswith("WARPGROUP.DEPBAR"):
            flying.clear()
        elif operation.startswith("HGMMA"):
            if left := re.match(r"R\d+, R(\d+)", operands):
                registers = set(range(int(left[1]), int(left[1]) + 4))
                found += len(registers & fenced)
                flying |= registers
        elif (written := re.match(r"R(\d+)", operands)) and not operation.startswith(("ST", "RED")):
            wide = re.search(r"\.(64|128)\b|\.M88\.(4)", operation)
            count = {"64": 2, "128": 4, "4": 4}[wide[1] or wide[2]] if wide else 1
            registers = set(range(int(written[1]), int(written[1]) + count))
            found += len(registers & flying)
            fenced |= registers
    return found
