"""Step 4: what the pipeline brings. Times need a Hopper GPU; without one only the machine code is compared.

python -m examples.gluon.step_4_measure
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.testing import do_bench

from flashdelta.program.launch import Launch
from tests.compile.costs import Costs, compile_launch

from . import step_2_multiply, step_3_pipeline

SIZE = 8192


def error(found: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> float:
    """Relative, against a product in float32 of the same rows."""
    truth = x.float() @ y.float()
    return float((found.float() - truth).norm() / truth.norm())


def ways() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    found = {"one stage": step_2_multiply.multiply, "PyTorch": torch.matmul}
    found |= {f"{n} stages": lambda x, y, n=n: step_3_pipeline.multiply(x, y, n) for n in (2, 3, 4)}
    return found


def measure(size: int = SIZE) -> dict[str, tuple[float, float]]:
    """Error and TFLOP/s of each way to form a product of two matrices `[size, size]`. No time without a right result."""
    x, y = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = {}
    for name, multiply in ways().items():
        wrong = error(multiply(x, y), x, y)
        if not wrong < 5e-3:
            raise SystemExit(f"{name}: error {wrong}, wanted less than 5e-3")
        ms = do_bench(lambda multiply=multiply: multiply(x, y), return_mode="median")
        found[name] = wrong, 2 * size**3 / ms / 1e9
    return found


def launches() -> dict[str, Launch]:
    x = torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device="meta")
    found = {"one stage": step_2_multiply.launch(x, x, x)}
    return found | {f"{n} stages": step_3_pipeline.launch(x, x, x, n) for n in (2, 3, 4)}


def costs() -> dict[str, Costs]:
    return {name: compile_launch(launch, 90) for name, launch in launches().items()}


def main() -> None:
    for name, cost in costs().items():
        print(f"{name:9} {cost.registers} registers, {cost.spill_bytes} bytes spilled, {cost.shared_bytes} shared")
    if not torch.cuda.is_available():
        print("no GPU: nothing to time")
        return
    for name, (wrong, rate) in measure().items():
        print(f"{name:9} {rate:6.1f} TFLOP/s, error {wrong:.1e}")


if __name__ == "__main__":
    main()
