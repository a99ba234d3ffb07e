"""What every kernel may cost, by architecture: registers, spilled bytes, shared memory, waits for products
(`compile_budget.json`).

Record it anew after a change to a kernel (and read the diff):

    FLASHDELTA_TRITON_OLDEST=<folder with triton 3.6.0> python -m tests.compile_budget

Compiles for GPUs that need not be there. A budget is the largest cost on any Triton it was recorded with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flashdelta

FILE = Path(__file__).with_name("compile_budget.json")
ARCHITECTURES = (80, 89, 90, 100, 120)
COSTS = ("registers", "spill_bytes", "shared_bytes", "product_waits")

DEVICE_SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""What a program may use on the device: 163, 99 and 227 KB."""

OLDEST = "FLASHDELTA_TRITON_OLDEST"
"""Environment variable: a folder that holds the oldest supported Triton, as `pip install --target` leaves it."""


def toolchains() -> dict[str, Path | None]:
    """The Tritons to compile with: the installed one (None), and the oldest supported one if its folder is given."""
    oldest = os.environ.get(OLDEST)
    return {"installed": None} | ({"oldest": Path(oldest)} if oldest else {})


def report(arch: int, toolchain: Path | None) -> list[dict]:
    """The costs of all kernels for `arch`: dicts with kernel, variant, arch, triton, registers, spill_bytes, ..."""
    path = [toolchain, Path(flashdelta.__file__).parent.parent, os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p) for p in path if p)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "flashdelta.compile", "--arch", str(arch), "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"compiling for sm_{arch} failed:\n{done.stderr[-6000:]}")
    return json.loads(done.stdout)


def key(cost: dict) -> str:
    return f"sm_{cost['arch']} {cost['kernel']}: {cost['variant']}"


def read() -> dict[str, dict[str, int]]:
    return json.loads(FILE.read_text())["kernels"]


def violations(costs: list[dict], budget: dict[str, dict[str, int]], arch: int) -> list[str]:
    """What is wrong with the costs of all kernels on `arch`, one line each; none if all is well."""
    lines = []
    for cost in costs:
        allowed = budget.get(key(cost))
        if allowed is None:
            lines.append(f"{key(cost)}: not in the budget")
            continue
        for name in COSTS:
            if cost[name] > allowed[name]:
                lines.append(f"{key(cost)}: {cost[name]} {name}, at most {allowed[name]} (Triton {cost['triton']})")
        if cost["late_operands"]:
            lines.append(f"{key(cost)}: {cost['late_operands']} late_operands, at most 0 (Triton {cost['triton']})")
        if cost["shared_bytes"] > DEVICE_SHARED_BYTES[arch]:
            lines.append(
                f"{key(cost)}: {cost['shared_bytes']} shared_bytes, the device has {DEVICE_SHARED_BYTES[arch]}"
            )
    wanted = {name for name in budget if name.startswith(f"sm_{arch} ")}
    lines += [f"{name}: in the budget, but not compiled" for name in sorted(wanted - {key(cost) for cost in costs})]
    return lines


def main() -> None:
    jobs = [(arch, toolchain) for toolchain in toolchains().values() for arch in ARCHITECTURES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        costs = [cost for costs in pool.map(lambda job: report(*job), jobs) for cost in costs]
    kernels: dict[str, dict[str, int]] = {}
    for cost in sorted(costs, key=lambda cost: (cost["kernel"], cost["variant"], cost["arch"])):
        largest = kernels.setdefault(key(cost), dict.fromkeys(COSTS, 0))
        for name in COSTS:
            largest[name] = max(largest[name], cost[name])
    tritons = sorted({cost["triton"] for cost in costs})
    FILE.write_text(json.dumps({"triton": tritons, "kernels": kernels}, indent=1) + "\n")
    print(f"{len(kernels)} kernels with Triton {', '.join(tritons)}: {FILE}")
    wrong = [
        line for arch in ARCHITECTURES for line in violations([c for c in costs if c["arch"] == arch], kernels, arch)
    ]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
