"""Random inputs for one KDA call."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .cases import Shape

Inputs = dict[str, "Tensor | None"]
"""The tensors of a call by argument name; None where the call has none."""

MODEL_OPTIONS: dict[str, object] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
    "output_final_state": True,
}
"""The options of a benchmark row: L2 norm, bounded gate and beta sigmoid in the kernel, final state returned."""

UNBOUNDED_OPTIONS = MODEL_OPTIONS | {"safe_gate": False, "lower_bound": None}
"""The same with a gate that has no bound, `softplus`."""


def generator_of(device: torch.device, seed: int) -> torch.Generator | None:
    """None on the meta device, whose tensors have shapes only."""
    return None if device.type == "meta" else torch.Generator(device=device).manual_seed(seed)


def random_inputs(
    shape: Shape,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    initial_state: bool = False,
    forgetful: bool = False,
    seed: int = 0,
) -> Inputs:
    """Draws q, k, v, raw g, beta logits, `A_log [HV]`, `dt_bias [HV * K]` (both float32), `cu_seqlens` (int64) and,
    on request, a float32 `initial_state [N, HV, K, V]`.

    `dt_bias` is uniform in `[-8, 1]`: under a gate, some channels forget within a token and others remember hundreds,
    so an error in the state that passes between chunks shows in the outputs. (All-normal gate inputs forget at once:
    `forgetful`, with `exp(A_log)` uniform in `[1, 16]` as models are initialised.)
    """
    generator = generator_of(device, seed)

    def normal(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)

    B, T, H, HV, K, V = shape.B, shape.tokens, shape.H, shape.value_heads, shape.K, shape.V
    inputs: Inputs = {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, HV, V),
        "g": normal(B, T, HV, K),
        "beta": normal(B, T, HV),
        "A_log": 0.5 * normal(HV, dtype=torch.float32),
        "dt_bias": torch.rand(HV * K, generator=generator, device=device) * 9 - 8,
        "cu_seqlens": offsets(shape, device),
    }
    if forgetful:
        rate = torch.rand(HV, generator=generator, device=device) * 15 + 1
        inputs |= {"A_log": rate.log(), "dt_bias": 0.5 * normal(HV * K, dtype=torch.float32)}
    if initial_state:
        inputs["initial_state"] = normal(shape.sequences, HV, K, V, dtype=torch.float32)
    return inputs


def offsets(shape: Shape, device: torch.device) -> Tensor | None:
    """`cu_seqlens [N + 1]` of a packed shape, int64."""
    if not shape.lengths:
        return None
    return torch.tensor([0, *itertools.accumulate(shape.lengths)], device=device, dtype=torch.int64)
